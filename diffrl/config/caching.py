"""The config's section of scouts: which candidates are worth all sampling steps."""

from __future__ import annotations

from typing import Any

from diffrl.config.base import Problem, Section, key


class ScoutSection(Section):
    """Sol-RL's scouts (arXiv 2604.06916)."""

    images: int = key(96, "candidates of each prompt; rollout.group_size of them are drawn in full", "images", ge=2)
    steps: int = key(6, "sampling steps of a candidate", "steps", ge=1)

    def check_with(self, config: Any) -> None:
        """Raise Problem where candidates would say nothing of the images, or nothing reads what they say."""
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
