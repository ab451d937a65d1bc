"""Model: the Qwen3 / Qwen2.5 decoder, one forward for the trainer and the engine; its folders.

    token_ids (T,) -> embedding -> [ RMSNorm -> attention -> + -> RMSNorm -> SwiGLU -> + ] x layers
                   -> RMSNorm -> hidden (T, C) -> head -> logits (., V)

Dims: T tokens of the flat batch (sequences packed one behind the other, no padding), R rows whose
output is wanted (a target, a token to sample), C hidden size, H query heads, K key/value heads,
D head dim, V vocabulary.

What tells the uses apart is `attend(layer, q, k, v)`, a plain function of q (T, H, D), k and v
(T, K, D) after rotary: `packed_attention` here (training: causal inside each segment), paged
attention over a KV cache in kvcache_engine.py. The model knows neither segments nor blocks, nor
that it is sharded: FSDP2 wraps blocks and root from outside. So the head is used only inside
`forward` (`targets` given), where its weight is whole; (T, V) logits are never held at once.

Qwen3 has QK-norm (RMSNorm over D on q and k), Qwen2.5 has a bias on q, k and v instead. Linear
layers are called through `linears`: on a CPU the engine has a copy of them in an order that is
faster for few rows (`Model.pack`); parameters and folders do not know of it.

Folders are Hugging Face's: config.json, safetensors, shards and an index. What would be another
model (rope scaling, sliding window, experts, quantised weights) is refused by the field's name.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import add_rmsnorm, rmsnorm, rotary, token_logprobs

try:  # torch 2.13; an older one that has it but not with fewer KV heads goes without
    from torch.nn.attention.varlen import varlen_attn

    HAS_VARLEN = "enable_gqa" in (varlen_attn.__kwdefaults__ or {})
except ImportError:
    HAS_VARLEN = False


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
    max_positions: int = 32768  # that it was trained for


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

    def forward(self, token_ids, positions, attend, targets=None, temperature=1.0, rows=None):
        """token_ids, positions (T,) -> hidden after the final norm, of all rows or of rows (R,).

        With targets (T,), -1 = no loss here: (logprobs, entropies), both (T,) fp32, of the next
        token's distribution at this temperature; 0 where the target is -1.
        """
        if targets is not None:
            rows = (targets >= 0).nonzero()[:, 0]  # (R,)
        hidden, residual = self.embed_tokens(token_ids), None  # (T, C)
        for block in self.layers:
            wanted = rows if block is self.layers[-1] else None
            hidden, residual = block(hidden, residual, positions, attend, wanted)
        hidden, _ = self.norm(hidden, residual)  # (R, C)
        if targets is None:
            return hidden
        values = token_logprobs(hidden, self.head().weight, targets[rows], temperature)
        zeros = torch.zeros(len(targets), device=hidden.device)
        return tuple(zeros.index_copy(0, rows, value) for value in values)

    def head(self) -> nn.Module:
        return self.embed_tokens if self.config.tie_embeddings else self.lm_head

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, C) -> (B, V) fp32"""
        return linears(hidden, self.head())[0].float()

    def pack(self) -> None:
        """For generation on a CPU: see `linears`. To be called again when the weights change, which
        are then in memory twice."""
        if sum(p.numel() for p in self.parameters()) < PACK_FROM:
            return
        pack(self.head())
        for block in self.layers:
            pack(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
            pack(block.self_attn.o_proj)
            pack(block.mlp.gate_proj, block.mlp.up_proj)
            pack(block.mlp.down_proj)


class Block(nn.Module):
    """One layer. The residual travels beside the hidden state: an addition is fused with the norm
    that follows it, in this block or the next. rows (R,), in the last block alone: where an output
    is wanted (not for prompts and tool output); what comes after attention is made for these.
    """

    recompute = False  # set from outside: activations are made again in the backward

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, *inputs):
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
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x, positions, attend, rows):
        q, k, v = linears(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # (T, H or K, D)
        inv_freq = inverse_frequencies(self.head_dim, self.rope_theta, x.device)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm else ()
        q, k = rotary(q, k, positions, inv_freq, *norms)
        out = attend(self.layer, q, k, v).flatten(1)  # (T, H * D)
        return linears(out if rows is None else out.index_select(0, rows), self.o_proj)[0]


class Mlp(nn.Module):
    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        gate, up = linears(x, self.gate_proj, self.up_proj)
        return linears(F.silu(gate) * up, self.down_proj)[0]


PACK_FROM = 1 << 20  # parameters of a model; in a smaller one a call costs more than it saves
# First of some layers -> their one matrix; a module that held it could not be copied or saved.
PACKED = weakref.WeakKeyDictionary()


def pack(*layers: nn.Module) -> None:
    """Copies the matrices of layers with the same input into one, in oneDNN's own order."""
    PACKED.pop(layers[0], None)
    weights, biases = [[getattr(x, name, None) for x in layers] for name in ("weight", "bias")]
    can = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    w = weights[0]
    if can and w.is_cpu and w.dtype == torch.float32 and not w.is_inference():
        together = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), None)
        bias = None if biases[0] is None else torch.cat(biases)
        parts = [t for t in weights + biases if t is not None]
        versions = [t._version for t in parts]
        PACKED[layers[0]] = parts, versions, together, bias, [len(w) for w in weights]


