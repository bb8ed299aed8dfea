"""What was seen of a folder's images, kept beside them: a killed scoring goes on, and a second one reads no picture.

One SQLite file. A value is found by the digest of the image's file and by its extractor with the weights behind it, so
that a changed picture, plug-in or local weight is looked at again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from diffrl.divgen.extractors import NONE, Device, Extractor, Found, load_extractor
from diffrl.divgen.listings import show
from diffrl.divgen.metrics import Array
from diffrl.divgen.observe import Item, Seen, Sight, in_batches, looks_at, observe
from diffrl.divgen.reference import Reference
from diffrl.errors import UserError

FILE = "features.sqlite"
_NAME = b"name"  # where the extractor's own name is kept
VERSION = 1  # of what stands behind an extractor's name: one more when its preprocessing changes
_READ_AT_ONCE = 32
_INSTEAD = {"features": ("pixels",)}  # of a default whose weights are not here; it needs none
_TABLES = """
    CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, size INT, time INT, digest BLOB);
    CREATE TABLE IF NOT EXISTS seen (image BLOB, extractor TEXT, value BLOB, PRIMARY KEY (image, extractor));
"""

log = logging.getLogger("diffrl")


class Store:
    """The folder's file; in memory where it cannot be written. What finds no room later is not kept."""

    def __init__(self, folder: Path) -> None:
        self.file, self._full = folder / FILE, False
        try:
            self.base = sqlite3.connect(self.file, timeout=60)
            self.base.executescript(_TABLES)
        except sqlite3.Error as error:
            self._said(error)
            self.base = sqlite3.connect(":memory:")
            self.base.executescript(_TABLES)

    def _said(self, error: sqlite3.Error) -> None:
        if not self._full:
            log.warning("%s: features are not kept (%s)", show(self.file), error)
        self._full = True

    def digest(self, path: Path) -> bytes:
        """Of the file's bytes, read again where its size or time has changed. OSError as for reading."""
        stat, name = path.stat(), str(path).encode(errors="surrogateescape")
        row = self.base.execute("SELECT size, time, digest FROM files WHERE path = ?", (name,)).fetchone()
        if row is not None and row[:2] == (stat.st_size, stat.st_mtime_ns):
            return bytes(row[2])
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "blake2b").digest()[:16]
        self._put("REPLACE INTO files VALUES (?, ?, ?, ?)", [(name, stat.st_size, stat.st_mtime_ns, found)])
        return found

    def _put(self, statement: str, rows: Sequence[tuple[object, ...]], commit: bool = False) -> None:
        try:
            self.base.executemany(statement, rows)
            if commit:
                self.base.commit()
        except sqlite3.Error as error:
            self.base.rollback()
            self._said(error)

    def known(self, extractor: str) -> dict[bytes, Found]:
        rows = self.base.execute("SELECT image, value FROM seen WHERE extractor = ?", (extractor,))
        return {bytes(image): np.load(io.BytesIO(value)) if value else None for image, value in rows}

    def keep(self, rows: Sequence[tuple[bytes, str, Found]]) -> None:
        """At once, so that a kill loses a batch at most."""
        coded = []
        for image, extractor, value in rows:
            buffer = io.BytesIO()
            if value is not None:
                np.save(buffer, value)
            coded.append((image, extractor, buffer.getvalue()))
        self._put("REPLACE INTO seen VALUES (?, ?, ?)", coded, commit=True)

    def recalled(self, place: str, asked: Sequence[str], draw: Callable[[], Reference]) -> tuple[Array, Array]:
        """The real images' features, `train` and `test`, that were drawn for these prompts; drawn where they are not
        kept."""
        text = hashlib.blake2b("\0".join(asked).encode(), digest_size=16).digest()
        keys, known = (b"train" + text, b"test" + text), self.known(place)
        if any(known.get(key) is None for key in keys):
            drawn = draw()
            self.keep([(keys[0], place, drawn.train), (keys[1], place, drawn.test)])
            return drawn.train, drawn.test
        return known[keys[0]], known[keys[1]]  # type: ignore[return-value]


@contextmanager
def kept(folder: Path) -> Iterator[Store]:
    """The store of a folder, closed at the end."""
    store = Store(folder)
    try:
        yield store
    finally:
        with suppress(sqlite3.Error):
            store.base.commit()
        store.base.close()


