"""Trains a pocket base from scratch: next-token loss on the scripted answers, minutes on one core."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
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
        matrix_rate: peak learning rate of Muon, for the matrices of the layers.
        vector_rate: peak learning rate of AdamW, for embeddings and norms.
        warmup: steps of a linear warm-up; a cosine down to a twentieth follows.
        seed: of the initial weights and of the corpus.
        copies_at_start: begin with attention layers that copy what they look at, see `start_by_copying`.
    """

    steps: int
    batch: int = 16
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    warmup: int = 60
    seed: int = 0
    copies_at_start: bool = False


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


def response_loss(model: PreTrainedModel, batch: list[Example], pad_id: int) -> Tensor:
    """Mean negative log-likelihood of the response tokens of a batch, end token included; prompts are not scored."""
    length = max(len(example.prompt) + len(example.response) for example in batch)
    ids = torch.full((len(batch), length), pad_id)
    scored = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, example in enumerate(batch):
        end = len(example.prompt) + len(example.response)
        ids[row, :end] = torch.tensor(example.prompt + example.response)
        scored[row, len(example.prompt) : end] = True
    # Causal attention with padding on the right: no scored position can see it, so no mask is needed.
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[scored[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][scored[:, 1:]])


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at a step."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for everything else.

    Copying is learnt one kind of word after the other, and AdamW alone waits long for the rarer kinds: in the 1x model
    the verb of the post was still guessed after 900 steps of 32 examples, and copied after 500 steps of 16 with Muon.
    """
    matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=recipe.vector_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


@torch.no_grad()
def start_by_copying(model: PreTrainedModel) -> None:
    """Set the value and output weights of every attention layer so that a head adds what it looks at to the stream.

    The value weights get orthonormal rows, and the output weights of each head are the transpose of its value weights:
    the product projects on the head's subspace instead of being noise. Where an answer may take *any* of several words
    of its prompt, a random start stays on a plateau: the probability of a word rises only once attention, values and
    outputs agree. A travel base of 1x put 0.38 of its probability on the restaurants of its own catalogue after 3000
    steps from a random start (a guess has a third), and 0.86 after 500 steps from this one. (Mimetic initialisation,
    Trockman and Kolter 2023, without its query and key part.)
    """
    width = model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.base_model.layers:
        values, outputs = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        torch.nn.init.orthogonal_(values)
        by_head = values.view(-1, width, values.shape[1]).repeat_interleave(group, dim=0)
        outputs.copy_(by_head.flatten(0, 1).T)


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
    optimizers = build_optimizers(model, recipe)
    schedules = [LambdaLR(each, lambda step: learning_rate_factor(step, recipe)) for each in optimizers]
    stream = batches(corpus, recipe.batch, random.Random(f"mapl pocket batches {recipe.seed}"))
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step in range(recipe.steps):
        loss = response_loss(model, next(stream), pad_id)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} at step {step}; lower matrix_rate={recipe.matrix_rate}")
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(loss.item())
        report(step, losses[-1])
    model.eval()
    return losses, time.perf_counter() - started
