"""Claims about Figure 2: drawn from CSV alone, never blank, and its words computed from the data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stand_in import write_job

from mapl_core import figures
from mapl_core.figures import COLOURS, LINE_STYLES, curve, figure2, figure2_panel, write_figure2
from mapl_core.intervals import interval
from mapl_core.results import ResultError
from mapl_core.runs import METHOD_NAMES, PARADIGM_NAMES, TableRow, load_results
from mapl_core.tables import TABLE1, UNTRAINED

ROOT = Path(__file__).resolve().parent.parent
MADPO = TableRow("MAPL", "madpo", "dec-dec")


def tasks(level: float) -> dict[str, float]:
    return {"a": level - 0.02, "b": level, "c": level + 0.02}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two seeds of three rows; MADPO rises to 0.8, MARLHF Cen-Cen falls to 0.3, the untrained team stays at 0.4."""
    folder = tmp_path / "pocket"
    for seed, shift in ((0, -0.01), (1, 0.01)):
        write_job(folder, ("untrained", "dec-dec", seed), [tasks(0.4 + shift)])
        write_job(folder, ("madpo", "dec-dec", seed), [tasks(level + shift) for level in (0.4, 0.6, 0.8)])
        write_job(folder, ("marlhf", "cen-cen", seed), [tasks(level + shift) for level in (0.4, 0.5, 0.3)])
    return folder


def test_nb6_the_panel_is_drawn_and_not_blank(results: Path, tmp_path: Path):
    from matplotlib.image import imread

    figure = figure2(load_results(results), "tldr", tmp_path / "figures")
    names = ["figure2_tldr.png", "figure2_tldr.svg", "figure2_tldr.md"]
    assert [path.name for path in figure.paths] == names and all(path.stat().st_size for path in figure.paths)
    picture = imread(figure.paths[0])[..., :3]
    for method in ("madpo", "marlhf"):
        colour = np.array([int(COLOURS[method][place : place + 2], 16) for place in (1, 3, 5)]) / 255
        assert (np.abs(picture - colour).max(axis=-1) < 0.02).sum() > 200, f"no line of {method} in the picture"


def test_a_curve_is_the_mean_over_seeds_at_the_steps_it_was_trained_for(results: Path):
    rows = load_results(results).rows("tldr", TABLE1)
    found = curve(MADPO, rows[MADPO], "score")
    assert found.env_steps == (0, 100, 200)
    assert [point.mean for point in found.points] == pytest.approx([0.4, 0.6, 0.8])
    # seed means 0.79 and 0.81: s = 0.0141421, t(0.975, 1) = 12.7062, half-width 0.127062
    assert found.points[-1].half_width == pytest.approx(0.127062, abs=1e-5)


def test_the_title_is_neutral_and_says_profile_tasks_and_seeds(results: Path, tmp_path: Path):
    title = figure2(load_results(results), "tldr", tmp_path).title
    assert title == "TLDR, score over training - pocket, pocket tasks, 3 for evaluation, 2 seeds"


def test_the_finding_follows_the_data(results: Path, tmp_path: Path):
    """Over two seeds MADPO gains exactly 0.4 in both (interval above 0), MARLHF loses 0.1 in both."""
    caption = figure2(load_results(results), "tldr", tmp_path).caption
    assert "Highest at the end: MADPO, Dec-Dec with 80.0 %." in caption
    assert "1 of 2 trained rows end above the untrained team (40.0 %)" in caption and "over seeds" in caption
    for seed in (0, 1):
        write_job(results, ("marlhf", "cen-cen", seed), [tasks(0.4), tasks(0.95)])
    caption = figure2(load_results(results), "tldr", tmp_path).caption
    assert "MARLHF, Cen-Cen with 95.0 %" in caption and "2 of 2 trained rows" in caption


def test_the_band_is_named_for_what_it_is(results: Path, tmp_path: Path):
    assert "bands 95 % intervals (t interval over seeds)" in figure2(load_results(results), "tldr", tmp_path).caption
    one = tmp_path / "one" / "pocket"
    write_job(one, ("madpo", "dec-dec", 0), [tasks(0.4), tasks(0.8)])
    caption = figure2(load_results(one), "tldr", tmp_path).caption
    assert "bootstrap over tasks, one training run" in caption and "t interval" not in caption


def test_alt_text_tells_the_figure_to_someone_who_cannot_see_it(results: Path, tmp_path: Path):
    figure = figure2(load_results(results), "tldr", tmp_path)
    for part in ("MADPO, Dec-Dec from 40 to 80 %", "MARLHF, Cen-Cen from 40 to 30 %", "untrained team stands at 40 %"):
        assert part in figure.alt_text
    assert f"![{figure.alt_text}](figure2_tldr.png)" in figure.paths[2].read_text()
    assert figure.alt_text in figure.paths[1].read_text()  # the description inside the SVG


def test_every_method_has_one_colour_and_every_paradigm_one_line_style():
    assert COLOURS.keys() == METHOD_NAMES.keys() and len(set(COLOURS.values())) == len(COLOURS)
    assert LINE_STYLES.keys() == PARADIGM_NAMES.keys() and len(set(LINE_STYLES.values())) == len(LINE_STYLES)


def test_colours_stay_apart_when_reds_and_greens_look_alike():
    """Deuteranopia, simulated by Vienot's matrix on linear RGB: any two method colours differ visibly."""
    matrix = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])
    seen = {}
    for method, code in COLOURS.items():
        linear = (np.array([int(code[place : place + 2], 16) for place in (1, 3, 5)]) / 255) ** 2.2
        seen[method] = np.clip(matrix @ linear, 0, 1) ** (1 / 2.2)
    names = sorted(seen)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            assert np.linalg.norm(seen[first] - seen[second]) > 0.15, (first, second)


