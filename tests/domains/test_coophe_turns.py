"""Two turns: a whole run with drafts, feedback of the environment, and revisions."""

from __future__ import annotations

import pytest

from mapl_core.domains.coophe import CoopheDomain
from mapl_core.profiles import RunConfig
from mapl_core.rewards import Reward
from mapl_core.train import run_mapl


@pytest.mark.slow
@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_two_turns_run_under_both_methods(tiny_qwen3, tmp_path, method, monkeypatch):
    """A random model writes no Python, so its answers are told apart by their words; all else is the domain's own."""
    asked = []

    def reward(self, responses, task):
        total = float(len(set(" ".join(responses).split())))
        return Reward(total, {"words": total})

    feedback = CoopheDomain.feedback

    def remember(self, responses, task):
        asked.append(feedback(self, responses, task))
        return asked[-1]

    monkeypatch.setattr(CoopheDomain, "reward", reward)
    monkeypatch.setattr(CoopheDomain, "feedback", remember)
    loaded = tiny_qwen3()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    config = RunConfig(
        "test",
        "coophe",
        method,
        agent_models=[str(tmp_path / "model")],
        domain_options={"horizon": 2},
        train_tasks=4,
        eval_tasks=2,
        eval_samples=2,
        max_new_tokens=[6],
        iterations=1,
        samples_per_task=4,
        pairs_per_task=2,
    )
    result = run_mapl(config, tmp_path / "out", progress=False)
    assert result.final("env_steps") > 0 and {"pass", "call"} <= {row.metric for row in result.evaluation}
    assert asked and all("There is no function f" in text for text in asked)
