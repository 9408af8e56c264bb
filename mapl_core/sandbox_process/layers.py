"""What the operating system can keep from a program: resource limits, system call filter, file rules, namespaces.

The kernel's interfaces are called through ctypes: the bindings in the package registry are unfinished or need a system
library, and what is used here is a stable interface of a dozen calls. Each layer says whether it is there; those that
are missing are reported by `mapl_core.sandbox`, never passed over.
"""

from __future__ import annotations

import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable

LAYERS = {
    "limits": "resource limits on memory, CPU time, file size and processes",
    "audit": "an audit hook in the program's interpreter",
    "seccomp": "a system call filter (no network, processes, signals)",
    "landlock": "file rules of the kernel (nothing outside the scratch folder and the interpreter's library)",
    "processes": "a process namespace of its own for every program",
    "network": "a network namespace without interfaces",
    "scratch": "a scratch file system in memory, of bounded size",
    "identity": "another user or no privileges",
}
ESSENTIAL = ("limits", "audit", "seccomp", "landlock", "processes", "network", "identity")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SCRATCH_BYTES = 16 * 2**20
UNPRIVILEGED_ID = 64321  # belongs to nobody on usual systems

# System calls that a program is refused, by machine; what both machines number alike stands in `SAME`.
SAME = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434,
    "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447, "fchmodat2": 452, "setxattrat": 463,
    "removexattrat": 466,
}  # fmt: skip
REFUSED = {
    "x86_64": {
        "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47,
        "bind": 49, "listen": 50, "socketpair": 53, "accept4": 288, "recvmmsg": 299, "sendmmsg": 307,
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "setpgid": 109, "setsid": 112, "unshare": 272, "setns": 308, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "bpf": 321, "perf_event_open": 298, "add_key": 248,
        "request_key": 249, "keyctl": 250, "userfaultfd": 323, "personality": 135, "memfd_create": 319, "shmget": 29,
        "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "msgget": 68, "msgsnd": 69, "mq_open": 240,
        "setpriority": 141, "sched_setaffinity": 203, "ioprio_set": 251, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "inotify_init1": 294, "fanotify_init": 300, "truncate": 76, "chmod": 90,
        "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132,
        "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "mknod": 133, "mknodat": 259,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "sendto": 206,
        "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "accept4": 242, "recvmmsg": 243, "sendmmsg": 269,
        "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "setpgid": 154,
        "setsid": 157, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "bpf": 280, "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282,
        "personality": 92, "memfd_create": 279, "shmget": 194, "shmctl": 195, "shmat": 196, "msgget": 186,
        "msgsnd": 189, "semget": 190, "semop": 193, "mq_open": 180, "setpriority": 140, "sched_setaffinity": 122,
        "ioprio_set": 30, "name_to_handle_at": 264, "open_by_handle_at": 265, "inotify_init1": 26,
        "fanotify_init": 262, "truncate": 45, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
        "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
        "fremovexattr": 16, "mknodat": 33,
    },
}  # fmt: skip
# Audit architecture, then the calls that are looked at more closely.
MACHINES = {
    "x86_64": (0xC000003E, {"clone": 56, "prctl": 157, "prlimit64": 302, "clone3": 435}),
    "aarch64": (0xC00000B7, {"clone": 220, "prctl": 167, "prlimit64": 261, "clone3": 435}),
}
EPERM, ENOSYS = 1, 38
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CALL_NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the data that a filter sees

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_FILE, TRUNCATE = 1 << 1, 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 14


