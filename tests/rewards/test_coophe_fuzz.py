"""Random bytes and mutated programs as answers: a finite reward in range, no exception, nothing left over.

The fast suite runs a tenth; the whole runs at night.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mapl_core.pocket.coophe import best_answers, make_tasks
from mapl_core.rewards.coophe import coophe_reward, evaluate
from mapl_core.sandbox import Limits, Sandbox

LINUX = sys.platform.startswith("linux")
PIECES = (
    "def", "aux", "f", "(", ")", ":", "\n", "    ", "return", "x", "y", "+", "import os", "while True:", "lambda",
    "'''", '"', "\\",
    "class", "@", "```", "async", "yield", "raise", "[", "]", "{", "}", "*", "=", "if", "else", "for i in",
    "aux(x)", "9" * 50,
    "exit()", "\t", "#", "\x00", "\u2028", "try:", "except:", "del x", "global f", "__import__('os')._exit(0)",
)  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=Limits(seconds=0.3)) as sandbox:
        yield sandbox


def check(responses, task, sandbox):
    reward = coophe_reward(responses, task, sandbox)
    assert math.isfinite(reward.total) and 0 <= reward.total <= 4
    assert math.isclose(reward.total, sum(reward.parts.values()))


def resident(pid="self"):
    """Memory in MiB."""
    if not LINUX:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def random_bytes(rng):
    return bytes(rng.choices(range(256), k=rng.randrange(200))).decode(
        rng.choice(["utf-8", "latin-1", "utf-16"]), "replace"
    )


def mutated(text, rng):
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[min(end, at + 5) :]
        elif kind == 2:
            text = text[:at] + rng.choice(PIECES) + text[min(end, at + 3) :]
        else:
            text = text[:at] + text[at:end] * 2 + text[end:]
    return text


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1000), pytest.param(1000, 9000, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_random_bytes_get_a_reward(first, count, sandbox):
    tasks = make_tasks("train")
    for number in range(first, first + count):
        rng = random.Random(number)
        check([random_bytes(rng), random_bytes(rng)], rng.choice(tasks), sandbox)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), pytest.param(100, 900, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_mutated_programs_get_a_reward_and_leave_nothing_behind(first, count, sandbox):
    tasks = make_tasks("train")
    memory, ran = None, 0
    for number in range(first, first + count):
        rng = random.Random(number)
        task = rng.choice(tasks)
        responses = [mutated(text, rng) for text in best_answers(task)]
        check(responses, task, sandbox)
        ran += bool(evaluate(responses, task, sandbox).verdicts)
        if number == first + count // 4:  # caches and workers are warm
            memory = [resident(), *(resident(zygote.process.pid) for zygote in sandbox._all if LINUX)]
    after = [resident(), *(resident(zygote.process.pid) for zygote in sandbox._all if LINUX)]
    assert ran > count / 10  # enough of them got as far as the sandbox
    assert max(after) - max(memory) < 30
    zygotes = [psutil.Process(zygote.process.pid) for zygote in sandbox._all]
    # The verdict comes first; what is left of a program is gone before its zygote takes another one. Its judge stays.
    deadline = time.monotonic() + 10
    while any(len(zygote.children(recursive=True)) > 1 for zygote in zygotes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(len(zygote.children(recursive=True)) <= 1 for zygote in zygotes)


def test_mutated_problems_are_refused_or_scored(sandbox):
    """A task's own text may be odd as well: a reason, or a problem; nothing else."""
    for number in range(200):
        rng = random.Random(number)
        fields = dict(make_tasks("train", 1)[0].fields)
        name = rng.choice(("prompt", "test", "entry_point"))
        fields[name] = mutated(fields[name], rng)
        try:
            coophe_reward(["", ""], SimpleNamespace(fields=fields), sandbox)
        except ValueError:
            pass
