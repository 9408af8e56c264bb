"""The TLDR domain: tasks of three sources, every prompt form, metrics."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mapl_core.domains import get_domain
from mapl_core.domains import tldr as tldr_module
from mapl_core.domains.base import Task, Turn
from mapl_core.domains.tldr import FORMS, HUB_REVISION, read_posts
from mapl_core.rewards import tldr_reward

POST = "SUBREDDIT: r/cats\n\nTITLE: My {cat} steals\n\nPOST: She brings one glove a night. What do I do?"
SOURCES = ("pocket", "small", "paper")


def task_of(source):
    return Task("t", source, "train", {"post": POST})


@pytest.fixture
def domain():
    return get_domain("tldr")


# Shipped posts ----------------------------------------------------------------------------------------


def test_env6_the_shipped_posts_are_at_least_40_for_training_and_20_for_evaluation(domain):
    assert len(domain.load_tasks("train", "small")) >= 40
    assert len(domain.load_tasks("eval", "small")) >= 20
    assert domain.refused == {("small", "train"): [], ("small", "eval"): []}


@pytest.mark.parametrize("source", ["small", "pocket"])
def test_training_and_evaluation_share_no_task_and_no_post(domain, source):
    train, evaluation = (domain.load_tasks(split, source) for split in ("train", "eval"))
    tasks = train + evaluation
    assert len({task.id for task in tasks}) == len(tasks)
    assert {task.fields["post"] for task in train}.isdisjoint(task.fields["post"] for task in evaluation)
    assert {(task.source, task.split) for task in tasks} == {(source, "train"), (source, "eval")}


def test_a_shipped_post_has_the_four_fields_and_its_prompt_ends_with_the_cue(domain):
    for task in domain.load_tasks("train", "small") + domain.load_tasks("eval", "small"):
        subreddit, title, body = task.fields["post"].split("\n\n", 2)
        assert (subreddit[:13], title[:7], body[:6]) == ("SUBREDDIT: r/", "TITLE: ", "POST: ")
        assert task.fields["prompt"] == task.fields["post"] + "\n\nTL;DR:"


@pytest.mark.parametrize("source", ["small", "pocket"])
def test_a_limit_keeps_the_first_tasks_in_order(domain, source):
    assert domain.load_tasks("train", source, 3) == domain.load_tasks("train", source)[:3]


# Files of posts ----------------------------------------------------------------------------------------


def row(number, split, prompt=POST + "\n\nTL;DR:"):
    return {"id": f"post-{number:02d}", "split": split, "prompt": prompt}


ROWS = [row(number, "train" if number < 40 else "eval") for number in range(60)]


@pytest.fixture
def posts(tmp_path, monkeypatch):
    """Write lines into the file that `load_tasks` reads."""
    path = tmp_path / "posts.jsonl"
    monkeypatch.setattr(tldr_module, "posts_file", lambda: path)

    def write(rows):
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def replaced(number, line):
    return [*ROWS[: number - 1], line, *ROWS[number:]]


def test_a_complete_file_is_read_split_by_split_in_its_order(posts):
    posts(ROWS)
    domain = get_domain("tldr")
    assert [task.id for task in domain.load_tasks("train", "small")] == [f"post-{number:02d}" for number in range(40)]
    assert [task.id for task in domain.load_tasks("eval", "small")] == [
        f"post-{number:02d}" for number in range(40, 60)
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (json.dumps(ROWS[6]).encode()[:-30], "not a row of JSON"),
        (b"", "not a row of JSON"),
        (b'{"id": "\xff"}', "not a row of JSON"),
        (b'["post-06", "train", "text"]', "expected an object"),
        ({"id": "post-06", "split": "train"}, "expected an object"),
        ({"id": 6, "split": "train", "prompt": POST}, "expected an object"),
        ({"id": "post-06", "split": "train", "prompt": None}, "expected an object"),
        ({"id": "post-06", "split": "test", "prompt": POST}, "split must be one of train, eval, got 'test'"),
        (ROWS[5], "'post-05' occurs twice"),
    ],
    ids=["cut", "blank", "not UTF-8", "a list", "no prompt", "a number", "null", "unknown split", "id twice"],
)
def test_a_malformed_row_is_an_error_that_names_file_and_line(posts, line, complaint):
    path = posts(replaced(7, line))
    with pytest.raises(ValueError, match=f"posts.jsonl, line 7: .*{complaint}") as caught:
        get_domain("tldr").load_tasks("eval", "small")  # a fault in the other split's rows counts as well
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kept", "found"), [(59, "19 of at least 20 eval"), (33, "33 of at least 40 train"), (0, "0 of")]
)
def test_a_file_cut_between_two_rows_is_an_error_that_names_its_last_line(posts, kept, found):
    posts(ROWS[:kept])
    with pytest.raises(ValueError, match=f"posts.jsonl ends at line {kept} with {found}.*reinstall"):
        get_domain("tldr").load_tasks("train", "small")


def test_a_missing_file_is_an_error_that_names_it_and_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl is missing; reinstall"):
        read_posts(tmp_path / "gone.jsonl", "train")


def test_rows_without_post_text_are_refused_with_id_and_reason_and_counted(posts):
    empty = "SUBREDDIT: r/cats\n\nTITLE: POST: in the title\n\nPOST:  \n\nTL;DR:"
    without = "SUBREDDIT: r/cats\n\nTITLE: POST: in the title\n\nTL;DR:"
    rows = [row(90, "train", empty), *ROWS, row(91, "train", without), row(92, "eval", "")]
    posts(rows)
    domain = get_domain("tldr")
    assert [task.id for task in domain.load_tasks("train", "small")] == [f"post-{number:02d}" for number in range(40)]
    assert len(domain.load_tasks("eval", "small")) == 20
    assert domain.refused == {
        ("small", "train"): [("post-90", "no post text"), ("post-91", "no field POST")],
        ("small", "eval"): [("post-92", "no field POST")],
    }


def test_refused_rows_do_not_use_up_the_limit_and_are_not_counted_twice(posts):
    posts([row(90, "train", "nothing"), *ROWS])
    domain = get_domain("tldr")
    for _ in range(2):
        assert [task.id for task in domain.load_tasks("train", "small", 2)] == ["post-00", "post-01"]
    assert domain.refused == {("small", "train"): [("post-90", "no field POST")]}


def test_a_cue_inside_the_post_stays_and_only_the_last_one_is_taken_off(posts):
    told = POST + "\n\nTL;DR: they are gloves.\n\nTL;DR:"
    posts(replaced(1, row(0, "train", told)))
    assert get_domain("tldr").load_tasks("train", "small", 1)[0].fields["post"] == POST + "\n\nTL;DR: they are gloves."


# The paper's rows ----------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Stand in for datasets.load_dataset: remembers its calls, returns given rows or raises a given error."""
    import datasets

    calls = []

    def install(answer):
        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return install


