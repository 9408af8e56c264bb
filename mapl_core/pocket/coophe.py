"""The miniature CoopHE: generated problems and scripted answers of an able but uncoordinated team.

A problem is an outer step on the result of an inner step, over integers: "square x, then add 3". The inner step is what
a team would put into `aux`. The scripted answers are what the pocket base is trained on: each agent picks a *mode* (the
right inner step, the whole solution alone, a mere wrapper ...) without looking at its team mate. Pure text, no torch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.pocket.common import prompt_forms
from mapl_core.sandbox import Program, Verdict

ENTRY_POINT = "f"
CONSTANTS = range(1, 10)


@dataclass(frozen=True)
class Step:
    """One step of a problem: how the docstring says it, how Python writes it, what it gives."""

    words: str
    code: str
    value: Callable[..., int]


INNER = {
    "square": Step("square x", "x * x", lambda x: x * x),
    "double": Step("double x", "2 * x", lambda x: 2 * x),
    "triple": Step("triple x", "3 * x", lambda x: 3 * x),
    "negate": Step("negate x", "-x", lambda x: -x),
    "increment": Step("increment x", "x + 1", lambda x: x + 1),
    "halve": Step("halve x", "x // 2", lambda x: x // 2),
}
OUTER = {
    "add": Step("add {k}", "{inner} + {k}", lambda inner, k: inner + k),
    "subtract": Step("subtract {k}", "{inner} - {k}", lambda inner, k: inner - k),
    "times": Step("multiply by {k}", "{inner} * {k}", lambda inner, k: inner * k),
    "minus": Step("subtract from {k}", "{k} - {inner}", lambda inner, k: k - inner),
}
# All six inner steps differ on each of these and every outer step keeps them apart: no wrong one passes by luck.
INPUTS = (-5, -4, 4, 5, 7)
TESTS = 4

MODES: tuple[dict[str, float], ...] = (
    {"inner": 0.35, "whole": 0.20, "wrong inner": 0.20, "no return": 0.10, "cut": 0.15},
    {
        "call and outer": 0.25,
        "no call": 0.25,
        "wrapper": 0.15,
        "wrong outer": 0.15,
        "wrong parameters": 0.10,
        "cut": 0.10,
    },
)
LAYOUT = r"\n(?: {4})?|\d"  # a line's end with the next line's indent; digits, since results have several
NEW_TOKENS = (32, 32)  # limits on new tokens, agent by agent; a coordinator has their sum

SPLIT_SIZES = {"train": 66, "eval": 16}
SPLIT_SEED = "mapl pocket coophe tasks"


@dataclass(frozen=True)
class Puzzle:
    """What a problem is made of: inner step, outer step, constant (None: the second argument takes its place)."""

    inner: str
    outer: str
    constant: int | None

    @property
    def operand(self) -> str:
        return "y" if self.constant is None else str(self.constant)

    @property
    def parameters(self) -> str:
        return "x, y" if self.constant is None else "x"

    def outer_on(self, inner: str, outer: str | None = None) -> str:
        """The outer step, or another one, as an expression on the text of the inner result."""
        return OUTER[outer or self.outer].code.format(inner=inner, k=self.operand)

    @property
    def solution(self) -> str:
        """The whole problem as one expression."""
        code = INNER[self.inner].code
        # Without brackets only where Python would read it the same way.
        bare = self.outer in ("add", "subtract") or (
            self.outer == "times" and self.inner in ("square", "double", "triple")
        )
        return self.outer_on(code if bare else f"({code})")


def all_puzzles() -> list[Puzzle]:
    return [Puzzle(inner, outer, k) for inner in INNER for outer in OUTER for k in (*CONSTANTS, None)]


def _split_puzzles() -> dict[str, list[Puzzle]]:
    """The puzzles of both splits: no combination of inner step, outer step and constant is in both."""
    drawn = random.Random(SPLIT_SEED).sample(all_puzzles(), sum(SPLIT_SIZES.values()))
    return {"train": drawn[: SPLIT_SIZES["train"]], "eval": drawn[SPLIT_SIZES["train"] :]}


def reserved_slots() -> frozenset[Puzzle]:
    """The puzzles of the train and eval tasks, which the pocket base must not have seen."""
    return frozenset(puzzle for split in _split_puzzles().values() for puzzle in split)


def write_task(name: str, split: str, puzzle: Puzzle, rng: random.Random) -> Task:
    """A puzzle as a row of the paper's data: task_id, prompt, test, entry_point."""
    outer = OUTER[puzzle.outer].words.format(k=puzzle.operand)
    prompt = f'def {ENTRY_POINT}({puzzle.parameters}):\n    """{INNER[puzzle.inner].words}, then {outer}."""\n'
    claims = []
    for x in sorted(rng.sample(INPUTS, TESTS)):
        k = rng.choice(CONSTANTS) if puzzle.constant is None else puzzle.constant
        arguments = f"{x}, {k}" if puzzle.constant is None else f"{x}"
        value = OUTER[puzzle.outer].value(INNER[puzzle.inner].value(x), k)
        claims.append(f"    assert candidate({arguments}) == {value}\n")
    test = "def check(candidate):\n" + "".join(claims)
    fields = {"task_id": name, "prompt": prompt, "test": test, "entry_point": ENTRY_POINT}
    return Task(name, "pocket", split, fields)


