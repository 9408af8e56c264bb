"""Losses against hand arithmetic, enumeration and finite differences. TRL's trainers are in test_losses_against_trl."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

import mapl_core.losses
from mapl_core.losses import (
    actor_critic_loss,
    bradley_terry_loss,
    exact_kl,
    group_relative_advantages,
    kl_estimate,
    madpo_loss,
    magrpo_loss,
)

LOG_2 = math.log(2)
JOINT_ACTIONS = torch.tensor(list(itertools.product(range(2), repeat=2)))  # (4, 2): two agents with two actions each


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def joint_logprobs(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """(..., n) log-probabilities of actions (..., n) under one softmax policy per agent, logits (n, actions)."""
    return torch.stack([row.log_softmax(0)[actions[..., i]] for i, row in enumerate(logits)], dim=-1)


# MADPO


def test_math1_joint_logistic_of_two_agents():
    """beta 0.1, margins 3 and -1: loss log(1 + exp(-0.2)), the same derivative for both agents."""
    winner = torch.tensor([[[3.0], [-1.0]]], requires_grad=True)
    loss, metrics = madpo_loss(winner, torch.zeros(1, 2, 1), beta=0.1)
    assert loss.item() == pytest.approx(0.59814, abs=1e-5)
    assert_close(grad(loss, winner)[0].flatten(), torch.tensor([-0.045017, -0.045017]), atol=1e-6, rtol=0)
    assert metrics["margin"] == pytest.approx(0.2)
    assert (metrics["agent0/margin"], metrics["agent1/margin"]) == pytest.approx((0.3, -0.1))


def test_math2_an_agent_that_separates_the_pair_damps_the_others():
    """The weight is sigmoid(-margin of the team) for every agent, so agent 0's lead shrinks agent 1's gradient."""
    for lead in (0.0, 10.0, 40.0):
        winner = torch.tensor([[[lead], [0.0], [1.0]]], dtype=torch.float64, requires_grad=True)
        loss, _ = madpo_loss(winner, torch.zeros_like(winner), beta=0.1)
        expected = -0.1 * sigmoid(-0.1 * (lead + 1.0))
        assert grad(loss, winner)[0].flatten().tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("turns", [1, 2])
def test_dpo1_policy_equal_to_reference_has_loss_log_2_and_no_margin(agents, turns):
    winner = (100 * normal(4, agents, turns, dtype=torch.float32)).requires_grad_()
    loser = 100 * normal(4, agents, turns, seed=1, dtype=torch.float32)
    loss, metrics = madpo_loss(winner, loser, winner.detach().clone(), loser.clone(), beta=0.1)
    assert loss.item() == pytest.approx(LOG_2, abs=1e-6)
    assert metrics["margin"] == 0.0
    # sigmoid(-margin) is one half for every pair, so no margin hides behind a mean of zero.
    assert_close(grad(loss, winner)[0], torch.full_like(winner, -0.1 / 2 / 4), rtol=1e-6, atol=0)


def test_dpo2_both_rewards_may_fall_while_the_accuracy_is_full():
    """Two pairs, two agents: log-ratios of winners -1 and -2, of losers -5 and -1."""
    winner = torch.tensor([[[-1.0], [-2.0]]]).repeat(2, 1, 1)
    loser = torch.tensor([[[-5.0], [-1.0]]]).repeat(2, 1, 1)
    _, metrics = madpo_loss(winner, loser, torch.zeros(2, 2, 1), torch.zeros(2, 2, 1), beta=0.1)
    expected = {
        "chosen_reward": -0.3,
        "rejected_reward": -0.6,
        "margin": 0.3,
        "accuracy": 1.0,
        "agent0/chosen_reward": -0.1,
        "agent0/rejected_reward": -0.5,
        "agent0/margin": 0.4,
        "agent0/accuracy": 1.0,
        "agent1/chosen_reward": -0.2,
        "agent1/rejected_reward": -0.1,
        "agent1/margin": -0.1,
        "agent1/accuracy": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_dpo3_swapping_winner_and_loser_negates_the_margin():
    winner, loser = normal(5, 2, 2), normal(5, 2, 2, seed=1)
    references = normal(5, 2, 2, seed=2), normal(5, 2, 2, seed=3)
    _, metrics = madpo_loss(winner, loser, *references)
    _, swapped = madpo_loss(loser, winner, *reversed(references))
    assert metrics["margin"] != 0.0
    for name in ("margin", "agent0/margin", "agent1/margin"):
        assert swapped[name] == pytest.approx(-metrics[name])


def test_dpo3_gradient_is_that_of_finite_differences_and_points_to_the_winner():
    shape = (3, 2, 2)
    inputs = [normal(*shape, seed=seed).requires_grad_(seed < 2) for seed in range(4)]
    lengths = {"winner_lengths": torch.full(shape, 3), "loser_lengths": torch.full(shape, 5)}
    for options in ({}, {"label_smoothing": 0.1}, lengths):
        assert gradcheck(lambda *tensors, options=options: madpo_loss(*tensors, beta=0.7, **options)[0], inputs)
    winner_gradient, loser_gradient = grad(madpo_loss(*inputs)[0], inputs[:2])
    assert (winner_gradient < 0).all() and (loser_gradient > 0).all()  # descent raises winners and lowers losers


def test_dpo3_one_step_raises_winner_tokens_and_lowers_loser_tokens():
    logits = normal(2, 5).requires_grad_()
    winner_tokens, loser_tokens = torch.tensor([[1, 3]]), torch.tensor([[2, 0]])

    def logprobs(tokens):
        return joint_logprobs(logits, tokens).unsqueeze(-1)

    before = logprobs(winner_tokens).detach(), logprobs(loser_tokens).detach()
    loss, _ = madpo_loss(logprobs(winner_tokens), logprobs(loser_tokens), *before)
    with torch.no_grad():
        logits -= 0.1 * grad(loss, logits)[0]
    assert (logprobs(winner_tokens) > before[0]).all()
    assert (logprobs(loser_tokens) < before[1]).all()


@pytest.mark.parametrize("agents", [1, 3])
def test_dpo4_joint_margin_is_the_sum_over_agents_and_turns(agents):
    """Against the formula written with Python floats, with unequal pairs, agents and turns."""
    tensors = [4 * normal(3, agents, 2, seed=seed) for seed in range(4)]
    loss, metrics = madpo_loss(*tensors, beta=0.2, label_smoothing=0.1)
    losses, margins = [], []
    for pair in range(3):
        margin = 0.0
        for agent, turn in itertools.product(range(agents), range(2)):
            w, lo, ref_w, ref_l = (float(tensor[pair, agent, turn]) for tensor in tensors)
            margin += 0.2 * ((w - ref_w) - (lo - ref_l))
        margins.append(margin)
        losses.append(-0.9 * math.log(sigmoid(margin)) - 0.1 * math.log(sigmoid(-margin)))
    assert loss.item() == pytest.approx(sum(losses) / 3)
    assert metrics["margin"] == pytest.approx(sum(margins) / 3)
    assert metrics["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 3)
    assert metrics["margin"] == pytest.approx(sum(metrics[f"agent{i}/margin"] for i in range(agents)))


def test_dpo4_an_agent_that_answered_the_same_twice_gets_no_gradient():
    theta = normal(3, 1, 1).requires_grad_()
    other = normal(3, 1, 1, seed=1).requires_grad_()
    winner = torch.cat([theta, other], dim=1)
    loser = torch.cat([theta, 2 * other], dim=1)
    same, different = grad(madpo_loss(winner, loser)[0], (theta, other))
    assert_close(same, torch.zeros_like(same))
    assert (different.abs() > 1e-3).all()


def test_dpo4_order_of_agents_does_not_matter():
    tensors = [normal(4, 3, 2, seed=seed) for seed in range(4)]
    order = [2, 0, 1]
    loss, metrics = madpo_loss(*tensors)
    permuted_loss, permuted = madpo_loss(*(tensor[:, order] for tensor in tensors))
    assert_close(permuted_loss, loss)
    for place, agent in enumerate(order):
        assert permuted[f"agent{place}/margin"] == pytest.approx(metrics[f"agent{agent}/margin"])


def test_dpo8_the_reference_is_a_constant():
    reference = normal(2, 1, 1, seed=1).requires_grad_()
    policy = normal(2, 1, 1).requires_grad_()
    loss, _ = madpo_loss(policy, 2 * policy, reference, 3 * reference)
    assert grad(loss, reference, retain_graph=True, allow_unused=True) == (None,)
    assert grad(loss, policy)[0].abs().min() > 0


def test_dpo10_sum_and_mean_weigh_a_long_loser_differently():
    """Winner: log-ratio 2 over 10 tokens; loser: 3 over 30 tokens. Sum: margin -0.1; mean: 0.1 (0.2 - 0.1) = 0.01."""
    winner = torch.tensor([[[2.0]]], dtype=torch.float64, requires_grad=True)
    loser = torch.tensor([[[3.0]]], dtype=torch.float64, requires_grad=True)
    summed, _ = madpo_loss(winner, loser, beta=0.1)
    assert [g.item() for g in grad(summed, (winner, loser))] == pytest.approx(
        [-0.1 * 0.524979, 0.1 * 0.524979], rel=1e-5
    )
    lengths = {"winner_lengths": torch.tensor([[[10]]]), "loser_lengths": torch.tensor([[[30]]])}
    mean, metrics = madpo_loss(winner, loser, beta=0.1, **lengths)
    assert [g.item() for g in grad(mean, (winner, loser))] == pytest.approx(
        [-0.1 * 0.4975 / 10, 0.1 * 0.4975 / 30], rel=1e-5
    )
    assert (metrics["chosen_length"], metrics["rejected_length"]) == (10.0, 30.0)


def test_dpo10_lengths_are_reported_for_the_team_and_each_agent():
    zeros = torch.zeros(2, 2, 1)
    lengths = torch.tensor([[[4], [10]], [[6], [20]]])
    _, metrics = madpo_loss(zeros, zeros, winner_lengths=lengths, loser_lengths=2 * lengths)
    assert (metrics["agent0/chosen_length"], metrics["agent1/chosen_length"]) == (5.0, 15.0)
    assert (metrics["chosen_length"], metrics["rejected_length"]) == (20.0, 40.0)


def test_rl5_a_response_without_tokens_counts_nothing_in_the_mean_form():
    """The empty turn leaves exactly the loss of the other one, and finite gradients."""
    winner = torch.tensor([[[0.0, -6.0]]], requires_grad=True)
    loser = torch.tensor([[[0.0, -9.0]]], requires_grad=True)
    empty_first = torch.tensor([[[0, 3]]])
    loss, _ = madpo_loss(winner, loser, beta=0.1, winner_lengths=empty_first, loser_lengths=empty_first)
    assert loss.item() == pytest.approx(-math.log(sigmoid(0.1 * (-2.0 + 3.0))))
    gradient = grad(loss, winner)[0].flatten()
    assert gradient[0] == 0.0 and gradient[1] < 0.0


def test_math11_reference_free_is_the_form_with_a_uniform_reference_for_equal_lengths():
    """A uniform reference over 50 words gives 7 tokens the log-probability -7 log 50, whatever they are."""
    winner, loser = normal(4, 2, 1), normal(4, 2, 1, seed=1)
    uniform = torch.full_like(winner, -7 * math.log(50))
    free, free_metrics = madpo_loss(winner, loser)
    uniform_loss, metrics = madpo_loss(winner, loser, uniform, uniform)
    assert_close(free, uniform_loss)
    assert (free_metrics["reference_free"], metrics["reference_free"]) == (1.0, 0.0)
    longer_loser, _ = madpo_loss(winner, loser, uniform, 2 * uniform)
    assert abs(longer_loser - free) > 0.1


def test_math6_implicit_reward_gives_back_the_reward():
    """pi proportional to pi_ref exp(R / beta), for two agents and an additive R: margins are differences of R."""
    beta, rewards = 0.5, normal(2, 4)
    reference = normal(2, 4, seed=1).log_softmax(1)
    policy = (reference + rewards / beta).log_softmax(1)
    for winner, loser in itertools.permutations(itertools.product(range(4), repeat=2), 2):
        index = torch.tensor([[winner], [loser]])  # (side, pair, agent)
        logprobs = [joint_logprobs(logits, index).unsqueeze(-1) for logits in (policy, reference)]
        _, metrics = madpo_loss(logprobs[0][0], logprobs[0][1], logprobs[1][0], logprobs[1][1], beta=beta)
        expected = sum(float(rewards[i, winner[i]] - rewards[i, loser[i]]) for i in range(2))
        assert metrics["margin"] == pytest.approx(expected)


def test_math6_bradley_terry_preferences_are_fitted_by_the_policy_of_their_reward():
    """All ordered pairs, weighted by the probability that the first wins: no gradient there, one at the reference."""
    beta, rewards = 0.5, normal(4)
    reference = normal(4, seed=1).log_softmax(0)
    pairs = torch.tensor(list(itertools.permutations(range(4), 2)))
    wins = (rewards[pairs[:, 0]] - rewards[pairs[:, 1]]).sigmoid()

    def gradient_at(logits):
        logits = logits.detach().requires_grad_()
        log_policy = logits.log_softmax(0)
        losses = [
            madpo_loss(*(table[side].reshape(1, 1, 1) for table in (log_policy, reference) for side in pair), beta=beta)
            for pair in pairs
        ]
        return grad(sum(w * loss for w, (loss, _) in zip(wins, losses, strict=True)), logits)[0]

    assert_close(gradient_at(reference + rewards / beta), torch.zeros(4, dtype=torch.float64), atol=1e-10, rtol=0)
    assert gradient_at(reference).abs().max() > 0.1


# What an additive margin cannot say (T-MATH5): "exactly one of us should act"

DIFFERENT = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
EQUAL = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 1]])


def descend(loss_of, parameters: torch.Tensor, steps: int = 200, rate: float = 0.2) -> torch.Tensor:
    """The loss after Adam."""
    optimizer = torch.optim.Adam([parameters], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    return loss_of().detach()


def test_math5_decentralised_madpo_cannot_prefer_different_actions():
    """Four margins of any product policy sum to zero, so by convexity no loss is below log 2; descent ends at it."""
    uniform = torch.full((4, 2, 1), -LOG_2, dtype=torch.float64)
    for seed in range(3):
        logits = (3 * normal(2, 2, seed=seed)).requires_grad_()

        def loss_and_metrics(logits=logits):
            winner, loser = (joint_logprobs(logits, actions).unsqueeze(-1) for actions in (DIFFERENT, EQUAL))
            return madpo_loss(winner, loser, uniform, uniform, beta=1.0)

        loss, metrics = loss_and_metrics()
        assert metrics["margin"] == pytest.approx(0.0, abs=1e-12)
        assert loss.item() > LOG_2 + 0.01
        assert descend(lambda: loss_and_metrics()[0], logits).item() == pytest.approx(LOG_2, abs=1e-4)


def test_math5_centralised_madpo_can_prefer_different_actions():
    """One policy over the four joint actions, the same pairs: the loss goes to 0."""
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([2, 1])  # joint action (a, b) has index 2 a + b
    uniform = torch.full((4, 1, 1), -math.log(4), dtype=torch.float64)

    def loss():
        sides = [joint_logprobs(logits, (pairs * weights).sum(1, keepdim=True)) for pairs in (DIFFERENT, EQUAL)]
        return madpo_loss(*(side.unsqueeze(-1) for side in sides), uniform, uniform, beta=1.0)[0]

    assert descend(loss, logits).item() < 0.01
    assert logits.softmax(1)[0, [1, 2]].sum() > 0.95


def test_math5_a_joint_reward_model_can_prefer_different_actions():
    scores = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)

    def loss():
        return bradley_terry_loss(scores[DIFFERENT[:, 0], DIFFERENT[:, 1]], scores[EQUAL[:, 0], EQUAL[:, 1]])[0]

    assert loss().item() == pytest.approx(LOG_2)
    assert descend(loss, scores).item() < 0.01
    assert torch.stack([scores[0, 1], scores[1, 0]]).min() > torch.stack([scores[0, 0], scores[1, 1]]).max()


# Learning on two-action bandits

COOPERATE = torch.tensor([[0.0, 0.2], [0.2, 1.0]])  # reward of (action of agent 0, action of agent 1)
DISAGREE = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def draw(logits: torch.Tensor, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """(*shape, n) actions of n softmax policies, independent of one another."""
    count = math.prod(shape)
    columns = [torch.multinomial(row.softmax(0).detach(), count, True, generator=source) for row in logits]
    return torch.stack(columns, dim=-1).reshape(*shape, len(logits))


def madpo_update(logits, rewards, source):
    first, second = draw(logits, (2, 32), source)
    gap = rewards[first[:, 0], first[:, 1]] - rewards[second[:, 0], second[:, 1]]
    first, second, gap = first[gap != 0], second[gap != 0], gap[gap != 0]
    if len(gap) == 0:
        return None
    won = (gap > 0).unsqueeze(1)
    winner, loser = torch.where(won, first, second), torch.where(won, second, first)
    uniform = torch.full((len(gap), 2, 1), -LOG_2)
    return madpo_loss(*(joint_logprobs(logits, side).unsqueeze(-1) for side in (winner, loser)), uniform, uniform)[0]


def magrpo_update(logits, rewards, source):
    actions = draw(logits, (8, 4), source)
    advantages = group_relative_advantages(rewards[actions[..., 0], actions[..., 1]])
    return magrpo_loss(joint_logprobs(logits, actions).unsqueeze(-1), advantages)[0]


def clipped_magrpo_update(logits, rewards, source):
    actions = draw(logits, (8, 4), source)
    advantages = group_relative_advantages(rewards[actions[..., 0], actions[..., 1]], normalize="mean_std")
    logprobs = joint_logprobs(logits, actions).unsqueeze(-1)
    return magrpo_loss(logprobs, advantages, sampled_logprobs=logprobs.detach(), clip_ratio=0.2)[0]


def learn(update, rewards: torch.Tensor, steps: int = 200) -> torch.Tensor:
    """(2, 2) probabilities of the joint actions after training from (almost) uniform policies."""
    source = generator(7)
    logits = (0.1 * torch.randn(2, 2, generator=source)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        loss = update(logits, rewards, source)
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, second = logits.detach().softmax(1)
    return torch.outer(first, second)


@pytest.mark.parametrize("update", [madpo_update, magrpo_update, clipped_magrpo_update])
def test_rl12_two_agents_learn_the_better_joint_action(update):
    assert learn(update, COOPERATE, steps=0)[1, 1] < 0.4
    assert learn(update, COOPERATE)[1, 1] > 0.95


def test_rl12_actors_learn_the_better_joint_action_and_critics_its_return():
    """CoLLM-DC: one value per agent, as it has nothing to look at."""
    source = generator(7)
    logits = (0.1 * torch.randn(2, 2, generator=source)).requires_grad_()
    critics = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([logits, critics], lr=0.05)
    for _ in range(200):
        actions = draw(logits, (32,), source)
        team_rewards = COOPERATE[actions[:, 0], actions[:, 1]].unsqueeze(-1)
        values = critics.reshape(1, 2, 1).expand(32, 2, 1)
        loss, _ = actor_critic_loss(joint_logprobs(logits, actions).unsqueeze(-1), values, team_rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert logits.softmax(1)[:, 1].prod() > 0.95
    assert_close(critics.detach(), torch.ones(2), atol=0.1, rtol=0)


def test_math5_policy_gradient_on_the_product_learns_different_actions_by_breaking_symmetry():
    assert 0.4 < learn(magrpo_update, DISAGREE, steps=0)[0, 1] * 2 < 0.6
    probabilities = learn(magrpo_update, DISAGREE, steps=300)
    assert probabilities[0, 1] + probabilities[1, 0] > 0.95


# Group-relative policy gradient


def test_math3_advantages_compare_a_response_with_its_own_group():
    """Population standard deviation sqrt(14 / 4) = 1.8708; the unbiased one would be 2.1602."""
    returns = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
    centred = torch.tensor([[-2.0, -1.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    assert_close(group_relative_advantages(returns), centred)
    assert_close(group_relative_advantages(returns, normalize="mean_std"), centred / 1.8708287)


def test_math3_leave_one_out_is_a_rescaled_group_mean():
    returns = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    others = torch.tensor([[11 / 3, 10 / 3, 9 / 3, 6 / 3]])  # mean of the three other returns
    assert_close(returns - others, 4 / 3 * group_relative_advantages(returns))


@pytest.mark.parametrize("normalize", ["mean", "mean_std"])
@pytest.mark.parametrize("size", range(2, 10))
def test_rl1_groups_of_equal_totals_have_no_advantage_at_all(size, normalize):
    """Different parts, equal float32 totals; the mean of seven equal floats often differs from them."""
    first, second = 3 * torch.rand(2, 500, generator=generator(size))
    parts = torch.stack([torch.stack([first, second], -1), torch.stack([second, first], -1)], dim=1)
    returns = parts[:, torch.arange(size) % 2].sum(dim=-1)
    assert (returns == returns[:, :1]).all()
    if size == 7:
        assert (returns != returns.mean(dim=1, keepdim=True)).any(dim=1).float().mean() > 0.1
    advantages = group_relative_advantages(returns, normalize=normalize)
    assert (advantages == 0).all()
    _, metrics = magrpo_loss(torch.zeros(500, size, 1, 1), advantages)
    assert metrics["tied_groups"] == 1.0


def test_rl1_the_share_of_tied_groups_is_reported():
    """The third response of the first group is average, which does not make its group a tie."""
    returns = torch.tensor([[1.0, 3.0, 2.0], [3.0, 3.0, 3.0], [0.0, 6.0, 6.0], [1.0, 4.0, 1.0]])
    _, metrics = magrpo_loss(torch.zeros(4, 3, 2, 1), group_relative_advantages(returns))
    assert metrics["tied_groups"] == 0.25
    assert metrics["advantage_magnitude"] == pytest.approx((2 + 0 + 8 + 4) / 12)


def test_rl3_a_group_of_one_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"G >= 2, got \(5, 1\); raise num_generations"):
        group_relative_advantages(torch.zeros(5, 1))


def test_rl9_near_ties_do_not_explode():
    """A gap of 1e-8 is divided by the floor 1e-6, not by its own spread; without normalisation it stays 5e-9."""
    returns = torch.tensor([[0.0, 1e-8]], dtype=torch.float64)
    half = torch.tensor([[-5e-9, 5e-9]], dtype=torch.float64)
    assert_close(group_relative_advantages(returns), half, atol=1e-15, rtol=1e-6)
    assert_close(group_relative_advantages(returns, normalize="mean_std"), half / 1e-6, rtol=1e-6, atol=0)


def test_eq5_value_on_a_hand_made_group():
    """Two groups of two, two agents, two turns: -(1/2) sum_g A_g log pi, summed over agents and turns, mean of groups.

    Group 0 has A = (-1, 1) and log-probabilities that sum to (-10, -26); group 1 has A = (2, -2) and (-42, -58):
    losses -(10 - 26) / 2 = 8 and -(-84 + 116) / 2 = -16, mean -4.
    """
    logprobs = -torch.arange(1.0, 17.0).reshape(2, 2, 2, 2)
    loss, metrics = magrpo_loss(logprobs, torch.tensor([[-1.0, 1.0], [2.0, -2.0]]))
    assert loss.item() == pytest.approx(-4.0)
    assert metrics["loss"] == pytest.approx(-4.0)


def test_eq5_advantages_may_differ_between_turns():
    """Advantages (-1, 1) at the second turn of one group, (2, -2) at the first turn of the other."""
    logprobs = -torch.tensor([[[1.0, 2.0], [3.0, 5.0]], [[4.0, 7.0], [6.0, 9.0]]]).unsqueeze(2)  # one agent
    advantages = torch.tensor([[[0.0, -1.0], [0.0, 1.0]], [[2.0, 0.0], [-2.0, 0.0]]])
    loss, metrics = magrpo_loss(logprobs, advantages)
    assert loss.item() == pytest.approx((-(2 - 5) / 2 - (-8 + 12) / 2) / 2)
    assert metrics["tied_groups"] == 0.5


def test_eq5_group_mean_keeps_the_direction_of_the_policy_gradient():
    """All pairs (G = 2) of joint actions of two agents: the expected update is (1 - 1/G) times the exact gradient."""
    logits = normal(2, 2).requires_grad_()
    rewards = torch.tensor([1.0, 0.0, 3.0, -1.0], dtype=torch.float64)
    logprobs = joint_logprobs(logits, JOINT_ACTIONS)  # (joint action, agent)
    exact = grad((logprobs.sum(1).exp() * rewards).sum(), logits, retain_graph=True)[0]
    expected = torch.zeros_like(exact)
    for pair in itertools.product(range(4), repeat=2):
        group = list(pair)
        advantages = group_relative_advantages(rewards[group].unsqueeze(0))
        loss, _ = magrpo_loss(logprobs[group].reshape(1, 2, 2, 1), advantages)
        expected -= logprobs[group].sum().exp().detach() * grad(loss, logits, retain_graph=True)[0]
    assert_close(expected, (1 - 1 / 2) * exact)


def test_rl11_an_agent_that_always_answers_the_same_gets_no_gradient():
    """Advantages sum to zero, so one log-probability shared by the whole group cancels; the other agent's do not."""
    same = normal(3, 1, 1, 1).requires_grad_()
    own = normal(3, 4, 1, 1, seed=1).requires_grad_()
    advantages = group_relative_advantages(normal(3, 4, seed=2))
    loss, _ = magrpo_loss(torch.cat([same.expand(3, 4, 1, 1), own], dim=2), advantages)
    same_gradient, own_gradient = grad(loss, (same, own))
    assert_close(same_gradient, torch.zeros_like(same_gradient))
    assert_close(own_gradient.reshape(3, 4), -advantages / 12)


