"""What the recipes need on each GPU, as `diffrl doctor` counts it on fake tensors: true sizes, no weights, any machine.

    python scripts/estimate_memory.py --out assets/results/memory.json

The models' folders are made from the sizes of the published models, weights left out. Rewards come on top.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from diffrl import __version__
from diffrl.config import load_config
from diffrl.fit import GIB, estimate

CLIP = {"vocab_size": 49408, "hidden_act": "quick_gelu", "max_position_embeddings": 77}
CLIP_L = CLIP | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_G = CLIP | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
T5_XXL = {"vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}
SD35_MEDIUM = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}
FLUX_DEV = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
MODELS: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "StableDiffusion3Pipeline": {
        "transformer": ("diffusers", "SD3Transformer2DModel", SD35_MEDIUM),
        "vae": ("diffusers", "AutoencoderKL", VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection", CLIP_L | {"projection_dim": 768}),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection", CLIP_G | {"projection_dim": 1280}),
        "text_encoder_3": ("transformers", "T5EncoderModel", T5_XXL),
    },
    "FluxPipeline": {
        "transformer": ("diffusers", "FluxTransformer2DModel", FLUX_DEV),
        "vae": ("diffusers", "AutoencoderKL", VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
        "text_encoder": ("transformers", "CLIPTextModel", CLIP_L),
        "text_encoder_2": ("transformers", "T5EncoderModel", T5_XXL),
    },
}
CHECKPOINTING = "optimise.gradient_checkpointing"
# label, config, pipeline, processes, FSDP2, overrides
CASES: list[tuple[str, str, str, int, bool, list[str]]] = [
    ("SD3.5-Medium, 512 px", "sd35/nft_ocr", "StableDiffusion3Pipeline", 8, False, []),
    ("SD3.5-Medium, checkpointing", "sd35/nft_ocr", "StableDiffusion3Pipeline", 8, False, [f"{CHECKPOINTING}=true"]),
    ("SD3.5-Medium, 1 GPU", "sd35/nft_ocr", "StableDiffusion3Pipeline", 1, False, ["optimise.accumulation=480"]),
    (
        "SD3.5-Medium, 1 GPU of 24 GB",
        "sd35/nft_ocr",
        "StableDiffusion3Pipeline",
        1,
        False,
        ["optimise.accumulation=960", f"{CHECKPOINTING}=true"],
    ),
    ("FLUX.1-dev, 512 px", "flux/nft_pickscore", "FluxPipeline", 8, False, []),
    ("FLUX.1-dev, FSDP2 over 8", "flux/nft_pickscore", "FluxPipeline", 8, True, []),
    ("FLUX.1-dev, FSDP2 over 64", "flux/nft_pickscore", "FluxPipeline", 64, True, ["optimise.accumulation=18"]),
]


def write_model(folder: Path, pipeline: str) -> Path:
    """A folder in diffusers' format that holds nothing but configs."""
    index: dict[str, Any] = {"_class_name": pipeline}
    for name, (library, kind, config) in MODELS[pipeline].items():
        index[name] = [library, kind]
        (folder / name).mkdir(parents=True)
        if library == "transformers":
            config = config | {"model_type": "t5" if kind.startswith("T5") else "clip_text_model"}
            if kind.startswith("T5"):
                config |= {"feed_forward_proj": "gated-gelu"}
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name / file).write_text(json.dumps(config | {"_class_name": kind}))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        folders = {pipeline: write_model(Path(work) / pipeline, pipeline) for pipeline in MODELS}
        for label, config, pipeline, processes, sharded, overrides in CASES:
            prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]  # not counted
            loaded = load_config(config, [*overrides, *prompts, f"model={folders[pipeline]}"])
            fit = estimate(loaded, processes, sharded)
            sizes = {name: round(size / GIB, 2) for name, size in {**fit.parts, **fit.peaks}.items()}
            total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
            how = {"config": config, "overrides": overrides, "processes": processes, "fsdp2": sharded}
            rows.append({"label": label, **how, "total_gib": total, "text_encoders_gib": host, "gib": sizes})
            print(f"{label:<32} {processes:>3} processes {total:>7.1f} GiB  {sizes}", flush=True)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "cases": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