def make_tasks(split: str, limit: int | None = None) -> list[Task]:
    """The generated problems of one split, always the same ones in the same order.

    Args:
        split: "train" (66) or "eval" (16).
        limit: only the first so many.

    Raises:
        ValueError: for another split, or a limit that it cannot serve.
    """
    if split not in SPLIT_SIZES:
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    size = SPLIT_SIZES[split]
    count = size if limit is None else limit
    if not 1 <= count <= size:
        raise ValueError(f"limit must be between 1 and {size}, got {limit}; the pocket split {split!r} is no larger")
    names = [f"coophe-pocket-{split}-{index:03d}" for index in range(count)]
    puzzles = _split_puzzles()[split]
    return [write_task(name, split, puzzles[index], random.Random(name)) for index, name in enumerate(names)]


def puzzle_of(task: Task) -> Puzzle:
    """What a pocket problem is made of, read from its own words."""
    return _puzzles_by_prompt()[task.fields["prompt"]]


def _puzzles_by_prompt() -> dict[str, Puzzle]:
    rng = random.Random(0)
    return {write_task("", "", puzzle, rng).fields["prompt"]: puzzle for puzzle in all_puzzles()}


# Scripted answers ----------------------------------------------------------------------------------------------------


def write_function(name: str, parameters: str, result: str) -> str:
    return f"def {name}({parameters}):\n    return {result}\n"


def sample_answer(agent: int, puzzle: Puzzle, rng: random.Random) -> str:
    """One scripted answer of one agent, independent of the other agent's (domains.md: the start mixture).

    Args:
        agent: 0 (`aux`) or 1 (the entry point).
        puzzle: what the problem is made of.
        rng: source of all choices.
    """
    mode = rng.choices(list(MODES[agent]), weights=list(MODES[agent].values()))[0]
    return (aux_answer, main_answer)[agent](mode, puzzle, rng)


def aux_answer(mode: str, puzzle: Puzzle, rng: random.Random) -> str:
    """Agent 0's answer in one of its modes."""
    if mode == "whole":
        return write_function("aux", puzzle.parameters, puzzle.solution)
    if mode == "wrong inner":
        other = rng.choice([name for name in INNER if name != puzzle.inner])
        return write_function("aux", "x", INNER[other].code)
    if mode == "no return":
        return f"def aux(x):\n    {INNER[puzzle.inner].code}\n"
    answer = write_function("aux", "x", INNER[puzzle.inner].code)
    return _cut(answer, rng) if mode == "cut" else answer


def main_answer(mode: str, puzzle: Puzzle, rng: random.Random) -> str:
    """Agent 1's answer in one of its modes."""
    parameters, result = puzzle.parameters, puzzle.outer_on("aux(x)")
    if mode == "no call":
        result = puzzle.solution
    elif mode == "wrapper":
        result = f"aux({parameters})"
    elif mode == "wrong outer":
        result = puzzle.outer_on("aux(x)", rng.choice([name for name in OUTER if name != puzzle.outer]))
    elif mode == "wrong parameters":
        parameters = "x" if puzzle.constant is None else "x, y"
    answer = write_function(ENTRY_POINT, parameters, result)
    return _cut(answer, rng) if mode == "cut" else answer


def _cut(answer: str, rng: random.Random) -> str:
    """Cut off somewhere before its end, possibly at its very beginning."""
    words = answer.split(" ")
    return " ".join(words[: rng.randrange(len(words))])


def best_answers(task: Task) -> tuple[str, str]:
    """A joint answer that earns the full oracle reward on this task: the generator's self-test."""
    puzzle = puzzle_of(task)
    return (
        write_function("aux", "x", INNER[puzzle.inner].code),
        write_function(ENTRY_POINT, puzzle.parameters, puzzle.outer_on("aux(x)")),
    )


