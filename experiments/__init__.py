"""Where the documentation's figures come from; run from a checkout, not in the wheel."""

from __future__ import annotations

import shlex
import sys


def command() -> str:
    """What started this process, as a result says it: `python -m experiments.NAME WORD ...`."""
    spec = sys.modules["__main__"].__spec__
    started = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *started, *sys.argv[1:]])
