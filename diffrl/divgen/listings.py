"""Files of rows that name pictures and their prompts: JSON lines, CSV, TSV, parquet; and data sets of the hub."""

from __future__ import annotations

import csv
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.divgen.embedded import PROMPTS, SEEDS, settings_of, whole
from diffrl.divgen.observe import MANIFESTS, Item
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.errors import UserError, foreign, read_text
from diffrl.prompts import Prompt
from diffrl.records.disk import replacing

COLUMNS = {
    "file": ("file", "file_name", "filename", "image", "image_path", "img", "path", "file_path"),
    "prompt": PROMPTS,
    "member": ("member", "sample", "sample_id"),
    "seed": SEEDS,
}
LISTS = (*MANIFESTS, "metadata.jsonl", "metadata.csv")  # then any other file of rows
ROWS = (".jsonl", ".csv", ".tsv", ".parquet")
SPLITS = ("train", "test", "validation", "val", "data")


def show(path: Path | None) -> str:
    """A path as text that can be written and printed, whatever bytes it has."""
    return "" if path is None else os.fsencode(path).decode("utf-8", "backslashreplace")


def lists_in(folder: Path) -> list[Path]:
    for name in LISTS:
        if (folder / name).is_file() and _has_columns(folder / name):
            return [folder / name]
    others = sorted(file for file in folder.iterdir() if file.suffix in ROWS and file.is_file())
    parquet = all(file.suffix == ".parquet" for file in others)
    return [file for file in others if _has_columns(file)][: None if parquet else 1]


def lists_below(folder: Path, wanted: str) -> list[Path]:
    """Of a data set's splits; UserError where they are sets of several models."""
    below = {sub: lists for sub in sorted(folder.iterdir()) if sub.is_dir() and (lists := lists_in(sub))}
    others = [sub.name for sub in below if sub.name.lower() not in SPLITS]
    if len(others) > 1 and not wanted:
        raise UserError(several(folder, others))
    deep = [] if below else [file for file in sorted(folder.rglob("*.parquet")) if _has_columns(file)]
    return [file for lists in below.values() for file in lists] or deep


