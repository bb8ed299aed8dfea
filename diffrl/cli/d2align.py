"""The command `diffrl d2align`: learn the direction of a config's reward alone, without the training behind it."""

from __future__ import annotations

import argparse
from pathlib import Path

from diffrl.errors import UserError


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
