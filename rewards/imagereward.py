"""ImageReward-v1.0: human preference learned on BLIP, whose text encoder looks at the image through cross-attention.

The published checkpoint is BLIP's original state dict with a head. The classes here are transformers' own; only the
names of the vision transformer's tensors differ (`VISION_NAMES`), those of the text encoder are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.hub import hub_file
from diffrl_zoo.aesthetic import linear_chain
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import fit
from diffrl_zoo.loading import cannot_load, channels, dtype_of, footprint_of, from_pretrained, pick_device
from diffrl_zoo.vision import complete

MODEL, FILE, CONFIG = "THUDM/ImageReward", "ImageReward.pt", "med_config.json"
PARAMETERS = 450_000_000  # of the published model, about
TOKENIZER = "google-bert/bert-base-uncased"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores on their validation set; the paper's constants
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MARKS = ["[DEC]", "[ENC]"]  # BLIP's own tokens, at the end of BERT's: a prompt may have them, too
TOKENS = 35  # prompts are cut to this length
HEAD_WIDTH = 64  # of an attention head, in every BLIP
# BLIP's own names of the vision transformer's parts, and transformers', in the order of replacement.
VISION_NAMES = {
    r"^blocks\.": "encoder.layers.",
    r"\.attn\.proj\.": ".self_attn.projection.",
    r"\.attn\.qkv\.": ".self_attn.qkv.",
    r"\.norm([12])\.": r".layer_norm\1.",
    r"^norm\.": "post_layernorm.",
    r"^patch_embed\.proj\.": "embeddings.patch_embedding.",
    r"^pos_embed$": "embeddings.position_embedding",
    r"^cls_token$": "embeddings.class_embedding",
}
WHERE = "imagereward: the checkpoint"
_VISION, _TEXT, _HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp."


class ImageReward:
    """The preference score of image and prompt, normalised by the paper's constants: about -2.3 to 2.

    `model`: a hub id or a folder with `ImageReward.pt` and `med_config.json`. `tokenizer`: BERT's, a hub id or folder
    (None: the model's folder if it has one, else bert-base-uncased). `precision`: fp32, bf16 or fp16.
    """

    name = "imagereward"
    differentiable = True
    card = card_of(name, model=MODEL, file=FILE, tokenizer=TOKENIZER)

    def __init__(
        self,
        model: str = MODEL,
        tokenizer: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        precision: str = "fp32",
    ) -> None:
        from transformers import AutoTokenizer

        self.device, self.dtype, self.batch_size = pick_device(device), dtype_of(precision, "imagereward"), batch_size
        weights, config = (_file(model, name) for name in (FILE, CONFIG))
        with_tokenizer = any((weights.parent / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        source = tokenizer or (str(weights.parent) if with_tokenizer else TOKENIZER)
        with cannot_load("imagereward", source, "the tokenizer "):
            self.tokenizer = from_pretrained(AutoTokenizer, source)
        tensors = torch.load(weights, map_location="cpu", weights_only=True)
        with cannot_load("imagereward", str(weights)):
            vision = _vision(_under(tensors, _VISION, weights))
            text = _text(_under(tensors, _TEXT, weights), json.loads(config.read_text()), vision.config.hidden_size)
        self.vision, self.text = vision.to(self.device, self.dtype), text.to(self.device, self.dtype)
        if text.config.vocab_size == len(self.tokenizer) + len(MARKS):
            self.tokenizer.add_tokens(MARKS, special_tokens=True)
        head = linear_chain(_under(tensors, _HEAD, weights), nn.Identity, f"imagereward: the head of {weights}")
        self.head = head.to(self.device)
        self.size: int = vision.config.image_size
        self.mean, self.std = channels(self.device, PIXEL_MEAN, PIXEL_STD)

    footprint = footprint_of({MODEL: PARAMETERS})

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; gradients flow to the images."""
        pixels = (fit(images.to(self.device, torch.float32), (self.size, self.size), "shortest") - self.mean) / self.std
        seen = self.vision(pixel_values=pixels.to(self.dtype)).last_hidden_state
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)
        hidden = self.text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state
        return (self.head(hidden[:, 0].float()).squeeze(-1) - MEAN) / STD


def _file(model: str, name: str) -> Path:
    """A file of the model's folder, or of its repository on the hub."""
    if not Path(model).is_dir():
        return hub_file(model, name, f'imagereward: no folder "{model}"')
    if not (path := Path(model, name)).is_file():
        raise UserError(f"imagereward: no {name} in {model}")
    return path


def _under(tensors: Mapping[str, Tensor], prefix: str, path: Path) -> dict[str, Tensor]:
    result = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if not result:
        raise UserError(f"imagereward: {path} has no tensors {prefix}*; it is not ImageReward's checkpoint")
    return result


def _vision(tensors: Mapping[str, Tensor]) -> Any:
    """transformers' BLIP vision transformer with the tensors of BLIP's own; sizes are those of the tensors."""
    from transformers import BlipVisionConfig, BlipVisionModel

    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    side = int((tensors["pos_embed"].shape[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("blocks.")),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=side * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,  # timm's
    )
    return complete(BlipVisionModel, None, config, torch.float32, WHERE, state_dict=tensors, key_mapping=VISION_NAMES)


def _text(tensors: Mapping[str, Tensor], config: Mapping[str, Any], vision_width: int) -> Any:
    """transformers' BLIP text encoder with cross-attention to the image; `config` is BLIP's `med_config.json`."""
    from transformers import BlipTextConfig, BlipTextModel

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
    settings = {key: config[key] for key in (*keys, "max_position_embeddings", "layer_norm_eps")}
    vocabulary = tensors["embeddings.word_embeddings.weight"].shape[0]
    # is_decoder only adds the layers of cross-attention here; the attention to the prompt stays bidirectional.
    built = BlipTextConfig(**settings, vocab_size=vocabulary, encoder_hidden_size=vision_width, is_decoder=True)
    wanted = {key: tensor for key, tensor in tensors.items() if not key.endswith("position_ids")}
    return complete(BlipTextModel, None, built, torch.float32, WHERE, state_dict=wanted, add_pooling_layer=False)
