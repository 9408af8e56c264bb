"""Log-probabilities of responses and scalars of texts: exact, whatever they are computed beside."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from toy_models import adapted_model, gradients, plain_logprob, randomize_adapter, randomize_head, relative_difference

from mapl_core import scoring
from mapl_core.adapters import AdaptedModel
from mapl_core.scoring import (
    Item,
    PackedRow,
    ScalarModel,
    accumulate_logprob_gradients,
    build_batch,
    pack_rows,
    response_logprobs,
    token_logprobs,
)
from mapl_core.seeding import Stream

LONG, SHORT = (7, 8, 9, 10, 11, 12, 13), (14, 15)
# Two prompts of unequal length, responses of 1 to 6 tokens, some closed with EOS (qwen3: 5, llama and gpt2: 2).
ITEMS = [
    (LONG, (20, 21, 22, 5)),
    (SHORT, (23, 2)),
    (LONG, (30,)),
    (LONG, (31, 32, 33, 34, 35, 2)),
    (SHORT, (2,)),
    (SHORT, (5, 5)),
    ((16,), (24, 25, 26)),
    ((7, 2, 5, 8), (27, 28, 2)),  # a chat prompt holds EOS inside; where pad is EOS it must not be taken for padding
]
FAMILIES = ("tiny_qwen3", "tiny_llama", "tiny_gpt2")


@pytest.fixture(params=FAMILIES)
def policy(request):
    """(adapted base, adapter) of each architecture; GPT-2 has no adapter, since its projections are named otherwise."""
    loaded = request.getfixturevalue(request.param)()
    return (AdaptedModel(loaded), None) if request.param == "tiny_gpt2" else (adapted_model(loaded, "agent0"), "agent0")


def _alone(adapted, adapter, items=ITEMS, **options):
    with torch.no_grad(), adapted.using(adapter):
        return torch.stack([plain_logprob(adapted.model, *item, **options) for item in items]).float()


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left, right", [(0, 0), (5, 0), (0, 5), (3, 2)])
def test_tok6_logprobs_equal_a_plain_pass_over_each_sequence_padded_left_right_or_not_at_all(policy, left, right):
    adapted, adapter = policy
    found = response_logprobs(adapted, adapter, ITEMS, max_tokens=512)
    assert_close(found, _alone(adapted, adapter, left=left, right=right, pad_id=2), rtol=1e-5, atol=1e-5)


def test_tok6_batch_mates_and_micro_batches_do_not_matter(policy):
    """Alone, in small micro-batches, in one, in another order, with more responses behind the same prompt."""
    adapted, adapter = policy
    together = response_logprobs(adapted, adapter, ITEMS, max_tokens=4096)
    for max_tokens in (1, 9, 14, 30):
        assert_close(response_logprobs(adapted, adapter, ITEMS, max_tokens=max_tokens), together, rtol=1e-5, atol=1e-5)
    order = torch.tensor([3, 7, 0, 6, 5, 1, 4, 2])
    reordered = response_logprobs(adapted, adapter, [ITEMS[i] for i in order], max_tokens=4096)
    assert_close(reordered, together[order], rtol=1e-5, atol=1e-5)
    mates = [(LONG, (40, 41, token, 2)) for token in range(12)] + [((9,) * 30, (10,) * 20)]
    assert_close(
        response_logprobs(adapted, adapter, [*mates, *ITEMS], max_tokens=4096)[len(mates) :],
        together,
        rtol=1e-5,
        atol=1e-5,
    )


def test_tok5_the_pad_id_does_not_matter(policy):
    """Masks go by length: the tiny Llama and GPT-2 pad with their EOS, and any other pad gives the same bits."""
    adapted, adapter = policy
    found = response_logprobs(adapted, adapter, ITEMS, max_tokens=512)
    for pad_token in ("</s>", "<unk>", "cat"):
        adapted.tokenizer.pad_token = pad_token
        assert torch.equal(response_logprobs(adapted, adapter, ITEMS, max_tokens=512), found)


def test_tok5_eos_is_scored_once_and_pads_behind_it_never(tiny_llama):
    """Pad is EOS here. log pi(answer EOS) = log pi(answer) + log pi(EOS | answer), beside a longer mate."""
    adapted = adapted_model(tiny_llama(), "agent0")
    assert adapted.tokenizer.pad_token_id == adapted.tokenizer.eos_token_id == 2
    items = [(SHORT, (20, 21)), (SHORT, (20, 21, 2)), ((14, 15, 20, 21), (2,)), ((9,) * 12, (10,) * 12)]
    answer, closed, eos, _ = response_logprobs(adapted, "agent0", items, max_tokens=4096)
    assert_close(closed, answer + eos)
    assert abs(float(eos)) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2])
def test_tok8_probabilities_of_all_one_and_two_token_responses_sum_to_one(request, family, length):
    """Every token is scored, the first and the last too, here under a vocabulary of 6."""
    adapted = AdaptedModel(request.getfixturevalue(family)(vocab_size=6, pad_token_id=3))
    responses = list(itertools.product(range(6), repeat=length))
    for prompt in ((1, 4, 0), (5,)):
        for mates in ([], [((2,) * 9, (1,) * 5)]):
            logprobs = response_logprobs(adapted, None, [*((prompt, r) for r in responses), *mates], max_tokens=512)
            assert_close(float(logprobs[: len(responses)].exp().sum()), 1.0, rtol=0, atol=1e-5)
            assert float(logprobs.max()) < 0, "no response is certain, a one-token response neither"


def test_tok10_a_constant_model_gives_minus_length_times_log_vocabulary(tiny_llama):
    loaded = tiny_llama()
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()
    found = response_logprobs(AdaptedModel(loaded), None, ITEMS, max_tokens=512)
    lengths = torch.tensor([float(len(response)) for _, response in ITEMS])
    assert_close(found, -lengths * math.log(43))
    assert_close(found / lengths, torch.full((len(ITEMS),), -math.log(43)))


def test_tok12_the_log_softmax_is_float32_whatever_the_weights_are(tiny_qwen3):
    adapted = AdaptedModel(tiny_qwen3(dtype=torch.bfloat16))
    seen = []
    adapted.output_layer.register_forward_hook(lambda *call: seen.append(call[-1]))
    found = response_logprobs(adapted, None, [(LONG, (20, 21, 22, 5))], max_tokens=512)
    assert seen[0].dtype == torch.bfloat16 and found.dtype == torch.float32
    exact = torch.log_softmax(seen[0].double(), dim=-1)[range(4), [20, 21, 22, 5]].sum()
    assert_close(float(found), float(exact), rtol=1e-6, atol=0)
    rounded = torch.log_softmax(seen[0], dim=-1)[range(4), [20, 21, 22, 5]].sum()
    assert abs(float(rounded) - float(exact)) > 1e-4, "in bfloat16 the difference would show"


def test_tok12_the_gradient_reaches_bfloat16_bases_with_float32_adapters(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(dtype=torch.bfloat16), "agent0")
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, torch.ones(len(ITEMS)), max_tokens=512)
    found = gradients(adapted, "agent0")
    assert all(gradient.dtype == torch.float32 and bool(gradient.any()) for gradient in found)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_temperature_divides_the_logits(policy, temperature):
    adapted, adapter = policy
    found = response_logprobs(adapted, adapter, ITEMS, max_tokens=512, temperature=temperature)
    assert_close(found, _alone(adapted, adapter, temperature=temperature), rtol=1e-5, atol=1e-5)
    assert float((found - _alone(adapted, adapter)).abs().max()) > 0.1


@pytest.mark.parametrize("held", [1, 2**26])
def test_token_logprobs_are_those_of_each_token_behind_what_stands_before_it(policy, monkeypatch, held):
    """In the order of the items, however they are packed and however many logits may be held at a time."""
    adapted, adapter = policy
    monkeypatch.setattr(scoring, "LOGITS_HELD", held)
    items = [*ITEMS, Item(LONG, (20, 21, 22, 5), (0, 2)), Item(SHORT, ()), Item(SHORT, (23, 2), (0, 1)), ITEMS[0]]
    for max_tokens in (4, 1000):
        found = token_logprobs(adapted, adapter, items, max_tokens=max_tokens)
        for values, item in zip(found, [Item(*item) for item in items], strict=True):
            chosen = [place for place in range(len(item.response)) if place not in item.forced]
            each = [((*item.prompt, *item.response[:place]), (item.response[place],)) for place in chosen]
            expected = _alone(adapted, adapter, each) if each else torch.empty(0)
            assert_close(values, expected, rtol=1e-4, atol=1e-4)


def test_token_logprobs_among_some_tokens_are_renormalised_over_them(tiny_qwen3):
    """The second response's tokens were chosen among few: log p(token) - log of the sum of p over those."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    masks = [torch.zeros(32, dtype=torch.bool) for _ in range(2)]  # narrower than the logits
    masks[0][[20, 21, 24]], masks[1][[22]] = True, True
    items = [Item(SHORT, (20, 22)), Item(LONG, (20, 31, 22), (1,))]
    free, chosen = token_logprobs(adapted, "agent0", items, max_tokens=1000, choices=[None, masks])
    assert_close(free, token_logprobs(adapted, "agent0", items[:1], max_tokens=1000)[0])
    alternatives = _alone(adapted, "agent0", [(LONG, (token,)) for token in (20, 21, 24)])
    assert_close(chosen[0], alternatives[0] - alternatives.logsumexp(0), rtol=1e-4, atol=1e-4)
    assert float(chosen[1]) == 0.0, "the only one that was left"


