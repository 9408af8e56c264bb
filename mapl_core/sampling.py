"""Rollouts: many samples for each of many prompts, from a base model under one adapter.

A `Sampler` is a backend. `TransformersSampler`, here, runs anywhere, on the decoders of `decoders.py`; the one in
`vllm_sampling` hands the work to a vLLM engine. Both return the same `Sample`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mapl_core.adapters import AdaptedModel
from mapl_core.decoders import Decoder, DirectDecoder, TransformersDecoder
from mapl_core.domains.base import Skeleton
from mapl_core.scoring import Ids
from mapl_core.seeding import Stream
from mapl_core.structured import SkeletonState, SkeletonTokens, constrain

HEAD = 256  # candidates examined first for top-p; a row whose head holds less than top_p is looked at in more


@dataclass(frozen=True)
class SamplingSettings:
    """How a policy samples.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_p: nucleus: the smallest set of most probable tokens whose mass reaches top_p; 1.0 keeps all.
        max_new_tokens: limit on sampled tokens; a response without end of sequence by then is truncated.
        top_k: only the k most probable tokens are considered, before the nucleus; 0 for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 64
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; use 0 for greedy decoding or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; a response needs at least one token")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 for all tokens or a positive number")


@dataclass(frozen=True)
class Sample:
    """Sampled ids, the end-of-sequence id included where the model wrote one, and whether the limit cut them off.

    `forced` are the positions of ids that a skeleton left no choice about.
    """

    token_ids: Ids
    truncated: bool
    forced: Ids = ()


class Sampler:
    """A rollout backend: writes responses as a policy would, token by token."""

    def sample(
        self,
        adapted: AdaptedModel,
        adapter: str | None,
        prompts: Sequence[Ids],
        keys: Sequence[str],
        stream: Stream,
        *,
        samples: int,
        settings: SamplingSettings,
        skeletons: Sequence[Skeleton | None] | None = None,
    ) -> list[list[Sample]]:
        """Sample `samples` responses for every prompt.

        Args:
            adapted, adapter: the policy, with the weights that it has now; `adapter=None` samples the base.
            prompts: token ids of each prompt.
            keys: of the random numbers, one for each sample, prompt by prompt.
            stream: that the random numbers belong to. Equal streams, keys and weights give equal samples.
            samples: m (or G) responses for each prompt.
            skeletons: the fixed text of the answers to each prompt, None where there is none (see `structured`).

        Returns:
            For each prompt the list of its samples.

        Raises:
            ValueError: if `max_new_tokens` cannot hold the longest answer of a skeleton.
        """
        raise NotImplementedError

    def report(self) -> dict[str, float]:
        """What was measured about the samples since the last report, by name of metric."""
        return {}

    def close(self) -> None:
        """Give back what the backend holds besides the policies' own models."""


@dataclass(frozen=True)
class TransformersSampler(Sampler):
    """Samples in this process, on the weights that are trained.

    Attributes:
        cached_tokens: bound on the tokens held in the key-value cache of one decoding batch.
    """

    cached_tokens: int = 65536

    def sample(
        self,
        adapted: AdaptedModel,
        adapter: str | None,
        prompts: Sequence[Ids],
        keys: Sequence[str],
        stream: Stream,
        *,
        samples: int,
        settings: SamplingSettings,
        skeletons: Sequence[Skeleton | None] | None = None,
    ) -> list[list[Sample]]:
        """As `Sampler.sample`; a row's samples do not depend on its batch mates."""
        return sample_responses(
            adapted,
            adapter,
            prompts,
            stream.uniforms(keys, settings.max_new_tokens),
            samples=samples,
            settings=settings,
            max_cached_tokens=self.cached_tokens,
            skeletons=skeletons,
        )


