"""Synthetic results with a known truth, made in memory: every row has its level, every seed and task some noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mapl_core.results import EvaluationRow, MetricRow
from mapl_core.runs import Results, Run
from mapl_core.tables import COLUMNS

DOMAINS = ("tldr", "coophe", "bfcl", "travel")
TASKS = 12
BUFFERS = {"marlhf": "decay 0.8", "madpo": "decay 0.2"}

# A world in which every claim about Table 1 is true; a third word names the metric for which a row stands elsewhere.
AS_THE_PAPER_SAYS = {
    **{("untrained", "dec-dec"): 0.30, ("sequential", "dec-dec"): 0.32, ("discussion", "dec-dec"): 0.34},
    **{("single_raw", "single"): 0.31, ("single_grpo", "single"): 0.40},
    **{("single_ppo", "single"): 0.38, ("single_dpo", "single"): 0.39},
    **{("magrpo", "dec-dec"): 0.80, ("collm_cc", "dec-dec"): 0.70, ("collm_dc", "dec-dec"): 0.68},
    **{("marlhf", "dec-dec"): 0.74, ("marlhf", "cen-cen"): 0.78, ("marlhf", "dec-cen"): 0.45},
    **{("madpo", "dec-dec"): 0.55, ("madpo", "cen-cen"): 0.60, ("madpo", "dec-cen"): 0.50},
    **{("marlhf", "dec-dec", "call"): 0.90, ("marlhf", "dec-dec", "success"): 0.90},
}
# Its mirror image, in which every one of them is false.
THE_OPPOSITE = {row: 1 - level for row, level in AS_THE_PAPER_SAYS.items()}
# All rows alike: nothing can be decided.
ALL_ALIKE = dict.fromkeys(AS_THE_PAPER_SAYS, 0.5)
ROWS = [row for row in AS_THE_PAPER_SAYS if len(row) == 2]
TABLE1_CLAIMS = (1, 2, 3, 4, 5, 6, 18, 19, 20)


def run(
    domain: str,
    row: tuple[str, str],
    seed: int,
    values: Mapping[str, Sequence[float]],
    *,
    comparator: str = "current",
    buffer: str = "",
    experiment: str = "table1",
) -> Run:
    """A finished run with one evaluation.

    Args:
        row: method and paradigm.
        values: metric -> value of every task.
        experiment: another one than table1 gives the job another name.
    """
    method, paradigm = row
    buffer = buffer or BUFFERS.get(method, "none")
    suffix = "" if experiment == "table1" else f"-{experiment}-{comparator}-{buffer}".replace(" ", "")
    cell = (experiment, "pocket", domain, method, paradigm, comparator, buffer, seed, 0, 100)
    return Run(
        name=f"{domain}-{method}-{paradigm}-seed{seed}{suffix}",
        metrics=[MetricRow(*cell, metric, float(np.mean(tasks))) for metric, tasks in values.items()],
        evaluation=[
            EvaluationRow(f"task{number}", 0, metric, float(value))
            for metric, tasks in values.items()
            for number, value in enumerate(tasks)
        ],
        manifest={"tasks": {"source": "pocket", "counts": {"eval": TASKS}}},
    )


def world(
    levels: Mapping[tuple[str, ...], float],
    *,
    seeds: int = 3,
    noise: float = 0.002,
    domains: Sequence[str] = DOMAINS,
    random_seed: int = 0,
    profile: str = "pocket",
) -> Results:
    """Every row in every domain, all metrics of a domain at the row's level; independent noise by seed and by task."""
    random = np.random.default_rng(random_seed)
    runs = []
    for domain in domains:
        for row in (key for key in levels if len(key) == 2):
            for seed in range(seeds):
                values = {}
                for column in COLUMNS[domain]:
                    mean = levels.get((*row, column.metric), levels[row]) + random.normal(0, noise)
                    values[column.metric] = mean + random.normal(0, noise, TASKS)
                runs.append(run(domain, row, seed, values))
    return Results(Path("results/pocket"), profile, tuple(runs))
