"""Rewards that compare the images of a group: one call for each group, when all its images are there."""

from __future__ import annotations

import torch
from torch import Tensor

from diffrl.rewards.answers import judged
from diffrl.rewards.kinds import Asked, Phase


class Groupwise(Asked):
    """`groupwise = True`: images of one group need not be neighbours among those of the phase."""

    when, whole = "finished", True

    def finish(self, phase: Phase) -> Tensor:
        """(N,), NaN where it does not apply."""
        assert phase.groups is not None, "a scorer refuses images without groups"
        scores = torch.full((len(phase.images),), torch.nan)
        groups = [(phase.groups == group).nonzero().flatten().tolist() for group in phase.groups.unique()]
        groups = [groups[i] for i in judged(self.reward, [phase.prompts[rows[0]] for rows in groups])]
        for rows, scored in zip(groups, phase.calls(groups), strict=True):
            scores[rows] = scored
        return scores
