# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 Tables and figures
#
# Table 1, Figure 2 and the scoreboard of the paper's claims, made again from the CSV files
# of finished runs. No model is loaded and nothing is trained.
#
# **After it you can** read an interval and say what it is over, tell why two rows may
# differ though their intervals overlap, see when a best cell is marked and when not, judge
# a claim of your own, and write every table of your runs as CSV, Markdown, LaTeX and HTML.
#
# **It needs** nothing else: without results of your own it reads a documented run of this
# repository. For yours, run `./reproduce.sh` and set `RESULTS` to `results/pocket`.
#
# The names: MADPO is multi-agent direct preference optimisation, MARLHF multi-agent
# reinforcement learning from human feedback, MAGRPO multi-agent group relative policy
# optimisation on the oracle's own reward. A paradigm is (agents)-(comparator), each
# decentralised, Dec, or centralised, Cen.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/11_tables_and_figures.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 0.1 | 0.2 GiB | 2026-11-30 |

# %%
import os
import subprocess
import sys

if "google.colab" in sys.modules:  # elsewhere this cell does nothing
    address, tag = "https://github.com/OWNER/mapl-notebooks", "v0.1.0"
    if not os.path.isdir("mapl-notebooks"):
        clone = ["git", "clone", "--depth", "1", "--branch", tag, address]
        subprocess.run(clone, check=True)
    sys.path.insert(0, os.path.abspath("mapl-notebooks"))
    from mapl_core.colab import set_up

    set_up()  # set_up("bitsandbytes") for the profile paper-t4

# %%
import math
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from IPython.display import Image, Markdown, display

import mapl_core
from mapl_core import scoreboard, table_formats, tables
from mapl_core.documented import largest_documented_run
from mapl_core.figures import write_figure2
from mapl_core.intervals import Interval, best_difference, bootstrap_interval
from mapl_core.intervals import difference, t_interval
from mapl_core.notebook import check_parameters
from mapl_core.report import origin, write_report
from mapl_core.runs import by_seed, load_results
from mapl_core.tables import table1

pd.set_option("display.max_colwidth", None)  # texts are shown whole
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"numpy {np.__version__}, matplotlib {matplotlib.__version__}; "
      "no model, no device")

# %% tags=["parameters"]
RESULTS = ""  # a profile's folder, such as results/pocket; empty: a documented run
OUTPUT_DIR = ""  # folder for what is written; empty: a temporary one

# %%
check_parameters(globals(), RESULTS=str, OUTPUT_DIR=str)
results = load_results(RESULTS or largest_documented_run())
table = table1(results)  # if no run has finished, this stops and says what to run
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-tables-"))
print(f"{len(results.runs)} finished runs of {results.folder.name}, read once; "
      f"what is written goes to {folder}")

# %% [markdown]
# ## 1 Where the numbers come from
#
# A number without its origin cannot be checked. Look for the profile (which models and
# tasks), the number of evaluation tasks, the seeds, and the command that makes them again.

# %%
pd.Series(origin(results, table.facts), name="").to_frame()

# %% [markdown]
# ## 2 An interval over seeds
#
# Three runs of one method, three seeds: 79, 80 and 81 %. What do they say about the next
# run? The mean is 80. The scatter of a mean of three is $s/\sqrt{3}$; but $s$ itself was
# guessed from three numbers, and for that Student's t pays: 4.303 instead of 1.96.

# %%
scores = [79.0, 80.0, 81.0]
mean = sum(scores) / 3
s = math.sqrt(sum((score - mean) ** 2 for score in scores) / (3 - 1))
half_width = 4.302653 * s / math.sqrt(3)
print(f"{mean:.1f} ± {half_width:.2f}")

# %% [markdown]
# This is all that `t_interval` does:

# %%
found = t_interval(scores)
assert abs(found.mean - mean) < 1e-9 and abs(found.half_width - half_width) < 1e-5

# %% [markdown]
# Why not resample the three runs, as is often done? Draw three numbers around a known
# truth, again and again, and count how often each interval contains it. It should be 95
# of 100.

# %%
draws = np.random.default_rng(0).normal(80, 5, size=(400, 3))
covered = {"t interval": 0, "bootstrap of three runs": 0}
for draw in draws:
    for name, found in (("t interval", t_interval(list(draw))),
                        ("bootstrap of three runs",
                         bootstrap_interval(list(draw), resamples=200))):
        covered[name] += found.low <= 80 <= found.high
{name: f"{100 * count / len(draws):.0f} of 100" for name, count in covered.items()}

