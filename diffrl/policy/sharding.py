"""The frozen network's weights spread over the processes by FSDP2, through accelerate; the LoRAs stay whole on each.

A LoRA is trained, and it is small: its gradients are summed over the processes by one all-reduce, as without sharding,
and snapshots, checkpoints and MARBLE's per-sample gradients do not notice. What fills the memory is the frozen base.
FSDP2 keeps 1 / N of it on each of N processes and gathers a block's weights for the moment in which the block runs.
Nor is it ever whole on a device: it waits in main memory, and each block in turn goes to the device and is cut there.
Weights in their files' own type are pages of the files until then, which the processes of a machine share.

Every forward is then an exchange between all processes, so all of them must run the same number of them. Micro-batches
are equally many everywhere. Where the work is uneven (evaluation, GARDO's gate, pictures that one process draws) it
runs inside `Policy.uneven_forwards()`: ranks that finish early run dummy forwards until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import Tensor, nn

from diffrl.errors import UserError


class Lockstep:
    """Equally many forwards on all processes: `announce` goes before each one inside of `uneven`."""

    def __init__(self, idle: Callable[[], object], device: torch.device) -> None:
        self._idle, self._device, self._counting = idle, device, False

    def announce(self) -> None:
        """This process is about to run a forward. The host does not wait for the others."""
        if self._counting:
            self._sum(1)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Forwards inside may be unevenly many; at its end this process takes part in the others' with `idle`.

        After a failure it waits for no process.
        """
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        while self._sum(0).item():
            self._idle()

    def _sum(self, value: int) -> Tensor:
        count = torch.full((1,), value, device=self._device)  # made there: torch.tensor would copy, and wait for it
        dist.all_reduce(count)
        return count


def plugin_of(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """How `accelerate launch` was told to shard; None if it was not, or if there is one process only.

    Raises:
        UserError: for FSDP1, which cannot leave the LoRAs whole, and for DeepSpeed, which would shard nothing that
            matters here.
    """
    from diffrl.launched import launched_with_fsdp

    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise UserError(
            "accelerate's DeepSpeed: ZeRO shards gradients and optimiser states of what is trained, and a LoRA has 12 "
            "bytes a parameter of those; to shard the frozen network use FSDP2 (scripts/launch/fsdp2.yaml)"
        )
    if accelerator.num_processes == 1 or not (kind == DistributedType.FSDP or launched_with_fsdp()):
        return None
    # On the CPU accelerate leaves FSDP out, although torch has it there: then the plugin reads the launcher's words.
    plugin = accelerator.state.fsdp_plugin if kind == DistributedType.FSDP else FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("accelerate's fsdp_version: 1 cannot leave the LoRA whole on each process; use fsdp_version: 2")
    return plugin


def shard(
    network: nn.Module, whole: Sequence[nn.Module], plugin: FullyShardedDataParallelPlugin, accelerator: Accelerator
) -> None:
    """Spread the network's weights over the processes, in place, block by block; the modules `whole` stay as they are.

    What of the network lies in main memory comes to the device on the way, one block at a time. The blocks are the
    model's own (diffusers' `_no_split_modules`), unless the launcher names classes.
    """
    plugin.ignored_modules = list(whole)
    plugin.cpu_ram_efficient_loading = False  # it is for weights that only the main process has read
    accelerator.state.fsdp_plugin = plugin
    fsdp2_prepare_model(accelerator, network)
