"""What several trained models draw: the same prompts and the same noise, a row for each.

    python scripts/figures/methods_picture.py base= "D2-Align=runs/d2/lora" --out assets/images/d2align.png

A label without a folder is the model before training. The prompts are the first of the test set, which is in random
order: they are not chosen by how the pictures look. A frame is green where the verifier finds every stated fact.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from demo_picture import pictures, show

from diffrl.playground.verifier import verify
from diffrl.prompts import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="LABEL=[LORA]")
    parser.add_argument("--prompts", default="playground/compositional/test")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = load_prompts(args.prompts)[: args.count]
    texts = [prompt.text for prompt in prompts]
    size = (1.15 * len(prompts), 1.15 * len(args.models) + 0.35)
    figure, axes = plt.subplots(len(args.models), len(prompts), figsize=size, squeeze=False)
    for row, text in zip(axes, args.models, strict=True):
        label, _, lora = text.partition("=")
        drawn = pictures(prompts, lora or None)
        for axis, image, verdict in zip(row, drawn, verify(drawn, texts), strict=True):
            axis.set_axis_off()
            show(axis, image, verdict.all_right)
        row[0].set_ylabel(textwrap.fill(label, 14), fontsize=8)
    for axis, text in zip(axes[0], texts, strict=True):
        axis.set_title(textwrap.fill(text, 18), fontsize=6)
    figure.tight_layout(pad=0.3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
