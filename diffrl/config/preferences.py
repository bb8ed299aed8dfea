"""The config's sections of objectives on the forward process that rank or weigh a group, and of PRDP on the steps."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import FiniteFloat

from diffrl.config.base import QUIET_STEPS, Problem, Sampling, Section, Whole, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd, ForwardProcess, check_timesteps

KL = "weight of mean (v_theta - v_ref)^2, v_ref the pretrained model's; 0 runs no reference forward for it"
TimestepSampling = Literal["schedule", "uniform", "logit_normal", "logit_normal_3"]
SAMPLING = (
    "the sampling schedule's own timesteps without repeats, or draws from (0, 1); logit_normal_3: moved towards noise "
    "by SD3's shift of 3, median 0.75 (Flow-GRPO's code of DPO, SFT, RWR)"
)


def check_ranks(name: str, config: Whole) -> None:
    """What an objective that has advantages of its own kind cannot be combined with."""
    if getattr(config, "advantages", None) is not None:
        raise Problem("advantages", f'estimates advantages, but objective "{name}" ranks or weighs a group by itself')
    if config.gardo is not None and config.gardo.diversity != "off":
        text = f'{config.gardo.diversity} shapes advantages, but objective "{name}" has none: set it to off'
        raise Problem("gardo.diversity", text)
    marble = getattr(config, "marble", None)
    if marble is not None and marble.mode == "advantages":
        raise Problem("marble.mode", f'"advantages" sums advantages, but objective "{name}" has none')


class Ranked(ForwardProcess):
    """What the objectives on the forward process share that rank or weigh a group by themselves."""

    beta: FiniteFloat = key(0.0, KL, ge=0)
    timestep_sampling: TimestepSampling = key("schedule", SAMPLING)

    def check(self, config: Whole) -> None:
        name = type(self).__name__.lower()
        check_timesteps(name, self, config.rollout)
        check_ranks(name, config)


class DPO(Ranked):
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(
        100.0, "how sharply a pair's difference of errors is judged; constant over the timesteps", gt=0
    )
    follow: int | None = key(
        None,
        "the reference becomes the trained weights after so many optimiser steps (online DPO: 40); null: the "
        "pretrained model for good",
        "optimiser steps",
        ge=1,
    )


class RWR(Ranked):
    weights: Literal["softmax", "exp"] = key(
        "softmax", "softmax(r / tau) over the group times its size, or exp(A / tau) of the group's advantage"
    )
    tau: FiniteFloat = key(1.0, "temperature, in units of the weighted sum of rewards (exp: of advantages)", gt=0)


class SFT(Ranked):
    """Nothing of its own."""


class GDRO(Ranked):
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(
        12.0, "scale of the implicit reward; calibrate gdro/implicit_std to about gdro/reward_std", gt=0
    )
    tau: FiniteFloat = key(0.05, "temperature of the soft targets, in units of the weighted sum of rewards", gt=0)
    best: FiniteFloat = key(0.5, "g: weight of the best image's own error, which keeps its likelihood", ge=0)
    top: bool = key(False, "only who is best counts, not the order of the others")


class PRDP(Section):
    whole_groups: ClassVar[bool] = True
    advantage_std: AdvantageStd = key("group", ADVANTAGE_STD)
    b: FiniteFloat = key(1.0, "a difference of advantages over this is what the log-ratios are to differ by", gt=0)
    clip: FiniteFloat = key(1e-4, "a step's log-ratio is held within this of the sampling model's", gt=0)
    beta: FiniteFloat = key(0.0, "weight of the step's KL divergence to the reference", ge=0)

    def trained_steps(self, rollout: Sampling) -> int:
        return rollout.stochastic_steps

    def check(self, config: Any) -> None:
        needs = 'but objective "prdp" needs log-probabilities'
        rollout = config.rollout
        if rollout.sampler not in QUIET_STEPS:
            choices = ", ".join(QUIET_STEPS)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.noise_level", f"no step of {rollout.sampler} is stochastic, {needs}")
