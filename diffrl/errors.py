"""Errors that a user can mend, the help that goes with them, and how they are said; and files of text, read."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(ValueError):
    """Bad input: one line that says what, where and the nearest valid choice. The command line exits with 2."""


class TrainingError(RuntimeError):
    """Training cannot go on (non-finite loss or gradient); the last checkpoint is intact.

    `details`: what is known about the step, for debugging. `quiet`: another process says it.
    """

    quiet = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


def check_process() -> None:
    """UserError for a process in which no command works: without docstrings, or in a folder that is gone."""
    if sys.flags.optimize > 1:
        text = "Python runs with -OO (or its variable is 2): without docstrings transformers and peft do not start"
        raise UserError(f"{text}; use -O (1), or neither")
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the folder that this runs in is gone (deleted or moved): cd to one that is there") from error


def first_of_machine() -> bool:
    """Does this process say what all processes of its machine meet? What machines have may differ."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def printable(text: str) -> str:
    """Text for a terminal: what would steer it (control characters, turns of the direction of writing) or cannot be
    encoded is spelled out. Names, prompts and answers of servers come from others."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """A line on stderr. Where it has lost its reader, this one and all that follow go nowhere, and nothing fails."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let a stream whose reader is gone end in nothing, with what is in its buffer, which Python flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def foreign(where: object, wanted: str = "what diffrl writes there") -> Iterator[None]:
    """For files that other programs may have written: an error of its shape becomes a UserError that names `where`."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{where}: not {wanted} ({in_one_line(error, most=200)})") from error


def read_text(path: Path, errors: str = "strict") -> str:
    """A file of text that a person or another program wrote, its lines ending in "\\n": UTF-8, or UTF-16 that says so
    by its byte-order mark. `errors`: what becomes of bytes that are no text. Raises UserError, with the line, for
    another alphabet."""
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        coding = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "UTF-8"
        text = data.decode(coding, errors)
        if coding == "UTF-8" and errors == "strict" and b"\0" in data:  # UTF-16 without its mark
            raise UnicodeDecodeError(coding, data, data.index(b"\0"), len(data), "a NUL")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        number, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        raise UserError(f"{path}:{number}: not {coding} text (byte {column} of the line); save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def in_one_line(error: BaseException, most: int = 500, place: bool = False) -> str:
    """`Type: message` of an exception of foreign code: one line, not too long, whatever its message does.

    With `place`, and where there is no message, the line of code that raised it, too: `AssertionError (file.py:12)`.
    """
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}{': ' * bool(message)}{message[:most]}{' ...' * (len(message) > most)}"
    frames = traceback.extract_tb(error.__traceback__) if place or not message else []
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """`' (nearest: "x")'` for the choice closest to `name`, or all choices when few, or an empty string."""
    options = sorted(choices)
    close = difflib.get_close_matches(name.lower(), [one.lower() for one in options], n=1, cutoff=0.5)
    if close:
        return f' (nearest: "{next(one for one in options if one.lower() == close[0])}")'
    if 0 < len(options) <= 12:
        return f" (choose from: {', '.join(options)})"
    return ""
