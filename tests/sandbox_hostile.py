"""The hostile suite: attempts on everything that a call must not reach.

Each case is a program that prints ESCAPED if its attempt succeeds. Under the layers it must not,
its end must show how it was refused, and the next call must work. The control is the same program
in a pool without layers (or with more seconds): there it must succeed, or the case proves nothing.

    python tests/sandbox_hostile.py            as this user
    python tests/sandbox_hostile.py nobody     as an ordinary user (run by root)
    python tests/sandbox_hostile.py container  as root without CAP_SYS_ADMIN and user namespaces
    python tests/sandbox_hostile.py view       where the kernel has no Landlock
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = str(Path(__file__).resolve().parents[1])
sys.path[:0] = [REPO] if REPO not in sys.path else []
import isolation  # noqa: E402
from sandbox import LINUX, Sandbox  # noqa: E402

ALL_OFF = ("seccomp", "landlock", "pid", "net", "mount", "capabilities", "limits")
PRELUDE = """
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
def c(name, *args):
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    if getattr(LIBC, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def address(port):
    return (2).to_bytes(2, sys.byteorder) + port.to_bytes(2, 'big') + b'\\x7f\\0\\0\\1' + bytes(8)
"""
SETTINGS = {"preload": (), "memory": 256 << 20}
DENIED = "PermissionError"
GONE = "PermissionError|ProcessLookupError|FileNotFoundError"  # not there, in a namespace


@dataclass(frozen=True)
class Case:
    layer: str  # the guarantee that must refuse it
    name: str
    refused: str  # alternatives, one of which is in its status or stderr
    code: str  # {victim} {port} {udp} {unix} {secret} {outside}: see `outside_world`
    seconds: float = 4.0
    control_seconds: float = 4.0  # time cannot be switched off, only be plentiful
    root: bool = False  # its control wants root


# fmt: off
CASES = [
    Case("time", "loop", "timeout", "while time.process_time() < .5: pass", 0.2),
    Case("time", "ignored and blocked signals", "timeout", """
for s in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while time.process_time() < .5: pass""", 0.2),
    Case("time", "sleep", "timeout", "time.sleep(.8)", 0.3),
    Case("time", "busy threads", "timeout", """
def burn():
    while time.process_time() < .5: pass
many = [threading.Thread(target=burn) for _ in range(4)]
for t in many: t.start()
for t in many: t.join()""", 0.2),
    Case("memory", "one allocation", "memory", "bytearray(300 << 20)"),
    Case("memory", "many allocations", "memory", "[bytes(1 << 20) for _ in range(300)]"),
    Case("memory", "mmap", "OSError|memory", "mmap.mmap(-1, 2 << 30)"),
    Case("memory", "memfd", DENIED + "|OSError", "os.memfd_create('x')"),
    Case("memory", "shared memory", DENIED, "c('shmget', 0, 1 << 20, 0o1600)"),
    Case("memory", "threads", "RuntimeError|memory", """
def idle(): time.sleep(.5)
many = [threading.Thread(target=idle) for _ in range(300)]
for t in many: t.start()"""),
    Case("processes", "fork", DENIED, "os.fork() or os._exit(0)"),
    Case("processes", "fork bomb", DENIED, """
for _ in range(20):
    if os.fork() == 0: time.sleep(20); os._exit(0)"""),
    Case("processes", "double fork, setsid", DENIED, """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(20)
    os._exit(0)
os.wait()"""),
    Case("processes", "subprocess", DENIED, "subprocess.run(['/bin/true'], check=True)"),
    Case("processes", "posix_spawn", DENIED, """
os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)"""),
    Case("processes", "multiprocessing", DENIED, """
import multiprocessing
p = multiprocessing.get_context('fork').Process(target=int); p.start(); p.join()"""),
    Case("processes", "exec", DENIED, """
if {control}: print('ESCAPED', flush=True)
os.execv('/bin/true', ['true'])"""),
    Case("disk", "5,000 files", "OSError", """
for n in range(5000): open(f'f{{n}}', 'w').close()"""),
    Case("disk", "full disk, file by file", "OSError", """
