"""Says from the pixels alone which facts of a prompt an image shows: the playground's gold reward.

Every fact gets a strict answer and partial credit in [0, 1] that rises smoothly towards it, for reinforcement learning.
The facts are those of `grammar.facts`, counted as GenEval counts them (Ghosh et al. 2023, arXiv:2310.11513): what the
prompt says, and that so many things are there and no more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffrl.playground.faces import Face, find_face
from diffrl.playground.grammar import (
    BACKGROUNDS,
    COLORS,
    HAIRS,
    SHAPES,
    SKINS,
    STYLES,
    TONES,
    Fact,
    Head,
    Scene,
    facts,
    parse,
)
from diffrl.playground.renderer import GROUNDS, PALETTE, toned
from diffrl.playground.sight import Blob, Box, distances, find_blobs, ground_of, ramp, to_pixels

Answer = tuple[float, bool]  # partial credit, strict

NO: Answer = (0.0, False)
MIN_LIKENESS = 0.7  # intersection over union that a shape needs
_COLORS = {tone: np.array([toned(PALETTE[color], tone) for color in COLORS]) for tone in TONES}
_GROUNDS = {tone: np.array([toned(GROUNDS[ground], tone) for ground in BACKGROUNDS]) for tone in TONES}


@dataclass(frozen=True)
class Verdict:
    """The answer to every fact of one prompt, by the fact's name."""

    facts: dict[str, float]
    strict: dict[str, bool]

    @property
    def reward(self) -> float:
        """Mean partial credit, in [0, 1]."""
        return sum(self.facts.values()) / len(self.facts)

    @property
    def score(self) -> float:
        """Share of facts that hold, in [0, 1]."""
        return sum(self.strict.values()) / len(self.strict)

    @property
    def all_right(self) -> bool:
        """Whether every fact holds."""
        return all(self.strict.values())


class Observation:
    """One image as the verifier sees it; what is costly to see is seen when asked for.

    `ground`: RGB of the border, 0 to 255; `cover`: share of the border that has it.
    """

    def __init__(self, image: np.ndarray) -> None:
        self.pixels = image.astype(np.float32)
        self.ground, self.cover = ground_of(self.pixels)
        self.distance = distances(self.pixels, self.ground)

    @functools.cached_property
    def blobs(self) -> list[Blob]:
        """All things, largest first."""
        return find_blobs(self.pixels, self.distance)

    @functools.cached_property
    def face(self) -> Face | None:
        """The measurements of a cartoon head, or None where nothing is large enough."""
        return find_face(self.pixels, self.distance)

    @property
    def layout(self) -> list[Box]:
        """The boxes (left, top, right, bottom) of all things that are no specks, largest first."""
        return [blob.box for blob in _things(self)]

    @property
    def head(self) -> Head | None:
        """The attributes of the head, or None where none is seen."""
        return self.face.head if self.face is not None else None


def see(image: np.ndarray) -> Observation:
    """What one image, uint8 (64, 64, 3), shows. Never fails: a blank image has no blobs and no face."""
    return Observation(image)


def verify(images: Any, prompts: Sequence[str]) -> list[Verdict]:
    """The verdict on every image for its prompt.

    `images`: float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), tensor or array; other sizes than 64 are resized.
    Raises ValueError for another form, for a prompt that is not of the world, or if there are not as many prompts.
    """
    pixels = to_pixels(images)
    if len(pixels) != len(prompts):
        raise ValueError(f"{len(pixels)} images but {len(prompts)} prompts")
    return [judge(see(image), parse(prompt)) for image, prompt in zip(pixels, prompts, strict=True)]


def judge(seen: Observation, scene: Scene) -> Verdict:
    """The answers to the facts of `scene`."""
    asked = facts(scene)
    if scene.kind == "heads":
        answers = _head_answers(seen.face, asked)
    elif scene.kind == "words":
        answers = _word_answers(seen, scene)
    elif scene.kind == "counts":
        answers = _count_answers(seen, scene)
    else:
        answers = _thing_answers(seen, scene)
    answers["background"] = _background(seen, scene.background, scene.tone)
    return Verdict(
        facts={fact.name: answers.get(fact.name, NO)[0] for fact in asked},
        strict={fact.name: answers.get(fact.name, NO)[1] for fact in asked},
    )


def _nearer(own: float, others: float, reach: float) -> float:
    """Partial credit of a colour: half for being close (none from `reach` grey levels), half for being the closest."""
    return 0.5 * ramp(own, reach, 12.0) + 0.5 * ramp(others - own, -60.0, 30.0)


