"""The claims scoreboard: what the finished runs say of each of the paper's claims.

Four verdicts and a cap. `holds`: the intervals support the claim. `fails`: they exclude it; for a count, too many parts
fail for it still to hold. `unclear`: the runs are there and do not decide it. `not run`: runs are missing and what is
there does not decide it. As soon as an interval is over tasks (one training run) the verdict is at most `points to yes`
or `points to no`, because it says nothing about another run.

A part is not held wrongly more often than its interval misses: it needs all its comparisons, so that none can be
picked, and the choice of a best row is paid for in the interval (`best_difference`). Nothing more is corrected for. A
claim over four domains fails wrongly about as often as any of its intervals misses; a count that needs three of four
and truly has two holds wrongly if either of the others is missed.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mapl_core.claims import Claim, Comparison, Mix, claims, name_side
from mapl_core.intervals import OVER_TASKS, Interval, best_difference, combine
from mapl_core.page import page, paragraphs, scroller
from mapl_core.results import write_atomically
from mapl_core.runs import Results, by_seed, nothing_finished

HOLDS, FAILS, UNCLEAR, NOT_RUN = "holds", "fails", "unclear", "not run"
POINTS_TO = {HOLDS: "points to yes", FAILS: "points to no"}


@dataclass(frozen=True)
class Compared:
    """A comparison and what the runs say of it.

    Attributes:
        difference: None where runs are missing.
        ours_best, others_best: the rows with the largest means.
        seeds: that all rows compared share.
        jobs: names of the runs it was computed from.
        missing: labels of the rows that have no run.
        is_empty: whether no row has one.
    """

    comparison: Comparison
    verdict: str
    difference: Interval | None = None
    ours_best: str = ""
    others_best: str = ""
    seeds: tuple[int, ...] = ()
    jobs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_empty: bool = False

    @property
    def shown(self) -> str:
        """The verdict with the cap for a single training run."""
        return _capped(self.verdict, [self])


@dataclass(frozen=True)
class JudgedPart:
    """A part of a claim: its verdict is that of all its comparisons together."""

    name: str
    verdict: str
    compared: tuple[Compared, ...]

    @property
    def decisive(self) -> Compared:
        """The comparison that decides the part: one that fails, else one not run or unclear, else the closest."""
        order = {FAILS: 0, NOT_RUN: 1, UNCLEAR: 2, HOLDS: 3}
        return min(
            self.compared, key=lambda found: (order[found.verdict], found.difference.low if found.difference else 0)
        )


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict and everything it rests on."""

    claim: Claim
    verdict: str
    parts: tuple[JudgedPart, ...] = ()


def scoreboard(results: Results) -> list[JudgedClaim]:
    """Every claim tested on the finished runs.

    Raises:
        ResultError: if no run has finished.
    """
    if not results.runs:
        raise nothing_finished(results, "the scoreboard")
    return [judge(claim, results) for claim in claims(results.profile)]


def judge(claim: Claim, results: Results) -> JudgedClaim:
    """The verdict of one claim and its parts."""
    if not claim.requirements:
        return JudgedClaim(claim, NOT_RUN)
    parts, verdicts = [], []
    for requirement in claim.requirements:
        outcomes = []
        for name, comparisons in requirement.parts.items():
            compared = tuple(compare(comparison, results) for comparison in comparisons)
            outcomes.append(_all_of([found.verdict for found in compared]))
            parts.append(JudgedPart(name, _capped(outcomes[-1], compared), compared))
        verdicts.append(count_verdict(outcomes, requirement.needed))
    everything = [found for part in parts for found in part.compared]
    return JudgedClaim(claim, _capped(_all_of(verdicts), everything), tuple(parts))


