"""The figures of the paper, from the CSV files of finished jobs alone; no model and no screen is needed.

One colour a method and one line style a paradigm, in every figure. Titles are neutral and name profile, tasks and
seeds; the finding is a sentence computed from the data, so that it cannot go stale; the caption says what the band is.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mapl_core.intervals import OVER_SEEDS, OVER_TASKS, Interval, difference, interval
from mapl_core.results import ResultError, write_atomically
from mapl_core.runs import (
    DOMAIN_NAMES,
    METHOD_NAMES,
    PARADIGM_NAMES,
    Results,
    Run,
    TableRow,
    by_seed,
    describe_runs,
    nothing_finished,
)
from mapl_core.tables import COLUMNS, TABLE1, UNTRAINED, Column

# Okabe and Ito's palette, with colours added for the single agent and the talking teams; all are told apart under the
# common forms of colour blindness.
COLOURS = {
    "single_raw": "#CCCCCC",
    "single_grpo": "#CC79A7",
    "single_ppo": "#550088",
    "single_dpo": "#000066",
    "untrained": "#666666",
    "sequential": "#999933",
    "discussion": "#661100",
    "magrpo": "#009E73",
    "collm_cc": "#E69F00",
    "collm_dc": "#56B4E9",
    "marlhf": "#0072B2",
    "madpo": "#D55E00",
}
LINE_STYLES = {"dec-dec": "-", "cen-cen": "--", "dec-cen": ":", "single": "-."}


@dataclass(frozen=True)
class Curve:
    """One trained row over training: `points[i]` is the interval of the metric after `env_steps[i]` joint responses."""

    row: TableRow
    env_steps: tuple[float, ...]
    points: tuple[Interval, ...]


@dataclass(frozen=True)
class Panel:
    """What is drawn for one domain: its trained rows, the untrained team's level, and the words that belong to them."""

    domain: str
    title: str
    caption: str
    alt_text: str
    column: Column
    curves: tuple[Curve, ...]
    untrained: Interval | None


@dataclass(frozen=True)
class Figure:
    """A drawn figure and the words that belong to it."""

    title: str
    caption: str
    alt_text: str
    curves: tuple[Curve, ...]
    paths: tuple[Path, ...]


def figure2(results: Results, domain: str, folder: Path | str) -> Figure:
    """Figure 2, one domain's panel: the headline metric of table1's trained rows over environment steps.

    Writes figure2_<domain>.png, .svg and .md (the picture with caption and alt text) into `folder`.

    Raises:
        ResultError: if no training job of the panel has finished.
    """
    panel = figure2_panel(results, domain)
    canvas = _canvas(7.2, 4.2)
    axes = canvas.add_subplot()
    labels = _draw_panel(axes, panel)
    _label_lines(axes, sorted(labels, key=lambda entry: entry[0]))
    paths = _save(canvas, Path(folder) / f"figure2_{domain}", panel.alt_text)
    words = f"# Figure 2, {DOMAIN_NAMES[domain]}\n\n![{panel.alt_text}]({paths[0].name})\n\n"
    page = Path(folder) / f"figure2_{domain}.md"
    write_atomically(page, f"{words}{panel.title}. {panel.caption}\n")
    return Figure(panel.title, panel.caption, panel.alt_text, panel.curves, (*paths, page))


def figure2_together(results: Results, folder: Path | str) -> Figure:
    """Figure 2 as a whole: a panel for every domain with a finished training job, under one legend.

    Writes figure2.png, .svg and .md into `folder`.

    Raises:
        ResultError: if no training job has finished.
    """
    panels = [figure2_panel(results, domain) for domain in trained_domains(results)]
    if not panels:
        raise nothing_finished(results, "figure2 with training")
    columns = min(2, len(panels))
    height = math.ceil(len(panels) / columns)
    canvas = _canvas(6.4 * columns, 3.9 * height + 0.8)
    for place, panel in enumerate(panels, 1):
        _draw_panel(canvas.add_subplot(height, columns, place), panel)
    curves = tuple(curve for panel in panels for curve in panel.curves)
    with_untrained = any(panel.untrained for panel in panels)
    handles = _legend(curves, with_untrained)
    canvas.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=8, frameon=False)
    alt_text = " ".join(panel.alt_text for panel in panels)
    paths = _save(canvas, Path(folder) / "figure2", alt_text)
    title = f"Figure 2: training curves - {results.profile} profile"
    caption = " ".join(f"{panel.title}: {panel.caption}" for panel in panels)
    page = Path(folder) / "figure2.md"
    write_atomically(page, f"# {title}\n\n![{alt_text}]({paths[0].name})\n\n{caption}\n")
    return Figure(title, caption, alt_text, curves, (*paths, page))


