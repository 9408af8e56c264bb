"""Update rules on real adapters: simultaneous, the same whatever the micro-batch, in the right direction."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close
from toy_domains import ToyDomain
from toy_models import adapted_model, base, make_policy, relative_difference, trajectory, weights_of

from mapl_core import domains, losses
from mapl_core.buffers import PreferencePair, Trajectory
from mapl_core.profiles import RunConfig
from mapl_core.seeding import Stream
from mapl_core.updates import TeamOptimizer, oracle_rewards, update_madpo, update_magrpo

STREAM = Stream(0, "update")


@pytest.fixture(autouse=True)
def toy_domain(monkeypatch):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)


def make_config(method: str = "madpo", **changes) -> RunConfig:
    values = {"agent_models": ["unused"], "max_new_tokens": [6], "learning_rate": 1e-2, "batch_size": 2, "epochs": 1}
    return RunConfig(profile="test", domain="toy", method=method, **{**values, **changes})


def make_pairs(policy, *, tasks: int = 3, each: int = 2) -> list[PreferencePair]:
    """Pairs of sampled trajectories; which of two wins is arbitrary here."""
    groups = policy.sample(policy.domain.load_tasks("train", "pocket", tasks), 2 * each, Stream(0, "collect"))
    return [
        PreferencePair(group[2 * i], group[2 * i + 1], winner_is_agent=True) for group in groups for i in range(each)
    ]


def moves(policy, before) -> list[torch.Tensor]:
    return [a - b for a, b in zip(itertools.chain(*weights_of(policy)), itertools.chain(*before), strict=True)]


def flipped(pair: PreferencePair) -> PreferencePair:
    """The same pair with the two agents' actions exchanged."""
    sides = [
        Trajectory(t.task_id, tuple(turn[::-1] for turn in t.actions), t.responses, t.rewards, t.parts)
        for t in (pair.winner, pair.loser)
    ]
    return PreferencePair(*sides, winner_is_agent=True)


@pytest.mark.parametrize("micro_batch", [8192, 14])
def test_dpo9_three_updates_do_not_depend_on_the_order_of_the_agents(tiny_qwen3, micro_batch):
    """All margins are taken before any agent moves: exchanging the agents with their data exchanges the results."""
    teams = [make_policy(base(tiny_qwen3), micro_batch_tokens=micro_batch) for _ in range(2)]
    pairs = make_pairs(teams[0])
    one_graph = teams[0].graph_logprobs([pair.winner for pair in pairs[:2]]) is not None
    assert one_graph == (micro_batch == 8192)
    start = weights_of(teams[0])
    teams[1].restore(teams[0].snapshot()[::-1])
    metrics = []
    for policy, data in zip(teams, (pairs, [flipped(pair) for pair in pairs]), strict=True):
        optimizer = TeamOptimizer(policy, make_config(beta=1.0))
        metrics.append(update_madpo(policy, optimizer, data, STREAM, make_config(beta=1.0)))
        assert optimizer.optimizers[0].state_dict()["state"][0]["step"] == 3
    assert relative_difference(moves(teams[0], start), [torch.zeros_like(w) for w in itertools.chain(*start)]) > 0
    for one, other in zip(weights_of(teams[0]), weights_of(teams[1])[::-1], strict=True):
        for first, second in zip(one, other, strict=True):
            assert_close(first, second, rtol=0, atol=1e-6)
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-6)
    assert metrics[0]["agent0/margin"] == pytest.approx(metrics[1]["agent1/margin"], abs=1e-6)


