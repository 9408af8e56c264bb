"""How the agents' policies move: the update rules of MADPO, MARLHF and MARL (paper, section 4.2, Eq. 5, Table 2c).

Every rule has the same shape: the summed log-probabilities of a batch, a loss of `mapl_core.losses` on them, and one
simultaneous step: all policies' gradients are taken before any of them moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mapl_core import losses
from mapl_core.buffers import PreferencePair, Trajectory
from mapl_core.domains.base import Task
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.reward_model import RewardModel, task_batches
from mapl_core.scoring import ScalarModel
from mapl_core.seeding import Stream

RewardFunction = Callable[[Sequence[Trajectory]], Tensor]  # B trajectories -> (B, H) reward of each turn


class TeamOptimizer:
    """One AdamW for each policy of the team; its state lives as long as the run."""

    def __init__(self, policy: JointPolicy, config: RunConfig):
        self.policy, self.max_grad_norm = policy, config.max_grad_norm
        self.optimizers = [
            torch.optim.AdamW(policy.parameters(index), lr=config.learning_rate, weight_decay=config.weight_decay)
            for index in range(len(policy.members))
        ]

    def step(
        self,
        trajectories: Sequence[Trajectory],
        loss_of: Callable[[Tensor], Tensor],
        *,
        kl_weight: float = 0.0,
        fresh: bool = False,
    ) -> tuple[Tensor, dict[str, float]]:
        """One simultaneous step of all policies on a loss of their log-probabilities.

        Where a batch fits one micro-batch for each policy, its graph is kept and run backward. Otherwise a pass without
        a graph gives the log-probabilities, the loss its derivative by each, and a second pass carries those to the
        adapters micro-batch by micro-batch: the same gradient, in bounded memory.

        Args:
            trajectories: the B trajectories.
            loss_of: maps their (B, policies, H) log-probabilities to a scalar.
            kl_weight: weight of the exact KL to the reference (see `scoring`).
            fresh: the trajectories were sampled by the policies as they are, and the loss is a policy gradient. Its
                derivative by a log-probability then does not depend on any of their values (a ratio of new to old is
                1), so that the pass without a graph is spared.

        Returns:
            Their log-probabilities before the step; and for each policy `gradient_norm_<name>` before clipping, with a
            KL weight also `kl`, in nats a trajectory: summed over its policies, turns and tokens, mean over the B
            trajectories.

        Raises:
            FloatingPointError: if the loss or a gradient is not finite; no weight and no optimiser state has changed.
        """
        for index in range(len(self.optimizers)):
            for parameter in self.policy.parameters(index):
                parameter.grad = torch.zeros_like(parameter)  # not None: AdamW would skip an agent that learns nothing
        graph = self.policy.graph_logprobs(trajectories, with_kl=bool(kl_weight))
        if graph is not None:
            logprobs, divergences = graph
            kl = float(divergences.detach().sum())
            (loss_of(logprobs) + kl_weight * divergences.sum()).backward()
        else:
            shape = (len(trajectories), len(self.policy.members), self.policy.domain.horizon)
            given = torch.zeros(shape) if fresh else self.policy.logprobs(trajectories)
            weights = torch.autograd.grad(loss_of(given.requires_grad_()), given)[0]
            logprobs, kl = self.policy.backward(trajectories, weights, kl_weight=kl_weight)
        norms = [
            float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(index), self.max_grad_norm))
            for index in range(len(self.optimizers))
        ]
        if not (all(map(math.isfinite, norms)) and logprobs.isfinite().all()):
            raise FloatingPointError(
                f"gradient norms of the policies are {norms}, and {int((~logprobs.isfinite()).sum())} of "
                f"{logprobs.numel()} log-probabilities are not finite; nothing was updated. Lower the learning rate"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        metrics = {
            f"gradient_norm_{member.adapter}": norm for member, norm in zip(self.policy.members, norms, strict=True)
        }
        return logprobs.detach(), metrics | ({"kl": kl / len(trajectories)} if kl_weight else {})

    def state(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state(self, state: Sequence[dict]) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)


class Averages:
    """Means of metrics over the batches of an update, each batch weighted by what it holds."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float | Tensor], weight: int = 1) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + weight * float(value)
            self.counts[name] = self.counts.get(name, 0) + weight

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def update_madpo(
    policy: JointPolicy, optimizer: TeamOptimizer, pairs: Sequence[PreferencePair], stream: Stream, config: RunConfig
) -> dict[str, float]:
    """MADPO on a training set of pairs (paper, section 4.2 and Algorithm 2): one logistic a pair on the joint margin.

    Returns:
        Mean metrics over the batches; `winner_length_<policy>` and `loser_length_<policy>`, tokens a turn, mean over
        the pairs, and their sums over the team `winner_length` and `loser_length`; `samples` (trajectories trained on).

    Raises:
        FloatingPointError: if a margin is not finite, naming the task and the lengths of every such pair.
    """
    trajectories = list({id(t): t for pair in pairs for t in (pair.winner, pair.loser)}.values())
    position = {id(t): row for row, t in enumerate(trajectories)}
    reference = None
    if config.reference != "none":
        score = policy.reference_logprobs if config.reference == "base" else policy.logprobs
        reference = score(trajectories)  # of the whole training set, before any policy moves
    generator, averages, samples = stream.generator(), Averages(), 0
    for _ in range(config.epochs):
        for batch in task_batches(pairs, config.batch_size, generator):
            sides = [pair.winner for pair in batch], [pair.loser for pair in batch]
            both = [*sides[0], *sides[1]]
            known = (
                [None, None] if reference is None else [reference[[position[id(t)] for t in side]] for side in sides]
            )
            lengths = [policy.lengths(side) for side in sides] if config.length_normalize else [None, None]

            def rule(logprobs: Tensor) -> tuple[Tensor, dict]:
                try:
                    return losses.madpo_loss(
                        *logprobs.chunk(2),
                        *known,
                        beta=config.beta,
                        label_smoothing=config.label_smoothing,
                        winner_lengths=lengths[0],
                        loser_lengths=lengths[1],
                    )
                except losses.NonFiniteError as error:
                    found = "; ".join(_describe_pair(policy, batch[row]) for row in error.rows)
                    raise losses.NonFiniteError(f"{error}. They are {found}", error.rows) from None

            logprobs, norms = optimizer.step(both, lambda logprobs: rule(logprobs)[0])
            averages.add({**rule(logprobs)[1], **norms}, len(batch))
            samples += len(both)
    response_lengths = {}
    for side, of_side in (("winner", [pair.winner for pair in pairs]), ("loser", [pair.loser for pair in pairs])):
        means = policy.lengths(of_side).double().mean((0, 2)).tolist()
        for member, length in zip(policy.members, means, strict=True):
            response_lengths[f"{side}_length_{member.adapter}"] = length
        response_lengths[f"{side}_length"] = math.fsum(means)
    return {**averages.means(), **response_lengths, "samples": float(samples)}


