"""One case a kernel, each against its reference, on random shapes; run in Triton's interpreter.

    TRITON_INTERPRET=1 python tests/kernels_cases.py quick SEED      a case of every kernel
    TRITON_INTERPRET=1 python tests/kernels_cases.py full SEED       many shapes, float32 and 16
    TRITON_INTERPRET=1 python tests/kernels_cases.py mutations SEED  broken kernels must fail

A process of its own: the variable counts when triton is imported, and then nothing compiles there.
No bfloat16 here: the interpreter's is wrong. Outputs are poisoned: torch fills what it allocates
with NaN in deterministic mode.
"""

import random
import sys
import tempfile
import traceback
import types
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]


def close(ours, exact, dtype, what):
    """Compares with the float32 reference of the same (rounded) inputs."""
    tolerance = 4e-3 if dtype == torch.float16 else 3e-5
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


def case_rmsnorm(kernels, rng, dtype):
    T, C = rng.randint(1, 9), rng.choice([17, 96, 128, 640])
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


def case_rotary(kernels, rng, dtype):
    T, H, K, D = rng.randint(1, 5), rng.choice([1, 5, 16, 40]), rng.choice([1, 8]), 64
    D = rng.choice([64, 128])
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
        # in 16 bit the gradient is rounded once more between the turn and the norm
        close(gin, exact_gin, dtype, f"rotary backward {what}")


def case_store_kv(kernels, rng, dtype):
    T, K, D, N, block = rng.randint(1, 9), rng.choice([1, 3, 8]), rng.choice([64, 128]), 5, 16
    k, v = normal(T, K, D, dtype=dtype), normal(T, K, D, dtype=dtype)
    slots = torch.tensor(rng.sample(range(N * block), T))
    slots[rng.randrange(T)] = -1
    caches = [normal(N, block, K, D, dtype=dtype) for _ in range(2)]
    ours, exact = [c.clone() for c in caches], [c.clone() for c in caches]
    kernels.store_kv(k, v, *ours, slots)
    kernels.store_kv_reference(k, v, *exact, slots)
    assert all(map(torch.equal, ours, exact)), f"store_kv {T, K, D}"


def paged(rng, dtype, contexts, G):
    """A cache of scattered blocks, its unused slots holding large finite values."""
    K, D, block = rng.choice([1, 2]), rng.choice([64, 128]), rng.choice([16, 32, 64])
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


def case_decode(kernels, rng, dtype):
    contexts = [0, 1, rng.randint(2, 70), rng.randint(60, 200)]
    rng.shuffle(contexts)
    for G in (1, 5, 8):
        k_cache, v_cache, tables, lens, H, D, scale = paged(rng, dtype, contexts, G)
        q = normal(len(contexts), H, D, dtype=dtype)
        ours = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, scale)
        exact = kernels.paged_decode_attention_reference(
            q.float(), k_cache.float(), v_cache.float(), tables, lens, scale
        )
        close([ours], [exact], dtype, f"decode {contexts, G, D, k_cache.shape[1]}")


def case_prefill(kernels, rng, dtype):
    chunks = [1, 0, rng.randint(1, 40), rng.randint(60, 150)]
    rng.shuffle(chunks)
    contexts = [n + (rng.choice([0, 1, 33]) if n else 0) for n in chunks]
    cu_seqlens = F.pad(torch.tensor(chunks).cumsum(0), (1, 0)).int()
    for G in (1, 5, 8):
        k_cache, v_cache, tables, lens, H, D, scale = paged(rng, dtype, contexts, G)
        q = normal(sum(chunks) + 1, H, D, dtype=dtype)  # a padded row belongs to no sequence
        args = cu_seqlens, lens, tables, scale
        ours = kernels.paged_prefill_attention(q, k_cache, v_cache, *args)
        exact = kernels.paged_prefill_attention_reference(
            q.float(), k_cache.float(), v_cache.float(), *args
        )
        close([ours], [exact], dtype, f"prefill {chunks, contexts, G, D, k_cache.shape[1]}")


def case_sample(kernels, rng, dtype):
    B, V = 6, rng.choice([5, 1000, 2500])
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


def case_token_logprobs(kernels, rng, dtype):
    T, C, V = rng.choice([1, 5, 70]), rng.choice([16, 72, 160]), rng.choice([33, 300, 500])
    hidden, weight = normal(T, C, dtype=dtype), (normal(V, C) / 4).to(dtype)
    targets, temperature = torch.randint(V, (T,)), rng.choice([1.0, 0.7])
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


def load(source, name="kernels"):
    """The module of a source text, from a file: the interpreter reads it again."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    module.DLOGITS_CHUNK = 1 << 14  # several stretches of the vocabulary
    return module


def run(kernels, names, seed, dtypes=(torch.float32, torch.float16)):
    for name in names:
        for dtype in dtypes:
            rng = random.Random(f"{name} {seed}")
            torch.manual_seed(seed)
            CASES[name](kernels, rng, dtype)


def main():
    mode, seed = sys.argv[1], int(sys.argv[2])
    print(f"seed {seed}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what torch.empty returns is NaN
    source = (ROOT / "kernels.py").read_text()
    kernels = load(source)
    if mode == "quick":
        run(kernels, CASES, seed, dtypes=(torch.float32,))
    elif mode == "full":
        for i in range(4):
            run(kernels, CASES, seed + i)
    elif mode in CASES:
        run(kernels, [mode], seed)
    print("all passed")


if __name__ == "__main__":
    main()
