"""Finished jobs as tables and figures read them: rows, runs by seed, values by evaluation task."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
# "single" is the paradigm of a single agent; the others are those of a team, (agents)-(comparator).
PARADIGM_NAMES = {"dec-dec": "Dec-Dec", "cen-cen": "Cen-Cen", "dec-cen": "Dec-Cen", "single": "Single agent"}
SINGLE_AGENT = ("single_raw", "single_grpo", "single_ppo", "single_dpo")
WITHOUT_TRAINING = ("single_raw", "untrained", "sequential", "discussion")


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
    """The results of one finished job, as its files hold them."""

    folder: Path
    seed: int
    metrics: Sequence[MetricRow]
    evaluation: Sequence[EvaluationRow]
    source: str
    parameters: Mapping[str, Any]

    @property
    def iterations(self) -> int:
        return max(row.iteration for row in self.evaluation)

    def tasks(self, metric: str, iteration: int | None = None) -> dict[str, float]:
        """Task id -> value of an oracle metric after `iteration` iterations (default: the last)."""
        iteration = self.iterations if iteration is None else iteration
        return {row.task_id: row.value for row in self.evaluation if (row.metric, row.iteration) == (metric, iteration)}

    def count(self, name: str) -> float:
        """What the run had counted when it ended: joint responses trained on, played, compared; 0 if never counted."""
        rows = [row for row in self.metrics if row.metric == f"count/{name}"]
        return max(rows, key=lambda row: row.iteration).value if rows else 0.0

    def env_steps(self, metric: str) -> dict[int, int]:
        """Iteration -> joint responses the agents had been trained on when `metric` was evaluated."""
        return {row.iteration: row.env_steps for row in self.metrics if row.metric == metric}


def load_run(folder: Path | str) -> Run:
    """Read a finished job's folder.

    Raises:
        ResultError: if a file is damaged, or metrics.csv is not the mean over tasks of evaluation.csv.
    """
    folder = Path(folder)
    metrics, evaluation = read_metrics(folder / METRICS_FILE), read_evaluation(folder / EVALUATION_FILE)
    if not metrics or not evaluation:
        raise ResultError(f"{folder} holds no measured numbers; run its job again")
    manifest = read_manifest(folder / MANIFEST_FILE)
    source = manifest.get("tasks", {}).get("source", "not recorded")
    run = Run(folder, metrics[0].seed, metrics, evaluation, source, manifest.get("parameters", {}))
    by_task: dict[tuple[str, int], list[float]] = {}
    for row in evaluation:
        by_task.setdefault((row.metric, row.iteration), []).append(row.value)
    for row in metrics:
        values = by_task.get((row.metric, row.iteration))
        if values and not math.isclose(row.value, math.fsum(values) / len(values), rel_tol=1e-9, abs_tol=1e-9):
            raise ResultError(f"{folder}: {row.metric} at iteration {row.iteration} is not the mean over its tasks")
    return run


def load_rows(
    profile_folder: Path | str, domain: str, rows: Iterable[TableRow], leave_out: Collection[str] = ()
) -> dict[TableRow, dict[int, Run]]:
    """Finished runs of each row, by seed. Unfinished jobs are left out; a damaged one raises ResultError.

    Args:
        profile_folder: results/<profile>; its jobs lie in jobs/<domain>-<method>-<paradigm>-seed<n>.
        leave_out: names of jobs that must not be used, such as those made with other settings.
    """
    jobs = Path(profile_folder) / "jobs"
    found: dict[TableRow, dict[int, Run]] = {}
    for row in rows:
        name = re.compile(rf"{domain}-{row.method}-{row.paradigm}-seed\d+")
        for folder in sorted(jobs.iterdir() if jobs.is_dir() else ()):
            manifest = folder / MANIFEST_FILE
            if folder.name in leave_out:
                continue
            if name.fullmatch(folder.name) and manifest.is_file() and read_manifest(manifest)["status"] == DONE:
                run = load_run(folder)
                found.setdefault(row, {})[run.seed] = run
    return found


def by_seed(runs: Mapping[int, Run], metric: str, iteration: int | None = None) -> dict[int, dict[str, float]]:
    """Seed -> task id -> value: what `interval` and `difference` take."""
    return {seed: run.tasks(metric, iteration) for seed, run in sorted(runs.items())}


def describe_runs(rows: Mapping[TableRow, Mapping[int, Run]]) -> str:
    """Task source, number of evaluation tasks and seeds of the given runs, for titles: never left unsaid."""
    runs = [run for by_seed in rows.values() for run in by_seed.values()]
    sources = " and ".join(sorted({run.source for run in runs}))
    counts = sorted({len({row.task_id for row in run.evaluation}) for run in runs})
    seeds = sorted({len(runs) for runs in rows.values()})
    tasks = " or ".join(str(count) for count in counts)
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    return f"{sources} tasks, {tasks} for evaluation, {number} seed{'' if seeds == [1] else 's'}"
