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
# # 07 BFCL
#
# Two agents read the same request and the same functions, and issue calls at the same
# time. Neither sees what the other calls; a merger joins the calls, and the request is
# answered if every call that it needs is there once.
#
# **After it you can** take the oracle reward of BFCL apart on any calls, see who calls
# what, train the team with any method under any paradigm, and say why two agents with
# *identical* prompts are hard to train.
#
# **It needs** 01_formulation for the game of "exactly one of us", and 03_marlhf or
# 04_madpo for the methods. It is also the job that `./reproduce.sh` runs for every BFCL
# row of Table 1.
#
# BFCL is the Berkeley function-calling leaderboard; MADPO, MARLHF and MAGRPO are the
# methods of 03 and 04. A paradigm is (agents)-(comparator), each decentralised, Dec, or
# centralised, Cen.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/07_bfcl.ipynb)
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
import json
import math
import tempfile
import warnings
from collections import Counter
from itertools import product
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # plain bars are meant

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from IPython.display import Markdown, display

import mapl_core
from mapl_core import figures
from mapl_core.domains import get_domain
from mapl_core.domains.base import Task
from mapl_core.evaluation import evaluate
from mapl_core.losses import madpo_loss
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.rewards import bfcl_reward
from mapl_core.rewards.bfcl import callers
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
LOOK_TASKS = 8  # evaluation requests on which sections 3 and 6 look at who calls what
LOOK_SAMPLES = 8  # joint answers to each of them
OVERRIDES = {}  # values that replace the profile's, such as {"beta": 0.5}
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, METHOD=str, PARADIGM=str, SEED=int,
                 LOOK_TASKS=int, LOOK_SAMPLES=int, OVERRIDES=dict, OUTPUT_DIR=str)
config = load_profile(PROFILE).config("bfcl", METHOD, PARADIGM, seed=SEED, **OVERRIDES)
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-bfcl-"))
torch.set_num_threads(config.threads)
print(f"{config.method} {config.paradigm}, seed {config.seed}, models "
      f"{sorted(set(config.policy_models))}; results in {folder}")

# %% [markdown]
# ## 1 The task
#
# A request and the schemas of the functions that can answer it. Look at the two prompts:
# they are the same text. No agent is told *which* share is its own. What will tell the
# agents apart?

# %%
domain = get_domain("bfcl", **config.domain_options)
task = domain.load_tasks("eval", config.source, 1)[0]
prompts = domain.prompts(task)
print(prompts[0])
print("\nthe prompts of all agents are equal:", len(set(prompts)) == 1)

# %% [markdown]
# The answer that is wanted, with every accepted value of every argument; "" among them
# means that the argument may be left out:

# %%
for call in task.fields["ground_truth"]:
    print(call)

# %% [markdown]
# Under centralised agents one coordinator writes all parts in tagged sections. It sees
# what it has already called, so it has no symmetry to break:

# %%
print(domain.coordinator_prompt(task))

# %% [markdown]
# ## 2 The oracle reward, by hand
#
# Calls are read from the text (never executed), merged, and compared with the gold calls
# in any order. Six parts, from -1 to 2 (paper, appendix C.3), with $g$ gold calls and $p$
# calls in the merged list:
#
# - *base*: 0.1 if anything was called;
# - *correctness*, up to 1.5: agreement of function names $F$, similarity of the best
#   one-to-one matching $A$, and 1 if all is exact, $E$;
# - *coordination*, up to 0.4: the number of calls $C$ and their balance between agents;
# - *duplicates*, *inactive*, *excess*: penalties for calls issued twice, idle agents and
#   calls beyond the number wanted.
#
# With one function and one argument, strings are enough to write it down. Read the
# draft beside the list above.