for n in range(5):
    with open(f'f{{n}}', 'wb') as f: f.write(bytes(20 << 20))"""),
    Case("files", "read a file", GONE, "open({secret!r}).read()"),
    Case("files", "/etc/passwd", GONE, "open('/etc/passwd').read()"),
    Case("files", "list a folder", GONE, "os.listdir({outside!r})"),
    Case("files", "environment of another process", GONE, "open('/proc/{victim}/environ').read()"),
    Case("files", "/proc", GONE, "os.listdir('/proc')"),
    Case("files", "write outside", GONE, "open({outside!r} + '/new', 'w').write('x')"),
    Case("files", "/dev/shm", GONE, "open('/dev/shm/hostile', 'w'); os.unlink('/dev/shm/hostile')"),
    Case("files", "append", GONE, "open({secret!r}, 'a')"),
    Case("files", "symlink out", GONE, "os.symlink({secret!r}, 'l'); open('l').read()"),
    Case("files", "hard link", GONE + "|OSError", "os.link({secret!r}, {outside!r} + '/hard')"),
    Case("files", "rename", GONE + "|OSError", """
open({outside!r} + '/a', 'w').close(); os.rename({outside!r} + '/a', {outside!r} + '/b')"""),
    Case("files", "chmod", GONE, "os.chmod({secret!r}, 0o600)"),
    Case("files", "chown", GONE, "os.chown({secret!r}, os.getuid(), os.getgid())"),
    Case("files", "utime", GONE, "os.utime({secret!r})"),
    Case("files", "truncate", GONE, "c('truncate', {secret!r}.encode(), 100)"),
    Case("files", "xattr", GONE, "os.setxattr({secret!r}, 'user.x', b'1')"),
    Case("files", "the interpreter's folder", GONE, "os.utime(os.__file__)", root=True),
    Case("network", "tcp", DENIED, "socket.create_connection(('127.0.0.1', {port}), 2)"),
    Case("network", "udp", DENIED, """
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))"""),
    Case("network", "listen", DENIED, "socket.create_server(('127.0.0.1', 0))"),
    Case("network", "unix socket", DENIED, "socket.socket(socket.AF_UNIX).connect({unix!r})"),
    Case("network", "datagram from a socket pair", DENIED, """
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {unix!r} + '.datagram')"""),
    Case("network", "abstract socket", DENIED, """
socket.socket(socket.AF_UNIX).connect('\\0hostile{port}')"""),
    Case("network", "tcp through ctypes", DENIED, """
s = LIBC.socket(2, 1, 0)
if s < 0: raise OSError(ctypes.get_errno(), 'socket')
c('connect', s, address({port}), 16)"""),
    Case("network", "udp through ctypes", DENIED, """
s = LIBC.socket(2, 2, 0)
if s < 0: raise OSError(ctypes.get_errno(), 'socket')
c('sendto', s, b'x', 1, 0, address({udp}), 16)"""),
    Case("network", "io_uring", "OSError", """
s = LIBC.syscall(425, 4, ctypes.create_string_buffer(120))
if s < 0: raise OSError(ctypes.get_errno(), 'io_uring')"""),
    Case("signals", "kill another process", GONE, "os.kill({victim}, signal.SIGCONT)"),
    Case("signals", "kill the parent", DENIED, """
parent = os.getppid()
os.kill(parent if parent else -1, 0)"""),
    Case("signals", "kill everything", DENIED, "os.kill(-1, 0)"),
    Case("signals", "kill its group", GONE, "os.killpg(os.getpgid({victim}), 0)"),
    Case("signals", "kill through ctypes", GONE, "c('kill', {victim}, 0)"),
    Case("signals", "pidfd", GONE + "|OSError", """
signal.pidfd_send_signal(os.pidfd_open({victim}), 0)"""),
    Case("signals", "ptrace", GONE, "c('ptrace', 0x4206, {victim}, 0, 0)"),
    Case("signals", "read its memory", GONE, """
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
there = (ctypes.c_void_p * 2)({address}, 8)
c('process_vm_readv', {victim}, vector, 1, there, 1, 0)"""),
    Case("signals", "limits of another process", GONE, """
resource.prlimit({victim}, resource.RLIMIT_CORE, (0, 0))"""),
    Case("signals", "priority of another process", GONE, """
os.setpriority(os.PRIO_PROCESS, {victim}, 19)"""),
    Case("memory", "raise its own limits", "ValueError|PermissionError", """
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); mmap.mmap(-1, 2 << 30)"""),
    Case("leftovers", "take back the death signal", DENIED, "c('prctl', 1, 0, 0, 0, 0)"),
    Case("leftovers", "user namespace", DENIED, "c('unshare', 0x10000000)"),
    Case("files", "mount", DENIED, """
try: c('unshare', 0x10020000)
except OSError: pass
c('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)"""),
]
# fmt: on


