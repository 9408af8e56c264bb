"""LoRA's layer in the fewest passes over its activations.

PEFT's layer computes `W x + scaling * B (A x)` in five steps, and its gradient in seven more. Of rank 16 the products
are cheap; what they read and write, a tensor as large as the layer's output each time, is not. Here the low-rank part
is added by the product that computes it, and its scale goes into `B`, the smallest tensor around.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def add_low_rank(y: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Add `second (first x)` to y (..., out) in place, for x (..., in), first (rank, in) and second (out, rank)."""
    low = x.reshape(-1, x.shape[-1]) @ first.mT
    y.view(-1, y.shape[-1]).addmm_(low, second.mT)
    return y


class LowRankLinear(torch.autograd.Function):
    """`W x + bias + scaling * B (A x)` with gradients for x, A and B; W and its bias are frozen.

    Args of `apply`: x (..., in), weight (out, in), bias (out,) or None, lora_a (rank, in), lora_b (out, rank), scaling.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, lora_a, lora_b)
        ctx.scaling = scaling
        return add_low_rank(linear(x, weight, bias), x, lora_a, scaling * lora_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        flat_x, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        low = flat @ (ctx.scaling * lora_b)  # (tokens, rank) the gradient of A x
        of_x = torch.mm(flat, weight).addmm_(low, lora_a).view(x.shape) if needs_x else None
        of_a = low.mT @ flat_x if needs_a else None
        of_b = ctx.scaling * (flat.mT @ (flat_x @ lora_a.mT)) if needs_b else None
        return of_x, None, None, of_a, of_b, None


class _FusedLinear(PeftLinear):
    """PEFT's layer, with one active adapter of the base's type computed by `LowRankLinear`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or len(active) != 1 or args or kwargs:
            return super().forward(x, *args, **kwargs)
        lora_a, lora_b = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
        base = self.get_base_layer()
        if not x.dtype == base.weight.dtype == lora_a.dtype:  # in 16 bits PEFT converts between the base and float32
            return super().forward(x)
        return LowRankLinear.apply(x, base.weight, base.bias, lora_a, lora_b, self.scaling[active[0]])


def fuse(model: nn.Module) -> None:
    """Give PEFT's linear layers on ordinary weights this module's forward pass; layers in 4 bits keep their own."""
    for layer in model.modules():
        if type(layer) is PeftLinear and type(layer.get_base_layer()) is nn.Linear:
            layer.__class__ = _FusedLinear