# %%
def draft_reward(shares, gold):
    """shares: the calls of each agent, gold: the wanted calls; all as equal strings."""
    issued = Counter(call for share in shares for call in share)
    p, g, n = len(issued), len(gold), len(shares)
    right = len(set(issued) & set(gold))
    F, A, E = 2 * min(p, g) / (p + g), right / g, p == g == right
    ideal = sorted((g // n + (agent < g % n) for agent in range(n)), reverse=True)
    counts = sorted((len(set(share)) for share in shares), reverse=True)
    off = sum(abs(count - wanted) for count, wanted in zip(counts, ideal, strict=True))
    C, balance = max(0, 1 - abs(p - g) / g), max(0, 1 - off / g)
    idle = max(0, min(n, g) - sum(bool(share) for share in shares))
    return {"base": 0.1 * (p > 0),
            "correctness": 1.5 * (0.25 * F + 0.35 * A + 0.20 * E) / 0.80,
            "coordination": 0.4 * (0.10 * C + 0.15 * balance) / 0.25,
            "duplicates": -0.6 * min(1, (issued.total() - p) / g),
            "inactive": -0.3 * idle / n,
            "excess": -0.1 * min(1, max(0, p - g) / g)}

# %% [markdown]
# Seven joint answers to "the time in Paris and in Tokyo". Before you look: which of
# *both agents call everything* and *one agent calls everything* is better, and why?

# %%
CITY = {"type": "dict", "required": ["city"],
        "properties": {"city": {"type": "string"}}}
clock = Task("clock", "small", "eval", {
    "function": [{"name": "get_time", "description": "the time", "parameters": CITY}],
    "ground_truth": [{"get_time": {"city": [city]}} for city in ("Paris", "Tokyo")]})
P, T, R = (f'get_time(city="{city}")' for city in ("Paris", "Tokyo", "Rome"))
answers = {"divided": ([P], [T]), "one agent does it all": ([P, T], []),
           "both do it all": ([P, T], [P, T]), "the same half": ([P], [P]),
           "a wrong city": ([P], [R]), "one call too many": ([P, T], [R]),
           "nothing at all": ([], [])}
rows = {}
for name, shares in answers.items():
    parts = draft_reward(shares, [P, T])
    texts = ["\n".join(share) or "[]" for share in shares]
    assert bfcl_reward(texts, clock).parts.keys() == parts.keys()
    for part, value in bfcl_reward(texts, clock).parts.items():
        assert abs(value - parts[part]) < 1e-9, (name, part)
    rows[name] = parts | {"total": sum(parts.values())}
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# > **Common mistake.** Reading the reward as the share of requests answered. A team that
# > never answers a request fully can earn more than 1. How to check: look at `correct`,
# > the share of requests whose merged calls are exactly the gold calls.

# %% [markdown]
# ## 3 The untrained team: who calls what
#
# One sample for each of a few evaluation requests. A row is a gold call, a column an
# agent; a filled field is a call that this agent made. What you hope for is one filled
# field in every row. Which rows have two, which none?

# %%
def draw_callers(axes, responses, task):
    """One small picture: gold calls down, agents across; the number is how often."""
    made = np.array(callers(responses, task))
    colours = np.where(made.sum(1, keepdims=True) > 1, 2, 1) * (made > 0)
    axes.imshow(colours, vmin=0, vmax=2, aspect="auto", cmap=palette)
    for (row, agent), count in np.ndenumerate(made):
        if count:
            axes.text(agent, row, count, ha="center", va="center", color="white")
    axes.set(xticks=range(made.shape[1]), yticks=range(made.shape[0]))
    axes.set_xticks(np.arange(made.shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(made.shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)


def draw_all(shown):
    """The pictures of several requests side by side, with their rewards."""
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 2.2), squeeze=False,
                                constrained_layout=True)
    for axis, trajectory in zip(axes[0], shown, strict=True):
        draw_callers(axis, trajectory.responses[-1], requests[trajectory.task_id])
        axis.set_title(f"{trajectory.total_return:.2f}", fontsize=9)
    axes[0][0].set(ylabel="gold call", xlabel="agent")
    return figure


palette = plt.matplotlib.colors.ListedColormap(["#EEEEEE", "#0072B2", "#D55E00"])
look = {**OVERRIDES, "eval_tasks": LOOK_TASKS}
team = build_team(load_profile(PROFILE).config("bfcl", "untrained", PARADIGM, seed=SEED,
                                               **look))
requests = {task.id: task for task in team.eval_tasks}
before, played = evaluate(team.policy, team.eval_tasks, LOOK_SAMPLES,
                          Stream(SEED, "notebook 07"))
shown = played[::LOOK_SAMPLES][:8]  # the first sample of each request
for agent, text in enumerate(shown[0].responses[-1]):
    print(f"agent {agent}: {text}")

# %%
figure = draw_all(shown)
counts = pd.DataFrame(before.values()).mean()
finding = (f"Untrained team, one sample of {len(shown)} requests (titles: reward of 2; "
           "blue: called by one agent, orange: called more than once). Over "
           f"{len(played)} samples {counts.correct:.0%} are exact; per answer, "
           f"{counts.duplicates:.2f} calls are duplicates and {counts.inactive:.2f} "
           "agents are idle.")
show_figure(figure, "bfcl_untrained", f"Grids of who calls what. {finding}", OUTPUT_DIR)
display(Markdown(finding))
del team

# %% [markdown]
# ## 4 The smallest version of the problem
#
# Two calls, A and B; two agents; each issues one of them. The reward is 1 if they differ.
# The prompts are equal, so both agents start with nearly the same probabilities: agent 0
# calls A a little more often, agent 1 a little less.
#
# MADPO's implicit reward is a *sum* over agents (04_madpo), and no sum $f(a) + h(b)$ says
# "exactly one of us" (01_formulation). Here all pairs are enumerated, four kinds: AB over
# BB pulls agent 0 towards A, BA over AA pulls it away, and the other two pull on agent 1
# alone.

# %%
def expected_madpo(logits, behaviour, reference, beta=0.1):
    """MADPO's loss over all pairs that `behaviour` plays, weighted by their chance."""
    def of(table, calls):
        return torch.stack([table[0, calls[0]], table[1, calls[1]]]).view(1, 2, 1)

    policy, total = logits.log_softmax(-1), 0.0
    for winner, loser in product([(0, 1), (1, 0)], [(0, 0), (1, 1)]):
        chance = (of(behaviour, winner).prod() * of(behaviour, loser).prod()).detach()
        loss, _ = madpo_loss(of(policy, winner), of(policy, loser),
                             of(reference, winner), of(reference, loser), beta=beta)
        total = total + chance * loss
    return total


def expected_reward(logits):
    first, second = logits.softmax(-1)
    return first[0] * second[1] + first[1] * second[0]


start = torch.tensor([[0.05, 0.0], [-0.05, 0.0]], dtype=torch.float64)
logits = start.clone().requires_grad_()
loss = expected_madpo(logits, start.softmax(-1), start.log_softmax(-1), beta=0.1)
madpo_pull = -torch.autograd.grad(loss, logits)[0]
marl_pull = torch.autograd.grad(expected_reward(logits), logits)[0]
print("policy gradient of the reward\n", marl_pull.numpy().round(5))
print("MADPO's pull, times 2 / beta\n", (2 / 0.1 * madpo_pull).numpy().round(5))
assert torch.allclose(2 / 0.1 * madpo_pull, marl_pull)

# %% [markdown]
# At the start the two are equal: at the reference every pair pulls with $\beta/2$, and the
# sum over all pairs is then the policy gradient of the reward. Both hardly pull at all,
# since at equal probabilities neither knows which agent should take which call. What
# differs is what happens next. Three rules from the same start: gradient ascent on the
# reward (MAGRPO, and MARLHF if its reward model makes no error), MADPO on *fresh* pairs of
# the present team, and MADPO on the pairs of the first team only.

# %%
def train_calls(rule, steps=60, rate=2.0):
    """P(the agents' calls differ) after every step of plain gradient descent."""
    logits, reference = start.clone().requires_grad_(), start.log_softmax(-1)
    curve = [expected_reward(logits).item()]
    for _ in range(steps):
        if rule == "reward":
            loss = -expected_reward(logits)
        else:
            now = (logits.detach() if rule == "fresh pairs" else start).softmax(-1)
            loss = 2 / 0.1 * expected_madpo(logits, now, reference)
        (slope,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= rate * slope
        curve.append(expected_reward(logits).item())
    return curve


curves = {rule: train_calls(rule) for rule in ("reward", "fresh pairs", "first pairs")}
figure, axis = plt.subplots(figsize=(6, 3.2), constrained_layout=True)
styles = ({"color": "#009E73"}, {"color": "#D55E00", "linestyle": "--"},
          {"color": "#CC79A7", "linestyle": ":"})
for (rule, curve), style in zip(curves.items(), styles, strict=True):
    axis.plot(curve, label=rule, **style)
axis.set(xlabel="step", ylabel="P(the calls differ)", ylim=(0.45, 1.02))
axis.legend(title="trained on", frameon=False)
finding = "Exact, no sampling. After the last step: " + ", ".join(
    f"{rule} {curve[-1]:.2f}" for rule, curve in curves.items()) + "."
show_figure(figure, "bfcl_two_calls", f"Three curves. {finding}", OUTPUT_DIR)
display(Markdown(finding))
assert curves["fresh pairs"][-1] > 0.9 > curves["first pairs"][-1]

# %% [markdown]
# Pairs of the first team hold AB and BA as winners nearly equally often, for ever; their
# pulls on agent 0 cancel, and the loss has its minimum close to the start. Fresh pairs
# break the tie: as soon as AB is more frequent than BA, more pairs say so. That is why
# the buffer matters so much in this domain, and why chance decides which agent takes
# which share.
#
# > **Common mistake.** Concluding from a flat curve that the method does not work. Here
# > the slow start *is* the problem: a saddle. How to check: start this section's agents
# > unequal, from `[[1.0, 0.0], [-1.0, 0.0]]`, and the slow part is gone. (Other `roles` in
# > `domain_options` change the prompts, but the pocket base answers all prompts with the
# > same mixture: there the saddle remains.)

# %% [markdown]
# ## 5 Training
#
# The whole loop of Algorithm 1 or 2. It writes everything to the results folder, and goes
# on where it stopped if you interrupt it. The oracle scores the evaluation.

# %%
result = run_mapl(config, folder)
curve = pd.read_csv(folder / "metrics.csv")
evaluation = pd.read_csv(folder / "evaluation.csv")
names = ["reward", "correct", "cost", "duplicates", "inactive", "excess"]
means = evaluation[evaluation.metric.isin(names)].pivot_table(
    index="metric", columns="iteration", values="value").loc[names]
means.round(3)

# %% [markdown]
# ## 6 What changed
#
# Left: reward and exact answers. Right: calls issued twice and idle agents. One order to
# look for: first the agents do *more* (fewer are idle, duplicates rise), later they divide
# the work (duplicates fall again). Did this run get that far?

# %%
last = int(evaluation.iteration.max())
tasks = evaluation.task_id.nunique()
steps = curve[curve.metric == "reward"].set_index("iteration").env_steps[means.columns]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
for axis, shares in ((axes[0], {"reward": 2.0, "correct": 1.0}),
                     (axes[1], {"duplicates": 1.0, "inactive": 1.0})):
    styles = ({"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "s"})
    for (name, scale), style in zip(shares.items(), styles, strict=True):
        axis.plot(steps, means.loc[name] / scale, color=figures.COLOURS[METHOD],
                  label=name, **style)
    axis.set(xlabel="env steps (trained joint responses)")
    axis.legend(frameon=False)
axes[0].set(ylabel="share of the maximum", ylim=(-0.05, 1))
axes[1].set(ylabel="calls, or agents, per request", ylim=(0, None))
figure.suptitle(f"BFCL, {METHOD} {PARADIGM} - {PROFILE}, {tasks} tasks, seed {SEED}")
then, now = means[0], means[last]
peak = int(means.loc["duplicates"].idxmax())
order = "they rise, then fall" if 0 < peak < last else "no rise that then falls"
finding = (f"Reward (of 2) {then.reward:.2f} before and {now.reward:.2f} after {last} "
           f"iterations, exact {then.correct:.0%} and {now.correct:.0%}. Duplicates "
           f"{then.duplicates:.2f} before, at most {means.loc['duplicates', peak]:.2f} "
           f"(iteration {peak}), {now.duplicates:.2f} at the end: {order}. Means over "
           f"{tasks} tasks, one run.")
show_figure(figure, "bfcl", f"Two panels. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# Has the team broken the symmetry of its prompts? Take the gold calls in the order of the
# request, and count how often each agent makes those of the first and of the second half.
# Unequal bars: they have divided the request by halves. Equal bars can hide another
# division, such as odd and even places. So look at the *role gap*, too: the difference
# between the first and the last agent's frequency of a call, call by call, its mean over
# all calls of all requests. With a few samples it is above 0 by chance; the same answers
# with their agents shuffled say how far. (`metrics.csv` has both for every evaluation, as
# `team/role_gap` and `team/role_gap_by_chance`; the table of section 7 shows them.)

# %%
def share_by_half(played, requests):
    """(agents, 2) share of the gold calls of each half that an agent makes."""
    made = [[], []]
    for trajectory in played:
        rows = callers(trajectory.responses[-1], requests[trajectory.task_id])
        for place, row in enumerate(rows):
            made[2 * place >= len(rows)].append([count > 0 for count in row])
    return np.array([np.mean(half, axis=0) for half in made]).T


def role_gap(played, requests, shuffle=None):
    """Mean difference of the first and last agent's frequencies, call by call."""
    made = {}
    for trajectory in played:
        task = requests[trajectory.task_id]
        rows = np.array(callers(trajectory.responses[-1], task)) > 0
        if shuffle is not None:
            rows = rows[:, shuffle.permutation(rows.shape[1])]
        made.setdefault(trajectory.task_id, []).append(rows)
    means = [np.mean(of, axis=0) for of in made.values()]
    return np.concatenate([np.abs(of[:, 0] - of[:, -1]) for of in means]).mean()


halves = {"before": share_by_half(played, requests)}
team = build_team(load_profile(PROFILE).config("bfcl", METHOD, PARADIGM, seed=SEED,
                                               **look))
if METHOD != "untrained":
    team.policy.load(folder / "adapters")
after, played_after = evaluate(team.policy, team.eval_tasks, LOOK_SAMPLES,
                               Stream(SEED, "notebook 07"))
halves["after"] = share_by_half(played_after, requests)
answers = {name: [list(t.responses[-1]) for t in played_after if t.task_id == name]
           for name in requests}
found = team.domain.team_metrics([(requests[name], answers[name]) for name in answers])
assert math.isclose(found["role_gap"], role_gap(played_after, requests))
halves["before"].round(2), halves["after"].round(2)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, constrained_layout=True)
for axis, (when, shares) in zip(axes, halves.items(), strict=True):
    width = 0.8 / len(shares)
    for agent, share in enumerate(shares):
        colour = ("#0072B2", "#E69F00", "#009E73")[agent]
        axis.bar(np.arange(2) + agent * width, share, width, color=colour,
                 label=f"agent {agent}")
    axis.set(xticks=np.arange(2) + 0.4 - width / 2, title=when,
             xticklabels=["first half", "second half"])
axes[0].set(ylabel="gold calls made", ylim=(0, 1))
axes[0].legend(frameon=False)
chance = np.mean([role_gap(played_after, requests, np.random.default_rng(draw))
                  for draw in range(50)])
finding = (f"{METHOD} {PARADIGM}, {PROFILE}, {LOOK_TASKS} requests, {LOOK_SAMPLES} "
           f"samples each, seed {SEED}: role gap {role_gap(played, requests):.2f} "
           f"before, {role_gap(played_after, requests):.2f} after; {chance:.2f} by "
           "chance.")
show_figure(figure, "bfcl_roles", f"Bars of each agent's share. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# The same requests as in section 3, now:

# %%
shown = played_after[::LOOK_SAMPLES][:8]
figure = draw_all(shown)
finding = f"After {METHOD} {PARADIGM}: one sample of {len(shown)} requests."
show_figure(figure, "bfcl_trained", f"Grids of who calls what. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# Two requests before and after training, as the agents wrote them:

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in (str(0), str(last)):
    for example in examples[iteration][:2]:
        print(f"--- after {iteration} iterations, {example['task']}, "
              f"reward {example['reward']:.2f}")
        for agent, text in enumerate(example["responses"][-1]):
            print(f"agent {agent}: {text}")

# %% [markdown]
# ## 7 How it got there
#
# Ties, how often the winner of a kept pair was the agents', and the method's own figures.
# An empty table is right for the untrained team.

# %%
own = curve[curve.metric.str.match(r"(preferences|train|reward_model|team)/")]
own.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# ## Exercises
#
# 1. In section 4, start from exactly equal agents (`start` of zeros). What do the three
#    curves do, and what would a *sampled* run do?
# 2. Compute the reward of the best answer for a request with one gold call only. Why
#    does nobody pay for being idle there?
# 3. Run this notebook with `OVERRIDES = {"domain_options": {"roles": "odd_even"}}`. Do
#    duplicates fall sooner, and is the role gap wider?
#
# Solutions: notebooks/solutions/07_bfcl_solutions.ipynb
