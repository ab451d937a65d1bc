"""Answers of the sandbox: one per call, the same every time, nothing left behind."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import isolation
import sandbox
from sandbox import LINUX, Sandbox, SandboxClient

ALL_OFF = ("seccomp", "landlock", "pid", "net", "mount", "capabilities", "limits")
linux_only = pytest.mark.skipif(not LINUX, reason="looks into /proc")


@pytest.fixture(scope="module")
def box():
    with Sandbox(workers=2) as box:
        yield box


def run(box, code, stdin="", seconds=4.0):
    return box.result(box.submit(code, stdin, seconds), 60)


ANSWERS = [  # code, status, stdout, part of stderr
    ("print(1 + 1)", "ok", "2\n", ""),
    ("x = 3\nx ** 2", "ok", "9\n", ""),
    ("__value__ = 5", "empty", "", ""),
    ("import sys; print(sys.stdin.seekable(), sys.stdin.tell())", "ok", "True 0\n", ""),
    ("'text'", "ok", "'text'\n", ""),
    ("print('a')\n'b'", "ok", "a\n'b'\n", ""),
    ("None", "empty", "", ""),
    ("", "empty", "", ""),
    ("# nothing", "empty", "", ""),
    ("import numpy as np\nnp.arange(4).sum()", "ok", "np.int64(6)\n", ""),
    ("import sympy; sympy.factorint(2**67 - 1)", "ok", "{193707721: 1, 761838257287: 1}\n", ""),
    ("print(", "error", "", "SyntaxError"),
    ("a = 1\n  b = 2", "error", "", "IndentationError"),
    ("x = '\0'", "error", "", "null bytes"),
    ("x = '\ud800'", "error", "", "surrogates not allowed"),
    ("print('\\ud800')", "error", "", "surrogates not allowed"),
    ("import sys; sys.stdout.buffer.write(b'\\xff\\n'); None", "ok", "\ufffd\n", ""),
    ("print('a\\0b')", "ok", "a\0b\n", ""),
    ("print('no newline', end='')", "ok", "no newline", ""),
    ("input()", "error", "", "EOFError"),
    ("import sys; sys.exit()", "empty", "", ""),
    ("print(1); exit(0)", "ok", "1\n", ""),
    ("import sys; sys.exit(3)", "error", "", "exit status 3"),
    ("raise SystemExit('reason')", "error", "", "reason"),
    ("print(1, flush=True)\nimport os; os._exit(0)", "ok", "1\n", ""),
    ("import os; os._exit(5)", "error", "", "exit status 5"),
    ("import os; os.abort()", "error", "", "SIG"),
    ("import ctypes; ctypes.string_at(0)", "error", "", "SIGSEGV"),
    ("import sys; sys.stdout.close(); print(1)", "error", "", "closed file"),
    ("import os; os.close(1); print(1)", "error", "", "Bad file descriptor"),
    ("def f(): return f()\nf()", "error", "", "RecursionError"),
    ("from __future__ import annotations\ndef f(x: y): pass\nf", "ok", None, ""),
    ("from __future__ import annotations\n(lambda: 1)()", "ok", "1\n", ""),
    ("if __name__ == '__main__':\n    print('main')", "ok", "main\n", ""),
    ("import no_such_package", "error", "", "ModuleNotFoundError: No module named"),
    ("import sandbox", "error", "", "ModuleNotFoundError"),
    ("import reward", "error", "", "ModuleNotFoundError"),
    ("import asyncio\nasyncio.run(asyncio.sleep(0, 'done'))", "ok", "'done'\n", ""),
    ("import threading\nthreading.Thread(target=print, args=['t']).start()", "ok", "t\n", ""),
    ("import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()",
     "empty", "", "ZeroDivisionError"),
    ("from concurrent.futures import ThreadPoolExecutor as E\nE(2).submit(print, 'p')\nNone",
     "ok", "p\n", ""),
    ("from multiprocessing import Pool\nPool(2).map(abs, [1])", "error", "", "PermissionError"),
    ("import atexit; atexit.register(print, 'end'); None", "ok", "end\n", ""),
    ("raise MemoryError", "memory", "", "MemoryError"),
    ("class E(Exception):\n    def __str__(self): 1/0\nraise E", "error", "", "E"),
    ("import warnings; warnings.warn('w'); 1", "ok", "1\n", "UserWarning: w\n"),
    ("import tempfile; f = tempfile.TemporaryFile(); f.write(b'1')", "ok", "1\n", ""),
    ("open('a', 'w').write('x'); import os; os.listdir()", "ok", "['a']\n", ""),
    ("open('m.py', 'w').write('y = 7')\nimport m; m.y", "ok", "7\n", ""),
    ("from dataclasses import *\n@dataclass\nclass A:\n    a: int\nA(1)", "ok", "A(a=1)\n", ""),
]  # fmt: skip


@pytest.mark.parametrize("code, status, stdout, stderr", ANSWERS, ids=lambda a: repr(a)[:40])
def test_the_answer_is_what_an_interpreter_would_give(box, code, status, stdout, stderr):
    result = run(box, code)
    assert result.status == (status or result.status) and result.status != "lost", result
    assert stdout is None or result.stdout == stdout
    assert stderr in result.stderr and (stderr or not result.stderr or not status)
    assert run(box, "6 * 7").stdout == "42\n"


def test_error_text_is_the_programs_own_lines(box):
    """Frames of libraries and of ours are left out, and so are their folders in messages."""
    vectorized = "def f(x):\n    return 1 // int(x)\n\nimport numpy as np\nnp.vectorize(f)([0])"
    chained = "try:\n    {}['k']\nexcept KeyError:\n    import numpy.linalg as l\n    l.inv([[0.]])"
    frames = lambda text: re.findall(r'File "(.*?)", line (\d)', text)
    texts = [run(box, code).stderr for code in (vectorized, chained)]
    assert frames(texts[0]) == [("<tool>", "5"), ("<tool>", "2")]
    assert frames(texts[1]) == [("<tool>", "2"), ("<tool>", "5")]
    assert "Singular matrix" in texts[1] and "During handling of the above" in texts[1]
    texts += [run(box, "from sympy import no_such_name").stderr, run(box, "x = (").stderr]
    for ours in (sys.prefix, sys.base_prefix, "sandbox", "site-packages/", "run_program"):
        assert ours not in "".join(texts)


def test_stdin_is_served(box):
    assert run(box, "print(input()[::-1]); print(input())", "abc\nä\n").stdout == "cba\nä\n"
    assert run(box, "import sys; len(sys.stdin.read())", "x" * 5_000_000).stdout == "5000000\n"


def test_a_program_of_a_megabyte_runs(box):
    code = "x = '" + "a" * 1_000_000 + "'\nlen(x)"
    assert run(box, code).stdout == "1000000\n"


def test_long_output_keeps_head_and_tail(box):
    result = run(box, "for n in range(40_000): print(n)", seconds=30)
    assert result.status == "ok"
    assert result.stdout.startswith("0\n1\n") and result.stdout.endswith("39998\n39999\n")
    size = sum(len(f"{n}\n") for n in range(40_000))
    head, tail = result.stdout.split(f"\n... {size - (1 << 16)} bytes left out ...\n")
    assert len(head) == len(tail) == 1 << 15


@pytest.mark.parametrize("flood", ["print('x' * 100_000_000)", "while True: print('x' * 10**6)"])
def test_too_much_output_ends_a_call(box, flood):
    result = run(box, flood, seconds=60)
    assert result.status == "output" and len(result.stdout) < 70_000


def test_what_a_call_printed_before_a_time_out_is_kept(box):
    result = run(box, "print('before')\nwhile True: pass", seconds=0.2)
    assert result.status == "timeout" and result.stdout == "before\n"
    assert result.cpu_seconds >= 0.2


def test_runs_are_repeatable(box):
    code = """
