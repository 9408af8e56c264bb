"""The joint reward model: it reads every agent, starts afresh, and is measured on tasks it has not seen."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch.testing import assert_close
from toy_domains import ToyDomain
from toy_models import adapted_model, randomize_adapter, randomize_head, relative_difference, trajectory

from mapl_core.buffers import PreferencePair, Trajectory
from mapl_core.reward_model import RewardModel, fit_reward_model, split_held_out, task_batches
from mapl_core.seeding import Stream

SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0, "epochs": 2, "batch_size": 4}


def make_model(loaded, *, limit=512, micro_batch=2048, seed=0, spread=True, domain=None, adapted=None) -> RewardModel:
    """A reward model beside two agents on one base; with `spread` its adapter is random, so that scores differ."""
    domain = domain or ToyDomain()
    tasks = {task.id: task for task in domain.load_tasks("train", "pocket")}
    adapted = adapted or adapted_model(loaded, "agent0", "agent1")
    model = RewardModel(
        domain, tasks, adapted, Stream(seed, "reward_model"), max_text_tokens=limit, micro_batch_tokens=micro_batch
    )
    if spread:
        randomize_adapter(adapted, "reward_model", seed=30 + seed)
        randomize_head(model.scalar, seed=60 + seed)
    return model


def answers(model: RewardModel, *turns: tuple[str, ...], task: int = 0) -> Trajectory:
    """A trajectory of the given texts, [turn][agent], scored by the toy oracle."""
    which = list(model.tasks.values())[task]
    rewards = [model.domain.reward(list(texts), which) for texts in turns]
    played = trajectory([[((7,), (8,))] * len(texts) for texts in turns], task_id=which.id, responses=turns)
    return Trajectory(
        played.task_id,
        played.actions,
        played.responses,
        tuple(reward.total for reward in rewards),
        tuple(reward.parts for reward in rewards),
    )


def make_pairs(model: RewardModel, tasks: int = 5) -> list[PreferencePair]:
    """Four pairs a task: the winner's agents say the task's word, the loser's another one."""
    pairs = []
    for index, task in enumerate(list(model.tasks.values())[:tasks]):
        word = task.fields["word"]
        other = "river" if word == "cat" else "cat"
        for filler in ("the", "a", "long", "in the"):
            good = answers(model, (f"{filler} {word}", f"{word} runs"), task=index)
            bad = answers(model, (f"{filler} {other}", f"{other} runs"), task=index)
            pairs.append(PreferencePair(good, bad, winner_is_agent=True))
    return pairs


def read(model: RewardModel, trajectory_: Trajectory) -> str:
    shared, rest, _ = model.item(trajectory_)
    return model.tokenizer.decode([*shared, *rest])


def weights(model: RewardModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.scalar.parameters()]


# --- the joint text --------------------------------------------------------------------------------------------------


def test_the_joint_text_holds_the_task_once_and_every_agents_role_and_answer_in_order(tiny_qwen3):
    model = make_model(tiny_qwen3())
    text = read(model, answers(model, ("the cat", "a dog runs")))
    assert text == ("post the red cat sleeps . agent one write : the cat agent two write : a dog runs <|im_end|>")
    shared, rest, _ = model.item(answers(model, ("the cat", "a dog runs")))
    assert model.tokenizer.decode(list(shared)) == "post the red cat sleeps ."
    assert rest[-1] == model.tokenizer.eos_token_id and model.cut_parts == 0


def test_two_turns_are_read_with_the_feedback_between_them(tiny_qwen3):
    model = make_model(tiny_qwen3(), domain=ToyDomain(horizon=2))
    text = read(model, answers(model, ("the cat", "a dog"), ("cat", "bird runs")))
    assert text == (
        "post the red cat sleeps . agent one write : the cat agent two write : a dog "
        "agent one write : the cat ! one . cat agent two write : a dog ! one . bird runs <|im_end|>"
    )


def test_tok1_no_bos_stands_inside_a_joint_text(tiny_llama):
    """Llama's tokenizer writes BOS in front of whatever it encodes; the parts of one text must not each get one."""
    model = make_model(tiny_llama())
    ids = list(itertools.chain(*model.item(answers(model, ("the cat", "a dog")))))
    assert model.tokenizer.bos_token_id not in ids


