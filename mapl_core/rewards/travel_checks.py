"""What is right and wrong with an itinerary: slot validity, eight commonsense checks, hard constraints, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.rewards.travel_actions import FIELDS, Slot
from mapl_core.rewards.travel_catalogue import FLIGHT, SELF_DRIVING, TAXI, Flight, Lodging, Restaurant, Transport
from mapl_core.rewards.travel_text import BLANK, canonical, canonical_city, is_blank, split_entity, split_route
from mapl_core.rewards.travel_trip import COST_FIELDS, MEALS, Trip

TOLERANCE = 1e-9
COMMONSENSE = (
    "reasonable_route",
    "restaurant_diversity",
    "attraction_diversity",
    "minimum_nights",
    "transport_consistency",
    "within_current_city",
    "within_reference",
    "complete_information",
)


@dataclass(frozen=True)
class Check:
    """A soft value between 0 and 1, and whether the check passes."""

    value: float
    passed: bool


@dataclass(frozen=True)
class Entity:
    """One thing that a plan names: where it stands, what it is in the catalogue (None if unknown), in a right city."""

    slot: Slot
    match: Any
    in_place: bool


@dataclass(frozen=True)
class Evaluation:
    """An itinerary under all checks (paper, appendix C.3).

    Attributes:
        valid: whether each of the 7 D slots is valid; missing slots read "-".
        entities: everything the plan names, in slot order.
        grounding: g, the share of required slots that are valid.
        coverage: share of the 7 D slots that the plan has, "-" included.
        f1: harmonic mean of the share of entities in the catalogue and of g.
        cost: dollars for all entities found.
        commonsense: the eight checks of `COMMONSENSE`.
        hard: budget, and whichever of cuisine, house rule, room type and transportation are asked for.
    """

    valid: dict[Slot, bool]
    entities: tuple[Entity, ...]
    grounding: float
    coverage: float
    f1: float
    cost: float
    commonsense: dict[str, Check]
    hard: dict[str, Check]

    @property
    def passes(self) -> bool:
        """`pass`: all commonsense checks hold."""
        return all(check.passed for check in self.commonsense.values())

    @property
    def succeeds(self) -> bool:
        """`success`: all commonsense checks and hard constraints hold."""
        return self.passes and all(check.passed for check in self.hard.values())

    @property
    def quality(self) -> float:
        """Q: completeness, grounding and the checks, of which little counts before slots are valid."""
        gate = 0.10 + 0.90 * self.grounding
        commonsense, hard = (
            sum(check.value for check in checks.values()) / len(checks) for checks in (self.commonsense, self.hard)
        )
        return (
            gate * 0.20 * self.coverage
            + 0.25 * self.grounding
            + 0.15 * self.f1
            + gate * (0.25 * commonsense + 0.15 * hard)
        )


def evaluate_plan(plan: Mapping[Slot, str], trip: Trip) -> Evaluation:
    """Check an itinerary: the value of each slot (day from 1, field); missing slots read "-"."""
    values = {(day, name): plan.get((day, name), BLANK) for day in range(1, trip.days + 1) for name in FIELDS}
    found = {slot: _entities(slot, value, trip) for slot, value in values.items() if slot[1] != "current_city"}
    routes = [_read_city(values[day, "current_city"], trip) for day in range(1, trip.days + 1)]
    valid = {slot: _is_valid(slot, value, found.get(slot, ()), routes, trip) for slot, value in values.items()}
    entities = tuple(entity for slot in values for entity in found.get(slot, ()))
    filled = [slot for slot in trip.required if not is_blank(values[slot])]
    grounding = _share([valid[slot] for slot in trip.required])
    precision = _share([entity.match is not None for entity in entities])
    coverage = sum(slot in values for slot in plan) / len(values)
    cost = sum(_cost(entity, trip.people) for entity in entities)
    named = [city for route in routes if route for city in dict.fromkeys(route)]
    known_named = _share([city in trip.known_cities for city in named])
    values_of_checks = {
        "reasonable_route": _route_value(routes, known_named, trip),
        "restaurant_diversity": _diversity(entities, MEALS),
        "attraction_diversity": _diversity(entities, ("attraction",)),
        "minimum_nights": _nights_value(entities),
        "transport_consistency": _transport_value(valid, entities, trip),
        "within_current_city": _share([entity.in_place for entity in entities]),
        "within_reference": (precision + known_named + trip.catalogue.has_all_kinds) / 3,
        "complete_information": (coverage + len(filled) / len(trip.required)) / 2,
    }
    f1 = 2 * precision * grounding / (precision + grounding) if precision > 0 and grounding > 0 else 0.0
    return Evaluation(
        valid,
        entities,
        grounding,
        coverage,
        f1,
        cost,
        {name: Check(value, value >= 1 - TOLERANCE) for name, value in values_of_checks.items()},
        _hard_checks(entities, cost, grounding, trip),
    )


# Slots ---------------------------------------------------------------------------------------------------------------


def _entities(slot: Slot, value: str, trip: Trip) -> tuple[Entity, ...]:
    """Everything that a slot names; an unknown thing is named too."""
    day, name = slot
    if is_blank(value):
        return ()
    row = trip.scaffold[day - 1]
    if name == "transportation":
        match = match_transport(value, trip.dates[day - 1], trip)
        return (Entity(slot, match, match is not None and _fits_day(match, day, trip)),)
    places = {
        "attraction": trip.catalogue.attractions_by_name,
        "accommodation": trip.catalogue.lodgings_by_name,
    }.get(name, trip.catalogue.restaurants_by_name)
    right = {row.keys[1]} if name == "accommodation" else set(row.keys)
    parts = [value]
    if name == "attraction" and split_entity(value) not in places:
        parts = [part for part in value.split(";") if part.strip()] or [value]
    matches = [places.get(key) if (key := split_entity(part)) else None for part in parts]
    return tuple(Entity(slot, match, match is not None and canonical_city(match.city) in right) for match in matches)


def match_transport(value: str, date: str, trip: Trip) -> Transport | None:
    """The catalogue's entry for a transport value, the flight of that date if there is one; None if there is none."""
    head, _, rest = canonical(value).partition(",")
    head, route = head.strip(), split_route(rest.strip().partition(",")[0], trip.known_cities)
    if route is None:
        return None
    mode, number = head, ""
    if head.startswith("flight number:"):
        mode, number = FLIGHT, head.removeprefix("flight number:").strip()
    found = trip.catalogue.transport_by_route.get((mode, number, *route), [])
    on_date = [transport for transport in found if isinstance(transport, Flight) and transport.date == date]
    return next(iter(on_date or found), None)