import random, sympy, numpy as np
print(hash("text"), random.random(), np.random.rand(), {"a", "b", "c", "d"})
print(sympy.core.random.rng.random())"""
    lean = "import random; print(random.random(), hash('a'))"
    numpy_alone = "from numpy import random\nprint(random.rand())"
    hidden = "m = __import__('num' + 'py')\nprint(getattr(m, 'ran' + 'dom').rand())"
    with Sandbox(workers=1) as other:
        for program in (code, lean, numpy_alone, hidden):
            outputs = {run(b, program).stdout for b in (box, box, box, other)}
            assert len(outputs) == 1 and outputs != {""}


def test_nothing_goes_from_one_call_to_the_next(box):
    leave = """
import os, sys, math, random, builtins
open("left", "w").close(); os.mkdir("folder"); os.environ["LEFT"] = "1"; sys.path.append("/left")
math.pi = 3; builtins.left = 1; random.seed(5); os.open("left", 0); os.umask(0o777)
sys.modules["left"] = math; 1"""
    look = """
import os, sys, math, builtins
print(os.listdir(), "LEFT" in os.environ, "/left" in sys.path, math.pi > 3.1,
      hasattr(builtins, "left"), "left" in sys.modules)"""
    for _ in range(3):
        assert run(box, leave).status == "ok"
    for _ in range(3):
        assert run(box, look).stdout == "[] False False True False False\n"


def test_a_child_sees_no_descriptor_and_no_environment_of_ours(box):
    code = """
