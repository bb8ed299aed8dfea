"""CRD in the loop, on a tiny random pipeline of the true classes: economy, whole groups, several processes, config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import on_two
from covering import some
from launching import joined
from tiny import count_forwards, scramble

from diffrl.config import load_config
from diffrl.config.methods import Decay
from diffrl.errors import UserError
from diffrl.methods.crd.objective import CRD, anchor_strength, external_reward
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.minibatches import optimiser_steps, sample_pairs
from diffrl.objectives.objective import OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.run.train import Run

REDNESS = {"plugin": str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"}


def make(config_file: Any, overrides: list[str] | None = None, name: str = "crd", **sections: Any) -> Run:
    return Run(load_config(config_file(name, objective="crd", **sections), overrides or []))


def test_no_forward_is_run_whose_result_is_unused(config_file, monkeypatch) -> None:
    """16 images, 3 timesteps, 2 optimiser steps of 24 rows each."""
    run = make(config_file, ["crd.beta=0"])  # 2 micro-batches of 12 rows: whole groups of 4
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    # old is theta in the first step; nobody is held to the pretrained model
    assert seen == {("sampling", False): 48, ("default", True): 48, ("old", False): 24}
    assert run.objective.on_policy is False  # decay 0.26: old lags from now on
    seen.clear()
    run.loop.run_epoch(1)
    assert seen == {("sampling", False): 48, ("default", True): 48, ("old", False): 48}

    run = make(config_file, ["optimise.micro_batch=0.0416"])  # one row each: the means are measured first
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    # The guided anchor takes two rows each. In the second step old runs once, not twice; theta once more.
    assert seen == {
        ("sampling", False): 48,
        ("default", True): 48,
        ("old", False): 24,
        ("default", False): 24,
        ("pretrained", False): 96,
    }


def gradient(run: Run, accumulation: int, key: int = 0) -> tuple[torch.Tensor, dict[str, float]]:
    """Of one optimiser step over the whole epoch, theta and old apart; and the objective's metrics."""
    run.objective.metrics()
    rollout = ROLLOUTS[run]
    objective, policy = run.objective, run.policy
    advantages = objective.shaped(SCORED[run])[rollout.first : rollout.first + len(rollout.member)]
    parts = sample_pairs(torch.arange(len(rollout.member)), 3).tensor_split(accumulation)
    objective.on_policy = False
    objective.before_step(policy, OptimiserStep(rollout, advantages, parts, (0, key), lambda values: values))
    for part in parts:
        rows = objective.batch(rollout, advantages, part, (0, key))
        run.loop.gradients.add(objective, policy, rows, len(rollout.member) * 3, run.loop.scaler)
    flat = torch.cat([p.grad.flatten() for _, p in policy.trainable])
    run.optimiser.zero_grad()
    return flat, {name: float(pair[0] / pair[1]) for name, pair in objective.metrics().items()}


ROLLOUTS: dict[Run, Any] = {}
SCORED: dict[Run, ScoredBatch] = {}


