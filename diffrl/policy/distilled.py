"""A LoRA that becomes part of the model before anything else: what makes a model its few-step form.

Many distilled models are not weights of their own but a LoRA (LCM, Hyper-SD, FLUX.1-Turbo, Qwen-Image-Lightning). It is
merged into the weights once, by diffusers, and costs nothing afterwards; the trained LoRA comes on top of it.
"""

from __future__ import annotations

from typing import Any

from diffusers.utils import logging
from safetensors import SafetensorError

from diffrl.errors import UserError, in_one_line
from diffrl.resources import find_merge


def merge_lora(backbone: Any, name: str) -> None:
    """Add the LoRA to the weights of the model's network (and of its text encoders, if it is also for them), for good.

    Raises:
        UserError: there is no such LoRA, it cannot be read, or it does not fit.
    """
    source, file = find_merge(name)
    pipe = backbone.pipe
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # most such LoRAs have nothing for the text encoders, which is no cause for a warning
    try:
        pipe.load_lora_weights(source, **({} if file is None else {"weight_name": file}))
        parts = [part for part, module in pipe.components.items() if getattr(module, "peft_config", None)]
        if backbone.denoiser not in parts:
            raise UserError(f'"{name}" has no layer of {type(backbone.network).__name__}')
        pipe.fuse_lora(components=parts)
        pipe.unload_lora_weights()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f'"{name}" cannot be merged into the model: {in_one_line(error)}') from None
    finally:
        logging.set_verbosity(level)
