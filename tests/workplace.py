"""A workplace for the runner's tests: a profile, the stand-in notebook and a results folder of one test's own.

The fixtures here are known to all tests through conftest.py: `place` runs the runner in this process, `started` puts
finished jobs in the place of notebooks, `command` starts the runner as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
from stand_in import PROFILE, executed_copy, write_job, write_notebook, write_parameters

from mapl_core import executors, jobs, reproduce, results
from mapl_core import plan as planning
from mapl_core.grid import Job, parse
from mapl_core.inputs import Inputs
from mapl_core.profiles import load_profile
from mapl_core.results import as_plain, write_progress

ROOT = Path(__file__).resolve().parent.parent
SCORES = [{"a": 0.2, "b": 0.4}, {"a": 0.6, "b": 0.8}]
INPUTS = Inputs()  # reading the code once is enough for all tests
MADPO, MARLHF = Job("tldr", "madpo", "dec-dec", 0), Job("tldr", "marlhf", "dec-dec", 0)


class Workplace:
    """A profile, a notebook and a results folder of one test's own."""

    def __init__(self, folder: Path):
        self.profile, self.notebooks, self.results = folder / "toy.yaml", folder / "notebooks", folder / "results"
        self.profile.write_text(PROFILE)
        self.notebook = write_notebook(self.notebooks)
        self.jobs = self.results / "toy" / "jobs"

    def settings(self, job: Job) -> dict:
        """`parameters` and `inputs` of the job's manifest."""
        config = load_profile(self.profile).config(
            domain=job.domain, method=job.method, paradigm=job.paradigm, seed=job.seed
        )
        return {"parameters": as_plain(asdict(config)), "inputs": INPUTS.of(config)}

    def finish(self, job: Job) -> Path:
        """Leave what a successful job leaves."""
        name = (job.method, job.paradigm, job.seed)
        folder = write_job(self.results / "toy", name, SCORES, **self.settings(job))
        executed_copy(self.notebook, folder)
        return folder

    def stop(self, job: Job, iteration: int) -> Path:
        """Leave what a job leaves that was interrupted after `iteration` of 4 iterations."""
        folder = self.jobs / job.name
        write_progress(folder, iteration=iteration, iterations=4, **self.settings(job))
        return folder

    def change_code(self, *modules: str) -> None:
        """Make all that lies here look as if these modules had been others when it was made."""
        for file in [*self.jobs.glob("*/manifest.json"), *self.jobs.glob("*/progress.json")]:
            record = json.loads(file.read_text())
            record["inputs"]["code"] |= dict.fromkeys(modules, "another digest")
            file.write_text(json.dumps(record))

    def arguments(self, *more: str) -> list[str]:
        """A command line; a subcommand comes first, and what is given twice counts as `more` has it."""
        command = more[:1] if more[:1] == ("status",) else ()
        return [*command, "--profile", str(self.profile), "--results", str(self.results), *more[len(command) :]]

    def run(self, *more: str) -> int:
        return reproduce.main(self.arguments(*more), self.notebooks)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setattr(planning, "_check_data", lambda *_: None)
    monkeypatch.setattr(planning, "Inputs", lambda: INPUTS)
    monkeypatch.setattr(reproduce, "Inputs", lambda: INPUTS)
    monkeypatch.setattr(executors.LocalExecutor, "poll_seconds", 0.01)
    monkeypatch.setattr(results, "environment_facts", dict)  # asks git, for every job that is made here
    return Workplace(tmp_path)


@pytest.fixture
def started(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs that were started; each is finished at once instead of running a notebook."""
    names: list[str] = []

    class Finished:
        returncode = 0

        def poll(self) -> int:
            return 0

    def start(notebook: Path, folder: Path, parameters: dict, threads: int, minutes: float, *_: object) -> Finished:
        job = Job("tldr", parameters["METHOD"], parameters["PARADIGM"], parameters["SEED"])
        assert folder == place.jobs / job.name == Path(parameters["OUTPUT_DIR"]) and minutes > 0
        names.append(job.name)
        place.finish(job)
        return Finished()

    monkeypatch.setattr(jobs, "start", start)
    return names


DRIVER = """
import sys
from pathlib import Path
from mapl_core import plan, reproduce
plan._check_data = lambda *_: None
sys.exit(reproduce.main(sys.argv[2:], Path(sys.argv[1])))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the runner on the stand-in notebook, in a process of its own.

    `pause` is the time that an iteration takes, in seconds; `failures` says which job fails and how.
    """
    place, processes = Workplace(tmp_path), []
    grid = {job.name: place.settings(job) for job in parse(place.arguments("--domains", "tldr", "--seeds", "3")).jobs}
    write_parameters(tmp_path / "parameters.json", grid)

    def start(
        *arguments: str,
        results: Path,
        pause: float = 0.0,
        failures: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen:
        words = [*arguments, "--profile", str(place.profile), "--results", str(results)]
        environment = os.environ | {
            "STAND_IN_PARAMETERS": str(tmp_path / "parameters.json"),
            "STAND_IN_PAUSE": str(pause),
            "STAND_IN_FAILURES": json.dumps(dict(failures or {})),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(place.notebooks), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment | dict(variables or {}),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.1)


def results_of(folder: Path) -> dict[str, bytes]:
    """Everything that must not differ between equal runs."""
    kept = [path for pattern in ("**/*.csv", "**/*.md", "**/*.svg") for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}
