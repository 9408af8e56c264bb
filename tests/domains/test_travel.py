"""The Travel domain: rows and splits of every source, prompts, the solver behind them, local rows of the real data."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from travel_trips import (
    BEST,
    FIVE,
    ROWS,
    TOUR,
    TWO_CITIES,
    five_days,
    items,
    lodging,
    pair,
    records,
    restaurant,
    text,
    triple,
)
from travel_trips import task as trip_task

from mapl_core.domains import get_domain
from mapl_core.domains.base import Turn
from mapl_core.domains.travel import human_plan, read_local_row, split_rows
from mapl_core.domains.travel_prompts import catalogue_text, estimate_tokens
from mapl_core.domains.travel_solver import cheapest_plan, plan_values, split_budget
from mapl_core.rewards import travel_reward
from mapl_core.rewards.travel_actions import ACTIVITIES, DINING, LOGISTICS, SIGHTSEEING, TEAMS
from mapl_core.rewards.travel_checks import evaluate_plan
from mapl_core.rewards.travel_reference import parse_reference
from mapl_core.rewards.travel_trip import read_trip

HUB_REVISION = "8736504ecfc31b7f8b7e40122873c337e83fff7c"


@pytest.fixture
def domain():
    return get_domain("travel")


def read(**changes):
    return read_trip(trip_task(**changes).fields)


# Local rows ----------------------------------------------------------------------------------------------------------


def conversation(query, rows=ROWS):
    """A line of the local file: the user's message with reference and query, and a plan that must not be read."""
    return json.dumps(
        {
            "messages": [
                {"role": "system", "content": "You plan trips."},
                {"role": "user", "content": f"Given Information:{records(rows)!r}\nQuery:{query}\n"},
                {"role": "assistant", "content": "SECRET PLAN"},
            ]
        }
    )


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Write a file of local rows and name its folder in MAPL_DATA_DIR."""

    def write(lines):
        (tmp_path / "travelplanner_train_plans.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        monkeypatch.setenv("MAPL_DATA_DIR", str(tmp_path))
        return tmp_path

    return write


SEVEN = {title.replace("2022-03-03", "2022-03-07"): content for title, content in ROWS.items()}


def test_local_rows_are_easy_and_medium_trips_of_at_most_five_days_every_fifth_for_evaluation(domain, local):
    lines = [conversation(f"Trip {number} with $900.", SEVEN if number in (1, 9) else ROWS) for number in range(45)]
    local(lines)
    train, evaluation = (domain.load_tasks(split, "small") for split in ("train", "eval"))
    numbers = [number for number in range(30) if number not in (1, 9)]
    assert [task.id for task in evaluation] == [f"travelplanner/train/{n}" for n in numbers if n % 5 == 4]
    assert [task.id for task in train] == [f"travelplanner/train/{n}" for n in numbers if n % 5 != 4]
    assert train[0].fields["query"] == "Trip 0 with $900."
    assert {(task.source, task.split) for task in train} == {("small", "train")}
    assert "SECRET" not in repr([train, evaluation])
    assert domain.load_tasks("train", "small", 3) == train[:3]


def test_faulty_rows_are_refused_with_id_and_reason_and_do_not_use_up_the_limit(domain, local):
    no_food = {title: content for title, content in ROWS.items() if not title.startswith("Restaurants")}
    broken = {**ROWS, "Restaurants in Brim": 7}
    local(
        [conversation("Cheap, please."), conversation("$900", no_food), conversation("$900", broken),
         conversation("$900")]
    )  # fmt: skip
    assert [task.id for task in domain.load_tasks("train", "small", 1)] == ["travelplanner/train/3"]
    assert domain.refused["small", "train"] == [
        ("travelplanner/train/0", "the budget is None; it must be a positive amount"),
        ("travelplanner/train/1", "the reference data list no restaurants"),
        (
            "travelplanner/train/2",
            "reference record 'Restaurants in Brim': expected a table, rows or a sentence, got int",
        ),
    ]


@pytest.mark.parametrize(
    "line",
    ["not JSON", "[]", '{"messages": []}', '{"messages": [{"role": "user", "content": "Plan!"}]}',
     '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": "Query:\\nQuery:x"}]}'],
)  # fmt: skip
def test_a_malformed_line_is_an_error_that_names_file_and_line(domain, local, line):
    folder = local([conversation("$900"), line])
    with pytest.raises(ValueError, match="travelplanner_train_plans.jsonl, line 2: ") as caught:
        domain.load_tasks("train", "small")
    assert str(folder) in str(caught.value)


def test_without_the_folder_or_the_file_the_error_names_file_and_setting(domain, tmp_path, monkeypatch):
    monkeypatch.delenv("MAPL_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="travelplanner_train_plans.jsonl.*MAPL_DATA_DIR.*not set"):
        domain.load_tasks("train", "small")
    monkeypatch.setenv("MAPL_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="travelplanner_train_plans.jsonl.*holds no such file"):
        domain.load_tasks("train", "small")


# The paper's rows ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Stand in for datasets.load_dataset: remembers its calls, returns given rows or raises a given error."""
    import datasets

    calls = []

    def install(answer):
        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return install