def prepared(config_file: Any, overrides: list[str], columns: int = 1) -> Run:
    """A run whose LoRAs differ, with the rollout and random scores of an epoch; of two rewards, one applies to half."""
    run = make(config_file, overrides)
    for seed, name in enumerate(("default", "old"), start=1):
        scramble(run.policy, name, seed=seed, std=0.1)
    rollout, _, features = run.loop.source(0)
    scores = torch.randn(16, columns, generator=torch.Generator().manual_seed(3))
    scores[8:, 1:] = torch.nan
    run.objective.rule = replace(run.objective.rule, columns="each" if columns > 1 else "rewards")
    ROLLOUTS[run] = rollout
    SCORED[run] = ScoredBatch(scores, torch.ones(columns), torch.arange(16) // 4, features, torch.zeros(16, 0))
    return run


@pytest.mark.parametrize(("overrides", "columns"), some([([], 1), ([], 2), (["crd.same_noise=true"], 1)], ([], 2)))
def test_centring_does_not_depend_on_the_micro_batches(config_file, overrides, columns) -> None:
    """Micro-batches of 1 and of 2 rows, of one group of 4, and of everything: one gradient, up to rounding."""
    run = prepared(config_file, overrides, columns)
    expected, metrics = gradient(run, 1)
    assert expected.abs().max() > 1e-4
    for accumulation in (12, 24, 48):
        found, same = gradient(run, accumulation)
        assert float((found - expected).norm() / expected.norm()) < 1e-5
        assert same == pytest.approx(metrics, rel=1e-3)


def test_a_constant_per_prompt_changes_no_gradient_to_the_bit(config_file) -> None:
    run = prepared(config_file, ["crd.advantage_std=group"])  # the std of the batch sees the constants
    scored = SCORED[run]
    quarters = (scored.scores * 4).round() / 4
    gradients = []
    for constants in (0.0, torch.tensor([[0.0], [64.0], [-3.0], [0.5]]).repeat_interleave(4, 0)):
        SCORED[run] = ScoredBatch(
            quarters + constants, scored.weights, scored.groups, scored.features, scored.auxiliary
        )
        gradients.append(gradient(run, 2)[0])
    assert torch.equal(*gradients)


def test_a_reward_that_does_not_apply_gives_no_loss(config_file) -> None:
    run = prepared(config_file, [], columns=2)
    objective, rollout = run.objective, ROLLOUTS[run]
    gradient(run, 1)
    advantages = objective.shaped(SCORED[run])
    rows = objective.rows(rollout, advantages, sample_pairs(torch.arange(8, 16), 3), (0, 0))
    phi = torch.randn(24, 1, requires_grad=True)
    losses = objective.loss(phi, rows)
    assert losses[0] > 0 and losses[1] == 0
    assert torch.autograd.grad(losses[1], phi)[0].abs().max() == 0


def test_members_of_a_group_share_the_timestep_and_on_demand_the_noise(config_file) -> None:
    for same_noise in (False, True):
        run = make(config_file, ["crd.timesteps=2", f"crd.same_noise={str(same_noise).lower()}"])
        rollout, _, _ = run.loop.source(0)
        rows: Rows = run.objective.rows(rollout, torch.zeros(16, 1), sample_pairs(torch.arange(16), 2), (0, 0))
        t, eps = rows.t.view(2, 4, 4), rows.eps.view(2, 4, 4, -1)  # row number, group, member
        assert (t == t[:, :, :1]).all()
        assert len({tuple(pair) for pair in t[:, :, 0].T.tolist()}) > 1  # prompts differ
        assert (t[0] != t[1]).all()  # without repeats
        assert bool((eps == eps[:, :, :1]).all()) is same_noise
        assert not torch.equal(eps[0], eps[1])


def test_every_lora_parameter_moves_and_nothing_else(config_file) -> None:
    run = make(config_file)
    scramble(run.policy)  # B starts at 0, where A has no gradient
    frozen = {n: p.detach().clone() for n, p in run.policy.network.named_parameters() if ".default." not in n}
    before = [p.detach().clone() for _, p in run.policy.trainable]
    run.objective.after_epoch = lambda policy, step: None  # the snapshots do not follow yet
    run.loop.settings = run.loop.settings.__class__(**{**vars(run.loop.settings), "ema": 0.0})
    run.loop.run_epoch(0)
    for (name, after), old in zip(run.policy.trainable, before, strict=True):
        assert not torch.equal(after, old), f"{name} did not move"
    for name, parameter in run.policy.network.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), f"{name} is frozen and moved"


