"""Errors that a user can mend, and the help that goes with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: one line that says what, where and the nearest valid choice. The command line exits with 2."""


def in_one_line(error: BaseException, most: int = 500) -> str:
    """`Type: message` of an exception of somebody else's code: one line, not too long, whatever its message does."""
    try:
        said = " ".join(str(error).split())
    except Exception:
        said = "(its message cannot be shown)"
    return f"{type(error).__name__}: {said[:most]}{' ...' * (len(said) > most)}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """`' (nearest: "x")'` for the choice closest to `name`, or all choices when few, or an empty string."""
    options = sorted(choices)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f' (nearest: "{close[0]}")'
    if 0 < len(options) <= 12:
        return f" (choose from: {', '.join(options)})"
    return ""
