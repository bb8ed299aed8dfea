"""The playground's language: what a prompt says of a picture, how it says it, and the splits of prompts.

Six forms of prompt, lower case, at most 16 tokens with begin and end (one per word or mark, one per quoted letter):

    objects    a red circle on white          a heart          a blue shape, striped
    counts     three red circles on black     two stars        four pink shapes, dark
    pairs      a red circle and a blue square on gray          a star and a heart
    relations  a red circle left of a blue square on white     a star above a heart, outlined, pale
    words      the word "kup" in red on white                  the word "lax"
    heads      a smiling tan head with red hair, glasses and no hat on white      a head with a hat

A prompt **says** some facts of a scene and leaves the others free. A caption is the kind of scene and what is said;
what is not said is never wrong. Which facts are said does not depend on their values, so that what is left free keeps
the world's own distribution (`scenes.complete`).

Prompts are split by a hash of what they say, style and tone left out and the order of naming undone ("a left of b" is
"b right of a"), so what a test prompt says together is said together by no training prompt, in any words. Prompts with
a quoted word are split by the word.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffrl.errors import UserError, nearest
from diffrl.resources import table_beside

WORLD: dict[str, Any] = table_beside(__file__, "world.yaml")
NUMBERS = {"two": 2, "three": 3, "four": 4}
LETTERS = "aehkloptux"
KINDS: dict[str, float] = {kind: one["share"] for kind, one in WORLD["kinds"].items()}
SHAPED = ("objects", "counts", "pairs", "relations")
TWO_THINGS = ("pairs", "relations")
# Of prompts: their kinds, and the fact that they must say or "".
SUBSETS = {"all": (tuple(KINDS), ""), "compositional": (SHAPED, ""), **{kind: ((kind,), "") for kind in KINDS}}
SUBSETS |= {"styles": (SHAPED, "style"), "tones": (SHAPED, "tone")}
SPLITS = ("train", "validation", "test")
SPLIT_OF_TENTH = ("train",) * 8 + ("validation", "test")

NAMES: dict[str, tuple[str, ...]] = {kind: tuple(one["facts"]) for kind, one in WORLD["kinds"].items()}
ALWAYS: dict[str, tuple[str, ...]] = {kind: tuple(one["always"]) for kind, one in WORLD["kinds"].items()}
SAID: dict[str, float] = WORLD["said"]
MOST_OF_A_HEAD = 4  # five features do not fit into 16 tokens
VALUES: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in WORLD["values"].items()}
SHAPES, COLORS, BACKGROUNDS = VALUES["shape"], VALUES["color"], VALUES["background"]
STYLES, TONES, RELATIONS = VALUES["style"], VALUES["tone"], VALUES["relation"]
SKINS, HAIRS, MOODS, WORDS = VALUES["skin"], VALUES["hair"], VALUES["mood"], VALUES["word"]

_FEATURES = ("skin", "hair", "mood", "glasses", "hat")
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_NUMBER_OF = {str(value): name for name, value in NUMBERS.items()}


@dataclass(frozen=True)
class Caption:
    """What a prompt says: the kind of scene, and the value of each stated fact (`attributes`, by name)."""

    kind: str
    attributes: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The prompt."""
        ground = f" on {self.attributes['background']}" if "background" in self.attributes else ""
        look = "".join(f", {self.attributes[name]}" for name in ("style", "tone") if name in self.attributes)
        return _subject(self) + ground + look

    def content(self) -> str:
        """What the split is decided by: the word, or the prompt without style and tone, the things in a fixed order."""
        if self.kind == "words":
            return self.attributes["word"]
        attributes = {name: value for name, value in self.attributes.items() if name not in ("style", "tone")}
        if self.kind in TWO_THINGS and attributes["shape/1"] > attributes["shape/2"]:
            attributes = swapped(attributes)
        return Caption(self.kind, attributes).text()

    def split(self) -> str:
        """ "train", "validation" or "test" (80, 10 and 10 %)."""
        return _split_of(self.content())


def kind_of(name: str) -> str:
    """The kind of a fact by its name: "shape" of "shape/2"."""
    return name.partition("/")[0]


def swapped(attributes: Mapping[str, str]) -> dict[str, str]:
    """The same facts of two things named in the other order."""
    turned = {"1": "2", "2": "1"}
    result = {}
    for name, value in attributes.items():
        kind, _, number = name.partition("/")
        result[f"{kind}/{turned[number]}" if number else name] = _OPPOSITE[value] if name == "relation" else value
    return result


