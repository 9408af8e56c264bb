"""Oracle rewards of the task domains: texts in, named parts out. No torch; CoopHE alone runs something, sandboxed."""

from __future__ import annotations

from mapl_core.rewards.base import Reward, score_batch
from mapl_core.rewards.tldr import tldr_reward

__all__ = ["Reward", "coophe_reward", "score_batch", "tldr_reward"]


def __getattr__(name: str) -> object:
    if name == "coophe_reward":  # on demand: the sandbox is of no use to other domains
        from mapl_core.rewards.coophe import coophe_reward

        return coophe_reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
