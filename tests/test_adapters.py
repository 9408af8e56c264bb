"""Several adapters on one frozen base: who gets a gradient, what is saved, what stays untouched."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from toy_models import adapted_model, gradients, plain_logprob, randomize_adapter, relative_difference
from transformers import AutoModelForCausalLM

from mapl_core.adapters import AdaptedModel
from mapl_core.losses import madpo_loss
from mapl_core.scoring import ScalarModel, accumulate_logprob_gradients, response_logprobs
from mapl_core.seeding import Stream

PROMPT = (7, 8, 9, 10)
WINNERS = {"agent0": (PROMPT, (20, 21, 22, 5)), "agent1": ((11, 12), (23, 5))}
LOSERS = {"agent0": (PROMPT, (30, 31, 5)), "agent1": ((11, 12), (32, 33, 34, 35, 5))}
AGENTS = ("agent0", "agent1")


def _flags(adapted: AdaptedModel) -> dict[str, bool]:
    return {name: weight.requires_grad for name, weight in adapted.loaded.model.named_parameters()}


def _base_weights(adapted: AdaptedModel) -> dict[str, torch.Tensor]:
    return {
        name: weight.detach().clone() for name, weight in adapted.loaded.model.named_parameters() if "lora_" not in name
    }


def _routed_madpo_gradients(adapted: AdaptedModel) -> dict[str, list[torch.Tensor]]:
    """The gradients of one MADPO pair as the package takes them: margins first, then one agent after the other."""

    def scores(items, adapter):
        return torch.stack(
            [response_logprobs(adapted, adapter and name, [items[name]], max_tokens=64) for name in AGENTS], dim=1
        )[..., None]

    policy = torch.cat([scores(WINNERS, True), scores(LOSERS, True)]).requires_grad_()
    loss, _ = madpo_loss(policy[:1], policy[1:], scores(WINNERS, None), scores(LOSERS, None), beta=0.1)
    weights = torch.autograd.grad(loss, policy)[0]
    for index, name in enumerate(AGENTS):
        accumulate_logprob_gradients(adapted, name, [WINNERS[name], LOSERS[name]], weights[:, index, 0], max_tokens=64)
    return {name: gradients(adapted, name) for name in AGENTS}


def _joint_madpo_gradients(make, **options) -> dict[str, list[torch.Tensor]]:
    """The same by one plain backward pass through the joint loss, each agent on a copy of the base of its own."""
    copies = {name: adapted_model(make(**options), *AGENTS) for name in AGENTS}
    margin = 0.0
    for name in AGENTS:
        for sign, item in ((1, WINNERS[name]), (-1, LOSERS[name])):
            with torch.no_grad(), copies[name].using(None):
                reference = plain_logprob(copies[name].model, *item)
            with copies[name].using(name):
                margin = margin + sign * (plain_logprob(copies[name].model, *item) - reference)
    (-torch.nn.functional.logsigmoid(0.1 * margin)).backward()
    return {name: gradients(copies[name], name) for name in AGENTS}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dpo7_routing_by_agent_equals_the_gradient_of_the_joint_loss(tiny_qwen3, checkpointing):
    adapted = adapted_model(tiny_qwen3(), *AGENTS, gradient_checkpointing=checkpointing)
    found, expected = _routed_madpo_gradients(adapted), _joint_madpo_gradients(tiny_qwen3)
    for name in AGENTS:
        assert relative_difference(found[name], expected[name]) < 1e-5  # float32, sums in another order
        assert all(bool(gradient.any()) for gradient in found[name]), "every tensor of every adapter learns"
    assert all(weight.grad is None for name, weight in adapted.loaded.model.named_parameters() if "lora_" not in name)


def test_dpo7_routing_equals_the_joint_gradient_to_a_millionth_in_float64(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(dtype=torch.float64), *AGENTS)
    found, expected = _routed_madpo_gradients(adapted), _joint_madpo_gradients(tiny_qwen3, dtype=torch.float64)
    for name in AGENTS:
        assert relative_difference(found[name], expected[name]) < 1e-6


def test_dpo7_checkpointing_is_really_on(tiny_qwen3):
    """Otherwise its tests would say nothing: activations inside a layer are computed again in the backward pass."""
    calls = {False: 0, True: 0}
    for checkpointing in calls:
        adapted = adapted_model(tiny_qwen3(), "agent0", gradient_checkpointing=checkpointing)

        def count(*_, key=checkpointing):
            calls[key] += 1

        adapted.backbone.layers[0].mlp.register_forward_pre_hook(count)
        accumulate_logprob_gradients(adapted, "agent0", [(PROMPT, (20, 5))], torch.ones(1), max_tokens=64)
    assert calls == {False: 1, True: 2}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dpo1_dropout_of_the_base_is_off_in_training_too(tiny_qwen3, checkpointing):
    quiet = adapted_model(tiny_qwen3(), "agent0")
    noisy = adapted_model(tiny_qwen3(attention_dropout=0.1), "agent0", gradient_checkpointing=checkpointing)
    items = [(PROMPT, (20, 21, 22, 5)), ((11, 12), (23, 5))]
    expected = response_logprobs(quiet, "agent0", items, max_tokens=64)
    for _ in range(3):
        assert torch.equal(response_logprobs(noisy, "agent0", items, max_tokens=64), expected)


def test_dpo1_dropout_layers_are_off_as_well(tiny_gpt2):
    """GPT-2 has nn.Dropout modules, which act in training mode, and checkpointing needs that mode."""
    quiet = AdaptedModel(tiny_gpt2())
    noisy = AdaptedModel(tiny_gpt2(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1), gradient_checkpointing=True)
    assert noisy.loaded.model.training
    items = [(PROMPT, (20, 21, 22, 2))]
    assert_close(
        response_logprobs(noisy, None, items, max_tokens=64), response_logprobs(quiet, None, items, max_tokens=64)
    )


def test_switching_gives_every_adapter_its_gradient_flag_back(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), *AGENTS)
    before = _flags(adapted)
    trained = {name for name, flag in before.items() if flag}
    assert trained and all("lora_" in name for name in trained)
    assert len(trained) == sum(len(adapted.parameters(name)) for name in AGENTS)
    for adapter in ("agent1", None, "agent0"):
        with adapted.using(adapter):
            pass
        assert _flags(adapted) == before
    with pytest.raises(RuntimeError, match="inside"), adapted.using(None):
        raise RuntimeError("inside")
    assert _flags(adapted) == before


def test_using_selects_the_adapter(tiny_qwen3):
    """Base, agent0 and agent1 are three different functions, and the base comes back after an exception inside."""
    adapted, plain = adapted_model(tiny_qwen3(), *AGENTS), tiny_qwen3()
    expected = plain_logprob(plain.model, PROMPT, (20, 5))
    values = {}
    for adapter in (None, *AGENTS, None):
        with torch.no_grad(), adapted.using(adapter):
            values[adapter] = plain_logprob(adapted.model, PROMPT, (20, 5))
    assert_close(values[None], expected)
    assert len({round(float(value), 3) for value in values.values()}) == 3
    with pytest.raises(KeyError, match="agent7.*agent0"), adapted.using("agent7"):
        pass


def test_a_fresh_adapter_is_the_base_and_comes_from_its_stream(tiny_qwen3):
    adapted = AdaptedModel(tiny_qwen3(), rank=4)
    for index in range(2):
        adapted.add_adapter(f"agent{index}", Stream(0, "init", index))
    adapted.add_adapter("twin", Stream(0, "init", 0))
    for lora_b in adapted.parameters("agent0")[1::2]:
        assert not lora_b.any()
    for one, two, twin in zip(*(adapted.parameters(name)[::2] for name in ("agent0", "agent1", "twin")), strict=True):
        bound = 1 / one.shape[1] ** 0.5
        assert bool(one.any()) and float(one.detach().abs().max()) <= bound
        assert torch.equal(one, twin) and not torch.equal(one, two)
    items = [(PROMPT, (20, 21, 5))]
    assert torch.equal(
        response_logprobs(adapted, "agent0", items, max_tokens=64),
        response_logprobs(adapted, None, items, max_tokens=64),
    )


def test_all_seven_projections_of_every_layer_carry_an_adapter(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    assert len(adapted.parameters("agent0")) == 2 * 7 * adapted.loaded.model.config.num_hidden_layers


def test_an_adapter_can_be_deleted_and_made_again(tiny_qwen3):
    """The reward model does so in every iteration; the agents must not notice."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    items = [(PROMPT, (20, 21, 5))]
    before = response_logprobs(adapted, "agent0", items, max_tokens=64)
    for round_ in range(2):
        adapted.add_adapter("extra", Stream(round_, "init"))
        randomize_adapter(adapted, "extra", seed=round_)
        with pytest.raises(ValueError, match="already has an adapter 'extra'"):
            adapted.add_adapter("extra", Stream(0, "init"))
        adapted.delete_adapter("extra")
        assert torch.equal(response_logprobs(adapted, "agent0", items, max_tokens=64), before)
        assert all(weight.requires_grad for weight in adapted.parameters("agent0"))


