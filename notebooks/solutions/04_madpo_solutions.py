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
# # Solutions of 04 MADPO
#
# One way to answer each exercise of [the notebook](../04_madpo.ipynb).
#
# **After it you can** check your own answers.
#
# **It needs** notebook 04; exercise 4 trains the pocket model.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/solutions/04_madpo_solutions.ipynb)
#
# | machine | profile | minutes | memory | date |
# |---|---|---|---|---|
# | 2 CPU cores | pocket | not measured | not measured | - |

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
import math
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress")  # our bars are plain text

import torch
import torch.nn.functional as F
from torch import tensor

import mapl_core
from mapl_core.losses import madpo_loss
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters
from mapl_core.profiles import load_profile
from mapl_core.seeding import Stream
from mapl_core.train import run_mapl

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}; device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # scale of exercise 4: pocket, small or paper
SEED = 0  # seed of every random draw
BETAS = [0.1, 1.0]  # values to compare in exercise 4, in units of reward
ITERATIONS = 3  # MAPL iterations of each run
TRAIN_TASKS = 64  # training posts
EVAL_TASKS = 16  # evaluation posts
OUTPUT_DIR = ""  # folder for the runs; empty: a temporary one

# %%
check_parameters(
    globals(), PROFILE=str, SEED=int, BETAS=list[float], ITERATIONS=int,
    TRAIN_TASKS=int, EVAL_TASKS=int, OUTPUT_DIR=str)
configs = {
    beta: load_profile(PROFILE).config(
        "tldr", "madpo", "dec-dec", seed=SEED, beta=beta, iterations=ITERATIONS,
        train_tasks=TRAIN_TASKS, eval_tasks=EVAL_TASKS, experiment="notebook-04")
    for beta in BETAS}
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-04-solutions-"))
generator = Stream(SEED, "solutions 04").generator()

# %% [markdown]
# ## 1 Which pair pulls harder?
#
# Neither. Only the sum counts, and both sums are 10: every agent is pulled by
# $0.1\,\sigma(-1)=0.0269$, also agent 1, who is wrong about the second pair.

# %%
zero = torch.zeros(1, 2, 1)
for edges in ((5.0, 5.0), (20.0, -10.0)):
    table = tensor(edges).view(1, 2, 1).requires_grad_()
    loss, _ = madpo_loss(table, zero, zero, zero, beta=0.1)
    pull = -torch.autograd.grad(loss, table)[0].flatten()
    print(edges, [round(x, 5) for x in pull.tolist()])

# %% [markdown]
# ## 2 Label smoothing
#
# With smoothing $\epsilon$ and the team's margin $m=\beta\sum_jd_j$ the pull is
# $\beta\,[(1-\epsilon)\,\sigma(-m)-\epsilon\,\sigma(m)]$. It vanishes where
# $\sigma(m)=1-\epsilon$, at $m=\log\frac{0.9}{0.1}=2.197$, a sum of edges of 21.97.
# Beyond that the loss pulls *back*: it does not believe its labels further than that.

# %%
for known in (0.0, 10 * math.log(9.0), 60.0):
    edges = tensor([[[known], [0.0]]]).requires_grad_()
    loss, _ = madpo_loss(edges, zero, zero, zero, beta=0.1, label_smoothing=0.1)
    pull = -torch.autograd.grad(loss, edges)[0][0, 0].item()
    print(f"sum of edges {known:5.2f}: pull {pull:+.5f}")

# %% [markdown]
# ## 3 Another third answer
#
# The step is along (winner's features - loser's features) = (0, 1). The third answer's
# logit moves by its own product with that: +3 before, now -3. The third answer
# loses probability, and now the winner's reward rises.

# %%
for third in (3.0, -3.0):
    features = tensor([[1.0, 0.0], [1.0, -1.0], [0.5, third]])
    weights = torch.zeros(2, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(3), dim=0)
    for _ in range(60):
        logprobs = torch.log_softmax(features @ weights, dim=0)
        loss, metrics = madpo_loss(*(x.view(1, 1, 1) for x in (
            logprobs[0], logprobs[1], reference[0], reference[1])), beta=0.1)
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - gradient).detach().requires_grad_()
    print(f"third answer (0.5, {third:+.0f}): chosen {metrics['chosen_reward']:+.3f}, "
          f"rejected {metrics['rejected_reward']:+.3f}, "
          f"P(third) {logprobs[2].exp().item():.3f}")

# %% [markdown]
# ## 4 A larger beta
#
# The margin is beta times a log-ratio, so with a larger beta a small move of the policy
# separates a pair and the pull fades early: the team stays near the base. Look at the
# distance from the base, for which the winners' log-ratio stands here (their implicit
# reward over beta, mean over the last iteration's batches), and at what it costs in
# score.

# %%
for beta, config in configs.items():
    run = run_mapl(config, folder / f"beta_{beta:g}", progress=False)
    scores = [row.value for row in run.metrics if row.metric == "score"]
    distance = run.final("train/chosen_reward") / beta
    print(f"beta {beta:g}: score {scores[0]:.3f} -> {scores[-1]:.3f}; log-ratio of the "
          f"winners {distance:.2f} nats, margin {run.final('train/margin'):.3f}")

# %% [markdown]
# ## 5 One joint backward pass, and agent by agent
#
# The joint loss, differentiated through both agents at once, against the derivative by
# the log-probabilities, carried on by each agent for itself. The second way needs one
# agent's graph at a time.

# %%
calls = tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
winners, losers = tensor([1, 2]), tensor([0, 0])
signs = 2 * calls - 1
logits = torch.randn(2, generator=generator).requires_grad_()
base = F.logsigmoid(torch.randn(2, generator=generator) * signs)[..., None]


def loss_of(table):
    return madpo_loss(table[winners], table[losers], base[winners], base[losers])[0]


(joint,) = torch.autograd.grad(loss_of(F.logsigmoid(logits * signs)[..., None]), logits)

table = F.logsigmoid(logits * signs)[..., None].detach().requires_grad_()
(derivative,) = torch.autograd.grad(loss_of(table), table)  # all agents' at once
apart = []
for agent in (0, 1):
    own = logits[agent].detach().requires_grad_()
    logprobs = F.logsigmoid(own * signs[:, agent])
    carried = (derivative[:, agent, 0] * logprobs).sum()
    apart.append(torch.autograd.grad(carried, own)[0])
print("joint", joint.tolist(), "apart", [x.item() for x in apart])
torch.testing.assert_close(joint, torch.stack(apart))
