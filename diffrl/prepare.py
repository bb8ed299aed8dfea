"""What a program or the command line hands over for a training becomes a checked config: values, prompts, callables."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from diffrl.config import Config, make_config
from diffrl.config.source import Source
from diffrl.errors import UserError
from diffrl.prompts import PromptLike, given_prompts
from diffrl.resources import file_of_run
from diffrl.rewards import local

Base = str | Path | Config | Mapping[str, Any]
Rewards = Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | str


def prepare(
    config: Base | None,
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards | None = None,
    watch: Rewards | None = None,
    resume: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
    outside: str = "argument",
) -> tuple[Config, Path | None]:
    """The checked config of a training, and the folder of the run that it continues (see `train`).

    `outside`: what messages call the place of overrides and values.
    """
    changes = dict(values or {})
    for name, given in (("rewards", rewards), ("watch", watch)):
        if given is not None:
            changes[name] = entries(given, name)
    if str(resume) == "auto" and config is None:
        raise UserError("--resume auto: give CONFIG, too; it says where the run's folder is (run_dir)")
    stored: Path | None = None
    if "torch" in sys.modules:  # where there are other processes they have met, so that it is here
        from diffrl.run.hand_on import agree

        agree(None if resume is None else str(resume))
    from diffrl.files import is_address

    if str(resume).startswith("hub:") or is_address(str(resume)):
        from diffrl.records.hub import fetch

        named = Source("", {}, outside=outside)
        for word in overrides:
            if not isinstance(word, str) or word.startswith("run_dir="):
                named.override(word)  # which refuses what is no text
        given = named.data | changes
        own = None if config is None else _made(config, overrides, changes, outside).run_dir
        resume = fetch(str(resume), given.get("run_dir", own))
    if resume is not None and str(resume) != "auto":
        _hand_on(Path(resume))
        stored = file_of_run(Path(resume), "config.yaml", "--resume")
    source = stored if config is None else config
    if source is None:
        raise UserError("train: no CONFIG; name a YAML file or a shipped config such as playground/nft")
    checked = _made(source, overrides, changes, outside)
    folder = Path(checked.run_dir) if str(resume) == "auto" else None if resume is None else Path(resume)
    if is_address(str(checked.checkpoint.push)):
        from diffrl.records.hub import from_store

        from_store(checked.checkpoint.push, Path(checked.run_dir), folder)
    if str(resume) == "auto":
        _hand_on(Path(checked.run_dir))
    if folder is None or not (folder / "config.yaml").is_file():
        return checked, None
    return checked.model_copy(update={"run_dir": str(folder)}), folder


def _hand_on(folder: Path) -> None:
    """See `diffrl.run.hand_on`."""
    if "torch" in sys.modules:
        from diffrl.run.hand_on import hand_on

        hand_on(folder)


def _made(source: Base, overrides: Sequence[str], changes: dict[str, Any], outside: str) -> Config:
    """The config, with lists of prompts written into the run's folder, and callables known to the registry."""
    if isinstance(source, Mapping):
        given = {name: source[name] for name in ("rewards", "watch") if source.get(name) is not None}
        source = {**source, **{name: entries(table, name) for name, table in given.items()}}
    lists, more = _lists(source), _lists(changes)
    if not lists and not more:
        return make_config(source, overrides, changes, outside=outside)

    def config_with(folder: Path) -> Config:
        base = _filed(source, lists, folder) if isinstance(source, Mapping) else source
        return make_config(base, overrides, _filed(changes, more, folder), outside=outside)

    with tempfile.TemporaryDirectory() as there:  # all of it is checked before the run's folder has anything
        run_dir = config_with(Path(there)).run_dir
    return config_with(Path(run_dir) / "prompts")


def _lists(table: Base) -> dict[str, list[PromptLike]]:
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


def _filed(table: Mapping[str, Any], lists: Mapping[str, Sequence[PromptLike]], folder: Path) -> Mapping[str, Any]:
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
