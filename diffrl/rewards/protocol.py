"""What a reward is: a plain callable with a name, and abilities that it may declare. No base class is needed.

Shapes: B images, H x W pixels, D the width of an embedding.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from diffrl.errors import in_one_line

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

    @property
    def repository(self) -> str | None:
        """OWNER/NAME on the hub, where `weights` begins with one."""
        found = re.match(r"(?:\w+: )?([\w.-]+/[\w.-]+)", self.weights)
        return found and found[1]

    def to_json(self) -> dict[str, Any]:
        """Bounds that are not finite are null."""
        return {**asdict(self), "range": [bound if abs(bound) != float("inf") else None for bound in self.range]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Card:
        """The inverse of `to_json`; KeyError, TypeError or ValueError for what is none."""
        low, high = values["range"]
        bounds = (float("-inf") if low is None else low, float("inf") if high is None else high)
        card = cls(**{**values, "range": bounds})
        if not all(isinstance(value, str) for key, value in vars(card).items() if key != "range"):
            raise TypeError("card: expected texts")
        return card


class Reward(Protocol):
    """The protocol of a plugin. Heavy imports belong into the constructor.

    Abilities that a class may declare as attributes or methods (`ABILITIES`); what it leaves out is off:

    - `groupwise = True`: the score depends on the other images of the group; every call gets one whole group.
    - `batchwise = True`: the score depends on all images of an epoch, see `diffrl.reward_kinds.comparing.Batchwise`.
    - `columns`: names of C scores; every call returns (B, C), NaN where one does not apply, and entries choose one.
    - `maps = (h, w)`: has `map(images, prompts, metadata) -> (B, h, w)`, the score by places of the image, the
      top row first, in the card's range, NaN where it says nothing; `__call__` is its mean over the other places.
    - `differentiable = True`: gradients flow from the scores to `images`.
    - `embeds = True`: has `embed_image(images) -> (B, D)`, through which gradients flow, `embed_text(prompts) -> (B,
      D)` and `score(image_embeddings, text_embeddings) -> (B,)`, and `__call__` is their composition.
    - `applies(prompt, metadata) -> bool`: False makes the score NaN, and the image is not sent to the reward.
    - `asks = True`: people answer, in a training run alone (`diffrl.methods.asking`). Evaluations and servers leave it
      out.
    - `remote = True`: another machine does the work, beside sampling; several threads call it at once.
    - `learns = True`: it trains while the policy does, see `diffrl.reward_kinds.learning.Learning`.
    - `figures`: a `GroupFigures` (`diffrl.reward_kinds.figures`), what evaluations report of a prompt's images.
    - `breakdown`: a `Breakdown`, the score by parts, such as kinds of facts, which reports show before and after.
    - `rewrite(images, prompts, metadata) -> list[str]`: for each image a prompt that asks again for what it lacks; for
      `diffrl refine`.
    - `footprint(**arguments) -> int | None`, a static method: the bytes of the weights that a reward built with these
      arguments (defaults included) has on its device; None: it cannot say. It loads nothing: `diffrl doctor` asks it.
    - `batch_size`: most images in one call. `device`: where `images` should lie. `card`: a `Card`.
    """

    name: str

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores (B,) of `images` (B, 3, H, W), float in [0, 1], for their B prompts and the prompts' metadata; NaN, or
        None in a list, for an image without one (or raise `Unscored`): `rewards.NAME.unscored` bounds them."""
        ...


def lower_is_better(rewards: Mapping[str, Reward | type]) -> frozenset[str]:
    """The names whose card says so. Give the rewards where there are some: a served one's card is not its class's."""
    cards = {name: ability(reward, "card") for name, reward in rewards.items()}
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


@dataclass(frozen=True)
class Ability:
    """What is to be known of an ability; see `Reward` for what each of them means.

    default: of a reward that does not declare it. lack: what a declared value lacks, "" if nothing. methods: that come
    with it. kept: it stays where the work is moved or its scores are kept (`Wrapper`). to_json,
    from_json: a server's word of it as JSON, and what a client makes of that (KeyError, TypeError, ValueError); None:
    it is not served.
    """

    default: Any
    lack: Callable[[Any], str]
    methods: tuple[str, ...] = ()
    kept: bool = True
    to_json: Callable[[Any], Any] | None = None
    from_json: Callable[[Any], Any] = lambda value: value


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "is not True or False"


def _size(value: object) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return "" if value is None or whole else f"is {value!r}, not a positive number"


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {str(value)[:40]}")
    return value


