"""Rollouts: the right distribution, the present weights, the same ids on either decoder and in any batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from toy_models import adapted_model, randomize_adapter

from mapl_core import decoders, sampling
from mapl_core.adapters import AdaptedModel
from mapl_core.decoders import DirectDecoder, TransformersDecoder
from mapl_core.sampling import Sample, SamplingSettings, choose_tokens, sample_responses
from mapl_core.scoring import response_logprobs
from mapl_core.seeding import Stream

PROMPTS = [(7, 8, 9), (10, 11, 12, 13, 14, 15, 16, 17), (18,), (19, 20, 21)]  # unequal lengths, two of them equal
DECODERS = (DirectDecoder, TransformersDecoder)


def _uniforms(rows: int, steps: int, purpose: str = "sample") -> torch.Tensor:
    return Stream(0, purpose).uniforms([str(row) for row in range(rows)], steps)


def _sample(adapted, adapter="agent0", *, samples=6, cached=100_000, settings=None, prompts=PROMPTS, **options):
    settings = settings or SamplingSettings(max_new_tokens=12)
    uniforms = _uniforms(len(prompts) * samples, settings.max_new_tokens)
    return sample_responses(
        adapted, adapter, prompts, uniforms, samples=samples, settings=settings, max_cached_tokens=cached, **options
    )


def _eager_to_end(loaded, boost: float = 1.5):
    """A base that ends its answers now and then: the EOS row of its output layer copies a likely one."""
    with torch.no_grad():
        head = loaded.model.get_output_embeddings().weight
        head[loaded.tokenizer.eos_token_id] = boost * head[8] + head[loaded.tokenizer.eos_token_id]
    return loaded


# --- choosing a token ------------------------------------------------------------------------------------------------


def _nucleus(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """The exact distribution by its definition, token by token: the k best, then the nucleus of what is left."""
    weights = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
            mass += weights[token] / total
    return torch.tensor([weights[t] / total / mass if t in kept else 0.0 for t in range(len(weights))])


@pytest.mark.parametrize("top_k", [0, 1, 4, 7, 9])
@pytest.mark.parametrize("head", [1, 3, 256])
@pytest.mark.parametrize(
    "temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.7, 0.9), (1.5, 0.5), (1.0, 1e-9)]
)
def test_the_chosen_tokens_follow_the_nucleus_distribution_exactly(monkeypatch, temperature, top_p, head, top_k):
    """On a grid of uniforms every token is chosen as often as its probability says, to one count; any head size."""
    monkeypatch.setattr(sampling, "HEAD", head)
    logits = torch.tensor([0.5, -1.0, 2.0, 1.9, 0.0, -3.0, 1.2])
    count = 4001
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = choose_tokens(logits.expand(count, -1), grid, temperature=temperature, top_p=top_p, top_k=top_k)
    found = torch.bincount(chosen, minlength=7).double()
    expected = _nucleus(logits, temperature, top_p, top_k).double()
    assert float((found - count * expected).abs().max()) <= 1.0 + 1e-3
    assert not found[expected == 0].any()


def test_the_head_of_the_distribution_gives_the_choice_of_a_full_sort(monkeypatch):
    """Rows whose nucleus lies inside the head and rows whose nucleus is larger, in one call."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 50, generator=generator) * torch.linspace(0.1, 6, 300)[:, None]  # flat to peaked
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    full = choose_tokens(logits, uniforms, temperature=1.0, top_p=0.8)
    monkeypatch.setattr(sampling, "HEAD", 6)
    inside = torch.softmax(logits, -1).topk(6).values.sum(-1) >= 0.8
    assert 50 < int(inside.sum()) < 250
    assert torch.equal(choose_tokens(logits, uniforms, temperature=1.0, top_p=0.8), full)


def test_rows_are_chosen_independently_of_each_other():
    generator = torch.Generator().manual_seed(0)
    logits, uniforms = (
        torch.randn(20, 50, generator=generator),
        torch.rand(20, generator=generator, dtype=torch.float64),
    )
    for top_p in (1.0, 0.7):
        together = choose_tokens(logits, uniforms, temperature=0.8, top_p=top_p)
        alone = [choose_tokens(logits[i : i + 1], uniforms[i : i + 1], temperature=0.8, top_p=top_p) for i in range(20)]
        assert torch.equal(together, torch.cat(alone))


