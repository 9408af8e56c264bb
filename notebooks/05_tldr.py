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
# # 05 TLDR
#
# Two agents summarise one post, one briefly and one at length; neither sees what the
# other writes, and the reader gets both.
#
# **After it you can** take the oracle reward of TLDR apart on any pair of texts, say
# what the untrained team does wrong, train it with any method under any paradigm, and
# read from one curve and two answers what training changed.
#
# **It needs** 04_madpo or 03_marlhf for the methods. It is also the job that
# `./reproduce.sh` runs for every TLDR row of Table 1.
#
# The names: MADPO is multi-agent direct preference optimisation, MARLHF multi-agent
# reinforcement learning from human feedback. MAGRPO (multi-agent GRPO, group relative
# policy optimisation), CoLLM-CC and CoLLM-DC (collaborative-LLM actor-critics with a
# centralised critic, with decentralised critics) learn from the oracle's reward itself. A
# paradigm is (agents)-(comparator), each decentralised, Dec, or centralised, Cen.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/05_tldr.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 0.7 | 0.7 GiB | 2026-11-30 |

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
import json
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # plain bars are meant

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from IPython.display import Markdown, display

import mapl_core
from mapl_core import figures
from mapl_core.domains import get_domain
from mapl_core.evaluation import evaluate
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.rewards import tldr_reward
from mapl_core.rewards.tldr import measure
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # pocket (any laptop), small (a real model) or paper (a GPU)
METHOD = "madpo"  # untrained, madpo, marlhf, magrpo, collm_cc or collm_dc
PARADIGM = "dec-dec"  # agents-comparator: dec-dec, cen-cen or dec-cen
SEED = 0  # seed of every random stream of the run
LOOK_TASKS = 4  # evaluation posts on which section 3 looks at the untrained team
OVERRIDES = {}  # values that replace the profile's, such as {"beta": 0.5}
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, METHOD=str, PARADIGM=str, SEED=int,
                 LOOK_TASKS=int, OVERRIDES=dict, OUTPUT_DIR=str)
config = load_profile(PROFILE).config("tldr", METHOD, PARADIGM, seed=SEED, **OVERRIDES)
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-tldr-"))
torch.set_num_threads(config.threads)
print(f"{config.method} {config.paradigm}, seed {config.seed}, models "
      f"{sorted(set(config.policy_models))}; results in {folder}")

# %% [markdown]
# ## 1 The task
#
# A post, and two roles. Agent 1 is asked for a long text with linking words. Look at what
# it is *not* told: agent 0's text, how many *times* as long its own should be, how many
# kinds of linking words count, and that words shared with agent 0 pay. All this the team
# must learn.

# %%
domain = get_domain("tldr")
task = domain.load_tasks("eval", config.source, 1)[0]
for agent, prompt in enumerate(domain.prompts(task)):
    print(f"--- agent {agent} reads:\n{prompt}\n")

# %% [markdown]
# Under centralised agents (Cen) one coordinator reads both roles at once, and its tagged
# text is cut back into the agents' parts:

# %%
print(domain.coordinator_prompt(task))
joint = "<agent_0>the short part</agent_0> <agent_1>the long part</agent_1>"
assert domain.split_joint(joint) == ["the short part", "the long part"]

# %% [markdown]
# ## 2 The oracle reward, by hand
#
# Five parts, at most 3.0 (paper, appendix C.3). The first three are stages: each must
# earn something before the next is looked at.
#
# - *structure*: 0.5 if both texts have 8 to 256 words;
# - *length*: the ratio of the lengths in characters, agent 1's over agent 0's. It earns 0
#   up to 1.1, rising to 1 at 1.6, all of it up to 3.2, falling to 0 at 5.0;
# - *unique*: the ratio of the numbers of different words. It earns 0 up to 1.3, rising to
#   the full 0.5 from 2.0 on.
#
# Take two short texts and compute the first three yourself. The second one is a little
# too long: what does that cost?

# %%
short = "anna lost her green bag on the train and wants it back"
detailed = ("anna was tired after a long day , however she took the late train home . "
            "because she slept , her green bag stayed there . as a result she asks : "
            "should anna call the station first ?")
length_ratio = len(detailed) / len(short)
unique = [len(set(text.replace(",", "").replace(".", "").replace(":", "")
                  .replace("?", "").split())) for text in (short, detailed)]
length_value = (5.0 - length_ratio) / (5.0 - 3.2)  # on the falling side
print(f"words {len(short.split())} and {len(detailed.split())}: +0.5")
print(f"length ratio {length_ratio:.2f}, above 3.2: +{length_value:.3f} of 1.0")
print(f"unique-word ratio {unique[1] / unique[0]:.2f}, above 2.0: +0.5")

# %% [markdown]
# The other two: *style*, the overlap of the two vocabularies without stop words, which
# earns its full 0.6 from 0.03 on, and *coherence*, how many of twelve kinds of transition
# words the detailed text uses: of 0.4, the first kind earns 0.4 and each further one
# 0.6 / 11. Here it uses three phrases of two kinds: "however" (contrast), "because" and
# "as a result" (both cause and effect).

# %%
reward = tldr_reward([short, detailed], task)
measured = measure([short, detailed])
assert abs(measured.length_ratio - length_ratio) < 1e-9
assert abs(measured.unique_ratio - unique[1] / unique[0]) < 1e-9
assert measured.transitions == 2
assert abs(reward.parts["length"] - length_value) < 1e-9
style = 0.6 * min(measured.overlap / 0.03, 1.0)
coherence = 0.4 * (0.4 + 0.6 * (measured.transitions - 1) / 11)
assert abs(reward.parts["style"] - style) < 1e-9
assert abs(reward.parts["coherence"] - coherence) < 1e-9
assert abs(sum(reward.parts.values()) - reward.total) < 1e-9
print(f"total {reward.total:.3f} of 3: "
      + ", ".join(f"{name} {value:.3f}" for name, value in reward.parts.items()))

