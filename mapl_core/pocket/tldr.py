"""The miniature TLDR: generated posts and scripted answers of an able but uncoordinated team.

A post fills six slots in a few sentence frames. The scripted answers are what the pocket base is trained on: each agent
picks a *mode* (a proper sentence, far too short, repetitive ...) without looking at its team mate. Every word an answer
needs is there, so the mistakes that remain are mistakes of coordination: lengths that do not fit each other, too few
different words, no linking words. Pure text, no torch; the model that learns from it is built by `pocket.build`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from mapl_core.domains.base import Domain, Task
from mapl_core.pocket.common import prompt_forms

SLOTS: dict[str, tuple[str, ...]] = {
    "person": (
        "sister", "brother", "boss", "neighbour", "roommate", "cousin", "teacher", "uncle", "girlfriend", "friend",
    ),
    "event": (
        "lost", "broke", "sold", "hid", "burned", "stole", "painted", "borrowed", "dropped", "damaged", "washed",
        "copied",
    ),
    "object": (
        "car", "phone", "ring", "bike", "laptop", "guitar", "letter", "camera", "jacket", "cake", "lamp", "watch",
    ),
    "feeling": ("angry", "sad", "guilty", "nervous", "jealous", "confused", "ashamed", "worried"),
    "place": ("kitchen", "office", "garden", "school", "station", "hotel", "gym", "library"),
    "question": ("apologise", "complain", "confess", "write", "lie", "reply", "return", "talk"),
}  # fmt: skip

FIELD_NAMES = ("SUBREDDIT:", "TITLE:", "POST:", "TL;DR:")
SUBREDDITS = ("r/advice", "r/relationships", "r/family")
TITLES = (
    "my {person} {event} my {object}",
    "trouble with my {person} at the {place}",
    "feeling {feeling} about my {object}",
)
OPENINGS = (
    "last week my {person} {event} my {object} at the {place}.",
    "my {person} came to the {place} and {event} my {object}.",
    "i was at the {place} and saw how my {person} {event} my {object}.",
)
DETAILS = (
    "we argued for hours and nobody wanted to help.",
    "it was a gift from my parents and hard to replace.",
    "the whole family knows about it and takes sides.",
)
FEELINGS = (
    "i feel {feeling} about it every day.",
    "it makes me {feeling} and i cannot sleep.",
)
QUESTIONS = (
    "should i {question} to my {person}?",
    "is it right to {question} to my {person}?",
)

# Two phrases of each transition category of the oracle (appendix C.3), one token each.
TRANSITIONS: dict[str, tuple[str, str]] = {
    "elaboration": ("in addition", "furthermore"),
    "examples": ("for example", "for instance"),
    "explanation": ("in other words", "namely"),
    "cause_effect": ("because", "therefore"),
    "contrast": ("however", "in contrast"),
    "sequence": ("firstly", "finally"),
    "emphasis": ("indeed", "in fact"),
    "summary": ("in summary", "to sum up"),
    "comparison": ("similarly", "likewise"),
    "concession": ("although", "nevertheless"),
    "condition": ("unless", "provided that"),
    "time": ("meanwhile", "afterwards"),
}

# Agent 0: whole answers.
SENTENCES = (
    "my {person} {event} my {object} at the {place} and i feel {feeling}",
    "my {person} {event} my {object} and it makes me {feeling}",
    "i feel {feeling} about my {person} and the {object}",
    "my {person} {event} my {object} and i want to {question}",
    "my {person} came to the {place} and {event} my {object}",
    "i want to {question} to my {person} about the {object} at the {place}",
    "it makes me {feeling} how my {person} {event} my {object}",
)
REMARKS = (
    "my {person} {event} my {object}",
    "i feel {feeling}",
    "trouble at the {place}",
    "my {person} makes me {feeling}",
    "i want to {question}",
)
LONG_STARTS = (
    "my {person} {event} my {object} at the {place} and i feel {feeling}",
    "my {person} came to the {place} and {event} my {object} last week",
    "i was at the {place} and saw how my {person} {event} my {object}",
)
LONG_ENDS = (
    "and now i want to {question} to my {person}",
    "and we argued for hours about the {object}",
    "and it makes me {feeling} every day and night",
)
UNRELATED_SENTENCES = (
    "something strange happened here and only time will show what comes of it",
    "some people have all the luck while others must work very hard",
    "there are many ways to see such things and none is best",
)

# Agent 1: clauses that are put together.
CLAUSES = (
    "my {person} {event} my {object} at the {place}",
    "my {person} {event} it without asking me once",
    "my {person} never asked for the {object}",
    "my whole family takes sides and keeps asking",
    "i feel {feeling} and cannot sleep at night",
    "i want to {question} to my {person}",
    "i wonder whether it is right to {question}",
    "the {object} was a gift from my parents",
    "the whole trouble began at the {place}",
    "we argued for hours about the {object}",
    "we saw nobody else at the {place}",
    "it makes me {feeling} every single morning",
    "it was expensive and hard to replace",
)
SHORT_CLAUSES = (
    "my {person} {event} my {object}",
    "my family takes sides",
    "i feel {feeling}",
    "i want to {question}",
    "the {object} is gone",
    "we argued at the {place}",
    "it was expensive",
    "nobody said a word",
)
UNRELATED_CLAUSES = (
    "something strange happened here",
    "only time will show what comes of it",
    "some people have all the luck",
    "others must work very hard",
    "there are many ways to see such things",
    "none of them is best",
)

# How often each agent falls into which mode. Every good mode is there, none depends on the team mate.
MODES: tuple[dict[str, float], ...] = (
    {"sentence": 0.36, "remark": 0.19, "long": 0.25, "repetitive": 0.10, "unrelated": 0.10},
    {"clauses": 0.32, "single": 0.22, "overlong": 0.15, "repetitive": 0.12, "unrelated": 0.09, "connected": 0.10},
)
LAYOUT = ""
NEW_TOKENS = (24, 64)  # limits on new tokens, agent by agent; a coordinator has their sum
TOKEN_LIMITS = (23, 58)  # of scripted answers: the limits above also hold the end token and a coordinator's tags

SPLIT_SIZE = 250
SPLIT_SEED = "mapl pocket tldr tasks"


# Posts ---------------------------------------------------------------------------------------------------------------


def slots_of(text: str) -> dict[str, list[str]]:
    """Slot words that occur in a text, by slot, each once and in order: what an answer mentions of its post."""
    words = dict.fromkeys(re.findall(r"\w+", text.lower()))
    return {slot: [word for word in words if word in fillers] for slot, fillers in SLOTS.items()}


def copied_words(text: str, task: Task) -> tuple[int, int]:
    """How many different slot words of an answer are its own post's, and how many there are in all."""
    own = slots_of(task.fields["post"])
    mentioned = [(word, slot) for slot, words in slots_of(text).items() for word in words]
    return sum(word in own[slot] for word, slot in mentioned), len(mentioned)


