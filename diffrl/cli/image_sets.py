"""The command `draw-set`: pictures of a model with scores, to be trained on later (`image_set` of a config)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import as_the_run, named_rewards
from diffrl.errors import UserError
from diffrl.records.disk import check_writable


def add_image_sets(
    add: Callable[..., Any], add_drawing: Callable[..., None], common: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Register the command with the command line's `add`; `add_drawing` and `common`: its options of what is drawn."""

    def handle(arguments: argparse.Namespace, rest: list[str]) -> int:
        return draw(arguments, rest, common)

    command = add(
        "draw-set",
        handle,
        "draw pictures of prompts and score them, to train on as an image set; continues if interrupted",
        "diffrl draw-set playground --rewards playground --prompts playground/compositional/train --limit 640 "
        "--per-prompt 16 --out sets/base",
        "accelerate launch -m diffrl draw-set stabilityai/stable-diffusion-3.5-medium --rewards pickscore "
        "--prompts pickscore/train --per-prompt 16 --out sets/sd35",
        words_anywhere=True,
    )
    add_drawing(command, 8)
    text = "playground/SUBSET/SPLIT, a set of `diffrl prompts list`, FILE.txt, FILE.jsonl or hub:OWNER/NAME"
    command.add_argument("--prompts", required=True, metavar="FILE|SET", help=text)
    text = "rewards by name, or path/to/file.py:Class, separated by commas; give parameters as NAME.KEY=VALUE"
    command.add_argument("--rewards", required=True, metavar="A,B,C", help=text)
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the set's folder")


def draw(arguments: argparse.Namespace, rest: list[str], common: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    from diffrl.config import check_plugin

    given = common(arguments)
    if arguments.out.is_file():
        raise UserError(f'--out: "{arguments.out}" is a file; name a folder')
    check_writable(arguments.out, "--out")
    names = list(dict.fromkeys(name.strip() for name in arguments.rewards.split(",") if name.strip()))
    for name in names:
        try:
            check_plugin(name)
        except UserError as error:
            raise UserError(f"--rewards: {error}") from error
    for word in rest:
        if "=" not in word:
            arguments.parser.error(f'unexpected argument "{word}"')
    wanted = named_rewards([*names, *rest], "draw-set")
    from diffrl.image_sets.draw import draw_set

    count = draw_set(rewards=wanted, **as_the_run(given, arguments))
    if os.environ.get("RANK", "0") == "0":
        print(f"{count} pictures were drawn; train on them with image_set.source={arguments.out}")
    return 0
