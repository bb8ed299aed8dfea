"""Texts of different length in one batch, and pictures that are not square."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import SPEC, tiny_flux, velocity

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.policy import Conditioning, load_policy


def texts(*lengths: int, layers: int = 0) -> list[Conditioning]:
    """One row each; every number of row i is i + 1."""
    shape = (layers, 2) if layers else (2,)
    return [
        Conditioning(torch.full((1, n, *shape), i + 1.0), torch.full((1, 3), i + 1.0), torch.tensor([n]))
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("layers", [0, 4])
def test_texts_of_different_length_are_padded_and_masked(layers: int) -> None:
    cond = Conditioning.cat(texts(2, 5, 3, layers=layers))
    assert cond.embeds.shape[:2] == (3, 5) and cond.padded
    assert cond.mask.sum(1).tolist() == [2, 5, 3] and cond.mask[0].tolist() == [True, True, False, False, False]
    assert not cond.embeds[~cond.mask].any() and cond.embeds[cond.mask].all()
    assert [len(row) for row in cond.rows()] == [2, 5, 3]


def test_a_selection_is_cut_down_to_its_longest_text() -> None:
    cond = Conditioning.cat(texts(2, 5, 3))
    picked = cond.select(torch.tensor([2, 0, 2]))
    assert picked.embeds.shape == (3, 3, 2) and picked.embeds[:, 0, 0].tolist() == [3, 1, 3]
    assert picked.lengths is not None and picked.lengths.tolist() == [3, 2, 3] and picked.padded
    assert not cond.select(torch.tensor([0, 0])).padded
    assert len(cond.select(torch.tensor([], dtype=torch.int64))) == 0


def test_expanding_and_what_else_a_network_is_given() -> None:
    one = Conditioning(torch.ones(1, 2, 3), torch.ones(1, 0), torch.tensor([2]), (torch.arange(4.0).view(1, 4),))
    many = one.expand(3)
    assert len(many) == 3 and many.extra[0].shape == (3, 4) and many.lengths is not None
    both = Conditioning.cat([many, one])
    assert both.extra[0].shape == (4, 4) and both.lengths is not None and both.lengths.tolist() == [2] * 4
    assert both.select(torch.tensor([3])).extra[0].tolist() == [[0, 1, 2, 3]]


def test_without_lengths_texts_must_be_equally_long() -> None:
    rows = [Conditioning(torch.ones(1, n, 3), torch.ones(1, 0)) for n in (2, 3)]
    with pytest.raises(ValueError, match="different length"):
        Conditioning.cat(rows)
    assert rows[0].mask.all() and not rows[0].padded


def test_pictures_need_not_be_square(tmp_path: Path) -> None:
    flux = str(tiny_flux(tmp_path / "flux"))
    policy = load_policy(flux, lora=SPEC, resolution=(24, 16))  # width, height
    assert policy.latent_shape == (4, 8, 12)
    assert policy.decode(torch.zeros(1, 4, 8, 12)).shape == (1, 3, 16, 24)
    assert velocity(policy).shape == (2, 4, 8, 12)
    with pytest.raises(UserError, match=r"18 pixels is not a multiple of 4"):
        load_policy(flux, lora=SPEC, resolution=(16, 18))


def test_the_config_takes_a_side_or_width_and_height(config_file) -> None:
    path = config_file("run")
    assert load_config(path, ["rollout.resolution=16"]).rollout.resolution == 16
    assert load_config(path, ["rollout.resolution=[24, 16]"]).rollout.resolution == (24, 16)
    for bad in ("4", "[16, 4]", "[16, 16, 16]", "big"):
        with pytest.raises(UserError, match=r"rollout.resolution: expected a side of 8 to 16384 pixels, or"):
            load_config(path, [f"rollout.resolution={bad}"])
