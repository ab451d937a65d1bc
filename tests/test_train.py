"""Training end to end, small: it runs, it continues, ranks agree, errors are sentences.

Runs are subprocesses, as a user's are. The reward is made up (train_made_up_rewards.py), so that an
untrained model has groups with signal and every step updates the weights.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from data import Group, Problem, Trajectory
from train import Config, deal, problems_of_step, stage_config

ROOT = Path(__file__).parent.parent
MADE_UP = [str(ROOT / "tests" / "train_made_up_rewards.py")]
SMALL = (
    "--sft-documents 64 --eval-problems 8 --problems-per-step 3 --rollouts 6 --group-size 4"
    " --steps 2"
    " --filter-problems 4 --filter-rollouts 2 --workers 1 --max-tokens 80 --eval-tokens 80"
).split()


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start(run, *flags, script=MADE_UP, ranks=1):
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launch, *script, *SMALL, "--out", str(run), *flags]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipe)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def rows(run, phase="rl"):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["phase"] == phase]


def digests(run):
    return [r["rollout_digest"] for r in rows(run)]


def wait_for_step(run, step, process):
    """Until the run has logged that step of RL."""
    path, end = Path(run) / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text() and len(rows(run)) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} was never logged: {process.communicate()[0][-3000:]}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process that nobody stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, finish(start(run))


def test_a_run_goes_through_and_leaves_what_it_says(whole):
    run, output = whole
    for name in ("config.json", "metrics.jsonl", "report.html", "sft", "model", "checkpoints"):
        assert (run / name).exists(), name
    assert [r["step"] for r in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [r["stage"] for r in rows(run)] == [1, 1, 2, 2, 3, 3]
    assert any(not r["skipped"] and r["grad_norm"] > 0 for r in rows(run))
    assert "0 in both" in output and "pass@1" in output and "errors per call in correct" in output
    assert [r["name"] for r in rows(run, "evaluation")] == ["SFT", "stage 1", "stage 2", "stage 3"]
    page = (run / "report.html").read_text()
    assert "<polyline" in page and "class=model" in page and "class='tag kept'" in page


def test_engine_and_trainer_agree_after_every_update(whole):
    run, _ = whole
    gaps = [r["engine_gap"] for r in rows(run) if "engine_gap" in r]
    assert gaps and max(gaps) < 1e-5


def test_prefill_is_what_the_model_did_not_write_less_the_shared_prefix(whole):
    """At most one block more a trajectory (16 tokens)."""
    run, _ = whole
    for row in rows(run):
        given = row["sampled"] * (row["length"] - row["model_tokens"])
        assert row["prefill_tokens"] + row["cached_tokens"] <= given + 16 * row["sampled"]
        assert row["cached_tokens"] > 0


def test_two_ranks_and_every_policy_have_the_digests_of_one_process(whole, tmp_path):
    run, _ = whole
    a = start(tmp_path / "ranks", ranks=2)
    b = start(tmp_path / "static", "--policy", "static_groups")
    finish(a), finish(b)
    assert digests(tmp_path / "ranks") == digests(run)
    assert digests(tmp_path / "static") == digests(run)


def test_the_same_command_continues_after_a_kill_and_ends_with_the_same_digests(whole, tmp_path):
    """SIGKILL at a step's border, SIGTERM within a step: nothing stays behind, nothing is lost."""
    run, _ = whole
    mine = tmp_path / "stopped"
    for step, wait, number in ((1, 0, signal.SIGKILL), (3, 0.15, signal.SIGTERM)):
        process = start(mine)
        wait_for_step(mine, step, process)
        time.sleep(wait)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
    assert "continues from" in finish(start(mine))
    assert digests(mine) == digests(run)
    losses = [[r.get("loss") for r in rows(x)] for x in (mine, run)]
    assert losses[0] == losses[1]
    assert not [line for line in processes() if str(mine) in line]


def processes():
    return subprocess.run(
        ["ps", "axww", "-o", "args"], capture_output=True, text=True
    ).stdout.split("\n")


@pytest.mark.slow
def test_two_ranks_continue_and_leave_nothing_behind_when_the_launcher_dies(whole, tmp_path):
    run, _ = whole
    mine = tmp_path / "stopped"
    process = start(mine, ranks=2)
    wait_for_step(mine, 2, process)
    process.kill()  # the launcher: its ranks and their sandbox must end by themselves
    end = time.monotonic() + 60
    while [line for line in processes() if str(mine) in line] and time.monotonic() < end:
        time.sleep(0.2)
    assert not [line for line in processes() if str(mine) in line]
    finish(start(mine, ranks=2))
    assert digests(mine) == digests(run)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_continues_in_one_process(whole, tmp_path):
    run, _ = whole
    mine = tmp_path / "stopped"
    process = start(mine, ranks=2)
    wait_for_step(mine, 2, process)
    process.terminate()
    process.communicate(timeout=60)
    finish(start(mine))
    assert digests(mine) == digests(run)


@pytest.mark.slow
def test_lr_zero_leaves_the_policy_as_it_is(tmp_path):
    run = tmp_path / "run"
    finish(start(run, "--lr", "0", "--stages", "1"))
    numbers = [r["pass@1"] for r in rows(run, "evaluation")]
    assert numbers[0] == numbers[-1]


