"""Training: SFT, then GRPO-RoC in stages (paper sections 4.1, 4.3), from nothing on a CPU or from
a Qwen folder on GPUs.

    python train.py                                              one process, preset toy
    torchrun --standalone --nproc_per_node=2 train.py            two ranks, the same run
    torchrun ... train.py --preset qwen3-14b --init DIR --data FILE --eval-data FILE
    python train.py --preset qwen3-14b --dry-run                 the plan, nothing allocated
    python train.py --help                                       every field

One step of RL:

    rollout     every rank's engine claims rollouts of the step's problems until none is left
    select      all ranks know all summaries; resampling on correct, decided identically (grpo_roc)
    exchange    kept trajectories move, so that every rank gets an equal share of tokens
    update      `minibatches` optimiser steps over micro-batches; weights of tokens made before
    hand over   the new weights go to the engine, which forgets its prefix cache

A run leaves runs/NAME/: config.json, metrics.jsonl (one row a step or evaluation), traces/ (whole
trajectories), checkpoints/, sft/ and model/ (HF folders), report.html. The same command continues
it: model, optimiser, stage and position in the data come from the checkpoint, and all noise is a
function of (seed, step), so the digests go on as if it had never stopped. Each step logs
rollout_digest, sha256 over (problem, rollout, tokens, reward, kept).

STAGES differ from the paper in scale only for the toy; lr falls from stage to stage there, because
a constant one loses single kinds of problem once half of the groups are dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from random import Random

import torch
from tqdm import tqdm

import grpo_roc
import parallel
import sft
import toy
from data import Group, Problem, Trajectory, micro_batches, pack, read_problems
from eval import error_share, evaluate, table
from kvcache_engine import Engine, blocks_that_fit
from model import Model, ModelConfig, init_weights, packed_attention, read_config, stored_weights
from model import save_model as save_folder
from parallel import Ranks, gather_over_ranks, print0
from report import pooled_errors, write_report
from rollout import RolloutConfig, RolloutStats, rollout
from sandbox import Sandbox, SandboxClient
from scheduler import Lengths, RolloutQueue, queue_order
from tokenizer import Tokenizer

# ---- config ----


@dataclass
class Config:
    preset: str = "toy"  # toy | qwen3-0.6b | qwen3-14b | qwen2.5-32b
    out: str = ""  # run folder; default runs/PRESET (torchrun has a --run of its own)
    fast: bool = False  # toy: the same way in a minute, far from converged
    fresh: bool = False  # move an old run folder aside instead of continuing it
    dry_run: bool = False  # print the plan and stop; nothing is allocated
    seed: int = 0
    device: str = ""  # cpu or cuda; default: what is there
    dtype: str = "float32"  # of rollouts and of compute; parameters and optimiser stay float32
    threads: int = 1  # a process; more are slower on busy cores and give other bits
    workers: int = 0  # sandbox workers a node; 0 = one a core
    checkpoint_every: int = 1  # RL steps (SFT: 100 times as many)
    init: str = ""  # HF folder to start from, after SFT (runs/x/sft); the toy starts from nothing
    data: str = ""  # problems for RL; the toy makes its own
    eval_data: str = ""  # held-out problems
    eval_problems: int = 512  # held-out problems of the toy
    sft_documents: int = 16000  # toy: traces and copies, 16 a step
    stages: int = 3  # how many of STAGES to run
    steps: int = 300  # of a stage
    problems_per_step: int = 512  # prompts
    rollouts: int = 32  # N = 2G, sampled a problem
    group_size: int = 16  # G; min(G, N) are kept
    max_tokens: int = 8192  # budget of a trajectory: prompt and tool output count
    max_turns: int = 10  # T
    filter_solved: bool = False  # stage 3: only problems not solved by all of filter_rollouts
    filter_rollouts: int = 8
    filter_problems: int = 0  # how many are tried; 0 = all
    reset_optimizer: bool = False  # at the start of the stage
    temperature: float = 1.0
    tool_seconds: float = 4.0  # CPU seconds a call
    wall_seconds: float = 1200.0  # a rollout older than this is cut and counted
    max_calls: int = 8  # a turn
    policy: str = "expected"  # scheduler: static | static_groups | capacity | expected
    group_chunk: int = 2  # rollouts of a problem dealt to an engine in a row
    cache_tokens: int = 0  # KV cache of an engine; 0 = what the GPU has left
    block_size: int = 16
    max_seqs: int = 512  # sequences in a decode step
    resample: str = "roc"  # roc | uniform (control) | none (plain GRPO: give rollouts = group_size)
    select: str = "weighted"  # weighted | lowest (the authors' release)
    roc_eps: float = 0.1  # weight of a correct trajectory is 1 / (p_total + roc_eps)
    min_keep: int = 2  # of failures and of correct ones, where there are so many; 0 = paper
    overlong_filter: bool = False  # truncated trajectories leave their group (paper: it hurts)
    ngram_penalty: float = 0.0  # x repetition, added to p_total (paper: it hurts)
    tool_error_penalty: float = 0.0  # x share of failed calls, off the reward (paper: do not)
    refill: int = 0  # more rounds of problems at most, until problems_per_step groups have signal
    adv_std: bool = True
    denominator: str = "batch"  # batch | group (Eq. 6) | trajectory (Eq. 1)
    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0  # cap of exp(trainer - engine); 0 = weight off
    minibatches: int = 1  # optimiser steps a rollout batch; 1: ratio is 1, clipping never binds
    micro_tokens: int = 16384  # tokens of one forward and backward
    lr: float = 1e-6
    warmup: int = 20  # rollout steps, after the start and after a reset
    beta2: float = 0.999
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    eval_every: int = 10  # RL steps; and at the end of every stage
    eval_samples: int = 1  # rollouts a held-out problem; paper: 16
    eval_temperature: float = 0.6
    eval_tokens: int = 30720
    eval_turns: int = 30
    trace_groups: int = 2  # groups of each step stored whole in traces/

    def __post_init__(self):
        if (kept := min(self.group_size, self.rollouts)) < 2:
            raise ValueError("rollouts and group_size: at least 2, one alone has no advantage")
        if 2 * self.min_keep > kept:
            raise ValueError("min_keep: twice as many must fit into min(group_size, rollouts)")
        if self.roc_eps <= 0:
            raise ValueError("roc_eps: above 0, a clean trajectory weighs 1 / roc_eps")
        for name, (*most, last) in CHOICES.items():
            if (value := getattr(self, name)) not in (*most, last):
                raise ValueError(f"{name} {value!r}: choose {', '.join(most)} or {last}")


CHOICES = dict(
    dtype=("float32", "bfloat16"), denominator=("batch", "group", "trajectory"),
    policy=("static", "static_groups", "capacity", "expected"),
    resample=("roc", "uniform", "none"), select=("weighted", "lowest"),
)  # fmt: skip
# Stages 1-3 of the paper (table 2, section 4.3): precedence is default < preset < stage < flag.
PAPER_STAGES = (
    dict(steps=300, max_tokens=8192, max_turns=10),
    dict(steps=85, max_tokens=12288, max_turns=10),
    dict(steps=125, max_tokens=12288, max_turns=15, filter_solved=True, reset_optimizer=True),
)
STAGES = {
    "toy": (
        dict(steps=30, max_tokens=192, max_turns=5, lr=4e-4),
        dict(steps=15, max_tokens=224, max_turns=5, lr=2e-4),
        dict(PAPER_STAGES[2], steps=25, max_tokens=256, max_turns=7, lr=1e-4),
    ),
    "qwen3-0.6b": PAPER_STAGES, "qwen3-14b": PAPER_STAGES,
    "qwen2.5-32b": PAPER_STAGES[:2],  # no SFT, two stages, 700 steps (section 5.3)
}  # fmt: skip
BF16 = dict(dtype="bfloat16", block_size=64, checkpoint_every=5)  # 64: what the kernels like
PRESETS = {
    "toy": dict(
        device="cpu", problems_per_step=12, rollouts=16, group_size=8, tool_seconds=1.0,
        cache_tokens=49152, minibatches=2, warmup=3, beta2=0.95, filter_problems=256,
        eval_temperature=1.0, eval_tokens=256, eval_turns=7,
    ),
    "qwen3-0.6b": dict(BF16, problems_per_step=64, rollouts=16, group_size=8, eval_samples=4),
    "qwen3-14b": dict(BF16, eval_samples=16),
    "qwen2.5-32b": dict(BF16, eval_samples=16, stages=2),
}  # fmt: skip
FAST = dict(sft_documents=2400, steps=2, eval_problems=96, eval_every=100, filter_problems=32)
FREE = ("fresh", "dry_run", "workers", "out")  # may differ when a run is continued
SHAPES = {  # for --dry-run; a real run reads config.json of --init
    "toy": ModelConfig(**toy.TOY_MODEL),
    "qwen3-0.6b": ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, tie_embeddings=True),
    "qwen3-14b": ModelConfig(151936, 5120, 40, 40, 8, 128, 17408),
    "qwen2.5-32b": ModelConfig(152064, 5120, 64, 40, 8, 128, 27648, qk_norm=False, qkv_bias=True),
}


def stage_config(cfg: Config, given: set[str], stage: int) -> Config:
    overrides = STAGES[cfg.preset][stage] | (dict(steps=FAST["steps"]) if cfg.fast else {})
    return replace(cfg, **{k: v for k, v in overrides.items() if k not in given})


def rollout_config(cfg: Config, evaluation: bool = False) -> RolloutConfig:
    same = {f.name: getattr(cfg, f.name) for f in fields(RolloutConfig) if hasattr(cfg, f.name)}
    if cfg.preset == "toy":
        same |= dict(traceback_lines=toy.TRACEBACK_LINES, system_text=toy.TOY_SYSTEM_TEXT,
                     user_template="{question}", show_tools=False)  # fmt: skip
    if evaluation:
        same |= dict(max_turns=cfg.eval_turns, max_tokens=cfg.eval_tokens,
                     temperature=cfg.eval_temperature)  # fmt: skip
    return RolloutConfig(**same)


# ---- the job: what lives from step to step ----


@dataclass
class Job:
    cfg: Config
    given: set[str]
    ranks: Ranks
    folder: Path
    tok: Tokenizer
    model: Model  # the trainer's, sharded under torchrun
    engine: Engine
    box: Sandbox | SandboxClient
    problems: list[Problem]
    held_out: list[Problem]
    optimizer: torch.optim.Optimizer = None
    lengths: Lengths = None
    state: dict = field(default_factory=dict)  # position, saved in every checkpoint
    seconds: dict = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timed(self, name: str):
        at = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - at

    def log(self, row: dict) -> None:
        """One row to metrics.jsonl, rank 0."""
        self.state["rows"] += 1
        if self.ranks.first:
            with open(self.folder / "metrics.jsonl", "a") as f:
                f.write(json.dumps(row) + "\n")

    def checkpoint(self, name: str) -> None:
        folder, self.state["seconds"] = self.folder / "checkpoints", dict(self.seconds)
        with self.timed("checkpoint"):
            parallel.save_checkpoint(folder, name, self.model, self.optimizer, self.state)

    def hand_over(self) -> None:
        """The trainer's weights to this rank's engine: what FSDP's root holds in one collective
        (all of a small model), the others one tensor at a time."""
        with self.timed("weights"):
            sharded = hasattr(self.model, "unshard")
            if sharded:
                self.model.unshard()
            self.engine.update_weights(self.model.named_parameters())
            if sharded:
                self.model.reshard()
            if self.engine.k_cache is None:
                self.engine.regrow_cache()

    def export(self, name: str) -> None:
        """An HF folder: runs/NAME/sft or runs/NAME/model."""
        whole = parallel.full_parameters(self.model)  # a collective: all ranks run through it
        if tensors := {k: v.cpu() for k, v in whole if self.ranks.first}:
            fields = {"eos_token_id": self.tok.im_end}
            save_folder(tensors, self.model.config, self.folder / name, fields=fields)
            self.tok.save(self.folder / name / "tokenizer.json")

    def evaluate(self, problems, how: RolloutConfig, key: str, samples: int, seed) -> tuple:
        """(numbers, this rank's trajectories), by all ranks."""
        ranks, show = self.ranks, key if self.ranks.first else ""
        return evaluate(self.engine, self.box, self.tok, problems, how, ranks.store, key, samples,
                        seed, ranks.world, gather_over_ranks, show)  # fmt: skip


# ---- one step of RL ----


def problems_of_step(problems: list[Problem], count: int, seed: str, step: int) -> list[Problem]:
    """Reshuffled passes over the data: step s of a stage takes the next `count`, different ones."""
    count, order = min(count, len(problems)), list(problems)
    per_pass = len(problems) // count
    Random(f"data/{seed}/{step // per_pass}").shuffle(order)
    return order[step % per_pass * count :][:count]


def sample_step(job: Job, cfg: Config, problems: list[Problem], step: int):
    """Every rank's engine generates until the step's queue is empty; (trajectories here, stats)."""
    expected = {p.id: max(n) for p in problems if (n := job.lengths.by_problem.get(p.id))}
    chunk = cfg.rollouts if cfg.policy == "static_groups" else cfg.group_chunk
    order = queue_order([p.id for p in problems], cfg.rollouts, chunk, expected)
    ranks, title = job.ranks, f"step {step}: rollouts"
    queue = RolloutQueue(ranks.store, f"step {step} draw {job.state['draws']}", order, ranks.world)
    with tqdm(total=len(order), desc=title, leave=False, disable=not ranks.first) as bar:
        return rollout(job.engine, job.box, job.tok, queue, problems, rollout_config(cfg),
                       seed=cfg.seed, step=step, policy_version=step - 1, lengths=job.lengths,
                       progress=lambda t: bar.update(ranks.world))  # fmt: skip


def deal(cfg: Config, groups: list[Group], world: int) -> dict[tuple[str, int], dict]:
    """(problem, rollout) of every kept trajectory -> minibatch, share, micro, weight, advantage.
    Decided from summaries, identically on every rank. Share s is computed by rank s % world; the
    number of shares is the same for one and two ranks, and so are the sums of their gradients."""
    placed = {}
    for m in range(cfg.minibatches):
        part, rows = groups[m :: cfg.minibatches], []
        for group, weights in zip(part, grpo_roc.loss_weights(part, cfg.denominator)):
            members, penalty = group.trajectories, cfg.tool_error_penalty
            rewards = torch.tensor([grpo_roc.shaped_reward(t, penalty) for t in members])
            rows += zip(members, weights, grpo_roc.group_advantages(rewards, cfg.adv_std).tolist())
        lengths = [t.num_tokens for t, _, _ in rows]
        shares = micro_batches(lengths, parallel.num_shares(world), cfg.micro_tokens)
        for share, micros in enumerate(shares):
            for micro, indices in enumerate(micros):
                place = dict(minibatch=m, share=share, micro=micro)
                for t, weight, a in (rows[i] for i in indices):
                    placed[t.problem_id, t.rollout] = place | dict(weight=weight, advantage=a)
    return placed


def exchange_kept(job: Job, trajectories: list[Trajectory], placed: dict) -> list[dict]:
    """Moves kept trajectories to the ranks that compute their shares. Returns what came here, in
    the order of `placed`: the columns of the loss and their place."""
    outgoing = [[] for _ in range(job.ranks.world)]
    here = {(t.problem.id, t.rollout): t for t in trajectories}
    for i, (key, place) in enumerate(placed.items()):
        if t := here.get(key):
            columns = dict(token_ids=t.token_ids, loss_mask=t.loss_mask, logprobs=t.logprobs)
            outgoing[place["share"] % job.ranks.world].append({"order": i, **place, **columns})
    return sorted(parallel.exchange_over_ranks(outgoing), key=lambda item: item["order"])


def batches_of(items: list[dict], placed: dict, minibatch: int, ranks: Ranks):
    """The Batch of every share and micro-batch of this rank, as many on every rank; an empty one
    is a dummy of weight 0, because a sharded forward needs all ranks."""
    count = 1 + max(p["micro"] for p in placed.values() if p["minibatch"] == minibatch)
    shares = range(ranks.rank, parallel.num_shares(ranks.world), ranks.world)
    for at in [(minibatch, share, micro) for share in shares for micro in range(count)]:
        mine = [x for x in items if (x["minibatch"], x["share"], x["micro"]) == at]
        documents = [(x["token_ids"], x["loss_mask"]) for x in mine] or [([0, 0], [0, 1])]
        weights, advantages = ([x[k] for x in mine] or 0.0 for k in ("weight", "advantage"))
        batch = pack(documents, weights, advantages, ranks.device)
        if flat := [p for x in mine for p in x["logprobs"]]:
            batch.engine_logprobs = torch.tensor(flat).to(batch.engine_logprobs)
        yield batch


def logprobs_of(batch, model, temperature: float):
    """(T,) log-probability of each token under the model; token t is predicted by row t - 1."""
    inputs = (batch.token_ids, batch.positions, packed_attention(batch.cu_seqlens))
    logprobs, _ = model(*inputs, targets=batch.targets(), temperature=temperature)
    return torch.cat([logprobs.new_zeros(1), logprobs[:-1]])


def update(job: Job, cfg: Config, items: list[dict], placed: dict, lr: float) -> dict[str, float]:
    """The optimiser steps of one rollout batch; returns metrics summed over ranks."""
    ranks, model = job.ranks, job.model
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    minibatches = sorted({p["minibatch"] for p in placed.values()})
    steps = [list(batches_of(items, placed, m, ranks)) for m in minibatches]
    score = lambda batch: logprobs_of(batch, model, cfg.temperature)
    with torch.no_grad():  # pi_old, where there are several steps: before the first
        olds = [list(map(score, batches)) for batches in steps] if len(steps) > 1 else []
    sums, norms, clip, cap = Counter(), [], (cfg.clip_low, cfg.clip_high), cfg.tis_cap or None
    for m, batches in enumerate(steps):
        for i, batch in enumerate(batches):
            logprobs = score(batch)
            old = olds[m][i] if olds else logprobs.detach()
            engine, advantages = batch.engine_logprobs, batch.advantages
            tis = grpo_roc.importance_weight(old, engine, cap)
            loss = grpo_roc.policy_loss(logprobs, old, advantages, batch.token_weights, tis, *clip)
            (loss * ranks.world).backward()  # FSDP averages over ranks; our weights make it a sum
            mask = batch.loss_mask * (batch.token_weights > 0)
            metrics = grpo_roc.loss_metrics(logprobs, old, engine, advantages, mask, *clip, cap)
            sums.update({k: v.item() for k, v in (metrics | {"loss": loss}).items()})
        norms.append(parallel.clip_gradients_over_ranks(model.parameters(), cfg.grad_clip))
        if math.isfinite(norms[-1]):  # else the step is left out, on all ranks, and counted
            job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
    total = parallel.sum_over_ranks(dict(sums))
    loss, tokens = total.pop("loss") / len(steps), max(total.pop("tokens"), 1)
    means = {name: value / tokens for name, value in total.items()}
    bad = sum(not math.isfinite(n) for n in norms)
    return dict(loss=loss, grad_norm=max(norms), nonfinite=bad, loss_tokens=tokens, **means)


def rl_step(job: Job, cfg: Config, stage: int, problems: list[Problem]) -> dict:
    """One step of the run, from rollouts to new weights. Returns its metrics."""
    state, begin, before = job.state, time.monotonic(), dict(job.seconds)
    counters, stats = dict(vars(job.engine.counters)), RolloutStats()
    step, n, trajectories, tried, summaries = state["step"] + 1, cfg.problems_per_step, [], [], []
    how = {k: getattr(cfg, k) for k in ("resample", "select", "roc_eps", "min_keep")}
    for _ in range(1 + cfg.refill):
        chosen = problems_of_step(problems, n, f"{cfg.seed}/{stage}", state["draws"])
        chosen = [p for p in chosen if p not in tried]  # another pass over the data may repeat one
        state["draws"] += 1
        with job.timed("rollout"):
            new, more = sample_step(job, cfg, chosen, step)
        for t in new:
            t.penalty = grpo_roc.trajectory_penalty(t, cfg.ngram_penalty)
        with job.timed("exchange"):
            known = sum(gather_over_ranks([t.summary(job.ranks.rank) for t in new]), [])
        for s in known:
            if s.rank != job.ranks.rank:  # every rank learns the same lengths
                job.lengths.add(s.problem_id, s.num_tokens)
        tried, trajectories, summaries = tried + chosen, trajectories + new, summaries + known
        stats.add(more)
        by_problem = defaultdict(list)
        for s in sorted(summaries, key=lambda s: s.rollout):
            by_problem[s.problem_id].append(s)
        groups = [Group(p, by_problem[p.id]) for p in tried]
        limits = (cfg.group_size, cfg.seed, step, cfg.overlong_filter)
        kept_groups, counts = grpo_roc.select_groups(groups, *limits, **how)
        if len(kept_groups) >= n:
            break
    job.seconds["tools"] += stats.tool_wait_seconds
    job.seconds["checks"] += stats.check_seconds
    kept = {(s.problem_id, s.rollout) for g in kept_groups for s in g.trajectories}
    for t in trajectories:
        t.kept = (t.problem.id, t.rollout) in kept
    placed = deal(cfg, kept_groups, job.ranks.world)
    lr = cfg.lr * min(1.0, (state["steps_since_reset"] + 1) / max(cfg.warmup, 1))
    row = {"phase": "rl", "stage": stage + 1, "step": step, "lr": lr, "skipped": not placed}
    if placed:  # else every group was dropped: no update, counted
        with job.timed("exchange"):
            items = exchange_kept(job, trajectories, placed)
        if job.ranks.device.type == "cuda":
            job.engine.release_cache()  # its memory is the trainer's during the update
        with job.timed("update"):
            row |= update(job, cfg, items, placed, lr)
        job.hand_over()
    row |= {k if k == "groups" else f"groups_{k}": v for k, v in counts.items()}
    row |= step_metrics(job, trajectories, summaries, kept, stats, counters)
    state["rewards"] = (state["rewards"] + [row["reward"]])[-20:]
    last, earlier = state["rewards"][-10:], state["rewards"][:-10]
    row["plateau"] = sum(last) / len(last) - sum(earlier) / len(earlier) if earlier else None
    facts = lambda s, key: repr((*key, s.tokens_sha, s.reward, key in kept))
    rows = [facts(s, (s.problem_id, s.rollout)) for g in groups for s in g.trajectories]
    row["rollout_digest"] = sha256("".join(rows).encode()).hexdigest()
    write_traces(job, trajectories, tried[: cfg.trace_groups], f"step_{step:05d}")
    spent = {k: round(v - before.get(k, 0), 3) for k, v in job.seconds.items()}
    row["seconds"] = {k: v for k, v in spent.items() if v} | {"step": time.monotonic() - begin}
    return row


def step_metrics(job: Job, trajectories, summaries, kept: set, stats, counters: dict) -> dict:
    """From all summaries, then what only each rank knows, summed: shares of all engines' time."""
    n, correct = len(summaries), [s for s in summaries if grpo_roc.is_correct(s)]
    mean = lambda name: sum(getattr(s, name) for s in summaries) / n
    share = lambda *reasons: sum(s.stop_reason in reasons for s in summaries) / n
    local = {k: v - counters[k] for k, v in vars(job.engine.counters).items()} | vars(stats)
    local["entropy"] = sum(sum(t.entropies) for t in trajectories)
    total = parallel.sum_over_ranks(local)
    phase = total["seconds"] + total["idle_end_seconds"]
    tokens, last = max(total["generated"], 1), max(gather_over_ranks(stats.seconds))
    counted = ("tool_calls", "checks", "checks_failed", "lost_calls", "wall_cut", "steps")
    return {
        "reward": mean("reward"), "length": mean("num_tokens"), "turns": mean("num_turns"),
        "model_tokens": mean("num_model_tokens"), "calls": mean("num_calls"),
        "penalty": mean("penalty"), "errors_per_call": error_share(summaries),
        "errors_per_call_correct": error_share(correct),
        "errors_correct": sum(s.num_errors for s in correct),
        "calls_correct": sum(s.num_calls for s in correct), "over_limit": share("length", "wall"),
        "turn_limit": share("turns"), "sampled": n, "kept": len(kept),
        "entropy": total["entropy"] / tokens,
        **{f"{k}_tokens": total[k] for k in ("generated", "prefill", "cached", "recomputed")},
        "busy_share": total["engine_seconds"] / phase,
        **{f"{k}_share": total[f"{k}_seconds"] / phase for k in ("tool_wait", "idle_end")},
        "queue_length": total["queue_seconds"] / phase, **{k: total[k] for k in counted},
        "last_trajectory_seconds": last, "tokens_per_second": tokens / max(last, 1e-9),
    }  # fmt: skip


def write_traces(job: Job, trajectories, problems: list[Problem], name: str) -> None:
    """Whole trajectories of a few problems, from all ranks, with the text of every segment."""
    wanted = {p.id: i for i, p in enumerate(problems)}
    texts = lambda t: [job.tok.decode(t.token_ids[a:b]) for a, b, _ in t.segments]
    rows = [t.to_json() | {"texts": texts(t)} for t in trajectories if t.problem.id in wanted]
    rows = sum(gather_over_ranks(rows), [])
    rows.sort(key=lambda r: (wanted[r["problem"]["id"]], r["rollout"]))
    if job.ranks.first:
        path = job.folder / "traces"
        path.mkdir(exist_ok=True)
        (path / f".{name}.tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / f".{name}.tmp").rename(path / f"{name}.jsonl")


HEADER = ("stage step  reward  err/call (right)  tokens turns  entropy  grad   kept/sampled   roll"
          "  upd   tok/s")  # fmt: skip
LINE = (
    "{stage:>5} {step:>4}  {reward:>6.3f}  {errors_per_call:>8.3f} {errors_per_call_correct:>7.3f}"
    "  {length:>6.1f} {turns:>5.2f}  {entropy:>7.3f} {grad_norm:>5.2f}  {kept:>5}/{sampled:<7}"
    " {rollout:>5.1f} {update:>4.1f} {tokens_per_second:>7.0f}"
)


def run_evaluation(job: Job, name: str, stage: int) -> None:
    cfg, key, step = job.cfg, f"evaluation {name}", job.state["step"]
    with job.timed("evaluation"):
        how = rollout_config(cfg, evaluation=True)
        r, trajectories = job.evaluate(job.held_out, how, key, cfg.eval_samples, cfg.seed)
    job.log({"phase": "evaluation", "name": name, "stage": stage, "step": step, **r})
    write_traces(job, trajectories, job.held_out[:8], f"evaluation_{step:05d}")
    print0(job.ranks, f"{key}: pass@1 {r['pass@1']:.3f} +- {r['stderr']:.3f}, errors per call"
           f" {r['errors_per_call']:.3f} ({r['samples']} held-out samples, {r['seconds']:.0f} s)")


# ---- SFT and stages ----


def run_sft(job: Job) -> None:
    """The toy's cold start; other presets start from --init (sft.py trains such a folder)."""
    cfg, ranks, at = job.cfg, job.ranks, job.state["sft_step"]
    how = sft.Config(**{**sft.PRESETS["toy"], "seed": cfg.seed})

    def on_step(step: int, metrics: dict) -> None:
        job.state["sft_step"] = step + 1
        if step % 10 == 0:
            job.log({"phase": "sft", "step": step, **metrics})
        if (step + 1) % (100 * cfg.checkpoint_every) == 0:
            job.checkpoint(f"0-sft-{step + 1:06d}")

    if cfg.preset == "toy" and not cfg.init and cfg.sft_documents:
        documents = toy.toy_documents(job.tok, cfg.sft_documents, seed=cfg.seed)
        with job.timed("sft"):
            sft.sft(job.model, job.optimizer, documents, how, rank=ranks.rank, world=ranks.world,
                    start=at, device=ranks.device, on_step=on_step)  # fmt: skip
    job.export("sft")
    job.optimizer = sft.make_optimizer(job.model, cfg)
    job.hand_over()
    run_evaluation(job, "SFT", stage=0)
    job.state["phase"] = "rl"
    job.checkpoint("1-rl-000000")


def unsolved_problems(job: Job, cfg: Config) -> list[str]:
    """Ids for stage 3: problems that the stage-2 policy does not solve in all of 8 rollouts."""
    tried, n = job.problems[: cfg.filter_problems or len(job.problems)], cfg.filter_rollouts
    with job.timed("filter"):
        _, mine = job.evaluate(tried, rollout_config(cfg), "filter", n, f"filter {cfg.seed}")
        wrong = {t.problem.id for t in mine if not grpo_roc.is_correct(t)}
        wrong = set().union(*gather_over_ranks(wrong))
    left = [p.id for p in tried if p.id in wrong]
    print0(job.ranks, f"{len(left)} of {len(tried)} problems are not solved {n} of {n}")
    return left or [p.id for p in tried]


def run_stages(job: Job) -> None:
    cfg, state = job.cfg, job.state
    for stage in range(state["stage"], min(cfg.stages, len(STAGES[cfg.preset]))):
        staged = stage_config(cfg, job.given, stage)
        if staged.filter_solved and "left" not in state:
            state["left"] = unsolved_problems(job, staged)
        left = set(state["left"]) if staged.filter_solved else {p.id for p in job.problems}
        problems = [p for p in job.problems if p.id in left]
        print0(job.ranks, f"\nstage {stage + 1}: {staged.steps} steps, {staged.problems_per_step}"
               f" problems x {staged.rollouts} rollouts, {staged.max_tokens} tokens,"
               f" {staged.max_turns} turns, lr {staged.lr:g}\n{HEADER}")  # fmt: skip
        if state["at"] == 0 and staged.reset_optimizer:
            job.optimizer = sft.make_optimizer(job.model, cfg)
            state["steps_since_reset"] = 0
        job.lengths = Lengths(staged.max_tokens)
        for _ in range(state["at"], staged.steps):
            row = rl_step(job, staged, stage, problems)
            job.log(row)
            print0(job.ranks, LINE.format(**dict(grad_norm=0, update=0) | row["seconds"] | row))
            for key in ("step", "at", "steps_since_reset"):
                state[key] += 1
            step, last = state["step"], state["at"] == staged.steps  # of its stage
            if due := last or step % cfg.eval_every == 0:
                run_evaluation(job, f"stage {stage + 1}" if last else f"step {step}", stage + 1)
            if last:
                state.update(stage=stage + 1, at=0, draws=0)
            if last or step % cfg.checkpoint_every == 0:
                job.checkpoint(f"1-rl-{step:06d}")
            if due and job.ranks.first:
                write_report(job.folder)


# ---- start and end ----


def make_data(cfg: Config, folder: Path, ranks: Ranks) -> tuple[list[Problem], list[Problem]]:
    """(problems for RL, held-out problems): the toy's own, or from files."""
    if cfg.preset == "toy" and not cfg.data:
        problems = toy.toy_problems(2048, cfg.seed, holdout=False)
        held_out = toy.toy_problems(cfg.eval_problems, cfg.seed, holdout=True)
    elif cfg.data and cfg.eval_data:
        problems, held_out = read_problems(cfg.data), read_problems(cfg.eval_data)
    else:
        raise ValueError("--data FILE and --eval-data FILE are needed: problems with answers")
    known = {" ".join(p.question.split()) for p in held_out}
    both = [p.id for p in problems if " ".join(p.question.split()) in known]
    print0(ranks, f"{len(problems)} problems to train on, {len(held_out)} held out,"
                  f" {len(both)} in both")  # fmt: skip
    if both:
        raise ValueError(f"{cfg.data} has held-out problems ({both[0]}, ...): run data.py filter")
    if ranks.first:
        rows = [json.dumps(asdict(p)) + "\n" for p in held_out]
        (folder / "evaluation.jsonl").write_text("".join(rows))
    return problems, held_out


def make_models(cfg: Config, folder: Path, ranks: Ranks) -> tuple[Tokenizer, Model, Model]:
    """(tokenizer, the trainer's model, the engine's): fp32 parameters and a copy in the dtype."""
    path = (Path(cfg.init) if cfg.init else folder) / "tokenizer.json"
    if not cfg.init and cfg.preset != "toy":
        raise ValueError("--init DIR is needed: a Qwen folder with config, weights and tokenizer")
    if not cfg.init and ranks.first and not path.exists():
        toy.toy_tokenizer(cfg.seed).save(path)
    parallel.barrier_over_ranks()  # the file is there
    tok, dtype = Tokenizer.from_file(path), getattr(torch, cfg.dtype)
    if cfg.init:
        shape = read_config(cfg.init)
        stored = stored_weights(cfg.init, shape)
        with torch.device("meta"):
            model = Model(shape)
        model = parallel.shard(model, ranks, dtype)
        parallel.fill(model, stored, ranks)
    else:
        model = Model(SHAPES["toy"]).to(ranks.device)
        init_weights(model, cfg.seed, **toy.TOY_INIT)
        model = parallel.shard(model, ranks, dtype)
    with torch.device(ranks.device):
        return tok, model, Model(model.config).to(dtype).eval()


@contextlib.contextmanager
def tool_pool(cfg: Config, ranks: Ranks):
    """One sandbox pool a node, started by its first rank, used by all of them."""
    how = {"workers": cfg.workers} if cfg.workers else {}
    pool = Sandbox(**how) if ranks.local_rank == 0 else None
    mine = (ranks.node, pool.address, pool.secret) if pool else None
    known = {row[0]: row[1:] for row in gather_over_ranks(mine) if row}
    with pool or SandboxClient(*known[ranks.node]) as box:
        if pool:
            off = [f"{name} ({why})" for name, (on, why) in pool.layers().items() if not on]
            print0(ranks, "sandbox: layers off:" if off else "sandbox: all layers on", *off)
        yield box
        parallel.barrier_over_ranks()  # nobody needs it any more


def start(cfg: Config, given: set[str], ranks: Ranks, box) -> Job:
    """Builds everything and goes to where the newest checkpoint was."""
    folder = Path(cfg.out)
    problems, held_out = make_data(cfg, folder, ranks)
    tok, model, engine_model = make_models(cfg, folder, ranks)
    size, blocks = dict(block_size=cfg.block_size, max_num_seqs=cfg.max_seqs), cfg.cache_tokens
    if not blocks and ranks.device.type != "cuda":
        raise ValueError("--cache-tokens is needed on a CPU")
    blocks = blocks // cfg.block_size if blocks else blocks_that_fit(engine_model, 0.5, **size)
    engine = Engine(engine_model, blocks, **size)  # the other half of a GPU is the trainer's
    job = Job(cfg, given, ranks, folder, tok, model, engine, box, problems, held_out)
    job.state = dict(phase="sft", sft_step=0, stage=0, at=0, step=0, draws=0, steps_since_reset=0,
                     rows=0, rewards=[])  # fmt: skip
    found = parallel.newest_checkpoint(folder / "checkpoints") if ranks.first else None
    path, damaged = parallel.broadcast_over_ranks(found)
    print0(ranks, *damaged, sep="\n", end="\n" if damaged else "")
    if damaged and path is None:
        raise ValueError(f"no checkpoint of {folder} is whole: start over with --fresh")
    in_rl = path is not None and path.name.startswith("1-rl")
    job.optimizer = sft.make_optimizer(model, cfg if in_rl else sft.Config(**sft.PRESETS["toy"]))
    if path:
        job.state = parallel.load_checkpoint(path, model, job.optimizer)
        job.seconds.update(job.state["seconds"])
        print0(ranks, f"continues from {path}")
    if ranks.first and (metrics := folder / "metrics.jsonl").exists():
        rows = metrics.read_text().splitlines(keepends=True)  # later ones will be written again
        (folder / ".metrics.tmp").write_text("".join(rows[: job.state["rows"]]))
        (folder / ".metrics.tmp").rename(metrics)
    return job


def finish(job: Job, seconds: float) -> None:
    """The table at the end, and the page."""
    rows = list(map(json.loads, (job.folder / "metrics.jsonl").read_text().splitlines()))
    print("\n" + table([(r["name"], r) for r in rows if r["phase"] == "evaluation"]))
    if rl := [r for r in rows if r["phase"] == "rl"]:
        print("\nerrors per call in correct training trajectories: first 10 steps"
              f" {pooled_errors(rl[:10]):.3f}, last 10 {pooled_errors(rl[-10:]):.3f}")  # fmt: skip
    spent = sorted(job.seconds.items(), key=lambda kv: -kv[1])
    print("seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in spent) + f"; this start {seconds:.0f}")
    print("         (rollout includes checks and tools, the time that only tools were waited for)")
    print(f"report: {write_report(job.folder)}")
    if job.cfg.fast:
        print("--fast: far from converged; leave it out for the real thing.")


@contextlib.contextmanager
def said_in_a_sentence():
    """What a user, a file or a folder can cause, before training begins."""
    try:
        yield
    except (OSError, ValueError) as e:
        print(f"train.py: {e}", file=sys.stderr, flush=True)
        sys.exit(2)


def dry_run(cfg: Config, given: set[str]) -> None:
    """The plan: shapes on the meta device, tokens a step, stages, what would be loaded."""
    shape = read_config(cfg.init) if cfg.init else SHAPES[cfg.preset]
    with torch.device("meta"):
        count = sum(p.numel() for p in Model(shape).parameters())
    width = getattr(torch, cfg.dtype).itemsize * shape.num_kv_heads * shape.head_dim
    print(f"preset {cfg.preset}: {count / 1e9:.3f} G parameters, {shape}")
    token = 2 * shape.num_layers * width
    print(f"KV cache {token:,} bytes a token; parameters and AdamW in fp32 {16 * count:,} bytes")
    nothing = "nothing, the toy starts from scratch" if cfg.preset == "toy" else "--init DIR"
    print(f"would load: {cfg.init or nothing}")
    for stage in range(min(cfg.stages, len(STAGES[cfg.preset]))):
        s = stage_config(cfg, given, stage)
        most = s.problems_per_step * s.rollouts * s.max_tokens
        print(f"stage {stage + 1}: {s.steps} steps of {s.problems_per_step} x {s.rollouts} ->"
              f" {s.group_size}, at most {most:,} tokens a step, T {s.max_turns}, lr {s.lr:g}"
              f"{', only problems not solved 8 of 8' if s.filter_solved else ''}"
              f"{', optimiser reset' if s.reset_optimizer else ''}")  # fmt: skip


def main() -> None:
    base = lambda given: PRESETS[given.get("preset", "toy")] | (FAST if given.get("fast") else {})
    cfg, given = parallel.parse_config(Config, base=base, choices=PRESETS, description=__doc__)
    cfg = replace(cfg, out=cfg.out or f"runs/{cfg.preset}{'-fast' if cfg.fast else ''}")
    if cfg.dry_run:
        with said_in_a_sentence():
            return dry_run(cfg, given)
    ranks, begin = parallel.start_ranks(cfg.device or None, cfg.threads), time.monotonic()
    with said_in_a_sentence():
        if ranks.first:
            saved = asdict(cfg) | {"evaluation": asdict(rollout_config(cfg, True))}
            parallel.open_run(Path(cfg.out), saved, cfg.fresh, FREE)
    parallel.barrier_over_ranks()
    with tool_pool(cfg, ranks) as box:
        with said_in_a_sentence():
            job = start(cfg, given, ranks, box)
        if job.state["phase"] == "sft":
            run_sft(job)
        job.hand_over()
        run_stages(job)
        job.export("model")
    if ranks.first:
        finish(job, time.monotonic() - begin)
    parallel.end_ranks()


if __name__ == "__main__":
    main()