@pytest.mark.parametrize(
    ("split", "rows_of_the_hub", "hub_split"), [("train", "train[:250]", "train"), ("eval", "test[:250]", "test")]
)
def test_the_papers_rows_come_from_the_pinned_revision_and_the_first_250_of_the_right_split(
    domain, hub, split, rows_of_the_hub, hub_split
):
    calls = hub([{"prompt": f"{POST} {number}\n\nTL;DR:", "completion": "LEAK"} for number in range(3)])
    tasks = domain.load_tasks(split, "paper")
    revision = "21233da376667088e6eb1ce4ce19ed832c2935d3"
    assert calls == [(("trl-lib/tldr",), {"split": rows_of_the_hub, "revision": revision})]
    assert [task.id for task in tasks] == [f"trl-lib/tldr/{hub_split}/{number}" for number in range(3)]
    assert [task.fields["post"] for task in tasks] == [f"{POST} {number}" for number in range(3)]
    assert {(task.source, task.split) for task in tasks} == {("paper", split)}
    assert "LEAK" not in repr(tasks)


def test_a_hub_row_without_post_text_is_refused_and_the_others_keep_their_numbers(domain, hub):
    hub([{"prompt": None}, {"prompt": POST}, {"prompt": "TITLE: x\n\nPOST:\n\nTL;DR:"}])
    assert [task.id for task in domain.load_tasks("train", "paper")] == ["trl-lib/tldr/train/1"]
    assert domain.refused["paper", "train"] == [
        ("trl-lib/tldr/train/0", "prompt is NoneType, not a text"),
        ("trl-lib/tldr/train/2", "no post text"),
    ]


