"""Forward passes that score given texts: log-probabilities of responses, and scalars read at a text's last token.

Responses to one prompt are packed behind it in a single row: `prompt | response | response | ...`. Attention lets each
response see the prompt and itself (see `attention`), and its positions start again behind the prompt, so every number
is that of the response scored alone, while the prompt is computed once. Rows are run in micro-batches of bounded size;
gradients are accumulated one micro-batch at a time, so memory does not grow with the number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from mapl_core.adapters import AdaptedModel
from mapl_core.attention import Packing
from mapl_core.losses import exact_kl
from mapl_core.seeding import Stream

Ids = tuple[int, ...]


class Item(NamedTuple):
    """What is scored: a response behind a prompt, and the positions of its forced tokens, which are not."""

    prompt: Ids
    response: Ids
    forced: Ids = ()


LOGITS_HELD = 2**26  # logits in memory at a time, 256 MiB in float32


@dataclass(frozen=True)
class PackedRow:
    """One prompt with some of its responses, as indices among the distinct items (`members`) and as these items."""

    prompt: Ids
    items: tuple[Item, ...]
    members: tuple[int, ...]

    @property
    def responses(self) -> list[Ids]:
        return [item.response for item in self.items]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))


def pack_rows(items: Sequence[Item], *, max_tokens: int, share_prompts: bool) -> list[list[PackedRow]]:
    """Group responses by prompt into rows and rows into micro-batches of at most `max_tokens` padded tokens.

    A single response longer than `max_tokens` gets a micro-batch of its own.
    """
    by_prompt: dict[Ids, list[int]] = {}
    for index, item in enumerate(items):
        by_prompt.setdefault(item.prompt, []).append(index)

    def row(prompt: Ids, taken: list[int]) -> PackedRow:
        return PackedRow(prompt, tuple(items[index] for index in taken), tuple(taken))

    def fits(rows: list[PackedRow]) -> bool:
        return padded_tokens(rows, shared=share_prompts) <= max_tokens

    rows: list[PackedRow] = []
    for prompt, indices in by_prompt.items():
        taken: list[int] = []
        for index in sorted(indices, key=lambda index: len(items[index].response)):  # like lengths waste little padding
            if taken and not (share_prompts and fits([row(prompt, [*taken, index])])):
                rows.append(row(prompt, taken))
                taken = []
            taken.append(index)
        rows.append(row(prompt, taken))
    rows.sort(key=lambda row: row.length)
    batches: list[list[PackedRow]] = []
    for next_row in rows:
        if batches and fits([*batches[-1], next_row]):
            batches[-1].append(next_row)
        else:
            batches.append([next_row])
    return batches


def padded_tokens(rows: Sequence[PackedRow], *, shared: bool) -> int:
    """Places that a micro-batch of rows takes up in every layer: prompts and responses each laid out as a rectangle in
    attention where prompts are shared (see `attention`), else rows padded to the longest. Within one layer attention
    also copies a prompt's keys and values for each of its responses."""
    if not shared:
        return len(rows) * max(row.length for row in rows)
    longest = max(len(response) for row in rows for response in row.responses)
    return len(rows) * max(len(row.prompt) for row in rows) + longest * sum(len(row.responses) for row in rows)


@dataclass
class PackedBatch:
    """Tensors of one micro-batch.

    Attributes:
        inputs: what the backbone is given: `input_ids` and `position_ids`, and which tokens see which: the `packing` of
            one flat sequence, or the `attention_mask` of right-padded rows that hold one response each.
        predictors: flat positions whose hidden state predicts a response token that is not forced, (tokens,).
        targets: those response tokens, (tokens,).
        owners: for each of them, the index of its response within the batch, (tokens,).
        last: flat position of the last token of each response (of its prompt, where a response is empty), (responses,).
        members: index of each response among the distinct items.
    """

    inputs: dict[str, Tensor | Packing]
    predictors: Tensor
    targets: Tensor
    owners: Tensor
    last: Tensor
    members: list[int]


