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
# # Solutions to 06 CoopHE
#
# The first two are exact; the third trains a small team with two turns (16 problems, two
# iterations, less than the profile's).

# %%
import tempfile

import pandas as pd

from mapl_core.domains.base import Task
from mapl_core.profiles import load_profile
from mapl_core.rewards.coophe import coophe_reward
from mapl_core.train import run_mapl

problem = Task("square", "pocket", "eval", {
    "task_id": "square", "entry_point": "f",
    "prompt": 'def f(x):\n    """square x, then add 3."""\n',
    "test": "def check(candidate):\n    assert candidate(4) == 19\n"
            "    assert candidate(-5) == 28\n"})

# %% [markdown]
# **1.** With probability $c$ main calls. A right helper then makes 4.0 of it, a wrong one
# 1.5; otherwise both get 2.5. The difference is $2.5 c$, and for $c = 0$ nothing tells
# right from wrong: the helper drifts, $q$ falls, and calling pays even less. Each agent's
# laziness makes the other's pay.

# %%
RIGHT, WRONG = "def aux(x):\n    return x * x", "def aux(x):\n    return 2 * x"
CALLS, ALONE = "def f(x):\n    return aux(x) + 3", "def f(x):\n    return x * x + 3"
for c in (0.0, 0.25, 1.0):
    value = [c * coophe_reward([helper, CALLS], problem).total
             + (1 - c) * coophe_reward([helper, ALONE], problem).total
             for helper in (RIGHT, WRONG)]
    print(f"c = {c}: right {value[0]:.3f}, wrong {value[1]:.3f}")
    assert abs(value[0] - value[1] - 2.5 * c) < 1e-9

# %% [markdown]
# **2.** A mere wrapper hands the whole work to `aux`. And a call whose result is used in a
# way that changes nothing is still a call: the oracle reads the code, it does not weigh
# how much the helper matters.

# %%
wrapper = coophe_reward(["def aux(x):\n    return x * x + 3",
                         "def f(x):\n    return aux(x)"], problem)
useless = coophe_reward(["def aux(x):\n    return 0",
                         "def f(x):\n    return x * x + 3 + aux(x)"], problem)
print("wrapper", wrapper.parts, "\nuseless", useless.parts)
assert wrapper.parts["tests"] == 1.0 and wrapper.parts["call"] == 0.0
assert useless.parts["call"] == 1.5

# %% [markdown]
# **3.** The corpus of the pocket model shows revisions, but the scripted agents do not use
# the feedback: whether the team learns to is what training must show. One run.

# %%
config = load_profile("pocket").config(
    "coophe", "madpo", train_tasks=16, eval_tasks=8, iterations=2,
    domain_options={"horizon": 2})
folder = tempfile.mkdtemp()
run_mapl(config, folder, progress=False)
rows = pd.read_csv(f"{folder}/metrics.csv")
shown = rows[rows.metric.isin(["reward", "pass", "call"])]
shown.pivot_table(index="metric", columns="iteration", values="value").round(2)
