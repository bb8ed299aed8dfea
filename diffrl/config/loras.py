"""Are the LoRAs of a config there, and do they fit together? Loaded where a config names one."""

from __future__ import annotations

from typing import Any

from diffrl.config.base import Problem
from diffrl.errors import UserError
from diffrl.lora_files import find_lora, weighted
from diffrl.records.drawing import trained_at


def check_given(config: Any) -> None:
    """Problem where a LoRA of the section `lora` is not there, or is of a run with others merged than this one."""
    names = {"lora.merge": [weighted(one)[0] for one in config.lora.merge], "lora.start": [config.lora.start]}
    for key, name in ((key, name) for key, several in names.items() for name in several if name is not None):
        try:
            find_lora(name)
        except UserError as error:
            raise Problem(key, str(error)) from None
    over = trained_at(config.lora.start, config.model).get("merge") if config.lora.start is not None else None
    if over is not None and over != config.lora.merge:
        text = f"{config.lora.start} was trained over merged LoRAs: set lora.merge to [{', '.join(over)}]"
        raise Problem("lora.start", text)
