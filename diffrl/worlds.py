"""Worlds: models that a package brings under a name, with a language of prompts whose truth a program can check.

A world is an instance of `World`, published under its name by an entry point of the group `diffrl.worlds`. A config's
`model: NAME` loads its pipeline; `NAME/...` are its prompt sets and its LoRAs. The shipped one is the playground.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, foreign
from diffrl.plugins import here, installed, load

if TYPE_CHECKING:
    import numpy as np
    import torch


class World:
    """A base class: `name` and `pipeline` must be set, and the rest where the world has it.

    name: of the model, and the beginning of its prompt sets and LoRAs. pipeline: its folder in diffusers' format.
    resolution: side of its images. loras: path by name (`NAME/...`). features: the feature space of diversity where a
    config names none. figures: a `diffrl.reward_kinds.figures.GroupFigures` of evaluations of its model, whatever the
    rewards are. meanings: of each figure, for readers. divgen: its part of DivGenBench, with `DEFAULTS` and
    `EXTRACTORS` (by kind, see `diffrl.divgen.extractors`) and `benchmark(total)`, the prompts. stand_ins: by reward.
    """

    name: str
    pipeline: Path
    resolution: int
    loras: Mapping[str, Path] = {}
    features: str = "pixels"
    figures: Any = None
    meanings: Mapping[str, str] = {}
    divgen: Any = None
    stand_ins: Mapping[str, Any] = {}

    def split(self, source: str) -> str:
        """The split of a prompt set `NAME/...`, UserError if it has none; sets of different splits share no prompt."""
        raise UserError(f'prompt set "{source}": {self.name} has none')

    def prompts(self, source: str) -> Sequence[str]:
        """The prompts of a set that `split` knows."""
        raise NotImplementedError

    def foreign(self, texts: Sequence[str]) -> str:
        """One line on prompts that are not of the world's language, empty where all are."""
        return ""

    def sample(self, each: int, rng: np.random.Generator) -> list[str]:
        """Prompts, `each` of every kind."""
        raise NotImplementedError

    def draw(self, text: str, rng: np.random.Generator) -> np.ndarray:
        """A true image of a prompt of the language, (H, W, 3) uint8."""
        raise NotImplementedError

    def feature_space(self, name: str, device: torch.device | str) -> Any:
        """A `diffrl.features.Features` of the world's own, None for a name that it does not know."""
        return None


@functools.cache
def worlds() -> Mapping[str, World]:
    """All that are installed, by name."""
    return {name: load("world", name) for name in installed("world")}


def world_of(source: str) -> World | None:
    """Whose prompt set or LoRA `NAME/...` this is, if it is a world's."""
    return worlds().get(source.partition("/")[0])


def folder_of(model: str) -> Path:
    """The folder of a world's pipeline, or the one that `model` names, whether or not it exists."""
    return worlds()[model].pipeline if model in worlds() else Path(os.path.expanduser(here(model)))


def form_of(model: str) -> Any:
    """What an installed form of models reads in a name, such as `BASE+FILE` (`diffrl.model_forms`); None: it is plain.

    It has `base`, the name of the model that it goes over, "" where the name has none; the `file` that it is; `find`,
    which asks the function that it is given where the base is; and `load`, the modules that it has in their place.

    Raises:
        UserError: the form's own, for a name that is one and wrong.
    """
    forms = (load("model form", name)(model) for name in installed("model form"))
    return next((form for form in forms if form is not None), None)


def owner(model: str) -> World | None:
    """The world whose language a model draws: by its name, its pipeline's folder, or `world` in a folder's diffrl.json
    (a model that was trained in that world)."""
    if (form := form_of(model)) is not None:
        model = form.base or model
    known, folder = worlds(), Path(os.path.expanduser(model))
    for world in known.values():
        if model == world.name or (folder.is_dir() and folder.resolve() == Path(world.pipeline).resolve()):
            return world
    settings = folder / "diffrl.json"
    if not settings.is_file():
        return None
    with foreign(settings):
        return known.get(json.loads(settings.read_text()).get("world"))
