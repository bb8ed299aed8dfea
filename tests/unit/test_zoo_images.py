"""The zoo's rewards of the image alone: aesthetic v2.5, JPEG size, diversity, the trained artefact detector."""

from __future__ import annotations

import io
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.reward_tools.examples import example_images
from diffrl.rewards import RewardError, load_reward
from diffrl.rewards.scoring import Scorer

pytestmark = pytest.mark.usefixtures("one_call")

IMAGES = torch.rand(4, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def conforms(reward: Any, every: int = 8) -> None:
    images, prompts = example_images()
    bad = [result for result in examine(reward, images[::every], prompts[::every]) if not result.passed]
    assert not bad, bad


def smooth(height: int, width: int) -> tuple[torch.Tensor, list[Image.Image]]:
    raw = torch.randint(256, (2, 3, height, width), generator=torch.Generator().manual_seed(1))
    images = torch.nn.functional.avg_pool2d(raw.float(), 5, 1, 2).round()
    return images / 255, [Image.fromarray(x.byte().permute(1, 2, 0).numpy()) for x in images]


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny SigLIP of image and text, as the hub has it, and its image processor."""
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = SiglipConfig(vision_config={**tower, "image_size": 32, "patch_size": 8}, text_config=tower)
    folder = tmp_path_factory.mktemp("siglip")
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    folder = tmp_path_factory.mktemp("dino")
    Dinov2Model(config).save_pretrained(folder)
    size, crop = {"shortest_edge": 36}, {"height": 28, "width": 28}
    BitImageProcessor(size=size, crop_size=crop, do_center_crop=True, resample=3).save_pretrained(folder)
    return str(folder)


# aesthetic v2.5


class PredictorHead(nn.Module):
    """The published head of v2.5: dropout between the layers, no activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [(width, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)]
        parts: list[nn.Module] = []
        for i, pair in enumerate(widths):
            parts += [nn.Linear(*pair), nn.Dropout(0.5 if i < 3 else 0.2)]
        self.scoring_head = nn.Sequential(*parts[:-1])


def test_aesthetic_v2_5_is_its_head_on_siglips_pooled_output(siglip: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, SiglipModel

    torch.manual_seed(1)
    head, file = PredictorHead(24).eval(), tmp_path / "aesthetic_predictor_v2_5.pth"
    torch.save(head.state_dict(), file)
    reward: Any = load_reward("aesthetic", head=str(file), clip=siglip, device="cpu")
    vision, processor = (
        SiglipModel.from_pretrained(siglip).eval().vision_model,
        AutoImageProcessor.from_pretrained(siglip),
    )
    for shape in ((64, 64), (48, 70), (20, 31)):
        tensors, pictures = smooth(*shape)
        with torch.no_grad():
            pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
            assert (reward.clip.preprocess(tensors) - pixels).abs().max() < 1.5 / 255 / 0.5
            pooled = vision(pixel_values=reward.clip.preprocess(tensors)).pooler_output
            expected = head.scoring_head(pooled / pooled.norm(dim=-1, keepdim=True)).squeeze(-1)
            torch.testing.assert_close(reward(tensors, ["", ""], [{}] * 2), expected, atol=1e-5, rtol=1e-4)
    conforms(reward)
    with pytest.raises(UserError, match="leave out `pretrained`"):
        load_reward("aesthetic", head=str(file), clip=siglip, pretrained="openai", device="cpu")
    torch.save(PredictorHead(16).state_dict(), file)
    with pytest.raises(UserError, match=r"takes embeddings of width 16, the model .* gives 24"):
        load_reward("aesthetic", head=str(file), clip=siglip, device="cpu")


@pytest.mark.parametrize("head", ["v2", "v2.5"])
def test_published_heads_without_a_net_say_what_to_do(
    head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from urllib.error import URLError

    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("no net")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"cannot download .*; name its file as `head`"):
        load_reward("aesthetic", head=head)


# JPEG size


def test_jpeg_is_the_files_size() -> None:
    flat = torch.full((1, 3, 48, 48), 0.5)
    images = torch.cat([IMAGES, flat])
    small, large = (load_reward("jpeg", mode=m) for m in ("compressibility", "incompressibility"))
    scores = large(images, [""] * 5, [{}] * 5)
    for image, score in zip(images, scores.tolist(), strict=True):
        file = io.BytesIO()
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
        assert score == pytest.approx(len(file.getvalue()) / 1000)
    assert scores.argmin() == 4 and torch.equal(small(images, [""] * 5, [{}] * 5), -scores)
    lower = load_reward("jpeg", quality=10)(images, [""] * 5, [{}] * 5)
    assert (lower[:4] > -scores[:4]).all()
    conforms(small), conforms(large)
    with pytest.raises(UserError, match=r'unknown mode "compressible" \(nearest: "compressibility"\)'):
        load_reward("jpeg", mode="compressible")
    with pytest.raises(UserError, match="quality is 100, not from 1 to 95"):
        load_reward("jpeg", quality=100)


# diversity


def test_vendi_score_counts_distinct_images() -> None:
    from diffrl_zoo.diversity import nearest_distances, vendi_contributions, vendi_score

    eye = torch.eye(5)
    assert vendi_score(eye).item() == pytest.approx(5.0) and vendi_score(eye[:1].repeat(4, 1)).item() == pytest.approx(
        1.0
    )
    twice = torch.cat([eye[:2], eye[:2]])
    assert vendi_score(twice).item() == pytest.approx(2.0)
    x = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=-1).double()
    p = torch.linalg.svdvals(x) ** 2 / 6  # the eigenvalues of the kernel, another way
    assert vendi_score(x).item() == pytest.approx(math.exp(-(p * p.log()).sum().item()))
    by_hand = [vendi_score(x) - vendi_score(torch.cat([x[:i], x[i + 1 :]])) for i in range(6)]
    torch.testing.assert_close(vendi_contributions(x), torch.stack(by_hand))
    group = torch.stack([eye[0], eye[0], eye[1], eye[2]])
    added = vendi_contributions(group)
    assert added[0] == added[1] < 0 < added[2]  # a repetition takes from the group
    assert nearest_distances(group).tolist() == [0.0, 0.0, 1.0, 1.0]
    far = nearest_distances(x.float())
    for i in range(6):
        assert far[i].item() == pytest.approx(min(1 - float(x[i] @ x[j]) for j in range(6) if j != i), abs=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "vendi"])
