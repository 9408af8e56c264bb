"""One job: a notebook run headless in a process of its own, judged by what it leaves behind.

`start` launches `python -m mapl_core.jobs SPECIFICATION`, or forks the same from a process that has imported the heavy
libraries already (see `warm`); it runs the notebook through papermill. That process ends its kernel when the runner
disappears, however it disappears, so that no orphan goes on writing into the results.
`judge` tells whether the job succeeded: papermill's exit code alone would call a notebook that says `sys.exit(0)` done.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mapl_core.memory import with_huge_pages
from mapl_core.results import SMALL_FILE, ResultError, folder_lock, verify_job, write_atomically
from mapl_core.warm import Child, start_job

NOTEBOOK_COPY, LOG_FILE, FAILURE_FILE = "notebook.ipynb", "log.txt", "failure.txt"
JOB_LOCK = ".job.lock"
START_SECONDS = 120
LOG_BYTES = 20_000
DEAD_KERNEL = 138
MEMORY_ERRORS = ("OutOfMemoryError", "MemoryError")
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


# ---------------------------------------------------------------------------------------------------------------------
# What a notebook accepts
# ---------------------------------------------------------------------------------------------------------------------


def notebook_parameters(notebook: Path) -> dict[str, Any]:
    """Names and default values of the notebook's cell tagged `parameters`.

    Raises:
        ResultError: if there is not exactly one such cell, or it holds anything but `NAME = literal` lines.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise ResultError(f"{notebook} has {len(tagged)} cells tagged `parameters`; it must have one")
    values = {}
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        try:
            (target,) = statement.targets
            values[target.id] = ast.literal_eval(statement.value)
        except (AttributeError, ValueError):
            line = ast.unparse(statement)
            raise ResultError(f"{notebook}: parameters are lines NAME = literal, got {line!r}") from None
    return values


