"""Says from the pixels alone which facts of a prompt an image shows: the playground's gold reward.

Every fact gets a strict answer, and a value in [0, 1] for reinforcement learning: half of it is for being right, half
is credit that rises smoothly towards that. So a search that climbs on credit alone, with rubbish, ends at a half.
The facts are those of `grammar.facts`, counted as GenEval counts them (Ghosh et al. 2023, arXiv:2310.11513): what the
prompt says, and that nothing else is there. What a prompt leaves free is never wrong; it is read too, for `variety`.

A fact about a thing holds only if everything in the picture is a thing that a person would name: one of the world's
shapes by its contour, in one of its styles, of one colour; a ghost or a scrawl beside it makes it wrong.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import ndimage

from .grammar import BACKGROUNDS, COLORS, HAIRS, SHAPED, SHAPES, SKINS, STYLES, TONES, TWO_THINGS, Caption, facts, parse
from .renderer import GROUNDS, PALETTE
from .scenes import COUNT_RADII, OBJECT_RADII, PAIR_RADII
from .sight import Box, View, ramp, to_pixels, views
from .things import MIN_PURE, MOST_THINGS, Thing, look

if TYPE_CHECKING:
    from .faces import Face
    from .letters import Word

Answer = tuple[float, bool]  # partial credit, strict

NO: Answer = (0.0, False)
TILT = 9.0  # degrees
_GROUNDS = np.array([GROUNDS[ground] for ground in BACKGROUNDS], np.float32)
# The smallest and the largest radius that the world draws, in pixels; 0.7 and 1.25 times that is tolerated.
_RADII = {"objects": OBJECT_RADII, "counts": COUNT_RADII, "pairs": PAIR_RADII, "relations": PAIR_RADII}


@dataclass(frozen=True)
class Verdict:
    """The answer to every fact of one prompt, by the fact's name: its value, and whether it holds."""

    facts: dict[str, float]
    strict: dict[str, bool]

    @property
    def reward(self) -> float:
        """Mean value, in [0, 1]."""
        return sum(self.facts.values()) / max(len(self.facts), 1)

    @property
    def score(self) -> float:
        """Share of facts that hold, in [0, 1]."""
        return sum(self.strict.values()) / max(len(self.strict), 1)

    @property
    def all_right(self) -> bool:
        """Whether every fact holds."""
        return all(self.strict.values())


class Observation:
    """One image as the verifier sees it; what is costly to see is seen when asked for."""

    def __init__(self, image: np.ndarray, view: View) -> None:
        self.view = view
        self._image = image

    @functools.cached_property
    def _tilted(self) -> list[View]:
        """The picture turned a little either way about its middle, for what is read only upright."""
        ground = self.view.ground.astype(np.float32)
        offset = self._image.astype(np.float32) - ground
        turned = [ndimage.rotate(offset, degrees, reshape=False, order=1) + ground for degrees in (-TILT, TILT)]
        return views(np.stack(turned).clip(0, 255))

    @functools.cached_property
    def things(self) -> list[Thing]:
        """The largest parts, at most MOST_THINGS, as things."""
        return look([self.view])[0]

    @functools.cached_property
    def clear(self) -> bool:
        """Whether all that is there can be named."""
        return len(self.view.parts) <= MOST_THINGS and not self.view.ghosts and all(t.named for t in self.things)

    @functools.cached_property
    def word(self) -> Word | None:
        """What stands where a word would."""
        from .letters import read

        word = read(self.view)
        if word is None or word.text is not None:
            return word
        return next((w for w in map(read, self._tilted) if w is not None and w.text is not None), word)

    @functools.cached_property
    def ink(self) -> float:
        """Share of all that is drawn that has the one colour which most of it has, in [0, 1]."""
        shares = [part.area * thing.colors.sum(1) for part, thing in zip(self.view.parts, self.things, strict=False)]
        total = sum(part.area for part in self.view.parts[:MOST_THINGS])
        return float(np.sum(shares, axis=0).max() / total) if shares else 0.0

    @functools.cached_property
    def face(self) -> Face | None:
        """The measurements of a cartoon head, or None where nothing is large enough."""
        from .faces import find_face

        face = find_face(self.view)
        if face is None or face.sure:
            return face
        faces = (face, *filter(None, map(find_face, self._tilted)))
        return max(faces, key=lambda one: (one.sure, one.presence))

    @property
    def layout(self) -> list[Box]:
        """The boxes (left, top, right, bottom) of all things, largest first."""
        return [part.box for part in self.view.parts[:MOST_THINGS]]

    @property
    def head(self) -> dict[str, str] | None:
        """The features of the head, or None where none is seen."""
        return self.face.features if self.face is not None else None

    @functools.cached_property
    def background(self) -> str | None:
        """The ground's name, or None if it is none of the world's."""
        apart = np.linalg.norm(_GROUNDS - self.view.ground, axis=1)
        named = apart.min() < 60.0 and self.view.cover > 0.8
        return BACKGROUNDS[int(apart.argmin())] if named else None


