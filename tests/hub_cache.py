"""A cache of the hub as `huggingface_hub` lays it out, made by hand: models that are here, at several commits."""

from __future__ import annotations

import shutil
from pathlib import Path

COMMITS = ("a" * 40, "b" * 40)


def put(cache: Path, name: str, source: Path, commit: str = COMMITS[0], ref: str = "main") -> Path:
    """Copy the folder `source` as the commit of the model `OWNER/NAME`, to which `ref` points from now on."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    if not snapshot.exists():
        shutil.copytree(source, snapshot)
    point(cache, name, commit, ref)
    return snapshot


def point(cache: Path, name: str, commit: str, ref: str = "main") -> None:
    refs = cache / f"models--{name.replace('/', '--')}" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / ref).write_text(commit)