def test_temperature_zero_is_greedy_whatever_the_uniforms():
    logits = torch.tensor([[0.1, 3.0, 2.9], [5.0, -1.0, 4.9]])
    for u in (0.0, 0.999999):
        for top_p in (1.0, 0.5):
            chosen = choose_tokens(logits, torch.full((2,), u, dtype=torch.float64), temperature=0.0, top_p=top_p)
            assert chosen.tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_the_ends_of_the_unit_interval_choose_a_possible_token(top_p):
    """0 and the largest double below 1 must not fall on a token of probability 0 at either end of the vocabulary."""
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, 0.9, -torch.inf]])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3)):
        assert choose_tokens(logits, torch.tensor([u], dtype=torch.float64), temperature=1.0, top_p=top_p).tolist() == [
            expected
        ]


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}, {"top_k": -1}]
)
def test_impossible_settings_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SamplingSettings(**settings)


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (0.0, 1.0)])
def test_both_decoders_sample_the_same_ids(request, family, temperature, top_p):
    """The fast path and the generic one, with a merged and an unmerged random adapter, longer than the first cache."""
    loaded = _eager_to_end(request.getfixturevalue(family)())
    adapted = adapted_model(loaded, "agent0", "agent1")
    settings = SamplingSettings(temperature, top_p, 20, top_k=30)
    for adapter in ("agent1", None):
        direct, generic = (_sample(adapted, adapter, settings=settings, decoder=decoder) for decoder in DECODERS)
        assert direct == generic
    if temperature:
        assert any(sample.truncated for group in direct for sample in group)
        assert any(not sample.truncated for group in direct for sample in group)
    assert DirectDecoder.supports(adapted)


def test_both_decoders_agree_on_qwen2_and_its_biases(tiny_qwen3):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    loaded = tiny_qwen3()
    config = Qwen2Config(
        vocab_size=43,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=5,
        pad_token_id=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded.model = Qwen2ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        for layer in loaded.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias)
    adapted = adapted_model(loaded, "agent0")
    assert DirectDecoder.supports(adapted)
    assert _sample(adapted, decoder=DirectDecoder) == _sample(adapted, decoder=TransformersDecoder)


