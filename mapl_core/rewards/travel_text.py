"""How the Travel domain compares texts: without regard to case, spacing, state names or typographic variants."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection

BLANK = "-"

PLAIN_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    }
)
STATE = re.compile(r"\s*\([^()]*\)\Z")
ROUTE = re.compile(r"from (?=\S)")


def tidy(text: str) -> str:
    """A cell or value as it is shown: runs of white space, and pandas' written line breaks, become one blank."""
    return " ".join(text.replace("\\n", " ").split())


def canonical(text: str) -> str:
    """The form in which texts are compared: NFKC, plain quotes and dashes, single blanks, case-folded, accents kept."""
    # NFKC comes first, since it opens ligatures and full-width signs; case folding may need it once more.
    plain = unicodedata.normalize("NFKC", text).translate(PLAIN_SIGNS)
    return unicodedata.normalize("NFKC", " ".join(plain.split()).casefold())


def canonical_city(text: str) -> str:
    """A city's canonical form without a trailing "(State)"."""
    name = canonical(text)
    return STATE.sub("", name) or name


def split_entity(value: str) -> tuple[str, str] | None:
    """Canonical name and city of "Name, City", split at the last comma; None without a name or a city."""
    name, comma, city = canonical(value).rpartition(",")
    name, city = name.strip(), canonical_city(city)
    return (name, city) if comma and name and city else None


def split_route(text: str, known: Collection[str]) -> tuple[str, str] | None:
    """Canonical start and end of "from A to B"; None if the text is not a route.

    A city's name may hold the word "to" itself, so that among several readings one between known cities is taken.
    """
    text = canonical(text)
    if not ROUTE.match(text):
        return None
    words = text.removeprefix("from ")
    readings = []
    for found in re.finditer(r" to ", words[:400]):  # no pair of cities is longer
        start, end = canonical_city(words[: found.start()]), canonical_city(words[found.end() :])
        if start and end:
            readings.append((start, end))
    known_readings = [reading for reading in readings if reading[0] in known and reading[1] in known]
    return next(iter(known_readings or readings), None)


def is_blank(value: str) -> bool:
    """Whether a slot's value says that nothing is planned ("-", with any dash)."""
    return canonical(value) in ("", BLANK)
