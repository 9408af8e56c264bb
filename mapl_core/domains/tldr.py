"""TLDR: two agents summarise one post, one concisely and one in detail (paper, section 5.1)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.rewards import Reward, tldr_reward
from mapl_core.rewards.text import clean_response
from mapl_core.rewards.tldr import MAX_REWARD, STOP_WORDS_NAME, measure

HUB_DATASET = "trl-lib/tldr"
HUB_REVISION = "21233da376667088e6eb1ce4ce19ed832c2935d3"
HUB_SPLITS = {"train": "train[:250]", "eval": "test[:250]"}
SHIPPED_ROWS = {"train": 40, "eval": 20}  # the fewest rows of a complete file of posts

POST_BODY = re.compile(r"^POST:(.*)\Z", re.DOTALL | re.MULTILINE)
SUMMARY_CUE = re.compile(r"\s*TL;DR:\s*\Z")


@dataclass(frozen=True)
class PromptForms:
    """Every wording that one kind of model reads; `str.format` fills in the names in braces.

    Attributes:
        material: the post, stated once for all agents ({post}).
        roles: what agent 0 and agent 1 are told.
        coordinator: the same for one model that writes both parts ({role_0}, {role_1} may be used).
        single: the whole task for a single-agent baseline, without roles.
        sequential: what follows the role once another agent has written ({text}).
        discussion: what follows the role in a round of discussion ({other}, {own}).
    """

    material: str
    roles: tuple[str, str]
    coordinator: str
    single: str
    sequential: str
    discussion: str


OUTPUT_RULE = (
    "Answer in exactly this form, with the tags:\n\n"
    "<agent_0> short summary </agent_0>\n<agent_1> detailed summary </agent_1>"
)

# A language model is asked in plain English, the pocket model in the few words of its vocabulary.
ENGLISH = PromptForms(
    material="Here is a post from a forum.\n\n{post}",
    roles=(
        "Write a concise, factual summary of this post in one to three sentences.",
        "Write a detailed summary of this post in your own words. Use many different words, and some transition words"
        " to connect the sentences.",
    ),
    coordinator="Write two summaries of this post.\n\n<agent_0>: {role_0}\n\n<agent_1>: {role_1}\n\n" + OUTPUT_RULE,
    single="Write a short and a detailed summary of this post.\n\n" + OUTPUT_RULE,
    sequential="\n\nThe other agent wrote:\n{text}",
    discussion="\n\nThe other agent wrote:\n{other}\n\nYour draft was:\n{own}\n\nWrite your summary again.",
)
POCKET = PromptForms(
    material="{post}",
    roles=("write a short summary .", "write a long summary with linking words ."),
    coordinator="write both summaries : <agent_0> short </agent_0> <agent_1> long with linking words </agent_1> .",
    single="write a short summary and a long summary : <agent_0> <agent_1> .",
    sequential=" the other agent wrote : {text}",
    discussion=" the other agent wrote : {other} . your draft was : {own} . write it again .",
)
FORMS = {"pocket": POCKET, "small": ENGLISH, "paper": ENGLISH}


class TldrDomain(Domain):
    """Two agents, one turn: a concise and a detailed summary of one post, read together as a briefing.

    Attributes:
        refused: rows that `load_tasks` would not take, as (id, reason), by (source, split); for the run manifest.
    """

    name = "tldr"
    num_agents = 2
    horizon = 1
    max_reward = MAX_REWARD
    headline = "score"

    def __init__(self) -> None:
        self.refused: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        """Posts of one split, in the order of their source; rows without post text go to `refused`.

        Args:
            split: "train" or "eval".
            source: "pocket" (generated), "small" (self-written posts) or "paper" (trl-lib/tldr, from the hub).
            limit: only the first so many tasks.

        Raises:
            ValueError: for an unknown split or source, a limit that the split cannot serve, or a malformed data file.
            FileNotFoundError: if the shipped posts are missing.
            ConnectionError: if the hub's rows cannot be had.
        """
        _check_choice("split", split, HUB_SPLITS)
        _check_choice("source", source, FORMS)
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        if source == "pocket":
            from mapl_core.pocket.tldr import make_tasks

            self.refused[source, split] = []
            return make_tasks(split, limit)
        rows = list(read_posts(posts_file(), split) if source == "small" else _hub_posts(split))
        if limit is not None and limit > len(rows):
            raise ValueError(f"limit {limit} exceeds the {len(rows)} {split} rows of source {source!r}; lower it")
        refused = [(row_id, reason) for row_id, prompt in rows if (reason := _fault(prompt))]
        faulty = {row_id for row_id, _ in refused}
        self.refused[source, split] = refused
        accepted = [(row_id, prompt) for row_id, prompt in rows if row_id not in faulty]
        return [
            Task(row_id, source, split, {"prompt": prompt, "post": SUMMARY_CUE.sub("", prompt).strip()})
            for row_id, prompt in accepted[:limit]
        ]

    def provenance(self, source: str) -> dict[str, str]:
        """Where tasks and stop words come from, in words, for manifests and captions."""
        _check_choice("source", source, FORMS)
        data = {
            "pocket": "generated miniature posts (mapl_core.pocket.tldr)",
            "small": "self-written synthetic posts shipped with mapl_core (domains/data/tldr_posts.jsonl)",
            "paper": f"{HUB_DATASET} at {HUB_REVISION}, field prompt, {HUB_SPLITS['train']} and {HUB_SPLITS['eval']}",
        }
        return {"data": data[source], "stop_words": STOP_WORDS_NAME}

    def task_text(self, task: Task) -> str:
        return FORMS[task.source].material.format(post=task.fields["post"])

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        return FORMS[task.source].roles[agent]

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        forms = FORMS[task.source]
        role_0, role_1 = forms.roles
        return f"{self.task_text(task)}\n\n{forms.coordinator.format(role_0=role_0, role_1=role_1)}"

    def single_prompt(self, task: Task) -> str:
        """The whole task for one agent that writes both summaries in tagged sections."""
        return f"{self.task_text(task)}\n\n{FORMS[task.source].single}"

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        """Agent `agent`'s prompt when the agents before it, and only they, have written their final parts.

        Raises:
            ValueError: if `previous` does not hold exactly the parts of the agents 0 .. agent - 1.
        """
        if len(previous) != agent:
            raise ValueError(f"agent {agent} follows {agent} earlier parts, got {len(previous)}")
        written = "".join(FORMS[task.source].sequential.format(text=_quoted(text)) for text in previous)
        return self.prompts(task)[agent] + written

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        """Every agent's prompt in a round of discussion: its role, the other's draft and its own.

        Raises:
            ValueError: if there is not one draft per agent.
        """
        if len(drafts) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} drafts, one per agent, got {len(drafts)}")
        form = FORMS[task.source].discussion
        short, detailed = (_quoted(draft) for draft in drafts)
        rounds = (form.format(other=detailed, own=short), form.format(other=short, own=detailed))
        return [prompt + text for prompt, text in zip(self.prompts(task), rounds, strict=True)]

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        return tldr_reward(responses, task)

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        """Score (reward / 3), length ratio r, unique-word ratio u, overlap J and transition categories n."""
        measured = measure(responses)
        return {
            "score": tldr_reward(responses, task).total / MAX_REWARD,
            "r": measured.length_ratio,
            "u": measured.unique_ratio,
            "J": measured.overlap,
            "n": float(measured.transitions),
        }


def posts_file() -> Traversable:
    """The self-written posts that are installed with the package."""
    return resources.files("mapl_core.domains") / "data" / "tldr_posts.jsonl"


def read_posts(file: Traversable, split: str) -> Iterator[tuple[str, str]]:
    """Id and prompt of every row of one split of a JSON Lines file of posts, once the whole file has been checked.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming file and line, if a row is not a JSON object with the texts id, split and prompt, if an id
            comes twice, or if the file ends before all shipped rows.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; reinstall mapl_core, whose package data it is")
    rows: dict[str, tuple[str, str]] = {}
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        row_id, row_split, prompt = _parse_row(line, f"{file}, line {number}")
        if row_id in rows:
            raise ValueError(f"{file}, line {number}: the id {row_id!r} occurs twice; give every post its own id")
        rows[row_id] = (row_split, prompt)
    for name, fewest in SHIPPED_ROWS.items():
        count = sum(row_split == name for row_split, _ in rows.values())
        if count < fewest:
            raise ValueError(
                f"{file} ends at line {len(lines)} with {count} of at least {fewest} {name} posts; "
                "the file was cut short, reinstall mapl_core"
            )
    return ((row_id, prompt) for row_id, (row_split, prompt) in rows.items() if row_split == split)


