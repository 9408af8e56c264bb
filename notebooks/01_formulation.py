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
# # 01 Formulation
#
# Two agents, one request, exactly one of them should make the call: small enough to
# solve by hand, and enough to meet every difficulty of preference learning in a team.
#
# **After it you can** write a task as a Pb-Dec-POMDP or a Pb-MPOMDP (paper, section 3);
# say why the KL of joint histories factorises over agents and turns; say what a product
# of local policies can *play* but MADPO's implicit reward cannot *express*; and predict
# where Dec-Dec, Cen-Cen and Dec-Cen end up.
#
# **It needs** logarithms, expectations and a little PyTorch. No language model.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/01_formulation.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 0.2 | 0.4 GiB | 2026-11-30 |

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

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display
from torch import tensor

import mapl_core
from mapl_core import figures
from mapl_core.losses import (
    bradley_terry_loss,
    group_relative_advantages,
    madpo_loss,
    magrpo_loss,
)
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.seeding import Stream

dtype = torch.float64  # hand-sized numbers, compared to the last digits
torch.set_default_dtype(dtype)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, matplotlib {matplotlib.__version__}; "
      f"device cpu, {dtype}")

# %% tags=["parameters"]
SEED = 0  # seed of every random draw below
P_BOTH_UP = 0.5  # probability that both servers are up (the rest is split evenly)
BETA = 0.1  # MADPO's beta: strength of the pull to the reference, in units of reward
ITERATIONS = 20  # MAPL iterations of the exact runs in section 7
STEPS_PER_ITERATION = 20  # optimiser steps in each MAPL iteration
LEARNING_RATE = 5.0e-2  # Adam's step size, in units of logits
SYMMETRY_BREAK = 0.1  # how far apart the two agents start, in units of logits
RANDOM_POLICIES = 2000  # how many random teams section 5 tries
OUTPUT_DIR = ""  # folder for the figures; empty: they are shown, not saved

# %%
check_parameters(
    globals(), SEED=int, P_BOTH_UP=float, BETA=float, ITERATIONS=int,
    STEPS_PER_ITERATION=int, LEARNING_RATE=float, SYMMETRY_BREAK=float,
    RANDOM_POLICIES=int, OUTPUT_DIR=str)
if not 0 < P_BOTH_UP < 1:
    raise ValueError(f"P_BOTH_UP is a probability inside (0, 1), got {P_BOTH_UP}")
if min(BETA, ITERATIONS, STEPS_PER_ITERATION, LEARNING_RATE, RANDOM_POLICIES) <= 0:
    raise ValueError("BETA, LEARNING_RATE and the numbers of steps must be above 0")
generator = Stream(SEED, "notebook 01").generator()  # all randomness comes from here

# %% [markdown]
# ## 1 A task in the paper's words
#
# A user wants one thing done by calling a tool. Two agents serve the request, each with
# its own server. A call to a server that is down fails; two calls do the thing twice.
# So: **exactly one agent should call, and its server must be up.** Each agent sees only
# its own server, and they cannot talk.
#
# | symbol | in the paper (section 3.1) | here |
# |---|---|---|
# | $\mathcal I$ | the agents | agent 0 and agent 1 |
# | $\mathcal S$, $b_0$ | states $s=(s^{sys},s^{usr})$, law of the first | which servers are up; users stay the same |
# | $\mathcal O_i$, $O$ | local observations, language prompts; how they arise | "your server is up" or "... down" |
# | $\mathcal A_i$ | responses | wait or call; for a language model, every text |
# | $T$, $H$ | transition and horizon | the episode ends after one turn, $H=1$ (two in section 4) |
# | $h_i$ | local history: what agent $i$ saw and did so far | its observation, then also its action |
# | $\mathbf h$ | joint history: the local histories of all agents | both observations, then also both actions |
# | $\tau$ | trajectory: an episode played to its end, with its joint history | what was up, what was seen, who called |
# | $R^\ast$ | oracle reward, known to the annotator only | 1 if exactly one agent calls and its server is up, else 0 |
# | $R(\tau)$ | return: the sum of the rewards of all turns | the one reward |
# | $P_{R^\ast}$ | the annotator's preference between two trajectories | the higher return wins |
# | $\pi$, $\varpi$ | the team that learns; the comparator, against whom it is judged | section 7 |
#
# A *law* is a probability distribution.
#
# A team that acts on local histories, $a_i\sim\pi_i(\cdot\mid h_i)$, makes this a
# **Pb-Dec-POMDP**, a preference-based decentralised partially observable Markov decision
# process. If a coordinator sees everything and writes all the actions,
# $\mathbf a\sim\pi_{cen}(\cdot\mid\mathbf h)$, the same tuple is a **Pb-MPOMDP**, a
# preference-based multi-agent POMDP.
#
# Five more names. *Dec* is short for decentralised and *Cen* for centralised; a training
# paradigm is called (agents)-(comparator): **Dec-Dec**, **Cen-Cen** and **Dec-Cen**.
# Under each a team can learn by **MADPO**, multi-agent direct preference optimisation:
# straight from the pairs; or by **MARLHF**, multi-agent reinforcement learning from human
# feedback: a reward model is fitted to the pairs, and the team practises against it.
#
# Look at the table of rewards: which joint action is right in *every* state?

# %%
state_names = ["both up", "only 0 up", "only 1 up"]
server_up = [(1, 1), (1, 0), (0, 1)]  # what agents 0 and 1 see; 1 is "up"
initial = tensor([P_BOTH_UP, (1 - P_BOTH_UP) / 2, (1 - P_BOTH_UP) / 2])
joint_actions = list(itertools.product((0, 1), repeat=2))  # 1 is "call"
action_names = ["wait/wait", "wait/call", "call/wait", "call/call"]  # agent 0/agent 1


