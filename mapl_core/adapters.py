"""Several agents as LoRA adapters on one frozen base model.

All switching between adapters happens in `AdaptedModel.using`; nothing else calls PEFT's `set_adapter`. PEFT freezes
the adapter it leaves, which would silently rob an agent of its gradient (peft#2807, peft#3447), so `using` gives every
trainable adapter its gradient flag back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from mapl_core import lora, unsloth_loader
from mapl_core.attention import SHARED_PROMPTS, can_share_prompts, keeps_attention_interface
from mapl_core.models import LoadedModel
from mapl_core.seeding import Stream

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
AdapterState = dict[str, Tensor]
# In float16 the gradients of activations may be too small for their type: a loss is multiplied by this before a
# backward pass, and the gradients of the float32 adapters are divided by it afterwards.
FLOAT16_SCALE = 2.0**10


class AdaptedModel:
    """One frozen base model and the LoRA adapters that live on it.

    Args:
        loaded: the base with its tokenizer; its weights are never changed.
        rank, alpha: LoRA's r and alpha, the same for all adapters of this base.
        gradient_checkpointing: recompute activations in the backward pass. Safe here, since every backward pass ends
            before the adapter is switched.
    """

    def __init__(self, loaded: LoadedModel, *, rank: int = 16, alpha: int = 32, gradient_checkpointing: bool = False):
        config = loaded.model.config
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(config, name, None) not in (None, 1.0):
                raise ValueError(
                    f"{loaded.name}: its {name} changes the logits after the output layer, which the "
                    "log-probabilities here do not reproduce; choose a Llama- or Qwen-like base"
                )
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.rank, self.alpha = rank, alpha
        self.gradient_checkpointing = gradient_checkpointing
        self.trainable: list[str] = []
        self._peft: PeftModel | None = None
        self.has_stock_layers = keeps_attention_interface(loaded.model)
        _remove_dropout(loaded.model)
        if can_share_prompts(loaded.model):
            loaded.model.set_attn_implementation(SHARED_PROMPTS)
        loaded.model.requires_grad_(False)
        if gradient_checkpointing and loaded.loader != "unsloth":
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            loaded.model.train()  # Transformers checkpoints in training mode only; there is no dropout left to wake up.

    @property
    def model(self) -> nn.Module:
        return self.loaded.model if self._peft is None else self._peft

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def backbone(self) -> nn.Module:
        """The base model without its output layer: token ids in, last hidden states out."""
        return self.loaded.model.base_model

    @property
    def output_layer(self) -> nn.Module:
        return self.loaded.model.get_output_embeddings()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response: the tokenizer's end of sequence and those of the generation config."""
        configured = getattr(self.loaded.model.generation_config, "eos_token_id", None)
        extra = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (self.tokenizer.eos_token_id, *extra) if i is not None)

    @property
    def shares_prompts(self) -> bool:
        """Whether the responses to one prompt can share its forward pass (see `attention`)."""
        return self.loaded.model.config._attn_implementation == SHARED_PROMPTS

    def add_adapter(self, name: str, stream: Stream) -> None:
        """Add a fresh, trainable adapter: lora_B is zero, so it starts as the base; lora_A is drawn from `stream`."""
        if name in self.trainable:
            raise ValueError(f"the base {self.loaded.name} already has an adapter {name!r}; delete it first")
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]):  # PEFT draws from the global generator; its draws are replaced below.
            if self._peft is not None:
                self._peft.add_adapter(name, config)
            elif self.loaded.loader == "unsloth":
                self._peft = self._with_kernels(name, config)
            else:
                self._peft = get_peft_model(self.loaded.model, config, adapter_name=name)
                lora.fuse(self._peft)
        self.trainable.append(name)
        generator = stream.generator()
        for layer in self._lora_layers():
            lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
            bound = 1.0 / math.sqrt(lora_a.shape[1])  # LoRA's usual start: Kaiming uniform with a = sqrt(5)
            fresh = torch.empty(lora_a.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                lora_a.copy_(fresh)
                lora_b.zero_()
        self._restore_gradient_flags()

    def _with_kernels(self, name: str, config: LoraConfig) -> PeftModel:
        """Unsloth's own first adapter brings its kernels along; this one takes its place."""
        model = unsloth_loader.with_kernels(
            self.loaded.model,
            PROJECTIONS,
            rank=self.rank,
            alpha=self.alpha,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        model.add_adapter(name, config)
        model.set_adapter(name)
        model.delete_adapter(unsloth_loader.FIRST_ADAPTER)
        self.loaded.model.train(self.gradient_checkpointing)
        if not self.has_stock_layers:
            width = self.loaded.model.config.hidden_size
            unsloth_loader.check_causal(lambda ids: self.hidden_states({"input_ids": ids}), width, self.device)
        return model

    def delete_adapter(self, name: str) -> None:
        self.trainable.remove(name)
        if self.trainable:
            self._peft.set_adapter(self.trainable[0])
        self._peft.delete_adapter(name)
        if self.trainable:
            self._restore_gradient_flags()

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """(rows, width, hidden) last hidden states under the active adapter."""
        if self.has_stock_layers:
            return self.backbone(**inputs, use_cache=False).last_hidden_state
        return unsloth_loader.hidden_states(self.loaded.model, inputs)

    def backward(self, objective: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradient of the objective to that of the parameters, the only ones that it depends on."""
        if self.loaded.dtype != torch.float16:
            objective.backward()
            return
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        (FLOAT16_SCALE * objective).backward()
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad /= FLOAT16_SCALE
                if gradient is not None:
                    parameter.grad += gradient
            else:
                parameter.grad = gradient

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The trainable tensors of one adapter, in a fixed order."""
        return [
            weight for layer in self._lora_layers() for weight in (layer.lora_A[name].weight, layer.lora_B[name].weight)
        ]

    @contextlib.contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Run the body with one adapter active, or with none (the reference policy) for `adapter=None`."""
        if adapter is None:
            if not self.trainable:
                yield
                return
            try:
                with self._peft.disable_adapter():
                    yield
            finally:
                self._restore_gradient_flags()
            return
        if adapter not in self.trainable:
            raise KeyError(f"the base {self.loaded.name} has no adapter {adapter!r}; it has {self.trainable}")
        self._peft.set_adapter(adapter)
        self._restore_gradient_flags()
        yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the body in evaluation mode: with gradient checkpointing, training mode keeps no cache."""
        checkpointing = self.loaded.model.training
        if checkpointing:
            self.loaded.model.eval()
        try:
            yield
        finally:
            if checkpointing:
                self.loaded.model.train()

    def state(self, name: str) -> AdapterState:
        """A copy of one adapter's weights."""
        # Embeddings are never trained; left to "auto", PEFT would ask the hub about the base's vocabulary each time.
        weights = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        return {key: value.detach().clone() for key, value in weights.items()}

    def load_state(self, name: str, state: AdapterState) -> None:
        expected = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        unfit = sorted(set(state) ^ set(expected))  # PEFT would leave out what does not fit without a word
        unfit += [key for key in set(state) & set(expected) if state[key].shape != expected[key].shape]
        if unfit:
            raise ValueError(
                f"the weights for adapter {name!r} do not fit the base {self.loaded.name}: {len(unfit)} tensors "
                f"differ, such as {unfit[0]}; load an adapter of this base, rank and set of layers"
            )
        set_peft_model_state_dict(self._peft, {k: v.clone() for k, v in state.items()}, adapter_name=name)

    def save(self, name: str, folder: Path) -> None:
        """Write one adapter to `folder/name` in PEFT's own format."""
        self._peft.save_pretrained(str(folder), selected_adapters=[name], save_embedding_layers=False)

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter written by `save` from `folder/name` into the existing adapter `name`."""
        from safetensors.torch import load_file

        path = Path(folder) / name / "adapter_model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"no adapter at {path}; save() writes one folder per adapter")
        self.load_state(name, load_file(path))

    def merged_weight(self, module: nn.Module, adapter: str | None) -> Tensor:
        """The weight of a linear layer with the adapter's update added, as a new tensor; the base is not touched.

        Weights that are held in 4 bits come as the values they stand for.
        """
        lora = hasattr(module, "lora_A")
        weight = _values((module.get_base_layer() if lora else module).weight).to(self.loaded.dtype)
        if adapter is None or not lora or adapter not in module.lora_A:
            return weight
        update = module.lora_B[adapter].weight.detach().float() @ module.lora_A[adapter].weight.detach().float()
        return (weight.float() + module.scaling[adapter] * update).to(weight.dtype)

    def factors(self, modules: Sequence[nn.Module], adapter: str | None) -> tuple[Tensor, Tensor] | None:
        """The adapter of linear layers that read the same input, as two products in float32: x -> second (first x).

        Returns:
            first (sum of ranks, in) and second (sum of outs, sum of ranks), block-diagonal and scaled; None if the
            adapter has no part in any of them.
        """
        first, second = [], []
        for module in modules:
            if adapter is None or adapter not in getattr(module, "lora_A", ()):
                second.append(module.weight.new_zeros(module.weight.shape[0], 0, dtype=torch.float32))
                continue
            first.append(module.lora_A[adapter].weight.detach().float())
            second.append(module.scaling[adapter] * module.lora_B[adapter].weight.detach().float())
        return (torch.cat(first), torch.block_diag(*second)) if first else None

    def _lora_layers(self) -> list[nn.Module]:
        return [module for module in self._peft.modules() if hasattr(module, "lora_A")] if self._peft else []

    def _restore_gradient_flags(self) -> None:
        self._peft.set_requires_grad(self.trainable, True)


def _values(weight: Tensor) -> Tensor:
    """The numbers of a weight, whatever holds them."""
    if getattr(weight, "quant_state", None) is None:
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def _remove_dropout(model: nn.Module) -> None:
    """Log-probabilities must be those of one fixed function, in training too (paper, section 2)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.eval()
