"""Checkpoints that are complete or absent, checked when read, and free of pickle.

A checkpoint is the folder `RUN_DIR/checkpoints/step-NNNNNN`: one safetensors file for each named set of tensors,
`state.json`, and `manifest.json` with the SHA-256 and the size of every other file. Everything is written into a
`.tmp-*` folder beside it, forced to the disk, and renamed at the end, so that a process killed at any moment leaves
the older checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from diffrl.errors import UserError, foreign
from diffrl.records.disk import cannot_write
from diffrl.version import __version__

log = logging.getLogger("diffrl")
FORMAT = 1
_STEP = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".tmp-"
_SET_ASIDE = f"{_TEMPORARY}replaced-"
Tensors = dict[str, Tensor]


class CheckpointError(UserError):
    """A checkpoint that cannot be written or is not intact; the message names the folder or the file."""


class NewerError(UserError):
    """A checkpoint of a later version of diffrl: not damaged, and nothing to be passed over."""


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
        older = [path for _, path in sorted(_steps(root))]
        left = f"intact: {older[-1]}; make room and continue with --resume" if older else "there is no other checkpoint"
        raise CheckpointError(f"{cannot_write(target, error)}; {left}") from error
    return target


def load(path: str | Path) -> tuple[dict[str, Tensors], Any]:
    """The `tensors` (on the CPU) and the `state` that `save` was given, after every checksum has been verified.

    Raises:
        NewerError: a later version of diffrl wrote it.
        CheckpointError: a file is missing, has another size or checksum than the manifest says, or cannot be read.
    """
    folder = Path(path)
    files = _verify(folder)
    tensors = {}
    for name in files:
        if name.endswith(".safetensors"):
            try:
                tensors[name.removesuffix(".safetensors")] = load_file(folder / name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / name}: not a readable safetensors file ({error})") from error
    return tensors, state_of(folder)


def latest(run_dir: str | Path) -> Path | None:
    """The newest intact checkpoint of a run, or None. Damaged ones are passed over with a warning."""
    path, damaged = survey(run_dir)
    for text in damaged:
        log.warning("damaged checkpoint passed over: %s", text)
    return path


def survey(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of a run, or None; and what is wrong with those that are newer.

    Raises NewerError for one of a later version of diffrl: to go on from an older one would drop what it trained.
    """
    damaged: list[str] = []
    for path, problem in _examined(run_dir):
        if not problem:
            return path, damaged
        damaged.append(problem)
    return None, damaged


def intact(run_dir: str | Path) -> Iterator[Path]:
    """The intact checkpoints of a run, newest first, each verified when it is asked for. Raises NewerError."""
    return (path for path, problem in _examined(run_dir) if not problem)


def _examined(run_dir: str | Path) -> Iterator[tuple[Path, str]]:
    """Each checkpoint, newest first, and what is wrong with it ("": it is intact)."""
    root = Path(run_dir) / "checkpoints"
    steps = dict(_steps(root, prefix=_SET_ASIDE))
    steps.update(_steps(root))  # one that was set aside counts only until its replacement is in place
    for _, path in sorted(steps.items(), reverse=True):
        problem = ""
        try:
            _verify(path)
        except CheckpointError as error:
            problem = str(error)
        yield path, problem


def state_of(path: Path) -> Any:
    """The `state` of a checkpoint alone; it is verified with the whole checkpoint by `load`."""
    with foreign(path / "state.json"):
        return json.loads((path / "state.json").read_bytes())


def epoch_of(path: Path) -> int:
    """How many epochs a checkpoint has behind it."""
    with foreign(path / "state.json"):
        return int(state_of(path)["epoch"])


def identity_of(path: Path) -> dict[str, Any] | None:
    """What the run was when it wrote this checkpoint; None for one of a version that did not say."""
    identity = json.loads((path / "manifest.json").read_bytes()).get("identity")
    return identity if isinstance(identity, dict) else None


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
    shapes = [list(parameter.shape) for parameter in _parameters(optimiser)]
    return tensors, {"param_groups": whole["param_groups"], "values": values, "shapes": shapes}


