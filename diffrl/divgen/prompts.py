"""DivGenBench's prompts: four dimensions of templates and keywords (D2-Align, arXiv 2512.24146), and the playground's.

Every prompt's metadata has "dimension", "keyword" (what the report groups by) and what else its template says. A
dimension's prompts are in rounds over its keywords, so that every beginning of them covers the keywords evenly.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diffrl.errors import UserError
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import write_text
from diffrl.resources import shipped
from diffrl.seeds import seed_of

DIMENSIONS = ("id", "style", "layout", "tonal")
WORLDS = ("general", "playground")
BASE = "assets/prompts/divgen_base.txt"
TOTAL = 3200
SMALL = 80  # prompts of each dimension in the small set


def world_of(model: str) -> str:
    """Whose prompts and extractors a model is measured with: "playground" or "general"."""
    return "playground" if model == "playground" else "general"


def benchmark(world: str = "general", *, total: int = TOTAL, base: str = BASE) -> list[Prompt]:
    """The prompts of all four dimensions, one dimension after another; always the same ones.

    Args:
        world: "general", or "playground" for prompts of the playground's grammar.
        total: number of prompts, a quarter of them in each dimension. The playground has no more than 912 different
            prompts of heads; its other dimensions share what its ID dimension lacks.
        base: file of base prompts of the general style and tonal dimensions.

    Raises:
        UserError: more prompts are asked for than there are different ones, or the file cannot be read.
    """
    if world == "playground":
        heads = _heads()
        counts = _split(total, [len(heads), total, total, total])
        parts = [heads, _styled(), _counted(), _toned()]
        return [prompt for part, count in zip(parts, counts, strict=True) for prompt in _first(part, count)]
    each = _split(total, [total] * 4)
    texts = [prompt.text for prompt in load_prompts(base)]
    makers = (_portraits, lambda n: _based("style", texts, n), _studio_shots, lambda n: _based("tonal", texts, n))
    return [prompt for maker, count in zip(makers, each, strict=True) for prompt in maker(count)]


def small(prompts: Sequence[Prompt], each: int = SMALL) -> list[Prompt]:
    """The first `each` prompts of every dimension; they cover the keywords as evenly as all of them do."""
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        dimension = prompt.metadata.get("dimension", "")
        counts[dimension] += 1
        if counts[dimension] <= each:
            chosen.append(prompt)
    return chosen


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write a .jsonl file that `diffrl.prompts.load_prompts` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt.text, **prompt.metadata}, ensure_ascii=False) for prompt in prompts]
    write_text(path, "\n".join(lines) + "\n")


@cache
def keywords() -> dict[str, Any]:
    """The shipped keyword lists."""
    return yaml.safe_load(shipped("assets", "prompts", "divgen.yaml").read_text(encoding="utf-8"))


def _split(total: int, most: Sequence[int]) -> list[int]:
    """`total` over parts as evenly as their limits allow, the earlier ones getting the remainder."""
    counts = [0] * len(most)
    for number, i in enumerate(sorted(range(len(most)), key=lambda i: most[i])):
        counts[i] = min(most[i], -(-(total - sum(counts)) // (len(most) - number)))
    return counts


def _first(prompts: list[Prompt], count: int) -> list[Prompt]:
    if count > len(prompts):
        raise UserError(f"{count} prompts asked for in one dimension, and there are {len(prompts)} different ones")
    return prompts[:count]


def _article(words: str) -> str:
    return "an" if words[0].lower() in "aeiou" else "a"


def _portraits(count: int) -> list[Prompt]:
    """Each attribute in turn, with the least used age, ethnicity and gender that it does not contradict."""
    lists = keywords()["id"]
    axes = {"age": lists["ages"], "ethnicity": lists["ethnicities"], "gender": lists["genders"]}
    used: Counter[tuple[str, str]] = Counter()
    seen: set[str] = set()
    prompts = []
    for attribute, limits in itertools.islice(itertools.cycle(lists["attributes"].items()), count):
        people = list(itertools.product(*(limits.get(axis, values) for axis, values in axes.items())))
        features = [attribute, *(f"{attribute} and {second}" for second in lists["second"] if second != attribute)]
        free = [
            (rank, person)
            for rank, with_ in enumerate(features)
            for person in people
            if _portrait(person, with_) not in seen
        ]
        if not free:
            raise UserError(f"{count} prompts asked for in the ID dimension; there are fewer different ones")

        def crowd(choice: tuple[int, tuple[str, ...]]) -> tuple[int, int]:
            """One feature before two; then how often the words are used already, each list counted by its length."""
            words = zip(axes.items(), choice[1], strict=True)
            return choice[0], sum(len(values) * used[axis, word] for (axis, values), word in words)

        rank, person = min(free, key=crowd)
        text = _portrait(person, features[rank])
        seen.add(text)
        attributes = dict(zip(axes, person, strict=True))
        used.update(attributes.items())
        prompts.append(Prompt(text, _metadata("id", attribute, **attributes)))
    return prompts


def _portrait(person: Sequence[str], features: str) -> str:
    words = " ".join(person)
    return f"a high-quality portrait photo of {_article(words)} {words} with {features}"


def _based(dimension: str, bases: Sequence[str], count: int) -> list[Prompt]:
    """Keyword i with base prompt i, both lists in rounds; where the rounds meet again, the second list moves on one."""
    words: list[str] = keywords()[dimension]
    if count > len(words) * len(bases):
        most = f"{len(words)} keywords x {len(bases)} base prompts"
        raise UserError(f"{count} prompts asked for in the {dimension} dimension; {most} give fewer")
    round_trip = int(np.lcm(len(words), len(bases)))
    prompts = []
    for i in range(count):
        word, base = words[i % len(words)], bases[(i + i // round_trip) % len(bases)]
        text = f"a painting in the style of {word}, depicting {base}"
        if dimension == "tonal":
            text = f"an image of {base}, rendered with {word} properties"
        prompts.append(Prompt(text, _metadata(dimension, word, base=base)))
    return prompts


def _studio_shots(count: int) -> list[Prompt]:
    """Every number of every object, and then two different objects, since the paper's template has 320 fillings only.

    The keyword is the (first) object; "objects" has the names that a detector is asked for, with their numbers.
    """
    lists = keywords()["layout"]
    numbers, plurals = list(lists["numbers"].items()), list(lists["objects"].items())
    size, prompts = len(plurals), []
    for i in range(count):
        turn, k = divmod(i, size)
        named = [(plurals[k], numbers[(turn + k) % len(numbers)])]
        if turn >= len(numbers):
            other = turn - len(numbers)
            if other >= size - 1:
                raise UserError(f"{count} prompts asked for in the layout dimension; there are fewer different ones")
            # A stride without a common factor with the number of objects: every object is second equally often.
            named.append(
                (plurals[(k + 1 + (7 * other) % (size - 1)) % size], numbers[(2 * turn + k + 1) % len(numbers)])
            )
        things = " and ".join(f"{word} {plural}" for (_, plural), (word, _) in named)
        objects = {name: number for (name, _), (_, number) in named}
        text = f"a studio shot of {things} on a clean white background"
        prompts.append(Prompt(text, _metadata("layout", plurals[k][0], number=named[0][1][1], objects=objects)))
    return prompts


def _metadata(dimension: str, keyword: str, **more: Any) -> dict[str, Any]:
    return {"dimension": dimension, "keyword": keyword, **more}


# --- the playground's own, in its grammar ----------------------------------------------------------------------------


def _rounds(dimension: str, tables: dict[str, list[Any]]) -> list[Prompt]:
    """Captions in rounds over their keywords, shuffled within each; as many rounds as the shortest list has."""
    columns = []
    for keyword, captions in tables.items():
        bits = np.random.PCG64(seed_of("divgen", dimension, keyword)).random_raw(len(captions))
        columns.append([(keyword, captions[i].text()) for i in np.argsort(bits, kind="stable")])
    rows = zip(*columns, strict=False)
    return [Prompt(text, _metadata(dimension, keyword)) for row in rows for keyword, text in row]


def _captions(kind: str, always: dict[str, str], options: dict[str, Sequence[str]]) -> list[Any]:
    """All captions of a kind that say `always`, and of every option one of its values or nothing, if it has ""."""
    from diffrl_playground.grammar import NAMES, Caption, possible

    captions = []
    for values in itertools.product(*options.values()):
        attributes = always | {name: value for name, value in zip(options, values, strict=True) if value}
        caption = Caption(kind, {name: attributes[name] for name in NAMES[kind] if name in attributes})
        if possible(caption):
            captions.append(caption)
    return captions


def _heads() -> list[Prompt]:
    from diffrl_playground.grammar import BACKGROUNDS, HAIRS, MOODS, SKINS, YES_NO

    rest: dict[str, Sequence[str]] = {
        "mood": ("", *MOODS),
        "glasses": ("", *YES_NO),
        "hat": ("", *YES_NO),
        "background": ("", *BACKGROUNDS),
    }
    tables = {
        f"{skin} skin, {hair} hair": _captions("heads", {"skin": skin, "hair": hair}, rest)
        for skin, hair in itertools.product(SKINS, HAIRS)
    }
    return _rounds("id", tables)


def _of_shapes(attributes: dict[str, str]) -> list[Any]:
    """Captions of one coloured thing, and of two in the shapes' order, with `attributes`; grounds free or not."""
    from diffrl_playground.grammar import BACKGROUNDS, COLORS, SHAPES

    ground: dict[str, Sequence[str]] = {"background": ("", *BACKGROUNDS)}
    captions = _captions("objects", attributes, {"shape": SHAPES, "color": COLORS, **ground})
    for first, second in itertools.combinations(SHAPES, 2):
        shapes = {"shape/1": first, "shape/2": second}
        captions += _captions("pairs", attributes | shapes, {"color/1": COLORS, "color/2": COLORS, **ground})
    return captions


def _styled() -> list[Prompt]:
    from diffrl_playground.grammar import STYLES

    return _rounds("style", {style: _of_shapes({"style": style}) for style in STYLES})


def _counted() -> list[Prompt]:
    from diffrl_playground.grammar import BACKGROUNDS, COLORS, NUMBERS, SHAPES, TONES

    options: dict[str, Sequence[str]] = {
        "shape": SHAPES,
        "color": COLORS,
        "background": ("", *BACKGROUNDS),
        "tone": ("", *TONES),
    }
    return _rounds("layout", {w: _captions("counts", {"count": str(n)}, options) for w, n in NUMBERS.items()})


def _toned() -> list[Prompt]:
    from diffrl_playground.grammar import TONES

    return _rounds("tonal", {tone: _of_shapes({"tone": tone}) for tone in TONES})
