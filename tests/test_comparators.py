"""Comparators: whose trajectories the agents are compared with, and that they are what their names say."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close
from toy_domains import ToyDomain
from toy_models import base, ids_of, make_policy, randomize_adapter, weights_of

from mapl_core.comparators import Comparator, EndpointTeam
from mapl_core.endpoint import DRAWS, Answer
from mapl_core.sampling import SamplingSettings
from mapl_core.seeding import Stream

COLLECT, COMPARE = Stream(0, "collect"), Stream(0, "comparator")


def _update(policy, seed: int) -> None:
    """Stands for an update: every adapter gets other weights."""
    for index, member in enumerate(policy.members):
        randomize_adapter(member.base, member.adapter, seed=1000 * seed + index)


def _distance(first, second) -> float:
    return float(
        sum((a - b).pow(2).sum() for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True))
    )


def _tasks(policy, count: int = 2):
    return policy.domain.load_tasks("train", "pocket", count)


@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_math10_last_is_the_policy_at_the_start_of_the_previous_iteration(tiny_qwen3, structure):
    """Iteration 0: the initial policy itself. Iteration nu: the weights before the last update, not those after it."""
    policy = make_policy(base(tiny_qwen3), structure=structure)
    comparator = Comparator("last", policy, structure=structure)
    starts, ids = [], []
    for iteration in range(4):
        comparator.begin_iteration()
        starts.append(weights_of(policy))
        ids.append(ids_of(policy.sample(_tasks(policy), 3, COMPARE)))
        previous = max(iteration - 1, 0)
        assert ids_of(comparator.sample(_tasks(policy), 3, COMPARE)) == ids[previous]
        assert _distance(weights_of(policy), starts[iteration]) == 0.0, "the present weights are back"
        if iteration:
            assert _distance(starts[previous], starts[iteration]) > 0.0 and ids[previous] != ids[iteration]
        else:
            assert (
                ids_of(Comparator("current", policy, structure=structure).sample(_tasks(policy), 3, COMPARE)) == ids[0]
            )
        _update(policy, iteration + 1)


def test_math10_last_is_not_moved_by_sampling_or_by_an_update_within_the_iteration(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("last", policy, structure="dec")
    comparator.begin_iteration()
    expected = ids_of(comparator.sample(_tasks(policy), 2, COMPARE))
    _update(policy, 1)
    assert ids_of(comparator.sample(_tasks(policy), 2, COMPARE)) == expected


def test_math10_current_draws_from_its_own_stream(tiny_qwen3):
    """The same weights: under the comparator's stream other answers, under the agents' stream the same."""
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("current", policy, structure="dec")
    agents = ids_of(policy.sample(_tasks(policy), 4, COLLECT))
    assert not any(a == b for a, b in zip(agents, ids_of(comparator.sample(_tasks(policy), 4, COMPARE)), strict=True))
    assert ids_of(comparator.sample(_tasks(policy), 4, COLLECT)) == agents
    _update(policy, 1)
    assert (
        ids_of(comparator.sample(_tasks(policy), 4, COLLECT))
        == ids_of(policy.sample(_tasks(policy), 4, COLLECT))
        != agents
    )


def test_raw_is_the_base_and_does_not_follow_the_agents(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("raw", policy, structure="dec")
    bare = ids_of(make_policy(base(tiny_qwen3), trained=False).sample(_tasks(policy), 3, COMPARE))
    assert ids_of(comparator.sample(_tasks(policy), 3, COMPARE)) == bare
    _update(policy, 1)
    assert (
        ids_of(comparator.sample(_tasks(policy), 3, COMPARE))
        == bare
        != ids_of(policy.sample(_tasks(policy), 3, COMPARE))
    )


def test_soft_is_the_current_policy_at_a_higher_temperature(tiny_qwen3):
    """Its answers are less probable under the policy than the policy's own."""
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("soft", policy, structure="dec", soft_temperature=3.0)
    sampled = comparator.sample(_tasks(policy, 5), 8, COMPARE)
    assert ids_of(sampled) == ids_of(policy.sample(_tasks(policy, 5), 8, COMPARE, temperature=3.0))
    per_token = [
        policy.logprobs(ts).sum() / policy.lengths(ts).sum()
        for ts in (
            list(itertools.chain(*sampled)),
            list(itertools.chain(*policy.sample(_tasks(policy, 5), 8, COMPARE))),
        )
    ]
    assert per_token[0] < per_token[1] - 0.3


