"""Data: Problem -> Trajectory -> Group -> Batch, the one river that every file steps into.

    Problem      a question and its label
    Trajectory   the record of one rollout: every token, who wrote it, every tool call, the reward
    Group        the N trajectories of one problem in one step; resampling maps Group to Group
    Batch        kept trajectories packed into flat tensors, the only form that the trainer sees

Facts are recorded when they happen and never overwritten by derived values. Tokens are the truth:
text is decoded from them to be read, never encoded again.

RL data (section 4.2): 17K problems of DAPO, 93K of OpenMathReasoning, 937 of Project Euler; 42K
after filters that the paper names without code. RECIPE says which filter meets which source; near
duplicates and leaked answers are ours. One source at a time, then all together:

    python data.py filter --recipe openmath --samples samples.jsonl --eval aime.jsonl math.jsonl \\
        --out openmath.rl.jsonl OpenMathReasoning.jsonl
    python data.py filter --recipe all --out rl.jsonl dapo.rl.jsonl openmath.rl.jsonl euler.rl.jsonl
    python data.py show rl.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

# Statuses that count as errors in Eq. 4; `lost` is our own fault and in neither number.
TOOL_ERRORS = ("error", "timeout", "memory", "output", "malformed", "refused")
SEGMENT_KINDS = ("prompt", "forced", "model", "separator", "tool")


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
    stop_reason: str = ""  # stopped, length, turns or wall
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
        problem, segments = Problem(**row["problem"]), [tuple(s) for s in row["segments"]]
        calls = [ToolCall(**c) for c in row["tool_calls"]]
        t = Trajectory(**row | dict(problem=problem, segments=segments, tool_calls=calls))
        t.check()
        return t

    def summary(self, rank: int = 0) -> Summary:
        return Summary(
            problem_id=self.problem.id, rollout=self.rollout, rank=rank, reward=self.reward,
            penalty=self.penalty, stop_reason=self.stop_reason, num_tokens=len(self.token_ids),
            num_model_tokens=self.num_model_tokens, num_turns=self.num_turns, answer=self.answer,
            num_calls=sum(c.status != "lost" for c in self.tool_calls),
            num_errors=sum(c.failed for c in self.tool_calls),
            tokens_sha=sha256(repr(self.token_ids).encode()).hexdigest(),
        )  # fmt: skip


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
    """Packed trajectories (or SFT documents). All (T,) but cu_seqlens (S + 1,). token_weights is
    loss_mask / denominator, made once per optimiser step over all ranks, so that
    -(objective * token_weights).sum() is right for any number of ranks and micro-batches."""

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
    rows = [(d.token_ids, d.loss_mask, d.logprobs) if isinstance(d, Trajectory)
            else (*d, [0.0] * len(d[0])) for d in documents]  # fmt: skip
    ids, masks, engine = zip(*rows)
    lengths = torch.tensor([len(x) for x in ids])
    flat = lambda rows, dtype: torch.tensor([x for row in rows for x in row], dtype=dtype)
    each = lambda values: torch.as_tensor(values, dtype=torch.float32).expand(len(ids))
    spread = lambda values: each(values).repeat_interleave(lengths)  # (S,) or a number -> (T,)
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


def micro_batches(lengths: list[int], world: int, max_tokens: int) -> list[list[list[int]]]:
    """Deals documents to ranks, cuts each share into micro-batches: [rank][micro] -> indices.
    Longest first, each to the rank with the fewest tokens. All ranks get as many micro-batches,
    because a sharded model runs them together: an empty list is a document of weight 0."""
    shares, load = [[[]] for _ in range(world)], [0] * world
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = load.index(min(load))
        load[rank] += lengths[i]
        if shares[rank][-1] and sum(lengths[j] for j in [*shares[rank][-1], i]) > max_tokens:
            shares[rank].append([])
        shares[rank][-1].append(i)
    count = max(map(len, shares))
    return [share + [[]] * (count - len(share)) for share in shares]


# ---- readers ----

QUESTION_FIELDS = ("question", "problem", "prompt", "Question", "Problem")
ANSWER_FIELDS = ("answer", "expected_answer", "final_answer", "ground_truth", "Answer")
# Instructions that data sets glue to a problem: they would count as overlap and as a marker.
WRAPPERS = re.compile(
    r"(?is)^\s*Solve the following math problem step by step\. The last line.*?\n\s*\n"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
    r"|\s*(please )?reason step by step,? and put your final answer within \\boxed\{\}\.?\s*$"
)


def read_problems(path) -> list[Problem]:
    """All readable problems of a file; the rest is told on stderr, with line and cause. An id that
    is there already gets the line as suffix: ids key the noise."""
    found = {}
    for line, p in iter_problems(path, Counter()):
        found[f"{p.id}-line-{line}" if p.id in found else p.id] = p
    return [replace(p, id=name) for name, p in found.items()]


def iter_problems(path, skipped: Counter, start: int = 0) -> Iterator[tuple[int, Problem]]:
    """(line, problem) beyond the first `start` lines; skipped counts causes."""
    for line, row in iter_rows(path, start):
        try:
            yield line, to_problem(row, Path(path).stem, line)
        except ValueError as e:
            skipped[str(e)] += 1
            if skipped.total() <= 5:
                print(f"{path}:{line}: skipped, {e}", file=sys.stderr)
    if skipped:
        print(f"{path}: skipped {skipped.total()} rows so far, {dict(skipped)}", file=sys.stderr)


def iter_rows(path, start: int = 0) -> Iterator[tuple[int, object]]:
    """(number from 1, row) of JSON lines (not yet decoded), of one JSON list, or of parquet."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give a .jsonl, .json or .parquet file")
    with open(path, "rb") as f:
        if path.suffix == ".parquet":
            try:
                from pyarrow.parquet import ParquetFile
            except ImportError:
                raise OSError(f"{path}: parquet needs pyarrow: pip install pyarrow") from None
            rows = (row for batch in ParquetFile(f).iter_batches() for row in batch.to_pylist())
        elif f.peek(256)[:256].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # BOM
            rows = read_json(f.read(), f"{path} begins as a JSON list but is not one")
        else:
            rows = f
        for line, row in islice(enumerate(rows, 1), start, None):
            if not (isinstance(row, bytes) and row.isspace()):
                yield line, row


