"""An agent's action in Travel: slots as one JSON object, read strictly, tolerantly or piece by piece; and the merge.

Nothing here raises for any text, and the work is bounded in the text's length and depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mapl_core.rewards.travel_text import BLANK, canonical

FIELDS = ("current_city", "transportation", "breakfast", "attraction", "lunch", "dinner", "accommodation")
LOGISTICS = ("current_city", "transportation", "accommodation")
ACTIVITIES = ("breakfast", "attraction", "lunch", "dinner")
DINING, SIGHTSEEING = ("breakfast", "lunch", "dinner"), ("attraction",)
# Which fields an agent of a team of two or three owns, on every day (paper, section 5.1 and appendix D.5).
TEAMS: dict[int, tuple[tuple[str, ...], ...]] = {
    2: (LOGISTICS, ACTIVITIES),
    3: (LOGISTICS, DINING, SIGHTSEEING),
}

MOST_CHARACTERS = 16_384  # of a text that is read; an answer of 1,024 tokens has about 5,000
MOST_DEPTH = 16
MOST_STEPS = 4_000  # values and signs; a five-day answer has about 500

Slot = tuple[int, str]

QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
TOKEN = re.compile(
    rf"\s*(?:(?P<text>{QUOTED})|(?P<number>-?\d{{1,40}}(?:\.\d{{1,40}})?(?:[eE][-+]?\d{{1,3}})?)|(?P<sign>[\[\](){{}},:])"
    r"|(?P<word>null|None|true|True|false|False|NaN|-?Infinity)\b)",
    re.DOTALL,
)
WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
CLOSING = {"[": "]", "(": ")", "{": "}"}
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}

AGENT_KEY = re.compile(r"[\"']?agent_id[\"']?\s*:\s*[\"']?0*(\d{1,9})(?!\d)")
ASSIGNMENTS_KEY = re.compile(r"[\"']?assignments[\"']?\s*:\s*(\[)?")
TRIPLE = re.compile(
    rf"[\"']?\bdays?\b[\"']?\s*:\s*[\"']?(\d{{1,4}})[\"']?\s*,\s*[\"']?field[\"']?\s*:\s*({QUOTED})"
    rf"\s*,\s*[\"']?value[\"']?\s*:\s*({QUOTED})",
    re.DOTALL | re.IGNORECASE,
)
STRUCTURE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|[\[\]{}\"]", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What one agent's text says.

    Attributes:
        text: the cleaned and stripped text.
        strict: whether it is exactly the object that was asked for.
        decoded: whether an action was found in it, strictly or tolerantly.
        items: the readable items as (slot, value), None for an invalid one, in the order of the text.
        accepted: value of every slot that counts.
        duplicates: readable items whose slot came before.
        extra: items beyond the agent's capacity; then no slot is accepted.
        well_formed: whether keys and items have exactly the asked form, whoever owns the slots.
        id_matches: whether the decoded agent_id is this agent's.
        recovered: first value of every owned slot among the items and whatever triples stand anywhere in the text.
        violation: share of the raw items and triples that did not give an owned slot.
        progress: how much of the frame is there, 0 to 1.
        structure: share of opening brace, matching id, list and balanced brackets that is there.
    """

    text: str
    owned: frozenset[Slot]
    strict: bool = False
    decoded: bool = False
    items: tuple[tuple[Slot, str] | None, ...] = ()
    accepted: dict[Slot, str] = field(default_factory=dict)
    duplicates: int = 0
    extra: int = 0
    well_formed: bool = False
    id_matches: bool = False
    recovered: dict[Slot, str] = field(default_factory=dict)
    violation: float = 0.0
    progress: float = 0.0
    structure: float = 0.0

    @property
    def invalid(self) -> int:
        return 0 if self.extra else sum(item is None for item in self.items)

    @property
    def soft(self) -> float:
        """Form of the decoded action, 0 to 1: the mean of six shares, 0 if nothing was decoded."""
        if not self.decoded:
            return 0.0
        accepted, owned = len(self.accepted), len(self.owned)
        shares = (
            float(self.well_formed),
            float(self.id_matches),
            float(self.extra == 0),
            sum(slot in self.owned for slot in self.accepted) / accepted if accepted else 0.0,
            max(0.0, 1.0 - abs(accepted - owned) / owned),
            accepted / len(self.items) if self.items else 0.0,
        )
        return sum(shares) / len(shares)


@dataclass(frozen=True)
class Merge:
    """The agents' accepted slots put together.

    Attributes:
        plan: value of every slot that was accepted and is not in conflict.
        conflicts: number of slots for which agents gave different values; they are removed.
        overlaps: number of slots for which agents gave the same value; it is kept.
    """

    plan: dict[Slot, str]
    conflicts: int
    overlaps: int


def owned_slots(agent: int, days: int, num_agents: int = 2) -> list[Slot]:
    """Slots of an agent, day by day, in the order of the itinerary's fields; their number is its capacity."""
    return [(day, name) for day in range(1, days + 1) for name in FIELDS if name in TEAMS[num_agents][agent]]


