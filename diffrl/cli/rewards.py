"""The command `diffrl rewards`: list the rewards, begin one, check one, serve some."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.words import choose_action, named_rewards, whole_number
from diffrl.errors import UserError

ACTIONS = {
    "list": "diffrl rewards list [--markdown]",
    "new": "diffrl rewards new NAME [--out DIR]",
    "check": "diffrl rewards check NAME [parameter=value ...]",
    "serve": "diffrl rewards serve NAME ... [[NAME.]parameter=value ...] [--host H] [--port P] [--token-file FILE]",
}
# Which action an option belongs to.
OWNERS = {"markdown": "list", "out": "new"} | dict.fromkeys(
    ("host", "port", "token_file", "max_images", "max_megabytes", "time_limit", "read_limit"), "serve"
)


def add_rewards(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    command = add(
        "rewards",
        rewards,
        "list the rewards, begin one of your own, check one, or serve some to other machines",
        "diffrl rewards list",
        "diffrl rewards new sharpness",
        "diffrl rewards check my_reward.py:Redness threshold=0.5",
        "diffrl rewards serve clip ocr clip.model=ViT-H-14 clip.pretrained=laion2b_s32b_b79k --port 8000",
        words_anywhere=True,
    )
    command.usage = "\n       ".join(ACTIONS.values())
    command.add_argument("action", metavar="|".join(ACTIONS), help="what to do")
    text = "of rewards (or path/to/file.py:Class), and parameters of their constructors"
    command.add_argument("words", nargs="*", metavar="NAME [parameter=value ...]", help=text)
    command.add_argument("--markdown", action="store_true", default=None, help="list: as a Markdown table")
    command.add_argument("--out", type=Path, metavar="DIR", help="new: the folder to write (default: NAME)")
    text = "serve: address to listen on (default 127.0.0.1: this machine alone)"
    command.add_argument("--host", metavar="H", help=text)
    text = "serve: port (default 8000; 0: a free one)"
    command.add_argument("--port", type=whole_number(0, 65535), metavar="P", help=text)
    text = "serve: file with the token that clients must send; the environment variable DIFFRL_REWARD_TOKEN works, too"
    command.add_argument("--token-file", metavar="FILE", help=text)
    text = "serve: most images in one request (default 256)"
    command.add_argument("--max-images", type=whole_number(1), metavar="N", help=text)
    text = "serve: largest request, and largest images of one as float32, in MiB (default 256)"
    command.add_argument("--max-megabytes", type=whole_number(1), metavar="N", help=text)
    text = "serve: seconds from a request's last byte to its scores (default 300)"
    command.add_argument("--time-limit", type=whole_number(1), metavar="S", help=text)
    text = "serve: seconds that a client may take to send a request (default 30)"
    command.add_argument("--read-limit", type=whole_number(1), metavar="S", help=text)


def rewards(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    action = choose_action("rewards", arguments, ACTIONS, OWNERS, words)
    if action == "list":
        return _list(arguments, words)
    if not words or "=" in words[0]:
        if action == "new":
            raise UserError("rewards new: how is the reward called? For example: diffrl rewards new sharpness")
        raise UserError(f"rewards {action}: name a reward; `diffrl rewards list` shows them")
    return {"new": _new, "check": _check, "serve": _serve}[action](arguments, words)


def _list(arguments: argparse.Namespace, words: list[str]) -> int:
    if words:
        raise UserError(f'rewards list: unexpected argument "{words[0]}"')
    if arguments.markdown:
        from diffrl.rewards.cards import markdown

        print(markdown(), end="")
        return 0
    from rich.console import Console

    from diffrl.rewards.cards import table

    Console(width=None if sys.stdout.isatty() else 160).print(table())
    return 0


def _new(arguments: argparse.Namespace, words: list[str]) -> int:
    if len(words) > 1:
        raise UserError(f'rewards new: unexpected argument "{words[1]}"')
    from diffrl.rewards.authoring import write_plugin

    name = words[0]
    folder = write_plugin(name, arguments.out or Path(name))
    print(f"written: {folder}")
    print(f"install: pip install -e {folder}")
    print(f"check:   diffrl rewards check {name}")
    print(f"test:    pytest {folder}")
    return 0


def _check(arguments: argparse.Namespace, words: list[str]) -> int:
    from diffrl.config import check_plugin, read_parameters

    name, parameters = words[0], read_parameters(words[1:])
    check_plugin(name)
    from diffrl.rewards.check import check

    return 0 if check(name, **parameters) else 1


def _serve(arguments: argparse.Namespace, words: list[str]) -> int:
    from diffrl.config import check_plugin

    wanted = named_rewards(words, "rewards serve")
    for name in wanted:
        check_plugin(name)
    for module in ("fastapi", "uvicorn"):
        _need(module)
    from diffrl.rewards.client import find_token
    from diffrl.rewards.registry import load_reward
    from diffrl.rewards.server import Limits, Options, Served, check_address, names_of, serve

    host, port = arguments.host or "127.0.0.1", 8000 if arguments.port is None else arguments.port
    token = find_token(arguments.token_file, trusted=True)
    check_address(host, token)
    limits = Limits(arguments.max_images or Limits.images, (arguments.max_megabytes or 256) * 2**20)
    options = Options(
        token=token,
        limits=limits,
        time_limit=arguments.time_limit or Options.time_limit,
        read_limit=arguments.read_limit or Options.read_limit,
    )
    built = [Served(load_reward(name, **given), name, given) for name, given in wanted.items()]
    served = dict(zip(names_of(built), built, strict=True))
    if len(served) < len(built):
        raise UserError(f"rewards serve: two rewards are called the same: {', '.join(names_of(built))}")

    def ready(url: str) -> None:
        guard = "with a token" if token is not None else "without a token"
        print(f"serving {', '.join(served)} on {url} {guard}; Ctrl-C ends it", flush=True)

    serve(served, host, port, options, ready)
    return 0


def _need(module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise UserError(f'rewards serve: {module} is not installed: pip install "diffrl[serve]"')
