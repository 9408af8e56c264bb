"""The joint policy: who reads what, what is scored, and what a step changes."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from toy_domains import ToyDomain
from toy_models import (
    adapted_model,
    base,
    gradients_of,
    ids_of,
    make_policy,
    plain_logprob,
    randomize_adapter,
    relative_difference,
    trajectory,
    weights_of,
)
from transformers import AutoModelForCausalLM

from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import PreferencePair
from mapl_core.comparators import Comparator
from mapl_core.domains.base import Turn
from mapl_core.losses import madpo_loss, magrpo_loss
from mapl_core.policies import JointPolicy
from mapl_core.reward_model import RewardModel
from mapl_core.rewards import Reward
from mapl_core.sampling import SamplingSettings, TransformersSampler
from mapl_core.seeding import Stream

STREAM = Stream(0, "collect")


# --- acting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_trajectories_have_a_turn_axis_and_one_action_for_each_policy(tiny_qwen3, num_agents, structure):
    policy = make_policy(base(tiny_qwen3), structure=structure, num_agents=num_agents, horizon=2)
    tasks = policy.domain.load_tasks("train", "pocket", 3)
    groups = policy.sample(tasks, 2, STREAM)
    assert [[t.task_id for t in group] for group in groups] == [[task.id] * 2 for task in tasks]
    for t in itertools.chain(*groups):
        assert len(t.actions) == len(t.responses) == len(t.rewards) == len(t.parts) == 2
        for acted, texts in zip(t.actions, t.responses, strict=True):
            assert len(acted) == (num_agents if structure == "dec" else 1) and len(texts) == num_agents
            if structure == "dec":
                assert texts == tuple(action.text for action in acted)
            else:
                assert texts == tuple(policy.domain.split_joint(acted[0].text))
    trajectories = list(itertools.chain(*groups))
    expected = (6, num_agents if structure == "dec" else 1, 2)
    assert policy.logprobs(trajectories).shape == policy.lengths(trajectories).shape == expected


@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_the_oracle_scores_the_agents_texts_of_each_turn(tiny_qwen3, structure):
    policy = make_policy(base(tiny_qwen3), structure=structure, horizon=2)
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    (group,) = policy.sample([task], 4, STREAM)
    for t in group:
        for texts, reward, parts in zip(t.responses, t.rewards, t.parts, strict=True):
            assert reward == policy.domain.reward(list(texts), task).total and sum(parts.values()) == pytest.approx(
                reward
            )
        assert t.total_return == pytest.approx(sum(t.rewards))
    assert len({t.total_return for t in group}) > 1


@pytest.mark.parametrize("prompt_form", ["text", "chat"])
def test_each_agent_reads_its_own_prompt_and_the_coordinator_the_joint_one(tiny_qwen3, prompt_form):
    adapted = base(tiny_qwen3)
    team = make_policy(adapted, prompt_form=prompt_form)
    coordinator = make_policy(adapted, structure="cen", prompt_form=prompt_form)
    (task,) = team.domain.load_tasks("train", "pocket", 1)
    for policy, texts in ((team, team.domain.prompts(task)), (coordinator, [team.domain.coordinator_prompt(task)])):
        ((t,),) = policy.sample([task], 1, STREAM)
        for action, text in zip(t.actions[0], texts, strict=True):
            read = adapted.tokenizer.decode(list(action.prompt_ids))
            words = " ".join(text.split())
            assert (read == words) if prompt_form == "text" else (words in read and read.endswith("assistant"))


def test_the_second_turn_reads_the_feedback_and_the_earlier_answer(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), horizon=2)
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    (group,) = policy.sample([task], 5, STREAM)
    for t in group:
        history = [Turn(t.responses[0], Reward(t.rewards[0], dict(t.parts[0])))]
        for agent, text in enumerate(policy.domain.prompts(task, history)):
            assert t.actions[1][agent].prompt_ids == tuple(policy.members[agent].base.tokenizer.encode(text))
            assert t.responses[0][agent] in text
    assert len({t.actions[1][0].prompt_ids for t in group}) == 5, "episodes go their own ways"


def test_tok3_sampled_ids_are_kept_and_never_encoded_again(tiny_qwen3):
    """A text does not tell its ids: special tokens vanish from it, and <unk> is read back as itself only by luck."""
    policy = make_policy(base(tiny_qwen3), limits=10)
    tasks = policy.domain.load_tasks("train", "pocket", 4)
    trajectories = list(itertools.chain(*policy.sample(tasks, 5, STREAM)))
    tokenizer = policy.members[0].base.tokenizer
    changed = 0
    for t in trajectories:
        for action in t.actions[0]:
            assert action.truncated == (action.token_ids[-1] != tokenizer.eos_token_id)
            assert action.text == tokenizer.decode(list(action.token_ids), skip_special_tokens=True)
            changed += tuple(tokenizer.encode(action.text)) != action.token_ids
    assert changed > 5


def test_seed1_agents_with_equal_prompts_and_fresh_adapters_sample_different_answers(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), random_adapters=False, same_prompts=True)
    tasks = policy.domain.load_tasks("train", "pocket", 3)
    groups = policy.sample(tasks, 4, STREAM)
    for t in itertools.chain(*groups):
        first, second = t.actions[0]
        assert first.prompt_ids == second.prompt_ids and first.token_ids != second.token_ids
    assert ids_of(policy.sample(tasks, 4, STREAM)) == ids_of(groups)
    for other in (Stream(1, "collect"), Stream(0, "comparator"), Stream(0, "collect", iteration=1)):
        assert not any(a == b for a, b in zip(ids_of(policy.sample(tasks, 4, other)), ids_of(groups), strict=True))


@pytest.mark.parametrize("horizon", [1, 2])
def test_seed1_samples_depend_neither_on_batches_nor_on_the_order_or_company_of_tasks(tiny_qwen3, horizon):
    adapted = base(tiny_qwen3)
    policy = make_policy(adapted, horizon=horizon)
    tasks = policy.domain.load_tasks("train", "pocket", 4)
    expected = {t.id: ids_of([group]) for t, group in zip(tasks, policy.sample(tasks, 3, STREAM), strict=True)}
    for cached in (1, 50, 90):
        policy.sampler = TransformersSampler(cached_tokens=cached)
        for chosen in ([3, 1, 0, 2], [2]):
            groups = policy.sample([tasks[i] for i in chosen], 3, STREAM)
            for task, group in zip((tasks[i] for i in chosen), groups, strict=True):
                assert ids_of([group]) == expected[task.id]


def test_seed1_turns_draw_their_own_numbers(tiny_qwen3):
    """Were the second turn to read the very prompts of the first, its answers would still be others."""

    class Forgetful(ToyDomain):
        def role_text(self, agent, task, history=()):
            return super().role_text(agent, task)

    policy = make_policy(base(tiny_qwen3))
    policy.domain = Forgetful(horizon=2)
    for t in itertools.chain(*policy.sample(policy.domain.load_tasks("train", "pocket", 2), 3, STREAM)):
        for first, second in zip(*t.actions, strict=True):
            assert first.prompt_ids == second.prompt_ids and first.token_ids != second.token_ids


def test_more_samples_of_a_task_begin_with_the_same_ones(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    few, many = policy.sample(tasks, 2, STREAM), policy.sample(tasks, 5, STREAM)
    assert [ids_of([group]) for group in few] == [ids_of([group[:2]]) for group in many]


def test_reference_samples_are_those_of_the_bare_base(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    untrained = make_policy(base(tiny_qwen3), trained=False)
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    bare = ids_of(policy.sample(tasks, 3, STREAM, reference=True))
    assert bare == ids_of(untrained.sample(tasks, 3, STREAM)) != ids_of(policy.sample(tasks, 3, STREAM))


def test_the_temperature_can_be_replaced(tiny_qwen3):
    """Greedy samples of a task are all equal; those of a hot policy are not."""
    policy = make_policy(base(tiny_qwen3))
    tasks = policy.domain.load_tasks("train", "pocket", 1)
    assert len({str(ids) for ids in ids_of(policy.sample(tasks, 4, STREAM, temperature=0.0))}) == 1
    assert len({str(ids) for ids in ids_of(policy.sample(tasks, 4, STREAM, temperature=3.0))}) == 4


def test_every_agent_has_its_own_token_limit_and_a_joint_view_their_sum(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), limits=[2, 5])
    tasks = policy.domain.load_tasks("train", "pocket", 4)
    for view, limits in ((False, (2, 5)), (True, (7, 7))):
        acted = [t.actions[0] for t in itertools.chain(*policy.sample(tasks, 4, STREAM, joint_view=view))]
        assert tuple(max(len(actions[i].token_ids) for actions in acted) for i in range(2)) == limits


def test_a_joint_view_reads_the_coordinators_prompt_and_counts_each_agents_own_section(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), limits=12)
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    (group,) = policy.sample([task], 12, STREAM, joint_view=True)
    prompt = tuple(policy.members[0].base.tokenizer.encode(policy.domain.coordinator_prompt(task)))
    for t in group:
        assert {action.prompt_ids for action in t.actions[0]} == {prompt}
        assert t.responses[0] == tuple(
            policy.domain.split_joint(action.text)[i] for i, action in enumerate(t.actions[0])
        )
    assert any(t.responses[0][1] for t in group), "second sections occur"
    coordinator = make_policy(base(tiny_qwen3), structure="cen")
    with pytest.raises(ValueError, match="joint_view"):
        coordinator.sample([task], 1, STREAM, joint_view=True)


def test_a_team_of_the_wrong_size_is_refused(tiny_qwen3):
    adapted, settings = base(tiny_qwen3), SamplingSettings()
    with pytest.raises(ValueError, match="2 policies.*got 1 bases"):
        JointPolicy(ToyDomain(), "dec", [adapted], [settings] * 2, prompt_form="text")
    with pytest.raises(ValueError, match="1 policies"):
        JointPolicy(ToyDomain(), "cen", [adapted] * 2, [settings] * 2, prompt_form="text")


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dec", "cen"])
@pytest.mark.parametrize("length", [1, 2])
def test_tok8_joint_probabilities_sum_to_one(tiny_qwen3, structure, length):
    """Dec: over all pairs of answers of two agents, prod_i pi_i. Cen: over all of the coordinator's texts. 4 words."""
    adapted = base(tiny_qwen3, vocab_size=4, pad_token_id=3)
    policy = make_policy(adapted, structure=structure)
    answers = list(itertools.product(range(4), repeat=length))
    prompts = [(1, 2, 0), (2,)][: len(policy.members)]
    joint = itertools.product(answers, repeat=len(prompts))
    trajectories = [trajectory([list(zip(prompts, chosen, strict=True))]) for chosen in joint]
    for policy.micro_batch_tokens in (8192, 9):
        assert_close(float(policy.logprobs(trajectories).sum((1, 2)).exp().sum()), 1.0, rtol=0, atol=1e-5)
        assert_close(float(policy.reference_logprobs(trajectories).sum((1, 2)).exp().sum()), 1.0, rtol=0, atol=1e-5)


