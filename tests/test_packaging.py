"""Claims about pins, package data and what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXACT = {
    "torch": "2.13.0", "transformers": "5.17.0", "trl": "1.14.2", "peft": "0.21.2", "accelerate": "1.15.0",
    "datasets": "4.8.5", "papermill": "2.7.0", "nbclient": "0.11.0", "ipykernel": "7.4.0", "gguf": "0.19.0",
    "submitit": "1.5.4", "openai": "3.51.0",
}  # fmt: skip
GPU = {"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "vllm": "0.31.0", "bitsandbytes": "0.50.2"}
OPTIONAL = ("unsloth", "vllm", "bitsandbytes", "trl", "gguf", "submitit", "openai")


def requirements(name: str) -> dict[str, str]:
    """Package -> its version condition."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [re.fullmatch(r"([\w.-]+)\s*(.*)", line) for line in lines if line and not line.startswith("-r")]
    return {match[1]: match[2] for match in found}


def test_env1_the_pins_are_the_set_that_fits_cpu_and_gpu():
    listed = requirements("requirements.txt")
    assert {name: listed[name] for name in EXACT} == {name: f"=={version}" for name, version in EXACT.items()}
    assert all("==" not in condition and condition for name, condition in listed.items() if name not in EXACT)
    assert listed["numpy"] == ">=2.1,<2.4"


def test_env1_the_gpu_file_adds_to_the_one_truth():
    assert (ROOT / "requirements-gpu.txt").read_text().startswith("-r requirements.txt\n")
    assert requirements("requirements-gpu.txt") == {name: f"=={version}" for name, version in GPU.items()}
    assert (ROOT / "requirements-test.txt").read_text().startswith("-r requirements.txt\n")


def test_no_local_build_of_torch_and_nothing_that_only_gpus_need_is_listed():
    text = "\n".join(path.read_text() for path in ROOT.glob("requirements*.txt"))
    assert "+cpu" not in text
    assert not re.search(r"^(torchvision|torchaudio|xformers|triton|torchao)\b", text, re.MULTILINE)


def test_env1_no_other_file_names_another_version():
    """Documents and scripts may repeat a pin, never contradict it."""
    pins = EXACT | GPU
    files = [*ROOT.glob("*.md"), ROOT / "reproduce.sh", ROOT / ".ci/run", ROOT / "pyproject.toml"]
    for file in [*files, *(ROOT / "mapl_core").rglob("*.py")]:
        for name, version in re.findall(r"\b([A-Za-z_]+)==(\d[\w.]*[\w])", file.read_text()):
            assert pins.get(name, version) == version, f"{file.name} names {name}=={version}"


def test_the_project_installs_with_what_the_requirements_name_and_with_its_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11,<3.13"
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    patterns = project["tool"]["setuptools"]["package-data"]["mapl_core"]
    package = ROOT / "mapl_core"
    packaged = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data - packaged == set(), "data files that an installation would lack"


def test_package_data_is_found_through_the_package():
    assert resources.files("mapl_core").joinpath("data/paper_numbers.csv").is_file()


def test_env4_everything_imports_without_the_optional_packages():
    """An import hook refuses unsloth, vllm, bitsandbytes, trl and gguf."""
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "mapl_core").rglob("*.py")
    )
    code = f"""
import importlib
for name in {names!r}:
    importlib.import_module(name)
print("all", len({names!r}))
"""
    run = run_without_optional_packages(code)
    assert run.stdout.endswith(f"all {len(names)}\n"), run.stderr


def run_without_optional_packages(code: str) -> subprocess.CompletedProcess:
    """Run Python code in a process in which an import of an optional package fails."""
    hook = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # as if not installed: an import fails, and a search for it finds nothing
sys.path.insert(0, "tests")
"""
    return subprocess.run([sys.executable, "-c", hook + code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_env4_a_whole_run_needs_none_of_the_optional_packages(tiny_qwen3, tmp_path: Path, method: str):
    loaded = tiny_qwen3()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    folders = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out")}
    run = run_without_optional_packages(f"""
from toy_domains import ToyDomain
from mapl_core.domains import DOMAINS
from mapl_core.profiles import RunConfig
from mapl_core.train import run_mapl
DOMAINS["toy"] = ToyDomain
config = RunConfig("test", "toy", {method!r}, agent_models=[{folders["model"]!r}], train_tasks=4, eval_tasks=2,
                   eval_samples=2, max_new_tokens=[6], iterations=1, samples_per_task=4, pairs_per_task=2)
print(len(run_mapl(config, {folders["out"]!r}, progress=False).evaluation), "rows")
print([name for name in {OPTIONAL!r} if sys.modules[name] is not None])
""")
    assert re.search(r"[1-9]\d* rows\n\[\]\n\Z", run.stdout), run.stderr


def test_env4_the_optional_packages_are_imported_only_inside_functions():
    for file in (ROOT / "mapl_core").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {module.split(".")[0] for module in modules} & set(OPTIONAL), f"{file}: {ast.unparse(node)}"


def test_seed3_every_random_number_comes_from_a_generator_of_its_own():
    """Nothing draws from a global random state, and what seeds one stands in a single function."""
    seeding = set()
    for file in (ROOT / "mapl_core").rglob("*.py"):
        if file.parent.name == "sandbox_process":
            continue  # there the global state of a tested program is seeded, in a process of its own
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            hidden = isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random", "torch.random")
            assert not hidden, f"{file.name}: {ast.unparse(node)}"
        for function, call in calls_with_their_function(tree):
            name, where = ast.unparse(call.func), f"{file.name}, line {call.lineno}"
            # A state may be kept and put back around a library that draws from it.
            assert not re.fullmatch(r"random\.(?!Random$|[gs]etstate$)\w+", name), where
            allowed = "Generator$|PCG64$|Philox$|[gs]et_state$"
            assert not re.fullmatch(rf"(np|numpy)\.random\.(?!{allowed})\w+", name), where
            if re.fullmatch(r"torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial)", name):
                assert "generator" in {keyword.arg for keyword in call.keywords}, where
            if re.fullmatch(r"torch\.(random\.|cuda\.)*(manual_seed|manual_seed_all|seed)|(\w+\.)*set_seed", name):
                seeding.add((file.name, function))
    assert seeding == {("build.py", "train_base")}


def calls_with_their_function(tree: ast.AST, function: str = "the module") -> Iterator[tuple[str, ast.Call]]:
    """Every call of a module with the name of the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call):
            yield inside, node
        yield from calls_with_their_function(node, inside)


def test_nothing_imports_the_runner():
    """Dependencies point one way: the runner may use everything, nothing may need the runner."""
    for file in (ROOT / "mapl_core").rglob("*.py"):
        text = file.read_text()
        if file.name != "reproduce.py":
            assert not re.search(
                r"^\s*(from mapl_core(\.reproduce)? import .*\breproduce\b|import mapl_core\.reproduce)", text, re.M
            )


def test_the_code_is_lint_free():
    pytest.importorskip("ruff")
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "."], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
