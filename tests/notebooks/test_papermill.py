"""Claims about running notebooks: each works alone, headless, offline; the job notebook survives a kill.

The smallest of them belong to `./reproduce.sh test`: every notebook from its first cell to its last, on small numbers;
the notebooks of all domains as jobs that are killed and resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mapl_core.grid import DOMAIN_NOTEBOOKS

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "localhost,127.0.0.1",
}
HEADLESS = {"MPLBACKEND": "Agg", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1"}

# Numbers with which a notebook runs in seconds. It has no other path for that: these are its own parameters, and what
# is not named keeps its default.
FEW = {"train_tasks": 4, "eval_tasks": 2, "eval_samples": 2, "iterations": 1}
SMALL: dict[str, dict[str, Any]] = {
    "00_quickstart": {"TASKS": 4, "EVAL_TASKS": 2, "ITERATIONS": 1},
    "01_formulation": {},
    "02_preference_collection": {},
    "03_marlhf": {
        **{"TRAIN_TASKS": 4, "EVAL_TASKS": 2, "ITERATIONS": 1, "TOY_REPEATS": 2},
        "OVERRIDES": {"eval_samples": 2, "buffer_size": 8},
    },
    "04_madpo": {"TRAIN_TASKS": 4, "EVAL_TASKS": 2, "ITERATIONS": 1, "OVERRIDES": {"eval_samples": 2}},
    "09_baselines": {"LOOK_TASKS": 2, "LOOK_SAMPLES": 2, "OVERRIDES": FEW},
    "11_tables_and_figures": {},
}
JOBS = ("tldr", "coophe", "bfcl", "travel")  # domains whose notebook runs as a small job further down


def run_notebook(notebook: Path, folder: Path, *parameters: str) -> subprocess.CompletedProcess:
    """Run a notebook as a reader would: papermill, in an empty folder, with the hub out of reach."""
    folder.mkdir(parents=True)
    options = ["-k", "python3", "--no-progress-bar", "--start-timeout", "300", *parameters]  # on a busy machine
    return subprocess.run(
        [sys.executable, "-m", "papermill", str(notebook), "out.ipynb", *options],
        capture_output=True, text=True, cwd=folder, check=False,
        env=os.environ | OFFLINE | HEADLESS | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture
def tiny_profile(tmp_path: Path) -> Path:
    """The pocket profile with fewer of everything: the same path, smaller numbers."""
    values = yaml.safe_load((ROOT / "notebooks" / "profiles" / "pocket.yaml").read_text())
    fewer = {"train_tasks": 4, "eval_tasks": 4, "eval_samples": 2, "iterations": 2}
    fewer |= {"samples_per_task": 4, "pairs_per_task": 2, "curve_samples": 1}
    for settings in (values["defaults"], *values["domains"].values()):
        settings |= fewer
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "tiny.yaml"


@pytest.fixture
def start_runner(tiny_profile: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the runner on the tiny profile; ends with the test whatever is still running."""
    started = []

    def start(results: Path, *arguments: str) -> subprocess.Popen:
        words = ["--profile", str(tiny_profile), "--results", str(results), *arguments]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "mapl_core.reproduce", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=os.environ | OFFLINE,
            )
        )
        return started[-1]

    yield start
    for runner in started:
        runner.kill()
        runner.wait()


def outcome(runner: subprocess.Popen) -> str:
    """Wait for the runner; its output, for the message of a failure."""
    text, _ = runner.communicate(timeout=900)
    assert runner.returncode == 0, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("domains", [pytest.param(JOBS[:2], marks=pytest.mark.smoke), JOBS[2:]], ids="-".join)
def test_save1_pocket_jobs_killed_in_the_middle_end_with_the_numbers_of_an_undisturbed_run(
    domains: tuple[str, ...], start_runner: Callable[..., subprocess.Popen], tmp_path: Path
):
    """The job of every domain runs undisturbed. Of `domains`, two at a time, the runner is killed whenever a job has
    its first checkpoint, until every job has been cut once, or was too fast for that."""
    request = ("--methods", "marlhf", "--paradigms", "dec-dec", "--experiments", "table1", "--jobs", "2")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert "tables/table1.md" in outcome(start_runner(undisturbed, *request))
    for name in (f"tiny/jobs/{domain}-marlhf-dec-dec-seed0" for domain in JOBS):
        manifest = json.loads((undisturbed / name / "manifest.json").read_text())
        assert manifest["tasks"]["source"] == "pocket" and manifest["tasks"]["counts"] == {"train": 4, "eval": 4}
        assert manifest["environment"]["threads"] == 1 and manifest["parameters"]["method"] == "marlhf"

    request += ("--domains", *domains)
    names = [f"tiny/jobs/{domain}-marlhf-dec-dec-seed0" for domain in domains]

    def done() -> set[str]:
        return {name for name in names if (killed / name / "manifest.json").exists()}

    cut: set[str] = set()
    while cut | done() < set(names):
        runner, deadline = start_runner(killed, *request), time.monotonic() + 600
        while not any(list((killed / name).glob("checkpoint*")) for name in set(names) - cut - done()):
            assert time.monotonic() < deadline
            if runner.poll() is not None:
                break
            time.sleep(0.05)
        runner.send_signal(signal.SIGKILL)
        runner.communicate()
        cut |= {name for name in set(names) - done() if list((killed / name).glob("checkpoint*"))}
    assert cut
    outcome(start_runner(killed, *request))
    for name in names:
        for file in ("metrics.csv", "evaluation.csv"):
            assert (killed / name / file).read_bytes() == (undisturbed / name / file).read_bytes(), name
    assert f"{len(names)} done, 0 to run" in outcome(start_runner(killed, *request))


def test_every_notebook_has_small_numbers_or_is_run_as_a_small_job():
    jobs = [Path(DOMAIN_NOTEBOOKS[domain]).stem for domain in JOBS]
    assert sorted([*SMALL, *jobs]) == [notebook.stem for notebook in NOTEBOOKS]


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("name", SMALL)
def test_nb8_each_notebook_runs_from_its_first_cell_to_its_last_on_small_numbers(name: str, tmp_path: Path):
    values = yaml.safe_dump(SMALL[name])
    done = run_notebook(ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "empty folder", "-y", values)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_nb8_each_notebook_works_alone_headless_and_offline(notebook: Path, tmp_path: Path):
    before = hashlib.sha256(notebook.read_bytes()).hexdigest()
    done = run_notebook(notebook, tmp_path / "empty folder")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stderr) < 20_000  # logs stay short (T-PM9)
    copy = json.loads((tmp_path / "empty folder" / "out.ipynb").read_text())
    assert "widgets" not in copy["metadata"]
    assert hashlib.sha256(notebook.read_bytes()).hexdigest() == before


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_pm2_a_misspelt_parameter_stops_a_notebook_before_it_works(notebook: Path, tmp_path: Path):
    done = run_notebook(notebook, tmp_path / "empty", "-p", "STEPZ", "3")
    assert done.returncode == 1
    assert "ParameterError: unknown parameter STEPZ = 3; the parameters are " in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_nb4_running_a_notebook_twice_gives_equal_csv_files(notebook: Path, tmp_path: Path):
    found = []
    for attempt in ("one", "two"):
        folder = tmp_path / attempt
        done = run_notebook(notebook, folder, "-p", "OUTPUT_DIR", "kept")
        assert done.returncode == 0, done.stderr[-3000:]
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.csv")})
    assert found[0] == found[1]