def test_each_policy_turn_and_trajectory_is_scored_at_its_place(tiny_qwen3, tiny_llama):
    """Two agents on two different bases, two turns: every entry of (B, n, H) equals a plain pass."""
    policy = make_policy([base(tiny_qwen3), base(tiny_llama)], horizon=2)
    trajectories = [
        trajectory(
            [
                [((7, 8, 9), (20 + b, 21)), ((10, 11), (30, 31, 32 + b))],
                [((7, 8, 9, 1), (22,)), ((12, 13, 14), (33 + b, 2))],
            ]
        )
        for b in range(3)
    ]
    found, reference = policy.logprobs(trajectories), policy.reference_logprobs(trajectories)
    for index, member in enumerate(policy.members):
        for b, t in enumerate(trajectories):
            for turn, acted in enumerate(t.actions):
                item = acted[index].prompt_ids, acted[index].token_ids
                for adapter, table in ((member.adapter, found), (None, reference)):
                    with torch.no_grad(), member.base.using(adapter):
                        expected = plain_logprob(member.base.model, *item)
                    assert_close(table[b, index, turn], expected.float(), rtol=1e-5, atol=1e-5)
    assert policy.lengths(trajectories)[0].tolist() == [[2, 1], [3, 2]]


@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dpo1_a_fresh_team_has_loss_log_2_and_every_margin_zero(tiny_qwen3, num_agents, checkpointing):
    """With dropout 0.1 in the base's config, in training mode as well."""
    adapted = AdaptedModel(tiny_qwen3(attention_dropout=0.1), rank=4, gradient_checkpointing=checkpointing)
    policy = make_policy(adapted, random_adapters=False, num_agents=num_agents)
    groups = policy.sample(policy.domain.load_tasks("train", "pocket", 3), 2, STREAM)
    winners, losers = ([group[side] for group in groups] for side in (0, 1))
    scores = [
        policy.logprobs(winners),
        policy.logprobs(losers),
        policy.reference_logprobs(winners),
        policy.reference_logprobs(losers),
    ]
    loss, metrics = madpo_loss(*scores, beta=0.1)
    assert_close(float(loss), math.log(2), rtol=0, atol=1e-6)
    assert all(metrics[f"{scope}margin"] == 0 for scope in ["", *(f"agent{i}/" for i in range(num_agents))])
    randomize_adapter(adapted, "agent0", seed=1)
    assert (
        abs(float(madpo_loss(policy.logprobs(winners), policy.logprobs(losers), *scores[2:])[0]) - math.log(2)) > 1e-3
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rl6_the_first_step_on_fresh_samples_has_ratio_one(tiny_qwen3, temperature):
    """The team's answers have, at the sampling temperature, the scores of a plain pass; the ratio form starts at 0."""
    policy = make_policy(base(tiny_qwen3), temperature=temperature)
    groups = policy.sample(policy.domain.load_tasks("train", "pocket", 2), 4, STREAM)
    trajectories = list(itertools.chain(*groups))
    found = policy.logprobs(trajectories, temperature=temperature)
    for index, member in enumerate(policy.members):
        with torch.no_grad(), member.base.using(member.adapter):
            plain = torch.stack(
                [
                    plain_logprob(
                        member.base.model,
                        t.actions[0][index].prompt_ids,
                        t.actions[0][index].token_ids,
                        temperature=temperature,
                    )
                    for t in trajectories
                ]
            ).float()
        assert float(((found[:, index, 0] - plain).exp() - 1).abs().max()) < 1e-4
    shaped = found.view(2, 4, 2, 1)
    advantages = torch.tensor([[1.0, -1.0, 2.0, -2.0], [0.5, 0.5, -1.0, 0.0]])
    loss, _ = magrpo_loss(shaped, advantages, sampled_logprobs=shaped, clip_ratio=0.2)
    assert abs(float(loss)) < 1e-6


# --- gradients -------------------------------------------------------------------------------------------------------


def _graph_gradients(policy, trajectories, weights) -> list[torch.Tensor]:
    for index, member in enumerate(policy.members):
        with member.base.using(member.adapter):
            sum(
                weights[b, index, turn]
                * plain_logprob(member.base.model, acted[index].prompt_ids, acted[index].token_ids)
                for b, t in enumerate(trajectories)
                for turn, acted in enumerate(t.actions)
            ).backward()
    return gradients_of(policy)


@pytest.mark.parametrize("team", ["homogeneous", "heterogeneous", "checkpointing", "centralised"])
def test_dpo7_backward_gives_every_policy_the_plain_gradient_at_two_turns(tiny_qwen3, tiny_llama, team):
    bases = {
        "homogeneous": lambda: base(tiny_qwen3),
        "heterogeneous": lambda: [base(tiny_qwen3), base(tiny_llama)],
        "checkpointing": lambda: AdaptedModel(tiny_qwen3(), rank=4, alpha=8, gradient_checkpointing=True),
        "centralised": lambda: base(tiny_qwen3),
    }[team]()
    policy = make_policy(bases, horizon=2, structure="cen" if team == "centralised" else "dec")
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    trajectories = list(itertools.chain(*policy.sample(tasks, 2, STREAM)))
    weights = torch.randn(4, len(policy.members), 2, generator=torch.Generator().manual_seed(0))
    expected = _graph_gradients(policy, trajectories, weights)
    for policy.micro_batch_tokens in (8192, 30):  # one micro-batch, and several
        policy.backward(trajectories, weights)
        found = gradients_of(policy)
        assert relative_difference(found, expected) < 1e-5
        assert all(bool(gradient.any()) for gradient in found)
        graph = policy.graph_logprobs(trajectories)
        if graph is not None:
            assert team != "checkpointing" and policy.micro_batch_tokens == 8192
            whole, divergences = graph
            assert not divergences.any()
            assert_close(whole.detach(), policy.logprobs(trajectories), rtol=1e-5, atol=1e-5)
            (weights * whole).sum().backward()
            assert relative_difference(gradients_of(policy), expected) < 1e-5
    for member in policy.members:
        assert all(w.grad is None for name, w in member.base.loaded.model.named_parameters() if "lora_" not in name)


def test_rl7_the_micro_batch_does_not_change_the_gradient(tiny_qwen3):
    """One micro-batch or eight, of answers of unequal lengths."""
    policy = make_policy(base(tiny_qwen3), limits=16)
    trajectories = list(itertools.chain(*policy.sample(policy.domain.load_tasks("train", "pocket", 2), 4, STREAM)))
    weights = torch.randn(8, 2, 1, generator=torch.Generator().manual_seed(0))
    found = []
    for policy.micro_batch_tokens in (8192, 1):
        policy.backward(trajectories, weights, kl_weight=0.1)
        found.append(gradients_of(policy))
    assert relative_difference(*found) < 1e-5


def test_the_kl_is_summed_over_agents_and_zero_for_a_fresh_team(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), random_adapters=False)
    trajectories = list(itertools.chain(*policy.sample(policy.domain.load_tasks("train", "pocket", 2), 2, STREAM)))
    zeros, fresh, kl = torch.zeros(4, 2, 1), policy.snapshot(), {}
    for moved in ((), (0,), (1,), (0, 1)):
        policy.restore(fresh)
        for index in moved:
            randomize_adapter(policy.members[0].base, f"agent{index}", seed=index)
        logprobs, kl[moved] = policy.backward(trajectories, zeros, kl_weight=1.0)
        assert_close(logprobs, policy.logprobs(trajectories))
    assert kl[()] == 0.0 and kl[0,] > 0.1 and kl[1,] > 0.1
    assert_close(kl[0, 1], kl[0,] + kl[1,], rtol=1e-5, atol=0)


