"""The samples that GARDO's gate trusts least, as pictures with what is known of them, for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.methods.gardo.penalty import Gardo
from diffrl.objectives.advantages import ScoredBatch
from diffrl.policy import Policy
from diffrl.records.disk import write_json, writing
from diffrl.records.tracking import save_image
from diffrl.rollout import Rollout
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook

FOLDER = "gardo"


def gallery(
    gardo: Gardo,
    policy: Policy,
    rollout: Rollout,
    reduce: Callable[[Tensor], Tensor],
    count: int = 8,
    side: int = 256,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The epoch's samples with the highest U, highest first: images (count, 3, h, w) on the CPU, and what is known.

    Of equal ones the penalised come first. Every process decodes those that it made, `reduce` puts them together.
    Images larger than `side` are reduced.
    Each dict: prompt, member, uncertainty, penalised, scores {name: score}, the proxy first (None: not applicable).
    """
    judged = gardo.judged
    assert judged is not None, "there are no auxiliary rewards"
    among_equals = 1e-9 * judged.gate.double()  # those that the lot has drawn
    chosen = (judged.u.nan_to_num(-2.0) + among_equals).argsort(descending=True, stable=True)[:count]
    local = chosen - rollout.first
    here = (local >= 0) & (local < len(rollout.member))
    images = policy.decode(rollout.latents[local.clamp(0, len(rollout.member) - 1).to(rollout.latents.device)])
    if max(images.shape[-2:]) > side:
        images = F.interpolate(images, size=(side, side), mode="area")
    images = reduce(images * here.to(images.device)[:, None, None, None]).cpu()
    group, rows = rollout.total // len(rollout.prompts), []
    for i in chosen.tolist():
        scores = torch.cat([judged.proxy[i : i + 1], judged.auxiliary[i]]).tolist()
        rows.append(
            {
                "prompt": rollout.prompts[i // group].text,
                "member": i % group,
                "uncertainty": _or_none(float(judged.u[i])),
                "penalised": bool(judged.gate[i]),
                "scores": dict(zip(["proxy", *gardo.auxiliary], map(_or_none, scores), strict=True)),
            }
        )
    return images, rows


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def save_uncertain(run_dir: str | Path, epoch: int, images: Tensor, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write an epoch's most uncertain samples and return the JSON file, written last and at once.

    Args:
        images: (n, 3, H, W) in [0, 1].
        rows: of each image: prompt, member, uncertainty, penalised, scores {name: score or None}.
    """
    folder = Path(run_dir) / FOLDER
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for i, (image, row) in enumerate(zip(images, rows, strict=True)):
        name = f"epoch-{epoch:04d}-{i:02d}.png"
        save_image(image, folder / name, {"prompt": str(row["prompt"])})
        entries.append({**row, "image": name})
    path = folder / f"epoch-{epoch:04d}.json"
    write_json(path, entries, allow_nan=False)
    return path


class Gallery(RunHook):
    """Keeps, in epochs that are evaluated, the samples that the gate trusts least, for the report; and says once that
    the brake does not act where it should."""

    def __init__(self, build: Build, gardo: Gardo) -> None:
        self.build, self.gardo, self._warned = build, gardo, False

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        number, config, folder = epoch + 1, self.build.config, self.build.folder
        if number % config.evaluate.every == 0 or number == config.epochs:
            found = gallery(self.gardo, self.build.policy, rollout, self.build.processes.sum)
            if folder.main:
                save_uncertain(folder.path, number, *found)
        return {}

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        judged, gardo = self.gardo.judged, self.gardo.gated
        if self._warned or judged is None or gardo.beta == 0 or metrics.get("gardo/kl_gated") is not None:
            return ()
        suspected, chosen = int((judged.u > 0).sum()), int(judged.gate.sum())
        if not suspected:
            return ()
        self._warned = True
        of_them = (
            "the gate chose none of them" if not chosen else f"none of the {chosen} that the gate chose is trained"
        )
        return [
            f"WARNING: gardo: no row of this epoch is penalised, though the reward likes {suspected} images better "
            f"than the auxiliary rewards do (U > 0): {of_them}; see gardo.gate and gardo.share"
        ]
