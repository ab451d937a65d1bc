"""The engine beside HF generate on one CPU thread: CPU seconds, interleaved, median of five.

A random Qwen3 (4 layers, hidden 256, 8 query and 2 KV heads of 32, FFN 768, vocabulary 4,096),
64 prompts of 16 to 128 tokens, greedy, every sequence with a length of its own:

    W1  int(1.17 * 1.1 ** ((i * 29) % 64)) + 8          a long tail, as reasoning has it
    W2  8 + (i * 53) % 64 + 128 * (i % 16 == 0)         flat, with four long ones

HF decodes a batch until its longest sequence ends, `waste` = 64 x longest / sum. It gets one
left-padded batch, and in another row four batches sorted by length, which nobody knows beforehand.
The engine returns log-probabilities and entropies, with its prefix cache on. The floor is the
engine's matmuls alone, in the same shapes.

Then what agents need: a group of 32 on one prompt, and traces of three turns with tool responses;
tokens computed against the fewest possible, and seconds against prefilling everything again.

Run: python benchmarks/engine.py [--rounds 5]        (needs transformers)
"""

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import model
from kvcache_engine import Engine
from model import Model, ModelConfig

VOCAB = 4096
W1 = [int(1.17 * 1.1 ** ((i * 29) % 64)) + 8 for i in range(64)]
W2 = [8 + (i * 53) % 64 + 128 * (i % 16 == 0) for i in range(64)]


