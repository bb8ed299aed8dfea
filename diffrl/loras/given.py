"""Whether the LoRAs that a config's section `lora` names are there, and go together."""

from __future__ import annotations

from typing import Any

from diffrl.keys import Problem, at_key
from diffrl.lora_files import find_lora, weighted
from diffrl.loras.recorded import trained_at


def check_given(config: Any) -> None:
    """Problem where a LoRA of the section `lora` is not there, or is of a run with others merged than this one."""
    start, merge = config.lora.start, config.lora.merge
    names = {"lora.merge": [weighted(one)[0] for one in merge], "lora.start": [] if start is None else [start]}
    for key, name in ((key, name) for key, several in names.items() for name in several):
        at_key(key, find_lora, name)
    over = trained_at(start, config.model).get("merge") if start is not None else None
    if over is not None and over != merge:
        text = f"{start} was trained over merged LoRAs: set lora.merge to [{', '.join(over)}]"
        raise Problem("lora.start", text)
