"""The MAPL loop on tiny random models: what it counts, that it resumes, and what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import shutil

import pytest
import torch
from toy_domains import ToyDomain

from mapl_core import domains, train
from mapl_core.models import load_model
from mapl_core.profiles import ConfigError, RunConfig
from mapl_core.results import ResultError, folder_lock, verify_job
from mapl_core.reward_model import RewardModel
from mapl_core.rewards import Reward
from mapl_core.seeding import Stream
from mapl_core.train import build_team, evaluate, run_mapl


class TiedDomain(ToyDomain):
    """Every answer is worth the same."""

    def reward(self, responses, task):
        return Reward(1.0, {"constant": 1.0})


@pytest.fixture(autouse=True)
def toy_domains(monkeypatch):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)
    monkeypatch.setitem(domains.DOMAINS, "tied", TiedDomain)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with its tokenizer, as a local folder."""
    from conftest import tiny_qwen3

    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_qwen3.__wrapped__()()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def config(model_folder):
    def make(method="madpo", paradigm="dec-dec", **changes) -> RunConfig:
        values = {
            "profile": "test",
            "domain": "toy",
            "agent_models": [model_folder],
            "central_model": model_folder,
            "train_tasks": 4,
            "eval_tasks": 2,
            "eval_samples": 2,
            "max_new_tokens": [6],
            "iterations": 2,
            "samples_per_task": 4,
            "pairs_per_task": 2,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "reward_model_epochs": 1,
            "reward_model_tokens": 128,
            **changes,
        }
        return RunConfig(method=method, paradigm=paradigm, **values)

    return make


def value(result, metric, iteration):
    return next(row.value for row in result.metrics if (row.metric, row.iteration) == (metric, iteration))


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("method", ["madpo", "marlhf", "magrpo", "collm_cc", "collm_dc"])
def test_every_method_moves_every_agent_of_teams_of_one_two_and_three(config, tmp_path, method, agents):
    settings = config(method, domain_options={"num_agents": agents}, iterations=1)
    before = build_team(settings).policy.snapshot()
    run_mapl(settings, tmp_path, progress=False)
    trained = build_team(settings).policy
    trained.load(tmp_path / "adapters")
    assert len(before) == agents
    for old, new in zip(before, trained.snapshot(), strict=True):
        assert any(not torch.equal(old[name], new[name]) for name in old)
    assert verify_job(tmp_path)["status"] == "done"


@pytest.mark.parametrize("method", ["madpo", "marlhf", "magrpo", "collm_cc"])
@pytest.mark.parametrize("paradigm", ["dec-dec", "cen-cen"])
def test_two_turns_train_and_count_twice_the_steps(config, tmp_path, method, paradigm):
    one = run_mapl(config(method, paradigm, iterations=1), tmp_path / "one", progress=False)
    two = run_mapl(
        config(method, paradigm, iterations=1, domain_options={"horizon": 2}), tmp_path / "two", progress=False
    )
    steps = [max(row.env_steps for row in result.metrics) for result in (one, two)]
    if method == "madpo":  # ties may drop pairs
        assert steps[1] > 0 and steps[1] % 2 == 0
    else:
        assert steps == [16, 32]  # 4 tasks x G 4, over one and two turns


def test_env_steps_are_trained_samples_and_all_samples_are_counted_beside_them(config, tmp_path):
    result = run_mapl(config("madpo"), tmp_path, progress=False)
    pairs = [value(result, "preferences/pairs", iteration) for iteration in (1, 2)]
    # The decay buffer's training set is as large as the newest shard; a pair is two joint responses.
    assert max(row.env_steps for row in result.metrics) == 2 * sum(pairs)
    assert value(result, "count/agent_samples", 2) == value(result, "count/comparator_samples", 2) == 2 * 4 * 4
    assert value(result, "count/oracle_calls", 2) == 2 * 2 * 4 * 4
    for name in ("env_steps", "sampled_tokens", "oracle_calls"):
        counts = [value(result, f"count/{name}", iteration) for iteration in (0, 1, 2)]
        assert counts == sorted(counts) and counts[0] == 0 < counts[2]


