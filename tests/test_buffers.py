"""Trajectories and pairs as data, labelling, the selection rules, and the four replay buffers."""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mapl_core.buffers
from mapl_core.buffers import (
    BUFFER_MODES,
    SELECTION_RULES,
    PairDiversity,
    PreferencePair,
    ReplayBuffer,
    Response,
    Trajectory,
    label_pairs,
    pair_diversity,
    select_pairs,
)

numbers = itertools.count()


def played(value: float, text: str | None = None, task_id: str = "task", **parts: float) -> Trajectory:
    """A one-turn trajectory of two agents with this return; texts differ unless a text is given."""
    texts = (text or f"answer {next(numbers)}", "second agent")
    actions = tuple(Response((1, 2), (3, 0), written, False) for written in texts)
    return Trajectory(task_id, (actions,), (texts,), (value,), (parts or {"all": value},))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def higher_wins(first: Trajectory, second: Trajectory) -> int:
    return (first.total_return > second.total_return) - (first.total_return < second.total_return)


def labelled(current: list[float], comparator: list[float]) -> list[PreferencePair]:
    return label_pairs([played(r) for r in current], [played(r) for r in comparator], higher_wins)[0]


def len_of_text(trajectory: Trajectory) -> float:
    return len(trajectory.responses[0][0])


def returns(pairs: list[PreferencePair]) -> list[tuple[float, float]]:
    """(agent's return, comparator's return) of each pair."""
    return [(pair.agent.total_return, pair.comparator.total_return) for pair in pairs]


def shard(number: int, length: int) -> list[PreferencePair]:
    """A shard whose pairs know where they belong: iteration = shard, task_id = position."""
    return [
        PreferencePair(played(1.0, task_id=str(place)), played(0.0, task_id=str(place)), True, iteration=number)
        for place in range(length)
    ]


def filled(mode: str, lengths: list[int], **options) -> ReplayBuffer:
    buffer = ReplayBuffer(mode, **options)
    for number, length in enumerate(lengths):
        buffer.add(shard(number, length))
    return buffer


def places(pairs: list[PreferencePair]) -> list[tuple[int, int]]:
    return [(pair.iteration, int(pair.task_id)) for pair in pairs]


# --- data ---------------------------------------------------------------------------------------------------------


def test_the_return_is_the_exactly_rounded_sum_over_turns():
    turns = Trajectory("t", (), (("a",), ("b",), ("c",)), (0.1, 0.2, 0.3), ({}, {}, {}))
    assert turns.total_return == 0.6
    assert 0.1 + 0.2 + 0.3 != 0.6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_where_it_arises(value):
    with pytest.raises(ValueError, match=r"rewards of task 'broken' must be finite, got .*repair"):
        played(value, task_id="broken")


def test_a_pair_knows_its_task_its_gap_and_whose_trajectory_is_whose():
    ours, theirs = played(3.0), played(1.0)
    won = PreferencePair(ours, theirs, winner_is_agent=True)
    lost = PreferencePair(theirs, ours, winner_is_agent=False)
    assert (won.task_id, won.gap, won.iteration) == ("task", 2.0, 0)
    assert lost.gap == -2.0
    for pair in (won, lost):
        assert pair.agent is ours and pair.comparator is theirs


