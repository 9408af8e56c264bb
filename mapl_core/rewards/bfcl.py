"""Oracle reward of BFCL: a team's function calls, merged, against the gold calls (paper, appendix C.3)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mapl_core.rewards.base import Reward
from mapl_core.rewards.call_types import Call, Function, Functions, Reading
from mapl_core.rewards.call_values import Form, accepts, equal, form_key, form_of, may_be_omitted
from mapl_core.rewards.calls import read_calls
from mapl_core.rewards.text import check_responses

MIN_REWARD, MAX_REWARD = -1.0, 2.0
PARTS = ("base", "correctness", "coordination", "duplicates", "inactive", "excess")
TOLERANCE = 1e-9
WRONG_NO_ARGUMENTS = 0.7  # similarity to a gold call without arguments when arguments were given


@dataclass(frozen=True)
class Measurements:
    """What the oracle measures on one joint response.

    Attributes:
        calls: calls of schema functions that each agent issued.
        unknown: calls of other functions, of all agents.
        merged: p, calls of the merged list.
        gold: g, gold calls.
        name_f1: F, F1 of the function names of merged and gold calls.
        similarity: A, total similarity of the best one-to-one matching / g.
        is_exact: E, whether the merged calls are the gold calls.
        balance: Bal, 1 if the gold calls were shared out as evenly as possible, whoever took the larger share.
        duplicates: calls that were issued once too often, by whichever agents.
        inactive: agents that issued nothing of their own although there was a gold call for them.
    """

    calls: tuple[int, ...]
    unknown: int
    merged: int
    gold: int
    name_f1: float
    similarity: float
    is_exact: bool
    balance: float
    duplicates: int
    inactive: int

    @property
    def count_agreement(self) -> float:
        """C, 1 if as many calls are merged as are wanted."""
        return max(0.0, 1 - abs(self.merged - self.gold) / self.gold)

    @property
    def excess(self) -> int:
        return max(0, self.merged - self.gold)

    @property
    def cost(self) -> float:
        """Calls that were issued, for each agent."""
        return sum(self.calls) / len(self.calls)


@dataclass(frozen=True)
class GoldCall:
    """One gold call: the accepted values of every argument."""

    name: str
    arguments: Mapping[str, Any]

    def similarity(self, name: str, arguments: Mapping[str, Form], function: Function) -> float:
        """Share of arguments that agree, 1 exactly if the call is right; 0 for another function."""
        if name != self.name:
            return 0.0
        matching = sum(
            accepts(accepted, arguments[argument]) if argument in arguments else may_be_omitted(accepted)
            for argument, accepted in self.arguments.items()
        )
        extra = sum(
            argument not in self.arguments and not _is_default(argument, form, function)
            for argument, form in arguments.items()
        )
        if not self.arguments:
            return WRONG_NO_ARGUMENTS if extra else 1.0
        return matching / (len(self.arguments) + extra)


@dataclass(frozen=True)
class DistinctCall:
    """All calls with one name and the same arguments.

    Attributes:
        name: of the function.
        similarities: to every gold call.
        issued: how often each agent issued it.
    """

    name: str
    similarities: tuple[float, ...]
    issued: tuple[int, ...]

    @property
    def wanted(self) -> int:
        """q: how many gold calls it answers exactly, at least 1."""
        return max(1, sum(similarity == 1.0 for similarity in self.similarities))

    @property
    def kept(self) -> int:
        return min(sum(self.issued), self.wanted)


def bfcl_reward(responses: Sequence[str | None], task: Any, *, num_agents: int | None = None) -> Reward:
    """Oracle reward of a team's calls, between -1 and 2 (paper, appendix C.3).

    The calls of all agents are merged, repeated ones dropped, and compared with the gold calls in any order. Base 0.1
    for any call, correctness 1.5, coordination 0.4; what was issued twice, idle agents and calls beyond the number
    wanted are penalised.

    Args:
        responses: one text per agent; None counts as empty.
        task: its `fields` hold the schemas in `function` and the gold calls in `ground_truth`.
        num_agents: how many responses there must be; any number of at least one if not given.

    Raises:
        TypeError, ValueError: if `responses` is not a list of that many texts; nothing is scored then.
    """
    return reward_of(measure(responses, task, num_agents=num_agents))


def reward_of(measured: Measurements) -> Reward:
    """The reward that follows from what was measured."""
    correct = 0.25 * measured.name_f1 + 0.35 * measured.similarity + 0.20 * measured.is_exact
    coordinated = 0.10 * measured.count_agreement + 0.15 * measured.balance
    parts = {
        "base": 0.1 if measured.merged else 0.0,
        "correctness": 1.5 * correct / 0.80,
        "coordination": 0.4 * coordinated / 0.25,
        "duplicates": -0.6 * min(1.0, measured.duplicates / measured.gold),
        "inactive": -0.3 * measured.inactive / len(measured.calls),
        "excess": -0.1 * min(1.0, measured.excess / measured.gold),
    }
    # In every domain a part that is worth next to nothing counts as worth nothing, whatever the rounding.
    parts = {name: value if abs(value) > TOLERANCE else 0.0 for name, value in parts.items()}
    return Reward(total=min(max(sum(parts.values()), MIN_REWARD), MAX_REWARD), parts=parts)


def measure(responses: Sequence[str | None], task: Any, *, num_agents: int | None = None) -> Measurements:
    """Read, merge and match the calls of one joint response; see `bfcl_reward` for the arguments."""
    if num_agents is None and isinstance(responses, list | tuple):
        num_agents = max(1, len(responses))
    check_responses(responses, num_agents or 1)
    functions = Functions(task.fields["function"])
    gold = gold_calls(task.fields["ground_truth"])
    readings = [read_calls(text, functions) for text in responses]
    distinct = _distinct_calls(readings, gold, functions)
    # What an agent contributes: a call that it repeats counts as often as the answer can use it.
    shares = [sum(min(call.issued[agent], call.wanted) for call in distinct) for agent in range(len(responses))]
    merged = Counter[str]()
    for call in distinct:
        merged[call.name] += call.kept
    number = merged.total()
    similarity = _best_matching(distinct, len(gold))
    return Measurements(
        calls=tuple(len(reading.calls) for reading in readings),
        unknown=sum(reading.unknown for reading in readings),
        merged=number,
        gold=len(gold),
        name_f1=2 * (merged & Counter(call.name for call in gold)).total() / (number + len(gold)),
        similarity=similarity / len(gold),
        is_exact=number == len(gold) and similarity >= len(gold) - TOLERANCE,
        balance=_balance(shares, len(gold)),
        duplicates=sum(sum(call.issued) - call.kept for call in distinct),
        inactive=max(0, min(len(responses), len(gold)) - sum(share > 0 for share in shares)),
    )


def callers(responses: Sequence[str | None], task: Any) -> list[tuple[int, ...]]:
    """Who makes which call: for every gold call, how often each agent issued a call that answers it exactly.

    The reward does not read it; it shows how a team divides the work.
    """
    check_responses(responses, max(1, len(responses)))
    functions, gold = Functions(task.fields["function"]), gold_calls(task.fields["ground_truth"])
    distinct = _distinct_calls([read_calls(text, functions) for text in responses], gold, functions)
    return [
        tuple(
            sum(call.issued[agent] for call in distinct if call.similarities[index] == 1.0)
            for agent in range(len(responses))
        )
        for index in range(len(gold))
    ]


def role_gap(made: Sequence[Sequence[Sequence[Sequence[bool]]]], shuffled_by: random.Random | None = None) -> float:
    """How far the first and the last agent divide the calls: 0 if each makes every call equally often, at most 1.

    Of every gold call the difference between the two agents' frequencies, over all answers to its request; the mean
    over all calls of all requests. With few answers it is above 0 by chance; how far, the same answers say with their
    agents shuffled.

    Args:
        made: for every request and every answer to it, which agents make each gold call (see `callers`).
        shuffled_by: shuffles the agents of every answer.
    """
    gaps = []
    for answers in made:
        agents = len(answers[0][0])
        first, last = [0] * len(answers[0]), [0] * len(answers[0])
        for answer in answers:
            order = shuffled_by.sample(range(agents), agents) if shuffled_by else range(agents)
            for call, by_agent in enumerate(answer):
                first[call] += by_agent[order[0]]
                last[call] += by_agent[order[-1]]
        gaps += [abs(a - b) / len(answers) for a, b in zip(first, last, strict=True)]
    return math.fsum(gaps) / len(gaps)


def gold_calls(ground_truth: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[GoldCall]:
    """The gold calls of a row, `[{name: {argument: accepted values}}, ...]`."""
    return [GoldCall(name, arguments) for entry in ground_truth for name, arguments in entry.items()]


def _is_default(argument: str, form: Form, function: Function) -> bool:
    return argument in function.defaults and equal(form_of(function.defaults[argument]), form)


def _distinct_calls(readings: Sequence[Reading], gold: Sequence[GoldCall], functions: Functions) -> list[DistinctCall]:
    """The calls of all agents, each once, with how often every agent issued it."""
    issued: dict[tuple, list[int]] = {}
    arguments: dict[tuple, dict[str, Form]] = {}
    for agent, reading in enumerate(readings):
        for call in reading.calls:
            forms = {name: form_of(value) for name, value in call.arguments.items()}
            key = _call_key(call, forms)
            arguments.setdefault(key, forms)
            issued.setdefault(key, [0] * len(readings))[agent] += 1
    return [
        DistinctCall(
            name=key[0],
            similarities=tuple(wanted.similarity(key[0], forms, functions.by_name[key[0]]) for wanted in gold),
            issued=tuple(issued[key]),
        )
        for key, forms in arguments.items()
    ]


def _call_key(call: Call, forms: Mapping[str, Form]) -> tuple:
    return call.name, tuple(sorted((name, form_key(form)) for name, form in forms.items()))


def _best_matching(distinct: Sequence[DistinctCall], gold: int) -> float:
    """Largest total similarity of a one-to-one matching of merged and gold calls (optimal, not greedy)."""
    rows = [call.similarities for call in distinct for _ in range(call.kept) if any(call.similarities)]
    if not rows:
        return 0.0
    from scipy.optimize import linear_sum_assignment  # here: it is slow to import, and prompts need none of it

    chosen = linear_sum_assignment(rows, maximize=True)
    return float(sum(rows[row][column] for row, column in zip(*chosen, strict=True)))


def _balance(shares: Sequence[int], gold: int) -> float:
    """How close the agents' shares are to an even division of the gold calls, whoever has the larger one."""
    even, rest = divmod(gold, len(shares))
    ideal = sorted((even + (agent < rest) for agent in range(len(shares))), reverse=True)
    off = sum(abs(share - wanted) for share, wanted in zip(sorted(shares, reverse=True), ideal, strict=True))
    return max(0.0, 1 - off / gold)
