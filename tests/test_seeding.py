"""Random streams: what a number depends on, and what it does not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mapl_core.seeding import Stream, global_states_kept

BASE = Stream(seed=3, purpose="collect", agent=1, iteration=2)
OTHERS = {
    "seed": Stream(4, "collect", 1, 2),
    "purpose": Stream(3, "comparator", 1, 2),
    "agent": Stream(3, "collect", 0, 2),
    "iteration": Stream(3, "collect", 1, 1),
}


def test_seed1_a_stream_repeats_exactly():
    again = Stream(3, "collect", 1, 2)
    assert torch.equal(BASE.uniforms(["a", "b"], 5), again.uniforms(["a", "b"], 5))
    first = torch.rand(5, generator=BASE.generator())
    assert torch.equal(first, torch.rand(5, generator=again.generator()))
    assert torch.equal(first, torch.rand(5, generator=BASE.generator())), "asking again starts at the beginning"


@pytest.mark.parametrize("changed", OTHERS)
def test_seed1_each_of_seed_purpose_agent_and_iteration_changes_the_numbers(changed):
    other = OTHERS[changed]
    assert not torch.isin(BASE.uniforms(["a"], 50), other.uniforms(["a"], 50)).any()
    assert not torch.equal(torch.rand(5, generator=BASE.generator()), torch.rand(5, generator=other.generator()))


def test_seed1_fields_do_not_run_into_each_other():
    """Agent 1 of iteration 12 is not agent 11 of iteration 2, and a purpose that ends in a digit is not an agent."""
    assert not torch.equal(Stream(0, "p", 1, 12).uniforms(["a"], 4), Stream(0, "p", 11, 2).uniforms(["a"], 4))
    assert not torch.equal(Stream(0, "p1", 1).uniforms(["a"], 4), Stream(0, "p", 11).uniforms(["a"], 4))


def test_seed1_for_agent_changes_the_agent_alone():
    assert BASE.for_agent(5) == Stream(3, "collect", 5, 2)


def test_seed1_a_row_depends_on_its_key_alone():
    """Neither on its neighbours, nor on its place among them, nor on how many numbers are asked for."""
    table = BASE.uniforms(["a", "b", "c"], 6)
    assert torch.equal(table[1:2], BASE.uniforms(["b"], 6))
    assert torch.equal(table[[2, 0]], BASE.uniforms(["c", "a"], 6))
    assert torch.equal(table[:, :4], BASE.uniforms(["a", "b", "c"], 4))
    assert len(table.unique()) == table.numel()


def test_uniforms_are_float64_in_the_unit_interval_and_uniform():
    """The share below each tenth of 20,000 numbers is within five standard errors of the tenth."""
    table = BASE.uniforms([str(row) for row in range(200)], 100)
    assert table.dtype == torch.float64 and table.shape == (200, 100)
    assert float(table.min()) >= 0.0 and float(table.max()) < 1.0
    tenths = torch.arange(1, 10, dtype=torch.float64) / 10
    shares = torch.stack([(table < tenth).double().mean() for tenth in tenths])
    error = (tenths * (1 - tenths) / table.numel()).sqrt()
    assert bool(((shares - tenths).abs() < 5 * error).all())
    assert_close(torch.corrcoef(table.T[:2])[0, 1].abs() < 0.35, torch.tensor(True))


def test_seed2_streams_leave_the_global_random_states_alone():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    BASE.uniforms(["a", "b"], 5)
    torch.rand(5, generator=BASE.generator())
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_seed1_seeds_depend_on_stream_and_key_and_leave_room_to_count_on():
    streams = [BASE, *OTHERS.values()]
    seeds = [stream.seed_of(key) for stream in streams for key in ("a", "b")]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**62 for seed in seeds)
    assert BASE.seed_of("a") == seeds[0]


def test_seed2_the_global_random_states_are_put_back_even_after_an_error():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(ZeroDivisionError), global_states_kept():
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        _ = 1 / 0
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