def check_names(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Refuse a parameter that the notebook does not have: papermill would ignore it and use the default.

    Raises:
        ResultError: naming the unknown ones and listing the valid ones.
    """
    valid = notebook_parameters(notebook)
    unknown = sorted(parameters.keys() - valid.keys())
    if unknown:
        raise ResultError(f"{notebook.name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(valid))}")


# ---------------------------------------------------------------------------------------------------------------------
# Starting and stopping
# ---------------------------------------------------------------------------------------------------------------------


def start(
    notebook: Path,
    folder: Path,
    parameters: Mapping[str, Any],
    threads: int,
    minutes: float,
    gpu: str = "",
    is_warm: bool = False,
) -> subprocess.Popen | Child:
    """Start the notebook in a child process, working in the job's folder.

    Args:
        notebook: the source notebook; it is only read.
        folder: the job's folder; gets the executed copy and the log.
        parameters: values for the cell tagged `parameters`.
        threads: of every numerical library in the job; set once, here.
        minutes: limit for any one cell.
        gpu: id of the only GPU that the job may see; empty: it sees what this process sees.
        is_warm: whether it is forked from a process that has the libraries in memory already (see `warm`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for trace in (NOTEBOOK_COPY, FAILURE_FILE):  # an earlier attempt's error must not be reported as this one's
        (folder / trace).unlink(missing_ok=True)
    specification = {"notebook": str(notebook.resolve()), "folder": str(folder.resolve())}
    specification |= {"parameters": dict(parameters), "seconds": round(60 * minutes)}
    root = str(Path(__file__).resolve().parent.parent)
    environment = with_huge_pages(os.environ) | {name: str(threads) for name in THREAD_VARIABLES}
    environment |= {"JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": "Agg", "TQDM_DISABLE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": root}
    environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with open(folder / LOG_FILE, "wb") as log:
        if is_warm:
            return start_job(specification, folder / LOG_FILE, environment)
        return subprocess.Popen(
            [sys.executable, "-m", "mapl_core.jobs", json.dumps(specification | {"parent": os.getpid()})],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the runner alone, which then ends its jobs
        )


def run(job: Mapping[str, Any], is_wanted: Callable[[], bool], kernel_manager: type | None = None) -> int:
    """The child process: run the notebook, return 0, 1 (an error in it) or 138 (its kernel died).

    Args:
        job: the specification that `start` made.
        is_wanted: whether the runner is still there; this process ends with it.
        kernel_manager: a class that starts the kernel; None: Jupyter's own.
    """
    folder = Path(job["folder"])
    threading.Thread(target=_end_with_runner, args=(is_wanted,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _end_everything(143))
    # A predecessor whose runner was killed needs a moment to notice.
    with folder_lock(folder, wait_seconds=30, name=JOB_LOCK):
        return _run_notebook(Path(job["notebook"]), folder, job["parameters"], job["seconds"], kernel_manager)


def _run_notebook(
    notebook: Path, folder: Path, parameters: Mapping[str, Any], seconds: int, kernel_manager: type | None
) -> int:
    import papermill
    from nbclient.exceptions import DeadKernelError

    try:
        papermill.execute_notebook(
            notebook,
            folder / NOTEBOOK_COPY,
            parameters=dict(parameters),
            kernel_name="python3",
            language="python",
            start_timeout=START_SECONDS,
            execution_timeout=seconds,
            progress_bar=False,
            cwd=folder,
            **({"kernel_manager_class": kernel_manager} if kernel_manager else {}),
        )
    except DeadKernelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return DEAD_KERNEL
    except Exception as error:  # whatever it was, its last line is what the runner reports
        print(f"{type(error).__name__}: {str(error).strip() or 'no message'}", file=sys.stderr)
        return 1
    return 0


def _end_with_runner(is_wanted: Callable[[], bool]) -> None:
    while is_wanted():
        time.sleep(0.3)
    _end_everything(1)


def _end_everything(code: int) -> None:
    """End the kernel and everything below it, then this process; nothing may write any more when the lock goes."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=5)
    os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Judging
# ---------------------------------------------------------------------------------------------------------------------


def judge(notebook: Path, folder: Path, exit_code: int, memory_knobs: Sequence[str] = (), killed_by: str = "") -> str:
    """Empty text if the job succeeded, else what went wrong: notebook, cell and error, which is noted in its folder.

    Success means that every cell ran, the manifest says done and the declared files hold what it says.

    Args:
        notebook: the source notebook.
        folder: the job's folder.
        exit_code: of the child process.
        memory_knobs: profile values to lower when memory is short, named in the message.
        killed_by: who ended the job and why, where that is known; otherwise memory is suspected.
    """
    problem = _problem(notebook, folder, exit_code, memory_knobs, killed_by)
    if problem:
        problem += _full_disk(folder)
        with suppress(OSError):  # that disk may be what failed
            write_atomically(folder / FAILURE_FILE, problem + "\n")
    return problem


def read_failure(folder: Path) -> str:
    """What went wrong in the job's last attempt, as `judge` said it; empty if nothing is known to have."""
    try:
        return (folder / FAILURE_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _full_disk(folder: Path) -> str:
    """A remedy if there is no room: then the error may be anything, and the log that would tell is cut short too."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    full = free < SMALL_FILE
    return f"; the disk of {folder} is full: free some space, or choose another folder with --results" if full else ""


def _problem(notebook: Path, folder: Path, exit_code: int, memory_knobs: Sequence[str], killed_by: str) -> str:
    with suppress(OSError):
        _trim_log(folder / LOG_FILE)
    killed = exit_code == DEAD_KERNEL or exit_code < 0
    cell, error = _failed_cell(notebook, folder / NOTEBOOK_COPY, killed)
    where = f"{notebook.name}, cell {cell}" if cell else notebook.name
    if killed:
        cause = killed_by or f"its process was killed, probably for memory; lower {', '.join(memory_knobs)}"
        return f"{where}: {cause}"
    if exit_code:
        reason = error or _last_line(folder / LOG_FILE)
        remedy = f"; lower {', '.join(memory_knobs)}" if any(name in reason for name in MEMORY_ERRORS) else ""
        return f"{where}: {reason}{remedy}"
    try:
        check_done(notebook, folder)
    except ResultError as problem:
        return f"{where}: {error}; {problem}" if error else f"{where}: {problem}"
    return ""


def check_done(notebook: Path, folder: Path) -> dict[str, Any]:
    """Check by content that a job is done, its notebook run to the end included. Returns the manifest.

    Raises:
        ResultError: saying what is missing, damaged or unfinished.
    """
    manifest = verify_job(folder)
    copy = folder / NOTEBOOK_COPY
    try:
        json.loads(copy.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        raise ResultError(f"{copy} is missing or cut short; run the job again") from None
    cell, error = _failed_cell(notebook, copy)
    if cell:
        raise ResultError(f"{copy} stopped in cell {cell} ({error}); run the job again")
    return manifest


def _failed_cell(notebook: Path, copy: Path, killed: bool = False) -> tuple[str, str]:
    """Where the executed copy stopped, as "7 (`first line`)" counted in the source notebook, and the error.

    papermill marks the cell of an exception. Where a kernel died it marks nothing: the cell is the last that began.
    """
    try:
        cells = json.loads(copy.read_text(encoding="utf-8"))["cells"]
        source = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return "", ""
    code = [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    marks = [cell["metadata"].get("papermill", {}) for cell in code]
    began = [cell for cell, mark in zip(code, marks, strict=True) if mark.get("start_time")]
    failed = [cell for cell, mark in zip(code, marks, strict=True) if mark.get("exception")]
    unfinished = [cell for cell in began if cell.get("execution_count") is None]
    if not failed and not unfinished and (killed or len(began) < len(code)):
        unfinished = began[-1:]
    for cell in failed or unfinished:
        places = {cell.get("id"): place for place, cell in enumerate(source, 1)}
        error = next((out for out in cell["outputs"] if out["output_type"] == "error"), {})
        text = f"{error['ename']}: {error['evalue']}" if error else "did not finish"
        first_line = "".join(cell["source"]).strip().splitlines()[0][:60]
        place = places.get(cell.get("id"), "of the injected parameters")
        return f"{place} (`{first_line}`)", " ".join(text.split())[:500]
    return "", ""


def _trim_log(log: Path) -> None:
    """Keep the end of a long log: that is where the error is."""
    try:
        data = log.read_bytes()
    except OSError:
        return
    if len(data) > LOG_BYTES:
        write_atomically(log, b"(earlier lines dropped)\n" + data[-LOG_BYTES:].split(b"\n", 1)[-1])


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")[:500]


def main(specification: str) -> int:
    job = json.loads(specification)
    return run(job, lambda: os.getppid() == job["parent"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
