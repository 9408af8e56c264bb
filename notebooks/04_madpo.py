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
# # 04 MADPO
#
# Multi-agent direct preference optimisation (MADPO): from "prefer this team's answer to
# that one's" straight to the agents' weights. One logistic on a sum, and how to read what
# it does.
#
# **After it you can** derive MADPO's loss, compute it by hand, say how its pull is
# shared among agents, read its margins and rewards, choose a reference, and train a
# team with it.
#
# **It needs** notebooks 01 (why the KL factorises, what a product cannot express) and 02
# (where pairs come from). The last two sections train a model: the pocket model on any
# laptop. A paradigm is called (agents)-(comparator): in Dec-Dec both are decentralised,
# in Cen-Cen both centralised, in Dec-Cen only the comparator is.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/04_madpo.ipynb)
#
# | machine | profile | minutes | memory | date |
# |---|---|---|---|---|
# | 2 CPU cores | pocket | 1.5 | 0.8 GiB | 2026-11-30 |
# | 2 CPU cores | small | not measured | not measured | - |

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
from collections import defaultdict
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress")  # our bars are plain text

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers
from IPython.display import Markdown, display
from torch import tensor

import mapl_core
from mapl_core import figures
from mapl_core.annotators import oracle
from mapl_core.buffers import label_pairs, select_pairs
from mapl_core.intervals import bootstrap_interval
from mapl_core.losses import madpo_loss
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl
from mapl_core.updates import TeamOptimizer, update_madpo

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # scale of the training sections: pocket, small or paper
PARADIGM = "dec-dec"  # dec-dec, cen-cen or dec-cen
SEED = 0  # seed of every random draw
BETA = 0.1  # strength of the pull to the reference, in units of reward
REFERENCES = ["base", "previous", "none"]  # reference policies to compare in section 8
ITERATIONS = 4  # MAPL iterations of each run; None: as many as the profile says
TRAIN_TASKS = 64  # training posts; None: as many as the profile says
EVAL_TASKS = 16  # evaluation posts; None: as many as the profile says
OVERRIDES = {}  # further values that replace the profile's, such as {"eval_samples": 4}
OUTPUT_DIR = ""  # folder for figures and runs; empty: a temporary one

# %%
check_parameters(
    globals(), PROFILE=str, PARADIGM=str, SEED=int, BETA=float, REFERENCES=list[str],
    ITERATIONS=int | None, TRAIN_TASKS=int | None, EVAL_TASKS=int | None,
    OVERRIDES=dict, OUTPUT_DIR=str)
profile = load_profile(PROFILE)
sizes = {"iterations": ITERATIONS, "train_tasks": TRAIN_TASKS, "eval_tasks": EVAL_TASKS}
sizes = {name: size for name, size in sizes.items() if size is not None}
chosen_here = {"experiment": "notebook-04", "beta": BETA, **sizes, **OVERRIDES}
configs = {  # an impossible value stops here, before any model is loaded
    reference: profile.config("tldr", "madpo", PARADIGM, seed=SEED,
                              **{**chosen_here, "reference": reference})
    for reference in REFERENCES}
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-04-"))
generator = Stream(SEED, "notebook 04").generator()  # for the hand-made tensors
torch.set_num_threads(profile.threads)

# %% [markdown]
# ## 1 From the objective to the loss
#
# The objective (paper, appendix A.3): a high return, but not far from a reference,
#
# $$\max_\pi\;\mathbb E_\pi[R(\mathbf h)]-\beta\,KL(p_\pi\,\|\,p_{ref}).$$
#
# Its best law over answers is known: $\pi(a)=\pi_{ref}(a)\,e^{R(a)/\beta}/Z$. Three
# possible answers, by hand:

# %%
reference = [0.5, 0.3, 0.2]
returns = [1.0, 0.0, 3.0]
beta = 1.0
weights = [p * math.exp(r / beta) for p, r in zip(reference, returns)]
best = [w / sum(weights) for w in weights]
print("best policy", [round(p, 3) for p in best])


def objective(policy):
    """Expected return minus beta times the KL to the reference."""
    return sum(p * (r - beta * math.log(p / q))
               for p, q, r in zip(policy, reference, returns))


