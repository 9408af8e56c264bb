"""Attention in which all responses to a prompt share the keys and values of its one forward pass.

A micro-batch of prompts and responses is run as one flat sequence of real tokens. Inside attention its segments are
laid out as two rectangles, the prompts (causal) and the responses, each of which sees its prompt and its own past. So
linear layers see no padding, and no mask is as large as the square of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHARED_PROMPTS = "mapl_shared_prompts"
# With rounded factors ("medium"), the fused kernel of the processor takes three times as long as plain products, which
# hold the scores, elements of (rows, heads, queries, keys). Larger ones still go to the kernel, which holds none.
SCORES_HELD = 2**23
SUPPORTED = ("llama", "qwen2", "qwen3")  # model types whose layers hand unknown arguments on to their attention


@dataclass(frozen=True)
class Packing:
    """Where a flat sequence of T tokens holds its R prompts and S responses.

    Attributes:
        source: (R * longest prompt + S * longest response,) the token at each place of the two rectangles; a padded
            place repeats token 0, and nothing reads it.
        place: (T,) the place of each token, the inverse of `source`.
        prompts, responses: shapes of the rectangles.
        parent: (S,) index of each response's prompt.
        visible: (S, 1, longest response, longest prompt + longest response) which keys each response token sees.
    """

    source: Tensor
    place: Tensor
    prompts: tuple[int, int]
    responses: tuple[int, int]
    parent: Tensor
    visible: Tensor

    @staticmethod
    def of(prompts: Sequence[range], responses: Sequence[range], parent: Sequence[int], device) -> Packing:
        """From the span of tokens of every prompt and response."""
        shapes = [(len(spans), max(map(len, spans), default=0)) for spans in (prompts, responses)]
        source = torch.zeros(sum(rows * width for rows, width in shapes), dtype=torch.long)
        place = torch.empty(sum(map(len, prompts)) + sum(map(len, responses)), dtype=torch.long)
        start = 0
        for spans, (rows, width) in zip((prompts, responses), shapes, strict=True):
            for row, span in enumerate(spans):
                first = start + row * width
                source[first : first + len(span)] = torch.arange(span.start, span.stop)
                place[span.start : span.stop] = torch.arange(first, first + len(span))
            start += rows * width
        (_, longest), (count, width) = shapes
        prompt_lengths = torch.tensor([len(prompts[index]) for index in parent], dtype=torch.long)
        own = torch.ones(width, width, dtype=torch.bool).tril().expand(count, width, width)
        shared = (torch.arange(longest) < prompt_lengths[:, None])[:, None, :].expand(count, width, longest)
        return Packing(
            source.to(device),
            place.to(device),
            *shapes,
            torch.tensor(parent, dtype=torch.long, device=device),
            torch.cat([shared, own], dim=-1)[:, None].to(device),
        )


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether `shared_prompt_attention` may be set as the attention of a model."""
    implementation = model.config._attn_implementation
    return (
        attends_in_full(model.config)
        and implementation in ("sdpa", SHARED_PROMPTS)
        and keeps_attention_interface(model)
    )


def attends_in_full(config: PretrainedConfig) -> bool:
    """Whether every token of a model of a supported type sees all earlier ones, without a window."""
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or []) or getattr(
        config, "sliding_window", None
    )
    return config.model_type in SUPPORTED and not windows


def keeps_attention_interface(model: nn.Module) -> bool:
    """Whether a model's layers call the attention that its config names: Unsloth's own layers, on a GPU, do not."""
    kinds = {type(module) for module in model.modules() if hasattr(module, "q_proj")}
    return all(kind.forward.__module__.startswith("transformers.") for kind in kinds)


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; a sequence without a `packing` gets Transformers' own sdpa attention.

    Args:
        query, key, value: (1, heads or key-value heads, T, head_dim).
        attention_mask: not read where there is a packing.

    Returns:
        (1, T, heads, head_dim) and no attention weights.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    split = packing.prompts[0] * packing.prompts[1]

    def rectangles(x: Tensor) -> list[Tensor]:
        """(R, heads, longest prompt, head_dim) and (S, heads, longest response, head_dim)."""
        spread = x[0].transpose(0, 1).index_select(0, packing.source)
        prompts, responses = spread.split([split, len(spread) - split])
        return [
            prompts.unflatten(0, packing.prompts).transpose(1, 2),
            responses.unflatten(0, packing.responses).transpose(1, 2),
        ]

    (prompt_q, q), (prompt_k, k), (prompt_v, v) = map(rectangles, (query, key, value))
    mixed = [attend(prompt_q, prompt_k, prompt_v, None, scaling)]
    if len(q):
        k = torch.cat([prompt_k.index_select(0, packing.parent), k], dim=2)
        v = torch.cat([prompt_v.index_select(0, packing.parent), v], dim=2)
        mixed.append(attend(q, k, v, packing.visible, scaling))
    flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in mixed])
    return flat.index_select(0, packing.place)[None], None


def rounds_products() -> bool:
    """Whether a device may round the factors of float32 products (`matmul_precision` "high" or "medium")."""
    return torch.get_float32_matmul_precision() != "highest"


def keep_positions_exact(model: nn.Module) -> None:
    """Compute the angles of a Transformers model's rotary embedding from unrounded positions, whatever is rounded else.

    It multiplies positions by frequencies as matrices, so a device that rounds the factors of products rounds the
    positions: "medium" keeps every position up to 256 and then one in two, TF32 every one up to 2048
    (huggingface/transformers issue 48428). Tokens beyond are then read as if they stood elsewhere, and the sampler,
    which computes its own angles, would disagree with the log-probabilities by tenths of a nat a token.
    To be called once for a model.
    """
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.register_forward_pre_hook(_round_nothing)
            module.register_forward_hook(_round_as_before, always_call=True)


def _round_nothing(module: nn.Module, arguments: tuple) -> None:
    module.precision_outside = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")


def _round_as_before(module: nn.Module, arguments: tuple, output: object) -> None:
    torch.set_float32_matmul_precision(module.precision_outside)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of grouped heads.

    Args:
        q: (N, heads, queries, head_dim).
        k, v: (N, key-value heads, keys, head_dim).
        visible: (N, 1, queries, keys) booleans; None for causal attention.
        scaling: of the products; None for one over the root of head_dim.
    """
    on_cpu = q.device.type == "cpu"
    if on_cpu and rounds_products() and q.shape[:3].numel() * k.shape[2] <= SCORES_HELD:
        return _attend_by_products(q, k, v, visible, scaling)
    if not on_cpu:  # there grouped heads with a mask fall back to a kernel that is slow
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scaling, enable_gqa=on_cpu
    )


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scaling: float | None) -> Tensor:
    rows, heads, queries, size = q.shape
    shared, keys = k.shape[1:3]  # key-value heads, each read by a group of heads
    if visible is None:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    bias = q.new_zeros(()).masked_fill(~visible, -torch.inf)
    bias = bias.expand(rows, heads, queries, keys).reshape(rows * shared, -1, keys)
    grouped = q.reshape(rows * shared, -1, size)  # the queries of a group one after the other
    scores = torch.baddbmm(bias, grouped, k.flatten(0, 1).mT, alpha=size**-0.5 if scaling is None else scaling)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(rows, heads, queries, size)


AttentionInterface.register(SHARED_PROMPTS, shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPTS, sdpa_mask)
