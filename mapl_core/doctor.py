"""What this machine can run: python -m mapl_core.doctor [--profile small]

Looks at Python, the pinned packages, GPU and driver, memory, disk, models, data and sandbox, without loading a model or
going to any network, and says for everything that is not right what to change. Exit code 1 if the profile cannot run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mapl_core.colab import CUDA_13_DRIVER, PYTHONS, driver_version
from mapl_core.endpoint import EndpointError, EndpointSettings, check_endpoint
from mapl_core.grid import DOMAIN_NOTEBOOKS, ROOT
from mapl_core.memory import free_memory
from mapl_core.model_names import HUB_NAME, LOADERS, SMOLLM2, check_model_name
from mapl_core.pocket.common import WEIGHTS, cache_dir
from mapl_core.profiles import Profile, RunConfig, check_rollouts, load_profile

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
KNOBS = "micro_batch_tokens, cached_tokens, samples_per_task"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: OK, WARNING (it runs, but not as well as it could) or FAILURE (the profile cannot run).
        subject: what was looked at, in a word.
        text: what was found, and unless all is well what to do.
    """

    state: str
    subject: str
    text: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it; memory in GiB."""

    name: str
    capability: tuple[int, int]
    memory: float
    free: float


@dataclass(frozen=True)
class Machine:
    """What a diagnosis is made from.

    Attributes:
        python: its version.
        cores: that this process may use.
        memory, disk: free, in GiB; disk is that of the cache folder.
        driver: version of the NVIDIA driver, empty without one.
        cuda_build: CUDA version that torch was built for, empty for a CPU build.
        gpus: those that torch can use.
        packages: name -> installed version.
    """

    python: tuple[int, int]
    cores: int
    memory: float
    disk: float
    driver: str = ""
    cuda_build: str = ""
    gpus: tuple[Gpu, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# Looking
# ---------------------------------------------------------------------------------------------------------------------


def look() -> Machine:
    """The machine that this process runs on."""
    import torch

    folder = next(place for place in (cache_dir(), *cache_dir().parents) if place.exists())
    return Machine(
        python=sys.version_info[:2],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=free_memory(),
        disk=shutil.disk_usage(folder).free / GIB,
        driver=driver_version(),
        cuda_build=torch.version.cuda or "",
        gpus=tuple(_gpus()),
        packages={
            item.metadata["Name"].lower().replace("_", "-"): item.version
            for item in importlib.metadata.distributions()
            if item.metadata["Name"]  # a removed package may leave a nameless trace
        },
    )


def _gpus() -> Iterator[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), total / GIB, free / GIB)


# ---------------------------------------------------------------------------------------------------------------------
# Judging
# ---------------------------------------------------------------------------------------------------------------------


def diagnose(machine: Machine, profile: Profile) -> list[Finding]:
    """Everything that was found about the machine itself, in the order in which it should be put right."""
    return [
        _python(machine),
        *_packages(machine, bool(machine.gpus) or "gpu_gib" in profile.needs),
        *_loaders(machine, profile),
        _gpu(machine, profile),
        _amount("memory", machine.memory, profile.needs.get("memory_gib", 0), f"lower {KNOBS}, or close programs"),
        _amount("disk", machine.disk, profile.needs.get("disk_gib", 0), "name another in MAPL_CACHE and HF_HOME"),
        _cores(machine, profile),
    ]


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.python in PYTHONS:
        return Finding(OK, "python", version)
    supported = " or ".join(".".join(map(str, python)) for python in PYTHONS)
    return Finding(FAILURE, "python", f"{version}; install {supported} and name it in MAPL_PYTHON")


def _packages(machine: Machine, with_gpu: bool) -> Iterator[Finding]:
    """Every pinned file: whether what is installed agrees with it."""
    for name, required in (("requirements.txt", True), *([("requirements-gpu.txt", False)] if with_gpu else [])):
        wrong, missing = [], []
        for requirement in read_requirements(ROOT / name):
            version = machine.packages.get(requirement.name.lower().replace("_", "-"))
            if version is None:
                missing.append(requirement.name)
            elif not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} instead of {requirement.specifier}")
        remedy = "; run: " + shlex.join([sys.executable, "-m", "pip", "install", "-r", str(ROOT / name)])
        if wrong or (missing and required):
            absent = [f"{package} is missing" for package in missing] if required else []
            yield Finding(FAILURE, name, ", ".join([*wrong, *absent]) + remedy)
        elif missing:
            yield Finding(WARNING, name, f"without {', '.join(missing)}{remedy}")
        else:
            yield Finding(OK, name, "all packages as pinned")


def _loaders(machine: Machine, profile: Profile) -> Iterator[Finding]:
    """Ways to hold weights that the profile asks for and that need packages: whether those are there."""
    for loader in sorted({profile.config(domain, "madpo").loader for domain in profile.grid["domains"]}):
        missing = [package for package in LOADERS[loader] if package.replace("_", "-") not in machine.packages]
        if missing:
            remedy = f"run: {sys.executable} -m pip install -r requirements-gpu.txt, or set `loader` to another"
            yield Finding(FAILURE, f"loader {loader}", f"needs {', '.join(missing)}; {remedy}")
        elif LOADERS[loader]:
            yield Finding(OK, f"loader {loader}", "its packages are installed")


def read_requirements(path: Path) -> list:
    """The requirements of a file, comments and included files left out."""
    from packaging.requirements import Requirement

    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def _gpu(machine: Machine, profile: Profile) -> Finding:
    from mapl_core.models import dtype_for

    needed = profile.needs.get("gpu_gib", 0)
    if machine.gpus:
        gpu = machine.gpus[0]
        dtype = str(dtype_for(gpu.capability)).removeprefix("torch.")
        facts = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, weights in {dtype}"
        facts += f", {gpu.free:.0f} of {gpu.memory:.0f} GiB free"
        if gpu.free >= needed:
            return Finding(OK, "gpu", facts)
        return Finding(FAILURE, "gpu", f"{facts}; the profile needs {needed}: lower {KNOBS}, or name smaller models")
    state = FAILURE if needed else WARNING if machine.driver else OK
    wanted = f", and the profile needs one of {needed} GiB" if needed else ""
    if not machine.driver:
        return Finding(state, "gpu", f"none{wanted}" + ("; choose --profile small or pocket" if needed else ""))
    if not machine.cuda_build:
        return Finding(
            state, "gpu", f"torch is a build for the CPU{wanted}; run: MAPL_TORCH=cuda ./reproduce.sh --dry-run"
        )
    if int(machine.driver.split(".")[0]) < CUDA_13_DRIVER and machine.cuda_build.startswith("13"):
        return Finding(
            state,
            "gpu",
            f"driver {machine.driver} is older than r{CUDA_13_DRIVER}, which CUDA {machine.cuda_build} needs{wanted}; "
            "update the driver, or keep the torch of this system with MAPL_TORCH=keep",
        )
    return Finding(state, "gpu", f"torch cannot use the GPU that nvidia-smi shows{wanted}; restart, then look again")


def _amount(subject: str, found: float, needed: float, remedy: str) -> Finding:
    if found >= needed:
        return Finding(OK, subject, f"{found:.1f} GiB free" + (f", {needed:g} needed" if needed else ""))
    return Finding(FAILURE, subject, f"{found:.1f} GiB free, and the profile needs {needed:g}: {remedy}")


def _cores(machine: Machine, profile: Profile) -> Finding:
    if machine.cores >= profile.threads:
        return Finding(OK, "cores", f"{machine.cores}, {profile.threads} for a job")
    return Finding(WARNING, "cores", f"{machine.cores}, and the profile's `threads` is {profile.threads}: lower it")


# ---------------------------------------------------------------------------------------------------------------------
# What the profile needs besides
# ---------------------------------------------------------------------------------------------------------------------


def look_at_needs(profile: Profile) -> Iterator[Finding]:
    """Models, rollout backend, endpoints, tasks and sandbox of the profile's grid."""
    domains = [name for name in DOMAIN_NOTEBOOKS if name in profile.grid["domains"]]
    configs = [profile.config(domain, "madpo", paradigm) for domain in domains for paradigm in ("dec-dec", "dec-cen")]
    for name in dict.fromkeys(name for config in configs for name in config.model_names):
        yield _model(name)
    asked = [config.endpoint_settings for config in configs if config.endpoint_settings]
    for settings in {(each.url, each.model): each for each in asked}.values():
        yield _endpoint(settings)
    for rollouts in dict.fromkeys(config.rollouts for config in configs):
        yield _rollouts(rollouts)
    for config in configs[::2]:
        yield _tasks(config)
    if "coophe" in domains:
        yield _sandbox()


