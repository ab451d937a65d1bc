"""Scores by hand, the audit of stored traces, entropy, and the scripts on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval as evaluation
from data import Problem, ToolCall, Trajectory
from eval import audit, entropy_analysis, score, table, verdict
from sandbox import ToolResult

ROOT = Path(__file__).parent.parent


def trajectory(problem="p", rollout=0, reward=1.0, answer="42", statuses=("ok",), stop="stopped"):
    t = Trajectory(Problem(problem, "6 * 7?", "42"), rollout, 1, reward=reward, answer=answer)
    t.append([1, 2], "prompt")
    t.append([3, 4, 5], "model", [-1.0] * 3, [0.5, 0.1, 2.0])
    for status in statuses:
        out = "42\n" if status == "ok" else ""
        t.tool_calls.append(ToolCall(0, "python", "print(6 * 7)", "", status, out))
    t.num_turns, t.stop_reason = 1 + len(statuses), stop
    return t


def test_score_by_hand():
    """Shares 1/2 and 1: mean .75, variance .125, standard error sqrt(.125 / 2) = .25. Errors: 1 of
    4 calls; correct ones: 1 of 3. Majority: tie of 42 and 7, the first seen wins; then 42."""
    rows = [
        trajectory("a", 0, 1.0, "42", ("ok", "error")),
        trajectory("a", 1, 0.0, "7", ("ok",)),
        trajectory("b", 0, 1.0, "42", ("ok",)),
        trajectory("b", 1, 1.0, "42", ()),
    ]
    r = score([t.summary() for t in rows])
    assert (r["pass@1"], r["stderr"], r["pass@k"], r["maj@k"]) == (0.75, 0.25, 1.0, 1.0)
    assert (r["errors_per_call"], r["errors_per_call_correct"]) == (0.25, pytest.approx(1 / 3))
    assert (r["calls"], r["length"], r["turns"], r["over_limit"]) == (1.0, 5.0, 2.0, 0.0)
    assert "0.750 +- 0.250" in table([("SFT", r)])


def test_a_majority_of_wrong_answers_is_wrong_and_no_answer_is_no_vote():
    wrong = [trajectory("a", i, 0.0, "7") for i in (0, 1)] + [trajectory("a", 2, 1.0, "42")]
    r = score([t.summary() for t in wrong])
    assert r["maj@k"] == 0.0 and r["pass@k"] == 1.0
    silent = [trajectory("a", i, 0.0, None) for i in (0, 1)] + [trajectory("a", 2, 1.0, "42")]
    assert score([t.summary() for t in silent])["maj@k"] == 1.0


def test_truncated_is_wrong_whatever_the_answer():
    rows = trajectory(), trajectory(stop="length"), trajectory(answer=None), trajectory(answer="41")
    assert [verdict(t, box=None) for t in rows] == [True, False, False, False]  # no sandbox needed


def stored(tmp_path, *rows):
    (tmp_path / "traces").mkdir()
    lines = "".join(json.dumps(t.to_json() | {"texts": []}) + "\n" for t in rows)
    (tmp_path / "traces" / "step_00001.jsonl").write_text(lines)
    return tmp_path


def test_audit_finds_nothing_in_true_traces_and_every_lie(tmp_path, capsys):
    honest = trajectory(statuses=("ok", "lost", "malformed"))
    assert audit(stored(tmp_path, honest), workers=1) == []
    assert "1 calls and 1 answers again, 0 differ" in capsys.readouterr().out
    address = trajectory()
    address.tool_calls[0].code = "print(object())"
    address.tool_calls[0].stdout = "<object object at 0x7f0123456789>\n"
    (tmp_path / "traces" / "step_00000.jsonl").write_text(json.dumps(address.to_json()) + "\n")
    assert audit(tmp_path, workers=1) == []
    liar = trajectory(reward=0.0)
    liar.tool_calls[0].stdout = "41\n"
    (tmp_path / "traces" / "step_00002.jsonl").write_text(json.dumps(liar.to_json()) + "\n")
    call, answer = audit(tmp_path, workers=1)
    assert "'42\\n'" in call and "reward was 0.0, is 1.0" in answer


def test_what_is_no_integer_is_judged_in_the_sandbox_under_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("reward.is_equivalent", None)  # of this process
    true, lie = trajectory(answer="\\frac{84}{2}"), trajectory(answer="\\frac{83}{2}", rollout=1)
    (told,) = audit(stored(tmp_path, true, lie), workers=1)
    assert "rollout 1" in told and "reward was 1.0, is 0.0" in told
    hung = SimpleNamespace(submit_check=lambda *pair: 0, result=lambda _: ToolResult("timeout"))
    assert not verdict(true, hung)


def test_a_folder_without_traces_and_a_broken_line_are_sentences(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        evaluation.read_traces(tmp_path)
    stored(tmp_path, trajectory())
    (tmp_path / "traces" / "step_00002.jsonl").write_text('{"a": 1}\n{"b"')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        evaluation.read_traces(tmp_path)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 folder."""
    from model import Model, ModelConfig, init_weights, save_model
    from tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tok = Tokenizer.train(["What is 6 * 7?", "I compute it."] * 3, vocab_size=300)
    model = Model(ModelConfig(tok.vocab_size, 32, 2, 2, 1, 16, 64, tie_embeddings=True))
    init_weights(model, 0)
    save_model(model, model.config, folder)
    tok.save(folder / "tokenizer.json")
    return folder