for policy in (best, reference, [0.01, 0.01, 0.98]):
    print(f"objective of {[round(p, 2) for p in policy]}: {objective(policy):.4f}")

# %% [markdown]
# Turn it round: $R(a)=\beta\log\frac{\pi(a)}{\pi_{ref}(a)}+\beta\log Z$. A policy *is* a
# reward model, its **implicit reward** is $\beta\log\pi/\pi_{ref}$. The Bradley-Terry
# model needs only differences, and $\log Z$, which nobody can compute for a language
# model, falls out:

# %%
implicit = [beta * math.log(p / q) for p, q in zip(best, reference)]
log_z = beta * math.log(sum(weights))
print("implicit rewards       ", [round(r, 3) for r in implicit])
print("returns minus beta log Z", [round(r - log_z, 3) for r in returns])
print("difference of answers 2 and 0:", round(implicit[2] - implicit[0], 6),
      "wanted", returns[2] - returns[0])

# %% [markdown]
# So put the implicit reward where the reward model's score would stand. For a team the
# log-ratio of a joint history is a sum over agents and turns (notebook 01, section 4),
#
# $$\delta(\mathbf h)=\sum_t\sum_i\log\frac{\pi_i(a_{i,t}\mid h_{i,t})}
# {\pi_{ref,i}(a_{i,t}\mid h_{i,t})},\qquad
# \ell=-\log\sigma\big(\beta\,[\delta(\mathbf h^w)-\delta(\mathbf h^l)]\big).$$
#
# MADPO always uses this loss, but the derivation behind it has two conditions. *One turn,
# or no chance between turns*: $p_{ref}\,e^{R/\beta}/Z$ is a law over whole histories, and
# where the environment draws something in between, no policy can choose that law. So it
# is exact for $H=1$ or deterministic dynamics. *A return that is a sum over agents*, each
# term of that agent's own history alone: a product of local policies can reach that law
# only if $R$ is such a sum (up to a term that no action changes), even for $H=1$.
# Section 6 shows what happens otherwise; one policy for all (Cen) has no such trouble.
#
# ## 2 The loss, by hand
#
# Log-probabilities are tensors of (pairs, agents, turns). Agent $i$'s **edge** $d_i$ is
# its own log-ratio on the winner minus that on the loser; the loss is
# $-\log\sigma(\beta\sum_id_i)$. The module's `margin` is $\beta\sum_id_i$ for the team
# and $\beta d_i$ for one agent. Two pairs, two agents, one turn. In the first pair agent
# 0 moved towards its part of the winner, and agent 1 a little away from it.

# %%
policy_winner = tensor([[[-10.0], [-21.0]], [[-12.0], [-20.0]]])
reference_winner = tensor([[[-12.0], [-20.5]], [[-12.0], [-20.0]]])
policy_loser = tensor([[[-15.0], [-30.0]], [[-14.0], [-25.0]]])
reference_loser = tensor([[[-14.0], [-30.5]], [[-14.0], [-25.0]]])

toward_winner = [-10 - -12, -21 - -20.5]  # 2.0 and -0.5
toward_loser = [-15 - -14, -30 - -30.5]  # -1.0 and 0.5
edges = [up - down for up, down in zip(toward_winner, toward_loser)]
first = math.log(1 + math.exp(-0.1 * sum(edges)))
second = math.log(2)  # policy and reference agree: nothing learnt yet
print("edges", edges, "losses", round(first, 5), round(second, 5))

# %% [markdown]
# The module on the same numbers. Find $\beta d_0$ and $\beta d_1$ among its metrics; all
# are means over the two pairs, so they are halved.

# %%
sides = policy_winner, policy_loser, reference_winner, reference_loser
loss, metrics = madpo_loss(*sides, beta=0.1)
torch.testing.assert_close(loss, tensor((first + second) / 2))
for name, value in metrics.items():
    print(f"{name:>24} {value:+.3f}")

# %% [markdown]
# Edges (3, -1) in the first pair, the numbers of notebook 01: loss 0.59814. The whole
# function is one line of mathematics. Is the following draft the module's, on random
# numbers, for three agents and two turns?


# %%
def draft_loss(policy_winner, policy_loser, reference_winner, reference_loser, beta):
    """-log sigmoid(beta * sum over agents and turns), mean over pairs."""
    towards = (policy_winner - reference_winner) - (policy_loser - reference_loser)
    return -F.logsigmoid(beta * towards.sum(dim=(1, 2))).mean()