_SEEN: OrderedDict[bytes, Observation] = OrderedDict()
_KEEP = 128  # images, 250 kB each
FEWEST = 16  # images for which other processes are asked
_TOGETHER = 16  # images that are looked at at once: their arrays stay in the processor's cache


def glance(images: np.ndarray) -> Iterator[Observation]:
    """What each image of uint8 (B, 64, 64, 3) shows. Never fails: a blank image has no things and no face. One of the
    last 128 is not looked at again; what counts is its content, not where it is kept.

    So a run that is rewarded by the verifier, and watches its strict score and the variety, reads each image once.
    """
    for first in range(0, len(images), _TOGETHER):
        yield from _glance(images[first : first + _TOGETHER])


def _glance(images: np.ndarray) -> list[Observation]:
    keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]
    seen = {key: _SEEN[key] for key in keys if key in _SEEN}
    new = {key: image for key, image in zip(keys, images, strict=True) if key not in seen}
    if new:
        looks = views(np.stack(list(new.values())))
        seen |= {key: Observation(image, view) for (key, image), view in zip(new.items(), looks, strict=True)}
        _SEEN.update((key, seen[key]) for key in new)
        while len(_SEEN) > _KEEP:
            _SEEN.popitem(last=False)
    return [seen[key] for key in keys]


def verify(images: Any, prompts: Sequence[str]) -> list[Verdict]:
    """The verdict on every image for its prompt.

    `images`: float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), tensor or array; other sizes than 64 are resized.
    Raises ValueError for another form, for a prompt that is not of the world, or if there are not as many prompts.
    """
    pixels = to_pixels(images)
    if len(pixels) != len(prompts):
        raise ValueError(f"{len(pixels)} images but {len(prompts)} prompts")
    if len(pixels) < FEWEST:
        return judged(pixels, prompts)
    from .beside import ask

    return ask(pixels, prompts) or judged(pixels, prompts)


def judged(pixels: np.ndarray, prompts: Sequence[str]) -> list[Verdict]:
    """`verify` of uint8 (B, H, W, 3) in this process."""
    captions, verdicts = [parse(prompt) for prompt in prompts], []
    for first in range(0, len(captions), _TOGETHER):
        asked = list(zip(_glance(pixels[first : first + _TOGETHER]), captions[first : first + _TOGETHER], strict=True))
        new = [seen for seen, caption in asked if caption.kind != "heads" and "things" not in vars(seen)]
        for seen, things in zip(new, look([seen.view for seen in new]), strict=True):
            seen.things = things
        verdicts += [judge(seen, caption) for seen, caption in asked]
    return verdicts


def judge(seen: Observation, caption: Caption) -> Verdict:
    """The answers to what `caption` says."""
    if caption.kind == "heads":
        answers = _head_answers(seen.face, caption)
    elif caption.kind == "words":
        answers = _word_answers(seen, caption)
    else:
        answers = _thing_answers(seen, caption)
    if "background" in caption.attributes:
        answers["background"] = _background(seen, caption.attributes["background"])
    reported = {name: answers.get(name, NO) for name in facts(caption)}
    return Verdict(
        facts={name: 0.5 * (credit + right) for name, (credit, right) in reported.items()},
        strict={name: right for name, (_, right) in reported.items()},
    )


def _nearer(wanted: float, others: float, reach: float) -> float:
    """Partial credit of a colour: half for being close (none from `reach` grey levels), half for being the closest."""
    return 0.5 * ramp(wanted, reach, 12.0) + 0.5 * ramp(others - wanted, -60.0, 30.0)


def _background(seen: Observation, wanted: str) -> Answer:
    distance = np.linalg.norm(_GROUNDS - seen.view.ground, axis=1)
    apart = float(distance[BACKGROUNDS.index(wanted)])
    others = float(np.delete(distance, BACKGROUNDS.index(wanted)).min())
    return ramp(seen.view.cover, 0.2, 0.9) * _nearer(apart, others, 150.0), seen.background == wanted


def _shape(thing: Thing, wanted: str | None, kind: str) -> Answer:
    low, high = _RADII[kind]
    fits = ramp(thing.radius, 0.4 * low, 0.75 * low) * ramp(thing.radius, 1.45 * high, 1.2 * high)
    if wanted is None:
        return fits, fits > 0.5
    error = float(thing.misses[SHAPES.index(wanted)])
    other = float(np.delete(thing.misses, SHAPES.index(wanted)).min())
    credit = 0.6 * ramp(error, 0.3, 0.02) + 0.4 * ramp(other - error, -0.15, 0.05)
    return fits * credit, thing.shape == wanted and fits > 0.5


