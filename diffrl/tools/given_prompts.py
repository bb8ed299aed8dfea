"""Prompts that a program or a command line hands over, in the place of a file's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffrl.errors import UserError
from diffrl.prompts import Prompt, prompt_of

PromptLike = str | Mapping[str, Any] | Prompt  # a text, or what a line of a .jsonl file holds


def given_prompts(values: Sequence[PromptLike]) -> list[Prompt]:
    """The prompts that a program hands over: texts, or {"prompt": text, ...} with metadata; each text once.

    Raises:
        UserError: with the place in the list, for what is none, or for a text that comes twice.
    """
    prompts: dict[str, Prompt] = {}
    if not isinstance(values, Iterable) or isinstance(values, Mapping | str):
        raise UserError(f"prompts: expected a list of texts, got a {type(values).__name__}")
    for number, value in enumerate(values):
        where = f"prompts[{number}]"
        if isinstance(value, str | Mapping):
            value = prompt_of({"prompt": value} if isinstance(value, str) else dict(value), where)
        if not isinstance(value, Prompt):
            raise UserError(f'{where}: expected text or {{"prompt": text, ...}}, got a {type(value).__name__}')
        if value.text in prompts:
            raise UserError(f'{where}: "{value.text}" comes twice; a prompt may occur once')
        prompts[value.text] = value
    if not prompts:
        raise UserError("prompts: the list is empty")
    return list(prompts.values())