random_sides = torch.randn(4, 5, 3, 2, generator=generator) * 10
torch.testing.assert_close(draft_loss(*random_sides, beta=0.3),
                           madpo_loss(*random_sides, beta=0.3)[0])
one_agent = random_sides[:, :, :1, :1]
print(f"n = 1, H = 1 is ordinary DPO: {madpo_loss(*one_agent, beta=0.3)[0]:.5f}")

# %% [markdown]
# **At the first step policy and reference agree.** Then every edge is 0, and the loss is
# $\log 2$ whatever the data. This holds for the first batch of the first iteration of a
# run with a reference: if *that* is not 0.6931, something is wrong, such as dropout that
# is on, another prompt, or a reference that is not the base. (Do not look for it in
# `metrics.csv`: `train/loss` is the mean over all batches of an iteration.)

# %%
same = madpo_loss(policy_winner, policy_loser, policy_winner, policy_loser)[0]
print(f"{same:.6f}")
assert math.isclose(same.item(), math.log(2), rel_tol=1e-6)

# %% [markdown]
# ## 3 One pull for the whole team
#
# What does a pair do to each agent? The derivative of the loss by agent $i$'s edge is
#
# $$\frac{\partial\ell}{\partial d_i}=-\beta\,\sigma\Big(-\beta\sum_jd_j\Big),$$
#
# the *same number for everybody*. Its negative is the pull. Below, agent 1 knows nothing
# about the pair (edge 0), agent 0 more and more.

# %%
for known in (0.0, 10.0, 30.0, 60.0):
    edges = tensor([[[known], [0.0]]]).requires_grad_()
    zero = torch.zeros(1, 2, 1)
    loss, _ = madpo_loss(edges, zero, zero, zero, beta=0.1)
    pull = -torch.autograd.grad(loss, edges)[0].flatten()
    print(f"agent 0's edge {known:4.0f}: pull on agent 0 {pull[0]:.5f}, "
          f"on agent 1 {pull[1]:.5f}")
    assert math.isclose(pull[1], 0.1 / (1 + math.exp(0.1 * known)), rel_tol=1e-5)

# %% [markdown]
# As soon as agent 0 separates the pair, agent 1 is left alone. That is right: the
# *team's* answers are told apart. It also means that the agent that learns first can
# keep the other from learning.
#
# And if agent 1 wrote the same text in winner and loser, its two log-probabilities are
# one number, and the pull up cancels the pull down:

# %%
logprob = tensor(-20.0).requires_grad_()  # of agent 1's text, the same on both sides
winner = torch.stack([tensor(-10.0), logprob]).view(1, 2, 1)
loser = torch.stack([tensor(-15.0), logprob]).view(1, 2, 1)
loss, _ = madpo_loss(winner, loser, winner.detach(), loser.detach())
print("gradient by the log-probability of the shared text:",
      torch.autograd.grad(loss, logprob)[0].item())

# %% [markdown]
# > **Common mistake.** Updating agent 0 first, and agent 1 with the edges that result.
# > All pulls must come from the same edges, before anybody moves: else the outcome
# > depends on the order of the agents. (`update_madpo` takes them in one derivative.)

# %% [markdown]
# ## 4 Both rewards may fall
#
# The loss only sees a *difference*. A policy over three answers: the winner, the loser,
# and a third answer that no pair contains. All of them share weights, as texts do: the
# answer's logit is a product of features and weights. Train on one pair. What happens
# to the winner's probability?

# %%
features = tensor([[1.0, 0.0], [1.0, -1.0], [0.5, 3.0]])  # winner, loser, the third
reference_logprobs = torch.log_softmax(features @ tensor([0.0, 0.0]), dim=0)
weights = torch.zeros(2, requires_grad=True)
log = defaultdict(list)
for _ in range(60):
    logprobs = torch.log_softmax(features @ weights, dim=0)
    loss, metrics = madpo_loss(
        *(x.view(1, 1, 1) for x in (logprobs[0], logprobs[1],
                                    reference_logprobs[0], reference_logprobs[1])),
        beta=0.1)
    for name in ("chosen_reward", "rejected_reward", "margin", "accuracy"):
        log[name].append(metrics[name])
    log["third answer"].append(logprobs[2].exp().item())
    (gradient,) = torch.autograd.grad(loss, weights)
    weights = (weights - 1.0 * gradient).detach().requires_grad_()
