"""Every loss of MAPL, as pure functions of tensors (paper, Section 4.2 and Appendix A).

The letters of the shapes: P pairs, N groups of G joint responses, B trajectories, n agents, H turns. A log-probability
is the sum over all tokens of one response (one agent, one turn), taken from a float32 log-softmax. Each loss comes with
its metrics, floats without a graph. A loss that is not finite raises and names its rows: nothing replaces it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Metrics = dict[str, float]

SPREAD_FLOOR = 1e-6  # smallest standard deviation that is divided by, in units of the reward


class NonFiniteError(FloatingPointError):
    """A number that is not finite was met before a step; `rows` are the places along the first axis that hold one."""

    def __init__(self, message: str, rows: list[int]):
        super().__init__(message)
        self.rows = rows


# Preferences


def bradley_terry_loss(winner_scores: Tensor, loser_scores: Tensor) -> tuple[Tensor, Metrics]:
    """Loss of the joint reward model, -log sigmoid(r_w - r_l), mean over pairs (paper, Section 4.2, MARLHF).

    Args:
        winner_scores: (P,) scores r_phi of the winning joint histories.
        loser_scores: (P,) scores of the losing ones.

    Returns:
        The loss, and metrics: loss, accuracy (share of pairs whose winner scores strictly higher), margin,
        winner_score, loser_score (means over pairs).

    Raises:
        ValueError: if there is no pair, or the shapes or dtypes do not fit.
        FloatingPointError: if a margin is not finite; the message names the pairs.
    """
    _check_pairs("winner_scores", winner_scores, ("pairs",))
    _check_same_shape("loser_scores", loser_scores, "winner_scores", winner_scores)
    margins = winner_scores - loser_scores
    _check_finite("margin", margins, "pair")
    loss = -F.logsigmoid(margins).mean()
    return loss, _floats(
        loss=loss,
        accuracy=_share(margins > 0),
        margin=margins.mean(),
        winner_score=winner_scores.mean(),
        loser_score=loser_scores.mean(),
    )


def madpo_loss(
    policy_winner: Tensor,
    policy_loser: Tensor,
    reference_winner: Tensor | None = None,
    reference_loser: Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    winner_lengths: Tensor | None = None,
    loser_lengths: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Multi-agent direct preference optimisation (paper, Section 4.2 and Appendix A.3).

    One logistic per pair, on the sum over agents and turns of the implicit rewards: the KL divergence between joint
    histories factorises over both, so every agent's gradient carries the same factor sigmoid(-margin). One agent (or
    the coordinator, n = 1) gives ordinary DPO.

    Args:
        policy_winner: (P, n, H) log-probabilities of the winning responses under the agents.
        policy_loser: (P, n, H) those of the losing responses.
        reference_winner: (P, n, H) under the reference policies; without both references the loss is reference-free.
        reference_loser: (P, n, H) likewise.
        beta: strength of the KL term; the implicit reward is beta * log(pi / pi_ref).
        label_smoothing: assumed probability in [0, 0.5) that a label is wrong.
        winner_lengths: (P, n, H) numbers of scored tokens. With both lengths, every response counts with its mean per
            token rather than its sum; a response without tokens counts 0.
        loser_lengths: (P, n, H) likewise.

    Returns:
        The loss, mean over pairs, and metrics: loss; reference_free (1 or 0); chosen_reward, rejected_reward, margin
        and accuracy of the team, the same as agent0/..., agent1/... per agent; with lengths also chosen_length and
        rejected_length in tokens (the team's are sums over agents). All are means over pairs.

    Raises:
        ValueError: if there is no pair, only one of a couple is given, or a shape, dtype or option does not fit.
        FloatingPointError: if a margin is not finite; the message names the pairs and their lengths.
    """
    _check_pairs("policy_winner", policy_winner, ("pairs", "agents", "turns"))
    _check_same_shape("policy_loser", policy_loser, "policy_winner", policy_winner)
    _check_couple("reference_winner", reference_winner, "reference_loser", reference_loser)
    _check_couple("winner_lengths", winner_lengths, "loser_lengths", loser_lengths)
    for name, reference in (("reference_winner", reference_winner), ("reference_loser", reference_loser)):
        if reference is not None:
            _check_same_shape(name, reference, "policy_winner", policy_winner)
    for name, lengths in (("winner_lengths", winner_lengths), ("loser_lengths", loser_lengths)):
        if lengths is not None:
            _check_lengths(name, lengths, policy_winner)
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}; the paper uses 0.1")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}; at 0.5 labels say nothing")

    chosen = beta * _log_ratios(policy_winner, reference_winner, winner_lengths)
    rejected = beta * _log_ratios(policy_loser, reference_loser, loser_lengths)
    margins = (chosen - rejected).sum(dim=1)
    # The margin, not the loss, is what shows every fault: a margin of +inf has a loss of 0.
    _check_finite("margin", margins, "pair", winner_lengths=winner_lengths, loser_lengths=loser_lengths)
    right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
    loss = -((1.0 - label_smoothing) * right + label_smoothing * wrong).mean()

    metrics = {"loss": loss, "reference_free": torch.tensor(float(reference_winner is None))}
    metrics |= _reward_metrics(chosen, rejected)
    if winner_lengths is not None:
        metrics |= _length_metrics(winner_lengths.sum(dim=2), loser_lengths.sum(dim=2))
    return loss, _floats(**metrics)


