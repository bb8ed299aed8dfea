"""What an epoch does on the device, phase by phase, on tensors without values: for `diffrl.memory.fit` to count.

Each phase takes the steps that a policy and an objective take; the rewards' own models are left out, a decoded image
being its own score.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.forward import Prediction
from diffrl.memory.buffers import Alive
from diffrl.objectives.objective import Objective
from diffrl.policy import PRECISIONS, Conditioning, Policy
from diffrl.policy.base import decoded_at_once
from diffrl.prompts import Prompt

Phase = Callable[[Alive], None]


class Keyed(NamedTuple):
    """A phase, and what its count depends on beside the model and the rows; None: on more than can be said."""

    key: Hashable
    rows: int
    phase: Phase


class Count(NamedTuple):
    """The most bytes that a phase needs on top of the modules and of what is kept, and its operations; see `Alive`."""

    peak: int
    operations: int


@dataclass(frozen=True)
class StepProfile:
    """The phases of a config on a backbone of fake tensors."""

    backbone: Any
    config: Config

    def count(self, phase: Phase, kept: Iterable[Tensor] = ()) -> Count:
        """Run the phase on fake tensors, with `kept` beside it."""
        backbone = self.backbone
        parts = (backbone.network, backbone.vae)
        there = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
        with Alive([*there, *kept]) as alive:
            phase(alive)
        for parameter in backbone.network.parameters():
            parameter.grad = None
        return Count(alive.peak, alive.operations)

    def sample(self, rows: int, guidance: float, alive: Alive) -> None:
        """A forward of a rollout's step."""
        with torch.no_grad():
            self._predict(*self._inputs(rows), guidance)

    def train(self, rows: int, objective: Objective, beside: float, alive: Alive) -> None:
        """A micro-batch, forward and backward.

        `beside`: the guidance of a forward without gradient while its graph waits; 0: there is none.
        """
        inputs = self._inputs(rows)
        trained = self._predict(*inputs, objective.guidance_scale)
        if beside:
            with torch.no_grad(), alive.aside():
                reference = self._predict(*inputs, beside)
            loss = (trained.v - reference.v).square().mean()
        else:
            loss = trained.v.square().mean()
        if self.config.method.decodes:
            loss = loss + self._scores(trained.x0, objective).sum()
        loss.backward()

    def decode(self, alive: Alive) -> None:
        """A chunk of latents decoded."""
        backbone = self.backbone
        dtype = next(backbone.vae.parameters()).dtype
        with torch.no_grad():
            latents = backbone.to_vae(torch.empty(self.chunk, *backbone.latent_shape)).to(dtype)
            backbone.from_vae(backbone.vae.decode(latents, return_dict=False)[0])

    def encode(self, alive: Alive) -> None:
        """A picture of an image set encoded; they are so one by one."""
        backbone = self.backbone
        dtype = next(backbone.vae.parameters()).dtype
        _, height, width = backbone.latent_shape
        with torch.no_grad():
            image = torch.empty(1, 3, height * backbone.scale, width * backbone.scale)
            backbone.vae.encode(backbone.to_encoder(image).to(dtype), return_dict=False)

    @property
    def picture(self) -> Keyed:
        """`encode`."""
        return Keyed(("encode", self.backbone.latent_shape), 1, self.encode)

    @property
    def decoding(self) -> Keyed:
        """`decode`."""
        return Keyed(("decode", self.backbone.latent_shape), self.chunk, self.decode)

    def sampling(self, rows: int, guidance: float) -> Keyed:
        """`sample` of so many."""
        return Keyed(("sample", self.backbone.latent_shape, guidance), rows, partial(self.sample, rows, guidance))

    def training(self, rows: int, objective: Objective, beside: float) -> Keyed:
        """`train` of so many. A method that decodes trains through more than these numbers say."""
        recompute = self.config.optimise.gradient_checkpointing
        key = None if self.config.method.decodes else ("train", objective.guidance_scale, beside, recompute)
        return Keyed(key, rows, partial(self.train, rows, objective, beside))

    @property
    def chunk(self) -> int:
        """How many latents are decoded at a time."""
        _, height, width = self.backbone.latent_shape
        most = self.config.engine.decode or decoded_at_once(height, width, self.backbone.scale)
        return min(most, self.config.rollout.batch_size)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Conditioning]:
        """Latents, levels and texts, which stay until the micro-batch has gone backward."""
        texts = self.backbone.blank(rows, PRECISIONS[self.config.optimise.precision])
        return torch.empty(rows, *self.backbone.latent_shape), torch.empty(rows), texts

    def _predict(self, x: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Prediction:
        """Of x (b, C, h, w). The empty prompt is as long as the longest, and is counted with the texts."""
        policy = Hollow(self.backbone, self.config)
        lengths = None if cond.lengths is None else cond.lengths[:1]
        extra = tuple(tensor[:1] for tensor in cond.extra)
        policy._negative = Conditioning(cond.embeds[:1], cond.pooled[:1], lengths, extra)
        return policy.predict(x, t, cond, guidance)

    def _scores(self, latents: Tensor, objective: Any) -> Tensor:
        """(b, K) of decoded latents, by an objective that back-propagates its rewards."""
        policy = Hollow(self.backbone, self.config)
        objective.before_step(policy, None)  # the autoencoder may be asked to recompute
        return cast(Tensor, objective.scores(policy, latents, [Prompt("")] * len(latents)))


class Hollow(Policy):
    """As much of a policy as predicts and decodes, on a backbone of fake tensors."""

    def __init__(self, backbone: Any, config: Config) -> None:
        self.backbone, self.network, self.vae = backbone, backbone.network, backbone.vae
        self.device, self.decoded, self.wide_attention = torch.device("cpu"), config.engine.decode, False
        precision = PRECISIONS[config.optimise.precision]
        self._autocast_to = None if precision == torch.float32 else precision
        self._lockstep = self.plain_texts = None


class ImageItself:
    """Stands for a differentiable reward that is not loaded: (b,) means of images (b, 3, H, W)."""

    device = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        return images.flatten(1).mean(1)
