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
import json
import math
import mmap
import os
import re
import shutil
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


# ---- config.json ---------------------------------------------------------------------------------

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Fields that would make it another model than the one above, and the only value they may have.
FIXED_FIELDS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "rope_type": "default",  # this and the next two stand in rope_scaling or rope_parameters
    "type": "default",
    "partial_rotary_factor": 1,
}


def read_config(folder) -> ModelConfig:
    """config.json in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    path = os.path.join(folder, "config.json")
    raw = read_json(path)
    kind = raw.get("model_type")
    supported(path, "model_type", kind, *ARCHITECTURES)
    supported(path, "architectures", raw.get("architectures"), [ARCHITECTURES[kind]], None)
    rope = read_rope(path, raw)
    for name, value in FIXED_FIELDS.items():
        for fields in (raw, rope):
            supported(path, name, fields.get(name, value), value)
    for layer_type in raw.get("layer_types") or ():
        supported(path, "layer_types", layer_type, "full_attention")
    tied = raw.get("tie_word_embeddings", False)
    supported(path, "tie_word_embeddings", tied, True, False)
    hidden, heads = (number(path, raw, n) for n in ("hidden_size", "num_attention_heads"))
    if kind == "qwen2":
        raw = {"head_dim": hidden // heads, **raw}
    config = ModelConfig(
        vocab_size=number(path, raw, "vocab_size"),
        hidden_size=hidden,
        num_layers=number(path, raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number(path, raw, "num_key_value_heads"),
        head_dim=number(path, raw, "head_dim"),
        intermediate_size=number(path, raw, "intermediate_size"),
        rope_theta=number(path, rope, "rope_theta", float),
        rms_norm_eps=number(path, raw, "rms_norm_eps", float),
        tie_embeddings=bool(tied),
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        max_positions=number(path, raw, "max_position_embeddings"),
    )
    supported(path, "num_attention_heads % num_key_value_heads", heads % config.num_kv_heads, 0)
    supported(path, "head_dim % 2", config.head_dim % 2, 0)
    return config


def read_rope(path, raw) -> dict:
    rope = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    for name in ("rope_scaling", "rope_parameters"):
        fields = raw.get(name) or {}
        supported(path, f"type of {name}", type(fields).__name__, "dict")
        for key in fields.keys() & rope.keys():
            supported(path, f"{key} in {name}", fields[key], rope[key])
        rope.update(fields)
    return rope


def supported(path, name, value, *allowed):
    if value not in allowed:
        raise ValueError(
            f"{path}: {name} is {value!r}, supported is {' or '.join(map(repr, allowed))}: take a "
            "dense Qwen3 or Qwen2.5 model with full attention and plain RoPE"
        )


def number(path, fields, name, kind=int):
    value = fields.get(name)
    if type(value) not in (int, kind) or not 0 < value <= 1 << 30:
        raise ValueError(f"{path}: {name} is {value!r}: no {kind.__name__} above 0")
    return kind(value)


def config_fields(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The old spelling, which old and new transformers read alike."""
    assert config.qk_norm != config.qkv_bias, "neither Qwen3 (qk_norm) nor Qwen2.5 (qkv_bias)"
    kind = "qwen3" if config.qk_norm else "qwen2"
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_scaling": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# ---- safetensors ---------------------------------------------------------------------------------
#
#   8 bytes: header length n, little endian | n bytes JSON | tensors, back to back, no hole
#   {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end]}, "__metadata__": {}}

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_HEADER = 100_000_000  # as in the safetensors library
DAMAGED = "the file is damaged: download or copy it again"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands: data is a view of the mapped file, no byte is read before its use."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview


