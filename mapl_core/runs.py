"""Finished jobs as tables, figures and claims read them: rows, runs by seed, values by evaluation task.

`load_results` reads a profile's results (results/<profile>, a folder for every job) or a documented run (a folder of
docs/runs: one metrics.csv with the rows of all jobs, what was kept of their manifests in manifest.json, and an
evaluation.csv where single runs need one for their intervals). What follows does not know which of the two it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mapl_core.results import (
    DONE,
    EVALUATION_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    EvaluationRow,
    MetricRow,
    ResultError,
    read_evaluation,
    read_job_evaluation,
    read_json,
    read_manifest,
    read_metrics,
)

METHOD_NAMES = {
    "single_raw": "Single agent, raw",
    "single_grpo": "Single agent, GRPO",
    "single_ppo": "Single agent, PPO",
    "single_dpo": "Single agent, DPO",
    "untrained": "Parallel (untrained team)",
    "sequential": "Sequential",
    "discussion": "Discussion",
    "magrpo": "MAGRPO",
    "collm_cc": "CoLLM-CC",
    "collm_dc": "CoLLM-DC",
    "marlhf": "MARLHF",
    "madpo": "MADPO",
}
DOMAIN_NAMES = {"tldr": "TLDR", "coophe": "CoopHE", "bfcl": "BFCL", "travel": "Travel"}
# "single" is the paradigm of a single agent; the others are those of a team, (agents)-(comparator).
PARADIGM_NAMES = {"dec-dec": "Dec-Dec", "cen-cen": "Cen-Cen", "dec-cen": "Dec-Cen", "single": "Single agent"}
SINGLE_AGENT = ("single_raw", "single_grpo", "single_ppo", "single_dpo")
WITHOUT_TRAINING = ("single_raw", "untrained", "sequential", "discussion")
ALL_TASKS = "mean over all tasks"


@dataclass(frozen=True)
class TableRow:
    """One row of a table: a method under a paradigm, in the group it is printed under."""

    group: str
    method: str
    paradigm: str

    @property
    def label(self) -> str:
        name = METHOD_NAMES[self.method]
        return f"{name}, {PARADIGM_NAMES[self.paradigm]}" if self.method in ("marlhf", "madpo") else name


@dataclass(frozen=True)
class Run:
    """The results of one finished job, as its files hold them.

    Attributes:
        name: of the job.
        metrics: the rows of its metrics.csv.
        evaluation: its oracle metrics task by task; of a documented run without an evaluation.csv the mean over tasks
            alone, under the name `ALL_TASKS`.
        manifest: the job's manifest.
    """

    name: str
    metrics: Sequence[MetricRow]
    evaluation: Sequence[EvaluationRow]
    manifest: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return self.metrics[0].seed

    @property
    def is_default(self) -> bool:
        """Whether this is a job of Table 1; the job of another experiment says in its name what is different."""
        first = self.metrics[0]
        return self.name == f"{first.domain}-{first.method}-{first.paradigm}-seed{first.seed}"

    @property
    def source(self) -> str:
        return self.manifest.get("tasks", {}).get("source", "not recorded")

    @property
    def eval_tasks(self) -> int:
        """Number of evaluation tasks."""
        counted = self.manifest.get("tasks", {}).get("counts", {}).get("eval")
        return counted or len({row.task_id for row in self.evaluation})

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.manifest.get("parameters", {})

    @cached_property
    def _by_metric(self) -> dict[tuple[str, int], dict[str, float]]:
        found: dict[tuple[str, int], dict[str, float]] = {}
        for row in self.evaluation:
            found.setdefault((row.metric, row.iteration), {})[row.task_id] = row.value
        return found

    @cached_property
    def iterations(self) -> int:
        return max(row.iteration for row in self.evaluation)

    def tasks(self, metric: str, iteration: int | None = None) -> dict[str, float]:
        """Task id -> value of an oracle metric after `iteration` iterations (default: the last)."""
        return self._by_metric.get((metric, self.iterations if iteration is None else iteration), {})

    def count(self, name: str) -> float:
        """What the run had counted when it ended: joint responses trained on, played, compared; 0 if never counted."""
        rows = [row for row in self.metrics if row.metric == f"count/{name}"]
        return max(rows, key=lambda row: row.iteration).value if rows else 0.0

    def env_steps(self, metric: str) -> dict[int, int]:
        """Iteration -> joint responses the agents had been trained on when `metric` was evaluated."""
        return {row.iteration: row.env_steps for row in self.metrics if row.metric == metric}


@dataclass(frozen=True)
class Results:
    """Every finished run of one profile, read once.

    Attributes:
        folder: where they were read.
        profile: their profile's name.
        runs: in the order of their names.
        left_out: names of finished jobs that were not used.
        command, machine: how a documented run was made; empty elsewhere.
    """

    folder: Path
    profile: str
    runs: tuple[Run, ...]
    left_out: tuple[str, ...] = ()
    command: str = ""
    machine: str = ""

    @cached_property
    def by_method(self) -> Mapping[tuple[str, str], Sequence[Run]]:
        """(domain, method) -> its runs."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.metrics[0].domain, run.metrics[0].method), []).append(run)
        return found

    def rows(self, domain: str, rows: Iterable[TableRow]) -> dict[TableRow, dict[int, Run]]:
        """The runs of each row of a table that has any, by seed."""
        found: dict[TableRow, dict[int, Run]] = {}
        for row in rows:
            for run in self.by_method.get((domain, row.method), ()):
                if run.is_default and run.metrics[0].paradigm == row.paradigm:
                    found.setdefault(row, {})[run.seed] = run
        return found


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def load_results(folder: Path | str, leave_out: Collection[str] = ()) -> Results:
    """Read the finished runs in a folder: results/<profile>, or a documented run of docs/runs.

    Args:
        folder: a job without a finished manifest is skipped.
        leave_out: names of jobs that must not be used, such as those made with other settings, or damaged.

    Raises:
        ResultError: if a finished job is damaged, or the runs are of several profiles.
    """
    folder = Path(folder)
    about: Mapping[str, Any] = {}
    if (folder / METRICS_FILE).is_file():
        about = read_json(folder / MANIFEST_FILE)
        runs = _documented_runs(folder, about)
    else:
        runs = [load_run(job) for job in _finished_jobs(folder, leave_out)]
    profiles = sorted({run.metrics[0].profile for run in runs})
    if len(profiles) > 1:
        raise ResultError(f"{folder} holds runs of several profiles ({', '.join(profiles)}); keep them apart")
    return Results(
        folder=folder,
        profile=profiles[0] if profiles else folder.name,
        runs=tuple(runs),
        left_out=tuple(leave_out),
        command=about.get("command", ""),
        machine=about.get("machine", ""),
    )


