"""The grid of jobs: which experiments there are, which jobs each needs, and what a command line asks for.

A job is one (domain, method, paradigm, seed); it serves every table and figure that needs it. Only the standard library
is imported here, because reproduce.sh checks a request before anything is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mapl_core.runs import METHOD_NAMES, PARADIGM_NAMES, SINGLE_AGENT, WITHOUT_TRAINING, TableRow
from mapl_core.tables import TABLE1

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK_FOLDER = ROOT / "notebooks"
DOMAIN_NOTEBOOKS = {
    "tldr": "05_tldr.ipynb",
    "coophe": "06_coophe.ipynb",
    "bfcl": "07_bfcl.ipynb",
    "travel": "08_travel.ipynb",
}
BASELINES_NOTEBOOK = "09_baselines.ipynb"  # takes the domain as a parameter
BASELINES = (*SINGLE_AGENT, "sequential", "discussion")
EXECUTORS, FORCE = ("local", "slurm"), ("all", "outdated")
DAY_MINUTES = 24 * 60  # the longest job is meant to fit into a day


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: the rows whose jobs it needs."""

    title: str
    rows: tuple[TableRow, ...]


EXPERIMENTS = {
    "table1": Experiment("main results", TABLE1),
    "figure2": Experiment("training curves of table1's trained rows", TABLE1),
    "scoreboard": Experiment("which of the paper's claims the runs support", TABLE1),
}


@dataclass(frozen=True)
class Job:
    """One run of a domain's notebook, or of the baselines' notebook on a domain."""

    domain: str
    method: str
    paradigm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.domain}-{self.method}-{self.paradigm}-seed{self.seed}"

    @property
    def notebook(self) -> str:
        return BASELINES_NOTEBOOK if self.method in BASELINES else DOMAIN_NOTEBOOKS[self.domain]

    @property
    def weight(self) -> float:
        """Time a job usually takes, kernel start included, in units of a MADPO run (docs/runs/pocket-2026-11-30)."""
        usual = dict.fromkeys(WITHOUT_TRAINING, 0.2) | {"magrpo": 0.7, "marlhf": 1.8}
        return usual.get(self.method, 1.0) * (1.4 if self.paradigm == "cen-cen" else 1.0)


@dataclass(frozen=True)
class SlurmOptions:
    """What every Slurm job asks for; None leaves it to the cluster."""

    partition: str | None
    minutes: int
    memory_gb: int | None
    gpus: int | None


@dataclass(frozen=True)
class Request:
    """What the command line asks for, checked against what exists.

    `domains`, `methods` and `paradigms` are None where the command line leaves them to the profile. `force` says which
    finished jobs run again, all or outdated; `slurm` is None where jobs run on this machine.
    """

    profile: str
    domains: list[str] | None
    methods: list[str] | None
    paradigms: list[str] | None
    seeds: list[int]
    experiments: list[str]
    workers: int | None
    results: Path
    dry_run: bool
    force: str | None
    slurm: SlurmOptions | None

    @property
    def jobs(self) -> list[Job]:
        """The grid, the long jobs first; empty if no row of the experiments has the asked method and paradigm."""
        grid = dict.fromkeys(
            Job(domain, row.method, row.paradigm, seed)
            for experiment in self.experiments
            for seed in self.seeds
            for domain in self.domains or DOMAIN_NOTEBOOKS
            for row in EXPERIMENTS[experiment].rows
            if row.method in (self.methods or METHOD_NAMES) and row.paradigm in (self.paradigms or PARADIGM_NAMES)
        )
        return sorted(grid, key=lambda job: -job.weight)

    def with_defaults(self, grid: Mapping[str, Sequence[str]]) -> Request:
        """The request with a profile's own domains, methods and paradigms where the command line gives none.

        A method that is asked for by name, and has no row under the profile's own paradigms, runs under all of its own.

        Raises:
            UsageError: if no row is left.
        """
        domains = self.domains or [name for name in DOMAIN_NOTEBOOKS if name in grid.get("domains", DOMAIN_NOTEBOOKS)]
        methods = self.methods or _choose("methods of the profile's grid", grid.get("methods"), METHOD_NAMES)
        paradigms = self.paradigms or _choose("paradigms of the profile's grid", grid.get("paradigms"), PARADIGM_NAMES)
        if self.methods and not self.paradigms:
            rows = [row for experiment in self.experiments for row in EXPERIMENTS[experiment].rows]
            covered = {row.method for row in rows if row.paradigm in paradigms}
            paradigms += sorted({row.paradigm for row in rows if row.method in set(self.methods) - covered})
        return _with_jobs(replace(self, domains=domains, methods=methods, paradigms=paradigms))


