"""A model's name that ends in one file: `FILE`, or `BASE+FILE`, the model BASE with what FILE has instead.

What the file has is read by `diffrl.additions.single_weights`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.files import damage_of

FILE = re.compile(r"(?:(?P<base>.+)\+)?(?P<file>[^+]+\.(?:safetensors|gguf))", re.IGNORECASE)
PICKLE = re.compile(r".*\.(ckpt|bin|pt|pth)", re.IGNORECASE)


@dataclass(frozen=True)
class SingleFile:
    """`base`: "" where none is named."""

    base: str
    file: Path

    def find(self, find: Callable[[str], tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
        """What `find` says of the base: that is named, or of the file's own model."""
        if self.base:
            return find(self.base)
        from diffrl.additions.single_weights import find_own

        return find_own(self.file, find)

    def load(self, source: str, index: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
        """The modules that the file has, see `diffrl.additions.single_weights.load_file`."""
        from diffrl.additions.single_weights import load_file

        return load_file(self.file, source, index, types)


def split(model: str) -> SingleFile | None:
    """What a model's name says; None for another name of a model.

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
    return SingleFile(base, file)
