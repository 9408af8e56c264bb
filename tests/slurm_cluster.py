"""A real Slurm for tests: one node on this machine, from Debian's packages slurm-wlm and munge."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
START_SECONDS = 60

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=small Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no Slurm can be started here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install -y slurm-wlm munge"
    return "" if os.geteuid() == 0 else "needs root, to start the daemons of Slurm"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd in `folder`; yields the environment variables that its clients need.

    Raises:
        RuntimeError: with the daemons' logs, if the node is not idle after START_SECONDS.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    host = socket.gethostname().split(".")[0]
    ports = {"controller_port": _free_port(), "node_port": _free_port()}
    configuration.write_text(CONFIGURATION.format(folder=folder, host=host, **ports))
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    environment = {"SLURM_CONF": str(configuration), "PATH": SEARCHED}
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items())],
        ["slurmctld", "-D", "-c", "-f", str(configuration)],
        ["slurmd", "-D", "-c", "-f", str(configuration), "-N", host],
    ]
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "wb") as output:
                daemons.append(subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output))
            if command[0] == "munged":
                _wait_for(lambda: files["socket"].exists(), folder)
        _wait_for(lambda: _node_is_idle(environment), folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _node_is_idle(environment: dict[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--format=%T"]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return run.stdout.strip() == "idle"


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = [
                f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in sorted(folder.glob("*.log"))
            ]
            raise RuntimeError("Slurm did not start\n" + "\n".join(logs))
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
