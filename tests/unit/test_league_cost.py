"""What an image costs, counted: forwards in rows of images, three where there is a gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from diffrl.run.clock import Clock


def test_a_forward_counts_its_rows_with_gradient_three_times_and_guidance_twice() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: torch.Tensor, t: Any, cond: Any, guidance: float = 1.0) -> Any:
        return SimpleNamespace(v=x * weight)

    policy: Any = SimpleNamespace(predict=predict, decode=lambda x: x, backbone=SimpleNamespace(classifier_free=True))
    clock, x = Clock(), torch.zeros(5, 1)
    clock.watch(policy)
    with torch.no_grad():
        policy.predict(x, 0, None)
        policy.predict(x, 0, None, 4.5)
    assert clock.forwards == 5 + 10
    policy.predict(x, 0, None, guidance=1.0)
    assert clock.forwards == 15 + 15
