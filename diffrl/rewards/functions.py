"""What people write as a reward, brought to the protocol: functions and classes of one, two or three arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.rewards.protocol import ABILITIES


def as_tensor(scores: Any) -> Any:
    """A list, tuple or array of numbers as a tensor, None as NaN; anything else as it is, for the checks to name."""
    if isinstance(scores, np.ndarray) and scores.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(scores)) if scores.dtype.kind in "fiub" else scores
    if isinstance(scores, np.ndarray):
        scores = scores.tolist()
    if not isinstance(scores, list | tuple):
        return scores
    try:
        if any(isinstance(one, list | tuple) for one in scores):
            return torch.stack([as_tensor(row) for row in scores])
        if scores and all(isinstance(one, bool | np.bool_) for one in scores):
            return torch.tensor(scores)
        return torch.tensor([float("nan") if one is None else float(one) for one in scores], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return scores


WORDS = ("images", "prompts", "metadata")  # what a reward may ask for by name


@functools.lru_cache(maxsize=64)
def adapt(thing: Any, name: str) -> Any:
    """A function, or a class, of one to three of `WORDS`, by name or else in this order, as a class with the protocol.

    What else it takes, with a default, is a parameter of the reward. `images` come as a tensor (B, 3, H, W) in [0, 1],
    or as pictures where its annotation says `Image` (`list[Image.Image]`). What fits the protocol, or is none of
    these, comes back as it is.
    """
    if inspect.isclass(thing):
        call = thing.__dict__.get("__call__")
        order = _order(call, skip=1) if inspect.isfunction(call) else None
        own = {} if hasattr(thing, "name") else {"name": name}
        if call is None or order is None or (order[0] == WORDS and not order[1] and not own):
            return thing
        if order[0] == WORDS and not order[1]:
            return type(thing.__name__, (thing,), {**own, "written": thing, "__module__": thing.__module__})
        names, pictures = order

        def method(self: Any, *given: Any) -> Any:
            return call(self, *_chosen(names, pictures, given))

        return type(
            thing.__name__, (thing,), {**own, "__call__": method, "written": thing, "__module__": thing.__module__}
        )
    if not inspect.isfunction(thing) or (order := _order(thing)) is None:
        return thing
    return _of_function(thing, name, *order)


def _of_function(function: Any, name: str, names: tuple[str, ...], pictures: bool) -> type:
    parameters = list(inspect.signature(function).parameters.values())
    more = [
        one.replace(kind=one.KEYWORD_ONLY) for one in parameters[len(names) :] if one.kind is not one.VAR_POSITIONAL
    ]

    def __init__(self: Any, **arguments: Any) -> None:
        self.arguments = arguments

    def __call__(self: Any, *given: Any) -> Any:
        return function(*_chosen(names, pictures, given), **self.arguments)

    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([me, *more])  # type: ignore[attr-defined]
    declared = {one: getattr(function, one) for one in _abilities() if hasattr(function, one)}
    own = {one: staticmethod(value) if inspect.isroutine(value) else value for one, value in declared.items()}
    facts = {
        "name": name,
        "written": function,
        "function": staticmethod(function),
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    return type(name, (), {**own, **facts, "__init__": __init__, "__call__": __call__})


def _abilities() -> list[str]:
    return [name for ability, one in ABILITIES.items() for name in (ability, *one.methods)]


def _order(call: Any, skip: int = 0) -> tuple[tuple[str, ...], bool] | None:
    """Which of `WORDS` it takes, in its order, and whether it wants pictures; None where it takes something else."""
    parameters = list(inspect.signature(call).parameters.values())[skip:]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return WORDS, False
    plain = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    taken = [one for one in plain if one.name in WORDS or one.default is one.empty]
    required = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if not 1 <= len(taken) <= 3 or required or plain[: len(taken)] != taken:
        return None
    names = [one.name for one in taken]
    left = [word for word in WORDS if word not in names]
    words = tuple(name if name in WORDS else left.pop(0) for name in names)
    kinds = {word: str(one.annotation) for word, one in zip(words, taken, strict=True)}
    return words, "Image" in kinds.get("images", "")


def _chosen(names: Sequence[str], pictures: bool, given: Sequence[Any]) -> list[Any]:
    values = dict(zip(WORDS, given, strict=True))
    if pictures:
        values["images"] = to_pictures(values["images"])
    return [values[name] for name in names]


def to_pictures(images: Tensor) -> list[Any]:
    """(B, 3, H, W) in [0, 1] as B pictures of PIL."""
    from PIL import Image

    pixels = (images.detach().float().clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(one) for one in pixels]
