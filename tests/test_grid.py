"""Claims about the command line: what it asks for, and that a mistyped word costs a second and writes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mapl_core.grid import DOMAIN_NOTEBOOKS, EXPERIMENTS, Job, UsageError, catalogue, jobs_below, parse, profile_names
from mapl_core.runs import METHOD_NAMES, PARADIGM_NAMES

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "single_raw-single", "single_grpo-single", "single_ppo-single", "single_dpo-single",
    "untrained-dec-dec", "sequential-dec-dec", "discussion-dec-dec",
    "magrpo-dec-dec", "collm_cc-dec-dec", "collm_dc-dec-dec",
    "marlhf-dec-dec", "marlhf-cen-cen", "marlhf-dec-cen", "madpo-dec-dec", "madpo-cen-cen", "madpo-dec-cen",
}  # fmt: skip


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile folder of its own, so that the claims do not depend on which profiles ship."""
    (tmp_path / "notebooks" / "profiles").mkdir(parents=True)
    for name in ("pocket", "small"):
        (tmp_path / "notebooks" / "profiles" / f"{name}.yaml").write_text("")
    monkeypatch.setattr("mapl_core.grid.NOTEBOOK_FOLDER", tmp_path / "notebooks")


def test_the_default_is_every_row_of_table1_with_one_seed():
    jobs = parse([]).jobs
    assert {job.name for job in jobs} == {f"{domain}-{row}-seed0" for domain in DOMAIN_NOTEBOOKS for row in ROWS}
    assert len(jobs) == 16 * len(DOMAIN_NOTEBOOKS)  # table1 and figure2 share them


def test_a_profile_says_what_runs_unless_the_command_line_does():
    small = {"domains": ["tldr"], "methods": ["untrained", "madpo"], "paradigms": ["dec-dec"]}
    names = {job.name.removesuffix("-seed0") for job in parse([]).with_defaults(small).jobs}
    assert names == {"tldr-untrained-dec-dec", "tldr-madpo-dec-dec"}
    asked = parse(["--methods", "marlhf"]).with_defaults(small)
    assert [job.name for job in asked.jobs] == ["tldr-marlhf-dec-dec-seed0"]
    asked = parse(["--paradigms", "dec-cen"]).with_defaults(small)
    assert [job.name for job in asked.jobs] == ["tldr-madpo-dec-cen-seed0"]
    asked = parse(["--domains", "bfcl", "--methods", "untrained"]).with_defaults(small)
    assert [job.name for job in asked.jobs] == ["bfcl-untrained-dec-dec-seed0"]
    assert len(parse([]).with_defaults({}).jobs) == 16 * len(DOMAIN_NOTEBOOKS)
    with pytest.raises(UsageError, match="methods of the profile's grid 'dpo'"):
        parse([]).with_defaults({"methods": ["dpo"]})


def test_a_method_asked_for_by_name_runs_although_the_profile_has_other_paradigms():
    small = {"domains": ["tldr"], "methods": ["untrained", "madpo"], "paradigms": ["dec-dec"]}
    asked = parse(["--methods", "single_raw", "madpo"]).with_defaults(small)
    assert {job.name for job in asked.jobs} == {"tldr-single_raw-single-seed0", "tldr-madpo-dec-dec-seed0"}
    with pytest.raises(UsageError, match="no job has .*: untrained, madpo under single; the rows are: single_raw"):
        parse(["--paradigms", "single"]).with_defaults(small)


def test_the_small_profile_trains_what_two_hours_allow():
    from mapl_core.profiles import load_profile

    jobs = parse([]).with_defaults(load_profile(ROOT / "notebooks" / "profiles" / "small.yaml").grid).jobs
    assert {job.name for job in jobs} == {f"tldr-{method}-dec-dec-seed0" for method in ("untrained", "marlhf", "madpo")}


def test_a_grid_names_domains_of_its_own_profile(tmp_path: Path):
    from mapl_core.profiles import ConfigError, load_profile

    path = tmp_path / "mine.yaml"
    path.write_text("domains: {tldr: {}, bfcl: {}}\ngrid: {domains: [tldr, tdlr]}\n")
    with pytest.raises(ConfigError, match="unknown domain 'tdlr' in `grid`; valid: tldr, bfcl"):
        load_profile(path)
    path.write_text("domains: {tldr: {}}\n")
    assert load_profile(path).grid == {"domains": ["tldr"]}
    assert {job.domain for job in parse([]).with_defaults(load_profile(path).grid).jobs} == {"tldr"}


def test_a_group_of_a_profile_may_be_empty_and_must_not_be_a_list(tmp_path: Path):
    from mapl_core.profiles import ConfigError, load_profile

    path = tmp_path / "mine.yaml"
    path.write_text("defaults:\nmethods:\nparadigms:\nneeds:\ndomains: {tldr: {source: pocket}}\n")
    profile = load_profile(path)
    assert (profile.threads, profile.needs) == (1, {})
    assert profile.config("tldr", "madpo", agent_models=["pocket:tldr:1x"] * 2).source == "pocket"
    path.write_text("domains: [tldr]\n")
    with pytest.raises(ConfigError, match=r"`domains` is \['tldr'\]; write its entries as `name: value`"):
        load_profile(path)


