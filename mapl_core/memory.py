"""Host memory of a run that computes on the processor."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let the process keep the memory of freed tensors for the next ones, until it ends.

    Otherwise glibc asks the system for every tensor above 32 MiB anew and hands it back when it is freed, and the
    system clears each of its pages before the first use: half the time of an update of a 135M-parameter model.

    Returns:
        Whether the settings were taken; other C libraries than glibc have no such settings, and nothing changes there.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        [
            mallopt(_M_MMAP_MAX, 0),  # large blocks come from the heap too
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1),  # the heap's free end goes back above 2 GiB only
            mallopt(_M_TOP_PAD, 2**28),  # and grows by 256 MiB at a time
        ]
    )
