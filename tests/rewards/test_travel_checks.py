"""The checks of an itinerary, one change at a time: what each one sees and what it leaves alone."""

from __future__ import annotations

import pytest
from travel_trips import BEST, FIVE, ROWS, TOUR, TWO_CITIES, attraction, complete, flight, lodging, task

from mapl_core.rewards.travel_checks import COMMONSENSE, evaluate_plan
from mapl_core.rewards.travel_trip import TaskFault, read_trip


def evaluate(changes=None, trip=None, plan=BEST):
    trip = read_trip((trip or task()).fields)
    return evaluate_plan(
        {slot: value for slot, value in {**plan, **(changes or {})}.items() if value is not None}, trip
    )


FULL = complete(BEST)


def failed(changes=None, trip=None, plan=FULL):
    """Names of the checks that do not pass."""
    found = evaluate(changes, trip, plan)
    return {name for name, check in {**found.commonsense, **found.hard}.items() if not check.passed}


def value(name, changes=None, trip=None, plan=FULL):
    found = evaluate(changes, trip, plan)
    return {**found.commonsense, **found.hard}[name].value


def test_the_best_plan_passes_every_check():
    found = evaluate(plan=FULL)
    assert tuple(found.commonsense) == COMMONSENSE and tuple(found.hard) == ("budget",)
    assert failed() == set()
    assert (found.cost, found.grounding, found.coverage, found.f1) == (290, 1, 1, 1)
    assert all(found.valid.values()) and len(found.valid) == 21


