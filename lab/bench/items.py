"""What all benchmarks have in common: prompts with what their judges are asked, and values that a table is made of."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffrl.divgen.listings import table_of
from diffrl.errors import UserError, nearest, read_text

Mark = tuple[str, str, float]  # section, line, a value whose mean over all prompts is the line's
Answers = Mapping[str, Sequence[Sequence[float]]]  # by judge: of each image of a prompt, its answers


@dataclass(frozen=True)
class Item:
    """A prompt, the metadata that its judges are given, and how many answers each of them owes for an image (empty:
    one of every judge)."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    owed: Mapping[str, int] = field(default_factory=dict)

    def owes(self, judge: str) -> int:
        """How many answers about an image are the judge's."""
        return self.owed.get(judge, 0) if self.owed else 1


@dataclass(frozen=True)
class Judge:
    """A judge of a benchmark.

    official: whom the official script asks. reward: the reward that stands for it (None: there is none here; one of
    your own by `--judge`), built with `arguments`. needs: its weights and their size.
    """

    official: str
    reward: str | None
    needs: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    imports: Sequence[str] = ()  # packages without which it is left out


@dataclass(frozen=True)
class Bench:
    """One benchmark: its facts, and how its files are read and its answers become the values of its table.

    prompts, images (of each), seed: official, as far as there is one. forwards: of the judges, for all. judges: by
    name; none where any rewards judge. overall: a line that is the mean of a section's lines, as {line: section}.
    decimals: of a value in the table. remarks: where the official script does what a reader may not expect.
    """

    title: str
    source: str
    licence: str
    citation: str
    prompts: int
    forwards: int
    read: Callable[[Path], list[Item]]
    marks: Callable[[Item, Answers], Iterator[Mark]]
    images: int = 1
    seed: int = 0
    judges: Mapping[str, Judge] = field(default_factory=dict)
    overall: Mapping[str, str] = field(default_factory=dict)
    decimals: int = 2
    remarks: Sequence[str] = ()


def find(folder: Path, *names: str) -> Path:
    """The first of the files that the folder has; UserError names what was looked for."""
    if not folder.is_dir():
        raise UserError(f'--data: "{folder}" is not a folder; name your copy of the official files')
    for name in names:
        if (folder / name).is_file():
            return folder / name
    there = [path.name for path in folder.iterdir()]
    hint = nearest(Path(names[0]).name, there) if there else " (it is empty)"
    raise UserError(f"--data: {folder} has no {' or '.join(names)}{hint}")


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, row) of a .csv or .tsv file with a head; UserError unless it has the columns, and for short rows."""
    text, tabs = read_text(path), path.suffix == ".tsv"
    form: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    head = [name for name in next(csv.reader([text.partition("\n")[0]], **form)) if name]
    for column in columns:
        if column not in head:
            raise UserError(f'{path}: no column "{column}"{nearest(column, head)}; it has: {", ".join(head)[:200]}')
    for number, row in list(table_of(path, text, **form)):  # all of them: the last may have swallowed others
        where = f"{path}:{number}"
        if any(row[column] is None for column in columns):
            raise UserError(f"{where}: fewer fields than the head has")
        yield where, row


def objects_of(path: Path, keys: Mapping[str, type]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of a .jsonl file; UserError unless each has the keys, of these types."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = parsed(line, where)
        for key, kind in keys.items():
            if not isinstance(entry.get(key), kind):
                hint = nearest(key, entry) if key not in entry else ""
                raise UserError(f'{where}: expected a {kind.__name__} under "{key}"{hint}')
        yield where, entry


def parsed(text: str, where: str) -> dict[str, Any]:
    """A JSON object; UserError for anything else."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({' '.join(str(error).split())[:80]})") from error
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected a JSON object")
    return entry
