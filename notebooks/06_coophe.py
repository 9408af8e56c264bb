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
# # 06 CoopHE
#
# Two agents write one Python program: one writes a helper function `aux`, the other the
# function that is asked for and may call it. Neither sees the other's code; the two are
# put together and tested.
#
# **After it you can** take the oracle reward of CoopHE apart on any two functions, say
# what keeps model-written programs from harming you or cheating their tests, explain why
# a team that ignores its helper is hard to train out of it, and train it.
#
# **It needs** 03_marlhf or 04_madpo for the methods. It is also the job that
# `./reproduce.sh` runs for every CoopHE row of Table 1.
#
# MADPO, MARLHF and MAGRPO are the methods of 03 and 04. A paradigm is
# (agents)-(comparator), each decentralised, Dec, or centralised, Cen.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/06_coophe.ipynb)
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
import tempfile
import warnings
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
from mapl_core.annotators import oracle
from mapl_core.buffers import label_pairs, select_pairs
from mapl_core.domains import get_domain
from mapl_core.domains.base import Task
from mapl_core.evaluation import evaluate
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.profiles import load_profile
from mapl_core.rewards.coophe import coophe_reward
from mapl_core.rewards.coophe import evaluate as examine
from mapl_core.sandbox import Limits, Program, Sandbox
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
LOOK_TASKS = 8  # evaluation problems that sections 4 and 6 look at
LOOK_SAMPLES = 8  # joint answers to each of them
OVERRIDES = {}  # values that replace the profile's, such as {"beta": 0.5}
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, METHOD=str, PARADIGM=str, SEED=int,
                 LOOK_TASKS=int, LOOK_SAMPLES=int, OVERRIDES=dict, OUTPUT_DIR=str)
config = load_profile(PROFILE).config("coophe", METHOD, PARADIGM, seed=SEED,
                                      **OVERRIDES)
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-coophe-"))
torch.set_num_threads(config.threads)
print(f"{config.method} {config.paradigm}, seed {config.seed}, models "
      f"{sorted(set(config.policy_models))}; results in {folder}")

# %% [markdown]
# ## 1 The task
#
# A problem is a signature with its docstring, and tests that the agents do not see. Look
# at the two prompts: the main agent is told that a helper will be there, but not what it
# will compute or which arguments it takes.

# %%
domain = get_domain("coophe", **config.domain_options)
task = domain.load_tasks("eval", config.source, 1)[0]
for agent, prompt in enumerate(domain.prompts(task)):
    print(f"--- agent {agent} reads:\n{prompt}\n")
print("--- the tests:\n" + task.fields["test"])

# %% [markdown]
# ## 2 The oracle reward, by hand
#
# Five stages (paper, appendix C.3). After a failed second or third one the oracle stops.
#
# 1. *aux*, 0.4: there is a helper that returns something;
# 2. *main*, 0.6: there is the function that was asked for, with its arguments;
# 3. *syntax*, 0.5: both together are Python;
# 4. *tests*, 1.0 times the share that passes;
# 5. *call*, 1.5: the helper is really called, by more than a mere wrapper, and at least
#    one test passes.

# %%
def draft_reward(aux, main, parses, passed, cooperates):
    """The five stages, from what was found: booleans, and the share of tests passed."""
    parts = {"aux": 0.4 * aux, "main": 0.6 * main,
             "syntax": 0.0, "tests": 0.0, "call": 0.0}
    if main and parses:
        parts |= {"syntax": 0.5, "tests": 1.0 * passed,
                  "call": 1.5 * (aux and cooperates and passed > 0)}
    return parts

# %% [markdown]
# One problem, seven teams. Before you look: what does a main function earn that does all
# the work itself and never looks at `aux`?

# %%
problem = Task("square", "pocket", "eval", {
    "task_id": "square", "entry_point": "f",
    "prompt": 'def f(x):\n    """square x, then add 3."""\n',
    "test": "def check(candidate):\n    assert candidate(4) == 19\n"
            "    assert candidate(-5) == 28\n"})
