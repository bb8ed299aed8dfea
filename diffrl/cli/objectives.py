"""The commands `objectives` and `d2align`, and the file that `diffrl init --objective` writes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from string import Template

from diffrl.errors import UserError


def check_objective(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config.door import find_objective

    find_objective(arguments.objective)
    from diffrl.conformance.objective import check

    bad = 0
    for what, holds, seen in check(arguments.objective):
        print(f"{'ok    ' if holds else 'FAILED'} {what}: {seen}", flush=True)
        bad += not holds
    return 1 if bad else 0


def list_objectives(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config.door import methods
    from diffrl.plugins import installed

    kinds = {"objective": "", "credit": " (credit over the steps)"}
    for name, method in methods().items():
        print(f"{name:<12} {method.meaning()}{kinds.get(method.kind, ' (around an objective)')}")
    for name, entry in installed("method").items():
        if name not in methods():
            print(f"{name:<12} installed: {entry.value}")
    return 0


def write_objective(name: str, folder: Path) -> list[Path]:
    """`NAME.py` and its test in a folder; UserError for a name that is taken or none, or a file that is there;
    DiskError, which leaves no file."""
    from diffrl.config.door import is_section
    from diffrl.config.schema import INSIDE
    from diffrl.tools.outputs import write_new

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f'init: --objective: "{name}": small letters, digits and "_", beginning with a letter')
    if name in INSIDE or is_section(name):
        raise UserError(f'init: --objective: "{name}" is a section of every config already; choose another name')
    cls = "".join(word.capitalize() for word in name.split("_"))
    templates = {folder / f"{name}.py": "objective.py.txt", folder / f"test_{name}.py": "test_objective.py.txt"}
    for file in templates:
        if file.exists():
            raise UserError(f'init: --objective: "{file}" exists already; choose another name')
    made = Path(__file__).with_name("templates")
    texts = {file: (made / template).read_text(encoding="utf-8") for file, template in templates.items()}
    write_new({file: Template(text).substitute(name=name, cls=cls) for file, text in texts.items()})
    return list(templates)


def learn_direction(arguments: argparse.Namespace, rest: list[str]) -> int:
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
