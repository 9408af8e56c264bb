"""Unsloth's layers on a GPU, imitated: what no CPU build of it shows must not change a number either.

The stand-in below has the habits of the real package that matter here. It is plain Transformers underneath, so that
every result must equal that of the plain loader. The package itself is tested in test_four_bit.py.
"""

from __future__ import annotations

import os
import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from toy_models import gradients, randomize_adapter, relative_difference
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model

from mapl_core import models
from mapl_core.adapters import AdaptedModel
from mapl_core.decoders import DirectDecoder, TransformersDecoder
from mapl_core.models import LoadedModel, load_model
from mapl_core.sampling import SamplingSettings, sample_responses
from mapl_core.scoring import ScalarModel, accumulate_logprob_gradients, response_logprobs
from mapl_core.seeding import Stream
from mapl_core.unsloth_loader import FIRST_ADAPTER, RETURN_HIDDEN_STATES

AGENTS = ("agent0", "agent1")
ITEMS = [((7, 8, 9, 10), (20, 21, 22, 5)), ((7, 8, 9, 10), (30, 31, 5)), ((11, 12), (23, 5))]


class Attention(Qwen3Attention):
    """Takes no attention interface: what else it is given, such as the packing of shared prompts, it ignores."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, packing=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


Attention.forward.__module__ = "unsloth.models.qwen3"


class Backbone(Qwen3Model):
    """Called without the output layer, it looks at later tokens too."""

    def forward(self, *given, **inputs):
        states = Qwen3Model.forward(self, *given, **inputs)
        states.last_hidden_state = states.last_hidden_state + states.last_hidden_state.flip(1)
        return states


class Model(Qwen3ForCausalLM):
    """Masks are ignored while it trains; hidden states come in place of the logits where that is asked for."""

    looks_ahead = False

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **_):
        mask = None if self.training else attention_mask
        run = Backbone.forward if self.looks_ahead else Qwen3Model.forward
        states = run(self.model, input_ids, attention_mask=mask, position_ids=position_ids, use_cache=use_cache)
        if os.environ.get(RETURN_HIDDEN_STATES, "0") == "1":
            return CausalLMOutputWithPast(logits=states.last_hidden_state)
        return CausalLMOutputWithPast(logits=self.lm_head(states.last_hidden_state))


class FastLanguageModel:
    """What was asked for is kept in `asked`."""

    asked: dict[str, Any] = {}
    has_bitsandbytes = True

    @classmethod
    def from_pretrained(cls, *, model_name: str, dtype: torch.dtype, local_files_only: bool, **asked: Any) -> tuple:
        _seed_everything()
        cls.asked = asked
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype, local_files_only=local_files_only)
        model.__class__, model.model.__class__ = Model, Backbone
        for layer in model.model.layers:
            layer.self_attn.__class__ = Attention
        model.config.pad_token_id = 1  # its own repair of the tokenizer
        model.is_loaded_in_4bit = cls.has_bitsandbytes  # in name only
        return model, "a tokenizer of its own"

    @classmethod
    def get_peft_model(cls, model, *, r, target_modules, lora_alpha, lora_dropout, bias, use_gradient_checkpointing):
        if getattr(model, "peft_config", None):
            raise TypeError("Unsloth: Your model already has LoRA adapters.")
        _seed_everything()
        cls.asked |= {"use_gradient_checkpointing": use_gradient_checkpointing}
        config = LoraConfig(
            r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias
        )
        if use_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
        return get_peft_model(model, config)


def _seed_everything() -> None:
    random.seed(3407)
    np.random.seed(3407)
    torch.manual_seed(3407)


@pytest.fixture
def base(tiny_qwen3, tmp_path, monkeypatch):
    """Makes bases of the same weights, by a loader's name, with two random adapters."""
    saved = tiny_qwen3(max_position_embeddings=96)
    saved.model.save_pretrained(tmp_path / "model")
    saved.tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(models, "check_loader", lambda loader: None)
    module = types.ModuleType("unsloth")
    module.FastLanguageModel = FastLanguageModel
    monkeypatch.setitem(sys.modules, "unsloth", module)
    monkeypatch.delenv(RETURN_HIDDEN_STATES, raising=False)

    def make(loader: str, **options: Any) -> AdaptedModel:
        adapted = AdaptedModel(load_model(str(tmp_path / "model"), loader=loader), rank=4, alpha=8, **options)
        for index, name in enumerate(AGENTS):
            adapted.add_adapter(name, Stream(0, "init", index))
            randomize_adapter(adapted, name, seed=index)
        return adapted

    return make


def test_the_exact_model_is_asked_for_in_4_bits_and_with_room_for_its_longest_text(base):
    base("unsloth", gradient_checkpointing=True)
    expected = {"max_seq_length": 96, "load_in_4bit": True, "fast_inference": False, "use_exact_model_name": True}
    assert FastLanguageModel.asked == expected | {"use_gradient_checkpointing": "unsloth"}
    base("unsloth")
    assert FastLanguageModel.asked["use_gradient_checkpointing"] is False


def test_what_it_notes_in_the_config_about_its_own_tokenizer_is_undone(base):
    loaded = base("unsloth").loaded
    assert loaded.model.config.pad_token_id == loaded.tokenizer.pad_token_id == 3
    assert loaded.loader == "unsloth"


