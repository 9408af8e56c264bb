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
# # 02 Preference collection
#
# Where the data of MAPL (multi-agent preference learning) comes from: the team plays
# against a comparator, an annotator says who was better, a rule keeps the best pairs, a
# buffer decides how long they live.
#
# **After it you can** pair joint answers and label them with three annotators; say which
# pairs each selection rule keeps, and why the paper ranks by the winner; choose a
# comparator knowingly; and predict what $\lambda$ does to the training set.
#
# **It needs** 01_formulation for the words (trajectory, return, joint history, Dec and
# Cen). Two methods use the data: MADPO, multi-agent direct preference optimisation
# (notebook 04), and MARLHF, multi-agent reinforcement learning from human feedback (03).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/02_preference_collection.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 0.2 | 0.7 GiB | 2026-11-30 |

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
import warnings
from dataclasses import replace

warnings.filterwarnings("ignore", message="IProgress not found")  # plain bars are meant

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from IPython.display import Markdown, display

import mapl_core
from mapl_core.annotators import make_annotator
from mapl_core.buffers import (
    PreferencePair,
    ReplayBuffer,
    Response,
    Trajectory,
    label_pairs,
    pair_diversity,
    select_pairs,
)
from mapl_core.comparators import Comparator
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.updates import TeamOptimizer, update_madpo

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # pocket (any laptop), small (a real model, slower) or paper (a GPU)
TASKS = 12  # training posts to collect on
SAMPLES = 8  # m: joint answers of the agents, and of the comparator, for each post
PAIRS = 4  # k: pairs kept for each post
ANNOTATOR_TEMPERATURE = 0.5  # tau of the Bradley-Terry annotator, in units of reward
FLIP_PROBABILITY = 0.1  # of the noisy annotator
DECAY = 0.8  # lambda of the replay buffer
SEED = 0  # seed of every random stream
OUTPUT_DIR = ""  # folder for the figures; empty: they are shown, not saved

# %%
check_parameters(globals(), PROFILE=str, TASKS=int, SAMPLES=int, PAIRS=int,
                 ANNOTATOR_TEMPERATURE=float, FLIP_PROBABILITY=float, DECAY=float,
                 SEED=int, OUTPUT_DIR=str)
config = load_profile(PROFILE).config(
    "tldr", "madpo", "dec-dec", seed=SEED, train_tasks=TASKS, samples_per_task=SAMPLES,
    pairs_per_task=PAIRS, buffer_decay=DECAY, eval_tasks=1)
torch.set_num_threads(config.threads)

# %% [markdown]
# ## 1 Pairing and labelling, by hand
#
# Four joint answers of the team and four of the comparator to *one* task, with their
# returns. The $j$-th meets the $j$-th: $m$ comparisons, not $m^2$, so that every answer
# is used once. Who wins each, and which comparison teaches nothing?

# %%
agent_returns = [3.0, 0.2, 1.0, 2.9]
comparator_returns = [1.0, 2.0, 1.0, -1.0]
winners = ["agents" if a > c else "comparator" if c > a else "tie"
           for a, c in zip(agent_returns, comparator_returns)]
winners

# %% [markdown]
# The module does the same on trajectories. A trajectory holds the joint history, the
# joint action of each turn, and the reward the annotator sees:


# %%
def toy(total, text):
    """A one-turn trajectory with a given return."""
    action = Response((1,), (2,), text, False)
    return Trajectory("toy", ((action,),), ((text,),), (total,), ({"all": total},))


agents = [toy(value, f"agents {j}") for j, value in enumerate(agent_returns)]
others = [toy(value, f"other {j}") for j, value in enumerate(comparator_returns)]
pairs, ties = label_pairs(agents, others, make_annotator("oracle"))
assert ties == winners.count("tie")
assert [pair.winner_is_agent for pair in pairs] == [w == "agents" for w in winners
                                                    if w != "tie"]
[(pair.winner.total_return, pair.loser.total_return) for pair in pairs]

# %% [markdown]
# > **Common mistake.** Comparing answers to *different* tasks. An easy task then looks
# > like a good team. `label_pairs` refuses it.

