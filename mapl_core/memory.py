"""Host memory: how much is free, and how a run that computes on the processor keeps its own."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's mallopt(3), and the largest block that may come from the heap.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 * 2**20


def free_memory() -> float:
    """GiB that a new process could take without swapping."""
    import psutil

    return psutil.virtual_memory().available / 2**30


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
