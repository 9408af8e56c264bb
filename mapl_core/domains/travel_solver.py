"""The cheapest feasible plan of a trip: it proves a task feasible, splits the budget and tells the needed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mapl_core.rewards.travel_actions import Slot
from mapl_core.rewards.travel_catalogue import (
    SELF_DRIVING,
    Attraction,
    Flight,
    Lodging,
    Restaurant,
    Transport,
    first_rows,
)
from mapl_core.rewards.travel_text import canonical, canonical_city
from mapl_core.rewards.travel_trip import MEALS, Trip

MOST_EXTRA_MEALS = 3  # a day of travel: meals beyond the required ones, where these cannot serve all cuisines


@dataclass(frozen=True)
class Solution:
    """Entities for slots, and what they cost the whole party in dollars."""

    slots: dict[Slot, Transport | Lodging | Restaurant | Attraction]
    cost: float


def value_of(entity: Transport | Lodging | Restaurant | Attraction) -> str:
    """How an entity is written into a slot."""
    if isinstance(entity, Flight):
        return f"Flight Number: {entity.number}, from {entity.origin} to {entity.destination}"
    if isinstance(entity, Transport):
        return f"{entity.mode.capitalize()}, from {entity.origin} to {entity.destination}"
    return f"{entity.name}, {entity.city}"


def cheapest_transport(trip: Trip) -> Solution | None:
    """The own car on every way or on none: it cannot be left behind. None if some way has no allowed transport."""
    choices = []
    for own_car in (True, False):
        slots: dict[Slot, Transport] = {}
        for day, row in enumerate(trip.scaffold, start=1):
            if not row.moves:
                continue
            allowed = [
                transport
                for transport in trip.catalogue.options(row.start, row.end, trip.dates[day - 1])
                if transport.mode != trip.banned_mode and (transport.mode == SELF_DRIVING) == own_car
            ]
            if not allowed:
                break
            slots[day, "transportation"] = min(allowed, key=lambda transport: transport.cost(trip.people))
        else:
            choices.append(Solution(dict(slots), sum(transport.cost(trip.people) for transport in slots.values())))
    return min(choices, key=lambda choice: choice.cost, default=None)


def eligible_lodgings(trip: Trip, city: str, nights: int) -> list[Lodging]:
    """Lodgings of a city that a stay of so many nights may use, cheapest for the party first."""
    found = [
        lodging
        for lodging in first_rows(trip.catalogue.lodgings)
        if canonical_city(lodging.city) == canonical_city(city)
        and lodging.minimum_nights <= nights
        and trip.allows(lodging)
    ]
    return sorted(found, key=lambda lodging: lodging.price * lodging.rooms(trip.people))


def cheapest_lodging(trip: Trip) -> Solution | None:
    """One lodging for each stay; None if a city has none that the stay may use."""
    slots: dict[Slot, Lodging] = {}
    cost = 0.0
    for stay in trip.stays:
        eligible = eligible_lodgings(trip, stay.city, stay.nights)
        if not eligible:
            return None
        cost += eligible[0].price * eligible[0].rooms(trip.people) * stay.nights
        slots.update({(stay.first_day + night, "accommodation"): eligible[0] for night in range(stay.nights)})
    return Solution(slots, cost)


def cheapest_meals(trip: Trip) -> Solution | None:
    """Distinct restaurants for all required meals that together serve every cuisine asked for; None if there are none.

    Where the required meals are too few for the cuisines, further meals on days of travel are used.
    """
    needed: dict[str, list[Slot]] = {}
    spare: dict[str, list[Slot]] = {}
    for day, row in enumerate(trip.scaffold, start=1):
        group = spare if row.moves else needed
        group.setdefault(row.keys[1], []).extend((day, meal) for meal in (reversed(MEALS) if row.moves else MEALS))
    wanted = [canonical(cuisine) for cuisine in dict.fromkeys(trip.cuisines)]
    full = (1 << len(wanted)) - 1
    # Best choice by the set of cuisines served so far, city by city: (cost, restaurants of each city).
    best: dict[int, tuple[float, dict[str, tuple[Restaurant, ...]]]] = {0: (0.0, {})}
    by_count: dict[str, dict[tuple[int, int], tuple[float, tuple[Restaurant, ...]]]] = {}
    for city in dict.fromkeys([*needed, *spare]):
        most = len(needed.get(city, ())) + min(len(spare.get(city, ())), MOST_EXTRA_MEALS if wanted else 0)
        by_count[city] = _choices(trip, city, wanted, most)
    for city, choices in by_count.items():
        fewest = len(needed.get(city, ()))
        extended: dict[int, tuple[float, dict[str, tuple[Restaurant, ...]]]] = {}
        for served, (cost, chosen) in best.items():
            for (count, more), (price, restaurants) in choices.items():
                both = served | more
                if count >= fewest and (both not in extended or cost + price < extended[both][0]):
                    extended[both] = cost + price, {**chosen, city: restaurants}
        best = extended
    if full not in best:
        return None
    cost, chosen = best[full]
    slots: dict[Slot, Restaurant] = {}
    for city, restaurants in chosen.items():
        places = [*needed.get(city, ()), *spare.get(city, ())]
        slots.update(dict(zip(places, restaurants, strict=False)))
    return Solution(slots, cost)


def _choices(
    trip: Trip, city: str, wanted: Sequence[str], most: int
) -> dict[tuple[int, int], tuple[float, tuple[Restaurant, ...]]]:
    """Cheapest set of distinct restaurants of a city by their number and by the set of wanted cuisines they serve."""
    choices: dict[tuple[int, int], tuple[float, tuple[Restaurant, ...]]] = {(0, 0): (0.0, ())}
    for restaurant in first_rows(trip.catalogue.restaurants):
        if canonical_city(restaurant.city) != city:
            continue
        serves = {canonical(cuisine) for cuisine in restaurant.cuisines}
        mask = sum(1 << index for index, cuisine in enumerate(wanted) if cuisine in serves)
        price = restaurant.cost * trip.people
        for (count, served), (cost, chosen) in list(choices.items()):
            key = count + 1, served | mask
            if count < most and (key not in choices or cost + price < choices[key][0]):
                choices[key] = cost + price, (*chosen, restaurant)
    return choices


def needed_attractions(trip: Trip) -> Solution | None:
    """A different attraction for every day of stay; None if a city has too few."""
    slots: dict[Slot, Attraction] = {}
    used: set[tuple[str, str]] = set()
    places = first_rows(trip.catalogue.attractions)
    for day, row in enumerate(trip.scaffold, start=1):
        if row.moves:
            continue
        free = (
            place
            for place in places
            if canonical_city(place.city) == row.keys[1] and (canonical(place.name), row.keys[1]) not in used
        )
        place = next(free, None)
        if place is None:
            return None
        used.add((canonical(place.name), row.keys[1]))
        slots[day, "attraction"] = place
    return Solution(slots, 0.0)


def cheapest_plan(trip: Trip) -> Solution | None:
    """A plan of lowest cost that passes every check but perhaps the budget; None if there is none."""
    parts = (cheapest_transport(trip), cheapest_lodging(trip), cheapest_meals(trip), needed_attractions(trip))
    if any(part is None for part in parts):
        return None
    return Solution(
        {slot: entity for part in parts for slot, entity in part.slots.items()}, sum(part.cost for part in parts)
    )


def plan_values(solution: Solution, trip: Trip) -> dict[Slot, str]:
    """The itinerary of a solution: exact cities, entities as values; slots without an entity are left out."""
    cities = {(day, "current_city"): row.current_city for day, row in enumerate(trip.scaffold, start=1)}
    return {**cities, **{slot: value_of(entity) for slot, entity in solution.slots.items()}}


@dataclass(frozen=True)
class BudgetSplit:
    """How the budget is divided between the roles.

    Attributes:
        caps: dollars per agent; they sum to the budget.
        feasible: whether the cheapest plan fits the budget.
    """

    caps: tuple[float, ...]
    feasible: bool


def split_budget(trip: Trip, num_agents: int = 2) -> BudgetSplit:
    """Cap of each agent: its cheapest part and half of what is left; attractions cost nothing.

    In cents, so that the caps sum to the budget exactly; an odd cent goes to agent 0. If the budget is too small,
    the caps are in proportion to the cheapest parts.
    """
    transport, lodging, meals = cheapest_transport(trip), cheapest_lodging(trip), cheapest_meals(trip)
    budget = round(trip.budget * 100)
    known = None not in (transport, lodging, meals)
    floors = [
        round(100 * sum(part.cost for part in parts if part is not None)) for parts in ((transport, lodging), (meals,))
    ]
    rest = budget - sum(floors)
    feasible = known and rest >= 0
    if feasible:
        activities = floors[1] + rest // 2
    else:
        activities = budget * floors[1] // sum(floors) if sum(floors) else budget // 2
    caps = [budget - activities, activities, *([0] * (num_agents - 2))]
    return BudgetSplit(tuple(cap / 100 for cap in caps), feasible and needed_attractions(trip) is not None)
