"""What a family of pipelines answers, as a type: `diffrl.families.family` has the defaults, `Policy` does the rest.

Symbols (shapes): as in `diffrl.policy.base`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from diffrl.forward import Prediction, Process
    from diffrl.policy.conditioning import Conditioning


class Backbone(Protocol):
    """What differs from one family of pipelines to the next, see `diffrl.families.family`. `Policy` does the rest."""

    targets: tuple[str, ...]  # names of the attention projections, the default of lora.targets
    dead_targets: tuple[str, ...]  # full names among them whose output the network never uses
    folded: tuple[str, ...]  # how names of layers begin that see a row for each token of the text, sample by sample
    classifier_free: bool  # guidance needs a second row with the empty prompt; else `forward` hands it to the network
    empty: str | None  # the text of that row; None: `encode(None)` says how it is encoded
    pipe: Any  # the diffusers pipeline, on the CPU
    network: nn.Module  # the denoiser that carries the LoRA
    vae: Any  # the autoencoder
    text_encoders: list[nn.Module]
    process: Process
    latent_shape: tuple[int, int, int]  # (C, h, w)
    scale: int  # pixels per side of one latent
    counted: bool  # can `diffrl doctor` count it, inside of `counting`?
    own_lengths: bool  # is a prompt's text as long as itself? Else all are padded to one length
    max_length: int  # tokens that are read of a prompt
    solver: str  # the plain pipeline's, in diffrl's names
    plain_call: Mapping[str, Any]  # what a plain `pipe(...)` must be told to give the same picture

    @property
    def text_shape(self) -> tuple[int, int, int]:
        """Of one prompt's conditioning: tokens (the most), their width, the pooled embedding's width."""

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        """One prompt, without padding where the network takes a mask."""

    def blank(self, rows: int, dtype: torch.dtype) -> Conditioning:
        """A conditioning of the largest shape, with nothing in it."""

    def counting(self) -> AbstractContextManager[None]:
        """Inside, the network runs on tensors without values, but for masks and positions."""

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        """The network's own output for the rows, of its own kind (velocity, as d x_t / dt, or noise) and type."""

    def guide(self, positive: Tensor, negative: Tensor, guidance: float, t: Tensor) -> Tensor:
        """The guided output from those with the prompt and with the empty one, fp32; guidance 1 is `positive`."""

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        """All three forms from the network's output; everything fp32."""

    def timesteps(self, steps: int) -> Tensor:
        """(steps + 1,) noise levels of the pipeline's own scheduler, last 0."""

    def to_vae(self, latents: Tensor) -> Tensor:
        """What the autoencoder decodes, from latents (B, C, h, w)."""

    def from_vae(self, decoded: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1], from what the autoencoder returns."""

    def to_encoder(self, images: Tensor) -> Tensor:
        """What the autoencoder encodes, from images (B, 3, H, W) in [-1, 1]."""

    def from_encoder(self, encoded: Tensor) -> Tensor:
        """Latents (B, C, h, w), from what the autoencoder returns: the inverse of `to_vae`."""

    def plain_arguments(self, prompts: Sequence[str], latents: Tensor, guidance: float) -> dict[str, Any]:
        """Arguments with which a plain `pipe(...)` makes the same pictures from the same noise."""

    def prepare_plain(self, pipe: Any) -> None:
        """What must be set on a plain pipeline, beside its arguments, for pictures of this size."""

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        """Write `directory/file` through the pipeline's own `save_lora_weights`."""
