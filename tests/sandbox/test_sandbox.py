"""The sandbox as its callers see it: verdicts, limits, the pool, what is said when something is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mapl_core import sandbox as sandbox_module
from mapl_core.sandbox import Limits, Program, Sandbox, SandboxError, SandboxWarning, Verdict, shared_sandbox

GOOD = "def f(x):\n    return x + 1\n"
LINUX = sys.platform.startswith("linux")


def expect(argument, value):
    return f"def check(candidate):\n    assert candidate({argument!r}) == {value!r}\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(seconds=20.0)) as sandbox:  # nothing here hangs; a busy machine may be slow
        yield sandbox


def run(sandbox, source, *tests, setup=""):
    return sandbox.run(Program(source, "f", setup), tests)


# Verdicts ----------------------------------------------------------------------------------------------------


def test_a_right_program_passes_and_a_wrong_one_fails_with_the_tests_message(sandbox):
    tests = [expect(1, 2), "def check(candidate):\n    assert candidate(1) == 3, 'three'\n"]
    assert run(sandbox, GOOD, *tests) == [Verdict("pass"), Verdict("fail", "three")]


def test_an_exception_of_the_program_is_the_failures_message(sandbox):
    verdict = run(sandbox, "def f(x):\n    return x['a']\n", expect(1, 2))[0]
    assert verdict == Verdict("fail", "TypeError: 'int' object is not subscriptable")
    assert run(sandbox, "f = 1 / 0\n", expect(1, 2))[0].message == "ZeroDivisionError: division by zero"
    assert run(sandbox, "def g(x):\n    return 1\n", expect(1, 2))[0].message == "KeyError: 'f'"
    assert run(sandbox, "def f(x:\n", expect(1, 2))[0].message.startswith("SyntaxError")


def test_a_test_that_compares_with_what_cannot_be_compared_fails(sandbox):
    test = "def check(candidate):\n    assert candidate(1) < 3\n"
    assert run(sandbox, "def f(x):\n    return None\n", test)[0].status == "fail"


def test_a_program_cannot_hide_that_it_raises_from_a_test_that_expects_nothing(sandbox):
    test = (
        "def check(candidate):\n    try:\n        value = candidate(1)\n    except ValueError:\n        return\n"
        "    assert value\n"
    )
    assert run(sandbox, "def f(x):\n    raise ValueError\n", test)[0].status == "fail"


PLAIN = [
    None, True, 0, -1, 10**40, -(2**63), 1.5, float("inf"), 1 + 2j, "", "a\u00e9\U0001f600", b"\x00\xff", [],
    [1, [2, (3,)]],
    (), (1,), {1, 2}, frozenset({3}), {}, {"a": {1: (2, {3})}}, {(1, 2): None},
]  # fmt: skip


def test_plain_data_cross_unchanged_in_both_directions(sandbox):
    source = "def f(x, *more, **named):\n    return (x, more, named)\n"
    tests = [
        f"def check(candidate):\n    v = {value!r}\n    r = candidate(v, v, k=v)\n"
        "    assert r == (v, (v,), {'k': v}) and type(r[0]) is type(v)\n".replace("inf", "float('inf')")
        for value in PLAIN
    ]
    assert [verdict.status for verdict in run(sandbox, source, *tests)] == ["pass"] * len(PLAIN)


def test_counters_and_ordered_and_default_dictionaries_arrive_as_dictionaries(sandbox):
    source = (
        "from collections import Counter, OrderedDict, defaultdict\ndef f(x):\n"
        "    return [Counter('aab'), OrderedDict(a=1), defaultdict(int, b=2)]\n"
    )
    test = (
        "def check(candidate):\n    r = candidate(1)\n    assert r == [{'a': 2, 'b': 1}, {'a': 1}, {'b': 2}]\n"
        "    assert [type(v) for v in r] == [dict] * 3\n"
    )
    assert run(sandbox, source, test)[0].passed


@pytest.mark.parametrize(
    "value",
    [
        "range(3)", "bytearray(b'a')", "object()", "iter([])", "(i for i in [1])", "lambda: 1", "int", "f", "Ellipsis",
        "NotImplemented", "__import__('decimal').Decimal(1)", "__import__('fractions').Fraction(1)",
        "__import__('enum').IntEnum('E', 'a').a", "__import__('collections').deque([1])", "memoryview(b'a')",
        "[{1: {2: [range(1)]}}]",
        "__import__('collections').namedtuple('N', 'a')(1)", "{}.keys()",
    ],
)  # fmt: skip
def test_any_other_type_fails_the_test_even_if_it_would_be_equal(sandbox, value):
    test = "def check(candidate):\n    assert candidate(1) is not None\n"
    verdict = run(sandbox, f"def f(x):\n    return {value}\n", test)[0]
    assert verdict.status == "fail" and "not plain data" in verdict.message


def test_arguments_cross_by_value(sandbox):
    test = "def check(candidate):\n    v = [1]\n    assert candidate(v) == [1, 2]\n    assert v == [1]\n"
    assert run(sandbox, "def f(x):\n    x.append(2)\n    return x\n", test)[0].passed


def test_a_test_may_use_the_problems_own_helpers_and_the_entry_points_name(sandbox):
    test = "def check(candidate):\n    assert helper(candidate(1)) == 4 and f(1) == 2\n"
    assert run(sandbox, GOOD, test, setup="def helper(x):\n    return 2 * x\ndef f(x):\n    '''Stated.'''\n")[0].passed


def test_every_test_gets_a_freshly_executed_program(sandbox):
    source = (
        "import os\ncount = len(os.listdir('.'))\nopen('seen', 'w').close()\n"
        "def f(x):\n    global count\n    count += 1\n    return count\n"
    )
    tests = [expect(i, 1) for i in range(4)]
    assert all(verdict.passed for verdict in run(sandbox, source, *tests))


def test_calls_within_a_test_meet_the_same_program(sandbox):
    test = "def check(candidate):\n    assert [candidate(0) for _ in range(3)] == [1, 2, 3]\n"
    assert run(sandbox, "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n\n", test)[0].passed


def test_sets_come_in_the_same_order_in_every_process():
    source = "def f(x):\n    return list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})\n"
    test = "def check(candidate):\n    assert candidate(1) == 0, candidate(1)\n"
    said = set()
    for _ in range(2):
        with Sandbox(workers=1) as sandbox:
            said.add(run(sandbox, source, test)[0].message)
    assert len(said) == 1 and "'a'" in said.pop()


# Where a program runs ------------------------------------------------------------------------------------------


def test_a_program_meets_no_environment_no_arguments_no_packages_and_an_empty_folder(sandbox, monkeypatch):
    monkeypatch.setenv("MAPL_SECRET", "1")
    source = (
        "import os, sys\ndef f(x):\n    here = os.getcwd() if x == 1 else ''\n"
        "    return [dict(os.environ), sys.argv, os.listdir('.'), sys.stdin.read(), 'torch' in sys.modules,\n"
        "            'mapl_core' in sys.modules, any('site-packages' in p for p in sys.path)]\n"
    )
    test = "def check(candidate):\n    assert candidate(0) == [{}, [''], [], '', False, False, False], candidate(0)\n"
    assert run(sandbox, source, test) == [Verdict("pass")]


def test_a_program_can_use_its_scratch_folder_and_the_standard_library(sandbox):
    source = (
        "import decimal, email.message, json, os, shutil, tempfile, unittest, xml.etree.ElementTree, zoneinfo\n"
        "def f(x):\n    os.mkdir('d')\n    open('d/a', 'w').write('hi')\n    os.rename('d/a', 'd/b')\n"
        "    text = open('d/b').read()\n    os.remove('d/b')\n    os.rmdir('d')\n    return text\n"
    )
    assert run(sandbox, source, expect(1, "hi")) == [Verdict("pass")]


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_the_zygote_has_imported_neither_torch_nor_this_package(sandbox):
    for zygote in sandbox._all:
        maps = Path(f"/proc/{zygote.process.pid}/maps").read_text()
        assert "torch" not in maps and "numpy" not in maps and "site-packages" not in maps
        assert Path(f"/proc/{zygote.process.pid}/environ").read_bytes() == b"PYTHONHASHSEED=0\x00"


def test_the_real_interpreter_is_started_not_the_link_of_a_virtual_environment(sandbox):
    interpreter = sandbox_module._interpreter()
    assert os.path.realpath(interpreter) == interpreter and not os.path.islink(interpreter)
    version = subprocess.run(
        [interpreter, "-S", "-c", "import sys; print(sys.version)"], capture_output=True, text=True
    )
    assert version.stdout.strip() == sys.version


# Limits --------------------------------------------------------------------------------------------------------


def test_the_time_limit_holds_for_top_level_code_and_for_the_test_itself():
    with Sandbox(workers=1, limits=Limits(seconds=0.3)) as sandbox:
        for source, test in (
            ("import time\ntime.sleep(60)\n", expect(1, 2)),
            (GOOD, "def check(candidate):\n    while candidate(1): pass\n    assert candidate\n"),
        ):
            started = time.monotonic()
            assert run(sandbox, source, test)[0].status == "timeout"
            assert time.monotonic() - started < 10  # of 60, or of no end at all


@pytest.mark.parametrize("workers", [1, 3])
def test_after_three_timeouts_the_rest_is_not_run_whatever_the_number_of_workers(workers):
    source = "def f(x):\n    while x > 1: pass\n    return x\n"
    values = [0, 2, 1, 2, 2, 0, 1, 2]
    with Sandbox(workers=workers, limits=Limits(seconds=0.4)) as sandbox:
        verdicts = run(
            sandbox, source, *(f"def check(c):\n    assert c({v}) == {v} and {i} < 9\n" for i, v in enumerate(values))
        )
    assert [verdict.status for verdict in verdicts] == ["pass", "timeout", "pass", "timeout", "timeout"] + ["unrun"] * 3
    assert not any(verdict.passed for verdict in verdicts[5:])


def test_memory_and_file_size_are_bounded():
    limits = Limits(seconds=2.0, memory_bytes=200 * 2**20, file_bytes=1000)
    with Sandbox(workers=1, limits=limits) as sandbox:
        verdict = run(sandbox, "def f(x):\n    return len(bytearray(300 * 2**20))\n", expect(1, 2))[0]
        assert verdict.message.startswith("MemoryError")
        big = (
            "def f(x):\n    with open('a', 'wb', buffering=0) as file:\n"
            "        return [file.write(b'x' * 900) for _ in range(3)]\n"
        )
        assert "File too large" in run(sandbox, big, expect(1, 2))[0].message


def test_cpu_time_is_bounded_below_the_wall_time():
    with Sandbox(workers=1, limits=Limits(seconds=8.0, cpu_seconds=1)) as sandbox:
        started = time.monotonic()
        assert run(sandbox, "def f(x):\n    while True: pass\n", expect(1, 2))[0].status == "fail"
        assert time.monotonic() - started < 6


# The pool ------------------------------------------------------------------------------------------------------


def test_threads_share_a_sandbox(sandbox):
    found = {}

    def work(number):
        source = f"def f(x):\n    return x + {number}\n"
        found[number] = [verdict.status for verdict in run(sandbox, source, *(expect(i, i + number) for i in range(3)))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: ["pass"] * 3 for number in range(8)}


def test_a_verdict_is_remembered_for_program_and_test():
    with Sandbox(workers=1, limits=Limits(seconds=0.5)) as sandbox:
        hanging = "def f(x):\n    while True: pass\n"
        first = run(sandbox, hanging, expect(1, 2))
        started = time.monotonic()
        assert run(sandbox, hanging, expect(1, 2)) == first
        assert time.monotonic() - started < 0.5  # another run would take that long at least
        assert run(sandbox, GOOD, expect(1, 2))[0].passed
        assert not run(sandbox, GOOD, expect(1, 3))[0].passed


def test_a_dead_zygote_is_replaced_and_its_test_run_again():
    with Sandbox(workers=1) as sandbox:
        assert run(sandbox, GOOD, expect(1, 2))[0].passed
        zygote = next(iter(sandbox._all))
        zygote.process.kill()
        assert run(sandbox, GOOD, expect(2, 3))[0].passed
        assert zygote not in sandbox._all and len(sandbox._all) == 1


def test_what_a_test_leaves_in_its_judge_is_not_there_for_another_problem():
    leave = "def check(candidate):\n    import math\n    math.left = candidate(1)\n"
    look = "def check(candidate):\n    import math\n    assert not hasattr(math, 'left')\n"
    with Sandbox(workers=1) as sandbox:
        assert run(sandbox, GOOD, leave)[0].passed
        assert run(sandbox, GOOD, look)[0].passed


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_a_dead_judge_is_replaced_and_its_test_fails():
    ends = "def check(candidate):\n    import os\n    os._exit(candidate(1))\n"
    with Sandbox(workers=1) as sandbox:
        verdict = run(sandbox, GOOD, ends)[0]
        assert (verdict.status, verdict.message) == ("fail", "the judging process ended without a verdict")
        zygote = next(iter(sandbox._all))
        assert run(sandbox, GOOD, expect(1, 2))[0].passed
        (judge,) = set(_family(zygote.process.pid)) - {zygote.process.pid}
        os.kill(judge, signal.SIGKILL)
        assert run(sandbox, GOOD, expect(2, 3))[0].passed
        assert zygote in sandbox._all
        (judge,) = set(_family(zygote.process.pid)) - {zygote.process.pid}
        os.kill(judge, signal.SIGKILL)  # between two tests of one problem: nobody has read the second
        assert run(sandbox, f"{GOOD}\n# another program", expect(2, 3))[0].passed
        assert zygote not in sandbox._all and len(sandbox._all) == 1


def test_the_cpu_time_of_a_judge_is_counted_test_by_test():
    waits = "def check(candidate):\n    import time\n    while time.process_time() < {0} * 0.7: pass\n"
    waits += "    assert candidate({0}) == {0} + 1\n"
    with Sandbox(workers=1, limits=Limits(cpu_seconds=1)) as sandbox:
        assert [verdict.status for verdict in run(sandbox, GOOD, *(waits.format(i) for i in range(1, 6)))] == [
            "pass"
        ] * 5
        endless = "def check(candidate):\n    while True: pass\n"
        assert run(sandbox, GOOD, endless)[0].message == "the judging process ended without a verdict"


def test_closing_ends_all_processes_and_removes_their_folders():
    sandbox = Sandbox(workers=2)
    run(sandbox, GOOD, expect(1, 2), expect(2, 3))
    zygotes = set(sandbox._all)
    assert zygotes and all(os.path.isdir(zygote.scratch) for zygote in zygotes)
    sandbox.close()
    assert all(zygote.process.poll() is not None for zygote in zygotes)
    assert not any(os.path.exists(zygote.scratch) for zygote in zygotes)
    sandbox.close()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_nothing_survives_the_death_of_the_process_that_made_the_sandbox(tmp_path):
    code = (
        "import os, sys, time\nfrom mapl_core.sandbox import *\nsandbox = Sandbox(workers=1)\n"
        "print(next(iter(sandbox._all)).process.pid, flush=True)\n"
        "sandbox.run(Program('def f(x):\\n    while True: pass\\n', 'f'), ['def check(c):\\n    assert c(1)\\n'])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    zygote = int(parent.stdout.readline())
    time.sleep(0.5)
    family = _family(zygote)
    assert len(family) == 3  # the zygote, the judge, the program
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 7
    while any(_alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in family)


def _family(root):
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_sandbox_is_not_shared_with_a_forked_process(sandbox):
    child = os.fork()
    if child == 0:
        try:
            sandbox.run(Program(GOOD, "f"), [expect(1, 2)])
        except SandboxError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_shared_sandbox_is_made_once():
    assert shared_sandbox() is shared_sandbox()


# What is missing -------------------------------------------------------------------------------------------------


def test_missing_layers_are_named_in_one_warning():
    with pytest.warns(SandboxWarning) as caught:
        sandbox = Sandbox(workers=1, without=("seccomp", "landlock"))
    sandbox.close()
    assert len(caught) == 1
    assert "system call filter" in str(caught[0].message) and "file rules" in str(caught[0].message)
    assert "seccomp" not in sandbox.layers


@pytest.mark.parametrize("without", [(), ("seccomp",), ("landlock",), ("processes",), ("network",), ("audit",)])
@pytest.mark.filterwarnings("ignore::mapl_core.sandbox.SandboxWarning")
def test_verdicts_do_not_depend_on_the_layers(without):
    with Sandbox(workers=1, without=without) as sandbox:
        assert [v.status for v in run(sandbox, GOOD, expect(1, 2), expect(1, 3))] == ["pass", "fail"]


def test_where_nothing_could_shut_a_program_in_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox_module.os, "name", "nt")
    with pytest.raises(SandboxError, match="not run on .*use Linux"):
        Sandbox()


def test_an_interpreter_that_does_not_start_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(sandbox_module, "_interpreter", lambda: "/bin/false")
    with pytest.raises(SandboxError, match="/bin/false does not start"):
        Sandbox(workers=1)
