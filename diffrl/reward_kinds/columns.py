"""Rewards that answer with several named columns: one request, and each column a reward of its own.

A judge that is asked for text, quality and composition in one request answers with a row of numbers, NaN where one does
not apply to the image. An entry of a config takes one column (`column: text`), with a weight and a shape of its own;
entries with the same plugin and arguments share one reward, which a batch of images is sent to once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.rewards.kinds import Asked
from diffrl.rewards.protocol import Metadata, Reward, ability

SINGLE = ("groupwise", "batchwise", "asks", "learns")  # abilities that go with one column alone


class Column(Asked):
    """The option `column: NAME`: that column of `reward`, whose `columns` name those of its answers (B, C).

    Raises `UserError` for a column that there is not, and for a reward that cannot have any.
    """

    columns = None  # this is one

    def __init__(self, reward: Reward, column: str, entry: object = None) -> None:
        super().__init__(reward)
        names = list(ability(reward, "columns") or ())
        if not names:
            raise UserError(f'column: "{column}", but the reward "{reward.name}" has one score alone; leave it out')
        if column not in names:
            raise UserError(f'column: the reward "{reward.name}" has no column "{column}"{nearest(column, names)}')
        if held := [one for one in SINGLE if ability(reward, one)]:
            raise UserError(f'column: the reward "{reward.name}" declares `{held[0]}`, which has no columns')
        self.index, self.width = names.index(column), len(names)

    @property
    def source(self) -> object:
        """The reward of all columns."""
        return self.reward

    def scores(self, answers: Tensor) -> Tensor:
        """(B,) of (B, C), NaN where the column does not apply."""
        return answers[:, self.index]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """(B,) of images (B, 3, H, W) in [0, 1]; NaN where the column does not apply."""
        return self.scores(self.reward(images, prompts, metadata))