def require(fine, cause: str) -> None:
    if not fine:
        raise ValueError(cause)


def read_json(value, cause: str):
    try:
        return json.loads(value) if isinstance(value, (str, bytes)) else value
    except (ValueError, RecursionError):
        raise ValueError(cause) from None


def to_object(row) -> dict:
    require(isinstance(row := read_json(row, "not JSON"), dict), "not an object")
    return row


def to_problem(row, stem: str, line: int) -> Problem:
    """A row of any known shape; what is wrong with it is a ValueError."""
    row = to_object(row)
    question = last_user_text(next((row[k] for k in QUESTION_FIELDS if row.get(k)), None))
    require(question := WRAPPERS.sub("", question).strip(), "no question")
    answers = [row.get(k) for k in ANSWER_FIELDS]
    if isinstance(row.get("reward_model"), dict):  # DAPO
        answers.append(row["reward_model"].get("ground_truth"))
    require(answer := next(filter(None, map(answer_text, answers)), ""), "no answer")
    name, source = row.get("id", line), row.get("source") or row.get("data_source") or stem
    name = name if isinstance(name, str) else f"{stem}-{name}"
    return Problem(name, question, answer, str(source))


def last_user_text(prompt) -> str:
    """A text, or a chat, whose last user message it is (BFCL nests the chat once more)."""
    if isinstance(prompt, list):
        chat = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
        users = [m for m in chat if isinstance(m, dict) and m.get("role") == "user"]
        prompt = users[-1].get("content") if users else None
    return prompt if isinstance(prompt, str) else ""


def answer_text(answer) -> str:
    """25 -> "25", 27.0 -> "27", GSM8K's "... #### 1,234" -> "1,234", what is no answer -> ""."""
    whole = isinstance(answer, float) and answer.is_integer()
    text = str(int(answer) if whole else answer) if type(answer) in (str, int, float) else ""
    return text.rpartition("####")[2].strip()


# ---- filters ----

INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:(?:,|\\[!,]|\{,\})+\s?\d{3})+(?!\d)|\d+)")
PARTS = re.compile(r"(?:^|\s)\((a|i|1)\)\s[\s\S]+\s\((b|ii|2)\)\s")
SEVERAL = re.compile(r"(?i)[;=]|\b(and|or)\b|,(?![,\\!{}]*\s?\d{3}(?!\d))")
ARGUMENT = re.compile(r"(?i)(?:^|[.,;:?!$]\s+)(?:then |now |and )?"
                      r"(prove|disprove|show|explain|justify|sketch)\b(?! me)")  # fmt: skip
MARKED = re.compile(r"(?i)(?:####|\\boxed\s*\{|\banswers?\s*(?:is|are|:|=)|\bans\.?\s*[:=])"
                    rf"[\s$*({{]*({INTEGER.pattern})")  # fmt: skip
