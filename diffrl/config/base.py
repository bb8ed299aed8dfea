"""What the config's sections share: keys and strict models (`diffrl.keys`), and what they read of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from diffrl.keys import LARGEST, PAIR, PathText, Problem, PromptSource, Resolution, Section, Share, key, section
from diffrl.sampling import STOCHASTIC
from diffrl.sampling import SamplerSpec as Sampling  # what a method's section reads of `rollout`

__all__ = [
    "LARGEST",
    "PAIR",
    "STOCHASTIC",
    "PathText",
    "Problem",
    "PromptSource",
    "Resolution",
    "Sampling",
    "Section",
    "Share",
    "key",
    "section",
]


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
    def gardo(self) -> Any: ...
