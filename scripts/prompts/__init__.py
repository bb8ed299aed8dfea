"""The seeded grammars of the shipped prompt sets, and the word lists they draw from.

Train and test are apart by what the prompts ask for, not only by their words: see each grammar. `python -m
scripts.prompts` freezes them in assets/prompts, one file for each set and split.
"""

from __future__ import annotations

from typing import Any

Row = tuple[str, dict[str, Any]]
Splits = dict[str, list[Row]]