def test_tok3_exactly_the_response_ids_are_scored(tiny_qwen3):
    """Each token's log-probability on its own: (prompt | a b c) = (prompt | a) + (prompt a | b) + (prompt a b | c)."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    response = (20, 21, 5)
    steps = [(LONG + response[:i], response[i : i + 1]) for i in range(3)]
    whole, *parts = response_logprobs(adapted, "agent0", [(LONG, response), *steps], max_tokens=512)
    assert_close(whole, sum(parts))


def test_an_empty_response_has_logprob_zero_and_an_empty_prompt_is_refused(policy):
    adapted, adapter = policy
    items = [(LONG, ()), (LONG, (20, 2)), ((9,), ())]
    found = response_logprobs(adapted, adapter, items, max_tokens=512)
    assert found[0] == 0 and found[2] == 0
    assert_close(found[1:2], _alone(adapted, adapter, items[1:2]), rtol=1e-5, atol=1e-5)
    assert torch.equal(response_logprobs(adapted, adapter, items[:1], max_tokens=512), torch.zeros(1))
    assert response_logprobs(adapted, adapter, [], max_tokens=512).shape == (0,)
    with pytest.raises(ValueError, match="prompt has no tokens"):
        response_logprobs(adapted, adapter, [((), (20,))], max_tokens=512)


def test_rl5_an_empty_response_has_no_gradient(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    for items in ([(LONG, ())], [(LONG, ()), (SHORT, (20, 5))]):
        accumulate_logprob_gradients(adapted, "agent0", items, torch.ones(len(items)), max_tokens=512, kl_weight=0.1)
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(adapted, "agent0"))


def test_equal_items_are_computed_once_and_counted_as_often_as_they_occur(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    item, other = ITEMS[0], ITEMS[1]
    assert torch.equal(
        response_logprobs(adapted, "agent0", [item, other, item, item], max_tokens=512)[[0, 2, 3]],
        response_logprobs(adapted, "agent0", [item, other], max_tokens=512)[[0, 0, 0]],
    )
    accumulate_logprob_gradients(adapted, "agent0", [item, other, item], torch.tensor([0.5, 1.0, -2.0]), max_tokens=512)
    repeated = gradients(adapted, "agent0")
    accumulate_logprob_gradients(adapted, "agent0", [item, other], torch.tensor([-1.5, 1.0]), max_tokens=512)
    assert relative_difference(repeated, gradients(adapted, "agent0")) < 1e-6


# --- gradients -------------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.3, -1.0, 0.7, 0.2, -0.4, 1.1, -0.6, 0.5])


def _plain_gradients(adapted, items=ITEMS, weights=WEIGHTS):
    """Of sum(weights * logprob), by autograd through a plain forward pass of every sequence alone."""
    with adapted.using("agent0"):
        sum(w * plain_logprob(adapted.model, *item) for w, item in zip(weights, items, strict=True)).backward()
    return gradients(adapted, "agent0")


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.float64, 1e-6)])
@pytest.mark.parametrize("max_tokens", [1, 30, 512])
def test_sharing_a_prompt_changes_neither_values_nor_gradients(request, family, dtype, bound, max_tokens):
    """Packed behind one prompt, or every response alone in a plain pass of its own; one micro-batch or many."""
    adapted = adapted_model(request.getfixturevalue(family)(dtype=dtype), "agent0")
    values = response_logprobs(adapted, "agent0", ITEMS, max_tokens=max_tokens)
    assert_close(values, _alone(adapted, "agent0"), rtol=max(bound, 1e-6), atol=0)
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=max_tokens)
    assert relative_difference(gradients(adapted, "agent0"), _plain_gradients(adapted)) < bound


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_tok5_bases_that_cannot_share_prompts_give_the_same(request, monkeypatch, family):
    """Also where pad is EOS (Llama) and answers end in it."""
    adapted = adapted_model(request.getfixturevalue(family)(), "agent0")
    shared = response_logprobs(adapted, "agent0", [*ITEMS, (LONG, ())], max_tokens=60)
    monkeypatch.setattr(AdaptedModel, "shares_prompts", False)
    masks = []
    adapted.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"].ndim), with_kwargs=True
    )
    assert_close(
        response_logprobs(adapted, "agent0", [*ITEMS, (LONG, ())], max_tokens=60), shared, rtol=1e-5, atol=1e-5
    )
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=60)
    assert relative_difference(gradients(adapted, "agent0"), _plain_gradients(adapted)) < 1e-5
    assert set(masks) == {2}, "the ordinary mask, which any attention takes"


def test_a_window_shorter_than_the_text_is_respected(tiny_qwen3):
    """Sliding-window attention shares no prompts: the plain batches must give what the model itself gives."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    adapted = adapted_model(tiny_qwen3(**window), "agent0")
    found = response_logprobs(adapted, "agent0", ITEMS, max_tokens=60)
    assert_close(found, _alone(adapted, "agent0"), rtol=1e-5, atol=1e-5)
    full = response_logprobs(adapted_model(tiny_qwen3(), "agent0"), "agent0", ITEMS, max_tokens=60)
    assert float((found - full).abs().max()) > 1e-3


