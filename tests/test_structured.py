"""Constrained decoding: whatever the model wants, the answer is the skeleton with values of its own choosing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.testing import assert_close
from toy_models import adapted_model, plain_logprob
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from travel_trips import pair
from travel_trips import task as trip_task

from mapl_core.adapters import AdaptedModel
from mapl_core.buffers import Response, Trajectory
from mapl_core.decoders import DirectDecoder, TransformersDecoder
from mapl_core.domains import get_domain
from mapl_core.domains.base import Skeleton
from mapl_core.models import LoadedModel
from mapl_core.policies import JointPolicy
from mapl_core.rewards.travel_actions import read_action
from mapl_core.sampling import SamplingSettings, TransformersSampler, sample_responses
from mapl_core.scoring import Item, accumulate_logprob_gradients, response_logprobs
from mapl_core.seeding import Stream
from mapl_core.structured import SkeletonState, SkeletonTokens, ValueTokens, encode_answer, replay, value_tokens
from mapl_core.tokens import decode_response, encode_response

TWO = Skeleton(('{"a": "', ', "b": "', "}"), value_tokens=3)
DECODERS = (DirectDecoder, TransformersDecoder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and so are a few longer pieces that real vocabularies hold."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ","), ('"', "}"), ("\u0120", "t"), ("a", "n")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture
def loaded() -> LoadedModel:
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 7,  # more logits than tokens, as published models have
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    return LoadedModel(model, tokenizer, "tiny-bytes", torch.device("cpu"), torch.float32, "random, made by a test")


def drawn(adapted, skeletons, *, samples=6, settings=None, **options):
    settings = settings or SamplingSettings(max_new_tokens=40)
    prompts = [tuple(range(30, 35 + index)) for index in range(len(skeletons))]
    uniforms = Stream(0, "structured").uniforms([str(row) for row in range(len(prompts) * samples)], 40)
    return prompts, sample_responses(
        adapted, "agent0", prompts, uniforms[:, : settings.max_new_tokens], samples=samples, settings=settings,
        max_cached_tokens=options.pop("cached", 10_000), skeletons=skeletons, **options,
    )  # fmt: skip


# --- the fixed text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("settings", [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 3)])
def test_every_answer_is_the_skeleton_with_valid_json_strings(loaded, decoder, settings):
    temperature, top_p, top_k = settings
    sampling = SamplingSettings(temperature, top_p, 40, top_k)
    adapted = adapted_model(loaded, "agent0")
    _, groups = drawn(adapted, [TWO, TWO], settings=sampling, decoder=decoder)
    texts = [decode_response(loaded.tokenizer, sample.token_ids) for group in groups for sample in group]
    for sample, written in zip((s for group in groups for s in group), texts, strict=True):
        values = json.loads(written)
        assert list(values) == ["a", "b"] and all(value.strip() for value in values.values())
        assert not sample.truncated and sample.token_ids[-1] == loaded.tokenizer.eos_token_id
    assert len(set(texts)) > 4 or temperature == 0, "the values are still sampled"


def test_without_a_skeleton_nothing_changes_and_both_kinds_share_a_batch(loaded):
    adapted = adapted_model(loaded, "agent0")
    _, free = drawn(adapted, [None, None])
    _, mixed = drawn(adapted, [None, TWO])
    assert mixed[0] == free[0] and all(not sample.forced for sample in mixed[0])
    assert all(json.loads(decode_response(loaded.tokenizer, sample.token_ids)) for sample in mixed[1])


def test_samples_do_not_depend_on_batch_mates_or_decoder(loaded):
    adapted = adapted_model(loaded, "agent0")
    _, together = drawn(adapted, [TWO, TWO])
    _, apart = drawn(adapted, [TWO, TWO], cached=60)
    _, other = drawn(adapted, [TWO, TWO], decoder=TransformersDecoder)
    assert together == apart == other


def test_the_values_follow_the_models_own_distribution_among_what_is_allowed(loaded):
    """One value of one token: its frequencies are the softmax over the tokens that may stand there."""
    one = Skeleton(("<", ">"), value_tokens=1)
    adapted = adapted_model(loaded, "agent0")
    count = 4000
    grid = torch.full((count, 8), 0.5, dtype=torch.float64)
    grid[:, 1] = (torch.arange(count) + 0.5) / count  # the first token is forced, the second is the value
    (group,) = sample_responses(
        adapted, "agent0", [(30, 31)], grid, samples=count, settings=SamplingSettings(max_new_tokens=8),
        max_cached_tokens=100_000, skeletons=[one],
    )  # fmt: skip
    first = loaded.tokenizer.encode("<")[0]
    with adapted.using("agent0"), torch.no_grad():
        logits = adapted.model(input_ids=torch.tensor([[30, 31, first]])).logits[0, -1].double()
    allowed = value_tokens(loaded.tokenizer).first
    expected = torch.where(allowed, logits[: len(allowed)], -torch.inf).softmax(-1)
    found = torch.bincount(torch.tensor([sample.token_ids[1] for sample in group]), minlength=len(allowed)) / count
    assert float((found - expected).abs().max()) < 1.5 / count
    assert all(sample.forced == (0, 2, 3, 4) for sample in group), "all but the value: <, its quote, >, the end"


def test_values_hold_no_quote_backslash_control_character_or_special_token_and_begin_with_something(loaded):
    tokenizer = loaded.tokenizer
    tokens = value_tokens(tokenizer)
    for token in range(len(tokenizer)):
        written = tokenizer.decode([token])
        fits = token not in (tokenizer.eos_token_id, tokenizer.pad_token_id) and not set(written) & {'"', "\\", "\n"}
        if tokens.inside[token] and token != tokens.quote:
            assert fits and not any(ord(sign) < 32 for sign in written)
        assert bool(tokens.first[token]) <= (fits and bool(written.strip()))
    assert tokens.inside[tokens.quote] and not tokens.first[tokens.quote]
    assert not tokens.first[tokenizer.encode(" ")[0]] and tokens.inside[tokenizer.encode(" ")[0]]


def test_a_value_ends_at_its_limit_and_that_quote_is_forced(loaded):
    tokens = SkeletonTokens.of(TWO, loaded.tokenizer)
    state = SkeletonState(tokens)
    for token in tokens.pieces[0]:
        assert state.forced == token
        state.advance(token)
    for letter in "xyz":
        assert state.forced is None
        state.advance(loaded.tokenizer.encode(letter)[0])
    assert state.forced == tokens.values.quote and not state.allows(loaded.tokenizer.encode("w")[0])


def test_the_limit_of_tokens_must_hold_the_longest_answer(loaded):
    adapted = adapted_model(loaded, "agent0")
    longest = SkeletonTokens.of(TWO, loaded.tokenizer).longest
    with pytest.raises(ValueError, match=f"max_new_tokens is {longest - 1}, .* takes up to {longest} tokens; raise it"):
        drawn(adapted, [TWO], settings=SamplingSettings(max_new_tokens=longest - 1))
    drawn(adapted, [TWO], settings=SamplingSettings(max_new_tokens=longest))


def test_a_tokenizer_without_a_quote_of_its_own_is_refused():
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0, "b": 1}, [])), eos_token="<eos>")
    with pytest.raises(ValueError, match="switch the domain's option `structured` off"):
        value_tokens(letters)


# --- what is scored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
def test_log_probabilities_leave_out_exactly_the_forced_tokens(loaded, monkeypatch, share):
    adapted = adapted_model(loaded, "agent0")
    monkeypatch.setattr(AdaptedModel, "shares_prompts", share)
    prompt, response = (30, 31, 32), (40, 41, 42, 43, 44)
    for forced in ((), (0,), (1, 3), (4,), (0, 1, 2, 3, 4)):
        with adapted.using("agent0"), torch.no_grad():
            upto = [
                float(plain_logprob(adapted.model, (*prompt, *response[:place]), (response[place],)))
                for place in range(5)
            ]
        expected = sum((value for place, value in enumerate(upto) if place not in forced), 0.0)
        found = response_logprobs(adapted, "agent0", [Item(prompt, response, forced)], max_tokens=100)
        assert_close(float(found), expected, rtol=1e-4, atol=1e-4)


def test_the_same_ids_with_and_without_forced_positions_are_two_items(loaded):
    adapted = adapted_model(loaded, "agent0")
    items = [Item((30, 31), (40, 41)), Item((30, 31), (40, 41), (0,)), Item((30, 31), (40, 41), (0, 1))]
    values = response_logprobs(adapted, "agent0", items, max_tokens=100)
    assert values[0] < values[1] < 0 and values[2] == 0


def test_the_gradient_leaves_out_forced_tokens_too(loaded):
    adapted = adapted_model(loaded, "agent0")
    item = Item((30, 31, 32), (40, 41, 42), (0, 2))
    accumulate_logprob_gradients(adapted, "agent0", [item], torch.ones(1), max_tokens=100)
    found = [weight.grad.clone() for weight in adapted.parameters("agent0")]
    for weight in adapted.parameters("agent0"):
        weight.grad = None
    accumulate_logprob_gradients(adapted, "agent0", [Item((30, 31, 32, 40), (41,))], torch.ones(1), max_tokens=100)
    assert_close(found, [weight.grad for weight in adapted.parameters("agent0")], rtol=1e-4, atol=1e-6)


def test_one_choice_sums_to_one_over_the_values_only_without_a_mask(loaded):
    """Values are scored under the unmasked softmax: over all tokens in the value's place the probabilities sum to 1."""
    adapted = adapted_model(loaded, "agent0")
    size = adapted.output_layer.weight.shape[0]
    items = [Item((30, 31), (40, token, 41), (0, 2)) for token in range(size)]
    total = float(response_logprobs(adapted, "agent0", items, max_tokens=4096).double().exp().sum())
    assert total == pytest.approx(1.0, abs=1e-5)


