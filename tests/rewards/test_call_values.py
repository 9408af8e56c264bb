"""When two argument values of BFCL calls say the same, and which values a gold argument accepts."""

from __future__ import annotations

import math

import pytest

from mapl_core.rewards.call_values import accepts, equal, form_key, form_of, may_be_omitted, normalise_text

SAME = [
    ("Paris", "paris"),
    ("  new \n york\t", "New York"),
    ("Straße", "STRASSE"),
    ("ﬁne Ｔｏｋｙｏ", "fine Tokyo"),
    ("'Paris'", "Paris"),
    ('" Paris "', "paris"),
    ("San Francisco , CA", "san francisco,ca"),
    ("a ,b,  c", "A, B, C"),
    ("x\u00a0y", "x y"),
    (1, 1.0),
    (-0.0, 0),
    (0.1 + 0.2, 0.3),
    (10**400, 10**400),
    (math.inf, math.inf),
    (None, None),
    (True, True),
    ([1, 2], (1.0, 2)),
    ([], ()),
    ([["A"], {"k": "B"}], [["a"], {"k": "b"}]),
    ({"a": 1, "b": "X"}, {"b": "x", "a": 1.0}),
    ({}, {}),
]
DIFFERENT = [
    ("Paris", "Pari"),
    ("''Paris''", "Paris"),  # one pair of quotes is removed, not two
    ("'Paris", "Paris"),
    ("café", "cafe"),
    ("a b", "ab"),
    ("1", 1),
    ("true", True),
    ("none", None),
    ("", None),
    (1, True),
    (0, False),
    (0, None),
    (False, None),
    (1e-7, 0),
    (1, 1.00001),
    (math.nan, math.nan),
    (math.inf, -math.inf),
    (math.inf, 1e308),
    (10**400, -(10**400)),
    ([1, 2], [2, 1]),
    ([1, 2], [1, 2, 3]),
    ([1], 1),
    ([], {}),
    ({"a": 1}, {"A": 1}),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({1: 1}, {"1": 1}),
    ({True: 1}, {1: 1}),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_values_that_say_the_same_are_equal_in_both_orders_and_share_a_key(first, second):
    one, other = form_of(first), form_of(second)
    assert equal(one, other) and equal(other, one)
    assert form_key(one) == form_key(other) and hash(form_key(one)) == hash(form_key(other))


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_values_that_say_different_things_are_not_equal(first, second):
    one, other = form_of(first), form_of(second)
    assert not equal(one, other) and not equal(other, one)


@pytest.mark.parametrize(("first", "second"), [pair for pair in DIFFERENT if pair[0] == pair[0]])
def test_different_values_have_different_keys(first, second):
    assert form_key(form_of(first)) != form_key(form_of(second))


@pytest.mark.parametrize("scale", [1.0, 1e-12, 3e15, -7.0])
def test_numbers_are_compared_with_a_relative_tolerance_of_1e_9_inclusive(scale):
    assert equal(form_of(scale), form_of(scale * (1 + 0.9e-9)))
    assert not equal(form_of(scale), form_of(scale * (1 + 1.1e-9)))


def test_a_number_that_equals_nothing_still_has_a_key_so_that_repeating_it_is_seen():
    assert form_key(form_of(math.nan)) == form_key(form_of(-math.nan))


@pytest.mark.parametrize("text", ["'", '"', "''", "' '", ",", " , ,", "\u2028"])
def test_texts_of_nothing_but_marks_are_normalised_without_harm(text):
    assert isinstance(normalise_text(text), str)


@pytest.mark.parametrize(
    ("accepted", "value", "verdict"),
    [
        (["Paris", "City of Light"], "city of light", True),
        (["Paris", "City of Light"], "Rome", False),
        ("Paris", "paris", True),  # a non-list is the only alternative
        (5, 5.0, True),
        ([], "Paris", False),
        ([[1, 2], [2, 1]], [2, 1], True),
        ([[1, 2], [2, 1]], [1, 1], False),
        ([[1, 2], [2, 1]], 1, False),  # an accepted list is a value, not more alternatives
        ([[[1, 2], [3]]], [[1, 2], [3]], True),
        ([[[1, 2], [3]]], [[1, 3], [3]], False),
        (["celsius", ""], "", True),
        ([5, "", None], None, True),
        ([True, ""], 1, False),
        ([{"adults": [2], "kids": [0, ""]}], {"adults": 2}, True),
        ([{"adults": [2], "kids": [0, ""]}], {"adults": 2, "kids": 0}, True),
        ([{"adults": [2], "kids": [0, ""]}], {"adults": 2, "kids": 1}, False),
        ([{"adults": [2], "kids": [0, ""]}], {"kids": 0}, False),
        ([{"adults": [2], "kids": [0, ""]}], {"adults": 2, "pets": 1}, False),
        ([{"adults": [2], "kids": [0, ""]}], {"adults": True}, False),
        ([{"adults": [2]}], [["adults", 2]], False),
        ([{"adults": 2}], {"adults": 2}, True),
        ([{"1": ["a"]}], {1: "a"}, False),
        ([{"a": [{"b": ["x", "y"]}]}], {"a": {"b": "Y"}}, True),
        ([{"a": [[1, 2]]}], {"a": [1, 2]}, True),
        ([{"a": [[1, 2]]}], {"a": 1}, False),
        ([{}], {}, True),
        ([[{"a": ["x", "y"]}]], [{"a": "y"}], True),  # dicts in a list: with alternatives, as in the official answers
        ([[{"a": 1}]], [{"a": 1}], True),
        ([[{"a": 1}]], [{"a": 2}], False),
        ([[{"a": [1, 2]}]], [{"a": [1, 2]}], True),  # or as a value
    ],
)
def test_a_gold_argument_accepts_its_alternatives_only(accepted, value, verdict):
    assert accepts(accepted, form_of(value)) is verdict


@pytest.mark.parametrize(
    ("accepted", "verdict"), [(["celsius", ""], True), ([""], True), ("", True), (["x"], False), ([0, False], False)]
)
def test_an_argument_may_be_omitted_where_the_empty_text_is_accepted(accepted, verdict):
    assert may_be_omitted(accepted) is verdict
