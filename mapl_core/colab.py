"""Setting up Google Colab, for the first cell of every notebook; only the standard library is imported here.

Colab starts with a torch that fits its driver. The pinned torch is a build for CUDA 13 and needs a driver of the r580
line: on an older one, or without a GPU, it would be a download of gigabytes that finds no GPU. So the driver decides:
on a new one the pinned torch is installed, else Colab's own stays and the rest is installed around it. A package that
the session has imported already, numpy above all, is never replaced: half of it would be old and half new.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12))
CUDA_13_DRIVER = 580
NEED_PINNED_TORCH = ("unsloth", "unsloth_zoo", "vllm")
MADE_FOR_ONE_TORCH = ("torchvision", "torchaudio", "torchcodec")  # beside another they break imports; none is used
MODEL_PACKAGES = ("transformers", "peft", "trl", "accelerate", "datasets", "gguf")  # of use as pinned only
# Colab is server and kernel itself, and runs notebooks one at a time.
OF_THE_RUNNER = ("ipykernel", "jupyterlab", "jupytext", "nbclient", "papermill", "submitit")
RESTART = "choose Runtime > Restart session, then run this cell before any other"


@dataclass(frozen=True)
class Session:
    """What a set-up is decided from.

    Attributes:
        python: its version.
        driver: version of the NVIDIA driver, such as "550.54.15"; empty without a GPU.
        installed: package -> version.
        imported: the packages of which this session has imported something.
    """

    python: tuple[int, int]
    driver: str
    installed: Mapping[str, str]
    imported: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """What pip installs, what it removes first, what must stay as it is, and why, for the reader."""

    install: list[str]
    remove: list[str]
    hold: list[str]
    words: str


def driver_version() -> str:
    """Version of the NVIDIA driver, such as "580.65.06"; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[0] if found else ""


def look() -> Session:
    """The session that this process is."""
    installed = {_canonical(item.metadata["Name"]): item.version for item in metadata.distributions()}
    packages_of = metadata.packages_distributions()
    modules = {name.split(".")[0] for name in sys.modules}
    imported = {_canonical(package) for module in modules for package in packages_of.get(module, ())}
    return Session(sys.version_info[:2], driver_version(), installed, frozenset(imported))


def decide(session: Session, extras: Sequence[str] = (), root: Path = ROOT) -> Decision:
    """What a session gets.

    Args:
        session: what was found.
        extras: packages of requirements-gpu.txt that are wanted besides.
        root: the folder of the requirements files.

    Raises:
        RuntimeError: if the session cannot be set up as it is; the message says what to choose.
        ValueError: for an extra that requirements-gpu.txt does not list.
    """
    if session.python not in PYTHONS:
        raise RuntimeError(
            f"this runtime has Python {_dotted(session.python)}, and the packages are pinned for "
            f"{' and '.join(map(_dotted, PYTHONS))}: choose Runtime > Change runtime type, take a runtime version with "
            "one of these, then run this cell again"
        )
    offered = read_requirements(root / "requirements-gpu.txt")
    if unknown := [extra for extra in extras if extra not in offered]:
        raise ValueError(f"unknown extra {', '.join(unknown)}; requirements-gpu.txt lists {', '.join(offered)}")
    wanted = read_requirements(root / "requirements.txt") | {extra: offered[extra] for extra in extras}
    wanted = {package: line for package, line in wanted.items() if package not in OF_THE_RUNNER}
    keeps_torch, words = _about_torch(session, wanted["torch"].removeprefix("torch=="), extras)
    hold = [f"torch=={session.installed['torch']}"] if keeps_torch else []
    if keeps_torch:
        del wanted["torch"]
    for package in [package for package in wanted if _canonical(package) in session.imported]:
        version = session.installed[_canonical(package)]
        line = wanted.pop(package)
        hold.append(f"{package}=={version}")
        if package in MODEL_PACKAGES and line != hold[-1]:
            raise RuntimeError(f"{package} {version} is imported already, and {line} is wanted: {RESTART}")
        words += f"; {package} {version} is in use and stays"
    return Decision(list(wanted.values()), [] if keeps_torch else list(MADE_FOR_ONE_TORCH), hold, words)


def _about_torch(session: Session, pinned: str, extras: Sequence[str]) -> tuple[bool, str]:
    """Whether the torch that is there stays, and why."""
    have = session.installed.get("torch", "")
    if have.split("+")[0] == pinned:
        return True, f"torch {have} is the pinned one already"
    if session.driver and int(session.driver.split(".")[0]) >= CUDA_13_DRIVER:
        if "torch" in session.imported:
            raise RuntimeError(f"torch {have} is imported already, and {pinned} is wanted: {RESTART}")
        return False, f"driver {session.driver}: torch {pinned} is installed"
    why = f"driver {session.driver} is older than r{CUDA_13_DRIVER}" if session.driver else "there is no GPU"
    if needy := [extra for extra in extras if extra in NEED_PINNED_TORCH]:
        raise RuntimeError(
            f"{', '.join(needy)} needs torch {pinned}, a build for CUDA 13, and {why}: choose Runtime > Change runtime "
            "type and take a newer runtime version with a GPU, or install bitsandbytes alone and take the profile "
            "paper-t4"
        )
    if not have:
        raise RuntimeError(
            f"{why}, and there is no torch: choose Runtime > Disconnect and delete runtime, then begin anew"
        )
    return True, f"{why}: torch {have} of this runtime stays, instead of {pinned}"


def set_up(*extras: str) -> None:
    """Install what the notebooks need into this Colab session, and say what was decided.

    Args:
        extras: packages of requirements-gpu.txt besides: "bitsandbytes" for the profile paper-t4; "bitsandbytes",
            "unsloth", "unsloth_zoo" and "vllm" for the profile paper.

    Raises:
        RuntimeError, ValueError: as for `decide`, and if pip fails.
    """
    decision = decide(look(), extras)
    print(decision.words)
    pip, held = [sys.executable, "-m", "pip"], ROOT / ".colab-held.tmp"
    held.write_text("\n".join(decision.hold) + "\n", encoding="utf-8")
    install = [*pip, "install", "--quiet", "--constraint", str(held)]
    try:
        if decision.remove:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *decision.remove], check=True)
        subprocess.run([*install, *decision.install], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"pip failed; its message is above. If it names a package that is in use: {RESTART}"
        ) from error
    finally:
        held.unlink()
    importlib.invalidate_caches()


def read_requirements(path: Path) -> dict[str, str]:
    """Package -> its line in a requirements file, without comments and included files."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {re.match(r"[\w.-]+", line)[0]: line for line in lines if line and not line.startswith("-")}


def _canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package or "").lower()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
