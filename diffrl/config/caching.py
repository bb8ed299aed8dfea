"""The config's section of what a rollout's forwards may leave out."""

from __future__ import annotations

from typing import Any, Literal

from diffrl.config.base import Problem, Section, key


class CacheSection(Section):
    kind: Literal["off", "taylorseer", "pyramid"] = key(
        "off",
        "diffusers' caches; never with grpo. taylorseer: attention extrapolated from earlier steps; pyramid: attention "
        "taken over from the last one",
    )
    interval: int = key(2, "attention is computed in every so many-th step", "steps", ge=1)
    warmup: int = key(2, "steps that are computed whole before any is left out", "steps", ge=1)

    def check_with(self, config: Any) -> None:
        """Raise Problem where the rest of the config needs what a cache leaves out."""
        if self.kind == "off":
            return
        if config.method.on_steps:
            text = "trains on the exact log-probabilities of the rollout's steps, which a cache changes; leave it out"
            raise Problem("rollout.cache", f'objective "{config.method.name}" {text}, or use nft or crd')
        if config.engine.compile:
            raise Problem("rollout.cache", "engine.compile compiles the blocks that a cache must look into; choose one")
        if self.warmup >= config.rollout.steps:
            text = f"{self.warmup} steps are computed whole, and there are {config.rollout.steps} (rollout.steps)"
            raise Problem("rollout.cache.warmup", text)
