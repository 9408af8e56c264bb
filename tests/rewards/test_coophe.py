"""The CoopHE oracle: worked examples, stages, program, tests, and what holds for any text."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from mapl_core.rewards.coophe import (
    PARTS,
    coophe_metrics,
    coophe_reward,
    evaluate,
    feedback,
    join_program,
    problem_of,
)
from mapl_core.rewards.python_source import read_answer
from mapl_core.sandbox import Limits, Sandbox, Verdict

PROMPT = 'def f(x):\n    """Square x, then add three."""\n'
TEST = (
    "def check(candidate):\n    assert candidate(0) == 3\n    assert candidate(1) == 4\n"
    "    assert candidate(2) == 7\n    assert candidate(-3) == 12\n"
)
A = "def aux(x):\n    return x * x\n"
A3 = "def aux(x):\n    return x * x + 3\n"
M = "def f(x):\n    return aux(x) + 3\n"
OWN = "def f(x):\n    return x * x + 3\n"

# name, y_0, y_1, parts, total, call
EXAMPLES = [
    ("a", A, M, (0.4, 0.6, 0.5, 1, 1.5), 4.0, 1),
    ("b", A, "def f(x):\n    return aux(x) + 3 if x >= 0 else 3\n", (0.4, 0.6, 0.5, 0.75, 1.5), 3.75, 1),
    ("c", A3, "def f(x):\n    return aux(x)\n", (0.4, 0.6, 0.5, 1, 0), 2.5, 0),
    ("d", A3, "def f(x):\n    t = x + 1\n    y = x\n    if True:\n        r = aux(y)\n    return(r)\n",
     (0.4, 0.6, 0.5, 1, 0), 2.5, 0),
    ("e", A, OWN, (0.4, 0.6, 0.5, 1, 0), 2.5, 0),
    ("f", "", OWN, (0, 0.6, 0.5, 1, 0), 2.1, 0),
    ("g", A, "def f(x):\n    aux(x)\n    return x * x + 3\n", (0.4, 0.6, 0.5, 1, 0), 2.5, 0),
    ("h", A, "def f(x):\n    # aux(x)\n    return x * x + 3\n", (0.4, 0.6, 0.5, 1, 0), 2.5, 0),
    ("i", A, "def f(x):\n    return aux(x) + 4\n", (0.4, 0.6, 0.5, 0, 0), 1.5, 1),
    ("j", A, "def f(x, y):\n    return aux(x) + y\n", (0.4, 0, 0, 0, 0), 0.4, 0),
    ("k", A, "def f(x, y=3):\n    return aux(x) + y\n", (0.4, 0.6, 0.5, 1, 1.5), 4.0, 1),
    ("l", M, A, (0, 0, 0, 0, 0), 0.0, 0),
    ("m", "def aux(x):\n    print(x)\n", OWN, (0, 0.6, 0.5, 1, 0), 2.1, 0),
    ("n", "def aux(x):\n    return (x *\n", M, (0.4, 0.6, 0, 0, 0), 1.0, 0),
    ("o", A, M + "\ndef f(x):\n    return aux(x", (0.4, 0.6, 0.5, 1, 1.5), 4.0, 1),
    ("p", f"Sure:\n```python\n{A}```\nDone.\n".replace("\n", "\r\n"), f"```py\n{M}", (0.4, 0.6, 0.5, 1, 1.5), 4.0, 1),
    ("q", A, "def f(x):\n    class E:\n        def __eq__(self, o):\n            return True\n"
     "    return E() if aux(x) >= 0 else 0\n", (0.4, 0.6, 0.5, 0, 0), 1.5, 1),
    ("r", A, "import os\ndef f(x):\n    y = aux(x) + 3\n    os._exit(0)\n    return y\n",
     (0.4, 0.6, 0.5, 0, 0), 1.5, 1),
    ("s", "import math\ndef aux(x):\n    return math.pow(x, 2)\n",
     "from operator import add\ndef f(x):\n    return add(aux(x), 3)\n", (0.4, 0.6, 0.5, 1, 1.5), 4.0, 1),
]  # fmt: skip
HANGING = (
    "def f(x):\n    while True:\n        try:\n            aux(x) + 3\n        except BaseException:\n"
    "            pass\n    return x\n"
)
IDS = [example[0] for example in EXAMPLES]


def task(prompt=PROMPT, test=TEST, entry_point="f"):
    return SimpleNamespace(id="t", fields={"prompt": prompt, "test": test, "entry_point": entry_point})


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as sandbox:
        yield sandbox


class Scripted:
    """A sandbox that runs nothing: remembers what it is asked and says that everything passes."""

    def __init__(self, status="pass"):
        self.status, self.asked = status, []

    def run(self, program, tests):
        self.asked.append((program, tests))
        return [Verdict(self.status)] * len(tests)


def metrics(responses, sandbox, of=None):
    of = of or task()
    return coophe_metrics(evaluate(responses, of, sandbox), problem_of(of.fields))


# Worked examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "helper", "main", "parts", "total", "call"), EXAMPLES, ids=IDS)
def test_worked_example_earns_its_parts_its_total_and_its_call(name, helper, main, parts, total, call, sandbox):
    reward = coophe_reward([helper, main], task(), sandbox)
    assert reward.parts == pytest.approx(dict(zip(PARTS, parts, strict=True)), abs=1e-9)
    assert tuple(reward.parts) == PARTS
    assert reward.total == pytest.approx(total, abs=1e-9)
    found = metrics([helper, main], sandbox)
    assert found["call"] == call
    assert found["pass"] == pytest.approx(parts[3])
    assert found["strict_pass"] == (parts[3] == 1)
    assert (found["tests_passed"], found["tests_total"]) == (4 * parts[3], 4)


def test_worked_example_t_hangs_and_is_done_after_three_timeouts():
    """With 0.5 s a test instead of 5 s; the example's own 20 s are a test below."""
    with Sandbox(workers=1, limits=Limits(seconds=0.5)) as sandbox:
        reward = coophe_reward([A, HANGING], task(), sandbox)
        assert tuple(reward.parts.values()) == pytest.approx((0.4, 0.6, 0.5, 0, 0))
        assert metrics([A, HANGING], sandbox)["call"] == 0
        verdicts = evaluate([A, HANGING], task(), sandbox).verdicts
    assert [verdict.status for verdict in verdicts] == ["timeout"] * 3 + ["unrun"]


