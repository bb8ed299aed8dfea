"""Rewards given as Python objects (functions, classes, objects) by the program that trains or evaluates with them.

A config holds text, so such a reward is known by a name, `python:NAME`, as long as the program runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import ABILITIES, missing_of_class

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "python:"
_known: dict[str, Any] = {}


def register(name: str, thing: Any) -> str:
    """Make `thing` known as a reward, in the place of an earlier one of this name; returns its plugin's text.

    `thing`: a function of `(images)`, `(images, prompts)` or `(images, prompts, metadata)` that returns B scores; a
    class with the reward protocol, built with the entry's parameters; or an object with the protocol.

    Raises:
        UserError: it is none of these.
    """
    if not callable(thing):
        raise UserError(
            f'reward "{name}": a {type(thing).__name__} cannot be called; give a function, a class or an object'
        )
    if not inspect.isclass(thing) and missing_of_class(type(thing)):  # a function, a bound method, a partial
        from diffrl.rewards.functions import adapt

        adapted = adapt(thing, name) if inspect.isfunction(thing) else thing
        thing = adapted() if inspect.isclass(adapted) else _from_function(name, thing)
    _known[name] = thing
    return PREFIX + name


def is_local(plugin: str) -> bool:
    """Whether a plugin's text names an object of the program."""
    return plugin.startswith(PREFIX)


def knows(plugin: str) -> bool:
    """Whether this program has given `python:NAME`."""
    return plugin.removeprefix(PREFIX) in _known


def forget(plugin: str) -> None:
    """Take `python:NAME` out."""
    _known.pop(plugin.removeprefix(PREFIX), None)


def find(plugin: str) -> Any:
    """The class or object behind `python:NAME`; UserError if this program has not given it."""
    name = plugin.removeprefix(PREFIX)
    if name not in _known:
        hint = nearest(name, _known) if _known else ""
        text = f'"{plugin}" is an object of the program that used it; give it, as in rewards={{"{name}": ...}}'
        raise UserError(text + hint)
    return _known[name]


def source_of(plugin: str) -> str:
    """The text of the reward's code, for what tells one reward from another; of an interactive one its bytecode."""
    thing = find(plugin)
    subject = getattr(thing, "function", thing)
    subject = subject if inspect.isroutine(subject) or inspect.isclass(subject) else type(subject)
    try:
        return inspect.getsource(subject)
    except (OSError, TypeError):  # typed at a prompt, or made by exec
        parts = vars(subject).values() if inspect.isclass(subject) else [subject]
        return "\n".join(_bytecode(part.__code__) for part in parts if hasattr(part, "__code__"))


def _bytecode(code: Any) -> str:
    """Instructions, names and constants, those of inner functions included; no addresses."""
    constants = [_bytecode(one) if inspect.iscode(one) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


class _Function:
    """A function with the reward protocol."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: int) -> None:
        self.name, self.function, self._arguments = name, function, arguments

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """The function's scores (B,): what it returned, or its list of numbers as a tensor."""
        import torch

        scores = self.function(*(images, prompts, metadata)[: self._arguments])
        return scores if isinstance(scores, torch.Tensor) else torch.as_tensor(scores, dtype=torch.float32)


def _from_function(name: str, function: Callable[..., Any]) -> _Function:
    signature = inspect.signature(function)
    for count in (3, 2, 1):  # the most that it takes
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        # On the class, since abilities are asked of classes.
        names = [name for ability, one in ABILITIES.items() for name in (ability, *one.methods)]
        declared = {name: getattr(function, name) for name in names if hasattr(function, name)}
        abilities = {name: staticmethod(v) if inspect.isroutine(v) else v for name, v in declared.items()}
        return type(name, (_Function,), abilities)(name, function, count)
    raise UserError(
        f'reward "{name}": {name}{signature} does not take (images), (images, prompts) or (images, prompts, metadata)'
    )