def load_libc() -> object | None:
    """The C library for direct system calls, on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def call(libc: object, name: str, *arguments: object) -> int:
    """Call a function of the C library.

    Raises:
        OSError: if it reports an error.
    """
    import ctypes

    plain = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(libc, name)(*plain)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def forker(libc: object | None) -> Callable[..., int]:
    """A function like os.fork; given flags (CLONE_NEWPID), the child is the first in namespaces of its own.

    On Linux it is the bare system call. What Python and the C library do about a fork besides is for processes with
    several threads, which the zygote and its children are not; and it takes longer than the fork, because every page
    that it touches is copied.
    """
    machine = MACHINES.get(platform.machine())
    if libc is None or machine is None:
        return lambda flags=0: os.fork()
    import ctypes

    number = machine[1]["clone"]
    # PyDLL: the interpreter stays locked, in the child as well.
    system_call = ctypes.PyDLL(None, use_errno=True).syscall
    rest = [ctypes.c_long(0)] * 4

    def fork(flags: int = 0) -> int:
        child = system_call(ctypes.c_long(number), ctypes.c_long(flags | signal.SIGCHLD), *rest)
        if child < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"clone: {os.strerror(error)}")
        return child

    return fork


def system_call_filter(machine: str | None = None) -> bytes | None:
    """The program of the system call filter for this machine, or None where its numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in MACHINES or sys.byteorder != "little":
        return None
    architecture, special = MACHINES[machine]

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def refuse(error: int = EPERM) -> bytes:
        return instruction(RETURN, ERROR | error)

    allow = instruction(RETURN, ALLOW)
    parts = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, architecture, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, CALL_NUMBER),
        instruction(JUMP_AT_LEAST, 0x40000000, 0, 1),  # the other calling convention of x86-64 has its own numbers
        refuse(),
    ]
    for number in sorted({*REFUSED[machine].values(), *SAME.values()}):
        parts += [instruction(JUMP_EQUAL, number, 0, 1), refuse()]
    # The C library falls back from clone3, whose flags a filter cannot see, to clone.
    parts += [instruction(JUMP_EQUAL, special["clone3"], 0, 1), refuse(ENOSYS)]
    first = instruction(LOAD, FIRST_ARGUMENT)
    # clone: threads only.
    parts += [instruction(JUMP_EQUAL, special["clone"], 0, 4), first]
    parts += [instruction(JUMP_ANY_BIT, CLONE_THREAD, 1, 0), refuse(), allow]
    # prlimit64: of the own process only. prctl: the signal at the parent's death stays.
    parts += [instruction(JUMP_EQUAL, special["prlimit64"], 0, 4), first]
    parts += [instruction(JUMP_EQUAL, 0, 1, 0), refuse(), allow]
    parts += [instruction(JUMP_EQUAL, special["prctl"], 0, 4), first]
    parts += [instruction(JUMP_EQUAL, PR_SET_PDEATHSIG, 0, 1), refuse(), allow]
    return b"".join([*parts, allow])


def filter_argument(program: bytes) -> tuple[object, object]:
    """A filter in the form in which the kernel takes it: where its program lies, and the program."""
    import ctypes

    code = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    return ctypes.create_string_buffer(description, len(description)), code


