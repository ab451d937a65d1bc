"""Sandbox: a pool of isolated Python workers that runs whatever a policy writes.

Model code is unpredictable: endless loops, memory and fork bombs, attempts on files and network.
Every call gets exactly one `ToolResult`, and no call can harm the trainer or another call.

    trainer, ranks          SandboxClient: submit / ready / result, never blocks on a call
      | unix socket         0700 directory, same user, the job's secret; length + JSON, no pickle
    pool (one process)      queues; answer checks first, clients in turn; replaces dead zygotes
      | socket pair
    zygote (one per core)   exec'd; numpy, sympy, reward imported; forks a child ahead of its call
      | three pipes
    child (one per call)    locked down before it reads its code; ends with it

Forking a loaded interpreter takes about 2 ms where starting one takes 20 (numpy: 150, sympy: 500).
The child is forked before its call arrives, so a single call does not wait even for that.
Nothing of a call outlives it: memory dies with the child, files with its private directory.

Isolation comes in layers, tried in a throw-away fork at start (`layers()` says on or off and why;
`require=("network", ...)` refuses to start without):

    network    seccomp refuses socket and io_uring; an empty network namespace where allowed
    files      Landlock: reads of the interpreter's folders and one private directory, else a
               file view (chroot in a mount namespace); seccomp refuses chmod and its like
    signals    seccomp (kill only oneself), a PID namespace per call, Landlock's scope
    memory     RLIMIT_AS, with fork refused
    time       CPU seconds by the child's own clock, and RLIMIT_CPU behind it
    processes  seccomp: only threads may be cloned
    disk       a tmpfs of fixed size
    leftovers  no fork, a PID namespace, or a subreaper

Root in a container without CAP_SYS_ADMIN loses only `disk`. An ordinary user has all of it where
user namespaces are allowed. Outside Linux a call is a plain child process with resource limits.

Time: `seconds` limits CPU seconds, which a loaded machine does not change. A child that sleeps is
ended after as many seconds asleep (samples of its threads' states: waiting for a core is not
sleep). The clock starts when the child gets its code.

The verdict comes from the parent: status, CPU and wall seconds. A child can at most misreport its
own text and exit code. Status: ok, empty (ran, printed nothing), error, timeout, memory, output
(printed too much), lost (twice a dead worker: our fault, not the policy's).

    python sandbox.py --check      layers of this host, and the hostile suite against them
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import ctypes
import gc
import hmac
import importlib
import importlib.util
import json
import linecache
import math
import os
import platform
import random
import resource
import secrets
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

MECHANISMS = ("seccomp", "landlock", "pid", "net", "mount", "limits", "capabilities")
GUARANTEES = (
    "network", "files", "signals", "memory", "time", "processes", "disk", "leftovers"
)  # fmt: skip
PROGRAM = "<tool>"  # file name of a call's code in its tracebacks
OUT_OF_MEMORY = 77  # exit status by which a child reports a MemoryError
MAX_MESSAGE = 256 << 20  # bytes
LINUX = sys.platform == "linux"
NUM_CORES = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
MAX_UNREAD = 64 << 20  # bytes of answers waiting for a client, then its calls wait too
TICK = 0.05  # seconds between two looks at a running child


@dataclass(frozen=True)
class ToolResult:
    status: str  # ok | empty | error | timeout | memory | output | lost
    stdout: str
    stderr: str
    wall_seconds: float
    cpu_seconds: float


# ---- messages: 4 bytes of length, then JSON ----


def pack(message: dict) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def unpack(inbox: bytearray) -> list[dict]:
    """Takes the whole messages off the front of `inbox`; ValueError if it is not the protocol."""
    messages = []
    while len(inbox) >= 4:
        (size,) = struct.unpack_from("<I", inbox)
        if size > MAX_MESSAGE:
            raise ValueError(f"a message of {size} bytes")
        if len(inbox) < 4 + size:
            break
        message = json.loads(inbox[4 : 4 + size])
        if not isinstance(message, dict):
            raise ValueError("a message that is not an object")
        messages.append(message)
        del inbox[: 4 + size]
    return messages


def read_message(descriptor: int) -> dict | None:
    """Waits for one message; None at the end of the stream."""
    data, size = b"", 4
    while len(data) < size:
        if not (more := os.read(descriptor, size - len(data))):
            return None
        data += more
        if len(data) == 4:
            size += struct.unpack("<I", data)[0]
    return json.loads(data[4:])


# ---- kernel calls ----

LIBC = ctypes.CDLL(None, use_errno=True)


def libc(function: str, *args) -> int:
    """Calls a C function; -1 becomes an OSError that names it."""
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = getattr(LIBC, function)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


NEW_MOUNT, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH, NO_RANDOMIZE = 1 << 14, 1 << 18, 2, 0x40000

# Refused system calls: name, number on x86_64, on aarch64 (- where it has none). Besides the
# obvious: memory outside RLIMIT_AS (memfd, shm), and changes to the files that one owns, which
# Landlock does not know (chmod, utime, xattr).
REFUSED = """
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, connect 42 203, bind 49 200,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, tkill 200 130,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30,
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, keyctl 250 219, add_key 248 217,
request_key 249 218, memfd_create 319 279, shmget 29 194, semget 64 190, msgget 68 186,
mq_open 240 180, mq_unlink 241 181, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -,
lchown 94 -, fchown 93 55, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, truncate 76 45, sync 162 81, syncfs 306 267,
personality 135 92, name_to_handle_at 303 264, open_by_handle_at 304 265, move_pages 279 239,
migrate_pages 256 238, syslog 103 116, quotactl 179 60, acct 163 89, inotify_init 253 -,
inotify_init1 294 26, fanotify_init 300 262
"""
# (audit architecture, column of REFUSED, clone, kill, tgkill, prlimit, sched_setaffinity,
#  socketpair, prctl)
ARCHITECTURES = {
    "x86_64": (0xC000003E, 1, 56, 62, 234, 302, 203, 53, 157),
    "aarch64": (0xC00000B7, 2, 220, 129, 131, 261, 122, 199, 167),
}
# From 424 on numbers are the same everywhere, and nearly all of them are ways out (io_uring, pidfd,
# the mount calls): "not known" is what libc expects of an old kernel. Known: close_range, openat2,
# faccessat2, epoll_pwait2.
FIRST_COMMON, COMMON_KNOWN = 424, (436, 437, 439, 441)
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


def seccomp_program() -> bytes:
    """The filter, classic BPF over struct seccomp_data (number at 0, architecture at 4, arguments
    from 16 on, 8 bytes each). An instruction is (code, jump if true, jump if false, value)."""
    load = lambda at: (0x20, 0, 0, at)
    equal = lambda value, yes, no: (0x15, yes, no, value)
    give = lambda verdict: (0x06, 0, 0, verdict)
    audit, column, clone, kill, tgkill, prlimit, affinity, socketpair, prctl = ARCHITECTURES[
        platform.machine()
    ]
    me = os.getpid()
    code = [load(4), equal(audit, 1, 0), give(KILL), load(0)]
    code += [(0x35, 0, 1, 0x40000000), give(UNKNOWN)]  # x32 calls
    for number in COMMON_KNOWN:
        code += [equal(number, 0, 1), give(ALLOW)]
    code += [(0x35, 0, 1, FIRST_COMMON), give(UNKNOWN)]
    for line in REFUSED.replace("\n", " ").split(","):
        if (number := line.split()[column]) != "-":
            code += [equal(int(number), 0, 1), give(REFUSE)]
    # clone: threads only.  kill, tgkill: only oneself.  limits, affinity: only oneself (0 or pid).
    code += [equal(clone, 0, 4), load(16), (0x45, 0, 1, 0x10000), give(ALLOW), give(REFUSE)]
    for number, others in ((kill, me), (tgkill, me), (prlimit, 0), (affinity, 0)):
        code += [equal(number, 0, 5), load(16), equal(me, 1, 0), equal(others, 0, 1)]
        code += [give(ALLOW), give(REFUSE)]
    # socketpair: streams only (asyncio needs one; a datagram socket could send to any path).
    code += [equal(socketpair, 0, 5), load(24), (0x54, 0, 0, 0xF), equal(1, 0, 1)]
    code += [give(ALLOW), give(REFUSE)]
    # prctl: must not take back the signal that ends it with its zygote.
    code += [equal(prctl, 0, 3), load(16), equal(PR_SET_PDEATHSIG, 0, 1), give(REFUSE)]
    code += [give(ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def apply_seccomp(_=None) -> None:
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"system call numbers of {platform.machine()} are not known")
    program = seccomp_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("prctl", PR_SET_SECCOMP, 2, header, 0, 0)


def readable_paths() -> list[str]:
    """What Python and its libraries read: their folders, the loader's, time zones, /dev/null."""
    system = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache /etc/localtime"
    devices = "/usr/share/zoneinfo /dev/null /dev/zero /dev/urandom /dev/random"
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = dict.fromkeys([*folders, *system.split(), *devices.split()])
    return [p for p in paths if p.startswith("/") and p != "/" and os.path.exists(p)]


