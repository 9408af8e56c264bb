"""The untrusted side: one process that runs one program and answers calls of its entry point.

Everything that decides a verdict lies elsewhere. Whatever a program does to this process, its modules and its memory,
it can only change the plain data that go back, which are its own answers anyway.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType

from . import layers, plain_data
from .channel import receive, send

CHANNEL = 3  # the only open file of a program besides the three standard ones, which lead nowhere
RULES = 4
ANSWER, ERROR = b"R", b"E"
ERROR_CHARACTERS = 300

REFUSED_EVENTS = (
    "ctypes.", "socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.kill",
    "os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr", "os.lockf", "os.add_dll",
    "pty.", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit", "syslog.", "webbrowser.", "sqlite3.",
    "fcntl.ioctl", "shutil.chown",
)  # fmt: skip
READING_EVENTS = ("os.listdir", "os.scandir", "os.chdir", "os.getxattr", "os.listxattr")
WRITING_EVENTS = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate")
REFUSED_MODULES = ("ctypes", "_ctypes", "_posixsubprocess", "sandbox_process")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def run_program(channel: int, context: dict) -> None:
    """Shut this process in, then serve. Never returns."""
    try:
        _shut_in(channel, context)
        serve(CHANNEL)
    finally:
        os._exit(1)


def _shut_in(channel: int, context: dict) -> None:
    libc, reached, rules, scratch = context["libc"], context["layers"], context["rules"], context["scratch"]
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = [(nowhere, 0), (nowhere, 1), (nowhere, 2), (channel, CHANNEL)]
    # First out of the way: a number of the new places may be in use by another file of the list.
    moved = [(os.dup2(os.dup(source), 100 + place, inheritable=True), place) for source, place in kept]
    if rules is not None:
        moved.append((os.dup2(rules, 100 + RULES), RULES))
    for source, place in moved:
        os.dup2(source, place)
    os.closerange(RULES + (rules is not None), resource.getrlimit(resource.RLIMIT_NOFILE)[0] & 0xFFFFF)
    os.chdir(scratch)
    os.umask(0o077)
    for limit, bound in context["bounds"]:
        layers.set_limit(limit, bound)
    if context["identity"] is not None:
        os.setgroups([])
        os.setresgid(*[context["identity"]] * 3)
        os.setresuid(*[context["identity"]] * 3)
    if libc is not None:
        layers.drop_capabilities(context["no_capabilities"])
        layers.call(libc, "prctl", layers.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        layers.call(libc, "prctl", layers.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "landlock" in reached:
        layers.apply_file_rules(libc, RULES)
        os.close(RULES)
    if "seccomp" in reached:
        layers.apply_filter(libc, context["filter"])
    sys.argv = [""]
    sys.path = list(context["library"])
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = context["output"]
    for name in context["refused_modules"]:
        del sys.modules[name]
    hook = audit_hook(context["readable"], scratch) if "audit" in reached else None
    context.clear()
    random.seed(0)
    if hook is not None:
        sys.addaudithook(hook)


def serve(channel: int) -> None:
    """Receive the program and its entry point, run it, and answer calls until the other side has had enough."""
    entry_point, source = plain_data.loads(receive(channel))
    module = ModuleType("solution")
    sys.modules["solution"] = module
    main = failure = None
    try:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), module.__dict__)
        main = module.__dict__[entry_point]
    except BaseException as error:  # a program may raise whatever it likes, SystemExit and KeyboardInterrupt included
        failure = _describe(error)
    while True:
        request = receive(channel)
        if failure is not None:
            send(channel, ERROR + failure)
            continue
        try:
            arguments, keywords = plain_data.loads(request)
            answer = ANSWER + plain_data.dumps(main(*arguments, **keywords))
        except BaseException as error:
            answer = ERROR + _describe(error)
        send(channel, answer)


def _describe(error: BaseException) -> bytes:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{name}: {text}"[:ERROR_CHARACTERS].encode("utf-8", "replace")


def audit_hook(library: tuple[str, ...], scratch: str) -> Callable[[str, tuple], None]:
    """Refuse what a program has no business with. A determined one can get around it; the kernel's layers it cannot.

    Args:
        library, scratch: real paths, without links.
    """
    inside = (scratch,)
    readable = (*inside, *library)

    def lies_in(path: object, folders: tuple[str, ...]) -> bool:
        if isinstance(path, int):
            return True  # a file that is open already
        path = os.path.realpath(os.fsdecode(path))
        return any(path == folder or path.startswith(folder + os.sep) for folder in folders)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            refused = not lies_in(path, inside if flags and flags & WRITING_FLAGS else readable)
        elif event.startswith(READING_EVENTS):
            refused = arguments[0] is not None and not lies_in(arguments[0], readable)
        elif event.startswith(WRITING_EVENTS):
            paths = [value for value in arguments if isinstance(value, str | bytes | os.PathLike)]
            refused = not all(lies_in(path, inside) for path in paths)
        elif event == "import":
            refused = arguments[0].partition(".")[0] in REFUSED_MODULES
        else:
            refused = event.startswith(REFUSED_EVENTS)
        if refused:
            raise PermissionError(f"{event} is refused in the sandbox")

    return hook
