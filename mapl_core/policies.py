"""The joint policy of a team: who acts on what, as adapters on shared bases (paper, sections 3.1 and 3.2).

Decentralised (Pb-Dec-POMDP): agent i samples from pi_i(. | h_i), its own adapter on its own prompt. Centralised
(Pb-MPOMDP): one coordinator samples the whole tagged joint answer from pi_cen(. | h). A single agent, the baseline of
section 5.2, writes the same form but is told the task alone, without roles. The reference policy is the base with its
adapters off. Everything a loss needs comes from here as tensors of shape (B, policies, H): B trajectories, n agents or
one policy that writes for all, H turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mapl_core.adapters import AdaptedModel, AdapterState
from mapl_core.buffers import Response, Trajectory
from mapl_core.domains.base import Domain, Skeleton, Task, Turn
from mapl_core.rewards import Reward
from mapl_core.sampling import Sampler, SamplingSettings, TransformersSampler
from mapl_core.scoring import Item, accumulate_logprob_gradients, graph_logprobs, response_logprobs
from mapl_core.seeding import Stream
from mapl_core.structured import encode_answer
from mapl_core.tokens import decode_response, encode_prompt, encode_response

Structure = Literal["dec", "cen", "single"]
SHARED_WRITERS = {"cen": "coordinator", "single": "single"}  # structures in which one policy writes for all agents
Snapshot = list[AdapterState]
Episode = tuple[Task, int]  # a task and which of its samples
# (turn, episodes, their histories) -> what the policies wrote in each episode, and the agents' texts in it
Act = Callable[[int, Sequence[Episode], Sequence[Sequence[Turn]]], list[tuple[tuple[Response, ...], list[str]]]]


def prompts_of(domain: Domain, structure: Structure, task: Task, history: Sequence[Turn]) -> list[str]:
    """What every policy of a team is told: each agent its own prompt, or the one that writes for all the joint one."""
    if structure == "dec":
        return domain.prompts(task, history)
    return [domain.single_prompt(task) if structure == "single" else domain.coordinator_prompt(task, history)]


def play(domain: Domain, tasks: Sequence[Task], samples: int, act: Act) -> list[list[Trajectory]]:
    """Play every task `samples` times: at each turn everybody acts, then the oracle scores the joint answer.

    Returns:
        For each task the list of its trajectories.
    """
    episodes = [(task, sample) for task in tasks for sample in range(samples)]
    actions: list[list[tuple[Response, ...]]] = [[] for _ in episodes]
    histories: list[list[Turn]] = [[] for _ in episodes]
    for turn in range(domain.horizon):
        written = act(turn, episodes, histories)
        for (task, _), earlier, history, (acted, texts) in zip(episodes, actions, histories, written, strict=True):
            earlier.append(acted)
            history.append(Turn(tuple(texts), domain.reward(texts, task)))
    played = [
        Trajectory(
            task_id=task.id,
            actions=tuple(acted),
            responses=tuple(turn.responses for turn in history),
            rewards=tuple(turn.reward.total for turn in history),
            parts=tuple(turn.reward.parts for turn in history),
        )
        for (task, _), acted, history in zip(episodes, actions, histories, strict=True)
    ]
    return [played[start : start + samples] for start in range(0, len(played), samples)]


def episode_keys(episodes: Sequence[Episode], turn: int) -> list[str]:
    """Keys of the episodes' random numbers at a turn."""
    return [f"{task.id}/turn{turn}/sample{sample}" for task, sample in episodes]


@dataclass(frozen=True)
class Member:
    """One policy of the team: a base, the name of its adapter on it, and how it samples."""

    base: AdaptedModel
    adapter: str
    settings: SamplingSettings


