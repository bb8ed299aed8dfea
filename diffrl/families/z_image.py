"""Z-Image and Z-Image-Turbo.

The network is called with 1 - t, says minus the velocity, and takes a list of pictures and a list of texts, each of
its own length; it pads them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning


class ZImage(Family):
    """The family's part of a policy (see `diffrl.families.family`).

    The plain pipeline adds `guidance_scale` times the difference to the conditional prediction: its 4 is 5 here, and
    its 0 is 1, none.
    """

    targets = tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    own_lengths = True
    known = (
        Known("Tongyi-MAI/Z-Image", 50, 6.0, "the plain pipeline's guidance_scale 5"),
        Known("Tongyi-MAI/Z-Image-Turbo", 8, 1.0, "distilled, no guidance"),
    )
    guidance_rule = "classifier-free; the plain pipeline counts one less"

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.cap_feat_dim, 0

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        (row,), _ = self.pipe.encode_prompt([prompt], device, False, max_sequence_length=self.max_length)
        return Conditioning(row[None], row.new_zeros(1, 0), torch.tensor([len(row)]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        dtype = cond.embeds.dtype
        pictures = list(x_t.to(dtype).unsqueeze(2).unbind(0))
        output = network(pictures, 1 - t, cond.rows(), return_dict=False)[0]
        return -torch.stack(list(output)).squeeze(2)

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        return {"guidance_scale": guidance - 1}
