"""Rewards of the whole batch: what an image does for all of an epoch's images together (DRAGON, arXiv:2504.15217).

DRAGON optimises figures of a set of images. How a set's figure becomes an image's score is this package's construction:
its leave-one-out gain. Shapes: N images of the batch, M exemplars, D the width of an embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl_zoo.cards import card_of
from diffrl_zoo.diversity import effective_number
from diffrl_zoo.references import References
from diffrl_zoo.vision import Looker

_AT_ONCE = 2**24  # float64 numbers of the matrices that are decomposed together: 128 MB


def vendi_gains(x: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """`V(X) - V(X \\ i)` of the images `wanted` (w,), and V(X), for unit embeddings x (N, D); float64.

    `V(X) = exp(H(eigenvalues of X^T X / N))` (Friedman and Dieng 2022, arXiv:2210.02410).
    """
    x = _narrow(x)
    total = x.T @ x
    whole = effective_number(torch.linalg.eigvalsh(total / len(x)))
    gains = [
        whole - effective_number(torch.linalg.eigvalsh((total - rows[:, :, None] * rows[:, None, :]) / (len(x) - 1)))
        for rows in _blocks(x[wanted])
    ]
    return torch.cat([*gains, x.new_zeros(0)]), float(whole)


class Gaussian:
    """The Gaussian of exemplars' embeddings (M, D): mean (D,), the root of the covariance (D, D) and its trace."""

    def __init__(self, embeddings: Tensor) -> None:
        x = embeddings.double()
        self.mean = x.mean(0)
        values, vectors = torch.linalg.eigh((x - self.mean).T @ (x - self.mean) / len(x))
        values = values.clamp(min=0.0)
        self.root, self.trace = vectors * values.sqrt() @ vectors.T, values.sum()

    def distance(self, mean: Tensor, inner: Tensor, trace: Tensor) -> Tensor:
        """(...): the squared Frechet distance of a Gaussian with mean (..., D) and covariance S of this trace (...), by
        `inner` = R S R with this one's root R: `|m - m_r|^2 + tr S + tr S_r - 2 tr (R S R)^(1/2)`."""
        cross = torch.linalg.eigvalsh(inner).clamp(min=0.0).sqrt().sum(-1)
        return (mean - self.mean).square().sum(-1) + trace + self.trace - 2.0 * cross

    def gains(self, x: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        """`(N - 1) (D(X \\ i) - D(X))` of the images `wanted` (w,), and D(X), for embeddings x (N, D); float64.

        Without image i the mean is `m - e d` and the covariance `(1 + e) (S - e d d^T)`, with `d = x_i - m` and
        `e = 1 / (N - 1)`. The factor N - 1 keeps the size of the scores the same for any N.
        """
        x = x.double()
        mean, share = x.mean(0), 1.0 / (len(x) - 1)
        centred = x - mean
        turned = centred @ self.root
        inner, trace = turned.T @ turned / len(x), centred.square().sum() / len(x)
        whole = self.distance(mean, inner, trace)
        gains = [x.new_zeros(0)]
        for d, r in zip(_blocks(centred[wanted]), _blocks(turned[wanted]), strict=True):
            without = (1 + share) * (inner - share * r[:, :, None] * r[:, None, :])
            lost = (1 + share) * (trace - share * d.square().sum(-1))
            gains.append((self.distance(mean - share * d, without, lost) - whole) / share)
        return torch.cat(gains), float(whole)


def _narrow(x: Tensor) -> Tensor:
    """Rows (N, min(N, D)) with the same inner products, float64."""
    x = x.double()
    if len(x) >= x.shape[1]:
        return x
    values, vectors = torch.linalg.eigh(x @ x.T)
    return vectors * values.clamp(min=0.0).sqrt()


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    return iter(rows.split(max(_AT_ONCE // max(rows.shape[1], 1) ** 2, 1)))


@dataclass(eq=False, repr=False, kw_only=True)
class _OfBatch(Looker):
    """What both rewards have in common: embeddings of the images."""

    batchwise = True

    def __post_init__(self) -> None:
        self.look()
        # Apple's devices have no float64.
        self._place = torch.device("cpu") if torch.device(self.device).type == "mps" else self.device
        self.width = self._embedded(torch.zeros(1, 3, 64, 64)).shape[1]

    @abstractmethod
    def _gains(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        """Of rows (N, D) and `wanted`, on `_place`."""

    @torch.no_grad()
    def describe(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Unit embeddings (B, D) of images (B, 3, H, W) in [0, 1]."""
        return self._embedded(images)

    def gains(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        """Scores (w,) of the images `wanted` (w,) among all that `rows` (N, D) describe, and the figure of all. An only
        image, which there is nothing to compare with, has 0."""
        if len(rows) < 2:
            return torch.zeros(len(wanted)), float("nan")
        scores, figure = self._gains(rows.to(self._place), wanted.to(self._place))
        return scores.float(), figure

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1], which are the whole batch."""
        rows = [self.describe(part, prompts, metadata) for part in images.split(self.batch_size)]
        return self.gains(torch.cat(rows), torch.arange(len(images)))[0]

    @torch.no_grad()
    def _embedded(self, images: Tensor) -> Tensor:
        return self.encoder.embed_image(images.to(self.device)).float()


class Vendi(_OfBatch):
    """What an image adds to the effective number of different images of the epoch, all prompts together.

    `features` (clip, transformers), `model`, `pretrained`, `precision`: the encoder, as in the reward `diversity`,
    which measures the same inside each prompt's group. `batch_size`: images per forward.
    """

    name = "vendi"
    card = card_of(name)

    def _gains(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        return vendi_gains(rows, wanted)


@dataclass(eq=False, repr=False, kw_only=True)
class Frechet(_OfBatch):
    """How much nearer an image brings the whole batch to exemplars: the Frechet distance without it minus with it.

    `exemplars`: a folder with pictures, of which at most `count` are read, or "playground" (`count` true renderings of
    the prompts of its set for training). Both sets are taken as Gaussians in the encoder's space: give more exemplars
    and more images an epoch than its width. The other parameters: as in `Vendi`.
    """

    name = "frechet"
    card = card_of(name)

    exemplars: str = "playground"
    count: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 2:
            raise UserError(f'reward "{self.name}": count is {self.count}, not at least 2')
        parts = [self._embedded(part) for part in self._pictures(self.exemplars, self.count)]
        embeddings = torch.cat(parts)
        if len(embeddings) < 2:
            raise UserError(f'reward "{self.name}": exemplars: "{self.exemplars}" has one picture; two have a spread')
        self.gaussian = Gaussian(embeddings.to(self._place))

    def _pictures(self, exemplars: str, count: int) -> Iterator[Tensor]:
        """The exemplars (b, 3, H, W), in batches of one size of picture."""
        references, prompts = References(exemplars, self.name), [""]
        if exemplars == "metadata":
            raise UserError(f'reward "{self.name}": exemplars: a folder or "playground", the same for all prompts')
        if exemplars == "playground":
            from diffrl_playground.scenes import prompt_set

            prompts = prompt_set("compositional", "train")
        total = min(count, len(references.files) or count)
        for start in range(0, total, self.batch_size):
            keys = range(start, min(start + self.batch_size, total))
            drawn = references.draw([prompts[key % len(prompts)] for key in keys], [{} for _ in keys], keys)
            for shape in dict.fromkeys(picture.shape for picture in drawn):
                yield torch.stack([picture for picture in drawn if picture.shape == shape])

    def _gains(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        return self.gaussian.gains(rows, wanted)
