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
# # Solutions of 01 Formulation
#
# One way to answer each exercise; the game is that of
# [the notebook](../01_formulation.ipynb), with its definitions shortened.
#
# **After it you can** check your own answers. **It needs** notebook 01.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/solutions/01_formulation_solutions.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | not measured | not measured | - |

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
from functools import partial

import torch
import torch.nn.functional as F
from torch import tensor

import mapl_core
from mapl_core.losses import madpo_loss
from mapl_core.notebook import check_parameters

dtype = torch.float64
torch.set_default_dtype(dtype)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}; device cpu, {dtype}")

# %% tags=["parameters"]
BETA = 0.1  # MADPO's beta, in units of reward
ITERATIONS = 20  # MAPL iterations of a run
STEPS_PER_ITERATION = 20  # optimiser steps in each MAPL iteration
LEARNING_RATE = 5.0e-2  # Adam's step size, in units of logits

# %%
check_parameters(globals(), BETA=float, ITERATIONS=int, STEPS_PER_ITERATION=int,
                 LEARNING_RATE=float)
if min(BETA, ITERATIONS, STEPS_PER_ITERATION, LEARNING_RATE) <= 0:
    raise ValueError("BETA, LEARNING_RATE and the numbers of steps must be above 0")
# No seed: nothing below is random.

# %% [markdown]
# The game: rewards of the four joint actions (wait/wait, wait/call, call/wait,
# call/call) in the states "both up", "only 0 up", "only 1 up", and the tools to train.

