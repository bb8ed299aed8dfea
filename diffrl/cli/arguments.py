"""How commands of the command line look, and the words that several of them read. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from diffrl.errors import UserError, nearest


def subcommand(
    commands: Any,
    name: str,
    handler: Callable[..., int] | None,
    summary: str,
    *examples: str,
    words_anywhere: bool = False,
) -> Any:
    """Add a command to argparse's `commands` and return its parser.

    `handler(arguments, rest)` runs it. `words_anywhere`: words that the parser does not know go to `rest`.
    """
    text = "".join(f"\n  {example}" for example in examples)
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + "." * (not summary.endswith("?")),
        epilog=f"example{'s' if len(examples) > 1 else ''}:{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(handler=handler, parser=command, words_anywhere=words_anywhere)
    return command


def named_rewards(words: Sequence[str], command: str) -> dict[str, dict[str, Any]]:
    """{reward: its parameters} of `clip ocr clip.model=X`; with one reward the parameters need no name in front.

    In front of the parameters `path/to/file.py:Class` is called `Class`. UserError, beginning with the command's name,
    for a reward that is named twice and for parameters of none.
    """
    from diffrl.config import read_parameters

    names = [word for word in words if "=" not in word]
    wanted: dict[str, dict[str, Any]] = {name: {} for name in names}
    if len(wanted) < len(names):
        raise UserError(f"{command}: a reward is named twice: {', '.join(names)}")
    short = {name.rpartition(":")[2] if ".py" in name else name: name for name in names}
    for word in words:
        if "=" not in word:
            continue
        owner, dot, parameter = word.partition("=")[0].rpartition(".")
        if not dot:
            if len(names) > 1:
                raise UserError(f'{command}: "{word}": of which reward? Write {next(iter(short))}.{word}')
            owner = next(iter(short))
        if owner not in short:
            raise UserError(f'{command}: "{word}": "{owner}" is not one of the rewards{nearest(owner, short)}')
        wanted[short[owner]] |= read_parameters([parameter + "=" + word.partition("=")[2]])
    return wanted


def whole_number(least: int, most: int = 10**6) -> Callable[[str], int]:
    """argparse's type of a whole number from `least` to `most`: more is a slip, and would fill the memory."""

    def number(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
        if least <= value <= most:
            return value
        bound = f"at most {most}" if value > most or re.fullmatch("[0-9]{21,}", text) else f"at least {least}"
        raise argparse.ArgumentTypeError(f'expected a whole number of {bound}, got "{text[:40]}"')

    return number


def positive_number(text: str) -> float:
    """argparse's type of a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected a number above 0, got "{text[:40]}"')
    return value


def guidance(text: str) -> float:
    """A guidance scale on the command line."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1000:  # also what is no number
        raise argparse.ArgumentTypeError(f'expected a number from 0 to 1000, got "{text[:40]}"')
    return value


def as_the_run(common: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Of a run's own LoRA, on its own model: drawn as the run evaluates it, where nothing else is asked for."""
    from diffrl.config import run_drawing

    own = {} if arguments.lora is None else run_drawing(arguments.lora, arguments.model)
    own = {key: value for key, value in own.items() if getattr(arguments, key, None) is None}
    if own:
        print(f"drawn as the run evaluates it: {', '.join(f'{key} {value}' for key, value in own.items())}")
    return common | own
