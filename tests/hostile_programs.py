"""Programs that try to pass a test they cannot pass, to stall whoever runs them, or to do harm.

Every one defines `f(x)`. `{canary}` is the path of a file that belongs to the caller, `{name}` a name that no file has
yet. Those in `HANGING` can only be stopped from outside.
"""

from __future__ import annotations

SOLVES_NOTHING = "\ndef f(x):\n    return None\n"

HOSTILE = {
    # Answers that are equal to everything
    "permissive eq": "class E:\n    def __eq__(self, other): return True\ndef f(x):\n    return E()\n",
    "int with its own eq": (
        "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return E(1)\n"
    ),
    "str with its own eq": "class E(str):\n    def __eq__(self, other): return True\ndef f(x):\n    return E('1')\n",
    "list of permissive": "class E:\n    def __eq__(self, other): return True\ndef f(x):\n    return [E()]\n",
    "dict with its own items": (
        "class E(dict):\n    def __eq__(self, other): return True\n    def items(self): return []\ndef f(x):\n"
        "    return E(a=1)\n"
    ),
    "a class pretending": (
        "class M(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\n"
        "class E(metaclass=M):\n    __class__ = int\ndef f(x):\n    return E()\n"
    ),
    "pickle trick": (
        "class E:\n    def __reduce__(self): return (exec, ('raise SystemExit(0)',))\ndef f(x):\n    return E()\n"
    ),
    # Ways out
    "sys.exit": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "sys.exit at the top": "import sys\nsys.exit(0)\ndef f(x):\n    return 1\n",
    "os._exit": "import os\ndef f(x):\n    os._exit(0)\n",
    "os._exit at the top": "import os\nos._exit(0)\n",
    "SystemExit": "def f(x):\n    raise SystemExit\n",
    "KeyboardInterrupt": "def f(x):\n    raise KeyboardInterrupt\n",
    "GeneratorExit": "def f(x):\n    raise GeneratorExit\n",
    "an exception that lies": (
        "class E(BaseException):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n"
        "def f(x):\n    raise E\n"
    ),
    "huge exception": "def f(x):\n    raise ValueError('P' * 10**8)\n",
    "abort": "import os\ndef f(x):\n    os.abort()\n",
    "atexit": "import atexit\natexit.register(print, 'P')\ndef f(x):\n    raise SystemExit(0)\n",
    "kill itself": "import os\ndef f(x):\n    os.kill(os.getpid(), 9)\n",
    # Changing the rules
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.abs = lambda *a: 0\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.any = builtins.all = lambda *a: True\n"
        "builtins.type = lambda *a: int\nbuiltins.len = lambda *a: 0\n"
    ) + SOLVES_NOTHING,
    "replaced check": (
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    for name in ('check', 'judge', 'main', 'run_test', 'judge_and_program', 'loads', 'dumps', 'reply'):\n"
        "        try: setattr(module, name, lambda *a, **k: b'P')\n        except Exception: pass\n"
    ) + SOLVES_NOTHING,
    "frames": (
        "import sys, re\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in (*frame.f_locals.values(), *frame.f_globals.values()):\n"
        "            found = re.search(r'== (\\d{{15,}})', str(value))\n"
        "            if found: return int(found.group(1))\n        frame = frame.f_back\n"
    ),
    "patched frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name in list(frame.f_globals):\n            if callable(frame.f_globals[name]):\n"
        "                frame.f_globals[name] = lambda *a, **k: b'P'\n        frame = frame.f_back\n    return b'P'\n"
    ),
    "garbage collector": (
        "import gc, re\ndef f(x):\n    for value in gc.get_objects():\n        try:\n"
        "            found = re.search(r'== (\\d{{15,}})', repr(value))\n        except BaseException: continue\n"
        "        if found: return int(found.group(1))\n"
    ),
    "own memory": (
        "import re\ndef f(x):\n    for line in open('/proc/self/maps'):\n"
        "        begin, end = line.split()[0].split('-')\n"
        "        with open('/proc/self/mem', 'rb') as memory:\n            memory.seek(int(begin, 16))\n"
        "            found = re.search(rb'== (\\d{{15,}})', memory.read(int(end, 16) - int(begin, 16)))\n"
        "        if found: return int(found.group(1))\n"
    ),
    "other processes": (
        "import os, re\ndef f(x):\n    for pid in os.listdir('/proc'):\n        if not pid.isdigit(): continue\n"
        "        for part in ('environ', 'cmdline', 'maps', 'fd/0'):\n            try:\n"
        "                found = re.search(rb'(\\d{{15,}})', open(f'/proc/{{pid}}/{{part}}', 'rb').read(10**6))\n"
        "            except Exception: continue\n            if found: return int(found.group(1))\n"
    ),
    # False verdicts
    "printed verdict": (
        "import sys\nprint('P', flush=True)\nsys.stderr.write('P')\nsys.__stdout__.write('P')" + SOLVES_NOTHING
    ),
    "verdict on every file": (
        "import os\ndef f(x):\n    for number in range(256):\n        for body in (b'P', b'\\0\\0\\0\\1P'):\n"
        "            try: os.write(number, body)\n            except OSError: pass\n    return 1\n"
    ),
    "forged answers": "import os\nfor _ in range(100):\n    os.write(3, b'\\0\\0\\0\\2RT')" + SOLVES_NOTHING,
    "endless message": "import os\nos.write(3, b'\\xff\\xff\\xff\\xff' + b'x' * 1000)" + SOLVES_NOTHING,
    "malformed answer": "import os\nos.write(3, b'\\0\\0\\0\\6Rl\\xff\\xff\\xff\\xff')" + SOLVES_NOTHING,
    "deep answer": "import os\nos.write(3, b'\\0\\0\\x27\\x11R' + b'l\\0\\0\\0\\1' * 2000)" + SOLVES_NOTHING,
    "closed channel": "import os\nos.closerange(0, 1000)" + SOLVES_NOTHING,
    "an answer that contains itself": "def f(x):\n    a = []\n    a.append(a)\n    return a\n",
    "huge answer": "def f(x):\n    return 'x' * 10**8\n",
    "huge list": "def f(x):\n    return [0] * 10**7\n",
    # Too much
    "deep recursion": "def f(x):\n    return f(x)\n",
    "memory": "def f(x):\n    return [bytearray(10**7) for _ in range(10**6)]\n",
    "memory map": "import mmap\ndef f(x):\n    return mmap.mmap(-1, 2**36)[:1]\n",
    "much output": "def f(x):\n    for _ in range(1000):\n        print('x' * 10**6)\n",
    "large file": (
        "def f(x):\n    with open('big', 'wb') as file:\n        for _ in range(10**4): file.write(b'x' * 10**6)\n"
    ),
    "many open files": "import os\ndef f(x):\n    return [open(str(i), 'w') for i in range(10**5)]\n",
    "deep folders": (
        "import os\ndef f(x):\n    for _ in range(3000):\n        os.mkdir('d')\n        os.chdir('d')\n    return 1\n"
    ),
    "locked folders": "import os\nos.mkdir('a', 0)\nos.mkdir('b')\nos.mkdir('b/c', 0)" + SOLVES_NOTHING,
    # Outside
    "network": "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 22), 1)\n    return 1\n",
    "local socket": "import socket\ndef f(x):\n    a, b = socket.socketpair()\n    b.send(b'P')\n    return 1\n",
    "fork": "import os\ndef f(x):\n    if os.fork() == 0:\n        while True: pass\n    return 1\n",
    "fork bomb": "import os\ndef f(x):\n    while True: os.fork()\n",
    "daemon": (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n"
        "        time.sleep(1)\n        open('{name}', 'w').write('late')\n        os._exit(0)\n    return 1\n"
    ),
    "new session": "import os\ndef f(x):\n    os.setpgid(0, 0)\n    os.setsid()\n    return 1\n",
    "shell": "import os\ndef f(x):\n    return os.system('echo P > {name}')\n",
    "subprocess": "import subprocess\ndef f(x):\n    return subprocess.run(['touch', '{name}'])\n",
    "another interpreter": "import os, sys\ndef f(x):\n    os.execv(sys.executable, ['python', '-c', 'print(1)'])\n",
    "multiprocessing": (
        "import multiprocessing\ndef f(x):\n    p = multiprocessing.Process(target=print)\n"
        "    p.start()\n    return 1\n"
    ),
    "ctypes": (
        "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    if libc.fork() == 0:\n        while True: pass\n"
        "    return 1\n"
    ),
    "ctypes in the frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in frame.f_globals.values():\n            getattr(value, 'load_libc', lambda: None)()\n"
        "        frame = frame.f_back\n"
    ),
    "kill the parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 1\n",
    "kill everybody": "import os\ndef f(x):\n    os.kill(-1, 9)\n    return 1\n",
    "kill the group": "import os\ndef f(x):\n    os.killpg(0, 9)\n    return 1\n",
    "write outside": "def f(x):\n    open('{name}', 'w').write('x')\n    return 1\n",
    "write in shared memory": "def f(x):\n    open('/dev/shm/{stem}', 'w').write('x')\n    return 1\n",
    "overwrite": "def f(x):\n    open('{canary}', 'w').write('x')\n    return 1\n",
    "truncate": "import os\ndef f(x):\n    os.truncate('{canary}', 0)\n    return 1\n",
    "remove": "import os\ndef f(x):\n    os.remove('{canary}')\n    return 1\n",
    "rename": "import os\ndef f(x):\n    os.rename('{canary}', '{name}')\n    return 1\n",
    "link": "import os\ndef f(x):\n    os.link('{canary}', 'mine')\n    open('mine', 'w').write('x')\n    return 1\n",
    "symbolic link": (
        "import os\ndef f(x):\n    os.symlink('{canary}', 'mine')\n    open('mine', 'w').write('x')\n    return 1\n"
    ),
    "permissions": "import os\ndef f(x):\n    os.chmod('{canary}', 0)\n    return 1\n",
    "times": "import os\ndef f(x):\n    os.utime('{canary}', (1, 1))\n    return 1\n",
    "remove the tree": "import shutil, os\ndef f(x):\n    shutil.rmtree(os.path.dirname('{canary}'))\n    return 1\n",
    "read outside": "def f(x):\n    return int(open('{canary}').read())\n",
    "read the environment": "import os\ndef f(x):\n    return int(os.environ['MAPL_CANARY'])\n",
    "installed packages": "import torch\ndef f(x):\n    return torch.zeros(1)\n",
    "privileges": "import os\ndef f(x):\n    os.setuid(0)\n    open('{canary}', 'w').write('x')\n    return 1\n",
    "new root": "import os\ndef f(x):\n    os.chroot('.')\n    open('/x', 'w')\n    return 1\n",
    "raised limits": (
        "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "    return bytearray(2**33)[:1]\n"
    ),
    "pipe to a name": "import os\ndef f(x):\n    os.mkfifo('p')\n    return 1\n",
    "lazy answer": "def f(x):\n    return iter(int, 1)\n",
}  # fmt: skip

