"""DiffusionNFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd, ForwardProcess
from diffrl.methods.shared.sections import FOLLOWS, SCHEDULES, Schedule, check_timesteps

if TYPE_CHECKING:
    from diffrl.config import Config


class NFTSection(ForwardProcess):
    method = Method(
        "nft", "DiffusionNFT", {"DiffusionNFT": "2509.16117"}, trainer="diffrl.methods.nft.objective:NFT", spatial=True
    )
    beta: FiniteFloat = key(1e-4, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    b: FiniteFloat = key(1.0, "mix of v_theta and v_old in v+ and v-; 0.1 for OCR and several rewards", gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    old: Schedule = key(SCHEDULES["slow"], f"the snapshot that draws the images: {FOLLOWS}")

    def check(self, config: Config) -> None:
        check_timesteps("nft", self, config.rollout)
