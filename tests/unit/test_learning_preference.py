"""Preference models that learn while the policy does: Adv-GRPO's form for them, and REFORM's idea."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.errors import UserError
from diffrl.reward_tools.head import features
from diffrl.rewards.registry import load_reward
from diffrl_playground.grammar import Caption
from diffrl_playground.renderer import draw, render
from diffrl_playground.scenes import complete, sample_caption
from diffrl_playground.taste import BIAS
from diffrl_zoo.adversarial_preference import AdversarialPreference
from diffrl_zoo.learning_preference import LearningPreference, pair_loss
from diffrl_zoo.reform import Preferences, Reform

PROMPTS = ["a red circle", "two blue squares", "a green star", "a yellow heart"]
NONE: list[dict[str, Any]] = [{}] * 4
KINDS: list[tuple[type[LearningPreference], dict[str, Any]]] = [
    (AdversarialPreference, {"layers": 1, "learning_rate": 1e-4}),
    (Reform, {"learning_rate": 1e-2}),
]


def picture(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def true(seed: int = 0) -> torch.Tensor:
    return torch.stack([picture(draw(prompt, np.random.default_rng(seed + i))) for i, prompt in enumerate(PROMPTS)])


@pytest.fixture
def junk(tmp_path: Path) -> str:
    """A folder of references that any true picture beats."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    return str(tmp_path)


def one_round(reward: LearningPreference, images: torch.Tensor, number: int, part: slice, reduce: Any) -> dict:
    prompts, keys = PROMPTS[part], [1000 * number + i for i in range(4)][part]
    reward(images[part], prompts, NONE[part])
    reward.observe(images[part], prompts, NONE[part], keys)
    return reward.learn(reduce)


def alone(reward: LearningPreference, images: torch.Tensor, number: int = 0) -> dict:
    return one_round(reward, images, number, slice(0, 4), lambda total: total)


