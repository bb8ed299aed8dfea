"""`diffrl rewards fit`: the loss against its equations, a planted preference found again, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.image_sets.layouts import Group, Picture
from diffrl.reward_tools import fit
from diffrl.reward_tools.fit import Pairs, fit_weights, judged, loss_of, pairs_of, share_interval
from diffrl.reward_tools.head import load_head
from diffrl.rewards import load_reward

EMBEDDER = '''
import torch

class Colours:
    """Embeds images by their mean colour, and prompts by their length."""
    name, embeds, differentiable = "colours", True, True

    def embed_image(self, images):
        return torch.nn.functional.normalize(images.mean((2, 3)) + 1e-3, dim=-1)

    def embed_text(self, prompts):
        rows = torch.tensor([[1.0, len(p) % 3, len(p) % 5] for p in prompts])
        return torch.nn.functional.normalize(rows, dim=-1)

    def score(self, image, text):
        return (image * text).sum(-1)

    def __call__(self, images, prompts, metadata):
        return self.score(self.embed_image(images), self.embed_text(prompts))
'''


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_the_loss_is_soliRewards(margin: float) -> None:
    d, tie = np.array([1.5, -0.3, 0.4]), np.array([False, False, True])
    loss, slope = loss_of(d, tie, margin)
    terms = [-math.log(sigma(v - margin)) for v in d]
    terms[2] -= math.log(sigma(-0.4 - margin))
    assert loss == pytest.approx(sum(terms) / 3, abs=1e-12)
    for i in range(3):
        step = np.eye(3)[i] * 1e-6
        measured = (loss_of(d + step, tie, margin)[0] - loss_of(d - step, tie, margin)[0]) / 2e-6
        assert slope[i] == pytest.approx(measured, abs=1e-8)


def test_one_feature_has_a_closed_form() -> None:
    """x preferred 3 times of 4, over a distance of 1: w = log 3; with ties it is held towards 0."""
    x = np.array([[0.0], [1.0]])
    wins = Pairs(np.array([1, 1, 1, 0]), np.array([0, 0, 0, 1]), np.zeros(4, bool), np.zeros(4, int))
    assert fit_weights(x, wins, 0.0, 0.0)[0] == pytest.approx(math.log(3), abs=1e-4)
    tied = Pairs(
        *(np.append(column, extra) for column, extra in zip(vars(wins).values(), (1, 0, True, 0), strict=True))
    )
    # A tie counts as one win and one loss: 4 wins of 6.
    assert fit_weights(x, tied, 0.0, 0.0)[0] == pytest.approx(math.log(4 / 2), abs=1e-4)


def test_which_pairs_a_group_has() -> None:
    def group(prompt: str, *values: float) -> Group:
        return Group(prompt, (Picture("x"),) * len(values), {"preference": values}, "row")

    unrated = (group("a", math.nan, 1, 2), group("c", 2, math.nan, 1))
    pairs = pairs_of([group("a", 1, 0, 0), group("b", 0.5, 0.5), *unrated], "preference")
    rows = list(zip(pairs.better, pairs.worse, pairs.tie, pairs.prompt, strict=True))
    assert rows == [(0, 1, False, 0), (0, 2, False, 0), (3, 4, True, 1), (7, 6, False, 0), (8, 10, False, 2)]


def test_calibration_and_interval() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=4000) * 2
    first, second = np.arange(0, 4000, 2), np.arange(1, 4000, 2)
    won = rng.random(2000) < 1 / (1 + np.exp(scores[second] - scores[first]))
    pairs = Pairs(
        np.where(won, first, second), np.where(won, second, first), np.zeros(2000, bool), np.arange(2000) // 2
    )
    figures = judged(scores, pairs)
    assert figures["calibration_error"] < 0.03 and judged(scores * 3, pairs)["calibration_error"] > 0.1
    assert figures["interval"][0] < figures["accuracy"] < figures["interval"][1]
    assert figures["interval"][1] - figures["interval"][0] == pytest.approx(4 * math.sqrt(0.75 * 0.25 / 2000), rel=0.25)


@pytest.mark.parametrize(
    ("right", "counts", "interval"),
    [
        ([1] * 8, [1] * 8, (0.676, 1.0)),  # Wilson's: a bootstrap says [1, 1]
        ([4] * 8, [4] * 8, (0.676, 1.0)),  # all right: as if each prompt were one pair
        ([0] * 8, [1] * 8, (0.0, 0.324)),
        ([1, 0] * 50, [1] * 100, (0.404, 0.596)),
        ([4, 0] * 50, [4] * 100, (0.404, 0.596)),  # pairs of a prompt agree: 100 cases, not 400
        ([2, 2] * 50, [4] * 100, (0.451, 0.549)),  # they do not: 400
    ],
)
def test_the_interval_counts_what_is_independent(right: list, counts: list, interval: tuple[float, float]) -> None:
    assert share_interval(np.array(right), np.array(counts)) == pytest.approx(interval, abs=2e-3)


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    """Raters who like green: the second of two plain pictures, and sometimes neither."""
    (tmp_path / "colours.py").write_text(EMBEDDER)
    rng = np.random.default_rng(0)
    rows = []
    for i in range(80):
        colours = rng.integers(0, 256, (2, 3)).astype(np.uint8)
        names = [f"{i}-{side}.png" for side in range(2)]
        for name, colour in zip(names, colours, strict=True):
            Image.fromarray(np.broadcast_to(colour, (6 + i % 2, 8, 3)).copy()).save(tmp_path / name)
        shares = colours[:, 1] / np.linalg.norm(colours.astype(float), axis=1)
        preference = (
            [1, 1] if abs(shares[0] - shares[1]) < 0.05 else [int(shares[0] > shares[1]), int(shares[1] > shares[0])]
        )
        rows.append({"images": names, "prompt": f"prompt {'x' * (i % 40)}", "scores": {"preference": preference}})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_planted_preference_is_found_and_the_reward_is_used(preferences: Path, capsys: Any) -> None:
    out, plugin = preferences / "head.safetensors", f"{preferences / 'colours.py'}:Colours"
    assert main(["rewards", "fit", str(preferences / "pairs.jsonl"), "--on", plugin, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "held out" in said and "accuracy" in said and "plugin: fitted" in said
    head = load_head(str(out))
    assert head.figures["accuracy"] > 0.85 and head.figures["ties"] > 0
    reward: Any = load_reward("fitted", head=str(out))
    plain = torch.zeros(2, 3, 8, 8)
    plain[0, 1], plain[1, 0] = 1.0, 1.0  # green, red
    plain.requires_grad_()
    scores = reward(plain, ["prompt x", "prompt x"], [{}, {}])
    assert scores[0] > scores[1] + 2
    scores.sum().backward()
    assert plain.grad is not None and plain.grad.abs().sum() > 0
    assert main(["rewards", "fit", str(preferences / "pairs.jsonl"), "--on", plugin, "--out", str(out)]) == 0
    assert torch.equal(load_head(str(out)).weight, head.weight)
    (preferences / "colours.py").write_text(EMBEDDER.replace("len(p) % 3", "len(p) % 7"))
    with pytest.raises(UserError, match="fitted on another model"):
        load_reward("fitted", head=str(out))


def test_what_is_refused(preferences: Path, tmp_path: Path, capsys: Any) -> None:
    plugin, out = f"{preferences / 'colours.py'}:Colours", str(preferences / "head.safetensors")
    few = preferences / "few.jsonl"
    few.write_text("\n".join((preferences / "pairs.jsonl").read_text().splitlines()[:5]))
    torn = preferences / "torn.jsonl"
    torn.write_text((preferences / "pairs.jsonl").read_text() + '{"images": ["0-')
    wrong = [
        ([str(few), "--on", plugin, "--out", out], "a head needs 20"),
        ([str(torn), "--on", plugin, "--out", out], "not valid JSON"),
        ([str(few) + "x", "--on", plugin, "--out", out], "no file or folder"),
        ([str(few), "--on", "clipp", "--out", out], 'nearest: "clip"'),
        ([str(few), "--on", plugin, "--out", str(preferences)], "is a folder"),
        ([str(few), "--on", plugin, "--scores", "prefs", "--out", out], 'nearest: "preference"'),
        ([str(few), "--on", plugin, "--held-out", "1", "--out", out], "from 0.01 to 0.9"),
        ([str(few), "--on", plugin], "--out"),
        ([str(preferences / "pairs.jsonl"), "--on", "jpeg", "--out", out], "does not embed"),
    ]
    for words, said in wrong:
        assert main(["rewards", "fit", *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    (preferences / "3-0.png").write_bytes(b"no picture")
    assert main(["rewards", "fit", str(preferences / "pairs.jsonl"), "--on", plugin, "--out", out]) == 2
    assert "not a picture that can be read" in capsys.readouterr().err
    assert not Path(out).exists()
    for content in (b"", b"x" * 100):
        Path(out).write_bytes(content)
        with pytest.raises(UserError, match="is not a head that"):
            load_reward("fitted", head=out)
    with pytest.raises(UserError, match="no file"):
        load_reward("fitted", head=out + "x")
    assert fit.LEAST == 20
