"""The kernels: what a decoder needs that stock torch does slowly or with too much memory.

Every operation is a trio, adjacent: `f_reference` (plain torch, the definition), `f_kernel`
(Triton) and `f`, which checks shapes and picks by device. A CPU runs the references.

    rmsnorm, add_rmsnorm       y = x / rms(x) * w, alone or on x + residual; forward and backward
    rotary                     QK-norm and rotary embedding of q and k; forward and backward
    store_kv                   new keys and values into their cache slots
    paged_decode_attention     one query token a sequence against its cached context
    paged_prefill_attention    a chunk of new tokens a sequence against the cache, causal
    sample                     one token a row: exponential race, temperature, top-p
    token_logprobs             log-probability and entropy from hidden states and head weight

Dims: B rows (sequences) of a decode step, T tokens, S sequences of a prefill, C hidden, V
vocabulary, H query heads, K key/value heads, G = H / K, D head dim, N cache blocks, M blocks a
row of a block table.

One rounding rule: everything is computed in float32 and rounded once, when it is stored.

One reproducibility rule on the CPU: the bits of a row depend on its own sequence alone, not on
the batch, the chunking or the cache. So the reference attention treats each query token as a
row with a key length of its own (its context rounded up to KEY_MULTIPLE), and a matmul over
tokens must have at least 4 rows (with 1 to 3, float32 linear takes another code path).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_MULTIPLE = 64  # reference attention: key lengths are rounded up to this
GATHER_CHUNK = 4096  # reference decode: keys gathered at a time, to stay in the CPU cache
LOGITS_CHUNK = 1 << 22  # reference token_logprobs: at most this many logits exist at once


# ---- RMSNorm -----------------------------------------------------------------------------------


def rmsnorm_reference(x, weight, eps):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dim -> y (..., C), rstd (..., 1)."""
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * rstd * weight.float()).to(x.dtype), rstd


def rmsnorm_backward_reference(dy, x, weight, rstd):
    """xhat = x * rstd; dw = sum dy * xhat; dx = rstd * (dy * w - xhat * mean(dy * w * xhat))."""
    xhat, dy32, w32 = x.float() * rstd, dy.float(), weight.float()
    dw = dy32 * xhat
    dot = (dw @ w32).div_(x.shape[-1]).unsqueeze(-1)
    dx = torch.addcmul(dy32 * w32, xhat, dot, value=-1).mul_(rstd)
    return dx.to(x.dtype), dw.flatten(0, -2).sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = rmsnorm_reference(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *rmsnorm_backward_reference(dy, *ctx.saved_tensors), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        summed = x + residual
        y, rstd = rmsnorm_reference(summed, weight, eps)
        ctx.save_for_backward(summed, weight, rstd)
        return y, summed

    @staticmethod
    def backward(ctx, dy, dsummed):
        dx, dw = rmsnorm_backward_reference(dy, *ctx.saved_tensors)
        dx = dx + dsummed
        return dx, dx, dw, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., C), weight (C,) -> (..., C)."""
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for x {tuple(x.shape)}"
    return _RMSNorm.apply(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual (..., C) -> (rmsnorm(x + residual), x + residual)."""
    assert x.shape == residual.shape, f"x {tuple(x.shape)}, residual {tuple(residual.shape)}"
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for x {tuple(x.shape)}"
    return _AddRMSNorm.apply(x, residual, weight, eps)


# ---- rotary ------------------------------------------------------------------------------------


def _rotate(x, cos, sin):
    """The halves of the last dim are the coordinates of D/2 planes, each turned by its angle."""
    x1, x2 = x.chunk(2, -1)  # (T, H, D/2) each
    y = torch.empty_like(x)
    y1, y2 = y.chunk(2, -1)
    torch.addcmul(x1 * cos, x2, sin, value=-1, out=y1)
    torch.addcmul(x2 * cos, x1, sin, out=y2)
    return y


