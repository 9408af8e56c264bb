"""Host memory: freed tensors are used again instead of being asked for anew."""

import os
import platform
import subprocess
import sys
from pathlib import Path

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
    """Without the settings this takes up to 983,000 new pages, depending on what lies at the end of the heap.

    With them it takes a few, or those of one tensor (6,144): the system may take idle pages away in between.
    """
    run = [sys.executable, "-c", COUNT_FAULTS]
    assert int(subprocess.run(run, capture_output=True, text=True, check=True).stdout) < 50_000


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


def test_the_setting_for_huge_pages_joins_those_that_are_there_and_yields_to_a_choice():
    assert memory.with_huge_pages({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    other = memory.with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert other["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    assert memory.with_huge_pages(other) == other
    assert memory.with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"
    }


MAPPED = """
from pathlib import Path
held = bytearray(2**28)
for place in range(0, len(held), 4096):
    held[place] = 1
print(next(line.split()[1] for line in Path("/proc/self/smaps_rollup").open() if line.startswith("AnonHugePages")))
"""
SUPPORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not SUPPORT.is_file() or "[madvise]" not in SUPPORT.read_text() or platform.libc_ver() < ("glibc", "2.35"),
    reason="pages of 2 MiB on request need Linux and glibc 2.35",
)
def test_a_process_so_started_has_huge_pages():
    kib = {}
    for name, environment in (("plain", dict(os.environ)), ("huge", memory.with_huge_pages(os.environ))):
        done = subprocess.run(
            [sys.executable, "-c", MAPPED], env=environment, capture_output=True, text=True, check=True
        )
        kib[name] = int(done.stdout)
    assert kib["huge"] > kib["plain"]


def test_nothing_changes_without_glibc(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", None)  # would fail
    assert memory.keep_freed_memory() is False


LONG_PAIR = """
import resource
import torch
from transformers import Qwen3ForCausalLM
from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import PreferencePair, Response, Trajectory
from mapl_core.domains import get_domain
from mapl_core.models import LoadedModel
from mapl_core.pocket.common import domain_tokenizer, model_config
from mapl_core.policies import JointPolicy
from mapl_core.profiles import load_profile
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream
from mapl_core.updates import TeamOptimizer, update_madpo

torch.set_num_threads(1)
tokenizer = domain_tokenizer("travel")
config = model_config("1x", tokenizer)
config.vocab_size, config.max_position_embeddings = 150_000, 16_384
model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32).eval()
loaded = LoadedModel(model, tokenizer, "wide", torch.device("cpu"), torch.float32, "random")
settings = load_profile("paper").config("travel", "madpo")
base = AdaptedModel(loaded, gradient_checkpointing=settings.gradient_checkpointing)
policy = JointPolicy(
    get_domain("travel"), "dec", [base, base], [SamplingSettings()] * 2, prompt_form="text",
    stream=Stream(0, "init"), micro_batch_tokens=settings.micro_batch_tokens,
)
before = [[weight.clone() for weight in policy.parameters(agent)] for agent in (0, 1)]
ids = torch.randint(150_000, (2, 10_000), generator=torch.Generator().manual_seed(0)).tolist()
played = [
    Trajectory(
        "task",
        (tuple(Response(tuple(ids[agent][:8_000]), tuple(ids[agent][8_000 + 1_000 * n :][:1_000]), "", False)
               for agent in (0, 1)),),
        (("", ""),), (float(n),), ({},),
    )
    for n in (0, 1)
]
pair = PreferencePair(played[1], played[0], True)
update_madpo(policy, TeamOptimizer(policy, settings), [pair], Stream(0, "update"), settings)
moved = [any(not torch.equal(a, b) for a, b in zip(before[agent], policy.parameters(agent))) for agent in (0, 1)]
assert all(moved), moved
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is Linux's")
def test_a_pair_of_long_prompts_under_a_large_vocabulary_needs_less_than_3_gib():
    """Two answers of 1,000 tokens for each of two agents, behind prompts of 8,000, with 150,000 tokens to choose from.

    The logits alone of all response tokens at once would take 2.4 GiB, and as much again for their gradient.
    """
    run = subprocess.run([sys.executable, "-c", LONG_PAIR], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 3.0
