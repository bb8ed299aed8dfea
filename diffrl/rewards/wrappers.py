"""A reward around another one that keeps its scores on the disk, and what makes a reward's scores what they are.

It gives up gradients and embeddings: who needs those asks for the plain reward.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sqlite3
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.plugins import here, is_path
from diffrl.rewards import digests, local
from diffrl.rewards.answers import checked
from diffrl.rewards.batchwise import compared
from diffrl.rewards.offloading import Wrapper
from diffrl.rewards.protocol import Metadata, Reward
from diffrl.rewards.registry import is_module, load_class, split_name
from diffrl.version import __version__

ASIDE = ("device", "batch_size")  # arguments that do not change a score
_END = 2**20


class Cached(Wrapper):
    """Scores of images that were judged before are read from `folder/scores.sqlite` instead of computed.

    The key is everything that the score depends on: the pixels to the bit, the prompt, its metadata, and `identity`
    (see `identity_for_cache`). Several processes of one machine may share the folder. Raises `UserError` for a
    group-wise reward, whose score depends on the other images, and for a file that is no cache.
    """

    def __init__(self, reward: Reward, folder: str | Path, identity: str) -> None:
        super().__init__(reward)
        if compared(reward):
            raise UserError(f'reward "{reward.name}" compares {compared(reward)}: its scores cannot be kept by image')
        self.identity = identity
        self.hits = self.misses = 0
        self._lock = threading.Lock()  # calls may come from the scorer's thread
        self._file = Path(folder) / "scores.sqlite"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(self._file, timeout=60, check_same_thread=False, isolation_level=None)
            self._store.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"cache: {self._file} cannot be used: {error}") from error

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores (B,), or (B, C) of a reward with columns, on the CPU; an image that stands several times in a batch is
        judged once."""
        width = None if self.columns is None else len(self.columns)
        keys = [self._key(*one) for one in zip(images, prompts, metadata, strict=True)]
        with self._lock:
            known = self._read(keys)
            rows = {key: row for row, key in reversed(list(enumerate(keys))) if key not in known}
            if rows:
                new = list(rows.values())
                texts = [prompts[i] for i in new]
                scores = self.reward(images[new], texts, [metadata[i] for i in new])
                fresh = dict(zip(rows, checked(scores, self.name, texts, width=width).tolist(), strict=True))
                # SQLite keeps the text of a row of columns, NaN included, in its column of numbers. No score: not kept.
                rows_of = {key: one if isinstance(one, list) else [one] for key, one in fresh.items()}
                some = {key: one for key, one in fresh.items() if not all(map(math.isnan, rows_of[key]))}
                kept = [(key, one if width is None else json.dumps(one)) for key, one in some.items()]
                self._store.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", kept)
                known |= fresh
            self.misses += len(rows)
            self.hits += len(keys) - len(rows)
        return torch.tensor([known[key] for key in keys])

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Any]:
        known: dict[bytes, Any] = {}
        for start in range(0, len(keys), 500):  # SQLite's limit of parameters is 999 in old builds
            part = keys[start : start + 500]
            marks = ",".join("?" * len(part))
            known |= dict(self._store.execute(f"SELECT key, score FROM scores WHERE key IN ({marks})", part))
        return {key: json.loads(value) if isinstance(value, str) else value for key, value in known.items()}

    def _key(self, image: Tensor, prompt: str, metadata: Metadata) -> bytes:
        pixels = image.detach().to("cpu", torch.float32).contiguous()
        words = json.dumps([self.identity, prompt, dict(metadata), list(pixels.shape)], sort_keys=True, default=str)
        return hashlib.sha256(words.encode() + b"\0" + pixels.numpy().tobytes()).digest()


def identity_of(plugin: str, arguments: Mapping[str, Any], reward: Reward) -> str:
    """What makes a reward's scores what they are, as a digest: its code, its arguments, the files that they name.

    Files, and those of folders, count by their names, sizes, first and last MiB, so that another machine's copies are
    the same. Of weights behind a hub's name it is the commits that count.
    """
    return _identity(plugin, arguments, reward, _ends)[0]


def identity_for_cache(plugin: str, arguments: Mapping[str, Any], reward: Reward) -> str:
    """`identity_of` with whole files in the place of their ends, also those that the constructor's defaults name, and
    with the versions of all packages that the code imports: nothing that may change a score is left out."""
    defaults = {} if local.is_local(plugin) else inspect.signature(load_class(plugin)).parameters
    given = {key: one.default for key, one in defaults.items() if one.default is not one.empty} | dict(arguments)
    of_file = lambda file: [file.name, file.stat().st_size, digests.whole(file)]  # noqa: E731
    text, imported = _identity(plugin, given, reward, of_file, whole=True)
    known = digests.versions({"torch", "numpy", "PIL", *imported})
    return hashlib.sha256(json.dumps([text, known], sort_keys=True).encode()).hexdigest()


def _identity(
    plugin: str, arguments: Mapping[str, Any], reward: Reward, of_file: Callable[[Path], list[Any]], whole: bool = False
) -> tuple[str, set[str]]:
    """The digest, and the installed packages that the reward's code imports."""
    from diffrl.hub import plain

    imported: set[str] = set()
    if local.is_local(plugin):
        from diffrl.rewards.objects import of_object

        code = of_object(local.find(plugin), whole)
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
