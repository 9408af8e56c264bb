"""An agent's action: the strict form, everything that is still read, what is recovered, and the merge."""

from __future__ import annotations

import json

import pytest
from timing import within
from travel_trips import BEST, LOGISTICS, items, text

from mapl_core.rewards.travel_actions import (
    MOST_CHARACTERS,
    TEAMS,
    merge,
    owned_slots,
    read_action,
    unquote,
    write_action,
)

GOOD = items(BEST, 0)  # agent 0's nine items
FIRST = GOOD[0]  # day 1, current_city


def read(answer, agent=0, days=3, num_agents=2):
    return read_action(answer if isinstance(answer, str) else json.dumps(answer), agent, days, num_agents)


def wrapped(listed, **others):
    return {"agent_id": 0, "assignments": listed} | others


def test_capacities_are_three_and_four_slots_a_day_never_an_even_share():
    assert [len(owned_slots(agent, 3)) for agent in (0, 1)] == [9, 12]
    assert [len(owned_slots(agent, 5)) for agent in (0, 1)] == [15, 20]
    assert [len(owned_slots(agent, 3, 3)) for agent in range(3)] == [9, 9, 3]
    for size, team in TEAMS.items():
        slots = [slot for agent in range(size) for slot in owned_slots(agent, 3, size)]
        assert len(slots) == len(set(slots)) == 21
        assert len(team) == size


def test_slots_come_day_by_day_in_the_order_of_the_itinerary():
    assert owned_slots(0, 2) == [(day, name) for day in (1, 2) for name in LOGISTICS]
    assert owned_slots(1, 1) == [(1, "breakfast"), (1, "attraction"), (1, "lunch"), (1, "dinner")]


def test_the_asked_form_is_strict_whatever_its_order_and_white_space():
    for answer in (
        json.dumps(wrapped(GOOD)),
        json.dumps({"assignments": GOOD[::-1], "agent_id": 0}, indent=2),
        f"\n {json.dumps(wrapped(GOOD), ensure_ascii=False)}\t\n",
        write_action(0, [((item["day"], item["field"]), item["value"]) for item in GOOD]),
    ):
        action = read(answer)
        assert action.strict and action.decoded and action.well_formed and action.id_matches
        assert action.accepted == {(item["day"], item["field"]): item["value"] for item in GOOD}
        assert (action.progress, action.structure, action.soft, action.violation) == (pytest.approx(1), 1, 1, 0)


def changed(**change):
    return [FIRST | change, *GOOD[1:]]


NOT_STRICT = {
    "a fence": f"```json\n{json.dumps(wrapped(GOOD))}\n```",
    "text around": "Here it is: " + json.dumps(wrapped(GOOD)),
    "a further key": wrapped(GOOD, note="x"),
    "no agent_id": {"assignments": GOOD},
    "another agent": wrapped(GOOD, agent_id=1),
    "agent as text": wrapped(GOOD, agent_id="0"),
    "agent as float": wrapped(GOOD, agent_id=0.0),
    "agent as false": wrapped(GOOD, agent_id=False),
    "a key twice": json.dumps(wrapped(GOOD)).replace('{"agent_id": 0,', '{"agent_id": 0, "agent_id": 0,'),
    "an item's key twice": json.dumps(wrapped(GOOD)).replace('"day": 1, "field"', '"day": 1, "day": 1, "field"', 1),
    "day as text": wrapped(changed(day="1")),
    "day as float": wrapped(changed(day=1.0)),
    "day as true": wrapped(changed(day=True)),
    "day 0": wrapped(changed(day=0)),
    "a day too many": wrapped(changed(day=4)),
    "an item's further key": wrapped(changed(note=1)),
    "field in capitals": wrapped(changed(field="Current_City")),
    "an unknown field": wrapped(changed(field="city")),
    "an empty value": wrapped(changed(value=" ")),
    "a null value": wrapped(changed(value=None)),
    "a number as value": wrapped(changed(value=3)),
    "a slot missing": wrapped(GOOD[1:]),
    "a slot twice": wrapped([*GOOD, FIRST]),
    "a slot of another agent": wrapped(changed(field="lunch")),
    "a list": GOOD,
    "a Python literal": str(wrapped(GOOD)),
    "NaN": json.dumps(wrapped(GOOD)).replace('"agent_id": 0', '"agent_id": NaN'),
    "Infinity inside": json.dumps(wrapped([*GOOD[:-1], GOOD[-1] | {"value": float("inf")}])),
    "nothing": "",
    "cut": json.dumps(wrapped(GOOD))[:-1],
    "slots as the key": {"agent_id": 0, "slots": GOOD},
}


