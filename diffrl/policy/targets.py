"""Which layers of a network get a LoRA, and what peft is told of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from diffrl.errors import UserError, nearest
from diffrl.policy.lora import LoraSpec, own

# Feed-forward layers of a block, and of FLUX's single blocks, whose last projection is also the attention's. Not
# HiDream's routed experts, which its network runs without gradient.
MLP = re.compile(
    r"^(?!.*\.experts\.).*\.\d+\.(block\.)?(ff(_\w+)?|feed_forward|\w*mlp)(\.|$)|"
    r"^single_transformer_blocks\.\d+\.proj_out$"
)


def fields(spec: LoraSpec, layers: Sequence[str]) -> dict[str, Any]:
    """The fields of peft's LoraConfig that are not its defaults, beside init_lora_weights."""
    made: dict[str, Any] = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(layers)}
    made |= {"use_dora": True} if spec.dora else {}
    made |= {"use_rslora": True} if spec.rslora else {}
    for name, table, default in (("rank", spec.ranks, spec.rank), ("alpha", spec.alphas, spec.alpha)):
        if odd := [word for word in table if not any(f".{word}." in f".{layer}." for layer in layers)]:
            raise UserError(f'lora.{name}: no layer with a LoRA has "{odd[0]}" in its name, such as {layers[0]}')
        if table:
            made[f"{name}_pattern"] = {f"^{layer}": own(table, layer, default) for layer in layers}
    return made


def _matches(name: str, target: str) -> bool:
    """Peft's rule for a name among target modules; a pattern with * is of the whole name; "mlp": see MLP."""
    if target == "mlp":
        return MLP.search(name) is not None
    return fnmatchcase(name, target) if "*" in target else name == target or name.endswith(f".{target}")


def find_layers(
    network: nn.Module, targets: Sequence[str] | None, attention: Sequence[str], dead: Sequence[str]
) -> list[str]:
    """Full names of the linear layers that one of `targets` means, without the `dead` ones; of convolutions those that
    it names in full, as a file does. "attention", and None, are the family's projections."""
    targets = [name for one in targets or ["attention"] for name in (attention if one == "attention" else [one])]
    modules, named = dict(network.named_modules()), set(targets)
    linear = [n for n, m in modules.items() if isinstance(m, nn.Linear) or (n in named and isinstance(m, nn.Conv2d))]
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            ends = {re.sub(r"^.*?\.\d+\.", "", name) for name in linear}  # without "transformer_blocks.0."
            choices = ["attention", "mlp", *ends]
            raise UserError(f'lora.targets: no linear layer\'s name ends in "{target}"{nearest(target, choices)}')
    return [name for name in linear if name not in dead and any(_matches(name, target) for target in targets)]