# %% [markdown]
# > **Common mistake.** Reading the score as quality of the *summary*. No part checks
# > facts: a fluent pair about another post can score high, and length decides much of
# > it. How to check: score a good pair of one post as the answer to another.

# %% [markdown]
# ## 3 The untrained team
#
# A few evaluation posts, four joint answers each. Which part of the reward is lost most
# often? That is what the preferences will teach. Read the last column from the top: an
# answer with nothing in one of the first three parts has nothing in all parts below it
# either, as the oracle stops there.

# %%
few = {**OVERRIDES, "eval_tasks": LOOK_TASKS}
team = build_team(load_profile(PROFILE).config("tldr", "untrained", PARADIGM, seed=SEED,
                                               **few))
by_task, played = evaluate(team.policy, team.eval_tasks, 4, Stream(SEED, "notebook 05"))
parts = pd.DataFrame([trajectory.parts[-1] for trajectory in played])
maximum = pd.Series({"structure": 0.5, "length": 1.0, "unique": 0.5, "style": 0.6,
                     "coherence": 0.4})
pd.DataFrame({"mean": parts.mean(), "maximum": maximum,
              "share of answers with nothing": (parts == 0).mean()}).round(3)

# %% [markdown]
# Samples of one post differ widely. That spread is what a preference compares:

# %%
best, worst = (pick(played, key=lambda t: t.total_return) for pick in (max, min))
for label, trajectory in (("best", best), ("worst", worst)):
    print(f"--- {label}: {trajectory.total_return:.2f} of 3")
    for agent, text in enumerate(trajectory.responses[-1]):
        print(f"agent {agent}: {text}")
del team

# %% [markdown]
# ## 4 Training
#
# One call runs the whole loop of the paper's Algorithm 1 or 2: collect, label, select,
# buffer, update, evaluate. It writes everything to the results folder, and goes on where
# it stopped if you interrupt it. The oracle scores the evaluation; the learned reward
# never does.

# %%
result = run_mapl(config, folder)
curve = pd.read_csv(folder / "metrics.csv")
evaluation = pd.read_csv(folder / "evaluation.csv")
scores = evaluation[evaluation.metric == "score"].groupby("iteration").value.mean()
scores.rename("score").to_frame().round(3).T

# %% [markdown]
# ## 5 What changed
#
# Left: the score after each iteration. Right: the parts of the reward before and after.
# Which part grew most, and which is still missing?

# %%
last = int(evaluation.iteration.max())
tasks = evaluation.task_id.nunique()
steps = curve[curve.metric == "score"].set_index("iteration").env_steps
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
per_task = evaluation[evaluation.metric == "score"]
for _, line in per_task.groupby("task_id"):
    axes[0].plot(steps[line.iteration], line.value, color="#BBBBBB", linewidth=0.7)
colour = figures.COLOURS[METHOD]
axes[0].plot(steps[scores.index], scores.values, color=colour, marker="o")
axes[0].set(xlabel="env steps (trained joint responses)", ylabel="score", ylim=(0, 1))
names = [f"part/{name}" for name in maximum.index]
means = evaluation[evaluation.metric.isin(names)].pivot_table(
    index="metric", columns="iteration", values="value").loc[names]
rows = range(len(names))
axes[1].barh([r + 0.2 for r in rows], maximum.values, 0.8, color="#EEEEEE")
axes[1].barh([r + 0.4 for r in rows], means[0].values, 0.4, color="#666666")
axes[1].barh([r for r in rows], means[last].values, 0.4, color=colour)
axes[1].set(yticks=[r + 0.2 for r in rows], yticklabels=maximum.index,
            xlabel="reward (upper: untrained, lower: after, pale: maximum)")
figure.suptitle(f"TLDR, {METHOD} {PARADIGM} - {PROFILE}, {tasks} tasks, seed {SEED}")
finding = (f"Score {scores[0]:.2f} before and {scores[last]:.2f} after {last} "
           f"iterations; thin lines are the {tasks} evaluation posts, one run.")
show_figure(figure, "tldr", f"Two panels. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# > **Common mistake.** Trusting the mean alone. If the thin lines fan out while the mean
# > rises, the team has learnt a habit that suits some posts only.

# %% [markdown]
# The same post before and after. Read for what the numbers do not say:

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in (str(0), str(last)):
    for example in examples[iteration][:2]:
        print(f"--- after {iteration} iterations, {example['task']}, "
              f"reward {example['reward']:.2f}")
        for agent, text in enumerate(example["responses"][-1]):
            print(f"agent {agent}: {text}")

# %% [markdown]
# ## 6 How it got there
#
# The numbers behind the curve: ties (comparisons that taught nothing), how often the
# winner of a *kept* pair was the agents' (`preferences/agent_wins`; pairs that were not
# selected do not count), and the method's own figures. An empty table is right for the
# untrained team.

# %%
own = curve[curve.metric.str.match(r"(preferences|train|reward_model)/")]
own.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# ## Exercises
#
# 1. Write a pair of texts that scores above 2.9 and says nothing about the post. What
#    would an oracle need so that it could not be fooled?
# 2. Run this notebook with `METHOD = "marlhf"` and compare `r` (length ratio) in
#    `evaluation.csv` with MADPO's. Which method overshoots, and why?
# 3. Set `OVERRIDES = {"reference": "none"}` under MADPO. What happens to the lengths
#    (`length/agent0` and `length/agent1` in `metrics.csv`, in tokens)?
#
# Solutions: notebooks/solutions/05_tldr_solutions.ipynb