def test_diversity_conforms_and_sees_repetitions(mode: str, dino: str) -> None:
    images, prompts = example_images()
    for reward in (load_reward("diversity", mode=mode, device="cpu"),
                   load_reward("diversity", mode=mode, device="cpu", features="transformers", model=dino)):  # fmt: skip
        conforms(reward, every=16)
        group = torch.cat([images[:3], images[:1]])
        scores = reward(group, prompts[:1] * 4, [{}] * 4)
        assert scores[0].item() == pytest.approx(scores[3].item(), abs=1e-5) and scores[0] < scores[1:3].min()
    with pytest.raises(UserError, match="leave out `pretrained`"):
        load_reward("diversity", features="transformers", model=dino, pretrained="openai")
    with pytest.raises(UserError, match='diversity: cannot load "/nowhere"'):
        load_reward("diversity", features="transformers", model="/nowhere")
    with pytest.raises(RewardError, match="a group of one image has no diversity"):
        reward(images[:1], prompts[:1], [{}])


def test_diversity_is_scored_group_by_group() -> None:
    from diffrl.prompts import Prompt

    images, _ = example_images()
    reward = load_reward("diversity", device="cpu")
    prompts, groups = [Prompt("a"), Prompt("b")] * 3, torch.tensor([0, 1] * 3)
    scores = Scorer({"diversity": reward}).score(images[:6], prompts, groups)[:, 0]
    torch.testing.assert_close(scores[::2], reward(images[:6:2], ["a"] * 3, [{}] * 3))


def test_encoders_of_transformers_read_images_as_their_processor_does(dino: str) -> None:
    from transformers import AutoImageProcessor, AutoModel

    from diffrl_zoo.vision import shared_vision

    encoder, processor = shared_vision(dino, "cpu", "fp32", "test"), AutoImageProcessor.from_pretrained(dino)
    model = AutoModel.from_pretrained(dino).eval()
    for shape in ((64, 64), (48, 70), (90, 40)):
        tensors, pictures = smooth(*shape)
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        assert (encoder.preprocess(tensors) - pixels).abs().max() < 1.5 / 255 / 0.22
        with torch.no_grad():
            pooled = model(encoder.preprocess(tensors)).pooler_output
        expected = torch.nn.functional.normalize(pooled, dim=-1)
        torch.testing.assert_close(encoder.embed_image(tensors), expected, atol=1e-5, rtol=1e-4)
    assert shared_vision(dino, "cpu", "fp32", "test") is encoder


