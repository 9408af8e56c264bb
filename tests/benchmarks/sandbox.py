"""How many solutions a second the sandbox tests: `python tests/benchmarks/sandbox.py`.

A solution here is a right answer to a pocket problem: a short program with four tests, each in a freshly executed
process. The goal is 60 solutions a second on two cores, asked one after the other by one thread, as training does: so
many answers to one problem (m), then to the next. Every answer is made different, so that no remembered verdict is
counted. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from mapl_core.pocket.coophe import best_answers, make_tasks
from mapl_core.rewards.coophe import coophe_reward
from mapl_core.sandbox import Sandbox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=None, help="tests at a time; default: one for each core")
    parser.add_argument("--solutions", type=int, default=120)
    parser.add_argument("--answers", type=int, default=8, help="to each problem, as the pocket profile's m")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    tasks = make_tasks("train")
    rates = []
    with Sandbox(workers=options.workers) as sandbox:
        print(f"{sandbox.workers} workers; layers: {', '.join(sorted(sandbox.layers))}")
        for repeat in range(options.repeats + 1):
            started = time.perf_counter()
            for number in range(options.solutions):
                task = tasks[number // options.answers % len(tasks)]
                helper, answer = best_answers(task)
                answer = answer.replace("\n    return", f"\n    # {repeat} {number}\n    return")
                assert coophe_reward([helper, answer], task, sandbox).total == 4.0
            rate = options.solutions / (time.perf_counter() - started)
            if repeat:  # the first round warms up
                rates.append(rate)
    listed = ", ".join(f"{rate:.0f}" for rate in rates)
    print(f"{median(rates):.0f} solutions of 4 tests a second ({listed}); {4 * median(rates):.0f} tests a second")


if __name__ == "__main__":
    main()