# --- texts from elsewhere --------------------------------------------------------------------------------------------


def test_a_finished_answer_is_encoded_as_it_would_have_been_sampled(loaded):
    tokenizer = loaded.tokenizer
    ids, forced = encode_answer('{"a": "an", "b": " tx"}', TWO, tokenizer)
    assert decode_response(tokenizer, ids) == '{"a": "an", "b": " tx"}'
    assert [tokenizer.decode([ids[place]]) for place in range(len(ids)) if place not in forced] == [
        "an", '"', " t", "x", '"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    ["", '{"a": "x"}', '{"a": "x", "b": "y"} ', ' {"a": "x", "b": "y"}', '{"a": "", "b": "y"}', '{"a": "x", "b": " "}',
     '{"a": "x", "b": "wxyz"}', '{"a": "x", "b": "y\\n"}', '{"a": "x", "b": "y"', "plain words"],
)  # fmt: skip
def test_a_text_that_could_not_have_been_sampled_has_no_forced_tokens(loaded, answer):
    assert encode_answer(answer, TWO, loaded.tokenizer) is None


@pytest.mark.parametrize("values", list(itertools.product(["-", "Ash Cafe, Brim", "a;b"], repeat=2)))
def test_a_skeleton_reads_back_the_values_it_was_filled_with(values):
    filled = f'{{"a": "{values[0]}", "b": "{values[1]}"}}'
    assert TWO.values(filled) == list(values)


