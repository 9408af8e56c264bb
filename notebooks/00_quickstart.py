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
# One whole loop of multi-agent preference learning, on a model small enough for any
# laptop: a team of two answers, an annotator compares, the team learns, and a plot shows
# it.
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
# | 2 CPU cores | not measured | not measured | - |

# %%
import os
import subprocess
import sys
from importlib.metadata import version

if "google.colab" in sys.modules:  # elsewhere this cell does nothing
    address, tag = "https://github.com/OWNER/mapl-notebooks", "v0.1.0"
    if not os.path.isdir("mapl-notebooks"):
        clone = ["git", "clone", "--depth", "1", "--branch", tag, address]
        subprocess.run(clone, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    before = sys.modules["numpy"].__version__ if "numpy" in sys.modules else None
    subprocess.run([*pip, "-r", "mapl-notebooks/requirements.txt"], check=True)
    subprocess.run([*pip, "--no-deps", "-e", "mapl-notebooks"], check=True)
    sys.path.insert(0, os.path.abspath("mapl-notebooks"))
    if before not in (None, version("numpy")):
        raise RuntimeError("numpy was replaced on disk: choose Runtime > Restart "
                           "session, then run this notebook from its first cell")

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
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.train import run_mapl

print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {'cuda' if torch.cuda.is_available() else 'cpu'}")

# %% tags=["parameters"]
PROFILE = "pocket"  # pocket (any laptop), small (a real model, slower) or paper (a GPU)
METHOD = "madpo"  # madpo or marlhf: how the team learns from preferences
TASKS = 32  # training posts
EVAL_TASKS = 16  # evaluation posts, never trained on
ITERATIONS = 3  # MAPL iterations
SEED = 0  # seed of every random stream
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, METHOD=str, TASKS=int, EVAL_TASKS=int,
                 ITERATIONS=int, SEED=int, OUTPUT_DIR=str)
config = load_profile(PROFILE).config(
    "tldr", METHOD, "dec-dec", seed=SEED, train_tasks=TASKS, eval_tasks=EVAL_TASKS,
    iterations=ITERATIONS)
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-quickstart-"))
torch.set_num_threads(config.threads)
print(f"{config.method}, models {sorted(set(config.policy_models))}, m = "
      f"{config.samples_per_task}, k = {config.pairs_per_task}; results in {folder}")

# %% [markdown]
# ## The loop
#
# Two agents share one frozen model; each has a small adapter of its own. Agent 0 writes
# a short summary of a post, agent 1 a long one, and neither sees the other's. In every
# iteration
#
# 1. **collect**: the agents answer every post $m$ times, and so does a comparator (here
#    the same team, with other random numbers);
# 2. **label**: an annotator compares the $j$-th joint answers of both; the higher reward
#    wins, ties are dropped;
# 3. **select**: the $k$ pairs with the best winners are kept for each post;
# 4. **buffer**: they join those of earlier iterations;
# 5. **update**: the team learns from the pairs. MADPO does it directly; MARLHF fits a
#    reward model first.
#
# No agent is ever told what the reward is. One call does all of it:

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
axes.plot(score.index, score.values, color="#D55E00", marker="o")
axes.annotate(METHOD, (score.index[-1], score.values[-1]), xytext=(6, 0),
              textcoords="offset points", color="#D55E00", va="center")
axes.set(xlabel="MAPL iteration", ylabel="TLDR score", ylim=(0, 1), xticks=score.index,
         title=f"TLDR score over training - {PROFILE}, {EVAL_TASKS} tasks, seed {SEED}")
finding = (f"The score goes from {score.iloc[0]:.2f} to {score.iloc[-1]:.2f} in "
           f"{ITERATIONS} iterations. Thin lines: {EVAL_TASKS} posts, one run.")
show_figure(figure, "quickstart", f"Score by iteration. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# > **Common mistake.** Judging by the training loss. MADPO's loss starts at
# > $\log 2 = 0.693$ and hardly moves, because every iteration brings new, harder pairs;
# > the score is what counts.

# %%
shown = metrics[metrics.metric.isin(["score", "r", "n", "train/loss"])]
shown.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# ## What do the answers look like?
#
# The same post, before and after. `r` above is the length ratio of the two summaries,
# `n` the number of kinds of linking words in the long one: the oracle rewards a ratio
# between 1.6 and 3.2, and many kinds. Nobody told the agents.

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in ("0", str(ITERATIONS)):
    example = examples[iteration][1]
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
