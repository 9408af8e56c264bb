"""Written forms of a table: CSV with every number, and Markdown, LaTeX and HTML to read."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from mapl_core.intervals import OVER_TASKS, Interval
from mapl_core.page import page, paragraphs, scroller
from mapl_core.results import write_atomically
from mapl_core.tables import COUNTS, Cell, Column, Table, paper_number

NOT_RUN = "not run"


def write_table(table: Table, folder: Path | str, name: str) -> list[Path]:
    """Write `name`.csv (every number), .md, .tex and .html (to read) into `folder`; returns the paths."""
    forms: dict[str, Callable[[Table], str]] = {
        "csv": as_csv,
        "md": as_markdown,
        "tex": as_latex,
        "html": lambda table: page(table.title, f"<h1>{escape(table.title)}</h1>\n{as_html(table)}"),
    }
    paths = []
    for ending, form in forms.items():
        paths.append(Path(folder) / f"{name}.{ending}")
        write_atomically(paths[-1], form(table))
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# Words of a cell, the same in every form
# ---------------------------------------------------------------------------------------------------------------------


def points(value: Interval, column: Column, signed: bool = False) -> str:
    """Mean and half-width in the unit of the column's heading; no half-width where none is known."""
    sign, digits = "+" if signed else "", 1 if column.scale == 100.0 else 2
    mean = f"{column.scale * value.mean:{sign}.{digits}f}"
    return f"{mean} ± {column.scale * value.half_width:.{digits}f}" if value.is_bounded else mean


def cell_text(cell: Cell) -> str:
    """Mean, half-width and number of seeds."""
    seeds = f"{len(cell.seeds)} seed{'' if len(cell.seeds) == 1 else 's'}"
    return f"{points(cell.value, cell.column)} ({seeds}{'' if cell.value.is_bounded else ', no interval'})"


def gain_text(cell: Cell) -> str:
    """The paired difference to the untrained team; empty where there is none."""
    return points(cell.gain, cell.column, signed=True) if cell.gain else ""


def paper_texts(table: Table, cell: Cell) -> tuple[str, str]:
    """The paper's number and ours minus it, in percent; empty texts outside the paper profile and where it has none."""
    paper = None
    if table.with_paper_numbers:
        paper = paper_number(cell.domain, cell.column.metric, cell.row.method, cell.row.paradigm)
    return ("", "") if paper is None else (f"{paper:.1f}", f"{100 * cell.value.mean - paper:+.1f}")


# ---------------------------------------------------------------------------------------------------------------------
# CSV
# ---------------------------------------------------------------------------------------------------------------------


def as_csv(table: Table) -> str:
    """One line a cell; means, bounds and differences in the metric's unit (0 to 1), the paper's numbers in percent."""
    names = "group row method paradigm domain metric mean low high half_width interval n_seeds n_tasks seeds".split()
    names += [*"mark gain gain_low gain_high".split(), *COUNTS]
    names += ["paper_percent", "minus_paper_percent"] if table.with_paper_numbers else []
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for cell in table.cells.values():
        row, value, gain = cell.row, cell.value, cell.gain
        line = {"group": row.group, "row": row.label, "method": row.method, "paradigm": row.paradigm}
        line |= {"domain": cell.domain, "metric": cell.column.metric, "mark": cell.mark, "mean": value.mean}
        if value.is_bounded:
            line |= {"low": value.low, "high": value.high, "half_width": value.half_width, "interval": value.kind}
            line |= {"n_tasks": value.n if value.kind == OVER_TASKS else ""}
        line |= {"n_seeds": len(cell.seeds), "seeds": " ".join(map(str, cell.seeds))}
        line |= {"gain": gain.mean} if gain else {}
        line |= {"gain_low": gain.low, "gain_high": gain.high} if gain and gain.is_bounded else {}
        line |= cell.counts
        if table.with_paper_numbers:
            paper = paper_number(cell.domain, cell.column.metric, row.method, row.paradigm)
            line["paper_percent"] = "" if paper is None else paper
            line["minus_paper_percent"] = "" if paper is None else 100 * value.mean - paper
        writer.writerow(line)
    return text.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------------------------


def as_markdown(table: Table) -> str:
    """The paper's layout: a line a method, a column a metric, the difference to the untrained team beside it."""
    header = ["", "method"]
    for _, column in table.columns:
        paper = ["paper", "minus paper"] if table.with_paper_numbers else []
        header += [column.title, *paper, "minus untrained team"]
    lines = [f"# {table.title}", "", table.facts + ".", "", table.rule, "", _line(header), _line(["---"] * len(header))]
    group = ""
    for row in table.rows:
        cells = [row.group if row.group != group else "", row.label]
        group = row.group
        for domain, column in table.columns:
            cell = table.cells.get((row, domain, column.metric))
            cells.append(_marked(cell) if cell else NOT_RUN)
            cells += (paper_texts(table, cell) if cell else ("", "")) if table.with_paper_numbers else ()
            cells.append(gain_text(cell) if cell else "")
        lines.append(_line(cells))
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(cell: Cell) -> str:
    text = cell_text(cell)
    return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(cell.mark, text)


