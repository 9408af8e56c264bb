"""The runner: plan the jobs of a request, run in parallel those that are not done, then write tables and figures.

A job is a notebook run into results/<profile>/jobs/<job>/. Finished jobs are recognised by content and skipped, so that
the same command, given again after an interruption, does the rest. A job needs no other job's output: one run serves
every table and figure, and what two of them need is trained once. Exit codes: 0 all done, 1 something failed, 2 the
request cannot be carried out (nothing was written), 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mapl_core import jobs, report, scoreboard, table_formats, tables
from mapl_core.executors import Ended, Executor, make_executor
from mapl_core.grid import NOTEBOOK_FOLDER, Request, catalogue, parse
from mapl_core.inputs import Inputs
from mapl_core.plan import AGAIN, RESUMABLE, Plan, PlannedJob, await_orphans, describe_plan, make_plan, summary
from mapl_core.results import MANIFEST_FILE, check_writable, folder_lock, read_progress
from mapl_core.runs import load_results
from mapl_core.status import show_status

# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def run_plan(plan: Plan, executor: Executor) -> list[str]:
    """Run what is not done, several jobs at a time, under one progress bar.

    Returns:
        One message for every job that failed; the others have gone on meanwhile.

    Raises:
        KeyboardInterrupt: after the running jobs have been ended; what they had finished stays.
    """
    left, failures = plan.to_run, []
    progress = _Progress(left)
    try:
        executor.submit(left)
        while left:
            progress.show(left, executor.running())
            time.sleep(executor.poll_seconds)
            for ended in executor.finished():
                left.remove(ended.planned)
                if problem := _judge(ended):
                    failures.append(f"{ended.planned.job.name}: {problem}")
                    progress.write(f"FAILED {failures[-1]}")
        progress.show([], [])
    finally:
        executor.cancel()
        progress.close()
    return failures


def _judge(ended: Ended) -> str:
    planned = ended.planned
    return jobs.judge(planned.notebook, planned.folder, ended.exit_code, planned.knobs, ended.killed_by)


class _Progress:
    """One bar over all jobs, each as long as its expected time; running jobs count by the iterations behind them."""

    def __init__(self, planned: Sequence[PlannedJob]):
        from tqdm import tqdm

        self._all = list(planned)
        layout = "{desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left{postfix}"
        self._bar = tqdm(
            total=sum(entry.cost for entry in self._all),
            # Work of an earlier session, which says nothing of this one's pace.
            initial=sum(entry.cost * entry.fraction for entry in self._all),
            bar_format=layout,
            smoothing=0,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,  # between two states of the bar: a log file needs few
            miniters=0,
            disable=not self._all,
        )

    def show(self, left: Sequence[PlannedJob], running: Sequence[PlannedJob]) -> None:
        bar, number = self._bar, len(self._all)
        names = [entry.job.name for entry in running[:4]] + ([f"{len(running) - 4} more"] if len(running) > 4 else [])
        bar.set_description_str(f"{number - len(left)} of {number} jobs", refresh=False)
        bar.set_postfix_str(", ".join(names), refresh=False)
        fractions = {entry: entry.fraction for entry in left} | {entry: _fraction(entry) for entry in running}
        ahead = sum(entry.cost * (1 - fraction) for entry, fraction in fractions.items())
        bar.update(bar.total - ahead - bar.n)

    def write(self, line: str) -> None:
        self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def _fraction(planned: PlannedJob) -> float:
    """Share of its work that a running job has behind it, as its checkpoints tell; all of it once it is written."""
    progress = read_progress(planned.folder)
    return progress["fraction"] if progress else float((planned.folder / MANIFEST_FILE).exists())


def write_experiments(request: Request, plan: Plan) -> list[Path]:
    """Tables, figures and scoreboard of the request, and the report, from the profile's finished jobs; all paths."""
    results, written, panels = load_results(plan.folder, plan.left_out), [], []
    if "table1" in request.experiments:
        written += table_formats.write_table(tables.table1(results), plan.folder / "tables", "table1")
    if "figure2" in request.experiments:
        from mapl_core import figures

        panels = figures.write_figure2(results, plan.folder / "figures")
        written += [path for figure in panels for path in figure.paths]
    if "scoreboard" in request.experiments:
        judged = scoreboard.scoreboard(results)
        written += scoreboard.write_scoreboard(judged, results.profile, plan.folder / "tables")
    return [*written, report.write_report(results, panels, plan.folder / "report.html")]


def main(arguments: Sequence[str] | None = None, notebook_folder: Path = NOTEBOOK_FOLDER) -> int:
    """The command line of reproduce.sh; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--list" in arguments:
        print(catalogue())
        return 0
    if arguments[:1] == ["status"]:
        return show_status(arguments[1:], notebook_folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended politely: as on Ctrl-C, jobs are ended too
    try:
        check_only = "--check-arguments" in arguments
        request = parse([argument for argument in arguments if argument != "--check-arguments"])
        if check_only:
            return 0
        inputs = Inputs()
        plan = make_plan(request, notebook_folder, inputs)
        if request.dry_run:
            print(describe_plan(plan))
            return 0
        check_writable(plan.folder)
        with folder_lock(plan.folder):
            executor = make_executor(plan, request.slurm)
            await_orphans(plan.to_run)
            # Another runner may have finished jobs between the plan and the lock.
            return carry_out(request, make_plan(request, notebook_folder, inputs), executor)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        same = "the same command without --force" if "--force" in arguments else "the same command"
        print(f"\ninterrupted; finished jobs are kept, and {same} goes on from here", file=sys.stderr)
        return 130


def carry_out(request: Request, plan: Plan, executor: Executor) -> int:
    """Run the plan, write what the request asks for, and list at the end what failed; returns the exit code."""
    for planned in plan.to_run:
        if planned.found.state in (AGAIN, RESUMABLE):
            print(f"{planned.job.name}: {planned.found}")
    print(summary(plan), flush=True)
    failures: list[str] = []
    try:
        failures += run_plan(plan, executor)
        for path in write_experiments(request, plan):
            print(f"wrote {path}")
    except (ValueError, OSError) as error:
        failures.append(str(error))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