def _fits_day(transport: Transport, day: int, trip: Trip) -> bool:
    row = trip.scaffold[day - 1]
    route = canonical_city(transport.origin), canonical_city(transport.destination)
    dated = not isinstance(transport, Flight) or transport.date == trip.dates[day - 1]
    return row.moves and route == row.keys and dated


def _read_city(value: str, trip: Trip) -> tuple[str, str] | None:
    """Start and end that a current_city names, canonical and equal for one city; None if it cannot be read."""
    if is_blank(value):
        return None
    text = canonical(value)
    if not text.startswith("from "):
        city = canonical_city(value)
        return city, city
    route = split_route(value, trip.known_cities)
    return route if route is not None and route[0] != route[1] else None


def _is_valid(
    slot: Slot, value: str, entities: Sequence[Entity], routes: Sequence[tuple[str, str] | None], trip: Trip
) -> bool:
    day, name = slot
    row = trip.scaffold[day - 1]
    if name == "current_city":
        return routes[day - 1] == row.keys and set(row.keys) <= trip.known_cities
    if is_blank(value):
        return not row.moves if name == "transportation" else slot not in trip.required
    return bool(entities) and all(entity.in_place for entity in entities)


# Commonsense ---------------------------------------------------------------------------------------------------------


def _route_value(routes: Sequence[tuple[str, str] | None], known_named: float, trip: Trip) -> float:
    org, dest = canonical_city(trip.org), canonical_city(trip.dest)
    current, continuous = org, []
    visited = [org]  # cities in the order in which continuous rows reach them
    for route in routes:
        continuous.append(route is not None and route[0] == current)
        if route is not None and continuous[-1]:
            current = route[1]
            if current != visited[-1]:
                visited.append(current)
    between = visited[1:-1]
    reached = set(visited) - {org}
    first = routes[0]
    return _share(
        [
            _share([route is not None for route in routes]),
            _share(continuous),
            first is not None and first[0] == org,
            all(continuous) and current == org,
            len(reached) == trip.cities_asked,
            known_named,
            len(between) == len(set(between)),
            not dest or dest not in trip.known_cities or dest in reached,
            _share([route == row.keys for route, row in zip(routes, trip.scaffold, strict=True)]),
        ]
    )


