"""KV cache engine: many sequences generate at once and share one paged cache.

What agentic rollouts ask of it (paper section 3.2): 32 rollouts of a problem share their prompt; a
turn stops for a tool and goes on with the tool's tokens; nobody knows lengths beforehand; the
log-probability of every sampled token, of the distribution it was drawn from, goes to the trainer.

A sequence is its token_ids and num_computed: how many of them, from the first, have K and V in the
cache. Prefill, decode, a tool's response, recomputing after a preemption: all are "compute what is
missing", and a sequence with nothing missing samples its next token. Its life, and who does what:

    arrive   Engine.add          it is runnable; a request that can never fit is refused
    share    BlockManager.share  the longest cached prefix: full blocks get one more reference. It
                                 waits while an older one computes it: 32 rollouts, one prefill
             .copy_partial       a block that begins as it goes on is copied (copy on write)
    prefill  Engine.plan         chunks of what is missing, under the token budget of a step
             .remember           computed blocks become findable
    decode   Engine.plan         one token is missing: the one sampled in the step before
    stop     Engine.append       stop token or length limit: step() returns a Turn; while its tool
                                 runs the sequence is paused and keeps its blocks
    extend   Engine.extend       only the tool's tokens and the last sampled one are missing
    preempt  Engine.drop         memory is short: paused sequences lose their blocks first, then the
                                 youngest runnable ones; later they share and prefill again
    finish   Engine.finish       a block without references stays findable until BlockManager.grow
                                 takes it for something else, least recently used first

Noise is a function of (noise_key, position), and on a CPU the bits of a row depend on its own
sequence alone (kernels.py has the rule): a rollout comes out the same alone, among others, after
prefix hits and preemptions.

Dims: T rows of a step (tokens of all its sequences, no padding), S sequences, B those that sample,
H query heads, K key/value heads, D head dim, C hidden size, V vocabulary, M blocks of the longest.
Not here: graphs (decode is eager until a device has measured them), tensor parallelism (a 32B
policy fits one MI300X), which rollout goes to which engine (scheduler.py).

Run: python kvcache_engine.py --model DIR --prompt "..."
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import paged_decode_attention, paged_prefill_attention, sample, store_kv
from model import Model, load_model

MIN_ROWS = 4  # fp32 matmuls of 1-3 rows round otherwise than those of 4 and more
ROOT = 0  # the chain before a sequence's first block


@dataclass(eq=False)
class Sequence:
    id: object
    arrival: int  # smaller is older
    token_ids: list[int]
    noise_key: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    turn_start: int  # where the running turn's sampled tokens begin
    limit: int  # length at which the turn ends
    logprobs: list[float] = field(default_factory=list)  # of the running turn, as entropies
    entropies: list[float] = field(default_factory=list)
    last_sampled: int = -1  # index of the newest token that the model wrote
    num_computed: int = 0  # the first tokens, those with K and V in the cache
    num_once_computed: int = 0  # what is missing below this was dropped
    block_table: list[int] = field(default_factory=list)
    table_row: int = -1  # BlockManager.tables[table_row] mirrors block_table
    chain: int = ROOT  # serial of the last remembered block
    num_remembered: int = 0  # full blocks, see BlockManager.remember

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass
class Turn:
    """What a sequence sampled since add() or extend(), the stop token included."""
    seq_id: object
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    stop_reason: str  # stop | length


@dataclass
class Capacity:
    """What a scheduler may know of an engine."""
    block_size: int
    num_blocks: int
    free_blocks: int  # held by no sequence, those with findable content included
    num_running: int  # runnable and holding blocks
    num_waiting: int  # runnable without blocks
    num_paused: int  # between two turns
    may_need_blocks: int  # what all of them would take at their limits beyond what they hold
    tokens: dict[object, int]  # seq_id -> length so far


@dataclass
class Counters:
    """A token is found in the cache or computed once; all else is recomputed."""
    prefill: int = 0  # computed once, not sampled
    cached: int = 0
    recomputed: int = 0
    generated: int = 0  # sampled
    steps: int = 0
    idle: int = 0  # steps with nothing to run
    preempted: int = 0  # sequences that lost their blocks


# ---- blocks --------------------------------------------------------------------------------------


class BlockManager:
    """Who holds which block, and what can be found where.

    ref_counts[b] sequences hold block b; with 0 it is in `unreferenced`, least recently used first.
    Held or not, its content may be known: contents[b] = (chain, token_ids), `chain` being the
    serial of the full block before it. A serial is given once, so (chain, token_ids) stands for all
    tokens from the start, and a dict compares such keys by value: equal hashes mislead nobody.

        size 2, [5, 6, 7, 8, 9] -> (0, (5, 6)) serial 1, (1, (7, 8)) serial 2, (2, (9,)) not full

    Only a full block can have several holders, and a full block is never written again.
    """

    def __init__(self, num_blocks: int, block_size: int, max_len: int, prefix_cache: bool = True):
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.ref_counts = [0] * num_blocks
        self.unreferenced = OrderedDict.fromkeys(range(num_blocks))
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.serials: dict[int, int] = {}  # full block -> serial
        self.full: dict[tuple[int, tuple[int, ...]], int] = {}  # content -> full block
        self.newest: dict[int, int] = {}  # chain -> the block after it that was recorded last
        self.next_serial = itertools.count(ROOT + 1)
        self.copies: list[tuple[int, int]] = []  # (from, to), due before the step writes
        # Room for the worst case; zeros that nobody touches cost addresses, not memory.
        self.tables = np.zeros((num_blocks, -(-max_len // block_size)), np.int32)
        self.free_rows = list(range(num_blocks))[::-1]

    def share(self, seq: Sequence) -> None:
        """Gives a sequence without blocks the full blocks of its longest cached prefix. Its last
        token is always left to compute: what comes next is sampled from it."""
        size = self.block_size
        for start in range(0, len(seq.token_ids) - size, size):
            block = self.full.get((seq.chain, tuple(seq.token_ids[start : start + size])))
            if block is None:
                break
            self.unreferenced.pop(block, None)
            self.ref_counts[block] += 1
            seq.block_table.append(block)
            seq.chain = self.serials[block]
        seq.num_remembered, seq.num_computed = len(seq.block_table), len(seq.block_table) * size

    def copy_partial(self, seq: Sequence) -> None:
        """Copy on write: a block that begins as the sequence goes on is copied into the sequence's
        next one, on which the step at hand writes. Subtle: the source may be taken for something
        else in the same step, so all copies are read before anything is written."""
        source = self.newest.get(seq.chain)
        if source is None:
            return
        pairs = zip(seq.token_ids[seq.num_computed : -1], self.contents[source][1])
        num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_shared:
            self.copies.append((source, seq.block_table[seq.num_remembered]))
            seq.num_computed += num_shared

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        if seq.table_row < 0:
            seq.table_row = self.free_rows.pop()
            self.tables[seq.table_row, : len(seq.block_table)] = seq.block_table
        for _ in range(num_blocks):
            block, _ = self.unreferenced.popitem(last=False)
            self.forget(block)
            self.ref_counts[block] = 1
            self.tables[seq.table_row, len(seq.block_table)] = block
            seq.block_table.append(block)

    def release(self, seq: Sequence) -> None:
        """Last block first: a prefix outlives what follows it."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.unreferenced[block] = None
        if seq.table_row >= 0:
            self.free_rows.append(seq.table_row)
        seq.block_table, seq.table_row = [], -1
        seq.num_computed, seq.chain, seq.num_remembered = 0, ROOT, 0

    def remember(self, seq: Sequence, partial: bool = False) -> None:
        """Makes the full blocks that were computed findable; `partial`: the rest after them too."""
        while self.prefix_cache:
            num_left = seq.num_computed - seq.num_remembered * self.block_size
            is_full = num_left >= self.block_size
            if not is_full and not (partial and num_left):
                return
            chain, token_ids = self.next_content(seq)
            block, content = seq.block_table[seq.num_remembered], (chain, token_ids[:num_left])
            if content not in self.full:
                self.forget(block)
                self.contents[block] = content
                self.newest[chain] = block
            if not is_full:
                return
            first = self.full.setdefault(content, block)  # another may have had it before
            if first == block:
                self.serials[block] = next(self.next_serial)
            seq.chain = self.serials[first]
            seq.num_remembered += 1

    def next_content(self, seq: Sequence) -> tuple[int, tuple[int, ...]]:
        """Of its first block that is not remembered, as far as its tokens go."""
        start = seq.num_remembered * self.block_size
        return seq.chain, tuple(seq.token_ids[start : start + self.block_size])

    def forget(self, block: int) -> None:
        chain, token_ids = self.contents.pop(block, (None, None))
        if self.serials.pop(block, None):
            del self.full[chain, token_ids]
        if self.newest.get(chain) == block:
            del self.newest[chain]