def trajectories(task_id: str) -> st.SearchStrategy[Trajectory]:
    number = st.floats(allow_nan=False, allow_infinity=False)
    ids = st.lists(st.integers(0, 200_000), max_size=4).map(tuple)
    text = st.text(max_size=6)
    response = st.builds(Response, ids, ids, text, st.booleans())
    turn = st.tuples(
        st.lists(response, min_size=1, max_size=2).map(tuple),
        st.lists(text, min_size=1, max_size=2).map(tuple),
        number,
        st.dictionaries(st.sampled_from(["style", "length"]), number),
    )
    return st.lists(turn, min_size=1, max_size=2).map(lambda turns: Trajectory(task_id, *zip(*turns, strict=True)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(PreferencePair, trajectories("task"), trajectories("task"), st.booleans(), st.integers(0, 9)))
def test_save1_a_pair_comes_back_equal_from_a_json_line(pair):
    line = json.dumps(pair.to_dict())
    assert "\n" not in line
    restored = PreferencePair.from_dict(json.loads(line))
    assert restored == pair
    assert json.dumps(restored.to_dict()) == line
    assert isinstance(restored.winner.actions[0], tuple)
    assert isinstance(restored.winner.actions[0][0].token_ids, tuple)


def test_a_pair_with_numpy_numbers_can_be_written_as_json():
    response = Response(tuple(np.arange(3)), tuple(np.arange(2)), "text", np.bool_(True))
    numpy_made = Trajectory("t", ((response,),), (("text",),), (np.float32(1.5),), ({"all": np.float64(1.5)},))
    assert Trajectory.from_dict(json.loads(json.dumps(numpy_made.to_dict()))) == numpy_made


def test_buffers_imports_no_other_module_of_the_package():
    tree = ast.parse(Path(mapl_core.buffers.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "torch" in imported
    assert not [name for name in imported if name is None or name.startswith("mapl_core")]


# --- labelling ----------------------------------------------------------------------------------------------------


def test_math9_the_jth_trajectory_meets_the_jth_and_no_other():
    agent = [played(value) for value in (1.0, 5.0, 2.0)]
    comparator = [played(value) for value in (3.0, 4.0, 0.0)]
    pairs, ties = label_pairs(agent, comparator, higher_wins, iteration=2)
    assert (len(pairs), ties) == (3, 0)
    assert [pair.winner_is_agent for pair in pairs] == [False, True, True]
    for pair, ours, theirs in zip(pairs, agent, comparator, strict=True):
        assert pair.agent is ours and pair.comparator is theirs
        assert pair.winner.total_return > pair.loser.total_return
        assert pair.iteration == 2


def test_math9_one_index_serves_all_agents_of_a_trajectory():
    agent = [played(1.0, text="first of j=0"), played(0.0, text="first of j=1")]
    comparator = [played(0.0), played(1.0)]
    pairs, _ = label_pairs(agent, comparator, higher_wins)
    assert pairs[0].winner.responses == (("first of j=0", "second agent"),)
    assert pairs[1].loser.responses == (("first of j=1", "second agent"),)


def test_dpo5_ties_are_dropped_and_counted():
    agent = [played(value) for value in (1.0, 2.0, 3.0, 4.0)]
    comparator = [played(value) for value in (1.0, 0.0, 3.0, 5.0)]
    pairs, ties = label_pairs(agent, comparator, higher_wins)
    assert ties == 2
    assert returns(pairs) == [(2.0, 0.0), (4.0, 5.0)]


def test_dpo5_all_ties_give_no_pairs_no_shard_and_a_message_that_says_so():
    pairs, ties = label_pairs([played(1.0)] * 3, [played(1.0)] * 3, higher_wins)
    assert (pairs, ties) == ([], 3)
    assert select_pairs(pairs, 4) == []
    buffer = ReplayBuffer("decay")
    buffer.add(pairs)
    assert (len(buffer), buffer.weights()) == (0, [])
    with pytest.raises(ValueError, match="holds no pairs: every comparison so far was a tie.*raise the temperature"):
        buffer.sample(generator())


def test_trajectories_of_different_number_are_refused():
    with pytest.raises(ValueError, match="got 2 trajectories of the agents and 1 of the comparator"):
        label_pairs([played(1.0), played(2.0)], [played(0.0)], higher_wins)


def test_trajectories_of_different_tasks_are_refused():
    with pytest.raises(ValueError, match=r"one task expected, got tasks \['a', 'b'\]"):
        label_pairs([played(1.0, task_id="a")], [played(0.0, task_id="b")], higher_wins)
    with pytest.raises(ValueError, match=r"got tasks \['a', 'b'\]"):
        label_pairs(
            [played(1.0, task_id="a"), played(1.0, task_id="b")],
            [played(0.0, task_id="a"), played(0.0, task_id="b")],
            higher_wins,
        )


@pytest.mark.parametrize("label", [2, -3, None, "first", math.nan])
def test_an_annotator_that_answers_something_else_is_refused(label):
    with pytest.raises(ValueError, match="must return 1, 0 or -1, got"):
        label_pairs([played(1.0)], [played(0.0)], lambda first, second: label)


# --- selection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("winner_return", (3.0, 1.0)), ("comparator_return", (0.2, 2.0)), ("reward_gap", (2.9, -1.0))],
)
def test_math8_the_rules_keep_different_pairs(rule, kept):
    pairs = labelled([3.0, 0.2, 1.0, 2.9], [1.0, 2.0, 1.0, -1.0])
    assert returns(select_pairs(pairs, 1, by=rule)) == [kept]
    assert (1.0, 1.0) not in returns(select_pairs(pairs, 4, by=rule))


def test_math8_the_winners_return_is_the_default_rule():
    pairs = labelled([3.0, 0.2, 1.0, 2.9], [1.0, 2.0, 1.0, -1.0])
    assert returns(select_pairs(pairs, 3)) == [(3.0, 1.0), (2.9, -1.0), (0.2, 2.0)]


def test_equal_winners_are_ordered_by_gap_and_then_as_given():
    pairs = labelled([3.0, 1.0, 3.0, 2.0, 3.0], [2.0, 3.0, 0.0, 4.0, 1.0])
    assert returns(select_pairs(pairs, 5)) == [(2.0, 4.0), (3.0, 0.0), (1.0, 3.0), (3.0, 1.0), (3.0, 2.0)]
    # The two pairs of gap 2 whose winner returned 3 stay as given: the comparator's came first.
    swapped = [pairs[4], pairs[1]]
    assert select_pairs(swapped, 2) == swapped
    assert select_pairs(swapped[::-1], 2) == swapped[::-1]


def test_equal_comparators_are_ordered_by_gap():
    pairs = labelled([2.0, 3.0, 2.0], [1.0, 1.0, 5.0])
    assert returns(select_pairs(pairs, 3, by="comparator_return")) == [(2.0, 5.0), (3.0, 1.0), (2.0, 1.0)]


def test_the_proxy_ranks_by_its_score_of_the_winner_and_ignores_the_return():
    pairs = [
        PreferencePair(played(3.0, "a long winner"), played(0.0, "x"), True),
        PreferencePair(played(1.0, "short"), played(0.0, "a very long loser indeed"), False),
        PreferencePair(played(2.0, "a winner"), played(0.0, "yyy"), True),
    ]
    kept = select_pairs(pairs, 2, by="proxy", proxy=lambda trajectory: -len_of_text(trajectory))
    assert kept == [pairs[1], pairs[2]]
    assert select_pairs(pairs, 3, by="proxy", proxy=lambda trajectory: 1.0) == pairs


def test_good_comparator_keeps_pairs_whose_comparator_matches_the_agents_in_one_component():
    def pair(agent_style, comparator_style, agent_return, comparator_return):
        ours = played(agent_return, style=agent_style, length=0.0)
        theirs = played(comparator_return, style=comparator_style, length=9.0)
        return label_pairs([ours], [theirs], higher_wins)[0][0]

    worse = pair(0.6, 0.5, 9.0, 1.0)
    equal = pair(0.6, 0.6, 3.0, 1.0)
    better_but_lost = pair(0.1, 0.2, 2.0, 1.0)
    better_and_won = pair(0.1, 0.2, 1.0, 4.0)
    worse_but_won = pair(0.3, 0.2, 1.0, 8.0)
    pairs = [worse, equal, better_but_lost, better_and_won, worse_but_won]
    kept = select_pairs(pairs, 5, by="good_comparator", component="style")
    assert kept == [better_and_won, equal, better_but_lost]
    assert select_pairs(pairs, 1, by="good_comparator", component="style") == [better_and_won]
    assert select_pairs([worse], 1, by="good_comparator", component="style") == []


def test_good_comparator_sums_the_component_over_turns():
    def two_turns(value, first, second):
        texts = ((f"{value}",), (f"{first} {second}",))
        return Trajectory("task", (), texts, (value, 0.0), ({"style": first}, {"style": second}))

    pair = PreferencePair(two_turns(2.0, 0.9, 0.0), two_turns(1.0, 0.0, 1.0), winner_is_agent=True)
    assert select_pairs([pair], 1, by="good_comparator", component="style") == [pair]
    pair = PreferencePair(two_turns(2.0, 0.9, 0.2), two_turns(1.0, 0.0, 1.0), winner_is_agent=True)
    assert select_pairs([pair], 1, by="good_comparator", component="style") == []


def test_random_selection_is_uniform_over_distinct_pairs_and_follows_its_generator():
    pairs = labelled([1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    often = [pairs[0]] * 9 + pairs[1:]
    draws = 8_000
    source = generator(3)
    first = Counter(select_pairs(often, 1, by="random", generator=source)[0].gap for _ in range(draws))
    margin = math.sqrt(math.log(2 * 4 / 1e-9) / (2 * draws))
    for gap in (1.0, 2.0, 3.0, 4.0):
        assert abs(first[gap] / draws - 0.25) < margin

    def kept(seed):
        return [select_pairs(pairs, 2, by="random", generator=generator(seed + step)) for step in range(10)]

    assert kept(100) == kept(100)
    assert kept(100) != kept(200)


def test_dpo11_identical_pairs_are_kept_once_by_text():
    def pair(winner, loser):
        return PreferencePair(played(3.0, winner), played(1.0, loser), winner_is_agent=True)

    pairs = [pair("w", "l"), pair("w", "l"), pair("w", "m"), pair("v", "l"), pair("w", "l")]
    for rule in ("winner_return", "reward_gap", "comparator_return"):
        assert select_pairs(pairs, 9, by=rule) == [pairs[0], pairs[2], pairs[3]]
    kept = select_pairs(pairs, 9, by="random", generator=generator())
    assert sorted(kept, key=pairs.index) == [pairs[0], pairs[2], pairs[3]]


def test_dpo11_the_duplicate_does_not_use_up_the_budget_k():
    twice = PreferencePair(played(3.0, "w"), played(1.0, "l"), True)
    third = PreferencePair(played(2.0, "v"), played(1.0, "l"), True)
    assert select_pairs([twice, twice, third], 2) == [twice, third]


def test_dpo11_of_identical_pairs_the_best_ranked_is_kept():
    """The same two texts, once with the agents as winner, once with the comparator: its return is 1, then 3."""
    by_agent = PreferencePair(played(3.0, "w"), played(1.0, "l"), winner_is_agent=True)
    by_comparator = PreferencePair(played(3.0, "w"), played(1.0, "l"), winner_is_agent=False)
    assert select_pairs([by_agent, by_comparator], 2, by="comparator_return") == [by_comparator]


def test_dpo11_all_agents_and_all_turns_count_as_text():
    def turns(*texts):
        return Trajectory("task", (), tuple((text, "same") for text in texts), (1.0,) * len(texts), ({},) * len(texts))

    loser = Trajectory("task", (), (("l", "l"),), (0.0,), ({},))
    other_agent = Trajectory("task", (), (("a", "other"),), (1.0,), ({},))
    winners = (turns("a"), turns("a", "b"), turns("a", "c"), other_agent)
    pairs = [PreferencePair(winner, loser, True) for winner in winners]
    assert len(select_pairs(pairs, 9)) == 4


def test_dpo11_what_a_coordinator_wrote_counts_even_if_the_split_parts_are_equal():
    def central(written):
        action = Response((1,), (2,), written, False)
        return Trajectory("task", ((action,),), (("a", "b"),), (1.0,), ({},))

    loser = Trajectory("task", (), (("l", "l"),), (0.0,), ({},))
    pairs = [PreferencePair(central(text), loser, True) for text in ("<agent_0>a", "ok: <agent_0>a", "<agent_0>a")]
    assert select_pairs(pairs, 9) == pairs[:2]


def test_dpo11_winner_reuse_is_counted_per_task():
    def pair(task_id, winner, loser):
        return PreferencePair(played(1.0, winner, task_id), played(0.0, loser, task_id), True)

    of_a = [pair("a", "w", "l1"), pair("a", "w", "l2"), pair("a", "w", "l3")]
    of_b = [pair("b", "w", "l1"), pair("b", "v", "l1")]
    assert pair_diversity([of_a[0], of_b[0], *of_a[1:], of_b[1]]) == {
        "a": PairDiversity(pairs=3, winners=1, losers=3),
        "b": PairDiversity(pairs=2, winners=2, losers=1),
    }
    assert pair_diversity([]) == {}


def test_fewer_pairs_than_k_are_all_returned():
    pairs = labelled([0.0, 0.0], [1.0, 2.0])
    for rule in SELECTION_RULES:
        assert len(select_pairs(pairs, 50, by=rule, generator=generator(), proxy=len_of_text, component="all")) == 2


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused_even_without_pairs(k):
    with pytest.raises(ValueError, match=f"k must be at least 1 pair per task, got {k}"):
        select_pairs([], k)


def test_an_unknown_rule_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown selection rule 'best'") as failure:
        select_pairs([], 1, by="best")
    assert all(rule in str(failure.value) for rule in SELECTION_RULES)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("random", "needs an explicit torch.Generator, got None"),
        ("proxy", "pass proxy="),
        ("good_comparator", "pass component="),
    ],
)
def test_a_rule_without_its_argument_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        select_pairs(labelled([1.0], [0.0]), 1, by=rule)


def test_an_unknown_component_is_refused_with_the_names_of_the_reward():
    pairs = [PreferencePair(played(1.0, style=0.5, length=0.5), played(0.0, style=0.0, length=0.0), True)]
    with pytest.raises(ValueError, match=r"has no component 'stile'; it has \['length', 'style'\]"):
        select_pairs(pairs, 1, by="good_comparator", component="stile")


def test_a_proxy_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="proxy scored a trajectory of task 'task' nan"):
        select_pairs(labelled([1.0], [0.0]), 1, by="proxy", proxy=lambda trajectory: math.nan)


def test_pairs_of_several_tasks_are_refused():
    pairs = [PreferencePair(played(1.0, task_id=task), played(0.0, task_id=task), True) for task in "ab"]
    with pytest.raises(ValueError, match="call once per task"):
        select_pairs(pairs, 1)


# --- replay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0.8, [0.339, 0.271, 0.217, 0.173]),
        (0.2, [0.801, 0.160, 0.032, 0.006]),
        (1.0, [0.25, 0.25, 0.25, 0.25]),
        (0.0, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_math7_decay_weights_of_four_shards_newest_first(decay, expected):
    # Different lengths: the weight belongs to the shard, not to its pairs.
    weights = filled("decay", [4, 1, 9, 2], decay=decay).weights()
    assert weights == pytest.approx(expected, abs=5e-4)
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-12)


def test_math7_an_iteration_without_pairs_ages_nothing():
    buffer = ReplayBuffer("decay", decay=0.8)
    for number, length in enumerate([2, 0, 0, 2, 0]):
        buffer.add(shard(number, length))
    assert buffer.weights() == pytest.approx([1 / 1.8, 0.8 / 1.8])
    delayed = ReplayBuffer("delay", delay=1)
    for number, length in enumerate([2, 2, 0, 2, 0]):
        delayed.add(shard(number, length))
    assert set(places(delayed.sample(generator()))) == {(1, 0), (1, 1)}


def test_weights_are_the_expected_shares_of_a_training_set_in_every_mode():
    assert filled("offline", [7]).weights() == [1.0]
    assert filled("online", [1, 3, 6]).weights() == [0.6, 0.3, 0.1]
    assert filled("delay", [1, 3, 6], delay=1).weights() == [0.0, 1.0, 0.0]
    assert filled("delay", [1, 3, 6], delay=9).weights() == [0.0, 0.0, 1.0]


def test_offline_trains_on_its_one_shard_and_refuses_a_second():
    buffer = filled("offline", [5])
    assert sorted(places(buffer.sample(generator()))) == [(0, place) for place in range(5)]
    buffer.add([])
    with pytest.raises(ValueError, match="one pre-collected shard, and 5 pairs are there already.*'online'"):
        buffer.add(shard(1, 2))
    assert len(buffer) == 5


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), seed=st.integers(0, 99))
def test_online_holds_every_pair_of_every_shard_once(lengths, seed):
    everything = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    assert sorted(places(filled("online", lengths).sample(generator(seed)))) == everything


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_delay_uses_only_the_shard_of_k_shards_ago_or_the_oldest(delay):
    buffer = ReplayBuffer("delay", delay=delay)
    for newest in range(5):
        buffer.add(shard(newest, newest + 1))
        expected = {0: newest, 1: max(newest - 1, 0), 2: max(newest - 2, 0), 3: max(newest - 3, 0)}[delay]
        drawn = places(buffer.sample(generator(newest)))
        assert sorted(drawn) == [(expected, place) for place in range(expected + 1)]


