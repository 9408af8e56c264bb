"""Claims about the record of what a run was made from: it changes with what can change a number, and with nothing else.

Most use a package of a few lines, in which it is plain what depends on what.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mapl_core import domains
from mapl_core.inputs import ENDS, NO_INFLUENCE, Inputs, changed_inputs, changed_parameters

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = {
    "train.py": "from mapl_core import losses, results\nfrom mapl_core.rewards import tldr_reward\n",
    "losses.py": '"""Losses."""\n\n\ndef loss(margin):\n    """A loss."""\n    return 0.5 * margin  # halved\n',
    "results.py": "LIMIT = 3\n",
    "tables.py": "DIGITS = 1\n",
    "rewards/__init__.py": "from mapl_core.rewards.bfcl import *\nfrom mapl_core.rewards.tldr import tldr_reward\n",
    "rewards/tldr.py": "def tldr_reward():\n    import mapl_core.rewards.text\n\n    return 2\n",
    "rewards/text.py": "WORDS = 8\n",
    "rewards/bfcl.py": "def bfcl_reward():\n    return 1\n",
    "domains/tldr.py": "TURNS = 1\n",
    "domains/bfcl.py": "TURNS = 1\n",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a package of the name mapl_core."""
    for name, text in PACKAGE.items():
        file = tmp_path / "mapl_core" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def config(**changes: Any) -> Any:
    """What of a RunConfig the record looks at."""
    values = {"domain": "tldr", "method": "madpo", "source": "paper", "model_names": [], "domain_options": {}}
    values |= {"train_tasks": 2, "eval_tasks": 2} | changes
    return SimpleNamespace(**values, trains=values["method"] != "untrained")


def test_save4_a_run_is_made_from_what_it_imports_and_from_no_other_domain(root: Path):
    names = {"train", "losses", "rewards.tldr", "rewards.text", "domains.tldr"}
    assert Inputs(root).of(config())["code"].keys() == {f"mapl_core.{name}" for name in names}
    other = Inputs(root).of(config(domain="bfcl"))["code"].keys()
    assert "mapl_core.domains.bfcl" in other and "mapl_core.domains.tldr" not in other


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("losses.py", "  # halved", ""),
        ("losses.py", '"""Losses."""', '"""All losses, in one place."""'),
        ("losses.py", '    """A loss."""\n', ""),
        ("losses.py", "0.5 * margin", "(0.5\n            * margin)"),
        ("results.py", "3", "4"),
        ("tables.py", "1", "2"),
        ("rewards/bfcl.py", "1", "2"),
    ],
)
def test_save4_what_cannot_change_a_number_is_no_change(root: Path, file: str, old: str, new: str):
    before, path = Inputs(root).of(config()), root / "mapl_core" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert changed_inputs(before, Inputs(root).of(config())) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "module"),
    [
        ("losses.py", "0.5", "0.25", "losses"),
        ("losses.py", "0.5 *", "0.5 +", "losses"),
        ("rewards/text.py", "8", "9", "rewards.text"),
        ("domains/tldr.py", "1", "2", "domains.tldr"),
        ("train.py", "import losses", "import losses as l", "train"),
    ],
)
def test_save4_a_changed_number_is_named_by_its_module(root: Path, file: str, old: str, new: str, module: str):
    before, path = Inputs(root).of(config()), root / "mapl_core" / file
    path.write_text(path.read_text().replace(old, new))
    assert changed_inputs(before, Inputs(root).of(config())) == [f"the code of {module} has changed"]


def test_save4_a_module_that_came_or_went_is_a_change(root: Path):
    before = Inputs(root).of(config())
    train = root / "mapl_core" / "train.py"
    train.write_text(train.read_text().replace("losses", "tables"))
    assert changed_inputs(before, Inputs(root).of(config())) == ["the code of losses, tables, train has changed"]


def test_save4_another_program_is_followed_instead(root: Path):
    (root / "mapl_core" / "baselines.py").write_text("from mapl_core import tables\n")
    record = Inputs(root).of(config(), "mapl_core.baselines")
    assert record["program"] == "mapl_core.baselines"
    assert record["code"].keys() == {"mapl_core.baselines", "mapl_core.tables", "mapl_core.domains.tldr"}


