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
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import ClipModel, clip_bytes, shared_clip
from diffrl_zoo.loading import hub_file
from diffrl_zoo.vision import VisionModel, shared_vision

ACTIVATIONS: dict[str, type[nn.Module]] = {"none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}
# LAION's v2 head lies in a GitHub repository; this hub repository holds the same tensors.
V2_REPOSITORY, V2_FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
V2_CLIP = ("ViT-L-14-quickgelu", "openai")
V2_5_URL = "https://github.com/discus0434/aesthetic-predictor-v2-5/raw/main/models/aesthetic_predictor_v2_5.pth"
V2_5_SIGLIP = "google/siglip-so400m-patch14-384"
# The published heads say by their layers' numbers what lay between them when they were trained: dropout alone, or an
# activation with it (LAION's ava+logos-l14-reluMSE.pth). Of others it cannot be known.
PUBLISHED: dict[tuple[str, tuple[int, ...]], str] = {
    ("layers", (0, 2, 4, 6, 7)): "none",
    ("layers", (0, 3, 6, 9, 11)): "relu",
    ("scoring_head", (0, 2, 4, 6, 8)): "none",
}


class Aesthetic:
    """The rating that a head predicts from an image's embedding (a unit vector), about 1 to 10, without bounds.

    `head`: "playground" (the shipped one), "v2" (LAION's, on OpenAI's CLIP ViT-L/14), "v2.5" (discus0434's, on SigLIP
    so400m), or a file, `.safetensors` or `.pth`. A head is a chain of linear layers in the order of their names; the
    activation between them is the file's metadata `activation`; the published heads are known by their layers' numbers
    (LAION's "linear" ones and v2.5 have none, LAION's `ava+logos-l14-reluMSE.pth` has ReLU).
    `clip`, `pretrained`: the embedding's model, as in the reward `clip`, with which it is shared; for a v2.5 head a hub
    id or folder of a SigLIP in transformers' format. None: the one that belongs to the head. `device`, `batch_size`,
    `precision`: as in `clip`.
    """

    name = "aesthetic"
    differentiable = True
    card = card_of(name)

    def __init__(
        self,
        head: str = "playground",
        clip: str | None = None,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int = 64,
        precision: str = "fp32",
    ) -> None:
        path = _path(head)
        self.head = load_head(path)
        self.clip: ClipModel | VisionModel
        if any(key.startswith("scoring_head.") for key in _read(path)[0]):
            if pretrained is not None:
                raise UserError("aesthetic: a SigLIP has weights of its own; leave out `pretrained`")
            clip = clip or V2_5_SIGLIP
            self.clip = shared_vision(clip, device, precision, "aesthetic")
        else:
            if clip is None:
                clip, embedder = V2_CLIP if head == "v2" else ("playground", None)
                pretrained = pretrained or embedder
            self.clip = shared_clip(clip, pretrained, device, precision)
        own = self.clip
        width = own.width if isinstance(own, VisionModel) else own.embed_text([""]).shape[-1]
        first = self.head[0]
        assert isinstance(first, nn.Linear)
        if first.in_features != width:
            raise UserError(
                f"aesthetic: the head {path} takes embeddings of width {first.in_features}, "
                f'the model "{clip}" gives {width}'
            )
        self.device = self.clip.device
        self.head.to(self.device)
        self.batch_size = batch_size

    @staticmethod
    def footprint(head: str, clip: str | None, pretrained: str | None, precision: str, **_: Any) -> int | None:
        """Bytes of its CLIP's weights, beside which the head is nothing; of other encoders it cannot say."""
        if clip is None and head == "v2":
            clip, pretrained = V2_CLIP
        if clip is None and head == "playground":
            clip = "playground"
        return None if clip is None or head == "v2.5" else clip_bytes(clip, precision, pretrained)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Ratings (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.head(self.clip.embed_image(images)).squeeze(-1)


def _path(head: str) -> Path:
    """The file of a head: shipped, named, or one of the two published ones, downloaded once."""
    if head == "playground":
        return shipped("assets", "playground", "aesthetic.safetensors")
    if head == "v2":
        return hub_file(V2_REPOSITORY, V2_FILE, "aesthetic", "head")
    if head != "v2.5":
        return Path(head)
    try:
        path = Path(torch.hub.get_dir()) / "checkpoints" / V2_5_URL.rpartition("/")[2]
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(V2_5_URL, str(path), progress=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"aesthetic: cannot download {V2_5_URL}; name its file as `head` ({reason})") from error
    return path


def load_head(path: str | Path) -> nn.Sequential:
    """A frozen chain of linear layers, float32, from a `.safetensors` file (or `.pth`, as plain tensors).

    Widths are those of the tensors. Raises `UserError` for a missing file and for tensors that are no such chain.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"aesthetic: no head at {path}")
    tensors, activation = _read(path)
    if activation is None:
        names = [key.removesuffix(".weight").rsplit(".", 1) for key in tensors if key.endswith(".weight")]
        numbers = tuple(sorted(int(name[-1]) for name in names if name[-1].isdecimal()))
        activation = PUBLISHED.get((names[0][0], numbers)) if names else None
        if activation is None and len(names) > 1:
            raise UserError(
                f"aesthetic: {path} does not say its activation, and its layers {', '.join(map(str, numbers))} are no "
                "published head's; add the safetensors metadata activation: relu|none"
            )
    activation = activation or "none"
    if activation not in ACTIVATIONS:
        raise UserError(
            f'aesthetic: {path} has the unknown activation "{activation}"{nearest(activation, ACTIVATIONS)}'
        )
    return linear_chain(tensors, ACTIVATIONS[activation], f"aesthetic: {path}")


def linear_chain(
    tensors: Mapping[str, Tensor], activation: type[nn.Module], where: str, outputs: int | None = 1
) -> nn.Sequential:
    """The frozen layers of `tensors`, in the order of the numbers in their names, which end in `outputs` numbers.

    `outputs` None: however many. `where` begins the message of the `UserError` for tensors that are no such chain.
    """
    weights = sorted(
        (k for k in tensors if k.endswith("weight")), key=lambda k: [int(n) for n in re.findall(r"\d+", k)]
    )
    layers: list[nn.Module] = []
    width = None
    for key in weights:
        weight, bias = tensors[key], tensors.get(key.removesuffix("weight") + "bias")
        if weight.ndim != 2 or bias is None or (width is not None and weight.shape[1] != width):
            raise UserError(f"{where} is not a chain of linear layers ({key} has the shape {tuple(weight.shape)})")
        width = weight.shape[0]
        linear = nn.Linear(weight.shape[1], width)
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers += [linear, activation()]
    if width is None or (outputs is not None and width != outputs):
        raise UserError(
            f"{where} ends in {width or 'no'} numbers instead of {'one' if outputs == 1 else outputs or 'some'}"
        )
    return nn.Sequential(*layers[:-1]).float().requires_grad_(False).eval()


def _read(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Tensors of the file, and the activation that its metadata names."""
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True), None
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, (file.metadata() or {}).get("activation")  # noqa: SIM118
