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
# # Solutions to 05 TLDR
#
# The first is words; the other two train small teams (16 posts, two iterations, less than
# the profile's) and compare numbers.

# %%
import tempfile

import pandas as pd

from mapl_core.profiles import load_profile
from mapl_core.rewards import tldr_reward
from mapl_core.train import run_mapl

# %% [markdown]
# **1.** The oracle counts; it does not read. Twelve kinds of transitions, a length ratio
# and a vocabulary ratio can be had without a word about the post. To notice, an oracle
# would have to compare content with the post: names, events, what is asked.

# %%
short = "words words words words words words words words"
detailed = ("in addition such as namely because however next indeed to sum up "
            "similarly although unless meanwhile words")
reward = tldr_reward([short, detailed], None)
print(f"{reward.total:.2f} of 3", {k: round(v, 2) for k, v in reward.parts.items()})
assert reward.total > 2.9

# %% [markdown]
# **2.** MARLHF climbs a *learned* reward. Where its pairs say "longer won", the model can
# extrapolate beyond the ratio of 3.2 at which the oracle begins to pay less, and the
# policy follows. MADPO's pairs hold answers that were really seen to win and to lose. But
# it is not safe either: weights are shared, and an answer that no pair contains may rise
# with the winners (04, section 4). In the documented run at `small` (docs/runs), MADPO
# overshot to a mean ratio of 8.8 in its first iteration; the pairs of the second, drawn
# from that team, brought it back.


# %%
def train(method, **changes):
    """Evaluation means by iteration, for a small run."""
    config = load_profile("pocket").config("tldr", method, train_tasks=16, eval_tasks=8,
                                           iterations=2, **changes)
    folder = tempfile.mkdtemp()
    run_mapl(config, folder, progress=False)
    rows = pd.read_csv(f"{folder}/metrics.csv")
    names = ["score", "r", "length/agent0", "length/agent1"]
    shown = rows[rows.metric.isin(names)]
    table = shown.pivot_table(index="metric", columns="iteration", values="value")
    return table.round(2)


madpo = train("madpo")
print("madpo\n", madpo, "\nmarlhf\n", train("marlhf"))

# %% [markdown]
# **3.** Without the reference the log-ratio becomes the plain log-probability, a sum of
# negative terms: longer losers start with a larger margin, shorter ones with a smaller
# one, so the weight of a pair depends on lengths before anything is learnt.
#
# Both runs side by side, lengths in tokens. Column 0 is the same untrained team; compare
# the last columns. A pair whose winner is the longer side starts with a negative margin
# and pulls hardest, so one would look for longer answers under "none", most of all in
# agent 1's. One run of each says how these two teams differ, not whether the next two
# would.

# %%
sides = {"base": madpo, "none": train("madpo", reference="none")}
pd.concat(sides, axis=1, names=["reference"])
