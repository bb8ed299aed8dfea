"""The config's section of faster or smaller forms of the same computation."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from diffrl.config.base import Base, Problem, Section, key
from diffrl.plugins import load


class Engine(Section):
    attention: str = key("native", "attention kernel, by diffusers' names: native (torch's own), flash, ...")
    compile: bool = key(False, "torch.compile of the network's repeated blocks: minutes at the start, then faster")
    base: Base = key(
        "full",
        "the frozen weights of the network's blocks: int8 and fp8 take half of bf16's memory, nf4 (bitsandbytes; "
        "extra: diffrl[8bit]) a quarter; the LoRA and the arithmetic stay as they are",
    )
    optimiser: Literal["adamw", "adamw8bit"] = key(
        "adamw", "adamw8bit: moments of large matrices in 8 bits (bitsandbytes; extra: diffrl[8bit])"
    )
    tf32: bool | None = key(
        None,
        "on CUDA compute fp32 products, the autoencoder's too, in TF32: faster, with 10 bits of mantissa instead of "
        "23; null: as Flow-GRPO's code, unless optimise.precision is fp32",
    )
    deterministic: bool = key(
        False, "kernels that give the same bits each time, slower: on a GPU a resume is exact only with them"
    )
    encoders: Literal["beside", "apart"] = key(
        "beside", "apart: the network waits in main memory while the text encoders are on the device: two copies of it"
    )
    decode: int | None = key(None, "images decoded at a time; null: as many as make 2 megapixels", "images", ge=1)
    tile_vae: bool = key(False, "decode in overlapping tiles: less memory above 512 pixels, seams may show")

    def check(self, config: Any) -> None:
        if self.base != "full":
            if self.compile:
                text = f'"{self.base}" with engine.compile: not tried together; leave one of them out'
                raise Problem("engine.base", text)
            if text := self.refusal_of_base(config.optimise.precision):
                raise Problem("engine.base", text)
        if self.optimiser == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise Problem("engine.optimiser", '"adamw8bit" needs bitsandbytes: pip install "diffrl[8bit]"')

    def refusal_of_base(self, precision: str, device: str = "") -> str:
        """What `base` itself says against this precision and type of device; "" where nothing does."""
        refusal = getattr(load("engine.base", self.base), "refusal", None) if self.base != "full" else None
        return str(refusal(precision, device)) if refusal is not None else ""
