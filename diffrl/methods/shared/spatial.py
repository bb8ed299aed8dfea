"""An objective that may train on advantages of latent cells; those are `regions.py`, for runs that have maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows
from diffrl.rollout import Rollout

if TYPE_CHECKING:
    from diffrl.methods.shared.regions import Regions


@dataclass(kw_only=True)
class SpatialRows(Rows):
    cells: Tensor | None = None  # (b, K, h, w) what each latent cell's advantage is above the row's; None: nothing


class Spatial(Objective):
    """An objective whose rows may have advantages of latent cells."""

    regions: Regions | None = None

    def see_regions(self, columns: Sequence[int], names: Sequence[str]) -> None:
        """Train with the advantages of cells from now on, by the maps of these rewards, columns of the scores."""
        from diffrl.methods.shared.regions import Regions

        self.regions = Regions(columns, names)
        self.basis = None  # each reward has a scalar of its own

    def advantages(self, scored: ScoredBatch) -> Tensor:
        if self.regions is not None:
            self.regions.see(self.rule, scored)
        return super().advantages(scored)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> SpatialRows:
        rows = SpatialRows(**vars(super().rows(rollout, advantages, pairs, key)))
        if self.regions is not None:
            rows.cells = self.regions.of(rollout, pairs)
        return rows
