"""sft.py: one denominator, the converters' shapes and their causes of skipping, the script."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sft
from model import Model, ModelConfig, init_weights, load_model, save_model
from rollout import parse_tool_calls
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
    rope_theta=500.0, tie_embeddings=True, max_positions=4096,
)  # fmt: skip
CFG = sft.Config(lr=1.0, clip=1e9, batch_size=4, epochs=2, micro_tokens=10**6)


def make_model(vocab_size=50):
    model = Model(ModelConfig(vocab_size=vocab_size, **TINY))
    init_weights(model, seed=0)
    return model


def make_documents(lengths=(3, 17, 9, 30, 5, 8)):
    """Ragged, with 1 to 15 loss tokens each."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
    return [(x, [0] * (len(x) - len(x) // 2) + [1] * (len(x) // 2)) for x in ids]


def step_gradient(documents, cfg, rank=0, world=1):
    """What one plain gradient step of lr 1 moves the weights by."""
    model = make_model()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sft.sft_step(model, optimizer, documents, cfg, rank, world, "cpu")
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- training ----


def test_gradient_does_not_depend_on_micro_batches_or_ranks():
    """One rank and one micro-batch, many micro-batches, and the mean over the ranks of two and
    three (what sharding does) with ragged lengths; three ranks of two documents leave one idle."""
    documents = make_documents()
    whole = step_gradient(documents, CFG)
    assert torch.allclose(step_gradient(documents, replace(CFG, micro_tokens=20)), whole, atol=1e-6)
    for world, docs in ((2, documents), (3, documents), (3, documents[:2])):
        parts = [step_gradient(docs, CFG, rank, world) for rank in range(world)]
        expected = step_gradient(docs, CFG)
        assert torch.allclose(torch.stack(parts).mean(0), expected, atol=1e-6)


def test_naive_mean_over_micro_batches_is_another_gradient():
    """The fault that the one denominator avoids: each document's own token mean, then the mean."""
    documents = make_documents()
    naive = torch.stack([step_gradient([d], CFG) for d in documents]).mean(0)
    whole = step_gradient(documents, CFG)
    assert (naive - whole).norm() > 0.1 * whole.norm()


def test_tokens_without_loss_get_no_gradient():
    (ids, mask), *_ = make_documents((12,))
    model = make_model()
    loss = sft.sft_loss(model, sft.pack([(ids, [0] * 12)]))
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_every_document_once_an_epoch():
    lengths = [5, 3, 8, 1, 9, 2, 4, 7, 6, 5]
    for cfg in (CFG, replace(CFG, shuffle=False, pool=2)):
        steps = sft.plan_steps(lengths, cfg)
        assert len(steps) == 6 and steps == sft.plan_steps(lengths, cfg)
        for half in (steps[:3], steps[3:]):
            assert sorted(i for step in half for i in step) == list(range(10))


def test_learning_rate_by_hand():
    """100 steps, 4 % warm-up: step 0 is lr/4, step 3 lr; half way down the cosine is lr/2."""
    cfg = sft.Config(lr=1.0, warmup=0.04)
    assert [sft.lr_at(s, 100, cfg) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert sft.lr_at(52, 100, cfg) == pytest.approx(0.5)
    linear = replace(cfg, schedule="linear", final_lr=0.2)
    assert sft.lr_at(52, 100, linear) == pytest.approx(0.2 + 0.8 * 0.5)


def test_it_learns_and_goes_on_where_it_stopped():
    documents, cfg = make_documents() * 4, replace(CFG, lr=3e-3)

    def train(model, optimizer, **kwargs):
        return sft.sft(model, optimizer, documents, cfg, **kwargs)

    whole = make_model()
    losses = [m["loss"] for m in train(whole, sft.make_optimizer(whole, cfg))]
    assert losses[-1] < 0.7 * losses[0]
    model = make_model()
    optimizer, state = sft.make_optimizer(model, cfg), {}

    class Stop(Exception):
        pass

    def stop(step, metrics):
        if step == 4:
            state.update(model=model.state_dict(), optimizer=optimizer.state_dict())
            raise Stop

    with pytest.raises(Stop):
        train(model, optimizer, on_step=stop)
    again = make_model()
    again.load_state_dict(state["model"])
    optimizer = sft.make_optimizer(again, cfg)
    optimizer.load_state_dict(state["optimizer"])
    assert [m["loss"] for m in train(again, optimizer, start=5)] == losses[5:]


# ---- converters ----

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
ASK, REPLY = "Weather in Rome?", "It is sunny."
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": ASK},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"sky": "clear"}'},
        {"from": "gpt", "value": REPLY},
    ],
    "tools": json.dumps([WEATHER]),
}
OPENAI = {
    "messages": [
        {"role": "user", "content": ASK},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}, "id": "1"}
            ],
        },
        {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": REPLY}]},
    ],
    "tools": [{"type": "function", "function": WEATHER}],
}
GLAIVE = {
    "system": f"SYSTEM: You have access to these functions -\n{json.dumps(WEATHER)}",
    "chat": f"USER: {ASK}\n\n\nASSISTANT: <functioncall> "
    '{"name": "get_weather", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
    f'FUNCTION RESPONSE: {{"sky": "clear"}}\n\n\nASSISTANT: {REPLY} <|endoftext|>\n\n\n',
}
TOOLACE = {
    "system": f"Here is a list of functions in JSON:\n[{json.dumps(WEATHER)}]. Call them so.",
    "conversations": [
        {"from": "user", "value": ASK},
        {"from": "assistant", "value": '[get_weather(city="Rome")]'},
        {"from": "tool", "value": '{"sky": "clear"}'},
        {"from": "assistant", "value": REPLY},
    ],
}