def linears(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """x (T, C) through each of some linear layers. Where they are packed (for generation) and not
    changed since, as one matmul; with few rows it takes two thirds of the time."""
    parts, versions, together, bias, sizes = PACKED.get(layers[0], ((),) * 5)
    same = parts and all(layer.weight is w for layer, w in zip(layers, parts))
    same = same and x.dtype == torch.float32 and [t._version for t in parts] == versions
    if torch.is_grad_enabled() or not same:
        return [F.linear(x, layer.weight, getattr(layer, "bias", None)) for layer in layers]
    y = torch.ops.mkldnn._linear_pointwise.default(x, together, bias, "none", [], "")
    return y.split_with_sizes(sizes, -1) if len(sizes) > 1 else [y]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x, residual=None):
        """-> (the normed sum, the sum), the sum being x + residual, or x alone."""
        if residual is None:
            return rmsnorm(x, self.weight, self.eps), x
        return add_rmsnorm(x, residual, self.weight, self.eps)


@functools.lru_cache
def inverse_frequencies(head_dim: int, theta: float, device) -> Tensor:
    """theta^(-2i / D), (D / 2,) fp32. Not a buffer: mixed precision would round it, the meta device
    lose it. Subtle: what inference mode makes, training cannot use."""
    with torch.inference_mode(False):
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)


