"""`diffrl headroom`: what one epoch's images, drawn from the untrained model, say of a recipe before it is trained.

Symbols: P prompts of the first epoch, G images of each, K rewards (the optimised ones, then what is watched). All
scores are turned so that more is better.

name        meaning
best_of     E[max of n scores of a prompt], without replacement, over the prompts: what choosing one of n would give
spread      root mean variance inside groups: what the advantages are made of
noise       root mean square of what a score moves by under changes of its image that no eye sees (`near_identical`)
reliability 1 - (noise / spread)^2 in [0, 1]: the share of the spread that is not noise
conflict    Spearman's correlation of two rewards inside a group, mean over groups
expected    the gain to be expected of training: `GAIN` times what the best of G has above the mean, times `reliability`
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.evaluation import Evaluator
from diffrl.prepare.dry_run import without_caches
from diffrl.prompts import Prompt
from diffrl.rewards.scoring import Scorer
from diffrl.run.run import Run
from diffrl.seeds import noise as noise_of
from diffrl.stats import known, rank_correlation, standard_error

# What training has gained of what the best of G has above the mean, times `reliability`: middle and range of the
# shipped recipes with one reward, as experiments/trials/headroom.py finds them. Their budgets differ, so it is no law.
GAIN, GAIN_RANGE = 0.5, (0.35, 0.85)
FLAT = 1e-6  # a spread below this share of the mean's size is none
MOST_FLAT = 0.8  # share of groups without signal from which a recipe wastes its images
LEAST_RELIABILITY = 0.5  # of the spread
SURE = 2.0  # standard errors


def headroom(config: Config) -> dict[str, Any] | None:
    """Measure a config's rewards on its first epoch's prompts; nothing is trained or written.

    Draws as many images as one epoch has, from the run's own model, sampler and seed, and scores four near-identical
    versions of one image for each prompt. Returns what `as_text` shows, as JSON takes it; None on other processes.

    Raises:
        UserError: the config draws no images, or its groups are of one image.
    """
    if not config.drawn_groups:
        raise UserError("headroom: this config trains on an image set alone; there is no epoch to draw")
    if config.rollout.group_size < 2:
        raise UserError("rollout.group_size: 1; headroom compares the images of a prompt")
    run = Run(without_caches(config.model_copy(update={"d2align": None} if config.d2align else {})))
    try:
        for hook in run.hooks:
            if hook.name == "learning":  # those rewards have nothing to say before: for them an epoch of images more
                hook.begin(0)
        prompts = [run.source.stream.prompts[i] for i in run.source.stream.batch(0)]
        size, batch_size = config.rollout.group_size, config.rollout.batch_size
        evaluator = Evaluator(run.policy, run.judges, run.features, run.spec, size, batch_size, run.accelerator)
        drawn = evaluator.score(prompts, None, config.seed, keep=len(prompts))
        if not run.main:
            return None
        noise = noises(run.judges, drawn.pictures, prompts)
        signs = torch.tensor([-1.0 if name in run.lower else 1.0 for name in run.judges.names])
        scores = drawn.scores.view(len(prompts), size, -1) * signs  # by all that the config optimises or watches
        result = analyse(run.judges.names, list(config.rewards), scores, noise)
    finally:
        run.close()
    about = {"objective": config.objective, "model": config.model, "prompts": len(prompts), "group_size": size}
    counts = {"images": len(drawn.scores), "versions": len(VERSIONS) * len(prompts)}
    return {**about, **counts, "lower_is_better": sorted(run.lower), **result}


def _jpeg(images: Tensor) -> Tensor:
    """Written as JPEG of quality 95 and read again."""
    result = []
    for image in images:
        buffer = io.BytesIO()
        pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        Image.fromarray(pixels).save(buffer, format="jpeg", quality=95)
        result.append(torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1) / 255)
    return torch.stack(result)


def _grain(images: Tensor) -> Tensor:
    """Gaussian noise of one grey level of 256."""
    grain = noise_of(tuple(images.shape[1:]), [("headroom", i) for i in range(len(images))])
    return (images + grain / 255).clamp(0, 1)


VERSIONS = {
    "8 bits": lambda images: (images * 255).round() / 255,
    "JPEG 95": _jpeg,
    "grain of one grey level": _grain,
    "1 % darker": lambda images: images * 0.99,
}


def noises(scorer: Scorer, pictures: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """(K,) root mean square difference of the scores of near-identical pictures (P, 3, H, W) from the pictures' own;
    NaN for a reward that compares images, and where it applies to none."""
    groups = torch.arange(len(pictures))
    own = scorer.score(pictures, prompts, groups)
    moved = torch.stack([scorer.score(change(pictures), prompts, groups) - own for change in VERSIONS.values()])
    result = moved.double().square().nanmean((0, 1)).sqrt()
    result[[scorer.names.index(name) for name in (*scorer.groupwise, *scorer.collective)]] = math.nan
    return result


def best_of(table: Tensor) -> Tensor:
    """(P, G): E[max of n] of each prompt's scores (P, G), n from 1 to G drawn without replacement; column 0 the mean.

    The i-th smallest of G is the largest of n in C(i - 1, n - 1) of C(G, n) choices.
    """
    ordered, size = table.double().sort(dim=1).values, table.shape[1]
    weights = [[math.comb(i, n - 1) / math.comb(size, n) for i in range(size)] for n in range(1, size + 1)]
    return ordered @ torch.tensor(weights, dtype=torch.float64).T


def analyse(names: Sequence[str], trained: Sequence[str], scores: Tensor, noise: Tensor) -> dict[str, Any]:
    """What is said of each of `trained`, from scores (P, G, K), NaN where one does not apply, more being better."""
    rewards = {name: _reward(scores[..., names.index(name)], float(noise[names.index(name)])) for name in trained}
    conflicts = []
    for name in trained:  # the first of `names`
        for other in names[names.index(name) + 1 :]:
            tables = scores[..., names.index(name)], scores[..., names.index(other)]
            each = known([rank_correlation(a, b) for a, b in zip(*tables, strict=True)])
            if len(each) > 1:
                kind = "trained" if other in trained else "watched"
                found = {"correlation": float(each.mean()), "error": standard_error(each)}
                conflicts.append({"rewards": [name, other], "other": kind, **found})
    for name, reward in rewards.items():
        reward["verdict"], reward["train"] = verdict(name, reward, conflicts)
    return {"rewards": rewards, "conflicts": conflicts}


def _reward(table: Tensor, noise: float) -> dict[str, Any]:
    """Of one reward's scores (P, G)."""
    table = table[~table.isnan().any(1)].double()
    if not len(table):
        return {"groups": 0}
    curves = best_of(table)
    gains = curves - curves[:, :1]
    within = table.std(1, correction=0)
    spread = float(within.square().mean().sqrt())
    flat = within <= FLAT * table.abs().mean(1).clamp_min(1e-3)
    reliability = 1.0 if math.isnan(noise) else max(0.0, 1 - (noise / spread) ** 2) if spread else 0.0
    mean, error = _mean_and_error(gains[:, -1])
    ends = (GAIN_RANGE[0] * max(mean - SURE * error, 0.0), GAIN_RANGE[1] * (mean + SURE * error))
    powers = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= table.shape[1]]
    curve = {}
    for n in dict.fromkeys([*powers, table.shape[1]]):
        middle, wide = _mean_and_error(gains[:, n - 1])
        curve[str(n)] = {"score": float(curves[:, n - 1].mean()), "gain": middle, "error": wide}
    low, high = (reliability * end for end in ends)
    expected = {"value": GAIN * reliability * mean, "low": low, "high": high}
    return {
        "groups": len(table),
        "mean": float(table.mean()),
        "std": float(table.std(correction=0)),
        "spread": spread,
        "without_signal": float(flat.double().mean()),
        "noise": None if math.isnan(noise) else noise,
        "below_noise": None if math.isnan(noise) else float((within <= noise).double().mean()),
        "reliability": reliability,
        "best_of": curve,
        "expected_gain": expected,
    }


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of independent values and its standard error, 0 of a single one."""
    return float(values.mean()), standard_error(values) or 0.0


def verdict(name: str, reward: Mapping[str, Any], conflicts: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """One line, and whether to train on it."""
    stop = "do not train on this: "
    if not reward["groups"]:
        return f"{stop}it applies to none of the first epoch's prompts", False
    if reward["without_signal"] > MOST_FLAT:
        return f"{stop}in {reward['without_signal']:.0%} of the groups all images score alike", False
    if reward["reliability"] < LEAST_RELIABILITY:
        moved = f"invisible changes move it by {reward['noise']:.3g}, its groups by {reward['spread']:.3g}"
        return stop + moved, False
    best = list(reward["best_of"].values())[-1]
    if best["gain"] <= SURE * best["error"]:
        return f"{stop}the best image of a group is no better than its mean", False
    against = [
        f"{other} ({one['correlation']:+.2f})"
        for one in conflicts
        if name in one["rewards"] and one["correlation"] < -SURE * one["error"] and one["correlation"] < -0.1
        for other in one["rewards"]
        if other != name
    ]
    low, high = reward["expected_gain"]["low"], reward["expected_gain"]["high"]
    waste = f"; {reward['without_signal']:.0%} of the groups say nothing" if reward["without_signal"] > 0.25 else ""
    warning = f"; it goes against {', '.join(against)}" if against else ""
    return f"train: expected gain {reward['expected_gain']['value']:.3g} [{low:.2g}, {high:.2g}]{waste}{warning}", True


def as_text(result: Mapping[str, Any]) -> str:
    """What was measured, and a verdict for each reward, on a console of 80 columns."""
    size, images, versions = result["group_size"], result["images"], result["versions"]
    middle = str(4 if size > 4 else 2)
    heads = f"{'mean':>9}{'spread':>9}{'noise':>9}{'silent':>8}{f'best of {middle}':>11}{f'best of {size}':>12}"
    lines = [
        f"{images} images of the base model ({result['prompts']} prompts x {size}); {versions} near-identical ones",
        f"{'':<20}{heads}",
    ]
    for name, reward in result["rewards"].items():
        label = name if len(name) < 20 else f"{name[:18]}~"
        if not reward["groups"]:
            lines.append(f"{label:<20}{'-':>9}")
            continue
        best = [f"{reward['best_of'][n]['gain']:+.3g}" for n in (middle, str(size))]
        noise = "-" if reward["noise"] is None else f"{reward['noise']:.3g}"
        cells = f"{reward['mean']:>9.4g}{reward['spread']:>9.3g}{noise:>9}{reward['without_signal']:>8.0%}"
        lines.append(f"{label:<20}{cells}{best[0]:>11}{best[1]:>12}")
    for one in result["conflicts"]:
        if abs(one["correlation"]) > SURE * one["error"]:
            first, second = one["rewards"]
            kind = "" if one["other"] == "trained" else ", only watched"
            lines.append(f"ranks      {first} and {second}{kind}: {one['correlation']:+.2f} +- {one['error']:.2f}")
    for name, reward in result["rewards"].items():
        lines += textwrap.wrap(f"{name}: {reward['verdict']}", 80, subsequent_indent="  ")
    return "\n".join(lines)
