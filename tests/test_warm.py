"""Claims about jobs that are forked from a process which has the libraries: to the notebook they are like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from mapl_core import jobs, warm
from mapl_core.grid import DAY_MINUTES
from mapl_core.jobs import DEAD_KERNEL

pytestmark = pytest.mark.skipif(not warm.can_start_warm(), reason="jobs are forked on Linux alone")

# A notebook that notes what it finds around it, and does at its end what only a whole end of its process does.
LOOKS_AROUND = """
import sys
already = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "peft", "mapl_core"))
import atexit, json, os, random, signal, tempfile, psutil
from pathlib import Path
runner = psutil.Process(os.getppid())
found = {
    "already": already,
    "variables": {name: value for name, value in os.environ.items() if not name.startswith("JPY_")},
    "folder": os.getcwd(),
    "path": list(dict.fromkeys(sys.path)),
    "program": Path(sys.argv[0]).stem,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "own session": os.getsid(0) == os.getpid() != os.getsid(runner.pid) == runner.pid,
    "interrupt": str(signal.getsignal(signal.SIGINT)),
    "draw": random.random(),
    "threads of the fork server": [
        task.read_text().strip() for task in Path(f"/proc/{runner.ppid()}").glob("task/*/comm")
    ],
    "fork server": " ".join(runner.parent().cmdline()),
    "input": sys.stdin.__class__.__name__,
}
temporary = tempfile.TemporaryDirectory()
found["temporary"] = temporary.name
Path("found.json").write_text(json.dumps(found))
atexit.register(Path("at the end").write_text, "done")
print("said aloud")
os.write(1, b"written to the log\\n")
"""
KILLS_ITSELF = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
RUNNER = """
import sys
from pathlib import Path
from mapl_core import jobs
notebook, *folders = map(Path, sys.argv[1:])
for folder in folders:
    child = jobs.start(notebook, folder, {"SEED": 3}, 1, 10, "", True)
    print(child.wait(), flush=True)
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write(tmp_path / "looks_around.ipynb", LOOKS_AROUND)


def write(path: Path, code: str) -> Path:
    cell = nbformat.v4.new_code_cell
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    book.cells = [cell("SEED = 0", metadata={"tags": ["parameters"]}), cell(code)]
    nbformat.write(book, path)
    return path


def run_warm(notebook: Path, *folders: Path) -> list[int]:
    """Run the notebook into the folders, one after the other, from one runner; the exit codes."""
    words = [sys.executable, "-c", RUNNER, str(notebook), *map(str, folders)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def found_in(folder: Path) -> dict:
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.smoke
def test_a_forked_job_finds_around_it_what_any_job_finds(notebook: Path, tmp_path: Path):
    assert run_warm(notebook, tmp_path / "a", tmp_path / "b") == [0, 0]
    assert jobs.start(notebook, tmp_path / "cold", {"SEED": 3}, 1, DAY_MINUTES).wait() == 0
    (a, b), cold = (found_in(tmp_path / name) for name in "ab"), found_in(tmp_path / "cold")
    # The libraries are there; the project's own code, but for what forks, is read when the job begins.
    assert {"torch", "peft"} <= set(a["already"])
    assert [name for name in a["already"] if "mapl_core" in name] == ["mapl_core", "mapl_core.warm"]
    assert cold["already"] == [] and "forkserver" in a["fork server"] and "forkserver" not in cold["fork server"]
    # Any other thread would be gone in the fork, and what it holds locked; jemalloc (pyarrow's) makes its own anew.
    assert len([name for name in a["threads of the fork server"] if name != "jemalloc_bg_thd"]) == 1
    for name in ("path", "program", "main", "own session", "interrupt", "input"):
        assert a[name] == b[name] == cold[name], name
    assert a["main"] and a["own session"]
    assert (a["folder"], b["folder"]) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert a["variables"] == b["variables"]
    assert {name: a["variables"].get(name) for name in cold["variables"]} == cold["variables"]
    assert a["draw"] != b["draw"]  # Python's own generator is not copied along
    for folder in ("a", "b", "cold"):
        assert (tmp_path / folder / "at the end").exists() and not Path(
            found_in(tmp_path / folder)["temporary"]
        ).exists()
        assert "written to the log" in (tmp_path / folder / "log.txt").read_text()
        cell = json.loads((tmp_path / folder / "notebook.ipynb").read_text())["cells"]
        assert any("said aloud" in str(entry.get("outputs")) for entry in cell)
        assert any("SEED = 3" in "".join(entry["source"]) for entry in cell)


@pytest.mark.slow
def test_a_kernel_that_dies_and_one_that_never_starts_end_their_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dies = write(tmp_path / "dies.ipynb", KILLS_ITSELF)
    assert run_warm(dies, tmp_path / "a", tmp_path / "b") == [DEAD_KERNEL] * 2
    unreadable = tmp_path / "unreadable.ipynb"
    unreadable.write_text("{")
    assert run_warm(unreadable, tmp_path / "c", tmp_path / "d") == [1, 1]
    assert "NotJSONError" in (tmp_path / "c" / "log.txt").read_text()


@pytest.mark.slow
def test_somebodys_own_kernel_of_the_same_name_starts_as_it_says(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "share" / "kernels" / "python3"
    folder.mkdir(parents=True)
    command = [sys.executable, "-Xutf8", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "mine", "language": "python", "env": {"MAPL_MINE": "yes"}})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    assert run_warm(notebook, tmp_path / "a", tmp_path / "b") == [0, 0]
    for found in (found_in(tmp_path / "a"), found_in(tmp_path / "b")):
        assert found["already"] == [] and found["variables"]["MAPL_MINE"] == "yes"
        assert "forkserver" in found["fork server"]  # its job is forked all the same


@pytest.mark.slow
def test_if_the_fork_server_is_killed_its_jobs_end_and_count_as_killed(tmp_path: Path):
    waits = write(tmp_path / "waits.ipynb", "import time\nopen('begun', 'w').close()\ntime.sleep(600)")
    root = Path(__file__).resolve().parent.parent
    words = [sys.executable, "-c", RUNNER, str(waits), str(tmp_path / "a")]
    runner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "a" / "begun").exists():
            assert runner.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(runner.pid).children(recursive=True)
        (server,) = [
            process
            for process in family
            if "forkserver" in " ".join(process.cmdline()) and process.ppid() == runner.pid
        ]
        server.kill()
        assert int(runner.communicate(timeout=60)[0]) == warm.LOST
        assert psutil.wait_procs([process for process in family if process.pid != runner.pid], timeout=20)[1] == []
    finally:
        runner.kill()


def test_a_gpu_or_another_system_starts_jobs_cold(monkeypatch: pytest.MonkeyPatch):
    assert warm.can_start_warm() and not warm.can_start_warm(("GPU-a1",))
    monkeypatch.setattr(warm.sys, "platform", "darwin")
    assert not warm.can_start_warm()


def test_the_environment_is_given_for_a_moment_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAPL_MARK", "before")
    before = dict(os.environ)
    with pytest.raises(KeyError), warm._environment({"ONLY": "this"}):
        assert dict(os.environ) == {"ONLY": "this"}
        raise KeyError
    assert dict(os.environ) == before
