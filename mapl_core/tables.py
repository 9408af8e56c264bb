"""The tables of the paper, from the CSV files of finished jobs alone; no model is needed. Written by table_formats.py.

Table 1 compares the training methods. A cell is `mean ± half-width (n seeds)` of a 95 % interval. The best cell is bold
and the second underlined only where the interval of the paired difference to every lower cell lies above zero.
The paper's numbers stand beside ours only in the `paper` profile, in a column of their own.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources

from mapl_core.intervals import OVER_TASKS, BySeed, Interval, difference, interval
from mapl_core.runs import (
    DOMAIN_NAMES,
    SINGLE_AGENT,
    Results,
    Run,
    TableRow,
    by_seed,
    describe_runs,
    nothing_finished,
)


@dataclass(frozen=True)
class Column:
    """One column of a table: a metric of a domain.

    Attributes:
        metric: its name in metrics.csv.
        title: the column's heading, with the unit.
        higher_is_better: decides what is marked; None marks nothing.
        scale: from the metric's own unit to that of the heading.
    """

    metric: str
    title: str
    higher_is_better: bool | None = True
    scale: float = 100.0


UNTRAINED = TableRow("Test-time team", "untrained", "dec-dec")
TABLE1 = (
    *(TableRow("Single agent", method, "single") for method in SINGLE_AGENT),
    UNTRAINED,
    *(TableRow("Test-time team", method, "dec-dec") for method in ("sequential", "discussion")),
    *(TableRow("MARL, oracle reward", method, "dec-dec") for method in ("magrpo", "collm_cc", "collm_dc")),
    *(
        TableRow("MAPL", method, paradigm)
        for method in ("marlhf", "madpo")
        for paradigm in ("dec-dec", "cen-cen", "dec-cen")
    ),
)
COUNTS = {
    "env_steps": "trained on",
    "agent_samples": "played by the agents",
    "comparator_samples": "played by the comparator",
    "reward_model_samples": "read by the reward model's fit",
}
COLUMNS = {
    "tldr": (Column("score", "TLDR score, %"),),
    "coophe": (Column("pass", "CoopHE pass, %"), Column("call", "CoopHE call, %")),
    "bfcl": (
        Column("correct", "BFCL correct, %"),
        # Fewer calls are better only where they answer the request: an idle team would be the best of all.
        Column("cost", "BFCL cost, calls per agent", higher_is_better=None, scale=1.0),
    ),
    "travel": (Column("pass", "Travel pass, %"), Column("success", "Travel success, %")),
}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of the paper
# ---------------------------------------------------------------------------------------------------------------------


def paper_number(domain: str, metric: str, method: str, paradigm: str, setting: str = "default") -> float | None:
    """What the paper's text states for a cell, in its unit (percent); None if the text does not give it."""
    for row in paper_numbers():
        cell = (row["domain"], row["metric"], row["method"], row["paradigm"], row["setting"])
        if cell == (domain, metric, method, paradigm, setting) and row["relation"] == "=":
            return float(row["value"])
    return None


