"""Stable Diffusion 1.x, 2.x and SDXL: a UNet that predicts noise or velocity on a variance-preserving path.

`timestep` of the UNet is the training grid's step, t T - 1, as a float: never truncated. A latent at t = 1 is noise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import channelwise
from diffrl.forward import Prediction, VariancePreserving
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.meaning import (
    BETAS,
    SCHEDULER,
    SOLVER,
    SPACED,
    SPACINGS,
    UNREAD,
    known_latents,
    refuse,
    refuse_others,
    refuse_unread,
)
from diffrl.policy.pipelines import Resolution, load_pipeline

# Solvers of one process: x_t = alpha_t x_0 + sigma_t eps on the training grid, whatever they do between its steps.
VARIANCE_PRESERVING = (
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
# Those that step by T / steps wherever their timesteps are.
EVEN = ("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler")
DIFFUSION_FIELDS = {"num_train_timesteps", "prediction_type", *BETAS, *UNREAD, *SPACED, *SPACINGS}
WITHOUT = {"safety_checker": None, "requires_safety_checker": False}  # of 1.x: nothing that is trained here


class StableDiffusion(Family):
    """The family's part of a policy (see `diffrl.families.family`), with SDXL's second text encoder or without.

    SDXL has a pooled embedding, too, and is told the picture's size: an uncropped one of the latent's own size.

    Noise levels are those of the pipeline's own scheduler: grid, spacing and offset are the model's. The last step
    ends on the clean latent (`set_alpha_to_one`); where the pipeline's config ends on the first grid step instead, as
    Stable Diffusion 1.5's does, pictures differ by less than 1 of 255.
    """

    denoiser = "unet"
    solver = "ddim"
    multiple = 8
    known = (
        Known("stable-diffusion-v1-5/stable-diffusion-v1-5", 50, 7.5),
        Known("stabilityai/stable-diffusion-xl-base-1.0", 50, 5.0),
    )
    restrictions = ("samplers: dpm2 and ddim",)
    patch = 1
    targets: tuple[str, ...] = tuple(
        f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        super().__init__(pipe, resolution)
        self.plain_call = {}
        self.xl = len(self.text_encoders) > 1
        self.process: VariancePreserving = VariancePreserving(pipe.scheduler.alphas_cumprod)
        self.kind = pipe.scheduler.config.prediction_type

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: Resolution = None) -> Any:
        """From a folder in diffusers' format or a hub id, whose model_index.json is `index`."""
        name = index["_class_name"]
        without = WITHOUT if name == "StableDiffusionPipeline" else {}
        return cls(load_pipeline(getattr(diffusers, name), source, index, dtype, **without), resolution)

    def check_meaning(self) -> None:
        known_latents(self.pipe, self.denoiser, self.autoencoders, self.channels(), self.vae_channels())
        known_diffusion(self.pipe)

    def own_side(self) -> int:
        return self.network.config.sample_size

    @property
    def text_shape(self) -> tuple[int, int, int]:
        encoders: list[Any] = self.text_encoders
        pooled = encoders[1].config.projection_dim if self.xl else 0
        return encoders[0].config.max_position_embeddings, self.network.config.cross_attention_dim, pooled

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        if not self.xl:
            embeds, _ = self.pipe.encode_prompt([prompt], device, 1, False)
            return Conditioning(embeds, embeds.new_zeros(len(embeds), 0))
        embeds, _, pooled, _ = self.pipe.encode_prompt([prompt], None, device, 1, False)
        if prompt == "" and self.pipe.config.force_zeros_for_empty_prompt:  # the guidance's empty prompt, as trained
            return Conditioning(torch.zeros_like(embeds), torch.zeros_like(pooled))
        return Conditioning(embeds, pooled)

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        more = {}
        if self.xl:
            size = (x_t.shape[-2] * self.scale, x_t.shape[-1] * self.scale)  # original size, crop, target size
            row = torch.tensor([*size, 0, 0, *size], dtype=x_t.dtype).to(x_t.device, non_blocking=True)
            sizes = row.expand(len(x_t), -1)
            more["added_cond_kwargs"] = {"text_embeds": cond.pooled, "time_ids": sizes}
        return network(x_t, self.process.index(t), encoder_hidden_states=cond.embeds, return_dict=False, **more)[0]

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        if self.kind == "epsilon":
            return self.process.from_eps(x_t, output, t)
        return self.process.from_velocity(x_t, output, t)

    def latents_of(self) -> tuple[Any, Any, float]:
        """Mean and standard deviation of each latent channel where SDXL's pipeline reads them, and the factor."""
        config: Any = self.vae.config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if not self.xl or mean is None or std is None:
            mean, std = [0.0], [1.0]
        return mean, std, config.scaling_factor

    def to_vae(self, latents: Tensor) -> Tensor:
        mean, std, factor = self.latents_of()
        return latents * channelwise(std, latents) / factor + channelwise(mean, latents)

    def from_encoder(self, encoded: Tensor) -> Tensor:
        mean, std, factor = self.latents_of()
        return (encoded - channelwise(mean, encoded)) * factor / channelwise(std, encoded)

    def timesteps(self, steps: int) -> Tensor:
        scheduler: Any = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(steps, device="cpu")
        # Solvers of the second order have two forwards a step; PNDM begins with more of them than its grid has.
        grid = scheduler.timesteps[:: scheduler.order].float()
        if hasattr(scheduler, "_timesteps"):
            grid = torch.from_numpy(scheduler._timesteps[::-1].copy()).float()
        levels = (grid + 1) / self.process.steps
        return torch.cat([levels, levels.new_zeros(1)])


