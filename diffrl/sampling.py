"""How images are drawn, without torch: the facts of every sampler, and the part of `rollout` that a rollout reads.

Symbols: sigma, the noise level t of the path from 1 (noise) to 0 (image), here S + 1 of them; `noise_level`, the
strength of the fresh noise that a stochastic step draws; S steps, of which w draw noise. The steps themselves are in
`diffrl.samplers`.

A sampler from outside is a `Sampler` with its `step`, named `path/to/file.py:NAME` or by an entry point of the group
`diffrl.samplers`.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, FiniteFloat, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from diffrl.errors import UserError
from diffrl.keys import AS_IS, PAIR, Problem, Section, key, one_or_two
from diffrl.plugins import load


@dataclass(frozen=True)
class Sampler:
    """What is true of one solver, shipped or a user's own.

    stochastic: it draws noise. quiet_steps: how many of its last steps do not, because their std would be zero at
    sigma = 0. most_noise: the highest noise level (1 where it is a share of the noise). flow_only: it is defined for
    flow matching alone. timed: its std has the factor sqrt(-dt). step: of a sampler from outside, (x, prediction, t,
    t_next, noise_level, t_second, process) -> (mean, std) if stochastic, else (x, prediction, t, t_next, state,
    process) -> (x_next, state).
    """

    stochastic: bool
    quiet_steps: int = 0
    most_noise: float = math.inf
    flow_only: bool = True
    timed: bool = False
    step: Callable[..., Any] | None = None


SAMPLERS = {
    "euler": Sampler(stochastic=False),
    "dpm2": Sampler(stochastic=False, flow_only=False),
    "flow_sde": Sampler(stochastic=True, timed=True),
    "dance": Sampler(stochastic=True, timed=True),
    "cps": Sampler(stochastic=True, quiet_steps=1, most_noise=1.0),
    "ddim": Sampler(stochastic=True, quiet_steps=1, most_noise=1.0, flow_only=False),
    "renoise": Sampler(stochastic=True, quiet_steps=1, most_noise=1.0, flow_only=False),
}
STOCHASTIC = [name for name, facts in SAMPLERS.items() if facts.stochastic]


@functools.lru_cache(maxsize=64)
def find_sampler(name: str) -> Sampler:
    """The sampler of this name: a shipped one, an installed one, or `path/to/file.py:NAME`.

    Raises:
        UserError: there is none, or it is not a `Sampler` with a step.
    """
    if name in SAMPLERS:
        return SAMPLERS[name]
    sampler = load("sampler", name, SAMPLERS, lambda thing: isinstance(thing, Sampler))
    if not isinstance(sampler, Sampler) or sampler.step is None:
        raise UserError(f'"{name}" is not a diffrl.sampling.Sampler with a step')
    return sampler


def _known(name: str) -> str:
    try:
        find_sampler(name)
    except UserError as error:
        raise PydanticCustomError("sampler", "{text}", {"text": str(error)}) from error
    return name


_NOISE = one_or_two("a noise level from 0 to 100, or [FIRST, LAST]", float, 0, 100)
NoiseLevel = Annotated[float | tuple[float, float], _NOISE, AS_IS]

if typing.TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


@typing.dataclass_transform(kw_only_default=True)
class _OneLine(ModelMetaclass):
    """`SamplerSpec("cps", 6, ...)` in a program: sampler and steps may go first, and a mistake is one line."""

    if not typing.TYPE_CHECKING:  # type checkers read the keys from the class

        def __call__(cls, *first: Any, **values: Any) -> SamplerSpec:
            try:
                made = super().__call__(**dict(zip(("sampler", "steps"), first, strict=False)), **values)
            except ValidationError as error:
                one = error.errors(include_url=False)[0]
                place = ".".join(str(part) for part in ("rollout", *one["loc"]))
                got = "" if one["type"] == "sampler" else f", got {one['input']!r}"
                none = "; none is 1 here, 0 in diffusers" * (place[-14:] == "guidance_scale" and "equal" in one["type"])
                raise UserError(f"{place}: {one['msg']}{got}{none}") from error
            made.check_sampling()
            return made


class SamplerSpec(Section, metaclass=_OneLine):
    """How to sample: the keys of `rollout` that a rollout reads. Made alone, it is checked at once (UserError)."""

    steps: int = key(10, "sampling steps", "steps", ge=1)
    sampler: Annotated[str, AfterValidator(_known)] = key(
        "dpm2",
        "euler and dpm2 are deterministic; flow_sde, dance, cps, ddim and renoise are stochastic, as grpo needs; ddim "
        "is for models of DDPM type; renoise, with noise_level 1 (RLCM), for models of few steps; or an own one, "
        "path/to/file.py:NAME",
    )
    shift: FiniteFloat | None = key(
        None,
        "levels s t / (1 + (s - 1) t) of t = 1, 1 - 1/S, ..., 0 in place of the model's own, for flow matching: 3 is "
        "SD3's; evaluations, too; null: the model's own",
        gt=0,
        le=100,
    )
    guidance_scale: FiniteFloat = key(1.0, "classifier-free guidance; 1 is none, at half the cost", ge=1, le=1000)
    noise_level: NoiseLevel = key(
        0.7,
        "noise of a stochastic sampler: a of flow_sde, dance, cps and renoise, eta of ddim; [FIRST, LAST]: it falls as "
        "a cosine from FIRST at t = 1 to LAST at t = 0 (HiCoGen)",
    )
    window: int | None = key(
        None, "number of consecutive stochastic steps, the others are Euler's; null: all", "steps", ge=1
    )
    window_range: Annotated[tuple[int, int], PAIR] | None = key(
        None, "[first, end]: drawn anew each epoch, within the steps first to end - 1; null: from step 0", "steps"
    )
    window_move: Annotated[tuple[int, int], PAIR] | None = key(
        None,
        "[every, stride]: not drawn, but after so many epochs so many steps towards clean, then from the start again "
        "(MixGRPO); null: it does not move",
    )
    tail: FiniteFloat | None = key(
        None,
        "share of the steps behind the window that are taken, by dpm2 (MixGRPO, Flash: 0.4); null: all, Euler's",
        gt=0,
        le=1,
    )
    same_noise: bool = key(False, "the images of a group start from one initial noise")
    _noise_levels: tuple[float, ...] | None = PrivateAttr(None)

    @property
    def noise(self) -> float:
        """The noise level of the noisiest step; the others have less where `noise_level` is two."""
        return self.noise_level[0] if isinstance(self.noise_level, tuple) else self.noise_level

    @property
    def noise_levels(self) -> tuple[float, ...] | None:
        """One for each of the S steps in place of `noise_level`, as a calibration finds them; None: that for all."""
        return self._noise_levels

    def with_levels(self, levels: Sequence[float]) -> Self:
        """The same with these noise levels, one for each of the S steps, the noisiest step first."""
        other = self.model_copy()
        other._noise_levels = tuple(levels)
        return other

    @property
    def facts(self) -> Sampler:
        """What is true of the sampler."""
        return find_sampler(self.sampler)

    @property
    def noisy_steps(self) -> int:
        """How many of the S steps could draw fresh noise."""
        return max(self.steps - self.facts.quiet_steps, 0) if self.facts.stochastic else 0

    @property
    def stochastic_steps(self) -> int:
        """w, the steps of the window, which draw fresh noise; 0 if the sampler or the noise level is deterministic."""
        return (self.window or self.noisy_steps) if self.noise or self.noise_levels else 0

    def noise_by_step(self, sigmas: Sequence[float]) -> list[float] | None:
        """The noise level of each of the S steps, from the schedule (S + 1,); None where all are `noise_level`.

        Two are the ends of HiCoGen's (2511.19965) cosine, eta_max and eta_min, by sigma itself:
        eta(t) = eta_min + (eta_max - eta_min) (1 + cos(pi (1 - t))) / 2.
        """
        if self.noise_levels is not None:
            return list(self.noise_levels)
        if not isinstance(self.noise_level, tuple):
            return None
        first, last = self.noise_level
        half = (first - last) / 2
        return [last + half * (1 + math.cos(math.pi * (1 - t))) for t in sigmas[:-1]]

    def check_sampling(self) -> None:
        """Raise Problem where these keys cannot work together."""
        top = self.facts.most_noise
        if self.noise > top:
            text = f"expected at most {top:g} with {self.sampler}, got {self.noise:g}"
            raise Problem("rollout.noise_level", text)
        limit = f"{self.noisy_steps} of the {self.steps} steps (rollout.steps) of {self.sampler} can be stochastic"
        if (self.window or 0) > self.noisy_steps:
            raise Problem("rollout.window", f"{self.window} stochastic steps, but {limit}")
        if self.window_range is not None:
            first, end = self.window_range
            if not 0 <= first < end <= self.noisy_steps:
                text = f"[{first}, {end}] is not within [0, {self.noisy_steps}]: {limit}"
                raise Problem("rollout.window_range", text)
            if end - first < self.stochastic_steps:
                text = f"[{first}, {end}] is too short for a window of {self.stochastic_steps} steps (rollout.window)"
                raise Problem("rollout.window_range", text)
        self._check_noise()
        self._check_moves()
        if self.same_noise and not self.stochastic_steps:
            text = f"with {self.sampler} at noise level {self.noise:g} all images of a group would be the same"
            raise Problem("rollout.same_noise", text)

    def _check_noise(self) -> None:
        if not isinstance(self.noise_level, tuple):
            return
        name, (first, last) = "rollout.noise_level", self.noise_level
        if not self.facts.stochastic:
            raise Problem(
                name, f'falls, but the sampler "{self.sampler}" draws no noise: use one of {", ".join(STOCHASTIC)}'
            )
        if last > first:
            raise Problem(name, f"[{first:g}, {last:g}] rises: the first is that of the noisiest step")

    def _check_moves(self) -> None:
        if self.window_move is not None:
            every, stride = self.window_move
            if every < 1 or stride < 1:
                raise Problem("rollout.window_move", f"[{every}, {stride}]: both must be at least 1")
        for name, given in (("window_move", self.window_move), ("tail", self.tail)):
            if given is not None and not self.stochastic_steps:
                raise Problem(f"rollout.{name}", f'the sampler "{self.sampler}" has no stochastic steps, so no window')
