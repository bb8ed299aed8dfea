"""The rewards' cards in one line each, one as a whole, and as Markdown for the README."""

from __future__ import annotations

import math

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import Card
from diffrl.rewards.registry import available, load_class

COLUMNS = ("reward", "measures", "range", "better", "weights", "licence", "cost", "known exploits", "citation")
SHORT = ("reward", "measures", "known exploits", "weights; cost", "licence")  # narrow enough for a page


def cards() -> dict[str, Card | str]:
    """The card of every installed reward (nothing is built, no weights are read), or one line on why there is none."""
    result: dict[str, Card | str] = {}
    for name in available():
        try:
            card = getattr(load_class(name), "card", None)
        except UserError as error:
            result[name] = str(error)
            continue
        result[name] = card if isinstance(card, Card) else "no card"
    return result


def rows() -> list[list[str]]:
    """One row per reward, in the order of `COLUMNS`."""
    lines = []
    for name, card in cards().items():
        if isinstance(card, str):
            lines.append([name, card] + [""] * (len(COLUMNS) - 2))
            continue
        about = (card.better, card.weights, card.licence, card.cost, card.exploits, card.citation)
        lines.append([name, card.measures, _span(card), *about])
    return lines


def overview(width: int = 80) -> str:
    """One line for each reward: its name and what it measures, cut to `width` characters."""
    first = max(map(len, cards()), default=0) + 2
    lines = [
        f"{name:<{first}}{about}{' (lower is better)' * (better == 'lower')}" for name, about, _, better, *_ in rows()
    ]
    lines = [line if len(line) <= width else f"{line[: width - 4]} ..." for line in lines]
    return "\n".join(
        [*lines, "", "`diffrl rewards show NAME` has the card: range, weights, licence, cost, known exploits."]
    )


def shown(name: str) -> str:
    """A reward's card as lines of text. UserError for a name that no installed reward has."""
    found = next((row for row in rows() if row[0] == name), None)
    if found is None:
        raise UserError(f'unknown reward "{name}"{nearest(name, available())}')
    width = max(map(len, COLUMNS)) + 2
    return "\n".join(f"{column:<{width}}{cell}" for column, cell in zip(COLUMNS, found, strict=True) if cell)


def markdown() -> str:
    """The cards as the guide's Markdown table: the columns `SHORT`, with the range beside what is measured."""
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows()]
    for row in table:
        span = f"{row['range']}, lower is better" if row["better"] == "lower" else row["range"]
        row["measures"] += f" (score: {span})" if span else ""
        row["weights; cost"] = "; ".join(filter(None, (row["weights"], row["cost"])))
    lines = [SHORT, ["---"] * len(SHORT), *([row[column] for column in SHORT] for row in table)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _span(card: Card) -> str:
    low, high = card.range
    return "unbounded" if math.isinf(low) and math.isinf(high) else f"{_bound(low)} to {_bound(high)}"


def _bound(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:g}"
