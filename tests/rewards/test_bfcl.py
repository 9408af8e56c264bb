"""The BFCL oracle: worked examples, merging, matching, coordination, penalties."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from mapl_core.domains.base import Task
from mapl_core.rewards import bfcl_reward, score_batch
from mapl_core.rewards.bfcl import PARTS, callers, measure, role_gap


def schema(name, required, **properties):
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": name, "description": "", "parameters": parameters}


def task_of(functions, gold):
    return Task("t", "small", "eval", {"function": functions, "ground_truth": gold})


def weather(city):
    return {"get_weather": {"city": [city], "unit": ["celsius", ""]}}


WEATHER = schema("get_weather", ["city"], city={"type": "string"}, unit={"type": "string"})
W = task_of([WEATHER], [weather("Paris"), weather("Tokyo")])
W_PARIS = task_of([WEATHER], [weather("Paris")])
TEAM = {"make_team": {"size": [{"adults": [2], "kids": [0, ""]}]}}
M = task_of(
    [schema("geo.area", ["points"], points={"type": "array"}), schema("make_team", ["size"], size={"type": "dict"})],
    [{"geo.area": {"points": [[1, 2], [2, 1]]}}, TEAM, TEAM],
)
P, T, R = (f'get_weather(city="{city}")' for city in ("Paris", "Tokyo", "Rome"))
JSON_P = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
JSON_T = JSON_P.replace("Paris", "Tokyo")
# id, task, responses, parts, total, E, cost (domains.md, section 4.7)
EXAMPLES = [
    ("a", W, [P, T], (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 1),
    ("b", W, [f"{P}\n{T}", "[]"], (0.1, 1.5, 0.16, 0, -0.15, 0), 1.61, 1, 1),
    ("c", W, [f"{P}\n{T}", f"{P}\n{T}"], (0.1, 1.5, 0.16, -0.6, 0, 0), 1.16, 1, 2),
    ("d", W, ["", "[ ]"], (0, 0, 0, 0, -0.3, 0), -0.3, 0, 0),
    ("e", W, [P, P], (0.1, 0.640625, 0.32, -0.3, 0, 0), 0.760625, 0, 1),
    ("f", W, [P, ""], (0.1, 0.640625, 0.2, 0, -0.15, 0), 0.790625, 0, 0.5),
    ("g", W, [P, R], (0.1, 0.9609375, 0.4, 0, 0, 0), 1.4609375, 0, 1),
    ("h", W, ['get_weather(city="Paris", unit="Celsius")', "get_weather(' tokyo ')"],
     (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 1),
    ("i", W, ['get_weather(city="Paris", unit="kelvin")', T], (0.1, 0.9609375, 0.4, 0, 0, 0), 1.4609375, 0, 1),
    ("j", W, ['get_weather(city="Paris", lang="fr")', T], (0.1, 1.015625, 0.4, 0, 0, 0), 1.515625, 0, 1),
    ("k", W, [f"{P}\n{T}", R], (0.1, 1.03125, 0.2, 0, 0, -0.05), 1.28125, 0, 1.5),
    ("l", W, [f"{P} {P} {P}", T], (0.1, 1.5, 0.4, -0.6, 0, 0), 1.4, 1, 2),
    ("m", W, [f"I'll call:\n1. {P}\n2. print({T})", 'get_time(city="Rome")'],
     (0.1, 1.5, 0.16, 0, -0.15, 0), 1.61, 1, 1),
    ("n", W, [f"[{JSON_P}]", f"<tool_call>{JSON_T}</tool_call>"], (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 1),
    ("o", W, [f'{P}\nget_weather(city="To', f"```python\n{T}\n```"], (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 1),
    ("p", W, [f"{R}\n{R}\n{R}", ""], (0.1, 0.4765625, 0.2, -0.6, -0.15, 0), 0.0265625, 0, 1.5),
    ("q", M, ["geo.area(points=[1, 2])\nmake_team(size={'adults': 2})", "make_team(size={'adults': 2})"],
     (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 1.5),
    ("r", M, ["geo_area(points=(2, 1.0))", "make_team(size={'adults': True})"],
     (0.1, 0.59375, 0.266667, 0, 0, 0), 0.960417, 0, 1),
    ("s", M, ["geo.area(points=1)", "make_team({'adults': 2, 'kids': 0})\nmake_team({'adults': 2, 'pets': 1})"],
     (0.1, 0.6875, 0.4, 0, 0, 0), 1.1875, 0, 1.5),
    ("t", W_PARIS, ["[]", P], (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 0.5),
    ("u", W, [P, T, "[]"], (0.1, 1.5, 0.4, 0, 0, 0), 2.0, 1, 2 / 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "task", "responses", "parts", "total", "exact", "cost"), EXAMPLES, ids=[example[0] for example in EXAMPLES]
)
def test_worked_example_earns_its_parts_and_total(name, task, responses, parts, total, exact, cost):
    reward = bfcl_reward(responses, task)
    assert tuple(reward.parts) == PARTS
    assert tuple(reward.parts.values()) == pytest.approx(parts, abs=1e-6)
    assert reward.total == pytest.approx(total, abs=1e-6)
    measured = measure(responses, task)
    assert (measured.is_exact, measured.cost) == (exact, pytest.approx(cost))


def test_the_best_joint_answer_earns_exactly_2():
    assert bfcl_reward([P, T], W).total == 2.0


@pytest.mark.parametrize("example", [example for example in EXAMPLES if len(example[2]) == 2], ids=lambda e: e[0])
def test_the_order_of_the_agents_does_not_matter(example):
    _, task, responses, *_ = example
    assert bfcl_reward(responses[::-1], task) == bfcl_reward(responses, task)


# Matching ---------------------------------------------------------------------------------------------


def similarity(text, gold, functions=(WEATHER,)):
    """A of one agent's text against one gold call."""
    return measure([text], task_of(list(functions), [gold])).similarity


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("get_weather('Paris')", 1),
        ("get_weather('Paris', 'celsius')", 1),
        ("get_weather('Paris', 'kelvin')", 1 / 2),
        ("get_weather('Rome')", 1 / 2),  # the omitted optional argument matches
        ("get_weather('Rome', 'kelvin')", 0),
        ("get_weather()", 1 / 2),
        ("get_weather('Paris', lang='fr')", 2 / 3),
        ("get_weather('Paris', 'celsius', 'fr', x=1)", 2 / 4),
    ],
)
def test_similarity_is_the_share_of_matching_arguments_over_gold_and_extra_ones(call, expected):
    assert similarity(call, weather("Paris")) == pytest.approx(expected)