def test_dpo3_gradients_equal_finite_differences(tiny_qwen3):
    """Along the gradient's own direction d: (f(x + e d) - f(x - e d)) / 2e is the gradient's norm."""
    adapted = adapted_model(tiny_qwen3(dtype=torch.float64), "agent0")
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=60)
    found = gradients(adapted, "agent0")
    norm = float(sum(g.pow(2).sum() for g in found)) ** 0.5
    direction, step = [g / norm for g in found], 3e-3  # some parts of the base compute in float32: no smaller step
    values = []
    for sign in (1, -2):  # from x to x + e d, then to x - e d
        with torch.no_grad():
            for weight, d in zip(adapted.parameters("agent0"), direction, strict=True):
                weight.add_(sign * step * d)
        with torch.no_grad(), adapted.using("agent0"):
            values.append(sum(w * plain_logprob(adapted.model, *item) for w, item in zip(WEIGHTS, ITEMS, strict=True)))
    slope = float(values[0] - values[1]) / (2 * step)
    assert_close(norm, slope, rtol=1e-3, atol=0)


def test_tok13_pads_change_neither_values_nor_gradients(tiny_qwen3):
    """A short response beside one that pads its row by 30 columns, against the two in passes of their own."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    short, long = (SHORT, (20, 5)), ((9,) * 20, (10,) * 14)
    for item, weight in ((short, 1.0), (long, 0.5)):
        accumulate_logprob_gradients(adapted, "agent0", [item], torch.tensor([weight]), max_tokens=512)
    apart = gradients(adapted, "agent0")
    accumulate_logprob_gradients(adapted, "agent0", [short, long], torch.tensor([1.0, 0.5]), max_tokens=512)
    assert relative_difference(gradients(adapted, "agent0"), apart) < 1e-5
    alone = response_logprobs(adapted, "agent0", [short], max_tokens=512)
    assert_close(response_logprobs(adapted, "agent0", [short, long], max_tokens=512)[:1], alone, rtol=1e-6, atol=1e-6)


def test_memory_is_bounded_by_the_micro_batch(tiny_qwen3):
    """No forward pass holds more padded tokens than allowed, and none more rows; a longer response goes alone."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    shapes = []
    adapted.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    items = [(LONG, (20 + i % 7,) * (1 + i % 5) + (i % 40,)) for i in range(60)]
    accumulate_logprob_gradients(adapted, "agent0", items, torch.ones(60), max_tokens=40)
    assert len(shapes) > 5 and max(rows * width for rows, width in shapes) <= 40
    shapes.clear()
    response_logprobs(adapted, "agent0", [(LONG, (20,) * 50)], max_tokens=40)
    assert shapes == [(1, 57)]


