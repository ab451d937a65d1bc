"""The references of kernels.py: right by plain definitions, and a row's bits are its own.

The Triton kernels are held to these references in test_kernels_interpreter.py.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import kernels

torch.set_num_threads(1)


def paged_case(seed, lengths, block=16, K=2, D=32, M=None, fill=0.0):
    """Sequences of the given lengths in a cache of scattered blocks -> (caches, tables, k, v)."""
    g = torch.Generator().manual_seed(seed)
    M = M or max(-(-n // block) for n in lengths)
    order = torch.randperm(len(lengths) * M + 3, generator=g)
    tables = order[: len(lengths) * M].view(len(lengths), M)
    k_cache = torch.full((len(order), block, K, D), fill)
    v_cache = k_cache.clone()
    keys = [torch.randn(n, K, D, generator=g) for n in lengths]
    values = [torch.randn(n, K, D, generator=g) for n in lengths]
    for table, k, v in zip(tables, keys, values):
        i = torch.arange(len(k))
        kernels.store_kv(k, v, k_cache, v_cache, table[i // block] * block + i % block)
    return k_cache, v_cache, tables.int(), keys, values


def dense_attention(q, k, v, scale):
    """q (n, H, D) are the last n tokens of k, v (L, K, D); causal; float64 -> (n, H, D)."""
    n, H, _ = q.shape
    L, K, _ = k.shape
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    allowed = torch.arange(L) <= torch.arange(L - n, L)[:, None]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


# ---- right by definition -----------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm_and_its_gradients_equal_autograd_in_float64(residual):
    torch.manual_seed(0)
    x, r, dy, ds = (torch.randn(3, 5, 24) for _ in range(4))
    w = torch.randn(24)

    def definition(x, r, w):
        s = x + r if residual else x
        return s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w, s

    ours = [t.clone().requires_grad_() for t in (x, r, w)]
    exact = [t.double().requires_grad_() for t in (x, r, w)]
    y64, s64 = definition(*exact)
    if residual:
        y, s = kernels.add_rmsnorm(*ours, 1e-6)
        assert torch.equal(s, x + r)
        torch.autograd.backward((y, s), (dy, ds))
        torch.autograd.backward((y64, s64), (dy.double(), ds.double()))
    else:
        y = kernels.rmsnorm(ours[0], ours[2], 1e-6)
        y.backward(dy)
        y64.backward(dy.double())
    torch.testing.assert_close(y.double(), y64, atol=1e-5, rtol=1e-5)
    for a, b in zip(ours, exact):
        if b.grad is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_and_norms_have_the_same_bits_with_and_without_gradients(dtype):
    """Half precision is rounded once, at the end: engine and trainer agree."""
    x, w = torch.randn(9, 4, 16).to(dtype), torch.rand(16).to(dtype)
    inv_freq, both = torch.rand(8), []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            q, k = kernels.rotary(x, x[:, :2], torch.arange(9), inv_freq, w, w, 1e-6)
            both.append((q, k, kernels.rmsnorm(x, w, 1e-6), *kernels.add_rmsnorm(x, x, w, 1e-6)))
    assert all(torch.equal(a, b) for a, b in zip(*both))


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_its_gradients_equal_complex_multiplication_in_float64(normed):
    """Coordinates (x_i, x_{i + D/2}) are one complex number, multiplied by exp(i * angle)."""
    torch.manual_seed(1)
    T, H, K, D = 7, 3, 1, 16
    q, k, dq, dk = (torch.randn(T, n, D) for n in (H, K, H, K))
    wq, wk = torch.randn(D), torch.randn(D)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 900])
    inv_freq = 500.0 ** -(torch.arange(D // 2) / (D // 2))

    def definition(x, w):
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
        angle = (positions.double()[:, None] * inv_freq.double())[:, None]
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    ours = [t.clone().requires_grad_() for t in (q, k, wq, wk)]
    exact = [t.double().requires_grad_() for t in (q, k, wq, wk)]
    weights = ours[2:] if normed else (None, None)
    out = kernels.rotary(*ours[:2], positions, inv_freq, *weights, 1e-6)
    out64 = definition(exact[0], exact[2]), definition(exact[1], exact[3])
    torch.autograd.backward(out, (dq, dk))
    torch.autograd.backward(out64, (dq.double(), dk.double()))
    for a, b in zip(out, out64):
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=1e-4)  # angle 900 in float32
    for a, b in zip(ours, exact):
        if b.grad is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-4, rtol=1e-4)


def test_store_kv_writes_its_slots_and_nothing_else():
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    k_cache, v_cache = torch.full((3, 4, 2, 8), 7.0), torch.full((3, 4, 2, 8), 7.0)
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([5, -1, 0, 11]))
    for cache, x in ((k_cache, k), (v_cache, v)):
        flat = cache.view(12, 2, 8)
        assert torch.equal(flat[[5, 0, 11]], x[[0, 2, 3]])
        assert (flat[[i for i in range(12) if i not in (5, 0, 11)]] == 7).all()


@pytest.mark.parametrize("block", [16, 64])
def test_decode_attention_equals_dense_attention(block):
    lengths = [1, 15, 16, 17, 64, 65, 200]
    k_cache, v_cache, tables, keys, values = paged_case(2, lengths, block)
    q = torch.randn(len(lengths) + 1, 6, 32)
    lens = torch.tensor([*lengths, 0]).int()
    tables = torch.cat((tables, torch.zeros_like(tables[:1])))
    out = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, 0.3)
    assert (out[-1] == 0).all()
    for i in range(len(lengths)):
        exact = dense_attention(q[i : i + 1], keys[i], values[i], 0.3)
        torch.testing.assert_close(out[i : i + 1].double(), exact, atol=1e-5, rtol=1e-5)


def test_prefill_attention_equals_dense_attention():
    lengths, chunks = [70, 1, 33, 130], [70, 1, 5, 100]  # the rest is earlier context
    k_cache, v_cache, tables, keys, values = paged_case(3, lengths)
    cu_seqlens = F.pad(torch.tensor(chunks).cumsum(0), (1, 0)).int()
    q = torch.randn(sum(chunks), 4, 32)
    lens = torch.tensor(lengths).int()
    out = kernels.paged_prefill_attention(q, k_cache, v_cache, cu_seqlens, lens, tables, 0.2)
    for s in range(len(lengths)):
        rows = slice(cu_seqlens[s], cu_seqlens[s + 1])
        exact = dense_attention(q[rows], keys[s], values[s], 0.2)
        torch.testing.assert_close(out[rows].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 22, 64])
def test_token_logprobs_and_gradients_equal_autograd_in_float64(chunk, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_CHUNK", chunk)  # 64: four rows at a time
    torch.manual_seed(4)
    hidden, weight = torch.randn(13, 8), torch.randn(33, 8)
    targets = torch.randint(33, (13,))
    dl, de = torch.randn(13), torch.randn(13)
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    out = kernels.token_logprobs(*ours, targets, 0.7)
    logp = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    out64 = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    for a, b in zip(out, out64):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    torch.autograd.backward(out, (dl, de))
    torch.autograd.backward(out64, (dl.double(), de.double()))
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)


def test_token_logprobs_gradient_of_logprobs_alone():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8)
    targets = torch.randint(9, (6,))
    (ours,) = torch.autograd.grad(kernels.token_logprobs(hidden, weight, targets)[0].sum(), hidden)
    logp = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])
    (theirs,) = torch.autograd.grad(logp.sum(), hidden)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# ---- sampling ----------------------------------------------------------------------------------


def draw(logits, num, temperature=1.0, top_p=1.0, key=5):
    """num draws from one row of logits, at positions 0 .. num - 1 of one sequence."""
    full = lambda x: torch.full((num,), x)
    rows = logits.expand(num, -1).contiguous()
    positions = torch.arange(num)
    return kernels.sample(rows, full(key), positions, full(temperature), full(top_p))


def test_sampling_frequencies_are_the_probabilities():
    """Chi-square over 12 tokens: 95 % of fair samplers are below 19.7; the key is fixed."""
    logits = torch.linspace(-2, 2, 12)
    tokens, logprobs, entropies = draw(logits, 40_000, temperature=0.8)
    p = (logits / 0.8).softmax(-1)
    expected = p * 40_000
    counts = torch.bincount(tokens, minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 19.7
    torch.testing.assert_close(logprobs, p.log()[tokens])
    torch.testing.assert_close(entropies, torch.full((40_000,), -(p * p.log()).sum().item()))


def test_rare_tokens_are_drawn():
    """p = 2^-16 each for 64 rare tokens: one draw in 1,024. Three sigma around 195 of 200,000."""
    logits = torch.full((65,), -16 * math.log(2))
    logits[0] = math.log(1 - 2**-10)
    num_rare = sum((draw(logits, 20_000, key=k)[0] > 0).sum().item() for k in range(10))
    assert abs(num_rare - 195) < 3 * 195**0.5


def test_noise_has_32_bits_near_zero():
    """A token of p = 2^-24 wins by an E that small: 24-bit noise has one value there, or none."""
    small = kernels.noise_reference(torch.arange(64), torch.arange(64), 1 << 18).flatten()
    small = small[small < 2**-18] * 2**24  # 64 of 2^24 are expected
    assert 30 < len(small) < 110 and (small % 1 != 0).sum() > 0.9 * len(small)


def test_noise_is_exponential_and_differs_between_keys_and_positions():
    keys, positions = torch.arange(200).repeat_interleave(2), torch.arange(2).repeat(200)
    e = kernels.noise_reference(keys, positions, 1000)
    assert e.min() > 0 and e.max() < 17 and e.unique().numel() > 0.99 * e.numel()
    assert abs(e.mean() - 1) < 0.01 and abs(e.var() - 1) < 0.02
    rows = e - e.mean(1, keepdim=True)
    correlation = (rows @ rows.T / 1000).fill_diagonal_(0)
    assert correlation.abs().max() < 0.25  # eight sigma of independent rows
    assert kernels.noise_reference(keys[:1], positions[:1], 3).equal(e[:1, :3])


def test_top_p_keeps_the_smallest_set_and_renormalises():
    """p = .5 .3 .15 .05, top_p .7: the first two remain, with 5/8 and 3/8."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    tokens, logprobs, entropies = draw(logits, 500, top_p=0.7)
    assert set(tokens.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs.exp(), torch.where(tokens == 1, 0.625, 0.375))
    h = -(0.625 * math.log(0.625) + 0.375 * math.log(0.375))
    torch.testing.assert_close(entropies, torch.full((500,), h))


