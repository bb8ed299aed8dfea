"""The part of a LoRA that is for text encoders: worn by a model's, taken off, written into a file again."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import transformers
from accelerate import init_empty_weights
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl.loras.reading import FILE, TEXT, Lora, Texts, emptied, quietly, read_off
from diffrl.policy import Policy, find_family, find_model, text_cache

log = logging.getLogger("diffrl")
UP = re.compile(r"\.up\.weight$|lora_B\.weight$|lora_up\.weight$")


def outline(model: str) -> Any:
    """What `read_lora` and `read_texts` need of a model's backbone, without its weights."""
    source, index = find_model(model)
    family = find_family(str(index.get("_class_name")))
    pipeline, kind = getattr(diffusers, index["_class_name"]), getattr(diffusers, index[family.denoiser][1])
    where, at = pinned(source)
    with init_empty_weights():
        network = kind.from_config(kind.load_config(where, subfolder=family.denoiser, **at))

    def encoder(name: str) -> nn.Module:
        made = getattr(transformers, index[name][1])
        with init_empty_weights():
            return emptied(made(made.config_class.from_pretrained(where, subfolder=name, **at)))

    pipe = pipeline.__new__(pipeline)
    return SimpleNamespace(denoiser=family.denoiser, network=network, pipe=pipe, index=index, encoder=encoder)


def dress(backbone: Any, texts: Texts, source: str | Path) -> bool:
    """Load the part for text encoders into those of the pipeline, where it can; else say that it is left out."""
    if not texts.state:
        return False
    pipe = backbone.pipe
    loader: Any = getattr(pipe, "load_lora_into_text_encoder", None)
    names = sorted({key.partition(".")[0] for key in texts.state})
    able = [name for name in names if loader is not None and getattr(pipe, name, None) is not None]
    for name in names:
        if name not in able:
            log.warning("%s: its LoRA of the %s is left out: a %s takes none", source, name, type(pipe).__name__)
    for name in able:
        metadata = texts.metadata and {k: v for k, v in texts.metadata.items() if k.startswith(f"{name}.")}
        encoder: Any = getattr(pipe, name)
        given: dict[str, Any] = {"network_alphas": None, "metadata": metadata or None}
        with quietly(), text_cache.quiet():
            loader(copy.copy(texts.state), text_encoder=encoder, prefix=name, adapter_name=FILE, **given)
        layers: list[Any] = [part for part in encoder.modules() if isinstance(part, LoraLayer)]
        wanted = [value for key, value in texts.state.items() if key.startswith(f"{name}.") and UP.search(key)]
        # Libraries that take a layer's name for another make it all the same, and leave its B at 0.
        read = sum(bool(layer.lora_B[FILE].weight.any()) for layer in layers)
        if len(layers) != len(wanted) or read != sum(bool(value.any()) for value in wanted):
            raise UserError(f"{source}: of its {len(wanted)} layers of the {name}, diffusers reads {read}")
    return bool(able)


def read_texts(texts: Texts, source: str | Path, backbone: Any) -> dict[str, Lora]:
    """The part for text encoders of an `outline`, by the encoder's name; what no encoder of the model takes is said."""
    for name in sorted({key.partition(".")[0] for key in texts.state}):
        if hasattr(backbone.pipe, "load_lora_into_text_encoder") and backbone.index.get(name, [None])[0] is not None:
            setattr(backbone.pipe, name, backbone.encoder(name))
    dress(backbone, texts, source)
    worn = {name: part for name, part in vars(backbone.pipe).items() if isinstance(part, nn.Module)}
    return {
        name: read_off(part) for name, part in worn.items() if any(isinstance(m, LoraLayer) for m in part.modules())
    }


def keep_plain(policy: Policy) -> None:
    """A policy whose encoders wear a LoRA: its pretrained model reads texts without that, and its file has it, too."""
    policy.plain_texts = text_cache.Texts(policy.backbone, policy.device)
    policy.plain_texts.room = lambda: _undressed(policy)
    policy.add_texts = add_texts


@contextmanager
def _undressed(policy: Policy) -> Iterator[None]:
    """The encoders without their LoRA, and with the room that they take."""
    encoders = policy.backbone.text_encoders
    layers = [part for encoder in encoders for part in encoder.modules() if isinstance(part, LoraLayer)]
    with policy.texts.room():
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def add_texts(file: Path, backbone: Any) -> None:
    """Write the LoRAs that the text encoders wear into a LoRA's file, in diffusers' form."""
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        kept = dict(opened.metadata() or {})
    metadata = json.loads(kept.get(LORA_ADAPTER_METADATA_KEY, "{}"))
    for name, part in backbone.pipe.components.items():
        config = getattr(part, "peft_config", {}).get(FILE) if TEXT.match(f"{name}.") else None
        if config is not None:
            state = get_peft_model_state_dict(part, adapter_name=FILE)
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in state.items()}
            fields = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
            metadata |= {f"{name}.{key}": value for key, value in fields.items()}
    save_file(tensors, file, kept | {LORA_ADAPTER_METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True)})
