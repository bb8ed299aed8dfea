"""D2-Align's correction of a CLIP-like reward: a direction in its text-embedding space (arXiv 2512.24146, section 6).

symbol        name here          meaning
b_v           direction          (D,) the learned correction
e_text        e_text             (B, D) unit text embeddings of the reward model
e+, e-        positive, negative normalize(e_text + b_v), normalize(e_text - b_v)
e~            guided_embedding   e- + omega (e+ - e-), not normalised again
R_guided      Corrected          score(e_img, e~)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.records.disk import replacing
from diffrl.reward_kinds.fingerprint import embedder, fingerprint, same_model
from diffrl.rewards.answers import applies
from diffrl.rewards.protocol import Card, Metadata, Reward, ability

OMEGA = 1.5  # the paper's
_KEY = "d2align"


def guided_embedding(e_text: Tensor, direction: Tensor, omega: float = OMEGA) -> Tensor:
    """e~ (B, D) of unit text embeddings (B, D) and b_v (D,): `e- + omega (e+ - e-)`; differentiable in both.

    omega = 1/2 gives the middle of e+ and e-, b_v = 0 gives e_text for every omega.
    """
    positive = F.normalize(e_text + direction, dim=-1)
    negative = F.normalize(e_text - direction, dim=-1)
    return negative + omega * (positive - negative)


@dataclass(frozen=True)
class Identity:
    """What a direction was learned for: the reward (plugin and arguments), the prompts and how it was learned."""

    reward: str
    arguments: dict[str, Any]
    prompts: str  # SHA-256 of the training prompts
    seed: int
    omega: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`clip` or `clip (model=ViT-H-14)`, for messages."""
        inside = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.reward} ({inside})" if inside else self.reward


@dataclass(frozen=True)
class Direction:
    """A learned direction: `vector` (D,), `probes` (P, D) of the reward model, both float32 on the CPU."""

    vector: Tensor
    probes: Tensor
    identity: Identity

    @property
    def norm(self) -> float:
        return float(self.vector.norm())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all; what is known of the direction is in its metadata."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"direction": self.vector.contiguous(), "probes": self.probes.contiguous()}
        with replacing(path) as temporary:
            temporary.write_bytes(to_bytes(tensors, metadata={_KEY: json.dumps(asdict(self.identity), sort_keys=True)}))


def load_direction(path: str | Path) -> Direction:
    """Read what `Direction.save` wrote. Raises UserError for a missing file and one of another kind."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f'no direction file "{path}"; `diffrl d2align learn CONFIG` writes one')
    try:
        with safe_open(str(path), "pt") as file:
            identity = Identity(**json.loads((file.metadata() or {})[_KEY]))
            return Direction(file.get_tensor("direction"), file.get_tensor("probes"), identity)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a direction that `diffrl d2align learn` wrote ({error})") from error


class Corrected:
    """The reward R_guided of an embedding reward: a reward like any other, for every objective.

    Without a direction it is the plain reward (b_v = 0).
    """

    embeds = True
    differentiable = True
    corrects = True  # the run logs its direction
    needs = "embeds"  # what the corrected reward has to declare; asked when a config is read

    def __init__(self, base: Reward, omega: float = OMEGA, direction: Direction | None = None, name: str = "") -> None:
        name = name or base.name
        self.base = embedder(base, name)
        self.name, self.omega = f"d2:{name}", omega
        self.device, self.batch_size = ability(base, "device"), ability(base, "batch_size")
        card: Card | None = ability(base, "card")
        if card is not None:  # |e~| is at most omega + |omega - 1|
            reach = max(abs(bound) for bound in card.range) * (omega + abs(omega - 1))
            bounds = (-reach, reach) if math.isfinite(reach) else (-math.inf, math.inf)
            self.card = replace(card, measures=f"{card.measures}; corrected by D2-Align's direction", range=bounds)
        self.direction: Direction | None = None
        self._vector: Tensor | None = None
        if direction is not None:
            self.use(direction, f"reward {name}")

    def use(self, direction: Direction, name: str) -> None:
        """Correct by `direction` from now on; UserError if it was learned for another reward model than `name`."""
        if not same_model(fingerprint(self.base), direction.probes):
            raise UserError(
                f"this direction was learned for the reward model {direction.identity.name}, which is not that of "
                f"{name}: their text embeddings differ; learn a direction for {name}"
            )
        self.direction, self._vector = direction, None

    @property
    def norm(self) -> float:
        """Length of b_v."""
        return self.direction.norm if self.direction is not None else 0.0

    def applies(self, prompt: str, metadata: Metadata) -> bool:
        return applies(self.base, prompt, metadata)

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the reward's own unit vectors (B, D); gradients flow to the images."""
        return self.base.embed_image(images)

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Prompts to guided embeddings e~ (B, D), which are no unit vectors."""
        e_text = self.base.embed_text(prompts)
        if self.direction is None:
            return e_text
        if self._vector is None or self._vector.device != e_text.device:
            self._vector = self.direction.vector.to(e_text)
        return guided_embedding(e_text, self._vector, self.omega)

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """The reward's own score (B,) of image embeddings and guided embeddings."""
        return self.base.score(image_embeddings, text_embeddings)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """R_guided (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.score(self.embed_image(images), self.embed_text(prompts))
