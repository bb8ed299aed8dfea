"""Torch's switches as it starts, whatever the program that calls diffrl has set for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

DEVICES = ("cpu", "cuda", "mps", "xpu")  # of autocast


@contextlib.contextmanager
def as_torch_starts() -> Iterator[None]:
    """Inside, gradients are on, no autocast is, and tensors are float32 on the CPU by default; then all is as before.

    A notebook that draws has often switched gradients off, or works under autocast or another default dtype or device.
    """
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for name in filter(torch.is_autocast_enabled, DEVICES):
            stack.enter_context(torch.autocast(name, enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield
