"""`direct.decode_chunk` asks only autoencoders that can recompute, and the others are left as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import AutoencoderKL, AutoencoderKLQwenImage

from diffrl.methods.direct.objective import Direct


@pytest.mark.parametrize(("asked", "expected"), [(True, True), (False, False)])
def test_an_autoencoder_that_can_recompute_is_asked_to(asked: bool, expected: bool) -> None:
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1)
    policy: Any = SimpleNamespace(vae=vae)
    Direct(beta=0.0, timesteps=1, guidance_scale=1.0, decode_chunk=1 if asked else None).before_step(
        policy,
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    assert vae.is_gradient_checkpointing == expected


def test_qwen_images_which_cannot_is_not() -> None:
    """diffusers' `enable_gradient_checkpointing` raises for it."""
    assert not AutoencoderKLQwenImage._supports_gradient_checkpointing
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=2, dim_mult=[1], num_res_blocks=1, temperal_downsample=[])
    with pytest.raises(ValueError, match="gradient checkpointing"):
        vae.enable_gradient_checkpointing()
    policy: Any = SimpleNamespace(vae=vae)
    Direct(beta=0.0, timesteps=1, guidance_scale=1.0, decode_chunk=1).before_step(
        policy,
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    assert not vae.is_gradient_checkpointing
