"""The playground's language: scenes, the prompts that describe them, the facts that a prompt claims, and the splits.

Seven forms of prompt, lower case, at most 16 tokens with begin and end (one per word or mark, one per quoted letter):

    objects    a red circle on white
    counts     three red circles on black
    pairs      a red circle and a blue square on gray
    relations  a red circle left of a blue square on white
    words      the word "kup" in red on white
    heads      a smiling tan head with red hair, glasses and a hat on white

Objects and pairs may end in a style (", striped"); objects, counts, pairs and relations in a tone (", dark"), style
first. Scenes are split by a hash of what they show, style and tone left out and the order of naming undone ("a left of
b" is "b right of a"), so a composition of the test split is never seen in training in any words. Quoted words are split
by the word.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink")
BACKGROUNDS = ("white", "gray", "black")
STYLES = ("filled", "outlined", "striped", "dotted")
TONES = ("normal", "dark", "pale")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {"two": 2, "three": 3, "four": 4}
SKINS = ("light", "tan", "brown")
HAIRS = ("red", "yellow", "green", "blue")
MOODS = ("smiling", "frowning")
LETTERS = "abefhklmnoprstu"

KINDS = {"objects": 0.15, "counts": 0.15, "pairs": 0.15, "relations": 0.2, "words": 0.2, "heads": 0.15}
STYLED = ("objects", "pairs")
TONED = ("objects", "counts", "pairs", "relations")
SUBSETS = ("all", "compositional", *KINDS, "styles", "tones")
SPLITS = ("train", "validation", "test")
SPLIT_OF_TENTH = ("train",) * 8 + ("validation", "test")
STYLE_SHARE = TONE_SHARE = 0.2
SET_LIMIT = 2000

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_PLURALS = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}
# What reads badly in one language or another.
_BARRED = "bub bum fap fuk fut hor hos kaf kok kot kuk kum kun kut lul mof nob pus puk suk"
# Consonant, vowel, consonant, of capitals that no one mixes up (no C beside G, D beside O, I beside L ...). Beginnings
# and endings that are pieces of the grammar's words ("ha" of hair, "on") are left out, so that a tokenizer spells every
# quoted word letter by letter.
WORDS = tuple(
    word
    for word in (a + v + b for a in "bfhklmnprst" for v in "aeou" for b in "bfhklmnprst")
    if word not in _BARRED
    and word[0] != word[2]
    and word[:2] not in ("ha", "re")
    and word[1:] not in ("an", "of", "on")
)


@dataclass(frozen=True)
class Thing:
    """A coloured shape; `shape` is "word" for the letters of a words scene."""

    shape: str
    color: str


@dataclass(frozen=True)
class Head:
    """The attributes of a cartoon head."""

    skin: str
    hair: str
    mood: str
    glasses: bool
    hat: bool


@dataclass(frozen=True)
class Scene:
    """What an image shows. `things`: one for objects, counts and words, two for pairs and relations, none for heads."""

    kind: str
    things: tuple[Thing, ...]
    background: str
    count: int = 1
    relation: str = ""
    word: str = ""
    head: Head | None = None
    style: str = "filled"
    tone: str = "normal"

    def text(self) -> str:
        """The prompt."""
        suffix = f", {self.style}" if self.style != "filled" else ""
        suffix += f", {self.tone}" if self.tone != "normal" else ""
        return f"{_subject(self)} on {self.background}{suffix}"

    def content(self) -> str:
        """What the split is decided by: the word, or the plain prompt with the things in a fixed order."""
        if self.word:
            return self.word
        scene = self
        if self.relation in ("right of", "below"):
            scene = replace(self, things=self.things[::-1], relation=_OPPOSITE[self.relation])
        elif self.kind == "pairs" and self.things[0].color > self.things[1].color:
            scene = replace(self, things=self.things[::-1])
        return f"{_subject(scene)} on {self.background}"

    def split(self) -> str:
        """ "train", "validation" or "test" (80, 10 and 10 %)."""
        return _split_of(self.content())


@dataclass(frozen=True)
class Fact:
    """One claim of a prompt. `name` is unique within the prompt, `thing` the index of the thing that it is about."""

    kind: str
    wanted: str
    thing: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kind)


def _subject(scene: Scene) -> str:
    if scene.kind == "heads":
        assert scene.head is not None
        head = scene.head
        parts = [f"{head.hair} hair"] + ["glasses"] * head.glasses + ["a hat"] * head.hat
        listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
        return f"a {head.mood} {head.skin} head with {listed}"
    first = scene.things[0]
    if scene.kind == "words":
        return f'the word "{scene.word}" in {first.color}'
    if scene.kind == "counts":
        number = next(name for name, value in NUMBERS.items() if value == scene.count)
        return f"{number} {first.color} {_PLURALS[first.shape]}"
    named = [f"{_article(thing.color)} {thing.color} {thing.shape}" for thing in scene.things]
    return f" {scene.relation or 'and'} ".join(named)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


@functools.lru_cache(maxsize=1 << 16)
def _split_of(content: str) -> str:
    return SPLIT_OF_TENTH[int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 10]


def _either(options: Sequence[str], name: str) -> str:
    return f"(?P<{name}>{'|'.join(options)})"


def _thing(i: int) -> str:
    return f"an? {_either(COLORS, f'color{i}')} {_either(SHAPES, f'shape{i}')}"


_END = (
    f" on {_either(BACKGROUNDS, 'background')}(?:, {_either(STYLES[1:], 'style')})?(?:, {_either(TONES[1:], 'tone')})?"
)
_FORMS = {
    "objects": re.compile(_thing(0) + _END),
    "counts": re.compile(
        f"{_either(tuple(NUMBERS), 'number')} {_either(COLORS, 'color0')} "
        f"{_either(tuple(_PLURALS.values()), 'plural')}{_END}"
    ),
    "pairs": re.compile(f"{_thing(0)} and {_thing(1)}{_END}"),
    "relations": re.compile(f"{_thing(0)} {_either(RELATIONS, 'relation')} {_thing(1)}{_END}"),
    "words": re.compile(f'the word "(?P<word>[a-z]+)" in {_either(COLORS, "color0")}{_END}'),
    "heads": re.compile(
        f"a {_either(MOODS, 'mood')} {_either(SKINS, 'skin')} head with {_either(HAIRS, 'hair')} hair"
        f"(?P<glasses>,? (?:and )?glasses)?(?P<hat> and a hat)?{_END}"
    ),
}


@functools.lru_cache(maxsize=1 << 14)
def parse(text: str) -> Scene:
    """The scene that a prompt describes. Raises ValueError if the prompt is not of the world."""
    for kind, form in _FORMS.items():
        match = form.fullmatch(text.strip())
        if match is None:
            continue
        scene = _scene_of(kind, {key: value for key, value in match.groupdict().items() if value})
        if scene.text() == text.strip():
            return scene
    raise ValueError(f"not a prompt of the playground: {text!r} (a valid one: 'a red circle on white')")


def _scene_of(kind: str, said: dict[str, str]) -> Scene:
    things: tuple[Thing, ...] = ()
    if kind == "counts":
        shape = next(shape for shape, plural in _PLURALS.items() if plural == said["plural"])
        things = (Thing(shape, said["color0"]),)
    elif kind != "heads":
        things = tuple(Thing(said.get(f"shape{i}", "word"), said[f"color{i}"]) for i in (0, 1) if f"color{i}" in said)
    head = Head(said["skin"], said["hair"], said["mood"], "glasses" in said, "hat" in said) if kind == "heads" else None
    style = said.get("style", "filled") if kind in STYLED else "filled"
    tone = said.get("tone", "normal") if kind in TONED else "normal"
    count = NUMBERS.get(said.get("number", ""), 1)
    return Scene(
        kind, things, said["background"], count, said.get("relation", ""), said.get("word", ""), head, style, tone
    )


def facts(scene: Scene) -> list[Fact]:
    """What the prompt of `scene` claims, in a fixed order; filled and normal are not said, so they are no facts."""
    found: list[Fact] = []
    if scene.head is not None:
        head = scene.head
        found += [Fact("skin", head.skin), Fact("hair", head.hair), Fact("mood", head.mood)]
        found += [Fact("glasses", "yes" if head.glasses else "no"), Fact("hat", "yes" if head.hat else "no")]
    if scene.kind == "counts":
        found.append(Fact("count", str(scene.count)))
    several = len(scene.things) > 1
    for i, thing in enumerate(scene.things):
        if thing.shape != "word":
            found.append(Fact("shape", thing.shape, i, f"shape/{i + 1}" if several else ""))
        found.append(Fact("color", thing.color, i, f"color/{i + 1}" if several else ""))
    if scene.relation:
        found.append(Fact("relation", scene.relation))
    found.append(Fact("background", scene.background))
    if scene.style != "filled":
        found.append(Fact("style", scene.style))
    if scene.tone != "normal":
        found.append(Fact("tone", scene.tone))
    return found


def vocabulary() -> list[str]:
    """All words and punctuation marks of the grammar, sorted, without the quoted words."""
    words = {"a", "the", "word", "in", "on", "and", "with", "head", "hair", "hat", "glasses", ",", '"'}
    words.update(SHAPES, _PLURALS.values(), COLORS, BACKGROUNDS, STYLES[1:], TONES[1:], NUMBERS, SKINS, HAIRS, MOODS)
    words.update(*(relation.split() for relation in RELATIONS))
    if any(_article(color) == "an" for color in COLORS):
        words.add("an")
    return sorted(words)


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _draw(rng: np.random.Generator, kind: str) -> Scene:
    """A scene of `kind`, without style and tone, of any split."""
    background = _pick(rng, BACKGROUNDS)
    if kind == "heads":
        glasses, hat = (bool(flag) for flag in rng.integers(2, size=2))
        return Scene(
            kind, (), background, head=Head(_pick(rng, SKINS), _pick(rng, HAIRS), _pick(rng, MOODS), glasses, hat)
        )
    color = _pick(rng, COLORS)
    if kind == "words":
        return Scene(kind, (Thing("word", color),), background, word=_pick(rng, WORDS))
    first = Thing(_pick(rng, SHAPES), color)
    if kind == "objects":
        return Scene(kind, (first,), background)
    if kind == "counts":
        return Scene(kind, (first,), background, count=int(rng.integers(2, 5)))
    # Two things never share a colour: each is named by its colour, and who is left of whom stays decidable.
    second = Thing(_pick(rng, SHAPES), _pick(rng, [other for other in COLORS if other != color]))
    relation = _pick(rng, RELATIONS) if kind == "relations" else ""
    return Scene(kind, (first, second), background, relation=relation)


def _shares(subset: str) -> tuple[dict[str, float], float, float]:
    """`(share of each kind, share of styled, share of toned)` of a subset."""
    if subset == "all":
        return KINDS, STYLE_SHARE, TONE_SHARE
    if subset in KINDS:
        return {subset: 1.0}, 0.0, 0.0
    if subset == "compositional":
        return {kind: KINDS[kind] for kind in TONED}, 0.0, 0.0
    if subset == "styles":
        return dict.fromkeys(STYLED, 1.0), 1.0, 0.0
    if subset == "tones":
        return dict.fromkeys(TONED, 1.0), 0.0, 1.0
    raise ValueError(f"no playground subset {subset!r} (choose from: {', '.join(SUBSETS)})")


def sample_scene(rng: np.random.Generator, split: str, subset: str = "all") -> Scene:
    """A random scene of a split and a subset; all its randomness comes from `rng`.

    "compositional" is objects, counts, pairs and relations, plain; a kind's name is that kind, plain; "styles" and
    "tones" are scenes that say one. Raises ValueError for an unknown split or subset.
    """
    shares, style_share, tone_share = _shares(subset)
    if split not in SPLITS:
        raise ValueError(f"no playground split {split!r} (choose from: {', '.join(SPLITS)})")
    kinds, weights = list(shares), np.cumsum(list(shares.values()))
    kind = kinds[int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))]
    scene = _draw(rng, kind)
    while scene.split() != split:
        scene = _draw(rng, kind)
    styled, toned = rng.random(2)
    if kind in STYLED and styled < style_share:
        scene = replace(scene, style=_pick(rng, STYLES[1:]))
    if kind in TONED and toned < tone_share:
        scene = replace(scene, tone=_pick(rng, TONES[1:]))
    return scene


def misdescribe(scene: Scene, rng: np.random.Generator, share: float) -> Scene:
    """What a careless caption says of `scene`: every stated fact but a quoted word is wrong with probability `share`.

    The other facts stay, so does the split: a caption that would be of another split is drawn again.
    """
    while True:
        told = _misdescribed(scene, rng, share)
        if told.split() == scene.split():
            return told


def _misdescribed(scene: Scene, rng: np.random.Generator, share: float) -> Scene:
    def told(true: str, options: Sequence[str]) -> str:
        return _pick(rng, [other for other in options if other != true]) if rng.random() < share else true

    things: list[Thing] = []
    for thing in scene.things:
        taken = [other.color for other in (*things, *scene.things) if other is not thing]
        color = told(thing.color, [color for color in COLORS if color not in taken])
        things.append(Thing(thing.shape if scene.word else told(thing.shape, SHAPES), color))
    head = scene.head
    if head is not None:
        glasses, hat = (yes != (rng.random() < share) for yes in (head.glasses, head.hat))
        head = Head(told(head.skin, SKINS), told(head.hair, HAIRS), told(head.mood, MOODS), glasses, hat)
    return replace(
        scene,
        things=tuple(things),
        background=told(scene.background, BACKGROUNDS),
        count=int(told(str(scene.count), [str(value) for value in NUMBERS.values()])) if scene.count > 1 else 1,
        relation=told(scene.relation, RELATIONS) if scene.relation else "",
        head=head,
        style=told(scene.style, STYLES[1:]) if scene.style != "filled" else scene.style,
        tone=told(scene.tone, TONES[1:]) if scene.tone != "normal" else scene.tone,
    )


@functools.cache
def _prompt_set(subset: str, split: str) -> tuple[str, ...]:
    seed = int.from_bytes(hashlib.sha256(f"{subset}/{split}".encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    misses = 0
    while len(found) < SET_LIMIT and misses < 400:  # so many in a row mean that (almost) all are found
        text = sample_scene(rng, split, subset).text()
        misses = misses + 1 if text in found else 0
        found[text] = None
    return tuple(found)


def prompt_set(subset: str, split: str) -> list[str]:
    """At most 2,000 distinct prompts of a subset and a split, always the same ones in the same (random) order."""
    return list(_prompt_set(subset, split))
