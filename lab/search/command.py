"""The command `search`: the best image of each prompt under rewards, for a budget of network forwards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import (
    drawing_of,
    named_rewards,
    only_parameters,
    plugins_of,
    positive_number,
    settled,
    whole_number,
)
from diffrl.cli.commands import add_arguments
from diffrl.errors import UserError, nearest
from diffrl.plugins import short_name
from diffrl.records.disk import check_writable

AFTER = "diffrl draw-set"  # in the list of commands
METHODS = ("best-of-n", "particles", "evo", "gradient", "refine")


def add(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    command = add(
        "refine",
        run,
        "draw, let a judge rewrite the prompt, and draw again",
        "diffrl refine playground --rewards vlm vlm.server=http://localhost:8000/v1 --prompts test.txt --budget 20 "
        "--out refined",
        words_anywhere=True,
    )
    _add_options(command, "refine,best-of-n")
    command = add(
        "search",
        run,
        "search for each prompt's best image, without training",
        "diffrl search playground --rewards clip --watch playground --prompts playground/compositional/test --limit 16 "
        "--budget 640 --method best-of-n,evo --out searched",
        "diffrl search playground --lora runs/nft/lora --base --rewards playground --prompts test.txt --budget 640 "
        "--out searched",
        words_anywhere=True,
    )
    _add_options(command, "evo")


def _add_options(command: argparse.ArgumentParser, method: str) -> None:
    add_arguments(command, {"drawing of a search": "shared", "texts": "shared"})
    text = "rewards to search for, by name or path/to/file.py:Class; parameters stand anywhere as NAME.KEY=VALUE, and "
    text += "NAME.weight=W is the reward's factor in the sum (default 1)"
    command.add_argument("--rewards", required=True, metavar="A,B,C", help=text)
    text = "rewards that only score the best images"
    command.add_argument("--watch", default="", metavar="A,B,C", help=text)
    text = "forwards of the network for each prompt; guidance counts twice where it takes a second row"
    command.add_argument("--budget", required=True, type=whole_number(1, 10**7), metavar="FORWARDS", help=text)
    text = f"one or several of {', '.join(METHODS)} (default {method}); several are compared"
    command.add_argument("--method", default=method, metavar="A,B", help=text)
    text = "refine: stop rewriting a prompt that reaches this value (default: take every round)"
    command.add_argument("--good", type=float, metavar="VALUE", help=text)
    text = "also search MODEL without --lora, from the same noise, and compare"
    command.add_argument("--base", action="store_true", help=text)
    text = "number of particles that are resampled together (default 8)"
    command.add_argument("--population", type=whole_number(1, 4096), default=8, metavar="K", help=text)
    text = "of particles: lower follows the reward more; in standard deviations of their values (default 0.5)"
    command.add_argument("--temperature", type=positive_number, default=0.5, metavar="T", help=text)
    text = "w of gradient: images of the model times exp(w value) are aimed at (default 100)"
    command.add_argument("--strength", type=positive_number, default=100.0, metavar="W", help=text)
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder of images and page")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    given = drawing_of(arguments)
    check_writable(arguments.out, "--out")
    if arguments.base and arguments.lora is None:
        raise UserError("--base: compares with the model without its LoRA; name one with --lora")
    methods = list(dict.fromkeys(name.strip() for name in arguments.method.split(",") if name.strip()))
    for name in methods:
        if name not in METHODS:
            raise UserError(f'--method: unknown method "{name}"{nearest(name, METHODS)}')
    if not methods:
        raise UserError(f"--method: name at least one of {', '.join(METHODS)}")
    rewards, watch = plugins_of(arguments.rewards, "--rewards"), plugins_of(arguments.watch, "--watch")
    if not rewards:
        raise UserError("--rewards: name at least one reward; `diffrl rewards list` shows them")
    if both := [name for name in watch if name in rewards]:
        raise UserError(f'--watch: "{both[0]}" is searched for already')
    only_parameters(arguments, rest)
    wanted = named_rewards([*rewards, *watch, *rest], "search")
    weights = {name: _weight(name, wanted[name].pop("weight", 1.0)) for name in rewards}
    from .run import Settings, search

    names = ("budget", "population", "temperature", "strength", "base", "good")
    settings = Settings(
        rewards={name: wanted[name] for name in rewards},
        watch={name: wanted[name] for name in watch},
        weights={short_name(name): weight for name, weight in weights.items()},
        methods=tuple(methods),
        **{name: getattr(arguments, name) for name in names},
    )
    result = search(settings, **settled(given))
    if os.environ.get("RANK", "0") == "0":
        _say(result, arguments.out)
    return 0


def _say(result: dict[str, Any], out: Path) -> None:
    for arm, one in result["arms"].items():
        first, last = one["curve"][0], one["curve"][-1]
        print(f"{arm}: {one['images']} images and {one['forwards_spent']} forwards a prompt")
        for name in last:
            if name != "forwards" and last[name] is not None:
                role = "" if name in result["trained_on"] else "  (watched)"
                print(f"  {name:<22}{first[name]:.4f} -> {last[name]:.4f}{role}")
    print(f"images: {out / 'images'}; page: {out / 'report.html'}")


def _weight(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 0 or value != value:
        raise UserError(f"--rewards: {name}.weight: expected a number that is not 0, got {value!r}")
    return float(value)