@pytest.mark.parametrize("team", ["one base", "two bases", "checkpointing"])
def test_rl7_one_graph_and_many_micro_batches_take_the_same_step(tiny_qwen3, tiny_llama, team):
    def bases():
        options = {"rank": 4, "gradient_checkpointing": team == "checkpointing"}
        adapted = adapted_model(tiny_qwen3(), **options)
        return [adapted, adapted_model(tiny_llama(), **options)] if team == "two bases" else adapted

    found = []
    for micro_batch in (8192, 30):
        policy = make_policy(bases(), micro_batch_tokens=micro_batch, limits=[3, 9])
        pairs, before = make_pairs(policy, tasks=1, each=4), weights_of(policy)
        one_graph = policy.graph_logprobs([pair.winner for pair in pairs]) is not None
        assert one_graph == (micro_batch == 8192 and team != "checkpointing")
        metrics = update_madpo(policy, TeamOptimizer(policy, make_config()), pairs, STREAM, make_config())
        assert metrics["samples"] == 8
        found.append((moves(policy, before), metrics))
    assert relative_difference(found[0][0], found[1][0]) < 1e-3
    for name, value in found[0][1].items():
        assert value == pytest.approx(found[1][1][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("team", ["one base", "two bases"])
def test_rl7_one_graph_and_many_micro_batches_take_the_same_step_with_a_kl(tiny_qwen3, tiny_llama, team):
    """The KL of an answer that occurs twice counts twice on both ways."""
    found = []
    for micro_batch in (8192, 30):
        adapted = adapted_model(tiny_qwen3())
        bases = [adapted, adapted_model(tiny_llama())] if team == "two bases" else adapted
        policy = make_policy(bases, micro_batch_tokens=micro_batch, limits=[3, 9])
        trajectories = [t for pair in make_pairs(policy, tasks=1, each=4) for t in (pair.winner, pair.loser)]
        trajectories.append(trajectories[0])
        optimizer, before = TeamOptimizer(policy, make_config()), weights_of(policy)
        optimizer.step(trajectories, lambda logprobs: logprobs[:4].mean())  # away from the reference
        _, metrics = optimizer.step(trajectories, lambda logprobs: 0.1 * logprobs[:2].sum(), kl_weight=0.5)
        assert metrics["kl"] > 0
        found.append((moves(policy, before), metrics))
    assert relative_difference(found[0][0], found[1][0]) < 1e-3
    for name, value in found[0][1].items():
        assert value == pytest.approx(found[1][1][name], rel=1e-3), name


@pytest.mark.parametrize("clip_ratio", [None, 0.2])
@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_fresh_answers_need_no_pass_before_the_backward_one_and_take_the_same_step(tiny_qwen3, clip_ratio, kl_weight):
    """Two answers have no advantage: they need no graph, but their log-probabilities are reported like the others'."""
    found = []
    for fresh in (False, True):
        policy = make_policy(base(tiny_qwen3), micro_batch_tokens=30, limits=[3, 9])
        trajectories = [t for pair in make_pairs(policy, tasks=1, each=2) for t in (pair.winner, pair.loser)]
        advantages, passes = torch.tensor([[1.0, -2.0, 0.0, 0.0]]), []

        def loss_of(logprobs, advantages=advantages):
            grouped = logprobs.view(1, 4, 2, 1)
            sampled = None if clip_ratio is None else grouped.detach()
            return losses.magrpo_loss(grouped, advantages, clip_ratio=clip_ratio, sampled_logprobs=sampled)[0]

        hook = policy.members[0].base.backbone.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        optimizer, before = TeamOptimizer(policy, make_config()), weights_of(policy)
        expected = policy.logprobs(trajectories)
        passes.clear()
        logprobs, metrics = optimizer.step(trajectories, loss_of, kl_weight=kl_weight, fresh=fresh)
        hook.remove()
        assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
        found.append((moves(policy, before), metrics, len(passes)))
    assert relative_difference(found[1][0], found[0][0]) < 1e-4
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert found[1][2] < found[0][2]


def test_rl7_a_step_without_any_signal_is_the_same_on_both_ways(tiny_qwen3):
    """All weights zero: momentum and decay move the agents all the same, in one graph and in many micro-batches."""
    ends = []
    for micro_batch in (8192, 30):
        policy = make_policy(base(tiny_qwen3), micro_batch_tokens=micro_batch)
        trajectories = [pair.winner for pair in make_pairs(policy)]
        optimizer = TeamOptimizer(policy, make_config())
        optimizer.step(trajectories, lambda logprobs: logprobs.sum())
        optimizer.step(trajectories, lambda logprobs: 0.0 * logprobs.sum())
        ends.append(list(itertools.chain(*weights_of(policy))))
    assert relative_difference(*ends) < 1e-4


def test_dpo3_a_step_raises_the_winners_and_lowers_the_losers(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    tokens = {"winner": ((20, 21, 5), (22, 5)), "loser": ((23, 24, 25, 5), (26, 5))}
    sides = {
        name: trajectory([[((7, 8, 9), chosen[0]), ((7, 8, 10), chosen[1])]], task_id="task")
        for name, chosen in tokens.items()
    }
    pair = PreferencePair(sides["winner"], sides["loser"], winner_is_agent=True)
    before = policy.logprobs([pair.winner, pair.loser])
    config = make_config(learning_rate=1e-3)
    update_madpo(policy, TeamOptimizer(policy, config), [pair], STREAM, config)
    change = policy.logprobs([pair.winner, pair.loser]) - before
    assert bool((change[0] > 0).all()) and bool((change[1] < 0).all()), "of both agents"


def test_dpo8_training_leaves_the_reference_and_the_base_as_they_were(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), random_adapters=False)
    pairs = make_pairs(policy)
    trajectories = [pair.winner for pair in pairs]
    model = policy.members[0].base.loaded.model
    reference = policy.reference_logprobs(trajectories)
    kept = {n: (w.detach().clone(), w.requires_grad) for n, w in model.named_parameters() if "lora_" not in n}
    update_madpo(policy, TeamOptimizer(policy, make_config()), pairs, STREAM, make_config())
    assert torch.equal(policy.reference_logprobs(trajectories), reference)
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, kept[name][0]) and weight.requires_grad == kept[name][1] and weight.grad is None
    assert not torch.allclose(policy.logprobs(trajectories), reference)


def test_dpo1_the_first_batch_of_a_fresh_team_has_loss_log_2(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), random_adapters=False)
    config = make_config(batch_size=100)
    metrics = update_madpo(policy, TeamOptimizer(policy, config), make_pairs(policy), STREAM, config)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6) and metrics["margin"] == pytest.approx(0, abs=1e-6)