def oracle_reward(up, calls):
    """R*: 1 when exactly one agent calls and its server is up."""
    return float(sum(calls) == 1 and up[calls.index(1)] == 1)


rewards = tensor([[oracle_reward(up, a) for a in joint_actions] for up in server_up])
print(f"{'agent 0/agent 1':>15}", *(f"{name:>10}" for name in action_names))
for name, row in zip(state_names, rewards):
    print(f"{name:>15}", *(f"{reward:10.0f}" for reward in row))

# %% [markdown]
# None. And where both servers are up there are two right answers, equally good: that
# row is the whole trouble of this notebook.

# %% [markdown]
# ## 2 Who may know what
#
# A deterministic local policy maps the agent's own observation to an action, so each
# agent has four: never call, call if up, call if down, always call. Sixteen teams.
# (Randomising helps no team: the value is linear in each agent's policy, so a corner is
# as good as any mixture. Hence trying the corners *solves* the game.)
#
# A coordinator maps the state to a joint action: $4^3=64$ policies. What is the best
# value of each kind?

# %%
rules = {"never": (0, 0), "if up": (0, 1), "if down": (1, 0), "always": (1, 1)}


def value_of_rules(rule_0, rule_1):
    """Expected oracle reward of two rules; a rule holds the actions for down and up."""
    calls = [(rule_0[up[0]], rule_1[up[1]]) for up in server_up]
    terms = zip(initial.tolist(), server_up, calls)
    return sum(chance * oracle_reward(up, a) for chance, up, a in terms)


decentralised = tensor(
    [[value_of_rules(a, b) for b in rules.values()] for a in rules.values()])
best_dec = decentralised.max().item()
centralised = [sum(initial[s] * rewards[s, a] for s, a in enumerate(policy)).item()
               for policy in itertools.product(range(4), repeat=3)]
best_cen = max(centralised)
print(f"best decentralised {best_dec:.3f}, best centralised {best_cen:.3f}")

# %% [markdown]
# Below, each square is one team. Look at the diagonal (both agents follow the same
# rule) and at the squares beside it.

# %%
figure, axes = plt.subplots(figsize=(4.6, 3.9))
axes.imshow(decentralised, cmap="cividis", vmin=0, vmax=1)
axes.set_xticks(range(4), rules)
axes.set_yticks(range(4), rules)
axes.set_xlabel("agent 1 calls ...")
axes.set_ylabel("agent 0 calls ...")
axes.set_title(f"All 16 decentralised teams, P(both up) = {P_BOTH_UP:g}, exact")
for row, column in itertools.product(range(4), repeat=2):
    value = decentralised[row, column].item()
    axes.text(column, row, f"{value:.2f}", ha="center", va="center",
              color="white" if value < 0.5 else "black")
rows = [f"agent 0 {rule}: {', '.join(f'{v:.2f}' for v in values)}"
        for rule, values in zip(rules, decentralised.tolist())]
show_figure(
    figure, "01_decentralised_values",
    f"Table of team values. Columns, agent 1: {', '.join(rules)}. {'; '.join(rows)}.",
    OUTPUT_DIR)

# %% [markdown]
# The same in words: which teams are best, and is one of them made of two equal rules?

# %%
best = [f"({list(rules)[i]}, {list(rules)[j]})"
        for i, j in (decentralised > best_dec - 1e-12).nonzero().tolist()]
same = decentralised.diagonal().max().item()
display(Markdown(
    f"*Exact values, no sampling. Best teams: {' and '.join(best)}, value "
    f"{best_dec:.3f}. Best team of two equal rules: {same:.3f}. A coordinator reaches "
    f"{best_cen:.3f}, so the **information gap** is {best_cen - best_dec:.3f}.*"))

# %% [markdown]
# With both servers up more than a third of the time, the best teams are lopsided: one
# agent leads, the other never acts. Nothing in the task says who leads. The agents
# must **break the symmetry**, and training has to find a way to do so.
#
# > **Common mistake.** Blaming the learner for the information gap. No decentralised
# > team can pass that value: when you read a Cen-Cen against a Dec-Dec curve, compare
# > each with the best of its own kind.

# %% [markdown]
# ## 3 From returns to preferences
#
# The agents never see $R^\ast$. They see which of two trajectories of *one* task won. In
# this game a task is one draw of the servers: both trajectories start in the same state.
# The Bradley-Terry model turns scores into such a verdict:
# $P(\tau^w\succ\tau^l)=\sigma(r^w-r^l)$.
#
# A reward model gives the winner 1.2 and the loser 0.2, and on a second pair it is
# undecided, 0.5 against 0.5. How surprised is it, on average? By hand:

# %%
surprise = [-math.log(1 / (1 + math.exp(-(1.2 - 0.2)))), -math.log(1 / 2)]
print([round(value, 4) for value in surprise], "mean", round(sum(surprise) / 2, 4))

# %% [markdown]
# A coin toss costs $\log 2 = 0.6931$: remember that number. `bradley_terry_loss` is
# this mean:

# %%
loss, metrics = bradley_terry_loss(tensor([1.2, 0.5]), tensor([0.2, 0.5]))
torch.testing.assert_close(loss, tensor(sum(surprise) / 2))
loss.item()

# %% [markdown]
# The annotator of the paper is the deterministic oracle, and **ties are dropped**.
# Two trajectories of our game give a pair only if their returns differ. In the state
# "both up" that leaves two possible winners and two possible losers: four pairs.
# They come back in section 5.

# %%
both_up = 0  # the row of that state
four_pairs = [(a, b) for a in range(4) for b in range(4)
              if rewards[both_up, a] > rewards[both_up, b]]
for winner, loser in four_pairs:
    print(f"{action_names[winner]}  beats  {action_names[loser]}")

