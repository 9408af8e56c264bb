"""One MAPL run, in the order of the paper's algorithm boxes (section 4.1, Algorithms 1 and 2).

    for nu in range(iterations):
        collect     m trajectories of the agents and m of the comparator for each task
        label       the j-th against the j-th; ties are dropped and counted
        select      the k best pairs of each task
        buffer      add them as a shard, draw the training set
        update      MADPO, or MARLHF: fit the joint reward model, then multi-agent RL on it
        evaluate    with the oracle, on the evaluation tasks

The update rules are in `mapl_core.updates`; here is the run around them.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mapl_core.adapters import AdaptedModel
from mapl_core.annotators import make_annotator
from mapl_core.baselines import TEST_TIME_TEAMS, update_dpo, update_grpo
from mapl_core.buffers import (
    PreferencePair,
    ReplayBuffer,
    Trajectory,
    label_pairs,
    pair_diversity,
    pairs_by_task,
    select_pairs,
)
from mapl_core.comparators import Comparator, EndpointTeam
from mapl_core.domains import get_domain
from mapl_core.domains.base import Domain, Task
from mapl_core.endpoint import Endpoint
from mapl_core.inputs import Inputs, changed_inputs, changed_parameters
from mapl_core.memory import keep_freed_memory
from mapl_core.model_names import check_loader, check_model_name
from mapl_core.models import describe, load_model
from mapl_core.policies import SHARED_WRITERS, JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.results import (
    EVALUATION_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    EvaluationRow,
    MetricRow,
    ResultError,
    as_plain,
    check_writable,
    folder_lock,
    read_evaluation,
    read_metrics,
    verify_job,
    write_atomically,
    write_evaluation,
    write_manifest,
    write_metrics,
    write_progress,
)
from mapl_core.reward_model import RewardModel, fit_reward_model, split_held_out
from mapl_core.sampling import Sampler, SamplingSettings, TransformersSampler
from mapl_core.seeding import Stream
from mapl_core.updates import (
    Averages,
    Critics,
    RewardFunction,
    TeamOptimizer,
    learned_rewards,
    oracle_rewards,
    update_actor_critic,
    update_madpo,
    update_magrpo,
)

# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(
    policy: JointPolicy, tasks: Sequence[Task], samples: int, stream: Stream, *, temperature: float | None = None
) -> tuple[dict[str, dict[str, float]], list[Trajectory]]:
    """Play the evaluation tasks and score them with the oracle; there is no way to pass it a learned reward.

    Args:
        temperature: replaces the policies' own; 0 is greedy decoding.

    Returns:
        For each task id the mean over its samples of every metric: those of `Domain.metrics` on the last turn,
        `reward`, each reward part, for each policy `length` and `truncated`, and where one policy writes for all, for
        each agent `unparsed` (see `_unparsed`); and the trajectories.
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
                averages.add(_unparsed(trajectory))
        by_task[task.id] = averages.means()
    return by_task, [trajectory for group in played for trajectory in group]


def _unparsed(trajectory: Trajectory) -> dict[str, float]:
    """Whether each agent's section of the last text of who writes for all is missing or empty: failures by role."""
    return {f"unparsed/agent{index}": not text.strip() for index, text in enumerate(trajectory.responses[-1])}


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
    sampler: Sampler
    endpoint: Endpoint | None = None  # that answers for the comparator "api"


