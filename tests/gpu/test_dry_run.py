"""The script for a machine with a GPU, tried without one: every line that needs no GPU runs, at tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NO_NETWORK = """
import socket
def refuse(*_, **__):
    raise OSError("the network is blocked by this test")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_the_gpu_script_passes_its_dry_run_without_a_network(tmp_path: Path):
    """A sitecustomize module blocks the network in every process that the script starts."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    out = tmp_path / "out"
    environment = os.environ | {"MAPL_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), "--dry-run", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((out / "plain.json").read_text())
    assert found["runs"].keys() == {"madpo", "marlhf"}
    for values in found["runs"].values():
        # 2 posts x 2 answers before and after, and 3 posts x 4 answers of both sides for the pairs, 60 tokens each if
        # none of them draws its end by chance.
        assert values["sampled_tokens"] > 0.9 * (2 * 2 * 2 + 3 * 4 * 2) * 60
        assert values["sampled_tokens_per_second"] > 0 and values["trained_tokens_per_second"] > 0
        assert values["teraflops"] > 0 and values["mfu"] is None, "the peak of this processor is not known"
        assert 0 < values["seconds"] < 200 and values["peak_memory_gib"] > 0.1
    table = (out / "README.md").read_text()
    assert "| plain | madpo |" in table and "| plain | marlhf |" in table and "cut down to a dry run" in table


def test_without_a_gpu_the_script_says_so_and_writes_nothing(tmp_path: Path):
    command = [sys.executable, "tests/gpu/measure.py", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 2 and "torch finds no GPU; give --dry-run" in run.stderr
    assert not (tmp_path / "out").exists()
