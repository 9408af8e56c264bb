"""Finds Python calls of given functions in any text and reads them, without executing anything (BFCL)."""

from __future__ import annotations

import ast
import keyword
import warnings
from contextlib import nullcontext
from typing import Any

from mapl_core.rewards.call_types import MAX_NESTING, Call, Function, Functions, Reading

MAX_CHAIN = 200  # operators and words that are open at one place of a call: more would exhaust the parser's stack
SCANS = 20  # times the length of a text: characters looked at in search of closing brackets, over all its calls
SCANS_OF_OTHERS = 2  # the same for calls of other functions, which are only counted
JSON_CONSTANTS = {"true": True, "false": False, "null": None}
OPERATORS = frozenset("+-*/%@&|^~<>=!:.")
SURPLUS = "*{}"  # name of a positional argument that the function has no parameter for: no keyword can be called so


class _Brackets:
    """Finds closing brackets in one text until too many characters have been looked at."""

    def __init__(self, text: str, budget: int) -> None:
        self.text = text
        self.budget = budget

    @property
    def is_spent(self) -> bool:
        return self.budget <= 0

    def closing(self, opening: int) -> tuple[int | None, bool]:
        """Where the bracket at `opening` is closed, None if never, and whether what it holds may be parsed.

        Strings and comments are passed over. A string in simple quotes ends at the end of its line at the latest, as
        in Python, so that a quote left open swallows one line and not all that follows.
        """
        text, end = self.text, len(self.text)
        chains, chain, readable = [], 0, True  # operators and words since the last comma, for every open bracket
        position = opening
        while position < end:
            character = text[position]
            if character in "'\"":
                position = _after_string(text, position)
                continue
            if character == "#":
                line_end = text.find("\n", position)
                position = end if line_end < 0 else line_end
                continue
            if character in "([{":
                chains.append(0)
                readable = readable and len(chains) <= MAX_NESTING
            elif character in ")]}":
                chain -= chains.pop()
                if not chains:
                    self.budget -= position - opening
                    return position, readable
            elif character == ",":
                chain -= chains[-1]
                chains[-1] = 0
            elif character in OPERATORS or _is_word(character):
                while _is_word(character) and position + 1 < end and _is_word(text[position + 1]):
                    position += 1
                chains[-1] += 1
                chain += 1
                readable = readable and chain <= MAX_CHAIN
            position += 1
        self.budget -= end - opening
        return None, False


def read_python_calls(text: str, functions: Functions) -> Reading:
    """Every outermost Python call of a schema function, whatever stands around it.

    A call that cannot be read is left out alone. One whose bracket is never closed was cut off: reading goes on in
    the next line, in case only this call was broken.
    """
    reading = Reading()
    brackets, others = (_Brackets(text, scans * len(text)) for scans in (SCANS, SCANS_OF_OTHERS))
    unknown: tuple[int, int] | None = None  # end of a call of another function, and the calls that were read before it
    known: dict[tuple[str, str], Call | None] = {}  # a text that repeats itself is parsed once
    position = 0
    while (opening := text.find("(", position)) >= 0 and not brackets.is_spent:
        if unknown and opening > unknown[0]:
            reading.unknown += len(reading.calls) == unknown[1]
            unknown = None
        position = opening + 1
        function = _called(text, opening, functions)
        if function is None:
            if unknown is None and not others.is_spent and (end := _end_of_other(text, opening, others)):
                unknown = end, len(reading.calls)
            continue
        closing, readable = brackets.closing(opening)
        if closing is None:
            line_end = text.find("\n", opening)
            position = len(text) if line_end < 0 else line_end
            continue
        source = text[opening : closing + 1]
        if readable:
            if (function.name, source) not in known:
                known[function.name, source] = _parse_call(function, source)
            if call := known[function.name, source]:
                reading.calls.append(call)
        position = closing + 1
    if unknown:
        reading.unknown += len(reading.calls) == unknown[1]
    return reading


def _called(text: str, opening: int, functions: Functions) -> Function | None:
    """The schema function whose name stands before the bracket, as a whole name and not in a definition."""
    end = _before_blanks(text, opening)
    for name in functions.longest_first:
        if text.endswith(name, 0, end):
            start = end - len(name)
            return functions.find(name) if _is_whole_name(text, start) and not _is_defined(text, start) else None
    return None


