"""Command line, run folders, checkpoints; what needs two ranks is in test_train.py."""

import json
from dataclasses import dataclass

import pytest
import torch

from parallel import (
    clip_gradients_over_ranks,
    load_checkpoint,
    newest_checkpoint,
    num_shares,
    open_run,
    parse_config,
    save_checkpoint,
)


@dataclass
class Config:
    preset: str = "small"  # small | large
    steps: int = 3  # how many
    lr: float = 0.1
    log: bool = True

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError("steps: not negative")


def test_precedence_is_default_base_flag():
    base = lambda given: {"steps": 5, "lr": 0.2}
    cfg, given = parse_config(Config, ["--lr", "0.3", "--no-log"], base, ("small", "large"))
    assert (cfg.steps, cfg.lr, cfg.log, given) == (5, 0.3, False, {"lr", "log"})
    assert parse_config(Config, [])[0] == Config()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--step", "3"], "unrecognized arguments: --step"),
        (["--steps", "x"], "invalid int value: 'x'"),
        (["--preset", "huge"], "unknown preset 'huge': choose one of small, large"),
        (["--steps", "-1"], "steps: not negative"),
    ],
)
def test_wrong_flags_end_with_a_line_and_status_2(argv, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(Config, argv, choices=("small", "large"))
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_help_is_the_source_of_the_config(capsys):
    with pytest.raises(SystemExit):
        parse_config(Config, ["--help"], description="About.")
    out = capsys.readouterr().out
    assert "steps: int = 3  # how many" in out and "About." in out


def test_run_folder_is_continued_protected_and_moved_aside(tmp_path, capsys):
    run = tmp_path / "run"
    assert open_run(run, {"lr": 1, "workers": 1}) is False
    assert open_run(run, {"lr": 2, "workers": 1}) is False  # nothing was trained yet
    (run / "metrics.jsonl").write_text("{}\n")
    assert open_run(run, {"lr": 2, "workers": 5}, free=("workers",)) is True
    with pytest.raises(ValueError, match=r"lr: 2 there, 3 now"):
        open_run(run, {"lr": 3, "workers": 1}, free=("workers",))
    open_run(run, {"lr": 3}, fresh=True)
    assert json.loads((tmp_path / "run.1" / "config.json").read_text())["lr"] == 2
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        open_run(run, {"lr": 3})


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for i in range(steps):
        model(torch.ones(2, 3) * (i + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_restores_model_and_optimiser_bit_for_bit(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, "1-000003", model, optimizer, {"step": 3})
    other, other_optimizer = make()
    path, damaged = newest_checkpoint(tmp_path)
    assert load_checkpoint(path, other, other_optimizer) == {"step": 3} and not damaged
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_a_damaged_checkpoint_is_named_and_an_older_one_used(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, f"1-{step:06d}", model, optimizer, {"step": step})
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["1-000002", "1-000003"]  # the newest two stay
    (data,) = (tmp_path / "1-000003" / "tensors").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    path, damaged = newest_checkpoint(tmp_path)
    assert path.name == "1-000002" and "sha256" in damaged[0] and "1-000003" in damaged[0]
    (tmp_path / "1-000002" / "state.json").unlink()
    assert newest_checkpoint(tmp_path)[0] is None
    (tmp_path / "1-000002" / "manifest.json").unlink()  # never finished: not a checkpoint
    assert len(newest_checkpoint(tmp_path)[1]) == 1


def test_a_newer_damaged_checkpoint_does_not_push_out_a_new_one(tmp_path):
    """Nor does one that was complete but not yet renamed when the run was killed count."""
    model, optimizer = make()
    for name in ("1-000007", "1-000008", "0-000001"):
        save_checkpoint(tmp_path, name, model, optimizer, {})
    assert (tmp_path / "0-000001" / "manifest.json").exists()
    for name in ("0-000001", "1-000007"):
        (tmp_path / name / "state.json").unlink()
    (tmp_path / "1-000008").rename(tmp_path / ".1-000008.tmp")
    path, damaged = newest_checkpoint(tmp_path)
    assert path is None and len(damaged) == 2


def test_fresh_continues_when_torchrun_starts_the_same_command_again(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text('{"lr": 1}')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_run(tmp_path, {"lr": 1}, fresh=True) is True


def test_gradients_are_clipped_to_a_total_norm():
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients_over_ranks([a, b], 10.0) == 5.0 and a.grad[0] == 3.0
    assert clip_gradients_over_ranks([a, b], 1.0) == 5.0
    torch.testing.assert_close(torch.stack([a.grad[0], b.grad[1]]), torch.tensor([0.6, 0.8]))


def test_one_and_two_ranks_have_the_same_shares():
    assert [num_shares(world) for world in (1, 2, 3, 8)] == [2, 2, 3, 8]
