"""vLLM itself, on its CPU build, in an environment of its own: tests/vllm_environment.sh, CONTRIBUTING.md.

Everything is in float32 on both sides. Greedy ids must then be equal; log-probabilities of one token agree within 1e-3
nats, on average within 1e-5.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_structured import TWO, byte_tokenizer
from toy_models import randomize_adapter
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from travel_trips import task as trip_task

from mapl_core import domains
from mapl_core.adapters import AdaptedModel
from mapl_core.domains import get_domain
from mapl_core.domains.travel import TravelDomain
from mapl_core.models import load_model
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig, load_profile
from mapl_core.results import verify_job
from mapl_core.rewards import Reward
from mapl_core.sampling import SamplingSettings, TransformersSampler
from mapl_core.seeding import Stream
from mapl_core.structured import SkeletonState, SkeletonTokens, replay
from mapl_core.tokens import encode_prompt
from mapl_core.train import run_mapl
from mapl_core.vllm_sampling import EngineSettings, VllmSampler

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a tiny model would wait half a minute for a process of its own
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MODELS = ("pocket:tldr:1x", "smollm2-135m-instruct")
SCALES = dict(zip(MODELS, (0.3, 0.05), strict=True))  # of random adapters, so that greedy answers differ, and may end
ADAPTERS = (None, "agent0", "agent1")
STREAM = Stream(0, "collect")
PLAIN = TransformersSampler(100_000)


@pytest.fixture(scope="module", autouse=True)
def vllm_here() -> Iterator[None]:
    for name, setting in ENVIRONMENT.items():
        os.environ.setdefault(name, setting)
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: tests/vllm_environment.sh")
    yield


def two_agents(model: str, scale: float, rank: int = 8) -> AdaptedModel:
    """A base with two agents that differ from it and from each other."""
    try:
        base = AdaptedModel(load_model(model, device="cpu"), rank=rank, alpha=2 * rank)
    except OSError as error:
        pytest.skip(str(error))
    for index, name in enumerate(ADAPTERS[1:]):
        base.add_adapter(name, Stream(0, "init", index))
        randomize_adapter(base, name, seed=index, scale=scale)
    return base


@pytest.fixture(scope="module")
def sampler(vllm_here) -> Iterator[VllmSampler]:
    made = VllmSampler(EngineSettings(0.5, 1024, 16), max_difference=1e-3, micro_batch_tokens=4096)
    yield made
    made.close()


@pytest.fixture(scope="module", params=MODELS)
def adapted(request) -> AdaptedModel:
    return two_agents(request.param, scale=SCALES[request.param])


@pytest.fixture(scope="module")
def pocket(sampler) -> AdaptedModel:
    return two_agents(MODELS[0], scale=SCALES[MODELS[0]])


def prompts_of(adapted: AdaptedModel, count: int = 4) -> list[tuple[int, ...]]:
    """What the first agent is asked about some posts."""
    domain = get_domain("tldr")
    tasks = domain.load_tasks("eval", "pocket" if "pocket" in adapted.loaded.name else "small", count)
    return [tuple(encode_prompt(adapted.tokenizer, domain.prompts(task)[0], "chat")) for task in tasks]


def drawn(sampler, adapted, adapter, *, samples=1, temperature=0.0, limit=24, prompts=None, stream=STREAM, **options):
    prompts = prompts or prompts_of(adapted)
    keys = [f"{prompt}/{sample}" for prompt in range(len(prompts)) for sample in range(samples)]
    settings = SamplingSettings(temperature, max_new_tokens=limit)
    return sampler.sample(adapted, adapter, prompts, keys, stream, samples=samples, settings=settings, **options)


# --- the same policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_vlm2_greedy_ids_are_those_of_the_transformers_backend(sampler, adapted, adapter):
    found = drawn(sampler, adapted, adapter)
    assert found == drawn(PLAIN, adapted, adapter)
    assert len({sample for group in found for sample in group}) > 1


def test_the_three_policies_of_a_base_differ(sampler, adapted):
    assert len({str(drawn(sampler, adapted, adapter)) for adapter in ADAPTERS}) == 3


def test_vlm2_samples_end_with_the_end_of_sequence_or_say_that_they_were_cut_off(sampler, adapted):
    groups = drawn(sampler, adapted, "agent0", samples=6, temperature=1.0)
    found = [sample for group in groups for sample in group]
    for sample in found:
        assert sample.truncated == (sample.token_ids[-1] not in adapted.stop_ids)
        assert not adapted.stop_ids & set(sample.token_ids[:-1]) and not sample.forced
        assert len(sample.token_ids) == 24 or (len(sample.token_ids) < 24 and not sample.truncated)
    assert all(len(set(group)) > 1 for group in groups)
    if adapted.loaded.name == MODELS[0]:
        assert {sample.truncated for sample in found} == {True, False}


def test_equal_keys_give_equal_samples_and_other_keys_others(sampler, adapted):
    once, again = (drawn(sampler, adapted, "agent0", samples=3, temperature=1.0) for _ in range(2))
    assert once == again
    for stream in (STREAM.for_agent(1), Stream(1, "collect"), Stream(0, "collect", 0, 1)):
        assert drawn(sampler, adapted, "agent0", samples=3, temperature=1.0, stream=stream) != once
    prompt = prompts_of(adapted)[:1]
    assert drawn(sampler, adapted, "agent0", samples=3, temperature=1.0, prompts=prompt)[0] == once[0], "batch mates"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_log_probabilities_agree_with_the_trainers(sampler, adapted, adapter):
    sampler.report()
    drawn(sampler, adapted, adapter, samples=4, temperature=0.7)
    report = sampler.report()
    assert report["logprob_difference"] < 1e-5 and report["largest_logprob_difference"] < 1e-3
    assert report["compared_tokens"] > 30


def test_vlm1_refreshed_adapters_answer_at_once_even_behind_a_cached_prompt(sampler, adapted):
    """A prompt of several cache blocks: neither the old weights answer, nor the new ones on the old prompt's cache."""
    prompts = [(prompts_of(adapted)[0] * 20)[:400]]
    old = drawn(sampler, adapted, "agent0", prompts=prompts)
    other = drawn(sampler, adapted, "agent1", prompts=prompts)
    state = adapted.state("agent0")
    randomize_adapter(adapted, "agent0", seed=77, scale=SCALES[adapted.loaded.name])
    new = drawn(sampler, adapted, "agent0", prompts=prompts)
    assert new == drawn(PLAIN, adapted, "agent0", prompts=prompts) and new != old
    assert drawn(sampler, adapted, "agent1", prompts=prompts) == other
    adapted.load_state("agent0", state)
    assert drawn(sampler, adapted, "agent0", prompts=prompts) == old


