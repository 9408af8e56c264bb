"""The record of a run: what it has measured and counted, its checkpoint, and the files that it leaves.

Nothing here learns. `mapl_core.train` holds the loop, and says what of it a checkpoint must hold.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mapl_core.buffers import PreferencePair, Trajectory, pair_diversity
from mapl_core.evaluation import unparsed
from mapl_core.inputs import Inputs, changed_inputs, changed_parameters
from mapl_core.policies import SHARED_WRITERS
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
    read_evaluation,
    read_metrics,
    verify_job,
    write_atomically,
    write_evaluation,
    write_manifest,
    write_metrics,
    write_progress,
)
from mapl_core.team import Team
from mapl_core.updates import Averages

COUNTS = ("env_steps", "agent_samples", "comparator_samples", "reward_model_samples", "oracle_calls", "sampled_tokens")


@dataclass(frozen=True)
class RunResult:
    """Where a run's files are, and its rows."""

    folder: Path
    metrics: list[MetricRow]
    evaluation: list[EvaluationRow]

    def final(self, metric: str) -> float:
        """Value of a metric at the last iteration that has it."""
        return next(row.value for row in reversed(self.metrics) if row.metric == metric)


def finished_run(config: RunConfig, out_dir: Path) -> RunResult | None:
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


class RunRecord:
    """What one run has measured, and its files.

    Attributes:
        metrics, evaluation: rows of metrics.csv and evaluation.csv.
        examples: some evaluation answers, by number of finished iterations.
        counts: joint responses trained on, played and compared, oracle calls and tokens, by the names of `COUNTS`.
        finished: number of finished iterations.
        seconds: of wall-clock time at the last checkpoint, parts before an interruption included.
    """

    def __init__(self, config: RunConfig, team: Team, out_dir: Path):
        self.config, self.team, self.out_dir = config, team, out_dir
        self.policy, self.domain = team.policy, team.domain
        self.inputs = Inputs().of(config)
        self.metrics: list[MetricRow] = []
        self.evaluation: list[EvaluationRow] = []
        self.examples: dict[str, list[dict]] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self.finished = 0
        self.seconds = 0.0
        self._started = time.monotonic()

    def learned(self) -> dict[str, Any]:
        """What has been learned so far, for a checkpoint: tensors and plain values by name."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it up again from a checkpoint, once everything else has been read from there."""
        raise NotImplementedError

    # -- rows and counts -----------------------------------------------------------------------------------------------

    def record_evaluation(
        self,
        finished: int,
        by_task: Mapping[str, Mapping[str, float]],
        played: Sequence[Trajectory],
        others: Mapping[str, float],
    ) -> None:
        """What `evaluate` measured after `finished` iterations; `others` are metrics that are no oracle's."""
        self.evaluation += [
            EvaluationRow(task_id, finished, name, value)
            for task_id, measured in by_task.items()
            for name, value in measured.items()
        ]
        if not self.config.trains:
            self._count_answers(played)
        names = dict.fromkeys(name for measured in by_task.values() for name in measured)
        means = {name: _mean([measured[name] for measured in by_task.values() if name in measured]) for name in names}
        self.add_rows(finished, means | dict(others))
        self.add_rows(finished, {f"count/{name}": float(count) for name, count in self.counts.items()})
        self.add_rows(finished, {f"rollouts/{name}": value for name, value in self.team.sampler.report().items()})
        shown = played[:: len(played) // len(by_task)][:8]  # the first answer to each of the first tasks
        self.examples[str(finished)] = [
            {"task": t.task_id, "responses": t.responses, "reward": t.total_return} for t in shown
        ]

    def count_played(self, played: Sequence[Sequence[Trajectory]], name: str) -> None:
        """What was collected: `name` says for whom, "agent_samples" or "comparator_samples"."""
        trajectories = [trajectory for group in played for trajectory in group]
        self.counts[name] += len(trajectories)
        self.counts["oracle_calls"] += len(trajectories)
        self.counts["sampled_tokens"] += tokens_of(trajectories)

    def _count_answers(self, played: Sequence[Trajectory]) -> None:
        """What a method that trains nothing plays at all: its answers at evaluation, drafts included."""
        self.counts["agent_samples"] += sum(len(trajectory.actions) for trajectory in played)
        self.counts["oracle_calls"] += len(played)
        self.counts["sampled_tokens"] += tokens_of(played)

    def record_training(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """What an update rule returned."""
        self.counts["env_steps"] += int(metrics["samples"]) * self.domain.horizon
        counted = ("samples", "sampled_tokens")
        self.add_rows(iteration + 1, {f"train/{name}": value for name, value in metrics.items() if name not in counted})

    def record_preferences(self, iteration: int, agents, others, selected: Sequence[PreferencePair], ties: int) -> None:
        """What was collected, and where one writes for all, the share of texts without a section, agent by agent."""
        diversity = pair_diversity(selected).values()
        empty = [not any(text.strip() for text in t.responses[-1]) for group in others for t in group]
        sections = Averages()
        for side, structure, groups in (
            ("agent", self.config.agents_structure, agents),
            ("comparator", self.config.comparator_structure, others),
        ):
            if structure in SHARED_WRITERS:
                for trajectory in (trajectory for group in groups for trajectory in group):
                    sections.add({f"{side}_{name}": value for name, value in unparsed(trajectory).items()})
        self.add_rows(
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
                **{f"preferences/{name}": value for name, value in sections.means().items()},
            },
        )

    def add_rows(self, finished: int, values: Mapping[str, float]) -> None:
        """Rows of metrics.csv, by name of metric, as of `finished` iterations."""
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

    # -- files ---------------------------------------------------------------------------------------------------------

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
            **self.learned(),
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
        self.restore(state)

    def finish(self) -> RunResult:
        """Write every file, the manifest last, and remove the checkpoint."""
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


def tokens_of(played: Sequence[Trajectory]) -> int:
    """Tokens that policies chose in these trajectories."""
    return sum(action.num_chosen for trajectory in played for turn in trajectory.actions for action in turn)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