def write_action(agent: int, slots: Sequence[tuple[Slot, str]]) -> str:
    """The JSON text of an action: what `read_action` takes as strict."""
    items = [{"day": day, "field": name, "value": value} for (day, name), value in slots]
    return json.dumps({"agent_id": agent, "assignments": items}, ensure_ascii=False)


def read_action(text: str, agent: int, days: int, num_agents: int = 2) -> Action:
    """Read one agent's cleaned text in every way that the oracle asks for.

    Args:
        text: the response after `clean_response`.
        agent: number of the agent.
        days: length of the trip.
        num_agents: size of the team, 2 or 3.
    """
    whole = text.strip()
    owned = frozenset(owned_slots(agent, days, num_agents))
    text = whole[:MOST_CHARACTERS]
    value = _strict_json(text) if len(whole) <= MOST_CHARACTERS else None
    strict = value is not None and _is_strict(value, agent, days, owned)
    found = _find_action(text, value)
    raw_items = _raw_items(found)
    items = tuple(_read_item(item, days) for item in raw_items)
    accepted: dict[Slot, str] = {}
    duplicates = 0
    extra = max(0, len(items) - len(owned))
    if not extra:
        for item in items:
            if item is not None:
                duplicates += item[0] in accepted
                accepted.setdefault(*item)
    triples = _triples(text, days)
    recovered: dict[Slot, str] = {}
    for item in (*items, *triples):
        if item is not None and item[0] in owned:
            recovered.setdefault(*item)
    raw = max(len(items), len(triples))
    frame = _frame(text, agent)
    return Action(
        text=whole,
        owned=owned,
        strict=strict,
        decoded=found is not None,
        items=items,
        accepted=accepted,
        duplicates=duplicates,
        extra=extra,
        well_formed=_is_well_formed(found, days),
        id_matches=_names_agent(found, agent),
        recovered=recovered,
        violation=(raw - len(recovered)) / max(1, raw) if raw > len(recovered) else 0.0,
        progress=0.10 * frame["brace"]
        + 0.10 * frame["id"]
        + 0.10 * frame["id matches"]
        + 0.10 * frame["assignments"]
        + 0.20 * frame["list"]
        + 0.25 * len(recovered) / len(owned)
        + 0.15 * frame["balanced"],
        structure=(frame["brace"] + frame["id matches"] + frame["list"] + frame["balanced"]) / 4,
    )


def merge(actions: Sequence[Action]) -> Merge:
    """Put the accepted slots of all agents together; slots that an agent does not own take part."""
    given: dict[Slot, list[str]] = {}
    for action in actions:
        for slot, value in action.accepted.items():
            given.setdefault(slot, []).append(value)
    plan, conflicts, overlaps = {}, 0, 0
    for slot, values in given.items():
        if len({canonical(value) for value in values}) > 1:
            conflicts += 1
            continue
        overlaps += len(values) > 1
        plan[slot] = values[0]
    return Merge(plan, conflicts, overlaps)


# Strict form ---------------------------------------------------------------------------------------------------------


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _strict_json(text: str) -> Any:
    """The value of a text that is JSON as a whole, without repeated keys, NaN or Infinity; None for any other text."""
    if not text.startswith("{"):
        return None
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _is_strict(value: Any, agent: int, days: int, owned: frozenset[Slot]) -> bool:
    if not _is_well_formed(value, days) or value["agent_id"] != agent:
        return False
    slots = [(item["day"], item["field"]) for item in value["assignments"]]
    return len(slots) == len(owned) and set(slots) == owned


def _is_well_formed(value: Any, days: int) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"agent_id", "assignments"}
        and type(value["agent_id"]) is int  # True is an int too
        and isinstance(value["assignments"], list)
        and all(
            isinstance(item, dict)
            and set(item) == {"day", "field", "value"}
            and type(item["day"]) is int
            and 1 <= item["day"] <= days
            and isinstance(item["field"], str)
            and item["field"] in FIELDS
            and isinstance(item["value"], str)
            and bool(item["value"].strip())
            for item in value["assignments"]
        )
    )


# Tolerant form -------------------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    pass


