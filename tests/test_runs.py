"""Claims about reading results: a profile's jobs, a documented run made of them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from stand_in import write_job

from mapl_core import documented
from mapl_core.documented import document, largest_documented_run
from mapl_core.results import MANIFEST_FILE, ResultError
from mapl_core.runs import ALL_TASKS, load_results
from mapl_core.scoreboard import as_csv as scoreboard_csv
from mapl_core.scoreboard import scoreboard
from mapl_core.table_formats import as_csv, as_markdown
from mapl_core.tables import table1

ROOT = Path(__file__).resolve().parent.parent
ABOUT = {"command": "./reproduce.sh --seeds 3", "machine": "2 cores"}


def tasks(*values: float) -> dict[str, float]:
    return {f"task{number}": value for number, value in enumerate(values)}


def jobs(folder: Path, seeds: int) -> Path:
    for seed in range(seeds):
        write_job(folder, ("untrained", "dec-dec", seed), [tasks(0.3 + seed / 50, 0.5)], parameters={"iterations": 0})
        write_job(folder, ("madpo", "dec-dec", seed), [tasks(0.3, 0.5), tasks(0.7, 0.9 - seed / 50)])
        levels = [tasks(0.3, 0.4), tasks(0.5 + seed / 50, 0.6)]
        write_job(folder, ("madpo", "dec-dec", seed), levels, domain="coophe", metric="pass", more_metrics=["call"])
    return folder


def numbers(text: str) -> list[str]:
    """The words of a CSV text, its numbers to 9 digits (means of differences and differences of means round apart)."""
    return [f"{float(word):.9f}" if re.fullmatch(r"-?\d+\.\S+", word) else word for word in re.split("[,\n]", text)]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_documented_run_gives_the_tables_and_the_scoreboard_of_the_jobs_it_was_made_of(tmp_path: Path, seeds: int):
    results = load_results(jobs(tmp_path / "pocket", seeds))
    document(results, tmp_path / "doc", **ABOUT)
    kept = load_results(tmp_path / "doc")
    assert numbers(as_csv(table1(kept))) == numbers(as_csv(table1(results)))
    assert as_markdown(table1(kept)) == as_markdown(table1(results))
    assert numbers(scoreboard_csv(scoreboard(kept))) == numbers(scoreboard_csv(scoreboard(results)))
    assert (kept.profile, kept.command, kept.machine) == ("pocket", ABOUT["command"], ABOUT["machine"])
    assert [run.parameters for run in kept.runs] == [run.parameters for run in results.runs]


def test_a_documented_run_keeps_tasks_only_where_an_interval_over_tasks_needs_them(tmp_path: Path):
    document(load_results(jobs(tmp_path / "pocket", 3)), tmp_path / "three", **ABOUT)
    document(load_results(jobs(tmp_path / "one" / "pocket", 1)), tmp_path / "single", **ABOUT)
    assert sorted(path.name for path in (tmp_path / "three").iterdir()) == ["manifest.json", "metrics.csv"]
    assert (tmp_path / "single" / "evaluation.csv").is_file()
    run = load_results(tmp_path / "three").runs[0]
    assert run.tasks("pass") == {ALL_TASKS: pytest.approx(0.55)} and run.eval_tasks == 2


def test_a_single_seed_without_its_tasks_has_no_interval_and_no_mark(tmp_path: Path):
    document(load_results(jobs(tmp_path / "pocket", 1)), tmp_path / "doc", **ABOUT)
    (tmp_path / "doc" / "evaluation.csv").unlink()
    table = table1(load_results(tmp_path / "doc"))
    text = as_markdown(table)
    assert "80.0 (1 seed, no interval)" in text and "±" not in text.split("\n\n")[3]
    assert {cell.mark for cell in table.cells.values()} == {""}
    assert "only the mean over tasks was kept has no interval" in table.rule


def test_every_documented_run_of_the_repository_with_several_jobs_can_be_read():
    folders = [path.parent for path in sorted((ROOT / "docs" / "runs").glob(f"*/{MANIFEST_FILE}"))]
    read = [
        load_results(folder)
        for folder in folders
        if len(json.loads((folder / MANIFEST_FILE).read_text()).get("jobs", {})) > 1
    ]
    assert read and all(table1(results).cells for results in read)


def test_the_largest_documented_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(load_results(largest_documented_run()).runs) >= 24
    document(load_results(jobs(tmp_path / "pocket", 3)), tmp_path / "runs" / "pocket-2026-01-01", **ABOUT)
    document(load_results(jobs(tmp_path / "one" / "pocket", 1)), tmp_path / "runs" / "pocket-2026-01-02", **ABOUT)
    monkeypatch.setattr(documented, "RUNS_FOLDER", tmp_path / "runs")
    assert largest_documented_run().name == "pocket-2026-01-01"
    monkeypatch.setattr(documented, "RUNS_FOLDER", tmp_path / "nowhere")
    with pytest.raises(ResultError, match=r"no documented run .*reproduce\.sh"):
        largest_documented_run()


def test_the_command_documents_a_run_with_everything_that_is_shown(tmp_path: Path, capsys):
    jobs(tmp_path / "pocket", 3)
    words = [str(tmp_path / "pocket"), str(tmp_path / "doc"), "--command", "./reproduce.sh", "--machine", "2 cores"]
    assert documented.main(words) == 0
    names = {path.name for path in (tmp_path / "doc").iterdir()}
    expected = "metrics.csv manifest.json table1.csv table1.md table1.tex figure2.svg figure2_tldr.png"
    assert names >= {*expected.split(), "scoreboard.csv", "scoreboard.md", "report.html"}
    assert not names & {"table1.html", "scoreboard.html"}  # the report holds both pages
    assert capsys.readouterr().out.count("wrote ") == len(names)
    assert "2 cores" in (tmp_path / "doc" / "report.html").read_text()


def test_runs_of_two_profiles_are_not_mixed(tmp_path: Path):
    jobs(tmp_path / "pocket", 1)
    other = write_job(tmp_path / "small", ("magrpo", "dec-dec", 0), [tasks(0.5, 0.5)])
    other.rename(tmp_path / "pocket" / "jobs" / other.name)
    with pytest.raises(ResultError, match="runs of several profiles \\(pocket, small\\)"):
        load_results(tmp_path / "pocket")


def test_the_folder_of_all_profiles_is_told_from_that_of_one(tmp_path: Path):
    jobs(tmp_path / "pocket", 1)
    with pytest.raises(ResultError, match=r"no finished job of table1 in .*give one profile's folder: pocket"):
        table1(load_results(tmp_path))


def test_a_metric_that_was_not_measured_is_named(tmp_path: Path):
    write_job(tmp_path / "pocket", ("madpo", "dec-dec", 0), [tasks(0.5, 0.6)], domain="coophe", metric="pass")
    with pytest.raises(ResultError, match="coophe-madpo-dec-dec-seed0: no call was measured"):
        table1(load_results(tmp_path / "pocket"))


def test_a_damaged_documented_run_is_named(tmp_path: Path):
    document(load_results(jobs(tmp_path / "pocket", 1)), tmp_path / "doc", **ABOUT)
    (tmp_path / "doc" / MANIFEST_FILE).write_text("{")
    with pytest.raises(ResultError, match=r"manifest\.json, line 1: cut short or damaged"):
        load_results(tmp_path / "doc")
    (tmp_path / "doc" / MANIFEST_FILE).write_text('{"status": "done"}')
    with pytest.raises(ResultError, match="is a single job"):
        load_results(tmp_path / "doc")
