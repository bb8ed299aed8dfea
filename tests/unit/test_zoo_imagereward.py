"""ImageReward: a tiny checkpoint with the original's names and files, against its forward on plain tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.reward_tools.examples import example_images
from diffrl.rewards import load_reward

pytestmark = pytest.mark.usefixtures("one_call")

VISION, TEXT, LAYERS, PATCH, SIDE = 128, 48, 2, 16, 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "a", "red", "blue", "circle", "square", "two", "on", "white", "photo", "of", "dog", "the"]
CONFIG = {
    "architectures": ["BertModel"],
    "hidden_size": TEXT,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-12,
    "vocab_size": len(WORDS) + 2,
    "encoder_width": VISION,
    "add_cross_attention": True,
}
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)


def checkpoint() -> dict[str, torch.Tensor]:
    """Random tensors with the names and (scaled down) shapes of ImageReward.pt."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, into: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(out, into, generator=generator) * into**-0.5
        tensors[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
        tensors[f"{name}.bias"] = 0.1 * torch.randn(width, generator=generator)

    seen = "blip.visual_encoder"
    tensors[f"{seen}.cls_token"] = torch.randn(1, 1, VISION, generator=generator)
    tensors[f"{seen}.pos_embed"] = torch.randn(1, 1 + (SIDE // PATCH) ** 2, VISION, generator=generator)
    tensors[f"{seen}.patch_embed.proj.weight"] = 0.05 * torch.randn(VISION, 3, PATCH, PATCH, generator=generator)
    tensors[f"{seen}.patch_embed.proj.bias"] = 0.1 * torch.randn(VISION, generator=generator)
    for i in range(LAYERS):
        block = f"{seen}.blocks.{i}"
        norm(f"{block}.norm1", VISION), norm(f"{block}.norm2", VISION)
        linear(f"{block}.attn.qkv", 3 * VISION, VISION), linear(f"{block}.attn.proj", VISION, VISION)
        linear(f"{block}.mlp.fc1", 4 * VISION, VISION), linear(f"{block}.mlp.fc2", VISION, 4 * VISION)
    norm(f"{seen}.norm", VISION)
    read = "blip.text_encoder"
    tensors[f"{read}.embeddings.position_ids"] = torch.arange(64)[None]
    tensors[f"{read}.embeddings.word_embeddings.weight"] = torch.randn(len(WORDS) + 2, TEXT, generator=generator)
    tensors[f"{read}.embeddings.position_embeddings.weight"] = torch.randn(64, TEXT, generator=generator)
    norm(f"{read}.embeddings.LayerNorm", TEXT)
    for i in range(LAYERS):
        layer = f"{read}.encoder.layer.{i}"
        for kind, width in (("attention", TEXT), ("crossattention", VISION)):
            linear(f"{layer}.{kind}.self.query", TEXT, TEXT)
            linear(f"{layer}.{kind}.self.key", TEXT, width), linear(f"{layer}.{kind}.self.value", TEXT, width)
            linear(f"{layer}.{kind}.output.dense", TEXT, TEXT), norm(f"{layer}.{kind}.output.LayerNorm", TEXT)
        linear(f"{layer}.intermediate.dense", 96, TEXT), linear(f"{layer}.output.dense", TEXT, 96)
        norm(f"{layer}.output.LayerNorm", TEXT)
    linear("blip.vision_proj", 16, VISION), linear("blip.text_proj", 16, TEXT)
    for place, (into, out) in zip((0, 2, 4, 6, 7), ((TEXT, 32), (32, 24), (24, 16), (16, 8), (8, 1)), strict=True):
        linear(f"mlp.layers.{place}", out, into)
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imagereward")
    torch.save(checkpoint(), path / "ImageReward.pt")
    (path / "med_config.json").write_text(json.dumps(CONFIG))
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return path


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :].bool(), -1e4)
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def original(t: dict[str, torch.Tensor], pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ImageReward's forward on its own state dict: a pre-norm ViT, a post-norm BERT that looks at it, a chain."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    v = "blip.visual_encoder"
    x = F.conv2d(pixels, t[f"{v}.patch_embed.proj.weight"], t[f"{v}.patch_embed.proj.bias"], stride=PATCH)
    x = torch.cat([t[f"{v}.cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + t[f"{v}.pos_embed"]
    for i in range(LAYERS):
        b = f"{v}.blocks.{i}"
        q, k, value = linear(f"{b}.attn.qkv", norm(f"{b}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(f"{b}.attn.proj", attend(q, k, value, VISION // 64, None))
        x = x + linear(f"{b}.mlp.fc2", F.gelu(linear(f"{b}.mlp.fc1", norm(f"{b}.norm2", x, 1e-6))))
    image = norm(f"{v}.norm", x, 1e-6)
    e = "blip.text_encoder.embeddings"
    h = t[f"{e}.word_embeddings.weight"][ids] + t[f"{e}.position_embeddings.weight"][: ids.shape[1]]
    h = norm(f"{e}.LayerNorm", h, 1e-12)
    for i in range(LAYERS):
        b = f"blip.text_encoder.encoder.layer.{i}"
        for kind, source, keep in (("attention", None, mask), ("crossattention", image, None)):
            a, other = f"{b}.{kind}", h if source is None else source
            mixed = attend(
                *(
                    linear(f"{a}.self.{n}", y)
                    for n, y in zip(("query", "key", "value"), (h, other, other), strict=True)
                ),
                4,
                keep,
            )
            h = norm(f"{a}.output.LayerNorm", linear(f"{a}.output.dense", mixed) + h, 1e-12)
        wide = F.gelu(linear(f"{b}.intermediate.dense", h))
        h = norm(f"{b}.output.LayerNorm", linear(f"{b}.output.dense", wide) + h, 1e-12)
    y = h[:, 0]
    for place in (0, 2, 4, 6, 7):
        y = linear(f"mlp.layers.{place}", y)
    return (y.squeeze(-1) - 0.16717362830052426) / 1.0333394966054072


def test_it_is_the_originals_forward(folder: Path) -> None:
    reward: Any = load_reward("imagereward", model=str(folder), device="cpu")
    images = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    prompts = ["a red circle on white", "two blue square", "a photo of a dog " + "on the white " * 20]
    ids, mask = torch.zeros(3, 35, dtype=torch.long), torch.zeros(3, 35, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        words = [2, *[WORDS.index(word) for word in prompt.split()][:33], 3]  # [CLS] ... [SEP], 35 at most
        ids[row, : len(words)], mask[row, : len(words)] = torch.tensor(words), 1
    with torch.no_grad():
        expected = original(checkpoint(), (images - MEAN) / STD, ids, mask)
        torch.testing.assert_close(reward(images, prompts, [{}] * 3), expected, atol=1e-4, rtol=1e-4)
        half = load_reward("imagereward", model=str(folder), device="cpu", precision="bf16")(images, prompts, [{}] * 3)
        assert half.dtype == torch.float32 and (half - expected).abs().max() < 0.2 * expected.std() + 0.1
    assert expected.std() > 0.05  # the image and the prompt matter


def test_blips_own_tokens_in_a_prompt_are_tokens(folder: Path) -> None:
    """The original adds [DEC] and [ENC] to BERT's tokenizer, so a prompt that spells one has its embedding."""
    reward: Any = load_reward("imagereward", model=str(folder), device="cpu")
    ids = reward.tokenizer(["a [ENC] dog [DEC]"])["input_ids"][0]
    assert ids == [2, 5, len(WORDS) + 1, 15, len(WORDS), 3]


def test_it_conforms(folder: Path) -> None:
    images, prompts = example_images()
    bad = [
        r
        for r in examine(load_reward("imagereward", model=str(folder), device="cpu"), images[::6], prompts[::6])
        if not r.passed
    ]
    assert not bad, bad


def test_mistakes_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    def refused(**params: Any) -> str:
        with pytest.raises(UserError) as caught:
            load_reward("imagereward", device="cpu", **params)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no ImageReward.pt in" in refused(model=str(tmp_path))
    assert 'unknown precision "int8"' in refused(model=str(folder), precision="int8")
    assert 'cannot load the tokenizer "/nowhere"' in refused(model=str(folder), tokenizer="/nowhere")
    for name in ("med_config.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    torch.save({"visual.proj": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    assert "it is not ImageReward's checkpoint" in refused(model=str(tmp_path))
    broken = checkpoint()
    del broken["blip.visual_encoder.norm.bias"]
    torch.save(broken, tmp_path / "ImageReward.pt")
    assert "does not fit its class (1 tensors, the first: post_layernorm.bias)" in refused(model=str(tmp_path))