def test_rl11_order_of_responses_and_groups_does_not_matter():
    logprobs, returns = normal(3, 4, 2, 1), normal(3, 4, seed=1)
    loss, _ = magrpo_loss(logprobs, group_relative_advantages(returns))
    shuffled, _ = magrpo_loss(
        logprobs[[2, 0, 1]][:, [3, 1, 0, 2]], group_relative_advantages(returns[[2, 0, 1]][:, [3, 1, 0, 2]])
    )
    assert_close(shuffled, loss)


def test_rl7_accumulation_over_single_rows_is_the_whole_batch():
    """1 x 8 equals 8 x 1 for groups and for pairs, in value and gradient, with log-probabilities of unequal lengths."""
    logprobs = (normal(8, 4, 2, 1) * torch.arange(1.0, 9.0).reshape(8, 1, 1, 1)).requires_grad_()
    advantages = group_relative_advantages(normal(8, 4, seed=1))
    whole, _ = magrpo_loss(logprobs, advantages)
    parts = sum(magrpo_loss(logprobs[i : i + 1], advantages[i : i + 1])[0] / 8 for i in range(8))
    assert_close(parts, whole)
    assert_close(grad(parts, logprobs), grad(whole, logprobs))
    winner, loser = logprobs[:, 0], logprobs[:, 1]
    whole, _ = madpo_loss(winner, loser)
    parts = sum(madpo_loss(winner[i : i + 1], loser[i : i + 1])[0] / 8 for i in range(8))
    assert_close(parts, whole)
    assert_close(grad(parts, logprobs), grad(whole, logprobs))