def test_delay_zero_and_decay_zero_both_train_on_the_newest_shard_alone():
    """Appendix D.2: k = 0 and lambda = 0 both restrict sampling to the current iteration."""
    newest = [(2, place) for place in range(4)]
    for seed in range(20):
        assert sorted(places(filled("delay", [3, 5, 4], delay=0).sample(generator(seed)))) == newest
        assert sorted(places(filled("decay", [3, 5, 4], decay=0.0).sample(generator(seed)))) == newest


@pytest.mark.parametrize("decay", [0.8, 0.2, 1.0, 0.0])
def test_decay_draws_shards_in_the_proportion_of_their_weights(decay):
    """20,000 draws; by Hoeffding a share strays beyond the margin with probability 1e-9 at most."""
    draws, lengths = 20_000, [40, 5, 20, 10]
    drawn = places(filled("decay", lengths, decay=decay, size=draws).sample(generator(11)))
    margin = math.sqrt(math.log(2 * 4 / 1e-9) / (2 * draws))
    counts = Counter(number for number, _ in drawn)
    total = sum(decay**age for age in range(4))
    for age in range(4):
        assert abs(counts[3 - age] / draws - decay**age / total) < margin
    if decay == 0.0:
        assert set(counts) == {3}


def test_decay_draws_as_many_pairs_as_the_newest_shard_holds_unless_told():
    assert len(filled("decay", [9, 3, 5]).sample(generator())) == 5
    assert len(filled("decay", [9, 3, 5], size=2).sample(generator())) == 2
    assert len(filled("decay", [1], size=7).sample(generator())) == 7


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    decay=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    size=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_decay_draws_no_pair_again_before_its_shard_is_exhausted(lengths, decay, size, seed):
    """At every moment the pairs of a shard have been drawn equally often, up to one."""
    drawn = places(filled("decay", lengths, decay=decay, size=size).sample(generator(seed)))
    assert len(drawn) == size
    times = {(number, place): 0 for number, length in enumerate(lengths) for place in range(length)}
    for number, place in drawn:
        times[number, place] += 1
        of_shard = [times[number, other] for other in range(lengths[number])]
        assert max(of_shard) - min(of_shard) <= 1


