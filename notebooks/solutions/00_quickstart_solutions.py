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
# # Solutions to 00 Quickstart
#
# Both exercises, with the numbers computed here rather than remembered.

# %%
import tempfile

import pandas as pd

from mapl_core.profiles import load_profile
from mapl_core.train import run_mapl


def curve(method, iterations):
    """The score after each iteration, and the names of all metrics."""
    config = load_profile("pocket").config("tldr", method, train_tasks=16, eval_tasks=8,
                                           iterations=iterations)
    folder = tempfile.mkdtemp()
    run_mapl(config, folder, progress=False)
    metrics = pd.read_csv(f"{folder}/metrics.csv")
    return metrics[metrics.metric == "score"].value.tolist(), set(metrics.metric)


# %% [markdown]
# **1.** MARLHF has a stage of its own, the reward model: its loss, its accuracy on
# training pairs and on pairs of held-out posts, and its reward on the evaluation posts
# beside the oracle's. With few pairs the learned reward is rough, so its curve is
# usually flatter at this size.

# %%
madpo, madpo_metrics = curve("madpo", 2)
marlhf, marlhf_metrics = curve("marlhf", 2)
print("madpo ", [round(value, 2) for value in madpo])
print("marlhf", [round(value, 2) for value in marlhf])
print("only in marlhf:", sorted(marlhf_metrics - madpo_metrics))

# %% [markdown]
# **2.** One iteration compares m = 8 pairs on each post and keeps k = 4. The share of the
# gain that is already there:

# %%
one, _ = curve("madpo", 1)
gain, whole = one[-1] - one[0], madpo[-1] - madpo[0]
print(f"{gain:.2f} of {whole:.2f} after one iteration, from {16 * 8} comparisons")
