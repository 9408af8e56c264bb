"""BFCL: agents who cannot see each other issue function calls that together answer one request (paper, section 5.1)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.domains import bfcl_data
from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.rewards import Reward, bfcl_reward
from mapl_core.rewards.bfcl import MAX_REWARD, MIN_REWARD, callers, measure, role_gap
from mapl_core.rewards.text import clean_response

ROLES = ("self_select", "odd_even", "split_by_order")
PARTS_BY_ORDER = {1: ("whole",), 2: ("first half", "second half"), 3: ("first third", "middle third", "last third")}
FEWEST_AGENTS, MOST_AGENTS = 1, 3
SHUFFLES = 20  # of the agents of every answer, to say how far agents differ by chance


@dataclass(frozen=True)
class PromptForms:
    """Every wording that one kind of model reads; `str.format` fills in the names in braces.

    Attributes:
        material: schemas and request, stated once for all agents ({schemas}, {request}).
        team: how the team works ({count}); not told to an agent that answers alone.
        roles: by mode, which calls an agent makes ({numbers}, {part}, {agent}, {count}).
        alone: the same for an agent without a team.
        output: how calls are written.
        coordinator: what one model is told that writes all parts ({count}, {roles}).
        single: the whole task for a single-agent baseline, without roles.
        sections: the form of a coordinator's answer ({sections}).
        sequential: what follows the role for every agent that has written already ({text}).
        other_draft, own_draft: what follows the role in a round of discussion ({text}).
        again: what ends that prompt.
    """

    material: str
    team: str
    roles: Mapping[str, str]
    alone: str
    output: str
    coordinator: str
    single: str
    sections: str
    sequential: str
    other_draft: str
    own_draft: str
    again: str


# A language model is asked in plain English, the pocket model in the few words of its vocabulary.
ENGLISH = PromptForms(
    material=(
        "Here are a request and the functions that can answer it.\n\n"
        "Functions, one JSON schema a line:\n{schemas}\n\nRequest:\n{request}"
    ),
    team=(
        "{count} agents answer this request at the same time, without seeing each other. "
        "Their function calls are merged into one list, which must hold every call that the request needs once. "
    ),
    roles={
        "self_select": "You are one of them: choose a share of the calls, at least one of them, but not all.",
        "odd_even": (
            "Number the calls in the order in which the request asks for them. "
            "You make only the calls with the numbers {numbers} and so on."
        ),
        "split_by_order": (
            "Put the calls in the order in which the request asks for them. "
            "You make only the {part} of them; what cannot be divided evenly falls to the earlier agents."
        ),
    },
    alone="Make every function call that the request needs, each of them once.",
    output=(
        "Write Python calls with keyword arguments, one per line, and no other text. Write [] for no call. "
        'The form, with made-up names:\nfind_book(title="Emma", year=1815)\nlibrary.opening_hours(day="Monday")'
    ),
    coordinator=(
        "You make the calls of {count} agents. Every call that the request needs must be made once, by one of them: "
        "no call twice.\n\n{roles}"
    ),
    single="Make every function call that the request needs, each of them once, in sections of about the same length.",
    sections="Answer in exactly this form, with the tags:\n\n{sections}",
    sequential="\n\nAn agent before you wrote:\n{text}",
    other_draft="\n\nAnother agent wrote:\n{text}",
    own_draft="\n\nYour draft was:\n{text}",
    again="\n\nWrite your calls again.",
)
POCKET = PromptForms(
    material="functions : {schemas} . request : {request} .",
    team="",
    roles={
        "self_select": "make a share of the calls .",
        "odd_even": "make the calls {numbers} .",
        "split_by_order": "make part {agent} of {count} of the calls .",
    },
    alone="make all calls .",
    output="",
    coordinator="make all calls , no call twice : {roles}",
    single="make all calls :",
    sections="{sections} .",
    sequential=" the other agent wrote : {text}",
    other_draft=" the other agent wrote : {text} .",
    own_draft=" your draft was : {text} .",
    again=" write it again .",
)
FORMS = {"pocket": POCKET, "small": ENGLISH, "paper": ENGLISH}


class BfclDomain(Domain):
    """A team answers one request with function calls that are merged; one turn.

    Args:
        num_agents: 1 to 3.
        roles: what agents are told about their share: "self_select" (the same for all, so that only sampling and
            training tell them apart), "odd_even" (agent i makes the calls i, i + n, ...) or "split_by_order" (agent i
            makes the i-th part).

    Attributes:
        refused: rows that `load_tasks` would not take, as (id, reason), by (source, split); for the run manifest.

    Raises:
        ValueError: for another number of agents or unknown roles.
    """

    name = "bfcl"
    horizon = 1
    max_reward = MAX_REWARD
    min_reward = MIN_REWARD
    headline = "correct"

    def __init__(self, num_agents: int = 2, roles: str = "self_select") -> None:
        if isinstance(num_agents, bool) or not isinstance(num_agents, int):
            raise ValueError(f"num_agents must be a whole number, got {num_agents!r}")
        if not FEWEST_AGENTS <= num_agents <= MOST_AGENTS:
            raise ValueError(f"num_agents must be {FEWEST_AGENTS} to {MOST_AGENTS}, got {num_agents}")
        _check_choice("roles", roles, ROLES)
        self.num_agents = num_agents
        self.roles = roles
        self.refused: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        """Requests of one split, in the order of their source; rows that cannot be tasks go to `refused`.

        Args:
            split: "train" or "eval".
            source: "pocket" (generated), "small" (the package bfcl-eval) or "paper" (the authors' rows, from the hub).
            limit: only the first so many tasks; fewer come if rows are refused or, at "paper", of another category.

        Raises:
            ValueError: for an unknown split or source, a limit that the split cannot serve, or a damaged package.
            FileNotFoundError: if the package is not here and cannot be downloaded.
            ConnectionError: if the hub's rows cannot be had.
        """
        _check_choice("split", split, bfcl_data.SPLIT_SIZES)
        _check_choice("source", source, FORMS)
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        if source == "pocket":
            from mapl_core.pocket.bfcl import make_tasks

            self.refused[source, split] = []
            return make_tasks(split, limit)
        size = bfcl_data.SPLIT_SIZES[split]
        if limit is not None and limit > size:
            raise ValueError(f"limit {limit} exceeds the {size} {split} rows of source {source!r}; lower it")
        rows = bfcl_data.small_rows(split) if source == "small" else bfcl_data.hub_rows(split)
        accepted, refused = bfcl_data.accepted_rows(rows, lambda number: f"{bfcl_data.HUB_DATASET}/{split}/{number}")
        self.refused[source, split] = refused
        return [task_of_row(row, source, split) for row in accepted[:limit]]

    def provenance(self, source: str) -> dict[str, str]:
        """Where tasks come from and how they are divided, in words, for manifests and captions."""
        _check_choice("source", source, FORMS)
        sizes = bfcl_data.SPLIT_SIZES
        first = f"the first {sizes['train']} and {sizes['eval']}"
        if source == "pocket":
            return {"data": "generated miniature requests (mapl_core.pocket.bfcl)", "roles": self.roles}
        if source == "small":
            split = (
                f"all 400 rows in file order, random.Random({bfcl_data.SHUFFLE_SEED}).shuffle, "
                f"{bfcl_data.TRAIN_SHARE:.0%} train, of these {first}; not the authors' split"
            )
            data = f"{bfcl_data.PACKAGE.requirement}, {' and '.join(bfcl_data.CATEGORIES)}"
            return {"data": data, "split": split, "roles": self.roles}
        return {
            "data": f"{bfcl_data.HUB_DATASET} at {bfcl_data.hub_revision()}",
            "split": f"{first} rows of train and eval, of these {' and '.join(bfcl_data.CATEGORIES)}",
            "roles": self.roles,
        }

    def task_text(self, task: Task) -> str:
        forms = FORMS[task.source]
        if task.source == "pocket":
            schemas = " ; ".join(map(signature, task.fields["function"]))
        else:
            lines = (json.dumps(schema, sort_keys=True, ensure_ascii=False) for schema in task.fields["function"])
            schemas = "\n".join(lines)
        return forms.material.format(schemas=schemas, request=task.fields["user_prompt"])

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        forms = FORMS[task.source]
        if self.num_agents == 1:
            return _paragraphs(forms.alone, forms.output)
        return _paragraphs(forms.team.format(count=self.num_agents) + self._share(agent, forms), forms.output)

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        _refuse_history(history)
        forms = FORMS[task.source]
        # Where all agents are told the same, the coordinator is told nothing more: the sections are the shares.
        roles = ""
        if self.roles != "self_select":
            roles = "\n".join(f"<agent_{agent}>: {self._share(agent, forms)}" for agent in range(self.num_agents))
        told = forms.coordinator.format(count=self.num_agents, roles=roles).strip()
        return _paragraphs(self.task_text(task), told, forms.output, self._sections(forms))

    def single_prompt(self, task: Task) -> str:
        """The whole task for one agent that answers for the team in tagged sections."""
        forms = FORMS[task.source]
        return _paragraphs(self.task_text(task), forms.single, forms.output, self._sections(forms))

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        """Agent `agent`'s prompt when the agents before it, and only they, have written their final parts.

        Raises:
            ValueError: if `previous` does not hold exactly the parts of the agents 0 .. agent - 1.
        """
        if len(previous) != agent:
            raise ValueError(f"agent {agent} follows {agent} earlier parts, got {len(previous)}")
        form = FORMS[task.source].sequential
        return self.prompts(task)[agent] + "".join(form.format(text=_quoted(text)) for text in previous)

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        """Every agent's prompt in a round of discussion: its role, the others' drafts and its own.

        Raises:
            ValueError: if there is not one draft per agent.
        """
        if len(drafts) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} drafts, one per agent, got {len(drafts)}")
        forms, quoted = FORMS[task.source], [_quoted(draft) for draft in drafts]
        prompts = []
        for agent, prompt in enumerate(self.prompts(task)):
            others = [forms.other_draft.format(text=text) for other, text in enumerate(quoted) if other != agent]
            prompts.append("".join([prompt, *others, forms.own_draft.format(text=quoted[agent]), forms.again]))
        return prompts

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        return bfcl_reward(responses, task, num_agents=self.num_agents)

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        """Exact match, calls per agent, and what the oracle measures (domains.md, section 4.5)."""
        measured = measure(responses, task, num_agents=self.num_agents)
        values = {
            "correct": measured.is_exact,
            "cost": measured.cost,
            "p": measured.merged,
            "g": measured.gold,
            "duplicates": measured.duplicates,
            "inactive": measured.inactive,
            "excess": measured.excess,
            "unknown": measured.unknown,
            "F": measured.name_f1,
            "A": measured.similarity,
            "Bal": measured.balance,
        }
        return {name: float(value) for name, value in values.items()}

    def team_metrics(self, answers: Sequence[tuple[Task, Sequence[Sequence[str]]]]) -> dict[str, float]:
        """`role_gap`: whether the agents divide the calls, and `role_gap_by_chance`: the same, agents shuffled."""
        made = [
            [[[count > 0 for count in call] for call in callers(responses, task)] for responses in of_task]
            for task, of_task in answers
        ]
        shuffled = [role_gap(made, random.Random(draw)) for draw in range(SHUFFLES)]
        return {"role_gap": role_gap(made), "role_gap_by_chance": math.fsum(shuffled) / SHUFFLES}

    def _share(self, agent: int, forms: PromptForms) -> str:
        numbers = [str(number) for number in range(agent + 1, agent + 1 + 3 * self.num_agents, self.num_agents)]
        return forms.roles[self.roles].format(
            numbers=(" " if forms is POCKET else ", ").join(numbers),
            part=PARTS_BY_ORDER[self.num_agents][agent],
            agent=agent + 1,
            count=self.num_agents,
        )

    def _sections(self, forms: PromptForms) -> str:
        sections = [f"<agent_{agent}> calls </agent_{agent}>" for agent in range(self.num_agents)]
        return forms.sections.format(sections=(" " if forms is POCKET else "\n").join(sections))


def task_of_row(row: Mapping[str, Any], source: str, split: str) -> Task:
    """The task that a row describes."""
    names = ("category", "user_prompt", "function", "ground_truth")
    return Task(row["id"], source, split, {name: row[name] for name in names})


def signature(schema: Mapping[str, Any]) -> str:
    """A schema in one line of words, for a model with a small vocabulary: `name ( city , unit = celsius )`."""
    parameters = schema["parameters"]
    written = [
        name if name in parameters["required"] else f"{name} = {about.get('default', 'none')}"
        for name, about in parameters["properties"].items()
    ]
    return f"{schema['name']} ( {' , '.join(written)} )"


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _quoted(text: str | None) -> str:
    """An agent's text as another prompt shows it: without its thinking and outer white space."""
    return clean_response(text).strip()


def _refuse_history(history: Sequence[Turn]) -> None:
    if history:
        raise ValueError(f"BFCL has one turn and no feedback, got {len(history)} earlier turns")


def _check_choice(what: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")