# %% [markdown]
# Three numbers cannot be resampled into anything more extreme than themselves. With *one*
# seed there is no scatter over runs at all: the interval then is a bootstrap over the
# evaluation tasks, labelled "over tasks, one training run". It says how well this one
# team was measured, and nothing about the next one.
#
# > **Common mistake.** Reading an interval over tasks as if it were over runs. It is
# > often narrower. How to check: the rule above each table names what its intervals are
# > over, and each cell its number of seeds.

# %% [markdown]
# ## 3 Differences are paired
#
# Two methods, three seeds. The seeds are of unequal difficulty (they draw the first
# preferences, say), and both methods feel it alike. Do the two differ?

# %%
before = {0: {"post": 0.30}, 1: {"post": 0.50}, 2: {"post": 0.70}}
after = {0: {"post": 0.39}, 1: {"post": 0.60}, 2: {"post": 0.81}}
for name, rows in (("before", before), ("after", after)):
    alone = t_interval([tasks["post"] for tasks in rows.values()])
    print(f"{name:7} {alone.mean:.2f}, from {alone.low:.2f} to {alone.high:.2f}")
gains = [after[seed]["post"] - before[seed]["post"] for seed in before]
print(f"gains {[round(gain, 2) for gain in gains]}: they hardly vary")

# %% [markdown]
# The two intervals overlap almost wholly, and yet every seed gained about 0.1. The
# question is about the gain, so the interval is taken of the gains:

# %%
gain = difference(after, before)
assert abs(gain.mean - t_interval(gains).mean) < 1e-9
assert abs(gain.low - t_interval(gains).low) < 1e-9
print(f"gain {gain.mean:.2f}, from {gain.low:.3f} to {gain.high:.3f}")

# %% [markdown]
# > **Common mistake.** "The bars overlap, so there is no difference." Overlap of two
# > intervals says little where runs share seeds. How to check: read the column of
# > differences, not two cells.

# %% [markdown]
# ## 4 Table 1
#
# Read the rule above it first, then one line: the value, the difference to the untrained
# team, and whether that interval leaves out zero.

# %%
display(Markdown(table_formats.as_markdown(table)))

# %% [markdown]
# When is a cell the best? Not when it is merely the largest: the interval of its
# difference to *every* lower cell must lie above zero. Here is that test for the largest
# cell of the first column; one line that reaches below zero is enough to leave it
# unmarked.

# %%
domain, column = table.columns[0]
rows = {row: by_seed(runs, column.metric)
        for row, runs in results.rows(domain, tables.TABLE1).items()}
cells = {row: table.cells[row, domain, column.metric] for row in rows}
largest = max(rows, key=lambda row: cells[row].value.mean)
for row in rows:
    if row != largest and set(rows[row]) & set(rows[largest]):
        gap = difference(rows[largest], rows[row])
        print(f"{largest.label} minus {row.label}: {100 * gap.mean:+.1f}, "
              f"from {100 * gap.low:+.1f} to {100 * gap.high:+.1f}")
print(f"mark of {largest.label}: {cells[largest].mark or 'none'}")

# %% [markdown]
# The paper's own numbers stand beside ours only in the `paper` profile. A miniature model
# on generated tasks has no number to compare with theirs; only the *direction* of a claim
# can be compared.
#
# > **Common mistake.** Comparing methods by the responses they were *trained* on alone.
# > A method that plays more, or compares more, has seen more. How to check: the note
# > under the table gives all the counts of one run.

# %% [markdown]
# ## 5 Figure 2
#
# One colour a method, one line style a paradigm, in every panel. Look at where the lines
# start (a coordinator is another model and starts elsewhere), at the last point, and at
# the width of the band beside the distance between lines.

# %%
figures = write_figure2(results, folder / "figures")
for figure in figures:
    picture = next(path for path in figure.paths if path.suffix == ".png")
    display(Image(picture.read_bytes(), alt=figure.alt_text))
    display(Markdown(f"{figure.title}. {figure.caption}"))

# %% [markdown]
# > **Common mistake.** Taking two bands that touch at the end for "no difference": see
# > section 3. And a curve that falls in the middle is not noise to be smoothed away; look
# > whether all seeds did it (the band is narrow) or one (it is wide).

# %% [markdown]
# ## 6 From an interval to a verdict
#
# Three kinds of claims. **S**, superiority: "A is better than B". **E**, equivalence: "A
# and B are within three points". **C**, count: "A is better in at least three of four
# domains". What would you say of these differences, in the unit 0 to 1?

# %%
found = {"clearly above": (0.04, 0.09), "clearly below": (-0.09, -0.04),
         "small, and known to be": (-0.02, 0.02), "not known": (-0.09, 0.09)}
