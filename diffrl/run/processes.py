"""The processes of a run: what they sum and gather, timed, and that they were started alike."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed import distributed_c10d

from diffrl.errors import UserError
from diffrl.run.clock import Clock

# The main process writes reports and images alone, and one process's rewards may be slow: the others wait.
WAITING = timedelta(hours=2)
TOGETHER = timedelta(minutes=20)  # while micro-batches are trained: what one compiles, or what its GPU is slower


def set_timeout(limit: timedelta) -> None:
    """Of the exchanges that follow; torch names the function otherwise in each of its versions."""
    with contextlib.suppress(AttributeError):
        getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)(limit)


class Processes:
    """Exchanges between the processes of `accelerator`; their seconds go to `clock`."""

    def __init__(self, accelerator: Accelerator, clock: Clock) -> None:
        self.accelerator, self.clock = accelerator, clock
        self.rank, self.count = accelerator.process_index, accelerator.num_processes

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While all of them do the same: an exchange that not all come to fails after TOGETHER, not after WAITING."""
        if self.count == 1:
            yield
            return
        set_timeout(TOGETHER)
        try:
            yield
        finally:
            set_timeout(WAITING)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        if self.count == 1:
            return values
        mark = time.perf_counter()
        total = self.accelerator.reduce(values, reduction="sum")
        self.clock.add("reduce", mark)
        return total  # type: ignore[no-any-return]

    def gather(self, values: Tensor) -> Tensor:
        """Rows of all processes in global sample order (processes hold consecutive slices), on the CPU."""
        if self.count == 1:
            return values.cpu()
        mark = time.perf_counter()
        everything = self.accelerator.gather(values.to(self.accelerator.device).contiguous()).cpu()
        self.clock.add("wait", mark)
        return everything


def check_agreement(accelerator: Accelerator, table: Mapping[str, Any], hint: str) -> None:
    """Every process must have started with the same `table`, or they train something else, or wait for ever.

    Raises:
        UserError: on every process, naming what differs, on which rank, and `hint`.
    """
    if accelerator.num_processes == 1:
        return
    mine = {key: json.dumps(value, default=str) for key, value in table.items()}
    hosts, tables = zip(*gather_object([(socket.gethostname(), mine)]), strict=True)
    for rank, other in enumerate(tables):
        differing = [key for key in {**tables[0], **other} if tables[0].get(key) != other.get(key)]
        if differing:
            found = ", ".join(f"{key} ({tables[0].get(key)} and {other.get(key)})" for key in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            where = f" ({hosts[rank]} and {hosts[0]})" * (hosts[rank] != hosts[0])
            raise UserError(f"rank {rank} was started otherwise than rank 0{where}: {found}{more}; {hint}")
