"""The bare loop of an epoch: its forwards, backwards and decodings again, with nothing between them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from diffrl.policy import Conditioning, Policy


class Recorder:
    """An epoch's predictions (rows, conditioning, guidance, which LoRA, with gradient?) and decodings (latents)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls: list[tuple[str, tuple[Any, ...], str | None, bool]] = []
        self._predict, self._decode = policy.predict, policy.decode

    def __enter__(self) -> Recorder:
        def active() -> str | None:
            names = self.policy.lora._active
            return names[0] if names else None

        def predict(x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Any:
            self.calls.append(("predict", (x_t.detach(), t, cond, guidance), active(), torch.is_grad_enabled()))
            return self._predict(x_t, t, cond, guidance)

        def decode(latents: Tensor, chunk: int | None = None, grad: bool = False) -> Tensor:
            self.calls.append(("decode", (latents.detach(), chunk, grad), active(), grad))
            return self._decode(latents, chunk, grad)

        self.policy.predict, self.policy.decode = predict, decode  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *ignored: object) -> None:
        del self.policy.predict, self.policy.decode  # the class's own again

    def replay(self) -> float:
        """Seconds of nothing but these calls, and of a backward pass for each that has a gradient."""
        wait(self.policy.device)
        mark = time.perf_counter()
        for name, arguments, lora, grad in self.calls:
            if name == "decode" and grad:
                arguments = (arguments[0].requires_grad_(), *arguments[1:])
            with torch.set_grad_enabled(grad), self.policy.using(lora):
                made = getattr(self.policy, name)(*arguments)
                if grad:
                    (made.v if name == "predict" else made).square().mean().backward()
        wait(self.policy.device)
        taken = time.perf_counter() - mark
        for _, parameter in self.policy.trainable:
            parameter.grad = None
        return taken


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
