"""Sandbox: calls a second, time of one call alone, a flood, a soak.

    python benchmarks/sandbox.py                    ratios, interleaved, and one call alone
    python benchmarks/sandbox.py --flood            45,000 calls at once by 8 clients
    python benchmarks/sandbox.py --soak 20          minutes of hostile and ordinary calls; growth

Machines differ and are seldom quiet: what counts are the ratios, of runs that took turns. `bare` is
a subprocess per call, `open` the same pool without any layer. Beside calls a second there is the
CPU time of a call, everything included, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sandbox import Sandbox, SandboxClient  # noqa: E402

ALL_OFF = ("seccomp", "landlock", "pid", "net", "mount", "capabilities", "limits")
IN_FLIGHT = 64
PROGRAMS = {  # name: program, its output, calls a round of (bare, pool)
    "print": ("print(1+1)", "2\n", (48, 400)),
    "numpy": ("import numpy as np; print(np.arange(10).sum())", "45\n", (16, 400)),
    "sympy": (
        "import sympy; print(sympy.factorint(2**67-1))",
        "{193707721: 1, 761838257287: 1}\n",
        (6, 150),
    ),
}


def calls_a_second(box: SandboxClient, program: str, output: str, num_calls: int) -> float:
    start, running, num_made = time.perf_counter(), set(), 0
    while num_made < num_calls or running:
        while num_made < num_calls and len(running) < IN_FLIGHT:
            running.add(box.submit(program))
            num_made += 1
        handle = next(iter(running))
        assert box.result(handle).stdout == output
        running.remove(handle)
        for other in set(box.ready()) & running:
            assert box.result(other).stdout == output
            running.remove(other)
    return num_calls / (time.perf_counter() - start)


def bare_a_second(program: str, output: str, num_calls: int) -> float:
    def call(_):
        command = [sys.executable, "-c", program]
        assert subprocess.run(command, capture_output=True, text=True).stdout == output

    start = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(call, range(num_calls)))
    return num_calls / (time.perf_counter() - start)


def family(root: int) -> dict[int, dict[str, str]]:
    """{pid: fields of /proc/pid/status} of a process and its descendants."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            rows = [row.partition(":") for row in path.read_text().splitlines()]
            fields[int(path.parent.name)] = {key: value.strip() for key, _, value in rows}
        except OSError:
            pass
    members = [root] if root in fields else []
    for member in members:
        members += [pid for pid, f in fields.items() if int(f["PPid"]) == member]
    return {pid: fields[pid] for pid in members}


def layers_of_a_child(box: Sandbox, program: str) -> str:
    """What /proc says of a child that runs such a program now."""
    box.result(box.submit(program))
    handle = box.submit(f"import time; time.sleep(.3)\n{program}")
    time.sleep(0.15)
    child = max(family(box.process.pid).values(), key=lambda f: len(f["NSpid"].split()))
    box.result(handle)
    return ", ".join(f"{k} {child[k]}" for k in ("Seccomp", "NoNewPrivs", "NSpid"))


