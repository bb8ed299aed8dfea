"""Looking at images in a stream, so that memory holds features only; and reading them from a folder.

A folder is read by its manifest (JSON lines with "file", "prompt", "member" and the prompt's metadata), or by its
sub-folders: DIMENSION/KEYWORD/..., in any depth. Where the first is none of id, style, layout and tonal, the images
have no dimension and count in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffrl.divgen.extractors import Extractor, Found
from diffrl.divgen.metrics import tone_of
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.errors import UserError, in_one_line
from diffrl.pictures import MOST_PIXELS, SUFFIXES, to_rgb
from diffrl.prompts import Prompt

MANIFEST = "manifest.jsonl"
MANIFESTS = (MANIFEST, "images.jsonl")  # the second is what `diffrl sample` writes
DIMENSION_OF = {"identity": "id", "style": "style", "layout": "layout", "tones": "tonal"}
_PER_GROUP = 16  # images of one prompt that wait for their pairwise distances, at most

Batch = tuple[list["Item"], Tensor]


@dataclass(frozen=True)
class Item:
    """One image to look at. `prompt.text` names the group; `path` is None for an image that was never written."""

    prompt: Prompt
    member: int = 0
    path: Path | None = None

    @property
    def dimension(self) -> str:
        """One of `DIMENSIONS`, or "" where nobody said."""
        return str(self.prompt.metadata.get("dimension", ""))

    @property
    def keyword(self) -> str:
        return str(self.prompt.metadata.get("keyword", ""))


@dataclass(frozen=True)
class Seen:
    """One image, looked at: by kind of extractor (and "tones") what it found, None where nothing."""

    item: Item
    values: dict[str, Found]


@dataclass
class Sight:
    """All images, looked at; `distances`: mean LPIPS of a prompt's images; `unreadable`: file and reason."""

    seen: list[Seen] = field(default_factory=list)
    distances: dict[str, float] = field(default_factory=dict)
    unreadable: list[tuple[Item, str]] = field(default_factory=list)

    def __add__(self, other: Sight) -> Sight:
        distances = {**self.distances, **other.distances}
        return Sight(self.seen + other.seen, distances, self.unreadable + other.unreadable)


def observe(
    batches: Iterable[Batch],
    extractors: Mapping[str, Extractor],
    advance: Callable[[int], None] = lambda count: None,
) -> Sight:
    """Look at every batch with the extractors that its images' dimension asks for; no image is kept.

    batches: items with images (B, 3, H, W) float in [0, 1]; the images of one prompt have to follow one another for
    LPIPS to see them together. `advance` is told how many images are done.
    """
    sight = Sight()
    waiting: list[Tensor] = []
    last: Item | None = None

    def compare() -> None:
        if last is not None and len(waiting) > 1 and len({x.shape for x in waiting}) == 1:
            distances: Any = extractors["lpips"](torch.stack(waiting), [last.prompt])
            sight.distances[last.prompt.text] = float(np.mean(distances))
        waiting.clear()

    for items, images in batches:
        values = _look(items, images, extractors)
        sight.seen += [Seen(item, value) for item, value in zip(items, values, strict=True)]
        if "lpips" in extractors:
            for item, image in zip(items, images, strict=True):
                if last is None or item.prompt.text != last.prompt.text:
                    compare()
                last = item
                if len(waiting) < _PER_GROUP:
                    waiting.append(image.cpu().clone())
        advance(len(items))
    compare()
    return sight


def _look(items: Sequence[Item], images: Tensor, extractors: Mapping[str, Extractor]) -> list[dict[str, Found]]:
    values: list[dict[str, Found]] = [{} for _ in items]
    for kind in ("identity", "style", "layout", "features", "tones"):
        if kind != "tones" and kind not in extractors:
            continue
        chosen = [i for i, item in enumerate(items) if item.dimension in ("", DIMENSION_OF.get(kind, item.dimension))]
        if not chosen:
            continue
        part = images if len(chosen) == len(items) else images[chosen]
        features: Sequence[Found]
        if kind == "tones":
            features = list(tone_of(part.cpu().numpy()))
        else:
            features = extractors[kind](part, [items[i].prompt for i in chosen])
        for i, value in zip(chosen, features, strict=True):
            values[i][kind] = value
    return values