# name, changes, constraint and other fields, checks that fail
ONE_CHANGE = [
    ("wrong city", {(2, "current_city"): "Alba"}, {}, {"reasonable_route", "budget"}),
    ("unknown city", {(2, "current_city"): "Nowhere"}, {}, {"reasonable_route", "within_reference", "budget"}),
    ("over budget", {(2, "dinner"): "Cob Grill, Brim"}, {"budget": 289}, {"budget"}),
    ("restaurant twice", {(2, "lunch"): "Ash Cafe, Brim"}, {}, {"restaurant_diversity"}),
    ("attraction twice", {(1, "attraction"): "Hill Museum, Brim"}, {}, {"attraction_diversity"}),
    ("attraction twice a day", {(2, "attraction"): "Hill Museum, Brim;Hill Museum, Brim"}, {},
     {"attraction_diversity"}),
    ("missing night", {(2, "accommodation"): "-"}, {}, {"complete_information", "budget"}),
    ("missing meal", {(2, "lunch"): "-"}, {}, {"complete_information", "budget"}),
    ("no transport", {(1, "transportation"): "-"}, {}, {"transport_consistency", "complete_information", "budget"}),
    ("unknown restaurant", {(2, "lunch"): "Nowhere Grill, Brim"}, {},
     {"within_reference", "within_current_city", "budget"}),
    ("unknown optional restaurant", {(1, "dinner"): "Nowhere Grill, Brim"}, {},
     {"within_reference", "within_current_city", "budget"}),
    ("unknown attraction", {(2, "attraction"): "Hill Museum, Brim; Nowhere Park, Brim"}, {},
     {"within_reference", "within_current_city", "budget"}),
    ("minimum nights", {(1, "accommodation"): "Gum Bunk, Brim", (2, "accommodation"): "Gum Bunk, Brim"}, {},
     {"minimum_nights"}),
    ("interrupted stay", {(1, "accommodation"): "Fir Loft, Brim"}, {"budget": 900}, {"minimum_nights"}),
    ("car left behind", {(3, "transportation"): "Self-driving, from Brim to Alba"}, {}, {"transport_consistency"}),
    ("taxi where there is none", {(3, "transportation"): "Taxi, from Brim to Alba"}, {},
     {"transport_consistency", "within_current_city", "within_reference", "budget"}),
    ("transport on a day of stay", {(2, "transportation"): "Flight Number: F1001, from Alba to Brim"},
     {"budget": 900}, {"transport_consistency", "within_current_city"}),
    ("flight of another way", {(1, "transportation"): "Flight Number: F1002, from Brim to Alba"}, {},
     {"transport_consistency", "within_current_city", "budget"}),
    ("night on the way home", {(3, "accommodation"): "Elm House, Brim"}, {"budget": 900}, {"within_current_city"}),
    ("cuisine", {}, {"constraint": {"cuisine": ["Italian", "Indian"]}}, {"cuisine"}),
    ("house rule", {}, {"constraint": {"house rule": "smoking"}}, {"house rule"}),
    ("room type", {}, {"constraint": {"room type": "entire room"}}, {"room type"}),
    ("banned mode", {}, {"constraint": {"transportation": "no flight"}}, {"transportation"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fields", "checks"), [row[1:] for row in ONE_CHANGE], ids=[r[0] for r in ONE_CHANGE]
)
def test_a_single_corruption_fails_exactly_its_checks(changes, fields, checks):
    assert failed(changes, task(**fields)) == checks


@pytest.mark.parametrize(
    "changes",
    [
        {(1, "dinner"): "Dill 24/7, East, Brim"},
        {(3, "breakfast"): "Dill 24/7, East, Brim", (1, "attraction"): "Iris Park, Brim"},
        {(2, "attraction"): "Hill Museum, Brim; Iris Park, Brim;"},
        {(2, "attraction"): "hill MUSEUM , Brim(Ohio);Iris Park, Brim (Ohio)"},
        {(1, "transportation"): "flight number:F1001 , from Alba(Utah) to Brim (Ohio), Departure Time: 08:00, or so"},
        {(1, "current_city"): "from  ALBA (Utah) to Brim"},
        {(1, "breakfast"): "\u2014", (3, "accommodation"): "\u2013"},
        {(2, "lunch"): "Bay\u00a0Diner, Brim"},
        {(1, "accommodation"): "Fir Loft, Brim", (2, "accommodation"): "Fir Loft, Brim"},
        {(1, "transportation"): "Self-driving, from Alba to Brim", (3, "transportation"):
         "Self-driving, from Brim to Alba, duration: 3 hours, cost: 999"},
        {(1, "transportation"): "Self\u2010driving, from Alba to Brim",
         (3, "transportation"): "Self\u2011driving, from Brim to Alba"},
        {(1, "transportation"): "Taxi, from Alba to Brim"},
    ],
    ids=["optional meal", "more in the city", "two attractions", "states", "flight details", "route in capitals",
         "long dashes", "no-break space", "two nights", "own car both ways", "typographic hyphens", "taxi and flight"],
)  # fmt: skip
def test_what_means_the_same_or_is_allowed_passes_every_check(changes):
    assert failed(changes, task(budget=900)) == set()


def test_missing_slots_read_blank_but_lower_the_coverage():
    found = evaluate()
    assert found.coverage == pytest.approx(11 / 21)
    assert found.grounding == 1 and found.valid[1, "lunch"] and found.valid[2, "transportation"]
    assert found.commonsense["complete_information"].value == pytest.approx((11 / 21 + 1) / 2)


# Validity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "value", "valid"),
    [
        ((1, "current_city"), "from Alba to Brim", True),
        ((1, "current_city"), "from Brim to Alba", False),
        ((1, "current_city"), "Brim", False),
        ((1, "current_city"), "Alba to Brim", False),
        ((1, "current_city"), "-", False),
        ((2, "current_city"), "Brim (Ohio)", True),
        ((2, "current_city"), "from Brim to Brim", False),
        ((2, "transportation"), "-", True),
        ((2, "transportation"), "Self-driving, from Alba to Brim", False),
        ((1, "transportation"), "Flight Number: F1001", False),
        ((1, "transportation"), "F1001, from Alba to Brim", False),
        ((1, "transportation"), "Flight Number: F1002, from Alba to Brim", False),
        ((1, "transportation"), "Bus, from Alba to Brim", False),
        ((1, "transportation"), "Flight Number: F1001; from Alba to Brim", False),
        ((1, "lunch"), "-", True),
        ((2, "lunch"), "-", False),
        ((2, "lunch"), "Bay Diner", False),
        ((2, "lunch"), "Bay Diner Brim", False),
        ((2, "lunch"), ", Brim", False),
        ((2, "lunch"), "Bay Diner, Alba", False),
        ((2, "lunch"), "Hill Museum, Brim", False),
        ((2, "lunch"), "Bay Diner, Brim; Ash Cafe, Brim", False),
        ((2, "attraction"), "Bay Diner, Brim", False),
        ((2, "attraction"), "Hill Museum, Brim; Nowhere, Brim", False),
        ((2, "attraction"), ";", False),
        ((2, "attraction"), "; ;Hill Museum, Brim;", True),
        ((1, "accommodation"), "-", False),
        ((3, "accommodation"), "-", True),
        ((3, "accommodation"), "Elm House, Brim", False),
        ((3, "lunch"), "Bay Diner, Brim", True),
    ],
)
def test_a_slot_is_valid_only_with_what_its_day_allows(slot, value, valid):
    assert evaluate({slot: value}).valid[slot] is valid


def test_a_name_with_a_semicolon_is_tried_whole_before_it_is_split():
    rows = {**ROWS, "Attractions in Brim": [attraction("Sea; Sand"), attraction("Hill Museum")]}
    assert evaluate({(2, "attraction"): "Sea; Sand, Brim"}, task(rows)).valid[2, "attraction"]


def tour(changes=None, **fields):
    return evaluate(changes, task(TWO_CITIES, **(FIVE | fields)), TOUR)


def test_the_days_and_requirements_of_a_tour_follow_from_the_dated_descriptions():
    trip = read_trip(task(TWO_CITIES, **FIVE).fields)
    assert [row.current_city for row in trip.scaffold] == [
        "from Alba to Brim", "Brim", "from Brim to Cove", "Cove", "from Cove to Alba"
    ]  # fmt: skip
    assert [(stay.city, stay.first_day, stay.nights) for stay in trip.stays] == [("Brim", 1, 2), ("Cove", 3, 2)]
    assert len(trip.required) == 5 + 3 + 2 * 4 + 4


def test_a_tour_passes_with_equal_names_in_two_cities_and_the_price_of_the_days_own_flight():
    found = tour()
    assert found.succeeds
    # 70 + 30 + 80, nights 100 + 120, meals 30 + 60: the first "Ash, Brim" costs 10, not 99
    assert found.cost == 70 + 30 + 80 + 100 + 120 + 30 + 60


def test_a_flight_that_only_flies_on_another_day_is_known_but_not_valid():
    rows = {**TWO_CITIES, "Flight from Alba to Brim on 2022-03-01": [flight("F7", "Alba", "Brim", "2022-03-02", 11)]}
    found = evaluate(None, task(rows, **FIVE), TOUR)
    assert not found.valid[1, "transportation"]
    assert found.commonsense["within_reference"].passed and not found.commonsense["within_current_city"].passed
    assert found.cost == 11 + 30 + 80 + 100 + 120 + 30 + 60


def test_on_a_day_of_travel_both_cities_are_right_but_the_night_is_in_the_second():
    found = tour({(3, "lunch"): "Ash, Cove", (3, "breakfast"): "Cob, Brim", (3, "accommodation"): "Elm, Brim"})
    assert found.valid[3, "lunch"] and found.valid[3, "breakfast"] and not found.valid[3, "accommodation"]


def test_a_stay_in_the_same_lodging_that_is_interrupted_is_two_stays():
    rows = {**ROWS, "Accommodations in Brim": [lodging("Elm House", 50, "Private room", "", 1, 2),
                                               lodging("Fir Loft", 80, "Private room", "", 2, 2)]}  # fmt: skip
    dates = [f"2022-03-0{day}" for day in range(1, 6)]
    rows["Flight from Brim to Alba on 2022-03-05"] = rows.pop("Flight from Brim to Alba on 2022-03-03")
    nights = {1: "Fir Loft, Brim", 2: "Fir Loft, Brim", 3: "Elm House, Brim", 4: "Fir Loft, Brim"}
    plan = {(day, "accommodation"): place for day, place in nights.items()}
    found = evaluate(plan=plan, trip=task(rows, days=5, dates=dates))
    assert found.commonsense["minimum_nights"].value == pytest.approx(2 / 3)


# The route -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cities", "nine"),
    [
        # readable, continuous, starts, ends, number, known, no city twice, dest, as planned
        ({}, (1, 1, 1, 1, 1, 1, 1, 1, 1)),
        ({1: "-", 2: "-", 3: "-"}, (0, 0, 0, 0, 0, 0, 1, 0, 0)),
        ({3: "Brim"}, (1, 1, 1, 0, 1, 1, 1, 1, 2 / 3)),
        ({1: "Alba"}, (1, 1 / 3, 1, 0, 0, 1, 1, 0, 2 / 3)),
        ({1: "from Brim to Alba"}, (1, 0, 0, 0, 0, 1, 1, 0, 2 / 3)),
        ({2: "-"}, (2 / 3, 2 / 3, 1, 0, 1, 1, 1, 1, 2 / 3)),
        ({2: "from Brim to Cove"}, (1, 2 / 3, 1, 0, 0, 5 / 6, 1, 1, 2 / 3)),
        ({2: "from Brim to Alba"}, (1, 2 / 3, 1, 0, 1, 1, 1, 1, 2 / 3)),
        ({2: "Cove"}, (1, 2 / 3, 1, 0, 1, 4 / 5, 1, 1, 2 / 3)),
    ],
)
def test_the_route_is_the_mean_of_nine(cities, nine):
    changes = {(day, "current_city"): city for day, city in cities.items()}
    assert value("reasonable_route", changes) == pytest.approx(sum(nine) / 9)


