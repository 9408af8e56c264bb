"""Typed configuration: a profile's YAML of plain values becomes the RunConfig of one training run.

A profile holds `defaults`, then overrides by `domains`, `methods` and `paradigms`, applied in this order, and in `grid`
the domains, methods and paradigms that the runner trains unless it is told otherwise.
Every value is validated before any model is loaded; an error names the field, the value received and what to do.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mapl_core.domains import DOMAINS, get_domain
from mapl_core.endpoint import EndpointSettings
from mapl_core.model_names import LOADERS
from mapl_core.notebook import ParameterError, cast_parameter
from mapl_core.runs import METHOD_NAMES, PARADIGM_NAMES, SINGLE_AGENT, WITHOUT_TRAINING

METHODS = tuple(METHOD_NAMES)
PARADIGMS = tuple(PARADIGM_NAMES)
MARL_ALGORITHMS = ("magrpo", "collm_cc", "collm_dc")
COMPARATORS = ("raw", "last", "current", "soft", "model", "api")
# Also in annotators and buffers, whose import costs seconds (torch); a test holds them equal.
ANNOTATORS = ("oracle", "bradley_terry", "noisy")
SELECTION_RULES = ("winner_return", "reward_gap", "comparator_return", "random", "proxy", "good_comparator")
BUFFER_MODES = ("offline", "online", "decay", "delay")
SOURCES = ("pocket", "small", "paper")
ROLLOUTS = ("transformers", "vllm")
PROFILE_FOLDER = Path(__file__).resolve().parent.parent / "notebooks" / "profiles"
PROFILE_KEYS = {"description", "defaults", "domains", "extends", "grid", "methods", "needs", "paradigms"}


class ConfigError(ValueError):
    """A configuration value is unknown or impossible; the message names it and the remedy."""


@dataclass(frozen=True)
class RunConfig:
    """All effective parameters of one run: one method under one paradigm on one domain with one seed."""

    profile: str
    domain: str
    method: str
    paradigm: str = "dec-dec"
    seed: int = 0
    experiment: str = "table1"

    # Tasks and models
    source: str = "pocket"
    train_tasks: int = 32
    eval_tasks: int = 32
    eval_samples: int = 4  # joint responses for each evaluation task, before training and after it
    curve_samples: int | None = None  # at most, at the evaluations between these, which only curves show; None: as many
    eval_temperature: float | None = None  # None: as in training; 0 is greedy
    domain_options: dict = field(default_factory=dict)  # for the domain, such as {"num_agents": 3}
    agent_models: list[str] = field(default_factory=list)  # one for all agents, or one each (heterogeneous team)
    loader: str = "plain"  # how every base holds its weights: plain, bnb4 or unsloth (4 bits)
    central_model: str = ""  # of about the agents' joint size: coordinator, single agent, and comparator of Dec-Cen
    prompt_form: str = "chat"  # "chat" or "text"

    # Sampling
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0  # 0: off; None: the checkpoint's own generation config decides
    max_new_tokens: list[int] = field(default_factory=lambda: [24, 64])  # for each agent; a lone writer gets the sum
    rollouts: str = "transformers"  # the backend that samples: "transformers" or "vllm"; what follows is for vLLM alone
    rollout_memory: float = 0.3  # share of the GPU's memory that an engine may take while it samples, weights included
    rollout_tokens: int = 2048  # most tokens of a prompt and its response together
    rollout_sequences: int = 128  # most responses that are decoded at a time
    rollout_difference: float = 0.1  # bound on the mean difference of its log-probabilities to the trainer's, in nats

    # Preferences (paper, section 4.1)
    iterations: int = 4
    samples_per_task: int = 8  # m
    pairs_per_task: int = 4  # k
    annotator: str = "oracle"
    annotator_temperature: float = 1.0  # of bradley_terry, in units of the reward
    annotator_flip_probability: float = 0.1  # of noisy
    selection: str = "winner_return"
    selection_component: str | None = None  # reward part compared by good_comparator
    comparator: str = "current"
    comparator_model: str | None = None  # for comparator "model"; None takes the central model where centralised
    endpoint: dict = field(default_factory=dict)  # for comparator "api": url, model ... (`EndpointSettings`)
    soft_temperature: float = 1.5
    buffer: str = "decay"
    buffer_decay: float = 0.8  # lambda
    buffer_delay: int = 0  # iterations
    buffer_size: int | None = None  # pairs in a training set; None: as many as were just collected

    # Optimisation
    learning_rate: float = 1.0e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    batch_size: int = 4  # pairs (MADPO, whole tasks) or groups (MARL)
    epochs: int = 1  # passes over the training set (MADPO) or the tasks (MARL) in each iteration
    lora_rank: int = 16
    lora_alpha: int = 32
    gradient_checkpointing: bool = False

    # MADPO (section 4.2)
    beta: float = 0.1
    reference: str = "base"  # "base", "previous" or "none"
    length_normalize: bool = False
    label_smoothing: float = 0.0

    # MARLHF and MARL (Eq. 5)
    marl_algorithm: str = "magrpo"
    reward_scale: float = 1.0  # of the oracle's reward where it trains; what is measured stays as it is
    reward_shift: float = 0.0
    num_generations: int = 4  # G
    normalize: str = "mean"  # "mean" or "mean_std"
    clip_ratio: float | None = None
    passes: int = 1  # steps on each batch of fresh responses; the clip acts from the second on (GRPO, PPO, CoLLM)
    kl_coef: float = 0.0
    reward_model_learning_rate: float = 1.0e-4
    reward_model_epochs: int = 4
    reward_model_batch_size: int = 4  # pairs
    reward_model_tokens: int = 1024
    critic_learning_rate: float = 1.0e-4
    value_coef: float = 0.6
    discount: float = 1.0

    # Machine
    threads: int = 1
    matmul_precision: str = "highest"  # of float32 products: "high" or "medium" let the device round their factors
    micro_batch_tokens: int = 8192
    cached_tokens: int = 65536

    def __post_init__(self) -> None:
        hints = get_type_hints(RunConfig)
        for entry in fields(self):
            try:
                object.__setattr__(
                    self, entry.name, cast_parameter(entry.name, getattr(self, entry.name), hints[entry.name])
                )
            except ParameterError as error:
                raise ConfigError(str(error)) from None
        self._check_choices()
        self._check_numbers()

    @property
    def num_agents(self) -> int:
        return get_domain(self.domain, **self.domain_options).num_agents

    @property
    def trains(self) -> bool:
        return self.method not in WITHOUT_TRAINING

    @property
    def learns_from_preferences(self) -> bool:
        return self.method in ("madpo", "marlhf", "single_dpo")

    @property
    def algorithm(self) -> str:
        """The RL algorithm: chosen inside MARLHF, or the method itself where the reward is the oracle's.

        PPO of a single agent is an actor-critic of a team of one, whose only critic reads what the agent reads.
        """
        return {"marlhf": self.marl_algorithm, "single_ppo": "collm_dc"}.get(self.method, self.method)

    @property
    def agents_structure(self) -> str:
        return self.paradigm.split("-")[0]

    @property
    def comparator_structure(self) -> str:
        return self.paradigm.split("-")[-1]

    @property
    def policy_models(self) -> list[str]:
        """Model name of every policy: each agent's, or that of the coordinator or single agent."""
        if self.agents_structure != "dec":
            return [self.central_model]
        return self.agent_models * self.num_agents if len(self.agent_models) == 1 else list(self.agent_models)

    @property
    def model_names(self) -> list[str]:
        """Every model that the run loads, each once: the policies' own, then another comparator's."""
        compared = self.learns_from_preferences and self.comparator == "model"
        return list(dict.fromkeys([*self.policy_models, *([self.other_comparator] if compared else [])]))

    @property
    def other_comparator(self) -> str:
        """The model of the comparator "model": its own, or the central one."""
        return self.comparator_model or self.central_model

    @property
    def endpoint_settings(self) -> EndpointSettings | None:
        """Where the comparator "api" is and how it is asked; None for a run that asks no endpoint."""
        asks = self.learns_from_preferences and self.comparator == "api"
        return EndpointSettings.read(self.endpoint) if asks else None

    @property
    def token_limits(self) -> list[int]:
        """Token limit of every agent; a single value serves all."""
        return self.max_new_tokens * self.num_agents if len(self.max_new_tokens) == 1 else list(self.max_new_tokens)

    def _check_choices(self) -> None:
        choices = {
            "domain": DOMAINS,
            "method": METHODS,
            "paradigm": PARADIGMS,
            "source": SOURCES,
            "rollouts": ROLLOUTS,
            "annotator": ANNOTATORS,
            "selection": SELECTION_RULES,
            "comparator": COMPARATORS,
            "buffer": BUFFER_MODES,
            "reference": ("base", "previous", "none"),
            "marl_algorithm": MARL_ALGORITHMS,
            "normalize": ("mean", "mean_std"),
            "prompt_form": ("chat", "text"),
            "matmul_precision": ("highest", "high", "medium"),
            "loader": LOADERS,
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; valid: {', '.join(valid)}")

    def _check_numbers(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ConfigError(message)

        at_least_one = (
            "train_tasks",
            "eval_tasks",
            "eval_samples",
            "iterations",
            "samples_per_task",
            "batch_size",
            "epochs",
            "reward_model_epochs",
            "reward_model_batch_size",
            "reward_model_tokens",
            "lora_rank",
            "lora_alpha",
            "passes",
            "threads",
            "micro_batch_tokens",
            "cached_tokens",
            "rollout_tokens",
            "rollout_sequences",
        )
        for name in at_least_one:
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "learning_rate",
            "beta",
            "reward_model_learning_rate",
            "critic_learning_rate",
            "reward_scale",
            "max_grad_norm",
            "soft_temperature",
            "annotator_temperature",
            "rollout_difference",
        ):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        k, m, g = self.pairs_per_task, self.samples_per_task, self.num_generations
        require(k >= 1, f"pairs_per_task (k) is {k}; at least 1 pair per task must be kept")
        require(
            m >= k,
            f"samples_per_task (m) is {m} and pairs_per_task (k) is {k}: m comparisons cannot give k pairs; "
            "raise m or lower k",
        )
        require(
            g >= 2 or self.algorithm not in ("magrpo", "single_grpo"),
            f"num_generations (G) is {g}; MAGRPO and GRPO compare the responses of a group, so G must be at least 2",
        )
        require(0 <= self.label_smoothing < 0.5, f"label_smoothing is {self.label_smoothing}; it must lie in [0, 0.5)")
        require(self.temperature >= 0, f"temperature is {self.temperature}; it must be at least 0")
        require(
            self.temperature > 0 or not self.trains,
            "temperature is 0: greedy samples of a task are all equal, so nothing can be compared; raise it",
        )
        require(
            self.eval_temperature is None or self.eval_temperature >= 0,
            f"eval_temperature is {self.eval_temperature}; it must be at least 0, or null for that of training",
        )
        require(
            self.eval_temperature != 0 or self.eval_samples == 1,
            f"eval_temperature is 0 and eval_samples is {self.eval_samples}: greedy answers are all equal; set it to 1",
        )
        require(
            self.curve_samples is None or self.curve_samples >= 1,
            f"curve_samples is {self.curve_samples}; it must be at least 1, or null for as many as eval_samples",
        )
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]")
        require(
            len(self.token_limits) == self.num_agents and all(limit >= 1 for limit in self.token_limits),
            f"max_new_tokens is {self.max_new_tokens}; give one positive limit, or one for each of "
            f"{self.num_agents} agents",
        )
        require(
            0 < self.rollout_memory < 1,
            f"rollout_memory is {self.rollout_memory}; it is a share of the GPU's memory, between 0 and 1",
        )
        longest = (max if self.paradigm == "dec-dec" else sum)(self.token_limits)
        require(
            self.rollouts != "vllm" or self.rollout_tokens > longest,
            f"rollout_tokens is {self.rollout_tokens}, and by max_new_tokens a response may take {longest} of them; "
            "raise it to hold the longest prompt besides",
        )
        for name in ("kl_coef", "weight_decay", "value_coef", "buffer_delay"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("buffer_decay", "discount"):
            require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; it must lie in [0, 1]")
        require(
            self.clip_ratio is None or 0 < self.clip_ratio < 1,
            f"clip_ratio is {self.clip_ratio}; it must lie in (0, 1), 0.2 is usual; null switches it off",
        )
        require(
            self.buffer_size is None or self.buffer_size >= 1,
            f"buffer_size is {self.buffer_size}; it must be at least 1 pair; null draws as many as were just collected",
        )
        require(
            0 <= self.annotator_flip_probability < 1,
            f"annotator_flip_probability is {self.annotator_flip_probability}; it must lie in [0, 1)",
        )
        require(
            self.top_k is None or self.top_k >= 0,
            f"top_k is {self.top_k}; it must be at least 1, 0 for off, or null for the checkpoint's own",
        )
        require(
            self.selection != "proxy" or self.method == "marlhf",
            f"selection 'proxy' ranks pairs by the last reward model, and method {self.method!r} fits none; choose "
            "another selection, or the method marlhf",
        )
        require(
            self.selection != "good_comparator" or bool(self.selection_component),
            "selection 'good_comparator' compares one part of the reward; name it in selection_component",
        )
        self._check_baselines(require)
        structure = self.agents_structure
        if structure != "dec":
            require(
                bool(self.central_model), "central_model is empty; a coordinator or a single agent needs a model there"
            )
        else:
            require(
                len(self.policy_models) == self.num_agents and all(self.policy_models),
                f"agent_models is {self.agent_models}; give one model for all, or one for each of "
                f"{self.num_agents} agents",
            )
        require(
            not (structure == "cen" and self.comparator_structure == "dec"),
            "a centralised team with a decentralised comparator is not one of the paper's paradigms",
        )
        require(
            self.comparator != "model" or bool(self.other_comparator),
            "comparator 'model' needs comparator_model",
        )
        require(
            self.comparator != "api" or bool(self.endpoint),
            "comparator 'api' needs `endpoint`, with url, model and, where a key is needed, the name of its variable: "
            "endpoint: {url: https://api.deepseek.com, model: deepseek-v4-pro, key_variable: DEEPSEEK_API_KEY}",
        )
        if self.endpoint:
            try:
                EndpointSettings.read(self.endpoint)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def _check_baselines(self, require: Callable[[bool, str], None]) -> None:
        """What the baselines of Table 1 cannot be asked for."""
        teams = [name for name in PARADIGMS if name != "single"]
        if self.method in ("sequential", "discussion"):
            require(
                self.paradigm == "dec-dec",
                f"method {self.method!r} is a protocol of separate agents, under dec-dec alone; got {self.paradigm!r}",
            )
        require(
            (self.method in SINGLE_AGENT) == (self.paradigm == "single"),
            f"method {self.method!r} under paradigm {self.paradigm!r}: a single agent's methods "
            f"({', '.join(SINGLE_AGENT)}) go with 'single', all others with {', '.join(teams)}",
        )
        horizon = get_domain(self.domain, **self.domain_options).horizon
        require(
            horizon == 1 or self.method not in (*SINGLE_AGENT, "sequential", "discussion"),
            f"method {self.method!r} has one turn, and domain_options {self.domain_options} ask for {horizon}",
        )
        require(
            self.clip_ratio is not None or self.method not in ("single_grpo", "single_ppo"),
            f"clip_ratio is null; {self.method} clips the ratio of new to old probability, 0.2 is usual",
        )
        require(
            self.passes == 1
            or (self.clip_ratio is not None and self.algorithm in ("collm_cc", "collm_dc", "single_grpo")),
            f"passes is {self.passes}: several steps on the same responses need clip_ratio (now {self.clip_ratio}) and "
            f"an algorithm that takes them (collm_cc, collm_dc, single_ppo, single_grpo), got {self.algorithm}",
        )
        require(
            self.method != "single_grpo" or self.kl_coef == 0,
            f"kl_coef is {self.kl_coef}; single_grpo is trained without a KL term, so it must be 0",
        )
        require(
            self.loader != "unsloth" or self.method not in ("single_grpo", "single_dpo"),
            f"loader is 'unsloth'; {self.method} is one of TRL's trainers, which Unsloth replaces by its own: set it "
            "to bnb4",
        )
        require(
            self.method != "single_dpo" or (self.reference == "base" and not self.length_normalize),
            f"single_dpo has the base as its reference and sums over tokens, got reference {self.reference!r} and "
            f"length_normalize {self.length_normalize}",
        )


@dataclass(frozen=True)
class Profile:
    """One scale of the experiments (pocket, small, paper) as plain values.

    A profile may be a variant of another: what `extends` names is read first, and its own values replace single ones.
    """

    name: str
    values: Mapping[str, Any]

    @property
    def domains(self) -> list[str]:
        return list(self.values.get("domains", {}))

    @property
    def grid(self) -> dict[str, list[str]]:
        """Domains, methods and paradigms that the runner trains unless asked for others; nothing named means all."""
        return {"domains": self.domains, **(self.values.get("grid") or {})}

    @property
    def needs(self) -> dict[str, float]:
        """What a machine should have free: memory_gib, disk_gib, and gpu_gib where there is no way without a GPU."""
        return dict(self.values.get("needs") or {})

    @property
    def threads(self) -> int:
        return int((self.values.get("defaults") or {}).get("threads", 1))

    def config(self, domain: str, method: str, paradigm: str = "dec-dec", seed: int = 0, **overrides: Any) -> RunConfig:
        """The configuration of one run.

        Raises:
            ConfigError: for an unknown domain, method, paradigm or parameter, or an impossible value.
        """
        for name, value, valid in (
            ("domain", domain, self.domains),
            ("method", method, METHODS),
            ("paradigm", paradigm, PARADIGMS),
        ):
            if value not in valid:
                raise ConfigError(f"unknown {name} {value!r}; valid in profile {self.name!r}: {', '.join(valid)}")
        chosen: dict[str, Any] = {}
        of_domain = dict(self.values["domains"][domain] or {})
        for layer in (
            self.values.get("defaults"),
            {k: v for k, v in of_domain.items() if k not in ("methods", "paradigms")},
            *(
                (part.get(group) or {}).get(name)
                for part in (self.values, of_domain)
                for group, name in (("methods", method), ("paradigms", paradigm))
            ),
            overrides,
        ):
            chosen.update(layer or {})
        known = {entry.name for entry in fields(RunConfig)}
        unknown = sorted(set(chosen) - known)
        if unknown:
            raise ConfigError(
                f"unknown parameter {', '.join(unknown)} in profile {self.name!r}; valid: {', '.join(sorted(known))}"
            )
        return RunConfig(
            **{**chosen, "profile": self.name, "domain": domain, "method": method, "paradigm": paradigm, "seed": seed}
        )


def check_rollouts(rollouts: str) -> None:
    """Refuse a rollout backend whose package is not installed; nothing is imported.

    Raises:
        ImportError: naming the command that installs it, and the backend that needs nothing more.
    """
    if rollouts == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ImportError(
            f"rollouts are 'vllm', and vllm is not installed; run: {sys.executable} -m pip install -r "
            "requirements-gpu.txt, or set the profile's `rollouts` to transformers"
        )


def profile_names() -> list[str]:
    """Names of the profiles that ship with the project."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.yaml"))


def load_profile(name: str | Path) -> Profile:
    """Load a profile by name, or from the path of a YAML file."""
    path, values = _read_profile(name)
    if "extends" in values:
        _, base = _read_profile(values.pop("extends"))
        if "extends" in base:
            raise ConfigError(f"{path}: `extends` names a profile that extends another; name that one")
        values = _replaced(base, values)
    if not values.get("domains"):
        raise ConfigError(f"{path}: `domains` names none; a profile has at least one, or those of the one it `extends`")
    profile = Profile(path.stem, values)
    if unknown := sorted(set(profile.grid["domains"]) - set(profile.domains)):
        raise ConfigError(
            f"{path}: unknown domain {', '.join(map(repr, unknown))} in `grid`; valid: {', '.join(profile.domains)}"
        )
    return profile


def _read_profile(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """Path and values of a profile as it is written."""
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else PROFILE_FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"unknown profile {str(name)!r}; valid: {', '.join(profile_names())}, or the path of a .yaml file"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from None
    if not isinstance(values, dict) or set(values) - PROFILE_KEYS:
        raise ConfigError(f"{path}: a profile has the keys {', '.join(sorted(PROFILE_KEYS))}")
    for name in sorted(PROFILE_KEYS - {"description", "extends"}):
        if not isinstance(values.get(name) or {}, dict):
            raise ConfigError(f"{path}: `{name}` is {values[name]!r}; write its entries as `name: value`")
    return path, values


def _replaced(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, with those of the same place in `others` instead."""
    result = dict(values)
    for name, other in others.items():
        known = values.get(name)
        is_nested = isinstance(known, dict) and isinstance(other, dict)
        result[name] = _replaced(known, other) if is_nested else other
    return result
