"""Claims about report.html: it stands alone, can be read by anyone, and says where its numbers come from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from stand_in import write_job

from mapl_core.figures import write_figure2
from mapl_core.report import SECTIONS, origin, write_report
from mapl_core.results import EvaluationRow, MetricRow, ResultError, write_evaluation, write_manifest, write_metrics
from mapl_core.runs import load_results
from mapl_core.tables import COLUMNS, TABLE1, UNTRAINED

ROOT = Path(__file__).resolve().parent.parent
VOID = {"meta", "br", "img", "link", "hr", "input"}


def tasks(*values: float) -> dict[str, float]:
    return {f"task{number}": value for number, value in enumerate(values)}


@pytest.fixture
def results(tmp_path: Path):
    for seed in range(3):
        write_job(tmp_path / "pocket", ("untrained", "dec-dec", seed), [tasks(0.3, 0.5)])
        write_job(tmp_path / "pocket", ("madpo", "dec-dec", seed), [tasks(0.3, 0.5), tasks(0.7 + seed / 99, 0.9)])
        write_job(tmp_path / "pocket", ("marlhf", "dec-dec", seed), [tasks(0.3, 0.5), tasks(0.5 - seed / 99, 0.7)])
    return load_results(tmp_path / "pocket")


@pytest.fixture
def page(results, tmp_path: Path) -> str:
    panels = write_figure2(results, tmp_path / "figures")
    return write_report(results, panels, tmp_path / "report.html").read_text()


class Reader(HTMLParser):
    """Open tags, and what is wrong with their nesting."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_every_tag_that_opens_closes(page: str):
    reader = read(page)
    assert reader.problems == [] and reader.open == []


def test_the_page_stands_alone_and_runs_nothing(page: str):
    targets = [values.get(name, "") for _, values in read(page).tags for name in ("src", "href")]
    assert all(target.startswith(("data:image/svg+xml;base64,", "#")) for target in targets if target)
    assert "<script" not in page and "@import" not in page and "url(" not in page


def test_every_section_is_there_and_can_be_reached_from_the_top(page: str):
    for name, title in SECTIONS.items():
        assert f'<a href="#{name}">{title}</a>' in page and f'<h2 id="{name}">{title}</h2>' in page
    assert page.index('<a class="skip" href="#content">') < page.index("<h1>")


def test_every_picture_has_an_alt_text_that_tells_what_it_shows(page: str):
    pictures = [values for tag, values in read(page).tags if tag == "img"]
    assert pictures and all("MADPO, Dec-Dec from 40 to" in values["alt"] for values in pictures)


def test_wide_things_scroll_in_their_own_box_and_the_keyboard_reaches_it(page: str):
    reader = read(page)
    wide = [values for tag, values in reader.tags if values.get("class") == "scroll"]
    assert len(wide) >= 3 and all(values["tabindex"] == "0" and values["aria-label"] for values in wide)
    assert len(re.findall(r'<div class="scroll"[^>]*>\s*<(?:table|img)', page)) == page.count("<table") + page.count(
        "<img"
    )
    assert ":focus-visible" in page and "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_table_figure_and_scoreboard_of_the_same_runs_are_in_it(page: str):
    assert "80.5 ± " in page  # seed means of MADPO: 80.0, 80.5, 81.0
    assert "MARLHF beats MADPO, on average over the paradigms" in page
    assert "Highest at the end: MADPO, Dec-Dec" in page


def test_the_origin_says_profile_tasks_seeds_command_commit_and_machine(results):
    found = origin(results, "tldr: pocket tasks")
    assert found["profile"] == "pocket" and found["seeds"] == "0, 1, 2"
    assert found["command"] == (
        "./reproduce.sh --profile pocket --domains tldr --methods madpo marlhf untrained --paradigms dec-dec "
        "--seeds 0,1,2"
    )
    assert "Linux" in found["machine"] and "9 jobs" in found["work"]
    assert re.match(r"python 3\.1\d", found["versions"])
    commit = results.runs[0].manifest["environment"]["commit"]
    assert found.get("commit", "")[:12] == (commit or "")[:12]


def test_without_training_the_page_says_so(tmp_path: Path):
    write_job(tmp_path / "pocket", ("untrained", "dec-dec", 0), [tasks(0.3, 0.5)])
    path = write_report(load_results(tmp_path / "pocket"), [], tmp_path / "report.html")
    assert "No curve is drawn: no training run has finished" in path.read_text()


def test_without_any_job_it_is_an_error_with_the_remedy(tmp_path: Path):
    with pytest.raises(ResultError, match=r"run \./reproduce\.sh"):
        write_report(load_results(tmp_path), [], tmp_path / "report.html")


def test_equal_results_give_byte_equal_pages(results, page: str, tmp_path: Path):
    panels = write_figure2(results, tmp_path / "again")
    assert write_report(results, panels, tmp_path / "again.html").read_text() == page


def test_nb6_everything_comes_from_csv_files_alone_without_torch(results, tmp_path: Path):
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers', 'peft', 'tkinter'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from mapl_core import documented\n"
        "documented.check_up_to_date = lambda *_: None\n"  # these jobs were written by hand
        "sys.exit(documented.main([*sys.argv[1:], '--command', 'c', '--machine', 'm']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not re.match("DISPLAY|MPLBACKEND", name)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(results.folder), str(tmp_path / "doc")],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "doc" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_grid_with_five_seeds_is_read_and_written_in_20_seconds(tmp_path: Path):
    """As large as the real files: 32 tasks, 5 evaluations, 12 oracle metrics and 40 others a job."""
    folder, random = tmp_path / "pocket", np.random.default_rng(0)
    for domain, columns in COLUMNS.items():
        for row in TABLE1:
            for seed in range(5):
                _write_large_job(folder, domain, row, seed, [column.metric for column in columns], random)
    start = time.process_time()
    results = load_results(folder)
    write_report(results, write_figure2(results, folder / "figures"), folder / "report.html")
    assert time.process_time() - start < 20
    assert len(results.runs) == 5 * len(TABLE1) * len(COLUMNS)


def _write_large_job(folder: Path, domain: str, row, seed: int, headline: list[str], random) -> None:
    job = folder / "jobs" / f"{domain}-{row.method}-{row.paradigm}-seed{seed}"
    cell = ("table1", "pocket", domain, row.method, row.paradigm, "current", "decay 0.2", seed)
    names = [*headline, *(f"oracle{number}" for number in range(12 - len(headline)))]
    metrics, evaluation = [], []
    for iteration in range(1 if row == UNTRAINED else 5):
        for name in names:
            values = random.uniform(size=32)
            evaluation += [EvaluationRow(f"task{task}", iteration, name, float(v)) for task, v in enumerate(values)]
            metrics.append(MetricRow(*cell, iteration, 256 * iteration, name, float(values.mean())))
        metrics += [MetricRow(*cell, iteration, 256 * iteration, f"train/{n}", 0.5) for n in range(40)]
    write_metrics(job / "metrics.csv", metrics)
    write_evaluation(job / "evaluation.csv", evaluation)
    write_manifest(
        job / "manifest.json", files=["metrics.csv", "evaluation.csv"], parameters={}, task_source="pocket",
        task_counts={"eval": 32},
    )  # fmt: skip
