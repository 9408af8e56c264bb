"""The miniature Travel: generated trips with a tiny catalogue, the words a pocket model reads and writes, the renderer.

Every trip is feasible: the generator asks the solver for the cheapest plan and sets the budget from its cost. A pocket
model writes only values, one token each, in the order of its slots, and the token `end`; the renderer writes the JSON
around them, and the oracle of the large models scores it. Pure text, no torch.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from mapl_core.domains.base import Domain, Task
from mapl_core.domains.travel_solver import cheapest_plan, plan_values, split_budget
from mapl_core.pocket.common import prompt_forms
from mapl_core.rewards.travel_actions import ACTIVITIES, DINING, LOGISTICS, SIGHTSEEING, TEAMS, Slot, owned_slots
from mapl_core.rewards.travel_catalogue import FLIGHT, SELF_DRIVING, TAXI, Flight
from mapl_core.rewards.travel_text import BLANK
from mapl_core.rewards.travel_trip import Trip, read_trip

CITIES = ("Alba", "Brim", "Cove", "Dell", "Elmo", "Fern", "Glen", "Hull")
RESTAURANTS = (
    "Acorn", "Basil", "Clove", "Daisy", "Ember", "Fennel", "Ginger", "Honey", "Juniper", "Kettle", "Lemon", "Maple",
)  # fmt: skip
ATTRACTIONS = ("Museum", "Castle", "Garden", "Harbor", "Tower", "Market", "Lake", "Bridge")
LODGINGS = ("Arbor", "Beacon", "Cabin", "Den", "Estate", "Farmhouse", "Grotto", "Haven")
CUISINES = ("Chinese", "American", "Italian", "Mexican", "Indian", "Mediterranean", "French")
ROOM_TYPES = {"private": "Private room", "entire": "Entire home/apt", "shared": "Shared room"}
RULES = {
    "smoking": "No smoking",
    "parties": "No parties",
    "children": "No children under 10",
    "pets": "No pets",
    "visitors": "No visitors",
}
PRICES = (10, 15, 20, 30, 40, 60, 80)
MARGINS = (1.0, 1.15, 1.4)  # budget over the cheapest feasible cost
PER_CITY = {"restaurants": 4, "attractions": 3, "lodgings": 3}
TAXI_SHARE = 0.5  # of the ways that have a taxi
FIRST_DAY = date(2022, 3, 1)

SPLIT_SIZES = {"train": 60, "eval": 20}
SPLIT_SEED = "mapl pocket travel tasks"

NONE, END = "none", "end"
MODE_WORDS = {"fly": FLIGHT, "drive": SELF_DRIVING, "taxi": TAXI}
ROLE_WORDS = {LOGISTICS: "travel and stay", ACTIVITIES: "meals and sights", DINING: "meals", SIGHTSEEING: "sights"}
LAYOUT = ""
NEW_TOKENS = (16, 18)  # limits on new tokens, agent by agent: 9 and 12 values, the end, some room for surplus


# Trips ---------------------------------------------------------------------------------------------------------------


def make_tasks(split: str, limit: int | None = None, *, days: int = 3) -> list[Task]:
    """The generated trips of one split, always the same ones in the same order.

    Args:
        split: "train" (60 trips) or "eval" (20); none of one is in the other.
        limit: only the first so many.
        days: 3 (one city) or 5 (two cities).

    Raises:
        ValueError: for an unknown split, a length that is not generated, or a limit beyond the split's size.
    """
    if split not in SPLIT_SIZES:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLIT_SIZES)}")
    if days not in (3, 5):
        raise ValueError(f"days is {days}; pocket trips have 3 or 5 days")
    if limit is not None and not 1 <= limit <= SPLIT_SIZES[split]:
        raise ValueError(f"limit {limit} exceeds the {SPLIT_SIZES[split]} {split} trips; lower it")
    rng = random.Random(f"{SPLIT_SEED} {days}")
    distinct: dict[str, dict[str, Any]] = {}
    while len(distinct) < sum(SPLIT_SIZES.values()):
        fields = draw_trip(rng, days)
        distinct.setdefault(trip_key(fields), fields)
    drawn = list(distinct.values())
    chosen = drawn[: SPLIT_SIZES["train"]] if split == "train" else drawn[SPLIT_SIZES["train"] :]
    return [
        Task(f"pocket-travel-{days}-{split}-{number:03d}", "pocket", split, fields)
        for number, fields in enumerate(chosen[:limit])
    ]


def trip_key(fields: Mapping[str, Any]) -> str:
    """What makes a trip another trip: its catalogue, party and constraints, whatever the budget."""
    return json.dumps([fields["records"], fields["people_number"], fields["local_constraint"]])


def draw_trip(rng: random.Random, days: int = 3) -> dict[str, Any]:
    """Fields of a feasible trip of 3 days (one city) or 5 (two cities)."""
    while True:
        fields = _draw(rng, days)
        solution = cheapest_plan(read_trip(fields))
        if solution is not None:
            fields["budget"] = math.ceil(solution.cost * rng.choice(MARGINS) - 1e-9)
            fields["query"] = _query(fields)
            return fields


def _draw(rng: random.Random, days: int) -> dict[str, Any]:
    """A trip with a budget that everything fits, feasible or not. No name comes twice, so that it tells its city."""
    org, *visited = rng.sample(CITIES, 2 if days == 3 else 3)
    stops = [org, *visited, org]
    dates = [(FIRST_DAY + timedelta(days=number)).isoformat() for number in range(days)]
    contents: dict[str, Any] = {}
    unused = {"attractions": list(ATTRACTIONS), "restaurants": list(RESTAURANTS), "lodgings": list(LODGINGS)}

    def draw_names(kind: str) -> list[str]:
        names = rng.sample(unused[kind], PER_CITY[kind])
        unused[kind] = [name for name in unused[kind] if name not in names]
        return names

    for city in visited:
        contents[f"Attractions in {city}"] = [{"Name": name, "City": city} for name in draw_names("attractions")]
        contents[f"Restaurants in {city}"] = [
            {
                "Name": name,
                "Average Cost": rng.choice(PRICES),
                "Cuisines": ", ".join(rng.sample(CUISINES, rng.choice((1, 1, 2)))),
                "City": city,
            }
            for name in draw_names("restaurants")
        ]
        contents[f"Accommodations in {city}"] = [
            {
                "NAME": name,
                "price": rng.choice(PRICES),
                "room type": rng.choice(list(ROOM_TYPES.values())),
                "house_rules": rng.choice(list(RULES.values())),
                "minimum nights": rng.randint(1, 3),
                "maximum occupancy": rng.randint(1, 4),
                "city": city,
            }
            for name in draw_names("lodgings")
        ]
    for number, (start, end) in enumerate(zip(stops, stops[1:], strict=False)):
        day = dates[2 * number]
        contents[f"Flight from {start} to {end} on {day}"] = [
            {
                "Flight Number": f"F{rng.randint(1000, 9999)}",
                "Price": rng.choice(PRICES),
                "FlightDate": day,
                "OriginCityName": start,
                "DestCityName": end,
            }
        ]
        contents[f"Self-driving from {start} to {end}"] = (
            f"self-driving, from {start} to {end}, cost: {rng.choice(PRICES)}"
        )
        taxi = f"taxi, from {start} to {end}, cost: {rng.choice(PRICES)}"
        contents[f"Taxi from {start} to {end}"] = taxi if rng.random() < TAXI_SHARE else "No valid information."
    records = [{"Description": description, "Content": content} for description, content in contents.items()]
    constraint: dict[str, Any] = {"house rule": None, "cuisine": None, "room type": None, "transportation": None}
    if rng.random() < 0.5:
        kind = rng.choice(("cuisine", "room type", "transportation"))
        constraint[kind] = {
            "cuisine": [rng.choice(CUISINES)],
            "room type": f"{rng.choice(list(ROOM_TYPES))} room",
            "transportation": "no flight",
        }[kind]
    return {
        "query": "",
        "org": org,
        "dest": visited[0] if len(visited) == 1 else "",
        "days": days,
        "dates": dates,
        "visiting_city_number": len(visited),
        "people_number": rng.randint(1, 3),
        "budget": 1_000_000,
        "local_constraint": constraint,
        "records": records,
        "reference_text": json.dumps(records),
    }


def _query(fields: Mapping[str, Any]) -> str:
    cities = fields["dest"] or f"{fields['visiting_city_number']} cities"
    asked = [value if isinstance(value, str) else value[0] for value in fields["local_constraint"].values() if value]
    return (
        f"Plan {fields['days']} days from {fields['org']} to {cities} for {fields['people_number']} with a budget of "
        f"${fields['budget']:,}{''.join(f', {value}' for value in asked)}."
    )


# Words of the prompts ------------------------------------------------------------------------------------------------


def task_words(task: Task) -> str:
    """Days, party, budget and constraint in the pocket vocabulary; the same for every agent."""
    trip = read_trip(task.fields)
    days = " , ".join(_city_word(row.start, row.end) for row in trip.scaffold)
    asked = [*(cuisine.lower() for cuisine in trip.cuisines), *trip.room_type.split()[:1]]
    if trip.banned_mode:
        asked.append("no " + next(word for word, mode in MODE_WORDS.items() if mode == trip.banned_mode))
    wish = f" want {' '.join(asked)} ." if asked else ""
    return f"days : {days} . people {trip.people} . budget {_digits(trip.budget)} .{wish}"


def role_words(task: Task, agent: int, num_agents: int = 2) -> str:
    """Role, cap and catalogue of one agent in the pocket vocabulary."""
    trip, owned = read_trip(task.fields), TEAMS[num_agents][agent]
    cap = split_budget(trip, num_agents).caps[agent]
    spend = f" spend {_digits(math.floor(cap))} ." if cap else ""
    return f"{catalogue_words(trip, owned)} plan {ROLE_WORDS[owned]} .{spend}"


def single_words(task: Task, num_agents: int = 2) -> str:
    """Catalogue and the sections to write, for one agent that does everything."""
    trip = read_trip(task.fields)
    catalogue = catalogue_words(trip, [name for owned in TEAMS[num_agents] for name in owned])
    return f"{catalogue} plan all : {' '.join(f'<agent_{agent}>' for agent in range(num_agents))} ."


def catalogue_words(trip: Trip, owned: Sequence[str]) -> str:
    """The catalogue of the owned slots; costs are for the whole party."""
    parts = []
    if "transportation" in owned:
        for day, row in enumerate(trip.scaffold, start=1):
            if row.moves:
                options = trip.catalogue.options(row.start, row.end, trip.dates[day - 1])
                costs = [
                    f"{next(word for word, mode in MODE_WORDS.items() if mode == option.mode)} "
                    f"{_digits(option.cost(trip.people))}"
                    for option in options
                ]
                parts.append(f"{_city_word(row.start, row.end)} {' '.join(costs)}")
    for stay in trip.stays:
        here = _place_words(trip, owned, stay.city)
        if here:
            parts.append(f"{stay.city.lower()} : {' ; '.join(here)}")
    return " ; ".join(parts) + " ."


def _place_words(trip: Trip, owned: Sequence[str], city: str) -> list[str]:
    """Lodgings, restaurants and attractions of a city, as far as they belong to the owned slots."""
    places = []
    if "accommodation" in owned:
        for lodging in trip.catalogue.lodgings:
            room = next(word for word, shown in ROOM_TYPES.items() if shown == lodging.room_type)
            cost = _digits(lodging.price * lodging.rooms(trip.people))
            places.append((lodging, f" {cost} {room} nights {lodging.minimum_nights:g}"))
    if "lunch" in owned:
        for place in trip.catalogue.restaurants:
            cuisines = " ".join(cuisine.lower() for cuisine in place.cuisines)
            places.append((place, f" {_digits(place.cost * trip.people)} {cuisines}"))
    if "attraction" in owned:
        places += [(place, "") for place in trip.catalogue.attractions]
    return [f"{place.name.lower()}{details}" for place, details in places if place.city == city]


def _city_word(start: str, end: str) -> str:
    return end.lower() if start == end else f"{start}_to_{end}".lower()


def _digits(amount: float) -> str:
    """A number as one token a digit, so that few tokens write all prices."""
    return " ".join(str(round(amount)))


# Words of the answers ------------------------------------------------------------------------------------------------


def city_words() -> dict[str, tuple[str, str]]:
    """Token, start and end of every current_city: "brim" is a day of stay, "alba_to_brim" one of travel."""
    return {_city_word(start, end): (start, end) for start in CITIES for end in CITIES}


def render(text: str | None, agent: int, task: Task, num_agents: int = 2) -> str | None:
    """The text that a large model would have written for a pocket model's words.

    Without the token `end` the brackets stay open; values beyond the agent's slots repeat its last slot. A mode of
    transport is written with the way of the agent's own current_city of that day; an entity with the city where the
    catalogue has it, and with the city of its slot's evening if the catalogue does not have it.

    Args:
        text: the decoded words; None or nothing stays as it is.
        agent: number of the agent.
        task: a pocket task.
        num_agents: size of the team.
    """
    if text is None or not text.split():
        return text
    trip = read_trip(task.fields)
    words, ended, _ = _until_end(text.lower().split())
    slots = owned_slots(agent, trip.days, num_agents)
    items, way = [], None
    for number, word in enumerate(words):
        day, name = slots[min(number, len(slots) - 1)]
        if name == "current_city":
            way = CITY_WORDS.get(word)
        value = _value(word, way, day, trip)
        items.append(json.dumps({"day": day, "field": name, "value": value}))
    closing = "]}" if ended else ""
    return f'{{"agent_id": {agent}, "assignments": [{", ".join(items)}{closing}'


def _until_end(words: Sequence[str]) -> tuple[Sequence[str], bool, Sequence[str]]:
    if END not in words:
        return words, False, ()
    position = list(words).index(END)
    return words[:position], True, words[position + 1 :]


def _value(word: str, way: tuple[str, str] | None, day: int, trip: Trip) -> str:
    if word in (NONE, BLANK):
        return BLANK
    if word in CITY_WORDS:
        start, end = CITY_WORDS[word]
        return end if start == end else f"from {start} to {end}"
    if word in MODE_WORDS and way is not None:
        start, end = way
        route = f"from {start} to {end}"
        if word != "fly":
            return f"{MODE_WORDS[word].capitalize()}, {route}"
        ways = trip.catalogue.options(start, end, trip.dates[day - 1])
        flights = [option for option in ways if isinstance(option, Flight)]
        return f"Flight Number: {flights[0].number if flights else 'F0000'}, {route}"
    if word in ENTITY_WORDS:
        name = ENTITY_WORDS[word]
        return f"{name}, {cities_of_places(trip).get(name, trip.scaffold[day - 1].end)}"
    return word


def cities_of_places(trip: Trip) -> dict[str, str]:
    """The city of every restaurant, attraction and lodging of a pocket trip by its name."""
    catalogue = trip.catalogue
    places = (*catalogue.restaurants, *catalogue.attractions, *catalogue.lodgings)
    return {place.name: place.city for place in places}


ENTITY_WORDS = {name.lower(): name for name in (*RESTAURANTS, *ATTRACTIONS, *LODGINGS)}  # token and name
CITY_WORDS = city_words()


def answer_words(plan: Mapping[Slot, str], agent: int, trip: Trip, num_agents: int = 2) -> str:
    """The words of an agent for its slots of an itinerary, with the end."""
    words = []
    for day, name in owned_slots(agent, trip.days, num_agents):
        value = plan.get((day, name), BLANK)
        if name == "current_city":
            row = trip.scaffold[day - 1]
            words.append(_city_word(row.start, row.end))
        elif name == "transportation" and value != BLANK:
            mode = "fly" if value.startswith("Flight") else "taxi" if value.startswith("Taxi") else "drive"
            words.append(mode)
        else:
            words.append(NONE if value == BLANK else value.rpartition(",")[0].lower())
    return " ".join([*words, END])


def best_answers(task: Task, num_agents: int = 2) -> tuple[str, ...]:
    """A joint answer that earns the full oracle reward on this task: the generator's self-test."""
    trip = read_trip(task.fields)
    solution = cheapest_plan(trip)
    if solution is None:
        raise ValueError(f"task {task.id} has no feasible plan")
    plan = plan_values(solution, trip)
    return tuple(answer_words(plan, agent, trip, num_agents) for agent in range(num_agents))


