"""A LoRA that becomes part of the model before anything else: what makes a model its few-step form.

Many distilled models are not weights of their own but a LoRA (LCM, Hyper-SD, FLUX.1-Turbo, Qwen-Image-Lightning). It is
merged into the weights once, by diffusers, and costs nothing afterwards; the trained LoRA comes on top of it.
"""

from __future__ import annotations

from typing import Any

from diffusers.utils import convert_unet_state_dict_to_peft, logging
from peft.tuners.lora import LoraLayer

from diffrl.errors import UserError, in_one_line
from diffrl.worlds import find_merge


def merge_lora(backbone: Any, name: str) -> None:
    """Add the LoRA to the weights of the model's network (and of its text encoders, if it is also for them), for good.

    Raises:
        UserError: there is no such LoRA, it cannot be read, or it does not fit.
    """
    from diffrl.hub import pinned

    source, file = find_merge(name)
    source, at = pinned(source)
    pipe = backbone.pipe
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # most such LoRAs have nothing for the text encoders, which is no cause for a warning
    words = at if file is None else {"weight_name": file, **at}
    try:
        pipe.load_lora_weights(source, **words)
        parts = [part for part, module in pipe.components.items() if getattr(module, "peft_config", None)]
        if backbone.denoiser not in parts:
            raise UserError(f'"{name}" has no layer of {type(backbone.network).__name__}')
        _check_whole(backbone, name, pipe.lora_state_dict(source, **words))
        pipe.fuse_lora(components=parts, safe_fusing=True)  # which refuses what is not finite
        pipe.unload_lora_weights()
    except UserError:
        raise
    except Exception as error:  # diffusers' and peft's own, on a file that may be anybody's
        raise UserError(f'"{name}" cannot be merged into the model: {in_one_line(error)}') from None
    finally:
        logging.set_verbosity(level)


def _check_whole(backbone: Any, name: str, state: Any) -> None:
    """UserError if the file has LoRA matrices for layers that the network lacks: diffusers leaves those out.

    `state`: what `lora_state_dict` of the pipeline returns: the tensors, with some pipelines the alphas beside them.
    """
    tensors: dict[str, Any] = state[0] if isinstance(state, tuple) else state
    prefix = f"{backbone.denoiser}."
    weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    if weights and not any("lora_A" in key for key in weights):
        weights = convert_unet_state_dict_to_peft(weights)
    wanted = {key.split(".lora_")[0] for key in weights if ".lora_" in key}
    layers = {layer for layer, module in backbone.network.named_modules() if isinstance(module, LoraLayer)}
    if odd := sorted(wanted - layers):
        some = f"{len(odd)} of its {len(wanted)} layers"
        raise UserError(f'"{name}" cannot be merged into the model: {odd[0]} has no place in it ({some})')
