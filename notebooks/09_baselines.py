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
# # 09 Baselines
#
# What a team that learns together must beat: one agent of the team's joint size, and
# teams that only talk.
#
# **After it you can** say what each baseline of Table 1 is told, sees and spends, write
# the three test-time protocols in a few lines, train a single agent with GRPO, PPO or DPO
# on the team's budget, and compare methods without comparing budgets.
#
# **It needs** 05_tldr for the task, and 03_marlhf and 04_madpo for the losses. It is also
# the job that `./reproduce.sh` runs for the single-agent rows and for the sequential and
# the discussion team of Table 1, in every domain. (The parallel team is the untrained
# team: its row comes from the domain's own notebook, as do MAGRPO and CoLLM.)
#
# The names: GRPO is group relative policy optimisation, PPO proximal policy optimisation,
# DPO direct preference optimisation. GRPO and DPO run through TRL's trainers; PPO is this
# project's actor-critic with one agent and a clip.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/mapl-notebooks/blob/main/notebooks/09_baselines.ipynb)
#
# | machine | minutes | memory | date |
# |---|---|---|---|
# | 2 CPU cores | 1.0 | 1.3 GiB | 2026-11-30 |

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
from dataclasses import replace
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # plain bars are meant

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from IPython.display import Markdown, display

import mapl_core
from mapl_core import figures, runs
from mapl_core.baselines import DiscussionTeam, SequentialTeam
from mapl_core.evaluation import evaluate
from mapl_core.models import dtype_for
from mapl_core.notebook import check_parameters, show_figure
from mapl_core.policies import JointPolicy
from mapl_core.profiles import load_profile
from mapl_core.sampling import sample_responses
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.tokens import decode_response
from mapl_core.train import run_mapl

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = dtype_for(torch.cuda.get_device_capability() if device == "cuda" else None)
print(f"python {sys.version.split()[0]}, mapl_core {mapl_core.__version__}, "
      f"torch {torch.__version__}, transformers {transformers.__version__}; "
      f"device {device}, model weights {dtype}")

# %% tags=["parameters"]
PROFILE = "pocket"  # pocket (any laptop), small (a real model) or paper (a GPU)
DOMAIN = "tldr"  # tldr, coophe, bfcl or travel
METHOD = "single_grpo"  # single_raw, _grpo, _ppo or _dpo; sequential or discussion
PARADIGM = "single"  # single for one agent; dec-dec for sequential and discussion
SEED = 0  # seed of every random stream of the run
LOOK_TASKS = 4  # evaluation tasks on which section 3 compares the protocols
LOOK_SAMPLES = 4  # joint answers to each of them
OVERRIDES = {}  # values that replace the profile's, such as {"clip_ratio": 0.1}
OUTPUT_DIR = ""  # folder of the results; empty: a temporary one

# %%
check_parameters(globals(), PROFILE=str, DOMAIN=str, METHOD=str, PARADIGM=str, SEED=int,
                 LOOK_TASKS=int, LOOK_SAMPLES=int, OVERRIDES=dict, OUTPUT_DIR=str)
profile = load_profile(PROFILE)
config = profile.config(DOMAIN, METHOD, PARADIGM, seed=SEED, **OVERRIDES)
folder = Path(OUTPUT_DIR or tempfile.mkdtemp(prefix="mapl-baselines-"))
torch.set_num_threads(config.threads)
print(f"{runs.METHOD_NAMES[METHOD]} on {DOMAIN}, seed {config.seed}, models "
      f"{sorted(set(config.policy_models))}; results in {folder}")

# %% [markdown]
# ## 1 What each of them is told
#
# The task is always the same; the words around it are not. The single agent must write
# both parts in tagged sections, as a coordinator does, but nobody tells it the roles.
# That is what sets it apart from a coordinator. Look at what is added in each form.

