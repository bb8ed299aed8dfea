"""Text accuracy: what RapidOCR or a vision-language model reads in the image, against the prompt's quoted text."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffrl.errors import UserError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice, to_bytes
from diffrl_zoo.vlm.backend import Judge
from diffrl_zoo.vlm.question import Question

# Images up to this height show little but the text: they are read as one line, without looking for boxes.
_SMALL = 128
ENGINES = ("rapidocr", "vlm")
ASK = "Please output only the text content from the image without any additional descriptions or formatting."  # peers'
TARGETS = ("joined", "each", "first")
_LINE_HEIGHT = 48  # of the recogniser's input
_LINE_WIDTH = 320  # and its usual width; shorter lines are padded
_INCHES = re.compile(r'(?<=\d)"(?![^\W_]|[x×]\s?\d)|(?<=\d)"(?=\s?[x×]\s?\d)')
_DOUBLE = re.compile(
    r"""["“]([^"“”]*)["”]|(?<!\d)”([^"“”]*)”|[❝〝]([^❝❞〝〞〟]*)[❞〞〟]|"""
    r"""„([^„“”"]*)[“”"]|«([^«»]*)»|»([^«»]*)«|「([^「」]*)」|『([^『』]*)』|``([^`']*)''|`([^`]+)`"""
)
_SINGLE = re.compile(r"(?<!\w)['‘‚]((?:[^'‘’]|(?<=\w)['’](?=\w))*)['’‘](?!\w)|‹([^‹›]*)›")
_ALIKE = str.maketrans("’‘ʼ′‛`´–—−‐‑“”„″", "'''''''-----\"\"\"\"")  # signs that a reader of pictures cannot tell apart


def quotes(prompt: str) -> list[str]:
    """The texts in the prompt's double quotes, or, if there is none, in single quotes; empty ones are left out.

    Quotes are written "so", “so”, „so“, «so», »so«, 「so」, 『so』, ``so'' or `so`. A mark after a digit is one of
    inches, unless it closes a quote: `a 6" ruler and a sign "66"`.
    """
    prompt = _without_inches(html.unescape(prompt).replace('\\"', '"').translate(str.maketrans("＂＇", "\"'")))
    for marks in (_DOUBLE, _SINGLE):
        if texts := [
            text for match in marks.finditer(prompt) if (text := next(filter(None, match.groups()), "").strip())
        ]:
            return texts
    return []


def _without_inches(prompt: str) -> str:
    is_open, signs = False, list(prompt)
    for i, sign in enumerate(prompt):
        if sign in '"“”':
            if not is_open and sign == '"' and _INCHES.match(prompt, i):
                signs[i] = "″"
            else:
                is_open = not is_open
    return "".join(signs)


def normalise(text: str, case: bool = False) -> str:
    """Without any space, and in lower case unless `case`: as Flow-GRPO's protocol compares texts. Signs that look alike
    are one: NFKC (full-width letters, accents apart), kinds of quotes and dashes; marks without width are left out."""
    text = unicodedata.normalize("NFKC", (text if case else text.lower()).translate(_ALIKE)).translate(_ALIKE)
    return "".join(sign for sign in text if not sign.isspace() and unicodedata.category(sign) != "Cf")


def is_rtl(text: str) -> bool:
    """Whether it is written from right to left."""
    return any(unicodedata.bidirectional(sign) in ("R", "AL") for sign in text)


def edit_distance(a: str, b: str, anywhere: bool = False) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`.

    `anywhere`: into the part of `b` that is nearest to `a` (Sellers 1980).
    """
    row = [0] * (len(b) + 1) if anywhere else list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return min(row) if anywhere else row[-1]


def _pictures(images: Tensor, height: int) -> list[np.ndarray]:
    """(B, 3, H, W) in [0, 1] to B arrays (h, w, 3) of bytes, BGR, at least `height` high."""
    if images.shape[-2] < height:
        width = round(images.shape[-1] * height / images.shape[-2])
        images = F.interpolate(images.float(), (height, width), mode="bicubic", align_corners=False, antialias=True)
    return list(np.ascontiguousarray(to_bytes(images).permute(0, 2, 3, 1).numpy()[..., ::-1]))


@lru_cache(maxsize=16)
def _engine(width: int, batch_size: int, threads: int) -> Any:
    """A RapidOCR engine on the wheel's own weights, shared; `width`: least width of a line of height 48."""
    import rapidocr

    folder = Path(rapidocr.__file__).parent / "models"
    paths = {part: sorted(folder.glob(f"*_{part}_*.onnx")) for part in ("det", "rec")}
    for part, file in paths.items():
        if not file:
            raise UserError(f"ocr: RapidOCR's wheel has no *_{part}_*.onnx in {folder}; install rapidocr again")
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.use_cls": False,
            # Named files are used as they are; otherwise RapidOCR would look for its default models on the net.
            "Det.model_path": str(paths["det"][0]),
            # Boxes are looked for at the pictures' own size. RapidOCR would enlarge the shorter side to 736 pixels:
            # 4.5 times slower for 256 x 256, and no rendered word is read better (assets/results/ocr_speed.json).
            "Det.limit_type": "min",
            "Det.limit_side_len": 32,
            "Rec.model_path": str(paths["rec"][0]),
            "Rec.rec_batch_num": batch_size,
            "Rec.rec_img_shape": [3, _LINE_HEIGHT, width],
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


@dataclass(eq=False, repr=False, kw_only=True)
class Ocr(Judge):
    """max(1 - edit distance / length of the target, 0), in [0, 1] (Flow-GRPO, Liu et al. 2025, arXiv:2505.05470).

    The targets are the prompt's quoted texts, or its metadata `text` (one, or a list). Spaces do not count, nor does
    the case unless `case`. Prompts without a target are not judged.

    `targets`, where there are several: "joined" compares them in order, as one text, with all that is read; "each" is
    the mean over the targets of the nearest place in what is read, so their order and other text do not count; "first"
    is the first one alone, as Flow-GRPO does. `contained`: True counts a target inside other text as fully right, as
    Flow-GRPO does. Its published protocol is `targets: first, contained: true`.

    `detect`: look for boxes of text first (None: for images higher than 128 pixels). `resize`: smaller images are
    enlarged to this height in pixels (None: 48 without detection, 256 with; more finds smaller letters). `threads`:
    CPU threads (None: torch's, at most 4). `batch_size`: images per forward.

    `engine`: rapidocr, or vlm: a vision-language model transcribes the picture as it is, at temperature 0 (verl-omni's
    recipes: at 0.7). All other parameters are then as in `vlm`.
    """

    name = "ocr"
    card = card_of(name)

    detect: bool | None = None
    resize: int | None = None
    contained: bool = False
    threads: int | None = None
    targets: str = "joined"
    case: bool = False
    engine: str = "rapidocr"
    question: str = ASK
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES, "ocr")
        if self.engine != "vlm" and (self.server or self.model):
            raise UserError("ocr: a `server` or `model` reads with engine: vlm")
        if self.engine == "vlm" and (self.detect is not None or self.resize is not None):
            raise UserError("ocr: `detect` and `resize` belong to engine: rapidocr")
        check_choice("targets", self.targets, TARGETS, "ocr")
        if self.engine == "vlm":
            self.connect()
            return
        self.device, self.cores = None, self.threads or min(torch.get_num_threads(), 4)
        _engine(_LINE_WIDTH, self.batch_size, self.cores)  # fails here, not in the first epoch, without weights

    @staticmethod
    def footprint(engine: str, **settings: Any) -> int | None:
        """Bytes of a vision-language model's weights; rapidocr has none on a device."""
        return Judge.footprint(**settings) if engine == "vlm" else 0

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts that quote a text, or whose metadata has one."""
        return bool(self._wanted(prompt, metadata))

    def read(self, images: Tensor) -> list[str | None]:
        """The text in each image (B, 3, H, W) in [0, 1]; an empty string where there is none, None where the model
        refuses."""
        if self.engine == "vlm":
            questions = [Question([image], self.question, "(its text)") for image in images]
            return self.backend.ask(questions, lambda reply: reply.said.replace("```", ""), first=False)
        detect = images.shape[-2] > _SMALL if self.detect is None else self.detect
        pictures = _pictures(images, self.resize or (256 if detect else _LINE_HEIGHT))
        if detect:
            engine = _engine(_LINE_WIDTH, self.batch_size, self.cores)
            return [" ".join(engine(picture).txts or ()) for picture in pictures]
        # A line as wide as the images and a letter more, instead of 320 pixels of mostly padding: 5 times faster. In
        # steps of 32 pixels, since every width is an engine of its own; longer lines are as wide as they are.
        width = min(32 * math.ceil((_LINE_HEIGHT * images.shape[-1] / images.shape[-2] + 16) / 32), _LINE_WIDTH)
        return list(_engine(width, self.batch_size, self.cores).recognize_txt(pictures).txts)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) in [0, 1] of images (B, 3, H, W) in [0, 1]."""
        wanted = [self._wanted(*pair) for pair in zip(prompts, metadata, strict=True)]
        pairs = zip(self.read(images), wanted, strict=True)
        return torch.tensor([torch.nan if text is None else self._score(text, targets) for text, targets in pairs])

    @staticmethod
    def target(prompt: str, metadata: Mapping[str, Any]) -> list[str]:
        """The texts that the picture should show: the metadata's `text`, one or a list, or what the prompt quotes."""
        given = metadata.get("text")
        if given is None:
            return quotes(prompt)
        return [str(text) for text in given] if isinstance(given, list | tuple) else [str(given)]

    def _wanted(self, prompt: str, metadata: Mapping[str, Any]) -> list[str]:
        """The targets, normalised; none that is empty."""
        texts = self.target(prompt, metadata)
        result = [text for text in (normalise(text, self.case) for text in texts) if text]
        if self.targets == "first":
            return result[:1]
        return result if self.targets == "each" or not result else ["".join(result)]

    def _score(self, text: str, wanted: Sequence[str]) -> float:
        ways = [normalise(text, self.case)]
        if any(map(is_rtl, wanted)):  # a reader may give the signs as they stand, from left to right
            ways.append(ways[0][::-1])
        return max(sum(self._match(way, target) for target in wanted) / len(wanted) for way in ways)

    def _match(self, text: str, target: str) -> float:
        if self.contained and target in text:
            return 1.0
        return max(1.0 - edit_distance(target, text, anywhere=self.targets == "each") / len(target), 0.0)