def test_errors_are_one_sentence(whole, tmp_path, monkeypatch, capsys):
    run, _ = whole
    cases = [
        (["--out", str(run), "--clip-high", "0.3"], "clip_high: 0.28 there, 0.3 now"),
        (["--presett", "toy"], "unrecognized arguments"),
        (["--preset", "toys"], "unknown preset 'toys': choose one of toy,"),
        (["--rollouts", "many"], "invalid int value"),
        (["--min-keep", "9"], "min_keep"),
        (["--roc-eps", "0"], "roc_eps: above 0"),
        (["--policy", "x"], "policy 'x': choose static, static_groups, capacity or expected"),
        (["--dry-run", "--init", str(tmp_path / "missing")], "missing"),
        (["--preset", "qwen3-14b", "--out", str(tmp_path / "x"), "--data", "a", "--eval-data", "b"],
         "a is not there"),
        (["--preset", "qwen3-14b", "--out", str(tmp_path / "x")], "--data FILE"),
        (["--init", str(tmp_path / "missing"), "--out", str(tmp_path / "y")], "missing"),
        (["--out", "/proc/1/run"], "cannot write the run folder"),
    ]  # fmt: skip
    old = signal.getsignal(signal.SIGTERM)
    for flags, sentence in cases:
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "--preset", "toy", *flags])
        with pytest.raises(SystemExit) as stop:
            train.main()
        text = "".join(capsys.readouterr())
        assert stop.value.code == 2 and sentence in text, text[-2000:]
    signal.signal(signal.SIGTERM, old)


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(whole, tmp_path):
    mine = tmp_path / "damaged"
    shutil.copytree(whole[0], mine)
    for manifest in mine.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    process, before = start(mine), (mine / "metrics.jsonl").read_text()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "start over with --fresh" in output, output[-2000:]
    assert output.count("is damaged") == 2 and (mine / "metrics.jsonl").read_text() == before


def test_help_prints_the_config_with_its_comments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        train.main()
    assert "roc_eps: float = 0.1  # weight of a correct trajectory" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["qwen3-14b", "qwen2.5-32b", "qwen3-0.6b"])
def test_paper_presets_plan_without_allocating(preset, capsys):
    base = train.PRESETS[preset]
    train.dry_run(Config(**{**base, "preset": preset}), set())
    text = capsys.readouterr().out
    assert "stage 1: 300 steps" in text and "KV cache" in text
    if preset == "qwen3-14b":  # 2 x 40 layers x 8 heads x 128 x 2 bytes
        assert "163,840 bytes a token" in text and "14.768 G parameters" in text


def test_flags_win_over_stages_and_stages_over_presets():
    cfg = Config(preset="toy", **train.PRESETS["toy"])
    assert stage_config(cfg, set(), 0).lr == 4e-4
    assert stage_config(Config(preset="toy", lr=0.0), {"lr"}, 0).lr == 0.0


def test_steps_are_reshuffled_passes_over_the_data():
    problems = [Problem(str(i), "", "") for i in range(10)]
    a = [p.id for s in range(3) for p in problems_of_step(problems, 3, "seed", s)]
    assert len(set(a)) == 9
    b = [p.id for s in range(3, 6) for p in problems_of_step(problems, 3, "seed", s)]
    assert len(set(b)) == 9 and a != b
    assert len(problems_of_step(problems, 99, "seed", 0)) == 10


def ragged_groups():
    """Three groups whose trajectories have 1 to 40 model tokens after 2 to 80 of prompt."""
    groups = []
    for g in range(3):
        rows = []
        for i in range(4):
            t = Trajectory(Problem(f"p{g}", "", ""), i, 0, reward=float(i % 2))
            n = 1 + (7 * g + 13 * i) % 40
            t.append([5, 6] * (1 if n % 2 else 40), "prompt")
            t.append([3 + (k * (i + 1)) % 50 for k in range(n)], "model", [-1.0] * n, [0.0] * n)
            rows.append(t)
        groups.append(Group(rows[0].problem, rows))
    return groups


@pytest.mark.parametrize("denominator", ["batch", "group", "trajectory"])
def test_shares_are_the_same_for_one_and_two_ranks_and_even_in_tokens(denominator):
    groups = [Group(g.problem, [t.summary() for t in g.trajectories]) for g in ragged_groups()]
    cfg = Config(denominator=denominator, minibatches=2)
    one, two = deal(cfg, groups, world=1), deal(cfg, groups, world=2)
    assert one == two and len(one) == 12
    tokens = [0, 0]
    for g in groups:
        for t in g.trajectories:
            tokens[one[t.problem_id, t.rollout]["share"]] += t.num_tokens
    assert abs(tokens[0] - tokens[1]) < 0.2 * sum(tokens)


def test_the_gradient_of_two_ranks_is_that_of_one_process_and_the_naive_mean_is_not(tmp_path):
    """Ragged counts, and a rank that has nothing (see ranks_gradient.py)."""
    script = str(ROOT / "tests" / "ranks_gradient.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for ranks in ([], launch):
        command = [sys.executable, *ranks, script, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr[-3000:]
    for case in ("ragged", "one_empty"):
        one, two = (torch.load(tmp_path / f"{case}_{world}.pt") for world in (1, 2))
        for name in one:
            torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=1e-5)
    naive = torch.load(tmp_path / "naive_2.pt")  # 2 % off, where equal means 1e-5
    one = torch.load(tmp_path / "ragged_1.pt")
    assert max((naive[n] - one[n]).abs().max() / one[n].abs().max() for n in one) > 0.01
