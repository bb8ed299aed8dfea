"""Where an epoch's seconds go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffrl.records.progress import PHASES

if TYPE_CHECKING:
    from diffrl.policy import Policy


@dataclass
class Clock:
    """Seconds by phase. On an accelerator the host runs ahead, so only whole phases are meaningful there."""

    seconds: dict[str, float] = field(default_factory=dict)
    forwards: int = 0  # since `watch`: of the network, counted in rows of images; see there

    def add(self, name: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        return now

    def spent(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def watch(self, policy: Policy) -> None:
        """Add the seconds of the policy's forwards and decodes from now on, and count the forwards.

        A row of an image counts one, under guidance that runs the empty prompt beside it two. One with gradient counts
        three times as much: its backward costs about two forwards. What is computed again for it is not counted.
        """

        def timed(function: Any, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                mark = time.perf_counter()
                result = function(*args, **kwargs)
                self.add(name, mark)
                if name == "forward":
                    self._count(policy, result.v, kwargs.get("guidance", args[3] if len(args) > 3 else 1.0))
                return result

            return call

        policy.predict = timed(policy.predict, "forward")  # type: ignore[method-assign]
        policy.decode = timed(policy.decode, "decode")  # type: ignore[method-assign]

    def _count(self, policy: Policy, v: Tensor, guidance: float) -> None:
        rows = len(v) * (2 if guidance != 1.0 and policy.backbone.classifier_free else 1)
        self.forwards += rows * (3 if v.requires_grad else 1)


def split_epoch(
    seconds: Mapping[str, float], total: float, *, on_cpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """An epoch's phases, from what a `Clock` took and the `total`; and their entries in `metrics.jsonl`.

    On a CPU with two entries more: "model", its forwards and backwards and the VAE, and "overhead", the loop's own
    cost, which is what remains of the total without rewards and waiting.
    """
    parts = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    parts["rollout"] = seconds.get("rollout+reward", 0.0) - parts["reward"]
    waiting = parts["wait"] + parts["reduce"]
    parts["optimise"] -= waiting
    named = {"seconds": total} | {f"seconds/{phase}": parts[phase] for phase in ("rollout", "reward", "optimise")}
    if on_cpu:
        model = sum(seconds.get(part, 0.0) for part in ("forward", "backward", "decode"))
        named |= {"seconds/model": model, "seconds/overhead": total - model - parts["reward"] - waiting}
    return parts, named


def by_process(table: Tensor) -> dict[str, float]:
    """Entries "seconds/process/RANK/PHASE" from the phases of all processes (W, 5), on the CPU."""
    return {
        f"seconds/process/{rank}/{phase}": value
        for rank, row in enumerate(table.tolist())
        for phase, value in zip(PHASES, row, strict=True)
    }