def facts(caption: Caption) -> dict[str, str]:
    """What a caption claims, by the facts' names and in a fixed order; what it does not say is no fact."""
    return {name: caption.attributes[name] for name in NAMES[caption.kind] if name in caption.attributes}


def _subject(caption: Caption) -> str:
    attributes, kind = caption.attributes, caption.kind
    if kind == "heads":
        return _head(attributes)
    if kind == "words":
        return f'the word "{attributes["word"]}"' + (f" in {attributes['color']}" if "color" in attributes else "")
    if kind == "counts":
        parts = (_NUMBER_OF[attributes["count"]], attributes.get("color", ""), attributes.get("shape", "shape") + "s")
        return " ".join(part for part in parts if part)
    if kind == "objects":
        return _thing(attributes.get("shape", "shape"), attributes.get("color", ""))
    first, second = (_thing(attributes[f"shape/{i}"], attributes.get(f"color/{i}", "")) for i in (1, 2))
    return f"{first} {attributes.get('relation', 'and')} {second}"


def _thing(shape: str, color: str) -> str:
    return f"a {color} {shape}" if color else f"a {shape}"


def _head(attributes: Mapping[str, str]) -> str:
    words = ["a", attributes.get("mood", ""), attributes.get("skin", ""), "head"]
    parts = [f"{attributes['hair']} hair"] if "hair" in attributes else []
    parts += [{"yes": "glasses", "no": "no glasses"}[attributes["glasses"]]] if "glasses" in attributes else []
    parts += [{"yes": "a hat", "no": "no hat"}[attributes["hat"]]] if "hat" in attributes else []
    listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
    return " ".join(word for word in words if word) + (f" with {listed}" if listed else "")


@functools.lru_cache(maxsize=1 << 16)
def _split_of(content: str) -> str:
    return SPLIT_OF_TENTH[int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 10]


def _either(options: Sequence[str], name: str) -> str:
    return f"(?P<{name}>{'|'.join(options)})"


def _one(i: int, shapes: Sequence[str]) -> str:
    return f"a (?:{_either(COLORS, f'color{i}')} )?{_either(shapes, f'shape{i}')}"


_END = f"(?: on {_either(BACKGROUNDS, 'background')})?(?:, {_either(STYLES, 'style')})?(?:, {_either(TONES, 'tone')})?"
_ANY = (*SHAPES, "shape")
_FORMS = {
    "objects": re.compile(_one(0, _ANY) + _END),
    "counts": re.compile(
        f"{_either(tuple(NUMBERS), 'count')} (?:{_either(COLORS, 'color0')} )?{_either(_ANY, 'shape0')}s{_END}"
    ),
    "pairs": re.compile(f"{_one(1, SHAPES)} and {_one(2, SHAPES)}{_END}"),
    "relations": re.compile(f"{_one(1, SHAPES)} {_either(RELATIONS, 'relation')} {_one(2, SHAPES)}{_END}"),
    "words": re.compile(f'the word "(?P<word>[a-z]+)"(?: in {_either(COLORS, "color0")})?{_END}'),
    "heads": re.compile(
        f"a (?:{_either(MOODS, 'mood')} )?(?:{_either(SKINS, 'skin')} )?head(?: with (?:{_either(HAIRS, 'hair')} hair)?"
        f"(?:,? ?(?:and )?(?P<glasses>glasses|no glasses))?(?: ?(?:and )?(?P<hat>a hat|no hat))?)?{_END}"
    ),
}


@functools.lru_cache(maxsize=1 << 16)
def understood(text: str) -> Caption | None:
    """What a prompt says, or None if it is not of the world. Remembered: every image of a prompt asks."""
    text = text.strip()
    for kind, form in _FORMS.items():
        match = form.fullmatch(text)
        if match is None:
            continue
        groups = {name: value for name, value in match.groupdict().items() if value}
        caption = Caption(kind, _attributes_of(kind, groups))
        if possible(caption) and caption.text() == text:
            return caption
    return None


def foreign(texts: Sequence[str]) -> str:
    """One line on those that are not of the world, empty where all are."""
    strange = [text for text in texts if understood(text) is None]
    if not strange:
        return ""
    example = " ".join(strange[0].split())
    shown = example if len(example) <= 60 else f"{example[:60]} ..."
    return (
        f"{len(strange)} of {len(texts)} prompts are not in the playground's language, which is all that its model "
        f'and its verifier understand, such as "{shown}"; a valid one: "a red circle on white"'
    )


