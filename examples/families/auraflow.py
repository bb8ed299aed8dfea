"""AuraFlow, as a family of one's own: a plugin outside the package, written by the page "Add a model".

python examples/families/auraflow.py tiny-auraflow
diffrl models check tiny-auraflow --family examples/families/auraflow.py:AuraFlow --resolution 16
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning


class AuraFlow(Family):
    """The network takes no mask, so texts keep their padding; the schedule is the scheduler's own levels."""

    text_length = 256
    known = (Known("fal/AuraFlow-v0.3", 50, 3.5),)

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        words = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        embeds, *_ = self.pipe.encode_prompt([prompt], device=device, **words)
        return Conditioning(embeds, embeds.new_zeros(1, 0))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        x = x_t.to(cond.embeds.dtype)
        return network(x, encoder_hidden_states=cond.embeds, timestep=t, return_dict=False)[0]

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(steps, device="cpu")
        return scheduler.sigmas.float()


def tiny(folder: Path, length: int = 32) -> int:
    """Save a random pipeline of the true classes, 60,000 parameters; texts are padded to `length` tokens.

    Returns the side of its pictures in pixels.
    """
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # whose tiny pipelines share parts with this one
    from tiny_models.classic import WIDTH, image_vae, spread, t5_encoder

    torch.manual_seed(0)
    _, tokenizer = t5_encoder()
    sizes = {"d_model": 2 * WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=len(tokenizer), **sizes))
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    for module in (encoder, transformer):
        spread(module)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73)
    parts = {"text_encoder": encoder, "tokenizer": tokenizer, "transformer": transformer, "scheduler": scheduler}
    diffusers.AuraFlowPipeline(**parts, vae=image_vae()).save_pretrained(folder)
    (folder / "diffrl.json").write_text(json.dumps({"max_sequence_length": length}))
    return 16
