"""What an evaluation reports beside scores: figures of prompts' groups, and scores by parts.

P prompts of an evaluation, S sums of a source (`diffrl.rewards.reported.GroupFigures`), M parts of all breakdowns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.errors import in_one_line
from diffrl.rewards.protocol import Reward, RewardError, ability

if TYPE_CHECKING:
    from diffrl.prompts import Prompt
    from diffrl.rewards.reported import Breakdown, GroupFigures
    from diffrl.worlds import World


@dataclass
class Collected:
    """One source's readings of a process's images, in the order of its prompts. `owner`: for messages."""

    owner: str
    source: GroupFigures
    readings: list[Any] = field(default_factory=list)

    def read(self, images: Tensor, prompts: Sequence[Prompt]) -> None:
        """Note what images (B, 3, H, W) of these prompts show. RewardError if that fails."""
        try:
            self.readings += self.source.read(images, [p.text for p in prompts], [dict(p.metadata) for p in prompts])
        except Exception as error:
            raise RewardError(f"{self.owner}: its figures failed to read images with {in_one_line(error)}") from error

    def sums(self, prompts: Sequence[Prompt], first: int, total: int) -> Tensor:
        """(P, S) float64: those of this process's prompts, which stand from `first` on among `total`, and zeros.

        One row for each prompt, so that adding them up does not depend on which process had which.
        """
        each = len(self.readings) // max(len(prompts), 1)
        sums = torch.zeros(total, self.source.size, dtype=torch.float64)
        for i, prompt in enumerate(prompts):
            part = self.source.sums(prompt.text, self.readings[i * each : (i + 1) * each])
            sums[first + i] = torch.tensor(part, dtype=torch.float64)
        return sums

    def figures(self, sums: Tensor) -> dict[str, float]:
        """From the sums (P, S) of all prompts, without what cannot be said."""
        total = torch.zeros(self.source.size, dtype=torch.float64)
        for row in sums:
            total += row
        return {name: value for name, value in self.source.figures(total.tolist()).items() if value is not None}


def find_figures(judges: Mapping[str, Reward], prompts: Sequence[Prompt], world: World | None) -> list[Collected]:
    """What judges declare, and the drawing model's world, each source once: those that apply to all of the prompts."""
    declared = [(f'reward "{name}"', ability(judge, "figures")) for name, judge in judges.items()]
    sources: dict[int, Collected] = {}
    for owner, source in [*declared, *([] if world is None else [(world.name, world.figures)])]:
        if source is not None and id(source) not in sources:
            sources[id(source)] = Collected(owner, source)
    return [one for one in sources.values() if all(one.source.applies(p.text, p.metadata) for p in prompts)]


class Breakdowns:
    """The scores by parts of all judges that have some, each source once, under the name of its first judge.

    names: `JUDGE[PART]` of the M columns.
    """

    def __init__(self, judges: Mapping[str, Reward]) -> None:
        sources: dict[int, tuple[str, Breakdown]] = {}
        for name, judge in judges.items():
            if (source := ability(judge, "breakdown")) is not None:
                sources.setdefault(id(source), (name, source))
        self._sources = list(sources.values())
        self.names = [f"{name}[{part}]" for name, source in self._sources for part in source.names]

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B, M) on the CPU, NaN where a prompt says nothing of a part. RewardError if one fails."""
        texts, metadata = [prompt.text for prompt in prompts], [dict(prompt.metadata) for prompt in prompts]
        columns = [torch.empty(len(images), 0)]
        for name, source in self._sources:
            try:
                part = source(images, texts, metadata).detach().float().cpu()
            except Exception as error:
                raise RewardError(f'reward "{name}": its breakdown failed with {in_one_line(error)}') from error
            if part.shape != (len(images), len(source.names)):
                expected = (len(images), len(source.names))
                raise RewardError(f'reward "{name}": its breakdown has shape {tuple(part.shape)}, not {expected}')
            columns.append(part)
        return torch.cat(columns, dim=1)
