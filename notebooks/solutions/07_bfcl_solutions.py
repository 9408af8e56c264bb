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
# # Solutions to 07 BFCL
#
# The first two are exact; the third trains two small teams (16 requests, two iterations,
# less than the profile's) and compares numbers.

# %%
import tempfile

import pandas as pd
import torch

from mapl_core.domains.base import Task
from mapl_core.profiles import load_profile
from mapl_core.rewards import bfcl_reward
from mapl_core.train import run_mapl

# %% [markdown]
# **1.** With equal agents every pull is exactly zero, and all three curves stay at 0.5:
# if the other agent calls A and B equally often, neither call is better for me. It is a
# saddle, not a minimum. A sampled run leaves it by chance, since no finite set of
# samples is balanced; which agent gets which call differs from seed to seed.

# %%
logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
first, second = logits.softmax(-1)
differ = first[0] * second[1] + first[1] * second[0]
(pull,) = torch.autograd.grad(differ, logits, create_graph=True)
assert torch.equal(pull, torch.zeros_like(pull))
curvature = [torch.autograd.grad(entry, logits, retain_graph=True)[0].flatten()
             for entry in pull.flatten()]
eigenvalues = torch.linalg.eigvalsh(torch.stack(curvature))
print("P(the calls differ):", differ.item(), " curvature:", eigenvalues.tolist())
assert eigenvalues.min() < 0 < eigenvalues.max()

# %% [markdown]
# **2.** With one gold call only one agent can do anything right, so the number of agents
# that should act is min(N, g) = 1, and the balance compares with the ideal shares 1 and 0,
# whoever has which.

# %%
schema = {"name": "get_time", "description": "the time", "parameters": {
    "type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
gold = [{"get_time": {"city": ["Paris"]}}]
one = Task("one", "small", "eval", {"function": [schema], "ground_truth": gold})
reward = bfcl_reward(["[]", 'get_time(city="Paris")'], one)
print(reward.total, reward.parts)
assert reward.total == 2.0

# %% [markdown]
# **3.** Told which calls are theirs, the agents read different prompts. The pocket model
# has seen these prompts, but answers all of them with the same mixture, so the roles are
# still to be learnt. One short run each: it shows two teams, not a law.

# %%
def train(roles):
    """Evaluation means by iteration, for a small run."""
    config = load_profile("pocket").config(
        "bfcl", "madpo", train_tasks=16, eval_tasks=8, iterations=2,
        domain_options={"roles": roles})
    folder = tempfile.mkdtemp()
    run_mapl(config, folder, progress=False)
    rows = pd.read_csv(f"{folder}/metrics.csv")
    names = ["reward", "correct", "duplicates", "inactive"]
    shown = rows[rows.metric.isin(names)]
    table = shown.pivot_table(index="metric", columns="iteration", values="value")
    return table.round(2)


pd.concat({roles: train(roles) for roles in ("self_select", "odd_even")}, axis=1)
