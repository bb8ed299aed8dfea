"""ComfyUI's way with a LoRA, from the facts of its code: names, rows of fused weights, and what it does with a file.

Facts of github.com/Comfy-Org/ComfyUI: `model_lora_keys_unet` of comfy/lora.py at 17358c8, maps to diffusers' layers
of comfy/utils.py at 09708ea, the weights of comfy/ldm/lumina/model.py at 617048a and comfy/ldm/qwen_image21/model.py at
08f68f0, the list of models of comfy/supported_models.py at 01f03bb.
A line: diffusers' layer, ComfyUI's weight, and first row and number of rows in units of the network's width where
ComfyUI's weight holds several layers; `swap`: its two halves stand in the other order; `*` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SD3 = """
transformer_blocks.*.attn.to_q             joint_blocks.*.x_block.attn.qkv               0 1
transformer_blocks.*.attn.to_k             joint_blocks.*.x_block.attn.qkv               1 1
transformer_blocks.*.attn.to_v             joint_blocks.*.x_block.attn.qkv               2 1
transformer_blocks.*.attn.add_q_proj       joint_blocks.*.context_block.attn.qkv         0 1
transformer_blocks.*.attn.add_k_proj       joint_blocks.*.context_block.attn.qkv         1 1
transformer_blocks.*.attn.add_v_proj       joint_blocks.*.context_block.attn.qkv         2 1
transformer_blocks.*.attn2.to_q            joint_blocks.*.x_block.attn2.qkv              0 1
transformer_blocks.*.attn2.to_k            joint_blocks.*.x_block.attn2.qkv              1 1
transformer_blocks.*.attn2.to_v            joint_blocks.*.x_block.attn2.qkv              2 1
transformer_blocks.*.attn.to_out.0         joint_blocks.*.x_block.attn.proj
transformer_blocks.*.attn2.to_out.0        joint_blocks.*.x_block.attn2.proj
transformer_blocks.*.attn.to_add_out       joint_blocks.*.context_block.attn.proj
transformer_blocks.*.norm1.linear          joint_blocks.*.x_block.adaLN_modulation.1
transformer_blocks.LAST.norm1_context.linear  joint_blocks.LAST.context_block.adaLN_modulation.1  swap
transformer_blocks.*.norm1_context.linear  joint_blocks.*.context_block.adaLN_modulation.1
transformer_blocks.*.ff.net.0.proj         joint_blocks.*.x_block.mlp.fc1
transformer_blocks.*.ff.net.2              joint_blocks.*.x_block.mlp.fc2
transformer_blocks.*.ff_context.net.0.proj joint_blocks.*.context_block.mlp.fc1
transformer_blocks.*.ff_context.net.2      joint_blocks.*.context_block.mlp.fc2
context_embedder                           context_embedder
time_text_embed.timestep_embedder.linear_1 t_embedder.mlp.0
time_text_embed.timestep_embedder.linear_2 t_embedder.mlp.2
time_text_embed.text_embedder.linear_1     y_embedder.mlp.0
time_text_embed.text_embedder.linear_2     y_embedder.mlp.2
norm_out.linear                            final_layer.adaLN_modulation.1                swap
proj_out                                   final_layer.linear
"""
FLUX = """
transformer_blocks.*.attn.to_q             double_blocks.*.img_attn.qkv                  0 1
transformer_blocks.*.attn.to_k             double_blocks.*.img_attn.qkv                  1 1
transformer_blocks.*.attn.to_v             double_blocks.*.img_attn.qkv                  2 1
transformer_blocks.*.attn.add_q_proj       double_blocks.*.txt_attn.qkv                  0 1
transformer_blocks.*.attn.add_k_proj       double_blocks.*.txt_attn.qkv                  1 1
transformer_blocks.*.attn.add_v_proj       double_blocks.*.txt_attn.qkv                  2 1
transformer_blocks.*.attn.to_out.0         double_blocks.*.img_attn.proj
transformer_blocks.*.attn.to_add_out       double_blocks.*.txt_attn.proj
transformer_blocks.*.norm1.linear          double_blocks.*.img_mod.lin
transformer_blocks.*.norm1_context.linear  double_blocks.*.txt_mod.lin
transformer_blocks.*.ff.net.0.proj         double_blocks.*.img_mlp.0
transformer_blocks.*.ff.net.2              double_blocks.*.img_mlp.2
transformer_blocks.*.ff_context.net.0.proj double_blocks.*.txt_mlp.0
transformer_blocks.*.ff_context.net.2      double_blocks.*.txt_mlp.2
transformer_blocks.*.ff.linear_in          double_blocks.*.img_mlp.0
transformer_blocks.*.ff.linear_out         double_blocks.*.img_mlp.2
transformer_blocks.*.ff_context.linear_in  double_blocks.*.txt_mlp.0
transformer_blocks.*.ff_context.linear_out double_blocks.*.txt_mlp.2
single_transformer_blocks.*.attn.to_q      single_blocks.*.linear1                       0 1
single_transformer_blocks.*.attn.to_k      single_blocks.*.linear1                       1 1
single_transformer_blocks.*.attn.to_v      single_blocks.*.linear1                       2 1
single_transformer_blocks.*.proj_mlp       single_blocks.*.linear1                       3 4
single_transformer_blocks.*.norm.linear    single_blocks.*.modulation.lin
single_transformer_blocks.*.proj_out       single_blocks.*.linear2
single_transformer_blocks.*.attn.to_qkv_mlp_proj  single_blocks.*.linear1
single_transformer_blocks.*.attn.to_out    single_blocks.*.linear2
x_embedder                                 img_in
context_embedder                           txt_in
time_text_embed.timestep_embedder.linear_1 time_in.in_layer
time_text_embed.timestep_embedder.linear_2 time_in.out_layer
time_text_embed.text_embedder.linear_1     vector_in.in_layer
time_text_embed.text_embedder.linear_2     vector_in.out_layer
time_text_embed.guidance_embedder.linear_1 guidance_in.in_layer
time_text_embed.guidance_embedder.linear_2 guidance_in.out_layer
norm_out.linear                            final_layer.adaLN_modulation.1                swap
proj_out                                   final_layer.linear
"""
KREA2 = (
    "".join(
        f"{block}.*.{here}  {theirs}.*.{there}\n"
        for block, theirs in (
            ("transformer_blocks", "blocks"),
            ("text_fusion.layerwise_blocks", "txtfusion.layerwise_blocks"),
            ("text_fusion.refiner_blocks", "txtfusion.refiner_blocks"),
        )
        for here, there in (
            ("attn.to_q", "attn.wq"),
            ("attn.to_k", "attn.wk"),
            ("attn.to_v", "attn.wv"),
            ("attn.to_gate", "attn.gate"),
            ("attn.to_out.0", "attn.wo"),
            ("ff.gate", "mlp.gate"),
            ("ff.up", "mlp.up"),
            ("ff.down", "mlp.down"),
        )
    )
    + """