def landlock_ruleset(home: str) -> int:
    """A ruleset (file descriptor): nothing but reads of `readable_paths` and all under `home`.

    Later versions know more: truncate (3), TCP (4), device ioctl (5), signals and abstract unix
    sockets (6)."""
    version = libc("syscall", 444, None, 0, 1)
    every = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    attributes = struct.pack("<QQQ", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc("syscall", 444, attributes, len(attributes), 0)
    read_file, write_file, read_folder = 4, 2, 8
    rights = {path: read_file | read_folder for path in readable_paths()}
    rights["/dev/null"] = read_file | write_file
    rights[home] = every
    for path, allowed in rights.items():
        descriptor = os.open(path, getattr(os, "O_PATH", 0))
        if not os.path.isdir(path):
            allowed &= ~read_folder
        rule = struct.pack("<Qi", allowed, descriptor)
        libc("syscall", 445, ruleset, 1, rule, 0)
        os.close(descriptor)
    return ruleset


def apply_landlock(ruleset: int) -> None:
    libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("syscall", 446, ruleset, 0)


def drop_capabilities() -> None:
    libc("capset", struct.pack("<II", 0x20080522, 0), bytes(24))


def enter_namespaces(flags: int) -> None:
    """Root with CAP_SYS_ADMIN needs no user namespace, everybody else one that maps him to
    himself."""
    uid, gid = os.getuid(), os.getgid()
    try:
        libc("unshare", flags)
    except PermissionError:
        libc("unshare", flags | NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if flags & NEW_MOUNT:
        libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def mount_tmpfs(path: str, size: int, files: int) -> None:
    options = f"size={size},nr_inodes={files},mode=700".encode()
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    libc("mount", b"tmpfs", os.fsencode(path), b"tmpfs", flags, options)


def build_view(root: str, home: str) -> None:
    """Without Landlock: under `root` a tree of read-only bind mounts that a child chroots into."""
    mount_tmpfs(root, 1 << 20, 10_000)
    os.makedirs(root + home)
    for path in readable_paths():
        inside = root + path
        if os.path.lexists(inside):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.mkdir(inside) if os.path.isdir(path) else Path(inside).touch()
        libc("mount", os.fsencode(path), os.fsencode(inside), None, MS_BIND | MS_REC, None)
        kept = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # locked in user ns
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | kept
        libc("mount", None, os.fsencode(inside), None, flags, None)
    libc("mount", None, os.fsencode(root), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)


# ---- the child: one call ----


def lock_down(zygote: Zygote, pipes: list[int]) -> None:
    """Everything a child gives up, in the order in which it still may. Its pipes become 0, 1, 2."""
    os.setsid()
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
    on, limits = zygote.on, zygote.settings
    if LINUX:
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):  # the first to go when memory is short
            Path("/proc/self/oom_score_adj").write_text("1000")
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", closefd=False)  # by line: a time-out
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    if zygote.view:
        os.chroot(zygote.view)
    os.chdir(zygote.home)
    if on["landlock"]:
        apply_landlock(zygote.ruleset)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", LANG="C.UTF-8", HOME=zygote.home, TMPDIR=zygote.home)
    tempfile.tempdir, sys.argv[:], sys.path[:0] = None, [""], [""]
    random.seed(0)
    if on["limits"]:
        soft = {"AS": limits["memory"], "FSIZE": limits["disk"], "NOFILE": 64, "CORE": 0}
        for name, value in (soft if on["seccomp"] else {**soft, "NPROC": 0}).items():
            with contextlib.suppress(ValueError):  # macOS has no RLIMIT_AS to speak of
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    if on["capabilities"]:
        drop_capabilities()
    if on["seccomp"]:
        apply_seccomp()


def child_main() -> int:
    """Reads its call from descriptor 0, where the rest of the pipe is the program's stdin."""
    if (call := read_message(0)) is None:
        return 1  # the pool ends
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(call["seconds"]) + 1,) * 2)
    reward = sys.modules.pop("reward", None)  # no business of a tool call
    if call["kind"] == "check":
        print(int(reward.is_equivalent(*call["code"])), end="", flush=True)
        return 0
    return run_program(call["code"])


