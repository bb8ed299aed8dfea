"""A model's name that ends in one file: `FILE`, or `BASE+FILE`, the model BASE with what FILE has instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

from diffrl.errors import UserError
from diffrl.files import damage_of

FILE = re.compile(r"(?:(?P<base>.+)\+)?(?P<file>[^+]+\.(?:safetensors|gguf))", re.IGNORECASE)
PICKLE = re.compile(r".*\.(ckpt|bin|pt|pth)", re.IGNORECASE)


def split(model: str) -> tuple[str, Path] | None:
    """The base ("": none is named) and the file; None for another name of a model.

    Raises:
        UserError: the file is not there, or it is a pickle, or cut off, or something else.
    """
    last = model if Path(os.path.expanduser(model)).is_file() else model.rpartition("+")[2]
    if PICKLE.fullmatch(last) and Path(os.path.expanduser(last)).is_file():
        convert = f"diffusers' PIPELINE.from_single_file({last!r}).save_pretrained(FOLDER)"
        raise UserError(f'"{last}" is a pickle, which can run code when it is read; convert it with {convert}')
    if Path(os.path.expanduser(model)).is_dir() or (match := FILE.fullmatch(model)) is None:
        return None
    file = Path(os.path.expanduser(model))
    base = ""
    if not file.is_file():
        base, file = match["base"] or "", Path(os.path.expanduser(match["file"]))
    if not file.is_file():
        raise UserError(f'no file "{file}"')
    if file.suffix.lower() == ".safetensors" and (damage := damage_of(file)):
        raise UserError(f'"{file}" {damage}')
    return base, file
