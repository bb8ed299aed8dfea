"""ComfyUI's names of the networks' weights, under which trainers over its layout write LoRAs, as `diffusion_model.NAME`
or `lora_unet_NAME` with `_` for `.`; and such a file's matrices by diffusers' layers.

Where ComfyUI's weight holds several layers, one below the other, all of them have its A, and each its rows of B. The
names are those of the models' own code (tests/comfyui.py has the places in ComfyUI's).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.loras.names import split

B, C = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
T = r"time_text_embed\.timestep_embedder\.linear_"
SD3 = {  # ComfyUI's name by diffusers' layer
    B + r"attn(2?)\.to_[qkv]": r"joint_blocks.\1.x_block.attn\2.qkv",
    B + r"attn(2?)\.to_out\.0": r"joint_blocks.\1.x_block.attn\2.proj",
    B + r"attn\.add_[qkv]_proj": r"joint_blocks.\1.context_block.attn.qkv",
    B + r"attn\.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
    B + r"norm1\.linear": r"joint_blocks.\1.x_block.adaLN_modulation.1",
    B + r"norm1_context\.linear": r"joint_blocks.\1.context_block.adaLN_modulation.1",
    B + r"ff\.net\.0\.proj": r"joint_blocks.\1.x_block.mlp.fc1",
    B + r"ff\.net\.2": r"joint_blocks.\1.x_block.mlp.fc2",
    B + r"ff_context\.net\.0\.proj": r"joint_blocks.\1.context_block.mlp.fc1",
    B + r"ff_context\.net\.2": r"joint_blocks.\1.context_block.mlp.fc2",
    "context_embedder": "context_embedder",
    T + "1": "t_embedder.mlp.0",
    T + "2": "t_embedder.mlp.2",
    r"time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
FLUX = {  # of FLUX.1, FLUX.2 and Chroma
    B + r"attn\.to_[qkv]": r"double_blocks.\1.img_attn.qkv",
    B + r"attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
    B + r"attn\.add_[qkv]_proj": r"double_blocks.\1.txt_attn.qkv",
    B + r"attn\.to_add_out": r"double_blocks.\1.txt_attn.proj",
    B + r"norm1\.linear": r"double_blocks.\1.img_mod.lin",
    B + r"norm1_context\.linear": r"double_blocks.\1.txt_mod.lin",
    B + r"ff\.(?:net\.0\.proj|linear_in)": r"double_blocks.\1.img_mlp.0",
    B + r"ff\.(?:net\.2|linear_out)": r"double_blocks.\1.img_mlp.2",
    B + r"ff_context\.(?:net\.0\.proj|linear_in)": r"double_blocks.\1.txt_mlp.0",
    B + r"ff_context\.(?:net\.2|linear_out)": r"double_blocks.\1.txt_mlp.2",
    C + r"(?:attn\.to_[qkv]|proj_mlp|attn\.to_qkv_mlp_proj)": r"single_blocks.\1.linear1",
    C + r"(?:proj_out|attn\.to_out)": r"single_blocks.\1.linear2",
    C + r"norm\.linear": r"single_blocks.\1.modulation.lin",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    r"time_(?:text|guidance)_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
    r"time_(?:text|guidance)_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    r"time_text_embed\.text_embedder\.linear_1": "vector_in.in_layer",
    r"time_text_embed\.text_embedder\.linear_2": "vector_in.out_layer",
    r"time_(?:text|guidance)_embed\.guidance_embedder\.linear_1": "guidance_in.in_layer",
    r"time_(?:text|guidance)_embed\.guidance_embedder\.linear_2": "guidance_in.out_layer",
    r"double_stream_modulation_(img|txt)\.linear": r"double_stream_modulation_\1.lin",
    r"single_stream_modulation\.linear": "single_stream_modulation.lin",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
KREA2 = {
    r"transformer_(blocks\.\d+)\.attn\.to_([qkv])": r"\1.attn.w\2",
    r"transformer_(blocks\.\d+)\.attn\.to_gate": r"\1.attn.gate",
    r"transformer_(blocks\.\d+)\.attn\.to_out\.0": r"\1.attn.wo",
    r"transformer_(blocks\.\d+)\.ff\.(gate|up|down)": r"\1.mlp.\2",
    r"text_fusion\.((?:layerwise|refiner)_blocks\.\d+)\.attn\.to_([qkv])": r"txtfusion.\1.attn.w\2",
    r"text_fusion\.((?:layerwise|refiner)_blocks\.\d+)\.attn\.to_gate": r"txtfusion.\1.attn.gate",
    r"text_fusion\.((?:layerwise|refiner)_blocks\.\d+)\.attn\.to_out\.0": r"txtfusion.\1.attn.wo",
    r"text_fusion\.((?:layerwise|refiner)_blocks\.\d+)\.ff\.(gate|up|down)": r"txtfusion.\1.mlp.\2",
    r"text_fusion\.projector": "txtfusion.projector",
    "img_in": "first",
    r"time_embed\.linear_1": "tmlp.0",
    r"time_embed\.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    r"txt_in\.linear_1": "txtmlp.1",
    r"txt_in\.linear_2": "txtmlp.3",
    r"final_layer\.linear": "last.linear",
}
L = r"((?:layers|context_refiner|noise_refiner)\.\d+)\."
LUMINA2 = {
    L + r"attn\.to_[qkv]": r"\1.attention.qkv",
    L + r"attn\.to_out\.0": r"\1.attention.out",
    L + r"feed_forward\.linear_([123])": r"\1.feed_forward.w\2",
    L + r"norm1\.linear": r"\1.adaLN_modulation.1",
    r"norm_out\.linear_1": "final_layer.adaLN_modulation.1",
    r"norm_out\.linear_2": "final_layer.linear",
    "x_embedder": "x_embedder",
    r"time_caption_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"time_caption_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"time_caption_embed\.caption_embedder\.1": "cap_embedder.1",
}
Z_IMAGE = {
    L + r"attention\.to_[qkv]": r"\1.attention.qkv",
    L + r"attention\.to_out\.0": r"\1.attention.out",
    L + r"(feed_forward\.w[123]|adaLN_modulation\.0)": r"\1.\2",
    r"all_final_layer\.2-1\.(linear|adaLN_modulation\.1)": r"final_layer.\1",
    r"all_x_embedder\.2-1": "x_embedder",
    r"(cap_embedder\.1|t_embedder\.mlp\.[02])": r"\1",
}
QKV = re.compile(r"(?:to|add)_([qkv])(?:_proj)?$")
TABLES = {  # by diffusers' class of the network
    "SD3Transformer2DModel": SD3,
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX,
    "ChromaTransformer2DModel": FLUX,
    "Krea2Transformer2DModel": KREA2,
    "Lumina2Transformer2DModel": LUMINA2,
    "ZImageTransformer2DModel": Z_IMAGE,
}


def weights_of(table: Mapping[str, str], layers: list[str]) -> dict[str, list[str]]:
    """ComfyUI's weights, each with its layers in the order of their rows."""
    weights: dict[str, list[str]] = {}
    for layer in layers:
        matches = ((re.fullmatch(pattern, layer), name) for pattern, name in table.items())
        if name := next((match.expand(name) for match, name in matches if match), None):
            weights.setdefault(name, []).append(layer)
    for parts in weights.values():
        parts.sort(key=lambda layer: "qkv".index(found[1]) if (found := QKV.search(layer)) else 3)
    return weights


