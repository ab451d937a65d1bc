"""A cluster in discrete events: what a rollout scheduler is worth, without a cluster.

The policies are scheduler.py's own functions; engines, lengths and tools are simulated. Time jumps
from event to event (a turn ends, a tool answers, the cache is full), exactly: between two events
the rows are fixed, and k decode steps of R rows over C cached tokens cost

    k * base(R) + kv * (k * C + R * k (k + 1) / 2)        base(R) = max(w, row * R)

Scenario (Scenario's defaults): 512 problems x 32 rollouts on 64 engines; an MI300X that serves
Qwen3-14B in bf16 at half of 5.3 TB/s: w = 27.98e9 / 2.65e12 s for the weights, kv = 163,840 /
2.65e12 s a cached token that a step reads, 45e-6 s a row; prefill 20,000 tokens/s. Lengths are
lognormal (mean 4,000 before the cut at the budget, sigma 0.8, correlation 0.5 within a problem),
turns round(N(3, 2)) in 1..10 of equal length, a tool call between turns of lognormal latency. The
lengths count decoded tokens; prompt and tool text are 0 unless asked for.

Engine, the same for all policies but static-paper: claimed rollouts wait until they fit, oldest
first, with `headroom` tokens free for each row; when a step does not fit, sequences that wait for
a tool and then the newest are preempted, and pay a prefill of all their tokens when they resume. A
rollout stays on its engine. Preempted and new rollouts share one waiting list; an engine claims
when that list is empty, at the start and whenever a rollout has finished.

Baselines:
    static-paper    the dealt share at once; a turn's calls are gathered until all rows have ended
                    their turn, sent together and awaited together; when the cache is full the
                    newest half of the rows is evicted and resumed after the rest have finished
    static_groups, static, capacity, expected    see scheduler.py
    clairvoyant     knows the lengths: longest first by squared length to the least loaded engine,
                    started when they fit to their ends. A reference, not a bound

    python benchmarks/simulate.py                        # one row: cache 720,000, budget 8,192
    python benchmarks/simulate.py --table --seeds 10     # all caches and budgets (15 minutes)
    python benchmarks/simulate.py --html timelines.html  # what each engine did when
    python benchmarks/simulate.py --from-run runs/toy    # lengths, turns, tools of a real run
    python benchmarks/simulate.py --replay steps.jsonl   # recorded steps: simulated against real
    python benchmarks/simulate.py --record runs/toy --replay steps.jsonl    # record 10 toy steps
"""

from __future__ import annotations

import argparse
import bisect
import copy
import heapq
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scheduler import EngineView, Lengths, num_to_start, queue_order  # noqa: E402

POLICIES = ("static-paper", "static_groups", "static", "capacity", "expected", "clairvoyant")


@dataclass(frozen=True)
class Scenario:
    num_problems: int = 512
    group_size: int = 32
    num_engines: int = 64
    cache_tokens: int = 720_000
    max_tokens: int = 8_192  # budget of decoded tokens
    max_seqs: int = 512
    group_chunk: int = 1  # rollouts of a problem dealt to an engine in a run
    headroom: int = 64  # tokens a row that must be free when a sequence is admitted
    weight_seconds: float = 27.98e9 / 2.65e12
    row_seconds: float = 45e-6
    kv_seconds: float = 163_840 / 2.65e12
    prefill_rate: float = 20_000.0
    mean_length: float = 4_000.0
    sigma_length: float = 0.8
    correlation: float = 0.5
    mean_turns: float = 3.0
    sigma_turns: float = 2.0
    mean_latency: float = 0.3
    sigma_latency: float = 1.0
    prompt_tokens: int = 0
    tool_tokens: int = 0  # a response's
    step_cost: tuple = ()  # measured (rows, seconds) instead of weight, row and kv_seconds

    @property
    def max_cached(self) -> int:
        """A rollout's budget as a policy sees it: all tokens, ten turns."""
        return self.max_tokens + self.prompt_tokens + 9 * self.tool_tokens

    def base_seconds(self) -> list[float]:
        """Cost of a decode step by its number of rows, before the cache is read."""
        rows = np.arange(self.num_problems * self.group_size + 1)
        if self.step_cost:
            return np.interp(rows, *zip(*sorted(self.step_cost))).tolist()
        return np.maximum(self.weight_seconds, self.row_seconds * rows).tolist()


