"""Reading a request: budget, people, constraints, each with its words; rows with and without structured columns."""

from __future__ import annotations

import pytest
from travel_trips import DATES, ROWS, TWO_CITIES, records

from mapl_core.domains.travel_queries import read_query, task_fields
from mapl_core.rewards.travel_trip import CONSTRAINTS

HEAD = "Plan a 3-day trip from Alba to Brim, from March 1st to March 3rd, 2022"


@pytest.mark.parametrize(
    ("words", "people"),
    [
        ("for one person", 1),
        ("for a single person", 1),
        ("for a solo traveller", 1),
        ("a single-person trip", 1),
        ("I will be travelling alone", 1),
        ("nothing about the party", 1),
        ("for 2 people", 2),
        ("for two", 2),
        ("for two, please", 2),
        ("for two departing at noon", 2),
        ("for my wife and me", 2),
        ("My friend and I want to go", 2),
        ("for a couple", 2),
        ("for both of us", 2),
        ("for the two of us", 2),
        ("for a family of four", 4),
        ("for a group of 8", 8),
        ("for a group of six people", 6),
        ("a party of five", 5),
        ("for 7 individuals", 7),
        ("for three adult travelers", 3),
        ("We are a group of 5 looking for a trip", 5),
        ("for 3 friends", 3),
        ("for 12 persons", 12),
        ("as a 3-day individual trip", 1),
    ],
)
def test_the_party_is_read_from_its_words(words, people):
    reading = read_query(f"{HEAD}, {words}, with a budget of $900.")
    assert reading.people == people
    assert ("people_number" in reading.words) == (words != "nothing about the party")
    assert reading.words.get("people_number", words).strip() in f"{HEAD}, {words}, with"


@pytest.mark.parametrize(
    "words", ["for 3 days", "for one week", "for a 5-day trip", "for two cities", "for three nights"]
)
def test_days_and_cities_are_no_people(words):
    assert read_query(f"Plan a trip {words} to Brim with $900.").people == 1


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        ("a budget of $1,700", 1700),
        ("budget: $900.", 900),
        ("Our budget is now $19,400, and", 19400),
        ("spend up to $12,700.50 on it", 12700.5),
        ("a budget of 1,200 dollars", 1200),
        ("1500 USD in all", 1500),
        ("at most $ 800", 800),
        ("about $2k", 2000),
        ("a $20 ticket is fine, but our total budget is $3,000", 3000),
        ("a budget of $3,000, of which a $20 ticket is paid", 3000),
        ("no amount", None),
    ],
)
def test_the_budget_is_the_dollar_amount_next_to_the_words_for_it(words, budget):
    reading = read_query(f"{HEAD}: {words}")
    assert reading.budget == budget
    if budget:
        assert reading.words["budget"] in words


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("we require accommodations where parties are allowed", "house rule", "parties"),
        ("a place where we can host a party", "house rule", "parties"),
        ("accommodations where smoking is permissible", "house rule", "smoking"),
        ("it must be fine to smoke", "house rule", "smoking"),
        ("pet-friendly lodging", "house rule", "pets"),
        ("we bring our dog", "house rule", "pets"),
        ("a stay that allows visitors", "house rule", "visitors"),
        ("must be suitable for children under 10", "house rule", "children under 10"),
        ("accommodate children under the age of 10", "house rule", "children under 10"),
        ("lodging that welcomes kids younger than ten", "house rule", "children under 10"),
        ("a child-friendly house", "house rule", "children under 10"),
        ("rent entire rooms", "room type", "entire room"),
        ("an entire apartment", "room type", "entire room"),
        ("the whole house to ourselves", "room type", "entire room"),
        ("private rooms for our stay", "room type", "private room"),
        ("a room that is private", "room type", "private room"),
        ("shared rooms are what we like", "room type", "shared room"),
        ("a shared accommodation", "room type", "shared room"),
        ("rooms that are not shared", "room type", "not shared room"),
        ("we prefer not to have shared rooms", "room type", "not shared room"),
        ("we don\u2019t want to share a room", "room type", "not shared room"),
        ("accommodations other than shared rooms", "room type", "not shared room"),
        ("we prefer to avoid flights", "transportation", "no flight"),
        ("we would rather not fly", "transportation", "no flight"),
        ("no air travel, please", "transportation", "no flight"),
        ("without taking any flights", "transportation", "no flight"),
        ("flights are out of the question", "transportation", "no flight"),
        ("we do not want to drive ourselves", "transportation", "no self-driving"),
        ("no self-driving", "transportation", "no self-driving"),
        ("we can't do any self-driving", "transportation", "no self-driving"),
        ("self driving is not possible", "transportation", "no self-driving"),
        ("we would like to avoid taxis", "transportation", "no taxi"),
        ("both American and French cuisine", "cuisine", ["American", "French"]),
        ("we like mediterranean food", "cuisine", ["Mediterranean"]),
        ("Indian, Italian and Mexican dishes, and more Indian", "cuisine", ["Indian", "Italian", "Mexican"]),
    ],
)
def test_a_constraint_is_read_from_its_words_and_no_other_one_with_it(words, name, value):
    query = f"{HEAD}, for two people with a budget of $900; {words}."
    reading = read_query(query, ["Alba", "Brim"])
    assert reading.constraint == {**dict.fromkeys(CONSTRAINTS), name: value}
    for said in reading.words[name].split(", "):
        assert said in query.replace("\u2019", "'")


