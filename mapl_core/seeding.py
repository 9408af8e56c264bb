"""Random streams keyed by what they are for, so that no function touches global random state.

Every draw of a run belongs to a stream (seed, purpose, agent, iteration). A stream gives a `torch.Generator` for
shuffles and initial weights, and, for token sampling, uniforms keyed by row and step: a row's numbers are then the same
in whatever batch it is decoded. A sampler that draws by itself is given a seed for each prompt instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Stream:
    """A named source of random numbers.

    Attributes:
        seed: the run's seed.
        purpose: what the numbers are for, such as "collect" or "comparator".
        agent: index of the agent (0 for the coordinator and for purposes without one).
        iteration: index nu of the MAPL iteration.
    """

    seed: int
    purpose: str
    agent: int = 0
    iteration: int = 0

    def for_agent(self, agent: int) -> Stream:
        return replace(self, agent=agent)

    def _digest(self, *more: str) -> bytes:
        words = (str(self.seed), self.purpose, str(self.agent), str(self.iteration), *more)
        return hashlib.blake2b("\x1f".join(words).encode(), digest_size=16).digest()

    def generator(self) -> torch.Generator:
        """A CPU generator that starts at this stream's beginning, each time it is asked for."""
        return torch.Generator().manual_seed(int.from_bytes(self._digest()[:8], "little") & (2**63 - 1))

    def seed_of(self, key: str) -> int:
        """A seed below 2^62 for a sampler that draws by itself; it depends on the stream and the key alone.

        There is room above it: a sampler may count on from it for the samples of one prompt.
        """
        return int.from_bytes(self._digest(key)[:8], "little") & (2**62 - 1)

    def uniforms(self, row_keys: Sequence[str], steps: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) for token sampling.

        Args:
            row_keys: one stable key per row, such as "task-7/sample-3/turn-0".
            steps: how many numbers a row needs (the limit on new tokens).

        Returns:
            (rows, steps) float64; a row depends on the stream and its key alone.
        """
        table = np.empty((len(row_keys), steps), dtype=np.float64)
        for row, key in enumerate(row_keys):
            philox_key = np.frombuffer(self._digest(key), dtype=np.uint64)
            table[row] = np.random.Generator(np.random.Philox(key=philox_key)).random(steps)
        return torch.from_numpy(table)


@contextlib.contextmanager
def global_states_kept() -> Iterator[None]:
    """Around a library that seeds and draws from the global random states: afterwards they are what they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
