"""The miniature trips: generated, feasible, apart by split, written in few words, scored by the same oracle."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from mapl_core.domains import get_domain
from mapl_core.domains.travel_solver import cheapest_plan, plan_values
from mapl_core.pocket.travel import (
    CUISINES,
    END,
    MARGINS,
    NONE,
    PRICES,
    RESTAURANTS,
    answer_words,
    best_answers,
    cities_of_places,
    draw_trip,
    make_tasks,
    render,
    trip_key,
    vocabulary,
)
from mapl_core.rewards import travel_reward
from mapl_core.rewards.travel import judge
from mapl_core.rewards.travel_actions import TEAMS, owned_slots, write_action
from mapl_core.rewards.travel_trip import read_trip

TOKEN = re.compile(r"</?agent_\d>|\w+|[^\w\s]")
EVERY = [(split, days) for split in ("train", "eval") for days in (3, 5)]
ALL = {key: make_tasks(key[0], days=key[1]) for key in EVERY}
TASKS = [task for tasks in ALL.values() for task in tasks]


def test_splits_have_60_and_20_trips_always_the_same_and_none_in_both():
    for days in (3, 5):
        train, evaluation = ALL["train", days], ALL["eval", days]
        assert (len(train), len(evaluation)) == (60, 20)
        keys = [trip_key(task.fields) for task in (*train, *evaluation)]
        assert len(set(keys)) == 80
        assert make_tasks("train", 4, days=days) == train[:4]
    assert len({task.id for task in TASKS}) == 160
    assert get_domain("travel", days=5).load_tasks("eval", "pocket") == ALL["eval", 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("test",), "unknown split 'test'"), (("train", 0), "limit 0"), (("eval", 21), "limit 21 exceeds the 20 eval")],
)
def test_what_is_not_generated_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_tasks(*arguments)
    with pytest.raises(ValueError, match="3 or 5 days"):
        make_tasks("train", days=7)


@pytest.mark.parametrize("num_agents", [2, 3])
def test_every_trip_is_feasible_and_the_solvers_plan_in_words_earns_the_maximum(num_agents):
    for task in TASKS:
        domain = get_domain("travel", num_agents=num_agents, days=task.fields["days"])
        answers = best_answers(task, num_agents)
        assert domain.reward(answers, task).total == 1.0, task.id
        metrics = domain.metrics(answers, task)
        assert metrics["success"] == 1 and metrics["cost"] <= task.fields["budget"]


def test_the_same_plan_as_json_of_a_large_model_scores_the_same():
    for task in TASKS[::8]:
        trip = read_trip(task.fields)
        plan = plan_values(cheapest_plan(trip), trip)
        texts = [
            write_action(agent, [(slot, plan.get(slot, "-")) for slot in owned_slots(agent, trip.days)])
            for agent in (0, 1)
        ]
        assert travel_reward(texts, task).total == 1.0
        for agent, words in enumerate(best_answers(task)):
            assert json.loads(render(words, agent, task)) == json.loads(texts[agent])


def test_budgets_are_the_cheapest_cost_times_a_margin_rounded_up():
    seen = set()
    for task in TASKS:
        cost = cheapest_plan(read_trip(task.fields)).cost
        rounded = {margin: -int(-cost * margin // 1) for margin in MARGINS}
        matching = [margin for margin, budget in rounded.items() if abs(budget - task.fields["budget"]) < 1]
        assert matching, task.id
        seen.update(matching)
    assert seen == set(MARGINS)


def test_trips_have_the_stated_make_up():
    constraints = {"cuisine": 0, "room type": 0, "transportation": 0, "house rule": 0}
    taxis = 0
    for task in TASKS:
        trip = read_trip(task.fields)
        cities = task.fields["visiting_city_number"]
        assert cities == (1 if trip.days == 3 else 2)
        assert [row.moves for row in trip.scaffold] == [day % 2 == 0 for day in range(trip.days)]
        catalogue = trip.catalogue
        assert (len(catalogue.restaurants), len(catalogue.attractions), len(catalogue.lodgings)) == (
            4 * cities, 3 * cities, 3 * cities
        )  # fmt: skip
        ways = cities + 1
        assert len(catalogue.flights) == ways
        assert sum(ride.mode == "self-driving" for ride in catalogue.rides) == ways
        taxis += sum(ride.mode == "taxi" for ride in catalogue.rides) / ways
        prices = {place.cost for place in catalogue.restaurants} | {place.price for place in catalogue.lodgings}
        prices |= {flight.price for flight in catalogue.flights} | {ride.price for ride in catalogue.rides}
        assert prices <= set(PRICES)
        assert {cuisine for place in catalogue.restaurants for cuisine in place.cuisines} <= set(CUISINES)
        assert all(1 <= place.minimum_nights <= 3 and 1 <= place.occupancy <= 4 for place in catalogue.lodgings)
        assert all(len(place.rules) == 1 for place in catalogue.lodgings)
        assert 1 <= trip.people <= 3
        for name, value in task.fields["local_constraint"].items():
            constraints[name] += bool(value)
    assert constraints.pop("house rule") == 0
    assert 0.35 < sum(constraints.values()) / len(TASKS) < 0.6 and all(constraints.values())
    assert 0.4 < taxis / len(TASKS) < 0.6


def test_drawing_depends_on_the_generators_seed_alone():
    assert draw_trip(random.Random(7)) == draw_trip(random.Random(7)) != draw_trip(random.Random(8))


# Words ---------------------------------------------------------------------------------------------------------------


def every_prompt(domain, task):
    drafts = list(best_answers(task, domain.num_agents))
    prompts = [domain.coordinator_prompt(task), domain.single_prompt(task), *domain.discussion_prompts(task, drafts)]
    return prompts + [domain.sequential_prompt(a, task, drafts[:a]) for a in range(domain.num_agents)]


@pytest.mark.parametrize("num_agents", [2, 3])
def test_prompts_and_answers_use_a_vocabulary_of_at_most_400_words(num_agents):
    words = set(vocabulary())
    tags = {f"<{slash}agent_{agent}>" for agent in range(3) for slash in ("", "/")}
    assert len(words | tags) + 3 + 4 <= 400  # with the chat template's roles and the special tokens
    for task in TASKS[::10]:
        domain = get_domain("travel", num_agents=num_agents, days=task.fields["days"])
        for text in (*every_prompt(domain, task), *best_answers(task, num_agents)):
            assert set(TOKEN.findall(text)) <= words | tags


@pytest.mark.parametrize("num_agents", [2, 3])
def test_an_agents_prompt_has_at_most_120_tokens_and_its_answer_one_a_slot_and_the_end(num_agents):
    for task in TASKS[::2]:
        domain = get_domain("travel", num_agents=num_agents, days=task.fields["days"])
        for agent, prompt in enumerate(domain.prompts(task)):
            assert len(TOKEN.findall(prompt)) <= 120
            answer = best_answers(task, num_agents)[agent].split()
            assert len(answer) == len(owned_slots(agent, task.fields["days"], num_agents)) + 1
            assert answer[-1] == END


def test_prompts_show_party_costs_and_only_the_agents_own_catalogue():
    for task in ALL["train", 3]:
        trip = read_trip(task.fields)
        logistics, activities = get_domain("travel").prompts(task)
        lodging, restaurant = trip.catalogue.lodgings[0], trip.catalogue.restaurants[0]
        cost = " ".join(str(round(lodging.price * -(-trip.people // lodging.occupancy))))
        assert f"{lodging.name.lower()} {cost} " in logistics
        assert lodging.name.lower() not in activities.split()
        meal = " ".join(str(round(restaurant.cost * trip.people)))
        assert f"{restaurant.name.lower()} {meal} " in activities
        assert restaurant.name.lower() not in logistics.split()


# Rendering -----------------------------------------------------------------------------------------------------------

TRIP = ALL["train", 3][0]
WORDS = [answer.split() for answer in best_answers(TRIP)]
STAY = TRIP.fields["dest"]


def test_without_the_end_the_brackets_stay_open():
    rendered = render(" ".join(WORDS[0][:-1]), 0, TRIP)
    assert rendered.endswith("}") and json.loads(rendered + "]}")["agent_id"] == 0
    outcome = get_domain("travel").judge([" ".join(WORDS[0][:-1]), " ".join(WORDS[1])], TRIP)
    assert not outcome.actions[0].decoded and outcome.actions[1].strict
    assert len(outcome.actions[0].recovered) == 9


def test_surplus_values_repeat_the_last_slot_and_words_after_the_end_do_not_count():
    surplus = json.loads(render(" ".join([*WORDS[0][:-1], NONE, NONE, END]), 0, TRIP))["assignments"]
    assert len(surplus) == 11 and [(item["day"], item["field"]) for item in surplus[8:]] == [(3, "accommodation")] * 3
    assert render(" ".join([*WORDS[0], "acorn"]), 0, TRIP) == render(" ".join(WORDS[0]), 0, TRIP)


def test_too_few_values_leave_slots_out():
    assert len(json.loads(render(f"{NONE} {END}", 1, TRIP))["assignments"]) == 1
    assert json.loads(render(END, 1, TRIP)) == {"agent_id": 1, "assignments": []}


@pytest.mark.parametrize("text", [None, "", "  "])
def test_nothing_stays_nothing(text):
    assert render(text, 0, TRIP) == text


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["alba_to_brim", "drive", "den"], ["from Alba to Brim", "Self-driving, from Alba to Brim", f"Den, {STAY}"]),
        (["alba_to_brim", "taxi", NONE], ["from Alba to Brim", "Taxi, from Alba to Brim", "-"]),
        (["brim", "-", "acorn"], ["Brim", "-", f"Acorn, {STAY}"]),
        (["fly", "fly", "brim"], ["fly", "fly", "Brim"]),
        (["hull_to_alba", "fly", "what"], ["from Hull to Alba", "Flight Number: F0000, from Hull to Alba", "what"]),
        (["Alba_to_Brim", "Drive", '"'], ["from Alba to Brim", "Self-driving, from Alba to Brim", '"']),
    ],
)  # fmt: skip
def test_each_word_becomes_the_value_that_a_large_model_would_write(words, values):
    own = replace(TRIP, fields={**TRIP.fields})
    rendered = json.loads(render(" ".join([*words, END]), 0, own))
    assert [item["value"] for item in rendered["assignments"]] == values


def test_an_entity_is_written_with_its_own_city_and_one_that_the_trip_lacks_with_that_of_the_evening():
    task = ALL["train", 5][0]
    trip = read_trip(task.fields)
    first, second = (row.end for row in trip.scaffold if not row.moves)
    cities = cities_of_places(trip)
    there = next(place.name for place in trip.catalogue.restaurants if place.city == second)
    missing = next(name for name in RESTAURANTS if name not in cities)
    slots = owned_slots(1, trip.days)
    words = [{(2, "lunch"): there.lower(), (4, "lunch"): missing.lower()}.get(slot, NONE) for slot in slots]
    items = json.loads(render(" ".join([*words, END]), 1, task))["assignments"]
    values = {(item["day"], item["field"]): item["value"] for item in items}
    assert first != second
    assert values[2, "lunch"] == f"{there}, {second}"
    assert values[4, "lunch"] == f"{missing}, {second}"
    kinds = (trip.catalogue.restaurants, trip.catalogue.attractions, trip.catalogue.lodgings)
    names = [place.name for places in kinds for place in places]
    assert len(names) == len(set(names)) == len(cities) == 20


def test_a_flight_of_the_trip_is_written_with_its_number():
    trip = read_trip(TRIP.fields)
    flight = trip.catalogue.flights[0]
    words = f"{flight.origin}_to_{flight.destination} fly none end".lower()
    value = json.loads(render(words, 0, TRIP))["assignments"][1]["value"]
    assert value == f"Flight Number: {flight.number}, from {flight.origin} to {flight.destination}"


def test_a_coordinators_words_are_split_and_rendered_like_the_agents():
    domain = get_domain("travel")
    joint = domain.join(best_answers(TRIP))
    assert domain.reward(domain.split_joint(joint), TRIP).total == 1.0


# Corruptions ---------------------------------------------------------------------------------------------------------


def corrupted(task, **replacements):
    """The solver's plan in words with the named slots' words replaced."""
    trip = read_trip(task.fields)
    answers = []
    for agent, answer in enumerate(best_answers(task)):
        words = answer.split()
        for number, (day, name) in enumerate(owned_slots(agent, trip.days)):
            words[number] = replacements.get(f"{name}_{day}", words[number])
        answers.append(" ".join(words))
    return answers


def failures(answers, task):
    found = get_domain("travel", days=task.fields["days"]).judge(answers, task).evaluation
    return {name for name, check in {**found.commonsense, **found.hard}.items() if not check.passed}


@pytest.mark.parametrize("kind", ["wrong city", "repeated restaurant", "missing night", "unknown entity", "wrong kind"])
def test_each_single_corruption_of_any_trip_lowers_the_reward_and_fails_exactly_its_checks(kind):
    for task in TASKS[::3]:
        trip = read_trip(task.fields)
        plan = plan_values(cheapest_plan(trip), trip)
        breakfast, sight = (plan[2, name].split(",")[0].lower() for name in ("breakfast", "attraction"))
        change, expected = {
            "wrong city": ({"current_city_2": trip.org.lower()}, {"reasonable_route", "budget"}),
            "repeated restaurant": ({"lunch_2": breakfast}, {"restaurant_diversity"}),
            "missing night": ({"accommodation_2": NONE}, {"complete_information", "budget"}),
            "unknown entity": ({"lunch_2": "nowhere"}, {"within_reference", "within_current_city", "budget"}),
            "wrong kind": ({"lunch_2": sight}, {"within_reference", "within_current_city", "budget"}),
        }[kind]
        answers = corrupted(task, **change)
        assert get_domain("travel").reward(answers, task).total < 0.95
        found = failures(answers, task)
        # What was asked for may depend on the changed slot; a shorter stay may be too short for its lodging.
        allowed = {"cuisine", "minimum_nights"} | ({"budget"} if kind == "repeated restaurant" else set())
        assert expected <= found <= expected | allowed, (task.id, found)


def test_an_overdrawn_budget_fails_the_budget_alone():
    for task in TASKS[::3]:
        cost = cheapest_plan(read_trip(task.fields)).cost
        poor = replace(task, fields={**task.fields, "budget": cost - 1})
        assert failures(best_answers(task), poor) == {"budget"}
        assert 0.8 < get_domain("travel").reward(best_answers(task), poor).total < 0.9


def test_a_copied_reference_and_conflicts_and_overlaps_lower_the_reward():
    task = TRIP
    first, second = (render(answer, agent, task) for agent, answer in enumerate(best_answers(task)))
    assert judge([task.fields["reference_text"], second], task).rates["copy"] == 1
    assert travel_reward([task.fields["reference_text"], second], task).total < 0
    listed = json.loads(second)["assignments"]
    night = json.loads(first)["assignments"][2]
    for value, rate in ((night["value"], "overlap"), ("Nowhere, Brim", "conflict")):
        answer = json.dumps({"agent_id": 1, "assignments": [night | {"value": value}, *listed[1:]]})
        outcome = judge([first, answer], task)
        assert outcome.rates[rate] == pytest.approx(1 / 21)
        assert travel_reward([first, answer], task).total < 0.07


def test_words_of_the_best_plan_follow_the_slots_of_any_team():
    trip = read_trip(TRIP.fields)
    plan = plan_values(cheapest_plan(trip), trip)
    for size, team in TEAMS.items():
        words = [answer_words(plan, agent, trip, size).split() for agent in range(size)]
        assert [len(answer) for answer in words] == [3 * len(owned) + 1 for owned in team]