def run_program(source: str) -> int:
    """Runs a call's code as a script whose last expression is shown; returns the exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache[PROGRAM] = (len(source), None, source.splitlines(True), PROGRAM)
    stdout, stderr = sys.stdout, sys.stderr
    status = 0
    try:
        execute(source, main.__dict__)
    except BaseException as error:
        status = show_error(error, main.__dict__)
    try:
        threading._shutdown()  # joins threads and thread pools as an interpreter's end does
        atexit._run_exitfuncs()
    except BaseException as error:
        status = show_error(error, main.__dict__)
    for stream in (sys.stdout, sys.stderr, stdout, stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return status


def execute(source: str, names: dict) -> None:
    tree = compile(source, PROGRAM, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    code = compile(tree, PROGRAM, "exec", dont_inherit=True)
    exec(code, names)
    if last:
        future = code.co_flags & 0x1FF0000  # from __future__ import annotations, ...
        expression = ast.Expression(last.value)
        value = eval(compile(expression, PROGRAM, "eval", future, dont_inherit=True), names)
        if value is not None:
            print(repr(value))


def show_error(error: BaseException, names: dict) -> int:
    """Prints the traceback, the program's own lines only, and returns the exit status."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return int(bool(error.code))
    if isinstance(error, SystemExit):
        text = f"{error.code}\n"
    else:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)
            names.clear()
        text = own_lines(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(2, data) :]
    return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1


def own_lines(error: BaseException) -> str:
    """The traceback without the frames of libraries and without their folders' names."""

    def strip(part):
        frames = [frame for frame in part.stack or () if frame.filename == PROGRAM]
        part.stack = traceback.StackSummary.from_list(frames) if frames else None
        for linked in (part.__cause__, part.__context__, *(getattr(part, "exceptions", 0) or ())):
            if linked:
                strip(linked)

    try:
        trace = traceback.TracebackException.from_exception(error)
        strip(trace)
        text = "".join(trace.format())
    except Exception:  # an exception that cannot be shown, no memory, ...
        text = f"{type(error).__name__}\n"
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(folder + "/", "")
    return text


# ---- the zygote: forks children, watches one at a time ----