def _describe_pair(policy: JointPolicy, pair: PreferencePair) -> str:
    """Task and lengths of a pair for an error message, [policy][turn] in tokens."""
    winner, loser = policy.lengths([pair.winner, pair.loser]).tolist()
    return f"a pair of task {pair.task_id!r} with {winner} tokens of the winner and {loser} of the loser"


def update_magrpo(
    policy: JointPolicy,
    optimizer: TeamOptimizer,
    tasks: Sequence[Task],
    reward: RewardFunction,
    stream: Stream,
    config: RunConfig,
) -> dict[str, float]:
    """Group-relative Monte Carlo policy gradient on fresh groups (paper, Eq. 5).

    A group holds the G joint responses to one task. One pass over each batch of fresh groups.

    Returns:
        Mean metrics over the batches, `samples` (trajectories trained on) and `sampled_tokens`.
    """
    averages, samples, tokens = Averages(), 0, 0
    for epoch in range(config.epochs):
        for number, batch in enumerate(_task_minibatches(tasks, config.batch_size, stream, epoch)):
            groups = policy.sample(batch, config.num_generations, numbered_stream(stream, epoch, number))
            trajectories = [trajectory for group in groups for trajectory in group]
            shape = (len(batch), config.num_generations)
            returns = reward(trajectories).sum(dim=1).view(shape)
            advantages = losses.group_relative_advantages(returns, normalize=config.normalize)
            averages.add(group_metrics(returns, trajectories), len(batch))
            if number == 0:
                averages.add(_sampler_gap(policy, trajectories, config))

            def rule(logprobs: Tensor) -> tuple[Tensor, dict]:
                grouped = logprobs.view(*shape, *logprobs.shape[1:])
                sampled = None if config.clip_ratio is None else grouped.detach()  # fresh: nothing has moved since
                return losses.magrpo_loss(grouped, advantages, clip_ratio=config.clip_ratio, sampled_logprobs=sampled)

            kl_weight = config.kl_coef / len(trajectories)
            logprobs, norms = optimizer.step(
                trajectories, lambda logprobs: rule(logprobs)[0], kl_weight=kl_weight, fresh=True
            )
            averages.add({**rule(logprobs)[1], **norms}, len(batch))
            samples += len(trajectories)
            tokens += int(policy.lengths(trajectories).sum())
    return {**averages.means(), "samples": float(samples), "sampled_tokens": float(tokens)}


