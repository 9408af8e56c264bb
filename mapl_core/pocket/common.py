"""What the pocket models of all domains share: word tokenizer, model shapes, folders.

A pocket model is an ordinary Hugging Face folder: Qwen3 architecture, its own tokenizer with a chat template, bfloat16
safetensors. One model exists per domain and size; 1x and 2x are shipped, 4x is built on demand into a cache folder.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    from mapl_core.domains.base import Domain, Task

DOMAINS = ("tldr", "coophe", "bfcl", "travel")
WEIGHTS = Path(__file__).parent / "weights"
MAX_POSITIONS = 1024

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
TAGS = tuple(f"<{slash}agent_{agent}>" for agent in range(3) for slash in ("", "/"))
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Size of a pocket model: wide and shallow, since a CPU pays for every layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int


SHAPES = {
    "1x": Shape(hidden=192, layers=3, heads=6, kv_heads=2, feed_forward=448),
    "2x": Shape(hidden=224, layers=4, heads=8, kv_heads=2, feed_forward=640),
    "4x": Shape(hidden=288, layers=5, heads=9, kv_heads=3, feed_forward=768),
}


def language(domain: str) -> ModuleType:
    """The generator module of a domain.

    It offers `make_tasks` and `reserved_slots` (the tasks), `atoms`, `LAYOUT` and `vocabulary_texts` (the vocabulary),
    `write_example` (the corpus), `copied_words` and `NEW_TOKENS` (for measuring the base).
    """
    if domain not in DOMAINS:
        raise ValueError(f"unknown pocket domain {domain!r}; valid: {', '.join(DOMAINS)}")
    return importlib.import_module(f"mapl_core.pocket.{domain}")


# Corpus --------------------------------------------------------------------------------------------------------------


def prompt_forms(domain: Domain, task: Task, drafts: Sequence[str]) -> dict[str, Callable[[], str]]:
    """What writes each prompt of a task that an experiment may use, by form and agent, in the domain's own words.

    The corpus shows one form of every task, and writing the others would take most of the time of its examples.

    Args:
        domain: the domain, with the team that answers.
        task: a pocket task.
        drafts: one earlier answer per agent, shown by the sequential and the discussion form.
    """
    forms = {"coordinator": partial(domain.coordinator_prompt, task), "single": partial(domain.single_prompt, task)}
    for agent in range(domain.num_agents):
        forms[f"agent {agent}"] = lambda agent=agent: domain.prompts(task)[agent]
        forms[f"sequential {agent}"] = partial(domain.sequential_prompt, agent, task, drafts[:agent])
        forms[f"discussion {agent}"] = lambda agent=agent: domain.discussion_prompts(task, drafts)[agent]
    return forms


# Tokenizer -----------------------------------------------------------------------------------------------------------


def token_pattern(atoms: Sequence[str], layout: str = "") -> str:
    """Regular expression of one token: an atom (longest first), what `layout` matches, a word, or one sign."""
    listed = "|".join(re.escape(atom) for atom in sorted(atoms, key=len, reverse=True))
    return rf"(?<!\w)(?:{listed})(?!\w)|{layout}{'|' if layout else ''}\w+|[^\w\s]"


def build_tokenizer(texts: Iterable[str], atoms: Sequence[str], layout: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of the texts and per atom.

    Decoding separates words by one blank and attaches stops to their word; encoding the decoded text gives the ids
    back. The tags <agent_i> are ordinary tokens, so that a coordinator's decoded text still holds them.

    Args:
        texts: texts that hold the whole vocabulary.
        atoms: phrases and signs that are one token each; the tags are always among them.
        layout: regular expression of tokens that are no whole words, such as the line ends of a program; without it
            white space only separates.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    atoms = [*TAGS, *atoms]
    pattern = token_pattern(atoms, layout)
    found = {token for text in texts for token in re.findall(pattern, text)}
    words = sorted(found.union(atoms, ROLES, (".", ",", "?", ":")))
    vocabulary = {token: index for index, token in enumerate((PAD, START, END, UNKNOWN, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # `invert`: the matches are the pieces, and what lies between them (white space) is removed.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        bos_token=None,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def domain_tokenizer(domain: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a domain, from its generator and its own prompts."""
    from mapl_core.domains import get_domain

    module = language(domain)
    return build_tokenizer(module.vocabulary_texts(get_domain(domain)), module.atoms(), module.LAYOUT)


# Model ---------------------------------------------------------------------------------------------------------------


def model_config(size: str, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Qwen3 configuration of a size, agreeing with the tokenizer on end and padding tokens."""
    from transformers import Qwen3Config

    shape = SHAPES[size]
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


# Folders -------------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Folder for what is built once per machine: MAPL_CACHE, or ~/.cache/mapl."""
    return Path(os.environ.get("MAPL_CACHE") or Path.home() / ".cache" / "mapl")


def model_path(domain: str, size: str) -> Path:
    """Folder of a pocket model; a size that is not shipped is built on the first call, which takes minutes.

    Args:
        domain: such as "tldr".
        size: "1x", "2x" or "4x".

    Raises:
        ValueError: for an unknown domain or size.
    """
    language(domain)
    if size not in SHAPES:
        raise ValueError(f"unknown pocket size {size!r}; valid: {', '.join(SHAPES)}")
    shipped = WEIGHTS / f"{domain}-{size}"
    if (shipped / "config.json").is_file():
        return shipped
    from mapl_core.pocket.build import build_cached  # here: shipped models need no trainer

    return build_cached(domain, size)
