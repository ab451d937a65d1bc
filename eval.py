"""Evaluation: avg@k pass@1, maj@k, tool statistics, and two looks at stored traces (section 5).

pass@1 is the mean over problems of the share of right answers among `samples` rollouts (the paper:
16 samples, T = 0.6, 30,720 tokens, 30 turns); its standard error is over problems, the samples of
one problem not being independent. maj@k scores the answer that most samples of a problem gave.
Tool errors are pooled over calls: errors / calls over all trajectories, and over the correct ones.

    python eval.py --model DIR --data FILE [--samples 16]   any Qwen folder on a problem file
    python eval.py --run runs/toy                           a trained run on its held-out problems
    python eval.py --audit runs/toy     run every stored call again in a fresh interpreter, score
                                        every stored answer again: 0 differences
    python eval.py --entropy runs/toy   section 5.4: the highest-entropy tokens, by kind of text

Not here: benchmarks that need a judge model or their own prompts (GPQA, BFCL, IFEval, Arena-Hard).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from tqdm import tqdm

from data import Problem, Summary, Trajectory, read_problems
from kvcache_engine import engine_from_folder
from reward import integer_verdict
from rollout import RolloutConfig, model_config, rollout, settings_of_run
from sandbox import Sandbox
from scheduler import RolloutQueue, queue_order
from tokenizer import Tokenizer, tool_response_text

# ---- numbers ----


def evaluate(
    engine, box, tok, problems: list[Problem], cfg: RolloutConfig, store, key: str,
    samples: int = 1, seed: int = 0, world: int = 1, gather=lambda x: [x], show: str = "",
) -> tuple[dict, list[Trajectory]]:  # fmt: skip
    """(numbers, this rank's trajectories). One queue over all ranks; `gather` collects a value of
    every rank (parallel.gather_over_ranks); show: the title of a bar. The noise does not depend on
    the training step, so two evaluations of one policy give the same trajectories."""
    order = queue_order([p.id for p in problems], samples, group_chunk=1)
    queue = RolloutQueue(store, key, order, num_engines=world)
    with tqdm(total=len(order), desc=show, disable=not show, leave=False) as bar:
        done = lambda t: bar.update(world)
        trajectories, stats = rollout(
            engine, box, tok, queue, problems, cfg, seed=f"evaluation {seed}", step=0, progress=done
        )
    summaries = [s for rows in gather([t.summary() for t in trajectories]) for s in rows]
    return {**score(summaries), "seconds": stats.seconds}, trajectories


def score(summaries: list[Summary]) -> dict:
    """pass@1 with its standard error, maj@k, pass@k, tool errors, length, turns."""
    by_problem = defaultdict(list)
    for s in summaries:
        by_problem[s.problem_id].append(s)
    shares = [sum(s.reward for s in rows) / len(rows) for rows in by_problem.values()]
    n, mean = len(shares), sum(shares) / len(shares)
    variance = sum((x - mean) ** 2 for x in shares) / max(n - 1, 1)
    correct, count = [s for s in summaries if s.reward > 0.5], len(summaries)
    average = lambda name: sum(getattr(s, name) for s in summaries) / count
    return {
        "pass@1": mean, "stderr": math.sqrt(variance / n),
        "pass@k": sum(x > 0 for x in shares) / n,
        "maj@k": sum(map(majority_is_right, by_problem.values())) / n,
        "problems": n, "samples": count,
        "errors_per_call": error_share(summaries), "errors_per_call_correct": error_share(correct),
        "calls": average("num_calls"), "length": average("num_tokens"),
        "turns": average("num_turns"),
        "over_limit": sum(s.stop_reason in ("length", "wall") for s in summaries) / count,
    }  # fmt: skip


def error_share(summaries: list[Summary]) -> float:
    """Pooled over calls; 0 without calls."""
    calls = sum(s.num_calls for s in summaries)
    return sum(s.num_errors for s in summaries) / calls if calls else 0.0


def majority_is_right(rows: list[Summary]) -> bool:
    """The answer given most often (first seen wins a tie), by its text; no answer is no vote."""
    votes = sorted((s for s in rows if s.answer is not None), key=lambda s: s.rollout)
    count = Counter(s.answer for s in votes)
    return bool(votes) and max(votes, key=lambda s: count[s.answer]).reward > 0.5


def table(rows: list[tuple[str, dict]]) -> str:
    """The table at the end of a run: one row an evaluation."""
    head = ("", "pass@1", "errors/call", "of correct", "tokens", "turns", "over limit")
    cells = lambda name, r: (
        name, f"{r['pass@1']:.3f} +- {r['stderr']:.3f}", f"{r['errors_per_call']:.3f}",
        f"{r['errors_per_call_correct']:.3f}", f"{r['length']:.1f}", f"{r['turns']:.2f}",
        f"{r['over_limit']:.3f}",
    )  # fmt: skip
    line = lambda first, *rest: f"{first:<14}" + "".join(f"{c:>15}" for c in rest)
    return "\n".join([line(*head), *(line(*cells(name, r)) for name, r in rows)])


# ---- audit of stored traces ----


def read_traces(run: Path) -> list[dict]:
    """Rows of traces/*.jsonl in the order of their names; each is Trajectory.to_json() and more."""
    files = sorted((run / "traces").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run} has no traces/*.jsonl: it is not a run folder of train.py")
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except ValueError as e:
                raise ValueError(f"{file}, line {number}: not JSON ({e})") from None
    return rows


def audit(run: Path, workers: int = 2) -> list[str]:
    """Every stored call run again by a fresh pool, every stored answer scored again; returns one
    sentence a difference. Calls whose status was `lost` or that never ran are not repeated."""
    known = lambda row: {k: v for k, v in row.items() if k in Trajectory.__annotations__}
    trajectories = [Trajectory.from_json(known(row)) for row in read_traces(run)]
    config = run / "config.json"  # calls again have the CPU seconds that they had
    seconds = json.loads(config.read_text())["tool_seconds"] if config.is_file() else 4.0
    unsure = ("lost", "malformed", "refused")
    calls = [(t, c) for t in trajectories for c in t.tool_calls if c.status not in unsure]
    place, differences = lambda t: f"{t.problem.id} rollout {t.rollout} step {t.step}", []
    # As the model reads it, uncut: addresses in a repr are blanked, they differ between processes.
    whole = lambda result: tool_response_text(result, None, 10**9)
    with Sandbox(workers=workers) as box:
        handles = [box.submit(c.code, c.input, seconds=seconds) for _, c in calls]
        for handle, (t, c) in tqdm(list(zip(handles, calls)), desc="calls"):
            r = box.result(handle)
            if (r.status, whole(r)) != (c.status, whole(c)):
                was, now = (f"{x.status} {x.stdout[:60]!r}" for x in (c, r))
                differences.append(f"{place(t)} turn {c.turn}: call was {was}, is {now}")
        for t in tqdm(trajectories, desc="answers"):
            if (again := float(verdict(t, box))) != t.reward:
                why = f"(answer {t.answer!r}, label {t.problem.answer!r})"
                differences.append(f"{place(t)}: reward was {t.reward}, is {again} {why}")
    print(f"{len(calls)} calls and {len(trajectories)} answers again, {len(differences)} differ")
    return differences


def verdict(t: Trajectory, box) -> bool:
    """As in a rollout: what is no integer is decided in the sandbox, under a time limit."""
    if t.answer is None or t.stop_reason in ("length", "wall"):
        return False
    if (fast := integer_verdict(t.answer, t.problem.answer)) is not None:
        return fast
    result = box.result(box.submit_check(t.answer, t.problem.answer))
    return result.status == "ok" and result.stdout.strip() == "1"


# ---- entropy (section 5.4, figures 10, 11) ----


def entropy_analysis(run: Path, count: int = 64, share: float = 0.2, seed: int = 0) -> str:
    """The share of tokens in code, in the turn after a tool response, and elsewhere that are among
    the top `share` by entropy of `count` random trajectories, and the tokens met most there."""
    rows = [r for r in read_traces(run) if sum(r["loss_mask"])]
    if not rows:
        raise ValueError(f"{run}/traces holds no token that a model wrote")
    rows = Random(seed).sample(rows, min(count, len(rows)))
    tok = Tokenizer.from_file(settings_of_run(run)[0] / "tokenizer.json")
    tokens = [token for row in rows for token in kinds_of_tokens(row, tok)]
    threshold = sorted((h for h, _, _ in tokens), reverse=True)[int(share * len(tokens))]
    head = f"{len(rows)} trajectories, {len(tokens)} tokens; top {share:.0%}"
    lines = [f"{head}: H > {threshold:.3f}"]
    for kind in ("reasoning", "code", "after a tool response"):
        of_kind = [(h, text) for h, k, text in tokens if k == kind]
        if n := len(of_kind):
            high = [text for h, text in of_kind if h > threshold]
            common = ", ".join(f"{t!r} {times}" for t, times in Counter(high).most_common(8))
            numbers = f"mean entropy {sum(h for h, _ in of_kind) / n:.3f}, {len(high) / n:6.1%}"
            lines.append(f"{kind:<22} {numbers} in the top (of {n})   {common}")
    return "\n".join(lines)


def kinds_of_tokens(row: dict, tok) -> list[tuple[float, str, str]]:
    """(entropy, kind, text) of every model token; kind by where it stands, not by what it says."""
    out, after_tool = [], False
    for start, end, kind in row["segments"]:
        after_tool |= kind == "tool"
        if kind != "model":
            continue
        written = ""
        for i in range(start, end):
            text = tok.decode([row["token_ids"][i]])
            written += text
            in_call = written.count("<tool_call>") > written.count("</tool_call>")
            where = "code" if in_call else "after a tool response" if after_tool else "reasoning"
            out.append((row["entropies"][i], where, text))
    return out


# ---- command line ----


def write_samples(path: Path, trajectories: list[Trajectory]) -> None:
    """One row a problem with all its sampled answers: what `data.py filter` reads to decide "label
    matched at least k of n times" and "not solved 8 of 8". Trajectories come sorted by problem."""
    with open(path, "w") as f:
        for p, run in groupby(trajectories, key=lambda t: t.problem):
            answers, correct = zip(*((t.answer, int(t.reward)) for t in run))
            row = dict(id=p.id, question=p.question, answer=p.answer)
            f.write(json.dumps(row | dict(samples=answers, correct=correct)) + "\n")


def evaluate_folder(args) -> None:
    """--model and --run: load, roll out, print the numbers, write the samples."""
    torch.set_num_threads(1)
    folder, cfg = settings_of_run(args.run) if args.run else (args.model, model_config(args.chat))
    fields = ("temperature", "top_p", "max_tokens", "max_turns")
    cfg = replace(cfg, **{k: v for k in fields if (v := getattr(args, k)) is not None})
    problems = read_problems(args.data or args.run / "evaluation.jsonl")[: args.limit]
    tok = Tokenizer.from_file(folder / "tokenizer.json")
    cache = args.cache_tokens or 4 * cfg.max_tokens
    engine = engine_from_folder(folder, cache_tokens=cache, device=args.device)
    with Sandbox(workers=args.workers) as box:
        numbers, trajectories = evaluate(engine, box, tok, problems, cfg, dist.HashStore(), "once",
                                         args.samples, args.seed, show="evaluation")  # fmt: skip
    print(table([(folder.name, numbers)]))
    print(f"maj@{args.samples} {numbers['maj@k']:.3f}  pass@{args.samples} {numbers['pass@k']:.3f}")
    if args.out:
        write_samples(args.out, trajectories)
        print(f"answers of {len(problems)} problems in {args.out}")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="a Qwen3 or Qwen2.5 folder (needs --data)")
    what.add_argument("--run", type=Path, help="a run folder: its model, its held-out problems")
    what.add_argument("--audit", type=Path, help="a run folder")
    what.add_argument("--entropy", type=Path, help="a run folder")
    parser.add_argument("--data", type=Path, help="problems: .jsonl, .json or .parquet")
    parser.add_argument("--chat", action="store_true", help="with --model: its own ChatML form")
    parser.add_argument("--out", type=Path, help="write sampled answers here, for data.py filter")
    parser.add_argument("--samples", type=int, default=1, help="rollouts a problem; paper: 16")
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    parser.add_argument("--temperature", type=float, help="default 0.6, or the run's")
    parser.add_argument("--top-p", type=float, help="default 1")
    parser.add_argument("--max-tokens", type=int, help="budget; default 30720, or the run's")
    parser.add_argument("--max-turns", type=int, help="default 30, or the run's")
    parser.add_argument("--cache-tokens", type=int, help="KV cache; default 4 budgets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="sandbox workers")
    parser.add_argument("--device", help="cpu or cuda; default: what is there")
    args = parser.parse_args()
    if args.model and not args.data:
        parser.error("--model needs --data")
    try:
        if args.audit:
            differences = audit(args.audit, args.workers)
            print("\n".join(differences))
            sys.exit(bool(differences))
        if args.entropy:
            return print(entropy_analysis(args.entropy))
        evaluate_folder(args)
    except (OSError, ValueError) as e:
        sys.exit(f"eval.py: {e}")


if __name__ == "__main__":
    main()