def test_a_call_of_another_function_has_no_similarity():
    functions = [WEATHER, schema("get_time", ["city"], city={"type": "string"})]
    assert similarity("get_time('Paris')", weather("Paris"), functions) == 0


def test_a_gold_call_without_arguments_is_matched_exactly_or_with_similarity_0_7():
    stop = schema("stop", [], force={"type": "boolean", "default": False})
    assert similarity("stop()", {"stop": {}}, [stop]) == 1
    assert similarity("stop(force=True)", {"stop": {}}, [stop]) == 0.7
    assert similarity("stop(1, 2)", {"stop": {}}, [stop]) == 0.7
    assert similarity("stop(force=False)", {"stop": {}}, [stop]) == 1


def test_an_extra_argument_equal_to_its_default_is_not_extra():
    with_default = schema("f", ["a"], a={"type": "any"}, b={"type": "string", "default": "Celsius"})
    assert similarity("f(1, b=' celsius ')", {"f": {"a": [1]}}, [with_default]) == 1
    assert similarity("f(1, b='kelvin')", {"f": {"a": [1]}}, [with_default]) == 1 / 2


def test_a_required_argument_may_be_omitted_where_the_answer_says_so():
    assert similarity("f()", {"f": {"a": [0, ""]}}, [schema("f", ["a"], a={"type": "integer"})]) == 1


def test_an_argument_of_the_answer_need_not_be_in_the_schema():
    assert similarity("f(kind='x')", {"f": {"kind": ["x"]}}, [schema("f", [])]) == 1


def test_the_matching_is_optimal_and_not_greedy():
    """f(1, 2) fits both gold calls, f(1, 3) only the first: a greedy matching would give that away."""
    function = schema("f", ["a", "b"], a={"type": "integer"}, b={"type": "integer"})
    gold = [{"f": {"a": [1], "b": [2, 3]}}, {"f": {"a": [1], "b": [2]}}]
    for text in ("f(1, 2)\nf(1, 3)", "f(1, 3)\nf(1, 2)"):
        assert measure([text], task_of([function], gold)).is_exact


def test_the_matching_equals_the_best_of_all_assignments():
    function = schema("f", ["a", "b", "c"], **{name: {"type": "integer"} for name in "abc"})
    wanted = [(1, 1, 1), (1, 2, 3), (3, 2, 1)]
    issued = [(1, 2, 1), (1, 1, 3), (3, 3, 1), (2, 2, 2)]
    best = max(
        sum(
            given == accepted
            for call, gold in zip(chosen, wanted, strict=True)
            for given, accepted in zip(call, gold, strict=True)
        )
        for chosen in itertools.permutations(issued, 3)
    )
    gold = [{"f": {name: [accepted] for name, accepted in zip("abc", values, strict=True)}} for values in wanted]
    measured = measure(["\n".join(f"f{call}" for call in issued)], task_of([function], gold))
    assert measured.similarity == pytest.approx(best / 3 / 3)


