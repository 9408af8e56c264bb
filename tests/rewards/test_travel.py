"""The Travel oracle: worked examples, landmarks, penalties, and what holds for any text."""

from __future__ import annotations

import json
import math

import pytest

from mapl_core.rewards import travel_reward
from mapl_core.rewards.travel import PARTS, judge
from travel_trips import BEST, FIELDS, REFERENCE_TEXT, items, pair, task, text, triple

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