print({name: round(curve[-1], 3) for name, curve in log.items()})

# %% [markdown]
# Look at the accuracy, and then at where the probability went.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
ink = figures.COLOURS["madpo"]
for name, line in (("chosen_reward", "-"), ("rejected_reward", "--"), ("margin", ":")):
    panels[0].plot(log[name], line, color=ink, linewidth=2, label=name)
panels[1].plot(log["third answer"], color="black", label="P(third answer)")
panels[1].plot(log["accuracy"], "--", color=ink, label="accuracy")
panels[0].set_ylabel("implicit reward")
panels[1].set_ylim(0, 1.05)
for axes in panels:
    axes.set_xlabel("steps")
    axes.legend(frameon=False)
figure.suptitle("One pair, three answers, exact, no sampling")
show_figure(
    figure, "04_both_fall",
    f"Left: chosen reward falls to {log['chosen_reward'][-1]:.2f}, rejected reward to "
    f"{log['rejected_reward'][-1]:.2f}, margin rises to {log['margin'][-1]:.2f}. "
    f"Right: the third answer's probability rises to {log['third answer'][-1]:.2f}.",
    folder)

# %% [markdown]
# The end of the run in numbers:

# %%
display(Markdown(
    f"*One exact run, no band. Accuracy is {log['accuracy'][-1]:.0f} after the first "
    f"step, and yet the winner's own reward ends at {log['chosen_reward'][-1]:.2f}; an "
    f"answer that nobody ever preferred has probability "
    f"{log['third answer'][-1]:.2f}.*"))

# %% [markdown]
# > **Common mistake.** Judging a run by its margin or accuracy. They rise while the
# > winners become *less* likely. Watch `chosen_reward`: if it keeps falling, look at
# > fresh samples, shorten the run or raise beta. New pairs in every iteration help, as
# > the third answer then becomes a loser.

# %% [markdown]
# ## 5 Which reference?
#
# `reference="base"` (the default) measures from the base model all the time;
# `"previous"` from the team at the start of the iteration, so that the pull back starts
# anew each time; `"none"` drops the reference (some public implementations do).
# What does the last one forget? Take a winner of 10 tokens and a loser of 30, each token
# with probability one half under policy and reference:

# %%
half = math.log(0.5)
winner, loser = tensor([[[10 * half]]]), tensor([[[30 * half]]])
with_reference, _ = madpo_loss(winner, loser, winner, loser, beta=0.1)
without, metrics = madpo_loss(winner, loser, beta=0.1)
print(f"with reference {with_reference:.4f}; without {without:.4f}, "
      f"a margin of {metrics['margin']:.3f} = 0.1 * 20 * log 2, before any learning")
assert math.isclose(metrics["margin"], 0.1 * 20 * math.log(2), rel_tol=1e-5)

# %% [markdown]
# Without a reference a short winner looks learnt already, so its pair pulls less; if the
# *loser* is the short one the pair pulls harder. In this example two answers of equal
# length have the same probability under the reference, so there nothing would change. A
# real reference tells them apart: what is no longer subtracted from the margin is
# $\beta\,[\log\pi_{ref}(w)-\log\pi_{ref}(l)]$, a number of its own for every pair of
# winner $w$ and loser $l$.
#
# `length_normalize` divides each response by its length. On the same pair, after the
# policy has moved each token of the winner by +0.1 and of the loser by -0.1:

# %%
reference_sides = winner, loser
moved = winner + 10 * 0.1, loser - 30 * 0.1
lengths = {"winner_lengths": tensor([[[10]]]), "loser_lengths": tensor([[[30]]])}
for name, extra in (("sum", {}), ("mean per token", lengths)):
    _, metrics = madpo_loss(*moved, *reference_sides, beta=0.1, **extra)
    pull = 0.1 / (1 + math.exp(metrics["margin"]))  # by hand, on a response's number
    tokens = (1, 1) if not extra else (10, 30)  # a mean passes 1/L on to each token
    print(f"{name:>15}: margin {metrics['margin']:.3f}; pull on a winner's token "
          f"{pull / tokens[0]:.5f}, on a loser's {pull / tokens[1]:.5f}")

