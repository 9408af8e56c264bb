"""Bases held in 4 bits, by bitsandbytes and by Unsloth, on their CPU builds: the same losses, adapters and samples.

They need packages of requirements-gpu.txt in an environment of their own (CONTRIBUTING.md has the command):

    python -m pytest tests/test_four_bit.py -m unsloth

A stand-in of tests/test_unsloth_loader.py shows what Unsloth does on a GPU alone.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.testing import assert_close
from toy_models import gradients, plain_logprob, randomize_adapter, relative_difference

from mapl_core.adapters import AdaptedModel
from mapl_core.annotators import oracle
from mapl_core.buffers import label_pairs, select_pairs
from mapl_core.decoders import DirectDecoder, TransformersDecoder
from mapl_core.domains import get_domain
from mapl_core.model_names import LOADERS, SMOLLM2, check_loader
from mapl_core.models import describe, load_model
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig, load_profile
from mapl_core.reward_model import RewardModel, fit_reward_model
from mapl_core.sampling import SamplingSettings, sample_responses
from mapl_core.scoring import Item, accumulate_logprob_gradients, response_logprobs
from mapl_core.seeding import Stream
from mapl_core.train import run_mapl
from mapl_core.updates import TeamOptimizer, update_madpo

pytestmark = pytest.mark.unsloth

ROOT = Path(__file__).resolve().parent.parent
POCKET = "pocket:tldr:1x"
FOUR_BIT = [name for name, packages in LOADERS.items() if packages]


def loads(name: str):
    """Skips a test where the packages of a loader are missing."""
    missing = [package for package in LOADERS[name] if importlib.util.find_spec(package) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"))


four_bit = pytest.mark.parametrize("loader", [loads(name) for name in FOUR_BIT])


@pytest.fixture(scope="module")
def smollm2() -> str:
    """The name of SmolLM2, where it or its wheel is at hand."""
    try:
        load_model(SMOLLM2)
    except (OSError, ImportError) as error:
        pytest.skip(str(error))
    return SMOLLM2


@pytest.fixture(scope="module")
def items() -> list[Item]:
    """Answers of the pocket base to three posts, with prompts that they share."""
    base = AdaptedModel(load_model(POCKET))
    policy = team([base, base], trained=False)
    played = policy.sample(policy.domain.load_tasks("train", "pocket", 3), 4, Stream(0, "items"))
    actions = [action for group in played for trajectory in group for turn in trajectory.actions for action in turn]
    return [Item(action.prompt_ids, action.token_ids) for action in actions]


def team(bases: list[AdaptedModel], *, trained: bool = True, limits: tuple[int, int] = (24, 64)) -> JointPolicy:
    settings = [SamplingSettings(1.0, 1.0, limit) for limit in limits]
    stream = Stream(0, "init") if trained else None
    return JointPolicy(get_domain("tldr"), "dec", bases, settings, prompt_form="chat", stream=stream)


def adapted(loader: str, name: str = POCKET, **options) -> AdaptedModel:
    return AdaptedModel(load_model(name, loader=loader), **options)


def dequantised(base: AdaptedModel, name: str = POCKET) -> AdaptedModel:
    """The plain model with the very numbers that the 4 bits of `base` stand for."""
    plain = load_model(name)
    ours, theirs = dict(base.backbone.named_modules()), dict(plain.model.base_model.named_modules())
    with torch.no_grad():
        for path, layer in theirs.items():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(base.merged_weight(ours[path], None))
    return AdaptedModel(plain, rank=base.rank, alpha=base.alpha)


def bits(base: AdaptedModel) -> dict[str, torch.Tensor]:
    """Copies of all that the frozen base holds."""
    return {
        name: weight.detach().clone() for name, weight in base.loaded.model.named_parameters() if "lora_" not in name
    }


def preferences(policy: JointPolicy, posts: int, samples: int) -> list:
    """The best pairs of each post, as the oracle sees them, of the team as it is against itself."""
    tasks = policy.domain.load_tasks("train", "pocket", posts)
    mine, theirs = (policy.sample(tasks, samples, Stream(0, purpose)) for purpose in ("collect", "comparator"))
    labelled = [label_pairs(one, other, oracle, iteration=0)[0] for one, other in zip(mine, theirs, strict=True)]
    return [pair for pairs in labelled if pairs for pair in select_pairs(pairs, 2)]


# -- values ------------------------------------------------------------------------------------------------------------


@four_bit
def test_only_the_linear_layers_are_held_in_4_bits_and_all_of_them(loader):
    import bitsandbytes

    plain, base = load_model(POCKET), load_model(POCKET, loader=loader)
    held = {name for name, layer in base.model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}
    linear = {name for name, layer in plain.model.named_modules() if isinstance(layer, nn.Linear)}
    assert held == {name for name in linear if name != "lm_head"} and len(held) == 7 * 3
    assert describe(base) == describe(plain) | {"loader": loader}, "as many parameters, two of them in a byte"


@four_bit
def test_log_probabilities_are_those_of_the_values_that_the_4_bits_stand_for(loader, items):
    base = adapted(loader)
    assert base.shares_prompts, "on a CPU the layers are those of Transformers"
    expected = response_logprobs(dequantised(base), None, items, max_tokens=4096)
    assert_close(response_logprobs(base, None, items, max_tokens=4096), expected, rtol=1e-4, atol=1e-3)


@four_bit
def test_log_probabilities_agree_with_the_plain_loader_within_quantisation_error(loader, items):
    """About the base's own answers, which it is rather sure of; a wrong layer would move them by nats a token."""
    lengths = torch.tensor([len(item.response) for item in items])
    found, plain = (
        response_logprobs(adapted(name), None, items, max_tokens=4096) / lengths for name in (loader, "plain")
    )
    assert 1e-4 < float((found - plain).abs().mean()) < 0.1
    assert float(torch.corrcoef(torch.stack([found, plain]))[0, 1]) > 0.9


