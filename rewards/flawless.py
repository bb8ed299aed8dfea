"""A light detector of flawed images, trained by its user on two folders of examples with one command:

    python -m diffrl_zoo.flawless train CLEAN FLAWED --out DIR

After Hong et al. 2026, "Understanding Reward Hacking in Text-to-Image Reinforcement Learning" (arXiv:2601.03468): most
hacked rewards end in images full of artefacts, and a small detector for the kind at hand, added to the reward, stops
it. Here it is a logistic regression on a frozen encoder's features of the whole image and of its four quarters.

Shapes: B images, H x W pixels, D the width of the encoder's embedding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.records.disk import replacing, write_json
from diffrl.tools.pictures import SUFFIXES
from diffrl_zoo.cards import card_of
from diffrl_zoo.vision import shared_encoder

SETTINGS, HEAD = "flawless.json", "head.safetensors"
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
LEAST = 10  # images of each kind: fewer cannot be split for training and judging


class Encoder:
    """The frozen features (B, 3 D) of images: of the whole, and the mean and the maximum over its four quarters."""

    def __init__(self, features: str, model: str, pretrained: str | None, device: str | None, precision: str) -> None:
        self.model = shared_encoder(features, model, pretrained, device, precision, "flawless")
        self.device = self.model.device

    def __call__(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to (B, 3 D); gradients flow to the images."""
        height, width = images.shape[-2] // 2, images.shape[-1] // 2
        quarters = [
            self.model.embed_image(images[..., top : top + height, left : left + width])
            for top in (0, images.shape[-2] - height)
            for left in (0, images.shape[-1] - width)
        ]
        stacked = torch.stack(quarters)
        return torch.cat([self.model.embed_image(images), stacked.mean(dim=0), stacked.amax(dim=0)], dim=-1)


class Flawless:
    """Probability that the image is clean, in [0, 1], or its log-odds with `logit`.

    `model`: the folder that the command `train` wrote. `device`, `precision`: of the encoder; `batch_size`: images per
    forward.
    """

    name = "flawless"
    differentiable = True
    card = card_of(name)

    def __init__(
        self, model: str, logit: bool = False, device: str | None = None, batch_size: int = 32, precision: str = "fp32"
    ) -> None:
        from dataclasses import replace

        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(model)
        for name in (SETTINGS, HEAD):
            if not (folder / name).is_file():
                raise UserError(f'flawless: no {name} in "{model}"; python -m diffrl_zoo.flawless train writes it')
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            chosen = (settings["features"], settings["model"], settings["pretrained"])
            head = load_file(folder / HEAD)
            self.weight, self.bias = head["weight"], head["bias"]
        except (ValueError, KeyError, SafetensorError) as error:
            raise UserError(f'flawless: "{model}" is damaged: {type(error).__name__} {error}') from error
        self.encoder = Encoder(*chosen, device, precision)
        self.device, self.batch_size, self.logit = self.encoder.device, batch_size, logit
        self.weight, self.bias = self.weight.to(self.device), self.bias.to(self.device)
        if logit:
            self.card = replace(type(self).card, range=(float("-inf"), float("inf")))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        logits = self.encoder(images.to(self.device, torch.float32)) @ self.weight + self.bias
        return logits if self.logit else logits.sigmoid()


