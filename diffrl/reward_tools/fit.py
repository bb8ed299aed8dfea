"""`diffrl rewards fit`: a head on frozen embeddings, from preferences.

    pair   x preferred to y   -log sigma(d - m)                        d = r(x) - r(y)
    tie    both good          -log sigma(d - m) - log sigma(-d - m)    SoliReward (arXiv 2512.22170), its loss.py
    + lambda / 2 |w|^2, on features of unit deviation

Means over pairs and ties, each of them counting once. lambda is the one of `LAMBDAS` with the lowest loss over five
parts of the training prompts, each left out in turn; from the same left-out predictions comes the one factor by which
the head is scaled, so that its scores are logits. The held-out prompts see none of this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, log_expit

from diffrl.errors import UserError
from diffrl.image_sets.latents import Pictures
from diffrl.image_sets.layouts import Group
from diffrl.image_sets.reading import read_set
from diffrl.reward_kinds.fingerprint import embedder, fingerprint
from diffrl.reward_tools.bradley_terry import compared
from diffrl.reward_tools.head import Head, features, save_head
from diffrl.rewards.protocol import Embedder, ability
from diffrl.rewards.registry import load_reward
from diffrl.seeds import seed_of
from diffrl.stats import wilson
from diffrl.tools.progress_bar import progress

LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PARTS, LEAST = 5, 20  # of cross-validation; prompts
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Pairs:
    """n pairs: `better`, `worse` (n,) are rows of the features; of a `tie` (n,) both are as good; `prompt` (n,)."""

    better: np.ndarray
    worse: np.ndarray
    tie: np.ndarray
    prompt: np.ndarray

    def __len__(self) -> int:
        return len(self.better)

    def of(self, prompts: np.ndarray, ties: bool = True) -> Pairs:
        chosen = np.isin(self.prompt, prompts) & (ties | ~self.tie)
        return Pairs(*(column[chosen] for column in (self.better, self.worse, self.tie, self.prompt)))


def pairs_of(groups: Sequence[Group], column: str) -> Pairs:
    """All pairs that the groups' numbers tell apart, and ties of their best (`compared`)."""
    rows: list[tuple[int, int, bool, int]] = []
    numbers: dict[str, int] = {}
    start = 0
    for group in groups:
        values, prompt = group.scores[column], numbers.setdefault(group.prompt, len(numbers))
        rows += [(start + better, start + worse, tie, prompt) for better, worse, tie in compared(values)]
        start += len(values)
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Pairs(table[:, 0], table[:, 1], table[:, 2].astype(bool), table[:, 3])


def loss_of(differences: np.ndarray, tie: np.ndarray, margin: float = 0.0) -> tuple[float, np.ndarray]:
    """The mean loss of d (n,), and its derivative (n,)."""
    d, n = differences, max(len(differences), 1)
    loss = -log_expit(d - margin) - np.where(tie, log_expit(-d - margin), 0.0)
    slope = -expit(margin - d) + np.where(tie, expit(d + margin), 0.0)
    return float(loss.sum() / n), slope / n