def write_post(slots: Mapping[str, str], rng: random.Random) -> str:
    """A post of 25-40 words in the four-field layout of the paper's TLDR prompts."""
    middle = [rng.choice(DETAILS), rng.choice(FEELINGS)]
    rng.shuffle(middle)
    body = " ".join((rng.choice(OPENINGS), *middle, rng.choice(QUESTIONS)))
    return f"SUBREDDIT: {rng.choice(SUBREDDITS)}\n\nTITLE: {rng.choice(TITLES)}\n\nPOST: {body}".format(**slots)


def _task(name: str, split: str, post: str) -> Task:
    """The same fields as a row of the paper's data: the post, and the post with the cue that asks for a summary."""
    return Task(name, "pocket", split, {"prompt": f"{post}\n\nTL;DR:", "post": post})


def draw_slots(rng: random.Random) -> dict[str, str]:
    return {slot: rng.choice(fillers) for slot, fillers in SLOTS.items()}


def _split_slots() -> dict[str, list[dict[str, str]]]:
    """Fillers of all tasks of both splits; no two tasks share all six."""
    rng = random.Random(SPLIT_SEED)
    distinct: dict[tuple[str, ...], dict[str, str]] = {}
    while len(distinct) < 2 * SPLIT_SIZE:
        slots = draw_slots(rng)
        distinct.setdefault(tuple(slots.values()), slots)
    drawn = list(distinct.values())
    return {"train": drawn[:SPLIT_SIZE], "eval": drawn[SPLIT_SIZE:]}


