"""Speed as ratios in one run, with a real 135M-parameter model: python tests/benchmarks/speed.py [--threads 2]

rollouts   20 samples of 48 tokens for each of 8 prompts of 120 tokens, against `model.generate` with
           num_return_sequences=20; same top-p, top-k off, the adapter merged in both
update     one MADPO step on 16 pairs (4 tasks x 4 pairs, prompts of 120 tokens, responses of 48) of two agents, against
           the same step with every response scored alone; and its peak memory as the number of pairs doubles

Not a timed test: run it alone on the machine. Each side is warmed up, then timed `--repeats` times; the median counts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable

import torch

from mapl_core.adapters import AdaptedModel
from mapl_core.domains import get_domain
from mapl_core.losses import madpo_loss
from mapl_core.models import load_model
from mapl_core.sampling import SamplingSettings, sample_responses
from mapl_core.scoring import accumulate_logprob_gradients, response_logprobs
from mapl_core.seeding import Stream

PROMPTS, PROMPT_TOKENS, SAMPLES, NEW_TOKENS = 8, 120, 20, 48
TASKS, PAIRS = 4, 4
AGENTS = ("agent0", "agent1")


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
    for index, agent in enumerate(AGENTS):
        adapted.add_adapter(agent, Stream(index, "benchmark"))
        with torch.no_grad():
            for weight in adapted.parameters(agent)[1::2]:  # lora_B starts at zero: an adapter that does nothing
                weight.normal_(std=0.01, generator=torch.Generator().manual_seed(index))
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
        sample_responses(
            free, AGENTS[0], prompts, uniforms, samples=SAMPLES, settings=settings, max_cached_tokens=65536
        )

    ids = torch.tensor(prompts)
    with adapted.using(AGENTS[0]):
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


def update(adapted: AdaptedModel, repeats: int) -> None:
    vocabulary = adapted.loaded.model.config.vocab_size

    def items(agent: int, tasks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        prompts = random_ids(tasks, PROMPT_TOKENS, vocabulary, seed=10 + agent)
        responses = random_ids(tasks * PAIRS * 2, NEW_TOKENS, vocabulary, seed=20 + agent)
        return [(prompts[index // (2 * PAIRS)], response) for index, response in enumerate(responses)]

    def step(tasks: int, max_tokens: int) -> None:
        of_agent = [items(agent, tasks) for agent in range(len(AGENTS))]
        logprobs = torch.stack(
            [
                response_logprobs(adapted, name, of_agent[index], max_tokens=max_tokens)
                for index, name in enumerate(AGENTS)
            ],
            dim=1,
        )[:, :, None].requires_grad_()
        winner, loser = logprobs[0::2], logprobs[1::2]
        loss, _ = madpo_loss(winner, loser, winner.detach(), loser.detach())
        weights = torch.autograd.grad(loss, logprobs)[0]
        for index, name in enumerate(AGENTS):
            for weight in adapted.parameters(name):
                weight.grad = None
            accumulate_logprob_gradients(adapted, name, of_agent[index], weights[:, index, 0], max_tokens=max_tokens)

    class Alone(AdaptedModel):
        shares_prompts = False  # plain batches: every response with its own copy of the prompt

    shared, alone = seconds(lambda: step(TASKS, 2048), repeats), 0.0
    original = adapted.__class__
    adapted.__class__ = Alone
    try:
        alone = seconds(lambda: step(TASKS, 2048), repeats)
    finally:
        adapted.__class__ = original
    print(
        f"update: shared prompts {shared:.1f} s, every response alone {alone:.1f} s: ratio {alone / shared:.2f} "
        "(wanted: at least 2)",
        flush=True,
    )
    peaks = []
    for tasks in (TASKS, 2 * TASKS):
        step(tasks, 2048)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    print(f"peak memory so far in MiB with {TASKS * PAIRS} and {2 * TASKS * PAIRS} pairs: {peaks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("rollouts", "update"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    adapted = adapted_model(options.model)
    print(
        f"{options.model}, {options.threads} threads, torch {torch.__version__}, settings "
        f"{dataclasses.asdict(SamplingSettings(1.0, 0.9, NEW_TOKENS))}"
    )
    if options.only != "update":
        rollouts(adapted, options.repeats)
    if options.only != "rollouts":
        update(adapted, options.repeats)


if __name__ == "__main__":
    main()