# %%
looked_at = profile.config(DOMAIN, "untrained", seed=SEED, eval_tasks=LOOK_TASKS)
parallel = build_team(looked_at)
tasks, domain = parallel.eval_tasks, parallel.domain
task, drafts = tasks[0], [f"(text of agent {n})" for n in range(domain.num_agents)]
shared = domain.task_text(task)
print(f"--- everyone reads:\n{shared}\n")
for name, prompt in {
        "agent 1 of a parallel team": domain.prompts(task)[1],
        "agent 1 of a sequence": domain.sequential_prompt(1, task, drafts[:1]),
        "agent 1 in a discussion": domain.discussion_prompts(task, drafts)[1],
        "a coordinator": domain.coordinator_prompt(task),
        "the single agent": domain.single_prompt(task)}.items():
    print(f"--- {name}, besides:\n{prompt.replace(shared, '').strip()}\n")

# %% [markdown]
# ## 2 Three protocols in a few lines
#
# Parallel: nobody reads anybody. Sequential: agent 1 reads agent 0's finished answer.
# Discussion: everyone drafts, reads all drafts, and writes again. Each is a few lines
# around one function, `write`, that gives an agent a prompt and gets its text. Here it
# is greedy, so that equal prompts give equal texts.

# %%
def write(agent, prompt):
    """One greedy answer of an untrained agent."""
    member = parallel.policy.members[agent]
    settings = replace(member.settings, temperature=0.0)
    ids = parallel.policy.encode(member, prompt, task)
    uniforms = Stream(SEED, "greedy").uniforms(["unused"], settings.max_new_tokens)
    ((sample,),) = sample_responses(
        member.base, None, [ids], uniforms, samples=1, settings=settings,
        skeletons=[domain.skeleton(agent, task)],
        max_cached_tokens=config.cached_tokens)
    return decode_response(member.base.tokenizer, sample.token_ids)


def in_parallel():
    return [write(agent, prompt) for agent, prompt in enumerate(domain.prompts(task))]


def in_sequence():
    parts = []
    for agent in range(domain.num_agents):
        text = write(agent, domain.sequential_prompt(agent, task, parts))
        parts.append(domain.split_joint(text)[agent] or text)  # tags are optional here
    return parts


def in_discussion():
    prompts = domain.discussion_prompts(task, in_parallel())
    return [write(agent, prompt) for agent, prompt in enumerate(prompts)]


# %% [markdown]
# Read the three joint answers. Which agent's text is the same under two protocols, and
# why must it be?

# %%
answers = {"parallel": in_parallel(), "sequential": in_sequence(),
           "discussion": in_discussion()}
for name, texts in answers.items():
    print(f"--- {name}, reward {domain.reward(texts, task).total:.2f}")
    for agent, text in enumerate(texts):
        print(f"agent {agent}: {text}")
assert answers["parallel"][0] == answers["sequential"][0]

# %% [markdown]
# The module's teams do the same for many tasks and samples at once. They share the bases,
# and their random numbers have the same keys, so that what differs is what agents read.

# %%
def team_of(kind):
    """A team of the same untrained agents under another protocol."""
    members = parallel.policy.members
    return kind(domain, "dec", [member.base for member in members],
                [member.settings for member in members],
                prompt_form=config.prompt_form, sampler=parallel.policy.sampler)


teams = {"parallel": team_of(JointPolicy), "sequential": team_of(SequentialTeam),
         "discussion": team_of(DiscussionTeam)}
for name, team in teams.items():
    ((played,),) = team.sample([task], 1, Stream(SEED, "greedy"), temperature=0.0)
    assert list(played.responses[-1]) == answers[name], name

# %% [markdown]
# > **Common mistake.** Showing agent 1 *some* answer of agent 0, from another sample of
# > the same task. Nothing crashes and the scores look plausible; but the pair that is
# > scored never was a conversation. How to check: the prompt of agent 1 must end with the
# > very text that stands beside its answer.

