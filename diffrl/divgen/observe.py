"""Looking at images in a stream, so that memory holds features only."""

from __future__ import annotations

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
from diffrl.errors import in_one_line
from diffrl.pictures import MOST_PIXELS, to_rgb
from diffrl.prompts import Prompt

MANIFEST = "manifest.jsonl"
MANIFESTS = (MANIFEST, "images.jsonl")  # the second is what `diffrl sample` writes
DIMENSION_OF = {"identity": "id", "style": "style", "layout": "layout", "tones": "tonal"}
_PER_GROUP = 16  # images of one prompt that wait for their pairwise distances, at most

Batch = tuple[list["Item"], Tensor]


@dataclass(frozen=True)
class Item:
    """One image to look at. `prompt.text` names the group; `path` is None for an image that was never written.

    known: somebody said the prompt; else the image is on its own. stated: somebody said its seed or its number among
    the prompt's images, so that the same picture again is no copy. settings: what it was drawn with.
    """

    prompt: Prompt
    member: int = 0
    path: Path | None = None
    seed: int | None = None
    known: bool = True
    stated: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

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
