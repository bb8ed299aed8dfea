"""Sampling and scoring outside training: `diffrl sample`, `diffrl evaluate`, and the evaluation epochs of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from PIL import Image, ImageOps
from torch import Tensor

from diffrl.divgen.diversity import Features, default_features, group_distances, load_features
from diffrl.drawing import Drawing
from diffrl.pictures import grid
from diffrl.policy import Policy
from diffrl.policy.engine import join_processes
from diffrl.prompts import Prompt
from diffrl.records.disk import replacing, write_text
from diffrl.records.progress_bar import progress
from diffrl.records.tracking import save_image, slug
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.figures import Breakdowns, find_figures
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, generate
from diffrl.stats import standard_error
from diffrl.version import __version__

SHOWN = 64  # pictures of a grid, at most


class Evaluated(NamedTuple):
    """scores (N, K), NaN where a reward does not apply; distances (P,) inside the images of each prompt, (0,) where it
    has one image; saturation (N,) in [0, 1]; figures of the prompts' groups by their names (`diffrl.rewards.figures`),
    without those of which nothing could be said; pictures (S, 3, H, W) of the first prompts' first images, where they
    were asked for; parts (N,) by their names, `REWARD[PART]`, without those that no prompt states; NaN
    where a prompt does not.
    """

    scores: Tensor
    distances: Tensor
    saturation: Tensor
    figures: Mapping[str, float] = {}  # nobody writes into it
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


def score_policy(
    policy: Policy,
    scorer: Scorer,
    features: Features,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    seed: int,
    per_prompt: int,
    batch_size: int,
    accelerator: Accelerator | None = None,
    snapshot: str | None = "default",
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda count: None,
    keep: int = 0,
    drawn: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> Evaluated:
    """`per_prompt` images of each prompt, N in prompt-major order, with their scores, and `keep` pictures.

    `drawn`: their numbers (B,) and images (B, 3, H, W), batch by batch, in the place of those that the policy draws.

    Images are drawn from the evaluation's own seeds, the same in every epoch and for every number of processes. Each
    process draws whole prompts, since a group-wise reward has to see all images of one.
    """
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    first, end = rank * len(prompts) // world, (rank + 1) * len(prompts) // world
    mine, total, columns = prompts[first:end], len(prompts) * per_prompt, len(scorer.names)
    parts: list[Tensor] = []
    pictures: list[Tensor] = []
    figures = find_figures(scorer.rewards, prompts) if per_prompt > 1 else []
    broken_down = Breakdowns(scorer.rewards)
    features_at = columns + 1 + len(broken_down.names)
    sides = [side * policy.backbone.scale for side in policy.latent_shape[1:]]
    kept = torch.zeros(min(keep, len(prompts)), 3, *sides)
    amount: dict[str, Any] = {"seed": seed, "per_prompt": per_prompt, "batch_size": batch_size, "snapshot": snapshot}
    batches = generate(policy, mine, spec, **amount) if drawn is None else drawn
    with policy.together():
        for index, images in batches if mine else ():
            check()  # may raise, to break off between batches
            owners = [mine[int(i) // per_prompt] for i in index]
            scores = scorer.submit(images, owners).result()
            more = [saturation(images).cpu()[:, None], broken_down(images, owners), features(images)]
            parts.append(torch.cat([scores, *more], dim=1))
            if scorer.later:
                pictures.append(images.cpu())
            for one in figures:
                one.read(images, owners)
            _keep_firsts(kept, images, index + first * per_prompt, per_prompt)
            advance(len(images))
    here = slice(first * per_prompt, end * per_prompt)
    rows = torch.cat(parts) if parts else torch.zeros(0, columns)
    if parts or scorer.batchwise:  # a batch is complete when all processes come to it
        group = torch.arange(len(mine)).repeat_interleave(per_prompt)
        everyone = partial(_gathered, here=here, total=total, accelerator=accelerator)
        owners = [mine[int(i)] for i in group]
        rows[:, :columns] = scorer.finish(rows[:, :columns], pictures, owners, group, lambda: policy.apart(), everyone)
    known = {f"{name}_batch": figure for name, figure in scorer.figures.items() if figure == figure}
    values = _everyones(rows, here, total, accelerator)
    groups = torch.arange(total) // per_prompt
    distances = group_distances(values[:, features_at:], groups)
    for one in figures:
        known |= one.figures(_together(one.sums(mine, first, len(prompts)), accelerator))
    kept = _together(kept, accelerator) if len(kept) else kept
    by_part = zip(broken_down.names, values[:, columns + 1 : features_at].unbind(1), strict=True)
    stated = {name: column for name, column in by_part if not column.isnan().all()}
    return Evaluated(values[:, :columns], distances, values[:, columns], known, kept, stated)


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
    return _together(values, accelerator), here.start  # every image is one process's; NaN survives the sum


def _keep_firsts(kept: Tensor, images: Tensor, index: Tensor, per_prompt: int) -> None:
    """Put the first image of each of the first prompts into `kept`; `index`: the images' numbers among all."""
    for i, image in zip(index.tolist(), images, strict=True):
        if i % per_prompt == 0 and i // per_prompt < len(kept):
            kept[i // per_prompt] = image.cpu()


def _together(values: Tensor, accelerator: Accelerator | None) -> Tensor:
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


def sample(
    *, out: Path, rewards: Mapping[str, Mapping[str, Any] | Entry] | None = None, **drawing: Any
) -> dict[str, Any]:
    """Write a `Drawing`'s images as PNG (prompt and seed in the file) and `images.jsonl` to the folder `out`, and the
    first `SHOWN` of them with their prompts as one picture, `grid.png`. Returns how they were drawn.

    `rewards`: as in `evaluate`; each line of `images.jsonl` then has its image's `scores`.
    """
    job = Drawing(**drawing)
    scorer = _scorer(rewards or {})
    chosen, policy = job.chosen(), job.policy()
    spec = job.spec(policy)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pictures: list[Image.Image] = []
    parts: list[Tensor] = []
    kept: list[Tensor] = []
    with progress("drawing", len(chosen) * job.per_prompt) as advance:
        for index, images in generate(policy, chosen, spec, **job.amount()):
            owners = [chosen[i // job.per_prompt] for i in index.tolist()]
            parts.append(scorer.submit(images, owners).result())
            if scorer.later:
                kept.append(images.cpu())
            for i, prompt, image in zip(index.tolist(), owners, images, strict=True):
                member = i % job.per_prompt
                name = f"{i // job.per_prompt:05d}-{member:02d}-{slug(prompt.text)}.png"
                save_image(image, out / name, {"prompt": prompt.text, "seed": str(job.seed), "member": str(member)})
                rows.append({"file": name, "prompt": prompt.text, "member": member, "seed": job.seed})
                if len(pictures) < SHOWN:
                    with Image.open(out / name) as picture:
                        pictures.append(
                            ImageOps.contain(picture, (256, 256)) if max(picture.size) > 256 else picture.copy()
                        )
            advance(len(images))
    if scorer.names:
        groups = torch.arange(len(chosen)).repeat_interleave(job.per_prompt)
        owners = [chosen[int(i)] for i in groups]
        scores = scorer.finish(torch.cat(parts), kept, owners, groups, lambda: policy.apart())
        for row, values in zip(rows, scores.tolist(), strict=True):
            row["scores"] = {name: _known(value) for name, value in zip(scorer.names, values, strict=True)}
    write_text(out / "images.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    with replacing(out / "grid.png") as temporary:
        captions = [row["prompt"] for row in rows[: len(pictures)]]
        grid(pictures, captions, job.per_prompt if job.per_prompt > 1 else 0).save(temporary, format="png")
    return asdict(job) | {"sampler": spec.sampler, "steps": spec.steps}


def _known(score: float) -> float | None:
    """None for NaN: the reward does not apply."""
    return None if score != score else round(score, 6)


def _entries(rewards: Mapping[str, Mapping[str, Any] | Entry]) -> dict[str, Entry]:
    return {name: given if isinstance(given, Entry) else Entry(name, given) for name, given in rewards.items()}


def _scorer(rewards: Mapping[str, Mapping[str, Any] | Entry]) -> Scorer:
    return Scorer(build_rewards(_entries(rewards), join_processes().device))


class Scores(dict[str, Any]):
    """What `evaluate` returns; its text is a small table of the means."""

    def __str__(self) -> str:
        rows = []
        for name, mean in self["mean"].items():
            error = self["standard_error"][name]
            text = "applies to none of the prompts" if mean is None else f"{mean:.4f}"
            rows.append(f"{name:<24}{text}" + ("" if mean is None or error is None else f" +- {error:.4f}"))
        return "\n".join([*rows, f"{'diversity':<24}{self['diversity']:.4f}"])

    __repr__ = __str__


def evaluate(
    *,
    rewards: Mapping[str, Mapping[str, Any] | Entry],
    out: Path | None = None,
    policy: Policy | None = None,
    **drawing: Any,
) -> Scores:
    """Score a `Drawing`; returns, and writes if asked, means, standard errors, diversity and every image's scores.

    Args:
        rewards: the parameters of each plugin by its name (or `path/to/file.py:Class`), or its `Entry`.
        out: the JSON file.
        policy: the model of the drawing, where it is loaded already.
        drawing: the keys of `Drawing`.
    """
    started = time.perf_counter()
    job = Drawing(**drawing)
    scorer = _scorer(rewards)
    chosen, policy = job.chosen(), policy or job.policy()
    spec = job.spec(policy)
    features = load_features(default_features(job.model), policy.device)
    with progress("drawing and scoring", len(chosen) * job.per_prompt) as advance:
        found = score_policy(policy, scorer, features, chosen, spec, **job.amount(), advance=advance)
    scores = found.scores
    # Images of one prompt are not independent: the error is over prompts.
    by_prompt = scores.view(len(chosen), job.per_prompt, -1).nanmean(dim=1)
    error = [standard_error(column) for column in by_prompt.T]
    result = Scores()
    result |= {
        "diffrl_version": __version__,
        **asdict(job),
        "prompts": job.prompts if isinstance(job.prompts, str) else [prompt.text for prompt in chosen],
        "rewards": {name: dict(entry.arguments) for name, entry in _entries(rewards).items()},
        "prompts_count": len(chosen),
        "sampler": spec.sampler,
        "steps": spec.steps,
        "seconds": round(time.perf_counter() - started, 2),
        "mean": summarise(scorer.names, scores),
        "standard_error": dict(zip(scorer.names, error, strict=True)),
        **found.breadth(),
        "parts": {name: float(column.nanmean()) for name, column in found.parts.items()},
        "scores": {name: [_known(score) for score in scores[:, k].tolist()] for k, name in enumerate(scorer.names)},
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=1) + "\n")
    return result