# "$1,234$" -> "1234", what is no integer -> None
integer = lambda text: INTEGER.fullmatch(text.strip("$ ")) and re.sub(r"[^-\d]", "", text)
# Each says whether a problem p goes; f holds thresholds and what is known. Duplicates come last:
# only what passed everything else is noted, so a run can be continued from its output alone.
FILTERS = {
    "integer": lambda p, f: not integer(p.answer),  # paper, all sources
    "huge": lambda p, f: sum(map(str.isdigit, p.answer)) > f.max_digits,  # paper, Project Euler
    "composite": lambda p, f: bool(PARTS.search(p.question) or SEVERAL.search(p.answer)),
    "unverifiable": lambda p, f: bool(ARGUMENT.search(p.question)),  # both: OpenMathReasoning
    "matched": lambda p, f: sum(f.samples.get(p.question, ())) < f.min_right,  # likewise
    "solved": lambda p, f: all(f.samples.get(p.question) or (0,)),  # paper, stage 3: 8 of 8
    "overlap": lambda p, f: not f.grams.isdisjoint(grams(p.question, f.mask_numbers)),  # paper
    "leak": lambda p, f: integer(p.answer) in map(integer, MARKED.findall(p.question)),  # ours
    "exact": lambda p, f: f.seen.get(near_key(p.question)) == digest(p.question),  # ours
    "near": lambda p, f: near_key(p.question) in f.seen,  # ours: case, spacing, punctuation
}
SAVE_EVERY = 50_000  # rows
EVERYWHERE = ("overlap", "leak", "exact", "near")
RECIPE = {  # source -> its filters
    "dapo": ("integer", *EVERYWHERE),
    "openmath": ("integer", "composite", "unverifiable", "matched", *EVERYWHERE),
    "euler": ("integer", "huge", *EVERYWHERE),
    "all": ("integer", "huge", "composite", "unverifiable", *EVERYWHERE),
    "stage3": ("solved",),
}


@dataclass
class Known:
    """What filters know besides the problem."""

    min_right: int = 2  # of 16 samples; paper
    max_digits: int = 12  # ours, the paper is silent
    mask_numbers: bool = False  # overlap with all numbers read as 0; ours
    samples: dict = field(default_factory=dict)  # question -> 0 or 1 for each sampled answer
    grams: set = field(default_factory=set)  # of the evaluation sets
    seen: dict = field(default_factory=dict)  # near_key -> digest of what was kept; 0.1 KB a row


def grams(text: str, mask_numbers: bool = False, n: int = 8):
    """Runs of n words: ("if", "x", "12", ...); a shorter text is one run."""
    words = re.findall(r"[^\W\d_]+|\d+", text.lower())
    words = ["0" if mask_numbers and w.isdigit() else w for w in words]
    return zip(*(words[i:] for i in range(n))) if len(words) > n else [tuple(words)]


@lru_cache(maxsize=1)
def near_key(text: str) -> int:
    """Equal for texts that differ in case, spacing, punctuation, dollars, braces, \\left."""
    text = re.sub(r"\\(left|right)\b|\\[,;:! ]", " ", text.lower())
    return digest(" ".join(re.findall(r"[^\W\d_]+|\d+|[^\s$.,;:?\"'{}\\]", text)))


def digest(text: str) -> int:
    return int.from_bytes(sha256(text.encode(errors="replace")).digest()[:8], "big")