def test_the_anchor_is_the_guided_pretrained_model_by_reward(config_file) -> None:
    run = prepared(config_file, ["crd.beta=[0.0001,0.2]"])
    gradient(run, 1)
    objective, policy, rollout = run.objective, run.policy, ROLLOUTS[run]
    advantages = objective.shaped(SCORED[run])
    rows = objective.rows(rollout, advantages, sample_pairs(torch.arange(4), 3), (0, 0))
    objective.scalars(policy, rows)
    with torch.no_grad(), policy.adapter(None):
        guided = policy.predict(rows.x_t, rows.t, rows.cond, 4.5).v
    with torch.no_grad(), policy.adapter("old"):
        plain = policy.predict(rows.x_t, rows.t, rows.cond).v
    kl = (rows.prediction.v - guided).square().flatten(1).mean(1)
    strength = anchor_strength(external_reward(advantages[:4, 0], 5.0), 1e-4, 0.2).repeat(3)
    assert len(strength.unique()) == 4
    assert torch.allclose(objective.penalty(policy, rows), strength * kl, rtol=1e-5)
    objective.penalty.reference = "old"  # as a wrapper may say
    assert torch.equal(objective.penalty.anchor(policy, rows).v, plain)


def test_snapshots_follow_their_own_schedules_and_a_resume_knows_where_they_are(config_file, monkeypatch) -> None:
    monkeypatch.setattr("diffrl.methods.crd.objective.SAMPLING", Decay(3, 0.5, 0.0075, 0.999))
    run = make(config_file, [])
    metrics = run.loop.run_epoch(0)
    theta, old, sampling = (run.policy.state(name) for name in ("default", "old", "sampling"))
    assert metrics["crd/old_decay"] == pytest.approx(0.26) and metrics["crd/sampling_decay"] == 0.0
    assert all(torch.equal(sampling[k], theta[k]) for k in theta)
    assert any(not torch.equal(old[k], theta[k]) for k in theta)
    metrics = run.loop.run_epoch(1)
    assert metrics["crd/sampling_decay"] == pytest.approx(0.5075)
    assert metrics["crd/r_theta_std"] > 0 and -1 <= metrics["crd/correlation"] <= 1 and metrics["kl"] > 0
    fresh = CRD()
    fresh.load_state_dict(run.objective.state_dict())
    assert CRD().on_policy and not fresh.on_policy


def test_a_resume_is_exact(config_file, monkeypatch) -> None:
    """Stopped after the first epoch, when old has begun to lag, and again within the sampling schedule's rise."""
    monkeypatch.setattr("diffrl.methods.crd.objective.SAMPLING", Decay(3, 0.5, 0.0075, 0.999))
    whole, broken = (make(config_file, [], name) for name in ("whole", "broken"))
    broken.folder.path.mkdir()  # as the start of a training does: a folder that is gone is not made again
    for epoch in range(3):
        whole.loop.run_epoch(epoch)
        broken.loop.run_epoch(epoch)
        broken.epoch = epoch + 1
        broken.save()
        broken = make(config_file, [], "broken")
        broken.restore()
    for name in ("default", "old", "sampling", "ema"):
        expected, found = whole.policy.state(name), broken.policy.state(name)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name


def test_several_rewards_under_gardo(config_file, monkeypatch) -> None:
    """Two optimised rewards, one auxiliary: the reference is a snapshot then, run for gated rows only, unguided."""
    rewards = {"redness": {**REDNESS, "weight": 0.5}, "squared": {**REDNESS, "power": 2.0}}
    gardo = {"auxiliary": ["constant"], "share": 0.25}
    run = make(config_file, rewards=rewards, watch={"constant": {**REDNESS, "power": 0.0}}, gardo=gardo)
    seen = count_forwards(run, monkeypatch)
    for epoch in range(2):
        seen.clear()
        metrics = run.loop.run_epoch(epoch)
    assert metrics["gardo/penalised"] > 0 and metrics["crd/r_theta_std"] > 0
    assert seen[("reference", False)] == round(metrics["gardo/penalised"] * 48)
    assert seen[("pretrained", False)] == 0 and seen[("old", False)] == seen[("default", True)] == 48


