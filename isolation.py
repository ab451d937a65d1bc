"""Isolation: each call runs in a fork of a worker, locked down before it runs its code.

A zygote is an interpreter with nothing, with numpy, or with everything and the answer checker
imported. It forks a child for a call and watches the process to its end. A fork takes 1 to 3 ms
where starting an interpreter with sympy takes 400; a call's memory dies with its child. Status and
seconds are the zygote's: a child can misreport its own text and exit code, no more.

A fork is paid for by the page: 1.5 us for each one that the child then writes to, if only to count
a reference. Hence frozen objects, huge pages, C calls prepared before the fork, programs run once
beforehand, and numpy.random (75 more mappings) only in the zygote that has everything.

A guarantee is made of mechanisms of the kernel, reached with ctypes alone and without root. Each is
tried in a throw-away fork, because whether it works depends on kernel, container and user:

    network    seccomp refuses sockets and io_uring; an empty network namespace where allowed
    files      Landlock, else a read-only view: the interpreter's folders, one private directory;
               seccomp refuses to change files that one owns (chmod, utime, ...)
    signals    seccomp: kill only oneself; a PID namespace a call
    memory     RLIMIT_AS, with fork refused
    time       the zygote reads the child's CPU clock; RLIMIT_CPU behind it
    processes  seccomp: only threads may be cloned
    disk       a tmpfs of fixed size; elsewhere only RLIMIT_FSIZE, which is per file
    leftovers  no fork; a PID namespace; what still gets away is killed by the zygote

Root in a container without CAP_SYS_ADMIN has all but `disk`; an ordinary user has all where user
namespaces are allowed. Not here: cgroups (rarely writable), other uids (cannot read an interpreter
in /root). Outside Linux there is nothing but resource limits and wall time. This is a file of its
own because sandbox.py starts it by exec, and every fork pays for what is imported here.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import linecache
import math
import os
import random
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

LINUX = sys.platform == "linux"
HERE = os.path.abspath(__file__)
NUM_CORES = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
PROGRAM = "<tool>"  # file name of a call's code in its tracebacks
OUT_OF_MEMORY = 77  # exit status by which a child reports a MemoryError
MAX_OUTPUT = 16 << 20  # bytes to stdout or stderr, then the call ends
POOL = 3  # a socket: what is our stdin at the start
TICK = 0.05  # seconds between two looks at a running child
COMMON = "collections decimal fractions functools re string typing"  # for all zygotes
WARM_UP = {  # module: what is run in the zygote, so that a child finds first uses done
    "math": "import math\nprint(1 + 1)\nmath.pi",
    "numpy": "import numpy as np\nprint(np.arange(4.0).reshape(2, 2) @ np.ones(2), np.sum([1]))",
    "sympy": """from sympy import *
x, y = symbols("x y")
print(solve(x**2 - x - 6, x), solve([x + y - 3, x - y], [x, y]), simplify((x**2 - 1) / (x - 1)))
print(factorint(1000003 * 998244353), expand((x + 1)**3), integrate(x**2, x), sqrt(8).n())""",
    "reward": """import reward