@contextlib.contextmanager
def outside_world():
    """What there is to attack, as values for the cases' code."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        secret = os.path.join(folder, "secret")
        Path(secret).write_text("the answer is 42")
        victim = subprocess.Popen(["sleep", "600"], env={"SECRET": "1"}, start_new_session=True)
        stack.callback(lambda: (victim.kill(), victim.wait()))
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        for kind, name in (
            (socket.SOCK_STREAM, os.path.join(folder, "unix")),
            (socket.SOCK_DGRAM, os.path.join(folder, "unix.datagram")),
            (socket.SOCK_STREAM, f"\0hostile{port}"),
        ):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(name)
            kind == socket.SOCK_STREAM and server.listen(64)
        maps = Path(f"/proc/{victim.pid}/maps").read_text()
        yield {
            "victim": victim.pid,
            "port": port,
            "udp": udp.getsockname()[1],
            "unix": os.path.join(folder, "unix"),
            "secret": secret,
            "outside": folder,
            "address": int(maps.split("-")[0], 16),
        }


def attempt(box: Sandbox, case: Case, world: dict, control: bool):
    code = PRELUDE + case.code.format(**world, control=control) + "\nprint('ESCAPED')"
    seconds = case.control_seconds if control else case.seconds
    return box.result(box.submit(code, seconds=seconds), 60)


def complaint(box: Sandbox, case: Case, world: dict) -> str:
    """What is wrong with the answer to a case; "" if it was refused as it should be."""
    result = attempt(box, case, world, control=False)
    shown = f"{result.status} {result.stdout!r} {result.stderr[-300:]!r}"
    if "ESCAPED" in result.stdout:
        return f"not refused: {shown}"
    if not any(way in f"{result.status} {result.stderr}" for way in case.refused.split("|")):
        return f"refused, but not by {case.refused}: {shown}"
    after = box.result(box.submit("6 * 7"), 60)
    return "" if after.stdout == "42\n" else f"the next call: {after}"


def control_complaint(bare: Sandbox, case: Case, world: dict) -> str:
    """The same without layers, where the attempt must succeed."""
    if case.root and os.getuid() != 0:
        return ""
    result = attempt(bare, case, world, control=True)
    return "" if "ESCAPED" in result.stdout else f"fails without the layer too: {result}"


def report(off: tuple[str, ...] = (), expected_off: tuple[str, ...] = ()) -> int:
    """Prints the layers and what became of each case; the number of complaints."""
    num_complaints = 0
    with outside_world() as world, Sandbox(off=off, **SETTINGS) as box:
        with Sandbox(off=ALL_OFF, preload=(), workers=1) as bare:
            for name, (on, reason) in box.layers().items():
                print(f"{name:10} {'on ' if on else 'OFF'}  {reason}")
                num_complaints += not on and bool(expected_off) and name not in expected_off
            for case in CASES:
                if not box.layers()[case.layer][0]:
                    print(f"  off      {case.layer}: {case.name}")
                    continue
                wrong = complaint(box, case, world) or control_complaint(bare, case, world)
                num_complaints += bool(wrong)
                print(f"  {'FAILED' if wrong else 'refused'}  {case.layer}: {case.name}  {wrong}")
    print(f"{num_complaints} of {len(CASES)} failed" if num_complaints else "all refused")
    return num_complaints


# ---- other users ----


def become_nobody() -> None:
    """An ordinary user. He may not search a folder like /root, where the interpreter may lie: in a
    mount namespace an empty folder takes its place and holds only the interpreter."""
    needed = [sys.base_prefix, sys.prefix, REPO]
    hide = lambda p: [str(a) for a in reversed(Path(p).parents) if not os.stat(a).st_mode & 1]
    if any(hide(p) for p in needed):
        isolation.enter_namespaces(isolation.NEW_MOUNT)
    for path in needed:
        if hidden := hide(path):
            inside = f"/proc/self/fd/{os.open(path, os.O_PATH)}".encode()
            isolation.libc("mount", b"none", hidden[0].encode(), b"tmpfs", 0, b"mode=755")
            os.makedirs(path)
            bind = isolation.BIND | isolation.REC
            isolation.libc("mount", inside, path.encode(), None, bind, None)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    isolation.libc("prctl", 4, 1, 0, 0, 0)  # dumpable again, as after an exec


def become_container() -> None:
    """Root with what Docker leaves him; takes hold at the next exec."""
    docker = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
    for capability in set(range(41)) - docker:
        isolation.libc("prctl", 24, capability, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, __file__, "contained"])


def main(who: str = "") -> int:
    if not LINUX:
        print("no layers outside Linux: nothing to attack")
        return 1
    if who == "container":
        become_container()
    if who == "view":
        return report(off=("landlock",), expected_off=("none",))
    if who == "contained":
        return report(off=("pid", "net", "mount"), expected_off=("disk",))
    if who == "nobody":
        become_nobody()
    return report(expected_off=("none",) if who else ())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
