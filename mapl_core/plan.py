"""The plan of a request: what each job's folder holds, what must run, and what stands in the way. Writes nothing.

Neither torch nor the notebooks are imported here, so that a plan, or the status table, costs a second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mapl_core import jobs
from mapl_core.grid import BASELINES_NOTEBOOK, NOTEBOOK_FOLDER, Job, Request, UsageError, jobs_below
from mapl_core.inputs import PROGRAM, Inputs, changed_inputs, changed_parameters
from mapl_core.memory import free_memory
from mapl_core.results import MANIFEST_FILE, ResultError, as_plain, lock_is_held, read_progress, verify_job

MEMORY_KNOBS = ("micro_batch_tokens", "cached_tokens", "samples_per_task")
ORPHAN_SECONDS = 30  # a job whose runner was killed ends in less

DONE, RUNNING, FAILED, RESUMABLE, TO_DO = "done", "running", "failed", "resumable", "to do"
AGAIN = "to do again"  # something is missing or damaged
OUTDATED = "outdated"  # made with other settings, code, tasks or weights
STATES = (DONE, RUNNING, FAILED, RESUMABLE, TO_DO, AGAIN, OUTDATED)


# ---------------------------------------------------------------------------------------------------------------------
# What lies in a job's folder
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a job's folder holds.

    Attributes:
        state: one of STATES.
        detail: why, or how far, for the reader.
        fraction: of its iterations that a checkpoint has behind it; 1 for a whole run.
        seconds: of a whole run, as its manifest says; 0 for others.
        memory_mib: the most that a whole run's process held; 0 for others.
        is_whole: whether every number is there, whatever the state.
    """

    state: str
    detail: str = ""
    fraction: float = 0.0
    seconds: float = 0.0
    memory_mib: int = 0
    is_whole: bool = False

    @property
    def is_unusable(self) -> bool:
        """Whether it has ended with numbers that no table may use: damaged, or made from something else."""
        return self.is_whole if self.state == OUTDATED else self.state == AGAIN and not self.is_whole

    def __str__(self) -> str:
        return f"{self.state}: {self.detail}" if self.detail else self.state


def look_into(notebook: Path, folder: Path, config: Any, inputs: Inputs) -> Found:
    """What the folder holds of the run that `config` asks for, by content and never by mere existence."""
    if any(lock_is_held(folder, name=name) for name in (jobs.JOB_LOCK, ".lock")):
        progress = read_progress(folder)
        return Found(RUNNING, _iteration(progress), progress["fraction"] if progress else 0.0)
    if not (folder / MANIFEST_FILE).exists():
        return _look_into_unfinished(folder, config, inputs)
    try:
        manifest = verify_job(folder)
    except ResultError as error:
        return Found(AGAIN, str(error))
    memory = int(manifest.get("peak_memory_mib", {}).get("process", 0))
    whole = Found(DONE, "", 1.0, float(manifest.get("seconds", 0)), memory, True)
    try:
        jobs.check_done(notebook, folder)
    except ResultError as error:
        failure = jobs.read_failure(folder)
        return replace(whole, state=FAILED if failure else AGAIN, detail=failure or str(error))
    changes = _changes(manifest, config, inputs)
    return replace(whole, state=OUTDATED, detail="; ".join(changes)) if changes else whole


def _look_into_unfinished(folder: Path, config: Any, inputs: Inputs) -> Found:
    progress, failure = read_progress(folder), jobs.read_failure(folder)
    fraction = progress["fraction"] if progress else 0.0
    changes = _changes(progress, config, inputs) if progress else []
    if changes:
        return Found(OUTDATED, f"stopped at {_iteration(progress)}; {'; '.join(changes)}", fraction)
    if failure:
        return Found(FAILED, failure + (f" (goes on from {_iteration(progress)})" if progress else ""), fraction)
    if progress or any(folder.glob("checkpoint*")):
        return Found(RESUMABLE, _iteration(progress), fraction)
    return Found(TO_DO)


def _iteration(progress: Mapping[str, Any] | None) -> str:
    return f"iteration {progress['iteration']} of {progress['iterations']}" if progress else ""


def _changes(made: Mapping[str, Any], config: Any, inputs: Inputs) -> list[str]:
    """Why a manifest or checkpoint is not what the profile, code, tasks and weights would give today."""
    then = made.get("inputs") or {}
    now = inputs.of(config, then.get("program", PROGRAM))
    return changed_parameters(made.get("parameters", {}), as_plain(asdict(config))) + changed_inputs(then, now)


@dataclass(frozen=True)
class Survey:
    """The jobs of a request and what was found of them, and of every other job below the profile's folder."""

    request: Request
    profile: Any
    folder: Path
    asked: list[Job]
    found: dict[Job, Found]
    notebook_folder: Path

    def config(self, job: Job) -> Any:
        """The job's RunConfig."""
        return self.profile.config(domain=job.domain, method=job.method, paradigm=job.paradigm, seed=job.seed)

    def notebook(self, job: Job) -> Path:
        return self.notebook_folder / job.notebook

    def job_folder(self, job: Job) -> Path:
        return self.folder / "jobs" / job.name


