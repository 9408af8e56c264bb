"""Claims about result files: whole or absent, equal for equal runs, and never trusted without a look inside."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stand_in import write_job

from mapl_core import results
from mapl_core.results import (
    EvaluationRow,
    MetricRow,
    ResultError,
    check_writable,
    commit_and_dirty,
    folder_lock,
    lock_is_held,
    read_manifest,
    read_metrics,
    read_progress,
    verify_job,
    write_atomically,
    write_manifest,
    write_metrics,
    write_progress,
)

ROW = MetricRow("table1", "toy", "tldr", "madpo", "dec-dec", "current", "decay 0.2", 3, 1, 640, "score", 0.1 + 0.2)
ROOT = Path(__file__).resolve().parent.parent


def test_floats_come_back_exactly(tmp_path: Path):
    rows = [replace(ROW, value=value) for value in (0.1 + 0.2, 1e-300, -1 / 3, 2.0**60, 5e-324)]
    write_metrics(tmp_path / "metrics.csv", rows)
    assert read_metrics(tmp_path / "metrics.csv") == rows


def test_numpy_numbers_are_written_as_plain_ones(tmp_path: Path):
    row = replace(ROW, seed=np.int64(3), env_steps=np.int32(640), value=np.float64(0.1) + np.float64(0.2))
    write_metrics(tmp_path / "metrics.csv", [row])
    assert read_metrics(tmp_path / "metrics.csv") == [ROW]
    assert "np." not in (tmp_path / "metrics.csv").read_text()


def test_names_with_commas_and_quotes_survive(tmp_path: Path):
    row = replace(ROW, comparator='model "big", 4x')
    write_metrics(tmp_path / "metrics.csv", [row])
    assert read_metrics(tmp_path / "metrics.csv") == [row]


def test_seed1_equal_runs_give_byte_equal_files(tmp_path: Path):
    for name in ("one", "two"):
        write_metrics(tmp_path / f"{name}.csv", [ROW, replace(ROW, iteration=2)])
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    assert (tmp_path / "one.csv").read_text().splitlines()[0] == (
        "experiment,profile,domain,method,paradigm,comparator,buffer,seed,iteration,env_steps,metric,value"
    )


def test_an_undefined_metric_is_nan_and_an_infinite_one_is_refused(tmp_path: Path):
    write_metrics(tmp_path / "metrics.csv", [replace(ROW, value=math.nan)])
    assert math.isnan(read_metrics(tmp_path / "metrics.csv")[0].value)
    with pytest.raises(ValueError, match=r"other\.csv: score is inf at iteration 1"):
        write_metrics(tmp_path / "other.csv", [replace(ROW, value=math.inf)])
    assert not (tmp_path / "other.csv").exists()


def test_rows_of_another_kind_are_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="MetricRow"):
        write_metrics(tmp_path / "metrics.csv", [EvaluationRow("t", 0, "score", 1.0)])


def test_save2_a_file_cut_anywhere_within_a_line_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "metrics.csv"
    write_metrics(path, [replace(ROW, iteration=iteration) for iteration in range(3)])
    whole = path.read_bytes()
    for length in range(len(whole)):
        if length and whole[length - 1 : length] == b"\n":
            continue  # cut between lines: nothing in the file tells, the manifest's checksum does
        path.write_bytes(whole[:length])
        line = whole[:length].count(b"\n") + 1
        with pytest.raises(ResultError, match=rf"metrics\.csv, line {line}: cut short"):
            read_metrics(path)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda lines: [lines[0].replace("seed", "sead"), *lines[1:]], 1),
        (lambda lines: [*lines[:2], lines[2].replace("640", "6x0")], 3),
        (lambda lines: [*lines[:2], lines[2].rsplit(",", 1)[0]], 3),
        (lambda lines: [lines[0], lines[1] + ",1", lines[2]], 2),
        (lambda lines: [lines[0], lines[1].replace("0.30000000000000004", "0.3.0"), lines[2]], 2),
    ],
    ids=["header", "number", "missing cell", "extra cell", "value"],
)
def test_damage_is_named_with_file_and_line(tmp_path: Path, damage, line: int):
    path = tmp_path / "metrics.csv"
    write_metrics(path, [ROW, ROW])
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(ResultError, match=rf"metrics\.csv, line {line}: .*run its job again"):
        read_metrics(path)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path):
    path = tmp_path / "metrics.csv"
    write_metrics(path, [ROW, ROW])
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xfe\xfd\n")
    with pytest.raises(ResultError, match=r"metrics\.csv, line 3: not text"):
        read_metrics(path)


def test_save2_a_full_disk_leaves_the_old_file_and_no_fragment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_atomically(tmp_path / "metrics.csv", "old\n")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "metrics.csv", "new\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]
    assert (tmp_path / "metrics.csv").read_text() == "old\n"


# -- the manifest ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "toy", ("madpo", "dec-dec", 0), [{"a": 0.2, "b": 0.4}, {"a": 0.6, "b": 0.9}])


def test_pm12_the_manifest_tells_what_ran_on_what(tmp_path: Path):
    (tmp_path / "adapters" / "agent0").mkdir(parents=True)
    for name in ("metrics.csv", "evaluation.csv", "adapters/agent0/weights"):
        (tmp_path / name).write_text("x\n")
    write_manifest(
        tmp_path / "manifest.json",
        files=["metrics.csv", "evaluation.csv", "adapters"],
        parameters={"beta": 0.1, "limits": (24, 64), "folder": Path("somewhere")},
        task_source="pocket",
        task_counts={"train": 32, "eval": 16},
        refused_tasks={"t7": "no post text"},
        model="pocket:tldr:1x",
        device="cpu",
        seconds=12.34567,
    )
    manifest = read_manifest(tmp_path / "manifest.json")
    assert manifest["status"] == "done"
    assert manifest["parameters"] == {"beta": 0.1, "limits": [24, 64], "folder": "somewhere"}
    expected = {"source": "pocket", "counts": {"train": 32, "eval": 16}, "refused": 1}
    assert manifest["tasks"] == expected | {"refused_reasons": {"t7": "no post text"}}
    assert (manifest["device"], manifest["seconds"], manifest["model"]) == ("cpu", 12.346, "pocket:tldr:1x")
    assert list(manifest["files"]) == ["metrics.csv", "evaluation.csv", "adapters/agent0/weights"]
    # sha256 of "x\n", from `printf 'x\n' | sha256sum`
    digest = "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    assert manifest["files"]["metrics.csv"] == {"bytes": 2, "sha256": digest}
    environment = manifest["environment"]
    assert environment["versions"]["numpy"] == np.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["threads"] >= 1 and {"commit", "dirty", "platform"} <= environment.keys()
    assert manifest["peak_memory_mib"]["process"] > 10


def test_commit_and_dirty_flag_follow_the_checkout(tmp_path: Path):
    assert commit_and_dirty(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit_and_dirty(tmp_path) == (head, False)
    (tmp_path / "file").write_text("2")
    assert commit_and_dirty(tmp_path) == (head, True)


@pytest.mark.parametrize(("content", "what"), [("", "empty"), (None, "missing")])
def test_pm7_a_missing_or_empty_output_is_not_declared_done(tmp_path: Path, content: str | None, what: str):
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ResultError, match=rf"metrics\.csv is {what}"):
        write_manifest(
            tmp_path / "manifest.json", files=["metrics.csv"], parameters={}, task_source="pocket", task_counts={}
        )
    assert not (tmp_path / "manifest.json").exists()


def test_a_finished_job_is_accepted(job: Path):
    assert verify_job(job)["status"] == "done"


def test_run3_a_job_is_judged_by_content_not_by_existence(job: Path):
    metrics = job / "metrics.csv"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])  # a whole line lost: still a readable file
    assert read_metrics(metrics)
    with pytest.raises(
        ResultError, match=rf"metrics\.csv has {metrics.stat().st_size} bytes, {len(whole)} were written"
    ):
        verify_job(job)
    metrics.write_bytes(whole.replace(b"0.75", b"0.95"))  # same length, another number
    with pytest.raises(ResultError, match=r"metrics\.csv has changed"):
        verify_job(job)
    metrics.unlink()
    with pytest.raises(ResultError, match=r"metrics\.csv is missing"):
        verify_job(job)


def test_save2_a_half_written_manifest_is_refused_by_name(job: Path):
    manifest = job / "manifest.json"
    whole = manifest.read_text()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        manifest.write_text(whole[:length])
        with pytest.raises(ResultError, match=r"manifest\.json, line \d+: cut short or damaged"):
            verify_job(job)


def test_a_manifest_that_does_not_say_done_is_not_done(job: Path):
    manifest = json.loads((job / "manifest.json").read_text())
    (job / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
    with pytest.raises(ResultError, match="says 'running', not 'done'"):
        verify_job(job)


def test_a_manifest_must_declare_the_numbers(job: Path):
    manifest = json.loads((job / "manifest.json").read_text())
    del manifest["files"]["evaluation.csv"]
    (job / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ResultError, match=r"does not declare evaluation\.csv"):
        verify_job(job)


# -- the lock ----------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from mapl_core.results import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_with_the_number_of_the_first_until_that_is_killed(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ResultError, match=rf"in use by process {holder.pid};"), folder_lock(tmp_path):
            pass
        with folder_lock(tmp_path, name=".another"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with folder_lock(tmp_path, wait_seconds=5):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_leaves_no_file_and_no_folder_of_its_own(tmp_path: Path):
    with folder_lock(tmp_path / "new" / "folder"):
        assert (tmp_path / "new" / "folder" / ".lock").is_file()
    assert list(tmp_path.iterdir()) == []
    with folder_lock(tmp_path / "new"):
        (tmp_path / "new" / "result").write_text("kept")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result"]


def test_a_lock_on_a_file_that_was_just_taken_away_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between opening and locking the last holder removes the file: held must be the one that others will find."""
    locked, flock = [], fcntl.flock

    def lock(file, operation: int) -> None:
        if not locked:
            (tmp_path / ".lock").unlink()
        locked.append(operation)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    with folder_lock(tmp_path):
        assert len(locked) == 2
        with pytest.raises(ResultError, match=f"in use by process {os.getpid()}"), folder_lock(tmp_path):
            pass


