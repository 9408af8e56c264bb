"""The Travel oracle: worked examples, landmarks, penalties, and what holds for any text."""

from __future__ import annotations

import json
import math
import random
import time

import pytest
from travel_trips import BEST, REFERENCE_TEXT, TOUR, five_days, pair, task, text, triple

from mapl_core.rewards import travel_reward
from mapl_core.rewards.travel import PARTS, judge

LUNCH, DINNER_1 = (2, "lunch"), (1, "dinner")


def first_item(agent_1, value):
    """Agent 1's text with its first item replaced by the slot day 1 accommodation."""
    listed = json.loads(agent_1)["assignments"]
    return text(1, [{"day": 1, "field": "accommodation", "value": value}, *listed[1:]])


def variants():
    """Responses and task of every worked example of domains.md 5.7, by name."""
    best = pair()
    logistics, activities = best
    listed = json.loads(activities)["assignments"]
    blank = pair(dict.fromkeys(BEST, "-"))
    as_text = [item | {"day": "2"} if item["day"] == 2 else item for item in json.loads(logistics)["assignments"]]
    return {
        "a": (best, task()),
        "b": (blank, task()),
        "c": (["", ""], task()),
        "d": ([logistics, ""], task()),
        "e": ([activities, logistics], task()),
        "f": (pair({LUNCH: "Nowhere Grill, Brim"}), task()),
        "g": (pair({DINNER_1: "Nowhere Grill, Brim"}), task()),
        "h": (pair({DINNER_1: "Dill 24/7, East, Brim"}), task()),
        "i": (best, task(budget=250)),
        "j": (best, task(budget=145)),
        "k": (pair({LUNCH: "Bay Diner"}), task()),
        "l": (
            pair(
                {
                    (1, "transportation"): BEST[1, "transportation"] + ", Departure Time: 08:00",
                    LUNCH: " bay  DINER , Brim(Ohio)",
                }
            ),
            task(),
        ),
        "m": (pair({(3, "transportation"): "Self-driving, from Brim to Alba"}), task()),
        "n": (pair({(1, "accommodation"): "Gum Bunk, Brim", (2, "accommodation"): "Gum Bunk, Brim"}), task()),
        "o": (pair({LUNCH: "Ash Cafe, Brim"}), task()),
        "p": (pair({(3, "accommodation"): "Elm House, Brim"}), task()),
        "q": (pair({(2, "current_city"): "from Brim to Brim"}), task()),
        "r": (best, task(constraint={"cuisine": ["Italian", "Indian"]})),
        "s": (best, task(constraint={"room type": "entire room"})),
        "t": (best, task(people_number=3, budget=770)),
        "u": ([f"```json\n{logistics}\n```", activities], task()),
        "v": ([logistics[:-2], activities], task()),
        "w": ([logistics, first_item(activities, "Elm House, Brim")], task()),
        "x": ([logistics, first_item(activities, "Fir Loft, Brim")], task()),
        "y": ([logistics, text(1, [*listed, listed[0]])], task()),
        "z": ([text(0, as_text), activities], task()),
        "A": ([REFERENCE_TEXT, activities], task()),
        "B": ([logistics, "x" * 4800], task()),
    }


