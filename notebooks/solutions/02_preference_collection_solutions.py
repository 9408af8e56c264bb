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
# # Solutions to 02 Preference collection
#
# The exercises on generated returns: nothing here needs a model.

# %%
import torch

from mapl_core.annotators import make_annotator
from mapl_core.buffers import Response, Trajectory, label_pairs, select_pairs
from mapl_core.seeding import Stream


def toy(total, text, **parts):
    """A one-turn trajectory with a given return and named reward parts."""
    action = Response((1,), (2,), text, False)
    components = parts or {"all": total}
    return Trajectory("toy", ((action,),), ((text,),), (total,), (components,))


def returns(name, count):
    """Returns in tenths between 0 and 3."""
    generator = Stream(0, name).generator()
    return (torch.randint(0, 31, (count,), generator=generator) / 10).tolist()


agents = [toy(value, f"agents {j}") for j, value in enumerate(returns("agents", 400))]
others = [toy(value, f"other {j}") for j, value in enumerate(returns("others", 400))]

# %% [markdown]
# **1.** At $\tau=2$ a gap of 1 is contradicted with probability
# $1/(1+e^{0.5})=0.38$. Among the pairs with the best "winners" fewer are wrong, since a
# winner with a high return rarely has a better loser; but it happens, and then the team
# is pushed away from the better answer.

# %%
generator = Stream(0, "annotator").generator()
annotator = make_annotator("bradley_terry", temperature=2.0, generator=generator)
pairs, _ = label_pairs(agents, others, annotator)
best = select_pairs(pairs, 100)
for name, of in (("all pairs", pairs), ("the best 100", best)):
    wrong = sum(pair.gap < 0 for pair in of) / len(of)
    print(f"{name}: {wrong:.0%} contradict the oracle")

# %% [markdown]
# **2.** `good_comparator` keeps the pairs in which the comparator is at least as good in
# that part of the reward. The comparator then wins more often than the agents do: the
# rule looks for what the agents do not have yet.

# %%
lengths = [toy(a, f"a{j}", length=a % 1) for j, a in enumerate(returns("x", 400))]
against = [toy(b, f"b{j}", length=b % 1) for j, b in enumerate(returns("y", 400))]
pairs, _ = label_pairs(lengths, against, make_annotator("oracle"))
kept = select_pairs(pairs, len(pairs), by="good_comparator", component="length")
wins = [sum(not pair.winner_is_agent for pair in of) / len(of) for of in (pairs, kept)]
print(f"comparator wins {wins[0]:.0%} of all pairs and {wins[1]:.0%} of the kept ones")
assert wins[1] > wins[0]

# %% [markdown]
# **3.** More than $m-k$ of them: with $m=8$ and $k=4$, five ties leave three pairs, and
# all three are kept. Fewer ties are enough where the same pair of texts comes twice: it
# is kept once.

# %%
tied = [toy(1.0, f"t{j}") for j in range(5)] + [toy(2.0, f"w{j}") for j in range(3)]
ones = [toy(1.0, f"c{j}") for j in range(8)]
pairs, ties = label_pairs(tied, ones, make_annotator("oracle"))
assert (ties, len(select_pairs(pairs, 4))) == (5, 3)
