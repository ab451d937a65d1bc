"""Scheduler: policies, the queue, and the cluster simulator."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore, TCPStore

from benchmarks import simulate
from data import Problem, ToolCall, Trajectory
from scheduler import EngineView, Lengths, RolloutQueue, num_to_start, queue_order


def view(**changes):
    finished = Lengths(1000)
    for length in [200] * 9 + [1000]:
        finished.add("seen", length)
    numbers = dict(num_engines=4, total=400, remaining=400, started=0, cache_tokens=10_000)
    return EngineView(**{**numbers, "max_tokens": 1000, "finished": finished, **changes})


# ---- policies and queue ----


def test_static_takes_its_share_once():
    assert num_to_start("static", view()) == 100
    assert num_to_start("static", view(started=100, remaining=300)) == 0
    assert num_to_start("static", view(remaining=1)) == 1


def test_capacity_reserves_the_maximum_length():
    """10,000 / 1,000 = 10 rollouts, whatever the running ones hold now."""
    assert num_to_start("capacity", view()) == 10
    assert num_to_start("capacity", view(running=[("a", 5)] * 9)) == 1
    assert num_to_start("capacity", view(running=[("a", 5)] * 10)) == 0


def test_expected_starts_more_than_capacity_when_most_rollouts_are_short():
    assert num_to_start("expected", view()) > 20


def test_expected_without_experience_is_capacity():
    assert num_to_start("expected", view(finished=Lengths(1000))) == 10


def test_expected_counts_those_that_still_run():
    """Ten short ones have finished and ninety still run, longer: most will be long."""
    finished = Lengths(1000)
    for _ in range(10):
        finished.add("a", 50)
    few = num_to_start("expected", view(finished=finished, running=[("a", 60)] * 90))
    held, _, _ = finished.tables(np.zeros(65, int))
    assert few == 0 and held[0, 32] > 0.8 * 500  # S(500) is 0.9, not 0


def test_expected_leaves_the_last_rollouts_to_engines_with_less_work():
    """Share: 400 / 4 rollouts of about 0.13 million squared tokens each. 16 of length 900 that
    have ended here are a whole share; 100 of length 100 are a small part of one."""
    numbers = dict(remaining=20, started=100, cache_tokens=10**6, running=[("a", 100)] * 40)
    assert num_to_start("expected", view(ended=[900] * 16, **numbers)) == 0
    assert num_to_start("expected", view(ended=[100] * 60, **numbers)) == 5  # ceil(20 / 4)
    alone = {**numbers, "num_engines": 1}
    assert num_to_start("expected", view(ended=[900] * 16, **alone)) == 20


@pytest.mark.parametrize("policy", ["capacity", "expected"])
def test_a_claim_is_bounded_by_its_share_and_never_stalls(policy):
    assert num_to_start(policy, view(cache_tokens=10**9, remaining=10)) == 3  # ceil(10 / 4)
    assert num_to_start(policy, view(cache_tokens=100)) == 1  # idle: one, though it may not fit
    assert num_to_start(policy, view(max_seqs=2)) == 2
    assert num_to_start(policy, view(remaining=0)) == 0


def test_unknown_policy_names_the_choices():
    with pytest.raises(ValueError, match="static, static_groups, capacity, expected"):
        num_to_start("best", view())


def test_queue_is_dealt_in_chunks_and_long_problems_come_first():
    order = queue_order(["a", "b"], group_size=4, group_chunk=2)
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    order = queue_order(["a", "b"], group_size=2, group_chunk=1, expected={"b": 9})
    assert order == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert len(set(queue_order("abc", 5, 2))) == 15  # a ragged last chunk loses nothing


def test_queue_gives_every_item_once_and_nothing_past_the_end():
    store, order = HashStore(), list(range(10))
    one, two = (RolloutQueue(store, "step/0", order, num_engines=2) for _ in range(2))
    assert one.claim(4) == [0, 1, 2, 3]
    assert two.claim(4) == [4, 5, 6, 7]
    assert two.remaining() == 2
    assert one.claim(4) == [8, 9]
    assert two.claim(4) == [] and two.remaining() == 0
    one.close()
    assert not two.finished()
    two.close()
    assert one.finished() and not store.check(["step/0"])


def test_queue_over_tcp_gives_every_item_once():
    """Two ranks' stores, claimed from at the same time."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))]
    stores.append(TCPStore("127.0.0.1", stores[0].port, timeout=timedelta(seconds=20)))
    queues = [RolloutQueue(s, "step/0", list(range(200)), num_engines=2) for s in stores]

    def claim_all(queue):
        claimed = []
        while items := queue.claim(3):
            claimed += items
        queue.close()
        return claimed

    with ThreadPoolExecutor(2) as pool:
        claimed = list(pool.map(claim_all, queues))
    assert sorted(claimed[0] + claimed[1]) == list(range(200))
    assert all(queue.finished() for queue in queues)