img_in                 first
time_embed.linear_1    tmlp.0
time_embed.linear_2    tmlp.2
time_mod_proj          tproj.1
txt_in.linear_1        txtmlp.1
txt_in.linear_2        txtmlp.3
text_fusion.projector  txtfusion.projector
final_layer.linear     last.linear
"""
)
Z_IMAGE = (
    "".join(
        f"""
{block}.*.attention.to_q        {block}.*.attention.qkv        0 1
{block}.*.attention.to_k        {block}.*.attention.qkv        1 1
{block}.*.attention.to_v        {block}.*.attention.qkv        2 1
{block}.*.attention.to_out.0    {block}.*.attention.out
{block}.*.feed_forward.w1       {block}.*.feed_forward.w1
{block}.*.feed_forward.w2       {block}.*.feed_forward.w2
{block}.*.feed_forward.w3       {block}.*.feed_forward.w3
{block}.*.adaLN_modulation.0    {block}.*.adaLN_modulation.0
"""
        for block in ("layers", "context_refiner", "noise_refiner")
    )
    + """
all_final_layer.2-1.linear              final_layer.linear
all_final_layer.2-1.adaLN_modulation.1  final_layer.adaLN_modulation.1
all_x_embedder.2-1                      x_embedder
cap_embedder.1                          cap_embedder.1
t_embedder.mlp.0                        t_embedder.mlp.0
t_embedder.mlp.2                        t_embedder.mlp.2
"""
)
# Not in a map: these are the names of the model's weights, and diffusers' layers by its own converter. The rows of q, k
# and v are counted, as k and v have fewer heads; so no key of a single one of them is known.
LUMINA2 = (
    "".join(
        f"""
{block}.*.attn.to_q               {block}.*.attention.qkv        q
{block}.*.attn.to_k               {block}.*.attention.qkv        k
{block}.*.attn.to_v               {block}.*.attention.qkv        v
{block}.*.attn.to_out.0           {block}.*.attention.out
{block}.*.feed_forward.linear_1   {block}.*.feed_forward.w1
{block}.*.feed_forward.linear_2   {block}.*.feed_forward.w2
{block}.*.feed_forward.linear_3   {block}.*.feed_forward.w3
{block}.*.norm1.linear            {block}.*.adaLN_modulation.1
"""
        for block in ("layers", "context_refiner", "noise_refiner")
    )
    + """
