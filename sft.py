"""SFT: the non-reasoning cold start (section 4.1)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from tqdm import tqdm

from data import micro_batches, pack
from model import packed_attention


@dataclass
class Config:
    lr: float = 5e-6  # paper
    epochs: int = 3  # paper
    batch_size: int = 128  # documents an optimiser step, over all ranks; paper
    warmup: float = 0.04  # share of the steps; paper
    schedule: str = "cosine"  # or linear
    final_lr: float = 0.0  # at the end, as a share of lr
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: float = 1.0  # gradient norm
    loss_tokens: float = 0.0  # constant denominator of the loss; 0 = the batch's tokens with loss
    shuffle: bool = True  # every epoch anew; False keeps the order of the documents
    pool: int = 1  # batches sorted by length among so many, less padding; 1 = off
    micro_tokens: int = 16384  # tokens of a micro-batch
    seed: int = 0


PRESETS = {
    "toy": dict(
        lr=3e-3, epochs=1, batch_size=16, warmup=0.05, schedule="linear", final_lr=0.05,
        loss_tokens=720.0, shuffle=False, pool=16,
    ),
    "qwen3-14b": dict(),
}  # fmt: skip


# ---- training ----


def sft(model, optimizer, documents, cfg, *, rank=0, world=1, start=0, device="cpu", on_step=None):
    """Trains on documents [(token_ids, loss_mask), ...], all of them known to every rank; a rank
    runs its share of each step. start: first step, for a continuation. on_step(step, metrics) is
    called after every step. Returns the metrics of all steps.
    """
    plan = plan_steps([len(ids) for ids, _ in documents], cfg)
    model.train()
    history = []
    bar = tqdm(range(start, len(plan)), desc="SFT", disable=rank > 0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(plan), cfg)
        chosen = [documents[i] for i in plan[step]]
        metrics = sft_step(model, optimizer, chosen, cfg, rank, world, device)
        history.append(metrics)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
        if on_step:
            on_step(step, metrics)
    return history


def sft_step(model, optimizer, documents, cfg, rank, world, device) -> dict:
    """One optimiser step: -sum of log-probabilities of the model tokens / denominator.

    The denominator is one number for all ranks and micro-batches; a mean in each micro-batch would
    give tokens of sparse micro-batches more weight. Sharded gradients are averaged over ranks, so
    the loss is multiplied by world.
    """
    num_tokens = sum(sum(mask) for _, mask in documents)
    denominator = cfg.loss_tokens or num_tokens
    total = 0.0
    for micro in micro_batches([len(ids) for ids, _ in documents], world, cfg.micro_tokens)[rank]:
        share = [documents[i] for i in micro] or documents[-1:]
        batch = pack(share, weights=1 / denominator if micro else 0.0, device=device)
        loss = sft_loss(model, batch)
        (loss * world).backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = total * denominator / num_tokens  # nats a model token
    return dict(loss=loss, grad_norm=float(norm), tokens=num_tokens)


def sft_loss(model, batch):
    attend = packed_attention(batch.cu_seqlens)
    logprobs, _ = model(batch.token_ids, batch.positions, attend, targets=batch.targets())
    return -(logprobs[:-1] * batch.token_weights[1:]).sum()  # row t predicts token t + 1


def plan_steps(lengths: list[int], cfg) -> list[list[int]]:
    """Which documents each optimiser step sees, the same on every rank."""
    steps, span = [], cfg.batch_size * cfg.pool
    for epoch in range(cfg.epochs):
        rng = random.Random(f"sft {cfg.seed} {epoch}")
        order = list(range(len(lengths)))
        if cfg.shuffle:
            rng.shuffle(order)
        for start in range(0, len(order), span):
            pool = sorted(order[start : start + span], key=lambda i: lengths[i])
            batches = [pool[i : i + cfg.batch_size] for i in range(0, len(pool), cfg.batch_size)]
            rng.shuffle(batches)
            steps += batches
    return steps


def lr_at(step: int, num_steps: int, cfg) -> float:
    """Linear warm-up, then cosine or linear down to final_lr."""
    warmup = math.ceil(cfg.warmup * num_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    x = (step - warmup) / max(1, num_steps - warmup)
    fall = (1 - x) if cfg.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return cfg.lr * (cfg.final_lr + (1 - cfg.final_lr) * fall)


def make_optimizer(model, cfg):
    return torch.optim.AdamW(
        model.parameters(), lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay
    )
