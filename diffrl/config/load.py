"""From a YAML file and overrides to a checked `Config`, and back to a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from diffrl.config.base import Problem
from diffrl.config.checks import check
from diffrl.config.schema import Config, config_class, names_of
from diffrl.config.source import Dumper, Source, read
from diffrl.errors import UserError, nearest
from diffrl.records.disk import special, write_text
from diffrl.resources import shipped, shipped_configs
from diffrl.version import __version__

VERSION = "diffrl_version"


def load_config(path: str | Path, overrides: Iterable[str] = (), world: int | None = None) -> Config:
    """Read, override and check a config.

    `path`: a file, or a shipped config's name (`playground/nft`, `configs/playground/nft.yaml`). `overrides`: texts
    `section.key=value`. `world`: number of processes that will run it (default: WORLD_SIZE, or 1).

    Raises UserError in one line: where (file and line, or the command line), the dotted key, what is wrong.
    """
    file = find_config(path)
    source = read(file)
    _fill(source.data)
    _put_on(source, overrides)
    return _checked(source, f"runs/{file.stem}", world)


def make_config(
    base: str | Path | Config | Mapping[str, Any] | None,
    overrides: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    world: int | None = None,
    outside: str = "argument",
) -> Config:
    """Like `load_config`, from a program: `base` may also be a config, or a table of sections and keys, or nothing.

    `values`: sections and keys that replace the base's, section by section and key by key; None takes a section out.
    The tables `rewards` and `watch` are replaced as a whole; what becomes a reward is no longer watched.
    `outside`: where overrides and values come from, for messages.
    """
    if base is None or isinstance(base, Config | Mapping):
        data = base.resolved() if isinstance(base, Config) else {}
        source, folder = Source("config", data, outside=outside), "runs/run"
        if isinstance(base, Mapping):
            _put_on(source, values=base)
    else:
        file = find_config(base)
        source, folder = read(file), f"runs/{file.stem}"
    source.outside = outside
    _fill(source.data)
    values = values or {}
    _put_on(source, overrides, values)
    if "watch" not in values and isinstance(watched := source.data.get("watch"), dict):
        for name in values.get("rewards") or ():
            watched.pop(name, None)
    return _checked(source, folder, world)


def _put_on(source: Source, words: Iterable[str] = (), values: Mapping[str, Any] | None = None) -> None:
    if words or values:
        from diffrl.config.overrides import put_on

        put_on(source, words, values or {})


def _checked(source: Source, folder: str, world: int | None) -> Config:
    """The config of a source, `folder` being the run's if it names none."""
    version = str(source.data.pop(VERSION, __version__))  # of a run's config.yaml
    try:
        return _validated(source, folder, world)
    except UserError as error:
        if version == __version__:
            raise
        # The line is not the user's own: a run's folder has the config as the version that trained it understood it.
        theirs = f"written by diffrl {version[:20]}, which this version, {__version__}, does not read"
        raise UserError(f"{source.name}: {theirs}: use that version for it ({error})") from error


def _validated(source: Source, folder: str, world: int | None) -> Config:
    _fill(source.data)
    try:
        kind = config_class(source.data)
    except Problem as problem:
        raise UserError(f"{source.where(tuple(problem.key.split('.')))}: {problem}") from problem
    if kind.chosen is not None and source.data.get(kind.chosen.name, {}) is None:
        source.data[kind.chosen.name] = {}  # an empty section: its defaults
    try:
        config = kind.model_validate(source.data)
    except ValidationError as error:
        from diffrl.config.explain import explain

        raise UserError(explain(error, source.where, *names_of(kind))) from error
    if not config.run_dir:
        config = config.model_copy(update={"run_dir": folder})
    if "://" in config.run_dir:  # a folder of this machine, which is sent there
        address = config.run_dir.rstrip("/")
        sent = config.checkpoint.model_copy(update={"push": address})
        config = config.model_copy(update={"run_dir": f"runs/{address.rpartition('/')[2]}", "checkpoint": sent})
    try:
        check(config, world)
    except Problem as problem:
        raise UserError(f"{source.where(tuple(problem.key.split('.')))}: {problem}") from problem
    except OSError as error:
        raise UserError(f"{source.name}: {str(error.filename)[:60]}: {error.strerror}") from error
    return config


def _fill(data: dict[str, Any]) -> None:
    """Put the preset of a published model beneath what is said."""
    if "/" in str(data.get("model")):
        from diffrl.config.presets import fill

        fill(data)


def find_config(path: str | Path) -> Path:
    """The file of this path or shipped name; raises UserError with the nearest one."""
    try:
        return _found(Path(path))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f'config "{str(path)[:60]}": cannot be read: {reason}') from error


def _found(path: Path) -> Path:
    if path.is_file():
        return path
    root = shipped("configs")
    inner = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if path.name and not path.is_absolute():
        for candidate in (path.with_name(path.name + ".yaml"), root / inner, root / f"{inner}.yaml"):
            if candidate.is_file():
                return candidate
    if kind := "folder" if path.is_dir() else special(path):
        raise UserError(f'config "{path}" is a {kind}; name a YAML file')
    here = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    known = [str(file.relative_to(root).with_suffix("")) for file in shipped_configs()]
    if inside := [name for name in known if name.endswith(f"/{path}")]:
        raise UserError(f'no config "{path}" (nearest: "{inside[0]}"{", ..." * (len(inside) > 1)})')
    raise UserError(f'no config "{path}"{nearest(str(path), [*here, *known])}')


def dump(config: Config, path: str | Path) -> None:
    """Write every value, and the package's version, as YAML that `load_config` reads back to the same config."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {VERSION: __version__, **config.resolved()}
    write_text(path, yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000))
