"""What sections of several methods have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.config.base import LARGEST, Problem, Sampling, Section, key
from diffrl.config.methods import Decay, ForwardProcess, asked, noisiest

if TYPE_CHECKING:
    from diffrl.config import Config

# DiffusionNFT's decay_type 1 and 2; theta itself after every epoch.
SCHEDULES = {"slow": Decay(), "late": Decay(75, 0.0, 0.0075, 0.999), "copy": Decay(slope=0.0)}
FOLLOWS = "old <- d old + (1 - d) theta each epoch, d being 0 before start, then min(value + slope (step - start), cap)"


def _decay(value: Any) -> Decay:
    """By a schedule's name, or of its four numbers."""
    if isinstance(value, str) and value in SCHEDULES:
        return SCHEDULES[value]
    four = tuple(value) if isinstance(value, list | tuple) else ()
    numbers = len(four) == 4 and type(four[0]) is int and all(type(one) in (int, float) for one in four)
    start, first, slope, cap = four if numbers else (0, 0.0, -1.0, 0.0)
    if not (0 <= start <= LARGEST and 0 <= first < 1 and 0 <= slope <= LARGEST and 0 <= cap < 1):
        text = "slow, late, copy, or [start, value, slope, cap] with a whole start, none below 0, value and cap below 1"
        raise PydanticCustomError("decay", text)  # type: ignore[arg-type]
    return Decay(start, float(first), float(slope), float(cap))


Schedule = Annotated[Decay, PlainValidator(_decay), PlainSerializer(list)]

SLOW = Decay(cap=0.3)
COPY = Decay(slope=0.0)  # "old" is theta again after every epoch
KL = "weight of mean (v_theta - v_ref)^2, v_ref the pretrained model's; 0 runs no reference forward for it"
TimestepSampling = Literal["schedule", "uniform", "logit_normal", "logit_normal_3"]
SAMPLING = (
    "the sampling schedule's own timesteps without repeats, or draws from (0, 1); logit_normal_3: moved towards noise "
    "by SD3's shift of 3, median 0.75 (Flow-GRPO's code of DPO, SFT, RWR)"
)


def check_timesteps(name: str, section: Any, rollout: Sampling) -> None:
    """The section `name` trains no more timesteps without repeats than there are, and a share of the schedule's."""
    where, sampling = f"{name}.timesteps", getattr(section, "timestep_sampling", "schedule")
    count, share = asked(section.timesteps)
    if sampling != "schedule" and share < 1:
        text = f'{share:g} of the schedule\'s timesteps, but {name}.timestep_sampling is "{sampling}"'
        raise Problem(where, text)
    if sampling == "schedule" and (count or 0) > (levels := noisiest(rollout.steps, share)):
        of = f" x {share:g}" if share < 1 else ""
        raise Problem(where, f"{count} timesteps, but the schedule has only {levels} (rollout.steps{of})")


class Ranked(ForwardProcess):
    """What the objectives on the forward process share that rank or weigh a group by themselves."""

    def check(self, config: Config) -> None:
        check_timesteps(config.method.name, self, config.rollout)


class Drawn(Ranked):
    """Of those whose published code draws the levels of its rows."""

    timestep_sampling: TimestepSampling = key("schedule", SAMPLING)


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
