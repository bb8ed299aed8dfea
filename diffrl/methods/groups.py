"""Groups of a run's training images on the disk, with their scores: for the live page, for people's votes.

FOLDER/epoch-NNNN/GROUP-MM.png     the images; GROUP: a digest of prompt and pixels: a name has one image
FOLDER/epoch-NNNN/groups.json      {"epoch", "groups": [{"group", "prompt", "images", "scores"}], ...}
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.records.disk import inside, write_text

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, INDEX = "groups", "groups.json"  # of those that `tracking.groups` keeps
EPOCH = re.compile(r"epoch-(\d{4,9})")
PICTURE = re.compile(r"[0-9a-f]{12}-\d{2,6}\.png")
_LARGEST = 2**26  # bytes of an index that is read


@dataclass(frozen=True)
class ImageGroup:
    """m images (m, 3, H, W) uint8 of one prompt, with m scores by each reward's name, None where it does not apply."""

    prompt: str
    images: Tensor
    scores: Mapping[str, Sequence[float | None]]

    @property
    def identity(self) -> str:
        pixels = self.images.contiguous().numpy()
        text = f"{self.prompt}\0{pixels.shape}\0".encode()
        return hashlib.sha256(text + pixels.tobytes()).hexdigest()[:12]

    @property
    def files(self) -> list[str]:
        return [f"{self.identity}-{member:02d}.png" for member in range(len(self.images))]


@dataclass(frozen=True)
class Listed:
    """A group as its index has it. `images`: names in `folder`."""

    identity: str
    epoch: int
    prompt: str
    images: tuple[str, ...]
    scores: Mapping[str, tuple[float | None, ...]]
    folder: Path


def write_groups(run_dir: Path, folder: str, epoch: int, groups: Sequence[ImageGroup], **facts: Any) -> Path:
    """Write the groups, and then their index with `facts`; returns the epoch's folder. Raises DiskError."""
    from diffrl.records.tracking import save_image

    path = inside(run_dir, folder, f"epoch-{epoch:04d}")
    rows = []
    for group in groups:
        for file, image in zip(group.files, group.images, strict=True):
            if not (path / file).exists():
                save_image(image.float() / 255, path / file, {"prompt": group.prompt})
        scores = {name: list(column) for name, column in group.scores.items()}
        rows.append({"group": group.identity, "prompt": group.prompt, "images": group.files, "scores": scores})
    write_text(path / INDEX, json.dumps({"epoch": epoch, "groups": rows, **facts}, allow_nan=False) + "\n")
    return path


def keep_newest(run_dir: Path, epoch: int) -> None:
    """Remove the kept groups of all epochs but this one."""
    for number, path in epochs_of(run_dir, FOLDER):
        if number != epoch:
            shutil.rmtree(path, ignore_errors=True)


def epochs_of(run_dir: Path, folder: str) -> list[tuple[int, Path]]:
    """(epoch, its folder), the newest first; a link is none."""
    try:
        paths = list((run_dir / folder).iterdir())
    except OSError:
        return []
    found = [(int(match[1]), path) for path in paths if (match := EPOCH.fullmatch(path.name)) and not path.is_symlink()]
    return sorted(found, reverse=True)


def read_json(path: Path) -> dict[str, Any]:
    """An object; empty where there is none that can be read: another machine may be writing it."""
    try:
        if path.stat().st_size > _LARGEST:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_groups(path: Path) -> list[Listed]:
    """The groups of an epoch's folder; what is not as `write_groups` writes it is left out."""
    index = read_json(path / INDEX)
    rows = index.get("groups")
    return list(_listed(rows, path)) if isinstance(rows, list) else []


def _listed(rows: Sequence[Any], path: Path) -> Iterator[Listed]:
    epoch = int(EPOCH.fullmatch(path.name)[1]) if EPOCH.fullmatch(path.name) else 0  # type: ignore[index]
    for row in rows:
        try:
            images = tuple(str(name) for name in row["images"])
            scores = {str(name): tuple(map(_score, column)) for name, column in row["scores"].items()}
            fine = images and all(PICTURE.fullmatch(name) for name in images)
            if fine and all(len(column) == len(images) for column in scores.values()):
                yield Listed(str(row["group"]), epoch, str(row["prompt"]), images, scores, path)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue


def _score(value: Any) -> float | None:
    return None if value is None else float(value)