# --- answers of another sampler ---------------------------------------------------------------------------------------

# Of six tokens, 0 ends the answer and 5 is the quote; a value begins with 2 or 4 and goes on with 1, 2 or 4.
BY_HAND = SkeletonTokens(
    pieces=((3,), (3, 1), ()),
    end=0,
    most=3,
    values=ValueTokens(
        first=torch.tensor([False, False, True, False, True, False]),
        inside=torch.tensor([False, True, True, False, True, True]),
        quote=5,
    ),
)


def test_replaying_an_answer_finds_its_forced_positions_and_what_the_others_were_chosen_among():
    ids = [3, 2, 5, 3, 1, 4, 1, 2, 5, 0]  # two values: of one token, and of three, whose quote is then forced
    forced, choices = replay(ids, BY_HAND)
    assert forced == [0, 3, 4, 8, 9]
    first, inside = [2, 4], [1, 2, 4, 5]
    assert [mask.nonzero().flatten().tolist() for mask in choices] == [first, inside, first, inside, inside]


@pytest.mark.parametrize("ids", [[2], [3, 5], [3, 1], [3, 3], [3, 2, 5, 1], [3, 2, 1, 2, 4], [3, 2, 0]])
def test_an_answer_that_the_skeleton_rules_out_cannot_be_replayed(ids):
    assert replay(ids, BY_HAND) is None


