"""The extractors: encoders of transformers, pixels, ArcFace, CSD, Grounding DINO and LPIPS.

Heavy packages are imported on construction. Weights come from the hub or from a local file or folder; where neither can
be had, construction raises UserError, and the score says so in place of a number.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffrl.divgen.extractors import Device, Found
from diffrl.errors import UserError, in_one_line
from diffrl.features import load_features
from diffrl.hub import hub_file, pinned
from diffrl.prompts import Prompt

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LPIPS_MOST = 8  # images of one prompt that are compared: the pairs grow with the square


class Space:
    """A space of images that `diffrl.features` has by name: the playground's CLIP ("clip"), colours ("pixels")."""

    def __init__(self, name: str, device: Device = "cpu") -> None:
        self.name, self.features = name, load_features(name, device)

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        return list(self.features(images).numpy())


class Vit(Space):
    """Any vision model of transformers (DINOv2, DINOv3, ...), as a hub id or a local folder: its pooled output."""

    def __init__(self, weights: str, device: Device = "cpu", name: str = "vit") -> None:
        try:
            super().__init__(weights, device)
        except UserError as error:
            raise UserError(str(error).removeprefix("evaluate.features: ")) from error
        self.name = f"{name}:{weights}"


class ArcFace:
    """ArcFace's 512-d identity embedding (Deng et al. 2019, arXiv 1801.07698) of the largest face, by insightface.

    `weights`: name of a model pack that insightface knows ("buffalo_l": a RetinaFace-type detector and a ResNet-50), or
    a folder with the pack's ONNX files. Licence of the packs: research only.
    """

    name = "arcface"

    def __init__(self, weights: str = "buffalo_l", device: Device = "cpu") -> None:
        try:
            from insightface.app import FaceAnalysis
        except ImportError:
            raise UserError('arcface needs insightface: pip install "diffrl[divgen]"') from None
        cuda = torch.device(device).type == "cuda"
        providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]
        try:
            self.app = FaceAnalysis(weights, allowed_modules=["detection", "recognition"], providers=providers)
            self.app.prepare(ctx_id=0 if cuda else -1, det_size=(640, 640))
        except Exception as error:  # no connection, no such pack, damaged files: insightface has no error of its own
            raise UserError(f'arcface: no weights "{weights}" ({in_one_line(error, most=200)})') from error

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        result: list[Found] = []
        for image in (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
            faces = self.app.get(np.ascontiguousarray(image[..., ::-1]))  # BGR
            areas = [(f.bbox[2] - f.bbox[0]) * (f.bbox[3] - f.bbox[1]) for f in faces]
            result.append(np.asarray(faces[int(np.argmax(areas))].embedding, np.float32) if faces else None)
        return result


class CSD:
    """Contrastive style descriptors (Somepalli et al. 2024, arXiv 2404.01292): a CLIP ViT-L/14 with a style head.

    `weights`: the published checkpoint (a file, or the hub id "tomg-group-umd/CSD-ViT-L"). The sizes of the network are
    read from the checkpoint. Embeddings (768,) of length one.
    """

    name = "csd"

    def __init__(self, weights: str = "tomg-group-umd/CSD-ViT-L", device: Device = "cpu") -> None:
        state = _csd_state(_hub_file(weights, "pytorch_model.bin", "csd"))
        try:
            self.network, self.side = _vision_tower(state)
            self.network.load_state_dict({k[9:]: v for k, v in state.items() if k.startswith("backbone.")})
            self.head = state["last_layer_style"].float().to(device)
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f'csd: "{weights}" is not a CSD checkpoint ({in_one_line(error, most=200)})') from error
        self.network = self.network.float().eval().requires_grad_(False).to(device)
        self.device = device

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        x = fit_square(images.to(self.device).float(), self.side)
        mean, std = (x.new_tensor(v).view(1, 3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
        return list(F.normalize(self.network((x - mean) / std) @ self.head, dim=1).cpu().numpy())


def fit_square(images: Tensor, side: int) -> Tensor:
    """(B, 3, H, W) to (B, 3, side, side): the shorter side resized (bicubic, anti-aliased), the middle cut out."""
    height, width = images.shape[-2:]
    ratio = side / min(height, width)
    size = max(round(height * ratio), side), max(round(width * ratio), side)
    if size != (height, width):
        images = F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    return images[..., top : top + side, left : left + side]


def _hub_file(weights: str, file: str, who: str) -> Path:
    """A local file, a folder's file, or a file of a hub repository."""
    path = Path(os.path.expanduser(weights))
    if path.is_file() or (path / file).is_file():
        return path if path.is_file() else path / file
    return hub_file(weights, file, f'{who}: no file "{weights}"')


def _csd_state(path: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors without the prefix of distributed training. No code in the file is run."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise UserError(f"csd: {path} cannot be read ({in_one_line(error, most=200)})") from error
    state = state.get("model_state_dict", state) if isinstance(state, Mapping) else {}
    return {key.removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}


def _vision_tower(state: Mapping[str, Tensor]) -> tuple[nn.Module, int]:
    """An open_clip vision transformer of the checkpoint's sizes, with OpenAI's quick GELU and without projection."""
    from open_clip.transformer import QuickGELU, VisionTransformer

    width, _, patch, _ = state["backbone.conv1.weight"].shape
    grid = round((len(state["backbone.positional_embedding"]) - 1) ** 0.5)
    layers = len({key.split(".")[3] for key in state if key.startswith("backbone.transformer.resblocks.")})
    mlp = len(state["backbone.transformer.resblocks.0.mlp.c_fc.weight"]) / width
    tower: Any = VisionTransformer(grid * patch, patch, width, layers, max(width // 64, 1), mlp, act_layer=QuickGELU)
    tower.proj = None
    return tower, grid * patch


class GroundingDino:
    """Boxes of the prompt's objects by Grounding DINO (Liu et al. 2023, arXiv 2303.05499), of transformers.

    `weights`: a hub id or a folder. Looked for are the names in the metadata's `objects`, else the keyword.
    """

    name = "grounding-dino"
    box_threshold, text_threshold = 0.35, 0.25

    def __init__(self, weights: str = "IDEA-Research/grounding-dino-base", device: Device = "cpu") -> None:
        from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

        try:
            source, at = pinned(weights)
            self.processor = AutoProcessor.from_pretrained(source, **at)
            model: Any = AutoModelForZeroShotObjectDetection.from_pretrained(source, **at)
        except (OSError, ValueError) as error:
            raise UserError(f'grounding-dino: no model "{weights}" ({in_one_line(error, most=200)})') from error
        self.model, self.device = model.eval().requires_grad_(False).to(device), device

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        texts = [". ".join(wanted(prompt)).lower() + "." for prompt in prompts]
        pictures = list((images * 255).round().byte().cpu().numpy())
        inputs = self.processor(
            images=pictures, text=texts, padding=True, return_tensors="pt", input_data_format="channels_first"
        ).to(self.device)
        results = self.processor.post_process_grounded_object_detection(
            self.model(**inputs),
            inputs.input_ids,
            threshold=self.box_threshold,
            text_threshold=self.text_threshold,
            target_sizes=[(1, 1)] * len(pictures),
        )
        boxes = [result["boxes"].float().clamp(0, 1).cpu().numpy() for result in results]
        return [part if len(part) else None for part in boxes]


def wanted(prompt: Prompt) -> list[str]:
    """What a detector is to look for: the metadata's objects, else the keyword, else anything at all."""
    objects = prompt.metadata.get("objects")
    return [str(name) for name in objects] if objects else [str(prompt.metadata.get("keyword") or "object")]


class Lpips:
    """LPIPS (Zhang et al. 2018, arXiv 1801.03924) on the network `name`, between the images of one prompt.

    By torchmetrics, on torchvision's weights (TORCH_HOME/hub/checkpoints); at most `LPIPS_MOST` images are compared.
    """

    def __init__(self, name: Any, device: Device = "cpu") -> None:
        try:
            from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity as Metric
        except ImportError:
            raise UserError('lpips needs torchmetrics: pip install "diffrl[divgen]"') from None
        try:
            self.network: Any = Metric(name).net.eval().requires_grad_(False).to(device)
        except (OSError, RuntimeError) as error:
            reason = in_one_line(error, most=200)
            raise UserError(f"lpips: torchvision's weights of {name} are missing ({reason})") from error
        self.name, self.device = name, device

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Any:
        x = images[:LPIPS_MOST].to(self.device).float()
        if min(x.shape[-2:]) < 64:  # the networks' strides leave nothing of smaller images
            x = F.interpolate(x, (64, 64), mode="bicubic", antialias=True).clamp(0, 1)
        pairs = list(itertools.combinations(range(len(x)), 2))
        first, second = (x[[pair[i] for pair in pairs]] for i in (0, 1))
        return self.network(first, second, normalize=True).flatten().cpu().numpy()
