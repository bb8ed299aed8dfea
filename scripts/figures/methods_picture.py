"""What several trained models draw: the same prompts and the same noise, a row for each.

    python scripts/figures/methods_picture.py base= "D2-Align=runs/d2/lora" --out assets/images/d2align.png

A label without a folder is the model before training. The prompts are the first of the test set, which is in random
order: they are not chosen by how the pictures look. A frame is green where the verifier finds every stated fact.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from demo_picture import pictures, sheet

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
    loras = dict(text.partition("=")[::2] for text in args.models)
    drawn = {label: pictures(prompts, lora or None) for label, lora in loras.items()}
    right = {label: [verdict.all_right for verdict in verify(images, texts)] for label, images in drawn.items()}
    sheet(args.out, texts, drawn, right, columns=len(texts))


if __name__ == "__main__":
    main()