def test_magrpo_trains_on_epochs_times_groups_and_never_collects_preferences(config, tmp_path):
    result = run_mapl(config("magrpo", epochs=2), tmp_path, progress=False)
    assert max(row.env_steps for row in result.metrics) == 2 * 2 * 4 * 4  # iterations, epochs, tasks, G
    assert not any(row.metric.startswith("preferences/") for row in result.metrics)
    assert value(result, "count/agent_samples", 2) == value(result, "count/oracle_calls", 2) == 2 * 2 * 4 * 4
    assert value(result, "count/sampled_tokens", 2) >= 2 * 2 * 2 * 4 * 4  # every agent writes at least one token
    assert {row.comparator for row in result.metrics} == {"none"}


def test_marlhf_counts_collected_and_trained_samples_but_not_the_oracle_it_does_not_ask(config, tmp_path):
    result = run_mapl(config("marlhf"), tmp_path, progress=False)
    collected, trained = 2 * 4 * 4, 2 * 4 * 4  # iterations x tasks x m, and x G
    assert value(result, "count/agent_samples", 2) == collected + trained
    assert value(result, "count/comparator_samples", 2) == collected
    assert value(result, "count/oracle_calls", 2) == 2 * collected
    assert value(result, "count/env_steps", 2) == trained


def test_a_finished_run_is_read_back_and_another_configuration_or_a_damaged_file_is_trained_anew(
    config, tmp_path, monkeypatch, capsys
):
    first = run_mapl(config("madpo"), tmp_path, progress=False)
    built = []
    monkeypatch.setattr(train, "build_team", lambda config: built.append(config.seed) or build_team(config))
    again = run_mapl(config("madpo"), tmp_path)
    assert not built and "nothing is trained again" in capsys.readouterr().out
    assert again == first
    run_mapl(config("madpo", seed=1), tmp_path, progress=False)
    assert built == [1]
    (tmp_path / "metrics.csv").write_text("")
    run_mapl(config("madpo", seed=1), tmp_path, progress=False)
    assert built == [1, 1] and (tmp_path / "metrics.csv").stat().st_size


