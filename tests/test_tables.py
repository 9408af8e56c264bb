"""Claims about Table 1, on finished jobs written by hand."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from stand_in import write_job

from mapl_core.grid import METHOD_NAMES
from mapl_core.results import ResultError, read_metrics, write_metrics
from mapl_core.runs import TableRow, load_results
from mapl_core.table_formats import as_csv, as_html, as_latex, as_markdown, latex, write_table
from mapl_core.tables import COLUMNS, TABLE1, UNTRAINED, paper_number, paper_numbers, table1

MADPO = TableRow("MAPL", "madpo", "dec-dec")
MARLHF = TableRow("MAPL", "marlhf", "dec-dec")


def tasks(*values: float) -> dict[str, float]:
    return {f"task{number}": value for number, value in enumerate(values)}


@pytest.fixture
def pocket(tmp_path: Path) -> Path:
    """Three seeds: untrained about 0.4, MADPO 0.8, MARLHF 0.6; the last iteration counts."""
    folder = tmp_path / "pocket"
    for seed, shift in enumerate((-0.01, 0.0, 0.01)):
        write_job(folder, ("untrained", "dec-dec", seed), [tasks(0.3 + shift, 0.5 + shift)])
        write_job(folder, ("madpo", "dec-dec", seed), [tasks(0.1, 0.1), tasks(0.7 + shift, 0.9 + shift)])
        write_job(folder, ("marlhf", "dec-dec", seed), [tasks(0.9, 0.9), tasks(0.5 - shift, 0.7 - shift)])
    return folder


def test_a_cell_is_the_mean_over_seeds_of_the_last_iteration(pocket: Path):
    """Seed means 0.79, 0.80, 0.81: s = 0.01, half-width 4.302653 * 0.01 / sqrt(3) = 0.024841."""
    cell = table1(load_results(pocket)).cells[MADPO, "tldr", "score"]
    assert cell.value.mean == pytest.approx(0.80) and cell.seeds == (0, 1, 2)
    assert cell.value.half_width == pytest.approx(0.024841, abs=1e-6)
    assert "| **80.0 ± 2.5 (3 seeds)** |" in as_markdown(table1(load_results(pocket)))


def test_the_gain_over_the_untrained_team_is_paired(pocket: Path):
    """MADPO shifts with the untrained team (gain 0.4 in each seed), MARLHF against it (0.22, 0.20, 0.18)."""
    cells = table1(load_results(pocket)).cells
    madpo, marlhf = cells[MADPO, "tldr", "score"].gain, cells[MARLHF, "tldr", "score"].gain
    assert madpo.mean == pytest.approx(0.4) and madpo.half_width == pytest.approx(0, abs=1e-9)
    assert marlhf.half_width == pytest.approx(0.049683, abs=1e-6)
    assert cells[UNTRAINED, "tldr", "score"].gain is None
    assert "| +20.0 ± 5.0 |" in as_markdown(table1(load_results(pocket)))


def test_best_and_second_are_marked_where_the_intervals_support_it(pocket: Path):
    marks = {row.method: cell.mark for (row, _, _), cell in table1(load_results(pocket)).cells.items()}
    assert marks == {"untrained": "", "marlhf": "second", "madpo": "best"}
    assert "<u>60.0 ± 2.5 (3 seeds)</u>" in as_markdown(table1(load_results(pocket)))


def test_a_best_that_one_seed_disputes_is_not_marked(pocket: Path):
    write_job(pocket, ("marlhf", "dec-dec", 1), [tasks(0.95, 0.95)])  # MARLHF means 0.61, 0.95, 0.59: below MADPO's 0.8
    table = table1(load_results(pocket))
    assert {cell.mark for cell in table.cells.values()} == {""}
    assert "**" not in as_markdown(table)


def test_one_seed_is_labelled_over_tasks(tmp_path: Path):
    write_job(tmp_path / "pocket", ("untrained", "dec-dec", 0), [tasks(0.2, 0.4)])
    write_job(tmp_path / "pocket", ("madpo", "dec-dec", 0), [tasks(0.2, 0.4), tasks(0.4, 0.6)])
    text = as_markdown(table1(load_results(tmp_path / "pocket")))
    assert "over tasks, one training run" in text and "t interval" not in text
    assert "(1 seed)" in text and "| +20.0 ± 0.0 |" in text


def test_nb7_the_table_says_profile_source_tasks_and_seeds(pocket: Path):
    text = as_markdown(table1(load_results(pocket)))
    assert text.startswith("# Table 1: main results - pocket profile\n\ntldr: pocket tasks, 2 for evaluation, 3 seeds.")
    assert "not comparable with the paper's" in text


def test_nb7_paper_numbers_stand_only_beside_the_paper_profile(pocket: Path, tmp_path: Path):
    assert "86.3" not in as_markdown(table1(load_results(pocket))) and "paper_percent" not in as_csv(
        table1(load_results(pocket))
    )
    write_job(tmp_path / "paper", ("marlhf", "dec-dec", 0), [tasks(0.5, 0.5)], source="paper")
    write_job(tmp_path / "paper", ("magrpo", "dec-dec", 0), [tasks(0.5, 0.5)], source="paper")
    table = table1(load_results(tmp_path / "paper"))
    (line,) = [line for line in as_markdown(table).splitlines() if "MARLHF, Dec-Dec |" in line]
    assert [cell.strip() for cell in line.split("|")][3:6] == ["50.0 ± 0.0 (1 seed)", "86.3", "-36.3"]
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(as_csv(table)))}
    assert {method: row["paper_percent"] for method, row in rows.items()} == {"marlhf": "86.3", "magrpo": ""}
    assert float(rows["marlhf"]["minus_paper_percent"]) == pytest.approx(50 - 86.3)
    assert rows["magrpo"]["minus_paper_percent"] == ""  # the text gives no number for MAGRPO, so none is shown
    assert ">86.3</td><td>-36.3</td>" in as_html(table) and "[86.3]" in as_latex(table)
    assert "paper" not in as_html(table1(load_results(pocket))).replace("comparable with the paper", "")


def test_the_csv_holds_every_number_exactly(pocket: Path):
    table = table1(load_results(pocket))
    rows = {row["row"]: row for row in csv.DictReader(io.StringIO(as_csv(table)))}
    madpo = rows["MADPO, Dec-Dec"]
    assert float(madpo["mean"]) == table.cells[MADPO, "tldr", "score"].value.mean
    assert (madpo["n_seeds"], madpo["interval"], madpo["seeds"], madpo["mark"]) == ("3", "over seeds", "0 1 2", "best")
    assert float(madpo["gain"]) == pytest.approx(0.4)


def test_the_table_says_what_every_method_spent(pocket: Path):
    for seed, compared in enumerate((10, 20, 30)):
        file = pocket / "jobs" / f"tldr-madpo-dec-dec-seed{seed}" / "metrics.csv"
        rows = read_metrics(file)
        last = max(rows, key=lambda row: row.iteration)
        counts = {"env_steps": 64, "agent_samples": 32, "comparator_samples": compared}
        extra = [dataclasses.replace(last, metric=f"count/{name}", value=value) for name, value in counts.items()]
        write_metrics(file, [*rows, dataclasses.replace(extra[2], iteration=0, value=0.0), *extra])
    table = table1(load_results(pocket))
    assert "64 / 32 / 20 / 0 (MADPO, Dec-Dec)" in as_markdown(table)
    (madpo,) = [row for row in csv.DictReader(io.StringIO(as_csv(table))) if row["method"] == "madpo"]
    assert [float(madpo[name]) for name in ("env_steps", "agent_samples", "comparator_samples")] == [64, 32, 20]


def test_a_coordinators_own_start_and_base_are_said(pocket: Path):
    assert "starts at" not in as_markdown(table1(load_results(pocket)))
    for seed, start in enumerate((0.4, 0.6)):
        folder = write_job(pocket, ("madpo", "cen-cen", seed), [tasks(start, start), tasks(0.7, 0.9)])
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["parameters"] |= {"central_model": "same", "agent_models": ["same"] if seed else ["other"]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    text = as_markdown(table1(load_results(pocket)))
    assert "Cen-Cen's coordinator starts at 50.0 before any training" in text
    assert "the centralised model is the agents' own base" in text


def test_rows_that_were_not_run_are_named(pocket: Path):
    text = as_markdown(table1(load_results(pocket)))
    assert "Not run: Single agent, raw; Single agent, GRPO; Single agent, PPO; Single agent, DPO; Sequential; " in text
    assert "CoLLM-DC; MARLHF, Cen-Cen; MARLHF, Dec-Cen; MADPO, Cen-Cen; MADPO, Dec-Cen." in text


def test_unfinished_jobs_and_jobs_of_other_tables_do_not_enter(pocket: Path):
    (pocket / "jobs" / "tldr-magrpo-dec-dec-seed0").mkdir()
    other = write_job(pocket, ("madpo", "dec-dec", 7), [tasks(0.0, 0.0)])
    other.rename(other.with_name("tldr-madpo-dec-dec-seed7-online"))
    rows = load_results(pocket).rows("tldr", TABLE1)
    assert {row.method: sorted(runs) for row, runs in rows.items()} == dict.fromkeys(
        ("untrained", "madpo", "marlhf"), [0, 1, 2]
    )


def test_jobs_made_with_other_settings_are_left_out_and_named(pocket: Path):
    table = table1(load_results(pocket, ["tldr-madpo-dec-dec-seed2"]))
    assert table.cells[MADPO, "tldr", "score"].seeds == (0, 1)
    assert "Left out, because made with other settings or damaged: tldr-madpo-dec-dec-seed2." in as_markdown(table)


def test_save2_a_damaged_job_is_named_not_averaged(pocket: Path):
    file = pocket / "jobs" / "tldr-madpo-dec-dec-seed1" / "evaluation.csv"
    file.write_text(file.read_text()[:-5])
    with pytest.raises(ResultError, match=r"seed1.evaluation\.csv, line 5: cut short"):
        table1(load_results(pocket))


def test_the_two_files_of_a_job_must_agree(pocket: Path):
    path = pocket / "jobs" / "tldr-madpo-dec-dec-seed1" / "metrics.csv"
    rows = read_metrics(path)
    write_metrics(path, [rows[0], rows[1].__class__(*list(vars(rows[1]).values())[:-1], 0.99)])
    with pytest.raises(ResultError, match="score at iteration 1 is not the mean over its tasks"):
        table1(load_results(pocket))


def test_no_finished_job_is_an_error_with_the_remedy(tmp_path: Path):
    with pytest.raises(ResultError, match=r"no finished job of table1 in .*run \./reproduce\.sh"):
        table1(load_results(tmp_path))


def test_equal_jobs_give_byte_equal_tables(pocket: Path, tmp_path: Path):
    first = [path.read_bytes() for path in write_table(table1(load_results(pocket)), tmp_path / "a", "table1")]
    second = [path.read_bytes() for path in write_table(table1(load_results(pocket)), tmp_path / "b", "table1")]
    assert first == second
    names = ["table1.csv", "table1.html", "table1.md", "table1.tex"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names


# -- forms to read -----------------------------------------------------------------------------------------------------


def test_the_rule_of_the_intervals_stands_above_the_numbers_in_every_form(pocket: Path):
    table = table1(load_results(pocket))
    for text in (as_markdown(table), as_latex(table), as_html(table)):
        assert 0 < text.index("a t interval over seeds") < text.index("MADPO, Dec-Dec"), text[:300]


def test_the_best_and_the_second_are_marked_in_words_and_looks(pocket: Path):
    table = table1(load_results(pocket))
    assert r"\textbf{80.0 $\pm$ 2.5 (3)}" in as_latex(table) and r"\underline{60.0 $\pm$ 2.5 (3)}" in as_latex(table)
    page = as_html(table)
    assert '<strong class="best">80.0 ± 2.5 (3 seeds)</strong> <span class="hidden">(best)</span>' in page
    assert '<span class="second">60.0 ± 2.5 (3 seeds)</span> <span class="hidden">(second best)</span>' in page


def test_a_row_that_a_domain_lacks_says_not_run_in_every_form(pocket: Path):
    for seed in range(3):
        write_job(
            pocket,
            ("untrained", "dec-dec", seed),
            [tasks(0.2, 0.4)],
            domain="bfcl",
            metric="correct",
            more_metrics=["cost"],
        )
    table = table1(load_results(pocket))
    (markdown,) = [line for line in as_markdown(table).splitlines() if "MADPO, Dec-Dec |" in line]
    assert [cell.strip() for cell in markdown.split("|")][5:9] == ["not run", "", "not run", ""]
    (latex_line,) = [line for line in as_latex(table).splitlines() if line.startswith("MADPO, Dec-Dec &")]
    assert latex_line.endswith(r"& not run & not run \\")
    (html,) = [line for line in as_html(table).splitlines() if ">MADPO, Dec-Dec</th>" in line]
    assert html.count('<td class="soft">not run</td>') == 2
    assert (
        len(list(csv.DictReader(io.StringIO(as_csv(table))))) == len(table.cells) == 5
    )  # no line for what was not run


def test_every_line_of_the_latex_table_has_all_its_columns_and_all_braces_close(pocket: Path):
    lines = as_latex(table1(load_results(pocket))).splitlines()
    inside = lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
    assert all(line.count(" & ") == 1 for line in inside if line.endswith(r"\\") and "multicolumn" not in line)
    text = re.sub(r"\\[{}]", "", "\n".join(lines))
    assert text.count("{") == text.count("}")


def test_nothing_in_a_name_is_taken_for_a_command(pocket: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(METHOD_NAMES, "madpo", r"A<b>&\end{x}50%_#$^~")
    table = table1(load_results(pocket))
    assert r"A<b>\&\textbackslash{}end\{x\}50\%\_\#\$\textasciicircum{}\textasciitilde{}, Dec-Dec" in as_latex(table)
    assert "A&lt;b&gt;&amp;" in as_html(table) and "A<b>" not in as_html(table)
    assert latex("±") == r"$\pm$"


def test_the_latex_table_compiles(pocket: Path, tmp_path: Path):
    """Where LaTeX is installed; elsewhere the claims above must do."""
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed")
    head = "\\documentclass{article}\\usepackage[utf8]{inputenc}\\usepackage{booktabs}\\begin{document}\n"
    (tmp_path / "page.tex").write_text(head + as_latex(table1(load_results(pocket))) + "\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:]


def test_the_html_table_has_headers_with_scope_in_a_box_that_scrolls_by_keyboard(pocket: Path):
    text = as_html(table1(load_results(pocket)))
    headers = re.findall(r"<th ([^>]*)>", text)
    assert headers and all(re.match(r'scope="(col|row|rowgroup)"', header) for header in headers)
    assert re.search(r'<div class="scroll" role="region" aria-label="[^"]+" tabindex="0">\s*<table>', text)
    assert "<caption>Table 1: main results - pocket profile</caption>" in text


# -- the paper's numbers -----------------------------------------------------------------------------------------------


def test_the_paper_numbers_are_those_of_its_text():
    """Read off section 5.2 and 5.3 by hand."""
    pivots = {
        ("tldr", "score"): (86.3, 92.9),
        ("coophe", "pass"): (61.0, 58.8),
        ("bfcl", "correct"): (22.7, 15.6),
        ("travel", "pass"): (70.5, 41.5),
    }
    for (domain, metric), (marlhf, madpo) in pivots.items():
        assert paper_number(domain, metric, "marlhf", "dec-dec") == marlhf
        assert paper_number(domain, metric, "madpo", "dec-dec") == madpo
    assert paper_number("coophe", "pass", "mapl", "best") == 65.8
    assert paper_number("travel", "pass", "mapl", "best") == 76.4
    assert paper_number("coophe", "call", "magrpo", "dec-dec") == 37.9
    assert paper_number("travel", "success", "marlhf", "dec-dec") == 13.1
    assert paper_number("bfcl", "correct", "madpo", "dec-dec", "buffer online") == 15.3
    assert paper_number("tldr", "score", "marlhf", "dec-dec", "comparator 4x") == 66.5
    assert paper_number("travel", "pass", "madpo", "dec-dec", "comparator DeepSeek-V4-Pro") == 47.4


def test_a_cell_that_the_text_does_not_give_stays_empty():
    assert paper_number("tldr", "score", "magrpo", "dec-dec") is None
    assert paper_number("tldr", "score", "madpo", "cen-cen") is None
    # "at least 59.6" is a bound on a difference, never a cell
    assert paper_number("tldr", "score", "marlhf", "dec-dec", "MAGRPO minus either actor-critic form") is None


def test_every_paper_number_names_its_section_and_there_are_no_others():
    rows = paper_numbers()
    assert len(rows) == 32
    assert all(row["section"].startswith(("5.2", "5.3")) and row["unit"] in ("percent", "points") for row in rows)
    assert sum(row["relation"] == ">=" for row in rows) == 4


def test_every_row_of_table1_has_a_name_and_every_domain_columns():
    assert {row.method for row in TABLE1} == set(METHOD_NAMES)
    assert len(TABLE1) == len({(row.method, row.paradigm) for row in TABLE1}) == 16
    assert all(COLUMNS.values())
