"""What config sections are made of: strict models, keys with a meaning and a unit, and the error at a key.

Below the config, so that a section can lie where it is read (`diffrl.sampling`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
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


def _path(value: str) -> str:
    """With the home folder for ~. A variable that no shell has filled in would become a folder of its name."""
    if found := re.search(r"\$(\{\w+\}|[A-Za-z_]\w*)", value):
        raise PydanticCustomError("path", f"a path without {found[0]}, which only a shell fills in")  # type: ignore[arg-type]
    return os.path.expanduser(value)


PathText = Annotated[str, AfterValidator(_path)]


def _prompt_source(value: Any) -> str | dict[str, float]:
    """A name, or {name: share}."""
    if isinstance(value, str):
        return _path(value)
    numbers = value.values() if isinstance(value, dict) else []
    if not numbers or not all(type(n) in (int, float) and 0 < n <= LARGEST for n in numbers):
        text = "a set, a file, or a table {set or file: share} with shares above 0"
        raise PydanticCustomError("prompt_source", text)  # type: ignore[arg-type]
    return {_path(str(name)): float(share) for name, share in value.items()}


def one_or_two(text: str, kind: type, least: float, most: float, rising: bool = False) -> PlainValidator:
    """For a key that is one number from `least` to `most`, or a pair of them; `text` says so where it is neither.

    `kind`: int or float. `rising`: the second is not below the first.
    """

    def read(value: Any) -> Any:
        found = list(value) if isinstance(value, list | tuple) else [value]
        if (
            not 1 <= len(found) <= 2
            or not all(type(one) in (int, kind) and least <= one <= most for one in found)
            or (rising and found[0] > found[-1])
        ):
            raise PydanticCustomError("one_or_two", text)  # type: ignore[arg-type]
        return (kind(found[0]), kind(found[-1])) if isinstance(value, list | tuple) else kind(value)

    return PlainValidator(read)


AS_IS = PlainSerializer(lambda value: value)  # what `one_or_two` reads
_SIDES = one_or_two(f"a side of 8 to {MOST['pixels']} pixels, or [width, height]", int, 8, MOST["pixels"])
Resolution = Annotated[int | tuple[int, int], _SIDES, AS_IS]
PromptSource = Annotated[str | dict[str, float], PlainValidator(_prompt_source)]
Share = Annotated[FiniteFloat, Field(ge=0, lt=1)]
PAIR = Field(strict=False)  # YAML's lists become tuples; the items stay strict


class Problem(UserError):
    """A value that cannot work, at a dotted key; `load_config` adds the file and the line."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key


def at_key(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call; a UserError, and what a file system says of an impossible name, become a Problem at `key`."""
    try:
        return function(*arguments)
    except Problem:
        raise
    except UserError as error:
        raise Problem(key, str(error)) from error
    except (OSError, ValueError) as error:  # too long for a file's name, a NUL in it, a folder that is not ours to read
        reason = getattr(error, "strerror", None) or str(error)
        raise Problem(key, f"cannot be read: {reason}") from error


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


class Section(BaseModel):
    """Strict and frozen: no unknown keys, no conversions between types (except whole numbers to numbers)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        """No number is beyond `LARGEST`, also none that may be null or is in a list; a key's own limit goes first."""
        constraints = cls.model_fields[str(info.field_name)].metadata
        numbers = value if isinstance(value, tuple) else (value,)
        if not any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in constraints):
            for number in numbers:
                if type(number) in (int, float) and number > LARGEST:
                    raise PydanticKnownError("less_than_equal", {"le": LARGEST})
                if type(number) in (int, float) and number < -LARGEST:
                    raise PydanticKnownError("greater_than_equal", {"ge": -LARGEST})
        return value

    def check(self, config: Any) -> None:
        """Raise Problem where this section, which is in use, cannot work with the rest of the config."""
