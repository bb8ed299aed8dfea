"""What makes a reward's scores what they are, as a digest: its code, its arguments, the files and weights they name."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffrl.plugins import here, is_path
from diffrl.rewards import digests, local
from diffrl.rewards.protocol import Reward
from diffrl.rewards.registry import is_module, load_class, split_name
from diffrl.version import __version__

ASIDE = ("device", "batch_size")  # arguments that do not change a score
_END = 2**20


def identity_of(plugin: str, arguments: Mapping[str, Any], reward: Reward) -> str:
    """What makes a reward's scores what they are, as a digest: its code, its arguments, the files that they name.

    Files, and those of folders, count by their names, sizes, first and last MiB, so that another machine's copies are
    the same. Of weights behind a hub's name it is the commits that count.
    """
    return digest_of(plugin, arguments, reward, _ends)[0]


def digest_of(
    plugin: str, arguments: Mapping[str, Any], reward: Reward, of_file: Callable[[Path], list[Any]], whole: bool = False
) -> tuple[str, set[str]]:
    """The digest, and the installed packages that the reward's code imports."""
    from diffrl.hub import plain

    imported: set[str] = set()
    if local.is_local(plugin):
        code = local.digest(plugin, whole)
    else:
        code, imported = _code(plugin)
    used = {key: value for key, value in sorted(arguments.items()) if key not in ASIDE}
    chosen = {key: [plain(value), stamp(here(value), of_file)] for key, value in used.items()}
    behind = [getattr(reward, "identity", ""), getattr(reward, "commits", None) or {}]  # a server's own; the hub's
    text = json.dumps([__version__, plugin, code, chosen, behind], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest(), imported


def _code(plugin: str) -> tuple[str, set[str]]:
    """The digest of the files that make a reward, with those of FILE.py:Class of d2:FILE.py:Class; the packages."""
    plugin, inner = split_name(plugin)
    reward_class = load_class(plugin)
    source = _source(plugin, reward_class)
    if source is None:
        return "", set()
    files, imported = digests.code_files(source, reward_class.__module__.partition(".")[0])
    inside, more = _code(inner) if inner is not None and is_path(inner) else ("", set())
    return digests.code_digest(files) + inside, imported | more


def _source(plugin: str, reward_class: type) -> Path | None:
    """The file where a reward stands, also one that only names what another file defines."""
    if is_path(plugin):
        return Path(plugin.rpartition(":")[0]).expanduser()
    written = getattr(reward_class, "written", reward_class)
    owner = sys.modules[plugin.partition(":")[0]] if is_module(plugin) else written
    source = inspect.getsourcefile(owner)
    return None if source is None else Path(source)


def stamp(value: object, of_file: Callable[[Path], list[Any]] | None = None) -> list[Any]:
    """Names, sizes and digests of the file, or of the folder's files, that `value` names; empty if it names none.

    of_file: what is kept of each; None: the digest of its first and last MiB.
    """
    if not isinstance(value, str) or not value or "\0" in value:  # "" would be the folder where the process runs
        return []
    path = Path(value.partition(".py:")[0] + ".py" if ".py:" in value else value)
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
        return [(of_file or _ends)(file) for file in files if file.is_file()]
    except OSError:  # too long for a name, or not ours to read
        return []


def _ends(file: Path) -> list[Any]:
    """Name, size, and digest of the first and the last MiB."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        parts = stream.read(_END)
        stream.seek(max(size - _END, 0))
        parts += stream.read(_END)
    return [file.name, size, hashlib.sha256(parts).hexdigest()]