# %% [markdown]
# > **Common mistake.** Comparing trajectories of *different* tasks. "Both up" is the
# > easier state; a pair across states would teach which states are easy, which no
# > agent can change.

# %% [markdown]
# ## 4 Why the KL of joint histories factorises
#
# MADPO starts from: maximise the return, minus $\beta$ times the KL between the
# team's law (its probability distribution) over *whole joint histories* and that of a
# reference team. That sounds intractable. Two agents flip coins; agent 0 calls with
# probability 0.9, agent 1 with 0.2; the reference team calls with 0.5 each. KL over the
# four joint actions:

# %%
call, reference = (0.9, 0.2), (0.5, 0.5)


def chance(probabilities, joint):
    """Probability of a joint action when the agents act independently."""
    return math.prod(p if a else 1 - p for p, a in zip(probabilities, joint))


def kl(law, other):
    """KL(law || other) of two lists of probabilities, in nats."""
    return sum(p * math.log(p / q) for p, q in zip(law, other) if p > 0)


joint_kl = kl([chance(call, a) for a in joint_actions],
              [chance(reference, a) for a in joint_actions])
agent_kl = [kl([p, 1 - p], [q, 1 - q]) for p, q in zip(call, reference)]
print(f"joint {joint_kl:.6f} = {agent_kl[0]:.6f} + {agent_kl[1]:.6f}")
assert math.isclose(joint_kl, sum(agent_kl))

# %% [markdown]
# The log of a product is a sum, and nothing else happened. There the actions were the
# whole history. Now two turns, with everything in between: after the first turn the state
# may be redrawn, and each agent hears through a noisy line whether the request was
# served. A joint history is $(\mathbf o_0,\mathbf a_0,\mathbf o_1,\mathbf a_1)$, and
#
# $$p_\pi(\mathbf h)=b_0\cdot\prod_i\pi_i(a_{i,0}\mid h_{i,0})\cdot
# T\,O\cdot\prod_i\pi_i(a_{i,1}\mid h_{i,1}).$$
#
# The environment's part, $b_0$, $T$ and $O$, is the same for team and reference. What is
# left of the log-ratio? First list every joint history, and split it into what each
# agent gets to see.

# %%
stay, hear = 0.9, 0.8  # P(state is kept), P(an agent hears the outcome correctly)
histories = []  # (chance of b0, T and O; agent 0's part; agent 1's part)
for s0, a0, s1 in itertools.product(range(3), joint_actions, range(3)):
    served = oracle_reward(server_up[s0], a0)
    moved = stay * (s0 == s1) + (1 - stay) * initial[s1].item()
    for heard, a1 in itertools.product(joint_actions, joint_actions):
        heard_right = math.prod(hear if h == served else 1 - hear for h in heard)
        local = []
        for i in (0, 1):
            o_0, o_1 = server_up[s0][i], (server_up[s1][i], heard[i])
            local.append([((o_0,), a0[i]), ((o_0, a0[i], *o_1), a1[i])])
        histories.append((initial[s0].item() * moved * heard_right, *local))
print(len(histories), "joint histories; agent 0's part of one of them, turn by turn "
      "(local history, action):", histories[100][1])

# %% [markdown]
# A policy is a table: the chance of calling after each local history, 2 entries for
# the first turn and 16 for the second. A random team and a random reference will do,
# as the claim is about all of them.


# %%
def random_policy():
    """Chance of calling after each local history of turn 0 and turn 1."""
    seen = [h for length in (1, 4) for h in itertools.product((0, 1), repeat=length)]
    return {h: torch.rand((), generator=generator).item() for h in seen}


def team_logprobs(policies):
    """(histories, agents, turns) log pi_i(a_i | h_i), the shape the losses take."""
    return tensor([
        [[math.log(policy[h] if a else 1 - policy[h]) for h, a in part]
         for policy, part in zip(policies, parts)] for _, *parts in histories])


environment = tensor([history[0] for history in histories])
log_team = team_logprobs([random_policy(), random_policy()])
log_base = team_logprobs([random_policy(), random_policy()])
print("shape (histories, agents, turns):", tuple(log_team.shape))

# %%
law = environment * log_team.sum(dim=(1, 2)).exp()
base_law = environment * log_base.sum(dim=(1, 2)).exp()
torch.testing.assert_close(law.sum(), tensor(1.0))  # nothing was forgotten
history_kl = (law * (law.log() - base_law.log())).sum()  # with the environment
by_agent_and_turn = torch.einsum("h,hit->it", law, log_team - log_base)  # without it

print(f"KL of the two laws over joint histories: {history_kl:.6f}")
print(f"sum over agents and turns:               {by_agent_and_turn.sum():.6f}")
for agent, (first, second) in enumerate(by_agent_and_turn.tolist()):
    print(f"    agent {agent}: turn 0 {first:.6f}, turn 1 {second:.6f}")
torch.testing.assert_close(history_kl, by_agent_and_turn.sum())

# %% [markdown]
# The environment cancelled. So a team's log-ratio is a plain sum,
# $\sum_t\sum_i\log\pi_i/\pi_{ref,i}$. MADPO puts $\beta$ times this log-ratio where
# Bradley-Terry has a score (section 5 says why). Call agent $i$'s own log-ratio, summed
# over turns, on the winner minus that on the loser its **edge** $d_i$. The loss of one
# pair is then
#
# $$-\log\sigma\Big(\beta\sum_id_i\Big),$$
#
# *one* logistic for the whole team (paper, appendix A.3). The module reports
# $\beta\sum_id_i$ as `margin`, and $\beta d_i$ as each agent's. A pair with edges 3 for
# agent 0 and -1 for agent 1 costs $-\log\sigma(0.1\cdot(3-1))=0.59814$.

