"""The command `diffrl rewards`: list the rewards, show, begin or check one, serve some."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import named_rewards, need, rewards_of, whole_number
from diffrl.cli.commands import subcommand
from diffrl.cli.fitting import add_fit
from diffrl.errors import UserError, nearest
from diffrl.records.outputs import out_file


def add(add: Callable[..., Any]) -> None:
    """Register the command and its actions with the command line's `add`."""
    text = "rewards: list them, show a card, write, check, audit or fit one, serve some to other machines"
    command = add("rewards", None, text, "diffrl rewards list", "diffrl rewards new sharpness")
    actions = command.add_subparsers(required=True)
    action = partial(subcommand, actions)

    every = action("list", _list, "list the rewards", "diffrl rewards list")
    every.add_argument("--markdown", action="store_true", help="as a Markdown table")
    show = action("show", _show, "a reward's card", "diffrl rewards show clip")
    show.add_argument("name", metavar="NAME", help="a reward of `diffrl rewards list`")
    new = action("new", _new, "write a reward of your own: a package with its test", "diffrl rewards new sharpness")
    new.add_argument("name", metavar="NAME", help="of the reward")
    new.add_argument("--out", type=Path, metavar="DIR", help="the folder to write (default: NAME)")
    text = "check a reward: shapes, determinism, independence of the batch, range, gradients"
    example = "diffrl rewards check my_rewards.py:Redness power=2"
    check = action("check", _check, text, example, words_anywhere=True)
    check.usage = "diffrl rewards check NAME [parameter=value ...] [options]"
    text = "a reward (or path/to/file.py:Class), and parameters of its constructor"
    check.add_argument("words", nargs="*", metavar="NAME [parameter=value ...]", help=text)
    text = "prompts to check it with, as a config names them; a .jsonl file gives their metadata, too"
    check.add_argument("--prompts", metavar="SET", help=text)
    text = "images that it may have scored in all (default: 60 of a reward on other machines, else as many as it takes)"
    check.add_argument("--requests", type=whole_number(1), metavar="N", help=text)
    add_fit(action)
    _add_score(action)
    _add_serve(action)
    actions.metavar = "|".join(actions.choices)  # installed ones, too


def _add_score(action: Callable[..., Any]) -> None:
    text = "score pictures that exist: a folder of `sample`, `divgen generate`, `bench`, or of any other tool"
    score = action(
        "score", _score, text, "diffrl rewards score divgen/base --rewards clip,aesthetic", words_anywhere=True
    )
    score.usage = "diffrl rewards score DIR --rewards A,B [NAME.key=value ...] [options]"
    text = "pictures: with manifest.jsonl, metadata.jsonl, .csv, prompts.txt, their tool's metadata or by sub-folders"
    score.add_argument("folder", metavar="DIR", type=Path, help=text)
    score.add_argument("--rewards", required=True, metavar="A,B,C", help="rewards, or path/to/file.py:Class")
    text = "where prompts are read: manifest, metadata, sidecars, prompts, names, folders, or a file"
    score.add_argument("--prompts-from", default="", metavar="SOURCE|FILE", help=f"{text} (default: what knows them)")
    text = "a row for each picture, with its scores (default: DIR/rewards.jsonl)"
    score.add_argument("--out", type=Path, metavar="FILE.jsonl", help=text)


def _score(arguments: argparse.Namespace, rest: list[str]) -> int:
    wanted = rewards_of(arguments, rest, "rewards score")
    from diffrl.divgen.listings import home

    if not home(arguments.folder).is_dir():
        raise UserError(f'no folder "{arguments.folder}"')
    out = None if arguments.out is None else out_file(arguments.out, "--out", "rewards.jsonl")
    from diffrl.image_sets.reading import SCORED
    from diffrl.reward_tools.folder import score_folder

    print("\n".join(score_folder(arguments.folder, wanted, out, arguments.prompts_from)))
    print(f"scores: {out or home(arguments.folder) / SCORED}")
    return 0


