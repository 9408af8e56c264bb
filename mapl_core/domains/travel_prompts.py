"""What the agents of Travel read: the request, the days, their role and a compact catalogue, instead of raw tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mapl_core.domains.travel_solver import (
    cheapest_lodging,
    cheapest_meals,
    cheapest_transport,
    needed_attractions,
    split_budget,
    value_of,
)
from mapl_core.rewards.travel_actions import ACTIVITIES, DINING, LOGISTICS, SIGHTSEEING, TEAMS
from mapl_core.rewards.travel_catalogue import first_rows
from mapl_core.rewards.travel_text import canonical, canonical_city
from mapl_core.rewards.travel_trip import Trip

CountTokens = Callable[[str], int]

# Catalogue lines by how much a plan needs them: the cheapest feasible plan, then what a constraint or a cheaper plan
# may need, then the rest.
NEEDED, USEFUL, OTHER = range(3)

ROLE_NAMES = {LOGISTICS: "logistics", ACTIVITIES: "activities", DINING: "dining", SIGHTSEEING: "sightseeing"}
ROLE_TEXTS = {
    LOGISTICS: "You plan the logistics: where the party is, how it travels and where it sleeps.",
    ACTIVITIES: "You plan the activities: what the party eats and what it sees.",
    DINING: "You plan the dining: where the party eats.",
    SIGHTSEEING: "You plan the sightseeing: what the party sees.",
}
DUTIES = {
    LOGISTICS: ("house rule", "room type", "transportation"),
    ACTIVITIES: ("cuisine",),
    DINING: ("cuisine",),
    SIGHTSEEING: (),
}
MERGING_RULES = (
    "The agents of the team answer at the same time, and their slots are merged into one itinerary. Fill exactly the "
    "slots that you own: a slot that two agents fill differently is lost, and an answer in another form spoils the "
    "whole plan. Use only what the catalogue lists, and no restaurant or attraction twice. Never mix self-driving "
    "with flights or taxis. Stay in a lodging for at least its minimum nights."
)
VALUE_FORMS = {
    "current_city": 'current_city: a city, or "from A to B" on a day of travel',
    "transportation": 'transportation: "Flight Number: F0000001, from A to B", "Self-driving, from A to B" or '
    '"Taxi, from A to B"',
    "breakfast": 'breakfast, lunch, dinner: "Name, City"',
    "attraction": 'attraction: "Name, City", several joined by ";"',
    "accommodation": 'accommodation: "Name, City"',
}


@dataclass(frozen=True)
class Line:
    """One line of a catalogue: what it says, and how much a plan needs it."""

    text: str
    need: int


def estimate_tokens(text: str) -> int:
    """A careful guess for a text's tokens where no tokenizer is at hand: three characters a token."""
    return -(-len(text) // 3)


def task_text(query: str, trip: Trip, num_agents: int = 2) -> str:
    """Request, constraints, days and merging rules: what the whole team is told, once."""
    asked = [
        f"house rule: {trip.house_rule} must be allowed" if trip.house_rule else "",
        f"cuisines: {', '.join(trip.cuisines)}" if trip.cuisines else "",
        f"room type: {trip.room_type}" if trip.room_type else "",
        f"transportation: no {trip.banned_mode}" if trip.banned_mode else "",
    ]
    owners = "; ".join(
        f"agent {agent} ({ROLE_NAMES[owned]}) fills {', '.join(owned)}" for agent, owned in enumerate(TEAMS[num_agents])
    )
    days = [
        f'- day {day} ({trip.dates[day - 1]}): current_city is exactly "{row.current_city}"'
        for day, row in enumerate(trip.scaffold, start=1)
    ]
    return "\n".join(
        [
            f"Request: {query}",
            "",
            f"Plan a trip of {trip.days} days from {trip.org} for {_people(trip.people)}. "
            f"Budget for everything: {_dollars(trip.budget)}.",
            f"Constraints: {'; '.join(filter(None, asked)) or 'none'}.",
            "Days:",
            *days,
            "",
            f"The itinerary is filled by a team of {num_agents}: {owners}. {MERGING_RULES}",
        ]
    )


def role_text(trip: Trip, agent: int, num_agents: int, tokens: int | None, count: CountTokens = estimate_tokens) -> str:
    """Role, owned slots day by day, duties, budget cap, catalogue and output format of one agent.

    Args:
        trip: the task's trip.
        agent: number of the agent.
        num_agents: size of the team.
        tokens: most tokens of the catalogue; None for all of it. What the cheapest feasible plan needs always stays.
        count: counts the tokens of a text.
    """
    owned = TEAMS[num_agents][agent]
    split = split_budget(trip, num_agents)
    duties = [f"{name} ({_asked(trip, name)})" for name in DUTIES[owned] if _asked(trip, name)]
    cap = split.caps[agent]
    parts = [
        f"You are agent {agent}. {ROLE_TEXTS[owned]}",
        f"Your slots on every day: {', '.join(owned)}.",
        *(f"- day {day}: {'; '.join(_needs(trip, day, name) for name in owned)}" for day in range(1, trip.days + 1)),
        f"Your duty among the constraints: {'; '.join(duties) or 'none'}.",
        f"Spend at most {_dollars(cap)} of the budget." if cap else "What you plan costs nothing.",
    ]
    if not split.feasible:
        parts.append("The budget may be too small for a complete plan: choose what is cheapest.")
    return "\n".join([*parts, "", catalogue_text(trip, owned, tokens, count), "", output_rule(agent, owned)])


def output_rule(agent: int, owned: Sequence[str]) -> str:
    """The form of an agent's answer."""
    example = f'{{"agent_id": {agent}, "assignments": [{{"day": 1, "field": "{owned[0]}", "value": "..."}}, ...]}}'
    forms = "; ".join(VALUE_FORMS[name] for name in owned if name in VALUE_FORMS)
    return (
        f"Answer with one JSON object and nothing else: {example}, one item for each of your slots on each day, in "
        f'this order. A slot that stays empty has the value "-". Values: {forms}.'
    )


def catalogue_text(
    trip: Trip, owned: Sequence[str], tokens: int | None = None, count: CountTokens = estimate_tokens
) -> str:
    """The part of the catalogue that a role needs, in the order of the reference data, within a number of tokens.

    The lines of the cheapest feasible plan are never dropped, even if they alone are more than `tokens`; then come
    lines that a constraint may need, then the others, each as long as the whole still fits.
    """
    groups = [
        group
        for name, group in (
            ("transportation", _transport_lines),
            ("accommodation", _lodging_lines),
            ("breakfast", _restaurant_lines),
            ("attraction", _attraction_lines),
        )
        if name in owned
    ]
    titled = [group(trip) for group in groups]
    chosen = {(block, number) for block, (_, lines) in enumerate(titled) for number, line in enumerate(lines)}
    if tokens is not None:
        chosen = _fitting(titled, tokens, count)
    blocks = []
    for block, (title, lines) in enumerate(titled):
        kept = [line.text for number, line in enumerate(lines) if (block, number) in chosen]
        left = len(lines) - len(kept)
        blocks.append("\n".join([title, *kept, *([f"- ({left} more are left out)"] if left else [])]))
    return "\n".join(blocks)


def _fitting(titled: Sequence[tuple[str, Sequence[Line]]], tokens: int, count: CountTokens) -> set[tuple[int, int]]:
    """Lines to keep: all that are needed, then block by block in turn what still fits, most useful first."""
    room = tokens - sum(count(title) + 12 for title, _ in titled)  # a title's line break and the note on what is left
    waiting: list[tuple[int, int, int, int]] = []
    chosen: set[tuple[int, int]] = set()
    for block, (_, lines) in enumerate(titled):
        order = sorted(range(len(lines)), key=lambda number: lines[number].need)
        for rank, number in enumerate(order):
            if lines[number].need == NEEDED:
                chosen.add((block, number))
                room -= count(lines[number].text) + 1
            else:
                waiting.append((lines[number].need, rank, block, number))
    for _, _, block, number in sorted(waiting):
        length = count(titled[block][1][number].text) + 1
        if length <= room:
            chosen.add((block, number))
            room -= length
    return chosen


def _transport_lines(trip: Trip) -> tuple[str, list[Line]]:
    cheapest = cheapest_transport(trip)
    needed = set(cheapest.slots.values()) if cheapest else set()
    lines = []
    for day, row in enumerate(trip.scaffold, start=1):
        if not row.moves:
            continue
        options = trip.catalogue.options(row.start, row.end, trip.dates[day - 1])
        cheapest_of_mode: dict[str, float] = {}
        for transport in options:
            cost = transport.cost(trip.people)
            cheapest_of_mode[transport.mode] = min(cost, cheapest_of_mode.get(transport.mode, cost))
        for transport in options:
            if transport.mode == trip.banned_mode:
                continue
            cost = transport.cost(trip.people)
            useful = USEFUL if cost == cheapest_of_mode[transport.mode] else OTHER
            text = f"- day {day}: {value_of(transport)}: {_dollars(cost)}"
            lines.append(Line(text, NEEDED if transport in needed else useful))
    return f"Transport, cost for {_people(trip.people)}:", lines


def _lodging_lines(trip: Trip) -> tuple[str, list[Line]]:
    cheapest = cheapest_lodging(trip)
    needed = set(cheapest.slots.values()) if cheapest else set()
    lines = []
    for lodging in first_rows(trip.catalogue.lodgings):
        stays = [stay for stay in trip.stays if canonical_city(stay.city) == canonical_city(lodging.city)]
        days = [
            f"{stay.first_day}-{stay.first_day + stay.nights - 1}" if stay.nights > 1 else str(stay.first_day)
            for stay in stays
            if lodging.minimum_nights <= stay.nights and trip.allows(lodging)
        ]
        rules = f", {', '.join(lodging.rules)}" if lodging.rules else ""
        text = (
            f"- {value_of(lodging)}: {_dollars(lodging.price * lodging.rooms(trip.people))}, {lodging.room_type}{rules}"
            f", minimum nights {lodging.minimum_nights:g}, days {' or '.join(days) if days else 'none'}"
        )
        lines.append(Line(text, NEEDED if lodging in needed else USEFUL if days else OTHER))
    return f"Lodgings, cost a night for {_people(trip.people)}:", lines


def _restaurant_lines(trip: Trip) -> tuple[str, list[Line]]:
    cheapest = cheapest_meals(trip)
    needed = set(cheapest.slots.values()) if cheapest else set()
    wanted = {canonical(cuisine) for cuisine in trip.cuisines}
    restaurants = first_rows(trip.catalogue.restaurants)
    by_price = sorted(restaurants, key=lambda restaurant: restaurant.cost)
    cheap = {by_price[index] for index in range(min(len(by_price), 3 * trip.days))}
    lines = []
    for restaurant in restaurants:
        serves = wanted & {canonical(cuisine) for cuisine in restaurant.cuisines}
        text = f"- {value_of(restaurant)}: {_dollars(restaurant.cost * trip.people)}, {', '.join(restaurant.cuisines)}"
        useful = USEFUL if serves or restaurant in cheap else OTHER
        lines.append(Line(text, NEEDED if restaurant in needed else useful))
    return f"Restaurants, cost of a meal for {_people(trip.people)}:", lines


def _attraction_lines(trip: Trip) -> tuple[str, list[Line]]:
    chosen = needed_attractions(trip)
    needed = set(chosen.slots.values()) if chosen else set()
    return "Attractions, free:", [
        Line(f"- {value_of(attraction)}", NEEDED if attraction in needed else OTHER)
        for attraction in first_rows(trip.catalogue.attractions)
    ]


def _needs(trip: Trip, day: int, name: str) -> str:
    """What one slot must hold."""
    row = trip.scaffold[day - 1]
    if name == "current_city":
        return f'current_city "{row.current_city}"'
    if (day, name) in trip.required:
        return f"{name} required"
    last_night = name == "accommodation" and day == trip.days
    return f'{name} "-"' if name == "transportation" or last_night else f'{name} optional, "-" if none'


def _asked(trip: Trip, name: str) -> str:
    return {
        "house rule": trip.house_rule,
        "cuisine": ", ".join(trip.cuisines),
        "room type": trip.room_type,
        "transportation": f"no {trip.banned_mode}" if trip.banned_mode else "",
    }[name]


def _people(count: int) -> str:
    return "1 person" if count == 1 else f"{count} people"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}".removesuffix(".00")
