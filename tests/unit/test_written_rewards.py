"""Rewards as people write them: functions and classes of some arguments, by name, from a file, a module, or Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffrl.errors import UserError
from diffrl.rewards.local import register
from diffrl.rewards.registry import load_reward

FILE = """
import numpy as np
from PIL import Image


def one(images):
    return images[:, 0].mean(dim=(1, 2))

def listed(images, prompts):
    return [float(image[0].mean()) for image in images]

def turned(prompts, images):
    return np.array([float(i[0].mean()) + 0 * len(p) for p, i in zip(prompts, images)])

def others(pixels, texts):
    return [float(p[0].mean()) + 0 * len(t) for p, t in zip(pixels, texts)]

def facts(metadata):
    return [one["red"] for one in metadata]

def pictures(images: list[Image.Image], *, power: float = 1.0):
    return [(np.asarray(image)[..., 0].mean() / 255) ** power for image in images]

class Plain:
    def __call__(self, images):
        return images[:, 0].mean(dim=(1, 2))

class Whole:
    def __init__(self, power: float = 1.0):
        self.power = power

    def __call__(self, images, prompts, metadata):
        return images[:, 0].mean(dim=(1, 2)) ** self.power
"""
RED = torch.zeros(2, 3, 4, 4)
RED[0, 0], RED[1, 0] = 0.2, 0.6
GIVEN = (RED, ["a", "bc"], [{"red": 0.2}, {"red": 0.6}])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "written_by_me.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("form", ["written_by_me.py:{}", "written_by_me:{}"])
@pytest.mark.parametrize("name", ["one", "listed", "turned", "others", "facts", "pictures", "Plain", "Whole"])
def test_a_reward_takes_what_it_names(folder: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "written_by_me", raising=False)
    reward = load_reward(form.format(name))
    scores = torch.as_tensor(reward(*GIVEN)).float()
    assert scores.tolist() == pytest.approx([0.2, 0.6], abs=1e-6) and reward.name


@pytest.mark.parametrize("name", ["pictures", "Whole"])
def test_arguments_with_a_default_are_parameters(folder: Path, name: str) -> None:
    reward = load_reward(f"written_by_me.py:{name}", power=2.0)
    assert torch.as_tensor(reward(*GIVEN)).tolist() == pytest.approx([0.04, 0.36], abs=1e-6)
    with pytest.raises(UserError, match="powr"):
        load_reward(f"written_by_me.py:{name}", powr=2.0)


def test_python_functions_are_called_by_name_too() -> None:
    def turned(prompts, images):
        return [float(image[0].mean()) for image in images]

    assert torch.as_tensor(load_reward(register("turned", turned))(*GIVEN)).tolist() == pytest.approx([0.2, 0.6])
