"""The command `diffrl d2align`: learn the direction of a config's reward alone, without the training behind it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.commands import subcommand
from diffrl.errors import UserError


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    text = "learn D2-Align's direction of a reward while the generator is frozen"
    command = add("d2align", None, text, "diffrl d2align learn playground/d2align")
    action = command.add_subparsers(metavar="learn", required=True)
    examples = (
        "diffrl d2align learn playground/d2align",
        "diffrl d2align learn my.yaml d2align.omega=2",
    )
    command = subcommand(action, "learn", learn, text, *examples, words_anywhere=True)
    command.usage = "diffrl d2align learn CONFIG [section.key=value ...]"
    text = "a config with the section d2align, then overrides; the direction is written to RUN_DIR/d2align"
    command.add_argument("words", nargs="*", metavar="CONFIG [section.key=value ...]", help=text)


def learn(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    if not words:
        raise UserError("d2align learn: no CONFIG; name a YAML file or a shipped config such as playground/d2align")
    from diffrl.config import load_config

    config = load_config(words[0], words[1:])
    if config.d2align is None:
        raise UserError(f"{words[0]}: d2align: the section is missing; `d2align: {{}}` is enough")
    from diffrl.methods.d2align.stage1 import FILE, FOLDER, prepare_direction
    from diffrl.report.d2align import write_page
    from diffrl.run.train import Run

    run = Run(config)
    folder = Path(config.run_dir)
    try:
        prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
    finally:
        run.close()
    if run.main:
        print(f"direction: {config.d2align.direction or folder / FOLDER / FILE}")
        if (page := write_page(folder)) is not None:
            print(f"what it means: {page}")
    return 0
