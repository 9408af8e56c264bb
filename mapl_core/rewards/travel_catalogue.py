"""What a trip may use: restaurants, attractions, lodgings and transport, as its reference data list them.

Pure data. The parser that fills it from the reference data is `travel_reference`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from mapl_core.rewards.travel_text import canonical, canonical_city

FLIGHT, SELF_DRIVING, TAXI = "flight", "self-driving", "taxi"
MODES = (FLIGHT, SELF_DRIVING, TAXI)


@dataclass(frozen=True)
class Restaurant:
    """A place to eat; `cost` is in dollars for one person and meal."""

    name: str
    city: str
    cost: float
    cuisines: tuple[str, ...]


@dataclass(frozen=True)
class Attraction:
    """Something to see; it costs nothing."""

    name: str
    city: str


@dataclass(frozen=True)
class Lodging:
    """A place to stay; `price` is in dollars a night for one room of `occupancy` people."""

    name: str
    city: str
    price: float
    room_type: str
    rules: tuple[str, ...]
    minimum_nights: float
    occupancy: int

    def rooms(self, people: int) -> int:
        return -(-people // max(self.occupancy, 1))


@dataclass(frozen=True)
class Flight:
    """A scheduled flight; `price` is in dollars for one person."""

    number: str
    origin: str
    destination: str
    date: str
    price: float

    @property
    def mode(self) -> str:
        return FLIGHT

    def cost(self, people: int) -> float:
        return self.price * people


@dataclass(frozen=True)
class Ride:
    """A way by car, `mode` self-driving (5 people a car) or taxi (4); `price` is in dollars for one car."""

    mode: str
    origin: str
    destination: str
    price: float

    def cost(self, people: int) -> float:
        seats = 5 if self.mode == SELF_DRIVING else 4
        return self.price * -(-people // seats)


Transport = Flight | Ride
Place = TypeVar("Place", Restaurant, Attraction, Lodging)


@dataclass(frozen=True)
class Catalogue:
    """The reference data of one trip.

    Attributes:
        restaurants, attractions, lodgings: in the order of the reference data, repeated names included.
        flights: every scheduled flight.
        rides: self-driving and taxi where they are offered.
        searches: (origin, destination, date) of every dated flight description, with or without a flight: the route.
        cities: names of all cities that the reference data mention, each once.
    """

    restaurants: tuple[Restaurant, ...] = ()
    attractions: tuple[Attraction, ...] = ()
    lodgings: tuple[Lodging, ...] = ()
    flights: tuple[Flight, ...] = ()
    rides: tuple[Ride, ...] = ()
    searches: tuple[tuple[str, str, str], ...] = ()
    cities: tuple[str, ...] = ()

    @cached_property
    def restaurants_by_name(self) -> dict[tuple[str, str], Restaurant]:
        return _by_name(self.restaurants)

    @cached_property
    def attractions_by_name(self) -> dict[tuple[str, str], Attraction]:
        return _by_name(self.attractions)

    @cached_property
    def lodgings_by_name(self) -> dict[tuple[str, str], Lodging]:
        return _by_name(self.lodgings)

    @cached_property
    def transport_by_route(self) -> dict[tuple[Any, ...], list[Transport]]:
        """Transport by (mode, flight number or "", start, end), all canonical."""
        found: dict[tuple[Any, ...], list[Transport]] = {}
        for transport in (*self.flights, *self.rides):
            number = canonical(transport.number) if isinstance(transport, Flight) else ""
            route = canonical_city(transport.origin), canonical_city(transport.destination)
            found.setdefault((transport.mode, number, *route), []).append(transport)
        return found

    @cached_property
    def known_cities(self) -> frozenset[str]:
        return frozenset(canonical_city(city) for city in self.cities)

    @property
    def has_all_kinds(self) -> bool:
        """Whether there is something to eat, to see, to stay at and to travel with."""
        return bool(self.restaurants and self.attractions and self.lodgings and (self.flights or self.rides))

    def options(self, origin: str, destination: str, date: str | None = None) -> list[Transport]:
        """All transport on one way, flights only on `date` if it is given."""
        wanted = canonical_city(origin), canonical_city(destination)
        return [
            transport
            for (_, _, *route), found in self.transport_by_route.items()
            if tuple(route) == wanted
            for transport in found
            if date is None or not isinstance(transport, Flight) or transport.date == date
        ]


def _by_name(places: Iterable[Place]) -> dict[tuple[str, str], Place]:
    """The first row of every name and city: it decides price and rules where a name comes twice."""
    found: dict[tuple[str, str], Place] = {}
    for place in places:
        found.setdefault((canonical(place.name), canonical_city(place.city)), place)
    return found


def first_rows(places: Iterable[Place]) -> list[Place]:
    """Places without those whose name and city came before."""
    return list(_by_name(places).values())