def test_replay_marks_what_the_sampler_marked(loaded):
    adapted = adapted_model(loaded, "agent0")
    tokens = SkeletonTokens.of(TWO, loaded.tokenizer)
    _, groups = drawn(adapted, [TWO, TWO])
    for sample in (sample for group in groups for sample in group):
        assert tuple(replay(sample.token_ids, tokens)[0]) == sample.forced


def test_the_grammar_of_a_skeleton_by_hand():
    """Ids in place of texts; a token belongs to one rule alone, so the quote is no part of `inside`."""
    assert BY_HAND.grammar == (
        "start: piece0 value piece1 value\n"
        "value: first inside{0,2} <[5]>\n"
        "first: <[2,4]>\n"
        "inside: <[1-2,4]>\n"
        "piece0: <[3]>\n"
        "piece1: <[3]> <[1]>\n"
    )
    assert "value: first <[5]>\n" in replace(BY_HAND, most=1).grammar


# --- Travel ----------------------------------------------------------------------------------------------------------


def travel_policy(loaded, *, structure="dec", **options):
    domain = get_domain("travel", structured=True, **options)
    adapted = adapted_model(loaded)
    count = domain.num_agents if structure == "dec" else 1
    settings = SamplingSettings(max_new_tokens=3000)
    stream = Stream(0, "init")
    return JointPolicy(
        domain,
        structure,
        [adapted] * count,
        [settings] * count,
        prompt_form="text",
        stream=stream,
        micro_batch_tokens=20_000,
        sampler=TransformersSampler(cached_tokens=200_000),
    )


@pytest.mark.parametrize("structure, num_agents", [("dec", 2), ("dec", 3), ("cen", 2)])
def test_a_random_model_writes_strict_actions_when_the_skeleton_is_forced(loaded, structure, num_agents):
    policy = travel_policy(loaded, structure=structure, num_agents=num_agents)
    task = trip_task()
    ((played,),) = policy.sample([task], 1, Stream(0, "sample"))
    for agent, answer in enumerate(played.responses[0]):
        action = read_action(answer, agent, 3, num_agents)
        assert action.strict, answer
    for action in played.actions[0]:
        assert 0 < len(action.forced) < len(action.token_ids) and action.token_ids[-1] == loaded.tokenizer.eos_token_id
    assert torch.equal(
        policy.lengths([played])[0, :, 0],
        torch.tensor([len(action.token_ids) - len(action.forced) for action in played.actions[0]]),
    )


def test_a_comparators_text_gets_its_forced_tokens_when_it_is_adopted(loaded, monkeypatch):
    monkeypatch.setattr("mapl_core.domains.travel.VALUE_TOKENS", 64)  # here a token is a byte
    policy = travel_policy(loaded)
    task = trip_task()
    texts = tuple(pair())
    reward = policy.domain.reward(texts, task)
    given = Trajectory(task.id, ((),), (texts,), (reward.total,), (dict(reward.parts),))
    adopted = policy.adopt(given, task).actions[0]
    for response, written in zip(adopted, texts, strict=True):
        assert decode_response(loaded.tokenizer, response.token_ids) == written and response.forced
    free = JointPolicy(
        get_domain("travel"), "dec", [policy.members[0].base] * 2, [policy.members[0].settings] * 2, prompt_form="text"
    )
    for response, written in zip(free.adopt(given, task).actions[0], texts, strict=True):
        assert not response.forced and list(response.token_ids) == encode_response(loaded.tokenizer, written)


def test_a_response_keeps_its_forced_positions_on_the_way_to_a_file_and_back():
    response = Response((1, 2), (3, 4, 5), "x", False, (0, 2))
    assert Response.from_dict(json.loads(json.dumps(response.to_dict()))) == response