# ---- the engine ----------------------------------------------------------------------------------


class Engine:
    """One model and its cache; at most max_num_seqs sequences and max_batch_tokens rows a step."""

    def __init__(self, model: Model, num_blocks: int, block_size: int = 16, max_num_seqs: int = 512,
                 max_batch_tokens: int = 2048, prefix_cache: bool = True):
        self.model, self.num_blocks, self.block_size = model, num_blocks, block_size
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.device, self.scale = next(model.parameters()).device, model.config.head_dim**-0.5
        self.max_len = min(num_blocks * block_size, model.config.max_positions)
        self.blocks = BlockManager(num_blocks, block_size, self.max_len, prefix_cache)
        self.sequences: dict[object, Sequence] = {}  # all of them: runnable or paused
        self.runnable: dict[object, Sequence] = {}
        self.paused: dict[object, Sequence] = {}  # between two turns, longest pause first
        self.arrivals = itertools.count()
        self.counters = Counters()
        model.pack()
        self.regrow_cache()

    def add(self, seq_id, token_ids: list[int], *, max_new_tokens: int, noise_key: int,
            stop_ids: tuple[int, ...] = (), temperature: float = 1.0, top_p: float = 1.0) -> None:
        """A new sequence; its first turn is sampled by step(). temperature 0 is greedy. noise_key
        (63 bits) and the position of a token decide what is drawn."""
        assert seq_id not in self.sequences, f"sequence {seq_id!r} is still here: finish() it first"
        self.check_fits(seq_id, len(token_ids), max_new_tokens)
        seq = Sequence(seq_id, next(self.arrivals), list(token_ids), noise_key, tuple(stop_ids),
                       float(temperature), float(top_p), turn_start=len(token_ids),
                       limit=len(token_ids) + max_new_tokens)
        self.sequences[seq_id] = self.runnable[seq_id] = seq

    def extend(self, seq_id, token_ids: list[int], max_new_tokens: int) -> None:
        """After a Turn: appends what the model did not write, and has the next turn sampled."""
        seq = self.sequences[seq_id]
        assert seq_id in self.paused, f"sequence {seq_id!r} is in the middle of a turn"
        self.check_fits(seq_id, len(seq.token_ids) + len(token_ids), max_new_tokens)
        seq.token_ids += token_ids
        seq.turn_start, seq.limit = len(seq.token_ids), len(seq.token_ids) + max_new_tokens
        self.runnable[seq_id] = self.paused.pop(seq_id)

    def check_fits(self, seq_id, num_tokens: int, max_new_tokens: int) -> None:
        if min(num_tokens, max_new_tokens) < 1 or num_tokens + max_new_tokens > self.max_len:
            raise ValueError(
                f"sequence {seq_id!r} can never run: {num_tokens} tokens and {max_new_tokens} new"
                f" ones (1 of each at least), room for {self.max_len}: {self.num_blocks} blocks of"
                f" {self.block_size}, if the model has the positions. Ask for fewer or add blocks"
            )

    def finish(self, seq_id) -> None:
        """Forgets a sequence, in a turn or between two. Its blocks stay findable for a while."""
        self.blocks.release(self.sequences.pop(seq_id))
        self.runnable.pop(seq_id, None)
        self.paused.pop(seq_id, None)

    abort = finish

    def generated(self, seq_id) -> list[int]:
        """What was sampled so far of the running turn; between two turns, of the last one."""
        seq = self.sequences[seq_id]
        return seq.token_ids[seq.turn_start :]

    def has_runnable(self) -> bool:
        return bool(self.runnable)

    def capacity(self) -> Capacity:
        seqs, size = self.sequences.values(), self.block_size
        running = sum(bool(s.block_table) for s in self.runnable.values())
        return Capacity(size, self.num_blocks, len(self.blocks.unreferenced), running,
                        len(self.runnable) - running, len(self.paused),
                        sum(-(-s.limit // size) - len(s.block_table) for s in seqs),
                        {s.id: len(s.token_ids) for s in seqs})

    # -- one step --

    @torch.inference_mode()
    def step(self) -> list[Turn]:
        """Computes what the plan says; each sequence that then has nothing missing samples a token.
        Returns the turns that ended."""
        plan = self.plan()
        self.counters.steps += 1
        self.counters.idle += not plan
        if not plan:
            return []
        hidden, sampling = self.compute(plan)
        self.account(plan)
        return self.append(sampling, self.sample(hidden, sampling)) if sampling else []

    def plan(self) -> dict[Sequence, int]:
        """The step plan: sequence -> how many of its missing tokens are computed now. The oldest is
        first and may take the memory of all others: it always advances, so all end. Then those that
        decode, then prefills, each by age."""
        order = sorted(self.runnable.values(), key=lambda s: s.arrival)
        order[1:] = sorted(order[1:], key=lambda s: s.num_missing > 1)
        plan, room, memory_is_full, being_computed = {}, self.max_batch_tokens, False, set()
        for seq in order:
            if room == 0 or len(plan) == self.max_num_seqs:
                break
            if seq.block_table:
                if not self.make_room(seq, plan):
                    continue
            elif memory_is_full:  # first come, first served
                continue
            else:
                self.blocks.share(seq)
                wait = self.blocks.next_content(seq) in being_computed
                if wait or not self.make_room(seq, plan, spare=len(plan)):
                    memory_is_full = not wait
                    self.blocks.release(seq)
                    continue
                self.blocks.copy_partial(seq)
                self.counters.cached += seq.num_computed
            plan[seq] = min(seq.num_missing, room)
            room -= plan[seq]
            if self.blocks.prefix_cache and seq.num_missing > 1:
                being_computed.add(self.blocks.next_content(seq))
        return plan

    def make_room(self, seq: Sequence, plan, spare: int = 0) -> bool:
        """Takes blocks for all tokens of a sequence; False if they cannot be had. Dropped for it
        are paused sequences, longest pause first, then runnable ones that are younger and not in
        the plan, youngest first. An admission needs `spare` blocks more, one for each sequence in
        the plan, and drops no runnable one: soon it would be dropped itself."""
        need = -(-len(seq.token_ids) // self.block_size) - len(seq.block_table)
        while len(self.blocks.unreferenced) < need + spare:
            victim = next((s for s in self.paused.values() if s.block_table), None)
            if victim is None and spare == 0:
                younger = (s for s in self.runnable.values() if s.arrival > seq.arrival)
                younger = (s for s in younger if s.block_table and s not in plan)
                victim = max(younger, key=lambda s: s.arrival, default=None)
            if victim is None:
                return False
            self.drop(victim)
        self.blocks.grow(seq, need)
        return True

    def drop(self, seq: Sequence) -> None:
        """Preemption: all tokens are missing again, but for what `share` finds later."""
        self.blocks.remember(seq, partial=True)
        self.blocks.release(seq)
        self.counters.preempted += 1

    def compute(self, plan) -> tuple[Tensor, list[Sequence]]:
        """One forward over T rows -> hidden (B, C) of those that sample, and their sequences.
        Rows: empty ones up to MIN_ROWS, sequences with one token, chunks of several tokens."""
        seqs, size = sorted(plan, key=lambda s: plan[s] > 1), self.block_size
        counts = np.array([plan[s] for s in seqs])
        lens = np.array([s.num_computed for s in seqs]) + counts  # context after this step
        ends = counts.cumsum()
        pad = max(0, MIN_ROWS - ends[-1])
        tables = self.blocks.tables[[s.table_row for s in seqs], : -(-max(lens) // size)]  # (S, M)

        rows = np.zeros((3, pad + ends[-1]), np.int64)
        token_ids, positions, slots = rows[:, pad:]
        token_ids[:] = [t for s, end in zip(seqs, lens) for t in s.token_ids[s.num_computed : end]]
        positions[:] = np.arange(ends[-1]) + np.repeat(lens - ends, counts)
        slots[:] = tables[np.repeat(np.arange(len(seqs)), counts), positions // size] * size
        slots += positions % size
        rows[2, :pad] = -1
        token_ids, positions, slots = torch.from_numpy(rows).to(self.device)
        attend = self.paged_attention(pad, counts, lens, tables, slots)
        if self.blocks.copies:
            source, target = torch.tensor(self.blocks.copies, device=self.device).unbind(1)
            for cache in (*self.k_cache, *self.v_cache):
                cache[target] = cache[source]
            self.blocks.copies.clear()
        last = {s: pad + e - 1 for s, n, e in zip(seqs, lens, ends) if n == len(s.token_ids)}
        index = [*last.values()] + [0] * (MIN_ROWS - len(last))
        index = torch.tensor(index, device=self.device)
        return self.model(token_ids, positions, attend, rows=index), [*last]

    def paged_attention(self, pad, counts, lens, tables, slots):
        """-> attend(layer, q (T, H, D), k (T, K, D), v (T, K, D)) -> (T, H, D) for this step."""
        n = int((counts == 1).sum())
        cu_seqlens = np.append(0, counts[n:].cumsum())
        cu_seqlens, lens, tables = (
            torch.from_numpy(x.astype(np.int32)).to(self.device) for x in (cu_seqlens, lens, tables)
        )
        decode = F.pad(tables[:n], (0, 0, pad, 0)), F.pad(lens[:n], (pad, 0)), self.scale
        prefill = cu_seqlens, lens[n:], tables[n:], self.scale
        split, chunks = pad + n, n < len(counts)  # the first `split` rows decode

        def attend(layer, q, k, v):
            caches, outs = (self.k_cache[layer], self.v_cache[layer]), []
            store_kv(k, v, *caches, slots)
            if split:
                outs.append(paged_decode_attention(q[:split], *caches, *decode))
            if chunks:
                outs.append(paged_prefill_attention(q[split:], *caches, *prefill))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        return attend

    def sample(self, hidden: Tensor, seqs: list[Sequence]) -> list[list]:
        """hidden (B, C) -> token_ids, logprobs, entropies as lists: one way to the host a step."""
        logits = self.model.logits(hidden)[: len(seqs)]  # (B, V)
        ints = [[s.noise_key for s in seqs], [len(s.token_ids) for s in seqs]]
        reals = [[s.temperature for s in seqs], [s.top_p for s in seqs]]
        settings = [row for x in (ints, reals) for row in torch.tensor(x).to(self.device)]
        drawn = sample(logits, *settings)
        return torch.stack([x.double() for x in drawn]).tolist()  # ids are exact in 53 bits

    def account(self, plan) -> None:
        """The plan's tokens have K and V now: counts them, makes new full blocks findable."""
        for seq, n in plan.items():
            start, end = seq.num_computed, seq.num_computed + n
            again = max(0, min(end, seq.num_once_computed) - start)
            sampled = start + again <= seq.last_sampled < end  # was counted as generated
            self.counters.recomputed += again
            self.counters.prefill += n - again - sampled
            seq.num_computed, seq.num_once_computed = end, max(end, seq.num_once_computed)
            given = n > 1 and end == len(seq.token_ids)  # a prompt ends: others may share its rest
            if given or end // self.block_size > seq.num_remembered:
                self.blocks.remember(seq, partial=given)

    def append(self, seqs: list[Sequence], drawn) -> list[Turn]:
        turns = []
        self.counters.generated += len(seqs)
        for seq, token_id, logprob, entropy in zip(seqs, *drawn):
            seq.last_sampled = len(seq.token_ids)
            seq.token_ids.append(int(token_id))
            seq.logprobs.append(logprob)
            seq.entropies.append(entropy)
            stopped = token_id in seq.stop_ids
            if stopped or len(seq.token_ids) == seq.limit:
                reason, sampled = "stop" if stopped else "length", self.generated(seq.id)
                turns.append(Turn(seq.id, sampled, seq.logprobs, seq.entropies, reason))
                seq.logprobs, seq.entropies = [], []
                self.paused[seq.id] = self.runnable.pop(seq.id)
        return turns

    # -- the cache and the weights --

    def drop_all(self) -> None:
        for seq in self.sequences.values():
            if seq.block_table:
                self.drop(seq)
        for block in [*self.blocks.contents]:
            self.blocks.forget(block)

    def release_cache(self) -> None:
        """Gives the cache's memory to others (training); sequences in flight are recomputed."""
        self.drop_all()
        self.k_cache = self.v_cache = None
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def regrow_cache(self) -> None:
        """A tensor a layer: below 2 GB each, AMD's buffer loads can be used. Zeroed: what attention
        masks is multiplied by 0, and 0 * NaN is NaN. (On a CPU numpy's zeros cost no memory, as
        long as nobody touches them.)"""
        config, dtype = self.model.config, next(self.model.parameters()).dtype
        shape = self.num_blocks, self.block_size, config.num_kv_heads, config.head_dim
        size = math.prod(shape) * dtype.itemsize
        lazy = lambda: torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
        eager = lambda: torch.zeros(shape, dtype=dtype, device=self.device)
        zeros = lazy if self.device.type == "cpu" else eager
        self.k_cache = [zeros() for _ in range(config.num_layers)]
        self.v_cache = [zeros() for _ in range(config.num_layers)]

    @torch.no_grad()
    def update_weights(self, named_tensors) -> None:
        """(name, tensor) as Model.named_parameters() gives them; FSDP2's are made whole one at a
        time, a collective: every rank must call this. Nothing that the old weights computed stays
        in the cache; sequences in flight are recomputed."""
        self.drop_all()
        mine = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            assert name in mine, f"the engine's model has no {name}: are the two configs equal?"
            mine.pop(name).copy_(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        assert not mine, f"no new values for {sorted(mine)}: give all parameters of the model"
        self.model.pack()


def blocks_that_fit(model: Model, memory_share: float = 0.9, **engine_args) -> int:
    """GPU: how many blocks fit beside the weights and the largest step, max_batch_tokens rows of
    which max_num_seqs sample: it is run once to see its peak."""
    engine = Engine(model, num_blocks=4096, **engine_args)
    num_seqs = min(engine.max_num_seqs, engine.max_batch_tokens)
    for i in range(num_seqs):
        engine.add(i, [i] * (engine.max_batch_tokens // num_seqs), max_new_tokens=1, noise_key=i)
    torch.cuda.reset_peak_memory_stats(engine.device)
    engine.step()
    free, total = torch.cuda.mem_get_info(engine.device)
    not_ours = total - free - torch.cuda.memory_reserved(engine.device)
    room = total * memory_share - not_ours - torch.cuda.max_memory_allocated(engine.device)
    block_bytes = 2 * len(engine.k_cache) * engine.k_cache[0][0].nbytes
    return engine.num_blocks + int(room // block_bytes)


def engine_from_folder(folder, cache_tokens: int, device=None, block_size: int = 16) -> Engine:
    """An engine for a model folder (config.json, safetensors) with room for cache_tokens tokens."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, device, torch.float32 if device == "cpu" else torch.bfloat16)
    return Engine(model.eval(), -(-cache_tokens // block_size), block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Continues a text, streamed to the terminal.")
    parser.add_argument("--model", required=True, help="folder: config, weights, tokenizer.json")
    parser.add_argument("--prompt", required=True, help="taken as it is, control tokens included")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--device", help="cpu or cuda; default: what is there")
    args = parser.parse_args()
    from tokenizer import Tokenizer  # only here: the engine knows no text

    try:
        tok = Tokenizer.from_file(f"{args.model}/tokenizer.json")
        prompt = tok.encode(args.prompt)
        engine = engine_from_folder(args.model, len(prompt) + args.max_tokens, args.device)
        engine.add(0, prompt, max_new_tokens=args.max_tokens, noise_key=args.seed,
                   stop_ids=(tok.im_end,), temperature=args.temperature)
    except (OSError, ValueError) as error:
        sys.exit(f"kvcache_engine.py: {error}")
    stream, times = tok.stream(), [time.monotonic()]
    while engine.has_runnable():
        engine.step()
        for token_id in engine.generated(0)[len(times) - 1 :]:  # none yet after a chunk of prefill
            print(stream.push(token_id), end="", flush=True)
            times.append(time.monotonic())
    first, rest, n = times[1] - times[0], times[-1] - times[1], len(times) - 1
    print(f"\n\n{len(prompt)} prompt tokens, the first new one after {first:.2f} s")
    print(f"{n} new tokens, {(n - 1) / max(rest, 1e-9):.1f} a second after the first")


if __name__ == "__main__":
    main()
