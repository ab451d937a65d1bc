"""Toy task: problems that need the tool, and noisy traces that show how (not) to use it.

The whole method has to be seen working on a CPU in minutes. Seven kinds of problem (`KINDS`), two
phrasings each, too hard in the head of a 0.6 M model and one line of Python with the tool. Held
out for evaluation: sha256(question) % 10 == 0; such problems never enter SFT or RL.

The traces for SFT are bad on purpose, so that RL has something to select from (`Noise`): half use
a wrong formula, half break their first call and repair it, some guess without the tool. This is
the environment noise of the paper's section 2.2.2: calls that fail, in trajectories that end well.
Tool responses are real: each call is run here, in process, because its code is ours and not a
model's, and shows what the sandbox would. RL mostly selects among behaviours shown here.

    toy_problems(2, seed=0, holdout=True) -> [Problem("toy-5c1...", "What is 37 * 41 - 5?", "1512")]
    toy_traces(1, seed=0)                 -> [[user, assistant with a call, tool, assistant]]
    copy_documents(1, seed=0)             -> [["Repeat 47, 183.", the numbers again]]
    toy_documents(tok, 16_000, seed=0)    -> [(token_ids, loss_mask), ...] in the order of training

The protocol is the one of real models (`tokenizer.render_*`) but for a one-line system text
without tool signature and tracebacks cut to two lines: a step costs a fifth.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import random
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

from data import Problem
from tokenizer import Tokenizer, render_conversation, tool_response_text

TOY_SYSTEM_TEXT = "Reason, call Python, answer."
TOY_USER_TEMPLATE = "{question}"
TRACEBACK_LINES = 2
TOOL_NAME = "execute_python_code_with_standard_io"
# Embedding initialisation 0.2 belongs to it (model.init_weights): with 0.02 a token's identity
# drowns, and copying numbers from prompt to call is learned far later. The largest lever found.
TOY_MODEL = dict(
    vocab_size=800, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    intermediate_size=320, rope_theta=500.0, tie_embeddings=True, max_positions=512,
)  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """Shares of bad behaviour in the traces."""

    guess: float = 0.15  # answers without the tool
    broken: float = 0.45  # first call fails
    broken_again: float = 0.20  # and so does the second
    loop: float = 0.05  # of the broken: the same call again and again, then a guess
    repaired: float = 0.98  # of the broken: a call that works follows; else a guess
    right: float = 0.50  # right formula, else one of two wrong ones
    bad_copy: float = 0.04  # a digit of the output changes on its way into the answer
    doubled: float = 0.10  # two <answer> tags, which p_format (Eq. 5) punishes
    long: float = 0.40  # a long sentence of reasoning


# ---- problems ----


def draw(rng: random.Random, kind: str) -> tuple:
    """Operands of a problem, mostly of two or three digits."""
    n = rng.randint
    if kind == "arithmetic":
        return n(12, 99), n(12, 99), n(3, 999)
    if kind == "power":
        return n(3, 99), n(11, 99), n(50, 999)
    if kind == "gcd":
        g, a = n(2, 40), n(3, 24)
        return g * a, g * (a + n(1, 20))
    if kind == "primes":
        return (n(30, 999),)
    if kind == "linear":
        a, x, b = n(3, 40), n(11, 99), n(11, 400)
        return a, b, a * x + b
    low = n(10, 300)
    if kind == "multiples":
        return n(3, 40), low, low + n(100, 600)
    return low, low + n(20, 600)


# kind: two phrasings, the right expression and two wrong ones, a helper that does not exist.
KINDS = {
    "arithmetic": (("What is {} * {} - {}?", "Compute {} times {} minus {}."),
                   ("{} * {} - {}", "{} * {} + {}", "{} * ({} - {})"), "compute"),
    "sum": (("Add all integers from {} to {}.", "What is the sum of {}, ..., {}?"),
            ("sum(range({}, {} + 1))", "sum(range({}, {}))", "{} + {}"), "add_all"),
    "power": (("What is {}^{} mod {}?", "Find the remainder of {}^{} divided by {}."),
              ("pow({}, {}, {})", "{} * {} % {}", "({} ^ {}) % {}"), "power_mod"),
    "gcd": (("What is gcd({}, {})?", "Find the greatest common divisor of {} and {}."),
            ("math.gcd({}, {})", "min({}, {})", "abs({} - {})"), "find_gcd"),
    "primes": (("How many primes are below {}?", "Count the prime numbers less than {}."),
               ("sum(all(n % d for d in range(2, n)) for n in range(2, {}))",
                "sum(n % 2 for n in range(2, {}))", "{} // 2"), "count_primes"),
    "linear": (("Solve {}x + {} = {} for x.", "Which x has {} * x + {} = {}?"),
               ("({2} - {1}) // {0}", "({2} + {1}) // {0}", "{2} // {0} - {1}"), "solve_x"),
    "multiples": (("How many multiples of {} are in {}..{}?",
                   "Count the numbers divisible by {} from {} to {}."),
                  ("sum(n % {} == 0 for n in range({}, {} + 1))", "{2} // {0}",
                   "({2} - {1}) * {0}"), "multiples"),
}  # fmt: skip


def evaluate(expression: str):
    return eval(expression, {"math": math})  # our own expressions only


def make_problem(rng: random.Random) -> tuple[Problem, tuple]:
    kind = rng.choice(list(KINDS))
    phrasings, expressions, _ = KINDS[kind]
    operands = draw(rng, kind)
    question = rng.choice(phrasings).format(*operands)
    answer = str(evaluate(expressions[0].format(*operands)))
    return Problem(f"toy-{_hash(question):064x}"[:16], question, answer, kind), operands


def _hash(question: str) -> int:
    return int(hashlib.sha256(question.encode()).hexdigest(), 16)


def is_held_out(problem: Problem) -> bool:
    return _hash(problem.question) % 10 == 0


def toy_problems(n: int, seed: int, holdout: bool | None = None) -> list[Problem]:
    """n different problems: held-out ones only (True), none of them (False), or both (None)."""
    return [p for p, _ in _distinct(n, random.Random(f"problems {seed}"), holdout)]


def _distinct(n, rng, holdout):
    seen = {}
    while len(seen) < n:
        problem, operands = make_problem(rng)
        if holdout is None or is_held_out(problem) == holdout:
            seen.setdefault(problem.id, (problem, operands))
    return list(seen.values())


# ---- traces ----

SHORT = ("I use Python for {}.", "Let Python compute {}.")
LONG = (
    "This is too hard to do in the head, so I write one line of Python for {} and read its output.",
    "First I think about what is asked: {}. Then I let Python do the work and take its output.",
)
FIX = ("The call failed, I fix it.", "That was an error, once more.")
GUESS = ("I guess the answer.", "I think I know it.")


def toy_traces(n: int, seed: int, noise: Noise = Noise()) -> list[list[dict]]:
    """n conversations about problems that are not held out: lists of messages."""
    rng = random.Random(f"traces {seed}")
    problems = (_distinct(1, rng, holdout=False)[0] for _ in range(n))
    return [make_trace(rng, problem, operands, noise) for problem, operands in problems]


def make_trace(rng, problem: Problem, operands: tuple, noise: Noise) -> list[dict]:
    """Think, call, perhaps fail and repair, answer."""
    _, (right, *wrong), helper = KINDS[problem.source]
    expression = (right if rng.random() < noise.right else rng.choice(wrong)).format(*operands)
    messages = [{"role": "user", "content": problem.question}]
    if rng.random() < noise.guess:
        return messages + [_answer(rng, rng.choice(GUESS), _guess(rng, problem), noise)]
    operands = ", ".join(map(str, operands))
    good = f"print({expression})"
    if "math." in good:
        good = f"import math\n{good}"
    calls = [_call(good)]
    if rng.random() < noise.broken:
        calls = _broken_calls(rng, good, f"print({helper}({operands}))", noise)
    thought = rng.choice(LONG if rng.random() < noise.long else SHORT).format(operands)
    for block, response in calls:
        messages.append({"role": "assistant", "content": f"{thought}</reason>\n{block}"})
        messages.append({"role": "tool", "content": response})
        thought = rng.choice(FIX)
    if calls[-1] != _call(good):
        return messages + [_answer(rng, rng.choice(GUESS), _guess(rng, problem), noise)]
    output = calls[-1][1]
    if rng.random() < noise.bad_copy:
        i = rng.randrange(len(output))
        output = output[:i] + rng.choice("0123456789") + output[i + 1 :]
    return messages + [_answer(rng, "The output is " + output + ".", output, noise)]


def _broken_calls(rng, good, helper, noise):
    """[(block, response), ...]: one or two that fail, then mostly one that works."""
    block, response = _call(good)
    cut = block.replace("}}\n</tool_call>", "\n</tool_call>")
    kinds = [_call(good[:-1]), _call(good.replace("print", "pritn")), _call(helper)]
    kinds.append((cut, malformed_response(cut)))
    first = rng.choice(kinds)
    if rng.random() < noise.loop:
        return [first] * rng.randint(3, 5)
    calls = [first, rng.choice(kinds)] if rng.random() < noise.broken_again else [first]
    return calls + [(block, response)] * (rng.random() < noise.repaired)


def _call(code):
    call = json.dumps({"name": TOOL_NAME, "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call>", tool_response(code)


def _answer(rng, thought, answer, noise):
    tag = f"<answer>\\boxed{{{answer}}}</answer>"
    tags = f"{tag}\n{tag}" if rng.random() < noise.doubled else tag
    return {"role": "assistant", "content": f"{thought}</reason>\n{tags}"}


def _guess(rng, problem):
    return str(rng.randrange(10 ** len(problem.answer)))


@functools.lru_cache(maxsize=100_000)
def tool_response(code: str) -> str:
    """What the sandbox answers to our own code."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        result = SimpleNamespace(status="ok", stdout=out.getvalue(), stderr="")
    except Exception:
        result = SimpleNamespace(status="error", stdout="", stderr=traceback.format_exc())
    return tool_response_text(result, traceback_lines=TRACEBACK_LINES)


