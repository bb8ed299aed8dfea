"""What the section `engine` says of the network, the autoencoder and the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from diffrl.config import Config
from diffrl.config.reward import Watched
from diffrl.errors import UserError
from diffrl.policy import Policy
from diffrl.policy.cpu_workarounds import keep_pages

log = logging.getLogger("diffrl")


def set_deterministic(asked: bool) -> None:
    """Kernels that give the same bits each time, where torch has them; an operation that has none raises."""
    if asked:  # cuBLAS reads it at its first product, which is after this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(asked)


def prepare_engine(config: Config, policy: Policy) -> None:
    """What the section `engine` says of the network and the autoencoder. Raises UserError for what cannot run here."""
    network: Any = policy.backbone.network
    policy.decoded = config.engine.decode
    if policy.sharded and (asked := _apart(config)):
        raise UserError(f"{asked[0]}: apart moves a whole network, and FSDP2 leaves a share of it; leave it out")
    if config.engine.encoders == "apart":
        policy.texts.room = policy.offloaded
    if config.engine.attention != "native":
        from diffrl.policy.engine import set_attention

        set_attention(network, config.engine.attention)
    if config.engine.tile_vae:
        policy.vae.enable_tiling()
    if config.engine.compile:
        from diffrl.policy.engine import compile_blocks

        compile_blocks(network)
    if policy.device.type == "cpu":
        keep_pages()
        # Blocks that are recomputed or compiled run outside of where the mode could see their attention.
        plain = not (config.optimise.gradient_checkpointing or config.engine.compile)
        policy.wide_attention = config.optimise.precision == "bf16" and plain
    elif policy.device.type == "cuda":
        tf32 = config.engine.tf32
        if tf32 is None:
            tf32 = config.optimise.precision != "fp32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32  # torch's own default is on, for convolutions alone
    set_deterministic(config.engine.deterministic)


def _apart(config: Config) -> list[str]:
    """The keys for whose sake the network leaves the device for a while."""
    tables: dict[str, Mapping[str, Watched]] = {"rewards": config.rewards, "watch": config.watch}
    rewards = [f"{t}.{n}.offload" for t, table in tables.items() for n, one in table.items() if one.offload == "apart"]
    return [*(["engine.encoders"] if config.engine.encoders == "apart" else []), *rewards]


def check_device(config: Config, device: torch.device) -> None:
    """UserError for what this device cannot do, or what was never tried there."""
    if text := config.engine.refusal_of_base(config.optimise.precision, device.type):
        raise UserError(f"engine.base: {text}")
    if device.type == "mps" and config.engine.optimiser == "adamw8bit":
        raise UserError('engine.optimiser: "adamw8bit" is not available on an Apple device (MPS); use adamw')
