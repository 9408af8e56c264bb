"""What a run trains and compares: tasks, bases, adapters, comparator and sampler, made from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mapl_core.adapters import AdaptedModel
from mapl_core.baselines import TEST_TIME_TEAMS
from mapl_core.comparators import Comparator, EndpointTeam
from mapl_core.domains import get_domain
from mapl_core.domains.base import Domain, Task
from mapl_core.endpoint import Endpoint
from mapl_core.model_names import check_loader, check_model_name
from mapl_core.models import describe, load_model
from mapl_core.policies import JointPolicy
from mapl_core.profiles import RunConfig
from mapl_core.sampling import Sampler, SamplingSettings, TransformersSampler
from mapl_core.seeding import Stream


@dataclass
class Team:
    """The parts of a run that hold weights, and its tasks."""

    domain: Domain
    policy: JointPolicy
    comparator: Comparator | None
    train_tasks: list[Task]
    eval_tasks: list[Task]
    models: dict[str, dict]  # name -> description, for the manifest
    sampler: Sampler
    endpoint: Endpoint | None = None  # that answers for the comparator "api"


def build_team(config: RunConfig) -> Team:
    """Load tasks and models and put fresh adapters on them. Everything that can be refused is refused here."""
    check_loader(config.loader)
    for name in config.model_names:  # all of them, before the first one is loaded
        check_model_name(name)
    sampler = make_sampler(config)
    endpoint = Endpoint(config.endpoint_settings) if config.endpoint_settings else None
    domain = get_domain(config.domain, **config.domain_options)
    train_tasks = domain.load_tasks("train", config.source, config.train_tasks) if config.trains else []
    eval_tasks = domain.load_tasks("eval", config.source, config.eval_tasks)
    bases: dict[str, AdaptedModel] = {}

    def base(name: str) -> AdaptedModel:
        if name not in bases:
            bases[name] = AdaptedModel(
                load_model(name, loader=config.loader),
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                gradient_checkpointing=config.gradient_checkpointing,
            )
            if config.prompt_form == "chat" and bases[name].tokenizer.chat_template is None:
                raise ValueError(
                    f"model {name!r} has no chat template, and prompt_form is 'chat'; set it to 'text', or name "
                    "another model"
                )
        return bases[name]

    def limits(structure: str) -> list[int]:
        return config.token_limits if structure == "dec" else [sum(config.token_limits)]

    def team(
        structure: str, names: Sequence[str], stream: Stream | None, kind: type[JointPolicy] = JointPolicy
    ) -> JointPolicy:
        settings = [
            SamplingSettings(config.temperature, config.top_p, limit, _top_k(config, base(name)))
            for limit, name in zip(limits(structure), names, strict=True)
        ]
        return kind(
            domain,
            structure,
            [base(name) for name in names],
            settings,
            prompt_form=config.prompt_form,
            stream=stream,
            micro_batch_tokens=config.micro_batch_tokens,
            sampler=sampler,
        )

    kind = TEST_TIME_TEAMS.get(config.method, JointPolicy)
    policy = team(config.agents_structure, config.policy_models, Stream(config.seed, "init"), kind)
    comparator = None
    if config.learns_from_preferences:
        structure, model = config.comparator_structure, None
        if config.comparator == "model":
            model = team(structure, [config.other_comparator] * (domain.num_agents if structure == "dec" else 1), None)
        if endpoint:
            settings = [SamplingSettings(config.temperature, config.top_p, limit) for limit in limits(structure)]
            model = EndpointTeam(domain, structure, endpoint, settings)
        comparator = Comparator(
            config.comparator, policy, structure=structure, model=model, soft_temperature=config.soft_temperature
        )
    models = {name: describe(b.loaded) for name, b in bases.items()}
    return Team(domain, policy, comparator, train_tasks, eval_tasks, models, sampler, endpoint)


def make_sampler(config: RunConfig) -> Sampler:
    """The rollout backend of a run.

    Raises:
        ImportError: if it is vLLM, and vLLM is not installed.
    """
    if config.rollouts == "transformers":
        return TransformersSampler(config.cached_tokens)
    from mapl_core.vllm_sampling import EngineSettings, VllmSampler

    return VllmSampler(
        EngineSettings(config.rollout_memory, config.rollout_tokens, config.rollout_sequences),
        max_difference=config.rollout_difference,
        micro_batch_tokens=config.micro_batch_tokens,
    )


def _top_k(config: RunConfig, base: AdaptedModel) -> int:
    """The configured top-k, or the checkpoint's own where none is configured."""
    if config.top_k is not None:
        return config.top_k
    return getattr(base.loaded.model.generation_config, "top_k", None) or 0
