"""The comparator "api" against vLLM's own server on the loopback address, which serves a tiny random model."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import tiny_qwen3
from toy_domains import ToyDomain
from toy_models import base, make_policy

from mapl_core import domains
from mapl_core.comparators import EndpointTeam
from mapl_core.endpoint import Endpoint, EndpointError, EndpointSettings, Question
from mapl_core.profiles import RunConfig
from mapl_core.results import read_manifest
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream
from mapl_core.train import run_mapl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VARIABLE, MARK = "MAPL_TEST_KEY", "sk-MARKED-7f3a91-not-a-key"
START_SECONDS = 300
SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU takes no smaller one
COMPARE = Stream(0, "comparator")


@dataclass(frozen=True)
class Served:
    """A server that is ready: its address and the folder of its model."""

    url: str
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    loaded = tiny_qwen3.__wrapped__()(**SHAPE)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "VLLM_API_KEY": MARK}
    log = folder.parent / "server.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(port):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield Served(f"http://127.0.0.1:{port}/v1", folder)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def is_ready(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return opener.open(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def client(served, tmp_path, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv(VARIABLE, MARK)

    def make(folder: str = "kept", **changes) -> Endpoint:
        settings = EndpointSettings(served.url, "tiny", VARIABLE, **changes)
        return Endpoint(settings, folder=tmp_path / folder)

    return make


@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_a_team_at_the_server_answers_as_the_same_model_does_here(client, structure):
    """Greedy, in float32: the same texts, the same ends, and as many tokens, those of the chat template included."""
    here = make_policy(base(tiny_qwen3.__wrapped__(), **SHAPE), structure=structure, trained=False, prompt_form="chat",
                       temperature=0.0, limits=12)  # fmt: skip
    tasks = here.domain.load_tasks("train", "pocket", 4)
    settings = [SamplingSettings(0.0, 1.0, 12)] * len(here.members)
    there = EndpointTeam(here.domain, structure, client(), settings)
    expected = [action for (t,) in here.sample(tasks, 1, COMPARE) for action in t.actions[0]]
    found = [action for (t,) in there.sample(tasks, 1, COMPARE) for action in t.actions[0]]
    assert [action.text.split() for action in found] == [action.text.split() for action in expected]
    assert [action.truncated for action in found] == [action.truncated for action in expected]
    assert there.endpoint.sent.prompt_tokens == sum(len(action.prompt_ids) for action in expected)
    assert there.endpoint.sent.completion_tokens == sum(len(action.token_ids) for action in expected)


def test_a_draw_repeats_its_answer_and_another_one_brings_another(client):
    questions = [Question("write a title", "", 12, 1.0, 1.0, draw) for draw in range(8)]
    first, again = client("one").answer(questions), client("two").answer(questions)
    assert first == again and len({answer.text for answer in first}) > 1


def test_a_field_that_only_vllm_knows_reaches_it(client):
    """With top-k 1 every draw is the greedy answer."""
    questions = [Question("write a title", "", 12, 1.0, 1.0, draw) for draw in range(6)]
    assert len({answer.text for answer in client(options={"top_k": 1}).answer(questions)}) == 1


def test_a_wrong_key_is_refused_by_the_name_of_its_variable(client, monkeypatch):
    asking = client
    monkeypatch.setenv(VARIABLE, MARK + "x")
    with pytest.raises(EndpointError, match=f"status 401.*{VARIABLE}") as caught:
        asking().answer([Question("write", "", 4, 1.0, 1.0, 0)])
    assert MARK not in str(caught.value)


def test_a_model_that_the_server_does_not_have_is_told_in_its_own_words(client, served, tmp_path):
    other = Endpoint(EndpointSettings(served.url, "huge", VARIABLE), folder=tmp_path)
    with pytest.raises(EndpointError, match="huge at .*status 404.*huge"):
        other.answer([Question("write", "", 4, 1.0, 1.0, 0)])


@pytest.mark.parametrize(("paradigm", "policies"), [("dec-dec", 2), ("dec-cen", 1)])
def test_a_whole_run_against_the_server(client, served, tmp_path, monkeypatch, paradigm, policies):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "cache"))
    config = RunConfig(
        "test", "toy", "madpo", paradigm, agent_models=[str(served.folder)], central_model=str(served.folder),
        train_tasks=4, eval_tasks=2, eval_samples=2, max_new_tokens=[6], iterations=1, samples_per_task=6,
        pairs_per_task=2, comparator="api",
        endpoint={"url": served.url, "model": "tiny", "key_variable": VARIABLE},
    )  # fmt: skip
    run_mapl(config, tmp_path / "out", progress=False)
    record = read_manifest(tmp_path / "out" / "manifest.json")["notes"]["endpoint"]
    assert record["sent"]["requests"] == 4 * 6 * policies and record["answered_by"] == ["tiny"]
    assert record["sent"]["completion_tokens"] > 0 == record["sent"]["uncounted"]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert MARK.encode() not in files