def filter_files(paths, out, names, known: Known, config: dict, fresh: bool = False) -> dict:
    """Streams problems through the filters into `out`, notes beside it every SAVE_EVERY rows where
    it stands, and goes on from there. Returns counts and examples by what became of a row."""
    part, saved = Path(f"{out}.part"), Path(f"{out}.state")
    state = dict(config=config, file=0, line=0, bytes=0, counts={}, examples={}, skipped={})
    if fresh:
        saved.unlink(missing_ok=True)
    elif saved.exists():
        state = json.loads(saved.read_text())
        require(state["config"] == config, f"{saved}: other arguments, give those or --fresh")
        os.truncate(part, state["bytes"])
        for _, p in iter_problems(part, Counter()):
            known.seen[near_key(p.question)] = digest(p.question)
    counts, skipped = Counter(state["counts"]), Counter(state["skipped"])
    bar = tqdm(desc="filter", unit=" rows", initial=counts.total(), mininterval=0.5)
    with open(part, "ab" if state["bytes"] else "wb") as f:
        for i in range(state["file"], len(paths)):
            start = state["line"] if i == state["file"] else 0
            for line, p in iter_problems(paths[i], skipped, start):
                became = next((name for name in names if FILTERS[name](p, known)), "kept")
                counts[became] += 1
                if became == "kept":
                    known.seen[near_key(p.question)] = digest(p.question)
                    f.write(json.dumps(asdict(p)).encode() + b"\n")
                elif len(shown := state["examples"].setdefault(became, [])) < 3:
                    shown.append(f"{p.id}: {p.question[:150]!r} -> {p.answer[:40]!r}")
                bar.update()
                if counts.total() % SAVE_EVERY == 0:
                    f.flush()
                    state |= dict(file=i, line=line, bytes=f.tell(), counts=counts, skipped=skipped)
                    Path(f"{saved}.tmp").write_text(json.dumps(state))
                    Path(f"{saved}.tmp").replace(saved)
    bar.close()
    part.replace(out)
    saved.unlink(missing_ok=True)
    return dict(counts=counts, skipped=skipped, examples=state["examples"])


# ---- command line ----


def filter_command(args) -> None:
    names = args.filters.split(",") if args.filters else RECIPE[args.recipe]
    if unknown := set(names) - set(FILTERS):
        raise ValueError(f"unknown filters {sorted(unknown)}: choose from {', '.join(FILTERS)}")
    if {"matched", "solved"} & set(names) and not args.samples:
        raise ValueError("matched and solved need --samples FILE, which eval.py --out writes")
    if missing := [path for path in args.files if not Path(path).is_file()]:
        raise FileNotFoundError(f"{', '.join(missing)} not there: give .jsonl, .json or .parquet")
    require(args.fresh or not args.out.exists(), f"{args.out} is there: move it, or --fresh")
    known = Known(args.min_right, args.max_digits, args.mask_numbers)
    for p in (p for path in args.eval for p in read_problems(path)):
        known.grams.update(grams(p.question, args.mask_numbers))
    for name, (line, row) in ((f, item) for f in args.samples for item in iter_rows(f)):
        try:
            row = to_object(row)
            known.samples[row["question"]] = [n > 0 for n in row["correct"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{name}:{line}: not a row that eval.py --out writes") from None
    config = {k: str(v) for k, v in vars(args).items() if k not in ("fresh", "run")}
    result = filter_files(args.files, args.out, names, known, config, args.fresh)
    for name in ("kept", *names):
        print(f"{name:12s} {result['counts'][name]:10,d}")
        for example in result["examples"].get(name, ()):
            print(f"    {example}")
    print(f"{'unreadable':12s} {result['skipped'].total():10,d}  {dict(result['skipped'])}")


def show_command(args) -> None:
    for path in args.files:
        problems = read_problems(path)
        lengths = sorted(len(p.question) for p in problems) or [0]
        integers = sum(bool(integer(p.answer)) for p in problems)
        print(f"{path}: {len(problems):,} problems, {integers:,} with integer answers")
        print(f"  characters, median {lengths[len(lengths) // 2]}, largest {lengths[-1]}")
        print(f"  sources {dict(Counter(p.source for p in problems).most_common(5))}")
        for p in problems[:: max(1, len(problems) // args.count)][: args.count]:
            print(f"  [{p.id}] {p.question[:300]}\n      -> {p.answer}")


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="a few problems and statistics")
    show.add_argument("--count", type=int, default=3)
    add = commands.add_parser("filter", help="stream problem files through the filters")
    for command, run in ((show, show_command), (add, filter_command)):
        command.add_argument("files", nargs="+", metavar="FILE")
        command.set_defaults(run=run)
    add = add.add_argument
    add("--out", type=Path, required=True, help="JSON lines of what is kept")
    add("--recipe", choices=RECIPE, default="all", help="the filters of a source")
    add("--filters", help="instead of --recipe: " + ",".join(FILTERS))
    add("--eval", nargs="+", default=[], help="evaluation sets to stay away from")
    add("--samples", nargs="+", default=[], help="answers written by eval.py --out")
    add("--min-right", type=int, default=2, help="samples that match the label")
    add("--max-digits", type=int, default=12, help="a longer answer is huge")
    add("--mask-numbers", action="store_true", help="overlap whatever the numbers")
    add("--fresh", action="store_true", help="begin again, overwrite")
    args = parser.parse_args()
    try:
        args.run(args)
    except (ValueError, OSError) as e:
        sys.exit(f"data.py: {e}")


if __name__ == "__main__":
    main()
