"""Plain data as bytes: exact types there and back, nothing else, and no harm from hostile bytes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapl_core.sandbox_process.plain_data import MAX_DEPTH, dumps, loads

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=20,
)


def same(first, second):
    """Equal, and of the same types all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(map(same, first.values(), second.values()))
    return first == second


@given(values)
@settings(max_examples=100, deadline=None)
def test_a_value_comes_back_equal_and_of_the_same_types(value):
    assert same(loads(dumps(value)), value)


def test_special_numbers_and_lone_surrogates_come_back():
    assert math.isnan(loads(dumps(math.nan))) and math.copysign(1, loads(dumps(-0.0))) == -1
    assert loads(dumps("\ud800")) == "\ud800"


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_arbitrary_bytes_give_a_plain_value_or_a_value_error(data):
    try:
        value = loads(data)
    except ValueError:
        return
    assert loads(dumps(value)) is not None or value is None


def test_changed_bytes_give_a_plain_value_or_a_value_error():
    rng = random.Random(0)
    data = dumps([{"a": (1, 2.5, None)}, {frozenset({1})}, b"xyz", 10**30])
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            loads(bytes(changed))
        except ValueError:
            pass


@pytest.mark.parametrize(
    "data", [b"", b"X", b"i", b"l\xff\xff\xff\xff", b"s\x00\x00\x00\x05ab", b"NN", b"S\0\0\0\1l\0\0\0\0", b"d\0\0\0\1N"]
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(ValueError):
        loads(data)


def test_depth_is_bounded_both_ways():
    value = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert loads(dumps(value)) == value
    with pytest.raises(ValueError, match="deep"):
        dumps([value])
    with pytest.raises(ValueError, match="deep"):
        loads(b"l\0\0\0\1" * (MAX_DEPTH + 1) + b"N")


@pytest.mark.parametrize(
    "value", [object(), range(3), type("I", (int,), {})(1), [type("S", (str,), {})("a")], {1: bytearray()}]
)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="not plain data"):
        dumps(value)
