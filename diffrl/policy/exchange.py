"""Weights in the place of others, such as their copies on a device for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


def exchange(
    modules: Sequence[nn.Module],
    change: Callable[[Tensor], Tensor],
    before: list[tuple[dict[str, Any], str, Tensor]] | None = None,
) -> None:
    """Put what `change` makes of frozen parameters and buffers in their place; a shared one stays shared.

    What was replaced is added to `before`, as it is replaced.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, so that no other one gets its id
    for module in (part for whole in modules for part in whole.modules()):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    moved = change(tensor.detach())
                    kept = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
                    made[id(tensor)] = tensor, kept
                if before is not None:
                    before.append((table, name, tensor))
                table[name] = made[id(tensor)][1]