def test_the_only_adapter_can_be_deleted_and_made_again(tiny_qwen3):
    """A critic or reward model on a base of its own leaves that base bare."""
    adapted = AdaptedModel(tiny_qwen3(), rank=4)
    items = [(PROMPT, (20, 21, 5))]
    before = response_logprobs(adapted, None, items, max_tokens=64)
    for round_ in range(2):
        adapted.add_adapter("extra", Stream(round_, "init"))
        randomize_adapter(adapted, "extra", seed=round_)
        assert not torch.equal(response_logprobs(adapted, "extra", items, max_tokens=64), before)
        adapted.delete_adapter("extra")
        assert torch.equal(response_logprobs(adapted, None, items, max_tokens=64), before)


def test_state_is_a_copy_and_loading_it_brings_one_adapter_back(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), *AGENTS)
    state, other = adapted.state("agent0"), [weight.detach().clone() for weight in adapted.parameters("agent1")]
    kept = [weight.detach().clone() for weight in adapted.parameters("agent0")]
    randomize_adapter(adapted, "agent0", seed=9)
    adapted.load_state("agent0", state)
    assert all(map(torch.equal, adapted.parameters("agent0"), kept))
    assert all(map(torch.equal, adapted.parameters("agent1"), other)), "the other adapter is untouched"
    randomize_adapter(adapted, "agent0", seed=10)
    adapted.load_state("agent0", state)  # loading twice from one state: the first load did not alias it
    assert all(map(torch.equal, adapted.parameters("agent0"), kept))


