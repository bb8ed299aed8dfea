"""LoRAs that become part of the model before anything else: what makes a model its few-step form, or one's own.

Many distilled models are not weights of their own but a LoRA (LCM, Hyper-SD, FLUX.1-Turbo, Qwen-Image-Lightning). It is
merged into the weights once, by diffusers, and costs nothing afterwards; the trained LoRA comes on top of it.
"""

from __future__ import annotations

from typing import Any

from diffrl.errors import UserError, in_one_line
from diffrl.policy.reading import FILE, Lora, dress, quietly, read_lora


def merge_lora(backbone: Any, name: str, weight: float = 1.0) -> Lora:
    """Add the LoRA to the weights of the model's network (and of its text encoders, if it is also for them), for good.

    Raises:
        UserError: there is no such LoRA, it cannot be read, or it does not fit.
    """
    try:
        read = read_lora(name, backbone)
        network, pipe = backbone.network, backbone.pipe
        config: dict[str, Any] = {"r": read.spec.rank, "lora_alpha": read.spec.alpha, "use_dora": read.spec.dora}
        config["target_modules"] = list(read.spec.targets or ())
        with quietly():
            network.load_lora_adapter(dict(read.state), prefix=None, metadata=config, adapter_name=FILE)
            dress(backbone, read.texts, name)
            parts = [part for part, module in pipe.components.items() if getattr(module, "peft_config", None)]
            pipe.fuse_lora(components=parts, lora_scale=weight, safe_fusing=True)  # which refuses what is not finite
            pipe.unload_lora_weights()
    except UserError as error:
        raise UserError(f'"{name}" cannot be merged into the model: {error}') from None
    except Exception as error:  # diffusers' and peft's own, on a file that may be anybody's
        raise UserError(f'"{name}" cannot be merged into the model: {in_one_line(error)}') from None
    return read
