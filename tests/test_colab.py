"""The set-up of Colab: what a session gets follows from its Python, driver, torch and what it has imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mapl_core import colab
from mapl_core.colab import Session, decide, read_requirements

ROOT = Path(__file__).resolve().parent.parent
PINS = read_requirements(ROOT / "requirements.txt")
# As on Colab: a torch for CUDA 12, the vision package made for it, a kernel and numpy in use.
INSTALLED = {
    "torch": "2.9.0+cu126",
    "torchvision": "0.24.0",
    "numpy": "2.0.2",
    "ipykernel": "6.17.1",
    "pandas": "2.2.2",
}
T4 = Session((3, 12), "550.54.15", INSTALLED, frozenset({"numpy", "ipykernel"}))
NEW_DRIVER = replace(T4, driver="580.65.06")


def names(lines: list[str]) -> set[str]:
    return {line.split("=")[0].split(">")[0].split("<")[0] for line in lines}


def test_an_old_driver_keeps_the_torch_that_finds_its_gpu():
    found = decide(T4)
    assert "torch" not in names(found.install) and "torch==2.9.0+cu126" in found.hold and found.remove == []
    assert found.words.startswith("driver 550.54.15 is older than r580: torch 2.9.0+cu126 of this runtime stays")
    assert {PINS["transformers"], PINS["peft"], PINS["trl"]} <= set(found.install), "everything else is pinned"


def test_without_a_gpu_no_cuda_build_is_downloaded():
    found = decide(replace(T4, driver=""))
    assert "torch" not in names(found.install) and "torch==2.9.0+cu126" in found.hold
    assert found.words.startswith("there is no GPU: torch 2.9.0+cu126 of this runtime stays")


def test_a_new_driver_gets_the_pinned_torch_without_the_packages_that_were_made_for_the_old_one():
    found = decide(NEW_DRIVER)
    assert PINS["torch"] in found.install and "torch" not in names(found.hold)
    assert "torchvision" in found.remove and "torchaudio" in found.remove


def test_the_pinned_torch_is_left_alone_wherever_it_is():
    have = {**INSTALLED, "torch": PINS["torch"].removeprefix("torch==") + "+cpu"}
    for session in (replace(T4, installed=have), replace(NEW_DRIVER, installed=have)):
        session = replace(session, imported=frozenset({"torch"}))
        found = decide(session)
        assert "torch" not in names(found.install) and found.remove == []
        assert f"torch=={have['torch']}" in found.hold


def test_env2_what_is_imported_is_never_replaced():
    """numpy 2.0.2 lies outside the range of the requirements: it is held all the same, and not asked for."""
    for session in (T4, NEW_DRIVER, replace(T4, imported=T4.imported | {"pandas"})):
        found = decide(session)
        assert names(found.install) & session.imported == set()
        assert "numpy==2.0.2" in found.hold and "numpy 2.0.2 is in use and stays" in found.words
    assert "pandas==2.2.2" in found.hold
    assert PINS["numpy"] in decide(replace(T4, imported=frozenset())).install


@pytest.mark.parametrize("package", ["torch", "transformers", "peft"])
def test_a_model_package_of_another_version_that_is_in_use_needs_a_restart(package):
    installed = {**INSTALLED, "transformers": "4.57.0", "peft": "0.17.0"}
    session = replace(NEW_DRIVER, installed=installed, imported=frozenset({package}))
    with pytest.raises(RuntimeError, match=rf"{package} .* is imported already, and .*Runtime > Restart session"):
        decide(session)
    pinned = {name: line.split("==")[1] for name, line in PINS.items() if "==" in line}
    found = decide(replace(session, installed={**installed, **pinned}))
    assert f"{package}=={pinned[package]}" in found.hold, "a second run of the cell changes nothing"


def test_the_kernel_and_what_the_runner_alone_needs_are_not_touched():
    assert names(decide(replace(T4, imported=frozenset())).install) & set(colab.OF_THE_RUNNER) == set()
    assert set(colab.OF_THE_RUNNER) <= PINS.keys(), "or the list is out of date"


@pytest.mark.parametrize("python", [(3, 10), (3, 13)])
def test_another_python_is_told_what_to_choose(python):
    with pytest.raises(
        RuntimeError, match=r"Python 3\.1[03], .* 3\.11 and 3\.12: choose Runtime > Change runtime type"
    ):
        decide(replace(T4, python=python))


def test_4_bit_bases_come_on_any_driver_and_the_rest_of_the_gpu_set_on_a_new_one():
    gpu = read_requirements(ROOT / "requirements-gpu.txt")
    assert gpu["bitsandbytes"] in decide(T4, ["bitsandbytes"]).install
    assert set(gpu.values()) <= set(decide(NEW_DRIVER, list(gpu)).install)
    for session in (T4, replace(T4, driver="")):
        with pytest.raises(RuntimeError, match="vllm needs torch .*newer runtime version with a GPU, .*paper-t4"):
            decide(session, ["bitsandbytes", "vllm"])
    with pytest.raises(ValueError, match="unknown extra flash; requirements-gpu.txt lists unsloth"):
        decide(T4, ["flash"])


def test_a_runtime_without_torch_and_gpu_is_begun_anew():
    with pytest.raises(RuntimeError, match="there is no GPU, and there is no torch"):
        decide(replace(T4, driver="", installed={}))


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[list[str]]:
    """The commands that a set-up runs; nothing is executed."""
    found: list[list[str]] = []
    monkeypatch.setattr(colab.subprocess, "run", lambda command, **_: found.append(command))
    return found


def test_set_up_removes_then_installs_under_the_held_versions_then_the_project(calls, monkeypatch, capsys):
    monkeypatch.setattr(colab, "look", lambda: NEW_DRIVER)
    colab.set_up()
    removed, installed, project = (call[3:] for call in calls)
    assert removed == ["uninstall", "--quiet", "--yes", *colab.MADE_FOR_ONE_TORCH]
    assert installed[:3] == ["install", "--quiet", "--constraint"] and PINS["torch"] in installed
    assert project[-3:] == ["--no-deps", "--editable", str(ROOT)]
    assert capsys.readouterr().out.startswith("driver 580.65.06: torch ")
    assert not Path(installed[3]).exists(), "the list of held versions is removed"


def test_a_pip_that_fails_names_the_restart(monkeypatch):
    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(colab, "look", lambda: T4)
    monkeypatch.setattr(colab.subprocess, "run", fail)
    with pytest.raises(RuntimeError, match="pip failed.*Runtime > Restart session"):
        colab.set_up()


def test_env3_the_set_up_imports_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import mapl_core.colab; print(sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    added = {name.split(".")[0] for name in eval(run.stdout)}
    assert added - {"mapl_core"} <= sys.stdlib_module_names


def test_look_sees_this_process():
    session = colab.look()
    assert session.python == sys.version_info[:2]
    assert {"pytest", "torch"} <= session.installed.keys() and "pytest" in session.imported