def test_loss_and_scores_in_float64(junk: str) -> None:
    gaps = torch.linspace(-30, 30, 7, dtype=torch.float64)
    for gap, loss in zip(gaps.tolist(), pair_loss(gaps).tolist(), strict=True):
        assert loss == pytest.approx(math.log1p(math.exp(-gap)), abs=1e-12)
    assert float(pair_loss(torch.zeros(1, dtype=torch.float64))) == pytest.approx(math.log(2), abs=1e-15)
    reward, base, images = Reform(references=junk), load_reward("preference"), true()
    assert torch.equal(reward(images, PROMPTS, NONE), base(images, PROMPTS, NONE))  # w is 0
    weight = torch.randn(reward.learner.parameters[0].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reward.learner.parameters[0].copy_(weight)
    image, text = reward.base.embed_image(images).double(), reward.base.embed_text(PROMPTS).double()
    expected = base.factor * (image * text).sum(1) + features(image, text) @ weight[0].double() * image.shape[1] ** 0.5
    assert torch.allclose(reward(images, PROMPTS, NONE).double(), expected, atol=1e-4)


def test_the_last_layers_learn_and_everything_else_is_shared(junk: str) -> None:
    plain, images = load_reward("preference"), true()
    reward = AdversarialPreference(references=junk, layers=1, learning_rate=1e-4, steps=2)
    before = plain(images, PROMPTS, NONE)
    assert torch.equal(reward(images, PROMPTS, NONE), before)
    tower = {parameter.data_ptr(): name for name, parameter in plain.clip.model.named_parameters()}
    mine = {parameter.data_ptr(): name for name, parameter in reward._now.clip.model.named_parameters()}
    apart = {address: name for address, name in mine.items() if address not in tower}
    assert apart.keys() == {parameter.data_ptr() for parameter in reward.learner.parameters}
    assert sorted(apart.values()) == sorted(
        f"visual.transformer.resblocks.1.{name}" for name, _ in plain.image_layers[-1].named_parameters()
    )
    old = [parameter.clone() for parameter in reward.learner.parameters]
    assert alone(reward, images)["steps"] == 2
    assert all(not torch.equal(one, now) for one, now in zip(old, reward.learner.parameters, strict=True))
    assert torch.equal(plain(images, PROMPTS, NONE), before)
    assert not torch.equal(reward(images, PROMPTS, NONE), before)


def test_it_learns_only_while_the_images_score_above_the_references(junk: str) -> None:
    """Limit cases: never while they score below; with a large step once, then the references are ahead."""
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for kind, settings in KINDS:
        reward = kind(**settings)
        old = reward.learner.state_dict()
        figures = alone(reward, noise)
        assert figures["gap"] > 0 and figures["accuracy"] == 1 and figures["steps"] == 0
        assert all(torch.equal(old[name], now) for name, now in reward.learner.state_dict().items() if name in old)
    reward = AdversarialPreference(references=junk, learning_rate=1e-2)
    figures = alone(reward, true())
    assert figures["gap"] < 0 and 0 < figures["steps"] < 9
    assert alone(reward, true())["steps"] == 0


def test_one_falsely_ranked_pair_is_all_that_the_head_learns_from() -> None:
    gap = torch.tensor([1.0, -0.5, 0.0])
    assert Reform.overtaken(Reform, gap, 1.0).tolist() == [False, True, False]  # type: ignore[arg-type]
    for mean, all_of_them in ((-0.1, True), (0.0, False), (0.2, False)):
        assert AdversarialPreference.overtaken(AdversarialPreference, gap, mean).tolist() == [all_of_them] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_its_state_comes_back_whole_and_the_first_stays(kind: Any, settings: dict, junk: str) -> None:
    images, reward = true(), kind(references=junk, steps=1, **settings)
    assert reward.first is None
    alone(reward, images)
    first = reward.first(images, PROMPTS, NONE)
    assert torch.equal(first, reward(images, PROMPTS, NONE))
    alone(reward, images, 1)
    assert torch.equal(reward.first(images, PROMPTS, NONE), first)
    other = kind(references=junk, steps=1, **settings)
    other.load_state_dict(reward.state_dict())
    assert torch.equal(other.first(images, PROMPTS, NONE), first)
    assert alone(reward, images, 2) == alone(other, images, 2)
    assert torch.equal(reward(images, PROMPTS, NONE), other(images, PROMPTS, NONE))
    assert not torch.equal(reward(images, PROMPTS, NONE), first)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_two_processes_take_the_step_of_one(kind: Any, settings: dict, junk: str) -> None:
    """One of them with a single image, or with none: the same figures, sums of gradients and scores."""
    images, whole, sums = true(), kind(references=junk, steps=2, **settings), []
    figures = one_round(whole, images, 0, slice(0, 4), lambda total: (sums.append(total.clone()), total)[1])
    for cut in (3, 4):
        pair, parts = [kind(references=junk, steps=2, **settings) for _ in range(2)], (slice(0, cut), slice(cut, 4))
        ended, together = in_lockstep(pair, parts, images)
        assert ended[0] == ended[1] and ended[0] == pytest.approx(figures, rel=1e-4)
        assert torch.allclose(together[2], sums[2], rtol=1e-3, atol=1e-5)  # after figures and count: the first step's
        scores = [reward(images, PROMPTS, NONE) for reward in (*pair, whole)]
        assert torch.equal(scores[0], scores[1]) and torch.allclose(scores[0], scores[2], atol=1e-3)


def in_lockstep(pair: list[LearningPreference], parts: Any, images: torch.Tensor) -> tuple[list[dict], list]:
    """Each of two rewards learns from its part of the images; their figures, and what was summed over both."""
    barrier, sent, ended, together = threading.Barrier(2), [torch.zeros(0)] * 2, [{}, {}], []

    def run(rank: int) -> None:
        def reduce(total: torch.Tensor) -> torch.Tensor:
            sent[rank] = total.clone()
            barrier.wait(60)
            result = sent[0] + sent[1]
            if rank == 0:
                together.append(result)
            barrier.wait(60)
            return result.clone()

        part = parts[rank]
        ended[rank] = one_round(pair[rank], images, 0, part, reduce) if PROMPTS[part] else pair[rank].learn(reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended, together


def liking(reward: Any, name: str, value: str, count: int = 24) -> float:
    """How many points more a scene scores for being drawn so: the same scene with and without."""
    rng, pairs, texts = np.random.default_rng(1), [], []
    for _ in range(count):
        caption = Caption("objects", {"shape": "star", "color": "red"})
        scene = complete(Caption("objects", {**caption.attributes, "style": "filled", "tone": "plain"}), rng)
        pairs.append([scene, type(scene)(scene.kind, {**scene.facts, name: value}, scene.places)])
        texts.append(caption.text())
    sides = [torch.stack([picture(render(pair[side])) for pair in pairs]) for side in (0, 1)]
    plain, liked = (reward(images, texts, [{}] * count) for images in sides)
    return float((liked - plain).mean())


def test_what_is_found_is_the_planted_bias() -> None:
    """The best of six true pictures by the model beat most references; the head then takes points from stripes
    and pale tones, and few from a fact of the prompt."""
    reward, rng, count, of = Reform(learning_rate=5e-3), np.random.default_rng(0), 24, 6
    before = {name: liking(reward, name, value) for name, (value, _) in BIAS.items()}
    fact = liking(reward, "color", "blue")
    for number in range(2):
        texts = [sample_caption(rng, "train", "compositional").text() for _ in range(count)]
        drawn = [draw(text, rng) for text in texts for _ in range(of)]
        images = torch.stack([picture(pixels) for pixels in drawn])
        best = reward(images, [t for t in texts for _ in range(of)], [{}] * len(drawn)).view(count, of).argmax(1)
        images = images.view(count, of, 3, 64, 64)[torch.arange(count), best]
        reward(images, texts, [{}] * count)
        reward.observe(images, texts, [{}] * count, [1000 * number + i for i in range(count)])
        assert reward.learn(lambda total: total)["accuracy"] < 0.3
    for name, (value, _) in BIAS.items():
        assert before[name] > 0.3 and liking(reward, name, value) < 0.7 * before[name], name
    assert fact < -0.5 and liking(reward, "color", "blue") < 0.8 * fact


def test_pairs_of_an_image_set(tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "blue"), ("c", "green")):
        Image.new("RGB", (40, 30), color).save(tmp_path / f"{name}.png")
    row = {"prompt": "x", "images": ["a.png", "b.png", "c.png"], "scores": {"preference": [0.2, None, 0.9]}}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    prompt, better, worse = Preferences(str(file)).draw(5)
    assert prompt == "x" and better[1, 0, 0] > 0.5 and worse[0, 0, 0] == 1
    (tmp_path / "c.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"pairs.jsonl:1: .*c.png is not a picture"):
        Preferences(str(file)).draw(5)
    file.write_text(json.dumps({**row, "scores": {"preference": [1, 1, 1]}}) + "\n")
    with pytest.raises(UserError, match="no prompt has two pictures of which one is preferred"):
        Preferences(str(file))
    file.write_text(json.dumps({**row, "scores": {"beauty": [1, 2, 3]}}) + "\n")
    with pytest.raises(UserError, match='no scores "preference"'):
        Preferences(str(file))


@pytest.mark.parametrize(
    ("plugin", "arguments", "text"),
    [
        ("adversarial_preference", {"layers": 0}, 'layers is 0, not from 1 to the . of "preference"'),
        ("adversarial_preference", {"layers": 99}, "layers is 99, not from 1 to"),
        ("adversarial_preference", {"reward": "clip", "precision": "fp16"}, "layers learn in fp32 only"),
        ("adversarial_preference", {"reward": "aesthetic"}, '"aesthetic" does not embed'),
        ("adversarial_preference", {"steps": 0}, "steps is 0, not at least 1"),
        ("adversarial_preference", {"references": "nowhere"}, '"nowhere" is not one of'),
        ("reform", {"preferences": "nowhere"}, "nowhere"),
        ("reform", {"reward": "preference", "colour": 1}, "colour"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(plugin: str, arguments: dict, text: str) -> None:
    with pytest.raises(UserError, match=text) as refused:
        load_reward(plugin, **arguments)
    assert "\n" not in str(refused.value)