def _log_ratios(policy: Tensor, reference: Tensor | None, lengths: Tensor | None) -> Tensor:
    """(P, n) log-ratios delta_i of each agent, summed over turns; the policy alone where there is no reference."""
    ratios = policy if reference is None else policy - reference.detach()
    if lengths is not None:
        # A product instead of a mask: a NaN in an empty response must still be noticed.
        ratios = ratios / lengths.clamp_min(1) * (lengths > 0)
    return ratios.sum(dim=2)


def _reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Implicit rewards (P, n) of winners and losers, summed up for the team and for each agent."""
    scopes = {"": (chosen.sum(dim=1), rejected.sum(dim=1))}
    scopes |= {f"agent{i}/": (chosen[:, i], rejected[:, i]) for i in range(chosen.shape[1])}
    metrics = {}
    for scope, (winner, loser) in scopes.items():
        metrics[f"{scope}chosen_reward"] = winner.mean()
        metrics[f"{scope}rejected_reward"] = loser.mean()
        metrics[f"{scope}margin"] = (winner - loser).mean()
        metrics[f"{scope}accuracy"] = _share(winner > loser)
    return metrics


def _length_metrics(winner: Tensor, loser: Tensor) -> dict[str, Tensor]:
    """Response lengths (P, n) in tokens, for the team and for each agent."""
    metrics = {}
    for side, lengths in (("chosen_length", winner.double()), ("rejected_length", loser.double())):
        metrics[side] = lengths.sum(dim=1).mean()
        metrics |= {f"agent{i}/{side}": lengths[:, i].mean() for i in range(lengths.shape[1])}
    return metrics


# Policy gradients


def group_relative_advantages(returns: Tensor, *, normalize: Literal["mean", "mean_std"] = "mean") -> Tensor:
    """Advantage of each joint response over its group (paper, Eq. 5).

    A group is the G joint responses sampled for one task at one turn; every agent of the team receives the same
    advantage, because the reward belongs to the team.

    Args:
        returns: (N, G) returns of N groups, in units of the (learned or oracle) reward.
        normalize: "mean" subtracts the group's mean; "mean_std" also divides by the group's population standard
            deviation, at least 1e-6. A group of equal returns gets exact zeros either way.

    Returns:
        (N, G) advantages, summing to zero in each group.

    Raises:
        ValueError: if a group has fewer than two returns, since nothing can be compared, or `normalize` is unknown.
        FloatingPointError: if a return is not finite; the message names the groups.
    """
    _check_tensor("returns", returns, ("groups", "responses"))
    if returns.shape[1] < 2:
        raise ValueError(f"returns must be (groups, G) with G >= 2, got {tuple(returns.shape)}; raise num_generations")
    if normalize not in ("mean", "mean_std"):
        raise ValueError(f'normalize must be "mean" or "mean_std", got {normalize!r}')
    _check_finite("return", returns, "group")
    advantages = _centred(returns, dims=(1,))
    return _unit_spread(advantages, dims=(1,)) if normalize == "mean_std" else advantages


def magrpo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    sampled_logprobs: Tensor | None = None,
    clip_ratio: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Group-relative Monte Carlo policy gradient of a team (paper, Eq. 5).

    Every agent i descends -(1/G) sum_g A_g log pi_i(a_i^g given h_i): the same A_g for all agents, its own
    log-probabilities. Summed over agents and turns, mean over groups. No length normaliser.

    With `clip_ratio` the log-probability gives way to the ratio pi / pi_sampled of the whole response, clipped as in
    PPO. On fresh samples every ratio is 1, so this loss starts at 0; its gradient is that of the plain form.

    Args:
        logprobs: (N, G, n, H) log-probabilities of the responses under the agents.
        advantages: (N, G), the same for all turns, or (N, G, H); taken as constants.
        sampled_logprobs: (N, G, n, H) log-probabilities at the time of sampling, at the temperature of `logprobs`
            where they enter a ratio. Without `clip_ratio` they are only compared in the metrics.
        clip_ratio: half-width in (0, 1) of the interval around 1 in which a ratio has a gradient; None for Eq. (5).

    Returns:
        The loss, and metrics: loss; tied_groups (share of groups without any advantage, which teach nothing);
        zero_logprobs (share of responses with log-probability exactly 0: no scored token); advantage_magnitude (mean
        absolute value); with sampled log-probabilities sampled_gap (mean of logprobs - sampled_logprobs, nats a
        response); with clipping ratio_mean, ratio_min, ratio_max, ratio_deviation (largest distance from 1) and
        clip_fraction (share of ratios whose gradient is cut).

    Raises:
        ValueError: if a shape, dtype or option does not fit, or `clip_ratio` comes without `sampled_logprobs`.
        FloatingPointError: if a term of the loss is not finite; the message names the groups.
    """
    _check_tensor("logprobs", logprobs, ("groups", "responses", "agents", "turns"))
    groups, responses, _, turns = logprobs.shape
    _check_dtype("advantages", advantages)
    if tuple(advantages.shape) not in ((groups, responses), (groups, responses, turns)):
        raise ValueError(
            f"advantages must be {(groups, responses)} or {(groups, responses, turns)} to fit logprobs "
            f"{tuple(logprobs.shape)}, got {tuple(advantages.shape)}"
        )
    advantages = advantages.detach().reshape(groups, responses, -1).expand(-1, -1, turns)
    surrogate, ratio_metrics = _surrogate(logprobs, advantages.unsqueeze(2), sampled_logprobs, clip_ratio, "group")
    loss = -surrogate.sum(dim=(2, 3)).mean()
    return loss, _floats(
        loss=loss,
        tied_groups=_share((advantages == 0).all(dim=1)),
        zero_logprobs=_share(logprobs == 0),
        advantage_magnitude=advantages.abs().mean(),
        **ratio_metrics,
    )


