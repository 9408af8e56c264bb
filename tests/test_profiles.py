"""The profiles that ship: the paper's budgets, its variant for a small GPU, and profiles that extend one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from mapl_core.profiles import ConfigError, RunConfig, load_profile, profile_names

ROOT = Path(__file__).resolve().parent.parent
# The paper's appendix C: tasks, temperature, top-p, epochs of MADPO and MARLHF, epochs, batch and tokens of the reward
# model, batch, m, k, iterations, and the interaction budget in environment steps.
PAPER = {
    "tldr": (250, 250, 0.7, 0.9, 1, 2, 4, 4, 1024, 4, 20, 4, 4, 8000),
    "coophe": (66, 16, 0.6, 0.6, 2, 4, 2, 4, 2048, 4, 20, 4, 4, 4224),
    "bfcl": (160, 40, 0.7, 0.8, 1, 2, 1, 2, 4096, 4, 20, 4, 4, 5120),
    "travel": (60, 20, 0.7, 0.8, 1, 3, 1, 1, 32768, 10, 20, 6, 7, 5040),
}


@pytest.mark.parametrize("domain", PAPER)
def test_the_paper_profile_holds_the_papers_settings(domain: str):
    madpo, marlhf = (load_profile("paper").config(domain, method) for method in ("madpo", "marlhf"))
    found = (
        *(madpo.train_tasks, madpo.eval_tasks, madpo.temperature, madpo.top_p, madpo.epochs, marlhf.epochs),
        *(marlhf.reward_model_epochs, marlhf.reward_model_batch_size, marlhf.reward_model_tokens),
        *(madpo.batch_size, madpo.samples_per_task, madpo.pairs_per_task, madpo.iterations),
    )
    *expected, budget = PAPER[domain]
    assert found == tuple(expected)
    assert 2 * madpo.iterations * madpo.epochs * madpo.train_tasks * madpo.pairs_per_task == budget
    assert marlhf.iterations * marlhf.epochs * marlhf.train_tasks * marlhf.num_generations == budget
    for config in (madpo, marlhf):
        assert (config.beta, config.num_generations, config.weight_decay, config.max_grad_norm) == (0.1, 4, 0.01, 1.0)
        assert (config.lora_rank, config.lora_alpha, config.source) == (16, 32, "paper")
        assert {config.learning_rate, config.reward_model_learning_rate, config.critic_learning_rate} == {1.0e-4}
    assert (madpo.buffer_decay, marlhf.buffer_decay) == (0.2, 0.8)


@pytest.mark.parametrize("domain", PAPER)
def test_the_papers_bases_are_held_in_4_bits_and_trl_gets_none_of_unsloths(domain: str):
    profile = load_profile("paper")
    assert profile.config(domain, "madpo").loader == profile.config(domain, "single_ppo", "single").loader == "unsloth"
    for method in ("single_grpo", "single_dpo"):
        assert profile.config(domain, method, "single").loader == "bnb4"


def test_the_variant_for_16_gb_is_the_papers_tldr_in_smaller_pieces():
    profile = load_profile("paper-t4")
    assert profile.grid["domains"] == ["tldr"] and profile.needs["gpu_gib"] < 15
    for method in ("madpo", "marlhf"):
        mine, theirs = (asdict(load_profile(name).config("tldr", method)) for name in ("paper-t4", "paper"))
        differing = {name for name in mine if mine[name] != theirs[name]}
        assert differing == {"profile", "loader", "threads", "micro_batch_tokens", "cached_tokens"}
        assert mine["loader"] == "bnb4" and mine["micro_batch_tokens"] < theirs["micro_batch_tokens"]


def sampled_tokens(config: RunConfig) -> int:
    """Tokens of a job if every answer has its full length: collection, groups of MARLHF, evaluation."""
    each = sum(config.token_limits)
    collected = 2 * config.iterations * config.train_tasks * config.samples_per_task
    groups = config.iterations * config.epochs * config.train_tasks * config.num_generations
    evaluated = (config.iterations + 1) * config.eval_tasks * config.eval_samples
    return each * (collected + evaluated + (groups if config.method == "marlhf" else 0))


def test_the_readmes_estimates_stand_on_the_profiles_token_counts():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for domain, name in (("tldr", "TLDR"), ("coophe", "CoopHE"), ("bfcl", "BFCL"), ("travel", "Travel")):
        counts = [sampled_tokens(load_profile("paper").config(domain, method)) for method in ("madpo", "marlhf")]
        cell = " / ".join(f"{count / 1e6:.0f} M" for count in counts)
        assert f"| {name} | {cell} |" in readme, f"{name}: {cell}"


@pytest.mark.parametrize("name", profile_names())
def test_every_cell_of_every_profiles_grid_is_a_possible_run(name: str):
    profile = load_profile(name)
    for domain in profile.grid["domains"]:
        for method, paradigm in (("madpo", "dec-dec"), ("marlhf", "cen-cen"), ("magrpo", "dec-dec")):
            assert profile.config(domain, method, paradigm).profile == name
        for method in ("single_raw", "single_grpo", "single_ppo", "single_dpo"):
            profile.config(domain, method, "single")


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_profile_that_extends_another_replaces_single_values_at_any_depth(tmp_path: Path):
    mine = load_profile(
        written(tmp_path, "extends: small\ndomains: {tldr: {max_new_tokens: [8]}}\ndefaults: {beta: 0.5}\n")
    )
    config, base = mine.config("tldr", "madpo"), load_profile("small").config("tldr", "madpo")
    assert (config.max_new_tokens, config.beta) == ([8], 0.5) and config.agent_models == base.agent_models
    assert config.temperature == base.temperature and mine.grid == load_profile("small").grid
    assert load_profile("small").config("tldr", "madpo") == base, "the one that is extended is not changed"


@pytest.mark.parametrize(
    "text, said",
    [
        ("extends: huge\n", "unknown profile 'huge'; valid: "),
        ("extends: paper-t4\n", "`extends` names a profile that extends another"),
        ("defaults: {}\n", "`domains` names none"),
        ("domain: {tldr: {}}\n", "a profile has the keys defaults, description, domains, extends"),
        ("[1, 2]\n", "a profile has the keys"),
    ],
)
def test_a_profile_that_cannot_work_is_refused_by_name(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load_profile(written(tmp_path, text))


def test_an_unknown_loader_and_trls_trainers_on_unsloth_are_refused():
    profile = load_profile("pocket")
    with pytest.raises(ConfigError, match="unknown loader '8bit'; valid: plain, bnb4, unsloth"):
        profile.config("tldr", "madpo", loader="8bit")
    for method in ("single_grpo", "single_dpo"):
        with pytest.raises(ConfigError, match=f"{method} is one of TRL's trainers.*set it to bnb4"):
            profile.config("tldr", method, "single", loader="unsloth")