@pytest.mark.slow
def test_worked_example_t_takes_less_than_20_seconds_with_the_real_limit():
    with Sandbox(workers=1) as sandbox:
        started = time.monotonic()
        assert coophe_reward([A, HANGING], task(), sandbox).total == pytest.approx(1.5)
    assert time.monotonic() - started < 20


# Stages ----------------------------------------------------------------------------------------------------


def test_one_passing_test_unlocks_the_call_part(sandbox):
    reward = coophe_reward([A, "def f(x):\n    return aux(x) + (3 if x == 0 else 9)\n"], task(), sandbox)
    assert (reward.parts["tests"], reward.parts["call"]) == (0.25, 1.5)


def test_a_failure_of_aux_does_not_stop_and_costs_its_part_and_the_call(sandbox):
    reward = coophe_reward(["def aux(x):\n    return\n", M], task(), sandbox)
    assert tuple(reward.parts.values()) == (0, 0.6, 0.5, 0, 0)
    assert metrics(["def helper(x):\n    return 1\n", M], sandbox)["call"] == 0


def test_nothing_runs_where_a_stage_before_the_tests_fails():
    scripted = Scripted()
    for main in ("", "def f(x):\n    pass\n", "def f():\n    return 1\n", "def f(x):\n    return (1\n"):
        assert coophe_reward([A, main], task(), scripted).parts["tests"] == 0
        assert coophe_metrics(evaluate([A, main], task(), scripted), problem_of(task().fields))["pass"] == 0
    assert scripted.asked == []


