"""The doctor: a diagnosis follows from what was found, and names what to change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mapl_core import doctor
from mapl_core.doctor import FAILURE, OK, WARNING, Gpu, Machine, diagnose, look_at_needs, read_requirements
from mapl_core.profiles import Profile, load_profile

PINNED = {
    item.name.lower().replace("_", "-"): next(iter(item.specifier)).version
    for name in ("requirements.txt", "requirements-gpu.txt")
    for item in read_requirements(doctor.ROOT / name)
}
LAPTOP = Machine((3, 11), cores=2, memory=12.0, disk=40.0, packages=PINNED)
A100 = Gpu("A100", (8, 0), 80.0, 79.0)
SERVER = Machine((3, 12), 16, 120.0, 900.0, "580.65.06", "13.0", (A100,), PINNED)


def states(machine, profile="pocket"):
    return {finding.subject: finding.state for finding in diagnose(machine, load_profile(profile))}


def text(machine, subject, profile="pocket"):
    return next(item.text for item in diagnose(machine, load_profile(profile)) if item.subject == subject)


@pytest.mark.parametrize("profile", ["pocket", "small", "paper"])
def test_a_fitting_machine_has_nothing_to_put_right(profile):
    assert set(states(SERVER, profile).values()) == {OK}


def test_a_laptop_runs_pocket_and_is_told_what_the_others_need():
    assert set(states(LAPTOP).values()) == {OK}
    assert states(LAPTOP, "small")["memory"] == FAILURE
    assert text(LAPTOP, "memory", "small").startswith("12.0 GiB free, and the profile needs 14: lower micro_batch")
    assert states(LAPTOP, "paper")["gpu"] == FAILURE
    assert text(LAPTOP, "gpu", "paper") == "none, and the profile needs one of 22 GiB; choose --profile small or pocket"


@pytest.mark.parametrize(
    "change, subject, state, said",
    [
        ({"python": (3, 13)}, "python", FAILURE, "3.13; install 3.11 or 3.12 and name it in MAPL_PYTHON"),
        ({"disk": 0.4}, "disk", FAILURE, "0.4 GiB free, and the profile needs 80: name another in MAPL_CACHE"),
        ({"cores": 4}, "cores", WARNING, "4, and the profile's `threads` is 8: lower it"),
        ({"gpus": (replace(A100, free=15.6),)}, "gpu", FAILURE, "16 of 80 GiB free; the profile needs 22: lower micro"),
        ({"gpus": (), "cuda_build": ""}, "gpu", FAILURE, "torch is a build for the CPU, and the profile needs one"),
        ({"gpus": (), "driver": "550.54.15"}, "gpu", FAILURE, "driver 550.54.15 is older than r580, which CUDA 13.0"),
        ({"gpus": ()}, "gpu", FAILURE, "torch cannot use the GPU that nvidia-smi shows"),
        ({"gpus": (Gpu("T4", (7, 5), 40.0, 40.0),)}, "gpu", OK, "compute capability 7.5, weights in float16"),
        ({"packages": PINNED | {"torch": "2.12.0"}}, "requirements.txt", FAILURE, "torch 2.12.0 instead of ==2.13.0"),
        ({"packages": PINNED | {"vllm": "0.1"}}, "requirements-gpu.txt", FAILURE, "vllm 0.1 instead of ==0.31.0"),
    ],
)
def test_each_fault_is_found_alone_and_its_remedy_named(change, subject, state, said):
    found = states(replace(SERVER, **change), "paper")
    assert {name: found[name] for name in found if found[name] != OK} == ({subject: state} if state != OK else {})
    assert said in text(replace(SERVER, **change), subject, "paper")


def test_missing_packages_stop_the_work_only_where_every_profile_needs_them():
    bare = {name: version for name, version in PINNED.items() if name not in ("peft", "vllm")}
    assert "peft is missing; run: " in text(replace(SERVER, packages=bare), "requirements.txt")
    assert states(replace(SERVER, packages=bare))["requirements.txt"] == FAILURE
    assert states(replace(SERVER, packages=bare))["requirements-gpu.txt"] == WARNING
    assert "requirements-gpu.txt" not in states(replace(LAPTOP, packages=bare)), "a machine without GPU needs none"


def test_a_loader_whose_packages_are_missing_stops_the_profile_that_asks_for_it():
    bare = replace(SERVER, packages={name: version for name, version in PINNED.items() if name != "unsloth-zoo"})
    assert states(bare, "paper")["loader unsloth"] == FAILURE
    assert text(bare, "loader unsloth", "paper").startswith("needs unsloth_zoo; run: ")
    assert "requirements-gpu.txt" in text(bare, "loader unsloth", "paper")
    assert states(bare, "paper-t4")["loader bnb4"] == OK
    assert not [subject for subject in states(bare) if subject.startswith("loader")], "pocket needs no package for it"


def test_a_local_build_of_a_pinned_version_is_that_version():
    assert states(replace(LAPTOP, packages=PINNED | {"torch": "2.13.0+cpu"}))["requirements.txt"] == OK


def needs(monkeypatch, tmp_path, **changes):
    values = {"source": "pocket", "agent_models": ["pocket:tldr:1x"], "central_model": "pocket:tldr:2x", **changes}
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path))
    profile = Profile("test", {"defaults": values, "domains": {"tldr": {}}, "grid": {"domains": ["tldr"]}})
    return {finding.subject: (finding.state, finding.text) for finding in look_at_needs(profile)}


def test_models_and_tasks_of_the_grid_are_looked_at(monkeypatch, tmp_path):
    found = needs(monkeypatch, tmp_path, train_tasks=3, eval_tasks=2)
    assert found["model pocket:tldr:1x"] == (OK, "ships with the project")
    assert found["tasks tldr"] == (OK, "3 for training, 2 for evaluation")


def test_a_model_that_cannot_be_had_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = needs(monkeypatch, tmp_path, agent_models=["nobody/nothing"], comparator="model", comparator_model="./gone")
    assert found["model nobody/nothing"][0] == FAILURE and "HF_HUB_OFFLINE" in found["model nobody/nothing"][1]
    assert found["model ./gone"][0] == FAILURE and "no such folder" in found["model ./gone"][1]
    found = needs(monkeypatch, tmp_path, comparator="model", comparator_model="pocket:tldr:4x")
    assert found["model pocket:tldr:4x"] == (OK, "will be built first, some minutes on one core")


def test_an_endpoint_is_looked_at_and_not_asked(monkeypatch, tmp_path):
    endpoint = {"url": "http://127.0.0.1:9/v1", "model": "tiny", "key_variable": "MAPL_TEST_KEY"}
    monkeypatch.delenv("MAPL_TEST_KEY", raising=False)
    state, said = needs(monkeypatch, tmp_path, comparator="api", endpoint=endpoint)["endpoint tiny"]
    assert state == FAILURE and "environment variable MAPL_TEST_KEY is not set" in said
    monkeypatch.setenv("MAPL_TEST_KEY", "sk-MARKED")
    found = needs(monkeypatch, tmp_path, comparator="api", endpoint=endpoint)["endpoint tiny"]
    assert found == (OK, "http://127.0.0.1:9/v1, the key is in MAPL_TEST_KEY; nothing was sent to it")


def test_tasks_that_cannot_be_read_are_a_failure_with_the_loaders_own_words(monkeypatch, tmp_path):
    state, said = needs(monkeypatch, tmp_path, train_tasks=10_000_000)["tasks tldr"]
    assert state == FAILURE and "10000000" in said


def test_a_missing_rollout_backend_is_a_failure(monkeypatch, tmp_path):
    assert needs(monkeypatch, tmp_path)["rollouts"] == (OK, "through transformers")
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if not installed
    state, said = needs(monkeypatch, tmp_path, rollouts="vllm")["rollouts"]
    assert state == FAILURE and "pip install -r requirements-gpu.txt" in said


def test_the_command_says_what_this_machine_can_run():
    done = subprocess.run([sys.executable, "-m", "mapl_core.doctor"], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1].startswith("profile pocket can") and done.returncode in (0, 1), done.stderr
    command = [sys.executable, "-m", "mapl_core.doctor", "--profile", "huge"]
    unknown = subprocess.run(command, capture_output=True, text=True)
    assert unknown.returncode == 2 and "unknown profile 'huge'; valid:" in unknown.stderr
