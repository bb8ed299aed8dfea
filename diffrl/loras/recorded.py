"""How a run draws when it evaluates, by its config.yaml: what commands that draw take from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from diffrl.errors import UserError
from diffrl.hub import hub_file
from diffrl.lora_files import as_list, find_lora
from diffrl.resources import file_of_run

# What a LoRA was trained at, and is another one without. Solver and steps are not among them: pictures with and without
# a LoRA would differ by more than the training.
OF_A_LORA = ("guidance_scale", "shift", "resolution", "text_length")


def recorded(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the keys of a `diffrl.drawing.Drawing`, those that `given` leaves open (None) and a run's record fills.

    `like`: a run, whose evaluation is followed in all. `lora`: what its run trained it at, where that is a run of
    `model`: guidance, shift, size and length of the text (`OF_A_LORA`), and the LoRAs that were merged into the model,
    before those of `merge`. UserError: `like` is no run's folder.
    """
    found: dict[str, Any] = {}
    merge = as_list(given.get("merge"))
    if given.get("lora") is not None:
        trained = trained_at(given["lora"], given["model"])
        found = {key: value for key, value in trained.items() if key in OF_A_LORA}
        over = trained.get("merge") or []
        merge = [*over, *(one for one in merge if one not in over)]
    if given.get("like") is not None:
        file = file_of_run(Path(given["like"]), "config.yaml", "--like")
        if not (like := _evaluation(file)):
            raise UserError(f"--like: {file} is no run's config")
        found |= like
    apart = ("model", "merge")
    open_ = {key: found[key] for key in found if given.get(key) is None and found[key] is not None and key not in apart}
    return open_ | ({"merge": merge} if merge else {})


def trained_at(lora: str | Path, model: str) -> dict[str, Any]:
    """How the run that trained this LoRA (under any of its names, or a run's checkpoint) of `model` evaluates, as keys
    of a `Drawing`; empty if it has no record (a run's or a published LoRA's config.yaml), or is another model's."""
    folder = Path(os.path.expanduser(lora))
    with contextlib.suppress(UserError):  # of a checkpoint, and of one that has no record on the hub
        named = find_lora(lora)
        folder = (named if isinstance(named, Path) else hub_file(named[0], "config.yaml", "its record")).parent
    above = folder.parents[1] if folder.parent.name == "checkpoints" else folder.parent
    own = next((found for place in (folder, above) if (found := _evaluation(place / "config.yaml"))), {})
    return own if own and _same(own["model"], model) else {}


def _same(one: str, other: str) -> bool:
    """Are these two names of one model?"""
    folders = Path(os.path.expanduser(one)), Path(os.path.expanduser(other))
    return one == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


def _evaluation(file: Path) -> dict[str, Any]:
    try:
        return evaluation_of(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def evaluation_of(values: Any) -> dict[str, Any]:
    """The model of a run's plain config, and how it is drawn in evaluations; empty if this is none."""
    try:
        rollout, measuring = values["rollout"], values.get("evaluate") or {}
        own = {"model": str(values["model"]), "steps": measuring.get("steps") or rollout["steps"]}
        if rollout["sampler"] != "renoise":  # a few-step model's own, which is no solver
            own["sampler"] = "ddim" if rollout["sampler"] == "ddim" else "dpm2"
        own["resolution"] = measuring.get("resolution") or rollout.get("resolution")
        own |= {"guidance_scale": rollout.get("guidance_scale"), "shift": rollout.get("shift")}
        own |= {"text_length": values.get("text_length"), "merge": (values.get("lora") or {}).get("merge")}
    except (KeyError, TypeError, AttributeError):
        return {}
    return own | ({"resolution": tuple(own["resolution"])} if isinstance(own["resolution"], list) else {})