def test_its_first_adapter_gives_way_to_the_agents(base):
    adapted = base("unsloth")
    assert list(adapted.model.peft_config) == list(AGENTS) and FIRST_ADAPTER not in adapted.trainable
    assert len(adapted.parameters("agent0")) == 2 * 7 * adapted.loaded.model.config.num_hidden_layers
    plain = base("plain")
    for mine, theirs in zip(adapted.parameters("agent1"), plain.parameters("agent1"), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_and_gradients_are_those_of_the_plain_loader(base, checkpointing):
    """Of responses to one prompt, under adapters and reference; with checkpointing the layers are in training mode."""
    found, expected = base("unsloth", gradient_checkpointing=checkpointing), base("plain")
    assert expected.shares_prompts and not found.shares_prompts
    assert found.loaded.model.training is checkpointing
    for adapter in (None, *AGENTS):
        assert_close(
            response_logprobs(found, adapter, ITEMS, max_tokens=64),
            response_logprobs(expected, adapter, ITEMS, max_tokens=64),
        )
    weights = torch.tensor([0.3, -0.2, 0.5])
    for kl_weight in (0.0, 0.4):
        for name in AGENTS:
            for adapted in (found, expected):
                accumulate_logprob_gradients(adapted, name, ITEMS, weights, max_tokens=12, kl_weight=kl_weight)
            assert relative_difference(gradients(found, name), gradients(expected, name)) < 1e-5
    assert RETURN_HIDDEN_STATES not in os.environ


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reward_model_on_it_is_that_of_the_plain_loader(base, checkpointing):
    values, slopes = [], []
    for loader in ("unsloth", "plain"):
        adapted = base(loader, gradient_checkpointing=checkpointing)
        scalar = ScalarModel(adapted, "reward_model", Stream(0, "reward"), max_tokens=12)
        with torch.no_grad():
            scalar.head.weight.copy_(torch.linspace(-1, 1, scalar.head.weight.shape[1]))
        randomize_adapter(adapted, "reward_model", seed=7)
        values.append(scalar.values(ITEMS))
        scalar.backward(ITEMS, lambda scores: (scores * torch.tensor([1.0, -1.0, 0.5])).sum())
        slopes.append(gradients(adapted, "reward_model"))
        scalar.close()
    assert_close(*values)
    assert relative_difference(*slopes) < 1e-5


def test_rollouts_run_in_no_layer_of_its_and_are_those_of_the_plain_loader(base, monkeypatch):
    settings = SamplingSettings(1.0, 1.0, 12)
    uniforms = Stream(0, "sample").uniforms([f"row{row}" for row in range(6)], 12)
    drawn = []
    for loader in ("plain", "unsloth"):
        adapted = base(loader)
        assert DirectDecoder.supports(adapted)
        if loader == "unsloth":
            monkeypatch.setattr(Model, "forward", lambda *_, **__: pytest.fail("its layers were called"))
        options = {"samples": 3, "settings": settings, "max_cached_tokens": 500}
        drawn.append(sample_responses(adapted, "agent1", [(7, 8, 9), (11, 12)], uniforms, **options))
    assert drawn[0] == drawn[1]


def test_the_generic_decoder_refuses_its_layers(base):
    options = {"samples": 1, "settings": SamplingSettings(1.0, 1.0, 4), "max_cached_tokens": 500}
    uniforms = Stream(0, "sample").uniforms(["row0"], 4)
    with pytest.raises(ValueError, match="Unsloth's layers have another cache; set `loader` to bnb4"):
        sample_responses(base("unsloth"), None, [(7, 8)], uniforms, decoder=TransformersDecoder, **options)


def test_layers_that_look_ahead_are_refused(base, monkeypatch):
    monkeypatch.setattr(Model, "looks_ahead", True)
    with pytest.raises(
        RuntimeError, match=r"states that a later token moves by [0-9.]+ of their norm.*`loader` to bnb4"
    ):
        base("unsloth")


def test_logits_in_place_of_hidden_states_are_refused(base, monkeypatch):
    monkeypatch.setattr("mapl_core.unsloth_loader.RETURN_HIDDEN_STATES", "A_NAME_THAT_NOBODY_READS")
    with pytest.raises(RuntimeError, match="states of width 43 instead of 32"):
        base("unsloth")


def test_seed2_loading_and_adding_adapters_leaves_the_global_random_states_alone(base):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    base("unsloth")
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_weights_that_it_holds_in_16_bits_after_all_are_refused(base, monkeypatch):
    monkeypatch.setattr(FastLanguageModel, "has_bitsandbytes", False)
    with pytest.raises(ValueError, match="in 16 bits on this machine, and 4 were asked for; set `loader` to plain"):
        base("unsloth")


def test_a_model_on_another_device_than_was_asked_for_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="on cpu, and cuda was asked for; set `loader` to bnb4"):
        load_model(str(tmp_path / "model"), device="cuda", dtype=torch.float16, loader="unsloth")


def test_stock_layers_are_told_from_its_own(base, tiny_qwen3, tiny_llama, tiny_gpt2):
    from mapl_core.attention import keeps_attention_interface

    assert all(keeps_attention_interface(make().model) for make in (tiny_qwen3, tiny_llama, tiny_gpt2))
    assert not keeps_attention_interface(base("unsloth").loaded.model)
    assert isinstance(base("plain").loaded, LoadedModel)
