"""Annotators: who says which of two trajectories is preferred (paper, section 3.1, P_R*).

An annotator reads two trajectories of one task and returns 1, -1 or 0. The paper's tables use `oracle` alone; the
others show what happens when preferences are less certain than the reward behind them.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from mapl_core.buffers import Trajectory, require_generator

ANNOTATORS = ("oracle", "bradley_terry", "noisy")


class Annotator(Protocol):
    """Compares two trajectories of one task."""

    def __call__(self, first: Trajectory, second: Trajectory) -> int:
        """1 if the first is preferred, -1 if the second is, 0 for a tie."""


def oracle(first: Trajectory, second: Trajectory) -> int:
    """The higher return wins, however small the difference; only equal floats are a tie."""
    ours, theirs = first.total_return, second.total_return
    return (ours > theirs) - (ours < theirs)


def bradley_terry(temperature: float, generator: torch.Generator) -> Annotator:
    """An annotator that prefers the first with probability sigmoid((R - R') / temperature) (paper, section 2).

    It never calls a tie: equal returns are decided by a fair coin.

    Args:
        temperature: tau > 0, in units of the reward; small values approach the oracle.
        generator: source of its decisions, one number per comparison.

    Raises:
        ValueError: if the temperature is not positive and finite, or the generator is missing.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}; for no noise use 'oracle'")
    require_generator(generator, "the annotator 'bradley_terry'")

    def annotate(first: Trajectory, second: Trajectory) -> int:
        logit = (first.total_return - second.total_return) / temperature
        probability = torch.tensor(logit, dtype=torch.float64).sigmoid().item()
        return 1 if _uniform(generator) < probability else -1

    return annotate


def noisy(flip_probability: float, generator: torch.Generator) -> Annotator:
    """The oracle with every label flipped with the given probability; ties stay ties.

    Args:
        flip_probability: p in [0, 1).
        generator: source of the flips, one number per comparison.

    Raises:
        ValueError: if the probability is out of range or the generator is missing.
    """
    if not 0.0 <= flip_probability < 1.0:
        raise ValueError(f"flip_probability must lie in [0, 1), got {flip_probability}; 0.1 flips one label in ten")
    require_generator(generator, "the annotator 'noisy'")

    def annotate(first: Trajectory, second: Trajectory) -> int:
        # Drawn for ties as well: which of the later labels are flipped must not depend on how many ties came before.
        flipped = _uniform(generator) < flip_probability
        label = oracle(first, second)
        return -label if flipped else label

    return annotate


def make_annotator(
    name: str,
    *,
    temperature: float = 1.0,
    flip_probability: float = 0.1,
    generator: torch.Generator | None = None,
) -> Annotator:
    """The annotator of that name; settings that it does not use are ignored.

    Raises:
        ValueError: for an unknown name, a setting out of its range, or a stochastic annotator without a generator.
    """
    if name == "oracle":
        return oracle
    if name == "bradley_terry":
        return bradley_terry(temperature, generator)
    if name == "noisy":
        return noisy(flip_probability, generator)
    raise ValueError(f"unknown annotator {name!r}; valid annotators: {', '.join(ANNOTATORS)}")


def _uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator, dtype=torch.float64).item()
