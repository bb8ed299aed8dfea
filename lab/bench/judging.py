"""From pictures to answers on the disk: resumable, each process its share, a file for each judge and process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from diffrl.divgen.observe import Item as Picture
from diffrl.divgen.observe import Sight, in_batches
from diffrl.errors import UserError, in_one_line
from diffrl.prompts import Prompt
from diffrl.records.disk import append_line, writing
from diffrl.rewards.answers import applies
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward, RewardError
from diffrl.rewards.scoring import Scorer
from diffrl.tools.progress_bar import progress

from .items import Answers, Item

FOLDER = "answers"
AT_ONCE = 16  # pictures that a judge sees in one call, at most


@dataclass(frozen=True)
class Shot:
    """One image of a prompt."""

    item: Item
    path: Path


def judge_all(judge: str, reward: Reward, shots: Sequence[Shot], folder: Path, rank: int, world: int) -> None:
    """Ask the judge about every `world`-th of the shots, and append to `folder`/answers; a line is one image.

    Raises `RewardError` for answers that cannot be used, and UserError for pictures that cannot be read; those before
    stay.
    """
    if what := kind_of(reward).compares:
        raise UserError(f"--judge: {judge} compares {what}; a benchmark needs scores of single images")
    left: dict[Path | None, Shot] = {shot.path: shot for shot in shots[rank::world]}
    pictures, sight = [Picture(Prompt(shot.item.text), path=shot.path) for shot in left.values()], Sight()
    path = folder / FOLDER / f"{judge}-{rank}.jsonl"
    with writing(path), progress(f"judging by {judge}", len(left)) as advance:
        path.parent.mkdir(parents=True, exist_ok=True)
        for batch, images in in_batches(pictures, AT_ONCE, sight):
            part = [left[picture.path] for picture in batch]
            rows = zip(part, _answers(judge, reward, images, part), strict=True)
            lines = [json.dumps({"file": shot.path.name, "answers": answers}) for shot, answers in rows]
            append_line(path, "\n".join(lines))
            advance(len(part))
    for picture, reason in sight.unreadable:
        raise UserError(f"{picture.path}: not a readable picture ({reason}); delete it, and it is drawn again")


def read_answers(folder: Path, judge: str) -> dict[str, list[float]]:
    """{file's name: answers} of all processes, also of earlier calls; a torn line counts as none."""
    known: dict[str, list[float]] = {}
    for path in sorted((folder / FOLDER).glob(f"{judge}-[0-9]*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
                known[str(entry["file"])] = [float(value) for value in entry["answers"]]
            except (ValueError, KeyError, TypeError):
                continue
    return known


def _answers(judge: str, reward: Reward, images: Tensor, shots: Sequence[Shot]) -> list[list[float]]:
    """The answers about each picture, checked."""
    prompts = [Prompt(shot.item.text, shot.item.metadata) for shot in shots]
    if all(shot.item.owes(judge) == 1 for shot in shots):
        return [[value] for value in _scores(judge, reward, images, prompts)]
    several: Any = getattr(reward, "answers", None)
    if several is None:
        text = "a judge of several questions needs a method answers(images, prompts, metadata) -> lists of numbers"
        raise UserError(f"--judge: {judge}: {text}")
    try:
        found = several(images, [p.text for p in prompts], [dict(p.metadata) for p in prompts])
        lists = [[float(value) for value in values] for values in found]
    except (RewardError, UserError):
        raise
    except Exception as error:
        raise RewardError(f'"{judge}" failed on the prompt "{prompts[0].text}" with {in_one_line(error)}') from error
    for shot, values in zip(shots, lists, strict=True):
        if len(values) != shot.item.owes(judge) or not all(np.isfinite(values)):
            text = f"{shot.item.owes(judge)} finite numbers, got {str(values)[:80]}"
            raise RewardError(f'"{judge}" answered the prompt "{shot.item.text}" with other than {text}')
    return lists


def _scores(judge: str, reward: Reward, images: Tensor, prompts: Sequence[Prompt]) -> list[float]:
    for prompt in prompts:
        if not applies(reward, prompt.text, prompt.metadata):
            raise RewardError(f'"{judge}" does not judge the prompt "{prompt.text}"')
    scores = Scorer({judge: reward}).score(images, prompts)[:, 0].double()
    for prompt, score in zip(prompts, scores, strict=True):  # a benchmark's figure is one of all its pictures
        if not score.isfinite():
            raise RewardError(f'"{judge}" answered the prompt "{prompt.text}" with other than 1 finite number')
    return scores.tolist()


def answers_of(shots: Sequence[Shot], known: Mapping[str, Mapping[str, list[float]]]) -> Answers:
    """The answers about one prompt's images, by judge."""
    asked = filter(shots[0].item.owes, known)
    return {judge: [known[judge][shot.path.name] for shot in shots] for judge in asked}
