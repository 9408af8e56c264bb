"""Which main functions really call their helper, and which of them are mere wrappers."""

from __future__ import annotations

import ast
import textwrap

import pytest

from mapl_core.rewards.program_calls import is_mere_wrapper, live_code, really_calls


def main_of(body, parameters="x"):
    return ast.parse(f"def f({parameters}):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")).body[0]


@pytest.mark.parametrize(
    "body",
    [
        "return aux(x) + 1",
        "return aux()",
        "y = aux(x)\nreturn y",
        "return [aux(i) for i in x]",
        "return list(map(aux, x))",
        "return list(filter(aux, x))",
        "from functools import reduce\nreturn reduce(aux, x)",
        "import functools\nreturn functools.reduce(aux, x)",
        "return sorted(x, key=aux)",
        "return max(x, key=aux, default=0)",
        "x.sort(key=aux)\nreturn x",
        "if x:\n    return aux(x)\nreturn 0",
        "if aux(x):\n    return 1\nreturn 0",
        "while aux(x):\n    x -= 1\nreturn x",
        "while True:\n    y = aux(x)\n    break\nreturn y",
        "if True:\n    y = aux(x)\nelse:\n    y = 2\nreturn y",
        "if 0:\n    y = 1\nelse:\n    y = aux(x)\nreturn y",
        "def g(y):\n    return aux(y)\nreturn g(x)",
        "g = lambda y: aux(y)\nreturn g(x)",
        "for i in aux(x):\n    return i\nreturn 0",
        "return x[aux(x)]",
        "return {'a': aux(x)}",
        "return f'{aux(x)}'",
        "assert aux(x)\nreturn 1",
        "x += aux(x)\nreturn x",
        "print(aux(x))\nreturn x",
        "return aux(x)(1)",
        "with aux(x) as y:\n    return y",
        "return (y := aux(x))",
        "try:\n    return aux(x)\nexcept ValueError:\n    return 0",
    ],
)
def test_main_really_calls_its_helper(body):
    assert really_calls(main_of(body), "aux")


@pytest.mark.parametrize(
    "body",
    [
        "return x",
        "aux(x)\nreturn x * x",
        "aux(x) + 3\nreturn x",
        "# aux(x)\nreturn x",
        "'''aux(x)'''\nreturn x",
        "return 'aux(x)'",
        "return x.aux(x)",
        "return self.aux(x)",
        "return aux",
        "return aux2(x)",
        "return x\nreturn aux(x)",
        "raise ValueError\nreturn aux(x)",
        "if False:\n    return aux(x)\nreturn x",
        "if 1:\n    return x\nelse:\n    return aux(x)",
        "if True:\n    return x\nreturn aux(x)",
        "while False:\n    x = aux(x)\nreturn x",
        "for i in x:\n    break\n    y = aux(i)\nreturn y",
        "for i in x:\n    continue\n    y = aux(i)\nreturn y",
        "y = aux(x)\nreturn x",
        "y = aux(x)\nz = y\nreturn x",
        "y = z = aux(x)\nreturn x",
        "y: int = aux(x)\nreturn x",
        "y = 0\ny += aux(x)\nreturn x",
        "def g():\n    return aux(x)\nreturn x",
        "def g():\n    return g() + aux(x)\nreturn x",
        "class G:\n    y = aux(1)\nreturn x",
        "def g():\n    return aux(x)\nh = g\nreturn x",
        "if x:\n    y = aux(x)\nreturn x",
        "return map(x, aux)",
        "return sorted(x, aux)",
        "return sorted(x, reverse=aux)",
        "map(aux, x)\nreturn x",
        "aux = len\nreturn aux(x)",
        "return aux(x)\naux = 1",
        "for aux in x:\n    return aux(1)\nreturn 0",
        "import aux\nreturn aux(x)",
        "from math import sqrt as aux\nreturn aux(x)",
        "from os import aux\nreturn aux(x)",
        "def aux(y):\n    return y\nreturn aux(x)",
        "class aux:\n    pass\nreturn aux(x)",
        "def g(aux):\n    return aux(1)\nreturn g(x)",
        "return [aux(1) for aux in x]",
        "with x as aux:\n    return aux(1)",
        "try:\n    return aux(x)\nexcept ValueError as aux:\n    return 0",
        "return (aux := len)(x) + aux(x)",
        "del aux\nreturn aux(x)",
        "match x:\n    case aux:\n        return aux(x)",
    ],
)
def test_main_does_not_really_call_its_helper(body):
    assert not really_calls(main_of(body), "aux")


