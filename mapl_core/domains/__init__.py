"""Task domains by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mapl_core.domains.base import Domain

# Imported only when asked for, so that a domain costs nothing to those who do not use it.
DOMAINS = {"tldr": ("mapl_core.domains.tldr", "TldrDomain")}


def get_domain(name: str, **options: Any) -> Domain:
    """The domain of that name, built with its own options.

    Raises:
        ValueError: for an unknown name; the message lists the valid ones.
        TypeError: for an option that the domain does not have.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}; choose one of {', '.join(sorted(DOMAINS))}")
    module, class_name = DOMAINS[name]
    return getattr(import_module(module), class_name)(**options)
