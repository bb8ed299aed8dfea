"""LoRAs that a user names: found, read in the forms that people have, merged into a model, trained on."""

from __future__ import annotations

from typing import Any


def check(config: Any) -> None:
    """Raise Problem for a LoRA of a config that is not there, or does not fit."""
    if config.lora.start is not None or config.lora.merge:
        from diffrl.loras.given import check_given

        check_given(config)
