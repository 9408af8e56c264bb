"""The runner: plan the jobs of a request, run in parallel those that are not done, then write tables and figures.

A job is a notebook run into results/<profile>/jobs/<job>/. Finished jobs are recognised by content and skipped, so that
the same command, given again after an interruption, does the rest. Exit codes: 0 all done, 1 something failed, 2 the
request cannot be carried out (nothing was written), 130 interrupted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mapl_core import jobs, report, scoreboard, table_formats, tables
from mapl_core.grid import BASELINES_NOTEBOOK, NOTEBOOK_FOLDER, Job, Request, UsageError, catalogue, jobs_below, parse
from mapl_core.results import MANIFEST_FILE, ResultError, as_plain, check_writable, folder_lock, verify_job
from mapl_core.runs import load_results

MEMORY_KNOBS = ("micro_batch_tokens", "cached_tokens", "samples_per_task")
CELL_MINUTES = 24 * 60  # the longest job is meant to fit into a day
POLL_SECONDS = 0.2
AGAIN = "to do again"  # begins the state of a job that left something behind


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedJob:
    """A job and what is known of it.

    Attributes:
        profile: name, or path of the YAML, as the notebook takes it.
        knobs: what to lower if memory runs out, with the present values.
        state: "done", "to do" or why it must run again, for the reader.
        afresh: whether what lies in its folder is thrown away first.
    """

    job: Job
    notebook: Path
    folder: Path
    profile: str
    knobs: tuple[str, ...]
    state: str
    afresh: bool

    @property
    def parameters(self) -> dict[str, Any]:
        job = self.job
        values = {"PROFILE": self.profile, "METHOD": job.method, "PARADIGM": job.paradigm, "SEED": job.seed}
        values |= {"DOMAIN": job.domain} if job.notebook == BASELINES_NOTEBOOK else {}
        return values | {"OUTPUT_DIR": str(self.folder)}


@dataclass(frozen=True)
class Plan:
    """All jobs of a request, the profile's folder, how many run at a time, and finished jobs that no table may use."""

    profile_name: str
    folder: Path
    threads: int
    workers: int
    jobs: list[PlannedJob]
    outdated: list[str]

    @property
    def to_run(self) -> list[PlannedJob]:
        return [planned for planned in self.jobs if planned.state != "done"]


def make_plan(request: Request, notebook_folder: Path = NOTEBOOK_FOLDER) -> Plan:
    """Check everything that can be checked before work, and find out what is done. Writes nothing.

    Raises:
        ValueError (UsageError, ResultError, ConfigError): for values, notebooks, models or data that cannot work, and
            for finished jobs that were made with other settings.
    """
    from mapl_core.profiles import load_profile

    profile = load_profile(request.profile)
    request = request.with_defaults(profile.grid)
    folder = request.results / profile.name
    planned = [_plan_job(job, profile, request, folder, notebook_folder) for job in request.jobs]
    _check_models(profile, [entry.job for entry in planned if entry.state != "done"])
    _check_data(profile, request.jobs)
    outdated = _outdated(profile, folder, notebook_folder)
    blocked = [f"  {entry.job.name}: {outdated[entry.job.name]}" for entry in planned if entry.job.name in outdated]
    if blocked and not request.force:
        listed = "\n".join(blocked)
        raise UsageError(
            f"finished jobs in {folder} were made with other settings:\n{listed}\n"
            "give --force to run them again, or --results DIR to keep both"
        )
    left_out = sorted(outdated.keys() - {entry.job.name for entry in planned})
    workers = request.workers or _default_workers(profile, request.jobs)
    return Plan(profile.name, folder, profile.threads, workers, planned, left_out)


def _config(profile: Any, job: Job) -> Any:
    """The job's RunConfig."""
    return profile.config(domain=job.domain, method=job.method, paradigm=job.paradigm, seed=job.seed)


