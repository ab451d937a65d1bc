"""Hand-worked numbers for every formula of the algorithm; the arithmetic is in the docstrings."""

import ast
import itertools
import math
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from data import Group, Problem, ToolCall, Trajectory
from grpo_roc import (
    draw,
    error_penalty,
    format_penalty,
    group_advantages,
    importance_weight,
    loss_metrics,
    loss_weights,
    num_failures_kept,
    policy_loss,
    repetition,
    resample_on_correct,
    select_groups,
    trajectory_penalty,
)

PROBLEM = Problem("p", "1 + 1?", "2")
ROOT = Path(__file__).parent.parent


def trajectory(rollout=0, reward=0.0, penalty=0.0, tokens=4, stop="stopped", statuses=(), tags=1):
    calls = [ToolCall(0, "python", "", "", status) for status in statuses]
    t = Trajectory(PROBLEM, rollout, 0, reward=reward, penalty=penalty, stop_reason=stop)
    t.append([1] * tokens, "model", [0.0] * tokens, [0.0] * tokens)
    t.tool_calls, t.num_turns, t.num_answer_tags = calls, 1 + len(calls), tags
    return t


def group(rewards, penalties=None, **how):
    penalties = penalties or [0.0] * len(rewards)
    rows = enumerate(zip(rewards, penalties))
    return Group(PROBLEM, [trajectory(i, r, p, **how) for i, (r, p) in rows])


# ---- penalties ----


def test_error_penalty_is_the_share_of_failed_calls_and_half_without_calls():
    assert [error_penalty(*x) for x in ((0, 0), (0, 3), (1, 4), (3, 3))] == [0.5, 0, 0.25, 1]


def test_format_penalty_punishes_missing_and_repeated_answers():
    """(2 - 1) / 2 turns = .5; (4 - 1) / 2 = 1.5 -> 1; one turn, one tag: 0 (the release: 1)."""
    assert [format_penalty(*x) for x in ((0, 3), (1, 1), (1, 3), (2, 2), (4, 2))] == [
        1, 0, 0, 0.5, 1,
    ]  # fmt: skip


def test_trajectory_penalty_counts_statuses_not_words():
    """error, timeout, memory, output, malformed, refused are errors; a lost call is in neither
    number: 1 error of (ok, error) -> .5, not 1/3. A success that prints "error" is a success."""
    for status in ("error", "timeout", "memory", "output", "malformed", "refused"):
        assert trajectory_penalty(trajectory(statuses=("ok", status))) == 0.5
    assert trajectory_penalty(trajectory(statuses=("ok", "error", "lost"))) == 0.5
    assert trajectory_penalty(trajectory(statuses=("lost",))) == 0.5
    clean = trajectory(statuses=("ok", "empty"))
    clean.tool_calls[0].stdout = "Traceback (most recent call last): error"
    assert trajectory_penalty(clean) == 0
    assert trajectory_penalty(trajectory(statuses=("error",), tags=0)) == 2


def test_ngram_penalty_is_a_switch():
    """12 equal tokens, n = 2: 11 bigrams, 1 distinct -> repetition 10 / 11."""
    assert repetition([7] * 12, n=2) == pytest.approx(10 / 11)
    assert repetition([1, 2, 3], n=20) == 0
    t = trajectory(tokens=40, statuses=("ok",))
    assert trajectory_penalty(t) == 0
    assert trajectory_penalty(t, ngram_penalty=1.0) == pytest.approx(20 / 21)


# ---- resampling ----