def actor_critic_loss(
    logprobs: Tensor,
    values: Tensor,
    rewards: Tensor,
    *,
    discount: float = 1.0,
    value_coef: float = 0.6,
    clip_ratio: float | None = None,
    sampled_logprobs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Actor-critic alternative to Eq. (5): CoLLM-CC and CoLLM-DC (paper, Table 2c).

    One-step temporal differences over the turns: the target of V_t is r_t + discount * V_{t+1}, with no value after the
    last turn, and the advantage is the target minus V_t. Both are constants for the actor. An agent's advantages are
    normalised over its B * H decisions; if all are equal (a single decision always is) they become zeros.

    Args:
        logprobs: (B, n, H) log-probabilities of the responses under the agents.
        values: (B, n, H) critic values read before each response, one critic per agent (CoLLM-DC) or the joint
            critic's value expanded over agents (CoLLM-CC), in units of the reward.
        rewards: (B, H) team reward of each turn.
        discount: factor in [0, 1] on the next turn's value.
        value_coef: weight of the critic's mean squared error.
        clip_ratio: as in `magrpo_loss`.
        sampled_logprobs: (B, n, H), as in `magrpo_loss`.

    Returns:
        policy_loss (summed over agents and turns, mean over trajectories) + value_coef * value_loss (mean squared error
        over all values), and metrics: loss, policy_loss, value_loss, value, target, advantage_spread (population
        standard deviation before normalisation), tied_agents (share of agents with equal advantages), zero_logprobs,
        and the sampling and ratio metrics of `magrpo_loss`.

    Raises:
        ValueError: if a shape, dtype or option does not fit.
        FloatingPointError: if a target, an advantage or a term of the loss is not finite, naming the trajectories.
    """
    _check_tensor("logprobs", logprobs, ("trajectories", "agents", "turns"))
    _check_same_shape("values", values, "logprobs", logprobs)
    _check_tensor("rewards", rewards, ("trajectories", "turns"))
    if rewards.shape != (logprobs.shape[0], logprobs.shape[2]):
        raise ValueError(
            f"rewards must be (trajectories, turns) of logprobs {tuple(logprobs.shape)}, got {tuple(rewards.shape)}"
        )
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must lie in [0, 1], got {discount}")
    if not value_coef >= 0:
        raise ValueError(f"value_coef must be at least 0, got {value_coef}")

    next_values = F.pad(values.detach()[:, :, 1:], (0, 1))
    targets = rewards.detach().unsqueeze(1) + discount * next_values
    errors = targets - values.detach()
    _check_finite("temporal difference", errors, "trajectory")
    centred = _centred(errors, dims=(0, 2))
    advantages = _unit_spread(centred, dims=(0, 2))
    surrogate, ratio_metrics = _surrogate(logprobs, advantages, sampled_logprobs, clip_ratio, "trajectory")
    policy_loss = -surrogate.sum(dim=(1, 2)).mean()
    squared_errors = (values - targets).square()
    _check_finite("squared error of the critic", squared_errors, "trajectory")
    value_loss = squared_errors.mean()
    loss = policy_loss + value_coef * value_loss
    return loss, _floats(
        loss=loss,
        policy_loss=policy_loss,
        value_loss=value_loss,
        value=values.mean(),
        target=targets.mean(),
        advantage_spread=centred.square().mean().sqrt(),
        tied_agents=_share((centred == 0).all(dim=2).all(dim=0)),
        zero_logprobs=_share(logprobs == 0),
        **ratio_metrics,
    )


def _surrogate(
    logprobs: Tensor, advantages: Tensor, sampled: Tensor | None, clip_ratio: float | None, row: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each response adds to the policy gradient's objective, shaped like `logprobs`, and the ratio metrics."""
    metrics = {}
    if sampled is not None:
        _check_same_shape("sampled_logprobs", sampled, "logprobs", logprobs)
        sampled = sampled.detach()
        metrics["sampled_gap"] = (logprobs - sampled).mean()
    if clip_ratio is None:
        surrogate = advantages * logprobs
    else:
        if sampled is None:
            raise ValueError(f"clip_ratio={clip_ratio} needs sampled_logprobs, the log-probabilities at sampling time")
        if not 0.0 < clip_ratio < 1.0:
            raise ValueError(f"clip_ratio must lie in (0, 1), got {clip_ratio}; 0.2 is usual, None switches it off")
        ratios = (logprobs - sampled).exp()
        # An infinite ratio can be clipped to a finite loss and still has a NaN gradient.
        _check_finite("ratio", ratios, row)
        low, high = 1.0 - clip_ratio, 1.0 + clip_ratio
        surrogate = torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
        cut = ((ratios > high) & (advantages > 0)) | ((ratios < low) & (advantages < 0))
        metrics |= {"ratio_mean": ratios.mean(), "ratio_min": ratios.min(), "ratio_max": ratios.max()}
        metrics |= {"ratio_deviation": (ratios - 1.0).abs().max(), "clip_fraction": _share(cut)}
    _check_finite("term of the policy gradient", surrogate, row)
    return surrogate, metrics


def _centred(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Values minus their mean over `dims`, exactly zero where all of them are equal."""
    tied = values.amax(dim=dims, keepdim=True) == values.amin(dim=dims, keepdim=True)
    # The mean of equal floats need not equal them: without the mask a tie becomes noise, then a unit advantage.
    return (values - values.mean(dim=dims, keepdim=True)).masked_fill(tied, 0.0)


def _unit_spread(centred: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Centred values over their population standard deviation, which counts as SPREAD_FLOOR where it is smaller."""
    spread = centred.square().mean(dim=dims, keepdim=True).sqrt()
    return centred / spread.clamp_min(SPREAD_FLOOR)


# Distance to the reference


def kl_estimate(
    policy_logprobs: Tensor, reference_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Estimates of KL(policy || reference) from samples of the policy, one per sample, in nats.

    With x = log pi_ref - log pi: k1 = -x (unbiased, may be negative), k2 = x^2 / 2 (biased, low variance),
    k3 = exp(x) - 1 - x (unbiased and never negative). For measuring: differentiated on fixed samples, k1 gives zero on
    average and k3 the gradient of the other direction, KL(reference || policy). `exact_kl` is the penalty.

    Args:
        policy_logprobs: log-probabilities of samples under the policy that drew them, of any shape (tokens, responses).
        reference_logprobs: log-probabilities of the same samples under the reference.
        estimator: "k1", "k2" or "k3".

    Returns:
        Estimates of the same shape; their mean over samples estimates the divergence.

    Raises:
        ValueError: if the shapes differ or the estimator is unknown.
        FloatingPointError: if an estimate is not finite; the message names the rows.
    """
    _check_dtype("policy_logprobs", policy_logprobs)
    _check_same_shape("reference_logprobs", reference_logprobs, "policy_logprobs", policy_logprobs)
    difference = reference_logprobs - policy_logprobs
    if estimator == "k1":
        estimate = -difference
    elif estimator == "k2":
        estimate = difference.square() / 2
    elif estimator == "k3":
        estimate = torch.expm1(difference) - difference
    else:
        raise ValueError(f'estimator must be "k1", "k2" or "k3", got {estimator!r}')
    _check_finite(f"{estimator} estimate", estimate, "row")
    return estimate


def exact_kl(policy_logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(policy || reference) between next-token distributions, in nats (the KL option of Eq. 5).

    Summed over a response's tokens it is the penalty of MARLHF; the effect of a token on later prefixes is left out,
    as usual.

    Args:
        policy_logits: (..., vocabulary) logits in any floating dtype; the softmax is taken in float32 at least.
        reference_logits: the reference's logits for the same prefixes.

    Returns:
        (...) divergences.

    Raises:
        ValueError: if the shapes differ or there is no vocabulary axis.
        FloatingPointError: if a divergence is not finite; the message names the rows.
    """
    if policy_logits.ndim < 1 or policy_logits.shape != reference_logits.shape:
        raise ValueError(
            "policy_logits and reference_logits must both be (..., vocabulary), got "
            f"{tuple(policy_logits.shape)} and {tuple(reference_logits.shape)}"
        )
    log_policy = _log_softmax(policy_logits)
    log_reference = _log_softmax(reference_logits).detach()
    divergence = (log_policy.exp() * (log_policy - log_reference)).sum(dim=-1)
    _check_finite("divergence", divergence, "row")
    return divergence


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


# Checks and metrics


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        # bfloat16 has 8 bits: the log-probability -300 of a response would be off by up to 1.
        raise ValueError(f"{name} must be float32 or float64, got {tensor.dtype}; compute it in float32")


def _check_tensor(name: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
    _check_dtype(name, tensor)
    if tensor.ndim != len(axes) or 0 in tensor.shape:
        raise ValueError(f"{name} must be ({', '.join(axes)}), none of them empty, got shape {tuple(tensor.shape)}")


def _check_pairs(name: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
    if tensor.ndim == len(axes) and tensor.shape[0] == 0:
        raise ValueError(
            f"no pairs to learn from: {name} has shape {tuple(tensor.shape)}; if all returns tie, sample more "
            "trajectories or another comparator"
        )
    _check_tensor(name, tensor, axes)


def _check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    _check_dtype(name, tensor)
    if tensor.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {tuple(other.shape)}, got {tuple(tensor.shape)}")


def _check_couple(name: str, tensor: Tensor | None, other_name: str, other: Tensor | None) -> None:
    if (tensor is None) != (other is None):
        missing = name if tensor is None else other_name
        raise ValueError(f"{name} and {other_name} go together, got no {missing}; give both or neither")


def _check_lengths(name: str, lengths: Tensor, policy: Tensor) -> None:
    if lengths.shape != policy.shape:
        raise ValueError(
            f"{name} must have the shape of policy_winner, {tuple(policy.shape)}, got {tuple(lengths.shape)}"
        )
    if (lengths < 0).any():
        raise ValueError(f"{name} must count tokens, got {lengths.min().item()}")


def _check_finite(what: str, rows: Tensor, row: str, **lengths: Tensor | None) -> None:
    """Raise before a non-finite number reaches an optimiser, naming the rows (first axis) that hold one."""
    finite = torch.isfinite(rows.detach())
    if finite.all():
        return
    bad = (~finite.reshape(rows.shape[0] if rows.ndim else 1, -1).all(dim=1)).nonzero().flatten().tolist()
    known = "".join(
        f"; {name.replace('_', ' ')} {values[bad].tolist()}" for name, values in lengths.items() if values is not None
    )
    raise NonFiniteError(
        f"non-finite {what} in {row} {bad} (numbered within this batch){known}; look at the log-probabilities and "
        "scores of these rows: the learning rate may be too high, or a response may have overflowed its dtype",
        bad,
    )


def _share(mask: Tensor) -> Tensor:
    return mask.double().mean()


def _floats(**metrics: Tensor) -> Metrics:
    """Metrics as floats without a graph, in one transfer from the device."""
    device = metrics["loss"].device
    numbers = torch.stack([value.detach().to(device, torch.float64) for value in metrics.values()]).tolist()
    return dict(zip(metrics, numbers, strict=True))