def models():
    """The same weights twice."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, intermediate_size=768, rope_theta=1e6,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    hf = Qwen3ForCausalLM(config).eval()
    ours = Model(ModelConfig(VOCAB, 256, 4, 8, 2, 32, 768)).eval()
    ours.load_state_dict({k.removeprefix("model."): v for k, v in hf.state_dict().items()})
    return hf, ours


def random_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def cpu_seconds(f, *args):
    begin = time.process_time()
    result = f(*args)
    return time.process_time() - begin, result


def hf_generate(hf, prompts, lengths, num_batches):
    """Left-padded, until the longest of a batch ends; every output is cut to its own length."""
    order = sorted(range(len(prompts)), key=lambda i: lengths[i]) if num_batches > 1 else None
    order = order or list(range(len(prompts)))
    outputs, size = {}, len(prompts) // num_batches
    for at in range(0, len(order), size):
        batch = order[at : at + size]
        width, longest = max(len(prompts[i]) for i in batch), max(lengths[i] for i in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            ids[row, -len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, -len(prompts[i]) :] = 1
        how = GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            out = hf.generate(ids, attention_mask=mask, generation_config=how)
        for row, i in enumerate(batch):
            outputs[i] = out[row, width : width + lengths[i]].tolist()
    return [outputs[i] for i in range(len(prompts))]


def engine_generate(net, prompts, lengths, **engine_args):
    engine = Engine(net, num_blocks=2048, **engine_args)
    for i, (prompt, n) in enumerate(zip(prompts, lengths)):
        engine.add(i, prompt, max_new_tokens=n, noise_key=i, temperature=0.0)
    outputs = {}
    while engine.has_runnable():
        for turn in engine.step():
            outputs[turn.seq_id] = turn.token_ids
            engine.finish(turn.seq_id)
    return [outputs[i] for i in range(len(prompts))], engine.counters


def matmul_floor(net, prompts, lengths):
    """CPU seconds of the linear layers alone: those of the engine again, on as many rows."""
    calls, linears = [], model.linears
    model.linears = lambda x, *layers: (calls.append((x.shape, layers)), linears(x, *layers))[1]
    engine_generate(net, prompts, lengths)
    model.linears = linears
    widest = max(rows for (rows, _), _ in calls)
    inputs = {width: torch.randn(widest, width) for (_, width), _ in calls}

    def run():
        for (rows, width), layers in calls:
            linears(inputs[width][:rows], *layers)

    with torch.inference_mode():
        return cpu_seconds(run)[0]


def compare(hf, ours, name, lengths, rounds):
    prompts = random_prompts([16 + (i * 37) % 113 for i in range(64)])
    seconds = {"hf": [], "hf sorted": [], "engine": [], "floor": []}
    for _ in range(rounds):
        for row, f, args in (
            ("hf", hf_generate, (hf, prompts, lengths, 1)),
            ("hf sorted", hf_generate, (hf, prompts, lengths, 4)),
            ("engine", engine_generate, (ours, prompts, lengths)),
        ):
            used, result = cpu_seconds(f, *args)
            seconds[row].append(used)
            if row == "hf":
                expected = result
            elif row == "engine":
                equal = sum(a == b for a, b in zip(expected, result[0]))
        seconds["floor"].append(matmul_floor(ours, prompts, lengths))
    median = {row: statistics.median(values) for row, values in seconds.items()}
    waste = 64 * max(lengths) / sum(lengths)
    print(f"{name}: {sum(lengths)} tokens, longest {max(lengths)}, waste {waste:.2f}x,", end=" ")
    print(f"outputs equal to HF's {equal} of 64")
    for row, label in (
        ("hf", "HF, one batch"),
        ("hf sorted", "HF, four batches by length"),
        ("engine", "engine"),
        ("floor", "  its matmuls alone"),
    ):
        low, high = min(seconds[row]), max(seconds[row])
        print(
            f"  {label:28}{median[row]:7.2f} CPU s  ({low:.2f} to {high:.2f})"
            f"{median['hf'] / median[row]:7.2f}x"
        )


def group(net):
    """32 rollouts of one 400-token prompt, 64 tokens each, in one go."""
    prompts, lengths = random_prompts([400]) * 32, [64] * 32
    shared, (_, counters) = cpu_seconds(lambda: engine_generate(net, prompts, lengths))
    again, (_, naive) = cpu_seconds(
        lambda: engine_generate(net, prompts, lengths, prefix_cache=False)
    )
    print(f"group of 32 on one 400-token prompt: prefill {counters.prefill} tokens", end=" ")
    print(f"(fewest 400, without sharing {naive.prefill}),", end=" ")
    print(f"{shared:.2f} CPU s against {again:.2f}: {again / shared:.2f}x")


def traces(net, keep_blocks):
    """32 traces: a prompt of 100, three turns of 48 sampled tokens, two tool responses of 40."""
    engine = Engine(net, num_blocks=2048, prefix_cache=keep_blocks)
    trace = dict(enumerate(random_prompts([100] * 32)))
    responses = random_prompts([40] * 64, seed=1)
    turn_of = dict.fromkeys(trace, 0)
    how = dict(noise_key=0, temperature=0.0, max_new_tokens=48)
    for i, prompt in trace.items():
        engine.add(i, prompt, **how)
    while engine.has_runnable():
        for turn in engine.step():
            i = turn.seq_id
            turn_of[i] += 1
            response = responses[2 * i + turn_of[i] - 1] if turn_of[i] < 3 else []
            trace[i] = trace[i] + turn.token_ids + response
            if turn_of[i] < 3 and keep_blocks:
                engine.extend(i, response, 48)
                continue
            engine.finish(i)
            if turn_of[i] < 3:
                engine.add(i, trace[i], **how)
    return trace, engine.counters


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hf, ours = models()
    compare(hf, ours, "W1", W1, args.rounds)
    compare(hf, ours, "W2", W2, args.rounds)
    group(ours)
    kept, (trace, counters) = cpu_seconds(traces, ours, True)
    again, (same, naive) = cpu_seconds(traces, ours, False)
    fewest = 32 * (100 + 2 * 40)
    print(f"32 traces of three turns: prefill {counters.prefill} tokens (fewest {fewest},", end=" ")
    print(f"prefilling every turn again {naive.prefill}),", end=" ")
    print(f"{kept:.2f} CPU s against {again:.2f}: {again / kept:.2f}x,", end=" ")
    print(f"same tokens {sum(trace[i] == same[i] for i in trace)} of 32")


if __name__ == "__main__":
    main()
