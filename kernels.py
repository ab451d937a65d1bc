"""The kernels: what a decoder needs that stock torch does slowly or with too much memory.

Every operation is a trio, adjacent: `f_reference` (plain torch, the definition), `f_kernel`
(Triton) and `f`, which checks shapes and picks by device: references on a CPU, and everywhere
when triton is missing; kernels on a GPU, or on a CPU in Triton's interpreter.

    rmsnorm, add_rmsnorm       y = x / rms(x) * w, alone or on x + residual; forward and backward
    rotary                     QK-norm and rotary embedding of q and k; forward and backward
    store_kv                   new keys and values into their cache slots
    paged_decode_attention     one query token a sequence against its cached context
    paged_prefill_attention    a chunk of new tokens a sequence against the cache, causal
    sample                     one token a row: exponential race, temperature, top-p
    token_logprobs             log-probability and entropy from hidden states and head weight

Dims: B rows (sequences) of a decode step, T tokens, S sequences of a prefill, C hidden, V
vocabulary, H query heads, K key/value heads, G = H / K, D head dim, N cache blocks, M columns of
a block table, P programs.

One rounding rule: everything is computed in float32 and rounded once, when it is stored.
One reproducibility rule on the CPU: the bits of a row depend on its own sequence alone, not on
the batch, the chunking or the cache. So the reference attention treats each query token as a
row with a key length of its own (its context rounded up to KEY_MULTIPLE), and a matmul over
tokens must have at least 4 rows (with 1 to 3, float32 linear takes another code path).
Not here: attention for training (torch has it, see model.py), matmuls (the vendor's are better).
"""

from __future__ import annotations

import functools
import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else triton 3.9 warns; 3.10 turns it off
try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # references only
    triton, jit = None, lambda f: f

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
KEY_MULTIPLE = 64  # reference attention: key lengths are rounded up to this
GATHER_CHUNK = 4096  # reference decode: keys gathered at a time, to stay in the CPU cache
LOGITS_CHUNK = 1 << 24  # reference token_logprobs: at most this many logits at once (64 MB)
DLOGITS_CHUNK = 1 << 27  # kernel path, backward: at most this many (256 MB in bfloat16)

# Launch options by architecture, chosen from the compiler's report: benchmarks/kernels.py --static
CONFIGS = {
    "gfx942": dict(
        units=304,  # compute units of an MI300X: how far small batches are split
        decode=dict(num_warps=4, num_stages=1),  # 150 VGPRs: 3 waves a SIMD hide the loads
        prefill=dict(ROWS=128, num_warps=8, num_stages=1),  # 240 VGPRs; with 4 warps it spills
        logprobs=dict(BLOCK_T=64, BLOCK_V=128, BLOCK_C=64, num_warps=4, num_stages=2),  # 190 VGPRs
    ),
    "sm_90": dict(
        units=132,
        decode=dict(num_warps=4, num_stages=2),  # cp.async: the next block loads meanwhile
        prefill=dict(ROWS=64, num_warps=4, num_stages=2),  # one warpgroup: wgmma has 64 rows
        logprobs=dict(BLOCK_T=64, BLOCK_V=128, BLOCK_C=64, num_warps=4, num_stages=3),  # 74 KB
    ),
}
# MI350: the same code generator; more stages compile, but use over 65,536 bytes of LDS.
CONFIGS["gfx950"] = {**CONFIGS["gfx942"], "units": 256}


@cache
def _config(kernel: str):
    """Others take their maker's options; the interpreter, which has no driver, those of CUDA."""
    arch = default = "sm_90"
    if not INTERPRET:
        target = triton.runtime.driver.active.get_current_target()
        hip = target.backend == "hip"
        arch, default = (target.arch, "gfx942") if hip else (f"sm_{target.arch}", "sm_90")
    return CONFIGS.get(arch, CONFIGS[default])[kernel]


