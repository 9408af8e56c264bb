"""Any text gets a finite reward in its range, soon and without an exception: random and mutated strings."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapl_core.domains.base import Task
from mapl_core.rewards import bfcl_reward
from mapl_core.rewards.bfcl import measure, reward_of

PROPERTIES = {name: {"type": "any"} for name in ("city", "unit", "days")}
TASK = Task(
    "t",
    "small",
    "eval",
    {
        "function": [
            {"name": "get_weather", "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["city"]}},
            {"name": "geo.area", "parameters": {"type": "dict", "properties": {"x": {"type": "dict"}}, "required": []}},
        ],
        "ground_truth": [
            {"get_weather": {"city": ["Paris"], "unit": ["celsius", ""]}},
            {"get_weather": {"city": [["a", 1]], "days": [3, 2.5, ""]}},
            {"geo.area": {"x": [{"k": [1, ""], "l": [[True, None]]}]}},
        ],
    },
)
PIECES = (
    *(
        "get_weather",
        "geo.area",
        "geo_area",
        "get_time",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "'''",
        '"""',
        ",",
        "=",
    ),
    *(
        ":",
        ".",
        ";",
        "\\",
        "\n",
        " ",
        "#",
        "*",
        "**",
        "-",
        "```",
        "```python\n",
        "<tool_call>",
        "</tool_call>",
        "<think>",
    ),
    *(
        "</think>",
        "city=",
        "unit=",
        "'Paris'",
        '"city"',
        '"name"',
        '"arguments"',
        "null",
        "true",
        "None",
        "NaN",
        "1e999",
    ),
    *(
        "0x1F",
        "3",
        "2.5",
        "lambda:",
        "not ",
        "def ",
        "print(",
        "\0",
        "\ud800",
        "\u2028",
        "é",
        "日",
        "\ufeff",
        "\r",
        "f'{",
    ),
)
WELL_FORMED = (
    "get_weather(city='Paris', unit=\"celsius\")",
    "get_weather(city=['a', 1], days=3)\ngeo.area(x={'k': 1, 'l': [True, None]})",
    "Sure:\n```python\n[get_weather('Paris'), geo_area(x={\"l\": [true, null]})]\n```",
    json.dumps([{"name": "get_weather", "arguments": {"city": "Paris", "unit": None}}] * 2),
    '<tool_call>\n{"name": "geo.area", "arguments": "{\\"x\\": {\\"k\\": 1}}"}\n</tool_call>\n' * 2,
)


@st.composite
def mutated(draw) -> str:
    """A well-formed answer in which spans were replaced, repeated or cut out."""
    text = draw(st.sampled_from(WELL_FORMED))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        piece = draw(st.sampled_from(("", *PIECES)) | st.text(max_size=3) | st.just(text[start:end] * 3))
        text = text[:start] + piece + text[end:]
    return text * draw(st.sampled_from((1, 1, 1, 7)))


RESPONSE = (
    mutated()
    | st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
    | st.text(st.characters(), max_size=120)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("name", "city", "x")), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps([{"name": "get_weather", "arguments": {"city": value}}, value]))
)


# A tenth of them is part of the fast suite.
@pytest.mark.parametrize("examples", [2_000, pytest.param(18_000, marks=pytest.mark.nightly)])
def test_random_and_mutated_strings_are_scored_soon_and_never_raise(examples):
    seconds = []

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(RESPONSE | st.none(), min_size=1, max_size=3))
    def check(responses):
        start = time.process_time()
        measured = measure(responses, TASK)
        reward = reward_of(measured)
        seconds.append(time.process_time() - start)
        assert math.isfinite(reward.total) and -1.0 <= reward.total <= 2.0
        assert all(math.isfinite(part) for part in reward.parts.values())
        assert reward.total == pytest.approx(sum(reward.parts.values()))
        assert 0 <= measured.name_f1 <= 1 and 0 <= measured.similarity <= 1 and 0 <= measured.balance <= 1
        assert measured.merged + measured.duplicates == sum(measured.calls)
        assert (reward.parts["base"] > 0) == (sum(measured.calls) > 0)

    check()
    seconds.sort()
    assert len(seconds) >= examples * 0.9
    assert seconds[int(0.99 * len(seconds))] < 0.050


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(RESPONSE, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_the_order_of_the_agents_never_matters(responses, rng):
    shuffled = rng.sample(responses, len(responses))
    assert bfcl_reward(responses, TASK) == reward_of(measure(responses, TASK))
    assert bfcl_reward(shuffled, TASK).total == pytest.approx(bfcl_reward(responses, TASK).total)
