"""The miniature CoopHE: problems with executable tests, scripted answers, the start mixture."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from mapl_core.domains import get_domain
from mapl_core.pocket.coophe import (
    INNER,
    INPUTS,
    MODES,
    NEW_TOKENS,
    OUTER,
    SPLIT_SIZES,
    all_puzzles,
    aux_answer,
    best_answers,
    main_answer,
    make_tasks,
    puzzle_of,
    reserved_puzzles,
    sample_answer,
    write_task,
)
from mapl_core.sandbox import Sandbox


@pytest.fixture(scope="module")
def domain():
    with Sandbox(workers=2) as sandbox:
        yield get_domain("coophe", sandbox=sandbox)


def tasks():
    return [task for split in SPLIT_SIZES for task in make_tasks(split)]


def count_lexemes(text):
    """Python lexemes, line ends and indents: the tokens of the pocket model."""
    import re

    return len(re.findall(r"\w+|//|[^\w\s]|\n(?: {4})?", text.rstrip("\n")))


def test_no_combination_of_steps_and_constant_is_in_both_splits():
    train, evaluation = ({puzzle_of(task) for task in make_tasks(split)} for split in ("train", "eval"))
    assert (len(train), len(evaluation)) == (66, 16)
    assert train.isdisjoint(evaluation) and train | evaluation == reserved_puzzles()
    assert len({task.id for task in tasks()}) == 82


def test_the_tasks_are_always_the_same_and_hold_the_four_real_fields():
    assert tasks() == tasks()
    assert make_tasks("train", 5) == make_tasks("train")[:5]
    assert {tuple(task.fields) for task in tasks()} == {("task_id", "prompt", "test", "entry_point")}


def test_all_inner_steps_differ_on_every_test_input_under_every_outer_step():
    for x in INPUTS:
        for outer in OUTER.values():
            for k in range(1, 10):
                assert len({outer.value(step.value(x), k) for step in INNER.values()}) == len(INNER)


def test_the_written_solution_of_every_puzzle_computes_what_its_steps_say():
    for puzzle in all_puzzles():
        for x in INPUTS:
            k = 3 if puzzle.constant is None else puzzle.constant
            value = OUTER[puzzle.outer].value(INNER[puzzle.inner].value(x), k)
            assert eval(puzzle.solution, {"x": x, "y": k}) == value
            assert eval(puzzle.outer_on("aux(x)"), {"aux": INNER[puzzle.inner].value, "x": x, "y": k}) == value


def test_a_problem_reads_as_in_the_specification():
    puzzle = next(p for p in all_puzzles() if (p.inner, p.outer, p.constant) == ("square", "add", 3))
    task = write_task("t", "train", puzzle, random.Random(0))
    assert task.fields["prompt"] == 'def f(x):\n    """square x, then add 3."""\n'
    assert task.fields["test"].count("assert") == 4
    two = next(p for p in all_puzzles() if (p.inner, p.outer, p.constant) == ("halve", "minus", None))
    assert write_task("t", "train", two, random.Random(0)).fields["prompt"] == (
        'def f(x, y):\n    """halve x, then subtract from y."""\n'
    )


def test_a_scripted_joint_answer_earns_the_maximum_on_every_task(domain):
    for task in tasks():
        assert domain.reward(best_answers(task), task).total == domain.max_reward


def test_a_wrong_inner_step_passes_no_test(domain):
    for task in make_tasks("eval"):
        helper = aux_answer("wrong inner", puzzle_of(task), random.Random(0))
        assert domain.metrics([helper, best_answers(task)[1]], task)["pass"] == 0


@pytest.mark.parametrize(
    ("modes", "parts"),
    [
        (("inner", "call and outer"), (0.4, 0.6, 0.5, 1, 1.5)),
        (("whole", "no call"), (0.4, 0.6, 0.5, 1, 0)),
        (("whole", "wrapper"), (0.4, 0.6, 0.5, 1, 0)),
        (("inner", "wrapper"), (0.4, 0.6, 0.5, None, 0)),
        (("inner", "wrong parameters"), (0.4, 0, 0, 0, 0)),
        (("no return", "call and outer"), (0, 0.6, 0.5, 0, 0)),
        (("no return", "no call"), (0, 0.6, 0.5, 1, 0)),
    ],
)
def test_modes_earn_what_they_are_made_for(domain, modes, parts):
    for task in make_tasks("eval", 8):
        puzzle, rng = puzzle_of(task), random.Random(task.id)
        reward = domain.reward([aux_answer(modes[0], puzzle, rng), main_answer(modes[1], puzzle, rng)], task)
        for found, expected in zip(reward.parts.values(), parts, strict=True):
            assert expected is None or found == expected


def test_answers_stay_within_their_token_limits():
    rng = random.Random(0)
    for puzzle in all_puzzles():
        for agent, limit in enumerate(NEW_TOKENS):
            for mode in MODES[agent]:
                answer = (aux_answer, main_answer)[agent](mode, puzzle, rng)
                assert count_lexemes(answer) + 1 <= limit  # and the end token


def test_the_modes_are_a_mixture():
    assert all(sum(modes.values()) == pytest.approx(1) for modes in MODES)


def test_the_scripted_team_starts_between_a_quarter_and_55_percent_of_the_maximum(domain):
    rng = random.Random(1)
    totals = [
        domain.reward([sample_answer(agent, puzzle_of(task), rng) for agent in range(2)], task).total
        for task in tasks()
        for _ in range(3)
    ]
    assert 0.25 * domain.max_reward < mean(totals) < 0.55 * domain.max_reward
    assert len(set(totals)) > 5