HELPER, WRONG = "def aux(x):\n    return x * x", "def aux(x):\n    return 2 * x"
WHOLE, CALLS = "def aux(x):\n    return x * x + 3", "def f(x):\n    return aux(x) + 3"
ALONE, WRAPPER = "def f(x):\n    return x * x + 3", "def f(x):\n    return aux(x)"
#                         texts               aux    main  parses passed cooperates
teams = {"divided": ((HELPER, CALLS), (True, True, True, 1.0, True)),
         "main does it all": ((HELPER, ALONE), (True, True, True, 1.0, False)),
         "and the helper is idle": (("", ALONE), (False, True, True, 1.0, False)),
         "aux does it all": ((WHOLE, WRAPPER), (True, True, True, 1.0, False)),
         "a wrong helper": ((WRONG, CALLS), (True, True, True, 0.0, True)),
         "one misses its return": (("def aux(x):\n    x * x", CALLS),
                                   (False, True, True, 0.0, True)),
         "main takes two": ((HELPER, "def f(x, y):\n    return aux(x) + y"),
                            (True, False, True, 0.0, False))}
rows = {}
for name, (texts, found) in teams.items():
    reward = coophe_reward(list(texts), problem)
    for part, value in draft_reward(*found).items():
        assert abs(value - reward.parts[part]) < 1e-9, (name, part, reward.parts)
    rows[name] = reward.parts | {"total": reward.total}
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# ## 3 Programs that want to win
#
# The texts come from a model that is trained to raise its score. So a program is never
# run in the process that decides: it runs shut in, and only arguments and results cross,
# as plain data. These were the means on this machine:

# %%
print(domain.provenance(config.source)["sandbox"])

# %% [markdown]
# Five programs that would pass a careless test, or never end. Each must fail, and soon:

# %%
cheats = {
    "equals all": "class yes:\n def __eq__(s, o): return True\ndef f(x): return yes()",
    "leaves early": "import sys\ndef f(x): sys.exit(0)",
    "no limit": "def f(x):\n    return 10 ** 10 ** 9",
    "reads your settings": "import os\ndef f(x):\n"
                           "    return 7 if os.environ.get('HOME') else 0",
    "starts a process": "import subprocess\ndef f(x):\n"
                        "    return 7 - subprocess.run(['true']).returncode",
}
tests = ["def check(candidate):\n    assert candidate(2) == 7\n"]
with Sandbox(limits=Limits(seconds=1.0)) as hasty:  # training grants five seconds
    verdicts = {name: hasty.run(Program(text, "f"), tests)[0]
                for name, text in cheats.items()}
assert not any(verdict.passed for verdict in verdicts.values())
pd.DataFrame({name: {"verdict": verdict.status, "why": verdict.message[:60]}
              for name, verdict in verdicts.items()}).T

# %% [markdown]
# > **Common mistake.** Reading a high test score as good code. Look at the programs: where
# > a sandbox is weak, training finds the hole before you do. How to check: read the best
# > samples of the last iteration, not the average ones.

# %% [markdown]
# ## 4 The untrained team
#
# Some evaluation problems. How often does the main function call its helper, and what
# does each choice earn?

# %%
def look_at(played):
    """For every joint answer: does main call aux (a mere wrapper does not count), does
    the program run, share of tests passed, reward of the last turn."""
    rows = []
    for trajectory in played:
        found = examine(list(trajectory.responses[-1]), problems[trajectory.task_id])
        rows.append({"calls": found.calls and not found.wrapper,
                     "runs": bool(found.verdicts), "passed": found.pass_rate,
                     "reward": trajectory.rewards[-1]})
    return pd.DataFrame(rows)