# %% [markdown]
# ## 3 The same tasks, the same agents: what does talking buy?
#
# A few tasks, several samples each. `read` and `written` are tokens for one joint
# answer: with the score they are the price of a protocol. `rounds` is how often somebody
# must wait for somebody else, which parallel hardware cannot shorten.

# %%
rows, waits = [], {"parallel": 1, "sequential": domain.num_agents, "discussion": 2}
for name, team in teams.items():
    by_task, played = evaluate(team, tasks, LOOK_SAMPLES, Stream(SEED, "notebook 09"))
    actions = [action for t in played for turn in t.actions for action in turn]
    rows.append({
        "protocol": name,
        domain.headline: pd.DataFrame(by_task).loc[domain.headline].mean(),
        "reward": pd.Series([t.total_return for t in played]).mean(),
        "texts": len(actions) / len(played),
        "rounds": waits[name],
        "read": sum(len(a.prompt_ids) for a in actions) / len(played),
        "written": sum(len(a.token_ids) for a in actions) / len(played)})
talk = pd.DataFrame(rows).set_index("protocol")
talk.round(3)

# %% [markdown]
# With so few tasks the order of the three says little. The numbers of texts are exact (a
# discussion writes twice as many), those of tokens are means of these samples: every text
# that an agent reads is a longer prompt.
#
# > **Common mistake.** Calling a protocol free because nothing was trained. Training is
# > paid once, talking with every answer. How to check: put tokens per answer beside the
# > score, as in the right panel below.

# %% [markdown]
# ## 4 One run
#
# The method chosen above, on the whole evaluation set, with the same evaluation and the
# same files as any other run. A single agent's text is cut at its tags and scored like a
# coordinator's; `unparsed` is the share of answers without that agent's section. If the
# run stops, the same call goes on from the last finished iteration.

# %%
result = run_mapl(config, folder)
curve = pd.read_csv(folder / "metrics.csv")
evaluation = pd.read_csv(folder / "evaluation.csv")
shown = curve[curve.metric.str.fullmatch(rf"{domain.headline}|reward|unparsed/.*")]
shown.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# The method's own numbers. For GRPO read `tied_groups` (nothing to learn from) and
# `clip_fraction`; for PPO `ratio_deviation`, which is 0 when every batch is used for one
# step only; for DPO `margin` and `accuracy`. Without training the table is empty.

# %%
own = curve[curve.metric.str.match(r"(preferences|train)/")]
own.pivot_table(index="metric", columns="iteration", values="value").round(3)

# %% [markdown]
# > **Common mistake.** A "PPO" whose clip never acts. With one step for each batch of
# > fresh answers every ratio is 1, and any clip gives the same gradient. How to check:
# > `train/ratio_deviation` must be above 0; `passes` sets the steps.

# %% [markdown]
# ## 5 Equal budgets
#
# A method may look better because it was trained on more. The budget is the number of
# joint responses *trained on* (the paper's env steps); the second column counts all that
# were played for it, by agents and comparator. Work out the first column by hand before
# you run the cell: tasks, iterations, and G responses (or k pairs of two) for each.

# %%
def budget(config):
    """Joint responses that a run trains on, and that it plays for training at all."""
    visits = config.train_tasks * config.iterations
    learned = visits * config.epochs * config.num_generations
    collected = visits * 2 * config.samples_per_task  # agents and comparator
    if config.method in ("madpo", "single_dpo"):
        return visits * config.epochs * 2 * config.pairs_per_task, collected
    return learned, learned + (collected if config.method == "marlhf" else 0)


trained = ["single_grpo", "single_ppo", "single_dpo", "magrpo", "collm_cc", "marlhf",
           "madpo"]
budgets = {}
for method in trained:
    paradigm = "single" if method in runs.SINGLE_AGENT else "dec-dec"
    name = runs.METHOD_NAMES[method]
    budgets[name] = budget(profile.config(DOMAIN, method, paradigm))
