"""Loading by name. The hub is stubbed at transformers' from_pretrained, or replaced by a hand-made hub cache."""

from __future__ import annotations

import json
import re
import socket
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from timing import within
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mapl_core import models, pocket
from mapl_core.model_names import check_model_name
from mapl_core.models import (
    HUB_LOCK,
    LoadedModel,
    describe,
    dtype_for,
    load_model,
    reconcile_special_tokens,
    resolve_revision,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = COMMIT[::-1]
IDS = torch.tensor([[6, 19, 20, 15, 22, 30]])


def save(loaded: LoadedModel, folder: Path) -> Path:
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tiny_qwen3, tmp_path) -> Path:
    return save(tiny_qwen3(), tmp_path / "a model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The cache folder of MAPL: the test's own, not the reader's. Made when it is needed."""
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch) -> list:
    """Any attempt to reach the network fails and is recorded."""
    attempts = []

    def refuse(*arguments, **_):
        attempts.append(arguments)
        raise OSError("the network is blocked by this test")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (None, torch.float32),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((8, 9), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_env5_dtype_follows_the_compute_capability(capability, dtype):
    assert dtype_for(capability) is dtype


def test_env5_a_gpu_is_asked_for_its_capability(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(models, "_from_pretrained", lambda source, name, to, **_: (to.device, to.dtype))
    loaded = load_model(str(folder))
    assert (loaded.device.type, loaded.dtype) == ("cuda", torch.float16)
    assert load_model(str(folder), device="cpu").dtype is torch.float32


def test_a_saved_folder_comes_back_with_the_same_logits_in_evaluation_mode(tiny_qwen3, tmp_path):
    saved = tiny_qwen3(attention_dropout=0.5)
    loaded = load_model(str(save(saved, tmp_path / "model")), device="cpu")
    with torch.no_grad():
        assert_close(loaded.model(IDS).logits, saved.model(IDS).logits)
    assert not any(module.training for module in loaded.model.modules())
    assert loaded.tokenizer.get_vocab() == saved.tokenizer.get_vocab()
    assert loaded.tokenizer.chat_template == saved.tokenizer.chat_template


def test_the_dtype_is_chosen_by_the_loader_not_by_the_checkpoint(tiny_qwen3, tmp_path):
    folder = save(tiny_qwen3(dtype=torch.bfloat16), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for asked, expected in ((None, torch.float32), (torch.float16, torch.float16), (torch.float64, torch.float64)):
        loaded = load_model(str(folder), device="cpu", dtype=asked)
        assert loaded.dtype is expected
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


def test_attention_accepts_a_4d_mask(folder):
    """Two continuations of one token share a row: each must score as if the other were absent."""
    model = load_model(str(folder), device="cpu").model
    row, positions = torch.tensor([[6, 19, 20]]), torch.tensor([[0, 1, 1]])
    allowed = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)[None, None]
    mask = torch.zeros(1, 1, 3, 3).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        packed = model(row, attention_mask=mask, position_ids=positions).logits[0]
        alone = [model(torch.tensor([[6, token]])).logits[0, 1] for token in (19, 20)]
    assert_close(packed[1:], torch.stack(alone), atol=1e-5, rtol=0)


def test_loading_leaves_the_global_random_state_alone(folder):
    before = torch.random.get_rng_state()
    load_model(str(folder))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_env6_a_local_folder_loads_without_touching_the_network(folder, no_network):
    assert load_model(str(folder)).origin == "local folder a model"
    assert no_network == []


def test_env6_a_pocket_model_loads_from_the_package_without_touching_the_network(folder, no_network, monkeypatch):
    asked = []
    monkeypatch.setattr(pocket, "model_path", lambda domain, size: asked.append((domain, size)) or folder)
    loaded = load_model("pocket:tldr:1x")
    assert asked == [("tldr", "1x")]
    assert (loaded.name, loaded.origin) == ("pocket:tldr:1x", "pocket:tldr:1x of mapl_core")
    assert no_network == []


@pytest.mark.parametrize("name", ["pocket:", "pocket:tldr", "pocket:tldr:1x:2", "pocket::1x"])
def test_a_malformed_pocket_name_is_an_error_that_shows_the_form(name):
    with pytest.raises(ValueError, match=rf"'{name}'.*pocket:<domain>:<size>, such as pocket:tldr:1x"):
        load_model(name)


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "./missing", "/no/such/folder", "a/b/c", "a b/c", "org/name@"])
def test_an_unknown_name_is_an_error_that_lists_the_valid_forms(name, no_network):
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))}.*pocket:tldr:1x.*smollm2-135m-instruct.*org/name"):
        load_model(name)
    assert no_network == []


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("tokenizer.json", "has no tokenizer"),
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_an_incomplete_folder_is_refused_within_a_second_naming_path_and_remedy(folder, removed, said):
    (folder / removed).unlink()
    caught = within(1.0, lambda: pytest.raises(ValueError, load_model, str(folder)))
    assert f"{folder} {said}" in str(caught.value)
    assert "save_pretrained" in str(caught.value)


