"""The fused LoRA layer computes what PEFT's computes, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear
from torch.testing import assert_close
from toy_models import adapted_model, randomize_adapter

from mapl_core.lora import LowRankLinear, add_low_rank


def _tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
def test_a_low_rank_product_is_added_in_place(shape):
    x, first, second = _tensors(shape, (2, 5), (4, 2))
    (y,) = _tensors((*shape[:-1], 4))
    expected = y + x @ first.T @ second.T
    found = add_low_rank(y, x, first, second)
    assert found is y
    assert_close(found, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("trained", [(1, 1, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0)])
def test_gradients_agree_with_finite_differences(with_bias, trained):
    x, weight, lora_a, lora_b, bias = _tensors((2, 3, 5), (4, 5), (2, 5), (4, 2), (4,))
    for tensor, needed in zip((x, lora_a, lora_b), trained, strict=True):
        tensor.requires_grad_(bool(needed))
    bias = bias if with_bias else None

    def layer(x, lora_a, lora_b):
        return LowRankLinear.apply(x, weight, bias, lora_a, lora_b, 2.5)

    assert torch.autograd.gradcheck(layer, (x, lora_a, lora_b))
    plain = x @ weight.T + 2.5 * x @ lora_a.T @ lora_b.T
    assert_close(layer(x, lora_a, lora_b), plain if bias is None else plain + bias)


def test_the_layer_has_the_values_and_gradients_of_pefts_own(tiny_llama):
    """Under either adapter, with adapters off, and for the gradient that goes on to the layers below."""
    adapted = adapted_model(tiny_llama(attention_bias=True), "agent0", "agent1")
    for seed, name in enumerate(("agent0", "agent1")):
        randomize_adapter(adapted, name, seed=seed)
    layer = adapted.backbone.layers[0].self_attn.q_proj
    assert isinstance(layer, PeftLinear) and type(layer) is not PeftLinear
    (x,) = _tensors((2, 3, layer.in_features), dtype=torch.float32)
    x.requires_grad_()
    for adapter in ("agent0", "agent1", None):
        with adapted.using(adapter):
            outputs = layer(x), PeftLinear.forward(layer, x)
        assert_close(*outputs)
        if adapter is None:
            assert_close(outputs[0], layer.get_base_layer()(x))
            continue
        wanted = [x, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
        other = layer.lora_A["agent1" if adapter == "agent0" else "agent0"].weight
        for found, expected in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in outputs), strict=True):
            assert_close(found, expected)
            assert found.abs().sum() > 0
        assert torch.autograd.grad(layer(x).sum(), other, allow_unused=True) == (None,)


def test_every_adapted_layer_of_a_float32_base_is_fused(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0", "agent1")
    layers = [module for module in adapted.model.modules() if isinstance(module, PeftLinear)]
    assert len(layers) == 7 * len(adapted.backbone.layers)
    assert all(type(layer) is not PeftLinear for layer in layers)


def test_a_16_bit_base_is_left_to_peft_which_converts(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(dtype=torch.bfloat16), "agent0")
    randomize_adapter(adapted, "agent0", seed=0)
    layer = adapted.backbone.layers[0].mlp.up_proj
    (x,) = _tensors((3, layer.in_features), dtype=torch.bfloat16)
    with adapted.using("agent0"):
        found, expected = layer(x), PeftLinear.forward(layer, x)
    assert found.dtype == torch.bfloat16
    assert_close(found, expected, rtol=0, atol=0)
