"""Kernels: what the compiler made of them (no GPU needed), and what they reach on one.

    python benchmarks/kernels.py --static [--arch gfx942] [--json]
    python benchmarks/kernels.py                                   on a GPU

--static compiles every kernel in bfloat16 at the shapes of Qwen3-14B and Qwen3-0.6B and reads the
assembly. It calls the public functions on meta tensors under a driver that only names a target,
so that launch options and specialisation (divisibility by 16, tensors below 2 GB or not) are
those of the JIT's own binder. A specialisation that two shapes share is printed once.

With a GPU: bandwidth and rate, as shares of what the device's own copy and matmul reach, beside
torch's attention and its log_softmax path.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # else `import kernels` would find this file

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import kernels  # noqa: E402

MODELS = {
    "14B": dict(H=40, K=8, D=128, C=5120, V=151936),
    "0.6B": dict(H=16, K=8, D=128, C=1024, V=151936),
}
TARGETS = {"gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64),
           "sm_90": ("cuda", 90, 32)}  # fmt: skip
BLOCK = 64  # tokens of a cache block on a GPU: one tile of keys
bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


# ---- static ------------------------------------------------------------------------------------


def call_everything(make, H, K, D, C, V, big):
    """Calls every public function once, forward and backward. make(*shape, dtype) -> tensor.

    big: the tensors that can pass 2 GB do (AMD then addresses them by 64-bit pointers).
    """
    at_least = lambda n, row_bytes: max(n, 2**31 // row_bytes + 64) if big else n
    grad = lambda *s: make(*s, dtype=bf16).requires_grad_()
    T, B, M = 4096, 256, 160
    x, r, w = grad(at_least(T, 2 * C), C), grad(at_least(T, 2 * C), C), grad(C)
    out = kernels.add_rmsnorm(x, r, w, 1e-6)
    torch.autograd.backward(out, out)
    y = kernels.rmsnorm(x, w, 1e-6)
    y.backward(y)
    n = at_least(T, 2 * H * D)
    q, k, wq, wk = grad(n, H, D), grad(n, K, D), grad(D), grad(D)
    out = kernels.rotary(q, k, make(n, dtype=i64), make(D // 2, dtype=f32), wq, wk)
    torch.autograd.backward(out, out)
    q, k = make(T, H, D, dtype=bf16), make(T, K, D, dtype=bf16)
    k_cache, v_cache = (make(at_least(4096, 2 * BLOCK * K * D), BLOCK, K, D, dtype=bf16),) * 2
    kernels.store_kv(k, k, k_cache, v_cache, make(T, dtype=i64))
    tables, lens, cu_seqlens = make(B, M, dtype=i32), make(B, dtype=i32), make(B + 1, dtype=i32)
    kernels.paged_decode_attention(q[:B], k_cache, v_cache, tables, lens, D**-0.5)
    kernels.paged_prefill_attention(q, k_cache, v_cache, cu_seqlens, lens, tables, D**-0.5)
    n = at_least(B, 4 * V)
    keys, temperature = make(n, dtype=i64), make(n, dtype=f32)
    kernels.sample(make(n, V, dtype=f32), keys, keys, temperature, torch.ones(n))
    hidden, weight = grad(at_least(T, 2 * C), C), grad(at_least(V, 2 * C), C)
    out = kernels.token_logprobs(hidden, weight, make(len(hidden), dtype=i64))
    torch.autograd.backward(out, out)


class Target:
    """Stands in for triton's driver: names an architecture, owns no device."""

    def __init__(self, backend, arch, warp):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, arch, warp)

    get_current_target = lambda self: self.target
    get_current_device = lambda self: str(self.target)
    get_current_stream = lambda self, device: 0


