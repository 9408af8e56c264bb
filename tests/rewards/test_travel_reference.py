"""Reference data of Travel: both forms, printed tables with hard names, empty tables, sentences, refusals."""

from __future__ import annotations

import json

import pandas
import pytest
from travel_trips import ROWS, attraction, flight, lodging, records, restaurant

from mapl_core.rewards.travel_catalogue import Flight, Lodging, Restaurant, Ride, first_rows
from mapl_core.rewards.travel_reference import parse_reference, read_records

HARD_NAMES = [
    "Dill 24/7, East",
    "1000 Islands Café",
    "24",
    "360  Rooftop   Bar",
    'The "Old" Mill',
    "L'Ardoise, d'Or",
    "Ünal & Söhne",
    "Fir Loft, 2 BR, 3.5 stars",
    "No. 9, Indian Pizza 12",
    "Na\u0308ve (2022-03-01)",
    "\u2606 Sunny\u2606 room <3",
    "\u548c\u7f18\u6d6a\u6f2b\u6c11\u5bbf",
    "Che\u2019s\nbig\nplace",
    "nan bread {house} [x]",
]


def printed(rows, *, numbered=False, wide=False):
    """A table as pandas prints it: row numbers from an unordered index, wide signs counted as two on request."""
    frame = pandas.DataFrame(rows)
    frame.index = [(17 * number + 5) ** 2 % 9973 for number in range(len(frame))]
    with pandas.option_context("display.unicode.east_asian_width", wide):
        return frame.to_string(index=numbered)


def as_tables(rows, **how):
    return {key: printed(content, **how) if isinstance(content, list) else content for key, content in rows.items()}


def hard_rows():
    """Tables of every kind that hold every hard name, each city once with blanks in its name."""
    city = "Old Brim Falls"
    return {
        f"Attractions in {city}": [attraction(name, city) for name in HARD_NAMES],
        f"Restaurants in {city}": [
            restaurant(name, 10 + number, "Indian, Fast Food" if number % 2 else "Cafe", city)
            for number, name in enumerate(HARD_NAMES)
        ],
        f"Accommodations in {city}": [
            lodging(name, 50.5 + number, "Private room", "No pets & No children under 10", number % 4, 1 + number, city)
            for number, name in enumerate(HARD_NAMES)
        ],
        f"Flight from St. Alba to {city} on 2022-03-01": [
            flight(f"F{number}", "St. Alba", city, "2022-03-01", 40 + number) for number in range(3)
        ],
        f"Taxi from St. Alba to {city}": f"taxi, from St. Alba to {city}, duration: 1 day, cost: 1,234",
    }


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_text_and_object_form_give_the_same_catalogue_whatever_the_names(numbered, wide):
    expected = parse_reference(hard_rows())
    assert parse_reference(records(as_tables(hard_rows(), numbered=numbered, wide=wide))) == expected
    assert [place.name for place in expected.attractions] == [" ".join(name.split()) for name in HARD_NAMES]
    assert expected.restaurants[0] == Restaurant("Dill 24/7, East", "Old Brim Falls", 10.0, ("Cafe",))
    assert expected.lodgings[1] == Lodging(
        "1000 Islands Café", "Old Brim Falls", 51.5, "Private room", ("No pets", "No children under 10"), 1.0, 2
    )
    assert expected.flights[2] == Flight("F2", "St. Alba", "Old Brim Falls", "2022-03-01", 42.0)
    assert expected.rides == (Ride("taxi", "St. Alba", "Old Brim Falls", 1234.0),)


@pytest.mark.parametrize("name", HARD_NAMES)
@pytest.mark.parametrize("numbered", [False, True])
def test_a_table_of_one_row_keeps_numbers_that_belong_to_the_name(name, numbered):
    rows = {"Restaurants in Brim": [restaurant(name, 12, "Cafe, Indian")]}
    assert parse_reference(as_tables(rows, numbered=numbered)) == parse_reference(rows)


def test_numbers_before_all_names_are_names_if_the_table_has_no_row_numbers():
    rows = {"Restaurants in Brim": [restaurant("12 Bar", 12, "Cafe"), restaurant("34 Bar", 15, "Cafe")]}
    found = parse_reference(as_tables(rows)).restaurants
    assert [place.name for place in found] == ["12 Bar", "34 Bar"]


@pytest.mark.parametrize(
    "written",
    [
        lambda rows: records(rows),
        lambda rows: rows,
        lambda rows: repr(records(rows)),
        lambda rows: json.dumps(records(rows)),
        lambda rows: json.dumps(rows),
        lambda rows: records({key: json.dumps(content) if isinstance(content, list) else content
                              for key, content in rows.items()}),
        lambda rows: repr(records(as_tables(rows))),
        lambda rows: tuple(records(as_tables(rows, numbered=True))),
    ],
    ids=["list", "mapping", "literal list", "JSON list", "JSON mapping", "JSON contents", "literal tables", "tuple"],
)  # fmt: skip
def test_every_way_to_write_the_reference_gives_one_catalogue(written):
    assert parse_reference(written(ROWS)) == parse_reference(ROWS)


def test_the_catalogue_of_the_worked_examples():
    found = parse_reference(ROWS)
    assert [place.cost for place in found.restaurants] == [15, 15, 20, 12]
    assert found.restaurants[2].cuisines == ("Italian", "Pizza")
    assert found.lodgings[2].rules == ("No pets", "No visitors")
    assert [(ride.mode, ride.origin, ride.price) for ride in found.rides] == [
        ("self-driving", "Alba", 40), ("taxi", "Alba", 90), ("self-driving", "Brim", 40)
    ]  # fmt: skip
    assert found.searches == (("Alba", "Brim", "2022-03-01"), ("Brim", "Alba", "2022-03-03"))
    assert found.known_cities == {"alba", "brim"}
    assert found.has_all_kinds


