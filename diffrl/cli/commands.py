"""How a command of the command line looks, which `tables` has, and which are installed. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from diffrl.errors import UserError
from diffrl.plugins import installed as installed_plugins
from diffrl.plugins import load
from diffrl.resources import table_beside

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


def add_commands(commands: Any, name: str, alone: bool = False) -> None:
    """Add the commands of the file `name` in `tables` to argparse's `commands`: {command: what it is}, in its order.

    call: MODULE:FUNCTION of this package; `function(arguments, rest)` returns the exit code. A command without it has
        actions: `rewards list` is one of `rewards`. Their metavar is the list of them, where `metavar` is not given.
    summary, examples, words_anywhere: see `subcommand`.
    usage: in place of what argparse makes of the arguments.
    arguments: see `add_arguments`.
    """
    places = {"": commands}
    for words, entry in table(name).items():
        group, _, last = words.rpartition(" ")
        handler = partial(_call, *entry["call"].split(":")) if "call" in entry else None
        options = {"words_anywhere": entry.get("words_anywhere", False), "alone": alone}
        command = subcommand(places[group], last, handler, entry["summary"], *entry["examples"], **options)
        command.usage = entry.get("usage")
        add_arguments(command, entry.get("arguments", {}))
        if handler is None:
            places[words] = command.add_subparsers(required=True)
    for words, place in places.items():
        if words:  # after installed ones, which are in the list, too
            place.metavar = table(name)[words].get("metavar", "|".join(place.choices))


@cache
def table(name: str) -> dict[str, Any]:
    """A file of `diffrl/cli/tables`: commands (see `add_commands`), or groups of arguments that they share."""
    content: dict[str, Any] = table_beside(__file__, f"tables/{name}.yaml")
    return content


def add_arguments(command: Any, arguments: Mapping[str, Any]) -> None:
    """Add arguments to a parser, as the tables have them: {`--option METAVAR` or `name METAVAR`: its help}.

    In place of the help a mapping has what `add_argument` takes. In it `type` is "path" or a name of `TYPES` in
    `diffrl.cli.arguments`, and a number from `least` to `most` is `whole: [least, most]` or `number: [least, most]`.
    An option without metavar and choices is a flag. Two names are none of an argument: of what is behind `one of`,
    exactly one is to be given; and a group of `tables/shared.yaml`, with `shared` or what differs in its mappings.
    """
    for name, given in arguments.items():
        if name == "one of":
            add_arguments(command.add_mutually_exclusive_group(required=True), given)
        elif (group := table("shared").get(name)) is not None:
            differing = {} if given == "shared" else given
            add_arguments(command, {**group, **{key: group[key] | more for key, more in differing.items()}})
        else:
            _add_argument(command, name, given)


def _add_argument(command: Any, name: str, given: str | Mapping[str, Any]) -> None:
    word, _, metavar = name.partition(" ")
    options = {"help": given} if isinstance(given, str) else dict(given)
    for kind in options.keys() & {"type", "whole", "number"}:
        options["type"] = _type(kind, options.pop(kind))
    if metavar:
        options["metavar"] = metavar
    elif "choices" not in options:
        options["action"] = "store_true"
    command.add_argument(word, **options)


def _type(kind: str, given: Any) -> Any:
    if given == "path":
        return Path
    from diffrl.cli.arguments import RANGES, TYPES  # which a training does without

    return TYPES[given] if kind == "type" else RANGES[kind](*given)


def _call(module: str, function: str, arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run a command; its module is loaded now."""
    code: int = getattr(importlib.import_module(f"diffrl.cli.{module}"), function)(arguments, rest)
    return code


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
