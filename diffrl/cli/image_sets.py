"""The command `draw-set`: pictures of a model with scores, to be trained on later (`image_set` of a config)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import (
    add_drawing,
    add_texts,
    drawing_of,
    named_rewards,
    only_parameters,
    plugins_of,
    settled,
)
from diffrl.records.disk import check_writable


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    command = add(
        "draw-set",
        draw,
        "draw pictures of prompts and score them, to train on as an image set; continues if interrupted",
        "diffrl draw-set playground --rewards playground --prompts playground/compositional/train --limit 640 "
        "--per-prompt 16 --out sets/base",
        "accelerate launch -m diffrl draw-set stabilityai/stable-diffusion-3.5-medium --rewards pickscore "
        "--prompts pickscore/train --per-prompt 16 --out sets/sd35",
        words_anywhere=True,
    )
    add_drawing(command, 8)
    add_texts(command)
    text = "rewards by name, or path/to/file.py:Class, separated by commas; give parameters as NAME.KEY=VALUE"
    command.add_argument("--rewards", required=True, metavar="A,B,C", help=text)
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the set's folder")


def draw(arguments: argparse.Namespace, rest: list[str]) -> int:
    given = drawing_of(arguments)
    check_writable(arguments.out, "--out")
    names = plugins_of(arguments.rewards, "--rewards")
    only_parameters(arguments, rest)
    wanted = named_rewards([*names, *rest], "draw-set")
    from diffrl.image_sets.draw import draw_set

    count = draw_set(rewards=wanted, **settled(given))
    if os.environ.get("RANK", "0") == "0":
        print(f"{count} pictures were drawn; train on them with image_set.source={arguments.out}")
    return 0