def parse(text: str) -> Caption:
    """What a prompt says. Raises ValueError if the prompt is not of the world."""
    caption = understood(text)
    if caption is None:
        raise ValueError(f"not a prompt of the playground: {text.strip()!r} (a valid one: 'a red circle on white')")
    return caption


def _attributes_of(kind: str, groups: Mapping[str, str]) -> dict[str, str]:
    """What the groups of a form's match say, under the facts' names and in their order."""
    attributes = dict(groups)
    if "count" in attributes:
        attributes["count"] = str(NUMBERS[attributes["count"]])
    for name in ("glasses", "hat"):
        if name in attributes:
            attributes[name] = "no" if attributes[name].startswith("no") else "yes"
    if attributes.get("shape0") == "shape":
        del attributes["shape0"]
    named = {name.replace("0", "").replace("1", "/1").replace("2", "/2"): value for name, value in attributes.items()}
    return {name: named[name] for name in NAMES[kind] if name in named}


def possible(caption: Caption) -> bool:
    """Whether the world holds such a scene and has such a prompt: two things differ in shape and in colour, a thing's
    shape or colour is said, at most four features of a head are, and words are the world's.
    """
    attributes = caption.attributes
    if any(attributes.get(f"{name}/1", "1") == attributes.get(f"{name}/2", "2") for name in ("shape", "color")):
        return False
    if caption.kind in ("objects", "counts") and not ("shape" in attributes or "color" in attributes):
        return False
    if caption.kind == "words":
        return attributes["word"] in WORDS and not ("style" in attributes or "tone" in attributes)
    if caption.kind == "heads":
        features = sum(name in attributes for name in _FEATURES)
        return features <= MOST_OF_A_HEAD and not ("style" in attributes or "tone" in attributes)
    return True


def pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of the options, each equally likely."""
    return options[int(rng.integers(len(options)))]


@functools.cache
def _chances(kind: str) -> tuple[tuple[str, float], ...]:
    """How often a prompt of `kind` says each of its facts."""
    always = ALWAYS.get(kind, ())
    return tuple((name, 1.0 if name in always else SAID[kind_of(name)]) for name in NAMES[kind])


def stated_names(kind: str, rng: np.random.Generator) -> tuple[str, ...]:
    """Which facts a prompt of `kind` says, at random and whatever their values are."""
    chances = _chances(kind)
    while True:
        drawn = rng.random(len(chances)).tolist()
        names = tuple([name for (name, chance), u in zip(chances, drawn, strict=True) if u < chance])
        if kind in ("objects", "counts") and "shape" not in names and "color" not in names:
            continue
        if kind == "heads" and not 1 <= sum(name in _FEATURES for name in names) <= MOST_OF_A_HEAD:
            continue
        return names


def misdescribe(caption: Caption, rng: np.random.Generator, share: float) -> Caption:
    """What a careless prompt says instead: every stated fact but a quoted word is wrong with probability `share`.

    The same facts are said. The split stays, too, but where 50 tries find none of it ("a head with a hat" has one
    opposite only).
    """
    tries = 0
    while True:
        attributes = {}
        for name, true in caption.attributes.items():
            wrong = name != "word" and rng.random() < share
            attributes[name] = pick(rng, [value for value in VALUES[kind_of(name)] if value != true]) if wrong else true
        misdescribed = Caption(caption.kind, attributes)
        tries += possible(misdescribed)
        if possible(misdescribed) and (misdescribed.split() == caption.split() or tries > 50):
            return misdescribed


def shares_of(subset: str) -> tuple[dict[str, float], str]:
    """`(share of each kind, the fact that its prompts must say or "")` of a subset; ValueError for an unknown one."""
    if subset not in SUBSETS:
        raise ValueError(f"no playground subset {subset!r} (choose from: {', '.join(SUBSETS)})")
    kinds, must = SUBSETS[subset]
    return {kind: KINDS[kind] for kind in kinds}, must


def named_set(source: str) -> tuple[str, str]:
    """(subset, split) of a prompt set `playground/SUBSET/SPLIT`; UserError for a name that is none."""
    parts = source.split("/")
    if len(parts) != 3:
        text = "write playground/SUBSET/SPLIT, for example playground/compositional/train"
        raise UserError(f'prompt set "{source}": {text}')
    for name, choices, what in ((parts[1], SUBSETS, "subset"), (parts[2], SPLITS, "split")):
        if name not in choices:
            raise UserError(f'prompt set "{source}": unknown {what} "{name}"{nearest(name, choices)}')
    return parts[1], parts[2]
