"""comfyui_lora.safetensors of every family, read as ComfyUI reads it: the same weights as the LoRA in diffusers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from comfyui import MAPS, SAME, Comfy
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import save_file
from tiny import SPEC, tiny_flux, tiny_sd3
from tiny_models.recent import TINY, hidream
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.loras.reading import read_lora
from diffrl.plugins import installed
from diffrl.policy.lora import Adapters, LoraSpec
from diffrl.policy.registry import find_family
from diffrl.sharing.keys import READ, for_comfyui

MADE = {"StableDiffusion3Pipeline": tiny_sd3, "FluxPipeline": tiny_flux}
# diffusers' own converters of ComfyUI's layout; those of FLUX, Chroma and Lumina 2 know the real sizes alone
CONVERTED = ("StableDiffusion3Pipeline", "Flux2KleinPipeline", "Krea2Pipeline", "ZImagePipeline", "QwenImage21Pipeline")


class Rest(dict):
    """A checkpoint in which biases and norms, which no LoRA changes, may be absent."""

    def pop(self, key: str, *default: Tensor) -> Tensor:
        return super().pop(key, torch.zeros(6))


def network_of(pipeline: str, folder: Path) -> nn.Module:
    if pipeline in MADE:
        kind = getattr(
            diffusers,
            pipeline.replace("StableDiffusion3Pipeline", "SD3Pipeline").replace("Pipeline", "Transformer2DModel"),
        )
        return kind.from_pretrained(MADE[pipeline](folder / "model"), subfolder="transformer")
    tiny = next(one for one in TINY.values() if one.pipeline == pipeline)
    parts = tiny.parts(folder) if tiny.parts is hidream else tiny.parts(**tiny.options)
    return parts["transformer"]


def changed(
    network: nn.Module, layers: list[str], dead: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A LoRA's state, and the layers' weights with it."""
    weights = {name: network.get_submodule(name).weight.detach().clone() for name in layers}
    adapters = Adapters(network, LoraSpec(SPEC.rank, SPEC.alpha, tuple(layers)), ())
    generator = torch.Generator().manual_seed(1)
    state = {k: 0.3 * torch.randn(v.shape, generator=generator) for k, v in adapters.state("default").items()}
    for name in layers:
        weights[name] += SPEC.scale * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    return state, weights


@pytest.mark.parametrize("pipeline", [*MAPS, *SAME])
def test_the_file_changes_comfyui_s_weights_as_diffusers_lora_does(pipeline: str, tmp_path: Path) -> None:
    network = network_of(pipeline, tmp_path)
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    layers = [name for name in linear if re.fullmatch(READ[pipeline], name)]
    ends = find_family(pipeline).targets
    assert all(name in layers for name in linear if any(name.endswith(f".{end}") for end in ends)), (
        "the family's targets"
    )
    comfy = Comfy(pipeline, network)
    state, weights = changed(network, layers)
    comfy.apply(for_comfyui(pipeline, state, SPEC))
    for name in layers:
        torch.testing.assert_close(comfy.layer(name), weights[name], rtol=0, atol=1e-6)
    if pipeline in CONVERTED:
        mapped = SINGLE_FILE_LOADABLE_CLASSES[type(network).__name__]["checkpoint_mapping_fn"]
        back = mapped(checkpoint=Rest({f"{name}.weight": value.clone() for name, value in comfy.weights.items()}))
        for name in layers:
            torch.testing.assert_close(back[f"{name}.weight"], weights[name], rtol=0, atol=1e-6)


