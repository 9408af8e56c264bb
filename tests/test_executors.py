"""Claims about the Slurm executor that need no Slurm: what it asks for, and how it tells in which way a job ended.

submitit and squeue are stand-ins here; test_slurm.py runs the same against the real ones.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workplace import MADPO, MARLHF, Workplace

from mapl_core import executors, jobs
from mapl_core.plan import AGAIN, Found, PlannedJob

ROOT = Path(__file__).resolve().parent.parent


class Cluster:
    """What a test decides about the cluster, and what the executor asked of it."""

    def __init__(self, place: Workplace, folder: Path):
        self.place, self.folder = place, folder
        self.states: dict[str, str | None] = {}  # by job id; None: Slurm knows it no more
        self.results: dict[str, int] = {}
        self.queue: list[str] | None = []
        self.parameters: dict[str, Any] = {}
        self.submitted: list[str] = []

    # what submitit.AutoExecutor offers
    def update_parameters(self, **parameters: Any) -> None:
        self.parameters = parameters

    def map_array(self, function: Any, planned: Sequence[Any], threads: Sequence[int]) -> list[Any]:
        assert function is executors.run_on_node and set(threads) == {1}
        self.submitted = [entry.job.name for entry in planned]
        return [self._job(f"7_{number}", entry) for number, entry in enumerate(planned)]

    def _job(self, name: str, entry: Any) -> Any:
        pickle, log = self.folder / f"{name}.pkl", self.folder / f"{name}.err"
        if name in self.results:
            self.place.finish(entry.job)
            pickle.write_text("")
        paths = SimpleNamespace(result_pickle=pickle, stderr=log)
        return SimpleNamespace(job_id=name, paths=paths, result=lambda: self.results[name])

    def squeue(self, *arguments: str) -> list[str] | None:
        if "--states=all" in arguments:
            return [f"{name} {state}" for name, state in self.states.items() if state]
        return self.queue


@pytest.fixture
def cluster(place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(place, tmp_path)
    monkeypatch.setattr(executors.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=lambda **_: cluster))
    monkeypatch.setattr(executors, "_squeue", cluster.squeue)
    monkeypatch.setattr(executors.SlurmExecutor, "poll_seconds", 0.01)
    monkeypatch.setattr(executors, "GRACE_SECONDS", 0.05)
    return cluster


REQUEST = ("--methods", "madpo,marlhf", "--paradigms", "dec-dec", "--executor", "slurm")


def test_every_job_becomes_one_task_of_an_array_with_the_profiles_threads(place: Workplace, cluster: Cluster):
    cluster.results = {"7_0": 0, "7_1": 0}
    asked = ("--slurm-partition", "long", "--slurm-minutes", "30", "--slurm-memory", "8", "--slurm-gpus", "1")
    assert place.run(*REQUEST, *asked, "--jobs", "5") == 0
    assert cluster.submitted == [MARLHF.name, MADPO.name]
    name = cluster.parameters.pop("name")
    assert re.fullmatch(r"mapl-[0-9a-f]{8}", name)
    assert cluster.parameters == {
        "timeout_min": 30,
        "cpus_per_task": 1,
        "slurm_array_parallelism": 5,
        "slurm_setup": [f"export PYTHONPATH={shlex.quote(str(ROOT))}"],
        "slurm_partition": "long",
        "mem_gb": 8,
        "gpus_per_node": 1,
    }


def test_what_is_not_asked_for_is_left_to_the_cluster(place: Workplace, cluster: Cluster):
    cluster.results = {"7_0": 0, "7_1": 0}
    assert place.run(*REQUEST) == 0
    names = {"name", "timeout_min", "cpus_per_task", "slurm_array_parallelism", "slurm_setup"}
    assert cluster.parameters.keys() == names and cluster.parameters["slurm_array_parallelism"] == 2


@pytest.mark.parametrize(
    ("state", "log", "told"),
    [
        ("OUT_OF_MEMORY", "", "ended as OUT_OF_MEMORY: raise --slurm-memory"),
        ("TIMEOUT", "", "ended as TIMEOUT: it was not done in 1440 minutes; raise --slurm-minutes"),
        ("FAILED", "Job not requeued because: timed-out and not checkpointable.", "ended as TIMEOUT: it was not done"),
        ("NODE_FAIL", "", "ended as NODE_FAIL: see "),
        ("CANCELLED", "", "ended as CANCELLED: see "),
        (None, "", "ended as gone: see "),
    ],
)
def test_a_job_that_slurm_ended_is_told_with_the_remedy_and_leaves_the_other_running(
    place: Workplace, cluster: Cluster, state: str | None, log: str, told: str, capsys
):
    cluster.states, cluster.results = {"7_0": state, "7_1": "COMPLETED"}, {"7_1": 0}
    (cluster.folder / "7_0.err").write_text(log)
    assert place.run(*REQUEST) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"failed: {MARLHF.name}: 05_tldr.ipynb: Slurm job 7_0 {told}")
    assert "The same command goes on from its checkpoint" in last
    assert jobs.read_failure(place.jobs / MARLHF.name) in last


def test_a_moment_without_an_answer_from_slurm_ends_no_job(place: Workplace, cluster: Cluster, monkeypatch):
    """The controller restarts, say: that is no news of the job."""
    answers = [None, None, ["7_0 RUNNING"], None]

    def squeue(*arguments: str) -> list[str] | None:
        if "--states=all" not in arguments:
            return []
        if not answers:
            place.finish(MADPO)
            (cluster.folder / "7_0.pkl").write_text("")
            cluster.results["7_0"] = 0
            return ["7_0 RUNNING"]
        return answers.pop(0)

    monkeypatch.setattr(executors, "_squeue", squeue)
    monkeypatch.setattr(executors, "GRACE_SECONDS", 0.0)
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec", "--executor", "slurm") == 0
    assert answers == []


def test_jobs_of_a_killed_runner_that_slurm_still_has_are_not_doubled(place: Workplace, cluster: Cluster, capsys):
    cluster.queue = ["7_0", "7_1"]
    assert place.run(*REQUEST) == 2
    error = capsys.readouterr().err
    assert "still queued or running: 7_0, 7_1" in error and re.search(r"`scancel --name=mapl-[0-9a-f]{8}`", error)
    assert cluster.submitted == []


def test_without_slurm_the_message_says_where_to_go(place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(executors.shutil, "which", lambda name: None)
    assert place.run(*REQUEST) == 2
    assert "there is no Slurm here (no sbatch); use a login node" in capsys.readouterr().err
    assert not place.results.exists()


def test_env9_a_missing_submitit_is_told_with_the_line_that_brings_it(place: Workplace, monkeypatch, capsys):
    monkeypatch.setattr(executors.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert place.run(*REQUEST) == 2
    assert (
        "needs the package submitit: `.venv/bin/python -m pip install -r requirements.txt`" in capsys.readouterr().err
    )


def test_run_on_node_is_the_local_start(place: Workplace, started: list[str], monkeypatch: pytest.MonkeyPatch):
    """A damaged job is thrown away on the node when its turn comes, not when it is queued."""
    folder = place.finish(MADPO)
    (folder / "metrics.csv").write_text("")
    (folder / "mark").write_text("x")
    planned = PlannedJob(MADPO, place.notebook, folder, str(place.profile), (), Found(AGAIN), True, True, 1.0)
    start = jobs.start
    monkeypatch.setattr(jobs, "start", lambda *given: start(*given) and SimpleNamespace(wait=lambda: 0))
    assert executors.run_on_node(planned, 1) == 0
    assert started == [MADPO.name] and not (folder / "mark").exists()
