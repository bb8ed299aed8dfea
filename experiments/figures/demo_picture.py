"""What several models draw, before and after training: the same prompts and the same noise, a row for each.

    make demo && python -m experiments.figures.demo_picture before= after=runs/demo/lora --count 24 \\
        --out assets/images/demo.png --result assets/results/demo.json
    python -m experiments.figures.demo_picture base= "D2-Align=runs/d2/lora" --out assets/images/d2align.png
    python -m experiments.figures.demo_picture world=true generator= --each 3 --out assets/images/playground.png \\
        --texts "a heart" "three blue circles on gray" "two stars, striped" "a green square left of a pink circle" \\
        "a star above a heart" 'the word "lex" in red on white' "a smiling tan head with blue hair and a hat"

Without --texts the prompts are the first of the test set, which is in random order: they are not chosen by how the
pictures look. LABEL=true are true renderings. A frame is green where the verifier finds every stated fact, red where it
does not. --result keeps what the run measured.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from diffrl.drawing import Drawing
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.tracking import read_metrics
from diffrl.rollout import generate
from diffrl_playground.renderer import draw
from diffrl_playground.verifier import verify


def pictures(prompts: list[Prompt], lora: str, each: int) -> list[np.ndarray]:
    """`each` images of each prompt by a LoRA ("": none), uint8 (prompts, 64, 64, 3) each; of "true" one rendering."""
    if lora == "true":
        rng = np.random.default_rng(0)
        return [np.stack([draw(prompt.text, rng) for prompt in prompts])]
    drawing = Drawing("playground", lora=lora or None)
    policy = drawing.policy()
    drawn = generate(policy, prompts, drawing.spec(policy), seed=0, per_prompt=each, batch_size=64)
    images = torch.cat([batch for _, batch in drawn])
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [pixels[i::each] for i in range(each)]


def sheet(
    out: Path, texts: list[str], drawn: dict[str, np.ndarray], right: dict[str, list[bool]], columns: int
) -> None:
    """Write a picture: in every block of `columns` prompts a row for each title of `drawn`, prompts above."""
    rows, blocks = len(drawn), -(-len(texts) // columns)
    size = (1.15 * columns, (1.15 * rows + 1.0) * blocks)
    figure, axes = plt.subplots(rows * blocks, columns, figsize=size, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for i, text in enumerate(texts):
        block, column = divmod(i, columns)
        for row, title in enumerate(drawn):
            axis = axes[rows * block + row][column]
            show(axis, drawn[title][i], right[title][i])
            if row == 0:
                axis.set_title(textwrap.fill(text, 16), fontsize=8)
            if column == 0:
                axis.set_ylabel(textwrap.fill(title, 14), fontsize=8)
    figure.tight_layout(pad=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="LABEL=[LORA]", help="no folder: the model before training")
    parser.add_argument("--texts", nargs="+", metavar="PROMPT", help="these prompts")
    parser.add_argument("--each", type=int, default=1, metavar="N", help="images of each prompt, in N rows")
    parser.add_argument("--prompts", default="playground/compositional/test")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, help="write what the last LoRA's run measured: seconds, held-out values")
    args = parser.parse_args()
    prompts = [Prompt(text) for text in args.texts or ()] or load_prompts(args.prompts)[: args.count]
    texts = [prompt.text for prompt in prompts]
    loras = dict(text.partition("=")[::2] for text in args.models)
    drawn: dict[str, np.ndarray] = {}
    for label, lora in loras.items():
        rows = pictures(prompts, lora, args.each)
        drawn |= {label if len(rows) == 1 else f"{label}, noise {i + 1}": row for i, row in enumerate(rows)}
    right = {label: [verdict.all_right for verdict in verify(images, texts)] for label, images in drawn.items()}
    sheet(args.out, texts, drawn, right, min(args.columns, len(texts)))
    counts = {title: f"{sum(verdicts)} of {len(verdicts)} all right" for title, verdicts in right.items()}
    print(counts)
    if args.result:
        run = Path(list(loras.values())[-1]).parent
        args.result.write_text(json.dumps(measured(run) | {"picture": counts}, indent=1) + "\n")


def measured(run: Path) -> dict[str, Any]:
    """Of a finished run: its seconds by its own clock, and the held-out values of the first and the last evaluation."""
    rows = read_metrics(run)
    seen = [row for row in rows if "eval/diversity" in row]
    values = [{key.removeprefix("eval/"): row[key] for key in row if key.startswith("eval/")} for row in seen]
    return {
        "command": "make demo",
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "epochs": rows[-1]["epoch"],
        "images": rows[-1]["samples"],
        "seconds": round(sum(row.get("seconds", 0.0) + row.get("seconds/evaluate", 0.0) for row in rows), 1),
        "before": values[0],
        "after": values[-1],
    }


def show(axis: Any, picture: np.ndarray, right: bool) -> None:
    """One picture with its frame."""
    axis.set_axis_on()
    axis.imshow(picture, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_color("#2a9d4a" if right else "#c0392b")
        side.set_linewidth(2.0)


if __name__ == "__main__":
    main()