def test_dpo8_the_reference_does_not_move_and_leaves_no_trace(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), random_adapters=False)
    trajectories = list(itertools.chain(*policy.sample(policy.domain.load_tasks("train", "pocket", 2), 2, STREAM)))
    before = policy.reference_logprobs(trajectories)
    flags = {name: w.requires_grad for name, w in policy.members[0].base.loaded.model.named_parameters()}
    optimizer = torch.optim.SGD([w for index in range(2) for w in policy.parameters(index)], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        policy.backward(trajectories, torch.ones(4, 2, 1))
        optimizer.step()
        assert not policy.reference_logprobs(trajectories).requires_grad
        assert {name: w.requires_grad for name, w in policy.members[0].base.loaded.model.named_parameters()} == flags
    assert torch.equal(policy.reference_logprobs(trajectories), before)
    assert not torch.allclose(policy.logprobs(trajectories), before)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_a_copy_and_restoring_it_brings_every_policy_back(tiny_qwen3, tiny_llama):
    policy = make_policy([base(tiny_qwen3), base(tiny_llama)])
    kept, snapshot = weights_of(policy), policy.snapshot()
    for index, member in enumerate(policy.members):
        randomize_adapter(member.base, member.adapter, seed=60 + index)
    moved = weights_of(policy)
    with policy.weights(snapshot):
        inside = weights_of(policy)
    assert all(map(torch.equal, itertools.chain(*inside), itertools.chain(*kept)))
    assert all(map(torch.equal, itertools.chain(*weights_of(policy)), itertools.chain(*moved)))
    with pytest.raises(RuntimeError, match="stop"), policy.weights(snapshot):
        raise RuntimeError("stop")
    assert all(map(torch.equal, itertools.chain(*weights_of(policy)), itertools.chain(*moved)))
    policy.restore(snapshot)
    assert all(map(torch.equal, itertools.chain(*weights_of(policy)), itertools.chain(*kept)))


def test_save3_each_agent_survives_the_round_trip_through_stock_peft(tiny_qwen3, tmp_path):
    loaded = tiny_qwen3()
    loaded.model.save_pretrained(tmp_path / "base")
    policy = make_policy(AdaptedModel(loaded, rank=4, alpha=8))
    trajectories = list(itertools.chain(*policy.sample(policy.domain.load_tasks("train", "pocket", 2), 2, STREAM)))
    expected = policy.logprobs(trajectories)
    assert float((expected[:, 0] - expected[:, 1]).abs().min()) > 1e-3
    policy.save(tmp_path / "adapters")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    stock = PeftModel.from_pretrained(plain, tmp_path / "adapters" / "agent0", adapter_name="agent0", is_trainable=True)
    stock.load_adapter(tmp_path / "adapters" / "agent1", "agent1", is_trainable=True)
    for index in range(2):
        stock.set_adapter(f"agent{index}")
        assert all(w.requires_grad for name, w in stock.named_parameters() if f"lora_A.agent{index}" in name)
        for b, t in enumerate(trajectories):
            action = t.actions[0][index]
            assert_close(
                plain_logprob(stock, action.prompt_ids, action.token_ids).detach().float(),
                expected[b, index, 0],
                rtol=1e-5,
                atol=1e-5,
            )
    again = make_policy(base(tiny_qwen3), seed=4)
    again.load(tmp_path / "adapters")
    assert torch.equal(again.logprobs(trajectories), expected)
    assert all(w.requires_grad for index in range(2) for w in again.parameters(index))


def test_save3_a_heterogeneous_team_and_a_coordinator_survive_as_well(tiny_qwen3, tiny_llama, tmp_path):
    for name, build in (
        ("mixed", lambda seed: make_policy([base(tiny_qwen3), base(tiny_llama)], seed=seed)),
        ("cen", lambda seed: make_policy(base(tiny_qwen3), structure="cen", seed=seed)),
    ):
        policy, again = build(0), build(1)
        policy.save(tmp_path / name)
        again.load(tmp_path / name)
        assert all(map(torch.equal, itertools.chain(*weights_of(again)), itertools.chain(*weights_of(policy))))


def test_seed2_building_and_sampling_leave_the_global_random_states_alone(tiny_qwen3):
    loaded = tiny_qwen3()
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    policy = make_policy(AdaptedModel(loaded, rank=4), random_adapters=False)
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    Comparator("last", policy, structure="dec").begin_iteration()
    model = RewardModel(
        policy.domain,
        {t.id: t for t in tasks},
        policy.members[0].base,
        Stream(0, "reward"),
        max_text_tokens=64,
        micro_batch_tokens=512,
    )
    trajectories = list(itertools.chain(*policy.sample(tasks, 2, STREAM)))
    model.scores(trajectories)
    policy.backward(trajectories, torch.ones(4, 2, 1), kl_weight=0.1)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


# --- adopting another team's answers ---------------------------------------------------------------------------------


def test_adopting_scores_a_coordinators_sections_under_the_agents_own_prompts_closed_with_eos(tiny_qwen3, tiny_llama):
    """Dec-Cen: the coordinator's text is split, and agent i's part is encoded with agent i's own tokenizer."""
    policy = make_policy([base(tiny_qwen3), base(tiny_llama)], prompt_form="chat")
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    foreign = trajectory([[((7,), (8, 9))]], task_id=task.id, reward=1.5, responses=[("the cat sleeps", "")])
    adopted = policy.adopt(foreign, task)
    assert (adopted.task_id, adopted.responses, adopted.rewards) == (
        foreign.task_id,
        foreign.responses,
        foreign.rewards,
    )
    qwen, llama = (member.base.tokenizer for member in policy.members)
    words = [qwen.get_vocab()[word] for word in ("the", "cat", "sleeps")]
    first, second = adopted.actions[0]
    assert first.token_ids == (*words, qwen.eos_token_id) and second.token_ids == (llama.eos_token_id,)
    assert not first.truncated and (first.text, second.text) == ("the cat sleeps", "")
    for action, member, prompt in zip(adopted.actions[0], policy.members, policy.domain.prompts(task), strict=True):
        message = [{"role": "user", "content": prompt}]
        assert list(action.prompt_ids) == member.base.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
    assert bool((policy.logprobs([adopted]) < 0).all())


def test_adopting_at_the_second_turn_reads_the_history_of_the_adopted_answer(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), horizon=2)
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    hits = policy.domain.reward(["cat", "the"], task)
    foreign = trajectory([[((7,), (8,))]] * 2, task_id=task.id, responses=[("cat", "the"), ("dog", "bird")])
    foreign = type(foreign)(
        foreign.task_id, foreign.actions, foreign.responses, (hits.total, 0.0), (hits.parts, hits.parts)
    )
    adopted = policy.adopt(foreign, task)
    expected = policy.domain.prompts(task, [Turn(("cat", "the"), hits)])
    tokenizer = policy.members[0].base.tokenizer
    assert [action.prompt_ids for action in adopted.actions[1]] == [tuple(tokenizer.encode(text)) for text in expected]


