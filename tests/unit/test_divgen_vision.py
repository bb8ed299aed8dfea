"""The published extractors with tiny models of the true architectures, and what is said when weights are missing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from divgen_parts import load_extractors
from torch.nn import functional as F

from diffrl.divgen.extractors import DEFAULTS, load_extractor
from diffrl.divgen.observe import Item, observe
from diffrl.divgen.score import score
from diffrl.divgen.vision import CLIP_MEAN, CLIP_STD, CSD, GroundingDino, fit_square, wanted
from diffrl.errors import UserError
from diffrl.prompts import Prompt

PROMPTS = [
    Prompt("a studio shot of two cats", {"dimension": "layout", "keyword": "cat", "objects": {"cat": 2, "red dog": 1}}),
    Prompt("something", {"dimension": "layout"}),
]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 48, 40, generator=torch.Generator().manual_seed(0))


def csd_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """A tiny CLIP vision tower as OpenAI's code names its tensors, wrapped as the published checkpoint is."""
    from open_clip.transformer import QuickGELU, VisionTransformer

    torch.manual_seed(0)
    tower: Any = VisionTransformer(32, 8, 64, 2, 1, 4.0, output_dim=16, act_layer=QuickGELU)
    tower.proj = None
    heads = {f"last_layer_{name}": torch.randn(64, 16) for name in ("style", "content")}
    state = {f"module.backbone.{key}": value for key, value in tower.state_dict().items()}
    state |= {f"module.{key}": value for key, value in heads.items()}
    torch.save({"model_state_dict": state, "args": argparse.Namespace(lr=0.1)}, path)
    return heads, tower.eval()


def test_csd_is_its_checkpoint(tmp_path: Path, images: torch.Tensor) -> None:
    heads, tower = csd_checkpoint(tmp_path / "csd.pth")
    extractor = load_extractor("style", f"csd:{tmp_path / 'csd.pth'}")
    found = extractor(images, PROMPTS)
    x = fit_square(images, 32)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
    with torch.no_grad():
        expected = F.normalize(tower((x - mean) / std) @ heads["last_layer_style"], dim=1)
    np.testing.assert_allclose(np.stack(found), expected.numpy(), atol=1e-6)  # type: ignore[arg-type]
    assert abs(float(np.dot(found[0], found[1]))) < 0.9999  # type: ignore[arg-type]


def test_csd_refuses_other_files(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="not a CSD checkpoint"):
        CSD(str(tmp_path / "other.pth"))
    (tmp_path / "text.pth").write_text("no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        CSD(str(tmp_path / "text.pth"))
    csd_checkpoint(tmp_path / "csd.pth")
    state = torch.load(tmp_path / "csd.pth", weights_only=False)["model_state_dict"]
    state.pop("module.backbone.ln_post.weight")
    torch.save(state, tmp_path / "half.pth")
    with pytest.raises(UserError, match=r"not a CSD checkpoint.*ln_post"):
        CSD(str(tmp_path / "half.pth"))


def test_csd_runs_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"model_state_dict": {}, "args": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="cannot be read"):
        CSD(str(tmp_path / "evil.pth"))
    assert not (tmp_path / "touched").exists()


