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
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import yaml
from stand_in import PROFILE, executed_copy, write_job, write_notebook, write_parameters

from mapl_core import reproduce
from mapl_core.grid import Job, parse
from mapl_core.profiles import load_profile
from mapl_core.reproduce import main
from mapl_core.results import as_plain, folder_lock

ROOT = Path(__file__).resolve().parent.parent
SCORES = [{"a": 0.2, "b": 0.4}, {"a": 0.6, "b": 0.8}]
MADPO, MARLHF = Job("tldr", "madpo", "dec-dec", 0), Job("tldr", "marlhf", "dec-dec", 0)


class Workplace:
    """A profile, a notebook and a results folder of one test's own."""

    def __init__(self, folder: Path):
        self.profile, self.notebooks, self.results = folder / "toy.yaml", folder / "notebooks", folder / "results"
        self.profile.write_text(PROFILE)
        self.notebook = write_notebook(self.notebooks)
        self.jobs = self.results / "toy" / "jobs"

    def settings(self, job: Job) -> dict:
        config = load_profile(self.profile).config(
            domain=job.domain, method=job.method, paradigm=job.paradigm, seed=job.seed
        )
        return as_plain(asdict(config))

    def finish(self, job: Job) -> Path:
        """Leave what a successful job leaves."""
        name = (job.method, job.paradigm, job.seed)
        folder = write_job(self.results / "toy", name, SCORES, parameters=self.settings(job))
        executed_copy(self.notebook, folder)
        return folder

    def arguments(self, *more: str) -> list[str]:
        return ["--profile", str(self.profile), "--results", str(self.results), *more]

    def run(self, *more: str) -> int:
        return main(self.arguments(*more), self.notebooks)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setattr(reproduce, "_check_data", lambda *_: None)
    monkeypatch.setattr(reproduce, "POLL_SECONDS", 0.01)
    return Workplace(tmp_path)


@pytest.fixture
def started(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs that were started; each is finished at once instead of running a notebook."""
    names: list[str] = []

    class Finished:
        returncode = 0

        def poll(self) -> int:
            return 0

    def start(notebook: Path, folder: Path, parameters: dict, threads: int, minutes: float) -> Finished:
        job = Job("tldr", parameters["METHOD"], parameters["PARADIGM"], parameters["SEED"])
        assert folder == place.jobs / job.name == Path(parameters["OUTPUT_DIR"]) and minutes > 0
        names.append(job.name)
        place.finish(job)
        return Finished()

    monkeypatch.setattr(reproduce.jobs, "start", start)
    return names


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
    assert f"Left out, because made with other settings: {MADPO.name}." in table
    assert "MADPO, Dec-Dec |" not in table and "MARLHF, Dec-Dec |" in table


def test_a_failing_job_does_not_stop_the_others_and_is_listed_at_the_end(
    place: Workplace, started, monkeypatch, capsys
):
    monkeypatch.setattr(
        reproduce.jobs, "judge", lambda notebook, folder, code, knobs: "boom" if "madpo-cen" in folder.name else ""
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
        reproduce.jobs, "judge", lambda notebook, folder, code, knobs: "boom" if "madpo-cen" in folder.name else ""
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

    def start(notebook, folder, parameters, threads, minutes) -> Slow:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return Slow(Job("tldr", parameters["METHOD"], parameters["PARADIGM"], parameters["SEED"]))

    monkeypatch.setattr(reproduce.jobs, "start", start)
    assert place.run("--jobs", "3") == 0
    assert most[0] == 3


def test_jobs_default_to_cores_divided_by_threads(place: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reproduce, "_cores", lambda: 8)
    for threads, workers in ((1, 8), (3, 2), (16, 1)):
        place.profile.write_text(PROFILE.replace("train_tasks: 4", f"train_tasks: 4\n  threads: {threads}"))
        plan = reproduce.make_plan(parse(place.arguments()), place.notebooks)
        assert (plan.threads, plan.workers) == (threads, workers)


def test_jobs_with_the_papers_models_share_no_gpu(place: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reproduce, "_cores", lambda: 16)
    place.profile.write_text(PROFILE.replace("train_tasks: 4", "train_tasks: 4\n  threads: 4\n  source: paper"))
    for gpu, workers in ((True, 1), (False, 4)):
        monkeypatch.setattr(reproduce, "_has_gpu", lambda gpu=gpu: gpu)
        assert reproduce.make_plan(parse(place.arguments()), place.notebooks).workers == workers
    assert reproduce.make_plan(parse(place.arguments("--jobs", "3")), place.notebooks).workers == 3


# -- requests that cannot be carried out -------------------------------------------------------------------------------


def nothing_written(place: Workplace) -> bool:
    return not place.results.exists()


@pytest.mark.parametrize("flag", ["--profile", "--domains", "--methods", "--paradigms", "--experiments"])
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

    monkeypatch.setattr(reproduce, "_check_data", broken)
    assert place.run() == 2
    assert "tldr_posts.jsonl, line 7: cut short" in capsys.readouterr().err and nothing_written(place)


def test_the_tasks_are_read_before_any_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both splits, once a domain, with the profile's source and numbers."""
    place, read = Workplace(tmp_path), []

    class Reader:
        def load_tasks(self, split: str, source: str, count: int) -> None:
            read.append((split, source, count))

    monkeypatch.setattr("mapl_core.domains.get_domain", lambda name, **options: Reader())
    reproduce._check_data(load_profile(place.profile), [MADPO, MARLHF])
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

DRIVER = """
import sys
from pathlib import Path
from mapl_core import reproduce
reproduce._check_data = lambda *_: None
sys.exit(reproduce.main(sys.argv[2:], Path(sys.argv[1])))
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Starts the runner on the stand-in notebook, in a process of its own."""
    place, processes = Workplace(tmp_path), []
    grid = {job.name: place.settings(job) for job in parse(place.arguments("--domains", "tldr", "--seeds", "3")).jobs}
    write_parameters(tmp_path / "parameters.json", grid)

    def start(*arguments: str, results: Path, pause: float = 0.0, failures: dict | None = None) -> subprocess.Popen:
        words = ["--profile", str(place.profile), "--results", str(results), *arguments]
        environment = os.environ | {
            "STAND_IN_PARAMETERS": str(tmp_path / "parameters.json"),
            "STAND_IN_PAUSE": str(pause),
            "STAND_IN_FAILURES": json.dumps(failures or {}),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(place.notebooks), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.1)


def results_of(folder: Path) -> dict[str, bytes]:
    """Everything that must not differ between equal runs."""
    kept = [path for pattern in ("**/*.csv", "**/*.md", "**/*.svg") for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


@pytest.mark.slow
@pytest.mark.smoke
def test_save1_a_runner_killed_in_the_middle_ends_its_kernels_and_finishes_later_with_the_same_numbers(
    tmp_path: Path, command: Callable[..., subprocess.Popen]
):
    request = ("--methods", "madpo", "--paradigms", "dec-dec", "cen-cen", "--jobs", "2")
    undisturbed, killed = tmp_path / "an undisturbed run", tmp_path / "a killed run"
    runner = command(*request, results=undisturbed)
    out, err = runner.communicate(timeout=180)
    assert runner.returncode == 0, err

    runner = command(*request, results=killed, pause=2.0)
    folders = [killed / "toy" / "jobs" / f"tldr-madpo-{paradigm}-seed0" for paradigm in ("dec-dec", "cen-cen")]
    wait_for(lambda: all((folder / "checkpoint.json").exists() for folder in folders))
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
    assert len(results_of(killed)) == 8
    starts = (folders[0] / "starts.txt").read_text().split()
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
