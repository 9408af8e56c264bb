"""The baselines of Table 1 that are no team learning together (paper, section 5.2).

Test-time teams of untrained agents: sequential (agent i reads the finished answers of the agents before it) and
discussion (one exchange of drafts, then revision); a team whose agents answer in parallel is `JointPolicy` itself.

A single agent of about the team's joint size that answers the whole task: GRPO and DPO as TRL implements them. The
trainers work on this project's own adapter and optimiser, so that LoRA settings, resuming and evaluation are those of
every other method. TRL gets sampled token ids, never texts to encode again, and its files go to a temporary folder.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mapl_core.buffers import PreferencePair, Response, Trajectory
from mapl_core.domains.base import Task
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.seeding import Stream, global_states_kept
from mapl_core.updates import Averages, RewardFunction, TeamOptimizer, group_metrics, numbered_stream

if TYPE_CHECKING:
    from transformers import Trainer

Episode = tuple[Task, int]  # a task and which of its samples

# What TRL logs, by the names that the project's own losses give to the same quantities.
DPO_METRICS = {
    "loss": "loss",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "grad_norm": "gradient_norm_single",
}
GRPO_METRICS = {
    "loss": "loss",
    "frac_reward_zero_std": "tied_groups",
    "clip_ratio/region_mean": "clip_fraction",
    "grad_norm": "gradient_norm_single",
}


# ---------------------------------------------------------------------------------------------------------------------
# Test-time teams
# ---------------------------------------------------------------------------------------------------------------------


class TalkingTeam(JointPolicy):
    """Agents that read each other, on the random numbers of a parallel team: equal prompts get equal answers."""

    def _answers(
        self,
        agent: int,
        episodes: Sequence[Episode],
        prompts: Sequence[str],
        turn: int,
        stream: Stream,
        temperature: float | None,
    ) -> list[Response]:
        """What one agent writes in every episode, from its prompts."""
        member = self.members[agent]
        settings = member.settings if temperature is None else replace(member.settings, temperature=temperature)
        asked = {(text, task.id): task for text, (task, _) in zip(prompts, episodes, strict=True)}
        ids = {key: self.encode(member, key[0], task) for key, task in asked.items()}  # samples often share a prompt
        return self._respond(
            member,
            [ids[text, task.id] for text, (task, _) in zip(prompts, episodes, strict=True)],
            [self.domain.skeleton(agent, task) for task, _ in episodes],
            [f"{task.id}/turn{turn}/sample{sample}" for task, sample in episodes],
            settings,
            stream.for_agent(agent),
            member.adapter if self.trained else None,
        )

    def _scored(
        self, task: Task, actions: Sequence[tuple[Response, ...]], texts: Sequence[Sequence[str]]
    ) -> Trajectory:
        """The trajectory of one answer of one or more turns: the oracle is given the last one, the others earn 0."""
        reward, earlier = self.domain.reward(list(texts[-1]), task), len(actions) - 1
        rewards, parts = (0.0,) * earlier + (reward.total,), ({},) * earlier + (reward.parts,)
        return Trajectory(task.id, tuple(actions), tuple(map(tuple, texts)), rewards, parts)


class SequentialTeam(TalkingTeam):
    """Agents that answer one after another: agent i reads its own prompt and the answers of agents 0 .. i - 1."""

    def sample(
        self, tasks: Sequence[Task], samples: int, stream: Stream, *, temperature: float | None = None
    ) -> list[list[Trajectory]]:
        """Play every task `samples` times; agent 0 writes what it would write in a parallel team.

        Returns:
            For each task the list of its trajectories of one turn.
        """
        episodes = [(task, sample) for task in tasks for sample in range(samples)]
        columns: list[list[Response]] = []
        parts: list[list[str]] = [[] for _ in episodes]
        for agent in range(self.domain.num_agents):
            prompts = [
                self.domain.sequential_prompt(agent, task, earlier)
                for (task, _), earlier in zip(episodes, parts, strict=True)
            ]
            columns.append(self._answers(agent, episodes, prompts, 0, stream, temperature))
            for own, response in zip(parts, columns[-1], strict=True):
                # A text in a coordinator's form is read as one; without the agent's tag all of it is the agent's part.
                own.append(self.domain.split_joint(response.text)[agent] or response.text)
        played = [
            self._scored(task, [acted], [texts])
            for (task, _), acted, texts in zip(episodes, zip(*columns, strict=True), parts, strict=True)
        ]
        return [played[start : start + samples] for start in range(0, len(played), samples)]


class DiscussionTeam(TalkingTeam):
    """Agents that exchange drafts once: everyone reads the others' drafts and its own, then writes the final answer."""

    def sample(
        self, tasks: Sequence[Task], samples: int, stream: Stream, *, temperature: float | None = None
    ) -> list[list[Trajectory]]:
        """Play every task `samples` times; the drafts are what a parallel team would answer.

        Returns:
            For each task the list of its trajectories of two turns, drafts and revisions.
        """
        episodes = [(task, sample) for task in tasks for sample in range(samples)]
        asked = [self.domain.prompts(task) for task, _ in episodes]
        drafts = self._turn(episodes, asked, 0, stream, temperature)
        texts = [[response.text for response in acted] for acted in drafts]
        asked = [self.domain.discussion_prompts(task, own) for (task, _), own in zip(episodes, texts, strict=True)]
        finals = self._turn(episodes, asked, 1, stream, temperature)
        played = [
            self._scored(task, [draft, final], [text, [response.text for response in final]])
            for (task, _), draft, final, text in zip(episodes, drafts, finals, texts, strict=True)
        ]
        return [played[start : start + samples] for start in range(0, len(played), samples)]

    def _turn(
        self,
        episodes: Sequence[Episode],
        prompts: Sequence[Sequence[str]],
        turn: int,
        stream: Stream,
        temperature: float | None,
    ) -> list[tuple[Response, ...]]:
        """What all agents write in every episode, from their [episode][agent] prompts."""
        columns = [
            self._answers(agent, episodes, [texts[agent] for texts in prompts], turn, stream, temperature)
            for agent in range(self.domain.num_agents)
        ]
        return list(zip(*columns, strict=True))


