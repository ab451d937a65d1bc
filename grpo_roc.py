"""GRPO-RoC: group relative policy optimisation with resampling on correct (paper section 2.2).

A step samples N = 2G trajectories of each problem, and turns them into one gradient:

    1. reward            r_i in {0, 1}                                         Eq. 3 (reward.py)
    2. penalty           p_total = p_err + p_format                            Eq. 4, 5
    3. drop              groups whose rewards are all equal: no signal
    4. resample          keep K: failures as they are distributed, correct ones by 1 / p_total
    5. advantage         A_i = (r_i - mean r) / std r over the kept            Eq. 2, 7
    6. weight            of every token: loss_mask / denominator               Eq. 6 (or 1)
    7. loss              min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)    Eq. 6

| paper | here |
|---|---|
| G, 2G = N, K | group_size, len(group.trajectories), keep = min(G, N) |
| r_i, A_i | trajectory.reward, advantages |
| p_err, p_format, p_total | error_penalty, format_penalty, trajectory.penalty |
| pi_theta, pi_old, rho | exp(logprobs), exp(old_logprobs), ratio |
| eps_low, eps_high | clip_low, clip_high |
| |o_i| | num_model_tokens: what the model wrote; tool output is context |

The reward is the answer alone; tool errors are fought by choosing among the correct trajectories,
not by shaping the reward (a switch, off: the paper argues against it). No KL, no entropy bonus.

Where the paper is silent we chose: a correct trajectory weighs 1 / (p_total + roc_eps), drawn
without replacement; std is the population's; data.TOOL_ERRORS says which statuses are tool errors.
We differ in the denominator: default is one mean over the tokens of the whole optimiser step
(`batch`), `group` is Eq. 6, `trajectory` is Eq. 1. From the authors' release we take min_keep = 2
(0 is the paper) and dropping equal groups without a refill; its choice of the lowest penalties is
select="lowest".

Torch arithmetic only: no engine, no kernel, no triton. Functions take groups of whole trajectories
and of their summaries alike, so that all ranks decide the same from metadata.
"""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from data import Group, Summary, Trajectory

# ---- penalties (section 2.2.3) ----


def error_penalty(num_errors: int, num_calls: int) -> float:
    """p_err, Eq. 4: the share of calls that failed, 0.5 without a call. (3, 4) -> 0.75"""
    return 0.5 if num_calls == 0 else num_errors / num_calls


def format_penalty(num_answer_tags: int, num_turns: int) -> float:
    """p_format, Eq. 5: 1 without <answer>; every tag beyond the first costs 1 / turns.

    (0, 3) -> 1; (1, 3) -> 0; (2, 4) -> 0.25; (9, 2) -> 1"""
    if num_answer_tags == 0:
        return 1.0
    return min(1.0, (num_answer_tags - 1) / max(num_turns, 1))


def repetition(token_ids: list[int], n: int = 20) -> float:
    """Share of n-grams that occurred before: the paper's unsuccessful attempt (section 4.3.1)."""
    total = len(token_ids) - n + 1
    if total < 1:
        return 0.0
    return 1 - len({tuple(token_ids[i : i + n]) for i in range(total)}) / total


def trajectory_penalty(t: Trajectory, ngram_penalty: float = 0.0) -> float:
    """p_total = p_err + p_format, in [0, 2]; `ngram_penalty` > 0 adds that many times repetition.

    A `lost` call (the sandbox's fault, not the model's) is in neither number of Eq. 4."""
    calls = [c for c in t.tool_calls if c.status != "lost"]
    p_err = error_penalty(sum(c.failed for c in calls), len(calls))
    p_format = format_penalty(t.num_answer_tags, t.num_turns)
    if ngram_penalty:
        wrote = [token for token, mask in zip(t.token_ids, t.loss_mask) if mask]
        return p_err + p_format + ngram_penalty * repetition(wrote)
    return p_err + p_format


# ---- resample on correct (section 2.2.3) ----


def num_failures_kept(num_failures: int, num_correct: int, keep: int, min_keep: int = 2) -> int:
    """floor(n_neg K / N), as failures are distributed, but min_keep or more of either side where
    there are so many. (20, 12, keep=16) -> 10; (31, 1, 16) -> 15; (1, 31, 16) -> 1"""
    share = num_failures * keep // (num_failures + num_correct)
    fewest, most = min(min_keep, num_failures), keep - min(min_keep, num_correct)
    return min(max(share, fewest), num_failures, most)


