"""Functions that may be called, and calls of them: what the readers of texts and the oracle of BFCL share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_NESTING = 64  # brackets inside one call or JSON value


@dataclass(frozen=True)
class Function:
    """What the reader needs to know of a function's schema.

    Attributes:
        name: as in the schema; it may be dotted.
        parameters: names that positional arguments stand for: the required ones, then the others in schema order.
        defaults: values of parameters that the schema names a default for.
    """

    name: str
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of a schema function: arguments by parameter name, as plain values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass
class Reading:
    """What was read: calls of schema functions, in order, and how many calls named other functions."""

    calls: list[Call] = field(default_factory=list)
    unknown: int = 0


class Functions:
    """The functions of one task, found by their names and by `_` written for `.` where only one can be meant."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.by_name = {function.name: function for function in map(_function_of, schemas)}
        self.spellings = {name: name for name in self.by_name}
        underscored = [name.replace(".", "_") for name in self.by_name if "." in name]
        for name in self.by_name:
            spelling = name.replace(".", "_")
            if spelling not in self.by_name and underscored.count(spelling) == 1:
                self.spellings[spelling] = name
        self.longest_first = sorted((name for name in self.spellings if name), key=len, reverse=True)

    def find(self, spelling: str) -> Function | None:
        name = self.spellings.get(spelling)
        return None if name is None else self.by_name[name]


def _function_of(schema: Mapping[str, Any]) -> Function:
    parameters = schema.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = [name for name in parameters.get("required") or () if name in properties]
    optional = [name for name in properties if name not in required]
    defaults = {name: about["default"] for name, about in properties.items() if "default" in (about or {})}
    return Function(schema["name"], (*required, *optional), defaults)
