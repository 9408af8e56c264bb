"""The oracle's answer: a total and the named parts it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.rewards.text import check_responses


@dataclass(frozen=True)
class Reward:
    """Oracle reward R of one joint response (paper, section 3 and appendix C.3).

    Attributes:
        total: the reward after clipping to the domain's range.
        parts: its named components; penalties are negative. They sum to the total before clipping.
    """

    total: float
    parts: Mapping[str, float]


def score_batch(
    oracle: Callable[[Sequence[str | None], Any], Reward],
    joint_responses: Sequence[Sequence[str | None]],
    tasks: Sequence[Any],
    *,
    num_agents: int = 2,
) -> list[Reward]:
    """Oracle rewards of many joint responses; every one is checked before the first is scored.

    Args:
        oracle: a domain's reward, `(responses, task) -> Reward`.
        joint_responses: one list of `num_agents` texts per task.
        tasks: the tasks they answer, in the same order.

    Raises:
        ValueError: if the two lists differ in length or a joint response has the wrong number of texts.
        TypeError: if a joint response is not a list of texts.
    """
    if len(joint_responses) != len(tasks):
        raise ValueError(
            f"{len(joint_responses)} joint responses for {len(tasks)} tasks; give exactly one joint response per task"
        )
    for responses in joint_responses:
        check_responses(responses, num_agents)
    return [oracle(responses, task) for responses, task in zip(joint_responses, tasks, strict=True)]
