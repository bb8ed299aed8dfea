"""The commands `doctor`, of which `doctor.py` has the findings, `completion` and `version`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffrl.cli.arguments import configs_of
from diffrl.errors import UserError
from diffrl.version import __version__


def doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    gpu = None if arguments.gpu is None else _card(arguments.gpu)
    world, nodes = (_whole(getattr(arguments, name), f"--{name}") for name in ("processes", "nodes"))
    if (gpu or world or nodes or arguments.fsdp2) and not words:
        raise UserError(
            "doctor: --gpu, --processes, --nodes and --fsdp2 are for a CONFIG: diffrl doctor CONFIG --gpu 24"
        )
    with _offline():
        if not words:
            from diffrl.cli.doctor import examine

            return 0 if examine() else 1
        from diffrl.cli.doctor import check_fit
        from diffrl.config import load_config
        from diffrl.memory.counted import Counted

        counted = Counted()  # in one process: what takes long to import or to count is so once
        (names, overrides), good = configs_of(words), True
        for name in names or words[:1]:
            if len(names) > 1:
                print(f"{name}:", flush=True)
            config = load_config(name, overrides, world)
            good = check_fit(config, gpu, world, nodes or 1, arguments.fsdp2, counted) and good
        return 0 if good else 1


def completion(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.cli.main import _parser

    print(script(_parser(), arguments.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion of a command line for one of its shells: bash, zsh, fish."""
    import shtab

    for action in _actions(parser):
        places = str(action.metavar or "")
        if "DIR" in places or places == "MODEL":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif "FILE" in places or "CONFIG" in places:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell=shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def version(arguments: argparse.Namespace, rest: list[str]) -> int:
    print(f"diffrl {__version__}")
    return 0


def _whole(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    number = positive(text, name, "a whole number")
    if number % 1:
        raise UserError(f'doctor: {name} "{text}": expected a whole number above 0')
    return int(number)


def _card(text: str) -> Any:
    """GiB, or a card by its name; a number that is a card's is the card."""
    from diffrl.memory.cards import CARDS, find_card

    words = re.sub(r"(?i)(gib|gb|g)$", "", text.strip())
    numeric = re.fullmatch(r"[-+]?[\d.]+(e\d+)?|nan|inf", words.strip(), re.IGNORECASE)
    return find_card(text) if text in CARDS or not numeric else positive(text, "--gpu", "GiB of memory")


@contextmanager
def _offline() -> Iterator[None]:
    """A look at what is here downloads nothing, also where HF_HUB_OFFLINE is not set."""
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
