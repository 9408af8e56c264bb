"""Definitions and imports found in answers, whatever stands around them."""

from __future__ import annotations

import pytest

from mapl_core.rewards.python_source import code_lines, read_answer

PLAIN = "def aux(x):\n    return x"


def texts(response):
    return [definition.text for definition in read_answer(response).definitions]


def aux(response):
    found = read_answer(response).function("aux")
    return found.text if found else None


@pytest.mark.parametrize(
    "response",
    [
        PLAIN,
        f"\ufeff{PLAIN}\n",
        f"<think>\ndef aux(x):\n    return 0\n</think>\n{PLAIN}",
        f"```python\n{PLAIN}\n```",
        f"```\n{PLAIN}\n```\n",
        f"```Python 3\n{PLAIN}",
        f"~~~\n{PLAIN}\n~~~",
        f"{PLAIN}```",
        f"{PLAIN}\n```\n\nThis works.",
        f"Sure, here it is:\n\n{PLAIN}\n\nIt returns `x`.",
        f"    {PLAIN}".replace("\n", "\n    "),
        f"1. First\n   ```py\n   {PLAIN}\n   ```\n".replace("\n    return", "\n       return"),
        PLAIN.replace("\n", "\r\n") + "\r\n",
        PLAIN.replace("\n", "\r"),
        f"{PLAIN}\n\n\n# done",
        f"{PLAIN}\nprint(aux(1))\nassert aux(1) == 1",
        f"x = 1\n{PLAIN}\nif __name__ == '__main__':\n    print(aux(1))",
        f"def other():\n    pass\n{PLAIN}\nclass C:\n    pass",
        f"{PLAIN}\ndef aux(x):\n    return (x",
        f"def aux(x):\n    return 0\n{PLAIN}",
        f"class aux:\n    pass\n{PLAIN}",
        f"class of problems: easy\n{PLAIN}",
        f"def\n{PLAIN}",
        f"class\n{PLAIN}",
        f"import\n{PLAIN}",
        f"from here on (see below\n{PLAIN}",
        f"@ the top\n{PLAIN}",
        f">>> aux(1)\n1\n{PLAIN}",
        f"{PLAIN}\ndef f(x):\n    return aux(x)",
        f"def f(x):\n    def aux(x):\n        return 0\n    return 1\n{PLAIN}",
    ],
)
def test_the_function_is_found_whatever_stands_around_it(response):
    assert aux(response).split("\n# done")[0].rstrip() == PLAIN


@pytest.mark.parametrize(
    "text",
    [
        "def aux(x):\n\treturn x",
        "def aux(x):\n\n    # a comment\n\n    return x",
        "def aux(x):\n# at the margin\n    return x",
        "def aux(x): return x",
        "def aux(\n    x: int,\n    y=(1,\n2),\n) -> dict[str, int]:\n    return x",
        'def aux(x):\n    """Doc.\n\ndef inner():\nat the margin\n    """\n    return x',
        "def aux(x):\n    text = '''\nat the margin\n'''\n    return text",
        "def aux(x):\n    values = [\n1,\n2,\n]\n    return values",
        "def aux(x):\n    return x + \\\n1",
        "def aux(x):\n    def inner(y):\n        return y\n    return inner(x)",
        "def aux(x):\n    class C:\n        def aux(self):\n            return 1\n    return C()",
        "@cache\ndef aux(x):\n    return x",
        "@a.b(1,\n2)\n@c\ndef aux(x):\n    return x",
        "def aux(x):\n    if x:\n        return 1\n    else:\n        return 2",
        "def aux(x):\n    try:\n        return 1\n    except ValueError:\n        pass\n    finally:\n        x = 1",
        "async def aux(x):\n    return x",
        "def aux(x):\n    match x:\n        case 1:\n            return 2",
    ],
)
def test_a_definition_stays_whole(text):
    for before, after in (("", ""), ("Here:\n", "\nDone."), ("x = 1\n", "\n\ny = 2\n"), ("", "\ndef g():\n    pass\n")):
        assert aux(before + text + after) == text


def test_methods_lambdas_and_nested_functions_are_no_definitions():
    for text in (
        "class C:\n    def aux(self):\n        return 1",
        "aux = lambda x: x",
        "def f():\n    def aux(x):\n        return x\n    return aux",
    ):
        assert aux(text) is None


def test_a_broken_definition_ends_at_the_first_line_that_could_end_it():
    assert texts("def aux(x):\n    return (x\nprint(1)\ndef f(y):\n    return y\n") == [
        "def aux(x):\n    return (x",
        "def f(y):\n    return y",
    ]
    assert read_answer("def aux(x):\n    return (x\n").definitions[0].node is None


@pytest.mark.parametrize("cut", range(len("def aux(x):\n    return x * x + 1\n")))
def test_a_truncated_tail_never_hides_what_stands_before_it(cut):
    tail = "def aux(x):\n    return x * x + 1\n"[:cut]
    found = read_answer(f"{PLAIN}\n{tail}").function("aux")
    assert found.node is not None and found.text in (PLAIN, tail.rstrip())


@pytest.mark.parametrize(
    ("response", "imports"),
    [
        ("import os", ("import os",)),
        ("import os, re as r", ("import os, re as r",)),
        ("import os; import re", ("import os", "import re")),
        ("from typing import (\n    List,\n    Dict,  # why\n)", ("from typing import List, Dict",)),
        ("from a import b, \\\n    c", ("from a import b, c",)),
        ("import os\nimport os\n", ("import os",)),
        ("from __future__ import annotations", ("from __future__ import annotations",)),
        (f"{PLAIN}\nimport os", ("import os",)),
        ("def aux(x):\n    import os\n    return x", ()),
        ("important = 1\nfrom_here = 2", ()),
        ("import the numbers\nfrom the list", ()),
        ("# import os\n'import re'", ()),
        ("```python\nimport os\n```", ("import os",)),
        ("    import os\n    import re", ("import os", "import re")),
        ("from x import *", ("from x import *",)),
    ],
)
def test_top_level_imports_are_kept_each_once_in_one_form(response, imports):
    assert read_answer(response).imports == imports


def test_fences_disappear_and_other_lines_stay_as_they_are():
    assert code_lines("a\n```\nb  \n  ```python\nc``` \n````\nd``") == ["a", "b  ", "c", "d``"]
