"""What a model's files must say for latents and predictions to mean what a family computes; else it is refused.

A scheduler, a UNet or an autoencoder of another kind loads without a word, and its pictures look like pictures, but
rollouts and losses would be those of a model that was never trained. What is not known to be exact is refused by name.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from diffrl.errors import UserError

log = logging.getLogger(__name__)

SCHEDULER = "scheduler/scheduler_config.json"
FLOW_MATCHING = ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler")
# Solvers that take flow matching's levels where their config says so.
EITHER = (
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
)
# Of these our step is the very same, as long as no field of `SOLVER` is another than the class's own.
EXACT = {
    "FlowMatchEulerDiscreteScheduler": "euler",
    "DPMSolverMultistepScheduler": "dpm2",
    "DDIMScheduler": "ddim",
    "DDIMParallelScheduler": "ddim",
    "EulerDiscreteScheduler": "ddim",
}
BETAS = ("beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr")
UNREAD = ("dynamic_thresholding_ratio", "clip_sample_range", "sample_max_value")  # without thresholding and clipping
SHIFTS = ("use_dynamic_shifting", "time_shift_type")
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
SPACED = ("timestep_spacing", "steps_offset", "set_alpha_to_one", "skip_prk_steps", "original_inference_steps")
# Fields whose every value is drawn as the plain pipeline draws it; of any other a scheduler has its class's own value.
FLOW_FIELDS = {
    *("shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "shift_terminal"),
    *(*SHIFTS, *SPACINGS),
}
EITHER_FIELDS = {
    *("flow_shift", "shift_terminal", "use_flow_sigmas", "prediction_type"),
    *(*SHIFTS, *BETAS, *UNREAD, *SPACED),
}
# Of the step between two levels: another value is another solver of the same process.
SOLVER = {
    *("algorithm_type", "solver_order", "solver_type", "lower_order_final", "euler_at_final", "final_sigmas_type"),
    *("lambda_min_clipped", "variance_type", "predict_x0", "disable_corrector", "solver_p", "predictor_order"),
    *("corrector_order", "tau_func", "timestep_scaling"),
}


def known_flow(pipe: Any) -> None:
    """UserError unless the pipeline's scheduler draws a flow-matching model, x_t = (1 - t) x_0 + t eps."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    # Pipelines divide the network's t by 1000; inverted levels rise.
    refuse_others(SCHEDULER, config, {"num_train_timesteps": 1000, "invert_sigmas": False})
    if config.get("stochastic_sampling"):
        text = f"{SCHEDULER}: stochastic_sampling true draws fresh noise at each step"
        refuse(text, "stochastic_sampling false, with rollout.sampler renoise for such steps")
    if name in FLOW_MATCHING:
        refuse_unread(pipe.scheduler, FLOW_FIELDS)
        return
    if name not in EITHER:
        refuse(f"{SCHEDULER}: {name} is not supported with a flow-matching model", FLOW_MATCHING[0])
    plain = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "thresholding": False}
    for key, value in plain.items():
        if (given := config.get(key)) != value:
            text = f"{SCHEDULER}: {name} draws a flow-matching model with {key} {as_yaml(value)}, here {as_yaml(given)}"
            refuse(text, f"{key} {as_yaml(value)}")
    refuse_unread(pipe.scheduler, EITHER_FIELDS)


def refuse_unread(scheduler: Any, read: set[str]) -> None:
    """UserError for a field that is not `read`, known to us or not, with another value than the scheduler's class's."""
    defaults = inspect.signature(type(scheduler).__init__).parameters
    plain = {key: one.default for key, one in defaults.items() if key not in read and key in scheduler.config}
    refuse_others(SCHEDULER, scheduler.config, plain)


def solver_of(scheduler: Any) -> str | None:
    """Our solver whose steps are the scheduler's; None where there is none."""
    name = type(scheduler).__name__
    defaults = inspect.signature(type(scheduler).__init__).parameters
    fields = (key for key in SOLVER - {"lambda_min_clipped", "variance_type"} if key in defaults)
    if name in EXACT and all(scheduler.config.get(key) == defaults[key].default for key in fields):
        return EXACT[name]
    return None


def say_solver(backbone: Any) -> None:
    """One line where the plain pipeline's steps are others than the solver's that draws here."""
    if solver_of(backbone.pipe.scheduler) is None:
        text = "model: %s: %s is drawn by the solver %s here: the same network and noise levels, other steps between"
        log.warning(text, SCHEDULER, type(backbone.pipe.scheduler).__name__, backbone.solver)


def known_latents(pipe: Any, denoiser: str, classes: tuple[str, ...], channels: int, latent: int) -> None:
    """UserError if the autoencoder is of another class, or has other latents than the network's input and output."""
    name = type(pipe.vae).__name__
    if name not in classes:
        refuse(f"vae/config.json: {name} is no autoencoder of a {type(pipe).__name__} here", ", ".join(classes))
    for key in {"scaling_factor", "shift_factor"} & set(pipe.vae.config):
        value = pipe.vae.config[key]
        plain = isinstance(value, int | float) and math.isfinite(value) and (value or key == "shift_factor")
        if not plain and (value is not None or key == "scaling_factor"):
            refuse(f"vae/config.json: {key} {as_yaml(value)}", "a number")
    if channels != latent:
        text = f"a network with {channels} input channels for {latent} latent ones is not text-to-image"
        raise UserError(f"model: {text} (inpainting, editing and control models are not supported)")
    network = getattr(pipe, denoiser)
    outputs = network.config.get("out_channels")
    if outputs not in (None, channels, network.config.in_channels, 2 * channels):
        refuse(f"{denoiser}/config.json: out_channels {outputs}", f"out_channels {channels}")


def falling(scheduler: str, timesteps: Callable[[int], Tensor], steps: int) -> Tensor:
    """The levels of `timesteps`, where they are steps + 1 numbers that fall from at most 1 to 0.

    Raises:
        UserError: where they are not, as with Heun's, which has each level twice; the model's own scheduler is named.
    """
    try:
        levels = timesteps(steps)
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {SCHEDULER}: {scheduler} has no levels for {steps} steps ({error})") from None
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
            refuse(f"{file}: {key} {as_yaml(given)} is not supported with this family", f"{key} {as_yaml(value)}")


def as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def refuse(text: str, right: str) -> None:
    raise UserError(f"model: {text}; supported: {right}")
