"""kvcache_engine.py: blocks under random load; the same bits however a sequence is scheduled."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcache_engine
import model
from kvcache_engine import BlockManager, Engine, Sequence
from model import Model, ModelConfig, init_weights, packed_attention, save_model
from tokenizer import Tokenizer

VOCAB = 96
# FFN a multiple of 32: torch's silu rounds what is left over after whole vectors in another way.
CONFIG = ModelConfig(VOCAB, 32, 2, 4, 2, 8, 64, max_positions=512)


def tiny_model(seed=0, config=CONFIG):
    net = Model(config).eval()
    init_weights(net, seed, embedding_std=1.0, std=0.3)  # sharp enough to differ, not to repeat
    return net


MODEL = tiny_model()


def tokens(n, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=n)


def run_until_idle(engine):
    turns = {}
    while engine.has_runnable():
        for turn in engine.step():
            turns[turn.seq_id] = turn
    return turns


def generate(engine, prompts, max_new_tokens, **how):
    """One turn for each prompt, in order."""
    for i, (prompt, n) in enumerate(zip(prompts, max_new_tokens)):
        engine.add(("generate", i), prompt, max_new_tokens=n, noise_key=i, **how)
    turns = run_until_idle(engine)
    for seq_id in turns:
        engine.finish(seq_id)
    return [turns["generate", i] for i in range(len(prompts))]


# ---- blocks ----


def sequence(token_ids, arrival=0):
    return Sequence(arrival, arrival, list(token_ids), 0, (), 1.0, 1.0, len(token_ids), 10**9)


def place(blocks, seq):
    """share, take what is missing, copy: what the step plan does with a sequence without blocks."""
    blocks.share(seq)
    grow(blocks, seq)
    blocks.copy_partial(seq)


def grow(blocks, seq):
    blocks.grow(seq, -(-len(seq.token_ids) // blocks.block_size) - len(seq.block_table))


def compute_all(blocks, seq, partial=True):
    seq.num_computed = len(seq.token_ids)
    blocks.remember(seq, partial)


def test_a_prompt_is_shared_by_full_blocks_and_a_copy_of_the_rest():
    """Blocks of 4, a prompt of 10: two full blocks are shared, one of the last two tokens is copied
    (the last one must be computed). A prompt of 8 shares one block and copies 3 of the second."""
    blocks = BlockManager(10, 4, 100)
    first, second, third = (sequence(range(n)) for n in (10, 10, 8))
    place(blocks, first)
    assert first.num_computed == 0 and blocks.copies == []
    compute_all(blocks, first)
    place(blocks, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed == 9
    assert blocks.copies == [(first.block_table[2], second.block_table[2])]
    place(blocks, third)
    assert third.block_table[0] == first.block_table[0] and third.num_computed == 7
    assert [blocks.ref_counts[b] for b in first.block_table] == [3, 2, 1]


def test_equal_hashes_of_other_tokens_are_no_hit():
    """Python's ints have equal hashes 2^61 - 1 apart, and so have tuples of them."""
    mine, other = tuple(range(8)), (0, 1, 2, 3 + 2**61 - 1, *range(4, 8))
    assert hash(mine[:4]) == hash(other[:4])
    blocks = BlockManager(10, 4, 100)
    first, second = sequence(mine), sequence(other)
    place(blocks, first)
    compute_all(blocks, first)
    place(blocks, second)
    assert not set(first.block_table) & set(second.block_table)
    assert second.num_computed == 3  # by the copy of the equal tokens


def test_the_same_block_after_another_prefix_is_no_hit():
    blocks = BlockManager(10, 2, 100)
    first, second = sequence([1, 2, 3, 4, 5]), sequence([9, 9, 3, 4, 5])
    place(blocks, first)
    compute_all(blocks, first)
    place(blocks, second)
    assert second.num_computed == 0


