"""What surrounds a vLLM engine, on a stand-in for it: whose weights it is handed, and what is made of its answers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from toy_domains import ToyDomain
from toy_models import randomize_adapter

from mapl_core import domains
from mapl_core.adapters import AdaptedModel
from mapl_core.models import load_model
from mapl_core.profiles import ConfigError, RunConfig, check_rollouts
from mapl_core.sampling import SamplingSettings, TransformersSampler
from mapl_core.scoring import Item, response_logprobs
from mapl_core.seeding import Stream
from mapl_core.train import run_mapl
from mapl_core.vllm_sampling import COMPARED, EngineSettings, VllmSampler

PROMPTS = [(7, 8, 9), (10, 11, 12, 13, 14), (18,)]
KEYS = [f"task{prompt}/sample{sample}" for prompt in range(3) for sample in range(4)]
STREAM = Stream(0, "collect")


@pytest.fixture
def adapted(tiny_qwen3, tmp_path: Path) -> AdaptedModel:
    """A base that was loaded from a folder, with two agents that differ from it and from each other."""
    loaded = tiny_qwen3()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    base = AdaptedModel(load_model(str(tmp_path / "model"), device="cpu"), rank=4, alpha=8)
    for index, name in enumerate(("agent0", "agent1")):
        base.add_adapter(name, Stream(0, "init", index))
        randomize_adapter(base, name, seed=index)
    return base


@pytest.fixture
def sampler(stand_in_vllm) -> VllmSampler:
    return VllmSampler(EngineSettings(0.5, 64, 8), max_difference=1e-3, micro_batch_tokens=512)


def value(result, metric, iteration):
    return next(row.value for row in result.metrics if (row.metric, row.iteration) == (metric, iteration))


def sampled(sampler, adapted, adapter="agent0", *, temperature=1.0, limit=6, prompts=PROMPTS, stream=STREAM):
    settings = SamplingSettings(temperature, max_new_tokens=limit)
    keys = KEYS[: 4 * len(prompts)]
    return sampler.sample(adapted, adapter, prompts, keys, stream, samples=4, settings=settings)


@pytest.mark.parametrize("adapter", [None, "agent0", "agent1"])
def test_greedy_samples_are_those_of_the_transformers_backend_once_for_every_sample(adapted, sampler, adapter):
    expected = sampled(TransformersSampler(10_000), adapted, adapter, temperature=0.0)
    assert sampled(sampler, adapted, adapter, temperature=0.0) == expected
    assert {len(group) for group in expected} == {4} and {len(set(group)) for group in expected} == {1}


def test_samples_hold_the_end_of_sequence_and_say_what_was_cut_off(tiny_qwen3, sampler, tmp_path):
    loaded = tiny_qwen3()
    with torch.no_grad():  # the base likes to end its answers
        head = loaded.model.get_output_embeddings().weight
        head[loaded.tokenizer.eos_token_id] += 1.5 * head[8]
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    adapted = AdaptedModel(load_model(str(tmp_path), device="cpu"), rank=4, alpha=8)
    groups = sampled(sampler, adapted, None, limit=5)
    found = [sample for group in groups for sample in group]
    assert {sample.truncated for sample in found} == {True, False}
    for sample in found:
        assert sample.truncated == (sample.token_ids[-1] not in adapted.stop_ids)
        assert not sample.truncated or len(sample.token_ids) == 5


def test_vlm1_an_adapter_is_handed_over_again_when_its_weights_have_changed(adapted, sampler, stand_in_vllm):
    """Under a new id, name and folder; what it replaces is removed. The engine answers with the new weights."""
    first = sampled(sampler, adapted, temperature=0.0)
    sampled(sampler, adapted, temperature=0.0)
    sampled(sampler, adapted, "agent1", temperature=0.0)
    randomize_adapter(adapted, "agent0", seed=77)
    second = sampled(sampler, adapted, temperature=0.0)
    assert second != first and second == sampled(TransformersSampler(10_000), adapted, temperature=0.0)
    a, again, b, refreshed = stand_in_vllm.requests
    assert again == a
    for same in ("lora_int_id", "lora_name", "lora_path"):
        assert len({getattr(request, same) for request in (a, b, refreshed)}) == 3, same
    assert not Path(a.lora_path).exists() and Path(b.lora_path).is_dir() and Path(refreshed.lora_path).is_dir()
    assert stand_in_vllm.events.count("remove_lora") == 1 and len(stand_in_vllm.engines) == 1


def test_vlm1_an_engine_that_serves_old_weights_is_found_out(adapted, sampler, stand_in_vllm):
    stand_in_vllm.stale = True
    sampled(sampler, adapted)
    randomize_adapter(adapted, "agent0", seed=77)
    with pytest.raises(RuntimeError, match="differ by .* adapter agent0.* rollout_difference allows 0.001"):
        sampled(sampler, adapted)


def test_the_difference_is_a_mean_over_tokens_at_temperature_one_and_starts_afresh(adapted, sampler, stand_in_vllm):
    assert sampler.report() == {}
    stand_in_vllm.shift = 4e-4
    groups = sampled(sampler, adapted, temperature=0.6)
    in_order = [group[number] for number in range(4) for group in groups]  # the first of every prompt first
    tokens = sum(len(sample.token_ids) for sample in in_order[:COMPARED])
    report = sampler.report()
    assert report.pop("compared_tokens") == tokens
    for name in ("logprob_difference", "largest_logprob_difference"):
        assert_close(report[name], 4e-4, rtol=0, atol=1e-6)
    assert sampler.report() == {}
    stand_in_vllm.shift = 2e-3
    with pytest.raises(RuntimeError, match="differ by 0.002 nats a token on average"):
        sampled(sampler, adapted)


def test_of_many_responses_the_first_ones_of_every_prompt_are_compared(adapted, sampler, stand_in_vllm):
    prompts = [(7, number) for number in range(6, COMPARED + 10)]
    keys = [f"{prompt}/{sample}" for prompt in prompts for sample in range(2)]
    settings = SamplingSettings(max_new_tokens=2)
    groups = sampler.sample(adapted, "agent0", prompts, keys, STREAM, samples=2, settings=settings)
    compared = sum(len(group[0].token_ids) for group in groups[:COMPARED])
    assert sampler.report()["compared_tokens"] == compared
    assert [p.logprobs for p in stand_in_vllm.parameters] == [0] * COMPARED + [None] * (len(prompts) - COMPARED)


def test_a_prompt_is_sent_once_with_a_seed_of_its_own(adapted, sampler, stand_in_vllm):
    """Seeds depend on run, iteration, agent and the prompt's key, so two fresh agents differ; samples differ too."""
    groups = sampled(sampler, adapted)
    assert [p.n for p in stand_in_vllm.parameters] == [4, 4, 4]
    assert all(len(set(group)) > 1 for group in groups)
    for stream in (STREAM, STREAM.for_agent(1), Stream(1, "collect"), Stream(0, "collect", 0, 1)):
        sampled(sampler, adapted, stream=stream)
    seeds = [p.seed for p in stand_in_vllm.parameters]
    assert seeds[3:6] == seeds[:3] and len(set(seeds)) == 12 and all(0 <= seed < 2**62 for seed in seeds)
    assert sampled(sampler, adapted) == groups


