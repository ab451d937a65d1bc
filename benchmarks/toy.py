"""The toy recipe over seeds, for the README's table: pass@1 after each stage, errors, wall seconds.

    python benchmarks/toy.py --seeds 0 1 2 3 4 --ranks 2          one row a stage and seed
    python benchmarks/toy.py --seeds 0 --ranks 1 2                one process beside two ranks

Runs go to --out/SEED-RANKSr and are continued if they were stopped (their seconds then are those
of the last start). More flags after `--` go to train.py. Wall time means something on quiet cores
only; digests of one and two ranks are compared step by step.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def train(seed: int, ranks: int, out: Path, flags: list[str]) -> tuple[Path, float]:
    """(run folder, wall seconds of the command)"""
    run = out / f"{seed}-{ranks}r"
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launch, "train.py", "--seed", str(seed), "--out", str(run.resolve()), *flags]
    begin = time.monotonic()
    run.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run}.log", "w") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    return run, time.monotonic() - begin


def read(run: Path) -> tuple[list[dict], list[dict]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[r for r in rows if r["phase"] == p] for p in ("rl", "evaluation")]


def pooled(rows: list[dict]) -> float:
    return sum(r["errors_correct"] for r in rows) / max(1, sum(r["calls_correct"] for r in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmark")
    parser.add_argument("flags", nargs="*", help="for train.py, after --")
    args = parser.parse_args()
    print("| seed | ranks | SFT | stage 1 | stage 2 | stage 3 | errors per call in correct |"
          " wall s |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    last, seconds, digests = [], {}, {}
    for seed in args.seeds:
        for ranks in args.ranks:
            run, wall = train(seed, ranks, args.out, args.flags)
            rl, evaluations = read(run)
            by_name = {r["name"]: r for r in evaluations}
            names = [n for n in ("SFT", "stage 1", "stage 2", "stage 3") if n in by_name]
            cells = " | ".join(f"{by_name[n]['pass@1']:.3f}" for n in names)
            errors = f"{pooled(rl[:10]):.3f} -> {pooled(rl[-10:]):.3f}"
            print(f"| {seed} | {ranks} | {cells} | {errors} | {wall:.0f} |", flush=True)
            last.append(by_name[names[-1]]["pass@1"])
            seconds[seed, ranks] = wall
            digests[seed, ranks] = [r["rollout_digest"] for r in rl]
    print(f"\nlast pass@1: mean {sum(last) / len(last):.3f}, lowest {min(last):.3f}")
    for seed in args.seeds:
        for ranks in args.ranks[1:]:
            a, b = digests[seed, args.ranks[0]], digests[seed, ranks]
            equal = sum(x == y for x, y in zip(a, b))
            ratio = seconds[seed, ranks] / seconds[seed, args.ranks[0]]
            print(f"seed {seed}: {ranks} ranks take {ratio:.2f} of {args.ranks[0]}'s wall time;"
                  f" equal digests in {equal} of {len(a)} steps")  # fmt: skip


if __name__ == "__main__":
    main()
