"""Parallel: torchrun start-up, sharding, collectives, checkpoints, and the command line.

The same script runs as `python train.py` (one process) and under `torchrun` (one process a rank):
gloo on CPUs, NCCL or RCCL on GPUs. Rank facts come from here and nowhere else; a collective is
visible in its caller, its name ends in `_over_ranks`.

Sharding is FSDP2, per block. It averages gradients over ranks, so a loss that is a *sum* with
weights made over all ranks (Batch.token_weights) is multiplied by the world size, which undoes
that. All ranks run the same number of forwards and backwards: an idle one runs weight-0 dummies.

A checkpoint is a folder that appears whole or not at all: written under another name, a manifest
with the size and sha256 of every file last (a flipped byte would load silently otherwise), renamed
by rank 0 after a barrier. torch.distributed.checkpoint cuts tensors by shard, so that another
number of ranks can read them.

Ranks that generate wait for each other in the store, not in a collective: one rank may be minutes
late. Nothing here knows what is trained.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
    whose launcher dies gets that signal too. One thread a process: two are slower on busy cores,
    and bits depend on the number.
    """
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
    if name == "cuda":
        torch.cuda.set_device(local_rank)
    where = torch.device(name, local_rank) if name == "cuda" else torch.device(name)
    backend = "cpu:gloo,cuda:nccl" if name == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    node = int(os.environ.get("GROUP_RANK", 0))
    return Ranks(rank, world, local_rank, node, where, _shared_store(rank))


def _shared_store(rank: int) -> dist.Store:
    """A store of our own: keys of torch's own collectives stay apart from ours."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    address = [None]
    if rank == 0:
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = [server.port]
    dist.broadcast_object_list(address, src=0)
    if rank == 0:
        return server
    return dist.TCPStore(host, address[0], is_master=False, wait_for_workers=False)


def end_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
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
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


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
    payload = [json.dumps(rows).encode() if rows else b"" for rows in outgoing]
    sizes = gather_over_ranks([len(p) for p in payload])
    incoming = [torch.empty(sizes[r][rank], dtype=torch.uint8) for r in range(world)]
    mine = [torch.frombuffer(bytearray(p), dtype=torch.uint8) if p else None for p in payload]
    work = []
    for r in range(world):
        if r == rank:
            continue
        if payload[r]:
            work.append(dist.isend(mine[r], r))
        if len(incoming[r]):
            work.append(dist.irecv(incoming[r], r))
    for w in work:
        w.wait()
    rows = []
    for r in range(world):
        if r == rank:
            rows += outgoing[rank]
        elif len(incoming[r]):
            rows += json.loads(incoming[r].numpy().tobytes())
    return rows


# ---- sharding ----


def shard(model, ranks: Ranks, compute_dtype: torch.dtype = torch.float32):
    """FSDP2 around every block and the root; parameters stay fp32, compute may be bf16."""
    if ranks.world == 1 and compute_dtype == torch.float32:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():  # one process that wants bf16 compute over fp32 parameters
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def full_parameters(model):
    """(name, whole tensor) one after the other, so that only one is whole at a time."""
    for name, parameter in model.state_dict().items():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def clip_gradients_over_ranks(parameters, max_norm: float) -> float:
    """Scales gradients to a total norm of at most max_norm; returns the norm before.

    The sum is in float64 and rounded once, so that it has the same bits for any number of ranks.
    """
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


def save_checkpoint(folder: Path, name: str, model, optimizer, state: dict, keep: int = 2) -> None:
    """folder/name: model, optimiser (sharded) and `state` (JSON). Keeps the newest `keep`."""
    final, temporary = folder / name, folder / f".{name}.tmp"
    if _first():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier_over_ranks()
    tensors = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    with _quiet():
        dcp.save(tensors, checkpoint_id=temporary / "tensors", no_dist=not dist.is_initialized())
    barrier_over_ranks()
    if _first():
        (temporary / "state.json").write_text(json.dumps(state))
        manifest = {str(p.relative_to(temporary)): _fingerprint(p) for p in _files(temporary)}
        _write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        older = [p for p in list_checkpoints(folder) if p.name <= name]  # damaged ones may be newer
        for old in older[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    barrier_over_ranks()


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished ones, oldest first (names sort by age)."""
    return sorted(p.parent for p in folder.glob("[!.]*/manifest.json"))


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest one whose files are as its manifest says; a sentence for each that is not."""
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        problem = check_checkpoint(path)
        if not problem:
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
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state}
    with _quiet():
        dcp.load(tensors, checkpoint_id=path / "tensors", no_dist=not dist.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"]
    )
    return json.loads((path / "state.json").read_text())


@contextlib.contextmanager
def _quiet():
    """One process is meant: torch need not warn that there is only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _files(folder: Path):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _fingerprint(path: Path) -> list:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


# ---- run folders ----


def open_run(folder: Path, config: dict, fresh: bool = False, free: tuple = ()) -> bool:
    """Makes or reopens a run folder (rank 0 only); True: it continues an earlier run.

    `fresh` moves an old folder aside. Another config is an error that names the fields; fields in
    `free` (number of workers, say) may differ.
    """
    saved = folder / "config.json"
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # torchrun --max-restarts
    if fresh and folder.exists() and not again:
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
    keys = [k for k in {**old, **new} if k not in free and old.get(k) != new.get(k)]
    if keys:
        rows = "\n".join(f"  {k}: {old.get(k)!r} there, {new.get(k)!r} now" for k in keys)
        raise ValueError(
            f"{folder} is a run with another config:\n{rows}\n"
            "Give the same flags to continue it, another --out for a new one, or --fresh to move"
            " it aside."
        )
    return True


# ---- command line ----


def parse_config(cls, argv=None, base=None, choices=(), description: str = ""):
    """(cls instance, names of the flags given): one flag a field of the dataclass `cls`.

    Precedence: default < base(flags given) < flag. --help prints the class: its comments are the
    documentation. A wrong flag, value or preset (none of `choices`) ends with a line and status 2.
    """
    parser = argparse.ArgumentParser(
        description=f"{description}\n\n{inspect.getsource(cls)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--FIELD VALUE ...]",
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        flag, kind = "--" + f.name.replace("_", "-"), hints[f.name]
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind)
        parser.add_argument(flag, dest=f.name, default=None, help=argparse.SUPPRESS, **how)
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    if given.get("preset", next(iter(choices), None)) not in (*choices, None):
        parser.error(f"unknown preset {given['preset']!r}: choose one of {', '.join(choices)}")
    try:
        return cls(**{**(base(given) if base else {}), **given}), set(given)
    except ValueError as e:
        parser.error(str(e))


def num_shares(world: int) -> int:
    """Shares into which a batch is dealt: a multiple of the world size, at least 2, so that one
    rank adds the same two sums as two ranks do, bit for bit."""
    return world * math.ceil(2 / world)
