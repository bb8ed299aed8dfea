"""Make the tiny pipeline of a name in a folder, to be checked: `python -m tests.tiny_models z-image FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from .recent import TINY, make

if len(sys.argv) != 3 or sys.argv[1] not in TINY:
    raise SystemExit(f"usage: python -m tests.tiny_models NAME FOLDER; names: {', '.join(TINY)}")
make(sys.argv[1], Path(sys.argv[2]))
print(f"diffrl models check {sys.argv[2]} --resolution {TINY[sys.argv[1]].resolution}")