# %% [markdown]
# ## 2 Annotators who err
#
# People are not oracles. A Bradley-Terry annotator prefers the better answer with
# probability $\sigma((R-R')/\tau)$; a noisy one flips the oracle's verdict now and then.
# How often does each contradict the oracle, at a small gap and at a large one?

# %%
def contradictions(name, gap, trials=2000):
    """Share of comparisons at this gap in which the worse answer is preferred."""
    annotate = make_annotator(
        name, temperature=ANNOTATOR_TEMPERATURE, flip_probability=FLIP_PROBABILITY,
        generator=Stream(SEED, f"notebook 02/{name}/{gap}").generator())
    better, worse = toy(gap, "better"), toy(0.0, "worse")
    return sum(annotate(better, worse) < 0 for _ in range(trials)) / trials


gaps = [0.1, 0.5, 2.0]
expected = [1 / (1 + math.exp(gap / ANNOTATOR_TEMPERATURE)) for gap in gaps]
measured = {name: [contradictions(name, gap) for gap in gaps]
            for name in ("oracle", "noisy", "bradley_terry")}
assert all(abs(m - e) < 0.05 for m, e in zip(measured["bradley_terry"], expected))
pd.DataFrame(measured | {"sigmoid(-gap/tau)": expected}, index=gaps).round(3)

# %% [markdown]
# ## 3 Which pairs to keep
#
# Three labelled pairs are left, and we may keep one. The paper ranks by the *winner's*
# return (section 4.1): learn from the best thing seen. Which pair would each rule take?

# %%
kept = {rule: select_pairs(pairs, 1, by=rule)[0]
        for rule in ("winner_return", "comparator_return", "reward_gap")}
assert kept["winner_return"].winner.total_return == max(agent_returns)
for rule, pair in kept.items():
    print(f"{rule:18} winner {pair.winner.total_return:4.1f}, "
          f"loser {pair.loser.total_return:4.1f}")

# %% [markdown]
# > **Common mistake.** Ranking by the *comparator's* return. Here it throws away the two
# > strong answers of the team and keeps a pair in which the team lost. To check a run,
# > compare the winners' mean return before and after selection, as section 4 does; in
# > `metrics.csv` the kept winners' is `preferences/winner_return`.

# %% [markdown]
# ## 4 Real answers
#
# Now the team itself: two agents, a comparator that is the same team with another random
# stream. Look at the spread within one post: it is what the comparison lives on.

# %%
team = build_team(config)
stream = Stream(SEED, "collect")
team.comparator.begin_iteration()
played = team.policy.sample(team.train_tasks, SAMPLES, stream)
compared = team.comparator.sample(team.train_tasks, SAMPLES, Stream(SEED, "comparator"))
all_pairs, selected, tied = [], [], 0
for mine, theirs in zip(played, compared):
    labelled, ties_here = label_pairs(mine, theirs, make_annotator("oracle"))
    tied += ties_here
    all_pairs += labelled
    selected += select_pairs(labelled, PAIRS) if labelled else []
print(f"{len(all_pairs)} pairs, {tied} ties, {len(selected)} kept")

# %% [markdown]
# One column a post. How far apart do answers to the same post lie, and how far apart are
# agents and comparator?

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
order = sorted(range(len(played)), key=lambda i: sum(t.total_return for t in played[i]))
for place, index in enumerate(order):
    sides = ((played, "#0072B2", -0.15), (compared, "#999999", 0.15))
    for group, colour, shift in sides:
        values = [trajectory.total_return for trajectory in group[index]]
        axes.scatter([place + shift] * len(values), values, s=14, color=colour)
axes.set(xlabel="training post, ordered by the team's mean return", ylabel="return",
         xticks=[], ylim=(-0.1, 3.6),
         title=f"Returns of {SAMPLES} joint answers a post - {PROFILE}, {TASKS} tasks, "
               f"seed {SEED}")
axes.text(0.01, 0.97, "agents", color="#0072B2", transform=axes.transAxes, va="top")
axes.text(0.13, 0.97, "comparator", color="#777777", transform=axes.transAxes, va="top")
means = [torch.tensor([pair.winner.total_return for pair in of]).mean()
         for of in (all_pairs, selected)]
