"""model.py: the decoder against itself and against transformers, and folders in and out."""

import contextlib
import copy
import dataclasses
import json
import random
import struct

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kvcache_engine import Engine
from model import (
    PACKED,
    Model,
    ModelConfig,
    init_weights,
    inverse_frequencies,
    linears,
    load_model,
    packed_attention,
    read_config,
    read_safetensors,
    save_model,
    stored_weights,
)

LENGTHS = [7, 1, 20, 8, 21, 22, 3]  # ragged, some near enough to share a padded call
SMALL = ModelConfig(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, rope_theta=1e4, tie_embeddings=True, max_positions=512,
)  # fmt: skip
QWEN2 = dataclasses.replace(SMALL, qk_norm=False, qkv_bias=True, head_dim=8)
CONFIGS = {
    "qwen3 tied": SMALL,
    "qwen3 untied": dataclasses.replace(SMALL, tie_embeddings=False),
    "qwen2 tied": QWEN2,
    "qwen2 untied": dataclasses.replace(QWEN2, tie_embeddings=False),
}


def small_model(config=SMALL, seed=0, noise=0.3):
    """Perturbed everywhere: with norms of 1 and biases of 0 a forgotten one would not be seen."""
    model = Model(config)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * noise)
    return model


def packed_tokens(lengths=LENGTHS, seed=0):
    """token_ids, positions (T,), cu_seqlens (S + 1,)"""
    token_ids = torch.randint(96, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return token_ids, positions, torch.tensor([0, *lengths]).cumsum(0).int()


def some_targets(token_ids, share=0.4):
    chosen = torch.rand(len(token_ids), generator=torch.Generator().manual_seed(5)) < share
    return torch.where(chosen, token_ids.roll(-1), -1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(got, want, tolerance=1e-5):
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance)


# ---- decoder ----


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_segments_equal_each_alone(config):
    model = small_model(config)
    token_ids, positions, cu_seqlens = packed_tokens()
    together = model(token_ids, positions, packed_attention(cu_seqlens))
    alone = torch.cat(
        [
            model(ids, torch.arange(len(ids)), packed_attention(torch.tensor([0, len(ids)])))
            for ids in token_ids.split(LENGTHS)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_packed_attention_equals_a_block_diagonal_mask_with_gradients():
    token_ids, positions, cu_seqlens = packed_tokens()
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (segment[:, None] == segment) & (positions[:, None] >= positions)

    def masked(layer, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        return (weights.softmax(-1) @ v).transpose(0, 1)

    model = small_model()
    got, want = (model(token_ids, positions, a) for a in (packed_attention(cu_seqlens), masked))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    got, want = (gradients(model, (x * direction).sum()) for x in (got, want))
    assert_same_gradients(got, want, 1e-4)


def test_empty_segments_are_harmless():
    model, (token_ids, positions, cu_seqlens) = small_model(), packed_tokens()
    with_empty = torch.cat([cu_seqlens[:1], cu_seqlens[:3], cu_seqlens[2:], cu_seqlens[-1:]])
    got, want = (model(token_ids, positions, packed_attention(c)) for c in (with_empty, cu_seqlens))
    assert torch.equal(got, want)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_targets_give_logprobs_and_entropies_of_the_wanted_rows(config, temperature):
    """Against the whole (T, V) log-softmax, gradients too: the last block is cut to the rows."""
    model, (token_ids, positions, cu_seqlens) = small_model(config), packed_tokens()
    targets, attend = some_targets(token_ids), packed_attention(cu_seqlens)
    logprobs, entropies = model(token_ids, positions, attend, targets, temperature)
    logp = (model.logits(model(token_ids, positions, attend)) / temperature).log_softmax(-1)
    wanted = targets >= 0
    want_logprobs = logp.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * wanted
    want_entropies = -(logp.exp() * logp).sum(-1) * wanted
    assert logprobs.dtype == entropies.dtype == torch.float32 and 0 < wanted.sum() < len(wanted)
    torch.testing.assert_close(logprobs, want_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, want_entropies, rtol=1e-5, atol=1e-5)
    got = gradients(model, (logprobs + 0.1 * entropies).sum())
    want = gradients(model, (want_logprobs + 0.1 * want_entropies).sum())
    assert_same_gradients(got, want, 1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_weights_give_the_same_logits_until_they_change(config, monkeypatch):
    """Packed, the bits of a row are its own as well; small models are left as they are."""
    model, (token_ids, positions, cu_seqlens) = small_model(config), packed_tokens()
    attend, gate = packed_attention(cu_seqlens), model.layers[0].mlp.gate_proj
    x = torch.randn(99, 32)
    with torch.no_grad():
        logits = lambda: model.logits(model(token_ids, positions, attend))
        plain = logits()
        model.pack()
        assert gate not in PACKED
        monkeypatch.setattr("model.PACK_FROM", 0)
        model.pack()
        assert (gate in PACKED) == torch.backends.mkldnn.is_available()
        torch.testing.assert_close(logits(), plain, rtol=1e-5, atol=1e-5)
        up = linears(x, gate, model.layers[0].mlp.up_proj)[1]
        for n in range(4, 99):
            assert torch.equal(linears(x[:n], gate, model.layers[0].mlp.up_proj)[1], up[:n])
        gate.weight.mul_(2)
        changed = logits()
        model.pack()
        torch.testing.assert_close(logits(), changed, rtol=1e-5, atol=1e-5)
        assert (changed - plain).abs().max() > 0.01
    model(token_ids, positions, attend).sum().backward()  # gradients do not see it
    assert gate.weight.grad.abs().sum() > 0
    with torch.no_grad():
        copied = copy.deepcopy(model)
        again = copied.logits(copied(token_ids, positions, attend))
        torch.testing.assert_close(again, changed, rtol=1e-5, atol=1e-5)
        other = small_model(config, seed=1)
        model.load_state_dict(other.state_dict(), assign=True)
        assert torch.equal(logits(), other.logits(other(token_ids, positions, attend)))
        assert model.bfloat16()(token_ids, positions, attend).dtype == torch.bfloat16


def test_a_batch_without_targets_has_zero_gradients():
    """The idle rank's dummy: a backward that every parameter takes part in."""
    model, (token_ids, positions, cu_seqlens) = small_model(), packed_tokens()
    targets = torch.full_like(token_ids, -1)
    logprobs, _ = model(token_ids, positions, packed_attention(cu_seqlens), targets)
    assert logprobs.shape == token_ids.shape and not logprobs.any()
    grads = gradients(model, logprobs.sum())
    assert all(not g.any() for g in grads.values()) and len(grads) == 24


def test_recompute_changes_no_gradient():
    model, (token_ids, positions, cu_seqlens) = small_model(), packed_tokens()
    grads = []
    for recompute in (False, True):
        for block in model.layers:
            block.recompute = recompute
        attend = packed_attention(cu_seqlens)
        logprobs, _ = model(token_ids, positions, attend, some_targets(token_ids))
        grads.append(gradients(model, logprobs.sum()))
    assert_same_gradients(*grads, 1e-6)


def cached_attention():
    """attend that keeps k and v of one sequence: what an engine's cache does, in ten lines."""
    cache = {}

    def attend(layer, q, k, v):
        old = cache.get(layer, (k[:0], v[:0]))
        k, v = cache[layer] = tuple(torch.cat(pair) for pair in zip(old, (k, v)))
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def test_a_sequence_in_chunks_over_a_cache_equals_it_whole():
    model, (token_ids, positions, cu_seqlens) = small_model(), packed_tokens([30])
    attend = cached_attention()
    chunks = ((0, 12), (12, 13), (13, 30))
    parts = [model(token_ids[a:b], positions[a:b], attend) for a, b in chunks]
    whole = model(token_ids, positions, packed_attention(cu_seqlens))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_meta_device_and_no_buffers():
    with torch.device("meta"):
        model = Model(SMALL)
    assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())
    model.to_empty(device="cpu")
    init_weights(model, 3)
    want = Model(SMALL)
    init_weights(want, 3)
    for name, p in want.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name


def test_init_weights_scales():
    model = Model(dataclasses.replace(CONFIGS["qwen2 untied"], vocab_size=2000, hidden_size=64))
    init_weights(model, 0)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.2, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.layers[0].self_attn.q_proj.bias.any() and (model.norm.weight == 1).all()


def test_training_works_after_the_engine_ran_in_inference_mode():
    config = dataclasses.replace(SMALL, rope_theta=77.0)  # not yet in the cache of frequencies
    model, (token_ids, positions, cu_seqlens) = small_model(config), packed_tokens()
    with torch.inference_mode():
        model(token_ids, positions, packed_attention(cu_seqlens))
    assert not inverse_frequencies(16, 77.0, token_ids.device).is_inference()
    model(token_ids, positions, packed_attention(cu_seqlens)).sum().backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_bfloat16_stays_near_float32():
    model, (token_ids, positions, cu_seqlens) = small_model(noise=0.05), packed_tokens()
    targets, attend = some_targets(token_ids), packed_attention(cu_seqlens)
    want, _ = model(token_ids, positions, attend, targets)
    got, _ = model.bfloat16()(token_ids, positions, attend, targets)
    assert got.dtype == torch.float32
    assert 0 < (got - want).abs().max() < 0.2 and (got - want).abs().mean() < 0.02


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_fsdp_from_outside_changes_nothing():
    """fully_shard on blocks and root, recompute on: the head's weight is whole inside forward."""
    from torch.distributed.fsdp import fully_shard

    (token_ids, positions, cu_seqlens), want = packed_tokens(), small_model()
    targets, attend = some_targets(token_ids), packed_attention(cu_seqlens)
    want_logprobs, _ = want(token_ids, positions, attend, targets)
    want_logprobs.sum().backward()
    with one_rank():
        model = small_model()
        for block in model.layers:
            block.recompute = True
            fully_shard(block)
        fully_shard(model)
        logprobs, _ = model(token_ids, positions, attend, targets)
        logprobs.sum().backward()
        for name, p in model.named_parameters():
            got = p.grad.full_tensor()
            torch.testing.assert_close(got, want.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs, want_logprobs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_packed_attention_on_a_gpu_equals_the_cpu():
    token_ids, positions, cu_seqlens = packed_tokens()
    model = small_model(noise=0.05)
    want = model(token_ids, positions, packed_attention(cu_seqlens))
    inputs = (token_ids.cuda(), positions.cuda(), packed_attention(cu_seqlens.cuda()))
    got = model.cuda()(*inputs)  # float32: SDPA
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    got = model.bfloat16()(*inputs)  # variable-length attention
    assert (got.float().cpu() - want).abs().mean() < 0.02


# ---- parity with transformers ----


def transformers_model(config, seed=0):
    hf = pytest.importorskip("transformers", reason="parity oracle, requirements-parity.txt")
    kind, fields = ("Qwen3", {"head_dim": config.head_dim}) if config.qk_norm else ("Qwen2", {})
    hf_config = getattr(hf, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        **fields,
    )
    model = getattr(hf, f"{kind}ForCausalLM")(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return model


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_equal_transformers_also_with_a_cache_step(config, tmp_path):
    oracle = transformers_model(config)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.config == config
    token_ids, positions, cu_seqlens = packed_tokens()
    got = model.logits(model(token_ids, positions, packed_attention(cu_seqlens)))
    want = torch.cat([oracle(ids[None]).logits[0] for ids in token_ids.split(LENGTHS)])
    assert want.std() > 0.5  # the check has teeth
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    ids, attend, past = token_ids[:20], cached_attention(), None
    for a, b in ((0, 18), (18, 19), (19, 20)):
        got = model.logits(model(ids[a:b], torch.arange(a, b), attend))
        step = oracle(ids[None, a:b], past_key_values=past, use_cache=True)
        past = step.past_key_values
        torch.testing.assert_close(got, step.logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3 tied", "qwen2 untied"])
def test_greedy_engine_equals_transformers_generate_on_64_ragged_prompts(kind, tmp_path):
    oracle = transformers_model(CONFIGS[kind])
    oracle.save_pretrained(tmp_path)
    engine = Engine(load_model(tmp_path).eval(), num_blocks=512, block_size=16)
    rng = random.Random(0)
    prompts = [rng.choices(range(96), k=rng.randint(1, 40)) for _ in range(64)]
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, max_new_tokens=16, noise_key=i, stop_ids=(), temperature=0.0)
    got = {}
    while engine.has_runnable():
        got.update((turn.seq_id, list(turn.token_ids)) for turn in engine.step())
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    how = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
    want = oracle.generate(padded, attention_mask=real, **how)[:, longest:]
    assert [got[i] for i in range(64)] == want.tolist()
    assert len({tuple(row) for row in want.tolist()}) > 32  # they do not all say the same


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_reads_what_save_model_wrote(config, max_shard_bytes, tmp_path):
    hf = pytest.importorskip("transformers", reason="parity oracle, requirements-parity.txt")
    model = small_model(config, noise=0.15)
    save_model(model, config, tmp_path, max_shard_bytes, fields={"eos_token_id": 7})
    oracle, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert oracle.config.eos_token_id == 7
    assert next(oracle.parameters()).dtype == torch.float32
    token_ids, positions, cu_seqlens = packed_tokens([40])
    got = model.logits(model(token_ids, positions, packed_attention(cu_seqlens)))
    torch.testing.assert_close(got, oracle(token_ids[None]).logits[0], rtol=0, atol=1e-5)


def test_sharded_bfloat16_folder_of_transformers(tmp_path):
    oracle = transformers_model(CONFIGS["qwen2 untied"]).bfloat16()
    oracle.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = load_model(tmp_path)
    for name, p in oracle.named_parameters():
        got = model.get_parameter(name.removeprefix("model."))
        assert got.dtype == torch.bfloat16 and torch.equal(got, p), name
    assert load_model(tmp_path, dtype=torch.float32).norm.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_package_reads_ours_and_we_read_its(dtype, tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="oracle, requirements-parity.txt")
    save_model(small_model(), SMALL, tmp_path, dtype=dtype)
    ours = package.load_file(tmp_path / "model.safetensors")
    want = {name: tensor.to(dtype) for name, tensor in small_model().state_dict().items()}
    assert ours.keys() == {f"model.{name}" for name in want}
    assert all(torch.equal(ours[f"model.{name}"], want[name]) for name in want)
    package.save_file({f"model.{k}": v for k, v in want.items()}, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())


# ---- folders ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_save_and_load_keep_every_bit(config, dtype, tmp_path):
    model = small_model(config).to(dtype)
    save_model(model, config, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == config
    for name, p in model.named_parameters():
        assert torch.equal(p, loaded.get_parameter(name)) and p.dtype == dtype


def test_shards_have_the_given_size_and_no_old_file_stays(tmp_path):
    model = small_model()
    save_model(model, SMALL, tmp_path, max_shard_bytes=13_000)  # the embedding has 12,288
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "model.safetensors").exists()
    assert all(sum(t.nbytes for t in read_safetensors(s).values()) <= 13_000 for s in shards)
    header_sizes = [int.from_bytes(s.read_bytes()[:8], "little") for s in shards]
    assert all(size % 8 == 0 for size in header_sizes)  # tensors are aligned
    state = dict(load_model(tmp_path).state_dict())
    save_model(state, SMALL, tmp_path)  # a dict of tensors, over the shards
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert torch.equal(load_model(tmp_path).norm.weight, model.norm.weight)
    save_model(state, SMALL, tmp_path, max_shard_bytes=1)  # every tensor larger: a file of its own
    assert len(list(tmp_path.glob("model-*.safetensors"))) == len(state)
    load_model(tmp_path)


def test_a_rank_reads_only_its_rows(tmp_path):
    """A sparse file of 64 MB: eight rows bring in a few pages, all rows bring in all of it."""

    def resident():
        try:
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096
        except OSError:
            pytest.skip("resident memory is read from /proc")

    entry = {"dtype": "F32", "shape": [65536, 256], "data_offsets": [0, 1 << 26]}
    header = json.dumps({"x": entry})
    with open(tmp_path / "x.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header.encode())
        f.truncate(8 + len(header) + (1 << 26))
    before = resident()
    x = read_safetensors(tmp_path / "x.safetensors")["x"]
    rows = x[40_000:40_008].clone()
    assert rows.shape == (8, 256) and not rows.any()
    assert resident() - before < 1 << 24
    assert x.sum() == 0 and resident() - before > 1 << 25  # the control


def test_rank_shards_of_a_stored_weight_make_the_whole(tmp_path):
    save_model(small_model(), SMALL, tmp_path, max_shard_bytes=20_000)
    stored = stored_weights(tmp_path, SMALL)
    whole = small_model().embed_tokens.weight
    parts = [stored["embed_tokens.weight"][rank * 25 : (rank + 1) * 25] for rank in range(5)]
    assert parts[3].shape[0] == 21 and parts[4].shape[0] == 0
    assert torch.equal(torch.cat(parts), whole)


def test_a_header_that_is_not_padded_is_read_right(tmp_path):
    """Tensors at odd addresses."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (len(header) % 2 + 1)
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<ff", 1.5, -2.0))
    assert len(header) % 2 == 1 and read_safetensors(path)["x"].tolist() == [1.5, -2.0]


def edit_config(folder, **changes):
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))


@pytest.mark.parametrize("kind", ["qwen3 tied", "qwen2 untied"])
def test_config_in_old_and_new_spelling(kind, tmp_path):
    save_model(small_model(CONFIGS[kind]), CONFIGS[kind], tmp_path)
    assert read_config(tmp_path) == CONFIGS[kind]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    edit_config(tmp_path, rope_theta="absent", rope_parameters=rope, torch_dtype="absent")
    edit_config(tmp_path, dtype="float32", layer_types=["full_attention"] * 2)
    assert read_config(tmp_path) == CONFIGS[kind]
    edit_config(tmp_path, rope_theta=10000, rope_scaling=None, sliding_window=4096)
    assert read_config(tmp_path) == CONFIGS[kind]


def test_qwen2_without_head_dim(tmp_path):
    save_model(small_model(QWEN2), QWEN2, tmp_path)
    edit_config(tmp_path, head_dim="absent", tie_word_embeddings=True)
    assert read_config(tmp_path) == QWEN2


def test_tied_folder_that_holds_the_head_too(tmp_path):
    """Qwen3-0.6B does. Equal: fine. Another matrix: it is not clear which one is meant."""
    model = small_model()
    head = {"lm_head.weight": model.embed_tokens.weight.clone()}
    save_model({**model.state_dict(), **head}, SMALL, tmp_path)
    assert torch.equal(load_model(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    head["lm_head.weight"][3, 3] += 1
    save_model({**model.state_dict(), **head}, SMALL, tmp_path)
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_model(tmp_path)


BAD_CONFIGS = {
    "another architecture": (dict(model_type="llama"), "model_type is 'llama'"),
    "experts": (dict(model_type="qwen3_moe"), "model_type"),
    "no model type": (dict(model_type="absent"), "model_type"),
    "a list as model type": (dict(model_type=["qwen3"]), "model_type"),
    "classifier": (dict(architectures=["Qwen3ForSequenceClassification"]), "architectures"),
    "yarn, old": (dict(rope_scaling=dict(type="yarn", factor=4.0)), "rope_scaling.type is 'yarn'"),
    "yarn, new": (dict(rope_parameters=dict(rope_type="yarn")), "rope_parameters.rope_type"),
    "rope as text": (dict(rope_scaling="linear"), "rope_scaling"),
    "two bases": (dict(rope_parameters=dict(rope_theta=5e5)), "rope_theta is 500000.0"),
    "half rotary": (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "no base": (dict(rope_theta="absent"), "rope_theta is None"),
    "window": (dict(use_sliding_window=True), "use_sliding_window"),
    "window in layers": (dict(layer_types=["sliding_attention"] * 2), "layer_types"),
    "layer types as a number": (dict(layer_types=5), "layer_types"),
    "bias": (dict(attention_bias=True), "attention_bias"),
    "gelu": (dict(hidden_act="gelu"), "hidden_act"),
    "quantised": (dict(quantization_config=dict(bits=4)), "quantization_config"),
    "no eps": (dict(rms_norm_eps="absent"), "rms_norm_eps"),
    "eps 0": (dict(rms_norm_eps=0), "rms_norm_eps"),
    "no head_dim": (dict(head_dim="absent"), "head_dim"),
    "size as text": (dict(hidden_size="32"), "hidden_size is '32'"),
    "size as fraction": (dict(hidden_size=32.0), "hidden_size"),
    "size as truth": (dict(num_hidden_layers=True), "num_hidden_layers"),
    "negative size": (dict(intermediate_size=-48), "intermediate_size"),
    "monstrous size": (dict(vocab_size=10**15), "vocab_size"),
    "heads do not divide": (dict(num_key_value_heads=3), "heads % KV heads"),
    "odd head": (dict(head_dim=15), "head_dim"),
    "tied by text": (dict(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "more layers": (dict(num_hidden_layers=3), "layers.2"),
    "fewer layers": (dict(num_hidden_layers=1), "layers.1"),
    "absurdly many layers": (dict(num_hidden_layers=10**6), "1000000 layers"),
    "another size": (dict(intermediate_size=64), "mlp"),
    "largest sizes": (dict(hidden_size=2**19, num_attention_heads=2**19, head_dim=2**18), "weight"),
    "untied": (dict(tie_word_embeddings=False), "lm_head.weight"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_config_is_refused_by_the_name_of_the_field(case, tmp_path):
    changes, words = BAD_CONFIGS[case]
    save_model(small_model(), SMALL, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


# ---- damaged files ----


def parts(path):
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def put(path, header, data, header_size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", header_size or len(text)) + text + data)


def with_entry(name, **changes):
    def damage(path):
        header, data = parts(path)
        header[name].update(changes)
        put(path, {k: v for k, v in header.items() if v != "absent"}, data)

    return damage


def with_header(change):
    def damage(path):
        header, data = parts(path)
        text = json.dumps(header)
        put(path, change(text).encode("utf-8", "surrogateescape"), data)

    return damage


def truncated(path, num_bytes=1):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def swap_in(path, old, new):
    header, data = parts(path)
    header[new] = header.pop(old)
    put(path, header, data)


NORM = "model.norm.weight"  # 32 floats, the last tensor but for the head
DAMAGES = {
    "empty": (lambda p: p.write_bytes(b""), "header"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "header"),
    "header of 2^60 bytes": (lambda p: put(p, b"{}", b"", 1 << 60), "header"),
    "header longer than the file": (lambda p: put(p, b"{}", b"", 3), "header"),
    "header cut short": (lambda p: put(p, *parts(p), header_size=40), "JSON"),
    "not JSON": (lambda p: put(p, b"hello", b""), "JSON"),
    "a JSON list": (lambda p: put(p, b"[]", b""), "JSON"),
    "not UTF-8": (with_header(lambda t: t.replace("norm", "n\udcff")), "JSON"),
    "nested 10^6 deep": (lambda p: put(p, b"[" * 10**6, b""), "JSON"),
    "10^5 digits": (with_header(lambda t: t.replace("[32]", f"[{'9' * 10**5}]")), "JSON"),
    "key twice": (with_header(lambda t: t[:-1] + "," + t[1:]), "twice"),
    "key twice inside": (with_header(lambda t: t.replace('"dtype"', '"shape":5,"dtype"')), "twice"),
    "no tensor at all": (lambda p: put(p, b"{}", b""), "0 tensors"),
    "truncated data": (truncated, "norm"),
    "truncated by much": (lambda p: truncated(p, 9000), "not at"),
    "bytes at the end": (lambda p: p.write_bytes(p.read_bytes() + b"0"), "no tensor"),
    "entry is a number": (with_header(lambda t: t[:-1] + ', "x": 5}'), "'x'"),
    "entry is empty": (with_header(lambda t: t[:-1] + ', "x": {}}'), "'x'"),
    "dtype unknown": (with_entry(NORM, dtype="F33"), f"{NORM!r} is 'F33'"),
    "dtype is quantised": (with_entry(NORM, dtype="F8_E4M3"), "BF16"),
    "dtype is a list": (with_entry(NORM, dtype=["F32"]), NORM),
    "dtype of another size": (with_entry(NORM, dtype="F16"), NORM),
    "dtype of whole numbers": (with_entry(NORM, dtype="I32"), NORM),
    "shape of another size": (with_entry(NORM, shape=[31]), NORM),
    "shape of the same size": (with_entry(NORM, shape=[4, 8]), NORM),
    "shape negative": (with_entry(NORM, shape=[-4, -8]), NORM),
    "shape of fractions": (with_entry(NORM, shape=[32.0]), NORM),
    "shape is text": (with_entry(NORM, shape="32"), NORM),
    "shape of truth": (with_entry(NORM, shape=[True, 32]), NORM),
    "shape overflows": (with_entry(NORM, shape=[1 << 40, 1 << 40, 0]), NORM),
    "shape has 1,000 dimensions": (with_entry(NORM, shape=[1] * 999 + [32]), NORM),
    "shape is no more": (with_entry(NORM, shape=[]), NORM),
    "offsets outside": (with_entry(NORM, data_offsets=[1 << 50, (1 << 50) + 128]), NORM),
    "offsets beyond integers": (with_entry(NORM, data_offsets=[1 << 80, (1 << 80) + 128]), NORM),
    "offsets negative": (with_entry(NORM, data_offsets=[-128, 0]), NORM),
    "offsets backwards": (with_entry(NORM, data_offsets=[128, 0]), NORM),
    "offsets overlap": (with_entry(NORM, data_offsets=[0, 128]), "at 0 to"),
    "offsets are three": (with_entry(NORM, data_offsets=[0, 128, 256]), NORM),
    "offsets are text": (with_entry(NORM, data_offsets=["0", "128"]), NORM),
    "a tensor is missing": (lambda p: swap_in(p, NORM, "model.n"), "'model.n'"),
    "name is a surrogate": (lambda p: swap_in(p, NORM, "\ud800"), NORM),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_file_gives_one_sentence(case, tmp_path):
    damage, words = DAMAGES[case]
    save_model(small_model(), SMALL, tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


def test_extra_tensor_is_refused(tmp_path):
    state = {**small_model().state_dict(), "layers.0.self_attn.sinks": torch.zeros(4)}
    save_model(state, SMALL, tmp_path)
    with pytest.raises(ValueError, match="model.layers.0.self_attn.sinks.*unknown"):
        load_model(tmp_path)


def with_index(change):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = change(index["weight_map"])
        path.write_text(json.dumps(index))

    return damage


LAST = "model-00004-of-00004.safetensors"


def moved(weight_map):
    """Says that the norm is in the first file."""
    return {**weight_map, NORM: min(weight_map.values())}


DAMAGED_FOLDERS = {
    "shard is missing": (lambda d: (d / LAST).unlink(), FileNotFoundError, LAST),
    "shard is truncated": (lambda d: truncated(d / LAST), ValueError, LAST),
    "index is missing": (
        lambda d: (d / "model.safetensors.index.json").unlink(), FileNotFoundError, "index.json",
    ),
    "config is missing": (lambda d: (d / "config.json").unlink(), FileNotFoundError, "config.json"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), ValueError, "config.json"),
    "config is empty": (lambda d: (d / "config.json").write_text(""), ValueError, "config.json"),
    "index without map": (with_index(lambda m: None), ValueError, "weight_map"),
    "index with numbers": (with_index(lambda m: {**m, NORM: 4}), ValueError, "weight_map"),
    "index is empty": (with_index(lambda m: {}), ValueError, "0 tensors"),
    "index misses a tensor": (
        with_index(lambda m: {k: v for k, v in m.items() if k != NORM}), ValueError, NORM,
    ),
    "index has one more": (with_index(lambda m: {**m, "model.x": LAST}), ValueError, "model.x"),
    "index says another file": (with_index(moved), ValueError, NORM),
    "index points elsewhere": (
        lambda d: with_index(lambda m: {**m, NORM: f"../{d.name}/{LAST}"})(d),
        FileNotFoundError, f"/{LAST}",
    ),
    "index names a folder": (with_index(lambda m: {**m, NORM: "."}), FileNotFoundError, NORM),
    "index names nothing": (with_index(lambda m: {**m, NORM: ""}), FileNotFoundError, NORM),
    "index names a NUL": (with_index(lambda m: {**m, NORM: "\0"}), FileNotFoundError, NORM),
    "index names a surrogate": (
        with_index(lambda m: {**m, NORM: "\ud800"}), FileNotFoundError, NORM,
    ),
    "index names the config": (
        with_index(lambda m: {**m, NORM: "config.json"}), ValueError, "config.json",
    ),
    "both kinds": (lambda d: (d / "model.safetensors").write_bytes(b""), ValueError, "delete"),
    "tensor in two shards": (
        lambda d: (d / LAST).write_bytes((d / LAST.replace("4-", "3-", 1)).read_bytes()),
        ValueError, "differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED_FOLDERS)
def test_damaged_folder_gives_one_sentence(case, tmp_path):
    damage, error_type, words = DAMAGED_FOLDERS[case]
    save_model(small_model(), SMALL, tmp_path, max_shard_bytes=30_000)
    assert (tmp_path / LAST).exists() and len(load_model(tmp_path).layers) == 2
    damage(tmp_path)
    with pytest.raises(error_type) as error:
        load_model(tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        load_model(tmp_path / "nowhere")


# ---- fuzz ----


def loads_right_or_refuses(folder, want) -> bool:
    """-> whether it loaded; anything but the right model or a refusal fails the test."""
    try:
        model = load_model(folder)
    except (ValueError, FileNotFoundError) as error:
        assert str(error)
        return False
    for name, p in want.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name
    return True


@pytest.mark.parametrize("file", [LAST, "model.safetensors.index.json"])
def test_flipped_bytes_of_header_and_index(file, tmp_path):
    """Seeded. In the tensors' own bytes a flip cannot be seen: the format has no checksum."""
    want, rng, loaded = small_model(), random.Random(0), 0
    save_model(want, SMALL, tmp_path, max_shard_bytes=30_000)
    path = tmp_path / file
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0] if file == LAST else len(good)
    for _ in range(300):
        place, bad = rng.randrange(end), bytearray(good)
        bad[place] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256)
        path.write_bytes(bad)
        loaded += loads_right_or_refuses(tmp_path, want)
    assert 0 < loaded < 200  # white space and metadata may change


def test_flipped_bytes_of_the_config(tmp_path):
    """What is still a valid config of these shapes loads (a digit of rope_theta cannot be seen)."""
    want, rng, loaded = small_model(), random.Random(1), 0
    save_model(want, SMALL, tmp_path)
    path = tmp_path / "config.json"
    good = path.read_bytes()
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        loaded += loads_right_or_refuses(tmp_path, want)
    assert 0 < loaded < 200


def test_every_truncation_is_refused(tmp_path):
    sizes = dict(vocab_size=4, hidden_size=4, head_dim=2, intermediate_size=4)
    config = dataclasses.replace(SMALL, **sizes)
    model = small_model(config)
    save_model(model, config, tmp_path)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert not loads_right_or_refuses(tmp_path, model)
