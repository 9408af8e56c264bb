"""The scripted answers of the miniature Travel: each mode makes its own mistake and no other."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mapl_core.domains import get_domain
from mapl_core.domains.travel_solver import split_budget
from mapl_core.pocket import travel
from mapl_core.pocket.common import domain_tokenizer
from mapl_core.pocket.travel import (
    END,
    ENTITY_WORDS,
    FORMS,
    NONE,
    TEAM_SIZES,
    TRIP_DAYS,
    best_answers,
    cities_of_places,
    copied_words,
    draw_trip,
    make_tasks,
    reserved_slots,
    vocabulary,
    write_example,
)
from mapl_core.pocket.travel_mixture import MODES, MOST_SURPLUS, role_choices, sample_answer, scripted_answer
from mapl_core.rewards.travel_actions import TEAMS, owned_slots
from mapl_core.rewards.travel_trip import read_trip

TASKS = [*make_tasks("train", 8), *make_tasks("eval", 1, days=5)]


def answered(task, agent, mode, seed=0):
    """What the oracle finds if one agent answers in a mode and the other with the solver's plan."""
    answers = list(best_answers(task))
    answers[agent] = scripted_answer(task, agent, mode, random.Random(seed))
    return get_domain("travel", days=task.fields["days"]).judge(answers, task), answers[agent].split()


@pytest.mark.parametrize("agent", [0, 1])
def test_feasible_answers_keep_their_cap_and_make_a_perfect_team_with_the_cheapest_mate(agent):
    for task in TASKS:
        outcome, _ = answered(task, agent, "feasible")
        assert outcome.evaluation.succeeds and outcome.all_strict, task.id


@pytest.mark.parametrize("agent", [0, 1])
def test_dear_answers_are_complete_and_beyond_the_cap_where_the_trip_allows_it(agent):
    beyond = 0
    for task in TASKS:
        trip = read_trip(task.fields)
        outcome, _ = answered(task, agent, "dear")
        assert outcome.all_strict and outcome.evaluation.grounding == 1
        dearest = sum(max(cost for cost, _ in choices) for choices in role_choices(trip, TEAMS[2][agent]))
        beyond += dearest > split_budget(trip).caps[agent]
    assert beyond > len(TASKS) / 2


@pytest.mark.parametrize("agent", [0, 1])
def test_wrong_and_blank_answers_spoil_one_slot_of_a_strict_answer(agent):
    for task in TASKS:
        wrong, _ = answered(task, agent, "wrong")
        assert wrong.all_strict and not wrong.evaluation.commonsense["within_current_city"].passed, task.id
        blank, words = answered(task, agent, "blank")
        assert blank.all_strict and blank.evaluation.grounding < 1
        assert NONE in words


def test_a_repeated_restaurant_breaks_the_diversity():
    broken = [not answered(task, 1, "repeated")[0].evaluation.passes for task in TASKS]
    assert all(broken)


@pytest.mark.parametrize("agent", [0, 1])
def test_open_answers_have_no_end_or_values_beyond_their_slots(agent):
    kinds = Counter()
    for seed in range(20):
        outcome, words = answered(TASKS[0], agent, "open", seed)
        assert not outcome.actions[agent].strict
        slots = len(owned_slots(agent, 3))
        kinds[words[-1] == END] += 1
        assert slots <= len(words) <= slots + MOST_SURPLUS + 1
    assert set(kinds) == {True, False}


@pytest.mark.parametrize("num_agents", [2, 3])
def test_samples_follow_the_mixture_whatever_the_team_and_use_only_the_vocabulary(num_agents):
    words = set(vocabulary())
    rng = random.Random(0)
    assert sum(MODES.values()) == pytest.approx(1)
    domain = get_domain("travel", num_agents=num_agents)
    rewards = []
    for number in range(80):
        task = TASKS[number % 8]
        answers = [sample_answer(task, agent, rng, num_agents) for agent in range(num_agents)]
        assert {word for answer in answers for word in answer.split()} <= words
        rewards.append(domain.reward(answers, task).total)
    assert len({round(reward, 3) for reward in rewards}) > 20  # samples of a team differ
    assert 0.2 < sum(rewards) / len(rewards) < 0.6


# The corpus ------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_small_and_holds_the_whole_corpus():
    tokenizer, domain, rng, seen = domain_tokenizer("travel"), get_domain("travel"), random.Random(0), Counter()
    reserved = reserved_slots()
    assert len(tokenizer) <= 400 and len(reserved) == 160
    for _ in range(200):
        prompt, answer = write_example(domain, rng, reserved)
        assert tokenizer.unk_token_id not in tokenizer(prompt).input_ids + tokenizer(answer).input_ids, prompt
        sections = answer.count("</agent_")
        if sections:
            team = get_domain("travel", num_agents=sections)
            assert team.join(team.split_joint(answer)) == answer
        for sign in ("answer for all", "plan all :", "plan meals .", "plan meals and sights .", "your draft"):
            seen[sign] += sign in prompt
        seen[f"{sections} sections"] += 1
    assert len(seen) == 8 and min(seen.values()) >= 2, seen
    assert all(sum(shares.values()) == pytest.approx(1) for shares in (FORMS, TEAM_SIZES, TRIP_DAYS))


def test_the_corpus_never_shows_a_trip_of_the_splits():
    task, reserved = make_tasks("eval", 1)[0], reserved_slots()
    drawn = iter([dict(task.fields), draw_trip(random.Random(5))])

    def draw(rng, days):
        return next(drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(travel, "draw_trip", draw)
        patch.setattr(travel, "TEAM_SIZES", {2: 1.0})
        write_example(get_domain("travel"), random.Random(0), reserved)
    assert next(drawn, None) is None  # the reserved trip was passed over


def test_the_oracle_judges_the_decoded_tokens_of_an_answer_like_the_answer():
    tokenizer, domain = domain_tokenizer("travel"), get_domain("travel")
    for task in make_tasks("eval", 8):
        decoded = [tokenizer.decode(tokenizer(answer).input_ids) for answer in best_answers(task)]
        assert decoded == list(best_answers(task)) and domain.reward(decoded, task).total == 1.0


def test_copied_words_counts_the_entities_of_the_own_catalogue():
    task = make_tasks("eval", 1)[0]
    word = next(word for word in best_answers(task)[1].split() if word in ENTITY_WORDS)
    foreign = next(w for w, name in ENTITY_WORDS.items() if name not in cities_of_places(read_trip(task.fields)))
    assert copied_words(f"{word} none {foreign} end", task) == (1, 2)
