"""GARDO's didactic case (arXiv 2512.24138, Fig. 3): a flow model of a mixture in the plane, in a minute on one core.

Four modes; three of them score high, and one of those three has a tenth of the others' density. The model is an MLP of
three layers that predicts the velocity of flow matching. Everything else is what `diffrl train` runs: loop, sampler,
DiffusionNFT, GARDO. An "image" is a point, its feature is where it lies, and one prompt is like the other.

Diversity makes more of what scores above its group's mean, and only of that. So a mode that scores clearly lower than
the others is given up in the end: with a height of 0.85 instead of 0.9, after 150 epochs instead of 90.

    python tests/gardo_didactic.py --out gardo_didactic.png
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from torch import Tensor, nn

from diffrl.forward import FlowMatching, Prediction
from diffrl.methods.gardo.penalty import Gardo
from diffrl.methods.nft.objective import NFT
from diffrl.objectives.objective import Decay
from diffrl.policy import Conditioning, Policy
from diffrl.prompts import Prompt, PromptStream
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, collect
from diffrl.run.clock import Clock
from diffrl.run.hooks import Monitor
from diffrl.run.loop import Loop, LoopSettings
from diffrl.run.processes import Processes
from diffrl.run.source import Rollouts

RADIUS, SIGMA = 2.5, 0.25  # of the circle on which the modes lie, and of each mode
CENTRES = RADIUS * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
RARE = 2
DENSITY = torch.tensor([1.0, 1.0, 0.1, 1.0])
HEIGHTS = {0: 1.0, 1: 0.9, RARE: 1.0}  # what the proxy gives at the centres of the good modes; the last one gets 0
NEAR = 0.75  # a sample this close to a mode's centre belongs to it
FOUND = 0.05  # share of the samples that a mode needs to count as found
STEPS, TRAINED = 8, 2  # sampling steps, and how many timesteps of a sample are trained
GROUPS, GROUP_SIZE = 16, 24
LEARNING_RATE = 6e-4
BETA = 10.0  # of the large KL, and of GARDO: the same
RESET_KL = 1e-2  # a plane's velocities lie 100 times farther apart than an image model's
SPEC = SamplerSpec(sampler="dpm2", steps=STEPS)
VARIANTS = ("large KL", "no KL", "GARDO")
GRID = torch.cartesian_prod(torch.linspace(-3.5, 3.5, 15), torch.linspace(-3.5, 3.5, 15))


class Proxy:
    """The optimised score: a bump at each good mode, 0 elsewhere."""

    name = "proxy"

    def __call__(self, points: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        distance = torch.cdist(points, CENTRES[list(HEIGHTS)])
        return (torch.tensor(list(HEIGHTS.values())) * (-distance.square() / (2 * 0.5**2)).exp()).amax(dim=1)


class Likely:
    """The auxiliary score: how near the data a point is, whichever mode it belongs to."""

    name = "likely"

    def __call__(self, points: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        return -torch.cdist(points, CENTRES).amin(dim=1)


def features(points: Tensor) -> Tensor:
    """(B, 225): bumps of width 0.5 on a grid, so that 1 - cos is 0 for equal points and 1 for far ones."""
    return (-torch.cdist(points, GRID).square() / (2 * 0.5**2)).exp()


def data(count: int, generator: torch.Generator) -> Tensor:
    """(count, 2) samples of the mixture that the model is pretrained on."""
    mode = torch.multinomial(DENSITY, count, replacement=True, generator=generator)
    return CENTRES[mode] + SIGMA * torch.randn(count, 2, generator=generator)


class Velocity(nn.Module):
    """Three layers: (x, t) to the velocity."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2 + 9, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * torch.pi * torch.tensor([0.5, 1.0, 2.0, 4.0])
        return self.layers(torch.cat([x, t[:, None], waves.sin(), waves.cos()], dim=1))