def survey(request: Request, notebook_folder: Path = NOTEBOOK_FOLDER, inputs: Inputs | None = None) -> Survey:
    """Look into the folder of every job, asked for or not.

    Args:
        inputs: code, tasks and weights as they are now; read here if not given.

    Raises:
        ValueError (UsageError, ConfigError): for a profile, or values of it, that cannot work.
    """
    from mapl_core.profiles import load_profile

    profile = load_profile(request.profile)
    request = request.with_defaults(profile.grid)
    folder = request.results / profile.name
    seen = Survey(request, profile, folder, request.jobs, {}, notebook_folder)
    inputs = inputs or Inputs()
    others = [job for job in jobs_below(folder) if job.domain in profile.domains]
    for job in dict.fromkeys([*seen.asked, *others]):
        seen.found[job] = look_into(seen.notebook(job), seen.job_folder(job), seen.config(job), inputs)
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedJob:
    """A job and what is to happen to it.

    Attributes:
        profile: name, or path of the YAML, as the notebook takes it.
        knobs: what to lower if memory runs out, with the present values.
        found: what its folder holds.
        is_to_run: whether it runs at all.
        afresh: whether what lies in its folder is thrown away first.
        cost: seconds that it may take, or a share of the whole where nothing was measured yet.
    """

    job: Job
    notebook: Path
    folder: Path
    profile: str
    knobs: tuple[str, ...]
    found: Found
    is_to_run: bool
    afresh: bool
    cost: float

    @property
    def parameters(self) -> dict[str, Any]:
        job = self.job
        values = {"PROFILE": self.profile, "METHOD": job.method, "PARADIGM": job.paradigm, "SEED": job.seed}
        values |= {"DOMAIN": job.domain} if job.notebook == BASELINES_NOTEBOOK else {}
        return values | {"OUTPUT_DIR": str(self.folder)}

    @property
    def fraction(self) -> float:
        """Share of its work that it need not do."""
        return 0.0 if self.afresh else self.found.fraction


@dataclass(frozen=True)
class Plan:
    """All jobs of a request, the profile's folder, how many run at a time, and other jobs that no table may use.

    Those are outdated or damaged: `left_out`. `gpus` are the ids of this machine's GPUs, over which its running jobs
    are spread.
    """

    profile_name: str
    folder: Path
    threads: int
    workers: int
    jobs: list[PlannedJob]
    left_out: list[str]
    gpus: tuple[str, ...] = ()

    @property
    def to_run(self) -> list[PlannedJob]:
        """What must run, the long ones first: then the last to end does not keep everyone waiting."""
        return sorted((planned for planned in self.jobs if planned.is_to_run), key=lambda planned: -planned.cost)


def make_plan(request: Request, notebook_folder: Path = NOTEBOOK_FOLDER, inputs: Inputs | None = None) -> Plan:
    """Check everything that can be checked before work, and find out what is done. Writes nothing.

    Args:
        request: what the command line asks for.
        notebook_folder: where the jobs' notebooks are.
        inputs: as for `survey`.

    Raises:
        ValueError (UsageError, ResultError, ConfigError): for values, notebooks, models or data that cannot work, and
            for work that was made with other settings, code, tasks or weights.
    """
    seen = survey(request, notebook_folder, inputs)
    request = seen.request
    measured = {job: found.seconds for job, found in seen.found.items() if found.seconds}
    planned = [_plan_job(seen, job, expected_seconds(job, measured)) for job in seen.asked]
    _check_models(seen, [entry.job for entry in planned if entry.is_to_run])
    _check_data(seen)
    outdated = {job: found.detail for job, found in seen.found.items() if found.state == OUTDATED}
    blocked = [f"  {job.name}: {outdated[job]}" for job in seen.asked if job in outdated]
    if blocked and not request.force:
        listed = "\n".join(blocked)
        raise UsageError(
            f"jobs in {seen.folder} were made with other settings, code, tasks or weights:\n{listed}\n"
            "give --force outdated to run just these again, --force to run all again, or --results DIR to keep both"
        )
    others = {job: found for job, found in seen.found.items() if job not in seen.asked}
    left_out = sorted(job.name for job, found in others.items() if found.is_unusable)
    gpus = () if request.slurm else _gpus()
    workers = _workers(seen, len(gpus))
    return Plan(seen.profile.name, seen.folder, seen.profile.threads, workers, planned, left_out, gpus)


def _plan_job(seen: Survey, job: Job, cost: float) -> PlannedJob:
    found, config, folder = seen.found[job], seen.config(job), seen.job_folder(job)
    forced = folder.exists() and seen.request.force in ("all", found.state)
    knobs = tuple(f"{name} (now {getattr(config, name)})" for name in MEMORY_KNOBS)
    planned = PlannedJob(
        job=job,
        notebook=seen.notebook(job),
        folder=folder,
        profile=seen.request.profile,
        knobs=knobs,
        found=found,
        is_to_run=forced or found.state != DONE,
        afresh=forced or (found.state == AGAIN and not found.is_whole),
        cost=cost,
    )
    jobs.check_names(planned.notebook, planned.parameters)
    return planned