def vocabulary() -> Iterator[str]:
    """Every token that prompts and answers use, apart from the signs and tags that all pocket models share."""
    yield from (*ENTITY_WORDS, *CITY_WORDS, *MODE_WORDS, *ROOM_TYPES, *(cuisine.lower() for cuisine in CUISINES))
    yield from (NONE, END, *map(str, range(10)), ":", ";", ",", ".")
    yield from "days people budget want no plan travel and stay meals sights spend nights all answer for".split()
    yield from "your draft write it again".split()


def copied_words(text: str, task: Task) -> tuple[int, int]:
    """How many different entity words of an answer are in its own task's catalogue, and how many there are in all."""
    mentioned = set(re.findall(r"\w+", text.lower())).intersection(ENTITY_WORDS)
    own = {name.lower() for name in cities_of_places(read_trip(task.fields))}
    return len(mentioned & own), len(mentioned)


# The corpus ----------------------------------------------------------------------------------------------------------

# How often the corpus shows each prompt form; every form that an experiment may write is among them.
FORMS = {"agent": 0.44, "coordinator": 0.20, "single": 0.12, "sequential": 0.10, "discussion": 0.14}
# The same for team sizes and lengths of trips.
TEAM_SIZES = {2: 0.75, 3: 0.25}
TRIP_DAYS = {3: 0.75, 5: 0.25}


