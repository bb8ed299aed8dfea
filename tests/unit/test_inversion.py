"""The path of given pictures: the sampler's ODE run backwards (InPO)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving, expand
from diffrl.image_sets.inversion import inverted_path
from diffrl.objectives.noising import path_noise
from diffrl.policy import load_policy
from diffrl.prompts import Prompt
from diffrl.rollout import SamplerSpec, collect
from diffrl.samplers import euler_step
from tests.unit.test_image_set_runs import make, set_of

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()  # Stable Diffusion's


class Gaussian:
    """The exact model of x0 ~ N(0, c^2), float64: E[x0 | x_t] = alpha c^2 x_t / (alpha^2 c^2 + sigma^2)."""

    def __init__(self, process: Process, c: float) -> None:
        self.process, self.c = process, c
        self.forwards = 0

    def adapter(self, name: str | None) -> Any:
        assert name == "default"
        return torch.no_grad()

    def predict(self, x: Tensor, t: Tensor, cond: Any, guidance: float) -> Prediction:
        assert guidance == 1.0
        self.forwards += len(x)
        alpha, sigma = (expand(value, x) for value in (self.process.alpha(t), self.process.sigma(t)))
        spread = alpha.square() * self.c**2 + sigma.square()
        x0, eps = alpha * self.c**2 * x / spread, sigma * x / spread
        return Prediction(x0, eps, self.process.velocity(x0, eps, t))


class Plain:
    """What the inversion reads of a rollout."""

    def __init__(self, latents: Tensor, schedule: Tensor, process: Process) -> None:
        self.latents, self.schedule, self.process, self.guidance = latents, schedule, process, 1.0
        self.prompt_index, self.cond = torch.zeros(len(latents), dtype=torch.long), self
        self.trajectory: Any = None

    def select(self, index: Tensor) -> None:
        return None


@pytest.mark.parametrize("process", [FlowMatching(), VariancePreserving((1 - BETAS).cumprod(0))])
def test_an_images_own_noise_comes_back_within_the_order_of_the_solver(process: Process) -> None:
    """Drawn with Euler or DDIM in S steps, the state at the noisiest level is what the image began as, to O(1 / S)."""
    eps, errors = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []
    for steps in (40, 80, 160):
        schedule = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        if isinstance(process, VariancePreserving):
            schedule = schedule.square()  # its sigma is about sqrt(t) where t is small, and the order is in sigma
        policy, t = Gaussian(process, c=0.7), schedule[:1].expand(4)
        begun = x = process.add_noise(torch.zeros_like(eps), eps, t)
        for t, t_next in zip(schedule[:-1].unbind(), schedule[1:].unbind(), strict=True):
            prediction = policy.predict(x, t.expand(4), None, 1.0)
            x = process.add_noise(prediction.x0, prediction.eps, t_next.expand(4))
        rollout: Any = Plain(x, schedule, process)
        policy.forwards = 0
        rollout.trajectory = inverted_path(policy, rollout, batch=3)  # type: ignore[arg-type]
        assert policy.forwards == 4 * steps and torch.equal(rollout.trajectory.states[:, -1], x)
        errors.append(float((rollout.trajectory.states[:, 0] - begun).abs().max()))
        if isinstance(process, FlowMatching):  # t = 1 has nothing of the image, and the state is the noise
            implied = path_noise(rollout, torch.arange(4), schedule[:1].expand(4))
            assert torch.equal(implied, rollout.trajectory.states[:, 0])
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15) and errors[1] / errors[2] == pytest.approx(2, rel=0.1)
    assert errors[2] < 0.06


def test_a_step_is_euler_s_on_the_way_back() -> None:
    policy, schedule = Gaussian(FlowMatching(), 0.7), torch.tensor([1.0, 0.4, 0.0], dtype=torch.float64)
    x = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    states = inverted_path(policy, Plain(x, schedule, policy.process), batch=2).states  # type: ignore[arg-type]
    for k in (1, 0):
        t, noisier = schedule[k + 1].expand(2), schedule[k].expand(2)
        v = policy.predict(states[:, k + 1], t, None, 1.0).v
        torch.testing.assert_close(states[:, k], euler_step(states[:, k + 1], v, t, noisier))


def test_a_networks_own_images_give_their_noise_back(tiny_model: Path) -> None:
    """A tiny pipeline of the true class, on its own schedule: half the steps' size, half the error."""
    policy, errors = load_policy(str(tiny_model)), []
    for steps in (12, 24, 48):
        spec = SamplerSpec(sampler="euler", steps=steps, guidance_scale=1.0)
        rollout = collect(policy, [Prompt("red a", {})], spec, seed=3, epoch=1, group_size=2, batch_size=2)
        rollout.trajectory = inverted_path(policy, rollout, batch=2)
        implied = path_noise(rollout, torch.arange(2), rollout.schedule[:1].expand(2))
        errors.append(float((implied - rollout.initial_noise(torch.arange(2))).square().mean().sqrt()))
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2] and errors[2] < 0.1


def test_a_run_on_a_set_trains_on_the_states_of_the_inversion(config_file: Any, tmp_path: Path) -> None:
    source = set_of(make(config_file, "dpo"), tmp_path / "set")
    optimise = {"batch_size": 16, "micro_batch": None, "noise": "path"}
    run = make(config_file, "dpo", source, optimise=optimise)
    rollout, _, _ = run.loop.source(0)
    assert rollout.trajectory is not None and rollout.forwards == 16 * run.spec.steps
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(run.spec.steps))
    rows = run.objective.rows(rollout, torch.zeros(16, 1), pairs, (0, 0, 0))
    torch.testing.assert_close(rows.x_t, rollout.trajectory.x[pairs[:, 0], pairs[:, 1]], rtol=0, atol=1e-5)
    assert run.loop.run_epoch(0)["loss"] is not None
    mixed = make(config_file, "nft", source, optimise=optimise, image_set={"source": source, "share": 0.5})
    whole, _, features = mixed.loop.source(1)
    given = features.isnan().all(1)
    assert whole.trajectory is not None and whole.forwards == 16 * mixed.spec.steps and int(given.sum()) == 8
    torch.testing.assert_close(whole.trajectory.states[:, -1], whole.latents)
    first = whole.initial_noise(torch.arange(16))[~given]
    torch.testing.assert_close(whole.trajectory.states[:, 0][~given], first)
