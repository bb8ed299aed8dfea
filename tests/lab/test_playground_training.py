"""What the playground's generator is shown in its last stage: captions that are wrong, of the same kind of scene."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import CLIPTokenizer

from diffrl.resources import shipped

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "playground"))

from drawing import Learner, Prompts


def prompts(kinds: np.ndarray, wrong: float) -> Prompts:
    pool: Any = SimpleNamespace(tokens=np.zeros((len(kinds), 6, 16), np.int16), kinds=kinds)
    tokenizer = CLIPTokenizer.from_pretrained(shipped("assets", "playground", "pipeline", "tokenizer"))
    return Prompts(pool, SimpleNamespace(encoders=torch.nn.ModuleList()), tokenizer, wrong)


def test_a_share_of_captions_is_of_another_scene_of_the_same_kind() -> None:
    kinds = np.random.default_rng(0).integers(0, 6, 4000).astype(np.uint8)
    rows = np.arange(2000)
    found = prompts(kinds, 0.25).others(rows, torch.Generator().manual_seed(0))
    assert (kinds[found] == kinds[rows]).all()
    assert abs((found != rows).mean() - 0.25) < 0.03  # three standard deviations
    taken = np.bincount(found[found != rows] // 1000, minlength=4)
    assert taken.min() > 80  # of 500, from all over the pool


def test_the_cells_are_read_from_the_image_tokens() -> None:
    x, t, embeds, pooled = torch.randn(2, 8, 8, 8), torch.rand(2), torch.randn(2, 16, 128), torch.randn(2, 128)
    learner, inside = Learner(), []
    learner.classifier.register_forward_pre_hook(lambda module, given: inside.append(given[0].shape[1]))
    velocity, read = learner(x, t, embeds, pooled)
    assert velocity.shape == x.shape and read.shape[2:] == (8, 8) and inside == [16]
