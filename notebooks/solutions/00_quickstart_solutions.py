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
# Both exercises, with the numbers computed here rather than remembered. To be quick they
# are smaller than the notebook's: 16 training posts, 8 evaluation posts, and two
# iterations for the whole gain. Your own numbers will differ.

# %%
import tempfile

import pandas as pd

from mapl_core.profiles import load_profile
from mapl_core.train import run_mapl


def curve(method, iterations):
    """The score after each iteration, the names of all metrics, and the comparisons."""
    config = load_profile("pocket").config("tldr", method, train_tasks=16, eval_tasks=8,
                                           iterations=iterations)
    folder = tempfile.mkdtemp()
    run_mapl(config, folder, progress=False)
    metrics = pd.read_csv(f"{folder}/metrics.csv")
    scores = metrics[metrics.metric == "score"].value.tolist()
    compared = iterations * config.train_tasks * config.samples_per_task
    return scores, set(metrics.metric), compared


# %% [markdown]
# **1.** MARLHF has a stage of its own, the reward model: its loss, its accuracy on
# training pairs and on pairs of held-out posts, and its reward on the evaluation posts
# beside the oracle's. With few pairs the learned reward is rough, so its curve is
# usually flatter at this size.

# %%
madpo, madpo_metrics, compared_twice = curve("madpo", 2)
marlhf, marlhf_metrics, _ = curve("marlhf", 2)
print("madpo ", [round(value, 2) for value in madpo])
print("marlhf", [round(value, 2) for value in marlhf])
print("only in marlhf:", sorted(marlhf_metrics - madpo_metrics))

# %% [markdown]
# **2.** One iteration makes $m$ comparisons on each post and keeps $k$ pairs of them. The
# part of the two iterations' gain that is already there after one:

# %%
one, _, compared = curve("madpo", 1)
gain, whole = one[-1] - one[0], madpo[-1] - madpo[0]
print(f"{gain:.2f} of {whole:.2f} after one of two iterations, from {compared} of "
      f"{compared_twice} comparisons")
