"""Claims about the 95 % intervals, against tabled quantiles and simulation."""

from __future__ import annotations

import numpy as np
import pytest

from mapl_core.intervals import OVER_SEEDS, OVER_TASKS, bootstrap_interval, difference, interval, t_interval


def test_t_interval_by_hand():
    """1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.302653 from the table, half-width 4.302653 / sqrt(3)."""
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n, found.kind) == (2.0, 3, OVER_SEEDS)
    assert found.half_width == pytest.approx(2.484138, abs=1e-5)
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-5)


def test_t_interval_needs_two_values():
    with pytest.raises(ValueError, match="needs two values, got 1"):
        t_interval([1.0])


def test_a_t_interval_over_three_seeds_covers_and_a_percentile_bootstrap_does_not():
    """Why intervals over seeds are t intervals: 2,000 draws of three normal values around 0."""
    draws = np.random.default_rng(0).normal(size=(2000, 3))
    t_covers = np.mean([t_interval(list(row)).low <= 0 <= t_interval(list(row)).high for row in draws[:1000]])
    bootstraps = [bootstrap_interval(list(row), resamples=200) for row in draws[:1000]]
    bootstrap_covers = np.mean([found.low <= 0 <= found.high for found in bootstraps])
    assert 0.93 < t_covers < 0.97
    assert bootstrap_covers < 0.85


def test_bootstrap_over_tasks_equals_the_binomial_quantiles():
    """100 tasks, half of them solved: a resampled mean is Binomial(100, 1/2) / 100, with these points 0.40 and 0.60."""
    found = bootstrap_interval([0.0, 1.0] * 50)
    assert found.mean == 0.5 and found.kind == OVER_TASKS and found.n == 100
    assert found.low == pytest.approx(0.40, abs=0.011) and found.high == pytest.approx(0.60, abs=0.011)


def test_bootstrap_repeats_exactly_and_leaves_the_global_stream_alone():
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert bootstrap_interval([0.1, 0.5, 0.9]) == bootstrap_interval([0.1, 0.5, 0.9])
    assert np.random.get_state()[1].tolist() == before


def test_bootstrap_refuses_undefined_values():
    with pytest.raises(ValueError, match="2 of which 1 finite"):
        bootstrap_interval([0.5, float("nan")])


def test_seeds_vary_when_there_are_two_and_tasks_when_there_is_one():
    two = {0: {"a": 0.2, "b": 0.4}, 1: {"a": 0.4, "b": 0.6}}
    # seed means 0.3 and 0.5: s = 0.141421, t(0.975, 1) = 12.7062, half-width 12.7062 * 0.1
    assert interval(two).kind == OVER_SEEDS
    assert interval(two).half_width == pytest.approx(1.27062, abs=1e-4)
    one = interval({0: two[0]})
    assert (one.kind, one.n, one.mean) == (OVER_TASKS, 2, pytest.approx(0.3))


def test_differences_are_paired_by_seed():
    """Each seed gains exactly 0.1, however much the seeds differ: a paired interval of width 0."""
    before = {seed: {"a": 0.2 * seed, "b": 0.1} for seed in range(3)}
    after = {seed: {task: value + 0.1 for task, value in tasks.items()} for seed, tasks in before.items()}
    gain = difference(after, before)
    assert gain.mean == pytest.approx(0.1) and gain.half_width == pytest.approx(0, abs=1e-12)
    assert gain.excludes_zero and not difference(before, before).excludes_zero


def test_a_difference_uses_only_the_seeds_that_both_have():
    ours = {0: {"a": 0.5}, 1: {"a": 0.7}, 2: {"a": 99.0}}
    other = {0: {"a": 0.4}, 1: {"a": 0.4}, 5: {"a": -99.0}}
    assert difference(ours, other).mean == pytest.approx(0.2)
    assert difference(ours, other).n == 2


def test_with_one_common_seed_a_difference_is_paired_by_task():
    ours, other = {0: {"a": 0.9, "b": 0.2}}, {0: {"b": 0.1, "a": 0.8}}
    gain = difference(ours, other)
    assert gain.kind == OVER_TASKS
    assert gain.low == pytest.approx(0.1) and gain.high == pytest.approx(0.1)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="different tasks"):
        difference({0: {"a": 1.0}}, {0: {"b": 1.0}})
    with pytest.raises(ValueError, match=r"no common seed: \[0\] and \[1\]"):
        difference({0: {"a": 1.0}}, {1: {"a": 1.0}})
