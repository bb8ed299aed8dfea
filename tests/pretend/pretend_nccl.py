"""NCCL's rules over gloo, for tensors of the pretend device.

NCCL does not check that all ranks call the same collective with the same sizes: it hangs, or adds up garbage. Here the
ranks tell each other what they are about to do, and one that differs raises. Tensors of the host raise as under NCCL.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    _create_work_from_future,
)
from torch.futures import Future

PATIENCE = timedelta(seconds=int(os.environ.get("PRETEND_TIMEOUT", "60")))  # where NCCL would hang for its time-out


def _done(result: Any) -> Any:
    future: Future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _there(tensor: Tensor, operation: str) -> Tensor:
    if tensor.device.type != "cuda":
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({operation})")
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise RuntimeError(f"Tensors for {operation} must be contiguous")
    return torch.ops.pretend.on_host(tensor.detach())


class PretendNCCL(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.number, self.rank_here, self.world, self.store = 0, rank, size, store
        self.inner = dist.ProcessGroupGloo(store, rank, size, PATIENCE)
        store.set_timeout(PATIENCE)

    def agree(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """RuntimeError unless all ranks do the same now."""
        self.number += 1
        shapes = [tuple(tensor.shape) for tensor in tensors]
        strides = [tensor.stride() for tensor in tensors if not tensor.is_contiguous()]
        mine = f"{operation} {shapes} {strides or ''} {[str(tensor.dtype) for tensor in tensors]}"
        self.store.set(f"agree/{self.number}/{self.rank_here}", mine)
        for other in range(self.world):
            try:
                theirs = self.store.get(f"agree/{self.number}/{other}").decode()
            except dist.DistStoreError:
                theirs = "nothing"
            if theirs != mine:
                frames = [f for f in traceback.extract_stack() if "/diffrl/" in f.filename][-4:]
                where = ", ".join(f"{f.filename.rpartition('/diffrl/')[2]}:{f.lineno}" for f in frames)
                raise RuntimeError(
                    f"NCCL would hang or corrupt: rank {self.rank_here} does {mine}; rank {other} {theirs}; at {where}"
                )

    def allreduce(self, tensors: Any, opts: Any = AllreduceOptions()) -> Any:  # noqa: B008
        tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
        self.agree("allreduce", tensors)
        hosts = [_there(tensor, "allreduce") for tensor in tensors]
        # gloo has no sums of half precision.
        wide = [h.float() if h.dtype in (torch.bfloat16, torch.float16) else h for h in hosts]
        self.inner.allreduce(wide, opts).wait()
        for host, made in zip(hosts, wide, strict=True):
            if host is not made:
                host.copy_(made)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = AllgatherOptions()) -> Any:  # noqa: B008
        self.agree("allgather", inputs)
        hosts = [[_there(tensor, "allgather") for tensor in output] for output in outputs]
        self.inner.allgather(hosts, [_there(tensor, "allgather") for tensor in inputs], opts).wait()
        return _done(outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = AllgatherOptions()) -> Any:  # noqa: B008
        self.agree("all_gather_single", [input])
        rows = _there(output, "all_gather").view(self.world, -1)
        self.inner.allgather([list(rows)], [_there(input, "all_gather").reshape(-1)]).wait()
        return _done(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def broadcast(self, tensors: Any, opts: Any = BroadcastOptions()) -> Any:  # noqa: B008
        self.agree("broadcast", tensors)
        self.inner.broadcast([_there(tensor, "broadcast") for tensor in tensors], opts).wait()
        return _done(tensors)

    def barrier(self, opts: Any = BarrierOptions()) -> Any:  # noqa: B008
        self.agree("barrier", [])
        self.inner.barrier().wait()
        return _done(None)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = ReduceScatterOptions()) -> Any:  # noqa: B008
        self.agree("reduce_scatter", [input])
        whole = _there(input, "reduce_scatter").clone()
        self.inner.allreduce([whole]).wait()
        _there(output, "reduce_scatter").copy_(whole.view(self.world, *output.shape)[self.rank_here])
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def size(self) -> int:
        return self.world

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def getBackendName(self) -> str:
        return "nccl"


def install() -> None:
    """In the place of NCCL, whatever backend is asked for."""
    dist.Backend.register_backend("pretendnccl", PretendNCCL, devices=["cuda", "cpu"])
    plain = dist.init_process_group

    def init_process_group(backend: Any = None, *given: Any, **more: Any) -> Any:
        more.pop("device_id", None)
        return plain("pretendnccl", *given, **more)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.distributed_c10d._get_object_coll_device = lambda group=None: "cuda"  # objects go where NCCL's tensors lie
    dist.is_nccl_available = lambda: True