look = {**OVERRIDES, "eval_tasks": LOOK_TASKS}
team = build_team(load_profile(PROFILE).config("coophe", "untrained", PARADIGM,
                                               seed=SEED, **look))
problems = {task.id: task for task in team.eval_tasks}
_, played = evaluate(team.policy, team.eval_tasks, LOOK_SAMPLES,
                     Stream(SEED, "notebook 06"))
before = look_at(played)
for agent, text in enumerate(max(played, key=lambda t: t.total_return).responses[-1]):
    print(f"--- the best answer, agent {agent}:\n{text}")
del team
by_call = before[before.runs].groupby("calls")[["passed", "reward"]]
by_call.agg(["mean", "size"]).round(2)

# %% [markdown]
# ## 5 The trap: a helper nobody calls
#
# Take the main agent's side. The helper is right with probability $q$. A main function
# that works alone earns 0.4 + 0.6 + 0.5 + 1.0 = 2.5, whatever the helper computes (one
# that is not there at all costs its 0.4). One that calls it earns 4.0 if the helper is
# right, and 1.5 if it is not and so fails every test: $1.5 + 2.5 q$. So calling
# pays only above $q = 0.4$. Below it the best answer is to work alone; and for a helper
# that nobody calls, right and wrong are worth the same. That is the optimum of the idle
# agent that the paper describes: no agent gains by changing alone.

# %%
right = np.linspace(0, 1, 101)
alone, call = np.full_like(right, 2.5), 1.5 + 2.5 * right
assert abs(coophe_reward([HELPER, ALONE], problem).total - 2.5) < 1e-9
assert abs(coophe_reward([HELPER, CALLS], problem).total - call[-1]) < 1e-9
assert abs(coophe_reward([WRONG, CALLS], problem).total - call[0]) < 1e-9
figure, axis = plt.subplots(figsize=(6, 3.2), constrained_layout=True)
axis.plot(right, alone, color="#666666", linestyle="--", label="main works alone")
axis.plot(right, call, color="black", label="main calls the helper")
axis.plot(0.4, 2.5, "o", color="black")
axis.set(xlabel="probability that the helper is right", ylabel="expected reward (of 4)")
axis.legend(frameon=False)
callers = before[before.calls]
sample = (f"teams whose main calls its helper pass {callers.passed.mean():.0%} of "
          "their tests" if len(callers) else "no team calls its helper")
finding = ("Exact, for a main function that is right in itself: the lines cross at "
           f"0.4. In the sample above, {sample}.")
