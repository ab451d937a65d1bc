"""Sandbox: a pool of isolated Python workers that runs whatever a policy writes.

    trainer, ranks      SandboxClient: submit, ready, result; no call blocks another
      | unix socket     0700 directory, same user, the job's secret; length + JSON, no pickle
    pool, one process   a queue, answer checks first; `workers` calls at once, each in the zygote
      | socket pair     that has what its text asks for; replaces dead ones, retries their call
    zygotes             isolation.py: fork a child, locked down, for a call, and watch it
      | unnamed files
    child, one a call   runs the program, or the answer check, and is gone

Every call gets exactly one `ToolResult`. `layers()` says which guarantees hold on this machine and
why others do not; `require=("network", ...)` insists on some. Outside Linux a call is a plain child
process, and the pool says so on stderr.

`seconds` limits CPU time, which a loaded machine does not change; a child that sleeps is ended
after as long asleep (waiting for a core is not sleep). The clock starts with the child, however
long its call was queued.

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
import re
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import isolation
from isolation import HERE, LINUX, NUM_CORES, end_children, libc, pack, read_message

MAX_MESSAGE, MAX_UNREAD = 64 << 20, 256 << 20  # bytes of a message, of answers nobody reads
ENDED = "the sandbox's pool has ended, look for its message above"
# malloc must not give pages back only to clear new ones; a child would bind functions once more.
ENVIRONMENT = """PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUTF8=1 PYTHONHASHSEED=0
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
    LD_BIND_NOW=1 GLIBC_TUNABLES=glibc.malloc.trim_threshold=0x40000000:\
glibc.malloc.mmap_threshold=0x2000000"""
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
        self.secret, self.settings = settings.pop("secret"), settings
        self.queue = asyncio.PriorityQueue()  # of (not urgent, order, call, as it came, client)
        self.order = itertools.count()
        self.layers = asyncio.get_running_loop().create_future()
        self.zygotes: dict[int, tuple] = {}  # number: (process, reader, writer)
        self.starting: set[int] = set()  # process ids of those that are not in there yet

    async def serve_client(self, reader, writer) -> None:
        """Queues a client's calls until it leaves; who breaks the protocol is cut off."""
        writer.transport.set_write_buffer_limits(MAX_UNREAD)
        sock = writer.get_extra_info("socket")
        try:
            secret = json.loads((await receive(reader))[4:])["secret"]
            if not secrets.compare_digest(secret, self.secret):
                raise ValueError("not of this job")
            user = struct.pack("i", os.getuid())
            if LINUX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8] != user:
                raise ValueError("another user")
            writer.write(pack({"layers": await asyncio.shield(self.layers)}))
            while True:
                data = await receive(reader)
                call = check_call(json.loads(data[4:]))
                self.queue.put_nowait((not call["urgent"], next(self.order), call, data, writer))
        except (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError):
            writer.close()
        except asyncio.CancelledError:  # the pool ends; asyncio would complain
            writer.close()

    async def serve_worker(self, index: int) -> None:
        """Runs one call at a time, in the zygote that has what it needs."""
        preload = self.settings["preload"]
        first = index * (len(preload) + 1)
        if index == 0:  # says the layers; the other zygotes start when needed
            await self.start(first)
        while True:
            *_, call, data, client = await self.queue.get()
            number = first + choose_zygote(call, preload)
            answer = None
            for _ in range(2):  # if the zygote dies, once more
                if not (answer or client.is_closing()):
                    answer = await self.ask(number, call, data)
            with contextlib.suppress(OSError):  # it may have left
                client.write(answer or pack({"id": call["id"], "status": "lost"}))
                await client.drain()

    async def ask(self, number: int, call: dict, data: bytes) -> bytes | None:
        """A zygote's answer; None if it died."""
        if number not in self.zygotes:
            await self.start(number)
        process, reader, writer = self.zygotes[number]
        alarm = asyncio.get_running_loop().call_later(10 * call["seconds"] + 60, process.kill)
        try:
            writer.write(data)
            return await receive(reader)
        except (EOFError, OSError, ValueError):
            self.end_zygote(number)
        finally:
            alarm.cancel()

    async def start(self, number: int) -> None:
        """Starts a zygote. If three in a row do not come up, that is the end of the pool."""
        preload, off = self.settings["preload"], self.settings["off"]
        level = number % (len(preload) + 1)
        own = dict(number=number, imports=preload[:level], pool=os.getpid())
        if 0 < level == len(preload):
            own["imports"] = [*preload, "reward"]
        for _ in range(3):
            process, sock = spawn(HERE)
            self.starting.add(process.pid)
            reader, writer = await asyncio.open_connection(sock=sock)
            self.zygotes[number] = process, reader, writer
            self.starting.discard(process.pid)
            writer.write(pack(self.settings | own))
            try:
                layers = guarantees(json.loads((await receive(reader))[4:])["why"])
            except (EOFError, OSError):
                self.end_zygote(number)
                continue
            missing = [f"{name} ({why})" for name, (on, why) in layers.items() if not on]
            if missing and not off and not self.layers.done():
                print(f"sandbox: NOT GUARANTEED here: {', '.join(missing)}", file=sys.stderr)
            return self.layers.done() or self.layers.set_result(layers)
        sys.exit("sandbox: workers do not start, see the error above")

    def end_zygote(self, number: int) -> None:
        process, _, writer = self.zygotes.pop(number)
        writer.close()
        process.kill()
        process.wait()
        end_children([*self.starting, *(process.pid for process, *_ in self.zygotes.values())])