def test_an_exhausted_shard_comes_back_in_another_order():
    drawn = places(filled("decay", [8], size=80).sample(generator(1)))
    rounds = {tuple(drawn[start : start + 8]) for start in range(0, 80, 8)}
    assert len(rounds) > 5


def test_decay_picks_pairs_of_a_shard_uniformly():
    draws, source, buffer = 4_000, generator(5), filled("decay", [5], size=2)
    counts = Counter(place for _ in range(draws) for _, place in places(buffer.sample(source)))
    margin = math.sqrt(math.log(2 * 5 / 1e-9) / (2 * draws))
    for place in range(5):
        assert abs(counts[place] / draws - 2 / 5) < margin


@pytest.mark.parametrize("mode", BUFFER_MODES)
def test_a_training_set_comes_in_the_generators_order(mode):
    buffer = filled(mode, [12] if mode == "offline" else [12, 12, 12])
    source = generator(2)
    first, second = places(buffer.sample(source)), places(buffer.sample(source))
    assert first != second
    again = generator(2)
    assert places(buffer.sample(again)) == first
    assert places(buffer.sample(again)) == second


@pytest.mark.parametrize("mode", BUFFER_MODES)
def test_save1_a_resumed_buffer_continues_as_the_uninterrupted_one(mode):
    options = {"decay": 0.8, "delay": 1, "size": 7}
    undisturbed, source = ReplayBuffer(mode, **options), generator(4)
    undisturbed.add(shard(0, 5))
    undisturbed.sample(source)
    saved = json.loads(json.dumps(undisturbed.state_dict()))
    saved_generator = source.get_state()

    resumed, resumed_source = ReplayBuffer(mode, **options), generator(99)
    resumed.load_state_dict(saved)
    resumed_source.set_state(saved_generator)
    assert resumed.shards == undisturbed.shards
    for number in (1, 2):
        if mode != "offline":
            undisturbed.add(shard(number, 4))
            resumed.add(undisturbed.shards[-1])
        assert resumed.sample(resumed_source) == undisturbed.sample(source)
    assert resumed.weights() == undisturbed.weights()