def test_adopting_by_a_coordinator_writes_the_joint_text(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), structure="cen")
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    foreign = trajectory([[((7,), (8,)), ((7,), (9,))]], task_id=task.id, responses=[("the cat", "a dog")])
    ((action,),) = policy.adopt(foreign, task).actions
    tokenizer = policy.members[0].base.tokenizer
    assert action.text == "the cat , a dog"
    assert action.token_ids == (*tokenizer.encode("the cat , a dog"), tokenizer.eos_token_id)
    assert action.prompt_ids == tuple(tokenizer.encode(policy.domain.coordinator_prompt(task)))
    assert policy.domain.split_joint(action.text) == ["the cat", "a dog"]


def test_adopting_ones_own_finished_answer_changes_no_token(tiny_qwen3):
    """What a team wrote itself, in words and closed with EOS, comes back the same: nothing is lost on the way."""
    policy = make_policy(base(tiny_qwen3), limits=20)
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    (group,) = policy.sample([task], 40, STREAM)
    whole = [t for t in group if all(not a.truncated and min(a.token_ids[:-1], default=9) > 5 for a in t.actions[0])]
    for t in whole:
        assert policy.adopt(t, task) == t
    finished = trajectory(
        [[(a.prompt_ids, (20, 21, 5)) for a in group[0].actions[0]]],
        task_id=task.id,
        responses=[(policy.members[0].base.tokenizer.decode([20, 21]),) * 2],
    )
    assert [a.token_ids for a in policy.adopt(finished, task).actions[0]] == [(20, 21, 5)] * 2
    assert policy.adopt(finished, task).actions[0][0].prompt_ids == group[0].actions[0][0].prompt_ids


