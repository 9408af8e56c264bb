"""A toy domain in the words of the tiny tokenizers (tests/conftest.py): any number of agents, any number of turns.

Each agent should say the task's word, and the team should not say too many different words. The second turn's prompts
hold an agent's earlier answer and the oracle's verdict. Every agent has its own role; with `same_prompts` all agents
read the same, so that only their random numbers can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.rewards import Reward

NUMBERS = ("one", "two", "three")
TARGETS = ("cat", "dog", "bird", "house", "river", "red", "green", "blue")
SEPARATOR = ","  # between the agents' sections of a coordinator's text; the tiny tokenizers have no tags


class ToyDomain(Domain):
    name = "toy"
    headline = "score"

    def __init__(self, num_agents: int = 2, horizon: int = 1, same_prompts: bool = False):
        self.num_agents, self.horizon, self.same_prompts = num_agents, horizon, same_prompts
        self.max_reward, self.min_reward = float(num_agents), -float(num_agents)

    def load_tasks(self, split: str, source: str, limit: int | None = None) -> list[Task]:
        colours = ("red", "green") if split == "train" else ("blue", "a")
        tasks = [
            Task(f"{split}-{colour}-{word}", source, split, {"colour": colour, "word": word})
            for colour in colours
            for word in TARGETS[:5]
        ]
        return tasks[:limit]

    def task_text(self, task: Task) -> str:
        return f"post the {task.fields['colour']} {task.fields['word']} sleeps ."

    def role_text(self, agent: int, task: Task, history: Sequence[Turn] = ()) -> str:
        text = "agent write :" if self.same_prompts else f"agent {NUMBERS[agent]} write :"
        for turn in history:
            text += f" {turn.responses[agent]} ! {self._verdict(turn.reward)} ."
        return text

    def coordinator_prompt(self, task: Task, history: Sequence[Turn] = ()) -> str:
        roles = " ".join(self.role_text(agent, task, history) for agent in range(self.num_agents))
        return f"{self.task_text(task)} team {roles}"

    def single_prompt(self, task: Task) -> str:
        return f"{self.task_text(task)} write"

    def sequential_prompt(self, agent: int, task: Task, previous: Sequence[str]) -> str:
        if len(previous) != agent:
            raise ValueError(f"agent {agent} follows {agent} earlier parts, got {len(previous)}")
        return " ".join([*self.prompts(task)[agent].split(" "), *previous])

    def discussion_prompts(self, task: Task, drafts: Sequence[str]) -> list[str]:
        if len(drafts) != self.num_agents:
            raise ValueError(f"expected {self.num_agents} drafts, one per agent, got {len(drafts)}")
        others = [[d for other, d in enumerate(drafts) if other != agent] for agent in range(self.num_agents)]
        return [
            f"{prompt} {' '.join(theirs)} ! {own}"
            for prompt, theirs, own in zip(self.prompts(task), others, drafts, strict=True)
        ]

    def split_joint(self, text: str) -> list[str]:
        sections = [section.strip() for section in text.split(SEPARATOR)]
        return [*sections, *[""] * self.num_agents][: self.num_agents]

    def join(self, responses: Sequence[str]) -> str:
        return f" {SEPARATOR} ".join(responses)

    def reward(self, responses: Sequence[str | None], task: Task) -> Reward:
        said = [set((text or "").split()) for text in responses]
        hits = float(sum(task.fields["word"] in words for words in said))
        chatter = -0.05 * len(set().union(*said))
        return Reward(max(hits + chatter, self.min_reward), {"hits": hits, "chatter": chatter})

    def metrics(self, responses: Sequence[str | None], task: Task) -> dict[str, float]:
        return {"score": self.reward(responses, task).total / self.max_reward}

    def _verdict(self, reward: Reward) -> str:
        hits = int(reward.parts["hits"])
        return NUMBERS[hits - 1] if hits else "short"
