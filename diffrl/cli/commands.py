"""How a command of the command line looks, and the commands that are installed. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from diffrl.errors import UserError
from diffrl.plugins import installed as installed_plugins
from diffrl.plugins import load

log = logging.getLogger("diffrl")


def subcommand(
    commands: Any,
    name: str,
    handler: Callable[..., int] | None,
    summary: str,
    *examples: str,
    words_anywhere: bool = False,
    alone: bool = False,
) -> Any:
    """Add a command to argparse's `commands` and return its parser.

    `handler(arguments, rest)` runs it. `words_anywhere`: words that the parser does not know go to `rest`. `alone`:
    without the installed commands that are listed after it.
    """
    text = "".join(f"\n  {_wrapped(example)}" for example in examples)
    command = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(summary[0].upper() + summary[1:] + "." * (not summary.endswith("?")), 80),
        epilog=f"example{'s' if len(examples) > 1 else ''}:{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(handler=handler, parser=command, words_anywhere=words_anywhere)
    for module in () if alone else installed():
        if command.prog == getattr(module, "AFTER", "diffrl doctor"):
            module.add(partial(subcommand, commands))
    return command


def _wrapped(example: str, width: int = 75) -> str:
    """A command over several lines of a terminal, as a shell takes it."""
    lines = [""]
    for word in re.findall(r"""(?:--[\w-]+ (?!-))?(?:"[^"]*"|'[^']*'|[^\s"'])+""", example.replace("\\\n", " ")):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n  ".join(lines)


@cache
def installed() -> list[ModuleType]:
    """The modules of installed commands, entry points of the group `diffrl.commands`: each has `add(add)`, which calls
    `add` as `subcommand` without its first argument, and perhaps `AFTER`, the command after which the help lists it.
    """
    modules = []
    for name in installed_plugins("command"):
        try:
            modules.append(load("command", name))
        except UserError as error:
            log.warning("%s", error)
    return modules
