"""Builds a model's modules on the meta device from its configs, for estimates of memory and arithmetic."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import local_torch_dtype
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from diffrl.config import Config
from diffrl.config.loras import spec_of
from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl.memory.layout import Layout, cuda_autocast, pretend
from diffrl.memory.texts import longest_text
from diffrl.plugins import load
from diffrl.policy import PRECISIONS, find_family, find_model
from diffrl.policy.fused import Fused
from diffrl.policy.lora import fields, find_layers
from diffrl.policy.pipelines import set_text_length, settings_of
from diffrl.resources import shipped
from diffrl.worlds import form_of

TOKENS = 77  # CLIP's, unless a tokenizer's config says otherwise


def architecture(model: str) -> Path | None:
    """The shipped configs of a hub's model (`assets/architectures`), which need no hub; None for other models."""
    folder = shipped("assets", "architectures", model.partition("@")[0].rpartition("/")[2])
    hub = model.count("/") == 1 and not Path(os.path.expanduser(model)).is_dir()
    return folder if hub and (folder / "model_index.json").is_file() else None


def kind_of(config: Config) -> tuple[Any, ...]:
    """What `meta_backbone` and `with_lora` read of a config."""
    family = _sources(config)[-1]
    prompts = repr((config.prompts.train, config.prompts.test)) if family.own_lengths else ""
    engine = config.engine.model_dump_json(exclude={"encoders", "decode"})  # advice tries these: a phase's business
    sizes = (config.rollout.resolution, config.text_length, config.optimise.precision)
    return config.model, config.family, *sizes, prompts, engine, repr(spec_of(config.lora))


def _sources(config: Config) -> tuple[str, str, Mapping[str, Any], Any]:
    """The model without a single file's name, where its configs are, its model_index.json and its family."""
    base = getattr(form_of(config.model), "base", "") or config.model
    shape = architecture(base)
    source, index = find_model(base if shape is None else str(shape))
    return base, source, index, find_family(str(index["_class_name"]), config.family)


def meta_backbone(config: Config) -> Any:
    """The family's backbone over modules without weights (on the meta device), from the model's configs."""
    base, source, index, family = _sources(config)
    pipe = meta_pipeline(source, index, PRECISIONS[config.optimise.precision])
    length = settings_of(source).get("max_sequence_length")
    backbone = family(pipe, config.rollout.resolution, length)
    if config.text_length is not None:
        set_text_length(backbone, config.text_length)
    if family.own_lengths:
        backbone.prompts_length = longest_text(family, base, str(index["_class_name"]), backbone.max_length, config)
        backbone.max_length = backbone.prompts_length or backbone.max_length
    for module in (backbone.network, backbone.vae, *backbone.text_encoders):
        module.requires_grad_(False).eval()  # as a policy does: the layout of some depends on it
    return backbone


def meta_pipeline(
    source: str, index: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "meta", texts: bool = True
) -> Any:
    """What stands for a pipeline: modules made from a folder's configs, `index` being its model_index.json.

    On the meta device they have no weights, on another one random ones. `texts`: with the text encoders.
    """
    where, at = pinned(source)
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list)}
    wanted = {name: entry for name, entry in entries.items() if texts or not name.startswith("text_encoder")}
    return SimpleNamespace(
        **{name: _component(source, name, entry, dtype, device) for name, entry in wanted.items()},
        config=SimpleNamespace(**{name: value for name, value in index.items() if name not in entries}),
        tokenizer_max_length=get_tokenizer_config(where, subfolder="tokenizer", **at).get("model_max_length", TOKENS),
    )


def _component(source: str, name: str, entry: list[str | None], dtype: torch.dtype, device: torch.device | str) -> Any:
    """One entry of model_index.json, made from its config; None for what has no weights."""
    library, kind = entry
    where, at = pinned(source)
    if library == "diffusers" and kind is not None:
        made: Any = getattr(diffusers, kind)
        config = made.load_config(where, subfolder=name, **at)
        if name == "scheduler":
            return made.from_config(config)
        upcast = name == "vae" and config.get("force_upcast", kind == "AutoencoderKL")
        with torch.device(device), local_torch_dtype(torch.float32 if upcast else dtype):
            return made.from_config(config)
    if library == "transformers" and kind is not None and name.startswith("text_encoder"):
        made = getattr(transformers, kind)
        with torch.device(device), local_torch_dtype(dtype):
            return made(made.config_class.from_pretrained(where, subfolder=name, **at))
    return None


@contextmanager
def counting(backbone: Any, mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Inside, network and autoencoder are of fake tensors, and whatever is made of floats is fake, too.

    `mode`: what it gave before for this backbone, whose tensors are of that one. Raises UserError for a network that
    its family says cannot be counted so.
    """
    if not backbone.counted:
        name = type(backbone.network).__name__
        raise UserError(f"model: {name} cannot be counted without weights: its shapes depend on values")
    entered = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), entered, Layout(), cuda_autocast(), backbone.counting():
        warnings.filterwarnings("ignore", "(?i).*data pointer")  # merged weights ask where a tensor lies: nowhere
        for module in (backbone.network, backbone.vae) if mode is None else ():
            pretend(module)
        yield entered


def with_lora(backbone: Any, config: Config) -> tuple[int, Fused]:
    """Give the network its trained LoRA; the LoRA's bytes, and the path that computes with it."""
    spec = spec_of(config.lora)
    names = find_layers(backbone.network, spec.targets, backbone.targets, backbone.dead_targets)
    made = LoraConfig(**fields(spec, names))
    before = bytes_of(backbone.network)
    inject_adapter_in_model(made, backbone.network, low_cpu_mem_usage=True)  # made without values, not drawn
    layers = {name: layer for name, layer in backbone.network.named_modules() if isinstance(layer, LoraLayer)}
    for layer in layers.values():  # a LoRA is trained in float32, whatever the network's precision
        for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            part.float()
    lora = bytes_of(backbone.network) - before
    if config.engine.base != "full":
        load("engine.base", config.engine.base)(backbone.network)
    return lora, Fused(backbone.network, layers, ["default"])


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
