"""T2I-CompBench++'s judges beside BLIP-VQA: positions and counts by a detector, positions in depth, actions by CLIP.

The published judge detects with UniDet (ResNeSt-200 for positions, ResNet-50 for depth and counts; 722 classes), which
transformers does not have. What differs here: an open-vocabulary detector is asked for the prompt's things alone, so
it finds things that no class of UniDet is (in the plane: table, bag, cow, phone, ..., which the script never finds),
and its confidences, of which a quarter each goes into a score, are its own. So scores are compared with each other,
and not with the paper's. The rules (`compbench_rules`), the threshold of 0.1, the suppression of overlaps above 0.5
within a class, the size of the picture, the depth model (DPT-Hybrid, MiDaS's weights) and CLIP are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.rewards.protocol import RewardError
from diffrl_zoo import compbench_rules as rules
from diffrl_zoo.blip_vqa import PARSER, language
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import clip_bytes, fit, shared_clip
from diffrl_zoo.geneval import Detection, Detector
from diffrl_zoo.inputs import check_choice, to_bytes
from diffrl_zoo.loading import PRECISIONS, cannot_load, from_pretrained, frozen, pick_device, transformers_bytes

MODES = ("spatial", "depth", "numeracy", "action")
DETECTOR, DEPTH, CLIP = "google/owlv2-base-patch16-ensemble", "Intel/dpt-hybrid-midas", "ViT-B-32-quickgelu"
SUPPRESSED, MOST = 0.5, 300  # overlap of boxes of a class; objects of a picture
DEPTH_SIZE = (480, 480)
ASK = "a photo of a {}"
ZERO_SHOT = "AutoModelForZeroShotObjectDetection"


class OpenDetector:
    """OWLv2 or OWL-ViT, asked for things by their names; a detector with fixed classes is asked for all of them."""

    def __init__(self, model: str, device: torch.device, precision: str) -> None:
        from transformers import AutoConfig, AutoModelForZeroShotObjectDetection, AutoProcessor

        self.device, self.dtype, self.fixed = device, PRECISIONS[precision], None
        with cannot_load("compbench", model):
            if not from_pretrained(AutoConfig, model).model_type.startswith("owl"):
                self.fixed = Detector(model, device, precision)
                return
            self.model = frozen(AutoModelForZeroShotObjectDetection, model, self.dtype, device)
            self.processor = from_pretrained(AutoProcessor, model)

    @torch.no_grad()
    def __call__(self, image: Tensor, names: Sequence[str], least: float) -> list[tuple[str, Detection]]:
        """What is in an image (3, H, W) in [0, 1], the most confident first; boxes in pixels of `seen_size`."""
        size = rules.seen_size(image.shape[-2], image.shape[-1])
        if self.fixed is not None:
            known = self.fixed(image[None], least)[0]
            scale = (size[1] / image.shape[-1], size[0] / image.shape[-2]) * 2
            raw = [(name, d.score, torch.tensor([x * s for x, s in zip(d.box, scale, strict=True)]))
                   for name, things in known.items() for d in things]  # fmt: skip
        else:
            asked, texts = list(dict.fromkeys(names)), [ASK.format(name) for name in dict.fromkeys(names)]
            inputs = self.processor(text=[texts], images=[to_bytes(image)], return_tensors="pt")
            inputs = inputs.to(self.device, self.dtype)
            output = self.model(**inputs)
            row = self.processor.post_process_grounded_object_detection(output, threshold=least, target_sizes=[size])[0]
            rows = zip(row["scores"].tolist(), row["labels"].tolist(), row["boxes"].float().cpu(), strict=True)
            raw = [(asked[label], score, box) for score, label, box in rows]
        edge = torch.tensor([size[1], size[0], size[1], size[0]])
        boxes = [(name, score, box.clamp(min=0).minimum(edge)) for name, score, box in raw]
        return suppress([(name, Detection(tuple(box.tolist()), score)) for name, score, box in boxes])


def suppress(objects: rules.Objects) -> list[tuple[str, Detection]]:
    """The most confident objects first, without those that overlap a more confident one of their class."""
    kept: list[tuple[str, Detection]] = []
    for name, thing in sorted(objects, key=lambda pair: -pair[1].score):
        if all(name != other or rules.iou(thing.box, above.box) <= SUPPRESSED for other, above in kept):
            kept.append((name, thing))
    return kept[:MOST]


class DepthModel:
    """DPT's inverse depth as the published script stores it: 0 to 1 within a picture, in steps of 1/255."""

    def __init__(self, model: str, device: torch.device, precision: str) -> None:
        from transformers import AutoModelForDepthEstimation

        self.device, self.dtype = device, PRECISIONS[precision]
        with cannot_load("compbench", model):
            self.model = frozen(AutoModelForDepthEstimation, model, self.dtype, device)
        if hasattr(self.model, "dpt"):  # it refuses other sizes than its config's 384, for which it has what is needed
            self.model.dpt.embeddings.image_size = DEPTH_SIZE

    @torch.no_grad()
    def __call__(self, image: Tensor) -> Tensor:
        """(h, w) of `seen_size` of an image (3, H, W) in [0, 1]; nearer is more."""
        size = (image.shape[-2], image.shape[-1])
        pixels = fit(image[None].to(self.device, torch.float32), DEPTH_SIZE, "squash", "bilinear")
        depth = self.model(((pixels - 0.5) / 0.5).to(self.dtype)).predicted_depth.float()
        depth = (depth - depth.min()) / (depth.max() - depth.min()).clamp(min=torch.finfo().tiny)
        depth = F.interpolate(depth[:, None], size, mode="bilinear", align_corners=True)
        depth = (255 * depth).floor() / 255  # the script keeps it as a picture of bytes, and resizes that
        depth = F.interpolate(depth, rules.seen_size(*size), mode="bilinear", antialias=True)[0, 0]
        return (255 * depth).round() / 255