# %% [markdown]
# In the sum (the paper's form) every token is pulled alike, so a long answer moves the
# margin more: its KL *is* larger. In the mean every *answer* is pulled alike and the
# long loser's tokens get a third of the winner's pull. Beta then has another scale, too:
# a margin that was 0.4 is 0.02. Never compare betas across the two forms.

# %% [markdown]
# ## 6 What it cannot say
#
# Two agents, "exactly one of us should call", four balanced pairs: notebook 01 shows why
# the loss cannot fall below $\log 2$. Here is the whole argument with this notebook's
# tensors: take each pair's sum of edges, and add up the four. (The reference is left out:
# one that calls half of the time would cancel.)

# %%
calls = tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # joint actions of agents 0 and 1
winners, losers = tensor([1, 1, 2, 2]), tensor([0, 3, 0, 3])
logits = torch.randn(2, generator=generator) * 3  # any team
logprobs = F.logsigmoid(logits * (2 * calls - 1))[..., None]  # (joint actions, 2, 1)
sums = (logprobs[winners] - logprobs[losers]).sum(dim=(1, 2))  # of both agents' edges
print("pairs", [round(d, 3) for d in sums.tolist()], f"together {sums.sum():.0e}; loss "
      f"{madpo_loss(logprobs[winners], logprobs[losers])[0]:.4f} >= {math.log(2):.4f}")

# %% [markdown]
# ## 7 One real pair
#
# Now a team of language models: two LoRA adapters on one base, which summarise a post,
# one briefly, one in detail. `build_team` loads what the profile says. We play one
# training post and let the oracle compare.

# %%
config = configs[REFERENCES[0]]
team = build_team(config)
task = team.train_tasks[0]
m, k = config.samples_per_task, config.pairs_per_task
stream = Stream(SEED, "notebook 04/collect")
(agents,) = team.policy.sample([task], m, stream)
(others,) = team.comparator.sample([task], m, Stream(SEED, "notebook 04/comparator"))
pairs, ties = label_pairs(agents, others, oracle)
chosen = select_pairs(pairs, k)
print(f"{m} comparisons, {ties} ties, {len(chosen)} pairs kept\n")
print(f"PROMPT OF AGENT 0\n{team.domain.prompts(task)[0][:400]}\n")
for name, side in (("WINNER", chosen[0].winner), ("LOSER", chosen[0].loser)):
    print(f"{name}, return {side.total_return:.2f}")
    for agent, text in enumerate(side.responses[0]):
        print(f"  agent {agent}: {text[:200]}")

# %% [markdown]
# Its log-probabilities, and the loss. What must the loss be? And which sign must the
# derivative have for winners and for losers?

# %%
sides = [[pair.winner for pair in chosen], [pair.loser for pair in chosen]]
both = [*sides[0], *sides[1]]
logprobs = team.policy.logprobs(both).requires_grad_()
reference_sides = team.policy.reference_logprobs(both).chunk(2)
print("shape (trajectories, policies, turns):", tuple(logprobs.shape))
loss, metrics = madpo_loss(*logprobs.chunk(2), *reference_sides, beta=BETA)
(derivative,) = torch.autograd.grad(loss, logprobs)
print(f"loss {loss:.4f}, margin {metrics['margin']:+.5f}")
print("derivative, first winner and first loser:",
      derivative[0].flatten().tolist(), derivative[len(chosen)].flatten().tolist())

# %% [markdown]
# The derivative by the log-probabilities is all that training needs. Where a batch does
# not fit into one pass, `JointPolicy.backward` carries it into each agent's adapter, one
# micro-batch at a time: the same gradient, and memory does not grow with the number of
# pairs. A few steps on these pairs alone:

# %%
optimizer = TeamOptimizer(team.policy, config)
for step in range(4):
    metrics = update_madpo(team.policy, optimizer, chosen,
                           Stream(SEED, "notebook 04/update", iteration=step), config)
    names = [name for name in ("loss", "margin", "agent0/margin", "agent1/margin",
                               "chosen_reward", "rejected_reward") if name in metrics]
    print(f"step {step}:", ", ".join(f"{name} {metrics[name]:+.4f}" for name in names))

