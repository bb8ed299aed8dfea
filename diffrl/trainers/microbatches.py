"""How the rows of an optimiser step become micro-batches: by rows, not by count, and cut where prompt groups end."""

from __future__ import annotations

# At most so many where memory decides: a guess, since nothing above it was measured. `optimise.micro_batch` may be any
# number.
AUTO_ROWS = 64


def part_sizes(rows: int, accumulation: int, micro_batch: int | None = None, group: int = 1) -> list[int]:
    """Rows of each micro-batch, larger ones first; no two differ by more than one group. Without rows, an empty one.

    Args:
        rows: of one process in an optimiser step, row number major, so that groups stand side by side.
        accumulation: how many micro-batches an even split has, where `micro_batch` does not say how large they are.
        micro_batch: rows of one at most; None: as many as the even split gives.
        group: rows that belong together. Cut at their borders wherever a micro-batch can hold one: CRD then takes a
            group's mean from the differentiable pass, instead of measuring it in a pass of its own. None grows by it.
    """
    if not rows:
        return [0]
    most = max(-(-rows // accumulation) if micro_batch is None else micro_batch, 1)
    unit = group if group <= most and rows % group == 0 else 1
    units, each = rows // unit, most // unit
    parts = -(-units // each)
    size, longer = divmod(units, parts)
    return [(size + (number < longer)) * unit for number in range(parts)]


def holds_groups(images: int, group: int, whole_groups: bool) -> int:
    """The unit that micro-batches are cut at: `group` where a process's `images` of a step are whole groups, else 1."""
    return group if whole_groups and images % group == 0 else 1
