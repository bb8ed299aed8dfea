"""Images of given prompts with fixed seeds, scored: the evaluation of a run, and of a model by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrl.features import Features, group_distances
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.rewards.kinds import find_reported
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, generate


class Evaluated(NamedTuple):
    """scores (N, K), NaN where a reward does not apply; distances (P,) inside the images of each prompt, (0,) where it
    has one image; saturation (N,) in [0, 1]; figures of the prompts' groups by their names (`diffrl.rewards.kinds`),
    without those of which nothing could be said; pictures (S, 3, H, W) of the first prompts' first images, where they
    were asked for; parts (N,) by their names, `REWARD[PART]`, without those that no prompt states; NaN
    where a prompt does not.
    """

    scores: Tensor
    distances: Tensor
    saturation: Tensor
    figures: Mapping[str, float] = {}  # never written to
    pictures: Tensor = torch.empty(0)
    parts: Mapping[str, Tensor] = {}

    @property
    def diversity(self) -> float:
        """The mean over prompts."""
        return float(self.distances.mean())

    def breadth(self) -> dict[str, float]:
        """ "diversity", and the figures."""
        return {"diversity": self.diversity, **self.figures}

    def by_prompt(self, names: Sequence[str], per_prompt: int) -> dict[str, list[float | None]]:
        """Each prompt's mean of each reward, by the rewards' names, and of its parts, "diversity" and "saturation"."""
        images = {**dict(zip(names, self.scores.unbind(1), strict=True)), "saturation": self.saturation, **self.parts}
        columns = {name: value.view(-1, per_prompt).nanmean(1) for name, value in images.items()}
        columns["diversity"] = self.distances
        return {name: [None if v != v else round(v, 6) for v in column.tolist()] for name, column in columns.items()}


@dataclass(frozen=True)
class Evaluator:
    """Draws a policy's images of given prompts from seeds of their own and scores them.

    judges, features: what measures them; spec: the sampler; per_prompt: images of each prompt; batch_size: images at a
    time; accelerator: whose processes share the prompts; check: called between batches, and may raise to break off.
    """

    policy: Policy
    judges: Scorer
    features: Features
    spec: SamplerSpec
    per_prompt: int
    batch_size: int
    accelerator: Accelerator | None = None
    check: Callable[[], None] = lambda: None

    def score(
        self,
        prompts: Sequence[Prompt],
        snapshot: str | None,
        seed: int,
        *,
        keep: int = 0,
        advance: Callable[[int], None] = lambda count: None,
        drawn: Iterable[tuple[Tensor, Tensor]] | None = None,
    ) -> Evaluated:
        """The N images in prompt-major order with their scores, and the first picture of each of the first `keep`.

        snapshot: the LoRA's name; None: the base model. `drawn`: numbers (B,) and images (B, 3, H, W), batch by batch,
        in the place of those that the policy draws.

        Images are the same in every epoch and for every number of processes. Each process draws whole prompts, since a
        group-wise reward has to see all images of one.
        """
        policy, scorer, per_prompt, accelerator = self.policy, self.judges, self.per_prompt, self.accelerator
        rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
        first, end = rank * len(prompts) // world, (rank + 1) * len(prompts) // world
        mine, total, columns = prompts[first:end], len(prompts) * per_prompt, len(scorer.names)
        parts, pending, pictures = list[Tensor](), list[Any](), list[Tensor]()
        reported = find_reported(scorer.rewards, prompts, policy.world, per_prompt)
        stated = [name for one in reported for name in one.names]
        features_at = columns + 1 + len(stated)
        height, width = (side * policy.backbone.scale for side in policy.latent_shape[1:])
        kept = torch.zeros(min(keep, len(prompts)), 3, height, width)
        amount: dict[str, Any] = {"seed": seed, "per_prompt": per_prompt, "batch_size": self.batch_size}
        batches = generate(policy, mine, self.spec, snapshot=snapshot, **amount) if drawn is None else drawn
        with policy.uneven_forwards():
            for index, images in batches if mine else ():
                self.check()
                owners = [mine[int(i) // per_prompt] for i in index]
                pending.append(scorer.submit(images, owners))
                more = [one(images, owners) for one in reported]
                parts.append(torch.cat([saturation(images).cpu()[:, None], *more, self.features(images)], dim=1))
                if scorer.later:
                    pictures.append(images.cpu())
                _keep_firsts(kept, images, index + first * per_prompt, per_prompt)
                advance(len(images))
        here = slice(first * per_prompt, end * per_prompt)
        scored = [torch.cat([scores.result(), more], 1) for scores, more in zip(pending, parts, strict=True)]
        rows = torch.cat(scored) if scored else torch.zeros(0, columns)
        if parts or scorer.collective:  # a batch is complete when all processes come to it
            rows[:, :columns] = self._finished(rows[:, :columns], pictures, mine, here, total)
        known = {f"{name}_batch": figure for name, figure in scorer.figures.items() if figure == figure}
        values = _everyones(rows, here, total, accelerator)
        groups = torch.arange(total) // per_prompt
        distances = group_distances(values[:, features_at:], groups)
        for one in reported:
            known |= one.figures(mine, first, len(prompts), partial(together, accelerator=accelerator))
        kept = together(kept, accelerator) if len(kept) else kept
        parts_of = _stated(stated, values[:, columns + 1 : features_at])
        return Evaluated(values[:, :columns], distances, values[:, columns], known, kept, parts_of)

    def _finished(
        self, scores: Tensor, pictures: list[Tensor], mine: Sequence[Prompt], here: slice, total: int
    ) -> Tensor:
        """`scores` (n, K) of this process's images, at `here` of `total`, with those of rewards that are asked last."""
        group = torch.arange(len(mine)).repeat_interleave(self.per_prompt)
        everyone = partial(_gathered, here=here, total=total, accelerator=self.accelerator)
        owners = [mine[int(i)] for i in group]
        return self.judges.finish(scores, pictures, owners, group, lambda: self.policy.offloaded(), everyone)


