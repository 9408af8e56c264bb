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
# # 03 MARLHF
#
# Multi-agent reinforcement learning from human feedback (MARLHF) works in two stages:
# learn from preferences what a team's answer is worth, then let the team practise against
# that.
#
# **After it you can** fit the joint reward model and measure its error, derive Eq. (5)
# and compute it by hand, swap in the actor-critic forms CoLLM-CC and CoLLM-DC, and read
# off a plot how often the reward model and the oracle agree about the team's own answers.
#
# **It needs** notebooks 01 and 02. The last three sections use a model: the pocket model
# on any laptop.
#
# The names, as in the paper: MAPL is multi-agent preference learning; MARL is multi-agent
# reinforcement learning; MAGRPO is multi-agent GRPO (group relative policy optimisation);
# CoLLM-CC and CoLLM-DC are collaborative-LLM actor-critics with a centralised critic and
# with decentralised critics. A paradigm is called (agents)-(comparator): in Dec-Dec both
# are decentralised, in Cen-Cen both centralised, in Dec-Cen only the comparator is.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/03_marlhf.ipynb)
#
# | machine | profile | minutes | memory | date |
# |---|---|---|---|---|
# | 2 CPU cores | pocket | not measured | not measured | - |
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
import itertools
import math
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress")  # our bars are plain text

import matplotlib.pyplot as plt
import torch
import transformers
from IPython.display import Markdown, display
from torch import tensor

import mapl_core
from mapl_core import figures
from mapl_core.annotators import oracle
from mapl_core.buffers import label_pairs, select_pairs
from mapl_core.intervals import bootstrap_interval
from mapl_core.losses import (actor_critic_loss, bradley_terry_loss,
                              group_relative_advantages, kl_estimate, magrpo_loss)
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.reward_model import RewardModel, fit_reward_model, split_held_out
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # scale of the training sections: pocket, small or paper
PARADIGM = "dec-dec"  # dec-dec, cen-cen or dec-cen
SEED = 0  # seed of every random draw
ALGORITHMS = ["magrpo", "collm_cc", "collm_dc"]  # MARL inside MARLHF, section 7
ITERATIONS = 4  # MAPL iterations of each run; None: as many as the profile says
TRAIN_TASKS = 64  # training posts; None: as many as the profile says
EVAL_TASKS = 16  # evaluation posts; None: as many as the profile says
TOY_REPEATS = 20  # random data sets for each point of section 2's plot
OVERRIDES = {}  # further values that replace the profile's, such as {"eval_samples": 4}
OUTPUT_DIR = ""  # folder for figures and runs; empty: a temporary one

# %%
check_parameters(
    globals(), PROFILE=str, PARADIGM=str, SEED=int, ALGORITHMS=list[str],
    ITERATIONS=int | None, TRAIN_TASKS=int | None, EVAL_TASKS=int | None,
    TOY_REPEATS=int, OVERRIDES=dict, OUTPUT_DIR=str)
profile = load_profile(PROFILE)
sizes = {"iterations": ITERATIONS, "train_tasks": TRAIN_TASKS, "eval_tasks": EVAL_TASKS}
sizes = {name: size for name, size in sizes.items() if size is not None}
chosen_here = {"experiment": "notebook-03", **sizes, **OVERRIDES}
configs = {  # an impossible value stops here, before any model is loaded
    algorithm: profile.config("tldr", "marlhf", PARADIGM, seed=SEED,
                              **{**chosen_here, "marl_algorithm": algorithm})
    for algorithm in ALGORITHMS}
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-03-"))
generator = Stream(SEED, "notebook 03").generator()  # for the hand-made tensors
torch.set_num_threads(profile.threads)

# %% [markdown]
# ## 1 A score for a whole team's answer
#
# The joint reward model $r_\phi$ reads a *joint* history, all agents' answers in one
# text, and gives one number. Bradley and Terry say how a number becomes a preference:
# $P(\tau^w\succ\tau^l)=\sigma(r^w-r^l)$; the loss is $-\log$ of it. Three pairs by hand:

# %%
winner_scores, loser_scores = [2.0, 0.5, -1.0], [1.0, 0.5, 1.0]
surprise = [math.log(1 + math.exp(-(winner - loser)))
            for winner, loser in zip(winner_scores, loser_scores)]
