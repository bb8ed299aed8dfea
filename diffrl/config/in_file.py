"""Whether a user's own file has the class or function that a config names."""

from __future__ import annotations

import ast
from pathlib import Path

from diffrl.errors import UserError, nearest

DEFINED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def check_names_in_file(path: str, name: str) -> None:
    """UserError unless the file is Python with such a class, as far as reading it shows: running it takes torch."""
    try:
        module = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{line}: not Python: {getattr(error, 'msg', error)}") from None
    known: set[str] = set()
    for node in ast.walk(module):  # also what an `if` or a `try` defines
        if isinstance(node, DEFINED):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
    if name in known or known & {"*", "__getattr__", "globals"}:
        return
    things = [node.name for node in module.body if isinstance(node, DEFINED)]
    has = f"; it has {', '.join(things)}" if things else "; it has no class and no function"
    raise UserError(f'no class or function "{name}" in {path}{nearest(name, things) if things else ""}{has}')