def expected_seconds(job: Job, measured: Mapping[Job, float]) -> float:
    """What a job may take: what the same cell took with other seeds, else its usual share of what others took.

    Args:
        measured: seconds of finished jobs; without any, the result is the bare share.
    """
    same_cell = [seconds for other, seconds in measured.items() if replace(other, seed=job.seed) == job]
    if same_cell:
        return statistics.mean(same_cell)
    by_share = {other: seconds / other.weight for other, seconds in measured.items()}
    same_domain = [rate for other, rate in by_share.items() if other.domain == job.domain]
    return job.weight * statistics.median(same_domain or list(by_share.values()) or [1.0])


def await_orphans(planned: Iterable[PlannedJob], seconds: float = ORPHAN_SECONDS) -> None:
    """Wait for jobs that an earlier, killed runner left behind: they end by themselves, but not at once.

    Raises:
        UsageError: if one still runs after that time; somebody else has started it then.
    """
    deadline = time.monotonic() + seconds
    for entry in planned:
        while any(lock_is_held(entry.folder, name=name) for name in (jobs.JOB_LOCK, ".lock")):
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"{entry.job.name} is being run by another process in {entry.folder}; wait for it or end it (on "
                    "Slurm with squeue and scancel), then give the same command again"
                )
            time.sleep(0.1)


def _workers(seen: Survey, gpus: int) -> int:
    """As asked. Else on Slurm as many as it lets in; here one job for every `threads` cores, if free memory holds them.

    But jobs with the paper's models fill a GPU, so of these one runs on each GPU.
    """
    request, threads = seen.request, seen.profile.threads
    if request.workers:
        return request.workers
    if request.slurm:
        return max(1, len(seen.asked))
    sources = {seen.config(job).source for job in seen.asked}
    if "paper" in sources and gpus:
        return gpus
    held = seen.profile.needs.get("memory_gib")
    return max(1, min(_cores() // threads, int(free_memory() // held) if held else _cores()))


def _check_models(seen: Survey, to_run: Sequence[Job]) -> None:
    """Look once at loaders, rollout backends, models and endpoints' keys, before any job starts; nothing is loaded."""
    from mapl_core.endpoint import check_endpoint
    from mapl_core.model_names import check_loader, check_model_name
    from mapl_core.profiles import check_rollouts

    configs = [seen.config(job) for job in to_run]
    for config in configs:
        if config.endpoint_settings:
            check_endpoint(config.endpoint_settings)
    for loader, rollouts in sorted({(config.loader, config.rollouts) for config in configs}):
        try:
            check_loader(loader)
            check_rollouts(rollouts)
        except ImportError as error:
            raise UsageError(str(error)) from None
    for name in sorted({name for job in to_run for name in seen.config(job).model_names}):
        check_model_name(name)
        if Path(name).is_dir() and not Path(name).is_absolute():
            raise UsageError(
                f"model {name!r} is a folder seen from here, and every job works in a folder of its own; give its "
                f"absolute path, {Path(name).resolve()}"
            )


def _check_data(seen: Survey) -> None:
    """Read the tasks once before any job starts, so that a damaged data file stops the run in its first seconds."""
    from mapl_core.domains import get_domain

    for domain, job in {job.domain: job for job in reversed(seen.asked)}.items():
        config = seen.config(job)
        if config.source == "paper":
            continue  # a download; its job does it
        reader = get_domain(domain, **config.domain_options)
        for split, count in (("train", config.train_tasks), ("eval", config.eval_tasks)):
            reader.load_tasks(split, config.source, count)


def _gpus() -> tuple[str, ...]:
    """Ids of the GPUs that jobs may use: those that CUDA_VISIBLE_DEVICES names, else all of this machine."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found and chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    return tuple(name for name in found if name.startswith("GPU-"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_plan(plan: Plan) -> str:
    """What `--dry-run` prints."""
    lines = [f"{planned.job.name:32} {describe_job(planned)}" for planned in plan.jobs]
    return "\n".join([*lines, summary(plan), f"results: {plan.folder}"])


def describe_job(planned: PlannedJob) -> str:
    """What is known of a job, and that it is run again where somebody forces it."""
    forced = planned.is_to_run and planned.afresh and planned.found.state != AGAIN
    return f"{AGAIN} (--force)" if forced else str(planned.found)


def summary(plan: Plan) -> str:
    done = len(plan.jobs) - len(plan.to_run)
    spread = f", spread over {len(plan.gpus)} GPUs" if len(plan.gpus) > 1 else ""
    return (
        f"{len(plan.jobs)} jobs of profile {plan.profile_name}: {done} done, {len(plan.to_run)} to run, "
        f"{plan.workers} at a time, {plan.threads} thread{'' if plan.threads == 1 else 's'} each{spread}"
    )
