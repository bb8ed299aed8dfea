"""SRPO (arXiv 2509.06942) as options of `direct`: Direct-Align's levels, and the difference of two prompts' rewards.

symbol        name here     meaning
x0, eps0      x0, eps       a rollout's image, and the noise that it was drawn from; x_t lies on the line between them
t, t'         t, t_next     the level that the network sees, and the one that its step goes to
D             step          |t' - t|: down from above t' ("denoise"), or up to it from below ("inversion")
x0^           one_step      x0 - c (v_theta - v) denoised, x0 + c (v_theta - v) inverted, c = D / (1 - t')
k             discounts     by the place of the lower of both levels in the range, 0 at its clean end
R+, R-        contrast      scores of one image for the prompt with a wanted word, and with an unwanted one

The reward of a row is (1 + k) R+ - R- if it is denoised, and (1 + k) R- - R+ if it is inverted, where the step's sign
makes an ascent of the reward a descent of the image. For x0^ alike the two add up to c [(2 + k1) R+' - (2 + k2) R-'].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffrl.methods.direct import Align, Pair
from diffrl.process_state import unchanged_by
from diffrl.prompts import Prompt
from diffrl.rewards.answers import judged
from diffrl.rewards.protocol import Embedder
from diffrl.seeds import seed_of

Ends = tuple[float, float]
DISCOUNTS = ((0.1, 0.25), (0.3, 0.01))  # k denoised and inverted, from the range's low end to its high one (SRPO.py)
STEP = 0.02145  # in noise levels: 100 of 1,000 fine ones (SRPO.py, line 520)
EDGE = 0.005  # the share of the range that the released code leaves at either end: 5 of 1,000 fine levels


def step_levels(align: Align, u: Tensor, inversion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t, t' and the place in the range of the lower of them, (b,) each, from uniform draws u (b,) in [0, 1].

    Both branches of one u go to the same t', so that their c is the same: the step is as wide for both, and narrower
    where it would leave the range on either side.
    """
    low, high = align.range
    t_next = low + (EDGE + (1 - 2 * EDGE) * u) * (high - low)
    width = torch.minimum(t_next - low, high - t_next).clamp(max=STEP)
    t = torch.where(inversion, t_next - width, t_next + width)
    return t, t_next, (torch.minimum(t, t_next) - low) / (high - low)


def factors(place: Tensor, inversion: Tensor, ends: tuple[Ends, Ends] = DISCOUNTS) -> Tensor:
    """(b, 2): what R+ and R- count in each row's reward, by the k of the two branches at the range's ends."""
    k1, k2 = (clean + (noisy - clean) * place for clean, noisy in ends)
    minus = torch.full_like(place, -1.0)
    denoised, inverted = torch.stack([1 + k1, minus], dim=1), torch.stack([minus, 1 + k2], dim=1)
    return torch.where(inversion[:, None], inverted, denoised)


def drawn_words(pair: Pair, names: Sequence[tuple[int | str, ...]]) -> Tensor:
    """(b, 2) int64: a positive and a negative word for each name, every two as likely as any other."""
    wanted = len(pair.positive)
    numbers = (seed_of(*name, "words") % (wanted * len(pair.negative)) for name in names)
    return torch.tensor([[number % wanted, number // wanted] for number in numbers])


@dataclass(frozen=True)
class Contrast:
    """Two prompts for each of some images, and what the scores for them count: (b, 2) on the CPU."""

    positive: list[str]
    negative: list[str]
    factors: Tensor

    @classmethod
    def of(cls, pair: Pair, prompts: Sequence[str], words: Tensor, factors: Tensor) -> Contrast:
        """Of prompts (b,) and the words (b, 2) drawn for them."""
        plus, minus = (
            [pair.form.format(word=kind[i], prompt=prompt) for i, prompt in zip(column, prompts, strict=True)]
            for kind, column in zip((pair.positive, pair.negative), words.T.tolist(), strict=True)
        )
        return cls(plus, minus, factors)

    def take(self, rows: Sequence[int]) -> Contrast:
        return Contrast([self.positive[i] for i in rows], [self.negative[i] for i in rows], self.factors[list(rows)])

    def score(self, reward: Embedder, images: Tensor) -> Tensor:
        """(b,) of images (b, 3, H, W) in [0, 1], which are embedded once."""
        seen = reward.embed_image(images)
        plus = reward.score(seen, reward.embed_text(self.positive))
        minus = reward.score(seen, reward.embed_text(self.negative))
        counted = self.factors.to(plus, non_blocking=True)
        return counted[:, 0] * plus + counted[:, 1] * minus


def column(reward: Any, images: Tensor, prompts: Sequence[Prompt], contrast: Contrast | None) -> Tensor:
    """(b,) scores of one reward, float32 on the images' device, 0 without gradient where it does not apply."""
    rows = judged(reward, prompts)
    if not rows:
        return images.new_zeros(len(images))
    part = images if len(rows) == len(images) else images[rows]
    part = part.to(getattr(reward, "device", None) or part.device)
    texts, metadata = [prompts[i].text for i in rows], [prompts[i].metadata for i in rows]
    size = getattr(reward, "batch_size", None) or len(rows)
    pieces = [slice(start, start + size) for start in range(0, len(rows), size)]
    with unchanged_by(getattr(reward, "name", type(reward).__name__)):
        if contrast is None:
            scores = [reward(part[piece], texts[piece], metadata[piece]) for piece in pieces]
        else:
            scores = [contrast.take(rows[piece]).score(reward, part[piece]) for piece in pieces]
    column = torch.cat(scores).to(images)
    if len(rows) == len(images):
        return column
    return images.new_zeros(len(images)).index_copy(0, torch.tensor(rows, device=images.device), column)