# ---------------------------------------------------------------------------------------------------------------------
# LaTeX
# ---------------------------------------------------------------------------------------------------------------------

LATEX_SPECIAL = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"},
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def as_latex(table: Table) -> str:
    """A `table*` with booktabs rules: the cells, the best bold, the second underlined; rule and notes in the caption.

    Differences to the untrained team are left to the other forms: a page is not wide enough.
    """
    # The domain stands above the metric, so that seven columns fit the page.
    broken = [latex(column.title).replace(" ", r" \\ ", 1) for _, column in table.columns]
    titles = [rf"\shortstack[r]{{{title}}}" for title in broken]
    brackets = " In parentheses the number of seeds" + (
        ", in brackets the paper's number." * table.with_paper_numbers or "."
    )
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table*}",
        r"\centering\small",
        rf"\caption{{{latex(f'{table.title}. {table.facts}. {table.rule}{brackets}')}}}",
        rf"\begin{{tabular}}{{l{'r' * len(titles)}}}",
        r"\toprule",
        " & ".join(["", *titles]) + r" \\",
    ]
    group = ""
    for row in table.rows:
        if row.group != group:
            lines += [r"\midrule", rf"\multicolumn{{{1 + len(titles)}}}{{l}}{{\emph{{{latex(row.group)}}}}} \\"]
            group = row.group
        found = [table.cells.get((row, domain, column.metric)) for domain, column in table.columns]
        lines.append(" & ".join([latex(row.label), *(_latex_cell(table, cell) for cell in found)]) + r" \\")
    notes = " ".join(latex(note) for note in table.notes)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\par\footnotesize {notes}", r"\end{table*}", ""])


def latex(text: str) -> str:
    """Plain text with everything escaped that LaTeX would take for a command."""
    return "".join(LATEX_SPECIAL.get(character, character) for character in text)


def _latex_cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return latex(NOT_RUN)
    text = latex(f"{points(cell.value, cell.column)} ({len(cell.seeds)})")
    paper, _ = paper_texts(table, cell)
    text = {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}"}.get(cell.mark, text)
    return f"{text} [{latex(paper)}]" if paper else text


# ---------------------------------------------------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------------------------------------------------


def as_html(table: Table) -> str:
    """A fragment: facts and rule, the table in a box that scrolls, and the notes. Marks are words too."""
    header = ['<th scope="col">method</th>']
    for _, column in table.columns:
        header.append(f'<th scope="col">{escape(column.title)}</th>')
        header += ['<th scope="col">paper</th>', '<th scope="col">minus paper</th>'] if table.with_paper_numbers else []
    lines = [f"<table>\n<caption>{escape(table.title)}</caption>", f"<thead><tr>{''.join(header)}</tr></thead>"]
    group = ""
    for row in table.rows:
        if row.group != group:
            lines.append("</tbody>" if group else "")
            lines.append(f'<tbody>\n<tr><th scope="rowgroup" colspan="{len(header)}">{escape(row.group)}</th></tr>')
            group = row.group
        found = [table.cells.get((row, domain, column.metric)) for domain, column in table.columns]
        cells = "".join(_html_cells(table, cell) for cell in found)
        lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    lines.append("</tbody>\n</table>")
    below = "The small line in a cell is the difference to the untrained team, with its own interval."
    body = scroller(table.title, "\n".join(line for line in lines if line))
    return f"{paragraphs([table.facts + '.', table.rule])}\n{body}\n{paragraphs([below, *table.notes])}"


def _html_cells(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return f'<td class="soft">{NOT_RUN}</td>' + "<td></td><td></td>" * table.with_paper_numbers
    text = escape(cell_text(cell))
    if cell.mark:
        tag, word = {"best": ("strong", "best"), "second": ("span", "second best")}[cell.mark]
        text = f'<{tag} class="{cell.mark}">{text}</{tag}> <span class="hidden">({word})</span>'
    gain = gain_text(cell)
    text += f' <span class="gain">{escape(gain)}</span>' if gain else ""
    paper = "".join(f"<td>{escape(part)}</td>" for part in paper_texts(table, cell)) if table.with_paper_numbers else ""
    return f'<td class="number">{text}</td>{paper}'