def test_a_city_visited_twice_between_start_and_end_breaks_the_route():
    back = {(3, "current_city"): "from Brim to Cove", (4, "current_city"): "from Cove to Brim",
            (5, "current_city"): "from Brim to Alba"}  # fmt: skip
    assert tour(back).commonsense["reasonable_route"].value == pytest.approx((7 + 3 / 5) / 9)


def test_a_destination_that_is_a_state_need_not_be_reached_but_a_known_city_must():
    assert tour(dest="Ohio").commonsense["reasonable_route"].passed
    assert tour(dest="").commonsense["reasonable_route"].passed
    elsewhere = {**TWO_CITIES, "Attractions in Dell": [attraction("Fountain", "Dell")]}
    found = evaluate(None, task(elsewhere, **(FIVE | {"dest": "Dell"})), TOUR)
    assert found.commonsense["reasonable_route"].value == pytest.approx(8 / 9)


def test_the_scaffold_takes_the_way_that_leaves_the_city_reached_else_the_first_by_name():
    rows = {
        **ROWS,
        "Flight from Brim to Cove on 2022-03-01": "no flight",
        "Flight from Alba to Dell on 2022-03-01": "no flight",
        "Flight from Elmo to Alba on 2022-03-03": "no flight",
    }
    trip = read_trip(task(rows).fields)
    assert [row.current_city for row in trip.scaffold] == ["from Alba to Brim", "Brim", "from Brim to Alba"]
    del rows["Flight from Brim to Alba on 2022-03-03"]
    assert read_trip(task(rows).fields).scaffold[2].current_city == "from Elmo to Alba"


