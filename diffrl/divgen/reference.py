"""ASC's reference: style features of real images, split into X_train and the held-out X_test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diffrl.divgen.extractors import Extractor, load_extractor
from diffrl.divgen.folders import read_folder
from diffrl.divgen.metrics import Array
from diffrl.divgen.observe import Batch, Item, Sight, in_batches, to_tensor
from diffrl.divgen.prompts import benchmark
from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.records.disk import replacing
from diffrl.seeds import seed_of
from diffrl.worlds import World

TEST_SHARE = 1 / 3
RENDERINGS = 2000  # of a world's own X_train
SETS = ("train", "test")
_BATCH = 64


@dataclass(frozen=True)
class Reference:
    """`train` (T, F) and `test` (Q, F) float32, from `source`, in the space of the extractor `style`."""

    train: Array
    test: Array
    style: str
    source: str

    def digest(self) -> str:
        """Of the features that ASC depends on, whatever their source is called."""
        return hashlib.sha256(self.train.tobytes() + self.test.tobytes()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write one safetensors file, at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"style": self.style, "source": self.source}
        with replacing(path) as temporary:
            save_file({"train": self.train, "test": self.test}, temporary, metadata={"diffrl": json.dumps(about)})


def load_reference(path: Path) -> Reference:
    """Read what `Reference.save` wrote; UserError for anything else."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            about = json.loads((file.metadata() or {})["diffrl"])
            return Reference(file.get_tensor("train"), file.get_tensor("test"), about["style"], about["source"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a reference that `diffrl divgen reference` wrote ({error})") from error


def build_reference(
    folder: Path, style: str, device: str = "", advance: Callable[[int], None] = lambda count: None
) -> tuple[Reference, Sight]:
    """Features of all images under `folder`, and what could not be read.

    A third of the images is X_test, chosen at random by a fixed seed. Raises UserError if there are too few images, or
    the style extractor cannot be loaded.
    """
    sight = Sight()
    items = read_folder(folder).items
    extractor = load_extractor("style", style, device)
    features = _features(in_batches(items, _BATCH, sight), extractor, advance)
    if len(features) < 6:
        raise UserError(f"{folder}: {len(features)} images with style features; a reference needs at least six")
    order, test = _shuffled(len(features)), max(round(TEST_SHARE * len(features)), 1)
    return Reference(features[order[test:]], features[order[:test]], extractor.name, str(folder)), sight


def drawn_reference(
    world: World,
    extractor: Extractor,
    asked: Sequence[str] = (),
    train: int = RENDERINGS,
    advance: Callable[[int], None] = lambda count: None,
) -> Reference:
    """A world's own: `train` true images of the style dimension's prompts, each about equally often, and held out
    one for each prompt in `asked` (a prompt may come several times; without any, of the whole dimension).

    So an ASC of 1 is what true images of the very same prompts reach, however many prompts there are. Texts that are no
    prompts of the world are left out.
    """
    prompts = [p.text for p in benchmark(world.name) if p.metadata["dimension"] == "style"]
    held = [text for text in asked if not world.foreign([text])] or prompts
    held = [held[i] for i in _shuffled(len(held))]
    sets = ([prompts[i % len(prompts)] for i in range(train)], held)
    training, held_out = (_features(_drawn(world, t, s), extractor, advance) for t, s in zip(sets, SETS, strict=True))
    return Reference(training, held_out, extractor.name, f"{train} renderings of the {world.name}")


def _drawn(world: World, texts: Sequence[str], purpose: str) -> Iterable[Batch]:
    for start in range(0, len(texts), _BATCH):
        part = texts[start : start + _BATCH]
        seeds = [seed_of("divgen reference", purpose, start + i) for i in range(len(part))]
        pixels = [world.draw(text, np.random.default_rng(seed)) for text, seed in zip(part, seeds, strict=True)]
        yield [Item(Prompt(text)) for text in part], to_tensor(np.stack(pixels))


def _shuffled(count: int) -> Array:
    return np.argsort(np.random.PCG64(seed_of("divgen", "split")).random_raw(count), kind="stable")


def _features(batches: Iterable[Batch], extractor: Extractor, advance: Callable[[int], None]) -> Array:
    parts: list[Array] = []
    for items, images in batches:
        parts += [e for e in extractor(images, [item.prompt for item in items]) if e is not None]
        advance(len(items))
    return np.stack(parts).astype(np.float32) if parts else np.zeros((0, 1), np.float32)