def test_both_decoders_agree_on_scaled_rotary_embeddings(tiny_llama):
    """Llama 3's frequencies; another scaling is left to the generic decoder."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    adapted = adapted_model(tiny_llama(rope_parameters=rope), "agent0")
    assert DirectDecoder.supports(adapted)
    assert _sample(adapted, decoder=DirectDecoder) == _sample(adapted, decoder=TransformersDecoder)
    assert _sample(adapted) != _sample(adapted_model(tiny_llama(), "agent0"))
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    assert not DirectDecoder.supports(AdaptedModel(tiny_llama(rope_parameters=yarn)))


def test_layers_merged_one_by_one_give_the_same_samples(tiny_qwen3, monkeypatch):
    """What a GPU does whose memory has no room for a copy of all of them."""
    adapted, held = adapted_model(tiny_qwen3(), "agent0"), []
    expected = _sample(adapted, decoder=DirectDecoder)
    monkeypatch.setattr(decoders, "_copy_fits", lambda _: False)
    step = DirectDecoder.step
    monkeypatch.setattr(DirectDecoder, "step", lambda self, ids: held.append(self.weights.layers) or step(self, ids))
    assert _sample(adapted, decoder=DirectDecoder) == expected
    assert held and not any(isinstance(layers, list) for layers in held)


def test_a_copy_of_the_layers_may_take_half_of_the_free_memory(monkeypatch):
    """Two layers of 1000 x 500 weights in 2 bytes each: 2 MB."""
    layers = torch.nn.ModuleList([torch.nn.Linear(1000, 500, device="meta"), torch.nn.Linear(500, 1000, device="meta")])
    loaded = SimpleNamespace(dtype=torch.bfloat16)
    adapted = SimpleNamespace(device=torch.device("cuda"), backbone=SimpleNamespace(layers=layers), loaded=loaded)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1_000_000)
    for free, fits in ((2_000_000, True), (1_999_999, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10**9))
        assert decoders._copy_fits(adapted) is fits
    adapted.device = torch.device("cpu")
    assert decoders._copy_fits(adapted)


def test_models_the_direct_decoder_does_not_know_are_left_to_the_generic_one(tiny_qwen3, tiny_llama, tiny_gpt2):
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    for loaded in (
        tiny_gpt2(),
        tiny_qwen3(**window),
        tiny_llama(mlp_bias=True),
        tiny_llama(attention_bias=True),
        tiny_llama(hidden_act="gelu"),
    ):
        assert not DirectDecoder.supports(AdaptedModel(loaded))


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_gpt2"])
def test_greedy_sampling_is_the_argmax_of_a_plain_pass(request, family):
    """Token by token without a cache: prompts of unequal length in one batch, on rotary and on learned positions."""
    adapted = AdaptedModel(request.getfixturevalue(family)())
    found = _sample(adapted, None, samples=1, settings=SamplingSettings(temperature=0.0, max_new_tokens=5))
    for prompt, (sample,) in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for token in sample.token_ids:
            with torch.no_grad():
                assert int(adapted.loaded.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_the_settings_reach_the_choice_of_every_token(tiny_qwen3):
    """Leaving one candidate, by top-k or by top-p, is greedy decoding; leaving all is not."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    greedy = _sample(adapted, settings=SamplingSettings(temperature=0.0, max_new_tokens=6))
    for narrow in (SamplingSettings(max_new_tokens=6, top_k=1), SamplingSettings(top_p=1e-9, max_new_tokens=6)):
        assert _sample(adapted, settings=narrow) == greedy
    assert _sample(adapted, settings=SamplingSettings(max_new_tokens=6)) != greedy


@pytest.mark.parametrize("decoder", DECODERS)
def test_eos_is_kept_and_ends_a_response_and_truncation_is_flagged(tiny_qwen3, decoder):
    adapted = adapted_model(_eager_to_end(tiny_qwen3()), "agent0")
    samples = [s for group in _sample(adapted, samples=20, decoder=decoder) for s in group]
    ended = [s for s in samples if not s.truncated]
    assert ended and len(ended) < len(samples)
    assert all(s.token_ids[-1] == 5 and 5 not in s.token_ids[:-1] for s in ended)
    assert all(5 not in s.token_ids and len(s.token_ids) == 12 for s in samples if s.truncated)


def test_an_eos_at_the_very_limit_is_no_truncation(tiny_llama):
    """A model that always writes EOS first, and one that never does, at a limit of one token."""
    loaded = tiny_llama()
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()  # all tokens equally likely: uniforms choose
    adapted, settings = AdaptedModel(loaded), SamplingSettings(max_new_tokens=1)
    uniforms = torch.tensor([[2.5 / 43], [7.5 / 43]], dtype=torch.float64)  # ids 2 (EOS) and 7
    found = sample_responses(adapted, None, [(9,)], uniforms, samples=2, settings=settings, max_cached_tokens=100)
    assert found == [[Sample((2,), False), Sample((7,), True)]]


def test_every_stop_id_ends_a_response(tiny_llama):
    loaded = tiny_llama()
    loaded.model.generation_config.eos_token_id = [2, 7]
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()
    uniforms = torch.tensor([[0.5, 7.5 / 43, 0.5], [0.5, 0.5, 0.5]], dtype=torch.float64)
    found = sample_responses(
        AdaptedModel(loaded),
        None,
        [(9,)],
        uniforms,
        samples=2,
        settings=SamplingSettings(max_new_tokens=3),
        max_cached_tokens=100,
    )
    assert found == [[Sample((21, 7), False), Sample((21, 21, 21), True)]]


