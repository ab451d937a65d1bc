"""Sandbox: a pool of isolated Python workers that runs whatever a policy writes.

    trainer, ranks      SandboxClient: submit, ready, result; no call blocks another
      | unix socket     0700 directory, same user, the job's secret; length + JSON, no pickle
    pool, one process   a queue, answer checks first; replaces dead workers and retries their call
      | socket pair
    worker, one a core  isolation.py: forks a child ahead of its call, locks it down, watches it
      | unnamed files
    child, one a call   runs the program, or the answer check, and is gone

Every call gets exactly one `ToolResult`. `layers()` says which guarantees hold on this machine and
why others do not; `require=("network", ...)` insists on some. Outside Linux a call is a plain child
process, and the pool says so on stderr.

`seconds` limits CPU time, which a loaded machine does not change; a child that sleeps is ended
after as long asleep (waiting for a core is not sleep). The clock starts when the child gets its
code, however long it was queued.

    python sandbox.py --check      this machine's layers, and the hostile suite against them
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import isolation
from isolation import HERE, LINUX, NUM_CORES, end_children, libc, pack, read_message

MAX_MESSAGE, MAX_UNREAD = 64 << 20, 256 << 20  # bytes of a message, of answers nobody reads
# malloc in huge pages makes forks cheap; it must not give pages back only to clear new ones.
ENVIRONMENT = """PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUTF8=1 PYTHONHASHSEED=0
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
    PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1:\
glibc.malloc.trim_threshold=0x40000000:glibc.malloc.mmap_threshold=0x2000000"""
LAYERS = {  # guarantee: what gives it, alternatives in order
    "network": ("seccomp+net", "seccomp"),
    "files": ("landlock+seccomp", "mount"),
    "signals": ("seccomp+pid", "seccomp", "pid"),
    "memory": ("limits+seccomp",),
    "time": ("limits",),
    "processes": ("seccomp",),
    "disk": ("mount",),
    "leftovers": ("seccomp+pid", "seccomp", "pid"),
}


@dataclass(frozen=True)
class ToolResult:
    """status: ok, empty (ran, printed nothing), error, timeout, memory, output (printed too
    much), lost (its worker died twice: our fault, not the policy's)."""

    status: str
    stdout: str = ""
    stderr: str = ""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


# ---- the pool: one process that never blocks ----


class Pool:
    def __init__(self, settings: dict):
        self.settings = settings
        self.queue = asyncio.PriorityQueue()  # of (not urgent, order, request, client)
        self.order = itertools.count()
        self.loop = asyncio.get_running_loop()
        self.layers = self.loop.create_future()
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
            self.processes[index] = spawn(HERE, theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(pack({**self.settings, "index": index, "pool": os.getpid()}))
            try:
                failures += 1
                self.tell(guarantees((await receive(reader))["why"]))
                failures = 0
                while True:
                    if request is None:
                        *_, request, client = await self.queue.get()
                        tries = 0
                    tries += 1
                    if not client.is_closing():
                        writer.write(pack(request))
                        kill = self.processes[index].kill  # of a zygote that hangs
                        alarm = self.loop.call_later(10 * request["seconds"] + 60, kill)
                        answer = await receive(reader)
                        alarm.cancel()
                        await self.answer(client, request, answer)
                    request = None
            except (EOFError, OSError):
                writer.close()
                self.end_zygote(index)
                if request and tries == 2:
                    await self.answer(client, request, asdict(ToolResult("lost")))
                    request = None
        print("sandbox: workers do not start, see the error above", file=sys.stderr)

    async def answer(self, client, request: dict, result: dict) -> None:
        with contextlib.suppress(OSError):  # it may have left
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
        end_children(tuple(other.pid for other in self.processes.values()))


def check_request(message: dict) -> dict:
    """Raises TypeError, ValueError or KeyError for anything but a call."""
    if not all(isinstance(text, str) for text in [*message["code"], message["stdin"]]):
        raise TypeError("a call is made of texts: code and stdin, or answer and gold")
    if not 0 < message["seconds"] < 1e6:
        raise ValueError(f"seconds must be positive, got {message['seconds']}")
    return message


async def receive(reader: asyncio.StreamReader) -> dict:
    """One message; EOFError at the end, ValueError if it breaks the protocol."""
    (size,) = struct.unpack("<I", await reader.readexactly(4))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(await reader.readexactly(size))


def guarantees(why: dict[str, str]) -> dict[str, tuple[bool, str]]:
    """{guarantee: (on, by what, or why not)} from what `probe` found."""
    found = {}
    for guarantee, choices in LAYERS.items():
        good = [c for c in choices if not any(why[m] for m in c.split("+"))]
        off = ", ".join(f"{m}: {why[m]}" for m in choices[0].split("+") if why[m])
        found[guarantee] = (bool(good), good[0] if good else off)
    return found


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


def spawn(script: str, *sockets: socket.socket) -> subprocess.Popen:
    """Starts a process of ours by exec: a fork of one with threads may hang. Its environment is
    clean, since /proc shows it."""
    environment = dict(pair.split("=", 1) for pair in ENVIRONMENT.split())
    environment |= {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    numbers = [s.fileno() for s in sockets]
    command = [sys.executable, "-s", script, *map(str, numbers)]
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
        self.process = spawn(os.path.abspath(__file__), theirs, listener)
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


def main(*arguments: str) -> int | None:
    if arguments == ("--check",):
        sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests"))
        return importlib.import_module("sandbox_hostile").main()
    if len(arguments) != 2:
        return print(__doc__)
    return asyncio.run(run_pool(*(socket.socket(fileno=int(number)) for number in arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
