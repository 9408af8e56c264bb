"""Text to token ids and back: what an agent reads, what it wrote.

Prompt and response are tokenised apart and joined as ids. Encoding the joined text instead would let a token straddle
the boundary, and then no mask could tell the response's tokens from the prompt's. A response that was sampled keeps its
sampled ids; `encode_response` is for texts that come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, form: Literal["chat", "text"], system: str = ""
) -> list[int]:
    """The ids of what an agent is asked, ready for its response to follow.

    Args:
        tokenizer: of the agent's model.
        text: the prompt.
        form: "chat" wraps the text as one user message in the tokenizer's chat template and opens the assistant's turn;
            "text" encodes it as it is, with BOS in front if the tokenizer puts one there.
        system: the system message of a chat; empty for none of ours, so that the template decides.

    Returns:
        token ids with at most one BOS, at position 0, and no EOS at the end that the text did not ask for.

    Raises:
        ValueError: for another form, or "chat" with a tokenizer that has no chat template.
    """
    if form == "chat":
        if tokenizer.chat_template is None:
            raise ValueError("form 'chat' needs a tokenizer with a chat template, this one has none; use form 'text'")
        message = [{"role": "system", "content": system}] if system else []
        message.append({"role": "user", "content": text})
        # The template writes its special tokens itself. Without return_dict=False a mapping would come back.
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    elif form == "text":
        ids = _without_added_eos(tokenizer, text, tokenizer.encode(text))
    else:
        raise ValueError(f"form must be 'chat' or 'text', got {form!r}")
    return _with_one_bos(tokenizer, list(ids))


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a finished response: no special token in front, EOS at the end, once."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a response without special tokens; spaces stay as they were written."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _without_added_eos(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    """Some tokenizers close every text with EOS; a prompt closed that way would be followed by nothing."""
    eos = tokenizer.eos_token_id
    written = tokenizer.encode(text, add_special_tokens=False).count(eos)  # those that are part of the text stay
    return ids[:-1] if ids[-1:] == [eos] and ids.count(eos) > written else ids


def _with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A text that begins with BOS gets a second one from the tokenizer: keep one."""
    while ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return ids