@pytest.mark.parametrize("damage", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_name_is_judged_like_the_loader_does_without_reading_or_building_anything(folder, damage, monkeypatch):
    monkeypatch.setattr(models, "_from_pretrained", lambda *_, **__: pytest.fail("something was loaded"))
    monkeypatch.setattr(pocket, "model_path", lambda *_: pytest.fail("a pocket model was asked for"))
    for name in (str(folder), "pocket:tldr:1x", "pocket:tldr:4x", "smollm2-135m-instruct", "org/name", "org/name@tag"):
        check_model_name(name)
    (folder / damage).unlink()
    faulty = (str(folder), "pocket:tldr", "pocket:chess:1x", "pocket:tldr:9x", "gpt2", "/no/such/folder")
    for name in faulty:
        with pytest.raises(ValueError) as early:
            check_model_name(name)
        with pytest.raises(ValueError) as late:
            load_model(name)
        assert str(early.value) == str(late.value)


def test_a_file_and_an_adapter_folder_are_not_models(folder):
    with pytest.raises(ValueError, match="config.json is no folder"):
        load_model(str(folder / "config.json"))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter.*base model"):
        load_model(str(folder))


def test_a_truncated_weight_file_is_refused_by_name(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))} is damaged.*restore or delete"):
        load_model(str(folder))


def test_missing_weights_are_an_error_not_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights.*model.layers.1.mlp.up_proj.weight"):
        load_model(str(folder))


class FakeHub:
    """from_pretrained of config, tokenizer and model, recording how each was called.

    Attributes:
        calls: kind -> (source, keywords) of its last call.
        head: the commit that every branch is at; a commit is itself.
    """

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
        self.calls: dict[str, tuple[str, dict]] = {}
        self.head = COMMIT

        def answer(kind, result):
            def from_pretrained(source, **keywords):
                self.calls[kind] = (source, keywords)
                return result

            return from_pretrained

        def config(source, **keywords):
            self.calls["config"] = (source, keywords)
            asked = keywords["revision"]
            return types.SimpleNamespace(_commit_hash=asked if asked in (COMMIT, OTHER_COMMIT) else self.head)

        complete = {"missing_keys": ()}
        monkeypatch.setattr(AutoConfig, "from_pretrained", config)
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", answer("tokenizer", loaded.tokenizer))
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", answer("model", (loaded.model, complete)))


def test_a_hub_id_is_loaded_at_the_one_commit_that_its_revision_means_now(tiny_qwen3, monkeypatch):
    hub = FakeHub(tiny_qwen3(), monkeypatch)
    loaded = load_model("Qwen/Qwen3-0.6B@some-branch", device="cpu", dtype=torch.bfloat16)
    assert hub.calls["config"] == ("Qwen/Qwen3-0.6B", {"revision": "some-branch"})
    assert hub.calls["tokenizer"] == ("Qwen/Qwen3-0.6B", {"revision": COMMIT})
    source, keywords = hub.calls["model"]
    assert source == "Qwen/Qwen3-0.6B" and keywords["revision"] == COMMIT
    assert keywords["dtype"] is torch.bfloat16 and keywords["attn_implementation"] == "sdpa"
    assert (loaded.name, loaded.revision) == ("Qwen/Qwen3-0.6B@some-branch", COMMIT)
    assert loaded.origin == f"hub Qwen/Qwen3-0.6B@{COMMIT}"


def test_a_hub_id_without_revision_means_the_main_branch(tiny_qwen3, monkeypatch):
    hub = FakeHub(tiny_qwen3(), monkeypatch)
    assert load_model("Qwen/Qwen3-0.6B", device="cpu").revision == COMMIT
    assert hub.calls["config"] == ("Qwen/Qwen3-0.6B", {"revision": "main"})