print([round(value, 4) for value in surprise], f"mean {sum(surprise) / 3:.4f}")

# %% [markdown]
# The third pair, ranked the wrong way, costs most. How hard does each pair pull?

# %%
scores = tensor(winner_scores).requires_grad_(), tensor(loser_scores).requires_grad_()
loss, metrics = bradley_terry_loss(*scores)
torch.testing.assert_close(loss, tensor(sum(surprise) / 3))
for name, gradient in zip(("winner", "loser "), torch.autograd.grad(loss, scores)):
    print(name, [round(value, 4) for value in gradient.tolist()])
print(f"accuracy {metrics['accuracy']:.3f}: a tie is not counted as right")

# %% [markdown]
# Winner and loser are pulled equally and opposite; the pull is $\sigma(-(r^w-r^l))/3$.
# So the *level* of the scores is free: add 100 to all and nothing changes. Scores of
# different tasks are therefore not comparable, unless the model makes them so.

# %%
shifted, _ = bradley_terry_loss(scores[0] + 100, scores[1] + 100)
print(f"loss {loss:.4f}, after adding 100 to every score {shifted:.4f}")

# %% [markdown]
# > **Common mistake.** One reward model per agent, added up. On "exactly one of us should
# > act" an additive score is as helpless as MADPO (notebook 01, section 5): with two
# > tables of two numbers the loss on the four pairs cannot get below $\log 2$. A joint
# > score has no trouble:

# %%
calls = tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # joint actions of agents 0 and 1
winners, losers = tensor([1, 1, 2, 2]), tensor([0, 3, 0, 3])


def fit(scores_of, parameters, pairs, steps=200):
    """Adam on the Bradley-Terry loss of a table of scores; the last loss."""
    parameters = parameters.clone().requires_grad_()
    optimiser = torch.optim.Adam([parameters], lr=0.05)
    for _ in range(steps):
        scores = scores_of(parameters)
        loss, _ = bradley_terry_loss(scores[pairs[0]], scores[pairs[1]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return parameters.detach(), loss.item()


agents = torch.arange(2)
_, additive = fit(lambda x: x[agents, calls].sum(dim=1),
                  tensor([[0.3, 0.1], [0.2, 0.5]]), (winners, losers))
_, joint = fit(lambda x: x, torch.zeros(4), (winners, losers))
print(f"additive {additive:.4f} (log 2 = {math.log(2):.4f}), joint {joint:.4f}")

# %% [markdown]
# ## 2 How wrong is it?
#
# A learned reward is an estimate. Take a game with $6\times6$ joint answers of random
# worth, draw pairs of answers, label them with the oracle, fit one score per answer. With
# few pairs many answers have never been compared. Two numbers matter: how often the model
# orders two answers correctly, over all 630 pairs of different answers (the fitted ones
# are among them, and equal scores count as wrong); and how good the answer is that it
# likes best.


# %%
def fitted_scores(worth, count):
    """Scores fitted to `count` labelled pairs of random answers."""
    first, second = torch.randint(36, (2, count), generator=generator)
    kept = worth[first] != worth[second]  # ties are dropped
    first, second = first[kept], second[kept]
    better = worth[first] > worth[second]
    pairs = torch.where(better, first, second), torch.where(better, second, first)
    return fit(lambda x: x, torch.zeros(36), pairs, steps=60)[0]


def order_accuracy(scores, worth):
    """Share of all pairs of answers that the scores order like the oracle."""
    first, second = torch.combinations(torch.arange(36)).T
    learned, true = (x[first] - x[second] for x in (scores, worth))
    same = learned.sign() == true.sign()
    return same.double().mean().item()


# %% [markdown]
# A policy that trusts the model ends at the model's favourite. Look at the right panel:
# what the oracle pays for that favourite, and what the best answer would have brought.

# %%
counts = [20, 40, 80, 160, 320]
accuracy, paid, possible = (defaultdict(list) for _ in range(3))
for count, _ in itertools.product(counts, range(TOY_REPEATS)):
    worth = torch.randn(36, generator=generator)  # mean 0, standard deviation 1
    scores = fitted_scores(worth, count)
    accuracy[count].append(order_accuracy(scores, worth))
    paid[count].append(worth[scores.argmax()].item())
    possible[count].append(worth.max().item())
print("pairs, accuracy on all pairs:",
      {count: round(sum(accuracy[count]) / TOY_REPEATS, 3) for count in counts})

# %% [markdown]
# How many pairs does the left panel need to look good, and how far is the favourite from
# the best answer there?

# %%
figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.5), layout="constrained")
curves = ((panels[0], accuracy, "accuracy on all pairs", "-"),
          (panels[1], paid, "the model's favourite", "-"),
          (panels[1], possible, "the best answer", "--"))
