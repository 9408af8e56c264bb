"""The joint reward model r_phi of MARLHF: one Bradley-Terry score for a whole team's answer (paper, section 4.2)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import PreferencePair, Trajectory, pairs_by_task
from mapl_core.domains.base import Domain, Task, Turn
from mapl_core.losses import bradley_terry_loss
from mapl_core.rewards import Reward
from mapl_core.scoring import Ids, Item, ScalarModel
from mapl_core.seeding import Stream


class RewardModel:
    """Scores joint histories, whatever structure produced them: in agent order, each agent's role and response.

    The task's shared text stands once in front and is computed once for all answers to the task. If a text is too long,
    every agent's part is cut to its share of what the task text leaves, never only the last one; `cut_parts` counts.

    Args:
        domain: gives the texts.
        tasks: the tasks that trajectories may belong to, by id.
        adapted: the base; the model adds an adapter of its own, fresh from `stream`, with a fresh scalar head.
        stream: source of the initial weights.
        max_text_tokens: limit on one joint text.
        micro_batch_tokens: bound on the padded tokens of one forward pass.
    """

    def __init__(
        self,
        domain: Domain,
        tasks: Mapping[str, Task],
        adapted: AdaptedModel,
        stream: Stream,
        *,
        max_text_tokens: int,
        micro_batch_tokens: int,
        name: str = "reward_model",
    ):
        self.domain, self.tasks, self.tokenizer = domain, tasks, adapted.tokenizer
        self.max_text_tokens = max_text_tokens
        self.scalar = ScalarModel(adapted, name, stream, max_tokens=micro_batch_tokens)
        self.cut_parts = 0

    def scores(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """(B,) learned rewards, on the Bradley-Terry scale: differences of two scores are log odds."""
        return self.scalar.values([self.item(trajectory) for trajectory in trajectories])

    def item(self, trajectory: Trajectory) -> Item:
        """The joint text as (ids of the task text, ids of everything else)."""
        task = self.tasks[trajectory.task_id]
        shared = self._encode(self.domain.task_text(task) + "\n")
        parts: list[Ids] = []
        roles: list[int] = []  # how many tokens of each part are the agent's role
        history: list[Turn] = []
        for texts, reward, components in zip(trajectory.responses, trajectory.rewards, trajectory.parts, strict=True):
            for agent, text in enumerate(texts):
                role = self.domain.role_text(agent, task, history)
                parts.append(self._encode(f"{role}\n{text}\n"))
                roles.append(len(self._encode(f"{role}\n")))
            history.append(Turn(tuple(texts), Reward(reward, dict(components))))
        shared, parts = self._fit(shared, parts, roles)
        closing = (self.tokenizer.eos_token_id,)
        return Item(shared, tuple(token for part in parts for token in part) + closing)

    def _encode(self, text: str) -> Ids:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _fit(self, shared: Ids, parts: list[Ids], roles: list[int]) -> tuple[Ids, list[Ids]]:
        """Cut to the limit: the task text to no less than a half, then each part to an equal share of what is left.

        Within a part the role gives way to the answer, down to half of the share: the role, which after a turn holds
        feedback and the earlier answer, is much the same in winner and loser, the answer is what they differ in.
        """
        limit = self.max_text_tokens - 1
        needed = sum(map(len, parts))
        if len(shared) + needed <= limit:
            return shared, parts
        self.cut_parts += 1
        shared = shared[: max(1, limit // 2, limit - needed)]
        room, waiting = limit - len(shared), sorted(range(len(parts)), key=lambda i: len(parts[i]))
        fitted = list(parts)
        for position, index in enumerate(waiting):  # short parts first: what they leave over goes to the longer ones
            share = room // (len(waiting) - position)
            part, role = parts[index], roles[index]
            kept = min(role, max(share - (len(part) - role), share // 2))
            fitted[index] = (part[:kept] + part[role:])[:share]
            room -= len(fitted[index])
        return shared, fitted

    def close(self) -> None:
        """Remove the model's adapter from the base; the next iteration starts afresh."""
        self.scalar.close()


@dataclass(frozen=True)
class FitReport:
    """What a fit left behind, with counts of pairs, and samples read.

    `loss` and `train_accuracy` are those of the last epoch, of every pair before the step that it was part of.
    """

    loss: float
    train_accuracy: float
    held_out_accuracy: float
    train_pairs: int
    held_out_pairs: int
    samples: int


