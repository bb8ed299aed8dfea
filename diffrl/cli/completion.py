"""`diffrl completion`: what a shell needs to complete commands, options, files and folders."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_completion(add: Callable[..., Any], parser: Callable[[], argparse.ArgumentParser]) -> None:
    """The command; `parser()` makes the whole command line anew, which the script is written for."""

    def write(arguments: argparse.Namespace, rest: list[str]) -> int:
        print(script(parser(), arguments.shell))
        return 0

    command = add(
        "completion",
        write,
        "print a shell's completion of commands, options, files and folders",
        'eval "$(diffrl completion bash)"     # in ~/.bashrc',
        'eval "$(diffrl completion zsh)"      # in ~/.zshrc, after compinit',
        "diffrl completion fish > ~/.config/fish/completions/diffrl.fish",
    )
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion of a command line for one of `SHELLS`."""
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