for axes, values, label, line in curves:
    bounds = [bootstrap_interval(values[count]) for count in counts]
    axes.plot(counts, [b.mean for b in bounds], line, marker="o",
              color=figures.COLOURS["marlhf"], label=label)
    axes.fill_between(counts, [b.low for b in bounds], [b.high for b in bounds],
                      color=figures.COLOURS["marlhf"], alpha=0.15, linewidth=0)
    axes.set(xscale="log", xlabel="labelled pairs", xticks=counts,
             xticklabels=counts)
    axes.minorticks_off()
    axes.legend(frameon=False)
panels[1].set_ylabel("worth to the oracle")
panels[1].set_ylim(bottom=0)
figure.suptitle(f"Toy game of 36 answers, {TOY_REPEATS} data sets a point")
ends = [f"{label} {sum(values[counts[0]]) / TOY_REPEATS:.2f} to "
        f"{sum(values[counts[-1]]) / TOY_REPEATS:.2f}"
        for _, values, label, _ in curves]
show_figure(figure, "03_reward_error",
            f"From {counts[0]} to {counts[-1]} pairs: {'; '.join(ends)}.", folder)
display(Markdown(f"*Means over {TOY_REPEATS} random games; bands are 95 % bootstrap "
                 f"intervals over games. From {counts[0]} to {counts[-1]} pairs: "
                 f"{'; '.join(ends)}.*"))

# %% [markdown]
# The favourite stays short of the best answer even where most pairs are in order: the
# highest of many scores is likely to belong to an answer that the model *over*rates. And
# pairs help only where they compare something: that is why MAPL collects new ones from
# the present team.
#
# > **Common mistake.** Evaluating with the reward model. The policy is trained to find
# > what the model overrates; only the oracle can tell. Here every evaluation uses the
# > oracle. (`metrics.csv` holds the learned reward beside it, as
# > `reward_model/evaluation_reward`; section 7 says what it cannot be used for.)

# %% [markdown]
# ## 3 Eq. (5): compare with your siblings
#
# The policy gradient of the expected reward of a joint answer $a$ to what was seen, $h$,
# is $\nabla J=\mathbb E[\,R\,\nabla\log\pi(a\mid h)\,]$, and subtracting a number $b$
# from $R$ that does not depend on $a$ leaves it as it is. Now the team: given their
# histories the agents answer independently, so
#
# $$\log\pi(a\mid h)=\sum_i\log\pi_i(a_i\mid h_i),\qquad
# \nabla_iJ=\mathbb E\big[(R-b)\,\nabla_i\log\pi_i(a_i\mid h_i)\big].$$
#
# $\nabla_i$, the gradient by agent $i$'s own weights, keeps one term of the sum: its own
# answer, weighted with what the *team* got. No agent needs another's weights or answers,
# only the number $R-b$, the advantage. (With several turns, sum over them.)
#
# For $b$ MAGRPO takes the mean of a group: $G$ joint answers of the same team to the same
# task, *siblings* below. Four siblings were worth 1, 2, 3 and 6.

# %%
returns = [1.0, 2.0, 3.0, 6.0]
mean = sum(returns) / 4
advantages = [r - mean for r in returns]
spread = math.sqrt(sum(a * a for a in advantages) / 4)  # population: divided by G
print("advantages", advantages, f"population std {spread:.4f}")
print("divided by it", [round(a / spread, 4) for a in advantages])
others = [r - (sum(returns) - r) / 3 for r in returns]
print("leave-one-out baseline", [round(a, 4) for a in others])

# %% [markdown]
# Comparing with the *others* only multiplies everything by $G/(G-1)=\frac43$: the same
# direction. And a group in which all are equal must teach nothing, even where the mean of
# equal floats is not quite their value:

