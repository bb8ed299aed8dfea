"""`diffrl doctor` on the command line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffrl.errors import UserError


def add_doctor(add: Any) -> None:
    """Add the command by `add(name, handler, summary, *examples)`."""
    doctor = add(
        "doctor",
        _doctor,
        "check this installation: versions, devices, weights, rewards; or whether a config fits into memory",
        "diffrl doctor",
        "diffrl doctor configs/sd35/nft_ocr.yaml rollout.resolution=1024",
        "diffrl doctor configs/sd35/nft_ocr.yaml --gpu 24 --processes 8",
        words_anywhere=True,
    )
    doctor.usage = "diffrl doctor [CONFIG [section.key=value ...] [--gpu GIB]\n                     [--processes N]]"
    text = "estimate the memory that this config needs, from the model's configs alone, and name what to change"
    doctor.add_argument("words", nargs="*", metavar="CONFIG [section.key=value ...]", help=text)
    doctor.add_argument("--gpu", metavar="GIB", help="memory of each device (default: what is free here)")
    doctor.add_argument("--processes", metavar="N", help="one per device (default: WORLD_SIZE, or 1)")


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    gpu = None if arguments.gpu is None else positive(arguments.gpu, "--gpu", "GiB of memory")
    processes = None if arguments.processes is None else positive(arguments.processes, "--processes", "a whole number")
    if processes is not None and processes % 1:
        raise UserError(f'doctor: --processes "{arguments.processes}": expected a whole number above 0')
    if (gpu or processes) and not words:
        raise UserError("doctor: --gpu and --processes are for a CONFIG: diffrl doctor CONFIG --gpu 24")
    with _offline():
        if not words:
            from diffrl.cli.doctor import examine

            return 0 if examine() else 1
        from diffrl.cli.doctor import check_fit
        from diffrl.config import load_config

        world = None if processes is None else int(processes)
        return 0 if check_fit(load_config(words[0], words[1:], world), gpu, world) else 1


@contextmanager
def _offline() -> Iterator[None]:
    """A look at what is here downloads nothing, also where nobody set HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def positive(text: str, name: str, meaning: str) -> float:
    """A number above 0 of the command line; UserError for anything else."""
    try:
        value = float(re.sub(r"(?i)(?<=\d) ?(gib|gb|g)$", "", text) if name == "--gpu" else text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f'doctor: {name} "{text}": {meaning} above 0 is needed')
    return value