def test_least_recently_used_blocks_are_taken_first_and_tails_before_heads():
    blocks = BlockManager(6, 2, 100)
    old, new = sequence([1, 2, 3, 4, 5]), sequence([6, 7, 8, 9, 0])
    for seq in (old, new):
        place(blocks, seq)
        compute_all(blocks, seq)
    blocks.release(old)
    blocks.release(new)
    filler = sequence([50, 51, 52, 53])
    place(blocks, filler)  # takes the last two of the older one's three blocks
    for token_ids, expected in (([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9, 0], 4)):
        seq = sequence(token_ids)
        blocks.share(seq)
        assert seq.num_computed == expected
        blocks.release(seq)


def test_blocks_keep_their_books_in_10000_random_steps():
    """A memory of token ids stands for K and V: every sequence must read its own tokens from it."""
    rng = random.Random(0)
    blocks, memory, live = BlockManager(24, 4, 96), np.full((24, 4), -1), []
    prefixes = [rng.choices(range(3), k=18) for _ in range(3)]
    seen = Counter()

    def write(seq, n):
        for at in range(seq.num_computed, seq.num_computed + n):
            block = seq.block_table[at // 4]
            assert blocks.ref_counts[block] == 1, "written by one, held by several"
            memory[block, at % 4] = seq.token_ids[at]
        seq.num_computed += n

    for step in range(10_000):
        what = rng.choice(["arrive", "compute", "compute", "compute", "append", "leave", "drop"])
        seq = rng.choice(live) if live else None
        if what == "arrive" or not live:
            prompt = rng.choice(prefixes)[: rng.randint(1, 18)] + rng.choices(range(3), k=2)
            if len(blocks.unreferenced) > 6 and len(live) < 8:
                seq = sequence(prompt, step)
                live.append(seq)
        elif what == "append":
            seq.token_ids.append(rng.randrange(3))
        elif what == "leave" and rng.random() < 0.3:
            live.remove(seq)
            blocks.release(seq)
        elif what == "drop":
            blocks.remember(seq, partial=True)
            blocks.release(seq)
        elif what == "compute" and seq.num_missing:
            need = -(-len(seq.token_ids) // 4) - len(seq.block_table)
            if need <= len(blocks.unreferenced):
                if seq.block_table:
                    grow(blocks, seq)
                else:
                    place(blocks, seq)
                    seen["found"] += seq.num_computed > 0
                    seen["copied"] += len(blocks.copies)
                sources = [memory[a].copy() for a, _ in blocks.copies]
                for (_, target), content in zip(blocks.copies, sources):
                    memory[target] = content
                blocks.copies.clear()
                write(seq, rng.randint(1, seq.num_missing))
                blocks.remember(seq, partial=rng.random() < 0.5)
        held = Counter(b for s in live for b in s.block_table)
        assert blocks.ref_counts == [held[b] for b in range(24)]
        assert set(blocks.unreferenced) == set(range(24)) - set(held)
        rows = [s.table_row for s in live if s.block_table]
        assert sorted(rows + blocks.free_rows) == list(range(24))
        for s in live:
            read = memory[s.block_table].flatten()[: s.num_computed]
            assert read.tolist() == s.token_ids[: s.num_computed]
            assert blocks.tables[s.table_row, : len(s.block_table)].tolist() == s.block_table
        for block, (_, token_ids) in blocks.contents.items():
            assert tuple(memory[block, : len(token_ids)]) == token_ids
        seen["taken again"] += len(blocks.contents) == 24
    assert min(seen.values()) > 100 and len(seen) == 3, seen


# ---- the same bits however it is scheduled ----


def script(i):
    """(prompt, tool responses): 64 sequences of 8 problems, one to three turns."""
    rng = random.Random(i)
    prompt = tokens(20 + i % 8 * 5, seed=1000 + i % 8)
    return prompt, [tokens(rng.randint(1, 30), seed=i) for _ in range(i % 3)]


def play(engine, numbers, rng=None):
    """Runs scripts to their ends -> {number: all turns}. With rng they arrive when they like, and
    their tools take a while."""
    waiting, answers, turns = list(numbers), [], {i: [] for i in numbers}
    while waiting or answers or engine.has_runnable():
        while waiting and (rng is None or rng.random() < 0.3):
            i = waiting.pop()
            engine.add(i, script(i)[0], max_new_tokens=9 + i % 7, noise_key=i, stop_ids=(7, 8))
        for i, response in [a for a in answers if rng is None or rng.random() < 0.2]:
            answers.remove((i, response))
            engine.extend(i, response, 12)
        for turn in engine.step():
            i = turn.seq_id
            turns[i].append(turn)
            if len(turns[i]) > len(script(i)[1]):
                engine.finish(i)
            else:
                answers.append((i, script(i)[1][len(turns[i]) - 1]))
    return turns


@pytest.fixture(scope="module", params=["plain", "packed"])
def alone(request):
    """A model, as it is or packed as a larger one would be, and what it makes of some sequences,
    each in an engine of its own, where it has nothing to share."""
    net = tiny_model()
    if request.param == "packed":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "PACK_FROM", 0)
            net.pack()
    return net, {i: play(Engine(net, 64, 4, prefix_cache=False), [i])[i] for i in range(0, 64, 5)}


@pytest.mark.parametrize(
    "num_blocks, block_size, max_batch_tokens", [(2000, 4, 2048), (90, 4, 40), (30, 8, 7)]
)
def test_a_sequence_has_the_same_bits_alone_and_among_63_others(
    alone, num_blocks, block_size, max_batch_tokens
):
    net, alone = alone
    engine = Engine(net, num_blocks, block_size, max_batch_tokens=max_batch_tokens)
    together = play(engine, range(64), random.Random(0))
    counters = engine.counters
    assert counters.cached > 500, counters
    assert (counters.preempted > 20) == (counters.recomputed > 50) == (num_blocks < 100), counters
    for i, turns in alone.items():
        assert together[i] == turns, f"sequence {i}"
    assert len({tuple(t.token_ids) for turns in together.values() for t in turns}) > 100
    assert len(engine.blocks.unreferenced) == num_blocks


def test_logprobs_and_entropies_are_those_of_a_plain_forward(alone):
    for i, turns in alone[1].items():
        prompt, responses = script(i)
        token_ids, expected = list(prompt), []
        for turn, response in zip(turns, [*responses, []]):
            assert 1 <= len(turn.token_ids) == len(turn.logprobs) == len(turn.entropies)
            start = len(token_ids)
            expected += zip(range(start, start + 99), turn.logprobs, turn.entropies)
            token_ids += turn.token_ids + response
        ids = torch.tensor(token_ids)
        targets = torch.cat((ids[1:], torch.tensor([-1])))
        attend = packed_attention(torch.tensor([0, len(ids)]))
        with torch.no_grad():
            logprobs, entropies = MODEL(ids, torch.arange(len(ids)), attend, targets)
        for at, logprob, entropy in expected:
            assert logprob == pytest.approx(logprobs[at - 1].item(), abs=1e-5)
            assert entropy == pytest.approx(entropies[at - 1].item(), abs=1e-5)


def plain_logits(model, token_ids):
    attend = packed_attention(torch.tensor([0, len(token_ids)]))
    with torch.no_grad():
        return model.logits(
            model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        )  # fmt: skip


def test_logprobs_are_of_the_distribution_sampled_from():
    """Temperature 0.7: of logits / 0.7. top_p 0.5: renormalised over the kept tokens. 0: argmax."""
    prompt = tokens(30)
    logits = plain_logits(MODEL, prompt)[-1]
    engine = Engine(MODEL, 64)
    for key in range(20):
        (turn,) = generate(engine, [prompt], [1], temperature=0.7, top_p=1.0)
        expected = (logits / 0.7).log_softmax(-1)[turn.token_ids[0]].item()
        assert turn.logprobs[0] == pytest.approx(expected, abs=1e-5)
        engine.add(key, prompt, max_new_tokens=1, noise_key=key, top_p=0.5)
        turn = run_until_idle(engine)[key]
        ordered, ids = logits.softmax(-1).sort(descending=True)
        kept = int((ordered.cumsum(0) < 0.5).sum()) + 1
        assert turn.token_ids[0] in ids[:kept]
        expected = (logits.softmax(-1)[turn.token_ids[0]] / ordered[:kept].sum()).log().item()
        assert turn.logprobs[0] == pytest.approx(expected, abs=1e-5)
    (turn,) = generate(engine, [prompt], [1], temperature=0.0)
    assert turn.token_ids == [logits.argmax().item()]
    assert turn.logprobs[0] == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-5)


