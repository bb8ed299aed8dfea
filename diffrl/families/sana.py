"""SANA: linear attention over the latents of an autoencoder that compresses 32 times to a side.

The network is called with whole steps of the training grid, in sampling and in training, as the pipeline's solver has
them. Prompts are encoded behind the pipeline's long instruction, the empty one without it; padding is masked.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning

INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


class Sana(Family):
    """The family's part of a policy (see `diffrl.families.family`).

    The pipeline's solver is DPM-Solver++(2M): `dpm2` here gives its pictures.
    """

    autoencoders = ("AutoencoderDC",)
    targets = tuple(
        f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    empty = None
    patch = 1
    text_length = 300
    solver = "dpm2"
    multiple = 32
    own_lengths = True
    known = (Known("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", 20, 4.5),)
    restrictions = ("the solver is DPM-Solver++ (dpm2), its levels are not Euler's",)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.plain_call = {**self.plain_call, "use_resolution_binning": False}

    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae.config.encoder_block_out_channels) - 1)

    def own_side(self) -> int:
        return self.network.config.sample_size

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.caption_channels, 0

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        if prompt is None:
            encoded = self.pipe.encode_prompt("", True, "", device=device, max_sequence_length=self.max_length)[2:]
        else:
            encoded = self.pipe.encode_prompt(
                prompt,
                False,
                device=device,
                max_sequence_length=self.max_length,
                complex_human_instruction=INSTRUCTION,
            )[:2]
        embeds, mask = encoded
        embeds = embeds[:, mask[0].bool()]
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        config: Any = self.network.config
        grid = t * self.pipe.scheduler.config.num_train_timesteps
        if not isinstance(self.pipe.scheduler, FlowMatchEulerDiscreteScheduler):
            grid = grid.floor()  # the pipeline's own solver has whole steps
        output = network(
            x_t,
            encoder_hidden_states=cond.embeds,
            encoder_attention_mask=cond.mask,
            timestep=grid * config.timestep_scale,
            return_dict=False,
        )[0]
        return output.chunk(2, dim=1)[0] if config.out_channels // 2 == config.in_channels else output

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(steps, device="cpu")
        return scheduler.sigmas.float()