def test_save1_loading_replaces_what_was_there():
    buffer, other = filled("online", [2, 3]), filled("online", [4])
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert [len(shard) for shard in other.shards] == [2, 3]
    assert other.state_dict() == buffer.state_dict()


@pytest.mark.parametrize("changed", [{"mode": "online"}, {"decay": 0.2}, {"delay": 1}, {"size": 3}])
def test_save1_a_buffer_with_other_settings_is_refused(changed):
    state = filled("decay", [2]).state_dict()
    mode = changed.get("mode", "decay")
    other = ReplayBuffer(mode, **{name: value for name, value in changed.items() if name != "mode"})
    with pytest.raises(ValueError, match="the saved buffer has settings .* start the run afresh"):
        other.load_state_dict(state)
    assert len(other) == 0


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("ofline", {}, "unknown buffer mode 'ofline'; valid modes: offline, online, decay, delay"),
        ("decay", {"decay": 1.1}, r"decay must lie in \[0, 1\], got 1.1"),
        ("decay", {"decay": -0.1}, r"decay must lie in \[0, 1\], got -0.1"),
        ("decay", {"decay": math.nan}, r"decay must lie in \[0, 1\], got nan"),
        ("delay", {"delay": -1}, "delay must be at least 0 shards, got -1"),
        ("decay", {"size": 0}, "size must be at least 1 pair, got 0"),
    ],
)
def test_bad_settings_are_refused_with_the_value_and_the_remedy(mode, options, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(mode, **options)


@pytest.mark.parametrize("mode", BUFFER_MODES)
def test_seed2_sampling_without_a_generator_is_refused_before_anything_is_drawn(mode):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="needs an explicit torch.Generator, got None"):
        filled(mode, [3]).sample(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_seed2_building_selecting_and_sampling_leave_global_random_states_alone():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    for mode in BUFFER_MODES:
        buffer = filled(mode, [4])
        buffer.load_state_dict(buffer.state_dict())
        buffer.sample(generator())
    select_pairs(labelled([1.0, 2.0], [0.0, 0.0]), 1, by="random", generator=generator())
    assert states() == before
