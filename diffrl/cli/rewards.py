"""The command `diffrl rewards`: list the rewards, show, begin, check or fit one, score pictures, serve some."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import at, named_rewards, need, only_parameters, print_list, rewards_of
from diffrl.errors import UserError, nearest
from diffrl.tools.outputs import out_file


def score_pictures(arguments: argparse.Namespace, rest: list[str]) -> int:
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


def _words(arguments: argparse.Namespace, rest: list[str], action: str) -> list[str]:
    """NAME and what follows it, wherever it stands."""
    words = [*arguments.words, *rest]
    if not words or "=" in words[0]:
        raise UserError(f"rewards {action}: name a reward; `diffrl rewards list` shows them")
    return words


def list_rewards(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.reward_tools import cards

    print_list(cards, arguments)
    return 0


def show_reward(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.reward_tools.cards import shown

    print(shown(arguments.name))
    return 0


def new_reward(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.reward_tools.authoring import write_plugin

    name: str = arguments.name
    folder = write_plugin(name, arguments.out or Path(name))
    print(f"written: {folder}")
    print(f"install: pip install -e {folder}")
    print(f"check:   diffrl rewards check {name}")
    print(f"test:    pytest {folder}")
    return 0


def check_reward(arguments: argparse.Namespace, rest: list[str]) -> int:
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


def fit_reward(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config import check_plugin, load_config, read_parameters
    from diffrl.resources import file_of_run
    from diffrl.tools.stand_ins import check_reward

    only_parameters(arguments, rest)
    given = read_parameters(rest)
    at("--on", check_plugin, arguments.on)
    config = Path(arguments.set).parent / "config.yaml"
    if config.is_file():  # RUN_DIR/votes: pictures of the run's model
        model = load_config(file_of_run(config.parent, "config.yaml", "rewards fit")).model
        at("--on", lambda on: check_reward(model, on, given), arguments.on)
    out = out_file(arguments.out, "--out", "mine.safetensors")
    from diffrl.reward_tools.fit import fit_head, lines

    options = {"column": arguments.scores, "held_out": arguments.held_out, "margin": arguments.margin}
    figures = fit_head(arguments.set, out, arguments.on, given, seed=arguments.seed, **options)
    print("\n".join(lines(figures, arguments.on)))
    print(f"head: {out}; rewards: {{mine: {{plugin: fitted, head: {out}}}}}")
    return 0


def serve_rewards(arguments: argparse.Namespace, rest: list[str]) -> int:
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
    limits = Limits(arguments.max_images, arguments.max_megabytes * 2**20)
    options = Options(token, limits, time_limit=arguments.time_limit, read_limit=arguments.read_limit)
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