def test_taking_the_state_asks_no_hub(tiny_qwen3, monkeypatch):
    """PEFT looks up the base's config on the hub when a model with a hub id is saved; a snapshot must not."""

    def refuse(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)
    loaded = tiny_qwen3()
    loaded.model.config._name_or_path = loaded.model.name_or_path = "someone/a-hub-model"
    adapted = adapted_model(loaded, "agent0")
    assert len(adapted.state("agent0")) == len(adapted.parameters("agent0"))


def test_save3_stock_peft_loads_each_agent_and_not_the_other(tiny_qwen3, tmp_path):
    loaded = tiny_qwen3()
    loaded.model.save_pretrained(tmp_path / "base")
    adapted = adapted_model(loaded, *AGENTS)
    for name in AGENTS:
        adapted.save(name, tmp_path / "adapters")
    for name in AGENTS:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        stock = PeftModel.from_pretrained(base, tmp_path / "adapters" / name, is_trainable=True)
        assert sum(weight.requires_grad for weight in stock.parameters()) == len(adapted.parameters(name))
        for item in (WINNERS[name], LOSERS[name]):
            expected = response_logprobs(adapted, name, [item], max_tokens=64)[0]
            assert_close(plain_logprob(stock, *item).detach().float(), expected, rtol=1e-5, atol=1e-5)
    both = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        tmp_path / "adapters" / "agent0",
        adapter_name="agent0",
        is_trainable=True,
    )
    both.load_adapter(tmp_path / "adapters" / "agent1", "agent1", is_trainable=True)
    for name in AGENTS:
        both.set_adapter(name)
        expected = response_logprobs(adapted, name, [WINNERS[name]], max_tokens=64)[0]
        assert_close(plain_logprob(both, *WINNERS[name]).detach().float(), expected, rtol=1e-5, atol=1e-5)


