"""Claims about reproduce.sh, with a stand-in for Python that writes down how it was called.

The stand-in makes "virtual environments" by copying itself, so that nothing is installed. What it cannot show, a real
installation from nothing, is a nightly test at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FAKE_PYTHON = r"""#!/bin/bash
log="$FAKE_LOG"; version="${FAKE_VERSION:-3.11}"
case "$1" in
    -c)
        case "$2" in
            *version_info\[:2\]\ not\ in*) case "$version" in 3.11|3.12) exit 0;; *) exit 1;; esac ;;
            *ensurepip*) [ -z "$FAKE_NO_ENSUREPIP" ] ;;
            *importlib.metadata*) [ -f "$FAKE_LOG.torch" ] && cat "$FAKE_LOG.torch" ;;
            *) printf 'python%s-venv\n' "$version" ;;
        esac
        exit $? ;;
esac
printf '%s|%s\n' "$(basename "$(dirname "$0")")" "$*" >> "$log"
case "$*" in
    "-m venv "*)
        [ -n "$FAKE_VENV_FAILS" ] && { echo "no space"; exit 1; }
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"torch==2.13.0+cpu"*) [ -n "$FAKE_CPU_WHEEL" ] && echo +cpu > "$FAKE_LOG.torch" ;;
    *"--index-url"*) [ -n "$FAKE_CPU_INDEX" ] && echo +cpu > "$FAKE_LOG.torch" ;;
    *"--force-reinstall"*) echo "$FAKE_PLAIN_BUILD" > "$FAKE_LOG.torch" ;;
    *"--check-arguments"*) [ -z "$FAKE_BAD_ARGUMENTS" ] || exit 2 ;;
