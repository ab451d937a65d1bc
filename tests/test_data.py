"""data.py: packing, readers, filters."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import (
    FILTERS,
    RECIPE,
    Known,
    Problem,
    Trajectory,
    filter_files,
    grams,
    micro_batches,
    near_key,
    pack,
    read_problems,
)

ROOT = Path(__file__).resolve().parent.parent

# ---- packing ----


def test_pack_by_hand():
    """Two documents of 3 and 2 tokens; loss on tokens 1, 2 of the first and 1 of the second."""
    batch = pack([([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])], weights=[0.5, 0.25])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.token_weights.tolist() == [0, 0.5, 0.5, 0, 0.25]
    assert batch.targets().tolist() == [6, 7, -1, 9, -1]  # row t predicts t + 1, not over borders
    assert batch.token_ids.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32


def test_pack_takes_trajectories_with_their_logprobs_and_advantages():
    t = Trajectory(Problem("a", "1+1?", "2"), rollout=0, step=0)
    t.append([1, 2], "prompt")
    t.append([3], "model", logprobs=[-0.5], entropies=[0.7])
    t.append([4], "tool")
    batch = pack([t, t], weights=[1.0, 2.0], advantages=[-1.0, 3.0])
    assert batch.engine_logprobs.tolist() == [0, 0, -0.5, 0] * 2
    assert batch.advantages.tolist() == [0, 0, -1, 0, 0, 0, 3, 0]
    assert batch.token_weights.tolist() == [0, 0, 1, 0, 0, 0, 2, 0]


def test_first_token_of_a_document_is_never_a_target():
    batch = pack([([1, 2], [1, 1]), ([3, 4], [1, 1])])
    assert batch.targets().tolist() == [2, -1, 4, -1]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_micro_batches_hold_every_document_once_and_as_many_on_each_rank(world):
    lengths = [7, 300, 20, 20, 90, 5, 64, 1000, 64]
    shares = micro_batches(lengths, world, max_tokens=128)
    assert len(shares) == world and len({len(s) for s in shares}) == 1
    assert sorted(i for s in shares for micro in s for i in micro) == list(range(9))
    for micro in (m for s in shares for m in s):
        assert sum(lengths[i] for i in micro) <= 128 or len(micro) == 1


# ---- readers ----


def write(path, *rows):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize(
    "row, question, answer",
    [
        ({"question": "1+1?", "answer": "2"}, "1+1?", "2"),
        ({"problem": "1+1?", "answer": 27.0}, "1+1?", "27"),
        ({"prompt": "1+1?", "answer": 2}, "1+1?", "2"),
        ({"problem": "1+1?", "expected_answer": "\\frac12"}, "1+1?", "\\frac12"),
        ({"question": "1+1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,234"}, "1+1?", "1,234"),
        ({"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1?"}],
          "reward_model": {"ground_truth": "2"}}, "1+1?", "2"),
        ({"question": [[{"role": "user", "content": "1+1?"}]], "answer": "2"}, "1+1?", "2"),
        ({"prompt": "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
          "answer": "2"}, "1+1?", "2"),
        ({"prompt": "Solve the following math problem step by step. The last line of your response "
          "should be of the form Answer: $Answer (without quotes).\n\n1+1?\n\nRemember to put your "
          'answer on its own line after "Answer:".', "answer": "2"}, "1+1?", "2"),
        ({"problem": "1+1?", "answer": "", "expected_answer": "2"}, "1+1?", "2"),
        ({"problem": "1+1?", "answer": " ", "reward_model": {"ground_truth": "2"}}, "1+1?", "2"),
    ],
)  # fmt: skip
def test_known_shapes(tmp_path, row, question, answer):
    (problem,) = read_problems(write(tmp_path / "a.jsonl", row))
    assert (problem.id, problem.question, problem.answer) == ("a-1", question, answer)


def test_json_list_and_lines_in_a_json_file(tmp_path):
    rows = [{"question": "a?", "answer": 1, "id": 7}, {"question": "b?", "answer": 2, "id": "x"}]
    lines = write(tmp_path / "lines.json", *rows)
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    assert [p.id for p in read_problems(lines)] == ["lines-7", "x"]
    assert [p.id for p in read_problems(tmp_path / "list.json")] == ["list-7", "x"]
    for path in (lines, tmp_path / "list.json"):  # a byte-order mark changes nothing
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert [p.question for p in read_problems(path)] == ["a?", "b?"]


def test_no_two_problems_of_a_file_have_one_id(tmp_path):
    """Ids key the noise: equal ones would sample alike."""
    rows = [{"question": f"{i}?", "answer": 1, "id": "s"} for i in range(3)]
    problems = read_problems(write(tmp_path / "a.jsonl", *rows))
    assert [p.id for p in problems] == ["s", "s-line-2", "s-line-3"]
    assert [p.question for p in problems] == ["0?", "1?", "2?"]


def test_unreadable_rows_are_told_with_line_and_cause_and_stop_nothing(tmp_path, capsys):
    good = {"question": "1+1?", "answer": "2"}
    bad = {
        "not JSON": "{broken\n", "not an object": "[1]\n", "no question": {"answer": "2"},
        "no answer": {"question": "x", "answer": None}, "no answer ": good | {"answer": " "},
        "not JSON ": "[" * 100_000 + "\n",
    }  # fmt: skip
    path = write(tmp_path / "a.jsonl", good, "\n", *bad.values(), good)
    assert [p.id for p in read_problems(path)] == ["a-1", "a-9"]
    told = capsys.readouterr().err
    for line, cause in enumerate(bad, 3):
        assert f"a.jsonl:{line}: skipped, {cause.strip()}" in told or line == 8  # five are told
    assert "skipped 6 rows" in told


def test_files_that_cannot_be_read_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="give a .jsonl"):
        read_problems(tmp_path / "none.jsonl")
    for text in ('[{"question": "x"},', "[" * 100_000):
        with pytest.raises(ValueError, match="list.json begins as a JSON list"):
            read_problems(write(tmp_path / "list.json", text))
    if not importlib.util.find_spec("pyarrow"):
        with pytest.raises(OSError, match="pyarrow"):
            read_problems(write(tmp_path / "a.parquet", {}))


def test_parquet_rows_are_read_as_json_lines_are(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow.parquet import write_table

    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
    table = pyarrow.Table.from_pylist([row, row | {"reward_model": None}, row])
    write_table(table, tmp_path / "a.parquet")
    assert [p.id for p in read_problems(tmp_path / "a.parquet")] == ["a-1", "a-3"]


# ---- filters ----


def drops(name, question="What is it?", answer="12", **known):
    return FILTERS[name](Problem("p", question, answer), Known(**known))


INTEGERS = "12 -7 1,234 042 +5 12,345,678 10,\\!080 10{,}080 10,\\,080 $3$"


@pytest.mark.parametrize("answer", INTEGERS.split())
def test_integer_answers_stay(answer):
    assert not drops("integer", answer=answer)
    assert not drops("composite", answer=answer)


@pytest.mark.parametrize("answer", ["x=5", "5.0e3", "3 or 4", "2^{10}", "1,23", "1.5", "", "12%"])
def test_other_answers_go(answer):
    assert drops("integer", answer=answer)


def test_huge_numbers_go():
    assert drops("huge", answer="1" * 13) and not drops("huge", answer="-" + "1" * 12)


def test_composite_problems_and_answers_go():
    assert drops("composite", "Let x = 2. (a) Find x + 1. (b) Find x + 2.")
    assert drops("composite", answer="3, 4") and drops("composite", answer="2 and 3")
    assert not drops("composite", "If f(1) = 2 and f(2) = 3, find f(1) + f(2).")


def test_what_asks_for_an_argument_goes():
    assert drops("unverifiable", "Let n be odd. Prove that n^2 is odd.")
    assert drops("unverifiable", "Show that 2 + 2 = 4, then find x.")
    assert not drops("unverifiable", "She watched a show that was 30 minutes long. How long?")


def test_an_answer_after_a_marker_goes():
    for text in ("Find x. Answer: 12", "Find x. The answer is $12$.", "x #### 12", "\\boxed{12}"):
        assert drops("leak", text)
    for question, answer in (("The answer is 12, find x.", "12"), ("Answer: 1,234", "1234"),
                             ("The answer is 1234.", "1{,}234")):  # fmt: skip
        assert drops("leak", question, answer)
    assert not drops("leak", "The answer is 13 or so, find 12.")
    assert not drops("leak", "The answer is 12, find x.", "\\frac{1}{2}")


def test_samples_decide_matched_and_solved():
    samples = {"What is it?": [1, 1, 0, 0]}
    assert not drops("matched", samples=samples, min_right=2)
    assert drops("matched", samples=samples, min_right=3) and drops("matched", samples={})
    assert not drops("solved", samples=samples) and not drops("solved", samples={})
    assert drops("solved", samples={"What is it?": [1] * 8})
    assert not drops("solved", samples={"What is it?": []})


def test_overlap_ignores_case_spacing_and_punctuation():
    """Eight words in a row are enough, seven are not; other numbers only with mask_numbers."""
    held_out = "A train leaves at 9 and goes 60 miles per hour."
    known = dict(grams=set(grams(held_out)))
    assert drops("overlap", "Once a TRAIN leaves, at $9$ and  goes 60 miles!", **known)
    assert not drops("overlap", "Once a train leaves at 9 and goes 50 miles per hour", **known)
    masked = dict(grams=set(grams(held_out, True)), mask_numbers=True)
    assert drops("overlap", "Once a train leaves at 8 and goes 50 miles per hour", **masked)
    short = dict(grams=set(grams("What is 2 + 3?")))
    assert drops("overlap", "what is 2+3", **short) and not drops("overlap", "what is 2+4", **short)


def test_near_key():
    assert near_key("If $x = 12$, find x.") == near_key("IF x=12  find $x$")
    assert near_key("Find \\left( 1, 2 \\right).") == near_key("find (1,2)")
    different = ["2 + 3?", "2 - 3?", "23?", "2 + 4?", "(12)", "(1, 2)", "求 2", "求 x"]
    assert len(set(map(near_key, different))) == len(different)


def run_filter(*arguments):
    command = [sys.executable, ROOT / "data.py", "filter", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def make_rows(n):
    """Every third a copy, every fifth with an answer that is no integer."""
    question = lambda i: f"What is {i - i % 3} plus one?"
    rows = [{"question": question(i), "answer": i if i % 5 else "x"} for i in range(n)]
    return [*rows, "{broken\n"]


def test_filter_command_counts_and_shows_what_it_removed(tmp_path):
    """30 rows: 6 are no integers; of the other 24 those of 10 questions remain once."""
    path = write(tmp_path / "in.jsonl", *make_rows(30))
    held_out = write(tmp_path / "eval.jsonl", {"question": "What is 3 plus one?", "answer": 4})
    out = tmp_path / "out.jsonl"
    done = run_filter(path, "--out", out, "--eval", held_out)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines() if line[0] != " "]
    counts = {name: int(count) for name, count, *_ in told}
    assert counts["kept"] == 9 and counts["integer"] == 6 and counts["unreadable"] == 1
    assert counts["overlap"] == 2 and counts["exact"] == 13 and sum(counts.values()) == 31
    assert len(read_problems(out)) == 9 and "in-1: 'What is 0" in done.stdout
    assert run_filter(path, "--out", out).returncode == 1  # never over an older result
    assert "eval.py" in run_filter(path, "--out", tmp_path / "b", "--filters", "solved").stderr
    samples = write(tmp_path / "s.jsonl", {"question": "x", "correct": [1]}, {"question": "y"})
    done = run_filter(path, "--out", tmp_path / "b", "--recipe", "stage3", "--samples", samples)
    assert done.returncode == 1 and "s.jsonl:2: not a row that eval.py" in done.stderr


def test_an_interrupted_filter_goes_on_to_the_same_result(tmp_path, monkeypatch):
    """Interrupted between two saves: rows after the last one are read again."""
    monkeypatch.setattr("data.SAVE_EVERY", 7)
    paths = [write(tmp_path / f"{name}.jsonl", *make_rows(40)) for name in "ab"]
    run = lambda out: filter_files(paths, out, RECIPE["all"], Known(), {"a": "1"})
    whole = run(tmp_path / "whole.jsonl")

    class Interrupted(Exception):
        pass

    def interrupt(p, known, seen=[]):  # noqa: B006, counts the calls
        seen.append(p)
        if len(seen) == 60:
            raise Interrupted
        return False

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setitem(FILTERS, "leak", interrupt)
        run(tmp_path / "cut.jsonl")
    with pytest.raises(ValueError, match="--fresh"):
        filter_files(paths, tmp_path / "cut.jsonl", RECIPE["all"], Known(), {"a": "2"})
    assert run(tmp_path / "cut.jsonl") == whole
    assert (tmp_path / "cut.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    left = {"a.jsonl", "b.jsonl", "cut.jsonl", "whole.jsonl"}
    assert {p.name for p in tmp_path.iterdir()} == left
