"""Errors that a user can mend, and the help that goes with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: one line that says what, where and the nearest valid choice. The command line exits with 2."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """`' (nearest: "x")'` for the choice closest to `name`, or all choices when few, or an empty string."""
    options = sorted(choices)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f' (nearest: "{close[0]}")'
    if 0 < len(options) <= 12:
        return f" (choose from: {', '.join(options)})"
    return ""
