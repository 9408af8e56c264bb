"""One MAPL run, in the order of the paper's algorithm boxes (section 4.1, Algorithms 1 and 2).

    for nu in range(iterations):
        collect     m trajectories of the agents and m of the comparator for each task
        label       the j-th against the j-th; ties are dropped and counted
        select      the k best pairs of each task
        buffer      add them as a shard, draw the training set
        update      MADPO, or MARLHF: fit the joint reward model, then multi-agent RL on it
        evaluate    with the oracle, on the evaluation tasks

The first half of the module holds the update rules, the second the run around them. Every update has the same shape:
the summed log-probabilities of a batch, the loss of `mapl_core.losses` on them, and one simultaneous step: all policies'
gradients are taken before any of them moves.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from mapl_core import losses
from mapl_core.adapters import AdaptedModel
from mapl_core.annotators import make_annotator
from mapl_core.buffers import PreferencePair, ReplayBuffer, Trajectory, label_pairs, pair_diversity, select_pairs
from mapl_core.comparators import Comparator
from mapl_core.domains import get_domain
from mapl_core.domains.base import Domain, Task
from mapl_core.models import describe, load_model
from mapl_core.policies import Budget, JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.results import (
    EVALUATION_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    EvaluationRow,
    MetricRow,
    write_evaluation,
    write_manifest,
    write_metrics,
)
from mapl_core.reward_model import RewardModel, fit_reward_model, split_held_out, task_batches
from mapl_core.sampling import SamplingSettings
from mapl_core.scoring import ScalarModel
from mapl_core.seeding import Stream

RewardFunction = Callable[[Sequence[Trajectory]], Tensor]  # B trajectories -> (B, H) reward of each turn


# ---------------------------------------------------------------------------------------------------------------------
# Update rules
# ---------------------------------------------------------------------------------------------------------------------


class TeamOptimizer:
    """One AdamW for each policy of the team; its state lives as long as the run."""

    def __init__(self, policy: JointPolicy, config: RunConfig):
        self.policy, self.max_grad_norm = policy, config.max_grad_norm
        self.optimizers = [torch.optim.AdamW(policy.parameters(index), lr=config.learning_rate, weight_decay=config.weight_decay)
                           for index in range(len(policy.members))]

    def step(self, trajectories: Sequence[Trajectory], loss_of: Callable[[Tensor], Tensor], *,
             kl_weight: float = 0.0) -> dict[str, float]:
        """One simultaneous step of all policies on a loss of their log-probabilities.

        Where a batch fits one micro-batch for each policy, its graph is kept and run backward. Otherwise a pass without
        a graph gives the log-probabilities, the loss its derivative by each, and a second pass carries those to the
        adapters micro-batch by micro-batch: the same gradient, in bounded memory.

        Args:
            trajectories: the B trajectories.
            loss_of: maps their (B, policies, H) log-probabilities to a scalar; called once.
            kl_weight: weight of the exact KL to the reference (see `scoring`).
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        kl = 0.0
        logprobs = None if kl_weight else self.policy.graph_logprobs(trajectories)
        if logprobs is not None:
            loss_of(logprobs).backward()
        else:
            logprobs = self.policy.logprobs(trajectories).requires_grad_()
            weights = torch.autograd.grad(loss_of(logprobs), logprobs)[0]
            kl = self.policy.backward(trajectories, weights, kl_weight=kl_weight)
        norms = [float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(index), self.max_grad_norm))
                 for index in range(len(self.optimizers))]
        if not all(map(math.isfinite, norms)):
            raise FloatingPointError(f"gradient norms of the policies are {norms}; nothing was updated. Lower the learning rate")
        for optimizer in self.optimizers:
            optimizer.step()
        metrics = {f"gradient_norm_{member.adapter}": norm for member, norm in zip(self.policy.members, norms, strict=True)}
        return metrics | ({"kl": kl} if kl_weight else {})

    def state(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state(self, state: Sequence[dict]) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)


