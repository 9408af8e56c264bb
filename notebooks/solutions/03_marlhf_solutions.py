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
# # Solutions of 03 MARLHF
#
# One way to answer each exercise of [the notebook](../03_marlhf.ipynb).
#
# **After it you can** check your own answers.
#
# **It needs** notebook 03; exercise 5 trains the pocket model.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/solutions/03_marlhf_solutions.ipynb)
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
import itertools
import math
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress")  # our bars are plain text

import torch
import torch.nn.functional as F
from torch import tensor

import mapl_core
from mapl_core.losses import (
    bradley_terry_loss,
    group_relative_advantages,
    magrpo_loss,
)
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
PROFILE = "pocket"  # scale of exercise 5: pocket, small or paper
SEEDS = [0, 1]  # seeds to compare in exercise 5
ITERATIONS = 3  # MAPL iterations of each run
TRAIN_TASKS = 64  # training posts
EVAL_TASKS = 16  # evaluation posts
TOY_REPEATS = 20  # random data sets for each number of exercise 3
OUTPUT_DIR = ""  # folder for the runs; empty: a temporary one

# %%
check_parameters(
    globals(), PROFILE=str, SEEDS=list[int], ITERATIONS=int, TRAIN_TASKS=int,
    EVAL_TASKS=int, TOY_REPEATS=int, OUTPUT_DIR=str)
configs = {
    seed: load_profile(PROFILE).config(
        "tldr", "marlhf", "dec-dec", seed=seed, iterations=ITERATIONS,
        train_tasks=TRAIN_TASKS, eval_tasks=EVAL_TASKS, experiment="notebook-03")
    for seed in SEEDS}
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-03-solutions-"))
generator = Stream(0, "solutions 03").generator()

# %% [markdown]
# ## 1 A lucky group
#
# Mean 1, so (-1, -1, -1, 3); population std $\sqrt{12/4}=1.732$, so (-0.577, -0.577,
# -0.577, 1.732). As the 4 shrinks to 0.001 the first shrink with it, the second stay:
# with "mean_std" a hair's breadth is a full lesson. That is why it is an option here.

# %%
for top in (4.0, 0.001):
    group = tensor([[0.0, 0.0, 0.0, top]])
    for form in ("mean", "mean_std"):
        found = group_relative_advantages(group, normalize=form)[0].tolist()
        print(f"top {top}: {form:>8} {[round(x, 5) for x in found]}")

# %% [markdown]
# ## 2 The team's gradient
#
# Agents with logits $x_0,x_1$, joint worth $R$. Enumerate all $4^2$ groups of two joint
# answers: the expectation of the loss's gradient is $(1-\frac12)$ times that of the
# team's expected worth, for each agent.

# %%
calls = tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
worth = tensor([0.0, 1.0, 1.0, -2.0])
logits = tensor([0.4, -0.7]).requires_grad_()
table = F.logsigmoid(logits * (2 * calls - 1))  # (joint answers, agents)
law = table.sum(dim=1).exp()
(exact,) = torch.autograd.grad((law * worth).sum(), logits, retain_graph=True)
expected = torch.zeros(2)
for pair in itertools.product(range(4), repeat=2):
    group = list(pair)
    advantages = group_relative_advantages(worth[group][None])
    loss, _ = magrpo_loss(table[group][None, :, :, None], advantages)
    (gradient,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    expected += law[group].prod().detach() * gradient
print("exact", exact.tolist(), "expected", expected.tolist())
torch.testing.assert_close(expected, exact / 2)

# %% [markdown]
# ## 3 Noisy labels
#
# The toy game of section 2, one label in five flipped. Look for the number of noisy pairs
# that reaches the accuracy of 80 clean ones.


# %%
def accuracy_after(count, flipped):
    """Order accuracy of scores fitted to `count` labels, a share of them flipped."""
    worth = torch.randn(36, generator=generator)
    first, second = torch.randint(36, (2, count), generator=generator)
    first, second = first[first != second], second[first != second]
    right = torch.rand(len(first), generator=generator) >= flipped
    better = (worth[first] > worth[second]) == right
    winner = torch.where(better, first, second)
    loser = torch.where(better, second, first)
    scores = torch.zeros(36, requires_grad=True)
    optimiser = torch.optim.Adam([scores], lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        bradley_terry_loss(scores[winner], scores[loser])[0].backward()
        optimiser.step()
    a, b = torch.combinations(torch.arange(36)).T
    same = (scores[a] - scores[b]).sign() == (worth[a] - worth[b]).sign()
    return same.double().mean().item()


for flipped, counts in ((0.0, (80,)), (0.2, (80, 160, 320))):
    for count in counts:
        mean = sum(accuracy_after(count, flipped) for _ in range(TOY_REPEATS))
        print(f"{count} pairs, {flipped:.0%} flipped: {mean / TOY_REPEATS:.3f}")

# %% [markdown]
# Bradley-Terry expects noise, so nothing breaks: it only takes two to four times the
# pairs.
#
# ## 4 Where siblings and critic are equally noisy
#
# Per answer the estimate is $(\text{action}+\text{luck}-\text{baseline})\cdot(\pm\frac12)$.
# The critic's error is common to the four answers: it adds variance
# $e^2\cdot\frac14\cdot\frac14$ to their mean. Search for the error at which both agree.


# %%
def gradient_noise(critic_error, samples=100000):
    """Spread of the gradient estimate of four answers: siblings, then a critic."""
    actions = torch.randint(2, (samples, 4), generator=generator).double()
    score = actions - 0.5
    luck = 0.5 * torch.randn(samples, 4, generator=generator).double()
    siblings = group_relative_advantages(actions + luck) * 4 / 3
    guess = 0.5 + critic_error * torch.randn(samples, 1, generator=generator)
    return [(advantage * score).mean(dim=1).std().item()
            for advantage in (siblings, actions + luck - guess)]


for error in (0.0, 0.2, 0.4, 0.6):
    siblings, critic = gradient_noise(error)
    print(f"error {error:.1f}: siblings {siblings:.4f}, critic {critic:.4f}")
siblings, perfect = gradient_noise(0.0)
equal = 4 * math.sqrt(max(siblings**2 - perfect**2, 0.0))
print(f"equal at an error of about {equal:.2f}: {gradient_noise(equal)}")

# %% [markdown]
# About half of the difference that one answer makes: a critic has to be good.
#
# ## 5 Another seed
#
# To be quick this is a smaller run than section 7's: MAGRPO only and fewer iterations. So
# compare these seeds with each other, and their spread with the
# differences between algorithms on your own plot.

# %%
finals = {}
for seed, config in configs.items():
    run = run_mapl(config, folder / f"seed_{seed}", progress=False)
    scores = [row.value for row in run.metrics if row.metric == "score"]
    finals[seed] = scores[-1]
    print(f"seed {seed}: score {scores[0]:.3f} -> {scores[-1]:.3f}")
print(f"spread between seeds: {max(finals.values()) - min(finals.values()):.3f}")

# %% [markdown]
# Two algorithms that differ by less than this spread have not been told apart; and two
# seeds are too few to know the spread well. With one seed you may say how *this* team did
# on these posts, nothing about the algorithm: hence several seeds and t intervals in the
# tables.