@dataclass(eq=False)
class Rollout:
    problem: int
    turn_lengths: list[int]
    latencies: list[float]  # one fewer
    number: int = 0  # order of claiming on its engine: the newest is preempted first
    turn: int = 0
    tokens: int = 0  # in the cache (or to be computed again) when it last changed state
    left: int = 0  # of this turn, when it last changed state
    entered: int = 0  # the engine's step count when it began to decode
    entry: int = 0  # and which entry of the engine's heap is about it
    resident: bool = False
    decoding: bool = False
    prefilled: bool = False
    finished: float = 0.0

    def __post_init__(self):
        self.length = sum(self.turn_lengths)


# ---- the workload and its bound ----


def draw_rollouts(scenario: Scenario, seed: int) -> list[list[Rollout]]:
    """[problem][rollout]. log length = mu + sigma (sqrt(rho) problem + sqrt(1 - rho) own)."""
    s, rng = scenario, np.random.default_rng(seed)
    shape = (s.num_problems, s.group_size)
    problem, own = rng.standard_normal((shape[0], 1)), rng.standard_normal(shape)
    mixed = np.sqrt(s.correlation) * problem + np.sqrt(1 - s.correlation) * own
    lengths = s.mean_length * np.exp(s.sigma_length * mixed - s.sigma_length**2 / 2)
    lengths = np.clip(np.rint(lengths), 1, s.max_tokens).astype(int)
    turns = np.clip(np.rint(rng.normal(s.mean_turns, s.sigma_turns, shape)), 1, 10).astype(int)
    turns = np.minimum(turns, lengths)
    mu = np.log(s.mean_latency) - s.sigma_latency**2 / 2
    latencies = rng.lognormal(mu, s.sigma_latency, (*shape, 9))
    return [
        [
            Rollout(p, split_evenly(int(n), int(t)), latencies[p, r, : t - 1].tolist())
            for r, (n, t) in enumerate(zip(lengths[p], turns[p]))
        ]
        for p in range(shape[0])
    ]


