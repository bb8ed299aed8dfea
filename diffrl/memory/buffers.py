"""What an epoch keeps on the device beside the modules: latents, stored steps, gradients of each reward, images.

Bytes for `diffrl doctor`, from a config and shapes alone. Symbols: n images of this process, (C, h, w) of a latent, all
of them float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from diffrl.config import Config
from diffrl.objectives.objective import Objective
from diffrl.rewards.beside import QUEUED

DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Held:
    """Bytes: `always` from the rollout to the epoch's end; the others on top of a phase's own peak."""

    always: int
    sampling: int
    decoding: int
    training: int


def held(config: Config, backbone: Any, objective: Objective, lora: int, text: int, world: int = 1) -> Held:
    """Of one process of `world`.

    Args:
        lora: bytes of one LoRA.
        text: bytes of one prompt's conditioning.
    """
    rollout, (channels, height, width) = config.rollout, backbone.latent_shape
    latent = 4 * channels * height * width
    images = -(-rollout.images // world)
    steps = config.objective_section.trained_steps(rollout) if objective.keep_trajectory else 0
    if objective.keep_trajectory == "path":
        steps = rollout.steps
    apart = objective.credit is not None and objective.credit.plan(rollout).apart
    states = (2 * steps if apart else steps + 1) if objective.keep_trajectory else 0
    always = images * latent * (1 + states) + -(-rollout.groups // world) * text
    drawn = max(images, -(-rollout.candidates // world))
    batch = min(rollout.batch_size, drawn)
    noise = rollout.stochastic_steps
    picture = 12 * height * width * backbone.scale**2
    batches = -(-drawn // batch)
    waiting = (min(batches, QUEUED + 1) - 1) * batch * picture
    return Held(
        always=always,
        sampling=waiting + batch * latent * (noise + states),
        decoding=waiting + batch * (picture + latent),
        training=_training(config, objective, lora, latent, world),
    )


def _training(config: Config, objective: Objective, lora: int, latent: int, world: int) -> int:
    """A gradient for each column of rewards and one for what they share; references of a step's rows."""
    bank = 0
    if objective.rule.each:
        columns = len(config.rewards) + (objective.rule.total is not None)
        bank = (columns + (objective.basis is not None)) * lora
    rows = config.optimise.batch_size // world * config.objective_section.trained_steps(config.rollout)
    anchors = int(objective.penalty.kept * rows) * 3 * latent  # x0, eps and v
    return bank + anchors


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered and not yet freed; `peak` is the most at a time.

    `operations`: floating-point ones, as torch counts them: those of products and attention, all else is little.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.operations = 0
        self._sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}  # there before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and (known := getattr(args[0], "fake_device", None)) is not None:
            return known  # of fake tensors it is asked twice as often as all else is done, and nothing is made
        made = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=made)
        for tensor in (made,) if isinstance(made, Tensor) else tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, bytes are counted, and no operations."""
        before = self.operations
        yield
        self.operations = before

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