def test_save3_load_brings_the_weights_back_trainable(tiny_qwen3, tmp_path):
    adapted = adapted_model(tiny_qwen3(), *AGENTS)
    kept = {name: [weight.detach().clone() for weight in adapted.parameters(name)] for name in AGENTS}
    for name in AGENTS:
        adapted.save(name, tmp_path)
    again = adapted_model(tiny_qwen3(), *AGENTS, seed=5)
    for name in AGENTS:
        again.load(name, tmp_path)
        assert all(map(torch.equal, again.parameters(name), kept[name]))
        assert all(weight.requires_grad for weight in again.parameters(name))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        again.load("agent0", tmp_path / "elsewhere")


def test_save3_an_adapter_of_another_shape_is_refused(tiny_qwen3, tmp_path):
    """PEFT ignores what does not fit: without a check an adapter of a deeper base would load as half of itself."""
    adapted_model(tiny_qwen3(num_hidden_layers=3), "agent0").save("agent0", tmp_path)
    with pytest.raises(ValueError, match="agent0"):
        adapted_model(tiny_qwen3(), "agent0").load("agent0", tmp_path)
    adapted_model(tiny_qwen3(num_hidden_layers=1), "agent0").save("agent0", tmp_path)
    with pytest.raises(ValueError, match="agent0"):
        adapted_model(tiny_qwen3(), "agent0").load("agent0", tmp_path)


def test_merged_weight_is_the_base_plus_the_scaled_update_and_a_new_tensor(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), *AGENTS)  # rank 4, alpha 8: scale 2
    before = _base_weights(adapted)
    layer = adapted.backbone.layers[1].mlp.down_proj
    base = layer.get_base_layer().weight.detach()
    lora_a, lora_b = layer.lora_A["agent1"].weight.detach(), layer.lora_B["agent1"].weight.detach()
    assert_close(adapted.merged_weight(layer, "agent1"), base + 2.0 * lora_b @ lora_a)
    assert torch.equal(adapted.merged_weight(layer, None), base)
    assert all(torch.equal(before[name], weight) for name, weight in _base_weights(adapted).items())


def test_seed2_building_adapters_leaves_the_global_random_states_alone(tiny_qwen3):
    loaded = tiny_qwen3()
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    adapted = adapted_model(loaded, *AGENTS)
    adapted.add_adapter("agent2", Stream(0, "init"))
    ScalarModel(adapted, "reward_model", Stream(0, "reward"), max_tokens=64)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_a_base_that_changes_its_logits_after_the_output_layer_is_refused(tiny_qwen3, name):
    loaded = tiny_qwen3()
    setattr(loaded.model.config, name, 30.0)
    with pytest.raises(ValueError, match=name):
        AdaptedModel(loaded)


def test_prompts_are_shared_only_under_full_attention(tiny_qwen3):
    assert AdaptedModel(tiny_qwen3()).shares_prompts
    assert not AdaptedModel(tiny_qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1)).shares_prompts
    windowed = tiny_qwen3()
    windowed.model.config.sliding_window = 8  # Mistral's way: no layer_types
    windowed.model.config.layer_types = None
    assert not AdaptedModel(windowed).shares_prompts


def test_stop_ids_hold_the_eos_of_tokenizer_and_generation_config(tiny_qwen3):
    loaded = tiny_qwen3()
    assert AdaptedModel(loaded).stop_ids == {5}
    loaded.model.generation_config.eos_token_id = [5, 3]
    assert AdaptedModel(loaded).stop_ids == {5, 3}
    loaded.model.generation_config.eos_token_id = None
    assert AdaptedModel(loaded).stop_ids == {5}


def test_no_warning_is_raised_by_adding_adapters(tiny_qwen3):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted_model(tiny_qwen3(), *AGENTS)