def nothing_finished(results: Results, wanted: str) -> ResultError:
    """The error for a table or figure without any run, with what to do about it."""
    inside = sorted(entry.parent.name for entry in results.folder.glob("*/jobs"))
    hint = f"; give one profile's folder: {', '.join(inside)}" if inside else ""
    return ResultError(f"no finished job of {wanted} in {results.folder}{hint}; run ./reproduce.sh first")


def _finished_jobs(folder: Path, leave_out: Collection[str]) -> list[Path]:
    jobs = folder / "jobs"
    folders = [job for job in sorted(jobs.iterdir()) if job.name not in leave_out] if jobs.is_dir() else []
    manifests = [(job, job / MANIFEST_FILE) for job in folders]
    return [job for job, manifest in manifests if manifest.is_file() and read_manifest(manifest)["status"] == DONE]


def load_run(folder: Path | str) -> Run:
    """Read a finished job's folder.

    Raises:
        ResultError: if a file is damaged, or metrics.csv is not the mean over tasks of evaluation.csv.
    """
    folder = Path(folder)
    metrics, evaluation = read_metrics(folder / METRICS_FILE), read_evaluation(folder / EVALUATION_FILE)
    if not metrics or not evaluation:
        raise ResultError(f"{folder} holds no measured numbers; run its job again")
    run = Run(folder.name, metrics, evaluation, read_manifest(folder / MANIFEST_FILE))
    _check_means(run, str(folder))
    return run