@pytest.mark.parametrize(
    ("main", "counts"),
    [
        ("def f(x):\n    return(x)\n", True),
        ("def f(x):\n    return None\n", True),
        ("def f(x): return x\n", True),
        ("def f(x):\n    return\n", False),
        ("def f(x):\n    # return x\n    pass\n", False),
        ('def f(x):\n    "return x"\n', False),
        ("def f(x):\n    def g():\n        return 1\n", False),
        ("def f(x):\n    class G:\n        def h(self):\n            return 1\n", False),
        ("def f(x):\n    g = lambda: 1\n", False),
        ("def f(x):\n    yield x\n", False),
        ("async def f(x):\n    return x\n", False),
        ("f = lambda x: x\n", False),
        ("class f:\n    def __init__(self, x):\n        return x\n", False),
        ("class G:\n    def f(self):\n        return 1\n", False),
        ("def f(x):\n    if x:\n        return x\n", True),
        ("def f2(x):\n    return x\n", False),
        ("def function(x):\n    return x\n", False),
        ("def F(x):\n    return x\n", False),
    ],
)
def test_main_is_a_plain_function_of_the_exact_name_whose_own_body_returns_a_value(main, counts):
    assert coophe_reward(["", main], task(), Scripted()).parts["main"] == (0.6 if counts else 0)


@pytest.mark.parametrize("name", ["aux2", "auxiliary", "au", "Aux", "_aux"])
def test_aux_is_found_by_its_exact_name(name):
    assert coophe_reward([f"def {name}(x):\n    return x\n", OWN], task(), Scripted()).parts["aux"] == 0


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("def aux(x):\n    return (x *\n", True),
        ("def aux(x,\n        y=')'):\n    return (x *\n", True),
        ("def aux(x: dict[str, int] = {'a': 1}):\n    return(x *\n", True),
        ("def aux(x\n    return x\n", False),
        ("def aux(x):\n    y = (x *\n", False),
        ("def aux(x):\n    # return x\n    y = (x *\n", False),
        ("def aux(x):\n    returned = (x *\n", False),
        ("def aux(x):\n    return\n    y = (\n", False),
        ("async def aux(x):\n    return (x *\n", False),
    ],
)
def test_a_broken_aux_counts_if_its_signature_parses_and_a_line_returns_a_value(text, counts):
    reward = coophe_reward([text, M], task(), Scripted())
    assert (reward.parts["aux"], reward.parts["main"], reward.parts["syntax"]) == (0.4 if counts else 0, 0.6, 0)


def test_a_broken_main_earns_its_part_by_its_signature_and_a_returning_line():
    assert coophe_reward([A, "def f(x):\n    return (aux(x)"], task(), Scripted()).total == pytest.approx(1.0)
    assert coophe_reward([A, "def f(x, y):\n    return (aux(x)"], task(), Scripted()).total == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("parameters", "right"),
    [
        ("x", True),
        ("*args", True),
        ("x, *args", True),
        ("x, y=1", True),
        ("x, /, y=1", True),
        ("x=1", True),
        ("x, *, key=None", True),
        ("x, **options", True),
        ("", False),
        ("x, y", False),
        ("*, x", False),
        ("x, *, key", False),
        ("**options", False),
        ("x, y, /", False),
    ],
)
def test_main_must_take_exactly_the_problems_number_of_arguments(parameters, right):
    main = f"def f({parameters}):\n    return 1\n"
    assert coophe_reward(["", main], task(), Scripted()).parts["main"] == (0.6 if right else 0)


def test_a_problem_without_parameters_is_answered_without_parameters(sandbox):
    of = task('def f():\n    """Seven."""\n', "def check(candidate):\n    assert candidate() == 7\n")
    assert coophe_reward(["def aux():\n    return 3\n", "def f():\n    return aux() + 4\n"], of, sandbox).total == 4.0
    assert coophe_reward(["", "def f(x):\n    return 7\n"], of, sandbox).parts["main"] == 0


