"""Runs untrusted programs against trusted tests: many short processes, each shut in, none of them deciding a verdict.

A program is model text, trained to raise its score, so it is taken to be hostile. Every test gets a freshly executed
program in a process of its own, forked from a small interpreter (the zygote) that has imported nothing of this project
but the few files of `mapl_core.sandbox_process`. Next to it, in another process, the trusted tests of a problem run
with a proxy in the place of the tested function: arguments and results cross as plain data. The verdict comes from
there, on a pipe that the program's process does not have.

What shuts a program in, each where the system has it: resource limits, an audit hook, a system call filter (seccomp),
file rules (landlock), namespaces for processes and network, a scratch file system of bounded size, no privileges. macOS
has only the limits (not on memory) and the hook; Windows has none of it, and nothing is run there. What is missing is
named in one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from mapl_core.sandbox_process.cleaning import clear
from mapl_core.sandbox_process.layers import ESSENTIAL, LAYERS

CODE = Path(__file__).parent  # of the package sandbox_process, put last: no file here may hide one of the library
BOOT = "import sys; sys.path.append({code!r}); from sandbox_process import zygote; zygote.main()"
HEADER, REPLY = struct.Struct(">dI?"), struct.Struct(">I")
GRACE = 0.8  # seconds by which a zygote may be late before it is given up itself
START_SECONDS = 20.0
CACHED_VERDICTS = 20_000


class SandboxWarning(UserWarning):
    """A layer of the sandbox is not available on this system."""


@dataclass(frozen=True)
class Limits:
    """What one test may take.

    Attributes:
        seconds: wall time of a test, start-up and top-level code of the program included.
        cpu_seconds: CPU time of each of its two processes.
        memory_bytes: address space of the program.
        file_bytes: size of a file that it writes.
        timeouts: after so many timeouts the remaining tests of a solution fail without being run.
    """

    seconds: float = 5.0
    cpu_seconds: int = 6
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20
    timeouts: int = 3


@dataclass(frozen=True)
class Program:
    """An untrusted program.

    Attributes:
        source: its text.
        entry_point: the function that the tests call.
        setup: trusted text that the tests may use: the problem's own imports and helper functions.
    """

    source: str
    entry_point: str
    setup: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of one test.

    Attributes:
        status: "pass", "fail", "timeout", or "unrun" (too many timeouts before it).
        message: why it failed; it may hold text of the program's making.
    """

    status: str
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "pass"


class SandboxError(RuntimeError):
    """The sandbox itself does not work; says nothing about a program."""