def _default_workers(profile: Any, wanted: Sequence[Job]) -> int:
    """One job for every `threads` cores; but jobs with the paper's models fill a GPU, so there only one at a time."""
    sources = {_config(profile, job).source for job in wanted}
    return 1 if "paper" in sources and _has_gpu() else max(1, _cores() // profile.threads)


def _plan_job(job: Job, profile: Any, request: Request, folder: Path, notebook_folder: Path) -> PlannedJob:
    config = _config(profile, job)
    notebook, job_folder = notebook_folder / job.notebook, folder / "jobs" / job.name
    state, afresh = _state(notebook, job_folder)
    if request.force and job_folder.exists():
        state, afresh = f"{AGAIN} (--force)", True
    knobs = tuple(f"{name} (now {getattr(config, name)})" for name in MEMORY_KNOBS)
    planned = PlannedJob(job, notebook, job_folder, request.profile, knobs, state, afresh)
    jobs.check_names(notebook, planned.parameters)
    return planned


def _state(notebook: Path, folder: Path) -> tuple[str, bool]:
    """State of a job in words, and whether its folder holds something damaged that must go first."""
    if not (folder / MANIFEST_FILE).exists():
        return ("to do (resumes)" if folder.exists() else "to do"), False
    try:
        jobs.check_done(notebook, folder)
    except ResultError as error:
        return f"{AGAIN}: {error}", not _is_trained(folder)
    return "done", False


def _is_trained(folder: Path) -> bool:
    """Whether the run in the folder is whole, so that a notebook which failed after it need not train again."""
    try:
        verify_job(folder)
    except ResultError:
        return False
    return True


def _outdated(profile: Any, folder: Path, notebook_folder: Path) -> dict[str, str]:
    """Finished jobs below `folder` whose settings are not what the profile says today: name -> what differs."""
    found = {}
    for job in jobs_below(folder):
        try:
            made_with = jobs.check_done(notebook_folder / job.notebook, folder / "jobs" / job.name)
        except ResultError:
            continue
        config = _config(profile, job)
        now, then = as_plain(asdict(config)), made_with["parameters"]
        changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        if changed:
            found[job.name] = ", ".join(f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in changed)
    return found


def _check_models(profile: Any, to_run: Sequence[Job]) -> None:
    """Look at the name and folder of every model once, without reading weights, before any job starts."""
    from mapl_core.model_names import check_model_name

    for name in sorted({name for job in to_run for name in _config(profile, job).model_names}):
        check_model_name(name)
        if Path(name).is_dir() and not Path(name).is_absolute():
            raise UsageError(
                f"model {name!r} is a folder seen from here, and every job works in a folder of its own; give its "
                f"absolute path, {Path(name).resolve()}"
            )


def _check_data(profile: Any, wanted: Sequence[Job]) -> None:
    """Read the tasks once before any job starts, so that a damaged data file stops the run in its first seconds."""
    from mapl_core.domains import get_domain

    for domain in sorted({job.domain for job in wanted}):
        job = next(job for job in wanted if job.domain == domain)
        config = _config(profile, job)
        if config.source == "paper":
            continue  # a download; its job does it
        reader = get_domain(domain, **config.domain_options)
        for split, count in (("train", config.train_tasks), ("eval", config.eval_tasks)):
            reader.load_tasks(split, config.source, count)


def _has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_plan(plan: Plan) -> str:
    """What `--dry-run` prints."""
    lines = [f"{planned.job.name:32} {planned.state}" for planned in plan.jobs]
    return "\n".join([*lines, _summary(plan), f"results: {plan.folder}"])


def _summary(plan: Plan) -> str:
    done = len(plan.jobs) - len(plan.to_run)
    return (
        f"{len(plan.jobs)} jobs of profile {plan.profile_name}: {done} done, {len(plan.to_run)} to run, "
        f"{plan.workers} at a time, {plan.threads} thread{'' if plan.threads == 1 else 's'} each"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def run_plan(plan: Plan) -> list[str]:
    """Run what is not done, several jobs at a time, under one progress bar.

    Returns:
        One message for every job that failed; the others have gone on meanwhile.

    Raises:
        KeyboardInterrupt: after the running jobs have been ended; what they had finished stays.
    """
    from tqdm import tqdm

    waiting, running, failures = list(plan.to_run), {}, []
    number, done = len(waiting), 0
    layout = "{desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left{postfix}"
    seconds = 1.0 if sys.stderr.isatty() else 30.0  # between two states of the bar: a log file needs few
    work = sum(planned.job.weight for planned in waiting)
    bar = tqdm(total=work, bar_format=layout, smoothing=0, mininterval=seconds, miniters=0, disable=not waiting)
    try:
        while waiting or running:
            while waiting and len(running) < plan.workers:
                planned = waiting.pop(0)
                running[planned] = _start(planned, plan.threads)
            bar.set_description_str(f"{done} of {number} jobs", refresh=False)
            bar.set_postfix_str(", ".join(planned.job.name for planned in running), refresh=False)
            bar.update(0)
            time.sleep(POLL_SECONDS)
            for planned, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[planned]
                problem = jobs.judge(planned.notebook, planned.folder, process.returncode, planned.knobs)
                if problem:
                    failures.append(f"{planned.job.name}: {problem}")
                    tqdm.write(f"FAILED {failures[-1]}", file=sys.stderr)
                done += 1
                bar.update(planned.job.weight)
        bar.set_postfix_str("", refresh=False)
        bar.set_description_str(f"{done} of {number} jobs")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        bar.close()
    return failures


def _start(planned: PlannedJob, threads: int) -> subprocess.Popen:
    """Start a job: from its checkpoint where one is, from nothing where its results are damaged or not wanted."""
    if planned.afresh:
        shutil.rmtree(planned.folder, ignore_errors=True)
    return jobs.start(planned.notebook, planned.folder, planned.parameters, threads, CELL_MINUTES)


def write_experiments(request: Request, plan: Plan) -> list[Path]:
    """Tables, figures and scoreboard of the request, and the report, from the profile's finished jobs; all paths."""
    results, written, panels = load_results(plan.folder, plan.outdated), [], []
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended politely: as on Ctrl-C, jobs are ended too
    try:
        check_only = "--check-arguments" in arguments
        request = parse([argument for argument in arguments if argument != "--check-arguments"])
        if check_only:
            return 0
        plan = make_plan(request, notebook_folder)
        if request.dry_run:
            print(describe_plan(plan))
            return 0
        check_writable(plan.folder)
        with folder_lock(plan.folder):
            # Another runner may have finished jobs between the plan and the lock.
            return carry_out(request, make_plan(request, notebook_folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; finished jobs are kept, and the same command goes on from here", file=sys.stderr)
        return 130


def carry_out(request: Request, plan: Plan) -> int:
    """Run the plan, write what the request asks for, and list at the end what failed; returns the exit code."""
    for planned in plan.to_run:
        if planned.state.startswith(AGAIN):
            print(f"{planned.job.name}: {planned.state}")
    print(_summary(plan), flush=True)
    failures: list[str] = []
    try:
        failures += run_plan(plan)
        for path in write_experiments(request, plan):
            print(f"wrote {path}")
    except (ValueError, OSError) as error:
        failures.append(str(error))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
