"""What `diffrl --help` shows first: everyday commands, by what they are for; `diffrl lab` lists the others."""

from __future__ import annotations

import argparse

from diffrl.cli.commands import table

END = """options: -h, --help, --version

`diffrl lab` lists the other commands; `diffrl COMMAND --help` explains one."""


def first(parser: argparse.ArgumentParser) -> str:
    """The first help: at most twelve commands, a line each."""
    lines = ["usage: diffrl COMMAND ...", "", str(parser.description), ""]
    for title, commands in table("first").items():
        lines += [f"{title}:", *(_line(name, text) for name, text in commands.items()), ""]
    return "\n".join([*lines, END, ""])


def others(parser: argparse.ArgumentParser) -> str:
    """The commands that the first help leaves out: measuring, searching, trials, lists, tools."""
    shown = {name for commands in table("first").values() for name in commands}
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    rest = [_line(one.dest, str(one.help)) for one in found._choices_actions if one.dest not in shown]
    usage = "usage: diffrl COMMAND ..., or diffrl lab COMMAND ..."
    return "\n".join([usage, "", *rest, "", "`diffrl COMMAND --help` explains one, with examples.", ""])


def _line(name: str, text: str, width: int = 80) -> str:
    """A command and its summary, on one line of a terminal."""
    short = text.split(";")[0]
    return f"  {name:<12}{short if len(short) <= width - 14 else short[: width - 18].rsplit(' ', 1)[0] + ' ...'}"
