"""The commands `sample` and `evaluate`: images of a model, shown or scored."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import add_drawing, add_texts, drawing_of, rewards_of, settled
from diffrl.errors import UserError
from diffrl.records.disk import check_writable
from diffrl.records.outputs import out_file


def add(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    sample = add(
        "sample",
        draw_images,
        "draw images of prompts",
        "diffrl sample playground --prompts playground/compositional/test --limit 16 --lora runs/nft/lora --out images",
        'diffrl sample playground --prompt "a red heart" --prompt "two blue stars" --out images',
        "diffrl sample playground --lora runs/nft/lora --base --rewards playground,clip "
        "--prompts playground/words/test --limit 16 --out images",
        words_anywhere=True,
    )
    sample.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the images")
    evaluate = add(
        "evaluate",
        score_model,
        "score a model's images of prompts",
        "diffrl evaluate playground --rewards playground,clip --prompts playground/words/test --out scores.json",
        "diffrl evaluate stabilityai/stable-diffusion-3.5-medium --rewards clip,aesthetic clip.model=ViT-H-14 "
        "clip.pretrained=laion2b_s32b_b79k --prompts test.txt --out scores.json",
        words_anywhere=True,
    )
    text = "rewards by name, or path/to/file.py:Class, separated by commas; give parameters as NAME.KEY=VALUE"
    evaluate.add_argument("--rewards", required=True, metavar="A,B,C", help=text)
    sample.add_argument("--rewards", metavar="A,B,C", help=f"also score the images: {text}")
    evaluate.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the file of the scores")
    for command, members in ((sample, 1), (evaluate, 4)):
        add_drawing(command, members)
        add_texts(command)
        text = "also the model without --lora, from the same noise, and compare"
        command.add_argument("--base", action="store_true", help=text)


def draw_images(arguments: argparse.Namespace, rest: list[str]) -> int:
    common = drawing_of(arguments)
    check_writable(arguments.out, "--out")
    wanted = rewards_of(arguments, rest, "sample") if arguments.rewards is not None or rest else {}
    from diffrl.drawing import sample
    from diffrl.report.drawn import write_drawn

    drawn = sample(rewards=wanted, base=_base(arguments), **settled(common))
    print(f"images: {arguments.out}; all of them at a glance: {arguments.out / 'grid.png'}")
    print(f"page: {write_drawn(arguments.out, drawn)}")
    return 0


def score_model(arguments: argparse.Namespace, rest: list[str]) -> int:
    common = drawing_of(arguments)
    common["out"] = arguments.out = out_file(arguments.out, "--out", "scores.json")
    wanted = rewards_of(arguments, rest, "evaluate")
    from diffrl.drawing import evaluate

    result = evaluate(rewards=wanted, base=_base(arguments), **settled(common))
    print(result)
    print(f"scores: {arguments.out}")
    return 0


def _base(arguments: argparse.Namespace) -> bool:
    if arguments.base and arguments.lora is None:
        raise UserError("--base: compares with the model without its LoRA; name one with --lora")
    return bool(arguments.base)
