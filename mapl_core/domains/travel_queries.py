"""From a row of TravelPlanner to the fields of a task; what a row does not state is read from the words of its query.

The local rows lack the structured columns of the hub's copy. Dates and cities then come from the dated flight
descriptions; budget, people and constraints from the query, each with the words that it was read from.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

from mapl_core.rewards.travel_reference import FLIGHT_TITLE, parse_reference, read_records
from mapl_core.rewards.travel_text import PLAIN_SIGNS, canonical_city
from mapl_core.rewards.travel_trip import CONSTRAINTS

CUISINES = ("Chinese", "American", "Italian", "Mexican", "Indian", "Mediterranean", "French")
COUNTS = {
    word: count
    for count, word in enumerate(
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split(), start=1
    )
}
COUNT = rf"(?P<count>\d{{1,2}}|{'|'.join(COUNTS)}|a single|single)"
TRAVELLERS = (
    r"(?:people|persons?|travell?ers?|individuals?|adults?|friends|guests|members|tourists|participants|passengers"
    r"|companions|visitors|of us)"
)
# The first pattern that is found decides: a stated number before words that only imply one.
PEOPLE = tuple(
    (re.compile(pattern, re.IGNORECASE), count)
    for pattern, count in (
        (rf"\b(?:group|party|family|team|crew) of {COUNT}\b", None),
        (rf"\b{COUNT}[\s-]+(?:(?!days?|nights?|weeks?|cit|months?|hours?)\w+\s+)?{TRAVELLERS}\b", None),
        (rf"\bfor (?:the |all )?{COUNT}\b(?![\s-]*(?:\w+[\s-]+)?(?:days?|nights?|weeks?|cit(?:y|ies)|months?|hours?))",
         None),
        (r"\b(?:solo|alone|by myself|just me|for myself|single|individual|on my own)\b", 1),
        (r"\b(?:couple|pair|duo|both of us)\b", 2),
        (r"\bmy (?:wife|husband|spouse|partner|friend|girlfriend|boyfriend|fianc\w+|mother|father|mom|dad|brother"
         r"|sister|son|daughter|colleague)(?:,)? and (?:I|me|myself)\b", 2),
        (r"\b(?:myself|me|I) and my (?:wife|husband|spouse|partner|friend|girlfriend|boyfriend|fianc\w+|mother|father"
         r"|mom|dad|brother|sister|son|daughter|colleague)\b", 2),
        (r"\btrio\b", 3),
        (r"\bquartet\b", 4),
    )
)  # fmt: skip
AMOUNT = re.compile(
    r"(?:\$|\bUSD?\s*\$?)\s*(?P<before>\d+(?:,\d{3})*(?:\.\d+)?)(?P<thousand>\s*k\b|\s+thousand\b)?"
    r"|(?P<after>\d+(?:,\d{3})*(?:\.\d+)?)(?P<thousands>\s*k\b|\s+thousand\b)?\s*(?:US\s+)?(?:dollars\b|USD\b|bucks\b)",
    re.IGNORECASE,
)
MONEY_WORDS = re.compile(r"budget|spend|afford|cost|total|funds|limit", re.IGNORECASE)

CHILDREN = r"\b(?:children|child|kids?|toddlers?|infants?)\b"
HOUSE_RULES = (
    ("smoking", r"(?<!no )(?<!non-)(?<!non )\bsmok(?:ing|ers?|e)\b(?![\s-]*free)"),
    ("parties", r"\bparties\b|\bparty[\s-]friendly\b|\b(?:throw|host|hold|have|allow\w*|permit\w*)\s+(?:\w+\s+){0,2}"
                r"party\b(?! of)|\bpartying\b"),
    ("children under 10", rf"{CHILDREN}[\s-]+(?:\w+\s+){{0,2}}(?:under|below|younger)\b[^.,;]{{0,24}}\b(?:10|ten)\b"),
    ("children under 10", CHILDREN),
    ("pets", r"\bpets?\b|\bdogs?\b|\bcats?\b|\bpuppy\b"),
    ("visitors", rf"(?<!\d )(?<!{')(?<!'.join(f'{word} ' for word in COUNTS)})\bvisitors?\b"),
)  # fmt: skip
NEGATION = r"(?:no|not|non|\w+n't|cannot|without|avoid\w*|never|exclud\w+|except|instead of|rather than|other than)"
# Between the negation and what it denies: no new clause, and nothing that turns it into a preference.
GAP = (
    r"(?:(?!\b(?:but|prefer\w*|rather|only|would|will|need|like|preference\w*|restriction\w*|requirement\w*"
    r"|specific)\b)[^.;,]){0,40}?"
)
ROOM_TYPES = (
    ("not shared room", rf"\b{NEGATION}\b[\s-]+(?:\w+\s+){{0,3}}?shar(?:ed?|ing)\b|\bunshared\b"
                        r"|\bno(?:t)? shar(?:ed?|ing)\b"),
    ("entire room", r"\b(?:entire|whole)\s+(?:\w+\s+)?(?:rooms?|homes?|apartments?|apts?|houses?|places?|units?|spaces?"
                    r"|accommodations?|lodgings?|suites?|residences?|propert(?:y|ies)|flats?|villas?)\b"),
    ("private room", r"\bprivate\b(?!\s+(?:cars?|vehicles?|transport\w*|jets?|tours?))"),
    ("shared room", r"\bshar(?:ed|ing|e)\b(?=[^.;,]{0,30}\b(?:rooms?|accommodations?|spaces?|lodgings?|bedrooms?"
                    r"|dorm\w*|stays?)\b)|\brooms?[^.;,]{0,20}\bshared\b"),
)  # fmt: skip
AIR = r"(?:flights?|fly(?:ing)?|air[\s-]?travel\w*|air[\s-]?planes?|planes?|by air|airlines?|air transport\w*|aviation)"
DRIVE = r"(?:self[\s-]?driv\w+|driv(?:e|ing)(?! distance)|by car|rental cars?|car rentals?|rent(?:ing)? (?:a )?cars?)"
CAB = r"(?:taxis?|cabs?)"
DENIED = r"(?:not|\w+n't|avoid\w*|out of the question|exclud\w+|off the table|ruled out)"
BANNED = tuple(
    (rule, rf"\b{NEGATION}\b{GAP}\b{mode}\b|\b{mode}\s+(?:\w+\s+){{0,2}}?{DENIED}\b")
    for rule, mode in (("no flight", AIR), ("no self-driving", DRIVE), ("no taxi", CAB))
)


@dataclass(frozen=True)
class Reading:
    """What a query says, and the words that say it.

    Attributes:
        budget: dollars, None if the query names no amount.
        people: size of the party, 1 if nothing is said.
        constraint: the four constraints of `CONSTRAINTS`; None where nothing is asked for.
        words: the words that each value was read from, by its name.
    """

    budget: float | None
    people: int
    constraint: dict[str, Any]
    words: dict[str, str] = field(default_factory=dict)


def read_query(query: str, cities: Sequence[str] = ()) -> Reading:
    """Read budget, people and constraints from the words of a request.

    Args:
        query: the request in English.
        cities: names of the trip's cities, whose words do not count ("American Fork" is no cuisine).
    """
    text = query.translate(PLAIN_SIGNS)
    for city in sorted(cities, key=len, reverse=True):
        if city.strip():
            text = re.sub(rf"\b{re.escape(city)}\b", lambda found: "_" * len(found.group()), text)
    words: dict[str, str] = {}
    budget = _read_budget(text, words)
    people = _read_people(text, words)
    constraint: dict[str, Any] = dict.fromkeys(CONSTRAINTS)
    for name, patterns in (("house rule", HOUSE_RULES), ("room type", ROOM_TYPES), ("transportation", BANNED)):
        for value, pattern in patterns:
            if found := re.search(pattern, text, re.IGNORECASE):
                constraint[name], words[name] = value, found.group()
                break
    named = {
        found.start(): found.group()
        for cuisine in CUISINES
        for found in re.finditer(rf"\b{cuisine}\b(?!\s+(?:cit(?:y|ies)|states?|towns?|destinations?))", text, re.I)
    }
    if named:
        found_words = [named[position] for position in sorted(named)]
        constraint["cuisine"] = list(dict.fromkeys(word.capitalize() for word in found_words))
        words["cuisine"] = ", ".join(found_words)
    return Reading(budget, people, constraint, words)


def _read_budget(text: str, words: dict[str, str]) -> float | None:
    """The dollar amount; among several the one that is nearest to a word for money."""
    amounts = list(AMOUNT.finditer(text))
    if not amounts:
        return None
    clues = [found.start() for found in MONEY_WORDS.finditer(text)]
    nearest = min(amounts, key=lambda found: min((abs(found.start() - clue) for clue in clues), default=0))
    words["budget"] = nearest.group().strip()
    amount = float((nearest["before"] or nearest["after"]).replace(",", ""))
    return amount * 1000 if nearest["thousand"] or nearest["thousands"] else amount


def _read_people(text: str, words: dict[str, str]) -> int:
    for pattern, implied in PEOPLE:
        found = pattern.search(text)
        if found is None:
            continue
        words["people_number"] = found.group().strip()
        if implied is not None:
            return implied
        count = found["count"].lower()
        return int(count) if count.isdigit() else COUNTS.get(count, 1)
    return 1


def task_fields(query: str, reference: Any, structured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields of a task, from a row's own columns where it has them, otherwise from reference and query.

    Args:
        query: the request in English.
        reference: the reference information in any form that `read_records` takes.
        structured: columns of the hub's rows (org, dest, days, visiting_city_number, date, people_number,
            local_constraint, budget); any of them may be missing or None.

    Returns:
        The fields that `read_trip` describes, and `read_from`: the words of the query behind each value that was read.

    Raises:
        ValueError: if the reference information cannot be read or holds no dated flight description.
    """
    given = {name: _literal(value) for name, value in (structured or {}).items() if value is not None}
    records = [{"Description": title, "Content": content} for title, content in read_records(reference)]
    searches = _searches(records)
    cities = [city for way in searches for city in way[:2]]
    org = str(given.get("org") or cities[0])
    others = list(dict.fromkeys(city for city in cities if canonical_city(city) != canonical_city(org)))
    days = [day for _, _, day in searches]
    dates = [str(day) for day in given.get("date") or _every_day(min(days), max(days))]
    reading = read_query(query, [org, *others])
    words = dict(reading.words)
    if given.get("budget") is not None:
        words.pop("budget", None)
    if given.get("people_number") is not None:
        words.pop("people_number", None)
    constraint = reading.constraint
    if isinstance(given.get("local_constraint"), Mapping):
        constraint = {name: given["local_constraint"].get(name) for name in CONSTRAINTS}
        words = {name: said for name, said in words.items() if name not in CONSTRAINTS}
    return {
        "query": query,
        "org": org,
        "dest": str(given["dest"]) if given.get("dest") else (others[0] if len(others) == 1 else ""),
        "days": int(given.get("days") or len(dates)),
        "dates": dates,
        "visiting_city_number": int(given.get("visiting_city_number") or len(others)),
        "people_number": int(given.get("people_number") or reading.people),
        "budget": given.get("budget", reading.budget),
        "local_constraint": constraint,
        "records": records,
        "reference_text": reference if isinstance(reference, str) else repr(records),
        "read_from": words,
    }


def _searches(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Start, end and date of every dated flight description, in their order."""
    # Contents are left out: only the descriptions are needed, and a sentence is quick to read.
    titles = [{"Description": record["Description"], "Content": ""} for record in records]
    searches = list(parse_reference(titles).searches)
    if not searches:
        raise ValueError(f"no dated flight description, such as {FLIGHT_TITLE.pattern!r}, in the reference information")
    return searches


def _every_day(first: str, last: str) -> list[str]:
    start, end = date.fromisoformat(first), date.fromisoformat(last)
    return [(start + timedelta(days=number)).isoformat() for number in range((end - start).days + 1)]


def _literal(value: Any) -> Any:
    """A column that holds a list or mapping as a Python literal, as the hub's rows do; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            return value
    return value