def fit(features: Tensor, clean: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Weight (D,) and bias () of the logistic regression of `clean` (N,) in {0, 1} on `features` (N, D), float64.

    Both kinds weigh the same in sum. `decay` times half the squared weight of the standardised features is added.
    """
    x, y = features.double(), clean.double()
    mean, std = x.mean(dim=0), x.std(dim=0).clamp(min=1e-6)
    x = (x - mean) / std
    balance = torch.where(y > 0.5, 0.5 / y.sum(), 0.5 / (1 - y).sum())
    weight, bias = torch.zeros(x.shape[1], dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        losses = F.binary_cross_entropy_with_logits(x @ weight + bias, y, reduction="none")
        loss = (balance * losses).sum() + 0.5 * decay * weight.square().sum()
        loss.backward()
        return loss

    weight.requires_grad_(), bias.requires_grad_()
    optimiser.step(closure)
    weight, bias = weight.detach() / std, bias.detach()
    return weight, bias - mean @ weight


def auc(scores: Tensor, clean: Tensor) -> float:
    """Probability that a clean image scores higher than a flawed one, ties counting half."""
    pairs = scores[clean > 0.5][:, None] - scores[clean <= 0.5]
    return float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())


def train(
    clean: str | Path,
    flawed: str | Path,
    out: str | Path,
    *,
    features: str = "clip",
    model: str = "playground",
    pretrained: str | None = None,
    device: str | None = None,
    holdout: float = 0.25,
    seed: int = 0,
) -> dict[str, Any]:
    """Trains a detector on two folders of images, writes it to the folder `out` and returns its settings and figures.

    `holdout`: share of the images, at random by `seed`, that choose the weight decay and measure `auc` and `accuracy`;
    then the head is fitted to all. `features`, `model`, `pretrained`: the frozen encoder. Raises `UserError` for
    folders with fewer than `LEAST` images, and for images that cannot be read.
    """
    from safetensors.torch import save_file

    if not 0.05 <= holdout <= 0.5:
        raise UserError(f"flawless: holdout is {holdout:g}, not from 0.05 to 0.5")
    files = [_images(Path(clean)), _images(Path(flawed))]
    encoder = Encoder(features, model, pretrained, device, "fp32")
    x = torch.cat([_encode(encoder, part) for part in files])
    y = torch.cat([torch.ones(len(files[0])), torch.zeros(len(files[1]))])
    decay, area, accuracy = _choose(x, y, holdout, seed)
    weight, bias = fit(x, y, decay)
    settings: dict[str, Any] = {"features": features, "model": _absolute(model), "pretrained": pretrained}
    settings |= {"clean": len(files[0]), "flawed": len(files[1]), "holdout": holdout, "seed": seed}
    settings |= {"decay": decay, "auc": area, "accuracy": accuracy}
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / HEAD) as unfinished:
        save_file({"weight": weight.float().contiguous(), "bias": bias.float()}, unfinished)
    write_json(folder / SETTINGS, settings)
    return settings


def _choose(x: Tensor, y: Tensor, holdout: float, seed: int) -> tuple[float, float, float]:
    """The weight decay with the least loss on held-out rows of both kinds, and its AUC and accuracy there."""
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(y), dtype=torch.bool)
    for kind in (1.0, 0.0):  # the same share of both
        rows = (y == kind).nonzero().flatten()
        held[rows[torch.randperm(len(rows), generator=generator)[: max(2, round(holdout * len(rows)))]]] = True
    trials = []
    for decay in DECAYS:
        weight, bias = fit(x[~held], y[~held], decay)
        logits = x[held].double() @ weight + bias
        loss = float(F.binary_cross_entropy_with_logits(logits, y[held].double()))
        right = ((logits > 0) == (y[held] > 0.5)).double().mean()
        trials.append((loss, decay, auc(logits, y[held]), float(right)))
    return min(trials)[1:]


def _absolute(model: str) -> str:
    """A folder's whole path, since the detector may be used from elsewhere; names and hub ids as they are."""
    return str(Path(model).resolve()) if Path(model).is_dir() and model != "playground" else model


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"flawless: no folder {folder}")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if len(files) < LEAST:
        raise UserError(f"flawless: {len(files)} images in {folder}; {LEAST} are needed at least")
    return files


@torch.no_grad()
def _encode(encoder: Encoder, files: Sequence[Path]) -> Tensor:
    """(N, 3 D) features of the images in `files`, on the CPU."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    rows = []
    for path in files:
        try:
            with Image.open(path) as file:
                pixels = torch.from_numpy(np.array(file.convert("RGB")))
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"flawless: cannot read the image {path}: {error}") from error
        rows.append(encoder(pixels.permute(2, 0, 1)[None].to(encoder.device).float() / 255).cpu())
    return torch.cat(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: trains, prints what was measured, and returns the exit code (2 for a user's mistake)."""
    parser = argparse.ArgumentParser(prog="python -m diffrl_zoo.flawless", description="A detector of flawed images.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "train",
        help="train one on two folders of images",
        epilog="example: python -m diffrl_zoo.flawless train good/ broken/ --out detector "
        "--features transformers --model facebook/dinov2-base; then rewards: {flawless: {model: detector}}",
    )
    command.add_argument("clean", help="folder of clean images")
    command.add_argument("flawed", help="folder of flawed images")
    command.add_argument("--out", required=True, help="folder to write")
    command.add_argument("--features", default="clip", help="the encoder's kind: clip (open_clip) or transformers")
    command.add_argument("--model", default="playground", help="the encoder: a name, hub id or folder")
    command.add_argument("--pretrained", default=None, help="open_clip's tag of the weights, or a file")
    command.add_argument("--device", default=None, help="cpu, cuda, ...")
    command.add_argument("--holdout", type=float, default=0.25, help="share of the images that judge (default: 0.25)")
    command.add_argument("--seed", type=int, default=0, help="of the split")
    chosen = vars(parser.parse_args(arguments))
    del chosen["command"]
    try:
        figures = train(chosen.pop("clean"), chosen.pop("flawed"), chosen.pop("out"), **chosen)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{figures['clean']} clean and {figures['flawed']} flawed images; on the held-out "
        f"{figures['holdout']:.0%}: accuracy {figures['accuracy']:.3f}, AUC {figures['auc']:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