def script(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_eval_runs_any_folder_and_writes_samples(model_folder, tmp_path, chat):
    data, out = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
    rows = [{"problem": f"What is {i} * 7?", "answer": 7 * i} for i in range(3)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--samples", "2", "--max-tokens", "1200", "--workers", "1", "--out", str(out), *chat]
    code, text = script("eval.py", "--model", str(model_folder), "--data", str(data), *flags)
    assert code == 0 and "pass@1" in text and "maj@2" in text, text
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(s["samples"]) for s in samples] == [2, 2, 2] and samples[1]["answer"] == "7"


def test_rollout_prints_one_trajectory_of_any_folder(model_folder):
    flags = ["--max-tokens", "1200", "--colour"]
    code, text = script("rollout.py", "--model", str(model_folder), *flags, "What is 6 * 7?")
    assert code == 0 and "\033[0;32m" in text and "ended: " in text and "tool calls: " in text, text


@pytest.mark.parametrize(
    "command, sentence",
    [
        (["eval.py", "--model", "nowhere"], "--model needs --data"),
        (["eval.py", "--audit", "nowhere"], "nowhere has no traces"),
        (["rollout.py", "--run", "nowhere", "1 + 1?"], "not a run folder"),
        (["rollout.py", "--model", "nowhere", "1 + 1?"], "nowhere"),
        (["report.py", "nowhere"], "not a run folder"),
    ],
)
def test_errors_are_one_sentence(command, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        __import__(command[0].removesuffix(".py")).main()
    text = "".join(capsys.readouterr()) + str(stop.value.code)
    assert stop.value.code not in (0, None) and sentence in text


def test_entropy_analysis_of_traces_without_a_model_token_is_a_sentence(tmp_path):
    t = Trajectory(Problem("p", "1 + 1?", "2"), 0, 1)
    t.append([5, 6], "prompt")
    with pytest.raises(ValueError, match="no token that a model wrote"):
        entropy_analysis(stored(tmp_path, t))


def test_entropy_analysis_marks_code_and_what_follows_a_tool(tmp_path, model_folder):
    (tmp_path / "sft").symlink_to(model_folder)
    (tmp_path / "config.json").write_text(json.dumps({"evaluation": {}}))
    t = trajectory()
    t.append([6, 7], "tool")
    t.append([8, 9], "model", [-1.0, -1.0], [3.0, 0.0])
    text = entropy_analysis(stored(tmp_path, t))
    assert "5 tokens" in text and "after a tool response" in text and "reasoning" in text
