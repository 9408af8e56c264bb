"""The MAPL loop on tiny random models: what it counts, that it resumes, and what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import shutil
import traceback

import pytest
import torch
from chat_server import echo, good
from toy_domains import TARGETS, ToyDomain
from toy_models import trajectory

from mapl_core import domains, train
from mapl_core.buffers import PreferencePair
from mapl_core.domains.base import Domain
from mapl_core.endpoint import EndpointError
from mapl_core.evaluation import evaluate
from mapl_core.inputs import Inputs
from mapl_core.models import load_model
from mapl_core.profiles import ConfigError, RunConfig
from mapl_core.results import ResultError, folder_lock, read_manifest, read_progress, verify_job
from mapl_core.reward_model import RewardModel
from mapl_core.rewards import Reward
from mapl_core.seeding import Stream
from mapl_core.team import build_team
from mapl_core.train import run_mapl


class TiedDomain(ToyDomain):
    """Every answer is worth the same."""

    def reward(self, responses, task):
        return Reward(1.0, {"constant": 1.0})


@pytest.fixture(autouse=True)
def toy_domains(monkeypatch):
    monkeypatch.setitem(domains.DOMAINS, "toy", ToyDomain)
    monkeypatch.setitem(domains.DOMAINS, "tied", TiedDomain)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with its tokenizer, as a local folder."""
    from conftest import tiny_qwen3

    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_qwen3.__wrapped__()()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def config(model_folder):
    def make(method="madpo", paradigm="dec-dec", **changes) -> RunConfig:
        values = {
            "profile": "test",
            "domain": "toy",
            "agent_models": [model_folder],
            "central_model": model_folder,
            "train_tasks": 4,
            "eval_tasks": 2,
            "eval_samples": 2,
            "max_new_tokens": [6],
            "iterations": 2,
            "samples_per_task": 4,
            "pairs_per_task": 2,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "reward_model_epochs": 1,
            "reward_model_tokens": 128,
            **changes,
        }
        return RunConfig(method=method, paradigm=paradigm, **values)

    return make


def value(result, metric, iteration):
    """Of a RunResult, or of a run under way."""
    return next(row.value for row in result.metrics if (row.metric, row.iteration) == (metric, iteration))


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("method", ["madpo", "marlhf", "magrpo", "collm_cc", "collm_dc"])
def test_every_method_moves_every_agent_of_teams_of_one_two_and_three(config, tmp_path, method, agents):
    settings = config(method, domain_options={"num_agents": agents}, iterations=1)
    before = build_team(settings).policy.snapshot()
    run_mapl(settings, tmp_path, progress=False)
    trained = build_team(settings).policy
    trained.load(tmp_path / "adapters")
    assert len(before) == agents
    for old, new in zip(before, trained.snapshot(), strict=True):
        assert any(not torch.equal(old[name], new[name]) for name in old)
    assert verify_job(tmp_path)["status"] == "done"


@pytest.mark.parametrize("method", ["madpo", "marlhf", "magrpo", "collm_cc"])
@pytest.mark.parametrize("paradigm", ["dec-dec", "cen-cen"])
def test_two_turns_train_and_count_twice_the_steps(config, tmp_path, method, paradigm):
    one = run_mapl(config(method, paradigm, iterations=1), tmp_path / "one", progress=False)
    two = run_mapl(
        config(method, paradigm, iterations=1, domain_options={"horizon": 2}), tmp_path / "two", progress=False
    )
    steps = [max(row.env_steps for row in result.metrics) for result in (one, two)]
    if method == "madpo":  # ties may drop pairs
        assert steps[1] > 0 and steps[1] % 2 == 0
    else:
        assert steps == [16, 32]  # 4 tasks x G 4, over one and two turns


def test_env_steps_are_trained_samples_and_all_samples_are_counted_beside_them(config, tmp_path):
    result = run_mapl(config("madpo"), tmp_path, progress=False)
    pairs = [value(result, "preferences/pairs", iteration) for iteration in (1, 2)]
    # The decay buffer's training set is as large as the newest shard; a pair is two joint responses.
    assert max(row.env_steps for row in result.metrics) == 2 * sum(pairs)
    assert value(result, "count/agent_samples", 2) == value(result, "count/comparator_samples", 2) == 2 * 4 * 4
    assert value(result, "count/oracle_calls", 2) == 2 * 2 * 4 * 4
    for name in ("env_steps", "sampled_tokens", "oracle_calls"):
        counts = [value(result, f"count/{name}", iteration) for iteration in (0, 1, 2)]
        assert counts == sorted(counts) and counts[0] == 0 < counts[2]


def test_magrpo_trains_on_epochs_times_groups_and_never_collects_preferences(config, tmp_path):
    result = run_mapl(config("magrpo", epochs=2), tmp_path, progress=False)
    assert max(row.env_steps for row in result.metrics) == 2 * 2 * 4 * 4  # iterations, epochs, tasks, G
    assert not any(row.metric.startswith("preferences/") for row in result.metrics)
    assert value(result, "count/agent_samples", 2) == value(result, "count/oracle_calls", 2) == 2 * 2 * 4 * 4
    assert value(result, "count/sampled_tokens", 2) >= 2 * 2 * 2 * 4 * 4  # every agent writes at least one token
    assert {row.comparator for row in result.metrics} == {"none"}


