"""Speed as ratios in one run, with a real 135M-parameter model: python tests/benchmarks/speed.py [--threads 2]

rollouts   20 samples of 48 tokens for each of 8 prompts of 120 tokens, against `model.generate` with
           num_return_sequences=20; same top-p, top-k off, the adapter merged in both
update     one MADPO step on 16 pairs (4 tasks x 4 pairs, prompts of 120 tokens, responses of 48) of two agents, against
           the same step with every response scored alone
memory     the peak of the process after updates on one, two and four times as many pairs

Not a timed test: run it alone on the machine. Each side is warmed up, then timed `--repeats` times; the median counts.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import time
from collections.abc import Callable

import torch

from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import PreferencePair, Response, Trajectory
from mapl_core.domains import get_domain
from mapl_core.memory import keep_freed_memory
from mapl_core.models import load_model
from mapl_core.policies import JointPolicy
from mapl_core.profiles import load_profile
from mapl_core.sampling import SamplingSettings, sample_responses
from mapl_core.seeding import Stream
from mapl_core.updates import TeamOptimizer, update_madpo

PROMPTS, PROMPT_TOKENS, SAMPLES, NEW_TOKENS = 8, 120, 20, 48
TASKS, PAIRS = 4, 4
SAMPLER = "sampler"


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of `run` after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def random_ids(count: int, length: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    """Texts of token ids that differ from their first token on, so that no prompt is shared by accident."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(row) for row in torch.randint(10, vocabulary - 10, (count, length), generator=generator).tolist()]


def adapted_model(name: str) -> AdaptedModel:
    adapted = AdaptedModel(load_model(name))
    adapted.add_adapter(SAMPLER, Stream(0, "benchmark"))
    with torch.no_grad():
        for weight in adapted.parameters(SAMPLER)[1::2]:  # lora_B starts at zero: an adapter that does nothing
            weight.normal_(std=0.01, generator=torch.Generator().manual_seed(0))
    return adapted


def rollouts(adapted: AdaptedModel, repeats: int) -> None:
    # Real posts: after random ids the model is unsure of everything, and top-p keeps thousands of candidates.
    posts = [task.fields["prompt"] for task in get_domain("tldr").load_tasks("train", "small", PROMPTS)]
    prompts = [tuple(adapted.tokenizer.encode(post)[:PROMPT_TOKENS]) for post in posts]
    settings = SamplingSettings(temperature=1.0, top_p=0.9, max_new_tokens=NEW_TOKENS)
    # Neither side may stop early, or the two would write different numbers of tokens.
    stop = adapted.tokenizer.eos_token_id
    uniforms = Stream(0, "benchmark").uniforms([f"row{row}" for row in range(PROMPTS * SAMPLES)], NEW_TOKENS)

    class NeverStops(AdaptedModel):
        stop_ids = frozenset([-1])

    free = copy.copy(adapted)
    free.__class__ = NeverStops

    def ours() -> None:
        sample_responses(free, SAMPLER, prompts, uniforms, samples=SAMPLES, settings=settings, max_cached_tokens=65536)

    ids = torch.tensor(prompts)
    with adapted.using(SAMPLER):
        merged = copy.deepcopy(adapted.model).merge_and_unload()

    def generate() -> None:
        with torch.no_grad():
            out = merged.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_p=0.9,
                top_k=0,
                num_return_sequences=SAMPLES,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                pad_token_id=stop,
            )
        assert out.shape == (PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS)

    rows, mine = PROMPTS * SAMPLES, seconds(ours, repeats)
    theirs = seconds(generate, repeats)
    print(
        f"rollouts: ours {rows / mine:.2f} samples/s ({mine:.1f} s), generate {rows / theirs:.2f} samples/s "
        f"({theirs:.1f} s): ratio {theirs / mine:.2f} (wanted: at least 2.5)",
        flush=True,
    )


def update_step(adapted: AdaptedModel) -> Callable[[int], object]:
    """One MADPO step of a fresh team on the pairs of so many tasks."""
    config = load_profile("small").config("tldr", "madpo", batch_size=4 * TASKS * PAIRS, micro_batch_tokens=2048)
    policy = JointPolicy(
        get_domain("tldr"),
        "dec",
        [adapted, adapted],
        [SamplingSettings(max_new_tokens=NEW_TOKENS)] * 2,
        prompt_form="text",
        stream=Stream(0, "benchmark"),
        micro_batch_tokens=config.micro_batch_tokens,
    )
    optimizer, vocabulary = TeamOptimizer(policy, config), adapted.loaded.model.config.vocab_size
    return lambda tasks: update_madpo(policy, optimizer, random_pairs(tasks, vocabulary), Stream(0, "b"), config)


def update(step: Callable[[int], object], adapted: AdaptedModel, repeats: int) -> None:
    class Alone(AdaptedModel):
        shares_prompts = False  # plain batches: every response with its own copy of the prompt

    shared, kind = seconds(lambda: step(TASKS), repeats), adapted.__class__
    adapted.__class__ = Alone
    try:
        alone = seconds(lambda: step(TASKS), repeats)
    finally:
        adapted.__class__ = kind
    print(
        f"update: shared prompts {shared:.1f} s, every response alone {alone:.1f} s: ratio {alone / shared:.2f} "
        "(wanted: at least 2)",
        flush=True,
    )


def memory(step: Callable[[int], object]) -> None:
    """Before anything else has raised the process's peak."""
    peaks = []
    for tasks in (TASKS, 2 * TASKS, 4 * TASKS):
        step(tasks)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    pairs = ", ".join(str(tasks * PAIRS) for tasks in (TASKS, 2 * TASKS, 4 * TASKS))
    print(f"memory: peak of the process in MiB after updates on {pairs} pairs: {peaks}", flush=True)


def random_pairs(tasks: int, vocabulary: int) -> list[PreferencePair]:
    """Pairs of random ids, `PAIRS` for each task; the two agents read different prompts."""

    def responses(seed: int) -> list[tuple[int, ...]]:
        return random_ids(tasks * PAIRS * 2, NEW_TOKENS, vocabulary, seed)

    prompts = [random_ids(tasks, PROMPT_TOKENS, vocabulary, seed) for seed in (10, 11)]
    played = [
        Trajectory(
            task_id=f"task{index // (2 * PAIRS)}",
            actions=(
                tuple(
                    Response(prompts[agent][index // (2 * PAIRS)], ids, "", False) for agent, ids in enumerate(written)
                ),
            ),
            responses=(("", ""),),
            rewards=(float(index % 2),),
            parts=({},),
        )
        for index, written in enumerate(zip(responses(20), responses(21), strict=True))
    ]
    return [PreferencePair(winner, loser, True) for loser, winner in zip(played[::2], played[1::2], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("rollouts", "update", "memory"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run on the processor does
    adapted = adapted_model(options.model)
    print(f"{options.model}, {options.threads} threads, float32 products in full, torch {torch.__version__}")
    step = update_step(adapted)
    if options.only in (None, "memory"):
        memory(step)
    if options.only in (None, "rollouts"):
        rollouts(adapted, options.repeats)
    if options.only in (None, "update"):
        update(step, adapted, options.repeats)


if __name__ == "__main__":
    main()