def _diversity(entities: Sequence[Entity], fields: Sequence[str]) -> float:
    chosen = [_key(entity.match) for entity in entities if entity.slot[1] in fields and entity.match is not None]
    return len(set(chosen)) / len(chosen) if chosen else 1.0


def _key(place: Any) -> tuple[str, str]:
    return canonical(place.name), canonical_city(place.city)


def _nights_value(entities: Sequence[Entity]) -> float:
    """Share of the runs of one lodging on consecutive days that are as long as the lodging asks."""
    runs: list[tuple[Lodging, int, int]] = []
    for entity in entities:
        if not isinstance(entity.match, Lodging):
            continue
        day = entity.slot[0]
        if runs and runs[-1][2] == day - 1 and _key(runs[-1][0]) == _key(entity.match):
            runs[-1] = (runs[-1][0], runs[-1][1], day)
        else:
            runs.append((entity.match, day, day))
    kept = [last - first + 1 >= lodging.minimum_nights - TOLERANCE for lodging, first, last in runs]
    return _share(kept) if kept else 1.0


def _transport_value(valid: Mapping[Slot, bool], entities: Sequence[Entity], trip: Trip) -> float:
    modes = _modes(entities)
    if SELF_DRIVING in modes and modes & {FLIGHT, TAXI}:
        return 0.0  # the own car would be left behind
    return _share([valid[day, "transportation"] for day in range(1, trip.days + 1)])


def _modes(entities: Sequence[Entity]) -> set[str]:
    return {entity.match.mode for entity in entities if isinstance(entity.match, Transport)}


# Hard constraints ----------------------------------------------------------------------------------------------------


def _hard_checks(entities: Sequence[Entity], cost: float, grounding: float, trip: Trip) -> dict[str, Check]:
    checks = {"budget": _budget(entities, cost, grounding, trip)}

    def add(name: str, value: float) -> None:
        checks[name] = Check(value, value >= 1 - TOLERANCE)

    if trip.cuisines:
        served = {
            canonical(cuisine)
            for entity in entities
            if isinstance(entity.match, Restaurant)
            for cuisine in entity.match.cuisines
        }
        add("cuisine", _share([canonical(cuisine) in served for cuisine in trip.cuisines]))
    lodgings = [entity.match for entity in entities if isinstance(entity.match, Lodging)]
    if trip.house_rule:
        add("house rule", _share([trip.keeps_house_rule(lodging) for lodging in lodgings]))
    if trip.room_type:
        add("room type", _share([trip.keeps_room_type(lodging) for lodging in lodgings]))
    if trip.banned_mode:
        add("transportation", float(trip.banned_mode not in _modes(entities)))
    return checks


def _budget(entities: Sequence[Entity], cost: float, grounding: float, trip: Trip) -> Check:
    matched = {entity.slot: entity.match is not None for entity in entities if entity.slot[1] in COST_FIELDS}
    needed = {slot for slot in trip.required if slot[1] in COST_FIELDS} | set(matched)
    known = sum(matched.get(slot, False) for slot in needed) / len(needed) if needed else 0.0
    affordable = cost <= trip.budget + TOLERANCE
    margin = 1.0 if affordable else max(0.0, 1.0 - (cost - trip.budget) / trip.budget)
    everything_known = all(entity.match is not None for entity in entities)
    return Check(grounding * known * margin, everything_known and affordable and grounding >= 1 - TOLERANCE)


def _cost(entity: Entity, people: int) -> float:
    match = entity.match
    if isinstance(match, Restaurant):
        return match.cost * people
    if isinstance(match, Lodging):
        return match.price * match.rooms(people)
    return match.cost(people) if isinstance(match, Transport) else 0.0


def _share(holds: Sequence[float]) -> float:
    return sum(holds) / len(holds) if holds else 0.0
