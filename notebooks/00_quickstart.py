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
# # 00 Quickstart
#
# One whole loop of multi-agent preference learning (MAPL), on a model small enough for
# any laptop: a team of two answers, an annotator compares, the team learns, and a plot
# shows it.
#
# **After it you can** name the five steps of a MAPL iteration, run them with one call,
# and read the curve and the answers that come out.
#
# **It needs** nothing before it. No GPU, no download.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/00_quickstart.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 0.5 | 0.7 GiB | 2026-11-30 |

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
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.train import run_mapl

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # pocket (any laptop), small (a real model, slower) or paper (a GPU)
METHOD = "madpo"  # madpo or marlhf: how the team learns from preferences
TASKS = 64  # training posts; None: as many as the profile says
EVAL_TASKS = 16  # evaluation posts, never trained on; None: as the profile says
ITERATIONS = 3  # MAPL iterations; None: as the profile says
SEED = 0  # seed of every random stream
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, METHOD=str, TASKS=int | None,
                 EVAL_TASKS=int | None, ITERATIONS=int | None, SEED=int, OUTPUT_DIR=str)
sizes = {"train_tasks": TASKS, "eval_tasks": EVAL_TASKS, "iterations": ITERATIONS}
config = load_profile(PROFILE).config(
    "tldr", METHOD, "dec-dec", seed=SEED,
    **{name: size for name, size in sizes.items() if size is not None})
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-quickstart-"))
torch.set_num_threads(config.threads)
print(f"{config.method}, models {sorted(set(config.policy_models))}, "
      f"{config.train_tasks} posts, {config.iterations} iterations, m = "
      f"{config.samples_per_task}, k = {config.pairs_per_task}; results in {folder}")

# %% [markdown]
# ## The loop
#
# Two agents share one frozen model; each has a small adapter of its own. Agent 0 is asked
# for a short summary of a post, agent 1 for a long one with linking words, and neither
# sees the other's. In every iteration
#
# 1. **collect**: the agents answer every post $m$ times, and so does a comparator (here
#    the same team, with other random numbers);
# 2. **label**: an annotator compares the $j$-th joint answers of both; the higher reward
#    wins, ties are dropped;
# 3. **select**: the $k$ pairs with the best winners are kept for each post;
# 4. **buffer**: the pairs join those of earlier iterations, and a training set is drawn
#    from all of them, the newest ones being the likeliest;
# 5. **update**: the team learns from the training set. MADPO (multi-agent direct
#    preference optimisation) does it directly; MARLHF (multi-agent reinforcement learning
#    from human feedback) fits a reward model first.
#
# This is the paradigm *Dec-Dec*: decentralised agents, each acting on what it sees,
# against a decentralised comparator. No agent is ever told what the reward is. One call
# does all of it:

# %%
result = run_mapl(config, folder)

# %% [markdown]
# ## Did it learn?
#
# The score is the oracle's reward over its maximum, on posts that were not trained on.
# Iteration 0 is the untrained team. Look for the steepest step, and at how far the thin
# lines (one post each) lie apart.

# %%
metrics = pd.read_csv(folder / "metrics.csv")
per_post = pd.read_csv(folder / "evaluation.csv").query("metric == 'score'")
score = per_post.groupby("iteration").value.mean()
figure, axes = plt.subplots(figsize=(6.4, 3.8), constrained_layout=True)
for _, line in per_post.groupby("task_id"):
    axes.plot(line.iteration, line.value, color="#BBBBBB", linewidth=0.7)
axes.plot(score.index, score.values, color=figures.COLOURS[METHOD], marker="o")
axes.annotate(METHOD, (score.index[-1], score.values[-1]), xytext=(6, 0),
              textcoords="offset points", color=figures.COLOURS[METHOD], va="center")
axes.set(xlabel="MAPL iteration", ylabel="TLDR score", ylim=(0, 1), xticks=score.index,
         title=f"TLDR score over training - {PROFILE}, {config.eval_tasks} tasks, "
               f"seed {SEED}")
finding = (f"The score goes from {score.iloc[0]:.2f} to {score.iloc[-1]:.2f} in "
           f"{config.iterations} iterations. Thin lines: {config.eval_tasks} posts, "
           "one run.")
show_figure(figure, "quickstart", f"Score by iteration. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# > **Common mistake.** Judging by the training loss. MADPO's very first loss is
# > $\log 2 = 0.693$ whatever the answers are, and `train/loss` is a mean over an
# > iteration's batches, each taken before its own step and mostly on other pairs than
# > those of the iteration before. Two of its values therefore measure different things.
# > The score is measured on the same posts every time: it is what counts.
#
# In the table, `r` is the length ratio of the two summaries, long over short, and `n` the
# number of kinds of linking words in the long one: the oracle pays in full for a ratio
# between 1.6 and 3.2, and more for every kind. Which of the two has moved?

# %%
shown = metrics[metrics.metric.isin(["score", "r", "n", "train/loss"])]
shown.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# ## What do the answers look like?
#
# The same post, before and after. Agent 1 was asked for a long text with linking words.
# How many times as long, how many kinds of linking words, and that shared words pay:
# nobody told it, and it never saw agent 0's text. Look for these three.

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in ("0", str(config.iterations)):
    example = examples[iteration][:2][-1]  # the second post, or the only one
    print(f"--- after {iteration} iterations: reward {example['reward']:.2f} of 3")
    for agent, text in enumerate(example["responses"][-1]):
        print(f"agent {agent}: {text}")

# %% [markdown]
# ## Where next
#
# 01 says what kind of problem this is, 02 opens steps 1 to 4, 03 and 04 open step 5.
#
# ## Exercises
#
# 1. Set `METHOD = "marlhf"`. Is the curve steeper or flatter? What else is in
#    `metrics.csv` that MADPO does not have?
# 2. Set `ITERATIONS = 1`. How much of the gain is there already, and from how many
#    comparisons?
#
# Solutions: notebooks/solutions/00_quickstart_solutions.ipynb