@pytest.mark.skipif(len(FOUR_BIT) < 2, reason="there is one loader only")
def test_both_4_bit_loaders_hold_the_same_numbers(items):
    for loader in FOUR_BIT:
        try:
            check_loader(loader)
        except ImportError as error:
            pytest.skip(str(error))
    values = [response_logprobs(adapted(loader), None, items, max_tokens=4096) for loader in FOUR_BIT]
    assert_close(values[0], values[1], rtol=1e-4, atol=1e-3)


# -- adapters ----------------------------------------------------------------------------------------------------------


@four_bit
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_two_adapters_are_those_on_the_dequantised_base(loader, checkpointing, items):
    base = adapted(loader, rank=4, alpha=8, gradient_checkpointing=checkpointing)
    plain = dequantised(base)
    weights = torch.linspace(-1, 1, len(items))
    for model in (base, plain):
        for index in range(2):
            model.add_adapter(f"agent{index}", Stream(0, "init", index))
            randomize_adapter(model, f"agent{index}", seed=index, scale=0.1)
    assert list(base.model.peft_config) == ["agent0", "agent1"]
    for name in ("agent0", "agent1"):
        for model in (base, plain):
            accumulate_logprob_gradients(model, name, items, weights, max_tokens=1024, kl_weight=0.1)
        found = gradients(base, name)
        assert all(bool(gradient.any()) for gradient in found)
        assert relative_difference(found, gradients(plain, name)) < 1e-3


@four_bit
@pytest.mark.parametrize("checkpointing", [False, True])
def test_madpo_on_two_adapters_lowers_its_loss_and_the_base_does_not_move(loader, checkpointing):
    base = adapted(loader, gradient_checkpointing=checkpointing)
    policy, before = team([base, base]), bits(base)
    start = policy.snapshot()
    pairs = preferences(policy, posts=8, samples=8)
    assert len(pairs) >= 8
    config = load_profile("pocket").config("tldr", "madpo", loader=loader)
    optimizer = TeamOptimizer(policy, config)
    losses = [update_madpo(policy, optimizer, pairs, Stream(0, "u", iteration=i), config)["loss"] for i in range(4)]
    assert abs(losses[0] - math.log(2)) < 0.01, "the first updates start at the reference"
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05, losses
    for old, new in zip(start, policy.snapshot(), strict=True):
        assert all(not torch.equal(old[name], new[name]) for name in old if "lora_B" in name), "every layer learns"
    after = bits(base)
    assert after.keys() == before.keys() and all(torch.equal(before[name], after[name]) for name in before)


