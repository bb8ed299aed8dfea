"""DivGenBench's prompts: four dimensions of templates and keywords (D2-Align, arXiv 2512.24146), or a world's own.

Portraits and studio shots are files, which `scripts/prompts/divgen.py` wrote.

Every prompt's metadata has "dimension", "keyword" (what the report groups by) and what else its template says. A
dimension's prompts are in rounds over its keywords, so that every beginning of them covers the keywords evenly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diffrl.additions.prompt_sets import prompts as prompts_of
from diffrl.errors import UserError
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import write_text
from diffrl.resources import shipped
from diffrl.worlds import worlds

DIMENSIONS = ("id", "style", "layout", "tonal")
BASE = "assets/prompts/divgen_base.txt"
TOTAL = 3200
SMALL = 80  # prompts of each dimension in the small set


def world_names() -> list[str]:
    """Whose prompts and extractors there are: "general", and the worlds that have some."""
    return ["general", *(name for name, world in worlds().items() if world.divgen)]


def world_of(model: str) -> str:
    """Whose prompts and extractors a model is measured with."""
    return model if model in world_names() else "general"


def benchmark(world: str = "general", *, total: int = TOTAL, base: str = BASE) -> list[Prompt]:
    """The prompts of all four dimensions, one dimension after another; always the same ones.

    Args:
        world: "general", or the world whose language they are written in.
        total: number of prompts, a quarter of them in each dimension, as far as a world has so many different ones.
        base: file of base prompts of the general style and tonal dimensions.

    Raises:
        UserError: more prompts are asked for than there are different ones, or the file cannot be read.
    """
    if world != "general":
        return worlds()[world].divgen.benchmark(total)
    each = shares(total, [total] * 4)
    texts = [prompt.text for prompt in load_prompts(base)]
    prompts = []
    for dimension, count in zip(DIMENSIONS, each, strict=True):
        if dimension in keywords():
            prompts += _based(dimension, texts, count)
        else:
            prompts += take(prompts_of("divgen", dimension), count)
    return prompts


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
    """The keywords that go with base prompts, by dimension."""
    return yaml.safe_load(shipped("assets", "prompts", "divgen.yaml").read_text(encoding="utf-8"))


def shares(total: int, most: Sequence[int]) -> list[int]:
    """`total` over parts as evenly as their limits allow, the earlier ones getting the remainder."""
    counts = [0] * len(most)
    for number, i in enumerate(sorted(range(len(most)), key=lambda i: most[i])):
        counts[i] = min(most[i], -(-(total - sum(counts)) // (len(most) - number)))
    return counts


def take(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    if count > len(prompts):
        raise UserError(f"{count} prompts asked for in one dimension, and there are {len(prompts)} different ones")
    return list(prompts[:count])


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
        prompts.append(Prompt(text, {"dimension": dimension, "keyword": word, "base": base}))
    return prompts
