"""The pool of rendered scenes that the playground's models learn from: pictures, captions, and what lies where.

N scenes of the training split in a folder: images.npy uint8 (N, 64, 64, 3); tokens.npy int16 (N, CAPTIONS, T), captions
that say different facts of the same scene; truth.npy uint8 (N, FACTS), the index of every fact's value, 255 where the
scene's kind has no such fact; stated.npy uint8 (N, CAPTIONS, FACTS), where the caption says it; content.npy and
paint.npy uint8 (N, 8, 8), the class of what each 8 x 8 pixels belong to (shape and style, letter, or head) and of its
colour; kinds.npy uint8 (N,).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import models
import numpy as np
from numpy.lib.format import open_memmap
from transformers import CLIPTokenizer

from diffrl_playground import grammar
from diffrl_playground.grammar import Caption, kind_of
from diffrl_playground.renderer import render
from diffrl_playground.scenes import LETTER_HEIGHT, SIZE, Scene, complete

CAPTIONS = 6
CELLS = 8
NOTHING = 255
KINDS = tuple(grammar.KINDS)
# One slot for every fact; those of a word are its three letters.
FACTS = (
    *("kind", "count", "shape/1", "color/1", "shape/2", "color/2", "relation", "background", "style", "tone"),
    *("skin", "hair", "mood", "glasses", "hat", "letter/1", "letter/2", "letter/3"),
)
SIZES = [len(KINDS), 3, 5, 6, 5, 6, 4, 3, 3, 3, 3, 4, 2, 2, 2, 10, 10, 10]
CONTENTS = 1 + 15 + 10 + 4
PAINTS = 1 + 18 + 12


@dataclass
class Pool:
    """See the module's documentation; arrays are read from disk as they are needed."""

    images: np.ndarray
    tokens: np.ndarray
    truth: np.ndarray
    stated: np.ndarray
    content: np.ndarray
    paint: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.kinds)


def _shapes(count: int, length: int) -> dict[str, tuple[tuple[int, ...], type]]:
    return {
        "images": ((count, SIZE, SIZE, 3), np.uint8),
        "tokens": ((count, CAPTIONS, length), np.int16),
        "truth": ((count, len(FACTS)), np.uint8),
        "stated": ((count, CAPTIONS, len(FACTS)), np.uint8),
        "content": ((count, CELLS, CELLS), np.uint8),
        "paint": ((count, CELLS, CELLS), np.uint8),
        "kinds": ((count,), np.uint8),
    }


def indices(kind: str, facts: dict[str, str]) -> np.ndarray:
    """The slots (FACTS,) of the values of `facts`; NOTHING elsewhere."""
    row = np.full(len(FACTS), NOTHING, np.uint8)
    row[0] = KINDS.index(kind)
    for name, value in facts.items():
        if name == "word":
            for i, letter in enumerate(value, start=1):
                row[FACTS.index(f"letter/{i}")] = grammar.LETTERS.index(letter)
            continue
        slot = name if name in FACTS else f"{name}/1"
        if slot in FACTS:
            row[FACTS.index(slot)] = grammar.VALUES[kind_of(name)].index(value)
    return row


def cells(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """(content, paint) of a scene, each uint8 (8, 8): 0 is ground."""
    content, paint = np.zeros((2, CELLS, CELLS), np.uint8)
    middle = (np.arange(CELLS) + 0.5) * SIZE / CELLS
    if scene.kind == "heads":
        x, y, unit = scene.places[0]
        inside = np.hypot(middle[None] - x, middle[:, None] - y) < 26 * unit
        content[inside] = 26 + 2 * grammar.MOODS.index(scene["mood"]) + (scene["glasses"] == "yes")
        paint[inside] = 19 + 3 * grammar.HAIRS.index(scene["hair"]) + grammar.SKINS.index(scene["skin"])
    elif scene.kind == "words":
        x, y, _ = scene.places[0]
        rows = np.abs(middle - y) < LETTER_HEIGHT / 2 + 4
        for i, letter in enumerate(scene["word"]):
            inside = rows[:, None] & (np.abs(middle - x - 19.5 * (i - 1)) < 10)[None]
            content[inside] = 16 + grammar.LETTERS.index(letter)
            paint[inside] = 1 + 3 * grammar.COLORS.index(scene["color"])
    else:
        style, tone = grammar.STYLES.index(scene["style"]), grammar.TONES.index(scene["tone"])
        for shape, color, (x, y, radius) in scene.things():
            reach = radius + 3
            inside = (np.abs(middle[None] - x) < reach) & (np.abs(middle[:, None] - y) < reach)
            content[inside] = 1 + 3 * grammar.SHAPES.index(shape) + style
            paint[inside] = 1 + 3 * grammar.COLORS.index(color) + tone
    return content, paint


def caption_of(scene: Scene, rng: np.random.Generator, split: str = "train") -> Caption | None:
    """A caption of the scene that is of the split; None if none of many is (a word of another split)."""
    for _ in range(50):
        caption = scene.describe(grammar.stated_names(scene.kind, rng))
        if caption.split() == split:
            return caption
    return None


def make_pool(folder: Path, count: int, seed: int, tokenizer: CLIPTokenizer) -> None:
    """Draw the scenes, unless the folder has them."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = _shapes(count, models.TEXT_TOKENS)
    pool = {name: open_memmap(folder / f"{name}.npy", "w+", dtype, shape) for name, (shape, dtype) in shapes.items()}
    texts: list[str] = []
    shares = np.array(list(grammar.KINDS.values()))
    i = 0
    while i < count:
        kind = KINDS[int(rng.choice(len(KINDS), p=shares / shares.sum()))]
        scene = complete(Caption(kind), rng)
        captions = [caption_of(scene, rng) for _ in range(CAPTIONS)]
        if None in captions:
            continue
        pool["images"][i], pool["kinds"][i] = render(scene), KINDS.index(scene.kind)
        pool["truth"][i] = indices(scene.kind, dict(scene.facts))
        pool["content"][i], pool["paint"][i] = cells(scene)
        for j, caption in enumerate(captions):
            assert caption is not None
            texts.append(caption.text())
            pool["stated"][i, j] = indices(caption.kind, dict(caption.attributes))
        i += 1
        if i % 2000 == 0 or i == count:
            start = i - len(texts) // CAPTIONS
            pool["tokens"][start:i] = models.tokenize(tokenizer, texts).view(-1, CAPTIONS, models.TEXT_TOKENS).numpy()
            texts = []
            print(f"pool {i}/{count}", flush=True)
    for array in pool.values():
        array.flush()
    (folder / "done").write_text(f"{count}\n")


def open_pool(folder: Path, count: int) -> Pool:
    """The pool in a folder, read from disk as needed."""
    shapes = _shapes(count, models.TEXT_TOKENS)
    return Pool(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in shapes})