def test_memory_holds_one_micro_batch_at_a_time(tiny_qwen3, monkeypatch):
    """Masks grow with the texts of a batch: those of all micro-batches at once would grow with the number of pairs."""
    built, most = [], []

    def note(*args, build=scoring.build_batch, **options):
        batch = build(*args, **options)
        built.append(weakref.ref(batch))
        most.append(sum(reference() is not None for reference in built))
        return batch

    monkeypatch.setattr(scoring, "build_batch", note)
    scalar = _scalar(tiny_qwen3(), max_tokens=40)
    items = [(LONG, (20 + i % 7,) * (1 + i % 5) + (i % 40,)) for i in range(60)]
    response_logprobs(scalar.adapted, "agent0", items, max_tokens=40)
    accumulate_logprob_gradients(scalar.adapted, "agent0", items, torch.ones(60), max_tokens=40)
    assert scoring.graph_logprobs(scalar.adapted, "agent0", items, max_tokens=40) is None
    scalar.backward(items, lambda values: values.sum())
    assert len(most) > 20 and max(most) <= 2, "the one at work and the one being made"


def test_sharing_computes_a_prompt_once(tiny_qwen3):
    """Twenty answers of 2 tokens behind a prompt of 7: 47 tokens, not 180."""
    items = [Item(LONG, (token, 5)) for token in range(20)]
    rows = pack_rows(items, max_tokens=512, share_prompts=True)
    assert [[row.length for row in batch] for batch in rows] == [[7 + 20 * 2]]
    alone = pack_rows(items, max_tokens=512, share_prompts=False)
    assert sum(row.length for batch in alone for row in batch) == 180
    assert all(len(row.responses) == 1 for batch in alone for row in batch)


