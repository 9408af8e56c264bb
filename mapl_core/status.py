"""The status table: what of a request is done, runs, failed, can go on, must still be done. Writes nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mapl_core.grid import NOTEBOOK_FOLDER, UsageError, parse
from mapl_core.plan import STATES, Survey, survey


def show_status(arguments: Sequence[str], notebook_folder: Path = NOTEBOOK_FOLDER) -> int:
    """Print the table for the given filters. Returns 0, whatever the states are, and 2 for a request that fails."""
    try:
        request = parse(arguments)
        if request.force or request.dry_run or request.workers or request.slurm:
            raise UsageError("status starts nothing: it takes only the flags that say which jobs, and --results")
        print(describe_status(survey(request, notebook_folder)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def describe_status(seen: Survey) -> str:
    """One line a job: name, state, seconds and peak memory (MiB) of a whole run, and why or how far; then the sums."""
    lines = [f"{'job':32} {'state':12} {'seconds':>8} {'MiB':>6}"]
    for job in seen.asked:
        found = seen.found[job]
        seconds, memory = (f"{found.seconds:.1f}", str(found.memory_mib)) if found.is_whole else ("", "")
        lines.append(f"{job.name:32} {found.state:12} {seconds:>8} {memory:>6}  {found.detail}".rstrip())
    return "\n".join([*lines, _summary(seen), f"results: {seen.folder}"])


def _summary(seen: Survey) -> str:
    found = [seen.found[job] for job in seen.asked]
    counts = Counter(entry.state for entry in found)
    listed = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    whole = [entry for entry in found if entry.is_whole]
    seconds, memory = sum(entry.seconds for entry in whole), max((entry.memory_mib for entry in whole), default=0)
    measured = f"; whole runs: {seconds:.0f} seconds in all, at most {memory} MiB" if whole else ""
    return f"{len(found)} jobs of profile {seen.profile.name}: {listed}{measured}"