@pytest.mark.parametrize("kind", ["raw", "last", "current", "soft"])
def test_a_comparator_of_the_agents_structure_keeps_its_sampled_ids(tiny_qwen3, kind):
    for structure in ("dec", "cen"):
        policy = make_policy(base(tiny_qwen3), structure=structure)
        comparator = Comparator(kind, policy, structure=structure)
        comparator.begin_iteration()
        assert not comparator.foreign
        trajectories = list(itertools.chain(*comparator.sample(_tasks(policy), 6, COMPARE)))
        assert any(a.truncated for t in trajectories for a in t.actions[0])
        assert all(len(t.actions[0]) == len(policy.members) for t in trajectories)


@pytest.mark.parametrize("kind", ["raw", "last", "current", "soft"])
@pytest.mark.parametrize("num_agents", [2, 3])
def test_a_centralised_comparator_of_decentralised_agents_reads_the_joint_history(tiny_qwen3, kind, num_agents):
    """Each agent writes under the coordinator's prompt; its section is scored under its own local prompt, with EOS."""
    policy = make_policy(base(tiny_qwen3), num_agents=num_agents, limits=8)
    comparator = Comparator(kind, policy, structure="cen", soft_temperature=2.0)
    comparator.begin_iteration()
    assert comparator.foreign
    tasks = _tasks(policy)
    options = {"raw": {"reference": True}, "soft": {"temperature": 2.0}}.get(kind, {})
    played = policy.sample(tasks, 4, COMPARE, joint_view=True, **options)
    for task, group, seen in zip(tasks, comparator.sample(tasks, 4, COMPARE), played, strict=True):
        for t, joint in zip(group, seen, strict=True):
            assert (t.responses, t.rewards, t.parts) == (joint.responses, joint.rewards, joint.parts)
            assert t.actions == policy.adopt(joint, task).actions
            for action, prompt in zip(t.actions[0], policy.domain.prompts(task), strict=True):
                tokenizer = policy.members[0].base.tokenizer
                assert list(action.prompt_ids) == tokenizer.encode(prompt)
                assert action.token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("horizon", [1, 2])
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_another_model_as_coordinator_is_adopted_by_the_agents(tiny_qwen3, tiny_llama, num_agents, horizon):
    """Dec-Cen with a model of another architecture and tokenizer: its text, their ids, prompts and rewards."""
    domain = {"num_agents": num_agents, "horizon": horizon}
    policy = make_policy(base(tiny_qwen3), **domain)
    other = make_policy(base(tiny_llama), structure="cen", trained=False, limits=6 * num_agents, **domain)
    comparator = Comparator("model", policy, structure="cen", model=other)
    comparator.begin_iteration()
    tasks = _tasks(policy)
    played = other.sample(tasks, 4, COMPARE)
    for task, group, seen in zip(tasks, comparator.sample(tasks, 4, COMPARE), played, strict=True):
        for t, joint in zip(group, seen, strict=True):
            assert t == policy.adopt(joint, task)
            for turn, acted in zip(joint.actions, joint.responses, strict=True):
                assert acted == tuple(other.domain.split_joint(turn[0].text))
            assert [len(turn) for turn in t.actions] == [num_agents] * horizon
    assert any(
        len(t.actions[0][min(1, num_agents - 1)].token_ids) > 1 for t in comparator.sample(tasks, 12, COMPARE)[0]
    )
    trajectories = list(itertools.chain(*comparator.sample(tasks, 2, COMPARE)))
    assert policy.logprobs(trajectories).shape == (4, num_agents, horizon)
    assert bool((policy.logprobs(trajectories) < 0).all()), (
        "an empty section is EOS alone, which still has a probability"
    )