@pytest.mark.parametrize("name", NOT_STRICT)
def test_any_other_form_is_not_strict(name):
    assert not read(NOT_STRICT[name]).strict


@pytest.mark.parametrize(
    "name",
    ["a fence", "text around", "a further key", "no agent_id", "another agent", "agent as text", "agent as float",
     "agent as false", "a key twice", "an item's key twice", "day as text", "day as float", "field in capitals",
     "a list", "a Python literal", "NaN", "slots as the key"],
)  # fmt: skip
def test_what_means_the_same_is_still_read_completely(name):
    action = read(NOT_STRICT[name])
    assert action.decoded
    assert action.accepted == {(item["day"], item["field"]): item["value"] for item in GOOD}
    assert (action.invalid, action.duplicates, action.extra) == (0, 0, 0)


@pytest.mark.parametrize(
    ("item", "accepted"),
    [
        ({"day": 1, "field": "lunch", "value": "A, B"}, "A, B"),
        ({"days": "1", "field": " LUNCH ", "value": "A, B"}, "A, B"),
        ({"day": " 1 ", "field": "lunch", "value": None}, "-"),
        ({"day": 1.0, "field": "lunch", "value": "  "}, "-"),
        ([1, "lunch", "A, B"], "A, B"),
        (["1", "lunch", None], "-"),
        ({"day": 1, "field": "lunch"}, "-"),
        ({"day": 1, "field": "lunch", "value": 7}, None),
        ({"day": 1, "field": "lunch", "value": ["A, B"]}, None),
        ({"day": True, "field": "lunch", "value": "A, B"}, None),
        ({"day": 1.5, "field": "lunch", "value": "A, B"}, None),
        ({"day": "one", "field": "lunch", "value": "A, B"}, None),
        ({"day": None, "field": "lunch", "value": "A, B"}, None),
        ({"day": 0, "field": "lunch", "value": "A, B"}, None),
        ({"day": 4, "field": "lunch", "value": "A, B"}, None),
        ({"day": 10**30, "field": "lunch", "value": "A, B"}, None),
        ({"day": 1, "field": "supper", "value": "A, B"}, None),
        ({"day": 1, "field": 3, "value": "A, B"}, None),
        ({"day": 1, "value": "A, B"}, None),
        ([1, "lunch"], None),
        ("lunch", None),
        (7, None),
        (None, None),
    ],
)
def test_an_item_is_read_or_counts_as_invalid(item, accepted):
    action = read({"agent_id": 1, "assignments": [item]}, agent=1)
    assert action.accepted == ({} if accepted is None else {(1, "lunch"): accepted})
    assert action.invalid == (accepted is None)
    assert action.decoded


@pytest.mark.parametrize(
    "answer",
    ["", "   ", "no plan", "[]", "{}", "[1, 2, 3]", '"text"', "42", "null", '{"agent_id": 0}',
     '{"agent_id": 0, "assignments": "none"}', '{"agent_id": 0, "assignments": {"day": 1}}', "{'a': 1}"],
)  # fmt: skip
def test_a_text_without_an_action_is_not_decoded(answer):
    action = read(answer)
    assert not action.decoded and action.items == () and action.soft == 0


def test_an_empty_list_of_assignments_is_decoded_but_holds_nothing():
    action = read(wrapped([]))
    assert action.decoded and action.accepted == {} and not action.strict