# The program ------------------------------------------------------------------------------------------------


def joined(helper, main, prompt=PROMPT):
    return join_program(problem_of(task(prompt).fields), read_answer(helper), read_answer(main))


def test_the_program_is_future_imports_math_the_prompts_rest_both_imports_aux_and_main():
    prompt = "from __future__ import annotations\nimport re\nLIMIT = 3\ndef g():\n    return 1\n" + PROMPT
    helper = "from __future__ import division\nimport os\nimport re\nX = 1\nprint('hi')\ndef other():\n    pass\n" + A
    main = "import os\nfrom typing import (\n    List,\n)\n" + M + "print(f(1))\n"
    assert joined(helper, main, prompt) == (
        "from __future__ import annotations\nfrom __future__ import division\nimport math\nimport re\nLIMIT = 3\n"
        "def g():\n    return 1\nimport os\nimport re\nfrom typing import List\n" + A + M
    )


def test_aux_comes_from_agent_0_only_and_main_from_agent_1_only():
    both = A3 + M
    assert joined("", both) == "import math\n" + M
    assert joined(both, "") == "import math\n" + A3


def test_the_last_definition_that_parses_wins_else_the_last():
    assert joined(A + A3, M) == "import math\n" + A3 + M
    assert joined(A3 + "def aux(x):\n    return (\n", M) == "import math\n" + A3 + M
    assert joined("def aux(x):\n    return (1\ndef aux(x):\n    return (2\n", M) == (
        "import math\ndef aux(x):\n    return (2\n" + M
    )


def test_the_prompts_own_functions_can_be_used_by_program_and_test(sandbox):
    prompt = "from typing import List\ndef double(x):\n    return 2 * x\ndef f(x: List[int]):\n    '''Doubles.'''\n"
    test = "def check(candidate):\n    assert candidate([1, 2]) == [double(1), double(2)]\n"
    main = "def f(x: List[int]):\n    return [double(i) for i in aux(x)]\n"
    assert coophe_reward(["def aux(x):\n    return x\n", main], task(prompt, test), sandbox).total == 4.0


# Tests ------------------------------------------------------------------------------------------------------


def units(body, before=""):
    return problem_of(task(test=f"{before}def check(candidate):\n{body}").fields)


def test_a_unit_is_a_top_level_statement_with_an_assertion_that_depends_on_something():
    body = (
        "    '''Doc.'''\n    values = [1, 2]\n    assert True, 'always'\n"
        "    for v in values:\n        assert candidate(v)\n"
        "    total = 4\n    assert (\n        candidate(0)\n        == total\n    ), 'why'\n    if values:\n"
        "        assert candidate(9)\n    def helper():\n        assert False\n"
    )
    problem = units(body, "METADATA = {'author': 'x'}\nimport math\n")
    assert problem.claims == (
        "for v in values:\n    assert candidate(v)",
        "assert candidate(0) == total, 'why'",
        "if values:\n    assert candidate(9)",
    )
    assert "total = 4" in problem.tests[1] and "for v" not in problem.tests[1]
    assert all(text.startswith("METADATA = {'author': 'x'}\nimport math\n") for text in problem.tests)


def test_every_unit_counts_alone_and_sees_the_helper_variables_before_it(sandbox):
    test = (
        "import string\ndef check(candidate):\n    first = candidate(1)\n    assert first == 99\n    import math\n"
        "    twice = [candidate(i) for i in (1, 2)]\n    assert twice == [4, 7], string.digits\n"
        "    for i in range(3):\n        assert candidate(i) == i * i + 3\n    assert f(1) == candidate(1)\n"
    )
    verdicts = evaluate([A, M], task(test=test), sandbox).verdicts
    assert [verdict.status for verdict in verdicts] == ["fail", "pass", "pass", "pass"]