def test_weights_that_the_engine_does_not_have_are_found_out(sampler, pocket, monkeypatch):
    """With the refresh switched off the engine answers with old weights; the log-probabilities tell."""
    drawn(sampler, pocket, "agent0", temperature=1.0)
    engine = sampler._engines[pocket]
    served = engine._served["agent0"].request
    monkeypatch.setattr(engine, "_request", lambda adapter: served)
    state = pocket.state("agent0")
    randomize_adapter(pocket, "agent0", seed=77, scale=SCALES[MODELS[0]])
    try:
        with pytest.raises(RuntimeError, match="adapter agent0.*rollout_difference allows 0.001"):
            drawn(sampler, pocket, "agent0", temperature=1.0)
    finally:
        pocket.load_state("agent0", state)
        sampler.report()


def test_an_agent_that_the_joint_policy_saved_is_loaded_by_vllm_as_it_is(sampler, pocket, tmp_path: Path):
    """Stock vLLM on the folder of a finished run answers as the agent did in training."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    base = AdaptedModel(load_model(MODELS[0], device="cpu"), rank=8, alpha=16)
    settings = [SamplingSettings(0.0, max_new_tokens=24)] * 2
    policy = JointPolicy(get_domain("tldr"), "dec", [base] * 2, settings, prompt_form="chat", stream=Stream(3, "init"))
    for index, member in enumerate(policy.members):
        randomize_adapter(base, member.adapter, seed=20 + index, scale=SCALES[MODELS[0]])
    policy.save(tmp_path)
    drawn(sampler, pocket, None)
    llm, prompts = sampler._engines[pocket].llm, prompts_of(pocket)
    for index, name in enumerate(("agent0", "agent1")):
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=24),
            lora_request=LoRARequest(f"saved-{name}", 900 + index, str(tmp_path / name)),
            use_tqdm=False,
        )
        expected = drawn(PLAIN, base, name, prompts=prompts)
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == [g[0].token_ids for g in expected]


def test_seed2_neither_an_engine_nor_its_work_moves_the_global_random_states(sampler, pocket):
    """Last of those that use the pocket model's engine: closing one here ends what engines of one process share."""
    states, threads = (torch.random.get_rng_state(), np.random.get_state()[1].copy()), torch.get_num_threads()
    python = random.getstate()
    fresh = VllmSampler(EngineSettings(0.5, 512, 4), max_difference=1e-3, micro_batch_tokens=4096)
    drawn(fresh, pocket, "agent0", temperature=1.0)
    fresh.close()
    assert torch.equal(states[0], torch.random.get_rng_state()) and torch.get_num_threads() == threads
    assert (states[1] == np.random.get_state()[1]).all() and python == random.getstate()
    assert torch.get_default_dtype() == torch.float32


