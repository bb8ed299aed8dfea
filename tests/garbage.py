"""What imported modules hold is never garbage: Python's collector need not walk through it, again and again.

After the imports of a whole run that is some 700,000 objects and a third of a second for each full collection; without
this, they took 60 of the 815 seconds of processor that the tests took.
"""

from __future__ import annotations

import gc
import sys

MANY = 50  # modules
_freeze, _unfreeze = gc.freeze, gc.unfreeze
_seen = 0


def keep_frozen() -> None:
    """What is alive now stays out of the collector's sight: what would take it back or add to it does nothing."""
    _freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, _nothing)


def freeze_modules() -> None:
    """`keep_frozen` after a full collection, if many modules were imported since it was last done."""
    global _seen
    if len(sys.modules) >= _seen + MANY:
        _seen = len(sys.modules)
        gc.collect()
        keep_frozen()


def thaw() -> None:
    """At a process's end: some libraries say that what the collector never saw is a leak."""
    _unfreeze()


def _nothing() -> None:
    pass
