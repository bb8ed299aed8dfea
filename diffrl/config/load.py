"""From a YAML file and overrides to a checked `Config`, and back to a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from diffrl import __version__
from diffrl.config.base import Problem
from diffrl.config.checks import check
from diffrl.config.schema import TABLES, Config, walk
from diffrl.config.source import Dumper, Source, read
from diffrl.errors import UserError, nearest
from diffrl.resources import shipped

VERSION = "diffrl_version"
CHANGEABLE = ("epochs", "evaluate", "checkpoint", "tracking", "run_dir")  # what a resumed run may do differently
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list such as [a, b]",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "tuple_type": "a list of two such as [1, 2]",
    "missing": "a list of two",
    "too_long": "a list of two",
    "literal_error": "one of {expected}",
}


def load_config(path: str | Path, overrides: Iterable[str] = (), world: int | None = None) -> Config:
    """Read, override and check a config.

    `path`: a file, or a shipped config's name (`playground/nft`, `configs/playground/nft.yaml`). `overrides`: texts
    `section.key=value`. `world`: number of processes that will run it (default: WORLD_SIZE, or 1).

    Raises UserError in one line: where (file and line, or the command line), the dotted key, what is wrong.
    """
    file = find_config(path)
    source = read(file)
    version = source.data.pop(VERSION, "")
    if not isinstance(version, str):
        raise UserError(f"{source.where((VERSION,))}: {VERSION}: expected text, got {_show(version)}")
    for text in overrides:
        source.override(text)
    try:
        config = Config.model_validate(source.data)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from error
    if not config.run_dir:
        config = config.model_copy(update={"run_dir": f"runs/{file.stem}"})
    try:
        check(config, world)
    except Problem as problem:
        raise UserError(f"{source.where(tuple(problem.key.split('.')))}: {problem}") from problem
    return config


def find_config(path: str | Path) -> Path:
    """The file of this path or shipped name; raises UserError with the nearest one."""
    path = Path(path)
    if path.is_file():
        return path
    root = shipped("configs")
    inner = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (path.with_name(path.name + ".yaml"), root / inner, root / f"{inner}.yaml"):
        if path.name and not path.is_absolute() and candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f'config "{path}" is a folder; name a YAML file')
    here = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    known = [str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.yaml")]
    raise UserError(f'no config "{path}"{nearest(str(path), [*here, *known])}')


def dump(config: Config, path: str | Path) -> None:
    """Write every value, and the package's version, as YAML that `load_config` reads back to the same config."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {VERSION: __version__, **config.resolved()}
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(
        yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000), encoding="utf-8"
    )
    os.replace(temporary, path)


def check_resume(config: Config, run: Config, run_dir: str | Path) -> None:
    """Raise UserError naming the first key in which `config` differs from the run's, other than `CHANGEABLE`."""
    ours, theirs = (_flat({k: v for k, v in c.resolved().items() if k not in CHANGEABLE}) for c in (config, run))
    for key in dict.fromkeys([*theirs, *ours]):
        if ours.get(key) != theirs.get(key) or (key in ours) != (key in theirs):
            mine, run_value = (_show(values[key]) if key in values else "not set" for values in (ours, theirs))
            allowed = f"{', '.join(CHANGEABLE[:-1])} and {CHANGEABLE[-1]}"
            raise UserError(
                f"{key}: {mine}, but the run in {run_dir} has {run_value}; a resumed run may change only {allowed}"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _explain(error: ValidationError, source: Source) -> str:
    """One line for the first error, and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = tuple(str(part) for part in first["loc"])
    if first["type"] == "missing":  # no key is required: it is an item of a pair
        path = path[:-1]
    if first["type"] == "extra_forbidden":
        text = f"unknown key{_nearest_key(path)}"
    else:
        limits = dict(first.get("ctx", {}))
        hint = ""
        if first["type"] == "literal_error":
            choices = [word for word in str(limits["expected"]).split("'") if word.isidentifier() and word != "or"]
            limits["expected"] = ", ".join(choices)
            close = difflib.get_close_matches(str(first["input"]), choices, n=1)
            hint = f' (nearest: "{close[0]}")' if close else ""
        expected = _EXPECTED.get(first["type"], "").format(**limits) or first["msg"]
        text = f"expected {expected}, got {_show(first['input'])}{hint}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{source.where(path)}: {'.'.join(path)}: {text}{more}"


def _nearest_key(path: tuple[str, ...]) -> str:
    """The key that was probably meant: a similar one in the section, one of this name elsewhere, or all."""
    section, leaf = list(path[:-1]), path[-1]
    if section and section[0] in TABLES:
        section[1:2] = ["NAME"]
    keys = [key for key, _, _ in walk()]
    depth = len(section)
    siblings = [key.split(".")[-1] for key in keys if key.split(".")[:-1] == section]
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)
    if close:
        return f' (nearest: "{".".join([*path[:depth], close[0]])}")'
    names = {key.split(".")[-1]: key for key in reversed(keys)}
    close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.8)
    if close:
        return f' (nearest: "{names[close[0]]}")'
    return f" (keys {'of ' + '.'.join(path[:-1]) if section else 'here'}: {', '.join(siblings)})"


def _show(value: Any) -> str:
    """A value in an error message, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