def test_the_engine_is_told_the_policys_settings_and_the_profiles_limits(adapted, sampler, stand_in_vllm):
    settings = SamplingSettings(0.7, 0.9, 5, 20)
    sampler.sample(adapted, "agent0", PROMPTS, KEYS, STREAM, samples=4, settings=settings)
    told = stand_in_vllm.parameters[0]
    assert (told.temperature, told.top_p, told.top_k, told.max_tokens) == (0.7, 0.9, 20, 5)
    assert told.stop_token_ids == sorted(adapted.stop_ids) and told.structured_outputs is None
    engine = stand_in_vllm.engines[0].settings
    assert engine["model"] == adapted.loaded.source and engine["dtype"] == "float32" and engine["quantization"] is None
    assert (engine["gpu_memory_utilization"], engine["max_model_len"], engine["max_num_seqs"]) == (0.5, 64, 8)
    assert (engine["enable_lora"], engine["max_loras"], engine["max_lora_rank"]) == (True, 2, 8)
    assert engine["enable_prefix_caching"] and engine["logprobs_mode"] == "raw_logprobs"
    assert not engine["enable_sleep_mode"], "only a GPU has memory to give back"


def test_an_engine_on_a_gpu_is_awake_only_while_it_samples(adapted, sampler, stand_in_vllm):
    sampled(sampler, adapted)
    sampler._engines[adapted].sleeps = True
    stand_in_vllm.events.clear()
    randomize_adapter(adapted, "agent0", seed=77)
    sampled(sampler, adapted)
    assert stand_in_vllm.events == ["wake_up", "remove_lora", "generate", "sleep 1"]


def test_seed2_neither_the_engine_nor_its_work_moves_the_global_random_states(adapted, sampler):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    sampled(sampler, adapted)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_what_an_engine_cannot_serve_is_refused_by_name(adapted, sampler, tiny_qwen3):
    with pytest.raises(ValueError, match="a prompt of 60 tokens .* up to 6 exceeds the engine's 64.*rollout_tokens"):
        sampled(sampler, adapted, prompts=[tuple(range(6, 26)) * 3])
    with pytest.raises(ValueError, match="'tiny-qwen3' has no folder or hub id"):
        sampled(sampler, AdaptedModel(tiny_qwen3()), None)
    adapted.rank = 1000
    with pytest.raises(ValueError, match="lora_rank is 1000; vLLM takes at most 512"):
        sampled(VllmSampler(EngineSettings(0.5, 64, 8), max_difference=1.0, micro_batch_tokens=64), adapted)


