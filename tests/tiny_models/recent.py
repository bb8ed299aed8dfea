"""Tiny random pipelines of the families of 2025 and 2026, text encoders included; about 100,000 parameters each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn

from .classic import LETTERS, WIDTH, clip, clip_tokenizer, image_vae, spread, t5_encoder

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEXT = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def qwen_tokenizer(template: str = CHAT, **more: Any) -> Any:
    """Qwen's tokenizer over single bytes."""
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *sorted(ByteLevel.alphabet())])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=list(SPECIAL), **more)
    tokenizer.chat_template = template
    return tokenizer


def gemma(layers: int = 2) -> tuple[nn.Module, Any]:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS]
    tokenizer = transformers.GemmaTokenizer(vocab={word: i for i, word in enumerate(words)})
    bos = ("<bos>", words.index("<bos>"))  # which every text begins with, the empty one, too
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    config = transformers.Gemma2Config(**TEXT, vocab_size=len(words), num_hidden_layers=layers, head_dim=8)
    return transformers.Gemma2Model(config), tokenizer


def qwen3(layers: int, kind: Any = transformers.Qwen3Model) -> tuple[nn.Module, Any]:
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen3Config(**TEXT, vocab_size=len(tokenizer), num_hidden_layers=layers, head_dim=8)
    return kind(config), tokenizer


def qwen3_vl(layers: int, kind: Any) -> tuple[nn.Module, Any]:
    tokenizer = qwen_tokenizer(PARTS)
    text = {**TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": layers, "head_dim": 8, "rope_parameters": MROPE}
    vision = {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    ids |= {"video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")}
    return kind(transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)), tokenizer


def qwen25_vl() -> tuple[nn.Module, Any]:
    tokenizer = qwen_tokenizer()
    text = {**TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "rope_parameters": MROPE}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION | {"fullatt_block_indexes": [0]})
    return transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer


def video_vae() -> nn.Module:
    """Qwen-Image's: 2 pixels to a latent's side, four channels."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.7, 1.2, 1.0],
    )


def flow(**more: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 1.0, "use_dynamic_shifting": True, **more})


def qwen_image() -> dict[str, Any]:
    encoder, tokenizer = qwen25_vl()
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = flow(base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)
    return {"transformer": transformer, "vae": video_vae(), "scheduler": scheduler} | named(encoder, tokenizer)


def z_image(turbo: bool = False) -> dict[str, Any]:
    encoder, tokenizer = qwen3(3)
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    for name in ("x_pad_token", "cap_pad_token"):  # made without values: a checkpoint has them
        nn.init.normal_(getattr(transformer, name), std=0.1)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0 if turbo else 6.0)
    vae = image_vae(shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False)
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler} | named(encoder, tokenizer)


def flux2(klein: bool = True, distilled: bool = False) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "transformer": diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        ),
        "vae": flux2_vae(),
        "scheduler": flow(shift=3.0),
    }
    if klein:
        encoder, tokenizer = qwen3(27, transformers.Qwen3ForCausalLM)
        return parts | named(encoder, tokenizer) | {"is_distilled": distilled}
    return parts | named(*mistral3())


def flux2_vae() -> nn.Module:
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    nn.init.normal_(vae.bn.running_mean, std=0.3)
    nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae


def mistral3() -> tuple[nn.Module, Any]:
    tokens = {"[IMG]": "image_token", "[IMG_BREAK]": "image_break_token", "[IMG_END]": "image_end_token"}
    tokenizer = qwen_tokenizer(PARTS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(), tokenizer=tokenizer, chat_template=PARTS
    )
    text = {"model_type": "mistral", **TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 30, "head_dim": 8}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 32, "patch_size": 16}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration(config), processor


def krea2(distilled: bool = False) -> dict[str, Any]:
    encoder, tokenizer = qwen3_vl(3, transformers.Qwen3VLModel)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=WIDTH,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    more = {"text_encoder_select_layers": (1, 3), "is_distilled": distilled}
    return {"transformer": transformer, "vae": video_vae(), "scheduler": flow()} | named(encoder, tokenizer) | more


def qwen_image21() -> dict[str, Any]:
    encoder, tokenizer = qwen3_vl(2, transformers.Qwen3VLForConditionalGeneration)
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(), tokenizer, transformers.Qwen3VLVideoProcessor(), PARTS
    )
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.7, 1.2, 1.0],
    )
    parts = {"transformer": transformer, "vae": vae, "scheduler": flow()}
    return parts | {"text_encoder": encoder, "processor": processor}


def sana() -> dict[str, Any]:
    encoder, tokenizer = gemma()
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=4,
    )
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler} | named(encoder, tokenizer)


def chroma() -> dict[str, Any]:
    encoder, tokenizer = t5_encoder()
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    parts = {"transformer": transformer, "vae": image_vae(shift_factor=0.06), "scheduler": flow(shift=3.0)}
    return parts | named(encoder, tokenizer) | {"image_encoder": None, "feature_extractor": None}


def lumina2() -> dict[str, Any]:
    encoder, tokenizer = gemma()
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )
    vae = image_vae(shift_factor=0.06, scale=8)
    return {"transformer": transformer, "vae": vae, "scheduler": flow(shift=6.0)} | named(encoder, tokenizer)


def hidream(folder: Path) -> dict[str, Any]:
    words = clip_tokenizer(folder / "tokenizer")
    t5, tokenizer_3 = t5_encoder()
    tokenizer_4 = qwen_tokenizer(model_max_length=128)
    llama = transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer_4), num_hidden_layers=2)
    llama._attn_implementation = "eager"  # the pipeline asks for attentions
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[2 * WIDTH, WIDTH],
        text_emb_dim=2 * WIDTH,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[0, 1],
    )
    return {
        "transformer": transformer,
        "vae": image_vae(shift_factor=0.06),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": clip(words),
        "tokenizer": words,
        "text_encoder_2": clip(words),
        "tokenizer_2": words,
        "text_encoder_3": t5,
        "tokenizer_3": tokenizer_3,
        "text_encoder_4": transformers.LlamaForCausalLM(llama),
        "tokenizer_4": tokenizer_4,
    }


def named(encoder: nn.Module, tokenizer: Any) -> dict[str, Any]:
    return {"text_encoder": encoder, "tokenizer": tokenizer}


@dataclass(frozen=True)
class Tiny:
    """How a tiny pipeline is made: parts (with options), the length of its text where the model's own would be slow,
    and the side of its pictures in pixels."""

    pipeline: str
    parts: Callable[..., dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    resolution: int = 16


TINY = {
    "qwen-image": Tiny("QwenImagePipeline", qwen_image),
    "z-image": Tiny("ZImagePipeline", z_image, length=64),
    "z-image-turbo": Tiny("ZImagePipeline", z_image, {"turbo": True}, 64),
    "flux2-klein": Tiny("Flux2KleinPipeline", flux2, length=48, resolution=32),
    "flux2-klein-distilled": Tiny("Flux2KleinPipeline", flux2, {"distilled": True}, 48, 32),
    "flux2-dev": Tiny("Flux2Pipeline", flux2, {"klein": False}, 48, 32),
    "krea2": Tiny("Krea2Pipeline", krea2),
    "krea2-turbo": Tiny("Krea2Pipeline", krea2, {"distilled": True}),
    "qwen-image-2.1": Tiny("QwenImage21Pipeline", qwen_image21, resolution=64),
    "sana": Tiny("SanaPipeline", sana, length=96, resolution=32),
    "chroma": Tiny("ChromaPipeline", chroma, length=64),
    "lumina2": Tiny("Lumina2Pipeline", lumina2, resolution=64),
    "hidream": Tiny("HiDreamImagePipeline", hidream, length=16),
}


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Make and save the tiny pipeline `name` of `TINY`."""
    tiny = TINY[name]
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = tiny.parts(folder) if tiny.parts is hidream else tiny.parts(**tiny.options)
        for key, part in made.items():
            if isinstance(part, nn.Module) and key != "vae":
                spread(part)
    getattr(diffusers, tiny.pipeline)(**made).save_pretrained(folder)
    if tiny.length is not None:
        (folder / "diffrl.json").write_text(json.dumps({"max_sequence_length": tiny.length}))
    return folder