@four_bit
def test_a_reward_model_on_it_learns_and_leaves_the_agents_alone(loader):
    base = adapted(loader, gradient_checkpointing=True)
    policy = team([base, base])
    pairs, agents = preferences(policy, posts=8, samples=8), policy.snapshot()
    tasks = {task.id: task for task in policy.domain.load_tasks("train", "pocket", 8)}
    model = RewardModel(policy.domain, tasks, base, Stream(0, "reward"), max_text_tokens=512, micro_batch_tokens=4096)
    options = {"learning_rate": 3e-3, "weight_decay": 0.01, "max_grad_norm": 1.0, "batch_size": 8}
    report = fit_reward_model(model, pairs, Stream(0, "order"), epochs=6, **options)
    assert report.loss < 0.55 and report.train_accuracy > 0.7
    model.close()
    for old, new in zip(agents, policy.snapshot(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


@four_bit
def test_stock_peft_loads_each_agent_from_its_own_folder(loader, tmp_path, items):
    base = adapted(loader, rank=4, alpha=8)
    policy = team([base, base])
    for index in range(2):
        randomize_adapter(base, f"agent{index}", seed=index, scale=0.1)
    policy.save(tmp_path)
    for name in ("agent0", "agent1"):
        stock = PeftModel.from_pretrained(dequantised(base).loaded.model, tmp_path / name)
        for item in items[:2]:
            with torch.no_grad():
                expected = plain_logprob(stock, item.prompt, item.response)
            found = response_logprobs(base, name, [item], max_tokens=4096)[0]
            assert_close(found, expected.float(), rtol=1e-3, atol=1e-2)


@four_bit
def test_both_decoders_sample_the_same_ids(loader, items):
    """One from a dequantised copy of the weights with the adapter merged in, the other through the 4-bit layers."""
    base = adapted(loader)
    base.add_adapter("agent0", Stream(0, "init"))
    randomize_adapter(base, "agent0", seed=0, scale=0.05)
    assert DirectDecoder.supports(base)
    prompts = list(dict.fromkeys(item.prompt for item in items))
    uniforms = Stream(0, "sample").uniforms([f"row{row}" for row in range(4 * len(prompts))], 20)
    options = {"samples": 4, "settings": SamplingSettings(1.0, 1.0, 20), "max_cached_tokens": 4096}
    direct, generic = (
        sample_responses(base, "agent0", prompts, uniforms, decoder=decoder, **options)
        for decoder in (DirectDecoder, TransformersDecoder)
    )
    assert direct == generic


@four_bit
def test_seed2_loading_and_adapters_leave_the_global_random_states_alone(loader):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    base = adapted(loader)
    team([base, base])
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


# -- whole runs --------------------------------------------------------------------------------------------------------


@four_bit
@pytest.mark.parametrize("method", ["madpo", "marlhf", "collm_cc"])
def test_a_whole_iteration_runs_and_its_manifest_names_the_loader(loader, method, tmp_path):
    sizes = {"train_tasks": 4, "eval_tasks": 2, "eval_samples": 2, "iterations": 1, "gradient_checkpointing": True}
    config = load_profile("pocket").config("tldr", method, loader=loader, **sizes)
    result = run_mapl(config, tmp_path, progress=False)
    assert np.isfinite(result.final("train/loss")) and result.final("score") > 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["parameters"]["loader"] == loader and manifest["notes"]["models"][POCKET]["loader"] == loader
    assert (tmp_path / "adapters" / "agent1" / "adapter_model.safetensors").is_file()


@four_bit
@pytest.mark.slow
def test_two_adapters_on_smollm2_lower_the_madpo_loss(loader, smollm2):
    base = adapted(loader, smollm2, gradient_checkpointing=True)
    plain = load_model(smollm2)
    text = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old tree by the river."
    ids = tuple(base.tokenizer.encode(text))
    tokens = [Item(ids[:place], ids[place : place + 1]) for place in range(4, len(ids))]
    found = response_logprobs(base, None, tokens, max_tokens=2048)
    expected = response_logprobs(AdaptedModel(plain), None, tokens, max_tokens=2048)
    assert 1e-3 < float((found - expected).abs().mean()) < 0.5
    del plain
    policy, before = team([base, base], limits=(12, 24)), bits(base)
    tasks = policy.domain.load_tasks("train", "small", 3)
    mine, theirs = (policy.sample(tasks, 4, Stream(0, purpose)) for purpose in ("collect", "comparator"))
    labelled = [label_pairs(one, other, oracle, iteration=0)[0] for one, other in zip(mine, theirs, strict=True)]
    pairs = [pair for pairs in labelled for pair in pairs]
    config = RunConfig("test", "tldr", "madpo", source="small", agent_models=[smollm2], learning_rate=2.0e-4)
    optimizer = TeamOptimizer(policy, config)
    losses = [update_madpo(policy, optimizer, pairs, Stream(0, "u", iteration=i), config)["loss"] for i in range(3)]
    assert losses[-1] < losses[0] - 0.05, losses
    after = bits(base)
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- the package -------------------------------------------------------------------------------------------------------


def keywords_of(file: Path, function: str, of_class: str) -> set[str]:
    """Names of the arguments of a method, read off the source: a CPU may be given another class of the same name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == of_class:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == function:
                    found |= {argument.arg for argument in [*method.args.args, *method.args.kwonlyargs]}
    return found


def passed_by_us(function: str) -> set[str]:
    """Keywords that unsloth_loader.py writes in a call of this name."""
    tree = ast.parse((ROOT / "mapl_core" / "unsloth_loader.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == function]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs unsloth")
def test_every_keyword_and_variable_that_is_passed_to_unsloth_exists_in_it():
    folder = Path(importlib.util.find_spec("unsloth").origin).parent / "models"
    loader, llama = folder / "loader.py", folder / "llama.py"
    assert {"r", "target_modules", "use_gradient_checkpointing"} <= passed_by_us("get_peft_model")
    assert passed_by_us("get_peft_model") <= keywords_of(llama, "get_peft_model", "FastLlamaModel")
    accepted = keywords_of(loader, "from_pretrained", "FastLanguageModel")
    assert {"use_exact_model_name", "revision"} <= accepted
    assert passed_by_us("from_pretrained") <= accepted
    assert '"UNSLOTH_RETURN_HIDDEN_STATES"' in llama.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs unsloth")
def test_it_does_not_matter_whether_unsloth_is_imported_first_or_when_it_is_needed():
    code = """
import sys
if sys.argv[1] == "first":
    import unsloth
import torch
from mapl_core.adapters import AdaptedModel
from mapl_core.models import load_model
from mapl_core.scoring import accumulate_logprob_gradients
from mapl_core.seeding import Stream
base = AdaptedModel(load_model("pocket:tldr:1x", loader="unsloth"), gradient_checkpointing=True)
base.add_adapter("agent0", Stream(0, "init"))
values, _ = accumulate_logprob_gradients(base, "agent0", [((3, 4, 5), (6, 7, 2))], torch.ones(1), max_tokens=64)
print("FOUND", values.tolist(), [float(weight.grad.norm()) for weight in base.parameters("agent0")])
"""
    found = []
    for order in ("first", "late"):
        run = subprocess.run([sys.executable, "-c", code, order], capture_output=True, text=True, cwd=ROOT, check=False)
        found.append([line for line in run.stdout.splitlines() if line.startswith("FOUND")])
        assert found[-1], run.stderr
        assert "should be imported before" not in run.stderr
    assert found[0] == found[1]
