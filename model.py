"""Model: the Qwen3 / Qwen2.5 decoder, one forward for the trainer and the engine.

    token_ids (T,) -> embedding -> [ RMSNorm -> attention -> + -> RMSNorm -> SwiGLU -> + ] x layers
                   -> RMSNorm -> hidden (T, C) -> head -> logits (., V)

Dims: T tokens of the flat batch (every sequence packed behind the other, no padding), C hidden
size, H query heads, K key/value heads (each shared by H / K query heads), D head dim, V vocabulary.

What tells the uses apart is `attend(layer, q, k, v)`, a plain function of q (T, H, D), k and v
(T, K, D) after rotary: `packed_attention` here (training: causal inside each segment), paged
attention over a KV cache in kvcache_engine.py. The model knows neither segments nor blocks, nor
that it is sharded: FSDP2 wraps blocks and root from outside. So the head is used only inside
`forward` (`targets` given), where its weight is whole; (T, V) logits are never held at once.

Qwen3 has QK-norm (RMSNorm over D on q and k), Qwen2.5 has none but a bias on q, k, v instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import add_rmsnorm, rmsnorm, rotary, token_logprobs


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False  # the head is the embedding matrix
    qk_norm: bool = True  # Qwen3
    qkv_bias: bool = False  # Qwen2.5
    max_positions: int = 32768  # what it was trained for; written to config.json, not enforced here


# ---- decoder -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids, positions, attend, targets=None, temperature=1.0):
        """token_ids, positions (T,) -> hidden (T, C) after the final norm.

        With targets (T,), -1 = no loss here: (logprobs, entropies), both (T,) fp32, of the next
        token's distribution at this temperature; 0 where the target is -1.
        """
        rows = None if targets is None else (targets >= 0).nonzero()[:, 0]  # (R,)
        hidden, residual = self.embed_tokens(token_ids), None  # (T, C)
        for block in self.layers:
            wanted = rows if block is self.layers[-1] else None
            hidden, residual = block(hidden, residual, positions, attend, wanted)
        hidden, _ = self.norm(hidden, residual)  # (T, C), or (R, C) with targets
        if targets is None:
            return hidden
        values = token_logprobs(hidden, self.head_weight(), targets[rows], temperature)
        zeros = torch.zeros(len(targets), device=hidden.device)
        return tuple(zeros.index_copy(0, rows, value) for value in values)

    def head_weight(self) -> Tensor:
        """(V, C)"""
        return (self.embed_tokens if self.config.tie_embeddings else self.lm_head).weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, C) -> (B, V) fp32"""
        return F.linear(hidden, self.head_weight()).float()


class Block(nn.Module):
    """One layer. The residual travels beside the hidden state, so that every addition is fused with
    the norm that follows it, in this block or in the next.

    rows (R,), for the last block only: the tokens whose output is wanted. Keys and values are made
    of all tokens, what comes after attention of these alone (less than half, with tool output).
    """

    recompute = False  # set on blocks from outside: activations are made again in the backward

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden, residual, positions, attend, rows=None):
        inputs = hidden, residual, positions, attend, rows
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, *inputs, use_reentrant=False)
        return self.compute(*inputs)

    def compute(self, hidden, residual, positions, attend, rows):
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, attend, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.rope_theta = layer, config.head_dim, config.rope_theta
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, positions, attend, rows=None):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (T, K, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # (T, K, D)
        inv_freq = inverse_frequencies(self.head_dim, self.rope_theta, x.device)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm else ()
        q, k = rotary(q, k, positions, inv_freq, *norms)
        out = attend(self.layer, q, k, v).flatten(1)  # (T, H * D)
        return self.o_proj(out if rows is None else out.index_select(0, rows))


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x, residual=None):
        """-> (normed sum, sum), the sum being x + residual, or x alone"""
        if residual is None:
            return rmsnorm(x, self.weight, self.eps), x
        return add_rmsnorm(x, residual, self.weight, self.eps)


@functools.lru_cache
def inverse_frequencies(head_dim: int, theta: float, device) -> Tensor:
    """theta^(-2i / D), (D / 2,) fp32. Not a buffer: a model made on the meta device has no values
    to lose, and mixed precision does not round it. Subtle: the engine may be first to ask, and
    tensors born in inference mode could not be used in training."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        return 1.0 / theta**exponents


@torch.no_grad()
def init_weights(model: Model, seed: int, embedding_std: float = 0.2, std: float = 0.02) -> None:
    """Normal weights, zero biases, norms 1. Drawn on the CPU: equal on every device. A small model
    learns to copy far earlier with embeddings of 0.2 than with Qwen's 0.02."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            scale = embedding_std if name.startswith("embed_tokens") else std
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


# ---- attention over a packed batch ---------------------------------------------------------------


def packed_attention(cu_seqlens: Tensor):
    """cu_seqlens (S + 1,): borders of the segments -> attend, causal inside each segment."""
    borders = cu_seqlens.tolist()
    groups = similar_lengths(borders)
    rows = [padded_rows(borders, group, cu_seqlens.device) for group in groups]
    order = torch.cat([index[real] for index, real in rows]).argsort()  # back to packed order

    def attend(layer, q, k, v):
        outs = []
        for index, real in rows:  # (segments, longest), token of each place and whether it is real
            qkv = (
                x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
                for x in (q, k, v)
            )
            out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            outs.append(out.transpose(1, 2)[real])
        return torch.cat(outs)[order]

    return attend


def similar_lengths(borders, slack=1.15):
    lengths = [b - a for a, b in zip(borders, borders[1:])]
    groups = []
    for segment in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[segment] <= slack * lengths[groups[-1][0]]:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def padded_rows(borders, group, device):
    starts = torch.tensor([borders[s] for s in group])[:, None]
    lengths = torch.tensor([borders[s + 1] - borders[s] for s in group])[:, None]
    place = torch.arange(int(lengths.max()))
    real = place < lengths
    return torch.where(real, starts + place, starts).to(device), real.to(device)