def test_the_defaults_are_the_papers(config_file) -> None:
    objective = make(config_file).objective
    penalty = objective.penalty
    assert (penalty.beta, penalty.guidance, objective.b) == (0.1, 4.5, 1.0)
    for decays in (objective.decays, CRD().decays):  # from the config and without one
        assert [decays["old"](s) for s in (0, 50, 999)] == pytest.approx([0.25, 0.5, 0.999])
        assert [decays["sampling"](s) for s in (0, 74, 95, 999)] == pytest.approx([0.0, 0.0, 0.15, 0.999])
    partly = make(config_file, ["crd.old=[0, 0.25, 0.005, 0.3]"], name="partly").objective
    assert partly.decays["old"](4) == pytest.approx(0.27) and partly.decays["old"](99) == 0.3


def test_a_step_of_the_whole_epoch_may_split_groups_over_processes() -> None:
    assert torch.equal(optimiser_steps(24, 24, 6, 6, key=5, unit=4)[0], torch.arange(6))
    assert torch.equal(optimiser_steps(24, 24, 8, 8, key=5, unit=4)[0], torch.arange(8))  # and no other order without


SIZES = {
    "split": ["rollout.groups=3", "optimise.batch_size=12"],  # on two processes the second group is half on each
    "whole": [],
}


def _train(config_path: Path, folder: Path, world: int) -> None:
    """An epoch of each of `SIZES`; the main process keeps LoRAs and metrics."""
    for name, sizes in SIZES.items():
        overrides = [*sizes, "optimise.inner_epochs=2", "rollout.steps=2"]
        run = Run(load_config(config_path, overrides, world=world))
        scramble(run.policy, "old")  # far from theta, so that the means of r_theta matter from the first step on
        run.objective.on_policy = False  # type: ignore[attr-defined]
        metrics = run.loop.run_epoch(0)
        if run.main:
            torch.save((run.policy.state("default"), run.policy.state("old"), metrics), folder / f"{name}{world}.pt")


def _process(rank: int, config_path: Path, folder: Path) -> None:
    """One of two processes."""
    with joined(rank, folder):
        _train(config_path, folder, world=2)


@pytest.mark.long
def test_one_process_equals_two_also_with_split_groups(config_file, tmp_path: Path) -> None:
    path = config_file("shared", objective="crd")
    _train(path, tmp_path, world=1)
    on_two(_process, path, tmp_path)
    for name in SIZES:
        one, two = (torch.load(tmp_path / f"{name}{world}.pt") for world in (1, 2))
        for a, b in zip(one[:2], two[:2], strict=True):
            difference = sum(float((a[k] - b[k]).square().sum()) for k in a)
            assert (difference / sum(float(v.square().sum()) for v in a.values())) ** 0.5 < 1e-5, name
        for key in ("loss", "kl", "crd/r_theta_std", "crd/correlation"):
            assert one[2][key] == pytest.approx(two[2][key], rel=1e-3), (name, key)


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (["optimise.batch_size=2"], 1, 'split groups of 4 (rollout.group_size), which "crd" keeps whole (nearest: 4)'),
        (["rollout.groups=6", "optimise.batch_size=12"], 2, "6 groups do not divide over 2 processes and 2 optimiser"),
        (["crd.timesteps=4"], 1, "crd.timesteps: 4 timesteps, but the schedule has only 3 (rollout.steps)"),
        (["crd.b=-1"], 1, "crd.b: expected more than 0, got -1"),
        (["crd.old=[0, 0.25]"], 1, "crd.old: expected slow, late, copy, or [start, value, slope, cap]"),
    ],
)
def test_a_config_that_cannot_work_is_refused(config_file, overrides, world, expected) -> None:
    with pytest.raises(UserError) as caught:
        load_config(config_file(objective="crd"), overrides, world=world)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
