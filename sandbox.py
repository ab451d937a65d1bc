"""Sandbox: a pool of isolated Python workers that runs whatever a policy writes.

    trainer, ranks      SandboxClient: submit, ready, result; no call blocks another
      | unix socket     0700 directory, same user, the job's secret; length + JSON, no pickle
    pool, one process   a queue, answer checks first; replaces dead zygotes and retries their call
      | socket pair
    zygote, one a core  exec'd, numpy, sympy and reward imported; forks a child ahead of its call
      | three files     unnamed, in memory: stdin holds the call, stdout and stderr its output
    child, one a call   locked down (isolation.py) before it reads its code; ends with it

Forking a loaded interpreter takes 2 ms where starting one with sympy takes 500. Nothing outlives a
call: its memory dies with the child, its files with their directory. `layers()` says which
guarantees hold on this machine and why others do not; `require=("network", ...)` insists on some.
Outside Linux a call is a plain child process, and the pool says so on stderr.

`seconds` limits CPU time, which a loaded machine does not change; a child that sleeps is ended
after as long asleep (waiting for a core is not sleep). The clock starts when the child gets its
code. Status and seconds are the parent's: a child can misreport its own text and exit code only.

    python sandbox.py --check      this machine's layers, and the hostile suite against them
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import gc
import importlib.util
import itertools
import json
import linecache
import math
import os
import random
import resource
import secrets
import select
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
from dataclasses import asdict, dataclass
from pathlib import Path

import isolation
from isolation import libc

LINUX = sys.platform == "linux"
HERE = os.path.abspath(__file__)
NUM_CORES = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
PROGRAM = "<tool>"  # file name of a call's code in its tracebacks
OUT_OF_MEMORY = 77  # exit status by which a child reports a MemoryError
MAX_MESSAGE, MAX_UNREAD, MAX_OUTPUT = 64 << 20, 256 << 20, 16 << 20  # bytes
ENVIRONMENT = """PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUTF8=1 PYTHONHASHSEED=0
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
    PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1"""
TICK = 0.05  # seconds between two looks at a running child


@dataclass(frozen=True)
class ToolResult:
    """status: ok, empty (ran, printed nothing), error, timeout, memory, output (printed too
    much), lost (its worker died twice: our fault, not the policy's)."""

    status: str
    stdout: str = ""
    stderr: str = ""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


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


def check_request(message: dict) -> dict:
    """Raises TypeError, ValueError or KeyError for anything but a call."""
    if not all(isinstance(text, str) for text in [*message["code"], message["stdin"]]):
        raise TypeError("a call is made of texts: code and stdin, or answer and gold")
    if not 0 < message["seconds"] < 1e6:
        raise ValueError(f"seconds must be positive, got {message['seconds']}")
    return message


# ---- the child: one call ----


def child_main() -> int:
    """Descriptor 3 ends when descriptor 0 holds a call, and after it the program's stdin."""
    os.read(3, 1)
    os.close(3)
    if (call := read_message(0)) is None:
        return 1  # the pool ends
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(call["seconds"]) + 1,) * 2)
    reward = sys.modules.pop("reward", None)  # no business of a tool call
    if call["kind"] == "check":
        print(int(reward.is_equivalent(*call["code"])), end="", flush=True)
        return 0
    return run_program(*call["code"])


