"""Comparators: whose trajectories the agents' are compared with (paper, section 4.1 and appendix B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mapl_core.buffers import Trajectory
from mapl_core.domains.base import Task
from mapl_core.policies import JointPolicy, Snapshot, Structure
from mapl_core.seeding import Stream

Kind = Literal["raw", "last", "current", "soft", "model"]


class Comparator:
    """The comparator policy of a run.

    Kinds: "raw" (the base, adapters off), "last" (the agents' adapters as they were at the start of the previous
    iteration, so truly older than the current ones), "current" (the agents as they are, from another random stream),
    "soft" (the current agents at a higher temperature), "model" (another model, untrained).

    A comparator of the agents' own structure samples as they do. A centralised comparator of decentralised agents reads
    the joint history: "model" as one coordinator, the others by each agent reading the coordinator's prompt and writing
    its own section.

    Args:
        kind: one of the kinds.
        policy: the agents being trained.
        structure: information structure of the comparator.
        model: the other team, for the kind "model".
        soft_temperature: sampling temperature of "soft".
    """

    def __init__(
        self,
        kind: Kind,
        policy: JointPolicy,
        *,
        structure: Structure,
        model: JointPolicy | None = None,
        soft_temperature: float = 1.5,
    ):
        if kind == "model" and model is None:
            raise ValueError("the comparator 'model' needs the team that is to be compared with; pass model=")
        self.kind, self.policy, self.structure, self.model = kind, policy, structure, model
        self.soft_temperature = soft_temperature
        self.previous: Snapshot = policy.snapshot()  # adapters at the start of the previous iteration
        self._latest: Snapshot = self.previous

    def begin_iteration(self) -> None:
        """Note the agents' weights at the start of an iteration; call it once in each, before sampling."""
        self.previous, self._latest = self._latest, self.policy.snapshot()

    @property
    def foreign(self) -> bool:
        """Whether its texts must be adopted by the agents before they can be scored under their own prompts."""
        return self.kind == "model" or self.structure != self.policy.structure

    def sample(self, tasks: Sequence[Task], samples: int, stream: Stream) -> list[list[Trajectory]]:
        """For each task `samples` trajectories, as actions of the agents' policy."""
        played = self._play(tasks, samples, stream)
        if not self.foreign:
            return played
        return [
            [self.policy.adopt(trajectory, task) for trajectory in group]
            for task, group in zip(tasks, played, strict=True)
        ]

    def _play(self, tasks: Sequence[Task], samples: int, stream: Stream) -> list[list[Trajectory]]:
        if self.kind == "model":
            return self.model.sample(tasks, samples, stream, reference=True)
        options = {"joint_view": self.structure == "cen" and self.policy.structure == "dec"}
        if self.kind == "raw":
            return self.policy.sample(tasks, samples, stream, reference=True, **options)
        if self.kind == "soft":
            return self.policy.sample(tasks, samples, stream, temperature=self.soft_temperature, **options)
        if self.kind == "last":
            with self.policy.weights(self.previous):
                return self.policy.sample(tasks, samples, stream, **options)
        return self.policy.sample(tasks, samples, stream, **options)

    def state(self) -> dict[str, Snapshot]:
        """What a resumed run needs to go on as if it had not stopped."""
        return {"previous": self.previous, "latest": self._latest}

    def load_state(self, state: dict[str, Snapshot]) -> None:
        self.previous, self._latest = state["previous"], state["latest"]