def cpu_of(box: Sandbox) -> float:
    """CPU seconds so far of a pool, its workers and the children they have seen end."""
    total = 0
    for pid in family(box.process.pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def cpu_of_this_process() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(way, cpu, num_calls: int) -> tuple[float, float]:
    """(calls a second, CPU milliseconds of a call)"""
    before = cpu()
    rate = way(num_calls)
    return rate, 1e3 * (cpu() - before) / num_calls


def throughput(rounds: int) -> None:
    with Sandbox() as box, Sandbox(off=ALL_OFF) as open_box:
        box.layers(), open_box.layers()
        print("        calls/s: layers    open    bare   /bare  /open", end="")
        print("   CPU ms: layers    open    bare   bare/  open/")
        for name, (program, output, (num_bare, num_pool)) in PROGRAMS.items():
            ways = {  # what to run, whose CPU time to count, how often
                "on": (partial(calls_a_second, box, program, output), box, num_pool),
                "open": (partial(calls_a_second, open_box, program, output), open_box, num_pool),
                "bare": (partial(bare_a_second, program, output), None, num_bare),
            }
            rows = []
            for _ in range(rounds):
                found = []
                for way, pool, num_calls in ways.values():
                    cpu = lambda: cpu_of_this_process() + (cpu_of(pool) if pool else 0)  # noqa: B023
                    found.append(measured(way, cpu, num_calls))
                (on, open_, bare), (on_cpu, open_cpu, bare_cpu) = zip(*found)
                rows.append((on, open_, bare, on / bare, on / open_))
                rows[-1] += (on_cpu, open_cpu, bare_cpu, bare_cpu / on_cpu, open_cpu / on_cpu)
            widths = (17, 8, 8, 8, 7) * 2
            cells = [f"{median(c):{w}.2f}" for c, w in zip(zip(*rows), widths)]
            print(f"{name:7}" + "".join(cells))
            for kind, pool in (("on", box), ("off", open_box)):
                print(f"        layers {kind}: {layers_of_a_child(pool, program)}", flush=True)


def alone(num_calls: int) -> None:
    """One call at a time, beside a bare fork of this process, which is as large as a zygote."""

    def bare_fork():
        if (pid := os.fork()) == 0:
            exec("str(1+1)")
            os._exit(0)
        os.waitpid(pid, 0)

    with Sandbox(workers=1) as box:
        ways = {name: partial(box.submit, program) for name, (program, *_) in PROGRAMS.items()}
        ways = {name: lambda submit=submit: box.result(submit()) for name, submit in ways.items()}
        ways["bare fork"] = bare_fork
        times = {name: [] for name in ways}
        for _ in range(num_calls + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
        print("one call alone, median ms: " + ", ".join(
            f"{name} {1e3 * median(t[1:]):.1f}" for name, t in times.items()))  # fmt: skip


def flood_client(address: str, secret: str, num_calls: int, seed: int, report) -> None:
    client, start = SandboxClient(address, secret), time.perf_counter()
    numbers = [random.Random(seed + k).randrange(10**6) for k in range(num_calls)]
    handles = {client.submit(f"print({n} * 3)"): n for n in numbers}
    waits, num_right = [], 0
    while handles:
        handle = next(iter(handles))
        for done in client.ready() or [handle]:
            result = client.result(done)
            num_right += result.status == "ok" and int(result.stdout) == handles.pop(done) * 3
            waits.append(time.perf_counter() - start)
    with open("/proc/self/status") as status:
        peak = next(int(row.split()[1]) for row in status if row.startswith("VmHWM"))
    report.put((waits, num_right, peak / 1024))


def flood(num_calls: int, num_clients: int = 8) -> None:
    context = multiprocessing.get_context("spawn")
    with Sandbox() as box:
        box.layers()
        report, start = context.Queue(), time.perf_counter()
        clients = [
            context.Process(
                target=flood_client,
                args=(box.address, box.secret, num_calls // num_clients, 1000 * n, report),
            )
            for n in range(num_clients)
        ]
        for client in clients:
            client.start()
        rows = [report.get() for _ in clients]
        seconds = time.perf_counter() - start
        pool = int(family(box.process.pid)[box.process.pid]["VmHWM"].split()[0]) / 1024
    waits = sorted(w for row in rows for w in row[0])
    num_right = sum(row[1] for row in rows)
    print(f"{len(waits)} answers, {num_right} right, {seconds:.0f} s, {len(waits) / seconds:.0f}/s")
    p99 = waits[int(0.99 * len(waits))]
    print(f"latency from the start: mean {mean(waits):.1f} s, p99 {p99:.1f} s")
    print(f"peak memory: pool {pool:.0f} MiB, clients {max(row[2] for row in rows):.0f} MiB each")


SOAK = [  # program, seconds, statuses that are right
    ("print(1+1)", 1, {"ok"}),
    ("import numpy as np; np.arange(10).sum()", 1, {"ok"}),
    ("import sympy; sympy.factorint(2**61 - 3)", 4, {"ok"}),
    ("1/0", 1, {"error"}),
    ("while True: pass", 0.1, {"timeout"}),
    ("import time; time.sleep(9)", 0.1, {"timeout"}),
    ("bytearray(2 << 30)", 1, {"memory"}),
    ("import os\nwhile True: os.fork()", 1, {"error"}),
    ("import os; os.kill(-1, 9)", 1, {"error"}),
    ("import ctypes; ctypes.string_at(0)", 1, {"error"}),
    ("import os; os._exit(7)", 1, {"error"}),
    ("while True: print('x' * 10**6)", 4, {"output", "timeout"}),
    ("for n in range(5000): open(str(n), 'w').write('x')", 4, {"error"}),
    ("import os\nos.makedirs('/'.join('d' * 300))", 4, {"ok", "empty"}),
    ("import threading, time\nfor n in range(999): threading.Thread(target=time.sleep, "
     "args=[9]).start()", 1, {"timeout", "error", "memory"}),
]  # fmt: skip


def growth(box: Sandbox) -> dict[str, float]:
    """Numbers that must not grow: of the pool and what belongs to it, and of this client."""
    members = family(box.process.pid)
    lasting = {pid: f for pid, f in members.items() if len(f["NSpid"].split()) < 3}
    descriptors = 0
    for pid in [*lasting, os.getpid()]:
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    rss = sum(int(f.get("VmRSS", "0").split()[0]) for f in lasting.values())
    with open("/proc/self/status") as status:
        own = next(int(row.split()[1]) for row in status if row.startswith("VmRSS"))
    return {
        "pool MiB": rss / 1024,
        "client MiB": own / 1024,
        "descriptors": descriptors,
        "processes": len(members),
        "zombies": sum(f["State"].startswith("Z") for f in members.values()),
        "entries in its directory": sum(1 for _ in Path(box.folder).rglob("*")),
    }


def soak(minutes: float) -> int:
    rng, num_calls, num_wrong, shown = random.Random(0), 0, 0, 0.0
    with Sandbox() as box:
        box.layers()
        end, first = time.monotonic() + 60 * minutes, None
        while time.monotonic() < end:
            calls = [rng.choice(SOAK) for _ in range(64)]
            handles = [box.submit(program, seconds=limit) for program, limit, _ in calls]
            for (program, _, right), handle in zip(calls, handles):
                result = box.result(handle)
                num_calls += 1
                if result.status not in right:
                    num_wrong += 1
                    print(f"wrong: {program!r} {result}"[:400], flush=True)
            if time.monotonic() - shown > 60:
                shown, now = time.monotonic(), growth(box)
                first = first or now  # after one round: everything is warm
                numbers = ", ".join(f"{k} {v:.0f} ({v - first[k]:+.0f})" for k, v in now.items())
                print(f"{num_calls} calls, {num_wrong} wrong; {numbers}", flush=True)
        time.sleep(1)
        numbers = ", ".join(f"{k} {v:.0f} ({v - first[k]:+.0f})" for k, v in growth(box).items())
        print(f"end: {num_calls} calls, {num_wrong} wrong; {numbers}")
    return int(num_wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flood", type=int, nargs="?", const=45_000, metavar="CALLS")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    options = parser.parse_args()
    if options.soak:
        return soak(options.soak)
    if options.flood:
        return flood(options.flood) or 0
    throughput(options.rounds)
    alone(50)
    return 0


if __name__ == "__main__":
    sys.exit(main())