def test_greedy_takes_the_maximum_and_reports_temperature_one():
    logits = torch.randn(6, 50)
    zeros, ones = torch.zeros(6), torch.ones(6)
    keys = torch.arange(6)
    tokens, logprobs, _ = kernels.sample(logits, keys, keys, zeros, ones)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


# ---- a row's bits are its own ------------------------------------------------------------------


@pytest.mark.parametrize("C", [8, 31, 128])
def test_rows_of_norm_and_rotary_do_not_depend_on_the_batch(C):
    """The trainer's packed rows, with gradients, equal the engine's, without: bit for bit."""
    torch.manual_seed(5)
    x, r, w = torch.randn(64, C), torch.randn(64, C), torch.randn(C)
    q, k, positions = torch.randn(64, 3, 2 * C), torch.randn(64, 1, 2 * C), torch.arange(64) * 9
    inv_freq, wq = torch.rand(C), torch.randn(2 * C)

    def everything(rows):
        yield kernels.rmsnorm(x[rows], w, 1e-6)
        yield from kernels.add_rmsnorm(x[rows], r[rows], w, 1e-6)
        yield from kernels.rotary(q[rows], k[rows], positions[rows], inv_freq, wq, wq)
        yield from kernels.rotary(q[rows], k[rows], positions[rows], inv_freq)

    w.requires_grad_(), wq.requires_grad_(), x.requires_grad_()
    whole = list(everything(slice(0, 64)))
    assert all(t.requires_grad for t in whole[:5])
    with torch.inference_mode():
        for a, b in [(0, 1), (17, 18), (5, 8), (1, 64), (30, 61)]:
            for part, all_rows in zip(everything(slice(a, b)), whole):
                assert torch.equal(part, all_rows[a:b])


