"""Adv-GRPO's discriminator: its numbers, its state and its references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.protocol import RewardError
from diffrl_playground.renderer import draw
from diffrl_zoo.adversarial import Adversarial, Similarity, hinge, score

PROMPTS = ["a red circle", "two blue squares", "a green star", "a red circle"]
NONE: list[dict[str, Any]] = [{}] * 4


def pictures(seed: int = 0, prompts: list[str] = PROMPTS) -> torch.Tensor:
    import numpy as np

    drawn = [draw(prompt, np.random.default_rng(100 * seed + i)) for i, prompt in enumerate(prompts)]
    return torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in drawn])


def rounds(
    reward: Adversarial, images: torch.Tensor, count: int, prompts: list[str] = PROMPTS
) -> list[dict[str, float]]:
    figures = []
    for number in range(count):
        reward(images, prompts, NONE)
        reward.observe(images, prompts, NONE, [1000 * number + i for i in range(len(prompts))])
        figures.append(reward.learn(lambda total: total))
    return figures


def test_loss_and_score_are_the_papers_in_float64() -> None:
    """Hinge on the class token and, weighted, on the patches; the code's halves."""
    generator = torch.Generator().manual_seed(0)
    real, fake = (2 * torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    for row, told in enumerate(hinge(real, fake, 0.3)):
        brackets = [max(0.0, 1 - float(r)) + max(0.0, 1 + float(f)) for r, f in zip(real[row], fake[row], strict=True)]
        assert float(told) == pytest.approx(brackets[0] / 2 + 0.3 * sum(brackets[1:]) / 3 / 2, abs=1e-12)
        logits = [float(value) for value in real[row]]
        assert float(score(real, 0.7)[row]) == pytest.approx(0.7 * logits[0] + 0.3 * sum(logits[1:]) / 3, abs=1e-12)
    assert torch.equal(hinge(torch.zeros(2, 3), torch.zeros(2, 3), 0.3), torch.full((2,), 1.3))


def test_halves_on_two_processes_add_up_to_the_whole() -> None:
    """Loss, images and gradient of one step: what is summed over the processes."""
    images, keys, sent = pictures(), [1, 2, 3, 4], []
    for part in (slice(0, 4), slice(0, 3), slice(3, 4), slice(4, 4)):
        reward = Adversarial(steps=1)
        if PROMPTS[part]:
            reward(images[part], PROMPTS[part], NONE[part])
            reward.observe(images[part], PROMPTS[part], NONE[part], keys[part])
        totals: list[torch.Tensor] = []
        reward.learn(lambda total, totals=totals: (totals.append(total.clone()), total)[1])
        sent.append(totals)
    for whole, *parts in zip(*sent, strict=True):
        assert torch.allclose(sum(parts), whole, rtol=1e-5, atol=1e-6)
    assert sent[0][0][1] == 4 and len(sent[0]) == 2  # and the figures of the first step


def test_true_pictures_cannot_be_told_from_true_pictures_and_noise_can() -> None:
    """With `gen` = `ref` in distribution the hinge stays near its value for a head that cannot tell."""
    prompts = [f"a {color} {shape}" for color in ("red", "blue", "green") for shape in ("circle", "square", "star")] * 4
    images = pictures(9, prompts)
    reward = Adversarial(learning_rate=1e-3, steps=3)
    told = []
    for number in range(6):  # new pictures each time: a head can learn a few by heart
        fresh = pictures(10 + number, prompts)
        reward(fresh, prompts, [{}] * len(prompts))
        reward.observe(fresh, prompts, [{}] * len(prompts), [1000 * number + i for i in range(len(prompts))])
        told.append(reward.learn(lambda total: total))
    assert 0.35 < told[-1]["accuracy"] < 0.65 and abs(told[-1]["gap"]) < 0.3 and told[-1]["loss"] > 1.2
    noisy = (images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    reward = Adversarial(learning_rate=1e-3, steps=3)
    for number in range(6):
        reward(noisy, prompts, [{}] * len(prompts))
        reward.observe(noisy, prompts, [{}] * len(prompts), [1000 * number + i for i in range(len(prompts))])
        figures = reward.learn(lambda total: total)
    assert figures["accuracy"] > 0.9 and figures["gap"] > 1.0


def test_its_state_comes_back_whole_and_the_first_head_stays() -> None:
    images, reward = pictures(), Adversarial(learning_rate=1e-2, steps=2)
    assert reward.first is None
    rounds(reward, images, 1)
    assert reward.first is not None
    first = reward.first(images, PROMPTS, NONE)
    assert torch.equal(first, reward(images, PROMPTS, NONE))
    rounds(reward, images, 2)
    assert torch.equal(reward.first(images, PROMPTS, NONE), first)
    assert not torch.equal(reward(images, PROMPTS, NONE), first)
    other = Adversarial(learning_rate=1e-2, steps=2)
    other.load_state_dict(reward.state_dict())
    assert other.first is not None and torch.equal(other.first(images, PROMPTS, NONE), first)
    rounds(reward, images, 1)
    rounds(other, images, 1)
    assert torch.equal(reward(images, PROMPTS, NONE), other(images, PROMPTS, NONE))


def test_patches_are_drawn_by_the_images_own_keys() -> None:
    images, reward = pictures(), Adversarial(patches=5)
    tokens = reward._tokens(images)
    alone, together = reward._drawn(tokens[2:3], [7], "generated"), reward._drawn(tokens, [1, 2, 7, 4], "generated")
    assert tokens.shape[1] == 17 and alone.shape[1] == 6 and torch.equal(alone[0], together[2])
    assert torch.equal(together[:, 0], tokens[:, 0])
    assert not torch.equal(reward._drawn(tokens[2:3], [8], "generated"), alone)


def test_references_of_a_folder_and_of_metadata(tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (40, 30), color).save(tmp_path / f"{name}.png")
    pool = Adversarial(references=str(tmp_path)).pool
    assert {tuple(p[:, 0, 0].tolist()) for p in pool.draw(["x"] * 8, [{}] * 8, range(8))} == {(1, 0, 0), (0, 0, 1)}
    told = Similarity(references="metadata")
    assert told.applies("x", {"reference": "a.png"}) and not told.applies("x", {})
    red, image = {"reference": [str(tmp_path / "a.png")]}, torch.zeros(1, 3, 64, 64)
    image[:, 0] = 1.0
    assert float(told(image, ["x"], [red])) > 0.99 > float(told(image, ["x"], [{"reference": str(tmp_path / "b.png")}]))
    (tmp_path / "c.png").write_bytes(b"no picture")
    with pytest.raises(RewardError, match=r"cannot read the reference .*c\.png"):
        told(image, ["x"], [{"reference": str(tmp_path / "c.png")}])


@pytest.mark.parametrize(
    ("arguments", "entry", "text"),
    [
        ({"references": "nowhere"}, {}, 'references: "nowhere" is not one of'),
        ({"share": 1.5}, {}, "share is 1.5, not from 0 to 1"),
        ({"steps": 0}, {}, "steps is 0, not at least 1"),
        ({}, {"cache": "kept"}, "cache: .* learns"),
        ({}, {"offload": True}, "offload: .* learns"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict, entry: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_rewards({"adversarial": Entry("adversarial", arguments, **entry)}, torch.device("cpu"))


def test_it_is_not_served(capsys) -> None:
    assert main(["rewards", "serve", "adversarial", "--port", "0"]) == 2
    assert '"adversarial" learns' in capsys.readouterr().err


def test_transformers_tokens_without_registers(tmp_path: Path) -> None:
    """DINOv2 with registers: its class token and its patches' tokens, in their places."""
    from transformers import BitImageProcessor, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    from diffrl_zoo.vision import shared_vision

    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14, num_register_tokens=3
    )
    network = Dinov2WithRegistersModel(config).eval()
    network.save_pretrained(tmp_path)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(tmp_path)
    encoder = shared_vision(str(tmp_path), "cpu", "fp32", "adversarial")
    images = torch.rand(2, 3, 28, 28)
    hidden = network(pixel_values=encoder.preprocess(images)).last_hidden_state
    assert torch.equal(encoder.tokens(images), torch.cat([hidden[:, :1], hidden[:, 4:]], dim=1))
    assert torch.allclose(F.normalize(hidden[:, 0], dim=-1), encoder.embed_image(images), atol=1e-6)
