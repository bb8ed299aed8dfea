"""Faster and smaller forms of the same computation, all of them somebody else's: attention kernels, compiled blocks."""

from __future__ import annotations

import logging
import math
import os
import re
import statistics
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffrl.errors import UserError, nearest

ATTENTION = "engine.attention"
# What "auto" tries, exact kernels all of them; sage and its like round to 8 bits. Those with "_" are torch's own.
EXACT = ("native", "_native_cudnn", "_native_flash", "_native_efficient", "flash", "_flash_3", "xformers")
GRAPHS = 32  # of a compiled block, at most
ALIKE = 0.02  # how far a kernel's predictions may be from native's, by norm: a few roundings of bf16

log = logging.getLogger("diffrl")


def join_processes(**settings: Any) -> Accelerator:
    """This process's accelerator, which knows the others that a launcher started. `settings`: of `Accelerator`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        # Else each of torchrun's processes would take itself for the only one, and all would write one folder.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    return Accelerator(**settings)


def check_launcher(accelerator: Accelerator, precision: str) -> None:
    """Say so where the launcher asks for what the config decides here, or started fewer processes than it was asked."""
    wanted = _asked_processes() if accelerator.num_processes == 1 else 1
    if wanted > 1:
        text = "accelerate launch was asked for %d processes and has started one: without a GPU it needs --cpu"
        log.warning(text, wanted)
    asked = accelerator.mixed_precision
    if asked not in ("no", precision):
        log.warning("accelerate's mixed_precision %s is not used; optimise.precision is %s", asked, precision)
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != DynamoBackend.NO:
        log.warning("accelerate's dynamo_backend %s is not used; engine.compile=true compiles the blocks", dynamo.value)


def _asked_processes() -> int:
    """`--num_processes` of the `accelerate launch` that started this process; 1 without. It tells nobody else."""
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        return 1
    if "launch" not in words or not any("accelerate" in word for word in words):
        return 1
    text = " ".join(words).partition(" launch ")[2]
    found = re.search(r"--num[_-]processes[= ](\d+)", text)
    return int(found[1]) if found else 1


def set_attention(network: Any, kernel: str) -> None:
    """Run attention with this kernel: "native" is torch's scaled dot product; "xformers", "flash", ... as diffusers
    names them. "auto" is for `choose_attention`, and no kernel.

    Raises:
        UserError: if there is no such kernel, it cannot run here, or this network's attention takes no kernels.
    """
    known = ["auto", *_kernels()]
    if kernel not in known:
        raise UserError(f'{ATTENTION}: "{kernel}" is not a kernel of diffusers{nearest(kernel, known)}')
    modern = _modern(network)
    if not modern and kernel not in ("native", "xformers"):
        name = type(network).__name__
        raise UserError(f'{ATTENTION}: "{kernel}", but {name} has older attention: native and xformers only')
    try:
        if modern:
            network.set_attention_backend(kernel)
        elif kernel == "xformers":  # older attention, SD3's and the UNets', has its own switch
            network.enable_xformers_memory_efficient_attention()
    except (ImportError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'{ATTENTION}: "{kernel}" cannot run here ({reason})') from error


def choose_attention(
    network: Any, trial: Callable[[], Tensor], clock: Callable[[], float], sharded: bool = False
) -> dict[str, float]:
    """Run attention with the exact kernel that is fastest here; returns the seconds of those that can run, by name.

    Args:
        network: whose attention it is.
        trial: a forward and a backward pass as in training, of the same rows each time; returns the predictions.
        clock: seconds, with the device's work done.
        sharded: a forward is an exchange between processes, which an error would break off: kernels are tried alone
            first, with native's inputs, and only those that run on all processes are tried in the network.

    A kernel whose predictions are not native's up to rounding is left out. All processes choose the same.
    """
    modern, before = _modern(network), dict(network.attn_processors)

    def use(kernel: str) -> None:
        if modern:
            network.set_attention_backend(kernel)
        elif kernel == "xformers":
            network.enable_xformers_memory_efficient_attention()
        else:
            network.set_attn_processor(dict(before))

    times: dict[str, float] = {}
    expected: Tensor | None = None
    kernels: tuple[str, ...] = EXACT if modern else ("native", "xformers")
    if sharded:
        kernels = _runnable(trial) if modern else ("native",)
    for kernel in kernels:
        taken = math.inf
        try:
            use(kernel)
            made = trial()
            expected = made if expected is None else expected
            if float((made - expected).norm() / expected.norm().clamp_min(1e-12)) <= ALIKE:
                taken = statistics.median(_seconds(trial, clock) for _ in range(3))
        except Exception as error:  # not installed, not for this device, type or mask: the kernel says so in its way
            log.debug("%s: %s cannot run here (%s)", ATTENTION, kernel, error)
        times[kernel] = taken
    if dist.is_initialized():
        total = torch.tensor(list(times.values()), device=expected.device if expected is not None else None)
        dist.all_reduce(total)
        times = dict(zip(times, total.tolist(), strict=True))
    best = min(times, key=times.__getitem__)
    use(best)
    found = {kernel: taken for kernel, taken in times.items() if math.isfinite(taken)}
    listed = ", ".join(f"{kernel} {taken * 1000:.1f} ms" for kernel, taken in found.items())
    log.info("%s: auto chose %s (%s)", ATTENTION, best, listed)
    return found


class _Inputs(TorchFunctionMode):
    """While it is entered: what torch's attention is called with, once for each kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[list[Tensor], Tensor | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            rows, mask = [given[name] for name in ("query", "key", "value")], given.get("attn_mask")
            kind = str([(x.shape, x.dtype) for x in (*rows, mask) if x is not None])
            self.seen.setdefault(kind, ([x.detach() for x in rows], mask))
        return func(*args, **kwargs)


