"""Data: Problem -> Trajectory -> Group -> Batch, the one river that every file steps into.

    Problem      a question and its label
    Trajectory   the record of one rollout: every token, who wrote it, every tool call, the reward
    Group        the N trajectories of one problem in one step; resampling maps Group to Group
    Batch        kept trajectories packed into flat tensors, the only form that the trainer sees

Facts are recorded when they happen; no field is later overwritten by a derived value. Tokens are
the truth: text is decoded from them to be read, never encoded again.

RL data (section 4.2) come from three sources: 17K of DAPO, 93K of OpenMathReasoning, 937 of Project
Euler, 42K after filters that the paper names without code. RECIPE says which filter it applies to
which source; near duplicates and leaked answers are ours. One source at a time, then all together:

    python data.py filter --recipe openmath --samples samples.jsonl --eval aime.jsonl math500.jsonl \\
        --out openmath.rl.jsonl OpenMathReasoning.jsonl
    python data.py filter --recipe all --out rl.jsonl dapo.rl.jsonl openmath.rl.jsonl euler.rl.jsonl
    python data.py show rl.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

# Statuses that count as errors in Eq. 4; `lost` is our own fault and in neither number.
TOOL_ERRORS = ("error", "timeout", "memory", "output", "malformed", "refused")
SEGMENT_KINDS = ("prompt", "forced", "model", "separator", "tool")
STOP_REASONS = ("stopped", "length", "turns", "wall")


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str
    source: str = ""


@dataclass
class ToolCall:
    """One call as it happened. status: ok | empty | error | timeout | memory | output | lost (from
    the sandbox), malformed (could not be parsed) or refused (beyond the cap of a turn)."""

    turn: int
    name: str
    code: str
    input: str
    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0  # CPU seconds, measured by the sandbox's parent

    @property
    def failed(self) -> bool:
        return self.status in TOOL_ERRORS


@dataclass
class Trajectory:
    """The record of one rollout. token_ids, loss_mask, logprobs, entropies have one entry a token;
    logprobs and entropies are 0.0 where the model did not sample (loss_mask 0)."""

    problem: Problem
    rollout: int  # index in its group
    step: int
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # engine's, of what was sampled from
    entropies: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    segments: list[tuple[int, int, str]] = field(default_factory=list)  # (start, end, kind)
    num_turns: int = 0  # assistant turns, the first included
    tool_calls: list[ToolCall] = field(default_factory=list)
    num_answer_tags: int = 0  # <answer> tags that the model wrote
    answer: str | None = None
    stop_reason: str = ""
    reward: float = 0.0
    penalty: float = 0.0
    kept: bool = False
    policy_version: int = 0

    def append(self, token_ids, kind: str, logprobs=None, entropies=None) -> None:
        """Appends a segment. Only "model" has loss: the mask comes from who wrote the token."""
        assert kind in SEGMENT_KINDS, kind
        n, start = len(token_ids), len(self.token_ids)
        wrote = kind == "model"
        assert wrote == (logprobs is not None), f"{kind} segment, logprobs given: {not wrote}"
        self.token_ids += list(token_ids)
        self.loss_mask += [int(wrote)] * n
        self.logprobs += list(logprobs) if wrote else [0.0] * n
        self.entropies += list(entropies) if wrote else [0.0] * n
        self.segments.append((start, start + n, kind))
        self.check()

    def check(self) -> None:
        n = len(self.token_ids)
        lengths = len(self.loss_mask), len(self.logprobs), len(self.entropies)
        assert lengths == (n, n, n), f"{n} token_ids but (mask, logprobs, entropies) {lengths}"

    @property
    def num_model_tokens(self) -> int:
        return sum(self.loss_mask)

    def to_json(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_json(row: dict) -> Trajectory:
        row = dict(row)
        row["problem"] = Problem(**row["problem"])
        row["tool_calls"] = [ToolCall(**c) for c in row["tool_calls"]]
        row["segments"] = [tuple(s) for s in row["segments"]]
        trajectory = Trajectory(**row)
        trajectory.check()
        return trajectory


    def summary(self, rank: int = 0) -> Summary:
        return Summary(
            problem_id=self.problem.id,
            rollout=self.rollout,
            rank=rank,
            reward=self.reward,
            penalty=self.penalty,
            stop_reason=self.stop_reason,
            num_tokens=len(self.token_ids),
            num_model_tokens=self.num_model_tokens,
            num_calls=sum(c.status != "lost" for c in self.tool_calls),
            num_errors=sum(c.failed for c in self.tool_calls),
            num_turns=self.num_turns,
            answer=self.answer,
            tokens_sha=sha256(repr(self.token_ids).encode()).hexdigest(),
        )


@dataclass
class Summary:
    """What every rank knows of a trajectory that only one rank holds: enough to select, to weigh
    and to count. grpo_roc's functions take a Group of either."""

    problem_id: str
    rollout: int
    rank: int  # who holds the trajectory
    reward: float
    penalty: float
    stop_reason: str
    num_tokens: int
    num_model_tokens: int
    num_calls: int
    num_errors: int
    num_turns: int
    answer: str | None
    tokens_sha: str  # sha256 of token_ids, for the digest of the step


@dataclass
class Group:
    problem: Problem
    trajectories: list[Trajectory] | list[Summary]


