"""The layouts of an image set's rows, each brought to one form: a prompt, its pictures, and their numbers by a name.

| layout | keys of a row |
| --- | --- |
| a picture | `image` or `file`, `prompt`, `scores: {NAME: number}`; rows of one prompt are one group |
| a group | `images: [...]`, `prompt`, `scores: {NAME: [...]}`; there may be `latents`: a .npy file of (m, C, h, w) |
| Pick-a-Pic | `caption`, `jpg_0`, `jpg_1`, `label_0`, `label_1`; rows with `has_label` false are left out |
| HPD v2 | `prompt`, `file_path` or `image_path: [...]`, `human_preference: [...]` or `rank: [...]`, 1 being the best |

A preference is a score called "preference": 1 for what was preferred, 0 for the other, equal numbers for a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, nearest

PREFERENCE = "preference"
Scores = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Picture:
    """Where a picture is: a file, or the cell of a parquet file's row (from 0) and column."""

    file: str
    row: int = -1
    column: str = ""

    def __str__(self) -> str:
        return self.file if self.row < 0 else f"{self.file}, row {self.row + 1}, {self.column}"


@dataclass(frozen=True, slots=True)
class Group:
    """m pictures of one prompt with m numbers under each name, NaN where there is none. `where`: its row."""

    prompt: str
    pictures: tuple[Picture, ...]
    scores: Scores
    where: str
    latents: str = ""  # a .npy file of (m, C, h, w), if there is one
    metadata: Mapping[str, Any] = field(default_factory=dict)


def group_of(row: Mapping[str, Any], folder: Path, where: str) -> Group | None:
    """The group of a row, whose pictures are names of files in `folder` or `Picture`s; None for one without a label.

    Raises UserError, beginning with `where`.
    """
    if "jpg_0" in row or "jpg_1" in row:
        if row.get("has_label") is False:
            return None
        both, labels = [row.get("jpg_0"), row.get("jpg_1")], [row.get("label_0"), row.get("label_1")]
        return _made(row, "caption", both, {PREFERENCE: labels}, folder, where)
    for key in ("human_preference", "rank"):
        if key in row:
            values = row["file_path"] if "file_path" in row else row.get("image_path")
            scores = [-place for place in _numbers(row[key], where, key)] if key == "rank" else row[key]
            return _made(row, "prompt", values, {PREFERENCE: scores}, folder, where)
    if "images" in row:
        return _made(row, "prompt", row["images"], row.get("scores"), folder, where)
    if single_of(row):
        scores = row.get("scores", {} if "file" in row else None)  # a manifest has none, or some
        single = {name: [value] for name, value in scores.items()} if isinstance(scores, Mapping) else scores
        return _made(row, "prompt", [row[single_of(row)]], single, folder, where)
    hint = nearest("image", row) if row else ""
    raise UserError(f'{where}: no picture: expected "image", "images", Pick-a-Pic\'s or HPD\'s keys{hint}')


def single_of(row: Mapping[str, Any]) -> str:
    """The key of the row's one picture; "" for another layout."""
    return "image" if "image" in row else "file" if "file" in row and "images" not in row else ""


def _made(row: Mapping[str, Any], key: str, values: Any, scores: Any, folder: Path, where: str) -> Group:
    prompt = row.get(key)
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f'{where}: expected text under "{key}"{"" if key in row else nearest(key, row)}')
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise UserError(f"{where}: expected a list of pictures")
    if not isinstance(scores, Mapping):
        raise UserError(f'{where}: expected numbers by name under "scores", such as {{"clip": 0.3}}')
    pictures = tuple(_picture(value, folder, where) for value in values)
    numbers = {str(name): _numbers(given, where, f"scores.{name}") for name, given in scores.items()}
    for name, given in numbers.items():
        if len(given) != len(pictures):
            raise UserError(f'{where}: {len(given)} scores "{name}" of {len(pictures)} pictures')
    latents, metadata = row.get("latents") or "", row.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise UserError(f'{where}: expected an object under "metadata"')
    if latents and not (folder / str(latents)).is_file():
        raise UserError(f'{where}: no file "{latents}" of latents in {folder}')
    given_latents = str(folder / str(latents)) if latents else ""
    return Group(prompt.strip(), pictures, numbers, where, given_latents, dict(metadata))


def _picture(value: Any, folder: Path, where: str) -> Picture:
    if isinstance(value, Picture):
        return value
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: a picture is the name of a file, not a {type(value).__name__}")
    path = folder / value
    try:
        there = path.is_file()
    except (OSError, ValueError):  # too long for a name, or a NUL
        there = False
    if not there:
        raise UserError(f'{where}: no picture "{value}" in {folder}')
    return Picture(str(path))


def _numbers(values: Any, where: str, name: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UserError(f"{where}: {name}: expected a list of numbers, got a {type(values).__name__}")
    numbers = []
    for value in values:
        if value is not None and not isinstance(value, int | float):
            raise UserError(f"{where}: {name}: expected numbers, or null where there is none, got {value!r}")
        number = math.nan if value is None else float(value)
        if value is not None and not math.isfinite(number):
            raise UserError(f"{where}: {name}: {value} is not a score; write null where there is none")
        numbers.append(number)
    return tuple(numbers)