# name: J, B, g, Q, total, pass, success (domains.md, 5.7)
EXAMPLES = {
    "a": (1, 1, 1, 1, 1.0, 1, 1),
    "b": (1, 0, 0, 0.033368, 0.08, 0, 0),
    "c": (0, 0, 0, 0.011806, 0.0, 0, 0),
    "d": (0, 0.1, 7 / 11, 0.528467, 0.027373, 0, 0),
    "e": (0, 0, 7 / 11, 0.528467, -0.091375, 0, 0),
    "f": (1, 0.775, 10 / 11, 0.87675, 0.746744, 0, 0),
    "g": (1, 1, 1, 0.967797, 0.893165, 0, 0),
    "h": (1, 1, 1, 0.993793, 0.898694, 1, 0),
    "i": (1, 1, 1, 0.976, 0.89492, 1, 0),
    "j": (1, 1, 1, 0.85, 0.866824, 1, 0),
    "k": (1, 0.775, 10 / 11, 0.87675, 0.746744, 0, 0),
    "l": (1, 1, 1, 1, 1.0, 1, 1),
    "m": (1, 1, 1, 0.96875, 0.89337, 0, 0),
    "n": (1, 1, 1, 0.96875, 0.89337, 0, 0),
    "o": (1, 1, 1, 0.989583, 0.897805, 0, 0),
    "p": (1, 1, 1, 0.970666, 0.89378, 0, 0),
    "q": (1, 0.871429, 10 / 11, 0.902142, 0.803962, 0, 0),
    "r": (1, 1, 1, 0.9625, 0.892027, 1, 0),
    "s": (1, 1, 1, 0.925, 0.883849, 1, 0),
    "t": (1, 1, 1, 1, 1.0, 1, 1),
    "u": (0, 1, 1, 1, 0.05809, 1, 1),
    "v": (0, 0.1, 4 / 11, 0.304216, 0.05507, 0, 0),
    "w": (0, 1, 1, 0.989732, 0.055997, 0, 0),
    "x": (0, 0.871429, 10 / 11, 0.870472, 0.055997, 0, 0),
    "y": (0, 0.1, 7 / 11, 0.528467, 0.053647, 0, 0),
    "z": (0, 1, 1, 1, 0.0685, 1, 1),
    "A": (0, 0.1, 4 / 11, 0.304216, -0.073572, 0, 0),
    "B": (0, 0.1, 7 / 11, 0.528467, -0.022627, 0, 0),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example_has_its_measurements_and_total(name):
    responses, trip = variants()[name]
    strict, balance, grounding, quality, total, passes, succeeds = EXAMPLES[name]
    outcome = judge(responses, trip)
    assert outcome.all_strict == strict
    assert outcome.balance == pytest.approx(balance, abs=1e-6)
    assert outcome.evaluation.grounding == pytest.approx(grounding, abs=1e-12)
    assert outcome.quality == pytest.approx(quality, abs=1e-6)
    assert (outcome.evaluation.passes, outcome.evaluation.succeeds) == (passes, succeeds)
    reward = travel_reward(responses, trip)
    assert reward.total == pytest.approx(total, abs=1e-6)
    assert tuple(reward.parts) == PARTS
    assert math.fsum(reward.parts.values()) == pytest.approx(total, abs=1e-6)


# Landmarks and penalties ---------------------------------------------------------------------------------------------


def test_the_parts_of_a_perfect_pair_are_their_weights():
    reward = travel_reward(pair(), task())
    weights = (0.02, 0.03, 0.04, 0.02, 0.14, 0.57, 0.08, 0.10, 0, 0, 0, 0, 0)
    assert reward.parts == pytest.approx(dict(zip(PARTS, weights, strict=True)))
    assert reward.total == 1.0  # exactly, whatever the rounding


def test_the_landmarks_of_the_specification():
    logistics, activities = pair()
    assert travel_reward([logistics, activities], task()).total == 1.0
    assert travel_reward(pair(dict.fromkeys(BEST, "-")), task()).total == pytest.approx(0.08)
    assert travel_reward([None, ""], task()).total == 0.0


BREAKS = {
    "fenced": lambda answer: f"```json\n{answer}\n```",
    "cut": lambda answer: answer[:-2],
    "prose before": lambda answer: f"Sure! {answer}",
    "prose after": lambda answer: f"{answer}\nEnjoy!",
    "another key": lambda answer: answer[:-1] + ', "note": 1}',
    "literal": lambda answer: str(json.loads(answer)),
    "as a list": lambda answer: json.dumps(json.loads(answer)["assignments"]),
    "empty": lambda answer: "",
    "spaces": lambda answer: "   ",
    "one item less": lambda answer: text(
        json.loads(answer)["agent_id"], json.loads(answer)["assignments"][:-1]
    ),
    "unclosed thought": lambda answer: "<think>" + answer,
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_one_invalid_agent_leaves_at_most_7_hundredths_and_two_at_most_5(name):
    logistics, activities = pair()
    for responses in ([BREAKS[name](logistics), activities], [logistics, BREAKS[name](activities)]):
        assert -0.25 <= travel_reward(responses, task()).total <= 0.07
    assert -0.25 <= travel_reward([BREAKS[name](logistics), BREAKS[name](activities)], task()).total <= 0.05 + 1e-12


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: "\ufeff" + answer,
        lambda answer: f"<think>\nlet me see</think>\n\n{answer}",
        lambda answer: f"  {answer}\r\n",
        lambda answer: json.dumps(json.loads(answer), indent=1).replace("\n", "\r\n"),
    ],
    ids=["byte-order mark", "thought", "white space", "line ends"],
)
def test_marks_thoughts_and_white_space_do_not_cost_anything(change):
    assert travel_reward([change(answer) for answer in pair()], task()).total == 1.0