def compile_everything(arch):
    """Yields (model, big, compiled kernel) for each distinct specialisation."""
    import triton

    make = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")
    seen, new = set(), []

    def compile_only(jit_function, grid):
        def launch(*args, **kwargs):
            compiled = jit_function.warmup(*args, grid=grid, **kwargs)
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                new.append(compiled)

        return launch

    triton.runtime.driver.set_active(Target(*TARGETS[arch]))
    kernels._config.cache_clear()
    launch, triton.JITFunction.__getitem__ = triton.JITFunction.__getitem__, compile_only
    for model, dims in MODELS.items():
        for big in (False, True):
            call_everything(make, **dims, big=big)
            yield from ((model, big, compiled) for compiled in new)
            new.clear()
    triton.JITFunction.__getitem__ = launch


def amd_report(compiled):
    asm = compiled.asm["amdgcn"]
    number = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", asm)[1])
    loads = re.findall(r"^\s+(?:buffer|global)_load_(?:lds_)?(\w+)", asm, re.M)
    size = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}  # the rest: 2 bytes or 1
    return dict(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        scratch=number("private_segment_fixed_size"),
        shared=max(number("group_segment_fixed_size"), compiled.metadata.shared),
        dots=len(re.findall(r"v_mfma", asm)),
        loads=[size.get(name, 2) for name in loads],
    )


def nvidia_report(compiled):
    """Scratch is the stack; ptxas counts what it spills there."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True).stdout
    number = lambda name: int(re.search(rf"{name}:(\d+)", usage)[1])
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.c\w\.shared\.global.*?\], (0x\w+)", ptx)
    return dict(
        registers=number("REG"),
        spills=number("LOCAL"),
        scratch=number("STACK"),
        shared=max(number("SHARED"), compiled.metadata.shared),
        dots=len(re.findall(r"mma\.sync|wgmma\.mma", ptx)),
        loads=[int(n or 1) * int(bits) // 8 for n, bits in loads] + [int(x, 16) for x in copies],
    )


def static_rows(archs):
    for arch in archs:
        report = amd_report if arch.startswith("gfx") else nvidia_report
        for model, big, compiled in compile_everything(arch):
            meta = compiled.metadata
            yield dict(arch=arch, model=model, big=big, kernel=meta.name, warps=meta.num_warps,
                       **report(compiled))  # fmt: skip


def print_static(archs, as_json):
    head = "kernel", "warps", "registers", "spills", "scratch", "shared", "dots"
    if not as_json:
        print(f"{'arch':8}{'model':6}{'size':7}{head[0]:32}" + "".join(f"{h:>10}" for h in head[1:])
              + "  loads by bytes")  # fmt: skip
    for row in static_rows(archs):
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        loads = {n: row["loads"].count(n) for n in sorted(set(row["loads"]), reverse=True)}
        print(f"{row['arch']:8}{row['model']:6}{'> 2 GB' if row['big'] else '':7}{row['kernel']:32}"
              + "".join(f"{row[h]:10}" for h in head[1:]) + f"  {loads}", flush=True)  # fmt: skip


# ---- on a GPU ----------------------------------------------------------------------------------


def seconds(f, *args, repeats=20):
    """Median over repeats, each between two events, with a cache-sized write before it."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f(*args)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[repeats // 2]


def ceilings():
    """What the device's own copy (bytes a second) and matmul (operations a second) reach."""
    big, a = torch.zeros(2**30, dtype=bf16, device="cuda"), random_tensor(8192, 8192)
    return 2 * big.nbytes / seconds(big.clone), 2 * 8192**3 / seconds(torch.matmul, a, a)


def random_tensor(*shape, dtype=bf16):
    return torch.randn(*shape, device="cuda").to(dtype)