@pytest.mark.parametrize("parameters", ["aux", "x, aux=None", "*aux", "**aux", "*, aux", "aux, /"])
def test_a_parameter_of_that_name_is_another_function(parameters):
    assert not really_calls(main_of("return aux(1) + 1", parameters), "aux")


@pytest.mark.parametrize(
    "body",
    [
        "return aux(x)",
        "'''Doc.'''\nreturn aux(x)",
        "y = aux(x)\nreturn y",
        "y = x\nz = aux(y)\nreturn z",
        "y: list[int] = aux(x)\nreturn y",
        "return aux(aux(x))",
        "return aux(x, 1, -1, +2.5, 'a', k=None)",
        "pass\nimport math\nreturn aux(x)",
        "t = x + 1\nreturn aux(x)",
        "t = 0\nt += 1\nreturn aux(x)",
        "def g():\n    return x + 1\nreturn aux(x)",
        "if True:\n    return aux(x)\nreturn x + 1",
        "while True:\n    y = aux(x)\n    break\nreturn y",
        "while 1:\n    return aux(x)",
        "return aux(x)\nreturn x + 1",
        "x + 1\nreturn aux(x)",
        "global g\nreturn aux(x)",
        "y = aux\nreturn aux(x)",
    ],
)
def test_a_main_that_only_passes_on_is_a_mere_wrapper(body):
    assert is_mere_wrapper(main_of(body), "aux")


@pytest.mark.parametrize(
    "body",
    [
        "return aux(x) + 3",
        "return -aux(x)",
        "return not aux(x)",
        "return aux(-x)",
        "return aux(x) or 1",
        "return aux(x) == 1",
        "return aux(x) if x else 0",
        "return aux(x)[0]",
        "return aux(x).real",
        "return f'{aux(x)}'",
        "return [aux(x)]",
        "return aux(x), 1",
        "return {aux(x)}",
        "return {1: aux(x)}",
        "return aux(*x)",
        "a, b = aux(x)\nreturn a",
        "return [aux(i) for i in x]",
        "return sum(aux(i) for i in x)",
        "return (lambda: aux(x))",
        "def g():\n    return aux(x)\nreturn g",
        "for i in x:\n    y = aux(i)\nreturn y",
        "while x:\n    return aux(x)",
        "if x:\n    return aux(x)\nreturn 0",
        "with x:\n    return aux(x)",
        "try:\n    return aux(x)\nexcept ValueError:\n    return 0",
        "match x:\n    case 1:\n        return aux(x)",
        "assert x\nreturn aux(x)",
        "y = aux(x)\ny += 1\nreturn y",
        "return (y := aux(x))",
        "y = aux(x)\ndel x\nreturn y",
        "yield aux(x)",
        "return list(aux(x))",
        "return aux(len(x))",
        "return sorted(x, key=aux)",
        "print(x)\nreturn aux(x)",
        "if x:\n    raise ValueError\nreturn aux(x)",
    ],
)
def test_a_main_with_work_of_its_own_is_no_wrapper(body):
    assert really_calls(main_of(body), "aux") and not is_mere_wrapper(main_of(body), "aux")


def test_a_main_that_does_not_call_is_no_wrapper_either():
    assert not is_mere_wrapper(main_of("return x"), "aux")


def test_live_code_is_what_can_run_and_matters():
    body = """
        '''Doc.'''
        import os
        t = x + 1
        u = t
        y = x
        if True:
            pass
            r = aux(y)
        while 0:
            y = 2
        x
        return r
        return t
    """
    assert [ast.unparse(statement) for statement in live_code(main_of(body))] == ["y = x", "r = aux(y)", "return r"]