def test_a_sampled_row_does_not_depend_on_the_batch():
    torch.manual_seed(6)
    B, V = 64, 801
    logits, keys = 3 * torch.randn(B, V), torch.randint(2**62, (B,))
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.0]).repeat(16)
    top_p = torch.tensor([1.0, 0.9, 1.0, 1.0]).repeat(16)
    case = logits, keys, torch.arange(B), temperature, top_p
    whole = kernels.sample(*case)
    for a, b in [(0, 1), (1, 2), (2, 3), (3, 10), (11, 64)]:
        for part, all_rows in zip(kernels.sample(*(t[a:b] for t in case)), whole):
            assert torch.equal(part, all_rows[a:b])


def test_a_decode_row_alone_equals_it_among_63_others():
    lengths = torch.randint(1, 300, (64,), generator=torch.Generator().manual_seed(7)).tolist()
    k_cache, v_cache, tables, _, _ = paged_case(7, lengths)
    q, lens = torch.randn(64, 4, 32), torch.tensor(lengths).int()
    whole = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, 0.2)
    for i in range(64):
        row = slice(i, i + 1)
        M = -(-lengths[i] // 16)  # its own table has no column to spare
        alone = kernels.paged_decode_attention(
            q[row], k_cache, v_cache, tables[row, :M], lens[row], 0.2
        )
        assert torch.equal(alone, whole[row])


@pytest.mark.parametrize("borders", [[0, 200], [0, 1, 200], [0, 64, 100, 128, 200], [0, 197, 200]])
def test_prefill_in_any_chunks_equals_decode_token_by_token(borders):
    k_cache, v_cache, tables, _, _ = paged_case(8, [200, 90])
    q = torch.randn(200, 4, 32, generator=torch.Generator().manual_seed(8))
    lens = torch.arange(1, 201).int()
    one_by_one = kernels.paged_decode_attention(
        q, k_cache, v_cache, tables[:1].expand(200, -1), lens, 0.2
    )
    for a, b in zip(borders[:-1], borders[1:]):
        # beside a chunk of another sequence
        cu_seqlens, context_lens = torch.tensor([0, b - a, b - a + 7]), torch.tensor([b, 90])
        chunk = torch.cat((q[a:b], q[:7]))
        out = kernels.paged_prefill_attention(
            chunk, k_cache, v_cache, cu_seqlens.int(), context_lens.int(), tables, 0.2
        )
        assert torch.equal(out[: b - a], one_by_one[a:b])


def test_a_shared_prefix_equals_a_recomputed_one():
    """Two sequences with one 48-token prefix: the second reads the first's blocks, or its own."""
    k_cache, v_cache, tables, keys, values = paged_case(9, [100, 100])
    shared = tables.clone()
    shared[1, :3] = tables[0, :3]
    own_slots = tables[1, torch.arange(48) // 16].long() * 16 + torch.arange(48) % 16
    kernels.store_kv(keys[0][:48], values[0][:48], k_cache, v_cache, own_slots)
    q, lens = torch.randn(2, 4, 32), torch.tensor([100, 100]).int()
    a = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, 0.2)
    b = kernels.paged_decode_attention(q, k_cache, v_cache, shared, lens, 0.2)
    assert torch.equal(a, b)


def test_unused_slots_do_not_change_a_bit():
    lengths = [1, 50, 64, 77]
    q, lens = torch.randn(4, 4, 32), torch.tensor(lengths).int()
    out = []
    for fill in (0.0, 1e4):
        k_cache, v_cache, tables, _, _ = paged_case(10, lengths, fill=fill)
        out.append(kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens, 0.2))
    assert torch.equal(*out)


def test_without_triton_there_are_references():
    program = """
import sys
sys.modules["triton"] = None  # import raises ImportError
import torch, kernels
print(kernels.rmsnorm(torch.ones(2, 4), torch.ones(4), 0.0).sum().item())
"""
    root = Path(__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert out.stdout.strip() == "8.0", out.stderr
