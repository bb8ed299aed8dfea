"""What the families of pipelines share: how they are read, their sizes and schedules, the layers that get a LoRA."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from diffrl.errors import UserError, foreign, in_one_line

# Joint attention's projections of image and text; Flow-GRPO's choice for SD3.5 (2505.05470).
JOINT_ATTENTION = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)


# A model folder's own settings: {"max_sequence_length": 0}. Without a T5 diffusers puts that many zero tokens in SD3's
# text (256 unless told), which cost time and change the picture; the number belongs to the model, so it lies with it.
SETTINGS = "diffrl.json"


def settings_of(source: str) -> dict[str, Any]:
    """What a local model folder records for its policy in `diffrl.json`; nothing for hub ids and other folders."""
    path = Path(source) / SETTINGS
    if not path.is_file():
        return {}
    with foreign(path):
        return dict(json.loads(path.read_text()))


Resolution = int | tuple[int, int] | None  # side of square pictures, or (width, height); None: the model's own


def latent_size(resolution: Resolution, default: int, scale: int, patch: int = 1) -> tuple[int, int]:
    """Height and width of the latents, for a resolution in pixels or the model's own `default` latent side.

    Args:
        scale: pixels per side of one latent.
        patch: latents per side of one token of the network.

    Raises:
        UserError: if the resolution is not a multiple of what autoencoder and patches need.
    """
    if resolution is None:
        return default, default
    width, height = (resolution, resolution) if isinstance(resolution, int) else resolution
    step = scale * patch
    for pixels in (width, height):
        if pixels <= 0 or pixels % step:
            near = max(round(pixels / step), 1) * step
            raise UserError(f"rollout.resolution: {pixels} pixels is not a multiple of {step} (nearest: {near})")
    return height // scale, width // scale


def schedule_shift(config: Mapping[str, Any], tokens: int, max_shift: float) -> float:
    """The `mu` of a scheduler that shifts by the number of image tokens, as the pipelines compute it.

    `max_shift`: the family's, where the scheduler's config names none.
    """
    # Of FLUX's pipeline, with which all of CLIP and T5 is imported: a quarter of a process's start.
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


def load_pipeline(pipeline: Any, source: str, index: Mapping[str, Any], dtype: torch.dtype, **more: Any) -> Any:
    """`pipeline.from_pretrained(source)`, on the CPU, in `dtype`; the autoencoder in fp32 if its config says so."""
    from diffrl.hub import pinned
    from diffrl.policy.files import check_words, load_parts, refuse_missing, refuse_quantised, types_of

    refuse_missing(index, pipeline)
    types = types_of(source, index, dtype)
    folder, (where, at) = Path(source), pinned(source)
    if "_form" in index:
        more |= index["_form"].load(source, index, types)
    beside = {name: entry for name, entry in index.items() if name not in more}
    refuse_quantised(source, beside)
    # A folder saved without, say, a T5 records it as [null, null]; diffusers still wants to be told.
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None} | more
    local = folder.is_dir()
    with without_bars() if local else nullcontext():
        try:
            if not local:
                folder = Path(pipeline.download(where, use_safetensors=True, **at, **absent))
            absent |= load_parts(folder, beside, types)
            pipe = pipeline.from_pretrained(folder, dtype=types, use_safetensors=True, **absent)
        except (OSError, SafetensorError, UserError):
            raise
        except Exception as error:  # of libraries, on files that may be anybody's
            raise UserError(f'model: "{source}" cannot be loaded: {in_one_line(error, most=200)}') from None
    check_words(folder, pipe)
    return pipe


def set_text_length(backbone: Any, tokens: int) -> None:
    """Have the backbone encode prompts as its pipeline does with `max_sequence_length=tokens`.

    UserError: the pipeline takes no such number (CLIP alone reads what it was trained on), or a smaller one.
    """
    most = getattr(backbone, "longest_text", None)  # that the pipeline's own checks let pass
    if "max_sequence_length" not in backbone.plain_call:
        raise UserError(
            "text_length: this model's pipeline takes none, what it reads of a prompt is fixed; leave the key out"
        )
    if most is not None and tokens > most:
        raise UserError(f"text_length: {tokens} tokens, but this model's pipeline reads at most {most}")
    backbone.max_length = tokens
    backbone.plain_call = {**backbone.plain_call, "max_sequence_length": tokens}


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars: reading a local folder takes a moment, and a dozen bars would bury a run's own output."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()
