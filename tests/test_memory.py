"""Host memory: freed tensors are used again instead of being asked for anew."""

import platform
import subprocess
import sys

import pytest

from mapl_core import memory

COUNT_FAULTS = """
import resource
from mapl_core.memory import keep_freed_memory
assert keep_freed_memory()
import torch
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layer():  # all of it freed at the end, and that is the free end of the heap
    return sum(held.sum() for held in [torch.ones(6 << 20) for _ in range(8)])  # 24 MiB each
for _ in range(5):
    layer()
before = pages()
for _ in range(20):
    layer()
print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_freed_tensor_s_pages_are_used_again():
    """Without the settings this takes up to 983,000 new pages, depending on what lies at the end of the heap."""
    run = [sys.executable, "-c", COUNT_FAULTS]
    assert int(subprocess.run(run, capture_output=True, text=True, check=True).stdout) < 1000


def test_the_settings_are_those_of_mallopt_and_all_must_be_taken(monkeypatch):
    """By mallopt(3): M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1, M_TOP_PAD -2; it returns 1 for a value it takes."""
    calls = []

    class Library:
        def __init__(self, refused=None):
            self.refused = refused

        def mallopt(self, parameter, value):
            calls.append((parameter, value))
            return int(parameter != self.refused)

    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library())
    assert memory.keep_freed_memory() is True
    assert calls == [(-3, 32 * 2**20), (-1, 2**31 - 1), (-2, 256 * 2**20)]
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library(refused=-3))
    assert memory.keep_freed_memory() is False


def test_nothing_changes_without_glibc(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", None)  # would fail
    assert memory.keep_freed_memory() is False