def test_the_same_plan_with_conflict_is_worth_less_than_with_overlap_in_its_penalty_only():
    logistics, activities = pair()
    overlap = travel_reward([logistics, first_item(activities, "Elm House, Brim")], task())
    conflict = travel_reward([logistics, first_item(activities, "Fir Loft, Brim")], task())
    assert overlap.parts["pen_overlap"] == pytest.approx(-0.05 / 21) and overlap.parts["pen_conflict"] == 0
    assert conflict.parts["pen_conflict"] == pytest.approx(-0.05 / 21) and conflict.parts["pen_overlap"] == 0


def test_invalid_items_are_counted_over_the_items_of_both():
    logistics, activities = pair()
    bad = json.loads(activities)["assignments"][:-2] + [{"day": 9, "field": "lunch", "value": "x"}, 3]
    parts = travel_reward([logistics, text(1, bad)], task()).parts
    assert parts["pen_invalid"] == pytest.approx(-0.10 * (12 - 10) / 12)  # the violation, more than 2 of 21


@pytest.mark.parametrize(("copied", "rate"), [(0, 0), (15, 0), (22, 0), (40, 1)])
def test_copies_are_free_up_to_a_fifth_of_the_runs_of_eight_words(copied, rate):
    words = [f"t{number}" for number in range(1, copied + 1)] + [f"u{number}" for number in range(61 - copied)]
    outcome = judge([" ".join(words), ""], task())
    runs = 61 - 7
    expected = min(max((max(copied - 7, 0) / runs - 0.2) / 0.6, 0), 1)
    assert outcome.rates["copy"] == pytest.approx(expected)
    assert bool(outcome.rates["copy"]) == bool(rate) or copied == 22


def test_seven_words_are_too_few_to_be_a_copy_and_case_and_signs_do_not_hide_one():
    assert judge([" ".join(REFERENCE_TEXT.split()[:7]), ""], task()).rates["copy"] == 0
    assert judge([" ".join(REFERENCE_TEXT.split()[:8]), ""], task()).rates["copy"] == 1
    assert judge([", ".join(REFERENCE_TEXT.upper().split()), ""], task()).rates["copy"] == 1


def test_words_of_a_copy_keep_one_inner_sign():
    reference = "At 10:30 pay $1,234.50 for A/B-c at http://x.org a b"
    found = judge(["at 10:30 pay 1 234.50 for a/b-c at http x.org a b", ""], task(reference_text=reference))
    assert found.rates["copy"] == 1


def test_without_a_reference_text_nothing_is_copied():
    assert judge([REFERENCE_TEXT, ""], task(reference_text="")).rates["copy"] == 0


@pytest.mark.parametrize(("length", "rate"), [(1860, 0), (1861, 1 / 1860), (2790, 0.5), (3720, 1), (9999, 1)])
def test_a_text_is_overlong_beyond_240_and_180_characters_a_slot(length, rate):
    assert judge(["x" * length, ""], task()).rates["overlong"] == pytest.approx(rate)
    assert judge(["", "x" * length], task()).rates["overlong"] == pytest.approx(
        min(max((length - 2400) / 2400, 0), 1)
    )  # fmt: skip


def test_success_asks_for_every_owned_slot_and_for_both_texts():
    night = travel_reward(pair({(3, "accommodation"): "Elm House, Brim"}), task(budget=900))
    assert night.parts["success"] == 0  # an optional slot that is not valid
    assert travel_reward(variants()["z"][0], task()).parts["success"] == 0


