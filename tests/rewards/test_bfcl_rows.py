"""The BFCL oracle on all 400 real rows: reference answers are exact in every syntax, and nothing less is."""

from __future__ import annotations

import random

import pytest
from bfcl_rows import SYNTAXES, all_tasks, python_call, reference_calls

from mapl_core.domains import get_domain
from mapl_core.rewards import bfcl_reward
from mapl_core.rewards.bfcl import measure


def dealt(calls, agents, rng):
    """The calls in random order, shared out at random among the agents; some may get none."""
    shares = [[] for _ in range(agents)]
    for call in rng.sample(calls, len(calls)):
        rng.choice(shares).append(call)
    return shares


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_all_reference_answers_are_exact_merged_from_a_random_split_over_two_or_three_agents(syntax):
    rng = random.Random(syntax)
    wrong = []
    for task in all_tasks():
        shares = dealt(reference_calls(task), rng.choice((2, 3)), rng)
        responses = [SYNTAXES[syntax](share) for share in shares]
        if not measure(responses, task).is_exact:
            wrong.append((task.id, responses))
    assert wrong == []


@pytest.mark.parametrize("agents", [2, 3])
def test_agents_may_each_use_a_syntax_of_their_own_and_a_coordinator_any_in_each_section(agents):
    rng, domain = random.Random(agents), get_domain("bfcl", num_agents=agents)
    for task in all_tasks():
        shares = dealt(reference_calls(task), agents, rng)
        responses = [SYNTAXES[rng.choice(list(SYNTAXES))](share) for share in shares]
        assert measure(responses, task).is_exact, (task.id, responses)
        sections = domain.split_joint(f"Here they are:\n{domain.join(responses)}")
        assert domain.metrics(sections, task) == domain.metrics(responses, task), (task.id, responses)


def test_reference_answers_dealt_out_in_turn_to_two_agents_score_exactly_2():
    totals = []
    for task in all_tasks():
        calls = [python_call(call) for call in reference_calls(task)]
        totals.append(bfcl_reward(["\n".join(calls[::2]), "\n".join(calls[1::2])], task).total)
    assert totals == [2.0] * 400


def test_an_answer_without_one_of_its_calls_is_never_exact():
    for task in all_tasks():
        calls = [python_call(call) for call in reference_calls(task)]
        for dropped in range(len(calls)):
            kept = calls[:dropped] + calls[dropped + 1 :]
            assert not measure(["\n".join(kept), ""], task).is_exact, (task.id, dropped)


def altered(value):
    """Another value of the same kind, which no row accepts."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 12345.678
    if isinstance(value, str):
        return value + " or else"
    if isinstance(value, list):
        return [*value, "one more"]
    return {**value, "one more": 1}


def test_an_answer_with_one_argument_altered_is_never_exact():
    for task in all_tasks():
        calls = reference_calls(task)
        for index, (name, arguments) in enumerate(calls):
            for argument in arguments:
                changed = (name, {**arguments, argument: altered(arguments[argument])})
                text = "\n".join(map(python_call, [*calls[:index], changed, *calls[index + 1 :]]))
                assert not measure([text, ""], task).is_exact, (task.id, changed)


def test_an_answer_with_an_argument_dropped_or_added_or_another_name_is_never_exact():
    for task in all_tasks():
        calls = reference_calls(task)
        for index, (name, arguments) in enumerate(calls):
            changed = [(name, {**arguments, "one_more": 1}), (name + "_2", arguments)]
            changed += [(name, {key: arguments[key] for key in arguments if key != left_out}) for left_out in arguments]
            for call in changed:
                text = "\n".join(map(python_call, [*calls[:index], call, *calls[index + 1 :]]))
                assert not measure([text, ""], task).is_exact, (task.id, call)


# Two gold calls of this row accept Apple on that date, so that a second such call is wanted as far as it can be told.
ANSWERS_TWO = ("parallel_178", "get_stock_price(company_name='Apple', date='2022-01-01')")


@pytest.mark.parametrize("by", ["the same agent", "the other agent"])
def test_a_call_issued_once_too_often_always_costs_the_duplicate_penalty(by):
    for task in all_tasks():
        calls = [python_call(call) for call in reference_calls(task)]
        for repeated in calls:
            responses = ["\n".join([*calls, repeated]), ""] if by == "the same agent" else ["\n".join(calls), repeated]
            reward = bfcl_reward(responses, task)
            if (task.id, repeated) == ANSWERS_TWO:
                assert reward.parts["duplicates"] == 0 and reward.parts["excess"] < 0 and reward.total < 1.5
            else:
                assert reward.parts["duplicates"] == pytest.approx(-0.6 / len(calls)), (task.id, repeated)
