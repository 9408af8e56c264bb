"""Values of call arguments: what two of them have in common counts, not how they are written (BFCL).

A value is first brought into its *form*: a tuple of its kind and its normalised content. Forms can be compared with a
tolerance (`equal`), matched against the accepted values of a gold argument (`accepts`), and made into dictionary keys
(`form_key`).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

Form = tuple[Any, ...]
TOLERANCE = 1e-9  # relative, of numbers
OMITTED = ""  # among accepted values: the argument, or the key of a dict, may be missing


def normalise_text(text: str) -> str:
    """Text without what the oracle overlooks: case, compatibility characters, outer quotes, blanks around commas."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    return ",".join(part.strip() for part in text.split(",")) if "," in text else text


def form_of(value: Any) -> Form:
    """The form of a value made of None, bool, numbers, text, lists, tuples and dicts; lists and tuples are alike."""
    if isinstance(value, str):
        return "text", normalise_text(value)
    if value is None or isinstance(value, bool):  # a bool is an int to Python, but never a number here
        return "constant", value
    if isinstance(value, int | float):
        return "number", _as_float(value)
    if isinstance(value, list | tuple):
        return "list", tuple(form_of(item) for item in value)
    return "dict", tuple(sorted(((key, form_of(item)) for key, item in value.items()), key=lambda item: repr(item[0])))


def equal(first: Form, second: Form) -> bool:
    """Whether two forms say the same: numbers to a relative 1e-9, NaN never, keys of dicts exactly."""
    kind, content = first
    other_kind, other = second
    if kind != other_kind:
        return False
    if kind == "number":
        return _same_number(content, other)
    if kind == "list":
        return len(content) == len(other) and all(map(equal, content, other))
    if kind == "dict":
        return len(content) == len(other) and all(
            _same_key(key, other_key) and equal(item, other_item)
            for (key, item), (other_key, other_item) in zip(content, other, strict=True)
        )
    return content == other


def accepts(accepted: Any, form: Form) -> bool:
    """Whether a gold argument accepts a value.

    Args:
        accepted: the gold argument's accepted values. A list holds alternatives, anything else is the only one. An
            alternative that is a list is compared as a value; in one that is a dict every value is again a list of
            alternatives, and other keys are not allowed.
        form: the form of the value given.
    """
    return any(_accepts_one(alternative, form) for alternative in alternatives(accepted))


def alternatives(accepted: Any) -> list[Any]:
    return accepted if isinstance(accepted, list) else [accepted]


def may_be_omitted(accepted: Any) -> bool:
    return any(isinstance(alternative, str) and alternative == OMITTED for alternative in alternatives(accepted))


def form_key(form: Form) -> Form:
    """A hashable key, the same for forms that are written alike up to what is overlooked.

    Numbers are rounded to ten digits, since "equal within a tolerance" is not transitive and cannot be a key.
    """
    kind, content = form
    if kind == "number":
        return kind, f"{content + 0.0:.9e}"  # adding 0.0 turns -0.0 into 0.0
    if kind == "list":
        return kind, tuple(form_key(item) for item in content)
    if kind == "dict":
        return kind, tuple((type(key).__name__, key, form_key(item)) for key, item in content)
    return kind, type(content).__name__, content


def _accepts_one(alternative: Any, form: Form) -> bool:
    kind, content = form
    if isinstance(alternative, Mapping):
        return kind == "dict" and _accepts_dict(alternative, dict(content))
    if isinstance(alternative, list):
        if kind != "list" or len(content) != len(alternative):
            return False
        # A dict inside a list may be meant as a value, or with alternatives as everywhere else in the answers.
        return all(
            _accepts_one(item, given) or equal(form_of(item), given)
            for item, given in zip(alternative, content, strict=True)
        )
    return equal(form_of(alternative), form)


def _accepts_dict(alternative: Mapping[str, Any], given: Mapping[Any, Form]) -> bool:
    if any(not isinstance(key, str) or key not in alternative for key in given):
        return False
    return all(
        accepts(accepted, given[key]) if key in given else may_be_omitted(accepted)
        for key, accepted in alternative.items()
    )


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of floats
        return math.inf if value > 0 else -math.inf


def _same_number(first: float, second: float) -> bool:
    if math.isinf(first) or math.isinf(second):
        return first == second
    return abs(first - second) <= TOLERANCE * max(abs(first), abs(second))


def _same_key(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second