def test_equal_data_give_byte_equal_pictures(results: Path, tmp_path: Path):
    first = [path.read_bytes() for path in figure2(load_results(results), "tldr", tmp_path / "a").paths]
    second = [path.read_bytes() for path in figure2(load_results(results), "tldr", tmp_path / "b").paths]
    assert first == second


def test_labels_of_close_lines_do_not_overlap_and_move_no_further_than_needed():
    assert figures.spread([10.0, 50.0, 90.0], 5.0) == [10.0, 50.0, 90.0]
    assert figures.spread([10.0, 10.0, 50.0], 5.0) == [7.5, 12.5, 50.0]
    # 10 and 11 become 8 and 13; then 14 is too close to 13 and the three centre on their mean 11.67
    assert figures.spread([10.0, 11.0, 14.0], 5.0) == pytest.approx([35 / 3 - 5, 35 / 3, 35 / 3 + 5])


def test_only_iterations_that_all_seeds_reached_are_drawn(results: Path):
    write_job(results, ("madpo", "dec-dec", 2), [tasks(0.4), tasks(0.5)])
    found = curve(MADPO, load_results(results).rows("tldr", TABLE1)[MADPO], "score")
    assert found.env_steps == (0, 100)


def test_without_an_untrained_run_the_figure_says_less(tmp_path: Path):
    write_job(tmp_path / "pocket", ("madpo", "dec-dec", 0), [tasks(0.4), tasks(0.8)])
    figure = figure2(load_results(tmp_path / "pocket"), "tldr", tmp_path)
    assert "untrained" not in figure.caption + figure.alt_text


def test_no_trained_run_is_an_error_with_the_remedy(tmp_path: Path):
    write_job(tmp_path / "pocket", ("untrained", "dec-dec", 0), [tasks(0.4)])
    with pytest.raises(ResultError, match=r"no finished job of figure2 with training in tldr .*run \./reproduce\.sh"):
        figure2(load_results(tmp_path / "pocket"), "tldr", tmp_path)
    assert interval({0: tasks(0.4)}).mean == pytest.approx(0.4) and UNTRAINED in TABLE1


def test_nb6_drawing_needs_no_model_library_and_no_screen(results: Path, tmp_path: Path):
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers', 'peft', 'tkinter'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from mapl_core.figures import figure2\n"
        "from mapl_core.runs import load_results\n"
        "print(len(figure2(load_results(sys.argv[1]), 'tldr', sys.argv[2]).paths))"
    )
    environment = {name: value for name, value in os.environ.items() if not re.match("DISPLAY|MPLBACKEND", name)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(results), str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=environment | {"MPLBACKEND": "Agg"}, check=False,
    )  # fmt: skip
    assert run.stdout == "3\n", run.stderr


# -- all domains together ----------------------------------------------------------------------------------------------


def test_figure2_as_a_whole_has_a_panel_for_every_domain_with_a_finished_training(results: Path, tmp_path: Path):
    for seed in (0, 1):
        write_job(results, ("madpo", "dec-dec", seed), [tasks(0.2), tasks(0.5)], domain="travel", metric="pass")
        write_job(results, ("untrained", "dec-dec", seed), [tasks(0.2)], domain="bfcl", metric="correct")
    figures_written = write_figure2(load_results(results), tmp_path)
    names = ["figure2_tldr.png", "figure2_travel.png", "figure2.png"]  # BFCL has no curve to draw
    assert [figure.paths[0].name for figure in figures_written] == names
    whole = figures_written[-1]
    assert whole.title == "Figure 2: training curves - pocket profile"
    assert "TLDR score over environment steps" in whole.alt_text and "Travel pass over environment" in whole.alt_text
    assert len(whole.curves) == 3 and all(path.stat().st_size for path in whole.paths)
    svg = whole.paths[1].read_text()
    for text in ("MADPO", "MARLHF", "Dec-Dec", "Cen-Cen", UNTRAINED.label, "TLDR, score", "Travel, pass"):
        assert text in svg


def test_one_domain_needs_no_second_picture(results: Path, tmp_path: Path):
    assert [figure.paths[0].name for figure in write_figure2(load_results(results), tmp_path)] == ["figure2_tldr.png"]


def test_without_any_training_there_is_no_figure(tmp_path: Path):
    write_job(tmp_path / "pocket", ("untrained", "dec-dec", 0), [tasks(0.4)])
    assert write_figure2(load_results(tmp_path / "pocket"), tmp_path) == []


def test_a_method_has_the_same_colour_in_every_panel(results: Path, tmp_path: Path):
    for seed in (0, 1):
        write_job(results, ("madpo", "dec-dec", seed), [tasks(0.2), tasks(0.5)], domain="travel", metric="pass")
    *panels, whole = write_figure2(load_results(results), tmp_path)
    for figure in (*panels, whole):
        assert COLOURS["madpo"].lower() in figure.paths[1].read_text().lower()


def test_a_single_run_without_tasks_is_drawn_without_a_band(tmp_path: Path):
    write_job(
        tmp_path / "pocket", ("madpo", "dec-dec", 0), [{"mean over all tasks": 0.4}, {"mean over all tasks": 0.8}]
    )
    panel = figure2_panel(load_results(tmp_path / "pocket"), "tldr")
    assert "no band" in panel.caption and "bands" not in panel.caption
    assert figure2(load_results(tmp_path / "pocket"), "tldr", tmp_path).paths[0].stat().st_size
