"""A step's loss is a mean over images and over timesteps, for every objective, through the loop's own optimiser step.

The gradient that the loop takes is compared with one made here: of the paper's loss of all rows at once, divided by
counts that are written down, not asked of the package. Twice as many timesteps must not be a step twice as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_mathematics import GROUP, PROMPTS, SDE, STEPS, drawn
from test_objectives_and_credit import listing, plackett_luce
from tiny import KNOWN_WEIGHTS, averages, scramble, tiny_sd3
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffrl.methods.acflow.objective import ActorCritic
from diffrl.methods.awm.objective import AWM, Weighting
from diffrl.methods.crd.objective import CRD
from diffrl.methods.dgpo.objective import DGPO
from diffrl.methods.direct import Align, Pair
from diffrl.methods.direct.objective import Direct
from diffrl.methods.dpo.objective import DPO
from diffrl.methods.fdfo.objective import FDFO
from diffrl.methods.gdro.objective import GDRO
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.marble.combiner import Marble
from diffrl.methods.nft.objective import NFT
from diffrl.methods.prdp.objective import PRDP
from diffrl.methods.rwr.objective import Regression
from diffrl.methods.shared.coupling import measured
from diffrl.methods.tree.credit import Branched
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.gradients import SumOfLosses, penalties
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.objective import Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.run.clock import Clock
from diffrl.run.loop import Loop, LoopSettings
from diffrl.run.processes import Processes
from diffrl.samplers import gaussian_log_prob

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from embedder import Embedder

IMAGES = len(PROMPTS) * GROUP  # 6
EVERYTHING = sample_pairs(torch.arange(IMAGES), STEPS)  # row number major: 4 timesteps of 6 images
SCORES = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.2, 0.8])[:, None]
KEY = (0, 0, 0)  # seed, epoch, pass


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_sd3(tmp_path_factory.mktemp("mean") / "sd3")
    policy = load_policy(str(folder), lora=LoraSpec(rank=4, alpha=8))
    for name in ("old", "sampling", "average"):
        policy.add_snapshot(name)
    scramble(policy, std=0.1)
    return policy


def gradient_of_the_loop(
    policy: Policy,
    objective: Objective,
    rollout: Rollout,
    advantages: Tensor,
    gradients: Any = None,
) -> tuple[Tensor, float]:
    """What one optimiser step of the loop takes from the LoRA at step size 1, in three micro-batches; and its loss."""
    settings = LoopSettings(0, GROUP, IMAGES, 1, max_grad_norm=1e9, ema=0.0, micro_batch=1 / 3)
    before = policy.state()
    optimiser = torch.optim.SGD([parameter for _, parameter in policy.trainable], lr=1.0)
    parts: dict[str, Any] = {"scorer": None, "weights": torch.ones(1), "source": None}
    loop = Loop(
        policy=policy, objective=objective, settings=settings, optimiser=optimiser,
        processes=Processes(Accelerator(cpu=True), Clock()), gradients=gradients, compose=SimpleNamespace(),
        **parts,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        (loss,), _ = loop._optimise(rollout, advantages, 0)
        after = policy.state()
        return torch.cat([(before[key] - after[key]).flatten() for key in before]), float(loss)
    finally:
        policy.load_state("default", before)


def gradient(policy: Policy, loss: Tensor) -> Tensor:
    """In the order of `policy.state()`."""
    named = policy.trainable
    found = torch.autograd.grad(loss, [parameter for _, parameter in named])
    by_name = {name: value for (name, _), value in zip(named, found, strict=True)}
    keys = [next(name for name in by_name if name.endswith(key) or key in name) for key in policy.state()]
    return torch.cat([by_name[key].flatten() for key in keys])


def same(found: Tensor, wanted: Tensor) -> None:
    """To what is lost in the weights' own rounding: the gradient is the difference of two LoRAs."""
    assert wanted.norm() > 0
    assert float((found - wanted).norm() / wanted.norm()) < 5e-3
    assert float(found.norm() / wanted.norm()) == pytest.approx(1, abs=5e-3)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "grpo": lambda: GRPO(SDE, beta=0.1),
    "nft": lambda: NFT(beta=0.1),
    "crd": lambda: CRD(beta=(1e-4, 0.1)),
    "direct": lambda: Direct({"embedder": Embedder()}, [1.0], timesteps=STEPS),
    "srpo": lambda: Direct({"embedder": Embedder()}, [1.0], timesteps=STEPS // 2, align=Align(), pair=Pair(), cap=0.3),
    "rwr": lambda: Regression(weights="softmax", tau=0.3, beta=0.1),
    "acflow": lambda: ActorCritic(beta=0.1),
    "awm": lambda: AWM(beta=0.1, beta_average=0.5),
    "dgpo": lambda: DGPO(beta=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_the_mean_over_images_and_timesteps(policy: Policy, name: str) -> None:
    objective, ours = OBJECTIVES[name](), OBJECTIVES[name]()
    rollout = drawn(policy, SDE if objective.keep_trajectory else SamplerSpec("dpm2", STEPS))
    groups = torch.arange(IMAGES) // GROUP
    scored = ScoredBatch(SCORES, torch.ones(1), groups, torch.zeros(IMAGES, 2), torch.zeros(IMAGES, 0))
    advantages = objective.advantages(scored)
    assert torch.equal(ours.advantages(scored), advantages)
    rows = objective.rows(rollout, advantages, EVERYTHING, KEY)
    objective.before_step(policy, OptimiserStep(rollout, advantages, [EVERYTHING], KEY, lambda x: x))
    total = objective.loss(objective.scalars(policy, rows), rows).sum()
    penalty = penalties(objective, policy, rows)
    wanted = (total + (0 if penalty is None else penalty.sum())) / (6 * 4)
    by_hand = gradient(policy, wanted)
    found, loss = gradient_of_the_loop(policy, ours, rollout, advantages)
    same(found, by_hand)
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-6)


def errors(policy: Policy, rows: Rows, snapshot: str | None = "default") -> Tensor:
    """(T, P, G) mean squared errors of the velocity, in flow matching's own words."""
    with policy.adapter(snapshot):
        v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
    assert rows.eps is not None
    return (v - (rows.eps - rows.x0)).square().flatten(1).mean(1).view(STEPS, len(PROMPTS), GROUP)


def test_a_dpo_step_is_the_mean_over_pairs_and_timesteps(policy: Policy) -> None:
    rollout, objective = drawn(policy, SamplerSpec("dpm2", STEPS)), DPO(b=100.0)
    picked = objective.rule.estimate(SCORES, torch.arange(IMAGES) // GROUP, "none")
    rows = objective.rows(rollout, picked, EVERYTHING, KEY)
    with torch.no_grad():
        reference = errors(policy, rows, None)
    d = errors(policy, rows) - reference
    best, worst = (1, 2), (0, 1)  # of the two groups, by the scores above
    pairs = [d[:, p, best[p]] - d[:, p, worst[p]] for p in (0, 1)]
    wanted = -logsigmoid(-100.0 / 2 * torch.stack(pairs)).mean()
    by_hand = gradient(policy, wanted)
    ours = DPO(b=100.0)
    same(gradient_of_the_loop(policy, ours, rollout, picked)[0], by_hand)
    told = averages(ours.means)
    assert told["dpo/loss"] == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert told["dpo/accuracy"] == pytest.approx(float((torch.stack(pairs) < 0).float().mean()))
    assert 0 < told["dpo/accuracy"] < 1 or not KNOWN_WEIGHTS  # else the comparison above would say little


def test_online_dpo_follows_theta_every_so_many_steps(policy: Policy) -> None:
    objective, there = DPO(follow=2), policy.state()
    far = {key: value + 1 for key, value in there.items()}
    policy.load_state("old", far)
    for step, snapshot in ((1, far), (2, there), (3, there)):
        objective.after_step(policy, step)
        assert all(torch.equal(value, snapshot[key]) for key, value in policy.state("old").items())


def test_a_step_of_the_best_of_groups_is_the_mean_over_them_and_timesteps(policy: Policy) -> None:
    rollout, objective = drawn(policy, SamplerSpec("dpm2", STEPS)), Regression(weights="best")
    picked = objective.rule.estimate(SCORES, torch.arange(IMAGES) // GROUP, "none")
    e = errors(policy, objective.rows(rollout, picked, EVERYTHING, KEY))
    by_hand = gradient(policy, torch.stack([e[:, 0, 1], e[:, 1, 2]]).mean())
    same(gradient_of_the_loop(policy, Regression(weights="best"), rollout, picked)[0], by_hand)


def test_images_without_a_signal_count_for_nothing_with_skip_zero(policy: Policy) -> None:
    """A group that agrees: the step, KL included, is the mean over the other group's rows alone."""
    spec = SamplerSpec("flow_sde", STEPS)
    advantages = torch.tensor([0.0, 0.0, 0.0, 0.7, -1.2, 0.5])[:, None]
    rollout, objective = drawn(policy, spec), GRPO(spec, beta=0.3, published=["skip_zero"])
    rows = objective.rows(rollout, advantages, sample_pairs(torch.arange(3, 6), STEPS), KEY)
    losses = objective.loss(objective.scalars(policy, rows), rows)
    penalty = objective.penalty(policy, rows)
    assert penalty is not None
    by_hand = gradient(policy, (losses.sum() + penalty.sum()) / (3 * STEPS))
    same(gradient_of_the_loop(policy, GRPO(spec, beta=0.3, published=["skip_zero"]), rollout, advantages)[0], by_hand)
    kept = gradient_of_the_loop(policy, GRPO(spec, beta=0.3), rollout, advantages)[0]
    assert not torch.allclose(kept, by_hand, rtol=0.05), "without it the other group's KL is in there"


@pytest.fixture
def spread(policy: Policy) -> Iterator[Policy]:
    """The policy with snapshots that are neither theta nor the pretrained model."""
    kept = {name: policy.state(name) for name in ("old", "average")}
    theta = policy.state()
    policy.load_state("old", {key: -2 * value for key, value in theta.items()})
    policy.load_state("average", {key: 0.5 * value for key, value in theta.items()})
    yield policy
    for name, state in kept.items():
        policy.load_state(name, state)


@pytest.mark.parametrize("weighting", ["uniform", "t2", "ghuber"])
def test_an_awm_step_off_policy_is_the_clipped_ratio_and_two_penalties(spread: Policy, weighting: Weighting) -> None:
    """Written out from the errors of theta, of "old", and of what the two penalties refer to."""
    rollout, advantages = drawn(spread, SamplerSpec("dpm2", STEPS)), torch.tensor([1.3, -0.4, -0.9, 3, -1, -2])[:, None]
    rows = AWM().rows(rollout, advantages, EVERYTHING, KEY)
    t, a = rows.t.view(STEPS, 2, GROUP), (advantages[:, 0].clamp(-2, 2) / 2).view(2, GROUP)

    def matching(snapshot: str) -> Tensor:
        e = errors(spread, rows, snapshot)
        return {"uniform": e, "t2": t**2 * e, "ghuber": 4 * t * ((e + 1e-10) ** 0.25 - 1e-10**0.25)}[weighting]

    def apart(snapshot: str | None) -> Tensor:
        with torch.no_grad(), spread.adapter(snapshot):
            there = spread.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
        return (spread.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v - there).square().flatten(1).mean(1)

    with torch.no_grad():
        old = matching("old")
    ratio = (old - matching("default")).exp()
    clip = float((ratio.detach() - 1).abs().quantile(0.45))  # between two rows
    settings: dict[str, Any] = {"weighting": weighting, "beta": 0.2, "beta_average": 0.7}
    ours = AWM(**settings)
    ours.adv_clip, ours.clip = 2.0, clip
    ours.on_policy = False
    losses = torch.maximum(-ratio * a, -ratio.clamp(1 - clip, 1 + clip) * a)
    wanted = losses.mean() + 0.2 * apart(None).mean() + 0.7 * apart("average").mean()
    by_hand = gradient(spread, wanted)
    same(gradient_of_the_loop(spread, ours, rollout, advantages)[0], by_hand)
    told = averages(ours.means)
    outward = ((a > 0) & (ratio > 1 + clip)) | ((a < 0) & (ratio < 1 - clip))
    assert 0 < outward.sum() < (ratio > 0).sum()
    assert told["awm/stopped"] == pytest.approx(float(outward.float().mean()))
    assert told["awm/average_kl"] == pytest.approx(float(apart("average").mean().detach()), rel=1e-3)


@pytest.mark.parametrize("guidance", [None, 4.5])
def test_a_dgpo_step_is_the_mean_over_groups_and_timesteps_over_b(spread: Policy, guidance: float | None) -> None:
    """Autograd of the paper's loss; what the clip stops has no loss, but its penalty. The reference of S is
    guided as that of the penalty."""
    advantages = torch.tensor([1.2, -0.2, -1.0, 0.0, 0.0, 0.0])[:, None]  # the second group agrees
    rollout, b = drawn(spread, SamplerSpec("dpm2", STEPS)), 40.0
    rows = DGPO().rows(rollout, advantages, EVERYTHING, KEY)
    e, a = errors(spread, rows), advantages.view(2, GROUP)
    with torch.no_grad():
        old = errors(spread, rows, "old")
        with spread.adapter(None):
            anchor = spread.predict(rows.x_t, rows.t, rows.cond, guidance or rows.guidance).v
        there = (anchor - rows.velocity(spread.process)).square().flatten(1).mean(1).view_as(e)
        rho = (old - e).exp()
        clip = float((rho - 1).abs().quantile(0.45))  # between two rows
        stops = ((a > 0) & (rho > 1 + clip)) | ((a < 0) & (rho < 1 - clip))
    assert 0 < stops.sum() < stops.numel()
    settings: dict[str, Any] = {"b": b, "clip": clip, "beta": 0.3, "anchor_guidance": guidance}
    ours = DGPO(**settings)
    ours.on_policy = False
    kl = (spread.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v - anchor).square().flatten(1).mean(1).view_as(e)
    held = torch.where(stops, e.detach(), e)
    loss = -logsigmoid(-b * (a * (held - there)).mean(2)).mean() / b
    by_hand = gradient(spread, loss + 0.3 * kl.mean())
    same(gradient_of_the_loop(spread, ours, rollout, advantages)[0], by_hand)
    told = averages(ours.means)
    assert told["dgpo/stopped"] == pytest.approx(float(stops[:, 0].float().mean()))  # of the group with a signal
    s = b * (a * (e - there)).mean(2)[:, 0]
    assert told["dgpo/loss"] == pytest.approx(float(-logsigmoid(-s).mean().detach()), rel=1e-3)
    assert told["dgpo/gate"] == pytest.approx(float(s.sigmoid().mean().detach()), rel=1e-3)


@pytest.mark.parametrize("on_policy", [True, False])
def test_an_fdfo_step_is_the_mean_over_all_states_of_a_group(spread: Policy, on_policy: bool) -> None:
    """From the states, the group's mean image and the velocities of theta and "old", under guidance; two penalties."""
    spec = SDE.model_copy(update={"same_noise": True, "window": 2, "noise_level": 0.2})
    rollout = collect(spread, PROMPTS, spec, seed=0, epoch=0, group_size=GROUP, batch_size=6, keep_trajectory="path")
    advantages = torch.tensor([0.2, -0.05, -0.15, 0, 1, -1])[:, None]
    ours = FDFO(spec, epsilon=0.05)
    ours.penalties[0].beta = 0.2
    ours.on_policy = on_policy
    path = rollout.trajectory
    assert path is not None and path.t.shape == (6, STEPS)
    x0, total = rollout.latents, torch.zeros(())
    dx = x0 - x0.view(2, GROUP, *x0.shape[1:]).mean(1).repeat_interleave(GROUP, 0)
    g = dx / dx.square().flatten(1).mean(1).view(-1, 1, 1, 1)
    for j in range(STEPS):
        given = path.x[:, j], path.t[:, j], rollout.cond.select(rollout.prompt_index), spec.guidance_scale
        v = spread.predict(*given).v
        old, pretrained = v.detach(), None
        with torch.no_grad():
            if not on_policy:
                with spread.adapter("old"):
                    old = spread.predict(*given).v
            with spread.adapter(None):
                pretrained = spread.predict(*given).v
        r = ((old - (old - g)).square().flatten(1).mean(1) - (v - (old - g)).square().flatten(1).mean(1)).exp()
        a = advantages[:, 0]
        total = total + (-a * r + a.abs() / 0.1 * (r - 1) ** 2).sum()
        total = total + 0.2 * (v - pretrained).square().flatten(1).mean(1).sum()
    by_hand = gradient(spread, total / (6 * 4))
    same(gradient_of_the_loop(spread, ours, rollout, advantages)[0], by_hand)
    told = averages(ours.means)
    assert told["fdfo/difference"] == pytest.approx(float(dx.square().flatten(1).mean(1).sqrt().mean()), rel=1e-5)
    assert (told["fdfo/ratio"] == 1) == on_policy


def test_fdfos_images_are_compared_with_their_whole_group_where_processes_split_it(policy: Policy) -> None:
    """This process has images 2 and 3, the last of one group and the first of the next; the other has the others."""
    spec = SDE.model_copy(update={"same_noise": True, "window": 2, "noise_level": 0.2})
    rollout = collect(policy, PROMPTS, spec, seed=0, epoch=0, group_size=GROUP, batch_size=6, keep_trajectory="path")
    x0, mine, path = rollout.latents, slice(2, 4), rollout.trajectory
    apart = x0 - x0.view(2, GROUP, *x0.shape[1:]).mean(1).repeat_interleave(GROUP, 0)
    others = x0.clone()
    others[mine] = 0
    part, advantages, ours = sample_pairs(torch.arange(2), STEPS), torch.zeros(2, 1), FDFO(spec)
    assert path is not None
    here = {"latents": x0[mine], "member": rollout.member[mine], "prompt_index": rollout.prompt_index[mine]}
    here["trajectory"] = replace(path, states=path.states[mine], t=path.t[mine])
    local = replace(rollout, first=2, **here)
    ours.before_step(policy, OptimiserStep(local, advantages, [part], KEY, lambda table: table + others))
    ours.scalars(policy, ours.rows(local, advantages, part, KEY))
    want = float(apart[mine].square().flatten(1).mean(1).sqrt().mean())
    assert averages(ours.means)["fdfo/difference"] == pytest.approx(want, rel=1e-5)


def test_dgpo_draws_with_old_from_a_step_on(policy: Policy) -> None:
    objective, there = DGPO(sample_old=3), policy.state("old")
    names = []
    for step in (2, 3, 4):
        names.append(objective.samples_from)
        objective.after_epoch(policy, step)
    assert names == ["default", "default", "old"]
    again = DGPO(sample_old=3)
    again.load_state_dict(objective.state_dict())
    assert again.samples_from == "old" and not again.on_policy
    policy.load_state("old", there)


def test_a_gdro_step_is_the_mean_over_images_and_timesteps(policy: Policy) -> None:
    """Plackett-Luce over each group at each timestep, over the group's size: a row's loss is its share of it."""
    settings: dict[str, Any] = {"b": 12.0, "tau": 0.3}
    rollout, objective = drawn(policy, SamplerSpec("dpm2", STEPS)), GDRO(**settings)
    rows = objective.rows(rollout, SCORES, EVERYTHING, KEY)
    with torch.no_grad():
        reference = errors(policy, rows, None)
    e = errors(policy, rows)
    r, best = SCORES.view(2, GROUP), (1, 2)
    groups = [
        plackett_luce(-12.0 * (e - reference)[t, p], r[p], 0.3) + 0.5 * e[t, p, best[p]]
        for t in range(STEPS)
        for p in (0, 1)
    ]
    by_hand = gradient(policy, torch.stack(groups).sum() / (6 * 4))
    ours = GDRO(**settings)
    same(gradient_of_the_loop(policy, ours, rollout, SCORES)[0], by_hand)
    # What b is calibrated by: the spread inside a group of the implicit rewards, and of the rewards over tau.
    told = averages(ours.means)
    implicit = (-12.0 * (e - reference)).detach().std(dim=2, correction=0).mean()
    assert told["gdro/implicit_std"] == pytest.approx(float(implicit), rel=1e-3)
    assert told["gdro/reward_std"] == pytest.approx(float((r / 0.3).std(dim=1, correction=0).mean()), rel=1e-5)


def test_gdros_losses_of_two_rewards_are_those_of_each_alone(policy: Policy) -> None:
    """As MARBLE takes them: one loss for each column of the advantages."""
    rollout = drawn(policy, SamplerSpec("dpm2", STEPS))
    both = torch.cat([SCORES, SCORES.flip(0) ** 2], dim=1)

    def losses(scores: Tensor) -> Tensor:
        objective = GDRO(b=12.0, tau=0.3)
        rows = objective.rows(rollout, scores, EVERYTHING, KEY)
        objective.before_step(policy, OptimiserStep(rollout, scores, [EVERYTHING], KEY, lambda x: x))
        return objective.loss(objective.scalars(policy, rows), rows).detach()

    found = losses(both)
    assert found.shape == (2,) and abs(float(found[0] - found[1])) > 1e-4
    torch.testing.assert_close(found, torch.cat([losses(both[:, :1]), losses(both[:, 1:])]))


def test_a_prdp_step_is_the_mean_over_groups_of_means_over_timesteps(policy: Policy) -> None:
    """The paper's listing, its log-ratios being means over the steps, by autograd; off policy, where the clip holds."""
    rollout = drawn(policy, SDE)
    objective, ours = PRDP(SDE, b=50.0), PRDP(SDE, b=50.0)
    objective.clip = ours.clip = 1e-3
    objective.on_policy = ours.on_policy = False
    rows = objective.rows(rollout, SCORES, EVERYTHING, KEY)

    def log_prob(snapshot: str | None) -> Tensor:
        with policy.adapter(snapshot):
            prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        found = gaussian_log_prob(rows.x_next, *objective.steps.step(policy, rows, prediction))  # type: ignore[arg-type]
        return found.view(STEPS, 2, GROUP).permute(1, 2, 0)  # (P, G, T)

    with torch.no_grad():
        anchor = log_prob(None)
    ratio = log_prob("default") - anchor
    assert rows.log_prob is not None
    old = rows.log_prob.view(STEPS, 2, GROUP).permute(1, 2, 0) - anchor
    rewards = SCORES.view(2, GROUP) / 50.0
    wanted = torch.stack([listing(ratio[p], old[p], rewards[p], 1e-3) for p in (0, 1)]).mean()
    by_hand = gradient(policy, wanted)
    same(gradient_of_the_loop(policy, ours, rollout, SCORES)[0], by_hand)


def test_credit_by_step_and_edges_that_are_trained_once_keep_the_mean(policy: Policy) -> None:
    """A tree that splits at its second step has 1 + 3 x 3 edges: a step is the mean over these ten of each tree."""
    rollout = drawn(policy, SDE)
    advantages = torch.randn(IMAGES, STEPS, 1, generator=torch.Generator().manual_seed(0))
    credit = Branched(group=GROUP, splits=(1,), branch=GROUP, steps=STEPS)
    kept = torch.tensor([(i, j) for j in range(STEPS) for i in range(IMAGES) if j >= 1 or i % GROUP == 0])
    assert len(kept) == 2 * (1 + 3 * 3)
    objective = GRPO(SDE)
    rows = objective.rows(rollout, advantages, kept, KEY)
    assert torch.equal(rows.advantages, advantages[kept[:, 0], kept[:, 1]])
    wanted = objective.loss(objective.scalars(policy, rows), rows).sum() / 20
    by_hand = gradient(policy, wanted)
    same(gradient_of_the_loop(policy, GRPO(SDE, credit=credit), rollout, advantages)[0], by_hand)


def test_two_equal_rewards_balanced_are_the_one(policy: Policy) -> None:
    """MARBLE's direction is (sum_k alpha_k g_k / |g_k|) mean |g_k|: for g_1 = g_2 the mean gradient itself."""
    rollout = drawn(policy, SamplerSpec("dpm2", STEPS))
    one, _ = gradient_of_the_loop(policy, NFT(), rollout, SCORES, SumOfLosses())
    two, _ = gradient_of_the_loop(policy, NFT(), rollout, SCORES.expand(-1, 2), Marble(["a", "b"], mode="fresh"))
    same(two, one)


def test_members_of_a_group_are_compared_at_one_level_with_one_noise(policy: Policy) -> None:
    rows = DPO().rows(drawn(policy, SamplerSpec("dpm2", STEPS)), SCORES, EVERYTHING, KEY)
    assert rows.eps is not None
    eps = rows.eps.view(STEPS, len(PROMPTS), GROUP, *rows.eps.shape[1:])
    assert torch.equal(eps, eps[:, :, :1].expand_as(eps))
    assert not torch.equal(eps[:, 0], eps[:, 1]) and not torch.equal(eps[0], eps[1])
    t = rows.t.view(STEPS, len(PROMPTS), GROUP)
    assert torch.equal(t, t[:, :, :1].expand_as(t))


def test_a_process_measures_its_own_rows_at_their_places_among_all() -> None:
    """The second of two processes, with samples 3, 4 and 5 of 6; the sum over processes is asked for."""

    class Asked:
        def rows_per_sample(self, rollout: Any) -> int:
            return 2

        def rows(self, rollout: Any, advantages: Tensor, part: Tensor, key: Any) -> Tensor:
            return part

    rollout = SimpleNamespace(total=6, first=3, member=torch.arange(3))
    pairs = sample_pairs(torch.arange(3), 2)
    step: Any = SimpleNamespace(
        rollout=rollout, advantages=SCORES, parts=(pairs[:4], pairs[4:], pairs[:0]), key=KEY, reduce=lambda x: 10 * x
    )
    here: Any = SimpleNamespace(device="cpu", uneven_forwards=nullcontext)
    (found,) = measured(Asked(), here, step, lambda part: (part[:, 0] + 0.5 * part[:, 1],))  # type: ignore
    assert found.tolist() == [[0, 0]] * 3 + [[0, 5], [10, 15], [20, 25]]


def test_acflows_weights_are_those_of_a_critic_that_has_not_learned_from_the_images(policy: Policy) -> None:
    """At first it says 0 of everything; after a step it does not, and the next step's weights are of what it says."""
    objective = ActorCritic(tau=0.5, timesteps=2)
    objective.adv_clip = 1.0
    rollout = drawn(policy, SamplerSpec("dpm2", STEPS))
    scores = torch.tensor([0.1, 0.9, 0.5, 0.3, torch.nan, 0.8])[:, None]
    groups = torch.arange(IMAGES) // GROUP
    advantages = objective.advantages(
        ScoredBatch(scores, torch.ones(1), groups, torch.zeros(IMAGES, 2), torch.zeros(IMAGES, 0))
    )
    parts = list(sample_pairs(torch.arange(IMAGES), 2).split(5))
    known = ~scores[:, 0].isnan()
    for number in range(2):
        step = OptimiserStep(rollout, advantages, parts, (0, number, 0), lambda x: x)
        said = torch.zeros(IMAGES, 2)
        for part in parts if number else ():
            rows = objective.rows(rollout, advantages, part, step.key)
            said[part[:, 0], part[:, 1]] = objective.values.of(rows)[:, 0].detach().float()
        objective.before_step(policy, step)
        wanted = ((advantages - said).clamp(-1, 1) / 0.5).exp() * known[:, None]
        wanted = wanted / wanted[known].mean()
        assert objective._weights is not None
        torch.testing.assert_close(objective._weights[..., 0].cpu(), wanted)
        assert number == 0 or said[known].abs().min() > 1e-4
