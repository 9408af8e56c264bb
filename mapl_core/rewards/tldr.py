"""Oracle reward of TLDR: one short and one detailed summary of a post (paper, section 5.1 and appendix C.3)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mapl_core.rewards.base import Reward
from mapl_core.rewards.text import check_responses, clean_response

MAX_REWARD = 3.0
PARTS = ("structure", "length", "unique", "style", "coherence")
TOLERANCE = 1e-9
FEWEST_WORDS, MOST_WORDS = 8, 256
STOP_WORDS_NAME = "sklearn.feature_extraction.text.ENGLISH_STOP_WORDS"

WORD = re.compile(r"\w+(?:'\w+)*")
CURLY_APOSTROPHES = str.maketrans({"\u2018": "'", "\u2019": "'"})

# No phrase stands in two categories or inside a phrase of another category, so one phrase earns one category only.
TRANSITIONS: dict[str, tuple[str, ...]] = {
    "elaboration": (
        "in addition", "furthermore", "moreover", "additionally", "also", "besides", "as well as", "along with",
        "together with", "on top of that", "what is more", "not only", "to add to this",
    ),
    "examples": (
        "for example", "for instance", "such as", "including", "in particular", "to illustrate", "as an illustration",
        "as an example", "by way of example", "a case in point", "to name a few", "among others",
    ),
    "explanation": (
        "in other words", "that is to say", "namely", "this means", "which means", "meaning that", "put simply",
        "simply put", "put another way", "to put it differently", "to clarify", "to explain", "specifically",
        "more precisely", "to be precise", "essentially",
    ),
    "cause_effect": (
        "because", "therefore", "as a result", "consequently", "thus", "hence", "due to", "owing to", "thanks to",
        "for this reason", "that is why", "which is why", "accordingly", "as a consequence", "leads to", "leading to",
        "led to", "resulting in", "so that", "caused by",
    ),
    "contrast": (
        "however", "in contrast", "whereas", "by contrast", "on the other hand", "on the contrary", "conversely",
        "instead", "unlike", "rather than", "contrary to", "as opposed to", "alternatively", "in opposition to",
    ),
    "sequence": (
        "firstly", "next", "finally", "first of all", "in the first place", "secondly", "thirdly", "lastly", "then",
        "to begin with", "to start with", "followed by", "last but not least", "step by step", "in the end",
    ),
    "emphasis": (
        "indeed", "in fact", "above all", "especially", "particularly", "certainly", "clearly", "obviously",
        "undoubtedly", "without a doubt", "importantly", "of course", "as a matter of fact", "notably", "definitely",
    ),
    "summary": (
        "in summary", "to sum up", "in conclusion", "to summarize", "to summarise", "in short", "in brief", "overall",
        "all in all", "to conclude", "on the whole", "in a nutshell", "to wrap up", "long story short",
        "all things considered", "altogether", "taken together",
    ),
    "comparison": (
        "similarly", "likewise", "in the same way", "in comparison", "compared to", "compared with", "just like",
        "just as", "by the same token", "equally", "in a similar way", "similar to", "comparable to", "much the same",
        "correspondingly",
    ),
    "concession": (
        "although", "even though", "nevertheless", "nonetheless", "though", "despite", "in spite of", "regardless",
        "admittedly", "granted", "even so", "notwithstanding", "that said", "that being said", "having said that",
        "be that as it may",
    ),
    "condition": (
        "unless", "provided that", "as long as", "so long as", "providing that", "only if", "in case", "in the event",
        "on condition that", "on the condition that", "assuming", "supposing", "given that", "depending on",
        "otherwise", "if necessary", "whether or not",
    ),
    "time": (
        "meanwhile", "afterwards", "previously", "later", "earlier", "before that", "after that", "at the same time",
        "in the meantime", "eventually", "recently", "currently", "until now", "so far", "ever since", "soon after",
        "shortly after", "during this time", "in the past", "nowadays", "subsequently", "beforehand",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measurements:
    """What the oracle measures on a pair of summaries (y_0, y_1), whether or not a stage stops before it.

    Attributes:
        whitespace_words: number of words between blanks, of y_0 and of y_1.
        length_ratio: r = characters of y_1 / characters of y_0; 0 if y_0 is empty.
        unique_ratio: u = different words of y_1 / different words of y_0; 0 if y_0 has no word.
        overlap: J, Jaccard similarity of the two sets of words without stop words; 0 if both are empty.
        transitions: n, how many of the 12 transition categories occur in y_1.
    """

    whitespace_words: tuple[int, int]
    length_ratio: float
    unique_ratio: float
    overlap: float
    transitions: int


def tldr_reward(responses: Sequence[str | None], task: Any) -> Reward:
    """Oracle reward of a pair of summaries, between 0 and 3 (paper, appendix C.3).

    Five stages: structure (0.5), length ratio (1), unique-word ratio (0.5), style (0.6), coherence (0.4). A pair that
    earns nothing in one of the first three stages is not looked at further and keeps what it has. Facts are not
    checked: the oracle never reads the post.

    Args:
        responses: the short summary of agent 0 and the detailed summary of agent 1; None counts as empty.
        task: not used, since the reward depends on the two texts only.

    Raises:
        TypeError, ValueError: if `responses` is not a list of two texts; nothing is scored then.
    """
    measured = measure(responses)
    parts = dict.fromkeys(PARTS, 0.0)
    for part, value, required in _stages(measured):
        # In every domain a stage that is worth next to nothing counts as worth nothing, whatever the rounding.
        parts[part] = value if value > TOLERANCE else 0.0
        if required and parts[part] == 0.0:
            break
    return Reward(total=min(max(sum(parts.values()), 0.0), MAX_REWARD), parts=parts)


def measure(responses: Sequence[str | None]) -> Measurements:
    """Length ratio r, unique-word ratio u, vocabulary overlap J and transition categories n of a pair of summaries."""
    check_responses(responses, num_agents=2)
    short, detailed = (_normalise(text) for text in responses)
    short_words, detailed_words = split_words(short), split_words(detailed)
    short_vocabulary, detailed_vocabulary = set(short_words), set(detailed_words)
    return Measurements(
        whitespace_words=(len(short.split()), len(detailed.split())),
        length_ratio=len(detailed) / len(short) if short else 0.0,
        unique_ratio=len(detailed_vocabulary) / len(short_vocabulary) if short_vocabulary else 0.0,
        overlap=_jaccard(short_vocabulary - stop_words(), detailed_vocabulary - stop_words()),
        transitions=len(transition_categories(detailed_words)),
    )


def split_words(text: str) -> list[str]:
    """Lower-cased words: runs of letters, digits and underscores joined by inner apostrophes, so "Don't" is one."""
    return [word.lower() for word in WORD.findall(text.translate(CURLY_APOSTROPHES))]


def transition_categories(words: Sequence[str]) -> set[str]:
    """The categories of `TRANSITIONS` of which a phrase occurs as consecutive whole words."""
    # Words hold no blanks: with blanks at both ends a phrase can only match from a word's start to a word's end.
    line = f" {' '.join(words)} "
    return {category for category, phrases in TRANSITIONS.items() if any(f" {phrase} " in line for phrase in phrases)}


@cache
def stop_words() -> frozenset[str]:
    """The English stop words of scikit-learn (`STOP_WORDS_NAME`), imported at the first use because it is slow."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return frozenset(ENGLISH_STOP_WORDS)