def atoms() -> list[str]:
    """Texts that are one token each although they are not one plain word: none here."""
    return []


def reserved_slots() -> frozenset[str]:
    """What makes the train and eval trips of both lengths, which the pocket base must not have seen."""
    return frozenset(
        trip_key(task.fields) for days in TRIP_DAYS for split in SPLIT_SIZES for task in make_tasks(split, days=days)
    )


def vocabulary_texts(domain: Domain) -> Iterator[str]:
    """Texts that together hold every word of the language."""
    yield from vocabulary()
    task = make_tasks("train", 1)[0]
    yield from (write() for write in prompt_forms(domain, task, [""] * domain.num_agents).values())


def write_example(domain: Domain, rng: random.Random, reserved: frozenset[str]) -> tuple[str, str]:
    """One pair of prompt and scripted answer for pretraining.

    Whatever form, team size and length, the answer follows the same uncoordinated mixture: a coordinator draws all
    parts independently, and an agent that is shown its team mates' texts does not use them.

    Args:
        domain: the Travel domain; its team size is not used, since the corpus shows both.
        rng: source of all choices.
        reserved: keys of trips that must not be shown.
    """
    from mapl_core.pocket.travel_mixture import sample_answer  # which builds on this module

    size, days = (rng.choices(list(shares), list(shares.values()))[0] for shares in (TEAM_SIZES, TRIP_DAYS))
    team = type(domain)(num_agents=size)
    fields = draw_trip(rng, days)
    while trip_key(fields) in reserved:
        fields = draw_trip(rng, days)
    task = Task("travel-pocket-corpus", "pocket", "train", fields)
    form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]

    def team_answers() -> list[str]:
        return [sample_answer(task, agent, rng, size) for agent in range(size)]

    if form in ("coordinator", "single"):
        return prompt_forms(team, task, ())[form](), team.join(team_answers())
    agent = rng.randrange(size)
    drafts = team_answers() if form in ("sequential", "discussion") else ()
    return prompt_forms(team, task, drafts)[f"{form} {agent}"](), sample_answer(task, agent, rng, size)
