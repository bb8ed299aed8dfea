"""A controlled collapse: renderings of the playground that lose one kind of variety, for DivGenBench's metrics.

True renderings of DivGenBench's playground prompts; a share p of all images, in every dimension to which it applies,
loses its variety: one person for all heads (identity), one drawing style (style), one place for the things of a
prompt's images (layout), one tone on one background (tone; of medium brightness, since PVS is a
sum of standard deviations, which a minority of extreme images raises), or one and the same image for a whole dimension
(image). The shares are nested: what has collapsed at p is collapsed at every larger p.

Layouts are compared within a prompt, so the layout dimension has a quarter as many prompts with four images each. The
others have one image of each prompt: a second drawing style of the same scene would widen what is covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from diffrl.divgen.observe import Batch, Item, to_tensor
from diffrl.divgen.prompts import benchmark, small
from diffrl.seeds import seed_of
from diffrl_playground.grammar import parse
from diffrl_playground.renderer import render
from diffrl_playground.scenes import Scene, complete

PERSON = {"skin": "tan", "hair": "green", "mood": "smiling", "glasses": "yes", "hat": "no"}
BATCH = 64


def pictured(count: int) -> list[Item]:
    """`count` images of each dimension: of as many prompts, in the layout dimension of a quarter as many."""
    chosen = small(benchmark("playground"), count)
    layouts = [prompt for prompt in chosen if prompt.metadata["dimension"] == "layout"][: count // 4]
    others = [Item(prompt) for prompt in chosen if prompt.metadata["dimension"] != "layout"]
    return others + [Item(prompt, member) for prompt in layouts for member in range(4)]


def drawn(item: Item, kind: str, collapsed: bool, first: dict[str, Item]) -> np.ndarray:
    """The image of an item, uint8 (64, 64, 3), true or collapsed."""
    member = item.member
    if collapsed and kind == "image":
        item = first[item.dimension]
        member = item.member
    elif collapsed and kind == "layout":
        member = 0
    text = item.prompt.text
    scene = complete(parse(text), np.random.default_rng(seed_of("collapse", text, member)))
    return render(changed(scene, kind) if collapsed else scene)


def changed(scene: Scene, kind: str) -> Scene:
    """The scene with its person, its style or its tone replaced by the one that all have."""
    new = {}
    if scene.kind == "heads":
        new = PERSON if kind == "identity" else {}
    elif kind == "style":
        new = {"style": "striped"}
    elif kind == "tone":
        # The middle of the range: half of the pictures at one of its ends would widen the spread, not narrow it.
        new = {"tone": "plain", "background": "gray"}
    return replace(scene, facts={**scene.facts, **new})


def batches(items: list[Item], kind: str, share: float) -> Iterator[Batch]:
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(item.dimension, item)
    draw = np.random.default_rng(0).random(len(items))
    for start in range(0, len(items), BATCH):
        part = items[start : start + BATCH]
        images = [drawn(item, kind, bool(draw[start + i] < share), first) for i, item in enumerate(part)]
        yield part, to_tensor(np.stack(images))