def rotary_reference(x, positions, inv_freq, weight=None, eps=1e-6):
    """x (T, H, D), normed over D if there is a weight, then turned -> y, rstd, cos, sin."""
    angle = positions.float()[:, None, None] * inv_freq  # (T, 1, D/2)
    cos, sin = angle.cos(), angle.sin()
    rstd = None
    y = x.float()
    if weight is not None:
        rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y * rstd * weight.float()
    return _rotate(y, cos, sin).to(x.dtype), rstd, cos, sin


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, inv_freq, weight, eps):
        y, *saved = rotary_reference(x, positions, inv_freq, weight, eps)
        ctx.save_for_backward(x if weight is not None else None, weight, *saved)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd, cos, sin = ctx.saved_tensors
        dx = _rotate(dy.float(), cos, -sin)
        if weight is None:
            return dx.to(dy.dtype), None, None, None, None
        dx, dw = rmsnorm_backward_reference(dx, x, weight, rstd)
        return dx, None, None, dw, None


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (T, H, D), k (T, K, D), positions (T,), inv_freq (D/2,) -> q and k turned.

    With q_weight and k_weight (D,) they are RMS-normed over D first (Qwen3's QK-norm).
    """
    T, _, D = q.shape
    assert k.shape[0] == T and k.shape[2] == D, f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    assert positions.shape == (T,) and inv_freq.shape == (D // 2,)
    q = _Rotary.apply(q, positions, inv_freq, q_weight, eps)
    return q, _Rotary.apply(k, positions, inv_freq, k_weight, eps)


# ---- KV store ----------------------------------------------------------------------------------


def store_kv_reference(k, v, k_cache, v_cache, slot_mapping):
    if (slot_mapping < 0).any():
        stored = slot_mapping >= 0
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v (T, K, D) into k_cache, v_cache (N, block, K, D) at slot = block id * block + offset.

    slot_mapping (T,) int64; -1 stores nothing (a padded row).
    """
    assert k.shape == v.shape and k.shape[1:] == k_cache.shape[2:], (k.shape, k_cache.shape)
    assert slot_mapping.shape == k.shape[:1] and slot_mapping.dtype == torch.int64
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)


# ---- paged attention ---------------------------------------------------------------------------


def _key_len(context_len):
    return (context_len + KEY_MULTIPLE - 1) // KEY_MULTIPLE * KEY_MULTIPLE