class _Reader:
    """Reads JSON and Python literals of texts, numbers, lists, tuples and dicts, within a number of steps.

    Neither `json` nor `ast` alone reads both, and `ast` may exhaust the interpreter's stack on a hostile text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps = 0

    def value(self, position: int, depth: int = 0) -> tuple[Any, int]:
        """The value that starts here, and where it ends."""
        found = self._token(position)
        kind, token, end = found.lastgroup, found.group(found.lastgroup or 0), found.end()
        if kind == "text":
            return unquote(token), end
        if kind == "number":
            return (int(token) if re.fullmatch(r"-?\d+", token) else float(token)), end
        if kind == "word":
            return WORDS.get(token, float("nan")), end
        if token not in CLOSING or depth >= MOST_DEPTH:
            raise _Unreadable
        return self._collection(token, end, depth + 1)

    def _collection(self, opening: str, position: int, depth: int) -> tuple[Any, int]:
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        while True:
            ahead = self._token(position)
            if ahead.group("sign") == CLOSING[opening]:
                return (pairs if opening == "{" else items), ahead.end()
            item, position = self.value(position, depth)
            if opening == "{":
                position = self._expect(":", position)
                content, position = self.value(position, depth)
                if isinstance(item, str):
                    pairs.setdefault(item, content)
            else:
                items.append(item)
            ahead = self._token(position)
            if ahead.group("sign") == ",":
                position = ahead.end()
            elif ahead.group("sign") != CLOSING[opening]:
                raise _Unreadable

    def _expect(self, sign: str, position: int) -> int:
        found = self._token(position)
        if found.group("sign") != sign:
            raise _Unreadable
        return found.end()

    def _token(self, position: int) -> re.Match[str]:
        self.steps += 1
        found = TOKEN.match(self.text, position)
        if found is None or self.steps > MOST_STEPS:
            raise _Unreadable
        return found


def unquote(token: str) -> str:
    """The text inside a quoted token of JSON or Python."""
    if "\\" not in token:
        return token[1:-1]
    if token.startswith('"'):
        try:
            return json.loads(token, strict=False)
        except ValueError:
            pass
    return ESCAPE.sub(_unescape, token[1:-1])


def _unescape(found: re.Match[str]) -> str:
    sign = found.group(1)
    if len(sign) > 1:
        return chr(int(sign[1:], 16))
    return ESCAPED.get(sign, sign)


def _find_action(text: str, value: Any) -> Any:
    """The action that a text holds, or None: the whole text, the content of a fence, or the first one in it."""
    if _looks_like_action(value):
        return value
    for part in (*(found.group(1) for found in FENCE.finditer(text)), text):
        reader = _Reader(part)  # steps are counted over all starts of a part, so that no text takes long
        for start in re.finditer(r"[\[({]", part):
            if reader.steps > MOST_STEPS:
                break
            try:
                value, _ = reader.value(start.start())
            except (_Unreadable, ValueError, OverflowError):
                continue
            if _looks_like_action(value):
                return value
    return None


def _looks_like_action(value: Any) -> bool:
    if isinstance(value, dict):
        return any(isinstance(value.get(key), list) for key in ("assignments", "slots"))
    return isinstance(value, list) and any(
        isinstance(item, dict) or isinstance(item, list) and len(item) == 3 for item in value
    )


def _raw_items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return next(value[key] for key in ("assignments", "slots") if isinstance(value.get(key), list))
    return value or []


def _names_agent(value: Any, agent: int) -> bool:
    named = value.get("agent_id") if isinstance(value, dict) else None
    if isinstance(named, str):
        return named.strip() == str(agent)
    return not isinstance(named, bool) and isinstance(named, int | float) and named == agent


def _read_item(item: Any, days: int) -> tuple[Slot, str] | None:
    """Slot and value of one item, None for an invalid one."""
    if isinstance(item, dict):
        item = [item.get("day", item.get("days")), item.get("field"), item.get("value")]
    if not isinstance(item, list) or len(item) != 3:
        return None
    day, name, value = _read_day(item[0]), item[1], item[2]
    if day is None or not 1 <= day <= days or not isinstance(name, str):
        return None
    name = name.strip().lower()
    if name not in FIELDS or not (value is None or isinstance(value, str)):
        return None
    return (day, name), value if value and value.strip() else BLANK


def _read_day(day: Any) -> int | None:
    if isinstance(day, bool):
        return None
    if isinstance(day, int):
        return day
    if isinstance(day, float):
        return int(day) if day.is_integer() else None
    return int(day) if isinstance(day, str) and re.fullmatch(r"\s*[0-9]{1,4}\s*", day) else None


# Piece by piece ------------------------------------------------------------------------------------------------------


def _triples(text: str, days: int) -> list[tuple[Slot, str] | None]:
    """Every day, field and value that stand together in this order, wherever in the text; None for an invalid one."""
    return [_read_item([int(day), unquote(name), unquote(value)], days) for day, name, value in TRIPLE.findall(text)]


def _frame(text: str, agent: int) -> dict[str, bool]:
    """Which parts of the JSON frame the text has, decodable or not."""
    named, listed = AGENT_KEY.search(text), ASSIGNMENTS_KEY.search(text)
    return {
        "brace": text.startswith("{"),
        "id": named is not None,
        "id matches": named is not None and int(named.group(1)) == agent,
        "assignments": listed is not None,
        "list": listed is not None and listed.group(1) is not None,
        "balanced": text.startswith("{") and text.endswith("}") and _balanced(text),
    }


def _balanced(text: str) -> bool:
    """Whether brackets outside of texts close in the order in which they were opened."""
    opened: list[str] = []
    for sign in STRUCTURE.findall(text):
        if sign in CLOSING:
            opened.append(CLOSING[sign])
        elif sign == '"' or sign in "]}" and (not opened or opened.pop() != sign):
            return False  # a text that never ends, or a bracket out of order
    return not opened
