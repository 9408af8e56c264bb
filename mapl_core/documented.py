"""Documented runs: results that are committed, in docs/runs, small enough for that and still whole for every table.

A documented run is one metrics.csv with the rows of all jobs of Table 1, a manifest.json with the command, the machine
and what each job's manifest said, and, where a row has a single seed, an evaluation.csv with the tables' metrics by
task, because intervals over tasks need it. `load_results` reads it like the folder it was made from.

    python -m mapl_core.documented results/pocket docs/runs/pocket-DATE --command "..." --machine "..."
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mapl_core import figures, report, scoreboard, table_formats
from mapl_core.grid import parse
from mapl_core.plan import survey
from mapl_core.results import (
    EVALUATION_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    JobEvaluationRow,
    ResultError,
    read_json,
    write_atomically,
    write_job_evaluation,
    write_metrics,
)
from mapl_core.runs import Results, Run, load_results, nothing_finished
from mapl_core.tables import COLUMNS, table1

RUNS_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "runs"
KEPT = ("seconds", "peak_memory_mib", "device", "model", "parameters")
ENVIRONMENT = ("python", "platform", "threads", "versions")


def largest_documented_run() -> Path:
    """The documented run with the most jobs; of several such the last by name, which ends with the date.

    Raises:
        ResultError: if there is none, as where only the package is installed.
    """
    found = []
    for path in sorted(RUNS_FOLDER.glob(f"*/{MANIFEST_FILE}")):
        found.append((len(read_json(path).get("jobs", {})), path.parent))
    if not found:
        raise ResultError(f"no documented run in {RUNS_FOLDER}; run ./reproduce.sh and give results/<profile>")
    return max(found)[1]


def document(results: Results, folder: Path | str, *, command: str, machine: str) -> list[Path]:
    """Write metrics.csv, manifest.json and, if a row has one seed only, evaluation.csv; returns the paths.

    Args:
        results: the finished runs; those of Table 1 are kept.
        folder: where to, such as docs/runs/pocket-2026-11-30.
        command: exactly what was typed.
        machine: cores, memory, and what else ran there.

    Raises:
        ResultError: if no job of Table 1 has finished.
    """
    folder, runs = Path(folder), [run for run in results.runs if run.is_default]
    if not runs:
        raise nothing_finished(results, "table1")
    write_metrics(folder / METRICS_FILE, [row for run in runs for row in run.metrics])
    paths = [folder / METRICS_FILE]
    seeds = Counter((run.metrics[0].domain, run.metrics[0].method, run.metrics[0].paradigm) for run in runs)
    if 1 in seeds.values():
        write_job_evaluation(folder / EVALUATION_FILE, [row for run in runs for row in _evaluation(run)])
        paths.append(folder / EVALUATION_FILE)
    first = runs[0].manifest.get("environment", {})
    about = {
        "command": command,
        "machine": machine,
        "profile": results.profile,
        "task_source": " and ".join(sorted({run.source for run in runs})),
        "seeds": sorted({run.seed for run in runs}),
        "environment": {name: first[name] for name in ENVIRONMENT if name in first},
        "jobs": {run.name: _job(run) for run in runs},
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return [*paths, folder / MANIFEST_FILE]


def _evaluation(run: Run) -> list[JobEvaluationRow]:
    kept = {column.metric for column in COLUMNS.get(run.metrics[0].domain, ())}
    return [
        JobEvaluationRow(run.name, row.task_id, row.iteration, row.metric, row.value)
        for row in run.evaluation
        if row.metric in kept
    ]


def _job(run: Run) -> dict[str, Any]:
    environment = run.manifest.get("environment", {})
    entry = {name: run.manifest[name] for name in KEPT if name in run.manifest}
    entry |= {name: environment.get(name) for name in ("commit", "dirty")}
    return entry | {"tasks": run.manifest.get("tasks", {}).get("counts", {})}


def check_up_to_date(source: Path, profile: str | None = None) -> None:
    """Refuse results that the runner would not use.

    Raises:
        ResultError: naming the jobs that are damaged, or were made with other settings, code, tasks or weights.
    """
    request = parse(["--profile", profile or source.name, "--results", str(source.resolve().parent)])
    found = survey(request).found
    wrong = [f"  {job.name}: {of}" for job, of in found.items() if of.is_unusable]
    if wrong:
        listed = "\n".join(wrong)
        raise ResultError(f"cannot document these jobs; run them again with --force outdated first:\n{listed}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: document a profile's results and write its tables, figures, scoreboard and report beside it."""
    parser = argparse.ArgumentParser(prog="python -m mapl_core.documented", description=main.__doc__)
    parser.add_argument("source", help="results/<profile>")
    parser.add_argument("folder", help="docs/runs/<profile>-<date>")
    parser.add_argument("--command", required=True, help="exactly what was typed")
    parser.add_argument("--machine", required=True, help="cores, memory, and what else ran there")
    parser.add_argument("--profile", help="name or .yaml file; default: the name of the source's folder")
    given = parser.parse_args(arguments)
    check_up_to_date(Path(given.source), given.profile)
    paths = document(load_results(given.source), given.folder, command=given.command, machine=given.machine)
    results, folder = load_results(given.folder), Path(given.folder)
    paths += table_formats.write_table(table1(results), folder, "table1")
    panels = figures.write_figure2(results, folder)
    paths += [path for figure in panels for path in figure.paths]
    paths += scoreboard.write_scoreboard(scoreboard.scoreboard(results), results.profile, folder)
    for path in [path for path in paths if path.suffix == ".html"]:  # the report holds both of these pages
        path.unlink()
        paths.remove(path)
    paths.append(report.write_report(results, panels, folder / "report.html"))
    for path in paths:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
