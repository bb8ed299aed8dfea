"""What an evaluation reports beside scores, where a reward or the drawing model's world declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.plugins import by_package, load

if TYPE_CHECKING:
    from diffrl.prompts import Prompt


class Reported:
    """Looks at the images of one evaluation. A package publishes a subclass, of (judges, prompts, world, images of each
    prompt), in the group `diffrl.reported` under the name of what rewards or a world declare.

    names: of its M columns.
    """

    names: Sequence[str] = ()

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B, M) on the CPU of a batch (B, 3, H, W) in [0, 1]; NaN where there is nothing to say of an image."""
        return torch.empty(len(images), 0)

    def figures(
        self, prompts: Sequence[Prompt], first: int, total: int, together: Callable[[Tensor], Tensor]
    ) -> Mapping[str, float]:
        """Of all images, by name, when all of this process's `prompts` were seen, which stand from `first` on among
        `total`. together: the sum of a tensor over processes; all come to it."""
        return {}


def find_reported(judges: Mapping[str, Any], prompts: Sequence[Prompt], world: Any, per_prompt: int) -> list[Reported]:
    """What the judges, by name, and the world, or None, have to report of an evaluation of these prompts."""
    owners = [*judges.values(), world]
    names = (name for name in sorted(by_package("reported")) if any(getattr(one, name, None) for one in owners))
    return [load("reported", name)(judges, prompts, world, per_prompt) for name in names]
