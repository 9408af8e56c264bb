"""The miniature CoopHE: problems with executable tests, scripted answers, the start mixture."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import pytest

from mapl_core.domains import get_domain
from mapl_core.pocket.common import domain_tokenizer
from mapl_core.pocket.coophe import (
    FORMS,
    INNER,
    INPUTS,
    MODES,
    NEW_TOKENS,
    OUTER,
    SPLIT_SIZES,
    TrustedRunner,
    all_puzzles,
    aux_answer,
    best_answers,
    copied_words,
    main_answer,
    make_tasks,
    puzzle_of,
    reserved_slots,
    sample_answer,
    write_example,
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
    assert train.isdisjoint(evaluation) and train | evaluation == reserved_slots()
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


# The corpus ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return domain_tokenizer("coophe")


def test_the_oracle_judges_the_decoded_tokens_of_an_answer_like_the_answer(domain, tokenizer):
    """Decoding puts blanks between tokens; line ends and indents survive, and encoding gives the ids back."""
    for task in make_tasks("eval"):
        ids = [tokenizer(answer.rstrip("\n")).input_ids for answer in best_answers(task)]
        decoded = [tokenizer.decode(row) for row in ids]
        assert domain.reward(decoded, task).total == domain.max_reward
        assert [tokenizer(text).input_ids for text in decoded] == ids


def test_the_vocabulary_is_small_and_holds_the_whole_corpus(tokenizer):
    assert len(tokenizer) <= 400
    domain, rng, seen = get_domain("coophe"), random.Random(0), Counter()
    reserved = reserved_slots()
    for _ in range(300):
        prompt, answer = write_example(domain, rng, reserved)
        ids = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
        assert tokenizer.unk_token_id not in ids, prompt
        assert len(tokenizer(answer).input_ids) < (sum(NEW_TOKENS) + 10 if "<agent_0>" in answer else NEW_TOKENS[0])
        if "<agent_0>" in answer:
            assert domain.join(domain.split_joint(answer)) == answer
        for sign in ("write both", "write aux and", "alone .", "the other agent wrote", "draft was", "result :"):
            seen[sign] += sign in prompt
        assert puzzle_of(write_task("", "", next(p for p in all_puzzles() if _shows(prompt, p)), rng)) not in reserved
    assert len(seen) == 6 and min(seen.values()) >= 2, seen
    assert sum(FORMS.values()) == pytest.approx(1)


def _shows(prompt, puzzle):
    return prompt.startswith(write_task("", "", puzzle, random.Random(0)).fields["prompt"].strip("\n"))


def test_scripted_answers_are_judged_without_a_sandbox_as_in_it(domain):
    trusted, rng = get_domain("coophe", sandbox=TrustedRunner()), random.Random(2)
    for task in make_tasks("eval", 8):
        answers = [sample_answer(agent, puzzle_of(task), rng) for agent in range(2)]
        assert trusted.reward(answers, task) == domain.reward(answers, task)


def test_copied_words_counts_the_inner_steps_that_are_the_problems_own():
    task = next(task for task in tasks() if puzzle_of(task).inner == "square")
    assert copied_words("def aux ( x ) : \n     return x * x", task) == (1, 1)
    assert copied_words("return ( x // 2 ) + 3 return x * x", task) == (1, 2)
    assert copied_words("return aux ( x ) + 3", task) == (0, 0)
