"""Stand-ins for the runner's tests: finished jobs written by hand, and a notebook that only pretends to train.

`write_job` leaves what `run_mapl` leaves, with scores the test chooses. `write_notebook` makes a 05_tldr.ipynb, and a
09_baselines.ipynb like it, that count to a few iterations, keep a checkpoint, and can be told by environment variables
to pause or to fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from mapl_core.results import EvaluationRow, MetricRow, write_evaluation, write_manifest, write_metrics

PROFILE = """
defaults:
  train_tasks: 4
  eval_tasks: 4
  agent_models: ["pocket:tldr:1x"]
  central_model: "pocket:tldr:1x"
methods: {single_grpo: {clip_ratio: 0.2}, single_ppo: {clip_ratio: 0.2}}
domains: {tldr: {}}
"""

PARAMETERS = """
PROFILE = "pocket"  # name or path of the profile
METHOD = "madpo"  # training method
PARADIGM = "dec-dec"  # who acts on what
SEED = 0  # of all random streams
OUTPUT_DIR = "."  # where the results go
"""

TRAIN = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
from mapl_core.results import *

folder = Path(OUTPUT_DIR)
failure = json.loads(os.environ.get("STAND_IN_FAILURES", "{}")).get(folder.name)
if failure == "raise":
    raise RuntimeError("the toy broke")
if failure == "memory":
    raise MemoryError("no room")
if failure == "exit":
    sys.exit(0)
if failure == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
made_from = json.loads(Path(os.environ["STAND_IN_PARAMETERS"]).read_text())[folder.name]
checkpoint = folder / "checkpoint.json"
state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"value": 0.25, "rows": [], "tasks": []}
(folder / "starts.txt").open("a").write(f"{len(state['rows'])}\\n")
for iteration in range(len(state["rows"]), 4):
    digest = hashlib.sha256(f"{folder.name} {iteration} {state['value']!r}".encode()).digest()
    state["value"] = (state["value"] + int.from_bytes(digest[:6], "big") / 2**48) / 2
    scores = {f"task{number}": state["value"] * (0.9 + 0.1 * number) for number in range(3)}
    mean = sum(scores.values()) / 3
    cell = ["table1", "toy", "tldr", METHOD, PARADIGM, "current", "decay", SEED]
    state["rows"].append([*cell, iteration, 32 * iteration, "score", mean])
    state["tasks"] += [[task, iteration, "score", value] for task, value in scores.items()]
    write_atomically(checkpoint, json.dumps(state))
    write_progress(folder, iteration=iteration, iterations=3, **made_from)
    time.sleep(float(os.environ.get("STAND_IN_PAUSE", "0")))
write_metrics(folder / "metrics.csv", [MetricRow(*row) for row in state["rows"]])
write_evaluation(folder / "evaluation.csv", [EvaluationRow(*row) for row in state["tasks"]])
write_manifest(folder / "manifest.json", files=["metrics.csv", "evaluation.csv"], **made_from,
               task_source="pocket", task_counts={"eval": 3},
               notes={"threads": os.environ["OMP_NUM_THREADS"], "backend": os.environ["MPLBACKEND"]})
(folder / "progress.json").unlink(missing_ok=True)
"""

AFTER = """
if failure == "late":
    raise ValueError("the plot broke")
"""


def write_notebook(folder: Path) -> Path:
    """The job notebooks, of five cells: title, parameters, a comment, training, afterwards. Returns the domain's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parameters in (("09_baselines", f'DOMAIN = "tldr"  # task domain{PARAMETERS}'), ("05_tldr", PARAMETERS)):
        nbformat.write(_book(parameters), folder / f"{name}.ipynb")
    return folder / "05_tldr.ipynb"


def _book(parameters: str) -> nbformat.NotebookNode:
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    cell = nbformat.v4.new_code_cell
    book.cells = [
        nbformat.v4.new_markdown_cell("# stand-in"),
        cell(parameters.strip(), metadata={"tags": ["parameters"]}),
        cell("# casts, validates"),
        cell(TRAIN.strip()),
        cell(AFTER.strip()),
    ]
    return book


def executed_copy(notebook: Path, folder: Path) -> None:
    """The copy that papermill would have left of a notebook run to its end."""
    book = nbformat.read(notebook, as_version=4)
    for number, cell in enumerate(book.cells, 1):
        cell.metadata["papermill"] = {"exception": False, "start_time": "2026-01-01T00:00:00", "status": "completed"}
        if cell.cell_type == "code":
            cell.execution_count = number
    nbformat.write(book, folder / "notebook.ipynb")


def write_job(
    profile_folder: Path,
    name: tuple[str, str, int],
    scores: Sequence[Mapping[str, float]],
    *,
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    source: str = "pocket",
    domain: str = "tldr",
    metric: str = "score",
    more_metrics: Sequence[str] = (),
) -> Path:
    """A finished job.

    Args:
        profile_folder: results/<profile>.
        name: method, paradigm and seed.
        scores: at each iteration, task id -> value.
        more_metrics: further metrics that get the same values.
    """
    method, paradigm, seed = name
    folder = profile_folder / "jobs" / f"{domain}-{method}-{paradigm}-seed{seed}"
    cell = ("table1", profile_folder.name, domain, method, paradigm, "current", "decay", seed)
    means = [sum(tasks.values()) / len(tasks) for tasks in scores]
    names = (metric, *more_metrics)
    write_metrics(
        folder / "metrics.csv",
        [MetricRow(*cell, at, 100 * at, name, mean) for at, mean in enumerate(means) for name in names],
    )
    write_evaluation(
        folder / "evaluation.csv",
        [
            EvaluationRow(task, at, name, value)
            for at, tasks in enumerate(scores)
            for task, value in tasks.items()
            for name in names
        ],
    )
    write_manifest(
        folder / "manifest.json",
        files=["metrics.csv", "evaluation.csv"],
        parameters=parameters or {},
        inputs=inputs,
        task_source=source,
        task_counts={"eval": len(scores[0])},
    )
    return folder


def write_parameters(path: Path, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """`parameters` and `inputs` that the stand-in notebook writes into its manifests, by job."""
    path.write_text(json.dumps(parameters))