@pytest.mark.parametrize("share", [True, False])
def test_one_long_answer_among_short_ones_does_not_blow_up_a_micro_batch(share):
    """Attention pads each answer of a micro-batch to the longest: with all in one it would hold 10,100 places."""
    items = [Item(LONG, (token,) * 5) for token in range(100)] + [Item(LONG, (1,) * 100)]
    for rows in pack_rows(items, max_tokens=200, share_prompts=share):
        assert scoring.padded_tokens(rows, shared=share) <= 200


def test_packing_loses_and_repeats_no_response():
    items = [Item((p,) * (1 + p % 3), (r,) * (1 + r % 4)) for p in range(5) for r in range(9)]
    for max_tokens in (1, 7, 20, 100):
        for share in (True, False):
            rows = [row for batch in pack_rows(items, max_tokens=max_tokens, share_prompts=share) for row in batch]
            placed = {m: item for row in rows for m, item in zip(row.members, row.items, strict=True)}
            assert all(item.prompt == row.prompt for row in rows for item in row.items)
            assert [placed[index] for index in range(len(items))] == items
            assert sum(len(row.members) for row in rows) == len(items)


def _row(prompt, responses, members) -> PackedRow:
    return PackedRow(prompt, tuple(Item(prompt, response) for response in responses), members)


def test_the_tensors_of_a_micro_batch_by_hand():
    """Prompt (1 2) with responses (3), none and (4 5), then prompt (6) with (7 8); flat, and padded one by one."""
    flat = [_row((1, 2), [(3,), (), (4, 5)], (0, 3, 1)), _row((6,), [(7, 8)], (2,))]
    batch = build_batch(flat, shared=True, pad_id=9, device=torch.device("cpu"))
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3, 0, 1, 2]]
    assert batch.targets.tolist() == [3, 4, 5, 7, 8] and batch.predictors.tolist() == [1, 1, 3, 5, 6]
    assert batch.owners.tolist() == [0, 2, 2, 3, 3] and batch.members == [0, 3, 1, 2]
    assert batch.last.tolist() == [2, 1, 4, 7]
    packing = batch.inputs["packing"]
    assert (packing.prompts, packing.responses, packing.parent.tolist()) == ((2, 2), (3, 2), [0, 0, 1])

    alone = [_row((1, 2), [(3,)], (0,)), _row((6,), [()], (2,)), _row((1, 2), [(4, 5)], (1,))]
    batch = build_batch(alone, shared=False, pad_id=9, device=torch.device("cpu"))
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 9], [6, 9, 9, 9], [1, 2, 4, 5]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.targets.tolist() == [3, 4, 5] and batch.predictors.tolist() == [1, 9, 10]
    assert batch.last.tolist() == [2, 4, 11] and "packing" not in batch.inputs


