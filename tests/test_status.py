"""Claims about the status table: it tells what lies in the folders, at once, and touches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workplace import DRIVER, MADPO, MARLHF, ROOT, Workplace

from mapl_core.grid import Job
from mapl_core.jobs import JOB_LOCK
from mapl_core.plan import STATES
from mapl_core.results import folder_lock
from mapl_core.tables import TABLE1


def table(text: str) -> dict[str, str]:
    """Job -> the rest of its line."""
    rows = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("tldr-")]
    return {name: " ".join(rest.split()) for name, rest in rows}


def measured(folder: Path, seconds: float, memory: int) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"seconds": seconds, "peak_memory_mib": {"process": memory}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_every_state_is_told_with_its_reason(place: Workplace, capsys):
    jobs = {paradigm: Job("tldr", "madpo", paradigm, 0) for paradigm in ("dec-dec", "cen-cen", "dec-cen")}
    magrpo, untrained = Job("tldr", "magrpo", "dec-dec", 0), Job("tldr", "untrained", "dec-dec", 0)
    other = Job("tldr", "marlhf", "cen-cen", 0)
    measured(place.finish(other), 99.0, 500)
    place.change_code("mapl_core.losses")  # before the others are made
    measured(place.finish(jobs["dec-dec"]), 12.34, 700)
    (place.finish(magrpo) / "metrics.csv").write_text("")
    place.stop(jobs["dec-cen"], 3)
    failed = place.stop(untrained, 1)
    (failed / "failure.txt").write_text("05_tldr.ipynb, cell 4 (`import`): RuntimeError: the toy broke\n")
    with folder_lock(place.stop(MARLHF, 2), name=JOB_LOCK):
        assert place.run("status") == 0
    out = capsys.readouterr().out
    rows = table(out)
    assert rows[jobs["dec-dec"].name] == "done 12.3 700"
    assert rows[MARLHF.name] == "running iteration 2 of 4"
    broke = "05_tldr.ipynb, cell 4 (`import`): RuntimeError: the toy broke (goes on from iteration 1 of 4)"
    assert rows[untrained.name] == f"failed {broke}"
    assert rows[jobs["dec-cen"].name] == "resumable iteration 3 of 4"
    assert rows[jobs["cen-cen"].name] == "to do"
    assert rows[magrpo.name].startswith("to do again ") and "metrics.csv has 0 bytes" in rows[magrpo.name]
    assert rows[other.name] == "outdated 99.0 500 the code of losses has changed"
    counts = f"1 done, 1 running, 1 failed, 1 resumable, {len(TABLE1) - 6} to do, 1 to do again, 1 outdated"
    assert f"{len(TABLE1)} jobs of profile toy: {counts}; whole runs: 111 seconds in all, at most 700 MiB" in out
    assert set(STATES) == {"done", "running", "failed", "resumable", "to do", "to do again", "outdated"}


def test_the_table_is_of_the_jobs_that_the_filters_ask_for(place: Workplace, capsys):
    assert place.run("status", "--methods", "madpo", "--paradigms", "dec-dec", "--seeds", "3,5") == 0
    assert table(capsys.readouterr().out) == {f"tldr-madpo-dec-dec-seed{seed}": "to do" for seed in (3, 5)}


def test_a_status_writes_nothing(place: Workplace):
    assert place.run("status") == 0 and not place.results.exists()
    place.finish(MADPO)
    (place.stop(MARLHF, 2) / JOB_LOCK).write_text("1\n")  # of a job that was killed
    before = {path: path.stat().st_mtime_ns for path in [place.results, *place.results.rglob("*")]}
    assert place.run("status") == 0
    assert {path: path.stat().st_mtime_ns for path in [place.results, *place.results.rglob("*")]} == before


@pytest.mark.parametrize("words", [["--force"], ["--dry-run"], ["--jobs", "2"], ["--executor", "slurm"]])
def test_what_would_start_something_is_refused(place: Workplace, words: list[str], capsys):
    assert place.run("status", *words) == 2
    assert "status starts nothing" in capsys.readouterr().err


def test_an_unknown_value_is_refused_as_in_a_run(place: Workplace, capsys):
    assert place.run("status", "--methods", "dpo") == 2
    assert "unknown --methods 'dpo'; valid: " in capsys.readouterr().err


def test_five_seeds_of_every_row_are_told_within_seconds_and_without_torch(place: Workplace):
    for seed in range(5):
        for method in ("madpo", "marlhf"):
            for paradigm in ("dec-dec", "cen-cen", "dec-cen"):
                place.finish(Job("tldr", method, paradigm, seed))
    end = """
import time
heavy = {"torch", "transformers", "pandas", "matplotlib"} & set(sys.modules)
print(f"heavy {sorted(heavy)} {time.process_time()}")
"""
    driver = DRIVER.replace("sys.exit(", "print(") + end
    words = ["status", "--seeds", "5", "--profile", str(place.profile), "--results", str(place.results)]
    command = [sys.executable, "-c", driver, str(place.notebooks), *words]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=True)
    assert f"{5 * len(TABLE1)} jobs of profile toy: 30 done, {5 * len(TABLE1) - 30} to do" in run.stdout
    told = run.stdout.splitlines()[-1]
    assert told.startswith("heavy [] ") and float(told.split()[-1]) < 5, told