def _background(seen: Observation, wanted: str, tone: str) -> Answer:
    distance = np.linalg.norm(_GROUNDS[tone] - seen.ground, axis=1)
    own = float(distance[BACKGROUNDS.index(wanted)])
    others = float(np.delete(distance, BACKGROUNDS.index(wanted)).min())
    strict = own < others and own < 60.0 and seen.cover > 0.8
    return ramp(seen.cover, 0.2, 0.9) * _nearer(own, others, 150.0), strict


def _color(blob: Blob, wanted: str, tone: str) -> Answer:
    """Colours of the asked tone are taken a little more readily than the other tones'."""
    distance = {name: np.linalg.norm(table - blob.color, axis=1) for name, table in _COLORS.items()}
    own = float(distance[tone][COLORS.index(wanted)])
    rivals = [float(np.delete(distance[tone], COLORS.index(wanted)).min())]
    for other in TONES:
        if other != tone:
            # A said tone is a fact of its own; then only the colour's name counts here.
            named = distance[other] if tone == "normal" else np.delete(distance[other], COLORS.index(wanted))
            rivals.append(1.25 * float(named.min()))
            own = own if tone == "normal" else min(own, 1.25 * float(distance[other][COLORS.index(wanted)]))
    return _nearer(own, min(rivals), 160.0), own < min(rivals) and own < 80.0


def _shape(blob: Blob, wanted: str, sizes: tuple[float, float]) -> Answer:
    """`sizes`: the smallest and the largest that the world draws, in pixels; half and 1.17 times that is tolerated."""
    likeness = blob.shapes[SHAPES.index(wanted)]
    other = float(np.delete(blob.shapes, SHAPES.index(wanted)).max())
    extent = max(blob.width, blob.height)
    fits = ramp(extent, 0.3 * sizes[0], 0.7 * sizes[0]) * ramp(extent, 1.3 * sizes[1], 1.05 * sizes[1])
    credit = fits * (0.5 * ramp(likeness, 0.35, 0.85) + 0.5 * ramp(likeness - other, -0.35, 0.05))
    return credit, bool(likeness > other and likeness > MIN_LIKENESS and fits > 0.5)


_SIZES = {"objects": (27.0, 48.0), "counts": (13.0, 22.0), "pairs": (17.0, 28.0), "relations": (17.0, 28.0)}


def _things(seen: Observation) -> list[Blob]:
    """The blobs that are no specks beside the largest one, at most eight."""
    return [blob for blob in seen.blobs if blob.area >= max(30.0, 0.15 * seen.blobs[0].area)][:8]


def _mean(answers: Sequence[Answer]) -> Answer:
    """All must hold; no answers is no."""
    return (sum(a[0] for a in answers) / len(answers), all(a[1] for a in answers)) if answers else NO


def _count_answers(seen: Observation, scene: Scene) -> dict[str, Answer]:
    thing, blobs = scene.things[0], _things(seen)
    number = sum(ramp(blob.area, 15.0, 60.0) for blob in blobs)
    answers = {
        "count": (ramp(abs(number - scene.count), scene.count, 0.0) ** 2, len(blobs) == scene.count),
        "shape": _mean([_shape(blob, thing.shape, _SIZES["counts"]) for blob in blobs]),
        "color": _mean([_color(blob, thing.color, scene.tone) for blob in blobs]),
    }
    answers["tone"] = _tone(seen, blobs, scene.tone)
    return answers


def _thing_answers(seen: Observation, scene: Scene) -> dict[str, Answer]:
    """Objects, pairs and relations: each thing gets the blob that fits best; more blobs than things cost the shapes."""
    blobs, sizes, several = _things(seen), _SIZES[scene.kind], len(scene.things) > 1
    answers: dict[str, Answer] = {}
    if not blobs:
        return answers
    table = [
        [(_shape(blob, thing.shape, sizes), _color(blob, thing.color, scene.tone)) for blob in blobs]
        for thing in scene.things
    ]
    slots = list(range(len(blobs))) + [-1] * (len(scene.things) - 1)  # -1: no blob for this thing
    choice = max(
        itertools.permutations(slots, len(scene.things)),
        key=lambda pick: sum(table[i][j][0][0] + table[i][j][1][0] for i, j in enumerate(pick) if j >= 0),
    )
    taken = [blobs[j] for j in choice if j >= 0]
    area = sum(blob.area for blob in taken)
    extra = sum(blob.area for blob in blobs) - area
    alone = ramp(extra / area, 1.0, 0.1)
    for i, j in enumerate(choice):
        (shape, shape_holds), color = table[i][j] if j >= 0 else (NO, NO)
        suffix = f"/{i + 1}" if several else ""
        answers["shape" + suffix] = (shape * (0.5 + 0.5 * alone), shape_holds and alone > 0.7)
        answers["color" + suffix] = color
    if scene.relation and len(taken) == 2:
        answers["relation"] = _relation(taken[0], taken[1], scene.relation, answers)
    answers["style"] = _mean([_style(blob, scene.style) for blob in taken])
    answers["tone"] = _tone(seen, taken, scene.tone)
    return answers