@pytest.mark.parametrize(
    "answer",
    [
        "I think {day 1} is best.\n" + json.dumps(wrapped(GOOD)) + "\nDone [really].",
        "Draft: {'note': 1} and [1, 2]\n" + str(wrapped(GOOD)),
        "<answer>" + str([(item["day"], item["field"], item["value"]) for item in GOOD]) + "</answer>",
        "```\nnot this\n```\nbut\n```python\n" + str(wrapped(GOOD)) + "\n```",
        "```json\n" + json.dumps(wrapped(GOOD)),
    ],
    ids=["JSON in prose", "literal in prose", "tuples", "second fence", "open fence"],
)
def test_the_first_action_in_a_text_is_found(answer):
    action = read(answer)
    assert len(action.accepted) == 9 and not action.strict


def test_the_content_of_a_fence_goes_before_the_text_around_it():
    draft, final = json.dumps(wrapped(changed(value="draft"))), json.dumps(wrapped(GOOD))
    assert read(f"{draft}\n```json\n{final}\n```").accepted[1, "current_city"] == FIRST["value"]


def test_one_item_too_many_costs_all_slots_of_the_action():
    action = read(wrapped([*GOOD, FIRST]))
    assert action.accepted == {} and action.extra == 1
    assert (action.invalid, action.duplicates) == (0, 0)  # they are not counted twice
    assert len(action.recovered) == 9  # but what the text holds can still be rescued
    assert action.violation == pytest.approx(1 / 10)


def test_the_first_of_a_repeated_slot_wins_and_each_repeat_is_a_duplicate():
    action = read(wrapped([FIRST, FIRST | {"value": "Brim"}, FIRST]))
    assert action.accepted == {(1, "current_city"): FIRST["value"]}
    assert action.duplicates == 2


def test_slots_of_another_agent_take_part():
    action = read(wrapped(changed(field="lunch", value="A, B")))
    assert action.accepted[1, "lunch"] == "A, B"
    assert (1, "lunch") not in action.recovered
    assert action.soft == pytest.approx((1 + 1 + 1 + 8 / 9 + 1 + 1) / 6)


# Recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps(wrapped(GOOD))[:-2],
        json.dumps(wrapped(GOOD)).replace('"', "'")[:-2],
        "\n".join(
            f'- day: {item["day"]}, field: "{item["field"]}", value: "{item["value"]}"' for item in GOOD
        ),
        "\n".join(f"{{'days':'{item['day']}','field':'{item['field']}','value':'{item['value']}'" for item in GOOD),
    ],
    ids=["cut JSON", "cut literal", "keys without quotes", "broken lines"],
)  # fmt: skip
def test_triples_are_recovered_from_texts_that_cannot_be_decoded(answer):
    action = read(answer)
    assert not action.decoded and action.accepted == {}
    assert action.recovered == {(item["day"], item["field"]): item["value"] for item in GOOD}
    assert action.violation == 0


def test_recovery_keeps_the_first_value_of_owned_slots_and_counts_the_rest_as_violation():
    given = [(1, "lunch", "not mine"), (1, "current_city", "first"), (1, "current_city", "second"),
             (9, "current_city", "x")]  # fmt: skip
    action = read("\n".join(f'"day": {day}, "field": "{name}", "value": "{value}"' for day, name, value in given))
    assert action.recovered == {(1, "current_city"): "first"}
    assert action.violation == pytest.approx(3 / 4)


def test_escaped_signs_in_a_recovered_text_are_read():
    action = read('"day": 1, "field": "current_city", "value": "L\\u00e9on \\"Old\\" \\\\ City"')
    assert action.recovered == {(1, "current_city"): 'L\u00e9on "Old" \\ City'}
    assert unquote(r"'it\'s \x41\n'") == "it's A\n"
    assert unquote(r'"broken \u12 escape"') == "broken u12 escape"