@dataclass
class Batch:
    """Packed trajectories (or SFT documents). All (T,) but cu_seqlens (S + 1,).

    token_weights = loss_mask / denominator, made once per optimiser step over all ranks, so that
    -(objective * token_weights).sum() is right for any number of ranks and micro-batches.
    """

    token_ids: Tensor  # int64
    positions: Tensor  # int64, restart at 0 in every segment
    cu_seqlens: Tensor  # int32, segment borders
    loss_mask: Tensor  # float32; 1 where token t was written by the model
    engine_logprobs: Tensor  # float32
    advantages: Tensor  # float32
    token_weights: Tensor  # float32

    def targets(self) -> Tensor:
        """(T,): row t predicts token t + 1; its id if that token has loss, else -1."""
        targets = torch.full_like(self.token_ids, -1)
        wanted = self.loss_mask[1:].bool() & (self.positions[1:] > 0)
        targets[:-1] = torch.where(wanted, self.token_ids[1:], -1)
        return targets


# ---- packing ----


def pack(documents, weights=1.0, advantages=0.0, device="cpu") -> Batch:
    """Trajectories or (token_ids, loss_mask) pairs, end to end in one Batch, without padding.

    weights, advantages: one number a document, or one for all. A token's weight is that of its
    document where it has loss: 1 / denominator for SFT, grpo_roc.loss_weights for RL.

    >>> pack([([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])], weights=0.5).token_weights.tolist()
    [0.0, 0.5, 0.5, 0.0, 0.5]
    """
    documents = list(documents)
    ids, masks, engine = zip(*map(_columns, documents))
    lengths = torch.tensor([len(x) for x in ids])
    flat = lambda rows, dtype: torch.tensor([x for row in rows for x in row], dtype=dtype)

    def spread(values):  # (S,) or a number -> (T,)
        per_document = torch.as_tensor(values, dtype=torch.float32).expand(len(documents))
        return per_document.repeat_interleave(lengths)

    loss_mask = flat(masks, torch.float32)
    batch = Batch(
        token_ids=flat(ids, torch.int64),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        loss_mask=loss_mask,
        engine_logprobs=flat(engine, torch.float32),
        advantages=spread(advantages) * loss_mask,
        token_weights=spread(weights) * loss_mask,
    )
    return Batch(**{k: v.to(device) for k, v in vars(batch).items()})


def _columns(document):
    if isinstance(document, Trajectory):
        return document.token_ids, document.loss_mask, document.logprobs
    token_ids, loss_mask = document
    return token_ids, loss_mask, [0.0] * len(token_ids)


def micro_batches(lengths: list[int], world: int, max_tokens: int) -> list[list[list[int]]]:
    """Deals documents to ranks and cuts each share into micro-batches: [rank][micro] -> indices.

    Every rank gets the same number of micro-batches, because a sharded model runs them together:
    where documents run out a list is empty (run a document of weight 0). Longest first, each to the
    rank with the fewest tokens, then first fit.
    """
    shares = [[] for _ in range(world)]
    load = [0] * world
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = load.index(min(load))
        load[rank] += lengths[i]
        shares[rank].append(i)
    packed = [_first_fit(share, lengths, max_tokens) for share in shares]
    count = max(map(len, packed))
    return [bins + [[] for _ in range(count - len(bins))] for bins in packed]


def _first_fit(indices, lengths, max_tokens):
    """A document longer than max_tokens is a micro-batch of its own."""
    bins, load = [], []
    for i in indices:
        b = next((b for b, n in enumerate(load) if n + lengths[i] <= max_tokens), len(bins))
        if b == len(bins):
            bins.append([])
            load.append(0)
        bins[b].append(i)
        load[b] += lengths[i]
    return bins


# ---- readers ----

# Field names that data sets use, in the order of preference.
QUESTION_FIELDS = ("question", "problem", "prompt", "Question", "Problem")
ANSWER_FIELDS = ("answer", "expected_answer", "final_answer", "ground_truth", "Answer")
# Instructions that data sets glue to the problem: they would count as overlap and as a marker.
WRAPPERS = re.compile(
    r"^\s*Solve the following math problem step by step\..*?on its own line.*?\n\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
    r"|\s*(Please |Let's )?(reason|think) step by step,? and (put|output) (your|the) final answer"
    r" within \\boxed\{\}\.?\s*$",
    re.IGNORECASE | re.DOTALL,
)


def read_problems(path) -> list[Problem]:
    """All readable problems of a file; the rest is reported on stderr with line and cause."""
    return list(iter_problems(path, Skipped()))


class Skipped(Counter):
    """Rows that could not be read, by cause; the first few are printed."""

    def report(self, path, line, cause):
        self[cause] += 1
        if self.total() <= 5:
            print(f"{path}:{line}: skipped, {cause}", file=sys.stderr)


def iter_problems(path, skipped: Skipped, start: int = 0) -> Iterator[Problem]:
    for line, row in iter_rows(path, start):
        try:
            yield to_problem(row, Path(path).stem, line)
        except ValueError as e:
            skipped.report(path, line, str(e))


def iter_rows(path, start: int = 0) -> Iterator[tuple[int, object]]:
    """(number, row) from 1 on, without the first `start`: JSON lines (whatever the file is called),
    one JSON list, parquet. A line that is no JSON comes as the ValueError that says so."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give a .jsonl, .json or .parquet file")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        with open(path, "rb") as f:
            head = f.read(256).lstrip()
        rows = json.loads(path.read_bytes()) if head.startswith(b"[") else _json_lines(path)
    for line, row in enumerate(rows, 1):
        if line > start:
            yield line, row


def _json_lines(path):
    with open(path, "rb") as f:
        for line in f:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as e:
                    yield ValueError(f"not JSON: {e}")
