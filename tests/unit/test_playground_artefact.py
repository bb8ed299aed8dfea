"""The artefact measure orders pictures by how far they are off the world's renderings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from diffrl_playground.artefact import artefact, bank_images
from diffrl_playground.renderer import draw
from diffrl_playground.scenes import sample_caption


@pytest.fixture(scope="module")
def fresh() -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.stack([draw(sample_caption(rng, "test").text(), rng) for _ in range(100)])


@pytest.mark.long
def test_zero_on_the_bank() -> None:
    assert artefact(bank_images(60)).max() < 1e-6


def test_order_of_decay(fresh: np.ndarray) -> None:
    rng = np.random.default_rng(2)
    blurred = np.stack([np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(2))) for image in fresh])
    blends = ((fresh[:50].astype(int) + fresh[50:]) // 2).astype(np.uint8)
    noisy = np.clip(fresh + rng.normal(0, 15, fresh.shape), 0, 255).astype(np.uint8)
    noise = rng.integers(0, 256, (20, 64, 64, 3)).astype(np.uint8)
    medians = [float(artefact(images).median()) for images in (fresh, blurred, blends, noisy, noise)]
    assert medians[0] < 0.025
    assert medians[1] > 1.5 * medians[0] and medians[2] > 2.5 * medians[0] and medians[3] > 2.5 * medians[0]
    assert medians[4] == pytest.approx(0.29, abs=0.02)


def test_a_local_flaw_is_seen(fresh: np.ndarray) -> None:
    flawed = fresh.copy()
    flawed[:, 24:40, 24:40] = np.random.default_rng(3).integers(0, 256, (16, 16, 3))
    gain = artefact(flawed) - artefact(fresh)
    # 4 of 64 patches at about 0.29, less what those patches had before.
    assert float((gain > 0.01).float().mean()) > 0.9 and float(gain.mean()) == pytest.approx(0.29 * 4 / 64, abs=0.004)


def test_forms_of_images_agree(fresh: np.ndarray) -> None:
    floats = torch.from_numpy(fresh[:10]).permute(0, 3, 1, 2).float() / 255
    distance = artefact(floats)
    assert distance.shape == (10,) and distance.dtype == torch.float32
    assert torch.allclose(distance, artefact(fresh[:10]), atol=1e-6)
    # An image's value does not depend on its neighbours in the batch.
    assert torch.allclose(distance[3:4], artefact(fresh[3:4]), atol=1e-5)