@pytest.mark.parametrize("num_agents, horizon", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_rm3_changing_any_agents_answer_at_any_turn_changes_the_score(tiny_qwen3, num_agents, horizon):
    model = make_model(tiny_qwen3(), domain=ToyDomain(num_agents=num_agents, horizon=horizon))
    turns = [["the cat"] * num_agents for _ in range(horizon)]
    texts = [answers(model, *map(tuple, turns))]
    for turn, agent in itertools.product(range(horizon), range(num_agents)):
        changed = [list(texts_) for texts_ in turns]
        changed[turn][agent] = "the dog"
        texts.append(answers(model, *map(tuple, changed)))
    scores = model.scores(texts)
    assert all(abs(float(scores[a] - scores[b])) > 1e-4 for a, b in itertools.combinations(range(len(texts)), 2))


@pytest.mark.parametrize("limit", [24, 30, 40])
@pytest.mark.parametrize("agent", [0, 1, 2])
def test_rm3_tok9_a_text_cut_to_its_limit_still_shows_every_agents_answer(tiny_qwen3, limit, agent):
    """Long answers of three agents: the beginning of each one, the last agent's too, decides about the score."""
    model = make_model(tiny_qwen3(), limit=limit, domain=ToyDomain(num_agents=3))
    texts = ["the cat sleeps in a house and runs"] * 3
    changed = [text if index != agent else f"dog {text}" for index, text in enumerate(texts)]
    first, second = answers(model, tuple(texts)), answers(model, tuple(changed))
    assert len(list(itertools.chain(*model.item(first)))) == limit and model.cut_parts == 1
    assert model.item(first) != model.item(second)
    assert abs(float(model.scores([first]) - model.scores([second]))) > 1e-4


def test_rm3_tok9_a_long_role_does_not_hide_the_answer(tiny_qwen3):
    """After a turn the role holds feedback and the earlier answer: it gives way before the new answer does."""
    model = make_model(tiny_qwen3(), limit=60, domain=ToyDomain(horizon=2))
    earlier = ("the red cat sleeps in a long house and a bird sings",) * 2
    texts = [
        answers(model, earlier, ("cat runs", "dog runs")),
        answers(model, earlier, ("cat runs", "bird sings")),
        answers(model, earlier, ("river runs", "dog runs")),
    ]
    items = [model.item(text) for text in texts]
    assert model.cut_parts == 3 and len({item for item in items}) == 3
    for item, words in zip(
        items, (("cat runs", "dog runs"), ("cat runs", "bird sings"), ("river runs", "dog runs")), strict=True
    ):
        assert all(word in model.tokenizer.decode(list(item[1])) for word in words)


def test_tok9_a_cut_text_fills_its_budget_and_keeps_short_parts_whole(tiny_qwen3):
    """Limit 40, of which 1 for EOS. The long answer is cut; the task and the short answer need not be."""
    model = make_model(tiny_qwen3(), limit=40)
    long = " ".join(["runs"] * 50)
    shared, rest, _ = model.item(answers(model, ("the cat", long)))
    text = model.tokenizer.decode(list(rest))
    assert len(shared) + len(rest) == 40 and model.tokenizer.decode(list(shared)) == "post the red cat sleeps ."
    assert text.startswith("agent one write : the cat agent two write : runs runs")
    assert rest[-1] == model.tokenizer.eos_token_id


def test_tok9_equal_answers_get_equal_shares(tiny_qwen3):
    model = make_model(tiny_qwen3(), limit=46, domain=ToyDomain(num_agents=3))
    _, rest, _ = model.item(answers(model, ("cat " * 30, "dog " * 30, "bird " * 30)))
    counts = [list(rest).count(model.tokenizer.get_vocab()[word]) for word in ("cat", "dog", "bird")]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 8


def test_tok9_a_long_task_leaves_half_of_the_budget_to_the_answers(tiny_qwen3):
    class LongTask(ToyDomain):
        def task_text(self, task):
            return " ".join(["post"] * 100)

    model = make_model(tiny_qwen3(), limit=41, domain=LongTask())
    shared, rest, _ = model.item(answers(model, ("the " * 30, "a " * 30)))
    assert len(shared) == 20 and len(rest) == 21
    shared, rest, _ = model.item(answers(model, ("the cat", "a dog")))
    assert len(shared) + len(rest) == 41, "short answers leave the task what they do not need"
    assert read(model, answers(model, ("the cat", "a dog"))).endswith("the cat agent two write : a dog <|im_end|>")


def test_cut_texts_are_counted(tiny_qwen3):
    model = make_model(tiny_qwen3(), limit=40)
    texts = [answers(model, ("the cat", "runs " * count)) for count in (1, 50, 60)]
    model.scores(texts)
    assert model.cut_parts == 2


def test_tok9_a_fit_that_cuts_texts_warns_once_with_their_number_and_the_setting(tiny_qwen3):
    """Three distinct texts of four are too long; one of them stands in two pairs."""
    model = make_model(tiny_qwen3(), limit=40)
    short, long = answers(model, ("the cat", "runs")), answers(model, ("the cat", "runs " * 50))
    others = [answers(model, ("the cat", "sings " * count)) for count in (50, 60)]
    pairs = [PreferencePair(long, short, True), PreferencePair(long, others[0], True)]
    held_out = [PreferencePair(others[1], short, True)]
    with pytest.warns(UserWarning) as caught:
        fit_reward_model(model, pairs, Stream(0, "order"), **SETTINGS, held_out=held_out)
    (warning,) = caught
    assert "3 of 4 joint texts are longer than reward_model_tokens = 40" in str(warning.message)
    assert model.cut_parts == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_reward_model(make_model(tiny_qwen3()), pairs, Stream(0, "order"), **SETTINGS)


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_rm2_a_joint_score_does_not_depend_on_batch_mates(request, family):
    """Answers of one task share its text, others pad: alone, together and in small micro-batches the same."""
    model = make_model(request.getfixturevalue(family)())
    texts = [pair.winner for pair in make_pairs(model)] + [answers(model, ("the " * 20, ""), task=1)]
    together = model.scores(texts)
    assert float(together.std()) > 1e-2
    assert_close(torch.cat([model.scores([text]) for text in texts]), together, rtol=1e-5, atol=1e-5)
    model.scalar.max_tokens = 30
    assert_close(model.scores(texts), together, rtol=1e-5, atol=1e-5)


def test_scores_do_not_depend_on_who_wrote_the_answers(tiny_qwen3):
    """A coordinator's split answer and the agents' own get one score: the model reads texts, not ids or structure."""
    model = make_model(tiny_qwen3())
    dec = answers(model, ("the cat", "a dog"))
    cen = Trajectory(dec.task_id, (dec.actions[0][:1],), dec.responses, dec.rewards, dec.parts)
    assert torch.equal(model.scores([dec]), model.scores([cen]))


# --- fitting ---------------------------------------------------------------------------------------------------------


def test_rm3_a_fit_learns_the_order_of_tasks_it_has_not_seen(tiny_qwen3):
    model = make_model(tiny_qwen3(), spread=False)
    pairs = make_pairs(model, tasks=10)
    held = {pair.task_id for pair in pairs[::4][8:]}
    fitted, held_out = ([p for p in pairs if (p.task_id in held) == wanted] for wanted in (False, True))
    report = fit_reward_model(model, fitted, Stream(0, "order"), **{**SETTINGS, "epochs": 12}, held_out=held_out)
    assert report.train_accuracy > 0.9 and report.loss < 0.5 * math.log(2)
    assert (report.train_pairs, report.held_out_pairs, report.samples) == (32, 8, 2 * 32 * 12)
    scores = [model.scores([getattr(pair, side) for pair in held_out]) for side in ("winner", "loser")]
    assert report.held_out_accuracy == float((scores[0] > scores[1]).float().mean())


def test_rm6_every_fit_starts_from_the_initial_weights(tiny_qwen3):
    """After a fit, a new model of the same stream is where the first one started, and its fit ends where that ended."""
    adapted = adapted_model(tiny_qwen3(), "agent0", "agent1")
    agents = {name: adapted.state(name) for name in ("agent0", "agent1")}
    ends, starts = [], []
    for _ in range(2):
        model = make_model(None, spread=False, adapted=adapted)
        starts.append(weights(model))
        assert all(not lora_b.any() for lora_b in adapted.parameters("reward_model")[1::2])
        fit_reward_model(model, make_pairs(model), Stream(0, "order"), **SETTINGS)
        ends.append(weights(model))
        model.close()
        assert adapted.trainable == ["agent0", "agent1"]
    assert all(map(torch.equal, *starts)) and all(map(torch.equal, *ends))
    assert any(not torch.equal(a, b) for a, b in zip(starts[0], ends[0], strict=True))
    for name, state in agents.items():
        assert all(torch.equal(state[key], value) for key, value in adapted.state(name).items())


def test_rm6_another_iteration_starts_from_other_weights_and_every_untrained_score_is_zero(tiny_qwen3):
    adapted = adapted_model(tiny_qwen3(), "agent0")
    starts = []
    for seed in range(2):
        model = make_model(None, seed=seed, adapted=adapted, spread=False)
        starts.append([weight.detach().clone() for weight in adapted.parameters("reward_model")])
        assert not model.scores([pair.winner for pair in make_pairs(model)]).any()
        model.close()
    assert any(not torch.equal(one, other) for one, other in zip(*starts, strict=True))


def test_the_micro_batch_does_not_change_a_fit(tiny_qwen3):
    """In one pass a batch, and in many: the same loss, and nearly the same weights.

    The head's bias is left out: it adds to both scores of a pair, so its gradient is rounding alone.
    """
    results = []
    for micro_batch in (4096, 60, 25):  # a batch at once, a few of its pairs at a time, not even one pair
        model = make_model(tiny_qwen3(), micro_batch=micro_batch)
        settings = {**SETTINGS, "learning_rate": 1e-3}
        report = fit_reward_model(model, make_pairs(model, tasks=2), Stream(0, "order"), **settings)
        results.append((report, weights(model)))
    (whole, expected), *others = results
    for report, found in others:
        assert_close(report.loss, whole.loss, rtol=1e-4, atol=1e-5)
        assert report.train_accuracy == whole.train_accuracy
        for one, many in zip(expected[:-1], found[:-1], strict=True):
            assert float((one - many).abs().max()) < 1e-4


def test_the_first_loss_of_a_fit_is_the_bradley_terry_loss_by_hand(tiny_qwen3):
    """One epoch, one batch of all pairs: the mean over pairs of -log sigmoid of the initial scores' difference."""
    model = make_model(tiny_qwen3())
    pairs = make_pairs(model, tasks=3)
    winners, losers = (model.scores([getattr(p, side) for p in pairs]).tolist() for side in ("winner", "loser"))
    expected = sum(math.log1p(math.exp(low - high)) for high, low in zip(winners, losers, strict=True)) / len(pairs)
    report = fit_reward_model(model, pairs, Stream(0, "order"), **{**SETTINGS, "epochs": 1, "batch_size": 100})
    assert_close(report.loss, expected, rtol=1e-5, atol=0)
    assert math.isnan(report.held_out_accuracy) and report.held_out_pairs == 0


def test_a_gradient_step_is_clipped(tiny_qwen3, monkeypatch):
    """The norm that reaches the optimiser is at most max_grad_norm."""
    model = make_model(tiny_qwen3())
    norms = []
    step = torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        norms.append(float(sum(p.grad.pow(2).sum() for group in self.param_groups for p in group["params"])) ** 0.5)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    fit_reward_model(model, make_pairs(model), Stream(0, "order"), **{**SETTINGS, "max_grad_norm": 1e-3})
    assert len(norms) == 10 and max(norms) <= 1.001e-3


def test_every_step_takes_the_gradient_of_its_own_batch_alone(tiny_qwen3, monkeypatch):
    """At a learning rate of 0 the second epoch's gradient equals the first one's; it would be double if it piled up."""
    model = make_model(tiny_qwen3())
    seen = []
    step = torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    settings = {**SETTINGS, "learning_rate": 0.0, "batch_size": 100, "max_grad_norm": 1e6}
    fit_reward_model(model, make_pairs(model, tasks=1), Stream(0, "order"), **settings)
    assert len(seen) == 2
    assert relative_difference(seen[1], seen[0]) < 1e-5


def test_a_fit_without_pairs_is_refused(tiny_qwen3):
    with pytest.raises(ValueError, match="pair"):
        fit_reward_model(make_model(tiny_qwen3()), [], Stream(0, "order"), **SETTINGS)


# --- who is held out, who shares a batch -----------------------------------------------------------------------------


def _plain_pairs(tasks: int, each: int) -> list[PreferencePair]:
    made = []
    for task, number in itertools.product(range(tasks), range(each)):
        sides = [trajectory([[((7,), (number, side))]], task_id=f"task{task}") for side in (0, 1)]
        made.append(PreferencePair(*sides, winner_is_agent=True, iteration=number))
    return made


@pytest.mark.parametrize("tasks, held", [(1, 0), (2, 1), (9, 1), (10, 1), (25, 2), (40, 4)])
def test_a_tenth_of_the_tasks_is_held_out_whole(tasks, held):
    pairs = _plain_pairs(tasks, 3)
    fitted, held_out = split_held_out(pairs, Stream(0, "split").generator())
    names = [{pair.task_id for pair in side} for side in (fitted, held_out)]
    assert len(names[1]) == held and not names[0] & names[1]
    assert len(held_out) == 3 * held and sorted(map(id, fitted + held_out)) == sorted(map(id, pairs))


def test_the_split_follows_its_generator():
    pairs = _plain_pairs(40, 1)

    def held(seed):
        return [p.task_id for p in split_held_out(pairs, Stream(seed, "split").generator())[1]]

    assert held(0) == held(0) != held(1)


def test_batches_hold_whole_tasks_and_every_pair_once_in_a_shuffled_order():
    pairs = _plain_pairs(7, 3)
    batches = task_batches(pairs, 4, Stream(0, "order").generator())
    assert [len(batch) for batch in batches] == [6, 6, 6, 3]
    for batch in batches:
        assert all(sum(p.task_id == name for p in batch) == 3 for name in {p.task_id for p in batch})
    flat = list(itertools.chain(*batches))
    assert sorted(map(id, flat)) == sorted(map(id, pairs)) and [p.task_id for p in flat] != [p.task_id for p in pairs]
    again = task_batches(pairs, 4, Stream(0, "order").generator())
    assert list(map(id, itertools.chain(*again))) == list(map(id, flat))
    other = task_batches(pairs, 4, Stream(1, "order").generator())
    assert list(map(id, itertools.chain(*other))) != list(map(id, flat))
