"""Comparators: whose trajectories the agents' are compared with (paper, section 4.1 and appendix B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from mapl_core.buffers import Response, Trajectory
from mapl_core.domains.base import Domain, Task
from mapl_core.endpoint import DRAWS, Endpoint, Question
from mapl_core.policies import SHARED_WRITERS, JointPolicy, Snapshot, Structure, episode_keys, play, prompts_of
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream

Kind = Literal["raw", "last", "current", "soft", "model", "api"]
OTHER_TEAMS = ("model", "api")  # kinds that are a team of their own


class OtherTeam(Protocol):
    """A team that is not trained: a `JointPolicy` without adapters, or an `EndpointTeam`."""

    def sample(self, tasks: Sequence[Task], samples: int, stream: Stream) -> list[list[Trajectory]]:
        """For each task `samples` trajectories."""


class Comparator:
    """The comparator policy of a run.

    Kinds: "raw" (the base, adapters off), "last" (the agents' adapters as they were at the start of the previous
    iteration, so truly older than the current ones), "current" (the agents as they are, from another random stream),
    "soft" (the current agents at a higher temperature), "model" (another model, untrained), "api" (a model behind an
    OpenAI-compatible endpoint).

    A comparator of the agents' own structure samples as they do. A centralised comparator of decentralised agents reads
    the joint history: "model" and "api" as one coordinator, the others by each agent reading the coordinator's prompt
    and writing its own section.

    Args:
        kind: one of the kinds.
        policy: the agents being trained.
        structure: information structure of the comparator.
        model: the other team, for the kinds "model" and "api".
        soft_temperature: sampling temperature of "soft".
    """

    def __init__(
        self,
        kind: Kind,
        policy: JointPolicy,
        *,
        structure: Structure,
        model: OtherTeam | None = None,
        soft_temperature: float = 1.5,
    ):
        if kind in OTHER_TEAMS and model is None:
            raise ValueError(f"the comparator {kind!r} needs the team that is to be compared with; pass model=")
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
        return self.kind in OTHER_TEAMS or self.structure != self.policy.structure

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
        if self.kind in OTHER_TEAMS:
            return self.model.sample(tasks, samples, stream)
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


class EndpointTeam:
    """A team whose every policy is the model behind an endpoint: n agents, or one that writes for all.

    It is told what any team of its structure is told, as chat messages; the chat template is the endpoint's business,
    and so is the tokenizer: what comes back is text, and its actions hold no token ids until the agents adopt them.

    Args:
        domain: gives the prompts, splits a coordinator's text and holds the oracle reward.
        structure: "dec", "cen" or "single", as for a `JointPolicy`.
        endpoint: who answers.
        settings: how each policy samples. The interface knows no top-k: where the endpoint takes one, it is a setting
            of the endpoint.
    """

    def __init__(self, domain: Domain, structure: Structure, endpoint: Endpoint, settings: Sequence[SamplingSettings]):
        self.domain, self.structure, self.endpoint, self.settings = domain, structure, endpoint, list(settings)

    def sample(self, tasks: Sequence[Task], samples: int, stream: Stream) -> list[list[Trajectory]]:
        """Play every task `samples` times; each answer is a request of its own, with a draw of `stream`.

        Returns:
            For each task the list of its trajectories. An action is `truncated` where the endpoint says that the token
            limit, or a filter, ended it.
        """

        def act(turn, episodes, histories):
            keys = episode_keys(episodes, turn)
            columns = [stream.for_agent(index).uniforms(keys, 1) for index in range(len(self.settings))]
            questions = []
            for row, ((task, _), history) in enumerate(zip(episodes, histories, strict=True)):
                prompts = prompts_of(self.domain, self.structure, task, history)
                for prompt, settings, uniforms in zip(prompts, self.settings, columns, strict=True):
                    questions.append(
                        Question(
                            prompt,
                            self.domain.system_message(task),
                            settings.max_new_tokens,
                            settings.temperature,
                            settings.top_p,
                            int(uniforms[row, 0] * DRAWS),
                        )
                    )
            written = [Response((), (), a.text, a.truncated) for a in self.endpoint.answer(questions)]
            policies = len(self.settings)
            by_episode = [tuple(written[at : at + policies]) for at in range(0, len(written), policies)]
            return [(acted, self._agent_texts([action.text for action in acted])) for acted in by_episode]

        return play(self.domain, tasks, samples, act)

    def _agent_texts(self, written: list[str]) -> list[str]:
        return self.domain.split_joint(written[0]) if self.structure in SHARED_WRITERS else written
