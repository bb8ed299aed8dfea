"""How commands of the command line look: one place for their help texts. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


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
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example{'s' if len(examples) > 1 else ''}:{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(handler=handler, parser=command, words_anywhere=words_anywhere)
    return command
