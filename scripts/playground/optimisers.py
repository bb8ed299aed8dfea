"""Muon for the matrices and convolutions inside the blocks, AdamW for everything else.

Muon: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): momentum, made orthogonal by
five Newton-Schulz steps. torch.optim.Muon does these in bfloat16, one matrix at a time: on a CPU without bfloat16 units
that took 14 times as long as float32 with all matrices of one shape at once, which is what is done here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_OUTSIDE = (
    *("embed", "proj_out", "token", "position", "head", "classifier"),
    *("norm1", "norm_out", "logit", "projection", "conv_in", "conv_out"),
)
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """About the nearest (half-)orthogonal matrix of each matrix of a stack (n, rows, columns)."""
    a, b, c = _COEFFICIENTS
    wide = stack.shape[-2] <= stack.shape[-1]
    x = stack if wide else stack.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """See the module's documentation. Nesterov momentum; a convolution is the matrix (outputs, inputs x places)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; parameters without a gradient stay."""
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks[parameter.flatten(1).shape].append(parameter)
            for shape, parameters in stacks.items():
                moves = []
                for parameter in parameters:
                    state, grad = self.state[parameter], parameter.grad
                    assert grad is not None
                    state.setdefault("momentum", torch.zeros_like(parameter)).lerp_(grad, 1 - group["momentum"])
                    moves.append(grad.lerp(state["momentum"], group["momentum"]).flatten(1))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, move in zip(parameters, orthogonal(torch.stack(moves)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).sub_(
                        move.view_as(parameter), alpha=group["lr"] * scale
                    )
        return None


def optimisers_of(model: nn.Module, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW] over the parameters of `model`; embeddings and in- and output layers are AdamW's."""
    inside: list[nn.Parameter] = []
    outside: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim in (2, 4) and min(parameter.flatten(1).shape) >= 8
            matrix = matrix and not any(word in name for word in _OUTSIDE)
            (inside if matrix else outside).append(parameter)
    return [Muon(inside, muon_rate), torch.optim.AdamW(outside, rate, betas=(0.9, 0.99), weight_decay=0.01)]