# %%
edges = tensor([[[3.0], [-1.0]]]).requires_grad_()  # (pairs, agents, turns)
zero = torch.zeros(1, 2, 1)
loss, metrics = madpo_loss(edges, zero, zero, zero, beta=0.1)
torch.testing.assert_close(loss, tensor(math.log(1 + math.exp(-0.1 * (3 - 1)))))
print(f"loss {loss:.5f}")
for who in ("", "agent0/", "agent1/"):
    value = metrics[f"{who}margin"]
    print(f"  margin of {who[:-1] or 'the team'}: {value:+.2f}")
print("pull on each agent's edge:",
      (-torch.autograd.grad(loss, edges)[0]).flatten().tolist())

# %% [markdown]
# The sum needs conditional independence: given its history, each agent acts on its
# own. A coordinator that tosses *one* coin for both does not. Its two agents look like
# fair coins each, yet the team is far from a fair team:

# %%
one_coin = [0.0, 0.5, 0.5, 0.0]  # wait/call or call/wait, never both, never none
two_coins = [chance((0.5, 0.5), a) for a in joint_actions]
print(f"each agent: KL {kl([0.5, 0.5], [0.5, 0.5]):.4f}; "
      f"joint: KL {kl(one_coin, two_coins):.4f} = log 2")

# %% [markdown]
# > **Common mistake.** One logistic per agent instead of one per pair. Then agent 1,
# > whose edge is -1, is pulled harder (0.0525) than agent 0 (0.0426), as if each had
# > to explain the victory alone. In MADPO a pair that the *team* separates is finished,
# > and both pulls are 0.0450. On a plot, separate logistics drive *each* agent's own
# > accuracy to 1, where MADPO only cares for the team's. To check, compare the gradients
# > by the agents' edges, as above: they must be equal.

# %% [markdown]
# ## 5 What a product of policies cannot say
#
# A trained policy is itself a reward model: the KL-regularised optimum is
# $\pi\propto\pi_{ref}\,e^{R/\beta}$, hence $R=\beta\log\pi/\pi_{ref}$ up to a constant.
# For *one* policy over the joint action this loses nothing. Take the row "both up":

# %%
wanted = rewards[both_up]
uniform = torch.full((4,), 0.25)
optimum = (uniform * (wanted / BETA).exp()) / (uniform * (wanted / BETA).exp()).sum()
implicit = BETA * (optimum / uniform).log()
print("wanted  ", wanted.tolist())
print("implicit", [round(value, 6) for value in (implicit - implicit[0]).tolist()])
torch.testing.assert_close(implicit - implicit[0], wanted - wanted[0])

# %% [markdown]
# Now a *product* of two local policies. Its implicit reward is
# $\beta\log\frac{\pi_0(a_0)}{\pi_{ref,0}(a_0)}+\beta\log\frac{\pi_1(a_1)}{\pi_{ref,1}(a_1)}$:
# something for agent 0's action plus something for agent 1's. Every such table has
#
# $$u(\text{call},\text{wait})+u(\text{wait},\text{call})
# -u(\text{call},\text{call})-u(\text{wait},\text{wait})=0,$$
#
# as each agent's call and each agent's wait appear once with plus and once with minus.
# What does "exactly one" need there?

# %%
cross = tensor([-1.0, 1.0, 1.0, -1.0])  # the signs above, in the order of action_names
print("exactly one of us needs", (cross @ wanted).item())
for p0, p1 in ((0.9, 0.2), (0.99, 0.01), (0.3, 0.3)):
    u = tensor([BETA * math.log(chance((p0, p1), a) / 0.25) for a in joint_actions])
    print(f"the team ({p0}, {p1}) says {(cross @ u).item():+.1e}")

# %% [markdown]
# Two wanted, zero available, whatever the policies. Now train on the four pairs of
# section 3, each once. Their four margins $m_j$ add up to $2\cdot 0$: if one pair is
# understood better, another must be understood worse, and since $-\log\sigma$ is
# convex, $\text{mean}\,\big({-\log\sigma(m_j)}\big)\ge-\log\sigma(\text{mean}\;m_j)=\log 2$,
# with equality only if all four margins are 0.
#
# Is it so? Here are thousands of teams drawn at random, scored with the loss itself.

# %%
winners, losers = (tensor(side) for side in zip(*four_pairs))
calls = tensor(joint_actions)  # (joint actions, agents)


def product_logprobs(call_logits):
    """(joint actions, agents) log pi_i of a team that knows both servers are up."""
    return F.logsigmoid(call_logits * (2 * calls - 1))


def loss_on_four_pairs(logprobs, reference):
    """MADPO's loss on those pairs; both arguments are (joint actions, policies)."""
    chosen, rejected = logprobs[winners], logprobs[losers]
    return madpo_loss(
        chosen[..., None], rejected[..., None], reference[winners][..., None],
        reference[losers][..., None], beta=BETA)[0]


fair = product_logprobs(torch.zeros(2))
tries = torch.randn(RANDOM_POLICIES, 2, generator=generator) * 5  # logits
losses = tensor([loss_on_four_pairs(product_logprobs(x), fair).item() for x in tries])
print(f"{RANDOM_POLICIES} random teams: smallest loss {losses.min():.6f}, "
      f"log 2 = {math.log(2):.6f}")
assert losses.min() >= math.log(2) - 1e-12
assert math.isclose(loss_on_four_pairs(fair, fair).item(), math.log(2))

# %% [markdown]
# The same in one picture. Every point of the square is a team: how often agent 0 calls
# and how often agent 1 does. Left: how often exactly one calls. Right: MADPO's loss on
# the four pairs. Where are the best points of the two maps?

# %%
grid = torch.linspace(0.01, 0.99, 49)
p0, p1 = torch.meshgrid(grid, grid, indexing="ij")
success = p0 * (1 - p1) + (1 - p0) * p1
loss_map = tensor([[loss_on_four_pairs(product_logprobs(tensor([a, b]).logit()), fair)
                    for b in grid.tolist()] for a in grid.tolist()])
figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
for axes, table, title in ((panels[0], success, "P(exactly one calls)"),
                           (panels[1], loss_map, "MADPO loss, four pairs")):
    drawn = axes.contourf(grid, grid, table.T, levels=12, cmap="cividis")
    figure.colorbar(drawn, ax=axes)
    axes.set(title=title, xlabel="P(agent 0 calls)", aspect="equal")
    best_value = table.max() if axes is panels[0] else table.min()
    axes.plot(*grid[(table == best_value).nonzero().T], "w*", markersize=14,
              markeredgecolor="black", clip_on=False)
panels[0].set_ylabel("P(agent 1 calls)")
figure.suptitle(f"Both servers up, beta = {BETA:g}, exact (stars: best points)")
show_figure(
    figure, "01_success_and_loss",
    "Two maps over both agents' chances of calling. Success is a saddle, best in two "
    "opposite corners; the loss is a bowl, lowest at the centre.", OUTPUT_DIR)

# %% [markdown]
# In numbers: where is the loss lowest, and what does it charge for playing well?

# %%
lowest = (loss_map == loss_map.min()).nonzero()[0]
display(Markdown(
    f"*Exact, no sampling. The loss is lowest ({loss_map.min():.4f}) where the agents "
    f"call with probability {grid[lowest[0]]:.2f} and {grid[lowest[1]]:.2f}: at the "
    f"reference, where exactly one calls half of the time. The team (0.99, 0.01) "
    f"succeeds with probability {success.max():.3f} and is charged "
    f"{loss_map[-1, 0]:.4f} for it.*"))

# %% [markdown]
# The maps disagree completely. MADPO cannot rank those four answers, so it asks for the
# team whose implicit reward ranks nothing: the reference. But look at the left map
# again: the product of two local policies *can play* the game, in either corner with a
# star. Expressing the reward and playing it well are two different abilities.

# %% [markdown]
# ## 6 Who can
#
# **Policy gradient on the product** needs no implicit reward. A group of $G$ joint
# answers gets its returns, and each answer is compared with the group's mean (paper,
# Eq. 5). Take agents that call with probability 3/4 and 1/4, and a group of sixteen in
# which each joint action appears exactly as often as it should: 3, 1, 9 and 3 times.

# %%
counts = [round(16 * chance((0.75, 0.25), a)) for a in joint_actions]
group = tensor([a for a in range(4) for _ in range(counts[a])])
returns = wanted[group]
baseline = returns.mean().item()
print("counts", dict(zip(action_names, counts)), "mean return", baseline)
advantages = returns - baseline
torch.testing.assert_close(group_relative_advantages(returns[None]), advantages[None])
print("advantage of a success", advantages.max().item(),
      "and of a failure", advantages.min().item())

# %% [markdown]
# Both agents get the *same* advantage, as the reward belongs to the team; each
# multiplies it with the log-probability of its own action. Is the result the exact
# gradient of the success probability? For logits $x_0,x_1$ that is
# $p_0(1-p_0)(1-2p_1)$ for agent 0, here $\tfrac3{16}\cdot\tfrac12=0.09375$, and the
# negative of it for agent 1.

# %%
call_logits = tensor([0.75, 0.25]).logit().requires_grad_()
logprobs = product_logprobs(call_logits)[group]  # (G, agents)
loss, metrics = magrpo_loss(logprobs[None, :, :, None], advantages[None])
(step,) = torch.autograd.grad(-loss, call_logits)
print("ascent direction", step.tolist())
torch.testing.assert_close(step, tensor([3 / 32, -3 / 32]))

# %% [markdown]
# Agent 0, who already calls more often, is told to call more; agent 1 to call less. A
# small difference grows. And with no difference at all? At $(\tfrac12,\tfrac12)$ the
# gradient is exactly zero: the saddle of the map. Sampling noise, or a
# different prompt for each agent, is what tips a real team off it.
#
# **A joint reward model** scores the whole joint action, so it has a number for each
# of the four. **A centralised policy** has a probability for each of the four, and so
# has its implicit reward: Cen-Cen MADPO. Train them all, by the same loop, from the
# same slightly lopsided start.


# %%
def minimise(loss_of, start, steps):
    """Adam on a function of one tensor; returns all the points it passes, in order."""
    point = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([point], lr=LEARNING_RATE)
    path = [start.clone()]
    for _ in range(steps):
        loss = loss_of(point)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        path.append(point.detach().clone())
    return path


lopsided = tensor([SYMMETRY_BREAK, -SYMMETRY_BREAK])  # logits of calling
fair_scores = torch.zeros(4)  # a reward model that knows nothing yet
cen_start = product_logprobs(lopsided).sum(dim=1)  # a coordinator of the same law
steps = ITERATIONS * STEPS_PER_ITERATION

# %% [markdown]
# Three losses on the same four pairs. The product's has a column per agent, the
# coordinator's a single one, and the reward model's is Bradley-Terry. The reference
# is the start.


# %%
def product_loss(call_logits):
    return loss_on_four_pairs(product_logprobs(call_logits), product_logprobs(lopsided))


def coordinator_loss(logits):
    return loss_on_four_pairs(logits.log_softmax(0)[:, None], cen_start[:, None])


def reward_model_loss(scores):
    return bradley_terry_loss(scores[winners], scores[losers])[0]


product_path = minimise(product_loss, lopsided, steps)
coordinator_path = minimise(coordinator_loss, cen_start, steps)
scores_path = minimise(reward_model_loss, fair_scores, steps)
loss_curves = {
    "MADPO, product": [product_loss(x).item() for x in product_path],
    "MADPO, coordinator": [coordinator_loss(x).item() for x in coordinator_path],
    "joint reward model": [reward_model_loss(x).item() for x in scores_path]}
