"""One case a kernel, each against its definition, on random shapes; run in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/kernels_cases.py quick SEED      a case of every kernel
    TRITON_INTERPRET=1 python tests/kernels_cases.py full SEED       six, in float32 and float16
    TRITON_INTERPRET=1 python tests/kernels_cases.py mutants SEED    every broken kernel must fail
    python tests/kernels_cases.py full SEED                          the same on a GPU, bfloat16 too

A process of its own: the variable counts when triton is imported, and then nothing compiles there.
No bfloat16 in the interpreter: its arithmetic is wrong there. Outputs are poisoned: torch fills
what it allocates with NaN in deterministic mode.
"""

import importlib.util
import itertools
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.runtime.errors import InterpreterError

ROOT = Path(__file__).parents[1]


def close(ours, exact, dtype, what):
    """Compares with the float32 reference of the same (rounded) inputs."""
    tolerance = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(ours, exact):
        a, b = a.float(), b.float()
        assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert torch.isfinite(a).all(), f"{what}: not finite"
        error = ((a - b).abs() / (1 + b.abs())).max().item()
        assert error < tolerance, f"{what}: error {error:.2g}"


def gradients(f, inputs, grads):
    """f's outputs and the gradients of its inputs, for given gradients of the outputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = f(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, inputs, grads)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def case_rmsnorm(kernels, rng, dtype, i):
    T, C = rng.randint(5, 20), (640, 17, 96, 128)[i % 4]
    for add in (False, True):
        x, r, dy, ds = (normal(T, C, dtype=dtype) for _ in range(4))
        w = normal(C, dtype=dtype)

        def definition(x, w, r=None):
            s = x if r is None else (x + r).to(dtype).double()
            y = s * (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
            return y if r is None else (y, s)

        if add:
            f = lambda x, w, r: kernels.add_rmsnorm(x, r, w, 1e-6)
            inputs, grads = (x, w, r), (dy, ds)
        else:
            f = lambda x, w: kernels.rmsnorm(x, w, 1e-6)
            inputs, grads = (x, w), (dy,)
        out, gin = gradients(f, inputs, grads)
        exact, exact_gin = gradients(
            definition, [t.double() for t in inputs], [g.double() for g in grads]
        )
        close(out, exact, dtype, f"rmsnorm forward {T, C, add}")
        close(gin, exact_gin, dtype, f"rmsnorm backward {T, C, add}")


def case_rotary(kernels, rng, dtype, i):
    T, H, K, D = rng.randint(1, 5), rng.choice([5, 16, 40]), rng.choice([1, 8]), (64, 128)[i % 2]
    q, dq = normal(T, H, D, dtype=dtype), normal(T, H, D, dtype=dtype)
    k, dk = normal(T, K, D, dtype=dtype), normal(T, K, D, dtype=dtype)
    wq, wk = normal(D, dtype=dtype), normal(D, dtype=dtype)
    positions = torch.randint(0, 200, (T,))
    inv_freq = 1e4 ** -(torch.arange(D // 2) / (D // 2))

    def definition(q, k, wq=None, wk=None):
        angle = (positions.float()[:, None, None] * inv_freq).double()
        out = []
        for x, w in ((q, wq), (k, wk)):
            if w is not None:
                x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
            z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
            out.append(torch.cat((z.real, z.imag), -1))
        return tuple(out)

    for inputs in ((q, k), (q, k, wq, wk)):
        f = lambda q, k, wq=None, wk=None: kernels.rotary(q, k, positions, inv_freq, wq, wk, 1e-6)
        out, gin = gradients(f, inputs, (dq, dk))
        exact, exact_gin = gradients(
            definition, [t.double() for t in inputs], (dq.double(), dk.double())
        )
        what = f"{T, H, K, D, len(inputs)}"
        close(out, exact, dtype, f"rotary forward {what}")
        close(gin, exact_gin, dtype, f"rotary backward {what}")


def case_store_kv(kernels, rng, dtype, i):
    T, K, D, N, block = rng.randint(3, 9), rng.choice([1, 3, 8]), (64, 128)[i % 2], 5, 16
    k, v = normal(T, K, D, dtype=dtype), normal(T, K, D, dtype=dtype)
    slots = torch.tensor([-1, 0, *rng.sample(range(1, N * block), T - 2)])[torch.randperm(T)]
    caches = [normal(N, block, K, D, dtype=dtype) for _ in range(2)]
    ours, exact = [c.clone() for c in caches], [c.clone() for c in caches]
    kernels.store_kv(k, v, *ours, slots)
    kernels.store_kv_reference(k, v, *exact, slots)
    assert all(map(torch.equal, ours, exact)), f"store_kv {T, K, D}"


def paged(rng, dtype, contexts, i):
    """A cache of scattered blocks, its unused slots holding large finite values."""
    K, G, D, block = (2, 2, 2, 1)[i % 4], (1, 5, 8)[i % 3], (64, 128)[i % 2], (16, 32, 64)[i % 3]
    M = max(1, -(-max(contexts) // block)) + rng.randint(0, 1)
    N = len(contexts) * M + 2
    tables = torch.tensor(rng.sample(range(N), len(contexts) * M)).view(-1, M).int()
    k_cache, v_cache = (normal(N, block, K, D, dtype=dtype) for _ in range(2))
    for table, context in zip(tables, contexts):
        for cache in (k_cache, v_cache):
            slots = cache[table.long()].flatten(0, 1)
            slots[context:] = 500.0
            cache[table.long()] = slots.view(M, block, K, D)
    return k_cache, v_cache, tables, torch.tensor(contexts).int(), K * G, D, D**-0.5


def case_decode(kernels, rng, dtype, i):
    contexts = [0, 1, rng.randint(2, 70), rng.randint(60, 200)]
    rng.shuffle(contexts)
    k_cache, v_cache, tables, lens, H, D, scale = paged(rng, dtype, contexts, i)
    q = normal(len(contexts), H, D, dtype=dtype)
    ours = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, scale)
    exact = kernels.paged_decode_attention_reference(
        q.float(), k_cache.float(), v_cache.float(), tables, lens, scale
    )
    close([ours], [exact], dtype, f"decode {contexts, H, D, k_cache.shape}")


def case_prefill(kernels, rng, dtype, i):
    chunks = [1, 0, rng.randint(2, 40), rng.randint(65, 130)]
    rng.shuffle(chunks)
    contexts = [n + (rng.choice([0, 1, 33]) if n else 0) for n in chunks]
    cu_seqlens = F.pad(torch.tensor(chunks).cumsum(0), (1, 0)).int()
    k_cache, v_cache, tables, lens, H, D, scale = paged(rng, dtype, contexts, i)
    q = normal(sum(chunks) + 1, H, D, dtype=dtype)  # a padded row belongs to no sequence
    args = cu_seqlens, lens, tables, scale
    ours = kernels.paged_prefill_attention(q, k_cache, v_cache, *args)
    exact = kernels.paged_prefill_attention_reference(
        q.float(), k_cache.float(), v_cache.float(), *args
    )
    close([ours], [exact], dtype, f"prefill {chunks, contexts, H, D, k_cache.shape}")


def case_sample(kernels, rng, dtype, i):
    B, V = 6, (2500, 5, 1000)[i % 3]
    logits = 3 * normal(B, V)
    logits[0, rng.randrange(V - 1)] = -torch.inf
    keys, positions = torch.randint(2**62, (B,)), torch.randint(10_000, (B,))
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.0, 1.0, 1.3])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 0.02])
    ours = kernels.sample(logits, keys, positions, temperature, top_p)
    exact = kernels.sample_reference(
        kernels._top_p(logits, temperature, top_p), keys, positions, temperature
    )
    assert torch.equal(ours[0], exact[0]), f"sample {B, V}: {ours[0]} not {exact[0]}"
    close(ours[1:], exact[1:], torch.float32, f"sample {B, V}")


def case_token_logprobs(kernels, rng, dtype, i):
    T, C, V = (70, 1, 5)[i % 3], rng.choice([16, 72, 160]), (500, 300, 33)[i % 3]
    hidden, weight = normal(T, C, dtype=dtype), (normal(V, C) / 4).to(dtype)
    targets, temperature = torch.randint(V, (T,)), rng.choice([1.3, 0.7])
    targets[0] = V - 1
    dl, de = normal(T), normal(T)

    def definition(hidden, weight):
        logp = (hidden @ weight.T / temperature).log_softmax(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    f = lambda hidden, weight: kernels.token_logprobs(hidden, weight, targets, temperature)
    out, gin = gradients(f, (hidden, weight), (dl, de))
    exact, exact_gin = gradients(
        definition, (hidden.double(), weight.double()), (dl.double(), de.double())
    )
    close(out, exact, torch.float32, f"token_logprobs forward {T, C, V}")
    close(gin, exact_gin, dtype, f"token_logprobs backward {T, C, V}")


CASES = {
    "rmsnorm": case_rmsnorm,
    "rotary": case_rotary,
    "store_kv": case_store_kv,
    "decode": case_decode,
    "prefill": case_prefill,
    "sample": case_sample,
    "token_logprobs": case_token_logprobs,
}


# (case, function, one line of it, the broken line): each must make the case fail.
BLOCK_SUM, EXP = "total = total * rescale + ", "1.4426950408889634"
MUTANTS = [
    ("rmsnorm", "rmsnorm_kernel", "h = tl.load(x + at, mask=c < C, other=0.0)",
     "h = tl.load(x + at, mask=c < C, other=1.0)"),
    ("rmsnorm", "rmsnorm_kernel", "tl.sum(h * h) / C + eps", "tl.sum(h * h) / BLOCK + eps"),
    ("rmsnorm", "rmsnorm_kernel", "(h * r * w)", "(h * w)"),
    ("rmsnorm", "rmsnorm_kernel", "+ tl.load(residual", "- tl.load(residual"),
    ("rmsnorm", "rmsnorm_backward_kernel", "dw_sum += g * xhat", "dw_sum = g * xhat"),
    ("rmsnorm", "rmsnorm_backward_kernel", "w * xhat, 1) / C)", "w * xhat, 1))"),
    ("rmsnorm", "rmsnorm_backward_kernel", "g += tl.load(ds", "g = tl.load(ds"),
    ("rmsnorm", "rmsnorm_backward_kernel", "tl.num_programs(0) * ROWS", "tl.num_programs(0)"),
    ("rotary", "rotary_kernel", "b * co + a * si", "b * co - a * si"),
    ("rotary", "rotary_kernel", "/ D + eps", "/ (D // 2) + eps"),
    ("rotary", "rotary_kernel", "tl.load(weight + d + D // 2)", "tl.load(weight + d)"),
    ("rotary", "rotary_kernel", "+ d) * sign", "+ d)"),
    ("store_kv", "store_kv_kernel", "tl.load(v + at", "tl.load(k + at"),
    ("store_kv", "store_kv_kernel", "k_cache + slot * KD + i", "k_cache + slot + i"),
    ("store_kv", "store_kv_kernel", "if slot >= 0", "if slot > 0"),
    ("store_kv", "store_kv_kernel", "k + at, mask=i < KD)", "k + at, mask=i < KD - 1)"),
    ("decode", "paged_attention_kernel", "<= first + token[:, None]", "< first + token[:, None]"),
    ("decode", "paged_attention_kernel", f"(scale * {EXP})", EXP),
    ("decode", "paged_attention_kernel", "acc * rescale[:, None]", "acc"),
    ("decode", "paged_attention_kernel", "kv * (H // K) + r", "kv + r * K"),
    ("decode", "paged_attention_kernel", "top * 0.6931471805599453", "top"),
    ("prefill", "paged_attention_kernel", "tile - start // ROWS - seq", "tile - start // ROWS"),
    ("prefill", "paged_attention_kernel", "group // (H // K)", "group % K"),
    ("prefill", "paged_attention_kernel", "first + tl.minimum(", "tl.minimum("),
    ("prefill", "paged_attention_kernel", "block_tables + seq * M + i", "block_tables + i"),
    ("prefill", "paged_attention_kernel", BLOCK_SUM, "total = total + "),
    ("sample", "sample_kernel", "x - tl.log(", "x + tl.log("),
    ("sample", "sample_kernel", 'mask=v < V, other=float("-inf")', "mask=v < V, other=0.0"),
    ("sample", "sample_kernel", BLOCK_SUM, "total = total + "),
    ("sample", "sample_kernel", "_noise(state, v)", "_noise(state, i)"),
    ("sample", "_noise", "h >> 13", "h >> 12"),
    ("token_logprobs", "token_logprobs_kernel", "mean = mean * rescale + ", "mean = mean + "),
    ("token_logprobs", "token_logprobs_kernel", "v[None, :] < V, x", "v[None, :] <= V, x"),
    ("token_logprobs", "token_logprobs_kernel", "P * BLOCK_V):", "BLOCK_V):"),
    ("token_logprobs", "token_logprobs_kernel", "BLOCK_C) / temperature", "BLOCK_C)"),
    ("token_logprobs", "token_logprobs_backward_kernel", "de * (logp + h)", "de * logp"),
    ("token_logprobs", "token_logprobs_backward_kernel", "(g / temperature)", "g"),
    ("token_logprobs", "token_logprobs_backward_kernel", "first + v[None, :] == target",
     "v[None, :] == target"),
    ("token_logprobs", "token_logprobs_backward_kernel", "first.to(tl.int64) * C",
     "first.to(tl.int64)"),
]  # fmt: skip


def load(source):
    """The module of a source text, from a file: Triton reads it again."""
    path = Path(tempfile.mkdtemp()) / "kernels.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels", path)
    module = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DLOGITS_CHUNK = 1 << 14  # several stretches of the vocabulary
    return module


def run(kernels, name, seed, i, dtype):
    rng = random.Random(f"{name} {seed} {i}")
    torch.manual_seed(seed + i)
    for config in kernels.CONFIGS.values():  # few programs that loop, or many that split
        config["units"] = (1, 64)[i % 2]
    kernels._config.cache_clear()
    CASES[name](kernels, rng, dtype, i)


def caught(source, name, function, line, broken, seed):
    """Does the case fail on the source with one line of one function broken?"""
    start = source.index(f"def {function}(")
    end = source.index("\n\n\n", start)
    body = source[start:end]
    assert body.count(line) == 1, f"{function} has {body.count(line)} times: {line}"
    kernels = load(source[:start] + body.replace(line, broken) + source[end:])
    for i in range(4):
        try:
            run(kernels, name, seed, i, torch.float32)
        except (AssertionError, InterpreterError):
            return True
    return False


def main():
    mode, seed = sys.argv[1], int(sys.argv[2])
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty returns is NaN
    source = (ROOT / "kernels.py").read_text()
    dtypes = [torch.float32, torch.float16]
    if os.environ.get("TRITON_INTERPRET") != "1":
        torch.set_default_device("cuda")
        torch.backends.cuda.matmul.allow_tf32 = False
        dtypes.append(torch.bfloat16)
    if mode == "quick":
        kernels = load(source)
        for name in CASES:
            run(kernels, name, seed, seed % 6, torch.float32)
    elif mode == "full":
        kernels = load(source)
        for name, i, dtype in itertools.product(CASES, range(6), dtypes):
            run(kernels, name, seed, i, dtype)
    elif mode == "mutants":
        survivors = [m for m in MUTANTS if not caught(source, *m, seed)]
        for case, function, line, broken in survivors:
            print(f"survived {case}: {function}: {line} -> {broken}")
        assert not survivors, f"{len(survivors)} of {len(MUTANTS)} mutants survived"
        counts = Counter(function for _, function, _, _ in MUTANTS)
        print(f"{len(MUTANTS)} mutants caught: {dict(counts)}")
    print("all passed")


if __name__ == "__main__":
    main()