esac
"""


class Checkout:
    """A copy of what reproduce.sh needs, in a path with spaces, and a PATH with only the programs it may use."""

    def __init__(self, folder: Path):
        self.root, self.programs, self.log = folder / "my copy", folder / "bin", folder / "log"
        self.root.mkdir()
        self.programs.mkdir()
        for name in ("reproduce.sh", "requirements.txt", "requirements-gpu.txt", "requirements-test.txt"):
            shutil.copy(ROOT / name, self.root / name)
        shutil.copy(ROOT / "pyproject.toml", self.root / "pyproject.toml")
        for name in (
            "bash",
            "dirname",
            "basename",
            "cat",
            "cksum",
            "grep",
            "head",
            "uname",
            "env",
            "rm",
            "mkdir",
            "cp",
        ):
            (self.programs / name).symlink_to(shutil.which(name))
        self.environment = {"PATH": str(self.programs), "HOME": str(folder), "FAKE_LOG": str(self.log)}
        self.add("python3.11")
        self.add("uname", "#!/bin/bash\necho Linux\n")

    def add(self, name: str, text: str = FAKE_PYTHON) -> None:
        program = self.programs / name
        program.unlink(missing_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def run(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        script = str(self.root / "reproduce.sh")
        return subprocess.run(
            [str(self.programs / "bash"), script, *arguments],
            capture_output=True, text=True, cwd=cwd or self.root, env=self.environment | environment, check=False,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        """What the Pythons were told, without the name of which."""
        return [line.split("|", 1)[1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(calls: list[str]) -> list[str]:
    prefix = "-m pip install --quiet --disable-pip-version-check "
    return [call.removeprefix(prefix) for call in calls if call.startswith("-m pip")]


def test_run1_the_first_call_makes_the_environment_installs_and_runs(checkout: Checkout):
    done = checkout.run("--profile", "pocket", "--seeds", "5", FAKE_CPU_WHEEL="1")
    assert done.returncode == 0, done.stderr
    root = checkout.root
    assert checkout.calls[0] == "-m mapl_core.reproduce --check-arguments --profile pocket --seeds 5"
    assert checkout.calls[1] == f"-m venv {root}/.venv"
    requirements = f"-r {root}/requirements.txt"
    project = f"--no-deps --no-build-isolation -e {root}"
    assert installs(checkout.calls) == ["torch==2.13.0+cpu", requirements, project]
    assert checkout.calls[-1] == "-m mapl_core.reproduce --profile pocket --seeds 5"


def test_the_second_call_installs_nothing(checkout: Checkout):
    checkout.run(FAKE_CPU_WHEEL="1")
    assert checkout.run("--seeds", "2").returncode == 0
    assert checkout.calls == ["-m mapl_core.reproduce --seeds 2"]


@pytest.mark.parametrize("file", ["requirements.txt", "pyproject.toml"])
def test_changed_requirements_are_installed_again(checkout: Checkout, file: str):
    checkout.run()
    (checkout.root / file).write_text((checkout.root / file).read_text() + "# changed\n")
    checkout.run()
    assert f"-r {checkout.root}/requirements.txt" in installs(checkout.calls)


def test_an_installation_that_failed_is_tried_again(checkout: Checkout):
    checkout.add("python3.11", FAKE_PYTHON.replace('case "$*" in', 'case "$*" in *"-r "*) exit 1;; esac\ncase "$*" in'))
    failed = checkout.run()
    assert failed.returncode == 2 and "pip could not install requirements.txt" in failed.stderr
    assert not any("mapl_core.reproduce" in call and "--check" not in call for call in checkout.calls)
    checkout.add("python3.11")
    shutil.copy(checkout.programs / "python3.11", checkout.root / ".venv/bin/python")
    assert checkout.run().returncode == 0 and installs(checkout.calls)


def test_run1_a_mistyped_word_ends_before_anything_is_made(checkout: Checkout):
    assert checkout.run("--methods", "dpo", FAKE_BAD_ARGUMENTS="1").returncode == 2
    assert not (checkout.root / ".venv").exists()


def test_it_works_from_another_folder(checkout: Checkout, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    done = checkout.run("--results", "here", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0 and (checkout.root / ".venv").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert checkout.calls[-1] == "-m mapl_core.reproduce --results here"


def test_everything_after_the_set_up_runs_in_the_environment(checkout: Checkout):
    checkout.run()
    made = [line for line in checkout.log.read_text().splitlines() if "-m venv" not in line and "--check" not in line]
    # the stand-in in bin/ of the environment; nothing else of it, whose first lines break on paths with spaces
    assert made and all(line.startswith("bin|-m ") for line in made)


# -- which Python ------------------------------------------------------------------------------------------------------


def test_a_shim_that_exists_and_fails_is_passed_over(checkout: Checkout):
    """As pyenv leaves them: python3.11 is there, and says that it is not."""
    checkout.add("python3.11", "#!/bin/bash\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n")
    checkout.add("python3.12", FAKE_PYTHON.replace("FAKE_VERSION:-3.11", "FAKE_VERSION:-3.12"))
    done = checkout.run()
    assert done.returncode == 0 and "Making .venv with python3.12" in done.stderr
    assert "command not found" not in done.stderr


def test_an_unsupported_python_is_passed_over_and_the_way_out_is_printed(checkout: Checkout):
    (checkout.programs / "python3.11").unlink()
    checkout.add("python3", FAKE_PYTHON.replace("FAKE_VERSION:-3.11", "FAKE_VERSION:-3.13"))
    checkout.add("apt-get", "#!/bin/bash\n")
    done = checkout.run()
    assert done.returncode == 2
    assert "no Python 3.11 or 3.12 found" in done.stderr
    assert "    sudo apt-get install -y python3.11 python3.11-venv\n" in done.stderr
    assert "    curl -LsSf https://astral.sh/uv/install.sh | sh\n" in done.stderr


def test_uv_makes_the_environment_where_there_is_no_python(checkout: Checkout):
    copy = checkout.programs / "copied"
    copy.write_text(FAKE_PYTHON)
    copy.chmod(0o755)
    (checkout.programs / "python3.11").unlink()
    checkout.add("uv", f'#!/bin/bash\nfor last; do :; done\nmkdir -p "$last/bin" && cp "{copy}" "$last/bin/python"\n')
    done = checkout.run()
    assert done.returncode == 0 and "Making .venv with uv" in done.stderr
    assert checkout.calls[-1] == "-m mapl_core.reproduce"


def test_debians_missing_package_is_explained(checkout: Checkout):
    done = checkout.run(FAKE_NO_ENSUREPIP="1")
    assert done.returncode == 2 and "    sudo apt-get install -y python3.11-venv\n" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_a_half_made_environment_is_removed(checkout: Checkout):
    done = checkout.run(FAKE_VENV_FAILS="1")
    assert done.returncode == 2 and "no space" in done.stderr and not (checkout.root / ".venv").exists()


def test_an_environment_whose_python_no_longer_works_is_made_anew(checkout: Checkout):
    checkout.run()
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.run().returncode == 0
    assert any(call.startswith("-m venv") for call in checkout.calls)


def test_a_wrong_mapl_python_is_named(checkout: Checkout):
    done = checkout.run(MAPL_PYTHON="/no/such/python")
    assert done.returncode == 2 and "MAPL_PYTHON is '/no/such/python'" in done.stderr


# -- which torch -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_a_cpu_build_from_pips_own_sources_is_preferred_and_said(checkout: Checkout):
    done = checkout.run(FAKE_CPU_WHEEL="1", FAKE_CPU_INDEX="1")
    assert "torch: a CPU build, from pip's own sources (MAPL_TORCH=cuda changes it)" in done.stderr
    assert not any("--index-url" in call for call in checkout.calls)


def test_then_one_from_the_cpu_index(checkout: Checkout):
    done = checkout.run(FAKE_CPU_INDEX="1", MAPL_TORCH_INDEX="https://example.org/cpu")
    assert "torch: a CPU build, from https://example.org/cpu" in done.stderr
    replaced = "--force-reinstall --no-deps"  # by pip's rules any build of the version would do
    options = f"{replaced} --retries 0 --timeout 20 --index-url https://example.org/cpu"
    assert f"{options} torch==2.13.0" in installs(checkout.calls)


def test_then_the_plain_one_with_a_warning(checkout: Checkout):
    done = checkout.run()
    assert done.returncode == 0
    assert "no CPU build to be had, so the plain one, which may bring gigabytes of CUDA libraries" in done.stderr


def test_a_mac_has_only_one_build(checkout: Checkout):
    checkout.add("uname", "#!/bin/bash\necho Darwin\n")
    assert "torch: keep" in checkout.run().stderr and not any("+cpu" in call for call in checkout.calls)


def test_with_an_nvidia_gpu_the_plain_build_is_chosen(checkout: Checkout):
    checkout.add("nvidia-smi", "#!/bin/bash\n[ \"$1\" = -L ] && echo 'GPU 0: some card'\n")
    done = checkout.run(FAKE_CPU_WHEEL="1")
    assert "torch: cuda (an NVIDIA GPU" in done.stderr
    assert not any("+cpu" in call for call in checkout.calls)


def test_a_driver_that_finds_no_card_counts_as_no_gpu(checkout: Checkout):
    checkout.add("nvidia-smi", "#!/bin/bash\nexit 9\n")
    assert "torch: a CPU build" in checkout.run(FAKE_CPU_WHEEL="1").stderr


@pytest.mark.parametrize(("choice", "asked"), [("cpu", True), ("cuda", False), ("keep", False)])
def test_mapl_torch_overrides(checkout: Checkout, choice: str, asked: bool):
    checkout.run(MAPL_TORCH=choice, FAKE_CPU_WHEEL="1")
    assert any("+cpu" in call for call in checkout.calls) == asked
    checkout.run(MAPL_TORCH=choice, FAKE_CPU_WHEEL="1")
    assert installs(checkout.calls) == []
    other = "keep" if choice == "cpu" else "cpu"
    checkout.run(MAPL_TORCH=other, FAKE_CPU_WHEEL="1")
    assert installs(checkout.calls), "another choice must install again"


def test_the_choice_is_kept_until_another_one_is_made(checkout: Checkout):
    checkout.run(MAPL_TORCH="keep")
    assert checkout.run(FAKE_CPU_WHEEL="1").returncode == 0 and installs(checkout.calls) == []
    checkout.run(MAPL_TORCH="cpu", FAKE_CPU_WHEEL="1")
    assert "torch==2.13.0+cpu" in installs(checkout.calls)
    checkout.run(FAKE_CPU_WHEEL="1")
    assert installs(checkout.calls) == []


def test_a_cpu_build_that_is_there_is_replaced_for_cuda_or_the_set_up_stops(checkout: Checkout):
    """By pip's rules torch==2.13.0 is satisfied by 2.13.0+cpu, so asking for it alone would change nothing."""
    checkout.run(FAKE_CPU_WHEEL="1")
    done = checkout.run(MAPL_TORCH="cuda", FAKE_PLAIN_BUILD="+cpu")
    assert done.returncode == 2 and "pip's own sources have a CPU build of torch only" in done.stderr
    done = checkout.run(MAPL_TORCH="cuda", FAKE_PLAIN_BUILD="+cu130")
    assert done.returncode == 0 and "torch: cuda" in done.stderr
    assert installs(checkout.calls)[0] == "--force-reinstall --no-deps torch==2.13.0"