def compare(comparison: Comparison, results: Results) -> Compared:
    """The difference, its interval and its verdict, `not run` where a row has no run or the rows share no seed."""
    sides = (comparison.ours, comparison.others)
    selects = dict.fromkeys(select for side in sides for mix in side for _, select in mix)
    runs = {select: select.runs(results, comparison.domain) for select in selects}
    missing = tuple(select.label for select in selects if not runs[select])
    seeds = tuple(sorted(set.intersection(*(set(found) for found in runs.values()))))
    if missing or not seeds:
        missing = missing or ("a seed that all its rows share",)
        return Compared(comparison, NOT_RUN, missing=missing, is_empty=not any(runs.values()))
    values = {select: by_seed({seed: runs[select][seed] for seed in seeds}, comparison.metric) for select in selects}
    ours, others = ([combine([(w, values[select]) for w, select in mix]) for mix in side] for side in sides)
    found = best_difference(ours, others)
    return Compared(
        comparison,
        verdict(found, comparison.margin),
        found,
        *(_best_name(side, rows) for side, rows in zip(sides, (ours, others), strict=True)),
        seeds,
        tuple(sorted(runs[select][seed].name for select in selects for seed in seeds)),
    )


def verdict(difference: Interval, margin: float | None = None) -> str:
    """`holds`, `fails` or `unclear`, of one difference (0 to 1), before the cap for single runs.

    Without a margin, superiority: the interval lies above or below 0. With one (in points), equivalence: it lies within
    the margin on both sides, or wholly outside. An interval without any width decides nothing: values that do not vary
    at all are too coarse to show how much they would (two runs that both pass 3 of 20 tasks, or none).
    """
    if difference.high - difference.low < 1e-12:
        return UNCLEAR
    if margin is None:
        return HOLDS if difference.low > 0 else FAILS if difference.high < 0 else UNCLEAR
    if abs(difference.low) <= margin / 100 and abs(difference.high) <= margin / 100:
        return HOLDS
    return FAILS if difference.low > margin / 100 or difference.high < -margin / 100 else UNCLEAR


def count_verdict(verdicts: Sequence[str], needed: int) -> str:
    """`holds` if enough parts hold, `fails` if too many fail for that, else `not run` before `unclear`."""
    if verdicts.count(HOLDS) >= needed:
        return HOLDS
    if len(verdicts) - verdicts.count(FAILS) < needed:
        return FAILS
    return NOT_RUN if NOT_RUN in verdicts else UNCLEAR


def _all_of(verdicts: Sequence[str]) -> str:
    return count_verdict(verdicts, len(verdicts))


def _capped(verdict: str, compared: Iterable[Compared]) -> str:
    """One training run says nothing about another: where an interval is over tasks, the verdict only points."""
    over_tasks = any(found.difference and found.difference.kind == OVER_TASKS for found in compared)
    return POINTS_TO.get(verdict, verdict) if over_tasks else verdict


def _best_name(side: Sequence[Mix], rows: Sequence[Mapping[int, Mapping[str, float]]]) -> str:
    means = [_mean_of_means(row) for row in rows]
    return name_side([side[means.index(max(means))]])


def _mean_of_means(row: Mapping[int, Mapping[str, float]]) -> float:
    return sum(sum(tasks.values()) / len(tasks) for tasks in row.values()) / len(row)


# ---------------------------------------------------------------------------------------------------------------------
# Written forms
# ---------------------------------------------------------------------------------------------------------------------

RULE = (
    "S, superiority: holds if the 95 % interval of the difference lies above 0, fails if it lies below. "
    "E, equivalence: holds if the interval lies inside the margin, fails if it lies outside. "
    "C, count: each domain is tested as S; holds if enough domains hold, fails if too many fail for that. "
    "Otherwise unclear, or not run where runs are missing; an interval without any width decides nothing. "
    "A domain with several comparisons holds only if all of them do; the one shown is the one that decides."
)
INTERVALS = (
    "Intervals are t intervals over seeds, paired by seed. With one training run they are bootstraps over its "
    "evaluation tasks, and the verdict then never says more than that it points to yes or no. "
    "Where the best of several rows is meant, each bound is taken at the level that pays for the choice (0.05 divided "
    "by the number of rows to choose from), so that chance does not pick the winner; the difference itself is that of "
    "the rows with the largest means, which the choice flatters."
)


