"""Claims about one job: what a notebook accepts, and what counts as success. No kernel is started here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import nbformat
import papermill
import pytest
from stand_in import executed_copy, write_job, write_notebook

from mapl_core import jobs
from mapl_core.grid import DAY_MINUTES
from mapl_core.jobs import DEAD_KERNEL, LOG_BYTES, check_done, check_names, judge, notebook_parameters, read_failure
from mapl_core.results import ResultError

KNOBS = ("micro_batch_tokens (now 8)", "cached_tokens (now 9)", "samples_per_task (now 4)")


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "notebooks")


@pytest.fixture
def job(tmp_path: Path, notebook: Path) -> Path:
    """A finished job: results, executed copy and log."""
    folder = write_job(tmp_path / "toy", ("madpo", "dec-dec", 0), [{"a": 0.2, "b": 0.4}])
    executed_copy(notebook, folder)
    (folder / "log.txt").write_text("fine\n")
    return folder


def stop_at(folder: Path, cell: int, error: tuple[str, str] | None) -> None:
    """Make the executed copy look as if its `cell` (from 1) had stopped it, with an error or without a word."""
    book = nbformat.read(folder / "notebook.ipynb", as_version=4)
    for place, entry in enumerate(book.cells, 1):
        if place >= cell and entry.cell_type == "code":
            entry.execution_count = place if place == cell and error else None
        if place > cell:
            entry.metadata.papermill.start_time = None
    if error:
        book.cells[cell - 1].metadata.papermill.exception = True
        output = nbformat.v4.new_output("error", ename=error[0], evalue=error[1], traceback=[])
        book.cells[cell - 1].outputs = [output]
    nbformat.write(book, folder / "notebook.ipynb")


def test_parameters_are_read_from_the_tagged_cell(notebook: Path):
    expected = {"PROFILE": "pocket", "METHOD": "madpo", "PARADIGM": "dec-dec", "SEED": 0, "OUTPUT_DIR": "."}
    assert notebook_parameters(notebook) == expected


def test_pm2_an_unknown_parameter_is_refused_before_anything_runs(notebook: Path):
    check_names(notebook, {"SEED": 1})
    with pytest.raises(ResultError, match="05_tldr.ipynb has no parameter STEPZ; it has METHOD, OUTPUT_DIR, PARADIGM"):
        check_names(notebook, {"SEED": 1, "STEPZ": 3})


def test_pm4_a_notebook_without_its_one_tagged_cell_is_refused(notebook: Path):
    book = nbformat.read(notebook, as_version=4)
    book.cells[2].metadata["tags"] = ["parameters"]
    nbformat.write(book, notebook)
    with pytest.raises(ResultError, match="has 2 cells tagged `parameters`"):
        notebook_parameters(notebook)


def test_pm5_a_derived_parameter_is_refused(notebook: Path):
    book = nbformat.read(notebook, as_version=4)
    book.cells[1].source = "A = 1\nB = 2 * A"
    nbformat.write(book, notebook)
    with pytest.raises(ResultError, match=r"NAME = literal, got 'B = 2 \* A'"):
        notebook_parameters(notebook)


def test_a_job_that_ran_to_its_end_is_a_success(job: Path, notebook: Path):
    assert judge(notebook, job, 0, KNOBS) == ""


def test_pm7_sys_exit_0_is_a_failure_although_papermill_says_0(job: Path, notebook: Path):
    (job / "manifest.json").unlink()
    stop_at(job, 4, ("SystemExit", "0"))
    problem = judge(notebook, job, 0, KNOBS)
    assert problem.startswith("05_tldr.ipynb, cell 4 (`import hashlib") and "SystemExit: 0" in problem


def test_pm7_stopping_after_the_results_were_written_is_a_failure_too(job: Path, notebook: Path):
    stop_at(job, 5, ("ValueError", "the plot broke"))
    assert 'cell 5 (`if failure == "late":`): ValueError: the plot broke' in judge(notebook, job, 1, KNOBS)
    with pytest.raises(ResultError, match="stopped in cell 5"):
        check_done(notebook, job)


def test_pm7_results_without_a_notebook_run_to_its_end_are_not_done(job: Path, notebook: Path):
    stop_at(job, 5, None)
    with pytest.raises(ResultError, match="stopped in cell 5 .*did not finish"):
        check_done(notebook, job)
    (job / "notebook.ipynb").write_text("{")
    with pytest.raises(ResultError, match=r"notebook\.ipynb is missing or cut short"):
        check_done(notebook, job)


def test_run1_an_error_names_notebook_cell_and_error_once(job: Path, notebook: Path):
    stop_at(job, 4, ("RuntimeError", "the toy\n  broke"))
    assert judge(notebook, job, 1, KNOBS).endswith("): RuntimeError: the toy broke")


def test_cells_are_counted_in_the_source_although_papermill_inserts_others(job: Path, notebook: Path):
    stop_at(job, 4, ("RuntimeError", "broke"))
    book = nbformat.read(job / "notebook.ipynb", as_version=4)
    injected = nbformat.v4.new_code_cell("SEED = 1", metadata={"papermill": {"start_time": "2026", "exception": False}})
    injected.execution_count = 2
    book.cells.insert(2, injected)
    book.cells.insert(
        0, nbformat.v4.new_markdown_cell("An error occurred", metadata={"tags": ["papermill-error-cell-tag"]})
    )
    nbformat.write(book, job / "notebook.ipynb")
    assert judge(notebook, job, 1, KNOBS).startswith("05_tldr.ipynb, cell 4 (")


@pytest.mark.parametrize("code", [DEAD_KERNEL, -9])
def test_pm6_a_killed_kernel_is_reported_as_memory_with_three_knobs(job: Path, notebook: Path, code: int):
    stop_at(job, 4, None)
    problem = judge(notebook, job, code, KNOBS)
    assert "cell 4" in problem and "killed, probably for memory" in problem
    assert problem.endswith(f"lower {', '.join(KNOBS)}")


def test_pm6_the_cell_of_a_killed_kernel_is_the_last_that_began(job: Path, notebook: Path):
    """papermill leaves that cell with an execution count and no error."""
    book = nbformat.read(job / "notebook.ipynb", as_version=4)
    book.cells[4].execution_count = None
    book.cells[4].metadata.papermill.start_time = None
    nbformat.write(book, job / "notebook.ipynb")
    assert "cell 4 (" in judge(notebook, job, DEAD_KERNEL, KNOBS)
    with pytest.raises(ResultError, match="stopped in cell 4"):
        check_done(notebook, job)


def test_pm6_a_kernel_killed_by_the_last_cell_is_located_too(job: Path, notebook: Path):
    assert "cell 5 (" in judge(notebook, job, DEAD_KERNEL, KNOBS)


@pytest.mark.parametrize("name", ["MemoryError", "OutOfMemoryError"])
def test_rl10_an_out_of_memory_error_names_the_same_knobs(job: Path, notebook: Path, name: str):
    stop_at(job, 4, (name, "tried to allocate"))
    assert judge(notebook, job, 1, KNOBS).endswith(f"{name}: tried to allocate; lower {', '.join(KNOBS)}")


def test_pm8_a_kernel_that_does_not_start_and_a_cell_that_does_not_end_are_stopped(
    tmp_path: Path, notebook: Path, monkeypatch: pytest.MonkeyPatch
):
    """The runner's limit reaches papermill; without one it would wait for ever."""
    started, given = [], {}
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda command, **_: started.append(command))
    jobs.start(notebook, tmp_path / "job", {"SEED": 1}, 1, DAY_MINUTES)
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **options: given.update(options))
    monkeypatch.setattr(jobs.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)
    assert jobs.main(started[0][-1]) == 0
    assert 60 <= given["start_timeout"] <= 600  # seconds
    assert given["execution_timeout"] == 60 * DAY_MINUTES <= 7 * 24 * 3600
    assert given["parameters"] == {"SEED": 1} and given["kernel_name"] == "python3"


