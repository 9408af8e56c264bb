"""Measuring a team: the evaluation tasks, played and scored with the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mapl_core.buffers import Trajectory
from mapl_core.domains.base import Task
from mapl_core.policies import JointPolicy
from mapl_core.seeding import Stream
from mapl_core.updates import Averages


def evaluate(
    policy: JointPolicy, tasks: Sequence[Task], samples: int, stream: Stream, *, temperature: float | None = None
) -> tuple[dict[str, dict[str, float]], list[Trajectory]]:
    """Play the evaluation tasks and score them with the oracle; there is no way to pass it a learned reward.

    Args:
        temperature: replaces the policies' own; 0 is greedy decoding.

    Returns:
        For each task id the mean over its samples of every metric: those of `Domain.metrics` on the last turn,
        `reward`, each reward part, for each policy `length` and `truncated`, and where one policy writes for all, for
        each agent what the function `unparsed` returns; and the trajectories.
    """
    played = policy.sample(tasks, samples, stream, temperature=temperature)
    by_task = {}
    for task, group in zip(tasks, played, strict=True):
        averages = Averages()
        for trajectory in group:
            # A measurement that does not exist (a ratio of nothing) is left out of its mean.
            measured = {
                k: v for k, v in policy.domain.metrics(list(trajectory.responses[-1]), task).items() if v is not None
            }
            averages.add({k: v for k, v in measured.items() if math.isfinite(v)})
            averages.add(
                {"reward": trajectory.total_return} | {f"part/{k}": v for k, v in trajectory.parts[-1].items()}
            )
            for member, action in zip(policy.members, trajectory.actions[-1], strict=True):
                averages.add(
                    {f"length/{member.adapter}": len(action.token_ids), f"truncated/{member.adapter}": action.truncated}
                )
            if policy.one_writer:
                averages.add(unparsed(trajectory))
        by_task[task.id] = averages.means()
    return by_task, [trajectory for group in played for trajectory in group]


def unparsed(trajectory: Trajectory) -> dict[str, float]:
    """Whether each agent's section of the last text of who writes for all is missing or empty: failures by role."""
    return {f"unparsed/agent{index}": not text.strip() for index, text in enumerate(trajectory.responses[-1])}
