"""Baselines: what test-time teams read, how a single agent is scored, and that TRL trains this project's adapter."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch
from toy_domains import ToyDomain
from toy_models import base, make_policy, randomize_adapter, relative_difference, weights_of

from mapl_core import baselines, domains, losses
from mapl_core.baselines import DiscussionTeam, SequentialTeam, largest_divisor, scored_tokens, update_dpo, update_grpo
from mapl_core.buffers import PreferencePair, Response
from mapl_core.domains import get_domain
from mapl_core.losses import actor_critic_loss
from mapl_core.policies import JointPolicy
from mapl_core.profiles import ConfigError, RunConfig, load_profile
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl
from mapl_core.updates import Critics, TeamOptimizer, oracle_rewards, update_actor_critic, update_madpo

STREAM = Stream(0, "test")


@pytest.fixture(autouse=True)
def toy_domain(monkeypatch):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with its tokenizer, as a local folder."""
    from conftest import tiny_qwen3

    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_qwen3.__wrapped__()()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def make_config(method: str, model: str = "unused", **changes) -> RunConfig:
    values = {"agent_models": [model], "central_model": model, "train_tasks": 4, "eval_tasks": 2, "eval_samples": 2}
    values |= {"max_new_tokens": [6], "iterations": 1, "samples_per_task": 4, "pairs_per_task": 2, "batch_size": 4}
    values |= {"learning_rate": 1e-2, "lora_rank": 4, "clip_ratio": 0.2, **changes}
    paradigm = "single" if method.startswith("single") else "dec-dec"
    return RunConfig(profile="test", domain="toy", method=method, **{"paradigm": paradigm, **values})


def single_agent(factory, *, random_adapter: bool = False, limit: int = 12) -> JointPolicy:
    policy = JointPolicy(
        ToyDomain(), "single", [base(factory)], [SamplingSettings(1.0, 1.0, limit)], prompt_form="text", stream=STREAM
    )
    if random_adapter:
        randomize_adapter(policy.members[0].base, "single", seed=3)
    return policy


def text_of(policy, ids) -> str:
    return policy.members[0].base.tokenizer.decode(list(ids))


def value(result, metric: str, iteration: int) -> float:
    return next(row.value for row in result.metrics if (row.metric, row.iteration) == (metric, iteration))


# -- test-time teams ---------------------------------------------------------------------------------------------------


def test_in_a_sequence_an_agent_reads_exactly_the_answers_of_the_agents_before_it(tiny_qwen3):
    team = make_policy(base(tiny_qwen3), kind=SequentialTeam, num_agents=3)
    tasks = team.domain.load_tasks("eval", "pocket", 2)
    seen = set()
    for task, group in zip(tasks, team.sample(tasks, 3, STREAM), strict=True):
        for trajectory in group:
            assert len(trajectory.actions) == 1
            for agent, action in enumerate(trajectory.actions[0]):
                own = team.domain.prompts(task)[agent]
                earlier = " ".join([own, *trajectory.responses[0][:agent]])
                assert text_of(team, action.prompt_ids).split() == earlier.split()
            seen.add(trajectory.responses[0])
            assert trajectory.total_return == team.domain.reward(trajectory.responses[0], task).total
    assert len(seen) > 1  # the samples differ, so an agent that read another sample would have been seen


def test_the_first_agent_of_a_sequence_writes_what_it_would_in_parallel(tiny_qwen3):
    """Common random numbers: what differs between the protocols is what the agents read."""
    parallel, sequential = make_policy(base(tiny_qwen3)), make_policy(base(tiny_qwen3), kind=SequentialTeam)
    tasks = parallel.domain.load_tasks("eval", "pocket", 2)
    first, second = (team.sample(tasks, 2, STREAM) for team in (parallel, sequential))
    for one, other in zip(sum(first, []), sum(second, []), strict=True):
        assert one.actions[0][0] == other.actions[0][0]
        assert one.actions[0][1].prompt_ids != other.actions[0][1].prompt_ids


@pytest.mark.parametrize(
    ("written", "part"), [("plain words", "plain words"), ("<agent_0> mine </agent_0> <agent_1> yours", "mine")]
)
def test_in_a_sequence_a_tagged_text_counts_by_its_tag_and_any_other_as_a_whole(tiny_qwen3, monkeypatch, written, part):
    class Tagged(ToyDomain):
        split_joint = domains.base.Domain.split_joint

    team = make_policy(base(tiny_qwen3), kind=SequentialTeam)
    team.domain = Tagged()
    monkeypatch.setattr(
        team, "_respond", lambda member, prompts, *_: [Response(p, (9,), written, False) for p in prompts]
    )
    ((played,),) = team.sample(team.domain.load_tasks("eval", "pocket", 1), 1, STREAM)
    assert played.responses[0][0] == part


