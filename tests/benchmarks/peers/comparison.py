"""What the parent says about the measurements of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from work import Measurement

WANTED = 10.0  # times as many samples a second
DIFFERENCES = """\
What is not the same on the two sides:
- comlrl trains all weights, one copy of the model for each agent, without a reference. Here each agent is a LoRA
  adapter on one frozen base, and MADPO has its reference term: the update scores every pair once more, adapters off.
- comlrl computes every answer by itself, prompt included, and samples task by task, agent by agent. Here the answers to
  a prompt share its forward pass, and all tasks are sampled together.
- comlrl keeps the pairs with the highest reward of the comparator, here it is that of the winner (paper, section 4.1).
- A step of comlrl takes any pairs, which it scores twice, without and with a graph; here it takes those of whole tasks.
The same on both: base model in float32, tasks, prompts, counts, token limit, temperature 1 without top-p and top-k,
oracle, comparator (the team itself), pairing, threads. Evaluation, checkpoints and logs are left out of both."""


def compare(method: str, rounds: Sequence[tuple[Measurement, Measurement]]) -> list[str]:
    """Lines about one method.

    Args:
        method: "madpo" or "magrpo".
        rounds: this project's and the peer's measurement of every round; the ratio is taken within a round, where the
            machine was in about the same state.

    Raises:
        ValueError: if the two sides did not read the same prompts, or did not sample as many answers.
    """
    for ours, theirs in rounds:
        if ours.prompt_tokens != theirs.prompt_tokens or ours.collected != theirs.collected:
            raise ValueError(
                f"{method}: the sides did different work, {ours.collected} answers to prompts of "
                f"{ours.prompt_tokens} tokens here, {theirs.collected} to {theirs.prompt_tokens} in comlrl"
            )
    lines = [
        _ratio_line(f"{method}, collection", [(o.collect_rate, t.collect_rate) for o, t in rounds]),
        _ratio_line(f"{method}, update", [(o.update_rate, t.update_rate) for o, t in rounds]),
    ]
    peaks = [(max(side, key=lambda one: one.peak_mib), name) for side, name in _sides(rounds)]
    lines.append(
        f"{method}, peak memory: "
        + "; ".join(f"{name} {one.peak_mib:.0f} MiB ({one.loaded_mib:.0f} before the work)" for one, name in peaks)
    )
    counted = [(side[0], name) for side, name in _sides(rounds)]
    lines.append(
        f"{method}, of one round: "
        + "; ".join(
            f"{name} {one.collected} joint answers of {one.sampled_tokens} tokens in {one.collect_seconds:.1f} s, "
            f"{one.updated} answers learnt from in {one.update_seconds:.1f} s, {one.trained_parameters:,} parameters"
            for one, name in counted
        )
    )
    return lines


def _sides(rounds: Sequence[tuple[Measurement, Measurement]]) -> list[tuple[tuple[Measurement, ...], str]]:
    return list(zip(zip(*rounds, strict=True), ("ours", "comlrl"), strict=True))


def _ratio_line(what: str, rates: Sequence[tuple[float, float]]) -> str:
    """Median of the rounds' ratios with their range, and the median rates of both sides."""
    ratios = [ours / theirs for ours, theirs in rates]
    ours, theirs = (median(side) for side in zip(*rates, strict=True))
    return (
        f"{what}: {median(ratios):.1f} times as fast (rounds from {min(ratios):.1f} to {max(ratios):.1f}; wanted: at "
        f"least {WANTED:.0f}); ours {ours:.2f} samples/s, comlrl {theirs:.2f}"
    )
