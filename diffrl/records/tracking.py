"""What a run leaves behind: `metrics.jsonl`, sample images, what it was started with."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffrl.errors import UserError
from diffrl.records.disk import inside, replacing, write_json, writing
from diffrl.records.progress import ProgressTable
from diffrl.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ProgressTable", "Tracker", "read_metrics", "record_environment", "save_samples"]

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy")


class Tracker:
    """Writes one JSON line per epoch to `RUN_DIR/metrics.jsonl`.

    Opening a run again cuts a last line that was torn when the process died, and epochs that are already in the file
    are not written a second time, so a resumed run leaves the file that an uninterrupted one would have left.

    Raises:
        UserError: `metrics.jsonl` is damaged before its end.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / "metrics.jsonl"
        rows, intact = _parse(path)
        self._epochs = {row["epoch"] for row in rows}
        with writing(path):
            self._file = path.open("ab", buffering=0)  # a buffer would be written once more, when it is closed
            if self._file.tell() > intact:
                self._file.truncate(intact)

    def log(self, metrics: Mapping[str, Any]) -> dict[str, Any] | None:
        """Append one epoch; returns its line, or None for an epoch that is there already.

        `metrics["epoch"]` is an int; values are numbers (also of numpy, or tensors of one element), strings or None.
        What is not finite is written as null, since JSON has no NaN.

        Raises DiskError if the line cannot be written whole: then nothing of it is left.
        """
        row = {key: _plain(key, value) for key, value in metrics.items()}
        epoch = row["epoch"]
        if epoch in self._epochs:
            return None
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._epochs.add(epoch)
        return row

    def _append(self, line: bytes) -> None:
        """A whole line or nothing, in the file that is still there."""
        path = self.run_dir / "metrics.jsonl"
        with writing(path):
            begin = self._file.seek(0, os.SEEK_END)
            # Of a deleted folder the open file would swallow everything.
            if not os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                raise OSError(errno.ESTALE, "another file has taken its place while the run was writing")
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "only a part of a line found room")
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(begin)
                raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The epochs of `RUN_DIR/metrics.jsonl`, oldest first; a torn last line is left out, no file gives no epochs.

    Raises:
        UserError: a line before the last is no JSON object with an `epoch`.
    """
    return _parse(Path(run_dir) / "metrics.jsonl")[0]


def save_samples(
    run_dir: str | Path,
    epoch: int,
    images: Tensor,
    prompts: Sequence[str],
    seeds: Sequence[int],
    scores: Sequence[Mapping[str, float]] = (),
) -> list[Path]:
    """Write `RUN_DIR/samples/epoch-NNNN/NN-SLUG.png`, each with its `prompt` and `seed` in PNG text chunks.

    Args:
        images: (n, 3, H, W) in [0, 1]; rounded to 8 bits.
        scores: of each image by their names, into a text chunk `scores` (JSON; without those that are not finite).
    """
    folder = inside(run_dir, "samples", f"epoch-{epoch:04d}")
    paths = []
    for i, (image, prompt, seed) in enumerate(zip(images, prompts, seeds, strict=True)):
        path = folder / f"{i:02d}-{slug(prompt)}.png"
        text = {"prompt": prompt, "seed": str(seed)}
        if scores:
            text["scores"] = json.dumps({key: round(v, 4) for key, v in scores[i].items() if math.isfinite(v)})
        save_image(image, path, text, sync=True)
        paths.append(path)
    return paths


def save_image(image: Tensor, path: Path, text: Mapping[str, str], sync: bool = False) -> None:
    """Write one image (3, H, W) in [0, 1] as PNG with `text` in its text chunks; rounded to 8 bits.

    `sync`: forced to the disk, for the few that later starts read again.
    """
    chunks = PngInfo()
    for key, value in text.items():
        chunks.add_text(key, value.encode(errors="replace").decode())
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    with replacing(path, sync=sync) as temporary:  # a report that is written meanwhile never meets half a picture
        Image.fromarray(pixels).save(temporary, format="png", pnginfo=chunks)


def record_environment(run_dir: str | Path, **facts: Any) -> None:
    """Append this start of the run to `RUN_DIR/environment.json`: command, versions, machine, time; for the report.

    Args:
        facts: anything else worth keeping that JSON can hold, for example the number of processes or the device.
    """
    path = Path(run_dir) / "environment.json"
    try:
        starts = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        starts = []
    starts = starts if isinstance(starts, list) else []
    program = Path(next(iter(sys.argv), ""))  # a program that holds an interpreter has none, a prompt an empty one
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name or "python"
    start = {
        "command": shlex.join([*name.split(" "), *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {"diffrl": __version__, "python": platform.python_version(), **_versions()},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [*starts, start])


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics file, and the number of bytes up to the end of its last complete line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    lines.pop()  # what follows the last line break: nothing, or a torn line
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row["epoch"]) is not int:
                raise TypeError("no epoch")
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines):  # a crash of the machine can leave a last line of zeros
                return rows, sum(len(line) + 1 for line in lines[:-1])
            raise UserError(
                f"{path}, line {number}: not a JSON object with an epoch; mend or delete the line"
            ) from None
        rows.append(row)
    return rows, sum(len(line) + 1 for line in lines)


def _plain(key: str, value: Any) -> int | float | str | bool | None:
    if hasattr(value, "item"):  # numpy scalars and tensors of one element
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"metric {key!r} is a {type(value).__name__}, not a number or a string")


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].rstrip("-") or "empty"