def _runnable(trial: Callable[[], Tensor]) -> tuple[str, ...]:
    """Those of the exact kernels that take, on every process, what the network's attention is called with."""
    with _Inputs() as inputs:
        device = trial().device
    there = torch.tensor([_runs(kernel, inputs) for kernel in EXACT], dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(there, dist.ReduceOp.MIN)
    return tuple(kernel for kernel, good in zip(EXACT, there.tolist(), strict=True) if good or kernel == "native")


def _runs(kernel: str, inputs: _Inputs) -> bool:
    """Does it run on its own, with a backward pass?"""
    try:
        for rows, mask in inputs.seen.values():  # torch has heads before tokens, diffusers behind
            q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in rows)
            dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName(kernel)).sum().backward()
    except Exception as error:
        log.debug("%s: %s cannot run here (%s)", ATTENTION, kernel, error)
        return False
    return True


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    mark = clock()
    work()
    return clock() - mark


def _modern(network: Any) -> bool:
    """Does its attention take diffusers' kernels by name?"""
    return any(hasattr(part, "_attention_backend") for part in getattr(network, "attn_processors", {}).values())


def _kernels() -> list[str]:
    return [backend.value for backend in AttentionBackendName if not backend.value.startswith("_")]


def compile_blocks(network: nn.Module, **options: Any) -> int:
    """torch.compile of the network's repeated blocks, in place, when they first run; returns how many they are.

    Blocks are compiled one by one, since they are alike: the first costs its seconds, the others come from the cache.
    The LoRA snapshots are switched inside of them; each one that runs is compiled once.
    """
    kinds = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or []
    blocks = [module for module in network.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise UserError(f"engine.compile: {type(network).__name__} names no repeated blocks")
    for module in network.modules():
        if isinstance(module, LoraLayer):  # back to peft's own: the compiler fuses for itself, one graph for all blocks
            vars(module).pop("forward", None)
    # A graph for each snapshot, with and without gradient, and for each number of rows: torch's own limit of 8 is met,
    # and what is beyond it would run eager without a word.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, GRAPHS)
    for block in blocks:
        block.compile(**options)
    return len(blocks)
