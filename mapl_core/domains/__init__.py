"""Task domains by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mapl_core.domains.base import Domain

# Imported only when asked for, so that a domain costs nothing to those who do not use it.
DOMAINS: dict[str, tuple[str, str] | Callable[..., Domain]] = {
    "tldr": ("mapl_core.domains.tldr", "TldrDomain"),
    "coophe": ("mapl_core.domains.coophe", "CoopheDomain"),
    "bfcl": ("mapl_core.domains.bfcl", "BfclDomain"),
    "travel": ("mapl_core.domains.travel", "TravelDomain"),
}


def register_domain(name: str, build: Callable[..., Domain]) -> None:
    """Make a domain of your own known under a name, so that a configuration can ask for it.

    Args:
        name: the domain's name in tables and configurations.
        build: its class, or any function that makes one from the configuration's `domain_options`.

    Raises:
        ValueError: if the name is one of the domains that come with the project.
    """
    if isinstance(DOMAINS.get(name), tuple):
        raise ValueError(f"the name {name!r} belongs to a domain of the project; choose another")
    DOMAINS[name] = build


def get_domain(name: str, **options: Any) -> Domain:
    """The domain of that name, built with its own options.

    Raises:
        ValueError: for an unknown name; the message lists the valid ones.
        TypeError: for an option that the domain does not have.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}; choose one of {', '.join(sorted(DOMAINS))}")
    build = DOMAINS[name]
    if isinstance(build, tuple):
        module, class_name = build
        build = getattr(import_module(module), class_name)
    return build(**options)
