"""The config's section of how a group's scores become advantages; present = on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import PAIR, Problem, Section, key
from diffrl.config.reward import check_unit


class Advantages(Section):
    agree: Literal["keep", "leave_out", "floor", "virtual", "blend"] = key(
        "keep",
        "a group whose images score alike. leave_out: the mean is over the others (DAPO); floor: a least std; virtual: "
        "as if one more image had scored `top` (NGRPO); blend: its mean against the other groups' (COPO)",
    )
    least: FiniteFloat = key(1e-3, "leave_out: groups up to this std; floor: the least std that divides", gt=0)
    top: FiniteFloat = key(1.0, "virtual: the highest possible weighted sum of rewards")
    grain: FiniteFloat = key(0.01, "blend: scores closer than this are alike", gt=0)
    beta: bool = key(False, "divide by a Beta density instead of the std (BNPO): for rewards that are 0 or 1")
    risk: Annotated[tuple[FiniteFloat, FiniteFloat, FiniteFloat], PAIR] | None = key(
        None,
        "[low, high, weight]: the mean of the epoch's lowest share counts `weight`, scores above the share `high` no "
        "more (RiskPO: [0.2, 0.8, 1]); null: off",
    )
    ban: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] | None = key(
        None, "[std, mean]: groups with less spread and a higher mean are left out (RationalRewards: [0.05, 0.9])"
    )

    def check(self, config: Any) -> None:
        name = config.method.name
        if config.method.advantages == "none":
            raise Problem("advantages", f'shapes advantages, which objective "{name}" does not use; leave it out')
        if config.method.advantages == "own":
            raise Problem(
                "advantages", f'estimates advantages, but objective "{name}" ranks or weighs a group by itself'
            )
        base: Any = config.objective_section
        std = base.advantage_std if config.gardo is None else config.gardo.advantage_std or base.advantage_std
        owner = f"{name}.advantage_std"
        if config.gardo is not None and config.gardo.advantage_std is not None:
            owner = "gardo.advantage_std"
        if self.agree == "floor" and std != "group":
            raise Problem("advantages.agree", f'"floor" is a least std of the group, but {owner} is "{std}"')
        if self.beta and self.agree in ("floor", "virtual"):
            raise Problem("advantages.beta", f'true, but agree "{self.agree}" chooses what is divided by, too')
        if self.beta:
            self._check_unit(config)
        if self.risk is not None:
            low, high, weight = self.risk
            if not 0 <= low < high <= 1 or weight < 0:
                text = f"[{low:g}, {high:g}, {weight:g}]: expected 0 <= low < high <= 1 and a weight of at least 0"
                raise Problem("advantages.risk", text)

    def _check_unit(self, config: Any) -> None:
        for name, entry in config.rewards.items():
            check_unit("advantages.beta", name, entry)
        weights = [reward.weight for reward in config.rewards.values()]
        if min(weights) < 0 or sum(weights) > 1 + 1e-9:
            text = f"the weighted sum must lie in [0, 1], but the weights are {weights}; let them sum to at most 1"
            raise Problem("advantages.beta", text)