def paper_numbers() -> list[dict[str, str]]:
    """Every number that the paper's text gives, with its section; its tables are not part of that text."""
    text = resources.files("mapl_core").joinpath("data/paper_numbers.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))


# ---------------------------------------------------------------------------------------------------------------------
# Table 1
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One number of a table, in the metric's own unit (0 to 1), with what it is compared with."""

    row: TableRow
    domain: str
    column: Column
    value: Interval
    seeds: tuple[int, ...]
    gain: Interval | None
    """Difference to the untrained team; None where no seed is shared, and for the untrained team itself."""
    counts: Mapping[str, float]
    """Joint responses of one run, by the names of `COUNTS`; means over seeds."""
    mark: str = ""
    """"best", "second" or nothing."""


@dataclass(frozen=True)
class Table:
    """A table ready to print: cells by (row, domain, metric), and where its numbers come from.

    Attributes:
        facts: task source, tasks and seeds of every domain.
        rule: how to read a cell, its interval and its marks; stands above the numbers.
        notes: what else must be known, below them.
    """

    title: str
    facts: str
    rule: str
    notes: list[str]
    cells: dict[tuple[TableRow, str, str], Cell] = field(default_factory=dict)
    with_paper_numbers: bool = False

    @property
    def columns(self) -> list[tuple[str, Column]]:
        """(domain, column) of every column that has a number."""
        return list(dict.fromkeys((domain, cell.column) for (_, domain, _), cell in self.cells.items()))

    @property
    def rows(self) -> list[TableRow]:
        """The rows that have a number, in the paper's order."""
        found = {row for row, _, _ in self.cells}
        return [row for row in TABLE1 if row in found]


def table1(results: Results) -> Table:
    """Table 1, main results, of every finished job of its rows.

    Raises:
        ResultError: if no job of the table has finished.
    """
    cells: dict[tuple[TableRow, str, str], Cell] = {}
    facts, about_coordinators = [], []
    for domain in COLUMNS:
        rows = results.rows(domain, TABLE1)
        about_coordinators += _coordinator_notes(rows, domain)
        for column in COLUMNS[domain]:
            for cell in _cells(rows, domain, column):
                cells[cell.row, domain, column.metric] = cell
        if rows:
            facts.append(f"{domain}: {describe_runs(rows)}")
    if not cells:
        raise nothing_finished(results, "table1")
    notes = [_budget_note(cells.values()), *about_coordinators]
    if results.profile != "paper":
        notes.append(
            f"Numbers of the {results.profile} profile are not comparable with the paper's; only directions are."
        )
    missing = [row.label for row in TABLE1 if row not in {cell.row for cell in cells.values()}]
    if missing:
        notes.append(f"Not run: {'; '.join(missing)}.")
    if results.left_out:
        notes.append(f"Left out, because made with other settings or damaged: {', '.join(results.left_out)}.")
    return Table(
        title=f"Table 1: main results - {results.profile} profile",
        facts="; ".join(facts),
        rule=_interval_note(cells.values()),
        notes=[note for note in notes if note],
        cells=cells,
        with_paper_numbers=results.profile == "paper",
    )


def _cells(rows: Mapping[TableRow, Mapping[int, Run]], domain: str, column: Column) -> list[Cell]:
    values = {row: by_seed(runs, column.metric) for row, runs in rows.items()}
    marks = _marks(values, column)
    return [
        Cell(
            row=row,
            domain=domain,
            column=column,
            value=interval(seeds),
            seeds=tuple(seeds),
            gain=_difference(seeds, values.get(UNTRAINED)) if row != UNTRAINED else None,
            counts={name: _mean(run.count(name) for run in rows[row].values()) for name in COUNTS},
            mark=marks.get(row, ""),
        )
        for row, seeds in values.items()
    ]


def _difference(ours: BySeed, other: BySeed | None) -> Interval | None:
    return difference(ours, other) if other and ours.keys() & other.keys() else None


def _marks(values: Mapping[TableRow, BySeed], column: Column) -> dict[TableRow, str]:
    """Marks "best" and "second", each only if the interval of its difference to every lower cell excludes 0."""
    if column.higher_is_better is None:
        return {}
    sign = 1 if column.higher_is_better else -1
    ranked = sorted(values, key=lambda row: sign * interval(values[row]).mean, reverse=True)
    marks = {}
    for place, mark in enumerate(("best", "second")):
        below = [_difference(values[ranked[place]], values[row]) for row in ranked[place + 1 :]]
        if not below or not all(gap and (gap.low > 0 if sign > 0 else gap.high < 0) for gap in below):
            break
        marks[ranked[place]] = mark
    return marks


def _interval_note(cells: Iterable[Cell]) -> str:
    """The rule of the intervals, as far as these cells need it."""
    values = [cell.value for cell in cells]
    kinds = {value.kind for value in values if value.is_bounded}
    over_seeds = "a t interval over seeds, differences paired by seed"
    over_tasks = f"a bootstrap {OVER_TASKS}, differences paired by task; it says nothing about another training run"
    if kinds == {OVER_TASKS}:
        how = over_tasks
    elif OVER_TASKS in kinds:
        how = f"{over_seeds}; with one seed {over_tasks}"
    else:
        how = over_seeds
    all_known = all(value.is_bounded for value in values)
    nothing = "" if all_known else " One seed of which only the mean over tasks was kept has no interval."
    return (
        f"A cell is mean ± half-width of the 95 % interval: {how}.{nothing} Bold is the best, underlined the second, "
        "marked only where the interval of the difference to every lower cell lies above 0."
    )


def _budget_note(cells: Iterable[Cell]) -> str:
    """What every method spent: comparing methods by trained responses alone would hide what was played for them."""
    spent: dict[str, dict[str, list[str]]] = {}  # domain -> numbers -> rows
    for cell in cells:
        numbers = " / ".join(f"{cell.counts[name]:.0f}" for name in COUNTS)
        if cell.row != UNTRAINED:
            spent.setdefault(cell.domain, {}).setdefault(numbers, []).append(cell.row.label)
    listed = ". ".join(
        f"{DOMAIN_NAMES[domain]}: "
        + ", ".join(f"{numbers} ({'; '.join(dict.fromkeys(labels))})" for numbers, labels in rows.items())
        for domain, rows in spent.items()
    )
    return f"Joint responses of one run, {' / '.join(COUNTS.values())}. {listed}." if listed else ""


def _coordinator_notes(rows: Mapping[TableRow, Mapping[int, Run]], domain: str) -> list[str]:
    """What must be known to compare a team of one coordinator with the untrained team of separate agents."""
    notes = []
    central = {row: runs for row, runs in rows.items() if row.paradigm != "dec-dec"}
    same = [
        run.parameters["central_model"] in run.parameters["agent_models"]
        for runs in central.values()
        for run in runs.values()
        if {"central_model", "agent_models"} <= run.parameters.keys()
    ]
    if any(same):
        notes.append(f"{domain}: the centralised model is the agents' own base; no larger one is at hand.")
    for column in COLUMNS[domain]:
        starts = [
            run.tasks(column.metric, 0)
            for row, runs in central.items()
            if row.paradigm == "cen-cen"
            for run in runs.values()
        ]
        if starts:
            mean = column.scale * _mean(_mean(start.values()) for start in starts)
            notes.append(
                f"{column.title}: Cen-Cen's coordinator starts at {mean:.1f} before any training; its difference is "
                "taken to the untrained team of separate agents, like every other."
            )
    return notes


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
