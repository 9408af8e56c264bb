"""A stand-in for vLLM, for what surrounds an engine: which weights it is handed, what it is told, what is made of its
answers. It decodes with the project's own code, from the model folder and the adapter folders that it is given.
"""

from __future__ import annotations

import importlib.machinery
import json
import random
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mapl_core.adapters import AdaptedModel
from mapl_core.models import load_model
from mapl_core.sampling import SamplingSettings, sample_responses
from mapl_core.scoring import Item, token_logprobs
from mapl_core.seeding import Stream


class SamplingParams(types.SimpleNamespace):
    pass


class StructuredOutputsParams(types.SimpleNamespace):
    pass


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


@dataclass
class Behaviour:
    """How the engine behaves, and what it has seen.

    Attributes:
        stale: it answers every request for an agent with the first weights that it saw of that agent.
        shift: nats that it adds to every log-probability.
        engines: those that were started.
        events: names of calls in their order: "wake_up", "generate", "sleep", "remove_lora", "shutdown".
        requests: the LoRA request of every call of `generate`.
        parameters: the sampling parameters of every prompt.
    """

    stale: bool = False
    shift: float = 0.0
    engines: list[LLM] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    requests: list[LoRARequest | None] = field(default_factory=list)
    parameters: list[SamplingParams] = field(default_factory=list)


class LLM:
    behaviour: Behaviour

    def __init__(self, **settings: Any):
        self.settings = settings
        for seed_globally in (random.seed, np.random.seed, torch.manual_seed):  # as an engine in this process does
            seed_globally(0)
        self._bases: dict[Any, AdaptedModel] = {}
        self.llm_engine = types.SimpleNamespace(
            remove_lora=self._remove_lora,
            engine_core=types.SimpleNamespace(shutdown=lambda: self._note("shutdown")),
        )
        self.behaviour.engines.append(self)

    def _note(self, event: str) -> None:
        self.behaviour.events.append(event)

    def _remove_lora(self, number: int) -> None:
        self._note("remove_lora")
        if not self.behaviour.stale:
            del self._bases[number]

    def wake_up(self) -> None:
        self._note("wake_up")

    def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")

    def generate(self, prompts, sampling_params, *, lora_request=None, use_tqdm=True) -> list[RequestOutput]:
        self._note("generate")
        torch.rand(3)
        self.behaviour.requests.append(lora_request)
        self.behaviour.parameters += sampling_params
        adapted = self._policy(lora_request)
        adapter = "agent" if lora_request else None
        return [
            self._answer(adapted, adapter, tuple(prompt["prompt_token_ids"]), parameters)
            for prompt, parameters in zip(prompts, sampling_params, strict=True)
        ]

    def _policy(self, request: LoRARequest | None) -> AdaptedModel:
        number = None if request is None else request.lora_int_id
        if self.behaviour.stale and request is not None:
            number = next((known for known in self._bases if known is not None), number)
        if number not in self._bases:
            folder = Path(request.lora_path) if request else None
            config = json.loads((folder / "adapter_config.json").read_text()) if folder else {"r": 4, "lora_alpha": 8}
            base = AdaptedModel(load_model(self.settings["model"]), rank=config["r"], alpha=config["lora_alpha"])
            if folder:
                base.add_adapter("agent", Stream(0, "stand-in"))
                base.load_state("agent", load_file(folder / "adapter_model.safetensors"))
            self._bases[number] = base
        return self._bases[number]

    def _answer(self, adapted, adapter, prompt, parameters) -> RequestOutput:
        settings = SamplingSettings(
            parameters.temperature, parameters.top_p, parameters.max_tokens, max(0, parameters.top_k)
        )
        uniforms = Stream(parameters.seed, "stand-in").uniforms(
            [str(number) for number in range(parameters.n)], settings.max_new_tokens
        )
        (group,) = sample_responses(
            adapted, adapter, [prompt], uniforms, samples=parameters.n, settings=settings, max_cached_tokens=100_000
        )
        scored = token_logprobs(
            adapted, adapter, [Item(prompt, sample.token_ids) for sample in group], max_tokens=100_000
        )
        outputs = []
        for number, (sample, logprobs) in enumerate(zip(group, scored, strict=True)):
            pairs = zip(sample.token_ids, logprobs.tolist(), strict=True)
            shifted = [{token: Logprob(value + self.behaviour.shift)} for token, value in pairs]
            outputs.append(
                CompletionOutput(
                    number,
                    list(sample.token_ids),
                    None if parameters.logprobs is None else shifted,
                    "length" if sample.truncated else "stop",
                )
            )
        return RequestOutput(outputs[::-1])  # the order of completions is no promise


@pytest.fixture
def stand_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Behaviour:
    """`import vllm` finds the stand-in; what it did is returned."""
    behaviour = Behaviour()
    monkeypatch.setattr(LLM, "behaviour", behaviour, raising=False)
    for name, members in {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "vllm.sampling_params": {"StructuredOutputsParams": StructuredOutputsParams},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return behaviour
