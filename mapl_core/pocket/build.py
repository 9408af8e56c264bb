"""Builds a pocket model: python -m mapl_core.pocket.build --domain tldr --size 4x [--out FOLDER]

Without --out the model goes to its place in the cache folder, where `pocket:tldr:4x` finds it. The shipped models
were written with --out mapl_core/pocket/weights/tldr-1x and tldr-2x. Beside the weights lies build.json: recipe,
losses, seconds, and what the untrained team of the new base does on evaluation tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from tqdm import tqdm

from mapl_core.domains import get_domain
from mapl_core.pocket.common import DOMAINS, SHAPES, cache_dir, domain_tokenizer, language, model_config
from mapl_core.pocket.pretrain import Example, Recipe, examples, pretrain, start_by_copying

# Where answers are copied from long lists of functions, copying takes longer to become reliable. Those of Travel take
# any of several places, which is hardly learnt from a random start.
RECIPES = {
    domain: {
        size: Recipe(steps=steps, copies_at_start=domain == "travel")
        for size, steps in zip(SHAPES, steps_of_sizes, strict=True)
    }
    for domain, steps_of_sizes in {
        "tldr": (1400, 1200, 800),
        "coophe": (1400, 1200, 800),
        "bfcl": (6000, 3000, 2000),
        "travel": (2000, 1200, 800),
    }.items()
}
STEPS_A_MINUTE = {"1x": 250, "2x": 120, "4x": 60}  # about, on one core
FINGERPRINTED = 200  # examples of the corpus that identify it


def corpus(domain: str, tokenizer: transformers.PreTrainedTokenizerBase, seed: int) -> Iterator[Example]:
    """The endless pretraining corpus of a domain; it holds no task of the train or eval split."""
    module, prompts = language(domain), get_domain(domain)
    reserved = module.reserved_slots()
    return examples(lambda rng: module.write_example(prompts, rng, reserved), tokenizer, seed)


def fingerprint(domain: str, size: str, recipe: Recipe) -> str:
    """Short hash of all that decides what is built: shape, recipe, vocabulary, and the corpus as it begins."""
    tokenizer = domain_tokenizer(domain)
    start = [asdict(example) for example in islice(corpus(domain, tokenizer, recipe.seed), FINGERPRINTED)]
    parts = (asdict(SHAPES[size]), asdict(recipe), sorted(tokenizer.get_vocab().items()), start)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def train_base(
    domain: str, size: str, recipe: Recipe, *, progress: bool = True
) -> tuple[transformers.Qwen3ForCausalLM, transformers.PreTrainedTokenizerBase, list[float], float]:
    """A freshly trained pocket model with its tokenizer, the losses of all steps, and the seconds of training."""
    tokenizer = domain_tokenizer(domain)
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights from the global generator
        torch.manual_seed(recipe.seed)
        model = transformers.Qwen3ForCausalLM(model_config(size, tokenizer)).float()
        if recipe.copies_at_start:
            start_by_copying(model)
    with tqdm(total=recipe.steps, desc=f"pocket {domain} {size}", disable=not progress, mininterval=2.0) as bar:

        def report(step: int, loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

        stream = corpus(domain, tokenizer, recipe.seed)
        losses, seconds = pretrain(model, stream, recipe, tokenizer.pad_token_id, report)
    return model, tokenizer, losses, seconds


def build(
    domain: str, size: str, folder: Path, *, recipe: Recipe | None = None, progress: bool = True
) -> dict[str, Any]:
    """Train a pocket model, measure its untrained team, and write its folder.

    Args:
        domain, size: which model.
        folder: is replaced when all is done, never left half written.
        recipe: other training settings than those of the size.
        progress: show a progress bar.

    Returns:
        what is written to build.json.
    """
    recipe = recipe or RECIPES[domain][size]
    folder.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer, losses, seconds = train_base(domain, size, recipe, progress=progress)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        record = {
            "domain": domain,
            "size": size,
            "command": f"python -m mapl_core.pocket.build --domain {domain} --size {size}",
            "fingerprint": fingerprint(domain, size, recipe),
            "parameters": model.num_parameters(),
            "vocabulary": len(tokenizer),
            "shape": asdict(SHAPES[size]),
            "recipe": asdict(recipe),
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "loss": {str(end): round(sum(losses[end - 25 : end]) / 25, 4) for end in range(25, len(losses) + 1, 25)},
            "untrained_team": measurements(domain, unfinished),
        }
        (unfinished / "build.json").write_text(json.dumps(record, indent=2) + "\n")
        for file in (unfinished, *unfinished.iterdir()):
            file.chmod(0o755 if file.is_dir() else 0o644)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return record


def measurements(domain: str, folder: Path) -> dict[str, dict[str, float | int | None]]:
    """The untrained team on up to 64 evaluation tasks, decentralised and centralised, as experiments sample."""
    from mapl_core.models import load_model
    from mapl_core.pocket.measure import measure_team

    module, base = language(domain), load_model(str(folder))
    tasks = module.make_tasks("eval")[:64]
    return {
        f"{structure}, T {temperature}, top-p {top_p}, {form}": measure_team(
            get_domain(domain), base, structure, tasks, temperature=temperature, top_p=top_p, prompt_form=form
        ).rounded()
        for structure in ("dec", "cen")
        for temperature, top_p, form in ((1.0, 1.0, "chat"), (1.0, 1.0, "text"), (0.7, 0.9, "chat"))
    }


def build_cached(domain: str, size: str) -> Path:
    """The folder of a model in the cache; it is built there if it is missing. Two processes build it once."""
    folder = cache_dir() / "pocket" / f"{domain}-{size}-{fingerprint(domain, size, RECIPES[domain][size])}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "build.json").is_file():
            name, minutes = f"pocket:{domain}:{size}", RECIPES[domain][size].steps // STEPS_A_MINUTE[size]
            print(f"building {name} once, about {minutes} minutes, into {folder}", file=sys.stderr)
            build(domain, size, folder)
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a pocket model from scratch (minutes on one core).")
    parser.add_argument("--domain", required=True, choices=DOMAINS)
    parser.add_argument("--size", required=True, choices=SHAPES)
    parser.add_argument("--out", type=Path, help="folder to write; default: its place in the cache folder (MAPL_CACHE)")
    parser.add_argument("--steps", type=int, help="optimiser steps, for trials")
    options = parser.parse_args(arguments)
    if options.out is None and options.steps is not None:
        parser.error("--steps needs --out: the cache holds finished models only")
    if options.out is None:
        print(build_cached(options.domain, options.size))
        return
    recipe = RECIPES[options.domain][options.size]
    if options.steps is not None:
        recipe = Recipe(**{**asdict(recipe), "steps": options.steps})
    record = build(options.domain, options.size, options.out, recipe=recipe)
    print(json.dumps(record["untrained_team"], indent=2))


if __name__ == "__main__":
    main()