def test_random_numbers_are_the_same_in_test_and_program(sandbox):
    test = (
        "import random\ndef check(candidate):\n    value = random.randint(0, 10**9)\n    assert candidate(0) == value\n"
    )
    main = "import random\ndef f(x):\n    return random.randint(0, 10**9)\n"
    assert evaluate(["", main], task(test=test), sandbox).passed == 1


@pytest.mark.parametrize(
    ("prompt", "test", "entry_point", "reason"),
    [
        ("def f(x:\n", TEST, "f", "prompt is not valid Python"),
        (PROMPT, "def check(candidate:\n", "f", "test is not valid Python"),
        (PROMPT, TEST, "g", "no function 'g'"),
        (PROMPT, TEST, "fo", "no function 'fo'"),
        ("def aux(x):\n    '''No.'''\n", TEST, "aux", "named aux"),
        (PROMPT, "def check(candidate):\n    pass\n", "f", "assertion"),
        (PROMPT, "def check(candidate):\n    assert True\n", "f", "assertion"),
        (PROMPT, "assert f(1) == 4\n", "f", "assertion"),
        (None, TEST, "f", "prompt is NoneType"),
        (PROMPT, 5, "f", "test is int"),
    ],
)
def test_a_faulty_problem_is_refused_with_its_reason(prompt, test, entry_point, reason):
    with pytest.raises(ValueError, match=reason):
        problem_of(task(prompt, test, entry_point).fields)


# Any text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "\ufeff" + M,
        "<think>\ndef f(x):\n    return 1\n",
        "\x00",
        "def f(x):\n    return '\x00'\n",
        "def f(x):\n    return '\ud800'\n",
        "def " * 3000,
        "@" * 3000,
        "@a\n" * 2000 + "def f(x):\n    return 1\n",
        "from (\n" * 2000,
        "import " * 2000,
        "def f(x):\n" + "(" * 5000,
        "def f(x):\n    return " + "-" * 20000 + "1\n",
        "def f(x):\n    return " + "1+" * 20000 + "1\n",
        "def f(x):\n    return aux(x)" + ".a" * 5000 + "\n",
        "def f(x):\n    if x: pass\n" + "    elif x: pass\n" * 3000 + "    return aux(x)\n",
        "def f(x):\n" + "\n".join(" " * depth + "if x:" for depth in range(1, 300)) + "\n    return 1\n",
        "def f(x):\n    '''\n" * 500,
        "class " * 100 + "\n" + "```" * 1000,
    ],
    ids=range(20),
)
def test_any_text_gets_a_finite_reward_in_range(text, recwarn):
    started = time.monotonic()
    for responses in ([text, M], [A, text], [text, text]):
        reward = coophe_reward(responses, task(), Scripted())
        assert math.isfinite(reward.total) and 0 <= reward.total <= 4
    assert time.monotonic() - started < 20
    assert not list(recwarn)


@pytest.mark.parametrize("responses", [None, "ab", [A], [A, M, M], {0: A}, [A, 5], [b"", M]])
def test_anything_but_two_texts_is_refused_before_it_is_scored(responses):
    scripted = Scripted()
    with pytest.raises((TypeError, ValueError)):
        coophe_reward(responses, task(), scripted)
    assert scripted.asked == []


# Feedback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("helper", "main", "said"),
    [
        (A, M, "All tests pass."),
        (A, OWN, "All tests pass, but f makes no use of aux."),
        ("", OWN, "All tests pass, but there is no function aux that returns something."),
        (A, "", "There is no function f that takes 1 argument and returns something."),
        ("def aux(x):\n    return (\n", M, "The two functions together are not valid Python."),
        (A, "def f(x):\n    return aux(x) + 4 * (x > 1) + 3\n", "This test fails:\nassert candidate(2) == 7\n"),
        ("", M, "This test fails:\nassert candidate(0) == 3\nNameError: name 'aux' is not defined"),
    ],
)
def test_feedback_names_the_first_thing_that_is_wrong(helper, main, said, sandbox):
    assert feedback(evaluate([helper, main], task(), sandbox), problem_of(task().fields)).startswith(said)
