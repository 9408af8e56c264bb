"""Where jobs run: as child processes of the runner, or as the jobs of a Slurm cluster.

Both run a notebook by `mapl_core.jobs.start` and leave the same files in the same folders, so that an interrupted run
may be continued by the other. An executor takes planned jobs with `submit`, hands back in `finished` those that ended
since it was last asked, and ends the others with `cancel`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mapl_core import jobs, warm
from mapl_core.grid import DAY_MINUTES, ROOT, SlurmOptions, UsageError
from mapl_core.plan import Plan, PlannedJob

KILLED, TERMINATED = -9, (143, -15)
GRACE_SECONDS = 20  # a result may show up later on a shared file system than the end of its job in Slurm
CANCEL_SECONDS = 60
ENDED_STATES = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
SUBMITIT_LINE = "`.venv/bin/python -m pip install -r requirements.txt` brings it"


@dataclass(frozen=True)
class Ended:
    """A job that ended: its exit code, and who ended it and why where that is known to have been somebody else."""

    planned: PlannedJob
    exit_code: int
    killed_by: str = ""


class Executor(Protocol):
    """Runs jobs somewhere. `poll_seconds` is how often it likes to be asked."""

    poll_seconds: float

    def submit(self, planned: Sequence[PlannedJob]) -> None:
        """Take jobs; called once."""

    def running(self) -> list[PlannedJob]:
        """Those that run just now."""

    def finished(self) -> list[Ended]:
        """Those that ended since the last call. Never waits."""

    def cancel(self) -> None:
        """End what has not ended, and return when nothing writes any more."""


def make_executor(plan: Plan, slurm: SlurmOptions | None) -> Executor:
    """The executor of a plan.

    Raises:
        UsageError: if there is no Slurm here, or an earlier runner's jobs are still in its queue.
    """
    return SlurmExecutor(plan, slurm) if slurm else LocalExecutor(plan)


def begin(planned: PlannedJob, threads: int, gpu: str = "", is_warm: bool = False) -> subprocess.Popen | warm.Child:
    """Start a job: from its checkpoint where one is, from nothing where its results are damaged or not wanted.

    Args:
        planned: the job.
        threads: of its numerical libraries.
        gpu, is_warm: as for `jobs.start`.
    """
    if planned.afresh:
        shutil.rmtree(planned.folder, ignore_errors=True)
    return jobs.start(planned.notebook, planned.folder, planned.parameters, threads, DAY_MINUTES, gpu, is_warm)


class LocalExecutor:
    """Child processes, `plan.workers` at a time, each on the GPU of this machine that has the fewest of them."""

    poll_seconds = 0.2

    def __init__(self, plan: Plan):
        self._workers, self._threads, self._gpus = plan.workers, plan.threads, plan.gpus
        # The jobs that can begin at once would wait for the first imports either way.
        self._is_warm = warm.can_start_warm(plan.gpus) and len(plan.to_run) > plan.workers
        self._waiting: list[PlannedJob] = []
        self._running: dict[PlannedJob, subprocess.Popen | warm.Child] = {}
        self._gpu_of: dict[PlannedJob, str] = {}
        self._unstarted: list[Ended] = []

    def submit(self, planned: Sequence[PlannedJob]) -> None:
        self._waiting = list(planned)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            planned = self._waiting.pop(0)
            try:
                gpu = self._least_busy_gpu()
                self._running[planned] = begin(planned, self._threads, gpu, self._is_warm)
                self._gpu_of[planned] = gpu
            except OSError as error:  # such as a full disk: the others go on
                self._unstarted.append(Ended(planned, KILLED, f"it could not be started: {error}"))

    def _least_busy_gpu(self) -> str:
        busy = Counter(self._gpu_of[planned] for planned in self._running)
        return min(self._gpus, key=busy.__getitem__, default="")

    def running(self) -> list[PlannedJob]:
        return list(self._running)

    def finished(self) -> list[Ended]:
        ended = [planned for planned, process in self._running.items() if process.poll() is not None]
        result = self._unstarted + [Ended(planned, self._running.pop(planned).returncode) for planned in ended]
        self._unstarted = []
        self._fill()
        return result

    def cancel(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Slurm
# ---------------------------------------------------------------------------------------------------------------------


def run_on_node(planned: PlannedJob, threads: int) -> int:
    """What a Slurm job does, on whatever node it got: the job's child process, and its exit code."""
    return begin(planned, threads).wait()


