"""The rewards' cards side by side: a table for the terminal, and Markdown for the README."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diffrl.errors import UserError
from diffrl.rewards.protocol import Card
from diffrl.rewards.registry import available, load_class

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("reward", "measures", "range", "better", "weights", "licence", "cost", "known exploits", "citation")
SHORT = ("reward", "measures", "range", "weights", "licence", "cost", "known exploits")


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


def table() -> Table:
    """The cards for the terminal."""
    from rich.table import Table

    grid = Table(show_lines=True)
    for column in COLUMNS:
        grid.add_column(column, no_wrap=column == "reward")
    for row in rows():
        grid.add_row(*row)
    return grid


def markdown() -> str:
    """The cards as the README's Markdown table: the columns `SHORT`."""
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows()]
    for row in table:
        if row["better"] == "lower":
            row["range"] += "; lower is better"
    lines = [SHORT, ["---"] * len(SHORT), *([row[column] for column in SHORT] for row in table)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _span(card: Card) -> str:
    low, high = card.range
    return "unbounded" if math.isinf(low) and math.isinf(high) else f"{_bound(low)} to {_bound(high)}"


def _bound(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:g}"