# --- answers with a skeleton -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory) -> AdaptedModel:
    """A random model whose tokens are bytes, and which has more logits than tokens, as published models have."""
    folder, tokenizer = tmp_path_factory.mktemp("bytes"), byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 7, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096,
        initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    save_random(Qwen3ForCausalLM, config, tokenizer, folder)
    return two_agents(str(folder), scale=0.1)


def save_random(kind, config, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind._from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_skeleton_forces_the_same_ids_and_leaves_the_same_choices(sampler, bytes_model, adapter):
    prompts = [tuple(range(30, 60)), tuple(range(40, 90)), tuple(range(35, 75))]
    skeletons = [TWO, None, TWO]
    options = {"limit": 40, "prompts": prompts, "skeletons": skeletons}
    found = drawn(sampler, bytes_model, adapter, **options)
    assert found == drawn(PLAIN, bytes_model, adapter, **options)
    assert found[0][0].forced and not found[1][0].forced
    sampler.report()
    tokens = SkeletonTokens.of(TWO, bytes_model.tokenizer)
    groups = drawn(sampler, bytes_model, adapter, samples=8, temperature=1.0, **options)
    for sample in [*groups[0], *groups[2]]:
        assert tuple(replay(sample.token_ids, tokens)[0]) == sample.forced and not sample.truncated
    assert len(set(groups[0])) > 4, "the values are still sampled"
    report = sampler.report()  # under the mask on both sides
    assert report["logprob_difference"] < 1e-5 and report["largest_logprob_difference"] < 1e-3


@pytest.mark.parametrize("model", ["bytes", MODELS[1]])
def test_the_grammar_allows_exactly_what_the_skeleton_allows(bytes_model, model):
    """Random walks through a whole answer: at every step the same set of ids, and the end of sequence at the end."""
    import llguidance
    import llguidance.hf
    import llguidance.torch

    tokenizer = bytes_model.tokenizer
    if model != "bytes":
        tokenizer = two_agents(model, scale=0.0).tokenizer
    travel = get_domain("travel", structured=True).skeleton(0, trip_task())
    size = len(tokenizer)
    shared = llguidance.hf.from_tokenizer(tokenizer, size)
    generator = torch.Generator().manual_seed(0)
    for skeleton in (TWO, replace(TWO, value_tokens=1), travel):
        tokens = SkeletonTokens.of(skeleton, tokenizer)
        matcher, state = llguidance.LLMatcher(shared, tokens.grammar), SkeletonState(tokens)
        mask = llguidance.torch.allocate_token_bitmask(1, size)
        while True:
            llguidance.torch.fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")[:size]
            expected = torch.zeros(size, dtype=torch.bool)
            if state.forced is not None:
                expected[state.forced] = True
            else:
                expected[: len(state.choices)] = state.choices
            assert (bits.astype(bool) == expected.numpy()).all(), matcher.get_error()
            if state.forced == tokens.end:
                break
            weights = expected.double()
            if float(weights[tokens.values.quote]) and int(expected.sum()) > 1:
                weights[tokens.values.quote] = weights.sum() / 3  # values of all lengths
            token = int(torch.multinomial(weights, 1, generator=generator))
            assert matcher.consume_token(token), matcher.get_error()
            state.advance(token)


# --- whole runs ------------------------------------------------------------------------------------------------------


def check_run(config: RunConfig, folder: Path) -> None:
    """One iteration leaves a whole job whose agents have moved, and whose two sides agreed throughout."""
    result = run_mapl(config, folder, progress=False)
    measured = {(row.metric, row.iteration): row.value for row in result.metrics}
    for iteration in (0, 1):
        assert measured["rollouts/logprob_difference", iteration] < 1e-4
        assert measured["rollouts/largest_logprob_difference", iteration] < 1e-2
        assert measured["rollouts/compared_tokens", iteration] > 10
    assert max(row.env_steps for row in result.metrics) > 0
    assert verify_job(folder)["status"] == "done"
    for name in ("agent0", "agent1"):
        assert (folder / "adapters" / name / "adapter_model.safetensors").is_file()
        assert measured[f"train/gradient_norm_{name}", 1] > 0


@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_one_iteration_on_tldr_runs_through_vllm(tmp_path, method):
    small = {"iterations": 1, "train_tasks": 6, "eval_tasks": 4, "eval_samples": 2, "samples_per_task": 4}
    config = load_profile("pocket").config(
        "tldr", method, **small, rollouts="vllm", rollout_tokens=512, rollout_sequences=16, rollout_difference=1e-3
    )
    check_run(config, tmp_path / "out")


class LetterDomain(TravelDomain):
    """Travel's prompts and skeletons on trips of the tests' own; a random model is paid for the letter e."""

    def load_tasks(self, split, source, limit=None):
        return [replace(trip_task(), id=f"{split}-{number}", split=split) for number in range(limit)]

    def reward(self, responses, task):
        letters = sum(text.count("e") for text in responses) / sum(map(len, responses))
        return Reward(letters, {"letters": letters})


@pytest.fixture(scope="module")
def travel_model(tmp_path_factory) -> str:
    """A small random model with the tokenizer of a real one: Travel's texts are long in bytes."""
    folder, tokenizer = tmp_path_factory.mktemp("travel"), two_agents(MODELS[1], scale=0.0).tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192, initializer_range=0.2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    save_random(LlamaForCausalLM, config, tokenizer, folder)
    return str(folder)


@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_one_iteration_on_travel_runs_through_vllm_with_forced_skeletons(monkeypatch, travel_model, tmp_path, method):
    monkeypatch.setitem(domains.DOMAINS, "travel", LetterDomain)
    config = RunConfig(
        "test", "travel", method, source="small", domain_options={"structured": True},
        agent_models=[travel_model], train_tasks=2, eval_tasks=1, eval_samples=1, iterations=1, samples_per_task=3,
        pairs_per_task=2, num_generations=2, max_new_tokens=[1100], lora_rank=8, reward_model_tokens=2048,
        reward_model_epochs=1, micro_batch_tokens=8192, rollouts="vllm", rollout_tokens=8192, rollout_sequences=8,
        rollout_difference=1e-3,
    )  # fmt: skip
    check_run(config, tmp_path / "out")