def test_a_hub_model_stays_at_the_commit_of_its_first_load(tiny_qwen3, monkeypatch, cache, capsys):
    """The branch moves on between two loads; the second one takes the first one's commit and says how to move on."""
    hub = FakeHub(tiny_qwen3(), monkeypatch)
    assert load_model("Qwen/Qwen3-0.6B", device="cpu").revision == COMMIT and capsys.readouterr().err == ""
    assert json.loads((cache / HUB_LOCK).read_text()) == {"Qwen/Qwen3-0.6B@main": COMMIT}
    hub.head = OTHER_COMMIT
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main"):
        loaded = load_model(name, device="cpu")
        assert loaded.revision == COMMIT and loaded.origin == f"hub Qwen/Qwen3-0.6B@{COMMIT}"
        assert hub.calls["model"][1]["revision"] == hub.calls["tokenizer"][1]["revision"] == COMMIT
        way_on = f"Qwen/Qwen3-0.6B@main is loaded at commit {COMMIT}, as {cache / HUB_LOCK} says; delete that entry"
        assert way_on in capsys.readouterr().err
    assert load_model("Qwen/Qwen3-0.6B@tuned", device="cpu").revision == OTHER_COMMIT  # a branch not loaded before
    both = {"Qwen/Qwen3-0.6B@main": COMMIT, "Qwen/Qwen3-0.6B@tuned": OTHER_COMMIT}
    assert json.loads((cache / HUB_LOCK).read_text()) == both
    (cache / HUB_LOCK).write_text("{}")
    assert load_model("Qwen/Qwen3-0.6B", device="cpu").revision == OTHER_COMMIT


def test_a_commit_that_is_named_needs_no_lock_and_a_failed_load_leaves_none(tiny_qwen3, monkeypatch, cache):
    hub = FakeHub(tiny_qwen3(), monkeypatch)
    assert load_model(f"org/name@{COMMIT}", device="cpu").revision == COMMIT

    def unreachable(source, **_):
        raise OSError("the download broke off")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(OSError, match="the download broke off"):
        load_model("org/name", device="cpu")
    assert hub.calls["config"] == ("org/name", {"revision": "main"}) and not cache.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"org/name@main": "main"}'])
def test_a_damaged_file_of_commits_is_refused_by_name(tiny_qwen3, monkeypatch, cache, content):
    FakeHub(tiny_qwen3(), monkeypatch)
    cache.mkdir()
    (cache / HUB_LOCK).write_text(content)
    with pytest.raises(ValueError, match=f"{HUB_LOCK} is damaged .*; correct or delete it"):
        load_model("org/name", device="cpu")


def test_a_folder_of_that_name_wins_over_the_hub(folder, tmp_path, no_network, monkeypatch):
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert load_model("org/name").origin == "local folder name"
    assert no_network == []