@pytest.mark.parametrize("cause", [ConnectionError("no route"), OSError("disk"), RuntimeError("client")])
def test_env6_an_unreachable_hub_is_an_error_that_names_the_cause_and_the_ways_out(domain, hub, cause):
    hub(cause)
    with pytest.raises(ConnectionError, match=f"{HUB_REVISION}.*{cause}.*HF_HUB_OFFLINE.*'small' and 'pocket'"):
        domain.load_tasks("train", "paper")


def test_env9_a_missing_datasets_package_is_named_with_its_install_command(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        domain.load_tasks("train", "paper")


# Wrong choices ----------------------------------------------------------------------------------------


def test_an_unknown_split_or_source_is_refused_with_the_valid_names(domain):
    with pytest.raises(ValueError, match="unknown split 'test'; choose one of train, eval"):
        domain.load_tasks("test", "small")
    with pytest.raises(ValueError, match="unknown source 'medium'; choose one of pocket, small, paper"):
        domain.load_tasks("train", "medium")


@pytest.mark.parametrize(("limit", "message"), [(0, "at least 1"), (-3, "at least 1"), (10_000, "limit 10000 exceeds")])
def test_a_limit_that_cannot_be_served_is_refused(domain, limit, message):
    with pytest.raises(ValueError, match=message):
        domain.load_tasks("train", "small", limit)


def test_env4_the_domain_and_its_prompts_need_neither_torch_nor_datasets_nor_scikit_learn():
    program = (
        "import sys\nfrom mapl_core.domains import get_domain\nfrom mapl_core.domains.base import Task\n"
        "domain = get_domain('tldr')\n"
        "[domain.prompts(task) for task in domain.load_tasks('train', 'small')]\n"
        "assert not {'torch', 'datasets', 'sklearn', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Prompts ----------------------------------------------------------------------------------------


def every_prompt(domain, task):
    """All prompts of one task, by form."""
    drafts = ["first draft", "second draft"]
    return {
        "agent 0": domain.prompts(task)[0],
        "agent 1": domain.prompts(task)[1],
        "coordinator": domain.coordinator_prompt(task),
        "single": domain.single_prompt(task),
        "sequential 0": domain.sequential_prompt(0, task, []),
        "sequential 1": domain.sequential_prompt(1, task, drafts[:1]),
        "discussion 0": domain.discussion_prompts(task, drafts)[0],
        "discussion 1": domain.discussion_prompts(task, drafts)[1],
    }


@pytest.mark.parametrize("source", SOURCES)
def test_every_prompt_holds_the_post_exactly_once_braces_and_all(domain, source):
    for form, prompt in every_prompt(domain, task_of(source)).items():
        assert prompt.count(POST) == 1, form


@pytest.mark.parametrize("source", SOURCES)
def test_no_placeholder_of_a_template_is_left_open(domain, source):
    for form, prompt in every_prompt(domain, task_of(source)).items():
        assert "{" not in prompt.replace("My {cat} steals", ""), form


@pytest.mark.parametrize("source", SOURCES)
def test_each_agent_reads_its_own_role_and_not_the_others(domain, source):
    short, detailed = FORMS[source].roles
    first, second = domain.prompts(task_of(source))
    assert short in first and detailed not in first
    assert detailed in second and short not in second


@pytest.mark.parametrize("source", SOURCES)
def test_agent_1_is_not_told_about_agent_0_ratios_or_a_shared_vocabulary(domain, source):
    told = domain.prompts(task_of(source))[1].replace(POST, "").lower()
    for word in ("agent", "other", "concise", "short", "ratio", "times", "twice", "longer", "1.6", "shared", "same"):
        assert word not in told
    assert "detail" in told or "long" in told
    assert "transition words" in told or "linking words" in told


@pytest.mark.parametrize("source", SOURCES)
def test_no_prompt_spells_out_a_transition_of_the_oracle_or_another_task(domain, source):
    for form, prompt in every_prompt(domain, task_of(source)).items():
        asked = [prompt.replace(POST, "")] * 2
        assert domain.metrics(asked, task_of(source))["n"] == 0, form


def test_the_coordinator_reads_both_roles_and_the_form_of_the_answer(domain):
    for source in ("small", "paper"):
        prompt = domain.coordinator_prompt(task_of(source))
        assert all(prompt.count(f"<agent_{agent}>: {role}") == 1 for agent, role in enumerate(FORMS[source].roles))
    for source in SOURCES:
        for form in ("coordinator_prompt", "single_prompt"):
            prompt = getattr(domain, form)(task_of(source))
            assert "<agent_0>" in prompt and "<agent_1>" in prompt


@pytest.mark.parametrize("source", SOURCES)
def test_a_single_agent_is_told_the_task_without_role_texts(domain, source):
    prompt = domain.single_prompt(task_of(source))
    assert not any(role in prompt for role in FORMS[source].roles)


def test_the_form_that_a_coordinator_is_shown_is_the_form_that_is_parsed(domain):
    shown = domain.coordinator_prompt(task_of("small")).rpartition("with the tags:")[2]
    assert domain.split_joint(shown) == ["short summary", "detailed summary"]


def test_pocket_prompts_are_literally_those_the_pocket_base_was_trained_on(domain):
    start = POST + "\n\n"
    assert every_prompt(domain, task_of("pocket")) == {
        "agent 0": start + "write a short summary .",
        "agent 1": start + "write a long summary with linking words .",
        "coordinator": start + "write both summaries : <agent_0> short </agent_0>"
        " <agent_1> long with linking words </agent_1> .",
        "single": start + "write a short summary and a long summary : <agent_0> <agent_1> .",
        "sequential 0": start + "write a short summary .",
        "sequential 1": start + "write a long summary with linking words . the other agent wrote : first draft",
        "discussion 0": start + "write a short summary . the other agent wrote : second draft ."
        " your draft was : first draft . write it again .",
        "discussion 1": start + "write a long summary with linking words . the other agent wrote : first draft ."
        " your draft was : second draft . write it again .",
    }


@pytest.mark.parametrize("source", SOURCES)
def test_thoughts_of_another_agent_are_not_shown(domain, source):
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


def test_an_earlier_turn_is_refused_since_tldr_has_one_turn(domain):
    turn = Turn(("a", "b"), tldr_reward(["a", "b"], None))
    for prompts in (domain.prompts, domain.coordinator_prompt):
        with pytest.raises(ValueError, match="TLDR has one turn"):
            prompts(task_of("small"), (turn,))


# Metrics ----------------------------------------------------------------------------------------


def test_metrics_are_the_score_and_the_four_measurements_of_worked_example_i(domain):
    short = "k01 k02 k03 k04 k05 k06 k07 k08"
    detailed = short + " k09 k10 k11 k12 k13 k14 k15 k16 however"
    metrics = domain.metrics([short, detailed], task_of("small"))
    # "however" is a stop word: 8 of 16 words are shared.
    expected = {"score": 2.76 / 3, "r": 71 / 31, "u": 17 / 8, "J": 8 / 16, "n": 1}
    assert metrics == pytest.approx(expected)
    assert all(isinstance(value, float) for value in metrics.values())
    assert domain.headline in metrics


def test_reward_and_metrics_use_one_scorer(domain):
    pair = ["the cat brings one glove every night now", "firstly the cat steals. " * 4]
    assert domain.reward(pair, task_of("small")) == tldr_reward(pair, None)
    assert domain.metrics(pair, task_of("small"))["score"] == tldr_reward(pair, None).total / 3


def test_empty_answers_have_finite_metrics(domain):
    assert domain.metrics([None, ""], task_of("small")) == {"score": 0.0, "r": 0.0, "u": 0.0, "J": 0.0, "n": 0.0}


@pytest.mark.parametrize("source", SOURCES)
def test_provenance_names_the_data_and_the_stop_words(domain, source):
    named = domain.provenance(source)
    assert named["stop_words"] == "sklearn.feature_extraction.text.ENGLISH_STOP_WORDS"
    assert {"pocket": "generated", "small": "synthetic", "paper": HUB_REVISION}[source] in named["data"]
