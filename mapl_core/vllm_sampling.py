"""Rollouts through vLLM: one engine for each base model, one LoRA request for each agent on it.

The engine holds a copy of the base, and reads an agent's adapter from a folder that is written whenever the adapter's
weights have changed. vLLM knows adapters by id and keys its prefix cache by their name, so that old weights, or new
weights on the old prompt's keys and values, would answer without a word: every refresh has a new id, a new name and a
new folder, and what it replaces is removed. On a GPU the engine is awake only while it samples; asleep, its weights lie
in main memory and the GPU's is left to training.

Sampler and trainer compute the same log-probabilities with different kernels. On some responses of every call they are
compared, token by token, at temperature 1, without the tokens that a skeleton forced. A mean difference above a bound
stops the run: it would train on the answers of another policy than the one it updates.

Samples are keyed by (seed, purpose, agent, iteration, prompt). On a CPU equal keys and weights give equal samples; on a
GPU a batch of another make-up rounds otherwise, and at a near-tie an answer may part from its twin.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mapl_core.adapters import AdaptedModel, AdapterState
from mapl_core.domains.base import Skeleton
from mapl_core.profiles import check_rollouts
from mapl_core.sampling import Sample, Sampler, SamplingSettings, skeleton_tokens
from mapl_core.scoring import Ids, Item, token_logprobs
from mapl_core.seeding import Stream, global_states_kept
from mapl_core.structured import SkeletonTokens, replay

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM keeps room
COMPARED = 8  # responses of a call whose log-probabilities are compared: every refreshed adapter is looked at, cheaply
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}  # neither long progress nor reports to its makers


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may take.

    Attributes:
        memory: share of the GPU's memory while it is awake, weights included. On a CPU the environment variable
            VLLM_CPU_KVCACHE_SPACE, in GiB, bounds the cache instead.
        tokens: most tokens of a prompt and its response together.
        sequences: most responses that are decoded at a time.
    """

    memory: float
    tokens: int
    sequences: int


@dataclass(frozen=True)
class Compared:
    """A response whose log-probabilities are to be compared.

    Attributes:
        item: prompt, response and forced positions.
        choices: where a skeleton ruled tokens out, which were left for each token that it did not force.
        logprobs: the sampler's, of every token.
    """

    item: Item
    choices: list[Tensor] | None
    logprobs: list[float]