class Sandbox:
    """A pool of zygotes. Threads may share it; processes may not.

    Args:
        workers: tests at a time; default: one for each core.
        limits: what one test may take.
        without: layers to leave out, for tests of what remains.

    Attributes:
        layers: the layers in force, names of `LAYERS`.
    """

    def __init__(self, workers: int | None = None, limits: Limits | None = None, without: Sequence[str] = ()):
        if os.name != "posix":
            raise SandboxError(
                f"programs are not run on {sys.platform}: nothing there would shut them in; use Linux, macOS, a "
                "virtual machine (WSL) or Colab"
            )
        self.limits = limits or Limits()
        self.workers = workers or len(_usable_cores())
        self._owner = os.getpid()
        self._without = tuple(without)
        self._numbers = itertools.count()
        self._idle: queue.SimpleQueue[_Zygote | None] = queue.SimpleQueue()
        self._all: set[_Zygote] = set()
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[tuple[Program, str], Verdict] = OrderedDict()
        first = self._start()
        self.layers = first.layers
        self._idle.put(first)
        for _ in range(self.workers - 1):
            self._idle.put(None)  # started when needed
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        atexit.register(self.close)
        missing = [LAYERS[name] for name in ESSENTIAL if name not in self.layers]
        if missing:
            warnings.warn(
                f"programs are run with less protection than this project has elsewhere; missing here: "
                f"{'; '.join(missing)}. Use a Linux with these, or a virtual machine, for models you do not trust",
                SandboxWarning,
                stacklevel=2,
            )

    def run(self, program: Program, tests: Sequence[str]) -> list[Verdict]:
        """Run tests of one program, each with the program freshly executed.

        Args:
            program: what is tested.
            tests: trusted texts; each defines `check(candidate)`, and passes if calling it raises nothing.

        Returns:
            One verdict for each test. They do not depend on the number of workers: after `limits.timeouts` timeouts in
            the order of the tests all further ones are "unrun".

        Raises:
            SandboxError: if the sandbox cannot be used.
        """
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox belongs to the process that made it; make another one here")
        running: list[Future[Verdict]] = []
        problem = hash((program.entry_point, program.setup, *tests))
        for test in tests:
            # Enough to keep all workers busy; a solution that hangs is noticed before all of its tests are started.
            while sum(not future.done() for future in running) >= self.workers:
                next(future for future in running if not future.done()).result()
            if sum(future.result().status == "timeout" for future in running if future.done()) >= self.limits.timeouts:
                break
            running.append(self._threads.submit(self._verdict, program, test, problem))
        verdicts = [future.result() for future in running]
        timeouts = 0
        for index, verdict in enumerate(verdicts):
            if timeouts >= self.limits.timeouts:
                verdicts = verdicts[:index]
                break
            timeouts += verdict.status == "timeout"
        unrun = Verdict("unrun", f"not run: {self.limits.timeouts} tests before it took too long")
        return verdicts + [unrun] * (len(tests) - len(verdicts))

    def close(self) -> None:
        """End all processes and remove all scratch folders. Running tests fail."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            zygotes, self._all = self._all, set()
        for zygote in zygotes:
            zygote.end()
        self._threads.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdict(self, program: Program, test: str, problem: int) -> Verdict:
        with self._lock:
            if (known := self._verdicts.get((program, test))) is not None:
                self._verdicts.move_to_end((program, test))
                return known
        for attempt in (1, 2, 3):
            zygote = self._idle.get()
            try:
                zygote = zygote or self._start()
                verdict = zygote.run(program, test, self.limits.seconds, problem)
                break
            except TimeoutError:
                self._discard(zygote)
                zygote = None
                verdict = Verdict("timeout", "took longer than its limit")
                break
            except (OSError, EOFError) as error:
                self._discard(zygote)
                zygote = None
                if attempt == 3:
                    raise SandboxError(f"the sandbox's processes end unexpectedly ({error})") from error
            finally:
                self._idle.put(zygote)
        with self._lock:
            self._verdicts[program, test] = verdict
            if len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _start(self) -> _Zygote:
        zygote = _Zygote(next(self._numbers), self.limits, self._without)
        with self._lock:
            self._all.add(zygote)
        return zygote

    def _discard(self, zygote: _Zygote | None) -> None:
        if zygote is not None:
            with self._lock:
                self._all.discard(zygote)
            zygote.end()


class _Zygote:
    """One zygote's process as seen from here: a job goes in, a verdict comes out."""

    def __init__(self, number: int, limits: Limits, without: Sequence[str]):
        self.problem: int | None = None
        self.scratch = tempfile.mkdtemp(prefix="mapl-sandbox-")
        os.chmod(self.scratch, 0o711)  # a program may run as another user
        settings = {
            "code": str(CODE),
            "scratch": os.path.realpath(self.scratch),
            "worker": number % 1000,
            "without": list(without),
            **{name: value for name, value in asdict(limits).items() if name not in ("seconds", "timeouts")},
        }
        # -S and -s: no installed packages; -P: no current folder. The environment is empty but for the seed of hashes,
        # without which the order of a set, and with it a result, would change from one run to the next. This is the
        # isolated mode (-I) but for that seed.
        self.process = subprocess.Popen(
            [_interpreter(), "-s", "-S", "-P", "-c", BOOT.format(code=str(CODE)), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"},
            cwd=self.scratch,
            start_new_session=True,
            bufsize=0,
        )
        try:
            self.layers = frozenset(json.loads(self._receive(time.monotonic() + START_SECONDS)))
        except (EOFError, ValueError) as error:
            self.end()
            said = self.errors.decode("utf-8", "replace").strip().splitlines() or [str(error)]
            raise SandboxError(f"the sandbox's interpreter {_interpreter()} does not start: {said[-1]}") from error

    def run(self, program: Program, test: str, seconds: float, problem: int) -> Verdict:
        """Run one test; `problem` is a number for all tests that one judging process may run after another.

        Raises EOFError or OSError if the zygote is gone, TimeoutError (an OSError) if it does not answer.
        """
        body = json.dumps(
            {
                "program": program.source,
                "entry_point": program.entry_point,
                "setup": program.setup,
                "test": test,
            }
        ).encode()
        message = memoryview(HEADER.pack(seconds, len(body), problem != self.problem) + body)
        self.problem = problem
        self._receive(time.monotonic() + START_SECONDS)  # ready: what the last program left is cleared away
        deadline = time.monotonic() + seconds + GRACE
        while message:
            message = message[self.process.stdin.write(message) :]
        answer = self._receive(deadline)
        status = {b"P": "pass", b"F": "fail", b"T": "timeout"}.get(answer[:1])
        if status is None:
            raise EOFError("a test could not be started")
        if status == "timeout":
            return Verdict(status, f"took longer than {seconds:g} s")
        return Verdict(status, answer[1:].decode("utf-8", "replace"))

    def end(self) -> None:
        """Kill the process, and with it, by the signal at a parent's death, all it has made."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.errors = self.process.stderr.read(4096)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
        with contextlib.suppress(OSError):
            clear(self.scratch)
            os.rmdir(self.scratch)

    def _receive(self, deadline: float) -> bytes:
        size = REPLY.unpack(self._read(REPLY.size, deadline))[0]
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        waiting = select.poll()  # select() takes no descriptor above 1023
        waiting.register(self.process.stdout, select.POLLIN)
        while len(data) < size:
            if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no answer from the sandbox's process")
            part = os.read(self.process.stdout.fileno(), size - len(data))
            if not part:
                raise EOFError("the sandbox's process ended")
            data += part
        return data


@cache
def _shared(process: int) -> Sandbox:
    return Sandbox()


def shared_sandbox() -> Sandbox:
    """The sandbox of this process, made at the first use and closed at its end."""
    return _shared(os.getpid())


def _interpreter() -> str:
    """The real interpreter behind a virtual environment's link; a version manager's shim fails without its home."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
