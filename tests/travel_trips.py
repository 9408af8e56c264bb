"""Self-invented trips for the tests of the Travel domain: the one of the worked examples, as tables and as rows."""

from __future__ import annotations

import json

from mapl_core.domains.base import Task

FIELDS = ("current_city", "transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation")
LOGISTICS = ("current_city", "transportation", "accommodation")
DATES = ["2022-03-01", "2022-03-02", "2022-03-03"]


def restaurant(name, cost, cuisines, city="Brim"):
    return {"Name": name, "Average Cost": cost, "Cuisines": cuisines, "Aggregate Rating": 4.0, "City": city}


def attraction(name, city="Brim"):
    return {
        "Name": name, "Latitude": 1.25, "Longitude": -2.5, "Address": f"1 Main St, {city}, USA",
        "Phone": "(555) 010-0000", "Website": "https://example.org/", "City": city,
    }  # fmt: skip


def lodging(name, price, room, rules, nights, occupancy, city="Brim"):
    return {
        "NAME": name, "price": float(price), "room type": room, "house_rules": rules, "minimum nights": float(nights),
        "maximum occupancy": occupancy, "review rate number": 3.0, "city": city,
    }  # fmt: skip


def flight(number, origin, destination, date, price):
    return {
        "Flight Number": number, "Price": price, "DepTime": "08:00", "ArrTime": "09:30",
        "ActualElapsedTime": "1 hours 30 minutes", "FlightDate": date, "OriginCityName": origin,
        "DestCityName": destination, "Distance": 300.0,
    }  # fmt: skip


def ride(mode, origin, destination, cost):
    return f"{mode}, from {origin} to {destination}, duration: 3 hours 5 mins, distance: 1,234 km, cost: {cost}"


ROWS = {
    "Attractions in Brim": [attraction("Hill Museum"), attraction("Iris Park")],
    "Restaurants in Brim": [
        restaurant("Ash Cafe", 15, "Cafe, American"),
        restaurant("Bay Diner", 15, "Mexican"),
        restaurant("Cob Grill", 20, "Italian, Pizza"),
        restaurant("Dill 24/7, East", 12, "Indian"),
    ],
    "Accommodations in Brim": [
        lodging("Elm House", 50, "Private room", "No smoking", 1, 2),
        lodging("Fir Loft", 80, "Entire home/apt", "No parties", 2, 4),
        lodging("Gum Bunk", 30, "Shared room", "No pets & No visitors", 3, 1),
    ],
    "Flight from Alba to Brim on 2022-03-01": [flight("F1001", "Alba", "Brim", "2022-03-01", 70)],
    "Self-driving from Alba to Brim": ride("self-driving", "Alba", "Brim", 40),
    "Taxi from Alba to Brim": ride("taxi", "Alba", "Brim", 90),
    "Flight from Brim to Alba on 2022-03-03": [flight("F1002", "Brim", "Alba", "2022-03-03", 70)],
    "Self-driving from Brim to Alba": ride("self-driving", "Brim", "Alba", 40),
    "Taxi from Brim to Alba": "No valid information.",
}
REFERENCE_TEXT = " ".join(f"t{number}" for number in range(1, 41))


def records(rows=ROWS):
    return [{"Description": description, "Content": content} for description, content in rows.items()]


def task(rows=ROWS, constraint=None, **changes):
    """The trip of the worked examples, with other fields where given."""
    fields = {
        "query": "Three days in Brim, please.", "org": "Alba", "dest": "Brim", "days": 3, "dates": DATES,
        "visiting_city_number": 1, "people_number": 1, "budget": 290, "records": records(rows),
        "local_constraint": {"house rule": None, "cuisine": None, "room type": None, "transportation": None}
        | (constraint or {}),
        "reference_text": REFERENCE_TEXT,
    }  # fmt: skip
    return Task("alba-brim", "small", "eval", fields | changes)


FLY_OUT = "Flight Number: F1001, from Alba to Brim"
FLY_BACK = "Flight Number: F1002, from Brim to Alba"
BEST = {
    (1, "current_city"): "from Alba to Brim",
    (2, "current_city"): "Brim",
    (3, "current_city"): "from Brim to Alba",
    (1, "transportation"): FLY_OUT,
    (3, "transportation"): FLY_BACK,
    (1, "accommodation"): "Elm House, Brim",
    (2, "accommodation"): "Elm House, Brim",
    (2, "breakfast"): "Ash Cafe, Brim",
    (2, "attraction"): "Hill Museum, Brim",
    (2, "lunch"): "Bay Diner, Brim",
    (2, "dinner"): "Cob Grill, Brim",
}