import os
def is_open(n):
    try: return bool(os.fstat(n))
    except OSError: return False
print([n for n in range(1024) if is_open(n)], sorted(os.environ))"""
    os.environ["SECRET_OF_THE_TRAINER"] = "1"
    with Sandbox(workers=1, preload=()) as fresh:
        assert run(fresh, code).stdout == "[0, 1, 2] ['HOME', 'LANG', 'PATH', 'TMPDIR']\n"


def test_verdicts_do_not_depend_on_the_load(box):
    programs = ["print(1)", "1/0", "x = 1", "while True: pass", "import time; time.sleep(9)",
                "sum(range(10**6))", "[0] * 10**10", "import os; os.fork()"]  # fmt: skip
    alone = [run(box, program, seconds=0.7) for program in programs]
    many = [box.submit(program, seconds=0.7) for program in programs * 2 + ["print(1)"] * 48]
    together = [box.result(handle, 120) for handle in many]
    statuses = [r.status for r in alone]
    assert statuses == ["ok", "error", "empty", "timeout", "timeout", "ok", "memory", "error"]
    assert [r.status for r in together] == statuses * 2 + ["ok"] * 48


def test_the_clock_starts_at_execution(box):
    handles = [box.submit("print(1)", seconds=1) for _ in range(500)]
    assert {box.result(h, 120).status for h in handles} == {"ok"}


def test_urgent_calls_overtake(box):
    with Sandbox(workers=1) as single:
        flood = [single.submit("import time; time.sleep(.1)") for _ in range(30)]
        single.result(flood[0], 60)
        check = single.submit_check("1/2", "0.5")
        assert single.result(check, 60).stdout == "1"
        assert list(single.results.values()).count(None) > 15


def test_checks_answer_one_or_zero(box):
    pairs = [("42", "42"), ("\\frac{1}{2}", "0.5"), ("41", "42"), ("", "1"), ("((((", "1")]
    results = [box.result(box.submit_check(answer, gold), 60) for answer, gold in pairs]
    assert [r.stdout for r in results] == ["1", "1", "0", "0", "0"]
    assert {r.status for r in results} == {"ok"}


def test_ready_and_select_tell_of_every_answer_once(box):
    box.ready()
    handles, told = {box.submit(f"print({n})") for n in range(20)}, []
    while len(told) < 20:
        select.select([box], [], [], 60)
        told += box.ready()
    assert set(told) == handles and len(told) == 20 and box.ready() == []
    for handle in handles:
        box.result(handle)
        with pytest.raises(KeyError):
            box.result(handle)


def test_a_result_can_be_waited_for_in_any_thread_and_not_too_long(box):
    slow = box.submit("import time; time.sleep(.5); 1")
    with pytest.raises(TimeoutError):
        box.result(slow, timeout=0.01)
    results = []
    thread = threading.Thread(target=lambda: results.append(box.result(slow, 60)))
    thread.start()
    thread.join()
    assert results[0].stdout == "1\n"


def test_calls_that_are_none_raise_at_once(box):
    for bad in (lambda: box.submit(None), lambda: box.submit("1", stdin=b""),
                lambda: box.submit("1", seconds=0), lambda: box.submit_check(1, "1")):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            bad()


CHOICES = [  # program, how many of (numpy, sympy) its zygote has
    ("print(1 + 1)", 0),
    ("import math, re\nfrom fractions import Fraction", 0),
    ("import random; random.random()", 0),
    ("import numpy as np", 1),
    ("def f():\n    from numpy.linalg import inv", 1),
    ("import numpy as np\nnp.random.rand()", 2),
    ("import numpy, sympy", 2),
    ("from sympy import *", 2),
    ("import scipy", 2),
    ("m = __import__('num' + 'py')", 2),
    ("import importlib", 2),
    ("exec(input())", 2),
    ("x = 1  # no eval", 2),
    ("evaluate = executor = 1", 0),
    ("open('m.py', 'w').write(input())\nimport m", 2),
    ("\n" * 500_000 + " " * 500_000, 0),
]


@pytest.mark.parametrize("code, level", CHOICES, ids=lambda a: repr(a)[:40])
def test_the_zygote_is_chosen_by_what_the_text_asks_for(code, level):
    call = {"kind": "run", "code": [code]}
    assert sandbox.choose_zygote(call, ["numpy", "sympy"]) == level
    assert sandbox.choose_zygote(call, []) == 0
    assert sandbox.choose_zygote({**call, "kind": "check"}, ["numpy", "sympy"]) == 2


@linux_only
def test_zygotes_start_when_needed_and_a_wrong_choice_runs_right():
    unseen = "import codecs, pkgutil\nm = pkgutil.resolve_name(codecs.decode('ahzcl', 'rot13'))\n"
    loaded = "import sys\n[name in sys.modules for name in ('num' + 'py', 'sym' + 'py', 'reward')]"
    with Sandbox(workers=1) as box:
        num_zygotes = []
        for program, output in (
            (loaded, "[False, False, False]\n"),
            (unseen + loaded, "[True, False, False]\n"),
            (unseen + "m.arange(4).sum()", "np.int64(6)\n"),
            (loaded + "  # numpy", "[True, False, False]\n"),
            (loaded + "  # sympy", "[True, True, False]\n"),
        ):
            assert run(box, program).stdout == output
            num_zygotes.append(len(os.listdir(box.folder)) - 1)  # each has a folder
    assert num_zygotes == [1, 1, 1, 2, 3]


# ---- who may ask ----


def test_ranks_share_a_pool_and_get_their_own_answers(box):
    clients = [SandboxClient(box.address, box.secret) for _ in range(3)]
    handles = [[c.submit(f"print({n}, {k})") for k in range(10)] for n, c in enumerate(clients)]
    for n, client in enumerate(clients):
        answers = [client.result(h, 60).stdout for h in handles[n]]
        assert answers == [f"{n} {k}\n" for k in range(10)]
        client.close()
    assert run(box, "1").stdout == "1\n"


def test_a_client_that_leaves_takes_its_calls_along(box):
    client = SandboxClient(box.address, box.secret)
    for _ in range(50):
        client.submit("while True: pass", seconds=1)
    client.close()
    assert run(box, "1").stdout == "1\n"


def test_without_the_secret_nothing_is_answered(box):
    stranger = SandboxClient(box.address, "0" * 32)
    try:
        assert stranger.result(stranger.submit("1"), 60).status == "lost"
    except RuntimeError:
        pass  # cut off before it could submit
    assert os.stat(os.path.dirname(box.address)).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("junk", [
    b"\xff\xff\xff\xff", isolation.pack({}), sandbox.pack({"id": 1, "kind": "run"}),
    isolation.pack({"id": 1, "kind": "run", "code": [1], "stdin": "", "seconds": 1, "urgent": 0}),
    b"\x02\0\0\0[]", b"\x01\0\0\0\x80", b"\x03\0\0\0NaN",
])  # fmt: skip
def test_who_breaks_the_protocol_is_cut_off(box, junk):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(box.address)
        raw.settimeout(60)
        raw.sendall(isolation.pack({"secret": box.secret}) + junk)
        all_of_it = raw.makefile("rb").read()  # to the end: one message
    assert set(json.loads(all_of_it[4:])) == {"layers"}
    assert run(box, "1").stdout == "1\n"


# ---- nothing is left, nothing is lost ----


def processes_of(pool: int) -> dict[int, str]:
    """{pid: state} of a pool and all its descendants."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            stats[int(path.parent.name)] = (state, int(parent))
        except OSError:
            pass
    family = [pool] if pool in stats else []
    for member in family:
        family += [pid for pid, (_, parent) in stats.items() if parent == member]
    return {pid: stats[pid][0] for pid in family}


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert true()