def draw(items: list, weights: list[float], count: int, rng: Random) -> list:
    """`count` of items without replacement, each next one with probability ~ weight.

    An exponential race: the i-th clock rings at E_i / w_i, the first `count` to ring are the draw
    (the same law as drawing one after the other; needs only rng.random, stable over versions)."""
    rings = [-math.log1p(-rng.random()) / w for w in weights]
    return [items[i] for i in sorted(range(len(items)), key=rings.__getitem__)[:count]]


def resample_on_correct(
    group: Group, keep: int, rng: Random, resample: str = "roc", select: str = "weighted",
    roc_eps: float = 0.1, min_keep: int = 2,
) -> Group:  # fmt: skip
    """N trajectories -> K = min(keep, N): failures uniformly, correct ones by 1 / (p_total + eps).

    Failures keep every failure mode as it is distributed (the negative signal stays diverse); among
    the correct ones clean tool use is preferred, so that noise of the environment is not rewarded.

    resample: roc, the method; uniform, the control (any K of N); none, plain GRPO (all N)
    select:   weighted, the paper; lowest, the release (the K+ lowest penalties, ties by index)
    roc_eps:  decides the method, and the paper is silent. Of 10 drawn from 10 clean ones and 10 of
              penalty 0.3, 0.0 / 0.09 / 0.71 / 2.7 have it at eps 1e-6 / 1e-3 / 0.01 / 0.1"""
    if resample not in ("roc", "uniform", "none"):
        raise ValueError(f"resample is roc, uniform or none, got {resample!r}")
    if select not in ("weighted", "lowest"):
        raise ValueError(f"select is weighted or lowest, got {select!r}")
    members = sorted(group.trajectories, key=lambda t: t.rollout)  # never in order of completion
    keep = min(keep, len(members))
    if resample == "none":
        kept = members
    elif resample == "uniform":
        kept = draw(members, [1.0] * len(members), keep, rng)
    else:
        failures = [t for t in members if not is_correct(t)]
        correct = [t for t in members if is_correct(t)]
        num_failures = num_failures_kept(len(failures), len(correct), keep, min_keep)
        kept = draw(failures, [1.0] * len(failures), num_failures, rng)
        if select == "lowest":
            kept += sorted(correct, key=lambda t: t.penalty)[: keep - num_failures]
        else:
            weights = [1 / (t.penalty + roc_eps) for t in correct]
            kept += draw(correct, weights, keep - num_failures, rng)
    return Group(group.problem, sorted(kept, key=lambda t: t.rollout))


def is_correct(t: Trajectory | Summary) -> bool:
    return t.reward > 0.5


def all_equal(group: Group) -> bool:
    """No signal: every A_i would be 0 (or 0 / 0). Judged on the answer's reward, never on a shaped
    one: a group of failures with different penalties is still a group of failures."""
    return len({is_correct(t) for t in group.trajectories}) < 2


def select_groups(
    groups: list[Group], keep: int, seed: int, step: int, overlong_filter: bool = False, **how
) -> tuple[list[Group], dict[str, int]]:
    """Steps 3 and 4 for a whole step: drop equal groups, resample, drop those made equal.

    `how` goes to resample_on_correct. overlong_filter: truncated trajectories leave their group,
    its mean and std too (an unsuccessful attempt of the paper, section 4.3.1: more truncation).
    Returns the kept groups and counts. A group's draw depends on (seed, step, problem) alone."""
    counts = dict(groups=len(groups), all_right=0, all_wrong=0, made_equal=0, overlong=0)
    kept_groups = []
    for group in groups:
        if overlong_filter:
            whole = [t for t in group.trajectories if t.stop_reason not in ("length", "wall")]
            counts["overlong"] += len(group.trajectories) - len(whole)
            group = Group(group.problem, whole)
        if all_equal(group):
            right = any(is_correct(t) for t in group.trajectories)
            counts["all_right" if right else "all_wrong"] += 1
            continue
        rng = Random(f"resample/{seed}/{step}/{group.problem.id}")
        kept = resample_on_correct(group, keep, rng, **how)
        if all_equal(kept):
            counts["made_equal"] += 1
        else:
            kept_groups.append(kept)
    return kept_groups, counts | {"kept": len(kept_groups)}


# ---- advantages and weights (Eq. 2, 7; Eq. 6) ----