def fit_weights(x: np.ndarray, pairs: Pairs, strength: float, margin: float) -> np.ndarray:
    """w (F,) of features x (N, F): the only minimum, as the loss is convex."""
    differences = x[pairs.better] - x[pairs.worse]

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slope = loss_of(differences @ w, pairs.tie, margin)
        return loss + strength / 2 * float(w @ w), differences.T @ slope + strength * w

    return cast(np.ndarray, minimize(objective, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", tol=1e-10).x)


def fit_head(source: str, out: Path, reward: str, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fit a head on the embeddings of `reward`, write it to `out`, and return its figures.

    Args:
        source: an image set (see `diffrl.image_sets.layouts`), such as RUN_DIR/votes.
        options: `column` of its scores, `held_out` share of the prompts, `margin` m, `seed` of the split.

    Raises:
        UserError: the reward does not embed; a picture cannot be read; there are too few preferences. DiskError.
    """
    column, held = str(options.get("column", "preference")), float(options.get("held_out", 0.2))
    margin, seed = float(options.get("margin", 0.0)), int(options.get("seed", 0))
    images = read_set(source).of_size(2)
    if not images.groups:
        raise UserError(f"{source}: no prompt has two pictures to compare")
    images.check_column(column)
    pairs = pairs_of(images.groups, column)
    prompts = np.unique(pairs.of(np.unique(pairs.prompt), ties=False).prompt)
    if len(prompts) < LEAST:
        raise UserError(f"{source}: preferences on {len(prompts)} prompts; a head needs {LEAST} or more")
    base = embedder(load_reward(reward, **arguments), reward)
    x, own = _embedded(images.groups, base)
    order = np.random.default_rng(seed_of(seed, "fit")).permutation(prompts)
    count = max(round(held * len(prompts)), 1)
    held_out, training = order[:count], order[count:]
    mean, deviation = x[pairs.of(training).better].mean(0), x.std(0) + 1e-8
    x = (x - mean) / deviation
    strength, left_out, tie = _chosen(x, pairs, training, margin)
    weights = fit_weights(x, pairs.of(training), strength, margin) * _factor(left_out[~tie])
    figures: dict[str, Any] = {
        "pairs": int((~pairs.tie).sum()), "ties": int(pairs.tie.sum()), "prompts": len(prompts),
        "held_out_prompts": count, "lambda": strength, "margin": margin, "column": column, "seed": seed,
    }  # fmt: skip
    figures |= judged(x @ weights, pairs.of(held_out, ties=False))
    figures["accuracy_of_reward"] = judged(own, pairs.of(held_out, ties=False))["accuracy"]
    plain = torch.from_numpy(weights / deviation).float()
    bias = torch.tensor(-float((weights / deviation) @ mean))
    save_head(Head(plain, bias, fingerprint(base).cpu(), reward, arguments, figures), out)
    return figures


def _embedded(groups: Sequence[Group], base: Embedder) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, F) and the reward's own scores (N,) of all pictures, in order, float64."""
    read, rows, scores = Pictures(), list[np.ndarray](), list[np.ndarray]()
    device, size = torch.device(ability(base, "device") or "cpu"), ability(base, "batch_size") or 32
    pictures = [(picture, group) for group in groups for picture in group.pictures]
    waiting, prompts = list[np.ndarray](), list[str]()

    def embed() -> None:
        """What waits: pictures of one size."""
        pixels = torch.from_numpy(np.stack(waiting)).to(device).permute(0, 3, 1, 2).float() / 255
        image, text = base.embed_image(pixels), base.embed_text(prompts)
        rows.append(features(image, text.to(image)).double().cpu().numpy())
        scores.append(base.score(image, text).double().cpu().numpy())
        advance(len(waiting))
        waiting.clear()
        prompts.clear()

    with torch.no_grad(), progress("embedding", len(pictures)) as advance:
        for picture, group in pictures:
            pixels = read.pixels(picture, group.where)
            if waiting and (len(waiting) == size or pixels.shape != waiting[0].shape):
                embed()
            waiting.append(pixels)
            prompts.append(group.prompt)
        embed()
    return np.concatenate(rows), np.concatenate(scores)


def _chosen(x: np.ndarray, pairs: Pairs, prompts: np.ndarray, margin: float) -> tuple[float, np.ndarray, np.ndarray]:
    """The best lambda, with the differences that it predicts of pairs that it has not seen, and which are ties."""
    parts = np.array_split(prompts, PARTS)
    seen = [pairs.of(part) for part in parts]
    tie = np.concatenate([those.tie for those in seen])
    best: tuple[float, float, np.ndarray] | None = None
    for strength in LAMBDAS:
        predicted = []
        for part, those in zip(parts, seen, strict=True):
            w = fit_weights(x, pairs.of(np.setdiff1d(prompts, part)), strength, margin)
            predicted.append((x[those.better] - x[those.worse]) @ w)
        differences = np.concatenate(predicted)
        loss = loss_of(differences, tie)[0]
        if best is None or loss < best[0]:
            best = loss, strength, differences
    assert best is not None
    return best[1], best[2], tie


def _factor(differences: np.ndarray) -> float:
    """a that makes a d the most likely logits of pairs that were not fitted (Platt scaling without an offset)."""

    def loss(log_a: float) -> float:
        return -float(log_expit(math.exp(log_a) * differences).mean())

    return math.exp(minimize_scalar(loss, bounds=(-4, 4), method="bounded").x)


def judged(scores: np.ndarray, pairs: Pairs) -> dict[str, Any]:
    """Of pairs that were not fitted: accuracy with a 95 % interval (`share_interval`), log loss, calibration.

    `calibration`: by bins of the predicted chance of the likelier one, [mean prediction, share right, pairs];
    `calibration_error`: the mean distance of the two, by pairs.
    """
    d = scores[pairs.better] - scores[pairs.worse]
    right = np.where(d == 0, 0.5, (d > 0).astype(float))
    index = np.unique(pairs.prompt, return_inverse=True)[1]
    chance = expit(np.abs(d))
    bins = []
    for low, high in itertools.pairwise(BINS):
        inside = (chance >= low) & ((chance < high) | (high == BINS[-1]))
        if inside.any():
            bins.append([float(chance[inside].mean()), float(right[inside].mean()), int(inside.sum())])
    return {
        "accuracy": float(right.mean()),
        "interval": list(share_interval(np.bincount(index, right), np.bincount(index))),
        "log_loss": float(-log_expit(d).mean()),
        "calibration": bins,
        "calibration_error": sum(abs(mean - share) * count for mean, share, count in bins) / len(d),
        "held_out_pairs": len(d),
    }


def share_interval(right: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, `right` (P,) of `counts` (P,) cases of P prompts.

    Cases of one prompt are alike, so they count for as many independent ones as explain how the prompts' shares
    scatter: at most for all, at least as if a prompt were one case (the only choice where all are right).
    """
    total, share = counts.sum(), right.sum() / counts.sum()
    most, least = float(total), float(total**2 / (counts**2).sum())
    scatter = float(((right - share * counts) ** 2).sum()) / total**2 * len(counts) / max(len(counts) - 1, 1)
    effective = least if share in (0.0, 1.0) else min(max(share * (1 - share) / max(scatter, 1e-12), least), most)
    return wilson(share * effective, effective)


def lines(figures: dict[str, Any], reward: str) -> list[str]:
    """What the command says of a fit."""
    low, high = figures["interval"]
    summary = [
        f"{figures['pairs']} pairs and {figures['ties']} ties on {figures['prompts']} prompts; held out: "
        f"{figures['held_out_pairs']} pairs on {figures['held_out_prompts']} prompts",
        f"accuracy     {figures['accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}); {reward} itself: "
        f"{figures['accuracy_of_reward']:.3f}",
        f"log loss     {figures['log_loss']:.3f} (a coin: {math.log(2):.3f})",
        f"calibration  off by {figures['calibration_error']:.3f} on average:",
    ]
    rows = figures["calibration"]
    return summary + [f"             said {mean:.2f}, right {share:.2f}, {count} pairs" for mean, share, count in rows]