def split_held_out(
    pairs: Sequence[PreferencePair], generator: torch.Generator
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Split by task: a tenth of the tasks (at least one, where there are two) is held out from the fit."""
    tasks = list(dict.fromkeys(pair.task_id for pair in pairs))
    order = torch.randperm(len(tasks), generator=generator).tolist()
    count = 0 if len(tasks) < 2 else max(1, len(tasks) // 10)
    held = {tasks[index] for index in order[:count]}
    return [pair for pair in pairs if pair.task_id not in held], [pair for pair in pairs if pair.task_id in held]


def fit_reward_model(
    model: RewardModel,
    pairs: Sequence[PreferencePair],
    stream: Stream,
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    epochs: int,
    batch_size: int,
    held_out: Sequence[PreferencePair] = (),
) -> FitReport:
    """Minimise the Bradley-Terry loss on the pairs, with an optimiser of its own.

    Args:
        model: a fresh reward model.
        pairs: the buffer's training set, less held-out tasks.
        stream: source of the order; batches hold whole tasks, whose shared text is then computed once.
        learning_rate, weight_decay, max_grad_norm, epochs, batch_size: AdamW's settings; a batch is of pairs.
        held_out: pairs of tasks that are not in `pairs`, to measure accuracy on.

    Raises:
        ValueError: if there are no pairs.

    Warns:
        UserWarning: once, if texts had to be cut, with their number.
    """
    if not pairs:
        raise ValueError("no preference pairs to fit a reward model to; raise train_tasks or pairs_per_task")
    optimizer = torch.optim.AdamW(model.scalar.parameters(), lr=learning_rate, weight_decay=weight_decay)
    generator = stream.generator()
    seen: list[tuple[int, Mapping[str, float]]] = []  # of the last epoch: pairs read together, and their metrics
    read = {id(t): t for pair in [*pairs, *held_out] for t in (pair.winner, pair.loser)}
    cut_before = model.cut_parts
    items = {key: model.item(trajectory) for key, trajectory in read.items()}
    if cut := model.cut_parts - cut_before:
        warnings.warn(
            f"{cut} of {len(read)} joint texts are longer than reward_model_tokens = {model.max_text_tokens} and were "
            "cut, every agent's part to its share; raise reward_model_tokens if memory allows",
            stacklevel=2,
        )
    for _ in range(epochs):
        seen.clear()
        for batch in task_batches(pairs, batch_size, generator):
            optimizer.zero_grad()
            for part in _read_together(model, [(items[id(p.winner)], items[id(p.loser)]) for p in batch]):

                def loss_of(scores: Tensor, share: float = len(part) / len(batch), count: int = len(part)) -> Tensor:
                    loss, metrics = bradley_terry_loss(*scores.chunk(2))
                    seen.append((count, metrics))
                    return share * loss

                model.scalar.backward(list(itertools.chain(*zip(*part, strict=True))), loss_of)
            model.scalar.step(optimizer, max_grad_norm)
    accuracy = float("nan")
    if held_out:
        sides = [items[id(pair.winner)] for pair in held_out], [items[id(pair.loser)] for pair in held_out]
        winner_scores, loser_scores = model.scalar.values(list(itertools.chain(*sides))).chunk(2)
        accuracy = float((winner_scores > loser_scores).float().mean())
    loss, train_accuracy = (sum(count * m[name] for count, m in seen) / len(pairs) for name in ("loss", "accuracy"))
    return FitReport(loss, train_accuracy, accuracy, len(pairs), len(held_out), 2 * len(pairs) * epochs)


def _read_together(model: RewardModel, batch: Sequence[tuple[Item, Item]]) -> Iterator[list[tuple[Item, Item]]]:
    """The pairs of a batch in runs that one micro-batch holds. The loss is a sum over pairs, so it is read once."""
    run: list[tuple[Item, Item]] = []
    for pair in batch:
        if run and not model.scalar.fits(list(itertools.chain(*run, pair))):
            yield run
            run = []
        run.append(pair)
    yield run


def task_batches(
    pairs: Sequence[PreferencePair], batch_size: int, generator: torch.Generator
) -> list[list[PreferencePair]]:
    """Shuffled batches of whole tasks: tasks are added until a batch holds at least `batch_size` pairs."""
    by_task = pairs_by_task(pairs)
    tasks = list(by_task)
    batches: list[list[PreferencePair]] = [[]]
    for index in torch.randperm(len(tasks), generator=generator).tolist():
        if len(batches[-1]) >= batch_size:
            batches.append([])
        batches[-1].extend(by_task[tasks[index]])
    return batches