def shaped_reward(t: Trajectory | Summary, tool_error_penalty: float = 0.0) -> float:
    """The reward, less a penalty for the share of failed calls: a switch, 0 in the paper."""
    return t.reward - tool_error_penalty * (t.num_errors / t.num_calls if t.num_calls else 0.0)


def group_advantages(rewards: Tensor, adv_std: bool = True) -> Tensor:
    """(K,) rewards of the kept -> (K,) advantages, Eq. 2 and 7; every token of o_i gets A_i.

    [1, 0, 0, 0] -> mean .25, population std .433 -> [1.732, -.577, -.577, -.577]
    Equal rewards give zeros, never NaN. adv_std=False leaves the division out (Dr. GRPO)."""
    centred = rewards - rewards.mean()
    if not adv_std:
        return centred
    std = rewards.std(correction=0)
    return centred / std if std > 0 else torch.zeros_like(rewards)


def loss_weights(groups: list[Group], denominator: str = "batch") -> list[list[float]]:
    """One number a trajectory, the weight of each of its model tokens; groups: the kept ones of one
    optimiser step, of all ranks. All weights x |o_i| sum to 1, whatever the denominator.

    batch       1 / sum of |o| over the optimiser step: every token of the step weighs the same
    group       1 / (groups x sum of |o_i| in the group): Eq. 6, a token mean a group
    trajectory  1 / (groups x K x |o_i|): Eq. 1, favours short trajectories"""
    lengths = [[t.num_model_tokens for t in g.trajectories] for g in groups]
    if denominator == "batch":
        total = sum(map(sum, lengths))
        return [[1 / total for _ in row] for row in lengths]
    if denominator == "group":
        return [[1 / (len(groups) * sum(row)) for _ in row] for row in lengths]
    if denominator == "trajectory":
        return [[1 / (len(groups) * len(row) * max(n, 1)) for n in row] for row in lengths]
    raise ValueError(f"denominator is batch, group or trajectory, got {denominator!r}")


# ---- the objective (Eq. 6) ----


def importance_weight(logprobs: Tensor, engine_logprobs: Tensor, cap: float | None = 2.0) -> Tensor:
    """min(pi_trainer / pi_engine, cap), detached: (T,); cap None: 1. The engine that sampled is not
    quite the policy that is trained (other kernels, other precision); the paper is silent. logprobs
    are the trainer's for the weights that sampled: of the current forward if there is one optimiser
    step a batch, else pi_old."""
    if cap is None:
        return torch.ones_like(logprobs)
    return (logprobs - engine_logprobs).detach().exp().clamp(max=cap)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, token_weights: Tensor,
    weight: Tensor | None = None, clip_low: float = 0.2, clip_high: float = 0.28,
) -> Tensor:  # fmt: skip
    """The clipped objective of Eq. 6, negated. All inputs (T,), packed.

    token_weights is loss_mask / denominator, made once per optimiser step over all ranks: tool
    output has weight 0 (context, not action), and the sum is right for any number of ranks and
    micro-batches. weight: importance_weight. With one optimiser step a batch old_logprobs is
    logprobs.detach(): ratio is 1, clipping never binds, the gradient is the policy gradient."""
    ratio = (logprobs - old_logprobs).exp()  # rho = pi_theta / pi_old
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if weight is not None:
        objective = objective * weight
    return -(objective * token_weights).sum()


@torch.no_grad()
def loss_metrics(
    logprobs: Tensor, old_logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor,
    loss_mask: Tensor, clip_low: float = 0.2, clip_high: float = 0.28, tis_cap: float | None = 2.0,
) -> dict[str, Tensor]:  # fmt: skip
    """Sums over model tokens (divide by `tokens` once they are added over ranks and batches)."""
    log_ratio = (logprobs - old_logprobs) * loss_mask
    ratio, positive = log_ratio.exp(), advantages > 0
    bound = torch.where(positive, ratio > 1 + clip_high, ratio < 1 - clip_low)
    gap = (old_logprobs - engine_logprobs) * loss_mask
    capped = gap > math.log(tis_cap) if tis_cap else torch.zeros_like(gap).bool()
    return {
        "tokens": loss_mask.sum(),
        "clip_share": (bound & loss_mask.bool()).float().sum(),
        "approx_kl": ((ratio - 1) - log_ratio).sum(),  # k3 estimate of KL(old, new)
        "engine_gap": gap.abs().sum(),
        "tis_capped": capped.float().sum(),
    }