def update_actor_critic(
    policy: JointPolicy,
    optimizer: TeamOptimizer,
    critics: Critics,
    tasks: Sequence[Task],
    reward: RewardFunction,
    stream: Stream,
    config: RunConfig,
) -> dict[str, float]:
    """CoLLM-CC and CoLLM-DC: the advantage is taken against a critic instead of a group (paper, Table 2c).

    With n = 1, a clip and several passes over each batch it is PPO, a baseline of the single agent: advantages and old
    probabilities are those of the time of sampling, and the ratio is that of the whole response.

    Returns:
        As `update_magrpo`.
    """
    averages, samples, tokens = Averages(), 0, 0
    for epoch in range(config.epochs):
        for number, batch in enumerate(_task_minibatches(tasks, config.batch_size, stream, epoch)):
            groups = policy.sample(batch, config.num_generations, numbered_stream(stream, epoch, number))
            trajectories = [trajectory for group in groups for trajectory in group]
            rewards = reward(trajectories)
            returns = rewards.sum(dim=1).view(len(batch), config.num_generations)
            averages.add(group_metrics(returns, trajectories), len(batch))
            if number == 0:
                averages.add(_sampler_gap(policy, trajectories, config))
            values = critics.values(trajectories)  # the actor's advantages use the critics as they were

            def rule(logprobs: Tensor, values: Tensor, sampled_logprobs: Tensor | None) -> tuple[Tensor, dict]:
                return losses.actor_critic_loss(
                    logprobs,
                    values,
                    rewards,
                    discount=config.discount,
                    value_coef=config.value_coef,
                    clip_ratio=None if sampled_logprobs is None else config.clip_ratio,
                    sampled_logprobs=sampled_logprobs,
                )

            sampled: Tensor | None = None  # log-probabilities of the fresh responses, known after the first pass

            def actor_rule(logprobs: Tensor, sampled: Tensor | None) -> tuple[Tensor, dict]:
                old = logprobs.detach() if sampled is None else sampled
                return rule(logprobs, values, None if config.clip_ratio is None else old)

            kl_weight = config.kl_coef / len(trajectories)
            for _ in range(config.passes):
                logprobs, norms = optimizer.step(
                    trajectories,
                    lambda logprobs, sampled=sampled: actor_rule(logprobs, sampled)[0],
                    kl_weight=kl_weight,
                    fresh=sampled is None,
                )
                averages.add({**actor_rule(logprobs, sampled)[1], **norms}, len(batch))
                sampled = logprobs if sampled is None else sampled
                # The critics' part of the loss does not depend on the log-probabilities; zeros stand in for them.
                critics.step(trajectories, lambda own: rule(torch.zeros_like(own), own, None)[0])
            samples += len(trajectories)
            tokens += int(policy.lengths(trajectories).sum())
    return {**averages.means(), "samples": float(samples), "sampled_tokens": float(tokens)}