def test_noise_keys_make_rollouts_differ_and_repeat():
    prompts, lengths = [tokens(20)] * 8, [12] * 8
    first, again = (generate(Engine(MODEL, 64), prompts, lengths) for _ in range(2))
    assert first == again
    assert len({tuple(turn.token_ids) for turn in first}) == 8


def test_noise_depends_on_the_position_in_the_sequence_not_on_the_turn():
    """All tokens equally likely: only noise decides. Where a sequence was cut does not matter."""
    model = tiny_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    engine = Engine(model, 64)
    (whole,) = generate(engine, [tokens(10)], [20])
    assert len(set(whole.token_ids)) > 12
    (rest,) = generate(engine, [tokens(10) + whole.token_ids[:8]], [12])
    assert rest.token_ids == whole.token_ids[8:]


# ---- the step plan ----


def test_a_group_of_32_added_at_once_prefills_its_prompt_once():
    """Prompt of 37, blocks of 16: the first computes 37 tokens; the others, a step later, share two
    blocks, copy the third, and compute their last token."""
    engine = Engine(MODEL, 400)
    for i in range(32):
        engine.add(i, tokens(37), max_new_tokens=20, noise_key=i)
    run_until_idle(engine)
    assert engine.counters.prefill == 37 + 31
    assert engine.counters.cached == 31 * 36
    assert engine.counters.recomputed == 0
    assert engine.counters.generated == 32 * 20
    assert engine.counters.steps == 21


