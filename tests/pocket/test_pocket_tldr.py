"""The generated TLDR tasks and the scripted answers of an able but uncoordinated team."""

from __future__ import annotations

import hashlib
import random
import statistics

import pytest

from mapl_core.domains import get_domain
from mapl_core.pocket import tldr
from mapl_core.rewards import tldr_reward
from mapl_core.rewards.tldr import TRANSITIONS, split_words, transition_categories

SPLITS = ("train", "eval")
FIRST_POST = (
    "SUBREDDIT: r/relationships\n\nTITLE: feeling worried about my letter\n\nPOST: my teacher came to the garden and "
    "washed my letter. it makes me worried and i cannot sleep. it was a gift from my parents and hard to replace. "
    "should i write to my teacher?"
)
ALL_POSTS = "eeef1ba9a3aacd83"


def fillers(task) -> tuple[str, ...]:
    """The six slot words of a post; fails unless there is exactly one for each slot."""
    found = tldr.slots_of(task.fields["post"])
    assert [len(words) for words in found.values()] == [1] * 6, (task.id, found)
    return tuple(words[0] for words in found.values())


def open_frames() -> list[str]:
    """All sentence frames, slots still open."""
    return [
        *tldr.OPENINGS, *tldr.DETAILS, *tldr.FEELINGS, *tldr.QUESTIONS, *tldr.TITLES, *tldr.SENTENCES, *tldr.REMARKS,
        *tldr.LONG_STARTS, *tldr.LONG_ENDS, *tldr.UNRELATED_SENTENCES, *tldr.CLAUSES, *tldr.SHORT_CLAUSES,
        *tldr.UNRELATED_CLAUSES,
    ]  # fmt: skip


def test_slots_have_the_sizes_of_the_specification():
    assert {slot: len(set(words)) for slot, words in tldr.SLOTS.items()} == {
        "person": 10, "event": 12, "object": 12, "feeling": 8, "place": 8, "question": 8,
    }  # fmt: skip


def test_tasks_are_the_same_on_every_machine():
    """Pinned by content: another post is another experiment, and the shipped base must not have seen these."""
    assert tldr.make_tasks("train", 1)[0].fields["post"] == FIRST_POST
    posts = "\n".join(task.fields["prompt"] for split in SPLITS for task in tldr.make_tasks(split))
    assert hashlib.sha256(posts.encode()).hexdigest()[:16] == ALL_POSTS


def test_train_and_eval_tasks_share_no_post_and_no_set_of_fillers():
    train, evaluation = (tldr.make_tasks(split) for split in SPLITS)
    assert len(train) == len(evaluation) == 250
    assert len({fillers(task) for task in train + evaluation}) == 500
    assert len({task.id for task in train + evaluation}) == 500


def test_a_limit_takes_the_first_tasks_in_the_same_order():
    assert tldr.make_tasks("eval", 7) == tldr.make_tasks("eval")[:7]


@pytest.mark.parametrize(
    ("split", "limit", "named"), [("test", None, "'test'"), ("train", 251, "251"), ("train", 0, "got 0")]
)
def test_an_impossible_split_or_limit_is_refused_with_its_value(split, limit, named):
    with pytest.raises(ValueError, match=named):
        tldr.make_tasks(split, limit)


def test_posts_have_25_to_40_words_in_the_four_field_layout():
    for task in (task for split in SPLITS for task in tldr.make_tasks(split)):
        fields = task.fields["prompt"].split("\n\n")
        assert [field.split()[0] for field in fields] == ["SUBREDDIT:", "TITLE:", "POST:", "TL;DR:"]
        assert fields[3] == "TL;DR:" and fields[:3] == task.fields["post"].split("\n\n")
        assert 25 <= len(fields[2].split()[1:]) <= 40


def test_the_corpus_never_draws_the_fillers_of_a_task():
    first = tuple(tldr.draw_task(random.Random(3), frozenset())[1].values())
    again = tuple(tldr.draw_task(random.Random(3), frozenset({first}))[1].values())
    assert again != first
    expected = {fillers(task) for split in SPLITS for task in tldr.make_tasks(split)}
    assert {tuple(sorted(slots)) for slots in tldr.reserved_slots()} == {tuple(sorted(slots)) for slots in expected}


def test_frames_hold_slot_words_only_where_a_slot_is():
    for frame in open_frames():
        empty = dict.fromkeys(tldr.SLOTS, "")
        assert not any(tldr.slots_of(frame.format(**empty)).values()), frame