def test_a_zero_weight_costs_no_graph_and_its_log_probability_is_reported_all_the_same(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    graphs = []
    adapted.backbone.register_forward_pre_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    zeros = torch.zeros(len(ITEMS))
    logprobs, kl = accumulate_logprob_gradients(adapted, "agent0", ITEMS, zeros, max_tokens=512)
    assert not any(graphs) and all(weight.grad is None for weight in adapted.parameters("agent0"))
    assert_close(logprobs, response_logprobs(adapted, "agent0", ITEMS, max_tokens=512))
    assert kl == 0.0
    zeros[2] = 1.0
    one, _ = accumulate_logprob_gradients(adapted, "agent0", ITEMS, zeros, max_tokens=512)
    assert_close(one, logprobs, rtol=1e-5, atol=1e-5)


# --- KL to the reference ---------------------------------------------------------------------------------------------


def _plain_kl(adapted, items) -> torch.Tensor:
    """At every response position sum_v p(v) (log p(v) - log q(v)), by plain passes in double precision."""
    total = 0.0
    for prompt, response in items:
        ids, positions = torch.tensor([[*prompt, *response]]), slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            with adapted.using("agent0"):
                policy = adapted.model(input_ids=ids).logits[0, positions].double().log_softmax(-1)
            with adapted.using(None):
                reference = adapted.model(input_ids=ids).logits[0, positions].double().log_softmax(-1)
        total += sum(policy[:, v].exp() * (policy[:, v] - reference[:, v]) for v in range(policy.shape[1])).sum()
    return total


def test_the_kl_equals_enumeration_over_the_vocabulary(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    items = [*ITEMS, ITEMS[0]]  # a repeated item counts twice
    expected = float(_plain_kl(adapted, items))
    assert expected > 1.0
    for max_tokens in (1, 512):
        _, found = accumulate_logprob_gradients(
            adapted, "agent0", items, torch.zeros(len(items)), max_tokens=max_tokens, kl_weight=1.0
        )
        assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_kl_of_equal_policies_is_zero_with_zero_gradient(tiny_qwen3):
    adapted = AdaptedModel(tiny_qwen3(), rank=4)
    adapted.add_adapter("agent0", Stream(0, "init"))
    zeros = torch.zeros(len(ITEMS))
    assert accumulate_logprob_gradients(adapted, "agent0", ITEMS, zeros, max_tokens=512, kl_weight=1.0)[1] == 0
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in gradients(adapted, "agent0"))


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_logits_are_held_for_some_tokens_at_a_time_and_nothing_changes(tiny_qwen3, monkeypatch, kl_weight):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    found = []
    for held in (scoring.LOGITS_HELD, 3 * adapted.output_layer.weight.shape[0]):
        monkeypatch.setattr(scoring, "LOGITS_HELD", held)
        most = []
        hook = adapted.output_layer.register_forward_hook(lambda *a, most=most: most.append(len(a[2])))
        values = response_logprobs(adapted, "agent0", [*ITEMS, (LONG, ())], max_tokens=512)
        _, kl = accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=512, kl_weight=kl_weight)
        hook.remove()
        found.append((values, kl, gradients(adapted, "agent0"), max(most)))
    (values, kl, wanted, whole), (chunked_values, chunked_kl, got, chunk) = found
    assert chunk == 3 < whole
    assert_close(chunked_values, values, rtol=1e-6, atol=0)
    assert chunked_kl == pytest.approx(kl, rel=1e-5)
    assert relative_difference(got, wanted) < 1e-6


def test_the_kl_gradient_equals_finite_differences_and_adds_to_that_of_the_loss(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(dtype=torch.float64), "agent0")
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, torch.zeros(len(ITEMS)), max_tokens=60, kl_weight=0.5)
    of_kl = gradients(adapted, "agent0")
    norm = float(sum(g.pow(2).sum() for g in of_kl)) ** 0.5
    direction = [g / norm for g in of_kl]  # of the steepest ascent: what rounds in float32 is small beside the slope
    step, values = 3e-3, []
    for sign in (1, -2, 1):  # and back to x
        with torch.no_grad():
            for weight, d in zip(adapted.parameters("agent0"), direction, strict=True):
                weight.add_(sign * step * d)
        values.append(float(_plain_kl(adapted, ITEMS)))
    assert_close(norm, 0.5 * (values[0] - values[1]) / (2 * step), rtol=1e-3, atol=0)

    accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=60)
    of_loss = gradients(adapted, "agent0")
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, WEIGHTS, max_tokens=60, kl_weight=0.5)
    both = gradients(adapted, "agent0")
    assert relative_difference(both, [a + b for a, b in zip(of_kl, of_loss, strict=True)]) < 1e-6


# --- scalars ---------------------------------------------------------------------------------------------------------


def _scalar(loaded, *, max_tokens=512, agents=("agent0",)) -> ScalarModel:
    scalar = ScalarModel(adapted_model(loaded, *agents), "value", Stream(0, "value"), max_tokens=max_tokens)
    randomize_adapter(scalar.adapted, "value", seed=7)
    randomize_head(scalar, seed=8)
    return scalar


def _plain_scalar(scalar: ScalarModel, prefix, rest, *, left=0, right=0) -> torch.Tensor:
    ids = torch.tensor([[2] * left + [*prefix, *rest] + [2] * right])
    mask = torch.tensor([[0] * left + [1] * (len(prefix) + len(rest)) + [0] * right])
    with scalar.adapted.using("value"):
        hidden = scalar.adapted.loaded.model.model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)
        ).last_hidden_state
    return scalar.head(hidden[0, left + len(prefix) + len(rest) - 1].float())[0]


