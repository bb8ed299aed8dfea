"""Several sets of images, as a report is called with them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from glob import glob
from pathlib import Path, PurePath

from diffrl.divgen.folders import OURS, natural
from diffrl.divgen.listings import LISTS, SPLITS, entries, is_hub, show
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.errors import UserError
from diffrl.tools.pictures import SUFFIXES

MOST = 30  # sets of one page
_MODEL, _FOLDER = ("model", "name", "set"), ("folder", "path", "dir", "directory")


def sets_of(words: Sequence[str]) -> dict[str, Path]:
    """Sets by name: of folders (`NAME=DIR` names one), a folder of folders, a pattern, a .csv of model and folder, or a
    data set of the hub. What is not named gets the shortest end of its path that tells it from the others.

    Raises UserError for a name that comes twice, a pattern or a file without a folder, and for more than `MOST` sets.
    """
    found: list[tuple[str | None, Path]] = []
    for word in words:
        name, equals, rest = word.partition("=")
        path = Path(rest if equals else word)
        if path.suffix in (".csv", ".tsv") and path.is_file():
            found += _named_in(path)
        elif not path.exists() and not is_hub(path) and any(letter in str(path) for letter in "*?["):
            matches = [Path(one) for one in sorted(glob(str(path))) if Path(one).is_dir()]
            if not matches:
                raise UserError(f'report: no folder is named as "{word}"')
            found += [(None, one) for one in matches]
        elif len(words) == 1 and not equals and len(below := _sets_below(path)) > 1:
            found += [(None, sub) for sub in below]
        else:
            found.append((name if equals else None, path))
    ends = iter(_ends([path for name, path in found if name is None]))
    names = [next(ends) if name is None else name for name, _ in found]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f'report: two sets are "{twice[0]}"; name one otherwise, as in base=divgen/base')
    if len(found) > MOST:
        raise UserError(f"report: {len(found)} sets; a page has room for {MOST}")
    return {name: path for name, (_, path) in zip(names, found, strict=True)}


def _ends(paths: Sequence[Path]) -> list[str]:
    """The shortest ends that differ, without what all of them end with: a and b for runs/a/samples, runs/b/samples."""
    hub = re.compile(r"hub:|[@:].*")
    parts = [PurePath(hub.sub("", str(path)) if is_hub(path) else os.path.realpath(path)).parts for path in paths]
    most, names = max(map(len, parts), default=0), list[str]()
    while len(set(parts)) > 1 and len({one[-1:] for one in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [one[:-1] for one in parts]
    for one in parts:
        same = (n for n in range(1, most + 1) if sum(other[-n:] == one[-n:] for other in parts) == 1)
        names.append(show(Path(*one[-next(same, 1) :])))
    return names


def _named_in(file: Path) -> list[tuple[str, Path]]:
    found = []
    for number, row in entries(file):
        values = {str(key).strip().lower(): value for key, value in row.items() if key is not None}
        model, folder = (next((values[k] for k in keys if values.get(k)), None) for keys in (_MODEL, _FOLDER))
        if not model or not folder:
            raise UserError(f'{file}:{number}: expected a row of "model" and "folder", got {", ".join(values)}')
        found.append((model, next(p for p in (file.parent / folder, Path(folder)) if p.is_dir() or p == Path(folder))))
    if not found:
        raise UserError(f"{file}: no row")
    return found


def _sets_below(root: Path) -> list[Path]:
    """The folders of pictures in a folder that is no set itself: one of several models."""
    if not root.is_dir() or any((root / name).exists() for name in (*LISTS, *OURS)):
        return []
    subs = sorted((sub for sub in root.iterdir() if sub.is_dir() and not sub.name.startswith(".")), key=natural)
    loose = any(file.suffix.lower() in SUFFIXES for file in root.iterdir())
    if loose or any(sub.name.lower() in (*DIMENSIONS, *SPLITS) for sub in subs):
        return []
    return [
        sub for sub in subs if any(file.suffix.lower() in SUFFIXES or file.name in LISTS for file in sub.rglob("*"))
    ]
