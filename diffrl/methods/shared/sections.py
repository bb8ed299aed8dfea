"""What sections of several methods have in common."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import Problem, Section, Share, Whole, key
from diffrl.config.methods import Decay, ForwardProcess, check_timesteps

COPY = Decay(slope=0.0)  # "old" is theta again after every epoch
KL = "weight of mean (v_theta - v_ref)^2, v_ref the pretrained model's; 0 runs no reference forward for it"
TimestepSampling = Literal["schedule", "uniform", "logit_normal", "logit_normal_3"]
SAMPLING = (
    "the sampling schedule's own timesteps without repeats, or draws from (0, 1); logit_normal_3: moved towards noise "
    "by SD3's shift of 3, median 0.75 (Flow-GRPO's code of DPO, SFT, RWR)"
)


class Ranked(ForwardProcess):
    """What the objectives on the forward process share that rank or weigh a group by themselves."""

    beta: FiniteFloat = key(0.0, KL, ge=0)

    def check(self, config: Whole) -> None:
        check_timesteps(config.method.name, self, config.rollout)


class Drawn(Ranked):
    """Of those whose published code draws the levels of its rows."""

    timestep_sampling: TimestepSampling = key("schedule", SAMPLING)


class Slow(Decay):
    cap: Share = key(0.3, "largest decay")


class CreditSection(Section):
    """What the three have in common: they say what GRPO's rollout draws beside, so only one can be."""

    def check_common(self, name: str, config: Any) -> None:
        others = [method.name for method in config.methods if method.kind == "credit" and method.name != name]
        if others:
            raise Problem(name, f"{others[0]} is on, too: both say what a rollout draws and scores; leave one out")
        if not config.method.takes_credit:
            text = f'gives every stochastic step its own credit, but objective "{config.method.name}" does not train on'
            raise Problem(name, f"{text} the steps; use grpo")
        if (timesteps := config.objective_section.timesteps) is not None:
            where = f"{config.method.name}.timesteps"
            raise Problem(where, f"{timesteps}, but {name} says which steps are trained; null")
        if config.rollout.tail is not None:
            raise Problem("rollout.tail", f"{config.rollout.tail:g}, but {name} says how images go on; leave it out")
