"""What a family is made of, with the defaults that most of them share: a family is a class that says what differs.

The defaults are those of a flow-matching transformer with classifier-free guidance and an image autoencoder of one
scale and shift. Symbols as in `diffrl.policy.base`. Everything that a family needs for a forward, a schedule or a
decoding is read from its modules' configs, so that `diffrl doctor` can count it on modules without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import diffusers
import numpy as np
import torch
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffrl.forward import FlowMatching, Prediction, Process
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.meaning import known_flow, known_latents, solver_of
from diffrl.policy.pipelines import JOINT_ATTENTION, Resolution, latent_size, load_pipeline, schedule_shift, settings_of


@dataclass(frozen=True)
class Known:
    """A published model of a family, and how its authors sample it; `guidance` 1 is none, in diffrl's counting."""

    name: str
    steps: int
    guidance: float
    note: str = ""


class Family:
    """Defaults of `diffrl.policy.backbone.Backbone`; a family overrides what is different about it.

    Args:
        pipe: the diffusers pipeline, on the CPU.
        resolution: side of square images, or (width, height), in pixels; None for the model's own.
        max_sequence_length: of the text, where the pipeline takes one; None for `text_length`.
    """

    denoiser = "transformer"  # the pipeline's name for the network
    targets: tuple[str, ...] = JOINT_ATTENTION
    dead_targets: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()  # layers with a row for each token of the text, by the beginnings of their names
    classifier_free = True
    empty: str | None = ""
    patch = 2  # latents per side of one token
    default_side = 128  # latents per side of the model's own pictures
    text_length = 512  # the pipeline's own max_sequence_length
    own_lengths = False  # is a prompt's text as long as itself? Else padded to `text_length`
    max_shift = 1.15  # of `calculate_shift`, where the scheduler's config names none
    solver = "euler"  # of the plain pipeline, in diffrl's names
    known: tuple[Known, ...] = ()
    counted = True  # can `diffrl doctor` count it, on tensors without values but for the layout's? See `counting`
    multiple = 16  # sides of pictures are multiples of so many pixels, in the known models
    evidence = "tiny"  # what it was tried on: tiny (random weights, in the tests), true size, trained
    guidance_rule = "classifier-free"  # in words, for the support table
    restrictions: tuple[str, ...] = ()
    layers = 0  # of the text encoder per token; 0: embeddings are (B, T, D)
    autoencoders: tuple[str, ...] = ("AutoencoderKL",)  # diffusers' classes whose latents `to_vae` knows

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        self.pipe, self.network, self.vae = pipe, getattr(pipe, self.denoiser), pipe.vae
        parts = ("text_encoder", *(f"text_encoder_{i}" for i in range(2, 5)))
        self.text_encoders: list[nn.Module] = [part for n in parts if (part := getattr(pipe, n, None)) is not None]
        self.process: Process = FlowMatching()
        self.max_length = self.text_length if max_sequence_length is None else max_sequence_length
        self.plain_call: Mapping[str, Any] = {"max_sequence_length": self.max_length}
        self.check_meaning()
        self.solver = solver_of(pipe.scheduler) or self.solver
        self.scale = self.pixels_per_latent()
        self.latent_shape: tuple[int, int, int]
        self.set_size(resolution)

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: Resolution = None) -> Any:
        """From a folder in diffusers' format or a hub id, whose model_index.json is `index`."""
        pipe = load_pipeline(getattr(diffusers, index["_class_name"]), source, index, dtype)
        return cls(pipe, resolution, settings_of(source).get("max_sequence_length"))

    def check_meaning(self) -> None:
        """UserError if the model's scheduler, network or autoencoder mean something else than this family computes."""
        known_flow(self.pipe)
        known_latents(self.pipe, self.denoiser, self.autoencoders, self.channels(), self.vae_channels())

    # ---- sizes, from configs

    def set_size(self, resolution: Resolution) -> None:
        """Draw pictures of this size from now on. A family that overrides this sets what else depends on the size."""
        size = latent_size(resolution, self.own_side(), self.scale, self.patch)
        self.latent_shape = (self.channels(), *size)

    def resized(self, resolution: Resolution) -> Self:
        """The same modules for pictures of another size."""
        other = copy.copy(self)
        other.set_size(resolution)
        return other

    def pixels_per_latent(self) -> int:
        """Pixels per side of one latent."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def own_side(self) -> int:
        """Latents per side of the model's own pictures."""
        return self.default_side

    def channels(self) -> int:
        """C of the latents that are sampled."""
        return self.network.config.in_channels

    def vae_channels(self) -> int:
        """C of the autoencoder's latents, in the form that is sampled."""
        config = self.vae.config
        return config.latent_channels if "latent_channels" in config else config.z_dim

    @property
    def tokens(self) -> int:
        """Image tokens of one picture."""
        _, height, width = self.latent_shape
        return (height // self.patch) * (width // self.patch)

    @property
    def text_shape(self) -> tuple[int, int, int]:
        """Of one prompt's conditioning: tokens, their width, the pooled embedding's width; the most there can be."""
        return self.max_length, self.network.config.joint_attention_dim, 0

    def reader(self) -> tuple[Any, int] | None:
        """The tokenizer that reads the most of a prompt, and how many tokens; None where none is loaded."""
        names = ("tokenizer", *(f"tokenizer_{i}" for i in range(2, 5)))
        parts = [part for name in names if (part := getattr(self.pipe, name, None)) is not None]
        tokenizers = [getattr(part, "tokenizer", part) for part in parts]  # of a processor
        # CLIP's reads what it was trained on, whatever the pipeline is asked for.
        limits = [
            part.model_max_length if isinstance(part, CLIPTokenizer) else min(part.model_max_length, self.max_length)
            for part in tokenizers
        ]
        return max(zip(tokenizers, limits, strict=True), key=lambda pair: pair[1], default=None)

    def blank(self, rows: int, dtype: torch.dtype) -> Conditioning:
        """A conditioning of the largest shape, with nothing in it: what memory is counted with."""
        tokens, width, pooled = self.text_shape
        shape = (rows, tokens, self.layers, width) if self.layers else (rows, tokens, width)
        return Conditioning(torch.empty(shape, dtype=dtype), torch.empty(rows, pooled, dtype=dtype))

    def counting(self) -> AbstractContextManager[None]:
        """Inside, the network runs on tensors without values, but for masks and positions (`diffrl.memory.layout`)."""
        return nullcontext()

    # ---- prediction

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        return self.process.from_velocity(x_t, output, t)

    def guide(self, positive: Tensor, negative: Tensor, guidance: float, t: Tensor) -> Tensor:
        """Classifier-free guidance (Ho & Salimans 2207.12598)."""
        return negative + guidance * (positive - negative)

    # ---- schedule

    def mu(self, steps: int) -> float:
        """By how much the schedule is shifted, where the scheduler asks for it."""
        return schedule_shift(self.pipe.scheduler.config, self.tokens, self.max_shift)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        # What the pipelines pass: evenly spaced down to 1 / steps, then shifted by the scheduler.
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device="cpu", mu=self.mu(steps))
        return scheduler.sigmas.float()

    # ---- the autoencoder

    def to_vae(self, latents: Tensor) -> Tensor:
        """What the autoencoder decodes, from latents (B, C, h, w)."""
        config = self.vae.config
        return latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)

    def from_vae(self, decoded: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1], from what the autoencoder returns."""
        return decoded

    def to_encoder(self, images: Tensor) -> Tensor:
        """What the autoencoder encodes, from images (B, 3, H, W) in [-1, 1]."""
        return images

    def from_encoder(self, encoded: Tensor) -> Tensor:
        """Latents (B, C, h, w), from what the autoencoder returns: the inverse of `to_vae`."""
        config = self.vae.config
        return (encoded - (getattr(config, "shift_factor", None) or 0.0)) * config.scaling_factor

    # ---- diffusers' side

    def plain_latents(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) in the form that a plain pipeline takes as `latents`."""
        return latents

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        """What a plain pipeline must be told for this guidance; 1 is none."""
        return {"guidance_scale": guidance}

    def plain_arguments(self, prompts: Sequence[str], latents: Tensor, guidance: float) -> dict[str, Any]:
        """Arguments with which `pipe(...)` makes the same pictures from the same noise; the steps are the caller's."""
        height, width = (side * self.scale for side in latents.shape[-2:])
        return {
            "prompt": list(prompts),
            "latents": self.plain_latents(latents),
            "height": height,
            "width": width,
            "output_type": "pt",
            **self.plain_guidance(guidance, len(prompts)),
            **self.plain_call,
        }

    def prepare_plain(self, pipe: Any) -> None:
        """What must be set on a plain pipeline, beside its arguments, for pictures of this size."""

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        words = {f"{self.denoiser}_lora_layers": state, f"{self.denoiser}_lora_adapter_metadata": metadata}
        type(self.pipe).save_lora_weights(directory, weight_name=file, **words)
