"""LoRAs brought to one rank: smaller ones padded, several merged into one. All on the CPU, keyed by layer.

symbol      name here           meaning
A_m, B_m    `lora_A`, `lora_B`  (r_m, in) and (out, r_m) of LoRA m in a layer; W + s B A, s = alpha / rank
U S V^T     u, s, vh            the singular values of the mean of products

The mean of products, not of factors: (mean B)(mean A) has the products of each B with the others' A in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.policy.lora import LoraSpec

State = Mapping[str, Tensor]
A, B = ".lora_A.weight", ".lora_B.weight"


def padded(state: State, spec: LoraSpec, to: LoraSpec, source: str) -> dict[str, Tensor]:
    """The LoRA `state` of `spec` at the rank and scale of `to`, its products the same: rows and columns of 0, and
    another s folded into B.

    Raises:
        UserError: naming `source`, if its rank is larger.
    """
    if spec.rank > to.rank:
        raise UserError(f"{source}: its LoRA has rank {spec.rank}; set lora.rank to {spec.rank} or more (is {to.rank})")
    result = {}
    for name, value in state.items():
        missing = to.rank - spec.rank
        if name.endswith(A):
            result[name] = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
        else:
            scaled = value if spec.scale == to.scale else value * (spec.scale / to.scale)
            result[name] = torch.cat([scaled, value.new_zeros(len(value), missing)], dim=1)
    return result


def merged(states: Sequence[State], start: State) -> dict[str, Tensor]:
    """The LoRA of `start`'s rank that is nearest, in every layer, to the mean of the products B_m A_m; exact where
    that rank suffices, and balanced: B^T B = A A^T.

    Components that the mean has not keep their row of A in `start`, with 0 in B, so that they can be trained.
    """
    result: dict[str, Tensor] = {}
    for name in (key.removesuffix(A) for key in start if key.endswith(A)):
        first = start[name + A]
        ups = torch.cat([state[name + B] for state in states], dim=1).double() / len(states)
        downs = torch.cat([state[name + A] for state in states]).double()
        (q_up, r_up), (q_down, r_down) = torch.linalg.qr(ups), torch.linalg.qr(downs.T)
        u, s, vh = torch.linalg.svd(r_up @ r_down.T)
        count = min(int((s > s[0] * 1e-9).sum()), len(first))
        root = s[:count].sqrt()
        a, b = first.double().clone(), ups.new_zeros(len(ups), len(first))
        a[:count] = root[:, None] * (vh[:count] @ q_down.T)
        b[:, :count] = (q_up @ u[:, :count]) * root
        result |= {name + A: a.to(first.dtype), name + B: b.to(first.dtype)}
    return result
