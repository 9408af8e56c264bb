"""The 95 % intervals of tables, figures and claims.

Over seeds a t interval (a percentile bootstrap over three to five seeds covers far too little), paired where two rows
share seeds. With one seed a bootstrap over the evaluation tasks, which says nothing about another training run and is
labelled so. Where the best of several rows is meant, the bound pays for the choice (`best_difference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

OVER_SEEDS, OVER_TASKS = "over seeds", "over tasks, one training run"
TAILS = (0.025, 0.025)  # probability left out below and above: 95 % between
BySeed = Mapping[int, Mapping[str, float]]  # seed -> task id -> value of that task


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval. `kind` says what varies: OVER_SEEDS or OVER_TASKS; n counts it.

    A single number (one run of which only the mean over tasks is known) says nothing about its spread: its interval is
    the whole line, so that it can support no mark and no verdict.
    """

    mean: float
    low: float
    high: float
    n: int
    kind: str

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interval(by_seed: BySeed) -> Interval:
    """The 95 % interval of a mean score (design of the tables; paper, Table 1 reports five runs).

    Args:
        by_seed: seed -> task id -> value of that task.

    Returns:
        Two seeds or more: the t interval of the seeds' means. One seed: the percentile bootstrap over its tasks, which
        says nothing about another training run and is labelled so.
    """
    return _interval(by_seed, TAILS)


def difference(ours: BySeed, other: BySeed, *, tails: tuple[float, float] = TAILS) -> Interval:
    """The interval of `ours - other`, paired by seed; 95 % unless other tails are given.

    Two shared seeds or more: t interval of the seeds' differences. One shared seed: paired bootstrap over the tasks.

    Raises:
        ValueError: if the two share no seed, or were evaluated on different tasks.
    """
    return _interval(combine([(1.0, ours), (-1.0, other)]), tails)


def combine(terms: Sequence[tuple[float, BySeed]]) -> dict[int, dict[str, float]]:
    """Weighted sum of rows, task by task, over the seeds that all of them have: values of a difference, or of a mean.

    Raises:
        ValueError: if the rows share no seed, or were evaluated on different tasks.
    """
    rows = [row for _, row in terms]
    shared = sorted(set.intersection(*(set(row) for row in rows)))
    if not shared:
        seeds = " and ".join(str(sorted(row)) for row in rows)
        raise ValueError(f"no common seed: {seeds}; run both with the same --seeds")
    for seed in shared:
        if any(row[seed].keys() != rows[0][seed].keys() for row in rows):
            raise ValueError(f"seed {seed}: the two runs were evaluated on different tasks and cannot be compared")
    return {
        seed: {task: math.fsum(weight * row[seed][task] for weight, row in terms) for task in rows[0][seed]}
        for seed in shared
    }


def best_difference(ours: Sequence[BySeed], others: Sequence[BySeed]) -> Interval:
    """Best of `ours` minus best of `others`, with an interval that holds although the best are chosen on the same data.

    Taking the row with the largest mean and then its ordinary interval would flatter it (the winner's curse). For the
    true difference D = max(ours) - max(others): the best of ours beats every other if some row of ours does, so the
    lower bound is max over ours of min over others of the lower bounds of the paired differences, each at one-sided
    level 0.025 / len(ours) (Bonferroni: it may be any of them). No correction is due for `others`, as all of them must
    be beaten. The upper bound is the same with the roles exchanged. One row against one: the ordinary 95 % interval.

    Returns:
        The interval; `mean` is the difference of the largest means, which is flattered by the choice, `n` the smallest
        number of seeds (or tasks) of any pair.
    """
    tails = (TAILS[0] / len(ours), TAILS[1] / len(others))
    pairs = [[difference(one, other, tails=tails) for other in others] for one in ours]
    every = [found for line in pairs for found in line]
    return Interval(
        mean=max(min(found.mean for found in line) for line in pairs),
        low=max(min(found.low for found in line) for line in pairs),
        high=min(max(line[place].high for line in pairs) for place in range(len(others))),
        n=min(found.n for found in every),
        kind=OVER_TASKS if any(found.kind == OVER_TASKS for found in every) else OVER_SEEDS,
    )


def _interval(by_seed: BySeed, tails: tuple[float, float]) -> Interval:
    means = [_mean(tasks.values()) for tasks in by_seed.values()]
    if not means:
        raise ValueError("an interval needs at least one run")
    if len(means) == 1:
        (tasks,) = by_seed.values()
        return bootstrap_interval(list(tasks.values()), tails=tails)
    return t_interval(means, tails=tails)


def t_interval(values: Sequence[float], *, tails: tuple[float, float] = TAILS) -> Interval:
    """mean -+ t(1 - tail, n - 1) * s / sqrt(n), s the unbiased standard deviation; needs two values."""
    from scipy.special import stdtrit  # quantiles of Student's t, without the weight of scipy.stats

    if len(values) < 2:
        raise ValueError(f"a t interval needs two values, got {len(values)}")
    mean = _mean(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    below, above = (float(stdtrit(len(values) - 1, 1 - tail)) * error for tail in tails)
    return Interval(mean, mean - below, mean + above, len(values), OVER_SEEDS)


def bootstrap_interval(
    values: Sequence[float], *, tails: tuple[float, float] = TAILS, resamples: int = 10_000
) -> Interval:
    """Percentile bootstrap of the mean over tasks, with its own fixed stream, so that equal data give equal bounds.

    One value gives the whole line: it cannot be resampled into anything else.
    """
    import numpy as np

    data = np.asarray(values, dtype=float)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"a bootstrap needs finite values, got {data.size} of which {np.isfinite(data).sum()} finite")
    if data.size == 1:
        return Interval(float(data[0]), -math.inf, math.inf, 1, OVER_TASKS)
    means = data[_draws(data.size, resamples)].mean(axis=1)
    low, high = np.quantile(means, [tails[0], 1 - tails[1]])
    return Interval(float(data.mean()), float(low), float(high), data.size, OVER_TASKS)


@lru_cache(maxsize=4)  # a table asks for hundreds of intervals over the same number of tasks
def _draws(size: int, resamples: int) -> Any:
    import numpy as np

    return np.random.Generator(np.random.PCG64(0)).integers(0, size, size=(resamples, size))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
