"""What a reward is: a plain callable with a name, and abilities that it may declare. No base class is needed.

Shapes: B images, H x W pixels, D the width of an embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """What a user should know of a reward before optimising it.

    `range`: the lowest and highest possible score (`-inf`, `inf` where there is no bound); `better`: "higher" or
    "lower".
    """

    measures: str
    range: tuple[float, float]
    citation: str
    weights: str
    licence: str
    cost: str
    exploits: str
    better: str = "higher"


class Reward(Protocol):
    """The protocol of a plugin. Heavy imports belong into the constructor.

    Abilities that a class may declare as attributes or methods; what it leaves out is off:

    - `groupwise = True`: the score depends on the other images of the group; every call gets one whole group.
    - `differentiable = True`: gradients flow from the scores to `images`.
    - `embeds = True`: has `embed_image(images) -> (B, D)`, through which gradients flow, `embed_text(prompts) -> (B,
      D)` and `score(image_embeddings, text_embeddings) -> (B,)`, and `__call__` is their composition.
    - `applies(prompt, metadata) -> bool`: False makes the score NaN, and the image is not sent to the reward.
    - `remote = True`: the work is done by another machine: on the CPU, too, scoring goes on beside sampling.
    - `batch_size`: most images in one call. `device`: where `images` should lie. `card`: a `Card`.
    """

    name: str

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores (B,) of `images` (B, 3, H, W), float in [0, 1], for their B prompts and the prompts' metadata."""
        ...


def lower_is_better(rewards: Mapping[str, Reward | type]) -> frozenset[str]:
    """The names whose card says so. Give the rewards where there are some: a served one's card is not its class's."""
    cards = {name: getattr(reward, "card", None) for name, reward in rewards.items()}
    return frozenset(name for name, card in cards.items() if card is not None and card.better == "lower")


class Embedder(Reward, Protocol):
    """A reward that compares an image's embedding with its prompt's (CLIP-like)."""

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to (B, D), differentiable."""
        ...

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Prompts to (B, D), constants."""
        ...

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """(B, D) and (B, D) to (B,)."""
        ...


class RewardError(RuntimeError):
    """A reward failed: the message names the reward, the prompt and what to do."""


def missing_of_class(reward_class: object) -> list[str]:
    """What a class lacks to be a reward, before one is built."""
    if not inspect.isclass(reward_class):
        return [f"it is a {type(reward_class).__name__}, not a class"]
    call = next((c.__dict__["__call__"] for c in inspect.getmro(reward_class) if "__call__" in c.__dict__), None)
    if not inspect.isfunction(call):
        return ["the method __call__(self, images, prompts, metadata) is missing"]
    try:
        inspect.signature(call).bind(None, None, None, None)
    except TypeError:
        return [f"__call__{inspect.signature(call)} does not take (self, images, prompts, metadata)"]
    return []


def missing_of_instance(reward: object) -> list[str]:
    """What a built reward lacks: its name, and the methods and types of the abilities that it declares."""
    missing = []
    if not isinstance(getattr(reward, "name", None), str):
        missing.append("the attribute `name` (a string) is missing")
    for flag in ("groupwise", "differentiable", "embeds", "remote"):
        if not isinstance(getattr(reward, flag, False), bool):
            missing.append(f"`{flag}` is not True or False")
    if getattr(reward, "embeds", False) is True:
        lacking = [m for m in ("embed_image", "embed_text", "score") if not callable(getattr(reward, m, None))]
        missing += [f"`embeds` is declared, but the method {method} is missing" for method in lacking]
    if not callable(getattr(reward, "applies", lambda prompt, metadata: True)):
        missing.append("`applies` is not a method (prompt, metadata) -> bool")
    size = getattr(reward, "batch_size", None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        missing.append(f"`batch_size` is {size!r}, not a positive number")
    card = getattr(reward, "card", None)
    if card is not None and not isinstance(card, Card):
        missing.append("`card` is not a diffrl.rewards.Card")
    return missing
