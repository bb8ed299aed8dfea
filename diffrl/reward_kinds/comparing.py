"""Rewards that compare images: of a group, in one call of them all; or of a whole batch, where an image's score is what
it does for all images of an epoch together (DRAGON).

Of a batch each process describes its own images by a row of numbers, the rows of all processes are gathered, and each
process asks for the scores of its own images among all. So the scores are the same for any number of processes.

Shapes: N images over all processes, n of them here, W numbers of a description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from diffrl.errors import in_one_line
from diffrl.rewards.answers import checked, judged
from diffrl.rewards.kinds import Asked, Phase
from diffrl.rewards.protocol import Metadata, Reward, RewardError


class Groupwise(Asked):
    """`groupwise = True`: images of one group need not be neighbours among those of the phase."""

    when, whole, compares = "finished", True, "the images of a group"

    def finish(self, phase: Phase) -> Tensor:
        """(N,), NaN where it does not apply."""
        assert phase.groups is not None, "a scorer refuses images without groups"
        scores = torch.full((len(phase.images),), torch.nan)
        groups = [(phase.groups == group).nonzero().flatten().tolist() for group in phase.groups.unique()]
        groups = [groups[i] for i in judged(self.reward, [phase.prompts[rows[0]] for rows in groups])]
        for rows, scored in zip(groups, phase.calls(groups), strict=True):
            scores[rows] = scored
        return scores


class Batchwise(Reward, Protocol):
    """The protocol of a reward with `batchwise = True`; `__call__(images, ...)` takes its images as the whole batch.

    width: W.
    """

    width: int

    def describe(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """All that the batch's figure needs of each image: (B, W) of images (B, 3, H, W) in [0, 1]."""
        ...

    def gains(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
        """Scores (w,) of the images `wanted` (w,) int64 among all that `rows` (N, W) describe, more being better, and
        the figure of the whole batch. Called on every process, where `wanted` may be empty."""
        ...


class Described(Asked):
    """Asked for descriptions, of which the scores of a phase's images come."""

    when, collective, compares, fixed = "finished", True, "all images of a batch", "judges whole batches"

    def __init__(self, reward: Any) -> None:
        super().__init__(reward)
        self.width = reward.width

    def ask(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> object:
        """(B, W), to be checked."""
        return self.reward.describe(images, prompts, metadata)

    def finish(self, phase: Phase) -> Tensor:
        """(N,) among the images of all processes, NaN where it does not apply; `figure` is the batch's.

        Raises `RewardError` for what `gains` raises and for scores that are none.
        """
        rows, name = phase.each(), phase.name
        scores, self.figure = torch.full((len(rows),), torch.nan), float("nan")
        with phase.guarded():
            whole, first = (rows, 0) if phase.everyone is None else phase.everyone(rows)
            known = ~whole.isnan().any(1)
            mine = known[first : first + len(rows)]
            if not known.any():
                return scores
            place = known.cumsum(0) - 1  # among those that the reward judges
            try:
                found, figure = self.reward.gains(whole[known], place[first : first + len(rows)][mine])
            except RewardError:
                raise
            except Exception as error:
                text = f'reward "{name}" failed on {int(known.sum())} images with {in_one_line(error)}'
                raise RewardError(text) from error
            if mine.any():
                scores[mine] = checked(found, name, [phase.prompts[i].text for i in mine.nonzero().flatten().tolist()])
        self.figure = float(figure)
        return scores
