"""Torch's switches as it starts, whatever the program that calls diffrl has set for itself; and one that stays off."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

DEVICES = ("cpu", "cuda", "mps", "xpu")  # of autocast
# By the names of `diffrl.process_state`, for the first module that imports torch.
FRESH: dict[str, Any] = {
    "torch's default device or modes": ("cpu", 0),
    "torch's grad mode": True,
    "torch's inference mode": False,
    "torch's deterministic mode": (False, False),
    "torch's dispatch modes": 0,
    "torch's hooks on saved tensors": None,
    **{f"torch's autocast on {device}": (False, 0) for device in DEVICES},
}


def leave_cudnn_attention() -> None:
    """Torch's attention on CUDA without cuDNN's kernel, which torch 2.11 and later prefer on Hopper and Blackwell.

    Its backward pass reads past its tensors or gives NaN (pytorch issue 196678; FLUX.1 on an H200), and its forward is
    wrong for language models on a B200 (193893). Neither training nor a rollout has it, so both compute alike.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


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
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        leave_cudnn_attention()
        yield
