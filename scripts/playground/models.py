"""The playground's models: true diffusers and transformers classes, small enough to train on two CPU cores.

Shapes: B batch, T text tokens (16), D text width (128), P pooled width (128); images (B, 3, 64, 64) in [-1, 1],
latents (B, 8, 8, 8).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

IMAGE_SIZE = 64
LATENT_CHANNELS = 8
TEXT_TOKENS = 16
TEXT_WIDTH = 64
# Without a T5 the SD3 pipeline appends this many zero tokens; its default (256) would make every forward 4 to 5 times
# slower for nothing. A plain diffusers call must pass the same value to give the same picture.
MAX_SEQUENCE_LENGTH = 0


def build_vae() -> AutoencoderKL:
    """The autoencoder: 8 times down, 8 latent channels, 0.7 M parameters, most of its work at low resolution."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,  # more would take the colours' mixture from the eight channels at full size
        sample_size=IMAGE_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
    )


def build_transformer() -> SD3Transformer2DModel:
    """The MMDiT: 16 image tokens, 16 text tokens, 4 joint blocks of 4 heads; 2.3 M parameters."""
    return SD3Transformer2DModel(
        sample_size=IMAGE_SIZE // 8,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_projection_dim=4 * 32,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=IMAGE_SIZE // 16,
        qk_norm="rms_norm",  # as SD3.5; without it Muon's large steps make the attention sharp too early
    )


def build_text_encoder(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextModelWithProjection:
    """A CLIP text encoder over the playground's vocabulary; trained together with the transformer."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=TEXT_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Generator(nn.Module):
    """Transformer and the two text encoders with new weights: what `save_pipeline` writes."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.transformer: Any = build_transformer()
        self.text_encoder = build_text_encoder(tokenizer, layers=2)
        self.text_encoder_2 = build_text_encoder(tokenizer, layers=3)


def velocity(transformer: Any, x_t: Tensor, t: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
    """The transformer's output (B, C, h, w) for noise levels `t` (B,) in [0, 1]."""
    return transformer(
        hidden_states=x_t,
        timestep=t * 1000,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]


def tokenize(tokenizer: CLIPTokenizer, prompts: Sequence[str]) -> Tensor:
    """Prompts to token ids (B, T), padded to the tokenizer's maximum."""
    batch = tokenizer(list(prompts), padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt")
    return batch.input_ids


def save_pipeline(generator: Any, vae: Any, tokenizer: CLIPTokenizer, directory: Path) -> None:
    """Write a folder that `StableDiffusion3Pipeline.from_pretrained` loads, and `diffrl.json` beside it."""
    pipeline: Any = StableDiffusion3Pipeline(
        transformer=generator.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=generator.text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=generator.text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(directory, safe_serialization=True)
    settings = {"max_sequence_length": MAX_SEQUENCE_LENGTH}
    (directory / "diffrl.json").write_text(json.dumps(settings) + "\n")