def test_an_engine_that_does_not_start_names_what_to_lower(adapted, sampler, monkeypatch):
    def fails(self, **settings):
        raise ValueError("No available memory for the cache blocks")

    import stand_in_vllm as stand_in

    monkeypatch.setattr(stand_in.LLM, "__init__", fails)
    with pytest.raises(RuntimeError, match="No available memory.* rollout_sequences .8. and rollout_tokens"):
        sampled(sampler, adapted)


def test_closing_shuts_the_engine_down_and_removes_the_adapters_files(adapted, sampler, stand_in_vllm):
    sampled(sampler, adapted)
    folder = Path(stand_in_vllm.requests[0].lora_path)
    sampler.close()
    assert stand_in_vllm.events[-1] == "shutdown" and not folder.exists() and not folder.parent.parent.exists()


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(monkeypatch, adapted):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)

    def make(method="madpo", **changes) -> RunConfig:
        values = {
            "agent_models": [adapted.loaded.source],
            "rollouts": "vllm",
            "rollout_tokens": 256,
            "train_tasks": 4,
            "eval_tasks": 2,
            "eval_samples": 2,
            "max_new_tokens": [6],
            "iterations": 2,
            "samples_per_task": 4,
            "pairs_per_task": 2,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "reward_model_epochs": 1,
            **changes,
        }
        return RunConfig("test", "toy", method, **values)

    return make


@pytest.mark.parametrize("method, comparator", [("madpo", "last"), ("marlhf", "current"), ("untrained", "current")])
def test_a_run_samples_through_the_engine_and_reports_the_difference_at_every_iteration(
    config, stand_in_vllm, tmp_path, method, comparator
):
    result = run_mapl(config(method, comparator=comparator), tmp_path / "out", progress=False)
    for iteration in range(1 if method == "untrained" else 3):
        assert 0 <= value(result, "rollouts/logprob_difference", iteration) < 1e-5
        assert value(result, "rollouts/largest_logprob_difference", iteration) < 1e-4
        assert value(result, "rollouts/compared_tokens", iteration) > 8
    assert stand_in_vllm.events[-1] == "shutdown" and len(stand_in_vllm.engines) == 1
    if method != "untrained":
        assert len({request.lora_int_id for request in stand_in_vllm.requests if request}) >= 6  # 2 agents, 3 versions


def test_a_run_stops_where_the_log_probabilities_part(config, stand_in_vllm, tmp_path):
    stand_in_vllm.shift = 0.2
    with pytest.raises(RuntimeError, match="differ by 0.2 nats a token"):
        run_mapl(config(), tmp_path / "out", progress=False)
    assert stand_in_vllm.events[-1] == "shutdown" and not list((tmp_path / "out").glob("*.pt"))


def test_a_missing_vllm_stops_the_run_before_any_model_is_loaded(config, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("mapl_core.team.load_model", lambda name: pytest.fail("a model was loaded"))
    with pytest.raises(ImportError, match="pip install -r requirements-gpu.txt, or set the profile's `rollouts`"):
        run_mapl(config(), tmp_path / "out", progress=False)
    check_rollouts("transformers")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollouts": "vlm"}, "unknown rollouts 'vlm'; valid: transformers, vllm"),
        ({"rollout_memory": 1.5}, "rollout_memory is 1.5"),
        ({"rollout_difference": 0.0}, "rollout_difference is 0.0; it must be positive"),
        ({"rollout_tokens": 6}, "rollout_tokens is 6, and by max_new_tokens a response may take 6"),
        ({"rollout_sequences": 0}, "rollout_sequences is 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)
    if "rollout_tokens" in changes:
        config(rollouts="transformers", **changes)


def test_the_transformers_backend_reports_nothing_and_draws_as_ever(adapted):
    """Its samples are keyed by row: the same whether a prompt's samples are asked for together or one by one."""
    sampler = TransformersSampler(10_000)
    together = sampled(sampler, adapted)
    alone = sampler.sample(
        adapted, "agent0", [PROMPTS[1]], KEYS[6:7], STREAM, samples=1, settings=SamplingSettings(max_new_tokens=6)
    )
    assert alone == [[together[1][2]]] and sampler.report() == {}
    item = Item(PROMPTS[1], together[1][2].token_ids)
    assert float(response_logprobs(adapted, "agent0", [item], max_tokens=100)) < 0
