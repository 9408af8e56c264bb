"""A trip as the oracle sees it: the request, its catalogue, and the scaffold of days that follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mapl_core.rewards.travel_actions import FIELDS, Slot
from mapl_core.rewards.travel_catalogue import FLIGHT, SELF_DRIVING, TAXI, Catalogue, Lodging
from mapl_core.rewards.travel_reference import parse_reference
from mapl_core.rewards.travel_text import canonical, canonical_city

CONSTRAINTS = ("house rule", "cuisine", "room type", "transportation")
BANS = {"no flight": FLIGHT, "no self-driving": SELF_DRIVING, "no taxi": TAXI}
MEALS = ("breakfast", "lunch", "dinner")
COST_FIELDS = ("transportation", *MEALS, "accommodation")


@dataclass(frozen=True)
class ScaffoldDay:
    """Where a day starts and ends, as the catalogue's names of the cities; equal on a day of stay."""

    start: str
    end: str

    @property
    def moves(self) -> bool:
        return canonical_city(self.start) != canonical_city(self.end)

    @property
    def current_city(self) -> str:
        """The exact value of the slot current_city."""
        return f"from {self.start} to {self.end}" if self.moves else self.end

    @cached_property
    def keys(self) -> tuple[str, str]:
        return canonical_city(self.start), canonical_city(self.end)


@dataclass(frozen=True)
class Stay:
    """Consecutive nights in one city: the first night's day, and how many nights."""

    city: str
    first_day: int
    nights: int


@dataclass(frozen=True)
class Trip:
    """One task of the Travel domain, read for scoring.

    Attributes:
        org, dest: city of departure; destination, a city or (several cities) a state or nothing.
        dates: one ISO date per day.
        cities_asked: how many cities the trip visits.
        people: size of the party.
        budget: dollars for everything.
        house_rule: what lodgings must allow, such as "smoking"; "" for none.
        cuisines: cuisines that the meals must cover.
        room_type: "entire room", "private room", "shared room", "not shared room"; "" for none.
        banned_mode: mode of transport that is not allowed; "" for none.
        catalogue: the reference data.
        reference_text: the reference data as the agents' material shows them, to find copying.
    """

    org: str
    dest: str
    dates: tuple[str, ...]
    cities_asked: int
    people: int
    budget: float
    house_rule: str
    cuisines: tuple[str, ...]
    room_type: str
    banned_mode: str
    catalogue: Catalogue
    reference_text: str = ""

    @property
    def days(self) -> int:
        return len(self.dates)

    @cached_property
    def known_cities(self) -> frozenset[str]:
        return self.catalogue.known_cities | {canonical_city(self.org)}

    @cached_property
    def scaffold(self) -> tuple[ScaffoldDay, ...]:
        """The route: on every date the searched way that leaves the city reached so far, else the first by name."""
        current, rows = self.org, []
        for date in self.dates:
            ways = sorted({(start, end) for start, end, day in self.catalogue.searches if day == date})
            leaving = [way for way in ways if canonical_city(way[0]) == canonical_city(current)]
            start, end = next(iter(leaving or ways), (current, current))
            rows.append(ScaffoldDay(start, end))
            current = end
        return tuple(rows)

    @cached_property
    def required(self) -> tuple[Slot, ...]:
        """Slots a plan must fill: cities; transport on move days; meals and a sight on stays; nights but the last."""
        found: list[Slot] = []
        for day, row in enumerate(self.scaffold, start=1):
            needed = {"current_city", *(("transportation",) if row.moves else (*MEALS, "attraction"))}
            if day < self.days:
                needed.add("accommodation")
            found += [(day, name) for name in FIELDS if name in needed]
        return tuple(found)

    @cached_property
    def stays(self) -> tuple[Stay, ...]:
        """The nights of the scaffold, city by city."""
        found: list[Stay] = []
        for day, row in enumerate(self.scaffold[:-1], start=1):
            if found and canonical_city(found[-1].city) == row.keys[1]:
                found[-1] = Stay(found[-1].city, found[-1].first_day, found[-1].nights + 1)
            else:
                found.append(Stay(row.end, day, 1))
        return tuple(found)

    def allows(self, lodging: Lodging) -> bool:
        """Whether a lodging keeps the house rule and the room type that the request asks for."""
        return self.keeps_house_rule(lodging) and self.keeps_room_type(lodging)

    def keeps_house_rule(self, lodging: Lodging) -> bool:
        return not self.house_rule or f"no {canonical(self.house_rule)}" not in map(canonical, lodging.rules)

    def keeps_room_type(self, lodging: Lodging) -> bool:
        wanted, offered = canonical(self.room_type), canonical(lodging.room_type)
        if not wanted:
            return True
        if wanted == "not shared room":
            return offered != "shared room"
        return offered == ("entire home/apt" if wanted == "entire room" else wanted)