for name, curve in loss_curves.items():
    print(f"{name:>20}: loss {curve[0]:.4f} -> {curve[-1]:.4f}")

# %% [markdown]
# Then the product by policy gradient, exact as the expectation has four terms: once on
# the oracle's reward, once on the scores just fitted, which is MARLHF in miniature.
# How often does exactly one agent call, step by step?


# %%
def exactly_one(law):
    """P(exactly one calls) of a law over joint actions."""
    return law[1] + law[2]


def gradient_path(table):
    """Policy gradient on the product, for a table of rewards of the joint actions."""
    return minimise(
        lambda x: -(product_logprobs(x).sum(dim=1).exp() @ table), lopsided, steps)


product_paths = {"policy gradient, product": gradient_path(wanted),
                 "MARLHF, product": gradient_path(scores_path[-1]),
                 "MADPO, product": product_path}
success_curves = {
    name: [exactly_one(product_logprobs(x).sum(dim=1).exp()).item() for x in path]
    for name, path in product_paths.items()}
success_curves["MADPO, coordinator"] = [
    exactly_one(x.softmax(0)).item() for x in coordinator_path]

# %% [markdown]
# Look for the one flat line in each panel.

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
madpo, marlhf, magrpo = (
    figures.COLOURS[method] for method in ("madpo", "marlhf", "magrpo"))
styles = {"MADPO, product": (madpo, "-", 2), "MADPO, coordinator": (madpo, "--", 2),
          "joint reward model": (marlhf, "-", 2), "MARLHF, product": (marlhf, "-", 2),
          "policy gradient, product": (magrpo, "-", 6)}  # wide: it lies under MARLHF's
for axes, curves in zip(panels, (loss_curves, success_curves)):
    for name, curve in curves.items():
        color, line, width = styles[name]
        axes.plot(curve, line, color=color, linewidth=width, label=name)
    axes.set(xlabel="optimiser steps", ylim=(0, None))
    axes.legend(frameon=False)
panels[0].set_title("loss on the four balanced pairs")
panels[1].set_title("P(exactly one calls)")
figure.suptitle("Both servers up, exact, one start, no sampling")
final = {name: curve[-1] for name, curve in success_curves.items()}
ends = [f"{name} {curve[-1]:.2f}" for name, curve in loss_curves.items()]
show_figure(
    figure, "01_who_can_learn",
    f"Left, losses from 0.69 to: {', '.join(ends)}. Right, chances that exactly one "
    f"calls, at the end: {', '.join(f'{n} {x:.2f}' for n, x in final.items())}.",
    OUTPUT_DIR)

# %% [markdown]
# Where the curves end. Compare the product under MADPO with the same product under
# policy gradient.

# %%
display(Markdown(
    f"*One exact run each, so there is no band. After {steps} steps MADPO's product is "
    f"at loss {loss_curves['MADPO, product'][-1]:.4f} (log 2 = {math.log(2):.4f}) and "
    f"success {final['MADPO, product']:.3f}; policy gradient on the same product "
    f"reaches {final['policy gradient, product']:.3f}, MARLHF "
    f"{final['MARLHF, product']:.3f}, the coordinator under MADPO "
    f"{final['MADPO, coordinator']:.3f}.*"))
assert abs(loss_curves["MADPO, product"][-1] - math.log(2)) < 1e-9

# %% [markdown]
# > **Common mistake.** Reading "loss at log 2" as "not trained yet" and raising the
# > learning rate. Look at the pairs first: if each winning scheme appears as often as
# > its mirror image, a product has nothing to learn from them, at any rate.
#
# The word *balanced* matters. Pairs that the team collected itself are not balanced
# once one agent leads a little: then one of the two winners is the common one, and
# MADPO may push it further. Whether that happens depends on the comparator, and brings
# us to the three paradigms.

# %% [markdown]
# ## 7 The three paradigms, exactly
#
# The whole game again: three states, private observations. MAPL as in the paper's
# algorithm boxes, but with infinitely many samples: instead of drawing $m$ pairs we take
# every pair with its probability. Then: drop ties, update, repeat.
#
# | paradigm | the agents | their comparator |
# |---|---|---|
# | Dec-Dec | two local policies | themselves |
# | Cen-Cen | a coordinator | itself |
# | Dec-Cen | two local policies | a good coordinator: nearly always right, with no favourite when both are up |
#
# A table of log-probabilities describes any of these teams. Its last axis is the
# policies: two columns, or one.

# %%
observed = tensor(server_up)  # (states, agents): 1 where agent i sees "up"


def dec_logprobs(call_logits):
    """(states, joint actions, 2) from logits of calling, (agents, observations)."""
    seen = call_logits[torch.arange(2), observed]
    return F.logsigmoid(seen[:, None, :] * (2 * calls - 1))


def cen_logprobs(logits):
    """(states, joint actions, 1) from a coordinator's logits, (states, actions)."""
    return logits.log_softmax(dim=1)[..., None]


def value_of(law):
    """Expected oracle reward of a law over joint actions in each state."""
    return (initial[:, None] * law * rewards).sum().item()


good_coordinator = 0.9 * rewards / rewards.sum(dim=1, keepdim=True) + 0.1 * 0.25
dec_start = lopsided[:, None].expand(2, 2)  # (agents, observations)
for name, law in (("agents at the start", dec_logprobs(dec_start).sum(2).exp()),
                  ("the good coordinator", good_coordinator)):
    print(f"value of {name}: {value_of(law):.3f}")


# %% [markdown]
# Every pair with its probability, and MADPO's loss with those weights. With equal
# weights it has to be the module's (the next cell checks it on a random team).