norm_out.linear_1                               final_layer.adaLN_modulation.1
norm_out.linear_2                               final_layer.linear
x_embedder                                      x_embedder
time_caption_embed.timestep_embedder.linear_1   t_embedder.mlp.0
time_caption_embed.timestep_embedder.linear_2   t_embedder.mlp.2
time_caption_embed.caption_embedder.1           cap_embedder.1
"""
)
MAPS = {
    "StableDiffusion3Pipeline": SD3,
    "FluxPipeline": FLUX,
    "Flux2Pipeline": FLUX,
    "Flux2KleinPipeline": FLUX,
    "ChromaPipeline": FLUX,
    "Krea2Pipeline": KREA2,
    "ZImagePipeline": Z_IMAGE,
    "Lumina2Pipeline": LUMINA2,
}
SAME = ("QwenImagePipeline", "QwenImage21Pipeline", "HiDreamImagePipeline")  # ComfyUI's names are diffusers'


@dataclass(frozen=True)
class Place:
    """Where a layer's weight is: ComfyUI's weight, first row, number of rows, and whether its halves are swapped."""

    weight: str
    start: int = 0
    rows: int | None = None
    swap: bool = False


class Comfy:
    """The weights of a diffusers network as ComfyUI holds them, and the LoRA keys that it knows for them."""

    def __init__(self, pipeline: str, network: nn.Module) -> None:
        self.weights: dict[str, Tensor] = {}
        self.keys: dict[str, Place] = {}
        linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
        last = max((int(name.split(".")[1]) for name in linear if name.startswith("transformer_blocks.")), default=0)
        places = {name: self._place(pipeline, name, linear, last) for name in linear}
        self.places = {name: place for name, place in places.items() if place is not None}
        for name, place in sorted(self.places.items(), key=lambda item: item[1].start):
            value = linear[name].weight.detach().clone()
            value = torch.cat(value.chunk(2)[::-1]) if place.swap else value
            before = self.weights.get(place.weight, value[:0])
            assert place.start == len(before), f"{name}: rows of {place.weight} that are no layer's"
            self.weights[place.weight] = torch.cat([before, value])
        for weight in self.weights:
            self.keys[f"diffusion_model.{weight}"] = Place(weight)
            self.keys["lora_unet_" + weight.replace(".", "_")] = Place(weight)
        if pipeline != "Lumina2Pipeline":  # its classes go through Z-Image's map, which has none of its layers
            self.keys |= {f"transformer.{name}": place for name, place in self.places.items()}

    def _place(self, pipeline: str, name: str, linear: Mapping[str, nn.Linear], last: int) -> Place | None:
        if pipeline in SAME:
            return Place(name)
        for line in MAPS[pipeline].splitlines():
            if not line:
                continue
            here, there, *rows = line.split()
            here = here.replace("LAST", str(last))
            number = re.fullmatch(re.escape(here).replace(r"\*", r"(\d+)"), name)
            if number is None:
                continue
            weight = there.replace("LAST", str(last)).replace("*", number[1] if number.groups() else "*")
            if rows == ["swap"]:
                return Place(weight, swap=True)
            if rows and rows[0] in "qkv":
                block = name.rpartition(".")[0]
                sizes = [linear[f"{block}.to_{part}"].out_features for part in "qkv"]
                index = "qkv".index(rows[0])
                return Place(weight, sum(sizes[:index]), sizes[index])
            if rows:
                width = linear[name].in_features
                return Place(weight, int(rows[0]) * width, int(rows[1]) * width)
            return Place(weight)
        return None

    def apply(self, file: Mapping[str, Tensor]) -> None:
        """Add a LoRA's file with strength 1, as its loader does: alpha is 1 x rank where the file has none. Every key
        must be known."""
        names = {key.removesuffix(".alpha").removesuffix(".weight").removesuffix(".lora_up") for key in file}
        names = {name.removesuffix(".lora_down") for name in names}
        unknown = sorted(names - set(self.keys))
        assert not unknown, f"lora key not loaded: {unknown[0]}"
        for name in names:
            up, down, place = file[f"{name}.lora_up.weight"], file[f"{name}.lora_down.weight"], self.keys[name]
            alpha = file.get(f"{name}.alpha")
            change = (1.0 if alpha is None else float(alpha) / len(down)) * up.mm(down)
            if place.swap:
                change = torch.cat(change.chunk(2)[::-1])
            rows = self.weights[place.weight][place.start :][: place.rows]
            assert rows.shape == change.shape, f"{name}: {tuple(change.shape)} for {tuple(rows.shape)}"
            rows += change

    def layer(self, name: str) -> Tensor:
        """A layer's weight as diffusers has it."""
        place = self.places[name]
        rows = self.weights[place.weight][place.start :][: place.rows]
        return torch.cat(rows.chunk(2)[::-1]) if place.swap else rows
