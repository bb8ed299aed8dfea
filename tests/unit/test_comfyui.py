"""comfyui_lora.safetensors of every family, read as ComfyUI reads it: the same weights as the LoRA in diffusers."""

from __future__ import annotations

import re
from pathlib import Path

import diffusers
import pytest
import torch
from comfyui import MAPS, SAME, Comfy
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from tiny import SPEC, tiny_flux, tiny_sd3
from tiny_models.recent import TINY, hidream
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.policy.lora import Adapters, LoraSpec
from diffrl.policy.registry import SHIPPED, find_family
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
    assert {*MAPS, *SAME} | unets == set(READ) == set(SHIPPED) - {"SanaPipeline"}
    layer = {f"x.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match="has no Sana"):
        for_comfyui("SanaPipeline", layer, SPEC)
    with pytest.raises(UserError, match="of the layer x "):
        for_comfyui("FluxPipeline", layer, SPEC)
    part = {f"layers.0.attn.to_q.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match="qkv as one weight"):
        for_comfyui("Lumina2Pipeline", part, SPEC)