SHAPES = dict(sharegpt=SHAREGPT, openai=OPENAI, glaive=GLAIVE, toolace=TOOLACE)


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_four_shapes_are_one_conversation(row):
    c = sft.convert(row)
    assert [t.role for t in c.turns] == ["user", "assistant", "tool", "assistant"]
    assert c.turns[1].calls == [("get_weather", {"city": "Rome"})]
    assert [t["function"]["name"] for t in c.tools] == ["get_weather"] and not c.system
    assert c.turns[1].content() == f"</reason>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    assert c.turns[3].content() == f"</reason>\n<answer>{REPLY}</answer>"


def test_magicoder_solution_becomes_a_call():
    c = sft.convert({"problem": "Print 3.", "solution": "So:\n```python\nprint(3)\n```\nDone."})
    (call,) = parse_tool_calls(c.turns[1].content())
    assert not call.error and call.arguments == {"code": "print(3)\n"}


def test_bracket_calls():
    text = '[Get Weather(city="Rome (old)", days=2, live=true), a.dd(x=[1, -2], y={"a": null})]'
    assert sft.bracket_calls(text, ["Get Weather"]) == [
        ("Get Weather", {"city": "Rome (old)", "days": 2, "live": True}),
        ("a.dd", {"x": [1, -2], "y": {"a": None}}),
    ]
    assert sft.bracket_calls('[f(q="is it true")]', []) == [("f", {"q": "is it true"})]
    quoted = [("f", {}), ("A's", {"x": "f(1)"})]
    assert sft.bracket_calls('[f(), A\'s(x="f(1)")]', ["A's"]) == quoted


def test_a_bracket_call_beyond_the_parser_is_a_counted_skip():
    for text in ("[f(x=" + "-" * 5000 + "1)]", "[f(x=1) g(y=2)]", "[f(1)]", "[f(x=open)]"):
        with pytest.raises(ValueError, match="cannot be read"):
            sft.bracket_calls(text, [])


def test_prose_in_brackets_stays_text():
    prose, spaced = "[see the note (below)]", "[Get Weather(days=2)]"
    assert sft.bracket_calls(prose, ["see"]) == sft.bracket_calls(spaced, []) == []
    row = chat(("user", "Hi"), ("assistant", prose)) | {"tools": [WEATHER]}
    assert sft.convert(row).turns[1].text == prose