# %%
group = tensor([returns])
torch.testing.assert_close(group_relative_advantages(group), tensor([advantages]))
torch.testing.assert_close(group_relative_advantages(group, normalize="mean_std"),
                           tensor([advantages]) / spread)
torch.testing.assert_close(tensor(others), 4 / 3 * tensor(advantages))
equal = torch.full((1, 7), 0.1)
print("naive, seven times 0.1:", (equal - equal.mean())[0, 0].item(),
      "; module:", group_relative_advantages(equal, normalize="mean_std")[0, 0].item())

# %% [markdown]
# > **Common mistake.** Mixing answers to different tasks in one group. An easy post then
# > looks like a good team. By hand: two tasks, one worth about 2, one about 0.

# %%
easy, hard = [2.0, 2.2], [0.0, 0.4]
mixed = group_relative_advantages(tensor([easy + hard]))
apart = group_relative_advantages(tensor([easy, hard]))
print("mixed:", [round(a, 2) for a in mixed.flatten().tolist()],
      "apart:", [round(a, 2) for a in apart.flatten().tolist()])

# %% [markdown]
# Mixed, both answers to the easy task are praised and the better answer to the hard one
# is punished. On a plot of advantages by task you would see whole tasks above zero.
#
# ### Is it the gradient?
# Subtracting the group's own mean uses the answer in its own baseline. Enumerate every
# group of two answers of a policy with three, and compare with the exact gradient:

# %%
logits = tensor([0.3, -0.2, 0.1]).requires_grad_()
worth = tensor([1.0, 0.0, 3.0])
log_policy = logits.log_softmax(dim=0)
(exact,) = torch.autograd.grad((log_policy.exp() * worth).sum(), logits,
                               retain_graph=True)
groups = tensor(list(itertools.product(range(3), repeat=2)))  # all nine
chance = log_policy[groups].sum(dim=1).exp().detach()
loss_terms = group_relative_advantages(worth[groups]) * log_policy[groups]
(expected,) = torch.autograd.grad((chance * loss_terms.mean(dim=1)).sum(), logits)
print("exact   ", [round(x, 5) for x in exact.tolist()])
print("expected", [round(x, 5) for x in expected.tolist()], "= (1 - 1/G) times it")
torch.testing.assert_close(expected, (1 - 1 / 2) * exact)

# %% [markdown]
# The direction is exact; the size is $(1-\frac1G)$ of it, a matter of learning rate.
#
# ### The loss of a team
# Every agent $i$ descends $-\frac1G\sum_gA_g\log\pi_i(a_i^g\mid h_i)$, the same $A_g$ for
# all, its own log-probabilities. One group of four joint answers, two agents; agent 1
# wrote the same text all four times.

# %%
agent_0, agent_1 = [-12.0, -11.0, -13.0, -10.0], [-8.0] * 4
by_hand = -sum(a * (x + y) for a, x, y in zip(advantages, agent_0, agent_1)) / 4
logprobs = torch.stack([tensor(agent_0), tensor(agent_1)], dim=1)  # (G, agents)
logprobs = logprobs[None, :, :, None].requires_grad_()  # (groups, G, agents, turns)
loss, metrics = magrpo_loss(logprobs, tensor([advantages]))
torch.testing.assert_close(loss, tensor(by_hand))
(gradient,) = torch.autograd.grad(loss, logprobs)
print(f"loss {loss:.4f}; pull on agent 0:", (-gradient[0, :, 0, 0]).tolist())
print("sum of the pulls on agent 1's one text:", gradient[0, :, 1, 0].sum().item())

# %% [markdown]
# Agent 1's four pulls add up to zero on one and the same text: who does not vary,
# learns nothing. That is credit assignment as far as it goes in Eq. (5): an agent is
# praised for its teammate's work, but on average only its own changes count.
#
# The *value* of this loss says nothing: it is not a distance to anything. In the ratio
# form (`clip_ratio`) it even starts at exactly 0, with a gradient that is not:

# %%
ratio_loss, metrics = magrpo_loss(logprobs, tensor([advantages]),
                                  sampled_logprobs=logprobs.detach(), clip_ratio=0.2)
