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
    result = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".lora_")
        scale, (rank, wanted) = spec.of(layer)[1], to.of(layer)
        if kind == "A.weight":
            if (own := _used(value)) > rank:
                raise UserError(f"{source}: its LoRA has rank {own}; set lora.rank to {own} or more (is {rank})")
            value = value[:rank]  # beyond its rank a layer of a file has zeros
            result[name] = torch.cat([value, value.new_zeros(rank - len(value), *value.shape[1:])])
        elif kind == "B.weight":
            value = (value if scale == wanted else value * (scale / wanted))[:, :rank]
            missing = rank - value.shape[1]
            result[name] = torch.cat([value, value.new_zeros(len(value), missing, *value.shape[2:])], dim=1)
        else:
            result[name] = value
    return result


def _used(a: Tensor) -> int:
    """Rows of A up to the last that is not zero."""
    rows = a.flatten(1).any(1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 0


def fitted(state: State, spec: LoraSpec, to: LoraSpec, before: State, source: str) -> dict[str, Tensor]:
    """The LoRA `state` of `spec` in the place of `before`, a LoRA of `to`: its products the same, and where it has no
    rows of A, or no such layer, those of `before` with 0 in B: without effect, and ready to be trained.

    Raises:
        UserError: naming `source`, if it has a larger rank, other layers, or one of them is a DoRA.
    """
    if spec.dora != to.dora:
        text = "a DoRA: set lora.kind to dora" if spec.dora else "no DoRA: set lora.kind to lora"
        raise UserError(f"{source}: {text}")
    theirs = padded(state, spec, to, source)
    result = {name: torch.zeros_like(value) if name.endswith(B) else value for name, value in before.items()}
    if odd := [name for name in theirs if name not in before]:
        layer = odd[0].rpartition(".lora_")[0]
        raise UserError(f"{source}: its layer {layer} gets no LoRA here; add it to lora.targets ({len(odd)} tensors)")
    for name, value in theirs.items():
        if value.shape != before[name].shape:
            saved, here = list(value.shape), list(before[name].shape)
            raise UserError(f"{source}: {name} has shape {saved}, here {here}; is it of another model?")
        own = _used(value) if name.endswith(A) else 0
        result[name] = torch.cat([value[:own], before[name][own:]]) if name.endswith(A) else value
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