def test_another_model_as_a_decentralised_team(tiny_qwen3, tiny_llama):
    """Its answers are encoded again for the agents, since its ids mean nothing to them."""
    policy = make_policy(base(tiny_qwen3))
    other = make_policy(base(tiny_llama), trained=False)
    comparator = Comparator("model", policy, structure="dec", model=other)
    (task,) = _tasks(policy, 1)
    (group,), (seen,) = comparator.sample([task], 4, COMPARE), other.sample([task], 4, COMPARE)
    for t, played in zip(group, seen, strict=True):
        assert t.responses == played.responses and t == policy.adopt(played, task)


def test_a_coordinator_is_compared_with_another_coordinators_whole_tagged_text(tiny_qwen3, tiny_llama):
    """Cen-Cen with kind "model": one policy acts on the joint text."""
    policy = make_policy(base(tiny_qwen3), structure="cen")
    comparator = Comparator(
        "model", policy, structure="cen", model=make_policy(base(tiny_llama), structure="cen", trained=False)
    )
    (task,) = _tasks(policy, 1)
    for t in comparator.sample([task], 4, COMPARE)[0]:
        ((action,),) = t.actions
        assert action.text == policy.domain.join(t.responses[0])
        assert tuple(policy.domain.split_joint(action.text)) == t.responses[0]