def choose_zygote(call: dict, preload: list[str]) -> int:
    """How many of `preload` a call needs, by its text: up to the last that it names. All for a
    check, for imports that we do not know or cannot see, and for random numbers of a package: a
    zygote that has them is seeded. A wrong choice costs time: what is not there is imported."""
    text = call["code"][0]
    level = max((n for n, name in enumerate(preload, 1) if name in text), default=0)
    imports = re.findall(r"^[ \t]*(?:import|from)[ \t]+(\w+)", text, re.M)
    other = set(imports) - sys.stdlib_module_names - set(preload)
    hidden = re.search(r"\b(?:__import__|importlib|exec|eval)\b", text)
    if call["kind"] == "check" or other or hidden or (level and "random" in text):
        return len(preload)
    return level


def check_call(message: dict) -> dict:
    """Raises TypeError, ValueError or KeyError for anything but a call."""
    if not all(isinstance(text, str) for text in [*message["code"], message["stdin"]]):
        raise TypeError("a call is made of texts: code and stdin, or answer and gold")
    if len(message["code"]) != {"run": 1, "check": 2}[message["kind"]]:
        raise ValueError("a program is one text, a check two")
    if not 0 < message["seconds"] < 1e6:
        raise ValueError(f"seconds must be positive, got {message['seconds']}")
    return message


async def receive(reader: asyncio.StreamReader) -> bytes:
    """One message with its length, as it is passed on; EOFError at the end."""
    head = await reader.readexactly(4)
    (size,) = struct.unpack("<I", head)
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return head + await reader.readexactly(size)


def guarantees(why: dict[str, str]) -> dict[str, tuple[bool, str]]:
    """{guarantee: (on, by what, or why not)} from what `probe` found."""
    found = {}
    for guarantee, choices in LAYERS.items():
        good = [c for c in choices if not any(why[m] for m in c.split("+"))]
        off = ", ".join(f"{m}: {why[m]}" for m in choices[0].split("+") if why[m])
        found[guarantee] = (bool(good), good[0] if good else off)
    return found


