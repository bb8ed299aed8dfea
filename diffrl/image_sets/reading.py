"""Reads an image set: all its rows, and none of its pictures. Needs neither torch nor a model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, in_one_line, nearest, read_text
from diffrl.image_sets import FORM, PREFIX
from diffrl.image_sets.hub import fetched, parts
from diffrl.image_sets.layouts import Group, Picture, group_of, single_of
from diffrl.prompts import check_text

SCORED = "rewards.jsonl"  # what `diffrl rewards score` writes beside pictures
KINDS = (".jsonl", ".parquet")  # those of a folder; HPD's .json is named itself


@dataclass(frozen=True)
class ImageSet:
    """`digest`: of prompts, scores and the pictures' names: a resumed run must find the same."""

    source: str
    groups: tuple[Group, ...]
    digest: str

    def of_size(self, least: int) -> ImageSet:
        """Without the groups of fewer pictures."""
        return dataclasses.replace(self, groups=tuple(g for g in self.groups if len(g.pictures) >= least))

    def once(self) -> ImageSet:
        """With the first group alone of each prompt."""
        first: dict[str, Group] = {}
        for group in self.groups:
            first.setdefault(group.prompt, group)
        return dataclasses.replace(self, groups=tuple(first.values()))

    def check_column(self, name: str) -> None:
        """UserError unless every group has these scores."""
        for group in self.groups:
            if name not in group.scores:
                there = {known for other in self.groups[:1000] for known in other.scores}
                where = group.where if name in there else self.source
                raise UserError(f'no scores "{name}" in {where}{nearest(name, there)}')


def read_set(source: str) -> ImageSet:
    """The set in a folder or a file; UserError with the file and the row for what cannot be read."""
    if source.startswith(PREFIX):
        folder, files = fetched(source)
        files = files or _files(folder)
    else:
        files = _files(Path(os.path.expanduser(source)))
    return _read(source, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def is_here(source: str) -> bool:
    """Whether the set is on this machine; UserError for a hub's name that is none."""
    if not source.startswith(PREFIX):
        return Path(os.path.expanduser(source)).exists()
    parts(source)
    try:
        return bool(fetched(source, fetch=False))
    except UserError:
        return False


def folder_of(source: str) -> Path:
    """The folder that a set lies in."""
    path = Path(os.path.expanduser(source))
    return path if path.is_dir() else path.parent


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for folder in (path, path / "data") for file in sorted(folder.glob("*")) if file.suffix in KINDS]
        if not files:
            raise UserError(f'"{path}" has no .jsonl and no .parquet file; expected {FORM}')
        return [file for file in files if file.name == SCORED] or files  # it has the other files' pictures, too
    if path.is_file() and path.suffix in (*KINDS, ".json"):
        return [path]
    if path.exists():
        raise UserError(f'"{path}": expected {FORM}')
    around = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f'no file or folder "{path}"{nearest(path.name, around) if around else ""}')


@functools.lru_cache(maxsize=2)  # a config's check and its run read the same set
def _read(source: str, files: tuple[tuple[Path, int, int], ...]) -> ImageSet:
    groups: list[Group] = []
    singles: dict[str, int] = {}  # place of the group of a prompt whose pictures have rows of their own
    owners: dict[Picture, str] = {}
    for file, _, _ in files:
        for row, where in _rows(file):
            group = group_of(row, file.parent, where)
            if group is None:
                continue
            for picture in group.pictures:
                other = owners.setdefault(picture, group.prompt)
                if other != group.prompt:
                    raise UserError(f'{where}: {picture} is of "{other}" already, and here of "{group.prompt}"')
            place = singles.setdefault(group.prompt, len(groups)) if single_of(row) else len(groups)
            if place < len(groups):
                groups[place] = _joined(groups[place], group)
            else:
                groups.append(group)
    if not groups:
        raise UserError(f"{source}: no rows")
    return ImageSet(source, tuple(groups), _digest(groups))


def _joined(one: Group, other: Group) -> Group:
    """A group with one picture more."""
    if one.scores.keys() != other.scores.keys():
        given, before = (", ".join(sorted(group.scores)) or "none" for group in (other, one))
        raise UserError(f"{other.where}: scores {given}, but {one.where} has {before} for the same prompt")
    scores = {name: values + other.scores[name] for name, values in one.scores.items()}
    return dataclasses.replace(one, pictures=one.pictures + other.pictures, scores=scores)


def _digest(groups: Sequence[Group]) -> str:
    hasher = hashlib.sha256()
    for group in groups:
        names = [[Path(picture.file).name, picture.row, picture.column] for picture in group.pictures]
        hasher.update(json.dumps([group.prompt, names, group.scores, group.metadata], sort_keys=True).encode())
    return hasher.hexdigest()[:16]


def _rows(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each row with where it is."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    text = read_text(file)
    for number, line in enumerate([text] if file.suffix == ".json" else text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}" if file.suffix == ".jsonl" else str(file)
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({in_one_line(error, most=80)})") from error
        entries = [(entry, where)] if file.suffix == ".jsonl" else _entries(entry, where)
        for row, place in entries:
            check_text(row, place)
            if not isinstance(row, dict):
                raise UserError(f'{place}: expected an object like {{"image": "1.png", "prompt": "a red circle"}}')
            yield row, place


def _entries(value: Any, where: str) -> list[tuple[Any, str]]:
    if not isinstance(value, list):
        raise UserError(f"{where}: expected a list of objects, as HPD's train.json is")
    return [(row, f"{where}, entry {number}") for number, row in enumerate(value, start=1)]


def open_parquet(file: Path | str) -> Any:
    """A `pyarrow.parquet.ParquetFile`; UserError without pyarrow, and for what is none."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f'{file}: reading parquet needs pyarrow: pip install "diffrl[hub]"') from error
    try:
        return parquet.ParquetFile(file)
    except Exception as error:  # pyarrow's own kinds, and the disk's
        raise UserError(f"{file}: not a parquet file that can be read ({in_one_line(error, most=120)})") from error


def _parquet_rows(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    table = open_parquet(file)
    schema = table.schema_arrow
    pictures = [field.name for field in schema if _holds_bytes(field.type)]
    plain = [name for name in schema.names if name not in pictures]
    number = 0
    try:
        for batch in table.iter_batches(columns=plain):
            for row in batch.to_pylist():
                cells = {name: Picture(str(file), number, name) for name in pictures}
                yield {**row, **cells}, f"{file}, row {number + 1}"
                number += 1
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file}: broken after row {number} ({in_one_line(error, most=120)})") from error


def _holds_bytes(kind: Any) -> bool:
    """Is it a column of pictures: bytes, or the hub's {bytes, path}?"""
    import pyarrow.types as types

    if types.is_struct(kind):
        return "bytes" in [kind.field(i).name for i in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