TEST_TIME_TEAMS = {"sequential": SequentialTeam, "discussion": DiscussionTeam}


# ---------------------------------------------------------------------------------------------------------------------
# A single agent, trained by TRL
# ---------------------------------------------------------------------------------------------------------------------


def update_grpo(
    policy: JointPolicy,
    optimizer: TeamOptimizer,
    tasks: Sequence[Task],
    reward: RewardFunction,
    stream: Stream,
    config: RunConfig,
) -> dict[str, float]:
    """GRPO of the single agent, by TRL's GRPOTrainer, on fresh groups of answers to every task.

    The loss is TRL's "grpo": the clipped ratio of each token, averaged over the tokens of an answer, then over answers.
    It divides logits by the sampling temperature. The answers are drawn by this project's sampler, keyed as in
    `update_magrpo`, and scored in the form of a coordinator.

    Args:
        reward: what the agent is trained on.

    Returns:
        Mean metrics over the steps, `samples` (joint responses trained on) and `sampled_tokens`.

    Raises:
        FloatingPointError: if the loss stops being finite.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    by_id = {task.id: task for task in tasks}
    averages, drawn = Averages(), []  # all trajectories trained on

    def roll_out(task_ids: Sequence[str], trainer: Trainer) -> dict[str, list]:
        batch = [by_id[name] for name in dict.fromkeys(task_ids)]  # TRL repeats each of them G times
        fresh = numbered_stream(stream, 0, trainer.state.global_step)
        trajectories = [t for group in policy.sample(batch, config.num_generations, fresh) for t in group]
        returns = reward(trajectories).sum(dim=1)
        averages.add(group_metrics(returns.view(len(batch), -1), trajectories), len(batch))
        drawn.extend(trajectories)
        answers = [t.actions[0][0] for t in trajectories]
        return {
            "prompt_ids": [list(answer.prompt_ids) for answer in answers],
            "completion_ids": [list(answer.token_ids) for answer in answers],
            "env_mask": [scored_tokens(answer) for answer in answers],
            "logprobs": None,  # of the sampler; TRL takes its own, as the weights are the same
            "training_reward": returns.tolist(),
        }

    def training_reward(training_reward: list[float], **_: Any) -> list[float]:
        return training_reward

    base, limit = policy.members[0].base, policy.members[0].settings.max_new_tokens
    # TRL leaves an incomplete last batch out; batches of one size keep the budget that of the other methods.
    rows = largest_divisor(len(tasks), at_most=config.batch_size) * config.num_generations
    prompts = [policy.encode(policy.members[0], policy.domain.single_prompt(task), task) for task in tasks]
    longest = limit + max(map(len, prompts))
    per_pass = largest_divisor(rows, at_most=max(1, config.micro_batch_tokens // longest))
    with _trl_settings(stream, config) as common:
        arguments = GRPOConfig(
            **common,
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=rows // per_pass,
            steps_per_generation=rows // per_pass,
            loss_type="grpo",
            scale_rewards="group" if config.normalize == "mean_std" else "none",
            beta=0.0,
            epsilon=config.clip_ratio,
            num_iterations=config.passes,
            num_generations=config.num_generations,
            max_completion_length=limit,
            temperature=config.temperature,
            disable_dropout=True,
        )
        trainer = GRPOTrainer(
            base.model,
            [training_reward],
            arguments,
            Dataset.from_list([{"prompt": task.id} for task in tasks]),
            processing_class=base.tokenizer,
            optimizers=(optimizer.optimizers[0], None),
            rollout_func=roll_out,
        )
        logged = _train(trainer, policy)
    tokens = float(policy.lengths(drawn).sum())
    return averages.means() | _renamed(logged, GRPO_METRICS) | {"samples": float(len(drawn)), "sampled_tokens": tokens}


def update_dpo(
    policy: JointPolicy, optimizer: TeamOptimizer, pairs: Sequence[PreferencePair], stream: Stream, config: RunConfig
) -> dict[str, float]:
    """DPO of the single agent, by TRL's DPOTrainer, on a training set of pairs; the reference is the base.

    Returns:
        Mean metrics over the steps and `samples` (joint responses trained on).

    Raises:
        FloatingPointError: if the loss stops being finite.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    class PairTrainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset  # the pairs are token ids already, as they were sampled

    def row(pair: PreferencePair) -> dict[str, list[int]]:
        winner, loser = pair.winner.actions[0][0], pair.loser.actions[0][0]
        ids = {"prompt_ids": winner.prompt_ids, "chosen_ids": winner.token_ids, "rejected_ids": loser.token_ids}
        scored = {"chosen_scored": scored_tokens(winner), "rejected_scored": scored_tokens(loser)}
        return {name: list(values) for name, values in (ids | scored).items()}

    base, rows = policy.members[0].base, [row(pair) for pair in pairs]
    padded = DataCollatorForPreference(pad_token_id=base.tokenizer.pad_token_id)

    def collate(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        """TRL's batch, winners before losers, without the tokens that decoding forced."""
        batch = padded(list(examples))
        masks = [example[f"{side}_scored"] for side in ("chosen", "rejected") for example in examples]
        for number, (scored, example) in enumerate(zip(masks, [*examples, *examples], strict=True)):
            start = len(example["prompt_ids"])
            batch["completion_mask"][number, start : start + len(scored)] = torch.tensor(scored)
        return batch

    longest = max(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in rows)
    per_pass = largest_divisor(config.batch_size, at_most=max(1, config.micro_batch_tokens // (2 * longest)))
    with _trl_settings(stream, config) as common:
        arguments = DPOConfig(
            **common,
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=config.batch_size // per_pass,
            loss_type=["sigmoid"],
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            max_length=None,
            disable_dropout=True,
            remove_unused_columns=False,  # the collator reads them
        )
        # Given an adapter without a reference model, TRL would copy the adapter as it is now: the reference would move
        # from iteration to iteration. Without either, it takes the base with the adapter off.
        trainer = PairTrainer(
            base.model,
            torch.nn.Identity(),
            arguments,
            data_collator=collate,
            train_dataset=Dataset.from_list(rows),
            processing_class=base.tokenizer,
            optimizers=(optimizer.optimizers[0], None),
        )
        trainer.ref_model = None
        logged = _train(trainer, policy)
    return _renamed(logged, DPO_METRICS) | {"samples": float(2 * len(pairs) * config.epochs)}


def scored_tokens(answer: Response) -> list[int]:
    """1 for each token that log-probabilities count, 0 for those that constrained decoding forced."""
    forced = set(answer.forced)
    return [int(position not in forced) for position in range(len(answer.token_ids))]


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`."""
    return max(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)


@contextlib.contextmanager
def _trl_settings(stream: Stream, config: RunConfig) -> Iterator[dict[str, Any]]:
    """What all of TRL's trainers are given: this project's optimisation, one seed, no reports, no files that stay.

    TRL seeds and uses the global random states, and tells the hub which of its trainers is at work on what kind of
    model. Inside the body the states are its own, afterwards what they were before, and nothing is told.
    """
    from huggingface_hub import constants

    seed = stream.generator().initial_seed() % 2**31
    telemetry_off = constants.HF_HUB_DISABLE_TELEMETRY
    with (
        tempfile.TemporaryDirectory(prefix="mapl-trl-") as folder,
        global_states_kept(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        constants.HF_HUB_DISABLE_TELEMETRY = True
        try:
            yield {
                "output_dir": folder,
                "seed": seed,
                "num_train_epochs": config.epochs,
                "learning_rate": config.learning_rate,
                "weight_decay": config.weight_decay,
                "max_grad_norm": config.max_grad_norm,
                "lr_scheduler_type": "constant",
                "use_cpu": not torch.cuda.is_available(),
                "bf16": False,  # weights have their dtype already, adapters are float32
                "gradient_checkpointing": False,  # AdaptedModel has switched it on where the profile asks for it
                "dataloader_pin_memory": False,
                "logging_steps": 1,
                "logging_nan_inf_filter": False,
                "save_strategy": "no",
                "report_to": "none",
                "push_to_hub": False,
                "disable_tqdm": True,
            }
        finally:
            constants.HF_HUB_DISABLE_TELEMETRY = telemetry_off


def _train(trainer: Trainer, policy: JointPolicy) -> list[Mapping[str, float]]:
    """Run a TRL trainer to its end without a word; what it logged at each step."""
    from transformers import PrinterCallback

    base = policy.members[0].base
    trainer.remove_callback(PrinterCallback)
    with base.using(policy.members[0].adapter):
        trainer.train()
    base.loaded.model.train(base.gradient_checkpointing)
    steps = [step for step in trainer.state.log_history if "loss" in step]
    if not all(math.isfinite(step["loss"]) for step in steps):
        raise FloatingPointError(
            f"the loss of {type(trainer).__name__} is not finite from step "
            f"{next(step['step'] for step in steps if not math.isfinite(step['loss']))} on. Lower the learning rate"
        )
    return steps


def _renamed(steps: Sequence[Mapping[str, float | None]], names: Mapping[str, str]) -> dict[str, float]:
    """Means of what TRL logged, under the project's names, over the steps that logged it: where several steps share
    their answers, rewards are logged once."""
    found = {ours: [step[theirs] for step in steps if step.get(theirs) is not None] for theirs, ours in names.items()}
    return {name: math.fsum(values) / len(values) for name, values in found.items() if values}