def test_extend_computes_only_what_is_new():
    """Prompt 25, turn of 10, tool response 8, turn of 5: 33 given tokens, each computed once, and
    the turn's last token with the response: 25 | 9 decodes | 9 in one chunk | 4 decodes."""
    engine, sizes = Engine(MODEL, 64), []
    plan = engine.plan
    engine.plan = lambda: sizes.append(plan()) or sizes[-1]
    engine.add("a", tokens(25), max_new_tokens=10, noise_key=0)
    turn = run_until_idle(engine)["a"]
    assert engine.generated("a") == turn.token_ids and len(turn.token_ids) == 10
    held = engine.sequences["a"].block_table[:]
    engine.extend("a", tokens(8, 1), 5)
    assert engine.generated("a") == []
    run_until_idle(engine)
    assert [n for p in sizes for n in p.values()] == [25] + [1] * 9 + [9] + [1] * 4
    assert engine.sequences["a"].block_table[: len(held)] == held
    counters = engine.counters
    assert (counters.prefill, counters.recomputed, counters.cached) == (33, 0, 0)


def test_paused_sequences_are_dropped_first_and_recomputed():
    """8 blocks of 4. A waits for a tool with 2, B decodes with 2, C needs 5: A is dropped."""
    engine = Engine(MODEL, 8, 4, prefix_cache=False)
    engine.add("a", tokens(6), max_new_tokens=1, noise_key=0)
    engine.step()
    engine.add("b", tokens(4, 1), max_new_tokens=8, noise_key=0)
    engine.step()
    engine.add("c", tokens(18, 2), max_new_tokens=2, noise_key=0)
    engine.step()
    held = {name: bool(seq.block_table) for name, seq in engine.sequences.items()}
    assert held == {"a": False, "b": True, "c": True}
    run_until_idle(engine)
    engine.finish("b")
    engine.extend("a", tokens(3, 3), 2)
    run_until_idle(engine)
    assert engine.counters.recomputed == 6  # of A; its 7th token had not been computed yet