def choose_tokens(logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float, top_k: int = 0) -> Tensor:
    """Sample one token a row by inverting the cumulative distribution in order of token ids.

    Id order (not order of probability) keeps the choice stable where two candidates are almost equally probable.

    Args:
        logits: (rows, vocabulary).
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        (rows,) token ids.

    Raises:
        FloatingPointError: if a row holds a NaN, or its largest logit is not finite: any choice would be garbage.
    """
    largest, ids = logits.max(dim=-1)
    if not largest.isfinite().all():
        raise FloatingPointError(
            f"{int((~largest.isfinite()).sum())} of {len(logits)} rows of logits are not finite, in {logits.dtype}; a "
            "model whose values are too large for float16 needs a GPU with bfloat16, or float32"
        )
    if temperature == 0:
        return ids
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    vocabulary = log_probs.shape[1]
    if 0 < top_k < vocabulary:
        kept, ids = log_probs.topk(top_k, dim=-1)
        return _nucleus_choice(kept.softmax(dim=-1), ids, uniforms, top_p)
    if top_p >= 1.0:
        return _invert(log_probs.exp(), uniforms)
    chosen = torch.empty(len(log_probs), dtype=torch.long, device=log_probs.device)
    waiting = torch.arange(len(log_probs), device=log_probs.device)
    for size in (HEAD, 16 * HEAD, vocabulary):  # a full sort costs as much as the forward pass: few rows need it
        probabilities, ids = log_probs[waiting].topk(min(size, vocabulary), dim=-1)
        probabilities = probabilities.exp()
        enough = (probabilities.sum(dim=-1) >= top_p) | (size >= vocabulary)
        done = waiting[enough]
        chosen[done] = _nucleus_choice(probabilities[enough], ids[enough], uniforms[done.cpu()], top_p)
        waiting = waiting[~enough]
        if not len(waiting):
            break
    return chosen


