"""toy.py: problems, traces as a rollout and the sandbox would leave them, tokens."""

import pytest

import toy
from rollout import parse_tool_calls
from sandbox import Sandbox
from tokenizer import render_conversation, render_prompt, tool_response_text


@pytest.fixture(scope="module")
def traces():
    return toy.toy_traces(400, seed=3)


@pytest.fixture(scope="module")
def tok():
    return toy.toy_tokenizer(seed=0)


def test_held_out_problems_never_meet_training_problems():
    held_out = toy.toy_problems(600, seed=0, holdout=True)
    train = toy.toy_problems(600, seed=0, holdout=False)
    assert len({p.question for p in held_out}) == 600
    assert not {p.question for p in held_out} & {p.question for p in train}
    asked = {m[0]["content"] for m in toy.toy_traces(400, seed=0)}
    assert not any(map(toy.is_held_out, asked))


def test_problems_are_reproducible_and_of_all_kinds():
    problems = toy.toy_problems(200, seed=5)
    assert problems == toy.toy_problems(200, seed=5) != toy.toy_problems(200, seed=6)
    assert {p.source for p in problems} == set(toy.KINDS)
    assert toy.toy_traces(4, seed=5) == toy.toy_traces(4, seed=5) != toy.toy_traces(4, seed=6)


def test_answers_by_hand():
    """37 * 41 - 5 = 1512; the primes below 30 are 10; 3 + ... + 5 = 12; 17 * 5 + 3 = 88."""
    right = {kind: row[2][0] for kind, row in toy.KINDS.items()}
    value = lambda kind, *operands: eval(right[kind].format(*operands), {"math": toy.math})
    assert value("arithmetic", 37, 41, 5) == 1512
    assert value("primes", 30) == 10
    assert value("sum", 3, 5) == 12
    assert value("linear", 17, 3, 88) == 5
    assert value("power", 2, 10, 1000) == 24
    assert value("gcd", 12, 18) == 6
    assert value("multiples", 5, 10, 20) == 3


def test_shares_of_noise(traces):
    """15 % guess without a call; 45 % of the others break their first call; within 4 sigma."""
    called = [m for m in traces if len(m) > 2]
    broken = [m for m in called if not m[2]["content"].lstrip("-").isdigit()]
    assert 0.08 < 1 - len(called) / len(traces) < 0.22
    assert 0.34 < len(broken) / len(called) < 0.56


def test_tool_responses_are_those_of_the_sandbox(traces):
    """Every distinct response of a few dozen traces against parser and sandbox."""
    shown = {}
    for messages in traces[:60]:
        for written, response in zip(messages[1:], messages[2:]):
            if response["role"] == "tool":
                shown[written["content"]] = response["content"]
    calls = {text: parse_tool_calls(text) for text in shown}
    assert all(len(found) == 1 for found in calls.values())
    kinds = set()
    with Sandbox(workers=1, preload=("math",)) as box:
        for text, (call,) in calls.items():
            if call.error:
                answered = call.error
            else:
                result = box.result(box.submit(call.arguments["code"]), timeout=60)
                answered = tool_response_text(result, traceback_lines=toy.TRACEBACK_LINES)
            kinds.add(answered.split("\n")[-1].split(":")[0])
            assert answered == shown[text]
    assert {"SyntaxError", "NameError", "Expecting ',' delimiter"} <= kinds


def test_loss_is_on_what_the_assistant_wrote(tok, traces):
    messages = next(m for m in traces if len(m) == 4)
    ids, mask = render_conversation(tok, messages, system_text=toy.TOY_SYSTEM_TEXT)
    written = tok.decode([id for id, m in zip(ids, mask) if m])
    assert written == f"{messages[1]['content']}<|im_end|>{messages[3]['content']}<|im_end|>"


def test_digits_are_single_tokens_and_prompts_are_short(tok):
    assert tok.vocab_size == toy.TOY_MODEL["vocab_size"]
    assert len(tok.encode("1234567")) == 7
    for p in toy.toy_problems(200, seed=1):
        prompt = render_prompt(tok, p.question, system_text=toy.TOY_SYSTEM_TEXT, tools=())
        assert len(prompt) < 48


def test_documents_start_with_mostly_copies(tok):
    documents = toy.toy_documents(tok, 400, seed=0)
    copies = ["Repeat" in tok.decode(ids) for ids, _ in documents]
    assert 0.45 < sum(copies[:120]) / 120 < 0.75
    assert 0.1 < sum(copies[120:]) / 280 < 0.3


def test_calls_are_json_of_the_tool():
    block = toy.call_block("print(6 * 7)")
    (call,) = parse_tool_calls(block)
    assert call.arguments == {"code": "print(6 * 7)"} and toy.tool_response(block) == "42"
