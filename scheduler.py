"""Which engine takes which rollout, and when (paper section 3.2, figure 7).

One queue holds the step's rollouts; every engine claims from it. How many it claims at a time is
the policy. With N rollouts per engine fixed up front, engines that drew short trajectories idle at
the end while others overflow their KV cache, evict and compute again. Policies, plain functions of
the same few numbers (EngineView) to a number of rollouts to start now:

    static         a fixed dealt share at the start, nothing later
    static_groups  the same with whole groups on one engine (an order with group_chunk = group_size)
    capacity       the paper's: as many as fit the cache if all grew to the maximum, refilled
    expected       ours: as many as fit the cache as lengths were seen to come out, refilled

`capacity` never overflows and starts too few: most rollouts end long before the maximum. `expected`
asks the lengths seen in this run instead. S(x) = share of rollouts longer than x; one that holds x
tokens holds x + k in k steps with probability S(x + k) / S(x), else none. Summed over the running
ones this is the cache's mean and variance k steps ahead; new ones may fill what is left at each k.

Rollouts of one problem go together in length, so whole groups on one engine unbalance engines. The
queue is therefore dealt in runs of `group_chunk` rollouts a problem (queue_order). A claim, static
excepted, takes at most ceil(remaining / engines): else the first engine with room takes them all.
Ask again until the answer is 0, and whenever a rollout has finished.

Length and tokens mean all tokens of a trajectory that are in the cache: prompt, model, tool.
The file does not decide what an engine runs next (that is kvcache_engine's step plan) and moves no
rollout between engines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

NUM_BINS = 64  # resolution of the learned survival curve, and of the look ahead


@dataclass
class EngineView:
    """What a policy may know: numbers of its engine, tokens so far of the running rollouts (those
    that wait for a tool or for the cache included) and the lengths of finished trajectories."""

    num_engines: int
    total: int  # rollouts of the step, all engines
    remaining: int  # not yet claimed by any engine
    started: int  # claimed by this engine in this step
    cache_tokens: int  # size of this engine's cache
    max_tokens: int  # budget of one rollout
    max_seqs: int = 512
    running: list[tuple[str, int]] = field(default_factory=list)  # (problem id, tokens so far)
    ended: list[int] = field(default_factory=list)  # lengths that ended here in this step
    finished: Lengths | None = None  # of the run, this step's included


class Lengths:
    """Lengths of the finished trajectories of a run, and what they say of a running rollout."""

    def __init__(self, max_tokens: int):
        self.width = max_tokens / NUM_BINS  # tokens a bin
        self.by_problem = defaultdict(list)
        self.counts = np.zeros(NUM_BINS + 1)
        self.tables_at = -1

    def add(self, problem_id: str, length: int) -> None:
        self.by_problem[problem_id].append(length)
        self.counts[min(int(length / self.width), NUM_BINS)] += 1

    def tables(self, running: np.ndarray):
        """running (now,): number of running rollouts by bin. Returns held, variance (now, k): of
        the tokens in k bins of a rollout that is in bin now; work (now,): its expected final
        squared length. Made again when there is 1 % more to know. S is Kaplan and Meier's: the
        first to finish are short, and those that still run say so. With nothing finished S is 1
        up to the budget, which is what `capacity` takes it to be."""
        if self.counts.sum() > 1.01 * self.tables_at:
            self.tables_at = self.counts.sum()
            bins = np.arange(NUM_BINS + 1)
            reached = (self.counts + running)[::-1].cumsum()[::-1]
            hazard = np.append((self.counts / np.maximum(reached, 1))[:-1], 1.0)
            survival = np.append(1.0, np.cumprod(1 - hazard))[:-1]  # S
            ahead = bins[:, None] + bins  # (now, k)
            floor = np.maximum(survival, 1e-9)
            alive = np.append(survival, np.zeros(NUM_BINS))[ahead] / floor[:, None]
            tokens = ahead * self.width
            self.held, self.variance = alive * tokens, alive * (1 - alive) * tokens**2
            squared = ((bins + 0.5) * self.width) ** 2
            self.work = np.maximum(np.triu(survival * hazard * squared).sum(1) / floor, squared)
        return self.held, self.variance, self.work


# ---- the policies ----


def num_to_start(policy: str, view: EngineView) -> int:
    """How many rollouts this engine should claim now."""
    policies = dict(static=static, static_groups=static, capacity=capacity, expected=expected)
    if policy not in policies:
        raise ValueError(f"scheduler policy {policy!r}: choose one of {', '.join(policies)}")
    wanted = policies[policy](view)
    if policy.startswith("static"):
        return min(wanted, view.remaining)
    if not view.running:
        wanted = max(wanted, 1)  # a cache smaller than one budget must still make progress
    fair = -(-view.remaining // view.num_engines)
    return max(0, min(wanted, fair, view.max_seqs - len(view.running)))


def static(view: EngineView) -> int:
    return 0 if view.started else -(-view.total // view.num_engines)


def capacity(view: EngineView) -> int:
    return view.cache_tokens // view.max_tokens - len(view.running)


def expected(view: EngineView, risk: float = 1.0, overtime: float = 0.25) -> int:
    """The largest n with  mean(k) + risk * deviation(k) + n * k * S(k) <= cache  for all k, that
    leaves the engine's work (done and expected, in squared lengths: a token reads all before it)
    within its share. So the last rollouts go to engines that drew short ones. An engine beyond
    its share may go on when less than `overtime` of a share is left to do: shares are estimates."""
    now = [min(math.ceil(tokens / view.finished.width), NUM_BINS) for _, tokens in view.running]
    running = np.bincount(now, minlength=NUM_BINS + 1)  # (now,)
    held, variance, work = view.finished.tables(running)
    room = view.cache_tokens - running @ held - risk * np.sqrt(running @ variance)  # (k,)
    fit = (room / np.maximum(held[0], 1))[1:].min()

    share = work[0] * view.total / view.num_engines
    mine = sum(length**2 for length in view.ended) + running @ work
    left = running @ work - sum(tokens**2 for _, tokens in view.running)
    undone = max(share - mine, max(overtime, 1 / view.num_engines) * share - left) / work[0]
    return int(max(0, min(fit, math.ceil(undone))))


# ---- the queue ----


def queue_order(problem_ids, group_size: int, group_chunk: int, expected=None):
    """Dealt order of a step's rollouts as (problem index, rollout index), the same on all ranks.

    2 problems x 4, group_chunk 2 -> (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) (1,2) (1,3)
    expected: {problem id: length}; problems known to be long come first.
    """
    length = expected or {}
    problems = sorted(range(len(problem_ids)), key=lambda p: -length.get(problem_ids[p], 0))
    return [
        (p, rollout)
        for start in range(0, group_size, group_chunk)
        for p in problems
        for rollout in range(start, min(start + group_chunk, group_size))
    ]


class RolloutQueue:
    """One step's queue: an order that all ranks know and one counter in torch.distributed's store
    (a HashStore without torchrun). Use a new key for each step.

    The counter exists as long as any engine still generates: the last one to close deletes it, so
    that ranks can wait for each other by polling `finished()` instead of sitting in a collective.
    """

    def __init__(self, store, key: str, order, num_engines: int = 1):
        self.store, self.key, self.order, self.num_engines = store, key, order, num_engines
        store.add(key, 0)

    def claim(self, n: int) -> list:
        """The next n items; fewer at the end, none past it."""
        end = self.store.add(self.key, n)
        return self.order[end - n : end]

    def remaining(self) -> int:
        return max(0, len(self.order) - self.store.add(self.key, 0))

    def close(self) -> None:
        """This engine has finished all it claimed. It must not claim again."""
        if self.store.add(self.key + "/closed", 1) == self.num_engines:
            self.store.delete_key(self.key + "/closed")
            self.store.delete_key(self.key)

    def finished(self) -> bool:
        return not self.store.check([self.key])
