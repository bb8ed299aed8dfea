"""Prompts of any data set of the hub: `hub:OWNER/NAME[@REVISION][:split[:column]]`, read by the library `datasets`.

The rows are streamed, so that nothing but the text columns is loaded, and kept in a file of the user's cache folder:
the next run reads that file and needs no network. Delete the file to read the data set again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.files import cache_folder
from diffrl.hub import not_name, pinned
from diffrl.prompts import Prompt, load_prompts

PREFIX = "hub:"
COLUMNS = ("prompt", "text", "caption", "prompts")  # where a prompt is looked for if no column is named
MOST = 200_000  # prompts that are read of a data set
FORM = "hub:OWNER/NAME[@REVISION][:split[:column]]"

log = logging.getLogger("diffrl")


@dataclass(frozen=True)
class HubSource:
    """What `hub:OWNER/NAME:split:column` names; no column: the first of `COLUMNS` that the data set has."""

    name: str
    split: str = "train"
    column: str | None = None

    @property
    def file(self) -> Path:
        """Where its prompts are kept."""
        key = hashlib.blake2b(repr((self.name, self.split, self.column)).encode(), digest_size=6).hexdigest()
        return cache_folder() / "prompts" / f"{self.name.replace('/', '--')}-{self.split}-{key}.jsonl"


def split(source: str) -> str:
    """Which split of the data set a source names."""
    return parse(source).split


def prompts(source: str) -> Sequence[Prompt]:
    """Its prompts, read on first use."""
    return load_prompts(str(cached_file(source)))


def parse(source: str) -> HubSource:
    """The parts of a source; UserError for another form, and where the library is missing and nothing is kept."""
    name, *rest = source.removeprefix(PREFIX).split(":")
    example = f"{FORM}, for example hub:OWNER/NAME:test:prompt"
    if (wrong := not_name(name, example)) or len(rest) > 2 or not all(rest):
        raise UserError(f'prompts "{source}": {wrong or f"write {example}"}')
    hub = HubSource(name, *rest)
    if not hub.file.is_file() and importlib.util.find_spec("datasets") is None:
        raise UserError(f'prompts "{source}" needs the library datasets: pip install "diffrl[hub]"')
    return hub


def cached_file(source: str) -> Path:
    """A .jsonl file of the data set's prompts, written on first use.

    Each line has "prompt", and as metadata the row's other columns of text, numbers, lists and tables. Prompts after
    the first `MOST` are left out, and so are empty ones and repetitions, which are counted in a message.

    Raises:
        UserError: a form, name, split or column that there is not, no network and no file, or no room for one.
    """
    hub = parse(source)
    if hub.file.is_file():
        return hub.file
    rows = _stream(hub, source)
    hub.file.parent.mkdir(parents=True, exist_ok=True)
    part = hub.file.with_name(f"{hub.file.name}.{os.getpid()}")  # several processes may read it at once
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in _distinct(rows, source))
        if not part.stat().st_size:
            raise UserError(f'prompts "{source}": no text in column "{hub.column or COLUMNS[0]}"')
        part.replace(hub.file)
    except OSError as error:  # a full disk, or a hub that is gone in the middle
        raise UserError(f'prompts "{source}": cannot be kept as {hub.file} ({_line(error)})') from error
    finally:
        part.unlink(missing_ok=True)
    return hub.file


def _stream(hub: HubSource, source: str) -> Iterator[dict[str, Any]]:
    """Rows with their text under "prompt"."""
    import datasets

    try:
        name, at = pinned(hub.name, "dataset")
        data = datasets.load_dataset(name, split=hub.split, streaming=True, **at)
        features = data.features or next(iter(data)).keys()
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        text = "not found on the hub, or no network, and nothing kept of an earlier run"
        raise UserError(f'prompts "{source}": {text} ({_line(error)})') from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f'prompts "{source}": cannot be read ({_line(error)})') from error
    names = [name for name in features if _is_plain(features[name] if isinstance(features, Mapping) else None)]
    column = hub.column or next((name for name in COLUMNS if name in names), None)
    if column not in names:
        wanted = f'no text column "{column}"{nearest(column, names)}' if column else "which column has the prompts?"
        raise UserError(f'prompts "{source}": {wanted}; there are: {", ".join(names)}. Write {FORM}')
    return ({"prompt": row.pop(column), **row} for row in data.select_columns(names))


def _is_plain(feature: Any) -> bool:
    """Whether a column holds text, numbers, or lists of them: no pictures, no sounds."""
    name = type(feature).__name__
    return name in ("Value", "List", "LargeList", "Sequence", "ClassLabel", "NoneType", "dict", "list", "Json")


def _distinct(rows: Iterable[dict[str, Any]], source: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    dropped = 0
    for row in rows:
        text = str(row["prompt"] or "").strip()
        if not text or text in seen:
            dropped += 1
            continue
        if len(seen) == MOST:
            log.warning("%s: the first %d prompts are used", source, MOST)
            break
        seen.add(text)
        plain = {name: value for name, value in row.items() if value is not None and _fits_json(value)}
        yield {**plain, "prompt": text}
    if dropped:
        log.warning("%s: %d rows without a text or with a repeated one are left out", source, dropped)


def _fits_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:  # dates, bytes
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
