"""What goes over the wire between a reward server and its clients: images with their prompts, and scores.

A request is either safetensors (one tensor `images` (B, 3, H, W), exact; prompts and metadata as JSON in its header) or
JSON with PNG (`{"images": [base64, ...], "prompts": [...], "metadata": [...]}`, 8 bits a channel). Nothing is pickled.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from diffrl.tools.pictures import to_rgb

TENSORS, JSON = "application/x-safetensors", "application/json"
PROTOCOL = 2  # changes when clients and servers of different versions cannot talk to each other
IDENTITY = "Diffrl-Identity"  # header of every answer: what gave it (`diffrl.rewards.identity.identity_of`)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Refused(Exception):
    """A request that the server does not serve: HTTP status and one line on why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Bounds of one request. `bytes`: of its body, and of its images as float32. `images`: most in one request."""

    images: int = 256
    bytes: int = 256 * 2**20


@dataclass(frozen=True)
class Request:
    """Images (B, 3, H, W), float32 in [0, 1], with their B prompts and metadata."""

    images: Tensor
    prompts: list[str]
    metadata: list[dict[str, Any]]


def encode(
    images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], form: str
) -> tuple[bytes, str]:
    """(body, content type) of a request. `form`: "tensors", exact, or "png", which rounds to 8 bits.

    Raises TypeError for metadata that JSON cannot hold.
    """
    words: dict[str, Any] = {"prompts": list(prompts), "metadata": [dict(one) for one in metadata]}
    images = images.detach().to("cpu", torch.float32).contiguous()
    if form == "tensors":
        return save({"images": images}, metadata={"request": json.dumps(words)}), TENSORS
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    words["images"] = [base64.b64encode(_png(one)).decode() for one in pixels]
    return json.dumps(words).encode(), JSON


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def decode(body: bytes, content_type: str, limits: Limits) -> Request:
    """The request in a body; `Refused`: 400 (malformed), 413 (too large), 415 (another type), 422 (bad values)."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == TENSORS:
        images, words = _tensors(body, limits)
    elif kind == JSON:
        words = read_json(body)
        images = _pictures(words.pop("images", None), limits)
    else:
        raise Refused(415, f'content type "{content_type}"; send {TENSORS} or {JSON}')
    return Request(images, *read_words(words, len(images)))


def read_json(body: bytes, what: str = "images, prompts and metadata") -> dict[str, Any]:
    """The object in a body; Refused for anything else. `what`: it should have."""
    try:
        words = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"not valid JSON: {error}") from error
    if not isinstance(words, dict):
        raise Refused(422, f"expected an object with {what}")
    return words


def _tensors(body: bytes, limits: Limits) -> tuple[Tensor, dict[str, Any]]:
    try:
        size = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + size])  # `load` leaves the metadata out
        tensors = load(body)
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise Refused(400, f"not valid safetensors: {error}") from error
    if list(tensors) != ["images"]:
        raise Refused(422, 'expected one tensor, "images"')
    images = tensors["images"]
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise Refused(422, f"images have the shape {tuple(images.shape)}, not (B, 3, H, W)")
    if images.dtype not in (*FLOATS, torch.uint8):
        raise Refused(422, f"images are {images.dtype}; send float32, float16, bfloat16 or uint8")
    _check_size(len(images), images.numel(), limits)
    images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise Refused(422, "images have values outside of [0, 1]")
    return images, read_json(str((header.get("__metadata__") or {}).get("request", "")).encode())


def _pictures(encoded: Any, limits: Limits) -> Tensor:
    if not isinstance(encoded, list) or not encoded or not all(isinstance(one, str) for one in encoded):
        raise Refused(422, "images: expected a list of PNG files in base64")
    _check_size(len(encoded), 0, limits)
    images: list[Tensor] = []
    for number, text in enumerate(encoded):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                picture = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
                width, height = picture.size  # of the header: nothing is unpacked yet
                _check_size(len(encoded), 3 * width * height * len(encoded), limits)
                pixels = to_rgb(picture)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise Refused(413, f"images[{number}]: {error}") from error
        except (binascii.Error, OSError, ValueError, SyntaxError) as error:
            raise Refused(400, f"images[{number}] is not a PNG file in base64: {error}") from error
        images.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255)
        if images[-1].shape != images[0].shape:
            raise Refused(422, "images of one request have one size")
    return torch.stack(images)


def _check_size(count: int, values: int, limits: Limits) -> None:
    if count > limits.images:
        raise Refused(413, f"{count} images; a request may have {limits.images}")
    if 4 * values > limits.bytes:
        raise Refused(413, f"images of {4 * values} bytes as float32; a request may have {limits.bytes}")


def read_words(words: dict[str, Any], count: int) -> tuple[list[str], list[dict[str, Any]]]:
    prompts, metadata = words.get("prompts"), words.get("metadata")
    metadata = [{} for _ in range(count)] if metadata is None else metadata
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise Refused(422, "prompts: expected a list of texts")
    if not isinstance(metadata, list) or not all(isinstance(one, dict) for one in metadata):
        raise Refused(422, "metadata: expected a list of objects")
    if len(prompts) != count or len(metadata) != count:
        raise Refused(
            422, f"{count} images, {len(prompts)} prompts and {len(metadata)} metadata; expected as many each"
        )
    return prompts, metadata
