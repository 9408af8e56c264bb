"""Helpers around the random models of tests/conftest.py: adapters that matter, and log-probabilities the plain way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from toy_domains import ToyDomain

from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import Response, Trajectory
from mapl_core.models import LoadedModel
from mapl_core.policies import JointPolicy
from mapl_core.sampling import SamplingSettings
from mapl_core.scoring import ScalarModel
from mapl_core.seeding import Stream


def adapted_model(loaded: LoadedModel, *names: str, seed: int = 0, **options) -> AdaptedModel:
    """A base with adapters of these names, each with weights of its own, so that every one of them changes the base."""
    adapted = AdaptedModel(loaded, **{"rank": 4, "alpha": 8, **options})
    for index, name in enumerate(names):
        adapted.add_adapter(name, Stream(seed, "init", index))
        randomize_adapter(adapted, name, seed=100 * seed + index)
    return adapted


def randomize_adapter(adapted: AdaptedModel, name: str, *, seed: int, scale: float = 0.3) -> None:
    """Fill lora_B, which starts at zero (a fresh adapter is the base), and lora_A with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapted.parameters(name):
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def randomize_head(scalar: ScalarModel, *, seed: int) -> None:
    """Give a scalar model a random head in place of zeros, so that different texts have different values."""
    weight = scalar.head.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) / weight.shape[1] ** 0.5)


def plain_logprob(
    model: nn.Module,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    left: int = 0,
    right: int = 0,
    pad_id: int = 0,
    temperature: float = 1.0,
) -> Tensor:
    """log pi(response given prompt) of one sequence by a plain forward pass, with so many pads on either side."""
    ids = torch.tensor([[pad_id] * left + [*prompt, *response] + [pad_id] * right])
    mask = torch.tensor([[0] * left + [1] * (len(prompt) + len(response)) + [0] * right])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
    start = left + len(prompt)
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return sum(log_probs[start + offset - 1, token] for offset, token in enumerate(response))


def trajectory(
    actions: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]],
    *,
    task_id: str = "task",
    reward: float = 0.0,
    responses: Sequence[Sequence[str]] | None = None,
) -> Trajectory:
    """A trajectory from [turn][policy] (prompt ids, response ids); the same reward at every turn."""
    acted = tuple(
        tuple(Response(tuple(prompt), tuple(ids), " ".join(map(str, ids)), False) for prompt, ids in turn)
        for turn in actions
    )
    texts = responses or [[action.text for action in turn] for turn in acted]
    return Trajectory(
        task_id, acted, tuple(map(tuple, texts)), (reward,) * len(acted), ({"reward": reward},) * len(acted)
    )


def gradients(adapted: AdaptedModel, name: str) -> list[Tensor]:
    """Copies of an adapter's gradients, zeros where there is none; the gradients are then cleared."""
    copies = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in adapted.parameters(name)
    ]
    for weight in adapted.parameters(name):
        weight.grad = None
    return copies


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the expected, of lists of tensors taken as one vector."""
    flat = [torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def make_policy(
    bases,
    *,
    structure="dec",
    random_adapters=True,
    trained=True,
    limits=6,
    micro_batch_tokens=8192,
    temperature=1.0,
    top_p=1.0,
    prompt_form="text",
    seed=0,
    kind=JointPolicy,
    **domain_options,
) -> JointPolicy:
    """A team of a toy domain; `bases` is one base for all its policies or a list of them."""
    domain = ToyDomain(**domain_options)
    count = domain.num_agents if structure == "dec" else 1
    bases = list(bases) if isinstance(bases, list) else [bases] * count
    limits = [limits] * count if isinstance(limits, int) else limits
    settings = [SamplingSettings(temperature, top_p, limit) for limit in limits]
    policy = kind(
        domain,
        structure,
        bases,
        settings,
        prompt_form=prompt_form,
        stream=Stream(seed, "init") if trained else None,
        micro_batch_tokens=micro_batch_tokens,
    )
    if trained and random_adapters:
        for index, member in enumerate(policy.members):
            randomize_adapter(member.base, member.adapter, seed=10 + 100 * seed + index)
    return policy


def base(factory, **options) -> AdaptedModel:
    """A base without adapters, from a factory of conftest.py."""
    return AdaptedModel(factory(**options), rank=4, alpha=8)


def ids_of(groups) -> list:
    """The sampled ids of every trajectory of every group, [trajectory][turn and policy]."""
    return [[action.token_ids for turn in t.actions for action in turn] for group in groups for t in group]


def weights_of(policy) -> list[list[torch.Tensor]]:
    """Copies of every policy's weights."""
    return [[weight.detach().clone() for weight in policy.parameters(index)] for index in range(len(policy.members))]


def gradients_of(policy) -> list[torch.Tensor]:
    """Copies of all policies' gradients, zeros where there is none; the gradients are then cleared."""
    found = [
        torch.zeros_like(w) if w.grad is None else w.grad.clone()
        for index in range(len(policy.members))
        for w in policy.parameters(index)
    ]
    for index in range(len(policy.members)):
        for weight in policy.parameters(index):
            weight.grad = None
    return found
