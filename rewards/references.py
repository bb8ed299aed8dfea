"""Pictures to compare generated ones with: of a folder, of a prompt's metadata, or the playground's true ones.

Shapes: B images, H x W pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.errors import UserError, in_one_line
from diffrl.reward_kinds.learning import Learner
from diffrl.rewards.protocol import RewardError
from diffrl.tools.pictures import SUFFIXES, to_rgb

KEY = "reference"


def stacks(pictures: Sequence[Tensor]) -> list[Tensor]:
    """Pictures (3, H, W) as one batch (B, 3, H, W), or one by one where their sizes differ."""
    if len({picture.shape for picture in pictures}) == 1:
        return [torch.stack(list(pictures))]
    return [picture[None] for picture in pictures]


class References:
    """`source`: "playground" (the renderer draws a true picture of the prompt), "metadata" (`reference` of the prompt's
    metadata: a path, or a list of them), or a folder, whose pictures are for any prompt.

    Raises `UserError`, naming `reward`, for a folder without pictures.
    """

    def __init__(self, source: str, reward: str) -> None:
        self.source, self.reward = source, reward
        self.files: list[Path] = []
        if source not in ("playground", "metadata"):
            folder = Path(source)
            self.files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
            if not self.files:
                known = '"playground", "metadata" or a folder with pictures'
                raise UserError(f'reward "{reward}": references: "{source}" is not one of {known}')

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """Whether there is a picture for this prompt."""
        if self.source == "playground":
            from diffrl_playground.grammar import understood

            return understood(prompt) is not None
        return bool(self.files or metadata.get(KEY))

    def draw(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], keys: Sequence[int]) -> list[Tensor]:
        """One picture (3, H, W) in [0, 1] for each of B prompts, chosen by its key; their sizes may differ."""
        return [self._one(*row) for row in zip(prompts, metadata, keys, strict=True)]

    def all(self, prompt: str, metadata: Mapping[str, Any]) -> list[Tensor]:
        """All references (3, H, W) of a prompt; of the playground's, eight (the paper's number for a prompt)."""
        count = 8 if self.source == "playground" else len(self._files(metadata))
        return [self._one(prompt, metadata, key) for key in range(count)]

    def identity(self, prompt: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """What two prompts with the same references share."""
        return (prompt,) if self.source == "playground" else tuple(map(str, self._files(metadata)))

    def _files(self, metadata: Mapping[str, Any]) -> list[Path]:
        given = metadata.get(KEY)
        return self.files or [Path(path) for path in ([given] if isinstance(given, str) else given or [])]

    def _one(self, prompt: str, metadata: Mapping[str, Any], key: int) -> Tensor:
        if self.source == "playground":
            from diffrl_playground.renderer import draw

            pixels = draw(prompt, np.random.default_rng(key))
            return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255
        files = self._files(metadata)
        return self._read(files[key % len(files)])

    def _read(self, path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as picture:
                return torch.from_numpy(np.array(to_rgb(picture))).permute(2, 0, 1).float() / 255
        except (OSError, ValueError) as error:
            raise RewardError(
                f'reward "{self.reward}": cannot read the reference {path}: {in_one_line(error)}'
            ) from error


class LearnsFromReferences(ABC):
    """What rewards share that learn in a run from images and references."""

    learns = True
    name: str
    pool: References
    learner: Learner

    @abstractmethod
    def score_first(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1] as the reward was when it had learned once."""

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """Whether there is a reference for the prompt."""
        return self.pool.applies(prompt, metadata)

    @property
    def first(self) -> First | None:
        """This reward as it was when it had learned once; None before."""
        return First(self) if self.learner.met else None

    def state_dict(self) -> dict[str, Tensor]:
        """What learns, its first state and Adam's moments."""
        return self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        self.learner.load_state_dict(state)


class First:
    """A reward that learns, as it was when it had learned once."""

    def __init__(self, reward: LearnsFromReferences) -> None:
        self.reward, self.name = reward, f"{reward.name}_first"

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.reward.score_first(images, prompts)
