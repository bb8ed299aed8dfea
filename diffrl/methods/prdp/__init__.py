"""PRDP: proximal reward difference prediction."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import STOCHASTIC, Method, Problem, Sampling, Section, key


class PRDPSection(Section):
    method = Method(
        "prdp",
        "PRDP",
        {"PRDP": "2402.08714"},
        about="proximal reward difference prediction",
        trainer="diffrl.methods.prdp.objective:PRDP",
        needs={"rollout": {"sampler": "flow_sde"}},
    )
    whole_groups: ClassVar[bool] = True
    beta: ClassVar[float] = 0.0
    b: FiniteFloat = key(1.0, "a difference of advantages over this is what the log-ratios are to differ by", gt=0)

    def trained_steps(self, rollout: Sampling) -> int:
        return rollout.stochastic_steps

    def check(self, config: Any) -> None:
        needs = 'but objective "prdp" needs log-probabilities'
        rollout = config.rollout
        if not rollout.facts.stochastic:
            choices = ", ".join(STOCHASTIC)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.noise_level", f"no step of {rollout.sampler} is stochastic, {needs}")
