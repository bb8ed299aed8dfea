"""The tiny models' weights: a process reads a folder's once, and a test that loads it again gets copies.

Reading takes three times as long as copying, and the tests load the same folders hundreds of times.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDERS = ("unit", "integration", "numerics")  # of tests; others measure devices
KEPT = 8  # folders of models
LARGEST = 2**22  # bytes of one
_known: OrderedDict[str, dict[str, Any]] = OrderedDict()


def load_parts(
    read: Callable[..., dict[str, Any]], folder: Path, index: Mapping[str, Any], types: Mapping[str, Any]
) -> dict[str, Any]:
    """As `read`, `diffrl.policy.files.load_parts`, as long as no file of the folder has changed."""
    stats = {str(path): path.stat() for path in sorted(Path(folder).rglob("*"))}
    if sum(stat.st_size for stat in stats.values()) > LARGEST:
        return read(folder, index, types)
    now = [(path, stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in stats.items()]
    key = repr((str(folder), now, dict(index), dict(types)))
    if key not in _known:
        _known[key] = read(folder, index, types)
        while len(_known) > KEPT:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return copy.deepcopy(_known[key])
