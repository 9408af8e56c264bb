"""Rollouts: many samples for each of many prompts, from a base model under one adapter.

A `Sampler` is a backend. `TransformersSampler`, here, runs anywhere, on two decoders that serve one loop; the one in
`vllm_sampling` hands the work to a vLLM engine. Both return the same `Sample`s.

Of the two decoders, `DirectDecoder` runs Llama- and Qwen-like models in a handful of plain tensor operations:
the adapter is merged into a copy of the weights, a prompt's keys and values are computed and held once for all its
samples, and Python overhead stays small. `TransformersDecoder` runs any other causal model through its own forward pass
and cache. Both are given the same uniforms, keyed by row and step, so that a row's sample does not depend on its batch
mates and both choose the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mapl_core.adapters import AdaptedModel
from mapl_core.attention import attends_in_full
from mapl_core.domains.base import Skeleton
from mapl_core.lora import add_low_rank
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

    cached_tokens: int

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


class Decoder(Protocol):
    """One batch of prompts being continued. Rows are (prompt, sample) pairs, prompt by prompt."""

    def prefill(self) -> Tensor:
        """(prompts, vocabulary) logits of the first new token."""

    def start(self, prompt_of_row: Tensor, max_new_tokens: int) -> None:
        """Open one row for each entry: the index of its prompt. No row gets more than that many tokens."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every row; (rows, vocabulary) logits of the next."""

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""


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


@dataclass
class _Projection:
    """Linear layers that read the same input, stacked so that they are one product, with their adapter.

    In float32 the adapter is merged into a copy of the weights. In 16 bits, or where products round their factors, that
    would lose it: the first steps of training move a weight by less than half the distance to the next number. So there
    its two factors, scaled and in float32, stay apart.
    """

    weight: Tensor
    bias: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        if self.factors is None:
            return y
        if y.dtype == torch.float32:
            return add_low_rank(y, x, *self.factors)
        first, second = self.factors
        return y + linear(linear(x.float(), first), second).to(y.dtype)


@dataclass
class _Layer:
    """One decoder layer; q, k, v and gate, up are stacked."""

    attention_norm: Tensor
    qkv: _Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection


@dataclass(frozen=True)
class _LayersOneByOne:
    """Layers that are merged whenever they are walked through, and held one at a time."""

    merged: Callable[[nn.Module], _Layer]
    modules: nn.ModuleList

    def __iter__(self) -> Iterator[_Layer]:
        return map(self.merged, self.modules)


def _copy_fits(adapted: AdaptedModel) -> bool:
    """Whether a copy of all layers takes at most half of what a GPU has free; the cache and the training need room too.

    Both ways have the same numbers: one is faster, above all where weights are held in 4 bits, the other smaller.
    """
    if adapted.device.type != "cuda":
        return True
    weights = (layer for layer in adapted.backbone.layers.modules() if isinstance(layer, nn.Linear))
    copied = sum(layer.in_features * layer.out_features for layer in weights) * adapted.loaded.dtype.itemsize
    unused = torch.cuda.memory_reserved(adapted.device) - torch.cuda.memory_allocated(adapted.device)
    return 2 * copied <= torch.cuda.mem_get_info(adapted.device)[0] + unused