def in_batches(items: Sequence[Item], size: int, sight: Sight) -> Iterator[Batch]:
    """The images of files, up to `size` of equal shape together, fewer of large ones; `sight` notes the unreadable."""
    batch: list[Item] = []
    pixels: list[np.ndarray] = []
    for item in items:
        assert item.path is not None, "an image that was never written cannot be read"
        try:
            with Image.open(item.path) as image:
                array = to_rgb(image)
        except FileNotFoundError:
            sight.unreadable.append((item, "missing"))
            continue
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            sight.unreadable.append((item, in_one_line(error)))
            continue
        full = len(batch) == size or (len(batch) + 1) * array.shape[0] * array.shape[1] > MOST_PIXELS
        if batch and (full or array.shape != pixels[0].shape):
            yield batch, to_tensor(np.stack(pixels))
            batch, pixels = [], []
        batch.append(item)
        pixels.append(array)
    if batch:
        yield batch, to_tensor(np.stack(pixels))


def to_tensor(pixels: np.ndarray) -> Tensor:
    """uint8 (B, H, W, 3) to float (B, 3, H, W) in [0, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def as_written(images: Tensor) -> Tensor:
    """What a PNG file gives back of images in [0, 1]: rounded to 8 bits, so that scores do not depend on the way."""
    return (images.detach().float().clamp(0, 1) * 255).round() / 255


def read_folder(folder: Path, dimension: str = "") -> list[Item]:
    """The images of a folder, those of one prompt together, in an order that does not depend on the file system.

    Args:
        dimension: what images are that neither the manifest nor a sub-folder gives a dimension.

    Raises:
        UserError: there is no such folder, no image in it, or its manifest cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f'no folder "{folder}"')
    manifest = next((folder / name for name in MANIFESTS if (folder / name).is_file()), None)
    items = list(_listed(manifest)) if manifest else list(_image_files(folder))
    if not items:
        raise UserError(f'no image in "{folder}" (looked for {", ".join(SUFFIXES)})')
    if dimension:
        items = [item if item.dimension else _with_dimension(item, dimension) for item in items]
    rank = {name: i for i, name in enumerate(DIMENSIONS)}
    return sorted(items, key=lambda item: (rank.get(item.dimension, -1), item.prompt.text, item.member, str(item.path)))


def _with_dimension(item: Item, dimension: str) -> Item:
    return Item(Prompt(item.prompt.text, {**item.prompt.metadata, "dimension": dimension}), item.member, item.path)


def _listed(manifest: Path) -> Iterator[Item]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise UserError(f"{manifest}: not UTF-8 text ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            path, text, member = manifest.parent / entry.pop("file"), entry.pop("prompt"), int(entry.pop("member", 0))
            text.encode()  # a lone surrogate is no text that could be written or printed
            if entry.get("keyword") is not None and not isinstance(entry["keyword"], str):
                raise TypeError("keyword: expected a text")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f'{manifest}:{number}: expected {{"file": ..., "prompt": ...}} ({error!r})') from error
        if (dimension := entry.get("dimension", "")) not in ("", *DIMENSIONS):
            raise UserError(f'{manifest}:{number}: unknown dimension "{dimension}"')
        yield Item(Prompt(text, entry), member, path)


def _image_files(folder: Path) -> Iterator[Item]:
    """By sub-folders. The prompt is the one in a PNG's text, else a keyword's folder, else the image is on its own."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    members: dict[str, int] = {}
    for path in paths:
        parts = path.relative_to(folder).parts[:-1]
        known = bool(parts) and parts[0].lower() in DIMENSIONS
        metadata = {"dimension": parts[0].lower()} if known else {}
        if words := parts[1:] if known else parts:
            metadata["keyword"] = "/".join(words)
        text = _prompt_in(path) or ("/".join(parts) if words else str(path.relative_to(folder)))
        member = members[text] = members.get(text, -1) + 1
        yield Item(Prompt(text, metadata), member, path)


def _prompt_in(path: Path) -> str:
    if path.suffix.lower() != ".png":
        return ""
    try:
        with Image.open(path) as image:
            return str(image.info.get("prompt", ""))
    except Exception:  # said when it is read for its pixels
        return ""