class Averages:
    """Means of metrics over the batches of an update."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float | Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def update_madpo(policy: JointPolicy, optimizer: TeamOptimizer, pairs: Sequence[PreferencePair], stream: Stream,
                 config: RunConfig) -> dict[str, float]:
    """MADPO on a training set of pairs (paper, section 4.2 and Algorithm 2): one logistic a pair on the joint margin.

    Returns:
        Mean metrics over the batches, `samples` (trajectories trained on), and the loss of the first batch.
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
            known = [None, None] if reference is None else [reference[[position[id(t)] for t in side]] for side in sides]
            lengths = [policy.lengths(side) for side in sides] if config.length_normalize else [None, None]

            def loss_of(logprobs: Tensor) -> Tensor:
                loss, metrics = losses.madpo_loss(
                    *logprobs.chunk(2), *known, beta=config.beta, label_smoothing=config.label_smoothing,
                    winner_lengths=lengths[0], loser_lengths=lengths[1])
                averages.add(metrics)
                return loss

            averages.add(optimizer.step(both, loss_of))
            samples += len(both)
    response_lengths = {f"{side}_length_{member.adapter}": float(length) for side, of in (("winner", "winner"), ("loser", "loser"))
                        for member, length in zip(policy.members, policy.lengths([getattr(p, of) for p in pairs]).float().mean((0, 2)))}
    return {**averages.means(), **response_lengths, "samples": float(samples)}


def update_magrpo(policy: JointPolicy, optimizer: TeamOptimizer, tasks: Sequence[Task], reward: RewardFunction,
                  stream: Stream, config: RunConfig) -> dict[str, float]:
    """Group-relative Monte Carlo policy gradient on fresh groups (paper, Eq. 5).

    A group holds the G joint responses to one task. One pass over each batch of fresh groups.
    """
    averages, samples = Averages(), 0
    for epoch in range(config.epochs):
        for number, batch in enumerate(_task_minibatches(tasks, config.batch_size, stream, epoch)):
            groups = policy.sample(batch, config.num_generations, _numbered(stream, epoch, number))
            trajectories = [trajectory for group in groups for trajectory in group]
            shape = (len(batch), config.num_generations)
            returns = reward(trajectories).sum(dim=1).view(shape)
            advantages = losses.group_relative_advantages(returns, normalize=config.normalize)
            averages.add(_group_metrics(returns, trajectories))

            def loss_of(logprobs: Tensor) -> Tensor:
                grouped = logprobs.view(*shape, *logprobs.shape[1:])
                loss, metrics = losses.magrpo_loss(grouped, advantages, clip_ratio=config.clip_ratio,
                                                   sampled_logprobs=grouped.detach())  # fresh: nothing has moved since
                averages.add(metrics)
                return loss

            averages.add(optimizer.step(trajectories, loss_of, kl_weight=config.kl_coef / len(trajectories)))
            samples += len(trajectories)
    return {**averages.means(), "samples": float(samples)}


def update_actor_critic(policy: JointPolicy, optimizer: TeamOptimizer, critics: Critics, tasks: Sequence[Task],
                        reward: RewardFunction, stream: Stream, config: RunConfig) -> dict[str, float]:
    """CoLLM-CC and CoLLM-DC: the advantage is taken against a critic instead of a group (paper, Table 2c)."""
    averages, samples = Averages(), 0
    for epoch in range(config.epochs):
        for number, batch in enumerate(_task_minibatches(tasks, config.batch_size, stream, epoch)):
            groups = policy.sample(batch, config.num_generations, _numbered(stream, epoch, number))
            trajectories = [trajectory for group in groups for trajectory in group]
            rewards = reward(trajectories)

            values = critics.values(trajectories)  # the actor's advantages use the critics as they were

            def rule(logprobs: Tensor, values: Tensor) -> tuple[Tensor, dict]:
                return losses.actor_critic_loss(
                    logprobs, values, rewards, discount=config.discount, value_coef=config.value_coef,
                    clip_ratio=config.clip_ratio, sampled_logprobs=logprobs.detach())

            def actor_loss(logprobs: Tensor) -> Tensor:
                loss, metrics = rule(logprobs, values)
                averages.add(metrics)
                return loss

            averages.add(optimizer.step(trajectories, actor_loss, kl_weight=config.kl_coef / len(trajectories)))
            # The critics' part of the loss does not depend on the log-probabilities; zeros stand in for them.
            critics.step(trajectories, lambda own: rule(torch.zeros(own.shape), own)[0])
            samples += len(trajectories)
    return {**averages.means(), "samples": float(samples)}


