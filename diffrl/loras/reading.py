"""The one reader of LoRA files: diffusers', peft's, kohya's and musubi's, ComfyUI's, ai-toolkit's; DoRA, and ranks and
alphas of each layer. What it returns is what diffusers makes of the file.

Names of layers that are this network's own, after any prefix and with dots or underscores, are read as they are, and
so are ComfyUI's names of its weights (`diffrl.loras.comfyui`); everything else goes through the converters of
diffusers (`pipe.lora_state_dict`). The result is loaded by diffusers (`load_lora_adapter`) into a network without
weights, and read off its layers. A tensor of the file that ends nowhere is an error: half of a LoRA is another LoRA.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from diffrl.errors import UserError, foreign, in_one_line
from diffrl.files import damage_of
from diffrl.lora_files import lora_file
from diffrl.loras.names import split
from diffrl.loras.places import check_magnitudes, check_numbers, check_places, check_start, magnitudes
from diffrl.policy.lora import LARGEST_ALPHA, LoraSpec

log = logging.getLogger("diffrl")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # of which torch compares and adds nothing
FILE = "file"  # the adapter's name while it is read
TEXT = re.compile(r"text_encoder(_\d)?\.")
OTHERS = {  # forms that are no low-rank sum, by what their names have
    ".lokr_": "LoKr",
    ".hada_": "LoHa",
    ".oft_": "OFT",
    ".boft_": "BOFT",
    ".on_input": "IA3",
    ".lora_mid": "LoCon with a CP decomposition",
    ".b1.weight": "GLoRA",
    ".glora": "GLoRA",
    ".lora_embedding": "a LoRA of embeddings",
    ".lora_B.bias": "a LoRA with biases",
    ".lora_B.default.bias": "a LoRA with biases",
    ".diff_b": "full differences of weights",
    ".diff": "full differences of weights",
    ".set_weight": "full weights",
}


@dataclass(frozen=True)
class Texts:
    """The part of a file that is for text encoders, as diffusers' `load_lora_into_text_encoder` takes it."""

    state: dict[str, Tensor]
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Lora:
    """`state`: A and B (and DoRA's magnitudes) keyed by layer, fp32, all of the rank and scale that `spec` has."""

    state: dict[str, Tensor]
    spec: LoraSpec
    texts: Texts = field(default_factory=lambda: Texts({}))


def read_lora(source: str | Path, backbone: Any) -> Lora:
    """A LoRA of the backbone's network, from whatever `diffrl.lora_files.find_lora` knows.

    Ranks that differ between layers are filled with zeros up to the largest, other scales are folded into B; without
    alpha it is the rank.

    Raises:
        UserError: there is no such file, it cannot be read, is of another form, or has no place in this network.
    """
    path = lora_file(source)
    if path.parent.parent.name == "checkpoints" and (path.parent / "manifest.json").is_file():
        run = path.parents[2]
        raise UserError(
            f"{path}: a run's checkpoint, which has no alpha; name {run}, or `diffrl export {run} --step N`"
        )
    tensors, metadata = _opened(path, backbone.denoiser)
    for mark, form in OTHERS.items():
        if odd := next((key for key in tensors if mark in key), None):
            raise UserError(f"{path}: {form} ({odd}); what is read is LoRA and DoRA")
    with quietly():
        try:
            check_numbers(tensors)
            network = hollow(backbone.network)
            if any("alpha" in key or "lora_te" in key for key in tensors):
                from diffrl.loras.kohya import folded

                tensors = folded(tensors)
            state = _in_diffusers_form(tensors, backbone, network)
            texts = {key: value for key, value in state.items() if TEXT.match(key)}
            prefix = f"{backbone.denoiser}."
            own = {key: value for key, value in state.items() if key.startswith(prefix)}
            check_places(own, [key for key in state if key not in own and key not in texts], prefix, network)
            told = {key: value for key, value in metadata.items() if key.startswith(prefix)}  # not of text encoders
            check_start(told)
            network.load_lora_adapter(  # type: ignore[operator]
                own, prefix=backbone.denoiser, metadata=told or None, adapter_name=FILE, low_cpu_mem_usage=False,
            )  # fmt: skip
            read = read_off(network)
            check_magnitudes(read.state, own, prefix)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:  # diffusers' and peft's own, on a file that may be anybody's
            raise UserError(f"{path}: not a LoRA that diffusers can read ({in_one_line(error)})") from error
    if odd := next((key for key, value in read.state.items() if not value.isfinite().all()), None):
        raise UserError(f"{path}: {odd} has values that are no finite numbers: the file is broken")
    if not any(value.any() for key, value in read.state.items() if "lora_B" in key) and not read.spec.dora:
        log.warning("%s: it changes nothing: B is 0 in all of its layers", path)
    return dataclasses.replace(read, texts=Texts(texts, metadata))


def hollow(network: nn.Module) -> nn.Module:
    """A network of the same shape whose weights take no memory."""
    with init_empty_weights():
        return emptied(type(network).from_config(network.config))  # type: ignore[attr-defined]