def _color(thing: Thing, wanted: str) -> Answer:
    share = float(thing.colors[COLORS.index(wanted)].sum())
    palette = np.array([PALETTE[name] for name in COLORS], np.float32)
    apart = np.linalg.norm(_hue(palette) - _hue(thing.mean[None]), axis=1)
    ours, others = float(apart[COLORS.index(wanted)]), float(np.delete(apart, COLORS.index(wanted)).min())
    near = 0.5 * ramp(ours, 1.0, 0.2) + 0.5 * ramp(others - ours, -0.5, 0.2)
    return 0.5 * near + 0.5 * ramp(share, 0.0, MIN_PURE), thing.color == wanted


def _hue(rgb: np.ndarray) -> np.ndarray:
    """Chroma, the same in every tone: RGB less its least channel, over its range, (n, 3) in [0, 1]."""
    low, high = rgb.min(1, keepdims=True), rgb.max(1, keepdims=True)
    return (rgb - low) / np.maximum(high - low, 40.0)


def _tone(thing: Thing, wanted: str) -> Answer:
    shares = thing.colors.sum(0)
    return ramp(float(shares[TONES.index(wanted)]), 0.0, MIN_PURE), thing.tone == wanted


def _style(thing: Thing, wanted: str) -> Answer:
    share = float(thing.styles[STYLES.index(wanted)])
    other = float(np.delete(thing.styles, STYLES.index(wanted)).max())
    return 0.6 * share + 0.4 * ramp(share - other, -0.5, 0.1), thing.style == wanted


_LOOK = {"style": _style, "tone": _tone}  # what is said of all things


def _answers_of(thing: Thing, caption: Caption, slot: str = "") -> dict[str, Answer]:
    """Of one thing's shape, and of its colour where one is said; `slot`: "/1" or "/2" of two things."""
    answers = {f"shape{slot}": _shape(thing, caption.attributes.get(f"shape{slot}"), caption.kind)}
    if f"color{slot}" in caption.attributes:
        answers[f"color{slot}"] = _color(thing, caption.attributes[f"color{slot}"])
    return answers


def _mean(answers: Sequence[Answer]) -> Answer:
    """All must hold; no answers is no."""
    return (sum(a[0] for a in answers) / len(answers), all(a[1] for a in answers)) if answers else NO


def _thing_answers(seen: Observation, caption: Caption) -> dict[str, Answer]:
    """Each thing that is asked for gets the one that fits best; whatever else is there costs all of them."""
    things, attributes = seen.things, caption.attributes
    if not things:
        return {}
    wanted = int(attributes.get("count", "2" if caption.kind in TWO_THINGS else "1"))
    if caption.kind in TWO_THINGS:
        answers, places = _two_answers(things, caption)
        taken = [things[place] for place in places.values()]
    else:
        taken, each = things, [_answers_of(thing, caption) for thing in things]
        answers = {name: _mean([one[name] for one in each]) for name in each[0]}
    for name, rule in _LOOK.items():
        if name in attributes:
            answers[name] = _mean([rule(thing, attributes[name]) for thing in taken])
    number = sum(ramp(part.area, 10.0, 60.0) for part in seen.view.parts)
    counted = ramp(abs(number - wanted), wanted, 0.0)
    if "count" in attributes:
        answers["count"] = (counted**2, len(seen.view.parts) == wanted and answers["shape"][1])
    alone = (0.4 + 0.6 * counted) * (0.8 if seen.view.ghosts else 1.0)
    # Things beyond what was asked for make all of it wrong; of several, one that is missing costs the count alone.
    holds = seen.clear and (len(things) == wanted or ("count" in attributes and len(things) < wanted))
    alone *= 1.0 if seen.clear else 0.85
    return {
        name: (credit if name == "count" else credit * alone, right and holds)
        for name, (credit, right) in answers.items()
    }