def test_in_a_discussion_everyone_revises_with_all_drafts_at_hand(tiny_qwen3):
    """Drafts are the parallel team's answers; a revision's prompt ends with the others' drafts, `!`, then its own."""
    parallel = make_policy(base(tiny_qwen3), num_agents=3)
    team = make_policy(base(tiny_qwen3), kind=DiscussionTeam, num_agents=3)
    tasks = team.domain.load_tasks("eval", "pocket", 2)
    drafts = sum(parallel.sample(tasks, 2, STREAM), [])
    for draft, trajectory in zip(drafts, sum(team.sample(tasks, 2, STREAM), []), strict=True):
        assert trajectory.actions[0] == draft.actions[0] and trajectory.responses[0] == draft.responses[0]
        for agent, action in enumerate(trajectory.actions[1]):
            others = [text for other, text in enumerate(draft.responses[0]) if other != agent]
            added = f"{' '.join(others)} ! {draft.responses[0][agent]}"
            asked = text_of(team, draft.actions[0][agent].prompt_ids)
            assert text_of(team, action.prompt_ids).split() == f"{asked} {added}".split()
        task = next(task for task in tasks if task.id == trajectory.task_id)
        final = team.domain.reward(trajectory.responses[1], task).total
        assert trajectory.rewards == (0.0, final) and trajectory.total_return == final


@pytest.mark.parametrize("kind", [SequentialTeam, DiscussionTeam])
def test_a_temperature_of_zero_makes_equal_prompts_equal_answers(tiny_qwen3, kind):
    team = make_policy(base(tiny_qwen3), kind=kind)
    (group,) = team.sample(team.domain.load_tasks("eval", "pocket", 1), 2, STREAM, temperature=0.0)
    assert group[0] == group[1]


@pytest.mark.parametrize("domain", ["tldr", "coophe", "bfcl", "travel"])
def test_every_domain_can_be_played_by_every_protocol_and_by_a_single_agent(domain, monkeypatch):
    """With its real prompts, splitting and oracle; what is written stands in for a model's answer."""
    played = get_domain(domain)
    tasks = played.load_tasks("eval", "pocket", 2)
    prompts = []

    def answers(self, member, ids, skeletons, keys, settings, stream, adapter):
        return [Response(entry, (1,), "<agent_0> word </agent_0> <agent_1> words", False) for entry in ids]

    def encode(self, member, prompt, task):
        prompts.append(prompt)
        return (len(prompts),)

    monkeypatch.setattr(JointPolicy, "_respond", answers)
    monkeypatch.setattr(JointPolicy, "encode", encode)
    for kind, structure, size in ((SequentialTeam, "dec", 2), (DiscussionTeam, "dec", 2), (JointPolicy, "single", 1)):
        team = kind(played, structure, [None] * size, [SamplingSettings()] * size, prompt_form="chat")
        groups = team.sample(tasks, 2, STREAM)
        assert [t.task_id for group in groups for t in group] == [task.id for task in tasks for _ in range(2)]
        assert all(len(t.responses[-1]) == 2 and math.isfinite(t.total_return) for group in groups for t in group)
    assert played.single_prompt(tasks[0]) in prompts
    assert played.sequential_prompt(1, tasks[0], ["word"]) in prompts


# -- the single agent --------------------------------------------------------------------------------------------------


def test_a_single_agent_reads_the_task_alone_and_is_scored_like_a_coordinator(tiny_qwen3):
    policy = single_agent(tiny_qwen3)
    tasks = policy.domain.load_tasks("eval", "pocket", 2)
    for task, group in zip(tasks, policy.sample(tasks, 3, STREAM), strict=True):
        for trajectory in group:
            ((action,),) = trajectory.actions
            assert text_of(policy, action.prompt_ids) == policy.domain.single_prompt(task)
            assert list(trajectory.responses[0]) == policy.domain.split_joint(action.text)
            assert trajectory.total_return == policy.domain.reward(trajectory.responses[0], task).total


def test_a_raw_single_agents_run_measures_the_failures_of_both_parts(model_folder, tmp_path):
    result = run_mapl(make_config("single_raw", model_folder), tmp_path, progress=False)
    names = {row.metric for row in result.metrics}
    assert {"score", "length/single", "unparsed/agent0", "unparsed/agent1"} <= names
    assert {row.paradigm for row in result.metrics} == {"single"} and not (tmp_path / "adapters").exists()


