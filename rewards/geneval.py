"""GenEval as a reward: an instance detector and a colour classifier, judged by `geneval_rules`.

The published protocol detects with mmdet's Mask2Former (Swin-S, trained on COCO) and classifies colours with OpenAI's
CLIP ViT-L/14. What differs here: the detector is the same architecture with the weights of its authors, in
transformers' format (`facebook/mask2former-swin-small-coco-instance`), instead of mmdet's retraining, and its image
processor rounds sizes to multiples of 32 where mmdet pads. So confidences are close, not equal, and published numbers
are reproduced up to the images near the thresholds. Confidences are computed as mmdet does (class
probability times mean mask probability), so the thresholds keep their meaning. Detectors without masks (DETR, RT-DETR,
...) work, too: the colour is then read from the whole box, as in the published code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import nearest
from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import ClipModel, clip_bytes, shared_clip
from diffrl_zoo.geneval_rules import (
    COLORS,
    Colours,
    Detection,
    Objects,
    Thresholds,
    correct,
    filter_detections,
    flow_grpo_credit,
    parse_prompt,
    partial_credit,
)
from diffrl_zoo.inputs import check_choice, to_bytes
from diffrl_zoo.loading import PRECISIONS, cannot_load, dtype_of, from_pretrained, frozen, pick_device

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
PARAMETERS = 69_000_000  # of it, by its card
MODES = {"correct": correct, "partial": partial_credit, "flow_grpo": flow_grpo_credit}
GRAY = 0x99 / 255  # what surrounds an object when its colour is read
TOP = 100  # candidates of an image, as in mmdet
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
# Labels of COCO detectors, and GenEval's names for them.
ALIASES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "tvmonitor": "tv",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
}


class Detector:
    """A detector of transformers: Mask2Former (with masks), or any model for object detection (boxes only)."""

    def __init__(self, model: str, device: torch.device, precision: str) -> None:
        from transformers import (
            AutoConfig,
            AutoImageProcessor,
            AutoModelForObjectDetection,
            Mask2FormerForUniversalSegmentation,
        )

        self.device, self.dtype = device, dtype_of(precision, "geneval")
        with cannot_load("geneval", model):
            self.masks = from_pretrained(AutoConfig, model).model_type == "mask2former"
            kind = Mask2FormerForUniversalSegmentation if self.masks else AutoModelForObjectDetection
            self.model = frozen(kind, model, self.dtype, device)
            self.processor = from_pretrained(AutoImageProcessor, model)
        labels = self.model.config.id2label
        self.names = [ALIASES.get(labels[i], labels[i]) for i in range(len(labels))]

    @torch.no_grad()
    def __call__(self, images: Tensor, least: float) -> list[dict[str, list[Detection]]]:
        """What is in each image (B, 3, H, W) in [0, 1], by class, with a confidence above `least`."""
        inputs = self.processor(images=list(to_bytes(images)), return_tensors="pt")
        output = self.model(pixel_values=inputs["pixel_values"].to(self.device, self.dtype))
        size = (images.shape[-2], images.shape[-1])
        if self.masks:
            pairs = zip(output.class_queries_logits.float(), output.masks_queries_logits.float(), strict=True)
            return [self._instances(logits, masks, size, least) for logits, masks in pairs]
        rows = self.processor.post_process_object_detection(output, threshold=least, target_sizes=[size] * len(images))
        return [self._boxes(row) for row in rows]

    def _instances(
        self, logits: Tensor, masks: Tensor, size: tuple[int, int], least: float
    ) -> dict[str, list[Detection]]:
        """One image's logits (Q, C + 1) and masks (Q, h, w): confidence = class probability * mean mask probability."""
        from torchvision.ops import masks_to_boxes

        probabilities = logits.softmax(dim=-1)[:, :-1]
        scores, places = probabilities.flatten().topk(min(TOP, probabilities.numel()))
        detections: dict[str, list[Detection]] = {}
        for score, place in zip(scores.tolist(), places.tolist(), strict=True):
            if score <= least:  # the mask can only lower it
                break
            query, label = divmod(place, probabilities.shape[1])
            mask = F.interpolate(masks[query][None, None], size, mode="bilinear", align_corners=False)[0, 0]
            inside = mask > 0
            if not inside.any():
                continue
            score *= float(mask.sigmoid()[inside].mean())
            if score > least:
                left, top, right, bottom = masks_to_boxes(inside[None])[0].tolist()
                box = (left, top, right + 1, bottom + 1)  # its right and lower ends exclusive
                detections.setdefault(self.names[label], []).append(Detection(box, score, inside))
        return detections

    def _boxes(self, row: Mapping[str, Tensor]) -> dict[str, list[Detection]]:
        detections: dict[str, list[Detection]] = {}
        for score, label, box in zip(
            row["scores"].tolist(), row["labels"].tolist(), row["boxes"].tolist(), strict=True
        ):
            detections.setdefault(self.names[label], []).append(Detection((box[0], box[1], box[2], box[3]), score))
        return detections


class ColourClassifier:
    """Names the colour of detected objects: the nearest of ten prompts in CLIP's space, the rest of the image grey."""

    def __init__(self, clip: ClipModel) -> None:
        self.clip = clip
        self._classes: dict[str, Tensor] = {}

    def _class(self, name: str) -> Tensor:
        """(10, D): for every colour the normalised mean of its prompts' embeddings."""
        if name not in self._classes:
            texts = [template.format(colour=colour, name=name) for colour in COLORS for template in TEMPLATES]
            embedded = self.clip.embed_text(texts).view(len(COLORS), len(TEMPLATES), -1)
            self._classes[name] = F.normalize(embedded.mean(dim=1), dim=-1)
        return self._classes[name]

    @torch.no_grad()
    def __call__(self, image: Tensor, objects: Sequence[Detection], name: str) -> list[str]:
        """The colours of the objects of class `name` in the image (3, H, W) in [0, 1]."""
        image = image.to(self.clip.device, torch.float32)
        embedded = torch.cat([self.clip.embed_image(crop(image, thing)[None]) for thing in objects])
        return [COLORS[i] for i in (embedded @ self._class(name).T).argmax(dim=1).tolist()]


