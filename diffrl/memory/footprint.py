"""What the weights of a reward take, by what its class says of its arguments: nothing is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from diffrl.errors import UserError, in_one_line
from diffrl.rewards.protocol import ability
from diffrl.rewards.registry import load_class, split_name


def footprint(name_or_path: str, arguments: Mapping[str, Any]) -> int | None:
    """Bytes of the weights that the reward has on its device, built with these arguments; None: it does not say.

    Raises UserError for an unknown name, and for what the reward's own `footprint` refuses or fails with.
    """
    reward, inner = load_class(name_or_path), split_name(name_or_path)[1]
    estimate = ability(reward, "footprint")
    if estimate is None:
        return None
    wrapped = {} if inner is None else {"reward": inner}
    try:
        size = estimate(**defaults(name_or_path) | wrapped | dict(arguments))
        return None if size is None else int(size)
    except UserError:
        raise
    except Exception as error:  # a plugin's own code
        raise UserError(f"footprint() of {reward.__name__} failed with {in_one_line(error)}") from error


def defaults(name_or_path: str) -> dict[str, Any]:
    """What a reward is built with where nothing else is given."""
    parameters = inspect.signature(load_class(name_or_path)).parameters.items()
    return {name: one.default for name, one in parameters if one.default is not inspect.Parameter.empty}
