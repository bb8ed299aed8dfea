"""How a launcher, or what it left behind in the environment, says which process this is: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from diffrl.errors import UserError, in_one_line


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Around the start of accelerate: a UserError for what the environment asks of it and it has not."""
    check_launched()
    try:
        yield
    except (ImportError, ValueError) as error:
        asked = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("ACCELERATE_")]
        text = f"accelerate cannot start as the environment asks ({', '.join(asked)})"
        raise UserError(f"{text}: {in_one_line(error)}") from error


def check_launched() -> None:
    """UserError where a launcher's variables are there in part, or cannot be: a process would take itself for another,
    or wait for ones that never come."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names[:3] if name in os.environ]
    missing = [name for name in names if name not in os.environ]
    found = ", ".join(f"{name}={os.environ[name]}" for name in there)
    todo = f"unset {', '.join(there)}, or start with torchrun --nproc_per_node N -m diffrl ..."
    if there and missing and (os.environ.get("WORLD_SIZE", "1") != "1" or "WORLD_SIZE" in missing):
        raise UserError(f"the environment has {found} and not {', '.join(missing)}: {todo}")
    count, *ranks = (os.environ.get(name, default) for name, default in zip(names[:3], "100", strict=True))
    if not (count.isdecimal() and all(rank.isdecimal() and int(rank) < int(count) for rank in ranks)):
        raise UserError(f"the environment has {found}, and ranks count from 0 to WORLD_SIZE - 1: {todo}")
