"""What was counted is not counted again: configs of one model share its network, and phases alike share one count."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffrl.config import Config
from diffrl.memory.meta_modules import bytes_of, counting, kind_of, meta_backbone, with_lora
from diffrl.memory.step_profile import Count, Keyed, StepProfile
from diffrl.policy import PRECISIONS


class MetaModel:
    """A model without weights under its trained LoRA, and what was counted of it.

    Bytes: `network` of the frozen one, `block` of the largest of its blocks that FSDP2 gathers whole, `autoencoder`,
    `encoders`; `lora`; `read`: of all of them as they lie on the disk. tables: numbers in the network's buffers.
    """

    def __init__(self, config: Config) -> None:
        self.backbone = meta_backbone(config)
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
        self._counts = dict[Hashable, Count]()  # by what they depend on

    def merged(self) -> list[Tensor]:
        """Weights with the LoRA in them, as rollouts keep them; without values."""
        if self._merged is None:
            self.fused.merging = True
            with self._counting():
                self._merged = self.fused.prepare(self._precision)
        return self._merged

    def count(self, phases: StepProfile, keyed: Keyed, merging: bool = True) -> Count:
        """See `StepProfile.count`; not anew where it was counted before.

        Args:
            phases: whose `keyed` it is, on this backbone.
            merging: whether rollouts merge the LoRA into the weights.
        """
        kept = self.merged() if merging else []
        # In few bits nothing is merged either way.
        key = (keyed.key, keyed.rows, bool(kept))
        if keyed.key is None or key not in self._counts:
            self._prepare(phases.config.optimise.gradient_checkpointing, merging, bool(kept))
            with self._counting():
                self._counts[key] = phases.count(keyed.phase, kept)
        return self._counts[key]

    def _prepare(self, recompute: bool, merging: bool, kept: bool) -> None:
        """Put the modules into the state of a config; another one may have used them before."""
        self.fused.merging = merging
        vae = self.backbone.vae
        for module in (
            (self.backbone.network, vae) if vae._supports_gradient_checkpointing else (self.backbone.network,)
        ):
            module.enable_gradient_checkpointing() if recompute else module.disable_gradient_checkpointing()
        if not kept:
            self.fused.forget()  # a LoRA that was trained meanwhile is cast again
            if self._merged:
                self._merged = None  # forgotten, too

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with counting(self.backbone, self._mode) as self._mode:
            yield


class Counted:
    """The models of the configs that are looked at one after the other."""

    def __init__(self) -> None:
        self._models = dict[Any, MetaModel]()

    def hollow(self, config: Config) -> MetaModel:
        """The config's model; one that configs before it have, too, is theirs."""
        key = kind_of(config)
        if key not in self._models:
            self._models[key] = MetaModel(config)
        return self._models[key]