class Critics:
    """Value functions read at the last prompt token: one on the joint history (CC) or one for each policy (DC)."""

    def __init__(self, policy: JointPolicy, stream: Stream, config: RunConfig):
        self.policy = policy
        self.centralised = config.algorithm == "collm_cc"
        if self.centralised and len({id(member.base) for member in policy.members}) > 1:
            raise ValueError(
                "collm_cc joins the agents' prompt ids for one critic, and these agents have different bases, so their "
                "ids mean different texts; use collm_dc, or one base for all agents"
            )
        owners = policy.members[:1] if self.centralised else policy.members
        self.scalars = [
            ScalarModel(member.base, f"critic{index}", stream.for_agent(index), max_tokens=config.micro_batch_tokens)
            for index, member in enumerate(owners)
        ]
        self.optimizers = [
            torch.optim.AdamW(scalar.parameters(), lr=config.critic_learning_rate, weight_decay=config.weight_decay)
            for scalar in self.scalars
        ]
        self.max_grad_norm = config.max_grad_norm

    def _items(self, trajectories: Sequence[Trajectory], index: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What critic `index` reads at each turn: the joint prompts, or its own policy's prompt."""

        def observed(turn) -> tuple[int, ...]:
            if self.centralised:
                return tuple(token for action in turn for token in action.prompt_ids)
            return turn[index].prompt_ids

        return [(observed(turn), ()) for trajectory in trajectories for turn in trajectory.actions]

    def _expand(self, columns: Sequence[Tensor], count: int) -> Tensor:
        values = torch.stack([column.view(count, -1) for column in columns], dim=1)
        return values.expand(-1, len(self.policy.members), -1)

    def values(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """(B, policies, H) values; a centralised critic's value is the same for all policies."""
        return self._expand(
            [scalar.values(self._items(trajectories, index)) for index, scalar in enumerate(self.scalars)],
            len(trajectories),
        )

    def step(self, trajectories: Sequence[Trajectory], loss_of: Callable[[Tensor], Tensor]) -> None:
        """One step of every critic on the critic's part of the loss."""
        fixed = [scalar.values(self._items(trajectories, index)) for index, scalar in enumerate(self.scalars)]
        for index, (scalar, optimizer) in enumerate(zip(self.scalars, self.optimizers, strict=True)):
            optimizer.zero_grad()
            scalar.backward(
                self._items(trajectories, index),
                lambda own, i=index: loss_of(self._expand([*fixed[:i], own, *fixed[i + 1 :]], len(trajectories))),
            )
            scalar.step(optimizer, self.max_grad_norm)

    def close(self) -> None:
        for scalar in self.scalars:
            scalar.close()


def oracle_rewards(scale: float = 1.0, shift: float = 0.0) -> RewardFunction:
    """The oracle's reward of every turn, scaled, then shifted, for training alone (MARL with the oracle reward)."""

    def reward(trajectories: Sequence[Trajectory]) -> Tensor:
        return scale * torch.tensor([trajectory.rewards for trajectory in trajectories], dtype=torch.float32) + shift

    return reward


def learned_rewards(model: RewardModel) -> RewardFunction:
    """The learned reward of the whole joint history, received at the last turn (MARLHF)."""

    def reward(trajectories: Sequence[Trajectory]) -> Tensor:
        scores = model.scores(trajectories)
        earlier = torch.zeros(len(trajectories), len(trajectories[0].rewards) - 1)
        return torch.cat([earlier, scores[:, None]], dim=1)

    return reward


def _task_minibatches(tasks: Sequence[Task], batch_size: int, stream: Stream, epoch: int) -> list[list[Task]]:
    order = torch.randperm(len(tasks), generator=numbered_stream(stream, epoch, -1).generator()).tolist()
    return [[tasks[index] for index in order[start : start + batch_size]] for start in range(0, len(tasks), batch_size)]


def numbered_stream(stream: Stream, epoch: int, batch: int) -> Stream:
    """The stream of one batch of an update."""
    return Stream(stream.seed, f"{stream.purpose}/epoch{epoch}/batch{batch}", stream.agent, stream.iteration)


def _sampler_gap(policy: JointPolicy, trajectories: Sequence[Trajectory], config: RunConfig) -> dict[str, float]:
    """Mean log-probability at T = 1, which the loss uses, minus that at the sampling temperature, in nats a response.

    Where it is not 0 (or top-p < 1), Eq. (5) is a biased policy gradient, as in the paper's setting.
    """
    if config.temperature == 1.0:
        return {"sampler_gap": 0.0}
    sampled = policy.logprobs(trajectories, temperature=config.temperature)
    return {"sampler_gap": float((policy.logprobs(trajectories) - sampled).mean())}


def group_metrics(returns: Tensor, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean training reward, and how often its order within a group is the oracle's."""
    oracle = torch.tensor([trajectory.total_return for trajectory in trajectories]).view_as(returns)
    first, second = torch.triu_indices(returns.shape[1], returns.shape[1], offset=1)
    wanted, found = oracle[:, first] - oracle[:, second], returns[:, first] - returns[:, second]
    compared = wanted != 0
    agreement = float((wanted.sign() == found.sign())[compared].float().mean()) if bool(compared.any()) else math.nan
    return {"reward": float(returns.mean()), "oracle_reward": float(oracle.mean())} | (
        {} if math.isnan(agreement) else {"oracle_agreement": agreement}
    )
