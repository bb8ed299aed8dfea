"""Tiny random pipelines of the true classes, in seconds on a CPU: SD3, FLUX.1, Stable Diffusion 1 and XL."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.\"'"
WIDTH = 16  # of each text encoder


def clip_tokenizer(directory: Path) -> CLIPTokenizer:
    """A true CLIP byte-pair tokenizer over letters and three words, at most 16 tokens with begin and end."""
    directory.mkdir(parents=True, exist_ok=True)
    merges = [("r", "e"), ("re", "d</w>"), ("o", "n</w>"), ("a", "n"), ("an", "d</w>")]
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *(a + b for a, b in merges)]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16}))
    return CLIPTokenizer.from_pretrained(directory)


def clip(tokenizer: CLIPTokenizer, kind: type = CLIPTextModelWithProjection) -> nn.Module:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config)


def t5_encoder() -> tuple[T5EncoderModel, T5TokenizerFast]:
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    tokenizer = T5TokenizerFast(vocab=vocabulary, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=2 * WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0
    )
    return T5EncoderModel(config), tokenizer


def image_vae(scale: int = 2, **more: object) -> AutoencoderKL:
    """`scale` pixels to a latent's side, 2 or 8; latents have 4 channels."""
    widths = (8, 16) if scale == 2 else (8, 8, 16, 16)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.5,
        **more,
    )


def spread(model: nn.Module) -> None:
    """Larger weights: with the usual start a tiny random network hardly depends on its inputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)


def tiny_sd3(
    directory: str | Path,
    *,
    seed: int = 0,
    shift: float = 3.0,
    t5: bool = False,
    layers: int = 2,
    force_upcast: bool = False,
    max_sequence_length: int | None = 0,
    dynamic_shifting: bool = False,
    dual_attention: bool = False,
) -> Path:
    """Make and save a random StableDiffusion3Pipeline: 16 x 16 pixels, latents (4, 8, 8), about 60,000 parameters.

    `max_sequence_length` is recorded in `diffrl.json`; None records nothing. `dual_attention`: as in SD3.5-Medium.
    """
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(directory / "tokenizer")
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=2 * WIDTH,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=8,
            dual_attention_layers=(0,) if dual_attention else (),
            qk_norm="rms_norm" if dual_attention else None,
        )
        vae = image_vae(shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False, force_upcast=force_upcast)
        encoders = [clip(tokenizer), clip(tokenizer)]
        encoder_3, tokenizer_3 = t5_encoder() if t5 else (None, None)
        for model in (transformer, *encoders):
            spread(model)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=dynamic_shifting),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    )
    pipe.save_pretrained(directory)
    if max_sequence_length is not None:
        (directory / "diffrl.json").write_text(json.dumps({"max_sequence_length": max_sequence_length}))
    return directory


def tiny_flux(directory: str | Path, *, dev: bool = True, seed: int = 0) -> Path:
    """Make and save a random FluxPipeline, 16 x 16 pixels: dev takes guidance as an input and shifts its schedule."""
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(directory / "tokenizer")
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=dev,
            axes_dims_rope=(4, 6, 6),
        )
        encoder, (t5, tokenizer_2), vae = clip(tokenizer, CLIPTextModel), t5_encoder(), image_vae(shift_factor=0.06)
        for model in (transformer, encoder):
            spread(model)
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer_2,
    )
    pipe.save_pretrained(directory)
    (directory / "diffrl.json").write_text(json.dumps({"max_sequence_length": 24}))
    return directory


def tiny_sd(directory: str | Path, *, xl: bool = False, prediction_type: str = "epsilon", seed: int = 0) -> Path:
    """Make and save a random Stable Diffusion 1 or XL pipeline: 16 x 16 pixels, latents (4, 8, 8)."""
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(directory / "tokenizer")
        added = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
        }
        unet = UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=2 * WIDTH if xl else WIDTH,
            attention_head_dim=8,
            use_linear_projection=xl,
            **(added if xl else {}),
        )
        encoders = [clip(tokenizer, CLIPTextModel), clip(tokenizer)]
        vae = image_vae()
        for model in (unet, *encoders):
            spread(model)
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    parts = {"unet": unet, "scheduler": scheduler, "vae": vae, "text_encoder": encoders[0], "tokenizer": tokenizer}
    if xl:
        pipe = StableDiffusionXLPipeline(**parts, text_encoder_2=encoders[1], tokenizer_2=tokenizer)
    else:
        pipe = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipe.save_pretrained(directory)
    return directory