_on_kernels = lambda x: triton is not None and (x.device.type != "cpu" or INTERPRET)
_row_warps = lambda length: max(1, min(8, length // 512))  # 8 elements (16 bytes) a lane and a load


# ---- RMSNorm -----------------------------------------------------------------------------------

def rmsnorm_reference(x, residual, weight, eps):
    """s = x + residual, rstd = 1 / sqrt(mean(s^2) + eps), y = s rstd w -> y, s, rstd (..., 1)."""
    s = x if residual is None else x + residual
    s32 = s.float()
    rstd = torch.rsqrt(s32.square().mean(-1, keepdim=True) + eps)
    return (s32 * rstd * weight.float()).to(x.dtype), s, rstd


def rmsnorm_backward_reference(dy, ds, s, weight, rstd):
    """xhat = s rstd;  dw = sum dy xhat;  dx = ds + rstd (dy w - xhat mean(dy w xhat))."""
    xhat, dy, w = s.float() * rstd, dy.float(), weight.float()
    dw = dy * xhat
    dot = (dw @ w).div_(s.shape[-1]).unsqueeze(-1)
    dx = torch.addcmul(dy * w, xhat, dot, value=-1).mul_(rstd)
    dx = dx if ds is None else dx.add_(ds)
    return dx.to(s.dtype), dw.flatten(0, -2).sum(0).to(weight.dtype)


@jit
def rmsnorm_kernel(x, residual, weight, y, s, rstd, eps,
                   C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """A program owns a row: read once, kept in registers, written once."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    at = row.to(tl.int64) * C + c
    h = tl.load(x + at, mask=c < C, other=0.0)
    if ADD:
        h = (h.to(tl.float32) + tl.load(residual + at, mask=c < C, other=0.0)).to(h.dtype)
        tl.store(s + at, h, mask=c < C)
    h = h.to(tl.float32)
    r = tl.rsqrt(tl.sum(h * h) / C + eps)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(y + at, (h * r * w).to(y.dtype.element_ty), mask=c < C)
    tl.store(rstd + row, r)


@jit
def rmsnorm_backward_kernel(dy, ds, s, weight, rstd, dx, dw, T, C: tl.constexpr,
                            ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """P programs: each owns every P-th tile of ROWS rows, and a row of dw (P, C); torch sums."""
    c = tl.arange(0, BLOCK)[None, :]
    r = tl.arange(0, ROWS)[:, None]
    w = tl.load(weight + c + r * 0, mask=c < C, other=0.0).to(tl.float32)
    dw_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        row = start + r
        mask, at = (row < T) & (c < C), row.to(tl.int64) * C + c
        rs = tl.load(rstd + row, mask=row < T, other=0.0)
        xhat = tl.load(s + at, mask=mask, other=0.0).to(tl.float32) * rs
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        dw_sum += g * xhat
        g = (g * w - xhat * (tl.sum(g * w * xhat, 1) / C)[:, None]) * rs
        if ADD:
            g += tl.load(ds + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=mask)
    tl.store(dw + tl.program_id(0) * C + c, tl.sum(dw_sum, 0)[None, :], mask=c < C)


def _rmsnorm_backward(dy, ds, s, weight, rstd):
    if not _on_kernels(s):
        return rmsnorm_backward_reference(dy, ds, s, weight, rstd)
    dy, T, C = dy.contiguous(), rstd.numel(), s.shape[-1]
    BLOCK = triton.next_power_of_2(C)
    ROWS = max(1, 1024 // BLOCK)  # short rows (QK-norm) go several at a time
    P = min(triton.cdiv(T, ROWS), 2 * _config("units"))
    dx, dw = torch.empty_like(s), s.new_empty(P, C, dtype=torch.float32)
    rmsnorm_backward_kernel[(P,)](
        dy, dy if ds is None else ds.contiguous(), s, weight, rstd, dx, dw, T,
        C=C, ROWS=ROWS, BLOCK=BLOCK, ADD=ds is not None, num_warps=_row_warps(ROWS * BLOCK))
    return dx, dw.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        add = residual is not None
        if _on_kernels(x):
            x, BLOCK = x.contiguous(), triton.next_power_of_2(x.shape[-1])
            y, s = torch.empty_like(x), torch.empty_like(x) if add else x
            rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
            rmsnorm_kernel[(rstd.numel(),)](
                x, residual.contiguous() if add else x, weight, y, s, rstd, eps,
                C=x.shape[-1], BLOCK=BLOCK, ADD=add, num_warps=_row_warps(BLOCK))
        else:
            y, s, rstd = rmsnorm_reference(x, residual, weight, eps)
        ctx.save_for_backward(s, weight, rstd)
        return (y, s) if add else y

    @staticmethod
    def backward(ctx, dy, ds=None):
        dx, dw = _rmsnorm_backward(dy, ds, *ctx.saved_tensors)
        return dx, None if ds is None else dx, dw, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., C), weight (C,) -> (..., C)."""
    if not (torch.is_grad_enabled() or _on_kernels(x)):
        return F.rms_norm(x, weight.shape, weight, eps)  # the reference's bits, in one call
    return _RMSNorm.apply(x, None, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual (..., C) -> (rmsnorm(x + residual), x + residual)."""
    assert x.shape == residual.shape, f"x {tuple(x.shape)}, residual {tuple(residual.shape)}"
    if not (torch.is_grad_enabled() or _on_kernels(x)):
        return rmsnorm(s := x + residual, weight, eps), s
    return _RMSNorm.apply(x, residual, weight, eps)


# ---- rotary ------------------------------------------------------------------------------------

def rotary_reference(x, cos, sin, weight, eps):
    """The halves of D are the coordinates of D/2 planes, each turned by its angle: x (T, H, D),
    cos = (c, c), sin = (-s, s) (T, 1, D); RMS-normed over D first if there is a weight
    -> y, rstd (T, H, 1)."""
    h, rstd = x.float(), None
    if weight is not None:
        h, _, rstd = rmsnorm_reference(h, None, weight, eps)
    return torch.addcmul(h * cos, h.roll(x.shape[-1] // 2, -1), sin).to(x.dtype), rstd


@jit
def rotary_kernel(x, cos, sin, weight, y, rstd, eps, sign, H: tl.constexpr, D: tl.constexpr,
                  HEADS: tl.constexpr, NORM: tl.constexpr):
    """A program owns HEADS heads of a token: two half rows each, read and written once."""
    t = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < H)[:, None]
    d = tl.arange(0, D // 2)[None, :] + head[:, None] * 0  # the full shape: 16 bytes a load
    at = (t.to(tl.int64) * H + head[:, None]) * D + d  # first half; the second is D/2 further
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        tl.store(rstd + t * H + head, r, mask=head < H)
        a *= r[:, None] * tl.load(weight + d).to(tl.float32)
        b *= r[:, None] * tl.load(weight + d + D // 2).to(tl.float32)
    co, si = tl.load(cos + t * D + d), tl.load(sin + t * D + D // 2 + d) * sign
    tl.store(y + at, (a * co - b * si).to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + D // 2, (b * co + a * si).to(y.dtype.element_ty), mask=inside)


def _rotary(x, cos, sin, weight, eps, sign=1.0):
    if not _on_kernels(x):
        return rotary_reference(x, cos, sin if sign == 1.0 else -sin, weight, eps)
    x, (T, H, D), HEADS = x.contiguous(), x.shape, 8  # 8 half rows: 16 bytes a lane of one wave
    y, rstd = torch.empty_like(x), x.new_empty(T, H, 1, dtype=torch.float32)
    rotary_kernel[(T, triton.cdiv(H, HEADS))](
        x, cos, sin, x if weight is None else weight, y, rstd, eps, sign,
        H=H, D=D, HEADS=HEADS, NORM=weight is not None, num_warps=1)
    return y, rstd


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, weight, eps):
        y, rstd = _rotary(x, cos, sin, weight, eps)
        ctx.save_for_backward(x if weight is not None else None, cos, sin, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, cos, sin, weight, rstd = ctx.saved_tensors
        turn_back = lambda dy: _rotary(dy, cos, sin, None, 0.0, sign=-1.0)[0]
        if weight is None:
            return turn_back(dy), None, None, None, None
        dx, dw = _rmsnorm_backward(turn_back(dy.float()), None, x.contiguous(), weight, rstd)
        return dx, None, None, dw, None


@functools.lru_cache(maxsize=1)  # tensors compare by identity: all layers ask for the same
def _cos_sin(positions, inv_freq):
    with torch.inference_mode(False):  # the engine may ask first, and training after it
        angle = positions.float()[:, None, None] * inv_freq  # (T, 1, D/2)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # (T, 1, D)


def rotary(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, q_weight: Tensor = None,
           k_weight: Tensor = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """q (T, H, D), k (T, K, D), positions (T,), inv_freq (D/2,) -> q and k turned.

    With q_weight and k_weight (D,) they are RMS-normed over D first (Qwen3's QK-norm). Sines come
    from torch: in a kernel their range reduction is 1,300 instructions and, on CUDA, a stack."""
    (T, _, D), (Tk, _, Dk) = q.shape, k.shape
    assert (T, D) == (Tk, Dk) == (len(positions), 2 * len(inv_freq)), (q.shape, k.shape)
    cos, sin = _cos_sin(positions, inv_freq)
    if not torch.is_grad_enabled():
        if q_weight is not None and q.dtype == torch.float32 and not _on_kernels(q):
            q, k = rmsnorm(q, q_weight, eps), rmsnorm(k, k_weight, eps)
            q_weight = k_weight = None
        return tuple(_rotary(x, cos, sin, w, eps)[0] for x, w in ((q, q_weight), (k, k_weight)))
    q = _Rotary.apply(q, cos, sin, q_weight, eps)
    return q, _Rotary.apply(k, cos, sin, k_weight, eps)


# ---- KV store ----------------------------------------------------------------------------------

def store_kv_reference(k, v, k_cache, v_cache, slot_mapping):
    if (slot_mapping < 0).any():
        stored = slot_mapping >= 0
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


@jit
def store_kv_kernel(k, v, k_cache, v_cache, slot_mapping, KD: tl.constexpr, BLOCK: tl.constexpr):
    """A program owns a token: copies its K * D keys and values to a slot."""
    t, i = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + t)
    at = t.to(tl.int64) * KD + i
    if slot >= 0:
        tl.store(k_cache + slot * KD + i, tl.load(k + at, mask=i < KD), mask=i < KD)
        tl.store(v_cache + slot * KD + i, tl.load(v + at, mask=i < KD), mask=i < KD)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v (T, K, D) into k_cache, v_cache (N, block, K, D) at slot = block id * block + offset.

    slot_mapping (T,) int64; -1 stores nothing (a padded row). Zero the caches when they are made:
    attention reads the unused slots of a block, and 0 * NaN would poison a row."""
    assert k.shape == v.shape and k.shape[1:] == k_cache.shape[2:], (k.shape, k_cache.shape)
    assert slot_mapping.shape == k.shape[:1] and k_cache.is_contiguous() and v_cache.is_contiguous()
    if not _on_kernels(k):
        return store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
    KD = k.shape[1] * k.shape[2]
    store_kv_kernel[(len(k),)](k.contiguous(), v.contiguous(), k_cache, v_cache, slot_mapping,
                               KD=KD, BLOCK=triton.next_power_of_2(KD), num_warps=_row_warps(KD))


# ---- paged attention ---------------------------------------------------------------------------

def _gather(cache, blocks, key_len):
    """cache (N, block, K, D), blocks (B, key_len / block, rounded up) -> (B, K, key_len, D)."""
    rows = cache.flatten(1).index_select(0, blocks.flatten())
    return rows.view(len(blocks), -1, *cache.shape[2:])[:, :key_len].transpose(1, 2)


def _blocks_and_mask(block_tables, context_lens, key_len, block):
    """block_tables (B, M), context_lens (n,) -> blocks of the keys, past a table its last again;
    mask (n, 1, 1, key_len): -inf outside of the context."""
    columns = torch.arange(-(-key_len // block), device=block_tables.device)
    blocks = block_tables[:, columns.clamp_(max=block_tables.shape[1] - 1)].clamp_(min=0)
    outside = torch.arange(key_len, device=blocks.device) >= context_lens[:, None, None, None]
    mask = torch.zeros(outside.shape, device=blocks.device).masked_fill_(outside, -torch.inf)
    return blocks, mask


def _attend_stretches(q, k_cache, v_cache, stretches, scale):
    """q (B, H, D), stretches [(n rows, blocks of each or one for all, mask)] -> (B, H, D), 0 in no
    stretch. A row is a batch entry with G queries a KV head: no bit of it depends on others."""
    (B, H, D), K, out = q.shape, k_cache.shape[2], torch.zeros_like(q)
    q, grouped = q.reshape(B, K, H // K, D), out.view(B, K, H // K, D)
    for rows, blocks, mask in stretches:
        n, key_len = len(mask), mask.shape[-1]
        k, v = (_gather(x, blocks, key_len).expand(n, -1, -1, -1) for x in (k_cache, v_cache))
        grouped[rows] = F.scaled_dot_product_attention(q[rows], k, v, mask.to(q.dtype), scale=scale)
    return out


@functools.lru_cache(maxsize=1)  # tensors compare by identity: one step's layers share the work
def _decode_stretches(block_tables, context_lens, block):
    """-> rows by length (B,), the way back (B,), [(a stretch of these, their blocks, mask)] where
    all have one rounded key length. Subtle: a step brings new tensors; one changed in place would
    not be noticed."""
    lens = (context_lens + KEY_MULTIPLE - 1) // KEY_MULTIPLE * KEY_MULTIPLE
    lens, order = lens.sort(stable=True)
    block_tables, context_lens, stretches, end = block_tables[order], context_lens[order], [], 0
    for key_len, count in zip(*(x.tolist() for x in lens.unique_consecutive(return_counts=True))):
        start, end, most = end, end + count, max(1, GATHER_CHUNK // max(key_len, 1))
        for at in range(start, end, most) if key_len else ():
            rows = slice(at, min(at + most, end))
            where = _blocks_and_mask(block_tables[rows], context_lens[rows], key_len, block)
            stretches.append((rows, *where))
    return order, order.argsort(), stretches


def _prefill_stretches(cu_seqlens, context_lens, block_tables, block):
    """Yields (query tokens of a sequence with one rounded key length, its blocks, mask), one at a
    time: all masks of a long context would be large."""
    starts = cu_seqlens.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        while start < end:
            first = context_len - (end - start)  # tokens of the context before this stretch
            key_len = (first // KEY_MULTIPLE + 1) * KEY_MULTIPLE
            n = min(key_len - first, end - start)
            lens = torch.arange(first + 1, first + n + 1, device=block_tables.device)
            where = _blocks_and_mask(block_tables[s : s + 1], lens, key_len, block)
            yield slice(start, start + n), *where
            start += n


def paged_decode_attention_reference(q, k_cache, v_cache, block_tables, context_lens, scale):
    """softmax(scale q K^T) V over the context."""
    order, back, stretches = _decode_stretches(block_tables, context_lens, k_cache.shape[1])
    q = q.index_select(0, order)
    return _attend_stretches(q, k_cache, v_cache, stretches, scale).index_select(0, back)


def paged_prefill_attention_reference(q, k_cache, v_cache, cu_seqlens, context_lens, block_tables,
                                      scale):
    """Each query token is a decode row of its own context; rows of a sequence share its keys."""
    stretches = _prefill_stretches(cu_seqlens, context_lens, block_tables, k_cache.shape[1])
    return _attend_stretches(q, k_cache, v_cache, stretches, scale)


@jit
def paged_attention_kernel(q, k_cache, v_cache, cu_seqlens, context_lens, block_tables, out, lse,
                           scale, M, S, splits, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
                           BLOCK: tl.constexpr, ROWS: tl.constexpr, DECODE: tl.constexpr):
    """Online softmax over the cache blocks of one sequence; a tile of keys is a block.

    Decode: a program owns the G queries of one KV head of a sequence (padded to ROWS) and one of
    `splits` stretches of its context, so each key and value is read once. It writes its part to
    out (B, splits, H, D) and the log of its softmax sum to lse.
    Prefill: a program owns ROWS query tokens of one head. Tiles are numbered without asking the
    device for lengths: sequence s starts at tile cu_seqlens[s] // ROWS + s, a few stay empty."""
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d, j = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    if DECODE:
        seq, start, length, kv, token = tile, tile, 1, group, r * 0
        head = kv * (H // K) + r
        inside = r < H // K
        num_keys = tl.load(context_lens + seq)
        first = num_keys - 1
    else:
        seq, end = tile * 0, S
        while end - seq > 1:  # binary search for the last sequence that starts before this tile
            mid = (seq + end) // 2
            before = tl.load(cu_seqlens + mid) // ROWS + mid <= tile
            seq, end = tl.where(before, mid, seq), tl.where(before, end, mid)
        start = tl.load(cu_seqlens + seq)
        length = tl.load(cu_seqlens + seq + 1) - start
        row0 = (tile - start // ROWS - seq) * ROWS
        token, head, kv = row0 + r, group + r * 0, group // (H // K)
        inside = token < length
        first = tl.load(context_lens + seq) - length  # context before this chunk
        num_keys = tl.where(row0 < length, first + tl.minimum(row0 + ROWS, length), 0)
    blocks = tl.cdiv(tl.cdiv(num_keys, BLOCK), splits)  # of a split
    query = tl.load(q + ((start + token) * H + head)[:, None] * D + d[None, :],
                    mask=inside[:, None], other=0.0)
    top, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for i in range(split * blocks, tl.minimum((split + 1) * blocks, tl.cdiv(num_keys, BLOCK))):
        at = (tl.load(block_tables + seq * M + i).to(tl.int64) * BLOCK * K + kv) * D
        keys = tl.load(k_cache + at + j[None, :] * (K * D) + d[:, None])  # (D, BLOCK)
        x = tl.dot(query, keys) * (scale * 1.4426950408889634)  # log2(e): exp2 is one instruction
        x = tl.where(i * BLOCK + j[None, :] <= first + token[:, None], x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        p = tl.exp2(x - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(v_cache + at + j[:, None] * (K * D) + d[None, :])  # (BLOCK, D)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = new_top
    at = ((start + token) * splits + split) * H + head
    full, total = total > 0, tl.where(total > 0, total, 1.0)  # no key at all: zeros
    y = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + d[None, :], y, mask=inside[:, None])
    if DECODE:
        log_sum = tl.where(full, top * 0.6931471805599453 + tl.log(total), -1e30)
        tl.store(lse + at, log_sum, mask=inside)


def paged_decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor,
                           context_lens: Tensor, scale: float) -> Tensor:
    """q (B, H, D), caches (N, block, K, D), block_tables (B, M) int32, context_lens (B,) int32
    -> (B, H, D). The context includes the query's own token; a row with context 0 gives zeros."""
    (B, H, D), (_, block, K, _), M = q.shape, k_cache.shape, block_tables.shape[1]
    assert H % K == 0 and k_cache.shape == v_cache.shape, (q.shape, k_cache.shape, v_cache.shape)
    assert len(block_tables) == len(context_lens) == B, (q.shape, block_tables.shape)
    if not _on_kernels(q):
        return paged_decode_attention_reference(q, k_cache, v_cache, block_tables, context_lens,
                                                scale)
    splits = min(triton.cdiv(4 * _config("units"), B * K), M, 16)  # few rows: split their contexts
    parts = q.new_empty(B, splits, H, D, dtype=torch.float32)
    lse = q.new_empty(B, splits, H, 1, dtype=torch.float32)
    paged_attention_kernel[(B, K, splits)](
        q.contiguous(), k_cache, v_cache, context_lens, context_lens, block_tables.contiguous(),
        parts, lse, scale, M, B, splits, H=H, K=K, D=D, BLOCK=block, DECODE=True,
        ROWS=max(16, triton.next_power_of_2(H // K)), **_config("decode"))
    return (parts * lse.softmax(1)).sum(1).to(q.dtype)  # parts weigh by their softmax sums


def paged_prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens: Tensor,
                            context_lens: Tensor, block_tables: Tensor, scale: float) -> Tensor:
    """q (T, H, D): tokens cu_seqlens[s] : cu_seqlens[s + 1] (S + 1,) int32 are the last ones of
    sequence s, whose context_lens[s] (S,) int32 counts them too -> (T, H, D)."""
    (T, H, D), (_, block, K, _), (S, M) = q.shape, k_cache.shape, block_tables.shape
    assert H % K == 0 and k_cache.shape == v_cache.shape, (q.shape, k_cache.shape, v_cache.shape)
    assert len(cu_seqlens) - 1 == len(context_lens) == S, (cu_seqlens.shape, block_tables.shape)
    if not _on_kernels(q):
        return paged_prefill_attention_reference(q, k_cache, v_cache, cu_seqlens, context_lens,
                                                 block_tables, scale)
    out, config = torch.zeros_like(q), _config("prefill")
    paged_attention_kernel[(T // config["ROWS"] + S, H, 1)](
        q.contiguous(), k_cache, v_cache, cu_seqlens, context_lens, block_tables.contiguous(),
        out, out, scale, M, S, 1, H=H, K=K, D=D, BLOCK=block, DECODE=False, **config)
    return out


# ---- sampling ----------------------------------------------------------------------------------

def _mix64(x):
    """splitmix64's finaliser on int64 (products wrap; right shifts made logical by a mask)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def noise_reference(keys, positions, vocab_size):
    """Counter-based noise: keys, positions (B,) int64 -> E (B, V) ~ Exponential(1).

    64 bits of state a row, 32 bits a token: u in (0, 1) reaches 1e-10, so that rare tokens can be
    drawn (24 bits cannot), and E = -log1p(-u) keeps small u exact. E is 16.6 at most."""
    state = _mix64(_mix64(keys) + positions)[:, None]
    h = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * -0x61C88647
    h = h + state.to(torch.int32)
    h ^= h >> 16 & 0xFFFF
    h *= -0x7A143595
    h ^= (state >> 32).to(torch.int32)
    h ^= h >> 13 & 0x7FFFF
    h *= -0x3D4D51CB
    h ^= h >> 16 & 0xFFFF
    u = h.float()  # as unsigned: the sign bit is worth 2^32
    u = torch.where(h < 0, u + 2.0**32, u).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_()


def _top_p(logits, temperature, top_p):
    """-inf outside the smallest set of likeliest tokens with mass top_p; border ties stay."""
    ordered, _ = logits.sort(-1, descending=True)
    p = (ordered / torch.where(temperature == 0, 1.0, temperature)[:, None]).softmax(-1)
    outside = p.cumsum(-1) - p >= top_p.clamp(min=1e-9)[:, None]  # likelier ones have that mass
    border = ordered.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill((logits < border) & (top_p < 1)[:, None], -torch.inf)


def sample_reference(logits, keys, positions, temperature):
    """argmin E / p, as argmax log p - log E: token v wins with probability p_v exactly."""
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    score = logits
    if not greedy.all():
        score = logprobs - noise_reference(keys, positions, logits.shape[-1]).log_()
        score = torch.where(greedy[:, None], logits, score)
    tokens = score.argmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)  # 0 log 0 = 0
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropies


@jit
def _noise(state, token):
    """The same bits as noise_reference; log1p(-u) by Kahan's log(1 - u) * u / (1 - (1 - u))."""
    h = token.to(tl.uint32) * 0x9E3779B9 + state.to(tl.uint32)
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= (state >> 32).to(tl.uint32)
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    y = 1.0 - u
    return tl.where(y == 1.0, u, -tl.log(y) * (u / (1.0 - y)))


@jit
def sample_kernel(logits, states, temperature, tokens, logprobs, entropies, V, BLOCK: tl.constexpr):
    """A program owns a row and reads it once: race, softmax sum and mean logit run side by side in
    every lane, and are reduced at the end."""
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    t, state = tl.load(temperature + b), tl.load(states + b)
    greedy = t == 0
    t = tl.where(greedy, 1.0, t)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    best, logit = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    winner = tl.zeros((BLOCK,), tl.int32) + V
    for start in range(0, V, BLOCK):
        v = start + i
        x = tl.load(logits + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf")) / t
        new_top = tl.maximum(top, x)
        rescale, p = tl.exp(top - new_top), tl.exp(x - new_top)
        total = total * rescale + p
        mean = mean * rescale + p * tl.maximum(x, -1e30)  # 0 log 0 = 0
        top = new_top
        score = tl.where(greedy, x, x - tl.log(_noise(state, v)))
        better = score > best
        best = tl.where(better, score, best)
        logit, winner = tl.where(better, x, logit), tl.where(better, v, winner)
    token = tl.min(tl.where(best == tl.max(best), winner, V))
    share = tl.exp(top - tl.max(top))
    total = tl.sum(total * share, 0)
    lse = tl.max(top) + tl.log(total)
    tl.store(tokens + b, token)
    tl.store(logprobs + b, tl.max(tl.where(winner == token, logit, float("-inf"))) - lse)
    tl.store(entropies + b, lse - tl.sum(mean * share) / total)  # H = lse - sum p x


def sample(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor,
           top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits (B, V), temperature (0: greedy), top_p (B,) float32; keys, positions (B,) int64
    -> tokens (B,) int64, logprobs (B,), entropies (B,).

    The noise is a function of (key, position, token): a sequence draws the same tokens in any
    batch. logprobs and entropies are of the distribution that was sampled from: after temperature
    and top-p (greedy: of temperature 1). top_p < 1 is for evaluation: it costs a sort."""
    B, V = logits.shape
    assert logits.dtype == torch.float32, f"logits must be float32, got {logits.dtype}"
    assert keys.shape == positions.shape == temperature.shape == top_p.shape == (B,)
    if (top_p < 1).any():
        logits = _top_p(logits, temperature, top_p)
    if not _on_kernels(logits):
        return sample_reference(logits, keys, positions, temperature)
    tokens, logprobs, entropies = torch.empty_like(keys), *logits.new_empty(2, B)
    sample_kernel[(B,)](logits.contiguous(), _mix64(_mix64(keys) + positions), temperature, tokens,
                        logprobs, entropies, V, BLOCK=1024, num_warps=4)
    return tokens, logprobs, entropies


# ---- token log-probabilities -------------------------------------------------------------------

def _logprobs_chunk(hidden, weight, targets, temperature):
    logp = (hidden.float() @ weight.T).div_(temperature).log_softmax(-1)  # (chunk, V)
    wanted = logp.gather(-1, targets[:, None]).squeeze(-1)
    return wanted, -(logp.exp() * logp).sum(-1)


def token_logprobs_reference(hidden, weight, targets, temperature):
    """log p[target] and -sum p log p of p = softmax(h W^T / temperature) -> two of (T,) float32.
    Rows go in even chunks of 4 or more, whose logits are computed again in the backward."""
    T, weight = len(hidden), weight.float()
    num = min(-(-T * len(weight) // LOGITS_CHUNK), T // 4)
    if num <= 1:  # a single chunk's logits may stay until the backward
        return _logprobs_chunk(hidden, weight, targets, temperature)
    chunks = zip(hidden.tensor_split(num), targets.tensor_split(num))
    parts = [checkpoint(_logprobs_chunk, h, weight, t, temperature, use_reentrant=False,
                        preserve_rng_state=False) for h, t in chunks]
    return tuple(map(torch.cat, zip(*parts)))


@jit
def _logits_tile(hidden, weight, row, col, T, V, C, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
                 BLOCK_C: tl.constexpr):
    """hidden[row] @ weight[col]^T in float32 -> (BLOCK_T, BLOCK_V)."""
    c = tl.arange(0, BLOCK_C)
    x = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    at_h, at_w = row[:, None] * C + c[None, :], col[None, :] * C + c[:, None]
    for start in range(0, C, BLOCK_C):
        mask_c = start + c < C
        mask_h = (row < T)[:, None] & mask_c[None, :]
        mask_w = (col < V)[None, :] & mask_c[:, None]
        h = tl.load(hidden + start + at_h, mask=mask_h, other=0.0)
        w = tl.load(weight + start + at_w, mask=mask_w, other=0.0)
        x = tl.dot(h, w, x)
    return x


@jit
def token_logprobs_kernel(hidden, weight, targets, parts, temperature, T, V, C,
                          BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program owns BLOCK_T rows and every P-th tile of the vocabulary; logits stay in registers.

    Writes to parts (4, P, T), for its share of the vocabulary: the target's logit or 0, the
    maximum m, the sum of exp(x - m) and of exp(x - m) x."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, P = tl.program_id(1), tl.num_programs(1)
    target = tl.load(targets + row, mask=row < T, other=-1)
    wanted = tl.zeros((BLOCK_T,), tl.float32)
    top = tl.full((BLOCK_T,), -1e30, tl.float32)
    total, mean = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    for start in range(part * BLOCK_V, V, P * BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = _logits_tile(hidden, weight, row, v, T, V, C, BLOCK_T, BLOCK_V, BLOCK_C) / temperature
        wanted += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        x = tl.where(v[None, :] < V, x, -1e30)
        new_top = tl.maximum(top, tl.max(x, 1))
        p, rescale = tl.exp(x - new_top[:, None]), tl.exp(top - new_top)
        total = total * rescale + tl.sum(p, 1)
        mean = mean * rescale + tl.sum(p * x, 1)
        top = new_top
    at = part * T + row
    tl.store(parts + at, wanted, mask=row < T)
    tl.store(parts + P * T + at, top, mask=row < T)
    tl.store(parts + 2 * P * T + at, total, mask=row < T)
    tl.store(parts + 3 * P * T + at, mean, mask=row < T)


@jit
def token_logprobs_backward_kernel(dlogprobs, dentropies, hidden, weight, targets, entropies, lse,
                                   dx, temperature, first, last, T, C, BLOCK_T: tl.constexpr,
                                   BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program owns a tile of dx (T, last - first), the gradient of the logits of one stretch of
    the vocabulary; torch multiplies it with hidden and weight and it is overwritten by the next."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    weight += first.to(tl.int64) * C
    x = _logits_tile(hidden, weight, row, v, T, last - first, C, BLOCK_T, BLOCK_V, BLOCK_C)
    dl = tl.load(dlogprobs + row, mask=row < T, other=0.0)[:, None]
    de = tl.load(dentropies + row, mask=row < T, other=0.0)[:, None]
    h = tl.load(entropies + row, mask=row < T, other=0.0)[:, None]
    target = tl.load(targets + row, mask=row < T, other=-1)[:, None]
    logp = x / temperature - tl.load(lse + row, mask=row < T, other=0.0)[:, None]
    g = tl.where(first + v[None, :] == target, dl, 0.0) - tl.exp(logp) * (dl + de * (logp + h))
    at = row.to(tl.int64)[:, None] * (last - first) + v[None, :]
    mask = (row < T)[:, None] & (v < last - first)[None, :]
    tl.store(dx + at, (g / temperature).to(dx.dtype.element_ty), mask=mask)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        hidden, weight, config = hidden.contiguous(), weight.contiguous(), _config("logprobs")
        (T, C), V, tiles = hidden.shape, len(weight), triton.cdiv(len(hidden), config["BLOCK_T"])
        P = min(triton.cdiv(2 * _config("units"), tiles), triton.cdiv(V, config["BLOCK_V"]))
        parts = hidden.new_empty(4, P, T, dtype=torch.float32)
        token_logprobs_kernel[(tiles, P)](hidden, weight, targets, parts, temperature, T, V, C,
                                          **config)
        wanted, tops, totals, means = parts
        share = (tops - tops.amax(0)).exp()  # (P, T)
        total = (totals * share).sum(0)
        lse = tops.amax(0) + total.log()
        entropies = lse - (means * share).sum(0) / total  # H = lse - sum p x
        ctx.save_for_backward(hidden, weight, targets, entropies, lse)
        ctx.temperature = temperature
        return wanted.sum(0) - lse, entropies

    @staticmethod
    def backward(ctx, dlogprobs, dentropies):
        """The gradient of the logits exists for DLOGITS_CHUNK / T columns at a time."""
        hidden, weight, targets, entropies, lse = ctx.saved_tensors
        (T, C), V, config = hidden.shape, len(weight), _config("logprobs")
        width = max(DLOGITS_CHUNK // T // 256, 1) * 256
        dhidden = hidden.new_zeros(T, C, dtype=torch.float32)
        dweight = torch.empty_like(weight)
        for first in range(0, V, width):
            last = min(first + width, V)
            dx = hidden.new_empty(T, last - first)
            grid = triton.cdiv(T, config["BLOCK_T"]), triton.cdiv(last - first, config["BLOCK_V"])
            token_logprobs_backward_kernel[grid](
                dlogprobs.contiguous(), dentropies.contiguous(), hidden, weight, targets,
                entropies, lse, dx, ctx.temperature, first, last, T, C, **config)
            dhidden += dx @ weight[first:last]
            torch.mm(dx.T, hidden, out=dweight[first:last])
        return dhidden.to(hidden.dtype), dweight, None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor,
                   temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """hidden (T, C), head weight (V, C), targets (T,) int64 in [0, V) -> logprobs, entropies (T,)
    float32, with gradients for hidden and weight; (T, V) never exists."""
    assert hidden.shape == (*targets.shape, weight.shape[1]), (hidden.shape, weight.shape)
    if _on_kernels(hidden) and len(hidden):
        return _TokenLogprobs.apply(hidden, weight, targets, temperature)
    return token_logprobs_reference(hidden, weight, targets, temperature)
