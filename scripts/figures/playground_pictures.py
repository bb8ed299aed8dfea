"""Draw the README's picture of the playground: prompts, what the renderer draws, what the shipped generator draws.

python scripts/figures/playground_pictures.py --out assets/images/playground.png [--lora runs/demo/lora]
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from demo_picture import pictures as drawn

from diffrl.playground.renderer import draw
from diffrl.prompts import Prompt

PROMPTS = (
    "a heart",
    "a red shape on white",
    "three blue circles on gray",
    "two stars, striped",
    "a green square left of a pink circle on white",
    "a star above a heart",
    'the word "lex" in red on white',
    "a smiling tan head with blue hair and a hat",
)
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", help="also draw with this LoRA")
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [("true (renderer)", [draw(prompt, rng) for prompt in args.prompts])]
    for title, lora in {"generator": None, "after RL": args.lora}.items():
        if lora is not None or title == "generator":
            pixels = drawn([Prompt(text) for text in args.prompts], lora, SEEDS)
            rows += [(f"{title}, seed {seed}", list(pixels[seed::SEEDS])) for seed in range(SEEDS)]
    figure, axes = plt.subplots(len(rows), len(args.prompts), figsize=(1.5 * len(args.prompts), 1.5 * len(rows) + 0.7))
    for row, (title, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            axis = axes[row][column]
            axis.imshow(picture, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(textwrap.fill(args.prompts[column], 20), fontsize=7)
        axes[row][0].set_ylabel(title, fontsize=8)
    figure.tight_layout(pad=0.4)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
