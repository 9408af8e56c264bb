"""Claims about attention over prompts that several responses share: equal to a mask over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from mapl_core import attention
from mapl_core.adapters import AdaptedModel
from mapl_core.attention import SHARED_PROMPTS, Packing, shared_prompt_attention
from mapl_core.models import load_model
from mapl_core.scoring import response_logprobs

# A prompt of 3 with responses of 1 and 4, a prompt of 1 with one response of 2, a prompt of 2 without any.
PROMPTS = [range(0, 3), range(8, 9), range(11, 13)]
RESPONSES = [range(3, 4), range(4, 8), range(9, 11)]
PARENTS = [0, 0, 1]
TOKENS = 13


def whole_mask() -> torch.Tensor:
    """Which token sees which, written down segment by segment."""
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for span in [*PROMPTS, *RESPONSES]:
        for token in span:
            visible[token, span.start : token + 1] = True
    for span, parent in zip(RESPONSES, PARENTS, strict=True):
        visible[span.start : span.stop, PROMPTS[parent].start : PROMPTS[parent].stop] = True
    return visible


@pytest.fixture
def rounded_products():
    """The setting under which scores are held; products of float64 are never rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
def test_values_and_gradients_are_those_of_one_mask_over_everything(heads, kv_heads):
    check_against_one_mask(heads, kv_heads)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("held, by_products", [(2**23, 2), (0, 0), (70, 1)])
def test_so_are_those_by_products_which_hold_no_more_scores_than_they_may(
    heads, kv_heads, held, by_products, rounded_products, monkeypatch
):
    """The prompts' rectangle has 3 x heads x 3 x 3 scores, that of the responses 3 x heads x 4 x 7."""
    calls, products = [], attention._attend_by_products
    monkeypatch.setattr(attention, "_attend_by_products", lambda *args: calls.append(1) or products(*args))
    monkeypatch.setattr(attention, "SCORES_HELD", held * heads if held == 70 else held)
    check_against_one_mask(heads, kv_heads)
    assert len(calls) == by_products


def check_against_one_mask(heads, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, count, TOKENS, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    weights = torch.randn(1, TOKENS, heads, 8, dtype=torch.float64, generator=generator)
    packing = Packing.of(PROMPTS, RESPONSES, PARENTS, "cpu")
    found, _ = shared_prompt_attention(None, q, k, v, None, packing=packing, scaling=0.3)
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    wide = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v)]
    expected = scaled_dot_product_attention(q, *wide, attn_mask=whole_mask(), scale=0.3).transpose(1, 2)
    assert_close(found, expected)
    for mine, theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        assert_close(mine, theirs)


def test_prompts_without_any_response():
    """A critic reads prompts only."""
    q, k, v = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    packing = Packing.of([range(0, 2), range(2, 5)], [], [], "cpu")
    found, _ = shared_prompt_attention(None, q, k, v, None, packing=packing)
    for span in (slice(0, 2), slice(2, 5)):
        alone = scaled_dot_product_attention(q[:, :, span], k[:, :, span], v[:, :, span], is_causal=True)
        assert_close(found[:, span], alone.transpose(1, 2))


def test_places_by_hand():
    """Prompt (t0 t1) with responses (t2) and (t3 t4), prompt (t5) with (t6 t7): rectangles of 2 x 2 and 3 x 2."""
    packing = Packing.of([range(0, 2), range(5, 6)], [range(2, 3), range(3, 5), range(6, 8)], [0, 0, 1], "cpu")
    assert packing.source.tolist() == [0, 1, 5, 0, 2, 0, 3, 4, 6, 7]
    assert packing.place.tolist() == [0, 1, 4, 6, 7, 2, 8, 9]
    assert packing.visible[:, 0].int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 1, 0], [1, 0, 1, 1]],
    ]


def test_without_a_packing_the_model_is_the_stock_one(tiny_llama, tiny_qwen3):
    """Padded on the left and on the right, and with a cache, as `generate` runs it."""
    for tiny in (tiny_llama, tiny_qwen3):
        stock, ours = tiny().model, AdaptedModel(tiny()).loaded.model
        assert stock.config._attn_implementation == "sdpa" and ours.config._attn_implementation == SHARED_PROMPTS
        ids = torch.randint(3, 30, (2, 7), generator=torch.Generator().manual_seed(0))
        for mask in (torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]), torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])):
            position = (mask.cumsum(1) - 1).clamp_min(0)
            with torch.no_grad():
                logits = [m(input_ids=ids, attention_mask=mask, position_ids=position).logits for m in (stock, ours)]
            assert_close(logits[1][mask.bool()], logits[0][mask.bool()], rtol=0, atol=0)
        texts = [m.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (stock, ours)]
        assert texts[0].tolist() == texts[1].tolist()


def test_an_attention_that_does_not_read_the_packing_cannot_pass_unnoticed(tiny_qwen3):
    """Its numbers would be those of responses that see each other; they are NaN instead, which every loss refuses."""
    adapted = AdaptedModel(tiny_qwen3())
    items = [((3, 4), (5, 6)), ((3, 4), (7,))]
    assert response_logprobs(adapted, None, items, max_tokens=64).isfinite().all()
    adapted.loaded.model.set_attn_implementation("sdpa")
    kind = type(adapted)
    adapted.__class__ = type("Mistaken", (kind,), {"shares_prompts": True})
    assert response_logprobs(adapted, None, items, max_tokens=64).isnan().all()


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_positions_stay_exact_whatever_products_may_round(precision):
    """A product of bfloat16 factors would read 257 as 256; a device that rounds nothing passes without a hook."""
    before = torch.get_float32_matmul_precision()
    loaded = load_model("pocket:tldr:1x")
    ids = torch.randint(10, 200, (2, 600), generator=torch.Generator().manual_seed(0))
    logits = {}
    try:
        for setting in ("highest", precision):
            torch.set_float32_matmul_precision(setting)
            with torch.no_grad():
                logits[setting] = loaded.model(ids).logits.log_softmax(-1)
            assert torch.get_float32_matmul_precision() == setting  # as it was before
        rotary = loaded.model.base_model.rotary_emb
        positions = torch.arange(900)[None].expand(2, -1)
        cosines, _ = rotary(torch.zeros(2, 1, 192), positions)
        angles = positions[0, :, None].double() * rotary.inv_freq.double()
        with pytest.raises(TypeError):
            rotary()
        assert torch.get_float32_matmul_precision() == precision  # after an error, too
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(cosines[0].double(), torch.cat([angles, angles], -1).cos(), rtol=0, atol=1e-3)
    exact, rounded = logits["highest"], logits[precision]
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence[:, 256:].mean() < 3 * divergence[:, :256].mean() + 1e-6  # no worse where positions would round
