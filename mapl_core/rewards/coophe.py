"""Oracle reward of CoopHE: an auxiliary and a main function, joined and tested (paper, section 5.1, appendix C.3).

Both answers are read (`python_source`), joined with the problem's own text into one program, judged by their syntax
trees (`program_calls`) and by the problem's tests, which run in the sandbox (`mapl_core.sandbox`). Reward and metrics
look at the same program and the same verdicts.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from mapl_core.rewards.base import Reward
from mapl_core.rewards.program_calls import is_mere_wrapper, really_calls
from mapl_core.rewards.python_source import Answer, Definition, Function, own_nodes, parse, read_answer
from mapl_core.rewards.text import check_responses
from mapl_core.sandbox import Program, Verdict, shared_sandbox

MAX_REWARD = 4.0
PARTS = ("aux", "main", "syntax", "tests", "call")
WORTH = {"aux": 0.4, "main": 0.6, "syntax": 0.5, "tests": 1.0, "call": 1.5}
AUX = "aux"
FIELDS = ("prompt", "test", "entry_point")


class Runner(Protocol):
    """Runs tests of a program; `mapl_core.sandbox.Sandbox` does it for real."""

    def run(self, program: Program, tests: Sequence[str]) -> list[Verdict]: ...


@dataclass(frozen=True)
class Problem:
    """A programming problem, taken apart once.

    Attributes:
        entry_point: name of the main function.
        parameters: n, how many positional arguments its signature has.
        signature: its `def` line.
        futures: the prompt's `from __future__` imports.
        helpers: all other top-level statements of the prompt but the entry point.
        tests: for each test unit a text that defines `check(candidate)` with that unit alone.
        claims: the units as they are written in the problem, for messages.
    """

    entry_point: str
    parameters: int
    signature: str
    futures: tuple[str, ...]
    helpers: tuple[str, ...]
    tests: tuple[str, ...]
    claims: tuple[str, ...]

    @property
    def setup(self) -> str:
        """What a test may use besides the main function."""
        return "\n".join([*self.futures, "import math", *self.helpers])


@dataclass(frozen=True)
class Evaluation:
    """What the oracle finds in a joint answer; stages after one that failed were not looked at.

    Attributes:
        program: the joined program.
        aux, main: whether the functions are there as they should be (stages 1 and 2).
        parses: whether the program is Python (stage 3).
        verdicts: one for each test unit (stage 4); empty if the program was not run.
        calls: whether main really calls aux.
        wrapper: whether main does nothing but that.
    """

    program: str
    aux: bool
    main: bool
    parses: bool
    verdicts: tuple[Verdict, ...]
    calls: bool
    wrapper: bool

    @property
    def passed(self) -> int:
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def pass_rate(self) -> float:
        return self.passed / len(self.verdicts) if self.verdicts else 0.0

    @property
    def cooperates(self) -> bool:
        """A good aux, really called by a main that adds work of its own."""
        return self.aux and self.calls and not self.wrapper


def coophe_reward(responses: Sequence[str | None], task: Any, sandbox: Runner | None = None) -> Reward:
    """Oracle reward of an auxiliary and a main function, between 0 and 4 (paper, appendix C.3).

    Five stages: a helper that returns something (0.4), a main function that returns something and takes the problem's
    arguments (0.6), a program that parses (0.5), tests passed (1 for all), and cooperation (1.5): the helper really
    called, by more than a wrapper, with at least one test passed. A joint answer that fails in the second or third
    stage is not looked at further and keeps what it has.

    Args:
        responses: the texts of agent 0 (`aux`) and agent 1 (the entry point); None counts as empty.
        task: its `fields` hold the texts prompt, test and entry_point.
        sandbox: where the tests run; default: the one that this process shares.

    Raises:
        TypeError, ValueError: if `responses` is not a list of two texts; nothing is scored then.
        SandboxError: if programs cannot be run here at all.
    """
    found = evaluate(responses, task, sandbox)
    earned = {
        "aux": float(found.aux),
        "main": float(found.main),
        "syntax": float(found.parses),
        "tests": found.pass_rate,
        "call": float(found.cooperates and found.passed > 0),
    }
    parts = {part: WORTH[part] * earned[part] for part in PARTS}
    return Reward(total=min(max(sum(parts.values()), 0.0), MAX_REWARD), parts=parts)


def evaluate(responses: Sequence[str | None], task: Any, sandbox: Runner | None = None) -> Evaluation:
    """Join, judge and test a joint answer. Tests run once: the sandbox remembers its verdicts."""
    check_responses(responses, num_agents=2)
    problem = problem_of(task.fields)
    helper, main = read_answer(responses[0]), read_answer(responses[1])
    aux, entry = helper.function(AUX), main.function(problem.entry_point)
    program = join_program(problem, helper, main)
    good_aux = aux is not None and aux.returns_value
    good_main = entry is not None and entry.returns_value and entry.takes(problem.parameters)
    if not good_main or parse(program) is None:
        return Evaluation(program, good_aux, good_main, False, (), False, False)
    runner = sandbox or shared_sandbox()
    verdicts = runner.run(Program(program, problem.entry_point, problem.setup), problem.tests)
    calls, wrapper = _cooperation(entry)
    return Evaluation(program, good_aux, True, True, tuple(verdicts), calls, wrapper)


def coophe_metrics(found: Evaluation, problem: Problem) -> dict[str, float]:
    """What tables report: share of tests passed, all of them passed, cooperation (tests not needed)."""
    return {
        "pass": found.pass_rate,
        "strict_pass": float(found.passed == len(problem.tests)),
        "call": float(found.cooperates),
        "tests_passed": float(found.passed),
        "tests_total": float(len(problem.tests)),
    }


def feedback(found: Evaluation, problem: Problem, *, shows_messages: bool = True) -> str:
    """What the environment tells the agents after a turn: the first thing that is wrong, in up to three lines."""
    name, count = problem.entry_point, problem.parameters
    if not found.main:
        return f"There is no function {name} that takes {count} argument{'s' * (count != 1)} and returns something."
    if not found.parses:
        return "The two functions together are not valid Python."
    for verdict, claim in zip(found.verdicts, problem.claims, strict=True):
        if not verdict.passed:
            return "\n".join(["This test fails:", claim, *([verdict.message] if shows_messages else [])])
    if not found.aux:
        return f"All tests pass, but there is no function {AUX} that returns something."
    return "All tests pass." if found.cooperates else f"All tests pass, but {name} makes no use of {AUX}."


def join_program(problem: Problem, helper: Answer, main: Answer) -> str:
    """One program: the problem's own text, the imports of both answers, aux, and the main function."""
    imports = dict.fromkeys([*problem.futures, *helper.imports, *main.imports])
    futures = [text for text in imports if text.startswith("from __future__ ")]
    others = [text for text in imports if text not in futures]
    functions = [helper.function(AUX), main.function(problem.entry_point)]
    texts = [function.text for function in functions if function is not None]
    return "\n".join([*futures, "import math", *problem.helpers, *others, *texts]) + "\n"


