"""The 95 % intervals of tables, figures and claims.

Over seeds a t interval (a percentile bootstrap over three to five seeds covers far too little), paired where two rows
share seeds. With one seed a bootstrap over the evaluation tasks, which says nothing about another training run and is
labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

OVER_SEEDS, OVER_TASKS = "over seeds", "over tasks, one training run"


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval. `kind` says what varies: OVER_SEEDS or OVER_TASKS; n counts it."""

    mean: float
    low: float
    high: float
    n: int
    kind: str

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interval(by_seed: Mapping[int, Mapping[str, float]]) -> Interval:
    """The 95 % interval of a mean score (design of the tables; paper, Table 1 reports five runs).

    Args:
        by_seed: seed -> task id -> value of that task.

    Returns:
        Two seeds or more: the t interval of the seeds' means. One seed: the percentile bootstrap over its tasks, which
        says nothing about another training run and is labelled so.
    """
    means = [_mean(tasks.values()) for tasks in by_seed.values()]
    if not means:
        raise ValueError("an interval needs at least one run")
    if len(means) == 1:
        (tasks,) = by_seed.values()
        return bootstrap_interval(list(tasks.values()))
    return t_interval(means)


def difference(ours: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]) -> Interval:
    """The 95 % interval of `ours - other`, paired by seed.

    Two shared seeds or more: t interval of the seeds' differences. One shared seed: paired bootstrap over the tasks.

    Raises:
        ValueError: if the two share no seed, or were evaluated on different tasks.
    """
    shared = sorted(ours.keys() & other.keys())
    if not shared:
        raise ValueError(f"no common seed: {sorted(ours)} and {sorted(other)}; run both with the same --seeds")
    for seed in shared:
        if ours[seed].keys() != other[seed].keys():
            raise ValueError(f"seed {seed}: the two runs were evaluated on different tasks and cannot be compared")
    if len(shared) == 1:
        seed = shared[0]
        return bootstrap_interval([value - other[seed][task] for task, value in ours[seed].items()])
    return t_interval([_mean(ours[seed].values()) - _mean(other[seed].values()) for seed in shared])


def t_interval(values: Sequence[float]) -> Interval:
    """mean -+ t(0.975, n - 1) * s / sqrt(n), s the unbiased standard deviation; needs two values."""
    from scipy.special import stdtrit  # quantiles of Student's t, without the weight of scipy.stats

    if len(values) < 2:
        raise ValueError(f"a t interval needs two values, got {len(values)}")
    mean = _mean(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = float(stdtrit(len(values) - 1, 0.975)) * error
    return Interval(mean, mean - half, mean + half, len(values), OVER_SEEDS)


def bootstrap_interval(values: Sequence[float], *, resamples: int = 10_000) -> Interval:
    """Percentile bootstrap of the mean over tasks, with its own fixed stream, so that equal data give equal bounds."""
    import numpy as np

    data = np.asarray(values, dtype=float)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"a bootstrap needs finite values, got {data.size} of which {np.isfinite(data).sum()} finite")
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, data.size, size=(resamples, data.size))
    low, high = np.percentile(data[draws].mean(axis=1), [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high), data.size, OVER_TASKS)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