def test_the_oldest_runnable_sequence_always_advances():
    engine = Engine(MODEL, 16, 4, max_batch_tokens=6, max_num_seqs=3)
    rng = random.Random(0)
    for i in range(20):
        engine.add(i, tokens(rng.randint(1, 30), i), max_new_tokens=rng.randint(1, 30), noise_key=i)
    while engine.has_runnable():
        oldest = min(engine.runnable.values(), key=lambda s: s.arrival)
        before = oldest.num_computed
        for turn in engine.step():
            engine.finish(turn.seq_id)
        assert oldest.num_computed > before or oldest.id not in engine.sequences
    assert engine.counters.preempted > 0 and not engine.sequences


def test_the_oldest_goes_before_those_that_decode():
    """One sequence a step: the older one, back from its tool, is not starved by the younger."""
    engine = Engine(MODEL, 16, 4, max_num_seqs=1)
    engine.add("old", tokens(5), max_new_tokens=1, noise_key=0)
    engine.step()
    engine.add("young", tokens(5, 1), max_new_tokens=20, noise_key=0)
    engine.step()
    engine.extend("old", tokens(9, 2), 3)
    (turn,) = [turn for _ in range(3) for turn in engine.step()]
    assert turn.seq_id == "old" and len(engine.generated("young")) == 1


def test_admission_is_first_come_first_served_and_leaves_room_to_grow():
    """10 blocks of 4. A holds 2; B needs all 8 that are left, but A will need one: B waits. C would
    fit, but came after B."""
    engine = Engine(MODEL, 10, 4)
    engine.add("a", tokens(5), max_new_tokens=2, noise_key=0)
    engine.step()
    engine.add("b", tokens(30, 1), max_new_tokens=1, noise_key=0)
    engine.add("c", tokens(2, 2), max_new_tokens=1, noise_key=0)
    (turn,) = engine.step()
    assert turn.seq_id == "a" and engine.capacity().num_waiting == 2
    engine.finish("a")
    assert {turn.seq_id for turn in engine.step()} == {"b", "c"}


def test_chunks_of_a_prefill_run_beside_decoding():
    engine = Engine(MODEL, 100, 4, max_batch_tokens=8)
    engine.add("short", tokens(4), max_new_tokens=50, noise_key=0)
    engine.step()
    engine.add("long", tokens(40, 1), max_new_tokens=2, noise_key=0)
    for _ in range(5):
        assert engine.sequences["long"].num_missing >= 5
        before = len(engine.generated("short"))
        engine.step()
        assert len(engine.generated("short")) == before + 1
    assert engine.sequences["long"].num_computed == 35


def test_a_request_that_can_never_fit_is_refused_with_its_numbers():
    engine = Engine(MODEL, 8, 4)
    with pytest.raises(ValueError, match="30 tokens and 3 new ones.*room for 32"):
        engine.add(0, tokens(30), max_new_tokens=3, noise_key=0)
    with pytest.raises(ValueError, match="0 tokens.*1 of each at least"):
        engine.add(0, [], max_new_tokens=3, noise_key=0)
    assert not engine.sequences and not engine.has_runnable()
    engine.add(0, tokens(30), max_new_tokens=2, noise_key=0)
    with pytest.raises(AssertionError, match="finish"):
        engine.add(0, tokens(3), max_new_tokens=2, noise_key=0)
    assert len(run_until_idle(engine)[0].token_ids) == 2
    with pytest.raises(ValueError, match="room for 32"):
        engine.extend(0, [1], 1)


def test_stop_token_is_kept_and_ends_the_turn():
    greedy = generate(Engine(MODEL, 64), [tokens(9)], [20], temperature=0.0)[0].token_ids
    stop = next(t for t in greedy if t != greedy[0])
    (turn,) = generate(Engine(MODEL, 64), [tokens(9)], [20], temperature=0.0, stop_ids=(stop,))
    assert turn.stop_reason == "stop"
    assert turn.token_ids == greedy[: greedy.index(stop) + 1]


