"""Types of arguments, words that several commands read, and their checks. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from diffrl.errors import UserError, nearest
from diffrl.plugins import short_name

# Options that are keys of a `diffrl.drawing.Drawing`.
DRAWN = {"model", "prompts", "seed", "per_prompt", "steps", "limit", "sampler", "guidance_scale", "resolution"}
DRAWN |= {"batch_size", "family", "merge", "lora", "like", "out"}


def refuse(word: str, command: argparse.ArgumentParser) -> NoReturn:
    """UserError for a word that the command does not know, with its nearest option."""
    if not word.startswith("-"):
        command.error(f'unexpected argument "{word}"')
    text, name = command.format_help(), word.split("=")[0]
    known = set(re.findall(r"--[\w-]+", text))
    keyed = "section.key=value" in text and not get_close_matches(name, known, 1, 0.75)
    key = f"; a key of the config is written {name.lstrip('-')}=VALUE, without dashes"
    raise UserError(f'unknown option "{word}"{key if keyed else nearest(name, known)}')


def configs_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The configs of a command that takes several (recipes, or files: their names may hold `=`), and the overrides."""
    configs = [word for word in words if "=" not in word or Path(word).is_file()]
    return configs, [word for word in words if word not in configs]


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
    short = {short_name(name): name for name in names}
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


def _float(text: str) -> float:
    """A number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def number_between(least: float, most: float) -> Callable[[str], float]:
    """argparse's type of a number from `least` to `most`."""

    def number(text: str) -> float:
        value = _float(text)
        if not least <= value <= most:  # also what is no number
            raise argparse.ArgumentTypeError(f'expected a number from {least:g} to {most:g}, got "{text[:40]}"')
        return value

    return number


def positive_number(text: str) -> float:
    """argparse's type of a number above 0."""
    value = _float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected a number above 0, got "{text[:40]}"')
    return value


def guidance(text: str) -> float:
    """A guidance scale on the command line."""
    try:
        return number_between(1, 1000)(text)
    except argparse.ArgumentTypeError as error:
        none = "; none is 1 here, 0 in diffusers" * (0 <= _float(text) < 1)
        raise argparse.ArgumentTypeError(f"{error}{none}") from None


def resolution(text: str) -> int | tuple[int, int]:
    """argparse's type of a side, or WIDTHxHEIGHT, in pixels."""
    words = text.split("x")
    if len(words) > 2 or "" in words:
        raise argparse.ArgumentTypeError(f'expected a side or WIDTHxHEIGHT, got "{text[:40]}"')
    sides = [whole_number(8, 2**14)(side) for side in words]
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


TYPES: dict[str, Any] = {  # as `tables` names them
    "seed": whole_number(0, 2**63 - 1),
    "positive": positive_number,
    "guidance": guidance,
    "resolution": resolution,
}
RANGES: dict[str, Callable[..., Any]] = {"whole": whole_number, "number": number_between}


def drawing_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys of a `Drawing` that these arguments give, checked."""
    from diffrl.config import check_model
    from diffrl.lora_files import find_lora, weighted
    from diffrl.tools.given_prompts import given_prompts

    given = {name: value for name, value in vars(arguments).items() if name in DRAWN}
    at("--model" if arguments.parser.prog.endswith("bench") else "MODEL", check_model, arguments.model)
    if given.get("prompts") is not None:
        at("--prompts", _source, given["prompts"])
    elif getattr(arguments, "prompt", None):
        at("--prompt", given_prompts, arguments.prompt)
        given["prompts"] = arguments.prompt
    for name, loras in (("lora", [given["lora"]]), ("merge", given["merge"] or ())):
        for one in loras:
            if one is not None:
                at(f"--{name}", find_lora, one if name == "lora" else at("--merge", weighted, one)[0])
    return given | {name: str(given[name]) for name in ("lora", "like") if given[name] is not None}


def plugins_of(text: str, option: str) -> list[str]:
    """The rewards of `A,B,C`, each once; UserError for one that is none."""
    from diffrl.config import check_plugin

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        at(option, check_plugin, name)
    return names


def only_parameters(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """Words that the command does not know must be KEY=VALUE."""
    for word in rest:
        if "=" not in word:
            arguments.parser.error(f'unexpected argument "{word}"')


def rewards_of(arguments: argparse.Namespace, rest: Sequence[str], command: str) -> dict[str, dict[str, Any]]:
    """Of `--rewards`, with their parameters among the words; UserError where none is named."""
    only_parameters(arguments, rest)
    names = plugins_of(arguments.rewards or "", "--rewards")
    if not names:
        raise UserError("--rewards: name at least one reward; `diffrl rewards list` shows them")
    return named_rewards([*names, *rest], command)


def print_list(source: Any, arguments: argparse.Namespace) -> None:
    """What the module `source` lists: as Markdown, or as wide as the terminal."""
    width = shutil.get_terminal_size((80, 24)).columns
    print(source.markdown() if arguments.markdown else source.overview(width) + "\n", end="")


def need(command: str, extra: str, *modules: str) -> None:
    """UserError, in the command's name, for a module that an extra of the package brings."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{command}: {module} is not installed: pip install "diffrl[{extra}]"')


def check_push(name: str) -> None:
    """UserError where --push names no model of the hub, or the hub cannot be reached."""
    from diffrl.hub import not_name
    from diffrl.hub_access import hub_failure

    if wrong := not_name(name):
        raise UserError(f'--push: "{name}": {wrong}')
    if failure := hub_failure():
        raise UserError(f"--push: {failure}; without --push the folder is written all the same")


def at(where: str, check: Callable[[Any], Any], value: object) -> Any:
    """What `check(value)` returns; its UserError gets `where` in front."""
    try:
        return check(value)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _source(given: str) -> None:
    from diffrl.prompts import check_source

    try:
        check_source(given)
    except UserError as error:
        raise UserError(f"{error}{'; a text itself goes behind --prompt' * (' ' in given.strip())}") from error


def settled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `Drawing` with what a run's record says of them, which is printed."""
    from diffrl.loras.recorded import recorded, trained_at

    own, parts = recorded(given), list[str]()
    if own:
        by = "as the LoRA was trained" if given.get("like") is None else f"as {given['like']} evaluates"
        parts.append(f"drawn {by}: {_listed(own)}")
    if given.get("like") is None and given.get("lora") is not None:
        run = trained_at(given["lora"], given["model"])
        rest = {key: run[key] for key in run if key in ("sampler", "steps") and given.get(key) is None}
        parts += [f"its run evaluates with {_listed(rest)}: --like RUN_DIR draws so"] * bool(rest)
    if parts:
        print("; ".join(parts))
    return {**given, **own}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
