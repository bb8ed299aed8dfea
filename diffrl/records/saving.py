"""Checkpoints written: complete or absent, and free of pickle. `diffrl.records.checkpoint` reads them.

A checkpoint is the folder `RUN_DIR/checkpoints/step-NNNNNN`: one safetensors file for each named set of tensors,
`state.json`, and `manifest.json` with the SHA-256 and the size of every other file. Everything is written into a
`.tmp-*` folder beside it, forced to the disk, and renamed at the end, so that a process killed at any moment leaves
the older checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from diffrl.errors import UserError
from diffrl.records.disk import cannot_write
from diffrl.version import __version__

FORMAT = 1
_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".tmp-"
SET_ASIDE = f"{_TEMPORARY}replaced-"
Tensors = dict[str, Tensor]


class CheckpointError(UserError):
    """A checkpoint that cannot be written or is not intact; the message names the folder or the file."""


def save(
    run_dir: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Any,
    keep: int,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write `RUN_DIR/checkpoints/step-NNNNNN` and return it.

    Args:
        step: the optimiser step (or any counter that grows); an existing checkpoint of the same step is replaced.
        tensors: named sets of tensors; each set becomes `NAME.safetensors`, every dtype and bit as it is.
        state: anything JSON can hold; floats come back exactly, tuples as lists.
        keep: how many checkpoints to keep, at least 1: this one and the newest before it. Later steps, which only
            exist when `latest` passed over a damaged checkpoint, stay until they are replaced.
        identity: what the run is (`diffrl.records.identity`), for the manifest.

    Raises:
        CheckpointError: the folder cannot be written, for example because the disk is full. Older checkpoints are
            then as they were.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    state_bytes = json.dumps(state, indent=1).encode()  # a state that is no JSON fails before the disk is touched
    root = Path(run_dir) / "checkpoints"
    target = root / f"step-{step:06d}"
    temporary = root / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    try:
        _create(root)
        _clean(root)
        temporary.mkdir()
        entries = {}
        for name, group in tensors.items():
            # A copy: safetensors refuses tensors that share storage, and views would be written with their base.
            copies = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in group.items()}
            entries[f"{name}.safetensors"] = _write(temporary / f"{name}.safetensors", to_bytes(copies))
        entries["state.json"] = _write(temporary / "state.json", state_bytes)
        manifest: dict[str, Any] = {"format": FORMAT, "diffrl": __version__, "step": step, "files": entries}
        if identity is not None:
            manifest["identity"] = dict(identity)
        _write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync(temporary)
        _publish(temporary, target)
        _prune(root, step, keep)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        older = [path for _, path in sorted(steps(root))]
        left = f"intact: {older[-1]}; make room and continue with --resume" if older else "there is no other checkpoint"
        raise CheckpointError(f"{cannot_write(target, error)}; {left}") from error
    return target


# --- optimiser and random generators -------------------------------------------------------------------------------


def optimiser_to_tensors(optimiser: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """An optimiser's whole state as tensors `INDEX.NAME` (parameter number, `exp_avg` ...) and a JSON-able rest.

    What an optimiser keeps one level deeper (8-bit moments) is named `INDEX.GROUP/NAME`.
    """
    whole = optimiser.state_dict()
    tensors: Tensors = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for name, value in _flat(entries):
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                values.setdefault(str(index), {})[name] = value
    shapes = [list(parameter.shape) for parameter in parameters(optimiser)]
    return tensors, {"param_groups": whole["param_groups"], "values": values, "shapes": shapes}


def _flat(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def rng_state() -> tuple[Tensors, dict[str, Any]]:
    """States of this process's global generators: torch (CPU and every CUDA device), numpy, python."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors.update({f"cuda.{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())})
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()  # type: ignore[misc]
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    version, words, gauss_next = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    state = {
        "numpy": [str(algorithm), int(position), int(has_gauss), float(gauss)],
        "python": [version, gauss_next],
    }
    return tensors, state


# --- the folder on the disk ----------------------------------------------------------------------------------------


def parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _create(root: Path) -> None:
    """Make `root` with its parents, each of them forced to the disk in the folder that holds it."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def _clean(root: Path) -> None:
    """Remove what a killed process left, after putting back a checkpoint that it had set aside but not replaced."""
    for _, path in steps(root, prefix=SET_ASIDE):
        original = root / path.name.removeprefix(SET_ASIDE)
        if not original.exists():
            os.rename(path, original)
            _sync(root)
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _publish(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`. A folder cannot be replaced in one step, so an older `target` is set aside under
    a name by which `latest` still finds it while there is no `target`."""
    aside = target.with_name(f"{SET_ASIDE}{target.name}")
    if target.exists():
        os.rename(target, aside)
    os.rename(temporary, target)
    _sync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(root: Path, step: int, keep: int) -> None:
    older = sorted((entry for entry in steps(root) if entry[0] <= step), reverse=True)
    for _, path in older[keep:]:
        # Renamed first: a process killed while it deletes must not leave a half-empty `step-*`.
        doomed = path.with_name(f"{_TEMPORARY}pruned-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # the next `save` tries again


def steps(root: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """`(step, path)` of the folders of `root` named `{prefix}step-NNNNNN`."""
    entries = []
    for path in root.glob(f"{prefix}step-*"):
        match = _STEP.fullmatch(path.name.removeprefix(prefix))
        if match and path.is_dir():
            entries.append((int(match[1]), path))
    return entries


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write and force to the disk; the manifest's entry for the file."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _sync(folder: Path) -> None:
    """Force a folder's list of names to the disk (on Windows folders cannot be opened, and need not be)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
