"""Work that is broken off after some of its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from diffrl.tools.sharded_jsonl import ShardedJsonl


@contextmanager
def broken_after(count: int) -> Iterator[None]:
    """Within, what adds its pieces is interrupted instead of writing the one after `count` of them."""
    plain, written = ShardedJsonl.add, []

    def dies(pieces: ShardedJsonl, rank: int, place: int, row: Any) -> None:
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(place)
        plain(pieces, rank, place, row)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ShardedJsonl, "add", dies)
        yield
