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
# # Solutions to 11 Tables and figures
#
# They read the documented run that the notebook reads by default.

# %%
import math

from scipy.special import stdtrit

from mapl_core.claims import Claim, Comparison, Requirement, Select
from mapl_core.documented import largest_documented_run
from mapl_core.intervals import difference, interval
from mapl_core.runs import by_seed, load_results
from mapl_core.scoreboard import difference_text, judge, rows_text
from mapl_core.tables import TABLE1, UNTRAINED

results = load_results(largest_documented_run())

# %% [markdown]
# **1.** The half-width is $t_{0.975, n-1}\, s / \sqrt{n}$. From two to three seeds it
# falls to about a quarter, because the quantile drops from 12.7 to 4.3; from five to ten,
# to a little more than half. Three seeds are the first that say something, five the first
# that say it well.

# %%
for seeds in (2, 3, 5, 10):
    quantile = float(stdtrit(seeds - 1, 0.975))
    half_width = 5 * quantile / math.sqrt(seeds)
    print(f"{seeds:2} seeds: quantile {quantile:5.2f}, ± {half_width:.1f}")

# %% [markdown]
# **2.** Independent errors add in squares. Pairing helps where both rows rise and fall
# together with the seed (or with the task, where there is one seed), and hurts a little
# where they do the opposite: the paired interval knows which it was, the other one assumes
# that there was no connection.

# %%
runs = results.rows("tldr", TABLE1)
rows = {row: by_seed(runs[row], "score") for row in runs}
largest = max(rows, key=lambda row: interval(rows[row]).mean)
paired = difference(rows[largest], rows[UNTRAINED])
halves = [interval(rows[row]).half_width for row in (largest, UNTRAINED)]
print(f"{largest.label} minus untrained: {100 * paired.mean:.1f}, paired "
      f"± {100 * paired.half_width:.1f}, as if independent "
      f"± {100 * math.hypot(*halves):.1f}")

# %% [markdown]
# **3.** Three comparisons, all of which must hold, in one part. No choice is made among
# the paradigms, so nothing has to be paid for.

# %%
comparisons = tuple(
    Comparison("tldr", "score", (((1.0, Select("madpo", paradigm)),),),
               (((1.0, Select("marlhf", paradigm)),),))
    for paradigm in ("dec-dec", "cen-cen", "dec-cen"))
text = "MADPO beats MARLHF under every paradigm on TLDR"
claim = Claim(21, text, "S", "table1", (Requirement({"TLDR": comparisons}, needed=1),))
entry = judge(claim, results)
print(entry.verdict)
for found in entry.parts[0].compared:
    print(f"{rows_text(found)}: {difference_text(found)}, {found.shown}")
