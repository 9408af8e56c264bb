"""Host memory: freed tensors are used again instead of being asked for anew."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
from mapl_core.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import torch
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layer():
    hidden = torch.ones(6 << 20)  # 24 MiB
    return (hidden * 2 + hidden).sum()
for _ in range(5):
    layer()
before = pages()
for _ in range(20):
    layer()
print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_freed_tensor_s_pages_are_used_again():
    def new_pages(mode: str) -> int:
        run = [sys.executable, "-c", COUNT_FAULTS, mode]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    fresh = new_pages("as is")
    assert fresh > 1000  # 20 times 72 MiB; fewer pages where the system hands out large ones
    assert new_pages("keep") < fresh / 10


def test_nothing_changes_without_glibc(monkeypatch):
    from mapl_core import memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", None)  # would fail
    assert memory.keep_freed_memory() is False