def optimiser_from_tensors(optimiser: torch.optim.Optimizer, tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Restore what `optimiser_to_tensors` gave: the next step is bit-identical for float32 parameters.

    Raises:
        CheckpointError: the optimiser's parameters have other shapes than those of the saved one.
    """
    shapes = [list(parameter.shape) for parameter in _parameters(optimiser)]
    if shapes != state["shapes"]:
        differ = next((i for i, (a, b) in enumerate(zip(shapes, state["shapes"], strict=False)) if a != b), None)
        where = "" if differ is None else f" (parameter {differ}: {state['shapes'][differ]} and {shapes[differ]})"
        raise CheckpointError(
            f"the checkpoint's optimiser has {len(state['shapes'])} parameters, this run's {len(shapes)}, or their "
            f"shapes differ{where}: resume with the model and the LoRA rank and targets that the run was started with"
        )
    per_parameter: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in state["values"].items()}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        # A clone: `load_state_dict` may keep what it is given, and `step` is changed in place.
        per_parameter.setdefault(int(index), {})[name] = value.clone()
    per_parameter = {index: _nested(entries) for index, entries in per_parameter.items()}
    # JSON has no tuples, and the only true list in a parameter group is that of its parameters.
    groups = [
        {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    optimiser.load_state_dict({"state": per_parameter, "param_groups": groups})


def _flat(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in entries.items():
        group, _, inner = name.partition("/")
        if inner:
            tree.setdefault(group, {})[inner] = value
        else:
            tree[name] = value
    return tree


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


def set_rng_state(tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Restore what `rng_state` gave. States of CUDA devices that this machine does not have are left out."""
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)
    algorithm, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, gauss_next = state["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))


# --- the folder on the disk ----------------------------------------------------------------------------------------


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _create(root: Path) -> None:
    """Make `root` with its parents, each of them forced to the disk in the folder that holds it."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def _clean(root: Path) -> None:
    """Remove what a killed process left, after putting back a checkpoint that it had set aside but not replaced."""
    for _, path in _steps(root, prefix=_SET_ASIDE):
        original = root / path.name.removeprefix(_SET_ASIDE)
        if not original.exists():
            os.rename(path, original)
            _sync(root)
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _publish(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`. A folder cannot be replaced in one step, so an older `target` is set aside under
    a name by which `latest` still finds it while there is no `target`."""
    aside = target.with_name(f"{_SET_ASIDE}{target.name}")
    if target.exists():
        os.rename(target, aside)
    os.rename(temporary, target)
    _sync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(root: Path, step: int, keep: int) -> None:
    older = sorted((entry for entry in _steps(root) if entry[0] <= step), reverse=True)
    for _, path in older[keep:]:
        # Renamed first: a process killed while it deletes must not leave a half-empty `step-*`.
        doomed = path.with_name(f"{_TEMPORARY}pruned-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # the next `save` tries again


def _steps(root: Path, prefix: str = "") -> list[tuple[int, Path]]:
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


def _verify(folder: Path) -> list[str]:
    """Check every file against the manifest; the names of the files."""
    from diffrl.store import sha256

    manifest_path = folder / "manifest.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    try:
        manifest = json.loads(manifest_path.read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        number = int(manifest.get("format", 0))
    except FileNotFoundError:
        raise CheckpointError(f"{manifest_path}: missing, so this is not a complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{manifest_path}: not a readable manifest ({error})") from error
    if number > FORMAT:
        theirs = f"format {number}, written by diffrl {str(manifest.get('diffrl'))[:20]}"
        raise NewerError(f"{manifest_path}: {theirs}; this is diffrl {__version__}: use that version, or a later one")
    if number != FORMAT:
        raise CheckpointError(f"{manifest_path}: format {number}, but diffrl {__version__} reads format {FORMAT}")
    if not isinstance(files, dict) or "state.json" not in files:  # an empty list of files would be intact
        raise CheckpointError(f"{manifest_path}: it does not list state.json, which every checkpoint has")
    for name, expected in files.items():
        path = folder / name
        if path.parent != folder or not isinstance(expected, dict) or not {"size", "sha256"} <= set(expected):
            raise CheckpointError(f'{manifest_path}: "{name}" is not a file of a checkpoint with its size and sha256')
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, although the manifest lists it")
        if (size := path.stat().st_size) != expected["size"]:
            raise CheckpointError(f"{path}: {size} bytes instead of the manifest's {expected['size']}")
        if sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: the checksum is not the manifest's; the file was damaged or changed")
    return list(files)
