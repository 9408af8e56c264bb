"""The peer's side: the trainers of comlrl as they are, timed in the same two parts. Runs in comlrl's environment."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from comlrl.trainers.preference.iterative import MADPOIterConfig, MADPOIterTrainer
from comlrl.trainers.reinforce.magrpo import MAGRPOConfig, MAGRPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from work import AGENTS, Measurement, Stopwatch, Work, peak_mib, run_side


def measure(work: Work) -> Measurement:
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)  # comlrl draws from the global generator
    tokenizer = AutoTokenizer.from_pretrained(work.model_folder)
    # Given a name, comlrl would load the checkpoint's bfloat16, which is slower on a processor.
    agents = [AutoModelForCausalLM.from_pretrained(work.model_folder, dtype=torch.float32) for _ in range(AGENTS)]
    loaded, domain, tasks = peak_mib(), work.domain, work.tasks()
    prompts = [[as_chat(tokenizer, prompt) for prompt in domain.prompts(task)] for task in tasks]

    def reward(first: list[str], second: list[str], *, batch_items: list[dict[str, int]]) -> list[float]:
        task = tasks[batch_items[0]["task"]]
        return [domain.reward(list(texts), task).total for texts in zip(first, second, strict=True)]

    trainer_class, config = trainer_of(work)
    trainer = trainer_class(
        agents=agents,
        num_agents=AGENTS,
        tokenizer=tokenizer,
        train_dataset=[{"task": number} for number in range(len(tasks))],
        formatters=[lambda item, agent=agent: prompts[item["task"]][agent] for agent in range(AGENTS)],
        reward_func=reward,
        args=config,
    )
    watch, counts = Stopwatch(), count(trainer, work.method, tokenizer.pad_token_id)
    if work.method == "madpo":  # between the two it writes checkpoints, which are not timed
        watch.attach(trainer, "_build_preference_dataset", "collect")
        watch.attach(trainer, "_train_preference_pairs", "update")
        trainer.train()
    else:
        watch.attach(trainer, "_update_from_samples", "update")
        with watch.running("collect"):
            trainer.train()
        watch.seconds["collect"] -= watch.seconds["update"]
    return Measurement(
        versions={name: version(name) for name in ("comlrl", "torch", "transformers")},
        trained_parameters=sum(parameter.numel() for agent in agents for parameter in agent.parameters()),
        prompt_tokens=[len(tokenizer(prompt).input_ids) for of_task in prompts for prompt in of_task],
        collected=counts["answers"] // AGENTS,
        sampled_tokens=counts["tokens"],
        collect_seconds=watch.seconds["collect"],
        updated=counts["used"] // AGENTS,
        update_seconds=watch.seconds["update"],
        loaded_mib=loaded,
        peak_mib=peak_mib(),
    )


def trainer_of(work: Work) -> tuple[type, Any]:
    """comlrl's trainer of the method, and its configuration."""
    common = {
        "num_agents": AGENTS,
        "num_turns": 1,
        "num_train_epochs": 1,
        "max_new_tokens": work.new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,  # off
        "train_batch_size": work.batch_size,
        "eval_interval": 0,  # never
        "agent_devices": "cpu",
    }
    if work.method == "magrpo":
        groups = {"num_generations": work.generations, "rollout_buffer_size": work.batch_size}
        return MAGRPOTrainer, MAGRPOConfig(**common, **groups)
    collection = {"preference_num_candidates": work.samples, "preference_pairs_per_sample": work.pairs}
    return MADPOIterTrainer, MADPOIterConfig(**common, **collection, num_iterations=1, comparator_policy="current")


def as_chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt as text in the chat template; comlrl tokenises it."""
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)


def count(trainer: Any, method: str, pad: int) -> dict[str, int]:
    """Counts that grow as the trainer works: an agent's answers and their tokens, and its answers learnt from."""
    counts = {"answers": 0, "tokens": 0, "used": 0}
    generate = trainer._generate_completions_with_external_prompts

    def generate_and_count(*arguments: Any, **keywords: Any) -> dict[str, Any]:
        generated = generate(*arguments, **keywords)
        for answer in generated["completion_input_ids"][0]:
            counts["answers"] += 1
            counts["tokens"] += int((answer != pad).sum())
        return generated

    trainer._generate_completions_with_external_prompts = generate_and_count
    if method == "madpo":
        update_pairs = trainer._update_from_preference_batch

        def update_and_count(pairs: list[Any]) -> dict[str, float]:
            counts["used"] += 2 * AGENTS * len(pairs)
            return update_pairs(pairs)

        trainer._update_from_preference_batch = update_and_count
    else:
        update_groups = trainer._update_from_samples

        def update_groups_and_count(agent: int, samples: list[Any]) -> Any:
            counts["used"] += sum(len(sample.returns) for sample in samples)
            return update_groups(agent, samples)

        trainer._update_from_samples = update_groups_and_count
    return counts


if __name__ == "__main__":
    run_side(measure)
