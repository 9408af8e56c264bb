"""A small, clean interpreter that is forked for every test: one process that judges, one that runs the program.

    mapl_core.sandbox ── job ──> judge (forked from the zygote; reads the job, runs the trusted test)
                      <─ verdict ──┘  └─ fork ──> program (before the judge has read anything)

The program's process is made from a state that has never held a test or a verdict, shares no file with the judge but
the channel on which calls and results cross, and cannot reach the pipe that carries the verdict. The zygote runs
neither tests nor programs and reads neither jobs nor verdicts; it holds the watch, kills and cleans up.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time

from . import layers, program
from .channel import read_exactly
from .cleaning import clear
from .judge import judge

HEADER = struct.Struct(">dI")  # seconds for this test, bytes of the job that follows
REPLY = struct.Struct(">I")
PID = struct.Struct(">I")
READY, TIMEOUT, LOST = b"R", b"T", b"L"
DECIDED = b"D"  # from the judge: the verdict is on its way to the caller
JUDGE_MEMORY = 2**30
# Imported once here instead of once for every test.
COMMON_MODULES = (
    "abc", "array", "base64", "bisect", "cmath", "collections.abc", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "keyword",
    "math", "numbers", "operator", "queue", "random", "re", "secrets", "statistics", "string", "textwrap", "time",
    "traceback", "types", "typing", "unicodedata", "zlib",
)  # fmt: skip


def main() -> None:
    """Serve until standard input is closed, which the end of the parent does at the latest.

    The one argument is a JSON object, see `mapl_core.sandbox`.
    """
    settings = json.loads(sys.argv[1])
    context = prepare(settings)
    reply(json.dumps(sorted(context["layers"])).encode())
    gc.freeze()  # what is there now is never garbage, and stays shared with all that is forked
    number = 0
    while True:
        reply(READY)
        try:
            seconds, size = HEADER.unpack(read_exactly(0, HEADER.size))
        except EOFError:
            return
        number += 1
        scratch = os.path.join(settings["scratch"], str(number))
        os.mkdir(scratch, 0o700)
        if context["identity"] is not None:
            os.chown(scratch, context["identity"], context["identity"])
        failure = run_test({**context, "scratch": scratch}, size, time.monotonic() + seconds)
        if failure is not None:
            reply(failure)
        clear(settings["scratch"])  # a program may have left much; that is not the next one's time
        if failure == LOST:  # what the judge has not read of its job would be taken for the next one
            return


def prepare(settings: dict) -> dict:
    """Set up whatever all programs share; returns what a program's process needs to shut itself in."""
    os.environ.clear()
    sys.dont_write_bytecode = True
    sys.path = [path for path in sys.path if path != settings["code"]]
    for name in COMMON_MODULES:
        __import__(name)
    libc = layers.load_libc()
    library = [path for path in sys.path if os.path.isdir(path)]
    reached = {"limits", "audit"}
    superuser = os.getuid() == 0
    refused = set(settings["without"])
    if "network" not in refused:
        reached |= layers.separate(libc, settings["scratch"])
    if libc is not None:
        layers.call(libc, "prctl", layers.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    identity = None
    if superuser and all(layers.readable_by_others(path) for path in [*library, settings["scratch"]]):
        identity = layers.UNPRIVILEGED_ID + settings["worker"]
    if libc is not None or identity is not None or not superuser:
        reached.add("identity")
    rules = code = None
    if libc is not None:
        code = layers.system_call_filter()
        try:
            rules = layers.file_rules(libc, library_files(library), settings["scratch"])
            reached.add("landlock")
        except OSError:
            rules = None
        if code is not None:
            code = layers.filter_argument(code)
            if layers.works(lambda: layers.apply_filter(libc, code)):
                reached.add("seccomp")
    # Whatever can be made here once is not made in every program's process: there, each page that is written to is
    # copied first, and that is most of what a test costs.
    return {
        "libc": libc,
        "fork": layers.forker(libc),
        "layers": reached - refused,
        "rules": rules,
        "filter": code,
        "output": open(1, "w", encoding="utf-8", errors="replace", closefd=False),
        "refused_modules": [name for name in sys.modules if name.partition(".")[0] in program.REFUSED_MODULES],
        "library": library,
        "identity": identity,
        **{name: settings[name] for name in ("cpu_seconds", "memory_bytes", "file_bytes")},
    }


def library_files(library: list[str]) -> list[str]:
    """What a program may read: the interpreter's own library without the packages that were installed into it."""
    entries = [os.path.join(folder, name) for folder in library for name in os.listdir(folder)]
    return [path for path in entries if os.path.basename(path) not in ("site-packages", "dist-packages")]


def run_test(context: dict, size: int, deadline: float) -> bytes | None:
    """Fork judge and program, wait for the verdict until the deadline, and leave nothing of them behind.

    Returns:
        None if the judge has sent its verdict, else what to tell the caller in its place.
    """
    from_judge, to_zygote = os.pipe()
    child = context["fork"]()
    if child == 0:
        try:
            os.close(from_judge)
            judge_and_program(context, size, to_zygote)
        finally:
            os._exit(1)
    os.close(to_zygote)
    said, timed_out = b"", False
    while len(said) < PID.size + len(DECIDED):
        ready, _, _ = select.select([from_judge], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(from_judge, PID.size + len(DECIDED)) if ready else b""
        if not part:
            timed_out = not ready
            break
        said += part
    os.close(from_judge)
    if len(said) < PID.size:
        end_all(child)
        return LOST
    tested = PID.unpack_from(said)[0]
    if len(said) > PID.size:
        os.waitpid(child, 0)  # it has nothing left to do but to send the verdict
        end_all(tested)
        return None
    end_all(tested, child)
    return TIMEOUT if timed_out else b"Fthe judging process ended without a verdict"


def judge_and_program(context: dict, size: int, to_zygote: int) -> None:
    """The judge's process: make the program's process first, then read the job and run the test."""
    os.setpgid(0, 0)
    libc = context["libc"]
    if libc is not None:
        layers.call(libc, "prctl", layers.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    program_end, judge_end = socket.socketpair()
    child = context["fork"](layers.CLONE_NEWPID if "processes" in context["layers"] else 0)
    if child == 0:
        program.run_program(program_end.fileno(), context)
    program_end.close()
    job = json.loads(read_exactly(0, size))
    os.write(to_zygote, PID.pack(child))
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a test may print
        os.dup2(nowhere, descriptor)
    layers.set_limits(
        cpu_seconds=context["cpu_seconds"], memory_bytes=JUDGE_MEMORY, file_bytes=context["file_bytes"], processes=None
    )
    decision = judge(job, judge_end.fileno())
    os.write(to_zygote, DECIDED)
    reply(decision, answers)
    os._exit(0)


def end_all(*processes: int) -> None:
    """Kill these processes with their groups and wait until every descendant is gone."""
    for process in processes:
        for kill in (os.killpg, os.kill):
            try:
                kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # gone already, or it never had a group of its own
    while True:
        try:
            os.waitpid(-1, 0)  # orphans of a judge are this process's children, too
        except ChildProcessError:
            return


def reply(body: bytes, descriptor: int = 1) -> None:
    data = memoryview(REPLY.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]
