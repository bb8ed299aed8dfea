"""Draws an image set: a model's pictures of prompts, scored by rewards; `diffrl draw-set`.

What a prompt gives is written at once, by the process that drew it, and put together in the prompts' order when all are
there: so a broken call goes on where it stopped, and the set is the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.drawing import Drawing, scorer_for
from diffrl.errors import UserError
from diffrl.image_sets.latents import FOLDER, Latents
from diffrl.image_sets.layouts import group_of
from diffrl.launched import join_processes
from diffrl.plugins import short_name
from diffrl.policy.conditioning import Conditioning
from diffrl.prompts import Prompt
from diffrl.records.tracking import save_image
from diffrl.rewards.building import Entry
from diffrl.rollout import generate
from diffrl.tools.progress_bar import progress
from diffrl.tools.sharded_jsonl import ShardedJsonl
from diffrl.version import __version__

ROWS = "images.jsonl"


def draw_set(*, rewards: Mapping[str, Mapping[str, Any]], out: Path, **drawing: Any) -> int:
    """Write `out/images/*.png`, their latents and `out/images.jsonl`; returns how many pictures were drawn.

    Args:
        rewards: the parameters of each plugin by its name; none: pictures of the model, for SFT on a rule of one's own.
        drawing: the keys of `Drawing`.

    Raises:
        UserError: the folder holds a set of another job; RewardError; SamplingError; DiskError.
    """
    job, accelerator = Drawing(**drawing), join_processes()
    # Scores of path/to/file.py:Class are called Class.
    entries = {short_name(name): Entry(name, given) for name, given in rewards.items()}
    scorer = scorer_for(job.model, entries, accelerator.device)
    chosen, policy = job.chosen(), job.policy()
    for name in scorer.collective:
        raise UserError(f'--rewards: "{name}" compares {scorer.asked[name].compares}; a set needs scores of its own')
    job = job.settled(policy.backbone)
    pieces = ShardedJsonl(out, ROWS, "set")
    if accelerator.is_main_process:
        pieces.claim(_record(job, chosen, rewards))
        (out / "images").mkdir(exist_ok=True)
    accelerator.wait_for_everyone()  # the folder is looked at before anyone writes to it
    mine, left = pieces.share(len(chosen), accelerator)
    at_once, latents = max(job.batch_size // job.per_prompt, 1), Latents(policy, out / FOLDER)
    with progress("drawing", len(mine) * job.per_prompt) as advance:
        for start in range(0, len(mine), at_once):
            places = mine[start : start + at_once]
            prompts, drawn = [chosen[i] for i in places], list[Tensor]()

            def note(batch: Tensor, cond: Conditioning, names: Sequence[tuple[str, int]]) -> Tensor:
                drawn.append(batch)  # noqa: B023 (called inside of this round)
                return batch

            batches = generate(policy, prompts, job.spec(policy), **job.amount(), revise=note)
            images = torch.cat([images for _, images in batches])
            groups = torch.arange(len(prompts)).repeat_interleave(job.per_prompt)
            scores = scorer.score(images, [prompts[int(i)] for i in groups], groups)
            parts = (tensor.split(job.per_prompt) for tensor in (images, scores, torch.cat(drawn)))
            for place, *one in zip(places, *parts, strict=True):
                pieces.add(
                    accelerator.process_index,
                    place,
                    _row(out, place, chosen[place], job.seed, scorer.names, latents, *one),
                )
            advance(len(images))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        pieces.gather(len(chosen))
    return left * job.per_prompt


def _row(
    out: Path,
    place: int,
    prompt: Prompt,
    seed: int,
    names: Sequence[str],
    latents: Latents,
    images: Tensor,
    scores: Tensor,
    drawn: Tensor,
) -> dict[str, Any]:
    """Write a prompt's pictures (m, 3, H, W) and latents (m, C, h, w); its row with scores (m, K)."""
    files = [f"images/{place:05d}-{member:02d}.png" for member in range(len(images))]
    for member, (file, image) in enumerate(zip(files, images, strict=True)):
        save_image(image, out / file, {"prompt": prompt.text, "seed": str(seed), "member": str(member)})
    table = {name: [None if s != s else s for s in scores[:, k].tolist()] for k, name in enumerate(names)}
    row = {"images": files, "prompt": prompt.text, "scores": table, "metadata": dict(prompt.metadata)}
    group = group_of(row, out, ROWS)
    assert group is not None, "a row of this layout is a group"
    latents.keep(group, drawn)
    return row


def _record(job: Drawing, prompts: Sequence[Prompt], rewards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What decides the set, as JSON."""
    texts = json.dumps([[prompt.text, dict(prompt.metadata)] for prompt in prompts], sort_keys=True, default=str)
    beside = ("prompts", "limit", "batch_size", "like")
    return {
        "diffrl_version": __version__,
        **{key: value for key, value in vars(job).items() if key not in beside},
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "rewards": {name: dict(given) for name, given in rewards.items()},
    }
