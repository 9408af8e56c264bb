"""This project against comlrl, which trains teams as well: one MADPO iteration and one MAGRPO epoch of both.

    .venv/bin/python tests/benchmarks/peers --install      # once: an environment for comlrl
    .venv/bin/python tests/benchmarks/peers                # the comparison, some minutes

The same pocket model, tasks and counts, 2 threads. Every measurement is a process of its own, with a warm-up before it;
the sides take turns. Printed are the ratios of samples a second in collection and in update, and the peaks of memory.
Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from comparison import DIFFERENCES, compare
from work import METHODS, Measurement, Work

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent.parent


def install(environment: Path) -> None:
    """Make comlrl's environment, with the very build of torch that this one has where pip's sources offer it."""
    venv.create(environment, with_pip=True)
    pip = [str(python_of(environment)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, f"torch=={version('torch')}"], check=False).returncode:
        print(f"no build {version('torch')} of torch to be had; taking what pip brings", file=sys.stderr)
    subprocess.run([*pip, "-r", str(FOLDER / "requirements.txt")], check=True)


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def run(python: Path | str, side: str, work: Work) -> Measurement:
    """One measurement in a fresh process."""
    threads = str(work.threads)
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    settings |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:  # comlrl writes checkpoints where it runs
        done = subprocess.run(
            [str(python), str(FOLDER / f"{side}.py"), json.dumps(asdict(work))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | settings,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{side}.py ended with code {done.returncode}; its message is above")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/peers", description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="make comlrl's environment and stop")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-peer", help="where it is")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side and method")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--posts", type=int, default=5, help="pocket posts in a task: about 50 prompt tokens each")
    options = parser.parse_args()
    environment = options.environment.resolve()
    if options.install:
        install(environment)
        return
    if not python_of(environment).exists():
        parser.error(f"no environment at {environment}; make it once with the option --install")
    for method in options.methods:
        work, rounds = Work(method, threads=options.threads, posts=options.posts), []
        for number in range(options.rounds):
            print(f"{method}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            sides = (sys.executable, "ours"), (python_of(environment), "theirs")
            rounds.append(tuple(run(python, side, work) for python, side in sides))
        print(*compare(method, rounds), sep="\n", flush=True)
    ours, theirs = rounds[0]
    mean_prompt = sum(ours.prompt_tokens) / len(ours.prompt_tokens)
    print(f"{work}\nprompts of {mean_prompt:.0f} tokens on average; ours {ours.versions}; comlrl {theirs.versions}")
    print(DIFFERENCES)


if __name__ == "__main__":
    main()
