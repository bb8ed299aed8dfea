"""Aesthetic score: a small head on an image's CLIP embedding, trained on ratings; blind to the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.errors import UserError, nearest
from diffrl.resources import shipped
from diffrl.rewards.protocol import Card
from diffrl_zoo.clip import shared_clip

ACTIVATIONS: dict[str, type[nn.Module]] = {"none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}


class Aesthetic:
    """The rating that a head predicts from the CLIP embedding (a unit vector), about 1 to 10, without bounds.

    `clip`, `pretrained`, `device`, `precision`: the embedding, as in the reward `clip`, with which it is shared.
    `head`: "playground" (the shipped one), a `.safetensors` file, or LAION's `sac+logos+ava1-l14-linearMSE.pth` (with
    `clip: ViT-L-14-quickgelu`, `pretrained: openai`). A head is a chain of linear layers in the order of their names;
    the activation between them is the file's metadata `activation` (LAION's heads have none).
    """

    name = "aesthetic"
    differentiable = True
    card = Card(
        measures="predicted rating of the picture, without regard to the prompt (trained on ratings from 1 to 10)",
        range=(float("-inf"), float("inf")),
        citation="LAION aesthetic predictor v2 (Schuhmann 2022); playground: diffrl/playground/taste.py",
        weights="playground: shipped (30 kB, on its CLIP); LAION v2 (4 MB, on OpenAI's ViT-L/14, 1.7 GB)",
        licence="playground: Apache-2.0; LAION v2: Apache-2.0; OpenAI's CLIP: MIT",
        cost="that of its CLIP, shared with the reward clip of the same weights",
        exploits="one glossy style for every prompt; the prompt's content is lost; adversarial texture",
    )

    def __init__(
        self,
        head: str = "playground",
        clip: str = "playground",
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int = 64,
        precision: str = "fp32",
    ) -> None:
        path = shipped("assets", "playground", "aesthetic.safetensors") if head == "playground" else Path(head)
        self.head = load_head(path)
        self.clip = shared_clip(clip, pretrained, device, precision)
        width, first = self._width(), self.head[0]
        assert isinstance(first, nn.Linear)
        if first.in_features != width:
            raise UserError(
                f"aesthetic: the head {path} takes embeddings of width {first.in_features}, "
                f'the model "{clip}" gives {width}'
            )
        self.device = self.clip.device
        self.head.to(self.device)
        self.batch_size = batch_size

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Ratings (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.head(self.clip.embed_image(images)).squeeze(-1)

    @torch.no_grad()
    def _width(self) -> int:
        return self.clip.embed_text([""]).shape[-1]


def load_head(path: str | Path) -> nn.Sequential:
    """A frozen chain of linear layers, float32, from a `.safetensors` file (or `.pth`, as plain tensors).

    Widths are those of the tensors. Raises `UserError` for a missing file and for tensors that are no such chain.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"aesthetic: no head at {path}")
    tensors, activation = _read(path)
    weights = sorted(
        (k for k in tensors if k.endswith("weight")), key=lambda k: [int(n) for n in re.findall(r"\d+", k)]
    )
    if activation is None:
        # LAION's v2 head (layers 768-1024-128-64-16-1) was trained without activations; of others nobody can know.
        if len(weights) > 1 and not weights[0].startswith("layers."):
            raise UserError(
                f"aesthetic: {path} does not say its activation; add the safetensors metadata activation: relu|none"
            )
        activation = "none"
    if activation not in ACTIVATIONS:
        raise UserError(
            f'aesthetic: {path} has the unknown activation "{activation}"{nearest(activation, ACTIVATIONS)}'
        )
    layers: list[nn.Module] = []
    width = None
    for key in weights:
        weight, bias = tensors[key], tensors.get(key.removesuffix("weight") + "bias")
        if weight.ndim != 2 or bias is None or (width is not None and weight.shape[1] != width):
            raise UserError(
                f"aesthetic: {path} is no chain of linear layers ({key} has the shape {tuple(weight.shape)})"
            )
        width = weight.shape[0]
        linear = nn.Linear(weight.shape[1], width)
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers += [linear, ACTIVATIONS[activation]()]
    if width != 1:
        raise UserError(f"aesthetic: the head {path} ends in {width} numbers instead of one")
    return nn.Sequential(*layers[:-1]).float().requires_grad_(False).eval()


def _read(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Tensors of the file, and the activation that its metadata names."""
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True), None
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, (file.metadata() or {}).get("activation")  # noqa: SIM118
