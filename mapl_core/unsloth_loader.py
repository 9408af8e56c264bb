"""Unsloth as a loader: 4-bit weights and, on a GPU, its kernels. Everything above it is the same plain code.

Unsloth is imported, never copied: parts of it are AGPL-3.0 and LGPL-3.0. On a CPU it hands out ordinary Transformers
and PEFT models. On a GPU its layers differ in ways that no error would show, and that are looked after here:

- a hub id would stand for Unsloth's own quantised upload of the model, at whatever commit: exact names are asked for;
- a text longer than `max_seq_length` would be cut: that is set to the model's own limit;
- its attention ignores the attention interface, so responses do not share a prompt's forward pass
  (`attention.keeps_attention_interface`), and while it trains it ignores masks, which only right-padded rows bear;
- called without the output layer, its layers may not know that they are causal. So hidden states come from the whole
  model, which returns them in place of the logits when it is asked to, and `check_causal` looks at the result once;
- its first adapter is always called "default", and later ones are ignored or refused: `with_kernels` makes that first
  one for the sake of the kernels, and the agents' adapters are added by PEFT.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from mapl_core.seeding import global_states_kept

FIRST_ADAPTER = "default"
RETURN_HIDDEN_STATES = "UNSLOTH_RETURN_HIDDEN_STATES"


def read(source: str, device: torch.device, dtype: torch.dtype, **where: Any) -> PreTrainedModel:
    """The base model in 4 bits, in evaluation mode.

    Args:
        source: a folder or a hub id.
        device: where the weights must come to lie.
        dtype: of everything that is not held in 4 bits, and of the arithmetic.
        where: `revision` or `local_files_only`, as for Transformers.

    Raises:
        ValueError: if Unsloth chose another device than was asked for, or could not hold the model in 4 bits.
    """
    own = AutoConfig.from_pretrained(source, **where)
    fast = _fast_language_model()
    with global_states_kept(), _quiet():  # it seeds them
        model, _ = fast.from_pretrained(
            model_name=source,
            max_seq_length=own.max_position_embeddings,
            dtype=dtype,
            load_in_4bit=True,
            fast_inference=False,
            use_exact_model_name=True,
            **where,
        )
    if model.device.type != device.type:
        raise ValueError(
            f"Unsloth put {source} on {model.device}, and {device} was asked for; set `loader` to bnb4, or run with "
            "UNSLOTH_FORCE_CPU=1 if the CPU is meant"
        )
    if not getattr(model, "is_loaded_in_4bit", False):  # where bitsandbytes does not work, it says so in passing
        raise ValueError(
            f"Unsloth holds {source} in 16 bits on this machine, and 4 were asked for; set `loader` to plain, or run "
            "`python -m bitsandbytes` to see what is missing"
        )
    for token in ("bos", "eos", "pad"):  # it repairs a tokenizer that is not used here, and notes that in the config
        setattr(model.config, f"{token}_token_id", getattr(own, f"{token}_token_id", None))
    return model.eval()


def with_kernels(
    model: PreTrainedModel, projections: list[str], *, rank: int, alpha: int, gradient_checkpointing: bool
) -> PeftModel:
    """The model with one adapter, `FIRST_ADAPTER`, and on a GPU with Unsloth's kernels around the adapted layers.

    The kernels read whichever adapter is active when a layer is called. Activations are checkpointed by Unsloth, which
    keeps them in host memory.
    """
    with global_states_kept(), _quiet():  # LoRA's usual start is drawn, and seeded
        return _fast_language_model().get_peft_model(
            model,
            r=rank,
            target_modules=projections,
            lora_alpha=alpha,
            lora_dropout=0.0,
            bias="none",
            use_gradient_checkpointing="unsloth" if gradient_checkpointing else False,
        )


def hidden_states(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """(rows, width, hidden) last hidden states of a model that runs in Unsloth's own layers."""
    before = os.environ.get(RETURN_HIDDEN_STATES)
    os.environ[RETURN_HIDDEN_STATES] = "1"
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        if before is None:
            del os.environ[RETURN_HIDDEN_STATES]
        else:
            os.environ[RETURN_HIDDEN_STATES] = before


def check_causal(states_of: Callable[[Tensor], Tensor], hidden_size: int, device: torch.device) -> None:
    """Refuse hidden states that are none, or that depend on later tokens: no loss would show either.

    Args:
        states_of: (1, tokens) ids -> (1, tokens, hidden) states.
        hidden_size: of the model.

    Raises:
        RuntimeError: naming what was found and another loader.
    """
    ids = torch.arange(3, 11, device=device)[None]
    with torch.no_grad():
        whole, start = states_of(ids), states_of(ids[:, :-1])
    if whole.shape[-1] != hidden_size:
        found = f"states of width {whole.shape[-1]} instead of {hidden_size}"
    else:
        moved = float((whole[:, :-1] - start).float().norm() / start.float().norm())
        if moved < 0.05:  # 16-bit rounding of another shape moves them by a thousandth, an open mask by about one
            return
        found = f"states that a later token moves by {moved:.2f} of their norm"
    raise RuntimeError(
        f"Unsloth's layers return {found}; this version does not fit, set the profile's `loader` to bnb4"
    )


def _fast_language_model() -> Any:
    """Unsloth's entry point. It asks to be imported before Transformers, whose trainers it rewrites; none is used."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # it would tell the hub of every load
    with warnings.catch_warnings(), _quiet():
        warnings.filterwarnings("ignore", message="(?s).*Unsloth should be imported before")
        from unsloth import FastLanguageModel
    return FastLanguageModel


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on standard output: its greetings are no result of a run."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