def _stated(names: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """The columns of values (N, W) in which there is a number, by name."""
    columns = zip(names, values.unbind(1), strict=True)
    return {name: column for name, column in columns if not column.isnan().all()}


def _everyones(rows: Tensor, here: slice, total: int, accelerator: Accelerator | None) -> Tensor:
    """(total, columns): the rows of all processes, of which `rows` are this one's, at `here`."""
    if accelerator is not None and accelerator.num_processes > 1:  # without a prompt one does not know the width
        width = int(accelerator.gather(torch.tensor([rows.shape[1]], device=accelerator.device)).max())
        rows = rows if len(rows) else torch.zeros(0, width)
    return _gathered(rows, here, total, accelerator)[0]


def _gathered(rows: Tensor, here: slice, total: int, accelerator: Accelerator | None) -> tuple[Tensor, int]:
    """The rows (total, W) of all processes, of which `rows` are this one's, at `here`; and the place of its first."""
    values = torch.zeros(total, rows.shape[1])
    values[here] = rows
    return together(values, accelerator), here.start  # every image is one process's; NaN survives the sum


def _keep_firsts(kept: Tensor, images: Tensor, index: Tensor, per_prompt: int) -> None:
    """Put the first image of each of the first prompts into `kept`; `index`: the images' numbers among all."""
    for i, image in zip(index.tolist(), images, strict=True):
        if i % per_prompt == 0 and i // per_prompt < len(kept):
            kept[i // per_prompt] = image.cpu()


def together(values: Tensor, accelerator: Accelerator | None) -> Tensor:
    """The sum over processes, each of which has zeros where another one has the values."""
    if accelerator is None or accelerator.num_processes == 1:
        return values
    return accelerator.reduce(values.to(accelerator.device), reduction="sum").cpu()


def saturation(images: Tensor) -> Tensor:
    """(B,) mean saturation (the S of HSV) of images (B, 3, H, W) in [0, 1]; 0 is grey."""
    high, low = images.amax(1), images.amin(1)
    return ((high - low) / high.clamp_min(1e-6)).mean((1, 2))


def summarise(names: Sequence[str], scores: Tensor) -> dict[str, float | None]:
    """Mean of each reward over the images to which it applies; None where it applies to none."""
    means = scores.nanmean(dim=0).tolist()
    return {name: (None if mean != mean else mean) for name, mean in zip(names, means, strict=True)}