# the artefact detector


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the world's images, clean and with a grid of flipped pixels in one quarter."""
    folder = tmp_path_factory.mktemp("examples")
    images, _ = example_images()
    for i, image in enumerate(images[:40]):
        save(image, folder / "clean" / f"{i}.png")
        save(flaw(image, i), folder / "flawed" / f"{i}.png")
    return folder


def save(image: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(path)


def flaw(image: torch.Tensor, seed: int) -> torch.Tensor:
    top, left = 32 * (seed % 2), 32 * (seed // 2 % 2)
    broken = image.clone()
    broken[:, top : top + 32 : 3, left : left + 32 : 2] = 1 - broken[:, top : top + 32 : 3, left : left + 32 : 2]
    return broken


@pytest.mark.long
def test_a_detector_is_trained_by_one_command_and_tells_new_images(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "detector"
    command = ["flawless", "train", str(examples / "clean"), str(examples / "flawed"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu"])
    with pytest.raises(SystemExit) as done:  # as `python -m diffrl_zoo.flawless` does
        runpy.run_module("diffrl_zoo.flawless", run_name="__main__")
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "40 clean and 40 flawed images; on the held-out 25%: accuracy" in said
    figures = json.loads((out / "flawless.json").read_text())
    assert figures["auc"] > 0.8 and figures["clean"] == 40 and f"AUC {figures['auc']:.3f}" in said
    reward: Any = load_reward("flawless", model=str(out), device="cpu")
    images, prompts = example_images()
    new = images[40:80]
    clean, flawed = (
        reward(x, prompts[40:80], [{}] * 40) for x in (new, torch.stack([flaw(x, i) for i, x in enumerate(new)]))
    )
    assert (clean > flawed).float().mean() > 0.85
    conforms(reward, every=16)
    logits = load_reward("flawless", model=str(out), device="cpu", logit=True)(new, prompts[40:80], [{}] * 40)
    torch.testing.assert_close(logits.sigmoid(), clean)


def test_the_regression_is_at_its_optimum() -> None:
    """The gradient of the balanced, regularised loss vanishes, in the features' own units."""
    from diffrl_zoo.flawless import auc, fit

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64) * torch.tensor([1, 10, 0.1, 1, 3]) + 4
    y = (x[:, 0] + x[:, 3] + torch.randn(60, generator=generator) > 8.5).float()
    weight, bias = fit(x, y, 0.05)
    std = x.std(dim=0)
    scaled = (weight * std).requires_grad_()
    logits = (x - x.mean(0)) / std @ scaled + (bias + x.mean(0) @ weight)
    losses = -(y * logits.sigmoid().log() + (1 - y) * (1 - logits.sigmoid()).log())
    loss = (losses[y > 0.5].mean() + losses[y < 0.5].mean()) / 2 + 0.025 * scaled.square().sum()
    assert torch.autograd.grad(loss, scaled)[0].abs().max() < 1e-5
    assert auc(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])) == pytest.approx(3.5 / 4)


def test_the_detectors_mistakes_are_one_clear_line(examples: Path, tmp_path: Path, capsys: Any) -> None:
    from diffrl_zoo.flawless import main

    def refused(*arguments: str) -> str:
        assert main(["train", *arguments, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        return capsys.readouterr().err

    clean, flawed = str(examples / "clean"), str(examples / "flawed")
    assert "no folder /nowhere" in refused("/nowhere", flawed)
    (tmp_path / "few").mkdir()
    save(IMAGES[0], tmp_path / "few" / "a.png")
    assert "1 images in" in refused(str(tmp_path / "few"), flawed)
    assert 'unknown features "clop" (nearest: "clip")' in refused(clean, flawed, "--features", "clop")
    assert "holdout is 0.9" in refused(clean, flawed, "--holdout", "0.9")
    for i in range(10):
        (tmp_path / "few" / f"{i}.png").write_bytes(b"no image")
    assert "cannot read the image" in refused(str(tmp_path / "few"), flawed)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"no flawless\.json in"):
        load_reward("flawless", model=str(tmp_path))