def _add_serve(action: Callable[..., Any]) -> None:
    text = "serve rewards to other machines"
    example = "diffrl rewards serve clip ocr clip.model=ViT-H-14 clip.pretrained=laion2b_s32b_b79k --port 8000"
    serve = action("serve", _serve, text, example, words_anywhere=True)
    serve.usage = "diffrl rewards serve NAME|CONFIG ... [[NAME.]key=value ...] [--host H]\n"
    serve.usage += "                            [--port P] [--token-file FILE] [--engine ray ...]"
    text = "rewards (or path/to/file.py:Class), and parameters of their constructors; or a run's config"
    serve.add_argument("words", nargs="*", metavar="NAME [parameter=value ...]", help=text)
    text = "address to listen on (default 127.0.0.1: this machine alone)"
    serve.add_argument("--host", default="127.0.0.1", metavar="H", help=text)
    text = "port (default 8000; 0: a free one)"
    serve.add_argument("--port", type=whole_number(0, 65535), default=8000, metavar="P", help=text)
    text = "file with the token that clients must send; the environment variable DIFFRL_REWARD_TOKEN works, too"
    serve.add_argument("--token-file", metavar="FILE", help=text)
    text = "most images in one request (default 256)"
    serve.add_argument("--max-images", type=whole_number(1), metavar="N", help=text)
    text = "largest request, and largest images of one as float32, in MiB (default 256)"
    serve.add_argument("--max-megabytes", type=whole_number(1), default=256, metavar="N", help=text)
    text = "seconds from a request's last byte to its scores (default 300)"
    serve.add_argument("--time-limit", type=whole_number(1), metavar="S", help=text)
    text = "ray: replicas on the devices of this machine, or of the cluster of RAY_ADDRESS, by Ray Serve (extra: ray)"
    serve.add_argument("--engine", choices=("one", "ray"), default="one", help=f"one process (default), or {text}")
    text = "replicas of each reward, or of one: 4, or 1-8 for as many as the load needs (default 1; --engine ray)"
    serve.add_argument("--replicas", action="append", default=[], metavar="[NAME=]N", help=text)
    text = "GPUs of a replica, such as 0.5: two share one (default 0; --engine ray)"
    serve.add_argument("--gpus", action="append", default=[], metavar="[NAME=]N", help=text)
    text = "CPU cores of a replica (default 1; --engine ray)"
    serve.add_argument("--cpus", action="append", default=[], metavar="[NAME=]N", help=text)
    text = "seconds that a client may take to send a request (default 30)"
    serve.add_argument("--read-limit", type=whole_number(1), metavar="S", help=text)


def _words(arguments: argparse.Namespace, rest: list[str], action: str) -> list[str]:
    """NAME and what follows it, wherever it stands."""
    words = [*arguments.words, *rest]
    if not words or "=" in words[0]:
        raise UserError(f"rewards {action}: name a reward; `diffrl rewards list` shows them")
    return words


