"""What config sections are made of: strict models, keys with a meaning and a unit, and the error at a key."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.errors import UserError

if TYPE_CHECKING:
    from diffrl.config.schema import Config

PathText = Annotated[str, AfterValidator(os.path.expanduser)]


def _prompt_source(value: Any) -> str | dict[str, float]:
    """A name, or {name: share}."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    numbers = value.values() if isinstance(value, dict) else []
    if not numbers or not all(type(n) in (int, float) and 0 < n < math.inf for n in numbers):
        text = "a set, a file, or a table {set or file: share} with shares above 0"
        raise PydanticCustomError("prompt_source", text)  # type: ignore[arg-type]
    return {os.path.expanduser(str(name)): float(share) for name, share in value.items()}


PromptSource = Annotated[str | dict[str, float], PlainValidator(_prompt_source)]
Share = Annotated[FiniteFloat, Field(ge=0, lt=1)]
PAIR = Field(strict=False)  # YAML's lists become tuples; the items stay strict
QUIET_STEPS = {"flow_sde": 0, "dance": 0, "cps": 1, "ddim": 1}  # stochastic samplers: how many last steps draw no noise


class Problem(UserError):
    """A value that cannot work, at a dotted key; `load_config` adds the file and the line."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key


def key(default: Any, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A config key: default, one-line meaning, unit, and pydantic's limits (ge, gt, le, lt)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


def section(kind: type[BaseModel], meaning: str) -> Any:
    """A section whose keys all have defaults."""
    return Field(default_factory=kind, description=meaning)


class Section(BaseModel):
    """Strict and frozen: no unknown keys, no conversions between types (except whole numbers to numbers)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def check(self, config: Config) -> None:
        """Raise Problem where this section, which is in use, cannot work with the rest of the config."""