def _relation(first: Blob, second: Blob, relation: str, answers: dict[str, Answer]) -> Answer:
    """Holds if both things have their colours, and the first lies at least 6 pixels that way, and less to the side."""
    right, down = first.x - second.x, first.y - second.y
    ahead, aside = {
        "left of": (-right, down),
        "right of": (right, down),
        "above": (-down, right),
        "below": (down, right),
    }[relation]
    credit = ramp(ahead, -24.0, 12.0) * (0.5 + 0.5 * ramp(ahead - abs(aside), -20.0, 6.0))
    known = min(answers["color/1"][0], answers["color/2"][0])
    told = answers["color/1"][1] and answers["color/2"][1]
    return credit * known, told and ahead >= 6.0 and ahead > abs(aside)


def _style(blob: Blob, wanted: str) -> Answer:
    likeness = float(blob.styles[STYLES.index(wanted)])
    return likeness, likeness > 0.5


def _tone(seen: Observation, blobs: Sequence[Blob], wanted: str) -> Answer:
    """The tone whose palette and backgrounds together explain the picture best."""
    if not blobs:
        return NO
    miss = {}
    for tone in TONES:
        things = [float(np.linalg.norm(_COLORS[tone] - blob.color, axis=1).min()) for blob in blobs]
        miss[tone] = sum(things) / len(things) + float(np.linalg.norm(_GROUNDS[tone] - seen.ground, axis=1).min())
    others = min(value for tone, value in miss.items() if tone != wanted)
    return _nearer(miss[wanted], others, 120.0), miss[wanted] < others


def _word_answers(seen: Observation, scene: Scene) -> dict[str, Answer]:
    """The colour of the letters, if there is something like three letters side by side; reading them is left to OCR."""
    letters = [blob for blob in seen.blobs if blob.height >= 8]
    if not letters:
        return {}
    width = max(blob.box[2] for blob in letters) - min(blob.box[0] for blob in letters)
    height = max(blob.box[3] for blob in letters) - min(blob.box[1] for blob in letters)
    area = sum(blob.area for blob in letters)
    like_text = ramp(width, 15.0, 35.0) * ramp(height, 50.0, 35.0) * ramp(area / (width * height), 1.0, 0.8)
    weights = np.array([blob.area for blob in letters]) / area
    colors = [_color(blob, scene.things[0].color, scene.tone) for blob in letters]
    credit = sum(float(weight) * answer[0] for weight, answer in zip(weights, colors, strict=True))
    right = sum(float(weight) for weight, answer in zip(weights, colors, strict=True) if answer[1])
    return {"color": (like_text * credit, like_text > 0.5 and right > 0.8)}


def _head_answers(face: Face | None, asked: Sequence[Fact]) -> dict[str, Answer]:
    """Every answer is weighed by how much a head is there: an empty image wears no glasses, but earns nothing."""
    if face is None:
        return {}
    wanted = {fact.kind: fact.wanted for fact in asked}
    signed = face.smile if wanted["mood"] == "smiling" else -face.smile
    glasses = face.glasses if wanted["glasses"] == "yes" else 1.0 - face.glasses
    hat = face.hat if wanted["hat"] == "yes" else 1.0 - face.hat
    answers = {
        "skin": _among(face.skin, SKINS.index(wanted["skin"])),
        "hair": _among(face.hair, HAIRS.index(wanted["hair"])),
        "mood": (ramp(signed, -2.5, 2.5) * ramp(face.mouth, 0.0, 0.5), signed > 0.8 and face.mouth > 0.3),
        "glasses": (glasses, glasses > 0.5),
        "hat": (hat, hat > 0.5),
    }
    there = face.presence > 0.5
    return {name: (credit * face.presence, holds and there) for name, (credit, holds) in answers.items()}


def _among(distance: np.ndarray, wanted: int) -> Answer:
    own, others = float(distance[wanted]), float(np.delete(distance, wanted).min())
    return _nearer(own, others, 160.0), own < others and own < 80.0