@pytest.mark.parametrize("decoder", DECODERS)
def test_finished_rows_leave_the_batch(tiny_qwen3, monkeypatch, decoder):
    """The decoder is asked for fewer and fewer rows, and what the others write does not depend on it."""
    adapted = adapted_model(_eager_to_end(tiny_qwen3(), boost=3.0), "agent0")
    sizes = []
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda self, tokens: sizes.append(len(tokens)) or step(self, tokens))
    settings = SamplingSettings(max_new_tokens=30)
    batched = _sample(adapted, settings=settings, decoder=decoder, samples=4)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.7 * sizes[0]
    assert batched == _sample(adapted, settings=settings, decoder=decoder, samples=4, cached=1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_seed1_samples_do_not_depend_on_how_rows_are_batched(tiny_qwen3, decoder):
    """All in one batch, split inside a prompt's samples, one row at a time; and with the prompts in another order."""
    adapted = adapted_model(_eager_to_end(tiny_qwen3()), "agent0")
    together = _sample(adapted, decoder=decoder, samples=3)
    assert len({sample for group in together for sample in group}) > 8
    for cached in (1, 40):
        assert _sample(adapted, decoder=decoder, samples=3, cached=cached) == together
    order = [2, 0, 3, 1]
    rows = [prompt * 3 + sample for prompt in order for sample in range(3)]
    shuffled = sample_responses(
        adapted,
        "agent0",
        [PROMPTS[i] for i in order],
        _uniforms(12, 12)[rows],
        samples=3,
        settings=SamplingSettings(max_new_tokens=12),
        max_cached_tokens=60,
        decoder=decoder,
    )
    assert shuffled == [together[i] for i in order]


def test_the_cache_budget_bounds_every_batch(tiny_qwen3, monkeypatch):
    """Each prompt once and max_new_tokens for each of its rows; a single row may exceed the bound."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    held = []
    init = DirectDecoder.__init__

    def note(self, weights, prompts, batch):
        held.append(sum(len(prompts[i]) for i in {p for p, _ in batch}) + 12 * len(batch))
        init(self, weights, prompts, batch)

    monkeypatch.setattr(DirectDecoder, "__init__", note)
    _sample(adapted, cached=60, samples=15)
    assert len(held) > 12 and max(held) <= 60
    held.clear()
    _sample(adapted, cached=100_000)
    assert held == [12 * 24 + 3 + 8 + 1 + 3]


def test_a_prompt_is_prefilled_once_for_all_its_samples(tiny_qwen3, monkeypatch):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    shapes = []
    prefill = DirectDecoder.prefill
    monkeypatch.setattr(DirectDecoder, "prefill", lambda self: shapes.append(len(self.prompts)) or prefill(self))
    _sample(adapted, samples=10)
    assert shapes == [len(PROMPTS)]


def test_both_decoders_sample_under_gradient_checkpointing(tiny_qwen3):
    """It needs training mode, in which Transformers gives no cache; the mode is as it was afterwards."""
    expected = _sample(adapted_model(tiny_qwen3(), "agent0"))
    adapted = adapted_model(tiny_qwen3(), "agent0", gradient_checkpointing=True)
    for decoder in DECODERS:
        assert _sample(adapted, decoder=decoder) == expected
        assert adapted.loaded.model.training


# --- whose weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_vlm1_the_sampler_never_serves_stale_weights(tiny_qwen3, decoder):
    """After an adapter changed, the samples are those of a fresh model with the new weights; agents stay apart."""
    adapted = adapted_model(tiny_qwen3(), "agent0", "agent1")
    old = _sample(adapted, decoder=decoder)
    other = _sample(adapted, "agent1", decoder=decoder)
    randomize_adapter(adapted, "agent0", seed=77)
    fresh = adapted_model(tiny_qwen3(), "agent0")
    randomize_adapter(fresh, "agent0", seed=77)
    new = _sample(adapted, decoder=decoder)
    assert new == _sample(fresh, decoder=decoder) and new != old
    assert _sample(adapted, "agent1", decoder=decoder) == other and other != old
    bare = _sample(adapted, None, decoder=decoder)
    assert bare == _sample(AdaptedModel(tiny_qwen3()), None, decoder=decoder) and bare != new


@pytest.mark.parametrize("decoder", DECODERS)
def test_sampling_leaves_every_weight_and_flag_bit_identical(tiny_qwen3, decoder):
    adapted = adapted_model(tiny_qwen3(), "agent0", "agent1")
    before = {
        name: (weight.detach().clone(), weight.requires_grad)
        for name, weight in adapted.loaded.model.named_parameters()
    }
    for adapter in ("agent1", None):
        _sample(adapted, adapter, decoder=decoder)
    for name, weight in adapted.loaded.model.named_parameters():
        assert torch.equal(weight, before[name][0]) and weight.requires_grad == before[name][1]


# --- against the scorer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rl6_fresh_samples_have_ratio_one(tiny_qwen3, monkeypatch, decoder, temperature):
    """The log-probability that the sampler drew from equals that of the scorer at the sampling temperature."""
    adapted = adapted_model(_eager_to_end(tiny_qwen3()), "agent0")
    recorded = []

    def record(logits, uniforms, **options):
        tokens = choose_tokens(logits, uniforms, **options)
        scores = torch.log_softmax(logits.double() / temperature, dim=-1).gather(1, tokens[:, None]).squeeze(1)
        recorded.append(dict(zip(uniforms.tolist(), scores.tolist(), strict=True)))  # a uniform names its row and step
        return tokens

    monkeypatch.setattr(sampling, "choose_tokens", record)
    settings = SamplingSettings(temperature, 1.0, 12)
    groups = _sample(adapted, settings=settings, decoder=decoder, samples=4)
    uniforms = _uniforms(len(PROMPTS) * 4, 12)
    samples = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    sampled = torch.tensor(
        [
            sum(recorded[step][float(uniforms[row, step])] for step in range(len(sample.token_ids)))
            for row, (_, sample) in enumerate(samples)
        ]
    )
    scored = response_logprobs(
        adapted,
        "agent0",
        [(prompt, sample.token_ids) for prompt, sample in samples],
        max_tokens=512,
        temperature=temperature,
    )
    assert float(((scored - sampled).exp() - 1).abs().max()) < 1e-4


def test_sampling_frequencies_match_the_scored_probabilities(tiny_qwen3):
    """All two-token answers of a 6-word base, on a product grid of uniforms: counts equal probabilities to the grid."""
    loaded = tiny_qwen3(vocab_size=6, pad_token_id=3, eos_token_id=0)
    loaded.model.generation_config.eos_token_id = 0
    loaded.tokenizer.eos_token = "<unk>"  # id 0
    adapted = AdaptedModel(loaded)
    side = 60
    points = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    uniforms = torch.cartesian_prod(points, points)
    (group,) = sample_responses(
        adapted,
        None,
        [(1, 2)],
        uniforms,
        samples=side**2,
        settings=SamplingSettings(max_new_tokens=2),
        max_cached_tokens=10**6,
    )
    answers = [(0,)] + [(first, second) for first in range(1, 6) for second in range(6)]
    exact = response_logprobs(adapted, None, [((1, 2), answer) for answer in answers], max_tokens=512).exp()
    assert_close(float(exact.sum()), 1.0, rtol=0, atol=1e-5)
    counts = torch.tensor([sum(s.token_ids == answer for s in group) for answer in answers]) / side**2
    assert float((counts - exact).abs().max()) < 2.1 / side
    assert int((counts > 0).sum()) > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_direct_decoder_computes_in_the_dtype_of_the_base(tiny_qwen3, dtype):
    """On a GPU weights have 16 bits: prefill and three steps stay about as near to float32 as the model's own pass."""
    exact, rounded = (adapted_model(tiny_qwen3(dtype=kind), "agent0") for kind in (torch.float32, dtype))
    batch = [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(2)]
    steps = torch.tensor([[20, 21, 22]] * 4 + [[23, 24, 25]] * 4)
    logits = {}
    for decoder in DECODERS:
        for adapted in (exact, rounded):
            running = decoder(decoder.prepare(adapted, "agent0"), PROMPTS, batch)
            with torch.no_grad():
                collected = [running.prefill()]
                running.start(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), 3)
                collected += [running.step(tokens) for tokens in steps.T]
            logits[decoder, adapted] = torch.cat(collected)
    assert_close(logits[DirectDecoder, exact], logits[TransformersDecoder, exact], rtol=1e-4, atol=1e-4)
    assert logits[DirectDecoder, rounded].dtype == dtype
    error = {d: float((logits[d, rounded].float() - logits[d, exact]).abs().max()) for d in DECODERS}
    assert error[DirectDecoder] < 4 * error[TransformersDecoder] < 1.0