@pytest.mark.parametrize(
    "content",
    ["", "   \n", "There is no flight from Alba to Brim on 2022-03-01.", "No valid information.", "no flights", [],
     None, "[]", "Empty DataFrame\nColumns: []\nIndex: []", "Empty DataFrame\nColumns: [Name, City]\nIndex: []",
     "Flight Number  Price  DepTime"],
    ids=["nothing", "blanks", "no flight", "no information", "no flights", "no rows", "null", "empty list",
         "empty frame", "empty frame with columns", "header only"],
)  # fmt: skip
@pytest.mark.parametrize(
    "title", ["Flight from Alba to Brim on 2022-03-01", "Restaurants in Brim", "Attractions in Brim",
              "Accommodations in Brim"]
)  # fmt: skip
def test_empty_tables_and_sentences_name_nothing_but_the_route_stays(title, content):
    found = parse_reference([{"Description": title, "Content": content}])
    assert not (found.restaurants or found.attractions or found.lodgings or found.flights)
    assert bool(found.searches) == title.startswith("Flight")
    assert "brim" in found.known_cities


@pytest.mark.parametrize(
    "content", ["No valid information.", "taxi, from Alba to Brim, no valid information", "", None]
)
def test_a_ride_without_a_cost_is_not_offered(content):
    assert parse_reference({"Taxi from Alba to Brim": content}).rides == ()


def test_missing_cells_are_empty_in_both_forms():
    none, nan = None, float("nan")
    rows = {
        "Accommodations in Brim": [
            lodging("Elm House", 50, "Private room", nan, 1, 2), lodging("Fir Loft", 80, "Private room", none, 1, 2)
        ],
        "Restaurants in Brim": [restaurant("Ash Cafe", 15, nan), restaurant("Bay Diner", 20, "Cafe")],
    }  # fmt: skip
    found = parse_reference(rows)
    assert [place.rules for place in found.lodgings] == [(), ()]
    assert found.restaurants[0].cuisines == ()
    assert parse_reference(as_tables(rows)) == found


def test_a_row_without_a_price_is_left_out_in_both_forms():
    rows = {
        "Accommodations in Brim": [
            lodging("Elm House", float("nan"), "Private room", "No pets", 1, 2),
            lodging("Fir Loft", 80, "Private room", "No pets", 1, 2),
        ]
    }
    assert [place.name for place in parse_reference(rows).lodgings] == ["Fir Loft"]
    assert parse_reference(as_tables(rows)) == parse_reference(rows)


def test_of_equal_names_in_a_city_the_first_row_decides_and_another_city_is_another_place():
    rows = {
        "Restaurants in Brim": [restaurant("Ash Cafe", 15, "Cafe"), restaurant("ASH  cafe", 99, "Indian")],
        "Restaurants in Cove": [restaurant("Ash Cafe", 7, "Cafe", "Cove")],
    }
    found = parse_reference(rows)
    assert len(found.restaurants) == 3  # nothing is lost
    assert [place.cost for place in first_rows(found.restaurants)] == [15, 7]
    assert found.restaurants_by_name["ash cafe", "brim"].cost == 15
    assert found.restaurants_by_name["ash cafe", "cove"].cost == 7


def test_the_city_of_a_description_stands_in_for_a_missing_column():
    found = parse_reference({"Restaurants in Brim": [{"Name": "Ash Cafe", "Average Cost": "15", "Cuisines": "Cafe"}]})
    assert found.restaurants == (Restaurant("Ash Cafe", "Brim", 15.0, ("Cafe",)),)


def test_a_city_with_the_word_to_in_its_name_keeps_its_way():
    rows = {
        "Attractions in Way to Go": [attraction("Sign", "Way to Go")],
        "Flight from Alba to Way to Go on 2022-03-01": "There is no flight from Alba to Way to Go on 2022-03-01.",
        "Self-driving from Way to Go to Alba": "self-driving, from Way to Go to Alba, cost: 40",
    }
    found = parse_reference(rows)
    assert found.searches == (("Alba", "Way to Go", "2022-03-01"),)
    assert (found.rides[0].origin, found.rides[0].destination) == ("Way to Go", "Alba")


def test_records_of_an_unknown_kind_are_passed_over():
    assert parse_reference({"Weather in Brim": "Rain.", **ROWS}) == parse_reference(ROWS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("not a literal", "neither JSON nor a Python literal"),
        ("(" * 5000, "neither JSON nor a Python literal"),
        (7, "must be a list of records, got int"),
        ([{"Content": "x"}], "record 0 .* has no Description"),
        (["Restaurants in Brim"], "record 0"),
        ({"Restaurants in Brim": 7}, "'Restaurants in Brim': expected a table"),
        ({"Restaurants in Brim": [1, 2]}, "'Restaurants in Brim': expected a table"),
        ({"Restaurants in Brim": "Price  Size\n12  large\n13  small"}, "a table without the columns Name"),
        ({"Restaurants in Brim": [restaurant("Ash Cafe", "cheap", "Cafe")]}, "Average Cost is 'cheap', not a number"),
        ({"Restaurants in Brim": printed([restaurant("Ash Cafe", 15, "Cafe")]) + "\nAsh Cafe and so on"},
         "the row cannot be read: 'Ash Cafe and so on'"),
        ({"Taxi from Brim": "taxi, cost: 4"}, "no way from one city to another"),
    ],
)  # fmt: skip
def test_unreadable_reference_data_are_an_error_that_names_the_place(data, message):
    with pytest.raises(ValueError, match=message):
        parse_reference(data)


def test_records_keep_their_order_and_contents():
    assert read_records(repr(records())) == [(title, content) for title, content in ROWS.items()]
