"""`diffrl completion`: what a shell needs to complete commands, options, files and folders."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def write(arguments: argparse.Namespace, rest: list[str]) -> int:
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
