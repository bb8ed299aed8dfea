"""A method's defaults are said once, in its section of the config: here they reach whoever builds it in a program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from diffrl.config.base import Section


def defaults_of(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a constructor: what it is not given of the section's keys has the section's default."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        taken = [name for name in inspect.signature(init).parameters if name in section.model_fields]

        @functools.wraps(init)
        def filled(self: Any, *args: Any, **given: Any) -> None:
            fields = {name: section.model_fields[name] for name in taken if name not in given}
            init(self, *args, **{k: f.get_default(call_default_factory=True) for k, f in fields.items()}, **given)

        return filled

    return decorate