def offline(monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    """What HF_HUB_OFFLINE=1 and HF_HUB_CACHE do when set before the start."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub_cache))


def test_env6_a_cached_hub_model_loads_offline_and_its_commit_is_known(tiny_qwen3, tmp_path, no_network, monkeypatch):
    """The real code of transformers on a hub cache made by hand: refs/<branch> holds the commit of a snapshot."""
    saved = tiny_qwen3(seed=3)
    repository = tmp_path / "models--org--name"
    save(saved, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "tuned").write_text(COMMIT)
    offline(monkeypatch, tmp_path)
    loaded = load_model("org/name@tuned", device="cpu")
    assert (loaded.revision, resolve_revision("org/name", "tuned")) == (COMMIT, COMMIT)
    with torch.no_grad():
        assert_close(loaded.model(IDS).logits, saved.model(IDS).logits)
    assert load_model(f"org/name@{COMMIT}", device="cpu").revision == COMMIT
    assert no_network == []


def test_env6_an_offline_hub_names_the_ways_out(tmp_path, no_network, monkeypatch):
    offline(monkeypatch, tmp_path)
    with pytest.raises(OSError) as caught:
        load_model("Qwen/Qwen3-0.6B")
    for part in ("'Qwen/Qwen3-0.6B'", "HF_HUB_OFFLINE unset (now: 1)", "local model folder", "pocket:tldr:1x",
                 "smollm2-135m-instruct"):  # fmt: skip
        assert part in str(caught.value)
    assert no_network == []


def test_tok11_a_tokenizer_with_another_eos_than_the_model_is_refused_naming_both(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(ValueError) as caught:
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")
    assert "this model" in str(caught.value)
    assert "tokenizer's EOS is <|im_start|> (id 4)" in str(caught.value)
    assert "model's EOS is <|im_end|> (id 5)" in str(caught.value)


def test_tok11_disagreement_is_found_when_a_folder_is_loaded(tiny_qwen3, tmp_path):
    saved = tiny_qwen3()
    saved.tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(ValueError, match="tokenizer's EOS is .*model's EOS is"):
        load_model(str(save(saved, tmp_path / "model")))


def test_tok11_another_pad_than_the_models_is_refused_naming_both(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.model.config.pad_token_id = 0
    both = r"tokenizer's pad is <\|endoftext\|> \(id 3\), the model's pad is <unk> \(id 0\)"
    with pytest.raises(ValueError, match=both):
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")


def test_tok11_a_tokenizer_without_eos_is_refused(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"tokenizer's EOS is missing, the model's EOS is <\|im_end\|>"):
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")
    loaded.model.config.eos_token_id = None
    with pytest.raises(ValueError, match="tokenizer's EOS is missing, the model's EOS is missing"):
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")


def test_tok11_one_of_several_eos_ids_of_the_model_is_enough(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.model.config.eos_token_id = [3, 5]
    reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")
    assert loaded.model.config.eos_token_id == [3, 5]
    loaded.model.config.eos_token_id = [3, 4]
    with pytest.raises(ValueError, match=r"<\|endoftext\|> \(id 3\) or <\|im_start\|> \(id 4\)"):
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")


def test_a_missing_pad_becomes_eos_in_tokenizer_and_model_and_a_missing_bos_stays_missing(tiny_qwen3, tmp_path):
    saved = tiny_qwen3()
    saved.tokenizer.pad_token = None
    saved.model.config.pad_token_id = None
    loaded = load_model(str(save(saved, tmp_path / "model")))
    assert loaded.tokenizer.pad_token_id == loaded.model.config.pad_token_id == loaded.tokenizer.eos_token_id == 5
    assert loaded.tokenizer.bos_token_id is None


def test_a_model_that_names_no_eos_gets_the_tokenizers(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.model.config.eos_token_id = loaded.model.config.pad_token_id = None
    reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")
    assert (loaded.model.config.eos_token_id, loaded.model.config.pad_token_id) == (5, 3)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tiny_qwen3):
    loaded = tiny_qwen3()
    loaded.tokenizer.add_tokens(["zebra"])
    with pytest.raises(ValueError, match="tokenizer has 44 tokens, the model embeds 43"):
        reconcile_special_tokens(loaded.tokenizer, loaded.model, "this model")


def test_the_manifest_entry_is_plain_and_complete(tiny_qwen3, tmp_path):
    loaded = load_model(str(save(tiny_qwen3(), tmp_path / "model")), device="cpu", dtype=torch.bfloat16)
    # Tied embeddings 43 x 32; two layers of q, o (32 x 32), k, v (16 x 32), norms of q and k (8), MLP (3 x 64 x 32) and
    # two norms (32); the last norm (32).
    parameters = 43 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 2 * 8 + 3 * 64 * 32 + 2 * 32) + 32
    assert json.loads(json.dumps(describe(loaded))) == {
        "name": str(tmp_path / "model"),
        "origin": "local folder model",
        "revision": None,
        "dtype": "bfloat16",
        "parameters": parameters,
        "loader": "plain",
        "device": "cpu",
    }


def test_the_shared_factories_are_repeatable_and_leave_the_global_random_state_alone(tiny_qwen3, tiny_llama, tiny_gpt2):
    before = torch.random.get_rng_state()
    for make in (tiny_qwen3, tiny_llama, tiny_gpt2):
        first, second, other = make(), make(), make(seed=1)
        with torch.no_grad():
            logits = first.model(IDS).logits
            assert torch.equal(second.model(IDS).logits, logits)
            assert (other.model(IDS).logits - logits).abs().max() > 0.1
        reconcile_special_tokens(first.tokenizer, first.model, first.name)
    assert torch.equal(torch.random.get_rng_state(), before)
