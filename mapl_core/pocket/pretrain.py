"""Trains a pocket base from scratch: next-token loss on the scripted answers, minutes on one core."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mapl_core.tokens import encode_prompt, encode_response

CHAT_SHARE = 0.75  # of the examples are written in the chat template, the rest as plain text
SORTED_BATCHES = 16  # batches that are cut from one run of examples sorted by length, so that little is padded


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a base learns.

    Attributes:
        steps: optimiser steps.
        batch: examples a step.
        learning_rate: its peak; linear warm-up, then a cosine down to a twentieth.
        warmup: steps of the warm-up.
        prompt_weight: weight of the prompts' tokens beside the responses'.
        seed: of the initial weights and of the corpus.
    """

    steps: int
    batch: int = 32
    learning_rate: float = 2e-3
    warmup: int = 60
    prompt_weight: float = 0.3
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of the scripted answer to it, closed by the end token."""

    prompt: list[int]
    response: list[int]


def examples(
    write: Callable[[random.Random], tuple[str, str]], tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[Example]:
    """An endless corpus from a domain's `write_example`, in the chat template or as plain text."""
    rng = random.Random(f"mapl pocket corpus {seed}")
    while True:
        prompt, response = write(rng)
        form = "chat" if rng.random() < CHAT_SHARE else "text"
        yield Example(encode_prompt(tokenizer, prompt, form), encode_response(tokenizer, response))


def batches(corpus: Iterator[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches of examples of similar length, in random order."""
    while True:
        pool = [next(corpus) for _ in range(size * SORTED_BATCHES)]
        pool.sort(key=lambda example: len(example.prompt) + len(example.response))
        groups = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(groups)
        yield from groups


def corpus_loss(model: PreTrainedModel, batch: list[Example], pad_id: int, prompt_weight: float = 0.0) -> Tensor:
    """Mean negative log-likelihood of the response tokens of a batch, end token included.

    Args:
        model, batch, pad_id: what is scored.
        prompt_weight: adds so many times the mean over the prompts' tokens. A post repeats its fillers, so its tokens
            teach copying as well, at no further cost.
    """
    length = max(len(example.prompt) + len(example.response) for example in batch)
    ids = torch.full((len(batch), length), pad_id)
    kind = torch.zeros(len(batch), length, dtype=torch.long)  # 0 padding, 1 prompt, 2 response
    for row, example in enumerate(batch):
        start, end = len(example.prompt), len(example.prompt) + len(example.response)
        ids[row, :end] = torch.tensor(example.prompt + example.response)
        kind[row, :start], kind[row, start:end] = 1, 2
    # Causal attention with padding on the right: no scored position can see it, so no mask is needed.
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    ids, kind = ids[:, 1:], kind[:, 1:]

    def mean_loss(scored: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]).float(), ids[scored])

    loss = mean_loss(kind == 2)
    return loss + prompt_weight * mean_loss(kind == 1) if prompt_weight else loss


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at a step."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def pretrain(
    model: PreTrainedModel,
    corpus: Iterator[Example],
    recipe: Recipe,
    pad_id: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[list[float], float]:
    """Train a model in place.

    Args:
        model: a causal language model in float32.
        corpus: endless examples.
        recipe: steps, batch, learning rate, seed.
        pad_id: id of the padding token.
        report: called with step and loss after every step.

    Returns:
        the losses of all steps in nats per response token, and the seconds taken.

    Raises:
        FloatingPointError: if a loss is not finite.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe))
    stream = batches(corpus, recipe.batch, random.Random(f"mapl pocket batches {recipe.seed}"))
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step in range(recipe.steps):
        loss = corpus_loss(model, next(stream), pad_id, recipe.prompt_weight)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} at step {step}; lower learning_rate={recipe.learning_rate}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        report(step, losses[-1])
    model.eval()
    return losses, time.perf_counter() - started
