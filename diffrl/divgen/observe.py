"""Looking at images in a stream, so that memory holds features only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

from diffrl.divgen.extractors import Extractor, Found
from diffrl.divgen.metrics import tone_of
from diffrl.errors import UserError, in_one_line
from diffrl.prompts import Prompt
from diffrl.tools.pictures import MOST_PIXELS, to_rgb

MANIFEST = "manifest.jsonl"
MANIFESTS = (MANIFEST, "images.jsonl")  # the second is what `diffrl sample` writes
DIMENSION_OF = {"identity": "id", "style": "style", "layout": "layout", "tones": "tonal"}
_PER_GROUP = 16  # images of one prompt that wait for their pairwise distances, at most

if TYPE_CHECKING:
    from torch import Tensor

Batch: TypeAlias = "tuple[list[Item], Tensor]"


@dataclass(frozen=True)
class Item:
    """One image to look at. `prompt.text` names the group; `path` is None for an image that was never written.

    known: its prompt is given; else the image is on its own. stated: a source gives its seed or its number among
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
    def file(self) -> Path:
        """`path`, of an image that is a file."""
        assert self.path is not None, "an image that was never written cannot be read"
        return self.path

    @property
    def dimension(self) -> str:
        """One of `DIMENSIONS`, or "" where it is not given."""
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
    """All images, looked at; `distances`: by prompt the mean LPIPS of its images, and how many were compared;
    `unreadable`: file and reason; `copies`: images that were there already, and count once."""

    seen: list[Seen] = field(default_factory=list)
    distances: dict[str, tuple[float, int]] = field(default_factory=dict)
    unreadable: list[tuple[Item, str]] = field(default_factory=list)
    copies: int = 0

    def __add__(self, other: Sight) -> Sight:
        distances = {**self.distances, **other.distances}
        unreadable = self.unreadable + other.unreadable
        return Sight(self.seen + other.seen, distances, unreadable, self.copies + other.copies)


def observe(
    batches: Iterable[Batch],
    extractors: Mapping[str, Extractor],
    advance: Callable[[int], None] = lambda count: None,
    keep: Callable[[Sequence[Seen]], None] = lambda seen: None,
) -> Sight:
    """Look at every batch with the extractors that its images' dimension asks for; no image is kept.

    batches: items with images (B, 3, H, W) float in [0, 1]; the images of one prompt have to follow one another for
    LPIPS to see them together. `advance` is told how many images are done; `keep` is handed each batch's.

    Raises:
        UserError: an extractor fails, or answers with what is none; the picture is named.
    """
    import torch

    sight = Sight()
    waiting: list[Tensor] = []
    last: Item | None = None

    def compare() -> None:
        shapes = Counter(x.shape for x in waiting)
        if last is not None and shapes and (count := max(shapes.values())) > 1:  # those of the most frequent size
            alike = torch.stack([x for x in waiting if shapes[x.shape] == count][:count])
            distances: Any = extractors["lpips"](alike, [last.prompt])
            compared = round((1 + (1 + 8 * np.size(distances)) ** 0.5) / 2)  # of M images, M (M - 1) / 2
            mean = float(np.mean(distances))
            if not np.isfinite(mean):
                name = extractors["lpips"].name
                raise UserError(f"lpips: {name} gives no distance for the images of {_named(last)}")
            sight.distances[last.prompt.text] = (mean, compared)
        waiting.clear()

    for items, images in batches:
        values = _look(items, images, extractors)
        seen = [Seen(item, value) for item, value in zip(items, values, strict=True)]
        sight.seen += seen
        keep(seen)
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


def looks_at(kind: str, item: Item) -> bool:
    """Whether this kind of extractor is asked about an image of its dimension."""
    return item.dimension in ("", DIMENSION_OF.get(kind, item.dimension))


def _look(items: Sequence[Item], images: Tensor, extractors: Mapping[str, Extractor]) -> list[dict[str, Found]]:
    size = np.array([images.shape[3], images.shape[2]])
    values: list[dict[str, Found]] = [{"size": size} for _ in items]
    for kind in ("identity", "style", "layout", "features", "tones"):
        if kind != "tones" and kind not in extractors:
            continue
        chosen = [i for i, item in enumerate(items) if looks_at(kind, item)]
        if not chosen:
            continue
        part = images if len(chosen) == len(items) else images[chosen]
        features: Sequence[Found]
        if kind == "tones":
            features = list(tone_of(part.cpu().numpy()))
        else:
            features = _asked(kind, extractors[kind], part, [items[i] for i in chosen])
        for i, value in zip(chosen, features, strict=True):
            values[i][kind] = value
    return values


def _asked(kind: str, extractor: Extractor, images: Tensor, items: Sequence[Item]) -> Sequence[Found]:
    """An extractor's answers, each checked; where one is wrong, asked again one by one, to name the picture."""
    try:
        answers = extractor(images, [item.prompt for item in items])
    except UserError:
        raise
    except Exception as error:  # an extractor may be anybody's
        if len(items) == 1:
            raise UserError(f"{kind}: {extractor.name} fails on {_named(items[0])} ({in_one_line(error)})") from error
        return [_asked(kind, extractor, images[i : i + 1], [item])[0] for i, item in enumerate(items)]
    if not isinstance(answers, Sequence | np.ndarray) or len(answers) != len(items):
        if len(items) == 1:
            count = f"{len(answers)} answers" if hasattr(answers, "__len__") else f"a {type(answers).__name__}"
            raise UserError(f"{kind}: {extractor.name} gives {count} for one image, {_named(items[0])}")
        return [_asked(kind, extractor, images[i : i + 1], [item])[0] for i, item in enumerate(items)]
    found = [None if a is None else _array(a, kind, extractor, item) for a, item in zip(answers, items, strict=True)]
    shapes = {x.shape[1:] if kind == "layout" else x.shape: i for i, x in enumerate(found) if x is not None}
    if len(shapes) > 1:
        (a, i), (b, j), *_ = shapes.items()
        names = f"{a} for {_named(items[i])} and {b} for {_named(items[j])}"
        raise UserError(f"{kind}: {extractor.name} gives features of shape {names}")
    return found


def _array(value: Any, kind: str, extractor: Extractor, item: Item) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, np.float32)
    except (TypeError, ValueError) as error:
        name = _named(item)
        raise UserError(f"{kind}: {extractor.name} gives no array for {name} ({in_one_line(error)})") from error
    if not np.isfinite(array).all() or array.ndim != (2 if kind == "layout" else 1):
        why = "values that are not finite" if array.ndim else "a number in place of an array"
        raise UserError(f"{kind}: {extractor.name} gives {why} for {_named(item)}, of shape {array.shape}")
    if kind != "layout" and not array.any():
        raise UserError(f"{kind}: {extractor.name} gives zeros alone for {_named(item)}; let it answer None")
    return array


def _named(item: Item) -> str:
    return str(item.path) if item.path is not None else f'an image of "{item.prompt.text}"'


def in_batches(items: Sequence[Item], size: int, sight: Sight) -> Iterator[Batch]:
    """The images of files, up to `size` of equal shape together, fewer of large ones; `sight` notes the unreadable."""
    batch: list[Item] = []
    pixels: list[np.ndarray] = []
    for item in items:
        try:
            with Image.open(item.file) as image:
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
    import torch

    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
