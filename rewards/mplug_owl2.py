"""mPLUG-Owl2's own class (Ye et al. 2023, arXiv:2311.04257) on transformers' LLaMA, with the names of its checkpoints.

A ViT's patches are read by a few queries (the abstractor), which stand in the text as image tokens. In every layer of
the language model keys, values and both norms have weights of their own for image tokens ("multiway"). transformers
has no such class. Shapes: B images, S tokens, P patches and the class token, Q queries, D a width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.clip.modeling_clip import CLIPMLP

# What a checkpoint's `visual_config` leaves out.
VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
}
ABSTRACTOR: dict[str, Any] = {
    "num_learnable_queries": 64,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "encoder_hidden_size": 1024,
    "grid_size": 32,
    "layer_norm_eps": 1e-6,
}


class Span:
    """Where the image's tokens are, for all rows and layers: `start` to `stop`."""

    start = stop = 0


class Multiway(nn.Module):
    """Two modules of one shape: the first for words, the second for the image's tokens."""

    def __init__(self, make: Callable[[], nn.Module], span: Span) -> None:
        super().__init__()
        self.multiway = nn.ModuleList([make(), make()])
        self.span = span

    def forward(self, hidden: Tensor) -> Tensor:
        words, image = self.multiway
        start, stop = self.span.start, self.span.stop
        return torch.cat([words(hidden[:, :start]), image(hidden[:, start:stop]), words(hidden[:, stop:])], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention without a mask: (B, S, D), (B, P, D), (B, P, D) to (B, S, D)."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        # A head's query, key and value lie side by side, not all queries before all keys.
        mixed = self.query_key_value(hidden).unflatten(2, (self.heads, 3, -1))
        q, k, v = (mixed[:, :, :, i].flatten(2) for i in range(3))
        return self.dense(attend(q, k, v, self.heads))


class VisionLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn, self.mlp = VisionAttention(width, config.num_attention_heads), CLIPMLP(config)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class VisionEmbeddings(nn.Module):
    def __init__(self, width: int, side: int, patch: int, eps: float) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.position_embedding = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.pre_layernorm = nn.LayerNorm(width, eps)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], dim=1)
        return self.pre_layernorm(tokens + self.position_embedding)


class Vision(nn.Module):
    """Pixels (B, 3, H, W) to states (B, P, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = VisionEmbeddings(width, config.image_size, config.patch_size, eps)
        layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder: Any = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(width, eps)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.embeddings(pixels)
        for layer in self.encoder["layers"]:
            hidden = layer(hidden)
        return self.post_layernorm(hidden)


class QueryAttention(nn.Module):
    """Queries (B, Q, D) look at themselves and at the patches; both have fixed positions, stored with the weights."""

    q_pos_embed: Tensor
    k_pos_embed: Tensor

    def __init__(self, width: int, seen: int, queries: int, grid: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(seen, width), nn.Linear(seen, width)
        self.register_buffer("q_pos_embed", torch.zeros(queries, width))
        self.register_buffer("k_pos_embed", torch.zeros(grid * grid + 1, width))

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        places = torch.cat([self.q_pos_embed, self.k_pos_embed]).to(hidden.dtype)
        q, k = self.query(hidden + self.q_pos_embed.to(hidden.dtype)), self.key(seen + places)
        return attend(q, k, self.value(seen), self.heads)


class QueryMlp(nn.Module):
    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, inner), nn.Linear(inner, width), nn.Linear(width, inner)
        self.ffn_ln = nn.LayerNorm(inner, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(self.ffn_ln(F.silu(self.w1(hidden)) * self.w3(hidden)))


class QueryOutput(nn.Module):
    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.out_proj, self.norm2, self.mlp = nn.Linear(width, width), nn.LayerNorm(width), QueryMlp(width, inner, eps)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        hidden = before + self.out_proj(hidden)
        return hidden + self.mlp(self.norm2(hidden))


class QueryLayer(nn.Module):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width, seen, queries = (settings[k] for k in ("hidden_size", "encoder_hidden_size", "num_learnable_queries"))
        self.attention = QueryAttention(width, seen, queries, settings["grid_size"], settings["num_attention_heads"])
        self.output = QueryOutput(width, settings["intermediate_size"], settings["layer_norm_eps"])
        self.norm1, self.normk = nn.LayerNorm(width), nn.LayerNorm(seen)

    def forward(self, hidden: Tensor, patches: Tensor) -> Tensor:
        hidden = self.norm1(hidden)
        return self.output(self.attention(hidden, torch.cat([hidden, self.normk(patches)], dim=1)), hidden)


class Abstractor(nn.Module):
    """Patches (B, P, D) to the image's tokens (B, Q + 1, the language model's width)."""

    def __init__(self, settings: Mapping[str, Any], words: int) -> None:
        super().__init__()
        depth = settings["num_hidden_layers"]
        layers = (nn.ModuleDict({"crossattention": QueryLayer(settings)}) for _ in range(depth))
        self.encoder: Any = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.visual_fc = nn.Linear(settings["hidden_size"], words)
        self.query_embeds = nn.Parameter(torch.zeros(1, settings["num_learnable_queries"], settings["hidden_size"]))
        self.vit_eos = nn.Parameter(torch.zeros(1, 1, words))

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.query_embeds.expand(len(patches), -1, -1)
        for layer in self.encoder["layers"]:
            hidden = layer["crossattention"](hidden, patches)
        return torch.cat([self.visual_fc(hidden), self.vit_eos.expand(len(patches), -1, -1)], dim=1)


class MplugOwl2(LlamaForCausalLM):
    """`config`: the checkpoint's, as a `LlamaConfig`, with `visual_config`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        visual: Any = config.visual_config  # type: ignore[attr-defined]
        seen = VISION | visual["visual_model"]
        self.span = span = Span()
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            for name in ("k_proj", "v_proj"):
                linear: nn.Linear = getattr(attention, name)
                sizes = (linear.in_features, linear.out_features, linear.bias is not None)
                setattr(attention, name, Multiway(partial(nn.Linear, *sizes), span))
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm: Any = type(getattr(layer, name))
                made = Multiway(partial(norm, config.hidden_size, eps=config.rms_norm_eps), span)
                setattr(layer, name, made)
        self.model.vision_model = Vision(CLIPVisionConfig(**{key: seen[key] for key in VISION}))
        self.model.visual_abstractor = Abstractor(ABSTRACTOR | visual["visual_abstractor"], config.hidden_size)
        self.post_init()

    def next_word(self, before: Tensor, pixels: Tensor, after: Tensor) -> Tensor:
        """Logits (B, V) of the word that follows the words `before` (L,), the image and the words `after` (M,)."""
        model: Any = self.model
        images = model.visual_abstractor(model.vision_model(pixels))
        first, last = (model.embed_tokens(words).expand(len(images), -1, -1) for words in (before, after))
        self.span.start, self.span.stop = first.shape[1], first.shape[1] + images.shape[1]
        return self(inputs_embeds=torch.cat([first, images, last], dim=1), use_cache=False, logits_to_keep=1).logits[
            :, -1
        ]
