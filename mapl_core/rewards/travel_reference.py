"""Reading TravelPlanner's reference information into a `Catalogue`, in both forms in which it is distributed.

Text form: a list of {"Description", "Content"}, possibly still written as a Python literal, whose contents are
fixed-width tables as pandas prints them, or sentences. Object form: Description -> list of row objects, or a sentence.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.rewards.travel_catalogue import (
    SELF_DRIVING,
    TAXI,
    Attraction,
    Catalogue,
    Flight,
    Lodging,
    Restaurant,
    Ride,
)
from mapl_core.rewards.travel_text import tidy

TITLE = re.compile(r"(attractions|restaurants|accommodations)\s+in\s+(.+)\Z", re.IGNORECASE | re.DOTALL)
FLIGHT_TITLE = re.compile(r"flights?\s+from\s+(.+)\s+on\s+(\d{4}-\d{2}-\d{2})\Z", re.IGNORECASE | re.DOTALL)
RIDE_TITLE = re.compile(r"(self-driving|taxi)\s+from\s+(.+)\Z", re.IGNORECASE | re.DOTALL)
COST = re.compile(r"\bcost:\s*\$?\s*(\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
NOTHING = re.compile(
    r"\s*(?:no\b|there (?:is|are) no\b|none\b|nothing\b|unknown\b|empty dataframe\b|\[\s*\]|\{\s*\}|\Z)", re.IGNORECASE
)
PRINTED_ROW_NUMBER = re.compile(r"\d+\s+(?=\S)")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableForm:
    """Columns of one kind of table, and how to read a row from the right when its cells have moved.

    Attributes:
        columns: names as printed in the header, in order.
        shifted: pattern of a whole row, name first, CITY for its city; its groups are named like the columns, with "_"
            for a blank.
    """

    columns: tuple[str, ...]
    shifted: re.Pattern[str]


NUMBER = r"-?\d+(?:\.\d+)?"
FORMS = {
    "attractions": TableForm(
        ("Name", "Latitude", "Longitude", "Address", "Phone", "Website", "City"),
        re.compile(rf"(?P<Name>.+?)\s+{NUMBER}\s+{NUMBER}\s.*\s\S+\s+(?P<City>CITY)\s*\Z"),
    ),
    "restaurants": TableForm(
        ("Name", "Average Cost", "Cuisines", "Aggregate Rating", "City"),
        re.compile(
            rf"(?P<Name>.+?)\s+(?P<Average_Cost>{NUMBER})\s+(?P<Cuisines>\D+?)\s+{NUMBER}\s+(?P<City>CITY)\s*\Z"
        ),
    ),
    "accommodations": TableForm(
        ("NAME", "price", "room type", "house_rules", "minimum nights", "maximum occupancy", "review rate number",
         "city"),
        re.compile(
            rf"(?P<NAME>.+?)\s+(?P<price>{NUMBER})\s+(?P<room_type>Entire home/apt|Private room|Shared room|Hotel room)"
            rf"\s+(?:(?P<house_rules>\D.*?)\s+)?(?P<minimum_nights>{NUMBER})\s+(?P<maximum_occupancy>{NUMBER})"
            rf"\s+(?:{NUMBER}|NaN)\s+(?P<city>CITY)\s*\Z",
            re.IGNORECASE,
        ),
    ),
    "flights": TableForm(
        ("Flight Number", "Price", "DepTime", "ArrTime", "ActualElapsedTime", "FlightDate", "OriginCityName",
         "DestCityName", "Distance"),
        re.compile(rf"(?P<Flight_Number>\S+)\s+(?P<Price>{NUMBER})\s+\S+:\S+\s+\S+:\S+\s.*"
                   rf"(?P<FlightDate>\d{{4}}-\d\d-\d\d)\s.*\Z"),
    ),
}  # fmt: skip


def read_records(data: Any) -> list[tuple[str, Any]]:
    """Description and content of every entry, whichever form the reference information has.

    Args:
        data: a list of {"Description", "Content"} objects, a mapping from description to content, or either of them
            written as JSON or as a Python literal.

    Raises:
        ValueError: if it is none of these.
    """
    if isinstance(data, str):
        data = _read_literal(data)
    if isinstance(data, Mapping):
        if {"Description", "Content"} <= set(data):
            data = [data]
        else:
            data = [{"Description": description, "Content": content} for description, content in data.items()]
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ValueError(f"reference information must be a list of records, got {type(data).__name__}")
    records = []
    for number, record in enumerate(data):
        description = record.get("Description") if isinstance(record, Mapping) else None
        if not isinstance(description, str) or "Content" not in record:
            raise ValueError(f"record {number} of the reference information has no Description and Content: {record!r}")
        records.append((tidy(description), record["Content"]))
    return records


def parse_reference(data: Any) -> Catalogue:
    """The catalogue of one trip's reference information, in either form (see `read_records`).

    Contents that name nothing ("There is no flight ...", "No valid information.", an empty table) give no entry.
    Records of an unknown kind are passed over.

    Raises:
        ValueError: naming the record, if a table cannot be read.
    """
    records = read_records(data)
    named = {tidy(found.group(2)): None for title, _ in records if (found := TITLE.match(title))}
    restaurants: list[Restaurant] = []
    attractions: list[Attraction] = []
    lodgings: list[Lodging] = []
    flights: list[Flight] = []
    rides: list[Ride] = []
    searches: list[tuple[str, str, str]] = []
    cities: dict[str, None] = {}
    for title, content in records:
        try:
            if found := TITLE.match(title):
                kind, city = found.group(1).lower(), tidy(found.group(2))
                cities[city] = None
                rows = read_rows(content, kind, city)
                if kind == "restaurants":
                    restaurants += _places(rows, city, _restaurant)
                elif kind == "attractions":
                    attractions += _places(rows, city, lambda name, place, row: Attraction(name, place))
                else:
                    lodgings += _places(rows, city, _lodging)
            elif found := FLIGHT_TITLE.match(title):
                origin, destination = _route(found.group(1), named)
                searches.append((origin, destination, found.group(2)))
                cities.update({origin: None, destination: None})
                rows = read_rows(content, "flights", destination)
                flights += [flight for row in rows if (flight := _flight(row, origin, destination, found.group(2)))]
            elif found := RIDE_TITLE.match(title):
                origin, destination = _route(found.group(2), named)
                cities.update({origin: None, destination: None})
                cost = COST.search(content) if isinstance(content, str) else None
                if cost:
                    mode = TAXI if found.group(1).lower() == "taxi" else SELF_DRIVING
                    rides.append(Ride(mode, origin, destination, float(cost.group(1).replace(",", ""))))
        except ValueError as error:
            raise ValueError(f"reference record {title!r}: {error}") from error
    cities.update(dict.fromkeys(place.city for place in (*restaurants, *attractions, *lodgings)))
    for flight in flights:
        cities.update({flight.origin: None, flight.destination: None})
    return Catalogue(
        tuple(restaurants), tuple(attractions), tuple(lodgings), tuple(flights), tuple(rides), tuple(searches),
        tuple(cities),
    )  # fmt: skip


def read_rows(content: Any, kind: str, city: str) -> list[Row]:
    """Rows of one content: a list of row objects as it is, a printed table cell by cell, nothing for a sentence.

    Args:
        content: the content of a record.
        kind: a key of `FORMS`.
        city: the city of the description, which ends the rows of most tables.

    Raises:
        ValueError: for a content or a row that cannot be read.
    """
    if content is None:
        return []
    if isinstance(content, str):
        text = content.strip("\r\n")
        if text.lstrip().startswith(("[", "{")) and not NOTHING.match(text):
            content = _read_literal(text)
        else:
            return _read_table(text, FORMS[kind], city)
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence) or not all(isinstance(row, Mapping) for row in content):
        raise ValueError(f"expected a table, rows or a sentence, got {type(content).__name__}")
    return list(content)


def _read_table(text: str, form: TableForm, city: str) -> list[Row]:
    header, *lines = text.splitlines() or [""]
    columns = _columns(header, form)
    if not columns:
        if NOTHING.match(header) or len(lines) == 0:
            return []  # a sentence
        raise ValueError(f"a table without the columns {', '.join(form.columns)}: {header[:120]!r}")
    lines = [line for line in lines if line.strip()]
    starts = [0, *(end for _, end in columns[:-1])]
    numbered = _has_row_numbers(lines, columns)
    rows = []
    for line in lines:
        if not _is_aligned(line, columns):
            rows.append(_read_shifted(line, form, city, numbered))
            continue
        if numbered:
            line = PRINTED_ROW_NUMBER.sub(lambda found: " " * len(found.group()), line, count=1)
        ends = [end for _, end in columns[:-1]] + [len(line)]
        cells = (line[start:end] for start, end in zip(starts, ends, strict=True))
        rows.append({name: cell.strip() for (name, _), cell in zip(columns, cells, strict=True)})
    return rows


def _columns(header: str, form: TableForm) -> list[tuple[str, int]]:
    """Name and end of every column; empty unless the first known column and another one are among them."""
    known = {name.lower(): name for name in form.columns}
    pattern = "|".join(re.escape(name) for name in sorted(form.columns, key=len, reverse=True))
    found = [
        (known.get(match.group().lower(), match.group()), match.end())
        for match in re.finditer(rf"(?:{pattern})(?=\s|\Z)|\S+", header, re.IGNORECASE)
    ]
    names = [name for name, _ in found]
    return found if form.columns[0] in names and len(set(names) & set(form.columns)) >= 2 else []


def _has_row_numbers(lines: Sequence[str], columns: Sequence[tuple[str, int]]) -> bool:
    """Whether pandas printed its row numbers: every line starts with one, and texts have two blanks before them.

    Without row numbers pandas prints one blank before the longest text of a column. By this a name that starts with a
    number is told from a row number, even in a table of one row.
    """
    if not lines or not all(re.match(r"\d+  +\S", line) for line in lines):
        return False
    aligned = [line for line in lines if _is_aligned(line, columns)]
    gaps = []
    for (_, left), (name, right) in zip(columns, columns[1:], strict=False):
        cells = [line[left:right].strip() for line in aligned]
        longest = max(map(len, cells), default=0)
        if longest >= len(name) and not all(re.fullmatch(NUMBER, cell) for cell in cells):
            gaps.append(right - left - longest)
    return min(gaps, default=2) >= 2


def _is_aligned(line: str, columns: Sequence[tuple[str, int]]) -> bool:
    """Whether all cells end where their header ends: the signs after them are blank, and the line is as long."""
    return len(line.rstrip()) == columns[-1][1] and all(line[end : end + 1].strip() == "" for _, end in columns[:-1])


def _read_shifted(line: str, form: TableForm, city: str, numbered: bool) -> Row:
    """A row whose cells have moved (wide signs), read by the types of its cells, its city first."""
    text = line.strip()
    if numbered:
        text = PRINTED_ROW_NUMBER.sub("", text, count=1)
    for ending in (re.escape(city), r"\S+"):  # a row may name another city, then of one word
        found = re.match(form.shifted.pattern.replace("CITY", ending), text, form.shifted.flags)
        if found is not None:
            cells = found.groupdict(default="")
            return {name if name == "house_rules" else name.replace("_", " "): cell for name, cell in cells.items()}
    raise ValueError(f"the row cannot be read: {line[:160]!r}")


def _places(rows: Iterable[Row], city: str, build: Any) -> list[Any]:
    places = []
    for row in rows:
        name = _text(row, "Name")
        place = build(name, _text(row, "City") or city, row) if name else None
        if place is not None:
            places.append(place)
    return places


def _restaurant(name: str, city: str, row: Row) -> Restaurant | None:
    cost = _number(row, "Average Cost")
    cuisines = tuple(part.strip() for part in _text(row, "Cuisines").split(",") if part.strip())
    return None if cost is None else Restaurant(name, city, cost, cuisines)


def _lodging(name: str, city: str, row: Row) -> Lodging | None:
    price = _number(row, "price")
    if price is None:
        return None
    rules = tuple(part.strip() for part in _text(row, "house_rules").split("&") if part.strip())
    nights, occupancy = _number(row, "minimum nights"), _number(row, "maximum occupancy")
    return Lodging(
        name, city, price, _text(row, "room type"), rules, 1.0 if nights is None else nights, int(occupancy or 1)
    )


def _flight(row: Row, origin: str, destination: str, date: str) -> Flight | None:
    number, price = _text(row, "Flight Number"), _number(row, "Price")
    if not number or price is None:
        return None
    return Flight(
        number, _text(row, "OriginCityName") or origin, _text(row, "DestCityName") or destination,
        _text(row, "FlightDate")[:10] or date, price,
    )  # fmt: skip


def _value(row: Row, name: str) -> Any:
    """A cell by its column, whatever the case; NaN and None count as empty."""
    value = row.get(name)
    if value is None:
        value = next((cell for key, cell in row.items() if str(key).lower() == name.lower()), None)
    if value is None or isinstance(value, float) and math.isnan(value):
        return None
    return None if isinstance(value, str) and value.strip().lower() in ("", "nan", "none") else value


def _text(row: Row, name: str) -> str:
    value = _value(row, name)
    return "" if value is None else tidy(str(value))


def _number(row: Row, name: str) -> float | None:
    value = _value(row, name)
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(str(value).replace("$", "").replace(",", ""))
    except ValueError:
        raise ValueError(f"{name} is {value!r}, not a number") from None
    return number if math.isfinite(number) else None


def _route(text: str, named: Mapping[str, Any]) -> tuple[str, str]:
    """Start and end of "A to B"; a city with "to" in its name is told by the cities of the other descriptions."""
    words = tidy(text)
    readings = [(words[: found.start()], words[found.end() :]) for found in re.finditer(r" to ", words)]
    if not readings:
        raise ValueError(f"no way from one city to another in {text!r}")
    return max(readings, key=lambda cities: sum(city in named for city in cities))


def _read_literal(text: str) -> Any:
    """A text that holds JSON or a Python literal."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"neither JSON nor a Python literal ({type(error).__name__}): {text[:80]!r}") from None
