"""Reads function calls from a text that is nothing but JSON, in the forms that models write (BFCL)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mapl_core.rewards.call_types import MAX_NESTING, Call, Functions, Reading


def read_json_calls(text: str, functions: Functions) -> Reading | None:
    """The calls of a text that is nothing but JSON values; None if it is something else or names no call at all."""
    reading, found = Reading(), False
    for value in _json_values(text.strip()):
        for name, arguments in _named(value, functions):
            found = True
            function = functions.find(name)
            if function is None:
                reading.unknown += 1
            elif (given := _json_arguments(arguments)) is not None:
                reading.calls.append(Call(function.name, given))
    return reading if found else None


def _json_values(text: str) -> list[Any]:
    """The objects and lists that a text consists of; nothing if it holds anything else.

    Of a list or row of values that is cut off at the end, the complete values are kept.
    """
    values: list[Any] = []
    if not text.startswith(("[", "{")):
        return values
    nesting, is_cut = _json_nesting(text)
    if nesting > MAX_NESTING:
        return values
    position = 0
    while position < len(text):
        value, end = _decode(text, position) if text[position] in "[{" else (None, position)
        if end == position:  # not JSON: the rest of a cut text, or a text of another kind
            if not is_cut:
                return []
            return values + (_complete_items(text, position + 1) if text[position] == "[" else [])
        values.append(value)
        position = _skip(text, end)
    return values


def _complete_items(text: str, position: int) -> list[Any]:
    items = []
    position = _skip(text, position)
    while position < len(text):
        item, end = _decode(text, position)
        if end == position:
            break
        items.append(item)
        position = _skip(text, end)
    return items


def _decode(text: str, position: int) -> tuple[Any, int]:
    """One JSON value and where it ends; it ends where it begins if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError):  # ValueError is also raised for numbers of thousands of digits
        return None, position


def _skip(text: str, position: int) -> int:
    while position < len(text) and (text[position].isspace() or text[position] in ",;"):
        position += 1
    return position


def _json_nesting(text: str) -> tuple[int, bool]:
    """The deepest nesting of brackets outside strings, and whether a string or bracket is still open at the end."""
    depth = deepest = position = 0
    while position < len(text):
        character = text[position]
        if character == '"':
            position += 1
            while position < len(text) and text[position] != '"':
                position += 2 if text[position] == "\\" else 1
            if position >= len(text):
                return deepest, True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
        position += 1
    return deepest, depth > 0


def _named(value: Any, functions: Functions) -> Iterable[tuple[str, Any]]:
    """Name and arguments of every call that a JSON value describes, in any of the forms that models write."""
    if isinstance(value, list):
        for item in value:
            yield from _named(item, functions)
    elif isinstance(value, dict):
        inner = value.get("function")
        name = value["name"] if isinstance(value.get("name"), str) else inner
        if isinstance(inner, dict):
            yield from _named(inner, functions)
        elif isinstance(name, str):
            yield name, value.get("arguments", value.get("parameters"))
        else:
            yield from ((key, arguments) for key, arguments in value.items() if functions.find(key))


def _json_arguments(arguments: Any) -> dict[str, Any] | None:
    """Arguments as a dict, read from JSON inside a string if need be; None if they are something else."""
    if isinstance(arguments, str) and arguments.strip():
        values = _json_values(arguments.strip())
        arguments = values[0] if len(values) == 1 else arguments
    if arguments is None or arguments == "":
        return {}
    return arguments if isinstance(arguments, dict) else None