def write_figure2(results: Results, folder: Path | str) -> list[Figure]:
    """Every panel of Figure 2 that finished jobs give, and the whole; none without a finished training job."""
    domains = trained_domains(results)
    panels = [figure2(results, domain, folder) for domain in domains]
    return [*panels, figure2_together(results, folder)] if len(panels) > 1 else panels


def trained_domains(results: Results) -> list[str]:
    """The domains of which a training job has finished: those with curves to draw."""
    return [domain for domain in COLUMNS if _trained(results.rows(domain, TABLE1))]


def _trained(rows: Mapping[TableRow, Mapping[int, Run]]) -> dict[TableRow, Mapping[int, Run]]:
    """The rows that were evaluated more than once: at the start and after every iteration of training."""
    return {row: runs for row, runs in rows.items() if all(run.iterations > 0 for run in runs.values())}


def figure2_panel(results: Results, domain: str) -> Panel:
    """Curves and words of one domain's panel. Raises ResultError if no training job has finished."""
    rows = results.rows(domain, TABLE1)
    column, trained = COLUMNS[domain][0], _trained(rows)
    if not trained:
        raise nothing_finished(results, f"figure2 with training in {domain}")
    curves = tuple(curve(row, runs, column.metric) for row, runs in trained.items())
    untrained = interval(by_seed(rows[UNTRAINED], column.metric)) if UNTRAINED in rows else None
    name = DOMAIN_NAMES[domain]
    shown = {row: rows[row] for row in rows if row in trained or row == UNTRAINED}
    return Panel(
        domain=domain,
        title=f"{name}, {column.metric} over training - {results.profile}, {describe_runs(trained)}",
        caption=f"{finding(shown, column.metric)} {_band_note(curves)}",
        alt_text=describe(curves, untrained, name, column.metric),
        column=column,
        curves=curves,
        untrained=untrained,
    )


def curve(row: TableRow, runs: Mapping[int, Run], metric: str) -> Curve:
    """Mean and 95 % interval of `metric` after every iteration that all seeds of the row have reached.

    Environment steps are averaged over seeds, which may differ by the ties that were dropped.
    """
    iterations = sorted(set.intersection(*(set(run.env_steps(metric)) for run in runs.values())))
    if not iterations:
        raise ResultError(f"the runs of {row.label} have no {metric} at a common iteration; run them again")
    steps = tuple(sum(run.env_steps(metric)[at] for run in runs.values()) / len(runs) for at in iterations)
    return Curve(row, steps, tuple(interval(by_seed(runs, metric, at)) for at in iterations))


def finding(rows: Mapping[TableRow, Mapping[int, Run]], metric: str) -> str:
    """The finding as a sentence: which row ends highest, and which trained rows end above the untrained team."""
    final = {row: by_seed(runs, metric) for row, runs in rows.items()}
    means = {row: interval(values).mean for row, values in final.items() if row != UNTRAINED}
    best = max(means, key=lambda row: means[row])
    sentence = f"Highest at the end: {best.label} with {100 * means[best]:.1f} %."
    if UNTRAINED not in final:
        return sentence
    compared = [row for row in means if final[row].keys() & final[UNTRAINED].keys()]
    above = [row for row in compared if difference(final[row], final[UNTRAINED]).low > 0]
    kinds = {difference(final[row], final[UNTRAINED]).kind for row in compared}
    kind = " or ".join(sorted(kinds))
    return (
        f"{sentence} {len(above)} of {len(compared)} trained rows end above the untrained team "
        f"({100 * interval(final[UNTRAINED]).mean:.1f} %): the 95 % interval of the paired difference, {kind}, "
        "lies above 0."
    )


def describe(curves: tuple[Curve, ...], untrained: Interval | None, domain: str, metric: str) -> str:
    """Alt text: what someone who cannot see the figure needs to know, in one paragraph."""
    parts = [
        f"{curve.row.label} from {100 * curve.points[0].mean:.0f} to {100 * curve.points[-1].mean:.0f} %"
        for curve in curves
    ]
    level = f" The untrained team stands at {100 * untrained.mean:.0f} %." if untrained else ""
    return f"Line plot of the {domain} {metric} over environment steps. {'; '.join(parts)}.{level}"


