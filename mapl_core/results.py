"""What a run leaves behind: metric rows, evaluations task by task, and a manifest.

A job folder holds `metrics.csv` (one row per measured number), `evaluation.csv` (the oracle's numbers task by task, at
every evaluation) and `manifest.json`, which is written last and names every declared file with its checksum. A job is
done when its manifest says so *and* the files still have the recorded content, never because a file is there.

Everything that differs between two equal runs (seconds, dates, memory) lives in the manifest, so that the CSV files of
equal runs are equal byte by byte.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

METRICS_FILE, EVALUATION_FILE, MANIFEST_FILE = "metrics.csv", "evaluation.csv", "manifest.json"
PROGRESS_FILE = "progress.json"
DONE = "done"
SMALL_FILE = 64 * 1024  # bytes; a job without that much room cannot write its numbers
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
RECORDED_PACKAGES = (
    *("torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "pandas"),
    *("scipy", "scikit-learn", "matplotlib", "papermill", "nbclient", "ipykernel", "unsloth", "vllm", "bitsandbytes"),
    "openai",
)


class ResultError(ValueError):
    """A result file is missing, damaged or belongs to something else; the message names the file and the remedy."""


@dataclass(frozen=True)
class MetricRow:
    """One measured number of a run: a row of metrics.csv.

    Attributes:
        experiment, profile, domain, method, paradigm, comparator, buffer: which cell of which experiment.
        seed: the seed of the run.
        iteration: number of finished MAPL iterations; 0 is the untrained team.
        env_steps: joint responses the agents have been trained on so far (the paper's interaction budget).
        metric: its name. An oracle metric of the evaluation tasks carries the name that `Domain.metrics` gives it
            ("score"), the mean over the rows of evaluation.csv; anything else a name with a slash ("train/loss").
        value: NaN where the metric is not defined there; never infinite.
    """

    experiment: str
    profile: str
    domain: str
    method: str
    paradigm: str
    comparator: str
    buffer: str
    seed: int
    iteration: int
    env_steps: int
    metric: str
    value: float


@dataclass(frozen=True)
class EvaluationRow:
    """One oracle metric of one evaluation task: the mean over that task's samples after `iteration` iterations."""

    task_id: str
    iteration: int
    metric: str
    value: float


@dataclass(frozen=True)
class JobEvaluationRow:
    """An evaluation row with its job's name: a row of the evaluation.csv of a documented run, which merges jobs."""

    job: str
    task_id: str
    iteration: int
    metric: str
    value: float


Row = TypeVar("Row", MetricRow, EvaluationRow, JobEvaluationRow)


# ---------------------------------------------------------------------------------------------------------------------
# Files that are either whole or absent
# ---------------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it: readers see the old file or the new one.

    Raises:
        OSError: if the disk is full or the folder not writable; the old file is untouched and no fragment stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_metrics(path: Path | str, rows: Iterable[MetricRow]) -> None:
    """Write metrics.csv whole, in the order given. Floats are written with `repr`, so that reading gives them back."""
    _write_rows(Path(path), list(rows), MetricRow)


def read_metrics(path: Path | str) -> list[MetricRow]:
    """Read metrics.csv. Raises ResultError naming file and line if it is missing, cut short or damaged."""
    return _read_rows(Path(path), MetricRow)


def write_evaluation(path: Path | str, rows: Iterable[EvaluationRow]) -> None:
    """Write evaluation.csv whole, in the order given."""
    _write_rows(Path(path), list(rows), EvaluationRow)


def read_evaluation(path: Path | str) -> list[EvaluationRow]:
    """Read evaluation.csv. Raises ResultError naming file and line if it is missing, cut short or damaged."""
    return _read_rows(Path(path), EvaluationRow)


def write_job_evaluation(path: Path | str, rows: Iterable[JobEvaluationRow]) -> None:
    """Write the evaluation.csv of a documented run whole, in the order given."""
    _write_rows(Path(path), list(rows), JobEvaluationRow)


def read_job_evaluation(path: Path | str) -> list[JobEvaluationRow]:
    """Read the evaluation.csv of a documented run. Raises ResultError as `read_evaluation` does."""
    return _read_rows(Path(path), JobEvaluationRow)


def _write_rows(path: Path, rows: list[Row], kind: type[Row]) -> None:
    casts = _casts(kind)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(kind))
    for row in rows:
        if not isinstance(row, kind):
            raise TypeError(f"{path.name} takes {kind.__name__} rows, got {type(row).__name__}")
        if math.isinf(row.value):
            raise ValueError(
                f"{path.name}: {row.metric} is {row.value} at iteration {row.iteration}; it must be finite"
            )
        # The cast makes plain numbers of numpy's; repr is the shortest text that reads back as the same float.
        writer.writerow(str(cast(value)) for cast, value in zip(casts, astuple(row), strict=True))
    write_atomically(path, text.getvalue())


def _casts(kind: type) -> list[type]:
    hints = get_type_hints(kind)
    return [hints[field.name] for field in fields(kind)]


