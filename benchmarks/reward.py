r"""Measures reward.py on real labels: python benchmarks/reward.py [--fuzz 100000]

    vectors     ../shared/vectors/answers.jsonl, judged by hand
    spellings   every MATH-500, HMMT and AIME label equals itself and three re-spellings of itself
    different   1,000 pairs of different labels of a kind (fraction with fraction, ...) are unequal
    math-verify what it says on all of these, each disagreement with who is right
    time        integers decided a second; CPU time of a MATH-500 check with sympy loaded
    fuzz        random mutations of labels: a bool, no exception; the slowest one
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reward import integer_verdict, is_equivalent  # noqa: E402

SHARED = Path(__file__).resolve().parents[2] / "shared"
FILES = ["math500.llmeval", "hmmt25.llmeval", "aime24.simplerl", "aime25.llmeval", "aime26.llmeval"]
BITS = (
    r"^ _ { } \frac \sqrt ( ) [ ] ! % | \pm , \log \infty 0 - / e i 9 99 \text{ \\ & = < \cup ° é "
    r"² \binom \sin \emptyset \R : √ ∖ ∈ ' \begin{pmatrix} \end{pmatrix} \lfloor \rfloor and or ."
).split()


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines() if line]


def read_labels() -> list[str]:
    return [str(row["answer"]) for f in FILES for row in read_jsonl(SHARED / f"data/{f}.jsonl")]


# ---- three ways to write a label again ----


def as_plain_text(label: str) -> str:
    r"""\frac{1}{2} -> ((1)/(2)), 3\frac12 -> 3 1/2, x^{2} -> x^(2), \sqrt{2} -> sqrt(2)"""
    label = re.sub(r"\\[dt]frac", r"\\frac", label)
    label = re.sub(r"\\frac ?(\d|\{\d+\}) ?(\d|\{\d+\})", lambda m: braced(*m.groups()), label)
    label = re.sub(r"(?<!\d)(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", r"\1 \2/\3", label)
    label = re.sub(r"\\sqrt ?(\d)", r"\\sqrt{\1}", label)
    label = re.sub(r"\^ ?\{?\\circ\}?", " degrees", label)
    label = re.sub(r"\\(?:text|mbox)\{([^{}]*)\}", r"\1", label)
    for _ in range(4):
        label = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", label)
        label = re.sub(r"\\sqrt\{([^{}]*)\}", r" sqrt(\1)", label)
        label = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", label)
    names = {"pi": "pi ", "infty": "oo", "cup": " U ", "pm": "+/-", "cdot": "*"}
    names |= {"in": "in", "cot": "cot"}
    return re.sub(r"\\(\w+)", lambda m: names.get(m[1], m[0]), label.replace("\\$", ""))


def braced(*arguments: str) -> str:
    return "\\frac" + "".join("{" + a.strip("{}") + "}" for a in arguments)


def as_loose_latex(label: str) -> str:
    r"""dfrac, \left and \right where they pair up, spaces round signs, a box and a full stop"""
    label = label.replace("\\frac", "\\dfrac").replace("\\left", "").replace("\\right", "")
    fences = re.sub(r"([(\[])", r"\\left\1 ", re.sub(r"([)\]])", r"\\right\1 ", label))
    return "\\boxed{" + re.sub(r"([-+=])", r" \1 ", fences) + "}."


def as_dressed(label: str) -> str:
    r"""$ signs, unicode minus, tfrac, \! and \, spaces, no braces round one digit"""
    label = re.sub(r"(?<=[\^_])\{(\d)\}", r"\1", label).replace("-", "−")
    label = label.replace("\\frac", "\\tfrac").replace("\\sqrt", "\\,\\sqrt").replace(", ", ",\\; ")
    return f"$ {label} $"


SPELLINGS = [str, as_plain_text, as_loose_latex, as_dressed]


def kind(label: str) -> str:
    kinds = {"matrix": r"begin", "word": r"text\{\(?[a-zA-Z]+\)?\}$", "union": r"cup"}
    kinds |= {"interval": r"[\[\]]|infty", "equation": r"=", "list": r"^[^(]*,(?!\d{3}|\\!)"}
    kinds |= {"tuple": r",(?!\d{3}|\\!)", "base": r"_", "complex": r"\di", "root": r"sqrt"}
    kinds |= {"symbolic": r"(?<![\\a-z])[a-hj-zA-Z](?![a-z])", "pi": r"pi", "degrees": r"circ"}
    kinds |= {"fraction": r"frac|\d/", "decimal": r"\.", "integer": r"^-?\d+$"}
    return next((name for name, pattern in kinds.items() if re.search(pattern, label)), "other")


def different_pairs(labels: list[str], num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Half of them integers at most: kinds are drawn first, then two labels of the kind."""
    by_kind: dict[str, list[str]] = {}
    once = {re.sub(r"^0+(?=\d)| |[{}]", "", label): label for label in labels}
    for label in sorted(set(once.values()) - {"-2,1"}):  # is 1,-2
        by_kind.setdefault(kind(label), []).append(label)
    pairs = [(a, b) for group in by_kind.values() for a in group for b in group if a < b]
    weights = [1 / len(by_kind[kind(a)]) ** 2 for a, _ in pairs]
    rng, drawn = random.Random(seed), set()
    while len(drawn) < min(num_pairs, len(pairs)):
        drawn.update(rng.choices(pairs, weights, k=num_pairs - len(drawn)))
    print("pairs of each kind:", dict(Counter(kind(a) for a, _ in drawn)))
    return sorted(drawn)


