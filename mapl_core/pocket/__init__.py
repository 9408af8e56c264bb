"""Miniature models trained from scratch by this project, and the generators of their tasks."""

from __future__ import annotations

from mapl_core.pocket.common import model_path

__all__ = ["model_path"]
