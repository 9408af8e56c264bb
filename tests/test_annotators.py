"""Annotators: the oracle's strict order, Bradley-Terry frequencies, flipped labels, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapl_core import annotators, buffers, profiles
from mapl_core.annotators import ANNOTATORS, bradley_terry, make_annotator, noisy, oracle
from mapl_core.buffers import Trajectory, label_pairs

COMPARISONS = 20_000
# Hoeffding: the frequency of 20,000 independent events strays further than this with probability 1e-9 at most.
MARGIN = math.sqrt(math.log(2 / 1e-9) / (2 * COMPARISONS))


def played(*rewards: float) -> Trajectory:
    return Trajectory("task", (), (("text",),) * len(rewards), rewards, ({},) * len(rewards))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequency(annotator, first: Trajectory, second: Trajectory, label: int) -> float:
    return sum(annotator(first, second) == label for _ in range(COMPARISONS)) / COMPARISONS


def test_rm5_the_oracle_prefers_the_higher_return_and_equal_floats_are_a_tie():
    assert oracle(played(2.0), played(1.0)) == 1
    assert oracle(played(1.0), played(2.0)) == -1
    assert oracle(played(1.5), played(1.5)) == 0
    assert oracle(played(-1.0), played(0.0)) == -1


def test_rm5_the_order_is_strict_down_to_the_last_bit():
    above = math.nextafter(1.0, 2.0)
    assert oracle(played(above), played(1.0)) == 1
    assert oracle(played(1.0), played(above)) == -1


def test_rm5_the_return_is_the_sum_over_turns_and_their_order_breaks_no_tie():
    assert oracle(played(1.0, 0.0), played(0.0, 2.0)) == -1
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert oracle(played(0.1, 0.2, 0.3), played(0.3, 0.2, 0.1)) == 0


@settings(max_examples=50, deadline=None)
@given(returns=st.lists(st.integers(-64, 64), min_size=2, max_size=8), scale=st.sampled_from([0.25, 2.0, 1024.0]))
def test_rm5_labels_before_scaling_equal_those_after(returns, scale):
    """Scaling by a power of two and shifting by an integer are exact, so no new tie arises."""
    half = len(returns) // 2
    raw = [played(float(value)) for value in returns]
    scaled = [played(value * scale + 3.0) for value in returns]
    labels = [oracle(raw[j], raw[half + j]) for j in range(half)]
    assert labels == [(returns[j] > returns[half + j]) - (returns[j] < returns[half + j]) for j in range(half)]
    assert labels == [oracle(scaled[j], scaled[half + j]) for j in range(half)]


@pytest.mark.parametrize(
    ("first", "second", "temperature", "probability"),
    [
        (2.0, 1.0, 1.0, 0.7310586),  # sigmoid(1)
        (1.0, 2.0, 1.0, 0.2689414),  # sigmoid(-1)
        (2.0, 1.0, 2.0, 0.6224593),  # sigmoid(1/2)
        (1.5, 1.5, 1.0, 0.5),
    ],
)
def test_bradley_terry_wins_with_probability_sigmoid_of_the_scaled_gap(first, second, temperature, probability):
    annotator = bradley_terry(temperature, generator(1))
    wins = frequency(annotator, played(first), played(second), 1)
    assert abs(wins - probability) < MARGIN


def test_bradley_terry_calls_no_tie_and_small_temperatures_approach_the_oracle():
    coin = bradley_terry(1.0, generator(2))
    assert {coin(played(1.0), played(1.0)) for _ in range(64)} == {1, -1}
    sharp = bradley_terry(1e-300, generator(2))
    assert {sharp(played(3.0), played(1.0)) for _ in range(64)} == {1}
    assert {sharp(played(-1000.0), played(1000.0)) for _ in range(64)} == {-1}


def test_noisy_flips_the_oracle_at_its_rate_and_keeps_ties():
    annotator = noisy(0.2, generator(3))
    assert abs(frequency(annotator, played(2.0), played(1.0), -1) - 0.2) < MARGIN
    assert abs(frequency(annotator, played(1.0), played(2.0), 1) - 0.2) < MARGIN
    assert frequency(annotator, played(1.0), played(1.0), 0) == 1.0


def test_noisy_without_flips_is_the_oracle():
    annotator = noisy(0.0, generator(4))
    for first, second in [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)] * 20:
        assert annotator(played(first), played(second)) == oracle(played(first), played(second))


def test_a_tie_does_not_shift_the_flips_of_later_comparisons():
    with_tie, without = noisy(0.5, generator(5)), noisy(0.5, generator(5))
    with_tie(played(1.0), played(1.0))
    without(played(2.0), played(1.0))
    later = [(played(2.0), played(1.0))] * 50
    assert [with_tie(*pair) for pair in later] == [without(*pair) for pair in later]


@pytest.mark.parametrize("name", ["bradley_terry", "noisy"])
def test_equal_generators_give_equal_labels_and_other_seeds_differ(name):
    pair = played(1.2), played(1.0)

    def labels(seed):
        annotator = make_annotator(name, flip_probability=0.4, generator=generator(seed))
        return [annotator(*pair) for _ in range(200)]

    assert labels(7) == labels(7)
    assert labels(7) != labels(8)


def test_make_annotator_passes_the_settings_on():
    pair = played(2.0), played(1.0)
    assert make_annotator("oracle") is oracle
    warm = make_annotator("bradley_terry", temperature=2.0, generator=generator(9))
    reference = bradley_terry(2.0, generator(9))
    assert [warm(*pair) for _ in range(100)] == [reference(*pair) for _ in range(100)]
    flipping = make_annotator("noisy", flip_probability=0.3, generator=generator(9))
    reference = noisy(0.3, generator(9))
    assert [flipping(*pair) for _ in range(100)] == [reference(*pair) for _ in range(100)]


def test_every_annotator_labels_pairs():
    agent, comparator = [played(2.0), played(1.0)], [played(1.0), played(1.0)]
    for name in ANNOTATORS:
        pairs, ties = label_pairs(agent, comparator, make_annotator(name, generator=generator()))
        assert len(pairs) + ties == 2
        assert ties == (0 if name == "bradley_terry" else 1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_not_positive_and_finite_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature must be positive and finite, got {temperature}.*'oracle'"):
        make_annotator("bradley_terry", temperature=temperature, generator=generator())


@pytest.mark.parametrize("flip_probability", [-0.1, 1.0, 1.5, math.nan])
def test_a_flip_probability_outside_its_range_is_refused(flip_probability):
    with pytest.raises(ValueError, match=rf"must lie in \[0, 1\), got {flip_probability}"):
        make_annotator("noisy", flip_probability=flip_probability, generator=generator())


def test_an_unknown_annotator_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match="unknown annotator 'orakel'; valid annotators: oracle, bradley_terry, noisy"):
        make_annotator("orakel")


@pytest.mark.parametrize("name", ["bradley_terry", "noisy"])
def test_seed2_a_stochastic_annotator_without_a_generator_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' needs an explicit torch.Generator, got None"):
        make_annotator(name)


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_swapping_the_two_trajectories_negates_the_oracle(first, second):
    assert oracle(played(first), played(second)) == -oracle(played(second), played(first))


@pytest.mark.parametrize("name", ["ANNOTATORS", "BUFFER_MODES", "SELECTION_RULES"])
def test_a_profile_knows_the_names_that_its_parts_have(name: str):
    """Written down twice, so that a profile is checked without the import of torch."""
    home = annotators if name == "ANNOTATORS" else buffers
    assert getattr(profiles, name) == getattr(home, name)
