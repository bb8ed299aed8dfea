"""All config keys as text, from the schema."""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Collection, Sequence
from types import NoneType, UnionType
from typing import Any

from pydantic.fields import FieldInfo

from diffrl.config import door
from diffrl.config.base import LARGEST
from diffrl.config.methods import Decay
from diffrl.config.schema import TABLES, is_table, walk
from diffrl.errors import UserError, nearest

_WORDS = {
    Decay: "slow, late, copy or [start, value, slope, cap]",
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
}


def help_config(width: int = 100, only: Sequence[str] = (), methods: Collection[str] | None = None) -> str:
    """Every key with default, meaning, kind and unit, in the layout of a config file; `width` in characters.

    `only`: dotted sections or keys, in the place of all; UserError for one that is none. `methods`: of methods, the
    sections of these alone.
    """
    known = {dotted for dotted, _, _ in walk()}
    for name in only:
        if name not in known:
            raise UserError(f'--help-config: no section or key "{name}"{nearest(name, known)}')
    lines = [
        "Keys of a config file, with their defaults; behind # the meaning, in brackets what is allowed and the unit.",
        "A published model has a preset of resolution, precision and evaluation instead: diffrl/config/presets.py.",
        "On the command line: section.key=value, for example rollout.groups=16 rewards.clip.weight=2 rewards.ocr=null",
        *(["More methods: --help-config NAME of `diffrl objectives`; all keys: --help-config all"] if methods else []),
        "",
    ]
    for dotted, field, inner in walk():
        parts = dotted.split(".")
        if methods is not None and not only and parts[0] not in methods and door.is_method(parts[0]):
            continue
        if only and not any(f"{dotted}.".startswith(f"{name}.") or name.startswith(f"{dotted}.") for name in only):
            continue
        if parts[0] in TABLES[1:] and len(parts) > 1:
            continue  # the same keys as the first table
        indent = "  " * (len(parts) - 1)
        if inner is not None:
            lines += ["", *_wrap(f"{indent}{parts[-1]}:", field.description or "", width)]
            if is_table(tuple(parts)) and dotted not in TABLES[1:]:
                lines.append(f"{indent}  NAME:")
            continue
        unit = (field.json_schema_extra or {}).get("unit") if isinstance(field.json_schema_extra, dict) else ""
        notes = "; ".join(str(note) for note in (_kind(parts, field), unit) if note)
        meaning = f"{field.description} [{notes}]"
        lines += _wrap(f"{indent}{parts[-1]}: {default_of(field)}", meaning, width)
    return re.sub("\n{3,}", "\n\n", "\n".join(lines))


def reference(only: str | None = None) -> str:
    """The same as Markdown tables, one for each section; `only`: that section and what is inside it."""
    tables: dict[str, list[str]] = {}
    meanings: dict[str, str] = {"": "Keys at the top level."}
    for dotted, field, inner in walk():
        parts = dotted.split(".")
        if parts[0] in TABLES[1:] and len(parts) > 1:
            continue  # the same keys as the first table
        owner, name = ".".join(parts[:-1]), parts[-1]
        if inner is not None:
            meanings[dotted + ".NAME" if is_table(tuple(parts)) else dotted] = field.description or ""
            continue
        unit = (field.json_schema_extra or {}).get("unit") if isinstance(field.json_schema_extra, dict) else ""
        kind = "; ".join(str(note) for note in (_kind(parts, field), unit) if note).replace("|", "or")
        cells = (f"`{name}`", f"`{default_of(field)}`", kind, (field.description or "").replace("|", "\\|"))
        tables.setdefault(owner, []).append("| " + " | ".join(cells) + " |")
    lines: list[str] = []
    for owner, rows in tables.items():
        if only is not None and not f"{owner}.".startswith(f"{only}."):
            continue
        if only is None:
            lines += [f"## {owner or 'top level'}", ""]
        elif owner != only:
            lines += [f"`{owner}`: {meanings.get(owner, '')}", ""]
        if only is None and meanings.get(owner):
            lines += [
                f"{meanings[owner][0].upper()}{meanings[owner][1:]}{'' if meanings[owner].endswith('.') else '.'}",
                "",
            ]
        lines += ["| key | default | allowed; unit | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _wrap(head: str, text: str, width: int) -> list[str]:
    column = 34
    lines = textwrap.wrap(text, max(width - column - 2, 30))
    if len(head) >= column:
        return [head, *(" " * column + "# " + line for line in lines)]
    return [f"{head:<{column}}# {lines[0]}", *(" " * column + "# " + line for line in lines[1:])]


def default_of(field: FieldInfo) -> str:
    """A key's default, as it stands in YAML."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(list(value) if isinstance(value, tuple) else value)


def _kind(parts: list[str], field: FieldInfo) -> str:
    """What is allowed, in words."""
    if parts == ["objective"]:
        return " | ".join(door.objectives())
    limits = " and ".join(filter(None, (_limit(item) for item in field.metadata)))
    words = _words(field.annotation)
    return words.replace("number", f"number {limits}", 1) if limits else words


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin in (typing.Union, UnionType):
        return " or ".join("null" if kind is NoneType else _words(kind) for kind in arguments)
    if origin is list:
        items = "names" if arguments[0] is str else _words(arguments[0])
        return f"list of {items}" if "|" in items or items == "names" else f"list of {items.replace(' or ', 's or ')}s"
    if origin is tuple:
        kind, *rest = _words(arguments[0]).split(" or ")
        return f"two {kind}s{' or nulls' if rest else ''}"
    if origin is dict:
        return "keys and values"
    return _WORDS.get(annotation, str(annotation))


def _limit(item: Any) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if getattr(item, name, None) is not None and abs(getattr(item, name)) < LARGEST:
            return f"{sign} {getattr(item, name)}"
    return ""