class SlurmExecutor:
    """One Slurm job for each notebook job, in one array of which `plan.workers` run at a time, through submitit.

    The results folder, the checkout and its .venv must be seen by the nodes under the same paths. Scripts and logs of
    Slurm lie in slurm/ beside jobs/.
    """

    poll_seconds = 2.0

    def __init__(self, plan: Plan, options: SlurmOptions):
        submitit = _import_submitit()
        # Named after the results folder: this is how a later runner finds jobs whose own runner was killed.
        name = f"mapl-{hashlib.sha256(str(plan.folder).encode()).hexdigest()[:8]}"
        _refuse_leftovers(name, plan.folder)
        executor = submitit.AutoExecutor(folder=plan.folder / "slurm", cluster="slurm")
        asked = {"slurm_partition": options.partition, "mem_gb": options.memory_gb, "gpus_per_node": options.gpus}
        executor.update_parameters(
            name=name,
            timeout_min=options.minutes,
            cpus_per_task=plan.threads,
            slurm_array_parallelism=plan.workers,
            slurm_setup=[f"export PYTHONPATH={shlex.quote(str(ROOT))}"],
            **{key: value for key, value in asked.items() if value is not None},
        )
        self._executor, self._name, self._may_have_jobs = executor, name, False
        self._threads, self._minutes = plan.threads, options.minutes
        self._jobs: dict[PlannedJob, Any] = {}
        self._states: dict[str, str] = {}
        self._ended_at: dict[PlannedJob, float] = {}

    def submit(self, planned: Sequence[PlannedJob]) -> None:
        """Queue all jobs at once. Raises UsageError with Slurm's own words if it refuses them."""
        if not planned:
            return
        self._may_have_jobs = True  # from here on; an interruption may come before submitit has returned them
        try:
            submitted = self._executor.map_array(run_on_node, planned, [self._threads] * len(planned))
        except Exception as error:  # submitit has several, and Slurm's message is in each
            raise UsageError(f"Slurm refused the jobs: {error}; correct the --slurm options, or see `sinfo`") from None
        self._jobs = dict(zip(planned, submitted, strict=True))

    def running(self) -> list[PlannedJob]:
        return [planned for planned, job in self._jobs.items() if self._states.get(job.job_id) == "RUNNING"]

    def finished(self) -> list[Ended]:
        states = _job_states([job.job_id for job in self._jobs.values()])
        if states is not None:
            self._states = states
        found = [self._look_at(planned, job, states is not None) for planned, job in self._jobs.items()]
        result = [ended for ended in found if ended]
        for ended in result:
            del self._jobs[ended.planned]
        self._may_have_jobs = bool(self._jobs)
        return result

    def _look_at(self, planned: PlannedJob, job: Any, is_news: bool) -> Ended | None:
        """How the job ended, if it did: by its result, or, where it could not leave one, by what Slurm says."""
        if job.paths.result_pickle.exists():
            try:
                code = job.result()
            except Exception:  # the node's traceback: submitit stopped the job, or could not start it
                return Ended(planned, KILLED, self._why(job))
            return Ended(planned, KILLED, self._why(job)) if code in TERMINATED else Ended(planned, code)
        state = self._states.get(job.job_id, "gone")
        if not is_news:
            return None
        if state not in (*ENDED_STATES, "gone"):
            self._ended_at.pop(planned, None)
            return None
        if time.monotonic() < self._ended_at.setdefault(planned, time.monotonic()) + GRACE_SECONDS:
            return None
        return Ended(planned, KILLED, self._why(job))

    def _why(self, job: Any) -> str:
        state = self._states.get(job.job_id, "gone")
        log = job.paths.stderr
        remedy = {
            "TIMEOUT": f"it was not done in {self._minutes} minutes; raise --slurm-minutes",
            "OUT_OF_MEMORY": "raise --slurm-memory",
        }.get(state, f"see {log}")
        text = log.read_text(errors="replace") if log.is_file() else ""
        if "timed-out and not checkpointable" in text:  # submitit ends a job shortly before Slurm would
            state, remedy = "TIMEOUT", f"it was not done in {self._minutes} minutes; raise --slurm-minutes"
        return f"Slurm job {job.job_id} ended as {state}: {remedy}. The same command goes on from its checkpoint"

    def cancel(self) -> None:
        if not (self._may_have_jobs and self._left()):
            return
        subprocess.run(["scancel", f"--name={self._name}"], check=False, capture_output=True)
        deadline = time.monotonic() + CANCEL_SECONDS
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.5)

    def _left(self) -> bool:
        """Whether one of the jobs is queued or running; also if Slurm cannot be asked."""
        return _squeue(f"--name={self._name}", "--format=%i") != []


def _import_submitit() -> Any:
    if shutil.which("sbatch") is None:
        raise UsageError("there is no Slurm here (no sbatch); use a login node of the cluster, or --executor local")
    try:
        import submitit
    except ImportError:
        raise UsageError(f"--executor slurm needs the package submitit: {SUBMITIT_LINE}") from None
    return submitit


def _refuse_leftovers(name: str, folder: Path) -> None:
    """Jobs of a runner that was killed go on in Slurm; two at work on one folder would wait for each other."""
    left = _squeue(f"--name={name}", "--format=%i")
    if left:
        raise UsageError(
            f"Slurm jobs of an earlier run for {folder} are still queued or running: {', '.join(left)}. Wait for them, "
            f"or end them with `scancel --name={name}`; then give the same command again"
        )


def _job_states(ids: Sequence[str]) -> dict[str, str] | None:
    """State of each Slurm job; those that Slurm has forgotten are left out. None if Slurm cannot be asked now."""
    lines = _squeue("--states=all", f"--jobs={','.join(ids)}", "--format=%i %T") if ids else []
    return None if lines is None else dict(line.split() for line in lines)


def _squeue(*arguments: str) -> list[str] | None:
    asked = ["squeue", "--noheader", "--array", *arguments]
    run = subprocess.run(asked, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if run.returncode and "Invalid job id" not in run.stderr:
        return None
    return run.stdout.splitlines()