# %%
def all_pairs(agents, comparator):
    """State, winner, loser and probability of every pair that is not a tie."""
    axes = (torch.arange(3), torch.arange(4), torch.arange(4))
    state, ours, theirs = (x.flatten() for x in torch.meshgrid(*axes, indexing="ij"))
    gap = rewards[state, ours] - rewards[state, theirs]
    weight = initial[state] * agents[state, ours] * comparator[state, theirs]
    winner = torch.where(gap > 0, ours, theirs)
    loser = torch.where(gap > 0, theirs, ours)
    kept = gap != 0
    return state[kept], winner[kept], loser[kept], weight[kept] / weight[kept].sum()


def weighted_madpo(logprobs, reference, state, winner, loser, weight):
    """MADPO's loss, each pair counted with its probability."""
    implicit = BETA * (logprobs - reference)
    margins = (implicit[state, winner] - implicit[state, loser]).sum(dim=1)
    return weight @ -F.logsigmoid(margins)


# %% [markdown]
# The check, and the pairs that a random team meets most often against the coordinator:
# who wins them?

# %%
team, base = (dec_logprobs(torch.randn(2, 2, generator=generator)) for _ in range(2))
state, winner, loser, weight = all_pairs(team.sum(dim=2).exp(), good_coordinator)
sides = [table[state, side][..., None] for table in (team, base)
         for side in (winner, loser)]
equal_weights = torch.full_like(weight, 1 / len(weight))
torch.testing.assert_close(
    weighted_madpo(team, base, state, winner, loser, equal_weights),
    madpo_loss(*sides, beta=BETA)[0])
print(len(weight), "kinds of pairs; the five most frequent:")
for i in weight.argsort(descending=True)[:5].tolist():
    print(f"{weight[i]:.3f} {state_names[state[i]]}: {action_names[winner[i]]} "
          f"beats {action_names[loser[i]]}")

# %% [markdown]
# The two updates. The reward model is fitted afresh in every iteration, the policies
# go on from where they are.


# %%
def update_madpo(logprobs_of, parameters, reference, pairs):
    """One iteration of MADPO from the agents' present parameters."""
    return minimise(lambda x: weighted_madpo(logprobs_of(x), reference, *pairs),
                    parameters, STEPS_PER_ITERATION)[-1]


def update_marlhf(logprobs_of, parameters, reference, pairs):
    """Fit a joint reward model, one score a joint history, then policy gradient."""
    state, winner, loser, weight = pairs
    scores = minimise(
        lambda r: weight @ -F.logsigmoid(r[state, winner] - r[state, loser]),
        torch.zeros(3, 4), STEPS_PER_ITERATION)[-1]
    return minimise(
        lambda x: -(initial @ (logprobs_of(x).sum(dim=2).exp() * scores).sum(dim=1)),
        parameters, STEPS_PER_ITERATION)[-1]


# %% [markdown]
# And the loop: collect and label (`all_pairs`), update, evaluate. Keeping the top $k$
# has nothing to do here: every winner of this game has the same return, 1.


# %%
def run_mapl_exactly(update, logprobs_of, start, comparator=None):
    """Oracle value of the team before each iteration and after the last one."""
    parameters, reference, values = start, logprobs_of(start), []
    for _ in range(ITERATIONS):
        agents = logprobs_of(parameters).sum(dim=2).exp()
        values.append(value_of(agents))
        pairs = all_pairs(agents, agents if comparator is None else comparator)
        parameters = update(logprobs_of, parameters, reference, pairs)
    return [*values, value_of(logprobs_of(parameters).sum(dim=2).exp())]


teams = {"Dec-Dec": (dec_logprobs, dec_start),
         "Cen-Cen": (cen_logprobs, dec_logprobs(dec_start).sum(dim=2)),
         "Dec-Cen": (dec_logprobs, dec_start, good_coordinator)}
runs = {(method, paradigm): run_mapl_exactly(update, *team)
        for method, update in (("MADPO", update_madpo), ("MARLHF", update_marlhf))
        for paradigm, team in teams.items()}
for (method, paradigm), values in runs.items():
    print(f"{method:>6} {paradigm}: {values[0]:.3f} -> {values[-1]:.3f}")

# %% [markdown]
# Before you look at the curves, guess: which of the six cannot reach the best value of
# its kind, and why?

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True,
                              layout="constrained")
for axes, method in zip(panels, ("MADPO", "MARLHF")):
    for height, label in ((best_cen, "best coordinator"), (best_dec, "best local")):
        axes.axhline(height, color="0.75", linewidth=0.8)
        axes.text(ITERATIONS, height + 0.03, label, ha="right", color="0.3", fontsize=8)
    for paradigm in teams:  # Dec-Dec is drawn wide and pale: a line may hide on it
        wide = {"linewidth": 6, "alpha": 0.4} if paradigm == "Dec-Dec" else {}
        style = figures.LINE_STYLES[paradigm.lower()]
        axes.plot(runs[method, paradigm], style, color=figures.COLOURS[method.lower()],
                  label=paradigm, **{"linewidth": 2.2, **wide})
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=method, xlabel="MAPL iterations", ylim=(0, 1.12))
    axes.legend(frameon=False, loc="lower right")
panels[0].set_ylabel("oracle value of the team")
figure.suptitle(f"Three paradigms, P(both up) = {P_BOTH_UP:g}, exact, no sampling")
ends = [f"{' '.join(run)} {values[-1]:.2f}" for run, values in runs.items()]
show_figure(
    figure, "01_paradigms",
    f"Value of the team over MAPL iterations, from {runs['MADPO', 'Dec-Dec'][0]:.2f} "
    f"to: {', '.join(ends)}. Best local team {best_dec:.2f}, best coordinator "
    f"{best_cen:.2f}.", OUTPUT_DIR)

# %% [markdown]
# The answer to the question, computed:

# %%
short = [f"{method} {paradigm} ({values[-1]:.3f})"
         for (method, paradigm), values in runs.items()
         if values[-1] < (best_cen if paradigm == "Cen-Cen" else best_dec) - 0.01]
display(Markdown(
    f"*One exact run a line, so there is no band. The best decentralised value is "
    f"{best_dec:.3f}, the best centralised one {best_cen:.3f}. More than 0.01 below "
    f"the best of its kind: {', '.join(short) or 'none'}.*"))

# %% [markdown]
# With the default parameters, Dec-Dec MADPO *does* learn to play lopsided, although it
# cannot express the reward: its own pairs stop being balanced as soon as agent 0 leads.
# Under Dec-Cen the winners keep coming from the coordinator, which favours nobody, and
# pull the team back to the middle of the bowl. (The zigzag: an overshoot in one
# iteration changes the losers of the next.)
#
# ### How far is the nearest product?
# Try to imitate the coordinator $\varpi$ as well as a product $\pi$ can. The nearest one,
# in $KL(\varpi\,\|\,\pi)$, has each agent call as often as the coordinator makes it call
# *given what that agent sees*. By hand, for a perfect coordinator and servers that are
# up as in the parameters: agent 0 sees "up" in two states; in one it calls half of the
# time, in the other always.

# %%
calls_if_up = (initial[0] * 0.5 + initial[1] * 1.0) / (initial[0] + initial[1])
both, one = initial[0], initial[1] + initial[2]
imitation = both * 2 * calls_if_up * (1 - calls_if_up) + one * calls_if_up
print(f"agent 0 calls with {calls_if_up:.3f} when its server is up; "
      f"so does agent 1; value of the pair {imitation:.3f}")

# %% [markdown]
# The same for the coordinator that was used, by summing its table. The distance that is
# left splits into two parts:
#
# - what the agents do not **know**: the *information gap*, now in nats;
# - what two independent actions cannot **do**, even if both agents saw the whole state:
#   the *realizability gap*, here the shared coin of section 4.


# %%
def nearest_product(law, sees):
    """Law of local policies that call as often as `law` given what each agent sees."""
    chances = torch.empty(3, 2)
    for agent, state in itertools.product((0, 1), range(3)):
        alike = (sees[:, agent] == sees[state, agent]) * initial
        called = law @ calls[:, agent].to(dtype)
        chances[state, agent] = (alike @ called) / alike.sum()
    chosen = torch.where(calls == 1, chances[:, None, :], 1 - chances[:, None, :])
    return chosen.prod(dim=2)


def distance(law, other):
    """KL in nats, averaged over states."""
    return (initial[:, None] * law * (law / other).log()).sum().item()


# %% [markdown]
# Which of the two parts is larger? And does MADPO's Dec-Cen team end near the nearest
# local team, or near the best one?

# %%
all_seeing = torch.arange(3)[:, None].expand(3, 2)
local = nearest_product(good_coordinator, observed)
informed = nearest_product(good_coordinator, all_seeing)
total, realizability = (distance(good_coordinator, x) for x in (local, informed))
print(f"distance of the nearest local team {total:.3f} = "
      f"information {total - realizability:.3f} + realizability {realizability:.3f}")
print(f"value: coordinator {value_of(good_coordinator):.3f}, nearest team that sees "
      f"everything {value_of(informed):.3f}, nearest local team {value_of(local):.3f}, "
      f"best local team {best_dec:.3f}")
print(f"MADPO Dec-Cen ended at {runs['MADPO', 'Dec-Cen'][-1]:.3f}")

# %% [markdown]
# The lopsided team is better for the user than any imitation. But it disagrees with half
# of the coordinator's winners, and to MADPO those are as good as the other half.
# MARLHF uses the same pairs only to learn what a joint history is *worth*, and then
# finds by itself what its agents can play.
#
# Two things of the paper this game cannot show. Its reward model is a table that has
# seen everything, while the paper finds that Dec-Cen hurts MARLHF *more*, through
# errors of the reward model (section 5.2). And infinitely many samples have no noise.
# Both are there as soon as tokens are sampled, in the notebooks that follow.
#
# > **Common mistake.** Calling Dec-Cen's drop "the comparator is too good". An equally
# > good coordinator that always lets agent 0 lead teaches more (exercise 3): what counts
# > is whether the agents can do what the winners do.

# %% [markdown]
# ## What to take along
#
# - A task is a tuple; *who sees what* decides between Pb-Dec-POMDP and Pb-MPOMDP, and
#   costs value before any learning starts.
# - KL over joint histories is a sum over agents and turns, so MADPO is one logistic on
#   a sum. The same sum makes its implicit reward additive.
# - Additive rewards cannot say "exactly one of us". Products can still play it, and
#   policy gradient on a joint reward finds it, if something breaks the symmetry.
# - A comparator's winners help as far as the agents can realise them.
#
# ## Exercises
#
# 1. At which `P_BOTH_UP` does the best decentralised team stop being lopsided? Compute
#    it by hand, then check it with the parameter. What does MADPO Dec-Cen do there?
# 2. Set `SYMMETRY_BREAK = 0.0`, so that both agents start equal. Which runs of section 7
#    stay with equal agents, and which do not? What pushes those apart?
# 3. Replace the good coordinator by one that always lets agent 0 call when its server
#    is up. Predict the realizability gap and MADPO's end value before you run it.
# 4. Three agents, one state, "exactly one calls", all $3\times5$ pairs. Show that MADPO
#    gets below $\log 2$. What has the team learnt, and what has it not?
# 5. Show both agents the same fair coin beside their server. Which of the two gaps can
#    a coordinator that uses the coin close? Does the loss on the four pairs fall?
#
# Solutions: [solutions/01_formulation_solutions.ipynb](solutions/01_formulation_solutions.ipynb).
