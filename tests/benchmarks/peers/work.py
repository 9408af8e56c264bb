"""The work that both sides do, and the form in which each reports it.

Neither torch nor any training code is imported here. The peer's process takes tasks, prompts, weights and the oracle
from this project, and nothing else: both sides read the same prompts and are scored by the same function.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mapl_core.domains import get_domain
from mapl_core.domains.base import Domain, Task
from mapl_core.pocket import model_path

METHODS = ("madpo", "magrpo")
AGENTS = 2


@dataclass(frozen=True)
class Work:
    """One MADPO iteration or one MAGRPO epoch of two agents on miniature TLDR posts.

    Attributes:
        method: "madpo" or "magrpo".
        size: of the pocket model; 2x has 2.3 M parameters.
        num_tasks: training tasks.
        posts: pocket posts in each task, one under the other; they set the length of the prompts.
        samples: m, MADPO's joint answers of the agents to each task, and as many of the comparator, the same team.
        pairs: k, the pairs that are kept of each task.
        generations: G, MAGRPO's joint answers to each task.
        new_tokens: most tokens of an answer.
        batch_size: pairs, or groups, of one optimiser step.
        threads: of torch.
    """

    method: str
    size: str = "2x"
    num_tasks: int = 8
    posts: int = 5
    samples: int = 20
    pairs: int = 4
    generations: int = 4
    new_tokens: int = 48
    batch_size: int = 8
    threads: int = 2

    @property
    def model_folder(self) -> Path:
        return model_path("tldr", self.size)

    @property
    def domain(self) -> Domain:
        return get_domain("tldr")

    def tasks(self) -> list[Task]:
        """The tasks, each of other posts of the pocket's training split."""
        posts = [task.fields["post"] for task in self.domain.load_tasks("train", "pocket", self.num_tasks * self.posts)]
        return [
            Task(f"task{number}", "pocket", "train", {"post": "\n\n".join(posts[number :: self.num_tasks])})
            for number in range(self.num_tasks)
        ]

    def warm_up(self) -> Work:
        """A piece of the same work, to be done first: the first passes of a process are slow."""
        return replace(self, num_tasks=1, samples=8, pairs=2)


@dataclass(frozen=True)
class Measurement:
    """What one process did and what it took.

    Attributes:
        versions: of the packages that did it.
        trained_parameters: of all agents together.
        prompt_tokens: length of every prompt, task by task, agent by agent.
        collected: joint answers that were sampled and scored by the oracle.
        sampled_tokens: of these answers, ends of sequence included.
        collect_seconds: for that, pairing and selection included.
        updated: joint answers that the update was computed from, each counted as often as it was used.
        update_seconds: for that.
        loaded_mib: peak memory of the process when the models were loaded.
        peak_mib: peak memory of the process at its end.
    """

    versions: dict[str, str]
    trained_parameters: int
    prompt_tokens: list[int]
    collected: int
    sampled_tokens: int
    collect_seconds: float
    updated: int
    update_seconds: float
    loaded_mib: float
    peak_mib: float

    @property
    def collect_rate(self) -> float:
        """Joint answers collected a second."""
        return self.collected / self.collect_seconds

    @property
    def update_rate(self) -> float:
        """Joint answers trained on a second."""
        return self.updated / self.update_seconds


class Stopwatch:
    """Wall-clock seconds by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def attach(self, owner: Any, method: str, name: str) -> None:
        """Run while `owner.method` runs, whoever calls it."""
        original = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.running(name):
                return original(*arguments, **keywords)

        setattr(owner, method, timed)


def peak_mib() -> float:
    """Peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_side(measure: Callable[[Work], Measurement]) -> None:
    """Do the work that the command line describes, and print what it took as the last line."""
    work = Work(**json.loads(sys.argv[1]))
    loaded = measure(work.warm_up()).loaded_mib  # later on a peak holds the warm-up too
    print(json.dumps(asdict(replace(measure(work), loaded_mib=loaded))))