def by_layers(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The tensors, whose alphas scale nothing, with diffusers' layers in the place of ComfyUI's weights; all others as
    they are.

    A layer gets the ranks of A and B that have an effect on it: what stands on a diagonal is as it was before.

    Raises:
        UserError: a B has not the rows of its weight, or the file has two different matrices of one.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    weights = weights_of(TABLES.get(type(network).__name__, {}), [*linear])
    names = {name: name for name in weights} | {name.replace(".", "_"): name for name in weights}
    changed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        stem, kind = split(key)
        if kind is None or stem not in names or stem in linear:
            changed[key] = value
            continue
        of_weight = parts.setdefault(names[stem], {})
        if kind in of_weight and not of_weight[kind].equal(value):
            raise UserError(f"{names[stem]} has two {kind}, which differ: the file is of two LoRAs")
        of_weight[kind] = value
    for name, matrices in parts.items():
        changed |= _of_layers(name, matrices, {layer: linear[layer] for layer in weights[name]}, network)
    return changed


def _of_layers(
    name: str, matrices: dict[str, Tensor], layers: Mapping[str, nn.Linear], network: nn.Module
) -> dict[str, Tensor]:
    """A, B and DoRA's magnitudes of each layer of a weight."""
    state: dict[str, Tensor] = {}
    start, rows = 0, sum(layer.out_features for layer in layers.values())
    matrices.pop("alpha", None)
    for kind, value in matrices.items():
        if kind != "lora_A" and (value.ndim == 0 or len(value) != rows):
            raise UserError(f"{name}.{kind} has the shape {tuple(value.shape)}, not of {rows} rows")
    for layer, module in layers.items():
        end = start + module.out_features
        own = {kind: value if kind == "lora_A" else value[start:end] for kind, value in matrices.items()}
        parent = type(network.get_submodule(layer.rpartition(".")[0])).__name__
        if parent == "AdaLayerNormContinuous":  # whose shift and scale stand the other way round
            own = {k: value if k == "lora_A" else value.roll(len(value) // 2, 0) for k, value in own.items()}
        if len(layers) > 1 and {"lora_A", "lora_B"} <= own.keys() and own["lora_A"].ndim == own["lora_B"].ndim == 2:
            used = own["lora_B"].any(0)
            used[:1] |= not used.any()
            if len(used) == len(own["lora_A"]):
                own |= {"lora_A": own["lora_A"][used], "lora_B": own["lora_B"][:, used]}
        state |= {f"{layer}.{kind}.weight": value for kind, value in own.items()}
        start = end
    return state