pd.DataFrame([
    {"difference": name, "low": low, "high": high,
     "S": scoreboard.verdict(Interval((low + high) / 2, low, high, 5, "over seeds")),
     "E, 3 points": scoreboard.verdict(
         Interval((low + high) / 2, low, high, 5, "over seeds"), 3.0)}
    for name, (low, high) in found.items()])

# %% [markdown]
# "Not known" is `unclear` either way. It is not evidence of equality: for that the whole
# interval must lie inside the margin.
#
# A count is decided as soon as it can be, and not before:

# %%
for parts in (["holds", "holds", "holds", "fails"],
              ["holds", "holds", "unclear", "fails"],
              ["fails", "fails", "not run", "not run"],
              ["holds", "holds", "fails", "not run"]):
    print(f"{', '.join(parts):34} -> {scoreboard.count_verdict(parts, 3)}")

# %% [markdown]
# ## 7 The best of several
#
# "MAPL's *best configuration* beats ..." Six configurations were trained, and we take the
# one with the largest mean. Suppose that none of them is any better than the baseline.
# How often would the best of six look better all the same?

# %%
worlds = np.random.default_rng(0).normal(size=(400, 7, 5))  # rows, seeds: all alike
better = {"as if named beforehand": 0, "with the choice paid for": 0}
for world in worlds:
    six = [dict(enumerate({"task": value} for value in row)) for row in world]
    baseline = six.pop()
    best = max(six, key=lambda row: sum(tasks["task"] for tasks in row.values()))
    better["as if named beforehand"] += difference(best, baseline).low > 0
    better["with the choice paid for"] += best_difference(six, [baseline]).low > 0
{name: f"{100 * count / len(worlds):.1f} of 100" for name, count in better.items()}

# %% [markdown]
# It should be at most 2.5; 400 worlds show that to about one in a hundred. Picking a
# winner and testing it on the numbers that made it win is the winner's curse.
# `best_difference` takes the lower bound of each of the six at the level 0.05 / 6 instead
# of 0.05, and keeps the largest. It costs width, and with three seeds it costs much; that
# is the price of not having named the configuration first.
#
# > **Common mistake.** Reporting the best configuration's mean as what the next run will
# > reach. The bounds on the scoreboard are honest, but the *mean* beside them is that of
# > the winner, and is flattered.

# %% [markdown]
# ## 8 The scoreboard
#
# Twenty claims of the paper's text. `holds` and `fails` are what the intervals support;
# `unclear` means that the runs are there and do not decide it; `not run` that runs are
# missing. With one seed the verdict is at most `points to yes` or `points to no`.

# %%
judged = scoreboard.scoreboard(results)
display(Markdown(scoreboard.as_markdown(judged, results.profile)))

# %% [markdown]
# Every verdict can be taken apart. Here are all comparisons that have been measured, with
# the rows that were the best of their side; look for the one that decides its part.

# %%
pd.DataFrame([
    {"claim": entry.claim.number, "part": part.name, "metric": one.comparison.metric,
     "compared": scoreboard.rows_text(one), "points": scoreboard.difference_text(one),
     "verdict": one.shown}
    for entry in judged for part in entry.parts for one in part.compared
    if one.difference]).set_index("claim")

# %% [markdown]
# > **Common mistake.** Reading `fails` as "the paper is wrong". It means: with these
# > models, tasks and budgets the difference goes the other way. A claim is about a
# > setting; the first table of this notebook says which setting this was.

# %% [markdown]
# ## 9 Everything written
#
# The same tables for a paper (LaTeX), a README (Markdown), a program (CSV) and a browser:
# `report.html` holds all of it in one file, pictures included, and needs no network.

# %%
paths = table_formats.write_table(table, folder / "tables", "table1")
paths += scoreboard.write_scoreboard(judged, results.profile, folder / "tables")
paths += [path for figure in figures for path in figure.paths]
paths.append(write_report(results, figures, folder / "report.html"))
assert all(path.stat().st_size > 0 for path in paths)
pd.DataFrame([{"file": str(path.relative_to(folder)), "KiB": path.stat().st_size / 1024}
              for path in paths]).round(1)

# %% [markdown]
# ## Exercises
#
# 1. The scatter between runs is $s$ = 5 points. How wide is the interval with 2, 3, 5 and
#    10 seeds? Which step is worth most?
# 2. Take the largest row of the first column and the untrained team. Compare the paired
#    interval of their difference with the one that you get from their two half-widths as
#    if the runs were independent. Which is narrower, and why?
# 3. Write a claim of your own, "MADPO beats MARLHF under every paradigm on TLDR", as a
#    `Claim`, and judge it.
#
# Solutions: notebooks/solutions/11_tables_and_figures_solutions.ipynb