pd.DataFrame(budgets, index=["trained on", "played"]).T

# %% [markdown]
# Preferences are cheap to train on and dear to collect: m responses are played on either
# side, k pairs are kept. This run's own counts, beside the formula (ties can only lower
# them; what trains nothing counts the answers of its evaluation, drafts included):

# %%
last = int(curve.iteration.max())
end = curve[curve.iteration == last].set_index("metric").value
counted = end[end.index.str.startswith("count/")].astype(int)
planned = budget(config)[0] if config.trains else 0
assert counted["count/env_steps"] <= planned
print(f"planned {planned}, trained on {counted['count/env_steps']}")
counted.to_frame("joint responses, oracle calls, tokens")

# %% [markdown]
# ## 6 Both prices in one picture
#
# Left: this run over its training, one thin line a task. Right: what the protocols score
# against the tokens they write for one answer. Training moves up; talking moves right.

# %%
per_task = evaluation[evaluation.metric == domain.headline]
means = per_task.groupby("iteration").value.mean()
steps = curve[curve.metric == domain.headline].set_index("iteration").env_steps
name, colours = runs.METHOD_NAMES[METHOD], figures.COLOURS
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
for _, line in per_task.groupby("task_id"):
    axes[0].plot(steps[line.iteration], line.value, color="#BBBBBB", linewidth=0.7)
axes[0].plot(steps[means.index], means.values, color=colours[METHOD], marker="o")
axes[0].set(xlabel="env steps (trained joint responses)", ylabel=domain.headline,
            ylim=(-0.02, 1.02), title=name)
for protocol, method, marker in (("parallel", "untrained", "o"),
                                 ("sequential", "sequential", "s"),
                                 ("discussion", "discussion", "^")):
    at, colour = talk.loc[protocol], colours[method]
    axes[1].plot(at.written, at[domain.headline], marker, color=colour)
    axes[1].annotate(protocol, (at.written, at[domain.headline]), xytext=(5, 5),
                     textcoords="offset points", color=colour)
axes[1].set(xlabel="tokens written for one answer", ylim=(-0.02, 1.02),
            title=f"test-time teams, {LOOK_TASKS} tasks")
axes[1].margins(x=0.25)
number = per_task.task_id.nunique()
figure.suptitle(f"{DOMAIN} - {PROFILE}, {number} tasks, seed {SEED}")
finding = (f"{name}: {domain.headline} {means[0]:.2f} at the start and "
           f"{means[last]:.2f} at the end ({number} tasks, one run; lines are tasks). "
           f"A discussion writes {talk.written['discussion']:.0f} tokens an answer, a "
           f"parallel team {talk.written['parallel']:.0f}.")
show_figure(figure, "baselines", f"Two panels. {finding}", OUTPUT_DIR)
display(Markdown(finding))

# %% [markdown]
# The answers themselves, before and after:

# %%
examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
for iteration in sorted({"0", str(last)}):
    example = examples[iteration][0]
    print(f"--- after {iteration} iterations, {example['task']}, "
          f"reward {example['reward']:.2f}")
    for turn in example["responses"]:
        for agent, text in enumerate(turn):
            print(f"agent {agent}: {text}")

# %% [markdown]
# ## Exercises
#
# 1. Sample the raw single agent and the raw coordinator (`METHOD = "untrained"`, paradigm
#    `cen-cen`) on the same tasks. How much are the roles in the prompt worth?
# 2. Add a fourth protocol: a sequence in which agent 0 is asked once more after it has
#    read agent 1. Which of the module's pieces do you need?
# 3. Run PPO with `OVERRIDES = {"passes": 1}` and with `{"passes": 4}`. What happens to
#    `train/ratio_deviation`, `train/clip_fraction` and the score?
#
# Solutions: notebooks/solutions/09_baselines_solutions.ipynb
