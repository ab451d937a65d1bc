"""data.py: packing, readers, filters."""

import pytest
import torch

from data import Problem, Trajectory, micro_batches, pack

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
