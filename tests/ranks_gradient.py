"""Writes the gradient of one optimiser step, for any number of ranks, to FOLDER/CASE_WORLD.pt.

ragged: 12 trajectories of 3 to 42 tokens; one_empty: a single one, so that with two ranks the other
computes a dummy of weight 0; naive: every rank divides by its own number of tokens (wrong).
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from test_train import ragged_groups

import train
from data import Group
from model import Model, ModelConfig, init_weights
from parallel import end_ranks, full_parameters, shard, start_ranks


def gradient(ranks, groups, naive=False):
    cfg = train.Config(minibatches=1, grad_clip=1e9, micro_tokens=150)
    model = Model(ModelConfig(60, 32, 2, 2, 1, 16, 64, tie_embeddings=True))
    init_weights(model, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model = shard(model, ranks)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)  # new weights = old - gradient
    job = SimpleNamespace(ranks=ranks, model=model, optimizer=sgd)
    mine = [t for g in groups for t in g.trajectories][ranks.rank :: ranks.world]
    summaries = [Group(g.problem, [t.summary() for t in g.trajectories]) for g in groups]
    placed = train.deal(cfg, summaries, ranks.world)
    items = train.exchange_kept(job, mine, placed)
    if naive:
        own = max(1, sum(sum(x["loss_mask"]) for x in items))
        items = [x | {"weight": 1 / own / ranks.world} for x in items]
    train.update(job, cfg, items, placed, lr=1.0)
    return {k: before[k] - v for k, v in full_parameters(model)}


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), start_ranks("cpu")
    groups = ragged_groups()
    single = [Group(groups[0].problem, groups[0].trajectories[:1])]
    train.grpo_roc.group_advantages = lambda rewards, adv_std: rewards * 2 - 0.7
    cases = {"ragged": (groups, False), "one_empty": (single, False)}
    if ranks.world > 1:
        cases["naive"] = (groups, True)
    for name, (some, naive) in cases.items():
        result = gradient(ranks, some, naive)
        if ranks.first:
            torch.save(result, folder / f"{name}_{ranks.world}.pt")
    end_ranks()