# ---- the simulator ----

TINY = simulate.Scenario(
    num_problems=6, group_size=4, num_engines=2, cache_tokens=200, max_tokens=80, mean_length=40.0,
    headroom=2, mean_latency=0.05, row_seconds=4e-3, kv_seconds=1e-4, prefill_rate=2000.0,
)  # fmt: skip
HIDDEN = ("static_groups", "static", "capacity", "expected")  # policies that do not know lengths


def token_by_token(policy, s, rollouts):
    """The simulator's rules as a loop over single tokens, with sums instead of events."""
    size = s.group_size
    order = queue_order(range(len(rollouts)), size, size if policy == "static_groups" else 1)
    queue = simulate.SimulatedQueue(policy, [rollouts[p][r] for p, r in order])
    engines = [dict(clock=0.0, held={}, wait=[], ask=True, n=0, i=i) for i in range(s.num_engines)]
    active, done = list(engines), {}

    def decoding(e):
        return [r for r in e["held"].values() if r.answered <= e["clock"]]

    def used(e):
        return sum(r.have for r in e["held"].values())

    def admit(e):
        while ready := [r for r in e["wait"] if r.answered <= e["clock"]]:
            r = min(ready, key=lambda r: r.number)
            room = used(e) + r.have + s.headroom * (len(decoding(e)) + 1) <= s.cache_tokens
            if not room and e["held"]:
                return
            e["wait"].remove(r)
            e["held"][r.number] = r
            e["clock"] += r.have / s.prefill_rate

    while active:
        e = min(active, key=lambda e: (e["clock"], e["i"]))
        admit(e)
        while e["ask"] and not e["wait"]:
            left = len(queue.order) - queue.next
            running = [(r.problem, r.have) for r in e["held"].values()]
            n = num_to_start(policy, EngineView(
                s.num_engines, len(queue.order), left, e["n"], s.cache_tokens, s.max_tokens,
                s.max_seqs, running,
            ))  # fmt: skip
            for r in queue.order[queue.next : queue.next + n]:
                r.number, r.have, r.answered, e["n"] = e["n"], 0, 0.0, e["n"] + 1
                r.ends, r.calls = list(np.cumsum(r.turn_lengths)), list(r.latencies)
                e["wait"].append(r)
            queue.next += n
            e["ask"] = False
        admit(e)
        if not decoding(e):
            answers = [r.answered for r in [*e["held"].values(), *e["wait"]]]
            later = [time for time in answers if time > e["clock"]]
            if later:
                e["clock"] = min(later)
            else:
                active.remove(e)
            continue
        while used(e) + len(decoding(e)) > s.cache_tokens:
            r = max(e["held"].values(), key=lambda r: (r.answered > e["clock"], r.number))
            e["wait"].append(e["held"].pop(r.number))
        rows = decoding(e)
        for r in rows:
            r.have += 1
        e["clock"] += max(s.weight_seconds, s.row_seconds * len(rows))
        e["clock"] += s.kv_seconds * sum(r.have for r in rows)
        for r in rows:
            if r.have == r.ends[0]:
                r.ends.pop(0)
                if r.ends:
                    r.answered = e["clock"] + r.calls.pop(0)
                else:
                    done[r.problem, id(r)] = e["clock"]
                    del e["held"][r.number]
                    e["ask"] = True
    return [done[r.problem, id(r)] for group in rollouts for r in group]


