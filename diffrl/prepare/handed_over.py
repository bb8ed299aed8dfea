"""What only a program hands over for a training: rewards that are callables, and prompts that are in no file."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.prepare.objects import of_object
from diffrl.records.disk import write_text
from diffrl.rewards import local
from diffrl.rewards.protocol import missing_of_class, missing_of_instance
from diffrl.rewards.registry import adapted
from diffrl.tools.given_prompts import PromptLike, given_prompts

Rewards = Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | str


def lists_of(table: object) -> dict[str, list[PromptLike]]:
    """The prompts in a table of sections that are texts, by their key: a list, an array, a column of a data frame."""
    prompts = table.get("prompts") if isinstance(table, Mapping) else None
    if isinstance(prompts, list | tuple):
        raise UserError('prompts: write prompts={"train": [...], "test": [...]}: what is trained on is not held out')
    lists = {}
    for name in ("train", "test"):
        texts = prompts.get(name) if isinstance(prompts, Mapping) else None
        if isinstance(texts, Set):
            raise UserError(f"prompts.{name}: a Python set has another order in each process; give a list")
        if isinstance(texts, Iterable) and not isinstance(texts, str | Mapping):
            lists[name] = list(texts)
    return lists


def filed(table: Mapping[str, Any], lists: Mapping[str, Sequence[PromptLike]], folder: Path) -> Mapping[str, Any]:
    """The table with files in `folder` for its lists of prompts."""
    files = {name: str(_write_prompts(texts, folder / f"{name}.jsonl")) for name, texts in lists.items()}
    return {**table, "prompts": {**table["prompts"], **files}} if files else table


def _write_prompts(texts: Sequence[PromptLike], file: Path) -> Path:
    lines = (json.dumps({"prompt": p.text, **p.metadata}, ensure_ascii=False) for p in given_prompts(texts))
    text = "\n".join(lines) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.stem}.{os.getpid()}")
    write_text(temporary, text)
    os.replace(temporary, file)
    return file


def entries(given: Rewards, table: str) -> dict[str, Any]:
    """{name: entry of a config} of names and callables; callables become known to the registry."""
    if isinstance(given, str) or (callable(given) and not isinstance(given, Mapping)):
        given = [given]
    if not isinstance(given, Mapping):
        if not isinstance(given, Iterable):
            raise UserError(f"{table}: expected names and callables, got a {type(given).__name__}")
        named = {}
        for one in given:
            name = one if isinstance(one, str) else _name_of(one)
            if name in named:
                raise UserError(f'{table}: "{name}" is given twice; name them: {table}={{"first": ..., "second": ...}}')
            named[name] = one
        given = named
    return {str(name): _entry(str(name), value, f"{table}.{name}") for name, value in given.items()}


def _entry(name: str, value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        entry = dict(value)
        if callable(entry.get("plugin")):
            entry["plugin"] = register(name, entry["plugin"])
        return entry
    if isinstance(value, str):
        return {} if value == name else {"plugin": value}
    if callable(value):
        return {"plugin": register(name, value)}
    raise UserError(f"{where}: expected a callable, a plugin's name or a table, got a {type(value).__name__}")


def _name_of(thing: Any) -> str:
    name = getattr(thing, "name", None)
    name = name if isinstance(name, str) else getattr(thing, "__name__", type(thing).__name__)
    if not name.replace("-", "_").isidentifier():
        raise UserError(f'rewards: "{name}" is not a name for a reward; write {{"my_name": ...}}')
    return name


def register(name: str, thing: Any) -> str:
    """Make `thing` known as a reward, in the place of an earlier one of this name; returns its plugin's text.

    `thing`: what `diffrl.rewards.registry.adapted` takes (a class is built with the entry's parameters), or an object
    with the protocol. UserError for anything else.
    """
    if not callable(thing):
        raise UserError(
            f'reward "{name}": a {type(thing).__name__} cannot be called; give a function, a class or an object'
        )
    built = not inspect.isclass(thing) and not missing_of_class(type(thing)) and not missing_of_instance(thing)
    known = thing if built else adapted(thing, name)
    place = None if built else _place(thing)
    for known_as in (name, place or name):
        local.know(known_as, known, of_object)
    return place or local.PREFIX + name


def _place(thing: Any) -> str | None:
    """`path/to/file.py:NAME` or `module:NAME`, where another program can import it; None: nowhere. A script can be
    imported if it says what it does as a program."""
    module, name = sys.modules.get(getattr(thing, "__module__", None) or ""), getattr(thing, "__qualname__", "")
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not thing or file.suffix != ".py":
        return None
    guard = r"__name__\s*==\s*['\"]__main__"
    if module.__name__ == "__main__" and not re.search(guard, file.read_text(encoding="utf-8", errors="replace")):
        return None
    packaged = "." in module.__name__ or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return f"{module.__name__}:{name}" if packaged else f"{file.resolve()}:{name}"
