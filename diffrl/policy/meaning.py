"""What a model's files must say for latents and predictions to mean what a family computes; else it is refused.

A scheduler, a UNet or an autoencoder of another kind loads without a word, and its pictures look like pictures, but
rollouts and losses would be those of a model that nobody trained. What is not known to be exact is named and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from diffrl.errors import UserError

SCHEDULER = "scheduler/scheduler_config.json"
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
FLOW_MATCHING = ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler")
# Solvers that take flow matching's levels where their config says so.
EITHER = (
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
)


def known_flow(pipe: Any) -> None:
    """UserError unless the pipeline's scheduler draws a flow-matching model, x_t = (1 - t) x_0 + t eps."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    refuse_others(SCHEDULER, config, {"num_train_timesteps": 1000})  # pipelines divide the network's t by 1000
    if name in FLOW_MATCHING:
        return
    if name not in EITHER:
        _refuse(f"{SCHEDULER}: {name} is not supported with a flow-matching model", FLOW_MATCHING[0])
    if not config.get("use_flow_sigmas") or config.get("prediction_type") != "flow_prediction":
        words = "use_flow_sigmas true and prediction_type flow_prediction"
        _refuse(f"{SCHEDULER}: {name} draws a flow-matching model with", words)


def known_diffusion(pipe: Any) -> None:
    """UserError unless scheduler and UNet are those of a plain DDPM model in noise or velocity prediction."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    if name not in VARIANCE_PRESERVING:
        _refuse(f"{SCHEDULER}: {name} has another process than DDPM's", "DDIMScheduler, EulerDiscreteScheduler")
    kind = config.get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction"):
        _refuse(f'{SCHEDULER}: prediction_type "{kind}"', "epsilon, v_prediction")
    if config.get("rescale_betas_zero_snr") and kind == "epsilon":
        text = "rescale_betas_zero_snr with prediction_type epsilon divides by zero at its first step"
        _refuse(f"{SCHEDULER}: {text}", "v_prediction, or rescale_betas_zero_snr false")
    plain: Mapping[str, Any] = {
        "clip_sample": False,
        "thresholding": False,
        "use_flow_sigmas": False,
        "sigma_min": None,
        "sigma_max": None,
        "timestep_type": "discrete",
    }
    refuse_others(SCHEDULER, config, plain)
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


def known_autoencoder(pipe: Any, classes: tuple[str, ...], channels: int, latent: int) -> None:
    """UserError if the autoencoder is of another class, or has other latents than the network's input."""
    name = type(pipe.vae).__name__
    if name not in classes:
        _refuse(f"vae/config.json: {name} is no autoencoder of a {type(pipe).__name__} here", ", ".join(classes))
    if channels != latent:
        text = f"a network with {channels} input channels for {latent} latent ones is not text-to-image"
        raise UserError(f"model: {text} (inpainting, editing and control models are not supported)")


def falling(scheduler: str, timesteps: Callable[[int], Tensor], steps: int) -> Tensor:
    """The levels of `timesteps`, where they are steps + 1 numbers that fall from at most 1 to 0.

    Raises:
        UserError: where they are not, as with Heun's, which has each level twice; the model's own scheduler is named.
    """
    try:
        levels = timesteps(steps)
    except TypeError as error:
        raise UserError(f"model: {SCHEDULER}: {scheduler} takes no levels from outside ({error})") from None
    if len(levels) == steps + 1 and levels[0] <= 1 and levels[-1] >= 0 and bool((levels.diff() < 0).all()):
        return levels
    text = f"{steps} steps of {scheduler} are not {steps} falling noise levels: {_numbers(levels)}"
    raise UserError(f"model: {SCHEDULER}: {text}; supported: {', '.join(FLOW_MATCHING)}")


def _numbers(levels: Tensor) -> str:
    shown = ", ".join(f"{level:.3g}" for level in levels[:6].tolist())
    return f"{shown}{', ...' if len(levels) > 6 else ''}"


def refuse_others(file: str, config: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """UserError for a key of the model's `file` that has another value than the only one that is supported."""
    for key, value in plain.items():
        if (given := config.get(key, value)) != value:
            _refuse(f"{file}: {key} {_yaml(given)} is not supported with this family", f"{key} {_yaml(value)}")


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _refuse(text: str, right: str) -> None:
    raise UserError(f"model: {text}; supported: {right}")
