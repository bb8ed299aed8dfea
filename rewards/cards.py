"""The cards of the zoo's rewards, which stand in `cards.yaml`."""

from __future__ import annotations

from typing import Any

from diffrl.resources import table_beside
from diffrl.rewards.protocol import Card

_CARDS: dict[str, Any] = table_beside(__file__, "cards.yaml")


def card_of(name: str, **facts: object) -> Card:
    """The card of the reward `name`; each of the `facts` stands where a text has its name in braces."""
    low, high = _CARDS[name]["range"]
    texts = {key: text.format(**facts) for key, text in _CARDS[name].items() if key != "range"}
    return Card(**texts, range=(float(low), float(high)))
