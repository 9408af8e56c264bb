"""Claims about jobs on a cluster, against a real Slurm of one node that the tests start and stop themselves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster, why_not
from workplace import results_of, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which sbatch, squeue and scancel reach the cluster."""
    if reason := why_not():
        pytest.skip(reason)
    pytest.importorskip("submitit")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def queue(slurm: dict[str, str]) -> list[str]:
    """State of everything that is queued or runs."""
    command = ["squeue", "--noheader", "--array", "--format=%T"]
    run = subprocess.run(command, env=os.environ | slurm, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_a_grid_on_slurm_leaves_the_files_of_a_local_run_and_names_what_failed(
    tmp_path: Path, command: Callable[..., subprocess.Popen], slurm: dict[str, str]
):
    request = ("--methods", "madpo", "magrpo", "--paradigms", "dec-dec", "cen-cen")
    failing = "tldr-magrpo-dec-dec-seed0"
    runner = command(
        *(*request, "--executor", "slurm", "--slurm-partition", "small", "--slurm-minutes", "60"),
        results=tmp_path / "slurm",
        failures={failing: "raise"},
        variables=slurm,
    )
    out, err = runner.communicate(timeout=300)
    assert runner.returncode == 1, err
    assert "3 jobs of profile toy: 0 done, 3 to run, 3 at a time, 1 thread each" in out
    (failed,) = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert failed.startswith(f"failed: {failing}: 05_tldr.ipynb, cell 4 (`import hashlib") and "the toy broke" in failed
    assert queue(slurm) == []

    runner = command(*request, results=tmp_path / "slurm")  # what Slurm began, this machine ends
    out, err = runner.communicate(timeout=180)
    assert runner.returncode == 0, err
    assert "3 jobs of profile toy: 2 done, 1 to run" in out
    runner = command(*request, results=tmp_path / "local")
    runner.communicate(timeout=180)
    assert results_of(tmp_path / "slurm") == results_of(tmp_path / "local") != {}


def test_ctrl_c_cancels_what_runs_and_what_is_queued_and_the_same_command_goes_on(
    tmp_path: Path, command: Callable[..., subprocess.Popen], slurm: dict[str, str]
):
    request = ("--methods", "madpo", "--jobs", "1", "--executor", "slurm")
    runner = command(*request, results=tmp_path / "r", pause=3.0, variables=slurm)
    checkpoints = tmp_path / "r/toy/jobs"
    wait_for(lambda: any(checkpoints.glob("*/checkpoint.json")))
    assert sorted(queue(slurm)) == ["PENDING", "PENDING", "RUNNING"]  # one at a time
    runner.send_signal(signal.SIGINT)
    out, err = runner.communicate(timeout=60)
    assert runner.returncode == 130, err
    assert "the same command goes on from here" in err and queue(slurm) == []
    (begun,) = [file.parent for file in checkpoints.glob("*/checkpoint.json")]

    runner = command(*request, results=tmp_path / "r", variables=slurm)
    out, err = runner.communicate(timeout=300)
    assert runner.returncode == 0, err
    starts = (begun / "starts.txt").read_text().split()
    assert starts[0] == "0" and int(starts[1]) >= 1, "it did not go on from the checkpoint"


def test_jobs_of_a_killed_runner_are_named_instead_of_doubled(
    tmp_path: Path, command: Callable[..., subprocess.Popen], slurm: dict[str, str]
):
    request = ("--methods", "madpo", "--paradigms", "dec-dec", "--executor", "slurm")
    runner = command(*request, results=tmp_path / "r", pause=60.0, variables=slurm)
    wait_for(lambda: any((tmp_path / "r/toy/jobs").glob("*/checkpoint.json")))
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    runner = command(*request, results=tmp_path / "r", variables=slurm)
    out, err = runner.communicate(timeout=90)
    assert runner.returncode == 2
    assert "is being run by another process" in err or "still queued or running" in err
    subprocess.run(["scancel", "--user=root"], env=os.environ | slurm, check=True)
    wait_for(lambda: queue(slurm) == [])
    runner = command(*request, results=tmp_path / "r", variables=slurm)
    assert runner.communicate(timeout=180) and runner.returncode == 0


def test_a_partition_that_does_not_exist_is_refused_in_slurms_words(
    tmp_path: Path, command: Callable[..., subprocess.Popen], slurm: dict[str, str]
):
    words = ("--methods", "madpo", "--executor", "slurm", "--slurm-partition", "nowhere")
    runner = command(*words, results=tmp_path / "r", variables=slurm)
    out, err = runner.communicate(timeout=60)
    assert runner.returncode == 1
    assert "Slurm refused the jobs" in err and "nvalid partition" in err and "Traceback" not in err
