"""A small, clean interpreter that is forked for every program, and once for every problem to judge what they answer.

    mapl_core.sandbox ── job ────> judge    reads the job, runs the trusted test
                      <─ verdict ──┘ │ calls and results, on a channel that the zygote hands over
                                   program  forked from the zygote before the judge has read anything

The program's process is made from a state that has never held a test or a verdict, shares no file with the judge but
that channel, and cannot reach the pipe that carries the verdict. The zygote runs neither tests nor programs and reads
neither jobs nor verdicts; it holds the watch, kills and cleans up.

A judge serves the tests of one problem, one after the other: only plain data reach it from a program, so that nothing
of one program is left for the next.
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

HEADER = struct.Struct(">dI?")  # seconds for this test, bytes of the job that follows, whether it is another problem's
SIZE, REPLY = struct.Struct(">I"), struct.Struct(">I")
READY, TIMEOUT, LOST = b"R", b"T", b"L"
# Between zygote and judge: the job is read; there is a verdict; let the caller have it; the caller has it.
READ, DECIDED, GO, SENT = b"r", b"d", b"g", b"s"
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
    number, judging = 0, None
    while True:
        reply(READY)
        try:
            seconds, size, is_new = HEADER.unpack(read_exactly(0, HEADER.size))
        except EOFError:
            return
        if judging is not None and judging.is_alive and is_new:
            judging.end()
        if judging is None or not judging.is_alive:
            judging = Judge(context)
        number += 1
        scratch = os.path.join(settings["scratch"], str(number))
        os.mkdir(scratch, 0o700)
        if context["identity"] is not None:
            os.chown(scratch, context["identity"], context["identity"])
        failure = run_test({**context, "scratch": scratch}, judging, size, time.monotonic() + seconds)
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
        "no_capabilities": libc and layers.no_capabilities(libc),
        "library": library,
        "readable": tuple(os.path.realpath(path) for path in library),
        "identity": identity,
        # The superuser's processes are not counted by the kernel; there the system call filter refuses new ones.
        "bounds": layers.bounds(
            processes=0 if identity is not None or not superuser else None,
            **{name: settings[name] for name in ("cpu_seconds", "memory_bytes", "file_bytes")},
        ),
        **{name: settings[name] for name in ("cpu_seconds", "file_bytes")},
    }


def library_files(library: list[str]) -> list[str]:
    """What a program may read: the interpreter's own library without the packages that were installed into it."""
    entries = [os.path.join(folder, name) for folder in library for name in os.listdir(folder)]
    return [path for path in entries if os.path.basename(path) not in ("site-packages", "dist-packages")]


class Judge:
    """The judge's process, as the zygote knows it."""

    def __init__(self, context: dict):
        self.channel, inner = socket.socketpair()
        self.process = context["fork"]()
        if self.process == 0:
            try:
                self.channel.close()
                judge_tests(context, inner)
            finally:
                os._exit(1)
        inner.close()
        self.is_alive = True

    def begin(self, size: int, program_channel: socket.socket) -> None:
        """Let it read a job of that many bytes and test the program at the other end of the channel."""
        try:
            socket.send_fds(self.channel, [SIZE.pack(size)], [program_channel.fileno()])
        except OSError:  # it is gone; whoever waits for its verdict will see that
            pass

    def wait(self, deadline: float) -> tuple[bytes, bool]:
        """What it says until it has a verdict, ends, or the deadline passes; and whether that has passed."""
        said = b""
        while not said.endswith(DECIDED):
            ready, _, _ = select.select([self.channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return said, True
            part = self.channel.recv(1)
            if not part:
                break
            said += part
        return said, False

    def send_verdict(self) -> bool:
        """Let the verdict go to the caller; whether it is there."""
        try:
            self.channel.send(GO)
            return self.channel.recv(1) == SENT
        except OSError:
            return False

    def end(self) -> None:
        """Kill it; once only, for its number may be another process's after that."""
        end_process(self.process)
        self.channel.close()
        self.is_alive = False


def run_test(context: dict, judging: Judge, size: int, deadline: float) -> bytes | None:
    """Fork a program for the judge, wait for the verdict until the deadline, and leave nothing of the program behind.

    Returns:
        None if the judge has sent its verdict, else what to tell the caller in its place.
    """
    program_end, judge_end = socket.socketpair()
    has_namespace = "processes" in context["layers"]
    tested = context["fork"](layers.CLONE_NEWPID if has_namespace else 0)
    if tested == 0:
        program.run_program(program_end.fileno(), context)
    program_end.close()
    judging.begin(size, judge_end)
    judge_end.close()
    said, timed_out = judging.wait(deadline)
    failure = None
    if not said.endswith(DECIDED):
        judging.end()  # first: it would take the end of the program for an answer
        failure = TIMEOUT if timed_out else b"Fthe judging process ended without a verdict"
    elif not judging.send_verdict():
        judging.end()
        failure = LOST
    end_process(tested)
    if not has_namespace:  # otherwise the kernel has ended all that the program had started
        end_strays(judging.process)
    return failure if READ in said else LOST


def judge_tests(context: dict, channel: socket.socket) -> None:
    """The judge's process: jobs come from the caller, programs from the zygote, verdicts go to the caller."""
    os.setpgid(0, 0)
    libc = context["libc"]
    if libc is not None:
        layers.call(libc, "prctl", layers.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    jobs, answers, nowhere = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a test may print
        os.dup2(nowhere, descriptor)
    layers.set_limits(cpu_seconds=None, memory_bytes=JUDGE_MEMORY, file_bytes=context["file_bytes"], processes=None)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, SIZE.size, 1)
        if not message:
            return
        job = json.loads(read_exactly(jobs, SIZE.unpack(message)[0]))
        channel.send(READ)
        layers.grant_cpu_time(context["cpu_seconds"])
        decision = judge(job, descriptors[0])
        os.close(descriptors[0])
        channel.send(DECIDED)
        if channel.recv(1) != GO:
            return
        reply(decision, answers)
        channel.send(SENT)


def end_process(process: int) -> None:
    """Kill a child with its group and wait until all of them are gone."""
    for kill in (os.killpg, os.kill):
        try:
            kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone already, or it never had a group of its own
    for group in (process, -process):
        while True:
            try:
                os.waitpid(group, 0)
            except ChildProcessError:
                break


def end_strays(spared: int) -> None:
    """Kill what a program without a namespace of its own started and moved out of its group: this process's now."""
    for stray in layers.children() - {spared}:
        end_process(stray)


def reply(body: bytes, descriptor: int = 1) -> None:
    data = memoryview(REPLY.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]