# Costs and hard constraints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("people", "cost"), [(1, 290), (2, 480), (3, 770), (4, 960), (5, 1250)])
def test_flights_and_meals_are_paid_by_person_and_rooms_by_their_occupancy(people, cost):
    assert evaluate(trip=task(people_number=people)).cost == cost  # 190 a person, 100 for every two


@pytest.mark.parametrize(
    ("people", "taxis", "cars"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (6, 2, 2), (8, 2, 2), (9, 3, 2)]
)
def test_a_taxi_takes_four_and_an_own_car_five(people, taxis, cars):
    out = {(1, "transportation"): "Taxi, from Alba to Brim"}
    assert evaluate(out, task(people_number=people), {}).cost == 90 * taxis
    car = {(1, "transportation"): "Self-driving, from Alba to Brim"}
    assert evaluate(car, task(people_number=people), {}).cost == 40 * cars


def test_optional_meals_and_a_last_night_are_paid_and_attractions_are_free():
    extra = {(1, "dinner"): "Dill 24/7, East, Brim", (3, "accommodation"): "Elm House, Brim",
             (1, "attraction"): "Iris Park, Brim"}  # fmt: skip
    assert evaluate(extra).cost == 290 + 12 + 50


@pytest.mark.parametrize(("budget", "soft", "passes"), [(290, 1, True), (289, 1 - 1 / 289, False), (145, 0, False)])
def test_the_budget_is_inclusive_and_falls_to_nothing_at_twice_the_budget(budget, soft, passes):
    found = evaluate(plan=FULL, trip=task(budget=budget)).hard["budget"]
    assert found.value == pytest.approx(soft) and found.passed is passes


def test_a_plan_within_the_budget_does_not_keep_it_while_slots_are_missing():
    found = evaluate({(2, "lunch"): "-"}, plan=FULL).hard["budget"]
    assert found.value == pytest.approx(10 / 11 * 6 / 7) and not found.passed