def split_evenly(length: int, parts: int) -> list[int]:
    """7, 3 -> [2, 2, 3]"""
    ends = [length * i // parts for i in range(parts + 1)]
    return [b - a for a, b in zip(ends, ends[1:])]


def lower_bound(rollouts, scenario: Scenario) -> float:
    """No schedule is faster than max(A, B): A shares all work evenly over engines whose cache is
    always full of decoding sequences; B is the longest rollout alone on an engine."""
    s = scenario
    work = prefilled = longest = 0.0
    for group in rollouts:
        prefilled += s.prompt_tokens  # at least once a problem
        for r in group:
            context, start = 0, s.prompt_tokens
            for n in r.turn_lengths:
                context += n * start + n * (n + 1) // 2  # sum of c over the turn's tokens
                start += n + s.tool_tokens
            tools = s.tool_tokens * len(r.latencies)
            work += context * (s.kv_seconds + s.weight_seconds / s.cache_tokens)
            prefilled += tools
            alone = s.weight_seconds * r.length + s.kv_seconds * context + sum(r.latencies)
            longest = max(longest, alone + tools / s.prefill_rate)
    first_prompt = s.prompt_tokens / s.prefill_rate if s.group_size == 1 else 0.0
    return max((work + prefilled / s.prefill_rate) / s.num_engines, longest + first_prompt)


# ---- one engine ----


@dataclass
class SimulatedEngine:
    """rows: decoding sequences in a heap by the step at which their turn ends."""

    scenario: Scenario
    policy: str
    lengths: Lengths | None = None
    plan: list[Rollout] = field(default_factory=list)  # clairvoyant only
    clock: float = 0.0
    steps: int = 0
    started: int = 0
    num_rows: int = 0
    row_tokens: int = 0  # cached tokens of decoding sequences: what a step reads
    idle_tokens: int = 0  # cached tokens of sequences that wait for a tool
    ask: bool = True  # the policy is asked at the start and after every finished rollout
    entries: int = 0
    rows: list = field(default_factory=list)  # heap of (end step, entry, rollout)
    tools: list = field(default_factory=list)  # heap of (time of answer, number, rollout)
    gathered: list = field(default_factory=list)  # static-paper: calls not yet sent
    waiting: list = field(default_factory=list)  # heap of (number, rollout): new and preempted
    residents: dict = field(default_factory=dict)  # number -> rollout that holds cache
    prompts: set = field(default_factory=set)  # problems whose prompt is in the prefix cache
    spans: list = field(default_factory=list)  # (start, end, kind, share of cache) for --html
    ended: list = field(default_factory=list)  # lengths
    busy: float = 0.0
    recomputed: int = 0

    def __post_init__(self):
        self.base = self.scenario.base_seconds()

    def event(self, queue) -> bool:
        """Everything up to the end of the next run of decode steps. False: all done."""
        self.admit()
        if self.ask and not self.waiting:
            self.claim(queue)
            self.admit()
        if not self.num_rows:
            return self.wait_for_tools()
        preempted = self.make_room()
        if self.num_rows:  # static-paper may evict its only row
            self.decode(1 if preempted else self.scenario.max_tokens)
        return True

    # -- tools

    def deliver_answers(self):
        while self.tools and self.tools[0][0] <= self.clock:
            _, number, r = heapq.heappop(self.tools)
            if not r.resident:  # preempted while it waited
                r.tokens += self.scenario.tool_tokens
                heapq.heappush(self.waiting, (number, r))
                continue
            self.idle_tokens -= r.tokens
            self.prefill(self.scenario.tool_tokens, first=True)
            r.tokens += self.scenario.tool_tokens
            self.enter(r)

    def wait_for_tools(self) -> bool:
        if self.gathered:  # all rows are at the barrier: send all calls, await all answers
            answered = self.clock + max(r.latencies[r.turn - 1] for r in self.gathered)
            for r in self.gathered:
                heapq.heappush(self.tools, (answered, r.number, r))
            self.gathered = []
        if not self.tools:
            return False
        self.span(self.tools[0][0] - self.clock, "wait")
        self.clock = self.tools[0][0]  # not a rounding error less
        return True

    # -- admission

    def claim(self, queue):
        """Asks until the policy wants no more: a single claim is bounded."""
        self.ask = False
        while claimed := queue.claim(self):
            for r in claimed:
                r.number, self.started = self.started, self.started + 1
                r.tokens, r.left = self.scenario.prompt_tokens, r.turn_lengths[0]
                heapq.heappush(self.waiting, (r.number, r))

    def admit(self):
        """A prefill takes time in which further answers may arrive."""
        after_the_rest = self.policy != "static-paper" or not self.residents
        self.deliver_answers()
        while self.waiting and after_the_rest and self.fits(self.waiting[0][1]):
            r = heapq.heappop(self.waiting)[1]
            if r.prefilled:
                self.recomputed += r.tokens
                self.prefill(r.tokens, first=False)
            elif r.problem not in self.prompts:
                self.prompts.add(r.problem)
                self.prefill(r.tokens, first=True)
            r.resident = r.prefilled = True
            self.residents[r.number] = r
            self.enter(r)
            self.deliver_answers()

    def fits(self, r) -> bool:
        headroom = self.scenario.headroom * (self.num_rows + 1)
        used = self.row_tokens + self.idle_tokens
        return not self.residents or used + r.tokens + headroom <= self.scenario.cache_tokens

    def enter(self, r):
        self.entries += 1
        r.entry, r.entered, r.decoding = self.entries, self.steps, True
        self.num_rows += 1
        self.row_tokens += r.tokens
        heapq.heappush(self.rows, (self.steps + r.left, r.entry, r))

    def leave(self, r):
        """r stops decoding; its tokens so far become a fact."""
        decoded = self.steps - r.entered
        r.tokens, r.left, r.decoding = r.tokens + decoded, r.left - decoded, False
        self.num_rows -= 1
        self.row_tokens -= r.tokens

    # -- preemption

    def make_room(self) -> bool:
        """Preempts until a step fits. True if it had to: then a smaller one may fit after it."""
        full = False
        while self.row_tokens + self.idle_tokens + self.num_rows > self.scenario.cache_tokens:
            if len(self.residents) == 1:
                raise ValueError("one rollout fills the cache: cache_tokens must exceed max_tokens")
            if self.policy == "static-paper":
                newest = sorted(r.number for r in self.residents.values() if r.decoding)
                victims = newest[len(newest) // 2 :]
            else:
                victims = [max((not r.decoding, n) for n, r in self.residents.items())[1]]
            for number in victims:
                self.preempt(self.residents.pop(number))
            full = True
        return full

    def preempt(self, r):
        r.resident = False
        if r.decoding:
            self.leave(r)
            heapq.heappush(self.waiting, (r.number, r))
        else:
            self.idle_tokens -= r.tokens  # it joins the waiting list with its answer

    # -- time

    def decode(self, k: int):
        """Up to k steps: until a turn ends, a tool answers or the next step would not fit."""
        while not self.decodes(*self.rows[0]):
            heapq.heappop(self.rows)
        s, n, cached = self.scenario, self.num_rows, self.row_tokens
        base = self.base[n] + s.kv_seconds * cached
        slope = s.kv_seconds * n
        k = min(k, self.rows[0][0] - self.steps)
        k = min(k, (s.cache_tokens - cached - self.idle_tokens) // n)
        if self.tools:
            k = min(k, steps_until(self.tools[0][0] - self.clock, base, slope))
        self.span(k * base + slope * k * (k + 1) / 2, "decode")
        self.steps += k
        self.row_tokens += k * n
        while self.rows and self.rows[0][0] <= self.steps:
            row = heapq.heappop(self.rows)
            if self.decodes(*row):
                self.end_turn(row[2])

    def decodes(self, end_step: int, entry: int, r: Rollout) -> bool:
        """False for what preemption left in the heap."""
        return r.decoding and r.entry == entry

    def end_turn(self, r):
        self.leave(r)
        r.turn += 1
        if r.turn == len(r.turn_lengths):
            r.finished, r.resident, self.ask = self.clock, False, True
            del self.residents[r.number]
            self.ended.append(r.tokens)
            if self.lengths:
                self.lengths.add(r.problem, r.tokens)
            return
        r.left = r.turn_lengths[r.turn]
        self.idle_tokens += r.tokens
        if self.policy == "static-paper":
            self.gathered.append(r)
        else:
            answered = self.clock + r.latencies[r.turn - 1]
            heapq.heappush(self.tools, (answered, r.number, r))

    def prefill(self, tokens: int, first: bool):
        self.span(tokens / self.scenario.prefill_rate, "prefill" if first else "recompute")

    def span(self, seconds: float, kind: str):
        if seconds > 0:
            full = (self.row_tokens + self.idle_tokens) / self.scenario.cache_tokens
            self.spans.append((self.clock, self.clock + seconds, kind, full))
            self.clock += seconds
            self.busy += seconds * (kind in ("decode", "prefill"))

    def view(self, remaining: int) -> EngineView:
        s = self.scenario
        running = [
            (r.problem, r.tokens + (self.steps - r.entered) * r.decoding)
            for r in self.residents.values()
        ] + [(r.problem, r.tokens) for _, r in self.waiting]
        return EngineView(
            s.num_engines, s.num_problems * s.group_size, remaining, self.started,
            s.cache_tokens, s.max_cached, s.max_seqs, running, self.ended, self.lengths,
        )  # fmt: skip


def steps_until(seconds: float, base: float, slope: float) -> int:
    """Smallest k >= 1 with k * base + slope * k (k + 1) / 2 >= seconds."""
    b = base + slope / 2
    k = int(2 * seconds / (b + (b * b + 2 * slope * max(seconds, 0)) ** 0.5))
    k = max(k, 1)
    while k * base + slope * k * (k + 1) / 2 < seconds:
        k += 1
    return k


# ---- the cluster ----


class SimulatedQueue:
    """The shared queue, claimed in the order of simulated time."""

    def __init__(self, policy: str, order: list[Rollout]):
        self.policy, self.order, self.next = policy, order, 0

    def claim(self, engine: SimulatedEngine) -> list[Rollout]:
        if self.policy == "clairvoyant":
            return claim_known(engine)
        remaining = len(self.order) - self.next
        if not remaining:
            return []
        policy = "static" if self.policy == "static-paper" else self.policy
        n = num_to_start(policy, engine.view(remaining))
        self.next += n
        return self.order[self.next - n : self.next]


def simulate(policy: str, scenario: Scenario, rollouts, knowledge=()) -> list[SimulatedEngine]:
    """Runs one step. knowledge: (problem, length) pairs of an earlier step."""
    size, chunk = scenario.group_size, scenario.group_chunk
    order = queue_order(range(len(rollouts)), size, size if policy == "static_groups" else chunk)
    queue = SimulatedQueue(policy, [rollouts[p][r] for p, r in order])
    learned = Lengths(scenario.max_cached)
    for problem, length in knowledge:
        learned.add(problem, length)
    engines = [
        SimulatedEngine(scenario, policy, copy.deepcopy(learned) if policy == "expected" else None)
        for _ in range(scenario.num_engines)
    ]
    if policy == "clairvoyant":
        deal_known(engines, rollouts)
    clocks = [(0.0, i) for i in range(len(engines))]
    while clocks:
        _, i = heapq.heappop(clocks)
        if engines[i].event(queue):
            heapq.heappush(clocks, (engines[i].clock, i))
    unfinished = sum(r.turn < len(r.turn_lengths) for group in rollouts for r in group)
    assert not unfinished, f"{unfinished} rollouts did not end at their drawn length"
    return engines


def deal_known(engines, rollouts):
    load = [(0, i) for i in range(len(engines))]
    for r in sorted((r for g in rollouts for r in g), key=lambda r: -r.length):
        work, i = heapq.heappop(load)
        engines[i].plan.append(r)
        heapq.heappush(load, (work + r.length**2, i))


def claim_known(engine) -> list[Rollout]:
    """Of the engine's plan, longest first, all that fit to their ends beside what runs."""
    s = engine.scenario
    width = -(-s.max_tokens // 64)
    ahead = np.arange(0, s.max_tokens + s.prompt_tokens + 2 * width, width)
    running = [*engine.residents.values(), *(r for _, r in engine.waiting)]
    now = np.array([r.tokens + (engine.steps - r.entered) * r.decoding for r in running])
    held = now.reshape(-1, 1) + ahead  # (running, ahead)
    ends = np.array([r.length + s.prompt_tokens for r in running]).reshape(-1, 1) + width
    room = s.cache_tokens - ahead - (held * (held < ends)).sum(0)
    taken = []
    while engine.plan:
        fits = ahead[np.argmax(room < 0)] if (room < 0).any() else ahead[-1]  # longest that fits
        i = bisect.bisect_left(engine.plan, width - fits, key=lambda r: -r.length)
        if i == len(engine.plan) and (engine.residents or engine.waiting or taken):
            break
        r = engine.plan.pop(min(i, len(engine.plan) - 1))
        room = room - ahead * (ahead < r.length + width)
        taken.append(r)
    return taken


def measure(engines, rollouts, scenario) -> dict:
    finished = np.array([r.finished for group in rollouts for r in group])
    decoded = sum(r.length for group in rollouts for r in group)
    makespan = finished.max()
    return dict(
        makespan=makespan,
        ratio=makespan / lower_bound(rollouts, scenario),
        busy=sum(e.busy for e in engines) / (len(engines) * makespan),
        recomputed=sum(e.recomputed for e in engines) / decoded,
        p50=np.quantile(finished, 0.5),
        p99=np.quantile(finished, 0.99),
    )


def run(policy: str, scenario: Scenario, seed: int) -> tuple[dict, list[SimulatedEngine]]:
    rollouts = draw_rollouts(scenario, seed)
    earlier = draw_rollouts(scenario, seed + 1_000)
    prompt, tool = scenario.prompt_tokens, scenario.tool_tokens
    knowledge = [
        (f"earlier {r.problem}", prompt + r.length + tool * len(r.latencies))
        for group in earlier for r in group
    ]  # fmt: skip
    engines = simulate(policy, scenario, rollouts, knowledge)
    return measure(engines, rollouts, scenario), engines


# ---- fitted to a run, and compared with one ----


def fit_run(folder: str, scenario: Scenario) -> Scenario:
    """The scenario with lengths, turns, tool times (CPU seconds) and texts of the traces of a run
    folder, and with the cost of a step where its metrics.jsonl has engine_step_cost."""
    paths = [p for p in sorted(Path(folder).glob("traces/*.jsonl")) if "evaluation" not in p.name]
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    if not rows:
        raise FileNotFoundError(f"{folder}/traces/*.jsonl holds no trajectories: train first")
    lengths, prompts, turns, seconds, tool_text = defaultdict(list), [], [], [], []
    for row in rows:
        lengths[row["step"], row["problem"]["id"]].append(np.log(max(1, sum(row["loss_mask"]))))
        prompts.append(row["num_prompt_tokens"])
        turns.append(max(1, row["num_turns"]))
        seconds += [call["seconds"] for call in row["tool_calls"]]
        tool_text += [end - start for start, end, kind in row["segments"] if kind == "tool"]
    logs = np.concatenate([np.array(v) for v in lengths.values()])
    sigma_latency = np.std(np.log(np.maximum(seconds, 1e-4))) if seconds else 0.0
    return replace(
        scenario,
        max_tokens=max(int(np.exp(logs.max()).round()), 1),
        mean_length=float(np.exp(logs.mean() + logs.var() / 2)),
        sigma_length=float(logs.std()),
        correlation=correlation_within(list(lengths.values())),
        mean_turns=float(np.mean(turns)),
        sigma_turns=float(np.std(turns)),
        mean_latency=float(np.mean(seconds)) if seconds else 0.0,
        sigma_latency=float(sigma_latency),
        prompt_tokens=round(np.mean(prompts)),
        tool_tokens=round(np.mean(tool_text)) if tool_text else 0,
        **measured_cost(Path(folder) / "metrics.jsonl"),
    )


def measured_cost(metrics: Path) -> dict:
    """Mean over the steps of [[rows, seconds of a step with so many rows], ...]."""
    seconds = defaultdict(list)
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        for rows, cost in json.loads(line).get("engine_step_cost", ()):
            seconds[rows].append(cost)
    table = tuple((rows, float(np.mean(costs))) for rows, costs in sorted(seconds.items()))
    return dict(step_cost=table, kv_seconds=0.0, prefill_rate=np.inf) if table else {}


def correlation_within(groups: list[list[float]]) -> float:
    """Intraclass correlation by analysis of variance, in 0..1."""
    groups = [np.array(g) for g in groups if len(g) > 1]
    if len(groups) < 2:
        return 0.0
    size = np.mean([len(g) for g in groups])
    within = np.mean([g.var(ddof=1) for g in groups])
    between = np.var([g.mean() for g in groups], ddof=1) - within / size
    return float(np.clip(between / max(between + within, 1e-12), 0, 1))


# ---- recorded steps ----


def replay(record: dict) -> tuple[float, float]:
    """Runs a recorded step again. Returns Kendall's tau of the order of completion and the
    simulated makespan over the real one.

    record: cache_tokens, max_tokens, engine_step_cost [[rows, mean seconds of such a step]],
    rollouts [{engine, started, finished, prompt_tokens, turns: tokens the model wrote in each,
    tool_seconds, tool_tokens: of the answers between}], seconds from the start of the step.
    """
    rows = record["rollouts"]
    answers = [n for row in rows for n in row["tool_tokens"]]
    scenario = Scenario(
        num_problems=len(rows), group_size=1, num_engines=1 + max(row["engine"] for row in rows),
        cache_tokens=record["cache_tokens"], max_tokens=record["max_tokens"], kv_seconds=0.0,
        prefill_rate=np.inf, tool_tokens=round(np.mean(answers)) if answers else 0, headroom=0,
        step_cost=tuple(map(tuple, record["engine_step_cost"])),
    )  # fmt: skip
    rollouts = [Rollout(i, row["turns"], row["tool_seconds"]) for i, row in enumerate(rows)]
    for i in range(scenario.num_engines):
        engine = SimulatedEngine(scenario, "static")
        for r, row in zip(rollouts, rows):
            if row["engine"] == i:  # as if its first token had to wait for an answer until then
                r.number, r.tokens, r.left = r.problem, row["prompt_tokens"], r.turn_lengths[0]
                heapq.heappush(engine.tools, (row["started"], r.number, r))
        while engine.event(SimulatedQueue("static", [])):
            pass
    simulated = np.array([r.finished for r in rollouts])
    real = np.array([row["finished"] for row in rows])
    return kendall_tau(simulated, real), simulated.max() / real.max()


def record_steps(run: Path, path: str, steps: int = 10) -> None:
    """Generates steps of 12 toy problems x 16 on this machine with the run's SFT model, whose
    rollouts still err and repair, and writes a record of each as a line of path."""
    import torch
    import torch.distributed as dist

    import rollout
    from kvcache_engine import engine_from_folder
    from sandbox import Sandbox
    from scheduler import RolloutQueue
    from tokenizer import Tokenizer
    from toy import toy_problems

    torch.set_num_threads(1)
    records, began = {}, 0.0

    class RecordedLoop(rollout.Loop):
        def start(self, problem, rollout_index):
            seq_id, now = self.next_id, time.monotonic() - began
            records[seq_id] = dict(engine=0, started=now, turns=[], tool_seconds=[], tool_tokens=[])
            super().start(problem, rollout_index)
            records[seq_id]["prompt_tokens"] = len(self.running[seq_id].trajectory.token_ids)

        def end_of_turn(self, turn):
            records[turn.seq_id]["turns"].append(len(turn.token_ids))
            records[turn.seq_id]["asked"] = time.monotonic()
            super().end_of_turn(turn)

        def respond(self, seq_id):
            record, waited = records[seq_id], time.monotonic() - records[seq_id]["asked"]
            trajectory = self.running[seq_id].trajectory
            length = len(trajectory.token_ids)
            super().respond(seq_id)
            if len(trajectory.token_ids) > length:  # else it did not fit, and the rollout ended
                record["tool_seconds"].append(waited)
                record["tool_tokens"].append(len(trajectory.token_ids) - length)

        def end(self, seq_id, stop_reason):
            records[seq_id]["finished"] = time.monotonic() - began
            super().end(seq_id, stop_reason)

    rollout.Loop = RecordedLoop
    folder, cfg = rollout.settings_of_run(run)
    cache, size, costs = 49_152, 16, defaultdict(list)
    engine = engine_from_folder(run / "sft", cache_tokens=cache, device="cpu")
    engine_step = engine.step

    def timed_step():
        before, at = engine.counters.generated, time.monotonic()
        turns = engine_step()
        rows = engine.counters.generated - before
        costs[rows // 8 * 8 + 4 if rows > 8 else rows].append(time.monotonic() - at)
        return turns

    engine.step = timed_step
    tok, lengths = Tokenizer.from_file(folder / "tokenizer.json"), Lengths(cfg.max_tokens)
    problems = toy_problems(12 * steps, seed=7, holdout=False)
    with Sandbox(workers=2) as box, open(path, "w") as file:
        for step in range(steps):
            records.clear()
            costs.clear()
            chosen = problems[12 * step : 12 * step + 12]
            order = queue_order([p.id for p in chosen], size, group_chunk=2)
            queue = RolloutQueue(dist.HashStore(), str(step), order)
            began = time.monotonic()
            rollout.rollout(
                engine, box, tok, queue, chosen, cfg, seed=0, step=step, lengths=lengths
            )
            cost = [[rows, float(np.mean(seconds))] for rows, seconds in sorted(costs.items())]
            record = dict(cache_tokens=cache, max_tokens=cfg.max_tokens, engine_step_cost=cost)
            file.write(json.dumps(record | dict(rollouts=list(records.values()))) + "\n")
            print(f"step {step}: {len(records)} rollouts in {time.monotonic() - began:.1f} s")


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """(pairs in the same order - in the opposite order) / all. [1, 2, 3], [1, 3, 2] -> 1/3"""
    pairs = np.triu_indices(len(x), 1)
    signs = [np.sign(np.subtract.outer(v, v))[pairs] for v in (x, y)]
    return float((signs[0] * signs[1]).mean())


def replay_file(path: str) -> None:
    """One recorded step a line."""
    results = np.array([replay(json.loads(line)) for line in Path(path).read_text().splitlines()])
    for i, (tau, ratio) in enumerate(results):
        print(f"step {i}: Kendall tau {tau:.3f}, makespan simulated / real {ratio:.3f}")
    tau, error = np.median(results[:, 0]), np.median(np.abs(results[:, 1] - 1))
    print(f"median of {len(results)}: tau {tau:.3f}, makespan off by {error:.1%} (aim .9 and 25 %)")


# ---- tables and pictures ----

COLUMNS = ("makespan", "ratio", "busy", "recomputed", "p50", "p99")


def print_table(scenarios: list[Scenario], seeds: int, policies, html: str | None) -> None:
    print("makespan in seconds, mean min max over seeds; ratio to the lower bound; share of")
    print("engine time decoding or in first prefill; tokens computed again over decoded; latencies")
    timelines = []
    for scenario in scenarios:
        cache, budget = scenario.cache_tokens, scenario.max_tokens
        print(f"\ncache {cache:,} tokens an engine, budget {budget:,}, {seeds} seeds")
        print(f"{'':14}{'makespan':>22}" + "".join(f"{name:>11}" for name in COLUMNS[1:]))
        for policy in policies:
            results = []
            for seed in tqdm(range(seeds), desc=policy, leave=False):
                result, engines = run(policy, scenario, seed)
                results.append(result)
                if html and seed == 0:
                    timelines.append((f"{policy}, cache {cache:,}, budget {budget:,}", engines))
            print_row(policy, results)
    if html:
        Path(html).write_text(timeline_page(timelines))
        print(f"\nwrote {html}")


def print_row(policy: str, results: list[dict]) -> None:
    spans = [r["makespan"] for r in results]
    digits = 0 if max(spans) > 100 else 2
    makespan = " ".join(f"{f(spans):.{digits}f}" for f in (np.mean, min, max))
    means = [np.mean([r[name] for r in results]) for name in COLUMNS[1:]]
    print(f"{policy:14}{makespan:>22}" + "".join(f"{m:>11.3f}" for m in means[:3]), end="")
    print("".join(f"{m:>11.{digits}f}" for m in means[3:]), flush=True)


def timeline_page(timelines) -> str:
    """Static HTML: a strip an engine, time to the right; decoding darker with a fuller cache."""
    end = max(engine.clock for _, engines in timelines for engine in engines)
    parts = [
        "<!doctype html><meta charset=utf-8><title>Engine timelines</title>",
        "<body style='font:14px sans-serif;margin:2em'><h1>Engine timelines</h1>",
        f"<p>{end:.0f} s from left to right, the same for all. Green: decoding, darker with a ",
        "fuller cache. Blue: first prefill. Red: recomputing after preemption. White: waiting.</p>",
    ]
    for title, engines in timelines:
        parts.append(f"<h2>{title}: {max(e.clock for e in engines):.0f} s</h2>")
        parts.append(f"<svg width=1000 height={6 * len(engines)} shape-rendering=crispEdges>")
        parts += [strip(engine, 6 * i, 1000 / end) for i, engine in enumerate(engines)]
        parts.append("</svg>")
    return "\n".join(parts)


def strip(engine, y: int, scale: float, columns: int = 250) -> str:
    """Each column shows what took most of its time; equal neighbours are one rectangle."""
    width, spent, full = 1000 / columns, defaultdict(float), defaultdict(float)
    for start, stop, kind, filled in engine.spans:
        for column in range(int(start * scale / width), int(stop * scale / width) + 1):
            left, right = column * width / scale, (column + 1) * width / scale
            overlap = max(0.0, min(stop, right) - max(start, left))
            spent[column, kind] += overlap
            full[column] = max(full[column], filled * (overlap > 0))
    colours = []
    for column in range(columns):
        kind = max(("decode", "prefill", "recompute", "wait"), key=lambda k: spent[column, k])
        decode = f"hsl(140 50% {90 - 15 * round(4 * full[column])}%)"
        kinds = dict(decode=decode, prefill="#36c", recompute="#d33", wait="none")
        colours.append(kinds[kind] if spent[column, kind] else "none")
    edges = [i for i in range(columns) if not i or colours[i] != colours[i - 1]] + [columns]
    return "".join(
        f"<rect x={a * width:g} y={y} width={(b - a) * width:g} height=5 fill='{colours[a]}'/>"
        for a, b in zip(edges, edges[1:])
        if colours[a] != "none"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="all caches and budgets")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--html", metavar="FILE", help="write the engines' timelines of seed 0")
    parser.add_argument("--from-run", metavar="FOLDER", help="fit the scenario to a run's traces")
    parser.add_argument("--replay", metavar="FILE", help="recorded steps, a JSON object a line")
    parser.add_argument("--record", metavar="FOLDER", help="a toy run: first record to --replay's")
    numbers = {n: k for n, k in Scenario.__annotations__.items() if k != "tuple"}
    for name, kind in numbers.items():
        flag, default = "--" + name.replace("_", "-"), getattr(Scenario, name)
        parser.add_argument(flag, type=float if kind == "float" else int, default=default)
    args = parser.parse_args()
    if args.record:
        record_steps(Path(args.record), args.replay or parser.error("--record needs --replay FILE"))
    if args.replay:
        return replay_file(args.replay)
    scenario = Scenario(**{name: getattr(args, name) for name in numbers})
    if args.from_run:
        scenario = fit_run(args.from_run, scenario)
        print(f"fitted to {args.from_run}: {scenario}\n")
    caches = (720_000, 360_000, 240_000, 180_000)
    scenarios = [scenario]
    if args.table:
        grid = [(b, c) for b in (8_192, 12_288) for c in caches]
        scenarios = [replace(scenario, max_tokens=b, cache_tokens=c) for b, c in grid]
    print_table(scenarios, args.seeds, args.policies, args.html)


if __name__ == "__main__":
    main()