def test_long_jobs_start_first():
    jobs = parse(["--domains", "tldr"]).jobs
    assert {job.method for job in jobs[-4:]} == {"single_raw", "untrained", "sequential", "discussion"}


def test_the_baselines_run_in_their_own_notebook_on_any_domain_and_marl_in_the_domains():
    notebooks = {(job.domain, job.method): job.notebook for job in parse([]).jobs}
    for domain, own in DOMAIN_NOTEBOOKS.items():
        for method in ("single_raw", "single_grpo", "single_ppo", "single_dpo", "sequential", "discussion"):
            assert notebooks[domain, method] == "09_baselines.ipynb"
        for method in ("untrained", "magrpo", "collm_cc", "collm_dc", "marlhf", "madpo"):
            assert notebooks[domain, method] == own


@pytest.mark.parametrize(
    ("given", "seeds"),
    [(["3"], [0, 1, 2]), (["0,3,7"], [0, 3, 7]), (["0", "3", "7"], [0, 3, 7]), (["5,"], [5]), (["7,3,3"], [3, 7])],
)
def test_seeds_are_a_number_or_a_list(given: list[str], seeds: list[int]):
    assert parse(["--seeds", *given]).seeds == seeds
    assert {job.seed for job in parse(["--methods", "madpo", "--seeds", *given]).jobs} == set(seeds)


def test_several_values_are_given_apart_or_with_commas():
    for words in (["madpo,marlhf"], ["madpo", "marlhf"], ["marlhf,", "madpo"]):
        request = parse(["--domains", "tldr", "--methods", *words, "--paradigms", "dec-dec"])
        assert [job.name for job in request.jobs] == ["tldr-marlhf-dec-dec-seed0", "tldr-madpo-dec-dec-seed0"]


@pytest.mark.parametrize(
    ("arguments", "value", "valid"),
    [
        (["--profile", "poket"], "poket", "pocket, small"),
        (["--profile", "no/such.yaml"], "no/such.yaml", "pocket, small"),
        (["--domains", "tldr,tl"], "tl", "tldr"),
        (["--methods", "dpo"], "dpo", ", ".join(METHOD_NAMES)),
        (["--paradigms", "cen-dec"], "cen-dec", ", ".join(PARADIGM_NAMES)),
        (["--experiments", "table9"], "table9", ", ".join(EXPERIMENTS)),
        (["--seeds", "many"], "many", "such as 0,3,7"),
        (["--seeds", "-1"], "-1", "such as 0,3,7"),
        (["--seeds", "0"], "0", "at least 1"),
        (["--jobs", "0"], "0", "at least 1"),
        (["--methods", "magrpo", "--paradigms", "cen-cen"], "no job", "magrpo dec-dec"),
        (["--methods", ","], "--methods", ", ".join(METHOD_NAMES)),
    ],
)
def test_run1_an_unknown_value_is_an_error_that_lists_the_valid_ones(arguments: list[str], value: str, valid: str):
    with pytest.raises((UsageError, SystemExit)) as caught:
        parse(arguments)
    if caught.type is UsageError:  # argparse itself refuses what looks like a flag
        assert value in str(caught.value) and valid in str(caught.value)


@pytest.mark.parametrize("arguments", [["--methdos", "madpo"], ["madpo"], ["--method", "madpo"], ["--seeds"]])
def test_run1_an_unknown_flag_exits_with_2_and_lists_the_flags(arguments: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "--methods" in capsys.readouterr().err


def test_a_profile_may_be_a_file(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("")
    assert parse(["--profile", str(tmp_path / "mine.yaml")]).profile == str(tmp_path / "mine.yaml")


def test_the_catalogue_names_everything_that_can_be_asked_for():
    text = catalogue()
    for name in (*EXPERIMENTS, *METHOD_NAMES, *PARADIGM_NAMES, *profile_names(), "tldr"):
        assert re.search(rf"\b{name}\b", text), name


def test_jobs_of_any_seed_are_recognised_by_their_folder(tmp_path: Path):
    for name in ("tldr-madpo-dec-dec-seed4", "tldr-madpo-dec-dec-seed4-online", "tldr-dpo-dec-dec-seed0", "x"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    assert jobs_below(tmp_path) == [Job("tldr", "madpo", "dec-dec", 4)]


def test_run1_a_mistyped_word_costs_a_moment_and_nothing_is_installed_or_written(tmp_path: Path):
    """A bare interpreter, without site packages, as reproduce.sh has it before it installs anything."""
    command = [sys.executable, "-S", "-m", "mapl_core.reproduce", "--check-arguments", "--domains", "tdlr"]
    began = time.process_time()
    run = subprocess.run(
        [*command, "--results", str(tmp_path / "results")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 2 and "unknown --domains 'tdlr'; valid: tldr" in run.stderr
    assert time.process_time() - began < 5 and not (tmp_path / "results").exists()
