"""An advantage rule that is a plain function or class: the config's section of its keys, by its signature."""

from __future__ import annotations

import inspect
import typing
from typing import Any, TypeVar

from pydantic import create_model
from pydantic.errors import PydanticUserError

from diffrl.config.base import Section, key
from diffrl.errors import UserError, in_one_line

Base = TypeVar("Base", bound=Section)


def section_of(thing: Any, kind: str, rule: str, base: type[Base]) -> type[Base]:
    """A section under `base` with the keys of `thing`, which `rule` names; `kind`: what messages call it.

    Raises:
        UserError: it is not called as a rule, or a parameter of it cannot be a key.
    """
    if not _is_called(thing):
        raise UserError(f'"{rule}" is not an {kind}: it is not called with (scores, groups, std)')
    parameters = list(inspect.signature(thing).parameters.values())
    own = parameters if inspect.isclass(thing) else parameters[3:]
    try:
        types = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing, include_extras=True)
        fields: dict[str, Any] = {one.name: _field(one, types, kind, rule, base) for one in own}
        return create_model("Advantages", __base__=base, **fields)
    except (NameError, TypeError, PydanticUserError) as error:
        raise UserError(f'{kind} "{rule}": the types of its keys cannot be read: {in_one_line(error)}') from error


def _is_called(thing: Any) -> bool:
    """With (scores, groups, std), itself or an instance of it?"""
    count = 3
    if inspect.isclass(thing):
        count, thing = 4, next((c.__dict__["__call__"] for c in thing.__mro__ if "__call__" in c.__dict__), None)
    try:
        inspect.signature(thing).bind_partial(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


def _field(
    parameter: inspect.Parameter, types: dict[str, Any], kind: str, rule: str, base: type[Section]
) -> tuple[Any, Any]:
    """(type, key) of a parameter; UserError for one that cannot be a key."""
    lack = "has no default" if parameter.default is parameter.empty else ""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        lack = "cannot be given by its name"
    elif parameter.name in base.model_fields or parameter.name.startswith(("_", "model_")):
        lack = "has a name that no key can have"
    elif parameter.name not in types:
        lack = "has no type"
    if lack:
        raise UserError(f'{kind} "{rule}": its parameter {parameter.name} {lack}; a key has a name, a type, a default')
    return types[parameter.name], key(parameter.default, f"of {rule.rpartition(':')[2]}")