def test_tools_may_be_one_object():
    assert sft.convert(OPENAI | {"tools": WEATHER}).tools == OPENAI["tools"]


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    "row, cause",
    [
        ({"text": "?"}, "unknown shape"),
        (chat(("assistant", "Hi")), "no user turn"),
        (chat(("user", "Hi")), "no assistant turn"),
        (chat(("user", "Hi"), ("narrator", "x"), ("assistant", "y")), "unknown role"),
        (chat(("user", "Hi"), ("assistant", "")), "empty content"),
        (chat(("user", "a"), ("tool", "3"), ("assistant", "y")), "tool response without call"),
        (chat(("assistant", "a"), ("user", "b"), ("assistant", "c")), "not start with the user"),
        (chat(("user", "a"), ("assistant", "[f(x=1)]"), ("user", "b"), ("assistant", "c")),
         "unbalanced calls"),
        (chat(("user", "a"), ("assistant", "[f(x=1)]"), ("tool", "1"), ("tool", "2"),
              ("assistant", "c")), "unbalanced calls"),
        (chat(("user", "a"), ("assistant", "[f(x=oops)]")), "bracket call that cannot be read"),
        (chat(("user", "a"), ("assistant", "<functioncall> {bad")), "call that is not JSON"),
        (chat(("user", "a"), ("assistant", '<functioncall> {"name": "f", "arguments": "{"}')),
         "arguments that are not JSON"),
        (SHAREGPT | {"tools": "[{"}, "tools that are not JSON"),
        ({"problem": "p", "solution": "no code"}, "solution without Python"),
        (chat(("user", "Hi")) | {"problem": "p", "solution": "s"}, "no assistant turn"),
        ({"prompt": 3, "response": "a"}, "unknown shape"),
        (OPENAI | {"tools": [1]}, "tools that are not objects"),
        (OPENAI | {"tools": 5}, "tools that are not objects"),
        (TOOLACE | {"system": ["x"]}, "content that is neither text nor parts"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "call without a name"),
        *[(chat(("user", "a"), ("assistant", text)), "bracket call that cannot be read")
          for text in ('[f("x", y=2)]', '[f(**{"a": 1})]', "[f(x=1)(y=2)]", "[f(x={[]: 1})]",
                       "[f(x=1), see this(y=2)]", "[f(x=1) f(y=2)]", "[f(x=g(1))]")],
        *[({"messages": [OPENAI["messages"][1] | {"content": text}]}, "calls in two forms")
          for text in ("[f(x=1)]", f"<functioncall> {json.dumps(CALL)}")],
        (chat(("user", "a"), ("assistant", "<functioncall> " + "[" * 100_000)), "not JSON"),
        (chat(("system", "[" * 100_000), ("user", "a"), ("assistant", "b")), "recursion"),
    ],
)  # fmt: skip
def test_broken_conversations_are_counted_with_their_cause(row, cause, tok, tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(OPENAI)}\n")
    read, (told,) = sft.read_conversations([tmp_path / "a.jsonl"], tok, max_len=10**6)
    assert len(read) == 1 and told.startswith(f"{tmp_path}/a.jsonl:1: ") and cause in told


@pytest.fixture(scope="module")
def tok():
    texts = [json.dumps(row) for row in (SHAREGPT, OPENAI)] * 3
    return Tokenizer.train(texts, vocab_size=400, split="qwen")


def decode_loss(tok, c):
    ids, mask = c.render(tok)
    return tok.decode([id for id, m in zip(ids, mask) if m])


def test_loss_is_on_every_assistant_turn_and_its_stop_token(tok):
    c = sft.convert(SHAREGPT)
    first, second = c.turns[1].content(), c.turns[3].content()
    assert decode_loss(tok, c) == f"{first}<|im_end|>{second}<|im_end|>"


def test_examples_inside_a_prompt_get_no_loss(tok):
    prompt = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    row = {"prompt": chat(*prompt)["messages"], "response": "4"}
    assert decode_loss(tok, sft.convert(row)) == "</reason>\n<answer>4</answer><|im_end|>"
    weighted = chat(*prompt, ("assistant", "4"))
    weighted["messages"][1]["weight"] = 0
    assert decode_loss(tok, sft.convert(weighted)) == "</reason>\n<answer>4</answer><|im_end|>"
    row["prompt"] = row["prompt"][:2]  # ends with an example
    assert decode_loss(tok, sft.convert(row)) == "</reason>\n<answer>4</answer><|im_end|>"


def test_control_tokens_in_data_stay_text(tok):
    ids, mask = sft.convert(chat(("user", "<|im_end|>"), ("assistant", "a<|im_end|>b"))).render(tok)
    assert ids.count(tok.im_end) == 3  # system, user, assistant


def test_calls_are_judged():
    calls = sft.convert(SHAREGPT).turns[1].calls
    block = lambda call: f"</reason>\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    right = dict(calls=1, parsed=True, tool=True, arguments=True)
    assert sft.judge(calls, block(CALL)) == right
    assert sft.judge(calls, block(CALL | {"arguments": {}})) == right | {"arguments": False}
    wrong = right | {"tool": False, "arguments": False}
    assert sft.judge(calls, block(CALL | {"name": "f"})) == wrong
    assert not any(list(sft.judge(calls, "</reason>\nhello").values())[1:])
    assert sft.judge([], block(CALL)) == dict(plain=1, called=True)


def test_measure_calls_counts_every_turn_with_loss(tok):
    model = make_model(tok.vocab_size).eval()
    counts = sft.measure_calls(model, tok, [sft.convert(SHAREGPT)] * 2, max_new_tokens=4)
    assert counts["calls"] == 2 and counts["plain"] == 2 and counts["parsed"] == 0


# ---- the script ----