def test_a_single_agent_has_one_turn(tiny_qwen3):
    with pytest.raises(ValueError, match="answers in one turn, domain 'toy' has 2"):
        JointPolicy(ToyDomain(horizon=2), "single", [base(tiny_qwen3)], [SamplingSettings()], prompt_form="text")


# -- PPO ---------------------------------------------------------------------------------------------------------------


def test_one_agent_with_a_clip_has_the_loss_of_ppo():
    """Advantages (3 - 1, 2 - 2) normalised are (1, -1); ratios 1.5 and 0.6 are clipped to 1.2 and 0.8.

    The surrogate is (1.2 - 0.8) / 2 = 0.2; the value error is (2^2 + 0^2) / 2 = 2, weighted 0.6.
    """
    sampled = torch.tensor([0.5, 0.5]).log().view(2, 1, 1)
    logprobs = torch.tensor([0.75, 0.3]).log().view(2, 1, 1).requires_grad_()
    values, rewards = torch.tensor([1.0, 2.0]).view(2, 1, 1), torch.tensor([[3.0], [2.0]])
    loss, metrics = actor_critic_loss(logprobs, values, rewards, clip_ratio=0.2, sampled_logprobs=sampled)
    assert loss.item() == pytest.approx(-0.2 + 0.6 * 2.0) and metrics["clip_fraction"] == 1.0
    loss.backward()
    assert logprobs.grad.abs().max() == 0  # both have gone as far as the clip lets them

    logprobs = torch.tensor([0.55, 0.55]).log().view(2, 1, 1).requires_grad_()
    actor_critic_loss(logprobs, values, rewards, clip_ratio=0.2, sampled_logprobs=sampled)[0].backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1.1 / 2, 1.1 / 2])  # ratio times advantage, descended


def test_ppo_takes_several_steps_on_the_same_answers_against_the_probabilities_of_their_sampling(
    tiny_qwen3, monkeypatch
):
    calls = []

    def recording(logprobs, values, rewards, **options):
        if options["sampled_logprobs"] is not None:  # the actor's part
            calls.append([logprobs.detach().clone(), options["sampled_logprobs"].clone(), values.clone()])
        return actor_critic_loss(logprobs, values, rewards, **options)

    monkeypatch.setattr(losses, "actor_critic_loss", recording)
    policy, config = single_agent(tiny_qwen3), make_config("single_ppo", passes=3, num_generations=2)
    critics, before = Critics(policy, STREAM, config), weights_of(policy)
    tasks = policy.domain.load_tasks("train", "pocket", 4)
    optimizer = TeamOptimizer(policy, config)
    metrics = update_actor_critic(policy, optimizer, critics, tasks, oracle_rewards(), STREAM, config)
    assert metrics["samples"] == 4 * 2  # answers are counted once, however many steps they serve
    (first, *later), sampled = calls[::2], calls[0][1]  # every step asks for the loss, then for its metrics
    assert len(calls) == 2 * 3 and torch.equal(first[0], sampled)
    for logprobs, old, values in later:
        assert torch.equal(old, sampled) and torch.equal(values, first[2]) and not torch.equal(logprobs, sampled)
    assert metrics["ratio_deviation"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(weights_of(policy)[0], before[0], strict=True))


# -- TRL ---------------------------------------------------------------------------------------------------------------


def pairs_of(policy, tasks: int = 3) -> list[PreferencePair]:
    groups = policy.sample(policy.domain.load_tasks("train", "pocket", tasks), 4, Stream(0, "collect"))
    return [PreferencePair(group[2 * i], group[2 * i + 1], True) for group in groups for i in range(2)]


def test_trl_dpo_has_the_loss_and_margin_of_madpo_with_one_agent(tiny_qwen3):
    """On the sampled ids, without forced tokens, against the base: one step on all pairs, adapters away from zero."""
    found = []
    for update in (update_madpo, update_dpo):
        policy = single_agent(tiny_qwen3, random_adapter=True)
        pairs = pairs_of(policy)
        forced = dataclasses.replace(pairs[0].winner.actions[0][0], forced=(0,))
        pairs[0] = dataclasses.replace(pairs[0], winner=dataclasses.replace(pairs[0].winner, actions=((forced,),)))
        config = make_config("single_dpo", batch_size=6, beta=0.5)
        before = weights_of(policy)[0]
        metrics = update(policy, TeamOptimizer(policy, config), pairs, STREAM, config)
        found.append((metrics, [new - old for new, old in zip(weights_of(policy)[0], before, strict=True)]))
    (ours, our_move), (theirs, their_move) = found
    assert abs(ours["loss"] - math.log(2)) > 0.05
    for name in ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "gradient_norm_single", "samples"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
    assert relative_difference(their_move, our_move) < 0.01