def test_pairs_of_own_and_adopted_trajectories_train_together(tiny_qwen3):
    """A Dec-Cen pair: the agents' sampled winner and a coordinator's adopted loser share prompts and give gradients."""
    policy = make_policy(base(tiny_qwen3))
    (task,) = policy.domain.load_tasks("train", "pocket", 1)
    ((own,),) = policy.sample([task], 1, STREAM)
    adopted = policy.adopt(trajectory([[((7,), (8,))]], task_id=task.id, responses=[("the cat", "a dog runs")]), task)
    pair = PreferencePair(own, adopted, winner_is_agent=True)
    both = [pair.winner, pair.loser]
    assert [a.prompt_ids for a in own.actions[0]] == [a.prompt_ids for a in adopted.actions[0]]
    scores = policy.logprobs(both).requires_grad_()
    loss, _ = madpo_loss(scores[:1], scores[1:], *policy.reference_logprobs(both).chunk(2))
    policy.backward(both, torch.autograd.grad(loss, scores)[0])
    assert all(bool(gradient.any()) for gradient in gradients_of(policy))


def test_untrained_policies_share_a_base_with_trained_ones(tiny_qwen3):
    """The raw comparator model may be the very base on which the agents' adapters live."""
    adapted = adapted_model(tiny_qwen3())
    policy, raw = make_policy(adapted), make_policy(adapted, trained=False)
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    trajectories = list(itertools.chain(*raw.sample(tasks, 2, STREAM)))
    assert ids_of([trajectories]) == ids_of(policy.sample(tasks, 2, STREAM, reference=True))
    assert torch.equal(raw.logprobs(trajectories), policy.reference_logprobs(trajectories))