@pytest.mark.parametrize("policy", ["static_groups", "static", "capacity"])
@pytest.mark.parametrize("seed", range(3))
def test_events_are_exact_against_a_loop_over_tokens(policy, seed):
    rollouts = simulate.draw_rollouts(TINY, seed)
    engines = simulate.simulate(policy, TINY, rollouts)
    jumped = [r.finished for group in rollouts for r in group]
    stepped = token_by_token(policy, TINY, simulate.draw_rollouts(TINY, seed))
    assert jumped == pytest.approx(stepped, rel=1e-9)
    assert policy == "capacity" or sum(e.recomputed for e in engines) > 0  # preemption was met


@pytest.mark.parametrize("policy", simulate.POLICIES)
def test_no_policy_beats_the_lower_bound(policy):
    small = replace(simulate.Scenario(), num_problems=16, group_size=8, num_engines=2)
    for seed in range(4):
        for scenario in (TINY, replace(small, cache_tokens=20_000), small):
            result, _ = simulate.run(policy, scenario, seed)
            assert result["ratio"] >= 1 and 0 < result["busy"] <= 1


class Plan:
    """A queue for one engine: some rollouts at once, the others when the first has finished."""

    def __init__(self, first, later):
        self.waves = [wave for wave in (first, later) if wave]

    def claim(self, engine):
        early = engine.started and not engine.ended
        return [] if early or not self.waves else self.waves.pop(0)


def test_no_plan_at_all_beats_the_lower_bound_in_a_tiny_case():
    """4 rollouts, each on engine 0 or 1 and started at once or later: all 256 plans."""
    tiny = replace(TINY, num_problems=2, group_size=2, cache_tokens=120)
    best = np.inf
    for plan in itertools.product(itertools.product(range(2), range(2)), repeat=4):
        rollouts = simulate.draw_rollouts(tiny, 5)
        flat = [r for group in rollouts for r in group]
        for i in range(2):
            first, later = ([r for r, at in zip(flat, plan) if at == (i, w)] for w in range(2))
            engine, queue = simulate.SimulatedEngine(tiny, "static"), Plan(first, later)
            while engine.event(queue):
                pass
        best = min(best, max(r.finished for r in flat))
        assert all(r.finished for r in flat)
    bound = simulate.lower_bound(rollouts, tiny)
    assert bound <= best < 1.5 * bound  # and the bound is not empty


def decisions_until(policy, rollouts, time, monkeypatch):
    """All answers of the policy before that time; notes for each rollout when its turns ended."""
    log, claim = [], simulate.SimulatedQueue.claim
    end_turn = simulate.SimulatedEngine.end_turn
    for i, r in enumerate(r for group in rollouts for r in group):
        r.index, r.turn_ends = i, []

    def logged_claim(queue, engine):
        claimed = claim(queue, engine)
        if engine.clock < time:
            log.append((engine.clock, [r.index for r in claimed]))
        return claimed

    def logged_turn(engine, r):
        r.turn_ends.append(engine.clock)
        end_turn(engine, r)

    with monkeypatch.context() as patch:
        patch.setattr(simulate.SimulatedQueue, "claim", logged_claim)
        patch.setattr(simulate.SimulatedEngine, "end_turn", logged_turn)
        simulate.simulate(policy, TINY, rollouts, [(0, n) for n in range(10, 80)])
    return log


@pytest.mark.parametrize("policy", [*HIDDEN, "clairvoyant"])
def test_lengths_of_unfinished_rollouts_change_no_decision(policy, monkeypatch):
    """The last turns that have not begun at some time are given other lengths: all decisions until
    then are the same. The clairvoyant schedule, which must fail this, does."""
    time, rollouts, again = 1.0, simulate.draw_rollouts(TINY, 1), simulate.draw_rollouts(TINY, 1)
    before = decisions_until(policy, rollouts, time, monkeypatch)
    hidden = [r.index for group in rollouts for r in group if [0, *r.turn_ends, 9][-3] > time]
    flat = [r for group in again for r in group]
    lengths = [flat[i].turn_lengths[-1] for i in hidden]
    for i, length in zip(hidden, lengths[1:] + lengths[:1]):
        flat[i].turn_lengths[-1] = length
        flat[i].length = sum(flat[i].turn_lengths)
    assert len(before) > 3 and len(set(lengths)) > 3
    after = decisions_until(policy, again, time, monkeypatch)
    assert (before == after) == (policy != "clairvoyant")