def test_trl_dpo_keeps_the_base_as_its_reference(tiny_qwen3):
    """The first step starts at log 2; a second update does not, since the policy has left the base."""
    policy, config = single_agent(tiny_qwen3), make_config("single_dpo", batch_size=6)
    pairs, optimizer = pairs_of(policy), TeamOptimizer(policy, config)
    losses_found = [update_dpo(policy, optimizer, pairs, STREAM, config)["loss"] for _ in range(2)]
    assert losses_found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses_found[1] < math.log(2) - 1e-3
    assert policy.members[0].base.trainable == ["single"] and "ref" not in policy.members[0].base.model.peft_config


@pytest.mark.parametrize("passes", [1, 2])
def test_trl_grpo_trains_on_every_task_whatever_the_batch(tiny_qwen3, passes):
    """Five tasks do not fill batches of two: TRL would leave one out."""
    policy = single_agent(tiny_qwen3)
    config = make_config("single_grpo", batch_size=2, num_generations=3, epochs=2, passes=passes)
    tasks = policy.domain.load_tasks("train", "pocket", 5)
    played, scored = [], oracle_rewards(2.0, 1.0)

    def reward(trajectories):
        played.extend(trajectories)
        return scored(trajectories)

    metrics = update_grpo(policy, TeamOptimizer(policy, config), tasks, reward, STREAM, config)
    assert metrics["samples"] == len(played) == 2 * 5 * 3
    assert sorted(t.task_id for t in played) == sorted(task.id for task in tasks for _ in range(2 * 3))
    assert metrics["reward"] == pytest.approx(2.0 * metrics["oracle_reward"] + 1.0)
    assert metrics["sampled_tokens"] == sum(len(t.actions[0][0].token_ids) for t in played)


