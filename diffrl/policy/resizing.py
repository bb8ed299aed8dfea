"""A policy at another size of pictures (`evaluate.resolution`): the same modules, other latents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffrl.errors import UserError
from diffrl.policy.backbone import Backbone
from diffrl.policy.base import Policy
from diffrl.policy.pipelines import Resolution


def resized(backbone: Any, resolution: Resolution, key: str) -> Any:
    """The backbone at this size; None for None.

    Raises:
        UserError: naming the config's `key`: the model cannot draw at that size, or the family at one only.
    """
    if resolution is None:
        return None
    if not hasattr(backbone, "resized"):
        name = type(backbone).__name__
        raise UserError(f"{key}: {name} has no method `resized`, which every diffrl.families.family.Family has")
    try:
        return backbone.resized(resolution)
    except UserError as error:
        raise UserError(f"{key}: {str(error).removeprefix('rollout.resolution: ')}") from None


@contextmanager
def drawing_at(policy: Policy, backbone: Backbone | None) -> Iterator[None]:
    """Inside, the policy draws at the size of `backbone`, a `resized` one; None: at its own."""
    own = policy.backbone
    if backbone is not None:
        policy.backbone, policy.latent_shape = backbone, backbone.latent_shape
    try:
        yield
    finally:
        policy.backbone, policy.latent_shape = own, own.latent_shape
