"""Whether the tensors of a LoRA's file have a place in a network, each of its own shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diffusers.utils import convert_unet_state_dict_to_peft
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.lora_files import OTHERS
from diffrl.policy.lora import LARGEST_ALPHA


def check_places(own: Mapping[str, Tensor], odd: list[str], prefix: str, network: nn.Module) -> None:
    """UserError for tensors of no part of the pipeline, and for layers that the network has not."""
    kind = type(network).__name__
    if odd:
        raise UserError(f"{odd[0]} ({len(odd)} such tensors) is of no part of the pipeline of {kind}")
    swap = {"A": "B", "B": "A"}
    partners = {key: re.sub(r"\.lora_([AB])\.", lambda found: f".lora_{swap[found[1]]}.", key) for key in own}
    if alone := next((key for key, other in partners.items() if other not in own), None):
        raise UserError(f"{alone} stands alone: a layer has lora_A and lora_B")
    layers = {name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    stripped = {key.removeprefix(prefix): value for key, value in own.items()}
    if stripped and not any("lora_A" in key for key in stripped):  # as diffusers loads it
        stripped = convert_unet_state_dict_to_peft(stripped)
    wanted = {re.sub(r"\.lora_(A|B|magnitude_vector).*$|\.alpha$", "", key) for key in stripped}
    if missing := sorted(wanted - layers):
        some = f"{len(missing)} of its {len(wanted)} layers"
        raise UserError(f"{missing[0]} has no place in {kind} ({some})")
    if not wanted:
        raise UserError(f"it has no layer of {kind}")
    _check_shapes(stripped, network)


def _check_shapes(state: Mapping[str, Tensor], network: nn.Module) -> None:
    """UserError unless A of every linear layer is (r, in) and its B (out, r), with r of at least 1."""
    for key, value in state.items():
        layer, dot, rest = key.partition(".lora_A.")
        if not dot or not isinstance(module := network.get_submodule(layer), nn.Linear):
            continue
        other = f"{layer}.lora_B.{rest}"
        rank = len(value) if value.ndim else 0
        shapes = {key: (value, (rank, module.in_features)), other: (state[other], (module.out_features, rank))}
        for name, (matrix, wanted) in shapes.items():
            if tuple(matrix.shape) != wanted or rank == 0:
                expected = f"({module.out_features}, rank)" if name == other else f"(rank, {module.in_features})"
                raise UserError(f"{name} has the shape {tuple(matrix.shape)}, not {expected}")


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """UserError for matrices of whole or complex numbers: quantised ones, whose scales are not read, or no LoRA's; and
    for alphas that are not finite or beyond `LARGEST_ALPHA`, which diffusers and peft take as they are."""
    for key, value in tensors.items():
        if key.endswith(".alpha"):
            if not value.isfinite().all():
                raise UserError(f"{key} has values that are no finite numbers: the file is broken")
            if (alpha := value.abs().max()) > LARGEST_ALPHA:
                raise UserError(f"{key} is {alpha:g}; at most {LARGEST_ALPHA:g}")
        elif not value.is_floating_point():
            raise UserError(f"{key} is of {str(value.dtype).removeprefix('torch.')}, not of floating numbers")


def check_magnitudes(state: Mapping[str, Tensor], own: Mapping[str, Tensor], prefix: str) -> None:
    """UserError for a layer of a DoRA whose magnitudes the file has not: what stands in `state` for them is made up."""
    given = {key.removesuffix(".weight") for key in own}
    for key in state:
        if ".lora_magnitude_vector" in key and prefix + key.removesuffix(".weight") not in given:
            layer = key.partition(".lora_magnitude_vector")[0]
            raise UserError(f"{layer} has no magnitudes, and the file is a DoRA, where each layer has some")


def magnitudes(key: str, value: Tensor) -> Tensor:
    """A `dora_scale` as peft has its magnitudes, (out,); UserError for LyCORIS's norms over the outputs, (1, in)."""
    if not value.ndim or value.numel() != len(value):
        raise UserError(f"{key}: a DoRA whose magnitudes are of inputs, which peft has not")
    return value.reshape(-1)


def check_start(metadata: Mapping[str, Any]) -> None:
    """UserError for a LoRA that adds to frozen weights which its own start had changed."""
    start = next((value for key, value in metadata.items() if key.endswith("init_lora_weights")), None)
    if isinstance(start, str) and start.lower().partition("_niter")[0] in {*OTHERS} - {"eva"}:
        todo = "save it with peft's path_initial_model_for_weight_conversion"
        raise UserError(f'it began with "{start}", which changes the frozen weights: it fits no base model; {todo}')