def build_batch(rows: Sequence[PackedRow], *, shared: bool, pad_id: int, device: torch.device) -> PackedBatch:
    """Tensors of `rows`: one flat sequence where prompts are `shared`, else a padded row for each of them."""
    width = max(row.length for row in rows)
    tokens: list[int] = []
    positions: list[int] = []
    prompts, responses, parents = [], [], []  # spans in the flat sequence
    predictors: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    last: list[int] = []
    members: list[int] = []
    for number, row in enumerate(rows):
        start, length = len(tokens), len(row.prompt)
        prompts.append(range(start, start + length))
        tokens += row.prompt
        positions += range(length)
        for (_, response, forced), member in zip(row.items, row.members, strict=True):
            own = range(len(tokens), len(tokens) + len(response))
            if response:
                responses.append(own)
                parents.append(number)
            before = [start + length - 1, *own[:-1]]
            chosen = sorted(set(range(len(response))).difference(forced))
            predictors += [before[place] for place in chosen]
            targets += [response[place] for place in chosen]
            owners += [len(members)] * len(chosen)
            tokens += response
            positions += range(length, length + len(response))
            last.append(own[-1] if response else start + length - 1)
            members.append(member)
        if not shared:
            padding = (number + 1) * width - len(tokens)
            tokens += [pad_id] * padding
            positions += [0] * padding
    shape = (1, -1) if shared else (len(rows), width)
    inputs = {
        name: torch.tensor(v, device=device).view(shape)
        for name, v in (("input_ids", tokens), ("position_ids", positions))
    }
    if shared:
        inputs["packing"] = Packing.of(prompts, responses, parents, device)
        # Transformers hands a 4D mask on as it is, and our attention reads none; any other would return NaN.
        inputs["attention_mask"] = torch.full((1, 1, 1, 1), torch.nan, device=device)
    else:
        lengths = torch.tensor([row.length for row in rows], device=device)
        inputs["attention_mask"] = (torch.arange(width, device=device) < lengths[:, None]).long()
    return PackedBatch(
        inputs,
        *(torch.tensor(v, dtype=torch.long, device=device) for v in (predictors, targets, owners, last)),
        members,
    )


def _distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """The distinct items in order of first appearance, and for each given item the index of its twin among them."""
    position: dict[Item, int] = {}
    where = [position.setdefault(Item(*item), len(position)) for item in items]
    return list(position), where


def _packed(adapted: AdaptedModel, items: Sequence[Item], max_tokens: int) -> list[list[PackedRow]]:
    for item in items:
        if not item.prompt:
            raise ValueError("a prompt has no tokens; the first response token would have nothing that predicts it")
    return pack_rows(items, max_tokens=max_tokens, share_prompts=adapted.shares_prompts)


def _micro_batches(adapted: AdaptedModel, packed: Sequence[Sequence[PackedRow]]) -> Iterator[PackedBatch]:
    """One after the other: the masks of all of them at once would grow with the number of pairs."""
    pad_id = adapted.tokenizer.pad_token_id or 0  # any id does: pads are masked by position, never by id
    for rows in packed:
        yield build_batch(rows, shared=adapted.shares_prompts, pad_id=pad_id, device=adapted.device)


def _hidden_states(adapted: AdaptedModel, batch: PackedBatch) -> Tensor:
    """(tokens, hidden) last hidden states of a batch under the active adapter."""
    return adapted.hidden_states(batch.inputs).flatten(0, 1)


def _predicting_states(adapted: AdaptedModel, batch: PackedBatch) -> Tensor:
    """(response tokens, hidden) the states of a batch that predict its response tokens."""
    return _hidden_states(adapted, batch)[batch.predictors]


@torch.no_grad()
def _reference_states(adapted: AdaptedModel, batch: PackedBatch) -> Tensor:
    """The same under the reference policy."""
    with adapted.using(None):
        return _predicting_states(adapted, batch)