@linux_only
def test_two_hundred_crashes_leave_nothing():
    def descriptors():
        return {p: len(os.listdir(f"/proc/{p}/fd")) for p in sorted(processes_of(pool))[:5]}

    crash = "open('f', 'w').write('x')\nimport ctypes; ctypes.string_at(0)"
    with Sandbox(workers=2, preload=()) as box:
        pool = box.process.pid
        [run(box, crash) for _ in range(10)]
        wait_until(lambda: len(processes_of(pool)) == len(processes_of(pool).keys()))
        before, fds = len(processes_of(pool)), sum(descriptors().values())
        handles = [box.submit(crash) for _ in range(200)]
        assert {box.result(h, 60).status for h in handles} == {"error"}
        wait_until(lambda: len(processes_of(pool)) == before)
        assert "Z" not in processes_of(pool).values()
        wait_until(lambda: sum(descriptors().values()) == fds)
        assert sorted(os.listdir(box.folder)) == ["socket", "w0", "w1"]
    assert processes_of(pool) == {} and not os.path.exists(box.folder)


@linux_only
@pytest.mark.parametrize("off", [(), ALL_OFF], ids=["layers", "no layers"])
def test_the_pool_ends_with_its_owner(off):
    code = f"""
import sys; sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r})
from sandbox import Sandbox
box = Sandbox(workers=1, preload=(), off={off!r})
box.result(box.submit("1"), 60)
box.submit("import time; open('f', 'w'); time.sleep(60)", seconds=60)
print(box.process.pid, box.folder, flush=True)
import time; time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        pool, folder = owner.stdout.readline().split()
        wait_until(lambda: len(processes_of(int(pool))) > 2)
        members = list(processes_of(int(pool)))
        owner.kill()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in members))
    assert not os.path.exists(folder)


@linux_only
def test_a_killed_pool_is_noticed_and_leaves_nothing():
    with Sandbox(workers=1, preload=()) as box:
        layers = box.layers()
        assert run(box, "1").stdout == "1\n"
        handle = box.submit("import time; time.sleep(60)", seconds=60)
        members = list(processes_of(box.process.pid))
        os.kill(box.process.pid, signal.SIGKILL)
        assert box.result(handle, 60).status == "lost"
        for use in (lambda: box.submit("1"), box.layers):
            with pytest.raises(RuntimeError, match="ended"):
                use()
        if "pid" in layers["leftovers"][1]:
            wait_until(lambda: not os.path.exists(box.folder))
    assert box.ready() == []
    wait_until(lambda: all(state == "Z" for pid in members for state in processes_of(pid).values()))
    assert not os.path.exists(box.folder)


@linux_only
def test_zygotes_that_die_at_once_are_replaced_and_no_call_is_lost():
    """As when memory is short: the pool sees all of it in one look."""
    with Sandbox(workers=6, preload=()) as box:
        handles = [box.submit("import time; time.sleep(.3)") for _ in range(6)]
        assert all(box.result(h, 60).status == "empty" for h in handles)
        handles = [box.submit("import time; time.sleep(1.5); print(1)") for _ in range(6)]
        time.sleep(0.7)
        os.kill(box.process.pid, signal.SIGSTOP)
        for pid in set(processes_of(box.process.pid)) - {box.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.kill(box.process.pid, signal.SIGCONT)
        assert [box.result(h, 60).status for h in handles] == ["ok"] * 6


def test_an_answer_too_large_for_a_message_is_lost_and_the_pool_lives():
    with Sandbox(workers=1, preload=(), output=16 << 20) as box:
        large = "import os\nfor _ in range(15): os.write(1, b'\\xff' * (1 << 20))"
        assert run(box, large, seconds=60).status == "lost"
        assert run(box, "1").stdout == "1\n"


def test_what_an_earlier_call_answered_is_not_to_be_found(box):
    look = """import sys