def test_rl2_the_ratio_form_starts_at_zero_loss_with_the_gradient_of_eq5():
    logprobs = (10 * normal(3, 4, 2, 2)).requires_grad_()
    advantages = group_relative_advantages(normal(3, 4, seed=1))
    # The sampled log-probabilities are constants, even where a caller forgot to detach them.
    loss, metrics = magrpo_loss(logprobs, advantages, sampled_logprobs=logprobs, clip_ratio=0.2)
    assert abs(loss.item()) < 1e-12
    gradient = grad(loss, logprobs)[0]
    assert gradient.norm() > 0.1
    assert_close(gradient, grad(magrpo_loss(logprobs, advantages)[0], logprobs)[0])
    # T-RL6, the part that is about tensors
    assert metrics["ratio_deviation"] == 0.0 and metrics["clip_fraction"] == 0.0 and metrics["sampled_gap"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.5, 1.0, 1.2, 0.0),  # already likelier than the limit: no more
        (1.5, -1.0, -1.5, -1.5),  # likelier but bad: pushed back
        (0.5, -1.0, -0.8, 0.0),  # already rarer than the limit
        (0.5, 1.0, 0.5, 0.5),  # rarer but good
        (1.1, 1.0, 1.1, 1.1),
    ],
)
def test_clipping_stops_the_gradient_only_where_the_ratio_has_gone_far_enough(ratio, advantage, objective, slope):
    """The ratio of the whole response, so d ratio / d logprob = ratio; the second response has no advantage."""
    logprobs = torch.tensor([-30.0 + math.log(ratio), -5.0], dtype=torch.float64).reshape(1, 2, 1, 1).requires_grad_()
    sampled = torch.tensor([-30.0, -5.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    advantages = torch.tensor([[advantage, 0.0]], dtype=torch.float64)
    loss, metrics = magrpo_loss(logprobs, advantages, sampled_logprobs=sampled, clip_ratio=0.2)
    assert loss.item() == pytest.approx(-objective / 2)
    assert grad(loss, logprobs)[0].flatten().tolist() == pytest.approx([-slope / 2, 0.0])
    assert metrics["clip_fraction"] == (0.5 if slope == 0 else 0.0)
    assert metrics["ratio_mean"] == pytest.approx((ratio + 1) / 2)
    assert metrics["ratio_deviation"] == pytest.approx(abs(ratio - 1))
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((min(ratio, 1.0), max(ratio, 1.0)))


def test_sampled_logprobs_without_clipping_are_compared_and_change_nothing_else():
    """Sampling at T < 1 makes Eq. (5) biased: the mean gap to the sampling distribution is reported."""
    logprobs, advantages = normal(2, 3, 1, 1), group_relative_advantages(normal(2, 3, seed=1))
    loss, metrics = magrpo_loss(logprobs, advantages, sampled_logprobs=logprobs + 2.0)
    assert_close(loss, magrpo_loss(logprobs, advantages)[0])
    assert metrics["sampled_gap"] == pytest.approx(-2.0)


def test_rl5_responses_without_scored_tokens_add_nothing_and_are_counted():
    logprobs = torch.tensor([-3.0, 0.0, -2.0, -1.0]).reshape(1, 4, 1, 1).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    loss, metrics = magrpo_loss(logprobs, advantages)
    assert loss.item() == pytest.approx((3.0 + 4.0 - 2.0) / 4)
    assert metrics["zero_logprobs"] == 0.25
    assert torch.isfinite(grad(loss, logprobs)[0]).all()


# Actor-critic


def test_td0_over_two_turns_by_hand():
    """Targets 1 + 0.5 * 1, 2; 0 + 0.5 * 2, 3. Differences 1, 1, 0, 1: mean 0.75, population std sqrt(0.1875)."""
    rewards = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
    values = torch.tensor([[[0.5, 1.0]], [[1.0, 2.0]]], dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor([[[-1.0, -2.0]], [[-3.0, -4.0]]], dtype=torch.float64, requires_grad=True)
    loss, metrics = actor_critic_loss(logprobs, values, rewards, discount=0.5, value_coef=0.6)
    high, low = 0.25 / math.sqrt(0.1875), -0.75 / math.sqrt(0.1875)
    policy_loss = -((-1 - 2) * high + (-3 * low - 4 * high)) / 2
    assert metrics["policy_loss"] == pytest.approx(policy_loss)
    assert metrics["value_loss"] == pytest.approx(0.75)
    assert metrics["advantage_spread"] == pytest.approx(math.sqrt(0.1875))
    assert (metrics["value"], metrics["target"]) == pytest.approx((4.5 / 4, 7.5 / 4))
    assert loss.item() == pytest.approx(policy_loss + 0.6 * 0.75)
    policy_gradient, value_gradient = grad(loss, (logprobs, values))
    assert policy_gradient.flatten().tolist() == pytest.approx([-high / 2, -high / 2, -low / 2, -high / 2])
    # Each value moves towards its own target, 0.6 * 2 * (V - target) / 4: neither target nor advantage has a gradient.
    assert value_gradient.flatten().tolist() == pytest.approx([-0.3, -0.3, 0.0, -0.3])


def test_actor_critic_normalises_each_agents_own_batch():
    """CoLLM-DC: agent 1's critic is 100 too high everywhere; after normalisation both agents learn the same."""
    logprobs = torch.zeros(4, 2, 1, dtype=torch.float64, requires_grad=True)
    rewards = normal(4, 1)
    values = torch.tensor([0.0, 100.0], dtype=torch.float64).reshape(1, 2, 1).expand(4, 2, 1)
    gradient = grad(actor_critic_loss(logprobs, values, rewards)[0], logprobs)[0]
    assert_close(gradient[:, 0], gradient[:, 1])
    expected = (rewards - rewards.mean()) / rewards.std(unbiased=False)
    assert_close(gradient[:, 0], -expected / 4)


def test_one_joint_critic_learns_the_same_for_any_number_of_agents():
    """CoLLM-CC: its value expanded over agents has the mean squared error of one critic."""
    rewards = normal(4, 2)
    gradients = []
    for agents in (1, 3):
        value = normal(4, 1, 2, seed=1).requires_grad_()
        loss, _ = actor_critic_loss(torch.zeros(4, agents, 2, dtype=torch.float64), value.expand(4, agents, 2), rewards)
        gradients.append(grad(loss, value)[0])
    assert_close(gradients[0], gradients[1])


def test_rl1_equal_differences_give_the_actor_exact_zeros():
    """Seven equal float32 errors: without the tie rule their noise would become unit advantages."""
    for value in 3 * torch.rand(100, generator=generator(1)):
        rewards = torch.full((7, 1), value.item())
        logprobs = torch.full((7, 1, 1), -1.0, requires_grad=True)
        loss, metrics = actor_critic_loss(logprobs, torch.zeros(7, 1, 1), rewards, value_coef=0.0)
        assert (grad(loss, logprobs)[0] == 0).all()
        assert metrics["tied_agents"] == 1.0


def test_actor_critic_clips_like_magrpo():
    """Advantages (1, -1) after normalisation, ratios 1.5 and 0.5: both clipped, to 1.2 and 0.8."""
    sampled = torch.tensor([-4.0, -6.0], dtype=torch.float64).reshape(2, 1, 1)
    ratios = torch.tensor([1.5, 0.5], dtype=torch.float64).reshape(2, 1, 1)
    logprobs = (sampled + ratios.log()).requires_grad_()
    rewards = torch.tensor([[5.0], [3.0]], dtype=torch.float64)
    loss, metrics = actor_critic_loss(
        logprobs, torch.zeros_like(sampled), rewards, value_coef=0.0, clip_ratio=0.2, sampled_logprobs=sampled
    )
    assert loss.item() == pytest.approx(-(1.2 - 0.8) / 2)
    assert metrics["clip_fraction"] == 1.0
    assert_close(grad(loss, logprobs)[0], torch.zeros_like(sampled))


# Reward model


def test_rm1_bradley_terry_is_log_2_at_equal_scores_with_opposite_gradients():
    winner = normal(5).requires_grad_()
    loser = winner.detach().clone().requires_grad_()
    loss, metrics = bradley_terry_loss(winner, loser)
    assert loss.item() == pytest.approx(LOG_2)
    assert metrics["accuracy"] == 0.0  # equal scores predict nothing
    winner_gradient, loser_gradient = grad(loss, (winner, loser))
    assert_close(winner_gradient, torch.full_like(winner, -0.5 / 5))
    assert_close(loser_gradient, -winner_gradient)


def test_rm1_a_constant_added_to_both_scores_changes_nothing():
    winner, loser = normal(5), normal(5, seed=1)
    loss, metrics = bradley_terry_loss(winner, loser)
    shifted, shifted_metrics = bradley_terry_loss(winner + 7.0, loser + 7.0)
    assert_close(shifted, loss)
    assert shifted_metrics["margin"] == pytest.approx(metrics["margin"])
    assert shifted_metrics["winner_score"] == pytest.approx(metrics["winner_score"] + 7.0)


def test_rm1_bradley_terry_value_by_hand():
    """Margins 1 and -2: log(1 + e^-1) = 0.313262, log(1 + e^2) = 2.126928."""
    loss, metrics = bradley_terry_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 2.0]))
    assert loss.item() == pytest.approx((0.313262 + 2.126928) / 2, abs=1e-6)
    assert metrics == pytest.approx(
        {"loss": 1.220095, "accuracy": 0.5, "margin": -0.5, "winner_score": 1.0, "loser_score": 1.5}, abs=1e-6
    )