class PlanePolicy:
    """What the loop asks of a policy, for points instead of latents; every snapshot is a copy of the network."""

    distilled_guidance = False

    def __init__(self, network: Velocity) -> None:
        self.device, self.process, self.latent_shape = torch.device("cpu"), FlowMatching(), (2,)
        self.networks = {"default": copy.deepcopy(network)}
        self.pretrained = network
        self.active: str | None = "default"

    @property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.networks["default"].named_parameters())

    def add_snapshot(self, name: str) -> None:
        self.networks[name] = copy.deepcopy(self.networks["default"]).requires_grad_(False)

    def uneven_forwards(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cached(self, levels: Sequence[float]) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        before, self.active = self.active, name
        try:
            yield
        finally:
            self.active = before

    @torch.no_grad()
    def ema_update(self, name: str, decay: float | Tensor) -> None:
        for ours, theirs in zip(self.networks[name].parameters(), self.networks["default"].parameters(), strict=True):
            ours.lerp_(theirs, 1 - decay)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return Conditioning(torch.zeros(len(prompts), 1, 1), torch.zeros(len(prompts), 0))

    def predict(self, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Prediction:
        network = self.pretrained if self.active is None else self.networks[self.active]
        return self.process.from_velocity(x_t, network(x_t, t), t)

    def timesteps(self, steps: int) -> Tensor:
        return torch.linspace(1, 0, steps + 1)

    def decode(self, latents: Tensor) -> Tensor:
        return latents


def pretrain(seed: int, steps: int = 1500) -> Velocity:
    """Flow matching on the mixture."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = Velocity()
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for _ in range(steps):
        x0, eps = data(512, generator), torch.randn(512, 2, generator=generator)
        t = torch.rand(512, generator=generator)
        x_t = (1 - t)[:, None] * x0 + t[:, None] * eps
        loss = (network(x_t, t) - (eps - x0)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network


@dataclass
class Outcome:
    """2,000 samples of a model: points (2000, 2), the shares of the good modes, mean proxy."""

    points: Tensor
    shares: dict[int, float]
    proxy: float

    @property
    def found(self) -> int:
        """How many of the three good modes hold at least 5 % of the samples."""
        return sum(share >= FOUND for share in self.shares.values())


def measure(policy: PlanePolicy, seed: int) -> Outcome:
    model, prompt = cast(Policy, policy), Prompt("held out")
    rollout = collect(model, [prompt], SPEC, seed=seed, epoch=0, group_size=2000, batch_size=2000)
    near = torch.cdist(rollout.latents, CENTRES) < NEAR
    shares = {mode: float(near[:, mode].float().mean()) for mode in HEIGHTS}
    return Outcome(rollout.latents, shares, float(Proxy()(rollout.latents, [], None).mean()))


def finetune(network: Velocity, variant: str, epochs: int, seed: int) -> Outcome:
    """Train a copy of the pretrained network with one of `VARIANTS`."""
    policy = PlanePolicy(network)
    beta = BETA if variant == "large KL" else 0.0
    nft = NFT(beta=beta, advantage_std="none", timesteps=TRAINED, old=Decay(slope=0.0))
    objective: Any = nft
    scores: dict[str, Any] = {"proxy": Proxy()}
    if variant == "GARDO":
        Gardo(nft, auxiliary=["likely"], beta=BETA, reset_kl=RESET_KL, reset_steps=100)
        scores["likely"] = Likely()
    for name in objective.snapshots:
        policy.add_snapshot(name)
    images = GROUPS * GROUP_SIZE
    settings = LoopSettings(
        seed=seed,
        group_size=GROUP_SIZE,
        batch_size=images,
        inner_epochs=1,
        max_grad_norm=1.0,
        ema=0.0,
    )
    optimiser = torch.optim.AdamW([parameter for _, parameter in policy.trainable], LEARNING_RATE, weight_decay=0.0)
    prompts = PromptStream([Prompt(f"prompt {i}") for i in range(GROUPS)], GROUPS, seed)
    model, accelerator = cast(Policy, policy), Accelerator(cpu=True)
    scorer, processes = Scorer(scores), Processes(accelerator, Clock())
    source = Rollouts(
        model, objective, scorer, features, prompts, SPEC, seed=seed, group_size=GROUP_SIZE, batch_size=images,
        processes=processes, monitor=Monitor(),
    )  # fmt: skip
    loop = Loop(model, objective, scorer, torch.ones(1), source, settings, optimiser, processes)
    for epoch in range(epochs):
        loop.run_epoch(epoch)
    return measure(policy, seed)


def didactic(seed: int = 0, epochs: int = 90) -> dict[str, Outcome]:
    """The pretrained model ("base") and what each of `VARIANTS` makes of it."""
    network = pretrain(seed)
    outcomes = {"base": measure(PlanePolicy(network), seed)}
    return outcomes | {variant: finetune(network, variant, epochs, seed) for variant in VARIANTS}


def draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """One panel for each model: its samples over the proxy's contours, and how many good modes it found."""
    line = torch.linspace(-3.6, 3.6, 120)
    plane = torch.cartesian_prod(line, line)
    height = Proxy()(plane, [], None).view(120, 120).T
    figure = Figure(figsize=(13, 4.0), layout="constrained")
    titles = {"large KL": "large KL: no progress", "no KL": "no KL: collapse", "GARDO": "GARDO: every mode"}
    for axes, (name, outcome) in zip(figure.subplots(1, len(outcomes)), outcomes.items(), strict=True):
        axes.contourf(line, line, height, levels=12, cmap="YlOrBr", alpha=0.5)
        axes.scatter(*outcome.points[:1000].T, s=2, color="#1f4e79")
        for mode, (x, y) in enumerate(CENTRES.tolist()):
            share = f"{outcome.shares[mode]:.0%}" if mode in HEIGHTS else "low score"
            axes.annotate(share, (x, y), (0, 24), textcoords="offset points", ha="center", fontsize=9)
        axes.set(xlim=(-3.6, 3.6), ylim=(-3.6, 3.6), aspect="equal", xticks=[], yticks=[])
        axes.set_title(
            f"{titles.get(name, name)}\n{outcome.found} of 3 good modes, mean score {outcome.proxy:.2f}", fontsize=10
        )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("gardo_didactic.png"), help="the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=90)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    outcomes = didactic(arguments.seed, arguments.epochs)
    for name, outcome in outcomes.items():
        shares = ", ".join(f"{share:.1%}" for share in outcome.shares.values())
        print(f"{name:10} mean score {outcome.proxy:.3f}, good modes hold {shares}: {outcome.found} of 3 found")
    draw(outcomes, arguments.out)
    print(f"{time.perf_counter() - started:.0f} s; {arguments.out}")


if __name__ == "__main__":
    main()
