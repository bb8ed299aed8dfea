"""Policies: diffusers pipelines with LoRA, brought to one form. A family is one class, found by `registry`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from diffrl.errors import UserError, nearest
from diffrl.plugins import LOADING, load
from diffrl.policy.base import Policy
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.lora import LoraSpec
from diffrl.policy.pipelines import Resolution, set_text_length
from diffrl.policy.registry import find_family
from diffrl.switches import leave_cudnn_attention
from diffrl.worlds import owner

if TYPE_CHECKING:
    from diffrl.policy.backbone import Backbone

__all__ = [
    "PRECISIONS",
    "Conditioning",
    "LoraSpec",
    "Policy",
    "find_family",
    "find_model",
    "load_policy",
]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_policy(
    model: str,
    *,
    lora: LoraSpec | None = None,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    resolution: Resolution = None,
    seed: int = 0,
    family: str | None = None,
    start: str | Path | None = None,
    merge: str | Sequence[str] | None = None,
    keep_base: bool = False,
    base: str = "full",
    whole: bool = True,
    text_length: int | None = None,
) -> Policy:
    """A policy from "playground", a local folder in diffusers' format, or a hub id (OWNER/NAME[@REVISION]).

    Args:
        model: what to load.
        lora: rank, alpha and targets; None for those of `start`, or the defaults.
        precision: "fp32", "bf16" or "fp16", of the frozen weights and of the arithmetic.
        device: of network and autoencoder.
        resolution: side of the square images, or (width, height), in pixels; None for the model's own.
        seed: of the LoRA's gaussian start.
        family: `path/to/file.py:Class` for a family of one's own; None: by the pipeline's class.
        start: the LoRA that it begins as (`diffrl.lora_files`).
        merge: LoRAs that become part of the weights first, such as a turbo LoRA: LORA[=WEIGHT].
        keep_base: what counts as pretrained, in `adapter(None)`, is the model without them.
        base: "full", or what the network's frozen weights become then: "int8", or another of `diffrl.bases`.
        whole: False: the network waits in main memory for `Policy.shard`.
        text_length: tokens of a prompt, as the pipeline's `max_sequence_length`; None: its own default.

    Raises:
        UserError: if there is no such model, its family is not supported, or an argument is out of range.
    """
    leave_cudnn_attention()
    convert = None if base == "full" else load("engine.base", base, ["full"])
    with LOADING:
        backbone = _load(model, family, precision, resolution)
    if text_length is not None:
        set_text_length(backbone, text_length)
    kind: dict[str, Any] = {"device": device, "seed": seed, "convert": convert, "whole": whole}
    if merge:
        from diffrl.lora_files import as_list, reader_of, weighted

        loras = [weighted(one) for one in as_list(merge)]
        without = reader_of(loras[0][0]).merge(backbone, loras)
        kind["without"] = without if keep_base else None
    if start is None:
        policy = Policy(backbone, lora=lora, **kind)
    else:
        from diffrl.lora_files import reader_of

        policy = reader_of(start).begin(str(start), backbone, lora, **kind)
    policy.world = owner(model)
    return policy


def _load(model: str, family: str | None, precision: str, resolution: Resolution) -> Backbone:
    """The frozen pipeline of `load_policy`; a solver that is not its own is said."""
    from diffrl.policy.meaning import say_solver

    source, index = find_model(model)
    family_class = find_family(str(index.get("_class_name")), family)
    if precision not in PRECISIONS:
        raise UserError(f'optimise.precision: unknown "{precision}"{nearest(precision, PRECISIONS)}')
    try:
        backbone: Backbone = family_class.load(source, index, PRECISIONS[precision], resolution)
    except (OSError, SafetensorError) as error:  # missing or damaged files, no hub, a licence that is not accepted
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f'model: "{model}" cannot be loaded: {reason}') from None
    say_solver(backbone)
    return backbone


def find_model(model: str) -> tuple[str, dict[str, Any]]:
    """Where the model is (folder, or OWNER/NAME@COMMIT, as far as it is known), and its model_index.json."""
    from diffrl.policy.files import find

    return find(model)
