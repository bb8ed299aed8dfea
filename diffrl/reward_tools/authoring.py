"""`diffrl rewards new`: a package with a reward that works, its test and its entry point, for its author to rewrite."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from diffrl.errors import UserError
from diffrl.plugins import GROUPS
from diffrl.rewards.registry import available

PLUGIN = '''"""The reward `{name}`: how strong the contrast of the picture is. Replace the measure by your own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from diffrl.rewards import Card


class {cls}:
    """Standard deviation of the brightness of an image's pixels, in [0, 0.5], times `gain`."""

    name = "{name}"
    differentiable = True  # gradients flow from the scores to the images; leave it out if they do not
    card = Card(  # of the class: `diffrl rewards list` builds nothing
        measures="contrast of the picture, without regard to the prompt; times `gain`",
        range=(0.0, 0.5),
        citation="none",
        weights="none",
        licence="Apache-2.0",
        cost="CPU; thousands of images a second",
        exploits="checkerboards of black and white",
    )

    def __init__(self, gain: float = 1.0) -> None:
        # Load models here, not when the module is imported. A parameter `device` would get the run's device.
        self.gain = gain
        self.card = replace(type(self).card, range=(0.0, 0.5 * gain))

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """Whether the reward can judge images of this prompt; the others get no score from it."""
        return True

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W), float in [0, 1]. Raise an exception where something fails."""
        return self.gain * images.mean(dim=1).flatten(1).std(dim=1, correction=0)
'''

TEST = '''"""The reward keeps to diffrl's protocol, and prefers what it should."""

import torch

from diffrl.reward_tools.check import examine
from {module} import {cls}


def test_it_keeps_to_the_protocol() -> None:
    failed = [f"{{result.title}}: {{result.detail}}" for result in examine({cls}()) if not result.passed]
    assert not failed, failed


def test_contrast_is_preferred() -> None:
    grey = torch.full((3, 8, 8), 0.5)
    halves = torch.cat([torch.zeros(3, 8, 4), torch.ones(3, 8, 4)], dim=2)
    scores = {cls}()(torch.stack([grey, halves]), ["a", "b"], [{{}}, {{}}])
    torch.testing.assert_close(scores, torch.tensor([0.0, 0.5]))
'''

PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "diffrl-reward-{dashed}"
version = "0.1.0"
description = "The reward {name} for diffrl"
requires-python = ">=3.10"
dependencies = ["diffrl"]

[project.entry-points."{group}"]
{name} = "{module}:{cls}"

[tool.setuptools]
py-modules = ["{module}"]
"""


def write_plugin(name: str, folder: Path) -> Path:
    """Write the package of a new reward `name` into `folder`, which it returns.

    Raises `UserError` for a name that is no Python name in lower case or is taken, and for a folder with files in it.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f'rewards new: "{name}": use lower-case letters, digits and "_", as in my_reward')
    if name in available():
        raise UserError(f'rewards new: there is a reward "{name}" ({available()[name].value}); choose another name')
    module = name if name.endswith("reward") else f"{name}_reward"
    if importlib.util.find_spec(module) is not None:
        raise UserError(f'rewards new: there is a Python module "{module}"; choose another name')
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f'rewards new: "{folder}" exists already; choose another --out')
    cls = "".join(part.capitalize() for part in name.split("_") if part)
    words = {
        "name": name,
        "module": module,
        "cls": cls,
        "group": GROUPS["reward"],
        "dashed": name.strip("_").replace("_", "-"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in ((f"{module}.py", PLUGIN), (f"test_{module}.py", TEST), ("pyproject.toml", PROJECT)):
        (folder / file).write_text(text.format(**words), encoding="utf-8")
    return folder
