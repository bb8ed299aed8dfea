"""R0: reward gradients through the sampler's own path, against plain autograd, finite differences and closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.methods.direct.objective import Direct
from diffrl.methods.direct.pathwise import redraw
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.prompts import Prompt
from diffrl.records.tracking import read_metrics
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.run.train import train

PROMPTS = [Prompt("red a", {}), Prompt("red b", {})]


class Redness:
    name, differentiable = "redness", True

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    policy = load_policy(str(tiny_model), lora=LoraSpec(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def drawn(policy: Policy, keep: Any = False, **spec: Any) -> Rollout:
    spec = {"sampler": "dpm2", "steps": 3, "guidance_scale": 1.0} | spec
    sampler = SamplerSpec(**spec)
    return collect(
        policy, PROMPTS, sampler, seed=3, epoch=1, group_size=2, batch_size=4, keep_trajectory=keep, keep_images=False
    )


def gradient(policy: Policy, loss: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss, [parameter for _, parameter in policy.trainable])
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(
    "spec",
    [{}, {"sampler": "euler", "guidance_scale": 2.0}, {"sampler": "cps", "noise_level": 0.6}, {"sampler": "renoise"}],
)
def test_the_images_are_the_rollouts_and_the_gradient_is_autograds(policy: Policy, spec: dict) -> None:
    """With the recomputation of each step and without it: the same chain, step by step, under plain autograd."""
    rollout = drawn(policy, **spec)
    samples = torch.arange(4)
    cond = rollout.cond.select(rollout.prompt_index)
    images = redraw(policy, rollout, samples, cond)
    assert torch.allclose(images, rollout.latents, atol=1e-5)
    weights = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    ours = gradient(policy, (images * weights).sum())

    import diffrl.methods.direct.pathwise as module

    kept, module.checkpoint = module.checkpoint, lambda function, x, **_: function(x)
    try:
        plain = gradient(policy, (redraw(policy, rollout, samples, cond) * weights).sum())
    finally:
        module.checkpoint = kept
    assert float((ours - plain).norm() / plain.norm()) < 1e-5


def test_the_gradient_through_all_steps_is_that_of_finite_differences(policy: Policy) -> None:
    """Of phi along a random direction of the LoRA, to 1 % (float32)."""
    rollout = drawn(policy)
    direct = Direct({"redness": Redness()}, [1.0], path="all")
    pairs = torch.stack([torch.arange(4), torch.zeros(4, dtype=torch.long)], dim=1)
    rows = direct.rows(rollout, torch.zeros(4, 1), pairs, (0, 0, 0))
    slope = gradient(policy, direct.scalars(policy, rows).sum())
    parameters = [parameter for _, parameter in policy.trainable]
    direction = torch.randn(slope.shape, generator=torch.Generator().manual_seed(2))
    direction /= direction.norm()
    step, ends = 1.0, []
    for sign in (1, -1):
        parts = direction.split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.add_(sign * step * 0.02 * part.view_as(parameter))
            ends.append(float(direct.scalars(policy, rows).double().sum()))
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.sub_(sign * step * 0.02 * part.view_as(parameter))
    assert (ends[0] - ends[1]) / 0.04 == pytest.approx(float(slope @ direction), rel=0.02, abs=1e-5)


def test_random_judges_what_one_state_of_the_path_predicts(policy: Policy) -> None:
    """Its x_t are states of the rollout; the last step's prediction is the image itself."""
    rollout = drawn(policy, keep="path", sampler="euler")
    direct = Direct({"redness": Redness()}, [1.0], path="random", timesteps=3)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(3))
    rows = direct.rows(rollout, torch.zeros(4, 1), pairs, (0, 0, 0))
    assert rollout.trajectory is not None
    for row, (sample, _) in enumerate(pairs.tolist()):
        step = int((rollout.schedule[:-1] == rows.t[row]).nonzero())
        assert torch.equal(rows.x_t[row], rollout.trajectory.x[sample, step])
        if step == 2:
            assert torch.allclose(
                direct._images(policy, rows.select(torch.tensor([row])))[0], rollout.latents[sample], atol=1e-5
            )
    assert {tuple(sorted(rows.t[3 * i : 3 * i + 3].tolist())) for i in range(4)} == {
        tuple(sorted(rollout.schedule[:-1].tolist()))
    }
    alone = direct.rows(replace(rollout), torch.zeros(4, 1), pairs[4:5], (0, 0, 0))
    assert torch.equal(alone.x_t[0], rows.x_t[4])


@pytest.mark.parametrize("path", some(["all", "random"], "all"))
def test_a_run_raises_its_reward(config_file, path: str) -> None:
    reward = str(Path(__file__).parents[1] / "data" / "warmth.py") + ":Warmth"
    sections = {"rewards": {"redness": {"plugin": reward}}, "epochs": 4, "rollout": {"sampler": "dpm2"}}
    config = load_config(config_file("run", objective="direct", direct={"path": path}, **sections))
    train(config)
    lines = read_metrics(config.run_dir)
    assert lines[-1]["eval/redness"] > lines[0]["eval/redness"]


@pytest.mark.parametrize(
    ("direct", "sections", "text"),
    [
        ({"path": "all", "beta": 0.1}, {}, "direct.beta: with direct.path: all there is no one prediction"),
        ({"path": "all", "timesteps": 2}, {}, "direct.timesteps: 2, but with direct.path: all"),
        ({"path": "random", "align": {}}, {}, "direct.path: trains on the sampler's states"),
        ({"path": "some"}, {}, "direct.path"),
    ],
)
def test_what_cannot_work_is_one_line(config_file, capsys, direct: dict, sections: dict, text: str) -> None:
    reward = str(Path(__file__).parents[1] / "data" / "warmth.py") + ":Warmth"
    path = config_file("run", objective="direct", direct=direct, rewards={"redness": {"plugin": reward}}, **sections)
    assert main(["train", str(path), "--dry-run"]) == 2
    assert text in capsys.readouterr().err
