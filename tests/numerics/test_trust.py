"""GRPO-Guard's ratio, even weights and Flow-DPPO's trust region: equations in float64, limits, and a tiny policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_mathematics import GROUP, SDE, STEPS, drawn, log_prob_by_hand, step_by_hand
from test_step_weights import FLOW, VP, rollout, sensitivity
from tiny import averages, scramble, tiny_sd3
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from diffrl.config.sections import Rollout
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.shared.steps import grpo_loss, masked_loss, normalised, step_divergence, step_weights
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.running_stats import RunningMeans, summaries
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.rollout import SamplerSpec
from diffrl.samplers import gaussian_log_prob, sde_kernel

SHAPE = (2, 3, 2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(rows: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x', mu, mu_old and s of some rows, each with a step of its own size."""
    std = torch.linspace(0.1, 0.8, rows, dtype=torch.float64).view(-1, 1, 1, 1)
    old = draw(rows, *SHAPE)
    return old + std * draw(rows, *SHAPE, seed=2), old + 0.05 * draw(rows, *SHAPE, seed=1), old, std


def test_the_divergence_is_the_kl_of_two_gaussian_steps() -> None:
    _, mean, old, std = step()
    by_torch = kl_divergence(Normal(mean, std), Normal(old, std)).flatten(1).mean(1)
    torch.testing.assert_close(step_divergence(mean, old, std), by_torch, rtol=1e-12, atol=0)


def test_the_normalised_ratio_is_s_times_the_plain_one_without_its_mean() -> None:
    x, mean, old, std = step()
    log_ratio = gaussian_log_prob(x, mean, std) - gaussian_log_prob(x, old, std)
    by_hand = [float(((mean[i] - old[i]) * (x[i] - old[i]) / std[i]).sum()) / 12 for i in range(5)]
    ours, d, s = normalised(x, mean, old, std), step_divergence(mean, old, std), std.flatten()
    torch.testing.assert_close(ours, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(ours, s * (log_ratio + d), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(log_ratio, -d + ours / s, rtol=1e-10, atol=1e-14)


def test_the_plain_ratio_has_the_mean_minus_d_and_the_normalised_one_zero() -> None:
    _, mean, old, std = (part[4:] for part in step())
    x = old + std * draw(400_000, *SHAPE, seed=3)
    d = float(step_divergence(mean, old, std))
    plain = gaussian_log_prob(x, mean, std) - gaussian_log_prob(x, old, std)
    guarded = normalised(x, mean, old, std)
    for found, wanted in ((plain, -d), (guarded, 0.0)):
        error = float(found.std()) / math.sqrt(len(x))
        assert abs(float(found.mean()) - wanted) < 4 * error
    assert d > 20 * float(plain.std()) / math.sqrt(len(x)), "else a mean of 0 would pass, too"


def test_on_policy_the_normalised_gradient_is_s_times_grpos() -> None:
    x, _, old, std = step()
    mean, weights = old.clone().requires_grad_(), draw(5)
    (plain,) = torch.autograd.grad(weights @ gaussian_log_prob(x, mean, std), mean)
    (guarded,) = torch.autograd.grad(weights @ normalised(x, mean, old, std), mean)
    torch.testing.assert_close(guarded, std * plain, rtol=1e-12, atol=1e-16)


# ---- the mask


LOG_RATIO = torch.tensor([0.2, 0.2, -0.2, -0.2, 0.2, -0.2], dtype=torch.float64)
A = torch.tensor([[1.0, -2], [-1, 3], [1, -4], [-1, 5], [9, -9], [0, 0]], dtype=torch.float64)


def gradients(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, K) of each column's losses by the log-ratio."""
    leaf = LOG_RATIO.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(loss(leaf)[:, k].sum(), leaf)[0] for k in range(2)], 1)


@pytest.mark.parametrize("delta", [0.0, 0.5, math.inf])
def test_the_mask_stops_what_goes_further_out_by_row_and_reward(delta: float) -> None:
    """At delta 0 only rows that are pulled back are left, at infinity it is GRPO with a clip that never acts."""
    d = torch.tensor([0.1, 0.9, 0.9, 0.9, 0.9, 0.9], dtype=torch.float64)
    found = gradients(lambda leaf: masked_loss(leaf, torch.zeros_like(leaf), A, d > delta, 5.0))
    for i in range(6):
        for k in range(2):
            a, r = max(-5.0, min(5.0, float(A[i, k]))), math.exp(float(LOG_RATIO[i]))
            out = (a > 0 and r > 1) or (a < 0 and r < 1)
            wanted = 0.0 if out and float(d[i]) > delta else -r * a
            assert float(found[i, k]) == pytest.approx(wanted, rel=1e-12), (i, k)
    if delta == math.inf:
        assert torch.equal(found, gradients(lambda leaf: grpo_loss(leaf, torch.zeros_like(leaf), A, 1e9, 5.0)))


