"""Toy task: problems that need the tool, and noisy traces that show how (not) to use it.

The whole method has to be seen working on a CPU in minutes. Seven kinds of problem (`KINDS`), two
phrasings each, too hard in the head of a 0.6 M model and one line of Python with the tool. Held
out for evaluation: sha256(question) % 10 == 0; such problems never enter SFT or RL.

The traces for SFT are bad on purpose (`Noise`), so that RL has something to select from: half use
a wrong formula, half break their first call and then repair it, some guess. That is the paper's
environment noise (section 2.2.2): failed calls in trajectories that end well. Tool responses are
real: each call is run here, in process, because its code is ours and not a model's.

    toy_problems(1, seed=0)             -> [Problem("toy-7a4..", "How many multiples of 27 are..")]
    toy_traces(1, seed=0)               -> [[user, assistant with a call, tool, assistant]]
    copy_documents(1, seed=0)           -> [[user "Repeat 71.", assistant " 71.</reason>"]]
    toy_documents(tok, 16_000, seed=0)  -> [(token_ids, loss_mask), ...] in the order of training

The protocol is that of real models (`render_*`) but for a one-line system text without signatures,
a bare question, and tracebacks cut to their last two lines: an SFT step costs a fifth.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import linecache
import math
import random
import traceback
from dataclasses import dataclass
from hashlib import sha256
from types import SimpleNamespace

from data import Problem
from tokenizer import PYTHON_TOOL, Tokenizer, render_conversation, tool_response_text

TOY_SYSTEM_TEXT = "Reason, call Python, answer."
TRACEBACK_LINES = 2
TOY_MODEL = dict(vocab_size=800, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2,
                 head_dim=32, intermediate_size=320, rope_theta=500.0, tie_embeddings=True,
                 max_positions=512)  # fmt: skip
# The largest levers found: at 0.02 (Qwen's) for either, copying numbers is learned far later.
TOY_INIT = dict(embedding_std=0.2, std=0.05)


@dataclass(frozen=True)
class Noise:
    """Shares of bad behaviour in the traces."""

    guess: float = 0.15  # answers without the tool
    broken: float = 0.45  # the first call fails
    again: float = 0.20  # of the broken: so does the second
    loop: float = 0.05  # of the broken: the same call several times, then a guess
    repaired: float = 0.98  # of the others: a call that works follows; else a guess
    right: float = 0.50  # right formula, else one of two wrong ones
    bad_copy: float = 0.04  # a digit of the output changes on its way into the answer
    doubled: float = 0.10  # two <answer> tags, which p_format (Eq. 5) punishes
    long: float = 0.40  # a long sentence of reasoning


# ---- problems ----

# kind: operands, mostly of two or three digits (n = randint), two phrasings, the right expression
# and two wrong ones, a helper that does not exist.
KINDS = {
    "arithmetic": (lambda n: (n(12, 99), n(12, 99), n(3, 999)),
        ("What is {} * {} - {}?", "Compute {} times {} minus {}."),
        ("{} * {} - {}", "{} * {} + {}", "{} * ({} - {})"), "compute"),
    "sum": (lambda n: (n(10, 300), n(320, 900)),
        ("Add all integers from {} to {}.", "What is the sum of {}, ..., {}?"),
        ("sum(range({}, {} + 1))", "sum(range({}, {}))", "{} + {}"), "add_all"),
    "power": (lambda n: (n(3, 99), n(11, 99), n(50, 999)),
        ("What is {}^{} mod {}?", "Find the remainder of {}^{} divided by {}."),
        ("pow({}, {}, {})", "{} * {} % {}", "({} ^ {}) % {}"), "power_mod"),
    "gcd": (lambda n: (n(3, 12) * (g := n(6, 40)), n(13, 24) * g),
        ("What is gcd({}, {})?", "Find the greatest common divisor of {} and {}."),
        ("math.gcd({}, {})", "min({}, {})", "abs({} - {})"), "find_gcd"),
    "primes": (lambda n: (n(30, 999),),
        ("How many primes are below {}?", "Count the prime numbers less than {}."),
        ("sum(all(n % d for d in range(2, n)) for n in range(2, {}))",
         "sum(n % 2 for n in range(2, {}))", "{} // 2"), "count_primes"),
    "linear": (lambda n: (a := n(3, 40), b := n(11, 400), a * n(11, 99) + b),
        ("Solve {}x + {} = {} for x.", "Which x has {} * x + {} = {}?"),
        ("({2} - {1}) // {0}", "({2} + {1}) // {0}", "{2} // {0} - {1}"), "solve_x"),
    "multiples": (lambda n: (n(3, 40), n(10, 300), n(320, 900)),
        ("How many multiples of {} are in {}..{}?", "Count the multiples of {} from {} to {}."),
        ("sum(n % {} == 0 for n in range({}, {} + 1))", "{2} // {0}", "({2} - {1}) // {0} + {0}"),
        "multiples"),
}  # fmt: skip


def draw_problem(rng: random.Random, holdout: bool | None) -> tuple[Problem, tuple]:
    while True:
        kind = rng.choice(list(KINDS))
        draw, phrasings, expressions, _ = KINDS[kind]
        operands = draw(rng.randint)
        question = rng.choice(phrasings).format(*operands)
        if holdout in (None, is_held_out(question)):
            name = f"toy-{sha256(question.encode()).hexdigest()[:12]}"
            answer = str(eval(expressions[0].format(*operands), {"math": math}))  # our expression
            return Problem(name, question, answer, source=kind), operands


def is_held_out(question: str) -> bool:
    return int(sha256(question.encode()).hexdigest(), 16) % 10 == 0


def toy_problems(n: int, seed: int, holdout: bool | None = None) -> list[Problem]:
    """n different problems: held-out ones only (True), none of them (False), or any (None)."""
    rng, found = random.Random(f"problems {seed}"), {}
    while len(found) < n:
        problem, _ = draw_problem(rng, holdout)
        found[problem.question] = problem
    return list(found.values())


# ---- traces ----

SHORT = ("I use Python for {}.", "Let Python compute {}.")
LONG = (
    "This is too hard to do in the head, so I write one line of Python for {} and read its output.",
    "First I think about what is asked: {}. Then I let Python do the work and take its output.",
)
REPAIR = ("The call failed, I fix it.", "That was an error, once more.")
GUESS = ("I guess the answer.", "I think I know it.")
say = lambda role, content: {"role": role, "content": content}


def toy_traces(n: int, seed: int, noise: Noise = Noise()) -> list[list[dict]]:
    """n conversations (lists of messages) about problems that are not held out."""
    rng = random.Random(f"traces {seed}")
    return [make_trace(rng, *draw_problem(rng, holdout=False), noise) for _ in range(n)]


def make_trace(rng, problem: Problem, operands: tuple, noise: Noise) -> list[dict]:
    """Think, call, perhaps fail and repair, answer."""
    _, _, (right, *wrong), helper = KINDS[problem.source]
    expression = (right if rng.random() < noise.right else rng.choice(wrong)).format(*operands)
    numbers = ", ".join(map(str, operands))
    code = f"import math\nprint({expression})" if "math." in expression else f"print({expression})"
    calls = [] if rng.random() < noise.guess else [call_block(code)]
    if calls and rng.random() < noise.broken:
        calls = broken_calls(rng, code, f"print({helper}({numbers}))", noise)
    messages = [say("user", problem.question)]
    thought = rng.choice(LONG if rng.random() < noise.long else SHORT).format(numbers)
    for block in calls:
        messages.append(say("assistant", f"{thought}</reason>\n{block}"))
        messages.append(say("tool", tool_response(block)))
        thought = rng.choice(REPAIR)
    if calls[-1:] == [call_block(code)]:
        value = messages[-1]["content"]
        thought = f"The output is {value}."
        if rng.random() < noise.bad_copy:
            i = rng.randrange(len(value))
            value = value[:i] + rng.choice("0123456789") + value[i + 1 :]
    else:
        thought, value = rng.choice(GUESS), str(rng.randrange(10 ** len(problem.answer)))
    tags = [f"<answer>\\boxed{{{value}}}</answer>"] * (1 + (rng.random() < noise.doubled))
    return [*messages, say("assistant", "\n".join([f"{thought}</reason>", *tags]))]


def broken_calls(rng, code: str, helper: str, noise: Noise) -> list[str]:
    """One or two calls that fail, then mostly one that works."""
    kinds = [call_block(c) for c in (code[:-1], code.replace("print", "pritn"), helper)]
    kinds.append(call_block(code).replace("}}\n", "\n"))  # its JSON never ends
    first = rng.choice(kinds)
    if rng.random() < noise.loop:
        return [first] * rng.randint(3, 5)
    calls = [first, rng.choice(kinds)] if rng.random() < noise.again else [first]
    return calls + [call_block(code)] * (rng.random() < noise.repaired)


def call_block(code: str) -> str:
    call = json.dumps({"name": PYTHON_TOOL["function"]["name"], "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call>"


@functools.lru_cache(maxsize=50_000)
def tool_response(block: str) -> str:
    """What rollout (of JSON that is cut) or the sandbox answers to one of our own calls."""
    try:
        call = json.loads(block.removeprefix("<tool_call>").removesuffix("</tool_call>").strip())
    except json.JSONDecodeError as e:
        return str(e)
    code, out, error = call["arguments"]["code"], io.StringIO(), ""
    linecache.cache["<tool>"] = (len(code), None, code.splitlines(True), "<tool>")  # traceback's
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
    except Exception:
        error = traceback.format_exc()
    result = SimpleNamespace(status="error" if error else "ok", stdout=out.getvalue(), stderr=error)
    return tool_response_text(result, traceback_lines=TRACEBACK_LINES)


def copy_documents(n: int, seed: int) -> list[list[dict]]:
    """Conversations that only copy 1 to 3 numbers: so copying is learned sooner."""
    rng, texts = random.Random(f"copies {seed}"), []
    for _ in range(n):
        numbers = [rng.randrange(10 ** rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
        texts.append(", ".join(map(str, numbers)) + ".")
    return [[say("user", f"Repeat {t}"), say("assistant", f" {t}</reason>")] for t in texts]


# ---- tokens ----


def toy_tokenizer(seed: int = 0) -> Tokenizer:
    """Byte-level BPE without word pattern: a fixed phrase becomes few tokens, digits stay single.
    It learns from segments as `render_*` encodes them, so that no token straddles a border."""
    frame = {"user": "user\n{}", "assistant": "{}", "tool": "\n{}\n"}
    texts = []
    for messages in toy_traces(3000, seed) + copy_documents(600, seed):
        texts += [frame[m["role"]].format(m["content"]) for m in messages]
        texts += [f"system\n{TOY_SYSTEM_TEXT}", *["assistant\n<reason>", "user\n"] * len(messages)]
    return Tokenizer.train(texts, vocab_size=TOY_MODEL["vocab_size"], split="none")


def toy_documents(tok: Tokenizer, n: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """n (token_ids, loss_mask) in the order of training: 60 % copies in the first 30 %, then 20 %;
    drawn from 3,000 traces and 600 copies."""
    rng = random.Random(f"documents {seed}")
    render = lambda messages: render_conversation(tok, messages, TOY_SYSTEM_TEXT)
    traces = [render(messages) for messages in toy_traces(3000, seed)]
    copies = [render(messages) for messages in copy_documents(600, seed)]
    shares = [0.6 if i < 0.3 * n else 0.2 for i in range(n)]
    return [rng.choice(copies if rng.random() < share else traces) for share in shares]