(ratio_gradient,) = torch.autograd.grad(ratio_loss, logprobs)
print(f"loss {ratio_loss:.6f}, ratio {metrics['ratio_mean']:.1f}, "
      f"gradient norm {ratio_gradient.norm():.4f}")
torch.testing.assert_close(ratio_gradient, gradient)

# %% [markdown]
# ### Two honest warnings
# *Sampling.* Eq. (5) is unbiased for answers of the policy itself. At a temperature below
# 1, or with top-p, the sampler is another policy, sharper than the one that is trained.
# `train/sampler_gap` logs the effect of the temperature: the mean of $\log\pi$ at $T=1$
# minus $\log\pi$ at the sampling $T$, in nats a response, over the first batch of each
# pass. It is 0 at $T=1$ and below 0 where the sampler is sharper; what top-p cuts off it
# does not see. For one token with the three logits above:

# %%
warm, sharp = logits.detach().log_softmax(0), (logits.detach() / 0.5).log_softmax(0)
gap = (sharp.exp() * (warm - sharp)).sum()
print(f"temperature 0.5: policy minus sampler {gap:+.4f} nats on average")

# %% [markdown]
# *The leash.* With `kl_coef` > 0 a KL to the reference is added: at each token of an
# answer the exact KL of the two next-token distributions, summed up. Its gradient leaves
# something out, as usual: an early token also decides which prefixes come later, and so
# how large *their* KL is; for that it is not charged.
#
# Estimates from samples serve for measuring. The one called k3 is
# $\frac{\pi_{ref}}{\pi}-1-\log\frac{\pi_{ref}}{\pi}$ on a sample of $\pi$: never
# negative, and right on average. The direction counts: below, $p$ is the policy that
# draws, $q$ the reference. Which of the two KLs does k3 give?

# %%
p, q = tensor([0.6, 0.3, 0.1]), tensor([0.2, 0.3, 0.5])
estimates = kl_estimate(p.log(), q.log(), estimator="k3")
print(f"KL(p, q) = {(p * (p / q).log()).sum():.4f}; expectation of k3 under p "
      f"{(p * estimates).sum():.4f}; KL(q, p) = {(q * (q / p).log()).sum():.4f}")

# %% [markdown]
# ## 4 Critics instead of siblings
#
# CoLLM-CC and CoLLM-DC (paper, Table 2c) compare an answer with a learned *value*: what
# the team usually gets from here. One critic on the joint history (CC), or one for each
# agent on what that agent sees (DC). Four trajectories, one turn; both critics expect 3.

# %%
rewards = tensor([[1.0], [2.0], [3.0], [6.0]])  # (trajectories, turns)
values = torch.full((4, 2, 1), 3.0)  # (trajectories, agents, turns)
errors = [r - 3.0 for r in returns]  # reward minus value
centre = sum(errors) / 4
scale = math.sqrt(sum((e - centre) ** 2 for e in errors) / 4)
normalised = [(e - centre) / scale for e in errors]
policy_part = -sum(a * (x + y) for a, x, y in zip(normalised, agent_0, agent_1)) / 4
critic_part = sum(e * e for e in errors) / 4
print(f"policy {policy_part:.4f} + 0.6 * critic {critic_part:.4f}")

flat = logprobs.detach()[0]  # (trajectories, agents, turns)
loss, metrics = actor_critic_loss(flat, values, rewards, value_coef=0.6)
torch.testing.assert_close(loss, tensor(policy_part + 0.6 * critic_part))

# %% [markdown]
# With two turns the target of a value is this turn's reward plus the discount times the
# *next* turn's value, which is 0 after the last turn: one-step temporal differences.
# Rewards 0 then 1, values 0.2 and 0.7, discount 1:

# %%
targets = [0.0 + 0.7, 1.0 + 0.0]  # no value after the last turn
print("targets", targets, "errors",
      [round(target - value, 2) for target, value in zip(targets, (0.2, 0.7))])
_, metrics = actor_critic_loss(
    tensor([[[-5.0, -6.0]]]), tensor([[[0.2, 0.7]]]), tensor([[0.0, 1.0]]))
assert math.isclose(metrics["target"], sum(targets) / 2, rel_tol=1e-6)
assert math.isclose(metrics["value_loss"], (0.5**2 + 0.3**2) / 2, rel_tol=1e-6)

