"""Files beside a user's file that it imports: found as Python finds those beside a script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from diffrl.errors import UserError
from diffrl.files import imports_of

_FOLDERS: set[Path] = set()  # of users' files


def find_siblings(file: Path, kind: str) -> None:
    """Let `file` import what lies beside it, now and later: its folder is the last on the path, so that no file there
    hides a package.

    Raises:
        UserError: another user's file has the name of one that it imports.
    """
    names = {name.partition(".")[0] for name in imports_of(file)}
    folder = file.parent
    beside = [n for n in sorted(names) if (folder / f"{n}.py").is_file() or (folder / n / "__init__.py").is_file()]
    if beside and str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    for name in beside:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # of a module without a spec, such as the program's own
            continue
        found = Path((spec.origin if spec else None) or file).resolve()
        home = found.parent.parent if found.name == "__init__.py" else found.parent
        if home != folder and home in _FOLDERS:
            raise UserError(f'{kind} file {file} imports "{name}", which is {found} already: rename one of them')
    if beside:
        _FOLDERS.add(folder)