def _check_means(run: Run, where: str) -> None:
    for row in run.metrics:
        values = run.tasks(row.metric, row.iteration).values()
        if values and not math.isclose(row.value, math.fsum(values) / len(values), rel_tol=1e-9, abs_tol=1e-9):
            raise ResultError(f"{where}: {row.metric} at iteration {row.iteration} is not the mean over its tasks")


def _documented_runs(folder: Path, about: Mapping[str, Any]) -> list[Run]:
    """The jobs of Table 1 in a documented run."""
    if "jobs" not in about:
        raise ResultError(f"{folder} is a single job; give the folder of a profile or of a documented run of many jobs")
    metrics: dict[str, list[MetricRow]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        metrics.setdefault(f"{row.domain}-{row.method}-{row.paradigm}-seed{row.seed}", []).append(row)
    by_task: dict[str, list[EvaluationRow]] = {}
    if (folder / EVALUATION_FILE).is_file():
        for row in read_job_evaluation(folder / EVALUATION_FILE):
            by_task.setdefault(row.job, []).append(EvaluationRow(row.task_id, row.iteration, row.metric, row.value))
    runs = []
    for name in sorted(metrics):
        # An oracle metric has a plain name, everything else one with a slash (see MetricRow).
        means = [
            EvaluationRow(ALL_TASKS, row.iteration, row.metric, row.value)
            for row in metrics[name]
            if "/" not in row.metric
        ]
        run = Run(name, metrics[name], by_task.get(name, means), _job_manifest(about, name))
        _check_means(run, f"{folder}, {name}")
        runs.append(run)
    return runs


def _job_manifest(about: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a documented run keeps of a job's manifest, in the form that manifest had."""
    job = about["jobs"].get(name, {})
    tasks = {"source": about.get("task_source", "not recorded"), "counts": job.get("tasks", {})}
    environment = about.get("environment", {}) | {key: job.get(key) for key in ("commit", "dirty")}
    kept = {key: value for key, value in job.items() if key not in ("tasks", "commit", "dirty")}
    return {"tasks": tasks, "environment": environment, **kept}


# ---------------------------------------------------------------------------------------------------------------------
# Selecting
# ---------------------------------------------------------------------------------------------------------------------


def by_seed(runs: Mapping[int, Run], metric: str, iteration: int | None = None) -> dict[int, dict[str, float]]:
    """Seed -> task id -> value: what `interval` and `difference` take.

    Raises:
        ResultError: if a run has not measured the metric.
    """
    values = {seed: run.tasks(metric, iteration) for seed, run in sorted(runs.items())}
    without = [runs[seed].name for seed, tasks in values.items() if not tasks]
    if without:
        raise ResultError(f"{', '.join(without)}: no {metric} was measured; run it again")
    return values


def describe_runs(rows: Mapping[TableRow, Mapping[int, Run]]) -> str:
    """Task source, number of evaluation tasks and seeds of the given runs, for titles: never left unsaid."""
    runs = [run for by_seed in rows.values() for run in by_seed.values()]
    sources = " and ".join(sorted({run.source for run in runs}))
    counts = sorted({run.eval_tasks for run in runs})
    seeds = sorted({len(runs) for runs in rows.values()})
    tasks = " or ".join(str(count) for count in counts)
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    return f"{sources} tasks, {tasks} for evaluation, {number} seed{'' if seeds == [1] else 's'}"