def test_what_is_stopped_is_logged_by_the_sign_of_the_advantage() -> None:
    rows: Any = SimpleNamespace(log_prob=torch.zeros(6), on_policy=False, advantages=A, weight=None)
    rows.divergence = torch.tensor([0.1, 0.9, 0.9, 0.9, 0.9, 0.9])
    held, clipped = GRPO(SDE, delta=0.5), GRPO(SDE, clip=0.1)
    for objective in (held, clipped):
        objective.loss(LOG_RATIO[:, None], rows)
    # outward: (0, 0), (1, 1), (2, 1), (3, 0), (4, 0); the first row lies within delta, but not within the clip
    told, others = averages(held.means), averages(clipped.means)
    assert told["grpo/stopped/positive"] == pytest.approx(2 / 5) and "grpo/clip_fraction" not in told
    assert told["grpo/stopped/negative"] == pytest.approx(2 / 5)
    assert others["grpo/stopped/positive"] == pytest.approx(3 / 5)
    assert others["grpo/stopped/negative"] == pytest.approx(2 / 5) and others["grpo/clip_fraction"] == 1.0


def test_quantiles_are_those_of_all_rows_to_a_bin() -> None:
    values = 10 ** (-6 + 1.5 * draw(4000)).clamp(-11, -1)
    parts = [RunningMeans(), RunningMeans()]
    for means, some in zip(parts, values.split(1500)[:2], strict=True):
        means.spread("d", some)
    parts[0].spread("d", values[3000:])
    sums = [means.take()["d"] for means in parts]  # of two processes
    told = summaries({"d": sums[0] + sums[1]})
    for name, share in (("d/p50", 0.5), ("d/p99", 0.99)):
        exact = float(values.quantile(share))
        assert exact <= told[name] <= exact * 10 ** (1 / 20) * 1.02
    means = RunningMeans()
    with means.paused():
        means.spread("d", values)
    assert summaries(means.take()) == {"d/p50": None, "d/p99": None}
    means.spread("d", torch.zeros(3))
    assert summaries(means.take())["d/p99"] == pytest.approx(1e-12)


# ---- even weights


@pytest.mark.parametrize(("name", "process", "width"), [
    ("flow_sde", FLOW, 10), ("dance", FLOW, 10), ("cps", FLOW, 9), ("renoise", FLOW, 9), ("ddim", VP, 9),
])  # fmt: skip
def test_even_weights_make_every_steps_gradient_the_same(name: str, process: Any, width: int) -> None:
    levels = torch.tensor([1, 0.97, 0.92, 0.86, 0.79, 0.7, 0.58, 0.44, 0.29, 0.13, 0], dtype=torch.float64)
    spec, trajectory = SamplerSpec(name, 10, noise_level=0.7), rollout(levels, process, width)
    second, pairs = float(levels[1]), [(float(levels[i]), float(levels[i + 1])) for i in range(width)]
    plain = torch.tensor([sensitivity(name, *pair, second, process) for pair in pairs], dtype=torch.float64)
    x = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    std = [
        sde_kernel(name, x, process.from_velocity(x, x, t), t, tn, 0.7, second, process)[1].flatten()
        for t, tn in (torch.tensor(pair, dtype=torch.float64)[:, None] for pair in pairs)
    ]
    for guarded, gradient in ((False, plain), (True, plain * torch.cat(std))):
        weight = step_weights(spec, trajectory, even=True, normalised=guarded)[0]
        assert float(weight.mean()) == pytest.approx(1.0)
        each = weight * gradient
        torch.testing.assert_close(each / each[0], torch.ones_like(each), rtol=1e-9, atol=0)
    if name == "flow_sde":  # GRPO-Guard's factor, but for the step from t = 1
        dt = (levels[:-1] - levels[1:])[1:]
        torch.testing.assert_close(weight[1:] * dt, (weight[1] * dt[0]).expand(9), rtol=1e-9, atol=0)