def apply_filter(libc: object, argument: tuple[object, object]) -> None:
    """Put the filter on this process, for good."""
    call(libc, "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # without it only a superuser may
    call(libc, "prctl", PR_SET_SECCOMP, 2, argument[0], 0, 0)


def file_rules(libc: object, readable: list[str], writable: str) -> int:
    """A landlock rule set: these files and folders can be read, this folder can also be written to; nothing else.

    Returns:
        its file descriptor, for `apply_file_rules`.

    Raises:
        OSError: if the kernel has no landlock.
    """
    import ctypes

    version = call(libc, "syscall", LANDLOCK_CREATE, None, 0, 1)
    rights = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", rights, 0b11, 0b11)  # files; TCP (4 on); signals and abstract sockets (6 on)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = call(libc, "syscall", LANDLOCK_CREATE, ctypes.create_string_buffer(attributes, 24), size, 0)
    read = READ_FILE | READ_DIR
    write = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_FILE | TRUNCATE
    for path, allowed in [*((path, read) for path in readable), (writable, (read | write) & rights)]:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            allowed = allowed if os.path.isdir(path) else allowed & ~READ_DIR
            rule = struct.pack("=Qi", allowed, folder)
            call(libc, "syscall", LANDLOCK_ADD, rules, 1, ctypes.create_string_buffer(rule, len(rule)), 0)
        finally:
            os.close(folder)
    return rules


def apply_file_rules(libc: object, rules: int) -> None:
    call(libc, "syscall", LANDLOCK_RESTRICT, rules, 0)


def no_capabilities(libc: object) -> tuple[object, object, object]:
    """What `drop_capabilities` hands to the kernel, made beforehand."""
    import ctypes

    header = struct.pack("=Ii", 0x20080522, 0)
    return libc.capset, ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(b"\0" * 24, 24)


def drop_capabilities(argument: tuple[object, object, object]) -> None:
    """Give up every privilege of a superuser, for good."""
    capset, header, none = argument
    if capset(header, none) != 0:
        raise OSError("capset: the privileges could not be given up")


def set_limits(*, cpu_seconds: int | None, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    """Bound what this process and its children may take; None leaves a bound as it is."""
    for limit, bound in bounds(
        cpu_seconds=cpu_seconds, memory_bytes=memory_bytes, file_bytes=file_bytes, processes=processes
    ):
        set_limit(limit, bound)


def bounds(
    *, cpu_seconds: int | None, memory_bytes: int, file_bytes: int, processes: int | None
) -> list[tuple[int, int]]:
    """The limits that this system knows, each with the bound that may be set."""
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_FSIZE": file_bytes,
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": processes,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    found = []
    for name, value in wanted.items():
        if value is not None and hasattr(resource, name):
            hard = resource.getrlimit(getattr(resource, name))[1]
            found.append((getattr(resource, name), value if hard == resource.RLIM_INFINITY else min(value, hard)))
    return found


def set_limit(limit: int, bound: int) -> None:
    try:
        resource.setrlimit(limit, (bound, bound))
    except (OSError, ValueError):
        if sys.platform.startswith("linux"):
            raise  # elsewhere some limits exist by name only


def grant_cpu_time(seconds: int) -> None:
    """Let this process take so many more seconds of CPU time than it has taken, and no more."""
    usage, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    bound = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def children() -> set[int]:
    """The children of this process, of one thread, as far as the system tells: orphans of its children's too."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def separate(libc: object | None, scratch: str) -> set[str]:
    """Move this process into namespaces of its own, as far as the system allows; the names of what was reached."""
    reached: set[str] = set()
    if libc is None:
        return reached
    user = (os.getuid(), os.getgid())
    try:
        call(libc, "unshare", CLONE_NEWNET)
    except OSError:
        if not works(lambda: _new_user(libc, *user)):  # half done it would leave this process without a user
            return reached
        _new_user(libc, *user)
    reached.add("network")
    for flags in (CLONE_NEWIPC, CLONE_NEWUTS):
        _attempt(libc, "unshare", flags)
    # Private first: otherwise the mount would be seen from outside. 1 << 18: private, 1 << 14: recursively.
    if _attempt(libc, "unshare", CLONE_NEWNS) and _attempt(
        libc, "mount", b"none", b"/", None, (1 << 18) | (1 << 14), 0
    ):
        options = f"size={SCRATCH_BYTES},nr_inodes=2000,mode=755".encode()
        if _attempt(libc, "mount", b"none", os.fsencode(scratch), b"tmpfs", 0b1110, options):  # no suid, device, exec
            reached.add("scratch")
    if works(lambda: call(libc, "unshare", CLONE_NEWPID)):
        reached.add("processes")
    return reached


def works(attempt: Callable[[], object]) -> bool:
    """Whether something works, tried out in a process that ends at once."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _new_user(libc: object, uid: int, gid: int) -> None:
    call(libc, "unshare", CLONE_NEWUSER | CLONE_NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _attempt(libc: object, name: str, *arguments: object) -> bool:
    try:
        call(libc, name, *arguments)
    except OSError:
        return False
    return True


def readable_by_others(path: str) -> bool:
    """Whether a process of any user can reach and read this folder."""
    path = os.path.realpath(path)
    if os.stat(path).st_mode & 0o005 != 0o005:
        return False
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True
