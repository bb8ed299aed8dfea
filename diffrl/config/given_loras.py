"""The LoRAs that a config's section `lora` names, to be merged or to start from: whether they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffrl.config.base import Problem
from diffrl.errors import UserError
from diffrl.lora_files import find_lora, lora_file, weighted
from diffrl.records.drawing import trained_at


def check_given(config: Any) -> None:
    """Problem where a LoRA of the section `lora` is not there, or is of a run with others merged than this one."""
    if "orthogonal" in config.lora.kind.split("+"):
        ranks = config.lora.rank.values() if isinstance(config.lora.rank, dict) else [config.lora.rank]
        if config.optimise.precision != "fp32" or any(rank % 2 for rank in ranks):
            raise Problem("lora.kind", "orthogonal begins without effect at even ranks and in fp32 only; use kaiming")
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


def files_of(lora: Any) -> dict[str, Path | str]:
    """The files of a section `lora`: a resume must find the same."""
    if not lora.merge and lora.start is None:
        return {}
    named = {f"lora.merge (file {number})": weighted(one)[0] for number, one in enumerate(lora.merge, 1)}
    named |= {} if lora.start is None else {"lora.start (file)": lora.start}
    return {key: lora_file(name) for key, name in named.items()}