def test_names_count_as_multisets():
    functions = [WEATHER, schema("get_time", ["city"], city={"type": "string"})]
    gold = [weather("Paris"), {"get_time": {"city": ["Paris"]}}]
    measured = measure(["get_weather('a')\nget_weather('b')\nget_weather('c')"], task_of(functions, gold))
    assert measured.name_f1 == pytest.approx(2 * 1 / (3 + 2))


# Merging ----------------------------------------------------------------------------------------------


def test_calls_that_say_the_same_are_one_call_however_they_are_written():
    texts = ["get_weather('Paris')", 'get_weather(city=" PARIS ")', JSON_P]
    measured = measure(texts, W)
    assert (measured.merged, measured.duplicates, measured.calls) == (1, 2, (1, 1, 1))


def test_an_optional_argument_written_out_makes_another_call():
    measured = measure([P, "get_weather('Paris', 'celsius')"], W)
    assert (measured.merged, measured.duplicates) == (2, 0)


@pytest.mark.parametrize(("times", "kept"), [(1, 1), (2, 2), (3, 2), (5, 2)])
def test_a_call_is_kept_as_often_as_gold_calls_match_it_exactly(times, kept):
    measured = measure(["make_team({'adults': 2})\n" * times, ""], M)
    assert (measured.merged, measured.duplicates) == (kept, times - kept)


@pytest.mark.parametrize("number", ["1", "1.0", "1e0", "0x1"])
def test_numbers_written_in_two_ways_are_one_call(number):
    function = schema("f", ["a"], a={"type": "integer"})
    measured = measure(["f(1)", f"f({number})"], task_of([function], [{"f": {"a": [1]}}]))
    assert (measured.merged, measured.duplicates) == (1, 1)


def test_one_and_true_are_two_calls():
    function = schema("f", ["a"], a={"type": "any"})
    assert measure(["f(1)", "f(True)\nf('1')\nf([1])"], task_of([function], [{"f": {"a": [1]}}])).merged == 4


def test_an_unread_number_that_is_repeated_counts_as_a_duplicate():
    nan = '{"name": "f", "arguments": {"a": NaN}}'
    measured = measure([nan, nan], task_of([schema("f", ["a"], a={"type": "float"})], [{"f": {"a": [1]}}]))
    assert (measured.merged, measured.duplicates, measured.similarity) == (1, 1, 0)


# Coordination and penalties ---------------------------------------------------------------------------

FOUR = task_of([WEATHER], [weather(city) for city in "abcd"])
THREE = task_of([WEATHER], [weather(city) for city in "abc"])


def issue(cities):
    return "\n".join(f"get_weather('{city}')" for city in cities) or "[]"


@pytest.mark.parametrize(
    ("task", "shares", "balance"),
    [
        (FOUR, ("ab", "cd"), 1),
        (FOUR, ("abc", "d"), 1 - 2 / 4),
        (FOUR, ("abcd", ""), 0),
        (FOUR, ("abcd", "abcd"), 0),
        (THREE, ("ab", "c"), 1),
        (THREE, ("a", "bc"), 1),  # any agent may take the larger share
        (THREE, ("a", "b", "c"), 1),
        (FOUR, ("b", "cd", "a"), 1),
        (FOUR, ("", "cd", "ab"), 1 - 2 / 4),
        (THREE, ("abc",), 1),
        (THREE, ("aaa", ""), 1 - 2 / 3),  # a repeated call is worth one
    ],
)
def test_balance_compares_the_sorted_shares_with_an_even_division(task, shares, balance):
    assert measure([issue(share) for share in shares], task).balance == pytest.approx(balance)


@pytest.mark.parametrize(
    ("task", "shares", "inactive"),
    [
        (FOUR, ("ab", "cd"), 0),
        (FOUR, ("abcd", ""), 1),
        (FOUR, ("", ""), 2),
        (FOUR, ("a", "", ""), 2),
        (FOUR, ("", "", ""), 3),
        (THREE, ("abc", ""), 1),
        (W_PARIS, ("", "x"), 0),
        (W_PARIS, ("", ""), 1),  # one gold call keeps only one agent busy
        (W, ("x", "", ""), 1),
        (FOUR, ("",), 1),
    ],
)
def test_an_agent_is_inactive_if_it_issues_nothing_although_there_is_a_gold_call_for_it(task, shares, inactive):
    responses = [issue(share) for share in shares]
    assert measure(responses, task).inactive == inactive
    assert bfcl_reward(responses, task).parts["inactive"] == pytest.approx(-0.3 * inactive / len(shares))


