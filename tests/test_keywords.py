"""Every keyword that the project passes to a library exists there: an upgrade breaks these tests, not a reader's run.

Nothing is imported. The calls are read from the project's sources, the signatures from those of the libraries: where
they are installed, or below MAPL_UNPACKED, a folder into which wheels were unzipped, for what this machine cannot run.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transformers", "peft", "trl", "vllm", "unsloth")

# Calls whose callee no import names: methods of objects, subclasses, and own functions that hand keywords on.
ELSEWHERE = {
    ("adapters.py", "gradient_checkpointing_enable"): ["transformers.PreTrainedModel.gradient_checkpointing_enable"],
    ("adapters.py", "save_pretrained"): ["peft.PeftModel.save_pretrained"],
    ("baselines.py", "PairTrainer"): ["trl.DPOTrainer"],
    ("models.py", "_from_pretrained"): [
        "transformers.AutoTokenizer.from_pretrained",
        "transformers.AutoModelForCausalLM.from_pretrained",
    ],
    ("reward_model.py", "encode"): ["transformers.PreTrainedTokenizerBase.encode"],
    ("structured.py", "batch_decode"): ["transformers.PreTrainedTokenizerBase.batch_decode"],
    ("structured.py", "encode"): ["transformers.PreTrainedTokenizerBase.encode"],
    ("tokens.py", "apply_chat_template"): ["transformers.PreTrainedTokenizerBase.apply_chat_template"],
    ("tokens.py", "decode"): ["transformers.PreTrainedTokenizerBase.decode"],
    ("tokens.py", "encode"): ["transformers.PreTrainedTokenizerBase.encode"],
    ("unsloth_loader.py", "from_pretrained"): ["unsloth.FastLanguageModel.from_pretrained"],
    ("unsloth_loader.py", "get_peft_model"): ["unsloth.FastLanguageModel.get_peft_model"],
    ("vllm_sampling.py", "generate"): ["vllm.LLM.generate"],
    ("vllm_sampling.py", "sleep"): ["vllm.LLM.sleep"],
}
# Functions whose dictionaries are passed on as keywords.
DICTIONARIES = {
    ("baselines.py", "_trl_settings"): ["trl.GRPOConfig", "trl.DPOConfig"],
    ("models.py", "_read"): ["transformers.AutoModelForCausalLM.from_pretrained"],
}

BASE_TRAINING = ("trl/trainer/base_config.py:_BaseConfig", "transformers/training_args.py:TrainingArguments")
TOKENIZER = "transformers/tokenization_utils_base.py:PreTrainedTokenizerBase"
# Where a callee takes its keywords from: "file:name" is a function's parameters or a class's fields, and a file alone
# stands for whatever is taken out of a dictionary by name in it, as `kwargs.pop("dtype")` does.
PLACES: dict[str, tuple[str, ...]] = {
    "peft.LoraConfig": ("peft/tuners/lora/config.py:LoraConfig", "peft/config.py:PeftConfig"),
    "peft.PeftModel.save_pretrained": ("peft/peft_model.py:PeftModel.save_pretrained",),
    "peft.get_peft_model": ("peft/mapping_func.py:get_peft_model",),
    "peft.utils.get_peft_model_state_dict": ("peft/utils/save_and_load.py:get_peft_model_state_dict",),
    "peft.utils.set_peft_model_state_dict": ("peft/utils/save_and_load.py:set_peft_model_state_dict",),
    "transformers.AutoConfig.from_pretrained": (
        "transformers/configuration_utils.py:PreTrainedConfig.from_pretrained",
    ),
    "transformers.AutoModelForCausalLM.from_pretrained": (
        "transformers/modeling_utils.py:PreTrainedModel.from_pretrained",
        "transformers/modeling_utils.py",
    ),
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": (
        "transformers/integrations/sdpa_attention.py:sdpa_attention_forward",
    ),
    "transformers.AutoTokenizer.from_pretrained": (
        f"{TOKENIZER}.from_pretrained",
        "transformers/tokenization_utils_base.py",
    ),
    "transformers.BitsAndBytesConfig": ("transformers/utils/quantization_config.py:BitsAndBytesConfig",),
    "transformers.PreTrainedModel.gradient_checkpointing_enable": (
        "transformers/modeling_utils.py:PreTrainedModel.gradient_checkpointing_enable",
    ),
    "transformers.PreTrainedTokenizerBase.apply_chat_template": (f"{TOKENIZER}.apply_chat_template",),
    "transformers.PreTrainedTokenizerBase.batch_decode": (f"{TOKENIZER}.batch_decode",),
    "transformers.PreTrainedTokenizerBase.decode": (f"{TOKENIZER}.decode", f"{TOKENIZER}._decode"),
    "transformers.PreTrainedTokenizerBase.encode": (f"{TOKENIZER}.encode",),
    "transformers.PreTrainedTokenizerFast": (
        "transformers/tokenization_utils_tokenizers.py",
        f"{TOKENIZER}.__init__",
        "transformers/tokenization_utils_base.py",
    ),
    "transformers.Qwen3Config": (
        "transformers/models/qwen3/configuration_qwen3.py:Qwen3Config",
        "transformers/configuration_utils.py:PreTrainedConfig",
    ),
    "trl.DPOConfig": ("trl/trainer/dpo_config.py:DPOConfig", *BASE_TRAINING),
    "trl.DPOTrainer": ("trl/trainer/dpo_trainer.py:DPOTrainer",),
    "trl.GRPOConfig": ("trl/trainer/grpo_config.py:GRPOConfig", *BASE_TRAINING),
    "trl.GRPOTrainer": ("trl/trainer/grpo_trainer.py:GRPOTrainer",),
    "trl.trainer.dpo_trainer.DataCollatorForPreference": ("trl/trainer/dpo_trainer.py:DataCollatorForPreference",),
    "unsloth.FastLanguageModel.from_pretrained": ("unsloth/models/loader.py:FastLanguageModel.from_pretrained",),
    "unsloth.FastLanguageModel.get_peft_model": ("unsloth/models/llama.py:FastLlamaModel.get_peft_model",),
    "vllm.LLM": ("vllm/entrypoints/llm.py:LLM", "vllm/engine/arg_utils.py:EngineArgs"),
    "vllm.LLM.generate": ("vllm/entrypoints/llm.py:LLM.generate",),
    "vllm.LLM.sleep": ("vllm/entrypoints/llm.py:LLM.sleep",),
    "vllm.SamplingParams": ("vllm/sampling_params.py:SamplingParams",),
    "vllm.lora.request.LoRARequest": ("vllm/lora/request.py:LoRARequest",),
    "vllm.sampling_params.StructuredOutputsParams": ("vllm/sampling_params.py:StructuredOutputsParams",),
}


# --- what the project passes -----------------------------------------------------------------------------------------


def passed_keywords(folder: Path) -> dict[str, dict[str, str]]:
    """Callee, such as "vllm.LLM.generate" -> keyword -> one place in the project that passes it."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = imported_names(tree)
        for node in ast.walk(tree):
            for callee, keywords in keywords_of(node, file.name, names):
                for keyword in keywords:
                    found.setdefault(callee, {}).setdefault(keyword, f"{file.name}, line {node.lineno}")
    return found


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Name in this module -> what it stands for in one of the libraries."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name: alias.name for alias in node.names if alias.name in PACKAGES}
    return names