def problem_of(fields: Mapping[str, Any]) -> Problem:
    """The problem in a task's fields.

    Raises:
        ValueError: if it is faulty; says why.
    """
    texts = [fields.get(name) for name in FIELDS]
    for name, text in zip(FIELDS, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{name} is {type(text).__name__}, not a text")
    return _problem(*texts)


@lru_cache(maxsize=4096)
def _problem(prompt: str, test: str, entry_point: str) -> Problem:
    stated, tested = parse(prompt), parse(test)
    if stated is None or tested is None:
        raise ValueError(f"the {'prompt' if stated is None else 'test'} is not valid Python")
    if entry_point == AUX:
        raise ValueError(f"the entry point is named {AUX}, as the other agent's function")
    entry = _named(stated, entry_point)
    if entry is None:
        raise ValueError(f"the prompt has no function {entry_point!r}")
    rest = [statement for statement in stated.body if not (isinstance(statement, Function) and statement is entry)]
    futures = [part for part in rest if isinstance(part, ast.ImportFrom) and part.module == "__future__"]
    tests, claims = _test_units(tested)
    if not tests:
        raise ValueError("the test has no check function with an assertion that depends on anything")
    return Problem(
        entry_point=entry_point,
        parameters=len(entry.args.posonlyargs) + len(entry.args.args),
        signature=_signature(entry),
        futures=tuple(ast.unparse(part) for part in futures),
        helpers=tuple(ast.unparse(part) for part in rest if part not in futures),
        tests=tests,
        claims=claims,
    )


def _named(module: ast.Module, name: str) -> Function | None:
    found = [part for part in module.body if isinstance(part, Function) and part.name == name]
    return found[-1] if found else None


def _signature(function: Function) -> str:
    """The function's first line, without decorators."""
    return ast.unparse(_replaced(function, decorator_list=[], body=[ast.Pass()])).removesuffix("pass").rstrip()


def _replaced(function: Function, **fields: list) -> Function:
    """A copy with some fields changed."""
    return ast.copy_location(type(function)(**{**dict(ast.iter_fields(function)), **fields}), function)


def _test_units(tested: ast.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """For each unit of `check` a text with that unit alone, and how the unit is written.

    A unit is a top-level statement of `check` that contains an assertion, constant ones excepted. The other statements
    before it run first; other units do not, so one failure says nothing about the next unit.
    """
    check = _named(tested, "check")
    if not isinstance(check, ast.FunctionDef):
        return (), ()
    # A bare call at the top level would run the whole of `check` where one unit is wanted.
    around = [part for part in tested.body if part is not check and not isinstance(part, ast.Expr)]
    before: list[ast.stmt] = []
    tests, claims = [], []
    for statement in check.body:
        if not _asserts_something(statement):
            if not isinstance(statement, ast.Assert):
                before.append(statement)
            continue
        tests.append(ast.unparse(ast.Module([*around, _replaced(check, body=[*before, statement])], [])))
        claims.append(ast.unparse(statement))
    return tuple(tests), tuple(claims)


def _asserts_something(statement: ast.stmt) -> bool:
    assertions = (node for node in own_nodes([statement]) if isinstance(node, ast.Assert))
    return any(not isinstance(node.test, ast.Constant) for node in assertions)


def _cooperation(entry: Definition) -> tuple[bool, bool]:
    """Whether the main function really calls aux, and whether it is a mere wrapper of it."""
    if not isinstance(entry.node, ast.FunctionDef):
        return False, False
    try:
        return really_calls(entry.node, AUX), is_mere_wrapper(entry.node, AUX)
    except RecursionError:  # blocks nested hundreds deep: nothing that anybody could call cooperation
        return False, False
