"""What the objectives compute, derived a second time in float64: rows, ratios, losses, KL scales, timestep draws.

Golden numbers notice that something has changed; these tests say what is right.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from test_grpo_kl import SHAPE, Analytic
from tiny import averages, scramble, tiny_sd3
from torch import Tensor

from diffrl.config import Config
from diffrl.methods.crd.objective import CRD
from diffrl.methods.direct.objective import Direct
from diffrl.methods.gardo import GardoSection
from diffrl.methods.gardo.gate import GateShare
from diffrl.methods.grpo import GRPOSection
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.nft.objective import NFT
from diffrl.methods.shared.spatial import SpatialRows
from diffrl.methods.shared.steps import StepRows, step_weights
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.rows import row_sigmas
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.run.loop import LoopSettings, ema_decay

STEPS, GROUP = 4, 3
PROMPTS = [Prompt("a red dog"), Prompt("two cats")]
SDE = SamplerSpec("flow_sde", STEPS, guidance_scale=2.0, noise_level=0.7)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_sd3(tmp_path_factory.mktemp("mathematics") / "sd3")
    policy = load_policy(str(folder), lora=LoraSpec(rank=4, alpha=8))
    policy.add_snapshot("old")
    policy.add_snapshot("sampling")
    scramble(policy, std=0.1)
    return policy


def drawn(policy: Policy, spec: SamplerSpec) -> Rollout:
    kept = spec.sampler == "flow_sde"
    return collect(policy, PROMPTS, spec, seed=0, epoch=0, group_size=GROUP, batch_size=6, keep_trajectory=kept)


def step_by_hand(x: Tensor, v: Tensor, t: float, t_next: float, second: float) -> tuple[Tensor, float]:
    """Mean and standard deviation of Flow-GRPO's SDE step (arXiv 2505.05470, Eq. 9), a = 0.7."""
    s, dt = 0.7 * math.sqrt(t / (1 - (second if t == 1 else t))), t_next - t
    mean = x * (1 + s**2 / (2 * t) * dt) + v * (1 + s**2 * (1 - t) / (2 * t)) * dt
    return mean, s * math.sqrt(-dt)