def measurements(H, K, D, C, V):
    """Yields (name, function, arguments, bytes or None, operations or None)."""
    T, B, L = 16384, 256, 4096
    M, S, make = L // BLOCK, T // L, random_tensor
    x, w = make(T, C).requires_grad_(), make(C).requires_grad_()
    out = kernels.add_rmsnorm(x, x, w, 1e-6)
    backward = lambda: torch.autograd.grad(out, (x, w), (x, x), retain_graph=True)
    yield "add_rmsnorm", kernels.add_rmsnorm, (x, x, w, 1e-6), 4 * x.nbytes, None
    yield "add_rmsnorm, backward", backward, (), 4 * x.nbytes, None
    q, k, wd, positions = make(T, H, D), make(T, K, D), make(D), torch.arange(T, device="cuda")
    args = q, k, positions, make(D // 2, dtype=f32), wd, wd
    yield "rotary with QK-norm", kernels.rotary, args, 2 * (q.nbytes + k.nbytes), None
    k_cache, v_cache = make(B * M, BLOCK, K, D), make(B * M, BLOCK, K, D)
    args = k, k, k_cache, v_cache, torch.randperm(B * L, device="cuda")[:T]
    yield "store_kv", kernels.store_kv, args, 4 * k.nbytes, None

    tables = torch.randperm(B * M, device="cuda").view(B, M).int()
    lens = torch.full((B,), L, device="cuda", dtype=i32)
    attention = lambda *qkv, **kw: F.scaled_dot_product_attention(*qkv, enable_gqa=True, **kw)
    for n in (8, B):
        args = q[:n], k_cache, v_cache, tables[:n], lens[:n], D**-0.5
        yield f"decode, {n} x {L}", kernels.paged_decode_attention, args, n * L * K * D * 4, None
        keys, values = (c[: n * M].view(n, L, K, D).transpose(1, 2) for c in (k_cache, v_cache))
        args = q[:n, :, None], keys, values
        yield f"  torch, contiguous, {n} x {L}", attention, args, n * L * K * D * 4, None
    args = (q, k_cache, v_cache, torch.arange(0, T + 1, L, device="cuda", dtype=i32), lens[:S],
            tables[:S], D**-0.5)  # fmt: skip
    operations = 2 * S * L * L * H * D  # causal: half of 4 L^2 H D
    yield f"prefill, {S} x {L}", kernels.paged_prefill_attention, args, None, operations
    qkv = [t.view(S, L, -1, D).transpose(1, 2) for t in (q, k, k)]
    causal = lambda: attention(*qkv, is_causal=True)
    yield f"  torch, {S} x {L}", causal, (), None, operations

    logits, ones, keys = make(B, V, dtype=f32), torch.ones(B, device="cuda"), positions[:B]
    yield "sample", kernels.sample, (logits, keys, keys, ones, ones), logits.nbytes, None
    T = 4096
    h, W = make(T, C).requires_grad_(), make(V, C).requires_grad_()
    targets = torch.randint(V, (T, 1), device="cuda")
    ours = lambda: kernels.token_logprobs(h, W, targets[:, 0])[0].sum()
    naive = lambda: (h @ W.T).float().log_softmax(-1).gather(1, targets).sum()
    for name, loss in (("token_logprobs", ours), ("  torch, linear and log_softmax", naive)):
        yield name, loss, (), None, 2 * T * C * V
        step = lambda loss=loss: loss().backward()
        yield f"{name}, with backward", step, (), None, 6 * T * C * V


def print_measured():
    copy, matmul = ceilings()
    print(f"{torch.cuda.get_device_name()}, bfloat16: copy {copy / 1e9:.0f} GB/s, "
          f"matmul {matmul / 1e12:.0f} TFLOP/s")  # fmt: skip
    for model, dims in MODELS.items():
        for name, f, args, num_bytes, operations in measurements(**dims):
            t = seconds(f, *args)
            rate, of = (num_bytes or operations) / t, copy if num_bytes else matmul
            unit = f"{rate / 1e9:8.0f} GB/s" if num_bytes else f"{rate / 1e12:5.0f} TFLOP/s"
            share = f"{rate / of:5.0%} of {'copy' if num_bytes else 'matmul'}"
            print(f"{model:6}{name:46}{t * 1e6:10.0f} us {unit} {share}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--static", action="store_true", help="compile only, read the assembly")
    parser.add_argument("--arch", choices=TARGETS, help="--static: one target only")
    parser.add_argument("--json", action="store_true", help="--static: one object a line")
    args = parser.parse_args()
    if args.static:
        print_static([args.arch] if args.arch else TARGETS, args.json)
    elif torch.cuda.is_available():
        print_measured()
    else:
        raise SystemExit("no GPU here: run with --static, or on a machine with one")


if __name__ == "__main__":
    main()