def test_math11_the_reference_is_the_one_that_was_asked_for(tiny_qwen3):
    """A team that has moved: against itself (previous) the first loss is log 2, otherwise it is not."""
    losses = {}
    for reference in ("base", "previous", "none"):
        policy = make_policy(base(tiny_qwen3))
        config = make_config(batch_size=100, reference=reference)
        metrics = update_madpo(policy, TeamOptimizer(policy, config), make_pairs(policy), STREAM, config)
        losses[reference] = metrics["loss"]
        assert metrics["reference_free"] == (reference == "none")
    assert losses["previous"] == pytest.approx(math.log(2), abs=1e-6)
    assert len({round(loss, 4) for loss in losses.values()}) == 3


def test_math11_previous_means_the_start_of_the_iteration_not_of_the_batch(tiny_qwen3):
    """In the second epoch the margin against the start of the iteration is no longer 0."""
    policy = make_policy(base(tiny_qwen3))
    config = make_config(batch_size=100, reference="previous", epochs=2)
    metrics = update_madpo(policy, TeamOptimizer(policy, config), make_pairs(policy), STREAM, config)
    assert metrics["margin"] > 1e-4 and metrics["loss"] < math.log(2)


def answered(task_id: str, *lengths: int, reward: float = 0.0) -> Trajectory:
    """One turn in which agent i writes so many tokens."""
    return trajectory([[((7, 8), (20,) * length) for length in lengths]], task_id=task_id, reward=reward)


