"""A reward around another one that keeps its scores on the disk.

It gives up gradients and embeddings: who needs those asks for the plain reward.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import math
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.files import cache_folder, sha256
from diffrl.rewards import local
from diffrl.rewards.answers import checked
from diffrl.rewards.building import Entry
from diffrl.rewards.identity import digest_of
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Metadata, Reward, Wrapper
from diffrl.rewards.registry import load_class


class Cached(Wrapper):
    """Scores of images that were judged before are read from `folder/scores.sqlite` instead of computed.

    The key is everything that the score depends on: the pixels to the bit, the prompt, its metadata, and `identity`
    (see `identity_for_cache`). Several processes of one machine may share the folder. Raises `UserError` for a
    group-wise reward, whose score depends on the other images, and for a file that is no cache. One that finds no room
    keeps no more, which is logged once.
    """

    def __init__(self, reward: Reward, folder: str | Path, identity: str) -> None:
        super().__init__(reward)
        if others := kind_of(reward).compares:
            raise UserError(f'reward "{reward.name}" compares {others}: its scores cannot be kept by image')
        self.identity = identity
        self.hits = self.misses = 0
        self._full = False
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
                try:
                    self._store.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", kept)
                except sqlite3.Error as error:  # as of a full disk: no failure of the reward
                    if not self._full:
                        logging.getLogger("diffrl").warning("cache: %s: scores are not kept (%s)", self._file, error)
                    self._full = True
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


def cache(reward: Reward, asked: str, entry: Entry) -> Reward:
    """The option `cache: FOLDER`."""
    plain = reward.reward if isinstance(reward, Wrapper) and reward.moves else reward
    return Cached(reward, asked, identity_for_cache(entry.plugin, entry.arguments, plain))


def identity_for_cache(plugin: str, arguments: Mapping[str, Any], reward: Reward) -> str:
    """`diffrl.rewards.identity.identity_of` with whole files in the place of their ends, also those that the
    constructor's defaults name, and with the versions of all packages that the code imports: nothing that may change a
    score is left out."""
    defaults = {} if local.is_local(plugin) else inspect.signature(load_class(plugin)).parameters
    given = {key: one.default for key, one in defaults.items() if one.default is not one.empty} | dict(arguments)
    of_file = lambda file: [file.name, file.stat().st_size, whole(file)]  # noqa: E731
    text, imported = digest_of(plugin, given, reward, of_file, whole=True)
    known = versions({"torch", "numpy", "PIL", *imported})
    return hashlib.sha256(json.dumps([text, known], sort_keys=True).encode()).hexdigest()


def whole(file: Path) -> str:
    """SHA-256 of a file's bytes. Those of a megabyte or more are hashed once: kept for its path as long as size, times
    and inode stay the same (in `$XDG_CACHE_HOME/diffrl/digests.sqlite`; nowhere if that cannot be written)."""
    stat = file.stat()
    if stat.st_size < 2**20:
        return sha256(file)
    key = "|".join(map(str, (file.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)))
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(root / "digests.sqlite", timeout=60, isolation_level=None)) as store:
            store.execute("CREATE TABLE IF NOT EXISTS digests (key TEXT PRIMARY KEY, digest TEXT) WITHOUT ROWID")
            row = store.execute("SELECT digest FROM digests WHERE key = ?", [key]).fetchone()
            if row is None:
                row = [sha256(file)]
                store.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", [key, row[0]])
            return str(row[0])
    except (OSError, sqlite3.Error):
        return sha256(file)


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of installed packages, by the names that code imports them by; those that have none are left out."""
    found, owners = {}, importlib.metadata.packages_distributions()
    for name in sorted(names):
        for package in owners.get(name, [name]):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
    return found