def make_tasks(split: str, limit: int | None = None) -> list[Task]:
    """The generated TLDR tasks of one split, always the same ones in the same order.

    Args:
        split: "train" or "eval", 250 tasks each; no post of one is in the other.
        limit: only the first so many tasks.

    Returns:
        Tasks with the fields "prompt", in the layout SUBREDDIT, TITLE, POST, TL;DR, and "post", without the last.

    Raises:
        ValueError: for another split, or a limit outside 1..250.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    count = SPLIT_SIZE if limit is None else limit
    if not 1 <= count <= SPLIT_SIZE:
        raise ValueError(f"limit must be between 1 and {SPLIT_SIZE}, got {limit}; a pocket split is no larger")
    tasks = []
    for index, slots in enumerate(_split_slots()[split][:count]):
        name = f"tldr-pocket-{split}-{index:03d}"
        tasks.append(_task(name, split, write_post(slots, random.Random(name))))
    return tasks


def draw_task(rng: random.Random, reserved: frozenset[tuple[str, ...]]) -> tuple[Task, dict[str, str]]:
    """A fresh task for pretraining, never one whose fillers are those of a reserved task, and its fillers."""
    while True:
        slots = draw_slots(rng)
        if tuple(slots.values()) not in reserved:
            return _task("tldr-pocket-corpus", "train", write_post(slots, rng)), slots


def reserved_slots() -> frozenset[tuple[str, ...]]:
    """Fillers of the train and eval tasks, which the pocket base must not have seen."""
    return frozenset(tuple(slots.values()) for split in _split_slots().values() for slots in split)


# Scripted answers ----------------------------------------------------------------------------------------------------


def count_tokens(text: str) -> int:
    """Tokens of an answer in the pocket vocabulary: a transition phrase, a stop and an open slot are one each."""
    phrases = "|".join(phrase for pair in TRANSITIONS.values() for phrase in pair if " " in phrase)
    return len(re.findall(rf"\b(?:{phrases})\b|\w+|[^\w\s{{}}]", text))


def _transitions(count: int, rng: random.Random) -> list[str]:
    """`count` linking phrases of different categories, in random order."""
    return [rng.choice(TRANSITIONS[category]) for category in rng.sample(list(TRANSITIONS), count)]


def _link(clauses: Sequence[str], transitions: Sequence[str], rng: random.Random) -> str:
    """Close each clause with a stop and put linking phrases before clauses, before the first one only at last.

    An answer that opened with a phrase as often as not would lose these openings, and with them its whole mode, when
    sampled at a lower temperature: there are two dozen phrases, each of them rare.
    """
    places: list[list[str]] = [[] for _ in clauses]
    order = rng.sample(range(1, len(clauses)), len(clauses) - 1) + [0]
    for index, phrase in enumerate(transitions):
        places[order[index] if index < len(order) else rng.randrange(len(clauses))].append(phrase)
    return " ".join(" ".join((*phrases, clause)) + "." for phrases, clause in zip(places, clauses, strict=True))


def _repeat(clause: str, joint: str, limit: int, times: int) -> str:
    text = clause
    for _ in range(times - 1):
        longer = f"{text}{joint}{clause}"
        if count_tokens(longer) + 1 > limit:
            break
        text = longer
    return text + "."


def short_answer(mode: str, rng: random.Random) -> str:
    """A frame of agent 0's answer in one of its modes, slots still open."""
    if mode == "sentence":
        return rng.choice(SENTENCES) + "."
    if mode == "remark":
        return rng.choice(REMARKS) + "."
    if mode == "long":
        return f"{rng.choice(LONG_STARTS)} {rng.choice(LONG_ENDS)}."
    if mode == "repetitive":
        return _repeat(rng.choice(REMARKS), " and ", TOKEN_LIMITS[0], rng.randint(2, 4))
    return rng.choice(UNRELATED_SENTENCES) + "."