def test_an_unknown_mapl_torch_is_an_error_that_lists_the_valid_ones(checkout: Checkout):
    done = checkout.run(MAPL_TORCH="gpu")
    assert done.returncode == 2 and "MAPL_TORCH is 'gpu'; valid: cpu, cuda, keep" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_mapl_wheels_installs_from_a_folder_without_any_network(checkout: Checkout):
    assert checkout.run(MAPL_WHEELS="/my wheels").returncode == 0
    calls = installs(checkout.calls)
    assert len(calls) == 3 and all(call.startswith("--no-index --find-links /my wheels ") for call in calls)


def test_the_gpu_packages_come_with_the_paper_profile_on_a_gpu_only(checkout: Checkout):
    checkout.run("--profile", "paper")
    assert not any("requirements-gpu" in call for call in checkout.calls)
    for words in (["--profile", "paper"], ["--profile=paper"], ["--profile", "paper-t4"]):
        shutil.rmtree(checkout.root / ".venv")
        checkout.run(*words, MAPL_TORCH="cuda")
        assert f"-r {checkout.root}/requirements-gpu.txt" in installs(checkout.calls)


# -- subcommands -------------------------------------------------------------------------------------------------------


def test_test_installs_what_tests_need_and_passes_arguments_on(checkout: Checkout):
    assert checkout.run("test", "-k", "dpo or rl").returncode == 0
    assert installs(checkout.calls)[-1] == f"-r {checkout.root}/requirements-test.txt"
    together = "-n auto --maxprocesses 4 --dist worksteal"
    assert checkout.calls[-1] == f"-m pytest {together} -m smoke or not (slow or nightly) -k dpo or rl"
    checkout.run("test")
    assert installs(checkout.calls) == []
    checkout.run("--seeds", "2")
    assert installs(checkout.calls) == [], "what the tests need does no harm to a run"


