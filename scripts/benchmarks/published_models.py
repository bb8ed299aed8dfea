"""The sizes of published models, for estimates and benchmarks without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
SMALL = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "joint_attention_dim": 512,
    "caption_projection_dim": 192,
    "pooled_projection_dim": 512,
    "pos_embed_max_size": 32,
}
SMALL_VAE = (
    VAE
    | {"block_out_channels": [32, 64, 64], "latent_channels": 4}
    | {
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
    }
)
Part = tuple[str, str, dict[str, Any]]  # library, class, config
MODELS: dict[str, dict[str, Part]] = {
    "sd35-medium": {
        "transformer": ("diffusers", "SD3Transformer2DModel", SD35_MEDIUM),
        "vae": ("diffusers", "AutoencoderKL", VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection", CLIP_L | {"projection_dim": 768}),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection", CLIP_G | {"projection_dim": 1280}),
        "text_encoder_3": ("transformers", "T5EncoderModel", T5_XXL),
    },
    "flux-dev": {
        "transformer": ("diffusers", "FluxTransformer2DModel", FLUX_DEV),
        "vae": ("diffusers", "AutoencoderKL", VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
        "text_encoder": ("transformers", "CLIPTextModel", CLIP_L),
        "text_encoder_2": ("transformers", "T5EncoderModel", T5_XXL),
    },
    "small": {  # for a laptop: SD3's architecture, 6 blocks of width 192, 64 pixels, no T5
        "transformer": ("diffusers", "SD3Transformer2DModel", SMALL),
        "vae": ("diffusers", "AutoencoderKL", SMALL_VAE),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    },
}


def write_model(folder: Path, model: str) -> Path:
    """A folder in diffusers' format that holds nothing but configs."""
    index: dict[str, Any] = {"_class_name": "FluxPipeline" if model.startswith("flux") else "StableDiffusion3Pipeline"}
    index |= {name: [None, None] for name in ("text_encoder", "text_encoder_2", "text_encoder_3")}
    for name, (library, kind, config) in MODELS[model].items():
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
    if "text_encoder_3" not in MODELS[model] and not model.startswith("flux"):
        (folder / "diffrl.json").write_text(json.dumps({"max_sequence_length": 0}))  # no T5, no room for its tokens
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
