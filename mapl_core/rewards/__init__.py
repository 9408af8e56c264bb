"""Oracle rewards of the task domains: texts in, named parts out. No torch and no input or output."""

from __future__ import annotations

from mapl_core.rewards.base import Reward, score_batch
from mapl_core.rewards.bfcl import bfcl_reward
from mapl_core.rewards.tldr import tldr_reward

__all__ = ["Reward", "bfcl_reward", "score_batch", "tldr_reward"]