# %% [markdown]
# When is a critic worth it? The baseline changes only the *noise* of the gradient. One
# agent, two equally likely answers worth 0 and 1, on tasks that add a level $b$ of their
# own, and with luck of standard deviation 0.5. Groups of four against a critic that knows
# the level up to an error. Compute the spread of the estimated gradient of a logit:


# %%
def gradient_noise(critic_error, level=3.0, samples=20000):
    """Spread of the gradient estimate of four answers: siblings, then a critic."""
    actions = torch.randint(2, (samples, 4), generator=generator).double()
    levels = level * torch.randn(samples, 1, generator=generator).double()
    score = actions - 0.5  # derivative of log pi by the logit of answer 1
    luck = 0.5 * torch.randn(samples, 4, generator=generator).double()
    rewards = actions + levels + luck
    siblings = group_relative_advantages(rewards) * 4 / 3
    guess = levels + 0.5 + critic_error * torch.randn(samples, 1, generator=generator)
    return [(advantage * score).mean(dim=1).std().item()
            for advantage in (siblings, rewards - guess)]


for error in (0.0, 0.5, 2.0):
    siblings, critic = gradient_noise(error)
    print(f"critic off by {error:.1f}: noise with siblings {siblings:.3f}, "
          f"with the critic {critic:.3f}")

# %% [markdown]
# A perfect critic is less noisy than three siblings; a poor one is much noisier, and it
# is poor at the start and each time that the reward model has been refitted. Siblings
# cost samples, critics cost learning. (Our losses normalise the critics' advantages over
# the batch, which hides a common error but not one that differs by task.)
#
# ## 5 A reward model for a real team
#
# Two LoRA adapters on one base summarise posts; the reward model is a third adapter with
# a scalar head, fitted afresh. We play the training posts, label, keep the best pairs,
# and hold out a tenth of the *tasks*.

# %%
config = configs[ALGORITHMS[0]]
team = build_team(config)
m, k = config.samples_per_task, config.pairs_per_task
played = team.policy.sample(team.train_tasks, m, Stream(SEED, "notebook 03/collect"))
others = team.comparator.sample(team.train_tasks, m, Stream(SEED, "notebook 03/other"))
pairs, ties = [], 0
for mine, theirs in zip(played, others):
    labelled, tied = label_pairs(mine, theirs, oracle)
    pairs += select_pairs(labelled, k)
    ties += tied
fitted, held_out = split_held_out(pairs, Stream(SEED, "notebook 03/split").generator())
print(f"{len(pairs)} pairs, {ties} ties; {len(fitted)} to fit, "
      f"{len(held_out)} held out")

# %% [markdown]
# What does it read? Print one joint text: the post once, then each agent's role and
# answer in turn. If a text is too long, every agent is cut to its share, never only the
# last one.

# %%
tasks = {task.id: task for task in [*team.train_tasks, *team.eval_tasks]}
base = team.policy.members[0].base
model = RewardModel(team.domain, tasks, base, Stream(SEED, "notebook 03/reward model"),
                    max_text_tokens=config.reward_model_tokens,
                    micro_batch_tokens=config.micro_batch_tokens)
read = model.item(pairs[0].winner)
print(base.tokenizer.decode(read.prompt)[:300], "...\n",
      base.tokenizer.decode(read.response)[:400])

# %% [markdown]
# The fit. Compare the two accuracies, and see from how many pairs each one comes.

# %%
report = fit_reward_model(
    model, fitted, Stream(SEED, "notebook 03/order"), held_out=held_out,
    learning_rate=config.reward_model_learning_rate, weight_decay=config.weight_decay,
    max_grad_norm=config.max_grad_norm, epochs=config.reward_model_epochs,
    batch_size=config.reward_model_batch_size)
print(report)

# %% [markdown]
# The held-out accuracy is of posts that the model has not been fitted on, but of few
# pairs, and of selected ones: their winners are the best of their post, like those of the
# fitted pairs. More telling: *all* answers to fresh posts. Within each post, how often
# does the learned score order two of them like the oracle?

