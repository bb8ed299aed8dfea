"""`diffrl rewards score`: rewards' scores of pictures that exist, of any tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffrl.divgen.folders import HOW, read_folder
from diffrl.divgen.observe import Batch, Item, Sight, in_batches
from diffrl.errors import UserError
from diffrl.image_sets.reading import SCORED
from diffrl.plugins import short_name
from diffrl.prompts import Prompt
from diffrl.records.disk import write_text
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl.stats import interval, known
from diffrl.tools.progress_bar import progress

AT_ONCE = 32  # pictures in one call, but for rewards that compare a prompt's


def score_folder(
    folder: Path, rewards: Mapping[str, Mapping[str, Any]], out: Path | None = None, prompts_from: str = ""
) -> list[str]:
    """Writes a row for each picture to `out` (None: `folder`/rewards.jsonl), `{"file", "prompt", "member", "seed",
    "scores": {NAME: number or null}}`, which divgen, image sets and audits read; returns lines that say what was found.

    Args:
        rewards: the parameters of each plugin by its name.
        prompts_from: as in `diffrl.divgen.folders.read_folder`.

    Raises:
        UserError: no prompt is known, a reward is not there or compares a whole batch. RewardError.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    entries = {short_name(plugin): Entry(plugin, given) for plugin, given in rewards.items()}
    scorer = Scorer(build_rewards(entries, device))  # first: what is not there is known before a picture is read
    if scorer.collective:
        raise UserError(f'--rewards: "{scorer.collective[0]}" compares a whole batch; name one that scores images')
    found = read_folder(folder, prompts_from=prompts_from)
    items = [item for item in found.items if item.known]
    if not items:
        raise UserError(f"{folder}: no prompt is known: {HOW}")
    sight, rows = Sight(), list[dict[str, Any]]()
    root = found.root if out is None else out.parent
    with progress("scoring", len(items)) as advance:
        for part, images in _batches(items, sight, bool(scorer.groupwise)):
            prompts = [Prompt(item.prompt.text, _plain(item)) for item in part]
            groups = torch.zeros(len(part), dtype=torch.int64) if scorer.groupwise else None
            scores = scorer.score(images, prompts, groups)
            named = [dict(zip(scorer.names, one, strict=True)) for one in scores.tolist()]
            rows += [_row(item, root, one) for item, one in zip(part, named, strict=True)]
            advance(len(part))
    scorer.close()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(out or found.root / SCORED, lines)
    unread = [f"cannot be read: {item.path}: {why}" for item, why in sight.unreadable]
    return [found.line(), *_told(rows, scorer.names), *unread]


def _batches(items: Sequence[Item], sight: Sight, whole: bool) -> Iterator[Batch]:
    """Pictures of one size together, of one prompt alone and all where rewards compare them."""
    if not whole:
        yield from in_batches(items, AT_ONCE, sight)
        return
    for text in dict.fromkeys(item.prompt.text for item in items):
        group = [item for item in items if item.prompt.text == text]
        parts = list(in_batches(group, len(group), sight))
        if len(parts) > 1:
            raise UserError(f'--rewards: the pictures of "{text}" have several sizes, and are to be compared')
        yield from parts


def _plain(item: Item) -> dict[str, Any]:
    """The prompt's metadata without earlier scores."""
    return {key: value for key, value in item.prompt.metadata.items() if key != "scores"}


def _row(item: Item, root: Path, scores: Mapping[str, float]) -> dict[str, Any]:
    path = item.file.resolve()
    inside = path.is_relative_to(root.resolve())
    file = str(path.relative_to(root.resolve()) if inside else path)
    row: dict[str, Any] = {**_plain(item), "file": file, "prompt": item.prompt.text, "member": item.member}
    row |= {} if item.seed is None else {"seed": item.seed}
    return row | {"scores": {name: None if one != one else round(one, 6) for name, one in scores.items()}}


def _told(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Means with intervals over prompts: images of one prompt are not independent."""
    lines = []
    for name in names:
        prompts: dict[str, list[float]] = {}
        for row in rows:
            if (score := row["scores"][name]) is not None:
                prompts.setdefault(row["prompt"], []).append(score)
        means = known([sum(values) / len(values) for values in prompts.values()])
        count = sum(map(len, prompts.values()))
        if not count:
            lines.append(f"{name:<24}applies to none of the pictures")
            continue
        mean, half = interval(means)
        ends = "" if half is None else f" +- {half:.4f}"
        lines.append(f"{name:<24}{mean:.4f}{ends}  {count} pictures of {len(means)} prompts")
    return lines
