"""Draws an image set: a model's pictures of prompts, scored by rewards; `diffrl draw-set`.

What a prompt gives is written at once, by the process that drew it, and put together in the prompts' order when all are
there: so a broken call goes on where it stopped, and the set is the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.drawing import Drawing
from diffrl.errors import UserError, foreign
from diffrl.image_sets.latents import FOLDER, Latents
from diffrl.image_sets.layouts import group_of
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.engine import join_processes
from diffrl.prompts import Prompt
from diffrl.records.disk import write_text
from diffrl.records.progress_bar import progress
from diffrl.records.tracking import save_image
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import generate
from diffrl.version import __version__

JOB, PARTS, ROWS = "job.json", "parts", "images.jsonl"


def draw_set(*, rewards: Mapping[str, Mapping[str, Any]], out: Path, **drawing: Any) -> int:
    """Write `out/images/*.png`, their latents and `out/images.jsonl`; returns how many pictures were drawn.

    Args:
        rewards: the parameters of each plugin by its name; none: pictures of the model, for SFT on a rule of one's own.
        drawing: the keys of `Drawing`.

    Raises:
        UserError: the folder holds a set of another job; RewardError; SamplingError; DiskError.
    """
    job, accelerator = Drawing(**drawing), join_processes()
    chosen, policy = job.chosen(), job.policy()
    # Scores of path/to/file.py:Class are called Class.
    entries = {
        name.rpartition(":")[2] if ".py" in name else name: Entry(name, given) for name, given in rewards.items()
    }
    scorer = Scorer(build_rewards(entries, policy.device))
    spec = job.spec(policy)
    if accelerator.is_main_process:
        how = {"steps": spec.steps, "sampler": spec.sampler, "guidance_scale": spec.guidance_scale}
        _prepare(out, _record(job, chosen, rewards) | how)
    accelerator.wait_for_everyone()  # the folder is looked at before anyone writes to it
    there = _rows(out)
    missing = [i for i in range(len(chosen)) if i not in there]
    accelerator.wait_for_everyone()
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = missing[rank * len(missing) // world : (rank + 1) * len(missing) // world]
    at_once, latents = max(job.batch_size // job.per_prompt, 1), Latents(policy, out / FOLDER)
    with progress("drawing", len(mine) * job.per_prompt) as advance:
        for start in range(0, len(mine), at_once):
            places = mine[start : start + at_once]
            prompts, drawn = [chosen[i] for i in places], list[Tensor]()

            def note(batch: Tensor, cond: Conditioning, names: Sequence[tuple[str, int]]) -> Tensor:
                drawn.append(batch)  # noqa: B023 (called inside of this round)
                return batch

            batches = generate(policy, prompts, spec, **job.amount(), revise=note)
            images = torch.cat([images for _, images in batches])
            groups = torch.arange(len(prompts)).repeat_interleave(job.per_prompt)
            scores = scorer.score(images, [prompts[int(i)] for i in groups], groups)
            parts = (tensor.split(job.per_prompt) for tensor in (images, scores, torch.cat(drawn)))
            for place, *one in zip(places, *parts, strict=True):
                _write(out, rank, place, chosen[place], job.seed, scorer.names, latents, *one)
            advance(len(images))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and (out / PARTS).is_dir():
        rows = _rows(out)
        write_text(out / ROWS, "".join(json.dumps(rows[i]) + "\n" for i in range(len(chosen))))
        shutil.rmtree(out / PARTS)
    return len(missing) * job.per_prompt


def _write(
    out: Path,
    rank: int,
    place: int,
    prompt: Prompt,
    seed: int,
    names: Sequence[str],
    latents: Latents,
    images: Tensor,
    scores: Tensor,
    drawn: Tensor,
) -> None:
    """A prompt's pictures (m, 3, H, W) and latents (m, C, h, w), and then its row with scores (m, K)."""
    files = [f"images/{place:05d}-{member:02d}.png" for member in range(len(images))]
    for member, (file, image) in enumerate(zip(files, images, strict=True)):
        save_image(image, out / file, {"prompt": prompt.text, "seed": str(seed), "member": str(member)})
    table = {name: [None if s != s else s for s in scores[:, k].tolist()] for k, name in enumerate(names)}
    row = {"images": files, "prompt": prompt.text, "scores": table, "metadata": dict(prompt.metadata)}
    group = group_of(row, out, ROWS)
    assert group is not None, "a row of this layout is a group"
    latents.keep(group, drawn)
    with (out / PARTS / f"{rank:04d}.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps({"place": place, **row}) + "\n")  # a kill may have left half a line before


def _record(job: Drawing, prompts: Sequence[Prompt], rewards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What decides the set, as JSON."""
    texts = json.dumps([[prompt.text, dict(prompt.metadata)] for prompt in prompts], sort_keys=True, default=str)
    keys = ("model", "family", "merge", "lora", "seed", "per_prompt", "shift", "resolution")
    return {
        "diffrl_version": __version__,
        **{key: getattr(job, key) for key in keys},
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "rewards": {name: dict(given) for name, given in rewards.items()},
    }


def _prepare(out: Path, record: Mapping[str, Any]) -> None:
    """Make the folder, or see that it is this job's."""
    wanted = json.loads(json.dumps(record, default=str))
    file = out / JOB
    if file.exists():
        with foreign(file):
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        if differing := [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]:
            raise UserError(
                f"--out: {out} holds a set that was drawn with another {', '.join(differing)}; name another"
            )
    elif (out / ROWS).exists():
        raise UserError(f"--out: {out} holds a set that draw-set has not drawn; name another folder")
    (out / "images").mkdir(parents=True, exist_ok=True)
    if not (out / ROWS).exists():
        (out / PARTS).mkdir(exist_ok=True)
    write_text(file, json.dumps(wanted, indent=1) + "\n")


def _rows(out: Path) -> dict[int, dict[str, Any]]:
    """The rows that are written, by their prompts' places; the end of a line that a kill cut off is none."""
    if (out / ROWS).exists():
        lines = (out / ROWS).read_text(encoding="utf-8").splitlines()
        return dict(enumerate(map(json.loads, lines)))
    rows: dict[int, dict[str, Any]] = {}
    for file in sorted((out / PARTS).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                rows[int(row.pop("place"))] = row
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
    return rows
