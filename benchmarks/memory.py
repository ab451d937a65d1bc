"""Peak memory of log-probabilities and entropies with their gradients: token_logprobs beside the
path that makes all (tokens, vocabulary) logits at once.

    python benchmarks/memory.py [--vocab 151936] [--hidden 64] [--tokens 2048 4096 8192 16384]

Each figure is the growth of the peak resident size of a process of its own, from after its inputs
exist to after the backward; float32 on the CPU, or allocated bytes on a GPU. The naive path is run
only where it fits; elsewhere its line is proportional to the longest that did, marked by a star.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # else `import kernels` would find benchmarks/kernels

import torch  # noqa: E402

import kernels  # noqa: E402


def naive(hidden, weight, targets):
    logp = (hidden @ weight.T).float().log_softmax(-1)  # (T, V)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def peak(cuda):
    return torch.cuda.max_memory_allocated() if cuda else peak_resident()


def peak_resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(path, T, V, C):
    """Prints the growth of the peak in bytes, and the seconds."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    hidden = torch.randn(T, C, device=device, requires_grad=True)
    weight = (torch.randn(V, C, device=device) / C**0.5).requires_grad_()
    targets = torch.randint(V, (T,), device=device)
    before, start = peak(cuda), time.perf_counter()
    f = kernels.token_logprobs if path == "fused" else naive
    logprobs, entropies = f(hidden, weight, targets)
    (logprobs.sum() + 0.01 * entropies.sum()).backward()
    print(peak(cuda) - before, time.perf_counter() - start)


def in_a_process(path, T, V, C):
    command = [sys.executable, __file__, "--path", path, "--tokens", str(T), "--vocab", str(V),
               "--hidden", str(C)]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(out[0]), float(out[1])


def free_bytes():
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--path", choices=["fused", "naive"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.path:
        return measure(args.path, args.tokens[0], args.vocab, args.hidden)
    print(f"vocabulary {args.vocab}, hidden {args.hidden}\n"
          f"{'tokens':>8}{'fused MB':>12}{'seconds':>9}{'naive MB':>12}{'seconds':>9}")  # fmt: skip
    per_token = 20 * args.vocab  # guess before the first: five float32 copies
    for T in args.tokens:
        fused, fused_seconds = in_a_process("fused", T, args.vocab, args.hidden)
        line = f"{T:8}{fused / 1e6:12.0f}{fused_seconds:9.1f}"
        if T * per_token < 0.8 * free_bytes():
            size, naive_seconds = in_a_process("naive", T, args.vocab, args.hidden)
            per_token = size / T
            print(f"{line}{size / 1e6:12.0f}{naive_seconds:9.1f}", flush=True)
        else:
            print(f"{line}{T * per_token / 1e6:11.0f}*", flush=True)


if __name__ == "__main__":
    main()