def jobs_below(profile_folder: Path) -> list[Job]:
    """Every job of the grid, of any seed, that has a folder below results/<profile>/jobs."""
    names = {(domain, row.method, row.paradigm) for domain in DOMAIN_NOTEBOOKS for row in TABLE1}
    folders = sorted(profile_folder.glob("jobs/*-seed*"))
    found = [(*name, folder.name.removeprefix("-".join(name) + "-seed")) for folder in folders for name in names]
    return [Job(domain, method, paradigm, int(seed)) for domain, method, paradigm, seed in found if seed.isdecimal()]


class UsageError(ValueError):
    """The request cannot be carried out as given; the message lists what can."""


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line. Raises UsageError for an unknown value, naming it and the valid ones."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    request = Request(
        profile=_profile(given.profile),
        domains=_choose("--domains", given.domains, DOMAIN_NOTEBOOKS) if given.domains else None,
        methods=_choose("--methods", given.methods, METHOD_NAMES) if given.methods else None,
        paradigms=_choose("--paradigms", given.paradigms, PARADIGM_NAMES) if given.paradigms else None,
        seeds=_seeds(given.seeds),
        experiments=_choose("--experiments", given.experiments, EXPERIMENTS),
        workers=_number("--jobs", given.jobs),
        results=Path(given.results).expanduser().resolve(),
        dry_run=given.dry_run,
        force=_one_of("--force", given.force, FORCE) if given.force else None,
        slurm=_slurm(given),
    )
    return _with_jobs(request)


def _with_jobs(request: Request) -> Request:
    if not request.jobs:
        asked = f"{', '.join(request.methods or ['any'])} under {', '.join(request.paradigms or ['any'])}"
        rows = ", ".join(f"{row.method} {row.paradigm}" for row in TABLE1)
        raise UsageError(f"no job has one of these methods under one of these paradigms: {asked}; the rows are: {rows}")
    return request


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./reproduce.sh",
        description="Train the teams, then write tables and figures. Give the same command again to resume.",
        epilog="subcommands: `./reproduce.sh status [--profile ... --results ...]`, `./reproduce.sh test [pytest "
        "arguments]`, `./reproduce.sh lab`",
        allow_abbrev=False,
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--profile", default="pocket", help=f"{', '.join(profile_names())}, or a .yaml file")
    parser.add_argument("--domains", **several, help=f"default: the profile's, of {', '.join(DOMAIN_NOTEBOOKS)}")
    parser.add_argument("--methods", **several, help=f"default: the profile's, of {', '.join(METHOD_NAMES)}")
    parser.add_argument("--paradigms", **several, help=f"default: the profile's, of {', '.join(PARADIGM_NAMES)}")
    parser.add_argument(
        "--seeds", nargs="+", default=["1"], metavar="N", help="number of seeds; or a list such as 0,3,7"
    )
    parser.add_argument("--experiments", **several, help=f"default: all of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--jobs", metavar="N", help="jobs at a time; default: as many as cores and memory allow")
    parser.add_argument("--results", default=ROOT / "results", metavar="DIR", help="default: results/ of this project")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, write nothing")
    parser.add_argument(
        "--force", nargs="?", const="all", metavar="outdated", help="run finished jobs again; or only outdated ones"
    )
    parser.add_argument("--list", action="store_true", help="show experiments, domains, methods and profiles")
    _add_slurm(parser)
    return parser


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a cluster", "--jobs N limits how many jobs run at a time")
    group.add_argument(
        "--executor", default="local", metavar="NAME", help="local (default), or slurm: one Slurm job each"
    )
    group.add_argument("--slurm-partition", metavar="NAME", help="default: the cluster's")
    group.add_argument("--slurm-minutes", metavar="N", help=f"time limit of a job; default: {DAY_MINUTES}")
    group.add_argument("--slurm-memory", metavar="GB", help="memory of a job; default: the partition's")
    group.add_argument("--slurm-gpus", metavar="N", help="GPUs of a job; default: none")


