"""What the untrained pocket base can do: oracle reward, its spread, well-formed tags, copied words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from mapl_core.adapters import AdaptedModel
from mapl_core.domains.base import Domain, Task
from mapl_core.models import LoadedModel
from mapl_core.pocket.common import language
from mapl_core.policies import JointPolicy
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream


@dataclass(frozen=True)
class Measured:
    """Joint responses of an untrained team, scored by the oracle. Rewards are shares of the domain's maximum.

    Attributes:
        tasks, samples: how many tasks, and joint responses of each.
        mean: mean reward.
        spread: standard deviation of the reward among the samples of one task, mean over tasks.
        best_of_8: mean over tasks of the best reward among eight samples.
        good: share of samples with more than 0.8 of the maximum.
        copied: share of the slot words in the answers that are words of their own post.
        ended: share of responses that end with the end token.
        well_formed: share of coordinator responses that are the agents' tagged sections and nothing else; None for Dec.
    """

    tasks: int
    samples: int
    mean: float
    spread: float
    best_of_8: float
    good: float
    copied: float
    ended: float
    well_formed: float | None

    def rounded(self) -> dict[str, float | int | None]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def measure_team(
    domain: Domain,
    base: LoadedModel,
    structure: Literal["dec", "cen"],
    tasks: Sequence[Task],
    *,
    samples: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    prompt_form: Literal["chat", "text"] = "chat",
    seed: int = 0,
) -> Measured:
    """Sample the untrained team and score it.

    Args:
        domain: gives prompts and the oracle.
        base: the pocket model of every agent ("dec") or of the coordinator ("cen").
        structure: who acts on what.
        tasks: the tasks to answer.
        samples: joint responses for each task, at least 8.
        temperature, top_p: of sampling.
        prompt_form: whether prompts are written in the chat template.
        seed: of sampling.
    """
    if samples < 8:
        raise ValueError(f"samples is {samples}; best_of_8 needs at least 8")
    limits = language(domain.name).NEW_TOKENS
    limits = limits if structure == "dec" else (sum(limits),)
    settings = [SamplingSettings(temperature=temperature, top_p=top_p, max_new_tokens=limit) for limit in limits]
    adapted = AdaptedModel(base)
    policy = JointPolicy(domain, structure, [adapted] * len(limits), settings, prompt_form=prompt_form)
    played = policy.sample(tasks, samples, Stream(seed, "pocket measurement"))
    rewards = [[trajectory.total_return / domain.max_reward for trajectory in group] for group in played]
    every = [value for group in rewards for value in group]
    actions = [action for group in played for trajectory in group for action in trajectory.actions[0]]
    pairs = [(task, trajectory) for task, group in zip(tasks, played, strict=True) for trajectory in group]
    counts = [language(domain.name).copied_words(text, task) for task, item in pairs for text in item.responses[0]]
    return Measured(
        tasks=len(tasks),
        samples=samples,
        mean=statistics.fmean(every),
        spread=statistics.fmean(statistics.stdev(group) for group in rewards),
        best_of_8=statistics.fmean(max(group[:8]) for group in rewards),
        good=statistics.fmean(value > 0.8 for value in every),
        copied=sum(copied for copied, _ in counts) / max(1, sum(total for _, total in counts)),
        ended=statistics.fmean(not action.truncated for action in actions),
        well_formed=None if structure == "dec" else statistics.fmean(well_formed(domain, a.text) for a in actions),
    )


def well_formed(domain: Domain, text: str) -> bool:
    """Whether a coordinator's text is one tagged section for each agent, in order, none empty, and nothing else."""
    parts = domain.split_joint(text)
    return all(parts) and domain.join(parts).split() == text.split()