async def run_pool() -> None:
    """Until the owner's end of our stdin closes, or the owner is no longer our parent."""
    owner = socket.socket(fileno=0)
    data, (listener,), *_ = socket.recv_fds(owner, 1 << 20, 1)
    parent, pool = os.getppid(), Pool(json.loads(data))
    if LINUX:
        libc("prctl", isolation.SET_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # equal addresses in every run
            libc("personality", isolation.NO_RANDOMIZE)
    lifeline, _ = await asyncio.open_connection(sock=owner)
    await asyncio.start_unix_server(pool.serve_client, sock=socket.socket(fileno=listener))
    coroutines = [lifeline.read(), *map(pool.serve_worker, range(pool.settings["workers"]))]
    tasks = list(map(asyncio.create_task, coroutines))
    try:
        while os.getppid() == parent and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in list(pool.zygotes):
            pool.end_zygote(number)
        end_children()
        shutil.rmtree(pool.settings["folder"], ignore_errors=True)


def spawn(script: str, *arguments: str) -> tuple[subprocess.Popen, socket.socket]:
    """Starts a process of ours, and a socket that is its stdin. By exec: a fork of one with threads
    may hang. Its environment is clean, since /proc shows it."""
    ours, theirs = socket.socketpair()
    environment = dict(pair.split("=", 1) for pair in ENVIRONMENT.split())
    environment |= {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    how = dict(stdin=theirs, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/")
    process = subprocess.Popen([sys.executable, "-s", script, *arguments], env=environment, **how)
    theirs.close()
    return process, ours


# ---- the client: what a trainer holds ----


class SandboxClient:
    """A connection to a pool on this machine, for one thread at a time."""

    def __init__(self, address: str, secret: str):
        self.address, self.secret = address, secret
        self.handles = itertools.count()
        self.results: dict[int, ToolResult | None] = {}  # None: unanswered
        self.news: list[int] = []  # answered, and ready() has not said so
        self.known_layers, self.ended = None, False
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(address)
        self.sockets = [self.sock]  # to close
        self.send({"secret": secret})

    def submit(self, code: str, stdin: str = "", seconds: float = 4.0, urgent: bool = False) -> int:
        """Hands in a program and returns its handle at once."""
        return self.call("run", [code], stdin, seconds, urgent)

    def submit_check(self, answer: str, gold: str, seconds: float = 4.0, urgent=True) -> int:
        """Hands in an answer check (`reward.is_equivalent`); its stdout will be "1" or "0"."""
        return self.call("check", [answer, gold], "", seconds, urgent)

    def call(self, kind: str, code: list[str], stdin: str, seconds: float, urgent: bool) -> int:
        handle = next(self.handles)
        call = dict(id=handle, kind=kind, code=code, stdin=stdin, seconds=seconds, urgent=urgent)
        self.send(check_call(call))
        self.results[handle] = None
        return handle

    def ready(self) -> list[int]:
        """Handles answered since the last look, without waiting."""
        while self.receive(0):
            pass
        news, self.news = [handle for handle in self.news if handle in self.results], []
        return news

    def result(self, handle: int, timeout: float = math.inf) -> ToolResult:
        """Waits for an answer and hands it over, once: a KeyError after that."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.results[handle] is None:
            if not self.receive(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise TimeoutError(f"call {handle} has no answer yet")
        return self.results.pop(handle)

    def fileno(self) -> int:
        """For select: readable when an answer waits."""
        return self.sock.fileno()

    def layers(self) -> dict[str, tuple[bool, str]]:
        """{guarantee: (on, by what, or why not)}; waits for the first worker."""
        while self.ended or not self.known_layers:
            if not self.receive(math.inf):
                raise RuntimeError(ENDED)
        return self.known_layers

    def send(self, message: dict) -> None:
        try:
            self.sock.sendall(pack(message))
        except OSError as error:
            self.end()
            raise RuntimeError(ENDED) from error

    def receive(self, timeout: float) -> bool:
        """Takes in one message; False if none came in time, or none will."""
        if self.ended:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        if not poll.poll(1000 * min(max(timeout, 0), 1e6)):
            return False
        message = None
        with contextlib.suppress(ConnectionResetError):
            message = read_message(self.sock.fileno())
        if message is None:
            self.end()
        elif "layers" in message:
            self.known_layers = {name: tuple(found) for name, found in message["layers"].items()}
        else:
            self.news.append(message.pop("id"))
            self.results[self.news[-1]] = ToolResult(**message)
        return not self.ended

    def end(self) -> None:
        """The pool is gone: what it has not answered is lost."""
        self.ended = True
        lost = [handle for handle, result in self.results.items() if result is None]
        self.results |= dict.fromkeys(lost, ToolResult("lost"))
        self.news += lost

    def close(self) -> None:
        self.end()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # also where a fork holds a copy
            sock.close()

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
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(self.folder, "socket"))
        listener.listen(128)
        super().__init__(listener.getsockname(), secrets.token_hex(16))
        self.process, lifeline = spawn(os.path.abspath(__file__), "--serve")
        self.sockets.append(lifeline)
        settings = dict(folder=self.folder, secret=self.secret, workers=workers, preload=preload)
        settings |= dict(memory=memory, disk=disk, files=files, output=output, off=off)
        settings["path"] = [p for p in sys.path if p.endswith("-packages")]
        socket.send_fds(lifeline, [json.dumps(settings).encode()], [listener.fileno()])
        listener.close()
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


def main(argument: str = "") -> int | None:
    if argument == "--serve":
        return asyncio.run(run_pool())
    if argument != "--check":
        return print(__doc__)
    sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests"))
    return importlib.import_module("sandbox_hostile").main()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
