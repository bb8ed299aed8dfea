"""A critic of noised images: a small network that learns which reward to expect from what a row shows (AC-Flow)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from diffrl.objectives.rows import Rows
from diffrl.policy import Conditioning
from diffrl.reward_kinds.learning import Learner, Reduce
from diffrl.seeds import seed_of

WIDTH = 64
FREQUENCIES = 8


def _precision(device: torch.device) -> torch.dtype:
    """In which the critic computes and learns: Adam divides a gradient by its own size, so where the true one is 0 or
    nearly it steps along the rounding, which is another one for other micro-batches and processes: in float32 V parted
    by 0.2 % to 17 % from the second step on. In float64 the rounding is far below Adam's eps, and the critic small.
    """
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's devices do not have


def text_features(cond: Conditioning) -> Tensor:
    """(b, W) float32: the mean of a prompt's tokens, and its pooled embedding."""
    tokens = cond.embeds.flatten(2).float()
    mask = cond.mask[..., None]
    mean = (tokens * mask).sum(1) / mask.sum(1).clamp_min(1)
    return torch.cat([mean, cond.pooled.float()], dim=1)


class Critic(nn.Module):
    """V(x_t, t, c): three convolutions on the latents, the level's sines and the text, and two layers with LayerNorm.

    The last layer is 0 at first, so that V is.

    Args:
        channels: of a latent.
        text: W of `text_features`.
        columns: how many values V has, one for each column of rewards.
    """

    def __init__(self, channels: int, text: int, columns: int) -> None:
        super().__init__()
        sizes = (channels, WIDTH, WIDTH, WIDTH)
        convolutions = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(sizes)]
        self.image = nn.Sequential(*(layer for one in convolutions for layer in (one, nn.SiLU())))
        self.text = nn.Sequential(nn.LayerNorm(text), nn.Linear(text, WIDTH))
        joined = 2 * WIDTH + 2 * FREQUENCIES
        self.value = nn.Sequential(nn.Linear(joined, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), nn.Linear(WIDTH, columns))
        last = self.value[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x_t: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """(b, columns) of latents (b, C, h, w), levels (b,) in [0, 1] and text (b, W), all of its own dtype."""
        angles = math.pi * t[:, None] * 2.0 ** torch.arange(FREQUENCIES, device=t.device)
        parts = [self.image(x_t).mean((2, 3)), self.text(text), angles.sin(), angles.cos()]
        return self.value(torch.cat(parts, dim=1))


class Values:
    """The critic with its Adam, made when the first rows are seen, which say how wide it is.

    Args:
        rate: Adam's learning rate.
        seed: of the run; the critic's first weights hang on it alone.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.seed = rate, seed
        self.learner: Learner | None = None
        self._kept: Mapping[str, Tensor] | None = None  # a checkpoint's, until there is a critic to take it

    def of(self, rows: Rows) -> Tensor:
        """(b, columns) V of the rows, with a graph to the critic's weights."""
        dtype, text = _precision(rows.x_t.device), text_features(rows.cond)
        if self.learner is None:
            self.learner = self._made(rows, text.shape[1])
        return self.learner.module(rows.x_t.to(dtype), rows.t.to(dtype), text.to(dtype))

    def step(self, losses: Iterator[Tensor], count: int, reduce: Reduce) -> None:
        """A step of Adam on `losses`, sums over parts of the `count` images here, at least one, made with `of`."""
        first = next(losses)  # it makes the critic, where there is none yet
        assert self.learner is not None, "the losses are of this critic"
        self.learner.step(itertools.chain([first], losses), count, reduce, some=True)

    def _made(self, rows: Rows, text: int) -> Learner:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "critic"))
            module = Critic(rows.x_t.shape[1], text, rows.advantages.shape[1])
        learner = Learner(module.to(rows.x_t.device, _precision(rows.x_t.device)), self.rate, betas=(0.9, 0.999))
        if self._kept is not None:
            learner.load_state_dict(self._kept)
            self._kept = None
        return learner

    def state_dict(self) -> dict[str, Tensor]:
        if self.learner is None:
            return dict(self._kept or {})
        return self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.learner, self._kept = None, dict(state) or None