def _parse_row(line: bytes, where: str) -> tuple[str, str, str]:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:  # both UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{where}: not a row of JSON ({error}); the file is damaged, reinstall mapl_core") from error
    texts = [row.get(key) for key in ("id", "split", "prompt")] if isinstance(row, dict) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: expected an object with the texts id, split and prompt, got {line[:80]!r}")
    if texts[1] not in SHIPPED_ROWS:
        raise ValueError(f"{where}: split must be one of {', '.join(SHIPPED_ROWS)}, got {texts[1]!r}")
    return texts[0], texts[1], texts[2]


def _hub_posts(split: str) -> Iterator[tuple[str, Any]]:
    """Id and prompt of the paper's rows; nothing but the field `prompt` is used."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "source 'paper' needs the package datasets; install it with: pip install datasets"
        ) from error
    try:
        rows = load_dataset(HUB_DATASET, split=HUB_SPLITS[split], revision=HUB_REVISION)
    except Exception as error:  # the hub client fails in many ways: every one is reported with its cause
        raise ConnectionError(
            f"{HUB_DATASET} at revision {HUB_REVISION} could not be loaded ({type(error).__name__}: {error}). "
            "Unset HF_HUB_OFFLINE and go online, or copy a filled hub cache here and name it in HF_HOME, "
            "or choose another source: 'small' and 'pocket' need no hub."
        ) from error
    hub_split = HUB_SPLITS[split].partition("[")[0]
    return ((f"{HUB_DATASET}/{hub_split}/{index}", row["prompt"]) for index, row in enumerate(rows))


def _fault(prompt: Any) -> str | None:
    """Why a row cannot be a task, or None for a good one."""
    if not isinstance(prompt, str):
        return f"prompt is {type(prompt).__name__}, not a text"
    body = POST_BODY.search(SUMMARY_CUE.sub("", prompt))
    if body is None:
        return "no field POST"
    return None if body.group(1).strip() else "no post text"


def _quoted(text: str) -> str:
    """An agent's text as another prompt shows it: without its thinking and outer white space."""
    return clean_response(text).strip()


def _refuse_history(history: Sequence[Turn]) -> None:
    if history:
        raise ValueError(f"TLDR has one turn and no feedback, got {len(history)} earlier turns")


def _check_choice(what: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