def crop(image: Tensor, thing: Detection) -> Tensor:
    """The object's box of the image (3, H, W), grey outside of its mask; one pixel at least."""
    if thing.mask is not None:
        image = torch.where(thing.mask.to(image.device), image, GRAY)
    height, width = image.shape[-2:]
    x0, y0 = min(max(round(thing.box[0]), 0), width - 1), min(max(round(thing.box[1]), 0), height - 1)
    x1, y1 = max(min(round(thing.box[2]), width), x0 + 1), max(min(round(thing.box[3]), height), y0 + 1)
    return image[:, y0:y1, x0:x1]


@dataclass(eq=False, repr=False, kw_only=True)
class GenEval:
    """Whether the image shows the objects, counts, colours and positions that the prompt asks for.

    `mode`: correct (the benchmark's verdict, 0 or 1), partial (the share that is right, in [0, 1], for training) or
    flow_grpo (what Flow-GRPO's reward server gives: as partial, but without its lower bound and with another mean where
    a position is wrong). What a prompt asks for is in its metadata (GenEval's `tag`, `include`, `exclude`), or read
    from a prompt in the words of GenEval's templates; other prompts are not judged.

    `detector`: hub id or folder. `clip`, `pretrained`: the colour classifier, as in the reward `clip`, with which it is
    shared. `threshold`, `counting_threshold`, `overlap` (1: no suppression), `max_objects` of a class and
    `position_margin`: the protocol's. `batch_size`: images per forward.
    """

    name = "geneval"
    card = card_of(name, detector=DETECTOR)

    detector: str = DETECTOR
    clip: str = "ViT-L-14-quickgelu"
    pretrained: str | None = "openai"
    mode: str = "correct"
    threshold: float = 0.3
    counting_threshold: float = 0.9
    overlap: float = 1.0
    max_objects: int = 16
    position_margin: float = 0.1
    device: Any = None
    batch_size: int = 8
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES, "geneval")
        least = (self.threshold, self.counting_threshold)
        self.thresholds = Thresholds(*least, self.overlap, self.max_objects, self.position_margin)
        self.device = pick_device(self.device)
        if self.mode == "flow_grpo":  # as many as are counted where one is asked for
            self.card = replace(self.card, range=(min(2.0 - self.max_objects, 0.0), 1.0))
        self.detect = Detector(self.detector, self.device, self.precision)
        self.colour = ColourClassifier(shared_clip(self.clip, self.pretrained, self.device, self.precision))

    @staticmethod
    def footprint(detector: str, clip: str, pretrained: str | None, precision: str, **_: Any) -> int | None:
        """Bytes of both models' weights; of other detectors it cannot say."""
        colours = clip_bytes(clip, precision, pretrained)
        if colours is None or detector != DETECTOR:
            return None
        return colours + PARAMETERS * PRECISIONS[precision].itemsize

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts with GenEval's metadata, and for prompts in the words of its templates."""
        return bool(metadata.get("include")) or parse_prompt(prompt, self.detect.names) is not None

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        credit, margin = MODES[self.mode], self.thresholds.margin
        rows = self.seen(images, prompts, metadata)
        return torch.tensor([float(credit(*row, margin)) for row in rows], dtype=torch.float32)

    def seen(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Objects, Mapping[str, Any], Colours]]:
        """Of each image what the rules ask for: the objects found, the prompt's metadata, and who names colours."""
        asked = [self._asked(*pair) for pair in zip(prompts, metadata, strict=True)]
        detections = self.detect(images, min(self.thresholds.score, self.thresholds.counting))
        for image, found, wanted in zip(images, detections, asked, strict=True):
            yield filter_detections(found, wanted["tag"], self.thresholds), wanted, partial(self.colour, image)

    def _asked(self, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        """The prompt's metadata, checked: a class or colour that cannot be found must not look like a wrong image."""
        asked: Mapping[str, Any] | None = metadata if metadata.get("include") else None
        if asked is None:
            asked = parse_prompt(prompt, self.detect.names)
        if asked is None:
            raise RewardError(f'geneval: the prompt "{prompt}" has no metadata `include` and is not of its templates')
        clauses = [*asked["include"], *asked.get("exclude", ())]
        for i, clause in enumerate(clauses):
            if (name := clause.get("class")) not in self.detect.names:
                hint = nearest(str(name), self.detect.names)
                raise RewardError(f'geneval: the prompt "{prompt}" asks for "{name}", which no class is{hint}')
            if (colour := clause.get("color")) and colour not in COLORS:
                raise RewardError(f'geneval: the prompt "{prompt}": unknown colour "{colour}"{nearest(colour, COLORS)}')
            if not int(clause.get("count", 0)) >= 1:
                raise RewardError(f'geneval: the prompt "{prompt}": a clause for "{name}" has no count of 1 or more')
            if (position := clause.get("position")) and not 0 <= int(position[1]) < i:
                raise RewardError(f'geneval: the prompt "{prompt}": a position refers to clause {position[1]}')
        return {"tag": "counting" if asked.get("exclude") else "", **asked}