# Teams of three ------------------------------------------------------------------------------------------------------


def test_a_team_of_three_earns_the_maximum_with_the_same_plan():
    assert travel_reward(triple(BEST), task(), num_agents=3).total == 1.0
    assert travel_reward(triple(dict.fromkeys(BEST, "-")), task(), num_agents=3).total == pytest.approx(0.08)
    outcome = judge(triple({**BEST, (2, "attraction"): "Nowhere, Brim"}), task(), num_agents=3)
    assert outcome.balance == pytest.approx(0.2 * 2 / 3)  # the sightseer's only slot


def test_in_a_team_of_three_one_broken_text_closes_the_gate():
    dining = triple(BEST)
    dining[1] = dining[1][:-1]
    assert travel_reward(dining, task(), num_agents=3).total <= 0.07
    assert judge(dining, task(), num_agents=3).validity == pytest.approx(2 / 3)


def test_two_agents_texts_are_not_those_of_three():
    with pytest.raises(ValueError, match="expected 3 responses"):
        travel_reward(pair(), task(), num_agents=3)
    assert not judge([*pair(), ""], task(), num_agents=3).actions[1].strict


# Wrong input and any text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [[], ["one"], ["one", "two", "three"]])
def test_a_wrong_number_of_texts_is_a_value_error(responses):
    with pytest.raises(ValueError, match="expected 2 responses"):
        travel_reward(responses, task())


@pytest.mark.parametrize("responses", ["ab", None, 2, [1, "two"], [["one"], ["two"]], [b"one", b"two"]])
def test_responses_of_a_wrong_type_are_a_type_error(responses):
    with pytest.raises(TypeError):
        travel_reward(responses, task())


def test_the_reward_is_pure_and_reads_changed_fields_anew():
    trip, responses = task(), pair()
    before = json.dumps(trip.fields)
    assert travel_reward(responses, trip) == travel_reward(tuple(responses), trip)
    assert json.dumps(trip.fields) == before
    assert travel_reward(responses, task(budget=250)).total < 1.0  # another budget with equal records


def random_text(rng, answers):
    """A text for one agent: noise, or an answer that was cut, spliced, repeated or changed here and there."""
    signs = ['"', "'", "{", "}", "[", "]", ",", ":", "\\", "day", "field", "value", '"day": 2, "field": "lunch"', "```",
             "<think>", "</think>", "\u2014", "\ud800", "\x00", "NaN", "null", "1e999", " ", "\n", "Brim", "agent_id",
             "from Alba to Brim", "(Ohio)", ";", "-"]  # fmt: skip
    if rng.random() < 0.2:
        return "".join(rng.choice(signs) for _ in range(rng.randrange(120)))
    text = rng.choice(answers)
    for _ in range(rng.randrange(1, 8)):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:start] + text[end:]
        elif kind == 1:
            text = text[:start] + rng.choice(signs) + text[start:]
        elif kind == 2:
            text = text[:start] + text[start:end] * rng.randrange(1, 4) + text[end:]
        elif kind == 3:
            text = text[:start] + chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) + text[start + 1 :]
        else:
            text = text[end:] + text[start:end] + text[:start]
    return text[:60_000]


@pytest.mark.parametrize("count", [1000, pytest.param(9000, marks=pytest.mark.nightly)])
def test_random_and_mutated_texts_get_a_finite_reward_in_range_at_once(count):
    rng = random.Random(count)
    trip = five_days()
    answers = [*pair(TOUR, TOUR, 5), *pair(), REFERENCE_TEXT]
    seconds = []
    for _ in range(count):
        responses = [random_text(rng, answers) for _ in range(2)]
        start = time.process_time()
        reward = travel_reward(responses, trip)
        seconds.append(time.process_time() - start)
        assert math.isfinite(reward.total) and -0.25 <= reward.total <= 1.0
        assert all(math.isfinite(part) for part in reward.parts.values())
        total = sum(reward.parts.values())
        assert min(max(total, -0.25), 1.0) == pytest.approx(reward.total, abs=1e-8)
    assert sorted(seconds)[int(0.99 * count)] < 0.020
