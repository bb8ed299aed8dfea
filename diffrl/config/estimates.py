"""The config's section of how a group's scores become advantages; present = on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import PAIR, Problem, Section, key


class Advantages(Section):
    agree: Literal["keep", "leave_out", "floor"] = key(
        "keep",
        "a group whose images score alike. leave_out: the mean is over the others (DAPO); floor: a least std",
    )
    least: FiniteFloat = key(1e-3, "leave_out: groups up to this std; floor: the least std that divides", gt=0)
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
