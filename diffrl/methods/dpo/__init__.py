"""Flow-DPO online, with SePPO's references."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import Method, Problem, key
from diffrl.methods.shared.sections import Drawn

if TYPE_CHECKING:
    from diffrl.config import Config


class DPOSection(Drawn):
    method = Method(
        "dpo",
        "DPO",
        {"Diffusion-DPO": "2311.12908", "Flow-DPO": "2501.13918"},
        options={("flip", True): {"SePPO": "2410.05255"}},
        about="pairs of a group's best and worst",
        trainer="diffrl.methods.dpo.objective:DPO",
        advantages="own",
    )
    whole_groups: ClassVar[bool] = True
    on_pairs: ClassVar[bool] = True  # of a set's picture and a rival
    beta: ClassVar[float] = 0.0
    b: FiniteFloat = key(
        100.0, "how sharply a pair's difference of errors is judged; constant over the timesteps", gt=0
    )
    follow: int | None = key(
        None,
        "the reference becomes the trained weights after so many optimiser steps (online DPO: 40), or with ring one "
        "more state is kept (SePPO: 30); null: the pretrained model for good",
        "optimiser steps",
        ge=1,
    )
    ring: int | None = key(
        None,
        "the reference is one of so many earlier states of the trained weights, drawn for each epoch, and draws the "
        "epoch's images (SePPO: 7); null: the newest alone",
        "LoRAs",
        ge=1,
    )
    flip: bool = key(
        False, "where the reference fits the better image better than theta does, the worse one counts as good (SePPO)"
    )

    def check(self, config: Config) -> None:
        super().check(config)
        if self.ring is not None and self.follow is None:
            text = "its states are taken every dpo.follow optimiser steps (SePPO: 30); give that, too"
            raise Problem("dpo.ring", text)
