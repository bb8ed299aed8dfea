"""Rewards whose weights wait in main memory while the network is optimised.

They come by phases: copied to the device by a phase's first call, beside the sampling of the next batch where rewards
have a thread of their own, and dropped at its end (`Scorer.finish`). Nothing is carried back: they are frozen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.rewards.protocol import Metadata, Reward, Wrapper, ability


class Offloaded(Wrapper):
    """The reward's weights are on its device from a call until `leave`, else in main memory alone.

    apart: the network makes room for its calls, see `Scorer.finish`. seconds: that copying took since it was last set
    to 0; bytes: of the weights. Raises `UserError` if there are no weights to move.
    """

    moves = True

    def __init__(self, reward: Reward, apart: bool = False) -> None:
        super().__init__(reward)
        self.apart, self.seconds = apart, 0.0
        self.modules = modules_of(reward)
        if self.device is None or not self.modules:
            lack = "no torch modules" if self.device is not None else "no `device`"
            raise UserError(f'reward "{reward.name}" has {lack}, so nothing of it can be offloaded')
        self._to("cpu")
        self._homes: list[tuple[dict[str, Any], str, Tensor]] = [
            (table, name, tensor)
            for module in (part for whole in self.modules for part in whole.modules())
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]
        tensors = {id(tensor): tensor for _, _, tensor in self._homes}.values()
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        # Weights that are more than their numbers (4 bits with scales aside) know themselves how they move.
        self._plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """The reward's own scores (B,)."""
        self._come()
        with torch.no_grad():  # a graph would need the weights where they no longer are
            return self.reward(images, prompts, metadata)

    def _come(self) -> None:
        """Asked anew each time: another reward that shares the weights may have sent them away."""
        place, mark = torch.device(self.device), time.perf_counter()
        if all(table[name].device.type == place.type for table, name, _ in self._homes):
            return
        if not self._plain:
            self._to(place)
        elif place.type == "cuda":
            # On a stream of its own: on the common one the copies would stand in line behind the sampling.
            with torch.cuda.stream(stream := torch.cuda.Stream(place)):
                self._copy(place)
            stream.synchronize()
        else:
            self._copy(place)
        self.seconds += time.perf_counter() - mark

    def _copy(self, place: torch.device) -> None:
        from diffrl.policy.exchange import exchange  # with diffusers, which a reward alone does not need

        exchange(self.modules, lambda tensor: tensor.to(place, non_blocking=True))

    def leave(self) -> None:
        """The device's copies are dropped; scores must have been read."""
        mark = time.perf_counter()
        if not self._plain:
            self._to("cpu")
        for table, name, tensor in self._homes if self._plain else ():
            table[name] = tensor
        self.seconds += time.perf_counter() - mark

    def check_shared(self, name: str, others: Mapping[str, Reward]) -> None:
        """Weights that two rewards share are offloaded by both or by neither: one would miss them while it is called.

        others: those that stay on their devices. UserError where one of them has some of the weights of `name`.
        """
        owner = {id(module): other for other, reward in others.items() for module in modules_of(reward)}
        for module in self.modules:
            if id(module) in owner:
                text = f'its weights are shared with "{owner[id(module)]}"; offload both or neither'
                raise UserError(f"{name}: offload: {text}")

    def _to(self, device: Any) -> None:
        for module in self.modules:
            module.to(device)


def modules_of(thing: object, depth: int = 3) -> list[nn.Module]:
    """The torch modules in an object's attributes, and in theirs, down to `depth`; each once, outermost only."""
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def walk(value: object, left: int) -> None:
        if isinstance(value, nn.Module):
            modules[id(value)] = value
        elif left and id(value) not in seen:
            seen.add(id(value))
            inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            for part in [*inner, *getattr(value, "__dict__", {}).values()]:
                walk(part, left - 1)

    walk(thing, depth)
    return list(modules.values())


def offload(reward: Reward, asked: bool | str, entry: object) -> Reward:
    """The option `offload: true` or `apart`. On the CPU, and on an Apple device, whose memory is the CPU's, there is
    nothing to offload."""
    device = ability(reward, "device")
    here = device is not None and torch.device(device).type in ("cpu", "mps")
    return reward if here else Offloaded(reward, asked == "apart")
