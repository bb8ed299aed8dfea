"""A config's text: YAML with line numbers.

Scalars follow YAML 1.2: 1e-4 is a number, and `no` and `on` are words. Keys may not repeat. A section left empty in a
file has its defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffrl.config.schema import is_section
from diffrl.errors import UserError, read_text

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
    fill(data, ())
    return Source(str(path), data, parsed.lines)


def fill(data: dict[str, Any], path: tuple[str, ...]) -> None:
    """Empty sections become {}: their defaults."""
    for name, value in data.items():
        here = (*path, name)
        if value is None and is_section(here):
            data[name] = {}
        elif isinstance(value, dict):
            fill(value, here)