def test_seed1_equal_runs_write_equal_bytes_and_another_seed_does_not(config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_mapl(config("marlhf", seed=seed), tmp_path / name, progress=False)
    content = {name: (tmp_path / name / "metrics.csv").read_bytes() for name in "abc"}
    assert content["a"] == content["b"]
    assert content["a"].replace(b",0,", b",") != content["c"].replace(b",1,", b",")


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the loop sees it."""


@pytest.mark.parametrize(
    "method, changes",
    [
        ("madpo", {"comparator": "last", "reference": "previous"}),
        ("madpo", {"buffer": "offline"}),
        ("marlhf", {"selection": "proxy", "iterations": 3}),
        ("magrpo", {"normalize": "mean_std"}),
        ("collm_dc", {}),
    ],
)
def test_save1_a_killed_run_ends_with_the_numbers_and_weights_of_an_undisturbed_one(
    config, tmp_path, monkeypatch, method, changes
):
    settings = config(method, **changes)
    run_mapl(settings, tmp_path / "undisturbed", progress=False)
    original, calls = train._Run.evaluate, []

    def dies_once(self, finished):
        calls.append(finished)
        if calls.count(2) == 1 and finished == 2:
            raise Killed
        original(self, finished)

    monkeypatch.setattr(train._Run, "evaluate", dies_once)
    with pytest.raises(Killed):
        run_mapl(settings, tmp_path / "killed", progress=False)
    assert (tmp_path / "killed" / "checkpoint.pt").is_file() and not (tmp_path / "killed" / "manifest.json").exists()
    run_mapl(settings, tmp_path / "killed", progress=False)
    assert calls.count(0) == 1  # it did not start again
    for name in ("metrics.csv", "evaluation.csv", "examples.json", "adapters/agent1/adapter_model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


def test_save2_a_checkpoint_of_another_configuration_or_a_broken_one_is_refused_by_name(config, tmp_path):
    torch.save({"fingerprint": "other"}, tmp_path / "checkpoint.pt")
    with pytest.raises(RuntimeError, match="checkpoint.pt belongs to another configuration"):
        run_mapl(config(), tmp_path, progress=False)
    (tmp_path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(RuntimeError, match="checkpoint.pt cannot be read"):
        run_mapl(config(), tmp_path, progress=False)


def test_a_second_run_in_the_same_folder_is_refused_with_the_number_of_the_first(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "folder_lock", lambda folder, **_: folder_lock(folder))  # without the waiting
    with folder_lock(tmp_path), pytest.raises(ResultError, match=f"in use by process {os.getpid()}"):
        run_mapl(config(), tmp_path, progress=False)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_joint_critic_refuses_agents_whose_ids_mean_different_texts(config, tmp_path, model_folder):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    models = [model_folder, str(other)]
    with pytest.raises(ValueError, match="different bases.*use collm_dc"):
        run_mapl(config("collm_cc", agent_models=models, iterations=1), tmp_path / "cc", progress=False)
    run_mapl(config("collm_dc", agent_models=models, iterations=1), tmp_path / "dc", progress=False)


def test_dpo5_a_run_whose_comparisons_all_tie_says_so_and_takes_no_step(config, tmp_path):
    with pytest.raises(RuntimeError, match=r"all 16 comparisons of iteration 0 tied.*Raise samples_per_task"):
        run_mapl(config(domain="tied"), tmp_path, progress=False)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("micro_batch_tokens", [8192, 32])
def test_dpo6_a_loss_that_is_not_finite_changes_no_weight_and_no_optimizer_state(config, micro_batch_tokens):
    settings = config(micro_batch_tokens=micro_batch_tokens)
    team = build_team(settings)
    optimizer = train.TeamOptimizer(team.policy, settings)
    trajectories = team.policy.sample(team.train_tasks[:1], 4, Stream(0, "test"))[0]
    before = team.policy.snapshot()
    for poison in (math.nan, math.inf):
        with pytest.raises(FloatingPointError):
            optimizer.step(trajectories, lambda logprobs, p=poison: logprobs.sum() * p)
    for old, new in zip(before, team.policy.snapshot(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(not state["state"] for state in optimizer.state())


def test_rl7_the_step_does_not_depend_on_the_micro_batch(config):
    """One micro-batch with its graph, and many without, lead to the same weights."""
    moved = []
    for tokens in (8192, 24):
        settings = config(micro_batch_tokens=tokens, learning_rate=1e-3)
        team = build_team(settings)
        optimizer = train.TeamOptimizer(team.policy, settings)
        trajectories = [t for group in team.policy.sample(team.train_tasks, 2, Stream(0, "test")) for t in group]
        signs = torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
        for _ in range(3):
            optimizer.step(trajectories, lambda logprobs: (signs * logprobs).mean())
        moved.append(team.policy.logprobs(trajectories))
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-4)


def test_offline_madpo_trains_on_every_collected_pair_once(config, tmp_path, monkeypatch):
    trained = []
    original = train.update_madpo

    def recording(policy, optimizer, pairs, stream, settings):
        trained.append([id(pair) for pair in pairs])
        return original(policy, optimizer, pairs, stream, settings)

    monkeypatch.setattr(train, "update_madpo", recording)
    result = run_mapl(config(buffer="offline"), tmp_path, progress=False)
    assert value(result, "count/agent_samples", 2) == 2 * 4 * 4  # the whole budget, collected at once
    seen = [pair for part in trained for pair in part]
    assert len(seen) == len(set(seen)) == value(result, "preferences/pairs", 1)
    assert all(trained)  # every iteration has its part


def test_rm4_the_evaluation_takes_no_reward_model_and_a_poisoned_one_changes_no_oracle_number(
    config, tmp_path, monkeypatch
):
    assert "reward" not in " ".join(inspect.signature(evaluate).parameters)
    settings = config("marlhf", iterations=1)
    team = build_team(settings)
    honest, played = evaluate(team.policy, team.eval_tasks, 2, Stream(0, "evaluate"))
    monkeypatch.setattr(RewardModel, "scores", lambda self, trajectories: torch.full((len(trajectories),), 1e9))
    assert evaluate(team.policy, team.eval_tasks, 2, Stream(0, "evaluate"))[0] == honest
    by_hand = {
        task.id: sum(ToyDomain().reward(list(t.responses[0]), task).total for t in played if t.task_id == task.id) / 2
        for task in team.eval_tasks
    }
    assert {task_id: measured["reward"] for task_id, measured in honest.items()} == pytest.approx(by_hand)


def test_rm7_learned_and_oracle_reward_stand_side_by_side_after_every_iteration(config, tmp_path):
    result = run_mapl(config("marlhf"), tmp_path, progress=False)
    for iteration in (1, 2):
        assert math.isfinite(value(result, "reward_model/evaluation_reward", iteration))
        assert math.isfinite(value(result, "reward", iteration))


def test_dec_cen_scores_a_coordinators_sections_under_the_agents_own_prompts(config):
    team = build_team(config(paradigm="dec-cen", comparator="model"))
    task = team.train_tasks[0]
    adopted = team.comparator.sample([task], 2, Stream(0, "comparator"))[0]
    own = team.policy.sample([task], 1, Stream(0, "collect"))[0][0]
    end = team.policy.members[0].base.tokenizer.eos_token_id
    for trajectory in adopted:
        assert [action.prompt_ids for action in trajectory.actions[0]] == [
            action.prompt_ids for action in own.actions[0]
        ]
        assert all(action.token_ids[-1] == end for action in trajectory.actions[0])


def test_the_manifest_holds_every_effective_parameter_and_where_the_weights_came_from(config, tmp_path):
    settings = config("untrained")
    run_mapl(settings, tmp_path, progress=False)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["parameters"] == json.loads(json.dumps(dataclasses.asdict(settings)))
    assert settings.agent_models[0] in manifest["model"]
    assert manifest["tasks"]["counts"] == {"train": 0, "eval": 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pairs_per_task": 0}, r"pairs_per_task \(k\) is 0"),
        ({"samples_per_task": 1}, r"samples_per_task \(m\) is 1 and pairs_per_task \(k\) is 2"),
        ({"method": "magrpo", "num_generations": 1}, r"num_generations \(G\) is 1"),
        ({"method": "ppo"}, "unknown method 'ppo'; valid: untrained, madpo"),
        ({"paradigm": "dec"}, "unknown paradigm 'dec'"),
        ({"paradigm": "cen-dec"}, "unknown paradigm 'cen-dec'"),
        ({"domain": "chess"}, "unknown domain 'chess'"),
        ({"temperature": 0.0}, "greedy samples"),
        ({"max_new_tokens": [6, 6, 6]}, "max_new_tokens is"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"buffer": "ring"}, "unknown buffer 'ring'"),
    ],
)
def test_impossible_configurations_name_the_value_before_anything_is_loaded(config, monkeypatch, changes, message):
    monkeypatch.setattr(train, "load_model", lambda name: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_model_path_without_a_tokenizer_is_refused_before_training(config, tmp_path, model_folder):
    bare = tmp_path / "bare"
    load_model(model_folder).model.save_pretrained(bare)
    with pytest.raises((ValueError, OSError), match="tokenizer"):
        run_mapl(config(agent_models=[str(bare)]), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
