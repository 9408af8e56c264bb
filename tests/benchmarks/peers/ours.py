"""This project's side: the update rules and the sampling of a run, timed in two parts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch
from work import Measurement, Stopwatch, Work, peak_mib, run_side

from mapl_core import __version__
from mapl_core.annotators import oracle
from mapl_core.buffers import label_pairs, select_pairs
from mapl_core.domains.base import Task
from mapl_core.memory import keep_freed_memory
from mapl_core.profiles import RunConfig, load_profile
from mapl_core.seeding import Stream
from mapl_core.team import Team, build_team
from mapl_core.updates import TeamOptimizer, oracle_rewards, update_madpo, update_magrpo


def measure(work: Work) -> Measurement:
    torch.set_num_threads(work.threads)
    keep_freed_memory()  # as a run on the processor does
    config = load_profile("pocket").config(
        "tldr",
        work.method,
        agent_models=[f"pocket:tldr:{work.size}"],
        max_new_tokens=[work.new_tokens],
        train_tasks=work.num_tasks,
        eval_tasks=1,
        samples_per_task=work.samples,
        pairs_per_task=work.pairs,
        num_generations=work.generations,
        batch_size=work.batch_size,
        threads=work.threads,
    )
    team, tasks, watch, loaded = build_team(config), work.tasks(), Stopwatch(), peak_mib()
    policy = team.policy
    prompt_tokens = [
        len(policy.encode(member, prompt, task))
        for task in tasks
        for member, prompt in zip(policy.members, work.domain.prompts(task), strict=True)
    ]
    collected, sampled_tokens, updated = SIDES[work.method](work, config, team, tasks, watch)
    return Measurement(
        versions={"mapl_core": __version__} | {name: version(name) for name in ("torch", "transformers")},
        trained_parameters=sum(
            parameter.numel() for index in range(len(policy.members)) for parameter in policy.parameters(index)
        ),
        prompt_tokens=prompt_tokens,
        collected=collected,
        sampled_tokens=sampled_tokens,
        collect_seconds=watch.seconds["collect"],
        updated=updated,
        update_seconds=watch.seconds["all"] - watch.seconds["collect"],
        loaded_mib=loaded,
        peak_mib=peak_mib(),
    )


def madpo(work: Work, config: RunConfig, team: Team, tasks: list[Task], watch: Stopwatch) -> tuple[int, int, int]:
    """One iteration: collect, label, select, update. Numbers of joint answers, of tokens, and of answers used."""
    optimizer = TeamOptimizer(team.policy, config)
    with watch.running("all"):
        with watch.running("collect"):
            team.comparator.begin_iteration()
            agents = team.policy.sample(tasks, work.samples, Stream(0, "collect"))
            others = team.comparator.sample(tasks, work.samples, Stream(0, "comparator"))
            pairs = []
            for mine, theirs in zip(agents, others, strict=True):
                labelled, _ = label_pairs(mine, theirs, oracle)
                pairs += select_pairs(labelled, work.pairs)
        metrics = update_madpo(team.policy, optimizer, pairs, Stream(0, "madpo"), config)
    played = [trajectory for group in [*agents, *others] for trajectory in group]
    return len(played), int(team.policy.lengths(played).sum()), int(metrics["samples"])


def magrpo(work: Work, config: RunConfig, team: Team, tasks: list[Task], watch: Stopwatch) -> tuple[int, int, int]:
    """One epoch: every batch of tasks is sampled, scored and learnt from."""
    optimizer = TeamOptimizer(team.policy, config)
    watch.attach(team.policy, "sample", "collect")
    with watch.running("all"):
        metrics = update_magrpo(team.policy, optimizer, tasks, oracle_rewards(), Stream(0, "marl"), config)
    return int(metrics["samples"]), int(metrics["sampled_tokens"]), int(metrics["samples"])


SIDES: dict[str, Callable[..., tuple[int, int, int]]] = {"madpo": madpo, "magrpo": magrpo}

if __name__ == "__main__":
    run_side(measure)