# Frame -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "progress", "structure"),
    [
        ("", 0, 0),
        ("{", 0.1, 0.25),
        ('{"agent_id": 1', 0.2, 0.25),
        ('{"agent_id": 0', 0.3, 0.5),
        ('{"agent_id": 0, "assignments":', 0.4, 0.5),
        ('{"agent_id": 0, "assignments": [', 0.6, 0.75),
        ('{"agent_id": 0, "assignments": []}', 0.75, 1),
        ('{"agent_id": 0, "assignments": [}]', 0.6, 0.75),
        ('{"agent_id": 0, "assignments": [}', 0.6, 0.75),
        ('{"agent_id": 0, "assignments": ["]}', 0.6, 0.75),
        ("{}", 0.25, 0.5),
        ("agent_id: 0, assignments: [", 0.5, 0.5),
    ],
)
def test_each_part_of_the_frame_earns_its_share(answer, progress, structure):
    action = read(answer)
    assert action.progress == pytest.approx(progress)
    assert action.structure == pytest.approx(structure)


# Merging -----------------------------------------------------------------------------------------------------------


def test_equal_values_overlap_different_ones_conflict_and_neither_is_counted_twice():
    first = read(wrapped([FIRST, {"day": 2, "field": "lunch", "value": "Ash  CAFE, Brim"}, GOOD[1]]))
    second = read(
        text(1, [{"day": 2, "field": "lunch", "value": "Ash Cafe, Brim"}, FIRST | {"value": "Cove"}]), agent=1
    )
    merged = merge([first, second])
    assert merged.plan == {(2, "lunch"): "Ash  CAFE, Brim", (1, "transportation"): GOOD[1]["value"]}
    assert (merged.conflicts, merged.overlaps) == (1, 1)


def test_three_agents_that_give_one_slot_make_one_conflict_or_one_overlap():
    def given(*values):
        return merge([read({"agent_id": 0, "assignments": [[1, "lunch", value]]}, 0, 3, 3) for value in values])

    assert (given("A, B", "a, b", "A,  B").overlaps, given("A, B", "a, b", "A,  B").conflicts) == (1, 0)
    assert (given("A, B", "A, B", "C, B").overlaps, given("A, B", "A, B", "C, B").conflicts) == (0, 1)
    assert given("A, B", "A, B", "C, B").plan == {}


def test_two_blanks_of_a_slot_overlap_too():
    blank = read({"agent_id": 0, "assignments": [[1, "lunch", "-"]]})
    assert merge([blank, blank]).overlaps == 1


# Hostile texts ------------------------------------------------------------------------------------------------------


HOSTILE = {
    "deep lists": "[" * 50_000,
    "deep objects": '{"a":' * 20_000,
    "deep but closed": "[" * 3000 + "]" * 3000,
    "signs": "-" * 50_000,
    "sums": "[1" + "+1" * 20_000 + "]",
    "endless list": "[1," * 20_000,
    "endless items": '{"day":1,"field":"lunch","value":"x"},' * 3000,
    "open texts": '{"' * 20_000,
    "quotes": "\"'" * 20_000,
    "backslashes": '{"\\' * 15_000,
    "white space": "[" + " " * 50_000 + "x",
    "fences": "```\n" * 12_000,
    "days": "day " * 12_000,
    "keys": '"day": 1, "field": "' * 3000,
    "a number": "9" * 50_000,
    "numbers as ids": '{"agent_id": ' + "9" * 5000 + ', "assignments": []}',
    "a huge exponent": '{"agent_id": 1e999, "assignments": [[1e999, "lunch", "x"]]}',
    "lone surrogates": '{"agent_id": 0, "assignments": [[1, "lunch", "\\ud800"]]}\ud800',
    "controls": "\x00\x1b[31m\u202e{\u2028}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_read_without_an_exception_and_in_bounded_time(name):
    action = within(0.5, lambda: read(HOSTILE[name]))  # ten times what is measured on a slow machine
    assert not action.strict and 0 <= action.progress <= 1 and 0 <= action.violation <= 1


def test_a_text_beyond_the_limit_is_never_strict_but_its_start_is_read():
    long = json.dumps(wrapped(changed(value="x" * MOST_CHARACTERS)))
    assert not read(long).strict
    assert read(json.dumps(wrapped(GOOD)) + " " * MOST_CHARACTERS).strict  # white space does not count
    assert len(read(json.dumps(wrapped(GOOD)) + "x" * MOST_CHARACTERS).accepted) == 9
