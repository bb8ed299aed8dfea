"""BLIP-VQA on a tiny random model of the true class, against one question after another by its own parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.errors import UserError
from diffrl.rewards import RewardError, load_reward

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "yes",
    "no",
    "a",
    "the",
    "red",
    "blue",
    "cup",
    "dog",
    "?",
    "(",
    "of",
]


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertTokenizer, BlipConfig, BlipForQuestionAnswering

    folder = tmp_path_factory.mktemp("blip")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**width, "vocab_size": len(WORDS) + 2, "encoder_hidden_size": 16, "bos_token_id": len(WORDS)}
    text |= {"pad_token_id": 0, "sep_token_id": 3, "eos_token_id": 3, "initializer_range": 0.3}
    vision = {**width, "image_size": 32, "patch_size": 8, "initializer_range": 0.3}
    torch.manual_seed(0)
    BlipForQuestionAnswering(BlipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    return str(folder)


def build(blip: str, **more: Any) -> Any:
    return load_reward("blip_vqa", model=blip, device="cpu", **more)


def by_hand(blip: str, image: torch.Tensor, phrases: list[str]) -> float:
    """Pillow's resizing, [ENC] in front of each question, [DEC] alone as the answer's beginning."""
    from transformers import BlipForQuestionAnswering

    model = BlipForQuestionAnswering.from_pretrained(blip).eval()
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    pixels = torch.tensor(np.asarray(picture.resize((32, 32), Image.Resampling.BICUBIC))).permute(2, 0, 1) / 255
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    score = 1.0
    for phrase in phrases:
        ids = torch.tensor([[len(WORDS) + 1, *(WORDS.index(w) for w in f"{phrase} ?".split()), 3]])
        with torch.no_grad():
            seen = model.vision_model(pixel_values=pixels[None])[0]
            hidden = model.text_encoder(input_ids=ids, encoder_hidden_states=seen)[0]
            p = model.text_decoder(torch.tensor([[len(WORDS)]]), encoder_hidden_states=hidden).logits[0, 0].softmax(-1)
        score *= float(p[5] / (p[5] + p[6]))
    return score


def test_the_product_of_yes_to_every_phrase(blip: str) -> None:
    images = torch.randint(0, 256, (3, 3, 40, 56), generator=torch.Generator().manual_seed(0)) / 255
    phrases = [["a red cup", "the dog"], ["blue cup"], ["A (red) cup!", "the cup", "a dog"]]
    plain = [["a red cup", "the dog"], ["blue cup"], ["a red cup", "the cup", "a dog"]]  # small letters, no marks
    scores = build(blip)(images, ["p"] * 3, [{"phrases": some} for some in phrases])
    expected = [by_hand(blip, image, some) for image, some in zip(images, plain, strict=True)]
    assert scores.tolist() == pytest.approx(expected, abs=0.02)  # pixels are not rounded after resizing here
    assert scores.std() > 0.02
    small = images[..., :32, :32]  # no resizing: the same to float32
    values = build(blip)(small, ["p"] * 3, [{"phrases": some} for some in phrases]).tolist()
    assert values == pytest.approx([by_hand(blip, i, some) for i, some in zip(small, plain, strict=True)], abs=1e-5)


def test_phrases_are_found_once_and_places_left_out(blip: str) -> None:
    reward, asked = build(blip), []

    def parser(text: str) -> list[str]:
        asked.append(text)
        return ["the left", *text.split(" on "), *["more"] * 9]

    reward.parser = parser
    assert (
        reward.phrases("a cup on a dog", {})
        == ["a cup", "a dog", *["more"] * 6]
        == reward.phrases("a cup on a dog", {})
    )
    assert asked == ["a cup on a dog"]
    reward.parser = lambda text: []
    assert reward(torch.zeros(1, 3, 32, 32), ["x"], [{}]).tolist() == [1.0]
    reward.parser = None
    with pytest.raises(RewardError, match=r"found by spaCy and en_core_web_sm: install it .* or give `phrases`"):
        reward(torch.zeros(1, 3, 32, 32), ["y"], [{}])


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="blip_vqa: cannot load"):
        build(str(tmp_path))
