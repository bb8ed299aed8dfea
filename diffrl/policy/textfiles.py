"""Encoded prompts as files of one folder, for the processes of a run and for its next start; bounded in bytes."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffrl.policy.conditioning import Conditioning
from diffrl.records.disk import DiskError, replacing

FILES_BYTES = 16 << 30  # of all prompts together: six thousand with a T5
LEFT = 4 << 30  # bytes of the disk that stay free, for checkpoints


class TextFiles:
    """One file for each prompt; `key` says what encodes, and files of another one are not read.

    Files that are damaged, or cannot be written, are as if they were not there.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def path(self, prompt: str | None) -> Path:
        return self.folder / f"{hashlib.sha256(repr((self.key, prompt)).encode()).hexdigest()[:32]}.safetensors"

    def __contains__(self, prompt: str | None) -> bool:
        return self.path(prompt).is_file()

    def read(self, prompt: str | None) -> Conditioning | None:
        """Its row; None if there is no intact one."""
        try:
            with safe_open(self.path(prompt), framework="pt") as file:
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        extra = tuple(tensors[name] for name in sorted(tensors) if name.startswith("extra"))
        return Conditioning(tensors["embeds"], tensors["pooled"], tensors.get("lengths"), extra)

    def write(self, prompt: str | None, row: Conditioning) -> None:
        """Keep the row for other processes, where the disk has room."""
        if not self.folder.is_dir() or shutil.disk_usage(self.folder).free < LEFT:
            return
        tensors: dict[str, Tensor] = {"embeds": row.embeds, "pooled": row.pooled}
        tensors |= {f"extra{number:02d}": tensor for number, tensor in enumerate(row.extra)}
        if row.lengths is not None:
            tensors["lengths"] = row.lengths
        with contextlib.suppress(DiskError), replacing(self.path(prompt), sync=False) as unfinished:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)

    def evict(self, kept: Collection[str | None], row: int) -> None:
        """Remove the oldest files, but none of the prompts `kept`, until those of `row` bytes each are within bounds.

        For one of the processes, while no other one reads.
        """
        own = {self.path(prompt).name for prompt in kept}
        found = {file: file.stat() for file in self.folder.glob("*.safetensors")}
        others = sorted((file for file in found if file.name not in own), key=lambda file: found[file].st_mtime)
        total = row * len(own) + sum(found[file].st_size for file in others)
        for file in others:
            if total <= FILES_BYTES:
                break
            file.unlink(missing_ok=True)
            total -= found[file].st_size

    def remove(self) -> None:
        """The folder and what is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