def run_script(*flags):
    command = [sys.executable, ROOT / "sft.py", "--device", "cpu", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_toy_script_leaves_a_model(tmp_path):
    done = run_script("--preset", "toy", "--documents", 32, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert load_model(tmp_path / "run" / "sft").config.vocab_size == 800


def test_script_says_what_is_missing(tmp_path):
    done = run_script("--out", tmp_path / "run")
    assert done.returncode == 1 and "--init" in done.stderr.splitlines()[-1]
    for field, allowed in (("schedule", "cosine or linear"), ("dtype", "bfloat16 or float32")):
        done = run_script("--preset", "toy", f"--{field}", "x", "--out", tmp_path / "run")
        assert done.stderr.splitlines()[-1] == f"sft.py: --{field} is {allowed}"


def tiny_folder(path, tok):
    model = make_model(tok.vocab_size)
    save_model(model, model.config, path)
    tok.save(path / "tokenizer.json")
    return path


@pytest.mark.slow
def test_script_continues_to_the_same_weights(tok, tmp_path):
    """Rows of four shapes and two broken ones; interrupted by taking the last checkpoint away."""
    init, data, run = tiny_folder(tmp_path / "init", tok), tmp_path / "data.jsonl", tmp_path / "run"
    rows = [*SHAPES.values()] * 3 + [{"text": "?"}, SHAREGPT | {"tools": "["}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--init", init, "--data", data, "--batch-size", 4, "--epochs", 2, "--held-out", 2,
        "--checkpoint-every", 2, "--dtype", "float32", "--lr", 1e-3, "--measure-every", 3,
        "--out", run,
    ]  # fmt: skip
    done = run_script(*flags)
    assert done.returncode == 0, done.stderr
    assert "12 conversations, 2 skipped" in done.stdout
    assert len((run / "skipped.txt").read_text().splitlines()) == 2
    weights, rows = load_model(run / "sft").state_dict(), (run / "metrics.jsonl").read_text()
    sorted((run / "checkpoints").iterdir())[-1].rename(tmp_path / "gone")
    done = run_script(*flags)
    assert done.returncode == 0 and "from step 4" in done.stdout, done.stdout + done.stderr
    again = load_model(run / "sft").state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (run / "metrics.jsonl").read_text() == rows  # no step twice


@pytest.mark.slow
def test_real_shapes_through_sft_and_a_step_of_rl(tok, tmp_path):
    """Glaive, GSM8K and Qwen's tokenizer where they are, else rows and a tokenizer made here."""
    shared = ROOT.parent / "shared" / "data"
    real = shared.is_dir()
    if real:
        tok = Tokenizer.from_file(shared / "qwen" / "tokenizer.json")
        conversations = shared / "glaive" / "glaive_toolcall_en_demo.json"
        rows = [r for r in json.loads(conversations.read_text()) if "function_call" in str(r)]
        rows = sorted(rows, key=lambda r: len(str(r)))[:8]  # short: Qwen's vocabulary is large
        problems = (shared / "gsm8k_train.jsonl").read_text().splitlines()[:4]
    else:
        rows = [*SHAPES.values()] * 2
        pairs = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
        problems = list(map(json.dumps, pairs))
    data, gsm, held_out = (tmp_path / name for name in ("data.json", "gsm.jsonl", "eval.jsonl"))
    data.write_text(json.dumps(rows))
    gsm.write_text("\n".join(problems[:2]))
    held_out.write_text("\n".join(problems[2:]))
    init, run = tiny_folder(tmp_path / "init", tok), tmp_path / "cold"
    done = run_script("--init", init, "--data", data, "--batch-size", 4, "--epochs", 1,
                      "--held-out", 0, "--dtype", "float32", "--out", run)  # fmt: skip
    assert done.returncode == 0 and "8 conversations, 0 skipped" in done.stdout, done.stderr
    for row in rows:
        text = decode_loss(tok, sft.convert(row))
        turns = [t.content() for t in sft.convert(row).turns if t.role == "assistant"]
        assert text == "".join(f"{turn}<|im_end|>" for turn in turns)
    room = 450 if real else 1500  # a small vocabulary makes long prompts
    command = [
        sys.executable, ROOT / "train.py", "--preset", "qwen3-0.6b", "--init", run / "sft",
        "--data", gsm, "--eval-data", held_out, "--out", tmp_path / "rl", "--device", "cpu",
        "--dtype", "float32", "--stages", 1, "--steps", 1, "--problems-per-step", 2,
        "--rollouts", 4, "--group-size", 2, "--min-keep", 1, "--max-tokens", room,
        "--eval-tokens", room, "--eval-samples", 1, "--cache-tokens", 16384, "--workers", 1,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"step": 1' in (tmp_path / "rl" / "metrics.jsonl").read_text()
