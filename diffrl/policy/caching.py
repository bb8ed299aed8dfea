"""Cheaper rollouts: diffusers' own caches leave out parts of a network in steps that change little.

For objectives that train on images noised again (NFT, CRD, ...): what they see is what was drawn, however it was drawn.
Never for those that train on the rollout's own steps, whose log-probabilities a cache would change.

A cache is put in for one batch of a rollout and taken out behind it, so nothing of it is in training, in evaluations or
in the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers import CacheMixin
from torch import nn

from diffrl.errors import UserError


@dataclass(frozen=True)
class CacheSpec:
    """Which cache, and how much it leaves out; the fields are those of the config's `rollout.cache`."""

    kind: str
    interval: int = 2
    warmup: int = 2


class _Blocks(nn.Module, CacheMixin):
    """The network's lists of blocks under their own names, with diffusers' caching: not all its networks have that."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        for name, child in network.named_children():
            if isinstance(child, nn.ModuleList):
                self.add_module(name, child)

    @property
    def hooked(self) -> bool:
        registries = (getattr(module, "_diffusers_hook", None) for module in self.modules() if module is not self)
        return any(registry is not None and registry.hooks for registry in registries)


class RolloutCache:
    """One network's cache; `batch` puts it in."""

    def __init__(self, network: nn.Module, spec: CacheSpec) -> None:
        self.network, self.spec = network, spec
        self._blocks: Any = _Blocks(network)  # diffusers' mixin has no types
        self._level: Callable[[], float] = lambda: 1.0

    @contextmanager
    def batch(self, levels: Sequence[float]) -> Iterator[None]:
        """Inside, the network's n-th forward is the step from levels[n] of one and the same batch."""
        step = -1

        def count(*ignored: Any) -> None:
            nonlocal step
            step += 1

        self._level = lambda: levels[min(max(step, 0), len(levels) - 1)]
        counting = self.network.register_forward_pre_hook(count)
        self._blocks.enable_cache(self._config(levels))
        try:
            with self._blocks.cache_context("rollout"):
                yield
        finally:
            self._blocks.disable_cache()
            counting.remove()

    def _config(self, levels: Sequence[float]) -> Any:
        """Diffusers' own."""
        spec, steps = self.spec, len(levels) - 1
        if spec.kind == "taylorseer":
            dtype = next(self.network.parameters()).dtype
            return diffusers.TaylorSeerCacheConfig(
                cache_interval=spec.interval, disable_cache_before_step=spec.warmup, taylor_factors_dtype=dtype
            )
        if spec.kind == "pyramid":
            # Whole steps are those above the level of the last one that must be whole; 1000 is diffusers' unit.
            top = int(1000 * levels[min(spec.warmup - 1, steps - 1)])
            return diffusers.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=spec.interval,
                spatial_attention_timestep_skip_range=(-1, top),
                current_timestep_callback=lambda: int(1000 * self._level()),
            )
        raise UserError(f'rollout.cache.kind: "{spec.kind}" is neither taylorseer nor pyramid')

    def check(self, forward: Callable[[float], object], levels: Sequence[float]) -> None:
        """Try it, `forward(level)` running the network on one row. UserError where this network cannot be cached."""
        name = type(self.network).__name__
        try:
            with self.batch(levels):
                if not self._blocks.hooked:
                    raise ValueError("it has no attention of diffusers' in a list of blocks")
                for level in levels[:-1]:
                    forward(level)
        except (ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f'rollout.cache: "{self.spec.kind}" does not work with {name} ({reason})') from error