def known_diffusion(pipe: Any) -> None:
    """UserError unless scheduler and UNet are those of a plain DDPM model in noise or velocity prediction."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    if name not in VARIANCE_PRESERVING:
        refuse(f"{SCHEDULER}: {name} has another process than DDPM's", "DDIMScheduler, EulerDiscreteScheduler")
    kind = config.get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction"):
        refuse(f'{SCHEDULER}: prediction_type "{kind}"', "epsilon, v_prediction")
    read = inspect.signature(type(pipe.scheduler).__init__).parameters  # other fields are left from another class
    if config.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" in read and kind == "epsilon":
        text = "rescale_betas_zero_snr with prediction_type epsilon divides by zero at its first step"
        refuse(f"{SCHEDULER}: {text}", "v_prediction, or rescale_betas_zero_snr false")
    if str(config.get("variance_type")).startswith("learned"):
        refuse(f"{SCHEDULER}: variance_type {config['variance_type']} is not supported", "fixed_small, null")
    if name in EVEN and config.get("timestep_spacing") == "linspace":
        text = f"timestep_spacing linspace with {name}, which steps by T / steps from wherever it is"
        refuse(f"{SCHEDULER}: {text}", "timestep_spacing leading, trailing")
    signal = pipe.scheduler.alphas_cumprod
    if not 0 < len(signal) == config["num_train_timesteps"] or not (signal.diff() < 0).all() or not signal[0] < 1:
        text = "num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas: no signal that falls from 1"
        refuse(f"{SCHEDULER}: {text}", "those of the model that was trained")
    plain: Mapping[str, Any] = {
        "clip_sample": False,
        "thresholding": False,
        "use_flow_sigmas": False,
        "sigma_min": None,
        "sigma_max": None,
        "timestep_type": "discrete",
    }
    refuse_others(SCHEDULER, config, {key: value for key, value in plain.items() if key in read})
    refuse_unread(pipe.scheduler, DIFFUSION_FIELDS | SOLVER | set(plain))
    unet = pipe.unet.config
    pooled = getattr(pipe, "text_encoder_2", None) is not None
    refuse_others(
        "unet/config.json",
        unet,
        {
            "time_cond_proj_dim": None,  # guidance as an input: a latent consistency model
            "class_embed_type": None,
            "num_class_embeds": None,
            "addition_embed_type": "text_time" if pooled else None,
            "encoder_hid_dim_type": None,
            "out_channels": unet.in_channels,  # twice as many: a learned variance
            "dual_cross_attention": False,
        },
    )