def _gather(cache, block_tables, key_len):
    """cache (N, block, K, D) -> (B, K, key_len, D), the first key_len slots of each block table.

    Columns beyond the table repeat block 0: they are masked, and what they hold is finite.
    """
    N, block, K, D = cache.shape
    num_blocks = -(-key_len // block)
    tables = block_tables[:, :num_blocks].clamp(min=0)
    if tables.shape[1] < num_blocks:
        tables = F.pad(tables, (0, num_blocks - tables.shape[1]))
    rows = cache.view(N, -1).index_select(0, tables.flatten())
    return rows.view(len(tables), num_blocks * block, K, D)[:, :key_len].transpose(1, 2)


def _attend_rows(q, keys, values, context_lens, scale):
    """q (n, H, D), keys, values (n, K, L, D), context_lens (n,) all in (L - 64, L] -> (n, H, D).

    A row is a batch entry with G queries a KV head: no bit of it depends on n.
    """
    n, H, D = q.shape
    K, L = keys.shape[1:3]
    mask = torch.arange(L, device=q.device) < context_lens[:, None]  # (n, L)
    q = q.reshape(n, K, H // K, D)
    out = F.scaled_dot_product_attention(q, keys, values, mask[:, None, None], scale=scale)
    return out.reshape(n, H, D)


def paged_decode_attention_reference(q, k_cache, v_cache, block_tables, context_lens, scale):
    """softmax(scale q K^T) V over the context; rows of one rounded key length go together."""
    out = torch.zeros_like(q)
    key_lens = _key_len(context_lens)
    for key_len in key_lens.unique().tolist():
        if key_len == 0:
            continue
        members = (key_lens == key_len).nonzero().flatten()
        for rows in members.split(max(1, GATHER_CHUNK // key_len)):
            keys = _gather(k_cache, block_tables[rows], key_len)
            values = _gather(v_cache, block_tables[rows], key_len)
            out[rows] = _attend_rows(q[rows], keys, values, context_lens[rows], scale)
    return out


def paged_prefill_attention_reference(
    q, k_cache, v_cache, cu_seqlens, context_lens, block_tables, scale
):
    """Each query token is a decode row of its own context; rows of a sequence share its keys."""
    out = torch.zeros_like(q)
    starts = cu_seqlens.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        first = context_len - (end - start)  # tokens of the context that came before this chunk
        while start < end:  # one stretch of queries for each rounded key length
            key_len = _key_len(first + 1)
            n = min(key_len - first, end - start)
            lens = torch.arange(first + 1, first + n + 1, device=q.device)
            keys = _gather(k_cache, block_tables[s : s + 1], key_len).expand(n, -1, -1, -1)
            values = _gather(v_cache, block_tables[s : s + 1], key_len).expand(n, -1, -1, -1)
            out[start : start + n] = _attend_rows(q[start : start + n], keys, values, lens, scale)
            start, first = start + n, first + n
    return out


def _check_paged(q, k_cache, v_cache, block_tables, context_lens):
    K, D = k_cache.shape[2:]
    assert k_cache.shape == v_cache.shape, (k_cache.shape, v_cache.shape)
    assert q.shape[1] % K == 0 and q.shape[2] == D, f"q {tuple(q.shape)} for {K} KV heads of {D}"
    assert len(block_tables) == len(context_lens), (block_tables.shape, context_lens.shape)


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """q (B, H, D), caches (N, block, K, D), block_tables (B, M) int32, context_lens (B,) int32
    -> (B, H, D). The context includes the query's own token; a row with context 0 gives zeros."""
    _check_paged(q, k_cache, v_cache, block_tables, context_lens)
    assert len(q) == len(context_lens), f"{len(q)} queries, {len(context_lens)} contexts"
    return paged_decode_attention_reference(
        q, k_cache, v_cache, block_tables, context_lens, scale
    )


def paged_prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens: Tensor, context_lens: Tensor,
    block_tables: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """q (T, H, D): tokens cu_seqlens[s] : cu_seqlens[s + 1] (S + 1,) int32 are the last ones of
    sequence s, whose context_lens[s] (S,) int32 counts them too -> (T, H, D)."""
    _check_paged(q, k_cache, v_cache, block_tables, context_lens)
    assert len(cu_seqlens) == len(context_lens) + 1, (cu_seqlens.shape, context_lens.shape)
    return paged_prefill_attention_reference(
        q, k_cache, v_cache, cu_seqlens, context_lens, block_tables, scale
    )


# ---- sampling ----------------------------------------------------------------------------------


def _mix64(x):
    """splitmix64's finaliser on int64 (products wrap; right shifts made logical by a mask)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def noise_reference(keys, positions, vocab_size):
    """Counter-based noise: keys, positions (B,) int64 -> E (B, V) ~ Exponential(1).

    64 bits of state a row, 32 bits a token: u in (0, 1) reaches 1e-10, so that rare tokens can be
    drawn (24 bits cannot), and E = -log1p(-u) keeps small u exact. E is 16.6 at most.
    """
    state = _mix64(_mix64(keys) + positions)
    low, high = state.to(torch.int32)[:, None], (state >> 32).to(torch.int32)[:, None]
    h = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * -0x61C88647 + low
    h ^= h >> 16 & 0xFFFF
    h *= -0x7A143595
    h ^= high
    h ^= h >> 13 & 0x7FFFF
    h *= -0x3D4D51CB
    h ^= h >> 16 & 0xFFFF
    u = h.float()  # small non-negative integers exactly; the sign bit is worth 2^32
    u = torch.where(h < 0, u + 2.0**32, u).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_()


def _top_p(logits, top_p):
    """-inf outside the smallest set of likeliest tokens with mass top_p (ties at its border stay).
    """
    ordered, _ = logits.sort(-1, descending=True)
    p = ordered.softmax(-1)
    before = p.cumsum(-1) - p  # the mass of all likelier tokens
    border = ordered.masked_fill(before >= top_p[:, None], torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < border, -torch.inf)


def sample_reference(logits, keys, positions, temperature, top_p):
    """argmin E / p, as argmax log p - log E: token v wins with probability p_v exactly."""
    greedy = temperature == 0
    x = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if (top_p < 1).any():
        x = torch.where((top_p < 1)[:, None], _top_p(x, top_p), x)
    logprobs = x.log_softmax(-1)
    score = logprobs - noise_reference(keys, positions, x.shape[-1]).log_()
    if greedy.any():
        score = torch.where(greedy[:, None], x, score)
    tokens = score.argmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)  # 0 log 0 = 0
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), entropies


def sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logits (B, V), temperature (0: greedy), top_p (B,) float32; keys, positions (B,) int64
    -> tokens (B,) int64, logprobs (B,), entropies (B,).

    The noise is a function of (key, position, token): the same sequence draws the same tokens in
    whatever batch. logprobs and entropies are of the distribution that was sampled from: after
    temperature and top-p (greedy: of temperature 1).
    """
    B, _ = logits.shape
    assert logits.dtype == torch.float32, f"logits must be float32, got {logits.dtype}"
    assert keys.shape == positions.shape == temperature.shape == top_p.shape == (B,)
    return sample_reference(logits, keys, positions, temperature, top_p)


# ---- token log-probabilities -------------------------------------------------------------------


def _row_chunks(T, V):
    """Splits of T rows so that a chunk has LOGITS_CHUNK logits at most (and 4 rows or more)."""
    num = max(1, min(-(-T * V // LOGITS_CHUNK), T // 4))
    borders = [T * i // num for i in range(num + 1)]
    return [slice(a, b) for a, b in zip(borders[:-1], borders[1:])]


def token_logprobs_reference(hidden, weight, targets, temperature):
    """log softmax(h W^T / temperature)[target] and the entropy -> logprobs, entropies, lse (T,)."""
    logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    entropies, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
    weight = weight.float()
    for rows in _row_chunks(len(hidden), len(weight)):
        logits = (hidden[rows].float() @ weight.T).div_(temperature)  # (chunk, V)
        wanted = logits.gather(-1, targets[rows, None]).squeeze(-1)
        top = logits.amax(-1, keepdim=True)
        p = (logits - top).exp_()
        total = p.sum(-1)
        lse[rows] = total.log() + top.squeeze(-1)
        logprobs[rows] = wanted - lse[rows]
        entropies[rows] = lse[rows] - p.mul_(logits).sum(-1) / total  # H = lse - sum p x
    return logprobs, entropies, lse


def token_logprobs_backward_reference(
    dlogprobs, dentropies, hidden, weight, targets, entropies, lse, temperature
):
    """d logp / d x_v = [v = target] - p_v;   d H / d x_v = -p_v (log p_v + H);   x = h W^T / T.

    Logits are computed again, chunk by chunk: 1/3 more matmul work for no (T, V) memory.
    """
    weight32 = weight.float()
    dhidden = torch.empty_like(hidden)
    dweight = torch.zeros_like(weight32)
    for rows in _row_chunks(len(hidden), len(weight)):
        h = hidden[rows].float()
        logp = (h @ weight32.T).div_(temperature).sub_(lse[rows, None])  # (chunk, V)
        dx = logp.exp()
        if dentropies is None:
            dx.mul_(-dlogprobs[rows, None])
        else:
            factor = (logp.add_(entropies[rows, None])).mul_(dentropies[rows, None])
            dx.mul_(factor.add_(dlogprobs[rows, None]).neg_())
        dx.scatter_add_(-1, targets[rows, None], dlogprobs[rows, None])
        dx.div_(temperature)
        dhidden[rows] = (dx @ weight32).to(hidden.dtype)
        dweight.addmm_(dx.T, h)
    return dhidden, dweight.to(weight.dtype)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.set_materialize_grads(False)
        logprobs, entropies, lse = token_logprobs_reference(hidden, weight, targets, temperature)
        ctx.save_for_backward(hidden, weight, targets, entropies, lse)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx, dlogprobs, dentropies):
        if dlogprobs is None:
            dlogprobs = torch.zeros_like(ctx.saved_tensors[-1])
        grads = token_logprobs_backward_reference(
            dlogprobs, dentropies, *ctx.saved_tensors, ctx.temperature
        )
        return *grads, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """hidden (T, C), head weight (V, C), targets (T,) int64 in [0, V) -> logprobs, entropies (T,)
    float32, with gradients for hidden and weight; (T, V) never exists."""
    assert hidden.shape[1:] == weight.shape[1:], (hidden.shape, weight.shape)
    assert targets.shape == hidden.shape[:1], (targets.shape, hidden.shape)
    return _TokenLogprobs.apply(hidden, weight, targets, temperature)