# %%
rewards = tensor([[0.0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
calls = tensor(list(itertools.product((0, 1), repeat=2)))
observed = tensor([[1, 1], [1, 0], [0, 1]])


def first_law(p_both_up):
    """b_0: chances of the three states."""
    return tensor([p_both_up, (1 - p_both_up) / 2, (1 - p_both_up) / 2])


def dec_logprobs(call_logits):
    """(states, joint actions, 2) from logits of calling, (agents, observations)."""
    seen = call_logits[torch.arange(2), observed]
    return F.logsigmoid(seen[:, None, :] * (2 * calls - 1))


def minimise(loss_of, start, steps=STEPS_PER_ITERATION):
    """Adam on a function of one tensor; returns the last point."""
    point = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([point], lr=LEARNING_RATE)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of(point).backward()
        optimiser.step()
    return point.detach()


# %%
def all_pairs(initial, agents, comparator):
    """State, winner, loser and probability of every pair that is not a tie."""
    axes = (torch.arange(3), torch.arange(4), torch.arange(4))
    state, ours, theirs = (x.flatten() for x in torch.meshgrid(*axes, indexing="ij"))
    gap = rewards[state, ours] - rewards[state, theirs]
    weight = initial[state] * agents[state, ours] * comparator[state, theirs]
    winner = torch.where(gap > 0, ours, theirs)
    loser = torch.where(gap > 0, theirs, ours)
    kept = gap != 0
    return state[kept], winner[kept], loser[kept], weight[kept] / weight[kept].sum()


def surprise(table, pairs):
    """Mean -log sigmoid of the margins; the table's last axis is summed."""
    state, winner, loser, weight = pairs
    margins = (table[state, winner] - table[state, loser]).sum(dim=1)
    return weight @ -F.logsigmoid(margins)


# %%
def cen_logprobs(logits):
    """(states, joint actions, 1) from a coordinator's logits, (states, actions)."""
    return logits.log_softmax(dim=1)[..., None]


def train(method, p_both_up, tilt, comparator=None, logprobs_of=dec_logprobs):
    """End value of a team; it is its own comparator unless one is given."""
    initial = first_law(p_both_up)

    def value(x, table):
        return initial @ (logprobs_of(x).sum(dim=2).exp() * table).sum(dim=1)

    parameters = tensor([[tilt, tilt], [-tilt, -tilt]])
    if logprobs_of is cen_logprobs:  # a coordinator that plays like the two agents
        parameters = dec_logprobs(parameters).sum(dim=2)
    reference = logprobs_of(parameters)
    for _ in range(ITERATIONS):
        law = logprobs_of(parameters).sum(dim=2).exp()
        pairs = all_pairs(initial, law, law if comparator is None else comparator)
        if method == "MADPO":
            loss = partial(
                lambda x, p: surprise(BETA * (logprobs_of(x) - reference), p), p=pairs)
        else:
            scores = minimise(partial(lambda r, p: surprise(r[..., None], p), p=pairs),
                              torch.zeros(3, 4))
            loss = partial(lambda x, r: -value(x, r), r=scores)
        parameters = minimise(loss, parameters)
    return value(parameters, rewards).item()


fair_coordinator = 0.9 * rewards / rewards.sum(dim=1, keepdim=True) + 0.1 * 0.25

# %% [markdown]
# ## 1 When does the best team stop being lopsided?
#
# "Agent 0 leads": right unless only server 1 is up, value $P+\frac{1-P}2=\frac{1+P}2$.
# "Both call if up": right unless both are up, value $1-P$. They tie where
# $1+P=2-2P$, at $P=\frac13$. Below that nobody needs to lead.

# %%
for p in (0.2, 1 / 3, 0.5):
    lead, both = (1 + p) / 2, 1 - p
    print(f"P = {p:.2f}: one leads {lead:.3f}, both call if up {both:.3f}; "
          f"MADPO Dec-Dec {train('MADPO', p, 0.1):.3f}, "
          f"Dec-Cen {train('MADPO', p, 0.1, fair_coordinator):.3f}")

# %% [markdown]
# Without need for a leader Dec-Cen comes nearer to the best value, but not to it: "both
# up" still occurs, and its balanced winners still ask each agent for a coin toss.
#
# ## 2 A perfectly symmetric start

#
# Two equal agents that call with chance $p$ when their server is up, and never when it is
# down, are worth $0.5\cdot2p(1-p)+0.5\,p$: at best $\frac9{16}=0.5625$, at $p=\frac34$.
# Who ends above that has broken the symmetry.

# %%
for method in ("MADPO", "MARLHF"):
    for name, comparator in (("Dec-Dec", None), ("Dec-Cen", fair_coordinator)):
        print(f"{method} {name}: {train(method, 0.5, 0.0, comparator):.3f}")
    print(f"{method} Cen-Cen: {train(method, 0.5, 0.0, None, cen_logprobs):.3f}")

# %% [markdown]
# In exact arithmetic equal agents get equal gradients. They do move, away from 0.375 at
# the start, but only among the teams of two equal policies. Rounding makes them differ in
# the sixteenth digit. For policy gradient that is enough: whoever leads by a hair is told
# to lead more, and MARLHF leaves the symmetric teams behind. MADPO's lead is too small in
# the time that it has: its pairs are balanced up to that hair.
#
# Cen-Cen has no such saddle. One policy writes both actions, so it need not make two
# equal agents differ: with every answer as likely as any other it already learns which
# answers win.
#
# ## 3 A coordinator with a leader

# %%
leading = tensor([[0.0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
leader_coordinator = 0.9 * leading + 0.1 * 0.25
for name, law in (("fair", fair_coordinator), ("leading", leader_coordinator)):
    marginal = (law @ calls.to(dtype))[:, None]  # how often each agent calls, by state
    product = torch.where(calls == 1, marginal, 1 - marginal).prod(dim=2)
    gap = first_law(0.5) @ (law * (law / product).log()).sum(dim=1)  # mean over states
    print(f"{name} coordinator: realizability gap {gap:.3f} nats; "
          f"MADPO Dec-Cen ends at {train('MADPO', 0.5, 0.1, law):.3f}")

# %% [markdown]
# The gap nearly vanishes (what is left comes from the tenth of random actions), the
# winners agree with each other, and MADPO ends higher. The coordinator is no better than
# before; it is easier to follow. The best local team, 0.75, is still out of reach, as the
# *information* gap is untouched: agent 1 sees "up" in two states, in which the
# coordinator makes it wait and call, and imitates the mixture.
#
# ## 4 Three agents, fifteen pairs
#
# With three agents a loser has 0, 2, 2, 2 or 3 calls, 1.8 on average, and a winner 1.
# "Fewer calls" is additive, so MADPO can learn that much:

# %%
answers = tensor(list(itertools.product((0, 1), repeat=3)))
good = answers.sum(dim=1) == 1
winners, losers = (x.flatten() for x in torch.meshgrid(
    good.nonzero()[:, 0], (~good).nonzero()[:, 0], indexing="ij"))


def loss_of_three(logits):
    """MADPO's loss on all fifteen pairs; the reference calls half of the time."""
    logprobs = F.logsigmoid(logits * (2 * answers - 1))[..., None]
    reference = torch.full_like(logprobs, math.log(0.5))
    return madpo_loss(logprobs[winners], logprobs[losers], reference[winners],
                      reference[losers], beta=BETA)[0]


found = minimise(loss_of_three, tensor([0.2, 0.0, -0.2]), 2000)
chances = F.logsigmoid(found * (2 * answers - 1)).sum(dim=1).exp()
print(f"{len(winners)} pairs, loss {loss_of_three(found):.4f} < {math.log(2):.4f}")
print("P(call):", [round(x, 4) for x in found.sigmoid().tolist()],
      f"P(exactly one calls) = {chances[good].sum():.4f}")

# %% [markdown]
# It has learnt "do not call", for everybody alike, and plays the *losing* answer
# wait/wait/wait nearly always. The lower loss is real and the team is worse: at the
# reference exactly one of three fair coins falls on "call" in 3 of 8 cases.
#
# ## 5 A shared coin
#
# Both agents see the same coin, so each has one policy for heads and one for tails. A
# coordinator that lets agent 0 call on heads and agent 1 on tails is, *given the coin*,
# a product: no realizability gap. And the loss?

# %%
wait_call, call_wait, losing = 1, 2, (0, 3)  # rows of `calls`


def best_loss(winners_on_heads, winners_on_tails):
    """Lowest MADPO loss of two agents that see the coin; half of the pairs each."""
    of_coin = enumerate((winners_on_heads, winners_on_tails))
    pairs = [(coin, winner, loser) for coin, winners in of_coin
             for winner in winners for loser in losing]
    coin, winner, loser = (tensor(column) for column in zip(*pairs))

    def loss(logits):  # (agents, coin)
        logprobs = F.logsigmoid(logits.T[:, None, :] * (2 * calls - 1))[..., None]
        reference = torch.full_like(logprobs, math.log(0.5))
        return madpo_loss(*(table[coin, x] for table in (logprobs, reference)
                            for x in (winner, loser)), beta=BETA)[0]

    return loss(minimise(loss, tensor([[0.3, 0.1], [-0.2, 0.2]]), 2000)).item()


either = (wait_call, call_wait)
print("balanced pairs on both sides:", round(best_loss(either, either), 4))
print("winners that follow the coin:", round(best_loss((call_wait,), (wait_call,)), 4))

# %% [markdown]
# A coin that nobody uses changes nothing: given its side the four pairs are still
# balanced, and the floor is $\log 2$ (0.6931). Once the winners follow the coin, each side
# has one right answer, and *that* an additive reward can say.
