"""What a model may be called and how it may be loaded, judged before anything is loaded.

Nothing that loads models is imported here, so that a plan of many jobs is checked at once: the import of transformers
alone takes ten seconds on a small machine.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
VALID_NAMES = f"pocket:<domain>:<size> (pocket:tldr:1x), {SMOLLM2}, a model folder, a hub id org/name[@revision]"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# How the weights of a base are held -> the packages that this needs, all of requirements-gpu.txt.
LOADERS = {
    "plain": (),  # as they are, in the dtype of the device
    "bnb4": ("bitsandbytes",),  # linear layers in 4 bits (NF4), by transformers and bitsandbytes
    "unsloth": ("bitsandbytes", "unsloth", "unsloth_zoo"),  # likewise, by Unsloth and with its kernels
}


def check_loader(loader: str) -> None:
    """Refuse a loader whose packages are not installed; nothing is imported.

    Raises:
        ValueError: for an unknown loader.
        ImportError: naming what is missing, the command that installs it, and a loader that needs less.
    """
    if loader not in LOADERS:
        raise ValueError(f"unknown loader {loader!r}; valid: {', '.join(LOADERS)}")
    missing = [package for package in LOADERS[loader] if importlib.util.find_spec(package) is None]
    if missing:
        others = "plain" if "bitsandbytes" in missing else "bnb4 or plain"
        raise ImportError(
            f"loader {loader!r} needs {', '.join(missing)}; run: {sys.executable} -m pip install -r "
            f"requirements-gpu.txt, or set the profile's `loader` to {others}"
        )


def check_model_name(name: str) -> None:
    """Refuse within milliseconds what cannot be loaded; nothing is read, downloaded or built.

    A hub id is judged by its form: what the hub has, only the hub knows.

    Raises:
        ValueError: for a name of no known form, an unknown pocket model, and a folder that is no complete model.
    """
    folder = Path(name).expanduser()
    if name.startswith("pocket:"):
        pocket_parts(name)
    elif name == SMOLLM2:
        return
    elif folder.exists():
        check_model_folder(name, folder)
    elif not HUB_NAME.fullmatch(name):
        raise ValueError(f"no model {name!r}: there is no such folder; valid names are {VALID_NAMES}")


def check_model_folder(name: str, folder: Path) -> None:
    """Say what a model folder lacks, before anything large is read.

    Raises:
        ValueError: if it is no folder, holds an adapter, or lacks a config, a tokenizer or weights.
    """
    if not folder.is_dir():
        lack = "is no folder"
    elif (folder / "adapter_config.json").is_file():
        raise ValueError(f"model {name!r}: {folder} holds an adapter of a model; name its base model instead")
    elif not (folder / "config.json").is_file():
        lack = "has no config.json"
    elif not any((folder / file).is_file() for file in TOKENIZER_FILES):
        lack = f"has no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
    elif not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        lack = f"has no weights ({' or '.join(WEIGHT_FILES)})"
    else:
        return
    raise ValueError(
        f"model {name!r}: {folder} {lack}; save model and tokenizer there with save_pretrained, or name another model: "
        f"{VALID_NAMES}"
    )


def pocket_parts(name: str) -> tuple[str, str]:
    """Domain and size of a pocket model that exists or can be built.

    Raises:
        ValueError: for another form, domain or size.
    """
    from mapl_core.pocket.common import SHAPES, language  # here, since other models need nothing of the pocket's

    parts = name.split(":")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"no model {name!r}: a pocket model is named pocket:<domain>:<size>, such as pocket:tldr:1x")
    _, domain, size = parts
    language(domain)
    if size not in SHAPES:
        raise ValueError(f"no model {name!r}: unknown pocket size {size!r}; valid: {', '.join(SHAPES)}")
    return domain, size