# %%
fresh = team.policy.sample(team.eval_tasks, m, Stream(SEED, "notebook 03/fresh"))
scores = [model.scores(group) for group in fresh]
right, compared = 0, 0
for group, learned in zip(fresh, scores):
    truth = tensor([trajectory.total_return for trajectory in group])
    first, second = torch.combinations(torch.arange(len(group))).T
    differs = truth[first] != truth[second]
    same = (truth[first] > truth[second]) == (learned[first] > learned[second])
    right += int(same[differs].sum())
    compared += int(differs.sum())
agreement = right / max(compared, 1)
print(f"{compared} pairs of answers to {len(fresh)} fresh posts: "
      f"agreement {agreement:.3f}")

# %% [markdown]
# One dot an answer, scores less their post's mean. Does the cloud rise to the right, and
# which poor answers does the model like?

# %%
figure, axes = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
for group, learned in zip(fresh, scores):
    truth = [trajectory.total_return for trajectory in group]
    axes.scatter(truth, learned - learned.mean(), s=14, alpha=0.6,
                 color=figures.COLOURS["marlhf"], linewidth=0)
axes.set(xlabel="oracle return", ylabel="learned score, less the post's mean")
axes.set_title(f"Reward model, {PROFILE}, {len(fresh)} posts, 1 seed", fontsize=10)
show_figure(figure, "03_learned_and_oracle",
            f"Scatter of learned score over oracle return; they order "
            f"{100 * agreement:.0f} % of {compared} pairs of answers alike.", folder)
display(Markdown(
    f"*Profile {PROFILE}, {len(fitted)} pairs fitted, {len(fresh)} fresh posts, one "
    f"seed, no band: each dot is one team answer. Learned score and oracle order "
    f"{100 * agreement:.0f} % of {compared} pairs of answers to one post alike.*"))
model.close()  # its adapter leaves the base; the next iteration starts afresh

# %% [markdown]
# > **Common mistake.** Reading the accuracy on the pairs that were fitted, or trusting
# > the held-out one to the second digit. Both are of pairs whose winner is among the best
# > answers there are; two ordinary answers, which the team has to tell apart while it
# > practises, are another question. To check, order fresh answers, as above.

# %% [markdown]
# ## 6 One group, looked at
#
# $G$ joint answers to each post, with the oracle's returns as rewards. A group without
# any difference teaches nothing: how many are there? Of the others, the widest: which of
# its answers would be made more likely? Here we only look. A training step would take the
# derivative of this loss by every log-probability and carry it into the agents' adapters.

# %%
groups = team.policy.sample(team.train_tasks, config.num_generations,
                            Stream(SEED, "notebook 03/groups"))
returns = tensor([[answer.total_return for answer in group] for group in groups])
advantages = group_relative_advantages(returns, normalize=config.normalize)
logprobs = torch.stack([team.policy.logprobs(group) for group in groups])
loss, metrics = magrpo_loss(logprobs, advantages)  # (groups, G, policies, turns)
print(f"{len(groups)} groups, {metrics['tied_groups']:.0%} of them without advantages")
widest = (returns.amax(dim=1) - returns.amin(dim=1)).argmax().item()
for trajectory, value, logprob in zip(
        groups[widest], advantages[widest], logprobs[widest]):
    print(f"return {trajectory.total_return:.2f}, advantage {value:+.2f}, "
          f"log-probabilities {[round(x, 1) for x in logprob.flatten().tolist()]}")
    for agent, text in enumerate(trajectory.responses[0]):
        print(f"    agent {agent}: {text[:110]}")

# %% [markdown]
# ## 7 The whole run, three ways
#
# `run_mapl` with MAGRPO, CoLLM-CC and CoLLM-DC as the RL inside MARLHF. Left, on the plot
# below: the oracle's score. Right: `train/oracle_agreement`, how often the reward model
# and the oracle order two answers of one group alike, over the groups that an iteration
# practises on. One half is a coin toss: the nearer the line comes to it, the less the
# practice has to do with what the oracle pays for.
#
# Why not plot the learned reward itself? `metrics.csv` has it, of the training groups
# (`train/reward`) and of the evaluation answers (`reward_model/evaluation_reward`). But
# every iteration fits a new model from scratch, and the level of a fit is free
# (section 1). Values of two iterations come from two scales: a rise from one to the next
# shows nothing. Agreement compares within one group and one model, so the level cancels.
#
# The pocket profile keeps the leash of section 3 on (`kl_coef` is above 0).

