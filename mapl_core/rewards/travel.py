"""Oracle reward of Travel: one itinerary put together from the slots of two or three agents (paper, appendix C.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mapl_core.rewards.base import Reward
from mapl_core.rewards.text import check_responses, clean_response
from mapl_core.rewards.travel_actions import Action, Merge, merge, read_action
from mapl_core.rewards.travel_checks import Evaluation, evaluate_plan
from mapl_core.rewards.travel_trip import Trip, read_trip

MAX_REWARD, MIN_REWARD = 1.0, -0.25
TOLERANCE = 1e-9
PARTS = (
    "protocol",
    "recovered",
    "validity",
    "team",
    "balance",
    "quality",
    "grounding",
    "success",
    "pen_invalid",
    "pen_conflict",
    "pen_overlap",
    "pen_copy",
    "pen_overlong",
)
WORD = re.compile(r"[a-z0-9]+(?:[.$:+/-][a-z0-9]+)*")
COPIED_WORDS = 8  # words in a row that count as copied if the reference text has them too
MOST_READ = 65_536  # characters of a response that are searched for copies


@dataclass(frozen=True)
class Outcome:
    """Everything that the oracle finds on one joint response.

    Attributes:
        actions: what each agent's text says.
        merged: the agents' slots put together.
        evaluation: the merged itinerary under all checks.
        validity: V, share of agents whose text is exactly as asked for.
        all_strict: J, whether all are.
        balance: B, how evenly the agents contribute valid required slots.
        quality: Q of the merged itinerary.
        coordination: C, balance and quality together.
        protocol: P, form of the texts, decodable or not.
        recovered: E, what the texts hold after recovery.
        complete_success: U, every agent's text and every owned slot valid, all checks passed.
        rates: the rates of the penalties, 0 to 1.
    """

    actions: tuple[Action, ...]
    merged: Merge
    evaluation: Evaluation
    validity: float
    all_strict: bool
    balance: float
    quality: float
    coordination: float
    protocol: float
    recovered: float
    complete_success: bool
    rates: Mapping[str, float]


def travel_reward(responses: Sequence[str | None], task: Any, *, num_agents: int = 2) -> Reward:
    """Oracle reward of one joint response, between -0.25 and 1 (paper, appendix C.3).

    Most of it is paid only if every agent's text is strict: one broken text costs the team nearly everything.

    Args:
        responses: the agents' texts; None counts as empty.
        task: the task, whose fields `read_trip` describes.
        num_agents: 2 (logistics, activities) or 3 (logistics, dining, sightseeing).

    Raises:
        TypeError, ValueError: if `responses` is not one text per agent, or the task cannot be scored.
    """
    outcome = judge(responses, task, num_agents=num_agents)
    strict = float(outcome.all_strict)
    parts = {
        "protocol": 0.02 * outcome.protocol,
        "recovered": 0.03 * outcome.recovered,
        "validity": 0.04 * outcome.validity,
        "team": 0.02 * strict,
        "balance": 0.14 * strict * outcome.balance,
        "quality": 0.57 * strict * outcome.coordination,
        "grounding": 0.08 * strict * outcome.evaluation.grounding,
        "success": 0.10 * outcome.complete_success,
        "pen_invalid": -0.10 * outcome.rates["invalid"],
        "pen_conflict": -0.05 * outcome.rates["conflict"],
        "pen_overlap": -0.05 * outcome.rates["overlap"],
        "pen_copy": -0.10 * outcome.rates["copy"],
        "pen_overlong": -0.05 * outcome.rates["overlong"],
    }
    # In every domain a stage that is worth next to nothing counts as worth nothing, whatever the rounding.
    parts = {name: value if abs(value) > TOLERANCE else 0.0 for name, value in parts.items()}
    total = sum(parts.values())
    if total >= MAX_REWARD - TOLERANCE:  # 0.02 + 0.03 + ... is not quite 1
        total = MAX_REWARD
    return Reward(total=min(max(total, MIN_REWARD), MAX_REWARD), parts=parts)


def judge(responses: Sequence[str | None], task: Any, *, num_agents: int = 2) -> Outcome:
    """Read, merge and check one joint response: what reward and metrics are made of (see `travel_reward`)."""
    check_responses(responses, num_agents)
    trip = read_trip(getattr(task, "fields", task))
    texts = [clean_response(text) for text in responses]
    actions = tuple(read_action(text, agent, trip.days, num_agents) for agent, text in enumerate(texts))
    merged = merge(actions)
    evaluation = evaluate_plan(merged.plan, trip)
    recovered_plan = {slot: value for action in actions for slot, value in action.recovered.items()}
    recovered = evaluation if recovered_plan == merged.plan else evaluate_plan(recovered_plan, trip)
    all_strict = all(action.strict for action in actions)
    balance = bottleneck(_ratios(actions, [action.accepted for action in actions], merged.plan, evaluation, trip))
    rescued = _ratios(actions, [action.recovered for action in actions], recovered_plan, recovered, trip)
    form = [
        ratio * action.structure * (1 - action.violation) ** 2 for ratio, action in zip(rescued, actions, strict=True)
    ]
    return Outcome(
        actions=actions,
        merged=merged,
        evaluation=evaluation,
        validity=sum(action.strict for action in actions) / num_agents,
        all_strict=all_strict,
        balance=balance,
        quality=evaluation.quality,
        coordination=geo(balance, evaluation.quality),
        protocol=bottleneck([0.5 * action.progress + 0.5 * action.soft for action in actions]),
        recovered=geo(bottleneck(form), recovered.quality),
        complete_success=all_strict and evaluation.succeeds and all(evaluation.valid.values()),
        rates=_rates(actions, merged, trip),
    )


def bottleneck(values: Sequence[float]) -> float:
    """A team is nearly as good as its weakest member: 0.2 mean + 0.8 min."""
    return 0.2 * sum(values) / len(values) + 0.8 * min(values)


def geo(first: float, second: float) -> float:
    """Weighted geometric mean, 0.65 and 0.35; 0 if either is."""
    return first**0.65 * second**0.35 if first > 0 and second > 0 else 0.0


def _ratios(
    actions: Sequence[Action], assigned: Sequence[Mapping], plan: Mapping, evaluation: Evaluation, trip: Trip
) -> list[float]:
    """Per agent, the share of its required slots that it assigned, that are in the plan and that are valid."""
    ratios = []
    for action, slots in zip(actions, assigned, strict=True):
        required = [slot for slot in trip.required if slot in action.owned]
        good = sum(slot in slots and slot in plan and evaluation.valid[slot] for slot in required)
        ratios.append(good / len(required) if required else 0.0)
    return ratios


def _rates(actions: Sequence[Action], merged: Merge, trip: Trip) -> dict[str, float]:
    slots = 7 * trip.days
    broken = sum(action.invalid + action.duplicates + action.extra for action in actions)
    items = sum(len(action.items) for action in actions)
    limits = [240 + 180 * len(action.owned) for action in actions]
    overlong = [(len(action.text) - limit) / limit for action, limit in zip(actions, limits, strict=True)]
    return {
        "invalid": max(min(1.0, broken / max(1, items)), *(action.violation for action in actions)),
        "conflict": merged.conflicts / slots,
        "overlap": merged.overlaps / slots,
        "copy": max(_copied(action.text, trip.reference_text) for action in actions),
        "overlong": _clamp(max(overlong)),
    }


def _copied(text: str, reference: str) -> float:
    """How much of a text is copied: nothing up to a fifth of its runs of eight words, all of it from four fifths on."""
    runs = _runs(text[:MOST_READ])
    if not runs or not reference:
        return 0.0
    known = _reference_runs(reference)
    return _clamp((sum(run in known for run in runs) / len(runs) - 0.20) / 0.60)


def _runs(text: str) -> list[str]:
    words = WORD.findall(text.lower())
    return [" ".join(words[start : start + COPIED_WORDS]) for start in range(len(words) - COPIED_WORDS + 1)]


@lru_cache(maxsize=128)  # about 1 MB each for the real data
def _reference_runs(reference: str) -> frozenset[str]:
    return frozenset(_runs(reference))


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