def test_marlhf_counts_collected_and_trained_samples_but_not_the_oracle_it_does_not_ask(config, tmp_path):
    result = run_mapl(config("marlhf"), tmp_path, progress=False)
    collected, trained = 2 * 4 * 4, 2 * 4 * 4  # iterations x tasks x m, and x G
    assert value(result, "count/agent_samples", 2) == collected + trained
    assert value(result, "count/comparator_samples", 2) == collected
    assert value(result, "count/oracle_calls", 2) == 2 * collected
    assert value(result, "count/env_steps", 2) == trained


def test_a_finished_run_is_read_back_and_another_configuration_or_a_damaged_file_is_trained_anew(
    config, tmp_path, monkeypatch, capsys
):
    first = run_mapl(config("madpo"), tmp_path, progress=False)
    built = []
    monkeypatch.setattr(train, "build_team", lambda config: built.append(config.seed) or build_team(config))
    again = run_mapl(config("madpo"), tmp_path)
    assert not built and "nothing is trained again" in capsys.readouterr().out
    assert again == first
    run_mapl(config("madpo", seed=1), tmp_path, progress=False)
    assert built == [1]
    (tmp_path / "metrics.csv").write_text("")
    run_mapl(config("madpo", seed=1), tmp_path, progress=False)
    assert built == [1, 1] and (tmp_path / "metrics.csv").stat().st_size