def hub_row(days=3, level="easy", cities=1, **changes):
    rows, dates = (ROWS, None) if days == 3 else (TWO_CITIES, FIVE["dates"])
    return {
        "query": "A trip.", "org": "Alba", "dest": "Brim" if cities == 1 else "Ohio", "days": days,
        "visiting_city_number": cities, "date": str(dates or ["2022-03-01", "2022-03-02", "2022-03-03"]),
        "people_number": 2, "local_constraint": str({"house rule": None, "cuisine": ["Indian"], "room type": None,
                                                     "transportation": None}),
        "budget": 900, "level": level, "reference_information": repr(records(rows)), "annotated_plan": "SECRET",
    } | changes  # fmt: skip


def hub_rows():
    """180 rows as the hub has them: 20 of each of three lengths and three levels, in turn."""
    return [
        hub_row(days, level, cities)
        for _ in range(20)
        for days, cities in ((3, 1), (5, 2), (7, 3))
        for level in ("easy", "medium", "hard")
    ]


def test_the_papers_rows_come_from_the_pinned_revision_filtered_and_stratified_in_order(domain, hub):
    rows = hub_rows()
    calls = hub(rows)
    train, evaluation = (domain.load_tasks(split, "paper") for split in ("train", "eval"))
    call = (("osunlp/TravelPlanner", "validation"), {"split": "validation", "revision": HUB_REVISION})
    assert calls == [call, call]
    assert (len(train), len(evaluation)) == (60, 20)
    numbers = {task.id: int(task.id.rpartition("/")[2]) for task in (*train, *evaluation)}
    assert len(numbers) == 80 and list(numbers)[0].startswith("osunlp/TravelPlanner/validation/")
    assert [numbers[task.id] for task in train] == sorted(numbers[task.id] for task in train)
    for cell in ((3, "easy"), (3, "medium"), (5, "easy"), (5, "medium")):
        chosen = [rows[numbers[task.id]] for task in evaluation]
        assert sum((row["days"], row["level"]) == cell for row in chosen) == 5
    assert "SECRET" not in repr(train[0])
    assert train[0].fields["budget"] == 900 and train[0].fields["local_constraint"]["cuisine"] == ["Indian"]


def test_one_generator_shuffles_the_cells_in_ascending_order():
    rows = hub_rows()
    rng = random.Random(42)
    expected = []
    for days, level in ((3, "easy"), (3, "medium"), (5, "easy"), (5, "medium")):
        cell = [number for number, row in enumerate(rows) if (row["days"], row["level"]) == (days, level)]
        rng.shuffle(cell)
        expected += cell[:5]
    assert split_rows(rows)["eval"] == sorted(expected)


@pytest.mark.parametrize("change", [{"days": 7}, {"visiting_city_number": 3}, {"level": "hard"}])
def test_each_filter_of_the_paper_leaves_rows_out(change):
    assert split_rows([hub_row(), hub_row() | change])["eval"] == [0]


def test_a_hub_row_that_cannot_be_scored_is_refused_and_the_others_keep_their_numbers(domain, hub):
    hub([hub_row(budget=0), hub_row(), hub_row(reference_information="oops")])
    assert [task.id for task in domain.load_tasks("eval", "paper")] == ["osunlp/TravelPlanner/validation/1"]
    refused = dict(domain.refused["paper", "eval"])
    assert list(refused) == ["osunlp/TravelPlanner/validation/0", "osunlp/TravelPlanner/validation/2"]
    assert "the budget is 0" in refused["osunlp/TravelPlanner/validation/0"]
    assert "neither JSON nor a Python literal" in refused["osunlp/TravelPlanner/validation/2"]


