"""What config sections are made of: strict models, keys with a meaning and a unit, and the error at a key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainValidator,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from diffrl.errors import UserError

# The most of each unit that is no slip of the pen: larger values cannot be run, or not told from their neighbours.
MOST = {
    "epochs": 10**6,
    "prompts": 10**6,
    "images": 10**6,
    "steps": 10**4,
    "timesteps": 10**4,
    "passes": 10**4,
    "micro-batches": 10**6,
    "evaluations": 10**6,
    "checkpoints": 10**4,
    "attempts": 10**4,
    "seconds": 10**7,
    "pixels": 2**14,
    "optimiser steps": 10**9,
}
LARGEST = 10**9  # of any other number: a float32 resolves no more than this to 64

PathText = Annotated[str, AfterValidator(os.path.expanduser)]


def _prompt_source(value: Any) -> str | dict[str, float]:
    """A name, or {name: share}."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    numbers = value.values() if isinstance(value, dict) else []
    if not numbers or not all(type(n) in (int, float) and 0 < n <= LARGEST for n in numbers):
        text = "a set, a file, or a table {set or file: share} with shares above 0"
        raise PydanticCustomError("prompt_source", text)  # type: ignore[arg-type]
    return {os.path.expanduser(str(name)): float(share) for name, share in value.items()}


def _resolution(value: Any) -> int | tuple[int, int]:
    """A side of square images, or [width, height]."""
    most = MOST["pixels"]
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(sides) > 2 or not sides or not all(type(side) is int and 8 <= side <= most for side in sides):
        text = f"a side of 8 to {most} pixels, or [width, height]"
        raise PydanticCustomError("resolution", text)  # type: ignore[arg-type]
    return (sides[0], sides[-1]) if isinstance(value, list | tuple) else sides[0]


Resolution = Annotated[int | tuple[int, int], PlainValidator(_resolution)]
PromptSource = Annotated[str | dict[str, float], PlainValidator(_prompt_source)]
Share = Annotated[FiniteFloat, Field(ge=0, lt=1)]
PAIR = Field(strict=False)  # YAML's lists become tuples; the items stay strict
# stochastic samplers: how many last steps draw no noise
QUIET_STEPS = {"flow_sde": 0, "dance": 0, "cps": 1, "renoise": 1, "ddim": 1}


class Problem(UserError):
    """A value that cannot work, at a dotted key; `load_config` adds the file and the line."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key


def key(default: Any, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A config key: default, one-line meaning, unit, and pydantic's limits (ge, gt, le, lt).

    Without an upper limit of its own a key has its unit's, or that of all numbers.
    """
    number, below = type(default) in (int, float), bool({"ge", "gt"} & set(limits))
    if not {"le", "lt"} & set(limits) and (number or (below and unit in MOST)):
        limits["le"] = MOST.get(unit, LARGEST)
    if number and not below:
        limits["ge"] = -LARGEST
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


def section(kind: type[BaseModel], meaning: str) -> Any:
    """A section whose keys all have defaults."""
    return Field(default_factory=kind, description=meaning)


@dataclass(frozen=True)
class Method:
    """What is to be known of a method without importing it; the class of its section has it as `method`.

    Card, report, help, `diffrl init` and the checks read it here, and nowhere else is any of it said again.
    """

    name: str  # of the section; an objective's is also what `objective:` names
    title: str  # as papers call it
    papers: Mapping[str, str] = field(default_factory=dict)  # {name: arXiv number}
    about: str = ""  # one line for help; by default the title
    kind: Literal["objective", "credit", "wrapper"] = "objective"
    trainer: str = ""  # `module:Class` that is built from the section; "": the class that has the section
    on_steps: bool = False  # an objective that trains on the log-probabilities of the rollout's own steps
    takes_credit: bool = False  # an objective whose steps may get a credit each
    advantages: Literal["any", "own", "none"] = "any"  # from any estimate; its own ranks or weights; or not used
    decodes: bool = False  # an objective that calls the rewards on images that it decodes itself
    needs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of other sections, for `diffrl init`
    rewards: Literal["any", "differentiable", "embeds", "several"] = "any"  # that it works with
    state: bool = False  # a wrapper or credit that keeps a state in checkpoints: no resume switches it on or off

    def meaning(self) -> str:
        """One line for help."""
        cited = [f"{name}, arXiv {number}" for name, number in self.papers.items() if name != self.title]
        own = [f"arXiv {self.papers[self.title]}"] if self.title in self.papers else []
        named = self.about and self.title not in self.about and own
        text = f"{self.title}: {self.about}" if named else self.about or self.title
        return text + (f" ({'; '.join([*own, *cited])})" if self.papers else "")


class Section(BaseModel):
    """Strict and frozen: no unknown keys, no conversions between types (except whole numbers to numbers)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    method: ClassVar[Method | None] = None  # of a method's section

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        """No number is beyond `LARGEST`, also none that may be null or is in a list; a key's own limit goes first."""
        own = cls.model_fields[str(info.field_name)].metadata
        numbers = value if isinstance(value, tuple) else (value,)
        if not any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in own):
            for number in numbers:
                if type(number) in (int, float) and number > LARGEST:
                    raise PydanticKnownError("less_than_equal", {"le": LARGEST})
                if type(number) in (int, float) and number < -LARGEST:
                    raise PydanticKnownError("greater_than_equal", {"ge": -LARGEST})
        return value

    def check(self, config: Any) -> None:
        """Raise Problem where this section, which is in use, cannot work with the rest of the config.

        A section that lies below `Config` sees it as `Whole`.
        """

    def arguments(self, config: Any) -> dict[str, Any]:
        """What the method's class is built from: its keys, and what it takes of the rest of the config."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def methods_section(kind: type[Section]) -> Any:
    """The key of a method's section: an objective's is there by default, what is put around one is on if it is given.

    Its meaning is what the method says of itself.
    """
    assert kind.method is not None, "a method's section says what it is"
    if kind.method.kind == "objective":
        return section(kind, kind.method.meaning())
    return key(None, f"{kind.method.meaning()}; present = on")


class Sampling(Protocol):
    """What a method's section reads of `rollout`."""

    @property
    def steps(self) -> int: ...
    @property
    def sampler(self) -> str: ...
    @property
    def noise_level(self) -> float: ...
    @property
    def guidance_scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def stochastic_steps(self) -> int: ...


class Entry(Protocol):
    """What a method's section reads of a reward's entry."""

    @property
    def plugin(self) -> str | None: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class Whole(Protocol):
    """What a method's section reads of the config around it, so that it need not know the classes of the others."""

    @property
    def rollout(self) -> Sampling: ...
    @property
    def rewards(self) -> Mapping[str, Entry]: ...
    @property
    def watch(self) -> Mapping[str, Entry]: ...
    @property
    def objective(self) -> str: ...
    @property
    def objective_section(self) -> Any: ...
    @property
    def method(self) -> Method: ...
    @property
    def gardo(self) -> Any: ...