def items(plan, agent, days=3, owned=None):
    owned = owned or (LOGISTICS if agent == 0 else [name for name in FIELDS if name not in LOGISTICS])
    return [
        {"day": day, "field": name, "value": plan.get((day, name), "-")}
        for day in range(1, days + 1)
        for name in FIELDS
        if name in owned
    ]


def text(agent, listed):
    return json.dumps({"agent_id": agent, "assignments": listed})


def pair(changes=None, plan=BEST, days=3):
    """The two agents' texts of a plan, with other values where given."""
    plan = {**plan, **(changes or {})}
    return [text(agent, items(plan, agent, days)) for agent in (0, 1)]


def triple(plan, days=3):
    """The texts of a team of three."""
    teams = (LOGISTICS, ("breakfast", "lunch", "dinner"), ("attraction",))
    return [text(agent, items(plan, agent, days, owned)) for agent, owned in enumerate(teams)]


def complete(plan, days=3):
    """The plan with "-" in all other slots, as strict agents would write it."""
    return {(day, name): plan.get((day, name), "-") for day in range(1, days + 1) for name in FIELDS}


# A trip of two cities, with traps: one number on two days and ways, one name in both cities, equal names in one city
TWO_CITIES = {
    "Attractions in Brim": [attraction("Iris Park")],
    "Attractions in Cove": [attraction("Iris Park", "Cove")],
    "Restaurants in Brim": [restaurant(name, 10, "Cafe") for name in ("Ash", "Bay", "Cob")]
    + [restaurant("Ash", 99, "Indian")],
    "Restaurants in Cove": [restaurant(name, 20, "Indian", "Cove") for name in ("Ash", "Bay", "Cob")],
    "Accommodations in Brim": [lodging("Elm", 50, "Private room", "", 2, 2)],
    "Accommodations in Cove": [lodging("Elm", 60, "Private room", "", 2, 2, "Cove")],
    "Flight from Alba to Brim on 2022-03-01": [flight("F7", "Alba", "Brim", "2022-03-01", 70),
                                               flight("F7", "Alba", "Brim", "2022-03-02", 11)],
    "Flight from Brim to Cove on 2022-03-03": "There is no flight from Brim to Cove on 2022-03-03.",
    "Taxi from Brim to Cove": ride("taxi", "Brim", "Cove", 30),
    "Flight from Cove to Alba on 2022-03-05": [flight("F7", "Cove", "Alba", "2022-03-05", 80)],
}  # fmt: skip
FIVE = {
    "dates": [f"2022-03-0{day}" for day in range(1, 6)], "days": 5, "dest": "Ohio", "visiting_city_number": 2,
    "budget": 900,
}  # fmt: skip
TOUR = complete(
    {
        (1, "current_city"): "from Alba to Brim", (2, "current_city"): "Brim", (3, "current_city"): "from Brim to Cove",
        (4, "current_city"): "Cove", (5, "current_city"): "from Cove to Alba",
        (1, "transportation"): "Flight Number: F7, from Alba to Brim",
        (3, "transportation"): "Taxi, from Brim to Cove",
        (5, "transportation"): "Flight Number: F7, from Cove to Alba",
        **{(day, "accommodation"): "Elm, Brim" for day in (1, 2)},
        **{(day, "accommodation"): "Elm, Cove" for day in (3, 4)},
        (2, "breakfast"): "Ash, Brim", (2, "lunch"): "Bay, Brim", (2, "dinner"): "Cob, Brim",
        (4, "breakfast"): "Ash, Cove", (4, "lunch"): "Bay, Cove", (4, "dinner"): "Cob, Cove",
        (2, "attraction"): "Iris Park, Brim", (4, "attraction"): "Iris Park, Cove",
    },
    5,
)  # fmt: skip


def five_days(**changes):
    """The trip of two cities as a task."""
    return task(TWO_CITIES, **(FIVE | changes))