show_figure(figure, "coophe_trap", f"Two lines. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# What lets a team out is data that holds the joint change. Of eight joint samples, some
# happen to have a right helper *and* a main function that calls it: 4.0. Pairs rank
# *joint* answers by return, so such a sample wins against every idle one, and both agents
# are pulled towards it at once. So what counts is that the team's own samples hold the
# joint change. A base that hardly ever cooperates is not helped by more of its pairs
# (paper, appendix D.1), and older shards hurt in this domain (D.2): the pairs must come
# from the present team, and of them the best (02_preference_collection).
#
# How rare is the joint change here, and does the selection of pairs enrich it? The answers
# of section 4, one half of them in the comparator's place:

# %%
groups, kept = {}, []
for trajectory in played:
    groups.setdefault(trajectory.task_id, []).append(trajectory)
for group in groups.values():
    half = len(group) // 2
    pairs, _ = label_pairs(group[:half], group[half:2 * half], oracle)
    kept += select_pairs(pairs, 1)  # the best pair of each problem
sides = {"all answers": before}
if kept:
    sides |= {"winners of kept pairs": look_at([pair.winner for pair in kept]),
              "losers of kept pairs": look_at([pair.loser for pair in kept])}
pd.DataFrame({
    name: {"calls its helper, all tests pass": (of.calls & (of.passed == 1)).mean(),
           "works alone, all tests pass": (~of.calls & (of.passed == 1)).mean()}
    for name, of in sides.items()}).T.round(2)

# %% [markdown]
# ## 6 Training
#
# The whole loop of Algorithm 1 or 2. It writes everything to the results folder, and goes
# on where it stopped if you interrupt it. The oracle scores the evaluation.

# %%
result = run_mapl(config, folder)
curve = pd.read_csv(folder / "metrics.csv")
evaluation = pd.read_csv(folder / "evaluation.csv")
names = ["reward", "pass", "strict_pass", "call"]  # strict_pass: all tests pass
means = evaluation[evaluation.metric.isin(names)].pivot_table(
    index="metric", columns="iteration", values="value").loc[names]
means.round(3)

# %% [markdown]
# ## 7 What changed
#
# Left: tests passed and cooperation. Right: what calling and working alone earn, before
# and after. If calling pays less than working alone, the rewards push the team towards
# the trap of section 5, whatever its pass rate.

# %%
team = build_team(load_profile(PROFILE).config("coophe", METHOD, PARADIGM, seed=SEED,
                                               **look))
if METHOD != "untrained":
    team.policy.load(folder / "adapters")
_, played = evaluate(team.policy, team.eval_tasks, LOOK_SAMPLES,
                     Stream(SEED, "notebook 06"))
after, last = look_at(played), int(evaluation.iteration.max())
tasks = evaluation.task_id.nunique()
steps = curve[curve.metric == "reward"].set_index("iteration").env_steps[means.columns]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
for name, marker, line in (("pass", "o", "-"), ("call", "s", "--")):
    axes[0].plot(steps, means.loc[name], color=figures.COLOURS[METHOD], marker=marker,
                 linestyle=line, label=name)
axes[0].set(xlabel="env steps (trained joint responses)", ylim=(0, 1), ylabel="share")
axes[0].legend(frameon=False)
earned = pd.DataFrame({when: found[found.runs].groupby("calls").reward.mean()
                       for when, found in (("before", before), ("after", after))})
earned = earned.reindex([False, True]).rename({False: "works alone", True: "calls aux"})
colours = [figures.COLOURS["untrained"], figures.COLOURS[METHOD]]
earned.plot.bar(ax=axes[1], rot=0, color=colours, xlabel="main function")
axes[1].set(ylabel="mean reward (of 4)", ylim=(0, 4))
figure.suptitle(f"CoopHE, {METHOD} {PARADIGM} - {PROFILE}, {tasks} tasks, seed {SEED}")
then, now = means[0], means[last]
finding = (f"Tests passed {then['pass']:.0%} before and {now['pass']:.0%} after {last} "
           f"iterations, cooperation {then.call:.0%} and {now.call:.0%}; "
           f"{tasks} tasks, one run.")
show_figure(figure, "coophe", f"Two panels. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# The same problem before and after, as the agents wrote it:

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in (str(0), str(last)):
    for example in examples[iteration][:2]:
        print(f"--- after {iteration} iterations, {example['task']}, "
              f"reward {example['reward']:.2f}")
        for agent, text in enumerate(example["responses"][-1]):
            print(f"agent {agent}:\n{text}")

# %% [markdown]
# ## 8 How it got there
#
# Ties, how often the winner of a kept pair was the agents', and the method's own figures.
# An empty table is right for the untrained team.

# %%
own = curve[curve.metric.str.match(r"(preferences|train|reward_model)/")]
own.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# ## Exercises
#
# 1. Draw section 5 from the helper's side: main calls with probability $c$. What does a
#    right helper earn more than a wrong one, and what if $c = 0$?
# 2. Write a main function that calls `aux`, passes all tests, and earns no 1.5. Then one
#    that uses `aux` for nothing useful and earns it.
# 3. Run this notebook with `OVERRIDES = {"domain_options": {"horizon": 2}}`: after the
#    first turn the agents read which test fails, and write again. Does `pass` rise?
#
# Solutions: notebooks/solutions/06_coophe_solutions.ipynb