def test_check_writable_leaves_no_trace_and_names_the_folder_and_the_ways_to_another(tmp_path: Path, monkeypatch):
    check_writable(tmp_path / "new" / "folder")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refuse(**_) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    folder = tmp_path / "new" / "folder"
    message = rf"{folder} cannot be written to \(Permission denied\).*--results.*OUTPUT_DIR"
    with pytest.raises(ResultError, match=message):
        check_writable(folder)
    assert list(tmp_path.iterdir()) == []


def test_asking_whether_a_folder_is_held_changes_nothing(tmp_path: Path):
    assert not lock_is_held(tmp_path / "nowhere") and not lock_is_held(tmp_path)
    with folder_lock(tmp_path):
        assert lock_is_held(tmp_path) and not lock_is_held(tmp_path, name=".another")
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    assert not lock_is_held(tmp_path) and list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").write_text("1\n")  # left by a process that was killed
    assert not lock_is_held(tmp_path) and (tmp_path / ".lock").exists()


def test_progress_that_cannot_be_read_is_no_progress(tmp_path: Path):
    assert read_progress(tmp_path) is None
    write_progress(tmp_path, iteration=1, iterations=4, parameters={"limits": (1, 2)}, inputs={})
    told = {"iteration": 1, "iterations": 4, "parameters": {"limits": [1, 2]}, "inputs": {}, "fraction": 0.25}
    assert read_progress(tmp_path) == told
    write_progress(tmp_path, iteration=0, iterations=0, parameters={}, inputs={})  # an untrained team
    assert read_progress(tmp_path)["fraction"] == 0.0
    for damaged in ("{", "[]", '{"iteration": 1}', '{"iteration": "one", "iterations": 2}'):
        (tmp_path / "progress.json").write_text(damaged)
        assert read_progress(tmp_path) is None


def test_reading_and_writing_results_needs_no_heavy_library():
    heavy = "{'torch', 'numpy', 'pandas', 'yaml'}"
    code = f"import sys, mapl_core.results, mapl_core.reproduce; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "[]\n"
    assert results.DONE == "done"
