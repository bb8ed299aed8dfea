"""What an epoch's scores say before training: best-of-N, noise, silent groups, conflicts, verdicts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl_lab.headroom import VERSIONS, analyse, as_text, best_of, headroom


def test_best_of_n_is_the_mean_over_all_choices() -> None:
    table = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves = best_of(table)
    for n in range(1, 7):
        chosen = [table[:, list(c)].amax(1) for c in itertools.combinations(range(6), n)]
        assert torch.allclose(curves[:, n - 1], torch.stack(chosen).mean(0), atol=1e-12)


def test_each_verdict_has_its_cause() -> None:
    """Of 24 groups of 16: one reward to train on, and one for each reason not to."""
    draw = torch.Generator().manual_seed(1)
    good = torch.randn(24, 16, generator=draw)
    silent = torch.ones(24, 16)
    silent[0] = good[0]
    absent = torch.full((24, 16), math.nan)
    scores = torch.stack([good, silent, torch.randn(24, 16, generator=draw), absent, -good], dim=2)
    names = ["good", "silent", "noisy", "absent", "against"]
    result = analyse(names, names[:4], scores, torch.tensor([0.1, 0.1, 1.0, math.nan, 0.1]))
    rewards = result["rewards"]
    assert [rewards[name]["train"] for name in names[:4]] == [True, False, False, False]
    assert "it goes against against (-1.00)" in rewards["good"]["verdict"]
    assert "96% of the groups" in rewards["silent"]["verdict"] and "invisible changes" in rewards["noisy"]["verdict"]
    assert "applies to none" in rewards["absent"]["verdict"]
    expected = rewards["good"]["expected_gain"]
    assert expected["low"] < expected["value"] < expected["high"]
    assert rewards["good"]["reliability"] == pytest.approx(0.99, abs=2e-3)
    assert {tuple(one["rewards"]) for one in result["conflicts"]} >= {("good", "noisy"), ("good", "against")}
    text = as_text({**result, "prompts": 24, "group_size": 16, "images": 384, "versions": 96})
    assert max(map(len, text.splitlines())) <= 80


def test_near_identical_pictures_are_near(config_file) -> None:
    pictures = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    smooth = torch.nn.functional.interpolate(pictures[:, :, :4, :4], size=32, mode="bilinear")
    for name, change in VERSIONS.items():
        moved = change(smooth)
        assert moved.shape == smooth.shape and moved.dtype == smooth.dtype, name
        assert float(moved.min()) >= 0 and float(moved.max()) <= 1
        assert 0 < float((moved - smooth).abs().mean()) < 0.01, name


def test_an_epoch_is_drawn_and_nothing_is_written(config_file, tmp_path, capsys) -> None:
    path = config_file("run")
    result = headroom(load_config(path))
    assert result is not None and result["images"] == 16 and result["versions"] == 16
    assert set(result["rewards"]["redness"]["best_of"]) == {"1", "2", "4"}
    assert not (tmp_path / "run").exists()
    assert main(["headroom", str(path), "rollout.group_size=1", "optimise.batch_size=4"]) == 2
    assert "rollout.group_size" in capsys.readouterr().err
    assert main(["headroom"]) == 2 and main(["headroom", str(path), "--out", str(tmp_path)]) == 2
