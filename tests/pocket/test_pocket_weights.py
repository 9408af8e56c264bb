"""The shipped pocket models: ordinary Hugging Face folders, up to date, able and uncoordinated."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mapl_core.domains import get_domain
from mapl_core.pocket import tldr
from mapl_core.pocket.build import RECIPES, fingerprint
from mapl_core.pocket.common import WEIGHTS, domain_tokenizer, model_config, model_path
from mapl_core.profiles import load_profile

SHIPPED = sorted(folder.name for folder in WEIGHTS.iterdir())  # <domain>-<size>
every = pytest.mark.parametrize("name", SHIPPED)
# Share of the copied words that are the own task's; in CoopHE's scripted answers 0.78 are, the other inner steps are
# wrong on purpose. In BFCL's 0.945 are; models of this size copy 0.83 to 0.88 of its values at temperature 1, and all
# of them at 0.7. In Travel's 0.97 are; here they copy 0.86 to 0.93, and all at 0.7.
COPIED = {"tldr": 0.95, "coophe": 0.75, "bfcl": 0.8, "travel": 0.85}


def loaded(name: str):
    folder = model_path(*name.split("-"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("size", "fewest", "most"), [("1x", 1.0e6, 1.2e6), ("2x", 2.1e6, 2.4e6), ("4x", 4.3e6, 4.7e6)])
def test_parameter_counts_of_the_sizes(size, fewest, most):
    from transformers import Qwen3ForCausalLM

    tokenizer = domain_tokenizer("tldr")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(model_config(size, tokenizer))
    assert fewest <= model.num_parameters() <= most
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@every
def test_tok11_a_shipped_model_loads_with_plain_transformers_and_agrees_with_its_tokenizer(name):
    model, tokenizer = loaded(name)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    for settings in (model.config, model.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert settings.bos_token_id is tokenizer.bos_token_id is None
    assert model.config.vocab_size == len(tokenizer)
    record = json.loads((WEIGHTS / name / "build.json").read_text())
    assert record["parameters"] == model.num_parameters()


@every
def test_the_record_of_a_shipped_model_is_within_the_targets(name):
    """What build.json says about the untrained team, in both prompt forms, as the pocket profile samples."""
    domain = name.split("-")[0]
    record = json.loads((WEIGHTS / name / "build.json").read_text())
    assert len(record["untrained_team"]) == 6
    for setting, measured in record["untrained_team"].items():
        assert measured["copied"] >= COPIED[domain], setting
        assert measured["well_formed"] is None or measured["well_formed"] >= 0.95, setting
        if "T 1.0" in setting or domain == "tldr":
            assert 0.25 <= measured["mean"] <= 0.55, setting


@every
def test_a_shipped_model_is_the_one_that_the_present_code_would_build(name):
    """Whoever changes prompts, frames, mixture or recipe has to build the shipped models again."""
    domain, size = name.split("-")
    record = json.loads((WEIGHTS / name / "build.json").read_text())
    assert record["fingerprint"] == fingerprint(domain, size, RECIPES[domain][size])
    assert AutoTokenizer.from_pretrained(WEIGHTS / name).get_vocab() == domain_tokenizer(domain).get_vocab()


def test_every_domain_of_the_pocket_grid_ships_both_of_its_models():
    domains = load_profile("pocket").grid["domains"]
    assert {f"{domain}-{size}" for domain in domains for size in ("1x", "2x")} <= set(SHIPPED)


def test_shipped_weights_are_bfloat16_and_small():
    assert sum(file.stat().st_size for file in WEIGHTS.rglob("*")) < 32e6
    for name in SHIPPED:
        tensors = load_file(WEIGHTS / name / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "structure"), [("1x", "dec"), ("1x", "cen"), ("2x", "cen")])
@pytest.mark.parametrize(("temperature", "top_p", "best"), [(1.0, 1.0, 0.78), (0.7, 0.9, 0.6)])
def test_the_untrained_team_is_able_and_uncoordinated(size, structure, temperature, top_p, best):
    """Mean reward between 0.25 and 0.55 of the maximum, widely spread, on other random numbers than in build.json."""
    from mapl_core.models import load_model
    from mapl_core.pocket.measure import measure_team

    tasks, base = tldr.make_tasks("eval", 64), load_model(f"pocket:tldr:{size}")
    measured = measure_team(get_domain("tldr"), base, structure, tasks, temperature=temperature, top_p=top_p, seed=1)
    assert 0.25 <= measured.mean <= 0.55
    assert measured.spread > 0.2
    assert measured.best_of_8 > best
    assert measured.copied >= 0.95
    assert measured.ended >= 0.98
    if structure == "cen":
        assert measured.well_formed >= 0.95
