"""What an evaluation reports beside scores: figures of prompts' groups, and scores by parts.

P prompts of an evaluation, S sums of a source of figures, M parts of a breakdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from diffrl.errors import in_one_line
from diffrl.rewards.kinds import Reported
from diffrl.rewards.protocol import Metadata, Reward, RewardError, ability

if TYPE_CHECKING:
    from diffrl.prompts import Prompt
    from diffrl.worlds import World


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


class Figures(Reported):
    """The figures that judges declare, and the drawing model's world, each source once: those that apply to all of the
    prompts, where each of them has several images."""

    def __init__(
        self, judges: Mapping[str, Reward], prompts: Sequence[Prompt], world: World | None, per_prompt: int
    ) -> None:
        declared = [(f'reward "{name}"', ability(judge, "figures")) for name, judge in judges.items()]
        owners: dict[int, tuple[str, GroupFigures]] = {}
        for owner, source in [*declared, *([] if world is None else [(world.name, world.figures)])]:
            if source is not None and per_prompt > 1 and all(source.applies(p.text, p.metadata) for p in prompts):
                owners.setdefault(id(source), (owner, source))
        self._sources, self._per_prompt = list(owners.values()), per_prompt
        self._readings: list[list[Any]] = [[] for _ in self._sources]

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Reads the images; (B, 0). RewardError if that fails."""
        for (owner, source), readings in zip(self._sources, self._readings, strict=True):
            try:
                readings += source.read(images, [p.text for p in prompts], [dict(p.metadata) for p in prompts])
            except Exception as error:
                raise RewardError(f"{owner}: its figures failed to read images with {in_one_line(error)}") from error
        return super().__call__(images, prompts)

    def figures(
        self, prompts: Sequence[Prompt], first: int, total: int, together: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Without what cannot be said. One row of sums for each prompt, so that adding them up does not depend on which
        process had which."""
        known = dict[str, float | None]()
        for (_, source), readings in zip(self._sources, self._readings, strict=True):
            sums, each = torch.zeros(total, source.size, dtype=torch.float64), self._per_prompt
            for i, prompt in enumerate(prompts):
                part = source.sums(prompt.text, readings[i * each : (i + 1) * each])
                sums[first + i] = torch.tensor(part, dtype=torch.float64)
            whole = torch.zeros(source.size, dtype=torch.float64)
            for row in together(sums):
                whole += row
            known |= source.figures(whole.tolist())
        return {name: value for name, value in known.items() if value is not None}


class Breakdowns(Reported):
    """The scores by parts of all judges that have some, each source once, under the name of its first judge:
    `JUDGE[PART]`."""

    def __init__(self, judges: Mapping[str, Reward], *evaluation: object) -> None:
        sources: dict[int, tuple[str, Breakdown]] = {}
        for name, judge in judges.items():
            if (source := ability(judge, "breakdown")) is not None:
                sources.setdefault(id(source), (name, source))
        self._sources = list(sources.values())
        self.names = [f"{name}[{part}]" for name, source in self._sources for part in source.names]

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B, M) on the CPU, NaN where a prompt says nothing of a part. RewardError if one fails."""
        texts, metadata = [prompt.text for prompt in prompts], [dict(prompt.metadata) for prompt in prompts]
        columns = [super().__call__(images, prompts)]
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
