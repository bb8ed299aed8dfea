"""DenseGRPO: each step's own gain."""

from __future__ import annotations

from typing import Any

from diffrl.config.base import Method, Problem, key
from diffrl.methods.shared.sections import CreditSection


class DenseSection(CreditSection):
    method = Method(
        "dense",
        "DenseGRPO",
        {"DenseGRPO": "2601.20218"},
        about="each step's own gain",
        kind="credit",
        trainer="diffrl.methods.dense.credit:Dense",
    )
    calibrate: int | None = key(
        None,
        "find the noise of every step first, in so many rounds of one epoch's prompts: more where as many images gain "
        "as lose; sampler dance; null: as rollout.noise_level says",
        "rounds",
        ge=1,
    )

    def build(self, build: Any) -> None:
        if self.calibrate is not None:
            from diffrl.methods.dense.calibration import Calibration

            build.add(Calibration(build.rollouts, build.compose, build.weights, self.calibrate))

    def check(self, config: Any) -> None:
        self.check_common("dense", config)
        if self.calibrate is not None and config.rollout.sampler != "dance":
            text = f'gives s = psi(t) itself, which is the sampler "dance", not "{config.rollout.sampler}"'
            raise Problem("dense.calibrate", text)
        if self.calibrate is not None and config.rollout.stochastic_steps < config.rollout.steps:
            raise Problem("dense.calibrate", "needs all steps stochastic, but rollout.window is shorter")