def emptied(network: nn.Module) -> nn.Module:
    """The network, each of whose weights is one zero now, seen in all places."""
    zero = torch.zeros((), device="cpu")
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
    return network


def _opened(path: Path, denoiser: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the fields of peft's LoraConfig that the file, or peft's adapter_config.json beside it, has."""
    try:
        if damage := damage_of(path):
            raise UserError(f"{path} {damage}")
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = json.loads((file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
        beside = path.with_name("adapter_config.json")
        if path.name == "adapter_model.safetensors" and beside.is_file():
            with foreign(beside, "peft's JSON"):
                metadata = {f"{denoiser}.{key}": value for key, value in json.loads(beside.read_text()).items()}
    except UserError:
        raise
    except (OSError, SafetensorError, ValueError, RecursionError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({in_one_line(error)})") from error
    tensors = {key: value.float() if value.dtype in FLOAT8 else value for key, value in tensors.items()}
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: its metadata are not those of a LoRA")
    known = {item.name for item in dataclasses.fields(LoraConfig)}  # a later peft writes more
    return tensors, {key: value for key, value in metadata.items() if key.rpartition(".")[2] in known}


def _in_diffusers_form(tensors: dict[str, Tensor], backbone: Any, network: nn.Module) -> dict[str, Tensor]:
    """Tensors with the names that diffusers' `load_lora_adapter` takes; all alphas are ranks, which scale nothing."""
    prefix = f"{backbone.denoiser}."
    if (direct := _by_names(tensors, prefix, network)) is not None:
        return direct
    from diffrl.loras.kohya import converted

    texts = {key: value for key, value in tensors.items() if TEXT.match(key)}
    return converted({key: value for key, value in tensors.items() if key not in texts}, backbone) | texts


def _by_names(tensors: Mapping[str, Tensor], prefix: str, network: nn.Module) -> dict[str, Tensor] | None:
    """The tensors in diffusers' form if every one is of a layer of this network, by its own name or ComfyUI's; else
    None."""
    layers = {name: name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    if not all(TEXT.match(key) or split(key)[0] in layers for key in tensors):
        from diffrl.loras.comfyui import by_layers

        tensors = by_layers(tensors, network)
    layers |= {name.replace(".", "_"): name for name in layers}
    state = dict[str, Tensor]()
    for key, value in tensors.items():
        if TEXT.match(key):
            state[key] = value
            continue
        stem, kind = split(key)
        layer = layers.get(stem)
        if kind is None or layer is None:
            return None
        if kind == "alpha":  # the rank
            continue
        if kind in ("dora_scale", "lora_magnitude_vector"):
            value = value if kind == "lora_magnitude_vector" else magnitudes(key, value)
            shape = (1, -1, 1, 1) if isinstance(network.get_submodule(layer), nn.Conv2d) else (-1,)
            state[f"{prefix}{layer}.lora_magnitude_vector.weight"] = value.reshape(shape)
        else:
            conv = isinstance(network.get_submodule(layer), nn.Conv2d)
            if value.ndim == (2 if conv else 4) and value.shape[2:].numel() == 1:  # of a projection that was the other
                value = value[..., None, None] if conv else value.flatten(1)
            key = f"{prefix}{layer}.{kind}.weight"
            if key in state and not state[key].equal(value):
                raise UserError(f"{layer} has two {kind}, which differ: the file is of two LoRAs")
            state[key] = value
    return state


def read_off(network: nn.Module) -> Lora:
    """What the layers of a network have in the adapter that was loaded."""
    layers: dict[str, Any] = {name: part for name, part in network.named_modules() if isinstance(part, LoraLayer)}
    scales = {name: float(layer.scaling[FILE]) for name, layer in layers.items()}
    ranks = {name: int(layer.r[FILE]) for name, layer in layers.items()}
    for name in layers:
        if not abs(alpha := scales[name] * ranks[name]) <= LARGEST_ALPHA:  # also what is no number
            raise UserError(f"its metadata have alpha {alpha:g}; at most {LARGEST_ALPHA:g}")
    rank, uneven = max(ranks.values()), len({*zip(ranks.values(), scales.values(), strict=True)}) > 1
    scale = 1.0 if uneven else next(iter(scales.values()))
    state = dict[str, Tensor]()
    dora = any(layer.use_dora.get(FILE) for layer in layers.values())
    for name, layer in layers.items():
        a, b = (matrices[FILE].weight.detach().float().clone() for matrices in (layer.lora_A, layer.lora_B))
        if uneven:
            missing = rank - ranks[name]
            a = torch.cat([a, a.new_zeros(missing, *a.shape[1:])])
            b = torch.cat([b * scales[name], b.new_zeros(len(b), missing, *b.shape[2:])], dim=1)
        state |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if dora:
            magnitude: Any = layer.lora_magnitude_vector[FILE]
            state[f"{name}.lora_magnitude_vector.weight"] = magnitude.weight.detach().float().clone()
    spec = LoraSpec(rank, float(f"{scale * rank:.12g}"), tuple(layers), dora)
    return Lora(state, spec)


@contextmanager
def quietly() -> Iterator[None]:
    """Without diffusers' own words, of which every one here is an error or known."""
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(level)