def _model(name: str) -> Finding:
    subject = f"model {name}"
    try:
        check_model_name(name)
    except ValueError as error:
        return Finding(FAILURE, subject, str(error))
    if name.startswith("pocket:"):
        _, domain, size = name.split(":")
        if (WEIGHTS / f"{domain}-{size}" / "config.json").is_file():
            return Finding(OK, subject, "ships with the project")
        built = any(cache_dir().glob(f"pocket/{domain}-{size}-*/build.json"))
        return Finding(OK, subject, "built in the cache" if built else "will be built first, some minutes on one core")
    if name == SMOLLM2:
        here = any(cache_dir().glob(f"{SMOLLM2}-*/model.safetensors"))
        return Finding(OK, subject, "in the cache" if here else "will be downloaded once (93 MB) and converted")
    hub = HUB_NAME.fullmatch(name)
    if Path(name).expanduser().exists() or not hub:
        return Finding(OK, subject, "a folder on this machine")
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub["repo"], "config.json", revision=hub["revision"]), str):
        return Finding(OK, subject, "in the hub's cache")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Finding(FAILURE, subject, "not in the hub's cache, and HF_HUB_OFFLINE forbids the download; unset it")
    return Finding(OK, subject, "will be downloaded from the hub")


def _endpoint(settings: EndpointSettings) -> Finding:
    subject = f"endpoint {settings.model}"
    try:
        check_endpoint(settings)
    except EndpointError as error:
        return Finding(FAILURE, subject, str(error))
    key = f"the key is in {settings.key_variable}" if settings.key_variable else "no key"
    return Finding(OK, subject, f"{settings.url}, {key}; nothing was sent to it")


