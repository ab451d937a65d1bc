"""Parallel: torchrun start-up, sharding, collectives, checkpoints, and the command line.

The same script runs as `python train.py` (one process) and under `torchrun` (one process a rank):
gloo on CPUs, NCCL or RCCL on GPUs. Rank facts come from here and nowhere else; a collective is
visible in its caller, its name ends in `_over_ranks`.

Sharding is FSDP2, per block. It averages gradients over ranks, so a loss that is a *sum* with
weights made over all ranks (Batch.token_weights) is multiplied by the world size, which undoes
that. All ranks run the same number of forwards and backwards: an idle one runs weight-0 dummies.

A checkpoint is a folder that appears whole or not at all: written under another name, a manifest
with the size and sha256 of every file last (a flipped byte would load silently otherwise), renamed
by rank 0 after a barrier. Tensors are cut by shard, so that another number of ranks can read them.

Ranks that generate wait for each other in the store, not in a collective: one may be minutes late.
Nothing here knows what is trained.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import typing
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# ---- ranks ----


@dataclass
class Ranks:
    rank: int
    world: int
    local_rank: int
    node: int
    device: torch.device
    store: dist.Store  # shared by all ranks: the rollout queue lives in it

    @property
    def first(self) -> bool:
        return self.rank == 0


def start_ranks(device: str | None = None, threads: int = 1) -> Ranks:
    """Joins torchrun's process group, or stands alone without one. Call once, first.

    SIGTERM becomes SystemExit so that `with` blocks close (the sandbox, the bars); on Linux a rank
    whose launcher dies gets that signal too. More threads: slower on busy cores, and other bits."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" not in os.environ:
        return Ranks(0, 1, 0, 0, torch.device(name), dist.HashStore())
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            sys.exit("parallel.py: the launcher has died")
    rank, world, local_rank = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    where, backend = torch.device(name), "gloo"
    if name == "cuda":
        where, backend = torch.device(name, local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(where)
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    # A store of our own: keys of torch's own collectives stay apart from ours.
    host, first = os.environ.get("MASTER_ADDR", "localhost"), rank == 0
    join = lambda port: dist.TCPStore(host, port, is_master=first, wait_for_workers=False)
    store = join(0) if first else None  # on a free port
    port = broadcast_over_ranks(store.port if first else None)
    node = int(os.environ.get("GROUP_RANK", 0))
    return Ranks(rank, world, local_rank, node, where, store if first else join(port))


def end_ranks() -> None:
    barrier_over_ranks()
    if dist.is_initialized():
        dist.destroy_process_group()


def print0(ranks: Ranks, *args, **how) -> None:
    if ranks.first:
        print(*args, flush=True, **how)


# ---- collectives ----


def barrier_over_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather_over_ranks(value) -> list:
    """Every rank's value, in rank order, on every rank (small Python objects of our own ranks)."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_over_ranks(value):
    """Rank 0's value on every rank."""
    return gather_over_ranks(value)[0]


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The same keys on all ranks; float64 sums."""
    if not dist.is_initialized():
        return values
    total = torch.tensor([float(v) for v in values.values()], dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(values, total.tolist()))


def exchange_over_ranks(outgoing: list[list[dict]]) -> list[dict]:
    """outgoing[r] are JSON rows for rank r; returns the rows that came for this rank, by sender."""
    if not dist.is_initialized():
        return outgoing[0]
    world, rank = dist.get_world_size(), dist.get_rank()
    encode = lambda r: json.dumps(outgoing[r]).encode() if outgoing[r] and r != rank else b""
    texts = [bytearray(encode(r)) for r in range(world)]
    sizes = gather_over_ranks([len(text) for text in texts])  # [sender][receiver]
    leaving = [torch.frombuffer(text, dtype=torch.uint8) if text else () for text in texts]
    coming = [torch.empty(row[rank], dtype=torch.uint8) for row in sizes]
    work = [dist.isend(x, r) for r, x in enumerate(leaving) if len(x)]
    for w in work + [dist.irecv(x, r) for r, x in enumerate(coming) if len(x)]:
        w.wait()
    rows = [json.loads(x.numpy().tobytes()) if len(x) else [] for x in coming]
    rows[rank] = outgoing[rank]
    return sum(rows, [])


# ---- sharding ----


def shard(model, ranks: Ranks, compute_dtype: torch.dtype = torch.float32):
    """FSDP2 around every block and the root; parameters stay fp32, compute may be bf16. A model
    below 10 M parameters is one group: one gather and one reduction a step, not one a block."""
    if ranks.world == 1 and compute_dtype == torch.float32:
        return model
    if not dist.is_initialized():  # one process that wants bf16 compute over fp32 parameters
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    size = sum(p.numel() for p in model.parameters())
    for block in model.layers if size > 10**7 else ():
        block.recompute = size > 10**9  # activations of 12K tokens would not fit
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def fill(model, stored: dict, ranks: Ranks) -> None:
    """Values for a sharded model made on the meta device. stored: whole tensors by name, memory
    mapped; each rank copies its rows and touches no other byte."""
    model.to_empty(device=ranks.device)
    for name, parameter in model.named_parameters():
        part = stored[name]
        if isinstance(parameter, DTensor):
            rows = -(-len(part) // ranks.world)
            part = part[ranks.rank * rows : (ranks.rank + 1) * rows]
            parameter = parameter.to_local()
        parameter.copy_(part)


def full_parameters(model):
    """(name, whole tensor) one after the other, so that only one is whole at a time."""
    for name, value in model.state_dict().items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def clip_gradients_over_ranks(parameters, max_norm: float) -> float:
    """Scales gradients to a total norm of at most max_norm; returns the norm before. Its sum is in
    float64 and rounded once, so that it has the same bits for any number of ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    total = sum(g.double().square().sum() for g in local).cpu()
    if dist.is_initialized() and any(isinstance(g, DTensor) for g in grads):
        dist.all_reduce(total)
    norm = float(total.sqrt().float())
    if norm > max_norm:
        torch._foreach_mul_(local, max_norm / (norm + 1e-6))
    return norm


# ---- checkpoints ----

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant


def save_checkpoint(folder: Path, name: str, model, optimizer, state: dict, keep: int = 2) -> None:
    """folder/name: model, optimiser (sharded) and `state` (JSON). Keeps the newest `keep`."""
    final, temporary = folder / name, folder / f".{name}.tmp"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier_over_ranks()
    tensors = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(tensors, checkpoint_id=temporary / "tensors", no_dist=not dist.is_initialized())
    barrier_over_ranks()
    if first:
        (temporary / "state.json").write_text(json.dumps(state))
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(temporary)): _fingerprint(p) for p in files}
        _write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        finished = [p for p in list_checkpoints(folder) if p.name <= name]  # later: damaged ones
        for old in finished[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    barrier_over_ranks()


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished ones, oldest first (names sort by age)."""
    return sorted(p.parent for p in folder.glob("[!.]*/manifest.json"))


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest one whose files are as its manifest says; a sentence for each that is not."""
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        if not (problem := check_checkpoint(path)):
            return path, damaged
        damaged.append(f"{path} is damaged ({problem}): left alone, an older one is used")
    return None, damaged


def check_checkpoint(path: Path) -> str:
    """'' or what is wrong with it."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except ValueError as e:
        return f"manifest.json: {e}"
    for name, expected in manifest.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _fingerprint(path / name) != expected:
            return f"{name} has another size or sha256 than the manifest"
    return ""


def load_checkpoint(path: Path, model, optimizer) -> dict:
    """Fills model and optimiser in place, whatever number of ranks wrote them; returns `state`."""
    tensors = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(tensors, checkpoint_id=path / "tensors", no_dist=not dist.is_initialized())
    states = dict(model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
    set_state_dict(model, optimizer, **states)
    return json.loads((path / "state.json").read_text())


def _fingerprint(path: Path) -> list:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
        return [f.tell(), digest.hexdigest()]


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


# ---- run folders ----


def open_run(folder: Path, config: dict, fresh: bool = False, free: tuple = ()) -> bool:
    """Makes or reopens a run folder (rank 0 only); True: it continues an earlier run. `fresh` moves
    an old folder aside (not so when torchrun starts a command again). Another config is an error
    that names the fields; those in `free` (number of workers, say) may differ."""
    saved = folder / "config.json"
    if fresh and folder.exists() and not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        aside = next(p for i in range(1, 10**6) if not (p := Path(f"{folder}.{i}")).exists())
        folder.rename(aside)
        print(f"{folder} moved aside to {aside}")
    if not (folder / "metrics.jsonl").exists():  # nothing was trained: nothing to protect
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_synced(folder / ".config.tmp", json.dumps(config, indent=1))
            (folder / ".config.tmp").rename(saved)
        except OSError as e:
            raise OSError(f"cannot write the run folder {folder}: {e.strerror or e}") from None
        return False
    try:
        old = json.loads(saved.read_text())
    except ValueError as e:
        raise ValueError(f"{saved} is not JSON ({e}): move the folder away, or --fresh") from None
    new = json.loads(json.dumps(config))
    rows = [f"  {k}: {old.get(k)!r} there, {new.get(k)!r} now"
            for k in old | new if k not in free and old.get(k) != new.get(k)]  # fmt: skip
    if rows:
        raise ValueError("\n".join([
            f"{folder} is a run with another config:", *rows, "Give the same flags to continue it,"
            " another --out for a new one, or --fresh to move it aside."]))  # fmt: skip
    return True


# ---- command line ----


def parse_config(cls, argv=None, base=None, choices=(), description: str = ""):
    """(cls instance, names of flags given): a flag for every field of the dataclass. Precedence:
    default < base(flags given) < flag. --help prints the class: its comments are the documentation.
    A wrong flag, value or preset (none of `choices`) ends with a line and status 2."""
    parser = argparse.ArgumentParser(
        description=f"{description}\n\n{inspect.getsource(cls)}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [--FIELD VALUE ...]",
    )  # fmt: skip
    for name, kind in typing.get_type_hints(cls).items():
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind)
        parser.add_argument("--" + name.replace("_", "-"), help=argparse.SUPPRESS, **how)
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    if given.get("preset") not in (None, *choices):
        parser.error(f"unknown preset {given['preset']!r}: choose one of {', '.join(choices)}")
    try:
        return cls(**{**(base(given) if base else {}), **given}), set(given)
    except ValueError as e:
        parser.error(str(e))


def num_shares(world: int) -> int:
    """Shares into which a batch is dealt: a multiple of the world size, at least 2, so that one
    rank adds the same two sums as two ranks do, bit for bit if a share is one micro-batch."""
    return world * math.ceil(2 / world)