@torch.no_grad()
def init_weights(model: Model, seed: int, embedding_std: float = 0.2, std: float = 0.02) -> None:
    """Normal weights, zero biases, norms 1; drawn on the CPU, so equal on every device. A small
    model learns to copy far earlier with embeddings of 0.2 than with Qwen's 0.02."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            scale = embedding_std if name.startswith("embed_tokens") else std
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def packed_attention(cu_seqlens: Tensor):
    """cu_seqlens (S + 1,) int32, borders of the segments -> attend, causal inside each segment.

    One SDPA call a segment (a block-diagonal mask over all of T costs 29 times as much, padding to
    one length saves nothing); on a GPU in half precision torch's variable-length attention.
    """
    lengths = cu_seqlens.diff().tolist()

    def attend(layer, q, k, v):
        if HAS_VARLEN and q.is_cuda and q.dtype != torch.float32:
            shared = cu_seqlens, cu_seqlens, max(lengths), max(lengths)
            return varlen_attn(q, k, v, *shared, window_size=(-1, 0), enable_gqa=True)
        heads_first = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v))
        outs = [
            F.scaled_dot_product_attention(*segment, is_causal=True, enable_gqa=True)
            for segment in zip(*heads_first)
        ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)  # (T, H, D)

    return attend


# ---- config.json ---------------------------------------------------------------------------------

MODEL_TYPES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
NUMBERS = dict(  # of ModelConfig, and their names in config.json
    vocab_size="vocab_size", hidden_size="hidden_size", num_layers="num_hidden_layers",
    num_heads="num_attention_heads", num_kv_heads="num_key_value_heads", head_dim="head_dim",
    intermediate_size="intermediate_size", rope_theta="rope_theta", rms_norm_eps="rms_norm_eps",
    max_positions="max_position_embeddings",
)  # fmt: skip
FIXED = dict(  # with any other value it would be another model than the one above
    hidden_act="silu", attention_bias=False, attention_dropout=0, use_sliding_window=False,
    quantization_config=None, rope_type="default", type="default", partial_rotary_factor=1,
)  # fmt: skip
UNSUPPORTED = "take a dense Qwen3 or Qwen2.5 model with full attention and plain RoPE"
DAMAGED = "the file is damaged, download or copy it again"


def check(fine: bool, where, what: str, action: str = DAMAGED) -> None:
    if not fine:
        raise ValueError(f"{where}: {what}: {action}")


def read_config(folder) -> ModelConfig:
    """config.json in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    path = Path(folder) / "config.json"
    raw = read_json(path)

    def supported(name, value, *allowed):
        what = f"{name} is {value!r}, supported is {' or '.join(map(repr, allowed))}"
        check(value in allowed, path, what, UNSUPPORTED)

    def number(name):
        value, kind = raw.get(NUMBERS[name]), type(getattr(ModelConfig, name, 0))
        fine = type(value) in (int, kind) and 0 < value < (1 << 20 if kind is int else 1 << 40)
        check(fine, path, f"{NUMBERS[name]} is {value!r}, no sensible {kind.__name__} above 0")
        return kind(value)

    kind, layers = raw.get("model_type"), raw.get("layer_types") or []
    supported("model_type", kind, *MODEL_TYPES)
    supported("architectures", raw.get("architectures"), [MODEL_TYPES[kind]], None)
    for name, value in FIXED.items():
        supported(name, raw.get(name, value), value)
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        supported(f"type of {name}", type(rope).__name__, "dict")
        for key, value in rope.items():
            supported(f"{name}.{key}", value, FIXED.get(key, raw.get(key, value)))
        raw.update(rope)
    for layer in layers if type(layers) is list else [layers]:
        supported("layer_types", layer, "full_attention")
    tied, qwen2 = raw.get("tie_word_embeddings", False), kind == "qwen2"
    supported("tie_word_embeddings", tied, True, False)
    if qwen2:
        raw.setdefault("head_dim", number("hidden_size") // number("num_heads"))
    numbers = {name: number(name) for name in NUMBERS}
    supported("heads % KV heads", numbers["num_heads"] % numbers["num_kv_heads"], 0)
    supported("head_dim % 2", numbers["head_dim"] % 2, 0)
    return ModelConfig(**numbers, tie_embeddings=bool(tied), qk_norm=not qwen2, qkv_bias=qwen2)


def read_json(path: Path, text: bytes | None = None) -> dict:
    """The object in a file, or in a given part of it."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    if text is None and not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give the folder of a model")
    text = path.read_bytes() if text is None else text
    try:
        fields = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}): {DAMAGED}") from None
    check(type(fields) is dict, path, "not a JSON object")
    return fields


# ---- folders -------------------------------------------------------------------------------------

# A safetensors file: 8 bytes header length, JSON header, the tensors back to back.
# {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end]}, "__metadata__": {}}

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """-> memory-mapped tensors: only the bytes of the rows that are used are read from the disk.

    The header is untrusted input: the result is right or a ValueError. (Not seen: a flipped byte
    in the tensors themselves; the format has no checksum.)
    """
    with open(path, "rb") as f:
        size, n = path.stat().st_size, int.from_bytes(f.read(8), "little")
        check(n <= min(size - 8, 10**8), path, f"a header of {n} bytes in a file of {size}")
        header = read_json(path, f.read(n))
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    tensors, position, room = {}, 0, size - 8 - n
    entries = sorted(read_entry(path, name, header[name]) for name in header)
    for begin, end, name, shape, dtype in entries:
        what = f"tensor {name!r} is at {begin} to {end}, not at {position} to at most {room}"
        check(begin == position and end <= room, path, what)
        place = dict(dtype=DTYPES[dtype], count=math.prod(shape), offset=8 + n + begin)
        flat = torch.frombuffer(mapped, **place) if end > begin else torch.empty(0)
        tensors[name], position = flat.to(DTYPES[dtype]).view(shape), end
    check(position == room, path, f"no tensor is at {position} to {room}")
    return tensors


def read_entry(path, name, entry) -> tuple:
    fields = entry if type(entry) is dict else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    check(dtype in list(DTYPES), path, f"tensor {name!r} is {dtype!r}", f"make it {[*DTYPES]}")
    for numbers in (shape, offsets):
        fine = type(numbers) is list and 0 < len(numbers) < 8
        fine = fine and all(type(x) is int and 0 <= x < 1 << 60 for x in numbers)
        check(fine, path, f"tensor {name!r} has {str(entry)[:200]}")
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    fine = len(offsets) == 2 and offsets[1] - offsets[0] == num_bytes
    check(fine, path, f"tensor {name!r} has {num_bytes} bytes and is at {offsets}")
    return *offsets, name, shape, dtype


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        place = dict(data_offsets=[position, position := position + tensor.nbytes])
        header[name] = dict(dtype=names[tensor.dtype], shape=[*tensor.shape], **place)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def file_name(name: str) -> str:
    """Our parameter names -> those in the files: "norm.weight" -> "model.norm.weight"."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def load_model(folder, device="cpu", dtype: torch.dtype | None = None) -> Model:
    """A Hugging Face folder -> Model. dtype None: as stored."""
    config = read_config(folder)
    stored = stored_weights(folder, config)
    with torch.device("meta"):
        model = Model(config).to(dtype or stored["embed_tokens.weight"].dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    return model


def stored_weights(folder, config: ModelConfig) -> dict[str, Tensor]:
    """{parameter name: memory-mapped tensor}, names and shapes as the config wants them. A rank
    that holds some rows copies stored[name][start:stop] and reads no other byte."""
    files = find_tensors(Path(folder))
    action = "config.json and weights are not of one model, copy both again"
    mismatch = f"{config.num_layers} layers by config.json, {len(files)} tensors in the files"
    check(config.num_layers <= len(files), folder, mismatch, action)
    with torch.device("meta"):
        expected = {file_name(name): p.shape for name, p in Model(config).named_parameters()}
    head, embedding = files.get("lm_head.weight"), files.get("model.embed_tokens.weight")
    if config.tie_embeddings and None not in (head, embedding) and torch.equal(head, embedding):
        del files["lm_head.weight"]  # some tied folders hold the matrix twice
    for name in sorted(expected.keys() | files.keys()):
        got = tuple(files[name].shape) if name in files else "missing"
        want = tuple(expected[name]) if name in expected else "unknown"
        check(got == want, folder, f"tensor {name!r} is {got}, by config.json {want}", action)
    return {name.removeprefix("model."): tensor for name, tensor in files.items()}


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """{name in the files: tensor}, from one file or from the shards that the index names."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        check(not index.is_file(), folder, f"{WEIGHTS} beside {INDEX}", "delete the older one")
        return read_safetensors(single)
    places = read_json(index).get("weight_map")
    table = type(places) is dict and all(type(file) is str for file in places.values())
    check(table, index, "weight_map is not a table from tensor to file")
    for name, file in places.items():
        if Path(file).name != file or not (folder / file).is_file():
            what = f"{index}: tensor {name!r} is in {file!r}, which is not in this folder"
            raise FileNotFoundError(f"{what}: download or copy that file")
    shards = {file: read_safetensors(folder / file) for file in {*places.values()}}
    wrong = {(name, file) for file in shards for name in shards[file]} ^ set(places.items())
    check(not wrong, index, f"index and shards differ in {sorted(wrong)[:2]}")
    return {name: shards[file][name] for name, file in places.items()}


def save_model(model, config, folder, max_shard_bytes=5 * 10**9, dtype=None, fields=None) -> None:
    """Model, or dict of whole tensors by its names -> folder that transformers and vLLM load.
    dtype None: as they are. fields: more for config.json, such as eos_token_id."""
    assert config.qk_norm != config.qkv_bias, "neither Qwen3 (qk_norm) nor Qwen2.5 (qkv_bias)"
    folder, kind = Path(folder), "qwen3" if config.qk_norm else "qwen2"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()  # weights of an earlier save would contradict these
    shards, room, total = [], 0, 0
    for name, tensor in (model.state_dict() if isinstance(model, nn.Module) else model).items():
        tensor = tensor.detach().to(dtype or tensor.dtype)
        if tensor.nbytes > room:
            shards, room = [*shards, {}], max_shard_bytes
        shards[-1][file_name(name)] = tensor
        room, total = room - tensor.nbytes, total + tensor.nbytes
    places, name = {}, "model-{:05}-of-{:05}.safetensors" if len(shards) > 1 else WEIGHTS
    for i, shard in enumerate(shards, 1):
        write_safetensors(folder / name.format(i, len(shards)), shard)
        places.update(dict.fromkeys(shard, name.format(i, len(shards))))
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=places)
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    raw = dict(model_type=kind, architectures=[MODEL_TYPES[kind]], hidden_act="silu")
    raw.update((theirs, getattr(config, ours)) for ours, theirs in NUMBERS.items())
    raw.update(tie_word_embeddings=config.tie_embeddings, use_sliding_window=False)
    raw.update(fields or {}, torch_dtype=str(tensor.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
