"""Reads function calls out of what a model wrote: Python calls in any surroundings, or JSON (BFCL).

Nothing is ever executed. Python calls are found by their names, cut out by their brackets, and read one by one with
`ast`; JSON is read with `json`. Size, nesting and the total work on one text are bounded, whatever the text.
"""

from __future__ import annotations

from collections.abc import Iterable

from mapl_core.rewards.call_types import Functions, Reading
from mapl_core.rewards.json_calls import read_json_calls
from mapl_core.rewards.python_calls import read_python_calls
from mapl_core.rewards.text import clean_response

MAX_CHARACTERS = 20_000  # what is read of a text
FENCE, TAG, END_TAG = "```", "<tool_call>", "</tool_call>"


def read_calls(text: str | None, functions: Functions) -> Reading:
    """The calls in one response: of its code fences if they hold any, of its `<tool_call>` tags, else of all of it.

    Args:
        text: what the model wrote; at most 20,000 characters are read.
        functions: the functions that may be called; every other name is only counted.
    """
    text = clean_response(text)[:MAX_CHARACTERS]
    if FENCE in text:
        inside, outside = _split_fences(text)
        reading = _sum(_read_tagged(part, functions) for part in inside)
        if reading.calls or _is_empty_list("".join(inside)):
            return reading
        text = outside
    return _read_tagged(text, functions)


def _split_fences(text: str) -> tuple[list[str], str]:
    """What stands inside each fence, the last one possibly unclosed, and the whole text without the marks."""
    inside, everything = [], []
    for number, part in enumerate(text.split(FENCE)):
        part = part.lstrip("`")  # a mark may be longer than three
        if number % 2:
            part = _without_language(part).rstrip("`")  # or cut off itself
            inside.append(part)
        everything.append(part)
    return inside, "\n".join(everything)


def _without_language(block: str) -> str:
    """A fenced block without the word that names its language, on the line of the mark."""
    line, newline, rest = block.partition("\n")
    word, _, content = line.strip().partition(" ")
    is_language = word and all(character.isalnum() or character in "_+-.#" for character in word)
    if not is_language or content.lstrip().startswith("("):  # such as the name of a call: get_weather (city="Rome")
        return block
    return content + newline + rest


def _read_tagged(text: str, functions: Functions) -> Reading:
    if TAG in text:
        parts = [_before_end_tag(part) for part in text.split(TAG)[1:]]
        readings = [read_json_calls(part, functions) for part in parts]
        if any(reading is not None for reading in readings) or _is_empty_list("".join(parts)):
            return _sum(
                read_python_calls(part, functions) if reading is None else reading
                for part, reading in zip(parts, readings, strict=True)
            )
        return read_python_calls(text, functions)
    reading = read_json_calls(text, functions)
    return read_python_calls(text, functions) if reading is None else reading


def _before_end_tag(part: str) -> str:
    """What a tag holds; the end tag itself may be missing or cut off."""
    content, end_tag, _ = part.partition(END_TAG)
    cut = next((n for n in range(len(END_TAG) - 1, 0, -1) if content.endswith(END_TAG[:n])), 0)
    return content[: len(content) - cut] if cut and not end_tag else content


def _sum(readings: Iterable[Reading]) -> Reading:
    total = Reading()
    for reading in readings:
        total.calls += reading.calls
        total.unknown += reading.unknown
    return total


def _is_empty_list(text: str) -> bool:
    return "".join(text.split()) == "[]"
