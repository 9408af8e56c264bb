"""Host memory: how much is free, and how a run that computes on the processor keeps and maps its own."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

# Parameters of glibc's mallopt(3), and the largest block that may come from the heap.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 * 2**20


def free_memory() -> float:
    """GiB that a new process could take without swapping."""
    import psutil

    return psutil.virtual_memory().available / 2**30


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process whose heap asks Linux for pages of 2 MiB instead of 4 KiB.

    A model of 135M parameters reads half a gigabyte of weights for each token that it writes; in small pages, reading
    them has been measured to take up to twice as long. glibc looks at the setting when a process starts, so it cannot
    be made from within; C libraries that do not know it ignore it.
    """
    setting = "glibc.malloc.hugetlb=1"
    others = [entry for entry in environment.get("GLIBC_TUNABLES", "").split(":") if entry]
    chosen = any(entry.startswith("glibc.malloc.hugetlb=") for entry in others)
    return {**environment, "GLIBC_TUNABLES": ":".join(others if chosen else [*others, setting])}


def keep_freed_memory() -> bool:
    """Let the process keep the memory of freed tensors for the next ones, until it ends.

    Otherwise glibc hands the end of its heap back to the system whenever a layer's tensors are freed, and asks for it
    again at the next layer, which costs an update of a 135M-parameter model much of its time. Blocks above 32 MiB, such
    as caches and logits, still go back as soon as they are freed.

    Returns:
        Whether the settings were taken; other C libraries than glibc have no such settings, and nothing changes there.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT),
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1),  # the heap's free end goes back above 2 GiB only
            mallopt(_M_TOP_PAD, 2**28),  # and grows by 256 MiB at a time
        ]
    )