def test_simulation_is_deterministic_by_seed():
    small = replace(simulate.Scenario(), num_problems=16, num_engines=4, cache_tokens=60_000)
    one, two, other = (simulate.run("expected", small, seed)[0] for seed in (3, 3, 4))
    assert one == two and one != other


def test_a_cache_smaller_than_a_rollout_is_an_error():
    with pytest.raises(ValueError, match="cache_tokens must exceed"):
        simulate.run("static", replace(TINY, cache_tokens=30), 0)


def recorded_step():
    """As a run records it: here the 'real' times come from single-token steps of 2 + rows ms."""
    s = replace(
        TINY, num_engines=1, cache_tokens=10_000, step_cost=((1, 0.003), (99, 0.101)),
        kv_seconds=0.0,
    )  # fmt: skip
    rollouts = simulate.draw_rollouts(s, 0)
    simulate.simulate("static", s, rollouts)
    rows = [
        dict(
            engine=0, started=0.0, finished=r.finished, prompt_tokens=5, turns=r.turn_lengths,
            tool_seconds=r.latencies, tool_tokens=[3] * len(r.latencies),
        )
        for group in rollouts for r in group
    ]  # fmt: skip
    cost = [[rows, 0.002 + rows / 1000] for rows in (1, 8, 32, 99)]
    return dict(cache_tokens=10_000, max_tokens=200, engine_step_cost=cost, rollouts=rows)


def test_replay_reproduces_a_recorded_step_and_sees_another_order():
    record = json.loads(json.dumps(recorded_step()))
    tau, ratio = simulate.replay(record)
    assert tau > 0.99 and ratio == pytest.approx(1, abs=1e-6)
    for row in record["rollouts"]:
        row["finished"] = 10 - row["finished"]
    assert simulate.replay(record)[0] < -0.99
    assert simulate.kendall_tau(np.array([1, 2, 3]), np.array([1, 3, 2])) == pytest.approx(1 / 3)


def test_from_run_finds_the_numbers_that_made_the_traces(tmp_path):
    made = replace(
        TINY, num_problems=100, group_size=6, max_tokens=100_000, mean_length=100.0,
        sigma_length=0.6,
    )  # fmt: skip
    (tmp_path / "traces").mkdir()
    with open(tmp_path / "traces" / "step.jsonl", "w") as file:
        for group in simulate.draw_rollouts(made, 0):
            for i, r in enumerate(group):
                t = Trajectory(Problem(str(r.problem), "", ""), i, 0, num_prompt_tokens=7)
                t.append([1] * 7, "prompt")
                for turn, n in enumerate(r.turn_lengths):
                    t.append([1] * n, "model", [0.0] * n, [0.0] * n)
                    if turn < len(r.latencies):
                        call = ToolCall(turn, "", "", "", "ok", seconds=r.latencies[turn])
                        t.tool_calls.append(call)
                        t.append([1] * 9, "tool")
                t.num_turns = len(r.turn_lengths)
                file.write(json.dumps(t.to_json()) + "\n")
    row = dict(step=1, engine_step_cost=[[1, 0.01], [64, 0.02]])
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = simulate.fit_run(tmp_path, simulate.Scenario())
    assert found.mean_length == pytest.approx(100, rel=0.1)
    assert found.sigma_length == pytest.approx(0.6, abs=0.05)
    assert found.correlation == pytest.approx(0.5, abs=0.1)
    assert found.mean_latency == pytest.approx(0.05, rel=0.2)
    assert (found.prompt_tokens, found.tool_tokens) == (7, 9)
    assert found.base_seconds()[64] == 0.02


def test_command_line_prints_a_row_for_each_policy_and_draws(tmp_path):
    script = Path(simulate.__file__)
    sizes = "--num-problems 8 --group-size 4 --num-engines 2 --cache-tokens 20000".split()
    command = [sys.executable, str(script), *sizes, "--html", str(tmp_path / "t.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(f"\n{policy}" in done.stdout for policy in simulate.POLICIES)
    assert (tmp_path / "t.html").read_text().count("<svg") == len(simulate.POLICIES)
