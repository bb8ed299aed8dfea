"""Several sets of images, as a report is called with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from diffrl.divgen.folders import OURS, natural
from diffrl.divgen.listings import LISTS, SPLITS, entries, show
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.errors import UserError
from diffrl.pictures import SUFFIXES

MOST = 30  # sets of one page
_MODEL, _FOLDER = ("model", "name", "set"), ("folder", "path", "dir", "directory")


def sets_of(words: Sequence[str]) -> dict[str, Path]:
    """Sets by name: of folders (`NAME=DIR` names one), a folder of folders, a pattern, or a .csv of model and folder.

    Raises UserError for a name that comes twice, a pattern or a file without a folder, and for more than `MOST` sets.
    """
    found: list[tuple[str, Path]] = []
    for word in words:
        name, equals, rest = word.partition("=")
        path = Path(rest if equals else word)
        if path.suffix in (".csv", ".tsv") and path.is_file():
            found += _named_in(path)
        elif not path.exists() and any(letter in str(path) for letter in "*?["):
            matches = [Path(one) for one in sorted(glob(str(path))) if Path(one).is_dir()]
            if not matches:
                raise UserError(f'report: no folder is named as "{word}"')
            found += _apart(matches)
        elif len(words) == 1 and not equals and len(below := _sets_below(path)) > 1:
            found += [(show(Path(sub.name)), sub) for sub in below]
        else:
            found.append((name if equals else show(Path(path.resolve().name)), path))
    names = Counter(name for name, _ in found)
    if max(names.values()) > 1:
        raise UserError("report: two folders have the same name; name them, as in base=divgen/base")
    if len(found) > MOST:
        raise UserError(f"report: {len(found)} sets; a page has room for {MOST}")
    return dict(found)


def _apart(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Named by their last part, or by the part in which they differ: runs/a/samples, runs/b/samples."""
    for i in range(-1, -min(len(path.parts) for path in paths) - 1, -1):
        names = [show(Path(path.parts[i])) for path in paths]
        if len(set(names)) == len(paths):
            return list(zip(names, paths, strict=True))
    return [(show(path), path) for path in paths]


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
