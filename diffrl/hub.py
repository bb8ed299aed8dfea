"""Names of the Hugging Face hub, `OWNER/NAME[@REVISION]`: the commit that one stands for, and its files.

Wherever a config or a reward names a model, `pinned` resolves it: once a process, so that all parts of it come from one
commit, which is kept in what a run records. The hub itself is asked in `diffrl.hub_access`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, in_one_line

NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)  # a few old names have no owner
RULES = 'A to Z, digits, "_", and inside also single "-" and "."; no ".git" at the end'

_commits: dict[str, str] = {}
_open: list[dict[str, str]] = []


def hub_file(repository: str, file: str, missing: str) -> Path:
    """A file of a hub repository, in this machine's cache.

    Raises:
        UserError: it is not available; `missing` says what is not here either.
    """
    from huggingface_hub import hf_hub_download

    from diffrl.hub_access import hub_failure

    source, at = pinned(repository)
    try:
        return Path(hf_hub_download(source, file, **at))
    except Exception as error:  # the hub's, the network's, the disk's: each library has its own
        reason = hub_failure() or in_one_line(error, most=120)
        raise UserError(f"{missing}, and the hub does not give it ({reason})") from error


def pinned(name: str, kind: str = "model") -> tuple[str, dict[str, Any]]:
    """What a library's `from_pretrained(source, **at)` is given for a name: the repository, and `revision`, its commit.

    A folder or file of this machine, and whatever is no name of the hub, comes back as it is. Where no revision is
    asked and no commit is known, the library is left to say what is missing.

    Raises:
        UserError: the hub, or offline this machine's cache, has no such revision.
    """
    match = NAME.fullmatch(name)
    if match is None or Path(os.path.expanduser(name)).exists() or not _is_valid(match[1]):
        return name, {}
    from diffrl.hub_access import commit_at, hub_failure

    repository, revision = match.groups()
    commit = commit_at(repository, revision or "main", kind)
    if commit is None:
        if revision is not None:
            where = "the hub has" if not hub_failure() else "this machine's cache has"
            raise UserError(f'"{name}": {where} no revision "{revision}" of it ({hub_failure() or "a branch, a tag"})')
        return repository, {}
    for table in (_commits, *_open):
        table[repository] = commit
    return repository, {"revision": commit}


def not_name(text: str, form: str = "OWNER/NAME") -> str:
    """What to write instead of `text`, which is to be `form`, with [@REVISION] in it or not; "" where the hub takes it.

    By the hub's own rules, without asking it.
    """
    match = NAME.fullmatch(text)
    if match is not None and "/" in match[1] and _is_valid(match[1]) and ("@" in form or match[2] is None):
        return ""
    return f"write {form}{f' ({RULES})' if text.partition('@')[0].count('/') == 1 else ''}"


def plain(value: Any) -> Any:
    """Without its revision, where this is a name of the hub with one; the commit is compared beside it."""
    match = isinstance(value, str) and "@" in value and re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)@\w[\w./-]*", value)
    return match[1] if match else value


def commit_of(name: str) -> str | None:
    """The commit that a name stands for; None for a folder, and where it is not known."""
    commit: str | None = pinned(name)[1].get("revision")
    return commit


def commits() -> dict[str, str]:
    """Of all repositories that this process has resolved: their commits."""
    return dict(_commits)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """The repositories, with their commits, that are asked for inside."""
    found: dict[str, str] = {}
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)


def _is_valid(repository: str) -> bool:
    """By the hub's own rules: no "--", no "..", at most 96 characters."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with contextlib.suppress(HFValidationError):
        validate_repo_id(repository)
        return True
    return False