class VllmSampler(Sampler):
    """Samples with vLLM, whose engines start when the first prompts come.

    Args:
        settings: what each engine may take.
        max_difference: bound on the mean absolute difference of log-probabilities, in nats a token.
        micro_batch_tokens: bound on the padded tokens of one of the trainer's passes, for the comparison.

    Raises:
        ImportError: if vLLM is not installed, naming the command that installs it.
    """

    def __init__(self, settings: EngineSettings, *, max_difference: float, micro_batch_tokens: int):
        check_rollouts("vllm")
        self.settings, self.max_difference, self.micro_batch_tokens = settings, max_difference, micro_batch_tokens
        self._engines: dict[AdaptedModel, Engine] = {}
        self._differences: list[Tensor] = []  # of the tokens compared since the last report

    def sample(
        self,
        adapted: AdaptedModel,
        adapter: str | None,
        prompts: Sequence[Ids],
        keys: Sequence[str],
        stream: Stream,
        *,
        samples: int,
        settings: SamplingSettings,
        skeletons: Sequence[Skeleton | None] | None = None,
    ) -> list[list[Sample]]:
        """As `Sampler.sample`; the first key of a prompt stands for all its samples.

        Raises:
            ValueError: if a prompt leaves no room for its response, or a skeleton's answer does not fit.
            RuntimeError: if the engine cannot start, or its log-probabilities are not the trainer's.
        """
        if not prompts:
            return []
        fixed = skeleton_tokens(adapted, skeletons or [None] * len(prompts), settings)
        if adapted not in self._engines:
            self._engines[adapted] = Engine(adapted, self.settings)
        count = 1 if settings.temperature == 0 else samples  # greedy samples are equal, and vLLM refuses to repeat them
        outputs = self._engines[adapted].complete(
            adapter,
            prompts,
            settings,
            count=count,
            seeds=[stream.seed_of(key) for key in keys[::samples]],
            grammars=[tokens and tokens.grammar for tokens in fixed],
        )
        drawn: list[list[Sample]] = []
        compared: list[list[Compared]] = [[] for _ in range(count)]
        for prompt, output, tokens in zip(prompts, outputs, fixed, strict=True):
            group = []
            for number, completion in enumerate(sorted(output.outputs, key=lambda completion: completion.index)):
                sample, choices = _read(completion, tokens)
                group.append(sample)
                if completion.logprobs is not None:
                    pairs = zip(sample.token_ids, completion.logprobs, strict=True)
                    logprobs = [found[token].logprob for token, found in pairs]
                    item = Item(prompt, sample.token_ids, sample.forced)
                    compared[number].append(Compared(item, choices, logprobs))
            drawn.append(group * (samples // count))
        self._compare(adapted, adapter, [response for column in compared for response in column][:COMPARED])
        return drawn

    def _compare(self, adapted: AdaptedModel, adapter: str | None, compared: Sequence[Compared]) -> None:
        """Note the differences of the two sides' log-probabilities, and stop where they are too large."""
        trainers = token_logprobs(
            adapted,
            adapter,
            [response.item for response in compared],
            max_tokens=self.micro_batch_tokens,
            choices=[response.choices for response in compared],
        )
        for response, trainer in zip(compared, trainers, strict=True):
            chosen = sorted(set(range(len(response.logprobs))).difference(response.item.forced))
            self._differences.append((trainer - torch.tensor([response.logprobs[place] for place in chosen])).abs())
        found = torch.cat(self._differences)
        if len(found) and not float(found.mean()) <= self.max_difference:  # not a number is no agreement either
            raise RuntimeError(
                f"the log-probabilities of vLLM and of the trainer differ by {float(found.mean()):.3g} nats a token on "
                f"average (largest {float(found.max()):.3g}, {len(found)} tokens, {adapted.loaded.name}, adapter "
                f"{adapter}), and rollout_difference allows {self.max_difference:g}: the answers are those of another "
                "policy than the one that is trained. Set rollouts to transformers; or, where the two round their "
                "weights differently on purpose, raise rollout_difference"
            )

    def report(self) -> dict[str, float]:
        """Mean and largest absolute difference of log-probabilities, in nats a token, and how many were compared."""
        if not self._differences:
            return {}
        found = torch.cat(self._differences)
        self._differences = []
        return {
            "logprob_difference": float(found.mean()),
            "largest_logprob_difference": float(found.max()),
            "compared_tokens": float(len(found)),
        }

    def close(self) -> None:
        """Shut all engines down."""
        while self._engines:
            self._engines.popitem()[1].close()


def _read(completion: CompletionOutput, tokens: SkeletonTokens | None) -> tuple[Sample, list[Tensor] | None]:
    """A completion as a sample; where it has a skeleton, also what each of its own tokens was chosen among."""
    ids = tuple(completion.token_ids)
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM broke an answer off after {len(ids)} tokens, for {completion.finish_reason!r}")
    truncated = completion.finish_reason == "length"
    if tokens is None:
        return Sample(ids, truncated), None
    found = replay(ids, tokens)
    if found is None:
        raise RuntimeError(f"vLLM wrote token ids that the answer's skeleton rules out: {list(ids)}")
    return Sample(ids, truncated, tuple(found[0])), found[1]


@dataclass(frozen=True)
class Served:
    """An adapter as the engine has it: the request that names it, its folder, and a copy of its weights."""

    request: LoRARequest
    folder: Path
    state: AdapterState


class Engine:
    """A vLLM engine on a copy of a base, and the adapters that it was given.

    Raises:
        ValueError: for a base or a LoRA rank that vLLM cannot serve.
        RuntimeError: if the engine does not start, naming the settings to lower where memory is short.
    """

    def __init__(self, adapted: AdaptedModel, settings: EngineSettings):
        for name, setting in QUIET.items():
            os.environ.setdefault(name, setting)
        from vllm import LLM

        loaded = adapted.loaded
        if not loaded.source:
            raise ValueError(f"model {loaded.name!r} has no folder or hub id that vLLM could load it from")
        rank = next((rank for rank in LORA_RANKS if rank >= adapted.rank), None)
        if rank is None:
            raise ValueError(f"lora_rank is {adapted.rank}; vLLM takes at most {LORA_RANKS[-1]}")
        quantizer = getattr(loaded.model, "hf_quantizer", None)
        self.adapted = adapted
        self.sleeps = loaded.device.type == "cuda"
        self.tokens = min(settings.tokens, loaded.model.config.max_position_embeddings)
        self._served: dict[str, Served] = {}
        self._refreshes = 0
        self._folder = tempfile.TemporaryDirectory(prefix="mapl-adapters-")
        torch.cuda.empty_cache()
        try:
            with global_states_kept():  # an engine in this process would seed them
                self.llm = LLM(
                    model=loaded.source,
                    revision=loaded.revision,
                    tokenizer_revision=loaded.revision,
                    dtype=str(loaded.dtype).removeprefix("torch."),
                    quantization=quantizer and quantizer.quantization_config.quant_method.value,
                    max_model_len=self.tokens,
                    max_num_seqs=settings.sequences,
                    gpu_memory_utilization=settings.memory,
                    enforce_eager=not self.sleeps,  # on a CPU compilation costs more than it saves
                    enable_sleep_mode=self.sleeps,
                    enable_prefix_caching=True,
                    enable_lora=bool(adapted.trainable),
                    max_loras=max(1, len(adapted.trainable)),
                    max_lora_rank=rank,
                    logprobs_mode="raw_logprobs",  # at temperature 1, before top-k and top-p: what the trainer computes
                    structured_outputs_config={"backend": "guidance"},  # the one that reads grammars over token ids
                )
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"vLLM could not start on {loaded.name} ({error}). Where memory is short, lower rollout_sequences "
                f"({settings.sequences}) and rollout_tokens ({settings.tokens}), and set rollout_memory "
                f"({settings.memory:g}) to a share that is free and holds the weights besides"
            ) from error
        self._rest()

    def complete(
        self,
        adapter: str | None,
        prompts: Sequence[Ids],
        settings: SamplingSettings,
        *,
        count: int,
        seeds: Sequence[int],
        grammars: Sequence[str | None],
    ) -> list[RequestOutput]:
        """`count` completions of each prompt under an adapter as it is now, or under the base for `adapter=None`.

        Those of the first `COMPARED` prompts come with the log-probabilities of their tokens.
        """
        longest = max(map(len, prompts))
        if longest + settings.max_new_tokens > self.tokens:
            raise ValueError(
                f"a prompt of {longest} tokens with a response of up to {settings.max_new_tokens} exceeds the engine's "
                f"{self.tokens}, the smaller of rollout_tokens and the model's own limit; raise rollout_tokens, or "
                "lower max_new_tokens"
            )
        parameters = [
            self._parameters(settings, count, seed, grammar, number < COMPARED)
            for number, (seed, grammar) in enumerate(zip(seeds, grammars, strict=True))
        ]
        if self.sleeps:
            torch.cuda.empty_cache()  # what the trainer holds in reserve, the engine needs now
            self.llm.wake_up()
        with global_states_kept():
            outputs = self.llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                parameters,
                lora_request=None if adapter is None else self._request(adapter),
                use_tqdm=False,
            )
        self._rest()
        return outputs

    def _parameters(
        self, settings: SamplingSettings, count: int, seed: int, grammar: str | None, with_logprobs: bool
    ) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        return SamplingParams(
            n=count,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_new_tokens,
            stop_token_ids=sorted(self.adapted.stop_ids),
            seed=seed,
            logprobs=0 if with_logprobs else None,  # 0: that of the chosen token alone
            structured_outputs=StructuredOutputsParams(grammar=grammar) if grammar else None,
            detokenize=False,
        )

    def _request(self, adapter: str) -> LoRARequest:
        """The request that names the adapter's present weights, which are written first where the engine has others."""
        from vllm.lora.request import LoRARequest

        state, served = self.adapted.state(adapter), self._served.get(adapter)
        if served and all(torch.equal(state[name], weight) for name, weight in served.state.items()):
            return served.request
        if served:
            self.llm.llm_engine.remove_lora(served.request.lora_int_id)
            shutil.rmtree(served.folder)
        self._refreshes += 1
        name = f"{adapter}_{self._refreshes:06d}"
        folder = Path(self._folder.name) / name
        self.adapted.save(adapter, folder)
        request = LoRARequest(lora_name=name, lora_int_id=self._refreshes, lora_path=str(folder / adapter))
        self._served[adapter] = Served(request, folder, state)
        return request

    def _rest(self) -> None:
        """Leave the GPU to training."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def close(self) -> None:
        self._folder.cleanup()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