def _read_rows(path: Path, kind: type[Row]) -> list[Row]:
    names, casts = [field.name for field in fields(kind)], _casts(kind)
    if not path.is_file():
        raise ResultError(f"{path} is missing; run its job again")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ResultError(f"{path}, line {line}: not text; the file is damaged, run its job again") from None
    if not text.endswith("\n"):
        raise ResultError(f"{path}, line {text.count(chr(10)) + 1}: cut short in mid-line; run its job again")
    rows, reader = [], csv.reader(io.StringIO(text), strict=True)
    try:
        header = next(reader)
        if header != names:
            raise ValueError(f"columns {header}, expected {names}")
        for cells in reader:
            if len(cells) != len(names):
                raise ValueError(f"{len(cells)} cells, expected {len(names)}")
            rows.append(kind(*(cast(cell) for cast, cell in zip(casts, cells, strict=True))))
    except (ValueError, csv.Error) as error:
        raise ResultError(f"{path}, line {reader.line_num}: {error}; the file is damaged, run its job again") from None
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The manifest
# ---------------------------------------------------------------------------------------------------------------------


def write_manifest(
    path: Path | str,
    *,
    files: Sequence[Path | str],
    parameters: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    task_source: str,
    task_counts: Mapping[str, int],
    refused_tasks: Mapping[str, str] | None = None,
    model: str = "",
    device: str = "cpu",
    seconds: float = 0.0,
    status: str = DONE,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write manifest.json: what was run, on what, where, for how long, and what it produced. Call it last.

    Args:
        path: manifest.json in the job's folder.
        files: declared outputs, relative to that folder (or below it); a folder stands for every file in it. Each must
            exist and hold something, and is recorded with its size and SHA-256.
        parameters: all effective parameters of the run (`dataclasses.asdict(config)`), as plain JSON-able values.
        inputs: what else decides the numbers (`mapl_core.inputs.Inputs().of(config)`). The runner takes a job without
            this record for outdated, since nobody can tell what made it.
        task_source: "pocket", "small" or "paper", or a longer description that begins with it.
        task_counts: number of tasks used, by split: {"train": 32, "eval": 32}.
        refused_tasks: faulty tasks that were left out, id -> reason.
        model: where the weights come from (`LoadedModel.origin`).
        device: as text, e.g. "cpu" or "cuda: NVIDIA T4".
        seconds: wall-clock seconds of the run, resumed parts included.
        notes: anything else worth keeping (stop-word list, dataset revision, sampled tokens, oracle calls ...).

    Returns:
        The manifest as written.

    Raises:
        ResultError: if a declared file is missing or empty.
    """
    path = Path(path)
    declared = list(_expand(path.parent, files))
    manifest = {
        "status": status,
        "parameters": as_plain(parameters),
        "inputs": as_plain(inputs or {}),
        "model": model,
        "tasks": {
            "source": task_source,
            "counts": dict(task_counts),
            "refused": len(refused_tasks or {}),
            "refused_reasons": dict(refused_tasks or {}),
        },
        "device": device,
        "seconds": round(float(seconds), 3),
        "peak_memory_mib": peak_memory_mib(),
        "environment": environment_facts(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {str(file.relative_to(path.parent)): _fingerprint(file) for file in declared},
        "notes": as_plain(notes or {}),
    }
    write_atomically(path, json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return manifest


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Read manifest.json. Raises ResultError naming the file (and line) if it is missing or damaged."""
    path = Path(path)
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "status" not in manifest or not isinstance(manifest.get("files"), dict):
        raise ResultError(f"{path} has no status or no list of files; run its job again")
    return manifest


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ResultError naming the file (and line) if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{path} is missing: its job has not finished; run it again") from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}"
        raise ResultError(f"{where}: cut short or damaged ({error.msg}); run its job again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read ({error}); run its job again") from None


def write_progress(
    folder: Path | str,
    *,
    iteration: int,
    iterations: int,
    parameters: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> None:
    """Say beside a checkpoint how far it is and what it was made from, for those who cannot read the checkpoint."""
    progress = {"iteration": iteration, "iterations": iterations}
    progress |= {"parameters": as_plain(parameters), "inputs": as_plain(inputs)}
    write_atomically(Path(folder) / PROGRESS_FILE, json.dumps(progress) + "\n")


def read_progress(folder: Path | str) -> dict[str, Any] | None:
    """What `write_progress` wrote; None where there is nothing, or nothing that can be read: it only informs."""
    try:
        progress = json.loads((Path(folder) / PROGRESS_FILE).read_bytes())
        fraction = progress["iteration"] / max(progress["iterations"], 1)
        return progress | {"fraction": min(fraction, 1.0)}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify_job(folder: Path | str) -> dict[str, Any]:
    """Check that a job is done: manifest says so and every declared file holds what was recorded. Returns the manifest.

    Raises:
        ResultError: otherwise, naming the first file that is missing, empty, cut short or changed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST_FILE)
    if manifest["status"] != DONE:
        raise ResultError(f"{folder / MANIFEST_FILE} says {manifest['status']!r}, not {DONE!r}; run the job again")
    for name in (METRICS_FILE, EVALUATION_FILE):
        if name not in manifest["files"]:
            raise ResultError(f"{folder / MANIFEST_FILE} does not declare {name}; run the job again")
    for name, recorded in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ResultError(f"{file} is missing; run the job again")
        found = _fingerprint(file)
        if found["bytes"] != recorded["bytes"]:
            raise ResultError(f"{file} has {found['bytes']} bytes, {recorded['bytes']} were written; run the job again")
        if found != recorded:
            raise ResultError(f"{file} has changed since it was written; run the job again")
    return manifest


def _expand(folder: Path, files: Sequence[Path | str]) -> Iterator[Path]:
    for name in files:
        file = folder / name
        found = sorted(entry for entry in file.rglob("*") if entry.is_file()) if file.is_dir() else [file]
        if not found:
            raise ResultError(f"declared output {file} is an empty folder")
        for entry in found:
            if not entry.is_file() or entry.stat().st_size == 0:
                raise ResultError(f"declared output {entry} is {'empty' if entry.is_file() else 'missing'}")
            yield entry


def _fingerprint(file: Path) -> dict[str, Any]:
    with open(file, "rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def as_plain(value: Any) -> Any:
    """The value as JSON gives it back: paths and other objects as text, tuples as lists."""
    return json.loads(json.dumps(value, default=str))


def environment_facts() -> dict[str, Any]:
    """Versions, commit, machine and thread count: what someone needs who gets another number."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    commit, dirty = commit_and_dirty()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": threads,
        "commit": commit,
        "dirty": dirty,
        "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    installed = {}
    for package in RECORDED_PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit_and_dirty(folder: Path | None = None) -> tuple[str | None, bool | None]:
    """Commit of the checkout that `folder` (default: this package) lies in and whether files differ from it.

    (None, None) without git or a commit.
    """
    git = ["git", "-C", str(folder or Path(__file__).resolve().parent)]
    try:
        commit, status = (
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(status)


def peak_memory_mib() -> dict[str, int]:
    """Largest resident memory of this process and, with a GPU, the most that torch had allocated there; in MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {"process": round(peak / (2**20 if sys.platform == "darwin" else 2**10))}
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        memory["gpu"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return memory


# ---------------------------------------------------------------------------------------------------------------------
# The folder: writable, and one writer at a time
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _existing(folder: Path) -> Iterator[None]:
    """The folder exists inside the body; afterwards goes what was made for it and is empty."""
    made = [level for level in (folder, *folder.parents) if not level.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for level in made:
            with suppress(OSError):  # not empty
                level.rmdir()


def check_writable(folder: Path | str) -> None:
    """Say before any work that results cannot be written; leaves no trace, whether they can or not.

    Raises:
        ResultError: naming the folder and the ways to choose another.
    """
    try:
        with _existing(Path(folder)), tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SMALL_FILE))  # a full disk lets a file be made, and nothing be written to it
    except OSError as error:
        remedy = "free some space there, or choose" if error.errno in FULL_DISK else "choose"
        raise ResultError(
            f"results folder {folder} cannot be written to ({error.strerror}); {remedy} another one with --results "
            "(reproduce.sh) or OUTPUT_DIR (a notebook)"
        ) from None


@contextmanager
def folder_lock(folder: Path | str, *, wait_seconds: float = 0.0, name: str = ".lock") -> Iterator[None]:
    """Hold the folder for this process: a second one that asks is refused, with the number of the first.

    The operating system drops the lock when the process ends, however it ends, so a killed run blocks nobody.

    Args:
        folder: locked through a small file in it, which goes with the lock; so does the folder if it was made for that
            and nothing else is in it.
        wait_seconds: how long to wait for an earlier process to let go.
        name: of that file; two names are two locks.

    Raises:
        ResultError: if another process still holds it after that time.
    """
    import fcntl

    path = Path(folder) / name
    deadline = time.monotonic() + wait_seconds
    with _existing(path.parent):
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)  # the last holder may have taken it away
            with open(path, "a+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        file.seek(0)
                        holder = file.read().strip() or "unknown"
                        raise ResultError(
                            f"{path.parent} is in use by process {holder}; wait for it, end it, or choose another "
                            "folder"
                        ) from None
                    time.sleep(0.1)
                    continue
                if not _is_still_at(path, file):
                    continue  # its last holder took it away meanwhile: a lock on it would keep nobody out
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # while it is held, so that nobody else can hold it
                return


def lock_is_held(folder: Path | str, *, name: str = ".lock") -> bool:
    """Whether a process holds the folder now. Writes nothing, and never waits.

    Asking takes a shared lock for an instant; one who comes for the lock just then and does not wait is refused.
    """
    import fcntl

    try:
        with open(Path(folder) / name) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system that knows no locks
        return False
    return False


def _is_still_at(path: Path, file: IO[str]) -> bool:
    """Whether the open file is the one that lies at `path` now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