def test_a_transition_phrase_earns_its_own_category_and_nothing_else_does():
    assert list(tldr.TRANSITIONS) == list(TRANSITIONS)
    for category, pair in tldr.TRANSITIONS.items():
        for phrase in pair:
            assert transition_categories(split_words(phrase)) == {category}
    filled = (frame.format(**tldr.draw_slots(random.Random(i))) for i, frame in enumerate(open_frames() * 20))
    assert [text for text in filled if transition_categories(split_words(text))] == []


def test_a_scripted_joint_answer_reaches_the_maximum_on_every_task():
    """The self-test of domains.md 1.4: no generated task is impossible."""
    for task in (task for split in SPLITS for task in tldr.make_tasks(split)):
        answers = tldr.best_answers(task)
        assert tldr_reward(answers, task).total == pytest.approx(3.0, abs=1e-12), task.id
        assert [tldr.copied_words(text, task)[0] for text in answers] == [4, 3]
        assert all(tldr.count_tokens(text) <= limit for text, limit in zip(answers, tldr.TOKEN_LIMITS, strict=True))


def test_copied_words_counts_only_words_of_the_own_post():
    task = tldr.make_tasks("train", 1)[0]
    person, event, *_ = fillers(task)
    other = next(word for word in tldr.SLOTS["object"] if word not in fillers(task))
    assert tldr.copied_words(f"my {person} {event} my {other} and my {other}.", task) == (2, 3)


@pytest.mark.parametrize(
    ("mode", "fewest", "most"), [("sentence", 9, 14), ("remark", 2, 7), ("long", 20, 22), ("unrelated", 9, 14)]
)
def test_modes_of_agent_0_have_the_lengths_that_define_them(mode, fewest, most):
    rng = random.Random(0)
    texts = [tldr.short_answer(mode, rng).format(**tldr.draw_slots(rng)) for _ in range(300)]
    assert all(fewest <= len(text.split()) <= most for text in texts)


def test_modes_of_agent_1_have_the_linking_words_that_define_them():
    rng = random.Random(0)

    def linking(mode: str) -> list[int]:
        texts = (tldr.detailed_answer(mode, rng).format(**tldr.draw_slots(rng)) for _ in range(300))
        return [len(transition_categories(split_words(text))) for text in texts]

    assert set(linking("clauses")) == {0, 1, 2, 3}
    assert set(linking("overlong")) == {0, 1, 2, 3}
    assert set(linking("single")) == set(linking("repetitive")) == {0}
    assert set(linking("connected")) == {5, 6, 7, 8, 9}


def test_unrelated_answers_mention_nothing_of_the_post():
    rng = random.Random(0)
    for _ in range(200):
        slots = tldr.draw_slots(rng)
        for frame in (tldr.short_answer("unrelated", rng), tldr.detailed_answer("unrelated", rng)):
            assert not any(tldr.slots_of(frame.format(**slots)).values())


def test_scripted_answers_keep_the_token_limits():
    rng = random.Random(0)
    longest = [
        max(tldr.count_tokens(tldr.sample_answer(agent, tldr.draw_slots(rng), rng)) for _ in range(3000))
        for agent in (0, 1)
    ]
    assert all(tokens <= limit for tokens, limit in zip(longest, tldr.TOKEN_LIMITS, strict=True)), longest


def test_the_scripted_mixture_is_able_and_uncoordinated():
    """Mean between a quarter and 0.55 of the maximum; the best of eight independent pairs is usually good."""
    rng = random.Random(0)
    groups = []
    for task in tldr.make_tasks("train", 200):
        slots = dict(zip(tldr.SLOTS, fillers(task), strict=True))
        pairs = [[tldr.sample_answer(agent, slots, rng) for agent in (0, 1)] for _ in range(8)]
        groups.append([tldr_reward(pair, task).total / 3 for pair in pairs])
    assert 0.3 < statistics.fmean(value for group in groups for value in group) < 0.5
    assert statistics.fmean(max(group) > 0.8 for group in groups) > 0.7
    assert statistics.fmean(statistics.stdev(group) for group in groups) > 0.25


def test_a_corpus_answer_does_not_depend_on_what_the_team_mate_wrote():
    """In a discussion the shares of agent 0's modes are the same whether agent 1's draft was short or long."""
    domain, rng = get_domain("tldr"), random.Random(0)
    lengths: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(4000):
        prompt, response = tldr.write_example(domain, rng, frozenset())
        if "your draft was" in prompt and "linking words" not in prompt:
            other = prompt.split("the other agent wrote :")[1].split("your draft was")[0]
            lengths[len(other.split()) > 20].append(len(response.split()) < 8)
    shares = [statistics.fmean(values) for values in lengths.values()]
    assert min(map(len, lengths.values())) > 80
    assert abs(shares[0] - shares[1]) < 0.15  # about three standard errors