def by_thing(seen: Observation, caption: Caption) -> list[list[bool]]:
    """Of each of the things that are seen, which of the facts hold that the caption says of it; [False] for a thing
    that it does not ask for. Empty for captions of other kinds than things, or without a thing."""
    things, attributes = seen.things, caption.attributes
    if caption.kind not in SHAPED or not things:
        return []
    asked: dict[int, list[bool]] = {}  # by the thing's place
    if caption.kind in TWO_THINGS:
        answers, taken = _two_answers(things, caption)
        for slot, place in taken.items():
            asked[place] = [right for name, (_, right) in answers.items() if name.endswith(f"/{slot}")]
    else:
        for place, thing in enumerate(things):
            asked[place] = [right for _, right in _answers_of(thing, caption).values()]
        best = sorted(asked, key=lambda place: -sum(asked[place]))[: int(attributes.get("count", "1"))]
        asked = {place: asked[place] for place in best}
    for place, rights in asked.items():
        rights += [rule(things[place], attributes[name])[1] for name, rule in _LOOK.items() if name in attributes]
    return [asked.get(place, [False]) if thing.named else [False] for place, thing in enumerate(things)]


def _two_answers(things: Sequence[Thing], caption: Caption) -> tuple[dict[str, Answer], dict[int, int]]:
    """The answers, and the place among the things of that which is taken for the first (1) and the second (2)."""
    table = [[_answers_of(thing, caption, slot) for thing in things] for slot in ("/1", "/2")]
    value = [[sum(credit for credit, _ in answers.values()) for answers in row] for row in table]
    slots = [*range(len(things)), -1]  # -1: nothing for this thing
    first, second = max(
        itertools.permutations(slots, 2), key=lambda pick: sum(value[i][j] for i, j in enumerate(pick) if j >= 0)
    )
    answers = {**(table[0][first] if first >= 0 else {}), **(table[1][second] if second >= 0 else {})}
    taken = {i: place for i, place in ((1, first), (2, second)) if place >= 0}
    if "relation" in caption.attributes and len(taken) == 2:
        answers["relation"] = _relation(things[first], things[second], caption.attributes["relation"], answers)
    return answers, taken


def _relation(first: Thing, second: Thing, relation: str, answers: dict[str, Answer]) -> Answer:
    """Holds if both are the things that are meant, the first at least 6 pixels that way, and less to the side."""
    right, down = first.x - second.x, first.y - second.y
    ahead = {"left of": -right, "right of": right, "above": -down, "below": down}[relation]
    aside = down if relation in ("left of", "right of") else right
    credit = ramp(ahead, -24.0, 12.0) * (0.5 + 0.5 * ramp(ahead - abs(aside), -20.0, 6.0))
    known = min(credit for credit, _ in answers.values())
    correct = all(right for _, right in answers.values())
    return credit * known, correct and ahead >= 6.0 and ahead > abs(aside)


def _word_answers(seen: Observation, caption: Caption) -> dict[str, Answer]:
    word, attributes = seen.word, caption.attributes
    if word is None:
        return {}
    credit = word.credit(attributes["word"])
    # Of one colour, as a thing is: else rubbish in many colours that has the form of letters would be read.
    legible = word.text is not None and seen.ink >= MIN_PURE and not seen.view.ghosts
    answers = {"word": (credit, legible and word.text == attributes["word"])}
    if "color" in attributes and seen.things:
        areas = np.array([part.area for part in seen.view.parts[:MOST_THINGS]], float)
        colors = [_color(thing, attributes["color"]) for thing in seen.things]
        shares = areas / areas.sum()
        likeness = float(word.matches.max(1).mean())
        credit = ramp(likeness, 0.3, 0.75) * float(sum(s * c for s, (c, _) in zip(shares, colors, strict=True)))
        answers["color"] = (credit, legible and all(right for _, right in colors))
    return answers


def _head_answers(face: Face | None, caption: Caption) -> dict[str, Answer]:
    """Every answer is weighed by how much a head is there: an empty image wears no glasses, but earns nothing."""
    if face is None:
        return {}
    attributes = caption.attributes
    answers: dict[str, Answer] = {}
    for name, distance, names in (("skin", face.skin, SKINS), ("hair", face.hair, HAIRS)):
        if name in attributes:
            answers[name] = _among(distance, names.index(attributes[name]))
    if "mood" in attributes:
        signed = face.smile if attributes["mood"] == "smiling" else -face.smile
        answers["mood"] = (ramp(signed, -2.5, 2.5) * ramp(face.mouth, 0.0, 0.5), signed > 0.8 and face.mouth > 0.3)
    for name, worn in (("glasses", face.glasses), ("hat", face.hat)):
        if name in attributes:
            likeness = worn if attributes[name] == "yes" else 1.0 - worn
            answers[name] = (likeness, likeness > 0.5)
    present = face.presence > 0.5 and face.alone
    weight = face.presence * (1.0 if face.alone else 0.8)
    return {name: (credit * weight, holds and present) for name, (credit, holds) in answers.items()}


def _among(distance: np.ndarray, wanted: int) -> Answer:
    ours, others = float(distance[wanted]), float(np.delete(distance, wanted).min())
    return _nearer(ours, others, 160.0), ours < others and ours < 80.0
