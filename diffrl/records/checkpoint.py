"""Checkpoints read: each verified, without pickle, and their states put back. `diffrl.records.saving` writes them."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from diffrl.errors import UserError, foreign
from diffrl.files import sha256
from diffrl.records.saving import FORMAT, SET_ASIDE, CheckpointError, Tensors, parameters, steps
from diffrl.version import __version__

log = logging.getLogger("diffrl")


class NewerError(UserError):
    """A checkpoint of a later version of diffrl: not damaged, and nothing to be passed over."""


def load(path: str | Path) -> tuple[dict[str, Tensors], Any]:
    """The `tensors` (on the CPU) and the `state` that `saving.save` was given, after every checksum has been verified.

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


def of_step(run_dir: str | Path, step: int) -> Path:
    """The checkpoint of a step, intact or not; UserError if there is none."""
    known = _known(run_dir)
    if step not in known:
        there = f"there are {', '.join(map(str, sorted(known)))}" if known else f'"{run_dir}" has none'
        raise UserError(f"--step: no checkpoint of step {step}; {there}")
    return known[step]


def _examined(run_dir: str | Path) -> Iterator[tuple[Path, str]]:
    """Each checkpoint, newest first, and what is wrong with it ("": it is intact)."""
    for _, path in sorted(_known(run_dir).items(), reverse=True):
        problem = ""
        try:
            _verify(path)
        except CheckpointError as error:
            problem = str(error)
        yield path, problem


def _known(run_dir: str | Path) -> dict[int, Path]:
    """Checkpoints by their steps; one that was set aside counts only until its replacement is in place."""
    root = Path(run_dir) / "checkpoints"
    return dict(steps(root, prefix=SET_ASIDE)) | dict(steps(root))


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


def _verify(folder: Path) -> list[str]:
    """Check every file against the manifest; the names of the files."""
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


# --- optimiser and random generators -------------------------------------------------------------------------------


def optimiser_from_tensors(optimiser: torch.optim.Optimizer, tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Restore what `saving.optimiser_to_tensors` gave: the next step is bit-identical for float32 parameters.

    Raises:
        CheckpointError: the optimiser's parameters have other shapes than those of the saved one.
    """
    shapes = [list(parameter.shape) for parameter in parameters(optimiser)]
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


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in entries.items():
        group, _, inner = name.partition("/")
        if inner:
            tree.setdefault(group, {})[inner] = value
        else:
            tree[name] = value
    return tree


def set_rng_state(tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Restore what `saving.rng_state` gave. States of CUDA devices that this machine does not have are left out."""
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)
    algorithm, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, gauss_next = state["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
