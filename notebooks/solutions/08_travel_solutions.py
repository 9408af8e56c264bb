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
# # Solutions to 08 Travel
#
# The first two are exact; the third trains a small team of three (16 trips, two
# iterations, less than the profile's).

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd

from mapl_core.domains import get_domain
from mapl_core.domains.travel_solver import cheapest_plan, plan_values
from mapl_core.evaluation import evaluate
from mapl_core.profiles import load_profile
from mapl_core.rewards.travel import judge, travel_reward
from mapl_core.rewards.travel_actions import owned_slots, write_action
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl

domain = get_domain("travel")
task = domain.load_tasks("eval", "pocket", 1)[0]
trip = domain.trip(task)
solution = cheapest_plan(trip)
plan = plan_values(solution, trip)
texts = [write_action(agent, [(slot, plan.get(slot, "-")) for slot in
                              owned_slots(agent, trip.days)]) for agent in (0, 1)]

# %% [markdown]
# **1.** Only the hard check `budget` fails: `pass` looks at the commonsense checks alone
# and stays, `success` is lost. The reward loses the 0.10 for complete success and a
# little of the quality, since the check is soft: one dollar too much is a margin of
# nearly 1.

# %%
poor = replace(task, fields={**task.fields, "budget": solution.cost - 1})
for name, its in (("as it is", task), ("one dollar short", poor)):
    found = judge(texts, its)
    failing = [n for n, check in (found.evaluation.commonsense | found.evaluation.hard)
               .items() if not check.passed]
    print(f"{name}: {travel_reward(texts, its).total:.3f}, "
          f"pass {found.evaluation.passes}, success {found.evaluation.succeeds}, "
          f"failing {failing}")
assert found.evaluation.passes and not found.evaluation.succeeds

# %% [markdown]
# **2.** Slots belong to agents. Swapped, every item is one that its writer does not own:
# both texts are invalid, nothing is paid for them, and the penalty for invalid items is
# due in full. Knowing the answer is not enough; saying one's own part is.

# %%
swapped = travel_reward(texts[::-1], task)
print({name: round(value, 3) for name, value in swapped.parts.items() if value})
assert swapped.total < 0

# %% [markdown]
# **3.** Compare the agents by the share of their own required slots that are right: the
# balance $B$ follows the lowest of them. One run: it shows one team, not a law.

# %%
config = load_profile("pocket").config(
    "travel", "madpo", train_tasks=16, eval_tasks=8, iterations=2, max_new_tokens=[18],
    domain_options={"num_agents": 3})
folder = Path(tempfile.mkdtemp())
run_mapl(config, folder, progress=False)
team = build_team(config)
team.policy.load(folder / "adapters")
_, played = evaluate(team.policy, team.eval_tasks, 8, Stream(0, "solutions 08"))
tasks = {task.id: task for task in team.eval_tasks}
rows = []
for trajectory in played:
    found = team.domain.judge(list(trajectory.responses[-1]), tasks[trajectory.task_id])
    plan, valid = found.merged.plan, found.evaluation.valid
    needed = set(team.domain.trip(tasks[trajectory.task_id]).required)
    right = {slot for slot in needed & set(plan) if valid[slot]}
    rows.append([len(right & set(action.owned)) / len(needed & set(action.owned))
                 for action in found.actions])
shares = pd.DataFrame(rows, columns=["logistics", "dining", "sightseeing"])
shares.mean().round(2)