def test_a_small_step_of_an_adapter_reaches_the_answers_of_a_16_bit_base(tiny_qwen3):
    """A step of 1e-5 is less than half the distance between bfloat16 numbers near 0.02: merged, it would be lost.

    The logits of both decoders move by the same, to the rounding of one addition.
    """
    adapted = adapted_model(tiny_qwen3(dtype=torch.bfloat16), "agent0")
    layer = adapted.backbone.layers[0].self_attn.o_proj
    with torch.no_grad():
        for module in adapted._lora_layers():
            module.lora_B["agent0"].weight.zero_()
        for module in adapted._lora_layers():
            module.lora_B["agent0"].weight.fill_(1e-5 / float(module.lora_A["agent0"].weight.abs().sum(0).mean()))
    kept = (adapted.merged_weight(layer, "agent0") != adapted.merged_weight(layer, None)).float().mean()
    assert kept < 0.5
    x = torch.randn(5, layer.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    first, second = adapted.factors([layer], "agent0")
    update = layer.scaling["agent0"] * layer.lora_B["agent0"].weight @ layer.lora_A["agent0"].weight
    assert_close(second @ first, update.float())
    projection = DirectDecoder.prepare(adapted, "agent0").layers[0].output
    with torch.no_grad(), adapted.using("agent0"):
        assert_close(projection(x), layer(x), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_an_adapter_stays_apart_where_products_round_their_factors(tiny_qwen3, precision):
    """Merged in float32, its first steps would be lost when the product rounds the merged weight to 16 bits."""
    adapted = adapted_model(tiny_qwen3(), "agent0")
    randomize_adapter(adapted, "agent0", seed=0)
    layer = adapted.backbone.layers[0].mlp.down_proj
    assert DirectDecoder.prepare(adapted, "agent0").layers[0].down.factors is None  # exact products: merged
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        projection = DirectDecoder.prepare(adapted, "agent0").layers[0].down
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), adapted.using("agent0"):
            assert_close(projection(x), layer(x), rtol=0.02, atol=0.02)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(projection.weight, layer.get_base_layer().weight)
    assert_close(projection.factors[1] @ projection.factors[0], layer.get_delta_weight("agent0"))


@pytest.mark.parametrize("limit", [1, 15, 16, 33])
def test_the_cache_of_new_tokens_never_grows_beyond_what_can_be_needed(tiny_qwen3, limit, monkeypatch):
    widths, append = [], DirectDecoder._append

    def watched(self, index, key, value):
        found = append(self, index, key, value)
        widths.append(self.suffix[index][0].shape[2])
        return found

    monkeypatch.setattr(DirectDecoder, "_append", watched)
    adapted = AdaptedModel(tiny_qwen3())
    monkeypatch.setattr(AdaptedModel, "stop_ids", {10**6})
    _sample(adapted, None, samples=2, settings=SamplingSettings(max_new_tokens=limit))
    assert max(widths, default=0) <= limit


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_are_an_error_and_masked_ones_are_not(value, temperature):
    logits, uniforms = torch.zeros(2, 50), torch.full((2,), 0.5, dtype=torch.float64)
    logits[:, :10] = -torch.inf
    assert choose_tokens(logits, uniforms, temperature=temperature, top_p=0.9).min() >= 10
    logits[1, 20] = value
    with pytest.raises(FloatingPointError, match=r"1 of 2 rows of logits are not finite, in torch\.float32"):
        choose_tokens(logits, uniforms, temperature=temperature, top_p=0.9)