def copied_words(text: str, task: Task) -> tuple[int, int]:
    """How many of the inner steps that an answer returns are its own problem's, and how many there are in all."""
    codes = {step.code.replace(" ", ""): name for name, step in INNER.items()}
    listed = "|".join(map(re.escape, codes))
    found = re.findall(rf"return\(?({listed})(?!\w)", "".join(text.split()))
    return sum(codes[code] == puzzle_of(task).inner for code in found), len(found)


# The corpus ----------------------------------------------------------------------------------------------------------

# How often the corpus shows each prompt form; every form that an experiment may write is among them.
FORMS = {
    "agent": 0.40,
    "coordinator": 0.18,
    "single": 0.10,
    "main only": 0.04,
    "sequential": 0.08,
    "discussion": 0.12,
    "revision": 0.06,
    "coordinator's revision": 0.02,
}


class TrustedRunner:
    """Tests the scripted answers, which are this module's own text, in this process. Never for what a model wrote."""

    def run(self, program: Program, tests: Sequence[str]) -> list[Verdict]:
        return [Verdict("pass" if self._passes(program, test) else "fail") for test in tests]

    def _passes(self, program: Program, test: str) -> bool:
        judged: dict = {}
        try:
            exec(program.source, judged)
            trusted: dict = {}
            exec(f"{program.setup}\n{test}", trusted)
            trusted["check"](judged[program.entry_point])
        except Exception:
            return False
        return True


def atoms() -> list[str]:
    """Texts that are one token each although they are not one plain word."""
    return ["//", "=="]


def vocabulary_texts(domain: Domain) -> Iterator[str]:
    """Texts that together hold every word of the language: problems, answers, all prompt forms, feedback."""
    team = _team(domain)
    for puzzle in all_puzzles():
        task = write_task("vocabulary", "train", puzzle, random.Random(0))
        yield f"{task.fields['prompt']} {puzzle.solution} {task.fields['test']}"
    yield " ".join("0123456789")
    by_arguments = {puzzle_of(task).parameters: task for task in make_tasks("train")}
    for parameters, task in by_arguments.items():
        best, puzzle = best_answers(task), puzzle_of(task)
        yield "\n    ".join(best)
        alone, broken = (write_function(ENTRY_POINT, parameters, text) for text in (puzzle.solution, "("))
        for drafts in (best, ("", broken)):
            yield from (write() for write in all_prompt_forms(team, task, drafts).values())
        for drafts in ((best[0], ""), ("", best[1]), ("", alone), (best[0], alone)):
            yield team.feedback(drafts, task)


def all_prompt_forms(domain: Domain, task: Task, drafts: Sequence[str]) -> dict[str, Callable[[], str]]:
    """What writes the prompts that every domain has, and those of CoopHE alone: main only, and the second turn's."""

    def history() -> tuple[Turn, ...]:
        return (Turn(tuple(drafts), domain.reward(drafts, task)),)

    return {
        **prompt_forms(domain, task, drafts),
        "main only 1": partial(domain.main_only_prompt, task),
        "coordinator's revision": lambda: domain.coordinator_prompt(task, history()),
        **{
            f"revision {agent}": lambda agent=agent: domain.prompts(task, history())[agent]
            for agent in range(domain.num_agents)
        },
    }


def write_example(domain: Domain, rng: random.Random, reserved: frozenset[Puzzle]) -> tuple[str, str]:
    """One pair of prompt and scripted answer for pretraining.

    Whatever the form, the answer follows the same uncoordinated mixture: a coordinator draws both parts independently,
    and an agent that is shown its team mate's text, or the feedback on its own, does not use it.
    """
    puzzle = rng.choice([puzzle for puzzle in all_puzzles() if puzzle not in reserved])
    task = write_task("coophe-pocket-corpus", "train", puzzle, rng)
    drafts, answers = ([sample_answer(agent, puzzle, rng).rstrip() for agent in range(2)] for _ in range(2))
    form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
    prompts = all_prompt_forms(_team(domain), task, drafts)
    if form in prompts:
        return prompts[form](), domain.join(answers)
    agent = 1 if form == "main only" else rng.randrange(2)
    return prompts[f"{form} {agent}"](), answers[agent]


def _team(domain: Domain) -> Domain:
    """The domain with two turns, so that there are revisions, and without a sandbox: it judges scripted answers."""
    return type(domain)(horizon=2, sandbox=TrustedRunner())
