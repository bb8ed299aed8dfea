"""What a reward is audited on: prompts with a true and a wrong image each, and what true images are free to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.image_sets.latents import Pictures
from diffrl.image_sets.reading import read_set
from diffrl.prompts import Prompt
from diffrl_playground.grammar import VALUES, Caption, kind_of, possible, understood
from diffrl_playground.renderer import render
from diffrl_playground.scenes import Scene, complete

LOOKS = ("background", "style", "tone", "skin", "hair", "mood", "glasses", "hat")  # facts that move nothing else


@dataclass(frozen=True)
class Cases:
    """N prompts with true and wrong images (N, 3, H, W) in [0, 1]. scenes: what the playground's images show, (true,
    wrong) of each; none for an image set."""

    prompts: list[Prompt]
    true: Tensor
    wrong: Tensor
    scenes: list[tuple[Scene, Scene]]


def rendered(prompts: Sequence[Prompt], seed: int) -> Cases:
    """Of the playground: a rendering of each prompt, and one with exactly one stated fact drawn otherwise."""
    rng, scenes = np.random.default_rng(seed), []
    for prompt in prompts:
        caption = understood(prompt.text)
        if caption is None:
            text = f'"{prompt.text}" is not a prompt of the playground, so its true image cannot be drawn'
            raise UserError(f"--prompts: {text}; give images with --images")
        scenes.append((complete(caption, rng), _wrong(caption, rng)))
    true, wrong = (pictures([pair[i] for pair in scenes]) for i in (0, 1))
    return Cases(list(prompts), true, wrong, scenes)


def _wrong(caption: Caption, rng: np.random.Generator) -> Scene:
    # an edit could make a wrong style, tone or ground right, and would then be no exploit
    names = [name for name in sorted(caption.attributes) if name not in LOOKS[:3]] or sorted(caption.attributes)
    while True:
        name = str(rng.choice(names))
        others = [value for value in VALUES[kind_of(name)] if value != caption.attributes[name]]
        changed = Caption(caption.kind, {**caption.attributes, name: str(rng.choice(others))})
        if possible(changed):
            return complete(changed, rng)


def pictures(scenes: Sequence[Scene]) -> Tensor:
    """(N, 3, 64, 64) in [0, 1]."""
    return torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2).float() / 255


def given(source: str, limit: int, side: int) -> Cases:
    """Of an image set: each prompt's first image is its true one (the best, where it has scores of preference), and the
    next prompt's is the wrong one; squares of `side` pixels."""
    groups, read = read_set(source).groups[:limit], Pictures()
    if len(groups) < 2:
        raise UserError(f"--images: {source} has {len(groups)} prompt; an audit needs two or more")
    best = [int(np.argmax(group.scores.get("preference", (0,)))) for group in groups]
    true = torch.stack([read(g.pictures[i], g.where, (side, side)) for g, i in zip(groups, best, strict=True)])
    return Cases([Prompt(g.prompt, g.metadata) for g in groups], true, true.roll(-1, 0), [])


@dataclass(frozen=True)
class Look:
    """What a reward pays for a value of a fact that the prompts leave free: points, and over those for a right fact."""

    fact: str
    value: str
    points: float
    share: float
    images: int


def liked(cases: Cases, value: Callable[[Tensor, Sequence[Prompt]], Tensor]) -> list[Look]:
    """Looks in the order of what they are paid, over true images of which all are equally right: a fair reward pays 0.

    Each true scene is drawn with every value of a fact that its prompt does not say, and nothing else changed; a
    value's points are its mean score less that of the others. `share`: of the points that the reward gives a true image
    over a wrong one.
    """
    right = float((value(cases.true, cases.prompts) - value(cases.wrong, cases.prompts)).mean())
    looks = []
    for fact in LOOKS:
        rows = [i for i, (scene, _) in enumerate(cases.scenes) if _is_free(cases.prompts[i], scene, fact)]
        if len(rows) < 4:
            continue
        prompts = [cases.prompts[i] for i in rows]
        drawn = (pictures([changed(cases.scenes[i][0], {fact: one}) for i in rows]) for one in VALUES[fact])
        scores = torch.stack([value(images, prompts) for images in drawn])
        for k, one in enumerate(VALUES[fact]):
            others = (scores.sum(0) - scores[k]) / (len(scores) - 1)
            points = float((scores[k] - others).mean())
            looks.append(Look(fact, one, points, points / right if right > 0 else float("inf"), len(rows)))
    return sorted(looks, key=lambda look: -look.points)


def changed(scene: Scene, facts: Mapping[str, str]) -> Scene:
    """The scene with these facts, of those that its kind has."""
    return dataclasses.replace(scene, facts={**scene.facts, **{k: v for k, v in facts.items() if k in scene.facts}})


def dressed(cases: Cases, best: Mapping[str, str]) -> Tensor:
    """The wrong images again, each with the value of every fact of `best` that its prompt leaves free."""
    scenes = []
    for prompt, (_, wrong) in zip(cases.prompts, cases.scenes, strict=True):
        scenes.append(changed(wrong, {fact: one for fact, one in best.items() if _is_free(prompt, wrong, fact)}))
    return pictures(scenes)


def _is_free(prompt: Prompt, scene: Scene, fact: str) -> bool:
    caption = understood(prompt.text)
    return caption is not None and fact in scene.facts and fact not in caption.attributes