# ---- a tiny policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_sd3(tmp_path_factory.mktemp("trust") / "sd3")
    policy = load_policy(str(folder), lora=LoraSpec(rank=4, alpha=8))
    policy.add_snapshot("old")
    scramble(policy, std=0.1)
    policy.copy("default", "old")
    return policy


ADVANTAGES = torch.linspace(-2, 2, 2 * GROUP)[:, None]
PAIRS = sample_pairs(torch.arange(2 * GROUP), STEPS)


def gradient(policy: Policy, objective: GRPO, cast: bool = False) -> tuple[Tensor, Any]:
    """The gradient of all rows' loss, and the rows."""
    rows = objective.rows(drawn(policy, SDE), ADVANTAGES, PAIRS, (0,))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = objective.loss(objective.scalars(policy, rows), rows).sum()
    grads = torch.autograd.grad(loss, [parameter for _, parameter in policy.trainable])
    return torch.cat([grad.flatten() for grad in grads]), rows


def test_with_theta_equal_to_old_it_is_grpo_to_the_bit(policy: Policy) -> None:
    """On policy, and where the old mean is computed: the same rows by the same kernels give a divergence of 0."""
    base, _ = gradient(policy, GRPO(SDE))
    for cast in (False, True):
        objective = GRPO(SDE, delta=1e-30)
        on_policy, rows = gradient(policy, objective, cast)
        assert cast or torch.equal(on_policy, base)
        objective.after_step(policy, 1)
        off_policy, rows = gradient(policy, objective, cast)
        assert torch.equal(off_policy, on_policy) and not rows.on_policy
        assert torch.equal(rows.divergence, torch.zeros(len(PAIRS)))
    assert objective.snapshots == ("old",) and GRPO(SDE).snapshots == ()


def test_a_moved_theta_is_compared_with_the_snapshot(policy: Policy) -> None:
    objective, guarded = GRPO(SDE, delta=1e-4), GRPO(SDE, ratio="normalised", clip=1e-3)
    before, rollout = policy.state(), drawn(policy, SDE)
    try:
        policy.load_state("default", {k: v + 0.05 * v.sign() for k, v in before.items()})
        for one in (objective, guarded):
            one.after_step(policy, 1)
        rows, others = (one.rows(rollout, ADVANTAGES, PAIRS, (0,)) for one in (objective, guarded))
        with torch.no_grad():
            phi, log_normalised = objective.scalars(policy, rows), guarded.scalars(policy, others)[:, 0]
            means = []
            for name in ("default", "old"):
                with policy.adapter(name):
                    means.append(policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v.double())
        loss, stopped = 0.0, {1: [], -1: []}
        for i, (sample, number) in enumerate(PAIRS.tolist()):
            t, t_next = (float(rollout.schedule[number + j]) for j in (0, 1))
            second, x, x_next = float(rollout.schedule[1]), rows.x_t[i].double(), rows.x_next[i].double()
            (mean, std), (old, _) = (step_by_hand(x, v[i], t, t_next, second) for v in means)
            d = float(((mean - old) ** 2).mean()) / (2 * std**2)
            log_ratio = log_prob_by_hand(x_next, mean, std) - log_prob_by_hand(x_next, old, std)
            assert float(rows.divergence[i]) == pytest.approx(d, rel=1e-3)
            assert float(phi[i, 0] - rows.log_prob[i]) == pytest.approx(log_ratio, abs=2e-6)
            assert float(log_normalised[i]) == pytest.approx(std * (log_ratio + d), abs=2e-6)
            a = float(ADVANTAGES[sample, 0])
            out = d > 1e-4 and a * log_ratio > 0
            stopped[1 if a > 0 else -1].append(out)
            loss -= 0.0 if out else math.exp(log_ratio) * a
        assert float(objective.loss(phi, rows)) == pytest.approx(loss, abs=1e-3)
        told = averages(objective.means)
        for sign, name in ((1, "positive"), (-1, "negative")):
            assert told[f"grpo/stopped/{name}"] == pytest.approx(sum(stopped[sign]) / len(stopped[sign]))
            assert 0 < sum(stopped[sign]) < len(stopped[sign]), "some are stopped and some are not"
        assert told["grpo/divergence/p50"] <= told["grpo/divergence/p99"]
        assert [one.cost(Rollout(), False, 4).forwards for one in (objective, GRPO(SDE))] == [0.75, 0]
    finally:
        policy.load_state("default", before)
