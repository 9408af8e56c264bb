"""The figures of the paper, from the CSV files of finished jobs alone; no model and no screen is needed.

One colour a method and one line style a paradigm, in every figure. Titles are neutral and name profile, tasks and
seeds; the finding is a sentence computed from the data, so that it cannot go stale; the caption says what the band is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mapl_core.intervals import OVER_SEEDS, OVER_TASKS, Interval, difference, interval
from mapl_core.results import ResultError, write_atomically
from mapl_core.runs import WITHOUT_TRAINING, Run, TableRow, by_seed, describe_runs, load_rows
from mapl_core.tables import COLUMNS, TABLE1, UNTRAINED

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
DOMAIN_NAMES = {"tldr": "TLDR", "coophe": "CoopHE", "bfcl": "BFCL"}


@dataclass(frozen=True)
class Curve:
    """One trained row over training: `points[i]` is the interval of the metric after `env_steps[i]` joint responses."""

    row: TableRow
    env_steps: tuple[float, ...]
    points: tuple[Interval, ...]


@dataclass(frozen=True)
class Figure:
    """A drawn figure and the words that belong to it."""

    title: str
    caption: str
    alt_text: str
    curves: tuple[Curve, ...]
    paths: tuple[Path, ...]


def figure2(
    profile_folder: Path | str, profile: str, domain: str, folder: Path | str, *, leave_out: Sequence[str] = ()
) -> Figure:
    """Figure 2, one domain's panel: the headline metric of table1's trained rows over environment steps.

    Writes figure2_<domain>.png, .svg and .md (the picture with caption and alt text) into `folder`.

    Raises:
        ResultError: if no job of the panel has finished, or one is damaged.
    """
    rows = load_rows(profile_folder, domain, TABLE1, leave_out)
    column = COLUMNS[domain][0]
    trained = {row: runs for row, runs in rows.items() if row.method not in WITHOUT_TRAINING}
    if not trained:
        raise ResultError(f"no finished {domain} training job of figure2 in {profile_folder}; run ./reproduce.sh first")
    curves = tuple(curve(row, runs, column.metric) for row, runs in trained.items())
    untrained = interval(by_seed(rows[UNTRAINED], column.metric)) if UNTRAINED in rows else None
    title = f"{DOMAIN_NAMES[domain]}, {column.metric} over training - {profile}, {describe_runs(trained)}"
    compared = trained | {row: runs for row, runs in rows.items() if row == UNTRAINED}
    caption = f"{finding(compared, column.metric)} {_band_note(curves)}"
    alt_text = describe(curves, untrained, DOMAIN_NAMES[domain], column.metric)
    paths = _draw(curves, untrained, title, column.title, alt_text, Path(folder) / f"figure2_{domain}")
    words = f"# Figure 2, {DOMAIN_NAMES[domain]}\n\n![{alt_text}]({paths[0].name})\n\n{title}. {caption}\n"
    page = Path(folder) / f"figure2_{domain}.md"
    write_atomically(page, words)
    return Figure(title, caption, alt_text, curves, (*paths, page))


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
    kind = "over seeds" if compared and len(final[compared[0]].keys() & final[UNTRAINED].keys()) > 1 else OVER_TASKS
    return (
        f"{sentence} {len(above)} of {len(compared)} trained teams end above the untrained team "
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
    kinds = {point.kind for curve in curves for point in curve.points}
    over_seeds = "t interval over seeds" if OVER_SEEDS in kinds else ""
    over_tasks = f"bootstrap {OVER_TASKS}" if OVER_TASKS in kinds else ""
    return f"Lines are means, bands 95 % intervals ({' or '.join(filter(None, (over_seeds, over_tasks)))})."


def _draw(
    curves: tuple[Curve, ...], untrained: Interval | None, title: str, label: str, alt_text: str, path: Path
) -> tuple[Path, Path]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # Built without pyplot: no window, no global state, the same picture in a notebook and on a server.
    canvas = Canvas(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    labels: list[tuple[float, str, str, float | None]] = []  # height, text, colour, where the line ends
    if untrained:
        axes.axhspan(100 * untrained.low, 100 * untrained.high, color=COLOURS["untrained"], alpha=0.12, linewidth=0)
        axes.axhline(100 * untrained.mean, color=COLOURS["untrained"], linewidth=1.2)
        labels.append((100 * untrained.mean, UNTRAINED.label, COLOURS["untrained"], None))
    for curve in curves:
        colour, mean = COLOURS[curve.row.method], [100 * point.mean for point in curve.points]
        low, high = ([100 * getattr(point, bound) for point in curve.points] for bound in ("low", "high"))
        axes.fill_between(curve.env_steps, low, high, color=colour, alpha=0.1, linewidth=0)
        style = LINE_STYLES[curve.row.paradigm]
        axes.plot(curve.env_steps, mean, style, color=colour, linewidth=1.8, marker="o", markersize=3)
        labels.append((mean[-1], curve.row.label, colour, curve.env_steps[-1]))
    axes.margins(x=0.03)
    axes.set_xlabel("environment steps (joint responses trained on)")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    _label_lines(axes, sorted(labels, key=lambda entry: entry[0]))
    paths = (path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg"))
    # A fixed salt and no date: equal data give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "mapl", "svg.fonttype": "none"}):
        for target, undated in zip(paths, ({}, {"Date": None}), strict=True):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=target.suffix[1:], dpi=160, metadata={"Description": alt_text, **undated})
            write_atomically(target, buffer.getvalue())
    return paths


def _label_lines(axes, labels: list[tuple[float, str, str, float | None]]) -> None:
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
