"""With one agent our losses are those of TRL: its real trainers run on a tiny random model, ours on log-probabilities
that are recomputed here, one sequence at a time and without padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mapl_core.losses import group_relative_advantages, madpo_loss, magrpo_loss

pytest.importorskip("trl", reason="TRL is only a cross-check: pip install trl==1.14.2")

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
BETA = 0.3


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def random_model(seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,  # far from uniform, so that policy and reference differ
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def sequence_logprob(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Sum of the response tokens' log-probabilities, alone in its batch and without padding."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].float()
    return sum(logits[len(prompt) + t - 1].log_softmax(dim=0)[token] for t, token in enumerate(response))


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_dpo4_one_agent_is_the_dpo_loss_of_trl(tokenizer, tmp_path):
    """Value, gradient of every weight, rewards, margin and accuracy, on four pairs of unequal lengths."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": "a b c", "chosen": " d e", "rejected": " f"},
        {"prompt": "b", "chosen": " g", "rejected": " h i j k"},
        {"prompt": "c c d", "chosen": " l m n o p", "rejected": " a"},
        {"prompt": "p o", "chosen": " b b", "rejected": " e f g"},
    ]
    model, reference = random_model(1), random_model(2)
    ours = copy.deepcopy(model)
    config = DPOConfig(str(tmp_path), loss_type=["sigmoid"], beta=BETA, per_device_train_batch_size=len(rows), **QUIET)
    trainer = DPOTrainer(model, reference, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    examples = list(trainer.train_dataset)
    trl_loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    trl_loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    def logprobs(policy, side):
        return torch.stack([sequence_logprob(policy, e["prompt_ids"], e[side]) for e in examples]).reshape(-1, 1, 1)

    with torch.no_grad():
        reference_winner, reference_loser = logprobs(reference, "chosen_ids"), logprobs(reference, "rejected_ids")
    loss, metrics = madpo_loss(
        logprobs(ours, "chosen_ids"), logprobs(ours, "rejected_ids"), reference_winner, reference_loser, beta=BETA
    )
    loss.backward()

    assert abs(loss.item() - 0.6931) > 0.05  # far from the loss without any margin
    assert_close(loss, trl_loss)
    assert_close(gradients(ours), gradients(trainer.model), rtol=1e-4, atol=1e-6)
    for name, trl_name in (("chosen_reward", "chosen"), ("rejected_reward", "rejected"), ("margin", "margins")):
        assert metrics[name] == pytest.approx(logged[f"rewards/{trl_name}"], rel=1e-4)
    assert metrics["accuracy"] == logged["rewards/accuracies"]


def test_one_agent_magrpo_has_the_gradient_of_trl_grpo(tokenizer, tmp_path):
    """TRL samples, scores and centres; up to its length normaliser the gradient of every weight is ours."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    group_size, max_tokens = 4, 12
    sampled: list[list[int]] = []

    def reward(ids):
        return ids.count(3) - 0.25 * len(ids) + 0.01 * sum(ids)

    def trl_reward(prompts, completions, completion_ids, **_):
        sampled.extend(completion_ids)
        return [reward(ids) for ids in completion_ids]

    model = random_model(3)
    ours = copy.deepcopy(model)
    config = GRPOConfig(
        str(tmp_path),
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        temperature=1.0,
        num_generations=group_size,
        per_device_train_batch_size=2 * group_size,
        max_completion_length=max_tokens,
        disable_dropout=True,
        seed=4,
        **QUIET,
    )
    prompts = Dataset.from_list([{"prompt": "a b c"}, {"prompt": "d"}])
    trainer = GRPOTrainer(model, trl_reward, config, train_dataset=prompts, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1  # set by Trainer.train, which is not called here
    trainer.model.train()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        batch = trainer._generate_and_score_completions([row for row in prompts for _ in range(group_size)])
    trl_loss = trainer.compute_loss(trainer.model, batch)
    trl_loss.backward()

    lengths = [len(ids) for ids in sampled]
    assert len(sampled) == 2 * group_size and len(set(lengths)) > 1  # unequal, or a normaliser by length could hide
    prompt_ids = [tokenizer(row["prompt"])["input_ids"] for row in prompts for _ in range(group_size)]
    returns = torch.tensor([reward(ids) for ids in sampled]).reshape(2, group_size)
    advantages = group_relative_advantages(returns)
    assert_close(advantages.flatten(), batch["advantages"])
    logprobs = torch.stack([sequence_logprob(ours, p, r) for p, r in zip(prompt_ids, sampled, strict=True)])
    loss, _ = magrpo_loss(logprobs.reshape(2, group_size, 1, 1), advantages)
    loss.backward()

    theirs = {name: max_tokens * grad for name, grad in gradients(trainer.model).items()}
    assert max(grad.abs().max() for grad in theirs.values()) > 0.01
    assert_close(gradients(ours), theirs, rtol=1e-4, atol=1e-5)
