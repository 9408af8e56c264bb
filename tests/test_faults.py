"""Claims about faults: whatever breaks, nothing finished is lost, the message says what to do, and a rerun completes.

Every fault is real here: processes are killed, a disk is full, a disk is read-only. The fast halves of some claims, and
those about damaged files, are in test_reproduce.py.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from workplace import results_of, wait_for

pytestmark = pytest.mark.slow
MADPO, MARLHF = "tldr-madpo-dec-dec-seed0", "tldr-marlhf-dec-dec-seed0"
BOTH = ("--methods", "madpo", "marlhf", "--paradigms", "dec-dec", "--jobs", "1")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("needs `mount`")
    asked = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    run = subprocess.run(asked, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"needs the right to mount a file system: {run.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up every byte of the file system; removing the returned file frees them."""
    with suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return folder / "filler"


def undisturbed(command: Callable[..., subprocess.Popen], folder: Path) -> dict[str, bytes]:
    runner = command(*BOTH, results=folder)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 0, err
    return results_of(folder / "toy")


def finished(folder: Path) -> dict[str, bytes]:
    """All files of a job."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_killed_job_process_takes_its_kernel_along_and_is_gone_on_with(
    tmp_path: Path, command: Callable[..., subprocess.Popen]
):
    expected = undisturbed(command, tmp_path / "undisturbed")
    results = tmp_path / "r"
    runner = command("--methods", "madpo", "--paradigms", "dec-dec", results=results)
    assert runner.communicate(timeout=600) and runner.returncode == 0
    done = finished(results / "toy/jobs" / MADPO)

    runner = command(*BOTH, results=results, pause=4.0)
    wait_for((results / "toy/jobs" / MARLHF / "checkpoint.json").exists)
    (job,) = psutil.Process(runner.pid).children()
    kernels = job.children(recursive=True)
    assert kernels
    job.send_signal(signal.SIGKILL)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 1
    assert f"failed: {MARLHF}: 05_tldr.ipynb" in err and "killed, probably for memory; lower" in err
    assert psutil.wait_procs(kernels, timeout=20)[1] == [], "the kernel went on writing"
    assert finished(results / "toy/jobs" / MADPO) == done

    out, err = command("status", *BOTH[:-2], results=results).communicate(timeout=600)
    assert f"{MARLHF:32} failed" in out and "(goes on from iteration " in out, err
    runner = command(*BOTH, results=results)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 0, err
    assert "2 jobs of profile toy: 1 done, 1 to run" in out
    assert results_of(results / "toy") == expected
    assert (results / "toy/jobs" / MARLHF / "starts.txt").read_text().split()[1] != "0"


def test_a_disk_that_fills_up_during_a_job_is_named_and_a_rerun_goes_on(
    tmp_path: Path, disk: Path, command: Callable[..., subprocess.Popen]
):
    expected = undisturbed(command, tmp_path / "undisturbed")
    runner = command("--methods", "madpo", "--paradigms", "dec-dec", results=disk)
    assert runner.communicate(timeout=600) and runner.returncode == 0
    done = finished(disk / "toy/jobs" / MADPO)

    runner = command(*BOTH, results=disk, pause=4.0)
    wait_for((disk / "toy/jobs" / MARLHF / "checkpoint.json").exists)
    filler = fill(disk)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 1
    failed = next(line for line in err.splitlines() if line.startswith(f"failed: {MARLHF}: 05_tldr.ipynb"))
    assert f"the disk of {disk / 'toy/jobs' / MARLHF} is full: free some space, or choose another folder" in failed
    assert finished(disk / "toy/jobs" / MADPO) == done

    runner = command(*BOTH, results=disk)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 2
    assert "cannot be written to (No space left on device); free some space there, or choose another one" in err
    assert finished(disk / "toy/jobs" / MADPO) == done

    filler.unlink()
    runner = command(*BOTH, results=disk)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 0, err
    assert "2 jobs of profile toy: 1 done, 1 to run" in out
    assert results_of(disk / "toy") == expected


def test_a_read_only_disk_is_refused_before_work_and_its_table_can_still_be_read(
    disk: Path, command: Callable[..., subprocess.Popen]
):
    runner = command("--methods", "madpo", "--paradigms", "dec-dec", results=disk)
    assert runner.communicate(timeout=600) and runner.returncode == 0
    done = finished(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    runner = command(*BOTH, results=disk)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 2
    assert f"results folder {disk / 'toy'} cannot be written to (Read-only file system)" in err and "--results" in err
    runner = command("status", *BOTH[:-2], results=disk)
    out, err = runner.communicate(timeout=600)
    assert runner.returncode == 0 and f"{MADPO:32} done" in out and f"{MARLHF:32} to do" in out
    assert finished(disk) == done
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    runner = command(*BOTH, results=disk)
    assert runner.communicate(timeout=600) and runner.returncode == 0


def test_a_second_runner_is_refused_and_told_the_first_ones_number_and_the_first_completes(
    tmp_path: Path, command: Callable[..., subprocess.Popen]
):
    first = command(*BOTH, results=tmp_path / "r", pause=2.0)
    wait_for((tmp_path / "r/toy/jobs" / MARLHF / "checkpoint.json").exists)
    second = command(*BOTH, results=tmp_path / "r")
    out, err = second.communicate(timeout=600)
    assert second.returncode == 2 and f"in use by process {first.pid};" in err
    out, err = command("status", *BOTH[:-2], results=tmp_path / "r").communicate(timeout=600)
    assert f"{MARLHF:32} running" in out and f"{MADPO:32} to do" in out, err
    out, err = first.communicate(timeout=600)
    assert first.returncode == 0, err
    assert results_of(tmp_path / "r" / "toy") == undisturbed(command, tmp_path / "undisturbed")