def malformed_response(block: str) -> str:
    """What rollout answers to a call whose JSON is cut."""
    body = block.removeprefix("<tool_call>\n")
    try:
        json.JSONDecoder().raw_decode(body)
    except json.JSONDecodeError as e:
        return f"JSONDecodeError: {e.msg} at character {e.pos} of the call"
    raise AssertionError(f"this call is not malformed: {block}")


def copy_documents(n: int, seed: int) -> list[list[dict]]:
    """Conversations that only copy numbers: induction is learned sooner."""
    rng, traces = random.Random(f"copies {seed}"), []
    for _ in range(n):
        numbers = [str(rng.randrange(10 ** rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        numbers = ", ".join(numbers)
        ask = {"role": "user", "content": f"Repeat {numbers}."}
        traces.append([ask, {"role": "assistant", "content": f" {numbers}.</reason>"}])
    return traces


# ---- tokens ----


def toy_tokenizer(seed: int = 0, num_traces: int = 3000, num_copies: int = 600) -> Tokenizer:
    """Byte-level BPE without word pattern: fixed phrases become few tokens, digits stay single.

    Each segment (what one author wrote) is trained and encoded on its own, so no token straddles a
    border between them.
    """
    texts = []
    for messages in toy_traces(num_traces, seed) + copy_documents(num_copies, seed):
        texts.append(f"system\n{TOY_SYSTEM_TEXT}")
        for m in messages:
            before = {"assistant": ["assistant\n<reason>"], "tool": ["user\n"]}.get(m["role"], [])
            own = {"user": "user\n{}", "tool": "\n{}\n"}.get(m["role"], "{}")
            texts += [*before, own.format(m["content"])]
    return Tokenizer.train(texts, vocab_size=TOY_MODEL["vocab_size"], split="none")


def toy_documents(
    tok: Tokenizer, n: int, seed: int = 0, num_traces: int = 3000, num_copies: int = 600,
    copies_until: float = 0.3,
) -> list[tuple[list[int], list[int]]]:  # fmt: skip
    """n documents in the order of training: 60 % copies in the first part, 20 % afterwards."""
    rng = random.Random(f"documents {seed}")

    def render(messages):
        return render_conversation(tok, messages, system_text=TOY_SYSTEM_TEXT, tools=())

    traces = [render(m) for m in toy_traces(num_traces, seed)]
    copies = [render(m) for m in copy_documents(num_copies, seed)]
    share = [0.6 if i < copies_until * n else 0.2 for i in range(n)]
    return [rng.choice(copies if rng.random() < s else traces) for s in share]