def test_the_duplicate_penalty_grows_with_each_repetition_and_is_bounded():
    penalties = [bfcl_reward([issue("a" * times), issue("bcd")], FOUR).parts["duplicates"] for times in range(1, 8)]
    assert penalties == pytest.approx([0, -0.15, -0.3, -0.45, -0.6, -0.6, -0.6])


def test_the_excess_penalty_grows_with_each_call_too_many_and_is_bounded():
    penalties = [bfcl_reward([issue("abcdefghij"[:count]), ""], FOUR).parts["excess"] for count in range(3, 11)]
    assert penalties == pytest.approx([0, 0, -0.025, -0.05, -0.075, -0.1, -0.1, -0.1])


def test_count_agreement_is_part_of_coordination():
    # C = 1 - 1/4, Bal = 1 - 1/4
    assert bfcl_reward([issue("ab"), issue("c")], FOUR).parts["coordination"] == pytest.approx(0.4 * 0.75)


def test_the_worst_team_stays_above_the_lower_end_of_the_range():
    responses = ["\n".join([issue("xyzuvwstq")] * 3), ""]
    reward = bfcl_reward(responses, task_of([WEATHER, schema("f", [])], [{"f": {}}, {"f": {}}]))
    assert -1.0 <= reward.total < -0.5
    assert reward.total == pytest.approx(sum(reward.parts.values()))


def test_calls_of_other_functions_earn_nothing_and_are_counted():
    assert bfcl_reward(["get_time()", "get_time()"], W) == bfcl_reward(["", ""], W)
    measured = measure(["get_time()", "tools.get_weather('Paris')"], W)
    assert (measured.unknown, measured.calls, measured.merged) == (2, (0, 0), 0)


def test_one_agent_may_answer_alone():
    assert bfcl_reward([f"{P}\n{T}"], W).total == 2.0


# Wrong input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("responses", "error"),
    [(P, TypeError), (None, TypeError), ([P, 3], TypeError), ({P}, TypeError), ([], ValueError), ([[P]], TypeError)],
)
def test_anything_but_a_list_of_texts_is_refused(responses, error):
    with pytest.raises(error):
        bfcl_reward(responses, W)


def test_a_wrong_number_of_responses_is_refused_where_the_number_is_known():
    with pytest.raises(ValueError, match="expected 2 responses"):
        bfcl_reward([P, T, ""], W, num_agents=2)
    with pytest.raises(ValueError, match="2 joint responses for 1 tasks"):
        score_batch(bfcl_reward, [[P, T], [P, T]], [W])


def test_scoring_is_deterministic_and_leaves_the_task_alone():
    before = repr(M)
    assert bfcl_reward(["make_team(1)", None], M) == bfcl_reward(["make_team(1)", None], M)
    assert repr(M) == before


def test_callers_counts_exact_calls_by_gold_call_and_agent():
    """Wrong cities, other functions and unread calls count for nobody; a repeated call counts as often as issued."""
    assert callers([f"{P}\n{P}", f"{T}\n{R}"], W) == [(2, 0), (0, 1)]
    assert callers(["", None], W) == [(0, 0), (0, 0)]


def test_the_role_gap_is_the_difference_of_the_agents_frequencies_call_by_call():
    """Two answers to a request of two calls, one to a request of one: |1 - 1/2|, |0 - 1|, |1 - 1|, their mean."""
    first = [[(True, False), (False, True)], [(True, True), (False, True)]]
    second = [[(True, True)]]
    assert role_gap([first, second]) == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert role_gap([second]) == 0.0
    three = [[[(True, True, False)], [(True, False, False)]]]
    assert role_gap(three) == 1.0  # of the first and the last of three


def test_shuffled_agents_show_the_role_gap_that_chance_makes():
    divided = [[[(True, False)]] * 400]
    assert role_gap(divided) == 1.0
    assert role_gap(divided, Random(0)) < 0.15  # of 400 fair coins; the standard deviation of the gap is 0.05
    assert role_gap(divided, Random(0)) == role_gap(divided, Random(0))
    swapped = [[[tuple(reversed(call)) for call in answer] for answer in answers] for answers in divided]
    assert role_gap(swapped) == role_gap(divided)
    assert role_gap([[[(True,)]] * 3]) == role_gap([[[(True,)]] * 3], Random(0)) == 0.0