def several(folder: Path, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return (
        f"{show(folder)} holds {len(names)} sets of the same prompts ({shown}): score each of them, or compare them "
        f"with `diffrl divgen report {show(folder)} --out report.html`"
    )


def _has_columns(file: Path) -> bool:
    """Whether rows name pictures; manifest.jsonl is ours, and is read whatever it holds."""
    if file.name in MANIFESTS:
        return True
    try:
        _, row = next(iter(entries(file, "replace")), (0, {}))
    except UserError:
        return False
    return _column(row, "file") is not None


def _column(row: Mapping[str, Any], name: str) -> str | None:
    lower = {str(key).strip().lower().replace(" ", "_"): key for key in row if key is not None}
    return next((lower[key] for key in COLUMNS[name] if key in lower), None)


def entries(file: Path, errors: str = "strict") -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a file of rows; `errors`: what becomes of bytes that are no text."""
    if file.suffix == ".parquet":
        from diffrl.image_sets.reading import open_parquet

        table = open_parquet(file)
        with foreign(file):
            rows = (row for batch in table.iter_batches(64) for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
        return
    data = read_text(file, errors)
    if file.suffix != ".jsonl":
        head = data.partition("\n")[0]
        yield from table_of(file, data, delimiter=max("\t;,", key=head.count), skipinitialspace=True)
        return
    for number, line in enumerate(data.split("\n"), start=1):
        if line.strip():
            try:
                yield number, dict(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise UserError(f'{file}:{number}: expected {{"file": ..., "prompt": ...}} ({error!r})') from error


def table_of(file: Path, text: str, **form: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a table's text with a head; `form`: of a csv reader. U+2028 and U+0085 end no line.

    Raises UserError for a quote that is not closed, behind the row that has swallowed what follows it.
    """
    csv.field_size_limit(2**31 - 1)  # or such a row, and a long one, is a failure of its own
    lines = [f"{line}\n" for line in [*text.split("\n"), ""]]
    reader, begins = csv.DictReader(lines, **form), 2
    for row in reader:
        yield reader.line_num, row
        if reader.line_num == len(lines):  # an empty line has no row, but where it is quoted
            raise UserError(f"{file}:{begins}: a quote is opened from here on, and not closed")
        begins = reader.line_num + 1


def rows_of(file: Path, root: Path) -> Iterator[Item]:
    for number, row in ((number, one) for number, many in entries(file) for one in _singles(many)):
        columns = {name: _column(row, name) for name in COLUMNS}
        try:
            values = {name: row.pop(key, None) if key is not None else None for name, key in columns.items()}
            path, text = values["file"], values["prompt"]
            if path is None or not isinstance(text, str):
                missing = "file" if path is None else "prompt"
                raise KeyError(missing)
            path = _unpacked(path, root, f"{file.stem}-{number:06d}") if isinstance(path, dict) else placed(path, root)
            text.encode()  # a lone surrogate is no text that could be written or printed
            stated = whole(values["member"])
            if stated is None and values["member"] not in (None, "", -1):
                raise ValueError(f"member: expected a whole number, got {values['member']!r}")
            seed = whole(values["seed"])
            if row.get("keyword") is not None and not isinstance(row["keyword"], str):
                raise TypeError("keyword: expected a text")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f'{file}:{number}: expected {{"file": ..., "prompt": ...}} ({error!r})') from error
        if (dimension := row.get("dimension", "")) not in ("", None, *DIMENSIONS):
            raise UserError(f'{file}:{number}: unknown dimension "{dimension}"')
        metadata = {key: value for key, value in row.items() if isinstance(key, str) and value is not None}
        member = -1 if stated is None else stated
        yield Item(Prompt(text, metadata), member, path, seed=seed, settings=settings_of(metadata))


def _singles(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each picture of a group's row, as `diffrl draw-set` writes them; any other row as it is."""
    if not isinstance(row.get("images"), list):
        return [row]
    more, given = row.get("metadata"), row.get("scores")
    scores = given if isinstance(given, dict) else {}
    rest = more if isinstance(more, dict) else {}
    rows = [{**rest, "file": file, "prompt": row.get("prompt"), "member": m} for m, file in enumerate(row["images"])]
    for m, one in enumerate(rows):
        one["scores"] = {name: values[m] for name, values in scores.items() if len(values) == len(rows)}
    return rows


def placed(name: str, root: Path) -> Path:
    """Where a row's picture is: also by Windows' path, and in a folder that was moved, by the end of its path."""
    path = root / name
    if not path.is_file():
        parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", "..")]
        ends = (root.joinpath(*parts[i:]) for i in range(len(parts)))
        path = next((end for end in ends if end.is_file()), path)
    return path


def _unpacked(image: Mapping[str, Any], root: Path, name: str) -> Path:
    """The picture of a data set's row; one that stands in the row itself is written beside it."""
    if image.get("bytes") is None:
        return root / str(image["path"])
    path = root / "unpacked" / f"{name}{Path(str(image.get('path') or '')).suffix or '.png'}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as unfinished:
            unfinished.write_bytes(image["bytes"])
    return path


def is_hub(folder: Path) -> bool:
    return str(folder).startswith("hub:")


@functools.cache
def from_hub(folder: Path) -> tuple[Path, list[Path]]:
    """Where `hub:OWNER/NAME[@REVISION][:FILES]` lies in the hub's cache, and the files that FILES asks for."""
    from diffrl.image_sets.hub import fetched

    return fetched(str(folder))


def home(folder: Path) -> Path:
    """Where a set's pictures lie, and what is kept beside them."""
    return from_hub(folder)[0] if is_hub(folder) else folder