def test_abort_frees_blocks_in_a_turn_and_between_two():
    engine = Engine(MODEL, 16, 4)
    engine.add("a", tokens(9), max_new_tokens=20, noise_key=0)
    engine.add("b", tokens(9, 1), max_new_tokens=1, noise_key=0)
    engine.step()
    capacity = engine.capacity()
    assert (capacity.num_running, capacity.num_waiting, capacity.num_paused) == (1, 0, 1)
    assert capacity.free_blocks == 10 and capacity.tokens == {"a": 10, "b": 10}
    assert capacity.may_need_blocks == 8 - 3  # a goes to 29 tokens, b stays at 10
    engine.abort("a")
    engine.abort("b")
    assert engine.capacity().free_blocks == 16 and not engine.has_runnable()


# ---- weights and cache ----


def test_new_weights_flush_the_prefix_cache_and_sequences_in_flight():
    """After the update everything is as in an engine that never had the old weights, but for the
    tokens that were sampled before."""
    model, trainer = tiny_model(0), tiny_model(1)
    engine = Engine(model, 64, 4)
    engine.add("a", tokens(22), max_new_tokens=10, noise_key=0)
    for _ in range(4):
        engine.step()
    engine.update_weights(trainer.named_parameters())
    before = engine.generated("a")
    turn = run_until_idle(engine)["a"]
    assert engine.counters.cached == 0 and turn.token_ids[:4] == before
    fresh = Engine(trainer, 64, 4)
    fresh.add("a", tokens(22) + before, max_new_tokens=6, noise_key=0)
    assert run_until_idle(fresh)["a"].logprobs == turn.logprobs[4:]
    (probe,) = generate(engine, [tokens(22)], [5], temperature=0.0)
    logprobs = plain_logits(trainer, tokens(22) + probe.token_ids).log_softmax(-1)
    for at, (token_id, logprob) in enumerate(zip(probe.token_ids, probe.logprobs), start=21):
        assert logprob == pytest.approx(logprobs[at, token_id].item(), abs=1e-5)


def test_update_weights_wants_every_parameter():
    engine = Engine(tiny_model(), 8)
    with pytest.raises(AssertionError, match="no nonsense"):
        engine.update_weights([("nonsense", torch.zeros(1))])
    with pytest.raises(AssertionError, match="no new values for.*lm_head.weight"):
        engine.update_weights(list(MODEL.named_parameters())[:-1])


def test_release_and_regrow_go_on_where_it_was():
    expected = generate(Engine(MODEL, 64, 4), [tokens(22)], [10])
    engine = Engine(MODEL, 64, 4)
    engine.add(0, tokens(22), max_new_tokens=10, noise_key=0)
    engine.step()
    engine.release_cache()
    assert engine.k_cache is None and len(engine.blocks.unreferenced) == 64
    engine.regrow_cache()
    turn = run_until_idle(engine)[0]
    assert (turn.token_ids, turn.logprobs) == (expected[0].token_ids, expected[0].logprobs)


def test_command_line_streams_a_continuation(tmp_path):
    tok = Tokenizer.train(["What is 3 + 4? It is 7. " * 20], vocab_size=300)
    tok.save(tmp_path / "tokenizer.json")
    config = ModelConfig(tok.vocab_size, 32, 2, 4, 2, 8, 48, max_positions=4096)
    save_model(tiny_model(0, config), config, tmp_path)
    assert 2048 < len(tok.encode("What is" * 1000)) < 4000
    script = Path(__file__).parent.parent / "kvcache_engine.py"
    command = [sys.executable, str(script), "--device", "cpu", "--max-tokens", "12", "--prompt"]
    for prompt in ("What is", "What is" * 1000):  # the second is prefilled in two steps
        result = subprocess.run(
            [*command, prompt, "--model", str(tmp_path)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "new tokens" in result.stdout and "a second" in result.stdout


def test_command_line_says_what_is_missing(tmp_path, monkeypatch):
    argv = ["kvcache_engine.py", "--prompt", "x", "--model", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="none"):
        kvcache_engine.main()
