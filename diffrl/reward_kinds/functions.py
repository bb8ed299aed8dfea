"""What people write as a reward, brought to the protocol: whatever is called with images, prompts or metadata."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.rewards.protocol import ABILITIES

WORDS = ("images", "prompts", "metadata")  # what a reward may ask for by name
ALSO = {"image": 0, "img": 0, "picture": 0, "pixel": 0, "prompt": 1, "text": 1, "caption": 1, "meta": 2}  # without "s"


@dataclass
class _Taken:
    """How a call gets what it names: words by position, {its parameter: word} by name, and what is left to the config.

    form: what `images` are: "" a tensor (B, 3, H, W) in [0, 1], "array" the same of NumPy, "pictures" a list of PIL's.
    """

    order: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    more: list[inspect.Parameter] = field(default_factory=list)
    form: str = ""

    @property
    def plain(self) -> bool:
        """Is it what the protocol hands over?"""
        return self.order == list(WORDS) and not self.form

    def give(self, call: Any, given: Sequence[Any], more: Mapping[str, Any]) -> Any:
        """What the call returns; of a coroutine what it ends with."""
        values = dict(zip(WORDS, given, strict=True))
        if self.form:
            values["images"] = to_pictures(given[0]) if self.form == "pictures" else given[0].detach().cpu().numpy()
        by_name = {key: values[word] for key, word in self.named.items()}
        found = call(*[values[word] for word in self.order], **by_name, **more)
        if not inspect.isawaitable(found):
            return found
        from diffrl.reward_kinds.coroutines import running_loop

        async def whole() -> Any:
            return await found

        return asyncio.run_coroutine_threadsafe(whole(), running_loop()).result()


def adapt(thing: Any, name: str) -> Any:
    """What can be called with some of `WORDS`, by name or else in this order, as a class with the protocol.

    thing: a class, or a function, method, partial or object. What a function takes besides is a parameter of the
    reward. `images` come as PIL pictures or as an array where the annotation says so; a coroutine is waited for. A
    class with the protocol, or without these, comes back as it is, and so does what cannot be called. UserError for a
    function without them.
    """
    if not callable(thing) or (inspect.isclass(thing) and "__call__" not in dir(thing)):
        return thing
    taken = _taken(thing)
    if taken is None and inspect.isclass(thing):
        return thing
    if taken is None:
        shown = f"{getattr(thing, '__name__', name)}{_signature(thing) or '(...)'}"
        text = f'reward "{name}": {shown} does not take (images), (images, prompts) or (images, prompts, metadata)'
        raise UserError(f"{text}, by these names or in this order")
    if not inspect.isclass(thing):
        return _of_function(thing, name, taken)
    own: dict[str, Any] = {} if isinstance(getattr(thing, "name", None), str) else {"name": name}
    if not taken.plain or inspect.iscoroutinefunction(thing.__call__) or not inspect.isfunction(_method(thing)):

        def method(self: Any, *given: Any) -> Any:
            return taken.give(super(made, self).__call__, given, {})

        own["__call__"] = method
    made: Any = type(thing.__name__, (thing,), {**own, "written": thing, "__module__": thing.__module__})
    return made if own else thing


def _of_function(function: Any, name: str, taken: _Taken) -> type:
    def __init__(self: Any, **arguments: Any) -> None:
        self.arguments = arguments

    def __call__(self: Any, *given: Any) -> Any:
        return taken.give(function, given, self.arguments)

    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = inspect.Signature([me, *taken.more])  # type: ignore[attr-defined]
    declared = {one: getattr(function, one) for one in _abilities() if hasattr(function, one)}
    own = {one: staticmethod(value) if inspect.isroutine(value) else value for one, value in declared.items()}
    facts = {
        "name": name,
        "written": staticmethod(function),
        "__module__": getattr(function, "__module__", None) or type(function).__module__,
        "__doc__": function.__doc__,
    }
    return type(name, (), {**own, **facts, "__init__": __init__, "__call__": __call__})


def _abilities() -> list[str]:
    return [name for ability, one in ABILITIES.items() for name in (ability, *one.methods)]


def _method(thing: type) -> Any:
    return inspect.getattr_static(thing, "__call__")


def _signature(thing: Any) -> inspect.Signature | None:
    """Of what is called in the end, without `self`; annotations as objects where they can be read."""
    module = thing if inspect.isclass(thing) else type(thing)
    call: Any = thing
    if issubclass(module, torch.nn.Module):
        call = thing.forward
    elif inspect.isclass(thing):
        call = _method(thing).__func__ if isinstance(_method(thing), staticmethod) else thing.__call__
    try:
        try:
            found = inspect.signature(call, eval_str=True)
        except (NameError, SyntaxError, TypeError, AttributeError):
            found = inspect.signature(call)
    except (ValueError, TypeError):  # of C
        return None
    bound = inspect.isclass(thing) and not isinstance(_method(thing), staticmethod)
    return found.replace(parameters=list(found.parameters.values())[bound:])


def _taken(thing: Any) -> _Taken | None:
    """None where it takes none of `WORDS`, or, being a class, something else."""
    signature = _signature(thing)
    parameters = list(signature.parameters.values()) if signature is not None else []
    words = _words(parameters)
    taken, left, rest = _Taken(), [word for word in WORDS if word not in words.values()], False
    for one in parameters:
        word = words.get(one.name)
        if word == "images":
            taken.form = _form(one.annotation)
        if one.kind is one.VAR_POSITIONAL:
            taken.order += left if not rest else []
            left = left if rest else []
        elif one.kind is one.VAR_KEYWORD:
            taken.named |= {word: word for word in left}
            taken.more.append(one)
        elif word is None and one.kind is one.POSITIONAL_ONLY:
            if one.default is one.empty:
                return None
            rest = True
        elif word is None:
            taken.more.append(one.replace(kind=one.KEYWORD_ONLY))
            rest = True
        elif one.kind is one.KEYWORD_ONLY or (rest and one.kind is one.POSITIONAL_OR_KEYWORD):
            taken.named[one.name] = word
        else:
            taken.order.append(word)
    needed = any(one.default is one.empty and one.kind is one.KEYWORD_ONLY for one in taken.more)
    none = not (taken.order or taken.named) or (needed and inspect.isclass(thing))
    return None if none else taken


def _words(parameters: Sequence[inspect.Parameter]) -> dict[str, str]:
    """{parameter: its word}: by its own name, then by one that is like it, then by what is left, in order."""
    found = {one.name: one.name for one in parameters if one.name in WORDS and one.kind not in _STARS}
    needed = [one for one in parameters if one.default is one.empty and one.kind not in _STARS]
    for one in needed:
        like = ALSO.get(one.name.lower().rstrip("s"))
        if one.name not in found and like is not None and WORDS[like] not in found.values():
            found[one.name] = WORDS[like]
    left = [word for word in WORDS if word not in found.values()]
    known = "images" not in left
    for one in needed:
        known = known and one.name not in found  # before the first known one it is a parameter of the reward
        if one.name not in found and not known and left and one.kind is not one.KEYWORD_ONLY:
            found[one.name] = left.pop(0)
    return found


_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _form(annotation: Any) -> str:
    told = str(annotation)
    if "Tensor" in told or "torchvision" in told:
        return ""
    return "array" if re.search(r"ndarray|NDArray", told) else "pictures" if re.search(r"\bImage\b", told) else ""


def to_pictures(images: Tensor) -> list[Any]:
    """(B, 3, H, W) in [0, 1] as B pictures of PIL."""
    from PIL import Image

    pixels = (images.detach().float().clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(one) for one in pixels]
