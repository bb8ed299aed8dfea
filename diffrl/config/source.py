"""A config's text: YAML with line numbers, and the command line's `section.key=value` on top.

Scalars follow YAML 1.2: 1e-4 is a number, and `no` and `on` are words. Keys may not repeat. A section left empty in a
file has its defaults; an override to null takes a section or a reward out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffrl.config import door
from diffrl.config.schema import TABLES, is_section, is_table
from diffrl.errors import UserError, nearest, read_text

_PREFIX = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
DEPTH, VALUES = 16, 10_000  # of a config: the deepest shipped one has 5 levels, the longest some 200 values
_SCALARS = (  # in the order of trial
    ("null", re.compile(r"~$|null$|Null$|NULL$|$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true$|True$|TRUE$|false$|False$|FALSE$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]*)$|0x[0-9a-fA-F]+$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
)


class _Loader(yaml.SafeLoader):
    """Reads scalars by the table above only."""


def _whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """A whole number of 64 bits: no key needs a larger one, and Python refuses to write some of those that it reads."""
    text = loader.construct_scalar(node).lower()
    if len(text) > 24 or abs(value := int(text, 16 if "x" in text else 10)) >= 2**63:
        raise yaml.constructor.ConstructorError(None, None, "a whole number of more than 64 bits", node.start_mark)
    return value


class Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would not read as text, and keeps lists on one line."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
_Loader.add_constructor(_PREFIX + "int", _whole)
_Loader.add_implicit_resolver(_PREFIX + "merge", re.compile("<<$"), ["<"])
Dumper.add_implicit_resolver(_PREFIX + "float", _FLOAT, list("-+0123456789."))
Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence(_PREFIX + "seq", data, flow_style=True))


@dataclass
class Source:
    """Plain values of a config, and where each of them was written."""

    name: str
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    overridden: set[tuple[str, ...]] = field(default_factory=set)
    outside: str = "command line"  # where what is not in the file comes from

    def where(self, path: tuple[str, ...]) -> str:
        """`FILE:LINE`, or `outside`, of a key or of the nearest section around it."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        if any(part in self.overridden for part in around):
            return self.outside
        for part in around:
            if part in self.lines:
                return f"{self.name}:{self.lines[part]}"
            if any(part == other[: len(part)] for other in self.overridden):  # a section that an override began
                return self.outside
        return self.name

    def override(self, text: str) -> None:
        """Apply one `section.key=value`; the value is read as YAML."""
        if not isinstance(text, str):
            raise UserError(f'{self.outside}: expected text such as "rollout.groups=16", got a {type(text).__name__}')
        dotted, equals, raw = text.partition("=")
        shown = text if len(text) <= 80 else text[:77] + "..."
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            raise UserError(f'{self.outside}: "{shown}": write section.key=value, for example rollout.groups=16')
        if not raw.strip():
            raise UserError(
                f'{self.outside}: "{shown}": no value; null takes a section or reward out, "" is empty text'
            )
        value = parse(raw, lambda _: f'{self.outside}: "{shown}"').data
        section = self.data
        for depth, name in enumerate(path[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise UserError(f'{self.outside}: "{shown}": {".".join(path[:depth])[:60]} is a value, not a section')
        if value is None and is_section(path):
            if path[-1] not in section and is_table(path[:-1]):
                hint = nearest(path[-1], section)
                raise UserError(f'{self.outside}: "{shown}": there is no {dotted[:60]} to take out{hint}')
            section.pop(path[-1], None)
        else:
            self._switch(path, value)
            section[path[-1]] = value
            if isinstance(value, dict):
                _fill(value, path)
        self.overridden.add(path)

    def merge(self, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
        """Put a program's values on top: sections key by key, a table of rewards as a whole, None takes out."""
        section = self.data
        for name in path:
            section = section.setdefault(name, {})
        for name, value in values.items():
            here = (*path, str(name))
            if value is None and is_section(here):
                section.pop(name, None)
            elif isinstance(value, Mapping) and is_section(here) and here[0] not in TABLES:
                section.setdefault(name, {})
                self.merge(value, here)
            else:
                self._switch(here, value)
                try:
                    section[name] = _plain(value)
                except RecursionError:
                    text = "nested too deeply, or a list or table that holds itself"
                    raise UserError(f"{self.outside}: {'.'.join(here)}: {text}") from None
            self.overridden.add(here)

    def _switch(self, path: tuple[str, ...], value: Any) -> None:
        """Another objective on top of a file's takes the section of the file's own one out: it would have no effect."""
        old = self.data.get("objective", "nft")
        ours = any(other[0] == old for other in self.overridden)
        if path == ("objective",) and door.is_method(old) and old != value and not ours:
            self.data.pop(old, None)


def _plain(value: Any) -> Any:
    """Paths as text; tables and lists as dicts and lists; NumPy's and torch's numbers and arrays as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return {str(key): _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


@dataclass
class Parsed:
    """A YAML value, and the line of every key in it."""

    data: Any
    lines: dict[tuple[str, ...], int]


def parse(text: str, where: Callable[[int], str]) -> Parsed:
    """Read YAML; `where(line)` begins the message of a UserError."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[tuple[str, ...], int] = {}
        _index(node, (), lines, where, [0])
        return Parsed(None if node is None else loader.construct_document(node), lines)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{where(line)}: not valid YAML (character U+{error.character:04X})") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        context = f"{error.context}, " if error.context else ""
        raise UserError(f"{where(line)}: not valid YAML ({context}{error.problem})") from error
    except RecursionError as error:
        raise UserError(f"{where(1)}: nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()


def _index(
    node: yaml.Node | None,
    path: tuple[str, ...],
    lines: dict[tuple[str, ...], int],
    where: Callable[[int], str],
    seen: list[int],
) -> None:
    """Note every key's line; keys must be text and may not repeat. Bounded: aliases may multiply, and hold themselves.

    `seen`: how many values were looked at so far.
    """
    seen[0] += 1
    if node is not None and (len(path) > DEPTH or seen[0] > VALUES):
        what = "nested too deeply, or an alias that holds itself" if len(path) > DEPTH else "too many values"
        raise UserError(f"{where(node.start_mark.line + 1)}: {what}")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _index(item, (*path, "[]"), {}, where, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        place = where(key.start_mark.line + 1)
        if (
            isinstance(key, yaml.ScalarNode) and key.tag == _PREFIX + "merge"
        ):  # `<<: *alias`, the keys of another mapping beneath these
            _index(value, (*path, "<<"), {}, where, seen)
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != _PREFIX + "str":
            text = f'"{key.value}"' if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise UserError(f"{place}: a key must be text, got {text}")
        here = (*path, key.value)
        if here in lines:
            raise UserError(f"{place}: {'.'.join(here)} is given twice (first in line {lines[here]})")
        lines[here] = key.start_mark.line + 1
        _index(value, here, lines, where, seen)


def read(path: Path) -> Source:
    """The values of a config file; raises UserError with file and line if it cannot be read."""
    parsed = parse(read_text(path), lambda line: f"{path}:{line}")
    data = {} if parsed.data is None else parsed.data
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected sections and keys such as `epochs: 40`")
    _fill(data, ())
    return Source(str(path), data, parsed.lines)


def _fill(data: dict[str, Any], path: tuple[str, ...]) -> None:
    """Empty sections become {}: their defaults."""
    for name, value in data.items():
        here = (*path, name)
        if value is None and is_section(here):
            data[name] = {}
        elif isinstance(value, dict):
            _fill(value, here)


def read_parameters(words: Iterable[str]) -> dict[str, Any]:
    """`name=value` words with YAML values, as a dict; raises UserError for words of another form."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, raw = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f'"{word}": write parameter=value')
        values[name] = parse(raw, lambda _, word=word: f'"{word}"').data  # type: ignore[misc]
    return values