def _is_whole_name(text: str, start: int) -> bool:
    """Whether a name that starts here is neither the rest of a longer one nor an attribute; "2." is a list number."""
    if start == 0:
        return True
    if text[start - 1] != ".":
        return not _is_word(text[start - 1])
    owner = _word_start(text, start - 1)
    if owner == start - 1:
        return owner == 0 or text[owner - 1] not in ")]}'\""
    return text[owner].isdigit()


def _is_defined(text: str, start: int) -> bool:
    end = _before_blanks(text, start)
    return end < start and text.endswith("def", 0, end) and (end == 3 or not _is_word(text[end - 4]))


def _end_of_other(text: str, opening: int, brackets: _Brackets) -> int | None:
    """Where the call of a function that is not in the schema ends; None if this bracket is no such call."""
    start = opening
    while start and (_is_word(text[start - 1]) or text[start - 1] == "."):
        start -= 1
    names = text[start:opening].lstrip("0123456789.").split(".")  # as in "2.get_time()"
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names) or _is_defined(text, start):
        return None
    closing, readable = brackets.closing(opening)
    if closing is None or not readable or _parse(text[opening : closing + 1]) is None:
        return None
    return closing


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def _word_start(text: str, end: int) -> int:
    while end and _is_word(text[end - 1]):
        end -= 1
    return end


def _before_blanks(text: str, end: int) -> int:
    while end and text[end - 1] in " \t":
        end -= 1
    return end


def _after_string(text: str, start: int) -> int:
    """Where the text goes on after the string that starts here; an open one ends with its line, or with the text."""
    mark = text[start] * 3 if text.startswith(text[start] * 3, start) else text[start]
    position = start + len(mark)
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text.startswith(mark, position):
            return position + len(mark)
        elif text[position] == "\n" and len(mark) == 1:
            return position
        else:
            position += 1
    return len(text)


class _Unreadable(Exception):
    """A value that no call can have, such as a dict with a list as key."""


def _parse(arguments: str) -> ast.Call | None:
    """The syntax tree of `_` called with what stands in these brackets; None if that is no Python."""
    # The parser warns of escapes such as "\\d". Silencing it resets what was warned of elsewhere, so only where needed.
    silence = warnings.catch_warnings(action="ignore") if "\\" in arguments else nullcontext()
    try:
        with silence:
            tree = ast.parse("_" + arguments, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: NUL or half a surrogate pair
        return None
    return tree if isinstance(tree, ast.Call) else None


def _parse_call(function: Function, source: str) -> Call | None:
    """The call whose arguments, with their brackets, are `source`."""
    tree = _parse(source)
    if tree is None:
        return None
    values = _Values("_" + source)
    try:
        positional = [values.read(node) for node in tree.args]
        by_name = [(argument.arg, values.read(argument.value)) for argument in tree.keywords]
    except _Unreadable:
        return None
    surplus = (SURPLUS.format(number) for number in range(len(function.parameters), len(positional)))
    arguments = dict(zip((*function.parameters, *surplus), positional, strict=False))
    for name, value in by_name:
        if name is not None:
            arguments[name] = value
        elif isinstance(value, dict):  # **{...}; anything else behind ** says nothing about arguments
            arguments |= {key: item for key, item in value.items() if isinstance(key, str)}
    return Call(function.name, arguments)


class _Values:
    """Reads the values of one call's syntax tree: literals as they are, any other expression as its source text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: list[bytes] | None = None  # positions in a syntax tree count bytes

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in JSON_CONSTANTS:
                return JSON_CONSTANTS[name]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
                if not isinstance(value, bool):
                    return -value if isinstance(sign, ast.USub) else value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.read(item) for item in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self._key(key): self.read(value) for key, value in zip(keys, values, strict=True)}
        return self._text(node)

    def _key(self, node: ast.expr) -> Any:
        key = self.read(node)
        if isinstance(key, list | dict):
            raise _Unreadable
        return key

    def _text(self, node: ast.expr) -> str:
        if self.lines is None:
            self.lines = self.source.encode().split(b"\n")
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()
