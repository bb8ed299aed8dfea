"""Which samples an optimiser step has, and how its rows become micro-batches: by rows, and cut where groups end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# At most so many where memory decides: a guess, since nothing above it was measured. `optimise.micro_batch` may be any
# number.
AUTO_ROWS = 64


def part_sizes(rows: int, micro_batch: float | None = None, group: int = 1) -> list[int]:
    """Rows of each micro-batch, larger ones first; no two differ by more than one group. Without rows, an empty one.

    Args:
        rows: of one process in an optimiser step, row number major, so that groups stand side by side.
        micro_batch: rows of one at most, or a share of them in (0, 1); None: all.
        group: rows that belong together. Cut at their borders wherever a micro-batch can hold one: CRD then takes a
            group's mean from the differentiable pass, instead of measuring it in a pass of its own. None grows by it.
    """
    if not rows:
        return [0]
    share = 1.0 if micro_batch is None else micro_batch
    most = math.ceil(rows * share - 1e-9) if isinstance(share, float) else share
    unit = group if group <= most and rows % group == 0 else 1
    units, each = rows // unit, most // unit
    parts = -(-units // each)
    size, longer = divmod(units, parts)
    return [(size + (number < longer)) * unit for number in range(parts)]


def holds_groups(images: int, group: int, whole_groups: bool) -> int:
    """The unit that micro-batches are cut at: `group` where a process's `images` of a step are whole groups, else 1."""
    return group if whole_groups and images % group == 0 else 1


def optimiser_steps(total: int, batch: int, first: int, count: int, key: int, unit: int = 1) -> list[Tensor]:
    """Which samples of this process belong to which optimiser step of an epoch.

    Args:
        total: samples of the epoch over all processes.
        batch: samples of one optimiser step over all processes; divides `total`.
        first: global index of this process's first sample.
        count: number of this process's samples; a multiple of `unit * total // batch`, unless `batch` is `total`.
        key: seed of the assignment.
        unit: so many consecutive samples stay together (the group size, for objectives that need whole groups).

    Returns:
        One (count * batch // total,) tensor of local indices per step. Every block of `total // batch` consecutive
        units gives one unit to each step, so steps are balanced over prompts and over any number of processes, and the
        assignment does not depend on the number of processes.
    """
    if batch == total:  # then a unit may also be split over processes
        return [torch.arange(count)]
    steps, blocks = total // batch, batch // unit
    generator = torch.Generator().manual_seed(key)
    order = torch.rand(blocks, steps, generator=generator).argsort(dim=1)  # (blocks, steps)
    units = order + torch.arange(blocks)[:, None] * steps
    width = steps * unit
    local = units[first // width : (first + count) // width]
    samples = local[..., None] * unit + torch.arange(unit) - first
    return [samples[:, step].flatten() for step in range(steps)]


def sample_pairs(samples: Tensor, rows_per_sample: int) -> Tensor:
    """All (sample, row number) pairs (s * T, 2) of some samples, row number major: group members stay side by side."""
    number = torch.arange(rows_per_sample).repeat_interleave(len(samples))
    return torch.stack([samples.repeat(rows_per_sample), number], dim=1)
