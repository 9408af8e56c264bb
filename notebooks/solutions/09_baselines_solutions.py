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
# # Solutions to 09 Baselines
#
# Small runs on the pocket profile (a few tasks, few samples): they show how to measure,
# not which method is better.

# %%
import tempfile

import pandas as pd

from mapl_core.baselines import DiscussionTeam
from mapl_core.evaluation import evaluate
from mapl_core.profiles import load_profile
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl

profile = load_profile("pocket")


def mean(by_task, metric):
    """Mean of a metric over the tasks that have it."""
    return pd.Series([m[metric] for m in by_task.values() if metric in m]).mean()


# %% [markdown]
# **1.** Same base, same tasks, same random numbers; only the prompt differs. Compare the
# score and the share of answers in which a section is missing. One seed says how these
# samples differ; an interval needs more tasks and seeds (see 11).

# %%
rows = {}
for method, paradigm in (("single_raw", "single"), ("untrained", "cen-cen")):
    team = build_team(profile.config("tldr", method, paradigm, eval_tasks=16))
    by_task, _ = evaluate(team.policy, team.eval_tasks, 4, Stream(0, "solution"))
    names = ("score", "unparsed/agent0", "unparsed/agent1")
    rows[paradigm] = {name: mean(by_task, name) for name in names}
pd.DataFrame(rows).round(3)

# %% [markdown]
# **2.** The last step of the new protocol shows agent 0 its own text and agent 1's: that
# is a discussion's prompt. So a sequence gives the drafts, and `discussion_prompts` the
# second look of agent 0; agent 1's text stays. Sampling, splitting and scoring are there
# already; all that is new is who reads what.

# %%
team = build_team(profile.config("tldr", "sequential", eval_tasks=4))
domain, sequence = team.domain, team.policy
second = DiscussionTeam(domain, "dec", [member.base for member in sequence.members],
                        [member.settings for member in sequence.members],
                        prompt_form="chat", sampler=sequence.sampler)


class SecondLook(type(sequence)):
    """A sequence after which agent 0 writes once more."""

    def sample(self, tasks, samples, stream, *, temperature=None):
        groups = super().sample(tasks, samples, stream, temperature=temperature)
        for task, group in zip(tasks, groups):
            for place, first in enumerate(group):
                texts = list(first.responses[-1])
                asked = domain.discussion_prompts(task, texts)[0]
                (again,) = self._answers(0, [(task, place)], [asked], 1, stream,
                                         temperature)
                final = (again, first.actions[-1][1])
                group[place] = self._scored(task, [first.actions[-1], final],
                                            [texts, [again.text, texts[1]]])
        return groups


again = SecondLook(domain, "dec", [member.base for member in sequence.members],
                   [member.settings for member in sequence.members],
                   prompt_form="chat", sampler=sequence.sampler)
for name, protocol in (("sequence", sequence), ("second look", again),
                       ("discussion", second)):
    by_task, played = evaluate(protocol, team.eval_tasks, 4, Stream(0, "solution"))
    texts = {len(t.actions) for t in played}
    print(f"{name}: score {mean(by_task, 'score'):.3f}, rounds of texts {texts}")

# %% [markdown]
# The counts need care: agent 1's text stands in both turns of the trajectory but was
# written once. Count responses, not turns, when you report this protocol's price.
#
# **3.** With one pass the ratio stays 1: the deviation and the clipped share are 0. With
# four, the later steps move away from the probabilities of the sampling, the ratio's
# deviation grows, and the clip cuts the gradient of answers that have gone far enough.
# Four steps on the same answers cost no further interaction; whether they help is a
# question for several seeds.


# %%
def ppo(passes):
    """The last iteration's numbers of a small PPO run."""
    config = profile.config("tldr", "single_ppo", "single", train_tasks=16,
                            eval_tasks=8, iterations=2, passes=passes)
    result = run_mapl(config, tempfile.mkdtemp(), progress=False)
    names = ("train/ratio_deviation", "train/clip_fraction", "score")
    return {name: result.final(name) for name in names}


table = pd.DataFrame({f"{passes} passes": ppo(passes) for passes in (1, 4)})
assert table.loc["train/ratio_deviation", "1 passes"] == 0
table.round(3)