@pytest.mark.parametrize("method", ["single_grpo", "single_dpo"])
def test_trl_moves_the_adapter_and_neither_the_base_nor_the_worlds_random_numbers(
    model_folder, tmp_path, monkeypatch, method
):
    monkeypatch.chdir(tmp_path)
    config = make_config(method, model_folder)
    team = build_team(config)
    base_model = team.policy.members[0].base.loaded.model
    frozen = {name: w.clone() for name, w in base_model.named_parameters() if "lora_" not in name}
    adapter = weights_of(team.policy)[0]
    monkeypatch.setattr("mapl_core.train.build_team", lambda _: team)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    run_mapl(config, tmp_path / "out", progress=False)
    assert states[0] == random.getstate() and (states[1] == np.random.get_state()[1]).all()
    assert torch.equal(states[2], torch.get_rng_state())
    assert all(torch.equal(w, dict(base_model.named_parameters())[name]) for name, w in frozen.items())
    assert any(not torch.equal(a, b) for a, b in zip(weights_of(team.policy)[0], adapter, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"metrics.csv", "evaluation.csv", "examples.json", "manifest.json", "adapters"}
    assert (tmp_path / "out" / "adapters" / "single" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("method", ["single_grpo", "single_dpo"])
def test_trl_stops_where_the_loss_is_not_finite(tiny_qwen3, method):
    policy, config = single_agent(tiny_qwen3), make_config(method)
    optimizer, tasks = TeamOptimizer(policy, config), policy.domain.load_tasks("train", "pocket", 2)
    pairs = pairs_of(policy)

    def poison(played=()):
        policy.parameters(0)[1].data.fill_(math.nan)
        return torch.arange(len(played), dtype=torch.float32)[:, None]

    if method == "single_dpo":
        poison()
    with pytest.raises(FloatingPointError, match="Trainer is not finite from step 1 on. Lower the learning rate"):
        if method == "single_dpo":
            update_dpo(policy, optimizer, pairs, STREAM, config)
        else:
            update_grpo(policy, optimizer, tasks, poison, STREAM, config)


def test_trl_tells_the_hub_nothing(tiny_qwen3, monkeypatch):
    """Its trainers report themselves when they are built, unless the hub's library is told not to."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _telemetry

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: pytest.fail("telemetry was sent"))
    policy, config = single_agent(tiny_qwen3), make_config("single_dpo", batch_size=6)
    update_dpo(policy, TeamOptimizer(policy, config), pairs_of(policy), STREAM, config)
    assert constants.HF_HUB_DISABLE_TELEMETRY is False


def test_forced_tokens_are_marked_and_batches_divide_their_tasks():
    response = Response((1,), (5, 6, 7), "", False, forced=(1,))
    assert scored_tokens(response) == [1, 0, 1] and response.num_chosen == 2
    assert [largest_divisor(*entry[:1], at_most=entry[1]) for entry in ((60, 8), (64, 8), (61, 8), (3, 8))] == [
        6,
        8,
        1,
        3,
    ]


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answers"), [("untrained", 4), ("sequential", 4), ("discussion", 8), ("single_raw", 4)]
)
def test_what_trains_nothing_counts_the_answers_it_gives_drafts_included(model_folder, tmp_path, method, answers):
    """Two evaluation tasks, two samples each; a discussion writes twice."""
    result = run_mapl(make_config(method, model_folder), tmp_path, progress=False)
    assert value(result, "count/env_steps", 0) == 0
    assert value(result, "count/agent_samples", 0) == answers
    assert value(result, "count/oracle_calls", 0) == 4  # drafts are not shown to the environment
    examples = json.loads((tmp_path / "examples.json").read_text())["0"]
    assert len(examples) == 2 and all(len(turn) == 2 for example in examples for turn in example["responses"])


def test_every_trained_single_agent_has_the_budget_of_the_team(model_folder, tmp_path):
    """GRPO and PPO train on as many joint responses as MAGRPO, DPO on two for each kept pair."""
    counts = {}
    for method in ("magrpo", "single_grpo", "single_ppo", "single_dpo"):
        result = run_mapl(make_config(method, model_folder), tmp_path / method, progress=False)
        counts[method] = {name: value(result, f"count/{name}", 1) for name in ("env_steps", "agent_samples")}
        if method == "single_dpo":
            assert counts[method]["env_steps"] == 2 * value(result, "preferences/pairs", 1)
            assert value(result, "count/comparator_samples", 1) == counts[method]["agent_samples"] == 4 * 4
    assert counts["magrpo"] == counts["single_grpo"] == counts["single_ppo"] == {"env_steps": 16, "agent_samples": 16}


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("single_raw", {"paradigm": "dec-dec"}, "method 'single_raw' under paradigm 'dec-dec'.* go with 'single'"),
        ("madpo", {"paradigm": "single"}, "method 'madpo' under paradigm 'single'"),
        ("sequential", {"paradigm": "cen-cen"}, "'sequential' is a protocol of separate agents, under dec-dec alone"),
        ("discussion", {"domain_options": {"horizon": 2}}, "'discussion' has one turn, .* ask for 2"),
        ("single_dpo", {"domain_options": {"horizon": 2}}, "'single_dpo' has one turn"),
        ("single_raw", {"central_model": ""}, "central_model is empty; a coordinator or a single agent"),
        ("single_ppo", {"clip_ratio": None}, "clip_ratio is null; single_ppo clips"),
        ("single_grpo", {"clip_ratio": None}, "clip_ratio is null; single_grpo clips"),
        ("single_grpo", {"num_generations": 1}, r"num_generations \(G\) is 1"),
        ("single_grpo", {"kl_coef": 0.1}, "kl_coef is 0.1; single_grpo is trained without"),
        ("single_dpo", {"reference": "previous"}, "single_dpo has the base as its reference"),
        ("magrpo", {"passes": 2}, "passes is 2.* got magrpo"),
        ("collm_cc", {"passes": 2, "clip_ratio": None}, "several steps on the same responses need clip_ratio"),
        ("single_ppo", {"passes": 0}, "passes is 0; it must be at least 1"),
        ("single_ppo", {"temperature": 0.0}, "greedy samples"),
    ],
)
def test_impossible_baselines_name_the_value_before_anything_is_loaded(method, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(method, **changes)


def test_a_protocol_without_training_may_be_greedy():
    assert make_config("sequential", temperature=0.0).temperature == 0.0


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single_grpo", "single_dpo", "single_ppo"])
def test_rl12_a_trained_single_agent_beats_the_raw_one_on_pocket_tldr(tmp_path, method):
    """Half of the default budget; the seed is fixed, the bound loose."""
    config = load_profile("pocket").config("tldr", method, "single", seed=0, iterations=2)
    result = run_mapl(config, tmp_path, progress=False)
    assert value(result, "score", 2) > value(result, "score", 0) + 0.05


def test_a_trl_trainer_keeps_its_batch_size_beside_several_gpus(tmp_path):
    from trl import DPOConfig

    arguments = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=3)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 2
    assert arguments.train_batch_size == 6
    baselines._use_one_device(arguments)
    assert arguments.train_batch_size == 3
