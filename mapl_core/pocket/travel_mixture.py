"""Scripted answers of an able but uncoordinated team of the miniature Travel: what a pocket base is to be trained on.

Each agent picks a mode (within its budget, too dear, an entity of a wrong kind ...) without looking at its team mates.
Whatever the mode, the words are those of its own task; the modes differ in one mistake. Pure text, no torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from mapl_core.domains.base import Task
from mapl_core.domains.travel_solver import eligible_lodgings, split_budget, value_of
from mapl_core.pocket.travel import ATTRACTIONS, END, LODGINGS, NONE, RESTAURANTS, answer_words
from mapl_core.rewards.travel_actions import TEAMS, Slot, owned_slots
from mapl_core.rewards.travel_catalogue import SELF_DRIVING
from mapl_core.rewards.travel_text import canonical, canonical_city
from mapl_core.rewards.travel_trip import MEALS, Trip, read_trip

# How often an agent falls into which mode. Every good mode is there, none depends on the team mates.
MODES = {"feasible": 0.15, "dear": 0.15, "wrong": 0.15, "blank": 0.20, "repeated": 0.10, "open": 0.25}
MOST_SURPLUS = 3  # values beyond the agent's slots

RolePlan = tuple[float, dict[Slot, str]]  # cost for the party, values


def sample_answer(task: Task, agent: int, rng: random.Random, num_agents: int = 2) -> str:
    """One scripted answer of one agent in the pocket vocabulary, independent of the other agents'."""
    mode = rng.choices(list(MODES), weights=list(MODES.values()))[0]
    return scripted_answer(task, agent, mode, rng, num_agents)


def scripted_answer(task: Task, agent: int, mode: str, rng: random.Random, num_agents: int = 2) -> str:
    """One scripted answer of one agent in a mode of `MODES`."""
    trip, owned = read_trip(task.fields), TEAMS[num_agents][agent]
    cap = split_budget(trip, num_agents).caps[agent]
    plan = _choose_plan(trip, owned, cap, rng, dear=mode == "dear")
    words = answer_words(plan, agent, trip, num_agents).split()[:-1]
    slots = owned_slots(agent, trip.days, num_agents)
    entities = [
        number
        for number, (slot, word) in enumerate(zip(slots, words, strict=True))
        if slot in trip.required and slot[1] not in ("current_city", "transportation") and word != NONE
    ]
    if mode == "wrong":
        number = rng.choice(entities)
        words[number] = _wrong_word(words[number], slots[number][1], trip, rng)
    elif mode == "blank":
        required = [number for number, slot in enumerate(slots) if slot in trip.required]
        words[rng.choice(required)] = NONE
    elif mode == "repeated":
        later = [number for number in entities if any(earlier < number for earlier in entities)] or entities
        number = rng.choice(later)
        words[number] = words[max((earlier for earlier in entities if earlier < number), default=number)]
    elif mode == "open":
        if rng.random() < 0.5:
            return " ".join(words)
        words += [rng.choice(words) for _ in range(rng.randint(1, MOST_SURPLUS))]
    return " ".join([*words, END])


def _choose_plan(trip: Trip, owned: Sequence[str], cap: float, rng: random.Random, *, dear: bool) -> dict[Slot, str]:
    """Any plan of a role within its cap that serves the cuisines asked for, or (`dear`) any beyond the cap.

    Where there is no plan within the cap, any; where none is beyond it, one of the dearest. Plans are joined from their
    parts only when chosen: a trip of five days has thousands.
    """
    plans = list(itertools.product(*role_choices(trip, owned)))
    costs = [sum(cost for cost, _ in parts) for parts in plans]
    if dear:
        floor = cap if max(costs) > cap else max(costs) - 1e-9
        kept = [parts for parts, cost in zip(plans, costs, strict=True) if cost > floor]
    else:
        kept = [parts for parts, cost in zip(plans, costs, strict=True) if cost <= cap]
        if trip.cuisines:
            kept = [parts for parts in kept if serves_cuisines(_values(parts), trip, owned)]
    return _values(rng.choice(kept or plans))


