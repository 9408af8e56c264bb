"""The TLDR oracle: worked examples, limits, words, transition lists, and what holds for any text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapl_core.rewards import tldr_reward
from mapl_core.rewards.tldr import TRANSITIONS, measure, split_words, stop_words, transition_categories


def numbered(letter, first, last):
    return " ".join(f"{letter}{number:02d}" for number in range(first, last + 1))


def k(first, last):
    return numbered("k", first, last)


def w(words, length):
    """The first `words` words of k(1, ...) with letters x appended up to `length` characters."""
    return k(1, words).ljust(length, "x")


STUFFED = "k01 moreover such as namely because however next indeed to sum up similarly although unless meanwhile"
# id, y_0, y_1, (r, u, n; None where the example stops before), parts, total
EXAMPLES = [
    ("a", w(8, 60), w(16, 96), (1.6, 2, 0), (0.5, 1, 0.5, 0.6, 0), 2.6),
    ("b", w(8, 60), w(16, 192), (3.2, 2, 0), (0.5, 1, 0.5, 0.6, 0), 2.6),
    ("c", w(8, 60), w(16, 66), (1.1, None, None), (0.5, 0, 0, 0, 0), 0.5),
    ("d", w(8, 60), w(16, 300), (5.0, None, None), (0.5, 0, 0, 0, 0), 0.5),
    ("e", w(8, 60), w(16, 78), (1.3, 2, 0), (0.5, 0.4, 0.5, 0.6, 0), 2.0),
    ("f", w(8, 60), w(16, 246), (4.1, 2, 0), (0.5, 0.5, 0.5, 0.6, 0), 2.1),
    ("g", w(10, 60), w(13, 120), (2, 1.3, None), (0.5, 1, 0, 0, 0), 1.5),
    ("h", w(20, 100), w(33, 200), (2, 1.65, 0), (0.5, 1, 0.25, 0.6, 0), 2.35),
    ("i", k(1, 8), k(1, 16) + " however", (71 / 31, 17 / 8, 1), (0.5, 1, 0.5, 0.6, 0.16), 2.76),
    ("j", k(1, 8) + " k01", STUFFED, (101 / 35, 2, 12), (0.5, 1, 0.5, 0.6, 0.4), 3.0),
    ("k", k(1, 8), k(1, 8) + " " + k(1, 8), (63 / 31, 1, None), (0.5, 1, 0, 0, 0), 1.5),
    ("l", k(1, 40), "k01 " + numbered("m", 1, 79), (319 / 159, 2, 0), (0.5, 1, 0.5, 0.168067, 0), 2.168067),
    ("m", k(1, 7), k(1, 16), (None, None, None), (0, 0, 0, 0, 0), 0.0),
    ("n", " ".join(["ab"] * 100), " ".join(["ab"] * 256), (767 / 299, 1, None), (0.5, 1, 0, 0, 0), 1.5),
    ("o", " ".join(["ab"] * 100), " ".join(["ab"] * 257), (None, None, None), (0, 0, 0, 0, 0), 0.0),
    ("p", k(1, 8), k(1, 14) + " nextdoor howeverish", (75 / 31, 2, 0), (0.5, 1, 0.5, 0.6, 0), 2.6),
    ("q", "the of and to in the of and", "the of and to in is it was for with on the of and to in", (55 / 27, 2.2, 0),
     (0.5, 1, 0.5, 0, 0), 2.0),
    ("r", None, k(1, 16), (None, None, None), (0, 0, 0, 0, 0), 0.0),
    ("s", "  " + k(1, 8) + "\n", "<think>\n\n</think>\n\n" + k(1, 16) + "\n\n", (63 / 31, 2, 0),
     (0.5, 1, 0.5, 0.6, 0), 2.6),
]  # fmt: skip
IDS = [example[0] for example in EXAMPLES]
PARTS = ("structure", "length", "unique", "style", "coherence")


@pytest.mark.parametrize(("name", "short", "detailed", "measured", "parts", "total"), EXAMPLES, ids=IDS)
def test_worked_example_earns_its_parts_and_total(name, short, detailed, measured, parts, total):
    reward = tldr_reward([short, detailed], None)
    assert reward.parts == pytest.approx(dict(zip(PARTS, parts, strict=True)), abs=1e-6)
    assert tuple(reward.parts) == PARTS
    assert reward.total == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(("name", "short", "detailed", "measured", "parts", "total"), EXAMPLES, ids=IDS)
def test_worked_example_measures_its_ratios_and_transitions(name, short, detailed, measured, parts, total):
    found = measure([short, detailed])
    for value, expected in zip((found.length_ratio, found.unique_ratio, found.transitions), measured, strict=True):
        assert expected is None or value == pytest.approx(expected, abs=1e-12)


def test_worked_example_l_shares_one_word_of_119():
    assert measure([k(1, 40), "k01 " + numbered("m", 1, 79)]).overlap == pytest.approx(1 / 119, abs=1e-12)


def test_limits_are_inclusive_and_give_exact_values():
    """Exact values matter: a rounding error would break ties between pairs that are equally good."""
    lengths = {60 * 1.1: 0.0, 60 * 1.6: 1.0, 60 * 3.2: 1.0, 60 * 5.0: 0.0}
    for length, value in lengths.items():
        assert tldr_reward([w(8, 60), w(16, round(length))], None).parts["length"] == value
    assert tldr_reward([w(10, 60), w(13, 120)], None).parts["unique"] == 0.0
    assert tldr_reward([w(10, 60), w(20, 120)], None).parts["unique"] == 0.5


@pytest.mark.parametrize(
    ("length", "value"),
    [
        (67, (67 / 60 - 1.1) / 0.5),
        (95, (95 / 60 - 1.1) / 0.5),
        (193, (5 - 193 / 60) / 1.8),
        (299, (5 - 299 / 60) / 1.8),
    ],
)
def test_the_length_part_falls_linearly_outside_its_plateau(length, value):
    assert 0 < value < 1
    assert tldr_reward([w(8, 60), w(16, length)], None).parts["length"] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("length", [65, 301, 1000])
def test_a_length_ratio_beyond_the_tolerances_stops_the_scoring(length):
    assert tldr_reward([w(8, 60), w(16, length)], None).total == 0.5


@pytest.mark.parametrize(("count", "value"), [(1, 0.4), (2, 0.4 + 0.6 / 11), (7, 0.4 + 0.6 * 6 / 11), (12, 1.0)])
def test_the_first_transition_category_is_worth_two_fifths_of_coherence_and_the_rest_share_the_remainder(count, value):
    phrases = [listed[0] for listed in TRANSITIONS.values()][:count]
    short, detailed = w(20, 120), k(1, 45) + " " + " ".join(phrases)
    reward = tldr_reward([short, detailed], None)
    assert reward.parts["coherence"] == pytest.approx(0.4 * value, abs=1e-12)


def test_summaries_without_a_shared_word_still_earn_their_coherence():
    reward = tldr_reward([k(1, 8), numbered("m", 1, 16) + " however"], None)
    assert reward.parts == pytest.approx(dict(zip(PARTS, (0.5, 1, 0.5, 0, 0.16), strict=True)))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("count", "structure"), [(7, 0.0), (8, 0.5), (256, 0.5), (257, 0.0)])
def test_structure_asks_both_texts_for_8_to_256_whitespace_words(side, count, structure):
    texts = [k(1, 30), k(1, 30)]
    texts[side] = " ".join(["ab"] * count)
    assert tldr_reward(texts, None).parts["structure"] == structure


# Cleaning, characters, words ----------------------------------------------------------------------------------------

GOOD = (k(1, 8), k(1, 16) + " however")  # example i, 2.76


@pytest.mark.parametrize(
    "variant",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace(" ", "\r\n"),
        lambda text: text.replace(" ", "\r"),
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: "<think>however, therefore</think>" + text,
        lambda text: "\n\t " + text + " \n",
        lambda text: text.upper(),
    ],
    ids=["byte-order mark", "CRLF", "CR", "no-break space", "thought", "outer white space", "upper case"],
)
def test_marks_line_ends_thoughts_and_case_do_not_change_the_reward(variant):
    plain = tldr_reward(GOOD, None)
    assert tldr_reward([variant(text) for text in GOOD], None) == plain
    assert measure([variant(text) for text in GOOD]) == measure(GOOD)
    assert plain.total == pytest.approx(2.76)


@pytest.mark.parametrize("side", [0, 1])
def test_a_thought_that_never_ends_leaves_nothing_to_score(side):
    texts = list(GOOD)
    texts[side] = "<think>" + texts[side]
    assert tldr_reward(texts, None).total == 0.0


def test_composed_and_decomposed_letters_are_the_same_text():
    composed = "caf\u00e9 " + k(2, 8)
    decomposed = "cafe\u0301 " + k(2, 8)
    assert measure([composed, composed]) == measure([decomposed, decomposed])
    assert measure([composed, decomposed]).length_ratio == 1.0
    assert measure([composed, decomposed]).overlap == 1.0
    assert measure(["a" * 8, "e\u0301" * 4]).length_ratio == 4 / 8  # one character each, not two


def test_a_word_with_an_inner_apostrophe_is_one_word_whichever_apostrophe():
    assert split_words("Don't stop") == ["don't", "stop"]
    assert split_words("don\u2019t stop") == ["don't", "stop"]
    assert split_words("'quoted' dogs' rock'n'roll") == ["quoted", "dogs", "rock'n'roll"]
    assert split_words("my_name is R2-D2, \u00c9mile; 3.5") == ["my_name", "is", "r2", "d2", "\u00e9mile", "3", "5"]


def test_text_without_spaces_is_one_word_and_scores_zero():
    chinese = "\u6211\u7684\u59d0\u59d0\u4e0a\u5468\u5f04\u574f\u4e86\u6211\u7684\u624b\u673a" * 9
    assert measure([chinese, chinese * 2]).whitespace_words == (1, 1)
    assert tldr_reward([chinese, chinese * 2], None).total == 0.0


def test_texts_of_punctuation_alone_stop_at_the_unique_words():
    reward = tldr_reward(["! " * 8, "? " * 16], None)  # 15 and 31 characters after stripping
    assert reward.parts == {"structure": 0.5, "length": 1.0, "unique": 0.0, "style": 0.0, "coherence": 0.0}
    assert (measure(["! " * 8, "? " * 16]).unique_ratio, measure(["! " * 8, "? " * 16]).overlap) == (0.0, 0.0)


def test_stop_words_count_as_unique_words_but_not_as_shared_vocabulary():
    # Different words: 4 and 6. Without the, a and and: {dog, cat} and {dog, bird, tree} share 1 of 4.
    measured = measure(["the dog and cat", "the dog a bird and tree"])
    assert measured.unique_ratio == 6 / 4
    assert measured.overlap == 1 / 4


def test_stop_words_are_those_of_scikit_learn():
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    assert stop_words() == ENGLISH_STOP_WORDS


def test_pocket_text_scores_the_same_with_its_stop_attached_or_not_apart_from_its_length():
    attached = measure(["my boss sold my ring .", "however, my boss sold it ."])
    apart = measure(["my boss sold my ring.", "however , my boss sold it ."])
    assert (attached.unique_ratio, attached.overlap, attached.transitions) == (
        apart.unique_ratio, apart.overlap, apart.transitions
    )  # fmt: skip
    assert attached.transitions == 1


def test_measurements_of_an_empty_short_summary_are_zero_not_infinite():
    measured = measure([None, GOOD[1]])
    assert (measured.length_ratio, measured.unique_ratio, measured.overlap) == (0.0, 0.0, 0.0)


# Wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [[], ["one"], ["one", "two", "three"]])
def test_a_wrong_number_of_summaries_is_a_value_error(responses):
    with pytest.raises(ValueError, match="expected 2 responses"):
        tldr_reward(responses, None)
    with pytest.raises(ValueError, match="expected 2 responses"):
        measure(responses)


@pytest.mark.parametrize("responses", ["ab", None, 2, [1, "two"], [["one"], ["two"]], [b"one", b"two"]])
def test_responses_of_a_wrong_type_are_a_type_error(responses):
    with pytest.raises(TypeError):
        tldr_reward(responses, None)


# Transition lists ----------------------------------------------------------------------------------------

ANCHORS = {
    "elaboration": ("in addition", "furthermore", "moreover"),
    "examples": ("for example", "for instance", "such as"),
    "explanation": ("in other words", "that is to say", "namely"),
    "cause_effect": ("because", "therefore", "as a result"),
    "contrast": ("however", "in contrast", "whereas"),
    "sequence": ("firstly", "next", "finally"),
    "emphasis": ("indeed", "in fact", "above all"),
    "summary": ("in summary", "to sum up", "in conclusion"),
    "comparison": ("similarly", "likewise", "in the same way"),
    "concession": ("although", "even though", "nevertheless"),
    "condition": ("unless", "provided that", "as long as"),
    "time": ("meanwhile", "afterwards", "previously"),
}
ALL_PHRASES = [(category, phrase) for category, phrases in TRANSITIONS.items() for phrase in phrases]


def test_the_twelve_categories_have_their_anchors_and_10_to_25_phrases_each():
    assert set(TRANSITIONS) == set(ANCHORS)
    for category, phrases in TRANSITIONS.items():
        assert set(ANCHORS[category]) <= set(phrases)
        assert 10 <= len(phrases) <= 25
        assert len(set(phrases)) == len(phrases)


def test_no_phrase_stands_in_two_categories_or_inside_a_phrase_of_another():
    clashes = [
        (one, other)
        for category, one in ALL_PHRASES
        for other_category, other in ALL_PHRASES
        if category != other_category and one in other
    ]
    assert clashes == []


def test_phrases_are_lower_case_words_and_single_words_have_at_least_four_letters():
    for _, phrase in ALL_PHRASES:
        assert re.fullmatch(r"[a-z]+( [a-z]+)*", phrase)
        assert " " in phrase or len(phrase) >= 4


@pytest.mark.parametrize(("category", "phrase"), ALL_PHRASES, ids=[phrase for _, phrase in ALL_PHRASES])
def test_each_phrase_earns_its_own_category_alone(category, phrase):
    assert transition_categories(split_words(f"k01 {phrase} k02")) == {category}
    assert transition_categories(split_words(phrase.title())) == {category}


@pytest.mark.parametrize(
    "text", ["nextdoor", "howeverish", "xbecause", "in addiction", "index", "such k01 as", "fact in", "as a"]
)
def test_a_phrase_inside_a_word_or_torn_apart_earns_nothing(text):
    assert transition_categories(split_words(f"k01 {text} k02")) == set()


@pytest.mark.parametrize("text", ["In\nFact", "in, fact", "(in fact)", "IN  FACT!", "in\u00a0fact"])
def test_a_phrase_is_found_across_any_gap_between_its_words(text):
    assert transition_categories(split_words(text)) == {"emphasis"}


def test_only_the_detailed_summary_is_searched_for_transitions():
    assert measure([k(1, 8) + " however", k(1, 16)]).transitions == 0


def test_repeating_a_category_counts_once():
    assert measure([k(1, 8), "however whereas however in contrast"]).transitions == 1


# Any text ----------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "\ufeff", "\r\n", "\r", "\u00a0", "\u2019", "e\u0301", "\ud800", "\x00", "\u0130", "\u202e",
     "however ", "in fact ", "don't ", "k01 ", "<agent_0>", "```\n", "\u6211", " ", "\n", "ab " * 40]
)  # fmt: skip
ANY_TEXT = st.none() | st.text(max_size=300) | st.lists(FRAGMENTS | st.text(max_size=5), max_size=60).map("".join)
WORDY = st.lists(
    st.sampled_from(["the", "dog", "cat", "however", "k01", "runs", "home", "late"]), min_size=8, max_size=60
)


@settings(max_examples=150, deadline=None)
@given(st.tuples(ANY_TEXT, ANY_TEXT) | st.tuples(WORDY.map(" ".join), WORDY.map(" ".join)))
def test_any_pair_of_texts_gets_a_finite_reward_that_its_parts_add_up_to(responses):
    reward = tldr_reward(responses, None)
    assert math.isfinite(reward.total) and 0.0 <= reward.total <= 3.0
    assert tuple(reward.parts) == PARTS
    assert all(0.0 <= part <= most for part, most in zip(reward.parts.values(), (0.5, 1, 0.5, 0.6, 0.4), strict=True))
    assert sum(reward.parts.values()) == pytest.approx(reward.total, abs=1e-9)
    measured = measure(responses)
    assert all(math.isfinite(value) for value in (measured.length_ratio, measured.unique_ratio, measured.overlap))
    assert 0.0 <= measured.overlap <= 1.0 and 0 <= measured.transitions <= 12


@settings(max_examples=50, deadline=None)
@given(st.lists(ANY_TEXT, min_size=2, max_size=2))
def test_the_reward_is_a_pure_function_of_the_two_texts(responses):
    before = list(responses)
    assert tldr_reward(responses, None) == tldr_reward(tuple(before), {"another": "task"})
    assert responses == before


def test_a_very_long_hostile_text_is_scored_at_once():
    hostile = "<think>" * 20_000 + "'" * 20_000 + "a'" * 20_000 + " " * 20_000
    assert tldr_reward([hostile, hostile], None).total == 0.0
    assert tldr_reward(["x" + hostile, "x" + hostile], None).total == 0.0
