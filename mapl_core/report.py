"""report.html: Table 1, Figure 2, the scoreboard and where they come from, in one file that stands alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mapl_core import scoreboard, table_formats
from mapl_core.figures import Figure
from mapl_core.page import page, picture, scroller
from mapl_core.results import write_atomically
from mapl_core.runs import Results
from mapl_core.tables import table1

SECTIONS = {"table1": "Table 1", "figure2": "Figure 2", "claims": "Claims", "origin": "Where the numbers come from"}


def write_report(results: Results, figures: Sequence[Figure], path: Path | str) -> Path:
    """Write the page; returns its path.

    Args:
        results: the finished runs.
        figures: the panels of Figure 2, as `figure2` drew them from the same runs.
        path: of the page, such as results/<profile>/report.html.

    Raises:
        ResultError: if no job of Table 1 has finished.
    """
    path = Path(path)
    title = f"MAPL - results of the {results.profile} profile"
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in SECTIONS.items())
    table = table1(results)
    bodies = {
        "table1": table_formats.as_html(table),
        "figure2": _figures_html(figures),
        "claims": scoreboard.as_html(scoreboard.scoreboard(results), results.profile),
        "origin": _origin_html(results, table.facts),
    }
    sections = [
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(SECTIONS[name])}</h2>\n{body}\n</section>'
        for name, body in bodies.items()
    ]
    opening = f'<h1>{escape(title)}</h1>\n<nav aria-label="Sections"><ul>{links}</ul></nav>'
    write_atomically(path, page(title, "\n".join([opening, *sections])))
    return path


def _figures_html(figures: Sequence[Figure]) -> str:
    if not figures:
        return "<p>No curve is drawn: no training run has finished, or figure2 was not asked for.</p>"
    shown = [_figure_html(figure) for figure in figures]
    return f'<div class="figures">\n{chr(10).join(shown)}\n</div>'


def _figure_html(figure: Figure) -> str:
    """A panel in a box that scrolls on a narrow screen: shrunk to it, its labels could not be read."""
    (svg,) = (path for path in figure.paths if path.suffix == ".svg")
    box = scroller(figure.title, picture(svg, figure.alt_text))
    caption = f"<figcaption><strong>{escape(figure.title)}.</strong> {escape(figure.caption)}</figcaption>"
    return f"<figure>\n{box}\n{caption}\n</figure>"


def _origin_html(results: Results, facts: str) -> str:
    entries = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in origin(results, facts).items()
    )
    return f"<dl>\n{entries}\n</dl>"


def origin(results: Results, facts: str) -> dict[str, str]:
    """Who wants the same numbers needs these: profile, tasks, seeds, command, commit, machine, versions.

    Args:
        results: the finished runs.
        facts: tasks and seeds of every domain (`Table.facts`).
    """
    environments = [run.manifest.get("environment", {}) for run in results.runs]
    versions = environments[0].get("versions", {}) if environments else {}
    packages = [f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "trl") if name in versions]
    hours = sum(run.manifest.get("seconds", 0.0) for run in results.runs) / 3600
    memory = max((run.manifest.get("peak_memory_mib", {}).get("process", 0) for run in results.runs), default=0)
    found = {
        "profile": results.profile,
        "tasks and seeds": facts,
        "seeds": ", ".join(map(str, sorted({run.seed for run in results.runs}))),
        "command": results.command or _command(results),
        "commit": ", ".join(_known(_commit(environment) for environment in environments)),
        "machine": results.machine or ", ".join(_known(_machine(run.manifest) for run in results.runs)),
        "work": f"{len(results.runs)} jobs, {hours:.1f} hours of one job after the other"
        + (f", at most {memory} MiB a process" if memory else ""),
        "versions": ", ".join([f"python {environments[0].get('python', 'not recorded')}", *packages]),
        "left out": ", ".join(results.left_out),
    }
    return {name: text for name, text in found.items() if text}


def _command(results: Results) -> str:
    """A command that makes the same runs."""
    domains = list(dict.fromkeys(run.metrics[0].domain for run in results.runs))
    seeds = ",".join(str(seed) for seed in sorted({run.seed for run in results.runs}))
    methods = list(dict.fromkeys(run.metrics[0].method for run in results.runs))
    paradigms = list(dict.fromkeys(run.metrics[0].paradigm for run in results.runs))
    words = ["--profile", results.profile, "--domains", *domains, "--methods", *methods, "--paradigms", *paradigms]
    words += ["--seeds", seeds if "," in seeds else f"{seeds},"]
    return shlex.join(["./reproduce.sh", *words])


def _commit(environment: dict) -> str:
    commit = environment.get("commit")
    return f"{commit[:12]}{' with uncommitted changes' if environment.get('dirty') else ''}" if commit else ""


def _machine(manifest: dict) -> str:
    environment = manifest.get("environment", {})
    threads = f"{environment['threads']} thread(s) a job" if "threads" in environment else ""
    return ", ".join(_known([environment.get("platform", ""), manifest.get("device", ""), threads]))


def _known(texts: Sequence[str] | object) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