@dataclass
class Child:
    pid: int
    stdin: int  # our ends of its pipes, -1 when closed
    stdout: int
    stderr: int
    pidfd: int


class Output:
    """What a child wrote to one pipe: the head and the tail of it, `limit` bytes in all."""

    def __init__(self, descriptor: int, limit: int):
        self.descriptor, self.half = descriptor, limit // 2
        self.head, self.tail, self.size = bytearray(), bytearray(), 0

    def read(self) -> bool:
        """Takes what is there; False at the end of the pipe."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self.size += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        del self.tail[: -self.half]
        return bool(data)

    def text(self) -> str:
        cut = self.size - len(self.head) - len(self.tail)
        middle = f"\n... {cut} bytes left out ...\n".encode() if cut else b""
        return (self.head + middle + self.tail).decode("utf-8", "replace")


class Zygote:
    """One worker: `on` says which mechanisms hold here, `why` why others do not."""

    def __init__(self, settings: dict, pool: socket.socket):
        self.settings, self.pool = settings, pool
        self.view = self.ruleset = self.own_pid_namespace = None
        self.folder = os.path.join(settings["folder"], f"w{settings['index']}")
        self.home = self.private = self.folder
        os.makedirs(self.folder, exist_ok=True)
        self.why = {name: self.probe(name) for name in MECHANISMS}
        self.on = {name: not why for name, why in self.why.items()}
        self.prepare()

    def probe(self, name: str) -> str:
        """Tries a mechanism in a throw-away fork: "" or why it is off."""
        if name in self.settings["off"]:
            return "switched off"
        if name == "limits":
            return ""
        if not LINUX:
            return f"{sys.platform} has no such thing"
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                if name == "seccomp":
                    apply_seccomp()
                elif name == "landlock":
                    apply_landlock(landlock_ruleset(self.folder))
                elif name == "capabilities":
                    drop_capabilities()
                elif name == "mount":
                    enter_namespaces(NEW_MOUNT)
                    mount_tmpfs(self.folder, 1 << 20, 10)
                else:
                    enter_namespaces({"pid": NEW_PID, "net": NEW_NET}[name])
            except Exception as error:
                os.write(writer, str(error)[:500].encode() or b"failed")
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        why = os.read(reader, 500).decode()
        os.close(reader)
        return why

    def prepare(self) -> None:
        """What all children share: namespaces, the private directory's place, the ruleset.

        subtle: the worker moves into a PID namespace of its own first. It can then come back from
        the one that it makes for each call also where a user namespace gives it that right."""
        if LINUX:
            libc("prctl", PR_SET_SUBREAPER, 1, 0, 0, 0)
        if self.on["pid"]:
            enter_namespaces(NEW_PID)
            if (pid := os.fork()) != 0:
                self.pool.close()
                status, pool_process = os.waitpid(pid, 0)[1], self.settings["pool"]
                if os.getppid() != pool_process:  # the pool was killed and cannot tidy up
                    shutil.rmtree(self.settings["folder"], ignore_errors=True)
                os._exit(bool(status))
            libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if self.on["net"] or self.on["mount"]:
            enter_namespaces(NEW_NET * self.on["net"] | NEW_MOUNT * self.on["mount"])
        if self.on["mount"]:
            self.home = self.private = private_place() or self.folder
            if not self.on["landlock"]:
                self.view = self.folder
                build_view(self.view, self.home)
                self.private = self.view + self.home
            self.mount_private()
        elif self.on["landlock"]:
            self.ruleset = landlock_ruleset(self.folder)

    def mount_private(self) -> None:
        mount_tmpfs(self.private, self.settings["disk"], self.settings["files"])
        if self.on["landlock"]:  # a rule is about a folder's inode, here the tmpfs's own
            os.close(self.ruleset) if self.ruleset else None
            self.ruleset = landlock_ruleset(self.home)

    def layers(self) -> dict[str, tuple[bool, str]]:
        """{guarantee: (on, by what or why not)}."""
        on, why = self.on, self.why
        missing = lambda *names: "; ".join(f"{n}: {why[n]}" for n in names if not on[n])
        by = lambda *names: " and ".join(n for n in names if on[n])
        files = (on["landlock"] and on["seccomp"]) or self.view
        signals, processes = on["seccomp"] or on["pid"], on["seccomp"]
        return {
            "network": (on["seccomp"], by("seccomp", "net") or missing("seccomp")),
            "files": (bool(files), by("landlock", "mount") if files else missing(*MECHANISMS[:5])),
            "signals": (signals, by("seccomp", "pid") or missing("seccomp", "pid")),
            "memory": (processes and on["limits"], missing("seccomp", "limits") or "RLIMIT_AS"),
            "time": (True, "the child's CPU clock" if LINUX else "wall time"),
            "processes": (processes, missing("seccomp") or "seccomp: threads only"),
            "disk": (on["mount"], missing("mount") or f"tmpfs, {self.settings['disk']} bytes"),
            "leftovers": (LINUX, by("seccomp", "pid") or "subreaper" if LINUX else "killpg only"),
        }

    def run(self) -> None:
        preload(self.settings["preload"])
        child = self.fork_ahead()
        self.send({"layers": self.layers()})
        while (call := read_message(self.pool.fileno())) is not None:
            with contextlib.suppress(ChildProcessError):  # killed while it waited: a fresh one
                if os.waitpid(child.pid, os.WNOHANG)[0]:
                    self.clean(child)
                    child = self.fork_ahead()
            self.send(self.serve(child, call))
            self.clean(child)
            child = self.fork_ahead()
        os.kill(child.pid, signal.SIGKILL)
        self.clean(child)

    def send(self, message: dict) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pool.sendall(pack(message))

    def fork_ahead(self) -> Child:
        """The next call's child, locked down and waiting for its code at the end of a pipe."""
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        if not self.on["mount"]:
            self.home = os.path.join(self.folder, "home")
            os.mkdir(self.home, 0o700)
        if self.on["pid"]:
            libc("unshare", NEW_PID)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lock_down(self, theirs)
                status = child_main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if self.on["pid"]:
            libc("setns", self.own_pid_namespace, NEW_PID)
        for descriptor in theirs:
            os.close(descriptor)
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        return Child(pid, *ours, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1)

    def serve(self, child: Child, call: dict) -> dict:
        """Feeds one call to its child and watches it to its end, which is the process's end and
        not that of a pipe: somebody else may hold a pipe open."""
        seconds = call["seconds"]
        start_cpu, start = cpu_clock(child.pid), time.monotonic()
        feed = memoryview(pack(call) + call["stdin"].encode("utf-8", "replace"))
        outputs = [Output(d, self.settings["output"]) for d in (child.stdout, child.stderr)]
        poll = select.poll()
        poll.register(child.stdin, select.POLLOUT)
        for descriptor in {self.pool.fileno(), child.stdout, child.stderr, child.pidfd} - {-1}:
            poll.register(descriptor, select.POLLIN)
        cause, cpu, asleep, looked, looked_cpu = "", 0.0, 0.0, start, 0.0
        while not cause:
            wait = min(TICK, max((seconds - cpu) / NUM_CORES, 0.002))
            ready = dict(poll.poll((wait if child.pidfd >= 0 else 0.002) * 1000))
            if child.stdin in ready:
                feed = feed[write_some(child.stdin, feed) :]
                if not feed:
                    poll.unregister(child.stdin)
                    os.close(child.stdin)
                    child.stdin = -1
            for output in outputs:
                if output.descriptor in ready and not output.read():
                    poll.unregister(output.descriptor)
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            cpu, now = cpu_clock(child.pid) - start_cpu, time.monotonic()
            if now - looked >= TICK:
                if is_asleep(child.pidfd):
                    asleep += max(0.0, min(now - looked, 2 * TICK) - (cpu - looked_cpu))
                looked, looked_cpu = now, cpu
            if max(cpu, asleep, (now - start - 5) / 10) >= seconds:
                cause = "timeout"
            elif max(output.size for output in outputs) > 256 * self.settings["output"]:
                cause = "output"
            elif self.pool.fileno() in ready:
                cause = "lost"  # nobody waits for the answer any more
        else:
            os.kill(child.pid, signal.SIGKILL)
            _, status, usage = os.wait4(child.pid, 0)
        self.end_orphans(child)
        for output in outputs:
            while output.size <= 256 * self.settings["output"] and output.read():
                pass
        cpu = max(0.0, usage.ru_utime + usage.ru_stime - start_cpu)
        stdout, stderr = (output.text() for output in outputs)
        code = os.waitstatus_to_exitcode(status)
        status = cause or ("timeout" if cpu >= seconds else verdict(code, stdout))
        if status in ("error", "memory") and not stderr:
            stderr = f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        return asdict(ToolResult(status, stdout, stderr, time.monotonic() - start, cpu))

    def end_orphans(self, child: Child) -> None:
        """Without a PID namespace what a call left behind is now the zygote's own child."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not (self.on["pid"] or self.on["seccomp"]):
                os.killpg(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 2
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    for pid in children():
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.001)

    def clean(self, child: Child) -> None:
        """Leaves nothing of a call: descriptors and files."""
        for descriptor in {child.stdin, child.stdout, child.stderr, child.pidfd} - {-1}:
            os.close(descriptor)
        if not self.on["mount"]:
            with contextlib.suppress(OSError):
                os.rmdir(self.home)
                return
            # rm, because a hostile tree may be deeper than Python recurses
            subprocess.run(["chmod", "-R", "u+rwx", self.home], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", self.home])
        elif os.listdir(self.private):
            libc("umount2", os.fsencode(self.private), MNT_DETACH)
            self.mount_private()


def verdict(code: int, stdout: str) -> str:
    """Status of a call that ended by itself with this exit code (negative: a signal)."""
    if code == 0:
        return "ok" if stdout else "empty"
    # SIGKILL, and not by us: the kernel ran out of memory
    return "memory" if code in (OUT_OF_MEMORY, -signal.SIGKILL) else "error"


def children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    return []


def write_some(descriptor: int, data: memoryview) -> int:
    """Number of bytes that went (all, if nobody reads them any more)."""
    try:
        return os.write(descriptor, data[: 1 << 20])
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def cpu_clock(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    return time.clock_gettime((~pid << 3) | 2) if LINUX else 0.0


def is_asleep(pidfd: int) -> bool:
    """Whether no thread of a process runs, waits for a core or for a disk. The number that /proc
    knows it by comes from the descriptor: the zygote may live in a PID namespace."""
    try:
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        (pid,) = (line.split()[1] for line in info.splitlines() if line.startswith("Pid:"))
        stats = [p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (OSError, ValueError):
        return True  # no /proc: time is wall time
    return not any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats)


def private_place() -> str | None:
    """A folder that may be covered by the private one: nothing readable lies under it."""
    for place in ("/tmp", "/mnt", "/srv", "/media"):
        if os.path.isdir(place) and not any(p.startswith(place) for p in readable_paths()):
            return place
    return None


def preload(names: list[str]) -> None:
    """Imports what calls are likely to want; every child then has it for nothing."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if names and (path := Path(__file__).with_name("reward.py")).exists():
        spec = importlib.util.spec_from_file_location("reward", path)
        sys.modules["reward"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["reward"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "sympy" in sys.modules:
        sys.modules["sympy"].core.random.seed(0)
    warnings.formatwarning = lambda message, kind, *_: f"{kind.__name__}: {message}\n"
    threading.excepthook = lambda args: show_error(args.exc_value, {})
    gc.collect()
    gc.freeze()


# ---- the pool: one process, no threads, never blocks ----


@dataclass
class Call:
    client: Peer
    request: dict
    retried: bool = False


@dataclass(eq=False)
class Peer:
    """A connection: a client (its calls) or a zygote (its process and the call that it runs)."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    known: bool = False  # a client that gave the secret, a zygote that is ready
    urgent: deque[Call] = field(default_factory=deque)
    waiting: deque[Call] = field(default_factory=deque)
    wants_layers: bool = False
    process: subprocess.Popen | None = None
    index: int = 0
    call: Call | None = None
    deadline: float = math.inf


class Pool:
    def __init__(self, settings: dict, listener: socket.socket, owner: socket.socket):
        self.settings, self.listener, self.owner_pid = settings, listener, os.getppid()
        self.selector = selectors.DefaultSelector()
        self.workers: list[Peer] = []
        self.layers: dict | None = None
        self.num_failures = 0  # zygotes in a row that ended before they were ready
        self.owner = self.add(owner, known=True)
        self.clients = deque([self.owner])
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, None)

    def add(self, sock: socket.socket, **facts) -> Peer:
        sock.setblocking(False)
        peer = Peer(sock, **facts)
        self.selector.register(sock, selectors.EVENT_READ, peer)
        return peer

    def run(self) -> None:
        if LINUX:
            libc("prctl", PR_SET_SUBREAPER, 1, 0, 0, 0)
            with contextlib.suppress(OSError):  # equal addresses from run to run
                libc("personality", NO_RANDOMIZE)
        for index in range(self.settings["workers"]):
            self.start_zygote(index)
        while self.owner in self.clients and os.getppid() == self.owner_pid:
            for key, events in self.selector.select(1):
                if key.data is None:
                    self.accept()
                else:
                    self.exchange(key.data, events)
            self.dispatch()
            for worker in [w for w in self.workers if time.monotonic() > w.deadline]:
                self.drop(worker)

    def start_zygote(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-s", os.path.abspath(__file__), "--zygote"]
        process = spawn([*command, str(theirs.fileno())], theirs)
        worker = self.add(ours, process=process, index=index)
        self.workers.append(worker)
        self.post(worker, {**self.settings, "index": index, "pool": os.getpid()})

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        if hasattr(socket, "SO_PEERCRED"):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", credentials)[1] != os.getuid():
                return sock.close()
        self.clients.append(self.add(sock))

    def post(self, peer: Peer, message: dict) -> None:
        peer.outbox += pack(message)
        self.exchange(peer, selectors.EVENT_WRITE)

    def exchange(self, peer: Peer, events: int) -> None:
        """Moves what can be moved now; whoever breaks the protocol is dropped."""
        try:
            if events & selectors.EVENT_READ:
                if not (data := peer.sock.recv(1 << 18)):
                    raise ConnectionResetError
                peer.inbox += data
                for message in unpack(peer.inbox):
                    self.from_worker(peer, message) if peer.process else self.from_client(
                        peer, message
                    )
            if peer.outbox:
                with contextlib.suppress(BlockingIOError):
                    del peer.outbox[: peer.sock.send(peer.outbox)]
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
                self.selector.modify(peer.sock, wanted, peer)
        except (OSError, ValueError, KeyError, TypeError):
            self.drop(peer)

    def from_client(self, client: Peer, message: dict) -> None:
        if not client.known:
            if not hmac.compare_digest(str(message.get("secret")), self.settings["secret"]):
                raise ValueError("wrong secret")
            client.known = True
        elif "layers" in message:
            client.wants_layers = True
            self.tell_layers()
        else:
            check_request(message)
            queue = client.urgent if message["urgent"] else client.waiting
            queue.append(Call(client, message))

    def from_worker(self, worker: Peer, message: dict) -> None:
        if "layers" in message:
            worker.known, self.num_failures, self.layers = True, 0, message["layers"]
            return self.tell_layers()
        call, worker.call, worker.deadline = worker.call, None, math.inf
        self.answer(call, message)

    def answer(self, call: Call, result: dict) -> None:
        if call.client in self.clients:
            self.post(call.client, {"id": call.request["id"], **result})

    def tell_layers(self) -> None:
        for client in [c for c in self.clients if c.wants_layers and self.layers]:
            client.wants_layers = False
            self.post(client, {"layers": self.layers})

    def dispatch(self) -> None:
        for worker in [w for w in self.workers if w.known and not w.call]:
            if not (call := self.next_call()):
                break
            worker.call = call
            worker.deadline = time.monotonic() + 10 * call.request["seconds"] + 60
            self.post(worker, call.request)

    def next_call(self) -> Call | None:
        """Urgent calls first, clients in turn; one that does not read its answers has to wait."""
        for urgent in (True, False):
            for _ in range(len(self.clients)):
                self.clients.rotate(-1)
                queue = self.clients[0].urgent if urgent else self.clients[0].waiting
                if queue and len(self.clients[0].outbox) < MAX_UNREAD:
                    return queue.popleft()
        return None

    def drop(self, peer: Peer) -> None:
        """Forgets a client and its calls, or replaces a zygote: its call is tried once more."""
        if peer not in self.clients and peer not in self.workers:
            return
        self.selector.unregister(peer.sock)
        peer.sock.close()
        if not peer.process:
            return self.clients.remove(peer)
        self.workers.remove(peer)
        peer.process.kill()
        peer.process.wait()
        self.reap()
        if not peer.known:
            self.num_failures += 1
            if self.num_failures >= 3:
                raise SystemExit("sandbox: workers do not start, see the error above")
        if (call := peer.call) and call.retried:
            self.answer(call, asdict(ToolResult("lost", "", "", 0.0, 0.0)))
        elif call:
            call.retried = True
            (call.client.urgent if call.request["urgent"] else call.client.waiting).appendleft(call)
        self.start_zygote(peer.index)

    def reap(self) -> None:
        """Ends what a dead zygote left: it is the pool's own child now."""
        for pid in set(children()) - {worker.process.pid for worker in self.workers}:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.sock.close()
        for worker in self.workers:
            try:
                worker.process.wait(5)
            except subprocess.TimeoutExpired:
                worker.process.kill()
        self.workers.clear()
        self.reap()
        shutil.rmtree(self.settings["folder"], ignore_errors=True)


def check_request(message: dict) -> None:
    """ValueError, TypeError or KeyError for what no client of ours sends."""
    code = [message["code"]] if message["kind"] == "run" else message["code"]
    strings = [*code, message["stdin"]]
    if message["kind"] not in ("run", "check") or not all(isinstance(s, str) for s in strings):
        raise ValueError("not a call")
    if not (type(message["id"]) is int and 0 < float(message["seconds"]) < 1e6):
        raise ValueError("not a call")
    message["urgent"] = bool(message["urgent"])


def spawn(command: list[str], *sockets: socket.socket) -> subprocess.Popen:
    """Starts a process of ours by exec (a fork of a process with threads may hang), with a clean
    environment: it shows up in /proc. Cheap forks want huge pages, so malloc for everything."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONMALLOC": "malloc",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **{k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},  # may find libpython
        **threads,
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        pass_fds=[s.fileno() for s in sockets],
        start_new_session=True,
    )
    for s in sockets:
        s.close()
    return process


# ---- the client: what a trainer holds ----


class SandboxClient:
    """A connection to a pool of this machine. Any thread may use it, one at a time."""

    def __init__(self, address: str, secret: str):
        self.address, self.secret = address, secret
        self.connect(socket.socket(socket.AF_UNIX))
        self.sock.connect(address)
        self.send({"secret": secret})

    def connect(self, sock: socket.socket) -> None:
        self.sock, self.inbox = sock, bytearray()
        self.num_submitted = 0
        self.unanswered: set[int] = set()
        self.answered: dict[int, ToolResult] = {}
        self.news: list[int] = []  # answered, not yet told by ready()
        self.known_layers: dict | None = None
        self.ended = False

    def submit(self, code: str, stdin: str = "", seconds: float = 4.0, urgent: bool = False) -> int:
        """Hands in a program; returns its handle at once."""
        return self.call("run", code, stdin, seconds, urgent)

    def submit_check(
        self, answer: str, gold: str, seconds: float = 4.0, urgent: bool = True
    ) -> int:
        """Hands in an answer check (`reward.is_equivalent`); stdout of its result is "1" or "0"."""
        return self.call("check", [answer, gold], "", seconds, urgent)

    def call(self, kind: str, code, stdin: str, seconds: float, urgent: bool) -> int:
        handle = self.num_submitted
        request = {"id": handle, "kind": kind, "code": code, "stdin": stdin}
        request |= {"seconds": seconds, "urgent": urgent}
        check_request(request)
        self.send(request)
        self.num_submitted += 1
        self.unanswered.add(handle)
        return handle

    def ready(self) -> list[int]:
        """Handles that got their answer since the last look, without waiting."""
        self.receive(0)
        news, self.news = [h for h in self.news if h in self.answered], []
        return news

    def result(self, handle: int, timeout: float | None = None) -> ToolResult:
        """Waits for an answer and hands it over, once."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while handle not in self.answered:
            if handle not in self.unanswered:
                raise KeyError(f"no call {handle}, or its result was taken already")
            if not self.receive(max(0.0, deadline - time.monotonic())) and (
                time.monotonic() >= deadline
            ):
                raise TimeoutError(f"call {handle} has no answer yet")
        return self.answered.pop(handle)

    def pending(self) -> int:
        return len(self.unanswered)

    def fileno(self) -> int:
        """For select: readable when an answer comes (after ready() took those that were there)."""
        return self.sock.fileno()

    def layers(self) -> dict[str, tuple[bool, str]]:
        """{guarantee: (on, by what or why not)}; waits until the first worker is up."""
        if not self.known_layers:
            self.send({"layers": True})
        while not self.known_layers:
            if self.ended:
                raise RuntimeError("the sandbox's pool has ended, see its message above")
            self.receive(math.inf)
        return self.known_layers

    def send(self, message: dict) -> None:
        if not self.ended:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                return self.sock.sendall(pack(message))
        self.end()
        raise RuntimeError("the sandbox's pool has ended, see its message above")

    def receive(self, timeout: float) -> bool:
        """Takes in what the pool sent; False if nothing came in time."""
        if self.ended:
            return False
        wait = select.poll()
        wait.register(self.sock, select.POLLIN)
        if not wait.poll(None if timeout == math.inf else timeout * 1000):
            return False
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self.end()
        self.inbox += data
        for message in unpack(self.inbox):
            if "layers" in message:
                self.known_layers = {k: (v[0], v[1]) for k, v in message["layers"].items()}
            else:
                self.take(message.pop("id"), ToolResult(**message))
        return True

    def take(self, handle: int, result: ToolResult) -> None:
        self.unanswered.remove(handle)
        self.answered[handle] = result
        self.news.append(handle)

    def end(self) -> None:
        """The pool is gone: what it had not answered is lost, and says so."""
        self.ended = True
        for handle in sorted(self.unanswered):
            self.take(handle, ToolResult("lost", "", "", 0.0, 0.0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.ended = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Sandbox(SandboxClient):
    """A pool and a first client of it. The pool ends with the process that made it."""

    def __init__(
        self,
        workers: int | None = None,  # calls that run at once; default: one per core
        preload: tuple[str, ...] = ("numpy", "sympy"),
        require: tuple[str, ...] = (),  # guarantees without which to raise
        memory: int = 1 << 30,  # bytes of address space of a call
        disk: int = 64 << 20,  # bytes in its private directory
        files: int = 1000,  # files there
        output: int = 1 << 16,  # bytes kept of stdout and of stderr; 256 times as much ends it
        off: tuple[str, ...] = (),  # mechanisms to leave out: tests and benchmarks only
    ):
        for name, known in [(n, GUARANTEES) for n in require] + [(n, MECHANISMS) for n in off]:
            if name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}")
        place = tempfile.gettempdir()  # a socket's address has room for 107 bytes
        folder = tempfile.mkdtemp(prefix="sandbox-", dir=place if len(place) < 80 else "/tmp")
        self.folder, self.address = folder, os.path.join(folder, "socket")
        self.secret = secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(128)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", os.path.abspath(__file__), "--pool"]
        command += [str(theirs.fileno()), str(listener.fileno())]
        self.process = spawn(command, theirs, listener)
        self.connect(ours)
        packages = [p for p in sys.path if os.path.basename(p).endswith("-packages")]
        self.send(
            dict(
                folder=folder, secret=self.secret, workers=workers or NUM_CORES, path=packages,
                preload=preload, memory=memory, disk=disk, files=files, output=output, off=off,
            )
        )  # fmt: skip
        missing = {n: self.layers()[n][1] for n in require if not self.layers()[n][0]}
        if missing:
            self.close()
            raise RuntimeError(f"the sandbox cannot guarantee {missing} here; see --check")

    def close(self) -> None:
        super().close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- processes ----


def run_pool(owner: socket.socket, listener: socket.socket) -> None:
    pool = Pool(read_message(owner.fileno()), listener, owner)
    try:
        pool.run()
    finally:
        pool.close()


def run_zygote(sock: socket.socket) -> None:
    settings = read_message(sock.fileno())
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p != own_folder]
    sys.path += [p for p in settings["path"] if p not in sys.path]
    Zygote(settings, sock).run()


def check() -> int:
    """Prints the layers and runs the hostile suite here; 1 if a layer that is on let one pass."""
    with Sandbox() as box:
        for name, (on, reason) in box.layers().items():
            print(f"{name:10} {'on ' if on else 'OFF'}  {reason}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The sandbox's layers on this machine.")
    parser.add_argument("--check", action="store_true", help="print layers, run the hostile suite")
    parser.add_argument("--pool", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--zygote", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pool:
        return run_pool(*(socket.socket(fileno=number) for number in options.pool))
    if options.zygote:
        return run_zygote(socket.socket(fileno=options.zygote))
    return check() if options.check else parser.print_help()


if __name__ == "__main__":
    sys.exit(main())
