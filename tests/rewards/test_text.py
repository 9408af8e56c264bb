"""Cleaning and checking of responses, the same for every domain."""

from __future__ import annotations

import pytest

from mapl_core.rewards import Reward, score_batch
from mapl_core.rewards.text import check_responses, clean_response


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        (None, ""),
        ("", ""),
        ("plain", "plain"),
        ("\ufeffplain", "plain"),
        ("one\r\ntwo\rthree\n", "one\ntwo\nthree\n"),
        ("<think>\n\n</think>\n\nanswer", "\n\nanswer"),
        ("<think>first this\nthen that</think>answer", "answer"),
        ("\n  <think>x</think> answer", " answer"),
        ("\ufeff<think>x</think>answer", "answer"),
        ("<think>never closed, so there is no answer", ""),
        ("<think>", ""),
    ],
)
def test_marks_carriage_returns_and_a_leading_thought_are_dropped(raw, cleaned):
    assert clean_response(raw) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "  outer white space stays \n",
        "a thought <think>in the middle</think> stays",
        "</think> alone stays",
        "a\ufeffb",
        "thinking <think> without end",
    ],
)
def test_everything_else_stays_as_it_was_written(text):
    assert clean_response(text) == text


def test_only_the_first_thought_is_dropped():
    assert clean_response("<think>a</think><think>b</think>c") == "<think>b</think>c"


@pytest.mark.parametrize(
    "responses", ["two texts", None, {"a", "b"}, iter(["a", "b"]), 7, [["a"], ["b"]], ["a", 3], ["a", b"b"]]
)
def test_anything_but_a_list_of_texts_is_a_type_error(responses):
    with pytest.raises(TypeError):
        check_responses(responses, num_agents=2)


@pytest.mark.parametrize("responses", [[], ["a"], ["a", "b", "c"]])
def test_a_wrong_number_of_responses_is_a_value_error_that_names_both_numbers(responses):
    with pytest.raises(ValueError, match=f"expected 2 responses.*got {len(responses)}"):
        check_responses(responses, num_agents=2)


def test_a_list_or_tuple_of_texts_and_none_is_accepted():
    check_responses(["a", None], num_agents=2)
    check_responses(("a", "b", None), num_agents=3)


class CountingOracle:
    def __init__(self):
        self.calls = []

    def __call__(self, responses, task):
        self.calls.append((list(responses), task))
        return Reward(float(task), {"task": float(task)})


def test_a_batch_is_scored_in_order_each_response_with_its_own_task():
    oracle = CountingOracle()
    rewards = score_batch(oracle, [["a", "b"], ["c", None]], [1, 2])
    assert [reward.total for reward in rewards] == [1.0, 2.0]
    assert oracle.calls == [(["a", "b"], 1), (["c", None], 2)]


@pytest.mark.parametrize("tasks", [[1], [1, 2, 3], []])
def test_batch_lists_of_unequal_length_are_refused_before_anything_is_scored(tasks):
    oracle = CountingOracle()
    with pytest.raises(ValueError, match=f"2 joint responses for {len(tasks)} tasks"):
        score_batch(oracle, [["a", "b"], ["c", "d"]], tasks)
    assert oracle.calls == []


@pytest.mark.parametrize(("last", "error"), [(["only one"], ValueError), ("text", TypeError), (["a", 1], TypeError)])
def test_a_fault_at_the_end_of_a_batch_is_found_before_the_start_is_scored(last, error):
    oracle = CountingOracle()
    with pytest.raises(error):
        score_batch(oracle, [["a", "b"], last], [1, 2])
    assert oracle.calls == []
