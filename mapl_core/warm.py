"""Jobs that begin warm: one process imports the heavy libraries, and every job and its kernel are forked from it.

A kernel that starts from nothing spends about ten seconds of a core on importing torch, transformers and peft, which is
most of the time of a job that trains nothing. Python's own fork server imports them once; nothing of this project is
imported there, so that a job reads the code as it is when the job begins. Only Linux is served, and only without a GPU:
libraries may not be forked once they have looked at one, and its jobs take hours anyway.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# What a job's process and its kernel import before they do anything of their own.
LIBRARIES = (
    *("torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.generation", "peft", "safetensors.torch"),
    *("pandas", "matplotlib.pyplot", "scipy.optimize", "sklearn.feature_extraction.text"),
    *("papermill", "nbclient", "ipykernel.kernelapp", "psutil", "yaml", "filelock"),
)

STOCK_KERNEL = ["-m", "ipykernel_launcher"]
# What multiprocessing says of a process whose fork server has died, and what that means: its jobs end with it.
LOST_TRACK, LOST = 255, -signal.SIGKILL


def can_start_warm(gpus: tuple[str, ...] = ()) -> bool:
    """Whether jobs of this machine, which has these GPUs, may be forked."""
    return sys.platform == "linux" and not gpus


class Child:
    """A forked process behind the part of `subprocess.Popen` that its owners use."""

    stdin = stdout = stderr = None

    def __init__(self, process: BaseProcess):
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        code = self._process.exitcode
        return LOST if code == LOST_TRACK else code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._process.join()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# In the runner
# ---------------------------------------------------------------------------------------------------------------------


def start_job(specification: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> Child:
    """Fork a job: `mapl_core.jobs.run` of the specification, in a session of its own, with `log` as its output.

    The first call starts the fork server, with this environment, and returns when it has imported the libraries.

    Raises:
        OSError: if the server has ended, or cannot be started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    process = context.Process(target=_run_job, args=(dict(specification), str(log)))
    with _environment(environment):
        try:
            process.start()
        except EOFError:
            raise OSError(f"the process that imports {LIBRARIES[0]} and the rest ended; free some memory") from None
    return Child(process)


@contextmanager
def _environment(values: Mapping[str, str]):
    """For as long as a child takes over the environment, `values` are it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---------------------------------------------------------------------------------------------------------------------
# In the forked processes
# ---------------------------------------------------------------------------------------------------------------------


def _run_job(specification: dict[str, Any], log: str) -> None:
    """The job's process. Its kernel is forked first, while nothing runs here that a fork could cut in two."""
    os.setsid()  # Ctrl-C reaches the runner alone, which then ends its jobs
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    kernel = _Kernel()
    from mapl_core import jobs

    server, runner = os.getppid(), multiprocessing.parent_process()
    try:
        # Each of the two outlives the other: the server goes on for as long as one of its children does.
        sys.exit(jobs.run(specification, lambda: os.getppid() == server and runner.is_alive(), _manager_of(kernel)))
    finally:
        kernel.close()


class _Kernel:
    """A forked process that waits to be told which kernel it is to be."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._orders, told = context.Pipe()
        process = context.Process(target=_become_kernel, args=(told, self._orders))
        process.start()
        told.close()
        self.child = Child(process)

    def launch(self, command: list[str], folder: str, environment: Mapping[str, str]) -> Child:
        """Let it become the kernel that `command` would have started. Returns when it has a session of its own."""
        self._orders.send((command, folder, dict(environment)))
        self._orders.recv()
        return self.child

    def close(self) -> None:
        """A kernel that was never launched ends; nothing else would ever tell it to."""
        self._orders.close()


def _become_kernel(orders: Connection, other_end: Connection) -> None:
    other_end.close()
    os.setsid()  # signals to its process group must not reach the job that sends them
    try:
        command, folder, environment = orders.recv()
    except EOFError:  # the job ended before it needed a kernel
        return
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    orders.send("ready")
    from ipykernel.kernelapp import launch_new_instance

    sys.argv = command[2:]
    try:
        launch_new_instance()
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them; temporary folders are removed by one


def _manager_of(kernel: _Kernel) -> type:
    """A kernel manager, as papermill takes it, whose kernel is the one that waits."""
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.provisioning import LocalProvisioner

    class Forked(LocalProvisioner):
        async def launch_kernel(self, cmd: list[str], **options: Any) -> Mapping[str, Any]:
            if cmd[1:3] != STOCK_KERNEL:  # somebody's own kernel of this name, which starts as it says
                return await super().launch_kernel(cmd, **options)
            self.cwd = options.get("cwd") or os.getcwd()
            self.process = kernel.launch(cmd, str(self.cwd), options["env"])
            self.pid = self.pgid = self.process.pid
            return self.connection_info

    class Manager(AsyncKernelManager):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.provisioner = Forked(kernel_spec=self.kernel_spec, parent=self)

    return Manager
