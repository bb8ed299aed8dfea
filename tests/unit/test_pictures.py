"""Pictures of others: 16 bits, EXIF, transparency, and sizes that memory has no room for."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.divgen import observe
from diffrl.divgen.folders import read_folder
from diffrl.divgen.observe import Item, Sight, in_batches
from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.serving.wire import JSON, Limits, decode
from diffrl.tools import pictures


def seen(image: Image.Image, path: Path, **options: object) -> np.ndarray:
    image.save(path, **options)  # type: ignore[arg-type]
    with Image.open(path) as opened:
        return pictures.to_rgb(opened)


def test_sixteen_bits_are_not_white(tmp_path: Path) -> None:
    values = np.array([[0, 257 * 10, 257 * 128, 65535]], dtype=np.uint16)
    found = seen(Image.fromarray(values), tmp_path / "a.png")
    assert found.tolist() == [[[v] * 3 for v in (0, 10, 128, 255)]]
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    words = {"images": [base64.b64encode(buffer.getvalue()).decode()], "prompts": ["a"]}
    images = decode(json.dumps(words).encode(), JSON, Limits()).images
    assert torch.equal((images[0, :, 0] * 255).round(), torch.tensor([[0.0, 10, 128, 255]] * 3))


def test_numbers_from_0_to_1_are_not_black(tmp_path: Path) -> None:
    for scale in (1, 255):  # as scientific libraries write floating-point TIFFs, of either range
        values = np.array([[0, 0.2, 1]], dtype=np.float32) * scale
        assert seen(Image.fromarray(values), tmp_path / "a.tif").tolist() == [[[v] * 3 for v in (0, 51, 255)]]


def test_a_turned_photograph_stands_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (3, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert seen(image, tmp_path / "a.png", exif=exif).shape == (3, 2, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    assert seen(image.convert(mode), tmp_path / "a.png").tolist() == [[[255] * 3, [0] * 3]]


def test_ordinary_pictures_are_what_they_were(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(seen(Image.fromarray(pixels), tmp_path / "a.png"), pixels)
    assert seen(Image.fromarray(pixels[:, :, 0]), tmp_path / "b.png").shape == (5, 7, 3)


def test_a_huge_picture_is_named_and_large_ones_come_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pictures, observe):
        monkeypatch.setattr(module, "MOST_PIXELS", 100)
    items = []
    for name, side in (("a", 9), ("b", 9), ("c", 11), ("d", 5), ("e", 5)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{name}.png")
        items.append(Item(Prompt(name), 0, tmp_path / f"{name}.png"))
    sight = Sight()
    assert [len(batch) for batch, _ in in_batches(items, 32, sight)] == [1, 1, 2]
    assert [(item.prompt.text, why) for item, why in sight.unreadable] == [
        ("c", "ValueError: 11 x 11 pixels; a picture may have 100")
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"file": "a.png", "prompt": 3}',
        '{"file": "a.png", "prompt": "\\ud800"}',
        '{"file": "a.png", "prompt": "a", "member": 1e999}',
        '{"file": "a.png", "prompt": "a", "member": []}',
        '{"file": "a.png", "prompt": "a", "keyword": []}',
        '{"file": "a.png", "prompt": "a", "dimension": []}',
        "[" * 50000,
        "[]",
    ],
)
def test_odd_lines_of_a_manifest_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "manifest.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"manifest.jsonl:1: "):
        read_folder(tmp_path)


def test_a_grid_shows_every_picture_with_its_prompt_and_a_frame() -> None:
    from diffrl.tools.pictures import grid

    pictures = [Image.new("RGB", (64, 64), colour) for colour in ("white", "red", "blue")]
    sheet = grid(pictures, ["a white square", "a red square", "b " * 100])
    assert sheet.size == (2 * 200 + 8, 2 * 234 + 8)
    assert sheet.getpixel((208 + 90, 8 + 90)) == (255, 0, 0), "enlarged to its cell"
    assert sheet.getpixel((7, 90)) == (200, 200, 200), "a white picture on white has a frame"
    caption = sheet.crop((8, 202, 200, 240))
    assert min(caption.convert("L").tobytes()) < 128
    assert grid(pictures, ["", "", ""], columns=3).size == (3 * 200 + 8, 234 + 8)
