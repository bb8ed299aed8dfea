"""What a CPU does badly unless told: attention's backward pass in bf16, and pages that go back to the system."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# glibc's mallopt (malloc.h), in bytes. By default a large activation is a mapping of its own, made anew each time.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, MAPPED = 1 << 30, 32 << 20  # the second is the most that glibc takes


class Fp32Attention(TorchFunctionMode):
    """Inside, attention in bf16 runs in fp32, and gives the type that was asked for.

    On CPUs torch's bf16 kernel is slow backward: for 32 rows of 94 tokens in 6 heads of 32 one core takes 99 ms, this
    way 23, and in fp32 itself 21; forward the two are equally fast. Everything else stays in bf16. Also without a
    gradient: a rollout in another arithmetic than training's is another policy's.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or len(args) < 3 or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            wide: Any = [arg.float() if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in args]
            return func(*wide, **kwargs).to(args[0].dtype)


def keep_pages() -> bool:
    """Let freed memory stay with this process, so that the next micro-batch finds it; False where there is no glibc.

    Otherwise every large activation is a new mapping, whose pages the kernel has to clear first.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED) and mallopt(M_TRIM_THRESHOLD, KEPT))
