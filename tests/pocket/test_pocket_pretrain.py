"""The trainer of the pocket base and the folders it writes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3ForCausalLM

from mapl_core.pocket import build as pocket_build
from mapl_core.pocket import common
from mapl_core.pocket.build import corpus, fingerprint, train_base
from mapl_core.pocket.common import Shape, domain_tokenizer, model_config, model_path
from mapl_core.pocket.pretrain import (
    Example,
    Recipe,
    batches,
    learning_rate_factor,
    pretrain,
    response_loss,
    start_by_copying,
)

TINY = Shape(hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=128)


@pytest.fixture(scope="module")
def tokenizer():
    return domain_tokenizer("tldr")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(common.SHAPES, "1x", TINY)


def tiny_model(tokenizer) -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(model_config("1x", tokenizer)).float().eval()


def test_thirty_steps_lower_the_loss_and_touch_no_global_random_state(tiny):
    before = torch.random.get_rng_state(), random.getstate()
    _, _, losses, _ = train_base("tldr", "1x", Recipe(steps=30, batch=8, warmup=5), progress=False)
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1.0
    assert torch.equal(before[0], torch.random.get_rng_state()) and before[1] == random.getstate()


def test_the_same_recipe_gives_the_same_base(tiny):
    recipe = Recipe(steps=3, batch=4)
    first, second = (train_base("tldr", "1x", recipe, progress=False) for _ in range(2))
    assert first[2] == second[2]
    other = train_base("tldr", "1x", Recipe(steps=3, batch=4, seed=1), progress=False)
    assert other[2] != first[2]


def test_a_copying_start_makes_every_head_a_projection_on_its_own_values(tiny, tokenizer):
    """Reference: a layer that looks at one token only adds that token's projection, once for each of its heads."""
    model = tiny_model(tokenizer)
    start_by_copying(model)
    attention, config = model.base_model.layers[1].self_attn, model.config
    values, outputs = attention.v_proj.weight, attention.o_proj.weight
    assert_close(values @ values.T, torch.eye(len(values)))
    heads = config.num_attention_heads
    hidden = torch.randn(1, 1, config.hidden_size, generator=torch.Generator().manual_seed(0))
    angles = model.base_model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    added = attention(hidden, position_embeddings=angles, attention_mask=None)[0]
    assert_close(added, heads * hidden @ values.T @ values)  # one group of values here, read by every head
    product = sum(outputs[:, head * 32 : head * 32 + 32] @ values for head in range(heads))
    assert_close(product @ product, heads * product)  # a projection, `heads` times


def test_a_recipe_that_starts_by_copying_starts_elsewhere(tiny):
    losses = [
        train_base("tldr", "1x", Recipe(steps=1, batch=4, copies_at_start=copies), progress=False)[2]
        for copies in (False, True)
    ]
    assert losses[0] != losses[1]


def test_the_loss_is_the_mean_over_response_tokens_of_both_examples(tiny, tokenizer):
    """Reference: each example alone, token by token. Unequal lengths, so that padding and prompts would show."""
    model = tiny_model(tokenizer)
    batch = [Example([5, 6, 7, 8, 9], [10, 11, 2]), Example([5, 6], [12, 13, 14, 15, 2])]
    scores = []
    for example in batch:
        for position, token in enumerate(example.response):
            seen = torch.tensor([example.prompt + example.response[:position]])
            scores.append(model(input_ids=seen).logits[0, -1].log_softmax(0)[token])
    assert len(scores) == 8
    assert_close(response_loss(model, batch, tokenizer.pad_token_id), -torch.stack(scores).mean())


def test_a_loss_that_is_not_finite_stops_the_training(tiny, tokenizer):
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0"):
        pretrain(model, itertools.repeat(Example([5], [6, 2])), Recipe(steps=2, batch=2), tokenizer.pad_token_id)


def test_batches_hold_examples_of_like_length_and_lose_none():
    drawn = [Example([1] * length, [2]) for length in random.Random(0).sample(range(1, 65), 64)]
    cut = list(itertools.islice(batches(iter(drawn), 4, random.Random(1)), 16))
    assert sorted(len(example.prompt) for batch in cut for example in batch) == list(range(1, 65))
    assert all(max(len(e.prompt) for e in batch) - min(len(e.prompt) for e in batch) == 3 for batch in cut)


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth():
    recipe = Recipe(steps=110, warmup=10)
    factors = [learning_rate_factor(step, recipe) for step in (0, 4, 10, 60, 110)]
    assert factors == pytest.approx([0.1, 0.5, 1.0, 0.525, 0.05])


def test_the_corpus_is_closed_by_the_end_token_and_written_in_both_prompt_forms(tokenizer):
    drawn = list(itertools.islice(corpus("tldr", tokenizer, 0), 400))
    assert all(example.response[-1] == tokenizer.eos_token_id for example in drawn)
    assert all(tokenizer.eos_token_id not in example.response[:-1] for example in drawn)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chat = sum(example.prompt[0] == start for example in drawn) / len(drawn)
    assert 0.65 < chat < 0.85


def test_save4_the_fingerprint_changes_with_all_that_decides_the_base(monkeypatch):
    recipe = Recipe(steps=10)
    prints = {fingerprint("tldr", "1x", recipe), fingerprint("tldr", "2x", recipe)}
    prints.add(fingerprint("tldr", "1x", Recipe(steps=11)))
    from mapl_core.pocket import tldr

    monkeypatch.setitem(tldr.MODES[0], "remark", 0.9)
    prints.add(fingerprint("tldr", "1x", recipe))
    assert len(prints) == 4
    assert fingerprint("tldr", "1x", recipe) in prints


def test_a_size_that_is_not_shipped_is_built_once_into_the_cache(monkeypatch, tmp_path, capsys):
    built = []

    def build(domain, size, folder):
        built.append((domain, size))
        folder.mkdir()
        (folder / "build.json").write_text("{}")

    monkeypatch.setenv("MAPL_CACHE", str(tmp_path))
    monkeypatch.setattr(pocket_build, "build", build)
    monkeypatch.setattr(common, "WEIGHTS", tmp_path / "nothing")
    first, second = model_path("tldr", "4x"), model_path("tldr", "4x")
    assert first == second and first.parent == tmp_path / "pocket"
    assert built == [("tldr", "4x")]
    assert "pocket:tldr:4x" in capsys.readouterr().err


def test_a_build_that_fails_leaves_nothing_behind(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(pocket_build, "measurements", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pocket_build.build("tldr", "1x", tmp_path / "out", recipe=Recipe(steps=1, batch=2), progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("domain", "size", "named"), [("chess", "1x", "'chess'"), ("tldr", "3x", "'3x'")])
def test_an_unknown_domain_or_size_is_refused_with_the_valid_ones(domain, size, named):
    with pytest.raises(ValueError, match=f"{named}; valid: "):
        model_path(domain, size)