def keywords_of(node: ast.AST, file: str, names: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The keywords that a node passes to a library, with each callee that they reach."""
    if isinstance(node, ast.FunctionDef) and (file, node.name) in DICTIONARIES:
        keys = [
            key.value
            for inner in ast.walk(node)
            if isinstance(inner, ast.Dict)
            for key in inner.keys
            if isinstance(key, ast.Constant) and str(key.value).isidentifier()
        ]
        yield from ((callee, keys) for callee in DICTIONARIES[file, node.name])
    if not isinstance(node, ast.Call):
        return
    keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
    first, *rest = ast.unparse(node.func).split(".")
    if first in names:
        callees = [".".join([names[first], *rest])]
    else:
        callees = ELSEWHERE.get((file, rest[-1] if rest else first), [])
    if keywords:
        yield from ((callee, keywords) for callee in callees)


# --- what the libraries take -----------------------------------------------------------------------------------------


def library(package: str) -> Path | None:
    """The folder that holds a package: MAPL_UNPACKED, or where it is installed."""
    unpacked = Path(os.environ.get("MAPL_UNPACKED") or "no such folder")
    if (unpacked / package).is_dir():
        return unpacked
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]).parent if folders else None


@cache
def taken_at(folder: Path, place: str) -> frozenset[str]:
    """The keywords that a place (see PLACES) takes."""
    file, _, name = place.partition(":")
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    if not name:
        return frozenset(taken_by_name(tree))
    nodes: list[ast.AST] = [tree]
    for part in name.split("."):
        nodes = [inner for node in nodes for inner in ast.walk(node) if getattr(inner, "name", None) == part]
    assert nodes, f"{file} has no {name} any more; correct PLACES"
    return frozenset(keyword for node in nodes for keyword in parameters(node))


def taken_by_name(tree: ast.AST) -> Iterator[str]:
    """The names in `kwargs.pop("name")`, `kwargs.get("name")`, `kwargs["name"]` and `"name" in kwargs`."""
    for node in ast.walk(tree):
        named: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            named = node.args[0] if node.func.attr in ("pop", "get", "setdefault") else None
        elif isinstance(node, ast.Subscript):
            named = node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            named = node.left
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value


def parameters(node: ast.AST) -> Iterator[str]:
    """Of a function its parameters, of a class its fields and what it is made with."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    for inner in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif getattr(inner, "name", None) == "__init__":
            yield from parameters(inner)


PASSED = passed_keywords(ROOT / "mapl_core")


@pytest.mark.parametrize("callee", sorted(PASSED))
def test_every_keyword_that_is_passed_exists_in_the_library(callee):
    assert callee in PLACES, f"say in PLACES where {callee} takes its keywords from"
    packages = {place.split("/")[0] for place in PLACES[callee]}
    folders = {package: library(package) for package in packages}
    if missing := sorted(package for package, folder in folders.items() if folder is None):
        pytest.skip(f"{', '.join(missing)} not installed, nor unpacked in MAPL_UNPACKED")
    taken = {keyword for place in PLACES[callee] for keyword in taken_at(folders[place.split("/")[0]], place)}
    unknown = {keyword: where for keyword, where in PASSED[callee].items() if keyword not in taken}
    assert not unknown, f"{callee} has no such keywords"


def test_the_calls_that_matter_are_seen():
    assert {"rank", "model"} & set(PASSED["vllm.LLM"]) == {"model"}
    assert {"max_model_len", "enable_lora", "logprobs_mode", "structured_outputs_config"} <= set(PASSED["vllm.LLM"])
    assert {"lora_request", "use_tqdm"} == set(PASSED["vllm.LLM.generate"])
    assert {"lora_name", "lora_int_id", "lora_path"} == set(PASSED["vllm.lora.request.LoRARequest"])
    assert {"loss_type", "beta", "output_dir", "use_cpu", "report_to"} <= set(PASSED["trl.GRPOConfig"])
    assert {"dtype", "revision", "local_files_only"} <= set(PASSED["transformers.AutoModelForCausalLM.from_pretrained"])


@pytest.mark.parametrize("keyword, found", [("depth", True), ("width", True), ("color", True), ("depht", False)])
def test_a_keyword_is_known_as_a_parameter_a_field_or_by_its_name_alone(tmp_path, keyword, found):
    (tmp_path / "lib.py").write_text(
        "class Model:\n"
        "    width: int = 1\n"
        "    def load(self, depth, **kwargs):\n"
        "        color = kwargs.pop('color', None)\n"
    )
    places = ("lib.py:Model.load", "lib.py:Model", "lib.py")
    assert any(keyword in taken_at(tmp_path, place) for place in places) == found
    with pytest.raises(AssertionError, match="lib.py has no Model.save any more"):
        taken_at(tmp_path, "lib.py:Model.save")


def test_calls_are_recognised_through_imports_and_by_the_names_of_methods(tmp_path):
    (tmp_path / "tokens.py").write_text(
        "import peft\n"
        "from vllm import LLM as Engine\n"
        "def work(tokenizer):\n"
        "    Engine('x', speed=1)\n"
        "    peft.LoraConfig(r=8)\n"
        "    tokenizer.decode([1], upper=True)\n"
        "    print('x', end='')\n"
    )
    assert passed_keywords(tmp_path) == {
        "vllm.LLM": {"speed": "tokens.py, line 4"},
        "peft.LoraConfig": {"r": "tokens.py, line 5"},
        "transformers.PreTrainedTokenizerBase.decode": {"upper": "tokens.py, line 6"},
    }