def log_prob_by_hand(value: Tensor, mean: Tensor, std: float) -> float:
    """Mean over dimensions of the normal's log-density."""
    return float((-((value - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2).mean())


# ---- GRPO: the stored step, the ratio of a second optimiser step, the clip


def test_grpo_rows_are_the_stored_steps(policy: Policy) -> None:
    """x_next follows from x_t by the step whose log-probability was stored, its noise being standard normal."""
    rollout, objective = drawn(policy, SDE), GRPO(SDE)
    pairs = sample_pairs(torch.arange(2 * GROUP), STEPS)
    rows = objective.rows(rollout, torch.zeros(2 * GROUP, 1), pairs, (0,))
    with torch.no_grad():
        v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v.double()
    schedule, noises = rollout.schedule.double(), []
    for i, (_, number) in enumerate(pairs.tolist()):
        t, t_next = float(schedule[number]), float(schedule[number + 1])
        assert (float(rows.t[i]), float(rows.t_next[i])) == pytest.approx((t, t_next))
        mean, std = step_by_hand(rows.x_t[i].double(), v[i], t, t_next, float(schedule[1]))
        assert float(rows.log_prob[i]) == pytest.approx(log_prob_by_hand(rows.x_next[i].double(), mean, std), abs=1e-4)
        noises.append((rows.x_next[i].double() - mean) / std)
    assert stats.kstest(torch.cat([noise.flatten() for noise in noises]).numpy(), "norm").pvalue > 0.01
    last = rows.x_next[pairs[:, 1] == STEPS - 1]
    assert torch.equal(last, rollout.latents), "a trajectory ends at the image"


def test_the_second_step_of_an_epoch_has_the_ratio_of_two_policies(policy: Policy) -> None:
    """The first step's ratio is 1 by definition; after it moved theta, the ratio and the clipped loss by hand."""
    rollout, objective = drawn(policy, SDE), GRPO(SDE, clip=0.02)
    advantages = torch.linspace(-2, 7, 2 * GROUP)[:, None]
    pairs = sample_pairs(torch.arange(2 * GROUP), STEPS)
    before = policy.state()
    try:
        rows = objective.rows(rollout, advantages, pairs, (0,))
        loss = objective.loss(objective.scalars(policy, rows), rows)
        assert float(loss.detach()) == pytest.approx(-STEPS * float(advantages.clamp(-5, 5).sum()), rel=1e-5)
        policy.load_state("default", {k: v + 0.05 * v.sign() for k, v in before.items()})
        objective.after_step(policy, 1)
        objective.means.take()
        rows = objective.rows(rollout, advantages, pairs, (0,))
        loss = float(objective.loss(objective.scalars(policy, rows), rows).detach())
        with torch.no_grad():
            v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v.double()
        expected, ratios = 0.0, []
        for i, (sample, number) in enumerate(pairs.tolist()):
            t, t_next = (float(rollout.schedule[number + j]) for j in (0, 1))
            mean, std = step_by_hand(rows.x_t[i].double(), v[i], t, t_next, float(rollout.schedule[1]))
            ratio = math.exp(log_prob_by_hand(rows.x_next[i].double(), mean, std) - float(rows.log_prob[i]))
            a = min(max(float(advantages[sample, 0]), -5.0), 5.0)
            expected -= min(ratio * a, min(max(ratio, 0.98), 1.02) * a)
            ratios.append(ratio)
        inside = sum(0.98 < ratio < 1.02 for ratio in ratios)
        assert 0 < inside < len(ratios), "some are clipped and some are not, or the test would say little"
        assert loss == pytest.approx(expected, abs=2e-3)
        told = averages(objective.means)
        assert told["grpo/ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
        assert told["grpo/clip_fraction"] == pytest.approx(1 - inside / len(ratios))
        assert abs(loss + STEPS * float(advantages.clamp(-5, 5).sum())) > 0.02, "a ratio of 1 gives another loss"
    finally:
        policy.load_state("default", before)


def test_rows_carry_tempflows_weight_and_the_loss_is_weighted_by_it(policy: Policy) -> None:
    rollout, pairs = drawn(policy, SDE), sample_pairs(torch.arange(2 * GROUP), STEPS)
    advantages = torch.linspace(-2, 3, 2 * GROUP * STEPS).view(2 * GROUP, STEPS, 1)  # a step's own: weights have mean 1
    plain, weighted = GRPO(SDE), GRPO(SDE, weighting="noise")
    rows, with_weight = (one.rows(rollout, advantages, pairs, (0,)) for one in (plain, weighted))
    table = step_weights(SDE, rollout)
    assert rows.weight is None and with_weight.weight is not None
    assert torch.equal(with_weight.weight, torch.stack([table[sample, number] for sample, number in pairs.tolist()]))
    phi = plain.scalars(policy, rows).detach()
    by_hand = -sum(
        float(table[sample, number] * advantages[sample, number, 0]) for sample, number in pairs.tolist()
    )  # on policy the ratio is 1
    assert float(weighted.loss(phi, with_weight)) == pytest.approx(by_hand, rel=1e-5)
    assert abs(by_hand - float(plain.loss(phi, rows))) > 0.1


def test_the_logged_share_of_clipped_ratios_counts_both_sides() -> None:
    ratios = torch.tensor([0.7, 0.95, 1.0, 1.05, 1.2, 1.5], dtype=torch.float64)
    objective = GRPO(SDE, clip=0.1)
    rows: Any = SimpleNamespace(log_prob=torch.zeros(6), on_policy=False, advantages=torch.ones(6, 1), weight=None)
    objective.loss(ratios.log()[:, None], rows)
    told = averages(objective.means)
    assert told["grpo/clip_fraction"] == pytest.approx(3 / 6)
    assert told["grpo/ratio"] == pytest.approx(float(ratios.mean()))


@pytest.mark.parametrize("kind", ["exact", "published"])
def test_the_gradient_through_guidance_is_exact_or_that_of_the_prompts_branch(policy: Policy, kind: str) -> None:
    """v = v_empty + g (v_cond - v_empty): J_cond^T g c + J_empty^T (1 - g) c with c = dL / dv, or its first term."""
    rollout, g = drawn(policy, SDE), SDE.guidance_scale
    parameters = [parameter for _, parameter in policy.trainable]
    objective = GRPO(SDE, published=["guidance"] if kind == "published" else [])
    rows = objective.rows(rollout, torch.linspace(-1, 1, 2 * GROUP)[:, None], sample_pairs(torch.arange(6), 2), (0,))
    phi = objective.scalars(policy, rows)
    (cotangent,) = torch.autograd.grad(phi.sum(), rows.prediction.v, retain_graph=True)
    found = torch.autograd.grad(phi.sum(), parameters)
    branches = {"cond": (rows.cond, g), "empty": (policy.encode([""]).select(torch.zeros(len(phi), dtype=int)), 1 - g)}
    each = {}
    for name, (cond, factor) in branches.items():
        v = policy.predict(rows.x_t, rows.t, cond, 1.0).v
        each[name] = torch.autograd.grad((factor * cotangent * v).sum(), parameters)
    scale = max(float(value.abs().max()) for value in found)
    for ours, cond, empty in zip(found, each["cond"], each["empty"], strict=True):
        torch.testing.assert_close(ours, cond + empty if kind == "exact" else cond, rtol=1e-3, atol=1e-5 * scale)
    assert any(float(value.abs().max()) > 1e-3 * scale for value in each["empty"]), "the two differ"


def test_first_takes_the_first_steps_and_random_others(policy: Policy) -> None:
    rollout = drawn(policy, SDE)
    pairs = sample_pairs(torch.arange(2 * GROUP), 2)
    for order, expected in (("first", {0, 1}), ("random", {0, 1, 2, 3})):
        objective = GRPO(SDE, timesteps=2, published=["first"] if order == "first" else [])
        assert objective.rows_per_sample(rollout) == 2
        rows = objective.rows(rollout, torch.zeros(2 * GROUP, 1), pairs, (0,))
        taken = [(rollout.schedule == t).nonzero().item() for t in rows.t]
        assert set(taken) == expected
        for (sample, number), step in zip(pairs.tolist(), taken, strict=True):
            assert order == "random" or step == number
            assert torch.equal(rollout.trajectory.x[sample, step], rows.x_t[pairs.tolist().index([sample, number])])
        both = torch.tensor(taken).view(2, -1)
        assert (both[0] != both[1]).all(), "no step twice for an image"


@pytest.mark.parametrize("name", ["flow_sde", "dance", "cps"])
def test_the_published_kl_leaves_the_step_size_out(name: str) -> None:
    """`||mean - mean_ref||^2 / (2 std_dev_t^2)` in Flow-GRPO's train_sd3.py and GARDO's scripts, whose std_dev_t has no
    sqrt(-dt); the standard deviation of cps has no step size in it."""
    x = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.tensor([0.9, 0.6, 0.3], dtype=torch.float64)
    step = torch.tensor([0.02, 0.1, 0.25], dtype=torch.float64)
    values = {}
    for kl in ("exact", "published"):
        pairs = torch.zeros(3, 2, dtype=torch.int64)
        cond: Any = SimpleNamespace()
        stored: dict[str, Any] = {"x_next": x, "t_next": t - step, "t_second": 0.9, "log_prob": torch.zeros(3)}
        rows = StepRows(x, x, t, cond, torch.zeros(3, 1), torch.zeros(3), False, pairs, **stored)
        objective, policy = (
            GRPO(SamplerSpec(sampler=name, noise_level=0.7), beta=1.0, published=["kl"] if kl == "published" else []),
            Analytic(),
        )
        objective.scalars(policy, rows)
        values[kl] = objective.penalty(policy, rows)
    factor = torch.ones_like(step) if name == "cps" else step
    assert torch.allclose(values["published"], values["exact"] * factor, rtol=1e-9)
    if name == "flow_sde":
        s2 = 0.49 * t / (1 - t)
        gap = 0.3 * x * ((1 + s2 * (1 - t) / (2 * t)) * -step).view(-1, 1, 1, 1)
        assert torch.allclose(values["published"], gap.square().flatten(1).mean(1) / (2 * s2), rtol=1e-9)


# ---- rows of the forward process


@pytest.mark.parametrize("objective", [NFT(), CRD(), Direct(timesteps=STEPS)], ids=lambda o: type(o).__name__)
def test_noised_rows_are_on_the_path_of_their_level(policy: Policy, objective: NFT | CRD | Direct) -> None:
    """x_t = (1 - t) x0 + t eps with the row's own eps, which is standard normal, and with a level of the schedule."""
    rollout = drawn(policy, SamplerSpec("dpm2", STEPS))
    pairs = sample_pairs(torch.arange(2 * GROUP), STEPS)
    rows = objective.rows(rollout, torch.zeros(2 * GROUP, 1), pairs, (0,))
    t = rows.t.double().view(-1, 1, 1, 1)
    assert torch.equal(rows.x0, rollout.latents[pairs[:, 0]])
    assert torch.allclose(rows.x_t.double(), (1 - t) * rows.x0.double() + t * rows.eps.double(), atol=1e-6)
    distinct = torch.unique(rows.eps.flatten(1), dim=0)  # CRD's groups share theirs
    assert len(distinct) == (2 if isinstance(objective, CRD) else 2 * GROUP) * STEPS
    assert stats.kstest(distinct.flatten().numpy(), "norm").pvalue > 0.01
    assert sorted(rows.t.tolist()) == sorted(rollout.schedule[:-1].repeat(2 * GROUP).tolist())
    if isinstance(objective, Direct):
        following = dict(zip(rollout.schedule[:-1].tolist(), rollout.schedule[1:].tolist(), strict=True))
        assert rows.t_next.tolist() == [following[level] for level in rows.t.tolist()]


def test_drawn_levels_have_their_distributions() -> None:
    # The other distribution is 0.11 away, and 0.05 is far beyond chance in 3,000 draws.
    rollout = SimpleNamespace(schedule=torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0]))
    names = [("k", i) for i in range(3000)]
    zero = torch.zeros(3000, dtype=torch.int64)
    uniform = row_sigmas(rollout, names, zero, 1, "uniform")  # type: ignore[arg-type]
    assert stats.kstest(uniform.numpy(), "uniform").statistic < 0.05 and float(uniform.min()) >= 1e-4
    logit = row_sigmas(rollout, names, zero, 1, "logit_normal")  # type: ignore[arg-type]
    moved = row_sigmas(rollout, names, zero, 1, "logit_normal_3")  # type: ignore[arg-type]
    torch.testing.assert_close(moved, 3 * logit / (1 + 2 * logit))  # the scheduler's shift, by the formula
    assert float(moved.median()) == pytest.approx(0.75, abs=0.02)
    assert stats.kstest(torch.logit(logit).numpy(), "norm").statistic < 0.05
    twice = torch.stack([row_sigmas(rollout, names, zero + j, 2, "schedule") for j in (0, 1)])  # type: ignore[arg-type]
    assert (twice[0] != twice[1]).all(), "without repeats"
    counts = torch.stack([(twice == level).sum() for level in rollout.schedule[:-1]])
    assert stats.chisquare(counts.numpy()).pvalue > 0.01
    noisiest = row_sigmas(rollout, names, zero, 1, "schedule", 2)  # type: ignore[arg-type]
    assert set(noisiest.tolist()) == set(rollout.schedule[:2].tolist())


def test_nft_masks_rows_that_a_reward_does_not_apply_to() -> None:
    """Their (L+ + L-) / 2 would hold theta to old for the sake of a reward that says nothing about them."""
    objective = NFT(b=0.5)
    phi = torch.rand(4, 2, dtype=torch.float64)
    pairs = torch.zeros(4, 2, dtype=torch.int64)
    advantages = torch.tensor([[1.0, 0.0]] * 4)
    rows = SpatialRows(*[torch.zeros(4)] * 3, SimpleNamespace(), advantages, torch.zeros(4), False, pairs)  # type: ignore[arg-type]
    full = objective.loss(phi, rows)
    rows.known = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    masked = objective.loss(phi, rows)
    assert float(masked[0]) == pytest.approx(float(full[0]))
    assert float(masked[1]) == pytest.approx(float(5 / 0.5 * phi[[0, 3]].mean(1).sum()))


# ---- schedules and thresholds


def test_the_averaged_lora_warms_up_and_waits_as_published() -> None:
    settings = LoopSettings(0, 2, 2, 1, 1.0, ema=0.9, ema_every=8, ema_warmup=True)
    assert [ema_decay(settings, step) for step in (1, 7, 9)] == [None] * 3
    assert ema_decay(settings, 8) == pytest.approx(9 / 18) and ema_decay(settings, 80) == pytest.approx(81 / 90)
    assert ema_decay(settings, 160) == 0.9
    plain = LoopSettings(0, 2, 2, 1, 1.0, ema=0.9)
    assert [ema_decay(plain, step) for step in (1, 2)] == [0.9, 0.9]
    assert ema_decay(LoopSettings(0, 2, 2, 1, 1.0, ema=0.0), 8) is None


def test_the_share_is_compared_with_the_window_and_moves_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl.methods.gardo.gate.WINDOW", 3)
    share = GateShare()
    for mean in (0.1, 0.2, 0.3):
        share.follow(mean)
    assert share.value == pytest.approx(0.1 * 1.1**2)
    share.follow(0.4)
    share.follow(0.1)  # below 0.2, the least of the window
    assert share.value == pytest.approx(0.1 * 1.1**3 * 0.9)
    for mean in range(1, 20):
        share.follow(float(mean))
    assert share.value == 0.2 and share.limits == (0.02, 0.2) and GateShare(0.8).limits[1] == 1.0


def test_a_reset_threshold_has_the_units_of_the_kl() -> None:
    section = GardoSection()

    def threshold(objective: str, **more: Any) -> float | None:
        return section.reset_kl(Config(objective=objective, grpo=GRPOSection(**more)))  # type: ignore[arg-type]

    assert threshold("grpo", published=["kl"]) == 1e-4 and threshold("grpo") == 7e-4
    assert threshold("nft") == threshold("crd") == 0.15
    fixed = GardoSection.model_validate({"reset": {"kl": 0.02}})
    assert fixed.reset_kl(Config()) == 0.02
    assert GardoSection.model_validate({"reset": {"kl": None}}).reset_kl(Config()) is None


@pytest.mark.parametrize("value", [-1, 0, "atuo", True, float("inf")])
def test_a_threshold_that_is_none_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(ValueError, match='a number above 0, "auto" or null') as caught:
        GardoSection.model_validate({"reset": {"kl": value}})
    assert str(caught.value).startswith("1 validation error")