# ---- the measurements ----


def judge(cases: list[tuple], name: str) -> None:
    wrong = [case for case in cases if is_equivalent(case[0], case[1]) != case[2]]
    print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} right")
    for answer, gold, want, _ in wrong:
        print(f"    label {gold!r} answer {answer!r} should be {want}")


def compare_math_verify(cases: list[tuple]) -> None:
    try:
        from math_verify import parse, verify
    except ImportError:
        print("math-verify: not installed (requirements-parity.txt)")
        return
    logging.disable(logging.CRITICAL)
    num_right, seen = 0, set()
    for answer, gold, want, why in cases:
        golds, answers = ([parse(text), parse(f"${text.strip('$ ')}$")] for text in (gold, answer))
        verdicts = {verify(g, a) for g in golds for a in answers}  # as LaTeX, as plain text:
        theirs = want if want in verdicts else not want  # the better one counts
        ours = is_equivalent(answer, gold)
        num_right += theirs == want
        if theirs != ours and (gold, answer) not in seen:
            seen.add((gold, answer))
            right = "reward.py" if ours == want else "math-verify"
            verb = "is" if want else "is not"
            print(f"    {answer!r} {verb} the label {gold!r} ({why}): {right} is right")
    print(f"math-verify: {num_right} of {len(cases)} right, {len(seen)} disagreements")


def measure_time(labels: list[str]) -> None:
    start = time.perf_counter()
    for i in range(100_000):
        integer_verdict(str(i), "204")
    print(f"integers: {100_000 / (time.perf_counter() - start):,.0f} a second")
    is_equivalent("x + 1", "1 + x")  # loads sympy
    checks = []
    for i, gold in enumerate(labels):
        for answer in (as_plain_text(gold), as_loose_latex(gold), labels[i - 1], gold + "+1"):
            start = time.process_time()
            is_equivalent(answer, gold)
            checks.append((1e3 * (time.process_time() - start), answer, gold))
    checks.sort()
    marks = {p: f"{checks[int(p / 100 * len(checks))][0]:.2f}" for p in (50, 95, 99)}
    print(f"CPU ms of {len(checks)} MATH-500 checks, percentiles: {marks}, slowest {checks[-1]}")


def mutate(rng: random.Random, text: str, labels: list[str]) -> str:
    for _ in range(rng.randint(1, 4)):
        i, what = rng.randint(0, len(text)), rng.random()
        j = min(len(text), i + rng.randint(0, 4))
        other = rng.choice(labels)
        inserted = ["", rng.choice(BITS), text[i:j] * 2, other[rng.randint(0, len(other)) :][:6]]
        text = text[:i] + inserted[int(4 * what)] + text[i if what < 0.5 and what > 0.25 else j :]
    return text


def fuzz(labels: list[str], num_mutations: int, seed: int = 0) -> None:
    rng, slowest, num_equal = random.Random(seed), (0.0, "", ""), 0
    for _ in range(num_mutations):
        gold = rng.choice(labels)
        answer = mutate(rng, gold, labels)
        start = time.process_time()
        verdict = is_equivalent(answer, gold)
        assert type(verdict) is bool, (answer, gold, verdict)
        num_equal += verdict
        slowest = max(slowest, (time.process_time() - start, answer, gold))
    print(f"fuzz: {num_mutations} mutations, no exception, {num_equal} equal, slowest {slowest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzz", type=int, default=5000, help="number of mutations")
    num_mutations = parser.parse_args().fuzz
    if not SHARED.exists():
        raise SystemExit(f"no labels: put the shared data beside the repository, at {SHARED}")
    labels = read_labels()
    rows = read_jsonl(SHARED / "vectors/answers.jsonl")
    vectors = [(row["answer"], row["gold"], row["equal"], "judged by hand") for row in rows]
    spellings = [(f(g), g, True, f"{f.__name__} of it") for g in labels for f in SPELLINGS]
    pairs = [(a, b, False, f"two labels, {kind(a)}") for a, b in different_pairs(labels, 1000)]
    judge(vectors, "vectors")
    judge(spellings, "spellings")
    judge(pairs, "different")
    measure_time(labels[:500])
    fuzz(sorted({label for label in labels if kind(label) != "integer"}), num_mutations)
    compare_math_verify(vectors + spellings + pairs)


if __name__ == "__main__":
    main()