def detailed_answer(mode: str, rng: random.Random) -> str:
    """A frame of agent 1's answer in one of its modes, slots still open."""
    if mode == "clauses":
        count = rng.randint(2, 4)
        return _link(rng.sample(CLAUSES, count), _transitions(rng.randint(0, count - 1), rng), rng)
    if mode == "single":  # no longer than what agent 0 should write
        return rng.choice(SENTENCES) + "."
    if mode == "overlong":
        transitions = _transitions(rng.randint(0, 3), rng)
        clauses = rng.sample(CLAUSES, 8)
        while sum(count_tokens(part) for part in clauses) + len(clauses) + len(transitions) > TOKEN_LIMITS[1]:
            clauses.pop()
        return _link(clauses, transitions, rng)
    if mode == "repetitive":
        return _repeat(rng.choice(CLAUSES), ". ", TOKEN_LIMITS[1], rng.randint(3, 5))
    if mode == "unrelated":
        return _link(rng.sample(UNRELATED_CLAUSES, rng.randint(2, 4)), _transitions(rng.randint(0, 1), rng), rng)
    return _link(rng.sample(SHORT_CLAUSES, rng.randint(4, 6)), _transitions(rng.randint(5, 9), rng), rng)


def sample_answer(agent: int, slots: Mapping[str, str], rng: random.Random) -> str:
    """One scripted answer of one agent, independent of the other agent's (domains.md: the start mixture).

    Args:
        agent: 0 (short summary) or 1 (detailed summary).
        slots: the fillers of the post.
        rng: source of all choices.
    """
    mode = rng.choices(list(MODES[agent]), weights=list(MODES[agent].values()))[0]
    frame = (short_answer, detailed_answer)[agent](mode, rng)
    return frame.format(**slots)


def best_answers(task: Task) -> tuple[str, str]:
    """A joint answer that earns the full oracle reward on this task: the generator's self-test."""
    slots = {slot: words[0] for slot, words in slots_of(task.fields["post"]).items()}
    short = "i want to {question} to my {person} about the {object} at the {place}."
    clauses = ("my {person} {event} my {object}", "we argued", "nobody said a word")
    linking = [min(pair, key=len) for pair in TRANSITIONS.values()]
    linked = (" ".join((*linking[4 * index : 4 * index + 4], clause)) + "." for index, clause in enumerate(clauses))
    return short.format(**slots), " ".join(linked).format(**slots)


# The corpus ----------------------------------------------------------------------------------------------------------

# How often the corpus shows each prompt form; every form that an experiment may write is among them.
FORMS = {"agent": 0.44, "coordinator": 0.20, "single": 0.12, "sequential": 0.10, "discussion": 0.14}


def atoms() -> list[str]:
    """Texts that are one token each although they are not one plain word."""
    return [*(phrase for pair in TRANSITIONS.values() for phrase in pair), *SUBREDDITS, *FIELD_NAMES]


def vocabulary_texts(domain: Domain) -> Iterator[str]:
    """Texts that together hold every word of the language: fillers, all frames, all prompt forms."""
    frames = (OPENINGS, DETAILS, FEELINGS, QUESTIONS, TITLES, SENTENCES, REMARKS, LONG_STARTS, LONG_ENDS)
    frames += (UNRELATED_SENTENCES, CLAUSES, SHORT_CLAUSES, UNRELATED_CLAUSES)
    for group in (*SLOTS.values(), *frames, atoms()):
        yield from (re.sub(r"{\w+}", "", text) for text in group)
    yield from (write() for write in prompt_forms(domain, make_tasks("train", 1)[0], ["", ""]).values())


def write_example(domain: Domain, rng: random.Random, reserved: frozenset[tuple[str, ...]]) -> tuple[str, str]:
    """One pair of prompt and scripted answer for pretraining.

    Whatever the form, the answer follows the same uncoordinated mixture: a coordinator draws both parts independently,
    and an agent that is shown its team mate's text does not use it.
    """
    task, slots = draw_task(rng, reserved)
    drafts = [sample_answer(agent, slots, rng) for agent in range(domain.num_agents)]
    form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
    answers = [sample_answer(agent, slots, rng) for agent in range(domain.num_agents)]
    if form in ("coordinator", "single"):
        return prompt_forms(domain, task, drafts)[form](), domain.join(answers)
    agent = rng.randrange(domain.num_agents)
    return prompt_forms(domain, task, drafts)[f"{form} {agent}"](), answers[agent]
