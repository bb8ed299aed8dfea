"""Where an image of the playground is right: the verifier's answers by places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffrl.rewards.registry import load_reward
from diffrl_playground.grammar import parse
from diffrl_playground.reading import region_map
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete, sample_caption
from diffrl_playground.verifier import Observation, glance


def see(image: np.ndarray) -> Observation:
    return next(glance(image[None]))


def drawn(prompt: str, seed: int = 0) -> np.ndarray:
    return render(complete(parse(prompt), np.random.default_rng(seed)))


def test_true_pictures_are_right_wherever_something_is_drawn() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        caption = sample_caption(rng, "test", "all")
        scores = region_map(see(render(complete(caption, rng))), caption)
        assert np.nanmin(scores) == 1.0
        assert ("background" in caption.attributes) == (not np.isnan(scores).any())


def test_of_two_things_only_the_wrong_one_is_wrong() -> None:
    picture = drawn("a red circle left of a blue square, filled")
    scores = region_map(see(picture), parse("a red circle left of a green square"))
    left, right = scores[:, :32], scores[:, 32:]
    assert np.nanmin(left) == np.nanmax(left) == 1.0  # the circle
    assert np.nanmin(right) == np.nanmax(right) == 0.0  # a square, but no green one
    assert np.isnan(scores[0]).all()  # nothing is said of the ground
    other = region_map(see(picture), parse("a red circle on black"))
    assert set(np.unique(other)) == {-1.0, 1.0}  # the square and the ground are not asked for


def test_an_empty_picture_is_wrong_everywhere() -> None:
    empty = np.full((64, 64, 3), 255, np.uint8)
    assert (region_map(see(empty), parse("a star")) == -1).all()


def test_the_reward_is_the_maps_mean_and_whole_multiplies() -> None:
    prompts = ["a red circle left of a green square", "a smiling head", "three stars"]
    texts = ["a red circle left of a blue square, filled", "a frowning head", "two stars"]
    images = torch.stack([torch.from_numpy(drawn(text)).permute(2, 0, 1) / 255 for text in texts])
    for whole in (False, True):
        reward = load_reward("playground_regions", whole=whole)
        cells = reward.map(images, prompts, [{}] * 3)  # type: ignore[attr-defined]
        assert cells.shape == (3, 8, 8) and float(cells.nan_to_num(0).abs().max()) <= 1
        scores = reward(images, prompts, [{}] * 3)
        torch.testing.assert_close(scores, cells.flatten(1).nanmean(1))
    strict = load_reward("playground", mode="strict")(images, prompts, [{}] * 3)
    plain = load_reward("playground_regions").map(images, prompts, [{}] * 3)  # type: ignore[attr-defined]
    torch.testing.assert_close(cells, plain * strict[:, None, None], equal_nan=True)
    assert float(scores[1]) == pytest.approx(0.0)  # the head's one fact is wrong, so a is 0