# Distance to the reference

P = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
KL_PQ = 0.6 * math.log(3) - 0.1 * math.log(5)  # 0.4982; the other direction is 0.5850


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", KL_PQ), ("k2", (0.6 * math.log(3) ** 2 + 0.1 * math.log(5) ** 2) / 2), ("k3", KL_PQ)],
)
def test_rl8_kl_estimators_point_from_policy_to_reference(estimator, expected):
    """Expectation under the policy, enumerated; with the ratio upside down k3 would give 0.6218."""
    estimates = kl_estimate(P.log(), Q.log(), estimator=estimator)
    assert (P * estimates).sum().item() == pytest.approx(expected)
    assert abs(KL_PQ - 0.4982) < 1e-4


def test_rl8_k3_is_never_negative_and_zero_for_equal_models():
    policy, reference = -10 * torch.rand(2, 1000, generator=generator(), dtype=torch.float32)
    assert (kl_estimate(policy, reference) >= 0).all()
    assert (kl_estimate(policy, policy + 1e-5 * reference) >= 0).all()
    for estimator in ("k1", "k2", "k3"):
        assert (kl_estimate(policy, policy, estimator=estimator) == 0).all()


def test_rl8_only_exact_kl_and_k2_have_the_gradient_of_the_divergence():
    """On samples held fixed: k1 has none, k3 that of KL(reference || policy), as its docstring says."""
    logits = P.log().requires_grad_()
    log_policy = logits.log_softmax(0)

    def gradient(value):
        return grad(value, logits, retain_graph=True)[0]

    forward = P * ((P / Q).log() - KL_PQ)  # d KL(p || q) / d logits of p
    backward = P - Q  # d KL(q || p) / d logits of p
    assert_close(gradient(exact_kl(logits, Q.log())), forward)
    for estimator, expected in (("k1", torch.zeros_like(P)), ("k2", forward), ("k3", backward)):
        assert_close(gradient((P * kl_estimate(log_policy, Q.log(), estimator=estimator)).sum()), expected)


