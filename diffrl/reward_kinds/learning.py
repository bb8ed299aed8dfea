"""Rewards that learn while the policy trains: a small module with its own optimiser beside the LoRA.

A reward with the ability `learns` is asked for two things beside its scores. `observe` sees the training images of an
epoch, batch by batch, each right after it was scored. `learn`, once an epoch and on every process, takes its optimiser
steps on what was observed. So an epoch's scores all come from one state, and the next epoch's from the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from diffrl.rewards.kinds import Asked
from diffrl.rewards.protocol import Metadata, Reward, Wrapper, ability

Reduce = Callable[[Tensor], Tensor]


class Learning(Reward, Protocol):
    """The protocol of a reward with `learns = True`."""

    first: Reward | None
    """A frozen copy as it was after the first `learn`, by which epochs can be compared: the yardstick itself moves."""

    def observe(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], keys: Sequence[int]
    ) -> None:
        """Images (B, 3, H, W) in [0, 1] that train; the call before scored just these.

        `keys`: a number of each image, the same on any number of processes, from which its random choices are drawn.
        """
        ...

    def learn(self, reduce: Reduce) -> Mapping[str, float]:
        """Learn from what was observed since the last time; figures for `metrics.jsonl`.

        `reduce`: sums a tensor over all processes. Each of them calls `learn`, with images or without, and `reduce`
        as often as the others.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All that later scores depend on, by flat names."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class FrozenAfterWarmStart(Wrapper):
    """A reward that learns as it was after it had learned for the first time: `REWARD_first` among the judges of
    held-out images, since its own scores move."""

    reward: Learning

    def applies(self, prompt: str, metadata: Metadata) -> bool:
        """Where the reward itself applies, once it has learned."""
        asked = ability(self.reward, "applies")
        return self.reward.first is not None and (asked is None or asked(prompt, metadata))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        assert self.reward.first is not None, "it does not apply before"
        return self.reward.first(images, prompts, metadata)


class Observing(Asked):
    """Shown what trains, and judged by its first state, too."""

    observes, fixed = True, "learns, so it changes while it trains"

    @staticmethod
    def judges(reward: Any) -> Mapping[str, Reward]:
        """`NAME_first`."""
        return {"first": FrozenAfterWarmStart(reward)}

    def observe(self, *shown: Any) -> None:
        """As `Learning.observe`."""
        self.reward.observe(*shown)


class Learner:
    """A module with its Adam: one step on the mean loss over the images of all processes.

    Every process holds the same module and takes the same step, since losses and gradients are summed over them.
    """

    def __init__(self, module: nn.Module, learning_rate: float, betas: tuple[float, float]) -> None:
        self.module, self.first = module, copy.deepcopy(module).requires_grad_(False)
        self.met = False  # whether `first` has learned
        self.parameters = list(module.parameters())
        self.optimiser = torch.optim.Adam(self.parameters, lr=learning_rate, betas=betas)

    def step(self, totals: Iterable[Tensor], count: int, reduce: Reduce, *, some: bool = False) -> Tensor:
        """`totals`: sums () over parts of the losses of `count` images here, each with its graph, of which only one at
        a time is kept; returns the mean over all, ().

        Without an image anywhere nothing is updated. `some`: there is one, so the host need not wait for the device.
        """
        loss, gradients = self.parameters[0].new_zeros(()), [torch.zeros_like(p) for p in self.parameters]
        for total in totals:
            loss = loss + total.detach()
            for whole, part in zip(gradients, torch.autograd.grad(total, self.parameters), strict=True):
                whole += part
        sums = reduce(torch.cat([loss.view(1), loss.new_full((1,), count), *(g.flatten() for g in gradients)]))
        loss, images, flat = sums[0], sums[1], sums[2:]
        if some or float(images) > 0:
            parts = flat.div(images).split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
        return loss / images.clamp(min=1)

    def remember(self) -> None:
        """After the first steps: `first` is what the module is now."""
        if not self.met:
            self.first.load_state_dict(self.module.state_dict())
            self.met = True

    def state_dict(self) -> dict[str, Tensor]:
        """Module, its first state once there is one, and Adam's moments."""
        modules = {"module": self.module} | ({"first": self.first} if self.met else {})
        state = {f"{kind}.{name}": tensor for kind, one in modules.items() for name, tensor in one.state_dict().items()}
        for index, parameter in enumerate(self.parameters):
            moments = self.optimiser.state.get(parameter, {})
            state |= {f"adam.{index}.{name}": tensor for name, tensor in moments.items()}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; KeyError or RuntimeError for another module's."""
        self.module.load_state_dict(_under(state, "module."))
        self.met = any(name.startswith("first.") for name in state)
        self.first.load_state_dict(_under(state, "first.") if self.met else self.module.state_dict())
        self.optimiser.state.clear()
        for index, parameter in enumerate(self.parameters):
            if moments := _under(state, f"adam.{index}."):
                kept = {name: t.to(parameter.device if t.ndim else "cpu", copy=True) for name, t in moments.items()}
                self.optimiser.state[parameter] = kept


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def of(rewards: Mapping[str, Reward]) -> dict[str, Learning]:
    """Those that learn, by name."""
    return {name: cast(Learning, reward) for name, reward in rewards.items() if ability(reward, "learns")}


def states(rewards: Mapping[str, Learning]) -> dict[str, Tensor]:
    """The states of all of them as `REWARD/NAME`, for a checkpoint."""
    return {f"{name}/{key}": t for name, reward in rewards.items() for key, t in reward.state_dict().items()}


def restore(rewards: Mapping[str, Learning], state: Mapping[str, Tensor]) -> None:
    """The inverse of `states`."""
    for name, reward in rewards.items():
        reward.load_state_dict(_under(state, f"{name}/"))
