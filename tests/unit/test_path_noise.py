"""Rows that are noised with what the sampler's own path implies (InPO)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.objectives.noising import Noising, path_noise
from diffrl.policy import load_policy
from diffrl.prompts import Prompt
from diffrl.records.tracking import read_metrics
from diffrl.rollout import SamplerSpec, collect
from diffrl.run.train import train


@pytest.mark.parametrize("sampler", ["euler", "dpm2"])
def test_rows_are_states_of_the_path(tiny_model: Path, sampler: str) -> None:
    """x_t is the state before each step; at the first one the noise is what the image was drawn from."""
    policy, prompts = load_policy(str(tiny_model)), [Prompt("red a", {}), Prompt("red b", {})]
    spec = SamplerSpec(sampler=sampler, steps=4, guidance_scale=1.0)
    rollout = collect(
        policy, prompts, spec, seed=3, epoch=1, group_size=2, batch_size=4, keep_trajectory="path", keep_images=False
    )
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    rows = Noising(path=True).rows(rollout, torch.zeros(4, 1), pairs, (0, 0, 0), True)
    assert rollout.trajectory is not None and rows.eps is not None
    assert torch.allclose(rows.x_t, rollout.trajectory.x[pairs[:, 0], pairs[:, 1]], atol=1e-6)
    first = rollout.initial_noise(torch.arange(4))
    assert torch.allclose(rows.eps[pairs[:, 1] == 0], first, atol=1e-6)
    assert torch.equal(path_noise(rollout, torch.arange(4), rollout.schedule[:1].expand(4)), rows.eps[pairs[:, 1] == 0])


def test_with_a_constant_velocity_every_states_noise_is_the_initial_one(tiny_model: Path) -> None:
    """Straight paths, x_t = (1 - t) x0 + t eps, imply the noise that they began with at every level."""
    policy, spec = load_policy(str(tiny_model)), SamplerSpec(sampler="euler", steps=4, guidance_scale=1.0)
    rollout = collect(
        policy, [Prompt("red a", {})], spec, seed=3, epoch=1, group_size=2, batch_size=2, keep_trajectory="path",
        keep_images=False,
    )  # fmt: skip
    assert rollout.trajectory is not None
    eps = rollout.initial_noise(torch.arange(2))
    t = rollout.schedule.view(1, -1, 1, 1, 1)
    rollout.trajectory.states = (1 - t) * rollout.latents[:, None] + t * eps[:, None]
    for level in rollout.schedule[:-1]:
        assert torch.allclose(path_noise(rollout, torch.arange(2), level.expand(2)), eps, atol=1e-5)


@pytest.mark.parametrize("objective", ["nft", "crd", "dpo", "gdro"])
def test_a_run_trains_with_it(config_file, objective: str) -> None:
    config = load_config(config_file("run", objective=objective, optimise={"noise": "path"}, epochs=1))
    train(config)
    assert read_metrics(config.run_dir)[-1]["loss"] is not None


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"objective": "grpo", "rollout": {"sampler": "flow_sde"}}, 'objective "grpo" trains on none'),
        ({"objective": "rwr", "rwr": {"timestep_sampling": "uniform"}}, "rwr.timestep_sampling: schedule"),
        ({"rollout": {"sampler": "cps", "noise_level": 0.5}}, '"cps" draws noise'),
    ],
)
def test_what_cannot_work_is_one_line(config_file, capsys, sections: dict, text: str) -> None:
    path = config_file("run", **{**sections, "optimise": {"noise": "path"}})
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "optimise.noise" in (error := capsys.readouterr().err) and text in error