def _list(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.markdown:
        from diffrl.reward_tools.cards import markdown

        print(markdown(), end="")
        return 0
    from diffrl.reward_tools.cards import overview

    print(overview(shutil.get_terminal_size((80, 24)).columns))
    return 0


def _show(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.reward_tools.cards import shown

    print(shown(arguments.name))
    return 0


def _new(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.reward_tools.authoring import write_plugin

    name: str = arguments.name
    folder = write_plugin(name, arguments.out or Path(name))
    print(f"written: {folder}")
    print(f"install: pip install -e {folder}")
    print(f"check:   diffrl rewards check {name}")
    print(f"test:    pytest {folder}")
    return 0


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config import check_plugin, read_parameters

    name, *words = _words(arguments, rest, "check")
    parameters = read_parameters(words)
    check_plugin(name)
    from diffrl.reward_tools.check import check

    given = None
    if arguments.prompts is not None:
        from diffrl.prompts import load_prompts

        given = [(prompt.text, prompt.metadata) for prompt in load_prompts(arguments.prompts)]
    return 0 if check(name, given, arguments.requests, **parameters) else 1


def _serve(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config import check_plugin

    words = _words(arguments, rest, "serve")
    wanted = _of_config(words) or [(None, *one) for one in named_rewards(words, "rewards serve").items()]
    for _, plugin, _ in wanted:
        check_plugin(plugin)
    need("rewards serve", "serve", "fastapi", "uvicorn")
    from diffrl.rewards.registry import load_class, load_reward
    from diffrl.serving.client import find_token
    from diffrl.serving.server import Limits, Options, Served, check_address, check_served, name_of, serve

    token = find_token(arguments.token_file, trusted=True)
    check_address(arguments.host, token)
    limits = Limits(arguments.max_images or Limits.images, arguments.max_megabytes * 2**20)
    options = Options(
        token=token,
        limits=limits,
        time_limit=arguments.time_limit or Options.time_limit,
        read_limit=arguments.read_limit or Options.read_limit,
    )
    names = [name or name_of(plugin, load_class(plugin)) for name, plugin, _ in wanted]
    if len(set(names)) < len(names):
        raise UserError(f"rewards serve: two rewards have the same name: {', '.join(names)}")

    def ready(url: str) -> None:
        guard = "with a token" if token is not None else "without a token"
        print(f"serving {', '.join(names)} on {url} {guard}; Ctrl-C ends it", flush=True)

    if arguments.engine == "ray":
        return _on_ray(dict(zip(names, wanted, strict=True)), arguments, options, ready)
    if arguments.replicas or arguments.gpus or arguments.cpus:
        raise UserError("rewards serve: --replicas, --gpus and --cpus are for --engine ray")
    served = {}
    for name, (_, plugin, given) in zip(names, wanted, strict=True):
        served[name] = Served(load_reward(plugin, **given), plugin, given)
        check_served(served[name])
    serve(served, arguments.host, arguments.port, options, ready)
    return 0


def _of_config(words: list[str]) -> list[tuple[str | None, str, dict[str, Any]]]:
    """(name, plugin, arguments) of the rewards of a run's config; nothing if there is none."""
    if not words[0].endswith((".yaml", ".yml")):
        return []
    from diffrl.config import load_config

    config = load_config(words[0], words[1:])
    entries = {**config.watch, **config.rewards}
    return [(name, entry.plugin or name, dict(entry.arguments)) for name, entry in entries.items()]


def _on_ray(wanted: dict[str, Any], arguments: argparse.Namespace, options: Any, ready: Callable[[str], object]) -> int:
    import signal
    from dataclasses import replace

    need("rewards serve", "ray", "ray")
    from diffrl.serving.replicas import Wanted, serve_on_ray, stop

    placed = {name: Wanted(plugin, given) for name, (_, plugin, given) in wanted.items()}
    for option in ("replicas", "gpus", "cpus"):
        for text in getattr(arguments, option):
            one, equals, value = text.rpartition("=")
            if equals and one not in placed:
                raise UserError(f'--{option}: "{one}" is not one of the rewards{nearest(one, placed)}')
            given = _amount(option, value)
            placed |= {name: replace(old, **given) for name, old in placed.items() if not equals or name == one}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is under way ends first
    try:
        serve_on_ray(placed, arguments.host, arguments.port, options, ready)
        while True:
            signal.pause()
    finally:
        stop()


def _amount(option: str, text: str) -> dict[str, Any]:
    """{key of `Wanted`: its value} of an option's text."""
    form = r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?" if option == "replicas" else r"(\d{1,3}(?:\.\d{1,4})?)()"
    read = re.fullmatch(form, text)
    if read is None or (option == "replicas" and int(read[2] or read[1]) < int(read[1])):
        example = "4, 1-8 or clip=4" if option == "replicas" else "0.5 or clip=0.5"
        raise UserError(f'--{option}: expected a number such as {example}, got "{text}"')
    if option == "replicas":
        return {"least": int(read[1]), "most": int(read[2] or read[1])}
    return {option: float(read[1])}