@lru_cache(maxsize=8192)
def words_of(prompt: str) -> tuple[tuple[str, str], ...]:
    """A prompt's words with their parts of speech by spaCy; RewardError where it or its model is not installed."""
    parser = language()
    if parser is None:
        todo = f"install it (pip install spacy, python -m spacy download {PARSER}), or give `things` as metadata"
        raise RewardError(f'compbench: the words of "{prompt}" are read by spaCy and {PARSER}: {todo}')
    return tuple((token.text, token.pos_) for token in parser(prompt))


class CompBench:
    """T2I-CompBench++'s score of a position, of counts or of an action.

    `mode`: spatial (two things in the plane), depth (two things, one in front of or behind the other), numeracy (counts
    of things) or action (CLIP's cosine with the prompt without its adjectives). Which things: `things` of the metadata,
    two names, or the nouns that spaCy finds, in prompts of the `category` complex those around the preposition; for
    numeracy `objects` and `counts`, lists of one length, without which a prompt is not judged. `detector`: a hub id or
    folder of OWLv2, OWL-ViT or a detector with fixed classes. `threshold`: of its confidence.
    """

    name = "compbench"
    card = card_of(name, detector=DETECTOR, depth=DEPTH)

    def __init__(
        self,
        mode: str = "spatial",
        detector: str = DETECTOR,
        depth: str = DEPTH,
        clip: str = CLIP,
        pretrained: str | None = "openai",
        threshold: float = 0.1,
        device: str | None = None,
        precision: str = "fp32",
    ) -> None:
        check_choice("mode", mode, MODES, "compbench")
        check_choice("precision", precision, PRECISIONS, "compbench")
        self.mode, self.threshold, self.device = mode, threshold, pick_device(device)
        if mode == "action":
            self.clip = shared_clip(clip, pretrained, device, precision)
            self.card = replace(type(self).card, range=(-1.0, 1.0))  # a cosine
        else:
            self.detector = OpenDetector(detector, self.device, precision)
        if mode == "depth":
            self.depth = DepthModel(depth, self.device, precision)

    @staticmethod
    def footprint(
        mode: str, detector: str, depth: str, clip: str, pretrained: str | None, precision: str, **_: Any
    ) -> int | None:
        """Bytes of the weights of the mode; None where a model's config is not to be had."""
        if mode == "action":
            return clip_bytes(clip, precision, pretrained)
        sizes = [transformers_bytes(ZERO_SHOT, detector, precision)]
        if mode == "depth":
            sizes.append(transformers_bytes("AutoModelForDepthEstimation", depth, precision))
        return None if None in sizes else sum(size or 0 for size in sizes)

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """In mode numeracy: True for prompts with `objects` in their metadata."""
        return self.mode != "numeracy" or bool(metadata.get("objects"))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        if self.mode == "action":
            texts = [" ".join(text for text, kind in words_of(prompt) if kind != "ADJ") for prompt in prompts]
            return (self.clip.embed_image(images) * self.clip.embed_text(texts)).sum(dim=-1)
        rows = zip(images, prompts, metadata, strict=True)
        return torch.tensor([self._judge(*row) for row in rows], dtype=torch.float32)

    def _judge(self, image: Tensor, prompt: str, metadata: Mapping[str, Any]) -> float:
        if self.mode == "numeracy":
            names, counts = _counted(prompt, metadata)
            objects = self.detector(image, rules.asked_names(names), self.threshold)
            return rules.numeracy(names, counts, objects)
        pair = _pair(prompt, metadata)
        objects = self.detector(image, pair, self.threshold) if pair is not None else []
        if self.mode == "spatial":
            return rules.spatial(pair, rules.relation_of(prompt, rules.RELATIONS), objects)
        relation = rules.relation_of(prompt, rules.DEPTHS)
        return rules.spatial_in_depth(pair, relation, objects, self.depth(image))


def _pair(prompt: str, metadata: Mapping[str, Any]) -> rules.Pair | None:
    if things := metadata.get("things"):
        if not isinstance(things, list | tuple) or [type(name) for name in things] != [str, str]:
            raise RewardError(f'compbench: the prompt "{prompt}": `things` are two names, got {str(things)[:80]}')
        return things[0], things[1]
    find = rules.pair_around if metadata.get("category") == "complex" else rules.pair_of
    return find(words_of(prompt))


def _counted(prompt: str, metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    names, counts = metadata["objects"], metadata.get("counts")
    try:
        pairs = [(str(name), int(count)) for name, count in zip(names, counts, strict=True)]  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        text = f"`objects` and `counts` are lists of one length, got {str(names)[:60]} and {str(counts)[:60]}"
        raise RewardError(f'compbench: the prompt "{prompt}": {text}') from error
    return [name for name, _ in pairs], [count for _, count in pairs]