def build_team(config: RunConfig) -> Team:
    """Load tasks and models and put fresh adapters on them. Everything that can be refused is refused here."""
    check_loader(config.loader)
    for name in config.model_names:  # all of them, before the first one is loaded
        check_model_name(name)
    sampler = make_sampler(config)
    endpoint = Endpoint(config.endpoint_settings) if config.endpoint_settings else None
    domain = get_domain(config.domain, **config.domain_options)
    train_tasks = domain.load_tasks("train", config.source, config.train_tasks) if config.trains else []
    eval_tasks = domain.load_tasks("eval", config.source, config.eval_tasks)
    bases: dict[str, AdaptedModel] = {}

    def base(name: str) -> AdaptedModel:
        if name not in bases:
            bases[name] = AdaptedModel(
                load_model(name, loader=config.loader),
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                gradient_checkpointing=config.gradient_checkpointing,
            )
            if config.prompt_form == "chat" and bases[name].tokenizer.chat_template is None:
                raise ValueError(
                    f"model {name!r} has no chat template, and prompt_form is 'chat'; set it to 'text', or name "
                    "another model"
                )
        return bases[name]

    def limits(structure: str) -> list[int]:
        return config.token_limits if structure == "dec" else [sum(config.token_limits)]

    def team(
        structure: str, names: Sequence[str], stream: Stream | None, kind: type[JointPolicy] = JointPolicy
    ) -> JointPolicy:
        settings = [
            SamplingSettings(config.temperature, config.top_p, limit, _top_k(config, base(name)))
            for limit, name in zip(limits(structure), names, strict=True)
        ]
        return kind(
            domain,
            structure,
            [base(name) for name in names],
            settings,
            prompt_form=config.prompt_form,
            stream=stream,
            micro_batch_tokens=config.micro_batch_tokens,
            sampler=sampler,
        )

    kind = TEST_TIME_TEAMS.get(config.method, JointPolicy)
    policy = team(config.agents_structure, config.policy_models, Stream(config.seed, "init"), kind)
    comparator = None
    if config.learns_from_preferences:
        structure, model = config.comparator_structure, None
        if config.comparator == "model":
            model = team(structure, [config.other_comparator] * (domain.num_agents if structure == "dec" else 1), None)
        if endpoint:
            settings = [SamplingSettings(config.temperature, config.top_p, limit) for limit in limits(structure)]
            model = EndpointTeam(domain, structure, endpoint, settings)
        comparator = Comparator(
            config.comparator, policy, structure=structure, model=model, soft_temperature=config.soft_temperature
        )
    models = {name: describe(b.loaded) for name, b in bases.items()}
    return Team(domain, policy, comparator, train_tasks, eval_tasks, models, sampler, endpoint)


def make_sampler(config: RunConfig) -> Sampler:
    """The rollout backend of a run.

    Raises:
        ImportError: if it is vLLM, and vLLM is not installed.
    """
    if config.rollouts == "transformers":
        return TransformersSampler(config.cached_tokens)
    from mapl_core.vllm_sampling import EngineSettings, VllmSampler

    return VllmSampler(
        EngineSettings(config.rollout_memory, config.rollout_tokens, config.rollout_sequences),
        max_difference=config.rollout_difference,
        micro_batch_tokens=config.micro_batch_tokens,
    )


def _top_k(config: RunConfig, base: AdaptedModel) -> int:
    """The configured top-k, or the checkpoint's own where none is configured."""
    if config.top_k is not None:
        return config.top_k
    return getattr(base.loaded.model.generation_config, "top_k", None) or 0


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
    if (finished := _finished_run(config, out_dir)) is not None:
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


def _finished_run(config: RunConfig, out_dir: Path) -> RunResult | None:
    """What `out_dir` holds, if it is the whole and undamaged result of this configuration, code, tasks and weights."""
    try:
        manifest = verify_job(out_dir)
        if manifest["parameters"] != as_plain(asdict(config)):
            return None
        if changed_inputs(manifest.get("inputs"), Inputs().of(config)):
            return None
        return RunResult(out_dir, read_metrics(out_dir / METRICS_FILE), read_evaluation(out_dir / EVALUATION_FILE))
    except ResultError:
        return None


