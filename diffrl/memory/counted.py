"""What was counted is not counted again: configs of one model share its network, and phases alike share one count."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffrl.config import Config
from diffrl.memory.hollow import bytes_of, counting, hollow_backbone, kind_of, with_lora
from diffrl.memory.phases import Phase, Phases
from diffrl.policy import PRECISIONS


class Hollow:
    """A model without weights under its trained LoRA, and what was counted of it.

    Bytes: `network` of the frozen one, `block` of the largest of its blocks that FSDP2 gathers whole, `autoencoder`,
    `encoders`; `lora`; `read`: of all of them as they lie on the disk. tables: numbers in the network's buffers.
    """

    def __init__(self, config: Config) -> None:
        self.backbone = hollow_backbone(config)
        # In few bits the network takes as much, too: what is read is the full one.
        network, whole = self.backbone.network, bytes_of(self.backbone.network)
        self.autoencoder, self.encoders = bytes_of(self.backbone.vae), sum(map(bytes_of, self.backbone.text_encoders))
        self.read = whole + self.autoencoder + self.encoders
        self.lora, self.fused = with_lora(self.backbone, config)
        self.network = bytes_of(network) - self.lora
        kinds = getattr(network, "_no_split_modules", None) or ()
        self.block = max((bytes_of(part) for part in network.modules() if type(part).__name__ in kinds), default=0)
        self.tables = sum(buffer.numel() for buffer in network.buffers() if buffer.is_floating_point())
        self._precision = PRECISIONS[config.optimise.precision]
        self._mode: FakeTensorMode | None = None
        self._merged: list[Tensor] | None = None
        self._counts = dict[Hashable, tuple[int, int]]()

    def merged(self) -> list[Tensor]:
        """Weights with the LoRA in them, as rollouts keep them; without values."""
        if self._merged is None:
            self.fused.merging = True
            with self._counting():
                self._merged = self.fused.prepare(self._precision)
        return self._merged

    def count(self, phases: Phases, phase: Phase, key: Hashable, merging: bool = True) -> tuple[int, int]:
        """Bytes and operations, see `Phases.count`.

        Args:
            phases: whose `phase` it is, on this backbone.
            key: what it depends on beside the model: with the same one it is counted once. None: it is counted anew.
            merging: whether rollouts merge the LoRA into the weights.
        """
        kept = self.merged() if merging else []
        key = None if key is None else (key, bool(kept))  # in few bits nothing is merged either way
        if key in self._counts:
            return self._counts[key]
        recompute = phases.config.optimise.gradient_checkpointing
        self.fused.merging = merging
        for module in (self.backbone.network, self.backbone.vae):
            if recompute and (module is self.backbone.network or module._supports_gradient_checkpointing):
                module.enable_gradient_checkpointing()
            elif getattr(module, "_supports_gradient_checkpointing", False):
                module.disable_gradient_checkpointing()
        if not kept:
            self.fused.forget()  # a LoRA that was trained meanwhile is cast again
            self._merged = None if self._merged else self._merged
        with self._counting():
            found = phases.count(phase, kept)
        if key is not None:
            self._counts[key] = found
        return found

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with counting(self.backbone, self._mode) as self._mode:
            yield


class Counted:
    """The models of the configs that are looked at one after the other."""

    def __init__(self) -> None:
        self._models = dict[Any, Hollow]()

    def hollow(self, config: Config) -> Hollow:
        """The config's model; one that configs before it have, too, is theirs."""
        key = kind_of(config)
        if key not in self._models:
            self._models[key] = Hollow(config)
        return self._models[key]
