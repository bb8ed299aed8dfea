"""What the playground's gold reward holds true, and what fools it: renderings, disturbances, near misses, a search.

    python tests/stress/verifier.py --out assets/results/verifier.json
    python tests/stress/verifier.py --only climb --picture climb.png

Renderings: all facts of prompts of the test split, as drawn. Disturbances: the same pictures as a camera or an editor
changes them (tests/shaken.py). Near misses: one fact that the prompt says is drawn otherwise; a false positive is one
that is all right. Cheats: tests/cheats.py. Climb: pixels are changed by chance, patch by patch, and a change is kept
if the reward does not fall, from noise and from a true rendering of another prompt; what scores high is written as
pictures (start, end), for a person to judge.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

sys.path.insert(0, str(Path(__file__).parents[1]))

from cheats import CHEATS
from shaken import SHAKEN, changed, see, shaken

from diffrl import __version__
from diffrl_playground import grammar
from diffrl_playground.grammar import Caption, parse
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete, sample_caption
from diffrl_playground.verifier import Verdict, judge

CLIMBED = ("a red heart", "two blue stars", "a star left of a circle", 'the word "lax"', "a smiling head with a hat")


def shares(verdicts: list[Verdict]) -> dict[str, float]:
    """Share of the facts that are right, and of the pictures with all facts right."""
    facts = [right for verdict in verdicts for right in verdict.strict.values()]
    return {
        "facts": round(float(np.mean(facts)), 4),
        "all_right": round(float(np.mean([v.all_right for v in verdicts])), 4),
    }


def renderings(count: int, seed: int) -> dict[str, Any]:
    """Pictures as drawn, and after each disturbance."""
    rng = np.random.default_rng(seed)
    captions = [sample_caption(rng, "test", "all") for _ in range(count)]
    images = [render(complete(caption, rng)) for caption in captions]
    found = {"as drawn": shares([judge(see(x), c) for x, c in zip(images, captions, strict=True)])}
    for how in SHAKEN:
        moved = [shaken(image, how, rng) for image in images]
        found[how] = shares([judge(see(x), c) for x, c in zip(moved, captions, strict=True)])
    return {"pictures": count, **found}


def near_misses(count: int, seed: int) -> dict[str, Any]:
    """One fact is drawn otherwise than the prompt says: how often the verdict is "all right" all the same."""
    rng = np.random.default_rng(seed)
    missed: dict[str, list[bool]] = {}
    for kind in rng.choice(list(grammar.KINDS), count):
        scene = complete(Caption(str(kind)), rng)
        caption = scene.describe(grammar.NAMES[scene.kind])
        name = str(rng.choice(list(grammar.NAMES[scene.kind])))
        verdict = judge(see(render(changed(scene, name, rng))), caption)
        missed.setdefault(grammar.kind_of(name), []).append(verdict.all_right)
    every = [right for found in missed.values() for right in found]
    by_fact = {name: round(float(np.mean(found)), 4) for name, found in sorted(missed.items())}
    return {"pictures": count, "false_positives": int(sum(every)), "rate": float(np.mean(every)), "by_fact": by_fact}


def cheats() -> dict[str, Any]:
    verdicts = [(name, judge(see(picture), parse(prompt))) for name, prompt, picture in CHEATS]
    worst = max(verdicts, key=lambda pair: pair[1].score)
    return {"pictures": len(CHEATS), "highest_strict": round(worst[1].score, 3), "which": worst[0]}


def _patch(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image with a soft or hard patch of another colour, of the picture's own or of any."""
    y, x = rng.integers(0, 64, 2)
    height, width = np.maximum(1, rng.geometric(0.12, 2))
    color = image[rng.integers(64), rng.integers(64)] if rng.random() < 0.7 else rng.integers(0, 256, 3)
    mask = np.zeros((64, 64, 1))
    mask[y : y + height, x : x + width] = rng.uniform(0.2, 1.0) if rng.random() < 0.4 else 1.0
    if rng.random() < 0.3:
        mask = ndimage.gaussian_filter(mask, (1, 1, 0))
    return (image * (1 - mask) + mask * color).round().astype(np.uint8)


def climb(steps: int, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """The figures of each climb, and pictures (rows: climbs; start, end)."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    strips = []
    for prompt in CLIMBED:
        caption = parse(prompt)
        true = judge(see(render(complete(caption, rng))), caption)
        other = next(c for c in iter(lambda: sample_caption(rng, "test", "all"), None) if c.kind != caption.kind)
        starts = {"noise": rng.integers(0, 256, (64, 64, 3)).astype(np.uint8), "another": render(complete(other, rng))}
        for name, start in starts.items():
            image, best = start, judge(see(start), caption)
            first = best.reward
            for _ in range(steps):
                tried = _patch(image, rng)
                verdict = judge(see(tried), caption)
                if verdict.reward >= best.reward:
                    image, best = tried, verdict
            rows.append(
                {"prompt": prompt, "start": name, "reward": [round(float(first), 3), round(float(best.reward), 3)]}
                | {"strict": round(float(best.score), 3), "true_reward": round(float(true.reward), 3)}
            )
            strips.append(np.concatenate([start, image], axis=1))
    return {"steps": steps, "climbs": rows, "highest_strict": max(row["strict"] for row in rows)}, np.concatenate(
        strips
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="pictures of each part")
    parser.add_argument("--steps", type=int, default=4000, help="tries of each climb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("renderings", "misses", "cheats", "climb"), nargs="+")
    parser.add_argument("--picture", type=Path, help="write the climbs' starts and ends")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = args.only or ["renderings", "misses", "cheats", "climb"]
    # Parts of several calls come together in one file.
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found |= {"commands": [*found.get("commands", []), "python " + shlex.join(sys.argv)]}
    found |= {"diffrl": __version__, "cpus": os.cpu_count()}
    if "renderings" in parts:
        found["renderings"] = renderings(args.count, args.seed)
    if "misses" in parts:
        found["near_misses"] = near_misses(args.count, args.seed)
    if "cheats" in parts:
        found["cheats"] = cheats()
    if "climb" in parts:
        found["climb"], pictures = climb(args.steps, args.seed)
        if args.picture:
            Image.fromarray(pictures).resize((pictures.shape[1] * 2, pictures.shape[0] * 2), 0).save(args.picture)
    text = json.dumps(found, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