class TaskFault(ValueError):
    """A task that cannot be scored; the message says why."""


def read_trip(fields: Mapping[str, Any]) -> Trip:
    """The trip of a task's fields (see `mapl_core.domains.travel`).

    Raises:
        TaskFault: if the budget is missing or not positive, the rule for transport is unknown, the reference data
            lack restaurants, attractions, lodgings, transport or a dated flight description, or there are fewer dates
            than days.
    """
    constraints = fields.get("local_constraint") or {}
    budget = _amount(fields.get("budget"))
    if budget is None or budget <= 0:
        raise TaskFault(f"the budget is {fields.get('budget')!r}; it must be a positive amount")
    ban = canonical(_given(constraints, "transportation"))
    if ban and ban not in BANS:
        raise TaskFault(f"unknown rule for transport {ban!r}; known: {', '.join(BANS)}")
    dates, days = tuple(str(date) for date in fields.get("dates") or ()), int(fields.get("days") or 0)
    if days < 1 or len(dates) < days:
        raise TaskFault(f"{len(dates)} dates for {days} days")
    catalogue = _catalogue(fields.get("records"))
    for kind in ("restaurants", "attractions", "lodgings"):
        if not getattr(catalogue, kind):
            raise TaskFault(f"the reference data list no {kind}")
    if not catalogue.flights and not catalogue.rides:
        raise TaskFault("the reference data list no transport")
    if not catalogue.searches:
        raise TaskFault("the reference data hold no dated flight description")
    cuisines = constraints.get("cuisine") or ()
    return Trip(
        org=str(fields["org"]),
        dest=str(fields.get("dest") or ""),
        dates=dates[:days],
        cities_asked=int(fields.get("visiting_city_number") or 1),
        people=max(1, int(fields.get("people_number") or 1)),
        budget=budget,
        house_rule=_given(constraints, "house rule"),
        cuisines=(cuisines,) if isinstance(cuisines, str) else tuple(cuisines),
        room_type=_given(constraints, "room type"),
        banned_mode=BANS.get(ban, ""),
        catalogue=catalogue,
        reference_text=str(fields.get("reference_text") or ""),
    )


def _given(constraints: Mapping[str, Any], name: str) -> str:
    value = constraints.get(name)
    return "" if not value or value == "-" else str(value).strip()


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        amount = float(re.sub(r"[$,\s]", "", str(value)))
    except ValueError:
        return None
    return amount if amount == amount and amount != float("inf") else None


_CATALOGUES: dict[int, tuple[Any, Catalogue]] = {}  # by the identity of the records, which are kept with them
_MOST_CATALOGUES = 512


def _catalogue(records: Any) -> Catalogue:
    """The parsed records of a task.

    A run scores one task thousands of times, and parsing would take most of it: records are parsed once and must not be
    changed in place afterwards (a task is frozen).
    """
    if isinstance(records, Catalogue):
        return records
    if not isinstance(records, Sequence | Mapping) or not records:
        raise TaskFault(f"the reference data are missing: records is {type(records).__name__}")
    known = _CATALOGUES.get(id(records))
    if known is not None and known[0] is records:
        return known[1]
    try:
        catalogue = parse_reference(records)
    except ValueError as error:
        raise TaskFault(str(error)) from error
    _CATALOGUES[id(records)] = records, catalogue
    while len(_CATALOGUES) > _MOST_CATALOGUES:
        _CATALOGUES.pop(next(iter(_CATALOGUES)), None)
    return catalogue
