"""Constrained decoding: an answer's fixed text is forced, and only the values in it are the model's choice.

A `Skeleton` is the text around the values (for Travel the JSON of `write_action`); each value is a JSON string that the
model ends with its closing quote. A token is *forced* where the skeleton leaves one. Forced tokens are no choice of the
policy, so no log-probability counts them; the others are scored under the unmasked softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mapl_core.domains.base import QUOTE, Skeleton


@dataclass(frozen=True)
class ValueTokens:
    """Which tokens of a vocabulary may stand inside a value.

    Attributes:
        first: (vocabulary,) true for tokens that a value may begin with: some character that is not blank.
        inside: (vocabulary,) true for tokens that may follow, the closing quote included.
        quote: id of the closing quote.
    """

    first: Tensor
    inside: Tensor
    quote: int

    @cached_property
    def grammar(self) -> str:
        """What a value begins with and goes on with, as two rules of `SkeletonTokens.grammar`."""
        others = self.inside.clone()
        others[self.quote] = False  # it ends the value, and a grammar reads a token by one rule only
        return f"first: {_token_set(self.first)}\ninside: {_token_set(others)}\n"


@cache
def value_tokens(tokenizer: PreTrainedTokenizerBase) -> ValueTokens:
    """Tokens without quotes, backslashes and control characters: whatever they make is a valid JSON string.

    Raises:
        ValueError: if the tokenizer has no token of its own for the closing quote.
    """
    quote = tokenizer.encode(QUOTE, add_special_tokens=False)
    if len(quote) != 1:
        raise ValueError(
            f"this tokenizer writes {QUOTE} as the tokens {quote}; constrained decoding needs one token for it: "
            "switch the domain's option `structured` off"
        )
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], clean_up_tokenization_spaces=False)
    plain = [
        token not in special and bool(text) and not any(sign in '"\\' or ord(sign) < 32 for sign in text)
        for token, text in enumerate(texts)
    ]
    first = torch.tensor([fits and not text.isspace() for fits, text in zip(plain, texts, strict=True)])
    inside = torch.tensor(plain)
    inside[quote[0]] = True
    return ValueTokens(first, inside, quote[0])


@dataclass(frozen=True)
class SkeletonTokens:
    """A skeleton in the tokens of one model.

    Attributes:
        pieces: ids of the fixed texts, each encoded by itself.
        end: id of the end of sequence, forced behind the last piece.
        most: most tokens of a value, its closing quote not counted.
        values: the tokens that a value may hold.
    """

    pieces: tuple[tuple[int, ...], ...]
    end: int
    most: int
    values: ValueTokens

    @classmethod
    def of(cls, skeleton: Skeleton, tokenizer: PreTrainedTokenizerBase) -> SkeletonTokens:
        pieces = tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in skeleton.texts)
        return cls(pieces, tokenizer.eos_token_id, skeleton.value_tokens, value_tokens(tokenizer))

    @property
    def longest(self) -> int:
        """Tokens of the longest answer: with fewer the skeleton might not be closed."""
        return sum(map(len, self.pieces)) + (len(self.pieces) - 1) * (self.most + 1) + 1

    @property
    def grammar(self) -> str:
        """The same skeleton for a sampler that a grammar steers: Lark rules over token ids, as llguidance reads them.

        Ids, not texts: a text could be written in other tokens than its own encoding, and then a token that is forced
        here would be a choice there. The end of sequence is left out: it is all that may follow a finished text.
        """
        more = f" inside{{0,{self.most - 1}}}" if self.most > 1 else ""
        rules = [f"value: first{more} <[{self.values.quote}]>\n", self.values.grammar]
        sequence = []
        for number, piece in enumerate(self.pieces):
            sequence += ["value"] if number else []
            if piece:
                sequence.append(f"piece{number}")
                rules.append(f"piece{number}: " + " ".join(f"<[{token}]>" for token in piece) + "\n")
        return "".join([f"start: {' '.join(sequence)}\n", *rules])


class SkeletonState:
    """How far one answer has come."""

    def __init__(self, tokens: SkeletonTokens):
        self.tokens = tokens
        self.forced_positions: list[int] = []
        self._written = 0
        self._piece = 0
        self._waiting = list(tokens.pieces[0])  # fixed tokens that come before the next value
        self._length = 0  # of the value being written
        self._end_behind_last_piece()

    @property
    def forced(self) -> int | None:
        """The only token that may come next, None inside a value."""
        if self._waiting:
            return self._waiting[0]
        return self.tokens.values.quote if self._length == self.tokens.most else None

    @property
    def choices(self) -> Tensor:
        """(vocabulary,) which tokens may come next inside a value."""
        return self.tokens.values.inside if self._length else self.tokens.values.first

    def allows(self, token: int) -> bool:
        return token == self.forced if self.forced is not None else bool(self.choices[token])

    def advance(self, token: int) -> None:
        """Take in one written token, which `allows` has found right."""
        if self.forced is not None:
            self.forced_positions.append(self._written)
        self._written += 1
        if self._waiting:
            self._waiting.pop(0)
        elif token == self.tokens.values.quote:
            self._piece, self._length = self._piece + 1, 0
            self._waiting = list(self.tokens.pieces[self._piece])
            self._end_behind_last_piece()
        else:
            self._length += 1

    def _end_behind_last_piece(self) -> None:
        if self._piece + 1 == len(self.tokens.pieces):
            self._waiting.append(self.tokens.end)


def encode_answer(
    text: str, skeleton: Skeleton, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]] | None:
    """Ids of a finished answer that was written elsewhere, and the positions of the forced ones among them.

    None if the text has another form than the skeleton, or holds a value that could not have been sampled.
    """
    values = skeleton.values(text)
    if values is None:
        return None
    tokens = SkeletonTokens.of(skeleton, tokenizer)
    ids = list(tokens.pieces[0])
    for value, piece in zip(values, tokens.pieces[1:], strict=True):
        ids += [*tokenizer.encode(value, add_special_tokens=False), tokens.values.quote, *piece]
    ids.append(tokens.end)
    found = replay(ids, tokens)
    return None if found is None else (ids, found[0])


def replay(ids: Sequence[int], tokens: SkeletonTokens) -> tuple[list[int], list[Tensor]] | None:
    """What a skeleton decided about an answer that another sampler wrote under it.

    Returns:
        The positions of its forced ids, and for each of the others, in order, the (vocabulary,) mask of the tokens that
        it was chosen among. None if the skeleton rules one of the ids out.
    """
    state, choices = SkeletonState(tokens), []
    for token in ids:
        if not state.allows(token):
            return None
        if state.forced is None:
            choices.append(state.choices)
        state.advance(token)
    return state.forced_positions, choices


def constrain(logits: Tensor, states: Sequence[SkeletonState | None]) -> Tensor:
    """(rows, vocabulary) logits with everything that a row's skeleton rules out at minus infinity."""
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, state in enumerate(states):
        if state is None:
            continue
        if state.forced is not None:
            allowed[row] = False
            allowed[row, state.forced] = True
        else:
            allowed[row] = False
            allowed[row, : len(state.choices)] = state.choices  # a model may have more logits than its tokenizer tokens
    return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def _token_set(allowed: Tensor) -> str:
    """Token ids as a grammar names a choice among them, such as <[0-33,35]>."""
    ids = allowed.nonzero().squeeze(1).tolist()
    runs: list[list[int]] = []
    for token in ids:
        if runs and runs[-1][1] == token - 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return f"<[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}]>"
