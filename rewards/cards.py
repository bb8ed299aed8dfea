"""The cards of the zoo's rewards, which stand in `cards.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from diffrl.rewards.protocol import Card

_CARDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8"))


def card_of(name: str, **facts: object) -> Card:
    """The card of the reward `name`; each of the `facts` stands where a text has its name in braces."""
    low, high = _CARDS[name]["range"]
    texts = {key: text.format(**facts) for key, text in _CARDS[name].items() if key != "range"}
    return Card(**texts, range=(float(low), float(high)))