HANGING = {
    "endless loop": "def f(x):\n    while True: pass\n",
    "endless loop at the top": "while True: pass\n",
    "catches everything": (
        "def f(x):\n    while True:\n        try:\n            while True: pass\n        except: pass\n"
    ),
    "ignores signals": (
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass\n"
    ),
    "sleeps": "import time\ndef f(x):\n    time.sleep(1000)\n",
    "huge power": "def f(x):\n    return 10**10**9\n",
    "huge number from text": "import sys\nsys.set_int_max_str_digits(0)\ndef f(x):\n    return int('9' * 10**8)\n",
    "slow pattern": "import re\ndef f(x):\n    return re.match('(a|a)*b', 'a' * 60)\n",
    "endless threads": (
        "import threading\ndef f(x):\n    def run():\n        while True: pass\n    while True:\n"
        "        try: threading.Thread(target=run).start()\n        except BaseException: pass\n"
    ),
    "waits for input that never ends": "import os\ndef f(x):\n    while True: os.read(3, 1)\n",
    "a flood of answers": "import os\ndef f(x):\n    while True: os.write(3, b'\\0\\0\\0\\0')\n",
    "fills the disk": (
        "def f(x):\n    number = 0\n    while True:\n        number += 1\n"
        "        try: open(str(number), 'wb').write(b'x' * 10**6)\n"
        "        except OSError: pass\n"
    ),
    "never destroyed": (
        "class E:\n    def __del__(self):\n        while True: pass\ndef f(x):\n    E()\n    return 1\n"
    ),
    "endless text": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\ndef f(x):\n    raise E\n"
    ),
}  # fmt: skip
