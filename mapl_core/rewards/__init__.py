"""Oracle rewards of the task domains: texts in, named parts out. No torch; CoopHE alone runs something, sandboxed."""

from __future__ import annotations

from mapl_core.rewards.base import Reward, score_batch
from mapl_core.rewards.bfcl import bfcl_reward
from mapl_core.rewards.coophe import coophe_reward
from mapl_core.rewards.tldr import tldr_reward
from mapl_core.rewards.travel import travel_reward

__all__ = ["Reward", "bfcl_reward", "coophe_reward", "score_batch", "tldr_reward", "travel_reward"]
