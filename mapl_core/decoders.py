"""Two decoders that serve one sampling loop: how a batch of prompts is continued token by token.

`DirectDecoder` runs Llama- and Qwen-like models in a handful of plain tensor operations: where that loses nothing the
adapter is merged into a copy of the weights, a prompt's keys and values are computed and held once for all its samples,
and Python overhead stays small. `TransformersDecoder` runs any other causal model through its own forward pass and
cache. Both are given the same uniforms, keyed by row and step, so that a row's sample does not depend on its batch
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
from mapl_core.attention import attends_in_full, rounds_products
from mapl_core.lora import add_low_rank
from mapl_core.scoring import Ids


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
        merges = adapted.loaded.dtype == torch.float32 and not rounds_products()

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
