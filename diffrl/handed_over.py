"""What only a program hands over for a training: rewards that are callables, and prompts that are in no file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.prompts import PromptLike, given_prompts
from diffrl.rewards import local

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
    temporary.write_text(text, encoding="utf-8")
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
            entry["plugin"] = local.register(name, entry["plugin"])
        return entry
    if isinstance(value, str):
        return {} if value == name else {"plugin": value}
    if callable(value):
        return {"plugin": local.register(name, value)}
    raise UserError(f"{where}: expected a callable, a plugin's name or a table, got a {type(value).__name__}")


def _name_of(thing: Any) -> str:
    name = getattr(thing, "name", None)
    name = name if isinstance(name, str) else getattr(thing, "__name__", type(thing).__name__)
    if not name.replace("-", "_").isidentifier():
        raise UserError(f'rewards: "{name}" is not a name for a reward; write {{"my_name": ...}}')
    return name
