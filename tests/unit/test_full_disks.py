"""What finds no room leaves no half that a later start takes for whole, and names its file."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffrl.additions import hub_prompts, trackers
from diffrl.divgen import listings
from diffrl.errors import UserError
from diffrl.prepare.handed_over import filed
from diffrl.records.disk import DiskError


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow, whoever writes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("wandb/run-id.txt", lambda folder: trackers._wandb_options(folder, {})),
        ("unpacked/a.png", lambda folder: listings._unpacked({"bytes": b"PNG"}, folder, "a")),
        ("train.jsonl", lambda folder: filed({"prompts": {}}, {"train": ["a red heart"]}, folder)),
        ("a file of the cache", lambda folder: hub_prompts.cached_file("hub:org/pets")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_finds_no_room_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, write: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub_prompts, "_stream", lambda parsed, source: iter([{"prompt": "a red heart"}]))
    if file.startswith("wandb"):
        pytest.importorskip("wandb")
    with no_room(), pytest.raises((DiskError, UserError), match=r"File too large") as caught:
        write(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    write(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
