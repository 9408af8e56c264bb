"""Trajectories, preference pairs, their labelling and selection, and the replay buffer (paper, sections 3.1 and 4.1).

The life of a preference: two trajectories of one task are compared (`label_pairs`), the most useful pairs of the task
are kept (`select_pairs`, appendix B.2), and a buffer decides which iterations' pairs are trained on (`ReplayBuffer`,
appendix D.2). Everything here is plain data: no model, no tensor, no global random state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SELECTION_RULES = ("winner_return", "reward_gap", "comparator_return", "random", "proxy", "good_comparator")
BUFFER_MODES = ("offline", "online", "decay", "delay")


@dataclass(frozen=True)
class Response:
    """What one policy (an agent, or the coordinator) wrote at one turn: the action a_i,t with its observation.

    Attributes:
        prompt_ids: token ids of the prompt.
        token_ids: the sampled ids as sampled, end-of-sequence included when it was written.
        text: the decoded answer without special tokens.
        truncated: the token limit ended the answer, so `token_ids` has no end-of-sequence.
        forced: positions in `token_ids` that constrained decoding left no choice about; no log-probability counts them.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    truncated: bool
    forced: tuple[int, ...] = ()

    @property
    def num_chosen(self) -> int:
        """How many of the tokens the model has chosen."""
        return len(self.token_ids) - len(self.forced)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and values that JSON can hold; `from_dict` gives back an equal response."""
        return {
            "prompt_ids": [int(token) for token in self.prompt_ids],
            "token_ids": [int(token) for token in self.token_ids],
            "text": self.text,
            "truncated": bool(self.truncated),
            "forced": list(self.forced),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Response:
        ids = (tuple(data[name]) for name in ("prompt_ids", "token_ids"))
        return cls(*ids, data["text"], data["truncated"], tuple(data["forced"]))


@dataclass(frozen=True)
class Trajectory:
    """One joint history of a task with its joint actions and the oracle's reward (paper, section 3.1).

    Attributes:
        task_id: the task that was played.
        actions: [turn][policy], n policies when decentralised, one (the coordinator) when centralised.
        responses: [turn][agent], the agents' texts; a coordinator's text is already split.
        rewards: oracle reward of each turn.
        parts: named components of each turn's reward.

    Raises:
        ValueError: if a reward is not finite, since it could be neither compared nor ranked.
    """

    task_id: str
    actions: tuple[tuple[Response, ...], ...]
    responses: tuple[tuple[str, ...], ...]
    rewards: tuple[float, ...]
    parts: tuple[Mapping[str, float], ...]

    def __post_init__(self) -> None:
        if not all(math.isfinite(reward) for reward in self.rewards):
            raise ValueError(
                f"rewards of task {self.task_id!r} must be finite, got {self.rewards}; repair the domain's reward"
            )

    @property
    def total_return(self) -> float:
        """R, the sum of the turns' rewards; exactly rounded, so that equal rewards in another order are a tie."""
        return math.fsum(self.rewards)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and values that JSON can hold; `from_dict` gives back an equal trajectory."""
        return {
            "task_id": self.task_id,
            "actions": [[response.to_dict() for response in turn] for turn in self.actions],
            "responses": [list(turn) for turn in self.responses],
            "rewards": [float(reward) for reward in self.rewards],
            "parts": [{name: float(value) for name, value in turn.items()} for turn in self.parts],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        return cls(
            task_id=data["task_id"],
            actions=tuple(tuple(Response.from_dict(response) for response in turn) for turn in data["actions"]),
            responses=tuple(tuple(turn) for turn in data["responses"]),
            rewards=tuple(data["rewards"]),
            parts=tuple(dict(turn) for turn in data["parts"]),
        )


@dataclass(frozen=True)
class PreferencePair:
    """A preferred and a dispreferred trajectory of one task, (tau^w, tau^l) in the paper.

    Attributes:
        winner: the trajectory that the annotator preferred.
        loser: the other one.
        winner_is_agent: the winner came from the agents being trained, not from the comparator.
        iteration: index nu of the MAPL iteration that collected the pair.
    """

    winner: Trajectory
    loser: Trajectory
    winner_is_agent: bool
    iteration: int = 0

    @property
    def task_id(self) -> str:
        return self.winner.task_id

    @property
    def gap(self) -> float:
        """Return of the winner minus return of the loser; negative where the annotator contradicted the oracle."""
        return self.winner.total_return - self.loser.total_return

    @property
    def agent(self) -> Trajectory:
        """The trajectory of the agents being trained."""
        return self.winner if self.winner_is_agent else self.loser

    @property
    def comparator(self) -> Trajectory:
        """The trajectory of the comparator."""
        return self.loser if self.winner_is_agent else self.winner

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and values that JSON can hold; `from_dict` gives back an equal pair."""
        return {
            "winner": self.winner.to_dict(),
            "loser": self.loser.to_dict(),
            "winner_is_agent": bool(self.winner_is_agent),
            "iteration": int(self.iteration),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PreferencePair:
        winner, loser = Trajectory.from_dict(data["winner"]), Trajectory.from_dict(data["loser"])
        return cls(winner, loser, data["winner_is_agent"], data["iteration"])


def label_pairs(
    agent: Sequence[Trajectory],
    comparator: Sequence[Trajectory],
    annotator: Callable[[Trajectory, Trajectory], int],
    *,
    iteration: int = 0,
) -> tuple[list[PreferencePair], int]:
    """Compare the j-th trajectory of the agents with the j-th of the comparator (paper, section 4.1).

    m trajectories of each side give at most m pairs, never m x m: every trajectory is compared once.

    Args:
        agent: m trajectories of the agents, all of one task.
        comparator: m trajectories of the comparator, of the same task.
        annotator: (first, second) -> 1 if the first is preferred, -1 if the second is, 0 for a tie (see annotators.py).
        iteration: index nu that the pairs are stamped with.

    Returns:
        The pairs in the order of the trajectories, and the number of ties, which are dropped.

    Raises:
        ValueError: for lists of different lengths, more than one task, or a label other than 1, 0 and -1.
    """
    if len(agent) != len(comparator):
        raise ValueError(
            f"got {len(agent)} trajectories of the agents and {len(comparator)} of the comparator; "
            "collect the same number m of both"
        )
    _check_one_task([*agent, *comparator])
    pairs: list[PreferencePair] = []
    for ours, theirs in zip(agent, comparator, strict=True):
        label = annotator(ours, theirs)
        if label not in (1, 0, -1):
            raise ValueError(f"an annotator must return 1, 0 or -1, got {label!r} for task {ours.task_id!r}")
        if label == 1:
            pairs.append(PreferencePair(ours, theirs, winner_is_agent=True, iteration=iteration))
        elif label == -1:
            pairs.append(PreferencePair(theirs, ours, winner_is_agent=False, iteration=iteration))
    return pairs, len(agent) - len(pairs)


def select_pairs(
    pairs: Sequence[PreferencePair],
    k: int,
    *,
    by: str = "winner_return",
    generator: torch.Generator | None = None,
    proxy: Callable[[Trajectory], float] | None = None,
    component: str | None = None,
) -> list[PreferencePair]:
    """Keep the k most useful pairs of one task, best first (paper, section 4.1 and appendix B.2).

    The rules:
        winner_return: highest return of the winner, the paper's rule.
        reward_gap: largest difference of the two returns.
        comparator_return: highest return of the comparator's trajectory (the authors' public configurations).
        random: uniform over the distinct pairs.
        proxy: highest `proxy` score of the winner, for annotators whose reward is unknown.
        good_comparator: winner_return among the pairs whose comparator is at least as good as the agents in one
            `component` of the reward; there may be none.

    Equal returns are ordered by the larger gap, then by the order given; equal proxy scores by the order given.
    Pairs with the same texts on both sides teach the same and are kept once, the best ranked of them.

    Args:
        pairs: labelled pairs of one task, in collection order.
        k: how many to keep; all distinct ones are returned where there are fewer.
        by: one of the rules above.
        generator: source of the order, for "random".
        proxy: scores a trajectory, for "proxy"; higher is better.
        component: a name in the trajectories' `parts`, for "good_comparator"; summed over turns.

    Raises:
        ValueError: if k < 1, the rule is unknown or lacks its argument, the pairs are of several tasks, the component
            is not one of the reward's, or a proxy score is not finite.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1 pair per task, got {k}")
    if by not in SELECTION_RULES:
        raise ValueError(f"unknown selection rule {by!r}; valid rules: {', '.join(SELECTION_RULES)}")
    _check_one_task([pair.winner for pair in pairs] + [pair.loser for pair in pairs])

    if by == "random":
        # Distinct before the shuffle: afterwards a pair sampled often would come first more often.
        return _shuffled(_distinct(pairs), generator)[:k]
    if by == "good_comparator":
        if component is None:
            raise ValueError("good_comparator compares one part of the reward; pass component=<name of the part>")
        pairs = [pair for pair in pairs if _total(pair.comparator, component) >= _total(pair.agent, component)]
    if by == "proxy":
        if proxy is None:
            raise ValueError("the rule 'proxy' ranks by a scoring function; pass proxy=<trajectory -> score>")
        scores = [_finite_score(proxy, pair.winner) for pair in pairs]
    elif by == "reward_gap":
        scores = [pair.gap for pair in pairs]
    elif by == "comparator_return":
        scores = [(pair.comparator.total_return, pair.gap) for pair in pairs]
    else:
        scores = [(pair.winner.total_return, pair.gap) for pair in pairs]
    # A reversed sort is stable as well: equal scores stay in the order given.
    order = sorted(range(len(pairs)), key=scores.__getitem__, reverse=True)
    return _distinct(pairs[index] for index in order)[:k]


@dataclass(frozen=True)
class PairDiversity:
    """How many different trajectories stand behind the pairs of one task, counted by their texts."""

    pairs: int
    winners: int
    losers: int


def pairs_by_task(pairs: Iterable[PreferencePair]) -> dict[str, list[PreferencePair]]:
    """The pairs of every task, tasks in the order of their first pair."""
    by_task: dict[str, list[PreferencePair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.task_id, []).append(pair)
    return by_task


def pair_diversity(pairs: Iterable[PreferencePair]) -> dict[str, PairDiversity]:
    """Count distinct winners and losers of every task: k pairs may share a single extreme winner.

    Returns:
        task_id -> counts, tasks in the order of their first pair.
    """
    return {
        task_id: PairDiversity(
            pairs=len(of_task),
            winners=len({_texts(pair.winner) for pair in of_task}),
            losers=len({_texts(pair.loser) for pair in of_task}),
        )
        for task_id, of_task in pairs_by_task(pairs).items()
    }


class ReplayBuffer:
    """Which iterations' pairs are trained on (paper, sections 4.1 and 5.3, appendix D.2).

    A shard is what one iteration added. An iteration without pairs leaves no shard and ages none. The modes:
        offline: the one pre-collected shard; a second one is refused.
        online: all shards, each pair once.
        decay: `size` pairs (default: as many as the newest shard holds); each draw picks a shard with probability
            proportional to decay^age, the newest having age 0, then a pair of it. The weight belongs to the shard,
            whatever its length: decay 1 is uniform over shards ("uniform sampling across these datasets"), decay 0
            the newest only.
        delay: only the shard of `delay` shards ago, the oldest one while fewer exist.

    Attributes:
        shards: the pairs of each iteration, oldest first.
    """

    def __init__(self, mode: str, *, decay: float = 0.8, delay: int = 0, size: int | None = None) -> None:
        """
        Args:
            mode: one of the modes above.
            decay: lambda in [0, 1], for "decay".
            delay: how many shards ago, at least 0, for "delay".
            size: pairs in a training set, for "decay"; None for as many as the newest shard holds.

        Raises:
            ValueError: for an unknown mode or a value out of its range.
        """
        if mode not in BUFFER_MODES:
            raise ValueError(f"unknown buffer mode {mode!r}; valid modes: {', '.join(BUFFER_MODES)}")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must lie in [0, 1], got {decay}; 0 trains on the newest shard, 1 on all alike")
        if delay < 0:
            raise ValueError(f"delay must be at least 0 shards, got {delay}; 0 trains on the newest shard")
        if size is not None and size < 1:
            raise ValueError(f"size must be at least 1 pair, got {size}; leave it out to draw as many as were added")
        self.mode = mode
        self.decay = decay
        self.delay = delay
        self.size = size
        self.shards: list[tuple[PreferencePair, ...]] = []

    def __len__(self) -> int:
        """How many pairs the buffer holds over all shards."""
        return sum(len(shard) for shard in self.shards)

    def add(self, pairs: Iterable[PreferencePair]) -> None:
        """Append the pairs of one iteration as the newest shard; no pairs, no shard."""
        shard = tuple(pairs)
        if not shard:
            return
        if self.mode == "offline" and self.shards:
            raise ValueError(
                f"an offline buffer holds one pre-collected shard, and {len(self)} pairs are there already; "
                "add them all at once or choose the mode 'online'"
            )
        self.shards.append(shard)

    def weights(self) -> list[float]:
        """Expected share of each shard in a training set, newest first; the shares sum to 1."""
        shards = len(self.shards)
        if self.mode == "decay":
            raw = [float(self.decay) ** age for age in range(shards)]
        elif self.mode == "delay":
            raw = [float(age == min(self.delay, shards - 1)) for age in range(shards)]
        else:
            raw = [float(len(shard)) for shard in reversed(self.shards)]
        return [weight / math.fsum(raw) for weight in raw]

    def sample(self, generator: torch.Generator) -> list[PreferencePair]:
        """Draw one iteration's training set, in random order.

        Nothing is remembered between calls: the set follows from the shards and the generator alone, so that a resumed
        run draws what the uninterrupted one would have drawn. Within a call no pair of a shard comes a second time
        before the others of its shard have come; an exhausted shard is reshuffled.

        Raises:
            ValueError: if the buffer is empty or no generator is given.
        """
        require_generator(generator, "sampling from the replay buffer")
        if not self.shards:
            raise ValueError(
                "the replay buffer holds no pairs: every comparison so far was a tie; "
                "collect more trajectories (m), raise the temperature or choose another comparator"
            )
        if self.mode == "decay":
            return self._draw_decayed(generator)
        used = zip(reversed(self.shards), self.weights(), strict=True)
        return _shuffled([pair for shard, weight in used if weight > 0 for pair in shard], generator)

    def _draw_decayed(self, generator: torch.Generator) -> list[PreferencePair]:
        newest_first = self.shards[::-1]
        size = len(newest_first[0]) if self.size is None else self.size
        cumulative = torch.tensor(self.weights(), dtype=torch.float64).cumsum(0)
        uniforms = torch.rand(size, generator=generator, dtype=torch.float64)
        # The division makes the last entry exactly 1, so no number in [0, 1) falls behind it or on a weight of 0.
        ages = torch.searchsorted(cumulative / cumulative[-1], uniforms, right=True).tolist()
        waiting: list[list[PreferencePair]] = [[] for _ in newest_first]
        drawn = []
        for age in ages:
            if not waiting[age]:
                waiting[age] = _shuffled(newest_first[age], generator)
            drawn.append(waiting[age].pop())
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Settings and shards as plain data that JSON can hold."""
        return {
            **self._settings(),
            "shards": [[pair.to_dict() for pair in shard] for shard in self.shards],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the shards by saved ones.

        Raises:
            ValueError: if the saved buffer had other settings, since the run would then not continue as it began.
        """
        saved = {name: state[name] for name in self._settings()}
        if saved != self._settings():
            raise ValueError(
                f"the saved buffer has settings {saved}, this one {self._settings()}; "
                "resume with the saved settings or start the run afresh"
            )
        self.shards = [tuple(PreferencePair.from_dict(pair) for pair in shard) for shard in state["shards"]]

    def _settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "decay": self.decay, "delay": self.delay, "size": self.size}


def require_generator(generator: torch.Generator | None, purpose: str) -> torch.Generator:
    """Refuse a missing generator, which torch would silently replace by the global random state."""
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"{purpose} needs an explicit torch.Generator, got {generator!r}; pass generator=")
    return generator


def _check_one_task(trajectories: Iterable[Trajectory]) -> None:
    tasks = sorted({trajectory.task_id for trajectory in trajectories})
    if len(tasks) > 1:
        raise ValueError(f"trajectories of one task expected, got tasks {tasks}; call once per task")


def _texts(trajectory: Trajectory) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """What makes two trajectories the same: all texts that the policies wrote and all that the oracle read."""
    written = tuple(tuple(response.text for response in turn) for turn in trajectory.actions)
    return written, trajectory.responses


def _distinct(pairs: Iterable[PreferencePair]) -> list[PreferencePair]:
    """The first of every set of pairs with equal texts, in order."""
    seen = {}
    for pair in pairs:
        seen.setdefault((_texts(pair.winner), _texts(pair.loser)), pair)
    return list(seen.values())


def _shuffled(pairs: Sequence[PreferencePair], generator: torch.Generator | None) -> list[PreferencePair]:
    require_generator(generator, "a random order of pairs")
    return [pairs[index] for index in torch.randperm(len(pairs), generator=generator).tolist()]


def _total(trajectory: Trajectory, component: str) -> float:
    """Sum over turns of one named component of the reward."""
    if not trajectory.parts or any(component not in turn for turn in trajectory.parts):
        names = sorted({name for turn in trajectory.parts for name in turn})
        raise ValueError(f"the reward of task {trajectory.task_id!r} has no component {component!r}; it has {names}")
    return math.fsum(turn[component] for turn in trajectory.parts)


def _finite_score(proxy: Callable[[Trajectory], float], trajectory: Trajectory) -> float:
    score = float(proxy(trajectory))
    if not math.isfinite(score):
        raise ValueError(f"the proxy scored a trajectory of task {trajectory.task_id!r} {score}; it must be finite")
    return score
