"""Claims about the runner: done jobs stay done, broken ones run again, a bad request writes nothing.

The fast half replaces the notebook's process by one that writes a finished job at once. The slow half runs a stand-in
notebook through papermill, kills things, and looks at what is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from stand_in import PROFILE
from workplace import MADPO, MARLHF, Workplace, results_of, wait_for

from mapl_core import documented, jobs, reproduce
from mapl_core import plan as planning
from mapl_core.grid import Job, parse
from mapl_core.profiles import load_profile
from mapl_core.results import ResultError, folder_lock

# -- what runs and what does not ---------------------------------------------------------------------------------------


def test_a_run_does_every_job_and_ends_with_table_and_figure(place: Workplace, started: list[str], capsys):
    assert place.run() == 0
    assert len(started) == 16
    written = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")]
    names = {f"table1.{ending}" for ending in ("csv", "md", "tex", "html")} | {"report.html"}
    names |= {f"figure2_tldr.{ending}" for ending in ("png", "svg", "md")}
    names |= {f"scoreboard.{ending}" for ending in ("csv", "md", "html")}
    assert {Path(path).name for path in written} == names
    assert all(Path(path).stat().st_size for path in written)


def test_run3_finished_jobs_are_skipped(place: Workplace, started: list[str]):
    place.finish(MADPO)
    assert place.run("--methods", "madpo,marlhf", "--paradigms", "dec-dec") == 0
    assert started == [MARLHF.name]
    started.clear()
    assert place.run("--methods", "madpo,marlhf", "--paradigms", "dec-dec") == 0
    assert started == []


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("metrics.csv", lambda data: data[:-9], "metrics.csv has"),
        ("metrics.csv", lambda data: data.replace(b"0.7", b"0.9"), "metrics.csv has changed"),
        ("evaluation.csv", lambda data: b"", "evaluation.csv has 0 bytes"),
        ("manifest.json", lambda data: data[:100], "manifest.json, line"),
        ("notebook.ipynb", lambda data: data[:100], "notebook.ipynb is missing or cut short"),
    ],
)
def test_run3_a_broken_job_is_named_and_run_again(place: Workplace, started, capsys, file, damage, message: str):
    path = place.finish(MADPO) / file
    path.write_bytes(damage(path.read_bytes()))
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec") == 0
    assert started == [MADPO.name]
    assert f"{MADPO.name}: to do again: {path.parent}" in (out := capsys.readouterr().out) and message in out


def test_a_broken_job_starts_from_nothing_and_an_interrupted_one_from_what_it_has(place: Workplace, started: list[str]):
    broken, interrupted = place.finish(MADPO), place.jobs / MARLHF.name
    (broken / "metrics.csv").write_text("")
    interrupted.mkdir()
    for folder in (broken, interrupted):
        (folder / "checkpoint.pt").write_text("x")
    assert place.run("--methods", "madpo,marlhf", "--paradigms", "dec-dec") == 0
    assert not (broken / "checkpoint.pt").exists() and (interrupted / "checkpoint.pt").exists()


def test_a_job_whose_notebook_failed_after_the_training_keeps_the_training(place: Workplace, started: list[str]):
    folder = place.finish(MADPO)
    (folder / "notebook.ipynb").write_text("{}")
    (folder / "mark").write_text("x")
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec") == 0
    assert started == [MADPO.name] and (folder / "mark").exists()


def test_force_runs_finished_jobs_again_from_nothing(place: Workplace, started: list[str]):
    folder = place.finish(MADPO)
    (folder / "checkpoint.pt").write_text("x")
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec", "--force") == 0
    assert started == [MADPO.name] and not (folder / "checkpoint.pt").exists()


def test_save4_a_job_made_with_other_settings_is_reported_not_reused(place: Workplace, started: list[str], capsys):
    place.finish(MADPO)
    place.profile.write_text(PROFILE.replace("train_tasks: 4", "train_tasks: 6"))
    request = ("--methods", "madpo", "--paradigms", "dec-dec")
    assert place.run(*request) == 2
    error = capsys.readouterr().err
    assert f"{MADPO.name}: train_tasks was 4, is 6" in error and "--force" in error and "--results" in error
    assert started == []
    assert place.run(*request, "--force") == 0
    assert started == [MADPO.name]


def test_save4_a_table_leaves_out_jobs_made_with_other_settings(place: Workplace, started: list[str]):
    place.finish(MADPO)
    place.profile.write_text(PROFILE.replace("train_tasks: 4", "train_tasks: 6"))
    assert place.run("--methods", "marlhf", "--paradigms", "dec-dec") == 0
    table = (place.results / "toy" / "tables" / "table1.md").read_text()
    assert f"Left out, because made with other settings or damaged: {MADPO.name}." in table
    assert "MADPO, Dec-Dec |" not in table and "MARLHF, Dec-Dec |" in table


@pytest.mark.parametrize("file", ["metrics.csv", "manifest.json"])
def test_save2_a_damaged_job_that_nobody_asked_for_does_not_stop_the_others(place: Workplace, started, file: str):
    (place.finish(MADPO) / file).write_text("{")
    assert place.run("--methods", "marlhf", "--paradigms", "dec-dec") == 0
    table = (place.results / "toy" / "tables" / "table1.md").read_text()
    assert f"made with other settings or damaged: {MADPO.name}." in table and "MARLHF, Dec-Dec |" in table


def test_save4_what_the_runner_would_not_use_is_not_documented(place: Workplace, started: list[str]):
    place.finish(MADPO)
    documented.check_up_to_date(place.results / "toy", str(place.profile))
    place.change_code("mapl_core.losses")
    with pytest.raises(ResultError, match=f"--force outdated first:\n  {MADPO.name}: outdated: the code of losses"):
        documented.check_up_to_date(place.results / "toy", str(place.profile))


def test_save4_a_job_made_by_other_code_is_reported_and_force_outdated_runs_no_other_again(
    place: Workplace, started: list[str], capsys
):
    place.finish(MADPO)
    place.change_code("mapl_core.losses", "mapl_core.updates")
    place.finish(MARLHF)
    request = ("--methods", "madpo,marlhf", "--paradigms", "dec-dec")
    assert place.run(*request) == 2
    error = capsys.readouterr().err
    assert f"{MADPO.name}: the code of losses, updates has changed" in error and MARLHF.name not in error
    assert started == []
    assert place.run(*request, "--force", "outdated") == 0
    assert started == [MADPO.name]
    assert place.run(*request) == 0 and started == [MADPO.name]


def test_save4_a_job_without_a_record_of_its_code_is_not_reused(place: Workplace, started: list[str], capsys):
    manifest = place.finish(MADPO) / "manifest.json"
    record = json.loads(manifest.read_text())
    del record["inputs"]
    manifest.write_text(json.dumps(record))
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec") == 2
    assert "did not record code, tasks and weights" in capsys.readouterr().err and started == []


def test_save4_an_interrupted_job_of_other_code_is_not_continued(place: Workplace, started: list[str], capsys):
    folder = place.stop(MADPO, 2)
    (folder / "checkpoint.pt").write_text("x")
    request = ("--methods", "madpo", "--paradigms", "dec-dec")
    assert place.run(*request, "--dry-run") == 0
    assert "resumable: iteration 2 of 4" in capsys.readouterr().out
    place.change_code("mapl_core.losses")
    assert place.run(*request) == 2
    told = f"{MADPO.name}: stopped at iteration 2 of 4; the code of losses has changed"
    assert told in capsys.readouterr().err and (folder / "checkpoint.pt").exists() and started == []
    assert place.run(*request, "--force", "outdated") == 0
    assert started == [MADPO.name] and not (folder / "checkpoint.pt").exists()


def test_a_job_serves_every_table_and_figure_and_is_trained_once(place: Workplace, started: list[str], capsys):
    request = ("--methods", "madpo", "untrained", "--experiments")
    assert place.run(*request, "table1", "figure2") == 0
    assert len(started) == len(set(started)) == 4
    for experiment, files in (("figure2", {"figure2_tldr.svg"}), ("table1", {"table1.md"})):
        capsys.readouterr()
        assert place.run(*request, experiment) == 0
        assert files <= {Path(line).name for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")}
    assert len(started) == 4, "another table trained something again"


def test_a_job_that_cannot_even_start_leaves_the_rest_running(
    place: Workplace, started: list[str], monkeypatch, capsys
):
    start = jobs.start

    def full(notebook: Path, folder: Path, *rest: object) -> object:
        if "madpo-cen" in folder.name:
            raise OSError(28, "No space left on device")
        return start(notebook, folder, *rest)

    monkeypatch.setattr(jobs, "start", full)
    assert place.run("--methods", "madpo") == 1
    assert len(started) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "failed: tldr-madpo-cen-cen-seed0: 05_tldr.ipynb: it could not be started: [Errno 28] No space"
    )


def test_jobs_left_behind_by_a_killed_runner_are_waited_for(place: Workplace, started: list[str], monkeypatch, capsys):
    monkeypatch.setattr(planning.await_orphans, "__defaults__", (0.3,))
    request = ("--methods", "madpo", "--paradigms", "dec-dec")
    with folder_lock(place.jobs / MADPO.name, name=jobs.JOB_LOCK):
        assert place.run(*request) == 2
    assert f"{MADPO.name} is being run by another process" in capsys.readouterr().err and started == []
    monkeypatch.setattr(planning.await_orphans, "__defaults__", (30.0,))
    lock = folder_lock(place.jobs / MADPO.name, name=jobs.JOB_LOCK)
    lock.__enter__()
    threading.Timer(0.5, lock.__exit__, (None, None, None)).start()
    assert place.run(*request) == 0 and started == [MADPO.name]


def test_a_job_takes_as_long_as_its_cell_took_or_its_share_of_what_others_took():
    other_seed, cen = Job("tldr", "madpo", "dec-dec", 1), Job("tldr", "madpo", "cen-cen", 0)
    coophe = Job("coophe", "marlhf", "dec-dec", 0)
    assert planning.expected_seconds(MADPO, {}) == MADPO.weight
    assert (
        planning.expected_seconds(MADPO, {other_seed: 30.0, Job("tldr", "madpo", "dec-dec", 2): 50.0, cen: 1.0}) == 40.0
    )
    assert planning.expected_seconds(cen, {other_seed: 30.0, coophe: 9000.0}) == pytest.approx(30.0 * cen.weight)
    assert planning.expected_seconds(MADPO, {coophe: 90.0}) == pytest.approx(90.0 / coophe.weight)


def test_long_jobs_start_first_as_far_as_they_were_measured(place: Workplace, started: list[str]):
    for method, seconds in (("untrained", 1000.0), ("marlhf", 10.0)):
        manifest = place.finish(Job("tldr", method, "dec-dec", 1)) / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"seconds": seconds}))
    assert place.run("--methods", "untrained", "marlhf", "--paradigms", "dec-dec", "--jobs", "1") == 0
    assert started == ["tldr-untrained-dec-dec-seed0", "tldr-marlhf-dec-dec-seed0"]


def test_the_bar_counts_expected_seconds_and_the_iterations_of_running_jobs(place: Workplace):
    """Costs 10 and 30; the long one was interrupted half-way, so 15 of 40 are no work of this session."""
    place.stop(MARLHF, 2)
    plan = planning.make_plan(
        parse(place.arguments("--methods", "madpo,marlhf", "--paradigms", "dec-dec")), place.notebooks
    )
    costs = {MADPO.name: 10.0, MARLHF.name: 30.0}
    short, long = sorted((replace(entry, cost=costs[entry.job.name]) for entry in plan.to_run), key=lambda e: e.cost)
    progress = reproduce._Progress([long, short])
    bar = progress._bar
    assert (bar.total, bar.initial, bar.n) == (40.0, 15.0, 15.0)
    place.stop(MARLHF, 3)
    progress.show([long, short], [long])
    assert bar.n == 22.5 and "tldr-marlhf-dec-dec-seed0" in str(bar)
    progress.show([long], [long])
    assert bar.n == 32.5 and "1 of 2 jobs" in str(bar)
    progress.show([], [])
    assert bar.n == 40.0
    progress.close()


def test_run1_a_failing_job_does_not_stop_the_others_and_is_listed_at_the_end(
    place: Workplace, started, monkeypatch, capsys
):
    monkeypatch.setattr(
        reproduce.jobs, "judge", lambda notebook, folder, *_: "boom" if "madpo-cen" in folder.name else ""
    )
    assert place.run("--methods", "madpo") == 1
    assert len(started) == 3
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "failed: tldr-madpo-cen-cen-seed0: boom"
    assert "wrote " in captured.out  # the table of what there is


def test_a_table_that_fails_does_not_hide_the_jobs_that_failed(place: Workplace, started, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reproduce.table_formats, "write_table", full)
    monkeypatch.setattr(
        reproduce.jobs, "judge", lambda notebook, folder, *_: "boom" if "madpo-cen" in folder.name else ""
    )
    assert place.run("--methods", "madpo") == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert failed == ["failed: tldr-madpo-cen-cen-seed0: boom", "failed: [Errno 28] No space left on device"]


def test_at_most_n_jobs_run_at_a_time(place: Workplace, monkeypatch: pytest.MonkeyPatch):
    alive, most = [0], [0]

    class Slow:
        returncode = 0

        def __init__(self, job: Job):
            self.job, self.polls = job, 0

        def poll(self) -> int | None:
            self.polls += 1
            if self.polls < 3:
                return None
            alive[0] -= 1
            place.finish(self.job)
            return 0

    def start(notebook, folder, parameters, threads, minutes, gpu, is_warm) -> Slow:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return Slow(Job("tldr", parameters["METHOD"], parameters["PARADIGM"], parameters["SEED"]))

    monkeypatch.setattr(reproduce.jobs, "start", start)
    assert place.run("--jobs", "3") == 0
    assert most[0] == 3


def test_jobs_default_to_cores_divided_by_threads(place: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "_cores", lambda: 8)
    monkeypatch.setattr(planning, "free_memory", lambda: 0.0)  # of no account where the profile does not say its needs
    for threads, workers in ((1, 8), (3, 2), (16, 1)):
        place.profile.write_text(PROFILE.replace("train_tasks: 4", f"train_tasks: 4\n  threads: {threads}"))
        plan = planning.make_plan(parse(place.arguments()), place.notebooks)
        assert (plan.threads, plan.workers) == (threads, workers)


@pytest.mark.parametrize(("free", "workers"), [(15.9, 3), (4.9, 1), (200.0, 4)])
def test_as_many_jobs_run_at_a_time_as_free_memory_holds(place: Workplace, monkeypatch, free: float, workers: int):
    monkeypatch.setattr(planning, "_cores", lambda: 8)
    monkeypatch.setattr(planning, "free_memory", lambda: free)
    text = PROFILE.replace("train_tasks: 4", "train_tasks: 4\n  threads: 2")
    place.profile.write_text(text + "\nneeds: {memory_gib: 5}\n")
    assert planning.make_plan(parse(place.arguments()), place.notebooks).workers == workers
    assert planning.make_plan(parse(place.arguments("--jobs", "7")), place.notebooks).workers == 7


def test_jobs_with_the_papers_models_share_no_gpu(place: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "_cores", lambda: 16)
    place.profile.write_text(PROFILE.replace("train_tasks: 4", "train_tasks: 4\n  threads: 4\n  source: paper"))
    for gpus, workers in ((("GPU-a",), 1), (("GPU-a", "GPU-b", "GPU-c"), 3), ((), 4)):
        monkeypatch.setattr(planning, "_gpus", lambda gpus=gpus: gpus)
        assert planning.make_plan(parse(place.arguments()), place.notebooks).workers == workers
    assert planning.make_plan(parse(place.arguments("--jobs", "5")), place.notebooks).workers == 5


@pytest.mark.parametrize("workers, most_on_one", [("2", 1), ("5", 3)])
def test_running_jobs_are_spread_over_the_gpus(place: Workplace, monkeypatch, capsys, workers: str, most_on_one: int):
    """The jobs only note which GPU they may see and end after some looks; the next one takes the GPU that got free."""
    running: dict[str, str] = {}
    seen: list[tuple[str, int]] = []

    class Slow:
        returncode = 0

        def __init__(self, job: Job):
            self.job, self.looks = job, job.seed + 1  # jobs end at different times

        def poll(self) -> int | None:
            self.looks -= 1
            if self.looks > 0:
                return None
            running.pop(self.job.name, None)
            place.finish(self.job)
            return 0

    def start(notebook, folder, parameters, threads, minutes, gpu, is_warm) -> Slow:
        job = Job("tldr", parameters["METHOD"], parameters["PARADIGM"], parameters["SEED"])
        running[job.name] = gpu
        seen.append((gpu, list(running.values()).count(gpu)))
        return Slow(job)

    monkeypatch.setattr(planning, "_gpus", lambda: ("GPU-a", "GPU-b"))
    monkeypatch.setattr(reproduce.jobs, "start", start)
    assert place.run("--methods", "madpo", "--seeds", "3", "--jobs", workers) == 0
    assert len(seen) == 9 and {gpu for gpu, _ in seen} == {"GPU-a", "GPU-b"}
    assert max(count for _, count in seen) == most_on_one
    assert f"{workers} at a time, 1 thread each, spread over 2 GPUs" in capsys.readouterr().out


def test_gpus_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """nvidia-smi is a stand-in that lists two; CUDA_VISIBLE_DEVICES, where the user has set it, decides."""
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\n[ \"$1\" = --query-gpu=uuid ] && printf 'GPU-a1\nGPU-b2\n'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planning._gpus() == ("GPU-a1", "GPU-b2")
    for chosen, expected in (("1", ("1",)), ("GPU-b2, GPU-a1", ("GPU-b2", "GPU-a1")), ("", ()), ("-1", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert planning._gpus() == expected
    stand_in.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert planning._gpus() == ()


def test_a_job_sees_the_gpu_that_it_was_given_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, str]] = []
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *_, env, **__: given.append(env))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for gpu in ("GPU-b2", ""):
        jobs.start(tmp_path / "a.ipynb", tmp_path, {}, 1, 1.0, gpu)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in given] == ["GPU-b2", "0,1"]


# -- requests that cannot be carried out -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--slurm-partition", "long"], ["--slurm-minutes", "5", "--slurm-gpus", "1"]])
def test_run1_slurm_options_without_slurm_exit_with_2(place: Workplace, words: list[str], capsys):
    assert place.run(*words) == 2
    assert f"{words[0]}" in (error := capsys.readouterr().err) and "add --executor slurm" in error


def nothing_written(place: Workplace) -> bool:
    return not place.results.exists()


@pytest.mark.parametrize(
    "flag", ["--profile", "--domains", "--methods", "--paradigms", "--experiments", "--executor", "--force"]
)
def test_run1_an_unknown_value_exits_with_2_and_writes_nothing(place: Workplace, flag: str, capsys):
    assert place.run(flag, "nonsense") == 2
    assert "'nonsense'; valid: " in capsys.readouterr().err and nothing_written(place)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("samples_per_task: 2", "m) is 2 and pairs_per_task"),
        ("pairs_per_task: 0", "pairs_per_task (k) is 0"),
        ("num_generations: 1", "num_generations (G) is 1"),
        ("learning_rat: 1.0e-4", "unknown parameter learning_rat"),
    ],
)
def test_an_impossible_profile_exits_with_2_and_writes_nothing(place: Workplace, line: str, message: str, capsys):
    place.profile.write_text(PROFILE.replace("train_tasks: 4", f"train_tasks: 4\n  {line}"))
    assert place.run() == 2
    assert message in capsys.readouterr().err and nothing_written(place)


def test_a_missing_rollout_backend_exits_with_2_before_any_job(place: Workplace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if not installed
    place.profile.write_text(PROFILE.replace("train_tasks: 4", "train_tasks: 4\n  rollouts: vllm"))
    assert place.run() == 2
    assert "pip install -r requirements-gpu.txt" in capsys.readouterr().err and nothing_written(place)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{folder}/bare", "{folder}/bare has no tokenizer"),
        ("{folder}/nowhere", "no model '{folder}/nowhere': there is no such folder"),
        ("pocket:tldr:9x", "unknown pocket size '9x'; valid: 1x, 2x, 4x"),
        ("bare", "is a folder seen from here.*absolute path, {folder}/bare"),
    ],
)
@pytest.mark.parametrize("entry", ["agent_models", "central_model", "comparator_model"])
def test_a_model_that_cannot_be_loaded_exits_with_2_and_writes_nothing(
    place: Workplace, started: list[str], tmp_path: Path, entry: str, model: str, message: str, capsys, monkeypatch
):
    """Of the agents, the coordinator, and the comparator of Dec-Cen."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    if model == "bare":
        (tmp_path / "bare" / "tokenizer.json").write_text("{}")
        (tmp_path / "bare" / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(PROFILE)
    model = model.format(folder=tmp_path)
    values["defaults"] |= {"comparator": "model"} | {entry: [model] if entry == "agent_models" else model}
    place.profile.write_text(yaml.safe_dump(values))
    assert place.run() == 2
    assert re.search(message.format(folder=re.escape(str(tmp_path))), capsys.readouterr().err)
    assert started == [] and nothing_written(place)


def test_an_endpoint_without_its_key_exits_with_2_and_writes_nothing(
    place: Workplace, started: list[str], capsys, monkeypatch
):
    monkeypatch.delenv("MAPL_TEST_KEY", raising=False)
    values = yaml.safe_load(PROFILE)
    endpoint = {"url": "http://127.0.0.1:9/v1", "model": "tiny", "key_variable": "MAPL_TEST_KEY"}
    values["defaults"] |= {"comparator": "api", "endpoint": endpoint}
    place.profile.write_text(yaml.safe_dump(values))
    assert place.run() == 2
    assert "environment variable MAPL_TEST_KEY is not set" in capsys.readouterr().err
    assert started == [] and nothing_written(place)


def test_a_model_that_is_gone_does_not_stop_tables_of_finished_jobs(place: Workplace, started: list[str], tmp_path):
    place.profile.write_text(PROFILE.replace('["pocket:tldr:1x"]', f"[{tmp_path / 'gone'}]"))
    place.finish(MADPO)
    assert place.run("--methods", "madpo", "--paradigms", "dec-dec") == 0
    assert started == []


def test_pm2_a_notebook_without_the_parameters_exits_with_2_and_writes_nothing(place: Workplace, capsys):
    place.notebook.write_text(place.notebook.read_text().replace("SEED = 0", "SEEED = 0"))
    assert place.run() == 2
    assert "05_tldr.ipynb has no parameter SEED; it has METHOD, OUTPUT_DIR" in capsys.readouterr().err
    assert nothing_written(place)


def test_a_damaged_data_file_exits_with_2_and_writes_nothing(place: Workplace, capsys, monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise ValueError("tldr_posts.jsonl, line 7: cut short")

    monkeypatch.setattr(planning, "_check_data", broken)
    assert place.run() == 2
    assert "tldr_posts.jsonl, line 7: cut short" in capsys.readouterr().err and nothing_written(place)


def test_the_tasks_are_read_before_any_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both splits, once a domain, with the profile's source and numbers."""
    place, read = Workplace(tmp_path), []

    class Reader:
        def load_tasks(self, split: str, source: str, count: int) -> None:
            read.append((split, source, count))

    monkeypatch.setattr("mapl_core.domains.get_domain", lambda name, **options: Reader())
    seen = planning.Survey(None, load_profile(place.profile), tmp_path, [MADPO, MARLHF], {}, place.notebooks)
    planning._check_data(seen)
    assert read == [("train", "pocket", 4), ("eval", "pocket", 4)]


def test_a_results_folder_that_cannot_be_written_is_an_error_before_work(place: Workplace, started, capsys):
    place.results.write_text("a file where the folder should be")
    assert place.run() == 2
    error = capsys.readouterr().err
    assert f"{place.results / 'toy'} cannot be written to" in error and "--results" in error and started == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(place: Workplace, started: list[str], capsys):
    assert place.run("--dry-run") == 0
    out = capsys.readouterr().out
    assert "tldr-madpo-dec-dec-seed0" in out and "16 jobs of profile toy: 0 done, 16 to run" in out
    assert started == [] and nothing_written(place)


def test_a_second_runner_is_refused_with_the_number_of_the_first(place: Workplace, started: list[str], capsys):
    with folder_lock(place.results / "toy"):
        assert place.run() == 2
    assert f"in use by process {os.getpid()};" in capsys.readouterr().err and started == []


def test_a_disk_that_fills_up_is_an_error_and_not_a_success(place: Workplace, started, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reproduce.table_formats, "write_table", full)
    assert place.run("--methods", "madpo") == 1
    assert "No space left on device" in capsys.readouterr().err


# -- with a kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "paradigms",
    [
        pytest.param(("dec-dec", "cen-cen"), id="cold"),
        pytest.param(("dec-dec", "cen-cen", "dec-cen"), id="warm", marks=pytest.mark.smoke),
    ],
)
def test_save1_a_runner_killed_in_the_middle_ends_its_kernels_and_finishes_later_with_the_same_numbers(
    tmp_path: Path, command: Callable[..., subprocess.Popen], paradigms: tuple[str, ...]
):
    """More jobs than run at a time are forked from a process that has the libraries; it must not stay behind either."""
    request = ("--methods", "madpo", "--paradigms", *paradigms, "--jobs", "2")
    undisturbed, killed = tmp_path / "an undisturbed run", tmp_path / "a killed run"
    runner = command(*request, results=undisturbed)
    out, err = runner.communicate(timeout=180)
    assert runner.returncode == 0, err

    runner = command(*request, results=killed, pause=2.0)
    folders = [killed / "toy" / "jobs" / f"tldr-madpo-{paradigm}-seed0" for paradigm in paradigms]
    wait_for(lambda: sum((folder / "checkpoint.json").exists() for folder in folders) == 2)
    family = psutil.Process(runner.pid).children(recursive=True)
    assert len(family) >= 4  # two jobs, each with its kernel
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == [], "orphans went on writing"
    assert not any((folder / "manifest.json").exists() for folder in folders)

    runner = command(*request, results=killed)
    out, err = runner.communicate(timeout=180)
    assert runner.returncode == 0, err
    assert results_of(killed) == results_of(undisturbed)
    assert len(results_of(killed)) == 6 + 2 * len(paradigms)
    starts = max((folder / "starts.txt").read_text().split() for folder in folders)
    assert starts[0] == "0" and int(starts[1]) >= 1, "the second run did not go on from the checkpoint"
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert manifest["notes"] == {"threads": "1", "backend": "Agg"}


@pytest.mark.slow
@pytest.mark.smoke
def test_run1_every_way_to_fail_is_reported_by_notebook_cell_and_error(
    tmp_path: Path, command: Callable[..., subprocess.Popen]
):
    names = [f"tldr-marlhf-{paradigm}-seed0" for paradigm in ("dec-dec", "cen-cen", "dec-cen")]
    failures = dict(zip(names, ("raise", "exit", "kill"), strict=True)) | {"tldr-magrpo-dec-dec-seed0": "late"}
    runner = command(
        "--methods", "marlhf", "magrpo", "untrained", "--jobs", "2", results=tmp_path / "r", failures=failures
    )
    out, err = runner.communicate(timeout=300)
    assert runner.returncode == 1
    failed = {line.split(": ")[1]: line for line in err.splitlines() if line.startswith("failed: ")}
    assert failed.keys() == failures.keys()
    assert all("05_tldr.ipynb, cell " in line for line in failed.values())
    assert "cell 4 (`import hashlib" in failed[names[0]] and "RuntimeError: the toy broke" in failed[names[0]]
    assert "cell 4" in failed[names[1]] and "SystemExit" in failed[names[1]]
    assert "cell 4" in failed[names[2]] and "probably for memory; lower micro_batch_tokens (now " in failed[names[2]]
    assert "cell 5" in failed["tldr-magrpo-dec-dec-seed0"] and "the plot broke" in failed["tldr-magrpo-dec-dec-seed0"]
    assert (tmp_path / "r" / "toy" / "tables" / "table1.md").is_file()  # of the untrained team, which succeeded

    runner = command("--methods", "marlhf", "magrpo", "untrained", "--jobs", "2", results=tmp_path / "r")
    out, err = runner.communicate(timeout=300)
    assert runner.returncode == 0, err
    assert "5 jobs of profile toy: 1 done, 4 to run" in out


@pytest.mark.slow
def test_save2_ctrl_c_ends_the_jobs_and_says_how_to_go_on(tmp_path: Path, command: Callable[..., subprocess.Popen]):
    runner = command("--methods", "madpo", "--paradigms", "dec-dec", results=tmp_path / "r", pause=5.0)
    wait_for(lambda: (tmp_path / "r/toy/jobs/tldr-madpo-dec-dec-seed0/checkpoint.json").exists())
    family = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGINT)
    out, err = runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert "the same command goes on from here" in err and "Traceback" not in err
    assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest.mark.slow
def test_run2_a_run_leaves_the_source_notebook_as_it_was(tmp_path: Path, command: Callable[..., subprocess.Popen]):
    notebook = tmp_path / "notebooks" / "05_tldr.ipynb"
    before = notebook.read_bytes()
    runner = command("--methods", "madpo", "--paradigms", "dec-dec", results=tmp_path / "r")
    assert runner.communicate(timeout=120) and runner.returncode == 0
    assert notebook.read_bytes() == before
    log = tmp_path / "r/toy/jobs/tldr-madpo-dec-dec-seed0/log.txt"
    assert log.stat().st_size < 5_000