def run_program(source: str) -> int:
    """Runs a script to an interpreter's ordinary end; returns the exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache[PROGRAM] = (len(source), None, source.splitlines(True), PROGRAM)
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
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    code = compile(tree, PROGRAM, "exec", dont_inherit=True)
    exec(code, names)
    if last:
        future = code.co_flags & 0x1FF0000  # from __future__ import annotations, ...
        last = compile(ast.Expression(last.value), PROGRAM, "eval", future, dont_inherit=True)
        if (value := eval(last, names)) is not None:
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


# ---- the zygote: forks children, watches one at a time ----


@dataclass
class Child:
    pid: int
    wake: int  # a pipe's end: closing it starts the call; -1: closed
    files: list[int]  # its stdin, stdout, stderr
    pidfd: int


class Zygote:
    """A worker. `why` says for each mechanism why it is off here; it is `on` if that is empty."""

    def __init__(self, settings: dict, pool: socket.socket):
        self.settings, self.pool = settings, pool
        self.view = self.ruleset = self.own_pid_namespace = None
        self.folder = os.path.join(settings["folder"], f"w{settings['index']}")
        self.home = self.private = os.path.join(self.folder, "home")  # to the child, to us
        os.makedirs(self.folder, exist_ok=True)
        self.why = isolation.probe(self.folder, settings["off"])
        self.on = {name: not why for name, why in self.why.items()}
        self.filter = isolation.seccomp_program() if self.on["seccomp"] else b""
        self.prepare()

    def prepare(self) -> None:
        """What all children share: namespaces, the place of the private directory.

        subtle: the worker first moves into a PID namespace of its own. From there it may come back
        from the one it makes for each call, also where only a user namespace gives it rights."""
        if LINUX:
            libc("prctl", isolation.SET_SUBREAPER, 1, 0, 0, 0)
        if self.on["pid"]:
            isolation.enter_namespaces(isolation.NEW_PID)
            if (pid := os.fork()) != 0:
                self.pool.close()
                os.waitpid(pid, 0)
                if os.getppid() != self.settings["pool"]:  # it was killed and cannot tidy up
                    shutil.rmtree(self.settings["folder"], ignore_errors=True)
                os._exit(0)
            libc("prctl", isolation.PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if flags := isolation.NEW_NET * self.on["net"] | isolation.NEW_MOUNT * self.on["mount"]:
            isolation.enter_namespaces(flags)
        if self.on["mount"]:
            reads = isolation.readable_paths()
            free = lambda p: os.path.isdir(p) and not any(r.startswith(p) for r in reads)
            place = next(filter(free, ("/tmp", "/mnt", "/srv")), self.home)
            os.makedirs(place, exist_ok=True)
            self.home = self.private = place
            if not self.on["landlock"]:
                self.view = os.path.join(self.folder, "view")
                isolation.build_view(self.view, self.home)
                self.private = self.view + self.home
        self.renew()

    def renew(self) -> None:
        """An empty private directory. A Landlock rule is about an inode, so it is new as well."""
        if self.on["mount"]:
            if os.path.ismount(self.private):
                libc("umount2", os.fsencode(self.private), isolation.MNT_DETACH)
            isolation.mount_tmpfs(self.private, self.settings["disk"], self.settings["files"])
        else:  # rm: a hostile tree may be deeper than Python recurses
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, self.private], stderr=subprocess.DEVNULL)
            os.mkdir(self.private, 0o700)
        if self.on["landlock"]:
            if self.ruleset:
                os.close(self.ruleset)
            self.ruleset = isolation.landlock_ruleset(self.private)

    def run(self) -> None:
        preload(self.settings["preload"], self.home)
        child, message = self.fork_ahead(), {"layers": isolation.guarantees(self.why)}
        while True:
            with contextlib.suppress(BrokenPipeError):
                self.pool.sendall(pack(message))
            if (call := read_message(self.pool.fileno())) is None:
                break
            if os.waitpid(child.pid, os.WNOHANG)[0]:  # killed while it waited
                self.clean(child)
                child = self.fork_ahead()
            message = asdict(self.serve(child, call))
            self.clean(child)
            child = self.fork_ahead()
        os.kill(child.pid, signal.SIGKILL)
        self.clean(child)

    def fork_ahead(self) -> Child:
        """The next call's child, locked down and waiting for its code."""
        files = [new_file() for _ in range(3)]
        sleeper, wake = os.pipe()
        if self.on["pid"]:
            libc("unshare", isolation.NEW_PID)
        if (pid := os.fork()) == 0:
            status = 1
            try:
                self.lock_down([*files, sleeper])
                status = child_main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if self.on["pid"]:
            libc("setns", self.own_pid_namespace, isolation.NEW_PID)
        os.close(sleeper)
        return Child(pid, wake, files, os.pidfd_open(pid) if LINUX else -1)

    def lock_down(self, descriptors: list[int]) -> None:
        """All that a child gives up, in the order in which it still can. `descriptors` (stdin,
        stdout, stderr, the end of a pipe) become 0 to 3; there are no others."""
        if LINUX:
            libc("prctl", isolation.PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            with contextlib.suppress(OSError):  # the first to go when memory is short
                Path("/proc/self/oom_score_adj").write_text("1000")
        if self.view:
            os.chroot(self.view)
        os.chdir(self.home)
        if self.on["landlock"]:
            isolation.apply_landlock(self.ruleset)
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(len(descriptors), 1 << 16)
        random.seed(0)
        if self.on["limits"]:
            isolation.limit_resources(self.settings["memory"], self.settings["disk"])
        if self.on["capabilities"]:
            isolation.drop_capabilities()
        if self.on["seccomp"]:
            isolation.apply_seccomp(self.filter)

    def serve(self, child: Child, call: dict) -> ToolResult:
        """Feeds a call to its child and watches the process to its end."""
        seconds, cause, poll = call["seconds"], "", select.poll()
        stdin, stdout, stderr = child.files
        for descriptor in {self.pool.fileno(), child.pidfd} - {-1}:
            poll.register(descriptor, select.POLLIN)
        start_cpu, start = cpu_clock(child.pid), time.monotonic()
        cpu, asleep, looked, looked_cpu = 0.0, 0.0, start, 0.0
        write_all(stdin, pack(call) + call["stdin"].encode("utf-8", "replace"))
        os.close(child.wake)
        child.wake = -1
        while not cause:
            wait = min(TICK, max((seconds - cpu) / NUM_CORES, 0.002)) if LINUX else 0.002
            ready = dict(poll.poll(wait * 1000))
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
            elif max(size_of(stdout), size_of(stderr)) > MAX_OUTPUT:
                cause = "output"
            elif self.pool.fileno() in ready:
                cause = "lost"  # the pool has ended
        else:
            os.kill(child.pid, signal.SIGKILL)
            _, status, usage = os.wait4(child.pid, 0)
        end_children()
        cpu = max(0.0, usage.ru_utime + usage.ru_stime - start_cpu)
        cause = cause or verdict(os.waitstatus_to_exitcode(status), cpu >= seconds, child.files)
        texts = [cut(file, self.settings["output"]) for file in (stdout, stderr)]
        return ToolResult(cause, *texts, time.monotonic() - start, cpu)

    def clean(self, child: Child) -> None:
        """Leaves nothing of a call: descriptors, files."""
        for descriptor in {child.wake, child.pidfd, *child.files} - {-1}:
            os.close(descriptor)
        if os.listdir(self.private):
            self.renew()


def verdict(code: int, late: bool, files: list[int]) -> str:
    """Status of a call that ended by itself, with this exit code (negative: a signal)."""
    stdout, stderr = map(size_of, files[1:])
    if code and not stderr:
        why = f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        os.write(files[2], why.encode())
    if late or code == -signal.SIGXCPU:
        return "timeout"
    if max(stdout, stderr) > MAX_OUTPUT:
        return "output"
    if code in (OUT_OF_MEMORY, -signal.SIGKILL):  # killed, but not by us: no memory left
        return "memory"
    return "error" if code else "ok" if stdout else "empty"


def new_file() -> int:
    """A file without a name: a child fills it without anybody reading at the other end."""
    if LINUX:
        return os.memfd_create("")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def size_of(file: int) -> int:
    return os.fstat(file).st_size


def write_all(file: int, data: bytes) -> None:
    with open(file, "wb", closefd=False) as stream:
        stream.write(data)
        stream.seek(0)


def cut(file: int, limit: int) -> str:
    """Its text; of one that is too long head and tail, with a marker between."""
    size = size_of(file)
    if size <= limit:
        return os.pread(file, limit, 0).decode("utf-8", "replace")
    head, tail = (os.pread(file, limit // 2, at) for at in (0, size - limit // 2))
    marker = f"\n... {size - limit} bytes left out ...\n".encode()
    return (head + marker + tail).decode("utf-8", "replace")


def cpu_clock(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    return time.clock_gettime((~pid << 3) | 2) if LINUX else 0.0


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


def end_children(spare: tuple[int, ...] = (), patience: float = 2.0) -> None:
    """Kills and reaps what became a child of this process when its parent died. There is something
    only where there is neither a PID namespace nor seccomp."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(OSError):  # ChildProcessError: none
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for pid in Path("/proc/thread-self/children").read_text().split():
                    if int(pid) not in spare:
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.001)


def preload(names: list[str], home: str) -> None:
    """Makes what every child then has for nothing: imported packages, the checker, the state of a
    fresh interpreter."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if names:
        spec = importlib.util.spec_from_file_location("reward", Path(HERE).with_name("reward.py"))
        sys.modules["reward"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["reward"])
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", LANG="C.UTF-8", HOME=home, TMPDIR=home)
    tempfile.tempdir, sys.argv[:], sys.path[:0] = None, [""], [""]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", closefd=False)  # lines: kept at time-out
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "sympy" in sys.modules:
        sys.modules["sympy"].core.random.seed(0)
    warnings.formatwarning = lambda message, kind, *_: f"{kind.__name__}: {message}\n"
    threading.excepthook = lambda args: show_error(args.exc_value, {})
    gc.collect()
    gc.freeze()


def run_zygote(pool: socket.socket) -> None:
    settings = read_message(pool.fileno())
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(HERE)]
    sys.path += [p for p in settings["path"] if p not in sys.path]
    Zygote(settings, pool).run()


# ---- the pool: one process that never blocks ----


class Pool:
    def __init__(self, settings: dict):
        self.settings = settings
        self.queue = asyncio.PriorityQueue()  # of (not urgent, order, request, client)
        self.order = itertools.count()
        self.layers = asyncio.get_running_loop().create_future()
        self.processes: dict[int, subprocess.Popen] = {}  # by the zygote's index

    async def serve_client(self, reader, writer) -> None:
        """Queues a client's calls until it leaves; who breaks the protocol is cut off."""
        writer.transport.set_write_buffer_limits(MAX_UNREAD)
        sock = writer.get_extra_info("socket")
        try:
            secret = (await receive(reader))["secret"]
            if not secrets.compare_digest(secret, self.settings["secret"]):
                raise ValueError("not of this job")
            if LINUX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8] != (
                struct.pack("i", os.getuid())
            ):
                raise ValueError("another user")
            while True:
                message = await receive(reader)
                if "layers" in message:
                    writer.write(pack({"layers": await asyncio.shield(self.layers)}))
                else:
                    place = (not message["urgent"], next(self.order))
                    self.queue.put_nowait((*place, check_request(message), writer))
        except (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError):
            writer.close()

    async def serve_worker(self, index: int) -> None:
        """Keeps a zygote alive and hands it one call at a time. A call whose zygote dies is tried
        once more, then lost. Ends if zygotes do not come up."""
        request, client, tries, failures = None, None, 0, 0
        while failures < 3:
            ours, theirs = socket.socketpair()
            self.processes[index] = spawn("--zygote", theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(pack({**self.settings, "index": index, "pool": os.getpid()}))
            try:
                failures += 1
                self.tell((await receive(reader))["layers"])
                failures = 0
                while True:
                    if request is None:
                        *_, request, client = await self.queue.get()
                        tries = 0
                    tries += 1
                    if not client.is_closing():
                        writer.write(pack(request))
                        answer = receive(reader)
                        answer = await asyncio.wait_for(answer, 10 * request["seconds"] + 60)
                        await self.answer(client, request, answer)
                    request = None
            except (EOFError, OSError, asyncio.TimeoutError):
                writer.close()
                self.end_zygote(index)
                if request and tries == 2:
                    await self.answer(client, request, asdict(ToolResult("lost")))
                    request = None
        print("sandbox: workers do not start, see the error above", file=sys.stderr)

    async def answer(self, client, request: dict, result: dict) -> None:
        with contextlib.suppress(OSError):
            client.write(pack({"id": request["id"], **result}))
            await client.drain()

    def tell(self, layers: dict) -> None:
        if not self.layers.done():
            self.layers.set_result(layers)
            off = [f"{name} ({why})" for name, (on, why) in layers.items() if not on]
            if off and not self.settings["off"]:
                print(f"sandbox: NOT GUARANTEED here: {', '.join(off)}", file=sys.stderr)

    def end_zygote(self, index: int) -> None:
        process = self.processes.pop(index)
        process.kill()
        process.wait()
        end_children(tuple(other.pid for other in self.processes.values()), 0.01)


async def receive(reader: asyncio.StreamReader) -> dict:
    """One message; EOFError at the end, ValueError if it breaks the protocol."""
    (size,) = struct.unpack("<I", await reader.readexactly(4))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(await reader.readexactly(size))


async def run_pool(owner: socket.socket, listener: socket.socket) -> None:
    """Until the owner's end of its socket closes, or the owner is no longer our parent."""
    parent = os.getppid()
    pool = Pool(read_message(owner.fileno()))
    if LINUX:
        libc("prctl", isolation.SET_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # equal addresses in every run
            libc("personality", isolation.NO_RANDOMIZE)
    streams = await asyncio.open_connection(sock=owner)
    await asyncio.start_unix_server(pool.serve_client, sock=listener)
    tasks = [asyncio.create_task(pool.serve_client(*streams))]
    tasks += [asyncio.create_task(pool.serve_worker(n)) for n in range(pool.settings["workers"])]
    while os.getppid() == parent and not any(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for process in pool.processes.values():
        process.kill()
        process.wait()
    end_children()
    shutil.rmtree(pool.settings["folder"], ignore_errors=True)


def spawn(mode: str, *sockets: socket.socket) -> subprocess.Popen:
    """Starts a process of ours by exec: a fork of one with threads may hang. Its environment is
    clean, since /proc shows it. malloc with huge pages makes forks cheap."""
    environment = dict(pair.split("=", 1) for pair in ENVIRONMENT.split())
    environment |= {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    numbers = [s.fileno() for s in sockets]
    command = [sys.executable, "-s", HERE, mode, *map(str, numbers)]
    process = subprocess.Popen(command, env=environment, cwd="/", pass_fds=numbers, **quiet)
    for s in sockets:
        s.close()
    return process


# ---- the client: what a trainer holds ----


class SandboxClient:
    """A connection to a pool on this machine, for one thread at a time."""

    def __init__(self, address: str, secret: str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        self.use(sock, address, secret)

    def use(self, sock: socket.socket, address: str, secret: str) -> None:
        self.sock, self.address, self.secret = sock, address, secret
        self.ended = False
        self.handles = itertools.count()
        self.unanswered: set[int] = set()
        self.answered: dict[int, ToolResult] = {}
        self.news: list[int] = []  # answered, and ready() has not said so
        self.known_layers: dict | None = None
        self.send({"secret": secret})

    def submit(self, code: str, stdin: str = "", seconds: float = 4.0, urgent: bool = False) -> int:
        """Hands in a program and returns its handle at once."""
        return self.call(kind="run", code=[code], stdin=stdin, seconds=seconds, urgent=urgent)

    def submit_check(self, answer: str, gold: str, seconds: float = 4.0, urgent=True) -> int:
        """Hands in an answer check (`reward.is_equivalent`); its stdout will be "1" or "0"."""
        code = [answer, gold]
        return self.call(kind="check", code=code, stdin="", seconds=seconds, urgent=urgent)

    def call(self, **request) -> int:
        handle = next(self.handles)
        self.send(check_request({"id": handle, **request}))
        self.unanswered.add(handle)
        return handle

    def ready(self) -> list[int]:
        """Handles answered since the last look, without waiting."""
        while self.receive(0):
            pass
        news, self.news = [h for h in self.news if h in self.answered], []
        return news

    def result(self, handle: int, timeout: float = math.inf) -> ToolResult:
        """Waits for an answer and hands it over, once."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while handle in self.unanswered:
            if not self.receive(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TimeoutError(f"call {handle} has no answer yet")
        if handle not in self.answered:
            raise KeyError(f"call {handle} was never made, or its result is taken")
        return self.answered.pop(handle)

    def pending(self) -> int:
        return len(self.unanswered)

    def fileno(self) -> int:
        """For select: readable when an answer waits."""
        return self.sock.fileno()

    def layers(self) -> dict[str, tuple[bool, str]]:
        """{guarantee: (on, by what, or why not)}; waits for the first worker."""
        if not self.known_layers:
            self.send({"layers": True})
        while not self.known_layers:
            if not self.receive(math.inf):
                self.fail()
        return self.known_layers

    def send(self, message: dict) -> None:
        try:
            self.sock.sendall(pack(message))
        except OSError:
            self.end()
            self.fail()

    def fail(self) -> None:
        raise RuntimeError("the sandbox's pool has ended, look for its message above")

    def receive(self, timeout: float) -> bool:
        """Takes in one message; False if none came in time, or none will."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        wait = None if timeout == math.inf else max(0.0, timeout) * 1000
        if self.ended or not poll.poll(wait):
            return False
        message = None
        with contextlib.suppress(ConnectionResetError):
            message = read_message(self.sock.fileno())
        if message is None:
            self.end()
        elif "layers" in message:
            self.known_layers = {name: tuple(found) for name, found in message["layers"].items()}
        else:
            self.take(message.pop("id"), ToolResult(**message))
        return not self.ended

    def take(self, handle: int, result: ToolResult) -> None:
        self.unanswered.remove(handle)
        self.answered[handle] = result
        self.news.append(handle)

    def end(self) -> None:
        """The pool is gone: what it has not answered is lost."""
        self.ended = True
        for handle in sorted(self.unanswered):
            self.take(handle, ToolResult("lost"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # also where a fork holds a copy
        self.sock.close()
        self.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Sandbox(SandboxClient):
    """A pool and its first client. The pool ends with this object, or with this process."""

    def __init__(
        self,
        workers: int = NUM_CORES,  # calls that run at once
        preload: tuple[str, ...] = ("numpy", "sympy"),
        require: tuple[str, ...] = (),  # guarantees without which it raises
        memory: int = 1 << 30,  # bytes of address space of a call
        disk: int = 64 << 20,  # bytes of its private directory
        files: int = 1000,  # files there
        output: int = 1 << 16,  # bytes kept of stdout, and of stderr
        off: tuple[str, ...] = (),  # mechanisms left out, for tests and benchmarks
    ):
        place = tempfile.gettempdir()  # a socket's address has room for 107 bytes
        self.folder = tempfile.mkdtemp(prefix="sandbox-", dir=place if len(place) < 80 else "/tmp")
        address, secret = os.path.join(self.folder, "socket"), secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(128)
        ours, theirs = socket.socketpair()
        self.process = spawn("--pool", theirs, listener)
        settings = dict(folder=self.folder, secret=secret, workers=workers, preload=preload)
        settings |= dict(memory=memory, disk=disk, files=files, output=output, off=off)
        settings["path"] = [p for p in sys.path if p.endswith("-packages")]
        ours.sendall(pack(settings))
        self.use(ours, address, secret)
        layers = self.layers() if require else {}
        missing = {n: why for n in require for on, why in [layers.get(n, (0, "unknown"))] if not on}
        if missing:
            self.close()
            raise RuntimeError(f"the sandbox cannot guarantee {missing}; see sandbox.py --check")

    def close(self) -> None:
        super().close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def main(mode: str = "", *numbers: str) -> int | None:
    sockets = [socket.socket(fileno=int(number)) for number in numbers]
    if mode == "--pool":
        return asyncio.run(run_pool(*sockets))
    if mode == "--zygote":
        return run_zygote(*sockets)
    if mode == "--check":
        sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests"))
        return importlib.import_module("sandbox_hostile").main()
    return print(__doc__)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
