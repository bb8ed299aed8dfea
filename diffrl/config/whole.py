"""What a method's section reads of the config around it, as types: it need not know the classes of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from diffrl.config.base import Method, Sampling


class Entry(Protocol):
    """What a method's section reads of a reward's entry."""

    @property
    def plugin(self) -> str | None: ...
    @property
    def arguments(self) -> dict[str, Any]: ...
    @property
    def column(self) -> str | None: ...


class Whole(Protocol):
    """The config."""

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
    def __getattr__(self, name: str) -> Any: ...