def test_exact_kl_by_hand_at_every_position():
    logits = torch.stack([P.log() + 5.0, Q.log(), P.log()])  # logits are free up to a constant
    reference = torch.stack([Q.log(), P.log() - 3.0, P.log() + 1.0])
    expected = [KL_PQ, 0.2 * math.log(1 / 3) + 0.5 * math.log(5), 0.0]
    assert exact_kl(logits, reference).tolist() == pytest.approx(expected, abs=1e-12)


def test_tok12_exact_kl_takes_the_softmax_in_float32():
    logits, reference = ((3 * normal(4, 50, seed=seed)).to(torch.bfloat16) for seed in (0, 1))
    divergence = exact_kl(logits, reference)
    assert divergence.dtype == torch.float32
    assert_close(divergence, exact_kl(logits.double(), reference.double()).float(), rtol=1e-5, atol=1e-6)


def test_math4_joint_kl_is_the_sum_of_the_agents_kls_for_independent_actions():
    """Two agents with three actions, the joint law enumerated; a correlated law breaks the equality."""
    policy, reference = normal(2, 3).log_softmax(1), normal(2, 3, seed=1).log_softmax(1)
    joint = [(law[0].unsqueeze(1) + law[1].unsqueeze(0)).flatten() for law in (policy, reference)]
    assert_close(exact_kl(*joint), exact_kl(policy, reference).sum())
    # Mass 0.05 moved around a square of joint actions keeps both agents' own laws.
    square = 0.05 * torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    law = joint[0].exp().reshape(3, 3)
    correlated = law + square * min(1.0, float(law.min() / 0.05))
    assert_close(correlated.sum(1), policy[0].exp())
    assert_close(correlated.sum(0), policy[1].exp())
    assert exact_kl(correlated.log().flatten(), joint[1]) > exact_kl(policy, reference).sum() + 1e-4