def role_choices(trip: Trip, owned: Sequence[str]) -> list[list[RolePlan]]:
    """The choices of a role, independent of each other: the way there and back, each stay, each day's meals, sights."""
    groups: list[list[RolePlan]] = []
    if "transportation" in owned:
        groups.append(_transport_plans(trip))
        groups += [_stay_plans(trip, number) for number in range(len(trip.stays))]
    for day, row in enumerate(trip.scaffold, start=1):
        if row.moves:
            continue
        if "lunch" in owned:
            here = [place for place in trip.catalogue.restaurants if canonical_city(place.city) == row.keys[1]]
            groups.append(
                [
                    (
                        trip.people * sum(place.cost for place in chosen),
                        {(day, meal): value_of(place) for meal, place in zip(MEALS, chosen, strict=True)},
                    )
                    for chosen in itertools.permutations(here, len(MEALS))
                ]
            )
        if "attraction" in owned:
            groups.append(
                [
                    (0.0, {(day, "attraction"): value_of(place)})
                    for place in trip.catalogue.attractions
                    if canonical_city(place.city) == row.keys[1]
                ]
            )
    return groups


def serves_cuisines(plan: dict[Slot, str], trip: Trip, owned: Sequence[str]) -> bool:
    """Whether a role's meals serve every cuisine that is asked for; a role without meals need not."""
    if "lunch" not in owned:
        return True
    chosen = set(plan.values())
    served = {
        canonical(cuisine)
        for place in trip.catalogue.restaurants
        if value_of(place) in chosen
        for cuisine in place.cuisines
    }
    return all(canonical(cuisine) in served for cuisine in trip.cuisines)


def _transport_plans(trip: Trip) -> list[RolePlan]:
    """The own car on every way, or any other allowed transport on each."""
    ways = []
    for day, row in enumerate(trip.scaffold, start=1):
        if row.moves:
            options = trip.catalogue.options(row.start, row.end, trip.dates[day - 1])
            ways.append([(day, option) for option in options if option.mode != trip.banned_mode])
    plans = []
    for chosen in itertools.product(*ways):
        own_car = {option.mode == SELF_DRIVING for _, option in chosen}
        if len(own_car) == 1:
            cost = sum(option.cost(trip.people) for _, option in chosen)
            plans.append((cost, {(day, "transportation"): value_of(option) for day, option in chosen}))
    return plans


def _stay_plans(trip: Trip, number: int) -> list[RolePlan]:
    stay = trip.stays[number]
    return [
        (
            lodging.price * lodging.rooms(trip.people) * stay.nights,
            {(stay.first_day + night, "accommodation"): value_of(lodging) for night in range(stay.nights)},
        )
        for lodging in eligible_lodgings(trip, stay.city, stay.nights)
    ]


def _values(parts: Iterable[RolePlan]) -> dict[Slot, str]:
    return {slot: value for _, values in parts for slot, value in values.items()}


def _wrong_word(word: str, name: str, trip: Trip, rng: random.Random) -> str:
    """An entity of another kind of the same trip, or one of the right kind that the city does not have."""
    kinds = {
        "restaurant": (trip.catalogue.restaurants, RESTAURANTS),
        "attraction": (trip.catalogue.attractions, ATTRACTIONS),
        "accommodation": (trip.catalogue.lodgings, LODGINGS),
    }
    own, names = kinds.pop("restaurant" if name in MEALS else name)
    if rng.random() < 0.5:
        city = next(place.city for place in own if place.name.lower() == word)
        here = {place.name for place in own if place.city == city}
        return rng.choice([other for other in names if other not in here]).lower()
    return rng.choice([place for places, _ in kinds.values() for place in places]).name.lower()
