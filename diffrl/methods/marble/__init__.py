"""MARBLE: a gradient for each reward, balanced."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from diffrl.config.base import Method, Problem, Section, Share, key

if TYPE_CHECKING:
    from diffrl.config import Config


class MarbleSection(Section):
    method = Method(
        "marble",
        "MARBLE",
        {"MARBLE": "2605.06507"},
        about="rewards balanced by their gradients",
        kind="wrapper",
        rewards="several",
        trainer="diffrl.methods.marble.combiner:Marble",
        state=True,
    )
    mode: Literal["fresh", "full", "amortised", "uniform", "advantages", "sum"] = key(
        "amortised",
        "amortised: coefficients are solved for every N steps (the paper); fresh: in every step, with normalised "
        "gradients; full: the same from one backward pass for each reward; uniform: 1 / K of each normalised gradient; "
        "advantages: the weighted sum of advantages; sum: of rewards, as "
        "without marble but measured",
    )
    smoothing: Share = key(0.7, "rho of abar <- rho abar + (1 - rho) alpha*, per solve; 0: no memory")
    smooth: Literal["between", "everywhere"] = key(
        "between",
        "where abar is used: in the steps between two solves, the solving step taking alpha* itself (the paper), or in "
        "that one, too",
    )
    every: int = key(10, "N of mode amortised", "optimiser steps", ge=1)
    measure: bool = key(
        True, "modes advantages, sum: log each reward's gradient and its cosine to the step (more time)"
    )

    def around(self, objective: Any, config: Any, lower: Collection[str]) -> None:
        """With the columns of advantages that are balanced."""
        from diffrl.methods.marble.bank import columns_of

        objective.rule = replace(objective.rule, columns=columns_of(self.mode, self.measure))

    def combiner(self, config: Any) -> Any:
        from diffrl.methods.marble.combiner import build_combiner

        return build_combiner(self, config)

    def check(self, config: Config) -> None:
        if config.method.rewards == "unused":
            raise Problem("marble", f'balances rewards, and objective "{config.method.name}" learns from none')
        if len(config.rewards) < 2:
            only = ", ".join(config.rewards)
            raise Problem("marble", f"there is one reward ({only}), so nothing to balance; leave marble out")
        barred = {"none": ("sum", "advantages"), "own": ("advantages",), "any": ()}[config.method.advantages]
        if self.mode in barred:
            text = f'"{self.mode}" sums scores or advantages, and objective "{config.method.name}" has none'
            raise Problem("marble.mode", text)