# Faults


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", range(4))
def test_dpo6_a_non_finite_margin_names_its_pairs_and_lengths(place, poison):
    """Also where the loss itself would be 0 (a loser at -inf)."""
    tensors = [normal(4, 2, 1, seed=seed) for seed in range(4)]
    tensors[place][2, 1, 0] = poison
    with pytest.raises(FloatingPointError, match=r"margin in pair \[2\]"):
        madpo_loss(*tensors)
    lengths = torch.tensor([3, 5, 11, 7]).reshape(4, 1, 1).expand(4, 2, 1)
    with pytest.raises(FloatingPointError, match=r"pair \[2\].*winner lengths \[\[\[11\], \[11\]\]\].*loser lengths"):
        madpo_loss(*tensors, winner_lengths=lengths, loser_lengths=2 * lengths)


def test_dpo6_a_fault_in_an_empty_response_is_not_hidden_by_its_length():
    policy = torch.tensor([[[float("nan")]]])
    empty = torch.tensor([[[0]]])
    with pytest.raises(FloatingPointError, match=r"pair \[0\]"):
        madpo_loss(policy, torch.zeros(1, 1, 1), winner_lengths=empty, loser_lengths=empty)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_dpo6_every_loss_raises_and_names_its_rows(poison):
    scores = torch.zeros(4)
    scores[[1, 3]] = poison
    with pytest.raises(FloatingPointError, match=r"pair \[1, 3\]") as caught:
        bradley_terry_loss(scores, torch.zeros(4))
    assert caught.value.rows == [1, 3]
    with pytest.raises(FloatingPointError, match=r"return in group \[1\]"):
        group_relative_advantages(torch.tensor([[0.0, 1.0], [0.0, poison]]))
    logprobs, advantages = torch.zeros(3, 2, 1, 1), torch.ones(3, 2)
    for bad in ("logprobs", "advantages"):
        inputs = {"logprobs": logprobs.clone(), "advantages": advantages.clone()}
        inputs[bad][2, 1] = poison
        with pytest.raises(FloatingPointError, match=r"group \[2\]"):
            magrpo_loss(**inputs)
    for bad in ("logprobs", "values", "rewards"):
        inputs = {"logprobs": normal(3, 1, 1), "values": normal(3, 1, 1, seed=1), "rewards": normal(3, 1, seed=2)}
        inputs[bad][2] = poison
        with pytest.raises(FloatingPointError, match=r"trajectory \[2\]"):
            actor_critic_loss(**inputs)
    with pytest.raises(FloatingPointError, match=r"k3 estimate in row \[1\]"):
        kl_estimate(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [0.0, poison, 0.0]]))
    with pytest.raises(FloatingPointError, match=r"divergence in row \[0\]"):
        exact_kl(torch.tensor([[0.0, poison]]), torch.zeros(1, 2))


