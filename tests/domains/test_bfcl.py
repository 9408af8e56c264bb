"""The BFCL domain: tasks of three sources, every prompt form and role, metrics."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bfcl_rows import all_tasks

from mapl_core.domains import bfcl_data, get_domain
from mapl_core.domains.base import Task, Turn
from mapl_core.domains.bfcl import FORMS, ROLES
from mapl_core.domains.bfcl_data import SPLIT_SIZES, accepted_rows, fault, hub_revision, package_rows
from mapl_core.grid import DOMAIN_NOTEBOOKS, ROOT
from mapl_core.profiles import load_profile
from mapl_core.rewards import bfcl_reward

SOURCES = ("pocket", "small", "paper")
HASH = "13fe055" + "a" * 33
SCHEMA = {
    "name": "geo.find",
    "description": "Finds {a} place.",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def row(number=0, category="parallel", cities=("Paris", "Rome")):
    gold = [{"geo.find": {"city": [city, 8.854e-12, ""]}} for city in cities]
    prompt = f"Find {' and '.join(cities)}, request {number}."
    return {"id": f"{category}_{number}", "user_prompt": prompt, "function": [SCHEMA], "ground_truth": gold}


def task_of(source):
    return Task("t", source, "train", {name: row()[name] for name in ("user_prompt", "function", "ground_truth")})


@pytest.fixture
def domain():
    return get_domain("bfcl")


# The package -----------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A wheel with ten small rows a category, named by MAPL_WHEELS; the package itself is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bfcl_eval" else find(name))
    files = {}
    for category in ("parallel", "parallel_multiple"):
        rows = [row(number, category) for number in range(10)]
        questions = [
            {"id": r["id"], "question": [[{"role": "user", "content": r["user_prompt"]}]], "function": r["function"]}
            for r in rows
        ]
        answers = [{"id": r["id"], "ground_truth": r["ground_truth"]} for r in rows]
        for name, lines in (("data", questions), ("data/possible_answer", answers)):
            files[f"{name}/BFCL_v4_{category}.json"] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
    monkeypatch.setattr(bfcl_data, "PACKAGE", replace(bfcl_data.PACKAGE, digests=digests))
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "bfcl_eval-2026.3.23-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(f"bfcl_eval/{name}", text)
    monkeypatch.setenv("MAPL_WHEELS", str(folder))
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "cache"))
    return folder


def test_rows_are_read_out_of_the_wheel_in_file_order_without_installing_it(wheels):
    rows = package_rows()
    assert [r["id"] for r in rows] == [f"{c}_{n}" for c in ("parallel", "parallel_multiple") for n in range(10)]
    assert rows[3] == row(3) | {"category": "parallel"}
    assert "bfcl_eval" not in sys.modules


def test_the_rows_are_shuffled_with_seed_42_and_divided_80_to_20(wheels, domain):
    order = [f"{c}_{n}" for c in ("parallel", "parallel_multiple") for n in range(10)]
    random.Random(42).shuffle(order)
    assert [task.id for task in domain.load_tasks("train", "small")] == order[:16]
    assert [task.id for task in domain.load_tasks("eval", "small")] == order[16:]
    assert [task.id for task in domain.load_tasks("train", "small", 3)] == order[:3]


def test_an_installed_package_is_used_without_importing_it(wheels, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(next(wheels.iterdir())) as archive:
        archive.extractall(site)
    (site / "bfcl_eval" / "__init__.py").write_text("import a_package_that_is_not_installed")
    spec = SimpleNamespace(submodule_search_locations=[str(site / "bfcl_eval")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    next(wheels.iterdir()).unlink()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a wheel was looked for"))
    assert len(package_rows()) == 20


@pytest.mark.parametrize("damage", ["cut", "other content", "empty archive"])
def test_a_damaged_wheel_is_refused_by_name(wheels, damage):
    wheel = next(wheels.iterdir())
    if damage == "cut":
        wheel.write_bytes(wheel.read_bytes()[:500])
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in bfcl_data.PACKAGE.digests if damage == "other content" else ():
                archive.writestr(f"bfcl_eval/{name}", b"{}")
    with pytest.raises(ValueError, match="damaged or not .*bfcl-eval==2026.3.23") as caught:
        package_rows()
    assert str(wheel) in str(caught.value)


def test_env6_without_package_and_network_the_error_names_the_ways_out(wheels, domain, monkeypatch):
    monkeypatch.delenv("MAPL_WHEELS")
    answer = subprocess.CompletedProcess([], 1, "", "ERROR: no route\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(FileNotFoundError) as caught:
        domain.load_tasks("train", "small")
    for part in ("no route", "pip install --no-deps bfcl-eval==2026.3.23", "MAPL_WHEELS", "'pocket'"):
        assert part in str(caught.value)


def test_env6_a_wheel_that_was_downloaded_serves_from_then_on(wheels, tmp_path, monkeypatch):
    downloads = tmp_path / "cache" / "wheels"

    def download(command, **_):
        wheel = next(wheels.iterdir())
        wheel.rename(downloads / wheel.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("MAPL_WHEELS")
    monkeypatch.setattr(subprocess, "run", download)
    assert len(package_rows()) == 20
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    assert len(package_rows()) == 20


def test_a_cache_folder_that_cannot_be_made_is_an_error_with_the_remedy(wheels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set MAPL_CACHE to a writable folder"):
        package_rows()


def test_the_real_package_gives_160_and_40_tasks_of_two_to_eight_calls_and_refuses_none(domain):
    assert len(all_tasks()) == 400
    train, evaluation = (domain.load_tasks(split, "small") for split in ("train", "eval"))
    assert (len(train), len(evaluation)) == (160, 40)
    assert domain.refused == {("small", "train"): [], ("small", "eval"): []}
    assert len({task.id for task in train + evaluation}) == 200
    assert {len(task.fields["ground_truth"]) for task in all_tasks()} == {2, 3, 4, 5, 6, 8}
    assert {task.fields["category"] for task in train} == {"parallel", "parallel_multiple"}


# The paper's rows ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stand in for the hub: remembers what is asked, gives rows as lines of text or raises a given error."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("MAPL_CACHE", str(tmp_path))
    calls = []

    def install(answer, commits=("f" * 40, HASH, "0" * 40)):
        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return [{"text": json.dumps(r)} for r in answer] + [{"text": ""}]

        def list_repo_commits(_, repo, *, repo_type):
            calls.append((repo, repo_type))
            return [SimpleNamespace(commit_id=commit) for commit in commits]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_commits", list_repo_commits)
        return calls

    return install


def hub_row(number, category="parallel", **changes):
    return row(number, category) | {"official_category": category, "task_type": "travel"} | changes


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_papers_rows_come_as_lines_of_the_pinned_commit(domain, hub, split):
    calls = hub([hub_row(number) for number in range(3)])
    tasks = domain.load_tasks(split, "paper")
    file = f"hf://datasets/OpenMLRL/BFCL-V4-Parallel-Native@{HASH}/{split}.jsonl"
    assert calls[1] == (("text",), {"data_files": {split: file}, "split": split})
    assert [task.id for task in tasks] == ["parallel_0", "parallel_1", "parallel_2"]
    assert tasks[0].fields["ground_truth"] == row()["ground_truth"]  # the smallest number as well
    assert {(task.source, task.split) for task in tasks} == {("paper", split)}
    assert set(tasks[0].fields) == {"category", "user_prompt", "function", "ground_truth"}


def test_the_commit_is_resolved_once_noted_and_required_from_then_on(domain, hub):
    calls = hub([hub_row(0)])
    domain.load_tasks("train", "paper")
    assert calls[0] == ("OpenMLRL/BFCL-V4-Parallel-Native", "dataset")
    hub([hub_row(0)], commits=())  # the hub has moved on, or is out of reach
    domain.load_tasks("eval", "paper")
    assert [call[0] for call in calls].count("OpenMLRL/BFCL-V4-Parallel-Native") == 1
    assert HASH in domain.provenance("paper")["data"]


def test_a_damaged_note_of_the_commit_is_refused_by_name(hub, tmp_path):
    hub([])
    hub_revision()
    (note,) = (tmp_path / "hub").iterdir()
    note.write_text("main\n")
    with pytest.raises(ValueError, match=f"{note.name} holds 'main', not a commit 13fe055"):
        hub_revision()


def test_a_hub_without_the_pinned_commit_is_an_error(domain, hub):
    hub([], commits=("f" * 40,))
    with pytest.raises(ConnectionError, match="has no commit 13fe055"):
        domain.load_tasks("train", "paper")


def test_the_first_rows_are_taken_and_of_these_the_two_categories(domain, hub):
    hub([hub_row(n, "live_parallel" if n % 2 else "parallel_multiple") for n in range(170)])
    for split, size in SPLIT_SIZES.items():
        expected = [f"parallel_multiple_{n}" for n in range(0, size, 2)]
        assert [task.id for task in domain.load_tasks(split, "paper")] == expected
        assert [task.id for task in domain.load_tasks(split, "paper", size)] == expected
        assert [task.id for task in domain.load_tasks(split, "paper", 7)] == expected[:7]


@pytest.mark.parametrize("cause", [ConnectionError("no route"), OSError("disk"), RuntimeError("client")])
def test_env6_an_unreachable_hub_is_an_error_that_names_the_cause_and_the_ways_out(domain, hub, cause):
    hub(cause)
    with pytest.raises(ConnectionError, match=f"13fe055.*{cause}.*HF_HUB_OFFLINE.*'pocket' needs no hub"):
        domain.load_tasks("train", "paper")


def test_env9_a_missing_datasets_package_is_named_with_its_install_command(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        domain.load_tasks("train", "paper")


# Rows that cannot be tasks ---------------------------------------------------------------------------------

OTHER = copy.deepcopy(SCHEMA) | {"description": "Another one."}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ground_truth": []}, "ground_truth is empty"),
        ({"ground_truth": None}, "ground_truth is empty or NoneType"),
        ({"ground_truth": "[]"}, "ground_truth is empty or str"),
        ({"ground_truth": [{"geo.find": {"city": ["a"]}}]}, "only one gold call"),
        ({"ground_truth": [{"geo.find": {}}, {"find": {}}]}, "gold call of find, which has no schema"),
        ({"ground_truth": [{"geo.find": {}, "b": {}}] * 2}, "a gold call that is no"),
        ({"ground_truth": ["geo.find()"] * 2}, "a gold call that is no"),
        ({"ground_truth": [{"geo.find": None}] * 2}, "a gold call that is no"),
        ({"function": [SCHEMA, OTHER]}, "two different schemas of geo.find"),
        ({"function": []}, "function is empty"),
        ({"function": [{"description": ""}]}, "a schema without a name"),
        ({"user_prompt": ""}, "user_prompt is empty"),
    ],
)
def test_a_row_that_cannot_be_a_task_is_refused_with_id_and_reason(domain, hub, changes, reason):
    hub([hub_row(0), hub_row(1, **changes), hub_row(2)])
    assert [task.id for task in domain.load_tasks("train", "paper")] == ["parallel_0", "parallel_2"]
    ((row_id, told),) = domain.refused["paper", "train"]
    assert row_id == "parallel_1" and told.startswith(reason)


def test_equal_schemas_of_one_name_are_merged(domain, hub):
    hub([hub_row(0, function=[SCHEMA, copy.deepcopy(SCHEMA)])])
    assert domain.load_tasks("train", "paper")[0].fields["function"] == [SCHEMA]


def test_an_id_that_occurs_twice_is_refused_and_a_missing_one_is_made_from_the_number():
    rows = [row(0), row(0), row(1) | {"id": None}]
    accepted, refused = accepted_rows(rows, lambda number: f"row/{number}")
    assert [r["id"] for r in accepted] == ["parallel_0", "row/2"]
    assert refused == [("parallel_0", "the id parallel_0 occurs twice")]


def test_a_sound_row_has_no_fault():
    assert fault(row()) is None


# Profiles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("agents", [1, 2, 3])
def test_every_profile_has_a_configuration_whose_tasks_its_split_can_serve(source, agents):
    options = {"num_agents": agents, "roles": "odd_even"}
    config = load_profile(source).config("bfcl", "madpo", domain_options=options)
    assert config.source == source and config.num_agents == agents == len(config.token_limits)
    assert config.train_tasks <= SPLIT_SIZES["train"] and config.eval_tasks <= SPLIT_SIZES["eval"]


def test_without_a_notebook_bfcl_is_no_part_of_the_grid():
    assert ("bfcl" in DOMAIN_NOTEBOOKS) == (ROOT / "notebooks" / "07_bfcl.ipynb").is_file()


# Wrong choices ---------------------------------------------------------------------------------------------


def test_an_unknown_split_source_or_role_is_refused_with_the_valid_names(domain):
    with pytest.raises(ValueError, match="unknown split 'test'; choose one of train, eval"):
        domain.load_tasks("test", "small")
    with pytest.raises(ValueError, match="unknown source 'medium'; choose one of pocket, small, paper"):
        domain.load_tasks("train", "medium")
    with pytest.raises(ValueError, match="unknown roles 'halves'; choose one of self_select, odd_even, split_by_order"):
        get_domain("bfcl", roles="halves")


@pytest.mark.parametrize("number", [0, 4, -1, 2.0, True, "2"])
def test_a_team_has_one_to_three_agents(number):
    with pytest.raises(ValueError, match="num_agents must be"):
        get_domain("bfcl", num_agents=number)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("limit", "message"), [(0, "limit must be at least 1"), (161, "limit.* 160.*161|limit 161.*160")]
)
def test_a_limit_that_cannot_be_served_is_refused_before_anything_is_read(domain, source, limit, message, monkeypatch):
    monkeypatch.setattr(bfcl_data, "small_rows", lambda split: pytest.fail("read"))
    monkeypatch.setattr(bfcl_data, "hub_rows", lambda split: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        domain.load_tasks("train", source, limit)


def test_env4_the_domain_and_its_prompts_need_neither_torch_nor_datasets_nor_scipy():
    program = (
        "import sys\nfrom mapl_core.domains import get_domain\n"
        "domain = get_domain('bfcl')\n"
        "[domain.prompts(task) for task in domain.load_tasks('train', 'pocket')]\n"
        "assert not {'torch', 'datasets', 'scipy', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Prompts ---------------------------------------------------------------------------------------------------


def every_prompt(domain, task):
    """All prompts of one task, by form."""
    drafts = [f"draft {agent}" for agent in range(domain.num_agents)]
    forms = {"coordinator": domain.coordinator_prompt(task), "single": domain.single_prompt(task)}
    for agent, prompt in enumerate(domain.prompts(task)):
        forms[f"agent {agent}"] = prompt
        forms[f"sequential {agent}"] = domain.sequential_prompt(agent, task, drafts[:agent])
        forms[f"discussion {agent}"] = domain.discussion_prompts(task, drafts)[agent]
    return forms


@pytest.mark.parametrize("source", ["small", "paper"])
def test_every_prompt_states_all_schemas_in_a_line_each_with_sorted_keys_and_the_request_once(domain, source):
    task = task_of(source)
    second = {"name": "stop", "parameters": {"type": "dict", "properties": {}, "required": []}, "description": "é"}
    task.fields["function"].append(second)
    for form, prompt in every_prompt(domain, task).items():
        for schema in task.fields["function"]:
            line = json.dumps(schema, sort_keys=True, ensure_ascii=False)
            assert prompt.split("\n").count(line) == 1, form
        assert prompt.count(task.fields["user_prompt"]) == 1, form
        assert prompt.count("one per line") == 1 and "[]" in prompt, form
    task.fields["function"].pop()


def test_the_pocket_prompts_are_these(domain):
    task = domain.load_tasks("train", "pocket", 1)[0]
    start = "functions : call_person ( person ) . request : today call ines , call clara and call karla .\n\n"
    share = "make a share of the calls ."
    sections = "\n\n<agent_0> calls </agent_0> <agent_1> calls </agent_1> ."
    assert every_prompt(domain, task) == {
        "agent 0": start + share,
        "agent 1": start + share,
        "coordinator": start + "make all calls , no call twice :" + sections,
        "single": start + "make all calls :" + sections,
        "sequential 0": start + share,
        "sequential 1": start + share + " the other agent wrote : draft 0",
        "discussion 0": start
        + share
        + " the other agent wrote : draft 1 . your draft was : draft 0 . write it again .",
        "discussion 1": start
        + share
        + " the other agent wrote : draft 0 . your draft was : draft 1 . write it again .",
    }


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("agents", [2, 3])
def test_self_select_tells_all_agents_the_same_and_the_other_roles_tell_each_its_own(source, agents):
    for roles in ROLES:
        prompts = get_domain("bfcl", num_agents=agents, roles=roles).prompts(task_of(source))
        assert len(prompts) == agents
        assert len(set(prompts)) == (1 if roles == "self_select" else agents)
        assert roles == "self_select" or not any("a share" in prompt for prompt in prompts)


def told(roles, agents, source="small"):
    domain = get_domain("bfcl", num_agents=agents, roles=roles)
    return [domain.role_text(agent, task_of(source)) for agent in range(agents)]


def test_odd_and_even_numbers_become_every_third_number_for_three_agents():
    assert ["1, 3, 5 and so on" in told("odd_even", 2)[0], "2, 4, 6 and so on" in told("odd_even", 2)[1]] == [True] * 2
    assert [f"{n}, {n + 3}, {n + 6} and so on" in text for n, text in enumerate(told("odd_even", 3), 1)] == [True] * 3
    assert told("odd_even", 2, "pocket") == ["make the calls 1 3 5 .", "make the calls 2 4 6 ."]


def test_parts_by_order_are_halves_for_two_agents_and_thirds_for_three():
    parts = {2: ("first half", "second half"), 3: ("first third", "middle third", "last third")}
    for agents, names in parts.items():
        assert all(name in text for name, text in zip(names, told("split_by_order", agents), strict=True))
    assert told("split_by_order", 2, "pocket")[1] == "make part 2 of 2 of the calls ."


@pytest.mark.parametrize("source", SOURCES)
def test_an_agent_alone_is_told_of_no_team(source):
    for roles in ROLES:
        (prompt,) = get_domain("bfcl", num_agents=1, roles=roles).prompts(task_of(source))
        assert "agents" not in prompt and "share" not in prompt and "half" not in prompt


def test_agents_are_told_how_many_they_are_and_that_nobody_sees_the_others():
    assert all("3 agents answer" in text and "without seeing each other" in text for text in told("self_select", 3))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("agents", [1, 2, 3])
def test_coordinator_and_single_prompt_ask_for_one_section_an_agent(source, agents):
    domain = get_domain("bfcl", num_agents=agents)
    for prompt in (domain.coordinator_prompt(task_of(source)), domain.single_prompt(task_of(source))):
        assert domain.split_joint(prompt) == ["calls"] * agents


def test_the_coordinator_reads_the_roles_where_agents_have_different_ones():
    for roles in ("odd_even", "split_by_order"):
        domain = get_domain("bfcl", roles=roles)
        prompt = domain.coordinator_prompt(task_of("small"))
        for agent in range(2):
            assert f"<agent_{agent}>: {domain._share(agent, FORMS['small'])}" in prompt
        assert "no call twice" in prompt
        assert "first half" not in domain.single_prompt(task_of("small"))


def test_a_third_agent_reads_both_earlier_parts_and_both_other_drafts():
    domain, task = get_domain("bfcl", num_agents=3), task_of("small")
    sequential = domain.sequential_prompt(2, task, ["one()", "two()"])
    assert sequential.count("An agent before you wrote:") == 2 and sequential.index("one()") < sequential.index("two()")
    first, *_ = domain.discussion_prompts(task, ["mine()", "two()", "three()"])
    assert first.index("two()") < first.index("three()") < first.index("Your draft was:\nmine()")


@pytest.mark.parametrize("source", SOURCES)
def test_thoughts_of_another_agent_are_not_shown_and_braces_do_no_harm(domain, source):
    thinking = "<think>secret</think>\n open {text} \n"
    sequential = domain.sequential_prompt(1, task_of(source), [thinking])
    rounds = domain.discussion_prompts(task_of(source), [thinking, "own"])
    assert all("open {text}" in prompt and "secret" not in prompt for prompt in (sequential, *rounds))


@pytest.mark.parametrize("previous", [[], ["a", "b"]])
def test_the_second_agent_in_a_sequence_follows_exactly_one_earlier_part(domain, previous):
    with pytest.raises(ValueError, match=f"agent 1 follows 1 earlier parts, got {len(previous)}"):
        domain.sequential_prompt(1, task_of("small"), previous)


def test_a_discussion_needs_one_draft_per_agent(domain):
    with pytest.raises(ValueError, match="expected 2 drafts"):
        domain.discussion_prompts(task_of("small"), ["only one"])


def test_an_earlier_turn_is_refused_since_bfcl_has_one_turn(domain):
    turn = Turn(("a", "b"), bfcl_reward(["a", "b"], task_of("small")))
    for prompts in (domain.prompts, domain.coordinator_prompt):
        with pytest.raises(ValueError, match="BFCL has one turn"):
            prompts(task_of("small"), (turn,))


def test_the_format_example_of_the_prompt_can_be_read_and_names_no_function_of_a_row(domain):
    example = FORMS["small"].output.partition("made-up names:\n")[2]
    for line in example.splitlines():
        name = line.partition("(")[0]
        assert "=" in line and not any(name == s["name"] for task in all_tasks() for s in task.fields["function"])


# Reward and metrics ----------------------------------------------------------------------------------------

PARIS, ROME = 'geo.find(city="Paris")', 'geo.find(city="Rome")'


def test_metrics_are_what_the_oracle_measured(domain):
    metrics = domain.metrics([f"{PARIS}\n{PARIS}\n{ROME}\nget_time()", ""], task_of("small"))
    assert metrics == {
        "correct": 1.0, "cost": 1.5, "p": 2.0, "g": 2.0, "duplicates": 1.0, "inactive": 1.0, "excess": 0.0,
        "unknown": 1.0, "F": 1.0, "A": 1.0, "Bal": 0.0,
    }  # fmt: skip
    assert all(isinstance(number, float) for number in metrics.values())
    assert domain.headline in metrics


def test_reward_and_metrics_use_one_scorer_and_know_the_number_of_agents(domain):
    pair = [PARIS, ROME]
    assert domain.reward(pair, task_of("small")) == bfcl_reward(pair, task_of("small"))
    assert domain.reward(pair, task_of("small")).total == domain.max_reward == 2.0
    for score in (domain.reward, domain.metrics):
        with pytest.raises(ValueError, match="expected 2 responses"):
            score([*pair, ""], task_of("small"))
    assert get_domain("bfcl", num_agents=3).reward([*pair, "[]"], task_of("small")).total == 2.0


def test_a_coordinators_sections_are_scored_like_the_agents_responses(domain):
    text = f"Sure:\n```\n<agent_0>\n{PARIS}\n</agent_0>\n<AGENT_1>{ROME}\n```"
    assert (
        domain.reward(domain.split_joint(f"<agent_0>{PARIS}</agent_0><agent_1>{ROME}"), task_of("small")).total == 2.0
    )
    assert domain.split_joint(text) == [PARIS, ROME + "\n```"]
    assert domain.reward(domain.split_joint(text), task_of("small")).total == 2.0


def test_empty_answers_have_finite_metrics(domain):
    metrics = domain.metrics([None, ""], task_of("small"))
    assert metrics == dict.fromkeys(metrics, 0.0) | {"g": 2.0, "inactive": 2.0}


@pytest.mark.parametrize("source", ["small", "pocket"])
def test_provenance_names_data_split_and_roles(source):
    named = get_domain("bfcl", roles="odd_even").provenance(source)
    assert named["roles"] == "odd_even"
    if source == "small":
        assert "bfcl-eval==2026.3.23" in named["data"]
        assert "Random(42)" in named["split"] and "80%" in named["split"] and "160 and 40" in named["split"]
    else:
        assert "generated" in named["data"]
    assert SPLIT_SIZES == {"train": 160, "eval": 40}


def test_team_metrics_say_who_makes_which_call_over_all_answers(domain):
    task, one = task_of("small"), "geo.find(city='Paris')"
    other = one.replace("Paris", "Rome")
    divided = domain.team_metrics([(task, [(one, other)] * 30)])
    assert divided["role_gap"] == 1.0 and 0.0 < divided["role_gap_by_chance"] < 0.35
    assert domain.team_metrics([(task, [(one, other), (other, one)])])["role_gap"] == 0.0
    assert domain.team_metrics([(task, [("", None)])]) == {"role_gap": 0.0, "role_gap_by_chance": 0.0}
