"""D2-Align's corrected reward as a plugin: any embedding reward with a direction that `diffrl d2align learn` wrote."""

from __future__ import annotations

from typing import Any

from diffrl.methods.d2align.corrected import Corrected, load_direction
from diffrl_zoo.cards import card_of
from diffrl_zoo.loading import MadeOfAnother, inner


class D2(MadeOfAnother, Corrected):
    """The reward `reward` with its text embedding moved along a learned direction (`d2:clip` is short for it).

    `reward`: a reward that embeds (clip, pickscore, hpsv2, or `path/to/file.py:Class`). `direction`: the file that
    `diffrl d2align learn` wrote for it. `omega`: of the guided embedding; None: the one that it was learned with. All
    other parameters are the reward's own.
    """

    name = "d2"
    card = card_of(name)

    def __init__(
        self, reward: str, direction: str, omega: float | None = None, device: str | None = None, **arguments: Any
    ) -> None:
        learned = load_direction(direction)
        base = inner(reward, device, arguments)
        super().__init__(base, learned.identity.omega if omega is None else omega, learned, reward)