def _token_logprobs(
    adapted: AdaptedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    reference: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(tokens,) float32 log-probability of each target, and its exact KL to the reference where that is given.

    The logits of a large vocabulary would outweigh everything else in memory. So they are held for some tokens at a
    time, and a backward pass computes them again.

    Args:
        hidden: (tokens, hidden) the policy's hidden states that predict the targets.
        reference: (tokens, hidden) the reference's.
    """
    rows = max(1, LOGITS_HELD // adapted.output_layer.weight.shape[0])

    def log_probs(hidden: Tensor) -> Tensor:
        logits = adapted.output_layer(hidden).float()
        return log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)

    def read(hidden: Tensor, targets: Tensor, reference: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        policy = log_probs(hidden)
        # Log-probabilities are logits of themselves, normalised already: equal policies have a KL of exactly 0.
        kl = None if reference is None else exact_kl(policy, log_probs(reference))
        return policy.gather(1, targets[:, None]).squeeze(1), kl

    again = torch.is_grad_enabled() and len(hidden) > rows
    run = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False) if again else read
    given = (hidden, targets) if reference is None else (hidden, targets, reference)
    parts = [run(*part) for part in zip(*(x.split(rows) for x in given), strict=True)]
    tokens, divergences = zip(*parts, strict=True)
    return torch.cat(tokens), None if reference is None else torch.cat(divergences)


def _per_response(batch: PackedBatch, of_tokens: Tensor) -> Tensor:
    """(responses,) sums over the tokens of each response of a batch."""
    return torch.zeros(len(batch.members), device=of_tokens.device).index_add(0, batch.owners, of_tokens)


@torch.no_grad()
def response_logprobs(
    adapted: AdaptedModel, adapter: str | None, items: Sequence[Item], *, max_tokens: int, temperature: float = 1.0
) -> Tensor:
    """log pi(response given prompt), summed over all response tokens that are not forced, end of sequence included.

    Args:
        adapted, adapter: the policy; `adapter=None` is the reference policy (adapters off).
        items: prompt and response ids, and where constrained decoding was used the forced positions. An empty response
            has log-probability 0.
        max_tokens: bound on the padded tokens of one forward pass.
        temperature: divides the logits; 1 for every loss, the sampling temperature for the sampler's distribution.

    Returns:
        (len(items),) float32, on the CPU, without a graph.
    """
    distinct, where = _distinct(items)
    result = torch.zeros(len(distinct))
    with adapted.using(adapter):
        for batch in _micro_batches(adapted, _packed(adapted, distinct, max_tokens)):
            hidden = _predicting_states(adapted, batch)
            token, _ = _token_logprobs(adapted, hidden, batch.targets, temperature=temperature)
            result[batch.members] = _per_response(batch, token).cpu()
    return result[where]


@torch.no_grad()
def token_logprobs(
    adapted: AdaptedModel,
    adapter: str | None,
    items: Sequence[Item],
    *,
    max_tokens: int,
    choices: Sequence[Sequence[Tensor] | None] | None = None,
) -> list[Tensor]:
    """log pi(token given what stands before it) of every response token that is not forced, at temperature 1.

    Args:
        adapted, adapter, items, max_tokens: as in `response_logprobs`.
        choices: for an item whose tokens were chosen among fewer than all, for each of these tokens the (vocabulary,)
            mask of those (see `structured.replay`); the softmax is then taken over them alone. None for all others.

    Returns:
        For each item (its tokens that are not forced,) float32, on the CPU, without a graph.
    """
    items = [Item(*item) for item in items]
    rows = max(1, LOGITS_HELD // adapted.output_layer.weight.shape[0])
    result: list[Tensor] = [torch.empty(0)] * len(items)
    with adapted.using(adapter):
        for batch in _micro_batches(adapted, _packed(adapted, items, max_tokens)):
            hidden = _predicting_states(adapted, batch)
            counts = torch.bincount(batch.owners, minlength=len(batch.members)).tolist()
            for member, own, targets in zip(
                batch.members, hidden.split(counts), batch.targets.split(counts), strict=True
            ):
                masks = choices[member] if choices else None
                parts = []
                for start in range(0, len(own), rows):
                    logits = adapted.output_layer(own[start : start + rows]).float()
                    if masks is not None:
                        logits = _only(masks[start : start + rows], logits)
                    chosen = targets[start : start + rows, None]
                    parts.append(log_softmax(logits, dim=-1).gather(1, chosen).squeeze(1).cpu())
                result[member] = torch.cat(parts) if parts else result[member]
    return result


def _only(masks: Sequence[Tensor], logits: Tensor) -> Tensor:
    """(tokens, vocabulary) logits with minus infinity outside the masks, which may be narrower than the logits."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    for row, mask in enumerate(masks):
        allowed[row, : len(mask)] = mask
    return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def graph_logprobs(
    adapted: AdaptedModel, adapter: str, items: Sequence[Item], *, max_tokens: int, with_kl: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The log-probabilities of `response_logprobs` with their graph, where one micro-batch holds all items.

    Returns:
        Two (len(items),) float32 tensors with a graph: the log-probabilities, and with `with_kl` the exact KL to the
        reference (see `accumulate_logprob_gradients`), else zeros. None where more than one micro-batch would be
        needed, where gradient checkpointing would recompute under whichever adapter is active at the time of the
        backward pass, and in float16, whose backward pass needs the scale of `AdaptedModel.backward`.
    """
    distinct, where = _distinct(items)
    packed = _packed(adapted, distinct, max_tokens)
    if len(packed) != 1 or adapted.gradient_checkpointing or adapted.loaded.dtype == torch.float16:
        return None
    (batch,) = _micro_batches(adapted, packed)
    reference = _reference_states(adapted, batch) if with_kl else None
    with adapted.using(adapter):
        token, kl = _token_logprobs(adapted, _predicting_states(adapted, batch), batch.targets, reference=reference)
    order = torch.tensor(batch.members, device=token.device).argsort()
    summed = [_per_response(batch, of_tokens) for of_tokens in (token, torch.zeros_like(token) if kl is None else kl)]
    return tuple(of_members[order][where].cpu() for of_members in summed)


def accumulate_logprob_gradients(
    adapted: AdaptedModel,
    adapter: str,
    items: Sequence[Item],
    weights: Tensor,
    *,
    max_tokens: int,
    kl_weight: float = 0.0,
) -> tuple[Tensor, float]:
    """Add d/dtheta of sum_j weights[j] * log pi(response_j) to the gradients of one adapter.

    `weights` is the derivative of a loss by the log-probabilities (its vector-Jacobian product), so any loss that is a
    function of summed log-probabilities is trained exactly, one micro-batch in memory at a time. Each backward pass
    ends before the adapter is switched, which also keeps gradient checkpointing right.

    With `kl_weight` > 0 the exact KL divergence between the policy's and the reference's next-token distributions,
    summed over response tokens, is added for every item with that weight; the effect of earlier tokens on later
    prefixes is left out, as usual.

    Returns:
        The log-probabilities on the way, (len(items),) float32 on the CPU without a graph, and the summed KL over all
        items (0.0 where it is off), in nats.
    """
    distinct, where = _distinct(items)
    summed = torch.zeros(len(distinct)).index_add(0, torch.tensor(where, dtype=torch.long), weights.float().cpu())
    counts = torch.zeros(len(distinct)).index_add(0, torch.tensor(where, dtype=torch.long), torch.ones(len(where)))
    used, unused = [], []  # a zero weight needs no graph
    for i, weight in enumerate(summed.tolist()):
        (used if weight != 0 or kl_weight else unused).append(i)
    values = torch.zeros(len(distinct))
    values[unused] = response_logprobs(adapted, adapter, [distinct[i] for i in unused], max_tokens=max_tokens)
    total_kl = 0.0
    for batch in _micro_batches(adapted, _packed(adapted, [distinct[i] for i in used], max_tokens)):
        members = torch.tensor([used[i] for i in batch.members])
        reference = _reference_states(adapted, batch) if kl_weight else None
        with adapted.using(adapter):
            hidden = _predicting_states(adapted, batch)
            token, kl = _token_logprobs(adapted, hidden, batch.targets, reference=reference)
            logprobs = _per_response(batch, token)
            values[members] = logprobs.detach().cpu()
            objective = (summed[members].to(token.device) * logprobs).sum()
            if kl is not None:
                weighted = (kl * counts[members].to(kl.device)[batch.owners]).sum()
                total_kl += float(weighted.detach())
                objective = objective + kl_weight * weighted
            adapted.backward(objective, adapted.parameters(adapter))
    return values[where], total_kl


class ScalarModel:
    """A scalar read at the last token of a text: the reward model r_phi, or a critic V (paper, section 4.2).

    It is a LoRA adapter of its own on a frozen base, with a linear head on the last hidden state. The head starts at
    zero, so an untrained one gives every text the value 0. It reads the last token by position, so padding and a pad
    id equal to the end-of-sequence id cannot move it.
    """

    def __init__(self, adapted: AdaptedModel, name: str, stream: Stream, *, max_tokens: int):
        adapted.add_adapter(name, stream)
        self.adapted, self.name, self.max_tokens = adapted, name, max_tokens
        hidden = adapted.loaded.model.config.hidden_size
        self.head = nn.utils.skip_init(nn.Linear, hidden, 1, device=adapted.device)  # no draw from a global generator
        for parameter in self.head.parameters():
            # A random direction on large hidden states is noise as strong as what the pairs teach, and a fit of a few
            # dozen steps does not unlearn it.
            nn.init.zeros_(parameter)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.adapted.parameters(self.name), *self.head.parameters()]

    def _values(self, batch: PackedBatch) -> Tensor:
        return self.head(_hidden_states(self.adapted, batch)[batch.last].float()).squeeze(-1)

    @torch.no_grad()
    def values(self, items: Sequence[Item]) -> Tensor:
        """(len(items),) the scalar of each text, given as (shared prefix ids, remaining ids)."""
        distinct, where = _distinct(items)
        result = torch.zeros(len(distinct))
        with self.adapted.using(self.name):
            for batch in _micro_batches(self.adapted, _packed(self.adapted, distinct, self.max_tokens)):
                result[batch.members] = self._values(batch).cpu()
        return result[where]

    def fits(self, items: Sequence[Item]) -> bool:
        """Whether one micro-batch holds these texts."""
        return len(_packed(self.adapted, _distinct(items)[0], self.max_tokens)) == 1

    def backward(self, items: Sequence[Item], loss_of: Callable[[Tensor], Tensor]) -> None:
        """Add the gradient of `loss_of(values)` to the head and the adapter.

        Where one micro-batch holds all texts, they are read once. Otherwise a first pass without a graph gives the
        values, the loss gives its derivative by each, and a second pass carries those back micro-batch by micro-batch.
        """
        distinct, where = _distinct(items)
        packed = _packed(self.adapted, distinct, self.max_tokens)
        if len(packed) == 1:
            (batch,) = _micro_batches(self.adapted, packed)
            with self.adapted.using(self.name):
                values = self._values(batch)
                order = torch.tensor(batch.members, device=values.device).argsort()
                loss = loss_of(values[order][where].cpu())  # what it compares them with is on the host
                self.adapted.backward(loss, self.parameters())
            return
        values = self.values(items).requires_grad_()
        weights = torch.autograd.grad(loss_of(values), values)[0]
        summed = torch.zeros(len(distinct)).index_add(0, torch.tensor(where, dtype=torch.long), weights)
        with self.adapted.using(self.name):
            for batch in _micro_batches(self.adapted, packed):
                values = self._values(batch)
                objective = (summed[batch.members].to(values.device) * values).sum()
                self.adapted.backward(objective, self.parameters())

    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
        """Clip the gradient and take a step.

        Raises:
            FloatingPointError: if the gradient is not finite; no weight and no optimiser state has changed.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of {self.name!r} is {norm}; nothing was updated. Lower its learning rate"
            )
        optimizer.step()

    def state(self) -> dict:
        """A copy of the adapter's and the head's weights."""
        return {
            "adapter": self.adapted.state(self.name),
            "head": {name: value.clone() for name, value in self.head.state_dict().items()},
        }

    def load_state(self, state: dict) -> None:
        self.adapted.load_state(self.name, state["adapter"])
        self.head.load_state_dict(state["head"])

    def close(self) -> None:
        """Remove the adapter from the base."""
        self.adapted.delete_adapter(self.name)