class JointPolicy:
    """n decentralised agents, or one coordinator or single agent, with trainable adapters.

    Args:
        domain: gives the prompts, splits a coordinator's text and holds the oracle reward.
        structure: "dec" for n agents, "cen" for one coordinator, "single" for one agent that reads the task alone.
        bases: the base of each agent, or of the one that writes for all. The same object may serve several agents;
            different objects make a heterogeneous team. No weights are shared between adapters.
        settings: how each of them samples; the token limit of one that writes for all is the sum of the agents' limits.
        prompt_form: "chat" wraps a prompt in the tokenizer's chat template, "text" does not.
        stream: source of the adapters' initial weights. Without one the policy has no adapters and can only be sampled
            and scored as its own reference, as a raw comparator is.
        micro_batch_tokens: bound on the padded tokens of one scoring pass.
        sampler: the rollout backend; by default the policies' own models are sampled in this process.
    """

    def __init__(
        self,
        domain: Domain,
        structure: Structure,
        bases: Sequence[AdaptedModel],
        settings: Sequence[SamplingSettings],
        *,
        prompt_form: str,
        stream: Stream | None = None,
        micro_batch_tokens: int = 8192,
        sampler: Sampler | None = None,
    ):
        expected = domain.num_agents if structure == "dec" else 1
        if len(bases) != expected or len(settings) != expected:
            raise ValueError(
                f"a {structure!r} team of domain {domain.name!r} has {expected} policies, "
                f"got {len(bases)} bases and {len(settings)} sampling settings"
            )
        self.domain, self.structure, self.prompt_form = domain, structure, prompt_form
        self.micro_batch_tokens = micro_batch_tokens
        self.sampler = sampler or TransformersSampler()
        if structure == "single" and domain.horizon > 1:
            raise ValueError(f"a single agent answers in one turn, domain {domain.name!r} has {domain.horizon}")
        names = [SHARED_WRITERS[structure]] if self.one_writer else [f"agent{index}" for index in range(expected)]
        self.members = [Member(*parts) for parts in zip(bases, names, settings, strict=True)]
        self.trained = stream is not None
        if stream is not None:
            for index, member in enumerate(self.members):
                member.base.add_adapter(member.adapter, replace(stream, purpose=f"{stream.purpose}/lora", agent=index))

    @property
    def one_writer(self) -> bool:
        """Whether one policy writes the whole tagged answer, which is cut into the agents' parts."""
        return self.structure in SHARED_WRITERS

    # ------------------------------------------------------------------ acting

    def sample(
        self,
        tasks: Sequence[Task],
        samples: int,
        stream: Stream,
        *,
        reference: bool = False,
        temperature: float | None = None,
        joint_view: bool = False,
    ) -> list[list[Trajectory]]:
        """Play every task `samples` times.

        Args:
            tasks: the tasks; their ids key the random numbers.
            samples: trajectories for each task.
            stream: random stream; agent i draws from `stream.for_agent(i)`, so equal agents still differ.
            reference: sample with the adapters off.
            temperature: replaces the members' own sampling temperature (the "soft" comparator).
            joint_view: decentralised weights under a centralised information structure: every agent reads the
                coordinator's prompt, pi_i(. | h), and its own section of the answer counts (paper, section 3.2).

        Returns:
            For each task the list of its trajectories.
        """
        if joint_view and self.structure != "dec":
            raise ValueError("joint_view is for decentralised agents; a coordinator reads the joint history already")

        def act(turn, episodes, histories):
            observed = self._observations(episodes, histories, samples, turn, joint_view)
            keys = episode_keys(episodes, turn)
            columns = []
            for index, member in enumerate(self.members):
                settings = member.settings
                if joint_view:
                    settings = replace(settings, max_new_tokens=sum(m.settings.max_new_tokens for m in self.members))
                if temperature is not None:
                    settings = replace(settings, temperature=temperature)
                prompts = [prompt_ids[index] for prompt_ids in observed]
                skeletons = [self._skeleton(index, task, joint_view) for task, _ in episodes]
                columns.append(
                    self._respond(
                        member,
                        prompts,
                        skeletons,
                        keys,
                        settings,
                        stream.for_agent(index),
                        None if reference or not self.trained else member.adapter,
                    )
                )
            return [
                (acted, self._agent_texts([action.text for action in acted], joint_view))
                for acted in zip(*columns, strict=True)
            ]

        return play(self.domain, tasks, samples, act)

    def _observations(
        self,
        episodes: Sequence[Episode],
        histories: Sequence[Sequence[Turn]],
        samples: int,
        turn: int,
        joint_view: bool,
    ) -> list[list[tuple[int, ...]]]:
        """Prompt ids of every policy in every episode. At the first turn all samples of a task observe the same."""
        observed: list[list[tuple[int, ...]]] = []
        for index, (task, _) in enumerate(episodes):
            if turn == 0 and index % samples:
                observed.append(observed[-1])
                continue
            if joint_view:
                texts = [self.domain.coordinator_prompt(task, histories[index])] * len(self.members)
            else:
                texts = prompts_of(self.domain, self.structure, task, histories[index])
            observed.append([self.encode(member, text, task) for member, text in zip(self.members, texts, strict=True)])
        return observed

    def _respond(
        self,
        member: Member,
        prompts: Sequence[tuple[int, ...]],
        skeletons: Sequence[Skeleton | None],
        keys: Sequence[str],
        settings: SamplingSettings,
        stream: Stream,
        adapter: str | None,
    ) -> list[Response]:
        """One response of a member for every prompt of the list; runs of equal prompts are prefilled once.

        Args:
            prompts: token ids.
            keys: of the random numbers, one for each prompt.
            adapter: None for the base alone.
        """
        by_count: dict[int, list[tuple[int, int]]] = {}  # samples of a prompt -> (start, count) runs
        start = 0
        for end in range(1, len(prompts) + 1):
            if end == len(prompts) or prompts[end] != prompts[start]:
                by_count.setdefault(end - start, []).append((start, end - start))
                start = end
        responses: list[Response | None] = [None] * len(prompts)
        for count, runs in by_count.items():
            rows = [row for first, _ in runs for row in range(first, first + count)]
            drawn = self.sampler.sample(
                member.base,
                adapter,
                [prompts[first] for first, _ in runs],
                [keys[row] for row in rows],
                stream,
                samples=count,
                settings=settings,
                skeletons=[skeletons[first] for first, _ in runs],
            )
            for row, sample in zip(rows, (sample for group in drawn for sample in group), strict=True):
                text = decode_response(member.base.tokenizer, sample.token_ids)
                responses[row] = Response(prompts[row], sample.token_ids, text, sample.truncated, sample.forced)
        return responses

    def _skeleton(self, index: int, task: Task, joint_view: bool = False) -> Skeleton | None:
        if self.one_writer or joint_view:
            return self.domain.coordinator_skeleton(task)
        return self.domain.skeleton(index, task)

    def _agent_texts(self, written: Sequence[str], joint_view: bool) -> list[str]:
        if self.one_writer:
            return self.domain.split_joint(written[0])
        if joint_view:
            return [self.domain.split_joint(text)[agent] for agent, text in enumerate(written)]
        return list(written)

    def adopt(self, trajectory: Trajectory, task: Task) -> Trajectory:
        """The same joint answer as actions of this policy, under its own prompts.

        A comparator's texts come from elsewhere (a coordinator, another tokenizer): each is encoded once with the
        reader's tokenizer and closed with its end of sequence; where the reader's answers have a skeleton and the text
        follows it, the fixed tokens are marked as forced. In Dec-Cen this is how the comparator's text for agent i is
        scored under agent i's own local prompt.
        """
        actions, history = [], []
        for texts, reward, parts in zip(trajectory.responses, trajectory.rewards, trajectory.parts, strict=True):
            prompts = prompts_of(self.domain, self.structure, task, history)
            written = [self.domain.join(texts)] if self.one_writer else list(texts)
            skeletons = [self._skeleton(index, task) for index in range(len(self.members))]
            actions.append(
                tuple(
                    _read(member, self.encode(member, prompt, task), text, skeleton)
                    for member, prompt, text, skeleton in zip(self.members, prompts, written, skeletons, strict=True)
                )
            )
            history.append(Turn(tuple(texts), Reward(reward, dict(parts))))
        return replace(trajectory, actions=tuple(actions))

    def encode(self, member: Member, prompt: str, task: Task) -> tuple[int, ...]:
        """Token ids of a prompt of this task, as the member's model reads it."""
        return tuple(encode_prompt(member.base.tokenizer, prompt, self.prompt_form, self.domain.system_message(task)))

    # ------------------------------------------------------------------ scoring

    def logprobs(self, trajectories: Sequence[Trajectory], *, temperature: float = 1.0) -> Tensor:
        """(B, policies, H) summed log-probabilities of the actions, without a graph."""
        return self._score(trajectories, temperature, reference=False)

    def reference_logprobs(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """(B, policies, H) log-probabilities under the reference policy: the bases with their adapters off."""
        return self._score(trajectories, 1.0, reference=True)

    def _score(self, trajectories: Sequence[Trajectory], temperature: float, *, reference: bool) -> Tensor:
        columns = [
            response_logprobs(
                member.base,
                None if reference or not self.trained else member.adapter,
                self._items(trajectories, index),
                max_tokens=self.micro_batch_tokens,
                temperature=temperature,
            ).view(len(trajectories), self.domain.horizon)
            for index, member in enumerate(self.members)
        ]
        return torch.stack(columns, dim=1)

    def graph_logprobs(
        self, trajectories: Sequence[Trajectory], *, with_kl: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """(B, policies, H) log-probabilities with their graph, and as many KLs to the reference (zeros if not asked).

        None where they do not fit one micro-batch a policy.
        """
        shape, columns = (len(trajectories), self.domain.horizon), []
        for index, member in enumerate(self.members):
            found = graph_logprobs(
                member.base,
                member.adapter,
                self._items(trajectories, index),
                max_tokens=self.micro_batch_tokens,
                with_kl=with_kl,
            )
            if found is None:
                return None
            columns.append([of_items.view(shape) for of_items in found])
        return tuple(torch.stack(of_policies, dim=1) for of_policies in zip(*columns, strict=True))

    def backward(
        self, trajectories: Sequence[Trajectory], weights: Tensor, *, kl_weight: float = 0.0
    ) -> tuple[Tensor, float]:
        """Add the gradient of sum(weights * logprobs) to every policy's adapter.

        Args:
            trajectories: the B trajectories whose log-probabilities a loss was computed from.
            weights: (B, policies, H) derivative of that loss by the log-probabilities. All of them were taken before
                any policy moves, so updates are simultaneous.
            kl_weight: adds the exact next-token KL to the reference with this weight (see `scoring`).

        Returns:
            The (B, policies, H) log-probabilities, and the summed KL in nats, 0.0 where it is off.
        """
        columns, total_kl = [], 0.0
        for index, member in enumerate(self.members):
            logprobs, kl = accumulate_logprob_gradients(
                member.base,
                member.adapter,
                self._items(trajectories, index),
                weights[:, index].reshape(-1),
                max_tokens=self.micro_batch_tokens,
                kl_weight=kl_weight,
            )
            columns.append(logprobs.view(len(trajectories), self.domain.horizon))
            total_kl += kl
        return torch.stack(columns, dim=1), total_kl

    @staticmethod
    def _items(trajectories: Sequence[Trajectory], index: int) -> list[Item]:
        actions = [turn[index] for trajectory in trajectories for turn in trajectory.actions]
        return [Item(action.prompt_ids, action.token_ids, action.forced) for action in actions]

    def lengths(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """(B, policies, H) numbers of response tokens that log-probabilities count."""
        return torch.tensor(
            [
                [[turn[index].num_chosen for turn in trajectory.actions] for index in range(len(self.members))]
                for trajectory in trajectories
            ]
        )

    # ------------------------------------------------------------------ weights

    def parameters(self, index: int) -> list[torch.nn.Parameter]:
        """Trainable tensors of one policy."""
        return self.members[index].base.parameters(self.members[index].adapter)

    def snapshot(self) -> Snapshot:
        """A copy of all adapters' weights."""
        return [member.base.state(member.adapter) for member in self.members]

    def restore(self, snapshot: Snapshot) -> None:
        for member, state in zip(self.members, snapshot, strict=True):
            member.base.load_state(member.adapter, state)

    @contextlib.contextmanager
    def weights(self, snapshot: Snapshot) -> Iterator[None]:
        """Act with earlier weights inside the body (the "last" comparator), then with the present ones again."""
        present = self.snapshot()
        self.restore(snapshot)
        try:
            yield
        finally:
            self.restore(present)

    def save(self, folder: Path) -> None:
        """Write each adapter to `folder/<name>` in PEFT's format, so that stock PEFT and vLLM can load an agent."""
        for member in self.members:
            member.base.save(member.adapter, folder)

    def load(self, folder: Path) -> None:
        for member in self.members:
            member.base.load(member.adapter, folder)


def _read(member: Member, prompt_ids: tuple[int, ...], text: str, skeleton: Skeleton | None) -> Response:
    """A text from elsewhere as a response of this policy."""
    tokenizer = member.base.tokenizer
    following = skeleton and encode_answer(text, skeleton, tokenizer)
    if following:
        return Response(prompt_ids, tuple(following[0]), text, False, tuple(following[1]))
    return Response(prompt_ids, tuple(encode_response(tokenizer, text)), text, False)
