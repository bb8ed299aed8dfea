"""The config's sections of what a rollout's forwards may leave out, and of which images are worth all of them."""

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


class ScoutSection(Section):
    """Sol-RL's scouts (arXiv 2604.06916)."""

    images: int = key(96, "candidates of each prompt; rollout.group_size of them are drawn in full", "images", ge=2)
    steps: int = key(6, "sampling steps of a candidate", "steps", ge=1)

    def check_with(self, config: Any) -> None:
        """Raise Problem where candidates would say nothing of the images, or nobody needs what they say."""
        from diffrl.rewards.registry import declares

        rollout, where = config.rollout, "rollout.scout"
        if rollout.facts.stochastic:
            text = f'"{rollout.sampler}" draws noise on the way, of which the candidates of {where} say nothing'
            raise Problem("rollout.sampler", f"{text}: use dpm2 or euler")
        if config.method.advantages == "none":
            raise Problem(where, f'objective "{config.method.name}" compares no images of a group: leave it out')
        if self.images < rollout.group_size:
            text = f"{self.images} candidates for groups of {rollout.group_size} (rollout.group_size)"
            raise Problem(f"{where}.images", text)
        if self.steps > rollout.steps:
            text = f"{self.steps} steps of a candidate, but an image has {rollout.steps} (rollout.steps)"
            raise Problem(f"{where}.steps", text)
        for name, entry in config.rewards.items():
            if declares(entry.plugin or name, "groupwise"):
                raise Problem(where, f'the reward "{name}" judges whole groups, and scouts are judged one by one')
            if entry.offload == "apart":
                text = "apart: it scores after the sampling, and scouts are scored before it; true"
                raise Problem(f"rewards.{name}.offload", text)
