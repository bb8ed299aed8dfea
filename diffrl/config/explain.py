"""What pydantic found wrong with a config, as one line: the place, the key, what was expected, the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list such as [a, b]",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "tuple_type": "a list of two such as [1, 2]",
    "missing": "a list of two",
    "too_long": "a list of two",
    "literal_error": "one of {expected}",
}
# Former keys of which the nearest name is not what takes their place.
RENAMED = {
    "dpo.every": "is dpo.follow now",
    "crd.adaptive": "is crd.beta now: [LOW, HIGH] by reward, or a number for all",
    "engine.offload_vae": "is gone, since an autoencoder is small beside a network: lower optimise.micro_batch",
    "rollout.noise_decay": "is the second of rollout.noise_level: [FIRST, LAST] now",
    "image_set.columns": "is gone: name the reward as the set's scores, rewards: {SCORES: {plugin: REWARD}}",
}


def explain(
    error: ValidationError,
    where: Callable[[tuple[str, ...]], str],
    keys: Sequence[str],
    tables: Sequence[str],
    switches: Sequence[str] = (),
) -> str:
    """One line for the first error, and how many more there are.

    `where(path)`: the place of a key. `keys`: all dotted keys. `tables`: sections whose keys are names of the user's.
    `switches`: sections that are on when they are there.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    path = tuple(str(part) for part in first["loc"])
    if first["type"] == "missing":  # no key is required: it is an item of a pair
        path = path[:-1]
    if first["type"] == "extra_forbidden":
        renamed = RENAMED.get(".".join(path))
        text = f"unknown key: it {renamed}" if renamed else f"unknown key{_nearest_key(path, keys, tables, switches)}"
    elif first["type"] in ("sampler", "loras"):
        text = first["msg"]
    else:
        limits = dict(first.get("ctx", {}))
        hint = ""
        if first["type"] == "literal_error":
            choices = [word for word in str(limits["expected"]).split("'") if word.isidentifier() and word != "or"]
            limits["expected"] = ", ".join(choices)
            close = difflib.get_close_matches(str(first["input"]), choices, n=1)
            hint = f' (nearest: "{close[0]}")' if close else ""
        if path in (("rewards",), ("watch",)):
            hint = f"; write {path[0]}={{NAME: {{}}}}"
        if first["type"] == "greater_than_equal" and path[-1].startswith("guidance"):
            hint = "; none is 1 here, 0 in diffusers"
        expected = _EXPECTED.get(first["type"], "").format(**limits) or first["msg"]
        text = f"expected {expected}, got {show(first['input'])}{hint}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    key = ".".join(path)
    return f"{where(path)}: {key if len(key) <= 200 else key[:197] + '...'}: {text}{more}"


def _nearest_key(path: tuple[str, ...], keys: Sequence[str], tables: Sequence[str], switches: Sequence[str]) -> str:
    """The key that was probably meant: a similar one in the section, one of this name elsewhere, or all."""
    section, leaf = list(path[:-1]), path[-1]
    for table in (one.split(".") for one in tables):
        if section[: len(table)] == table:
            section[len(table) : len(table) + 1] = ["NAME"]
    depth = len(section)
    siblings = [key.split(".")[-1] for key in keys if key.split(".")[:-1] == section]
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)
    if close:
        return f' (nearest: "{".".join([*path[:depth], close[0]])}")'
    # A key of a method that is off is no suggestion: to set it would switch the method on.
    elsewhere = [key for key in keys if key.split(".")[0] not in switches or key.split(".")[0] == path[0]]
    names = {key.split(".")[-1]: key for key in reversed(elsewhere)}
    close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.8)
    if close:
        return f' (nearest: "{names[close[0]]}")'
    return f" (keys {'of ' + '.'.join(path[:-1]) if section else 'here'}: {', '.join(siblings)})"


def show(value: Any) -> str:
    """A value in an error message, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