def test_the_kind_model_needs_a_model(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    with pytest.raises(ValueError, match="model="):
        Comparator("model", policy, structure="cen")


def test_save1_a_comparators_state_goes_on_as_if_it_had_not_stopped(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("last", policy, structure="dec")
    for iteration in range(3):
        comparator.begin_iteration()
        _update(policy, iteration)
    again = Comparator("last", policy, structure="dec")
    again.load_state(comparator.state())
    for one in (comparator, again):
        one.begin_iteration()
    assert ids_of(again.sample(_tasks(policy), 3, COMPARE)) == ids_of(comparator.sample(_tasks(policy), 3, COMPARE))


def test_comparator_samples_share_the_agents_prompts(tiny_qwen3, tiny_llama):
    """Whatever the comparator, winner and loser of a pair are answers to one and the same local prompt."""
    policy = make_policy([base(tiny_qwen3), base(tiny_llama)], limits=8)
    tasks = _tasks(policy)
    other = make_policy(base(tiny_llama), structure="cen", trained=False, limits=16)
    own = policy.sample(tasks, 2, COLLECT)
    for kind, structure in (("raw", "dec"), ("current", "dec"), ("current", "cen"), ("model", "cen")):
        comparator = Comparator(kind, policy, structure=structure, model=other)
        for mine, theirs in zip(own, comparator.sample(tasks, 2, COMPARE), strict=True):
            for t, u in itertools.product(mine, theirs):
                assert [a.prompt_ids for a in t.actions[0]] == [a.prompt_ids for a in u.actions[0]]


def test_a_snapshot_is_not_moved_by_training_in_place(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3))
    comparator = Comparator("last", policy, structure="dec")
    comparator.begin_iteration()
    before = [{key: value.clone() for key, value in state.items()} for state in comparator.previous]
    with torch.no_grad():
        for weight in policy.parameters(0):
            weight.add_(1.0)
    for state, kept in zip(comparator.previous, before, strict=True):
        assert_close(state, kept, rtol=0, atol=0)


# -- a model behind an endpoint ----------------------------------------------------------------------------------------


class Scripted:
    """Stands for an endpoint: notes the questions and answers each with `write(question)`."""

    def __init__(self, write):
        self.write, self.questions = write, []

    def answer(self, questions):
        self.questions += questions
        return [self.write(question) for question in questions]


def endpoint_team(structure, write, *, limits=(6, 7), domain=None, **domain_options) -> EndpointTeam:
    domain = domain or ToyDomain(**domain_options)
    limits = limits if structure == "dec" else [sum(limits)]
    settings = [SamplingSettings(0.7, 0.9, limit) for limit in limits]
    return EndpointTeam(domain, structure, Scripted(write), settings)


def said(text: str, truncated: bool = False):
    return lambda question: Answer(text, truncated)


def test_agents_behind_an_endpoint_are_asked_with_their_own_prompts_and_limits():
    class Polite(ToyDomain):
        def system_message(self, task):
            return f"you know {task.fields['word']}"

    team = endpoint_team("dec", lambda question: Answer(question.prompt.split()[6], False), domain=Polite())
    (task, other) = team.domain.load_tasks("train", "pocket", 2)
    groups = team.sample([task, other], 3, COMPARE)
    asked = team.endpoint.questions
    assert [(q.prompt, q.system) for q in asked] == [
        (f"post the red {word} sleeps .\n\nagent {number} write :", f"you know {word}")
        for word in ("cat", "dog")
        for _ in range(3)
        for number in ("one", "two")
    ]
    assert [(q.max_tokens, q.temperature, q.top_p) for q in asked] == [(6, 0.7, 0.9), (7, 0.7, 0.9)] * 6
    for group in groups:
        for t in group:
            assert t.responses == (("agent", "agent"),) and len(t.actions[0]) == 2
    assert [t.task_id for group in groups for t in group] == [task.id] * 3 + [other.id] * 3


def test_every_answer_of_an_endpoint_is_a_draw_of_its_own_that_the_stream_repeats():
    team = endpoint_team("dec", said("cat"))
    tasks = team.domain.load_tasks("train", "pocket", 2)
    for stream in (COMPARE, COMPARE, Stream(1, "comparator"), Stream(0, "comparator", iteration=1)):
        team.sample(tasks, 4, stream)
    draws = [q.draw for q in team.endpoint.questions]
    first, again, *others = [draws[start : start + 16] for start in range(0, 64, 16)]
    assert first == again and len({*first, *others[0], *others[1]}) == 48
    assert all(isinstance(draw, int) and 0 <= draw < DRAWS for draw in draws)


@pytest.mark.parametrize("structure", ["cen", "single"])
def test_one_who_writes_for_all_behind_an_endpoint_is_asked_once_for_the_joint_text(structure):
    team = endpoint_team(structure, said("red cat , dog"))
    (task,) = team.domain.load_tasks("train", "pocket", 1)
    ((t,),) = team.sample([task], 1, COMPARE)
    (asked,) = team.endpoint.questions
    told = {"cen": team.domain.coordinator_prompt(task), "single": team.domain.single_prompt(task)}
    assert asked.prompt == told[structure] and asked.max_tokens == 13
    assert t.responses == (("red cat", "dog"),) and t.actions[0][0].text == "red cat , dog"
    assert t.rewards == (team.domain.reward(["red cat", "dog"], task).total,)


def test_the_second_turn_at_an_endpoint_is_told_of_the_first():
    team = endpoint_team("dec", said("cat"), horizon=2)
    (task,) = team.domain.load_tasks("train", "pocket", 1)
    ((t,),) = team.sample([task], 1, COMPARE)
    assert len(t.actions) == len(t.rewards) == 2
    later = team.endpoint.questions[2:]
    assert [q.prompt for q in later] == [
        f"post the red cat sleeps .\n\nagent {number} write : cat ! two ." for number in ("one", "two")
    ]


def test_an_answer_that_the_endpoint_cut_is_marked_as_truncated():
    team = endpoint_team("dec", lambda q: Answer("cat", "one" in q.prompt))
    ((t,),) = team.sample(team.domain.load_tasks("train", "pocket", 1), 1, COMPARE)
    assert [action.truncated for action in t.actions[0]] == [True, False]


@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_texts_of_an_endpoint_are_adopted_like_those_of_another_model(tiny_qwen3, structure, num_agents):
    """Under the agents' own prompts, in their ids, closed with their end of sequence, and with a probability."""
    policy = make_policy(base(tiny_qwen3), num_agents=num_agents)
    texts = {"dec": "red cat", "cen": " , ".join(["red cat"] * num_agents)}
    team = endpoint_team(structure, said(texts[structure]), limits=[6] * num_agents, num_agents=num_agents)
    comparator = Comparator("api", policy, structure=structure, model=team)
    assert comparator.foreign
    (task,) = _tasks(policy, 1)
    tokenizer = policy.members[0].base.tokenizer
    ids = [tokenizer.get_vocab()[word] for word in ("red", "cat", "<|im_end|>")]
    (group,) = comparator.sample([task], 2, COMPARE)
    for t in group:
        assert t.responses == (("red cat",) * num_agents,)
        for action, prompt in zip(t.actions[0], policy.domain.prompts(task), strict=True):
            assert list(action.prompt_ids) == tokenizer.encode(prompt) and list(action.token_ids) == ids
    assert bool((policy.logprobs(group) < 0).all())


def test_a_coordinator_is_compared_with_the_whole_text_of_an_endpoint(tiny_qwen3):
    policy = make_policy(base(tiny_qwen3), structure="cen")
    comparator = Comparator("api", policy, structure="cen", model=endpoint_team("cen", said("red cat , dog")))
    ((t,),) = comparator.sample(_tasks(policy, 1), 1, COMPARE)
    assert [action.text for action in t.actions[0]] == ["red cat , dog"]


def test_the_kind_api_needs_a_team(tiny_qwen3):
    with pytest.raises(ValueError, match="comparator 'api' needs the team"):
        Comparator("api", make_policy(base(tiny_qwen3)), structure="dec")


# -- a model of another family -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dec", "cen"])
def test_a_model_of_another_family_reads_its_own_chat_template_and_ends_with_its_own_end(
    tiny_qwen3, tiny_llama, structure
):
    """Its template writes <s>, which the agents' has not; its end is </s>, theirs <|im_end|>. Words are looked up."""
    policy = make_policy(base(tiny_qwen3), prompt_form="chat", limits=16)
    other = make_policy(base(tiny_llama), structure=structure, trained=False, prompt_form="chat", limits=16)
    (task,) = _tasks(policy, 1)
    (group,) = other.sample([task], 24, COMPARE)
    told = policy.domain.prompts(task) if structure == "dec" else [policy.domain.coordinator_prompt(task)]
    vocabulary = other.members[0].base.tokenizer.get_vocab()
    turn = "<|im_start|> user {} <|im_end|> <|im_start|> assistant"
    for t in group:
        for action, prompt in zip(t.actions[0], told, strict=True):
            words = ["<s>", *turn.format(prompt).split()]
            assert list(action.prompt_ids) == [vocabulary.get(word, vocabulary["<unk>"]) for word in words]
            assert action.truncated or action.token_ids[-1] == vocabulary["</s>"]
    ended = [action for t in group for action in t.actions[0] if not action.truncated]
    assert ended, "some answers end by themselves"
    (adopted,) = Comparator("model", policy, structure=structure, model=other).sample([task], 24, COMPARE)
    for t in adopted:
        for action, prompt in zip(t.actions[0], policy.domain.prompts(task), strict=True):
            words = turn.format(prompt).split()
            assert list(action.prompt_ids) == [vocabulary.get(word, vocabulary["<unk>"]) for word in words]
            assert action.token_ids[-1] == vocabulary["<|im_end|>"] and vocabulary["</s>"] not in action.token_ids