def _count(value: Any) -> int | None:
    if lack := _size(value):
        raise ValueError(lack[:60])
    return value


def _figures(value: Any) -> str:
    lacking = [m for m in ("applies", "read", "sums", "figures") if not callable(getattr(value, m, None))]
    if value is None or (not lacking and not _size(getattr(value, "size", None) or 0)):
        return ""
    return f"lacks {f'the method {lacking[0]}' if lacking else '`size`, how many sums there are'}"


def _breakdown(value: Any) -> str:
    names = getattr(value, "names", ())
    known = bool(names) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
    return "" if value is None or (known and callable(value)) else "is not a callable with `names`, those of its parts"


def _columns(value: Any) -> str:
    names = [] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    known = bool(names) and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    return "" if value is None or known else "is not a list of different names"


def _grid(value: Any) -> str:
    known = isinstance(value, Sequence) and len(value) == 2 and not any(map(_size, value)) and None not in value
    return "" if value is None or known else "is not (h, w), two positive numbers"


# All that a reward may declare: wrappers, checks, servers and descriptions of rewards read it here.
ABILITIES: dict[str, Ability] = {
    "groupwise": Ability(False, _flag, to_json=bool, from_json=_bool),
    "batchwise": Ability(False, _flag, methods=("describe", "gains"), kept=False),
    "columns": Ability(None, _columns),
    "maps": Ability(None, _grid, methods=("map",), kept=False),
    "differentiable": Ability(False, _flag, kept=False),
    "embeds": Ability(False, _flag, methods=("embed_image", "embed_text", "score"), kept=False),
    "asks": Ability(False, _flag, methods=("ask",), kept=False),
    "remote": Ability(False, _flag),
    "learns": Ability(False, _flag, methods=("observe", "learn", "state_dict", "load_state_dict"), kept=False),
    "applies": Ability(
        None,
        lambda value: "" if value is None or callable(value) else "is not a method (prompt, metadata) -> bool",
        to_json=lambda value: value is not None,
        from_json=_bool,
    ),
    "figures": Ability(None, _figures),
    "breakdown": Ability(None, _breakdown),
    "rewrite": Ability(None, lambda value: "" if value is None or callable(value) else "is not a method"),
    "footprint": Ability(None, lambda value: "" if value is None or callable(value) else "is not a static method"),
    "batch_size": Ability(None, _size, to_json=lambda value: value, from_json=_count),
    "device": Ability(None, lambda value: ""),
    "commits": Ability(None, lambda value: ""),
    "card": Ability(
        None,
        lambda value: "" if value is None or isinstance(value, Card) else "is not a diffrl.rewards.Card",
        to_json=lambda card: card and card.to_json(),
        from_json=lambda values: None if values is None else Card.from_json(values),
    ),
}


def ability(reward: object, name: str) -> Any:
    """What a reward, or a reward's class, declares, or the default."""
    return getattr(reward, name, ABILITIES[name].default)


class RewardError(RuntimeError):
    """A reward failed: the message names the reward, the prompt and what to do."""


class Unscored(RewardError):
    """A reward has no score for the images of a call, such as a judge that refuses one: that is no failure."""


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
    for ability_name, one in ABILITIES.items():
        try:
            value = ability(reward, ability_name)
            lack = one.lack(value)
        except Exception as error:  # a property of the author's
            missing.append(f"`{ability_name}` raises {in_one_line(error, place=True)}")
            continue
        if lack:
            missing.append(f"`{ability_name}` {lack}")
        elif value not in (None, False):
            lacking = [method for method in one.methods if not callable(getattr(reward, method, None))]
            missing += [f"`{ability_name}` is declared, but the method {method} is missing" for method in lacking]
    return missing


class Wrapper:
    """Everything of `reward` but the call: its name, and the abilities that stay (`Ability.kept`)."""

    moves = False  # its weights come and go, see `find_offloaded`

    def __init__(self, reward: Reward) -> None:
        self.reward, self.name = reward, reward.name

    def __getattr__(self, name: str) -> Any:
        if name in ABILITIES and ABILITIES[name].kept:
            return ability(self.reward, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")


def find_offloaded(reward: object) -> Any:
    """The wrapper that `moves` a reward's weights (`diffrl.reward_kinds.offloading.Offloaded`), if there is one."""
    while isinstance(reward, Wrapper) and not reward.moves:
        reward = reward.reward
    return reward if isinstance(reward, Wrapper) else None