class _Run:
    """State of one run: what a checkpoint holds, and the steps of the loop."""

    def __init__(self, config: RunConfig, team: Team, out_dir: Path):
        self.config, self.team, self.out_dir = config, team, out_dir
        self.inputs = Inputs().of(config)
        self.policy, self.domain = team.policy, team.domain
        self.tasks_by_id = {task.id: task for task in [*team.train_tasks, *team.eval_tasks]}
        self.optimizer = TeamOptimizer(team.policy, config)
        self.buffer = ReplayBuffer(
            config.buffer, decay=config.buffer_decay, delay=config.buffer_delay, size=config.buffer_size
        )
        self.metrics: list[MetricRow] = []
        self.evaluation: list[EvaluationRow] = []
        self.examples: dict[str, list[dict]] = {}
        self.counts = {
            "env_steps": 0,
            "agent_samples": 0,
            "comparator_samples": 0,
            "reward_model_samples": 0,
            "oracle_calls": 0,
            "sampled_tokens": 0,
        }
        self.finished = 0
        self.seconds = 0.0
        self._started = time.monotonic()
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
            self._record_preferences(iteration, agents, others, selected, ties)
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
            self._trained(iteration, update(self.policy, self.optimizer, training_set, stream, config))
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
        self._trained(iteration, metrics)

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
        self._rows(iteration + 1, {f"reward_model/{name}": value for name, value in asdict(report).items()})
        self._rows(iteration + 1, {"reward_model/cut_texts": model.cut_parts})
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
        samples = min(config.eval_samples, most or config.eval_samples)
        by_task, played = evaluate(
            self.policy,
            self.team.eval_tasks,
            samples,
            Stream(config.seed, "evaluate"),
            temperature=config.eval_temperature,
        )
        self.evaluation += [
            EvaluationRow(task_id, finished, name, value)
            for task_id, measured in by_task.items()
            for name, value in measured.items()
        ]
        if not config.trains:
            self._count_answers(played)
        names = dict.fromkeys(name for measured in by_task.values() for name in measured)
        means = {name: _mean([measured[name] for measured in by_task.values() if name in measured]) for name in names}
        self._rows(finished, means)
        if self._reward_model is not None:  # beside the oracle's, so that over-optimisation is visible
            self._rows(finished, {"reward_model/evaluation_reward": float(self._reward_model.scores(played).mean())})
        self._rows(finished, {f"count/{name}": float(count) for name, count in self.counts.items()})
        self._rows(finished, {f"rollouts/{name}": value for name, value in self.team.sampler.report().items()})
        shown = played[::samples][:8]
        self.examples[str(finished)] = [
            {"task": t.task_id, "responses": t.responses, "reward": t.total_return} for t in shown
        ]

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _stream(self, purpose: str, iteration: int) -> Stream:
        return Stream(self.config.seed, purpose, iteration=iteration)

    def _count(self, played: Sequence[Sequence[Trajectory]], name: str) -> None:
        trajectories = [trajectory for group in played for trajectory in group]
        self.counts[name] += len(trajectories)
        self.counts["oracle_calls"] += len(trajectories)
        self.counts["sampled_tokens"] += _tokens(trajectories)

    def _count_answers(self, played: Sequence[Trajectory]) -> None:
        """What a method that trains nothing plays at all: its answers at evaluation, drafts included."""
        self.counts["agent_samples"] += sum(len(trajectory.actions) for trajectory in played)
        self.counts["oracle_calls"] += len(played)
        self.counts["sampled_tokens"] += _tokens(played)

    def _trained(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.counts["env_steps"] += int(metrics["samples"]) * self.domain.horizon
        counted = ("samples", "sampled_tokens")
        self._rows(iteration + 1, {f"train/{name}": value for name, value in metrics.items() if name not in counted})

    def _record_preferences(
        self, iteration: int, agents, others, selected: Sequence[PreferencePair], ties: int
    ) -> None:
        """What was collected, and where one writes for all, the share of texts without a section, agent by agent."""
        diversity = pair_diversity(selected).values()
        empty = [not any(text.strip() for text in t.responses[-1]) for group in others for t in group]
        unparsed = Averages()
        for side, structure, groups in (
            ("agent", self.config.agents_structure, agents),
            ("comparator", self.config.comparator_structure, others),
        ):
            if structure in SHARED_WRITERS:
                for trajectory in (trajectory for group in groups for trajectory in group):
                    unparsed.add({f"{side}_{name}": value for name, value in _unparsed(trajectory).items()})
        self._rows(
            iteration + 1,
            {
                "preferences/ties": float(ties),
                "preferences/pairs": float(len(selected)),
                "preferences/agent_wins": _mean([float(pair.winner_is_agent) for pair in selected]),
                "preferences/winner_return": _mean([pair.winner.total_return for pair in selected]),
                "preferences/gap": _mean([pair.gap for pair in selected]),
                "preferences/distinct_winners": _mean([d.winners for d in diversity]),
                "preferences/distinct_losers": _mean([d.losers for d in diversity]),
                "preferences/agent_reward": _mean([t.total_return for group in agents for t in group]),
                "preferences/comparator_reward": _mean([t.total_return for group in others for t in group]),
                "preferences/comparator_empty": _mean([float(e) for e in empty]),
                **{f"preferences/{name}": value for name, value in unparsed.means().items()},
            },
        )

    def _rows(self, finished: int, values: Mapping[str, float]) -> None:
        c = self.config
        settings = {"decay": f" {c.buffer_decay:g}", "delay": f" {c.buffer_delay}"}
        buffer = c.buffer + settings.get(c.buffer, "")
        comparator, buffer = (c.comparator, buffer) if c.learns_from_preferences else ("none", "none")
        self.metrics += [
            MetricRow(
                c.experiment,
                c.profile,
                c.domain,
                c.method,
                c.paradigm,
                comparator,
                buffer,
                c.seed,
                finished,
                self.counts["env_steps"],
                name,
                float(value),
            )
            for name, value in values.items()
        ]

    def checkpoint(self) -> None:
        """Write everything the next iteration needs under a temporary name, then put it in place of the last one."""
        self.seconds += time.monotonic() - self._started
        self._started = time.monotonic()
        state = {
            "parameters": as_plain(asdict(self.config)),
            "arithmetic": self._arithmetic(),
            "inputs": self.inputs,
            "finished": self.finished,
            "seconds": self.seconds,
            "counts": self.counts,
            "metrics": [list(asdict(row).values()) for row in self.metrics],
            "evaluation": [list(asdict(row).values()) for row in self.evaluation],
            "examples": self.examples,
            "adapters": self.policy.snapshot(),
            "optimizer": self.optimizer.state(),
            "comparator": self.team.comparator.state() if self.team.comparator else None,
            "endpoint": self.team.endpoint.state() if self.team.endpoint else None,
            "buffer": json.dumps(self.buffer.state_dict()),
            "reward_model": self._reward_model.scalar.state() if self._reward_model else None,
        }
        self.out_dir.mkdir(parents=True, exist_ok=True)
        temporary = self.out_dir / "checkpoint.pt.tmp"
        try:
            torch.save(state, temporary)
            temporary.replace(self.out_dir / "checkpoint.pt")
        except BaseException:
            temporary.unlink(missing_ok=True)  # on a full disk a fragment would keep the space that others need
            raise
        steps = self.config.iterations if self.config.trains else 0
        write_progress(
            self.out_dir,
            iteration=self.finished,
            iterations=steps,
            parameters=state["parameters"],
            inputs=self.inputs,
        )

    def _arithmetic(self) -> str:
        """Kind of device and dtype: a run that changes them in the middle is neither the one nor the other."""
        base = self.policy.members[0].base
        return f"{base.device.type}, {base.loaded.dtype}"

    def remove_checkpoint(self) -> None:
        for name in ("checkpoint.pt", "checkpoint.pt.tmp", PROGRESS_FILE):
            (self.out_dir / name).unlink(missing_ok=True)

    def resume(self) -> None:
        """Continue from the checkpoint in `out_dir`, if there is one; refuse one that was made from something else."""
        path = self.out_dir / "checkpoint.pt"
        if not path.is_file():
            return
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise RuntimeError(f"{path} cannot be read ({error}); delete it to start this run afresh") from error
        changes = changed_inputs(state.get("inputs"), self.inputs)
        if "parameters" in state:
            changes += changed_parameters(state["parameters"], as_plain(asdict(self.config)))
        if state.get("arithmetic") != self._arithmetic():
            changes.append(f"it was made on {state.get('arithmetic')}, this is {self._arithmetic()}")
        if changes:
            raise RuntimeError(
                f"{path} belongs to another configuration or code ({'; '.join(changes)}); delete it, or choose another "
                "results folder"
            )
        self.finished, self.seconds, self.counts = state["finished"], state["seconds"], state["counts"]
        self.metrics = [MetricRow(*row) for row in state["metrics"]]
        self.evaluation = [EvaluationRow(*row) for row in state["evaluation"]]
        self.examples = state["examples"]
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

    def finish(self) -> RunResult:
        config, out_dir = self.config, self.out_dir
        write_metrics(out_dir / METRICS_FILE, self.metrics)
        write_evaluation(out_dir / EVALUATION_FILE, self.evaluation)
        files = [METRICS_FILE, EVALUATION_FILE, "examples.json"]
        write_atomically(out_dir / "examples.json", json.dumps(self.examples, indent=1, ensure_ascii=False))
        if config.trains:
            shutil.rmtree(out_dir / "adapters", ignore_errors=True)
            self.policy.save(out_dir / "adapters")
            files.append("adapters")
        refused = {
            task_id: reason for found in getattr(self.domain, "refused", {}).values() for task_id, reason in found
        }
        write_manifest(
            out_dir / MANIFEST_FILE,
            files=files,
            parameters=asdict(config),
            inputs=self.inputs,
            task_source=config.source,
            task_counts={"train": len(self.team.train_tasks), "eval": len(self.team.eval_tasks)},
            refused_tasks=refused,
            model="; ".join(f"{name}: {about['origin']}" for name, about in self.team.models.items()),
            device=str(self.policy.members[0].base.device),
            seconds=self.seconds,
            notes={
                "models": self.team.models,
                "top_k": [member.settings.top_k for member in self.policy.members],
                **({"endpoint": self.team.endpoint.record()} if self.team.endpoint else {}),
                **self.domain.provenance(config.source),
            },
        )
        self.remove_checkpoint()
        return RunResult(out_dir, self.metrics, self.evaluation)


def _tokens(played: Sequence[Trajectory]) -> int:
    return sum(action.num_chosen for trajectory in played for turn in trajectory.actions for action in turn)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