def test_save4_other_tasks_are_a_change_of_their_split_only(root: Path, monkeypatch: pytest.MonkeyPatch):
    posts = {"train": ["a", "b"], "eval": ["c", "d"]}

    class Reader:
        def load_tasks(self, split: str, source: str, limit: int) -> list[Any]:
            return [SimpleNamespace(id=f"{split}{at}", fields={"post": post}) for at, post in enumerate(posts[split])]

    monkeypatch.setattr(domains, "get_domain", lambda name, **options: Reader())
    before = Inputs(root).of(config(source="small"))
    assert before["tasks"].keys() == {"train", "eval"}
    assert Inputs(root).of(config(source="small", method="untrained"))["tasks"].keys() == {"eval"}
    posts["train"][1] = "B"
    assert changed_inputs(before, Inputs(root).of(config(source="small"))) == ["the train tasks have changed"]
    assert Inputs(root).of(config(source="paper"))["tasks"] == {}, "a plan must not download"


def test_save4_tasks_that_cannot_be_read_now_are_not_compared(root: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(name: str, **options: Any) -> None:
        raise FileNotFoundError(name)

    before = Inputs(root).of(config()) | {"tasks": {"train": "1", "eval": "2"}}
    monkeypatch.setattr(domains, "get_domain", gone)
    assert changed_inputs(before, Inputs(root).of(config(source="small"))) == []


@pytest.mark.parametrize("place", [0, ENDS - 1, -1, -ENDS])
def test_save4_other_weights_are_a_change(root: Path, tmp_path: Path, place: int):
    folder = tmp_path / "model"
    folder.mkdir()
    content = bytearray(3 * ENDS)
    (folder / "model.safetensors").write_bytes(content)
    asked = config(model_names=[str(folder), "org/name", "smollm2-135m-instruct"])
    before = Inputs(root).of(asked)
    assert before["weights"].keys() == {str(folder)}, "what the hub has, only the hub knows"
    assert Inputs(root).of(asked) == before
    content[place] = 1
    (folder / "model.safetensors").write_bytes(content)
    assert changed_inputs(before, Inputs(root).of(asked)) == [f"the weights of {folder} have changed"]
    (folder / "model.safetensors").unlink()
    folder.rmdir()
    assert changed_inputs(before, Inputs(root).of(asked)) == [], "weights that are gone are not compared"


def test_save4_a_pocket_model_counts_by_its_shipped_weights_or_by_the_code_that_builds_it():
    weights = Inputs().of(config(model_names=["pocket:tldr:1x", "pocket:tldr:2x", "pocket:tldr:4x"]))["weights"]
    assert len(set(weights.values())) == 3


def test_save4_work_without_a_record_is_told_apart_from_equal_work(root: Path):
    now = Inputs(root).of(config())
    for nothing in (None, {}):
        assert changed_inputs(nothing, now) == ["made by a version that did not record code, tasks and weights"]


def test_changed_parameters_are_told_in_words():
    then, now = {"beta": 0.1, "seed": 0, "old": 1}, {"beta": 0.2, "seed": 0, "new": [2]}
    told = ["beta was 0.1, is 0.2", "new was None, is [2]", "old was 1, is None"]
    assert changed_parameters(then, now) == told


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["tldr", "coophe", "bfcl", "travel"])
def test_save4_every_module_that_a_run_imports_is_compared_or_is_known_to_change_no_number(domain: str):
    """The interpreter's own list of imports is the judge; rewards/__init__ brings every domain's reward into it."""
    code = f"""
import sys, mapl_core.train
from mapl_core.domains import get_domain
domain = get_domain({domain!r})
task = domain.load_tasks("eval", "pocket", 1)[0]
domain.prompts(task), domain.coordinator_prompt(task)
print(*sorted(name for name in sys.modules if name.startswith("mapl_core.")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    inputs = Inputs()
    compared = inputs.modules_behind("mapl_core.train", f"mapl_core.domains.{domain}")
    others = [f"mapl_core.rewards.{name}" for name in ("tldr", "coophe", "bfcl", "travel") if name != domain]
    may_go = inputs.modules_behind(*others) | {"mapl_core.rewards", "mapl_core.sandbox_process"}
    assert set(run.stdout.split()) - compared - NO_INFLUENCE - may_go == set()
    assert f"mapl_core.rewards.{domain}" in compared and "mapl_core.losses" in compared