def test_env6_an_unreachable_hub_is_an_error_that_names_the_cause_and_the_ways_out(domain, hub):
    hub(OSError("no route"))
    with pytest.raises(ConnectionError, match=f"{HUB_REVISION}.*no route.*HF_HUB_OFFLINE.*'small' and 'pocket'"):
        domain.load_tasks("train", "paper")


def test_env9_a_missing_datasets_package_is_named_with_its_install_command(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        domain.load_tasks("train", "paper")


# Choices -------------------------------------------------------------------------------------------------------------


def test_a_skeleton_is_what_write_action_writes_around_the_values(domain):
    task = trip_task()
    assert domain.skeleton(0, task) is None, "off unless asked for"
    for num_agents in (2, 3):
        structured = get_domain("travel", structured=True, num_agents=num_agents)
        plan = triple(BEST) if num_agents == 3 else pair()
        for agent, answer in enumerate(plan):
            values = structured.skeleton(agent, task).values(answer)
            assert values == [item["value"] for item in json.loads(answer)["assignments"]]
        joint = structured.coordinator_skeleton(task).values(structured.join(plan))
        assert joint == [item["value"] for answer in plan for item in json.loads(answer)["assignments"]]
    assert get_domain("travel", structured=True).skeleton(0, replace(task, source="pocket")) is None
    assert "forced" in structured.provenance("paper")["decoding"] and domain.provenance("paper")["decoding"] == "free"
    assert structured.provenance("pocket")["decoding"] == "free"


def test_unknown_choices_are_refused_with_the_valid_ones(domain, local):
    local([conversation("$900")])
    with pytest.raises(ValueError, match="unknown split 'test'; choose one of train, eval"):
        domain.load_tasks("test", "small")
    with pytest.raises(ValueError, match="unknown source 'medium'; choose one of pocket, small, paper"):
        domain.load_tasks("train", "medium")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        domain.load_tasks("train", "small", 0)
    with pytest.raises(ValueError, match="limit 2 exceeds the 1 train rows"):
        domain.load_tasks("train", "small", 2)
    for options, message in (({"num_agents": 4}, "teams of 2 and 3"), ({"days": 7}, "3 or 5 days"),
                             ({"catalogue_tokens": 0}, "must be positive")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            get_domain("travel", **options)


def test_env4_the_domain_and_its_prompts_need_neither_torch_nor_datasets():
    program = (
        "import sys\nfrom mapl_core.domains import get_domain\n"
        "domain = get_domain('travel')\n"
        "[domain.prompts(task) for task in domain.load_tasks('eval', 'pocket')]\n"
        "assert not {'torch', 'datasets', 'pandas', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_provenance_names_data_and_evaluation(domain):
    for source, said in (("pocket", "generated"), ("small", "MAPL_DATA_DIR"), ("paper", HUB_REVISION)):
        assert said in domain.provenance(source)["data"]
        assert "not the official TravelPlanner benchmark" in domain.provenance(source)["evaluation"]


# The cheapest plan and the budget ------------------------------------------------------------------------------------


def test_the_cheapest_plan_is_that_of_an_exhaustive_search():
    """Worked by hand: own car 80, Elm House 100 (Gum Bunk asks for three nights), meals 12 + 15 + 15."""
    trip = read()
    solution = cheapest_plan(trip)
    assert solution.cost == 80 + 100 + 42
    assert evaluate_plan(plan_values(solution, trip), trip).cost == solution.cost


@pytest.mark.parametrize(
    ("constraint", "cost"),
    [
        ({"cuisine": ["Italian"]}, 80 + 100 + 12 + 15 + 20),
        ({"cuisine": ["Italian", "Mexican", "American"]}, 80 + 100 + 15 + 15 + 20),
        ({"cuisine": ["Italian", "Mexican", "American", "Indian"]}, 80 + 100 + 15 + 15 + 20 + 12),  # an optional meal
        ({"room type": "entire room"}, 80 + 160 + 42),
        ({"house rule": "smoking"}, 80 + 160 + 42),
        ({"transportation": "no self-driving"}, 140 + 100 + 42),
    ],
)
def test_constraints_change_the_cheapest_plan_and_it_keeps_them(constraint, cost):
    trip = read(constraint=constraint)
    solution = cheapest_plan(trip)
    assert solution.cost == cost
    plan = {(day, name): "-" for day in (1, 2, 3) for team in TEAMS[2] for name in team}
    assert evaluate_plan({**plan, **plan_values(solution, trip)}, trip).succeeds == (cost <= 290)


@pytest.mark.parametrize(
    ("constraint", "rows"),
    [
        ({"cuisine": ["French"]}, ROWS),
        ({"room type": "shared room"}, ROWS),  # it asks for three nights
        ({}, {**ROWS, "Restaurants in Brim": ROWS["Restaurants in Brim"][:2]}),
        ({}, {title: content for title, content in ROWS.items() if "from Brim" not in title or "Flight" in title}
             | {"Flight from Brim to Alba on 2022-03-03": "no flight"}),
    ],
    ids=["no such cuisine", "no such stay", "too few restaurants", "no way back"],
)  # fmt: skip
def test_a_trip_without_a_feasible_plan_has_no_solution(constraint, rows):
    assert cheapest_plan(read(rows=rows, constraint=constraint)) is None


def test_a_tour_is_solved_city_by_city():
    trip = read_trip(five_days().fields)
    solution = cheapest_plan(trip)
    assert solution.cost == 70 + 30 + 80 + 100 + 120 + 30 + 60
    full = {slot: "-" for slot in TOUR} | plan_values(solution, trip)
    assert evaluate_plan(full, trip).succeeds


def test_a_cuisine_of_one_city_serves_the_whole_tour():
    rows = {**TWO_CITIES, "Restaurants in Brim": [*TWO_CITIES["Restaurants in Brim"], restaurant("Dim", 10, "French")]}
    trip = read_trip(trip_task(rows, constraint={"cuisine": ["French", "Indian"]}, **FIVE).fields)
    full = {slot: "-" for slot in TOUR} | plan_values(cheapest_plan(trip), trip)
    assert evaluate_plan(full, trip).hard["cuisine"].passed


@pytest.mark.parametrize(("budget", "caps"), [(290, (180 + 34, 42 + 34)), (222, (180, 42)), (222.01, (180.01, 42))])
def test_caps_are_the_floors_and_half_of_the_rest_and_the_odd_cent_goes_to_agent_0(budget, caps):
    split = split_budget(read(budget=budget))
    assert split.caps == pytest.approx(caps) and split.feasible
    assert round(100 * sum(split.caps)) == round(100 * budget)
    assert split_budget(read(budget=budget), 3).caps == (*split.caps, 0)


def test_caps_of_an_infeasible_budget_are_in_proportion_and_flagged():
    split = split_budget(read(budget=111))
    assert split.caps == pytest.approx((90, 21)) and not split.feasible
    split = split_budget(read(constraint={"cuisine": ["French"]}))
    assert sum(split.caps) == pytest.approx(290) and not split.feasible


# Prompts -------------------------------------------------------------------------------------------------------------


def every_prompt(domain, task):
    drafts = [f"draft {agent}" for agent in range(domain.num_agents)]
    forms = {"coordinator": domain.coordinator_prompt(task), "single": domain.single_prompt(task)}
    for agent in range(domain.num_agents):
        forms[f"agent {agent}"] = domain.prompts(task)[agent]
        forms[f"sequential {agent}"] = domain.sequential_prompt(agent, task, drafts[:agent])
        forms[f"discussion {agent}"] = domain.discussion_prompts(task, drafts)[agent]
    return forms


def test_every_prompt_states_request_days_and_constraints_once(domain):
    task = trip_task(constraint={"cuisine": ["Italian"], "house rule": "pets"}, people_number=3)
    for form, prompt in every_prompt(domain, task).items():
        assert prompt.count("Three days in Brim, please.") == 1, form
        assert prompt.count("house rule: pets must be allowed") == 1, form
        assert 'day 1 (2022-03-01): current_city is exactly "from Alba to Brim"' in prompt, form
        assert "$290" in prompt and "3 people" in prompt, form
        assert "Latitude" not in prompt and "example.org" not in prompt, form  # no raw reference


def test_each_agent_reads_its_own_catalogue_role_duty_and_cap(domain):
    logistics, activities = domain.prompts(trip_task(constraint={"cuisine": ["Italian"], "room type": "private room"}))
    assert "Elm House, Brim: $50, Private room, No smoking, minimum nights 1, days 1-2" in logistics
    assert "Gum Bunk, Brim: $30, Shared room, No pets, No visitors, minimum nights 3, days none" in logistics
    assert "day 1: Flight Number: F1001, from Alba to Brim: $70" in logistics
    assert "Ash Cafe" not in logistics and "Iris Park" not in logistics
    assert "Your duty among the constraints: room type (private room)." in logistics
    assert "Cob Grill, Brim: $20, Italian, Pizza" in activities and "Iris Park, Brim" in activities
    assert "Elm House" not in activities and "F1001" not in activities
    assert "Your duty among the constraints: cuisine (Italian)." in activities
    caps = split_budget(read(constraint={"cuisine": ["Italian"], "room type": "private room"})).caps
    for prompt, cap in zip((logistics, activities), caps, strict=True):
        assert f"Spend at most ${cap:.2f}".removesuffix(".00") in prompt


def test_costs_are_those_of_the_whole_party(domain):
    logistics, activities = domain.prompts(trip_task(people_number=3))
    assert "Flight Number: F1001, from Alba to Brim: $210" in logistics
    assert "Elm House, Brim: $100," in logistics  # two rooms of two
    assert "Taxi, from Alba to Brim: $90" in logistics
    assert "Ash Cafe, Brim: $45," in activities


def test_slots_are_named_as_exact_required_or_empty(domain):
    logistics, activities = domain.prompts(trip_task())
    assert '- day 1: current_city "from Alba to Brim"; transportation required; accommodation required' in logistics
    assert '- day 2: current_city "Brim"; transportation "-"; accommodation required' in logistics
    assert 'accommodation "-"' in logistics.split("- day 3: current_city")[1].splitlines()[0]
    assert "- day 2: breakfast required; attraction required; lunch required; dinner required" in activities
    assert '- day 1: breakfast optional, "-" if none;' in activities


def test_a_banned_mode_and_later_rows_of_a_name_are_not_offered(domain):
    rows = {**ROWS, "Restaurants in Brim": [*ROWS["Restaurants in Brim"], restaurant("Ash  CAFE", 99, "Indian")]}
    logistics, activities = domain.prompts(trip_task(rows, constraint={"transportation": "no flight"}))
    assert "F1001" not in logistics and "Self-driving, from Alba to Brim: $40" in logistics
    assert "$99" not in activities


def test_a_budget_that_is_too_small_is_said(domain):
    assert "budget may be too small" in domain.prompts(trip_task(budget=100))[0]
    assert "budget may be too small" not in domain.prompts(trip_task())[0]


def test_values_that_the_catalogue_shows_can_be_copied_into_a_perfect_plan(domain):
    """Every entity of the best plan stands in the prompts exactly as a slot takes it."""
    prompts = domain.prompts(trip_task())
    for (_, name), value in BEST.items():
        agent = 0 if name in LOGISTICS else 1
        assert value in prompts[agent]


def test_a_team_of_three_splits_dining_and_sightseeing():
    domain = get_domain("travel", num_agents=3)
    logistics, dining, sights = domain.prompts(trip_task())
    assert "Ash Cafe" in dining and "Iris Park" not in dining and "Ash Cafe" not in sights and "Iris Park" in sights
    assert "What you plan costs nothing." in sights
    assert domain.reward(triple(BEST), trip_task()).total == 1.0
    assert domain.metrics(triple(BEST), trip_task())["success"] == 1


def test_the_coordinator_reads_the_material_once_and_every_role(domain):
    prompt = domain.coordinator_prompt(trip_task())
    assert prompt.count("Request:") == 1
    assert prompt.count("You are agent 0.") == prompt.count("You are agent 1.") == 1
    answer = domain.join(pair())
    assert domain.reward(domain.split_joint(f"```\n{answer}\n```"), trip_task()).total == 1.0
    assert domain.split_joint(domain.single_prompt(trip_task()).rpartition("this form:")[2]) == ["one JSON object"] * 2


def test_a_single_agent_is_told_the_whole_task_without_roles(domain):
    prompt = domain.single_prompt(trip_task())
    assert "You are agent" not in prompt and "Spend at most" not in prompt
    assert "Elm House, Brim" in prompt and "Ash Cafe, Brim" in prompt


def test_later_agents_see_final_parts_and_drafts_without_thoughts(domain):
    thinking = "<think>secret</think>\n my {plan} \n"
    prompts = [
        domain.sequential_prompt(1, trip_task(), [thinking]),
        *domain.discussion_prompts(trip_task(), [thinking] * 2),
    ]
    assert all("my {plan}" in prompt and "secret" not in prompt for prompt in prompts)
    with pytest.raises(ValueError, match="agent 1 follows 1 earlier parts, got 0"):
        domain.sequential_prompt(1, trip_task(), [])
    with pytest.raises(ValueError, match="expected 2 drafts"):
        domain.discussion_prompts(trip_task(), ["one"])
    turn = Turn(("a", "b"), travel_reward(["a", "b"], trip_task()))
    with pytest.raises(ValueError, match="Travel has one turn"):
        domain.prompts(trip_task(), (turn,))


# A long catalogue ----------------------------------------------------------------------------------------------------


def crowded():
    """A trip whose needed rows stand last among many dear ones."""
    rows = dict(ROWS)
    rows["Restaurants in Brim"] = [restaurant(f"Dear {n}", 200 + n, "Cafe") for n in range(60)] + ROWS[
        "Restaurants in Brim"
    ]
    rows["Accommodations in Brim"] = [lodging(f"Palace {n}", 900, "Private room", "", 9, 2) for n in range(60)] + ROWS[
        "Accommodations in Brim"
    ]
    return read(rows=rows, constraint={"cuisine": ["Italian"]})


@pytest.mark.parametrize("tokens", [1, 50, 150, 400, 1200])
def test_a_catalogue_keeps_to_its_tokens_and_never_drops_the_cheapest_feasible_plan(tokens):
    trip = crowded()
    solution = cheapest_plan(trip)
    full = {team: catalogue_text(trip, team) for team in (LOGISTICS, ACTIVITIES, DINING, SIGHTSEEING)}
    for team in full:
        shown = catalogue_text(trip, team, tokens)
        needed = [value for (_, name), value in plan_values(solution, trip).items() if name != "current_city"]
        assert all(value in shown for value in needed if value in full[team])
        least = estimate_tokens(catalogue_text(trip, team, 1))
        assert estimate_tokens(shown) <= max(tokens, least)
        lines = [line for line in shown.splitlines() if "left out" not in line]
        assert [line for line in full[team].splitlines() if line in lines] == lines  # in order, nothing new


def test_what_is_left_out_is_counted_and_the_dearest_rows_go_first():
    shown = catalogue_text(crowded(), LOGISTICS, 260)
    assert "Fir Loft" in shown and "more are left out)" in shown
    assert catalogue_text(crowded(), LOGISTICS, 100_000) == catalogue_text(crowded(), LOGISTICS)


def test_the_tokens_are_counted_with_the_given_counter():
    by_words = catalogue_text(crowded(), ACTIVITIES, 80, lambda line: len(line.split()))
    assert len(by_words.split()) <= 80


# Scoring -------------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_oracle(domain):
    metrics = domain.metrics(pair(), trip_task())
    assert metrics == dict.fromkeys(("pass", "success", "V", "J", "B", "g", "Q", "C", "P", "E", "U"), 1) | {"cost": 290}
    assert all(isinstance(number, float) for number in metrics.values())
    assert domain.headline in metrics
    empty = domain.metrics([None, ""], trip_task())
    assert (empty["pass"], empty["J"], empty["cost"]) == (0, 0, 0)
    assert empty["Q"] == pytest.approx(0.011806, abs=1e-6)


def test_wrong_responses_are_refused_by_the_domain_too(domain):
    with pytest.raises(ValueError, match="expected 2 responses"):
        domain.reward(["one"], trip_task())
    with pytest.raises(TypeError):
        domain.reward([1, 2], trip_task())


# Real rows -----------------------------------------------------------------------------------------------------------

needs_data = pytest.mark.skipif(
    not os.path.isfile(os.path.join(os.environ.get("MAPL_DATA_DIR", ""), "travelplanner_train_plans.jsonl")),
    reason="MAPL_DATA_DIR names no folder with travelplanner_train_plans.jsonl",
)


def real_lines(name):
    with open(os.path.join(os.environ["MAPL_DATA_DIR"], name), encoding="utf-8") as file:
        return file.read().splitlines()


def real_plans():
    """Id and slots of every human plan of at most five days."""
    found = {}
    for index, line in enumerate(real_lines("travelplanner_train_plans.jsonl")):
        plan = human_plan(json.loads(line)["messages"][2]["content"])
        if max(day for day, _ in plan) <= 5:
            found[f"travelplanner/train/{index}"] = plan
    return found


@needs_data
def test_text_and_object_form_of_all_real_rows_give_the_same_catalogue():
    plans, objects = (real_lines(f"travelplanner_train_{kind}.jsonl") for kind in ("plans", "ref"))
    assert len(plans) == len(objects) >= 30
    for number, (line, row) in enumerate(zip(plans, objects, strict=True)):
        from_text = parse_reference(read_local_row(line, f"line {number}")["reference"])
        assert from_text == parse_reference(json.loads(row)), number
        listed = sum(len(content) for content in json.loads(row).values() if isinstance(content, list))
        parsed = (from_text.restaurants, from_text.attractions, from_text.lodgings, from_text.flights)
        assert sum(map(len, parsed)) == listed, number


@needs_data
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_real_tables_printed_in_other_ways_give_the_same_catalogue(numbered, wide):
    import pandas

    for row in real_lines("travelplanner_train_ref.jsonl")[::5]:
        rows = json.loads(row)
        with pandas.option_context("display.unicode.east_asian_width", wide):
            tables = {
                title: pandas.DataFrame(content).to_string(index=numbered) if isinstance(content, list) else content
                for title, content in rows.items()
            }
        assert parse_reference(tables) == parse_reference(rows)


@needs_data
@pytest.mark.parametrize("num_agents", [2, 3])
def test_every_human_plan_scores_exactly_1_with_pass_and_success(num_agents):
    domain = get_domain("travel", num_agents=num_agents)
    tasks = {task.id: task for split in ("train", "eval") for task in domain.load_tasks(split, "small")}
    plans = real_plans()
    assert tasks.keys() == plans.keys() and len(tasks) >= 20
    for name, task in tasks.items():
        days = task.fields["days"]
        responses = [
            text(agent, items(plans[name], agent, days, owned)) for agent, owned in enumerate(TEAMS[num_agents])
        ]
        metrics = domain.metrics(responses, task)
        assert domain.reward(responses, task).total == 1.0, name
        assert (metrics["pass"], metrics["success"], metrics["U"]) == (1, 1, 1), name
    assert domain.refused == {("small", "train"): [], ("small", "eval"): []}


CHECK_VALUES = {
    **{row: (1, 100 * budget, None) for row, budget in enumerate((17, 9, 14, 19, 16, 31, 36, 23, 14, 34))},
    15: (2, 2300, ["American", "French"]), 16: (2, 4700, "parties"), 17: (8, 6500, "children under 10"),
    18: (2, 2000, "private room"), 19: (2, 1100, ["American", "Chinese"]), 20: (6, 15100, "entire room"),
    21: (4, 12300, "smoking"), 22: (7, 13900, ["Indian", "French"]), 23: (2, 4700, ["Mexican", "Chinese"]),
    24: (4, 13800, "private room"),
}  # fmt: skip


@needs_data
def test_people_budget_and_constraints_of_real_rows_are_those_of_the_specification(domain):
    tasks = [task for split in ("train", "eval") for task in domain.load_tasks(split, "small")]
    read_values = {}
    for task in tasks:
        asked = [value for value in task.fields["local_constraint"].values() if value]
        assert len(asked) <= 1
        read_values[int(task.id.rpartition("/")[2])] = (
            task.fields["people_number"], task.fields["budget"], asked[0] if asked else None
        )  # fmt: skip
        for said in task.fields["read_from"].values():
            assert all(word in task.fields["query"] for word in said.split(", "))
    assert read_values == CHECK_VALUES
    assert sorted(int(task.id.rpartition("/")[2]) for task in tasks if task.split == "eval") == [4, 9, 19, 24]


@needs_data
def test_real_trips_are_feasible_and_their_cheapest_plan_succeeds(domain):
    for task in (task for split in ("train", "eval") for task in domain.load_tasks(split, "small")):
        trip = domain.trip(task)
        solution = cheapest_plan(trip)
        assert solution is not None and solution.cost <= trip.budget, task.id
        blank = {(day, name): "-" for day in range(1, trip.days + 1) for team in TEAMS[2] for name in team}
        assert evaluate_plan(blank | plan_values(solution, trip), trip).succeeds, task.id
        assert split_budget(trip).feasible
        cheaper = replace(trip, budget=solution.cost - 1)
        assert not evaluate_plan(blank | plan_values(solution, trip), cheaper).succeeds
        for prompt in get_domain("travel", catalogue_tokens=600).prompts(task):
            assert estimate_tokens(prompt) < 2600