TEXTS = [*ITEMS, (LONG, ()), ((9,) * 20, (10, 11, 2))]


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_rm2_a_score_depends_neither_on_padding_side_nor_on_batch_mates(request, family):
    """Texts that end in EOS too, where pad is EOS (Llama): the scalar is read at the last real token, by length."""
    scalar = _scalar(request.getfixturevalue(family)())
    found = scalar.values(TEXTS)
    for left, right in ((0, 0), (4, 0), (0, 4)):
        plain = torch.stack([_plain_scalar(scalar, *text, left=left, right=right) for text in TEXTS])
        assert_close(found, plain.detach(), rtol=1e-5, atol=1e-5)
    for text, value in zip(TEXTS, found, strict=True):
        assert_close(scalar.values([text])[0], value, rtol=1e-5, atol=1e-5)
    scalar.max_tokens = 12
    assert_close(scalar.values(TEXTS), found, rtol=1e-5, atol=1e-5)


def test_tok7_a_closing_eos_moves_the_score(tiny_llama):
    """Pooling that skips pads by id would read the token before EOS and give both texts one score."""
    scalar = _scalar(tiny_llama())
    without, closed = scalar.values([(LONG, (20, 21)), (LONG, (20, 21, 2))])
    assert abs(float(without - closed)) > 1e-3


def test_the_head_reads_through_its_own_adapter_and_not_an_agents(tiny_qwen3):
    scalar = _scalar(tiny_qwen3())
    before = scalar.values(TEXTS)
    randomize_adapter(scalar.adapted, "agent0", seed=50)
    assert torch.equal(scalar.values(TEXTS), before)
    randomize_adapter(scalar.adapted, "value", seed=51)
    assert not torch.allclose(scalar.values(TEXTS), before)


def _pair_loss(values: torch.Tensor) -> torch.Tensor:
    """Not a sum over texts, so that each one's derivative depends on the others; every second text is a loser."""
    return -logsigmoid(values[0::2][:4] - values[1::2]).mean() + 0.1 * values.pow(2).sum()


def test_one_pass_two_passes_and_plain_autograd_give_the_same_gradient(tiny_qwen3):
    texts = [*TEXTS, TEXTS[0]][:8]
    texts[7] = texts[0]  # a repeated text takes part as often as it occurs
    found = {}
    for max_tokens in (512, 12):
        scalar = _scalar(tiny_qwen3(), max_tokens=max_tokens)
        calls = []
        scalar.backward(texts, lambda values, calls=calls: calls.append(1) or _pair_loss(values))
        assert len(calls) == 1, "a loss that keeps a record is called once"
        found[max_tokens] = gradients(scalar.adapted, "value") + [p.grad.clone() for p in scalar.head.parameters()]
    plain = _scalar(tiny_qwen3())
    _pair_loss(torch.stack([_plain_scalar(plain, *text) for text in texts])).backward()
    expected = gradients(plain.adapted, "value") + [p.grad.clone() for p in plain.head.parameters()]
    assert relative_difference(found[512], expected) < 1e-5
    assert relative_difference(found[12], expected) < 1e-5
    assert all(bool(gradient.any()) for gradient in expected)


def test_dpo7_training_a_scalar_gives_the_agents_and_the_base_no_gradient(tiny_qwen3):
    scalar = _scalar(tiny_qwen3())
    scalar.backward(TEXTS[:8], _pair_loss)
    trained = {id(p) for p in scalar.parameters()}
    assert all(
        (p.grad is not None) == (id(p) in trained)
        for p in [*scalar.adapted.loaded.model.parameters(), *scalar.head.parameters()]
    )


