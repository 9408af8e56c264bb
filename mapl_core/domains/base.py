"""What a task domain must offer: tasks, prompts, the splitting of a coordinator's text, reward and metrics.

A domain is a Pb-Dec-POMDP when its agents read `prompts` (paper, section 3.1), and a Pb-MPOMDP when one coordinator
reads `coordinator_prompt` and its tagged text is cut back into the agents' parts (section 3.2). Both are scored by the
same `reward`, on the agents' texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mapl_core.rewards import Reward
from mapl_core.rewards.text import clean_response

# At most three digits: no team is larger, and Python refuses to read numbers of thousands of digits.
SECTION_TAG = re.compile(r"<\s*(?:(/)\s*)?agent_([0-9]{1,3})\s*>", re.IGNORECASE)
QUOTE = '"'
FENCED_REPLY = re.compile(r"\A\s*```[^\n]*\n(.*)```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """One task of a domain: what the environment starts from (the initial state s_0 of the paper, section 3.1).

    Attributes:
        id: unique in its domain; tasks are found by it, never by their text.
        source: "pocket" (generated), "small" (real rows at hand) or "paper" (the paper's data).
        split: "train" or "eval"; the two never share a task.
        fields: what the domain needs to write prompts and to score (a post, tests, a catalogue ...).
    """

    id: str
    source: str
    split: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """An earlier turn of the joint history: what every agent answered and what the oracle made of it."""

    responses: tuple[str, ...]
    reward: Reward


@dataclass(frozen=True)
class Skeleton:
    """The fixed text of an answer, with gaps for values that are JSON strings.

    Attributes:
        texts: what stands before, between and behind the values. A value's opening quote belongs to the text before it;
            the closing one is what ends the value, and stands in no text.
        value_tokens: most tokens of a value.
    """

    texts: tuple[str, ...]
    value_tokens: int = 32

    def values(self, text: str) -> list[str] | None:
        """The values of an answer with this skeleton; None if the text has another form."""
        first, *others = self.texts
        if not text.startswith(first):
            return None
        values, rest = [], text.removeprefix(first)
        for following in others:
            value, _, rest = rest.partition(QUOTE)
            if not rest.startswith(following):
                return None
            values.append(value)
            rest = rest.removeprefix(following)
        return None if rest else values


class Domain:
    """A cooperative task domain. Subclasses fill in the methods that raise NotImplementedError.

    Attributes:
        name: the domain's name in tables and file names.
        num_agents: n, the number of agents.
        horizon: H, the number of turns.
        max_reward, min_reward: range of the oracle reward.
        headline: the metric of `metrics` that tables show first.
    """

    name: str
    num_agents: int = 2
    horizon: int = 1
    max_reward: float
    min_reward: float = 0.0
    headline: str

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        """Tasks of one split of one source, in a fixed order; the first `limit` of them if given."""
        raise NotImplementedError

    def provenance(self, source: str) -> dict[str, str]:
        """Where tasks and other data come from, in words, for the manifest."""
        return {}

    def task_text(self, task: Task) -> str:
        """The material that all agents of the team are given, stated once."""
        raise NotImplementedError

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        """What only agent `agent` is told: its role and, after the first turn, its earlier answer and the feedback."""
        raise NotImplementedError

    def prompts(self, task: Task, history: Sequence[Turn] = ()) -> list[str]:
        """The local observation of every agent at this turn, in agent order."""
        shared = self.task_text(task)
        return [f"{shared}\n\n{self.role_text(agent, task, history)}" for agent in range(self.num_agents)]

    def system_message(self, task: Task) -> str:
        """What a chat begins with before any prompt of this task; empty where nothing is said."""
        return ""

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        """The joint observation: shared material once, every role, and the rule for the tagged answer."""
        raise NotImplementedError

    def single_prompt(self, task: Task) -> str:
        """The whole task for one agent that answers for the team, in a coordinator's form but without the roles."""
        raise NotImplementedError

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        """Agent `agent`'s observation when the agents before it, and only they, have written their final parts."""
        raise NotImplementedError

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        """The observation of every agent in a round of discussion: its role, the others' drafts and its own."""
        raise NotImplementedError

    def split_joint(self, text: str | None) -> list[str]:
        """Cut a coordinator's text `<agent_0> ... </agent_0> <agent_1> ...` into the agents' parts.

        One code fence around the whole reply is removed. The first section of each agent wins; a section without a
        closing tag ends at the next opening tag of another agent or at the end; text outside sections is dropped.
        An agent without a section answers with the empty text.
        """
        text = clean_response(text)  # first of all: a draft inside a leading thought is no section
        fenced = FENCED_REPLY.match(text)
        text = fenced.group(1) if fenced else text
        sections: dict[int, str] = {}
        tags = list(SECTION_TAG.finditer(text))
        position = 0
        while position < len(tags):
            opening = tags[position]
            position += 1
            if opening.group(1):
                continue
            agent, end = int(opening.group(2)), len(text)
            while position < len(tags):
                tag = tags[position]
                closes = bool(tag.group(1)) and int(tag.group(2)) == agent
                opens_another = not tag.group(1) and int(tag.group(2)) != agent
                if closes or opens_another:
                    end = tag.start()
                    position += closes
                    break
                position += 1
            sections.setdefault(agent, text[opening.end() : end].strip())
        return [sections.get(agent, "") for agent in range(self.num_agents)]

    def join(self, responses: Sequence[str]) -> str:
        """Write the agents' texts as one tagged text, the form that `split_joint` reads."""
        return "\n".join(f"<agent_{agent}>\n{text}\n</agent_{agent}>" for agent, text in enumerate(responses))

    def skeleton(self, agent: int, task: Task) -> Skeleton | None:
        """The text that decoding forces on an agent's answer; None where every token is the model's choice."""
        return None

    def coordinator_skeleton(self, task: Task) -> Skeleton | None:
        """The same for a coordinator's tagged text: the agents' skeletons, joined."""
        parts = [self.skeleton(agent, task) for agent in range(self.num_agents)]
        if None in parts:
            return None
        gap = "\0"
        joined = self.join([gap.join(part.texts) for part in parts])
        return Skeleton(tuple(joined.split(gap)), max(part.value_tokens for part in parts))

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        """The oracle reward of one joint response (paper, appendix C.3)."""
        raise NotImplementedError

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        """What the tables report about one joint response."""
        raise NotImplementedError

    def team_metrics(self, answers: Sequence[tuple[Task, Sequence[Sequence[str]]]]) -> dict[str, float]:
        """What only many joint responses together show, such as who does what.

        Args:
            answers: tasks, each with its joint responses.
        """
        return {}