def tiny_grounding_dino(folder: Path) -> str:
    from transformers import (
        BertConfig,
        BertTokenizer,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
        GroundingDinoProcessor,
        SwinConfig,
    )

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "cat", "red", "dog", "object"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    swin = SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_indices=[2, 3, 4],
    )  # fmt: skip
    bert = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    config = GroundingDinoConfig(
        backbone_config=swin, text_config=bert, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=8, num_feature_levels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    GroundingDinoForObjectDetection(config).save_pretrained(folder)
    processor = GroundingDinoImageProcessor(size={"shortest_edge": 32, "longest_edge": 48})
    GroundingDinoProcessor(processor, tokenizer).save_pretrained(folder)
    return str(folder)


def test_grounding_dino_gives_boxes_in_the_image(
    tmp_path: Path, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroundingDino, "box_threshold", 0.0)
    monkeypatch.setattr(GroundingDino, "text_threshold", 0.0)
    extractor = load_extractor("layout", f"grounding-dino:{tiny_grounding_dino(tmp_path / 'gd')}")
    together = extractor(images, PROMPTS)
    assert all(boxes is not None and boxes.shape == (8, 4) for boxes in together)
    assert all(boxes.min() >= 0 and boxes.max() <= 1 for boxes in together if boxes is not None)
    monkeypatch.setattr(GroundingDino, "box_threshold", 1.0)
    assert list(extractor(images, PROMPTS)) == [None, None]


def test_what_a_detector_looks_for() -> None:
    assert [wanted(prompt) for prompt in PROMPTS] == [["cat", "red dog"], ["object"]]
    assert wanted(Prompt("a", {"keyword": "clock"})) == ["clock"]


def test_lpips_of_a_prompts_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchmetrics")
    from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

    torch.manual_seed(0)
    name = SqueezeNet1_1_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(squeezenet1_1(weights=None).state_dict(), tmp_path / "hub" / "checkpoints" / name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    extractors, missing = load_extractors({"lpips": "squeeze"})
    assert not missing
    one, other = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    alike, mixed = Prompt("alike"), Prompt("mixed")
    items = [Item(prompt, member) for prompt in (alike, mixed) for member in range(3)]
    batches = [(items[:2], torch.stack([one, one])), (items[2:], torch.stack([one, one, other, one]))]
    result = score(observe(batches, extractors))
    distances = {entry["prompt"]: entry["lpips"] for entry in result.prompts}
    assert distances["alike"] == pytest.approx(0.0, abs=1e-6) and distances["mixed"] > 0
    pair = extractors["lpips"](torch.stack([one, other]), [mixed])
    assert distances["mixed"] == pytest.approx(float(pair[0]) * 2 / 3, rel=1e-4)  # type: ignore[arg-type]
    assert result.values()["lpips"] == pytest.approx(distances["mixed"] / 2, rel=1e-4)


def test_missing_weights_and_packages_are_reasons_and_not_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: torch.Tensor
) -> None:
    monkeypatch.setitem(sys.modules, "insightface", None)
    monkeypatch.setitem(sys.modules, "insightface.app", None)
    monkeypatch.setitem(sys.modules, "torchmetrics.image.lpip", None)
    loaded, missing = load_extractors(DEFAULTS)
    assert not loaded
    assert 'pip install "diffrl[divgen]"' in missing["identity"] and 'pip install "diffrl[divgen]"' in missing["lpips"]
    assert "tomg-group-umd/CSD-ViT-L" in missing["style"] and "grounding-dino-base" in missing["layout"]
    assert "dinov2-base" in missing["features"] and "evaluate." not in missing["features"]
    result = score(observe([([Item(prompt) for prompt in PROMPTS], images)], loaded), None, missing)
    assert result.values() == {} and result.metrics["sdi"].why == missing["layout"]
    for kind, name in (("identity", "arcfase"), ("style", "csd2")):
        with pytest.raises(UserError, match="unknown extractor"):
            load_extractors({kind: name})


def test_arcface_takes_the_largest_face(monkeypatch: pytest.MonkeyPatch, images: torch.Tensor) -> None:
    """insightface's part is played by a stand-in with its interface; what it is called with is checked."""
    from types import ModuleType, SimpleNamespace

    class FaceAnalysis:
        def __init__(self, name: str, **options: Any) -> None:
            assert name == "buffalo_l" and options["allowed_modules"] == ["detection", "recognition"]

        def prepare(self, ctx_id: int, det_size: tuple[int, int]) -> None:
            assert ctx_id == -1

        def get(self, image: np.ndarray) -> list[Any]:
            assert image.dtype == np.uint8 and image.shape == (48, 40, 3)
            if image[0, 0, 0] != round(float(images[1, 2, 0, 0]) * 255):  # blue first
                return []
            boxes = {1.0: [0, 0, 5, 5], 2.0: [3, 3, 20, 30], 3.0: [0, 0, 9, 9]}
            return [SimpleNamespace(bbox=np.array(b), embedding=np.full(512, v)) for v, b in boxes.items()]

    app = ModuleType("insightface.app")
    app.FaceAnalysis = FaceAnalysis  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "insightface", ModuleType("insightface"))
    monkeypatch.setitem(sys.modules, "insightface.app", app)
    first, second = load_extractor("identity", "arcface")(images, PROMPTS)
    assert first is None and second is not None and second.shape == (512,) and second[0] == 2.0