reward.is_equivalent("x^2 - 1", "(x - 1)(x + 1)"), reward.is_equivalent("1/2", "0.5")""",
}


# ---- messages: 4 bytes of length, then JSON ----


def pack(message: dict) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


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


# ---- what a Linux process can be forbidden ----

LIBC = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the interpreter's lock, also in a fork
NEW_MOUNT, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PDEATHSIG, SET_SECCOMP, SET_SUBREAPER, NO_NEW_PRIVS = 1, 22, 36, 38  # for prctl
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH, NO_RANDOMIZE, MADV_COLLAPSE = 2, 0x40000, 25

# System calls: name, number on x86_64, on aarch64 (- where it has none). Refused, but for the last
# seven, which have rules. Besides the obvious: memory outside RLIMIT_AS (memfd, shm), watching
# files, changing files that one owns, which Landlock does not know (chmod, utime, xattr). What
# needs a capability (mount, chroot, ...) is refused already: none is left.
SYSTEM_CALLS = """
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, connect 42 203, bind 49 200,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, tkill 200 130,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30,
unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
keyctl 250 219, add_key 248 217, request_key 249 218, memfd_create 319 279, shmget 29 194,
semget 64 190, msgget 68 186, mq_open 240 180, mq_unlink 241 181, chmod 90 -, fchmod 91 52,
fchmodat 268 53, chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, truncate 76 45, sync 162 81,
syncfs 306 267, personality 135 92, inotify_init 253 -, inotify_init1 294 26, fanotify_init 300 262,
clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, sched_setaffinity 203 122,
socketpair 53 199, prctl 157 167
"""
ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # (audit number, column)
# From 424 on numbers are the same everywhere and nearly all are ways out (io_uring, pidfd, mount
# calls): "no such call", as an old kernel says; but close_range, openat2, faccessat2, epoll_pwait2.
FIRST_COMMON, COMMON_KNOWN = 424, (436, 437, 439, 441)
SELF = struct.pack("<I", 0x7FFFFFFF)  # stands for the process's own id in a filter


def prepare(name: str, *args) -> tuple:
    """A call of a C function for `make`: what is looked up and converted before a fork, a child
    need not pay for."""
    return name, getattr(LIBC, name), [ctypes.c_long(a) if isinstance(a, int) else a for a in args]


def make(*calls: tuple) -> int:
    """Makes calls in order. -1 becomes an OSError that names the function."""
    result = 0
    for name, function, args in calls:
        if (result := function(*args)) == -1:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def libc(name: str, *args) -> int:
    return make(prepare(name, *args))


def seccomp_program() -> ctypes.Array:
    """The filter, classic BPF over struct seccomp_data: number at 0, architecture at 4, arguments
    of 8 bytes from 16 on. An instruction is (code, jump if true, jump if false, value)."""
    if os.uname().machine not in ARCHITECTURES:
        raise OSError(f"system call numbers of {os.uname().machine} are not known")
    audit, column = ARCHITECTURES[os.uname().machine]
    give = lambda verdict: [(0x06, 0, 0, verdict)]
    allow, refuse, unknown, kill = map(give, (0x7FFF0000, 0x50001, 0x50026, 0x80000000))
    load = lambda at: (0x20, 0, 0, at)
    equal = lambda value, yes, no: (0x15, yes, no, value)
    to_self = [load(16), equal(0x7FFFFFFF, 1, 0), equal(0, 0, 1), *allow, *refuse]
    rules = dict.fromkeys(("kill", "tgkill", "prlimit64", "sched_setaffinity"), to_self)
    rules["clone"] = [load(16), (0x45, 0, 1, 0x10000), *allow, *refuse]  # threads only
    # streams only: asyncio wants one, a datagram socket could send to any path
    rules["socketpair"] = [load(24), (0x54, 0, 0, 0xF), equal(1, 0, 1), *allow, *refuse]
    rules["prctl"] = [load(16), equal(PDEATHSIG, 0, 1), *refuse, *allow]
    calls = [row.split() for row in SYSTEM_CALLS.split(",")]
    known = {int(row[column]): rules.get(row[0], refuse) for row in calls if row[column] != "-"}
    known |= dict.fromkeys(COMMON_KNOWN, allow)
    ranges = {n + 1: unknown if n > FIRST_COMMON else allow for n in known}
    ranges = {0: allow, FIRST_COMMON: unknown, **ranges, **known}  # first number: what to do

    def search(ranges):  # by halves: the kernel tries a new filter on every number
        if len(ranges) == 1:
            return ranges[0][1]
        middle = len(ranges) // 2
        low, high = search(ranges[:middle]), search(ranges[middle:])
        return [(0x35, len(low), 0, ranges[middle][0]), *low, *high]

    code = [load(4), equal(audit, 1, 0), *kill, load(0), *search(sorted(ranges.items()))]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
    return ctypes.create_string_buffer(code, len(code))


def apply_seccomp(program: ctypes.Array) -> tuple:
    """Its header has only the address of the program, which as an argument lives on."""
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    return prepare("prctl", SET_SECCOMP, 2, header, 0, program)


def readable_paths() -> list[str]:
    """What Python and its libraries read: their folders, the loader's, time zones, /dev/null."""
    system = """/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache /etc/localtime
        /usr/share/zoneinfo /dev/null /dev/zero /dev/urandom /dev/random"""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *system.split()]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [p for p in dict.fromkeys(folders) if p[:1] == "/" != p and os.path.exists(p)]