class Critics:
    """Value functions read at the last prompt token: one on the joint history (CC) or one for each policy (DC)."""

    def __init__(self, policy: JointPolicy, tasks: Mapping[str, Task], stream: Stream, config: RunConfig):
        self.policy, self.tasks = policy, tasks
        self.centralised = config.algorithm == "collm_cc"
        owners = policy.members[:1] if self.centralised else policy.members
        self.scalars = [ScalarModel(member.base, f"critic{index}", stream.for_agent(index), max_tokens=config.micro_batch_tokens)
                        for index, member in enumerate(owners)]
        self.optimizers = [torch.optim.AdamW(scalar.parameters(), lr=config.critic_learning_rate, weight_decay=config.weight_decay)
                           for scalar in self.scalars]
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
        return self._expand([scalar.values(self._items(trajectories, index)) for index, scalar in enumerate(self.scalars)],
                            len(trajectories))

    def step(self, trajectories: Sequence[Trajectory], loss_of: Callable[[Tensor], Tensor]) -> None:
        """One step of every critic on the critic's part of the loss."""
        fixed = [scalar.values(self._items(trajectories, index)) for index, scalar in enumerate(self.scalars)]
        for index, (scalar, optimizer) in enumerate(zip(self.scalars, self.optimizers, strict=True)):
            optimizer.zero_grad()
            scalar.backward(self._items(trajectories, index), lambda own, i=index: loss_of(
                self._expand([*fixed[:i], own, *fixed[i + 1:]], len(trajectories))))
            torch.nn.utils.clip_grad_norm_(scalar.parameters(), self.max_grad_norm)
            optimizer.step()

    def close(self) -> None:
        for scalar in self.scalars:
            scalar.close()


def oracle_rewards(trajectories: Sequence[Trajectory]) -> Tensor:
    """(B, H) the oracle's reward of every turn (MARL with the oracle reward)."""
    return torch.tensor([trajectory.rewards for trajectory in trajectories], dtype=torch.float32)


def learned_rewards(model: RewardModel) -> RewardFunction:
    """The learned reward of the whole joint history, received at the last turn (MARLHF)."""

    def reward(trajectories: Sequence[Trajectory]) -> Tensor:
        scores = model.scores(trajectories)
        earlier = torch.zeros(len(trajectories), len(trajectories[0].rewards) - 1)
        return torch.cat([earlier, scores[:, None]], dim=1)

    return reward


def _task_minibatches(tasks: Sequence[Task], batch_size: int, stream: Stream, epoch: int) -> list[list[Task]]:
    order = torch.randperm(len(tasks), generator=_numbered(stream, epoch, -1).generator()).tolist()
    return [[tasks[index] for index in order[start : start + batch_size]] for start in range(0, len(tasks), batch_size)]


def _numbered(stream: Stream, epoch: int, batch: int) -> Stream:
    return Stream(stream.seed, f"{stream.purpose}/epoch{epoch}/batch{batch}", stream.agent, stream.iteration)


