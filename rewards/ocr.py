"""Text accuracy: what RapidOCR reads in the image, against the text that the prompt quotes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffrl.errors import UserError
from diffrl.rewards.protocol import Card

# Images up to this height show little but the text: they are read as one line, without looking for boxes.
_SMALL = 128
_LINE_HEIGHT = 48  # of the recogniser's input
_LINE_WIDTH = 320  # and its usual width; shorter lines are padded
_DOUBLE = re.compile(r'["“]([^"“”]*)["”]')
_SINGLE = re.compile(r"(?<!\w)['‘]([^'‘’]*)['’](?!\w)")


def quoted(prompt: str) -> str | None:
    """The text in the prompt's double quotes (or, if there is none, in single quotes), several joined by a space."""
    for marks in (_DOUBLE, _SINGLE):
        if found := [text.strip() for text in marks.findall(prompt) if text.strip()]:
            return " ".join(found)
    return None


def normalise(text: str) -> str:
    """Lower case without any space, as Flow-GRPO's protocol compares texts."""
    return "".join(text.lower().split())


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def _pictures(images: Tensor, height: int) -> list[np.ndarray]:
    """(B, 3, H, W) in [0, 1] to B arrays (h, w, 3) of bytes, BGR, at least `height` high."""
    if images.shape[-2] < height:
        width = round(images.shape[-1] * height / images.shape[-2])
        images = F.interpolate(images.float(), (height, width), mode="bicubic", align_corners=False, antialias=True)
    pixels = (images.float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return list(np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy()[..., ::-1]))


@lru_cache(maxsize=8)
def _engine(width: int, batch_size: int, threads: int) -> Any:
    """A RapidOCR engine on the wheel's own weights, shared; `width`: least width of a line of height 48."""
    import rapidocr

    folder = Path(rapidocr.__file__).parent / "models"
    paths = {part: sorted(folder.glob(f"*_{part}_*.onnx")) for part in ("det", "rec")}
    for part, found in paths.items():
        if not found:
            raise UserError(f"ocr: RapidOCR's wheel has no *_{part}_*.onnx in {folder}; install rapidocr again")
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.use_cls": False,
            # Named files are used as they are; otherwise RapidOCR would look for its default models on the net.
            "Det.model_path": str(paths["det"][0]),
            "Rec.model_path": str(paths["rec"][0]),
            "Rec.rec_batch_num": batch_size,
            "Rec.rec_img_shape": [3, _LINE_HEIGHT, width],
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


class Ocr:
    """max(1 - edit distance / length of the target, 0), in [0, 1] (Flow-GRPO, Liu et al. 2025, arXiv:2505.05470).

    The target is the prompt's quoted text; several are joined. Case and spaces do not count. Prompts without quoted
    text are not judged.

    `detect`: look for boxes of text first (None: for images higher than 128 pixels). `resize`: smaller images are
    enlarged to this height in pixels (None: 48 without detection, 256 with). `contained`: True counts a target inside
    other text as fully right, as Flow-GRPO does. `threads`: CPU threads (None: torch's, at most 4).
    `batch_size`: images per forward.
    """

    name = "ocr"
    card = Card(
        measures="letters of the quoted text that are read right: max(1 - edit distance / length, 0); case and spaces "
        "do not count, several quoted texts are joined by a space",
        range=(0.0, 1.0),
        citation="Flow-GRPO (Liu et al. 2025, arXiv:2505.05470); RapidOCR with PP-OCR models (PaddleOCR)",
        weights="PP-OCR small, in RapidOCR's wheel (31 MB); nothing is downloaded",
        licence="Apache-2.0",
        cost="2 CPU cores: 350 images of 64 x 64 a second without detection; 2 of 256 x 256 a second with",
        exploits="large plain letters over everything; the rest of the prompt and the picture's quality are ignored",
    )

    def __init__(
        self,
        detect: bool | None = None,
        resize: int | None = None,
        contained: bool = False,
        threads: int | None = None,
        batch_size: int = 32,
    ) -> None:
        self.detect, self.resize, self.contained, self.batch_size = detect, resize, contained, batch_size
        self.threads = threads or min(torch.get_num_threads(), 4)
        _engine(_LINE_WIDTH, batch_size, self.threads)  # fails here, not in the first epoch, if there are no weights

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts that quote a text."""
        return quoted(prompt) is not None

    def read(self, images: Tensor) -> list[str]:
        """The text in each image (B, 3, H, W) in [0, 1]; an empty string where there is none."""
        detect = images.shape[-2] > _SMALL if self.detect is None else self.detect
        pictures = _pictures(images, self.resize or (256 if detect else _LINE_HEIGHT))
        if detect:
            engine = _engine(_LINE_WIDTH, self.batch_size, self.threads)
            return [" ".join(engine(picture).txts or ()) for picture in pictures]
        # A line as wide as the images and a letter more, instead of 320 pixels of mostly padding: 5 times faster.
        width = math.ceil(_LINE_HEIGHT * images.shape[-1] / images.shape[-2]) + 16
        return list(_engine(width, self.batch_size, self.threads).recognize_txt(pictures).txts)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) in [0, 1] of images (B, 3, H, W) in [0, 1]."""
        return torch.tensor([self._score(*pair) for pair in zip(self.read(images), prompts, strict=True)])

    def _score(self, text: str, prompt: str) -> float:
        text, target = normalise(text), normalise(quoted(prompt) or "")
        if self.contained and target in text:
            return 1.0
        return max(1.0 - edit_distance(text, target) / len(target), 0.0)