@pytest.mark.parametrize(
    ("wanted", "values"),
    [
        ("entire room", {"Elm House": 0, "Fir Loft": 1, "Gum Bunk": 0}),
        ("private room", {"Elm House": 1, "Fir Loft": 0, "Gum Bunk": 0}),
        ("shared room", {"Elm House": 0, "Fir Loft": 0, "Gum Bunk": 1}),
        ("not shared room", {"Elm House": 1, "Fir Loft": 1, "Gum Bunk": 0}),
    ],
)
def test_room_types(wanted, values):
    for name, expected in values.items():
        changes = {(day, "accommodation"): f"{name}, Brim" for day in (1, 2)}
        assert value("room type", changes, task(constraint={"room type": wanted})) == expected
    mixed = {(1, "accommodation"): "Elm House, Brim", (2, "accommodation"): "Gum Bunk, Brim"}
    assert value("room type", mixed, task(constraint={"room type": wanted})) == pytest.approx(
        (values["Elm House"] + values["Gum Bunk"]) / 2
    )


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("smoking", {"Elm House": 0, "Fir Loft": 1, "Gum Bunk": 1}),
        ("parties", {"Elm House": 1, "Fir Loft": 0, "Gum Bunk": 1}),
        ("pets", {"Elm House": 1, "Fir Loft": 1, "Gum Bunk": 0}),
        ("visitors", {"Elm House": 1, "Fir Loft": 1, "Gum Bunk": 0}),
        ("children under 10", {"Elm House": 1, "Fir Loft": 1, "Gum Bunk": 1}),
    ],
)
def test_house_rules(rule, values):
    for name, expected in values.items():
        changes = {(day, "accommodation"): f"{name}, Brim" for day in (1, 2)}
        assert value("house rule", changes, task(constraint={"house rule": rule})) == expected


@pytest.mark.parametrize("name", ["room type", "house rule"])
def test_without_a_lodging_its_constraints_are_not_met(name):
    wanted = {"room type": "not shared room", "house rule": "pets"}[name]
    nights = {(1, "accommodation"): "-", (2, "accommodation"): "Nowhere, Brim"}
    assert value(name, nights, task(constraint={name: wanted})) == 0


@pytest.mark.parametrize(
    ("cuisines", "share"),
    [(["Italian"], 1), (["italian", "MEXICAN"], 1), (["Indian"], 0), (["Indian", "Cafe"], 1 / 2), ("Mexican", 1)],
)
def test_cuisines_are_shares_of_what_was_asked_for(cuisines, share):
    assert value("cuisine", None, task(constraint={"cuisine": cuisines})) == pytest.approx(share)


@pytest.mark.parametrize(
    ("banned", "out", "soft"),
    [
        ("no flight", "Flight Number: F1001, from Alba to Brim", 0),
        ("no flight", "Self-driving, from Alba to Brim", 1),
        ("no self-driving", "Self-driving, from Alba to Brim", 0),
        ("no taxi", "Taxi, from Alba to Brim", 0),
        ("no taxi", "-", 1),
    ],
)
def test_a_banned_mode_must_not_be_selected(banned, out, soft):
    changes = {(1, "transportation"): out, (3, "transportation"): "-"}
    assert value("transportation", changes, task(constraint={"transportation": banned})) == soft


@pytest.mark.parametrize("empty", [None, "", "-", []])
def test_constraints_that_are_not_given_are_not_checked(empty):
    constraint = dict.fromkeys(("house rule", "cuisine", "room type", "transportation"), empty)
    if empty == "-":
        constraint["cuisine"] = None
    assert tuple(evaluate(trip=task(constraint=constraint)).hard) == ("budget",)


# Faulty tasks --------------------------------------------------------------------------------------------------------


def without(prefix):
    return {title: content for title, content in ROWS.items() if not title.startswith(prefix)}


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (ROWS, {"budget": None}, "the budget is None"),
        (ROWS, {"budget": 0}, "the budget is 0"),
        (ROWS, {"budget": -5}, "the budget is -5"),
        (ROWS, {"budget": "much"}, "the budget is 'much'"),
        (ROWS, {"budget": float("nan")}, "the budget is nan"),
        (ROWS, {"constraint": {"transportation": "no bus"}}, "unknown rule for transport 'no bus'; known: no flight"),
        (ROWS, {"dates": ["2022-03-01", "2022-03-02"]}, "2 dates for 3 days"),
        (ROWS, {"dates": []}, "0 dates for 3 days"),
        (ROWS, {"records": None}, "the reference data are missing"),
        (ROWS, {"records": []}, "the reference data are missing"),
        (without("Restaurants"), {}, "list no restaurants"),
        (without("Attractions"), {}, "list no attractions"),
        (without("Accommodations"), {}, "list no lodgings"),
        ({**without(("Flight", "Self", "Taxi")), "Flight from Alba to Brim on 2022-03-01": "no"}, {},
         "list no transport"),
        (without("Flight"), {}, "no dated flight description"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_scored_is_refused_with_the_reason(rows, fields, message):
    with pytest.raises(TaskFault, match=message):
        read_trip(task(rows, **fields).fields)


def test_a_budget_may_be_written_as_text():
    assert read_trip(task(budget="$1,290.50").fields).budget == 1290.5
