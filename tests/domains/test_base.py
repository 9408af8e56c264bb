"""Cutting a coordinator's text into the agents' parts (paper, section 3.2), and what every domain inherits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import within

from mapl_core.domains import get_domain
from mapl_core.domains.base import Domain, Task


class ToyDomain(Domain):
    name, max_reward, headline = "toy", 1.0, "score"

    def __init__(self, num_agents=2):
        self.num_agents = num_agents

    def task_text(self, task):
        return "shared"

    def role_text(self, agent, task, history=()):
        return f"role {agent} after {len(history)} turns"


TEAM = ToyDomain()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<agent_0> one </agent_0> <agent_1> two </agent_1>", ["one", "two"]),
        ("<agent_0>\none\nmore\n</agent_0>\n<agent_1>\ntwo\n</agent_1>\n", ["one\nmore", "two"]),
        ("<agent_1> two </agent_1><agent_0> one </agent_0>", ["one", "two"]),
    ],
    ids=["on one line", "on lines", "in any order"],
)
def test_each_agent_gets_the_text_between_its_own_tags(text, parts):
    assert TEAM.split_joint(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "<AGENT_0>one</Agent_0><Agent_1>two</aGENT_1>",
        "< agent_0 >one< / agent_0 >\n<\tagent_1\t>two</agent_1 >",
    ],
    ids=["case", "blanks"],
)
def test_tag_case_and_blanks_inside_a_tag_do_not_matter(text):
    assert TEAM.split_joint(text) == ["one", "two"]


@pytest.mark.parametrize("language", ["", "xml", " text"])
def test_one_code_fence_around_the_whole_reply_is_removed(language):
    assert TEAM.split_joint(f"\n```{language}\n<agent_0>one</agent_0>\n<agent_1>two\n```  \n") == ["one", "two"]


def test_a_fence_inside_a_section_belongs_to_the_section():
    code = "```python\nprint(1)\n```"
    assert TEAM.split_joint(f"<agent_0>\n{code}\n</agent_0>\n<agent_1>{code}") == [code, code]
    assert TEAM.split_joint(f"```\n<agent_0>\n{code}\n</agent_0>\n<agent_1>\n{code}\n```") == [code, code]


def test_text_outside_the_sections_is_dropped():
    assert TEAM.split_joint("Sure! <agent_0>one</agent_0> and then <agent_1>two</agent_1> Done.") == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<agent_0>one <agent_1>two</agent_1>", ["one", "two"]),
        ("<agent_0>one</agent_0> <agent_1>two, cut by the token lim", ["one", "two, cut by the token lim"]),
        ("<agent_0>one <agent_1>two", ["one", "two"]),
        ("<agent_0>one </agent_1> still one <agent_1>two</agent_1>", ["one </agent_1> still one", "two"]),
    ],
    ids=["next opening tag", "end of the text", "both", "a foreign closing tag does not close"],
)
def test_an_unclosed_section_ends_at_the_next_opening_tag_of_another_agent_or_at_the_end(text, parts):
    assert TEAM.split_joint(text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<agent_0>one</agent_0><agent_0>again</agent_0><agent_1>two</agent_1>", ["one", "two"]),
        ("<agent_0>one <agent_1>two</agent_1> <agent_0>again</agent_0>", ["one", "two"]),
        ("<agent_0></agent_0><agent_0>again</agent_0><agent_1>two</agent_1>", ["", "two"]),
    ],
    ids=["closed", "unclosed", "empty"],
)
def test_the_first_section_of_an_agent_wins(text, parts):
    assert TEAM.split_joint(text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [("<agent_0>one</agent_0>", ["one", ""]), ("<agent_1>two</agent_1> rest", ["", "two"]), ("<agent_1>", ["", ""])],
)
def test_an_agent_without_a_section_answers_with_the_empty_text(text, parts):
    assert TEAM.split_joint(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "two summaries without any tag",
        "</agent_0> one </agent_1>",
        "<agent0>one</agent0>",
        "<agent_0 one",
        "```\none\n```",
    ],
)
def test_a_reply_without_any_section_is_unparseable_and_all_parts_are_empty(text):
    assert TEAM.split_joint(text) == ["", ""]


def test_a_section_of_an_agent_that_the_team_does_not_have_is_dropped():
    assert TEAM.split_joint("<agent_0>one <agent_7>seven</agent_7><agent_1>two") == ["one", "two"]


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_a_part_per_agent_comes_back_from_the_joint_text(num_agents):
    parts = [f"text {agent}\nof agent {agent}" for agent in range(num_agents)]
    domain = ToyDomain(num_agents)
    assert domain.split_joint(domain.join(parts)) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "<think>first <agent_0>a draft</agent_0> ...</think>\n<agent_0>one</agent_0><agent_1>two</agent_1>",
            ["one", "two"],
        ),
        ("<think><agent_0>only a thought</agent_0>", ["", ""]),
        ("\ufeff```\r\n<agent_0>one</agent_0>\r\n<agent_1>two\r\n```", ["one", "two"]),
    ],
    ids=["sections of a draft in the thought", "a thought that never ends", "byte-order mark and CRLF"],
)
def test_the_reply_is_cleaned_before_its_sections_are_read(text, parts):
    assert TEAM.split_joint(text) == parts


def test_a_reply_that_never_came_is_unparseable():
    assert TEAM.split_joint(None) == ["", ""]


@pytest.mark.parametrize(
    "text",
    [f"<agent_{'9' * 5000}>one", "<" + " " * 20_000, "```\n" + " " * 60_000, "<agent_0>" * 20_000],
    ids=["a huge number", "an endless tag", "an endless fence", "very many tags"],
)
def test_a_hostile_reply_is_split_at_once_and_without_an_exception(text):
    assert within(1.0, lambda: TEAM.split_joint(text))[1] == ""


PIECES = st.sampled_from(
    ["<agent_0>", "</agent_0>", "<agent_1>", "</agent_1>", "<agent_2>", "```", "\n", "one ", "<think>"]
)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.lists(PIECES | st.text(max_size=3), max_size=30).map("".join))
def test_any_reply_gives_one_text_per_agent_taken_from_the_reply(text):
    parts = TEAM.split_joint(text)
    assert len(parts) == 2
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert all(part in plain for part in parts)


def test_every_prompt_is_the_shared_material_and_the_role_of_one_agent():
    task = Task("t", "small", "train")
    assert ToyDomain(3).prompts(task) == [f"shared\n\nrole {agent} after 0 turns" for agent in range(3)]
    assert TEAM.prompts(task, history=("an earlier turn",))[1] == "shared\n\nrole 1 after 1 turns"


def test_an_unknown_domain_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match="unknown domain 'tl;dr'.*tldr"):
        get_domain("tl;dr")


def test_a_domain_is_found_by_its_name():
    assert get_domain("tldr").name == "tldr"


def test_an_option_that_a_domain_does_not_have_is_refused_by_name():
    with pytest.raises(TypeError, match="colour"):
        get_domain("tldr", colour="blue")