def test_dpo6_an_infinite_ratio_raises_although_clipping_would_make_its_loss_finite():
    logprobs = torch.tensor([-1.0, -1.0]).reshape(1, 2, 1, 1)
    sampled = torch.tensor([-1000.0, -1.0]).reshape(1, 2, 1, 1)
    with pytest.raises(FloatingPointError, match=r"ratio in group \[0\]"):
        magrpo_loss(logprobs, torch.tensor([[1.0, -1.0]]), sampled_logprobs=sampled, clip_ratio=0.2)


def test_dpo6_a_fault_changes_neither_parameters_nor_the_optimiser():
    weight = torch.nn.Parameter(torch.ones(2, 1, 1))
    optimizer = torch.optim.Adam([weight])

    def step(scale):
        optimizer.zero_grad()
        loss, _ = madpo_loss(scale * weight, -weight)
        loss.backward()
        optimizer.step()

    step(torch.tensor(1.0))
    before = weight.detach().clone(), {k: v.clone() for k, v in optimizer.state[weight].items()}
    with pytest.raises(FloatingPointError, match=r"pair \[0, 1\]"):
        step(torch.tensor(float("nan")))
    assert_close((weight.detach(), optimizer.state[weight]), before, rtol=0, atol=0)


def test_dpo5_a_batch_without_pairs_says_what_to_do():
    with pytest.raises(ValueError, match=r"no pairs to learn from.*\(0, 2, 1\).*sample more"):
        madpo_loss(torch.zeros(0, 2, 1), torch.zeros(0, 2, 1))
    with pytest.raises(ValueError, match=r"no pairs to learn from.*\(0,\)"):
        bradley_terry_loss(torch.zeros(0), torch.zeros(0))


