"""HumanEval's own solutions through extraction, aggregation and sandbox, whole and with one token changed."""

from __future__ import annotations

import io
import keyword
import os
import random
import subprocess
import sys
import tokenize
from types import SimpleNamespace

import pytest

from mapl_core.domains.coophe_data import human_eval_rows
from mapl_core.rewards.coophe import coophe_reward, evaluate
from mapl_core.sandbox import Limits, Sandbox

pytestmark = pytest.mark.slow

SWAPS = {
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "**": "*", "<": ">=", ">": "<=", "<=": ">",
    ">=": "<", "==": "!=", "!=": "==", "+=": "-=", "-=": "+=", "*=": "+=", "and": "or", "or": "and", "True": "False",
    "False": "True", "min": "max", "max": "min", "not": "", "in": "not in", "is": "is not", "any": "all", "all": "any",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    try:
        return human_eval_rows()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=Limits(seconds=5.0)) as sandbox:
        yield sandbox


def test_all_164_canonical_solutions_pass_all_their_tests(rows, sandbox):
    failed = {}
    for row in rows:
        found = evaluate(["", row["prompt"] + row["canonical_solution"]], SimpleNamespace(fields=row), sandbox)
        if not found.verdicts or found.passed < len(found.verdicts):
            failed[row["task_id"]] = [verdict for verdict in found.verdicts if not verdict.passed]
    assert failed == {}
    assert len(rows) == 164


def test_a_canonical_solution_earns_all_but_aux_and_call(rows, sandbox):
    row = rows[0]
    reward = coophe_reward(
        ["", f"```python\n{row['prompt']}{row['canonical_solution']}```"], SimpleNamespace(fields=row), sandbox
    )
    assert tuple(reward.parts.values()) == (0, 0.6, 0.5, 1, 0)


def corrupted(row):
    """The solution with one token changed: an operator, a number, a string or a name of its body."""
    rng = random.Random(row["task_id"])
    body = row["canonical_solution"]
    lines = ("def f():\n" + body).splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO("".join(lines)).readline))[6:]
    names = sorted(
        {token.string for token in tokens if token.type == tokenize.NAME and not keyword.iskeyword(token.string)}
    )
    choices = []
    for token in tokens:
        if token.string in SWAPS:
            choices.append((token, SWAPS[token.string]))
        elif token.type == tokenize.NUMBER:
            choices.append((token, str(eval(token.string) + 1)))
        elif token.type == tokenize.NAME and token.string in names and len(names) > 1:
            choices.append((token, rng.choice([name for name in names if name != token.string])))
    token, text = rng.choice(choices)
    row_number, start, end = token.start[0] - 1, token.start[1], token.end[1]
    lines[row_number] = lines[row_number][:start] + text + lines[row_number][end:]
    return "".join(lines[1:]), f"{token.string} -> {text}"


def passes_plainly(row, body, tmp_path):
    """What the benchmark's own way says: everything in one plain interpreter, without sandbox, proxy or units."""
    path = tmp_path / "plain.py"
    path.write_text(
        f"{row['prompt']}{body}\n{row['test']}\nimport random\nrandom.seed(0)\ncheck({row['entry_point']})\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, timeout=20, env={"PATH": os.environ["PATH"]}
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def test_with_one_token_changed_no_solution_passes_that_a_plain_run_refuses(rows, tmp_path):
    """Those that pass do so because the change does not matter to the tests; how many is printed with -s."""
    disagree, passing = [], []
    with Sandbox(limits=Limits(seconds=2.0)) as sandbox:
        for row in rows:
            body, change = corrupted(row)
            found = evaluate(["", row["prompt"] + body], SimpleNamespace(fields=row), sandbox)
            passed = bool(found.verdicts) and found.passed == len(found.verdicts)
            if passed:
                passing.append(f"{row['task_id']} ({change})")
                if not passes_plainly(row, body, tmp_path):
                    disagree.append(f"{row['task_id']} ({change})")
    print(f"\n{len(passing)} of {len(rows)} changed solutions still pass: {', '.join(passing)}")
    assert disagree == []
    assert len(passing) < len(rows) / 3