@pytest.mark.parametrize(
    "words",
    [
        "I have no specific preferences about house rules, cuisine, accommodations, or transportation",
        "my entire travel budget is for the party of two",
        "we like to fly",
        "a self-driving trip, no restrictions on flights",
        "we do not mind the weather, and would like to drive",
        "we love to see American cities",
        "for 3 visitors who need a non-smoking room",
        "a private car takes us to the airport",
        "I would like to share my plans with friends",
    ],
)
def test_words_that_ask_for_nothing_set_no_constraint(words):
    assert read_query(f"{HEAD}, with $900: {words}.").constraint == dict.fromkeys(CONSTRAINTS)


def test_names_of_the_trips_cities_are_no_words_of_the_request():
    query = "From Mexican Hat to French Lick, with $900."
    assert read_query(query).constraint["cuisine"] == ["Mexican", "French"]
    assert read_query(query, ["Mexican Hat", "French Lick"]).constraint["cuisine"] is None


def test_several_constraints_are_read_together():
    reading = read_query(
        "A trip for 5 people, $8,000. We want entire homes that allow pets, Chinese food, and no flights, please."
    )
    assert reading.constraint == {
        "house rule": "pets", "room type": "entire room", "cuisine": ["Chinese"], "transportation": "no flight"
    }  # fmt: skip
    assert set(reading.words) == {*CONSTRAINTS, "budget", "people_number"}


# Fields --------------------------------------------------------------------------------------------------------------

QUERY = "Three days in Brim for two with private rooms and a budget of $700."


def test_a_row_without_columns_gets_route_and_dates_from_the_dated_flight_descriptions():
    fields = task_fields(QUERY, records())
    assert (fields["org"], fields["dest"], fields["days"], fields["visiting_city_number"]) == ("Alba", "Brim", 3, 1)
    assert fields["dates"] == DATES
    assert (fields["people_number"], fields["budget"]) == (2, 700)
    assert fields["local_constraint"]["room type"] == "private room"
    assert fields["read_from"] == {"budget": "$700", "people_number": "for two", "room type": "private"}
    assert fields["records"] == records()


def test_a_tour_of_several_cities_has_no_single_destination():
    fields = task_fields("Two cities in Ohio, $900", TWO_CITIES)
    assert (fields["dest"], fields["visiting_city_number"], fields["days"]) == ("", 2, 5)
    assert fields["dates"][0] == "2022-03-01" and fields["dates"][-1] == "2022-03-05"


def test_the_reference_text_is_the_literal_as_it_came():
    literal = repr(records())
    assert task_fields(QUERY, literal)["reference_text"] == literal
    assert task_fields(QUERY, records())["reference_text"] == literal


STRUCTURED = {
    "org": "Alba", "dest": "Ohio", "days": 3, "visiting_city_number": 1, "date": str(DATES), "people_number": 4,
    "local_constraint": "{'house rule': 'pets', 'cuisine': ['Indian'], 'room type': None, 'transportation': None}",
    "budget": 1500,
}  # fmt: skip


def test_columns_of_a_row_go_before_its_words_and_literals_are_read():
    fields = task_fields(QUERY, repr(records()), STRUCTURED)
    assert (fields["budget"], fields["people_number"], fields["dest"]) == (1500, 4, "Ohio")
    assert fields["local_constraint"] == {
        "house rule": "pets", "cuisine": ["Indian"], "room type": None, "transportation": None
    }  # fmt: skip
    assert fields["dates"] == DATES
    assert fields["read_from"] == {}


def test_single_columns_that_are_missing_are_read_from_the_words():
    fields = task_fields(QUERY, records(), STRUCTURED | {"budget": None, "local_constraint": None})
    assert fields["budget"] == 700 and fields["people_number"] == 4
    assert fields["read_from"] == {"budget": "$700", "room type": "private"}


def test_a_reference_without_a_dated_flight_description_is_refused():
    with pytest.raises(ValueError, match="no dated flight description"):
        task_fields(QUERY, {title: content for title, content in ROWS.items() if not title.startswith("Flight")})
