"""What is put on top of a config's file: `section.key=value` of a command line, and a program's tables of values.

An override to null takes a section or a reward out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from diffrl.config import door
from diffrl.config.schema import TABLES, is_section, is_table
from diffrl.config.source import Source, fill, parse
from diffrl.errors import UserError, nearest


def put_on(source: Source, words: Iterable[str], values: Mapping[str, Any]) -> None:
    """Put a command line's words on top of a source, and then a program's values."""
    for text in words:
        override(source, text)
    merge(source, values)


def override(source: Source, text: str) -> None:
    """Apply one `section.key=value`; the value is read as YAML."""
    if not isinstance(text, str):
        raise UserError(f'{source.outside}: expected text such as "rollout.groups=16", got a {type(text).__name__}')
    dotted, equals, raw = text.partition("=")
    shown = text if len(text) <= 80 else text[:77] + "..."
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise UserError(f'{source.outside}: "{shown}": write section.key=value, for example rollout.groups=16')
    if not raw.strip():
        raise UserError(f'{source.outside}: "{shown}": no value; null takes a section or reward out, "" is empty text')
    value = parse(raw, lambda _: f'{source.outside}: "{shown}"').data
    section = source.data
    for depth, name in enumerate(path[:-1], start=1):
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise UserError(f'{source.outside}: "{shown}": {".".join(path[:depth])[:60]} is a value, not a section')
    if value is None and is_section(path):
        if path[-1] not in section and is_table(path[:-1]):
            hint = nearest(path[-1], section)
            raise UserError(f'{source.outside}: "{shown}": there is no {dotted[:60]} to take out{hint}')
        section.pop(path[-1], None)
    else:
        _switch(source, path, value)
        section[path[-1]] = value
        if isinstance(value, dict):
            fill(value, path)
    source.overridden.add(path)


def merge(source: Source, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Put a program's values on top: sections key by key, a table of rewards as a whole, None takes out."""
    section = source.data
    for name in path:
        section = section.setdefault(name, {})
    for name, value in values.items():
        here = (*path, str(name))
        if value is None and is_section(here):
            section.pop(name, None)
        elif isinstance(value, Mapping) and is_section(here) and here[0] not in TABLES:
            section.setdefault(name, {})
            merge(source, value, here)
        else:
            _switch(source, here, value)
            try:
                section[name] = _plain(value)
            except RecursionError:
                text = "nested too deeply, or a list or table that holds itself"
                raise UserError(f"{source.outside}: {'.'.join(here)}: {text}") from None
        source.overridden.add(here)


def _switch(source: Source, path: tuple[str, ...], value: Any) -> None:
    """Another objective on top of a file's takes the section of the file's own one out: it would have no effect."""
    old = source.data.get("objective", "nft")
    ours = any(other[0] == old for other in source.overridden)
    if path == ("objective",) and door.is_method(old) and old != value and not ours:
        source.data.pop(old, None)


def _plain(value: Any) -> Any:
    """Paths as text; tables and lists as dicts and lists; NumPy's and torch's numbers and arrays as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return {str(key): _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def read_parameters(words: Iterable[str]) -> dict[str, Any]:
    """`name=value` words with YAML values, as a dict; raises UserError for words of another form."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, raw = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f'"{word}": write parameter=value')
        values[name] = parse(raw, lambda _, word=word: f'"{word}"').data  # type: ignore[misc]
    return values