def test_families_and_layers_that_comfyui_does_not_know_are_said_in_one_line() -> None:
    unets = {"StableDiffusionPipeline", "StableDiffusionXLPipeline"}  # their file is read by diffusers, in test_sharing
    assert {*MAPS, *SAME} | unets == set(READ) == set(installed("family")) - {"SanaPipeline"}
    layer = {f"x.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match="has no Sana"):
        for_comfyui("SanaPipeline", layer, SPEC)
    with pytest.raises(UserError, match="of the layer x "):
        for_comfyui("FluxPipeline", layer, SPEC)
    part = {f"layers.0.attn.to_q.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match="qkv as one weight"):
        for_comfyui("Lumina2Pipeline", part, SPEC)


def added(file: Path, pipeline: str, network: nn.Module) -> dict[str, Tensor]:
    """What a file adds to each layer's weight, as diffrl reads it."""
    kind = getattr(diffusers, pipeline)
    read = read_lora(file, SimpleNamespace(denoiser="transformer", network=network, pipe=kind.__new__(kind)))
    layers = dict.fromkeys(key.rpartition(".lora_")[0] for key in read.state)
    up, down = ("{}.lora_B.weight".format, "{}.lora_A.weight".format)
    return {name: read.spec.scale * read.state[up(name)] @ read.state[down(name)] for name in layers}


@pytest.mark.parametrize("pipeline", [*MAPS, *SAME])
def test_the_file_is_read_back_as_it_was(pipeline: str, tmp_path: Path) -> None:
    network = network_of(pipeline, tmp_path)
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    ends = find_family(pipeline).targets
    state, _ = changed(network, [name for name in linear if any(name.endswith(f".{end}") for end in ends)])
    save_file(for_comfyui(pipeline, state, SPEC), tmp_path / "comfyui.safetensors")
    back = added(tmp_path / "comfyui.safetensors", pipeline, network)
    assert {f"{name}.lora_{matrix}.weight" for name in back for matrix in "AB"} == set(state)
    for name, value in back.items():
        right = SPEC.scale * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
        torch.testing.assert_close(value, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["diffusion_model.", "lora_unet_"])
@pytest.mark.parametrize("pipeline", MAPS)
def test_a_lora_in_the_names_of_comfyui_s_weights_is_read_as_comfyui_applies_it(
    pipeline: str, form: str, tmp_path: Path
) -> None:
    """As ComfyUI's own node, kohya's and musubi's trainers write them, q, k and v as one."""
    network = network_of(pipeline, tmp_path)
    comfy, generator, tensors = Comfy(pipeline, network), torch.Generator().manual_seed(2), dict[str, Tensor]()
    for name, weight in comfy.weights.items():
        stem = form + (name if form.endswith(".") else name.replace(".", "_"))
        tensors[f"{stem}.lora_down.weight"] = torch.randn(3, weight.shape[1], generator=generator)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(len(weight), 3, generator=generator)
        tensors[f"{stem}.alpha"] = torch.tensor(1.5)
    before = {name: comfy.layer(name).clone() for name in comfy.places}
    comfy.apply(tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    read = added(tmp_path / "theirs.safetensors", pipeline, network)
    assert set(read) == set(before)
    for name, value in read.items():
        torch.testing.assert_close(value, comfy.layer(name) - before[name], rtol=0, atol=1e-5)


def test_a_fused_weight_of_other_rows_or_of_two_loras_is_refused(tmp_path: Path) -> None:
    network, file = network_of("Lumina2Pipeline", tmp_path), tmp_path / "x.safetensors"
    stem = "diffusion_model.layers.0.attention.qkv"
    rows = sum(network.get_submodule(f"layers.0.attn.to_{name}").out_features for name in "qkv")
    width = network.get_submodule("layers.0.attn.to_q").in_features
    good = {f"{stem}.lora_down.weight": torch.ones(2, width), f"{stem}.lora_up.weight": torch.ones(rows, 2)}
    wide = good | {f"{stem}.lora_up.weight": torch.ones(3 * width + rows, 2)}
    two = good | {"lora_unet_layers_0_attention_qkv.lora_down.weight": torch.zeros(2, width)}
    alone = {key: value for key, value in good.items() if "down" in key}
    for tensors, message in (
        (wide, f"layers.0.attention.qkv.lora_B has the shape .*, not of {rows} rows"),
        (two, "layers.0.attention.qkv has two lora_A, which differ"),
        (alone, r"layers.0.attn.to_\w.lora_A.weight stands alone"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=message):
            added(file, "Lumina2Pipeline", network)