def test_rm6_a_new_scalar_model_is_fresh(tiny_qwen3):
    """After training and closing, a second one of the same stream has the first one's initial weights exactly."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    first = ScalarModel(adapted, "value", Stream(0, "value"), max_tokens=512)
    initial = [p.detach().clone() for p in first.parameters()]
    assert all(not lora_b.any() for lora_b in adapted.parameters("value")[1::2])
    assert not first.head.bias.any() and not first.head.weight.any() and not first.values(TEXTS).any()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for _ in range(2):  # with a head of zeros the first step moves the head alone
        optimizer.zero_grad()
        first.backward(TEXTS[:8], _pair_loss)
        optimizer.step()
    assert all(lora_b.any() for lora_b in adapted.parameters("value")[1::2]), "the second step moves every adapter"
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), initial, strict=True))
    first.close()
    assert "value" not in adapted.trainable
    second = ScalarModel(adapted, "value", Stream(0, "value"), max_tokens=512)
    assert all(map(torch.equal, second.parameters(), initial))
    second.close()
    third = ScalarModel(adapted, "value", Stream(0, "value", iteration=1), max_tokens=512)
    assert not torch.equal(third.parameters()[0], initial[0]), "another iteration, another start"


def test_a_scalar_models_state_comes_back(tiny_qwen3):
    scalar = _scalar(tiny_qwen3())
    values, state = scalar.values(TEXTS), scalar.state()
    randomize_adapter(scalar.adapted, "value", seed=70)
    with torch.no_grad():
        scalar.head.weight.mul_(-3)
    assert not torch.allclose(scalar.values(TEXTS), values)
    scalar.load_state(state)
    assert torch.equal(scalar.values(TEXTS), values)


def test_scoring_passes_build_no_graph(tiny_qwen3):
    scalar = _scalar(tiny_qwen3())
    assert not scalar.values(TEXTS).requires_grad
    for adapter in ("agent0", None):
        assert not scoring.response_logprobs(scalar.adapted, adapter, ITEMS, max_tokens=512).requires_grad


def test_a_scalar_model_takes_no_step_on_a_gradient_that_is_not_finite(tiny_qwen3):
    scalar = _scalar(tiny_qwen3())
    optimizer = torch.optim.AdamW(scalar.parameters(), lr=0.1)
    scalar.backward([((1, 2), (3,))], lambda values: (values - 1).square().sum())
    scalar.parameters()[0].grad.view(-1)[0] = torch.nan
    before = scalar.state()
    with pytest.raises(FloatingPointError, match="the gradient norm of 'value' is nan; nothing was updated"):
        scalar.step(optimizer, 1.0)
    after = scalar.state()
    assert all(torch.equal(before[part][name], after[part][name]) for part in before for name in before[part])
    assert not optimizer.state


def test_a_loss_of_scalars_meets_its_targets_on_the_host(tiny_qwen3, monkeypatch):
    """Targets, rewards and the values of other critics are on the CPU, whatever device the model is on."""
    scalar, seen = _scalar(tiny_qwen3()), []
    monkeypatch.setattr(scalar, "_values", lambda batch: scalar.head.weight.sum().to("meta").expand(len(batch.members)))
    with pytest.raises(NotImplementedError, match="meta"):  # a copy from there to the CPU is asked for, and impossible
        scalar.backward([((1, 2), (3,))], lambda values: seen.append(values) or values.sum())
    assert not seen


# --- float16 ---------------------------------------------------------------------------------------------------------


def _small_gradients(make, dtype: torch.dtype, kl_weight: float) -> list[torch.Tensor]:
    """Of weights as small as those of a long pair that the policy tells apart already."""
    adapted = adapted_model(make(dtype=dtype), "agent0")
    weights = torch.linspace(-4e-6, 6e-6, len(ITEMS))
    accumulate_logprob_gradients(adapted, "agent0", ITEMS, weights, max_tokens=24, kl_weight=1e-6 * kl_weight)
    return gradients(adapted, "agent0")


@pytest.mark.parametrize("kl_weight", [0.0, 1.0])
def test_small_gradients_survive_float16_because_losses_are_scaled(tiny_qwen3, monkeypatch, kl_weight):
    """Several micro-batches are added up; the exact gradient is that of the same adapter in float64."""
    exact = _small_gradients(tiny_qwen3, torch.float64, kl_weight)
    assert relative_difference(_small_gradients(tiny_qwen3, torch.float16, kl_weight), exact) < 0.02
    monkeypatch.setattr("mapl_core.adapters.FLOAT16_SCALE", 1.0)
    assert relative_difference(_small_gradients(tiny_qwen3, torch.float16, kl_weight), exact) > 0.1


def test_a_scalars_gradient_in_float16_is_the_unscaled_one(tiny_qwen3):
    found = {}
    for dtype in (torch.float16, torch.float64):
        adapted = adapted_model(tiny_qwen3(dtype=dtype), "agent0")
        for limit in (500, 24):  # one micro-batch, and several
            scalar = ScalarModel(adapted, f"critic{limit}", Stream(0, "critic"), max_tokens=limit)
            randomize_adapter(adapted, scalar.name, seed=1)
            randomize_head(scalar, seed=2)
            scalar.backward(ITEMS, lambda values: (values * torch.linspace(-1, 1, len(ITEMS))).sum())
            found[dtype, limit] = [*gradients(adapted, scalar.name), *(p.grad for p in scalar.head.parameters())]
            scalar.close()
    for limit in (500, 24):
        assert relative_difference(found[torch.float16, limit], found[torch.float64, limit]) < 0.02


def test_in_float16_no_graph_is_handed_out_that_would_be_run_backward_unscaled(tiny_qwen3):
    items, bound = ITEMS[:2], 500
    for dtype, is_kept in ((torch.float32, True), (torch.float16, False)):
        adapted = adapted_model(tiny_qwen3(dtype=dtype), "agent0")
        assert (scoring.graph_logprobs(adapted, "agent0", items, max_tokens=bound) is not None) is is_kept
