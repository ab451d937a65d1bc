"""Scheduler: policies, the queue, and the cluster simulator."""

import multiprocessing
import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

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


def claim_all(port, rank, results):
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=20))
    queue = RolloutQueue(store, "step/0", list(range(200)), num_engines=2)
    mine = []
    while items := queue.claim(3):
        mine += items
    results.put(mine)
    queue.close()
    if rank == 0:  # the master's store must outlive the others' polls
        while not queue.finished():
            time.sleep(0.01)


def test_queue_over_tcp_gives_every_item_once():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=claim_all, args=(port, r, results)) for r in range(2)]
    [rank.start() for rank in ranks]
    claimed = [results.get(timeout=60) for _ in ranks]
    [rank.join() for rank in ranks]
    assert sorted(claimed[0] + claimed[1]) == list(range(200))