frame, found = sys._getframe(), []
while frame:
    found += [v for v in frame.f_locals.values() if "sec" + "ret 1" in str(v)]
    frame = frame.f_back
print(len(found))"""
    for _ in range(4):  # both workers
        assert run(box, "print('secret', 1)").stdout == "secret 1\n"
    assert {run(box, look).stdout for _ in range(4)} == {"0\n"}


def test_a_traceback_shows_the_line_that_python_means(box):
    text = run(box, "x = '''\f\u2028'''\ny = 1\n1/0").stderr
    assert "line 3" in text and "\n    1/0\n" in text, text


def test_unlimited_memory_is_a_setting_and_an_odd_output_loses_nothing():
    with Sandbox(workers=1, preload=(), memory=-1, output=101) as box:
        assert run(box, "1").stdout == "1\n"
        cut = run(box, "print('a' * 60 + 'b' * 60)").stdout
        assert cut == "a" * 51 + "\n... 20 bytes left out ...\n" + "b" * 49 + "\n"


@linux_only
def test_a_call_that_kills_its_zygote_is_tried_twice_then_lost(tmp_path):
    with Sandbox(workers=1, preload=(), off=ALL_OFF) as box:
        kill = "import os; os.kill(os.getppid(), 9); import time; time.sleep(5)"
        assert run(box, kill).status == "lost"
        once = f"import os\nif not os.path.exists({str(tmp_path / 'tried')!r}):\n"
        once += f"    open({str(tmp_path / 'tried')!r}, 'w').close(); {kill}\nprint('second')"
        assert run(box, once).stdout == "second\n"
        assert len(processes_of(box.process.pid)) == 2  # pool and zygote


@linux_only
def test_orphans_die_with_their_call_also_without_layers(tmp_path):
    pid = str(tmp_path / "pid")
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({pid!r}, 'w').write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
os.wait()
while not (os.path.exists({pid!r}) and open({pid!r}).read()): pass
print('parent')"""
    with Sandbox(workers=1, preload=(), off=ALL_OFF) as box:
        assert run(box, code).stdout == "parent\n"
        orphan = Path(pid).read_text()
        wait_until(lambda: not os.path.exists(f"/proc/{orphan}"))