def test_an_error_outside_the_notebook_is_taken_from_the_log(job: Path, notebook: Path):
    """A missing kernel or a timeout leaves no error in the notebook."""
    (job / "notebook.ipynb").unlink()
    (job / "log.txt").write_text("Traceback ...\nNoSuchKernel: No such kernel named python3\n\n")
    assert judge(notebook, job, 1, KNOBS) == "05_tldr.ipynb: NoSuchKernel: No such kernel named python3"


def test_pm9_logs_stay_short_and_keep_their_end(job: Path, notebook: Path):
    lines = [f"line {number}" for number in range(20_000)]
    (job / "log.txt").write_text("\n".join(lines))
    judge(notebook, job, 0, KNOBS)
    kept = (job / "log.txt").read_text().splitlines()
    assert (job / "log.txt").stat().st_size < LOG_BYTES + 100
    assert kept[0] == "(earlier lines dropped)" and kept[-1] == lines[-1] and kept[1] in lines


def test_a_failure_is_noted_for_the_status_table_and_forgotten_by_the_next_start(
    job: Path, notebook: Path, monkeypatch: pytest.MonkeyPatch
):
    stop_at(job, 4, ("RuntimeError", "the toy broke"))
    problem = judge(notebook, job, 1, KNOBS)
    assert read_failure(job) == problem != ""
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *_, **__: None)
    jobs.start(notebook, job, {"SEED": 1}, 1, 1)
    assert read_failure(job) == ""


def test_a_job_that_somebody_is_known_to_have_ended_is_not_blamed_on_memory(job: Path, notebook: Path):
    stop_at(job, 4, None)
    problem = judge(notebook, job, -9, KNOBS, "Slurm job 7 ended as TIMEOUT: raise --slurm-minutes")
    assert problem.endswith("): Slurm job 7 ended as TIMEOUT: raise --slurm-minutes") and "cell 4" in problem


def test_a_failure_on_a_full_disk_names_the_disk_whatever_the_error_was(job: Path, notebook: Path, monkeypatch):
    """The log that would tell may be empty, since nothing could be written to it."""
    (job / "notebook.ipynb").unlink()
    (job / "log.txt").write_text("")
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    remedy = f"the disk of {job} is full: free some space, or choose another folder with --results"
    assert judge(notebook, job, 1, KNOBS) == f"05_tldr.ipynb: no message; {remedy}"


def test_judging_changes_neither_notebook_nor_results(job: Path, notebook: Path):
    before = {path: path.read_bytes() for path in [notebook, *job.iterdir()]}
    judge(notebook, job, 0, KNOBS)
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((job / "manifest.json").read_text())["status"] == "done"
