"""One MAPL run, in the order of the paper's algorithm boxes (section 4.1, Algorithms 1 and 2).

    for nu in range(iterations):
        collect     m trajectories of the agents and m of the comparator for each task
        label       the j-th against the j-th; ties are dropped and counted
        select      the k best pairs of each task
        buffer      add them as a shard, draw the training set
        update      MADPO, or MARLHF: fit the joint reward model, then multi-agent RL on it
        evaluate    with the oracle, on the evaluation tasks

The update rules are in `mapl_core.updates`, what a run is made of in `team`, what it measures in `evaluation`, and what
it counts, saves and writes in `record`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mapl_core.annotators import make_annotator
from mapl_core.baselines import update_dpo, update_grpo
from mapl_core.buffers import PreferencePair, ReplayBuffer, Trajectory, label_pairs, pairs_by_task, select_pairs
from mapl_core.evaluation import evaluate
from mapl_core.memory import keep_freed_memory
from mapl_core.profiles import RunConfig
from mapl_core.record import RunRecord, RunResult, finished_run
from mapl_core.results import check_writable, folder_lock
from mapl_core.reward_model import RewardModel, fit_reward_model, split_held_out
from mapl_core.seeding import Stream
from mapl_core.team import Team, build_team
from mapl_core.updates import (
    Critics,
    RewardFunction,
    TeamOptimizer,
    learned_rewards,
    oracle_rewards,
    update_actor_critic,
    update_madpo,
    update_magrpo,
)


def run_mapl(config: RunConfig, out_dir: Path | str, *, progress: bool = True) -> RunResult:
    """Train and evaluate one team, and leave everything a table needs in `out_dir`.

    Writes metrics.csv, evaluation.csv, adapters/<name>/ in PEFT's format, examples.json (some evaluation answers before
    and after), and manifest.json last. After every iteration a checkpoint is written; a run that was stopped goes on
    from it and ends with the numbers of an undisturbed run; one that was finished is read back, not trained again.
    A run that fails in its first iteration leaves nothing behind.

    Raises:
        ConfigError, ValueError, FileNotFoundError: for values, models or data that cannot work, before any training.
        RuntimeError: if too few pairs could be collected, or the log-probabilities of the sampler and the trainer part
            (see `vllm_sampling`), or `out_dir` holds the checkpoint of another configuration, or one made with other
            code, tasks or weights.
        ResultError: if `out_dir` cannot be written to, or another process is at work in it.
    """
    out_dir = Path(out_dir)
    if (finished := finished_run(config, out_dir)) is not None:
        if progress:
            print(f"{out_dir} holds this very run, finished; nothing is trained again")
        return finished
    check_writable(out_dir)
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul_precision)
    if not torch.cuda.is_available():
        keep_freed_memory()
    team = build_team(config)
    run = _Run(config, team, out_dir)
    steps = config.iterations if config.trains else 0
    quiet = {} if progress else {"disable": True}  # otherwise TQDM_DISABLE decides
    bar = tqdm(total=steps + 1, desc=f"{config.method} {config.paradigm}", leave=False, **quiet)
    # The lock is waited for: a killed runner's job may need a moment to end.
    with contextlib.closing(team.sampler), folder_lock(out_dir, wait_seconds=10.0), bar:
        run.resume()
        try:
            run.train(steps, bar)
        except Exception:
            if not run.finished:  # nothing to go on from, and a corrected configuration would be refused because of it
                run.remove_checkpoint()
            raise
        return run.finish()


class _Run(RunRecord):
    """The steps of the loop, with what they learn."""

    def __init__(self, config: RunConfig, team: Team, out_dir: Path):
        super().__init__(config, team, out_dir)
        self.tasks_by_id = {task.id: task for task in [*team.train_tasks, *team.eval_tasks]}
        self.optimizer = TeamOptimizer(team.policy, config)
        self.buffer = ReplayBuffer(
            config.buffer, decay=config.buffer_decay, delay=config.buffer_delay, size=config.buffer_size
        )
        self._reward_model: RewardModel | None = None

    def train(self, steps: int, bar: tqdm) -> None:
        """From where the run stands to the end of its last iteration."""
        if not self.evaluation:
            self.evaluate(0)
            self.checkpoint()
        bar.update(1 + self.finished)
        for iteration in range(self.finished, steps):
            if self.config.learns_from_preferences:
                training_set = self.collect_preferences(iteration)
                self.update_from_preferences(iteration, training_set)
            else:
                self.update_from_oracle(iteration)
            self.finished = iteration + 1
            self.evaluate(self.finished)
            self.checkpoint()
            bar.update()

    # -- the steps of an iteration -------------------------------------------------------------------------------------

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
            self.count_played(agents, "agent_samples")
            self.count_played(others, "comparator_samples")
            annotator = make_annotator(
                config.annotator,
                temperature=config.annotator_temperature,
                flip_probability=config.annotator_flip_probability,
                generator=self._stream("annotate", iteration).generator(),
            )
            generator = self._stream("select", iteration).generator()
            selected, ties = [], 0
            proxy = self._proxy() if config.selection == "proxy" else None
            for mine, theirs in zip(agents, others, strict=True):
                pairs, tied = label_pairs(mine, theirs, annotator, iteration=iteration)
                ties += tied
                if pairs:
                    selected += select_pairs(
                        pairs,
                        k,
                        by=config.selection,
                        generator=generator,
                        proxy=proxy,
                        component=config.selection_component,
                    )
            self.record_preferences(iteration, agents, others, selected, ties)
            self.buffer.add(selected)
        if not self.buffer.shards:
            raise RuntimeError(
                f"no preference pairs: all {m * len(tasks)} comparisons of iteration {iteration} tied. "
                "Raise samples_per_task (m) or the temperature, or choose another comparator"
            )
        if offline and config.method != "marlhf":
            return self._offline_part(iteration)
        return self.buffer.sample(self._stream("buffer", iteration).generator())

    def _offline_part(self, iteration: int) -> list[PreferencePair]:
        """The share of the pre-collected pairs that (MA)DPO trains on in this iteration; every pair is in one share.

        The pairs are dealt out one after another, those of one task together, so that the shares of a task, and of all
        tasks, differ by one pair at the most and none is empty.
        """
        iterations = self.config.iterations
        by_task = pairs_by_task(self.buffer.sample(self._stream("buffer", 0).generator()))
        dealt = [pair for pairs in by_task.values() for pair in pairs]
        if len(dealt) < iterations:
            raise RuntimeError(
                f"the offline collection gave {len(dealt)} preference pairs for {iterations} iterations, each of which "
                "trains on its own; raise samples_per_task (m) or pairs_per_task (k), or lower iterations"
            )
        return dealt[iteration::iterations]

    def update_from_preferences(self, iteration: int, training_set: Sequence[PreferencePair]) -> None:
        config = self.config
        if config.method != "marlhf":
            update = {"madpo": update_madpo, "single_dpo": update_dpo}[config.method]
            stream = self._stream(config.method, iteration)
            self.record_training(iteration, update(self.policy, self.optimizer, training_set, stream, config))
            return
        model = self._fit_reward_model(iteration, training_set)
        self._update_marl(iteration, learned_rewards(model))

    def update_from_oracle(self, iteration: int) -> None:
        self._update_marl(iteration, oracle_rewards(self.config.reward_scale, self.config.reward_shift))

    def _update_marl(self, iteration: int, reward: RewardFunction) -> None:
        config, stream = self.config, self._stream("marl", iteration)
        by_groups = {"magrpo": update_magrpo, "single_grpo": update_grpo}
        if config.algorithm in by_groups:
            update = by_groups[config.algorithm]
            metrics = update(self.policy, self.optimizer, self.team.train_tasks, reward, stream, config)
        else:
            critics = Critics(self.policy, self._stream("critic", iteration), config)
            metrics = update_actor_critic(
                self.policy, self.optimizer, critics, self.team.train_tasks, reward, stream, config
            )
            critics.close()
        self.counts["agent_samples"] += int(metrics["samples"])
        self.counts["oracle_calls"] += 0 if config.learns_from_preferences else int(metrics["samples"])
        self.counts["sampled_tokens"] += int(metrics["sampled_tokens"])
        self.record_training(iteration, metrics)

    def _fit_reward_model(self, iteration: int, training_set: Sequence[PreferencePair]) -> RewardModel:
        """A reward model from scratch on the buffer's training set; a tenth of the tasks is held out to measure it."""
        config, stream = self.config, self._stream("reward_model", iteration)
        if self._reward_model is not None:
            self._reward_model.close()
        self._reward_model = model = self._fresh_reward_model(iteration)
        fitted, held_out = split_held_out(training_set, stream.generator())
        report = fit_reward_model(
            model,
            fitted,
            self._stream("reward_model/order", iteration),
            learning_rate=config.reward_model_learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            epochs=config.reward_model_epochs,
            batch_size=config.reward_model_batch_size,
            held_out=held_out,
        )
        self.counts["reward_model_samples"] += report.samples
        self.add_rows(iteration + 1, {f"reward_model/{name}": value for name, value in asdict(report).items()})
        self.add_rows(iteration + 1, {"reward_model/cut_texts": model.cut_parts})
        return model

    def _fresh_reward_model(self, iteration: int) -> RewardModel:
        return RewardModel(
            self.domain,
            self.tasks_by_id,
            self.policy.members[0].base,
            self._stream("reward_model", iteration),
            max_text_tokens=self.config.reward_model_tokens,
            micro_batch_tokens=self.config.micro_batch_tokens,
        )

    def _proxy(self) -> Callable[[Trajectory], float]:
        if self._reward_model is None:
            return lambda trajectory: 0.0  # the first iteration has no reward model yet: order of collection
        return lambda trajectory: float(self._reward_model.scores([trajectory]))

    def evaluate(self, finished: int) -> None:
        """Oracle metrics after `finished` iterations, on common random numbers, so that iterations are comparable."""
        config = self.config
        is_between = 0 < finished < config.iterations
        most = config.curve_samples if is_between else None
        by_task, played = evaluate(
            self.policy,
            self.team.eval_tasks,
            min(config.eval_samples, most or config.eval_samples),
            Stream(config.seed, "evaluate"),
            temperature=config.eval_temperature,
        )
        answers: dict[str, list[list[str]]] = {}
        for trajectory in played:
            answers.setdefault(trajectory.task_id, []).append(trajectory.responses[-1])
        found = self.domain.team_metrics([(self.tasks_by_id[name], of_task) for name, of_task in answers.items()])
        others = {f"team/{name}": value for name, value in found.items()}
        if self._reward_model is not None:  # beside the oracle's, so that over-optimisation is visible
            others["reward_model/evaluation_reward"] = float(self._reward_model.scores(played).mean())
        self.record_evaluation(finished, by_task, played, others)

    def _stream(self, purpose: str, iteration: int) -> Stream:
        return Stream(self.config.seed, purpose, iteration=iteration)

    # -- for checkpoints -----------------------------------------------------------------------------------------------

    def learned(self) -> dict[str, Any]:
        return {
            "adapters": self.policy.snapshot(),
            "optimizer": self.optimizer.state(),
            "comparator": self.team.comparator.state() if self.team.comparator else None,
            "endpoint": self.team.endpoint.state() if self.team.endpoint else None,
            "buffer": json.dumps(self.buffer.state_dict()),
            "reward_model": self._reward_model.scalar.state() if self._reward_model else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.policy.restore(state["adapters"])
        self.optimizer.load_state(state["optimizer"])
        if self.team.comparator:
            self.team.comparator.load_state(state["comparator"])
        if self.team.endpoint:
            self.team.endpoint.load_state(state["endpoint"])
        self.buffer.load_state_dict(json.loads(state["buffer"]))
        if state["reward_model"]:
            self._reward_model = self._fresh_reward_model(self.finished - 1)
            self._reward_model.scalar.load_state(state["reward_model"])
