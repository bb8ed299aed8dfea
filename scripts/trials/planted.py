"""How much the preference model likes what its raters like: the planted points, measured one fact at a time.

    python scripts/trials/planted.py --out assets/results/planted.json

For each prompt of the test split that leaves style and tone free, one scene is rendered in every style and every tone,
all else equal, and once with one stated fact wrong. A difference of two scores is in points, the unit of the raters.
Pairs whose facts are random, as raters saw them, show how often the model's choice is the one that raters like better.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.playground import grammar
from diffrl.playground.grammar import STYLES, TONES, Caption
from diffrl.playground.renderer import render
from diffrl.playground.scenes import Scene, complete, sample_caption
from diffrl.playground.taste import BIAS, RIGHT, preference_of
from diffrl.rewards import load_reward

VALUES = {"style": STYLES, "tone": TONES}


def pictures(scenes: Sequence[Scene]) -> Tensor:
    """(N, 3, 64, 64) in [0, 1]."""
    return torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2) / 255.0


def scores(reward: Any, scenes: list[Scene], texts: list[str]) -> np.ndarray:
    """Points (N,) of rendered scenes."""
    images = pictures(scenes)
    batches = [(images[i : i + 64], texts[i : i + 64]) for i in range(0, len(texts), 64)]
    parts = [reward(batch, words, [{}] * len(words)) for batch, words in batches]
    return torch.cat([part if isinstance(part, Tensor) else torch.tensor(part) for part in parts]).float().numpy()


def summary(differences: np.ndarray) -> dict[str, float]:
    """Mean, deviation, and the 95 % half width of the mean."""
    spread = float(differences.std(ddof=1))
    return {
        "mean": round(float(differences.mean()), 3),
        "deviation": round(spread, 3),
        "half_width": round(1.96 * spread / len(differences) ** 0.5, 3),
    }


def free_captions(count: int, rng: np.random.Generator) -> list[Caption]:
    """Captions of drawn shapes that say neither style nor tone."""
    captions: list[Caption] = []
    while len(captions) < count:
        caption = sample_caption(rng, "test")
        if caption.kind in grammar.SHAPED and not {"style", "tone"} & caption.attributes.keys():
            captions.append(caption)
    return captions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    reward: Any = load_reward("preference")
    captions = free_captions(args.prompts, rng)
    texts = [caption.text() for caption in captions]
    base = [complete(caption, rng) for caption in captions]
    command = shlex.join(["python", *sys.argv])
    result: dict[str, Any] = {"command": command, "cpus": os.cpu_count(), "prompts": len(base)}
    for fact, values in VALUES.items():
        liked, points = BIAS[fact]
        by = {
            value: scores(reward, [dataclasses.replace(s, facts={**s.facts, fact: value}) for s in base], texts)
            for value in values
        }
        result[fact] = {"planted": {liked: points}} | {
            f"{liked} over {value}": summary(by[liked] - by[value]) for value in values if value != liked
        }
        first, second = (value for value in values if value != liked)
        result[fact][f"{first} over {second}"] = summary(by[first] - by[second])
    broken = [one_wrong(caption, scene, rng) for caption, scene in zip(captions, base, strict=True)]
    result["a stated fact right"] = {"planted": RIGHT} | summary(
        scores(reward, base, texts) - scores(reward, broken, texts)
    )
    result["choices"] = choices(reward, args.pairs, rng)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def one_wrong(caption: Caption, scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene drawn anew with one said fact, chosen at random, at another value."""
    while True:
        attributes = dict(caption.attributes)
        name = str(rng.choice(sorted(attributes)))
        attributes[name] = str(rng.choice([v for v in grammar.VALUES[grammar.kind_of(name)] if v != attributes[name]]))
        try:
            wrong = complete(Caption(caption.kind, attributes), rng)
        except ValueError:  # two things that would be one
            continue
        style = {fact: scene.facts[fact] for fact in VALUES}
        return dataclasses.replace(wrong, facts={**wrong.facts, **style})


def choices(reward: Any, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """On pairs as raters saw them: how often the model prefers what they prefer on the average."""
    pairs, texts = [], []
    for _ in range(count):
        caption = sample_caption(rng, "test")
        pairs.append([complete(grammar.misdescribe(caption, rng, 0.3), rng) for _ in range(2)])
        texts.append((caption, caption.text()))
    apart = np.array([preference_of(c, a) - preference_of(c, b) for (c, _), (a, b) in zip(texts, pairs, strict=True)])
    words = [text for _, text in texts]
    differences = scores(reward, [a for a, _ in pairs], words) - scores(reward, [b for _, b in pairs], words)
    sure = apart != 0
    return {
        "pairs": int(sure.sum()),
        "as the raters": round(float((np.sign(apart) == np.sign(differences))[sure].mean()), 3),
        "correlation": round(float(np.corrcoef(apart, differences)[0, 1]), 3),
        "slope": round(float(np.polyfit(apart, differences, 1)[0]), 3),
    }


if __name__ == "__main__":
    main()
