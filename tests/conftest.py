"""Fixtures that several test files share: random models small enough to build in milliseconds.

`tiny_qwen3`, `tiny_llama` and `tiny_gpt2` are factories. Each call returns a new `LoadedModel` on the CPU:

    loaded = tiny_qwen3()                      # equal seeds give equal weights
    other = tiny_qwen3(seed=1, dtype=torch.float64)
    loaded = tiny_gpt2(attn_pdrop=0.1)         # further keywords go to the model's config

| factory    | positions | BOS                         | EOS         | pad             | chat template        |
|------------|-----------|-----------------------------|-------------|-----------------|----------------------|
| tiny_qwen3 | rotary    | none                        | <|im_end|>  | <|endoftext|>   | <|im_start|> turns   |
| tiny_llama | rotary    | <s>, plain encoding adds it | </s>        | </s> (= EOS)    | writes <s> by itself |
| tiny_gpt2  | learned   | none                        | </s>        | </s> (= EOS)    | none                 |

`place`, `started` and `command`, for the runner, come from workplace.py; `stand_in_vllm` from stand_in_vllm.py.

All speak the same words (`tokenizer.get_vocab()`), separated by white space; anything else becomes <unk>.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_in_vllm import stand_in_vllm  # noqa: F401 - a fixture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from workplace import command, place, started  # noqa: F401 - fixtures

from mapl_core.models import LoadedModel

ModelFactory = Callable[..., LoadedModel]

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    "user assistant system agent one two three team post summary title short long write the a of and to in is "
    "red green blue cat dog bird house river runs sleeps sings , . : ? !"
).split()
# Spaces around every token keep it a word of its own for the white-space tokenizer.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def word_tokenizer(
    *, bos: str | None, eos: str, pad: str | None, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; with a BOS, plain encoding puts it in front, as Llama's does."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if bos is not None:
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = chat_template
    return tokenizer


def _build(
    architecture: tuple[type[PretrainedConfig], type[PreTrainedModel]],
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    dtype: torch.dtype,
    **config: Any,
) -> LoadedModel:
    config_class, model_class = architecture
    specials = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    # 0.2 instead of the usual 0.02: logits then differ enough for a wrong mask or position to show.
    settings = {"vocab_size": len(tokenizer), "initializer_range": 0.2, **specials, **config}
    with torch.random.fork_rng(devices=[]):  # a fixture must not move the global stream of the test that uses it
        torch.manual_seed(seed)
        model = model_class._from_config(config_class(**settings), dtype=torch.float32, attn_implementation="sdpa")
    name = f"tiny-{model.config.model_type}"
    return LoadedModel(model.to(dtype).eval(), tokenizer, name, torch.device("cpu"), dtype, "random, made by a test")


@pytest.fixture
def tiny_qwen3() -> ModelFactory:
    def make(seed: int = 0, *, dtype: torch.dtype = torch.float32, **config: Any) -> LoadedModel:
        tokenizer = word_tokenizer(bos=None, eos="<|im_end|>", pad="<|endoftext|>", chat_template=CHAT_TEMPLATE)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
        return _build((Qwen3Config, Qwen3ForCausalLM), tokenizer, seed, dtype, **{**shape, **heads, **config})

    return make


@pytest.fixture
def tiny_llama() -> ModelFactory:
    def make(seed: int = 0, *, dtype: torch.dtype = torch.float32, **config: Any) -> LoadedModel:
        tokenizer = word_tokenizer(bos="<s>", eos="</s>", pad="</s>", chat_template="<s> " + CHAT_TEMPLATE)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return _build((LlamaConfig, LlamaForCausalLM), tokenizer, seed, dtype, **{**shape, **heads, **config})

    return make


@pytest.fixture
def tiny_gpt2() -> ModelFactory:
    def make(seed: int = 0, *, dtype: torch.dtype = torch.float32, **config: Any) -> LoadedModel:
        tokenizer = word_tokenizer(bos=None, eos="</s>", pad="</s>")
        shape = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return _build((GPT2Config, GPT2LMHeadModel), tokenizer, seed, dtype, **{**shape, **config})

    return make
