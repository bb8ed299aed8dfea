"""The commands `diffrl configs`, which lists the shipped recipes, and `diffrl init`, which begins one's own config."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from diffrl.errors import UserError
from diffrl.resources import shipped, shipped_configs


def recipes() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, values, first sentence of its comment) of every shipped config."""
    root = shipped("configs")
    for file in shipped_configs():
        text = file.read_text(encoding="utf-8")
        about = text.partition("\n# sources:")[0]  # from there on it is where values are from
        comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line[:1] == "#", about.splitlines()))
        # A sentence ends before a capital; "Stable Diffusion 3.5 Medium" and "arXiv 2509.16117" do not end one.
        sentence = re.split(r"(?<=[a-z)\d])[.:;] (?=[A-Z\d])", comment, maxsplit=1)[0].rstrip(".:;")
        sentence = textwrap.shorten(sentence, 140, placeholder=" ...")
        yield str(file.relative_to(root).with_suffix("")), yaml.safe_load(text), sentence


def list_configs(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config.schema import method_of

    words = [_plain(word) for word in arguments.words]
    shown = 0
    for name, values, sentence in recipes():
        line = f"{name:<26} {method_of(values):<16} {sentence}"
        if all(word in _plain(f"{line} {values['model']}") for word in words):
            print(line)
            shown += 1
    if not shown:
        raise UserError(f"configs: no shipped config has {' and '.join(arguments.words)}; `diffrl configs` lists all")
    return 0


def _plain(text: str) -> str:
    """Letters and digits: sd3.5, SD 3.5 and sd35 are the same."""
    return re.sub(r"[\W_]+", "", text.lower())


def write_config(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.objective is not None:
        return _init_objective(arguments)
    if arguments.file is None:
        raise UserError("init: name the config to write, as in diffrl init my.yaml")
    file: Path = arguments.file
    if file.exists():
        raise UserError(f'init: "{file}" exists already; choose another name')
    if file.suffix not in (".yaml", ".yml") or not file.parent.is_dir():
        raise UserError(f'init: "{file}": name a file that ends in .yaml, in a folder that exists')
    from diffrl.cli.template import default_rewards, methods_named, template
    from diffrl.config import check_model, check_plugin, load_config
    from diffrl.records.disk import check_writable, write_text

    check_writable(file.parent, "init")
    check_model(arguments.model)
    objective, methods = methods_named(arguments.method)
    names = default_rewards(arguments.model, methods) if arguments.rewards is None else arguments.rewards.split(",")
    rewards = [name.strip() for name in names if name.strip()]
    if not rewards:
        raise UserError("init: --rewards: name at least one reward; `diffrl rewards list` shows them")
    for name in rewards:
        check_plugin(name)
    if (arguments.train is None) != (arguments.test is None):
        raise UserError("init: give both --train and --test, or neither")
    text = template(arguments.model, rewards, objective, methods, arguments.train, arguments.test)
    write_text(file, text)
    try:
        load_config(file)
    except UserError as error:
        print(f"written: {file}, which needs a change before it runs: {error}")
        return 0
    print(f"written: {file}\ncheck:   diffrl train {file} --dry-run\ntrain:   diffrl train {file}")
    return 0


def _init_objective(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        raise UserError(f'init: give a config to write ("{arguments.file}") or --objective, not both')
    from diffrl.cli.objectives import write_objective

    file, test = write_objective(arguments.objective, Path())
    name = "".join(word.capitalize() for word in arguments.objective.split("_"))
    print(f"written: {file} and {test}")
    print(f"check:   diffrl objectives check {file}:{name}")
    print(f"train:   diffrl train playground/nft objective={file}:{name}")
    return 0


def print_keys(words: Sequence[str]) -> int:
    """What --help-config asks for."""
    from diffrl.cli.config_help import help_config

    print(help_config(min(shutil.get_terminal_size((120, 24)).columns, 140), *help_words(words)))
    return 0


def help_words(words: Sequence[str]) -> tuple[list[str], Collection[str] | None]:
    """What the words behind --help-config ask for: sections or keys, and whose methods' sections, for `help_config`.

    A config that stands first brings its methods, nothing the default objective; `all`: every one. UserError for a
    config that is none.
    """
    from diffrl.config.load import find_config
    from diffrl.config.overrides import override
    from diffrl.config.schema import method_of
    from diffrl.config.source import read

    if list(words) == ["all"]:
        return [], None
    if not words or not ("/" in words[0] or words[0].endswith((".yaml", ".yml"))):
        return list(words), None if words else [method_of({})]
    source = read(find_config(words[0]))
    for text in (word for word in words if "=" in word):
        override(source, text)
    return [word for word in words[1:] if "=" not in word], method_of(source.data).split("+")