finding = (f"Winners have a mean return of {means[0]:.2f} before and {means[1]:.2f} "
           "after selection. One dot is one joint answer.")
show_figure(figure, "returns", f"Dots of returns by post. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# How many *different* winners stand behind the pairs of a post? If one extreme winner
# filled all of them, $k$ pairs would teach what one does.

# %%
diversity = pd.DataFrame([vars(d) for d in pair_diversity(selected).values()])
diversity.describe().loc[["mean", "min", "max"]].round(2)

# %% [markdown]
# ## 5 Comparators
#
# After one MADPO update the comparators come apart: *raw* is the untrained base, *last*
# the team as it was at the start of the previous iteration, *current* the team as it is,
# *soft* the current team at a higher temperature. What mean return do you expect of each,
# and whose answers to one post should lie furthest apart?

# %%
optimizer = TeamOptimizer(team.policy, config)
update_madpo(team.policy, optimizer, selected, Stream(SEED, "madpo"), config)
rows = {}
for kind in ("raw", "last", "current", "soft"):
    comparator = Comparator(kind, team.policy, structure="dec",
                            soft_temperature=config.soft_temperature)
    comparator.load_state(team.comparator.state())  # it remembers the earlier weights
    comparator.begin_iteration()
    groups = comparator.sample(team.train_tasks, SAMPLES, Stream(SEED, "compare"))
    returns = torch.tensor([[t.total_return for t in group] for group in groups])
    rows[kind] = {"mean return": float(returns.mean()),
                  "spread within a post": float(returns.std(dim=1).mean())}
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# *current* against *raw* shows what the one update has changed. *soft* has the same
# weights as *current*: it is meant to trade return for spread. Does it, here?
#
# After a single update *last* and *raw* are the same team, so with the same random
# numbers they give the same answers: *last* is the start of the previous iteration. From the
# third iteration on they differ.

# %%
assert rows["raw"] == rows["last"]
assert rows["current"] != rows["last"]

# %% [markdown]
# The fifth kind, *model*, is another model, untrained. Dec-Cen uses it by default, as a
# coordinator: one model of about the team's joint size reads both roles and writes both
# parts in tags. Its text is cut into the agents' parts, and each part becomes an action
# of the agent under the agent's *own* prompt, so that the team can learn from it. Is it
# better than the agents?

# %%
central = build_team(replace(config, paradigm="dec-cen", comparator="model")).comparator
central.begin_iteration()
groups = central.sample(team.train_tasks, SAMPLES, Stream(SEED, "compare"))
returns = torch.tensor([[t.total_return for t in group] for group in groups])
print(f"{config.central_model}: mean return {returns.mean():.3f}, "
      f"spread within a post {returns.std(dim=1).mean():.3f}")
prompts = [[action.prompt_ids for action in group[0].actions[0]]
           for group in (groups[0], played[0])]
assert prompts[0] == prompts[1]  # its parts stand under the agents' own prompts

# %% [markdown]
# The sixth kind, *api*, is a model that runs elsewhere: any OpenAI-compatible chat
# endpoint, such as DeepSeek's (paper, Table 2b) or a server that you start with vLLM. It
# is told what a team of its structure is told, as chat messages, and its texts become the
# agents' actions as above. Nothing is sent from here: the cell only makes the settings,
# as a profile would hold them. How many requests would one iteration send?

# %%
elsewhere = replace(config, comparator="api", endpoint={
    "url": "https://api.deepseek.com", "model": "deepseek-v4-pro",
    "key_variable": "DEEPSEEK_API_KEY",  # the NAME of the variable, never the key
    "options": {"thinking": {"type": "disabled"}}})
requests = TASKS * SAMPLES * elsewhere.num_agents
print(f"{requests} requests an iteration, one for every agent's every answer")
elsewhere.endpoint_settings

# %% [markdown]
# The key stands in the environment variable of that name, in the shell that starts the
# run, and nowhere else. Every answer is kept on disk, so that a run that goes on, or is
# repeated, pays for none twice; the manifest says how many tokens were used, and with
# prices what they cost. The README lists all settings.
#
# > **Common mistake.** A comparator that reasons before it answers, under a token limit
# > meant for the answer alone. If all of its first answers are empty the run stops; if
# > some are, the agents win these comparisons for nothing, and on the plot
# > `preferences/comparator_empty` rises. The option above switches reasoning off.

# %% [markdown]
# > **Common mistake.** A "last" comparator that loads the *newest* checkpoint. It equals
# > "current", and the experiment says nothing. Check: the distance of the two sets of
# > weights must be above zero after an update.

# %% [markdown]
# ## 6 The replay buffer and what lambda does
#
# Each iteration adds one shard. In the decay buffer a shard of age $a$ is drawn from
# with weight $\lambda^a$. Compute the shares of four shards yourself:

# %%
weights = [DECAY**age for age in range(4)]
shares = [weight / sum(weights) for weight in weights]
buffer = ReplayBuffer("decay", decay=DECAY)
for iteration in range(4):
    buffer.add([PreferencePair(p.winner, p.loser, p.winner_is_agent, iteration)
                for p in selected])
assert all(abs(a - b) < 1e-12 for a, b in zip(buffer.weights(), shares))
[round(share, 3) for share in shares]

# %% [markdown]
# The same for other $\lambda$, and for the other modes. *offline* holds a single shard:
# all pairs are collected before training, by the untrained team, and nothing is added. (A
# run collects as many of them at once as the other modes do over all iterations; here it
# is the first shard.) Which mode trains on the newest pairs only, and which one forgets
# nothing?

# %%
modes = {"lambda 0": ("decay", {"decay": 0.0}), "lambda 0.2": ("decay", {"decay": 0.2}),
         "lambda 0.8": ("decay", {"decay": 0.8}), "lambda 1": ("decay", {"decay": 1.0}),
         "online": ("online", {}), "delay 1": ("delay", {"delay": 1}),
         "offline": ("offline", {})}
table = {}
for name, (mode, options) in modes.items():
    other = ReplayBuffer(mode, **options)
    other.shards = buffer.shards[:1] if mode == "offline" else buffer.shards
    drawn = other.sample(Stream(SEED, f"notebook 02/{name}").generator())
    ages = [3 - pair.iteration for pair in drawn]
    table[name] = [ages.count(age) / len(ages) for age in range(4)] + [len(drawn)]
table = pd.DataFrame(table, index=["age 0", "age 1", "age 2", "age 3", "pairs"]).T
table.round(2)

# %% [markdown]
# The same as bars: the darker a bar, the newer what it trains on.

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
left = torch.zeros(len(table))
for age, colour in enumerate(("#08306B", "#2171B5", "#6BAED6", "#C6DBEF")):
    share = torch.tensor(table[f"age {age}"].values, dtype=torch.float)
    axes.barh(range(len(table)), share, left=left, color=colour)
    left = left + share
axes.set(yticks=range(len(table)), yticklabels=table.index, xlim=(0, 1),
         xlabel="share of the training set, dark: newest shard, pale: oldest",
         title=f"What each buffer trains on - {PROFILE}, 4 shards, one draw")
axes.invert_yaxis()
newest = table["age 0"]
finding = (f"With lambda 0.8 the newest shard makes up {newest['lambda 0.8']:.0%} of "
           f"the training set, with lambda 0.2 {newest['lambda 0.2']:.0%}.")
show_figure(figure, "buffers", f"Stacked bars of shard ages. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# MARLHF uses $\lambda=0.8$: a reward model wants variety. MADPO uses $0.2$: it imitates
# its winners, and old winners are weak ones (paper, section 5.3 and appendix D.2).
#
# ## Exercises
#
# 1. With a Bradley-Terry annotator at $\tau=2$, how many of the selected pairs have a
#    negative gap? What does that do to "learn from the winner"?
# 2. Rank by `good_comparator` with `component="length"`, which puts the pairs first whose
#    comparator did well in that part of the reward. Whose answers win now?
# 3. How many comparisons must tie before a post gives fewer than $k$ pairs?
#
# Solutions: notebooks/solutions/02_preference_collection_solutions.ipynb