def test_require_raises_where_a_layer_is_missing():
    with pytest.raises(RuntimeError, match="network.*switched off"):
        Sandbox(preload=(), workers=1, require=("time", "network"), off=("seccomp",))
    with pytest.raises(RuntimeError, match="unknown"):
        Sandbox(preload=(), workers=1, require=("nonsense",))


def test_outside_linux_calls_run_with_a_loud_warning(tmp_path):
    """The path of other systems, forced: copies that believe not to be on Linux."""
    for name in ("sandbox.py", "isolation.py"):
        source = Path(sandbox.__file__).with_name(name).read_text()
        (tmp_path / name).write_text(source.replace('LINUX = sys.platform == "linux"', "LINUX = 0"))
    assert "LINUX = 0" in (tmp_path / "isolation.py").read_text()
    code = f"""
from sandbox import Sandbox
with Sandbox(preload=(), workers=1, off={ALL_OFF!r}) as box:
    for program in ("print(1)", "while True: pass", "import time; time.sleep(9)", "1/0"):
        print(box.result(box.submit(program, seconds=.5), 60).status)"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert out.stdout.split() == ["ok", "timeout", "timeout", "error"], out


@pytest.mark.parametrize("column, header", [
    (1, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (2, "/usr/include/asm-generic/unistd.h"),
])  # fmt: skip
def test_system_call_numbers_are_the_kernels(column, header):
    if not os.path.exists(header):
        pytest.skip(f"no {header}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    numbers = {name.removeprefix("3264_"): int(number) for name, number in found}
    for row in isolation.SYSTEM_CALLS.replace("\n", " ").split(","):
        name, *ours = row.split()
        if ours[column - 1] != "-":
            assert numbers[name] == int(ours[column - 1]), name


def test_a_message_is_length_and_json():
    assert isolation.pack({"a": "ä\ud800"}) == b"\x15\0\0\0" + json.dumps({"a": "ä\ud800"}).encode()
