"""Sheets of the generator's images with their prompts, to hold the verifier against a person's eye.

    python scripts/trials/by_eye.py --out sheets         # sheets/0.png, sheets/1.png, sheets/verdicts.json
    python scripts/trials/by_eye.py --lora runs/nft/lora --out sheets        # has training learned to fool it?

Test prompts that playground_facts.py does not use, one image each, without guidance. Who looks at the sheets first, and
at the verdicts after, writes down where they differ (assets/results/by_eye.json).
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image, ImageDraw
from playground_facts import drawn

from diffrl.playground.scenes import prompt_set
from diffrl.playground.verifier import verify
from diffrl.resources import shipped

COLUMNS, ROWS, WIDTH, HEIGHT = 10, 5, 150, 172


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=256, help="the first test prompt")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--lora", type=Path, help="a trained LoRA's folder")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = shipped("assets", "playground", "pipeline")
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(model, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    if args.lora:
        pipe.load_lora_weights(str(args.lora))
    prompts = prompt_set("all", "test")[args.first : args.first + args.count]
    images = drawn(pipe, prompts, args.guidance, 10, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(prompts), COLUMNS * ROWS):
        sheet = Image.new("RGB", (COLUMNS * WIDTH, ROWS * HEIGHT), "white")
        pen = ImageDraw.Draw(sheet)
        for i in range(start, min(start + COLUMNS * ROWS, len(prompts))):
            x, y = (i - start) % COLUMNS * WIDTH, (i - start) // COLUMNS * HEIGHT
            sheet.paste(Image.fromarray(images[i]).resize((128, 128), Image.Resampling.NEAREST), (x + 10, y))
            pen.text((x + 4, y + 129), "\n".join(textwrap.wrap(f"{i}: {prompts[i]}", 24)), fill="black")
        sheet.save(args.out / f"{start // (COLUMNS * ROWS)}.png")
    told = []
    for prompt, verdict in zip(prompts, verify(images, prompts), strict=True):
        wrong = [name for name, right in verdict.strict.items() if not right]
        told.append({"prompt": prompt, "all_right": verdict.all_right, "wrong": wrong})
    (args.out / "verdicts.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