def _rotary_frequency(config: PretrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies of the rotary embedding, and the factor on its sines and cosines, as the config wants them.

    From the config, since the module that holds them has another form under Unsloth.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    frequency, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequency.float(), float(scale)


@dataclass
class _DirectWeights:
    layers: Iterable[_Layer]
    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    inverse_frequency: Tensor
    rope_scale: float
    eps: float
    heads: int
    kv_heads: int
    head_dim: int


class DirectDecoder:
    """Llama, Qwen2 and Qwen3 decoding in plain tensor operations, with one shared prefix cache for each prompt."""

    @staticmethod
    def supports(adapted: AdaptedModel) -> bool:
        model = adapted.loaded.model
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            attends_in_full(config)
            and rope.get("rope_type", "default") in ("default", "llama3")
            and getattr(config, "hidden_act", "") == "silu"
            and not getattr(config, "mlp_bias", False)
            and (getattr(model, "hf_quantizer", None) is None or adapted.loaded.loader != "plain")
            and all(getattr(layer.self_attn.o_proj, "bias", None) is None for layer in adapted.backbone.layers)
        )

    @staticmethod
    def prepare(adapted: AdaptedModel, adapter: str | None) -> _DirectWeights:
        """Stack the weights, with the adapter. The base itself is never written to."""
        exact = torch.get_float32_matmul_precision() == "highest"
        merges = adapted.loaded.dtype == torch.float32 and exact

        def stacked(*modules) -> _Projection:
            biases = [getattr(module, "bias", None) for module in modules]
            bias = None if biases[0] is None else torch.cat([own.detach() for own in biases])
            weight = torch.cat([adapted.merged_weight(module, adapter if merges else None) for module in modules])
            return _Projection(weight, bias, None if merges else adapted.factors(modules, adapter))

        def merged_layer(layer: nn.Module) -> _Layer:
            attention, mlp = layer.self_attn, layer.mlp
            return _Layer(
                layer.input_layernorm.weight.detach(),
                stacked(attention.q_proj, attention.k_proj, attention.v_proj),
                attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
                attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
                stacked(attention.o_proj),
                layer.post_attention_layernorm.weight.detach(),
                stacked(mlp.gate_proj, mlp.up_proj),
                stacked(mlp.down_proj),
            )

        config, backbone = adapted.loaded.model.config, adapted.backbone
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequency, scale = _rotary_frequency(config, head_dim)
        layers = _LayersOneByOne(merged_layer, backbone.layers)
        return _DirectWeights(
            list(layers) if _copy_fits(adapted) else layers,
            backbone.embed_tokens.weight.detach(),
            backbone.norm.weight.detach(),
            adapted.output_layer.weight.detach(),
            frequency.to(adapted.device),
            scale,
            config.rms_norm_eps,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )

    def __init__(self, weights: _DirectWeights, prompts: Sequence[Ids], batch: Sequence[tuple[int, int]]):
        self.weights = weights
        self.device = weights.embedding.device
        self.prompts = [prompts[index] for index in dict.fromkeys(prompt for prompt, _ in batch)]
        self.lengths = torch.tensor([len(prompt) for prompt in self.prompts], device=self.device)
        self.prefix: list[tuple[Tensor, Tensor]] = []  # per layer: keys, values (prompts, kv_heads, length, head_dim)
        self.suffix: list[tuple[Tensor, Tensor]] = []  # per layer: keys, values (rows, kv_heads, capacity, head_dim)

    def prefill(self) -> Tensor:
        w, width = self.weights, int(self.lengths.max())
        ids = torch.zeros((len(self.prompts), width), dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        hidden = w.embedding[ids.to(self.device)]
        cos, sin = self._rotation(torch.arange(width, device=self.device), hidden.dtype)
        group = w.heads // w.kv_heads
        for layer in w.layers:
            q, k, v = (x.transpose(1, 2) for x in self._project(layer, hidden))  # (prompts, heads, length, head_dim)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self.prefix.append((k.contiguous(), v.contiguous()))
            # Right-padded prompts under a causal mask: no real token sees a pad.
            mixed = scaled_dot_product_attention(
                q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), is_causal=True
            )
            hidden = hidden + layer.output(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + self._feed_forward(layer, hidden)
        last = hidden[torch.arange(len(self.prompts), device=self.device), self.lengths - 1]
        positions = torch.arange(width, device=self.device)
        self.prefix_mask = torch.where(positions < self.lengths[:, None], 0.0, -torch.inf)  # (prompts, length)
        return self._logits(last)

    def start(self, prompt_of_row: Tensor, max_new_tokens: int) -> None:
        self.prompt_of_row, self.most = prompt_of_row, max_new_tokens
        self.generated = 0
        self.suffix = []
        self._place_rows()

    def keep(self, rows: Tensor) -> None:
        for index, (keys, values) in enumerate(self.suffix):  # one layer at a time is held twice
            self.suffix[index] = (keys[rows], values[rows])
        remaining, self.prompt_of_row = torch.unique(self.prompt_of_row[rows], return_inverse=True)
        if len(remaining) < len(self.lengths):
            self.prefix = [(keys[remaining], values[remaining]) for keys, values in self.prefix]
            self.lengths, self.prefix_mask = self.lengths[remaining], self.prefix_mask[remaining]
        self._place_rows()

    def _place_rows(self) -> None:
        """Give each row a place (prompt, slot) in a rectangle, in which prefix attention is one product a prompt."""
        order = torch.argsort(self.prompt_of_row, stable=True)
        counts = torch.bincount(self.prompt_of_row, minlength=len(self.lengths))
        first = counts.cumsum(0) - counts
        slot = torch.empty_like(self.prompt_of_row)
        slot[order] = torch.arange(len(order), device=self.device) - first[self.prompt_of_row[order]]
        self.slots, self.slot_of_row = int(counts.max()), slot

    def step(self, tokens: Tensor) -> Tensor:
        w, rows, group = self.weights, len(tokens), self.weights.heads // self.weights.kv_heads
        hidden = w.embedding[tokens]
        positions = self.lengths[self.prompt_of_row] + self.generated
        cos, sin = (x[:, None, :] for x in self._rotation(positions, hidden.dtype))
        place = (self.prompt_of_row, self.slot_of_row)
        scale = w.head_dim**-0.5
        for index, layer in enumerate(w.layers):
            q, k, v = self._project(layer, hidden)  # (rows, heads, head_dim)
            q, k = _rotate(q, cos, sin) * scale, _rotate(k, cos, sin)
            keys, values = self._append(index, k, v)
            q = q.view(rows, w.kv_heads, group, w.head_dim)
            own = torch.matmul(q, keys.transpose(2, 3))  # (rows, kv_heads, group, generated + 1)
            prefix_keys, prefix_values = self.prefix[index]
            grid = q.new_zeros(len(self.lengths), self.slots, w.kv_heads, group, w.head_dim)
            grid[place] = q
            grid = grid.transpose(1, 2).reshape(len(self.lengths), w.kv_heads, self.slots * group, w.head_dim)
            shared = torch.matmul(grid, prefix_keys.transpose(2, 3)) + self.prefix_mask[:, None, None, :].to(q.dtype)
            # Softmax over prefix and own tokens together, from the two parts' maxima and sums.
            shared_max = shared.amax(dim=-1, keepdim=True)
            shared = (shared - shared_max).exp_()
            context = torch.cat([torch.matmul(shared, prefix_values), shared.sum(-1, keepdim=True), shared_max], dim=-1)
            context = context.view(len(self.lengths), w.kv_heads, self.slots, group, w.head_dim + 2).transpose(1, 2)[
                place
            ]
            mixed, shared_sum, shared_max = context.split([w.head_dim, 1, 1], dim=-1)
            top = torch.maximum(shared_max, own.amax(dim=-1, keepdim=True))
            own = (own - top).exp_()
            rescale = (shared_max - top).exp_()
            mixed = (mixed * rescale + torch.matmul(own, values)) / (shared_sum * rescale + own.sum(-1, keepdim=True))
            hidden = hidden + layer.output(mixed.reshape(rows, -1))
            hidden = hidden + self._feed_forward(layer, hidden)
        self.generated += 1
        return self._logits(hidden)

    def _append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one step into a layer's suffix cache, doubled in size whenever it is full, up to what can be needed."""
        if index == len(self.suffix):
            empty = key.new_empty(key.shape[0], key.shape[1], min(16, self.most), key.shape[2])
            self.suffix.append((empty, torch.empty_like(empty)))
        keys, values = self.suffix[index]
        if self.generated == keys.shape[2]:
            more = min(self.generated, self.most - self.generated)
            keys, values = (torch.cat([x, torch.empty_like(x[:, :, :more])], dim=2) for x in (keys, values))
            self.suffix[index] = (keys, values)
        keys[:, :, self.generated], values[:, :, self.generated] = key, value
        return keys[:, :, : self.generated + 1], values[:, :, : self.generated + 1]

    def _project(self, layer: _Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values, each (..., heads, head_dim), before rotation."""
        w = self.weights
        qkv = layer.qkv(rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, w.eps))
        qkv = qkv.unflatten(-1, (w.heads + 2 * w.kv_heads, w.head_dim))
        q, k, v = qkv.split([w.heads, w.kv_heads, w.kv_heads], dim=-2)
        if layer.q_norm is not None:
            q = rms_norm(q, (w.head_dim,), layer.q_norm, w.eps)
            k = rms_norm(k, (w.head_dim,), layer.k_norm, w.eps)
        return q, k, v

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, self.weights.eps)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, hidden.shape[-1:], self.weights.final_norm, self.weights.eps), self.weights.head)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(positions, head_dim) cosine and sine of the rotary embedding."""
        angles = positions[:, None].float() * self.weights.inverse_frequency[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.weights.rope_scale).to(dtype), (angles.sin() * self.weights.rope_scale).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class TransformersDecoder:
    """Any causal model through its own forward pass and cache: prompts are prefilled once, then expanded."""

    @staticmethod
    def prepare(adapted: AdaptedModel, adapter: str | None) -> tuple[AdaptedModel, str | None]:
        if not adapted.has_stock_layers:
            raise ValueError(f"{adapted.loaded.name}: Unsloth's layers have another cache; set `loader` to bnb4")
        return adapted, adapter

    def __init__(
        self, policy: tuple[AdaptedModel, str | None], prompts: Sequence[Ids], batch: Sequence[tuple[int, int]]
    ):
        self.adapted, self.adapter = policy
        self.prompts = [prompts[index] for index in dict.fromkeys(prompt for prompt, _ in batch)]

    def prefill(self) -> Tensor:
        width, device = max(map(len, self.prompts)), self.adapted.device
        ids = torch.full((len(self.prompts), width), self.adapted.tokenizer.pad_token_id or 0)
        mask = torch.zeros((len(self.prompts), width), dtype=torch.long)
        for row, prompt in enumerate(self.prompts):  # left padding: every row's next position is the same column
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self.mask = mask.to(device)
        self.position = self.mask.sum(dim=1)
        return self._forward(ids.to(device), (self.mask.cumsum(1) - 1).clamp_min(0), None)

    def start(self, prompt_of_row: Tensor, max_new_tokens: int) -> None:
        self.cache.batch_select_indices(prompt_of_row)
        self.mask, self.position = self.mask[prompt_of_row], self.position[prompt_of_row]

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens[:, None], self.position[:, None], self.cache)
        self.position = self.position + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]

    def _forward(self, ids: Tensor, positions: Tensor, cache) -> Tensor:
        with self.adapted.using(self.adapter), self.adapted.evaluating():
            out = self.adapted.loaded.model(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.cache = out.past_key_values
        return out.logits[:, -1]