def summary(judged: Sequence[JudgedClaim]) -> str:
    """How many claims have which verdict, as a sentence."""
    counts = Counter(entry.verdict for entry in judged)
    order = (HOLDS, POINTS_TO[HOLDS], UNCLEAR, POINTS_TO[FAILS], FAILS, NOT_RUN)
    return f"Of {len(judged)} claims: {', '.join(f'{counts[name]} {name}' for name in order if counts[name])}."


def difference_text(found: Compared) -> str:
    """Difference in points, its interval and what it is over; or what is missing."""
    if found.difference is None:
        names = found.missing if len(found.missing) <= 3 else [f"{len(found.missing)} rows"]
        return f"not run, needs {'; '.join(names)}"
    value, runs = found.difference, len(found.seeds)
    seeds = f"{runs} seed{'' if runs == 1 else 's'}"
    if not value.is_bounded:
        return f"{100 * value.mean:+.1f} (no interval; {seeds})"
    over = f"{value.n} tasks of 1 seed" if value.kind == OVER_TASKS else seeds
    return f"{100 * value.mean:+.1f} ({100 * value.low:+.1f} to {100 * value.high:+.1f}; {over})"


def rows_text(found: Compared) -> str:
    """Which rows were compared: the best of each side, and of how many it is the best."""
    sides = ((found.ours_best, found.comparison.ours), (found.others_best, found.comparison.others))
    return " minus ".join(f"{best}{f' (best of {len(side)})' if len(side) > 1 else ''}" for best, side in sides)


def evidence(entry: JudgedClaim) -> list[str]:
    """What a claim's verdict rests on: a line for each part that has been measured, then what has not been run."""
    experiment = entry.claim.experiment
    if not entry.parts:
        return [f"needs the runs of {experiment}"]
    lines = [_part_text(part) for part in entry.parts if part.decisive.difference]
    waiting = [part for part in entry.parts if not part.decisive.difference]
    begun = [part for part in waiting if experiment == "table1" and not part.decisive.is_empty]
    lines += [f"{part.name}: {difference_text(part.decisive)}" for part in begun]
    untouched = [part.name for part in waiting if part not in begun]
    return [*lines, f"not run ({experiment}): {'; '.join(untouched)}"] if untouched else lines


def _part_text(part: JudgedPart) -> str:
    found = part.decisive
    return f"{part.name}: {part.verdict}, {difference_text(found)}, {rows_text(found)}"


def write_scoreboard(judged: Sequence[JudgedClaim], profile: str, folder: Path | str) -> list[Path]:
    """Write scoreboard.csv (every comparison), .md and .html (to read) into `folder`; returns the paths."""
    title = title_of(profile)
    html = page(title, f"<h1>{escape(title)}</h1>\n{as_html(judged, profile)}")
    texts = {"csv": as_csv(judged), "md": as_markdown(judged, profile), "html": html}
    paths = []
    for ending, text in texts.items():
        paths.append(Path(folder) / f"scoreboard.{ending}")
        write_atomically(paths[-1], text)
    return paths


def title_of(profile: str) -> str:
    return f"Claims scoreboard - {profile} profile"


def as_csv(judged: Sequence[JudgedClaim]) -> str:
    """One line a comparison, with the verdicts of its part and its claim; differences in the metric's unit (0 to 1)."""
    names = "claim text kind experiment verdict part part_verdict metric comparison ours_best others_best".split()
    names += "margin_points comparison_verdict difference low high interval n seeds jobs missing".split()
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for entry in judged:
        claim = {"claim": entry.claim.number, "text": entry.claim.text, "kind": entry.claim.kind}
        claim |= {"experiment": entry.claim.experiment, "verdict": entry.verdict}
        lines = [(part, found) for part in entry.parts for found in part.compared]
        for part, found in lines:
            writer.writerow(claim | {"part": part.name, "part_verdict": part.verdict} | _comparison_line(found))
        if not lines:
            writer.writerow(claim)
    return text.getvalue()


