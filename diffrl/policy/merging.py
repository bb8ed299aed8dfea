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
    result, missing = {}, to.rank - spec.rank
    for name, value in state.items():
        if name.endswith(A):
            result[name] = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
        elif name.endswith(B):
            scaled = value if spec.scale == to.scale else value * (spec.scale / to.scale)
            result[name] = torch.cat([scaled, value.new_zeros(len(value), missing, *value.shape[2:])], dim=1)
        else:
            result[name] = value
    return result


def fitted(state: State, spec: LoraSpec, to: LoraSpec, before: State, source: str) -> dict[str, Tensor]:
    """The LoRA `state` of `spec` in the place of `before`, a LoRA of `to`: its products the same, and where it has no
    rows of A, or no such layer, those of `before` with 0 in B: without effect, and ready to be trained.

    Raises:
        UserError: naming `source`, if it has a larger rank, other layers, or one of them is a DoRA.
    """
    if spec.dora != to.dora:
        raise UserError(f"{source}: {'a DoRA, and here is none' if spec.dora else 'no DoRA, and here is one'}")
    own = padded(state, spec, to, source)
    result = {name: torch.zeros_like(value) if name.endswith(B) else value for name, value in before.items()}
    if odd := [name for name in own if name not in before]:
        layer = odd[0].rpartition(".lora_")[0]
        raise UserError(f"{source}: its layer {layer} gets no LoRA here; add it to lora.targets ({len(odd)} tensors)")
    for name, value in own.items():
        if value.shape != before[name].shape:
            saved, here = list(value.shape), list(before[name].shape)
            raise UserError(f"{source}: {name} has shape {saved}, here {here}; is it of another model?")
        result[name] = torch.cat([value[: spec.rank], before[name][spec.rank :]]) if name.endswith(A) else value
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