Z = torch.zeros


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bradley_terry_loss(Z(3), Z(2)),
            r"loser_scores must have the shape of winner_scores, \(3,\), got \(2,\)",
        ),
        (lambda: bradley_terry_loss(Z(3, 1), Z(3, 1)), r"winner_scores must be \(pairs\).*got shape \(3, 1\)"),
        (lambda: madpo_loss(Z(3, 2), Z(3, 2)), r"policy_winner must be \(pairs, agents, turns\).*\(3, 2\)"),
        (lambda: madpo_loss(Z(3, 2, 1), Z(3, 1, 1)), r"policy_loser .* got \(3, 1, 1\)"),
        (lambda: madpo_loss(Z(3, 2, 1), Z(3, 2, 1), Z(3, 2, 1)), "reference_loser; give both or neither"),
        (lambda: madpo_loss(Z(1, 1, 1), Z(1, 1, 1), Z(1, 1, 1), Z(2, 1, 1)), r"reference_loser .* got \(2, 1, 1\)"),
        (lambda: madpo_loss(Z(1, 1, 1), Z(1, 1, 1), winner_lengths=Z(1, 1, 1)), "got no loser_lengths"),
        (
            lambda: madpo_loss(*[Z(1, 1, 1)] * 4, winner_lengths=Z(1), loser_lengths=Z(1)),
            r"winner_lengths .* got \(1,\)",
        ),
        (lambda: madpo_loss(*[Z(1, 1, 1)] * 4, winner_lengths=Z(1, 1, 1) - 2, loser_lengths=Z(1, 1, 1)), "got -2"),
        (lambda: madpo_loss(Z(1, 1, 1), Z(1, 1, 1), beta=0.0), "beta must be above 0, got 0.0"),
        (
            lambda: madpo_loss(Z(1, 1, 1), Z(1, 1, 1), label_smoothing=0.5),
            r"label_smoothing must lie in \[0, 0.5\), got 0.5",
        ),
        (lambda: madpo_loss(Z(1, 1, 1).bfloat16(), Z(1, 1, 1)), "policy_winner must be float32 .* got torch.bfloat16"),
        (lambda: group_relative_advantages(Z(3)), r"returns must be \(groups, responses\).*\(3,\)"),
        (lambda: group_relative_advantages(torch.ones(2, 4, dtype=torch.long)), "got torch.int64"),
        (lambda: group_relative_advantages(Z(2, 4), normalize="std"), 'must be "mean" or "mean_std", got \'std\''),
        (
            lambda: magrpo_loss(Z(2, 4, 1), Z(2, 4)),
            r"logprobs must be \(groups, responses, agents, turns\).*\(2, 4, 1\)",
        ),
        (lambda: magrpo_loss(Z(2, 4, 3, 1), Z(2, 3)), r"advantages must be \(2, 4\) or \(2, 4, 1\).*got \(2, 3\)"),
        (lambda: magrpo_loss(Z(2, 4, 1, 1), Z(2, 4), clip_ratio=0.2), "clip_ratio=0.2 needs sampled_logprobs"),
        (
            lambda: magrpo_loss(Z(2, 4, 1, 1), Z(2, 4), clip_ratio=1.0, sampled_logprobs=Z(2, 4, 1, 1)),
            r"clip_ratio must lie in \(0, 1\), got 1.0",
        ),
        (lambda: magrpo_loss(Z(2, 4, 1, 1), Z(2, 4), sampled_logprobs=Z(2, 4)), r"sampled_logprobs .* got \(2, 4\)"),
        (lambda: actor_critic_loss(Z(4, 2, 1), Z(4, 1, 1), Z(4, 1)), r"values .* \(4, 2, 1\), got \(4, 1, 1\)"),
        (lambda: actor_critic_loss(Z(4, 2, 1), Z(4, 2, 1), Z(4, 2)), r"rewards must be .* got \(4, 2\)"),
        (lambda: actor_critic_loss(Z(4, 1, 1), Z(4, 1, 1), Z(4, 1), discount=1.5), r"discount .* got 1.5"),
        (lambda: actor_critic_loss(Z(4, 1, 1), Z(4, 1, 1), Z(4, 1), value_coef=-1.0), "value_coef .* got -1.0"),
        (lambda: kl_estimate(Z(3), Z(4)), r"reference_logprobs .* \(3,\), got \(4,\)"),
        (lambda: kl_estimate(Z(3), Z(3), estimator="k4"), 'must be "k1", "k2" or "k3", got \'k4\''),
        (lambda: exact_kl(Z(3, 5), Z(3, 4)), r"\(\.\.\., vocabulary\), got \(3, 5\) and \(3, 4\)"),
    ],
)
def test_bad_input_is_refused_with_the_value_received(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_metrics_are_plain_floats_so_that_no_graph_is_kept():
    pair = normal(2, 2, 1).requires_grad_()
    lengths = {"winner_lengths": torch.ones(2, 2, 1), "loser_lengths": torch.ones(2, 2, 1)}
    group, trajectories = normal(2, 3, 2, 1).requires_grad_(), normal(3, 2, 1).requires_grad_()
    for _, metrics in (
        bradley_terry_loss(pair[:, 0, 0], pair[:, 1, 0]),
        madpo_loss(pair, 2 * pair, **lengths),
        magrpo_loss(group, normal(2, 3), sampled_logprobs=group, clip_ratio=0.2),
        actor_critic_loss(trajectories, trajectories, normal(3, 1)),
    ):
        assert "loss" in metrics and all(type(value) is float for value in metrics.values())


def test_losses_depend_on_torch_alone():
    tree = ast.parse(Path(mapl_core.losses.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {"__future__", "typing", "torch"}
