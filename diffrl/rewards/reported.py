"""What a reward may report of images beside their scores, as types: figures of a prompt's group, a score by parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffrl.rewards.protocol import Metadata


class GroupFigures(Protocol):
    """What an evaluation reports of prompts' images as groups, such as the playground's variety: `eval/NAME`.

    Images are read one by one, the readings of a prompt's images give its part of some sums, and the sums over all
    prompts give the figures. So no image is kept, and processes that share the prompts find the same numbers to the
    bit. They are asked for where they apply to every prompt of an evaluation that draws several images of each.

    size: how many sums there are.
    """

    size: int

    def applies(self, prompt: str, metadata: Metadata) -> bool: ...

    def read(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Sequence[Any]:
        """What each of the images (B, 3, H, W) in [0, 1] shows, in any form."""
        ...

    def sums(self, prompt: str, readings: Sequence[Any]) -> Sequence[float]:
        """One prompt's part of the sums, from the readings of its images."""
        ...

    def figures(self, sums: Sequence[float]) -> Mapping[str, float | None]:
        """The figures by their names, from the sums over all prompts (float64); None: nothing can be said."""
        ...


class Breakdown(Protocol):
    """A score by parts, such as the kinds of facts that a prompt states: which of them training raised or lowered.

    names: of the M parts, in the order of the columns.
    """

    names: Sequence[str]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """(B, M) of images (B, 3, H, W) in [0, 1], higher is better; NaN where the prompt says nothing of a part."""
        ...