def tensor_slice(stored: StoredTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows start to stop of the first dimension, memory-mapped: only their bytes are touched. A
    rank that holds a shard copies tensor_slice(stored[name], start, stop) into it."""
    start, stop, _ = slice(start, stop).indices(stored.shape[0])
    shape = (max(stop - start, 0), *stored.shape[1:])
    if 0 in shape:
        return torch.empty(shape, dtype=stored.dtype)
    row = len(stored.data) // stored.shape[0]
    flat = torch.frombuffer(stored.data[start * row : stop * row], dtype=stored.dtype)
    return flat.view(shape)


def read_safetensors(path) -> dict[str, StoredTensor]:
    """The header is untrusted: whatever is in it, the result is right or a ValueError."""
    with open(path, "rb") as f:
        file_size = os.fstat(f.fileno()).st_size
        header_size = int.from_bytes(f.read(8), "little")
        if file_size < 8 or header_size > min(MAX_HEADER, file_size - 8):
            raise ValueError(
                f"{path}: header of {header_size} bytes in a file of {file_size}: {DAMAGED}"
            )
        header = parse_json(path, f.read(header_size))
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY))[8 + header_size :]
    header.pop("__metadata__", None)
    tensors, position = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: begin_of(path, *item)):
        begin, end = entry["data_offsets"]
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name!r} has dtype {dtype!r}, supported are {', '.join(DTYPES)}: "
                "convert the model to one of them"
            )
        if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{path}: tensor {name!r} has shape {shape!r}: {DAMAGED}")
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if begin != position or end - begin != expected or end > len(data):
            raise ValueError(
                f"{path}: tensor {name!r} stands at bytes {begin} to {end}, expected {position} to "
                f"{position + expected} of {len(data)}: {DAMAGED}"
            )
        tensors[name] = StoredTensor(DTYPES[dtype], tuple(shape), data[begin:end])
        position = end
    if position != len(data):
        raise ValueError(f"{path}: {len(data) - position} bytes belong to no tensor: {DAMAGED}")
    return tensors


def begin_of(path, name, entry):
    offsets = entry.get("data_offsets") if type(entry) is dict else None
    if type(offsets) is not list or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        raise ValueError(f"{path}: tensor {name!r} has data_offsets {offsets!r}: {DAMAGED}")
    return tuple(offsets)


def write_safetensors(path, tensors: dict[str, Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(f"{path}.part", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    os.replace(f"{path}.part", path)


def read_json(path) -> dict:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is missing: give the folder of a Hugging Face model")
    with open(path, "rb") as f:
        return parse_json(path, f.read())


def parse_json(path, text: bytes) -> dict:
    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"a key stands twice in {sorted(k for k, _ in pairs)[:4]}...")
        return dict(pairs)

    try:
        fields = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}): {DAMAGED}") from None
    if type(fields) is not dict:
        raise ValueError(f"{path}: a JSON object was expected, got {str(fields)[:40]}: {DAMAGED}")
    return fields


def write_json(path, fields: dict) -> None:
    with open(f"{path}.part", "w") as f:
        json.dump(fields, f, indent=2)
    os.replace(f"{path}.part", path)


# ---- model folders -------------------------------------------------------------------------------


# What belongs to a model folder beside config and weights.
SIDE_FILES = (
    "tokenizer.json tokenizer_config.json vocab.json merges.txt added_tokens.json "
    "special_tokens_map.json chat_template.jinja generation_config.json"
).split()


def file_name(name: str) -> str:
    """Our parameter names -> those in the files: "norm.weight" -> "model.norm.weight"."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def load_model(folder, device="cpu", dtype: torch.dtype | None = None) -> Model:
    """A Hugging Face folder (config.json, model.safetensors or shards with an index) -> Model.
    dtype None: as stored."""
    config = read_config(folder)
    stored = stored_weights(folder, config)
    with torch.device("meta"):
        model = Model(config)
    model = model.to(dtype or stored["embed_tokens.weight"].dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_slice(stored[name]))
    return model


def stored_weights(folder, config: ModelConfig) -> dict[str, StoredTensor]:
    """{parameter name: StoredTensor}, names and shapes checked against the config, nothing read."""
    files = find_tensors(folder)
    if config.num_layers > len(files):
        raise ValueError(
            f"{folder}: {config.num_layers} layers in config.json, {len(files)} tensors in the "
            "files: config and weights are not of one model"
        )
    with torch.device("meta"):
        expected = {file_name(name): p.shape for name, p in Model(config).named_parameters()}
    head, embedding = files.get("lm_head.weight"), files.get("model.embed_tokens.weight")
    if config.tie_embeddings and head and embedding and head.data == embedding.data:
        del files["lm_head.weight"]  # some tied folders store the matrix twice
    for name in expected.keys() | files.keys():
        got = files[name].shape if name in files else "missing"
        want = tuple(expected[name]) if name in expected else "no such tensor"
        if got != want:
            raise ValueError(
                f"{folder}: tensor {name!r}: in the files {got}, by config.json {want}: config and "
                "weights are not of one model, or a file is damaged"
            )
    return {name.removeprefix("model."): tensor for name, tensor in files.items()}


def find_tensors(folder) -> dict[str, StoredTensor]:
    single = os.path.join(folder, "model.safetensors")
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(single) and os.path.isfile(index):
        raise ValueError(f"{folder} has model.safetensors and an index: delete the old one")
    if os.path.isfile(single):
        return read_safetensors(single)
    places = read_json(index).get("weight_map")
    if type(places) is not dict or any(type(file) is not str for file in places.values()):
        raise ValueError(f"{index}: weight_map is not a table of tensor -> file: {DAMAGED}")
    tensors = {}
    for name, file in places.items():
        path = os.path.join(folder, file)
        if os.path.basename(file) != file or not os.path.isfile(path):
            raise FileNotFoundError(
                f"{index}: tensor {name!r} should be in {file!r}, which is not in the folder: copy "
                "or download that file"
            )
    for file in sorted(set(places.values())):
        for name, tensor in read_safetensors(os.path.join(folder, file)).items():
            if places.get(name) != file:
                raise ValueError(
                    f"{index}: {file!r} holds tensor {name!r}, by the index it should be in "
                    f"{places.get(name)!r}: index and shards are not of one model"
                )
            tensors[name] = tensor
    for name in places.keys() - tensors.keys():
        raise ValueError(f"{index}: tensor {name!r} is not in {places[name]!r}: {DAMAGED}")
    return tensors


def save_model(
    model, config: ModelConfig, folder, max_shard_bytes=5 * 10**9, dtype=None, like=None
) -> None:
    """Model, or dict of whole tensors by its names -> folder that transformers and vLLM load.

    dtype None: as they are. like: a model folder whose tokenizer files and token ids go with it.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    os.makedirs(folder, exist_ok=True)
    shards, room = [], 0
    for name, tensor in state.items():
        tensor = tensor.detach().to(dtype or tensor.dtype)
        room -= tensor.nbytes
        if room < 0 or not shards:
            shards.append({})
            room = max_shard_bytes - tensor.nbytes
        shards[-1][file_name(name)] = tensor
    files = {"model.safetensors": shards[0]}
    if len(shards) > 1:
        name = "model-{:05}-of-{:05}.safetensors"
        files = {name.format(i, len(shards)): s for i, s in enumerate(shards, 1)}
    for file, tensors in files.items():
        write_safetensors(os.path.join(folder, file), tensors)
    index = {
        "metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    if len(shards) > 1:
        write_json(os.path.join(folder, "model.safetensors.index.json"), index)
        files["model.safetensors.index.json"] = index
    for file in os.listdir(folder):  # weights of an earlier save would contradict these
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", file):
            if file not in files:
                os.remove(os.path.join(folder, file))
    token_ids = {}
    if like:
        for file in SIDE_FILES:
            if os.path.isfile(os.path.join(like, file)):
                shutil.copy(os.path.join(like, file), folder)
        source = read_json(os.path.join(like, "config.json"))
        token_ids = {key: value for key, value in source.items() if key.endswith("_token_id")}
    fields = config_fields(config, next(iter(shards[0].values())).dtype)
    write_json(os.path.join(folder, "config.json"), {**fields, **token_ids})