def test_dpo10_the_lengths_of_winners_and_losers_are_means_over_the_pairs(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    lengths = [((1, 5), (2, 1)), ((3, 2), (6, 1))]  # (winner, loser) of two pairs, agent by agent
    pairs = [PreferencePair(answered("a", *won), answered("a", *lost), winner_is_agent=True) for won, lost in lengths]
    metrics = update_madpo(policy, TeamOptimizer(policy, make_config()), pairs, STREAM, make_config())
    expected = {"winner_length_agent0": 2, "winner_length_agent1": 3.5, "winner_length": 5.5}
    expected |= {"loser_length_agent0": 4, "loser_length_agent1": 1, "loser_length": 5}
    assert {name: value for name, value in metrics.items() if "_length" in name} == expected


@pytest.mark.parametrize("length_normalize", [False, True])
def test_dpo6_a_margin_that_is_not_finite_names_tasks_and_lengths(tiny_qwen3, monkeypatch, length_normalize):
    policy = make_policy(base(tiny_qwen3))
    pairs = [
        PreferencePair(answered(f"task{n}", n + 1, 2), answered(f"task{n}", 3, n + 4), winner_is_agent=True)
        for n in range(3)
    ]
    config = make_config(batch_size=100, length_normalize=length_normalize, reference="none")
    before, optimizer = weights_of(policy), TeamOptimizer(policy, config)
    scored = policy.graph_logprobs

    def poisoned(trajectories, **options):
        bad = torch.tensor([math.nan if t is pairs[1].loser else 1.0 for t in trajectories])
        logprobs, divergences = scored(trajectories, **options)
        return logprobs * bad[:, None, None], divergences

    monkeypatch.setattr(policy, "graph_logprobs", poisoned)
    with pytest.raises(FloatingPointError) as caught:
        update_madpo(policy, optimizer, pairs, STREAM, config)
    found = "a pair of task 'task1' with [[2], [2]] tokens of the winner and [[3], [5]] of the loser"
    assert found in str(caught.value)
    assert "task0" not in str(caught.value) and "task2" not in str(caught.value)
    assert not any(bool(move.any()) for move in moves(policy, before))


@pytest.mark.parametrize("agents", [2, 3])
def test_rl4_every_group_holds_the_returns_and_first_prompts_of_one_task(tiny_qwen3, monkeypatch, agents):
    """Three tasks, G = 3, in shuffled order. Every return is a number of its own, which tells whose answer it is."""
    policy = make_policy(base(tiny_qwen3), num_agents=agents)
    tasks = policy.domain.load_tasks("train", "pocket", 3)
    by_return: dict[float, Trajectory] = {}
    compared, trained, order = [], [], []
    advantages_of, loss_of = losses.group_relative_advantages, losses.magrpo_loss

    def numbered(trajectories) -> torch.Tensor:
        order.extend(dict.fromkeys(t.task_id for t in trajectories))
        by_return.update({10.0 * row + 1: t for row, t in enumerate(trajectories)})
        return torch.tensor(list(by_return))[:, None]

    def advantages(returns, **options):
        compared.append(returns.clone())
        return advantages_of(returns, **options)

    def loss(logprobs, weights, **options):
        trained.append((logprobs.detach().clone(), weights.clone()))
        plain = [[policy.logprobs([by_return[number]])[0] for number in row] for row in compared[0].tolist()]
        expected.append(torch.stack([torch.stack(row) for row in plain]))
        return loss_of(logprobs, weights, **options)

    expected: list[torch.Tensor] = []
    monkeypatch.setattr(losses, "group_relative_advantages", advantages)
    monkeypatch.setattr(losses, "magrpo_loss", loss)
    config = make_config("magrpo", num_generations=3, batch_size=3, domain_options={"num_agents": agents})
    update_magrpo(policy, TeamOptimizer(policy, config), tasks, numbered, Stream(1, "update"), config)

    assert order != [task.id for task in tasks] and set(order) == {task.id for task in tasks}  # shuffled
    (returns,), (logprobs, weights) = compared, trained[0]
    assert returns.shape == (3, 3) and sorted(returns.flatten().tolist()) == sorted(by_return)
    for task_id, row in zip(order, returns.tolist(), strict=True):
        group = [by_return[number] for number in row]
        assert {t.task_id for t in group} == {task_id}
        for agent in range(agents):
            assert len({t.actions[0][agent].prompt_ids for t in group}) == 1
    first_prompts = [by_return[number].actions[0][0].prompt_ids for number in returns[:, 0].tolist()]
    assert len(set(first_prompts)) == 3
    # What is weighted in place (g, j, i) is the log-probability of the very answer whose return stands in (g, j).
    assert logprobs.shape == (3, 3, agents, 1)
    assert_close(logprobs, expected[0], rtol=1e-4, atol=1e-4)
    assert_close(weights, returns - returns.mean(1, keepdim=True))


def test_rl11_an_agent_that_answers_alike_in_every_sample_does_not_move(tiny_qwen3):
    """Advantages sum to 0, so its gradient cancels, while the other agent's does not."""
    policy = make_policy(base(tiny_qwen3))
    group = [trajectory([[((7, 8), (20, 5)), ((9,), (21 + g, 5))]], reward=float(g)) for g in range(4)]
    advantages = oracle_rewards()(group).sum(1) - oracle_rewards()(group).sum(1).mean()
    policy.backward(group, -advantages[:, None, None].expand(4, 2, 1) / 4)
    norms = [
        sum(float(w.grad.abs().sum()) if w.grad is not None else 0.0 for w in policy.parameters(i)) for i in (0, 1)
    ]
    assert norms[0] < 1e-5 < 1e-1 < norms[1]


def test_the_training_reward_is_scaled_then_shifted_and_the_stored_one_stays():
    played = [trajectory([[((7,), (20, 5)), ((9,), (21, 5))]], reward=reward) for reward in (-1.0, 2.0)]
    assert oracle_rewards(4.0, -1.0)(played).tolist() == [[-5.0], [7.0]]
    assert oracle_rewards()(played).tolist() == [[t.rewards[0]] for t in played] == [[-1.0], [2.0]]


@pytest.mark.parametrize("clip_ratio", [None, 0.2])
def test_rl2_a_ratio_loss_of_zero_still_moves_the_agents(tiny_qwen3, clip_ratio):
    """On fresh samples the plain and the ratio form take the same step; only the latter's loss is 0."""
    policy = make_policy(base(tiny_qwen3))
    before = weights_of(policy)
    config = make_config("magrpo", clip_ratio=clip_ratio, num_generations=4)
    tasks = policy.domain.load_tasks("train", "pocket", 2)
    metrics = update_magrpo(policy, TeamOptimizer(policy, config), tasks, oracle_rewards(), STREAM, config)
    assert metrics["samples"] == 8 and metrics["gradient_norm_agent0"] > 0
    assert any(bool(move.any()) for move in moves(policy, before))
    if clip_ratio is not None:
        assert metrics["loss"] == pytest.approx(0.0, abs=1e-5)


def test_the_kl_coefficient_pulls_the_team_back_to_its_reference(tiny_qwen3):
    """Only the KL acts (all rewards equal): it falls from step to step."""
    policy = make_policy(base(tiny_qwen3))
    config = make_config("magrpo", kl_coef=1.0, num_generations=2)
    optimizer = TeamOptimizer(policy, config)
    tasks = policy.domain.load_tasks("train", "pocket", 2)

    def nothing(trajectories):
        return torch.zeros(len(trajectories), 1)

    kl = [
        update_magrpo(policy, optimizer, tasks, nothing, Stream(0, "update", iteration=i), config)["kl"]
        for i in range(8)
    ]
    assert 0.5 * kl[0] > kl[-1] > 0


def plain_kl(policy, played: Trajectory) -> float:
    """Next-token KL(policy || reference) summed over the agents' response tokens, from plain forward passes."""
    total = 0.0
    for member, action in zip(policy.members, played.actions[0], strict=True):
        ids = torch.tensor([[*action.prompt_ids, *action.token_ids]])
        laws = []
        for adapter in (member.adapter, None):
            with member.base.using(adapter), torch.no_grad():
                logits = member.base.loaded.model(input_ids=ids).logits[0, len(action.prompt_ids) - 1 : -1]
            laws.append(logits.double().log_softmax(-1))
        total += float((laws[0].exp() * (laws[0] - laws[1])).sum())
    return total


def test_the_logged_kl_is_that_of_one_trajectory_whatever_the_batch(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    trajectories = [pair.winner for pair in make_pairs(policy)]
    expected = [plain_kl(policy, played) for played in trajectories]
    for count in (1, len(trajectories)):
        optimizer = TeamOptimizer(policy, make_config(learning_rate=1e-12))
        _, metrics = optimizer.step(trajectories[:count], lambda logprobs: logprobs.sum(), kl_weight=0.5)
        assert metrics["kl"] == pytest.approx(sum(expected[:count]) / count, rel=1e-3)


@pytest.mark.parametrize("method", ["madpo", "magrpo"])
def test_rl12_a_team_learns_a_bandit_by_sampling(tiny_qwen3, method):
    """One word each, out of 43; the team is paid where both words are of the upper half. P(both) starts near 1/4."""
    policy = make_policy(base(tiny_qwen3, num_hidden_layers=1), random_adapters=False, limits=1)
    tasks = policy.domain.load_tasks("train", "pocket", 1)

    def both_upper(trajectories) -> torch.Tensor:
        return torch.tensor([[float(all(a.token_ids[0] > 21 for a in t.actions[0]))] for t in trajectories])

    def probability() -> float:
        """By enumeration: the product over agents of the mass on the upper half."""
        (asked,) = policy.sample(tasks, 1, STREAM)[0]
        every_word = [
            trajectory([[(action.prompt_ids, (word,)) for action in asked.actions[0]]]) for word in range(22, 43)
        ]
        return float(policy.logprobs(every_word).exp().sum(0).prod())

    config = make_config(method, learning_rate=4e-2, num_generations=64, batch_size=8)
    optimizer = TeamOptimizer(policy, config)
    assert 0.1 < probability() < 0.5
    for step in range(24):
        stream = Stream(0, "bandit", iteration=step)
        if method == "magrpo":
            update_magrpo(policy, optimizer, tasks, both_upper, stream, config)
            continue
        (group,) = policy.sample(tasks, 64, stream)
        pay = both_upper(group)[:, 0].tolist()
        good, bad = ([t for t, paid in zip(group, pay, strict=True) if paid == wanted] for wanted in (1.0, 0.0))
        pairs = [PreferencePair(*sides, winner_is_agent=True) for sides in zip(good, bad, strict=False)]
        if pairs:
            update_madpo(policy, optimizer, pairs, stream, config)
    assert probability() > 0.9
