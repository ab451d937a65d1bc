"""KV cache engine: many sequences generate at once, sharing one paged cache.

What agentic rollouts ask of an engine (paper section 3.2): 32 rollouts of one problem share their
prompt; a turn stops for a tool and goes on later, with the tool's tokens appended; lengths are
unknown beforehand; the log-probability of every sampled token goes to the trainer.

The life of a sequence, and the functions that do each thing:

    arrive    Engine.add        it joins `runnable`; a request that can never fit is refused
    share     BlockManager.share    its longest cached prefix: full blocks are referenced, a partly
                                equal block is copied, as its rest will be written (copy on write).
                                If an older sequence computes its next block in this very step, it
                                waits one step and finds the block then: 32 rollouts, one prefill
    prefill   Engine.plan       as many of its missing tokens as the token budget of a step leaves;
                                BlockManager.remember makes computed blocks findable
    decode    Engine.plan       one missing token: the one sampled in the step before
    stop      Engine.end_turn   a stop token or the turn's limit: step() returns a Turn. It is
                                `paused` (its tool runs) and keeps its blocks
    extend    Engine.extend     tool tokens are appended; only these and the last sampled token are
                                missing: nothing is prefilled again
    preempt   Engine.drop       memory is short: paused sequences lose their blocks first, then the
                                youngest runnable ones. Missing is now everything: they `share` and
                                `prefill` again, from tokens
    finish    Engine.finish     the blocks lose a reference; those without one stay findable until
                                BlockManager.allocate takes them, least recently used first

One rule moves everything: a sequence is its token_ids and num_computed, how many of them have K and
V in the cache. Prefill, decode, a tool's response and recomputing after preemption are all "compute
what is missing"; whoever has nothing missing after a step samples its next token.

Dims: T rows of a step (tokens of all its sequences, one behind the other, without padding), B
sequences that sample, H query heads, K key/value heads, D head dim, C hidden size, V vocabulary, N
blocks, M blocks of the longest sequence of the step.

Sampling noise depends on (noise_key, position) and, on the CPU, every row's bits on its own sequence
alone (kernels.py has the rule): a rollout comes out the same alone, among others, with prefix hits
and after preemption. Log-probabilities and entropies are of the distribution sampled from.

Not here: graphs (decode is eager until a device has measured them), tensor parallelism (a 32B policy
fits one MI300X), speculative decoding. Which rollout goes to which engine: scheduler.py.

Run: python kvcache_engine.py --model DIR --prompt "..."
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import paged_decode_attention, paged_prefill_attention, sample, store_kv
from model import Model

MIN_ROWS = 4  # fp32 matmuls of 1-3 rows round otherwise than those of 4 and more
ROOT = 0  # the chain before a sequence's first block


@dataclass(eq=False)
class Sequence:
    id: object
    arrival: int  # age: smaller is older
    token_ids: list[int]
    limit: int  # len(token_ids) at which the turn ends
    noise_key: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    turn_start: int  # where the running turn's sampled tokens begin
    logprobs: list[float] = field(default_factory=list)  # of the running turn
    entropies: list[float] = field(default_factory=list)  # of the running turn
    num_computed: int = 0  # the first tokens, those with K and V in the cache
    num_once_computed: int = 0  # what is missing below was dropped: computing it is recomputing
    last_sampled: int = -1  # index of the newest token that the model wrote
    block_table: list[int] = field(default_factory=list)
    table_row: int = -1  # row of BlockManager.tables that mirrors block_table
    chain: int = ROOT  # serial of the last remembered full block
    num_remembered: int = 0  # full blocks

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass
class Turn:
    """What one sequence sampled since add() or extend(), the stop token included. All same length."""

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
    free_blocks: int  # held by no sequence, those with cached content included
    num_running: int  # sequences with blocks and tokens to compute
    num_waiting: int  # sequences with tokens to compute and no blocks
    num_paused: int  # sequences between two turns
    may_need_blocks: int  # what all of them would take beyond what they hold, at their limits
    tokens: dict[object, int]  # seq_id -> length so far


@dataclass
class Counters:
    """Tokens, but for steps, idle and preempted. Every token of a sequence is computed once (prefill
    if it was given, generated if it was sampled) or found in the cache; more is recomputed."""

    prefill: int = 0
    cached: int = 0
    recomputed: int = 0
    generated: int = 0
    steps: int = 0
    idle: int = 0  # calls of step() with nothing to run
    preempted: int = 0  # sequences


# ---- blocks --------------------------------------------------------------------------------------


class BlockManager:
    """Who holds which block, and what can be found where.

    A block is held by ref_counts[b] sequences, or is in `unreferenced`, least recently used first.
    Either way its content may be known: contents[b] = (chain, token_ids), where `chain` is the
    serial of the full block before it. A serial is given once and never again, so that the dict key
    (chain, token_ids) stands for all tokens from the start, compared by value: no hash can collide.

        block_size 2, [5, 6, 7, 8, 9] -> block 3: (0, (5, 6)) serial 1; block 1: (1, (7, 8)) serial 2;
                                         block 4: (2, (9,)), not full: no serial, only in `newest`

    Only full blocks have more than one holder, and a full block is never written.
    """

    def __init__(self, num_blocks: int, block_size: int, max_len: int, prefix_cache: bool = True):
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.ref_counts = [0] * num_blocks
        self.unreferenced = OrderedDict.fromkeys(range(num_blocks))
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.serials: dict[int, int] = {}  # full block -> serial
        self.full: dict[tuple[int, tuple[int, ...]], int] = {}  # content -> full block
        self.newest: dict[int, int] = {}  # chain -> the block after it that was remembered last
        self.next_serial = itertools.count(ROOT + 1)
        self.copies: list[tuple[int, int]] = []  # (from, to), due before the step's first write
        # Zeros are not touched before use: rows for the worst case cost address space only.
        width = min(num_blocks, -(-max_len // block_size))
        self.tables = np.zeros((num_blocks, width), np.int32)
        self.free_rows = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self.unreferenced)

    def allocate(self) -> int:
        block, _ = self.unreferenced.popitem(last=False)
        self.forget(block)
        self.ref_counts[block] = 1
        return block

    def share(self, seq: Sequence) -> None:
        """Gives a sequence without blocks the full blocks of its longest cached prefix. At least
        its last token is left to compute: there is no next token without."""
        assert not seq.block_table, f"{seq.id} already holds {len(seq.block_table)} blocks"
        size = self.block_size
        for start in range(0, len(seq.token_ids) - size, size):
            block = self.full.get((seq.chain, tuple(seq.token_ids[start : start + size])))
            if block is None:
                break
            self.unreferenced.pop(block, None)
            self.ref_counts[block] += 1
            seq.block_table.append(block)
            seq.chain = self.serials[block]
        seq.num_remembered = len(seq.block_table)
        seq.num_computed = seq.num_remembered * size

    def copy_partial(self, seq: Sequence) -> None:
        """Copy on write: a block that begins as the sequence goes on is copied into its next block,
        which the step at hand writes on. Subtle: the source may be allocated anew in the same step;
        all copies are read before anything is written."""
        source = self.newest.get(seq.chain)
        if source is None:
            return
        num_shared = 0
        for mine, theirs in zip(seq.token_ids[seq.num_computed : -1], self.contents[source][1]):
            if mine != theirs:
                break
            num_shared += 1
        if num_shared:
            self.copies.append((source, seq.block_table[seq.num_remembered]))
            seq.num_computed += num_shared

    def num_needed(self, seq: Sequence) -> int:
        """Blocks that the tokens of a sequence take beyond those it holds."""
        return -(-len(seq.token_ids) // self.block_size) - len(seq.block_table)

    def grow(self, seq: Sequence) -> None:
        if seq.table_row < 0:
            seq.table_row = self.free_rows.pop()
            self.tables[seq.table_row, : len(seq.block_table)] = seq.block_table
        for _ in range(self.num_needed(seq)):
            seq.block_table.append(self.allocate())
            self.tables[seq.table_row, len(seq.block_table) - 1] = seq.block_table[-1]

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
        """Makes the full blocks that were computed findable; `partial`: the rest behind them too."""
        size = self.block_size
        while self.prefix_cache:
            start = seq.num_remembered * size
            token_ids = tuple(seq.token_ids[start : min(start + size, seq.num_computed)])
            if len(token_ids) < size:
                if partial and token_ids:
                    self.record(seq.block_table[seq.num_remembered], seq.chain, token_ids)
                return
            block = seq.block_table[seq.num_remembered]
            twin = self.full.get((seq.chain, token_ids))  # the same content was computed elsewhere
            if twin is None:
                self.record(block, seq.chain, token_ids)
                self.full[seq.chain, token_ids] = twin = block
                self.serials[block] = next(self.next_serial)
            seq.chain = self.serials[twin]
            seq.num_remembered += 1

    def record(self, block: int, chain: int, token_ids: tuple[int, ...]) -> None:
        self.forget(block)
        self.contents[block] = chain, token_ids
        self.newest[chain] = block

    def forget(self, block: int) -> None:
        if block not in self.contents:
            return
        chain, token_ids = self.contents.pop(block)
        if self.serials.pop(block, None) is not None:
            del self.full[chain, token_ids]
        if self.newest.get(chain) == block:
            del self.newest[chain]

    def forget_all(self) -> None:
        for block in list(self.contents):
            self.forget(block)

    def next_content(self, seq: Sequence) -> tuple[int, tuple[int, ...]]:
        """What the first block that is not yet remembered will hold, as far as tokens are known."""
        start = seq.num_remembered * self.block_size
        return seq.chain, tuple(seq.token_ids[start : start + self.block_size])


# ---- the engine ----------------------------------------------------------------------------------


class Engine:
    """One model and its cache. max_num_seqs sequences and max_batch_tokens rows a step at most."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 512,
        max_batch_tokens: int = 2048,
        prefix_cache: bool = True,
    ):
        self.model, self.num_blocks, self.block_size = model, num_blocks, block_size
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.device = next(model.parameters()).device
        self.scale = model.config.head_dim**-0.5
        self.blocks = BlockManager(
            num_blocks, block_size, model.config.max_positions, prefix_cache
        )
        self.sequences: dict[object, Sequence] = {}
        self.runnable: dict[object, Sequence] = {}
        self.paused: dict[object, Sequence] = {}  # between two turns, longest first
        self.arrivals = itertools.count()
        self.counters = Counters()
        self.regrow_cache()

    # -- what a caller does with a sequence --

    def add(
        self,
        seq_id,
        token_ids: list[int],
        *,
        max_new_tokens: int,
        noise_key: int,
        stop_ids: tuple[int, ...] = (),
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> None:
        """A new sequence; step() samples its first turn of at most max_new_tokens. temperature 0 is
        greedy. noise_key (63 bits) and a token's position decide what is sampled."""
        if seq_id in self.sequences:
            raise ValueError(f"sequence {seq_id!r} is still in the engine: finish() it first")
        if not token_ids:
            raise ValueError(f"sequence {seq_id!r} has no tokens: a prompt needs at least one")
        n = len(token_ids)
        self.check_fits(seq_id, n, max_new_tokens)
        seq = Sequence(
            seq_id, next(self.arrivals), list(token_ids), n + max_new_tokens,
            noise_key, tuple(stop_ids), temperature, top_p, turn_start=n,
        )  # fmt: skip
        self.sequences[seq_id] = self.runnable[seq_id] = seq

    def extend(self, seq_id, token_ids: list[int], max_new_tokens: int) -> None:
        """After a Turn: appends what the model did not write, then samples the next turn."""
        seq = self.sequences[seq_id]
        assert seq_id in self.paused, f"sequence {seq_id!r} is in the middle of a turn"
        self.check_fits(seq_id, len(seq.token_ids) + len(token_ids), max_new_tokens)
        seq.token_ids += token_ids
        seq.turn_start = len(seq.token_ids)
        seq.limit = seq.turn_start + max_new_tokens
        self.runnable[seq_id] = self.paused.pop(seq_id)

    def finish(self, seq_id) -> None:
        """Forgets a sequence, in a turn or between two. Its blocks stay findable for a while."""
        seq = self.sequences.pop(seq_id)
        self.runnable.pop(seq_id, None)
        self.paused.pop(seq_id, None)
        self.blocks.release(seq)

    abort = finish

    def generated(self, seq_id) -> list[int]:
        """What the running turn (or the last one, between two) has sampled so far."""
        seq = self.sequences[seq_id]
        return seq.token_ids[seq.turn_start :]

    def has_runnable(self) -> bool:
        return bool(self.runnable)

    def capacity(self) -> Capacity:
        live = self.sequences.values()
        running = sum(1 for s in self.runnable.values() if s.block_table)
        at_limit = sum(-(-s.limit // self.block_size) - len(s.block_table) for s in live)
        return Capacity(
            self.block_size, self.num_blocks, self.blocks.num_free, running,
            len(self.runnable) - running, len(self.paused), at_limit,
            {s.id: len(s.token_ids) for s in live},
        )  # fmt: skip

    def check_fits(self, seq_id, num_tokens: int, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"sequence {seq_id!r}: max_new_tokens is {max_new_tokens}, not positive")
        total, max_positions = num_tokens + max_new_tokens, self.model.config.max_positions
        if total > min(self.num_blocks * self.block_size, max_positions):
            raise ValueError(
                f"sequence {seq_id!r} can never fit: {num_tokens} tokens and {max_new_tokens} new ones"
                f" are {total}, the cache has {self.num_blocks} blocks of {self.block_size}"
                f" = {self.num_blocks * self.block_size} tokens and the model takes"
                f" {max_positions}: give the engine more blocks or ask for fewer"
            )

    # -- one step --

    @torch.inference_mode()
    def step(self) -> list[Turn]:
        """Computes what the plan says and samples one token for each sequence that then has nothing
        missing. Returns the turns that ended."""
        plan = self.plan()
        self.counters.steps += 1
        if not plan:
            self.counters.idle += 1
            return []
        hidden, sampling = self.compute(plan)
        self.account(plan)
        return self.append(sampling, self.sample(hidden, sampling)) if sampling else []

    def plan(self) -> dict[Sequence, int]:
        """The step plan: sequence -> how many of its missing tokens are computed now.

        The oldest goes first and can take the memory of all others: it always advances, so everything
        ends. Then those that decode, then prefills in chunks, each by age.
        """
        order = sorted(self.runnable.values(), key=lambda s: s.arrival)
        order[1:] = sorted(order[1:], key=lambda s: s.num_missing > 1)
        plan, room, no_admission, being_computed = {}, self.max_batch_tokens, False, set()
        for seq in order:
            if room == 0 or len(plan) == self.max_num_seqs:
                break
            if not seq.block_table:
                if no_admission:
                    continue
                self.blocks.share(seq)
                wait = self.blocks.next_content(seq) in being_computed
                if wait or not self.make_room(seq, plan, spare=len(plan)):
                    self.blocks.release(seq)
                    no_admission = not wait  # first come, first served
                    continue
                self.blocks.copy_partial(seq)
                self.counters.cached += seq.num_computed
            elif not self.make_room(seq, plan):
                continue
            plan[seq] = min(seq.num_missing, room)
            room -= plan[seq]
            if self.blocks.prefix_cache and seq.num_missing > 1:
                being_computed.add(self.blocks.next_content(seq))
        return plan

    def make_room(self, seq: Sequence, plan, spare: int = 0) -> bool:
        """Blocks for all tokens of a sequence; False if there are not enough.

        Short of memory, paused sequences are dropped, longest pause first; then runnable ones that
        are younger than this and not in the plan, youngest first, but for an admission only if the
        plan is empty. An admission leaves a block to spare for each sequence of the plan: without,
        it would soon be dropped again.
        """
        while self.blocks.num_free < self.blocks.num_needed(seq) + spare:
            victims = [s for s in self.paused.values() if s.block_table]
            if not victims and not spare:
                victims = [
                    s for s in self.runnable.values()
                    if s.block_table and s.arrival > seq.arrival and s not in plan
                ]  # fmt: skip
                victims.sort(key=lambda s: -s.arrival)
            if not victims:
                return False
            self.drop(victims[0])
        self.blocks.grow(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        """Takes all blocks of a sequence; it is recomputed from its tokens when it runs again."""
        self.blocks.remember(seq, partial=True)
        self.blocks.release(seq)
        self.counters.preempted += 1

    def compute(self, plan) -> tuple[Tensor, list[Sequence]]:
        """One forward over all rows -> hidden (B, C) of the rows that sample, and their sequences.

        Rows: sequences with one token, then empty rows up to MIN_ROWS, then chunks of several tokens.
        """
        seqs = [s for s, n in plan.items() if n == 1]
        rows = [(s.token_ids[s.num_computed], s.num_computed, self.slot(s)) for s in seqs]
        num_empty = max(0, MIN_ROWS - sum(plan.values()))
        seqs += [None] * num_empty
        rows += [(0, 0, -1)] * num_empty
        num_single = len(seqs)
        for seq, n in plan.items():
            if n > 1:
                seqs.append(seq)
                rows += self.chunk_rows(seq, n)
        ends = [*itertools.accumulate(plan[s] if s else 1 for s in seqs)]
        lens = [s.num_computed + plan[s] if s else 0 for s in seqs]

        self.copy_blocks()
        token_ids, positions, slots = torch.tensor([*zip(*rows)]).to(self.device)  # (T,) each
        attend = self.paged_attention(seqs, num_single, lens, ends, slots)
        hidden = self.model(token_ids, positions, attend)  # (T, C)

        last = [(s, e - 1) for s, e in zip(seqs, ends) if s and plan[s] == s.num_missing]
        index = [row for _, row in last]
        index += index[:1] * (MIN_ROWS - len(index))  # the head is a matmul too
        index = torch.tensor(index, dtype=torch.int64, device=self.device)
        return hidden[index], [seq for seq, _ in last]

    def slot(self, seq: Sequence) -> int:
        block, offset = divmod(seq.num_computed, self.block_size)
        return seq.block_table[block] * self.block_size + offset

    def chunk_rows(self, seq: Sequence, n: int):
        """(token id, position, slot) of the next n missing tokens."""
        start, end = seq.num_computed, seq.num_computed + n
        at = np.arange(start, end)
        blocks = self.blocks.tables[seq.table_row, at // self.block_size]
        slots = blocks * self.block_size + at % self.block_size
        return zip(seq.token_ids[start:end], range(start, end), slots.tolist())

    def paged_attention(self, seqs, num_single, lens, ends, slots):
        """-> attend(layer, q (T, H, D), k (T, K, D), v (T, K, D)) -> (T, H, D) for this step: the
        first num_single rows decode, the others are chunks that end at row ends[i]."""
        width = max(len(s.block_table) for s in seqs if s)  # M
        tables = self.blocks.tables[[s.table_row if s else 0 for s in seqs], :width]
        single_tables, chunk_tables = self.int32(tables).tensor_split([num_single])
        single_lens, chunk_lens = self.int32(lens).tensor_split([num_single])
        cu_seqlens = self.int32([num_single, *ends[num_single:]]) - num_single

        def attend(layer, q, k, v):
            caches, outs = (self.k_cache[layer], self.v_cache[layer]), []
            store_kv(k, v, *caches, slots)
            if num_single:
                rows = q[:num_single]
                outs.append(
                    paged_decode_attention(rows, *caches, single_tables, single_lens, self.scale)
                )
            if len(chunk_lens):
                rows = q[num_single:]
                where = cu_seqlens, chunk_lens, chunk_tables
                outs.append(paged_prefill_attention(rows, *caches, *where, self.scale))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        return attend

    def int32(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def sample(self, hidden: Tensor, sampling: list[Sequence]) -> list[list]:
        """hidden (B, C) -> token_ids, logprobs, entropies as lists: one way to the host a step."""
        logits = self.model.logits(hidden)[: len(sampling)]  # (B, V)
        keys, positions = torch.tensor(
            ([s.noise_key for s in sampling], [len(s.token_ids) for s in sampling])
        ).to(self.device)
        temperature, top_p = torch.tensor(
            ([float(s.temperature) for s in sampling], [float(s.top_p) for s in sampling])
        ).to(self.device)
        drawn = sample(logits, keys, positions, temperature, top_p)
        return torch.stack([x.double() for x in drawn]).tolist()  # ids are exact in 53 bits

    def account(self, plan) -> None:
        """The plan's tokens have K and V now: counts them and makes new full blocks findable."""
        for seq, n in plan.items():
            start, end = seq.num_computed, seq.num_computed + n
            again = max(0, min(end, seq.num_once_computed) - start)
            sampled = start + again <= seq.last_sampled < end  # counted when it was generated
            self.counters.recomputed += again
            self.counters.prefill += n - again - sampled
            seq.num_computed, seq.num_once_computed = end, max(end, seq.num_once_computed)
            given = n > 1 and end == len(seq.token_ids)  # the end of a prompt: others may share it
            if given or end // self.block_size > seq.num_remembered:
                self.blocks.remember(seq, partial=given)

    def append(self, sampling, drawn) -> list[Turn]:
        turns = []
        self.counters.generated += len(sampling)
        for seq, token_id, logprob, entropy in zip(sampling, *drawn):
            token_id = int(token_id)
            seq.last_sampled = len(seq.token_ids)
            seq.token_ids.append(token_id)
            seq.logprobs.append(logprob)
            seq.entropies.append(entropy)
            if token_id in seq.stop_ids:
                turns.append(self.end_turn(seq, "stop"))
            elif len(seq.token_ids) == seq.limit:
                turns.append(self.end_turn(seq, "length"))
        return turns

    def end_turn(self, seq: Sequence, stop_reason: str) -> Turn:
        sampled = seq.token_ids[seq.turn_start :]
        turn = Turn(seq.id, sampled, seq.logprobs, seq.entropies, stop_reason)
        seq.logprobs, seq.entropies = [], []
        self.paused[seq.id] = self.runnable.pop(seq.id)
        return turn

    # -- the cache and the weights --

    def copy_blocks(self) -> None:
        if self.blocks.copies:
            source, target = torch.tensor(self.blocks.copies, device=self.device).unbind(1)
            for cache in (*self.k_cache, *self.v_cache):
                cache[target] = cache[source]
            self.blocks.copies.clear()

    def drop_all(self) -> None:
        for seq in self.sequences.values():
            if seq.block_table:
                self.drop(seq)
        self.blocks.forget_all()

    def release_cache(self) -> None:
        """Gives the cache's memory back, e.g. to training; sequences in flight are recomputed."""
        self.drop_all()
        self.k_cache = self.v_cache = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def regrow_cache(self) -> None:
        """A tensor a layer: below 2 GB each, AMD's buffer loads can be used. Zeroed: attention
        multiplies what is masked by 0, and 0 * NaN is NaN."""
        config, dtype = self.model.config, next(self.model.parameters()).dtype
        shape = (self.num_blocks, self.block_size, config.num_kv_heads, config.head_dim)
        self.k_cache, self.v_cache = (
            [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(config.num_layers)]
            for _ in range(2)
        )

    @torch.no_grad()
    def update_weights(self, named_tensors) -> None:
        """named_tensors: (name, tensor) as Model.named_parameters() gives them, plain or FSDP2's
        DTensors; one at a time is made whole (a collective: every rank must call this) and copied.
        Nothing of the old weights stays in the cache: a sequence in flight is recomputed."""
        self.drop_all()
        mine = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            if name not in mine:
                raise ValueError(f"the engine's model has no {name}: are the two configs equal?")
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            mine.pop(name).copy_(whole)
        if mine:
            raise ValueError(f"no new values for {sorted(mine)}: give all parameters of the model")


# ---- around the engine ---------------------------------------------------------------------------


def generate(engine: Engine, prompts: list[list[int]], max_new_tokens: list[int], **how):
    """One Turn for each prompt, in order. `how` is add()'s; noise keys are 0, 1, 2, ..."""
    turns = {}
    for i, (prompt, n) in enumerate(zip(prompts, max_new_tokens)):
        engine.add(("generate", i), prompt, max_new_tokens=n, noise_key=i, **how)
    while len(turns) < len(prompts):
        for turn in engine.step():
            turns[turn.seq_id] = turn
            engine.finish(turn.seq_id)
    return [turns["generate", i] for i in range(len(prompts))]


def blocks_that_fit(model: Model, memory_share: float = 0.9, **engine_args) -> int:
    """GPU: how many blocks fit beside the weights and the largest step. That step is run once to see
    its peak: max_batch_tokens rows, of which as many as possible sample."""
    engine = Engine(model, num_blocks=4096, **engine_args)
    rows, device = engine.max_batch_tokens, engine.device
    num_seqs = min(engine.max_num_seqs, rows)
    torch.cuda.reset_peak_memory_stats(device)
    generate(engine, [[i] * (rows // num_seqs) for i in range(num_seqs)], [1] * num_seqs)
    free, total = torch.cuda.mem_get_info(device)
    not_ours = total - free - torch.cuda.memory_reserved(device)
    room = total * memory_share - not_ours - torch.cuda.max_memory_allocated(device)
    block_bytes = 2 * len(engine.k_cache) * engine.k_cache[0][0].nbytes
    return engine.num_blocks + int(room // block_bytes)


def engine_from_folder(folder, cache_tokens: int, device=None, block_size: int = 16) -> Engine:
    """An engine for a model folder (config.json, safetensors) with room for cache_tokens tokens."""
    from model import load_model

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, device, torch.float32 if device == "cpu" else torch.bfloat16)
    return Engine(model, num_blocks=-(-cache_tokens // block_size), block_size=block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Continues a text, streamed to the terminal.")
    parser.add_argument("--model", required=True, help="folder: config, safetensors, tokenizer.json")
    parser.add_argument("--prompt", required=True, help="taken as it is, control tokens included")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--device", help="cpu or cuda; default: what is there")
    args = parser.parse_args()
    from tokenizer import Tokenizer  # only here: the engine itself knows no text

    try:
        tok = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
        prompt = tok.encode(args.prompt)
        engine = engine_from_folder(args.model, len(prompt) + args.max_tokens, args.device)
        engine.add(
            0, prompt, max_new_tokens=args.max_tokens, noise_key=args.seed, stop_ids=(tok.im_end,),
            temperature=args.temperature, top_p=args.top_p,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        sys.exit(f"kvcache_engine.py: {error}")
    stream, begin, seconds = tok.stream(), time.monotonic(), []
    while engine.has_runnable():
        engine.step()
        print(stream.push(engine.generated(0)[-1]), end="", flush=True)
        seconds.append(time.monotonic() - begin)
    rate = (len(seconds) - 1) / max(seconds[-1] - seconds[0], 1e-9)
    print(f"\n\n{len(prompt)} prompt tokens, first token after {seconds[0]:.2f} s")
    print(f"{len(seconds)} new tokens, {rate:.1f} tokens/s after the first")


if __name__ == "__main__":
    main()
