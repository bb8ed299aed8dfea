"""FDFO: finite-difference flow optimisation."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import STOCHASTIC, Method, Problem, Sampling, Section, key


class FDFOSection(Section):
    method = Method(
        "fdfo",
        "FDFO",
        {"FDFO": "2603.12893"},
        about="finite-difference flow optimisation",
        trainer="diffrl.methods.fdfo.objective:FDFO",
        needs={"rollout": {"sampler": "cps", "noise_level": 0.045, "same_noise": True}},
    )
    whole_groups: ClassVar[bool] = True
    beta: ClassVar[float] = 0.0
    epsilon: FiniteFloat = key(
        0.03, "the ratio is drawn to 1 plus or minus this: velocities move by half of it of what images differ", gt=0
    )

    def trained_steps(self, rollout: Sampling) -> int:
        return rollout.steps

    def check(self, config: Any) -> None:
        rollout = config.rollout
        if not rollout.facts.stochastic:
            text = f'"{rollout.sampler}" is deterministic, but objective "fdfo" needs images that differ a little'
            raise Problem("rollout.sampler", f"{text}: use one of {', '.join(STOCHASTIC)} at a low rollout.noise_level")
        if not rollout.same_noise:
            text = 'false, but objective "fdfo" compares images that a little noise on the way sets apart: true'
            raise Problem("rollout.same_noise", text)
        if rollout.tail is not None:
            raise Problem("rollout.tail", 'objective "fdfo" trains all steps of a path; leave it out')