def _stages(measured: Measurements) -> list[tuple[str, float, bool]]:
    """Name, worth, and whether the pair must earn something here to be looked at further, in the oracle's order."""
    structured = all(FEWEST_WORDS <= count <= MOST_WORDS for count in measured.whitespace_words)
    found = measured.transitions
    return [
        ("structure", 0.5 if structured else 0.0, True),
        ("length", _length_value(measured.length_ratio), True),
        ("unique", 0.5 * _clamp((measured.unique_ratio - 1.3) / 0.7), True),
        ("style", 0.6 * min(measured.overlap, 0.03) / 0.03, False),
        ("coherence", 0.4 * (0.4 + 0.6 * (found - 1) / (len(TRANSITIONS) - 1)) if found else 0.0, False),
    ]


def _length_value(ratio: float) -> float:
    """1 for a detailed summary 1.6 to 3.2 times as long as the short one, falling to 0 at 1.1 and at 5.0."""
    if 1.6 - TOLERANCE <= ratio <= 3.2 + TOLERANCE:  # (5.0 - 3.2) / 1.8 is not quite 1
        return 1.0
    return _clamp((ratio - 1.1) / 0.5 if ratio < 1.6 else (5.0 - ratio) / 1.8)


def _normalise(text: str | None) -> str:
    return unicodedata.normalize("NFC", clean_response(text)).strip()


def _jaccard(first: set[str], second: set[str]) -> float:
    union = first | second
    return len(first & second) / len(union) if union else 0.0


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