def _nucleus_choice(probabilities: Tensor, ids: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    """Choose from the nucleus of rows whose candidates come in descending order of probability."""
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0.0)
    ids, order = ids.sort(dim=-1)
    return ids.gather(1, _invert(kept.gather(1, order), uniforms)[:, None]).squeeze(1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index of the cell of the (unnormalised) cumulative weights in which each uniform falls."""
    cumulative = weights.double().cumsum(dim=-1)
    target = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max(weights.shape[1] - 1)


@torch.no_grad()
def sample_responses(
    adapted: AdaptedModel,
    adapter: str | None,
    prompts: Sequence[Ids],
    uniforms: Tensor,
    *,
    samples: int,
    settings: SamplingSettings,
    max_cached_tokens: int,
    skeletons: Sequence[Skeleton | None] | None = None,
    decoder: type[Decoder] | None = None,
) -> list[list[Sample]]:
    """Sample `samples` responses for every prompt.

    Args:
        adapted, adapter: the policy; `adapter=None` samples the base (adapters off).
        prompts: token ids of each prompt; prompts of like length are decoded together.
        uniforms: (len(prompts) * samples, max_new_tokens), prompt by prompt, from `Stream.uniforms`.
        samples: m (or G) responses for each prompt.
        max_cached_tokens: bound on the tokens held in the key-value cache of one decoding batch: each prompt once, and
            max_new_tokens for each of its samples.
        skeletons: the fixed text of the answers to each prompt, None where there is none (see `structured`).
        decoder: the decoder class; by default the direct one where it knows the architecture.

    Returns:
        For each prompt the list of its samples.

    Raises:
        ValueError: if `max_new_tokens` cannot hold the longest answer of a skeleton.
    """
    fixed = skeleton_tokens(adapted, skeletons or [None] * len(prompts), settings)
    decoder = decoder or (DirectDecoder if DirectDecoder.supports(adapted) else TransformersDecoder)
    results: list[list[Sample]] = [[] for _ in prompts]
    weights = decoder.prepare(adapted, adapter)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batch: list[tuple[int, int]] = []  # (prompt, sample) rows of the batch being filled
    held = 0
    for index in order:
        for sample in range(samples):
            cost = settings.max_new_tokens + (len(prompts[index]) if not batch or batch[-1][0] != index else 0)
            if batch and held + cost > max_cached_tokens:
                _decode(decoder(weights, prompts, batch), batch, uniforms, samples, settings, adapted, fixed, results)
                batch, held = [], 0
                cost = settings.max_new_tokens + len(prompts[index])
            batch.append((index, sample))
            held += cost
    if batch:
        _decode(decoder(weights, prompts, batch), batch, uniforms, samples, settings, adapted, fixed, results)
    return results


def skeleton_tokens(
    adapted: AdaptedModel, skeletons: Sequence[Skeleton | None], settings: SamplingSettings
) -> list[SkeletonTokens | None]:
    """The skeletons in the model's tokens.

    Raises:
        ValueError: if `max_new_tokens` cannot hold the longest answer of one.
    """
    fixed = [skeleton and SkeletonTokens.of(skeleton, adapted.tokenizer) for skeleton in skeletons]
    longest = max((tokens.longest for tokens in fixed if tokens), default=0)
    if longest > settings.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {settings.max_new_tokens}, and an answer with its fixed text takes up to {longest} "
            "tokens; raise it, or switch the domain's option `structured` off"
        )
    return fixed


def _decode(
    decoder: Decoder,
    batch: list[tuple[int, int]],
    uniforms: Tensor,
    samples: int,
    settings: SamplingSettings,
    adapted: AdaptedModel,
    fixed: Sequence[SkeletonTokens | None],
    results: list[list[Sample]],
) -> None:
    """The decoding loop of one batch. A row that ends is set aside at once and leaves the batch soon after."""
    stop = torch.tensor(sorted(adapted.stop_ids), device=adapted.device)
    draws = uniforms[[prompt * samples + sample for prompt, sample in batch]]
    order = list(dict.fromkeys(prompt for prompt, _ in batch))
    slot = {prompt: position for position, prompt in enumerate(order)}
    prompt_of_row = torch.tensor([slot[prompt] for prompt, _ in batch], device=adapted.device)
    logits = decoder.prefill()[prompt_of_row]
    decoder.start(prompt_of_row, settings.max_new_tokens)
    written = torch.zeros((len(batch), settings.max_new_tokens), dtype=torch.long)
    lengths = torch.full((len(batch),), settings.max_new_tokens)
    ended = torch.zeros(len(batch), dtype=torch.bool)
    rows = torch.arange(len(batch))  # which of the batch's rows the decoder still holds
    states = [fixed[prompt] and SkeletonState(fixed[prompt]) for prompt, _ in batch]
    constrained = any(states)
    for step in range(settings.max_new_tokens):
        if constrained:
            logits = constrain(logits, [None if ended[row] else states[row] for row in rows])
        tokens = choose_tokens(
            logits, draws[rows, step], temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k
        )
        written[rows, step] = tokens.cpu()
        if constrained:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if states[row] and not ended[row]:
                    states[row].advance(token)
        stops = torch.isin(tokens, stop).cpu() & ~ended[rows]
        ended[rows[stops]] = True
        lengths[rows[stops]] = step + 1
        alive = ~ended[rows]
        if not alive.any() or step + 1 == settings.max_new_tokens:
            break
        # Copying the cache costs about as much as a step, so rows leave in groups of at least a fifth.
        if int(alive.sum()) <= 0.8 * len(rows):
            kept = alive.nonzero().squeeze(1)
            decoder.keep(kept.to(adapted.device))
            rows, tokens = rows[kept], tokens[kept.to(tokens.device)]
        logits = decoder.step(tokens)
    by_row = {}
    for row, (prompt, sample) in enumerate(batch):
        forced = tuple(states[row].forced_positions) if states[row] else ()
        by_row[prompt, sample] = Sample(tuple(written[row, : lengths[row]].tolist()), not bool(ended[row]), forced)
    for prompt, sample in sorted(by_row):
        results[prompt].append(by_row[prompt, sample])