def _comparison_line(found: Compared) -> dict[str, object]:
    comparison, value = found.comparison, found.difference
    line: dict[str, object] = {"metric": comparison.metric, "comparison": comparison.label}
    line |= {"margin_points": "" if comparison.margin is None else comparison.margin}
    line |= {"comparison_verdict": found.shown, "missing": "; ".join(found.missing)}
    if value:
        line |= {"ours_best": found.ours_best, "others_best": found.others_best, "difference": value.mean}
        line |= {"seeds": " ".join(map(str, found.seeds)), "jobs": " ".join(found.jobs), "n": value.n}
        line |= {"interval": value.kind}
        line |= {"low": value.low, "high": value.high} if value.is_bounded else {}
    return line


def as_markdown(judged: Sequence[JudgedClaim], profile: str) -> str:
    """A line a claim, with its verdict and what decides each part."""
    lines = [f"# {title_of(profile)}", "", summary(judged), "", RULE, "", INTERVALS, ""]
    lines += ["|  | claim | test | verdict | difference in points (95 % interval) |", "| --- | --- | --- | --- | --- |"]
    for entry in judged:
        claim, shown = entry.claim, "<br>".join(evidence(entry))
        lines.append(f"| {claim.number} | {claim.text} | {claim.kind} | **{entry.verdict}** | {shown} |")
    return "\n".join([*lines, "", f"{_scale_note(profile)}\n"])


def _scale_note(profile: str) -> str:
    return f"Tested at the {profile} profile: what holds or fails here does so for its models, tasks and budgets."


VERDICT_CLASSES = {HOLDS: "yes", POINTS_TO[HOLDS]: "yes", FAILS: "no", POINTS_TO[FAILS]: "no"}


def as_html(judged: Sequence[JudgedClaim], profile: str) -> str:
    """A fragment: summary and rules, a line a claim, and every comparison behind it to unfold."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "claim", "verdict", "difference in points"))
    lines = [f"<table>\n<caption>{escape(title_of(profile))}</caption>", f"<thead><tr>{head}</tr></thead>\n<tbody>"]
    for entry in judged:
        claim = entry.claim
        name = f'{escape(claim.text)} <span class="gain">{escape(claim.kind)}</span>'
        lines.append(
            f'<tr><td>{claim.number}</td><th scope="row" class="claim">{name}</th>'
            f'<td class="verdict">{_verdict_html(entry.verdict)}</td>'
            f'<td class="evidence">{_evidence_html(entry)}</td></tr>'
        )
    lines.append("</tbody>\n</table>")
    above = paragraphs([summary(judged), RULE, INTERVALS])
    return f"{above}\n{scroller(title_of(profile), chr(10).join(lines))}\n{paragraphs([_scale_note(profile)])}"


def _verdict_html(verdict: str) -> str:
    return f'<span class="{VERDICT_CLASSES.get(verdict, "open")}">{verdict}</span>'


def _evidence_html(entry: JudgedClaim) -> str:
    shown = "<br>".join(escape(line) for line in evidence(entry))
    measured = [(part, found) for part in entry.parts for found in part.compared if found.difference]
    if not measured:
        return f'<span class="soft">{shown}</span>'
    if len(measured) == 1:
        return shown
    items = "".join(
        f"<li>{escape(f'{part.name}, {found.comparison.metric}: {found.shown}, {difference_text(found)}')}"
        f"{escape(f', {rows_text(found)}')}</li>"
        for part, found in measured
    )
    return f"{shown}<details><summary>all {len(measured)} comparisons</summary><ul>{items}</ul></details>"