def _group_metrics(returns: Tensor, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean training reward, and how often its order within a group is the oracle's."""
    oracle = torch.tensor([trajectory.total_return for trajectory in trajectories]).view_as(returns)
    first, second = torch.triu_indices(returns.shape[1], returns.shape[1], offset=1)
    wanted, found = oracle[:, first] - oracle[:, second], returns[:, first] - returns[:, second]
    compared = wanted != 0
    agreement = float((wanted.sign() == found.sign())[compared].float().mean()) if bool(compared.any()) else math.nan
    return {"reward": float(returns.mean()), "oracle_reward": float(oracle.mean())} | (
        {} if math.isnan(agreement) else {"oracle_agreement": agreement})


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(policy: JointPolicy, tasks: Sequence[Task], samples: int, stream: Stream) -> tuple[dict[str, dict[str, float]], list[Trajectory]]:
    """Play the evaluation tasks and score them with the oracle; there is no way to pass it a learned reward.

    Returns:
        For each task id the mean over its samples of every metric: those of `Domain.metrics` on the last turn,
        `reward`, each reward part, and for each policy `length` and `truncated`; and the trajectories.
    """
    played = policy.sample(tasks, samples, stream)
    by_task = {}
    for task, group in zip(tasks, played, strict=True):
        averages = Averages()
        for trajectory in group:
            # A measurement that does not exist (a ratio of nothing) is left out of its mean.
            measured = {k: v for k, v in policy.domain.metrics(list(trajectory.responses[-1]), task).items() if v is not None}
            averages.add({k: v for k, v in measured.items() if math.isfinite(v)})
            averages.add({"reward": trajectory.total_return} | {f"part/{k}": v for k, v in trajectory.parts[-1].items()})
            for member, action in zip(policy.members, trajectory.actions[-1], strict=True):
                averages.add({f"length/{member.adapter}": len(action.token_ids), f"truncated/{member.adapter}": action.truncated})
        by_task[task.id] = averages.means()
    return by_task, [trajectory for group in played for trajectory in group]


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResult:
    """Where a run's files are, and its rows."""

    folder: Path
    metrics: list[MetricRow]
    evaluation: list[EvaluationRow]

    def final(self, metric: str) -> float:
        """Value of a metric at the last iteration that has it."""
        return next(row.value for row in reversed(self.metrics) if row.metric == metric)


@dataclass
class Team:
    """The parts of a run that hold weights, and its tasks."""

    domain: Domain
    policy: JointPolicy
    comparator: Comparator | None
    train_tasks: list[Task]
    eval_tasks: list[Task]
    models: dict[str, dict]  # name -> description, for the manifest


def build_team(config: RunConfig) -> Team:
    """Load tasks and models and put fresh adapters on them. Everything that can be refused is refused here."""
    domain = get_domain(config.domain, **config.domain_options)
    train_tasks = domain.load_tasks("train", config.source, config.train_tasks) if config.method != "untrained" else []
    eval_tasks = domain.load_tasks("eval", config.source, config.eval_tasks)
    bases: dict[str, AdaptedModel] = {}

    def base(name: str) -> AdaptedModel:
        if name not in bases:
            bases[name] = AdaptedModel(load_model(name), rank=config.lora_rank, alpha=config.lora_alpha,
                                       gradient_checkpointing=config.gradient_checkpointing)
        return bases[name]

    def team(structure: str, names: Sequence[str], stream: Stream | None) -> JointPolicy:
        limits = config.token_limits if structure == "dec" else [sum(config.token_limits)]
        settings = [SamplingSettings(config.temperature, config.top_p, limit) for limit in limits]
        return JointPolicy(domain, structure, [base(name) for name in names], settings, prompt_form=config.prompt_form,
                           stream=stream, budget=Budget(config.micro_batch_tokens, config.cached_tokens))

    policy = team(config.agents_structure, config.policy_models, Stream(config.seed, "init"))
    comparator = None
    if config.learns_from_preferences:
        structure, model = config.comparator_structure, None
        if config.comparator == "model":
            name = config.comparator_model or config.central_model
            model = team(structure, [name] * (domain.num_agents if structure == "dec" else 1), None)
        comparator = Comparator(config.comparator, policy, structure=structure, model=model,
                                soft_temperature=config.soft_temperature)
    return Team(domain, policy, comparator, train_tasks, eval_tasks, {name: describe(b.loaded) for name, b in bases.items()})


def run_mapl(config: RunConfig, out_dir: Path | str, *, progress: bool = True) -> RunResult:
    """Train and evaluate one team, and leave everything a table needs in `out_dir`.

    Writes metrics.csv, evaluation.csv, adapters/<name>/ in PEFT's format, examples.json (some evaluation answers before
    and after), and manifest.json last. After every iteration a checkpoint is written; a run that was stopped goes on
    from it and ends with the numbers of an undisturbed run.

    Raises:
        ConfigError, ValueError, FileNotFoundError: for values, models or data that cannot work, before any training.
        RuntimeError: if no pair could be collected, or `out_dir` holds the checkpoint of another configuration.
    """
    out_dir = Path(out_dir)
    torch.set_num_threads(config.threads)
    run = _Run(config, build_team(config), out_dir)
    steps = config.iterations if config.method != "untrained" else 0
    with tqdm(total=steps + 1, desc=f"{config.method} {config.paradigm}", disable=not progress, leave=False) as bar:
        run.resume()
        if not run.evaluation:
            run.evaluate(0)
            run.checkpoint()
        bar.update(1 + run.finished)
        for iteration in range(run.finished, steps):
            if config.learns_from_preferences:
                training_set = run.collect_preferences(iteration)
                run.update_from_preferences(iteration, training_set)
            else:
                run.update_from_oracle(iteration)
            run.finished = iteration + 1
            run.evaluate(run.finished)
            run.checkpoint()
            bar.update()
    return run.finish()


class _Run:
    """State of one run: what a checkpoint holds, and the steps of the loop."""

    def __init__(self, config: RunConfig, team: Team, out_dir: Path):
        self.config, self.team, self.out_dir = config, team, out_dir
        self.policy, self.domain = team.policy, team.domain
        self.tasks_by_id = {task.id: task for task in [*team.train_tasks, *team.eval_tasks]}
        self.optimizer = TeamOptimizer(team.policy, config)
        self.buffer = ReplayBuffer(config.buffer, decay=config.buffer_decay, delay=config.buffer_delay, size=config.buffer_size)
        self.metrics: list[MetricRow] = []
        self.evaluation: list[EvaluationRow] = []
        self.examples: dict[str, list[dict]] = {}
        self.counts = {"env_steps": 0, "agent_samples": 0, "comparator_samples": 0, "reward_model_samples": 0,
                       "oracle_calls": 0, "sampled_tokens": 0}
        self.finished = 0
        self.seconds = 0.0
        self._started = time.monotonic()
        self._reward_model: RewardModel | None = None

    # -- the steps of an iteration -----------------------------------------------------------------------------------

    def collect_preferences(self, iteration: int) -> list[PreferencePair]:
        """Collect, label, select and buffer (paper, section 4.1); the training set of this iteration."""
        config, tasks = self.config, self.team.train_tasks
        offline = config.buffer == "offline"
        if not offline or iteration == 0:
            factor = config.iterations if offline else 1  # offline collects the whole run's budget at once
            m, k = config.samples_per_task * factor, config.pairs_per_task * factor
            self.team.comparator.begin_iteration()
            agents = self.policy.sample(tasks, m, self._stream("collect", iteration))
            others = self.team.comparator.sample(tasks, m, self._stream("comparator", iteration))
            self._count(agents, "agent_samples")
            self._count(others, "comparator_samples")
            annotator = make_annotator(config.annotator, temperature=config.annotator_temperature,
                                       flip_probability=config.annotator_flip_probability,
                                       generator=self._stream("annotate", iteration).generator())
            generator = self._stream("select", iteration).generator()
            selected, ties = [], 0
            proxy = self._proxy() if config.selection == "proxy" else None
            for mine, theirs in zip(agents, others, strict=True):
                pairs, tied = label_pairs(mine, theirs, annotator, iteration=iteration)
                ties += tied
                if pairs:
                    selected += select_pairs(pairs, k, by=config.selection, generator=generator, proxy=proxy,
                                             component=config.selection_component)
            self._record_preferences(iteration, agents, others, selected, ties)
            self.buffer.add(selected)
        if not self.buffer.shards:
            raise RuntimeError(
                f"no preference pairs: all {m * len(tasks)} comparisons of iteration {iteration} tied. "
                "Raise samples_per_task (m) or the temperature, or choose another comparator")
        training_set = self.buffer.sample(self._stream("buffer", iteration).generator())
        if offline and config.method == "madpo":
            training_set = training_set[iteration :: config.iterations]  # each pair once over the whole run
        return training_set

    def update_from_preferences(self, iteration: int, training_set: Sequence[PreferencePair]) -> None:
        config = self.config
        if config.method == "madpo":
            metrics = update_madpo(self.policy, self.optimizer, training_set, self._stream("madpo", iteration), config)
            self._trained(iteration, metrics)
            return
        model = self._fit_reward_model(iteration, training_set)
        self._update_marl(iteration, learned_rewards(model))

    def update_from_oracle(self, iteration: int) -> None:
        self._update_marl(iteration, oracle_rewards)

    def _update_marl(self, iteration: int, reward: RewardFunction) -> None:
        config, stream = self.config, self._stream("marl", iteration)
        if config.algorithm == "magrpo":
            metrics = update_magrpo(self.policy, self.optimizer, self.team.train_tasks, reward, stream, config)
        else:
            critics = Critics(self.policy, self.tasks_by_id, self._stream("critic", iteration), config)
            metrics = update_actor_critic(self.policy, self.optimizer, critics, self.team.train_tasks, reward, stream, config)
            critics.close()
        self.counts["oracle_calls" if reward is oracle_rewards else "agent_samples"] += int(metrics["samples"])
        self._trained(iteration, metrics)

    def _fit_reward_model(self, iteration: int, training_set: Sequence[PreferencePair]) -> RewardModel:
        """A reward model from scratch on the buffer's training set; a tenth of the tasks is held out to measure it."""
        config, stream = self.config, self._stream("reward_model", iteration)
        if self._reward_model is not None:
            self._reward_model.close()
        self._reward_model = model = self._fresh_reward_model(iteration)
        fitted, held_out = split_held_out(training_set, stream.generator())
        report = fit_reward_model(
            model, fitted, self._stream("reward_model/order", iteration), learning_rate=config.reward_model_learning_rate,
            weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm, epochs=config.reward_model_epochs,
            batch_size=config.reward_model_batch_size, held_out=held_out)
        self.counts["reward_model_samples"] += report.samples
        self._rows(iteration + 1, {f"reward_model/{name}": value for name, value in asdict(report).items()})
        self._rows(iteration + 1, {"reward_model/cut_texts": model.cut_parts})
        return model

    def _fresh_reward_model(self, iteration: int) -> RewardModel:
        return RewardModel(self.domain, self.tasks_by_id, self.policy.members[0].base, self._stream("reward_model", iteration),
                           max_text_tokens=self.config.reward_model_tokens,
                           micro_batch_tokens=self.config.micro_batch_tokens)

    def _proxy(self) -> Callable[[Trajectory], float]:
        if self._reward_model is None:
            return lambda trajectory: 0.0  # the first iteration has no reward model yet: order of collection
        return lambda trajectory: float(self._reward_model.scores([trajectory]))

    def evaluate(self, finished: int) -> None:
        """Oracle metrics after `finished` iterations, on common random numbers, so that iterations are comparable."""
        config = self.config
        by_task, played = evaluate(self.policy, self.team.eval_tasks, config.eval_samples, Stream(config.seed, "evaluate"))
        self.evaluation += [EvaluationRow(task_id, finished, name, value)
                            for task_id, measured in by_task.items() for name, value in measured.items()]
        names = dict.fromkeys(name for measured in by_task.values() for name in measured)
        means = {name: _mean([measured[name] for measured in by_task.values() if name in measured]) for name in names}
        self._rows(finished, means)
        if self._reward_model is not None:  # beside the oracle's, so that over-optimisation is visible
            self._rows(finished, {"reward_model/evaluation_reward": float(self._reward_model.scores(played).mean())})
        self._rows(finished, {f"count/{name}": float(count) for name, count in self.counts.items()})
        shown = played[:: config.eval_samples][:8]
        self.examples[str(finished)] = [{"task": t.task_id, "responses": t.responses, "reward": t.total_return} for t in shown]

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _stream(self, purpose: str, iteration: int) -> Stream:
        return Stream(self.config.seed, purpose, iteration=iteration)

    def _count(self, played: Sequence[Sequence[Trajectory]], name: str) -> None:
        trajectories = [trajectory for group in played for trajectory in group]
        self.counts[name] += len(trajectories)
        self.counts["oracle_calls"] += len(trajectories)
        self.counts["sampled_tokens"] += sum(len(action.token_ids) for t in trajectories for turn in t.actions for action in turn)

    def _trained(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.counts["env_steps"] += int(metrics["samples"]) * self.domain.horizon
        self._rows(iteration + 1, {f"train/{name}": value for name, value in metrics.items() if name != "samples"})

    def _record_preferences(self, iteration: int, agents, others, selected: Sequence[PreferencePair], ties: int) -> None:
        diversity = pair_diversity(selected).values()
        empty = [not any(text.strip() for text in t.responses[-1]) for group in others for t in group]
        self._rows(iteration + 1, {
            "preferences/ties": float(ties),
            "preferences/pairs": float(len(selected)),
            "preferences/agent_wins": _mean([float(pair.winner_is_agent) for pair in selected]),
            "preferences/winner_return": _mean([pair.winner.total_return for pair in selected]),
            "preferences/gap": _mean([pair.gap for pair in selected]),
            "preferences/distinct_winners": _mean([d.winners for d in diversity]),
            "preferences/agent_reward": _mean([t.total_return for group in agents for t in group]),
            "preferences/comparator_reward": _mean([t.total_return for group in others for t in group]),
            "preferences/comparator_empty": _mean([float(e) for e in empty]),
        })

    def _rows(self, finished: int, values: Mapping[str, float]) -> None:
        c = self.config
        buffer = f"decay {c.buffer_decay:g}" if c.buffer == "decay" else f"delay {c.buffer_delay}" if c.buffer == "delay" else c.buffer
        comparator, buffer = (c.comparator, buffer) if c.learns_from_preferences else ("none", "none")
        self.metrics += [MetricRow(c.experiment, c.profile, c.domain, c.method, c.paradigm, comparator, buffer, c.seed,
                                   finished, self.counts["env_steps"], name, float(value)) for name, value in values.items()]

    @property
    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode()).hexdigest()

    def checkpoint(self) -> None:
        """Write everything the next iteration needs under a temporary name, then put it in place of the last one."""
        self.seconds += time.monotonic() - self._started
        self._started = time.monotonic()
        state = {
            "fingerprint": self._fingerprint, "finished": self.finished, "seconds": self.seconds, "counts": self.counts,
            "metrics": [list(asdict(row).values()) for row in self.metrics],
            "evaluation": [list(asdict(row).values()) for row in self.evaluation],
            "examples": self.examples, "adapters": self.policy.snapshot(), "optimizer": self.optimizer.state(),
            "comparator": self.team.comparator.state() if self.team.comparator else None,
            "buffer": json.dumps(self.buffer.state_dict()),
            "reward_model": self._reward_model.scalar.state() if self._reward_model else None,
        }
        self.out_dir.mkdir(parents=True, exist_ok=True)
        temporary = self.out_dir / "checkpoint.pt.tmp"
        torch.save(state, temporary)
        temporary.replace(self.out_dir / "checkpoint.pt")

    def resume(self) -> None:
        """Continue from the checkpoint in `out_dir`, if there is one of this very configuration."""
        path = self.out_dir / "checkpoint.pt"
        if not path.is_file():
            return
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise RuntimeError(f"{path} cannot be read ({error}); delete it to start this run afresh") from error
        if state["fingerprint"] != self._fingerprint:
            raise RuntimeError(f"{path} belongs to another configuration; delete it, or choose another results folder")
        self.finished, self.seconds, self.counts = state["finished"], state["seconds"], state["counts"]
        self.metrics = [MetricRow(*row) for row in state["metrics"]]
        self.evaluation = [EvaluationRow(*row) for row in state["evaluation"]]
        self.examples = state["examples"]
        self.policy.restore(state["adapters"])
        self.optimizer.load_state(state["optimizer"])
        if self.team.comparator:
            self.team.comparator.load_state(state["comparator"])
        self.buffer.load_state_dict(json.loads(state["buffer"]))
        if state["reward_model"]:
            self._reward_model = self._fresh_reward_model(self.finished - 1)
            self._reward_model.scalar.load_state(state["reward_model"])

    def finish(self) -> RunResult:
        config, out_dir = self.config, self.out_dir
        write_metrics(out_dir / METRICS_FILE, self.metrics)
        write_evaluation(out_dir / EVALUATION_FILE, self.evaluation)
        files = [METRICS_FILE, EVALUATION_FILE, "examples.json"]
        (out_dir / "examples.json").write_text(json.dumps(self.examples, indent=1, ensure_ascii=False), encoding="utf-8")
        if config.method != "untrained":
            shutil.rmtree(out_dir / "adapters", ignore_errors=True)
            self.policy.save(out_dir / "adapters")
            files.append("adapters")
        refused = {task_id: reason for found in getattr(self.domain, "refused", {}).values() for task_id, reason in found}
        write_manifest(
            out_dir / MANIFEST_FILE, files=files, parameters=asdict(config), task_source=config.source,
            task_counts={"train": len(self.team.train_tasks), "eval": len(self.team.eval_tasks)}, refused_tasks=refused,
            model="; ".join(f"{name}: {about['origin']}" for name, about in self.team.models.items()),
            device=str(self.policy.members[0].base.device), seconds=self.seconds, notes={"models": self.team.models})
        (out_dir / "checkpoint.pt").unlink(missing_ok=True)
        return RunResult(out_dir, self.metrics, self.evaluation)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