def test_seed1_equal_runs_write_equal_bytes_and_another_seed_does_not(config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_mapl(config("marlhf", seed=seed), tmp_path / name, progress=False)
    content = {name: (tmp_path / name / "metrics.csv").read_bytes() for name in "abc"}
    assert content["a"] == content["b"]
    assert content["a"].replace(b",0,", b",") != content["c"].replace(b",1,", b",")


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the loop sees it."""


@pytest.mark.parametrize(
    "method, changes",
    [
        ("madpo", {"comparator": "last", "reference": "previous"}),
        ("madpo", {"buffer": "offline"}),
        ("marlhf", {"selection": "proxy", "iterations": 3}),
        ("magrpo", {"normalize": "mean_std"}),
        ("collm_dc", {}),
        ("single_ppo", {"paradigm": "single", "clip_ratio": 0.2, "passes": 2}),
        ("single_grpo", {"paradigm": "single", "clip_ratio": 0.2}),
        ("single_dpo", {"paradigm": "single"}),
    ],
)
def test_save1_a_killed_run_ends_with_the_numbers_and_weights_of_an_undisturbed_one(
    config, tmp_path, monkeypatch, method, changes
):
    settings = config(method, **changes)
    run_mapl(settings, tmp_path / "undisturbed", progress=False)
    original, calls = train._Run.evaluate, []

    def dies_once(self, finished):
        calls.append(finished)
        if calls.count(2) == 1 and finished == 2:
            raise Killed
        original(self, finished)

    monkeypatch.setattr(train._Run, "evaluate", dies_once)
    with pytest.raises(Killed):
        run_mapl(settings, tmp_path / "killed", progress=False)
    assert (tmp_path / "killed" / "checkpoint.pt").is_file() and not (tmp_path / "killed" / "manifest.json").exists()
    run_mapl(settings, tmp_path / "killed", progress=False)
    assert calls.count(0) == 1  # it did not start again
    last = "single" if settings.paradigm == "single" else "agent1"
    for name in ("metrics.csv", "evaluation.csv", "examples.json", f"adapters/{last}/adapter_model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


def test_save2_a_run_does_not_go_on_in_another_arithmetic(config, tmp_path, monkeypatch):
    """A checkpoint of a GPU in bfloat16 on a machine without one: neither the one run nor the other."""
    original = train._Run.evaluate

    def dies(self, finished):
        if finished == 1:
            raise Killed
        original(self, finished)

    monkeypatch.setattr(train._Run, "evaluate", dies)
    with pytest.raises(Killed):
        run_mapl(config("madpo"), tmp_path, progress=False)
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert state["arithmetic"] == "cpu, torch.float32"
    torch.save(state | {"arithmetic": "cuda, torch.bfloat16"}, path)
    with pytest.raises(RuntimeError, match=r"made on cuda, torch\.bfloat16, this is cpu, torch\.float32\); delete it"):
        run_mapl(config("madpo"), tmp_path, progress=False)


def test_save2_a_checkpoint_of_another_configuration_or_a_broken_one_is_refused_by_name(config, tmp_path):
    torch.save({"fingerprint": "other"}, tmp_path / "checkpoint.pt")
    with pytest.raises(RuntimeError, match="checkpoint.pt belongs to another configuration"):
        run_mapl(config(), tmp_path, progress=False)
    (tmp_path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(RuntimeError, match="checkpoint.pt cannot be read"):
        run_mapl(config(), tmp_path, progress=False)


def change_losses(monkeypatch) -> None:
    """From here on the code of losses.py counts as another."""
    record = Inputs.of

    def changed(self, config):
        made = record(self, config)
        return made | {"code": made["code"] | {"mapl_core.losses": "another digest"}}

    monkeypatch.setattr(Inputs, "of", changed)


def test_save4_a_finished_run_made_by_other_code_is_trained_anew(config, tmp_path, monkeypatch):
    run_mapl(config("madpo"), tmp_path, progress=False)
    built = []
    monkeypatch.setattr(train, "build_team", lambda config: built.append(config.seed) or build_team(config))
    change_losses(monkeypatch)
    run_mapl(config("madpo"), tmp_path, progress=False)
    assert built == [0]
    assert read_manifest(tmp_path / "manifest.json")["inputs"]["code"]["mapl_core.losses"] == "another digest"


def test_save4_a_checkpoint_says_how_far_it_is_and_is_refused_by_other_code(config, tmp_path, monkeypatch):
    settings = config("madpo", iterations=4)
    run = train._Run(settings, build_team(settings), tmp_path)
    run.finished = 1
    run.checkpoint()
    progress = read_progress(tmp_path)
    assert (progress["iteration"], progress["iterations"], progress["fraction"]) == (1, 4, 0.25)
    assert progress["parameters"]["method"] == "madpo" and "mapl_core.losses" in progress["inputs"]["code"]
    change_losses(monkeypatch)
    with pytest.raises(RuntimeError, match=r"another configuration or code \(the code of losses has changed\); delete"):
        run_mapl(settings, tmp_path, progress=False)


def test_a_second_run_in_the_same_folder_is_refused_with_the_number_of_the_first(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "folder_lock", lambda folder, **_: folder_lock(folder))  # without the waiting
    with folder_lock(tmp_path), pytest.raises(ResultError, match=f"in use by process {os.getpid()}"):
        run_mapl(config(), tmp_path, progress=False)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_joint_critic_refuses_agents_whose_ids_mean_different_texts(config, tmp_path, model_folder):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    models = [model_folder, str(other)]
    with pytest.raises(ValueError, match="different bases.*use collm_dc"):
        run_mapl(config("collm_cc", agent_models=models, iterations=1), tmp_path / "cc", progress=False)
    run_mapl(config("collm_dc", agent_models=models, iterations=1), tmp_path / "dc", progress=False)


def test_dpo5_a_run_whose_comparisons_all_tie_says_so_takes_no_step_and_leaves_nothing(config, tmp_path):
    with pytest.raises(RuntimeError, match=r"all 16 comparisons of iteration 0 tied.*Raise samples_per_task"):
        run_mapl(config(domain="tied"), tmp_path / "new" / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error, iteration, kept",
    [(RuntimeError, 0, False), (KeyboardInterrupt, 0, True), (RuntimeError, 1, True)],
)
def test_save2_a_checkpoint_stays_where_a_run_can_go_on_from_it(config, tmp_path, monkeypatch, error, iteration, kept):
    """An error before the first iteration is done will come again; an interruption, or a later error, need not."""
    original = train._Run.update_from_preferences

    def stop(self, at, training_set):
        if at == iteration:
            raise error("stopped by the test")
        original(self, at, training_set)

    monkeypatch.setattr(train._Run, "update_from_preferences", stop)
    with pytest.raises(error):
        run_mapl(config(), tmp_path, progress=False)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"checkpoint.pt", "progress.json"} if kept else set())


def test_a_folder_that_cannot_be_written_is_an_error_before_any_model_is_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr("mapl_core.team.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "out"
    with pytest.raises(ResultError, match=f"results folder {folder} cannot be written to.*OUTPUT_DIR"):
        run_mapl(config(), folder, progress=False)


@pytest.mark.parametrize("micro_batch_tokens", [8192, 32])
def test_dpo6_a_loss_that_is_not_finite_changes_no_weight_and_no_optimizer_state(config, micro_batch_tokens):
    settings = config(micro_batch_tokens=micro_batch_tokens)
    team = build_team(settings)
    optimizer = train.TeamOptimizer(team.policy, settings)
    trajectories = team.policy.sample(team.train_tasks[:1], 4, Stream(0, "test"))[0]
    before = team.policy.snapshot()
    for poison in (math.nan, math.inf):
        with pytest.raises(FloatingPointError):
            optimizer.step(trajectories, lambda logprobs, p=poison: logprobs.sum() * p)
    for old, new in zip(before, team.policy.snapshot(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(not state["state"] for state in optimizer.state())


def test_rl7_the_step_does_not_depend_on_the_micro_batch(config):
    """One micro-batch with its graph, and many without, lead to the same weights."""
    moved = []
    for tokens in (8192, 24):
        settings = config(micro_batch_tokens=tokens, learning_rate=1e-3)
        team = build_team(settings)
        optimizer = train.TeamOptimizer(team.policy, settings)
        trajectories = [t for group in team.policy.sample(team.train_tasks, 2, Stream(0, "test")) for t in group]
        signs = torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
        for _ in range(3):
            optimizer.step(trajectories, lambda logprobs: (signs * logprobs).mean())
        moved.append(team.policy.logprobs(trajectories))
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-4)


def test_offline_madpo_trains_on_every_collected_pair_once(config, tmp_path, monkeypatch):
    trained = []
    original = train.update_madpo

    def recording(policy, optimizer, pairs, stream, settings):
        trained.append([id(pair) for pair in pairs])
        return original(policy, optimizer, pairs, stream, settings)

    monkeypatch.setattr(train, "update_madpo", recording)
    result = run_mapl(config(buffer="offline"), tmp_path, progress=False)
    assert value(result, "count/agent_samples", 2) == 2 * 4 * 4  # the whole budget, collected at once
    seen = [pair for part in trained for pair in part]
    assert len(seen) == len(set(seen)) == value(result, "preferences/pairs", 1)
    assert all(trained)  # every iteration has its part


def toy_pairs(*counts: int) -> list[PreferencePair]:
    """So many pairs of each task."""
    sides = [trajectory([[((7,), (8,))] * 2], task_id=f"task{task}") for task in range(len(counts))]
    return [PreferencePair(sides[task], sides[task], True) for task, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("counts, sizes", [((2, 2, 2), (2, 2, 1, 1)), ((1, 1, 1, 1), (1,) * 4), ((8, 8), (4,) * 4)])
def test_offline_madpo_has_pairs_for_every_iteration_where_no_task_has_enough(config, tmp_path, counts, sizes):
    """Also where every task has fewer pairs than there are iterations."""
    settings = config(buffer="offline", iterations=4)
    run = train._Run(settings, build_team(settings), tmp_path)
    run.buffer.add(toy_pairs(*counts))
    parts = [run.collect_preferences(iteration) for iteration in (1, 2, 3)]  # the first one would collect
    parts = [run._offline_part(0), *parts]
    assert tuple(map(len, parts)) == sizes
    assert sorted(id(pair) for part in parts for pair in part) == sorted(map(id, run.buffer.shards[0]))
    if counts == (8, 8):  # the pairs of each task are spread over the iterations
        assert all([pair.task_id for pair in part] in (["task0"] * 2 + ["task1"] * 2, ["task1"] * 2 + ["task0"] * 2)
                   for part in parts)  # fmt: skip


def test_offline_madpo_with_fewer_pairs_than_iterations_stops_at_once_and_leaves_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "select_pairs", lambda pairs, k, **_: pairs[:1])
    settings = config(buffer="offline", iterations=5, train_tasks=3, samples_per_task=2)
    with pytest.raises(RuntimeError, match=r"gave 3 preference pairs for 5 iterations.*samples_per_task.*iterations"):
        run_mapl(settings, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


# --- what is logged --------------------------------------------------------------------------------------------------


def answer(task_id: str, texts: tuple[str, str], reward: float):
    return trajectory([[((7,), (8,)), ((7,), (9,))]], task_id=task_id, reward=reward, responses=[texts])


def test_dpo11_the_log_of_a_collection_counts_ties_winners_and_losers(config, tmp_path, monkeypatch):
    """Two tasks, four comparisons each; the numbers are counted by hand."""
    settings = config(train_tasks=2, samples_per_task=4, pairs_per_task=4)
    run = train._Run(settings, build_team(settings), tmp_path)
    first, second = (task.id for task in run.team.train_tasks)
    agents = [
        [answer(first, texts, r) for texts, r in ((("a", "x"), 3), (("b", "x"), 2), (("c", "x"), 1), (("d", "x"), 2))],
        [answer(second, ("a", "x"), 1) for _ in range(4)],
    ]
    others = [
        [answer(first, texts, r) for texts, r in ((("u", "y"), 1), (("v", "y"), 2), (("w", "y"), 4), (("u", "y"), 1))],
        [answer(second, ("u", "y"), r) for r in (1, 1, 1, 0)],
    ]
    monkeypatch.setattr(run.policy, "sample", lambda *_: agents)
    monkeypatch.setattr(run.team.comparator, "sample", lambda *_: others)
    assert len(run.collect_preferences(0)) == 4
    expected = {
        "ties": 1 + 3,  # of the first task the second comparison, of the second the first three
        "pairs": 3 + 1,  # (a over u), (w over c), (d over u); (a over u)
        "agent_wins": 3 / 4,
        "winner_return": (3 + 4 + 2 + 1) / 4,
        "gap": (2 + 3 + 1 + 1) / 4,
        "distinct_winners": (3 + 1) / 2,  # a, w, d; a
        "distinct_losers": (2 + 1) / 2,  # u, c; u
        "agent_reward": (8 + 4) / 8,
        "comparator_reward": (8 + 3) / 8,
        "comparator_empty": 0,
    }
    found = {row.metric.removeprefix("preferences/"): row.value for row in run.metrics}
    assert found == pytest.approx(expected)


SPLIT = [("a", ""), ("", " "), ("a", "b"), ("a", "b")]  # sections of four coordinator's answers


def test_the_evaluation_counts_the_sections_that_it_could_not_read_agent_by_agent(config, monkeypatch):
    for paradigm, expected in (("cen-cen", {"unparsed/agent0": 0.25, "unparsed/agent1": 0.5}), ("dec-dec", {})):
        team = build_team(config(paradigm=paradigm))
        task = team.eval_tasks[0]
        actions = [[((7,), (8,))] * len(team.policy.members)]
        played = [trajectory(actions, task_id=task.id, responses=[texts]) for texts in SPLIT]
        monkeypatch.setattr(team.policy, "sample", lambda *_, played=played, **options: [played])
        by_task, _ = evaluate(team.policy, [task], 4, Stream(0, "evaluate"))
        found = {name: number for name, number in by_task[task.id].items() if name.startswith("unparsed")}
        assert found == expected


def test_what_a_domain_says_of_the_team_as_a_whole_is_a_metric_of_every_evaluation(config, tmp_path, monkeypatch):
    settings, seen = config(iterations=2), []

    def count(_, answers):
        seen.append([(task.id, len(responses), {len(texts) for texts in responses}) for task, responses in answers])
        return {"calls": len(seen)}

    monkeypatch.setattr(Domain, "team_metrics", count)
    result = run_mapl(settings, tmp_path, progress=False)
    assert [row.value for row in result.metrics if row.metric == "team/calls"] == [1.0, 2.0, 3.0]
    tasks = [task.id for task in build_team(settings).eval_tasks]
    assert seen == [[(name, settings.eval_samples, {2}) for name in tasks]] * 3


def test_fewer_samples_for_the_curves_change_the_evaluations_between_first_and_last_alone(config, tmp_path):
    whole = run_mapl(config("marlhf", iterations=3), tmp_path / "whole", progress=False)
    fewer = run_mapl(config("marlhf", iterations=3, curve_samples=1), tmp_path / "fewer", progress=False)
    rows = [{(row.metric, row.iteration): row.value for row in result.metrics} for result in (whole, fewer)]
    changed = {name for name, iteration in rows[0] if rows[0][name, iteration] != rows[1][name, iteration]}
    assert "score" in changed and not {name for name in changed if name.startswith(("train/", "preferences/"))}
    for iteration in (0, 3):
        assert all(rows[0][key] == rows[1][key] for key in rows[0] if key[1] == iteration)
    # Those that are left are the first of the whole evaluation; examples.json shows the first answer to each task.
    shown = [json.loads((tmp_path / name / "examples.json").read_text()) for name in ("whole", "fewer")]
    assert shown[0] == shown[1] and shown[0].keys() == {"0", "1", "2", "3"}
    assert sum(row.iteration == 1 and row.metric == "score" for row in fewer.evaluation) == 2  # each task, once


def test_a_greedy_evaluation_does_not_depend_on_the_seed_while_training_still_samples(config, tmp_path):
    answers = {}
    for temperature in (None, 0.0):
        for seed in (0, 1):
            options = {"seed": seed, "eval_temperature": temperature, "eval_samples": 1, "iterations": 1}
            result = run_mapl(config(**options), tmp_path / f"{temperature}-{seed}", progress=False)
            examples = json.loads((result.folder / "examples.json").read_text())
            answers[temperature, seed] = [example["responses"] for example in examples["0"]]
    assert answers[0.0, 0] == answers[0.0, 1], "the same base, greedily"
    assert answers[None, 0] != answers[None, 1]


@pytest.mark.parametrize("paradigm, sides", [("cen-cen", {"agent", "comparator"}), ("dec-cen", {"comparator"}),
                                             ("dec-dec", set())])  # fmt: skip
def test_a_collection_counts_the_sections_of_every_coordinator_that_could_not_be_read(
    config, tmp_path, paradigm, sides
):
    settings = config(paradigm=paradigm)
    run = train._Run(settings, build_team(settings), tmp_path)
    agents = [[answer("t", texts, 0) for texts in SPLIT]]
    others = [[answer("t", texts[::-1], 0) for texts in SPLIT]]
    run.record_preferences(0, agents, others, [], 4)
    expected = {}
    for side, shares in (("agent", (0.25, 0.5)), ("comparator", (0.5, 0.25))):
        if side in sides:
            expected |= {f"preferences/{side}_unparsed/agent{i}": share for i, share in enumerate(shares)}
    assert {row.metric: row.value for row in run.metrics if "unparsed" in row.metric} == expected


@pytest.mark.parametrize("paradigm, policies", [("dec-dec", ("agent0", "agent1")), ("cen-cen", ("coordinator",))])
def test_dpo10_a_madpo_run_logs_the_lengths_of_winners_and_losers_of_each_policy_and_of_the_team(
    config, tmp_path, paradigm, policies
):
    result = run_mapl(config(paradigm=paradigm, iterations=1), tmp_path, progress=False)
    for side in ("winner", "loser"):
        lengths = [value(result, f"train/{side}_length_{name}", 1) for name in policies]
        assert all(1 <= length <= 12 for length in lengths)  # limits: 6 for an agent, their sum for a coordinator
        assert value(result, f"train/{side}_length", 1) == pytest.approx(sum(lengths))


# --- the oracle alone evaluates --------------------------------------------------------------------------------------


def test_rm4_the_evaluation_takes_no_reward_model_and_a_poisoned_one_changes_no_oracle_number(
    config, tmp_path, monkeypatch
):
    assert "reward" not in " ".join(inspect.signature(evaluate).parameters)
    settings = config("marlhf", iterations=1)
    team = build_team(settings)
    honest, played = evaluate(team.policy, team.eval_tasks, 2, Stream(0, "evaluate"))
    monkeypatch.setattr(RewardModel, "scores", lambda self, trajectories: torch.full((len(trajectories),), 1e9))
    assert evaluate(team.policy, team.eval_tasks, 2, Stream(0, "evaluate"))[0] == honest
    by_hand = {
        task.id: sum(ToyDomain().reward(list(t.responses[0]), task).total for t in played if t.task_id == task.id) / 2
        for task in team.eval_tasks
    }
    assert {task_id: measured["reward"] for task_id, measured in honest.items()} == pytest.approx(by_hand)


def test_rm4_a_whole_run_with_a_poisoned_reward_model_writes_the_same_evaluation(config, tmp_path, monkeypatch):
    """Poisoned while evaluating: every oracle number stays. Poisoned throughout: those of the untrained team stay."""
    settings = config("marlhf", iterations=2)
    scores, evaluating, poison = RewardModel.scores, [False], 1e9

    def poisoned(self, trajectories, only_evaluating):
        if only_evaluating and not evaluating[0]:
            return scores(self, trajectories)
        return torch.full((len(trajectories),), poison)

    original = train._Run.evaluate

    def evaluation(self, finished):
        evaluating[0] = True
        original(self, finished)
        evaluating[0] = False

    monkeypatch.setattr(train._Run, "evaluate", evaluation)
    runs = {"honest": run_mapl(settings, tmp_path / "honest", progress=False)}
    for name, only_evaluating in (("evaluation", True), ("throughout", False)):
        monkeypatch.setattr(RewardModel, "scores", lambda self, t, only=only_evaluating: poisoned(self, t, only))
        runs[name] = run_mapl(settings, tmp_path / name, progress=False)

    written = {name: (tmp_path / name / "evaluation.csv").read_bytes() for name in runs}
    assert written["evaluation"] == written["honest"]
    both = zip(runs["honest"].metrics, runs["evaluation"].metrics, strict=True)
    assert [a.metric for a, b in both if repr(a) != repr(b)] == ["reward_model/evaluation_reward"] * 2
    assert value(runs["evaluation"], "reward_model/evaluation_reward", 1) == poison
    first = {name: [row for row in run.evaluation if row.iteration == 0] for name, run in runs.items()}
    assert first["throughout"] == first["honest"] != []


def test_rm7_learned_and_oracle_reward_stand_side_by_side_after_every_iteration(config, tmp_path):
    result = run_mapl(config("marlhf"), tmp_path, progress=False)
    for iteration in (1, 2):
        assert math.isfinite(value(result, "reward_model/evaluation_reward", iteration))
        assert math.isfinite(value(result, "reward", iteration))


@pytest.mark.parametrize("algorithm", ["magrpo", "collm_cc", "collm_dc"])
def test_every_algorithm_logs_how_often_its_reward_orders_answers_as_the_oracle_does(config, tmp_path, algorithm):
    """The oracle against itself is always right; its reward is then also the reward trained on."""
    result = run_mapl(config(algorithm, iterations=1), tmp_path / "oracle", progress=False)
    assert value(result, "train/oracle_agreement", 1) == 1.0
    assert value(result, "train/reward", 1) == pytest.approx(value(result, "train/oracle_reward", 1))
    learned = run_mapl(config("marlhf", marl_algorithm=algorithm, iterations=1), tmp_path / "learned", progress=False)
    assert 0.0 <= value(learned, "train/oracle_agreement", 1) <= 1.0


def test_dec_cen_scores_a_coordinators_sections_under_the_agents_own_prompts(config):
    team = build_team(config(paradigm="dec-cen", comparator="model"))
    task = team.train_tasks[0]
    adopted = team.comparator.sample([task], 2, Stream(0, "comparator"))[0]
    own = team.policy.sample([task], 1, Stream(0, "collect"))[0][0]
    end = team.policy.members[0].base.tokenizer.eos_token_id
    for played in adopted:
        assert [action.prompt_ids for action in played.actions[0]] == [action.prompt_ids for action in own.actions[0]]
        assert all(action.token_ids[-1] == end for action in played.actions[0])


def test_the_manifest_holds_every_effective_parameter_and_where_the_weights_came_from(config, tmp_path):
    settings = config("untrained")
    run_mapl(settings, tmp_path, progress=False)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["parameters"] == json.loads(json.dumps(dataclasses.asdict(settings)))
    assert settings.agent_models[0] in manifest["model"]
    assert manifest["tasks"]["counts"] == {"train": 0, "eval": 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pairs_per_task": 0}, r"pairs_per_task \(k\) is 0"),
        ({"samples_per_task": 1}, r"samples_per_task \(m\) is 1 and pairs_per_task \(k\) is 2"),
        ({"method": "magrpo", "num_generations": 1}, r"num_generations \(G\) is 1"),
        ({"method": "ppo"}, "unknown method 'ppo'; valid: single_raw, single_grpo"),
        ({"paradigm": "dec"}, "unknown paradigm 'dec'"),
        ({"paradigm": "cen-dec"}, "unknown paradigm 'cen-dec'"),
        ({"domain": "chess"}, "unknown domain 'chess'"),
        ({"temperature": 0.0}, "greedy samples"),
        ({"eval_temperature": 0.0}, "eval_samples is 2: greedy answers are all equal; set it to 1"),
        ({"curve_samples": 0}, "curve_samples is 0; it must be at least 1"),
        ({"eval_temperature": -0.1}, "eval_temperature is -0.1; it must be at least 0"),
        ({"max_new_tokens": [6, 6, 6]}, "max_new_tokens is"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"buffer": "ring"}, "unknown buffer 'ring'"),
        ({"selection": "proxy"}, "selection 'proxy' ranks .* method 'madpo' fits none"),
        ({"method": "magrpo", "selection": "proxy"}, "method 'magrpo' fits none.*marlhf"),
        ({"selection": "good_comparator"}, "good_comparator.*selection_component"),
        ({"clip_ratio": 0.0}, r"clip_ratio is 0.0; it must lie in \(0, 1\)"),
        ({"clip_ratio": 1.0}, r"clip_ratio is 1.0"),
        ({"buffer_decay": -0.1}, r"buffer_decay is -0.1; it must lie in \[0, 1\]"),
        ({"buffer_decay": 1.1}, r"buffer_decay is 1.1"),
        ({"buffer_delay": -1}, "buffer_delay is -1; it must be at least 0"),
        ({"buffer_size": 0}, "buffer_size is 0; it must be at least 1 pair"),
        ({"annotator_temperature": 0.0}, "annotator_temperature is 0.0; it must be positive"),
        ({"annotator_flip_probability": -0.1}, r"annotator_flip_probability is -0.1; it must lie in \[0, 1\)"),
        ({"annotator_flip_probability": 1.0}, r"annotator_flip_probability is 1.0"),
        ({"max_new_tokens": [0]}, "max_new_tokens is"),
        ({"reward_model_tokens": 0}, "reward_model_tokens is 0"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"value_coef": -1.0}, "value_coef is -1.0"),
        ({"discount": 1.5}, r"discount is 1.5; it must lie in \[0, 1\]"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_impossible_configurations_name_the_value_before_anything_is_loaded(config, monkeypatch, changes, message):
    monkeypatch.setattr("mapl_core.team.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_ratio": 0.2, "buffer_decay": 0.0, "buffer_size": 1, "annotator_flip_probability": 0.0, "top_k": None},
        {"clip_ratio": None, "buffer_decay": 1.0, "buffer_size": None, "selection": "good_comparator",
         "selection_component": "hits"},
        {"method": "marlhf", "selection": "proxy"},
    ],
)  # fmt: skip
def test_values_at_the_ends_of_their_ranges_are_accepted(config, changes):
    settings = config(**changes)
    assert {name: getattr(settings, name) for name in changes} == changes


def test_the_models_of_a_run_are_those_that_it_loads(config, model_folder):
    assert config(central_model="big").model_names == [model_folder]
    assert config(paradigm="cen-cen", central_model="big").model_names == ["big"]
    assert config(paradigm="dec-cen", comparator="model", central_model="big").model_names == [model_folder, "big"]
    other = config(paradigm="dec-cen", comparator="model", central_model="big", comparator_model="other")
    assert other.model_names == [model_folder, "other"]
    assert config("magrpo", comparator="model", central_model="big").model_names == [model_folder]
    assert config(agent_models=["a", "b"]).model_names == ["a", "b"]


def test_a_comparator_that_is_no_model_is_refused_before_the_agents_are_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr("mapl_core.team.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "bare").mkdir()
    settings = config(paradigm="dec-cen", comparator="model", comparator_model=str(tmp_path / "bare"))
    with pytest.raises(ValueError, match="bare has no config.json"):
        run_mapl(settings, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_model_path_without_a_tokenizer_is_refused_before_training(config, tmp_path, model_folder):
    bare = tmp_path / "bare"
    load_model(model_folder).model.save_pretrained(bare)
    with pytest.raises((ValueError, OSError), match="tokenizer"):
        run_mapl(config(agent_models=[str(bare)]), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


# -- an endpoint as comparator -----------------------------------------------------------------------------------------

KEY_VARIABLE, MARK = "MAPL_TEST_KEY", "sk-MARKED-7f3a91-not-a-key"


@pytest.fixture
def endpoint(chat_server, tmp_path, monkeypatch):
    """Settings of a loopback endpoint that answers with two words of the toy language, by the request's seed."""
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(KEY_VARIABLE, MARK)
    chat_server.default = good(lambda seen: f"{TARGETS[seen.body['seed'] % 8]} , {TARGETS[seen.body['seed'] % 5]}")
    return {"url": chat_server.url, "model": "tiny", "key_variable": KEY_VARIABLE, "timeout": 10.0}


def written(folder):
    """Every byte of every file below a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize(
    ("method", "paradigm", "policies"),
    [("madpo", "dec-dec", 2), ("madpo", "dec-cen", 1), ("marlhf", "cen-cen", 1), ("single_dpo", "single", 1)],
)
def test_a_run_against_an_endpoint_records_what_it_asked_and_what_that_cost(
    config, endpoint, chat_server, tmp_path, caplog, method, paradigm, policies
):
    caplog.set_level("DEBUG")
    prices = {"input_price": 2.0, "output_price": 8.0}
    settings = config(method, paradigm, comparator="api", endpoint=endpoint | prices)
    result = run_mapl(settings, tmp_path / "out", progress=False)
    asked = 2 * 4 * 4 * policies  # iterations x tasks x m
    assert len(chat_server.requests) == asked
    assert value(result, "count/comparator_samples", 2) == 2 * 4 * 4
    record = read_manifest(tmp_path / "out" / "manifest.json")["notes"]["endpoint"]
    assert (record["url"], record["model"], record["answered_by"]) == (chat_server.url, "tiny", ["tiny-1"])
    assert record["sent"] == {
        "requests": asked, "truncated": 0, "empty": 0, "prompt_tokens": 11 * asked, "completion_tokens": 7 * asked,
        "uncounted": 0, "cost": pytest.approx(asked * (11 * 2 + 7 * 8) / 1e6),
    }  # fmt: skip
    assert record["kept"]["requests"] == 0 and {row.comparator for row in result.metrics} == {"api"}
    assert chat_server.requests[0].headers["authorization"] == f"Bearer {MARK}"
    assert MARK.encode() not in written(tmp_path) and MARK not in caplog.text


def test_save1_a_run_against_an_endpoint_that_was_killed_pays_for_nothing_twice(
    config, endpoint, chat_server, tmp_path, monkeypatch
):
    """And it ends with the numbers of an undisturbed one."""
    settings = config(comparator="api", endpoint=endpoint)
    run_mapl(settings, tmp_path / "undisturbed", progress=False)
    asked = len(chat_server.requests)
    monkeypatch.setenv("MAPL_CACHE", str(tmp_path / "another cache"))
    original, calls = train._Run.evaluate, []

    def dies_once(self, finished):
        calls.append(finished)
        if calls.count(2) == 1 and finished == 2:
            raise Killed
        original(self, finished)

    monkeypatch.setattr(train._Run, "evaluate", dies_once)
    with pytest.raises(Killed):
        run_mapl(settings, tmp_path / "killed", progress=False)
    assert len(chat_server.requests) == 2 * asked
    run_mapl(settings, tmp_path / "killed", progress=False)
    assert len(chat_server.requests) == 2 * asked, "the second iteration's answers were kept"
    for name in ("metrics.csv", "evaluation.csv", "examples.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    record = read_manifest(tmp_path / "killed" / "manifest.json")["notes"]["endpoint"]
    assert (record["sent"]["requests"], record["kept"]["requests"]) == (asked // 2, asked // 2)


def test_a_run_whose_key_is_refused_says_so_and_leaves_nothing_with_the_key(config, endpoint, chat_server, tmp_path):
    chat_server.default = echo(401)
    with pytest.raises(EndpointError, match=f"status 401.*{KEY_VARIABLE}") as caught:
        run_mapl(config(comparator="api", endpoint=endpoint), tmp_path / "out", progress=False)
    told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert MARK not in told and MARK.encode() not in written(tmp_path)


def test_a_missing_key_is_told_before_any_model_is_loaded(config, endpoint, chat_server, tmp_path, monkeypatch):
    monkeypatch.setattr("mapl_core.team.load_model", lambda name: pytest.fail("a model was loaded"))
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(EndpointError, match=f"environment variable {KEY_VARIABLE} is not set"):
        run_mapl(config(comparator="api", endpoint=endpoint), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists() and chat_server.requests == []


def test_a_method_without_preferences_asks_no_endpoint(config, tmp_path):
    settings = config("magrpo", comparator="api", endpoint={"url": "http://127.0.0.1:9", "model": "tiny"})
    assert settings.endpoint_settings is None and build_team(settings).endpoint is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "comparator 'api' needs `endpoint`"),
        ({"endpoint": {"url": "ftp://host", "model": "tiny"}}, "endpoint.url is 'ftp://host'"),
        ({"endpoint": {"url": "https://host", "model": "tiny", "modle": 1}}, "unknown endpoint setting modle"),
        ({"endpoint": "here"}, "endpoint must be a mapping"),
    ],
)
def test_an_endpoint_that_cannot_work_is_a_configuration_error(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(comparator="api", **changes)


def test_a_comparator_of_another_family_brings_its_own_tokenizer_and_template(config, tmp_path, model_folder):
    from conftest import tiny_gpt2, tiny_llama

    for name, make in (("llama", tiny_llama), ("gpt2", tiny_gpt2)):
        loaded = make.__wrapped__()()
        loaded.model.save_pretrained(tmp_path / name)
        loaded.tokenizer.save_pretrained(tmp_path / name)
    settings = config(comparator="model", comparator_model=str(tmp_path / "llama"))
    team = build_team(settings)
    theirs, ours = (members[0].base.tokenizer for members in (team.comparator.model.members, team.policy.members))
    assert theirs.chat_template.startswith("<s>") and theirs.eos_token == "</s>" and ours.eos_token == "<|im_end|>"
    (task,) = team.train_tasks[:1]
    ((played,),) = team.comparator.model.sample([task], 1, Stream(0, "comparator"))
    assert played.actions[0][0].prompt_ids[0] == theirs.bos_token_id
    with pytest.raises(ValueError, match="gpt2' has no chat template, and prompt_form is 'chat'"):
        build_team(config(comparator="model", comparator_model=str(tmp_path / "gpt2")))
