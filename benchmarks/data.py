"""Speed and memory of `data.py filter` on made-up rows, one core, no model.

    python benchmarks/data.py [--rows 1000000] [--folder runs/data-benchmark]

Rows look like OpenMathReasoning (about 55 words); one in ten repeats an earlier row, half of those
with other case and spacing. The evaluation set is made the same way.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = [a + b for a in "bcdfghlmnprstv" for b in "al em in or ust ark ee".split()]


def make_row(rng: random.Random, i: int, earlier: list[str]) -> dict:
    if earlier and rng.random() < 0.1:
        question = rng.choice(earlier)
        question = question.upper().replace(" ", "  ") if rng.random() < 0.5 else question
    else:
        words = [rng.choice(WORDS) for _ in range(rng.randint(20, 90))]
        words[3] = f"$x_{i} = {rng.randint(2, 999)}$"
        question = "Let " + " ".join(words) + ". Find the value."
        if len(earlier) < 10_000:
            earlier.append(question)
    answer = rng.choice([str(rng.randint(-99, 9999)), "\\frac{1}{2}", "3, 4", "12"])
    return {"problem": question, "expected_answer": answer, "problem_source": "made up"}


def make_file(path: Path, rows: int, seed: int) -> None:
    rng, earlier = random.Random(seed), []
    with open(path, "w") as f:
        for i in range(rows):
            f.write(json.dumps(make_row(rng, i, earlier)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/data-benchmark"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows, held_out = args.folder / f"rows-{args.rows}.jsonl", args.folder / "eval.jsonl"
    if not rows.exists():
        make_file(rows, args.rows, seed=0)
        make_file(held_out, 1000, seed=1)
    command = [sys.executable, ROOT / "data.py", "filter", rows, "--eval", held_out]
    start = time.monotonic()
    subprocess.run([*command, "--out", args.folder / "out.jsonl", "--fresh"], check=True)
    seconds = time.monotonic() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(
        f"{args.rows:,} rows in {seconds:.1f} s, {cpu:.1f} s of them on the CPU:"
        f" {args.rows / cpu:,.0f} rows a CPU second, at most {used.ru_maxrss / 1024:.0f} MB"
    )


if __name__ == "__main__":
    main()