# %% [markdown]
# The first line is the loss *before* its step, so it starts at 0.6931. (With
# `PARADIGM = "cen-cen"` there is one policy, the coordinator, and one margin.)
#
# ## 8 The whole run
#
# `run_mapl` repeats it: collect, label, select, buffer, update, evaluate. One run per
# reference; the numbers come back as CSV files.

# %%
runs = {}
for reference, config in configs.items():
    runs[reference] = run_mapl(config, folder / f"reference_{reference}",
                               progress=False)
    print(f"reference {reference:>8}: score {runs[reference].final('score'):.3f}")

# %% [markdown]
# Do the lines differ by more than their bands? And in the table below the plot: is there
# a run whose chosen reward is negative while its margin is positive (section 4)?


# %%
def score_curve(run):
    """Joint responses trained on, and the score's interval over evaluation posts."""
    scores = defaultdict(list)  # iteration -> score of each post
    for row in run.evaluation:
        if row.metric == "score":
            scores[row.iteration].append(row.value)
    steps = [row.env_steps for row in run.metrics if row.metric == "score"]
    return steps, [bootstrap_interval(scores[i]) for i in sorted(scores)]


# %%
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
summary = []
for (reference, run), line in zip(runs.items(), ("-", "--", ":")):
    steps, bounds = score_curve(run)
    axes.plot(steps, [b.mean for b in bounds], line, marker="o",
              color=ink, label=f"reference = {reference}")
    axes.fill_between(steps, [b.low for b in bounds], [b.high for b in bounds],
                      color=ink, alpha=0.1, linewidth=0)
    summary.append(f"{reference} {bounds[0].mean:.3f} to {bounds[-1].mean:.3f}")
axes.set(xlabel="joint responses trained on", ylabel="TLDR score (oracle)")
axes.set_title(f"MADPO {PARADIGM}, {PROFILE}, {config.eval_tasks} posts, 1 seed",
               fontsize=10)
axes.legend(frameon=False)
show_figure(figure, "04_references", f"Score over training: {'; '.join(summary)}.",
            folder)

# %%
display(Markdown(
    f"*Profile {PROFILE}, {config.train_tasks} training and {config.eval_tasks} "
    f"evaluation posts, one seed; bands are 95 % bootstrap intervals over posts and "
    f"say nothing about another run. Score from the untrained team to the last "
    f"iteration: {'; '.join(summary)}.*"))
print(f"{'':>10} {'chosen':>8} {'rejected':>8} {'margin':>8} {'accuracy':>8}")
for reference, run in runs.items():
    last = [run.final(f"train/{name}") for name in
            ("chosen_reward", "rejected_reward", "margin", "accuracy")]
    print(f"{reference:>10}", *(f"{value:8.3f}" for value in last))

# %% [markdown]
# Without a reference the "rewards" are plain log-probabilities times beta: large
# negative numbers, not comparable with the other rows. The report therefore names the
# form (`reference_free` is 1).
#
# ## What to take along
#
# - The loss is one logistic on a sum over agents and turns; it starts at $\log 2$.
# - All agents feel the same pull, which fades when the *team* separates the pair.
# - The derivation asks for one turn (or no chance in between) and, for local policies, a
#   return that is a sum over agents, each term of the agent's own history.
# - Margin and accuracy can rise while winners get less likely.
# - The reference decides what is charged; lengths decide how much a pair weighs.
#
# ## Exercises
#
# 1. By hand: edges (5, 5) and (20, -10) with beta 0.1. Which pair pulls agent 1 harder?
# 2. Set `label_smoothing=0.1` in section 3's loop. At which team margin does the pull
#    vanish, and what does it do beyond?
# 3. Give the third answer of section 4 the features (0.5, -3.0). What changes, and why?
# 4. Run section 8 with `BETA = 1.0`. Which curves become flatter? What is the price?
# 5. Write one step of MADPO with an ordinary joint loss (`loss.backward()` through both
#    agents) for the policy of section 6, and show that carrying the derivative agent by
#    agent gives the same gradient.
#
# Solutions: [solutions/04_madpo_solutions.ipynb](solutions/04_madpo_solutions.ipynb).