def landlock_ruleset(home: str) -> int:
    """A ruleset (a descriptor): reads of `readable_paths`, anything under `home`, nothing else.

    Versions add truncate (3), TCP (4), device ioctl (5), signals and abstract sockets (6)."""
    version = libc("syscall", 444, None, 0, 1)
    every = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    attributes = struct.pack("<QQQ", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc("syscall", 444, attributes, len(attributes), 0)
    write_file, read_file, read_folder = 2, 4, 8
    rights = dict.fromkeys(readable_paths(), read_file | read_folder)
    for path, allowed in {**rights, "/dev/null": read_file | write_file, home: every}.items():
        descriptor = os.open(path, os.O_PATH)
        allowed &= every if os.path.isdir(path) else ~read_folder
        libc("syscall", 445, ruleset, 1, struct.pack("<Qi", allowed, descriptor), 0)
        os.close(descriptor)
    return ruleset


def drop_capabilities() -> tuple:
    return prepare("capset", struct.pack("<II", 0x20080522, 0), bytes(24))


def limit(name: str, value: int) -> tuple:
    """Soft = hard: raising it again takes a capability."""
    number = getattr(resource, f"RLIMIT_{name}")
    return prepare("setrlimit", number, struct.pack("QQ", *[value % (1 << 64)] * 2))


def enter_namespaces(flags: int) -> None:
    """CAP_SYS_ADMIN needs no user namespace; anybody else gets one that maps him to himself."""
    user, group = os.getuid(), os.getgid()
    try:
        libc("unshare", flags)
    except PermissionError:
        libc("unshare", flags | NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if flags & NEW_MOUNT:
        libc("mount", None, b"/", None, REC | PRIVATE, None)


def mount_tmpfs(path: str, size: int, files: int) -> None:
    options = f"size={size},nr_inodes={files},mode=700".encode()
    libc("mount", b"tmpfs", os.fsencode(path), b"tmpfs", NOSUID | NODEV | NOEXEC, options)


def build_view(root: str, home: str) -> None:
    """Where there is no Landlock: under `root` a tree of read-only mounts to chroot into."""
    os.makedirs(root)
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
        libc("mount", os.fsencode(path), os.fsencode(inside), None, BIND | REC, None)
        kept = os.statvfs(path).f_flag & (NOSUID | NODEV | NOEXEC)  # locked in a user namespace
        libc("mount", None, os.fsencode(inside), None, REMOUNT | BIND | RDONLY | kept, None)
    libc("mount", None, os.fsencode(root), None, REMOUNT | BIND | RDONLY, None)


def probe(folder: str, off: list[str]) -> dict[str, str]:
    """{mechanism: "" if it works here, else why it does not}. `folder` is an empty directory."""
    trials = {
        "limits": lambda: None,
        "seccomp": lambda: make(apply_seccomp(seccomp_program())),
        "landlock": lambda: libc("syscall", 446, landlock_ruleset(folder), 0),
        "pid": lambda: enter_namespaces(NEW_PID),
        "net": lambda: enter_namespaces(NEW_NET),
        "mount": lambda: (enter_namespaces(NEW_MOUNT), mount_tmpfs(folder, 4096, 9)),
        "capabilities": lambda: make(drop_capabilities()),
    }
    if LINUX:
        libc("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)  # Landlock and seccomp want it; it is inherited
    why = dict.fromkeys(off, "switched off")
    for name in trials.keys() - why.keys():
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                trials[name]()
            except Exception as error:
                os.write(writer, f"{error} ({sys.platform})".encode()[:500])
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        with open(reader) as answer:
            why[name] = answer.read()
    return why


# ---- the child: one call ----


def run_call(call: dict) -> int:
    """Runs a program to an interpreter's ordinary end, or a check; returns the exit status."""
    reward = sys.modules.pop("reward", None)  # no business of a tool call
    if call["kind"] == "check":
        print(int(reward.is_equivalent(*call["code"])), end="", flush=True)
        return 0
    (source,) = call["code"]
    main = sys.modules["__main__"] = type(sys)("__main__")
    lines = io.StringIO(source, None).readlines()  # as Python counts them, unlike splitlines
    linecache.cache[PROGRAM] = (len(source), None, lines, PROGRAM)
    status, stdout = 0, sys.stdout
    run = lambda: execute(source, main.__dict__)
    flush = lambda: stdout.closed or stdout.flush()
    for step in (run, threading._shutdown, atexit._run_exitfuncs, flush):  # _shutdown: joins
        try:
            step()
        except BaseException as error:
            status = show_error(error, main.__dict__) or status
    return status


def execute(source: str, names: dict) -> None:
    """exec, but the value of a last expression is shown, as a notebook does."""
    tree = compile(source, PROGRAM, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):  # becomes an assignment
        place = dict(lineno=last.lineno, col_offset=last.col_offset)
        target = ast.Name("<value>", ast.Store(), **place)  # no program has such a name
        tree.body[-1] = ast.Assign([target], last.value, **place)
    exec(compile(tree, PROGRAM, "exec", dont_inherit=True), names)
    if (value := names.pop("<value>", None)) is not None:
        print(repr(value))


def show_error(error: BaseException, names: dict) -> int:
    """Prints what the program should know of its error; returns the exit status."""
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        return (error.code or 0) & 0xFF
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)
        names.clear()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        text = f"{error.code}\n" if isinstance(error, SystemExit) else own_lines(error)
    except Exception:  # it cannot be shown, there is no memory, ...
        text = f"{type(error).__name__}\n"
    with open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stderr:
        stderr.write(text)
    return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1


def own_lines(error: BaseException) -> str:
    """A traceback of the program's own lines, without folders of ours."""
    trace = traceback.TracebackException.from_exception(error)
    parts = [trace]
    for part in parts:  # and those that it is linked to
        frames = [frame for frame in part.stack or () if frame.filename == PROGRAM]
        part.stack = traceback.StackSummary.from_list(frames) if frames else None
        inner = getattr(part, "exceptions", None) or ()  # of an ExceptionGroup
        parts += filter(None, (part.__cause__, part.__context__, *inner))
    text = "".join(trace.format())
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(folder + "/", "")
    return text


# ---- the zygote: forks a child for each call, watches it ----


class Zygote:
    """A worker. `why` says for each mechanism why it is off here; it is `on` if that is empty."""

    def __init__(self, settings: dict):
        """Sets up what all children share: namespaces, the place of the private directory.

        subtle: the worker first moves into a PID namespace of its own. From there it may come back
        from the one it makes for each call, also where only a user namespace gives it rights."""
        self.settings, self.view, self.ruleset, self.namespaces = settings, None, None, []
        self.folder = os.path.join(settings["folder"], f"w{settings['number']}")
        self.home = self.private = os.path.join(self.folder, "home")  # to the child, to us
        os.makedirs(self.folder, exist_ok=True)
        self.why = probe(self.folder, settings["off"])
        self.on = {name: not why for name, why in self.why.items()}
        self.filter = seccomp_program() if self.on["seccomp"] else ctypes.create_string_buffer(0)
        if LINUX:
            libc("prctl", SET_SUBREAPER, 1, 0, 0, 0)
            with contextlib.suppress(OSError):  # children are the first to go when memory is short
                Path("/proc/self/oom_score_adj").write_text("1000")
        if self.on["pid"]:
            enter_namespaces(NEW_PID)
            if (pid := os.fork()) != 0:
                os.close(POOL)
                os.waitpid(pid, 0)
                if os.getppid() != self.settings["pool"]:  # it was killed and cannot tidy up
                    os.execvp("rm", ["rm", "-rf", self.settings["folder"]])  # a fork would fail
                os._exit(0)
            libc("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            ours = os.open("/proc/self/ns/pid", os.O_RDONLY)
            self.namespaces = [prepare("unshare", NEW_PID), prepare("setns", ours, NEW_PID)]
        if flags := NEW_NET * self.on["net"] | NEW_MOUNT * self.on["mount"]:
            enter_namespaces(flags)
        if self.on["mount"]:
            reads = readable_paths()
            free = lambda p: os.path.isdir(p) and not any(r.startswith(p) for r in reads)
            self.home = self.private = next(filter(free, ("/tmp", "/mnt", "/srv")), self.home)
            os.makedirs(self.home, exist_ok=True)
            if not self.on["landlock"]:
                self.view = os.path.join(self.folder, "view")
                build_view(self.view, self.home)
                self.private = self.view + self.home
        self.renew()

    def renew(self) -> None:
        """An empty private directory. A Landlock rule is about an inode, so it is new as well."""
        if self.on["mount"]:
            if os.path.ismount(self.private):
                libc("umount2", os.fsencode(self.private), MNT_DETACH)
            mount_tmpfs(self.private, self.settings["disk"], self.settings["files"])
        else:
            remove(self.private)
            os.mkdir(self.private, 0o700)
        if self.ruleset:
            os.close(self.ruleset)
        self.ruleset = landlock_ruleset(self.private) if self.on["landlock"] else None
        self.locks = list(self.lock_down())

    def lock_down(self):
        """All that a child gives up, in the order in which it still can, as calls for `make`."""
        disk, memory = self.settings["disk"], self.settings["memory"]
        memory = memory if LINUX else resource.RLIM_INFINITY  # macOS refuses less
        if LINUX:
            yield prepare("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if self.view:
            yield prepare("chroot", os.fsencode(self.view))
        yield prepare("chdir", os.fsencode(self.home))
        if self.on["landlock"]:
            yield prepare("syscall", 446, self.ruleset, 0)
        yield prepare("setsid")
        if self.on["limits"]:
            for name, value in dict(NOFILE=64, CORE=0, FSIZE=disk, AS=memory).items():
                yield limit(name, value)
        if self.on["capabilities"]:
            yield drop_capabilities()
        if self.on["seccomp"]:
            yield apply_seccomp(self.filter)

    def run(self) -> None:
        """Says how it is here, then answers calls until the pool ends."""
        warm_up(self.home)
        message = {"why": self.why}
        with contextlib.suppress(ConnectionError), open(POOL, "wb") as pool:
            while True:
                pool.write(pack(message))
                pool.flush()
                message = None  # nothing of it for the next child
                if (call := read_message(POOL)) is None:
                    break
                files = [self.new_file(name) for name in ("stdin", "stdout", "stderr")]
                message = self.serve(call, files)
                for file in files:
                    os.close(file)
                if os.listdir(self.private):
                    self.renew()

    def new_file(self, name: str) -> int:
        """A file, because a child fills it without anybody reading at the other end."""
        if LINUX:
            return os.memfd_create("")
        return os.open(os.path.join(self.folder, name), os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def fork(self, call: dict, files: list[int]) -> int:
        """Starts the child of a call; returns its process id.

        subtle: by the C library. os.fork would make the child run what modules registered (random,
        logging, threading): of no use where there is one thread, and 170 pages."""
        locks = [*self.locks, limit("CPU", math.ceil(call["seconds"]) + 1)]
        make(*self.namespaces[:1])
        if (pid := libc("fork")) == 0:
            status = 1
            try:
                for number, file in enumerate(files):
                    os.dup2(file, number)
                self.filter.raw = self.filter.raw.replace(SELF, struct.pack("<I", os.getpid()))
                make(*locks)
                os.closerange(len(files), 1 << 16)
                status = run_call(call)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        make(*self.namespaces[1:])
        return pid

    def serve(self, call: dict, files: list[int]) -> dict:
        """Runs a call in a child and watches the process to its end."""
        os.pwrite(files[0], call["stdin"].encode("utf-8", "replace"), 0)
        seconds, cause, poll = call["seconds"], "", select.poll()
        cpu = asleep = looked_cpu = 0.0
        start = looked = time.monotonic()
        pid = self.fork(call, files)
        pidfd = os.pidfd_open(pid) if LINUX else os.dup(POOL)
        poll.register(POOL, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while not cause:
            wait = min(TICK, max((seconds - cpu) / NUM_CORES, 0.002)) if LINUX else 0.002
            ready = poll.poll(wait * 1000)
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            now = time.monotonic()
            cpu = time.clock_gettime((~pid << 3) | 2) if LINUX else 0.0  # of all its threads
            if now - looked >= TICK:
                if is_asleep(pidfd):
                    asleep += max(0.0, min(now - looked, 2 * TICK) - (cpu - looked_cpu))
                looked, looked_cpu = now, cpu
            if max(cpu, asleep, (now - start - 5) / 10) >= seconds:
                cause = "timeout"
            elif max(map(size_of, files[1:])) > MAX_OUTPUT:
                cause = "output"
            elif POOL in dict(ready):
                cause = "lost"  # the pool has ended
        else:
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        os.close(pidfd)
        if not (self.on["pid"] or self.on["seccomp"]):
            end_children()
        wall, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)  # negative: a signal
        if code and not cause and not size_of(files[2]):
            why = f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
            os.pwrite(files[2], why.encode(), 0)
        cause = cause or verdict(code, cpu >= seconds, *map(size_of, files[1:]))
        stdout, stderr = (cut(file, self.settings["output"]) for file in files[1:])
        answer = dict(id=call["id"], status=cause, stdout=stdout, stderr=stderr)
        return answer | dict(wall_seconds=wall, cpu_seconds=cpu)


def verdict(code: int, late: bool, stdout: int, stderr: int) -> str:
    """Status of a call that ended by itself; stdout, stderr: their sizes."""
    if late or code == -signal.SIGXCPU:
        return "timeout"
    if max(stdout, stderr) > MAX_OUTPUT:
        return "output"
    if code in (OUT_OF_MEMORY, -signal.SIGKILL):  # killed, but not by us: no memory left
        return "memory"
    return "error" if code else "ok" if stdout else "empty"


def size_of(file: int) -> int:
    return os.fstat(file).st_size


def cut(file: int, limit: int) -> str:
    """Its text; of one that is too long head and tail, with a marker between."""
    text = os.pread(file, limit, 0)
    if (more := size_of(file) - limit) > 0:
        marker = f"\n... {more} bytes left out ...\n".encode()
        tail = os.pread(file, limit // 2, limit + more - limit // 2)
        text = text[: limit - limit // 2] + marker + tail
    return text.decode("utf-8", "replace")


def is_asleep(pidfd: int) -> bool:
    """Whether no thread of a process runs, waits for a core or for a disk. The number by which
    /proc knows it comes from the descriptor: the zygote may live in a PID namespace."""
    try:
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text().split()
        tasks = Path("/proc", info[info.index("Pid:") + 1], "task")
        states = [p.read_text().rpartition(")")[2].split()[0] for p in tasks.glob("*/stat")]
    except (OSError, ValueError):
        return True  # no /proc: time is wall time
    return not any(state in "RD" for state in states)


def end_children(spare: list[int] = ()) -> None:
    """Kills and reaps what became a child of this process when its parent died."""
    with contextlib.suppress(OSError):
        found = Path("/proc/thread-self/children")
        while orphans := set(map(int, found.read_text().split())) - set(spare):
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def remove(path: str) -> None:
    """By rm: a hostile tree may be deeper than Python recurses."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if os.path.exists(path):
            os.waitpid(os.posix_spawnp(command[0], [*command, path], {}), 0)


def warm_up(home: str) -> None:
    """Makes what every child then has for nothing: the state of a fresh interpreter, first uses."""
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", LANG="C.UTF-8", HOME=home, TMPDIR=home)
    sys.argv[:], sys.path[:0] = [""], [""]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", closefd=False)  # lines: kept at time-out
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    warnings.formatwarning = lambda message, kind, *_: f"{kind.__name__}: {message}\n"
    threading.excepthook = lambda args: show_error(args.exc_value, {})
    for name in ["math"] * 20 + [*WARM_UP]:
        if name in sys.modules:
            execute(WARM_UP[name], {})
    sys.stdout.flush()
    random.seed(0)
    if "sympy" in sys.modules:
        sys.modules["sympy"].core.random.seed(0)
    if "numpy" in sys.modules and "reward" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(OSError):  # into huge pages: for a fork one entry, not 512
        for row in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *_, inode, name = f"{row} [heap]".split()[:6]
            if (rights, inode, name) == ("rw-p", "0", "[heap]"):  # or without name
                start, end = (int(part, 16) for part in place.split("-"))
                LIBC.madvise(*map(ctypes.c_size_t, (start, end - start)), MADV_COLLAPSE)


def main() -> None:
    """Serves the pool; its first message has the settings."""
    os.dup2(0, POOL)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # sys.stdin is made of what it will be like: a file
    settings = read_message(POOL)
    gc.disable()
    ours = sys.path.pop(0)
    sys.path += [*(p for p in settings["path"] if p not in sys.path), ours]
    for name in [*COMMON.split(), *settings["imports"]]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.path.pop()
    Zygote(settings).run()


if __name__ == "__main__":
    main()