def _rollouts(rollouts: str) -> Finding:
    try:
        check_rollouts(rollouts)
    except ImportError as error:
        return Finding(FAILURE, "rollouts", str(error))
    return Finding(OK, "rollouts", f"through {rollouts}")


def _tasks(config: RunConfig) -> Finding:
    from mapl_core.domains import get_domain

    subject = f"tasks {config.domain}"
    if config.source == "paper":
        return Finding(OK, subject, "will be downloaded from the hub, or are in its cache")
    reader = get_domain(config.domain, **config.domain_options)
    try:
        found = [
            len(reader.load_tasks(split, config.source, count))
            for split, count in (("train", config.train_tasks), ("eval", config.eval_tasks))
        ]
    except (OSError, ValueError, ImportError) as error:
        return Finding(FAILURE, subject, str(error))
    return Finding(OK, subject, f"{found[0]} for training, {found[1]} for evaluation")


def _sandbox() -> Finding:
    """Programs of CoopHE are run, so say what shuts them in."""
    from mapl_core.sandbox import Sandbox, SandboxError
    from mapl_core.sandbox_process.layers import ESSENTIAL

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing layers: they are listed below
            with Sandbox(workers=1) as sandbox:
                layers = set(sandbox.layers)
    except (SandboxError, OSError) as error:
        return Finding(FAILURE, "sandbox", str(error))
    missing = sorted(set(ESSENTIAL) - layers)
    if not missing:
        return Finding(OK, "sandbox", f"all layers: {', '.join(sorted(layers))}")
    return Finding(WARNING, "sandbox", f"without {', '.join(missing)}; on a shared machine use a container or Linux")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all findings; 0 if the profile can run here, 1 if not, 2 for a profile that does not exist."""
    parser = argparse.ArgumentParser(prog="python -m mapl_core.doctor", description="What this machine can run.")
    parser.add_argument("--profile", default="pocket", help="name of a profile, or a .yaml file; default: pocket")
    options = parser.parse_args(arguments)
    try:
        profile = load_profile(options.profile)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    findings = [*diagnose(look(), profile), *look_at_needs(profile)]
    for finding in findings:
        print(f"{finding.state:8} {finding.subject:30} {finding.text}")
    failures = sum(finding.state == FAILURE for finding in findings)
    verdict = "can run here" if not failures else f"cannot run here yet: {failures} to put right"
    print(f"\nprofile {profile.name} {verdict}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