def _slurm(given: argparse.Namespace) -> SlurmOptions | None:
    options = ("slurm_partition", "slurm_minutes", "slurm_memory", "slurm_gpus")
    unused = [f"--{name.replace('_', '-')}" for name in options if getattr(given, name) is not None]
    if _one_of("--executor", given.executor, EXECUTORS) == "local":
        if unused:
            raise UsageError(f"{', '.join(unused)} has no effect here; add --executor slurm")
        return None
    return SlurmOptions(
        given.slurm_partition,
        _number("--slurm-minutes", given.slurm_minutes) or DAY_MINUTES,
        _number("--slurm-memory", given.slurm_memory),
        _number("--slurm-gpus", given.slurm_gpus),
    )


def profile_names() -> list[str]:
    return sorted(path.stem for path in (NOTEBOOK_FOLDER / "profiles").glob("*.yaml"))


def _profile(value: str) -> str:
    if value in profile_names():
        return value
    if value.endswith((".yaml", ".yml")) and Path(value).is_file():
        return str(Path(value).resolve())
    raise UsageError(f"unknown --profile {value!r}; valid: {', '.join(profile_names())}, or an existing .yaml file")


def _choose(flag: str, values: Sequence[str] | None, valid: Iterable[str]) -> list[str]:
    """The chosen names in their fixed order; several may be given apart or with commas between."""
    valid = list(valid)
    chosen = _split(values) if values else valid
    unknown = [value for value in chosen if value not in valid]
    if unknown or not chosen:
        raise UsageError(f"unknown {flag} {', '.join(map(repr, unknown or ['']))}; valid: {', '.join(valid)}")
    return [name for name in valid if name in chosen]


def _seeds(values: Sequence[str]) -> list[int]:
    names = _split(values)
    if not names or not all(name.isdecimal() for name in names):
        raise UsageError(f"--seeds takes a number of seeds, or a list such as 0,3,7; got {' '.join(values)!r}")
    is_list = len(values) > 1 or "," in values[0]
    seeds = sorted({int(name) for name in names}) if is_list else list(range(int(names[0])))
    if not seeds:
        raise UsageError("--seeds 0 asks for no run; give at least 1, or a list such as 0, (with its comma)")
    return seeds


def _number(flag: str, value: str | None) -> int | None:
    if value is not None and not (value.isdecimal() and int(value) >= 1):
        raise UsageError(f"{flag} takes a number of at least 1, got {value!r}")
    return int(value) if value else None


def _one_of(flag: str, value: str, valid: Sequence[str]) -> str:
    if value not in valid:
        raise UsageError(f"unknown {flag} {value!r}; valid: {', '.join(valid)}")
    return value


def _split(values: Sequence[str]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]


def catalogue() -> str:
    """What `--list` prints."""
    lines = ["experiments"]
    lines += [f"  {name:10} {experiment.title}" for name, experiment in EXPERIMENTS.items()]
    lines += ["domains     " + ", ".join(DOMAIN_NOTEBOOKS), "profiles    " + ", ".join(profile_names()), "rows"]
    lines += [f"  --methods {row.method} --paradigms {row.paradigm}" for row in TABLE1]
    return "\n".join(lines)