# %%
runs = {}
for algorithm, config in configs.items():
    runs[algorithm] = run_mapl(config, folder / algorithm, progress=False)
    accuracy = runs[algorithm].final("reward_model/held_out_accuracy")
    print(f"{algorithm:>9}: score {runs[algorithm].final('score'):.3f}, last reward "
          f"model's held-out accuracy {accuracy:.2f}")


# %% [markdown]
# Do the lines on the left differ by more than their bands? Does agreement hold on the
# right, while the team moves away from the answers it began with?


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
figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
ink, summary, judged = figures.COLOURS["marlhf"], [], []
panels[1].axhline(0.5, color="0.75", linewidth=0.8)
for (algorithm, run), line in zip(runs.items(), ("-", "--", ":")):
    steps, bounds = score_curve(run)
    panels[0].plot(steps, [b.mean for b in bounds], line, marker="o", color=ink,
                   label=algorithm)
    panels[0].fill_between(steps, [b.low for b in bounds], [b.high for b in bounds],
                           color=ink, alpha=0.1, linewidth=0)
    alike = [(row.env_steps, row.value) for row in run.metrics
             if row.metric == "train/oracle_agreement"]
    panels[1].plot(*zip(*alike), line, marker="o", color=ink)
    judged.append(f"{algorithm} {', '.join(f'{y:.2f}' for _, y in alike)}")
    summary.append(f"{algorithm} {bounds[0].mean:.3f} to {bounds[-1].mean:.3f}")
judged = "; ".join(judged)
panels[0].set(ylabel="TLDR score (oracle)", xlabel="joint responses trained on")
panels[0].legend(frameon=False)
panels[1].set(ylabel="agreement with the oracle", xlabel="joint responses trained on",
              xlim=panels[0].get_xlim(), ylim=(0, 1))
figure.suptitle(f"MARLHF {PARADIGM}, {PROFILE}, {config.eval_tasks} posts, 1 seed")
show_figure(figure, "03_algorithms",
            f"Left, score over training: {'; '.join(summary)}. Right, agreement of "
            f"learned reward and oracle by iteration: {judged}.", folder)

# %% [markdown]
# The same in numbers, with what the bands are:

# %%
display(Markdown(
    f"*Profile {PROFILE}, {config.train_tasks} training and {config.eval_tasks} "
    f"evaluation posts, one seed; bands are 95 % bootstrap intervals over posts and "
    f"say nothing about another run. Score from the untrained team to the last "
    f"iteration: {'; '.join(summary)}. Agreement, by iteration, over pairs of training "
    f"answers to one post whose oracle rewards differ (grey: a coin toss): {judged}.*"))

# %% [markdown]
# > **Common mistake.** Taking agreement for a proof of health. It counts ordinary pairs;
# > one kind of answer that the model overrates is enough to lead the team astray
# > (section 2). The left panel decides.

# %% [markdown]
# ## What to take along
#
# - The reward model scores joint histories; only differences within a task mean
#   anything, and its error is largest where nothing was compared.
# - Eq. (5) is the policy gradient with siblings as the baseline, up to $1-\frac1G$; an
#   agent's share of it needs only its own log-probabilities.
# - Same advantage for all agents; who does not vary, learns nothing.
# - Critics trade samples for a second thing that must be learnt.
# - Evaluate with the oracle only; learned rewards of two iterations have no common scale.
#
# ## Exercises
#
# 1. A group's returns are (0, 0, 0, 4). Compute the advantages with "mean" and with
#    "mean_std". What happens to both as the 4 becomes 0.001?
# 2. Show by enumeration that two agents that act independently get the exact gradient of
#    the *team's* expected reward from the shared advantage (groups of two, two answers
#    each).
# 3. Plot section 2 again with noisy labels: flip one in five. How many pairs make up for
#    it?
# 4. In `gradient_noise`, at which critic error are siblings and critic equally noisy?
# 5. Run section 7 with `ALGORITHMS = ["magrpo"]` and another seed. How far apart are two
#    seeds of one algorithm, against the algorithms on your plot? What may you conclude?
#
# Solutions: [solutions/03_marlhf_solutions.ipynb](solutions/03_marlhf_solutions.ipynb).