def identity(kind: str, name: str) -> str:
    """An extractor with what stands behind its name here: a plug-in's text, a local weight's size and time."""
    plain, _, weights = name.rpartition(":") if ".py:" in name else name.partition(":")
    path = Path(plain if plain.endswith(".py") else weights)
    about = ""
    if plain.endswith(".py") and path.is_file():
        about = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    elif weights and path.exists():
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        about = str([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    return f"{VERSION} {kind} {name} {about}"


def look(
    items: Sequence[Item],
    names: Mapping[str, str],
    store: Store,
    device: Device = "",
    asked: Sequence[str] = (),
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Sight, dict[str, Extractor], dict[str, str], dict[str, str]]:
    """All images through extractors `names` (kind -> name), from the store where they were seen before.

    Returns:
        What was seen; the extractors that had to be loaded; for every kind its extractor's own name, or "none"; and for
        those that cannot be loaded why not. A kind that is not in `asked` may get another one in its place, in words.
    """
    sight, used = Sight(), dict(names)
    loaded: dict[str, Extractor] = {}
    missing: dict[str, str] = {}
    digests = _digests(items, store, sight)
    left, sight.copies = _once([item for item in items if item in digests], digests)
    groups: dict[str, list[Item]] = {}
    for item in left:
        groups.setdefault(item.prompt.text, []).append(item)
    for kind in names:
        if names[kind] == NONE:
            missing[kind] = "left out"
        elif not _all_known(kind, used[kind], groups, digests, store):
            _load(kind, used, device, kind in asked, loaded, missing)
    ready = {kind: identity(kind, name) for kind, name in used.items() if kind not in missing}
    known = {kind: store.known(ready[kind]) for kind in ready} | {k: store.known(k) for k in ("tones", "size")}
    kinds = [kind for kind in known if kind != "lpips"]
    todo: list[Item] = []
    for group in groups.values():
        again = "lpips" in ready and len(group) > 1 and (pairs := known["lpips"].get(_key(group, digests))) is None
        if not again and "lpips" in ready and len(group) > 1 and len(pairs):  # type: ignore[arg-type]
            sight.distances[group[0].prompt.text] = (float(pairs[0]), int(pairs[1]))  # type: ignore[index]
        for item in group:
            wanted = [kind for kind in kinds if kind == "size" or looks_at(kind, item)]
            if again or not all(_place(kind, item, digests, used) in known[kind] for kind in wanted):
                todo.append(item)
            else:
                sight.seen.append(Seen(item, {k: known[k][_place(k, item, digests, used)] for k in wanted}))
    if todo:
        for kind in ready:
            if kind not in loaded:
                _load(kind, used, device, True, loaded, missing)

        def keep(seen: Sequence[Seen]) -> None:
            rows = [(s, kind, value) for s in seen for kind, value in s.values.items()]
            heads = [(_NAME, ready[kind], np.array(x.name)) for kind, x in loaded.items()]
            store.keep([*heads, *((_place(k, s.item, digests, used), ready.get(k, k), v) for s, k, v in rows)])

        advance(len(items) - len(todo))
        fresh = observe(in_batches(todo, _READ_AT_ONCE, sight), loaded, advance, keep)
        if "lpips" in loaded:
            for text in {item.prompt.text for item in todo}:
                pairs = np.array(fresh.distances.get(text, ()))
                store.keep([(_key(groups[text], digests), ready["lpips"], pairs)])
        sight += fresh
    titles = {kind: loaded[kind].name if kind in loaded else str(known[kind].get(_NAME, used[kind])) for kind in ready}
    return sight, loaded, {kind: titles.get(kind, NONE) for kind in names}, missing


def _digests(items: Sequence[Item], store: Store, sight: Sight) -> dict[Item, bytes]:
    """Of the images that can be read; the others are `sight`'s."""
    digests: dict[Item, bytes] = {}
    for item in items:
        try:
            digests[item] = store.digest(item.file)
        except OSError as error:
            sight.unreadable.append((item, "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)))
    return digests


def _once(items: Sequence[Item], digests: Mapping[Item, bytes]) -> tuple[list[Item], int]:
    """Without what is there already: the same file again, or the same bytes of one prompt whose seeds are not given."""
    paths: set[Path] = set()
    pictures: set[tuple[str, bytes, int | None]] = set()
    left = []
    for item in items:
        path = item.file.resolve()
        seed = (item.seed if item.seed is not None else item.member) if item.stated else None
        picture = (item.prompt.text if item.known else "", digests[item], seed)
        if path in paths or picture in pictures:
            continue
        paths.add(path)
        pictures.add(picture)
        left.append(item)
    return left, len(items) - len(left)


def _place(kind: str, item: Item, digests: Mapping[Item, bytes], used: Mapping[str, str]) -> bytes:
    """What an extractor's answer depends on: the picture, and for some the prompt."""
    text = kind == "layout" or ".py:" in used.get(kind, "")
    about = f"{item.prompt.text}\0{item.keyword}\0{item.prompt.metadata.get('objects')}" if text else ""
    return digests[item] + hashlib.blake2b(about.encode(), digest_size=8).digest() if about else digests[item]


def _key(group: Sequence[Item], digests: Mapping[Item, bytes]) -> bytes:
    return hashlib.blake2b(b"".join(digests[item] for item in group), digest_size=16).digest()


def _all_known(
    kind: str, name: str, groups: Mapping[str, list[Item]], digests: Mapping[Item, bytes], store: Store
) -> bool:
    known = store.known(identity(kind, name))
    if kind == "lpips":
        return all(len(group) < 2 or _key(group, digests) in known for group in groups.values())
    items = [item for group in groups.values() for item in group]
    return all(_place(kind, item, digests, {kind: name}) in known for item in items if looks_at(kind, item))


def _load(
    kind: str,
    used: dict[str, str],
    device: Device,
    asked: bool,
    loaded: dict[str, Extractor],
    missing: dict[str, str],
) -> None:
    try:
        loaded[kind] = load_extractor(kind, used[kind], device)
    except UserError as error:
        for other in () if asked else _INSTEAD.get(kind, ()):
            with suppress(UserError):
                loaded[kind] = load_extractor(kind, other, device)
                log.warning("%s: %s in the place of %s (%s)", kind, other, used[kind], error)
                used[kind] = other
                return
        missing[kind] = str(error)