def test_status_asks_the_runner_and_sets_nothing_up(checkout: Checkout):
    done = checkout.run("status")
    assert done.returncode == 2 and "nothing is set up here yet; ./reproduce.sh sets up and runs" in done.stderr
    assert not (checkout.root / ".venv").exists() and checkout.calls == []
    checkout.run()
    assert checkout.run("status", "--profile", "small").returncode == 0
    assert checkout.calls == ["-m mapl_core.reproduce status --profile small"]


def test_lab_opens_the_notebooks_in_the_environment(checkout: Checkout):
    checkout.run("lab", "--no-browser")
    assert checkout.calls[-1] == f"-m jupyterlab --notebook-dir {checkout.root}/notebooks --no-browser"


@pytest.mark.parametrize("word", ["--help", "-h", "--list"])
def test_help_installs_nothing(checkout: Checkout, word: str):
    assert checkout.run(word).returncode == 0
    assert checkout.calls == [f"-m mapl_core.reproduce {word}"] and not (checkout.root / ".venv").exists()


def test_the_script_can_be_executed_and_parses():
    assert os.access(ROOT / "reproduce.sh", os.X_OK) and os.access(ROOT / ".ci/run", os.X_OK)
    for script in ("reproduce.sh", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert "reproduce.sh test" in (ROOT / ".ci/run").read_text()


@pytest.mark.nightly
def test_env7_an_installation_from_nothing_works(tmp_path: Path):
    """A clone in a path with spaces: set up, catalogue and plan. Takes minutes and the network."""
    clone = tmp_path / "a clone"
    kept = ("reproduce.sh", "pyproject.toml", "mapl_core", "notebooks", "tests")
    clone.mkdir()
    for name in (*kept, *(path.name for path in ROOT.glob("requirements*.txt"))):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    environment = os.environ | {"MAPL_PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", str(clone / "reproduce.sh"), "--dry-run"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"(\d+) jobs of profile pocket: 0 done, \1 to run", run.stdout)