def _band_note(curves: tuple[Curve, ...]) -> str:
    kinds = {point.kind for curve in curves for point in curve.points if point.is_bounded}
    if not kinds:
        return "Lines are single runs of which only the means over tasks were kept: no band."
    over_seeds = "t interval over seeds" if OVER_SEEDS in kinds else ""
    over_tasks = f"bootstrap {OVER_TASKS}" if OVER_TASKS in kinds else ""
    return f"Lines are means, bands 95 % intervals ({' or '.join(filter(None, (over_seeds, over_tasks)))})."


def _canvas(width: float, height: float) -> Any:
    """An empty figure, in inches. Built without pyplot: no window, no global state, the same picture everywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas


def _draw_panel(axes: Any, panel: Panel) -> list[tuple[float, str, str, float | None]]:
    """Draw one domain. Returns what labels need: height, text, colour, where the line ends (None: at the right)."""
    labels: list[tuple[float, str, str, float | None]] = []
    if panel.untrained:
        level, colour = panel.untrained, COLOURS["untrained"]
        if level.is_bounded:
            axes.axhspan(100 * level.low, 100 * level.high, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(100 * level.mean, color=colour, linewidth=1.2)
        labels.append((100 * level.mean, UNTRAINED.label, colour, None))
    for curve in panel.curves:
        colour, mean = COLOURS[curve.row.method], [100 * point.mean for point in curve.points]
        if all(point.is_bounded for point in curve.points):
            low, high = ([100 * getattr(point, bound) for point in curve.points] for bound in ("low", "high"))
            axes.fill_between(curve.env_steps, low, high, color=colour, alpha=0.1, linewidth=0)
        axes.plot(curve.env_steps, mean, _style(curve.row), color=colour, linewidth=1.8, marker="o", markersize=3)
        labels.append((mean[-1], curve.row.label, colour, curve.env_steps[-1]))
    axes.margins(x=0.03)
    axes.set_xlabel("environment steps (joint responses trained on)")
    axes.set_ylabel(panel.column.title)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return labels


def _style(row: TableRow) -> str:
    """Line style of a paradigm; a row that has none of the three (a single agent) is drawn solid."""
    return LINE_STYLES.get(row.paradigm, "-")


def _legend(curves: Sequence[Curve], with_untrained: bool) -> list[Any]:
    """One entry a method, by colour, then one a paradigm, by line style."""
    from matplotlib.lines import Line2D

    methods = [UNTRAINED.method] * with_untrained + list(dict.fromkeys(curve.row.method for curve in curves))
    styles = dict.fromkeys(curve.row.paradigm for curve in curves if curve.row.paradigm in LINE_STYLES)
    return [
        *(Line2D([], [], color=COLOURS[name], linewidth=2.5, label=METHOD_NAMES[name]) for name in methods),
        *(Line2D([], [], color="#000000", linestyle=LINE_STYLES[name], label=PARADIGM_NAMES[name]) for name in styles),
    ]


def _save(canvas: Any, path: Path, alt_text: str) -> tuple[Path, Path]:
    import matplotlib

    paths = (path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg"))
    # A fixed salt and no date: equal data give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "mapl", "svg.fonttype": "none"}):
        for target, undated in zip(paths, ({}, {"Date": None}), strict=True):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=target.suffix[1:], dpi=160, metadata={"Description": alt_text, **undated})
            write_atomically(target, buffer.getvalue())
    return paths


def _label_lines(axes: Any, labels: list[tuple[float, str, str, float | None]]) -> None:
    """Write each line's name beside its end, in its colour, with a thin leader where it had to move."""
    bottom, top = axes.get_ylim()
    heights = spread([height for height, *_ in labels], 0.055 * (top - bottom))
    for (value, text, colour, end), height in zip(labels, heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, value) if end is None else (end, value),
            xycoords=("axes fraction" if end is None else "data", "data"),
            xytext=(1.05, (height - bottom) / (top - bottom)),
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1},
        )


def spread(heights: list[float], gap: float) -> list[float]:
    """Move ascending heights as little as possible (least squares) so that none are closer than `gap`.

    Labels that would overlap form a block around their common mean; blocks that then touch are joined.
    """
    blocks: list[list[float]] = []  # of heights less the room their predecessors need
    for place, height in enumerate(heights):
        blocks.append([height - place * gap])
        while len(blocks) > 1 and _middle(blocks[-2]) > _middle(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    level = [_middle(block) for block in blocks for _ in block]
    return [height + place * gap for place, height in enumerate(level)]


def _middle(block: list[float]) -> float:
    return sum(block) / len(block)