@pytest.mark.parametrize("min_keep", [0, 1, 2])
def test_kept_counts_for_every_split_up_to_32(min_keep):
    for total in range(2, 33):
        for n_neg in range(1, total):
            n_pos = total - n_neg
            for keep in {max(2 * min_keep, 2, total // 2), total}:
                keep = min(keep, total)
                if 2 * min_keep > keep:
                    continue
                kept_neg = num_failures_kept(n_neg, n_pos, keep, min_keep)
                kept_pos = keep - kept_neg
                assert 0 <= kept_neg <= n_neg and 0 <= kept_pos <= n_pos
                assert kept_neg >= min(min_keep, n_neg) and kept_pos >= min(min_keep, n_pos)
                share = n_neg * keep // total  # the paper's floor, where no bound binds
                low, high = min(min_keep, n_neg), min(n_neg, keep - min(min_keep, n_pos))
                assert kept_neg == share or kept_neg in (low, high)


def test_kept_counts_by_hand():
    """K = 16 of N = 32: floor(n_neg / 2), the paper's rule; at the edges min_keep = 2 holds."""
    assert [num_failures_kept(n, 32 - n, 16) for n in (1, 2, 3, 5, 16, 29, 30, 31)] == [
        1, 2, 2, 2, 8, 14, 14, 15,
    ]  # fmt: skip
    assert [num_failures_kept(n, 32 - n, 16, min_keep=0) for n in (1, 2, 3, 31)] == [0, 1, 1, 15]


def test_weighted_draw_has_the_frequencies_of_drawing_without_replacement():
    """Two of three with weights 4, 2, 1: P(item 2 is drawn) = 1/7 + 4/7 * 1/3 + 2/7 * 1/5 = .3905;
    P(item 0 is drawn) = 4/7 + 2/7 * 4/5 + 1/7 * 4/6 = .8952."""
    rng, count = Random(0), [0, 0, 0]
    for _ in range(20_000):
        for item in draw([0, 1, 2], [4, 2, 1], 2, rng):
            count[item] += 1
    assert count[2] / 20_000 == pytest.approx(0.3905, abs=0.012)
    assert count[0] / 20_000 == pytest.approx(0.8952, abs=0.008)


@pytest.mark.parametrize("eps, expected", [(1e-6, 0.0), (1e-3, 0.09), (0.01, 0.71), (0.1, 2.7)])
def test_roc_eps_decides_how_many_penalised_ones_survive(eps, expected):
    """10 drawn from 10 clean correct ones and 10 with penalty 0.3, and 20 failures: K = 20."""
    penalties = [0.0] * 10 + [0.3] * 10 + [0.0] * 20
    g = group([1.0] * 20 + [0.0] * 20, penalties)
    penalised = 0
    for i in range(400):
        kept = resample_on_correct(g, 20, Random(i), roc_eps=eps).trajectories
        penalised += sum(t.penalty > 0 for t in kept)
    assert penalised / 400 == pytest.approx(expected, abs=max(0.2, 0.08 * expected))


def test_failures_are_kept_uniformly_whatever_their_penalty_and_order():
    g = group([1.0] * 4 + [0.0] * 12, [0.0] * 4 + [0.0] * 6 + [2.0] * 6)
    count = [0] * 16
    for i in range(2000):
        for t in resample_on_correct(g, 8, Random(i)).trajectories:
            count[t.rollout] += 1
    for i in range(4, 16):  # 6 of 12
        assert count[i] / 2000 == pytest.approx(0.5, abs=0.05)


def test_selection_does_not_depend_on_the_order_of_completion():
    g = group([1.0] * 8 + [0.0] * 8, [0.1 * i for i in range(16)])
    shuffled = Group(PROBLEM, Random(5).sample(g.trajectories, 16))
    for how in ({}, {"select": "lowest"}, {"resample": "uniform"}, {"resample": "none"}):
        a = resample_on_correct(g, 8, Random(1), **how).trajectories
        b = resample_on_correct(shuffled, 8, Random(1), **how).trajectories
        assert [t.rollout for t in a] == [t.rollout for t in b] == sorted(t.rollout for t in a)


def test_lowest_takes_the_lowest_penalties_of_the_correct():
    g = group([1, 1, 1, 1, 0, 0, 0, 0], [0.4, 0.1, 0.3, 0.2, 0, 0, 0, 0])
    kept = resample_on_correct(g, 4, Random(0), select="lowest").trajectories
    assert [t.rollout for t in kept if t.reward] == [1, 3]


def test_none_is_plain_grpo_and_unknown_names_are_refused():
    g = group([1, 0, 0, 1])
    assert resample_on_correct(g, 2, Random(0), resample="none").trajectories == g.trajectories
    for how in ({"resample": "best"}, {"select": "highest"}):
        with pytest.raises(ValueError, match="got"):
            resample_on_correct(g, 2, Random(0), **how)


def test_groups_without_signal_are_dropped_and_counted():
    """All right and all wrong carry no signal. A shaped reward or penalty does not save a group."""
    wrong = group([0, 0, 0, 0], [0.0, 0.5, 1.0, 2.0])
    kept, counts = select_groups([group([1] * 4), wrong, group([1, 0, 0, 1])], 2, 0, 0, min_keep=1)
    assert len(kept) == 1 and counts["all_right"] == 1 and counts["all_wrong"] == 1
    assert counts["kept"] == 1 and counts["groups"] == 3


def test_a_group_made_equal_by_selection_is_dropped_too():
    """min_keep = 0, 1 failure of 8, K = 4: floor(4 / 8) = 0 failures kept."""
    kept, counts = select_groups([group([0] + [1] * 7)], 4, 0, 0, min_keep=0)
    assert not kept and counts["made_equal"] == 1


def test_overlong_filter_takes_truncated_ones_out_of_the_group():
    g = group([1.0, 1.0, 0.0, 0.0])
    g.trajectories[3].stop_reason = "length"
    kept, counts = select_groups([g], 4, 0, 0, overlong_filter=True, min_keep=1)
    assert [t.rollout for t in kept[0].trajectories] == [0, 1, 2] and counts["overlong"] == 1
    kept, _ = select_groups([g], 4, 0, 0, min_keep=1)
    assert len(kept[0].trajectories) == 4


def test_selection_from_summaries_is_the_selection_from_trajectories():
    g = group([1.0] * 6 + [0.0] * 10, [0.1 * (i % 4) for i in range(16)])
    s = Group(PROBLEM, [t.summary() for t in g.trajectories])
    (a,), _ = select_groups([g], 8, 3, 7)
    (b,), _ = select_groups([s], 8, 3, 7)
    assert [t.rollout for t in a.trajectories] == [t.rollout for t in b.trajectories]


# ---- advantages, weights ----


def test_advantages_by_hand():
    """[1, 0, 0, 0]: mean .25, population std sqrt(.1875) = .4330; (1 - .25) / .4330 = 1.7321."""
    a = group_advantages(torch.tensor([1.0, 0, 0, 0]))
    expected = torch.tensor([1.7321, -0.5774, -0.5774, -0.5774])
    torch.testing.assert_close(a, expected, atol=1e-4, rtol=0)
    b = group_advantages(torch.tensor([1.0, 0, 0, 0]), adv_std=False)
    torch.testing.assert_close(b, torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("rewards", [[1.0] * 16, [0.0] * 16, [1.0]])
def test_equal_rewards_and_a_group_of_one_give_zeros_not_nan(rewards):
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def two_groups():
    """|o| = 1, 3 and 4, 2: 10 tokens in the step, 4 and 6 in the groups."""
    make = lambda i, n: trajectory(i, tokens=n)
    return [Group(PROBLEM, [make(0, 1), make(1, 3)]), Group(PROBLEM, [make(0, 4), make(1, 2)])]


@pytest.mark.parametrize(
    "denominator, expected",
    [
        ("batch", [[1 / 10, 1 / 10], [1 / 10, 1 / 10]]),
        ("group", [[1 / 8, 1 / 8], [1 / 12, 1 / 12]]),  # 1 / (2 x 4), 1 / (2 x 6)
        ("trajectory", [[1 / 4, 1 / 12], [1 / 16, 1 / 8]]),  # 1 / (2 x 2 x |o|)
    ],
)
def test_the_three_denominators(denominator, expected):
    weights = loss_weights(two_groups(), denominator)
    assert [w for row in weights for w in row] == pytest.approx(sum(expected, []))
    lengths = [[t.num_model_tokens for t in g.trajectories] for g in two_groups()]
    total = sum(w * n for a, b in zip(weights, lengths) for w, n in zip(a, b))
    assert total == pytest.approx(1)


def test_tool_tokens_are_not_in_the_denominator():
    """10 model tokens and 90 of tool output: 1 / 10."""
    t = trajectory(tokens=10)
    t.append([2] * 90, "tool")
    assert loss_weights([Group(PROBLEM, [t])], "batch") == [[0.1]]


@pytest.mark.parametrize("denominator", ["batch", "group", "trajectory"])
def test_a_trajectory_cut_before_its_first_turn_ended_divides_by_nothing(denominator):
    """The wall clock may leave a trajectory of the prompt alone: |o| = 0."""
    group = Group(PROBLEM, [trajectory(0, tokens=0), trajectory(1, tokens=4)])
    assert loss_weights([group], denominator)[0][1] == (0.125 if denominator[0] == "t" else 0.25)


def test_unknown_denominator_is_refused():
    with pytest.raises(ValueError, match="denominator"):
        loss_weights(two_groups(), "tokens")


# ---- loss ----


def loss_of(ratio, advantage, **how):
    old = torch.zeros(1)
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = policy_loss(new, old, torch.tensor([advantage]), torch.ones(1), **how)
    loss.backward()
    return loss.item(), new.grad.item()


def test_the_clip_binds_on_one_side_only():
    """A > 0: at ratio 1.5 the objective is 1.28 A and flat; at 0.5 it is 0.5 A and pushes up.
    A < 0: at ratio 0.5 it is 0.8 A and flat; at 1.5 it is 1.5 A and pushes down."""
    assert loss_of(1.5, 1.0) == (pytest.approx(-1.28), 0.0)
    assert loss_of(0.5, 1.0) == (pytest.approx(-0.5), pytest.approx(-0.5))
    assert loss_of(0.5, -1.0) == (pytest.approx(0.8), 0.0)
    assert loss_of(1.5, -1.0) == (pytest.approx(1.5), pytest.approx(1.5))
    assert loss_of(1.27, 1.0)[1] != 0 and loss_of(1.29, 1.0)[1] == 0
    assert loss_of(0.81, -1.0)[1] != 0 and loss_of(0.79, -1.0)[1] == 0


def test_one_optimiser_step_has_ratio_one_and_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = torch.tensor([0.25, 0.25])
    policy_loss(logprobs, logprobs.detach(), torch.tensor([2.0, -1.0]), weights).backward()
    assert logprobs.grad.tolist() == [-0.5, 0.25]  # -A x weight


def test_a_masked_token_gets_no_gradient():
    logprobs = torch.randn(3, requires_grad=True)
    weights = torch.tensor([0.5, 0.0, 0.5])
    policy_loss(logprobs, logprobs.detach() - 0.1, torch.ones(3), weights).backward()
    assert logprobs.grad[1] == 0 and (logprobs.grad[[0, 2]] != 0).all()


def test_importance_weight_is_capped_detached_and_can_be_off():
    """exp(-1 - (-1.5)) = 1.6487; exp(-1 - (-3)) = 7.39 -> 2; exp(-2 - (-1)) = .3679."""
    new = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    engine = torch.tensor([-1.5, -3.0, -1.0])
    weight = importance_weight(new, engine)
    torch.testing.assert_close(weight, torch.tensor([1.6487, 2.0, 0.3679]), atol=1e-4, rtol=0)
    assert not weight.requires_grad
    assert importance_weight(new, engine, cap=None).tolist() == [1, 1, 1]
    logprobs = torch.zeros(3, requires_grad=True)
    policy_loss(logprobs, logprobs.detach(), torch.ones(3), torch.ones(3), weight).backward()
    torch.testing.assert_close(logprobs.grad, -weight)


def test_gradient_does_not_depend_on_micro_batching_and_the_naive_mean_does():
    """Trajectories of 1, 9 and 2 model tokens, split in every way: the sum with weights made before
    is one gradient. The mean of a loss in each micro-batch, averaged, is another."""
    torch.manual_seed(0)
    lengths, advantages = [1, 9, 2], [1.0, -0.5, 2.0]
    hidden = [torch.randn(n, 5) for n in lengths]
    group = Group(PROBLEM, [trajectory(i, tokens=n) for i, n in enumerate(lengths)])
    (weights,) = loss_weights([group])

    def gradient(split, naive):
        w = torch.linspace(-1, 1, 5, requires_grad=True)
        for part in split:
            x = torch.cat([hidden[i] for i in part])
            a = torch.cat([torch.full((lengths[i],), advantages[i]) for i in part])
            t = torch.cat([torch.full((lengths[i],), weights[i]) for i in part])
            if naive:
                t = torch.full_like(t, 1 / len(t) / len(split))
            logprobs = torch.nn.functional.logsigmoid(x @ w)
            policy_loss(logprobs, logprobs.detach(), a, t).backward()
        return w.grad

    splits = [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[1], [2, 0]]]
    for a, b in itertools.combinations(splits, 2):
        torch.testing.assert_close(gradient(a, False), gradient(b, False))
    assert not torch.allclose(gradient(splits[0], True), gradient(splits[1], True), rtol=0.1)


def test_loss_metrics_count_model_tokens_only():
    """Ratios 1.5 (A > 0: clipped), 1.5 (A < 0: not), one masked; gaps .1, .9 > log 2, masked."""
    old, mask = torch.zeros(3), torch.tensor([1.0, 1.0, 0.0])
    new = torch.tensor([math.log(1.5)] * 3)
    engine = torch.tensor([-0.1, -0.9, -5.0])
    m = loss_metrics(new, old, engine, torch.tensor([1.0, -1.0, 1.0]), mask)
    assert m["tokens"] == 2 and m["clip_share"] == 1 and m["tis_capped"] == 1
    assert m["engine_gap"].item() == pytest.approx(1.0)
    assert m["approx_kl"].item() == pytest.approx(2 * (0.5 - math.log(1.5)))


# ---- imports ----


def test_grpo_roc_needs_no_triton_and_no_engine():
    """Imported in a process where triton cannot be."""
    code = (
        "import sys; sys.modules['triton'] = None; import grpo_roc;"
        "assert not {'kernels', 'model', 'kvcache_engine', 'sandbox'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


LAYERS = [
    "data tokenizer isolation reward kernels report",
    "sandbox model toy grpo_roc scheduler",
    "kvcache_engine parallel",
    "rollout",
    "eval sft",
    "train",
]


def test_imports_go_downward_only():
    layer = {name: i for i, names in enumerate(LAYERS) for name in names.split()}
    assert set(layer) == {p.stem for p in ROOT.glob("*.py")}
    for name in layer:
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for other in set(names) & set(layer):
                assert layer[other] < layer[name], f"{name} imports {other}"
